"""A plan knows both orders of micro-batches and updates under the backward: their bytes, seconds and memory."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from offload.cli.main import app
from offload.errors import BudgetError
from offload.layout.pass_order import LAYER_MAJOR, MICRO_BATCH_MAJOR
from offload.planner import memory, recommend
from offload.planner.activations import Load, need
from offload.planner.hardware import Hardware, described, parse_drive
from offload.planner.model_shape import Shape, from_count
from offload.planner.recommend import compare
from offload.planner.simulation.simulate import update_costs
from offload.planner.step_time import chain, least_moved, segments
from offload.sizes import GIB, MIB
from offload.states import State
from tests.support.sampling import examples

BOTH = (MICRO_BATCH_MAJOR, LAYER_MAJOR)


def small(layers: int = 6, sequence: int = 128) -> Shape:
    return from_count(60_000_000, layers, sequence)


def machine(drive: str = "0.2GB/s", on_cpu: bool = False, **rates: float) -> Hardware:
    found = described("RTX 4090", 16 * GIB, [parse_drive(drive)], 30e9)
    of_cpu = {"gpu_memory": 0, "matmul": 2e11, "weights": 1e10, "fresh": 4e9, "elementwise": 1e10}
    return replace(found, **(of_cpu if on_cpu else {}) | rates)


def planned(load: Load, on: Hardware | None = None, shape: Shape | None = None, **options: Any) -> recommend.Planned:
    content = memory.settings(batch=load.batch, accumulation=load.accumulation, **options)
    return recommend.plan(small() if shape is None else shape, machine() if on is None else on, load, content)


# -- bytes --------------------------------------------------------------------------------------------


def tight(load: Load) -> recommend.Planned:
    """Returns a plan in which neither host nor device keep weights, apart from those in use."""
    shape, on = from_count(2_000_000_000, 60, 64), replace(machine("1GB/s"), gpu_memory=3 * GIB)
    content = memory.settings(accumulation=load.accumulation)
    parts = recommend.settled(shape, on, load, content).parts
    gradients = sum(nbytes[State.GRAD] for nbytes in parts.nbytes)
    device = 3 * parts.largest_unit
    return planned(load, on, shape, host_memory=gradients + 700 * MIB, device_memory=device)


@pytest.mark.sample(2)
@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("schedule", BOTH)
def test_bytes_a_parameter_follow_the_order(schedule: str, count: int) -> None:
    """24 for the update, 2 for each pass but the first: the backward, and in micro-batch-major every further pass."""
    load = Load(1, count, recompute=True, schedule=schedule, speculate=False)
    found = tight(load)
    passes = 2 if schedule == LAYER_MAJOR else 2 * count
    costs = update_costs(found.memory.parts, found.memory.placement, found.memory.slots)
    least = sum(least_moved(found.memory, costs, passes))
    moved = found.timing.moved
    assert moved.gradients_written == 0
    each = (moved.read + moved.written) / 2e9
    expected = 24 + 2 * (passes - 1)
    assert expected == (26 if schedule == LAYER_MAJOR else 26 + 4 * (count - 1))
    assert least <= moved.read + moved.written
    # A few units are in memory at each turn of the passes.
    assert expected * 0.92 <= each <= expected * 1.001


@settings(max_examples=examples(25), deadline=None)
@given(
    st.integers(2, 9),
    st.integers(2, 5),
    st.sampled_from(("0.05GB/s", "0.5GB/s,0.2GB/s", "5GB/s")),
    st.integers(0, 500),
    st.booleans(),
    st.booleans(),
)
def test_layer_major_never_moves_more_bytes(
    layers: int, count: int, drive: str, host: int, on_cpu: bool, speculate: bool
) -> None:
    shape, on = from_count(40_000_000, layers, 64), machine(drive, on_cpu)
    load = Load(1, count, recompute=True, speculate=speculate)
    content = memory.settings(accumulation=count)
    least = recommend.settled(shape, on, load, content).least_host
    content["offload"] |= {"host_memory": least + host * MIB, "device_memory": 64 * MIB}
    one, other = (recommend.plan(shape, on, load._replace(schedule=each), content).timing.moved for each in BOTH)
    # An update that finds no host buffer reads its weights again, whatever the order: at most those of a step.
    slack = 2 * shape.parameters if speculate else 0
    assert other.read + other.written <= one.read + one.written + slack


# -- seconds ------------------------------------------------------------------------------------------


@settings(max_examples=examples(25), deadline=None)
@given(
    st.integers(2, 9),
    st.integers(1, 4),
    st.sampled_from((1, 8, 32)),
    st.sampled_from(("0.05GB/s", "0.5GB/s,0.2GB/s", "5GB/s")),
    st.sampled_from(BOTH),
    st.booleans(),
)
def test_updates_under_the_backward_cost_at_most_one_update(
    layers: int, count: int, batch: int, drive: str, schedule: str, on_cpu: bool
) -> None:
    """An update that has begun is not interrupted, so that of the first unit of the next step may begin later."""
    shape, on = from_count(40_000_000, layers, 64), machine(drive, on_cpu)
    load = Load(batch, count, recompute=True, schedule=schedule)
    before, after = (planned(load._replace(speculate=each), on, shape).timing for each in (False, True))
    largest = max(layout.trainable_stop for layout in shape.layouts)
    rates = (14 * largest / on.read + 12 * largest / on.written, largest / on.optimizer)
    assert after.seconds <= before.seconds + sum(rates)
    assert before.miss_seconds == 0 and before.simulation.speculated == ()


def test_a_step_that_clips_makes_its_early_updates_again() -> None:
    found = planned(Load(8, 4, schedule=LAYER_MAJOR), machine("1GB/s", matmul=1e12))
    early = found.timing.simulation.speculated
    assert early and len(set(early)) == len(early)
    numels = [found.memory.parts.trainable_numel[unit] for unit in early]
    rates = found.hardware
    assert found.timing.miss_seconds == pytest.approx(12 * sum(numels) / rates.read + 12 * sum(numels) / rates.written)


@pytest.mark.parametrize(
    ("options", "overlap"),
    [({"durability": "none"}, True), ({"states": "cpu", "weights": "cpu"}, True), ({}, False)],
    ids=["one slot", "states in memory", "no overlap"],
)
def test_an_update_that_cannot_be_undone_waits_for_step(options: dict[str, Any], overlap: bool) -> None:
    content = memory.settings(**options)
    content["offload"]["debug"] = {"overlap": overlap}
    found = recommend.plan(small(), machine("5GB/s"), Load(64), content)
    assert found.timing.simulation.speculated == () and found.timing.miss_seconds == 0


def test_an_optimizer_of_two_passes_waits_for_step() -> None:
    content = memory.settings()
    content["optimizer"]["type"] = "Lamb"
    assert recommend.plan(small(), machine("5GB/s"), Load(64), content).timing.simulation.speculated == ()
    content["optimizer"]["type"] = "Lion"
    assert recommend.plan(small(), machine("5GB/s"), Load(64), content).timing.simulation.speculated


def test_no_update_begins_before_its_gradient_is_complete() -> None:
    found = planned(Load(8, 4, schedule=LAYER_MAJOR), machine("1GB/s", matmul=1e12)).timing.simulation
    early = set(found.speculated)
    assert len(early) > 1
    computed = {span.unit: span.end for span in found.spans if span.row == "model"}
    begun: dict[int, float] = {}
    for span in found.spans:
        if span.row == "kernel" and span.unit in early:
            begun[span.unit] = max(begun.get(span.unit, 0.0), span.start)
    late = [unit for unit in early if unit in computed and unit in begun and begun[unit] < computed[unit]]
    # A unit whose update under this backward is not computed yet shows the kernel of the step before.
    assert len(late) < len(early)


# -- memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [Load(2), Load(2, recompute=True), Load(1, recompute=True, on_host=3, on_disk=1)])
def test_one_micro_batch_needs_the_same_in_both_orders(load: Load) -> None:
    first, *others = (need(small(), load._replace(schedule=each)) for each in ("auto", *BOTH))
    assert others == [first, first]


@given(st.integers(1, 12), st.booleans(), st.integers(0, 5), st.integers(0, 5))
def test_all_micro_batches_of_a_step_are_in_memory(count: int, recompute: bool, on_disk: int, on_host: int) -> None:
    shape = small(12)
    gone = (on_disk, on_host) if recompute else (0, 0)
    load = Load(2, 1, recompute, on_disk=gone[0], on_host=gone[1], schedule=LAYER_MAJOR)
    one, many = need(shape, load), need(shape, load._replace(accumulation=count))
    more = need(shape, load._replace(accumulation=count + 1))
    assert many.disk == count * one.disk
    staged = one.host if not gone[1] else 0
    assert many.host - staged == pytest.approx(count * (one.host - staged), abs=4 * (count - 1) * one.host / 5)
    assert many.device <= count * one.device and all(a <= b for a, b in zip(many, more, strict=True))
    hidden = 2 * shape.uses[1].boundary
    kept = 12 - sum(gone) if recompute else 0
    if recompute:
        # Further inputs that stay, and hidden states at the border of two blocks.
        in_flight = min(count * sum(gone), 2) - min(sum(gone), 2)
        assert many.device - one.device == (count - 1) * (kept + 1) * hidden + in_flight * hidden
    assert need(shape, load._replace(accumulation=count, schedule=MICRO_BATCH_MAJOR)) == one


def test_a_step_whose_micro_batches_do_not_fit_at_once_is_refused_with_what_to_do() -> None:
    shape, on = from_count(13 * 10**9, 40, 2048), described("RTX 4090", 64 * GIB, [parse_drive("7GB/s,5GB/s")])
    load = Load(4, 64, recompute=True, schedule=LAYER_MAJOR)
    with pytest.raises(BudgetError, match=r"of 64 x 4 x 2048 tokens take .* \(--schedule micro_batch_major\)"):
        planned(load, on, shape)


# -- the choice ---------------------------------------------------------------------------------------


def test_auto_takes_the_order_of_the_shorter_step() -> None:
    shape, on = from_count(65 * 10**8, 20, 1024), described("RTX 4090", 64 * GIB, [parse_drive("7GB/s,5GB/s")])
    found = recommend.choose(shape, on, Load(8, 8), None)
    assert found.choice.schedule == found.load.schedule == LAYER_MAJOR and found.given.schedule == "auto"
    content = {**found.content}
    other = recommend.plan(shape, on, Load(8, 8, schedule=MICRO_BATCH_MAJOR), content)
    assert found.timing.seconds < 0.7 * other.timing.seconds
    more = recommend.choose(shape, on, Load(8, 16), None)  # where compute takes twice as long as the drive
    assert more.timing.seconds <= 1.1 * more.timing.formula_seconds


def test_auto_keeps_one_micro_batch_where_several_do_not_fit() -> None:
    shape, on = from_count(13 * 10**9, 40, 2048), described("RTX 4090", 64 * GIB, [parse_drive("7GB/s,5GB/s")])
    found = planned(Load(4, 64, recompute=True), on, shape)
    assert found.choice.schedule == MICRO_BATCH_MAJOR and "activations of 64 micro-batches take" in found.choice.reason


def test_a_model_in_memory_has_one_order() -> None:
    found = planned(Load(1, 8), replace(machine(), gpu_memory=64 * GIB), weights="none", states="none")
    assert found.choice.schedule == MICRO_BATCH_MAJOR and "no transfer" in found.choice.reason
    assert compare(planned(Load(1), replace(machine(), gpu_memory=64 * GIB), weights="none", states="none")) == []


def test_a_shape_is_a_chain_if_its_blocks_follow_each_other() -> None:
    shape = small(4)
    assert chain(shape) == 4 and [list(each) for each in segments(shape)] == [[0], [1], [2], [3], [4], [5]]
    broken = shape._replace(uses=(*shape.uses[:3], shape.uses[0], *shape.uses[3:]))
    assert chain(broken) == 0 and sum(map(len, segments(broken))) == len(broken.uses)


# -- the command --------------------------------------------------------------------------------------

MACHINE = ("--gpu", "RTX 4090", "--ram", "64GB", "--drive", "7GB/s,5GB/s")
LAYERS = 12
MODEL = ("--parameters", "4B", "--layers", str(LAYERS))


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *MODEL, *MACHINE, *arguments])


@pytest.mark.slow
def test_the_command_compares_the_orders() -> None:
    done = run("--batch-size", "8", "--accumulation", "8", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["step"]["schedule"] == LAYER_MAJOR and "instead of 16 times" in found["step"]["schedule_reason"]
    orders = {(each["schedule"], each["speculate"]): each["seconds"] for each in found["orders"]}
    assert set(orders) == {(each, early) for each in BOTH for early in (False, True)}
    assert found["step"]["seconds"] == min(orders.values())
    assert found["step"]["updates_under_backward"] > 0.75 * LAYERS and found["step"]["miss_seconds"] > 0


def test_the_command_takes_an_order() -> None:
    done = run("--accumulation", "2", "--schedule", "micro_batch_major", "--no-speculate")
    assert done.exit_code == 0, done.output
    assert "micro-batch-major: the config asks for it" in done.output and "if it clips" in done.output
    done = run("--schedule", "rows")
    assert (
        done.exit_code == 2 and "expected --schedule of auto, layer_major, micro_batch_major, got 'rows'" in done.output
    )
