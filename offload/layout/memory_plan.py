"""The memory plan: mode, partitions, placement and slots of the store, decided from plain values.

    MemoryRequest ─► place_states ─► a plan without slots ─► (the caller looks at disks and runs) ─► plan_memory
                 ─► a plan without shadow slots ─► (the caller looks at disks once more) ─► with_shadows

Both a run (`plan.decide`) and the planner (`planner.memory`) call these functions, and no other code decides. The
planner therefore predicts the bytes of a run exactly. No function of this module reads a file, queries the machine or
communicates with other ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import nn

from offload.config import Config, OptimizerBlock
from offload.errors import BudgetError, ConfigError
from offload.layout.experts import cut_stacks, described, parts_of
from offload.layout.flat_layout import UnitLayout
from offload.layout.modes import ADAM, DTYPES, RULE_LAYOUTS, TORCH, Mode, make_mode
from offload.layout.optimizer_states import kernel_rule, optimizer_class
from offload.layout.pass_order import LAYER_MAJOR
from offload.layout.peak_memory import BesideBudgets, beside_budgets
from offload.layout.placement import MachineMemory, Placement, place
from offload.layout.tiers import (
    CODES,
    MOST_CODED_REPLICAS,
    GradientDtypes,
    Partitions,
    PlacementRequest,
    Reduction,
    coded_gathers,
    node_shards_of,
    partitions,
    units_together,
)
from offload.layout.units import Stack, Units, find_units, parameters_in_fp32
from offload.layout.vocabulary import cut_tables
from offload.layout.vocabulary import described as described_tables
from offload.sizes import align_up, format_size, parse_percent
from offload.states import State, Tier
from offload.swapper.policy import Companions, Limits
from offload.swapper.store.format import MAX_UNITS_OF_THREE_SLOTS
from offload.swapper.store.model_files import InPlaceLayout
from offload.swapper.table import UnitSize, pieces_of

_T = TypeVar("_T")

# -- config request ------------------------------------------------------------------------------------
#
# The config's placement settings as the memory plan needs them: mode, tiers, budgets, slots of the store.
#
# Pure functions of the config. `memory_plan` calls them, both for a run and for the planner.


_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}


def placement_request(config: Config, accumulation: int = 1, early: bool = False) -> PlacementRequest:
    """Returns the placement that the config asks for: tiers, memory budgets and limits.

    `early` as in `PlacementRequest`.
    """
    zero, offload = config.zero_optimization, config.offload
    param, optimizer = zero.offload_param, zero.offload_optimizer
    return PlacementRequest(
        weights=_TIERS[param.device],
        states=_TIERS[optimizer.device],
        host_memory=offload.host_memory,
        device_memory=None if isinstance(offload.device_memory, str) else offload.device_memory,
        weights_on_device=parse_percent(offload.device_memory),
        states_off_device=optimizer.ratio,
        cached_weights=_cached_weights(config),
        small_unit=zero.stage3_param_persistence_threshold,
        live=zero.stage3_max_live_parameters,
        tile=zero.sub_group_size,
        keeps_weights=zero.stage < 3 and param.device == "none",
        accumulation=accumulation,
        early=early,
        # Inputs that never leave the device need no host memory.
        inputs=offload.activation_memory if config.activation_tier not in (None, "device") else 0,
        # Where every step is durable, it writes what is in memory too. Without either key a run takes only the memory
        # that it needs.
        spares_drives=(offload.drive_budget is not None or offload.host_memory is not None)
        and (offload.thins_commits or offload.durability == "none" or offload.commit_every > 1),
    )


def _cached_weights(config: Config) -> int | None:
    """Returns the number of weight elements that DeepSpeed's keys cache in host memory, or None if no key is set.

    If only one of `buffer_count` and `buffer_size` is set, the other takes DeepSpeed's default.
    """
    param = config.zero_optimization.offload_param
    buffers = None
    if param.buffer_count is not None or param.buffer_size is not None:
        # DeepSpeed's defaults: 5 buffers of 1e8 elements each.
        buffers = (param.buffer_count or 5) * (param.buffer_size or 10**8)
    counts = [count for count in (param.max_in_cpu, buffers) if count is not None]
    return max(counts) if counts else None


def rule_name(block: OptimizerBlock, groups: Iterable[Mapping[str, Any]] = ({},)) -> str:
    """Returns the name of the update rule that the config's optimizer block selects.

    The settings of the parameter `groups` override the block's.
    """
    if block.of_torch:
        return kernel_rule(optimizer_class(block.type), [{**block.settings, **group} for group in groups])
    name = {"Adam": ADAM, "AdamW": ADAM}.get(block.type, block.type.lower())
    # One group with momentum is enough: the mode, and so the set of states, is the same for all units.
    if name == "sgd" and any({**block.settings, **group}["momentum"] for group in groups):
        return "momentum"
    return name


def mode_of(config: Config, optimizer: str) -> Mode:
    """Returns the mode, which fixes the set of states and their dtypes; `optimizer` is the name of the rule.

    Raises `ConfigError` if the optimizer or the weights do not allow the configured form of the moments or the master.
    """
    if RULE_LAYOUTS[optimizer].of_one_rank and config.moments != "fp32":
        raise ConfigError(
            f'"moments" is {config.moments}, but {optimizer} keeps what its signs lose in fp32, beside fp32 moments; '
            'leave "moments" and bf16_optimizer_states out'
        )
    if optimizer == TORCH and config.moments != "fp32":
        raise ConfigError(
            f'"moments" is {config.moments}, but this optimizer runs by torch\'s own code, and keeps states of its own '
            'dtypes; leave "moments" and bf16_optimizer_states out, or use an optimizer with a kernel (AdamW, Adam, '
            "Lamb, Lion, Adagrad, SGD, Muon, SinkGD)"
        )
    if RULE_LAYOUTS[optimizer].not_of_matrices and config.moments == "int8":
        raise ConfigError(
            '"moments" is int8, but Muon and SinkGD keep moments of matrices, which have no blocks of 8 bits; set bf16'
        )
    master = config.offload.master
    if master != "fp32" and config.dtype != "bf16":
        why = (
            "an fp32 weight is its own master"
            if config.dtype == "fp32"
            else "the fp32 master beside an fp16 weight shares no bits with it"
        )
        raise ConfigError(
            f'"master" is {master}, a bf16 weight with 8 more bits, but the weights are {config.dtype}: {why}; set '
            '"bf16": {"enabled": true} (--dtype bf16), or leave "master" out'
        )
    if optimizer == TORCH and master != "fp32":
        raise ConfigError(
            f'"master" is {master}, but this optimizer runs by torch\'s own code, whose steps are not '
            'rounded stochastically; leave "master" out, or use an optimizer with a kernel (AdamW, Adam, Lamb, Lion, '
            "Adagrad, SGD, Muon, SinkGD)"
        )
    return make_mode(config.dtype, optimizer, config.moments, master)


def gradient_dtypes(
    config: Config, mode: Mode, accumulation: int, layouts: Sequence[UnitLayout] = (), in_turns: bool = False
) -> GradientDtypes:
    """Returns the dtypes of gradients.

    The config's `grad_accum_dtype` is the dtype of sums if set. Otherwise sums are fp32 if several micro-batches
    accumulate into them, or if weights in fp32 train. They have the weights' dtype if each gradient is stored once.

    With `in_turns`, the micro-batches of a step take turns at a block, so that a sum is complete on the device, and is
    stored once. Raises `ConfigError` if the config asks to round sums that cannot be rounded.
    """
    named = config.data_types.grad_accum_dtype
    in_fp32 = any(layout.in_fp32 and layout.trainable_stop for layout in layouts)
    if named is not None:
        sums = DTYPES[named]
    else:
        sums = torch.float32 if accumulation > 1 or in_fp32 else mode.weight_dtype
    rounds = _rounds_sums(config, in_fp32) and accumulation > 1 and sums is torch.float32
    values = mode.weight_dtype if rounds else sums
    return GradientDtypes(sums, values, values if in_turns else sums)


def _rounds_sums(config: Config, in_fp32: bool) -> bool:
    """Returns True if a complete sum of gradients is rounded to the weights' 16 bits."""
    asked = config.offload.gradients
    if asked == "auto":
        # A named dtype of sums is that of the gradients, as in DeepSpeed.
        return config.dtype == "bf16" and config.data_types.grad_accum_dtype is None and not in_fp32
    if asked == "16bit" and config.dtype == "fp32":
        raise ConfigError(
            '"gradients" is "16bit", the dtype of 16-bit weights, but the weights are fp32; set "bf16": {"enabled": '
            'true} (--dtype bf16), or leave "gradients" out'
        )
    if asked == "16bit" and in_fp32:
        raise ConfigError(
            '"gradients" is "16bit", but weights that stay in fp32 train ("keep_in_fp32"): their gradients would lose '
            'bits that the weights have; leave "gradients" out, or freeze these weights'
        )
    return asked == "16bit"


