"""Of the host arena that is pinned which the device copies, what is copied most first."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from offload.swapper.memory.device import Device
from offload.swapper.memory.host_arena import HostArena, HostBudget, HostBuffer, HostMemory, PinnedRegions
from tests.swapper.fake_pinning import PAGE, SMALL, FakeCuda, Install, install

__all__ = ["install"]  # fixtures

CLASSES = HostBudget(
    tiles=8 * SMALL, weights=2 * SMALL, gradients=SMALL, resident=6 * SMALL, staging=SMALL, cache=4 * SMALL
)
COPIED = PinnedRegions(resident=2 * SMALL, promoted=SMALL, tiles=False)
PINNED = {"staging": SMALL, "weights": 2 * SMALL, "gradients": SMALL, "cache": 3 * SMALL, "copied": 2 * SMALL}


def arena_over(device: Device, copied: PinnedRegions | None = COPIED) -> HostArena:
    return HostArena(CLASSES, device, copied=copied)


def lies_in(cuda: FakeCuda, buffer: HostBuffer | None) -> bool:
    """Returns True if the buffer is pinned, False if none of it is."""
    assert buffer is not None
    memory = buffer.tensor(torch.uint8)
    inside = sum(
        min(last, memory.data_ptr() + len(memory)) - max(first, memory.data_ptr())
        for first, last in cuda.touched(memory)
    )
    assert inside in (0, len(memory)), "all of a buffer is pinned, or none"
    return inside > 0


def test_what_the_device_copies_is_pinned_and_nothing_else(install: Install) -> None:
    device, cuda = install()
    arena = arena_over(device)
    assert arena.pinned == PINNED | {"tiles": 0} and arena.pinned_bytes == sum(cuda.pinned.values()) == 9 * SMALL
    for region in (arena.staging, arena.gradients):
        assert lies_in(cuda, region.take(SMALL))
    assert all(lies_in(cuda, arena.take_copied(SMALL)) for _ in range(2)), "weights and gradients of the HOST tier"
    assert not lies_in(cuda, arena.resident.take(4 * SMALL)), "moments of the HOST tier"
    assert not lies_in(cuda, arena.weights.take_last(SMALL)), "moments in memory of the cache"
    assert all(lies_in(cuda, arena.weights.take(SMALL)) for _ in range(5)), "weights and their cache"
    assert not lies_in(cuda, arena.tiles.take(8 * SMALL)), "tiles that the CPU alone reads"
    arena.close()
    assert not cuda.pinned


def test_tiles_are_pinned_last_if_states_live_on_the_device(install: Install) -> None:
    device, cuda = install()
    arena = arena_over(device, replace(COPIED, tiles=True))
    assert list(arena.pinned.items()) == [*PINNED.items(), ("tiles", 8 * SMALL)]
    assert lies_in(cuda, arena.tiles.take(8 * SMALL)) and not lies_in(cuda, arena.resident.take(4 * SMALL))
    arena.close()


def test_a_cpu_pins_nothing_and_keeps_one_class_of_host_partitions() -> None:
    arena = arena_over(Device(torch.device("cpu")), None)
    assert arena.pinned == {} and arena.pinned_bytes == 0 and "copied" not in arena.regions
    buffer = arena.take_copied(SMALL)
    assert buffer is not None and buffer.offset == 0 and arena.resident.space.used_bytes == SMALL
    arena.close()


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (0, {}),
        (SMALL, {"staging": SMALL}),
        (3 * SMALL, {"staging": SMALL, "weights": 2 * SMALL}),
        (4 * SMALL + PAGE, {"staging": SMALL, "weights": 2 * SMALL, "gradients": SMALL, "cache": PAGE}),
        (6 * SMALL, {"staging": SMALL, "weights": 2 * SMALL, "gradients": SMALL, "cache": 2 * SMALL}),
        (8 * SMALL, PINNED | {"copied": SMALL}),
        (100 * SMALL, PINNED),
    ],
)
def test_under_a_limit_of_all_pinned_memory_what_is_copied_most_is_pinned(
    limit: int, expected: dict[str, int], install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    """As under WSL, where CUDA refuses a piece that exceeds the limit as a whole."""
    device, cuda = install(chunk=64 * SMALL, least=PAGE)
    cuda.limit = limit
    arena = arena_over(device)
    assert {name: nbytes for name, nbytes in arena.pinned.items() if nbytes} == expected
    assert arena.pinned_bytes == sum(cuda.pinned.values()) <= limit
    assert len(caplog.records) == (arena.pinned_bytes < sum(PINNED.values())), "one warning for all of the parts"
    arena.close()
    assert not cuda.pinned and not cuda.left_error


def test_the_cache_that_another_engine_takes_is_unpinned_and_pinned_for_that_engine(install: Install) -> None:
    device, cuda = install()
    memory = HostMemory()
    first: list[HostArena] = []
    first.append(HostArena(CLASSES, device, memory, 22 * SMALL, lambda: first[0].drop_cache(), COPIED))
    small = HostBudget(tiles=SMALL, weights=SMALL, gradients=0, resident=SMALL)
    other = HostArena(small, device, memory, 22 * SMALL, copied=PinnedRegions(resident=SMALL, promoted=0, tiles=False))
    assert first[0].pinned == {name: PINNED.get(name, 0) for name in first[0].pinned} and "cache" not in first[0].pinned
    assert other.pinned["weights"] == other.pinned["copied"] == SMALL
    assert lies_in(cuda, other.take_copied(SMALL)) and not lies_in(cuda, other.tiles.take(SMALL))
    first[0].close()
    assert sum(cuda.pinned.values()) == other.pinned_bytes
    other.close()
    assert not cuda.pinned and not cuda.left_error


@pytest.mark.parametrize("interrupted_at", range(5))
def test_ctrl_c_while_an_arena_is_pinned_leaves_no_arena(interrupted_at: int, install: Install) -> None:
    device, cuda = install()
    plain, memory = cuda.cudaHostRegister, HostMemory()

    def interrupted(address: int, nbytes: int, flags: int) -> int:
        if cuda.asked == interrupted_at:
            raise KeyboardInterrupt
        return plain(address, nbytes, flags)

    cuda.cudaHostRegister = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        HostArena(CLASSES, device, memory, copied=COPIED)
    assert not cuda.pinned and memory.arenas == ()
    cuda.cudaHostRegister = plain  # type: ignore[method-assign]
    HostArena(CLASSES, device, memory, 22 * SMALL, copied=COPIED).close()
    assert not cuda.pinned
