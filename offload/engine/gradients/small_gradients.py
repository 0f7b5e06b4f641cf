"""Gradients of one unit, joined on the device and copied to the host as one.

    neighbours in host memory  ─► joined with the padding between them ─► one copy, straight to their places
    all others                 ─► joined ─► one copy to a staging buffer ─► split on the host

Every copy costs the host about the same time, whatever its size: for two events, for a wake-up of the receiving thread,
and for turns of Python's lock, for which the launching thread waits. On the bus, a gradient of a norm or a bias takes a
microsecond.

A gradient of 8 MiB or more leaves alone, and at most a staging buffer, 16 MiB, is joined: to join a whole unit of any
size would not pay. The device reads and writes each joined byte once more, 8 MiB in 17 us at 1 TB/s, and holds it
twice. A copy of its own costs 10 to 20 us of Python, as measured without a GPU, and some five calls of CUDA. For a
block of Llama-2-13B, 605 MiB of gradients in bf16, one copy in place of eight would take 1.3 ms and 605 MiB more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from offload.layout.flat_layout import ALIGNMENT
from offload.sizes import KIB, MIB
from offload.swapper.memory.device import Event

SMALL = 8 * MIB
"""Bytes below which a gradient is joined with others."""
THROUGH_STAGING = 256 * KIB
"""Bytes below which neighbours in host memory are joined with others instead of being copied straight to their places.

The host then copies them once more, from the staging buffer: 256 KiB in about 25 us at 10 GB/s, which is what a copy of
their own costs.
"""

Place = tuple[int, int, int]
"""Unit, segment, and first element within the segment."""

Receive = Callable[[int, torch.Tensor], None]
"""Callback that receives a position and values, (n,) on the CPU, which are valid until it returns."""


class Piece(NamedTuple):
    """One gradient that waits for others."""

    place: Place
    source: torch.Tensor
    """(n,) on the device."""
    computed: Event
    """Recorded after the compute that produces `source`, on its stream."""
    target: torch.Tensor | None
    """(n,) of the same dtype in HOST, or None."""
    receive: Receive | None


class Group(NamedTuple):
    """Gradients of a unit that leave as one copy."""

    pieces: Sequence[Piece]
    gaps: Sequence[int] | None
    """Bytes of padding before each piece but the first, if all are neighbours in host memory; otherwise None."""


class Copy(NamedTuple):
    """One copy to the host, of one gradient or of several that are joined."""

    pieces: Sequence[Piece]
    source: torch.Tensor
    """(n,) on the device; of several gradients, their bytes."""
    target: torch.Tensor | None
    """(n,) of the same dtype in HOST, or None."""
    receive: Receive | None


class SmallGradients:
    """The gradients of one unit that wait to be joined. Belongs to the thread that sends."""

    def __init__(self, most: int) -> None:
        """Begins empty.

        Args:
            most: the largest sum of bytes; that of a staging buffer, so that no gradient is cut.
        """
        self._most = most
        self.title = ""
        self.pieces: list[Piece] = []

    def accepts(self, source: torch.Tensor) -> bool:
        """Returns True if `source` is small."""
        return source.nbytes < SMALL and source.nbytes <= self._most

    def must_leave_before(self, place: Place | None, source: torch.Tensor) -> bool:
        """Returns True if the gradients in `pieces` must be sent before `source` is sent or added to them.

        So gradients of one place are received in order, and the small ones of a unit before any of the next unit.
        """
        if not self.pieces:
            return False
        if place is None or self.pieces[0].place[0] != place[0] or any(piece.place == place for piece in self.pieces):
            return True
        return self.accepts(source) and self.nbytes + source.nbytes > self._most

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients in `pieces`."""
        return sum(piece.source.nbytes for piece in self.pieces)

    def add(self, title: str, piece: Piece) -> None:
        """Adds a gradient that is small, of the same unit and of another place than all others."""
        self.title = title
        self.pieces.append(piece)

    def remove(self, sent: Sequence[Piece]) -> None:
        """Removes gradients that were sent."""
        places = {piece.place for piece in sent}
        self.pieces = [piece for piece in self.pieces if piece.place not in places]


