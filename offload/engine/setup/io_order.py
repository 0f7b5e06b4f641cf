"""The order of reads and writes on the drives of an engine: both at once, or windows of one direction."""

from __future__ import annotations

from collections.abc import Sequence

from offload.aio.shared_queue import SharedQueue
from offload.hardware.probe import kept_window
from offload.sizes import format_size


def io_notices(queue: SharedQueue | None, folders: Sequence[str]) -> tuple[str, ...]:
    """Returns notices about the I/O of an engine: the reasons against the fastest backend, and windows.

    Args:
        queue: the engine's queue, or None.
        folders: the engine's drives.
    """
    if queue is None:
        return ()
    refused = (f"I/O by {queue.backend}: {'; '.join(queue.refusals)}",) if queue.refusals else ()
    window = kept_window(folders)
    if not window:
        return refused
    line = (
        f"the drives read and write in windows of {format_size(window)}, since `offload probe` measured that they are "
        f"slower with both at once"
    )
    return (*refused, line)
