"""Placement of one rank's partitions, and the memory for them and for the work on them, decided from sizes alone.

Pure functions; `initialize` carries out their decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from offload.errors import BudgetError
from offload.layout.budgets.device import device_spare, divide_device
from offload.layout.budgets.device_need import DeviceNeed
from offload.layout.budgets.host import default_budget, divide_host, host_needs, least_host, window_nbytes
from offload.layout.budgets.machine import Machine
from offload.layout.modes import ADAM, Mode
from offload.layout.tiers import (
    Partitions,
    PlacementRequest,
    TierMap,
    configured,
    demotions,
    differences,
    gradients_on_device,
    inputs_nbytes,
    to_promote,
    with_tier,
)
from offload.layout.tile_sizes import tiles
from offload.notices import Remark
from offload.sizes import PAGE, align_up, format_size
from offload.states import State, Tier
from offload.swapper.memory.host_arena import Classes
from offload.swapper.store import StoreSpec

_FEW = 1 << 16
"""Elements of a tile below which its own work is longer than that of its elements, as measured on two cores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Tiers of this rank's partitions, and the memory for them and for the work on them."""

    tiers: TierMap
    promoted: tuple[tuple[int, State], ...]
    """Partitions promoted from DISK to HOST. They use memory of the cache, and leave if another engine needs it."""
    classes: Classes
    device_nbytes: int
    device_need: DeviceNeed
    added: tuple[tuple[int, int], ...]
    """Units whose gradients accumulate on the device and leave it once a step, each with its bytes of the arena."""
    tile_numel: int
    tile_buffers: int
    """Tiles that are read, computed or written at a time."""
    scratch_nbytes: int
    """For an optimizer of torch, bytes of the class of tiles for the largest parameter's fp32 gradient and master."""
    inputs_nbytes: int | None
    """Bytes of host memory, beside `classes`, for inputs of blocks that are computed again; None: what is free."""
    window_numel: int
    """Elements of a spilling gradient that are in HOST at a time; 0 if no gradient spills."""
    notices: tuple[str, ...]

    @property
    def on_disk(self) -> bool:
        """True if the tier of any state is DISK, or would be DISK without promotion. Gradients do not count."""
        in_tier = (tier is Tier.DISK for row in self.tiers for state, tier in row.items() if state is not State.GRAD)
        return bool(self.promoted) or any(in_tier)

    def overlaps_updates(self, wanted: bool, *, on_cpu: bool, alone: bool, slots: int) -> bool:
        """Returns True if a step's updates run during the next forward.

        Args:
            wanted: the config's `overlap`.
            on_cpu: True if the CPU computes.
            alone: True if there is one rank.
            slots: slots of the store; 0 without one.
        """
        # With everything in memory an update waits for nothing but the cores on which the forward computes: side by
        # side both take longer than one after the other.
        return wanted and not (on_cpu and alone and not slots and not self.on_disk and not self.spilled)

    @property
    def spilled(self) -> tuple[int, ...]:
        """Units whose gradients wait on DISK."""
        return tuple(unit for unit, row in enumerate(self.tiers) if row.get(State.GRAD) is Tier.DISK)

    @property
    def moving_nbytes(self) -> int:
        """Bytes of the device arena without those of gradients that accumulate there (`added`)."""
        return self.device_nbytes - sum(nbytes for _, nbytes in self.added)

    def grown(self, nbytes: int) -> Placement:
        """Returns the placement with a device arena larger by `nbytes`, as after the first step."""
        device_nbytes = self.device_nbytes + nbytes
        return replace(self, device_nbytes=device_nbytes, added=self.device_need.added(device_nbytes))

    def tiers_of(self, *states: State) -> str:
        """Returns the tiers of these states in words: "disk", or "host and disk"."""
        return " and ".join(
            tier.value for tier in Tier if any(row.get(state) is tier for row in self.tiers for state in states)
        )

    def settled(self, parts: Partitions) -> Placement:
        """Returns the placement for a store of the states on DISK alone: promoted states never leave HOST again."""
        nbytes = sum(align_up(parts.nbytes[unit][state]) for unit, state in self.promoted)
        classes = self.classes._replace(resident=self.classes.resident + nbytes, cache=self.classes.cache - nbytes)
        return replace(self, classes=classes, promoted=())

    def stored(self, parts: Partitions, slots: int) -> tuple[Mapping[State, int], ...]:
        """Returns the bytes of each state that the store keeps, unit by unit; empty if there is no store.

        Args:
            parts: this rank's partitions.
            slots: 2 for a durable store, 1 for a store written in place, 0 for none.
        """
        if not slots:
            return ()
        return tuple(
            {
                state: nbytes
                for state, nbytes in row.items()
                if state is not State.GRAD and (slots == 2 or tiers[state] is Tier.DISK)
            }
            for row, tiers in zip(parts.nbytes, self.tiers, strict=True)
        )

    def store(
        self, parts: Partitions, slots: int, fingerprint: Mapping[str, Any] = {}, about: Mapping[str, Any] = {}
    ) -> StoreSpec:
        """Returns the specification of a store; `slots` as in `stored`, the other arguments as in `StoreSpec`."""
        return StoreSpec(self.stored(parts, slots), slots, fingerprint, about, parts.frozen if slots else ())


