"""The first line of a plan: tokens a day, what limits, what a user should know, and the first change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from offload.planner import memory, recommend
from offload.planner.activations import Load
from offload.planner.hardware import Hardware, described, parse_drive
from offload.planner.model_shape import Shape, from_count
from offload.planner.output import Asked, cautions, verdict
from offload.sizes import GIB, format_count, format_time


@pytest.fixture(scope="module")
def shape() -> Shape:
    return from_count(13 * 10**9, 20, 2048)


def plan(shape: Shape, machine: Hardware, load: Load, **options: Any) -> recommend.Planned:
    return recommend.plan(shape, machine, load, memory.settings(**options))


def test_the_first_line_is_the_verdict(shape: Shape) -> None:
    planned = plan(shape, described("RTX 4090", 64 * GIB, [parse_drive("7GB/s,4GB/s")]), Load(1))
    best = recommend.Change("more of something", 1.0, 2.0, "--more 2")
    line = verdict(planned, recommend.Advice((best, best._replace(words="another", gain=1.5)), 0), Asked())
    daily = format_count(planned.timing.tokens_per_second * 86400)
    assert line.startswith(f"it fits; {daily} tokens a day; NVMe limits (")
    assert line.endswith("; first change: more of something (--more 2): 2.00 times the tokens a second")
    none = verdict(planned, recommend.Advice((), 0), Asked())
    assert none.endswith("; no change that was tried is more than 5 % faster")


def test_the_first_line_names_a_drive_that_is_soon_worn_out(shape: Shape) -> None:
    planned = plan(shape, described("RTX 4090", 64 * GIB, [parse_drive("7GB/s,4GB/s")] * 2), Load(1))
    rate = planned.timing.moved.written / planned.timing.seconds
    days = 86400 * rate

    def named(asked: Asked) -> list[str]:
        return [each for each in cautions(planned, asked) if "worn out" in each]

    # Two drives without a rating are taken as two of a usual one.
    (typical,) = named(Asked())
    assert typical == f"a drive rated for 1200 TB would be worn out in {format_time(2 * 1200e12 / rate)} of training"
    (given,) = named(Asked(endurance=int(9.9 * days)))
    assert given == "the drives would be worn out in 9.9 days of training"
    assert given in verdict(planned, recommend.Advice((), 0), Asked(endurance=int(9.9 * days)))
    assert not named(Asked(endurance=int(10.1 * days)))
    # A run of known length is named if it takes more than a tenth of their life.
    day = round(86400 * planned.timing.tokens_per_second)
    assert not named(Asked(tokens=day // 2, endurance=int(9 * days)))
    (long,) = named(Asked(tokens=day, endurance=int(9 * days)))
    assert long.endswith(", and this run takes 11% of its life")


def test_the_first_line_says_that_a_run_cannot_be_resumed(shape: Shape) -> None:
    machine = described("RTX 4090", 64 * GIB, [parse_drive("7GB/s,4GB/s")])
    words = "no resume after a kill (durability none)"
    assert words in cautions(plan(shape, machine, Load(1), durability="none"), Asked())
    assert words not in cautions(plan(shape, machine, Load(1)), Asked())


def test_the_first_line_says_that_the_probe_was_disturbed(shape: Shape) -> None:
    doubts = ("memory: 2 GB/s at the beginning of the probe", "other processes took 60% of the cores during the probe")
    machine = replace(described("RTX 4090", 64 * GIB, [parse_drive("7GB/s,4GB/s")]), doubts=doubts)
    assert cautions(plan(shape, machine, Load(1)), Asked())[0] == doubts[-1]
