"""Room on the drives for bytes that need not outlive the process: unlinked files, freed when they are closed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from offload.aio import DirectFile
from offload.aio.file import open_new
from offload.aio.protocols import Future, Queue
from offload.errors import IoError, StoreError
from offload.sizes import align_up, format_size
from offload.states import State
from offload.swapper.store import DriveByteCounter, close_in_children
from offload.swapper.store.format import PageSums
from offload.swapper.store.requests import NO_SPANS, CheckedRead, DriveSpans
from offload.timeline import Row, now


class SpillFile:
    """Room on the drives for gradients of units, or other bytes by key: the bytes of each key are on one drive.

    Each read is compared with the checksums of the writes, which exist in memory only. Before the first write, all
    bytes are zeros. Any thread may call `read` and `write`. The caller must wait for all futures, at the latest before
    `close`. Before it reads bytes, it must wait for the write of these bytes.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        nbytes: Mapping[int, int],
        queue: Queue,
        written: DriveByteCounter | None = None,
        spans: DriveSpans = NO_SPANS,
        what: str = "gradients that do not fit host memory",
        title: Callable[[int], str] = "bytes of key {}".format,
    ) -> None:
        """Creates and reserves the files.

        `nbytes` are the bytes of each key; a key is the index of a unit if `spans` are recorded. `what` names the
        contents in the error if room is missing. Raises `StoreError` if a file cannot be created, or there is not
        enough room.
        """
        self._queue, self._spans = queue, spans
        self._written = written or DriveByteCounter(paths)
        self._title = title
        self._places: dict[int, tuple[int, int]] = {}
        self._sums = {key: PageSums(size) for key, size in nbytes.items()}
        self._lock = threading.Lock()
        self._new: dict[int, list[tuple[int, Future]]] = {key: [] for key in nbytes}
        """Start and future of each write whose checksums `_sums` does not have yet. Guarded by the lock."""
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
        """Starts to fill `buffer` from byte `start` of the key's bytes.

        The `wait` of the request raises `IoError` (EBADMSG) if the bytes differ from those written.
        """
        began = now()
        drive, offset = self._places[key]
        file = self._files[drive]

        def submit(at: int, memory: memoryview) -> Future:
            return self._queue.read(file, offset + at, memory, checksum=True)

        self._record(key)
        future: Future = CheckedRead(self._sums[key], start, buffer, submit, partial(self._damaged, key))
        return self._spans.show(Row.READS, key, State.GRAD, began, len(buffer), future)

    def _record(self, key: int) -> None:
        """Records the checksums of all writes that have ended."""
        with self._lock:
            writes, self._new[key] = self._new[key], []
            for start, future in writes:
                if not future.done():
                    self._new[key].append((start, future))
                    continue
                # A caller's `wait` for a failed write raises the error, so no caller reads its bytes.
                with contextlib.suppress(IoError):
                    self._sums[key].record(start, future.wait(), future.page_crcs())

    def _damaged(self, key: int, damage: range) -> IoError:
        drive, offset = self._places[key]
        path, at = self._files[drive].path, offset + damage.start
        return IoError(path, at, len(damage), errno.EBADMSG, f"use {self._title(key)},")

    def write(self, key: int, start: int, buffer: memoryview) -> Future:
        """Starts to write `buffer` at byte `start` of the key's bytes; it must not change until the future is done."""
        began = now()
        drive, offset = self._places[key]
        self._written.add(drive, len(buffer))
        self._record(key)  # so that the number of unrecorded writes stays bounded
        future = self._queue.write(self._files[drive], offset + start, buffer, checksum=True)
        with self._lock:
            self._new[key].append((start, future))
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
        # If the name exists, it is somebody else's file, or a link to one.
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
