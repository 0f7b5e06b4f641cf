"""The late device hides its memory from the host, and runs backwards on a thread of their own, as a GPU does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.support.backward_thread import use_backward_thread

ROOT = Path(__file__).parents[1]

SETUP = """
import torch
from offload import kernels
from tests.support.late_device import LateDevice, Ticks
device = LateDevice(0, 0.5)
memory = device.allocate(1 << 16).view(torch.float32)
host = torch.ones(16)
with Ticks(device):
    memory.fill_(2.0)
    {}
print("reached the end")
"""

ACCESSES = {
    "a kernel of the host reads": "kernels.sum_squares(memory[:16])",
    "a kernel of the host writes": "kernels.accumulate(memory[:16], host, add=False)",
    "memoryview reads": "bytes(memoryview(memory[:16].numpy()))",
    "numpy reads": "memory[:16].numpy().sum()",
    "numpy writes": "memory[:16].numpy()[0] = 1.0",
    "a list is made": "memory[:16].tolist()",
    "ctypes reads": "import ctypes; ctypes.string_at(memory.data_ptr(), 4)",
}
ALLOWED = {
    "an operation of torch": "assert (memory + 1).sum() == 3 * memory.numel()",
    "one number": "assert memory[0].item() == 2.0",
    "an upload": "device.upload(memory[:16], host).wait(); assert memory[:16].sum() == 16",
    "a download": "device.download(host, memory[:16]).wait(); assert kernels.sum_squares(host) == 64",
    "a kernel of the device": "device.start_kernel(lambda: kernels.sum_squares(memory[:16])); device.updated().wait()",
}


def run_in_process(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SETUP.format(line)], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True
    )


@pytest.mark.parametrize("name", ACCESSES)
def test_an_access_of_the_host_to_device_memory_ends_the_process(name: str) -> None:
    done = run_in_process(ACCESSES[name])
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert "reached the end" not in done.stdout


def test_what_the_device_does_itself_is_let_through() -> None:
    done = run_in_process("; ".join(ALLOWED.values()))
    assert done.returncode == 0 and "reached the end" in done.stdout, done.stderr


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
