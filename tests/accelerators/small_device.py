"""A late device with a size: activations that do not fit beside the arena raise torch's error, as a GPU's do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from offload import testing
from offload.swapper.memory.device import DeviceRoom, Shortages
from tests.support.devices.late_device import LateDevice, use_device


class SmallDevice(LateDevice):
    """A device of `total` bytes, with the counters of torch's allocator.

    Its arena is counted for as long as the memory is referenced; activations are what `need` says.
    """

    def __init__(self, total: int, seed: int = 0, lateness: float = 0.5) -> None:
        super().__init__(seed, lateness)
        self.total, self.emptied = total, 0
        self._kept = 0
        self._arena: list[tuple[StorageWeakRef, int]] = []
        self.counted = Shortages(0, 0)
        self.uncounted = False
        """True for a device whose allocator counts nothing."""

    @property
    def arena(self) -> int:
        """Bytes of all arenas that are referenced."""
        self._arena = [each for each in self._arena if not each[0].expired()]
        return sum(nbytes for _, nbytes in self._arena)

    def allocate(self, nbytes: int) -> torch.Tensor:
        if nbytes > self.total - self.arena:
            raise torch.OutOfMemoryError("CUDA out of memory: the arena")
        memory = super().allocate(nbytes)
        self._arena.append((StorageWeakRef(memory.untyped_storage()), nbytes))
        return memory

    def room(self) -> DeviceRoom:
        return DeviceRoom(max(self.total - self.arena - self._kept, 0), self._kept)

    def need(self, nbytes: int) -> None:
        """Allocates and frees activations of `nbytes`."""
        if nbytes > self.total - self.arena:
            retries, errors = self.counted
            self.counted = self.counted if self.uncounted else Shortages(retries + 1, errors + 1)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        self._kept = max(self._kept, nbytes)

    def retry(self) -> None:
        """Counts an allocation for which torch freed its cache."""
        self.counted = self.counted._replace(retries=self.counted.retries + 1)

    def empty_cache(self) -> None:
        self.emptied += 1
        self._kept = 0


def use_small_device(monkeypatch: pytest.MonkeyPatch, device: SmallDevice) -> None:
    """Engines made from now on use this device and its counters."""
    use_device(monkeypatch, device)
    testing.replace(monkeypatch, "device.shortages", lambda _: device.counted)
    testing.replace(monkeypatch, "device.empty_cache", lambda _: device.empty_cache())


class Hungry:
    """The appetite of a module: the bytes of activations that its forward, or its backward, needs."""

    def __init__(self, device: SmallDevice, module: nn.Module) -> None:
        self._device = device
        self.forward = self.backward = 0
        self.calls = 0
        module.register_forward_hook(self._run)

    def _run(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.calls += 1
        self._device.need(self.forward)
        first = output[0] if isinstance(output, tuple) else output
        if first.requires_grad:
            first.register_hook(self._unrun)

    def _unrun(self, gradient: torch.Tensor) -> None:
        self._device.need(self.backward)
