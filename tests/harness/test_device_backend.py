"""The test device hides its memory from the host, runs streams in any order that events allow, and copies as CUDA."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Iterator

import pytest
import torch

from tests import device
from tests.support.processes import warm_process

pytestmark = pytest.mark.test_device

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _late() -> Iterator[None]:
    """All work waits until a thread waits for it, unless the test says otherwise."""
    device.seed(0, lateness=1.0)
    yield
    device.set_total_memory(4 << 30)
    device.set_pin_limit(None)
    torch.accelerator.synchronize()
    torch.accelerator.memory.empty_cache()


# -- memory ------------------------------------------------------------------------------------------

READERS = {
    "a read": "ctypes.string_at(there.data_ptr(), 4)",
    "numpy": "numpy.frombuffer((ctypes.c_char * 12).from_address(there.data_ptr()), numpy.float32).sum()",
    "a tensor": "torch.frombuffer((ctypes.c_char * 12).from_address(there.data_ptr()), dtype=torch.float32).sum()",
    "a write": "ctypes.memset(there.data_ptr(), 0, 12)",
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("reader", READERS)
def test_a_host_that_touches_the_devices_memory_dies(reader: str) -> None:
    code = f"""
import ctypes, numpy, torch
from tests import device
device.load()
there = torch.ones(3, device="test")
torch.accelerator.synchronize()
print(there.cpu().sum().item(), flush=True)
{READERS[reader]}
print("survived")
"""
    done = warm_process.python(code)
    assert done.stdout == "3.0\n" and done.returncode == -signal.SIGSEGV, done.stderr


def read_on_another_stream(ordered: bool) -> float:
    """Writes on one stream and reads on another, with an event between them or without."""
    value = torch.zeros(4, device="test")
    torch.accelerator.synchronize()
    side = torch.Stream("test")
    value.fill_(1.0)
    if ordered:
        side.wait_event(torch.accelerator.current_stream().record_event())
    with side:
        read = value * 1
        side.synchronize()
        return float(read.sum().item())


def test_streams_without_an_event_give_stale_data_under_some_seeds_and_never_with_one() -> None:
    found = set()
    for seed in range(20):
        device.seed(seed, 0.6)
        found.add(read_on_another_stream(ordered=False))
        assert read_on_another_stream(ordered=True) == 4.0
    assert found == {0.0, 4.0}


def test_a_copy_from_pinned_memory_reads_it_when_the_stream_comes_there() -> None:
    source = torch.ones(4).pin_memory()
    assert source.is_pinned() and not torch.ones(4).is_pinned()
    there = source.to("test", non_blocking=True)
    source.fill_(2.0)
    assert there.sum().item() == 8, "the caller refilled it before it was read"
    there = source.to("test")
    source.fill_(3.0)
    assert there.sum().item() == 8, "a blocking copy has read it"


def test_a_copy_to_pinned_memory_is_late_and_to_other_memory_is_not() -> None:
    there = torch.full((4,), 3.0, device="test")
    pinned, other = torch.zeros(4).pin_memory(), torch.zeros(4)
    pinned.copy_(there, non_blocking=True)
    assert pinned.sum() == 0
    event = torch.accelerator.current_stream().record_event()
    event.synchronize()
    assert pinned.sum() == 12
    other.copy_(there, non_blocking=True)
    assert other.sum() == 12


def test_ctypes_reads_what_the_host_owns() -> None:
    """The counter-example of the faults above: the same read of pinned host memory is one."""
    assert ctypes.string_at(torch.ones(1).pin_memory().data_ptr(), 4) == b"\x00\x00\x80?"
