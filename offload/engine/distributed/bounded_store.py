"""torch's key-value store with an end to every call.

torch's own calls have none: behind a cable that was cut, one that waits for an answer returns when TCP gives up, after
some 15 minutes, and no Ctrl-C is obeyed until then. torch makes one call at a time, so all later ones wait behind it.

    any thread    get, set ─► calls ─► waits `LONGEST` seconds at most
    own thread                calls ─► torch's store, one call after the other

The thread exists from the beginning: Python starts none while it ends, which is when a rank publishes why.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from offload.interrupts import interruptible, uninterrupted

LONGEST = 150.0
"""Seconds for one call of the store.

More than the silence after which a rank is taken for lost (`heartbeat.SILENT`): the ranks that still reach the store
name the one behind a cut cable before it ends by itself, after which a launcher may end them.
"""

_MOST_CALLS = 8
"""Calls that may wait for the thread. Each thread waits for its call, so there are as many as threads that call."""


class _Call:
    """A call of the store, and its outcome once `ended` is free."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act
        self.result: Any = None
        self.error: BaseException | None = None
        # A lock, not an event: an event is written in Python, and a Ctrl-C would find it between two of its lines.
        self.ended = threading.Lock()
        self.ended.acquire()


class BoundedStore:
    """A key-value store of torch's whose calls end: after one that did not, this object refuses all others.

    Any thread may call it. Errors are `RuntimeError`, as torch's own are where no process serves the store.
    """

    def __init__(self, store: Any, longest: float = LONGEST) -> None:
        """Starts the thread.

        Args:
            store: torch's store.
            longest: seconds for a call.
        """
        self._store, self._longest = store, longest
        self._calls: queue.Queue[_Call | None] = queue.Queue(_MOST_CALLS)
        self.refusal: str | None = None
        """Words for why no call is made any more; None while calls are made."""
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="offload-store", daemon=True)
        self._thread.start()

    def get(self, key: str) -> str | None:
        """Returns the value of `key`, or None if there is none.

        Raises:
            RuntimeError: the store cannot be reached, or has not answered in time.
        """

        def read() -> str | None:
            return str(self._store.get(key).decode()) if self._store.check([key]) else None

        found: str | None = self._within(read)
        return found

    def set(self, key: str, value: str) -> None:
        """Sets the value of `key`. Raises as `get` does."""
        self._within(lambda: self._store.set(key, value))

    def close(self) -> None:
        """Ends the thread; does not wait for a call that has not ended in time. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._calls.put(None)
        if self.refusal is None:
            self.refusal = "the connection to torch's key-value store was closed"
            self._thread.join(self._longest)

    @uninterrupted
    def _within(self, act: Callable[[], Any]) -> Any:
        """Returns the result of `act`, called on the thread of this object, or raises what it has raised."""
        if self.refusal is not None:
            raise RuntimeError(self.refusal)
        call = _Call(act)
        self._calls.put(call)
        if not self._ends(call):
            self.refusal = f"torch's key-value store has not answered for {self._longest:g} s"
            raise RuntimeError(self.refusal)
        if call.error is not None:
            raise call.error
        return call.result

    @interruptible
    def _ends(self, call: _Call) -> bool:
        """Waits for the end of a call; returns False if there is none in time."""
        return call.ended.acquire(timeout=self._longest)

    def _serve(self) -> None:
        """Runs on the thread until `close`."""
        while (call := self._calls.get()) is not None:
            try:
                call.result = call.act()
            except BaseException as error:  # raised by the thread that waits
                call.error = error
            call.ended.release()
            del call  # a value, or the frames of an error, would live until the next call
