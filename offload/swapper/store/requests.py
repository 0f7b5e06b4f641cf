"""Requests of a store to an I/O queue: for bytes in several extents, and reads that are compared with checksums.

A live run reads any bytes by `CheckedRead`. An export, which reads a file in order, uses `Compared`.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from offload.aio import DirectFile, File, aligned_empty, crc32c_joined
from offload.aio.file import FilePiece
from offload.aio.protocols import Future, wait_for_all
from offload.errors import IoError, StoreError
from offload.notices import announce
from offload.records import fields, maybe, number, read, rows, whole
from offload.sizes import MIB, PAGE, align_up, format_decimal
from offload.states import State
from offload.swapper.store.format import ChecksumRange, Extent, Extents, PageSums, sum_of
from offload.timeline import OFF, Row, Timeline, now

# -- requests ------------------------------------------------------------------------------------------


class Joined:
    """Byte ranges of files, presented as one contiguous file, so that one request moves all of them."""

    def __init__(self, ranges: Sequence[tuple[File, Extent]]) -> None:
        self._files = [file for file, _ in ranges]
        self._extents = [extent for _, extent in ranges]

    @property
    def path(self) -> str:
        """Returns the path of the first file."""
        return self._files[0].path

    @property
    def closed(self) -> bool:
        """True if one of the files is closed."""
        return any(file.closed for file in self._files)

    def pieces(self, offset: int, nbytes: int) -> list[FilePiece]:
        """Returns the requests of the native queue for `nbytes` bytes from `offset` on."""
        file_pieces: list[FilePiece] = []
        for file, extent in zip(self._files, self._extents, strict=True):
            for part in Extents((extent,)).extents_of(offset, nbytes):
                file_pieces += file.pieces(*part)
            # From here on `offset` is relative to the next range.
            offset -= extent.nbytes
        return file_pieces

    def parts(self) -> list[DirectFile]:
        """Returns the files of the single drives."""
        return [part for file in dict.fromkeys(self._files) for part in file.parts()]


def bytes_of(file: File, place: Extents, start: int, nbytes: int, copied: File | None = None) -> tuple[File, int]:
    """Returns the file and the offset at which a queue finds bytes of a slot.

    `copied` is the slot as a file of its own, if some of the slot's bytes are in other files; see `Undo.slots`.
    """
    if copied is not None:
        return copied, start
    extents = place.extents_of(start, nbytes)
    # Most requests lie in one extent and need no `Joined`. A request for a weight may also reach into the slot's second
    # extent, the frozen bytes.
    return (file, extents[0].offset) if len(extents) == 1 else (Joined([(file, extent) for extent in extents]), 0)


_CHUNK_NBYTES = 8 * MIB

UNREADABLE = (errno.EIO, errno.ENODATA)
"""Errors of reads that a repair may cure: a sector that the drive cannot read, or a file that was cut."""


class VerifiedRead:
    """A read in flight whose bytes the first `wait` verifies. Each later `wait`, on any thread, ends the same way."""

    def __init__(self, future: Future) -> None:
        self._future = future
        # Two threads may wait for one read, and only one may verify it: a comparison may consume the reads before it.
        self._lock = threading.Lock()
        self._verified = False
        self._damage: IoError | None = None

    def _read_after(self, error: IoError) -> int:
        """Reads the bytes in another way after a read that has failed; raises `error` if there is none. Called once."""
        raise error

    def _verify(self, nbytes: int) -> None:
        """Raises `IoError` if the bytes differ from those written. Called once, after the read has ended."""

    def done(self) -> bool:
        """Returns True if the read has ended; the bytes may not be verified yet."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the read, verifies its bytes, and returns their number; raises `IoError` if they are damaged."""
        nbytes = 0
        failure: IoError | None = None
        try:
            nbytes = self._future.wait(timeout)
        except IoError as error:
            failure = error
        with self._lock:
            if not self._verified:
                try:
                    self._verify(nbytes if failure is None else self._read_after(failure))
                except IoError as error:
                    self._damage = error
                self._verified = True
        if self._damage is not None:
            raise self._damage
        return nbytes if failure is None else self._future.wait()

    def crc32c(self) -> int:
        """Returns the CRC-32C of the bytes read."""
        return self._future.crc32c()

    def page_crcs(self) -> bytes:
        """Returns the CRC-32C of the bytes read in each page."""
        return self._future.page_crcs()

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        """Calls `function` with the request of the queue once the read has ended."""
        # thread of the I/O queue: a `wait` for this object would verify the bytes there, and may read them again.
        self._future.add_done_callback(function)


