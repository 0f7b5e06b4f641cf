"""Ctrl-C at any moment: training goes on with the right bits, or the engine says that it stopped, and resume is right.

The signal comes wherever CPython has just looked for one, in any frame of ours or of threading's, and CPython handles
it where it looks next: at a function's begin, after a call, where a loop turns. A trace function that raises the error
itself will not do: it raises between two instructions, and behind the call of `with lock: return call()` that is no
longer within the `with`, which leaves the lock taken. CPython raises in the call, which is within.
"""

from __future__ import annotations

import _thread
import contextlib
import dis
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import offload
from offload import interrupts
from offload.errors import EngineFailed
from offload.interrupts import defer_signals
from offload.swapper.memory.lock import InterruptibleLock
from offload.swapper.pager import Pager
from tests.support.devices.late_device import LateDevice, use_device
from tests.support.oracle import Job, start, train_step
from tests.support.sampling import examples

STEPS = 5
_OURS = str(Path(offload.__file__).parent)


class Net(nn.Module):
    """Small, with dropout, so that a lost or repeated forward shows in the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(32, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = hidden + self.dropout(torch.tanh(block(hidden)))
        return self.head(hidden)


def loss(model: Any, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    torch.manual_seed(100 + step)  # dropout depends on the step alone, however often it is begun
    return model(torch.randn(2, 32, generator=generator)).pow(2).mean()


JOB = Job(Net, loss, steps=STEPS)


class _Arrival:
    """`_Arrival()[signal.SIGINT]` lets the signal come. CPython does not look for signals behind a subscript."""

    __getitem__ = _thread.interrupt_main


class Interrupt:
    """A trace function that lets Ctrl-C come at the `at`-th moment between two looks for signals."""

    def __init__(self, at: int) -> None:
        self.at, self.seen, self.where = at, 0, ""
        self._looked = False
        self._codes: dict[Any, dict[int, str]] = {}
        self._arrival = _Arrival()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(_OURS) and not name.endswith("threading.py"):
            return None
        frame.f_trace_opcodes = True
        self._looked = True
        return self._local

    def _local(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event != "opcode":
            return self._local
        code = frame.f_code
        names = self._codes.get(code)
        if names is None:
            names = self._codes[code] = {i.offset: i.opname for i in dis.get_instructions(code)}
        name, looked = names[frame.f_lasti], self._looked
        self._looked = name.startswith("CALL") or "JUMP_BACKWARD" in name
        if looked:
            self.seen += 1
            if self.seen == self.at:
                sys.settrace(None)
                self.where = f"{code.co_filename.rsplit('/', 1)[1]}:{frame.f_lineno}"
                self._arrival[signal.SIGINT]  # from here on nothing is called: it is handled in `frame`
        return self._local


class Deferred:
    """Counts signals that the library defers, and waits until each has arrived again."""

    def __init__(self) -> None:
        self._asked, self._again = interrupts._is_deferred, interrupts._signal_again
        self._begun = self._arrived = 0

    def is_deferred(self, frame: FrameType | None) -> bool:
        found = self._asked(frame)
        self._begun += found
        return found

    def signal_again(self, number: int) -> None:
        self._again(number)
        self._arrived += 1

    def wait(self) -> None:
        while self._arrived < self._begun:
            time.sleep(0.001)


def _run(interrupt: Interrupt, act: Callable[[], object]) -> None:
    """Call `act` under `interrupt`; Ctrl-C ends it, and goes no further. An engine wraps the handler by itself."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    unraisable, sys.unraisablehook = sys.unraisablehook, _drop
    deferred = Deferred()
    try:
        with (
            mock.patch.object(interrupts, "_is_deferred", deferred.is_deferred),
            mock.patch.object(interrupts, "_signal_again", deferred.signal_again),
        ):
            try:
                sys.settrace(interrupt)
                act()
            finally:
                sys.settrace(None)
                deferred.wait()  # whatever `act` raised
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
        sys.unraisablehook = unraisable
        signal.signal(signal.SIGINT, before)


def _drop(_: object) -> None:
    """An error in a `__del__`, such as those of torch, which CPython drops whoever has caused it: training goes on.

    pytest would keep it, and so every view of weights in its frames.
    """


def _steps(engine: offload.Engine, job: Job, first: int) -> dict[int, float]:
    return {step: train_step(engine, job, step) for step in range(first, STEPS)}


