"""The files of a model, open for reading: the source of weights that are read in place."""

from __future__ import annotations

import errno
import itertools
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from offload.aio import DirectFile, Priority, aligned_empty, crc32c_joined
from offload.aio.protocols import Future, Queue
from offload.errors import IoError, StoreError
from offload.fileio.buffered_copy import BUFFER_NBYTES, flow
from offload.fileio.cache_file import Stamp
from offload.fileio.inner_files import sampled_crc32
from offload.sizes import PAGE, align_up
from offload.states import State
from offload.swapper.store.format import ChecksumRange, Extent, PageSums
from offload.swapper.store.requests import NO_SPANS, CheckedRead, DriveSpans, Joined, VerifiedRead
from offload.swapper.table import UploadPiece, WeightSource
from offload.timeline import Row, now

# -- in-place layout -----------------------------------------------------------------------------------
#
# The in-place layout of a unit: its tensors as they lie in the files of a model, in whole pages.
#
#     file            | header | … | b  c  a | …   tensors begin anywhere
#     in-place layout        [ pages of b  c  a ]   what one read puts into a host buffer
#     unit                      [ a | b | c ]       each tensor is copied to its own place on the device
#
# Direct I/O moves whole pages. So a host buffer receives pages as they are in the file. The copy to the device, which
# is needed anyway, puts each tensor at its place in the unit.


class FileRange(NamedTuple):
    """Consecutive bytes of a file."""

    path: str
    start: int
    nbytes: int

    @property
    def stop(self) -> int:
        """End of the bytes in the file."""
        return self.start + self.nbytes


class InPlaceLayout(NamedTuple):
    """The pages that contain the tensors of a unit, and the place of each tensor in them."""

    extents: tuple[FileRange, ...]
    """The pages, one range after the other in the layout."""
    pieces: tuple[UploadPiece, ...]
    """The tensors, in the order of the layout."""

    @property
    def nbytes(self) -> int:
        """Bytes of the pages."""
        return sum(extent.nbytes for extent in self.extents)

    @property
    def aligned(self) -> bool:
        """True if each byte has the same place in a page of the layout and of its file, by which checksums count."""
        begins = itertools.accumulate((extent.nbytes for extent in self.extents), initial=0)
        return all((begin - extent.start) % PAGE == 0 for begin, extent in zip(begins, self.extents, strict=False))

    @property
    def tensors(self) -> list[tuple[FileRange, int]]:
        """The arguments of `arrange_in_place`, in the order of the layout."""
        begins = itertools.accumulate((extent.nbytes for extent in self.extents), initial=0)
        pairs: list[tuple[FileRange, int]] = []
        for begin, extent in zip(begins, self.extents, strict=False):
            for start, target in self.pieces:
                if begin <= start < begin + extent.nbytes:
                    at = extent.start + start - begin
                    pairs.append((FileRange(extent.path, at, len(target)), target.start))
        return pairs


def arrange_in_place(tensors: Sequence[tuple[FileRange, int]], file_nbytes: Mapping[str, int]) -> InPlaceLayout:
    """Returns the in-place layout of a unit.

    `tensors` contains the bytes of each tensor in its file, and the first byte of the tensor in the unit.
    """
    ordered = sorted(pair for pair in tensors if pair[0].nbytes)
    extents: list[FileRange] = []
    for (path, start, nbytes), _ in ordered:
        first, last = start // PAGE * PAGE, min(align_up(start + nbytes), file_nbytes[path])
        before = extents[-1] if extents else None
        if before is not None and before.path == path and first <= before.stop:
            # Tensors that share a page are one range, so that no page is read twice.
            extents[-1] = before._replace(nbytes=max(before.stop, last) - before.start)
        else:
            extents.append(FileRange(path, first, last - first))
    # A range that ends with its file may not fill its last page. It comes last: ranges behind it would
    # start unaligned in the buffer, and so would be read through the page cache.
    extents.sort(key=lambda extent: extent.nbytes % PAGE != 0)
    begins, total, filled = dict[FileRange, int](), 0, list[FileRange]()
    for extent in extents:
        begins[extent] = total
        # Where several ranges end with their files, bytes of the file's first page fill the rest of the last page.
        rest = extent.nbytes % PAGE if extent != extents[-1] and file_nbytes[extent.path] >= PAGE else 0
        filled += [extent, FileRange(extent.path, rest, PAGE - rest)] if rest else [extent]
        total += extent.nbytes + (PAGE - rest if rest else 0)
    pieces = []
    for (path, start, nbytes), target in ordered:
        extent = next(
            candidate for candidate in extents if candidate.path == path and candidate.start <= start < candidate.stop
        )
        pieces.append(UploadPiece(begins[extent] + start - extent.start, range(target, target + nbytes)))
    return InPlaceLayout(tuple(filled), tuple(sorted(pieces, key=lambda piece: piece.start)))


