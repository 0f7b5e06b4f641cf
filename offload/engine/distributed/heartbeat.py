"""Heartbeat of each rank: a count in torch's key-value store, which shows the others that the rank lives."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import psutil

from offload.engine.distributed.bounded_store import BoundedStore

PULSE = 1.0
"""Seconds between two counts."""


class Heartbeat:
    """A thread that counts up in the store, and the reader of the other ranks' counts."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """Publishes this rank's machine and process, and starts the thread.

        Args:
            store: torch's key-value store, with a key prefix of this engine's own.
            rank: this rank.
            size: number of ranks.
        """
        self._store, self._rank = BoundedStore(store), rank
        self._seen = {other: ("", time.monotonic()) for other in range(size)}
        self._closing = threading.Event()
        self._store.set(f"place/{rank}", f"{machine_name()}\n{os.getpid()}")
        self._thread = threading.Thread(target=self._run, name="offload-pulse", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Counts up every `PULSE` seconds until `close`. Runs on the heartbeat's thread."""
        for count in itertools.count():
            try:
                self._store.set(f"pulse/{self._rank}", str(count))
            except RuntimeError:
                pass  # the process that serves the store may be gone; the ranks notice that by broken connections
            if self._closing.wait(PULSE):
                return

    @property
    def cut_off(self) -> str | None:
        """Words for a store that has not answered in time; None while it answers, or says that it is gone."""
        return self._store.refusal

    def location(self, rank: int) -> list[str] | None:
        """Returns the machine and the process of `rank`, or None while the rank has not published them."""
        message = self._get(f"place/{rank}")
        return None if message is None else message.split("\n")

    def silent(self, rank: int) -> float:
        """Returns the seconds since this method first saw the newest count of `rank` that it has read.

        A count that changed since the last call is 0 seconds old, however long ago that call was.
        """
        count = self._get(f"pulse/{rank}")
        before, since = self._seen[rank]
        if count is not None and count != before:
            self._seen[rank] = count, time.monotonic()
            return 0.0
        return time.monotonic() - since

    def ended(self, rank: int) -> str | None:
        """Returns the reason that `rank` gave for its end, or None while it has not ended."""
        return self._get(f"end/{rank}")

    def explain(self, error: str) -> None:
        """Publishes the exception because of which this rank is about to end, for the other ranks' messages."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"error/{self._rank}", error)

    def tell(self, calls: Sequence[str]) -> str:
        """Returns what each rank is about to do, with the exception that it has published, if any.

        Args:
            calls: words for what each rank does, in rank order.
        """
        told = [(call, self._get(f"error/{rank}")) for rank, call in enumerate(calls)]
        return "; ".join(
            f"rank {rank} {call}{'' if error is None else f', after {error}'}"
            for rank, (call, error) in enumerate(told)
        )

    def _get(self, key: str) -> str | None:
        """Returns a value of the store, or None if there is none or the store cannot be reached."""
        with contextlib.suppress(RuntimeError):  # the process that serves the store may be the lost one
            return self._store.get(key)
        return None

    def close(self, reason: str) -> None:
        """Publishes the reason for this rank's end, and joins the thread. Idempotent."""
        if not self._closing.is_set():
            with contextlib.suppress(RuntimeError):
                self._store.set(f"end/{self._rank}", reason)
            self._closing.set()
        self._thread.join()
        self._store.close()


def machine_name() -> str:
    """Returns the name of this host with its process namespace: containers of one host number processes separately."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()}/{os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def is_alive(process: int) -> bool:
    """Returns True if a process of this machine exists and is no zombie."""
    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
