"""The inputs of checkpointed units between forward and backward: on the device, in host memory, or on disk.

    forward     keep ──► DEVICE ──download──► HOST ──write──► DISK      oldest first, one unit behind the forward
    backward    fetch ◄── DEVICE ◄──upload─── HOST ◄──read─── DISK      newest first, one unit ahead of the backward

An input is kept as long as autograd keeps it: the graph holds a `KeptInput`, whose memory is given back when the graph
drops the object. So an exception, a Ctrl-C or a graph that is never run backward gives everything back by itself. An
input that autograd asks for twice (`retain_graph`) is copied to the device twice.

Inputs that are the same memory, such as an encoder's output for all layers of a decoder, or a view of all of it, are
kept once.

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
import threading
import weakref
from collections import deque
from collections.abc import Callable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload.engine.activations import policy
from offload.engine.activations.kept_input import Form, InputView, KeptInput, Memory, bytes_of, may_move
from offload.engine.activations.staging import Staging
from offload.interrupts import uninterrupted
from offload.sizes import format_size
from offload.states import Tier
from offload.swapper.memory.device import Device
from offload.swapper.memory.host_arena import HostArena
from offload.timeline import OFF, Row, Timeline
from offload.torch_internals import without_modes

logger = logging.getLogger("offload")

_READ_AHEAD = 2
"""Inputs that are read from disk before the backward asks for them, beside the one that is uploaded."""
_MOST_SHARED = 64
"""Entries of dropped inputs, in the list and in the table of shared ones, that do no harm."""


class _Order:
    """The order in which a backward is expected to ask for inputs: newest first.

    Where micro-batches take turns at each unit, their backwards do so too, in the order of the micro-batches.
    """

    def __init__(self, turn: Callable[[], int | None]) -> None:
        self._turn = turn
        self._last: int | None = None
        self._unit = self._count = 0

    def next(self) -> tuple[int, int, int]:
        """Returns the place of the next input; the backward asks for the smallest place first."""
        turn = self._turn()
        if turn is None or self._last is None or turn < self._last:
            self._unit += 1  # the first micro-batch is at the next unit
        self._last = turn
        self._count += 1
        return -self._unit, turn or 0, -self._count


class KeptInputs:
    """Moves the inputs of one engine's checkpointed units between the tiers. `close` ends it."""

    def __init__(
        self,
        device: Device,
        staging: Staging,
        device_limit: Callable[[int], float],
        turn: Callable[[], int | None] = lambda: None,
        timeline: Timeline = OFF,
    ) -> None:
        """Keeps nothing yet.

        Args:
            device: copies between device and host memory.
            staging: host memory and disk.
            device_limit: bytes that inputs may take on the device beside the newest, given the bytes that they take.
            turn: returns the number of the micro-batch that runs where several take turns at each unit, else None.
            timeline: records copies and waits.
        """
        self._order = _Order(turn)
        self._device, self._staging = device, staging
        self._device_limit, self._timeline = device_limit, timeline
        self._lock = threading.RLock()
        self._released: deque[Memory] = deque()
        self._kept: list[weakref.ref[KeptInput]] = []
        """The inputs in the order of the forward; a position is an index. Dropped ones go when they are many."""
        self._leaving: list[KeptInput] = []
        """Inputs whose tensor is held until compute is ordered after its download."""
        self._shared: dict[tuple[int, int], tuple[StorageWeakRef, weakref.ref[KeptInput]]] = {}
        """The newest input of each address and size, with its storage: an address may be used again."""
        self.peak: dict[Tier, int] = dict.fromkeys(Tier, 0)
        """Most bytes of inputs in each tier at a time."""
        self._reported_full = False

    @property
    def arenas(self) -> list[HostArena]:
        """Host memory that is mapped for inputs; it counts in the budget of the process."""
        with self._lock:
            return self._staging.arenas

    def bytes_by_tier(self) -> dict[Tier, int]:
        """Returns the bytes of the inputs that are kept now, each counted in the highest tier that contains it."""
        found = dict.fromkeys(Tier, 0)
        with self._lock:
            for kept in self._alive():
                found[kept.memory.tier] += kept.nbytes
        return found

    @uninterrupted
    def recover(self) -> None:
        """Takes back the memory of inputs that an aborted forward or backward has left."""
        with self._lock:
            if not self._staging.closed:
                self._let_go_of_leaving()
                self._recover()

    # -- forward ------------------------------------------------------------------------------------

    @uninterrupted
    def keep(self, tensor: torch.Tensor) -> InputView | None:
        """Keeps an input of a checkpointed unit until the graph drops the result; older inputs may leave the device.

        Args:
            tensor: an activation on the device. It must not change before the backward, as torch demands.

        Returns:
            The object for the graph; None for a tensor that is not moved, such as a leaf, which somebody else holds.

        Raises:
            IoError: if an earlier input could not be written.
            StoreError: if a drive has no room for the file.
            UsageError: if the engine was closed.
        """
        if not may_move(tensor, self._device.torch):
            return None
        with self._lock, without_modes():
            self._staging.check_open()
            self._recover()
            self._let_go_of_leaving()
            kept = self._same(tensor)
            if kept is None:
                kept = KeptInput(tensor, len(self._kept), self._order.next(), self._released)
                self._kept.append(weakref.ref(kept))
                self._share(tensor, kept)
            self._make_room()
            self._count()
            return InputView(kept, Form.of(tensor))

    def _same(self, tensor: torch.Tensor) -> KeptInput | None:
        """Returns the input that was kept of the same memory, if it is unchanged."""
        entry = self._shared.get(_place(tensor))
        if entry is None or entry[0].expired():
            return None
        kept = entry[1]()
        if kept is None or kept.changed or kept.version != tensor._version:
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
        self._staging.write_ahead(self._alive())

    def _leave_device(self, kept: KeptInput) -> None:
        """Starts the copy of an input to host memory, if there is room."""
        memory, tensor = kept.memory, kept.memory.tensor
        assert tensor is not None and memory.block is None
        if tensor._version != kept.version:
            kept.changed = kept.stays = True
            return
        block = self._staging.take_block(kept.nbytes, self._alive())
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

    def _report_full(self, nbytes: int) -> None:
        """Reports once that inputs stay on the device."""
        if not self._reported_full:
            self._reported_full = True
            logger.warning(
                "inputs of checkpointed units stay on the device: host memory has no room for one more of %s, and "
                'there is no drive for it. Raise "activation_memory" or "host_memory" in the "offload" block, or set '
                'an "nvme_path" there',
                format_size(nbytes),
            )

    # -- backward -----------------------------------------------------------------------------------

    @uninterrupted
    def fetch(self, view: InputView) -> torch.Tensor:
        """Returns an input on the device, and starts to bring those that the backward needs next.

        Raises:
            RuntimeError: if the input was changed in place after the forward, as torch raises it.
            IoError: if the input could not be read, or another one not be written to make room.
            StoreError: if a drive has no room for the file.
            BudgetError: if other engines have taken the host memory that the input needs.
            UsageError: if the engine was closed.
        """
        kept = view.kept
        with self._lock, without_modes():
            self._staging.check_open()
            self._recover()
            self._let_go_of_leaving()
            memory, tensor = kept.memory, kept.memory.tensor
            if kept.changed or (tensor is not None and tensor._version != kept.version):
                raise RuntimeError(
                    f"an input of shape {list(kept.form.size)} of a checkpointed unit was changed in place since the "
                    "unit received it, so the unit cannot be computed again: use a function that returns a new tensor"
                )
            if tensor is None:
                if memory.arriving is None:
                    self._upload(kept)
                tensor, memory.arriving = memory.arriving, None
                self._device.wait_event(memory.uploaded)
            assert tensor is not None
            self._fetch_ahead(kept)
            self._count()
            return tensor if view.form == kept.form else view.form.view(tensor)

    def _fetch_ahead(self, kept: KeptInput) -> None:
        """Starts the upload of the input that follows `kept` and the reads of the next, as far as blocks are free."""
        later = (each for each in self._alive() if each.wanted > kept.wanted)
        for distance, each in enumerate(heapq.nsmallest(1 + _READ_AHEAD, later, key=lambda each: each.wanted)):
            memory = each.memory
            if memory.tensor is not None or memory.arriving is not None or each.changed:
                continue
            if not self._staging.read_ahead(each):
                return
            # On a CPU the copy would take the time of this thread, and memory, one unit too early.
            ready = memory.reading is None or memory.reading.done()
            if distance == 0 and ready and not self._device.host_addressable:
                # Without memory now, the upload waits until the backward asks, which has freed some by then.
                with contextlib.suppress(torch.OutOfMemoryError):
                    self._upload(each)

    def _upload(self, kept: KeptInput) -> None:
        """Starts the copy of an input to the device, after its read."""
        memory, block = kept.memory, self._staging.to_block(kept, self._alive())
        tensor = kept.form.empty(self._device.torch)
        # The tensor's memory may belong to compute that was queued before: the upload waits for it.
        ready = (memory.downloaded, self._device.record_event())
        with self._timeline.span(Row.UPLOADS, "input of a unit", kept.nbytes):
            memory.uploaded = self._device.upload(bytes_of(tensor), block.bytes(kept.nbytes), ready)
        block.after = (memory.downloaded, memory.uploaded)
        memory.arriving = tensor

    # -- under the lock -----------------------------------------------------------------------------

    def _alive(self) -> list[KeptInput]:
        """Returns the inputs that a graph holds, oldest first."""
        return [kept for ref in self._kept if (kept := ref()) is not None]

    def _count(self) -> None:
        """Updates the peaks."""
        now = dict.fromkeys(Tier, 0)
        for kept in self._alive():
            now[kept.memory.tier] += kept.nbytes
        self.peak = {tier: max(self.peak[tier], nbytes) for tier, nbytes in now.items()}

    def _recover(self) -> None:
        """Takes back the memory of inputs that graphs have dropped."""
        while self._kept and self._kept[-1]() is None:
            self._kept.pop()
        alive = self._alive()
        # If the next forward always begins before the backward of the last, the end is never a dropped one.
        if len(self._kept) > 2 * len(alive) + _MOST_SHARED:
            for position, kept in enumerate(alive):
                kept.position = position
            self._kept = [weakref.ref(kept) for kept in alive]
        dropped = []
        while self._released:
            memory = self._released.popleft()
            # Torch may give the memory of these tensors to other compute at once, which must come after the copies.
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
            memories = [*(kept.memory for kept in self._alive()), *self._released]
            self._staging.close(memories)
            # A graph that outlives the engine keeps no memory. The device is idle, if it has copied anything.
            for memory in memories:
                memory.tensor = memory.block = memory.slot = memory.arriving = None
            self._released.clear()


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the address and the bytes of a dense tensor."""
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()
