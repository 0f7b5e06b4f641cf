"""Host memory for the inputs of checkpointed units: blocks of equal size, added as a forward needs them.

The size of an input is known only when the model runs, so no class of the engine's host arena can be cut for it at the
start. Each *slab* is a small arena of its own: it counts in the budget of the process, and is pinned as any arena is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offload.engine.activations.policy import FREE_SHARE, STAGED_INPUTS
from offload.errors import BudgetError
from offload.sizes import align_up
from offload.swapper.memory.device import Device, Event
from offload.swapper.memory.host_arena import Classes, Copied, HostArena, HostBuffer, HostMemory
from offload.swapper.memory.limits import free_host_memory


@dataclass(eq=False)
class Block:
    """Memory of one input."""

    buffer: HostBuffer
    slab: _Slab
    after: tuple[Event, ...] = ()
    """Copies by the device from or to this memory that may be in flight."""

    def bytes(self, nbytes: int) -> torch.Tensor:
        """Returns the first `nbytes` bytes, (nbytes,) uint8: the block's own memory."""
        return self.buffer.tensor(torch.uint8)[:nbytes]


class _Slab:
    """Blocks of one size, in an arena of their own."""

    def __init__(self, arena: HostArena, nbytes: int, count: int) -> None:
        self.arena, self.count = arena, count
        self.free: list[Block] = []
        for _ in range(count):
            buffer = arena.take_copied(nbytes)
            assert buffer is not None, "the slab was sized for its blocks"
            self.free.append(Block(buffer, self))


class HostBlocks:
    """Blocks of host memory. The lock of `KeptInputs` guards every call."""

    def __init__(
        self, device: Device, memory: HostMemory, budget: int | None, room: int | None, at_once: int | None = None
    ) -> None:
        """Allocates nothing yet.

        Args:
            device: pins the blocks.
            memory: the host memory of all engines of the process.
            budget: bytes that all engines may take together; None for no limit.
            room: bytes for blocks; 0 for staging alone; None for what is free.
            at_once: blocks that the first slab contains; None for slabs that double.
        """
        self._device, self._memory, self._budget, self._room = device, memory, budget, room
        self._at_once = at_once
        self._slabs: dict[int, list[_Slab]] = {}
        """Slabs by the size of their blocks."""

    @property
    def arenas(self) -> list[HostArena]:
        """The memory of all slabs."""
        return [slab.arena for slabs in self._slabs.values() for slab in slabs]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, free or not."""
        return sum(arena.nbytes for arena in self.arenas)

    def room(self, nbytes: int) -> int:
        """Returns the bytes that blocks of `nbytes` may take together, those of today included."""
        if self._room is None:
            return self.nbytes + int(FREE_SHARE * free_host_memory())
        return max(self._room, STAGED_INPUTS * align_up(nbytes))

    def take(self, nbytes: int) -> Block | None:
        """Returns a block of at least `nbytes`; None if the budget has no room for one more."""
        size = align_up(nbytes)
        # A larger block serves too: steps of ever new lengths then take no more memory than the longest of them.
        for _, slabs in sorted(item for item in self._slabs.items() if item[0] >= size):
            for slab in slabs:
                if slab.free:
                    return slab.free.pop()
        self._close_idle(size)
        return self._grow(size)

    def give(self, block: Block) -> None:
        """Returns a block. Its next owner waits for `block.after`."""
        block.after = tuple(event for event in block.after if not event.done())
        block.slab.free.append(block)

    def _grow(self, size: int) -> Block | None:
        """Adds a slab and returns one of its blocks; None if there is no room for a single block."""
        mine = self._slabs.setdefault(size, [])
        have = sum(slab.count for slab in mine)
        wanted = (self._at_once or 1) if not have else have
        for count in _halved(min(wanted, max((self.room(size) - self.nbytes) // size, 0))):
            if (slab := self._slab(size, count)) is not None:
                mine.append(slab)
                return slab.free.pop()
        return None

    def _slab(self, size: int, count: int) -> _Slab | None:
        """Returns a slab of `count` blocks; None if the budget of the process has no room."""
        nbytes = size * count
        # No other engine gives way: a cache of weights is worth as much, and this engine's own is in use.
        if self._budget is not None and self._memory.taken_bytes + nbytes > self._budget:
            return None
        copied = None if self._device.host_addressable else Copied(resident=nbytes, promoted=0, tiles=False)
        classes = Classes(tiles=0, weights=0, gradients=0, resident=nbytes)
        try:
            arena = HostArena(classes, self._device, self._memory, None, None, copied)
        except (BudgetError, OSError):  # the latter if the system has no memory
            return None
        return _Slab(arena, size, count)

    def _close_idle(self, size: int) -> None:
        """Closes slabs of another size none of whose blocks is in use."""
        for other, slabs in self._slabs.items():
            for slab in [each for each in slabs if other != size and len(each.free) == each.count]:
                slabs.remove(slab)
                _close(slab)
        # Lengths may be ever new ones, and each would leave its size behind.
        self._slabs = {other: slabs for other, slabs in self._slabs.items() if slabs}

    def close(self) -> None:
        """Waits for copies in flight and frees all blocks, of which none may be used afterwards. Idempotent."""
        while self._slabs:
            _, slabs = self._slabs.popitem()
            for slab in slabs:
                _close(slab)


def _halved(count: int) -> Sequence[int]:
    """Returns `count`, its half and so on down to 1; nothing if it is 0."""
    found = []
    while count:
        found.append(count)
        count //= 2
    return found


def _close(slab: _Slab) -> None:
    for block in slab.free:
        for event in block.after:
            event.wait()
    # A slab and its blocks refer to each other, so their memory would stay mapped until Python looks for such cycles.
    slab.free.clear()
    slab.arena.close()
