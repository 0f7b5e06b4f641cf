"""Seconds of a step: what is predicted, what limits it, and rates with their origins."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from offload.cli.main import app
from offload.errors import BudgetError, ConfigError
from offload.layout.pass_order import LAYER_MAJOR, MICRO_BATCH_MAJOR
from offload.planner import memory, output, recommend, request, step_time
from offload.planner.activations import Load, beside_weights, need
from offload.planner.gpus import GPUS, ORIGINS, Gpu, Rate, find_gpu
from offload.planner.hardware import Hardware, described, parse_drive
from offload.planner.model_shape import Shape, from_count
from offload.planner.output import in_short
from offload.planner.recommend import compare
from offload.planner.simulation.simulate import update_costs
from offload.planner.step_time import chain, least_moved, segments
from offload.sizes import GIB, MIB
from offload.states import State
from tests.pages.plan_table import PAGE
from tests.support.sampling import examples


@pytest.fixture(scope="module")
def shape() -> Shape:
    return from_count(13 * 10**9, 20, 2048)


def plan(shape: Shape, machine: Hardware, load: Load, **options: Any) -> recommend.Planned:
    return recommend.plan(shape, machine, load, memory.settings(**options))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("speculate", "near"), [(False, 0.02), (True, 0.15)])
@pytest.mark.parametrize(("billions", "layers"), [(13, 40), (70, 80)])
def test_a_step_on_drives_follows_the_formula(billions: int, layers: int, speculate: bool, near: float) -> None:
    shape = from_count(billions * 10**9, layers, 2048)
    machine = described("RTX 4090", 256 * GIB, [parse_drive("7GB/s,4GB/s")])
    planned = plan(shape, machine, Load(1, 1, True, speculate=speculate))
    assert planned.timing.limit == "NVMe"
    assert planned.timing.seconds == pytest.approx(planned.timing.formula_seconds, rel=near)


def test_with_all_in_memory_compute_is_all_there_is(shape: Shape) -> None:
    machine = replace(described("H200", 2048 * GIB), gpu_memory=1024 * GIB)
    planned = plan(shape, machine, Load(8), weights="none", states="none")
    assert planned.timing.limit == "compute"
    assert planned.timing.compute_seconds <= planned.timing.seconds <= 1.05 * planned.timing.compute_seconds
    assert planned.timing.moved.read == planned.timing.moved.written == 0


def test_faster_components_never_make_a_step_slower(shape: Shape) -> None:
    machine = described("RTX 4090", 64 * GIB, [parse_drive("3GB/s")], memory=40e9)
    before = plan(shape, machine, Load(2, 1, True)).timing.seconds
    for name in ("matmul", "weights", "fresh", "elementwise", "upload", "download", "optimizer", "gradient"):
        faster = replace(machine, **{name: 2 * getattr(machine, name)})
        assert plan(shape, faster, Load(2, 1, True)).timing.seconds <= before * 1.001, name
    drives = replace(machine, drives=machine.drives * 2)
    assert plan(shape, drives, Load(2, 1, True)).timing.seconds < 0.6 * before


def test_tokens_that_hide_are_the_least_that_do(shape: Shape) -> None:
    machine = replace(described("RTX 4090", 64 * GIB, [parse_drive("14GB/s")]), gpu_memory=1 << 50)
    planned = plan(shape, machine, Load(1, 1, True), host_memory=50 * GIB)
    tokens = step_time.hiding_tokens(planned.memory, shape, machine, planned.load)
    assert tokens is not None and tokens % shape.sequence == 0
    batch = tokens // shape.sequence
    for sequences, hidden in ((batch, True), (batch // 2, False)):
        at = plan(shape, machine, Load(sequences, 1, True), host_memory=50 * GIB).timing
        assert at.hidden is hidden
        assert at.formula_seconds <= 1.05 * at.compute_seconds or not hidden


def test_the_optimizer_on_a_cpu_takes_cores() -> None:
    machine = replace(described("RTX 4090", 1024 * GIB), gpu_memory=0)
    planned = plan(from_count(10**9, 16, 512), machine, Load(1), weights="none", states="none")
    kernel = 10**9 / machine.optimizer
    assert planned.timing.seconds == pytest.approx(planned.timing.compute_seconds + kernel, rel=0.02)


def test_a_frozen_layer_has_no_backward_of_its_weights() -> None:
    machine = replace(described("RTX 4090", 64 * GIB), handed_seconds=0.0)
    trains = from_count(10**9, 4, 512)
    still = tuple(layout._replace(trainable_stop=0) for layout in trains.layouts)
    before = step_time.forward(trains, machine, Load(2))
    after = step_time.forward(trains._replace(layouts=still), machine, Load(2))
    for use, each, frozen in zip(trains.uses, before, after, strict=True):
        numel = trains.layouts[use.unit].numel
        products = 2 * use.flops / machine.matmul + (2 * numel / machine.weights if use.flops else 0)
        made = 2 * numel / machine.fresh if use.lookup else 0
        assert each.seconds == frozen.seconds and each.backward == pytest.approx(2 * each.seconds + made)
        assert frozen.backward == pytest.approx(2 * each.seconds - products)


def test_a_tied_embedding_makes_two_gradients_and_sums_them() -> None:
    machine = replace(described("RTX 4090", 64 * GIB), handed_seconds=0.0)
    apart = from_count(10**9, 4, 512)
    embedding, head = apart.uses[0], apart.uses[-1]._replace(unit=0)
    tied = apart._replace(uses=(embedding, *apart.uses[1:-1], head))
    (one, *_), (two, *_) = (step_time.forward(shape, machine, Load(1)) for shape in (apart, tied))
    nbytes = 2 * apart.layouts[0].numel
    assert two.backward - one.backward == pytest.approx(nbytes / machine.fresh) and one.seconds == two.seconds


def test_what_is_added_up_on_a_gpu_leaves_it_with_the_last_micro_batch() -> None:
    """Beside a backward that is long; and the totals have their bytes of the device's budget."""
    small, machine = from_count(10**9, 16, 2048), described("H200", 128 * GIB)
    numel = small.layouts[3].trainable_stop
    alone = step_time.backward(step_time.forward(small, machine, Load(1)), [0] * len(small.layouts), machine, False)
    for bus, longer in ((1e15, False), (1e9, True)):
        slow = replace(machine, download=bus)
        planned = plan(small, slow, Load(1, 4, schedule="micro_batch_major"), weights="cpu", states="cpu")
        totals = dict(planned.memory.placement.added)
        assert len(totals) == len(small.layouts) and totals[3] == 4 * numel
        first = step_time.forward(small, slow, Load(1))
        *some, last = step_time.step_of(small, [first] * 4, planned.memory, slow, planned.load)[1::2]
        assert len(some) == 3 and some[0] == some[1] == some[2]
        mine = next(index for index, each in enumerate(alone) if each.unit == 3)
        added = alone[mine].seconds + 10 * numel / machine.elementwise
        assert some[0][mine].seconds == pytest.approx(added)
        assert last[mine].seconds == pytest.approx(4 * numel / bus if longer else added)
    assert planned.memory.total.device == planned.memory.device
    once = plan(small, machine, Load(1, 1), weights="cpu", states="cpu")
    assert not once.memory.placement.added
    tight = plan(small, machine, Load(1, 4), weights="cpu", states="cpu", device_memory=int(1e9))
    assert not tight.memory.placement.added, "weights come first"