def reduction_of(
    config: Config, mode: Mode, accumulation: int, layouts: Sequence[UnitLayout], world_size: int, replicas: int = 1
) -> Reduction | None:
    """Returns how several ranks reduce their gradients; None for one rank.

    ZeRO partitions gradients from stage 2 on. In stages 0 and 1 a rank therefore has memory for the sum of all of a
    step's micro-batches, and reduces this sum once.
    """
    if _alone(config, world_size, replicas):
        return None
    zero = config.zero_optimization
    overlaps = zero.stage == 3 if zero.overlap_comm is None else zero.overlap_comm
    whole = accumulation > 1 and zero.stage < 2
    # Sums of micro-batches that take turns are sent too, often sums of two units that lie between two blocks. Not with
    # "auto": only some loops run in turns then, and all other loops would send twice the bytes of 16-bit gradients.
    turns = config.offload.schedule == LAYER_MAJOR
    sums = gradient_dtypes(config, mode, accumulation, layouts).sums
    named = config.communication_data_type
    dtype = DTYPES[named] if named else sums if whole or turns else mode.weight_dtype
    exchanges = 2 if overlaps else 1
    # A replica of one shard sends only its sums, to the other replicas.
    form = CODES if zero.zero_quantized_gradients and world_size > 1 else None
    coded_sums = zero.zero_quantized_gradients and 1 < replicas <= MOST_CODED_REPLICAS
    if whole:  # a bucket receives the rounded values of a sum of another dtype
        buckets = 0 if dtype == sums else exchanges
    elif turns:
        buckets = 2
    else:  # a bucket is free again once its values are encoded
        buckets = exchanges if form is None else 1
    return Reduction(
        dtype=dtype,
        wide=named is None,
        exchanges=exchanges,
        buckets=buckets,
        whole=whole,
        replicas=replicas,
        form=form,
        coded_sums=coded_sums,
        in_place=world_size == 1 < replicas and dtype is torch.float32 and not coded_sums,
        turns=turns and not whole,
    )


