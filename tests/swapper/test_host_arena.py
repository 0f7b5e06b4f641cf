"""An arena never hands out a byte twice, merges returned blocks, and keeps buffers within their class."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import BudgetError
from offload.sizes import align_up
from offload.swapper.memory.allocator import Allocator
from offload.swapper.memory.device import DONE, Device
from offload.swapper.memory.device_arena import DeviceArena, check_budget
from offload.swapper.memory.host_arena import HostArena, HostBudget

CPU = Device(torch.device("cpu"))

operations = st.lists(st.one_of(st.integers(1, 40_000), st.integers(-20, -1)), max_size=80)


@given(operations, st.booleans())
@settings(deadline=None)
def test_blocks_are_aligned_disjoint_and_come_back(steps: list[int], scatter: bool) -> None:
    space = Allocator(256 * 1024, random.Random(1) if scatter else None)
    held: list[tuple[int, int]] = []
    for step in steps:
        if step > 0:
            offset = space.take(step)
            if offset is None:
                continue
            assert offset % 4096 == 0 and offset + step <= space.nbytes
            for start, nbytes in held:
                assert offset + align_up(step) <= start or start + align_up(nbytes) <= offset
            held.append((offset, step))
        elif held:
            space.give(*held.pop(step % len(held)))
        assert space.used_bytes == sum(align_up(nbytes) for _, nbytes in held)
    for block in held:
        space.give(*block)
    assert space.take(space.nbytes) == 0, "all holes have become one again"


def test_best_fit_takes_the_smallest_hole() -> None:
    space = Allocator(5 * 4096)
    blocks = [space.take(4096) for _ in range(5)]
    space.give(blocks[0], 4096)
    space.give(blocks[2], 4096)
    space.give(blocks[3], 4096)
    assert space.take(4096) == blocks[0]


def test_a_block_that_is_returned_twice_is_noticed() -> None:
    space = Allocator(8192)
    offset = space.take(4096)
    space.give(offset, 4096)
    with pytest.raises(AssertionError):
        space.give(offset, 4096)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.sets(st.integers(0, 11)), st.integers(1, 40))
def test_what_could_be_taken_can_be(sizes: list[int], given_back: set[int], wanted: int) -> None:
    space = Allocator(40 * 4096, random.Random(0))
    blocks = [(offset, size * 4096) for size in sizes if (offset := space.take(size * 4096)) is not None]
    back = [block for index, block in enumerate(blocks) if index in given_back]
    could = space.could_take(wanted * 4096, back)
    for block in back:
        space.give(*block)
    assert (space.take(wanted * 4096) is not None) == could


def test_classes_do_not_lend_to_each_other() -> None:
    host = HostArena(HostBudget(4096, 8192, 4096, 0), CPU)
    assert host.tiles.take(4096) is not None and host.tiles.take(4096) is None
    first = host.weights.take(8192)
    assert first is not None and host.weights.take(1) is None
    first.release()
    assert host.weights.take(8192) is not None


def test_a_host_buffer_is_the_same_memory_for_io_and_for_tensors() -> None:
    with HostArena(HostBudget(0, 8192, 0, 0), CPU).weights.take(8192) as buffer:
        buffer.tensor(torch.float32).fill_(1.5)
        assert bytes(buffer.buffer[:4]) == b"\x00\x00\xc0\x3f"


def test_poison_fills_what_is_given_back() -> None:
    arena = DeviceArena(64 * 4096, CPU, poison=True)
    space_block = arena.take(4096)
    view = arena.view(space_block)
    view.zero_()
    arena.give(space_block, DONE, DONE)
    assert bool(view.view(torch.bfloat16).isnan().all()) and bool(view.view(torch.float32).isnan().all())


def test_poison_places_device_buffers_at_more_than_one_address() -> None:
    arena = DeviceArena(64 * 4096, CPU, poison=True)
    seen = set()
    for _ in range(20):
        space_block = arena.take(4096)
        seen.add(space_block.offset)
        arena.give(space_block, DONE, DONE)
    assert len(seen) > 1


def test_a_budget_that_is_too_small_is_an_error_with_the_least() -> None:
    with pytest.raises(BudgetError, match=r"host_memory is 1\.0 KiB .*least that works is 2\.0 KiB .*do this"):
        check_budget("host_memory", 1024, 2048, "do this")
