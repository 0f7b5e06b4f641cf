"""Host memory of a run: what each class of buffers needs, the default budget and its division, from sizes alone."""

from __future__ import annotations

from typing import NamedTuple

from offload.layout.budgets.device import beside_arenas, divide_device
from offload.layout.budgets.machine import CHUNK, STAGING_BUFFERS, WINDOWS, Machine
from offload.layout.modes import Mode
from offload.layout.tiers import Partitions, PlacementRequest, TierMap, configured, demotions, tier_nbytes, with_tier
from offload.layout.tile_sizes import pipeline, tile_growth
from offload.sizes import MIB, PAGE, align_up
from offload.states import State, Tier
from offload.swapper.memory.host_arena import Classes

HOST_SHARE = 0.8
"""Fraction of the free host memory that the default budget takes at most; where the device computes there, of what its
arena and `beside_arenas` leave."""
_ACTIVATIONS = 512 * MIB
"""Bytes that the default budget leaves to activations at least, where the device computes in host memory."""
_STREAM_NBYTES = 16 * MIB
"""Bytes of the least host buffer of weights. Larger units are read in chunks if two buffers of them do not fit."""
_WINDOW_NBYTES = 32 * MIB
"""Bytes of the largest host buffer of a gradient that spills."""


class HostNeed(NamedTuple):
    """Bytes of each class of host buffers for given tiers: the least that works, and the most that is useful."""

    least: Classes
    most: Classes


def least_host(parts: Partitions, mode: Mode, request: PlacementRequest, machine: Machine) -> Classes:
    """Returns the smallest classes of host buffers that work: after any demotions, with large units read in chunks."""
    configured_tiers = configured(parts, request, mode.weight_dtype.itemsize)
    ways = demotions(configured_tiers) if machine.drives else iter((configured_tiers,))
    return min((host_needs(parts, mode, request, machine, tiers).least for tiers in ways), key=sum)


def default_budget(
    parts: Partitions, mode: Mode, request: PlacementRequest, machine: Machine, configured_tiers: TierMap
) -> int:
    """Returns the bytes of host memory that a run takes at most if the config names no budget."""
    most = int(HOST_SHARE * machine.free_host)
    if not machine.host_addressable:
        return most
    # In a small container gradients and activations would have no room beside both arenas, and the kernel would end the
    # run. Whether weights are tied is not known here.
    arena, _ = divide_device(parts, mode, request, machine, configured_tiers)
    rest = machine.free_host - arena - beside_arenas(parts)
    rest = min(int(HOST_SHARE * rest), rest - _ACTIVATIONS)
    return min(most, max(rest, _least_on_disk(parts, mode, request, machine, configured_tiers)))


def _least_on_disk(
    parts: Partitions, mode: Mode, request: PlacementRequest, machine: Machine, configured_tiers: TierMap
) -> int:
    """Returns the least bytes of host memory after all moves to DISK, if there is a drive to move to."""
    ways = [configured_tiers]
    if machine.drives:
        host = [(unit, state) for unit, row in enumerate(configured_tiers) for state in row if row[state] is Tier.HOST]
        states = [(unit, state) for unit, state in host if state is not State.GRAD]
        ways = [with_tier(configured_tiers, moved, Tier.DISK) for moved in (host, states)]
    return min(sum(host_needs(parts, mode, request, machine, tiers).least) for tiers in ways)


def host_needs(parts: Partitions, mode: Mode, request: PlacementRequest, machine: Machine, tiers: TierMap) -> HostNeed:
    """Returns the bytes of each class of host buffers under `tiers`."""
    small, large = pipeline(parts, mode, request, tiers)
    largest = max((n for _, n in _disk_weights(parts, tiers)), default=0)
    buffer = 0 if machine.host_addressable else min(CHUNK * 4, align_up(2 * parts.largest_gradient))
    gradients = WINDOWS * align_up(window_nbytes(parts, tiers))
    kept, staging = tier_nbytes(parts, tiers, Tier.HOST), STAGING_BUFFERS * buffer
    # Two buffers of weights: one is uploaded while the next is read.
    return HostNeed(
        Classes(small, 2 * align_up(min(largest, _STREAM_NBYTES)), gradients, kept, staging),
        Classes(large, 2 * align_up(largest), gradients, kept, staging),
    )


def divide_host(
    parts: Partitions, request: PlacementRequest, mode: Mode, tiers: TierMap, need: HostNeed, budget: int
) -> Classes:
    """Returns the classes of host buffers within `budget`, which must hold at least `need.least`."""
    least, most = need
    # Spare memory goes first to weights, up to two buffers of the largest unit, then to tiles, then to the cache.
    room = budget - sum(least)
    weights = min(most.weights, (least.weights + room) // (2 * PAGE) * (2 * PAGE))
    room -= weights - least.weights
    step = tile_growth(parts, mode, tiers)
    tiles = min(most.tiles, least.tiles + (room // step * step if step else 0))
    room -= tiles - least.tiles
    cache = _cacheable(parts, tiers, weights)
    # Without an explicit budget, or with a limit in the config, the cache holds no more than the config asks for.
    if request.host_memory is None or request.cached_weights is not None:
        cache = min(cache, max((request.cached_weights or 0) * mode.weight_dtype.itemsize - weights, 0))
    return least._replace(tiles=tiles, weights=weights, cache=min(cache, room) // PAGE * PAGE)


def window_nbytes(parts: Partitions, tiers: TierMap) -> int:
    """Returns the bytes of one window of spilling gradients; 0 if none spills."""
    spilled = [
        row[State.GRAD]
        for row, row_tiers in zip(parts.nbytes, tiers, strict=True)
        if row_tiers.get(State.GRAD) is Tier.DISK
    ]
    return min(max(spilled, default=0), max(_WINDOW_NBYTES, CHUNK * parts.gradient_dtype.itemsize))


def _disk_weights(parts: Partitions, tiers: TierMap) -> list[tuple[int, int]]:
    """Returns unit and bytes of each WEIGHT partition whose tier is DISK."""
    return [
        (unit, align_up(row[State.WEIGHT]))
        for unit, (row, row_tiers) in enumerate(zip(parts.nbytes, tiers, strict=True))
        if row_tiers[State.WEIGHT] is Tier.DISK
    ]


def _cacheable(parts: Partitions, tiers: TierMap, weights: int) -> int:
    """Returns the bytes, beyond `weights` bytes of buffers, that a cache of all weights on DISK would fill."""
    return max(sum(nbytes for _, nbytes in _disk_weights(parts, tiers)) - weights, 0)
