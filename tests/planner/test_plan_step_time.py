"""Seconds of a step: what is predicted, what limits it, and rates with their origins."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from offload.cli.main import app
from offload.errors import BudgetError, ConfigError
from offload.hardware.gpus import GPUS, ORIGINS, Gpu, Rate, find_gpu
from offload.layout import placement
from offload.layout.pass_order import LAYER_MAJOR, MICRO_BATCH_MAJOR
from offload.planner import memory, recommend, request, step_time
from offload.planner.activations import Load, beside_weights, wish_of
from offload.planner.hardware import Hardware, described, parse_drive
from offload.planner.model_shape import Shape, from_count, from_name
from offload.planner.output import Asked, in_short, lines
from offload.planner.simulation.simulate import update_costs
from offload.planner.step_time import least_moved
from offload.sizes import GIB, MIB
from offload.states import State
from tests.support.sampling import examples


@pytest.fixture(scope="module")
def shape() -> Shape:
    return from_count(13 * 10**9, 20, 2048)


def plan(shape: Shape, machine: Hardware, load: Load, **options: Any) -> recommend.Planned:
    return recommend.plan(shape, machine, load, memory.settings(**options))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("speculate", "near"), [(False, 0.025), (True, 0.15)])
@pytest.mark.parametrize(("billions", "layers"), [(13, 40), (70, 80)])
def test_a_step_on_drives_follows_the_formula(billions: int, layers: int, speculate: bool, near: float) -> None:
    shape = from_count(billions * 10**9, layers, 2048)
    machine = described("RTX 4090", 256 * GIB, [parse_drive("7GB/s,4GB/s")])
    planned = plan(shape, machine, Load(1, 1, True, speculate=speculate))
    assert planned.timing.limit == "NVMe"
    assert planned.timing.seconds == pytest.approx(planned.timing.formula_seconds, rel=near)


def test_states_that_overflow_the_host_budget_cost_what_states_configured_for_drives_do(shape: Shape) -> None:
    """Whole layers move, the last first, so their updates begin under the backward."""
    machine, load = described("RTX 4090", 128 * GIB, [parse_drive("7GB/s,5GB/s")], 75e9), Load(4, 4, chunked_loss=True)
    seconds = {}
    for tier, budget in (("cpu", None), ("nvme", machine.ram - 6 * GIB)):
        content = memory.settings(tier, tier, activations="device", durability="step", host_memory=budget)
        content |= {"data_types": {"grad_accum_dtype": "bf16"}}
        content["offload"]["nvme_path"] = ["/mnt/nvme"]
        planned = recommend.plan(shape, machine, load, content)
        assert planned.memory.placement.on_disk and not planned.memory.spilled
        seconds[tier] = planned.timing.seconds
    assert seconds["cpu"] <= 48 and seconds["cpu"] <= 1.1 * seconds["nvme"]


def test_a_step_with_rare_commits_is_the_mean_of_those_with_and_without() -> None:
    """The drives write the states of a commit in one step, and are idle in the others."""
    shape = from_count(350 * 10**6, 8, 1024)
    machine = described("RTX 4090", 32 * GIB, [parse_drive("7GB/s,1GB/s")])
    calm, rare, frequent = (
        plan(shape, machine, Load(1, 1, True), weights="cpu", states="cpu", durability=durability).timing
        for durability in ({"every": 10**9}, {"every": 4}, "step")
    )
    assert calm.seconds < 0.5 and frequent.seconds > 4, "12 bytes of each parameter at 1 GB/s"
    assert rare.seconds == pytest.approx((3 * calm.seconds + frequent.seconds) / 4)
    assert rare.moved.written == pytest.approx(frequent.moved.written / 4, rel=1e-6)
    assert rare.waited.update == pytest.approx((3 * calm.waited.update + frequent.waited.update) / 4)


def test_the_states_that_a_step_needs_first_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = from_name("llama-1b", 1024, torch.bfloat16)
    machine = described("RTX 4090", 64 * GIB, [parse_drive("2GB/s")])
    first = plan(shape, machine, Load(1, 1, True))
    monkeypatch.setattr(placement, "_FIRST_SHARE", 0.0)
    without = plan(shape, machine, Load(1, 1, True), paths=("/mnt/other",))
    nbytes = first.memory.parts.pages_nbytes(first.memory.placement.promoted)
    assert nbytes == 10 * shape.layouts[0].numel
    assert without.timing.moved.read - first.timing.moved.read == pytest.approx(nbytes, rel=0.05)
    assert without.timing.seconds - first.timing.seconds > 0.5 * nbytes / 2e9


@pytest.mark.slow
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


PLACEMENTS = (("none", "none"), ("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "nvme"))


def small(itemsize: int = 2) -> Shape:
    return from_count(60_000_000, 6, 128, itemsize)


def machine(on_cpu: bool, drive: str, dtype: str = "bf16", **rates: float) -> Hardware:
    machine = described("RTX 4090", 8 * GIB, [parse_drive(drive)], 30e9, dtype=dtype)
    of_cpu = {
        "gpu_memory": 0,
        "matmul": 2e11,
        "weights": 1e10,
        "fresh": 4e9,
        "elementwise": 1e10,
        "handed_seconds": 4e-4,
    }
    return replace(machine, **(of_cpu if on_cpu else {}) | rates)


def planned(shape: Shape, on: Hardware, load: Load, tiers: tuple[str, str], **options: int) -> recommend.Planned:
    return recommend.plan(shape, on, load, memory.settings(*tiers, dtype=on.dtype, batch=load.batch, **options))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("on_cpu", "tiers"), list(itertools.product((True, False), PLACEMENTS)))
def test_no_least_is_above_what_is_predicted(
    on_cpu: bool, tiers: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound itself, without what cuts it off where both are one sum."""
    leasts: list[float] = []
    real = step_time._least
    monkeypatch.setattr(step_time, "_least", lambda *given: leasts.append(real(*given)) or leasts[-1])
    reached = {False: 0, True: 0}
    loads = (Load(1), Load(8), Load(1, 3, schedule="micro_batch_major"), Load(1, 3, schedule="layer_major"))
    for drive, load, dtype, speculate in itertools.product(
        ("5GB/s,3GB/s", "0.2GB/s", "0.05GB/s,0.5GB/s"), (*loads, Load(2, 1, True)), ("bf16", "fp32"), (False, True)
    ):
        load = load._replace(speculate=speculate)
        prediction = planned(small(4 if dtype == "fp32" else 2), machine(on_cpu, drive, dtype), load, tiers).timing
        assert leasts[-1] <= prediction.seconds * (1 + 1e-9), (drive, load, dtype)
        reached[speculate] += prediction.seconds <= (1.25 if speculate else 1.1) * leasts[-1]
    assert min(reached.values()) >= 15, "it says something: half of the steps come near it"