def place(parts: Partitions, mode: Mode, request: PlacementRequest, machine: Machine) -> Placement:
    """Returns a placement of every byte within both budgets, or within their defaults.

    Raises:
        BudgetError: a budget is too small (the message names the smallest that works), or exceeds the free memory.
    """
    configured_tiers = configured(parts, request, mode.weight_dtype.itemsize)
    # All engines of the process share an explicit host budget.
    if request.host_memory is not None:
        budget = max(request.host_memory - machine.other_engines, 0) // PAGE * PAGE
    else:
        budget = default_budget(parts, mode, request, machine, configured_tiers)
    if budget > machine.free_host:
        raise BudgetError(
            f'"host_memory" leaves {format_size(budget)} for this engine, but only {format_size(machine.free_host)} is '
            f"free on this machine; lower it, or leave it out for a budget of the bytes needed"
        )
    inputs = request.inputs
    if request.host_memory is not None and inputs != 0:
        inputs = inputs_nbytes(request, budget - sum(least_host(parts, mode, request, machine)))
        budget -= inputs
    # The device has a kernel for AdamW only; any other optimizer needs the gradients on the host.
    if machine.device_kernels and mode.optimizer == ADAM:
        configured_tiers = gradients_on_device(
            parts, configured_tiers, device_spare(parts, request, machine, configured_tiers)
        )
    tiers = _fitting_tiers(parts, mode, request, machine, configured_tiers, budget)
    notices: list[str] = []
    if moved := differences(parts, configured_tiers, tiers):
        notices.append(
            f"host memory of {format_size(budget)} has no room for all states configured for it; moved: {moved}"
        )
    need = host_needs(parts, mode, request, machine, tiers)
    classes = divide_host(parts, request, mode, tiers, need, budget)
    promoted: tuple[tuple[int, State], ...] = ()
    if request.host_memory is not None:
        # Without an explicit budget a run takes only the memory that it needs, so nothing is promoted.
        promoted = to_promote(tiers, parts, budget - sum(classes))
        higher = with_tier(tiers, promoted, Tier.HOST)
        if moved := differences(parts, tiers, higher):
            notices.append(Remark(f"host memory of {format_size(budget)} has room for more states; moved: {moved}"))
        tiers = higher
        more = sum(align_up(parts.nbytes[unit][state]) for unit, state in promoted)
        classes = classes._replace(cache=classes.cache + more)
    device_nbytes, device_need = divide_device(parts, mode, request, machine, tiers)
    # Both arenas are in the same host memory: each may fit alone although the two together do not.
    if machine.host_addressable and sum(classes) + device_nbytes > machine.free_host:
        raise BudgetError(
            f"the compute device is the CPU, so its budget of {format_size(device_nbytes)} is host memory beside the "
            f"host budget of {format_size(sum(classes))}; {format_size(machine.free_host)} is free: lower "
            f'"device_memory" or "host_memory", or move states from the device to cpu or nvme'
        )
    tile_numel, tile_buffers, scratch_nbytes = tiles(parts, mode, tiers, classes.tiles)
    most = max(parts.trainable_numel, default=0)
    if request.tile is not None and tile_numel < min(most, _FEW):
        notices.append(
            f'"sub_group_size" {request.tile} cuts the updates of {most} elements into tiles of {tile_numel}, which '
            "takes several times as long as tiles of 16 MiB; leave the key out, or set it to a million or more"
        )
    return Placement(
        tiers=tiers,
        promoted=promoted,
        classes=classes,
        device_nbytes=device_nbytes,
        device_need=device_need,
        added=device_need.added(device_nbytes),
        tile_numel=tile_numel,
        tile_buffers=tile_buffers,
        scratch_nbytes=scratch_nbytes,
        inputs_nbytes=inputs,
        window_numel=window_nbytes(parts, tiers) // parts.gradient_dtype.itemsize,
        notices=tuple(notices),
    )


