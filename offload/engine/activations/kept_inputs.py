"""The inputs of checkpointed units between forward and backward: on the device, in host memory, or on disk.

    forward     keep ──► DEVICE ──download──► HOST ──write──► DISK      oldest first, one unit behind the forward
    backward    fetch ◄── DEVICE ◄──upload─── HOST ◄──read─── DISK      newest first, one unit ahead of the backward

An input is kept as long as autograd keeps it: the graph holds a `KeptInput`, whose memory is given back when the graph
drops the object. So an exception, a Ctrl-C or a graph that is never run backward gives everything back by itself. An
input that autograd asks for twice (`retain_graph`) is copied to the device twice.

Inputs that share memory and form, such as an encoder's output for all layers of a decoder, are kept once.

[Note: a tensor that is being copied] The download reads memory of a tensor that the forward may no longer need. The
tensor is held until compute is ordered after the copy, so torch's allocator cannot give the memory to other compute
before. A change in place meanwhile might be copied in part: versions are compared, and the backward raises the error
that torch raises without tiers.

Threads. The thread that runs the model calls `keep`, autograd's threads call `fetch`; one lock guards both. A graph may
die on any thread and within any call, also one that holds the lock: `KeptInput.__del__` only appends to a deque.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload.engine.activations import policy
from offload.engine.activations.disk_slots import DiskSlots
from offload.engine.activations.host_blocks import Block, HostBlocks
from offload.engine.activations.kept_input import Form, KeptInput, Memory, bytes_of, may_move
from offload.errors import UsageError
from offload.interrupts import uninterrupted
from offload.sizes import format_size
from offload.states import Tier
from offload.swapper.memory.device import Device
from offload.timeline import OFF, Row, Timeline
from offload.torch_internals import without_modes

logger = logging.getLogger("offload")

_READ_AHEAD = 2
"""Inputs that are read from disk before the backward asks for them, beside the one that is uploaded."""
_MOST_SHARED = 64
"""Entries of the table of shared inputs at which expired ones are removed."""


class KeptInputs:
    """Moves the inputs of one engine's checkpointed units between the tiers. `close` ends it."""

    def __init__(
        self,
        device: Device,
        blocks: HostBlocks,
        slots: DiskSlots | None,
        device_limit: Callable[[int], float],
        timeline: Timeline = OFF,
    ) -> None:
        """Keeps nothing yet.

        Args:
            device: copies between device and host memory.
            blocks: host memory.
            slots: room on the drives; None without a drive.
            device_limit: bytes that inputs may take on the device beside the newest, given the bytes that they take.
            timeline: records copies and waits.
        """
        self._device, self._blocks, self._slots = device, blocks, slots
        self._device_limit, self._timeline = device_limit, timeline
        self._lock = threading.Lock()
        self._released: deque[Memory] = deque()
        self._ending: list[Memory] = []
        """Memory of dropped inputs that a read or write still uses."""
        self._kept: list[weakref.ref[KeptInput]] = []
        """The inputs in the order of the forward. Dropped ones at the end are removed, so a position is an index."""
        self._leaving: list[KeptInput] = []
        """Inputs whose tensor is held until compute is ordered after its download."""
        self._shared: dict[tuple[int, int], tuple[StorageWeakRef, weakref.ref[KeptInput]]] = {}
        """The newest input at each address and offset, with its storage: an address may be used again."""
        self.peak: dict[Tier, int] = dict.fromkeys(Tier, 0)
        """Most bytes of inputs in each tier at a time."""
        self._reported_full = self._closed = False

    def bytes_by_tier(self) -> dict[Tier, int]:
        """Returns the bytes of the inputs that are kept now, each counted in the highest tier that contains it."""
        found = dict.fromkeys(Tier, 0)
        with self._lock:
            for kept in self._alive():
                found[kept.memory.tier] += kept.nbytes
        return found

    # -- forward ------------------------------------------------------------------------------------

    @uninterrupted
    def keep(self, tensor: torch.Tensor) -> KeptInput | None:
        """Keeps an input of a checkpointed unit until the graph drops the result; older inputs may leave the device.

        Args:
            tensor: an activation on the device. It must not change before the backward, as torch demands.

        Returns:
            The object for the graph; None for a tensor that is not moved, such as a leaf, which somebody else holds.

        Raises:
            IoError: if an earlier input could not be written.
            StoreError: if a drive has no room for the file.
        """
        if not may_move(tensor, self._device.torch):
            return None
        with self._lock, without_modes():
            self._recover()
            self._let_go_of_leaving()
            kept = self._same(tensor)
            if kept is None:
                kept = KeptInput(tensor, len(self._kept), self._released)
                self._kept.append(weakref.ref(kept))
                self._share(tensor, kept)
            self._make_room()
            self._count()
            return kept

    def _same(self, tensor: torch.Tensor) -> KeptInput | None:
        """Returns the input that was kept of the same memory in the same form, if it is unchanged."""
        entry = self._shared.get(_place(tensor))
        if entry is None or entry[0].expired():
            return None
        kept = entry[1]()
        if kept is None or kept.changed or kept.version != tensor._version or kept.form != Form.of(tensor):
            return None
        return kept

    def _share(self, tensor: torch.Tensor, kept: KeptInput) -> None:
        """Notes that `kept` is the input with the memory of `tensor`."""
        if len(self._shared) >= _MOST_SHARED:
            self._shared = {place: entry for place, entry in self._shared.items() if not entry[0].expired()}
        self._shared[_place(tensor)] = StorageWeakRef(tensor.untyped_storage()), weakref.ref(kept)

    def _make_room(self) -> None:
        """Moves the oldest inputs off the device as far as the limit requires, and writes ahead."""
        here = [each for each in self._alive() if each.memory.tensor is not None and not each.stays]
        sizes = [each.nbytes for each in here]
        for kept in here[: policy.leaves_device(sizes, self._device_limit(sum(sizes)))]:
            self._leave_device(kept)
        if self._slots is not None:
            self._write_ahead()

    def _leave_device(self, kept: KeptInput) -> None:
        """Starts the copy of an input to host memory, if there is room."""
        memory, tensor = kept.memory, kept.memory.tensor
        assert tensor is not None
        if memory.block is not None:  # in a block already, and fetched from there before
            return
        if tensor._version != kept.version:
            kept.changed = kept.stays = True
            return
        block = self._block(kept.nbytes)
        if block is None:
            kept.stays = True
            self._report_full(kept.nbytes)
            return
        with self._timeline.span(Row.DOWNLOADS, "input of a unit", kept.nbytes):
            ready = (*block.after, self._device.record_event())
            memory.downloaded = self._device.download(block.bytes(kept.nbytes), bytes_of(tensor), ready)
        block.after = (memory.downloaded,)
        memory.block = block
        self._leaving.append(kept)
        if self._device.host_addressable:  # the copy is done
            self._let_go_of_leaving()

    def _let_go_of_leaving(self) -> None:
        """Drops tensors after ordering compute after their copies; see [Note: a tensor that is being copied]."""
        while self._leaving:
            kept = self._leaving.pop()
            tensor = kept.memory.tensor
            assert tensor is not None
            self._device.wait_event(kept.memory.downloaded)
            kept.changed = kept.changed or tensor._version != kept.version
            kept.memory.tensor = None

    def _write_ahead(self) -> None:
        """Starts writes of the oldest inputs in host memory, so that the next inputs find free blocks."""
        in_host = [each for each in self._alive() if each.memory.block is not None and each.memory.slot is None]
        for count, kept in enumerate(in_host):
            left = len(in_host) - count
            # The tensor of one that is leaving still has a download in flight, for which no thread shall wait.
            if kept.memory.tensor is not None or not policy.writes(left, self._blocks.room(kept.nbytes), kept.nbytes):
                return
            self._write(kept)

    def _write(self, kept: KeptInput) -> None:
        """Starts the write of an input from its block."""
        memory = kept.memory
        assert self._slots is not None and memory.block is not None and memory.slot is None
        memory.downloaded.wait()  # the drive reads what the device has written
        memory.slot = self._slots.take(kept.nbytes)
        memory.writing = memory.slot.write(memory.block.buffer.buffer[: kept.nbytes])

    def _end_write(self, memory: Memory) -> None:
        """Waits for the write of an input. After an error the block alone has the bytes."""
        if memory.writing is None:
            return
        writing, memory.writing = memory.writing, None
        try:
            with self._timeline.span(Row.WAITS, "waits for the write of an input"):
                writing.wait()
        except BaseException:
            slot, memory.slot = memory.slot, None
            if slot is not None and self._slots is not None:
                self._slots.give(slot)
            raise

    def _block(self, nbytes: int) -> Block | None:
        """Returns a block of host memory, for which the oldest input goes to DISK if necessary; None without room."""
        while (block := self._blocks.take(nbytes)) is None:
            if self._slots is None or not self._free_a_block(nbytes):
                return None
        return block

    def _free_a_block(self, nbytes: int) -> bool:
        """Frees the block of the oldest input, if possible of one that is not on its way to the device."""
        if self._ending:
            self._give_back(self._ending.pop(0))
            return True
        found = [each for each in self._alive() if _has_block(each.memory, nbytes)]
        if not found:
            return False
        # Sorting is stable: the order of the forward decides between equals.
        kept = min(found, key=lambda each: each.memory.arriving is not None or each.memory.reading is not None)
        memory = kept.memory
        self._end_read(memory)
        if memory.slot is None:
            self._write(kept)
        self._end_write(memory)
        block, memory.block = memory.block, None
        assert block is not None
        self._blocks.give(block)
        return True

    def _report_full(self, nbytes: int) -> None:
        """Reports once that inputs stay on the device."""
        if not self._reported_full:
            self._reported_full = True
            logger.warning(
                "inputs of checkpointed units stay on the device: host memory has no room for one more of %s, and there "
                'is no drive for it. Raise "activation_memory" or "host_memory" in the "offload" block, or set an '
                '"nvme_path" there',
                format_size(nbytes),
            )

    # -- backward -----------------------------------------------------------------------------------

    @uninterrupted
    def fetch(self, kept: KeptInput) -> torch.Tensor:
        """Returns an input on the device, and starts to bring those that the backward needs next.

        Raises:
            RuntimeError: if the input was changed in place after the forward, as torch raises it.
            IoError: if the input could not be read.
            UsageError: if the engine was closed.
        """
        with self._lock, without_modes():
            if self._closed:
                raise UsageError("this engine was destroyed, and with it the activations of its graphs")
            self._recover()
            self._let_go_of_leaving()
            memory, tensor = kept.memory, kept.memory.tensor
            if kept.changed or (tensor is not None and tensor._version != kept.version):
                raise RuntimeError(
                    f"an input of shape {list(kept.form.size)} of a checkpointed unit was changed in place after the "
                    "unit had run, so the unit cannot be computed again: use a function that returns a new tensor"
                )
            if tensor is None:
                if memory.arriving is None:
                    self._upload(kept)
                tensor, memory.arriving = memory.arriving, None
                self._device.wait_event(memory.uploaded)
            assert tensor is not None
            self._fetch_ahead(kept)
            self._count()
            return tensor

    def _fetch_ahead(self, kept: KeptInput) -> None:
        """Starts the upload of the input before `kept` and the reads of those before, as far as blocks are free."""
        older = [each for ref in reversed(self._kept[: kept.position]) if (each := ref()) is not None]
        for distance, each in enumerate(older[: 1 + _READ_AHEAD]):
            memory = each.memory
            if memory.tensor is not None or memory.arriving is not None or each.changed:
                continue
            if memory.block is None and not self._read(each, self._blocks.take(each.nbytes)):
                return
            # On a CPU the copy would take the time of this thread, and memory, one unit too early.
            ready = memory.reading is None or memory.reading.done()
            if distance == 0 and ready and not self._device.host_addressable:
                self._upload(each)

    def _read(self, kept: KeptInput, block: Block | None) -> bool:
        """Starts the read of an input into `block`; returns False without a block."""
        memory = kept.memory
        if block is None:
            return False
        assert memory.slot is not None, "an input is in a block or on disk"
        for event in block.after:  # the drive overwrites what the device may still read
            event.wait()
        self._end_write(memory)
        memory.block = block
        memory.reading = memory.slot.read(block.buffer.buffer[: kept.nbytes])
        return True

    def _end_read(self, memory: Memory) -> None:
        """Waits for the read of an input. After an error DISK alone has the bytes."""
        if memory.reading is None:
            return
        reading, memory.reading = memory.reading, None
        try:
            with self._timeline.span(Row.WAITS, "waits for the read of an input"):
                reading.wait()
        except BaseException:
            block, memory.block = memory.block, None
            if block is not None:
                self._blocks.give(block)
            raise

    def _upload(self, kept: KeptInput) -> None:
        """Starts the copy of an input to the device, after its read."""
        memory = kept.memory
        if memory.block is None:
            found = self._read(kept, self._block(kept.nbytes))
            assert found, "inputs that are not on their way to the device give their blocks"
        self._end_read(memory)
        block = memory.block
        assert block is not None
        tensor = kept.form.empty(self._device.torch)
        # The tensor's memory may belong to compute that was queued before: the upload waits for it.
        ready = (memory.downloaded, self._device.record_event())
        with self._timeline.span(Row.UPLOADS, "input of a unit", kept.nbytes):
            memory.uploaded = self._device.upload(bytes_of(tensor), block.bytes(kept.nbytes), ready)
        block.after = (memory.downloaded, memory.uploaded)
        memory.arriving = tensor

    # -- under the lock -----------------------------------------------------------------------------

    def _alive(self) -> Iterator[KeptInput]:
        """Yields the inputs that a graph holds, oldest first."""
        for ref in self._kept:
            kept = ref()
            if kept is not None:
                yield kept

    def _count(self) -> None:
        """Updates the peaks."""
        now = dict.fromkeys(Tier, 0)
        for kept in self._alive():
            now[kept.memory.tier] += kept.nbytes
        self.peak = {tier: max(self.peak[tier], nbytes) for tier, nbytes in now.items()}

    def _recover(self) -> None:
        """Takes back the memory of inputs that graphs have dropped, but for that which a transfer still uses."""
        while self._kept and self._kept[-1]() is None:
            self._kept.pop()
        while self._released:
            self._ending.append(self._released.popleft())
        ending, self._ending = self._ending, []
        for memory in ending:
            if memory.transfers_done:
                self._give_back(memory)
            else:
                self._ending.append(memory)

    def _give_back(self, memory: Memory) -> None:
        """Waits for the transfer of a dropped input, and frees its memory. An error no longer matters."""
        memory.settle()
        # Torch may give the memory of these tensors to other compute at once, which must come after the copies.
        for tensor, event in ((memory.tensor, memory.downloaded), (memory.arriving, memory.uploaded)):
            if tensor is not None:
                self._device.wait_event(event)
        memory.tensor = memory.arriving = None
        if memory.slot is not None and self._slots is not None:
            self._slots.give(memory.slot)
        if memory.block is not None:
            self._blocks.give(memory.block)
        memory.slot = memory.block = None

    def close(self) -> None:
        """Waits for transfers in flight and frees host memory and files. Idempotent; a graph must not be run after."""
        with self._lock:
            self._closed = True
            self._let_go_of_leaving()
            for memory in [*(kept.memory for kept in self._alive()), *self._ending, *self._released]:
                memory.settle()
            self._blocks.close()
            if self._slots is not None:
                self._slots.close()


def _has_block(memory: Memory, nbytes: int) -> bool:
    """Returns True if an input has a block of `nbytes` that it could give: its tensor has left the device."""
    return memory.block is not None and memory.tensor is None and memory.block.buffer.nbytes >= nbytes


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the address of a tensor's storage, and the tensor's offset in elements."""
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())
