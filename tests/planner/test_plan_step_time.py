"""The seconds of a step follow the formulas of compute, drives and updates; no faster component makes it slower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from offload.planner import memory, recommend, step_time
from offload.planner.activations import Load
from offload.planner.hardware import Hardware, described, parse_drive
from offload.planner.model_shape import Shape, from_count
from offload.sizes import GIB


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