def _moments(job: Job, folder: Path, **options: Any) -> int:
    engine = start(job, ("nvme", "nvme"), folder, **options)
    interrupt = Interrupt(-1)
    train_step(engine, job, 0)
    _run(interrupt, lambda: train_step(engine, job, 1))
    engine.destroy(remove=True)
    return interrupt.seen


def _interrupted(
    job: Job, interrupt: Interrupt, folder: Path, expected: dict[int, float], **options: Any
) -> str | None:
    """Interrupt the second or third step and go on; what was wrong, or None."""
    engine = start(job, ("nvme", "nvme"), folder, **options)
    try:
        train_step(engine, job, 0)
        with contextlib.suppress(EngineFailed):
            _run(interrupt, lambda: [train_step(engine, job, step) for step in (1, 2)])
        engine.zero_grad()
        found = _steps(engine, job, engine.global_steps)
        stopped = False
    except EngineFailed:
        stopped = True
    finally:
        engine.destroy()
    if stopped:
        engine = start(job, ("nvme", "nvme"), folder, resume="must")
        engine.zero_grad()  # the first call, which restores the generators: the loss seeds them itself
        found = _steps(engine, job, engine.global_steps)
        engine.destroy()
    wrong = {step: value for step, value in found.items() if value != expected[step]}
    return f"{interrupt.at} at {interrupt.where}: {'resumed' if stopped else 'went on'} with {wrong}" if wrong else None


def _whole(job: Job, folder: Path) -> dict[int, float]:
    engine = start(job, ("nvme", "nvme"), folder)
    found = _steps(engine, job, 0)
    engine.destroy(remove=True)
    return found


def _try(seed: int, count: int, folder: Path, job: Job = JOB, **options: Any) -> None:
    threads = threading.active_count()
    expected, moments = _whole(job, folder / "whole"), _moments(job, folder / "moments", **options)
    chance = random.Random(seed)
    wrong = []
    for trial in range(count):
        at = chance.randrange(1, 2 * moments)
        interrupt = Interrupt(at)
        try:
            wrong.append(_interrupted(job, interrupt, folder / str(trial), expected, **options))
        except Exception as error:
            wrong.append(f"{at} at {interrupt.where}: {type(error).__name__} {error}")
    wrong = [words for words in wrong if words]
    assert not wrong, "\n".join([f"{len(wrong)} of {count}", *wrong])
    assert threading.active_count() == threads


@pytest.mark.parametrize("call", ["a count", "a wait"])
def test_no_interrupt_leaves_the_lock_taken(call: str) -> None:
    """A call that ends a `with`, and one that gives the lock away meanwhile: it is free after both."""
    monitor = InterruptibleLock()
    trace = SimpleNamespace(unforeseen=0)
    pager = SimpleNamespace(lock=monitor.lock, _uses=0, _hits=0, table=SimpleNamespace(access_order=trace))
    whole = 0

    def waits() -> None:
        with monitor.lock:
            monitor.without_lock(lambda: None)
            assert monitor.lock._is_owned()  # type: ignore[attr-defined]

    def act() -> None:
        nonlocal whole
        defer_signals(monitor)
        if call == "a count":
            Pager.counts(pager)  # type: ignore[arg-type]
        else:
            waits()
        whole += 1

    counted = Interrupt(-1)
    _run(counted, act)
    for at in range(1, counted.seen + 1):
        interrupt = Interrupt(at)
        _run(interrupt, act)
        assert not monitor.lock._is_owned(), interrupt.where  # type: ignore[attr-defined]
    assert whole <= counted.seen, "one was interrupted at least"


@pytest.mark.works("Recovery", "Ctrl-C at any moment of a forward, a backward or a step", "right or refused")
def test_interrupts(tmp_path: Path) -> None:
    _try(0, examples(40), tmp_path)


@pytest.mark.slow
def test_interrupts_on_a_device_with_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_device(monkeypatch, LateDevice(0, 0.5), always=False)  # signals come on the main thread
    _try(0, examples(40), tmp_path)


@pytest.mark.slow
def test_interrupts_where_the_device_adds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_device(monkeypatch, LateDevice(0, 0.5), always=False)  # signals come on the main thread
    _try(0, examples(40), tmp_path, job=JOB._replace(accumulation=2), device_memory=1 << 20)


@pytest.mark.slow
def test_interrupts_beside_a_time_line(tmp_path: Path) -> None:
    _try(0, examples(40), tmp_path, trace=str(tmp_path / "trace.json"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(1, 6))
def test_many_interrupts(seed: int, tmp_path: Path) -> None:
    _try(seed, 200, tmp_path)
