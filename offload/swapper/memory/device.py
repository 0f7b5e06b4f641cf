"""The compute device: all of its streams, events and copies are in here.

Four streams run beside each other. *compute* is the stream on which the calling thread gives work to torch; *upload*
brings weights, *download* takes gradients and updated states away, *update* has the optimizer's kernels where states
live on the device. Work on one stream is ordered; between streams it is ordered by events alone:

    upload     waits for the last compute that read the place it writes to (`after`)
    compute    waits for the upload of what it reads (`hold`)
    download   waits for the compute that made what it reads (`after`)
    update     waits for nothing: who gives it work knows that what it reads and writes is done
    host       waits for a copy before it reads or reuses host memory, and for an update (`Event.wait`)

Who starts a copy keeps both of its memories as they are until the copy's event is done. On a CPU device the same
calls copy at once, and compute waits by blocking the thread that is about to start it.
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
"""Bytes of host memory that CUDA is asked to pin at a time: where it refuses one, what it granted before stays."""


class Event(Protocol):
    """A point in the work of a stream."""

    def done(self) -> bool:
        """Whether everything before it has been carried out."""

    def wait(self) -> None:
        """Block the calling thread until then."""


class DeviceRoom(NamedTuple):
    """Bytes of a device's memory that are not in use."""

    free: int
    """Nobody has them, and this process may take them."""
    kept: int
    """torch has them, for what was freed: after a step, what its activations took at most."""


class _Done:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


DONE: Event = _Done()


class Device:
    """A device on which compute is done by the time that torch returns: the CPU. Any thread may call it.

    "Device memory" is ordinary memory here, that kernels may work on in place (`host_addressable`).
    """

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        self.host_addressable = True

    def free_bytes(self) -> int:
        """What this process may still allocate of its memory: also what torch keeps for later."""
        return sum(self.room())

    def room(self) -> DeviceRoom:
        """What of its memory is not in use; nothing where it has none but the host's."""
        return DeviceRoom(0, 0)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """(nbytes,) uint8 of its memory. Raises torch's error, or `OSError`, where that is not free."""
        # On 2 MiB pages, as the host arena: a step of 1B parameters that are all here takes an eighth less.
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(aligned_empty(nbytes), dtype=torch.uint8)

    def register(self, memory: torch.Tensor) -> int:
        """Prepare `memory`, (nbytes,) uint8 of `aligned_empty` that nobody has touched yet, for copies.

        Returns how many bytes, from its start, are pinned now: on a CPU none, and none need to be.
        """
        return 0

    def unregister(self, memory: torch.Tensor) -> None:
        """Wait for copies under way and undo `register`, before the memory is freed."""

    def upload(self, destination: torch.Tensor, source: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        """destination[:] = source, (nbytes,) uint8 of device and host, once `after` are done."""
        for event in after:
            event.wait()
        destination.copy_(source)
        return DONE

    def download(self, destination: torch.Tensor, source: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        """destination[:] = source, (nbytes,) uint8 of host and device, once `after` are done."""
        for event in after:
            event.wait()
        destination.copy_(source)
        return DONE

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """destination[:] = source, (nbytes,) uint8 on either side, at once: for threads that may block."""
        (self.upload if destination.device == self.torch else self.download)(destination, source).wait()

    def computed(self) -> Event:
        """All compute that the calling thread has started so far."""
        return DONE

    def hold(self, event: Event) -> None:
        """Compute that the calling thread starts from now on waits for `event`."""
        event.wait()

    @contextlib.contextmanager
    def uploading(self) -> Iterator[None]:
        """What torch is told to do in here is done on the upload stream."""
        yield

    def uploaded(self) -> Event:
        """All work that was given to the upload stream so far."""
        return DONE

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Kernels that are started in here run on the update stream."""
        yield

    def updated(self) -> Event:
        """All work that was given to the update stream so far."""
        return DONE

    def synchronize(self) -> None:
        """Block until all streams are idle."""

    def enter_thread(self) -> None:
        """Called first by a thread of ours that copies."""


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        # Blocking: who waits for it sleeps, and leaves the cores to the kernels.
        self.event = stream.record_event(torch.cuda.Event(blocking=True))

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class CudaDevice(Device):
    """A CUDA GPU. Copies between it and host memory that `register` pinned go at the speed of the bus.

    Copies of other host memory are right too; they take longer, and the thread that starts one may wait for it.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.host_addressable = False
        self._upload = torch.cuda.Stream(device)
        self._download = torch.cuda.Stream(device)
        self._update = torch.cuda.Stream(device)
        self._pinned: dict[int, list[tuple[int, int]]] = {}
        """The pinned pieces, (first, last) address, of each registered memory by its address."""
        self._borders: tuple[int, ...] = ()
        """Addresses where a pinned piece begins or ends, ascending."""

    def room(self) -> DeviceRoom:
        free, total = torch.cuda.mem_get_info(self.torch)
        reserved = torch.cuda.memory_reserved(self.torch)
        limit = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)  # torch 2.6 cannot say
        free = min(free, int(limit(self.torch) * total) - reserved)
        return DeviceRoom(max(free, 0), reserved - torch.cuda.memory_allocated(self.torch))

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch)

    def register(self, memory: torch.Tensor) -> int:
        """Lay `memory` on the NUMA node of the GPU and pin it; one warning where CUDA refuses a part of it."""
        start, nbytes = memory.data_ptr(), memory.numel()
        if not nbytes:
            return 0
        assert start % PAGE == 0 and start not in self._pinned, "memory of whole pages is registered once"
        node = memory_node(torch.cuda.get_device_properties(self.torch))
        if node is not None:
            prefer_node(memory.numpy().data, node)  # before pinning, which is the first touch
        cudart: Any = torch.cuda.cudart()
        pieces = self._pinned[start] = []
        refusal = None
        try:
            for first, last in cut(start, start + align_up(nbytes), range(start, start + nbytes, PIECE)):
                pieces.append((first, last))  # before it is pinned: Ctrl-C may come between any two lines
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
                "through a buffer of the driver, typically at a third to a half of the speed of the bus, and block the "
                "thread that starts them, so that they do not run beside compute. Raise the limit of locked memory "
                '(ulimit -l) or lower "host_memory" in the "offload" block.',
                format_size(pinned),
                format_size(nbytes),
                format_size(nbytes - pinned),
                refusal,
            )
        return pinned

    def unregister(self, memory: torch.Tensor) -> None:
        """Raises `RuntimeError` after a fault of the GPU, or where CUDA refuses, when all pieces were tried."""
        if not memory.numel():
            return
        refusals = []
        try:
            self.synchronize()  # the end of an engine: a copy that nobody waits for may still be under way
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
            raise RuntimeError(f"CUDA does not unpin {len(refusals)} pieces of host memory: {refusals[0]}")

    def _refusal(self, result: Any) -> str | None:
        """CUDA's words for the `result` of a call of its runtime; None where it did what it was asked."""
        if int(result) == 0:
            return None
        # CUDA keeps the error for whoever asks next for the last one: torch after its next kernel, which would seem to
        # have failed. So that kernel is one of no use.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self.torch)
        cudart: Any = torch.cuda.cudart()
        return f"{cudart.cudaGetErrorString(result)} (CUDA error {int(result)})"

    def _find_borders(self) -> None:
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
        address = host.data_ptr()
        with torch.cuda.stream(stream):
            for event in after:
                self._order(stream, event)
            # CUDA refuses a copy whose host memory lies in two pinned pieces, or in one and beside it.
            for first, last in cut(address, address + host.nbytes, self._borders):
                part = slice(first - address, last - address)
                destination.view(torch.uint8)[part].copy_(source.view(torch.uint8)[part], non_blocking=True)
        return _CudaEvent(stream)

    def computed(self) -> Event:
        return _CudaEvent(torch.cuda.current_stream(self.torch))

    def hold(self, event: Event) -> None:
        self._order(torch.cuda.current_stream(self.torch), event)

    @staticmethod
    def _order(stream: torch.cuda.Stream, event: Event) -> None:
        if isinstance(event, _CudaEvent):
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
        torch.cuda.set_device(self.torch)  # else the thread is on the first GPU, and makes a context there


