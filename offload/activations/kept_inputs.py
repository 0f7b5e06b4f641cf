"""The inputs of checkpointed units between forward and backward: on the device, in host memory, or on disk.

    forward     keep ──► DEVICE ──download──► HOST ──write──► DISK      oldest first, one unit behind the forward
    backward    fetch ◄── DEVICE ◄──upload─── HOST ◄──read─── DISK      newest first, one unit ahead of the backward

An input lives as long as its graph: the graph holds a `KeptInput`, and its memory is free again when the graph drops
the object. So an exception, a Ctrl-C or a graph that never runs backward frees everything by itself. An input that
autograd asks for twice (`retain_graph`) is copied to the device twice.

Inputs of the same memory are stored once, such as an encoder's output for all layers of a decoder, or a view of it.

[Note: a tensor that is being copied] The download reads memory of a tensor that the forward may no longer need. The
tensor is held until compute is ordered after the copy, so torch's allocator cannot give the memory to other compute
before. A change in place meanwhile might be copied in part: versions are compared, and the backward raises the error
that torch raises without tiers.

Threads. The thread that runs the model calls `keep`, autograd's threads call `fetch`; one lock guards both. A graph may
die on any thread and within any call, also one that holds the lock: `KeptInput.__del__` only appends to a deque. The
handler of a signal runs in the waits for I/O, with the lock: it may call `close` by destroying the engine.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import math
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload.activations import checkpoints
from offload.activations.checkpoints import STAGED_INPUTS, UnitCheckpoints
from offload.activations.partitions import InputPartitions
from offload.aio.protocols import Future, Queue
from offload.config import Config
from offload.engine.micro_batches import PassSchedule
from offload.errors import BudgetError, IoError, StoreError, UsageError
from offload.interrupts import uninterrupted
from offload.layout.placement import usable_host
from offload.sizes import PAGE, align_up, format_size
from offload.states import Tier
from offload.swapper.memory.device import DONE, Device, Event
from offload.swapper.memory.host_arena import HostArena, HostBudget, HostBuffer, HostMemory, PinnedRegions
from offload.swapper.memory.limits import free_host_memory
from offload.swapper.store import DriveByteCounter
from offload.swapper.store.spill_file import SpillFile
from offload.timeline import OFF, Row, Timeline
from offload.torch_internals import without_modes

# -- disk slots ----------------------------------------------------------------------------------------
#
# Room on the drives for the inputs of checkpointed units: slots in unlinked files, added as a forward needs them.


_FIRST_SLOTS = 8
"""Slots of the first file of a size; each further file has as many as there are already."""


@dataclass(eq=False, slots=True)
class Slot:
    """Room for one input."""

    file: SpillFile
    key: int
    free: list[Slot]
    """The free slots of its size."""

    def read(self, buffer: memoryview) -> Future:
        """Starts to fill `buffer` with the bytes of the slot."""
        return self.file.read(self.key, 0, buffer)

    def write(self, buffer: memoryview) -> Future:
        """Starts to write `buffer` to the slot; it must not change until the future is done."""
        return self.file.write(self.key, 0, buffer)

    def release(self) -> None:
        """Frees the slot, whose reads and writes are done."""
        self.free.append(self)


class DiskSlots:
    """Slots for inputs. The lock of `KeptInputs` guards every call; the caller waits for all futures."""

    def __init__(self, paths: Sequence[str | Path], queue: Queue, written: DriveByteCounter) -> None:
        """Creates no file yet. `paths` are a folder on each drive."""
        self._paths, self._queue, self._written = paths, queue, written
        self._free: dict[int, list[Slot]] = {}
        self._files: dict[SpillFile, tuple[int, int]] = {}
        """Size and number of the slots of each file."""

    def take(self, nbytes: int) -> Slot:
        """Returns a slot of at least `nbytes`; at most half of it stays empty.

        Raises `StoreError` if a drive has no room for one more.
        """
        size = align_up(nbytes)
        fitting = [fit for fit, free in self._free.items() if free and size <= fit <= 2 * size]
        if not fitting:
            # Otherwise each new length of a sequence would leave a file that no later input uses.
            self._close_idle()
            self._grow(size)
        return self._free[min(fitting, default=size)].pop()

    def _grow(self, size: int) -> None:
        """Adds slots of a size, as many as there are already, or fewer where a drive has no room for these.

        Raises `StoreError` if a drive has no room for one more.
        """
        count = sum(count for file_size, count in self._files.values() if file_size == size) or _FIRST_SLOTS
        while True:
            sizes = dict.fromkeys(range(count), size)
            try:
                what = "inputs of checkpointed units"
                file = SpillFile(
                    self._paths, sizes, self._queue, self._written, what=what, title=f"{what} in slot {{}}".format
                )
                break
            except StoreError:
                if count == 1:
                    raise
                count //= 2
        self._files[file] = size, count
        free = self._free.setdefault(size, [])
        free += [Slot(file, key, free) for key in reversed(range(count))]

    def _close_idle(self) -> None:
        """Closes the files without a slot in use, and so frees their room."""
        unused = Counter(slot.file for free in self._free.values() for slot in free)
        for file in [idle for idle, (_, count) in self._files.items() if unused[idle] == count]:
            size, _ = self._files.pop(file)
            self._free[size][:] = [slot for slot in self._free[size] if slot.file is not file]
            file.close()
        sizes = {size for size, _ in self._files.values()}
        self._free = {size: free for size, free in self._free.items() if size in sizes}

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, free or not."""
        return sum(size * count for size, count in self._files.values())

    def close(self) -> None:
        """Closes the files, which frees their room. Idempotent."""
        while self._files:
            self._files.popitem()[0].close()


