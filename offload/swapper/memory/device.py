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
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from offload.aio import aligned_empty, release_pages_at
from offload.swapper.memory.host_side import HostBlock


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


class _Thread(threading.local):
    """What a CPU device knows of the calling thread."""

    copies_alone = False
    """True if its copies must not take torch's other threads."""


class Device:
    """A device that has completed its compute by the time that torch returns: the CPU. Any thread may call it.

    "Device memory" is ordinary memory here, on which kernels may work in place (`host_addressable`).
    """

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        self.host_addressable = True
        self._thread = _Thread()

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
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(aligned_empty(nbytes), dtype=torch.uint8)

    def give_back(self, memory: torch.Tensor, regions: Sequence[tuple[int, int]]) -> None:
        """Waits for all streams and gives regions of a result of `allocate` back to the system.

        The tensor and its views stay, and must not be used before `take_back`; then the regions have any contents.

        Args:
            memory: the result of `allocate`.
            regions: (start, stop) in bytes. A device that the host cannot address gives back all of the memory.
        """
        for start, stop in regions:
            release_pages_at(memory.data_ptr() + start, stop - start)

    def take_back(self, memory: torch.Tensor) -> None:
        """Makes memory that was given back usable again by every stream, maybe at another address.

        Raises torch's error, or `OSError`, if the device has not enough; then the memory is given back as before.
        """

    def allocate_host(self, nbytes: int) -> HostBlock:
        """Allocates host memory from whole pages, for I/O and for copies to and from the device."""
        return HostBlock(buffer=aligned_empty(nbytes), releases_pages=True)

    def register(self, parts: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Pins parts of host memory for fast copies, the first part first, as far as the device grants it.

        Args:
            parts: (nbytes,) uint8 each, of `allocate_host`, from whole pages; not written yet, and not registered.

        Returns:
            The number of bytes of each part that are now pinned: 0 on a CPU, which needs none.
        """
        return (0,) * len(parts)

    def unregister(self, parts: Sequence[torch.Tensor]) -> None:
        """Waits for copies in flight and undoes `register` of these parts, before their memory is freed."""

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
        # threads than there are cores, libgomp lets none wait actively any longer, and each parallel region of the
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
        """Prepares the calling thread, which is the library's own, for copies. It calls this first.

        Args:
            computes: True if the thread runs the model.
        """
        self._thread.copies_alone = not computes
