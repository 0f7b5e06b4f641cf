"""Device memory of fixed size, cut into slices. Not thread-safe: the pager's lock guards every call."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch

from offload.errors import BudgetError
from offload.sizes import format_size
from offload.swapper.memory.allocator import Space
from offload.swapper.memory.device import Device, Event


class Slice(NamedTuple):
    """A stretch of the device arena that holds one unit's weights."""

    offset: int
    nbytes: int
    after: tuple[Event, ...]
    """What must be done before it is written."""


class DeviceArena:
    """One allocation on the compute device, or two once it has grown, within which every unit's weights come and go.

    A slice may be given back while compute that reads it is still under way: who takes its place next writes there
    after the events in `Slice.after`. With `poison`, freed slices are filled with NaN and slices lie at random places,
    so that a stale view shows itself.
    """

    def __init__(self, nbytes: int, device: Device, poison: bool = False) -> None:
        self.nbytes = nbytes
        self.poison = poison
        self._device = device
        self.space = Space(nbytes, random.Random(0) if poison else None)
        self._readers: list[tuple[int, int, Event]] = []
        """Stretches that were given back, and when the last compute that reads them is done."""
        self.pieces = [(0, self._allocate(nbytes))]
        """Where each allocation starts among the offsets, and its (nbytes,) uint8; ascending."""

    def _allocate(self, nbytes: int) -> torch.Tensor:
        try:
            return self._device.allocate(nbytes)
        except (torch.OutOfMemoryError, OSError) as error:
            raise BudgetError(
                f"{self._device.torch} has not {format_size(nbytes)} free in one piece for the device budget: {error}; "
                f'lower "device_memory" in the "offload" block, or move homes to cpu or nvme'
            ) from error

    def grow(self, nbytes: int) -> tuple[int, int]:
        """Have `nbytes` more, in one piece: where they start and end. Raises `BudgetError` where they are not free."""
        memory = self._allocate(nbytes)
        start = self.space.add(nbytes)
        self.pieces.append((start, memory))
        # torch may give memory that compute under way still uses: for torch that is in order, for an upload it is not.
        self._readers.append((start, start + nbytes, self._device.computed()))
        self.nbytes += nbytes
        return start, start + nbytes

    @property
    def used_bytes(self) -> int:
        return self.space.used_bytes

    def take(self, nbytes: int) -> Slice | None:
        """A slice, or None where no hole is large enough."""
        offset = self.space.take(nbytes)
        return None if offset is None else self._slice(offset, nbytes)

    def keep(self, nbytes: int) -> torch.Tensor:
        """(nbytes,) uint8 that stays taken; the arena was sized for it."""
        piece = self.take(nbytes)
        assert piece is not None, "the device arena was sized for what stays there"
        return self.view(piece)

    def take_at(self, offset: int, nbytes: int) -> Slice:
        """The slice at `offset`, which is free."""
        self.space.take_at(offset, nbytes)
        return self._slice(offset, nbytes)

    def _slice(self, offset: int, nbytes: int) -> Slice:
        self._readers = [reader for reader in self._readers if not reader[2].done()]
        stop = offset + nbytes
        return Slice(
            offset, nbytes, tuple(done for first, last, done in self._readers if first < stop and offset < last)
        )

    def give(self, piece: Slice, written: Event, read: Event) -> None:
        """Return a slice; `written` and `read` end the last upload into it and the last compute that reads it."""
        if self.poison:
            self._device.hold(written)
            self._device.hold(read)
            self.view(piece).view(torch.int16).fill_(0x7FFF)  # a NaN as bf16, and pairwise as fp32
            read = self._device.computed()
        self._readers += [
            (piece.offset, piece.offset + piece.nbytes, event) for event in (written, read) if not event.done()
        ]
        self.space.give(piece.offset, piece.nbytes)

    def view(self, piece: Slice) -> torch.Tensor:
        """(nbytes,) uint8, the slice's own memory."""
        start, memory = next(each for each in reversed(self.pieces) if each[0] <= piece.offset)
        return memory[piece.offset - start : piece.offset - start + piece.nbytes]


def check_budget(what: str, have: int, need: int, advice: str) -> None:
    """Raise `BudgetError` with both numbers where `have` bytes cannot hold `need`."""
    if have < need:
        raise BudgetError(
            f"{what} is {format_size(have)} ({have} bytes), the least that works is "
            f"{format_size(need)} ({need} bytes); {advice}"
        )
