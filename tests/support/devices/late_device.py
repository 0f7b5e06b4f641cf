"""A CPU that behaves like a GPU at its worst: a copy is carried out when somebody waits for it, or when chance has it.

torch computes at once here, so what a stream would still be doing is kept as a record: every operation of torch is a
tick of the compute stream's clock with the stretches of memory that it read, and the stream is somewhere behind that
clock. `broken` names each order that a real GPU would not have kept:

    read early      compute read a place while the copy into it had not been waited for
    copied early    a copy was carried out of a place that compute, not yet known to be done, writes
    written early   a copy was carried out into a place that compute, not yet known to be done, reads
    changed early   the source of a copy was changed, or freed, before the copy was carried out

Inside of `Ticks` the device's arena is in pages that the host cannot touch (`protected_memory`): they are reachable in
an operation of torch, a copy that is carried out, and a kernel of the device. A backward runs on another thread than
its forward (`backward_thread`).
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from offload import testing
from offload.engine import gradients
from offload.swapper.memory import device_arena
from offload.swapper.memory.device import Device, DeviceRoom, Event
from offload.torch_internals import modes
from tests.support.devices.backward_thread import use_backward_thread
from tests.support.devices.protected_memory import ProtectedMemory


class _Mark:
    """The end of all compute up to a tick."""

    def __init__(self, device: LateDevice, tick: int) -> None:
        self._device, self.tick = device, tick

    def done(self) -> bool:
        with self._device.lock:
            self._device.drift()
            return self._device.progress >= self.tick

    def wait(self) -> None:
        with self._device.lock:
            self._device.progress = max(self._device.progress, self.tick)


class _Kernels:
    """All kernels that were submitted to the update stream."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device

    def done(self) -> bool:
        return not self._device._kernels

    def wait(self) -> None:
        self._device.run_kernels()


class _Copy:
    """A copy that was submitted to a stream."""

    def __init__(
        self, device: LateDevice, destination: torch.Tensor, source: torch.Tensor, after: Sequence[Event]
    ) -> None:
        self._device, self._after = device, tuple(after)
        self.start, self.nbytes = destination.data_ptr(), destination.nbytes
        self._source, self._storage = source.data_ptr(), StorageWeakRef(source.untyped_storage())
        self._sum = self._checksum()
        self.carried_out = self.finished = False
        with device.memory.window():
            ctypes.memset(self.start, 0xFF, self.nbytes)  # NaN, in any dtype: who reads it early shall see it

    def done(self) -> bool:
        with self._device.lock:
            self._device.drift()
            return self.finished

    def wait(self) -> None:
        with self._device.lock:
            self._device.run_until(self)

    def carry_out(self) -> None:
        """Copies the bytes. As far as the host can know, that may happen at any time until `finish`."""
        if self.carried_out:
            return
        for event in self._after:
            event.wait()
        if self._is_as_it_was():
            self._device.check_made(self._source, self.nbytes)
            self._device.check_written(self.start, self.nbytes)
            with self._device.memory.window():
                ctypes.memmove(self.start, self._source, self.nbytes)
        self.carried_out = True

    def finish(self) -> None:
        self.carry_out()
        self._is_as_it_was()
        self.finished = True

    def _is_as_it_was(self) -> bool:
        """Returns whether the source has not changed since the copy was submitted."""
        if self._storage.expired() or self._checksum() != self._sum:
            self._device.broken.append("changed early")
            return False
        return True

    def ready(self) -> bool:
        return all(event.tick <= self._device.progress for event in self._after if isinstance(event, _Mark))

    def _checksum(self) -> int:
        with self._device.memory.window():
            return zlib.crc32((ctypes.c_char * self.nbytes).from_address(self._source))


