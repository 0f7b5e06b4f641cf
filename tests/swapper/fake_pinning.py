"""Pinned host memory without a GPU: a CUDA runtime that keeps book of it, and a device over that."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload import testing
from offload.aio import aligned_empty
from offload.swapper.memory.device import AcceleratorDevice, CudaHostSide, DeviceRoom

PAGE = 4096
SMALL = 4 * PAGE
WORDS = {1: "invalid argument", 2: "out of memory", 713: "memory is not registered"}


class FakeCuda:
    """CUDA's runtime, and what of `torch.cuda` needs it, on a machine without a GPU.

    `refuse` has the numbers of the calls of cudaHostRegister that are refused, the first is 0.
    """

    def __init__(self, refuse: Callable[[int], bool] = lambda call: False) -> None:
        self._refuse = refuse
        self.calls: list[tuple[str, int]] = []
        self.pinned: dict[int, int] = {}
        """Address and bytes of each registration."""
        self.asked = 0
        self.left_error = 0
        self.limit = 1 << 60
        """Bytes that may be pinned in all."""
        self.sizes: list[int] = []
        """Bytes of each call of cudaHostRegister."""
        self.faults: set[int] = set()
        """Registrations that CUDA does not give back."""
        self.synchronize: Callable[..., None] = lambda *_: None

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert address % PAGE == 0 and nbytes % PAGE == 0 and nbytes > 0 and flags == 0
        assert all(address >= first + size or address + nbytes <= first for first, size in self.pinned.items())
        self.calls.append(("register", address))
        self.asked += 1
        self.sizes.append(nbytes)
        if self._refuse(self.asked - 1) or sum(self.pinned.values()) + nbytes > self.limit:
            self.left_error = 2
            return 2
        self.pinned[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        if address in self.faults or address not in self.pinned:
            self.left_error = 713
            return 713
        del self.pinned[address]
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return WORDS[code]

    def ones(self, *size: int, device: torch.device) -> torch.Tensor:
        """As torch does after each of its kernels: whose error that is it cannot know."""
        if self.left_error:
            self.left_error = 0
            raise RuntimeError("CUDA error")
        return torch.empty(size).fill_(1.0)

    def copy_(self, destination: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """Refuses what lies in more than one registration, or in one and beside it."""
        if non_blocking:
            assert destination.nbytes == source.nbytes
            for tensor in (destination, source):
                start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
                for first, last in self.touched(tensor):
                    if not first <= start <= stop <= last:
                        raise RuntimeError("CUDA error: invalid argument")
        return torch._C.TensorBase.copy_(destination, source)

    def touched(self, tensor: torch.Tensor) -> list[tuple[int, int]]:
        """The registrations, (first, last) address, that `tensor` lies in, or in part."""
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return [
            (first, first + nbytes) for first, nbytes in self.pinned.items() if start < first + nbytes and first < stop
        ]


class FakeStream:
    def __init__(self, *_: Any) -> None: ...

    def record_event(self) -> FakeEvent:
        return FakeEvent()

    def wait_event(self, event: Any) -> None: ...


class FakeEvent:
    def query(self) -> bool:
        return True


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[AcceleratorDevice, FakeCuda]]:
    """Gives a device over a fake CUDA, which pins `chunk` bytes at a time, and `least` after refusals."""

    def make(
        refuse: Callable[[int], bool] = lambda call: False, chunk: int = SMALL, least: int = SMALL
    ) -> tuple[AcceleratorDevice, FakeCuda]:
        cuda, stream = FakeCuda(refuse), FakeStream()
        testing.replace(monkeypatch, "size.pin_chunk", chunk)
        testing.replace(monkeypatch, "size.pin_least", least)
        monkeypatch.setattr(torch, "ones", cuda.ones)
        monkeypatch.setattr(torch.Tensor, "copy_", lambda *given, **named: cuda.copy_(*given, **named))
        monkeypatch.setattr(torch, "Stream", FakeStream)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace())
        for name, value in {
            "current_stream": lambda *_: stream,
            "set_stream": lambda *_: None,
            "synchronize": lambda *given: cuda.synchronize(*given),
            "current_device_index": lambda: 0,
            "set_device_index": lambda *_: None,
        }.items():
            monkeypatch.setattr(torch.accelerator, name, value)

        def copy(device: AcceleratorDevice, destination: torch.Tensor, source: torch.Tensor) -> None:
            """The real one goes by the kind of device, and here both are the CPU."""
            (device.download if cuda.touched(destination) else device.upload)(destination, source).wait()

        testing.replace(monkeypatch, "device.copy", copy)
        testing.replace(monkeypatch, "device.room", lambda self: DeviceRoom(0, 0))
        return AcceleratorDevice(torch.device("cpu"), CudaHostSide(torch.device("cpu"))), cuda

    return make


Install = Callable[..., tuple[AcceleratorDevice, FakeCuda]]


def host_memory(nbytes: int) -> torch.Tensor:
    return torch.frombuffer(aligned_empty(max(nbytes, 1)), dtype=torch.uint8)[:nbytes]


def pinned(device: AcceleratorDevice, memory: torch.Tensor) -> int:
    """Registers `memory` as one part and returns its pinned bytes."""
    return sum(device.register([memory]))


def pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
