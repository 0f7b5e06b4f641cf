"""The files of a model, open for reading: the source of weights that are read in place."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from offload.aio import DirectFile, Priority
from offload.aio.protocols import Future, Queue
from offload.errors import IoError
from offload.fileio.cache_file import Stamp
from offload.sizes import PAGE, align_up
from offload.states import State
from offload.swapper.store.format import Extent
from offload.swapper.store.requests import NO_SPANS, DriveSpans, Joined, VerifiedRead
from offload.swapper.table import UploadPiece
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
    begins, total = dict[FileRange, int](), 0
    for extent in extents:
        begins[extent] = total
        total += extent.nbytes
    pieces = []
    for (path, start, nbytes), target in ordered:
        extent = next(
            candidate for candidate in extents if candidate.path == path and candidate.start <= start < candidate.stop
        )
        pieces.append(UploadPiece(begins[extent] + start - extent.start, range(target, target + nbytes)))
    return InPlaceLayout(tuple(extents), tuple(sorted(pieces, key=lambda piece: piece.start)))


# -- model files ---------------------------------------------------------------------------------------


class ModelFiles:
    """The files of a model as a source of weights. They are only read, and must not change while they are open.

    The caller must wait for every future before `close`.
    """

    committed = False

    def __init__(
        self,
        in_place_layouts: Sequence[InPlaceLayout | None],
        stamps: Mapping[str, Stamp],
        queue: Queue,
        spans: DriveSpans = NO_SPANS,
    ) -> None:
        """Opens the files.

        The layout is None for a unit that is not read from here. The queue belongs to the caller. Raises `IoError` if a
        file cannot be opened, or has changed since its header was read.
        """
        self._queue, self._spans, self._stamps = queue, spans, stamps
        self._files: dict[str, DirectFile] = {}
        try:
            for path in dict.fromkeys(
                extent.path
                for in_place_layout in in_place_layouts
                if in_place_layout
                for extent in in_place_layout.extents
            ):
                # Opened for reads only: a model's folder may belong to another user, and this library writes no files
                # there.
                self._files[path] = DirectFile(path, writable=False)
                self._check([path])
        except BaseException:
            self.close()
            raise
        # One request moves all extents of a unit, so that the drive sees them at once.
        self._units = [
            Joined([(self._files[path], Extent(start, nbytes)) for path, start, nbytes in layout.extents])
            for layout in (layout or InPlaceLayout((), ()) for layout in in_place_layouts)
        ]

    def start_read(self, unit: int, start: int, buffer: memoryview, priority: Priority) -> Future:
        """Submits a read that fills `buffer` from the pages of a unit; see `WeightSource`.

        The `wait` of the request raises `IoError` (ESTALE) if a file has changed.
        """
        began, file = now(), self._units[unit]
        future = self._queue.read(file, start, buffer, priority=priority)
        checked = Unchanged(future, partial(self._check, [part.path for part in file.parts()]))
        return self._spans.show(Row.READS, unit, State.WEIGHT, began, len(buffer), checked)

    def close(self) -> None:
        """Closes the files; idempotent."""
        for file in self._files.values():
            file.close()

    def _check(self, paths: Sequence[str]) -> None:
        """Raises `IoError` (ESTALE) if one of the files has changed since its header was read."""
        for path in paths:
            # Compares the open file: a new file under the same name does not change it.
            stamp = Stamp.of(os.fstat(self._files[path].descriptors.buffered))
            if stamp != self._stamps[path]:
                raise IoError(path, 0, 0, errno.ESTALE, "read weights from")


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
