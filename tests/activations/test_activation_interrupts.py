"""A Ctrl-C in a forward or backward with moved inputs gives everything back; the next steps have the right bits."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import offload
from offload.engine import hooks
from offload.errors import EngineFailed, UsageError
from offload.swapper.memory.host_arena import process_memory
from offload.torch_internals import top_saved_tensor_hooks
from tests.support.drives.fault_injection import LateQueue, use_queue
from tests.support.modules.checkpointed import JOB, gives_back, running, small_inputs_move, square_loss, stack
from tests.support.oracle import train_step

AREA = "Activation checkpointing"
DEEP = JOB._replace(model=stack(12))
WATCHED = ("/offload/activations/", "/tests/support/drives/fault_injection.py")
"""Where calls are counted. The second has the waits for I/O."""


@pytest.fixture(autouse=True)
def _tiny_inputs_move(monkeypatch: pytest.MonkeyPatch) -> None:
    small_inputs_move(monkeypatch)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    with running(DEEP, tmp_path_factory.mktemp("plain")) as engine:
        return [train_step(engine, DEEP, step) for step in range(DEEP.steps)]


@contextmanager
def _signal_at(call: int, number: int, only_waits: bool = False) -> Iterator[list[int]]:
    """Sends a signal at a call of a watched function on this thread; yields the count of calls."""
    counted = [0]

    def count(frame: FrameType, event: str, argument: object) -> None:
        watched = any(part in frame.f_code.co_filename for part in WATCHED)
        if event == "call" and watched and (frame.f_code.co_name == "wait" or not only_waits):
            counted[0] += 1
            if counted[0] == call:
                os.kill(os.getpid(), number)

    sys.setprofile(count)
    try:
        yield counted
    finally:
        sys.setprofile(None)


def _interrupted(engine: offload.Engine, step: int) -> None:
    """A forward and a backward. The signal may arrive a moment later than it was sent."""
    engine.backward(square_loss(engine, step, 0))
    time.sleep(1)


def _goes_on(engine: offload.Engine, expected: list[float]) -> None:
    engine.zero_grad()
    gc.collect()
    assert top_saved_tensor_hooks() is None
    gives_back(engine)
    assert [train_step(engine, DEEP, step) for step in (1, 2)] == expected[1:]
    gives_back(engine)


@pytest.mark.works(AREA, "Ctrl-C in forward and backward, at any moment", "right")
@pytest.mark.sample(1)
@pytest.mark.parametrize("only_waits", [False, True])
@pytest.mark.parametrize("call", [1, 2, 3, 4, 5, 7, 10, 12, 14, 17, 30, 44, 60, 99, 150, 200, 290, 333, 404, 505])
def test_a_ctrl_c_at_a_call_gives_everything_back(
    call: int, only_waits: bool, expected: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_queue(monkeypatch, lambda: LateQueue(call, 0.003))
    with running(DEEP, tmp_path, activations="nvme") as engine:
        assert train_step(engine, DEEP, 0) == expected[0]
        try:
            with _signal_at(call, signal.SIGINT, only_waits) as counted:
                _interrupted(engine, 1)
        except KeyboardInterrupt:
            pass
        else:
            assert counted[0] < call, "the signal was lost"
        _goes_on(engine, expected)


@pytest.mark.sample(1)
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("seed", range(20))
def test_a_ctrl_c_at_a_random_time_gives_everything_back(
    seed: int, tier: str, expected: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_queue(monkeypatch, lambda: LateQueue(seed, 0.003))
    with running(DEEP, tmp_path, activations=tier) as engine:
        assert train_step(engine, DEEP, 0) == expected[0]
        seconds = random.Random(seed).uniform(0.0, 0.05)
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            _interrupted(engine, 1)
        except KeyboardInterrupt:
            pass
        else:
            pytest.fail("the signal was lost")
        timer.join()
        _goes_on(engine, expected)


@pytest.mark.works(AREA, "a handler of a signal that destroys the engine, at any moment", "right")
@pytest.mark.sample(3)
@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("only_waits", [False, True])
@pytest.mark.parametrize("call", [1, 2, 3, 5, 8, 12, 40, 77, 140, 222])
def test_a_handler_may_destroy_the_engine(
    call: int, only_waits: bool, raises: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call that was interrupted raises the handler's error, or that the engine is closed."""
    use_queue(monkeypatch, lambda: LateQueue(call, 0.003))
    before = process_memory().needed_bytes

    class Stopped(Exception):
        pass

    with running(DEEP, tmp_path, activations="nvme") as engine:

        def stop(number: int, frame: Any) -> None:
            engine.destroy()
            if raises:
                raise Stopped

        signal.signal(signal.SIGTERM, stop)
        train_step(engine, DEEP, 0)
        with pytest.raises((Stopped, UsageError, EngineFailed)), _signal_at(call, signal.SIGTERM, only_waits):
            _interrupted(engine, 1)  # the signal may come after both, or never
            engine.destroy()
            raise Stopped
    assert process_memory().needed_bytes == before
    assert top_saved_tensor_hooks() is None


def test_a_handler_that_destroys_the_engine_waits_for_a_pack_hook(tmp_path: Path) -> None:
    """torch refuses a pack hook that changes its tensor, and the end of an engine changes its parameters."""
    sent = []

    def send(frame: FrameType, event: str, argument: object) -> None:
        packs = event == "call" and frame.f_code is hooks._Pack.__call__.__code__
        if packs and not sent and frame.f_locals["tensor"]._is_view():  # of a weight that stays on the device
            sent.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    with running(DEEP, tmp_path, activations="nvme") as engine:
        signal.signal(signal.SIGTERM, lambda number, frame: engine.destroy())
        train_step(engine, DEEP, 0)
        sys.setprofile(send)
        try:
            with suppress(UsageError, EngineFailed):  # the handler may wait until both calls have returned
                _interrupted(engine, 1)
        finally:
            sys.setprofile(None)
        assert sent
        with pytest.raises((UsageError, EngineFailed)):
            train_step(engine, DEEP, 2)