# -- host blocks ---------------------------------------------------------------------------------------
#
# Host memory for the inputs of checkpointed units: blocks of equal size, added as a forward needs them.
#
# The size of an input is known only when the model runs, so the engine's host arena has no class for it at the start.
# A *slab* is a small arena: it counts in the budget of the process, and is pinned as any arena is.


@dataclass(eq=False)
class InputBlock:
    """Memory of one input."""

    buffer: HostBuffer
    slab: _Slab
    after: tuple[Event, ...] = ()
    """Copies by the device from or to this memory that may be in flight."""

    def bytes(self, nbytes: int) -> torch.Tensor:
        """Returns the first `nbytes` bytes, (nbytes,) uint8: the block's own memory."""
        return self.buffer.tensor(torch.uint8)[:nbytes]

    def release(self) -> None:
        """Frees the block. Its next owner waits for `after`."""
        self.after = tuple(event for event in self.after if not event.done())
        self.slab.free.append(self)


class _Slab:
    """Blocks of one size, in one arena."""

    def __init__(self, arena: HostArena, nbytes: int, count: int) -> None:
        self.arena, self.count = arena, count
        self.free: list[InputBlock] = []
        for _ in range(count):
            buffer = arena.take_copied(nbytes)
            assert buffer is not None, "the slab was sized for its blocks"
            self.free.append(InputBlock(buffer, self))


