"""Heartbeat of each rank: a count in torch's key-value store, which shows the others that the rank lives.

Ranks are those of torch's default process group here.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import psutil

from offload.engine.distributed.bounded_store import BoundedStore
from offload.engine.distributed.rendezvous import NOTICE
from offload.errors import RankError

logger = logging.getLogger("offload")

_DIFFERENT = "have reached different calls"
"""Words of `Agreement`'s error of ranks none of which can go on."""
PULSE = 1.0
"""Seconds between two counts."""
SILENT = 120.0
"""Seconds without a count, after which a rank is taken for lost."""


class Heartbeat:
    """A thread that counts up in the store, and the reader of the other ranks' counts."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """Publishes this rank's machine and process, and starts the thread.

        Args:
            store: torch's key-value store, with a key prefix of this engine's own.
            rank: this rank.
            size: number of ranks.
        """
        self._store, self.rank = BoundedStore(store), rank
        self.others = [other for other in range(size) if other != rank]
        """All other ranks."""
        self.places: list[tuple[str, int]] = []
        """Machine and process of each rank, once all have met."""
        self._seen = {other: ("", time.monotonic()) for other in range(size)}
        self._closing = threading.Event()
        self._store.set(f"place/{rank}", f"{machine_name()}\n{os.getpid()}")
        self._thread = threading.Thread(target=self._run, name="offload-pulse", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Counts up every `PULSE` seconds until `close`. Runs on the heartbeat's thread."""
        for count in itertools.count():
            try:
                self._store.set(f"pulse/{self.rank}", str(count))
            except RuntimeError:
                pass  # the process that serves the store may be gone; the ranks notice that by broken connections
            if self._closing.wait(PULSE):
                return

    def meet(self) -> None:
        """Waits until every rank has published its machine and process.

        Creating a process group waits in C++ for all ranks, and would wait for ever for one that has ended.

        Raises:
            RankError: if a rank has ended before it arrived.
        """
        waiting = self.others
        began = noticed = time.monotonic()
        while waiting := [rank for rank in waiting if self.location(rank) is None]:
            if self.cut_off is not None:
                raise RankError(f"{self.cut_off}, so rank {self.rank} cannot meet the other ranks")
            for rank in waiting:
                ended = self.ended(rank)
                if ended is not None:
                    raise RankError(f"rank {rank} has ended before it created its engine: {ended}")
            now = time.monotonic()
            if now - noticed > NOTICE:
                noticed = now
                late = f"rank{'s' * (len(waiting) > 1)} {', '.join(map(str, waiting))}"
                logger.warning("rank %d has waited %.0f s for %s to initialize", self.rank, now - began, late)
            time.sleep(0.01 if now - began < 1 else 0.2)
        places = [self.location(rank) for rank in range(len(self._seen))]
        self.places = [(place[0], int(place[1])) for place in places if place is not None]

    @property
    def here(self) -> int:
        """Number of ranks on this machine."""
        return sum(machine == machine_name() for machine, _ in self.places)

    @property
    def next(self) -> int:
        """The rank behind this one; the last is followed by the first."""
        return (self.rank + 1) % len(self.places)

    def gone(self, silence: float, ranks: Sequence[int]) -> list[str]:
        """Returns a description of each of `ranks` that is lost, or silent for longer than `silence` seconds."""
        found: list[str] = []
        for rank in ranks:
            machine, process = self.places[rank]
            where = f"rank {rank} (process {process} on {machine.partition('/')[0]})"
            ended = self.ended(rank)
            if self.cut_off is not None:  # of no rank is anything known then
                return [f"{self.cut_off}: this machine, or the one that serves the store, is cut off"]
            if ended is not None:
                found.append(f"{where} has ended: {ended}")
            elif machine == machine_name() and not is_alive(process):
                found.append(f"{where} was killed or has crashed")
            elif self.silent(rank) > silence:
                found.append(f"{where} has sent no heartbeat for {self.silent(rank):.0f} s")
        return found

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
            self._store.set(f"error/{self.rank}", error)

    def tell(self, ranks: Sequence[int], calls: Sequence[str]) -> str:
        """Returns what each of `ranks` is about to do, with the exception that it has published, if any.

        Args:
            ranks: some or all ranks.
            calls: words for what each of them does.
        """
        told = [(rank, call, self._get(f"error/{rank}")) for rank, call in zip(ranks, calls, strict=True)]
        # A rank may have the error of these very calls already, which would stand in itself.
        return "; ".join(
            f"rank {rank} {call}{'' if error is None or _DIFFERENT in error else f', after {error}'}"
            for rank, call, error in told
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
                self._store.set(f"end/{self.rank}", reason)
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