def test_each_unit_is_updated_where_it_lives() -> None:
    """On the GPU where its gradient stays there too; else its states go to the host and come back."""
    small, machine = from_count(10**9, 16, 2048), described("H200", 128 * GIB)

    def rate(weights: str, states: str, **options: Any) -> float:
        planned = plan(small, machine, Load(1), weights=weights, states=states, **options)
        return step_time.rates_of(planned.memory, machine).kernel

    there, on_host = rate("none", "none"), rate("cpu", "cpu")
    assert there == pytest.approx(machine.device_optimizer) and on_host == pytest.approx(machine.optimizer)
    moved = 12 / machine.upload + 12 / machine.download
    gone = 1 / (1 / machine.optimizer + moved)
    part = rate("none", "none", device_memory=int(13e9))
    assert gone < part < there, "gradients of some units have room there"
    assert gone < on_host, "states that live on the GPU are no gain for an update on the host"


PLACEMENTS = (("none", "none"), ("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "nvme"))


def small(itemsize: int = 2) -> Shape:
    return from_count(60_000_000, 6, 128, itemsize)


def machine(on_cpu: bool, drive: str, dtype: str = "bf16", **rates: float) -> Hardware:
    found = described("RTX 4090", 8 * GIB, [parse_drive(drive)], 30e9, dtype=dtype)
    of_cpu = {
        "gpu_memory": 0,
        "matmul": 2e11,
        "weights": 1e10,
        "fresh": 4e9,
        "elementwise": 1e10,
        "handed_seconds": 4e-4,
    }
    return replace(found, **(of_cpu if on_cpu else {}) | rates)


def planned(shape: Shape, on: Hardware, load: Load, tiers: tuple[str, str], **options: int) -> recommend.Planned:
    return recommend.plan(shape, on, load, memory.settings(*tiers, dtype=on.dtype, batch=load.batch, **options))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("on_cpu", "tiers"), list(itertools.product((True, False), PLACEMENTS)))
def test_no_least_is_above_what_is_predicted(
    on_cpu: bool, tiers: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound itself, without what cuts it off where both are one sum."""
    found: list[float] = []
    real = step_time._least
    monkeypatch.setattr(step_time, "_least", lambda *given: found.append(real(*given)) or found[-1])
    reached = {False: 0, True: 0}
    loads = (Load(1), Load(8), Load(1, 3, schedule="micro_batch_major"), Load(1, 3, schedule="layer_major"))
    for drive, load, dtype, speculate in itertools.product(
        ("5GB/s,3GB/s", "0.2GB/s", "0.05GB/s,0.5GB/s"), (*loads, Load(2, 1, True)), ("bf16", "fp32"), (False, True)
    ):
        load = load._replace(speculate=speculate)
        prediction = planned(small(4 if dtype == "fp32" else 2), machine(on_cpu, drive, dtype), load, tiers).timing
        assert found[-1] <= prediction.seconds * (1 + 1e-9), (drive, load, dtype)
        reached[speculate] += prediction.seconds <= (1.25 if speculate else 1.1) * found[-1]
    assert min(reached.values()) >= 15, "it says something: half of the steps come near it"


def test_a_step_that_mostly_computes_is_limited_by_compute() -> None:
    """Whatever it waits for beside: on a CPU the kernel, of an update that is not ready the drive."""
    on = machine(True, "5GB/s")
    for tiers in PLACEMENTS:
        step = planned(small(), on, Load(8), tiers).timing
        assert step.compute_seconds > 0.5 * step.seconds and step.limit == "compute", tiers
        assert step.limit_seconds == step.compute_seconds


def test_what_limits_is_what_most_of_the_seconds_are_spent_on() -> None:
    shape = small()
    for on, tiers, limit in (
        (machine(True, "0.05GB/s"), ("nvme", "nvme"), "NVMe"),
        (machine(True, "5GB/s", optimizer=1e7), ("none", "none"), "DRAM"),
        (machine(True, "5GB/s", optimizer=1e7), ("cpu", "nvme"), "DRAM"),
        (machine(False, "5GB/s", upload=2e7), ("cpu", "cpu"), "PCIe"),
    ):
        prediction = planned(shape, on, Load(1), tiers)
        step = prediction.timing
        assert step.limit == limit and step.compute_seconds < step.limit_seconds <= step.seconds * (1 + 1e-9)
        assert f"{limit} limits ({step.limit_seconds / step.seconds:.0%} of the step)" in in_short(prediction)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_host_adds_to_what_a_cpu_computes_and_bounds_what_a_gpu_computes(on_cpu: bool) -> None:
    """A GPU computes one use while the host prepares the next, so the slower of the two counts."""
    shape, on = small(), machine(on_cpu, "5GB/s")
    alone = step_time.forward(shape, replace(on, handed_seconds=0.0), Load(1))
    handed = max(each.seconds for each in alone) * 0.9
    assert min(each.seconds for each in alone) < handed
    for with_host, without in zip(
        step_time.forward(shape, replace(on, handed_seconds=handed), Load(1)), alone, strict=True
    ):
        if on_cpu:
            assert with_host.seconds == without.seconds + handed
            assert with_host.backward == without.backward + handed
        else:
            assert with_host.seconds == max(without.seconds, handed)
            assert with_host.backward == max(without.backward, handed)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_unit_that_stays_takes_the_host_less(on_cpu: bool) -> None:
    shape, on = small(), replace(machine(on_cpu, "5GB/s"), handed_seconds=4e-4)
    comes, stays = (step_time.forward(shape, on, Load(1), stay) for stay in ((), range(len(shape.layouts))))
    alone = step_time.forward(shape, replace(on, handed_seconds=0.0), Load(1))
    for moved, kept, without in zip(comes, stays, alone, strict=True):
        assert without.seconds <= kept.seconds <= moved.seconds and without.backward <= kept.backward <= moved.backward
    assert sum(each.seconds for each in stays) < sum(each.seconds for each in comes)


def test_a_plan_counts_the_units_that_stay() -> None:
    on, tiers = machine(True, "5GB/s"), (("none", "cpu"), ("cpu", "cpu"))
    kept, moved = (planned(small(), on, Load(1), each) for each in tiers)
    assert kept.timing.compute_seconds < moved.timing.compute_seconds


def test_the_hosts_seconds_count_on_every_machine() -> None:
    assert all(described(gpu.name).handed_seconds > 0 for gpu in GPUS)


# -- dtypes -------------------------------------------------------------------------------------------


def test_fp32_of_a_gpu_is_that_of_its_plain_units() -> None:
    for gpu in GPUS:
        rates = {dtype: described(gpu.name, dtype=dtype).matmul for dtype in ("bf16", "fp16", "fp32")}
        if gpu.has_bf16:
            assert rates["bf16"] == rates["fp16"] > rates["fp32"]
        else:  # its matrix units know fp16 alone
            assert rates["fp16"] > rates["bf16"]
        assert described(gpu.name, dtype="fp32", autocast=True).matmul == rates["bf16"]
        for found, peak, dtype in ((gpu.matmul, gpu.flops, "bf16"), (gpu.matmul_fp32, gpu.flops_fp32, "fp32")):
            assert rates[dtype] <= peak if found is None else rates[dtype] == found.value


def test_weights_and_activations_of_fp32_have_four_bytes() -> None:
    on = {dtype: machine(True, "5GB/s", dtype) for dtype in ("bf16", "fp32")}
    for name, more in (("weights", 2.0), ("elementwise", 1.4)):
        seconds = {}
        for dtype, of in on.items():  # of blocks alone: a loss in bf16 copies its logits to fp32 first
            found = step_time.forward(small(of.itemsize), replace(of, **{name: 1e7}), Load(1))
            seconds[dtype] = sum(each.seconds for each in found[1:-1])
        assert seconds["fp32"] > more * 0.95 * seconds["bf16"], name
    assert on["fp32"].optimizer == pytest.approx(on["bf16"].optimizer * 26 / 28)
    assert on["fp32"].gradient == pytest.approx(on["bf16"].gradient / 2)


def test_a_slow_dtype_makes_a_slow_step() -> None:
    """A machine without bf16 units: a plan of fp32 knows nothing of how slow bf16 is there."""
    slow = planned(small(), machine(True, "5GB/s", matmul=7e9), Load(1), ("cpu", "cpu"))
    fast = planned(small(4), machine(True, "5GB/s", "fp32", matmul=1e11), Load(1), ("cpu", "cpu"))
    assert slow.timing.seconds > 5 * fast.timing.seconds


BOTH = (MICRO_BATCH_MAJOR, LAYER_MAJOR)


def small_schedules(layers: int = 6, sequence: int = 128) -> Shape:
    return from_count(60_000_000, layers, sequence)


def machine_schedules(drive: str = "0.2GB/s", on_cpu: bool = False, **rates: float) -> Hardware:
    found = described("RTX 4090", 16 * GIB, [parse_drive(drive)], 30e9)
    of_cpu = {"gpu_memory": 0, "matmul": 2e11, "weights": 1e10, "fresh": 4e9, "elementwise": 1e10}
    return replace(found, **(of_cpu if on_cpu else {}) | rates)


def planned_schedules(
    load: Load, on: Hardware | None = None, shape: Shape | None = None, **options: Any
) -> recommend.Planned:
    content = memory.settings(batch=load.batch, accumulation=load.accumulation, **options)
    return recommend.plan(
        small_schedules() if shape is None else shape, machine_schedules() if on is None else on, load, content
    )


# -- bytes --------------------------------------------------------------------------------------------


def tight(load: Load) -> recommend.Planned:
    """Returns a plan in which neither host nor device keep weights, apart from those in use."""
    shape, on = from_count(2_000_000_000, 60, 64), replace(machine_schedules("1GB/s"), gpu_memory=3 * GIB)
    content = memory.settings(accumulation=load.accumulation)
    parts = recommend.settled(shape, on, load, content).parts
    gradients = sum(nbytes[State.GRAD] for nbytes in parts.nbytes)
    device = 3 * parts.largest_unit
    return planned_schedules(load, on, shape, host_memory=gradients + 700 * MIB, device_memory=device)


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
    shape, on = from_count(40_000_000, layers, 64), machine_schedules(drive, on_cpu)
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
    shape, on = from_count(40_000_000, layers, 64), machine_schedules(drive, on_cpu)
    load = Load(batch, count, recompute=True, schedule=schedule)
    before, after = (planned_schedules(load._replace(speculate=each), on, shape).timing for each in (False, True))
    largest = max(layout.trainable_stop for layout in shape.layouts)
    rates = (14 * largest / on.read + 12 * largest / on.written, largest / on.optimizer)
    assert after.seconds <= before.seconds + sum(rates)
    assert before.miss_seconds == 0 and before.simulation.speculated == ()


def test_a_step_that_clips_makes_its_early_updates_again() -> None:
    found = planned_schedules(Load(8, 4, schedule=LAYER_MAJOR), machine_schedules("1GB/s", matmul=1e12))
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
    found = recommend.plan(small_schedules(), machine_schedules("5GB/s"), Load(64), content)
    assert found.timing.simulation.speculated == () and found.timing.miss_seconds == 0


def test_an_optimizer_of_two_passes_waits_for_step() -> None:
    content = memory.settings()
    content["optimizer"]["type"] = "Lamb"
    assert (
        recommend.plan(small_schedules(), machine_schedules("5GB/s"), Load(64), content).timing.simulation.speculated
        == ()
    )
    content["optimizer"]["type"] = "Lion"
    assert recommend.plan(small_schedules(), machine_schedules("5GB/s"), Load(64), content).timing.simulation.speculated


def test_no_update_begins_before_its_gradient_is_complete() -> None:
    found = planned_schedules(
        Load(8, 4, schedule=LAYER_MAJOR), machine_schedules("1GB/s", matmul=1e12)
    ).timing.simulation
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
    first, *others = (need(small_schedules(), load._replace(schedule=each)) for each in ("auto", *BOTH))
    assert others == [first, first]


@given(st.integers(1, 12), st.booleans(), st.integers(0, 5), st.integers(0, 5))
def test_all_micro_batches_of_a_step_are_in_memory(count: int, recompute: bool, on_disk: int, on_host: int) -> None:
    shape = small_schedules(12)
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
        planned_schedules(load, on, shape)


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
    found = planned_schedules(Load(4, 64, recompute=True), on, shape)
    assert found.choice.schedule == MICRO_BATCH_MAJOR and "activations of 64 micro-batches take" in found.choice.reason


def test_a_model_in_memory_has_one_order() -> None:
    found = planned_schedules(
        Load(1, 8), replace(machine_schedules(), gpu_memory=64 * GIB), weights="none", states="none"
    )
    assert found.choice.schedule == MICRO_BATCH_MAJOR and "no transfer" in found.choice.reason
    assert (
        compare(
            planned_schedules(Load(1), replace(machine_schedules(), gpu_memory=64 * GIB), weights="none", states="none")
        )
        == []
    )


def test_a_shape_is_a_chain_if_its_blocks_follow_each_other() -> None:
    shape = small_schedules(4)
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


UNIFIED = [gpu for gpu in GPUS if gpu.unified]
COUNT = ("plan", "--parameters", "1B", "--layers", "16", "--seq-len", "1024", "--ram", "64GB", "--drive", "7GB/s,5GB/s")


def of(gpu: str, origin: str) -> list[str]:
    return [rate.name for rate in described(gpu).rates if rate.origin == origin]


# -- origins ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_rate_of_every_gpu_has_an_origin_and_a_source(gpu: Gpu) -> None:
    assert find_gpu(gpu.name) == (gpu, None)
    for rate in described(gpu.name).rates:
        assert rate.origin in ORIGINS and rate.origin not in ("measured", "given")
        assert rate.source and rate.value > 0
        assert (rate.origin == "published") == any(word in rate.source for word in (".com/", ".info/", "docs/"))


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_no_program_of_others_is_said_to_have_gone_far_beyond_a_data_sheet(gpu: Gpu) -> None:
    """By clocks above those of the data sheet by an eighth at most: a figure typed wrong is found."""
    for figure, peak in ((gpu.matmul, gpu.flops), (gpu.matmul_fp32, gpu.flops_fp32), (gpu.reached, gpu.bandwidth)):
        assert figure is None or 0.25 * peak < figure.value < 1.15 * peak


def test_a_rate_that_an_option_gives_is_given() -> None:
    machine = described("RTX 4090", memory=80e9, link=20e9)
    assert {rate.name: rate.source for rate in machine.rates if rate.origin == "given"} == {
        "copies to and from the GPU, each way,": "--pcie",
        "host memory": "--memory-bandwidth",
    }
    assert machine.upload == machine.download == 20e9 and machine.memory == 80e9


def test_drives_have_their_origin_too() -> None:
    given = {rate.name: rate.amount for rate in described("H200", drives=[parse_drive("7GB/s,5GB/s")] * 2).rates}
    assert given["reads of 2 drives"] == "14 GB/s" and given["writes of 2 drives"] == "10 GB/s"
    assert {"reads of the drive", "writes of the drive"} <= set(of("H200", "assumed"))


def test_what_nobody_published_is_assumed_and_named() -> None:
    assert "matrix products in bf16" in of("Radeon PRO W7900", "assumed")
    assert any("76% of the data sheet's 122.6 Tflop/s" in words for words in described("W7900").assumptions)
    assert "matrix products in bf16" in of("RTX 4090", "published")
    assert not any("matrix products" in words for words in described("RTX 4090").assumptions)


@pytest.mark.parametrize(
    ("gpu", "dtype", "share"),
    [
        # The median of five cards of the series is 1.03: more than all is not assumed.
        ("RTX 4070", "bf16", 1.0),
        ("RTX 4070 Ti", "bf16", 1.0),
        ("RTX 4080 SUPER", "bf16", 1.0),
        ("RTX 4070", "fp32", 54.7 / 82.6),
        ("MI300A", "bf16", 668.4 / 1307),
        # No card of the generation has a figure in fp32.
        ("MI300A", "fp32", 0.5),
    ],
)
def test_a_card_without_a_figure_reaches_what_its_generation_reaches(gpu: str, dtype: str, share: float) -> None:
    card, machine = find_gpu(gpu)[0], described(gpu, dtype=dtype)
    assert machine.matmul == pytest.approx(share * (card.flops if dtype == "bf16" else card.flops_fp32))
    (rate,) = [rate for rate in machine.rates if rate.name.startswith("matrix products")]
    assert rate.origin == "assumed"
    assert (f", as other cards of {card.generation} reached" in rate.source) == (share != 0.5)


def test_the_ratios_of_the_page_are_those_of_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    halved = [gpu for gpu in GPUS if gpu.generation.startswith("GeForce")]
    whole = [gpu for gpu in GPUS if gpu.generation.split()[0] in ("A100", "Hopper", "Ada", "Ampere")]

    def span(cards: list[Gpu], dtype: str) -> str:
        pairs = [(gpu.matmul, gpu.flops) if dtype == "bf16" else (gpu.matmul_fp32, gpu.flops_fp32) for gpu in cards]
        reached = [figure.value / peak for figure, peak in pairs if figure is not None]
        return f"{100 * min(reached):.0f} to {100 * max(reached):.0f} %"

    text = " ".join(page.split())
    assert f"reached {span(halved, 'bf16')} in bf16" in text
    assert f"reached {span(whole, 'bf16')} of it" in text and f"reached {span(halved, 'fp32')}" in text


def test_the_plan_prints_a_line_for_each_origin() -> None:
    done = CliRunner().invoke(app, [*COUNT, "--gpu", "RTX 4090", "--pcie", "20GB/s"])
    lines = {line.partition(":")[0]: " ".join(line.split()) for line in done.stdout.splitlines()}
    assert done.exit_code == 0 and "Tflop/s" in done.stdout
    assert lines["published"].startswith("published: matrix products in bf16 165 Tflop/s (github.com/")
    assert lines["given"].startswith(
        "given: copies to and from the GPU, each way, 20 GB/s (--pcie); reads of the drive 7"
    )
    assert lines["assumed"]


def test_json_has_the_origin_of_each_rate() -> None:
    done = CliRunner().invoke(app, [*COUNT, "--gpu", "GB10", "--json"])
    machine = json.loads(done.stdout)["machine"]
    assert machine["unified"] and {rate["origin"] for rate in machine["rates"]} == {"published", "given", "assumed"}
    (copies,) = (rate for rate in machine["rates"] if "copies" in rate["name"])
    assert copies["value"] is None, "JSON has no infinity"
    assert all(rate["source"] for rate in machine["rates"])


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [(164.8e12, "flop/s", "165 Tflop/s"), (25e9, "B/s", "25 GB/s"), (1.8e9, "parameters/s", "1.8B parameters/s")],
)
def test_amounts_are_read_in_units(value: float, unit: str, words: str) -> None:
    assert Rate(name="", value=value, unit=unit, origin="assumed", source="").amount == words
    assert Rate(name="", value=math.inf, unit=unit, origin="assumed", source="").amount == "no time"


# -- one memory ---------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("gpu", UNIFIED, ids=lambda gpu: gpu.name)
def test_copies_take_no_time_where_gpu_and_cpu_have_one_memory(gpu: Gpu) -> None:
    machine = described(gpu.name, drives=[parse_drive("7GB/s,5GB/s")])
    assert machine.upload == machine.download == math.inf and machine.gpu_memory == machine.ram
    shape = from_count(3 * 10**9, 24, 1024)
    step = recommend.choose(shape, machine, Load(1), None).timing
    assert step.busy["PCIe"] == 0 and step.waited.upload == 0 and 0 < step.seconds < math.inf


def test_a_size_alone_never_means_a_machine_with_one_memory() -> None:
    for size in ("16GB", "24GB", "48GB", "96GB", "128GB", "192GB", "300GB"):
        assert not find_gpu(size)[0].unified
    assert find_gpu("24GB")[1] == "the GPU is as fast as a RTX 3090"
    assert find_gpu("H200")[0].name == "H200", "not the one whose name contains it"


def test_one_memory_holds_both_budgets_and_the_activations() -> None:
    """Of any placement and config; a budget that has no room beside the other is an error."""
    shape = from_count(13 * 10**9, 40, 1024)
    machine = described("Ryzen AI MAX+ 395", drives=[parse_drive("7GB/s,5GB/s")])
    assert machine.unified
    load = Load(4, 1, True)
    planned = recommend.choose(shape, machine, load, True)
    for each in (planned, recommend.with_host_budget(planned)):
        beside = beside_weights(each.memory, shape, load)
        assert each.memory.host + each.memory.device + beside <= machine.ram
    content = memory.settings("nvme", "nvme", host_memory=110 * GIB, batch=4)
    with pytest.raises(BudgetError, match="activations"):
        recommend.plan(shape, machine, Load(8, 1, True), content)
    written = request.ready(planned)["offload"]
    assert {"host_memory", "device_memory"} <= written.keys(), "a run would see the same bytes free twice"


def test_a_bus_between_gpu_and_cpu_that_have_one_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="--pcie has no meaning"):
        described("GB10", link=25e9)


def test_the_heading_names_one_memory_once() -> None:
    machine = described("GB10", drives=[parse_drive("7GB/s,5GB/s")])
    planned = recommend.choose(from_count(3 * 10**9, 24, 1024), machine, Load(1), None)
    line = output.heading(planned)[1]
    assert "115.2 GiB of RAM that the GPU shares" in line and "GPU memory" not in line