class HostBlocks:
    """Blocks of host memory. The lock of `KeptInputs` guards every call."""

    def __init__(
        self, device: Device, memory: HostMemory, budget: int | None, room: int | None, at_once: int | None = None
    ) -> None:
        """Allocates nothing yet.

        All engines together may take `budget` bytes, blocks `room` bytes: 0 for staging alone, None for what is free.
        The first slab contains `at_once` blocks; None for slabs that double.
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
        room = self._room
        if self._budget is None:
            # Without a budget nobody keeps the memory free that was free at the start.
            free = self.nbytes + usable_host(free_host_memory(), own_device_memory=False)
            if room is None:
                return free
            room = min(room, free)
        assert room is not None, "with a budget, a room is set aside"
        return max(room, STAGED_INPUTS * align_up(nbytes))

    def take(self, nbytes: int) -> InputBlock | None:
        """Returns a block of at least `nbytes`; None if the budget has no room for one more."""
        size = align_up(nbytes)
        # A larger block serves too: steps of ever new lengths then take no more memory than the longest of them.
        for _, slabs in sorted(item for item in self._slabs.items() if item[0] >= size):
            for slab in slabs:
                if slab.free:
                    return slab.free.pop()
        self._close_idle(size)
        return self._grow(size)

    def _grow(self, size: int) -> InputBlock | None:
        """Adds a slab and returns one of its blocks; None if there is no room for a single block."""
        slabs = self._slabs.setdefault(size, [])
        have = sum(slab.count for slab in slabs)
        count = min(have or self._at_once or 1, (self.room(size) - self.nbytes) // size)
        while count > 0:
            if (slab := self._slab(size, count)) is not None:
                slabs.append(slab)
                return slab.free.pop()
            count //= 2
        return None

    def _slab(self, size: int, count: int) -> _Slab | None:
        """Returns a slab of `count` blocks; None if the budget of the process has no room."""
        nbytes = size * count
        # No other engine gives way: a cache of weights is worth as much, and this engine's own is in use.
        if self._budget is not None and self._memory.taken_bytes + nbytes > self._budget:
            return None
        copied = None if self._device.host_addressable else PinnedRegions(resident=nbytes, promoted=0, tiles=False)
        classes = HostBudget(tiles=0, weights=0, gradients=0, resident=nbytes)
        try:
            # calling thread: takes the lock of `HostMemory` inside that of `KeptInputs`. An arena without a budget
            # makes no callback under these locks, so no two threads wait for each other.
            arena = HostArena(classes, self._device, self._memory, None, None, copied)
        except (BudgetError, OSError):  # the latter if the system has no memory
            return None
        return _Slab(arena, size, count)

    def _close_idle(self, size: int) -> None:
        """Closes slabs of another size if all their blocks are free."""
        for slab_size, slabs in self._slabs.items():
            for slab in [idle for idle in slabs if slab_size != size and len(idle.free) == idle.count]:
                slabs.remove(slab)
                _close(slab)
        # Otherwise each new length of a sequence would leave an empty entry.
        self._slabs = {slab_size: slabs for slab_size, slabs in self._slabs.items() if slabs}

    def close(self) -> None:
        """Waits for copies in flight and frees all blocks; none may be used afterwards. Idempotent."""
        while self._slabs:
            _, slabs = self._slabs.popitem()
            for slab in slabs:
                _close(slab)


def _close(slab: _Slab) -> None:
    for block in slab.free:
        # calling thread: the device may still read or write the block. Its copies end by themselves.
        for event in block.after:
            event.wait()
    # A slab and its blocks refer to each other, so their memory would stay mapped until Python looks for such cycles.
    slab.free.clear()
    slab.arena.close()


# -- kept input ----------------------------------------------------------------------------------------
#
# One input of a checkpointed unit, as the graph holds it, with its memory in each tier.


LEAST_NBYTES = PAGE
"""Bytes of the smallest input that is moved: a smaller one would take a whole page elsewhere."""


@dataclass(eq=False, slots=True)
class InputMemory:
    """All memory of one input; None where there is none of a kind. `tensor`, `block` or `slot` contains the bytes."""

    tensor: torch.Tensor | None = None
    """The tensor of the forward, until compute is ordered after its download."""
    block: InputBlock | None = None
    """Host memory that contains the bytes after `downloaded` and `reading`."""
    slot: Slot | None = None
    """Room on disk that contains the bytes after `writing`."""
    arriving: torch.Tensor | None = None
    """A tensor on the device that contains the bytes after `uploaded`."""
    downloaded: Event = DONE
    uploaded: Event = DONE
    writing: Future | None = None
    reading: Future | None = None

    @property
    def tier(self) -> Tier:
        """The highest tier that contains the bytes, or will contain them."""
        if self.tensor is not None or self.arriving is not None:
            return Tier.DEVICE
        return Tier.HOST if self.block is not None else Tier.DISK

    @property
    def transfers_done(self) -> bool:
        """True if no read or write is in flight."""
        return all(transfer is None or transfer.done() for transfer in (self.writing, self.reading))

    def give_block(self) -> None:
        """Frees the block, if there is one."""
        if self.block is not None:
            self.block.release()
        self.block = None

    def give_slot(self) -> None:
        """Frees the slot, if there is one."""
        if self.slot is not None:
            self.slot.release()
        self.slot = None

    def settle(self) -> None:
        """Waits for a read or write in flight, whose error no longer matters."""
        # calling thread: also after an error, since the queue's threads use block and slot until a transfer has ended.
        for transfer in (self.writing, self.reading):
            if transfer is not None:
                with contextlib.suppress(IoError):
                    transfer.wait()
        self.writing = self.reading = None


class KeptInput:
    """One input. Graphs alone hold the object; when the last drops it, `released` receives its memory."""

    __slots__ = (*("__weakref__", "changed", "form", "memory", "nbytes"), *("released", "stays", "version", "wanted"))

    def __init__(self, tensor: torch.Tensor, wanted: tuple[int, ...], released: deque[InputMemory]) -> None:
        """Keeps `tensor`, detached: the graph must not refer to itself.

        `wanted` sorts inputs in the expected order of the backward's requests. `released` receives the memory in the
        end.
        """
        self.memory = InputMemory(tensor=tensor.detach())
        self.version = tensor._version
        self.form = Form.of(tensor)
        self.nbytes = tensor.numel() * tensor.element_size()
        self.wanted, self.released = wanted, released
        self.changed = False
        """True if the tensor was changed in place before its copy was complete."""
        self.stays = False
        """True if the input stays on the device, because no other tier had room."""

    @uninterrupted  # Python drops what is raised in here, a Ctrl-C too
    def __del__(self) -> None:
        # any thread: a graph may die at any time, also on a thread that holds the lock, so this takes none.
        if self.memory.downloaded is DONE:  # no copy reads the tensor
            self.memory.tensor = None
        self.released.append(self.memory)


@dataclass(frozen=True, slots=True)
class Form:
    """Shape, strides and dtype of a dense tensor. Kernels may depend on strides, so bits would, too."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        """Returns the form of `tensor`."""
        return cls(tensor.size(), tensor.stride(), tensor.dtype)

    def empty(self, device: torch.device) -> torch.Tensor:
        """Returns an uninitialized tensor of this form."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a view of this form of the memory of a dense tensor with as many bytes."""
        return bytes_of(tensor).view(self.dtype).as_strided(self.size, self.stride)


