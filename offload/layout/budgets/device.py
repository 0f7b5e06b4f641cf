"""Size of the device arena at the start, from sizes alone."""

from __future__ import annotations

from offload.layout.budgets.device_need import DeviceNeed, device_fixed, largest_moving, least_holds, moving
from offload.layout.budgets.machine import Machine
from offload.layout.collectives.secondary import check_room
from offload.layout.modes import Mode
from offload.layout.tiers import Partitions, PlacementRequest, TierMap, that_fit, to_add_up, with_tier
from offload.sizes import MIB, PAGE, align_up
from offload.states import State, Tier
from offload.swapper.memory.device_arena import check_budget

_DEVICE_UNITS = 3
"""Units of the largest size for which the device arena has room by default."""
_ARENA_SHARE = 0.25
"""Fraction of what `beside_arenas` leaves that the default arena takes at most where the CPU computes."""
LIBRARIES = 32 * MIB
"""Bytes of libraries that are loaded in the first step, and of threads' stacks."""
_GRADIENT_SHARE = 0.75
"""Fraction of the free device memory for resident states, paged units and gradients: activations need the rest."""


def beside_arenas(parts: Partitions, gradients: int = 2) -> int:
    """Returns the bytes of host memory that a backward on the CPU takes beside both arenas and the activations.

    torch allocates a copy of a unit's weights in the layout that its products use, and the gradients of a unit.

    Args:
        parts: this rank's partitions.
        gradients: gradients of the largest unit at a time: two if its weights are tied.
    """
    return gradients * parts.largest_gradient + parts.largest_unit + LIBRARIES


def divide_device(
    parts: Partitions, mode: Mode, request: PlacementRequest, machine: Machine, tiers: TierMap
) -> tuple[int, DeviceNeed]:
    """Returns the initial bytes of the device arena, and the bounds of its size."""
    fixed, largest = device_fixed(parts, tiers), largest_moving(parts, tiers)
    # All paged units plus room for one more of any size, so that gaps between units force no eviction.
    whole = max(_DEVICE_UNITS * largest, sum(moving(parts, tiers)) + largest)
    live = whole if request.live is None else max(largest, align_up(request.live * mode.weight_dtype.itemsize))
    weights = min(whole, live)
    # Where whole gradients add up before they are reduced, a step has one partition of each: there is no other sum.
    adds_up = request.accumulation > 1 and not machine.host_addressable and not parts.whole_gradients
    totals = to_add_up(parts, tiers) if adds_up else ()
    # Gradients on the device are an optimization that the least budget need not hold.
    in_host = with_tier(tiers, ((unit, State.GRAD) for unit, row in enumerate(tiers) if State.GRAD in row), Tier.HOST)
    least = device_fixed(parts, in_host) + largest
    if request.device_memory is not None:
        check_budget(
            '"device_memory"',
            request.device_memory,
            least,
            least_holds(parts),
        )
        room = max(0, request.device_memory // PAGE * PAGE - fixed)
        if request.live is not None:
            beside = sum(nbytes for _, nbytes in that_fit(totals, room - weights))
            room = min(room, max(live, weights + beside))
        most = room
    else:
        check_room(parts.secondary, least, machine.free_host if machine.host_addressable else machine.free_device)
        # By default the arena begins small and grows once the first step has shown the memory of the activations.
        room = most = min(_DEVICE_UNITS * largest, live)
        if machine.host_addressable:  # the host budget, activations and gradients come out of the same memory
            share = int(_ARENA_SHARE * max(machine.free_host - beside_arenas(parts), 0)) // PAGE * PAGE
            room = most = max(largest, min(room, share))
        else:
            most = weights + sum(nbytes for _, nbytes in totals)
    need = DeviceNeed(least=least, most=fixed + most, unit=largest, weights=fixed + weights, totals=totals)
    return fixed + room, need


def device_spare(parts: Partitions, request: PlacementRequest, machine: Machine, tiers: TierMap) -> int:
    """Returns the bytes for gradients on the device: the rest of an explicit budget or of `_GRADIENT_SHARE`."""
    fixed, largest = device_fixed(parts, tiers), largest_moving(parts, tiers)
    if request.device_memory is not None:
        return request.device_memory // PAGE * PAGE - fixed - largest
    return int(_GRADIENT_SHARE * machine.free_device) - fixed - _DEVICE_UNITS * largest
