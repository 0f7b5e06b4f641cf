"""The test device hides its memory from the host, runs streams in any order that events allow, and copies as CUDA."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Iterator

import pytest
import torch

from offload.aio import aligned_empty
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


def test_memory_freed_on_a_stream_is_handed_out_at_once_for_the_same_stream() -> None:
    first = torch.full((1000,), 1.0, device="test")
    address = first.data_ptr()
    result = first + 1
    del first
    again = torch.full((1000,), 5.0, device="test")
    assert again.data_ptr() == address
    side = torch.Stream("test")
    del again
    with side:
        other = torch.full((1000,), 7.0, device="test")
    assert other.data_ptr() != address, "a block belongs to the stream that it was allocated on"
    assert torch.equal(result.cpu(), torch.full((1000,), 2.0)), "in the order of the stream"


def test_a_recorded_stream_keeps_a_block_until_its_work_is_done() -> None:
    side = torch.Stream("test")
    kept = torch.full((1000,), 1.0, device="test")
    address = kept.data_ptr()
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        result = kept * 2
    kept.record_stream(side)
    del kept
    assert torch.empty(1000, device="test").data_ptr() != address
    side.synchronize()
    assert torch.empty(1000, device="test").data_ptr() == address
    assert result.cpu().sum().item() == 2000


def test_memory_has_an_end_and_the_cache_is_given_back_before_it() -> None:
    torch.accelerator.memory.empty_cache()
    before = device.memory()
    device.set_total_memory(before["reserved"] + 40 * MIB)
    one = torch.empty(30 * MIB, dtype=torch.uint8, device="test")
    assert torch.accelerator.memory.memory_allocated() - before["allocated"] == 30 * MIB
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(20 * MIB, dtype=torch.uint8, device="test")
    del one
    assert device.memory()["reserved"] - before["reserved"] == 30 * MIB, "cached"
    torch.empty(36 * MIB, dtype=torch.uint8, device="test")
    assert device.memory()["retries"] == before["retries"] + 2
    torch.accelerator.memory.empty_cache()
    assert device.memory()["reserved"] == before["reserved"]


def test_new_memory_is_nan() -> None:
    assert torch.empty(9, device="test").isnan().all().item()


# -- streams -----------------------------------------------------------------------------------------


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


def order(seed: int) -> list[int]:
    """The order in which four streams add their number to one list."""
    device.seed(seed, 0.5)
    place, out = torch.zeros(1, dtype=torch.int64, device="test"), torch.zeros(9, dtype=torch.int64, device="test")
    torch.accelerator.synchronize()
    streams = [torch.Stream("test") for _ in range(4)]
    numbers = [torch.tensor([each + 1], device="test") for each in range(4)]
    torch.accelerator.synchronize()
    one = torch.ones(1, dtype=torch.int64, device="test")
    torch.accelerator.synchronize()
    for stream, number in zip(streams, numbers, strict=True):
        with stream:
            out.index_copy_(0, place, number)
            place.add_(one)
    torch.accelerator.synchronize()
    return [each for each in out.tolist() if each]


def test_a_seed_repeats_an_order_and_another_gives_another() -> None:
    assert order(3) == order(3)
    assert len({tuple(order(seed)) for seed in range(12)}) > 3


def test_an_event_is_done_when_its_stream_has_come_there() -> None:
    event = torch.Event("test")
    assert event.query(), "of a stream that it was not recorded on"
    torch.ones(3, device="test")
    torch.accelerator.current_stream().record_event(event)
    assert not event.query()
    event.synchronize()
    assert event.query()
    torch.ones(3, device="test")
    stream = torch.accelerator.current_stream()
    assert not stream.query()
    while not stream.query():  # a thread that asks for ever is answered in the end
        pass


def test_a_current_stream_belongs_to_a_thread() -> None:
    side, seen = torch.Stream("test"), []
    with side:
        thread = threading.Thread(target=lambda: seen.append(torch.accelerator.current_stream()))
        thread.start()
        thread.join()
        assert torch.accelerator.current_stream() == side
    assert seen[0] == torch.accelerator.current_stream() != side


def test_hooks_run_on_a_thread_of_autograd() -> None:
    weight = torch.ones(3, device="test", requires_grad=True)
    threads: list[int] = []
    weight.register_post_accumulate_grad_hook(lambda _: threads.append(threading.get_ident()))
    (weight * 2).sum().backward()
    assert threads and threads[0] != threading.get_ident()


# -- copies ------------------------------------------------------------------------------------------


def test_a_copy_from_pinned_memory_reads_it_when_the_stream_comes_there() -> None:
    source = torch.ones(4).pin_memory()
    assert source.is_pinned() and not torch.ones(4).is_pinned()
    there = source.to("test", non_blocking=True)
    source.fill_(2.0)
    assert there.sum().item() == 8, "the caller refilled it before it was read"
    there = source.to("test")
    source.fill_(3.0)
    assert there.sum().item() == 8, "a blocking copy has read it"


def test_a_copy_from_other_memory_reads_it_at_the_call() -> None:
    for seed in range(8):
        device.seed(seed, 1.0)
        source = torch.ones(4)
        there = source.to("test", non_blocking=True)
        source.fill_(2.0)
        assert there.sum().item() == 4


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


def test_pinned_memory_that_is_freed_stays_until_its_copy_is_done() -> None:
    source = torch.full((1000,), 3.0).pin_memory()
    there = source.to("test", non_blocking=True)
    del source
    others = [torch.zeros(1000).pin_memory() for _ in range(8)]
    assert there.sum().item() == 3000 and len(others) == 8


def test_host_memory_is_registered_by_the_rules_of_cuda() -> None:
    memory = torch.frombuffer(aligned_empty(64 * 1024), dtype=torch.uint8)
    memory.fill_(1)
    start, half = memory.data_ptr(), 32 * 1024
    assert device.register(start, half) == 0
    assert device.register(start + half - 4096, half) == 712, "some of it is pinned"
    device.set_pin_limit(half)
    assert device.register(start + half, half) == 2
    there = torch.zeros(memory.numel(), dtype=torch.uint8, device="test")
    with pytest.raises(RuntimeError, match="reaches over the end of pinned memory"):
        there.copy_(memory, non_blocking=True)
    device.set_pin_limit(None)
    assert device.register(start + half, half) == 0
    with pytest.raises(RuntimeError, match="reaches over the end of pinned memory"):
        there.copy_(memory, non_blocking=True)
    for part in (slice(0, half), slice(half, None)):
        assert memory[part].is_pinned()
        there[part].copy_(memory[part], non_blocking=True)
    assert there.long().sum().item() == memory.numel()
    assert device.unregister(start) == 0 and device.unregister(start) == 713
    assert device.unregister(start + half) == 0


def test_memory_unregistered_under_a_copy_is_an_error() -> None:
    memory = torch.frombuffer(aligned_empty(4096), dtype=torch.uint8)
    assert device.register(memory.data_ptr(), 4096) == 0
    torch.zeros(4096, dtype=torch.uint8, device="test").copy_(memory, non_blocking=True)
    device.unregister(memory.data_ptr())
    with pytest.raises(RuntimeError, match="unregistered under a copy"):
        torch.accelerator.synchronize()


def test_ctypes_reads_what_the_host_owns() -> None:
    """The counter-example of the faults above: the same read of pinned host memory is one."""
    assert ctypes.string_at(torch.ones(1).pin_memory().data_ptr(), 4) == b"\x00\x00\x80?"