class InputView(NamedTuple):
    """An input as a graph holds it: the memory, which inputs of other forms may share, and the form."""

    kept: KeptInput
    form: Form


def may_move(tensor: torch.Tensor, device: torch.device) -> bool:
    """Returns True for an activation that moving can free: dense, not tiny, computed, on the device.

    A leaf is somebody else's: a batch, or a parameter.
    """
    return (
        type(tensor) is torch.Tensor
        and tensor.grad_fn is not None
        and tensor.device == device
        and tensor.layout is torch.strided
        and not tensor.is_nested
        # The bytes of these two are not their values.
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.numel() * tensor.element_size() >= LEAST_NBYTES
        and is_dense(tensor.size(), tensor.stride())
    )


def is_dense(size: torch.Size, stride: tuple[int, ...]) -> bool:
    """Returns True if elements of this shape and these strides fill a range of memory, each once."""
    expected = 1
    for step, count in sorted((step, count) for step, count in zip(stride, size, strict=True) if count != 1):
        if step != expected:
            return False
        expected *= count
    return True


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a dense tensor, (nbytes,) uint8."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)


# -- staging -------------------------------------------------------------------------------------------
#
# Host memory and disk for inputs of checkpointed units: blocks, slots, and the reads and writes between them.
#
#     download ──► block ──write──► slot          a block whose bytes are in a slot may be given to another input
#     upload  ◄── block ◄──read─── slot
#
# The lock of `KeptInputs` guards every call. A call that needs a block waits for I/O alone. A Ctrl-C may end such a
# wait: the request is then still in flight, and whoever asks for its memory next waits for it again.


