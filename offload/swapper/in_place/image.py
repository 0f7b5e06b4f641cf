"""The image of a unit: its tensors as they lie in the files of a model, in whole pages.

    file     | header | … | b  c  a | …          tensors begin anywhere
    image          [ pages of b  c  a ]          what one read puts into a host buffer
    unit              [ a | b | c ]              each tensor is copied to its own place on the device

Direct I/O moves whole pages from a page's border to a page's border. So a host buffer receives pages as they are in the
file, and the copy to the device, which is made anyway, puts each tensor where the unit has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from offload.sizes import PAGE, align_up


class FileRange(NamedTuple):
    """Consecutive bytes of a file."""

    path: str
    start: int
    nbytes: int

    @property
    def stop(self) -> int:
        """End of the bytes in the file."""
        return self.start + self.nbytes


class Piece(NamedTuple):
    """Bytes of a partition or an image, and the bytes of the unit to which they are copied."""

    start: int
    """First byte in the partition or image."""
    target: range
    """Bytes of the unit on the device."""


class UnitImage(NamedTuple):
    """The pages in which the tensors of a unit lie, and the place of each tensor in them."""

    extents: tuple[FileRange, ...]
    """The pages, one range after the other in the image."""
    pieces: tuple[Piece, ...]
    """The tensors, in the order of the image."""

    @property
    def nbytes(self) -> int:
        """Bytes of the image."""
        return sum(extent.nbytes for extent in self.extents)


def image_of(tensors: Sequence[tuple[FileRange, int]], file_nbytes: Mapping[str, int]) -> UnitImage:
    """Returns the image of a unit.

    Args:
        tensors: bytes of each tensor in its file, and the first byte of the tensor in the unit.
        file_nbytes: size of each file.
    """
    ordered = sorted(each for each in tensors if each[0].nbytes)
    extents: list[FileRange] = []
    for (path, start, nbytes), _ in ordered:
        first, last = start // PAGE * PAGE, min(align_up(start + nbytes), file_nbytes[path])
        before = extents[-1] if extents else None
        if before is not None and before.path == path and first <= before.stop:
            # Tensors that share a page are one range, so that no page is read twice.
            extents[-1] = before._replace(nbytes=max(before.stop, last) - before.start)
        else:
            extents.append(FileRange(path, first, last - first))
    # A range that ends with its file may be no whole number of pages. It comes last: what follows it would have
    # another place within a page than in its file, and so would go through the page cache.
    extents.sort(key=lambda extent: extent.nbytes % PAGE != 0)
    begins, total = dict[FileRange, int](), 0
    for extent in extents:
        begins[extent] = total
        total += extent.nbytes
    pieces = []
    for (path, start, nbytes), target in ordered:
        extent = next(each for each in extents if each.path == path and each.start <= start < each.stop)
        pieces.append(Piece(begins[extent] + start - extent.start, range(target, target + nbytes)))
    return UnitImage(tuple(extents), tuple(sorted(pieces, key=lambda piece: piece.start)))
