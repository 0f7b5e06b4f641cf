"""A signal's handler waits until a change has ended, and runs at a wait within it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from offload.interrupts import defer_signals, interruptible, restore_signals, uninterrupted
from tests.support.models import Mixture, mixture_loss
from tests.support.oracle import Job, start

OF_PARAMETERS = tuple(f"/offload/engine/{name}.py" for name in ("hooks", "params", "unit_views"))
"""Files of the code that runs between a module's call and its parameters."""


class Owner:
    """An engine's part in this."""


OWNER = Owner()


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    restore_signals(OWNER)
    for number, each in before.items():
        signal.signal(number, each)


def _signal(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # CPython handles the signal here


def test_a_change_is_completed_before_the_handler_runs() -> None:
    steps: list[str] = []

    @uninterrupted
    def change() -> None:
        steps.append("first half")
        _signal()
        steps.append("second half")

    defer_signals(OWNER)
    with pytest.raises(KeyboardInterrupt):
        change()
        time.sleep(1)
    assert steps == ["first half", "second half"]


def test_a_wait_within_a_change_is_interrupted() -> None:
    @interruptible
    def wait() -> None:
        _signal()
        raise AssertionError("the handler did not run")

    @uninterrupted
    def change() -> None:
        wait()

    defer_signals(OWNER)
    with pytest.raises(KeyboardInterrupt):
        change()


def test_a_handler_that_raises_another_exception_waits_too() -> None:
    class Stopped(Exception):
        pass

    def stop(number: int, frame: object) -> None:
        raise Stopped

    @uninterrupted
    def change() -> None:
        _signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    defer_signals(OWNER)
    with pytest.raises(Stopped):
        change()
        time.sleep(1)


def test_handlers_stay_wrapped_while_one_engine_lives() -> None:
    other = Owner()
    defer_signals(OWNER)
    defer_signals(other)
    restore_signals(OWNER)
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    restore_signals(other)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("action", [signal.SIG_DFL, signal.SIG_IGN])
def test_an_action_that_is_no_function_is_left_alone(action: signal.Handlers) -> None:
    signal.signal(signal.SIGTERM, action)
    defer_signals(OWNER)
    assert signal.getsignal(signal.SIGTERM) == action


def test_another_thread_changes_no_handler() -> None:
    thread = threading.Thread(target=defer_signals, args=(OWNER,))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_engine_wraps_a_handler_that_was_set_between_steps_and_restores_it(tmp_path: Path) -> None:
    """Jupyter sets the default handler before each cell."""
    engine = start(Job(Mixture, mixture_loss), ("nvme", "nvme"), tmp_path)
    for step in range(2):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        engine.backward(mixture_loss(engine, step, 0))
        engine.step()
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    engine.destroy()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("after", range(5, 60, 18))
def test_a_handler_may_destroy_the_engine_at_any_moment_of_a_forward(after: int, tmp_path: Path) -> None:
    """The forward that was interrupted raises the handler's error, or that the engine is closed."""
    engine = start(Job(Mixture, mixture_loss), ("nvme", "nvme"), tmp_path)
    calls = 0

    class Stopped(Exception):
        pass

    def stop(number: int, frame: object) -> None:
        engine.destroy()
        raise Stopped

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.endswith(OF_PARAMETERS)
        if calls == after:
            calls += 1
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    sys.setprofile(count)
    try:
        with pytest.raises(Stopped):
            for step in range(2):
                mixture_loss(engine, step, 0)
            time.sleep(1)
    finally:
        sys.setprofile(None)
    assert calls > after