def _joined(most: int | None, sizes: Sequence[int]) -> int:
    """Returns the largest size of several units that share a gather; 0 if no two neighbours are small enough.

    It is at most half of the largest unit, so that large units are not copied, and buffers stay small.
    """
    limit = min(most or 0, max(sizes, default=0) // 2)
    return limit if any(one + other <= limit for one, other in itertools.pairwise(sizes)) else 0


def _joined_gathers(config: Config, layouts: Sequence[UnitLayout], mode: Mode) -> int:
    """Returns the most bytes of units that ranks gather by one collective; 0 for one unit at a time."""
    zero, itemsize = config.zero_optimization, mode.weight_dtype.itemsize
    coded = zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights
    # The collectives of experts that ranks own join fewer ranks than those of other units.
    experts = any(layout.ep_size > 1 for layout in layouts)
    if not zero.allgather_bucket_size or coded or zero.zero_hpz_partition_size > 1 or experts:
        return 0
    sizes = [layout.numel * layout.mode_in(mode).weight_dtype.itemsize for layout in layouts]
    return _joined(zero.allgather_bucket_size * itemsize, sizes)


def _alone(config: Config, world_size: int, replicas: int) -> bool:
    """Returns True if one process trains, and does not try the collectives of several."""
    return world_size * replicas == 1 and not config.offload.debug.collectives


def buffer_dtype(config: Config) -> torch.dtype | None:
    """Returns the dtype of the model's floating-point buffers; None keeps the model's dtypes."""
    named = config.data_types.buffer_dtype
    return DTYPES[named] if named else None


# -- memory plan ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRequest:
    """Inputs of the placement of one rank's states."""

    config: Config
    layouts: tuple[UnitLayout, ...]
    optimizer: str
    """Name of the optimizer's rule."""
    accumulation: int
    """Micro-batches of an optimizer step."""
    machine: MachineMemory
    rank: int = 0
    """This rank's shard."""
    world_size: int = 1
    """Number of shards."""
    replicas: int = 1
    """Number of replicas, each divided into shards."""
    in_place_layouts: tuple[InPlaceLayout | None, ...] = ()
    """The place of each unit in the model's own files; see `Partitions.in_place_nbytes`."""
    in_turns: bool = False
    """True if the micro-batches of a step take turns at a block; see `gradient_dtypes`."""
    speculate: bool = False
    """True if updates may begin under the backward, where their old states can be kept."""
    tied: bool = False
    """True if several modules own a parameter that trains."""
    beside: BesideBudgets | None = None
    """What a step takes beside both budgets, if the batch is known; None for gradients and a copy of weights alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Plan of one rank's memory and store. The last four fields have values after `plan_memory` and `with_shadows`."""

    request: MemoryRequest
    mode: Mode
    parts: Partitions
    asked: PlacementRequest
    placement: Placement
    slots: int = 0
    """Slots of each partition in the store: 2 durable, 1 written in place, 0 if there is no store."""
    commit_every: int = 0
    """Steps between commits; 0 if nothing is committed."""
    shadowed: frozenset[int] = frozenset()
    """Units with one slot more in the store than `slots`, which an update under the backward writes."""
    notices: tuple[str, ...] = ()

    @property
    def two_slots_nbytes(self) -> int:
        """Bytes that a durable store of this rank takes on all drives together."""
        return self.placement.store(self.parts, 2).nbytes

    @property
    def early_units(self) -> frozenset[int]:
        """Units that each step may update under the backward: the store keeps their old states until `step()`."""
        return self._revocable if self.commit_every == 1 else self.shadowed

    @property
    def updates_early(self) -> bool:
        """True if any step may update a unit under the backward."""
        # In the step after a commit, the newest slot is the one that the commit names, so the other is free.
        return bool(self._revocable if self.slots == 2 else self.shadowed)

    @property
    def to_shadow(self) -> frozenset[int]:
        """Units that would be in `early_units` if they had one slot more."""
        few = len(self.parts.nbytes) <= MAX_UNITS_OF_THREE_SLOTS
        return self._revocable if few and self.slots and self.commit_every != 1 else frozenset()

    @property
    def shadows_need(self) -> int:
        """Bytes that the files of this rank take on all drives together if all units of `to_shadow` have a shadow."""
        spilled = sum(align_up(self.parts.nbytes[unit][State.GRAD]) for unit in self.placement.spilled)
        return self.placement.store(self.parts, self.slots, self.to_shadow).nbytes + spilled

    @property
    def _revocable(self) -> frozenset[int]:
        """Units whose update may write other bytes than it reads, and so may be dropped."""
        if not self.asked.early:
            return frozenset()
        # States above DISK are changed in place. A gradient on DISK would first be written out and read back.
        return frozenset(
            unit
            for unit, (numel, tiers) in enumerate(zip(self.parts.trainable_numel, self.placement.tiers, strict=True))
            if numel and all((tier is Tier.DISK) is (state is not State.GRAD) for state, tier in tiers.items())
        )


def place_states(request: MemoryRequest) -> MemoryPlan:
    """Returns the plan of one rank as far as it is known before the caller looks at the disks.

    Raises `BudgetError` if a budget is too small; the message names the smallest that works.
    """
    config, accumulation = request.config, request.accumulation
    mode = mode_of(config, request.optimizer)
    # Several ranks add up their micro-batches where the gradients wait.
    alone = _alone(config, request.world_size, request.replicas)
    in_turns = request.in_turns and alone
    gradients = gradient_dtypes(config, mode, accumulation, request.layouts, in_turns)
    in_place_nbytes = [None if layout is None else layout.nbytes for layout in request.in_place_layouts]
    gathers = not alone and (request.world_size > 1 or (request.replicas == 1 and not in_place_nbytes))
    parts = partitions(
        request.layouts,
        mode,
        gradients,
        request.rank,
        request.world_size,
        in_place_nbytes,
        alone=alone,
        reduction=reduction_of(config, mode, accumulation, request.layouts, request.world_size, request.replicas),
        coded=coded_gathers(config, request.layouts, mode.weight_dtype, request.world_size),
        node=node_shards_of(config, request.layouts, mode, request.world_size),
        joined_gathers=_joined_gathers(config, request.layouts, mode) if gathers else 0,
        host_addressable=request.machine.host_addressable,
    )
    # Several ranks would have to agree on every guess. A rule of two passes first needs norms. A tile of torch's
    # optimizers is an entire unit, and there is no room for a copy of its old states.
    early = request.speculate and config.offload.debug.overlap and parts.alone and mode.one_pass
    asked = placement_request(config, accumulation, early)
    # The gradient of a tied head waits in autograd for that of the embedding.
    copies = mode.weight_dtype is not torch.float32
    beside = request.beside or beside_budgets(parts, 2 if request.tied else 1, copies=copies)
    placement = place(parts, mode, asked, request.machine, beside)
    return MemoryPlan(request=request, mode=mode, parts=parts, asked=asked, placement=placement)


def wanted_slots(placed: MemoryPlan, *, on_disk: bool, resume: bool = False) -> tuple[int, bool]:
    """Returns the slots that the store should have, and True if two become one on drives without room for two.

    `on_disk` is True if any rank has states whose tier is DISK. A run that resumes has a durable store already. Raises
    `ConfigError` if the config asks for a store but names no drive for it.
    """
    config, trains = placed.request.config, any(placed.parts.trainable_numel)
    # Without durability, or if nothing trains, a store exists only for partitions whose tier is DISK.
    if config.offload.durability == "none" or not trains:
        return 1 if on_disk else 0, False
    if config.offload.wants_store and not config.drives:
        raise ConfigError('"durability" needs a store, but no "nvme_path" is given; set one in the "offload" block')
    # The store of a resumed run is durable, and must not become a store that is written in place.
    if config.offload.wants_store or resume:
        return 2, False
    # The user has not asked for durability, so a drive without room for two slots is no error.
    return (2, True) if on_disk else (0, False)


def plan_memory(
    placed: MemoryPlan, slots: int, no_room: str | None = None, anywhere: Callable[[bool], bool] = bool
) -> MemoryPlan:
    """Returns the complete plan of one rank's memory and store.

    `no_room` is a notice for the user if the drives have no room for two slots, so that the store has one. `anywhere`
    takes a fact of this rank and returns whether it is true on any rank: all ranks have a store, or none has.
    """
    placement, notices = placed.placement, placed.placement.notices
    if no_room is not None:
        slots, notices = 1, (*notices, no_room)
    # Without two slots, promoted partitions have no copy on disk, so their memory cannot be given to another engine.
    if slots < 2:
        placement = placement.settled(placed.parts)
        slots = slots if anywhere(placement.keeps_on_disk(placed.parts)) else 0
    offload = placed.request.config.offload
    commit_every = offload.commit_every
    if offload.thins_commits and anywhere(bool(placement.deferred(placed.parts, slots, 2))):
        commit_every = 2  # no step but a commit writes what is in memory
    # Only two slots leave the last commit intact while the next one is written.
    return replace(
        placed, placement=placement, slots=slots, commit_every=commit_every if slots == 2 else 0, notices=notices
    )


def with_shadows(plan: MemoryPlan, free: int | None) -> MemoryPlan:
    """Returns the plan with a shadow slot of each unit in `to_shadow`, as the last decision about the store.

    `free` is None, or the bytes that the drives have free if these are fewer than `shadows_need`. Then no unit has a
    shadow, and a notice says what this costs.
    """
    if not plan.to_shadow or free is None:
        return replace(plan, shadowed=plan.to_shadow)
    when, which = "in no step", "second"
    if plan.slots == 2:
        when, which = "in the step after a commit alone", "third"
    line = (
        f"updates begin under the backward {when}, so steps take longer: a {which} slot of the states on disk would "
        f"need {format_size(plan.shadows_need)} in all, {format_size(free)} are free"
    )
    return replace(plan, notices=(*plan.notices, line))


# -- inputs of the pager, and of `simulate`, which replays the pager --------------------------------------


def unit_sizes(
    layouts: Sequence[UnitLayout],
    placement: Placement,
    shares: Sequence[tuple[range, range]],
    mode: Mode,
    in_place_layouts: Sequence[InPlaceLayout | None] = (),
    *,
    gathered: bool = False,
    host_addressable: bool = False,
) -> list[UnitSize]:
    """Returns the facts that the pager needs about each unit.

    `in_place_layouts` contains the place of each unit in the model's own files; empty if none is read there. `gathered`
    is True if ranks gather the units, `host_addressable` if the device works in host memory.
    """
    sizes: list[UnitSize] = []
    for layout, tiers, parts, in_place_layout in zip(
        layouts, placement.tiers, shares, in_place_layouts or [None] * len(layouts), strict=True
    ):
        itemsize = layout.mode_in(mode).weight_dtype.itemsize
        starts = [(layout.device_start(part.start) * itemsize, len(part) * itemsize) for part in parts if part]
        share = tuple(range(start, start + nbytes) for start, nbytes in starts)
        shard_nbytes, pieces = sum(map(len, share)), pieces_of(share)
        if in_place_layout is not None:
            shard_nbytes, pieces = in_place_layout.nbytes, in_place_layout.pieces
        expanded = (layout.device_numel - layout.local_numel) * itemsize
        nbytes = layout.device_numel * itemsize
        sizes.append(
            UnitSize(
                layout.name,
                nbytes,
                tiers[State.WEIGHT],
                shard_nbytes,
                pieces,
                expanded,
                gathered,
                share,
                host_addressable=host_addressable,
            )
        )
    companions: dict[int, list[Companions]] = {}
    for units, others in units_together(layouts):
        moving = [(unit, sizes[unit].nbytes) for unit in units if not sizes[unit].device_resident]
        largest = max((sizes[unit].nbytes for unit in others if not sizes[unit].device_resident), default=0)
        for unit, _ in moving:
            companions.setdefault(unit, []).append(Companions(tuple(o for o in moving if o[0] != unit), largest))
    return [replace(size, companions=tuple(companions.get(unit, ()))) for unit, size in enumerate(sizes)]


def limits(config: Config, mode: Mode) -> Limits:
    """Returns the config's limits of the pager, in bytes of weights; None in a field means no limit."""
    zero, itemsize = config.zero_optimization, mode.weight_dtype.itemsize
    counts = (zero.stage3_prefetch_bucket_size, zero.stage3_max_reuse_distance)
    return Limits(*(None if count is None else count * itemsize for count in counts))


# -- division ------------------------------------------------------------------------------------------
#
# The division of a model into units that a config asks for. An engine and a plan both divide by `divide`.


@dataclass(frozen=True)
class Division:
    """All that decides which parameters of a model move together."""

    named: Sequence[str] = ()
    """Names or classes of modules, each of which is one unit."""
    experts: str = "auto"
    """As in the config; `first_that_fits` replaces "auto" where groups do not fit."""
    rule: str = ADAM
    """Name of the optimizer's rule."""
    keep_in_fp32: Literal["auto"] | Sequence[str] = ()
    """As in the config, if other weights are in 16 bits."""
    ep_size: int = 1
    """Number of ranks among which the experts of a layer are divided; 1 without expert parallelism."""
    vocabulary: str = "whole"
    """"whole" or "pieces"; `whole_or_pieces` decides if the config says "auto"."""
    in_files: Collection[str] = ()
    """As in `find_units`."""


class DividedModel(NamedTuple):
    """The units of a model, the stacks that are cut by expert, and lines on them."""

    units: Units
    stacks: tuple[Stack, ...]
    notices: tuple[str, ...]


def division_of(config: Config | None, rule: str | None = None) -> Division:
    """Returns the division that a config asks for.

    None is the default config. The optimizer's `rule` is the config's if it is None, or Adam if the config has no
    optimizer.
    """
    if config is None:
        return Division()
    if rule is None:
        # Without an optimizer in the config the caller passes one to `initialize`; Adam is assumed.
        rule = ADAM if config.optimizer is None else rule_name(config.optimizer)
    keep = () if config.dtype == "fp32" else config.offload.keep_in_fp32
    vocabulary = "pieces" if config.offload.vocabulary == "pieces" else "whole"
    return Division(config.units, config.offload.experts, rule, keep, vocabulary=vocabulary)


def first_that_fits(experts: str, vocabulary: str, place: Callable[[str, str], _T]) -> _T:
    """Returns the result of `place` for the first division into units that fits the budgets.

    `place` takes values of "experts" and "vocabulary". With "auto" of both, groups of experts come before single
    experts, which are smaller, and whole tables before tables in pieces.
    """
    try:
        return whole_or_pieces(vocabulary, partial(place, experts))
    except BudgetError as error:
        if experts != "auto":
            raise
        grouped = error
    try:
        return whole_or_pieces(vocabulary, partial(place, "each"))
    except BudgetError as error:
        if str(error) == str(grouped):  # a unit without experts is the largest
            raise
        raise BudgetError(f"{grouped}; with each expert by itself: {error}") from None


def whole_or_pieces(vocabulary: str, place: Callable[[str], _T]) -> _T:
    """Returns the result of `place` for "whole" tables or for tables in "pieces".

    With "auto" tables are whole, unless whole ones raise `BudgetError`. Then they are in pieces, if these fit.
    """
    if vocabulary != "auto":
        return place(vocabulary)
    try:
        return place("whole")
    except BudgetError as error:
        whole = error
    try:
        return place("pieces")
    except BudgetError as error:
        if str(error) == str(whole):  # another layer is the largest
            raise
        raise BudgetError(f"{error}; with whole tables more is needed") from None


def divide(model: nn.Module, by: Division | Sequence[str]) -> DividedModel:
    """Divides the parameters of `model` into units.

    The structure of the model must not change afterwards. Names of units in place of a division stand for the default
    division with these names. Raises `ConfigError` if a name matches no module and no class of a module, or the config
    keeps a parameter that stacks experts in fp32.
    """
    division = by if isinstance(by, Division) else Division(by)
    all_stacks, notices = cut_stacks(model, division.experts, division.rule, division.ep_size)
    in_fp32 = parameters_in_fp32(model, division.keep_in_fp32)
    if division.keep_in_fp32 == "auto":
        in_fp32 -= parts_of(all_stacks).keys()
    tables = cut_tables(model, division.vocabulary, division.rule)
    units = find_units(model, division.named, all_stacks, in_fp32, tables, division.in_files)
    # A stack may be inside of a unit that the user has named, or its experts may be too small.
    stacks = tuple(stack for stack in all_stacks if stack.module in units.experts)
    if stacked := sorted(in_fp32 & parts_of(stacks).keys()):
        raise ConfigError(
            f'"keep_in_fp32" names {stacked[0]}, whose experts are units of their own, in the dtype of the run: set '
            '"experts": "whole", or leave the name out'
        )
    lines = described(model, stacks, division.experts)
    return DividedModel(units, stacks, (*notices, *lines, *described_tables(units, division.vocabulary)))
