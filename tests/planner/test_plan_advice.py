"""A plan places states where they fit, and its advice is a prediction of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from offload.errors import BudgetError, ConfigError
from offload.planner import activations, memory, recommend
from offload.planner.activations import Load
from offload.planner.hardware import Hardware, described, parse_drive
from offload.planner.model_shape import Shape, from_count
from offload.sizes import GIB, MIB


@pytest.fixture(scope="module")
def shape() -> Shape:
    return from_count(13 * 10**9, 20, 2048)


def plan(shape: Shape, machine: Hardware, load: Load, **options: Any) -> recommend.Planned:
    return recommend.plan(shape, machine, load, memory.settings(**options))


def test_advice_is_a_prediction_of_its_own(shape: Shape) -> None:
    machine = described("RTX 4090", 64 * GIB, [parse_drive("7GB/s,4GB/s")])
    planned = recommend.choose(shape, machine, Load(1), None)
    found = {change.words: change for change in recommend.advise(planned).changes}
    many = planned.load._replace(accumulation=4)
    again = recommend.plan(shape, machine, many, planned.content)
    assert found["4 micro-batches a step"].seconds == again.timing.seconds
    assert all(change.gain >= 1.05 for change in found.values())


def test_the_recommended_host_budget_is_what_pays(shape: Shape) -> None:
    machine = described("RTX 4090", 512 * GIB, [parse_drive("7GB/s,4GB/s")])
    by_default, tight = (plan(shape, machine, Load(1, 1, True), host_memory=n) for n in (None, 30 * GIB))
    advised = recommend.recommended_host(by_default)
    assert advised == recommend.recommended_host(tight) > by_default.memory.host
    assert plan(shape, machine, Load(1, 1, True), host_memory=advised).timing.seconds < by_default.timing.seconds / 1.03
    slow = plan(shape, replace(machine, matmul=1e12), Load(1, 1, True))
    assert recommend.recommended_host(slow) == by_default.memory.host, "compute hides it all"


def test_what_fits_in_memory_stays_there() -> None:
    small = from_count(3 * 10**9, 24, 1024)
    for gpu, ram, on_disk in (("A100 80GB", 2, False), ("RTX 4090", 64, False), ("RTX 4090", 2, True)):
        machine = described(gpu, ram * GIB, [parse_drive("7GB/s")])
        assert recommend.choose(small, machine, Load(1), None).memory.placement.on_disk is on_disk


def test_a_gpu_has_room_for_more_layers_the_less_activations_take() -> None:
    """As a run of it does after its first step; half of what they take stays free beside them."""
    shape = from_count(13 * 10**9, 40, 2048)
    sizes = []
    for room in (24 * GIB, 40 * GIB, 80 * GIB):
        machine = replace(described("A100", 128 * GIB, [parse_drive("7GB/s")]), gpu_memory=room)
        planned = plan(shape, machine, Load(2, 1, True))
        beside = activations.beside_weights(planned.memory, shape, planned.load)
        assert planned.memory.device + beside < room
        sizes.append(planned.memory.device)
        if planned.memory.device < planned.memory.placement.device_need.most:
            assert planned.memory.device + beside + beside // 2 <= room - 255 * MIB
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


def test_without_a_drive_no_state_is_placed_there(shape: Shape) -> None:
    machine = replace(described("RTX 4090", 64 * GIB), drives=())
    with pytest.raises(BudgetError):
        recommend.choose(shape, machine, Load(1), None)
    with pytest.raises(ConfigError, match="no drive"):
        plan(shape, machine, Load(1, 1, True))
