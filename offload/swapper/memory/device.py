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
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from offload.aio import aligned_empty, prefer_node
from offload.errors import ConfigError
from offload.sizes import GIB, PAGE, align_up, count_of, format_size

logger = logging.getLogger("offload")

PIECE = GIB
"""Bytes of host memory that one call of CUDA pins: if CUDA refuses a call, the memory pinned before stays pinned."""


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
    """Bytes that torch caches of freed tensors: after a step, the peak of the step's activations."""


class _Done:
    """Event of work that was complete when the call returned."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


DONE: Event = _Done()


class Device:
    """A device that has completed its compute by the time that torch returns: the CPU. Any thread may call it.

    "Device memory" is ordinary memory here, on which kernels may work in place (`host_addressable`).
    """

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        self.host_addressable = True

    def free_bytes(self) -> int:
        """Returns the bytes of device memory that this process may still allocate, with those that torch caches."""
        return sum(self.room())

    def room(self) -> DeviceRoom:
        """Returns the bytes of device memory that are not in use; zeros for a device without memory of its own."""
        return DeviceRoom(0, 0)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocates (nbytes,) uint8 of device memory. Raises torch's error, or `OSError`, if not enough is free."""
        # On pages of 2 MiB, as the host arena: a step of 1B parameters, all in this memory, takes an eighth less time.
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(aligned_empty(nbytes), dtype=torch.uint8)

    def register(self, memory: torch.Tensor) -> int:
        """Prepares `memory`, (nbytes,) uint8 of `aligned_empty` that was not written yet, for fast copies.

        Returns the number of bytes, from its start, that are now pinned: 0 on a CPU, which needs none.
        """
        return 0

    def unregister(self, memory: torch.Tensor) -> None:
        """Waits for copies in flight and undoes `register`, before the memory is freed."""

    def upload(self, destination: torch.Tensor, source: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        """Starts destination[:] = source, (nbytes,) uint8 of device and host, after `after`; returns its event."""
        for event in after:
            event.wait()
        destination.copy_(source)
        return DONE

    def download(self, destination: torch.Tensor, source: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        """Starts destination[:] = source, (nbytes,) uint8 of host and device, after `after`; returns its event."""
        for event in after:
            event.wait()
        destination.copy_(source)
        return DONE

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copies destination[:] = source, (nbytes,) uint8, either way, and waits: for threads that may block."""
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

    def synchronize(self) -> None:
        """Blocks until all streams are idle."""

    def enter_thread(self) -> None:
        """Prepares the calling thread for copies. Each of the library's threads that copies calls this first."""


class _CudaEvent:
    """Event recorded at the present end of a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        # Blocking: a thread that waits sleeps instead of spinning, and leaves its core to the update kernels.
        self.event = stream.record_event(torch.cuda.Event(blocking=True))

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class CudaDevice(Device):
    """A CUDA GPU. Copies between the GPU and host memory that `register` pinned run at the speed of the bus.

    Copies of other host memory are correct as well, but slower, and the thread that starts one may block.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.host_addressable = False
        self._upload = torch.cuda.Stream(device)
        self._download = torch.cuda.Stream(device)
        self._update = torch.cuda.Stream(device)
        self._pinned: dict[int, list[tuple[int, int]]] = {}
        """The pinned pieces, (first, last) address, of each registered memory, by the address of the memory."""
        self._borders: tuple[int, ...] = ()
        """Addresses at which a pinned piece begins or ends, ascending."""

    def room(self) -> DeviceRoom:
        free, total = torch.cuda.mem_get_info(self.torch)
        reserved = torch.cuda.memory_reserved(self.torch)
        limit = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)  # torch 2.6 lacks the getter
        free = min(free, int(limit(self.torch) * total) - reserved)
        return DeviceRoom(max(free, 0), reserved - torch.cuda.memory_allocated(self.torch))

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch)

    def register(self, memory: torch.Tensor) -> int:
        """Places `memory` on the NUMA node of the GPU and pins it; logs one warning if CUDA refuses a piece."""
        start, nbytes = memory.data_ptr(), memory.numel()
        if not nbytes:
            return 0
        assert start % PAGE == 0 and start not in self._pinned, "memory of whole pages is registered once"
        # A copy from memory of another NUMA node crosses the link between the sockets.
        node = memory_node(torch.cuda.get_device_properties(self.torch))
        if node is not None:
            # Before pinning: the first touch allocates the pages, and pinning is the first touch.
            prefer_node(memory.numpy().data, node)
        cudart: Any = torch.cuda.cudart()
        pieces = self._pinned[start] = []
        refusal = None
        try:
            for first, last in cut(start, start + align_up(nbytes), range(start, start + nbytes, PIECE)):
                # Noted before the call: a Ctrl-C may come between any two lines, and a pinned piece must not be lost.
                pieces.append((first, last))
                refusal = self._refusal(cudart.cudaHostRegister(first, last - first, 0))
                if refusal is not None:
                    pieces.pop()
                    break
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self.unregister(memory)
            raise
        self._find_borders()
        pinned = min(nbytes, sum(last - first for first, last in pieces))
        if refusal is not None:
            logger.warning(
                "CUDA pins %s of %s of host memory and refuses the other %s: %s. Copies of what is not pinned go "
                "through a buffer of the driver, typically at a third to a half of the bus speed. Such a copy blocks "
                "the thread that starts it, so the copy does not overlap with compute. Raise the limit of locked "
                'memory (ulimit -l) or lower "host_memory" in the "offload" block.',
                format_size(pinned),
                format_size(nbytes),
                format_size(nbytes - pinned),
                refusal,
            )
        return pinned

    def unregister(self, memory: torch.Tensor) -> None:
        """Waits for copies in flight and unpins all pieces. Raises `RuntimeError` last if the GPU or CUDA failed."""
        if not memory.numel():
            return
        refusals = []
        try:
            # At the end of an engine a copy may still be in flight for which no thread waits.
            self.synchronize()
        finally:
            cudart: Any = torch.cuda.cudart()
            pieces = self._pinned.get(memory.data_ptr(), [])
            while pieces:
                first, _ = pieces.pop()
                refusal = self._refusal(cudart.cudaHostUnregister(first))
                if refusal is not None:
                    refusals.append(refusal)
            self._pinned.pop(memory.data_ptr(), None)
            self._find_borders()
        if refusals:
            raise RuntimeError(f"CUDA cannot unpin {len(refusals)} ranges of host memory: {refusals[0]}")

    def _refusal(self, result: Any) -> str | None:
        """Returns CUDA's message for the `result` of a call of its runtime; None if the call succeeded."""
        if int(result) == 0:
            return None
        # CUDA also stores the error as its last one. Torch asks for the last error after its next kernel, which would
        # then seem to have failed. A kernel without use takes that error here.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self.torch)
        cudart: Any = torch.cuda.cudart()
        return f"{cudart.cudaGetErrorString(result)} (CUDA error {int(result)})"

    def _find_borders(self) -> None:
        """Updates `_borders` after a change of the pinned pieces."""
        self._borders = tuple(sorted({end for pieces in self._pinned.values() for piece in pieces for end in piece}))

    def upload(self, destination: torch.Tensor, source: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        return self._copy(self._upload, destination, source, after, source)

    def download(self, destination: torch.Tensor, source: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        return self._copy(self._download, destination, source, after, destination)

    def _copy(
        self,
        stream: torch.cuda.Stream,
        destination: torch.Tensor,
        source: torch.Tensor,
        after: Sequence[Event],
        host: torch.Tensor,
    ) -> Event:
        """Starts a copy on `stream` after `after`; `host` is the one of the two (nbytes,) tensors in host memory."""
        address = host.data_ptr()
        with torch.cuda.stream(stream):
            for event in after:
                self._order(stream, event)
            # CUDA refuses a copy whose host memory spans two pinned pieces, or a pinned piece and unpinned memory.
            for first, last in cut(address, address + host.nbytes, self._borders):
                part = slice(first - address, last - address)
                destination.view(torch.uint8)[part].copy_(source.view(torch.uint8)[part], non_blocking=True)
        return _CudaEvent(stream)

    def record_event(self) -> Event:
        return _CudaEvent(torch.cuda.current_stream(self.torch))

    def wait_event(self, event: Event) -> None:
        self._order(torch.cuda.current_stream(self.torch), event)

    @staticmethod
    def _order(stream: torch.cuda.Stream, event: Event) -> None:
        """Makes `stream` wait for `event`: on the GPU for an event of CUDA, else by blocking the calling thread."""
        if isinstance(event, _CudaEvent):
            # Ordered on the GPU: the host thread continues.
            stream.wait_event(event.event)
        else:
            event.wait()

    @contextlib.contextmanager
    def uploading(self) -> Iterator[None]:
        with torch.cuda.stream(self._upload):
            yield

    def uploaded(self) -> Event:
        return _CudaEvent(self._upload)

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        with torch.cuda.stream(self._update):
            yield

    def updated(self) -> Event:
        return _CudaEvent(self._update)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch)

    def enter_thread(self) -> None:
        # The current GPU is a setting of each thread. Without this call the thread would create a context on GPU 0.
        torch.cuda.set_device(self.torch)


def cut(start: int, stop: int, borders: Sequence[int]) -> list[tuple[int, int]]:
    """Returns [start, stop) cut at all `borders`, ascending, that are inside."""
    inside = borders[bisect_right(borders, start) : bisect_left(borders, stop)]
    return list(pairwise((start, *inside, stop)))


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


def compute_device(name: str, setting: str = '"device"') -> torch.device:
    """Returns the device that this process computes on; of several GPUs, makes that of LOCAL_RANK the current one.

    Args:
        name: "auto", "cpu" or "cuda"; "auto" is a GPU if torch finds one.
        setting: the user's name for the setting, for error messages.

    Raises:
        ConfigError: if the name is unknown, or if the device does not exist.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"there is no device {name!r}: expected auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f'{setting} is cuda, but torch finds no CUDA device; set it to "auto" or "cpu"')
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    # torchrun shows all GPUs to each process, other launchers show one. A current device other than 0 is the user's.
    if count > 1 and torch.cuda.current_device() == 0:
        if local >= count:
            raise ConfigError(
                f"LOCAL_RANK is {local}, but torch finds {count_of(count, 'CUDA device')}; start one process for each "
                "device"
            )
        torch.cuda.set_device(local)
    return torch.device("cuda", torch.cuda.current_device())


@functools.cache
def open_device(device: torch.device) -> Device:
    """Returns the device object of a torch device, the same one for all engines of a process."""
    return CudaDevice(device) if device.type == "cuda" else Device(device)