def test_what_limits_is_the_resource_that_is_busy_for_most_of_the_step() -> None:
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
        assert step.limit_seconds == max(step.busy.values())
        assert f"{limit} limits, busy for {step.limit_seconds / step.seconds:.0%} of the step" in in_short(prediction)


BOTH = (MICRO_BATCH_MAJOR, LAYER_MAJOR)


def small_schedules(layers: int = 6, sequence: int = 128) -> Shape:
    return from_count(60_000_000, layers, sequence)


def machine_schedules(drive: str = "0.2GB/s", on_cpu: bool = False, **rates: float) -> Hardware:
    machine = described("RTX 4090", 16 * GIB, [parse_drive(drive)], 30e9)
    of_cpu = {"gpu_memory": 0, "matmul": 2e11, "weights": 1e10, "fresh": 4e9, "elementwise": 1e10}
    return replace(machine, **(of_cpu if on_cpu else {}) | rates)


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
    parts = recommend.settled(shape, on, load, content, in_turns=load.schedule == LAYER_MAJOR).parts
    gradients = sum(nbytes[State.GRAD] for nbytes in parts.nbytes)
    device = 3 * max(parts.unit_nbytes)
    return planned_schedules(load, on, shape, host_memory=gradients + 700 * MIB, device_memory=device)


@pytest.mark.sample(2)
@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("schedule", BOTH)
def test_bytes_a_parameter_follow_the_order(schedule: str, count: int) -> None:
    """24 for the update, 2 for each pass but the first: the backward, and in micro-batch-major every further pass."""
    load = Load(1, count, recompute=True, schedule=schedule, speculate=False)
    planned = tight(load)
    passes = 2 if schedule == LAYER_MAJOR else 2 * count
    costs = update_costs(planned.memory.parts, planned.memory.placement, planned.memory.slots)
    least = sum(least_moved(planned.memory, costs, passes))
    moved = planned.timing.moved
    assert moved.gradients_written == 0
    seconds = (moved.read + moved.written) / 2e9
    expected = 24 + 2 * (passes - 1)
    assert expected == (26 if schedule == LAYER_MAJOR else 26 + 4 * (count - 1))
    assert least <= moved.read + moved.written
    # A few units are in memory at each turn of the passes.
    assert expected * 0.92 <= seconds <= expected * 1.001


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
    left, right = (recommend.plan(shape, on, load._replace(schedule=each), content).timing.moved for each in BOTH)
    # An update that finds no host buffer reads its weights again, whatever the order: at most those of a step.
    slack = 2 * shape.parameters if speculate else 0
    assert right.read + right.written <= left.read + left.written + slack


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


@pytest.mark.parametrize(
    ("options", "overlap"),
    [({"durability": "none"}, True), ({"states": "cpu", "weights": "cpu"}, True), ({}, False)],
    ids=["one slot", "states in memory", "no overlap"],
)
def test_an_update_that_cannot_be_undone_waits_for_step(options: dict[str, Any], overlap: bool) -> None:
    content = memory.settings(**options)
    content["offload"]["debug"] = {"overlap": overlap}
    shape, on = small_schedules(), machine_schedules("5GB/s")
    one_slot = recommend.plan(shape, on, Load(64, speculate=False), content).memory.stored
    full = replace(on, drives=tuple(drive._replace(free=one_slot) for drive in on.drives))
    plan = recommend.plan(shape, full if "durability" in options else on, Load(64), content)
    assert plan.timing.simulation.speculated == () and plan.timing.miss_seconds == 0


