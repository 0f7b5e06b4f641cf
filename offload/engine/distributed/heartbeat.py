"""A count that each rank shows in torch's key-value store, so that the others know that it lives."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from typing import Any

import psutil

PULSE = 1.0


class Heartbeat:
    """A thread that counts up in the store, and what the store says of the other ranks."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank = store, rank
        self._seen = {other: ("", time.monotonic()) for other in range(size)}
        self._closing = threading.Event()
        store.set(f"place/{rank}", f"{machine_name()}\n{os.getpid()}")
        self._thread = threading.Thread(target=self._run, name="offload-pulse", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for count in itertools.count():
            try:
                self._store.set(f"pulse/{self._rank}", str(count))
            except RuntimeError:
                pass  # the store's own process may be gone; then others are told by their connections
            if self._closing.wait(PULSE):
                return

    def place(self, rank: int) -> list[str] | None:
        """The machine and the process of `rank`; None while it has not shown itself."""
        told = self._get(f"place/{rank}")
        return None if told is None else told.split("\n")

    def silent(self, rank: int) -> float:
        """Seconds since the count of `rank` was first seen as it is now."""
        count = self._get(f"pulse/{rank}")
        before, since = self._seen[rank]
        if count is not None and count != before:
            self._seen[rank] = count, time.monotonic()
            return 0.0
        return time.monotonic() - since

    def ended(self, rank: int) -> str | None:
        """What `rank` gave as its reason to end; None while it has not."""
        return self._get(f"end/{rank}")

    def _get(self, key: str) -> str | None:
        with contextlib.suppress(RuntimeError):  # the store's own process may be the one that is gone
            if self._store.check([key]):
                return str(self._store.get(key).decode())
        return None

    def close(self, reason: str) -> None:
        if not self._closing.is_set():
            with contextlib.suppress(RuntimeError):
                self._store.set(f"end/{self._rank}", reason)
            self._closing.set()
        self._thread.join()


def machine_name() -> str:
    """This host and, as in a container, its processes' own numbers."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()}/{os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def is_alive(process: int) -> bool:
    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