class Compared(VerifiedRead):
    """A read in order, whose bytes and CRC-32C the first `wait` passes to `compare`."""

    def __init__(self, future: Future, compare: Callable[[int, int], None]) -> None:
        super().__init__(future)
        self._compare = compare

    def _verify(self, nbytes: int) -> None:
        self._compare(nbytes, self._future.crc32c())


class CheckedRead(VerifiedRead):
    """A read of any bytes in a live run, verified by the checksums of their pages.

    If bytes differ, they are read once more: after a fault in transit, the bytes on the drive are still right. If they
    differ again, or cannot be read, `mend` may replace them by a true copy.
    """

    def __init__(
        self,
        sums: PageSums,
        start: int,
        buffer: memoryview,
        submit: Callable[[int, memoryview], Future],
        damaged: Callable[[range], IoError],
        mend: Callable[[range], bool] = lambda damage: False,
    ) -> None:
        """Submits the read.

        `sums` are the checksums of the newest bytes. A later write replaces this object, or records its checksums in
        it. `buffer` belongs to the caller and must live until the future is done. `submit` starts to read from a byte
        offset into a buffer, with checksums; `damaged` returns the error for damaged bytes. `mend` makes damaged bytes
        right where they are stored, and returns True if they are right now.
        """
        super().__init__(submit(start, buffer))
        self._sums, self._start, self._damaged, self._mend = sums, start, damaged, mend
        self._buffer, self._submit = buffer, submit
        self._unreadable: IoError | None = None
        """The error of the last comparison that could not read bytes beside those of the request."""
        try:
            self._pages = self._read_pages(len(buffer))
        except BaseException:
            wait_for_all([self._future])  # the caller reuses the buffer
            raise

    def _verify(self, nbytes: int) -> None:
        if (damage := self._find_damage(nbytes)) is not None:
            self._read_again()
            again = self._find_damage(nbytes)
            error = self._damaged(damage if again is None else again)
            if again is None:
                announce(
                    f"read {error.nbytes} bytes at offset {error.offset} of {error.path} twice, since they were not "
                    "those written at first and were so the second time: training goes on with the right ones, but "
                    "the drive, its cable or the memory is failing"
                )
            while again is not None:
                if not self._mend(again):
                    raise self._unreadable or self._damaged(again)
                self._read_again()
                before, again = again, self._find_damage(nbytes)
                if again == before:
                    raise self._damaged(again)
        self._buffer, self._pages = memoryview(b""), {}  # no longer needed; the memory is the caller's again

    def _find_damage(self, nbytes: int) -> range | None:
        """Returns the range of the first damaged bytes; the pages of the request if other bytes of them are unreadable.

        A range that an earlier process wrote, and a page of several writes, are read as a whole.
        """
        self._unreadable = None
        try:
            return self._first_damage(nbytes)
        except IoError as error:
            if error.errno not in UNREADABLE:
                raise
            self._unreadable = error
            return range(self._start // PAGE * PAGE, align_up(self._start + nbytes))

    def _read_after(self, error: IoError) -> int:
        damage = range(self._start, self._start + len(self._buffer))
        if error.errno not in UNREADABLE or not self._mend(damage):
            raise error
        return self._read_again()

    def _read_again(self) -> int:
        wait_for_all(future for _, future in self._pages.values())  # no memory is freed while the queue writes to it
        self._future = self._submit(self._start, self._buffer)
        self._pages = self._read_pages(len(self._buffer))
        return self._future.wait()

    def _read_pages(self, nbytes: int) -> dict[int, tuple[memoryview, Future]]:
        """Starts to read whole those pages of which the request covers a part without its own checksum."""
        pages = {}
        for page_range in self._sums.pages_to_read(self._start, nbytes):
            memory = aligned_empty(len(page_range))
            pages[page_range.start // PAGE] = memory, self._submit(page_range.start, memory)
        return pages

    def _first_damage(self, nbytes: int) -> range | None:
        """Returns the range of the first damaged bytes; None if all bytes are right."""
        sums, start, page_sums = self._sums, self._start, self._future.page_crcs()
        # Waits for all reads before any comparison: no memory may be freed while the queue writes to it.
        pages = {number: memory for number, (memory, future) in self._pages.items() if future.wait()}
        if unproven := sums.unproven(start, nbytes):
            expected = sum_of(unproven, start, nbytes)
            if expected is None:
                for checksum_range in unproven:
                    if not self._prove(checksum_range):
                        return range(checksum_range.start, checksum_range.start + checksum_range.nbytes)
            elif expected == self._future.crc32c():
                sums.record(start, nbytes, page_sums)
                sums.mark_proven(unproven)
                return None
            else:
                return range(start, start + nbytes)
        return sums.first_damage(start, nbytes, page_sums, pages)

    def _prove(self, of: ChecksumRange) -> bool:
        """Verifies an unproven range by a read of the whole range, and records the checksums of its pages."""
        buffer, parts, crc = aligned_empty(min(of.nbytes, _CHUNK_NBYTES + PAGE)), list[tuple[int, int, bytes]](), 0
        at, stop = of.start, of.start + of.nbytes
        while at < stop:
            nbytes = min(_CHUNK_NBYTES - at % PAGE, stop - at)  # later chunks begin with a page
            future = self._submit(at, buffer[:nbytes])
            future.wait()
            crc = crc32c_joined(crc, future.crc32c(), nbytes)
            parts.append((at, nbytes, future.page_crcs()))
            at += nbytes
        if crc != of.crc:
            return False
        for part in parts:
            self._sums.record(*part)
        self._sums.mark_proven([of])
        return True


# -- drive spans ---------------------------------------------------------------------------------------
#
# Spans on the timeline for the work of the drives: requests, from submission to completion, and commits.
#
# submit ── began = now() ──► the queue ──► the request ends, on the queue's thread ──► show: one span


class DriveSpans:
    """Recorder of requests, by unit and state, and of commits. One object serves the store and the spill files."""

    def __init__(self, timeline: Timeline, names: Sequence[str]) -> None:
        """Creates the titles of all spans. `names` are the displayed names of the units."""
        self._timeline = timeline
        self._recorded = timeline.recorded
        self._titles = [{state: f"{name} {state.value}" for state in State} for name in names]

    def show(self, row: Row, unit: int, state: State, began: int, nbytes: int, future: Future) -> Future:
        """Records the request of `future` when the request has ended, and returns `future`.

        `began` is the value of `now()` before the submission.
        """
        if not self._recorded.started:  # a timeline drops spans that begin before its start, and `OFF` never starts
            return future
        title = self._titles[unit][state]

        # A thread of the queue runs this callback, while other threads may wait for the request: it must not block.
        def ended(request: Future) -> None:
            """Adds the span of a request that has ended."""
            end, words = now(), title
            try:
                request.wait()
            except IoError as error:
                words = f"{title}: {error}"
            self._recorded.add(row, words, began, end, nbytes)

        future.add_done_callback(ended)
        return future

    def commit(self, step: int) -> AbstractContextManager[None]:
        """Records a commit for as long as the context is open."""
        return self._timeline.span(Row.COMMITS, f"commit of step {step}")


NO_SPANS = DriveSpans(OFF, ())
"""Recorder that records nothing."""


# -- write counts --------------------------------------------------------------------------------------
#
# Bytes written to each drive, which wear it out: by this process, and by earlier processes of the run.
#
# The counts are the bytes that the process asks the system to write: states, spilled gradients, commits. A drive writes
# more than that (it erases larger blocks), a file system slightly more. Checkpoints and exports are not counted.


logger = logging.getLogger("offload")


class DriveWrites(NamedTuple):
    """Bytes written to one drive by one rank."""

    path: str
    """The user's folder for swap files."""
    run_bytes: int
    """Bytes written by this process."""
    life_bytes: int
    """Bytes written by this process and by earlier processes of the run, up to the commit from which each resumed."""


class Rating(NamedTuple):
    """Rated endurance of a drive, and the fraction at which a run warns."""

    nbytes: float
    """The lowest endurance of all drives (TBW), in bytes."""
    share: float = 0.1
    """Fraction of `nbytes` above which a run warns."""
    ranks: int = 1
    """Number of ranks that write to the same drives, each as much as the others."""

    def used(self, nbytes: float) -> float:
        """Returns the fraction of a drive's endurance that is used if each rank writes `nbytes`."""
        return nbytes * self.ranks / self.nbytes


class DriveByteCounter:
    """Bytes written to each drive, in the order of `paths`.

    Any thread may call `add`, which warns once for each drive if the fraction in `rating` is exceeded.
    """

    def __init__(self, paths: Sequence[str | Path], rating: Rating | None = None) -> None:
        self.rating = rating
        self._paths = [str(path) for path in paths]
        self._lock = threading.Lock()
        self._run = [0] * len(paths)
        self._before = [0] * len(paths)
        self._warned = [False] * len(paths)
        self._reserve: Callable[[], float] | None = None
        self._reserved = math.inf

    def reserve_by(self, reserve: Callable[[], float]) -> None:
        """Calls `reserve` now, and whenever a drive's count of this process exceeds the last result of `reserve`.

        Any thread may call it, before the bytes are written.
        """
        self._reserve, self._reserved = reserve, reserve()

    def add(self, drive: int, nbytes: int) -> None:
        """Adds `nbytes` to the count of a drive. Called before they are written, except at the end of a commit."""
        with self._lock:
            self._run[drive] += nbytes
            run = self._run[drive]
            life = self._run[drive] + self._before[drive]
            # `life` is the count of one rank; `used` multiplies by the ranks that write to the same drives.
            exceeded = self.rating is not None and self.rating.used(life) > self.rating.share
            # Decided under the lock, so that one thread warns.
            warns, self._warned[drive] = exceeded and not self._warned[drive], self._warned[drive] or exceeded
        # Not under the lock: a log handler may block, and other threads must be able to add meanwhile.
        if warns and self.rating is not None:
            self._warn(drive, life, self.rating)
        # Not under the lock: `reserve` reads these counts. It holds a lock of its own, so its results never fall.
        if self._reserve is not None and run > self._reserved:
            self._reserved = self._reserve()

    def drives(self) -> tuple[DriveWrites, ...]:
        """Returns the counts of each drive."""
        with self._lock:
            # Under the lock, so that the counts of all drives are of one moment.
            counts = zip(self._paths, self._run, self._before, strict=True)
            return tuple(DriveWrites(path, run, run + before) for path, run, before in counts)

    def _warn(self, drive: int, life: int, rating: Rating) -> None:
        logger.warning(
            "%s: this run has written %s to this drive, %.1f %% of its rated %s (drive_tbw); the config asks for a "
            "warning from %g %% on (drive_share)",
            self._paths[drive],
            format_decimal(life * rating.ranks),
            100 * rating.used(life),
            format_decimal(rating.nbytes),
            100 * rating.share,
        )

    # -- in a commit --------------------------------------------------------------------------------

    def pack(self) -> bytes:
        """Returns the counts as JSON, for the blob of a commit."""
        rated = None if self.rating is None else self.rating.nbytes
        facts = {"bytes": [drive.life_bytes for drive in self.drives()], "rated_bytes": rated}
        return json.dumps(facts).encode()

    def go_on(self, *packed: bytes | None) -> None:
        """Resumes the counts of a commit, or the sums of several; a commit older than these counts has none."""
        before = [0] * len(self._before)
        for table in packed:
            counts = read_written(table)[0]
            # Counts of another number of drives cannot be assigned to the drives of this store.
            if len(counts) == len(before):
                before = [one + added for one, added in zip(before, counts, strict=True)]
        self._before = before


def read_written(packed: bytes | None) -> tuple[list[int], float | None]:
    """Returns the counts that `pack` stored: bytes by drive, and the rated endurance in bytes or None."""
    if packed is None:
        return [], None
    try:
        facts = read(packed, fields({"bytes": rows(whole()), "rated_bytes": maybe(number(1))}))
    except ValueError as error:
        raise StoreError(
            f"the count of written bytes in a commit is damaged: {error}; go back to a checkpoint"
        ) from error
    return list(facts["bytes"]), facts["rated_bytes"]