@pytest.mark.parametrize(
    ("durability", "slots"),
    [
        ("step", "two slots, every step durable"),
        ({"every": 10}, "two slots, three where updates begin under the backward, every 10 steps durable"),
        ("none", "two slots where updates begin under the backward, no resume after a kill"),
    ],
    ids=str,
)
def test_a_plan_says_what_slots_are_for(durability: Any, slots: str) -> None:
    planned = planned_schedules(Load(1), durability=durability)
    rows = lines(planned, recommend.Advice((), planned.memory.host), Asked())
    assert any(f"({slots})" in row for row in rows)


# -- memory -------------------------------------------------------------------------------------------


def test_a_step_whose_micro_batches_do_not_fit_at_once_is_refused_with_what_to_do() -> None:
    shape, on = from_count(13 * 10**9, 40, 2048), described("RTX 4090", 64 * GIB, [parse_drive("7GB/s,5GB/s")])
    load = Load(4, 64, recompute=True, schedule=LAYER_MAJOR)
    with pytest.raises(BudgetError, match=r"of 64 x 4 x 2048 tokens take .* \(--schedule micro_batch_major\)"):
        planned_schedules(load, on, shape)


# -- the choice ---------------------------------------------------------------------------------------


def test_auto_takes_the_order_of_the_shorter_step() -> None:
    shape, on = from_count(65 * 10**8, 20, 1024), described("RTX 4090", 64 * GIB, [parse_drive("7GB/s,5GB/s")])
    choice = recommend.choose(shape, on, Load(8, 8), None)
    assert choice.choice.schedule == choice.load.schedule == LAYER_MAJOR and choice.given.schedule == "auto"
    content = {**choice.content}
    plan = recommend.plan(shape, on, Load(8, 8, schedule=MICRO_BATCH_MAJOR), content)
    assert choice.timing.seconds < 0.7 * plan.timing.seconds
    more = recommend.choose(shape, on, Load(8, 16), None)  # where compute takes twice as long as the drive
    assert more.timing.seconds <= 1.1 * more.timing.formula_seconds


@pytest.mark.parametrize(
    ("states", "gpu_memory", "on_cpu", "schedule", "reason"),
    [
        ("cpu", 16 * GIB, False, LAYER_MAJOR, "gradients leave the device once a step"),
        ("none", 16 * GIB, False, MICRO_BATCH_MAJOR, "all weights and gradients stay on the device"),
        ("cpu", 0, True, MICRO_BATCH_MAJOR, "all weights and gradients stay on the device"),
        ("cpu", 300 * MIB, False, MICRO_BATCH_MAJOR, "activations of 4 micro-batches take"),
    ],
)
def test_beside_weights_that_stay_a_plan_knows_whether_micro_batches_may_take_turns(
    states: str, gpu_memory: int, on_cpu: bool, schedule: str, reason: str
) -> None:
    shape, load = small_schedules(), Load(4, 4)
    on = replace(machine_schedules(on_cpu=on_cpu), gpu_memory=gpu_memory)
    settled = recommend.settled(shape, on, load, memory.settings("none", states, batch=4, accumulation=4))
    choice = step_time.choice_of(shape, on, load, settled, wish_of(settled.config))
    assert choice.schedule == schedule and choice.reason.startswith(reason) and not choice.after_a_step


UNIFIED = [gpu for gpu in GPUS if gpu.unified]
COUNT = ("plan", "--parameters", "1B", "--layers", "16", "--seq-len", "1024", "--ram", "64GB", "--drive", "7GB/s,5GB/s")


# -- origins ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_rate_of_every_gpu_has_an_origin_and_a_source(gpu: Gpu) -> None:
    assert find_gpu(gpu.name) == (gpu, None)
    for rate in described(gpu.name).rates:
        assert rate.origin in ORIGINS and rate.origin not in ("measured", "given")
        assert rate.source and rate.value > 0
        assert (rate.origin == "published") == any(word in rate.source for word in (".com/", ".info/", "docs/"))


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


@pytest.mark.slow
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
    for plan_of in (planned, recommend.with_host_budget(planned)):
        beside = beside_weights(plan_of.memory, shape, load)
        assert plan_of.memory.host + plan_of.memory.device + beside <= machine.ram
    content = memory.settings("nvme", "nvme", host_memory=110 * GIB, batch=4)
    with pytest.raises(BudgetError, match="activations"):
        recommend.plan(shape, machine, Load(8, 1, True), content)
    written = request.ready(planned)["offload"]
    assert {"host_memory", "device_memory"} <= written.keys(), "a run would see the same bytes free twice"


def test_a_bus_between_gpu_and_cpu_that_have_one_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="--pcie has no meaning"):
        described("GB10", link=25e9)
