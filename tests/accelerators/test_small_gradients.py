"""Small gradients of a unit leave the device together, and change no bit."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import offload
from offload import testing
from offload.engine.gradient_transfer import DeviceToHost, Piece, SmallGradients, join
from offload.sizes import GIB, MIB
from offload.swapper.memory.device import DONE, Device, DeviceRoom
from offload.swapper.memory.host_arena import HostArena, HostBudget
from tests.accelerators.test_gradient_downloads import Engine, HeldDevice, numbers
from tests.support import models
from tests.support.devices.late_device import LateDevice, Ticks, use_device
from tests.support.oracle import (
    Job,
    assert_same,
    assert_same_tensors,
    least_host_memory,
    run,
    small_pieces,
    start,
    train_step,
    trained,
    weights_of,
)

STAGING = 4096
NEVER = 0
"""The size below which nothing is small."""


# -- downloads ----------------------------------------------------------------------------------------


@pytest.fixture
def made() -> Iterator[tuple[DeviceToHost, HeldDevice]]:
    device, engine = HeldDevice(), Engine()
    device.go.set()
    arena = HostArena(HostBudget(0, 0, 0, 0, 3 * STAGING), device)
    staging = [arena.staging.take(STAGING) for _ in range(3)]
    downloads = DeviceToHost(device, [each for each in staging if each], 16384, True, engine.fail, engine.check)
    yield downloads, device
    device.go.set()
    downloads.close()
    arena.close()


Made = tuple[DeviceToHost, HeldDevice]


def full(*_: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def collect(downloads: DeviceToHost, unit: int, segment: int, source: torch.Tensor) -> torch.Tensor:
    """Collects a gradient, and returns where it comes to."""
    target = torch.zeros_like(source)
    downloads.collect(f"gradient of {unit}", (unit, segment, 0), source, target, None)
    return target


def test_gradients_of_a_unit_leave_together_and_arrive_apart(made: Made) -> None:
    downloads, device = made
    sources = [numbers(7, 0), numbers(3, 1).bfloat16(), numbers(100, 2), numbers(5, 3).half(), numbers(1, 4)]
    received: list[tuple[int, torch.Tensor]] = []
    targets = [collect(downloads, 0, segment, source) for segment, source in enumerate(sources)]
    downloads.collect(
        "gradient of 0", (0, 9, 0), sources[0], None, lambda at, some: received.append((at, some.clone()))
    )
    assert device.begun == 0
    downloads.drain()
    assert device.begun == 1
    assert all(torch.equal(source, target) for source, target in zip(sources, targets, strict=True))
    assert [at for at, _ in received] == [0] and torch.equal(received[0][1], sources[0])


@pytest.mark.parametrize(("missing", "copies"), [(None, 1), (1, 3)])
def test_neighbours_in_host_memory_are_copied_straight_to_their_places(
    missing: int | None, copies: int, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the padding between them, and with no byte of a parameter that has no gradient."""
    testing.replace(monkeypatch, "size.staged_gradient", 100)
    downloads, device = made
    memory = torch.full((256,), 7.0)
    places = [slice(0, 40), slice(64, 65), slice(96, 160), slice(160, 193), slice(224, 226)]  # of 32 elements or more
    sources = {segment: numbers(place.stop - place.start, segment) for segment, place in enumerate(places)}
    for segment in (4, 3, 2, 1, 0):  # as a backward makes them
        if segment != missing:
            downloads.collect("it", (0, segment, 0), sources[segment], memory[places[segment]], None)
    staged: list[torch.Tensor] = []
    if missing is not None:
        for segment in (5, 6):  # what has no place of its own goes through a staging buffer, as one copy
            downloads.collect("it", (0, segment, 0), numbers(3, segment), None, lambda _, some: staged.append(some + 0))
    downloads.drain()
    assert device.begun == copies and all(torch.equal(numbers(3, 5 + at), some) for at, some in enumerate(staged))
    for segment, place in enumerate(places):
        assert torch.equal(memory[place], sources[segment]) == (segment != missing)
    assert bool((memory[226:] == 7.0).all()) and (missing is None or bool((memory[64:96] == 7.0).all()))


