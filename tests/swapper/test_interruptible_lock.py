"""A thread that waits with the pager's lock releases the lock completely, or gets an error that it cannot."""

from __future__ import annotations

import threading

import pytest

from offload.swapper.memory.lock import InterruptibleLock


def test_a_wait_gives_the_lock_away_and_holds_it_again() -> None:
    monitor = InterruptibleLock()

    def change() -> None:
        with monitor.lock:
            monitor.notify_all()

    with monitor.lock:
        other = threading.Thread(target=change)
        other.start()
        monitor.wait()
        assert monitor.lock._is_owned()  # type: ignore[attr-defined]
    assert not monitor.lock._is_owned()  # type: ignore[attr-defined]
    other.join()


def test_a_wait_with_the_lock_taken_twice_is_an_error_and_not_for_ever() -> None:
    monitor = InterruptibleLock()
    with monitor.lock, monitor.lock, pytest.raises(AssertionError, match="took the lock twice"):
        monitor.wait()
    assert not monitor.lock._is_owned()  # type: ignore[attr-defined]
