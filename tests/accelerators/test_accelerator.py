"""An accelerator is driven by torch's names; on a GPU an engine sets, says and leaves alone what it should."""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from offload import kernels, precision, testing
from offload.cli.main import app
from offload.config import load_config
from offload.engine.plan import _device_kernels
from offload.engine.snapshot import read_generators, write_generators
from offload.errors import ConfigError
from offload.finetune import job
from offload.kernels import settings
from offload.notices import Remark
from offload.swapper.memory import device
from offload.swapper.memory import device as accelerator
from offload.swapper.memory import device as device_choice
from offload.swapper.memory.device import (
    DONE,
    AcceleratorDevice,
    CudaHostSide,
    Device,
    TorchHostSide,
    bytes_taken_by_torch,
    compute_device,
    host_side_of,
    open_device,
)
from offload.swapper.memory.host_arena import HostArena, HostBudget, PinnedRegions
from offload.torch_internals import SHALLOW_COPY_QUERY, set_data
from tests.support import models
from tests.support.devices.late_device import LateDevice, use_device
from tests.support.oracle import start
from tests.support.processes.cli_in_process import isolated_cache, run_folder

PAGE = 4096
XPU, CUDA = torch.device("xpu", 0), torch.device("cuda", 0)


class Stream:
    """A stream that notes in which order it was told what."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.told: list[Any] = []

    def record_event(self) -> Event:
        self.told.append("record")
        return Event()

    def wait_event(self, event: Any) -> None:
        self.told.append(event)


class Event:
    def __init__(self) -> None:
        self.ended = False

    def query(self) -> bool:
        return self.ended

    def synchronize(self) -> None:
        self.ended = True


class Torch:
    """`torch.accelerator` on a machine with `count` devices of one type."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, of: str | None, count: int = 1) -> None:
        self.index = 0
        self.stream: Any = "compute"
        self.history: list[Any] = []
        for name, value in {
            "is_available": lambda: of is not None,
            "current_accelerator": lambda: torch.device(of or "nothing, as torch 2.6, which raises"),
            "device_count": lambda: count,
            "current_device_index": lambda: self.index,
            "set_device_index": self.set_index,
            "current_stream": lambda _: self.stream,
            "set_stream": self.set_stream,
            "synchronize": lambda device: self.history.append(("synchronize", device)),
        }.items():
            monkeypatch.setattr(torch.accelerator, name, value)
        monkeypatch.setattr(torch, "Stream", Stream)
        monkeypatch.delenv("LOCAL_RANK", raising=False)

    def set_index(self, index: int) -> None:
        self.index = index
        self.history.append(index)

    def set_stream(self, stream: Any) -> None:
        """As torch does, which makes the stream's device the current one too."""
        self.stream = stream
        self.index = 0 if stream == "compute" else stream.device.index


def opened(monkeypatch: pytest.MonkeyPatch) -> tuple[AcceleratorDevice, Torch]:
    machine = Torch(monkeypatch, "xpu", 2)
    return AcceleratorDevice(torch.device("xpu", 1), TorchHostSide(XPU)), machine