def test_gradients_that_have_no_room_to_be_joined_leave_alone(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads, device = made
    targets = [collect(downloads, 0, segment, numbers(10, segment)) for segment in range(3)]
    monkeypatch.setattr(torch, "cat", full)
    downloads.drain()
    assert device.begun == 3
    assert all(torch.equal(numbers(10, segment), target) for segment, target in enumerate(targets))


def test_an_allocation_is_tried_again_when_gradients_in_flight_have_left_their_memory(made: Made) -> None:
    downloads, device = made
    device.go.clear()
    sources = [numbers(1000, seed) for seed in range(2)]
    alive, tried = [weakref.ref(source) for source in sources], []
    targets = [collect(downloads, 0, segment, sources.pop(0)) for segment in range(2)]

    def allocate() -> str:
        tried.append(sum(each() is not None for each in alive))
        device.go.set()
        return full() if tried[-1] else "memory"

    assert downloads.with_memory(allocate) == "memory" and tried == [2, 0]
    assert all(torch.equal(numbers(1000, segment), target) for segment, target in enumerate(targets))
    with pytest.raises(torch.OutOfMemoryError):  # there is nothing to wait for
        downloads.with_memory(full)


def test_a_gradient_of_another_unit_sends_those_before(made: Made) -> None:
    downloads, device = made
    first, second = (collect(downloads, 0, segment, numbers(10, segment)) for segment in range(2))
    third = collect(downloads, 1, 0, numbers(10, 2))
    downloads.flush()
    downloads.flush()
    downloads.drain()
    assert device.begun == 2
    for seed, target in enumerate((first, second, third)):
        assert torch.equal(target, numbers(10, seed))


def test_a_large_gradient_leaves_alone_and_at_once(made: Made) -> None:
    downloads, device = made
    small = collect(downloads, 0, 0, numbers(10, 0))
    large = collect(downloads, 0, 1, numbers(2000, 1))  # larger than a staging buffer
    also = collect(downloads, 0, 2, numbers(10, 2))
    alone = torch.zeros(10)
    assert len(downloads._small.pieces) == 2 and not downloads._small.accepts(large)
    downloads.collect("gradient of 0", None, numbers(10, 3), alone, None)
    downloads.drain()
    assert device.begun == 3
    for seed, target in enumerate((small, large, also, alone)):
        assert torch.equal(target, numbers(len(target), seed))


def test_gradients_of_one_place_arrive_in_their_order(made: Made) -> None:
    downloads, device = made
    order: list[float] = []
    for value in (1.0, 2.0, 3.0):
        source = torch.full((4,), value)
        downloads.collect("gradient of 0", (0, 0, 0), source, None, lambda _, some: order.append(float(some[0])))
        downloads.collect("gradient of 0", (0, 1, 0), source + 0.5, None, lambda _, some: order.append(float(some[0])))
    downloads.drain()
    assert order == [1.0, 1.5, 2.0, 2.5, 3.0, 3.5] and device.begun == 3


def test_together_they_never_exceed_a_staging_buffer(made: Made) -> None:
    downloads, device = made
    targets = [collect(downloads, 0, segment, numbers(300, segment)) for segment in range(10)]
    assert downloads._small.nbytes <= STAGING
    downloads.drain()
    assert device.begun == 4
    assert all(torch.equal(target, numbers(300, segment)) for segment, target in enumerate(targets))


def test_what_a_ctrl_c_kept_from_leaving_leaves_later(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    downloads, device = made
    device.go.clear()
    large = collect(downloads, 0, 0, numbers(4096, 0))  # all that may be in flight
    targets = [collect(downloads, 1, segment, numbers(10, segment)) for segment in range(3)]

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(downloads._changed, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            downloads.flush()
    device.go.set()
    downloads.drain()
    assert torch.equal(large, numbers(4096, 0))
    assert all(torch.equal(target, numbers(10, segment)) for segment, target in enumerate(targets))


@given(
    st.lists(st.tuples(st.integers(0, 70), st.sampled_from([torch.float32, torch.bfloat16, torch.float16])), max_size=9)
)
def test_what_is_joined_comes_apart_again(shapes: list[tuple[int, torch.dtype]]) -> None:
    sources = [numbers(numel, seed).to(dtype) for seed, (numel, dtype) in enumerate(shapes)]
    small = SmallGradients(1 << 20)
    for segment, source in enumerate(sources):
        place = (0, segment, 0)
        assert small.accepts(source) and not small.must_leave_before(place, source)
        small.add("unit", Piece(place, source, DONE, torch.zeros_like(source), None))
    assert small.nbytes == sum(source.nbytes for source in sources)
    if sources:
        joined, receive = join(small.pieces)
        receive(0, joined.clone())
        for piece in small.pieces:
            assert piece.target is not None and torch.equal(piece.source, piece.target)


# -- engines ------------------------------------------------------------------------------------------


def late(patch: pytest.MonkeyPatch, small: int = MIB, lateness: float = 0.9) -> LateDevice:
    device = LateDevice(0, lateness)
    testing.replace(patch, "size.small_gradient", small)
    use_device(patch, device)
    return device


@pytest.mark.sample(1)
@pytest.mark.parametrize("placement", [("cpu", "cpu"), ("nvme", "nvme"), ("none", "cpu")], ids="-".join)
def test_a_unit_of_small_gradients_is_one_download(
    placement: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, downloads, results = models.GPT2._replace(steps=2), {}, {}
    for small in (MIB, NEVER):
        device = late(monkeypatch, small)
        engine = start(job, placement, tmp_path)
        units, parameters = len(testing.inspect(engine).layouts), len(list(engine.module.parameters()))
        with Ticks(device):
            results[small] = trained(engine, job)
        downloads[small] = device.downloads / job.steps
        assert device.broken == []
        engine.destroy(remove=True)
    assert downloads == {MIB: units + 1, NEVER: parameters + 1}, "and the sums of squares"
    assert_same(results[MIB], results[NEVER])


@pytest.mark.sample(1)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("sums", [True, False])
def test_frozen_tied_and_unused_parameters_change_no_bit(
    sums: bool, dtype: str, accumulation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the device sums squares and where the host does, with totals on the device and without."""
    job = models.MIXTURE._replace(steps=3, accumulation=accumulation, dtype=dtype)
    expected = run(job, ("none", "none"), tmp_path / "plain")
    for small, spare in ((MIB, 0), (1 << 10, GIB), (MIB, GIB)):
        device = late(monkeypatch, small)
        device.spare = DeviceRoom(spare, 0)
        engine = start(job, ("cpu", "cpu"), tmp_path / f"{small}-{spare}")
        gradients = testing.inspect(engine).gradients
        assert gradients.downloads is not None
        gradients.downloads.sums = sums
        with Ticks(device):
            found = trained(engine, job)
        engine.destroy(remove=True)
        assert_same(expected, found)
        assert device.broken == []


def test_an_error_in_a_backward_leaves_what_a_backward_has_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in torch: whether small gradients were already sent is not to be seen."""
    job = models.GPT2._replace(steps=3)

    def failed(gradient: torch.Tensor) -> None:
        raise ValueError("of the user")

    found = {}
    for name in ("at once", "late"):
        if name == "late":
            late(monkeypatch)
        engine = start(job, ("cpu", "cpu"), tmp_path / name)
        at_once = name == "at once" and engine.device.type == "cpu"
        assert (testing.inspect(engine).gradients.downloads is None) == at_once
        losses = [train_step(engine, job, 0)]
        hook = engine.module.transformer.h[1].ln_2.weight.register_hook(failed)
        with pytest.raises(ValueError, match="of the user"):
            engine.backward(job.loss(engine, 1, 0))
        hook.remove()
        engine.backward(job.loss(engine, 1, 0))
        engine.optimizer.step()
        losses += [engine.get_global_grad_norm(), train_step(engine, job, 2)]
        found[name] = losses, weights_of(engine)
        engine.destroy(remove=True)
    assert found["at once"][0] == found["late"][0]
    assert_same_tensors(found["at once"][1], found["late"][1])


def test_a_gradient_is_read_edited_and_dropped_before_a_step_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = models.GPT2._replace(steps=2)
    found: dict[int, list[Any]] = {}
    for small in (MIB, NEVER):
        device = late(monkeypatch, small)
        engine = start(job, ("cpu", "cpu"), tmp_path)
        weight = engine.module.transformer.h[0].ln_1.weight
        engine.backward(job.loss(engine, 0, 0))
        gradient = offload.safe_get_full_grad(weight)
        offload.safe_set_full_grad(weight, gradient * 2)
        read = offload.safe_get_full_grad(weight)
        engine.step()
        norm = engine.get_global_grad_norm()
        engine.backward(job.loss(engine, 1, 0))
        engine.zero_grad()
        found[small] = [gradient, read, torch.tensor(norm), torch.tensor(train_step(engine, job, 1))]
        assert device.broken == [] and torch.equal(read, gradient * 2)
        engine.destroy(remove=True)
    assert all(torch.equal(a, b) for a, b in zip(found[MIB], found[NEVER], strict=True))


class Penalized(nn.Module):
    """A model whose loss contains the gradient of its output by its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        batch = batch.requires_grad_()
        hidden = batch
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        (slope,) = torch.autograd.grad(hidden.sum(), batch, create_graph=True)
        return hidden.square().mean() + slope.square().mean()


def penalized_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(step * 10 + micro))
    return model(batch)  # type: ignore[no-any-return]


def test_a_double_backward_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(Penalized, penalized_loss, steps=3, accumulation=2)
    expected = run(job, ("none", "none"), tmp_path / "plain")
    for small in (MIB, NEVER):
        device = late(monkeypatch, small)
        engine = start(job, ("cpu", "cpu"), tmp_path / str(small))
        with Ticks(device):
            assert_same(expected, trained(engine, job))
        assert device.broken == []
        engine.destroy(remove=True)


def test_gradients_that_spill_leave_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones that came late would fetch windows from the drive that were written already."""
    small_pieces(monkeypatch)
    late(monkeypatch)
    least = least_host_memory(models.GPT2, tmp_path)
    engine = start(models.GPT2, ("nvme", "nvme"), tmp_path, host_memory=least)
    inspected = testing.inspect(engine)
    assert all(inspected.gradients_spill(unit) for unit in range(len(inspected.layouts)))
    with monkeypatch.context() as patch:
        testing.replace(patch, "gradient.add_small", None)
        train_step(engine, models.GPT2, 0)
    engine.destroy(remove=True)


def test_a_cpu_copies_nothing_more(tmp_path: Path) -> None:
    engine = start(models.GPT2, ("cpu", "cpu"), tmp_path, device="cpu")
    assert testing.inspect(engine).gradients.downloads is None
    assert isinstance(testing.inspect(engine).device, Device)
    engine.destroy(remove=True)
