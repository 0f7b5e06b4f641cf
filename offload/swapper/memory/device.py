"""The compute device, with all of its streams, events and copies.

Four streams run concurrently. *compute* is the stream to which the calling thread submits work through torch. *upload*
copies weights to the device, *download* copies gradients and updated states from the device, and *update* runs the
optimizer's kernels for states on the device. Work on one stream is ordered. Work on two streams is ordered by events
alone:

    upload     waits for the last compute that reads the memory to be overwritten (`after`)
    compute    waits for the upload of the bytes that it reads (`wait_event`)
    download   waits for the compute that produces the bytes that it reads (`after`)
    update     waits for nothing: the submitting thread knows that its operands are ready
    host       waits for a copy before it reads or reuses host memory, and for an update (`Event.wait`)

The caller that starts a copy keeps source and destination unchanged until the copy's event is done. On a CPU device
the same calls copy at once, and compute waits by blocking the thread that is about to start it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from offload.aio import aligned_empty, prefer_node, release_pages_at
from offload.errors import ConfigError
from offload.notices import Remark
from offload.sizes import GIB, MIB, PAGE, align_up, count_of, format_size
from offload.swapper.memory.limits import free_host_memory

# -- host side -----------------------------------------------------------------------------------------
#
# The host's side of one kind of accelerator: pinned memory, and waits of a thread.
#
# `AcceleratorDevice` is the same code for every accelerator. Functions that torch offers for some accelerators only are
# called through a `HostSide`:
#
#     CUDA, ROCm    `CudaHostSide`: memory of our own is pinned piece by piece through the runtime
#     all others    `TorchHostSide`: torch allocates pinned memory
#
# `HOST_SIDES` maps each type of device with its own host side to that class.


@dataclass(frozen=True, kw_only=True, slots=True)
class HostBlock:
    """Host memory of one allocation. It starts at a whole page, and its last page belongs to no other block."""

    buffer: memoryview
    """Its bytes, which live until the last view of them is gone."""
    releases_pages: bool
    """True for memory of `aligned_empty`, whose unused pages `release_pages` may give back to the system."""


class HostSide(Protocol):
    """The functions of the host that differ between kinds of accelerators. Any thread may call any of them."""

    def allocate(self, nbytes: int) -> HostBlock:
        """Allocates host memory near the device, which `pin` can pin in parts."""

    def pin(self, memory: torch.Tensor) -> str | None:
        """Pins the pages of `memory`, (nbytes,) uint8 of `allocate` from the start of a page.

        Returns None if the pages are pinned now, else the reason of the refusal, in words.
        """

    def unpin(self, address: int) -> str | None:
        """Undoes the call of `pin` for the memory that begins at `address`; returns a refusal as `pin` does."""

    def wait(self, event: torch.Event) -> None:
        """Blocks the calling thread until `event` is done, without keeping a core busy if the device can do that."""


class TorchHostSide:
    """The host's side of any accelerator, built on functions that torch offers for all accelerators.

    Torch pins only memory that it allocates itself, so `allocate` returns such memory, pinned as a whole.
    """

    def __init__(self, device: torch.device) -> None:
        """Stores the device. Torch pins memory for the one kind of accelerator that a process uses."""
        self._device = device
        self._refusal = f"torch has not allocated this memory as pinned memory for {device.type}"

    def allocate(self, nbytes: int) -> HostBlock:
        """Returns memory that torch has pinned; ordinary memory if torch refuses or if too little memory is free."""
        taken = bytes_taken_by_torch(nbytes + PAGE)
        if taken > free_host_memory():
            self._refusal = (
                f"torch would take {format_size(taken)} for {format_size(nbytes)} of pinned memory, more than is free"
            )
            return HostBlock(buffer=aligned_empty(nbytes), releases_pages=True)
        try:
            whole = torch.empty(nbytes + PAGE, dtype=torch.uint8, pin_memory=True, device="cpu")
        except RuntimeError as error:
            self._refusal = str(error).partition("\n")[0]
            return HostBlock(buffer=aligned_empty(nbytes), releases_pages=True)
        start = -whole.data_ptr() % PAGE
        # The array keeps torch's memory alive, and the view keeps the array alive.
        return HostBlock(buffer=whole[start : start + nbytes].numpy().data, releases_pages=False)

    def pin(self, memory: torch.Tensor) -> str | None:
        """Returns None for memory that torch has allocated as pinned, the reason for other memory."""
        return None if memory.is_pinned() else self._refusal

    def unpin(self, address: int) -> str | None:
        """Does nothing: the memory is unpinned when torch frees it."""
        return None

    def wait(self, event: torch.Event) -> None:
        """Waits as torch does for this accelerator."""
        event.synchronize()


def bytes_taken_by_torch(nbytes: int) -> int:
    """Returns the bytes that torch's allocator of pinned memory takes for `nbytes`: the next power of two."""
    return 1 << max(nbytes - 1, 0).bit_length()