def cut(start: int, stop: int, borders: Sequence[int]) -> list[tuple[int, int]]:
    """The stretches that make up [start, stop), none of which has one of `borders`, ascending, inside of it."""
    inside = borders[bisect_right(borders, start) : bisect_left(borders, stop)]
    return list(pairwise((start, *inside, stop)))


def memory_node(gpu: Any, folder: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The NUMA node that is next to a GPU, of which torch's properties are given.

    None on a machine of one node, and where the system or an older torch does not say.
    """
    place = pci_address(gpu)
    try:
        node = -1 if place is None else int((folder / place / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def pci_address(gpu: Any) -> str | None:
    """Where a GPU, of which torch's properties are given, is on the bus; None of an older torch."""
    try:
        return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    except AttributeError:
        return None


def compute_device(name: str, setting: str = '"device"') -> torch.device:
    """Returns the device that this process computes on; of several GPUs the one of its LOCAL_RANK, made the current.

    Args:
        name: "auto", "cpu" or "cuda"; "auto" is a GPU where torch finds one.
        setting: what the user gave the name to, for the message of an error.

    Raises:
        ConfigError: where there is no such device.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"there is no device {name!r}: expected auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f'{setting} is cuda, but torch finds no CUDA device; set it to "auto" or "cpu"')
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if count > 1 and torch.cuda.current_device() == 0:  # torchrun shows all to each; other launchers show one
        if local >= count:
            raise ConfigError(
                f"LOCAL_RANK is {local}, but torch finds {count_of(count, 'CUDA device')}; start as many processes"
            )
        torch.cuda.set_device(local)
    return torch.device("cuda", torch.cuda.current_device())


@functools.cache
def open_device(device: torch.device) -> Device:
    """The device object of a torch device, the same one for all engines of a process."""
    return CudaDevice(device) if device.type == "cuda" else Device(device)
