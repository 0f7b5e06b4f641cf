"""Room on the drives for bytes that need not outlive the process: unlinked files, freed when they are closed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from offload.aio import DirectFile
from offload.aio.file import open_new
from offload.aio.protocols import Future, Queue
from offload.errors import IoError, StoreError
from offload.sizes import align_up, format_size
from offload.states import State
from offload.swapper.store import Written, close_in_children
from offload.swapper.store.drive_spans import NO_SPANS, DriveSpans
from offload.timeline import Row, now


class SpillFile:
    """Room on the drives for gradients of units, or other bytes by key: the bytes of each key are on one drive.

    Any thread may call `read` and `write`. The caller must wait for all futures, at the latest before `close`.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        nbytes: Mapping[int, int],
        queue: Queue,
        written: Written | None = None,
        spans: DriveSpans = NO_SPANS,
        what: str = "gradients that do not fit host memory",
    ) -> None:
        """Creates and reserves the files.

        Args:
            paths: a folder on each drive.
            nbytes: number of bytes to reserve for each key; a key is the index of a unit if `spans` are recorded.
            queue: reads and writes the files.
            written: counts the bytes written to each drive; None for a count of its own.
            spans: records each request on the timeline, as a request for the gradient of its unit.
            what: name of the contents, for the error.

        Raises:
            StoreError: if a file cannot be created, or there is not enough room.
        """
        self._queue, self._spans = queue, spans
        self._written = Written(paths) if written is None else written
        self._places: dict[int, tuple[int, int]] = {}
        self._files: list[DirectFile] = []
        ends = [0] * len(paths)
        for key, size in nbytes.items():
            # Each key is stored on one drive, the one with the fewest bytes so far.
            drive = ends.index(min(ends))
            self._places[key] = (drive, ends[drive])
            # Direct I/O needs aligned offsets.
            ends[drive] += align_up(size)
        # Registered before the files are created, so that a fork at any time closes those that exist.
        close_in_children.add(self)
        try:
            for path, end in zip(paths, ends, strict=True):
                self._files.append(_nameless(Path(path), end, what))
        except BaseException:
            self.close()
            raise

    def read(self, key: int, start: int, buffer: memoryview) -> Future:
        """Starts to fill `buffer` from byte `start` of the key's bytes."""
        began = now()
        drive, offset = self._places[key]
        future = self._queue.read(self._files[drive], offset + start, buffer)
        return self._spans.show(Row.READS, key, State.GRAD, began, len(buffer), future)

    def write(self, key: int, start: int, buffer: memoryview) -> Future:
        """Starts to write `buffer` at byte `start` of the key's bytes; it must not change until the future is done."""
        began = now()
        drive, offset = self._places[key]
        self._written.add(drive, len(buffer))
        future = self._queue.write(self._files[drive], offset + start, buffer)
        return self._spans.show(Row.WRITES, key, State.GRAD, began, len(buffer), future)

    def close(self) -> None:
        """Closes the files, which frees their room; idempotent."""
        for file in self._files:
            file.close()
        self._files = []

    def close_in_child(self) -> None:
        """Closes the descriptors in a forked child, where they would keep room that the parent has freed."""
        for file in self._files:
            file.descriptors.close()


def _nameless(folder: Path, nbytes: int, what: str) -> DirectFile:
    """Returns an unlinked file of `nbytes` in `folder`. However this process ends, the file's room is freed."""
    name = folder / f".offload-spill-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A name that is taken is another's file, or a link to one.
        file = DirectFile(name, create=True, opener=open_new)
    except OSError as error:
        raise StoreError(
            f"cannot make a swap file in {folder}: {error.strerror}; set nvme_path to a folder on a local drive that "
            f"you may write"
        ) from error
    try:
        # Unlinked before the room is reserved: from here on a kill frees the file.
        name.unlink()
        file.reserve(nbytes)
    except IoError as error:
        file.close()
        raise StoreError(
            f"there is no room for {what}: {format_size(nbytes)} are needed on {folder}, which has "
            f'{format_size(shutil.disk_usage(folder).free)} free; free some room, or raise "host_memory"'
        ) from error
    return file