def _fitting_tiers(
    parts: Partitions, mode: Mode, request: PlacementRequest, machine: Machine, configured_tiers: TierMap, budget: int
) -> TierMap:
    """Returns the first of `configured_tiers` and its demotions that fits into `budget` bytes of host memory.

    Raises:
        BudgetError: no tier map fits.
    """
    tried: list[tuple[TierMap, Classes]] = []
    for tiers in demotions(configured_tiers) if machine.drives else (configured_tiers,):
        need = host_needs(parts, mode, request, machine, tiers)
        if sum(need.least._replace(weights=need.most.weights)) <= budget:
            return tiers
        tried.append((tiers, need.least))
    # Reading the largest unit in chunks is slow, so it is the last resort, after all moves to DISK.
    for tiers, least in tried:
        if sum(least) <= budget:
            return tiers
    raise _budget_error(request, mode, budget, machine, min((least for _, least in tried), key=sum))


def _budget_error(request: PlacementRequest, mode: Mode, budget: int, machine: Machine, least: Classes) -> BudgetError:
    """Returns the error that names the budget, the smallest one that works, and the classes of the latter (`least`)."""
    advice = "" if machine.drives else "; with an nvme_path, states and gradients that have no room would move there"
    more = "" if machine.drives else "move states to nvme, or "
    pipeline = "a smaller sub_group_size lowers this"
    if mode.steps_whole:
        pipeline = f"which holds complete {'units' if mode.whole_units else 'matrices'}"
    needs = (
        f"{format_size(least.tiles)} for the update pipeline ({pipeline}), "
        f"{format_size(least.weights)} for host buffers of weights, {format_size(least.gradients + least.staging)} for "
        f"gradients in transit, {format_size(least.resident)} for gradients and states stored in host memory{advice}"
    )
    if request.host_memory is None:
        return BudgetError(
            f"this model needs at least {format_size(sum(least))} of host memory, {format_size(machine.free_host)} is "
            f'free, of which at most 80 % is used by default: {needs}; {more}set a larger "host_memory" in "offload"'
        )
    others = ""
    if machine.other_engines:
        others = (
            f", less {format_size(machine.other_engines)} for other engines of this process (destroy() frees the "
            f"budget of an engine)"
        )
    need = sum(least) + machine.other_engines
    return BudgetError(
        f'"host_memory" is {format_size(request.host_memory)} ({request.host_memory} bytes){others}, the least that '
        f"works is {format_size(need)} ({need} bytes): {needs}"
    )