class LateDevice(Device):
    """The device of the module's docstring. `lateness` is the chance that nothing runs when it could."""

    def __init__(self, seed: int, lateness: float) -> None:
        super().__init__(torch.device("cpu"))
        self.host_addressable = False
        self.broken: list[str] = []
        self.memory = ProtectedMemory()
        self.lock = threading.RLock()
        self.progress = 0
        self.copies = self.downloads = self.downloaded = self.uploaded = 0
        self.spare = DeviceRoom(0, 0)
        """What the first step is said to leave of the device's memory."""
        self._chance, self._lateness = random.Random(seed), lateness
        self._clock = 0
        self._streams: dict[str, list[_Copy]] = {"upload": [], "download": []}
        self._entered = threading.local()
        self._reads: list[tuple[int, int, int]] = []  # tick, first address, last address
        self._writes: list[tuple[int, int, int]] = []
        self._kernels: list[Callable[[], None]] = []

    def room(self) -> DeviceRoom:
        return self.spare

    def allocate(self, nbytes: int) -> torch.Tensor:
        return self.memory.allocate(nbytes)

    def give_back(self, memory: torch.Tensor, regions: Sequence[tuple[int, int]]) -> None:
        self._synchronize()
        super().give_back(memory, regions)

    def take_back(self, memory: torch.Tensor) -> None:
        super().take_back(memory)
        self._synchronize()

    def _synchronize(self) -> None:
        """Waits for all compute and all copies, as an accelerator does where it gives memory away or takes it again."""
        with self.lock:
            self.progress = self._clock
            for stream in self._streams.values():
                while stream:
                    stream.pop(0).finish()

    def upload(self, destination: torch.Tensor, source: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        self.uploaded += source.nbytes
        return self._give("upload", destination, source, after)

    def download(self, destination: torch.Tensor, source: torch.Tensor, after: Sequence[Event] = ()) -> Event:
        self.downloads += 1
        self.downloaded += source.nbytes
        return self._give("download", destination, source, after)

    def _give(self, stream: str, destination: torch.Tensor, source: torch.Tensor, after: Sequence[Event]) -> Event:
        with self.lock:
            copy = _Copy(self, destination, source, after)
            self.copies += 1
            self._streams[stream].append(copy)
            self.drift()
            return copy

    def record_event(self) -> Event:
        with self.lock:
            return _Mark(self, self._clock)

    def wait_event(self, event: Event) -> None:
        if isinstance(event, _Copy):
            with self.lock:
                for stream in self._streams.values():
                    for copy in stream[: stream.index(event) + 1 if event in stream else 0]:
                        copy.carry_out()
        elif not isinstance(event, _Mark):  # compute is in order with itself
            event.wait()

    def drift(self) -> None:
        """Lets some time pass on every stream."""
        if self._lateness == 0:
            self.progress = self._clock
        while self._chance.random() >= self._lateness and self.progress < self._clock:
            self.progress += 1 + int(self._chance.random() * (self._clock - self.progress))
            self.progress = min(self.progress, self._clock)
        for stream in self._streams.values():
            while stream and self._chance.random() >= self._lateness and stream[0].ready():
                stream.pop(0).finish()

    def run_until(self, copy: _Copy) -> None:
        """Finishes the copies of a stream up to `copy`."""
        for stream in self._streams.values():
            while copy in stream:
                stream.pop(0).finish()

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        with self.memory.window():  # kernels run at once, unless a test hands them to `start_kernel`
            yield

    def updated(self) -> Event:
        return _Kernels(self)

    def enter_thread(self, *, computes: bool = False) -> None:
        # The library's threads may copy by torch, as `squares` to the host. The thread ends before the device, or works
        # for engines on other devices as well, one after the other.
        if getattr(self._entered, "mode", None) is None:
            self._entered.mode = Operations(self).__enter__()

    def start_kernel(self, kernel: Callable[[], None]) -> None:
        """Records a kernel that runs when the host waits for the update stream."""
        self._kernels.append(kernel)

    def run_kernels(self) -> None:
        with self.memory.window():
            while self._kernels:
                self._kernels.pop(0)()

    def tick(self, ranges: Sequence[tuple[int, int]], of_compute: Sequence[tuple[int, int]]) -> None:
        """Records an operation of torch that reads, or writes, `ranges` of memory: (first address, last address).

        What is not `of_compute` is the host's: it has been read when the operation returns.
        """
        with self.lock:
            self._clock += 1
            pending = [copy for stream in self._streams.values() for copy in stream if not copy.carried_out]
            for first, last in ranges:
                if any(copy.start < last and first < copy.start + copy.nbytes for copy in pending):
                    self.broken.append("read early")
            self._reads += [(self._clock, first, last) for first, last in of_compute]
            self.drift()
            self._reads = [read for read in self._reads if read[0] > self.progress]

    def made(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Records the ranges that the operation of the last tick has written."""
        with self.lock:
            self._writes += [(self._clock, first, last) for first, last in ranges]
            self._writes = [write for write in self._writes if write[0] > self.progress]

    def check_kernel(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Notes what is still under way in the ranges that a kernel reads and writes without waiting."""
        with self.lock:
            pending = [copy for stream in self._streams.values() for copy in stream if not copy.carried_out]
            for first, last in ranges:
                if any(copy.start < last and first < copy.start + copy.nbytes for copy in pending):
                    self.broken.append("read early")
                self.check_written(first, last - first)

    def check_made(self, start: int, nbytes: int) -> None:
        """Notes where compute that may still be under way writes what a copy reads."""
        if any(tick > self.progress and first < start + nbytes and start < last for tick, first, last in self._writes):
            self.broken.append("copied early")

    def check_written(self, start: int, nbytes: int) -> None:
        """Notes where compute that may still be under way reads what a copy writes."""
        if any(tick > self.progress and first < start + nbytes and start < last for tick, first, last in self._reads):
            self.broken.append("written early")


class Operations(TorchDispatchMode):
    """A dispatch mode in which operations of torch on this thread reach the memory of a `LateDevice`."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._carried_out(func, args, kwargs, [] if func.is_view else ranges(tensors_in((args, kwargs))))

    def _carried_out(self, func: Any, args: Any, kwargs: Any, touched: Sequence[tuple[int, int]]) -> Any:
        """Returns the result of an operation that reads, or writes, the ranges `touched`."""
        if not self._device.memory.holds(touched):
            return func(*args, **(kwargs or {}))
        with self._device.memory.window():
            return func(*args, **(kwargs or {}))


class Ticks(Operations):
    """`Operations` that are reported to the device as compute. The host cannot touch its memory meanwhile."""

    def __enter__(self) -> Ticks:
        self._device.memory.guard(1)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._device.memory.guard(-1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [] if func.is_view else tensors_in((args, kwargs))
        touched = ranges(tensors)
        on_device = self._device.memory.holds(touched)
        self._device.tick(touched, touched if on_device else ranges(_not_of_host(tensors)))
        result = self._carried_out(func, args, kwargs, touched)
        written = [] if func.is_view else tensors_in(result)
        self._device.made(ranges(written if on_device else _not_of_host(written)))
        return result


def _not_of_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns those in torch's own memory. Any other, as of a buffer of the queue, is the host's.

    The host is in order with itself: what an operation without the device's memory reads and writes there is done when
    it returns.
    """
    return [t for t in tensors if t.is_meta or t.untyped_storage().resizable()]


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Returns the tensors of an operation's arguments or results: alone, or in lists, tuples and dicts.

    Torch's `tree_leaves` asks a registry about each leaf, which took most of the time of a tick.
    """
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return []
    return [tensor for each in tree for tensor in tensors_in(each)]


def ranges(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Returns the memory of tensors: (first address, last address) of each."""
    return [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors if t.nbytes and not t.is_meta]


def use_device(monkeypatch: pytest.MonkeyPatch, device: Device, always: bool = True) -> None:
    """Engines made from now on use this device.

    Args:
        monkeypatch: ends it.
        device: the device.
        always: False lets a backward of a `LateDevice` run on its caller's thread if that asks torch for it.
    """
    testing.replace(monkeypatch, "device.open", lambda _: device)
    if isinstance(device, LateDevice):
        use_backward_thread(monkeypatch, always)
        _let_kernels_in(monkeypatch, device)
        # `Operations` is a part of the device, and no mode of a user, under which an engine would compute otherwise.
        testing.replace(monkeypatch, "modes.foreign", lambda: None)


_SQUARES_OF, _WITHOUT_MODES = gradients.squares_of, modes.without_modes
"""The engine's own, also where a test has replaced them already."""


def _let_kernels_in(monkeypatch: pytest.MonkeyPatch, device: LateDevice) -> None:
    """Opens a window for what the engine computes on the device beside the operations that a dispatch mode sees."""

    def squares_of_device(values: torch.Tensor) -> torch.Tensor:
        with device.memory.window():  # on a GPU a kernel
            return _SQUARES_OF(values)

    @contextlib.contextmanager
    def without_other_modes() -> Iterator[None]:
        with _WITHOUT_MODES(), Operations(device):
            yield

    testing.replace(monkeypatch, "gradient.squares", squares_of_device)
    for module in (modes, device_arena):
        monkeypatch.setattr(module, "without_modes", without_other_modes)
