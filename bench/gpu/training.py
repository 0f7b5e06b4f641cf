"""Steps of a model, and where their time goes."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch

import offload
from bench.gpu.exposure import profiled
from bench.gpu.work import Save, Work
from bench.measure import random_ids, resident
from offload.engine.setup import initialize
from offload.swapper.memory.accelerator import AcceleratorDevice
from offload.swapper.memory.device import Device, Event
from offload.swapper.memory.device_choice import host_side_of, open_device
from offload.swapper.memory.interruptible_lock import InterruptibleLock

_T = TypeVar("_T")
_WARM_UP = 2
"""Steps that do not count: the first only records the order of uses, the second is the first beside an update."""


class _TimedDevice(AcceleratorDevice):
    """Records when compute begins and ends to wait for a copy; both events lie on the compute stream."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, host_side_of(device))
        self.stalls: list[tuple[torch.Event, torch.Event]] = []

    def wait_event(self, event: Event) -> None:
        if event.done():
            return
        stream = torch.accelerator.current_stream(self.torch)
        before, after = (torch.Event(self.torch, enable_timing=True) for _ in range(2))
        stream.record_event(before)
        super().wait_event(event)
        stream.record_event(after)
        self.stalls.append((before, after))


class Waits(NamedTuple):
    """Seconds of one step in which the model stood still."""

    copies: float
    """The compute stream waited for uploads."""
    reads: float
    """A thread that runs the model waited for a read of weights."""
    updates: float
    """It waited for an update, for memory that an update holds, or for the end of the step before."""


class Watch:
    """Finds where time goes, in engines that are initialized and run inside `watching`."""

    def __init__(self) -> None:
        self._devices: list[_TimedDevice] = []
        self._seconds = {"wait": 0.0, "change": 0.0}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """What waits without the pager's lock waits for a future (`wait`) or for a change (`change`)."""
        plain = InterruptibleLock.without_lock

        def timed(monitor: InterruptibleLock, act: Callable[[], _T]) -> _T:
            name = getattr(act, "__name__", "")
            if name not in self._seconds or threading.current_thread().name.startswith("offload-"):
                return plain(monitor, act)
            start = time.perf_counter()
            try:
                return plain(monitor, act)
            finally:
                self._seconds[name] += time.perf_counter() - start

        with (
            mock.patch.object(InterruptibleLock, "without_lock", timed),
            mock.patch.object(initialize, "open_device", self._open, create=True),
        ):
            yield

    def _open(self, device: torch.device) -> Device:
        if device.type == "cpu":
            return open_device(device)
        self._devices.append(_TimedDevice(device))
        return self._devices[-1]

    def take(self) -> Waits:
        """What was waited since the last call."""
        stalled = 0.0
        for device in self._devices:
            stalls, device.stalls = device.stalls, []
            for before, after in stalls:
                after.synchronize()
                stalled += before.elapsed_time(after) / 1e3
        waits = Waits(stalled, self._seconds["wait"], self._seconds["change"])
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return waits


def measure_steps(work: Work, settings: dict[str, Any], save: Save) -> None:
    """Train the model of `work` by a config and time its steps, from one return of `step()` to the next."""
    end, watch = time.monotonic() + work.seconds, Watch()
    work.keep_limit()
    if work.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(work.device)
    with watch.watching():
        with offload.init(settings):
            model = work.build()
        shape: Any = model.config
        ids = random_ids((work.batch_size, work.seq_len), shape.vocab_size)
        engine = offload.initialize(model=model, config=settings)[0]
        torch.manual_seed(0)  # for dropout: losses can be compared between placements
        try:
            _time_steps(work, engine, ids, watch, end, save)
        finally:
            engine.destroy(remove=True)


def _time_steps(work: Work, engine: offload.Engine, ids: torch.Tensor, watch: Watch, end: float, save: Save) -> None:
    losses = [step(engine, ids, work.accumulation) for _ in range(_WARM_UP)]
    watch.take()
    before, waits, figures = engine.io_bytes(), list[Waits](), dict[str, Any]()
    for seconds, loss in timed(work, end, lambda: step(engine, ids, work.accumulation)):
        losses.append(loss)
        waits.append(watch.take())
        after, moved = engine.io_bytes(), len(seconds) * engine.parameter_count
        figures = sizes(work, engine.parameter_count) | times(work, seconds, engine.parameter_count)
        figures |= _waited(waits) | {
            "read_bytes_per_parameter": (after.read - before.read) / moved,
            "written_bytes_per_parameter": (after.written - before.written) / moved,
            "host_memory": engine.host_memory,
            "device_memory": engine.device_memory,
            "notices": list(engine.notices),
            "losses": losses,
        }
        save(figures)
    seen = profiled(work.device, lambda: step(engine, ids, work.accumulation))
    save(figures | {"profiled": None if seen is None else seen._asdict()})


def timed(work: Work, end: float, act: Callable[[], float]) -> Iterator[tuple[list[float], float]]:
    """Call `act` as often as `work` says, less often where `end` is near: the seconds so far, and what it gave."""
    seconds: list[float] = []
    # Beside the next two steps there must be time for the end of the last update, which destroy waits for.
    while len(seconds) < work.steps and (not seconds or time.monotonic() + 3 * statistics.median(seconds) < end):
        began = time.perf_counter()
        result = act()
        seconds.append(time.perf_counter() - began)
        yield seconds, result


def step(engine: Any, ids: torch.Tensor, accumulation: int) -> float:
    """One step on the same tokens; the loss of its last micro-batch. Waits for the device, as a loop that logs does."""
    for _ in range(accumulation):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
    return float(loss.detach())


def sizes(work: Work, parameters: int) -> dict[str, Any]:
    """What was trained, and the memory that it took so far."""
    return {
        "model": work.model,
        "layers": work.layers,
        "parameters": parameters,
        "tokens_per_step": work.tokens,
        "recompute": work.recompute,
        "limit": work.limit,
        "peak_host_bytes": resident("VmHWM"),
        "peak_device_bytes": torch.cuda.max_memory_allocated(work.device) if work.device.type == "cuda" else None,
    }


def times(work: Work, seconds: Sequence[float], parameters: int) -> dict[str, Any]:
    """Floating-point operations are 6 for each parameter and token, 8 with the forward that is computed again."""
    tokens = work.tokens / statistics.median(seconds)
    return {
        "steps": len(seconds),
        "step_seconds": statistics.median(seconds),
        "tokens_per_second": tokens,
        "teraflops_6n": 6 * parameters * tokens / 1e12,
        "teraflops_8n": 8 * parameters * tokens / 1e12,
    }


def _waited(waits: Sequence[Waits]) -> dict[str, Any]:
    return {
        "exposed_copy_seconds": statistics.median(wait.copies for wait in waits),
        "exposed_io_seconds": statistics.median(wait.reads + wait.updates for wait in waits),
        "read_wait_seconds": statistics.median(wait.reads for wait in waits),
        "update_wait_seconds": statistics.median(wait.updates for wait in waits),
    }
