"""The memory plan: mode, partitions, placement and slots of the store, decided from plain values.

    MemoryRequest ─► place_states ─► PlacedStates ─► (the caller looks at disks and runs) ─► plan_memory ─► MemoryPlan

A run decides by it in `plan.decide`, and the planner in `planner.memory`: what the planner predicts is what a run
takes, byte for byte, because no other code decides. No function here reads a file, asks the machine or talks to other
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.config import Config
from offload.errors import ConfigError
from offload.layout.config_request import gradient_dtype, mode_of, wish_of
from offload.layout.flat_layout import UnitLayout
from offload.layout.placement import Machine, Placement, place
from offload.layout.tiers import Partitions, partitions
from offload.swapper.modes import Mode


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRequest:
    """The inputs of the placement of one rank's states."""

    config: Config
    layouts: tuple[UnitLayout, ...]
    optimizer: str
    """Name of the optimizer's rule."""
    accumulation: int
    """Micro-batches of a step."""
    machine: Machine
    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedStates:
    """The first half of the plan, with which the caller looks at disks: every state has its place."""

    request: MemoryRequest
    mode: Mode
    parts: Partitions
    placement: Placement

    @property
    def two_slots_nbytes(self) -> int:
        """Bytes that a durable store of this rank takes on all drives together."""
        return self.placement.store(self.parts, 2).nbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedSlots:
    """The number of slots that the store of this configuration should have."""

    count: int
    """2 where steps are durable, 1 where it is written in place, 0 where there is no store."""
    must: bool
    """Whether the store must have so many; where it need not, it has one slot on drives without room for two."""

    @property
    def depends_on_room(self) -> bool:
        return self.count == 2 and not self.must


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """All that is decided of one rank's memory and store."""

    mode: Mode
    parts: Partitions
    placement: Placement
    slots: int
    """Slots of each partition in the store: 2 durable, 1 written in place, 0 where there is no store."""
    commit_every: int
    """Steps from one commit to the next; 0 where there is none."""
    notices: tuple[str, ...]


def place_states(request: MemoryRequest) -> PlacedStates:
    """Returns mode, partitions and placement of one rank.

    Raises:
        BudgetError: where a budget is too small; it names the least that works.
    """
    config, accumulation = request.config, request.accumulation
    mode = mode_of(config, request.optimizer)
    dtype = gradient_dtype(config, mode, accumulation)
    parts = partitions(request.layouts, mode, dtype, request.rank, request.world_size)
    placement = place(parts, mode, wish_of(config, accumulation), request.machine)
    return PlacedStates(request=request, mode=mode, parts=parts, placement=placement)


def wanted_slots(placed: PlacedStates, *, on_disk: bool, resume: bool = False) -> WantedSlots:
    """Returns the slots that the store of this configuration should have.

    Args:
        placed: the placement of this rank.
        on_disk: whether any rank has states at home on disk.
        resume: whether the run resumes, and so has a durable store already.

    Raises:
        ConfigError: where the config asks for a store and has no drive for it.
    """
    config, trains = placed.request.config, any(placed.parts.trainable_numel)
    if config.offload.durability == "none" or not trains:
        return WantedSlots(count=1 if on_disk else 0, must=True)
    if config.offload.wants_store:
        if not config.drives:
            raise ConfigError(
                '"durability" asks for a store, but no nvme_path is given; set one in the "offload" block'
            )
        return WantedSlots(count=2, must=True)
    if resume:
        return WantedSlots(count=2, must=True)
    return WantedSlots(count=2, must=False) if on_disk else WantedSlots(count=0, must=True)


def plan_memory(placed: PlacedStates, wanted: WantedSlots, no_room: str | None = None) -> MemoryPlan:
    """Returns the whole plan of one rank's memory and store.

    Args:
        placed: the placement of this rank.
        wanted: the slots that its store should have.
        no_room: a notice for people where the drives have no room for two slots; None where they have.
    """
    placement, slots = placed.placement, wanted.count
    notices = placement.notices
    if wanted.depends_on_room and no_room is not None:
        slots, notices = 1, (*notices, no_room)
    if slots < 2:
        placement = placement.settled(placed.parts)
        slots = slots if placement.on_disk else 0
    return MemoryPlan(
        mode=placed.mode,
        parts=placed.parts,
        placement=placement,
        slots=slots,
        commit_every=placed.request.config.offload.commit_every if slots == 2 else 0,
        notices=notices,
    )