# -- model files ---------------------------------------------------------------------------------------


CURE = (
    "put the file with which the run began back, or resume the run with the model in another folder, which the run "
    "then records"
)
"""What a user does if a file is missing, damaged or another one. No command mends it: these files are only read."""
_SCANS = 4
"""Buffers of a scan, which a start makes in little memory."""


class ModelFiles:
    """The files of a model as a source of weights. They are only read, and must not change while they are open.

    The caller must wait for every future before `close`.
    """

    def __init__(
        self,
        in_place_layouts: Sequence[InPlaceLayout | None],
        stamps: Mapping[str, Stamp],
        queue: Queue,
        spans: DriveSpans = NO_SPANS,
        others: WeightSource | None = None,
    ) -> None:
        """Opens the files.

        The layout is None for a unit that is not read from here, but from `others`. The queue belongs to the caller.
        Raises `IoError` if a file cannot be opened, or has changed since its header was read.
        """
        self._queue, self._spans, self._stamps, self._others = queue, spans, stamps, others
        self._layouts = {unit: layout for unit, layout in enumerate(in_place_layouts) if layout is not None}
        self._files: dict[str, DirectFile] = {}
        self._sums: dict[int, PageSums] = {}
        self._crcs: dict[int, int] = {}
        self._samples: dict[str, int] = {}
        try:
            for path in self._paths():
                # Opened for reads only: a model's folder may belong to another user, and this library writes no files
                # there.
                self._files[path] = DirectFile(path, writable=False)
                self._check([path])
        except BaseException:
            self.close()
            raise
        # One request moves all extents of a unit, so that the drive sees them at once.
        self._units = {
            unit: Joined([(self._files[path], Extent(start, nbytes)) for path, start, nbytes in layout.extents])
            for unit, layout in self._layouts.items()
        }

    @classmethod
    def of_run(cls, recorded: Mapping[str, Any], queue: Queue) -> ModelFiles:
        """Opens the files that a run has recorded (`described`), which reads do not compare with their checksums yet.

        Raises `StoreError` if a file is missing or has another size.
        """
        stamps: dict[str, Stamp] = {}
        for file in recorded["files"]:
            path = file["path"]
            try:
                stamps[path] = Stamp.of(os.stat(path))
            except OSError as error:
                raise _moved(path, error.strerror or str(error)) from error
            if stamps[path].nbytes != file["nbytes"]:
                raise _moved(path, f"it has {stamps[path].nbytes} bytes, expected {file['nbytes']}")
        paths, sizes = list(stamps), {path: stamp.nbytes for path, stamp in stamps.items()}
        layouts: list[InPlaceLayout | None] = [None] * (max((u["unit"] for u in recorded["units"]), default=-1) + 1)
        for unit in recorded["units"]:
            tensors = [(FileRange(paths[file], start, nbytes), to) for file, start, nbytes, to in unit["tensors"]]
            layouts[unit["unit"]] = arrange_in_place(tensors, sizes)
        return cls(layouts, stamps, queue)

    def __contains__(self, unit: int) -> bool:
        """True if a unit is read from here."""
        return unit in self._layouts

    @property
    def committed(self) -> bool:
        """True if a later process can resume from `others`."""
        return self._others is not None and self._others.committed

    def start_read(self, unit: int, start: int, buffer: memoryview, priority: Priority) -> Future:
        """Submits a read that fills `buffer` from the pages of a unit; see `WeightSource`.

        The `wait` of the request raises `IoError`: ESTALE if a file has changed, EBADMSG if its bytes have.
        """
        if unit not in self._layouts:
            assert self._others is not None, "a unit that is not read from here has another source"
            return self._others.start_read(unit, start, buffer, priority)
        began = now()
        future = self._read(unit, start, buffer, priority)
        return self._spans.show(Row.READS, unit, State.WEIGHT, began, len(buffer), future)

    def read(self, unit: int, start: int, buffer: memoryview) -> list[Future]:
        """Submits reads that fill `buffer` with a unit's weights as laid out, from byte `start` on. Padding is zero."""
        buffer[:] = bytes(len(buffer))
        futures: list[Future] = []
        for at, target in self._layouts[unit].pieces:
            first, stop = max(start, target.start), min(start + len(buffer), target.stop)
            if first < stop:
                futures.append(self._read(unit, at + first - target.start, buffer[first - start : stop - start]))
        return futures

    def _read(self, unit: int, start: int, buffer: memoryview, priority: Priority = Priority.NORMAL) -> Future:
        file, sums = self._units[unit], self._sums.get(unit)

        def submit(at: int, memory: memoryview) -> Future:
            return self._queue.read(file, at, memory, priority=priority, checksum=sums is not None)

        # A checked read submits itself.
        future = (
            submit(start, buffer)
            if sums is None
            else CheckedRead(sums, start, buffer, submit, partial(self._damaged, unit))
        )
        return Unchanged(future, partial(self._check, [part.path for part in file.parts()]))

    def _damaged(self, unit: int, damage: range) -> IoError:
        piece = self._units[unit].pieces(damage.start, len(damage))[0]
        operation = f"use as frozen weights ({CURE})"
        return IoError(piece.owner.path, piece.offset, piece.nbytes, errno.EBADMSG, operation)

    # -- identity -------------------------------------------------------------------------------------

    def scan(self) -> Mapping[int, int]:
        """Reads all units once, and returns the CRC-32C of each. Every later read is compared with these bytes."""
        sums = {unit: PageSums(layout.nbytes) for unit, layout in self._layouts.items()}
        crcs = dict.fromkeys(sums, 0)

        def begin(chunk: tuple[int, range], buffer: memoryview) -> list[Future]:
            unit, part = chunk
            reads.append(self._queue.read(self._units[unit], part.start, buffer[: len(part)], checksum=True))
            return [reads[-1]]

        def end(chunk: tuple[int, range], _: memoryview) -> tuple[()]:
            (unit, part), read = chunk, reads.popleft()
            sums[unit].record(part.start, len(part), read.page_crcs())
            crcs[unit] = crc32c_joined(crcs[unit], read.crc32c(), len(part))
            return ()

        reads: deque[Future] = deque()
        chunks = (
            (unit, range(start, min(start + BUFFER_NBYTES, layout.nbytes)))
            for unit, layout in self._layouts.items()
            for start in range(0, layout.nbytes, BUFFER_NBYTES)
        )
        flow([aligned_empty(BUFFER_NBYTES) for _ in range(_SCANS)], chunks, begin, end)
        self._check(list(self._files))
        self._sums, self._crcs = sums, crcs
        return crcs

    def expect(self, recorded: Mapping[str, Any], folder: Path) -> None:
        """Compares the files with those that a run in `folder` has recorded, and later every read with its checksum.

        Raises `StoreError` if they differ in number, size, samples of their bytes, or the places of tensors.
        """
        self._crcs = {unit["unit"]: unit["crc"] for unit in recorded.get("units", ())}
        here = self.described() if self._crcs.keys() == self._layouts.keys() else {"files": [], "units": []}
        for now_there, before in itertools.zip_longest(here["files"], recorded.get("files", ())):
            # Not their names: a folder may move, and a link of a hub's cache may be copied as a file.
            if now_there is None or before is None or now_there["nbytes"] != before["nbytes"]:
                was = "no file" if before is None else f"{before['path']} of {before['nbytes']} bytes"
                file = "no such file" if now_there is None else f"{now_there['path']} of {now_there['nbytes']} bytes"
                raise StoreError(
                    f"the run in {folder} reads frozen weights from {was}, and the model is read from {file}: {CURE}, "
                    "or choose another run name"
                )
        for now_there, before in zip(here["files"], recorded.get("files", ()), strict=True):
            # Absent in runs of earlier versions, where the first read notices it.
            if before.get("sample", now_there["sample"]) != now_there["sample"]:
                raise StoreError(
                    f"the run in {folder} reads frozen weights from {before['path']}, and {now_there['path']} has "
                    f"other bytes of the same size: {CURE}, or choose another run name"
                )
        if here["units"] != list(recorded["units"]):
            raise StoreError(
                f"the run in {folder} reads frozen weights from {recorded['files'][0]['path']}, whose tensors are in "
                f"other places now: {CURE}, or choose another run name"
            )
        self._sums = {
            unit: PageSums(layout.nbytes, [ChecksumRange(0, layout.nbytes, self._crcs[unit])])
            for unit, layout in self._layouts.items()
        }

    def compare(self, recorded: Mapping[str, Any], folder: Path) -> None:
        """Reads all units once, and compares them with those that a run in `folder` has recorded.

        Raises `StoreError` if the files differ as for `expect`, or in any byte of a unit.
        """
        self.expect(recorded, folder)
        before = dict(self._crcs)
        for unit, crc in self.scan().items():
            if crc != before[unit]:
                paths = ", ".join(dict.fromkeys(extent.path for extent in self._layouts[unit].extents))
                raise StoreError(
                    f"the run in {folder} reads frozen weights from {paths}, which has other bytes now: {CURE}"
                )

    def described(self) -> dict[str, Any]:
        """Returns, as JSON, the files and the place and checksum of each unit in them."""
        paths = list(self._files)
        return {
            "files": [
                {"path": path, "nbytes": self._stamps[path].nbytes, "sample": self._sample(path)} for path in paths
            ],
            "units": [
                {
                    "unit": unit,
                    "crc": self._crcs[unit],
                    "tensors": [[paths.index(path), start, nbytes, to] for (path, start, nbytes), to in layout.tensors],
                }
                for unit, layout in self._layouts.items()
            ],
        }

    def _sample(self, path: str) -> int:
        """Returns the checksum of samples of a file, which distinguish another model with tensors of equal sizes."""
        if path not in self._samples:
            self._samples[path] = sampled_crc32(Path(path))
        return self._samples[path]

    def close(self) -> None:
        """Closes the files; idempotent."""
        for file in self._files.values():
            file.close()

    def _paths(self) -> list[str]:
        return list(dict.fromkeys(extent.path for layout in self._layouts.values() for extent in layout.extents))

    def _check(self, paths: Sequence[str]) -> None:
        """Raises `IoError` (ESTALE) if one of the files has changed since its header was read."""
        for path in paths:
            # Compares the open file: a new file under the same name does not change it.
            stamp = Stamp.of(os.fstat(self._files[path].descriptors.buffered))
            if stamp != self._stamps[path]:
                raise IoError(path, 0, 0, errno.ESTALE, "read weights from")


def _moved(path: str, reason: str) -> StoreError:
    return StoreError(f"cannot read frozen weights of the run from {path}: {reason}; {CURE}")


class Unchanged(VerifiedRead):
    """A read of a model file. Each `wait` compares the file with its stamp, after the bytes have arrived."""

    def __init__(self, future: Future, check: Callable[[], None]) -> None:
        super().__init__(future)
        self._check = check

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the read and returns its bytes. Raises `IoError` if the file has changed, or if the read failed."""
        try:
            nbytes = self._future.wait(timeout)
        except IoError:
            self._check()  # a truncated file may have caused the error
            raise
        self._check()
        return nbytes
