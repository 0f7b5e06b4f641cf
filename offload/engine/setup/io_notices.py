"""Notices about the I/O of an engine: the backend, and the order of reads and writes."""

from __future__ import annotations

from offload.aio.shared_queue import SharedQueue
from offload.sizes import format_size


def io_notices(queue: SharedQueue | None) -> tuple[str, ...]:
    """Returns notices if the system refuses the fastest backend, and if the drives are used in windows."""
    if queue is None:
        return ()
    refused = f"I/O by {queue.backend}: {'; '.join(queue.refusals)}"
    window = format_size(queue.window_bytes)
    windows = f"reads and writes go in windows of {window}: `offload probe` measured that both at once are slower here"
    return (*((refused,) if queue.refusals else ()), *((windows,) if queue.window_bytes else ()))