class Staging:
    """The blocks and slots of one engine's inputs."""

    def __init__(self, blocks: HostBlocks, slots: DiskSlots | None, timeline: Timeline = OFF) -> None:
        """Owns both from now on. `slots` is None without a drive."""
        self._blocks, self._slots, self._timeline = blocks, slots, timeline
        self._ending: list[InputMemory] = []
        """Memory of dropped inputs that a read or write still uses."""
        self.closed = False

    @property
    def arenas(self) -> list[HostArena]:
        """Host memory that is mapped for blocks."""
        return self._blocks.arenas

    # -- towards the disk ---------------------------------------------------------------------------

    def write_ahead(self, inputs: Sequence[KeptInput]) -> None:
        """Starts writes of the oldest inputs in host memory, so that the next inputs find free blocks.

        `inputs` are all inputs, oldest first.
        """
        if self._slots is None:
            return
        in_host = [
            kept_input
            for kept_input in inputs
            if kept_input.memory.block is not None and kept_input.memory.slot is None
        ]
        for count, kept_input in enumerate(in_host):
            room = self._blocks.room(kept_input.nbytes)
            # calling thread: the download of an input that leaves is still in flight, and must not block this thread.
            if kept_input.memory.tensor is not None or not checkpoints.writes(
                len(in_host) - count, room, kept_input.nbytes
            ):
                return
            self._write(kept_input)

    def take_block(self, nbytes: int, inputs: Sequence[KeptInput]) -> InputBlock | None:
        """Returns a block; the oldest of `inputs` goes to DISK if necessary. Returns None if there is no room.

        Raises `IoError` or `StoreError` if an input cannot be written.
        """
        # Each turn frees one block, until one is large enough, or all of a slab are free and the slab makes room.
        while (block := self._blocks.take(nbytes)) is None:
            if self._slots is None or not self._free_a_block(nbytes, inputs):
                return None
        return block

    def _free_a_block(self, nbytes: int, inputs: Sequence[KeptInput]) -> bool:
        """Frees the block of the oldest input, if possible a large one of an input that is not on its way back."""
        # I/O queue: ends the transfer. The block of a dropped input goes first, since nobody reads its bytes again.
        if self._ending:
            self.give_back(self._ending[0])
            self._ending.pop(0)
            return True

        def cost(kept_input: KeptInput) -> tuple[bool, bool]:
            memory = kept_input.memory
            assert memory.block is not None
            return memory.block.buffer.nbytes < nbytes, memory.arriving is not None or memory.reading is not None

        # A tensor that has not left the device yet is still being copied into its block.
        candidates = [
            kept_input
            for kept_input in inputs
            if kept_input.memory.block is not None and kept_input.memory.tensor is None
        ]
        if not candidates:
            return False
        # Smaller blocks make room too, when all of a slab are free. `min` returns the first of equals, the oldest.
        oldest = min(candidates, key=cost)
        memory = oldest.memory
        self._end_read(memory)
        if memory.slot is None:
            self._write(oldest)
        self._end_write(memory)
        memory.give_block()
        return True

    def _write(self, kept_input: KeptInput) -> None:
        memory = kept_input.memory
        assert self._slots is not None and memory.block is not None and memory.slot is None
        # calling thread: waits until the download has filled the block. Only then may the drive read it.
        memory.downloaded.wait()
        slot = self._slots.take(kept_input.nbytes)
        try:
            memory.writing = slot.write(memory.block.buffer.buffer[: kept_input.nbytes])
        except BaseException:
            slot.release()
            raise
        memory.slot = slot

    def _end_write(self, memory: InputMemory) -> None:
        """Waits for the write of an input. After an error the block alone has the bytes."""
        if memory.writing is None:
            return
        try:
            with self._timeline.span(Row.WAITS, "waits for the write of an input"):
                memory.writing.wait()
        except IoError:  # no other error: after a Ctrl-C the drive still reads the block
            memory.writing = None
            memory.give_slot()
            raise
        self.check_open()
        memory.writing = None

    # -- from the disk ------------------------------------------------------------------------------

    def read_ahead(self, kept_input: KeptInput) -> bool:
        """Starts the read of an input that is on DISK alone, if a block is free; returns False if none is."""
        if kept_input.memory.block is not None:
            return True
        # I/O queue: the read goes on while the backward computes. It takes a block only if one is free.
        block = self._blocks.take(kept_input.nbytes)
        if block is None:
            return False
        self._read(kept_input, block)
        return True

    def to_block(self, kept_input: KeptInput, inputs: Sequence[KeptInput]) -> InputBlock:
        """Returns the block of an input after the read of its bytes; for `inputs` see `take_block`.

        Raises `IoError` or `StoreError` if the drive fails or is full, and `BudgetError` if other engines have taken
        the memory through which the input went to DISK.
        """
        memory = kept_input.memory
        if memory.block is None:
            block = self.take_block(kept_input.nbytes, inputs)
            if block is None:
                raise BudgetError(
                    f"host memory has no room for {format_size(kept_input.nbytes)} of an input of a checkpointed unit, "
                    'which is on disk: raise "host_memory", or call destroy() on engines that are no longer used'
                )
            self._read(kept_input, block)
        self._end_read(memory)
        assert memory.block is not None
        return memory.block

    def _read(self, kept_input: KeptInput, block: InputBlock) -> None:
        memory = kept_input.memory
        assert memory.slot is not None, "an input is in a block or on DISK"
        try:
            # calling thread: waits until the copies of the block's former input have ended: the drive overwrites it.
            for event in block.after:
                event.wait()
            memory.reading = memory.slot.read(block.buffer.buffer[: kept_input.nbytes])
        except BaseException:
            block.release()
            raise
        memory.block = block

    def _end_read(self, memory: InputMemory) -> None:
        """Waits for the read of an input. After an error DISK alone has the bytes."""
        if memory.reading is None:
            return
        try:
            with self._timeline.span(Row.WAITS, "waits for the read of an input"):
                memory.reading.wait()
        except IoError:  # no other error: after a Ctrl-C the drive still writes to the block
            memory.reading = None
            memory.give_block()
            raise
        self.check_open()
        memory.reading = None

    # -- the end of an input ------------------------------------------------------------------------

    def recover(self, dropped: Sequence[InputMemory]) -> None:
        """Takes back the memory of dropped inputs, as soon as no read or write uses it."""
        # I/O queue: a transfer in flight still uses the block or the slot, so neither is free before its end.
        self._ending += dropped
        for memory in [done for done in self._ending if done.transfers_done]:
            self.give_back(memory)
            self._ending.remove(memory)  # afterwards: a Ctrl-C may end the call before

    def give_back(self, memory: InputMemory) -> None:
        """Waits for the transfer of a dropped input, whose error no longer matters, and frees block and slot."""
        memory.settle()
        self.check_open()
        memory.give_slot()
        memory.give_block()

    def close(self, memories: Sequence[InputMemory]) -> None:
        """Waits for the transfers of `memories` and of dropped inputs, and frees host memory and files. Idempotent."""
        # calling thread: set before the waits. A call that a signal's handler has interrupted in a wait looks at it
        # afterwards (`check_open`).
        self.closed = True
        for memory in (*memories, *self._ending):
            memory.settle()
        self._blocks.close()
        if self._slots is not None:
            self._slots.close()

    def check_open(self) -> None:
        """Raises `UsageError` after `close`, which the handler of a signal may call during a wait in here."""
        if self.closed:
            raise UsageError("this engine was destroyed, and with it the activations of its graphs")


