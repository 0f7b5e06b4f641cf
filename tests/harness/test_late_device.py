"""The late device hides its memory from the host, and runs backwards on a thread of their own, as a GPU does."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import kernels, testing
from offload.engine import gradients
from tests.support import models
from tests.support.devices.backward_thread import use_backward_thread
from tests.support.devices.late_device import LateDevice, Ticks, use_device
from tests.support.oracle import processes, start, train_step

SQUARES_OF_THE_HOST = gradients.squares_of
"""As it is before a device replaces it."""

TWOS = 16
"""Elements of the memory that the accesses below reach, all of value 2."""


def _view() -> tuple[LateDevice, torch.Tensor, torch.Tensor]:
    """Returns a device, a tensor of twos in its memory, and one of ones on the host."""
    device = LateDevice(0, 0.5)
    memory = device.allocate(1 << 16).view(torch.float32)[:TWOS]
    memory.fill_(2.0)
    return device, memory, torch.ones(TWOS)


ACCESSES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "a kernel of the host reads": lambda memory, host: kernels.sum_squares(memory),
    "a kernel of the host writes": lambda memory, host: kernels.accumulate(memory, host, add=False),
    "memoryview reads": lambda memory, host: bytes(memoryview(memory.numpy())),
    "numpy reads": lambda memory, host: memory.numpy().sum(),
    "numpy writes": lambda memory, host: memory.numpy().fill(1.0),
    "a list is made": lambda memory, host: memory.tolist(),
    "ctypes reads": lambda memory, host: ctypes.string_at(memory.data_ptr(), 4),
}


def _access(name: str) -> None:
    device, memory, host = _view()
    with Ticks(device):
        ACCESSES[name](memory, host)


def _exit_code(function: Callable[..., None], *arguments: Any) -> int | None:
    """Returns how a process that calls `function` ends."""
    process = processes().Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.parametrize("name", ACCESSES)
def test_an_access_of_the_host_to_device_memory_ends_the_process(name: str) -> None:
    assert _exit_code(_access, name) == -signal.SIGSEGV
    _, memory, host = _view()
    ACCESSES[name](memory, host)  # outside of `Ticks` it is ordinary memory


def test_what_the_device_does_itself_is_let_through() -> None:
    device, memory, host = _view()
    with Ticks(device):
        assert (memory + 1).sum() == 3 * TWOS
        assert memory[0].item() == 2.0
        device.download(host, memory).wait()
        assert kernels.sum_squares(host) == 4 * TWOS
        device.upload(memory, torch.ones(TWOS)).wait()
        assert memory.sum() == TWOS
        found: list[float] = []
        device.start_kernel(lambda: found.append(kernels.sum_squares(memory)))
        device.updated().wait()
        assert found == [TWOS]


def test_the_host_is_in_order_with_itself_and_compute_is_not() -> None:
    """What the host has written into a buffer of its own is there for any copy; what compute has written may not be."""
    device = LateDevice(0, 1.0)
    memory = device.allocate(4 * TWOS).view(torch.float32)
    buffer = torch.frombuffer(bytearray(4 * TWOS), dtype=torch.float32)
    with Ticks(device):
        buffer.fill_(2.0)
        device.upload(memory, buffer).wait()
        buffer.add_(1.0)
        device.download(buffer, memory).wait()
        buffer.copy_(torch.full((TWOS,), 2.0))
        device.upload(memory, buffer).wait()
        torch.ones(TWOS).copy_(buffer)
        device.download(buffer, memory).wait()
        assert buffer.sum() == 2 * TWOS and device.broken == []
        memory.copy_(buffer)
        device.download(buffer, memory).wait()
        assert "written early" in device.broken, "as an asynchronous copy of torch's from pinned memory"
        device.record_event().wait()
        device.broken.clear()
        computed = torch.ones(TWOS)
        device.upload(memory, computed).wait()
        assert device.broken == ["copied early"]


def _train(folder: str, fault: bool) -> None:
    """Trains a step; with `fault` the host sums the squares of gradients that stay on the device."""
    device = LateDevice(0, 0.5)
    with pytest.MonkeyPatch.context() as patch:
        use_device(patch, device)
        if fault:
            testing.replace(patch, "gradient.squares", SQUARES_OF_THE_HOST)
        engine = start(models.GPT2, ("none", "none"), Path(folder), device_memory=1 << 24)
        with Ticks(device):
            train_step(engine, models.GPT2, 0)
        engine.destroy(remove=True)


@pytest.mark.parametrize("fault", [False, True])
def test_an_engine_that_gives_device_memory_to_a_kernel_of_the_host_is_seen(fault: bool, tmp_path: Path) -> None:
    assert _exit_code(_train, str(tmp_path), fault) == (-signal.SIGSEGV if fault else 0)


def test_a_backward_runs_on_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second backward within it stays there; an error and a result come back."""
    use_backward_thread(monkeypatch)
    threads: list[int] = []

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            threads.append(threading.get_ident())
            with torch.enable_grad():
                inner = torch.ones(1, requires_grad=True)
                inner.register_hook(lambda _: threads.append(threading.get_ident()))
                inner.sum().backward()
            if gradient[0] < 0:
                raise ValueError("negative")
            return 2 * gradient

    x = torch.ones(2, requires_grad=True)
    Nested.apply(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0, 2.0]
    (found,) = torch.autograd.grad(Nested.apply(x).sum(), x)
    assert found.tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match="negative"):
        (-Nested.apply(x)).sum().backward()
    assert len(threads) == 6 and set(threads) == {threads[0]} != {threading.get_ident()}