@pytest.mark.parametrize(
    ("of", "name", "expected"),
    [
        (None, "auto", "cpu"),
        (None, "cpu", "cpu"),
        ("cuda", "auto", "cuda:0"),
        ("cuda", "cuda", "cuda:0"),
        ("cuda", "cpu", "cpu"),
        ("xpu", "auto", "xpu:0"),
        ("xpu", "xpu", "xpu:0"),
    ],
)
def test_auto_is_the_accelerator_that_torch_finds(
    of: str | None, name: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Torch(monkeypatch, of)
    assert compute_device(name) == torch.device(expected)


@pytest.mark.parametrize(
    ("of", "name", "message"),
    [
        (None, "cuda", '"device" is cuda, but torch finds no CUDA device; set it to "auto" or "cpu"'),
        (None, "xpu", '"device" is xpu, but torch finds no XPU device; set it to "auto" or "cpu"'),
        ("xpu", "cuda", '"device" is cuda, but torch finds no CUDA device'),
        (None, "tpu", "there is no device 'tpu': \"device\" may be auto, cpu, cuda$"),
        ("xpu", "meta", "there is no device 'meta': \"device\" may be auto, cpu, cuda, xpu$"),
        ("cuda", "cuda:1", "there is no device 'cuda:1': .*cuda; CUDA_VISIBLE_DEVICES=1 chooses one of several$"),
        ("cuda", "hip", "there is no device 'hip': \"device\" may be auto, cpu, cuda; ROCm is cuda to torch$"),
    ],
)
def test_a_device_that_is_not_there_is_an_error(
    of: str | None, name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Torch(monkeypatch, of)
    with pytest.raises(ConfigError, match=message):
        compute_device(name)


def test_of_several_devices_each_rank_takes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Torch(monkeypatch, "xpu", 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert compute_device("auto") == torch.device("xpu", 1) and machine.history == [1]
    assert compute_device("auto") == torch.device("xpu", 1), "a current device other than 0 is the user's"
    machine.index = 0
    for rank in ("2", "node07", "-1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        expected = f"LOCAL_RANK is {rank}, but torch finds 2 devices; start one process for each"
        with pytest.raises(ConfigError, match=expected):
            compute_device("auto")


def test_what_is_cudas_own_is_used_for_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    Torch(monkeypatch, "cuda")
    assert type(host_side_of(CUDA)) is CudaHostSide and type(host_side_of(XPU)) is TorchHostSide
    monkeypatch.setitem(device_choice.HOST_SIDES, "xpu", CudaHostSide)
    assert type(host_side_of(XPU)) is CudaHostSide
    open_device.cache_clear()
    try:
        assert type(open_device(CUDA)) is AcceleratorDevice and open_device(torch.device("cuda")) is open_device(CUDA)
        assert type(open_device(torch.device("cpu"))) is Device
    finally:
        open_device.cache_clear()


def test_an_accelerator_without_kernels_of_ours_says_so() -> None:
    device = Device(XPU)
    device.host_addressable = False
    kernels, (notice,) = _device_kernels(device)
    assert not kernels and "kernels for CUDA alone, and this device is xpu" in notice


def test_the_generator_of_any_accelerator_is_kept_and_a_state_of_another_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generators = {name: torch.Generator().manual_seed(seed) for seed, name in enumerate(("cuda", "xpu"))}
    modules: dict[str, Any] = {
        name: SimpleNamespace(
            get_rng_state=lambda _, generator=generator: generator.get_state(),
            set_rng_state=lambda state, _, generator=generator: generator.set_state(state),
        )
        for name, generator in generators.items()
    }
    monkeypatch.setattr(torch, "get_device_module", lambda device: modules[device.type])
    kept = read_generators(XPU)
    assert "cuda" not in kept and torch.equal(kept["xpu"], generators["xpu"].get_state())
    old = read_generators(CUDA)
    assert "cuda" in old and "xpu" not in old, "the name that runs before had"
    expected = {name: torch.rand(3, generator=copy.deepcopy(each)) for name, each in generators.items()}
    torch.rand(3, generator=generators["xpu"])
    write_generators(kept, XPU)
    write_generators(old, XPU)
    write_generators(kept, torch.device("cpu"))
    assert torch.equal(torch.rand(3, generator=generators["xpu"]), expected["xpu"])
    write_generators(old, CUDA)
    assert torch.equal(torch.rand(3, generator=generators["cuda"]), expected["cuda"])


class Marked(nn.Parameter):
    pass


def test_a_parameter_keeps_all_that_is_its_own_where_torch_refuses_its_new_device() -> None:
    """As between the CPU and a device of a backend of one's own. The meta device stands for one."""
    called: list[str] = []
    parameter = Marked(torch.ones(2, 3))
    parameter.mark = "mine"  # type: ignore[attr-defined]
    parameter.register_hook(lambda gradient: called.append("hook"))
    parameter.register_post_accumulate_grad_hook(lambda leaf: called.append("after"))
    there = torch.zeros((), device="meta").expand(2, 3)
    assert not SHALLOW_COPY_QUERY(parameter, there)
    set_data(parameter, there)
    assert parameter.is_meta and parameter.requires_grad and parameter.mark == "mine"  # type: ignore[attr-defined]
    parameter.sum().backward()
    assert called == ["hook", "after"] and parameter.grad is not None and parameter.grad.is_meta
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    set_data(frozen, torch.ones(3))
    assert frozen.shape == (3,) and not frozen.requires_grad


def test_a_parameter_with_a_weak_reference_moves_too() -> None:
    """As those of an nn.GRU, which torch itself does not swap."""
    gru = nn.GRU(2, 3)
    weight = gru.weight_ih_l0
    weight.mark = "mine"  # type: ignore[attr-defined]
    set_data(weight, torch.zeros(9, 2, device="meta"))
    assert weight.is_meta and weight.requires_grad and weight.mark == "mine"  # type: ignore[attr-defined]
    assert gru.weight_ih_l0 is weight and gru._flat_weights[0] is weight
    assert next(gru.parameters()) is weight and type(weight) is nn.Parameter
    held = (gru.weight_hh_l0 * 2).sum()
    with pytest.raises(RuntimeError):
        set_data(gru.weight_hh_l0, torch.zeros(9, 3, device="meta"))
    assert held is not None and not gru.weight_hh_l0.is_meta


@pytest.mark.parametrize("hold", [lambda p: (p * p).sum(), lambda p: p.view(-1)], ids=["a graph", "a view"])
def test_a_parameter_that_a_graph_holds_is_an_error_of_torch(hold: Callable[[nn.Parameter], Any]) -> None:
    parameter = nn.Parameter(torch.ones(2))
    held = hold(parameter)
    with pytest.raises(RuntimeError):
        set_data(parameter, torch.zeros(2, device="meta"))
    assert held is not None and not parameter.is_meta


def pinning(monkeypatch: pytest.MonkeyPatch, works: bool = True) -> list[tuple[int, int]]:
    """Makes torch allocate pinned memory, or refuse it; returns the list of its (first, last) addresses."""
    blocks: list[tuple[int, int]] = []
    plain = torch.empty

    def empty(*size: int, **named: Any) -> torch.Tensor:
        if not named.pop("pin_memory", False):
            return plain(*size, **named)
        if not works:
            raise RuntimeError("Cannot pin\nTraceback of C++")
        block = plain(*size, **named)
        blocks.append((block.data_ptr(), block.data_ptr() + block.nbytes))
        return block

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(
        torch.Tensor, "is_pinned", lambda self: any(first <= self.data_ptr() < last for first, last in blocks)
    )
    return blocks


CLASSES = HostBudget(tiles=2 * PAGE, weights=PAGE, gradients=PAGE, resident=2 * PAGE, staging=PAGE)
COPIED = PinnedRegions(resident=PAGE, promoted=0, tiles=False)


def test_torch_pins_the_memory_of_an_accelerator_that_cannot_register_any(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = pinning(monkeypatch)
    device, _ = opened(monkeypatch)
    arena = HostArena(CLASSES, device, copied=COPIED)
    (block,) = blocks
    assert arena.address % PAGE == 0 and block[0] <= arena.address and arena.address + arena.nbytes <= block[1]
    assert arena.pinned_bytes == 4 * PAGE and not caplog.records
    buffer = arena.take_copied(PAGE)
    assert buffer is not None
    buffer.tensor(torch.uint8).fill_(3)
    arena.close()
    assert bytes(buffer.buffer[:2]) == b"\x03\x03", "the memory lives as long as a buffer of it"


def test_where_torch_refuses_the_memory_stays_ordinary(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pinning(monkeypatch, works=False)
    device, _ = opened(monkeypatch)
    arena = HostArena(CLASSES, device, copied=COPIED)
    assert arena.pinned_bytes == 0
    (record,) = caplog.records
    assert "XPU pins 0 B of 16.0 KiB" in record.getMessage() and ": Cannot pin." in record.getMessage()
    arena.close()


def test_torch_takes_a_power_of_two_and_is_not_asked_for_more_than_is_free(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert [bytes_taken_by_torch(n) for n in (0, 1, 2, 3, 4096, 4097)] == [1, 1, 2, 4, 4096, 8192]
    blocks = pinning(monkeypatch)
    testing.replace(monkeypatch, "memory.free", lambda: 12 * PAGE)
    device, _ = opened(monkeypatch)
    HostArena(CLASSES, device, copied=COPIED).close()
    assert len(blocks) == 1, "7 pages and one to align them"
    HostArena(CLASSES._replace(tiles=4 * PAGE), device, copied=COPIED).close()
    assert len(blocks) == 1 and "torch would take 64.0 KiB for 36.0 KiB" in caplog.text


def test_a_copy_runs_on_its_own_stream_and_leaves_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    device, machine = opened(monkeypatch)
    here, there, seen = torch.arange(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8), []
    plain = torch.Tensor.copy_

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        seen.append((machine.stream, machine.index, non_blocking))
        return plain(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    machine.stream = compute = Stream(torch.device("xpu", 0))
    before = device.record_event()
    event = device.upload(there, here, (before, DONE))
    (upload, index, non_blocking) = seen[0]
    assert torch.equal(here, there) and upload is not compute and (index, non_blocking) == (1, True)
    assert upload.told == [before.event, "record"], "after compute; the event comes behind the copy"  # type: ignore[attr-defined]
    assert (machine.stream, machine.index) == (compute, 0), "also where the caller's device is another one"
    assert not event.done()
    device.wait_event(event)
    assert compute.told == ["record", event.event], "ordered on the device; the host does not wait"  # type: ignore[attr-defined]
    assert not event.done()
    event.wait()
    assert event.done()
    device.download(here, there).wait()
    assert seen[1][0] not in (upload, compute)


def test_a_copy_that_fails_leaves_the_callers_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    device, machine = opened(monkeypatch)
    for context in (device.uploading, device.updating):
        with pytest.raises(KeyboardInterrupt), context():
            assert machine.stream != "compute" and machine.index == 1
            raise KeyboardInterrupt
        assert (machine.stream, machine.index) == ("compute", 0)


def test_each_thread_and_each_wait_for_all_names_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device, machine = opened(monkeypatch)
    device.enter_thread()
    device.synchronize()
    assert machine.history == [1, ("synchronize", torch.device("xpu", 1))]


def test_torch_2_6_has_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(
        torch, "accelerator", SimpleNamespace(current_device_idx=lambda: 3, set_device_idx=calls.append)
    )
    accelerator.set_index(5)
    assert (accelerator.current_index(), calls) == (3, [5])


class SleepingStream:
    """A stream of CUDA, which only the thread that made it may use."""

    def __init__(self, device: torch.device, priority: int) -> None:
        assert (device, priority) == (CUDA, -1)
        self.thread, self.told = threading.get_ident(), list[Any]()

    def wait_event(self, event: Any) -> None:
        assert self.thread == threading.get_ident(), "another thread's waits would come first"
        self.told.append(event)

    def record_event(self, event: SleepingEvent) -> SleepingEvent:
        event.of = self.told[-1]
        return event


class SleepingEvent:
    of: Event

    def __init__(self, blocking: bool) -> None:
        assert blocking, "a wait for any other event spins"

    def synchronize(self) -> None:
        self.of.ended = True


def test_a_thread_that_waits_for_cuda_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[SleepingStream] = []
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda *given, **named: made.append(SleepingStream(*given, **named)) or made[-1]
    )
    monkeypatch.setattr(torch.cuda, "Event", SleepingEvent)
    monkeypatch.setattr(Event, "synchronize", lambda self: pytest.fail("that spins"))
    side, ended = CudaHostSide(CUDA), Event()
    ended.ended = True
    side.wait(ended)  # type: ignore[arg-type]
    assert made == [], "there is nothing to wait for"
    events = [Event() for _ in range(4)]

    def wait(mine: list[Event]) -> None:
        for event in mine:
            side.wait(event)  # type: ignore[arg-type]

    wait(events[:2])
    thread = threading.Thread(target=wait, args=(events[2:],))
    thread.start()
    thread.join()
    assert all(event.ended for event in events) and len(made) == 2, "a stream for each thread"


__all__ = ["isolated_cache", "run_folder"]  # fixtures

GROWING = "expandable_segments:True"

# -- torch's allocator --------------------------------------------------------------------------------


def test_segments_grow_by_default() -> None:
    asks, line = device.growing_segments({}, False)
    assert asks and isinstance(line, Remark) and f"PYTORCH_CUDA_ALLOC_CONF={GROWING}" in line


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["expandable_segments:False", "max_split_size_mb:512", "backend:cudaMallocAsync"])
def test_what_the_user_has_set_stays(name: str, value: str) -> None:
    assert device.growing_segments({name: value}, False) == (False, None)


def test_a_gpu_that_is_in_use_already_is_left_alone() -> None:
    asks, line = device.growing_segments({}, True)
    assert not asks and isinstance(line, Remark) and "CUDA was in use before" in line


def test_the_environment_is_set_once_and_the_line_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # restored at the end, whatever is set below
    assert device.let_segments_grow("auto") == (), "there is no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device.let_segments_grow("cpu") == ()
    (line,) = device.let_segments_grow("auto")
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == GROWING and not os.environ["PYTORCH_ALLOC_CONF"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert device.let_segments_grow("cuda") == (line,)


def test_train_asks_before_it_uses_the_gpu(monkeypatch: pytest.MonkeyPatch, run_folder: Path) -> None:
    """The choice of a dtype asks the GPU, and torch reads the setting with the first use."""
    calls: list[str] = []
    settle = job.settle
    monkeypatch.setattr(job, "let_segments_grow", lambda device: calls.append(device))
    monkeypatch.setattr(job, "settle", lambda content: calls.append("settle") or settle(content))
    small = ("--text", "text.py", "--batch-size", "2", "--seq-len", "32", "--device", "cpu", "--steps", "1")
    done = CliRunner().invoke(app, ["train", *small])
    assert done.exit_code == 0, done.output
    assert calls == ["cpu", "settle"]


# -- dtype --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("native", [True, False])
def test_emulated_bf16_is_warned_of_once(
    native: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    testing.replace(monkeypatch, "dtype.warned", set())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native or including_emulation)
    base: dict[str, Any] = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    with caplog.at_level(logging.WARNING, "offload"):
        for _ in range(2):
            precision.warn_if_slow(load_config(base | {"bf16": {"enabled": True}}), torch.device("cuda", 0), False)
        precision.warn_if_slow(load_config(base | {"fp16": {"enabled": True}}), torch.device("cuda", 0), False)
    words = [record.getMessage() for record in caplog.records]
    assert len(words) == (0 if native else 1)
    assert all("Tesla T4 has no arithmetic in bf16" in each and '"fp16": {"enabled": true}' in each for each in words)


# -- cores --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (3, 3), (4, 3), (15, 14), (16, 14), (64, 62)])
def test_cores_are_left_to_the_threads_that_give_work_to_a_device(cores: int, threads: int) -> None:
    assert settings.threads_beside_device({}, cores) == threads
    assert settings.threads_beside_device({"OFFLOAD_THREADS": "5"}, cores) == 5


def test_only_an_engine_on_another_device_leaves_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OFFLOAD_THREADS", raising=False)
    testing.replace(monkeypatch, "machine.kernel_cores", lambda: 6)
    before = kernels.thread_count()
    try:
        start(models.GPT2, ("cpu", "cpu"), tmp_path / "cpu", device="cpu").destroy(remove=True)
        assert kernels.thread_count() == before
        use_device(monkeypatch, LateDevice(0, 0.0))
        start(models.GPT2, ("cpu", "cpu"), tmp_path / "late").destroy(remove=True)
        assert kernels.thread_count() == 5
    finally:
        kernels._native.configure(kernels.isa_from(os.environ, kernels._native.supported_isas()), before)