# -- device --------------------------------------------------------------------------------------------


class Event(Protocol):
    """A point in the work of a stream."""

    def done(self) -> bool:
        """Returns True if all work before the event is complete."""

    def wait(self) -> None:
        """Blocks the calling thread until all work before the event is complete."""


class DeviceRoom(NamedTuple):
    """Bytes of a device's memory that are not in use."""

    free: int
    """Unallocated bytes that this process may still allocate."""
    kept: int
    """Bytes of freed tensors that torch caches: after a step, the peak of the step's activations."""


class _Done:
    """Event of work that was complete when the call returned."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


DONE: Event = _Done()


class Later:
    """An event that begins later: `known` stands for it once it has."""

    known: Event | None = None


class _Thread(threading.local):
    """State of a CPU device for each calling thread."""

    copies_alone = False
    """True if copies of this thread must not use torch's other threads."""


class Device:
    """A device whose compute is complete when the call of torch returns: the CPU. Any thread may call it.

    "Device memory" is ordinary memory here: kernels may work on it in place (`host_addressable`).
    """

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        self.host_addressable = True
        self._thread = _Thread()

    @property
    def unified(self) -> bool:
        """True if the host cannot compute on the device's memory, although it is the host's own."""
        return False

    def free_bytes(self) -> int:
        """Returns the bytes of device memory that this process may still allocate, including torch's cached bytes."""
        return sum(self.room())

    def room(self) -> DeviceRoom:
        """Returns the bytes of device memory that are not in use; zeros for a device without memory of its own."""
        return DeviceRoom(0, 0)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocates (nbytes,) uint8 of device memory. Raises torch's error, or `BudgetError`, if not enough is free."""
        # On pages of 2 MiB, like the host arena: a step of 1B parameters, all in this memory, takes an eighth less
        # time.
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(aligned_empty(nbytes), dtype=torch.uint8)

    def give_back(self, memory: torch.Tensor, regions: Sequence[tuple[int, int]]) -> None:
        """Waits for all streams and gives regions of a result of `allocate` back to the system.

        The tensor and its views stay, and must not be used before `take_back`. The regions' contents are lost. Regions
        are (start, stop) in bytes; a device that the host cannot address gives back all of the memory.
        """
        for start, stop in regions:
            release_pages_at(memory.data_ptr() + start, stop - start)

    def take_back(self, memory: torch.Tensor) -> None:
        """Makes memory that was given back usable again by every stream, maybe at another address.

        Raises torch's error, or `OSError`, if the device lacks memory. The memory then stays given back.
        """

    def resize(self, memory: torch.Tensor, nbytes: int, kept: int) -> torch.Tensor:
        """Returns a result of `allocate` with `nbytes`. Its first `kept` bytes, and views of these, stay as they are.

        Waits for all streams. The CPU returns a part of `memory`, not more, and gives the rest to the system.
        An accelerator returns memory at another address, which views of the old one follow. Raises torch's error if the
        device lacks memory; nothing has changed then.
        """
        release_pages_at(memory.data_ptr() + nbytes, memory.numel() - nbytes)
        return memory[:nbytes]

    def allocate_host(self, nbytes: int) -> HostBlock:
        """Allocates host memory from whole pages, for I/O and for copies to and from the device."""
        return HostBlock(buffer=aligned_empty(nbytes), releases_pages=True)

    def register(self, parts: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Pins parts of host memory for fast copies, the first part first, as far as the device grants it.

        Parts are (nbytes,) uint8 tensors of whole pages of `allocate_host`, not written and not registered yet. Returns
        the pinned bytes of each part: 0 on a CPU, which needs no pinned memory.
        """
        return (0,) * len(parts)

    def unregister(self, parts: Sequence[torch.Tensor]) -> None:
        """Waits for copies in flight and unpins these parts. Called before their memory is freed."""

    def upload(self, destination: torch.Tensor, source: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        """Starts destination[:] = source, (nbytes,) uint8 of device and host, after `after`; returns its event."""
        for event in after:
            event.wait()
        self._copy_now(destination, source)
        return DONE

    def download(self, destination: torch.Tensor, source: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        """Starts destination[:] = source, (nbytes,) uint8 of host and device, after `after`; returns its event."""
        for event in after:
            event.wait()
        self._copy_now(destination, source)
        return DONE

    def _copy_now(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        # A copy by torch gives the calling thread an OpenMP team of its own. As soon as all teams together have more
        # threads than there are cores, libgomp no longer lets threads wait actively. Then each parallel region of the
        # compute wakes its threads from sleep: a step of gpt2-small on two cores took 7 % longer.
        if self._thread.copies_alone:
            np.copyto(destination.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())  # numpy has no bf16
        else:
            destination.copy_(source)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copies destination[:] = source, (nbytes,) uint8, in either direction; for threads that may block."""
        (self.upload if destination.device == self.torch else self.download)(destination, source).wait()

    def record_event(self) -> Event:
        """Returns the event of all compute that the calling thread has started so far."""
        return DONE

    def wait_event(self, event: Event) -> None:
        """Makes compute that the calling thread starts from now on wait for `event`; on a GPU the thread continues."""
        event.wait()

    @contextlib.contextmanager
    def uploading(self) -> Iterator[None]:
        """Submits torch's work in the body to the upload stream."""
        yield

    def uploaded(self) -> Event:
        """Returns the event of all work submitted to the upload stream so far."""
        return DONE

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Submits kernels that the body starts to the update stream."""
        yield

    def updated(self) -> Event:
        """Returns the event of all work submitted to the update stream so far."""
        return DONE

    def capturing(self) -> bool:
        """Returns True while the calling thread's current stream records a graph instead of running its work."""
        return False

    def synchronize(self) -> None:
        """Blocks until all streams are idle."""

    def enter_thread(self, *, computes: bool = False) -> None:
        """Prepares the calling thread for copies. A thread of the library calls this method first.

        `computes` is True for a thread that runs the model.
        """
        self._thread.copies_alone = not computes


# -- torch allocator -----------------------------------------------------------------------------------
#
# torch's caching allocator of a device: its shortages so far, and the memory that it keeps for later tensors.


class Shortages(NamedTuple):
    """Counts of shortages of device memory since the process began."""

    retries: int
    """Allocations for which torch released its cached memory, or tried to."""
    errors: int
    """Allocations that failed: torch raised its out-of-memory error."""


def shortages(device: torch.device) -> Shortages:
    """Returns the shortages of `device` so far; zeros for a device whose shortages torch does not count."""
    if device.type == "cpu":
        return Shortages(0, 0)
    # Not `memory_stats`, which renames hundreds of entries: an engine that has grown calls this function in every call.
    nested = getattr(torch.get_device_module(device), "memory_stats_as_nested_dict", None)
    stats = memory_stats(device) if nested is None else nested(device)
    return Shortages(int(stats.get("num_alloc_retries", 0)), int(stats.get("num_ooms", 0)))


def memory_stats(device: torch.device) -> dict[str, Any]:
    """Returns the allocator's figures by torch's names for them; empty for a device without such figures."""
    if device.type == "cpu":
        return {}
    # Not every device's module has the function: the module of MPS does not.
    stats = getattr(torch.get_device_module(device), "memory_stats", None)
    return {} if stats is None else dict(stats(device))


def empty_cache(device: torch.device) -> None:
    """Returns torch's cached memory of freed tensors of `device` to the driver, so that any allocation can use it."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


# -- accelerator ---------------------------------------------------------------------------------------
#
# Any accelerator of torch, by `torch.Stream`, `torch.Event` and `torch.accelerator`: CUDA, ROCm, XPU, NPU.
#
# No call here names a kind of accelerator. The device's module, `torch.get_device_module`, reports memory by
# `mem_get_info`, `memory_reserved` and `memory_allocated` for each kind. `HostSide` contains the functions that torch
# does not offer for all accelerators. CUDA has run this code; ROCm, XPU and NPU have not.


logger = logging.getLogger("offload")

PIN_CHUNK = GIB
"""Bytes of host memory that one call pins at most: if a call is refused, the memory pinned before stays pinned."""
PIN_LEAST = 16 * MIB
"""Bytes of the smallest piece that `_pin` tries after the device refused larger ones."""


class _StreamEvent:
    """Event recorded at the present end of a stream."""

    __slots__ = ("_side", "event")

    def __init__(self, stream: torch.Stream, side: HostSide) -> None:
        self.event: torch.Event = stream.record_event()
        self._side = side

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self._side.wait(self.event)


class AcceleratorDevice(Device):
    """An accelerator. Copies between it and host memory that `register` pinned run at the speed of the bus.

    Copies of other host memory are correct as well, but slower, and the thread that starts one may block.
    """

    def __init__(self, device: torch.device, side: HostSide) -> None:
        """Creates the streams. `device` has an index."""
        super().__init__(device)
        self.host_addressable = False
        self._side = side
        self._module = torch.get_device_module(device)
        self._upload = torch.Stream(device)
        self._download = torch.Stream(device)
        self._update = torch.Stream(device)
        self._pinned: dict[int, list[tuple[int, int]]] = {}
        """The pinned pieces, (first, last) address, of each registered part, by the address of the part."""
        self._borders: tuple[int, ...] = ()
        """Addresses at which a pinned piece begins or ends, ascending."""

    @property
    def unified(self) -> bool:
        # A module of torch that does not tell is taken for that of a card with memory of its own.
        properties = getattr(self._module, "get_device_properties", lambda _: None)(self.torch)
        return bool(getattr(properties, "is_integrated", False))

    def room(self) -> DeviceRoom:
        free, total = self._module.mem_get_info(self.torch)
        reserved = self._module.memory_reserved(self.torch)
        # A limit that the user has set: not every module has a function that returns it, and torch 2.6 has none.
        limit = getattr(self._module, "get_per_process_memory_fraction", lambda _: 1.0)
        free = min(free, int(limit(self.torch) * total) - reserved)
        return DeviceRoom(max(free, 0), reserved - self._module.memory_allocated(self.torch))

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch)

    def give_back(self, memory: torch.Tensor, regions: Sequence[tuple[int, int]]) -> None:
        self.synchronize()
        # As in FSDP, views stay views of the storage. After `take_back` they show the storage's new memory.
        memory.untyped_storage().resize_(0)
        empty_cache(self.torch)

    def take_back(self, memory: torch.Tensor) -> None:
        memory.untyped_storage().resize_(memory.numel())
        # all streams: compute in flight may still use the memory that torch reuses here, and other streams do not wait
        # for it.
        self.synchronize()

    def resize(self, memory: torch.Tensor, nbytes: int, kept: int) -> torch.Tensor:
        self.synchronize()
        # Set aside: the device may lack the memory for both sizes at once.
        aside, storage = memory[:kept].to("cpu"), memory.untyped_storage()
        try:
            storage.resize_(0)
            empty_cache(self.torch)
            storage.resize_(nbytes)
        except BaseException:
            storage.resize_(memory.numel())
            raise
        finally:
            resized = torch.empty(0, dtype=torch.uint8, device=self.torch)
            resized.set_(storage, 0, (storage.nbytes(),), (1,))
            resized[:kept].copy_(aside)
            # all streams: as in `take_back`.
            self.synchronize()
        return resized

    # -- pinned host memory -------------------------------------------------------------------------

    def allocate_host(self, nbytes: int) -> HostBlock:
        return self._side.allocate(nbytes)

    def register(self, parts: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Pins the parts in their order; logs one warning if the device refuses some of the memory."""
        refusal = None
        try:
            for part in parts:
                refusal = self._pin(part)
                # After a refusal of the smallest piece, no more pieces are tried: the limit counts all pinned memory.
                if refusal is not None:
                    break
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self.unregister(parts)
            raise
        self._find_borders()
        granted = tuple(self._pinned_bytes(part) for part in parts)
        pinned, wanted = sum(granted), sum(part.nbytes for part in parts)
        if refusal is not None:
            logger.warning(
                "%s pins %s of %s of host memory and refuses the other %s: %s. Copies of what is not pinned go "
                "through a buffer of the driver, typically at a third to a half of the bus speed. Such a copy blocks "
                "the thread that starts it, so the copy does not overlap with compute. What is copied most was pinned "
                "first. The system limits pinned memory: WSL to 0.5 to 1 GiB in all, a container to its memory limit. "
                'Run on Linux itself, raise the limit of the container, or lower "host_memory" in the "offload" block.',
                self.torch.type.upper(),
                format_size(pinned),
                format_size(wanted),
                format_size(wanted - pinned),
                refusal,
            )
        return granted

    def _pinned_bytes(self, part: torch.Tensor) -> int:
        pieces = self._pinned.get(part.data_ptr(), ()) if part.nbytes else ()
        return min(part.nbytes, sum(last - first for first, last in pieces))

    def _pin(self, part: torch.Tensor) -> str | None:
        """Pins one part in pieces, smaller ones after a refusal; returns the refusal of the smallest piece."""
        if not part.nbytes:
            return None
        address = part.data_ptr()
        assert address % PAGE == 0 and address not in self._pinned, "memory of whole pages is registered once"
        pieces = self._pinned[address] = []
        start, size = 0, PIN_CHUNK
        while start < part.nbytes:
            piece = part[start : start + size]
            # Recorded before the call: a Ctrl-C may come between any two lines, and a pinned piece must not be lost.
            pieces.append((piece.data_ptr(), piece.data_ptr() + align_up(piece.nbytes)))
            refusal = self._side.pin(piece)
            if refusal is None:
                start += piece.nbytes
                continue
            pieces.pop()
            if piece.nbytes <= PIN_LEAST:
                return refusal
            # A system with a limit refuses a large piece as a whole, although a smaller one would fit.
            size = max(align_up(piece.nbytes // 2), PIN_LEAST)
        return None

    def unregister(self, parts: Sequence[torch.Tensor]) -> None:
        """Waits for copies in flight and unpins all pieces.

        Raises `RuntimeError` after all other pieces, if the accelerator has failed or does not unpin a piece.
        """
        starts = [part.data_ptr() for part in parts if part.nbytes]
        refusals = []
        try:
            # all streams: at the end of an engine a copy may still be in flight for which no thread waits.
            self.synchronize()
        finally:
            for start in starts:
                pieces = self._pinned.get(start, [])
                while pieces:
                    refusal = self._side.unpin(pieces.pop()[0])
                    if refusal is not None:
                        refusals.append(refusal)
                self._pinned.pop(start, None)
            self._find_borders()
        if refusals:
            raise RuntimeError(f"{self.torch.type} cannot unpin {len(refusals)} ranges of host memory: {refusals[0]}")

    def _find_borders(self) -> None:
        self._borders = tuple(sorted({end for pieces in self._pinned.values() for piece in pieces for end in piece}))

    # -- copies -------------------------------------------------------------------------------------

    def upload(self, destination: torch.Tensor, source: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        return self._copy(self._upload, destination, source, after, source)

    def download(self, destination: torch.Tensor, source: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        return self._copy(self._download, destination, source, after, destination)

    def _copy(
        self,
        stream: torch.Stream,
        destination: torch.Tensor,
        source: torch.Tensor,
        after: Sequence[Event],
        host: torch.Tensor,
    ) -> Event:
        """Starts a copy on `stream` after `after`; `host` is `destination` or `source`, the one in host memory."""
        address = host.data_ptr()
        with self._submitting_to(stream):
            for event in after:
                self._order(stream, event)
            # CUDA refuses a copy whose host memory spans two pinned pieces, or a pinned piece and unpinned memory.
            for first, last in cut(address, address + host.nbytes, self._borders):
                part = slice(first - address, last - address)
                destination.view(torch.uint8)[part].copy_(source.view(torch.uint8)[part], non_blocking=True)
        return _StreamEvent(stream, self._side)

    # -- streams ------------------------------------------------------------------------------------

    def record_event(self) -> Event:
        return _StreamEvent(torch.accelerator.current_stream(self.torch), self._side)

    def wait_event(self, event: Event) -> None:
        self._order(torch.accelerator.current_stream(self.torch), event)

    @staticmethod
    def _order(stream: torch.Stream, event: Event) -> None:
        """Makes `stream` wait for `event`: on the device for a stream's event, else by blocking the calling thread."""
        if isinstance(event, Later) and event.known is not None:
            event = event.known
        if isinstance(event, _StreamEvent):
            # Ordered on the device: the host thread continues.
            stream.wait_event(event.event)
        else:
            event.wait()

    @contextlib.contextmanager
    def _submitting_to(self, stream: torch.Stream) -> Iterator[None]:
        """Makes `stream` the calling thread's current stream in the body. torch 2.6 has no such context."""
        device, before = current_index(), torch.accelerator.current_stream(self.torch)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            # `set_stream` also sets the current device, and the thread's current device may have been another one.
            if device != self.torch.index:
                set_index(device)

    @contextlib.contextmanager
    def uploading(self) -> Iterator[None]:
        with self._submitting_to(self._upload):
            yield

    def uploaded(self) -> Event:
        return _StreamEvent(self._upload, self._side)

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        with self._submitting_to(self._update):
            yield

    def updated(self) -> Event:
        return _StreamEvent(self._update, self._side)

    def capturing(self) -> bool:
        # Not every module has the function: graphs are recorded by CUDA, ROCm, XPU and NPU alone.
        asked = getattr(self._module, "is_current_stream_capturing", None)
        return asked is not None and bool(asked())

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.torch)

    def enter_thread(self, *, computes: bool = False) -> None:
        # The current device is a setting of each thread. Without this call the thread would use device 0.
        set_index(self.torch.index)


def current_index() -> int:
    """Returns the index of the calling thread's current accelerator."""
    # torch 2.6 has the function under its earlier name alone.
    get = getattr(torch.accelerator, "current_device_index", None) or torch.accelerator.current_device_idx
    return int(get())


def set_index(index: int) -> None:
    """Makes the accelerator with this index the calling thread's current one."""
    # As in `current_index`: torch 2.6 has the earlier name only.
    change = getattr(torch.accelerator, "set_device_index", None) or torch.accelerator.set_device_idx
    change(index)


def cut(start: int, stop: int, borders: Sequence[int]) -> list[tuple[int, int]]:
    """Returns [start, stop) cut at all `borders`, ascending, that are inside."""
    inside = borders[bisect_right(borders, start) : bisect_left(borders, stop)]
    return list(pairwise((start, *inside, stop)))


# -- cuda host side ------------------------------------------------------------------------------------
#
# The host's side of CUDA and ROCm: registered host memory, the NUMA node of the GPU, and waits that sleep.


class CudaHostSide:
    """Pins the library's own memory through the CUDA runtime, as torch exposes it, under the same names for ROCm."""

    def __init__(self, device: torch.device) -> None:
        """Stores the GPU; does not call the driver yet."""
        self._device = device
        self._of_thread = threading.local()

    def allocate(self, nbytes: int) -> HostBlock:
        """Returns memory that lies on the NUMA node of the GPU, as far as that node has free memory."""
        block = HostBlock(buffer=aligned_empty(nbytes), releases_pages=True)
        # A copy from memory of another NUMA node crosses the link between the sockets.
        node = memory_node(torch.cuda.get_device_properties(self._device)) if nbytes else None
        if node is not None:
            # Before pinning: the first touch allocates the pages, and pinning is the first touch.
            prefer_node(block.buffer, node)
        return block

    def pin(self, memory: torch.Tensor) -> str | None:
        """Registers whole pages with CUDA."""
        cudart: Any = torch.cuda.cudart()
        return self._refusal(cudart.cudaHostRegister(memory.data_ptr(), align_up(memory.nbytes), 0))

    def unpin(self, address: int) -> str | None:
        """Ends a registration."""
        cudart: Any = torch.cuda.cudart()
        return self._refusal(cudart.cudaHostUnregister(address))

    def wait(self, event: torch.Event) -> None:
        """Sleeps until `event` is done: a thread that spins would take a core from the update kernels.

        In a wait for a `torch.Event` the host spins: torch offers no flag for this event to sleep instead. So a stream
        that only this thread uses waits for `event`. The host then waits for a CUDA event on that stream, and such a
        wait sleeps.
        """
        if event.query():
            return
        stream = self._stream()
        stream.wait_event(event)
        stream.record_event(torch.cuda.Event(blocking=True)).synchronize()

    def _stream(self) -> torch.cuda.Stream:
        stream: torch.cuda.Stream | None = getattr(self._of_thread, "stream", None)
        if stream is None:
            # torch has a pool of 32 streams for each priority and hands them out in turns, so a new stream of the
            # default priority may be a stream that copies. A wait would then queue after these copies. Hence the high
            # priority.
            stream = self._of_thread.stream = torch.cuda.Stream(self._device, priority=-1)
        return stream

    def _refusal(self, result: Any) -> str | None:
        """Returns CUDA's message for the `result` of a call of its runtime; None if the call succeeded."""
        if int(result) == 0:
            return None
        # CUDA also stores the error as its last one. Torch asks for the last error after its next kernel, which would
        # then seem to have failed. Here the launch of a dummy kernel consumes that error.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)
        cudart: Any = torch.cuda.cudart()
        return f"{cudart.cudaGetErrorString(result)} (CUDA error {int(result)})"


def memory_node(gpu: Any, folder: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Returns the NUMA node next to the GPU with torch's properties `gpu`.

    None on a machine of one node, and if the system or an older torch does not report the node.
    """
    place = pci_address(gpu)
    try:
        node = -1 if place is None else int((folder / place / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def pci_address(gpu: Any) -> str | None:
    """Returns the PCI address of the GPU with torch's properties `gpu`; None if torch is too old to report it."""
    try:
        return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    except AttributeError:
        return None


# -- device choice -------------------------------------------------------------------------------------
#
# The choice of the device that a process computes on, by name, and its device object.


HOST_SIDES: dict[str, Callable[[torch.device], HostSide]] = {"cuda": CudaHostSide}
"""Constructors of the host's side, by torch's name of the device type, for types that have a side of their own."""

_ROCM = ("hip", "rocm")
"""Names of AMD's GPUs that torch does not go by."""


def accelerator_type() -> str | None:
    """Returns the type of the accelerator that torch finds, such as "cuda" (ROCm too) or "xpu"; None without one."""
    # Asked first: torch 2.6 raises if there is none.
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if accelerator is None else accelerator.type


def compute_device(name: str, setting: str = '"device"') -> torch.device:
    """Returns the device that this process computes on; if there are several, LOCAL_RANK selects the current one.

    Raises `ConfigError` if the name is unknown, or if the device does not exist.

    Args:
        name: "auto", "cpu", or the type of an accelerator as torch names it: "cuda" (ROCm too), "xpu", "npu". "auto" is
            the accelerator that torch finds, and the CPU without one.
        setting: the user's name for the setting, for error messages.
    """
    accelerator = None if name == "cpu" else accelerator_type()
    if name not in ("auto", "cpu", accelerator):
        if not _is_type(name) or name in _ROCM:
            known = "" if accelerator in (None, "cuda") else f", {accelerator}"
            raise ConfigError(f"there is no device {name!r}: {setting} may be auto, cpu, cuda{known}{_hint(name)}")
        raise ConfigError(f'{setting} is {name}, but torch finds no {name.upper()} device; set it to "auto" or "cpu"')
    if accelerator is None:
        return torch.device("cpu")
    local, count = os.environ.get("LOCAL_RANK", "0"), torch.accelerator.device_count()
    # torchrun shows all GPUs to each process, other launchers show one. A current device other than 0 is the user's.
    if count > 1 and current_index() == 0:
        if not local.isdecimal() or int(local) >= count:
            raise ConfigError(
                f"LOCAL_RANK is {local}, but torch finds {count_of(count, 'device')}; start one process for each"
            )
        set_index(int(local))
    return torch.device(accelerator, current_index())


def _hint(name: str) -> str:
    """Returns a hint for a user who has given a name such as "rocm" or "cuda:1"; empty for other names."""
    if name in _ROCM:
        return "; ROCm is cuda to torch"
    kind, colon, index = name.partition(":")
    # With this variable the process sees one device, as its first.
    return f"; CUDA_VISIBLE_DEVICES={index} chooses one of several" if colon and kind == "cuda" else ""


def _is_type(name: str) -> bool:
    try:
        device = torch.device(name)
    except RuntimeError:
        return False
    return device.type == name and name != "meta"


@functools.cache
def open_device(device: torch.device) -> Device:
    """Returns the device object of a torch device, the same one for all engines of a process."""
    if device.type == "cpu":
        return Device(device)
    if device.index is None:
        return open_device(torch.device(device.type, current_index()))
    return AcceleratorDevice(device, host_side_of(device))


def host_side_of(device: torch.device) -> HostSide:
    """Returns the host's side of an accelerator."""
    return HOST_SIDES.get(device.type, TorchHostSide)(device)


# -- growing segments ----------------------------------------------------------------------------------
#
# Growing segments for torch's allocator of a GPU, unless the user has chosen otherwise.
#
# torch's allocator takes memory from the driver in segments. A segment of fixed size keeps the gaps that batches of
# other lengths leave in it. Next to an arena that takes most of the GPU, nobody can use the memory of such a gap. A
# segment that grows is one range of addresses, onto which memory is mapped as it is needed.
#
# torch reads the setting once, from the environment, when CUDA is first used. Only a private function changes it later,
# and that function resets every other setting of the user to its default.


_NAME = "PYTORCH_CUDA_ALLOC_CONF"
"""The variable that every version reads for CUDA. torch 2.9 alone warns that it is deprecated, and ignores
PYTORCH_ALLOC_CONF for CUDA in 2.9.1 (pytorch/pytorch#183387); later versions take either name.
"""
_NAMES = (_NAME, "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""All variables with settings of the allocator."""
_GROWING = "expandable_segments:True"


def let_segments_grow(device: str) -> tuple[Remark, ...]:
    """Asks torch for segments that grow, in this process's environment, and returns a line for the user.

    A further call changes nothing, and returns the same line. The line says that segments grow, or that the setting
    comes too late. There is none without a GPU of NVIDIA, or if the user has set anything else.
    """
    if device == "cpu" or torch.version.hip is not None or not torch.cuda.is_available():
        return ()
    asks, line = growing_segments(os.environ, torch.cuda.is_initialized())
    if asks:
        os.environ[_NAME] = _GROWING
    return () if line is None else (line,)


def growing_segments(environment: Mapping[str, str], in_use: bool) -> tuple[bool, Remark | None]:
    """Returns True if the caller must set the variable, else False; and the line for the user, if any.

    `in_use` is True if CUDA has been used, and the environment read.
    """
    settings = {name: environment[name] for name in _NAMES if environment.get(name)}
    grows = Remark(
        f"torch's allocator lets its segments grow ({next(iter(settings), _NAME)}={_GROWING}), which leaves fewer gaps "
        "beside the weights; another value of this variable changes that"
    )
    if settings:
        return False, grows if set(settings.values()) == {_GROWING} else None
    if in_use:
        return False, Remark(
            f"CUDA was in use before offload.initialize, so torch's allocator keeps segments of fixed size, which may "
            f"lose memory to gaps: set {_NAME}={_GROWING} in the environment"
        )
    return True, grows
