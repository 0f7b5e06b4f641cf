"""Small gradients of one unit, joined on the device and copied to the host as one.

Every copy costs the host about the same time, whatever its size: for two events, for a wake-up of the receiving thread,
and for turns of Python's lock, for which the launching thread waits. On the bus, a gradient of a norm or a bias takes a
microsecond.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from offload.sizes import KIB
from offload.swapper.memory.device import Event

SMALL = 256 * KIB
"""Bytes below which a gradient is joined with others.

A joined gradient is copied once more on the host, from the staging buffer to its place: 256 KiB in about 25 us at 10
GB/s. A copy of its own costs 10 to 20 us of Python, as measured without a GPU, and some five calls of CUDA. So it saves
time to join smaller gradients, and would cost time to join much larger ones.
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


class SmallGradients:
    """The small gradients of one unit that were not sent yet. Belongs to the thread that sends."""

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

    def clear(self) -> None:
        """Empties `pieces`, once they were sent."""
        self.pieces = []


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
