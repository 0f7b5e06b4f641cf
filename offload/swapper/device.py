"""The compute device: all of its streams, events and copies are in here.

Three streams run beside each other. *compute* is the stream on which the calling thread gives work to torch; *upload*
brings weights, *download* takes gradients and updated states away. Work on one stream is ordered; between streams it
is ordered by events alone:

    upload     waits for the last compute that read the place it writes to (`after`)
    compute    waits for the upload of what it reads (`hold`)
    download   waits for the compute that made what it reads (`after`)
    host       waits for a copy before it reads or reuses host memory (`Event.wait`)

Who starts a copy keeps both of its memories as they are until the copy's event is done. On a CPU device the same
calls copy at once, and compute waits by blocking the thread that is about to start it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from offload.errors import BudgetError
from offload.sizes import format_size


class Event(Protocol):
    """A point in the work of a stream."""

    def done(self) -> bool:
        """Whether everything before it has been carried out."""

    def wait(self) -> None:
        """Block the calling thread until then."""


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
        """Bytes of memory of its own that nobody has taken; 0 where it has none but the host's."""
        return 0

    def register(self, memory: torch.Tensor) -> None:
        """Let `memory`, (nbytes,) uint8 of the host, be copied without another copy on the way.

        Raises `BudgetError` where it cannot be pinned.
        """

    def unregister(self, memory: torch.Tensor) -> None:
        """Undo `register`, before the memory is freed."""

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
    """A CUDA GPU. Copies between it and host memory go at the speed of the bus where `register` was called."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.host_addressable = False
        self._upload = torch.cuda.Stream(device)
        self._download = torch.cuda.Stream(device)

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch)[0])

    def register(self, memory: torch.Tensor) -> None:
        if memory.numel():
            cudart: Any = torch.cuda.cudart()
            try:
                torch.cuda.check_error(int(cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)))
            except RuntimeError as error:
                raise BudgetError(
                    f'CUDA cannot pin {format_size(memory.numel())} of host memory: {error}; lower "host_memory" in '
                    f'the "offload" block, or raise the limit of locked memory (ulimit -l)'
                ) from error

    def unregister(self, memory: torch.Tensor) -> None:
        if memory.numel():
            self.synchronize()  # the end of an engine: a copy that nobody waits for may still be under way
            cudart: Any = torch.cuda.cudart()
            torch.cuda.check_error(int(cudart.cudaHostUnregister(memory.data_ptr())))

    def upload(self, destination: torch.Tensor, source: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        return self._copy(self._upload, destination, source, after)

    def download(self, destination: torch.Tensor, source: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        return self._copy(self._download, destination, source, after)

    def _copy(
        self, stream: torch.cuda.Stream, destination: torch.Tensor, source: torch.Tensor, after: Sequence[Event]
    ) -> Event:
        with torch.cuda.stream(stream):
            for event in after:
                self._order(stream, event)
            destination.copy_(source, non_blocking=True)
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

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch)

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.torch)  # else the thread is on the first GPU, and makes a context there


def open_device(device: torch.device) -> Device:
    """The device object of a torch device."""
    return CudaDevice(device) if device.type == "cuda" else Device(device)
