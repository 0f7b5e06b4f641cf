"""Gradients leave a device beside the backward, together or added up there, and no bit changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from offload import testing
from offload.engine.gradient_transfer import DeviceToHost, Piece, SmallGradients, join
from offload.sizes import GIB, MIB
from offload.swapper.memory.device import DONE, Device, DeviceRoom, Event
from offload.swapper.memory.host_arena import HostArena, HostBudget
from tests.support import models
from tests.support.devices.late_device import LateDevice, Ticks, use_device
from tests.support.oracle import (
    Job,
    assert_same,
    assert_same_tensors,
    config,
    least_host_memory,
    room_for,
    run,
    small_pieces,
    start,
    train_step,
    trained,
    weights_of,
)

STAGING = 4096


class Held:
    """The event of a copy that is carried out when the test says so, or at once where nobody holds it."""

    def __init__(self, device: HeldDevice, destination: torch.Tensor, source: torch.Tensor) -> None:
        self._device, self._copy = device, lambda: destination.copy_(source)

    def done(self) -> bool:
        return self._device.go.is_set()

    def wait(self) -> None:
        assert self._device.go.wait(60)
        self._copy()


class HeldDevice(Device):
    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.go = threading.Event()
        self.host_addressable = False
        self.begun = 0

    def download(self, destination: torch.Tensor, source: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        self.begun += 1
        return Held(self, destination, source)


def refuse(error: BaseException) -> None:
    raise error


@pytest.fixture
def made() -> Iterator[tuple[DeviceToHost, HeldDevice]]:
    """Downloads whose copies end at once, until a test clears `go`."""
    device = HeldDevice()
    device.go.set()
    arena = HostArena(HostBudget(0, 0, 0, 0, 3 * STAGING), device)
    staging = [arena.staging.take(STAGING) for _ in range(3)]
    downloads = DeviceToHost(device, [each for each in staging if each], 16384, True, refuse, lambda: None)
    yield downloads, device
    device.go.set()
    downloads.close()
    arena.close()


Made = tuple[DeviceToHost, HeldDevice]


def numbers(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def test_who_sends_goes_on_until_so_much_is_on_its_way(made: Made) -> None:
    """Although no copy ends, and although it is more than all staging buffers together."""
    downloads, device = made
    device.go.clear()
    sources = [numbers(1024, seed) for seed in range(5)]
    kept = [torch.zeros(1024) for _ in sources]
    for number in range(4):
        staged = number % 2

        def receive(position: int, some: torch.Tensor, number: int = number) -> None:
            kept[number][position : position + len(some)] = some

        downloads.send("one", sources[number], None if staged else kept[number], receive if staged else None)
    sent = threading.Event()

    def fifth() -> None:
        downloads.send("one too many", sources[4], kept[4], None)
        sent.set()

    thread = threading.Thread(target=fifth)
    thread.start()
    while device.begun < 4:  # by the thread that copies, whenever a busy machine lets it run
        time.sleep(0.001)
    assert not sent.wait(0.2) and device.begun == 4
    device.go.set()
    assert sent.wait(60)
    thread.join()
    downloads.drain()
    assert all(torch.equal(source, got) for source, got in zip(sources, kept, strict=True))


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 1023, 1024, 1025, 2048, 9000])
def test_a_gradient_larger_than_a_staging_buffer_arrives_in_ordered_chunks(
    numel: int, dtype: torch.dtype, made: Made
) -> None:
    downloads, _ = made
    source, pieces = numbers(numel, 0).to(dtype), list[tuple[int, torch.Tensor]]()
    downloads.send("it", source, None, lambda position, some: pieces.append((position, some.clone())))
    downloads.drain()
    assert [position for position, _ in pieces] == list(range(0, numel, STAGING // dtype.itemsize))
    assert torch.equal(torch.cat([some for _, some in pieces]), source)


NEVER = 0
"""The size below which nothing is small."""


# -- downloads ----------------------------------------------------------------------------------------


def collect(downloads: DeviceToHost, unit: int, segment: int, source: torch.Tensor) -> torch.Tensor:
    """Collects a gradient, and returns where it comes to."""
    target = torch.zeros_like(source)
    downloads.collect(f"gradient of {unit}", (unit, segment, 0), source, target, None)
    return target


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


def test_an_error_in_a_backward_leaves_what_a_backward_has_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in torch: whether small gradients were already sent is not to be seen."""
    job = models.GPT2._replace(steps=3)

    def failed(gradient: torch.Tensor) -> None:
        raise ValueError("of the user")

    results = {}
    for name in ("at once", "late"):
        if name == "late":
            late(monkeypatch)
        engine = start(job, ("cpu", "cpu"), tmp_path / name)
        at_once = name == "at once" and engine.device.type == "cpu"
        assert testing.inspect(engine).gradients.downloads.copies is not at_once
        losses = [train_step(engine, job, 0)]
        hook = engine.module.transformer.h[1].ln_2.weight.register_hook(failed)
        with pytest.raises(ValueError, match="of the user"):
            engine.backward(job.loss(engine, 1, 0))
        hook.remove()
        engine.backward(job.loss(engine, 1, 0))
        engine.optimizer.step()
        losses += [engine.get_global_grad_norm(), train_step(engine, job, 2)]
        results[name] = losses, weights_of(engine)
        engine.destroy(remove=True)
    assert results["at once"][0] == results["late"][0]
    assert_same_tensors(results["at once"][1], results["late"][1])


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


