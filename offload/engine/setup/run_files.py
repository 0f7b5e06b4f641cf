"""The files of a run: swap files, their queue, and the count of bytes written."""

from __future__ import annotations

from dataclasses import dataclass

from offload.aio.shared_queue import SharedQueue
from offload.swapper.store import Store, Written


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The files of a run, as far as it has any."""

    queue: SharedQueue | None
    """Queue of all requests; None without files."""
    store: Store | None
    """The swap files; None without states on DISK."""
    written: Written
    """Counts of the bytes that go to each drive."""