# -- kept inputs ---------------------------------------------------------------------------------------


logger = logging.getLogger("offload")

_READ_AHEAD = 2
"""Inputs that are read from disk before the backward asks for them, in addition to the one that is uploaded."""
_MOST_SHARED = 64
"""Entries of dropped inputs, in the list and in the table of shared ones, that do no harm."""


class _RequestOrder:
    """The expected order of a backward's requests for inputs: newest first.

    Where micro-batches take turns at each unit, their backwards do so too, in the order of the micro-batches.
    """

    def __init__(self, schedule: PassSchedule) -> None:
        self._schedule = schedule
        self._last: float = math.inf
        """The micro-batch of the last input among those that take turns; inf if none did."""
        self._unit = self._count = 0

    def next(self) -> tuple[int, int, int]:
        """Returns the place of the next input; the backward asks for the smallest place first."""
        micro_batch, interleaves = self._schedule.micro_batch, self._schedule.interleaves
        if not interleaves or micro_batch < self._last:
            self._unit += 1  # the first micro-batch is at the next unit
        self._last = micro_batch if interleaves else math.inf
        self._count += 1
        return -self._unit, micro_batch, -self._count


class KeptInputs(UnitCheckpoints):
    """Computes blocks again, and moves the inputs of checkpointed modules between the tiers. `close` ends it."""

    moves_inputs = True

    def __init__(
        self,
        blocks: Sequence[str],
        config: Config,
        device: Device,
        *,
        staging: Staging,
        device_limit: Callable[[int], float],
        schedule: PassSchedule,
        timeline: Timeline = OFF,
        partitions: InputPartitions | None = None,
    ) -> None:
        """Keeps nothing yet.

        `device_limit` returns the bytes that inputs but the newest may take on the device, given the bytes that they
        take.
        """
        super().__init__(blocks, config, device, partitions)
        self._order = _RequestOrder(schedule)
        self._staging = staging
        self._device_limit, self._timeline = device_limit, timeline
        self._lock = threading.RLock()
        self._released: deque[InputMemory] = deque()
        self._kept: list[weakref.ref[KeptInput]] = []
        """The inputs in the order of the forward. Dropped ones go when they are many."""
        self._leaving: list[KeptInput] = []
        """Inputs whose tensor is held until compute is ordered after its download."""
        self._shared: dict[tuple[int, int], tuple[StorageWeakRef, weakref.ref[KeptInput]]] = {}
        """The newest input of each address and size, with its storage: an address may be used again."""
        self._peak: dict[Tier, int] = dict.fromkeys(Tier, 0)
        """Most bytes of inputs in each tier at a time."""
        self._reported_full = False

    @property
    def arenas(self) -> list[HostArena]:
        """Host memory of inputs; it counts in the budget of the process."""
        with self._lock:
            return self._staging.arenas

    def bytes_by_tier(self) -> dict[str, dict[str, int]]:
        """Returns the bytes of inputs in each tier; an input counts in the highest tier that contains it."""
        with self._lock:
            used = self._bytes_by_tier()
            return {tier.value: {"used": used[tier], "peak": self._peak[tier]} for tier in Tier}

    @uninterrupted
    def recover(self) -> None:
        with self._lock:
            if not self._staging.closed:
                self._let_go_of_leaving()
                self._recover()

    # -- forward ------------------------------------------------------------------------------------

    @uninterrupted
    def keep(self, tensor: torch.Tensor) -> InputView | None:
        """Keeps an input of a checkpointed unit until the graph drops the result; older inputs may leave the device.

        An activation must not change before the backward, as torch demands. Returns None for a tensor that is not
        moved, such as a leaf, which somebody else holds. Raises `IoError` or `StoreError` if an earlier input cannot be
        written, and `UsageError` if the engine was closed.
        """
        if not may_move(tensor, self._device.torch):
            return None
        with self._lock, without_modes():
            self._staging.check_open()
            self._recover()
            self._let_go_of_leaving()
            kept_input = self._same(tensor)
            if kept_input is None:
                kept_input = KeptInput(tensor, self._order.next(), self._released)
                # Weak: graphs alone hold the object, so its memory is free again when the last of them ends.
                self._kept.append(weakref.ref(kept_input))
                if len(self._shared) >= _MOST_SHARED:
                    self._shared = {place: entry for place, entry in self._shared.items() if not entry[0].expired()}
                self._shared[_place(tensor)] = StorageWeakRef(tensor.untyped_storage()), self._kept[-1]
            self._make_room()
            self._count()
            return InputView(kept_input, Form.of(tensor))

    def _same(self, tensor: torch.Tensor) -> KeptInput | None:
        """Returns the input that was kept of the same memory, if it is unchanged."""
        entry = self._shared.get(_place(tensor))
        if entry is None or entry[0].expired():
            return None
        kept_input = entry[1]()
        if kept_input is None or kept_input.changed or kept_input.version != tensor._version:
            return None
        return kept_input

    def _make_room(self) -> None:
        """Moves the oldest inputs off the device as far as the limit requires, and writes ahead."""
        here = [
            kept_input for kept_input in self._alive() if kept_input.memory.tensor is not None and not kept_input.stays
        ]
        sizes = [kept_input.nbytes for kept_input in here]
        for kept_input in here[: checkpoints.leaves_device(sizes, self._device_limit(sum(sizes)))]:
            self._leave_device(kept_input)
        self._staging.write_ahead(self._alive())

    def _leave_device(self, kept_input: KeptInput) -> None:
        """Starts the copy of an input to host memory, if there is room."""
        memory, tensor = kept_input.memory, kept_input.memory.tensor
        assert tensor is not None and memory.block is None
        # The model has changed it in place, as torch forbids: the backward raises an error, and no bytes move.
        if tensor._version != kept_input.version:
            kept_input.changed = kept_input.stays = True
            return
        block = self._staging.take_block(kept_input.nbytes, self._alive())
        if block is None:
            kept_input.stays = True
            if not self._reported_full:
                self._reported_full = True
                logger.warning(
                    "inputs of checkpointed units stay on the device: host memory has no room for one more of %s, and "
                    'there is no drive for it. Raise "activation_memory" or "host_memory" in the "offload" block, or '
                    'set an "nvme_path" there',
                    format_size(kept_input.nbytes),
                )
            return
        with self._timeline.span(Row.DOWNLOADS, "input of a unit", kept_input.nbytes):
            # download stream: waits for the compute of the tensor, and for the copies of the block's former input.
            ready = (*block.after, self._device.record_event())
            memory.downloaded = self._device.download(block.bytes(kept_input.nbytes), bytes_of(tensor), ready)
        # download stream: the block's next owner, and the drive, wait for this copy.
        block.after = (memory.downloaded,)
        memory.block = block
        self._leaving.append(kept_input)
        if self._device.host_addressable:  # the copy is done
            self._let_go_of_leaving()

    def _let_go_of_leaving(self) -> None:
        """Drops tensors after ordering compute after their copies; see [Note: a tensor that is being copied]."""
        while self._leaving:
            kept_input = self._leaving.pop()
            tensor = kept_input.memory.tensor
            assert tensor is not None
            # compute stream: waits for the copy, so later compute in this tensor's memory comes after it.
            self._device.wait_event(kept_input.memory.downloaded)
            kept_input.changed = kept_input.changed or tensor._version != kept_input.version
            kept_input.memory.tensor = None

    # -- backward -----------------------------------------------------------------------------------

    @uninterrupted
    def fetch(self, view: InputView) -> torch.Tensor:
        """Returns an input on the device, and starts to bring those that the backward needs next.

        Raises torch's `RuntimeError` if the input was changed in place after the forward, `IoError` or `StoreError` if
        the drive fails or is full, `BudgetError` if other engines have taken the host memory that the input needs, and
        `UsageError` if the engine was closed.
        """
        kept_input = view.kept
        with self._lock, without_modes():
            self._staging.check_open()
            self._recover()
            self._let_go_of_leaving()
            memory, tensor = kept_input.memory, kept_input.memory.tensor
            if kept_input.changed or (tensor is not None and tensor._version != kept_input.version):
                raise RuntimeError(
                    f"an input of shape {list(kept_input.form.size)} of a checkpointed unit was changed in place "
                    "since the unit received it, so the unit cannot be computed again: use a function that "
                    "returns a new tensor"
                )
            if tensor is None:
                if memory.arriving is None:
                    self._upload(kept_input)
                # autograd thread: a graph that is kept (`retain_graph`) asks again, and finds the bytes in the block.
                tensor, memory.arriving = memory.arriving, None
                # compute stream: waits for the upload; on a GPU this thread continues.
                self._device.wait_event(memory.uploaded)
            assert tensor is not None
            self._fetch_ahead(kept_input)
            self._count()
            return tensor if view.form == kept_input.form else view.form.view(tensor)

    def _fetch_ahead(self, kept_input: KeptInput) -> None:
        """Starts the upload of the next input after `kept_input` and the reads of those after it if blocks are free."""
        later = (later_input for later_input in self._alive() if later_input.wanted > kept_input.wanted)
        for distance, next_input in enumerate(
            heapq.nsmallest(1 + _READ_AHEAD, later, key=lambda next_input: next_input.wanted)
        ):
            memory = next_input.memory
            if memory.tensor is not None or memory.arriving is not None or next_input.changed:
                continue
            if not self._staging.read_ahead(next_input):
                return
            # On a CPU the copy would take the time of this thread, and memory, one unit too early.
            ready = memory.reading is None or memory.reading.done()
            if distance == 0 and ready and not self._device.host_addressable:
                # Without memory now, the upload waits until the backward asks, which has freed some by then.
                with contextlib.suppress(torch.OutOfMemoryError):
                    self._upload(next_input)

    def _upload(self, kept_input: KeptInput) -> None:
        memory, block = kept_input.memory, self._staging.to_block(kept_input, self._alive())
        tensor = kept_input.form.empty(self._device.torch)
        # upload stream: waits for the compute queued so far, which may still use the tensor's memory.
        ready = (memory.downloaded, self._device.record_event())
        with self._timeline.span(Row.UPLOADS, "input of a unit", kept_input.nbytes):
            memory.uploaded = self._device.upload(bytes_of(tensor), block.bytes(kept_input.nbytes), ready)
        # upload stream: it reads the block, so nobody may overwrite it before.
        block.after = (memory.downloaded, memory.uploaded)
        memory.arriving = tensor

    # -- under the lock -----------------------------------------------------------------------------

    def _alive(self) -> list[KeptInput]:
        """Returns the inputs that a graph holds, oldest first."""
        return [kept_input for ref in self._kept if (kept_input := ref()) is not None]

    def _bytes_by_tier(self) -> dict[Tier, int]:
        nbytes = dict.fromkeys(Tier, 0)
        for kept_input in self._alive():
            nbytes[kept_input.memory.tier] += kept_input.nbytes
        return nbytes

    def _count(self) -> None:
        self._peak = {tier: max(self._peak[tier], nbytes) for tier, nbytes in self._bytes_by_tier().items()}

    def _recover(self) -> None:
        """Takes back the memory of inputs that graphs have dropped."""
        while self._kept and self._kept[-1]() is None:
            self._kept.pop()
        alive = self._alive()
        # If the next forward always begins before the backward of the last, the end is never a dropped one.
        if len(self._kept) > 2 * len(alive) + _MOST_SHARED:
            self._kept = [weakref.ref(kept_input) for kept_input in alive]
        dropped = []
        # any thread: a graph that dies appends meanwhile, without the lock. Both calls of the deque are atomic.
        while self._released:
            memory = self._released.popleft()
            # compute stream: waits for the copies. torch may give the memory of these tensors to other compute at once.
            for tensor, event in ((memory.tensor, memory.downloaded), (memory.arriving, memory.uploaded)):
                if tensor is not None:
                    self._device.wait_event(event)
            memory.tensor = memory.arriving = None
            dropped.append(memory)
        self._staging.recover(dropped)

    @uninterrupted
    def close(self) -> None:
        """Waits for transfers in flight and frees all memory of inputs. Idempotent. Graphs cannot be run afterwards."""
        with self._lock:
            self._let_go_of_leaving()
            memories = [*(kept_input.memory for kept_input in self._alive()), *self._released]
            # calling thread: waits for the drives and the device, neither of which needs this lock.
            self._staging.close(memories)
            # A graph that outlives the engine keeps no memory. The device is idle, if it has copied anything.
            for memory in memories:
                memory.tensor = memory.block = memory.slot = memory.arriving = None
            self._released.clear()


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()
