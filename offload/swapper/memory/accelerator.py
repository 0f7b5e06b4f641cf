"""Any accelerator of torch, by `torch.Stream`, `torch.Event` and `torch.accelerator`: CUDA, ROCm, XPU, NPU.

No call here names a kind of accelerator. Memory is asked for at the device's module, `torch.get_device_module`, which
has the functions `mem_get_info`, `memory_reserved` and `memory_allocated` for each of them. What torch does not offer
for all accelerators is behind `HostSide`. CUDA has run this code; ROCm, XPU and NPU have not.
"""

from __future__ import annotations

import contextlib
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from offload.sizes import GIB, MIB, PAGE, align_up, format_size
from offload.swapper.memory.device import Device, DeviceRoom, Event
from offload.swapper.memory.host_side import HostBlock, HostSide
from offload.swapper.memory.torch_allocator import empty_cache

logger = logging.getLogger("offload")

PIN_CHUNK = GIB
"""Bytes of host memory that one call pins at most: if a call is refused, the memory pinned before stays pinned."""
PIN_LEAST = 16 * MIB
"""Bytes of the smallest piece that is tried after larger ones were refused."""


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
        """Creates the streams.

        Args:
            device: the accelerator, with its index.
            side: pins host memory for this accelerator, and waits for its events.
        """
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

    def room(self) -> DeviceRoom:
        free, total = self._module.mem_get_info(self.torch)
        reserved = self._module.memory_reserved(self.torch)
        # Not every module has a function for the limit that a user has set; torch 2.6 has none.
        limit = getattr(self._module, "get_per_process_memory_fraction", lambda _: 1.0)
        free = min(free, int(limit(self.torch) * total) - reserved)
        return DeviceRoom(max(free, 0), reserved - self._module.memory_allocated(self.torch))

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch)

    def give_back(self, memory: torch.Tensor, regions: Sequence[tuple[int, int]]) -> None:
        self.synchronize()
        # Views stay views of the storage, as in FSDP, and show its next memory after `take_back`.
        memory.untyped_storage().resize_(0)
        empty_cache(self.torch)

    def take_back(self, memory: torch.Tensor) -> None:
        memory.untyped_storage().resize_(memory.numel())
        # Compute in flight may still use what torch has reused here, and other streams do not wait for it.
        self.synchronize()

    # -- pinned host memory -------------------------------------------------------------------------

    def allocate_host(self, nbytes: int) -> HostBlock:
        return self._side.allocate(nbytes)

    def register(self, parts: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Pins the parts in their order; logs one warning if the device refuses some of the memory."""
        refusal = None
        try:
            for part in parts:
                refusal = self._pin(part)
                # After a refusal of the least piece nothing more is asked for: the limit counts all pinned memory.
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
        """Returns the pinned bytes of a registered part."""
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
            # Noted before the call: a Ctrl-C may come between any two lines, and a pinned piece must not be lost.
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

        Raises:
            RuntimeError: last of all, if the accelerator has failed or does not unpin a piece.
        """
        starts = [part.data_ptr() for part in parts if part.nbytes]
        refusals = []
        try:
            # At the end of an engine a copy may still be in flight for which no thread waits.
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
        """Updates `_borders` after a change of the pinned pieces."""
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
        """Starts a copy on `stream` after `after`; `host` is the one of the two (nbytes,) tensors in host memory."""
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
        """Makes `stream` wait for `event`: on the device for one of its events, else by blocking the calling thread."""
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
            # A stream brings its device with it, and the thread's current device may be another one.
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
    # As above.
    change = getattr(torch.accelerator, "set_device_index", None) or torch.accelerator.set_device_idx
    change(index)


def cut(start: int, stop: int, borders: Sequence[int]) -> list[tuple[int, int]]:
    """Returns [start, stop) cut at all `borders`, ascending, that are inside."""
    inside = borders[bisect_right(borders, start) : bisect_left(borders, stop)]
    return list(pairwise((start, *inside, stop)))
