"""The memory plan: mode, partitions, placement and slots of the store, decided from plain values.

    MemoryRequest ─► place_states ─► PlacedStates ─► (the caller looks at disks and runs) ─► plan_memory ─► MemoryPlan

Both a run (`plan.decide`) and the planner (`planner.memory`) call these functions, and no other code decides. The
planner therefore predicts the bytes of a run exactly. No function of this module reads a file, queries the machine or
communicates with other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.config import Config
from offload.errors import ConfigError
from offload.layout.budgets.machine import Machine
from offload.layout.collectives.gathers import coded_gathers
from offload.layout.collectives.secondary import secondary_of
from offload.layout.config_request import gradient_dtype, mode_of, placement_request, reduction_of
from offload.layout.flat_layout import UnitLayout
from offload.layout.modes import Mode
from offload.layout.placement import Placement, place
from offload.layout.tiers import Partitions, partitions
from offload.states import State
from offload.swapper.policy import Limits
from offload.swapper.store.model_files import UnitImage
from offload.swapper.table import UnitSize


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRequest:
    """Inputs of the placement of one rank's states."""

    config: Config
    layouts: tuple[UnitLayout, ...]
    optimizer: str
    """Name of the optimizer's rule."""
    accumulation: int
    """Micro-batches of an optimizer step."""
    machine: Machine
    rank: int = 0
    """This rank's shard."""
    world_size: int = 1
    """Number of shards."""
    replicas: int = 1
    """Number of replicas, each of which is divided into shards."""
    images: tuple[UnitImage | None, ...] = ()
    """Each unit as it lies in the model's own files; see `Partitions.images`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedStates:
    """First half of the plan: every state has its tier, and the caller can now look at the disks."""

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
    """Number of slots that the store of this configuration should have."""

    count: int
    """2 if steps are durable, 1 if the store is written in place, 0 if there is no store."""
    must: bool
    """True if the store must have `count` slots. Otherwise it falls back to one slot on drives without room for two."""

    @property
    def depends_on_room(self) -> bool:
        """True if the number of slots depends on the free space of the drives."""
        return self.count == 2 and not self.must


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Complete plan of one rank's memory and store."""

    mode: Mode
    parts: Partitions
    placement: Placement
    slots: int
    """Slots of each partition in the store: 2 durable, 1 written in place, 0 if there is no store."""
    commit_every: int
    """Steps between commits; 0 if nothing is committed."""
    notices: tuple[str, ...]


def place_states(request: MemoryRequest) -> PlacedStates:
    """Returns mode, partitions and placement of one rank.

    Raises:
        BudgetError: a budget is too small; the message names the smallest that works.
    """
    config, accumulation = request.config, request.accumulation
    mode = mode_of(config, request.optimizer)
    dtype = gradient_dtype(config, mode, accumulation)
    images = [None if image is None else image.nbytes for image in request.images]
    parts = partitions(
        request.layouts,
        mode,
        dtype,
        request.rank,
        request.world_size,
        images,
        replicas=request.replicas,
        reduction=reduction_of(config, mode, accumulation, request.world_size, request.replicas),
        gathers=None if images else coded_gathers(config, request.layouts, mode.weight_dtype, request.world_size),
        secondary=secondary_of(config, request.layouts, mode.weight_dtype.itemsize, request.world_size),
    )
    placement = place(parts, mode, placement_request(config, accumulation), request.machine)
    return PlacedStates(request=request, mode=mode, parts=parts, placement=placement)


def wanted_slots(placed: PlacedStates, *, on_disk: bool, resume: bool = False) -> WantedSlots:
    """Returns the slots that the store of this configuration should have.

    Args:
        placed: the placement of this rank.
        on_disk: True if any rank has states whose tier is DISK.
        resume: True if the run resumes, so that a durable store exists already.

    Raises:
        ConfigError: the config asks for a store but names no drive for it.
    """
    if placed.request.images:
        return WantedSlots(count=0, must=True)
    config, trains = placed.request.config, any(placed.parts.trainable_numel)
    # Without durability, or if nothing trains, a store exists only for partitions whose tier is DISK.
    if config.offload.durability == "none" or not trains:
        return WantedSlots(count=1 if on_disk else 0, must=True)
    if config.offload.wants_store:
        if not config.drives:
            raise ConfigError('"durability" needs a store, but no "nvme_path" is given; set one in the "offload" block')
        return WantedSlots(count=2, must=True)
    # The store of a resumed run is durable, and must not become one that is written in place.
    if resume:
        return WantedSlots(count=2, must=True)
    # Nobody asked for durability explicitly, so a drive without room for two slots is no error.
    return WantedSlots(count=2, must=False) if on_disk else WantedSlots(count=0, must=True)


def plan_memory(placed: PlacedStates, wanted: WantedSlots, no_room: str | None = None) -> MemoryPlan:
    """Returns the complete plan of one rank's memory and store.

    Args:
        placed: the placement of this rank.
        wanted: the slots that its store should have.
        no_room: a notice for the user if the drives have no room for two slots; None if they have.
    """
    placement, slots = placed.placement, wanted.count
    notices = placement.notices
    if wanted.depends_on_room and no_room is not None:
        slots, notices = 1, (*notices, no_room)
    # Without two slots, promoted partitions have no copy on disk, so their memory cannot be given to another engine.
    if slots < 2:
        placement = placement.settled(placed.parts)
        slots = slots if placement.on_disk else 0
    # Only two slots leave the last commit intact while the next one is written.
    return MemoryPlan(
        mode=placed.mode,
        parts=placed.parts,
        placement=placement,
        slots=slots,
        commit_every=placed.request.config.offload.commit_every if slots == 2 else 0,
        notices=notices,
    )


# -- inputs of the pager, and of `simulate`, which replays the pager --------------------------------------


def unit_sizes(
    layouts: Sequence[UnitLayout],
    placement: Placement,
    shares: Sequence[tuple[range, range]],
    mode: Mode,
    images: Sequence[UnitImage | None] = (),
) -> list[UnitSize]:
    """Returns the facts that the pager needs about each unit.

    Args:
        layouts: the layout of each unit.
        placement: the tiers of this rank's partitions.
        shares: this rank's trainable and frozen elements of each unit.
        mode: gives the dtype of the weights.
        images: each unit as it lies in the model's own files; empty if no unit is read there.
    """
    itemsize = mode.weight_dtype.itemsize
    sizes: list[UnitSize] = []
    found = images or [None] * len(layouts)
    for layout, tiers, parts, image in zip(layouts, placement.tiers, shares, found, strict=True):
        share = tuple(range(part.start * itemsize, part.stop * itemsize) for part in parts if part)
        expanded = (layout.device_numel - layout.numel) * itemsize
        nbytes = layout.device_numel * itemsize
        sizes.append(UnitSize(layout.name, nbytes, tiers[State.WEIGHT], share, expanded, image))
    return sizes


def limits(config: Config, mode: Mode) -> Limits:
    """Returns the config's limits of the pager, in bytes of weights; None in a field means no limit."""
    zero, itemsize = config.zero_optimization, mode.weight_dtype.itemsize
    counts = (zero.stage3_prefetch_bucket_size, zero.stage3_max_reuse_distance)
    return Limits(*(None if count is None else count * itemsize for count in counts))