def group(pieces: Sequence[Piece]) -> list[Group]:
    """Returns the pieces by the copy with which they leave: neighbours in host memory, then all others together."""
    # The thread that launches the backward runs this for each unit, so each pair of neighbours is looked at once.
    runs: list[tuple[list[Piece], list[int]]] = []
    # A gradient that is added, or whose squares the host sums, is received chunk by chunk: it has no place to go to
    # straight away.
    straight = [piece for piece in pieces if piece.target is not None and piece.receive is None]
    for piece in sorted(straight, key=_address):
        gap = _gap(runs[-1][0][-1], piece) if runs else None
        if gap is None:
            runs.append(([piece], []))
        else:
            runs[-1][0].append(piece)
            runs[-1][1].append(gap)
    if len(runs) == 1 and len(straight) == len(pieces):
        return [Group(*runs[0])]
    # Short runs between parameters without a gradient would each be a copy again: they join the others.
    groups = [Group(*run) for run in runs if sum(piece.source.nbytes for piece in run[0]) >= THROUGH_STAGING]
    leaving = {piece.place for each in groups for piece in each.pieces}
    others = [piece for piece in pieces if piece.place not in leaving]
    return [*groups, Group(others, None)] if others else groups


def copy_of(group: Group) -> Copy:
    """Returns the copy of the pieces of one group, which the current stream may read."""
    pieces = group.pieces
    if len(pieces) == 1:
        return Copy(pieces, pieces[0].source, pieces[0].target, pieces[0].receive)
    if group.gaps is not None:
        source, target = _side_by_side(pieces, group.gaps)
        return Copy(pieces, source, target, None)
    source, receive = join(pieces)
    return Copy(pieces, source, None, receive)


def _address(piece: Piece) -> int:
    assert piece.target is not None
    return piece.target.data_ptr()


def _gap(left: Piece, right: Piece) -> int | None:
    """Returns the bytes of padding between two places in host memory; None if they are no neighbours.

    A parameter of one element takes `ALIGNMENT` elements, so a smaller gap contains none.
    """
    assert left.target is not None and right.target is not None
    # Two allocations may be next to each other by chance, and no tensor can span both.
    if left.target.untyped_storage().data_ptr() != right.target.untyped_storage().data_ptr():
        return None
    gap = right.target.data_ptr() - left.target.data_ptr() - left.target.nbytes
    alike = left.target.dtype == right.target.dtype
    return gap if alike and 0 <= gap < ALIGNMENT * left.target.itemsize else None


def _side_by_side(pieces: Sequence[Piece], gaps: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the bytes of neighbours with the padding between them, on their device, and their places in one."""
    first, parts = pieces[0], [pieces[0].source.view(torch.uint8)]
    assert first.target is not None
    for piece, gap in zip(pieces[1:], gaps, strict=True):
        if gap:
            # Zeros, as the padding was at the start: nobody reads it, and no run's files shall depend on it.
            parts.append(torch.zeros(gap, dtype=torch.uint8, device=piece.source.device))
        parts.append(piece.source.view(torch.uint8))
    source = torch.cat(parts)
    return source, first.target.view(torch.uint8).as_strided((source.nbytes,), (1,))


def join(pieces: Sequence[Piece]) -> tuple[torch.Tensor, Receive]:
    """Returns the bytes of `pieces` as one tensor on their device, and the callback that splits it on the host.

    Args:
        pieces: gradients that the current stream may read.
    """
    # In the order of descending item sizes, each gradient is aligned to its item size.
    pieces = sorted(pieces, key=lambda piece: -piece.source.itemsize)
    joined = torch.cat([piece.source.view(torch.uint8) for piece in pieces])
    # The callback must not keep the sources: the sender decides how long their memory is needed.
    shares = [(piece.source.nbytes, piece.source.dtype, piece.target, piece.receive) for piece in pieces]

    def receive(position: int, values: torch.Tensor) -> None:
        assert position == 0 and len(values) == sum(nbytes for nbytes, *_ in shares), "joined gradients are not cut"
        start = 0
        for nbytes, dtype, target, passed_on in shares:
            part = values[start : start + nbytes].view(dtype)
            start += nbytes
            if target is not None:
                # Not `copy_`, which would start a team of threads for this thread, beside those of the kernels.
                ctypes.memmove(target.data_ptr(), part.data_ptr(), nbytes)
            if passed_on is not None:
                passed_on(0, part)

    return joined, receive
