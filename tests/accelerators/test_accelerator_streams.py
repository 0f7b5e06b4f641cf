"""Copies of any accelerator run on streams of their own, and a thread that waits for one sleeps."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload.swapper.memory import device as accelerator
from offload.swapper.memory.device import DONE, CudaHostSide
from tests.accelerators.accelerator_modules import CUDA, Event, Stream, opened


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
    other = threading.Thread(target=wait, args=(events[2:],))
    other.start()
    other.join()
    assert all(event.ended for event in events) and len(made) == 2, "a stream for each thread"