JOB = models.MIXTURE._replace(steps=3, accumulation=3, dtype="bf16")
ALL_UNITS = 1 << 24
"""Bytes of a device that has room for all weights and gradients of these models."""


def all_added(engine: offload.Engine) -> bool:
    return all(
        testing.inspect(engine).gradients_add_up_on_device(unit)
        for unit, part in enumerate(testing.inspect(engine).trainable)
        if part
    )


def gradient_bytes(engine: offload.Engine) -> int:
    """Of one micro-batch that reaches all parameters, in the dtype in which they are kept."""
    numel = sum(parameter.numel() for parameter in engine.module.parameters() if parameter.requires_grad)
    return numel * testing.inspect(engine).gradient_dtype.itemsize


def late_totals(patch: pytest.MonkeyPatch, seed: int = 0, lateness: float = 0.9, spare: int = 0) -> LateDevice:
    device = LateDevice(seed, lateness)
    device.spare = DeviceRoom(spare, 0)
    use_device(patch, device)
    return device


# -- what moves ---------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("placement", [("cpu", "cpu"), ("nvme", "nvme"), ("none", "cpu")], ids="-".join)
def test_a_step_downloads_the_gradients_of_one_micro_batch(
    placement: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = models.GPT2._replace(accumulation=4, dtype="bf16")
    moved = {}
    for room in (ALL_UNITS, room_for(job, 100 if placement[0] == "none" else 3)):
        device = late_totals(monkeypatch)
        engine = start(job, placement, tmp_path, device_memory=room)
        before = device.downloaded
        for step in range(3):
            train_step(engine, job, step)
        moved[all_added(engine)] = device.downloaded - before
        once = gradient_bytes(engine)
        engine.destroy(remove=True)
    assert moved[True] == 3 * once // 2, "rounded to bf16, once"
    assert moved[False] == 3 * 4 * once // 2, "in bf16, after each micro-batch"


def test_what_the_first_step_has_left_free_is_for_weights_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a number of the user's. The first step adds on the host, the others on the device."""
    job = models.GPT2._replace(accumulation=3, dtype="bf16", steps=4)
    expected = run(job, ("none", "none"), tmp_path / "plain")
    device = late_totals(monkeypatch, spare=GIB)
    engine = start(job, ("cpu", "cpu"), tmp_path)
    need, moved = testing.inspect(engine).device_need, list[int]()
    assert engine.device_memory < need.weights and not need.added(engine.device_memory)
    steps = []
    with Ticks(device):
        for step in range(job.steps):
            before = device.downloaded
            steps.append((train_step(engine, job, step), engine.get_global_grad_norm()))
            moved.append(device.downloaded - before)
            assert all_added(engine) and engine.device_memory == need.most
    assert steps == list(zip(expected.losses, expected.norms, strict=True)) and device.broken == []
    assert_same_tensors(expected.weights, weights_of(engine))
    assert moved[0] > moved[1] == moved[2] == moved[3]
    engine.destroy(remove=True)


# -- bits ---------------------------------------------------------------------------------------------


class Twice(models.Mixture):
    """Each block runs in two regions of its own, so that a backward gives its gradients twice."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids) * self.scale
        for block in self.blocks:
            for _ in range(2):
                hidden = hidden + checkpoint(block, hidden, use_reentrant=True)
        return self.head(hidden)


JOBS = {
    "gpt2, tied": models.GPT2._replace(steps=3, accumulation=3),
    "experts of some micro-batches": JOB,
    "one parameter twice": JOB._replace(model=Twice, accumulation=2),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("accumulates", [None, "bf16", "fp16"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp16"])
@pytest.mark.parametrize("name", JOBS)
def test_the_bits_are_those_of_sums_on_the_host(
    name: str, dtype: str, accumulates: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JOBS[name]._replace(dtype=dtype)
    if accumulates not in (None, dtype):
        pytest.skip("a dtype of another mode")
    results = []
    for seed, device in enumerate((None, LateDevice(0, 0.9))):
        with monkeypatch.context() as patch:
            if device is not None:
                use_device(patch, device)
            torch.manual_seed(job.seed)
            settings = config(job, ("nvme", "cpu"), tmp_path / f"{seed}", device_memory=ALL_UNITS)
            settings["data_types"]["grad_accum_dtype"] = accumulates
            engine = offload.initialize(model=job.model(), config=settings)[0]
            assert all_added(engine) == (device is not None or engine.device.type != "cpu")
            if device is None:
                results.append(trained(engine, job))
            else:
                with Ticks(device):
                    results.append(trained(engine, job))
                assert device.broken == []
            engine.destroy(remove=True)
    assert_same(*results)


def more_than_the_count(engine: offload.Engine, job: Job, step: int) -> None:
    """The word of the user comes only when all backwards have run; what had left is added on the host."""
    engine.set_gradient_accumulation_boundary(step == 1)
    for micro in range(5):
        engine.backward(job.loss(engine, step, micro))
    engine.set_gradient_accumulation_boundary(True)
    engine.step()


def read_and_set(engine: offload.Engine, job: Job, step: int) -> None:
    """In the middle of a step: zero, look, set, and go on."""
    weights = [weight for weight in engine.module.parameters() if weight.requires_grad]
    engine.backward(job.loss(engine, step, 0))
    engine.zero_grad()
    engine.backward(job.loss(engine, step, 1))
    engine.step()
    seen = [offload.safe_get_full_grad(weight) for weight in weights[::2]]
    assert any(gradient is not None and gradient.any() for gradient in seen)
    offload.safe_set_full_grad(weights[1], torch.ones(weights[1].shape))
    offload.safe_set_full_grad(weights[2], torch.ones(weights[2].shape))
    with torch.no_grad():
        weights[3].mul_(0.5)  # an edit: an update without a gradient
    for micro in range(2, 4):
        engine.backward(job.loss(engine, step, micro))
        engine.step()
    assert engine.global_steps == step + 1


def one_at_the_end(engine: offload.Engine, job: Job, step: int) -> None:
    """From the second step on each is one micro-batch, which nothing is added to."""
    for micro in range(job.accumulation if step == 0 else 1):
        engine.backward(job.loss(engine, step, micro))
        engine.step()
    if step == 0:
        engine.set_train_batch_size(1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("loop", [more_than_the_count, read_and_set, one_at_the_end])
def test_what_a_loop_does_in_the_middle_changes_no_bit(
    loop: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for seed, device in enumerate((None, LateDevice(0, 0.9))):
        with monkeypatch.context() as patch:
            if device is not None:
                use_device(patch, device)
            engine = start(JOB, ("cpu", "nvme"), tmp_path / f"{seed}", device_memory=ALL_UNITS)
            norms = []
            with Ticks(device or LateDevice(0, 0.0)):
                for step in range(3):
                    loop(engine, JOB, step)
                    norms.append(engine.get_global_grad_norm())
            assert all_added(engine) == (device is not None or engine.device.type != "cpu")
            assert device is None or device.broken == []
            results.append((norms, weights_of(engine)))
            engine.destroy(remove=True)
    assert results[0][0] == results[1][0]
    assert_same_tensors(results[0][1], results[1][1])


def test_a_step_that_is_skipped_leaves_nothing_of_its_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp16 a loss of inf in the first of two micro-batches."""
    job = JOB._replace(dtype="fp16", accumulation=2)

    def loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
        return job.loss(model, step, micro) * (float("inf") if (step, micro) == (1, 0) else 1.0)

    results = []
    for seed, device in enumerate((None, LateDevice(0, 0.9))):
        with monkeypatch.context() as patch:
            if device is not None:
                use_device(patch, device)
            engine = start(job, ("nvme", "nvme"), tmp_path / f"{seed}", device_memory=ALL_UNITS)
            for step in range(4):
                train_step(engine, job._replace(loss=loss), step)
            assert engine.skipped_steps == 1
            results.append((engine.get_global_grad_norm(), weights_of(engine)))
            engine.destroy(remove=True)
    assert results[0][0] == results[1][0]
    assert_same_tensors(results[0][1], results[1][1])


def test_a_total_on_its_way_at_a_ctrl_c_is_not_added_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the wait for a total that was sent; then the step goes on, while the copy takes its time."""
    go = threading.Event()
    testing.replace(
        monkeypatch, "gradient.begin_download", lambda self, real=DeviceToHost._begin: go.wait(60) and real(self)
    )
    results = []
    for interrupted in (False, True):
        go.set()
        device = late_totals(monkeypatch)
        engine = start(JOB, ("cpu", "cpu"), tmp_path, device_memory=ALL_UNITS)
        with Ticks(device):
            engine.backward(JOB.loss(engine, 0, 0))
            engine.step()
            if interrupted:
                go.clear()
                with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                    testing.replace(patch, "gradient.drain", stopped)
                    offload.safe_get_full_grad(next(iter(engine.module.parameters())))
            engine.backward(JOB.loss(engine, 0, 1))
            go.set()
            engine.step()
            engine.backward(JOB.loss(engine, 0, 2))
            engine.step()
        assert device.broken == [] and engine.global_steps == 1
        results.append((engine.get_global_grad_norm(), weights_of(engine)))
        engine.destroy(remove=True)
    assert results[0][0] == results[1][0]
    assert_same_tensors(results[0][1], results[1][1])


def stopped(*_: Any) -> None:
    raise KeyboardInterrupt
