"""Decides the tier of every partition, to which it returns between uses, from sizes alone.

    as configured ─► exceeds the host budget:  partitions move down to DISK, one at a time
                 └─► budget has room left:     states are promoted to HOST, a fixed set of them

An optimizer step sweeps over all states and starts again with the first, which is the worst case of a cache that evicts
the least recently used. Therefore the set of states in HOST is fixed. Weights whose tier is DISK have a cache as well,
which evicts the weight whose next use is furthest away: a backward runs in the reverse order of the forward.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from offload.config import Config
from offload.errors import BudgetError, ConfigError
from offload.kernels.blocks import BLOCK_FORMATS, BlockFormat
from offload.layout.flat_layout import WORD, UnitLayout
from offload.layout.modes import Mode
from offload.layout.optimizer_states import NO_WHOLE_SIZES, WholeSizes, whole_sizes
from offload.layout.units import modules_around
from offload.sizes import GIB, MIB, PAGE, align_up, count_of, format_size
from offload.states import State, Tier
from offload.swapper.memory.host_arena import PinnedRegions

# -- reduction -----------------------------------------------------------------------------------------
#
# How several ranks reduce their gradients, and the device memory that it takes.


CODES = BLOCK_FORMATS["int8"]
"""Format of the codes that ranks send. Every shard of a unit is a whole number of its blocks."""
MOST_CODED_REPLICAS = 7
"""Most replicas r for which codes of sums are smaller than an all-reduce in fp32. Codes take 130/128 bytes an element
to each of r - 1 ranks; an all-reduce sends 8 (r - 1) / r bytes an element."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """How several ranks reduce their gradients."""

    dtype: torch.dtype
    """Dtype of the gradients that ranks send each other, or make codes from."""
    wide: bool = True
    """True if gradients of weights that stay in fp32 are sent in fp32, whatever the dtype of others is."""
    exchanges: int = 1
    """Units whose reductions may be under way at a time."""
    buckets: int = 1
    """Buffers for gradients of `dtype` that wait to be sent; 0 if ranks send the sums of whole gradients directly."""
    whole: bool = False
    """True if each rank adds up the whole gradients of a step's micro-batches before they are reduced."""
    replicas: int = 1
    """Replicas of the model, which add up their sums in fp32 (`distributed.reduce_scatter`)."""
    form: BlockFormat | None = None
    """Format of the codes that ranks of a replica send; None for values of `dtype`."""
    coded_sums: bool = False
    """True if replicas send codes of their sums."""
    in_place: bool = False
    """True if each rank is a replica by itself, so its gradients are summed over the replicas in their own memory."""
    turns: bool = False
    """True if the config lets micro-batches take turns, and so add up in a bucket before they are reduced."""

    def dtype_of(self, layout: UnitLayout) -> torch.dtype:
        """Returns the dtype in which ranks send the gradients of a unit."""
        return torch.float32 if self.wide and layout.in_fp32 else self.dtype

    def numels(self, layouts: Iterable[UnitLayout]) -> list[int]:
        """Returns the elements of each unit's gradients that a rank computes, counted in `dtype`."""
        sizes = ((layout.gradient_numel, self.dtype_of(layout).itemsize) for layout in layouts)
        return [numel * itemsize // self.dtype.itemsize for numel, itemsize in sizes]

    @property
    def received(self) -> int:
        """Number of buffers for the gradients that a rank receives. Replicas add them up before the next exchange."""
        if self.in_place:
            return 0
        return self.exchanges if self.replicas == 1 else 1

    @property
    def coded(self) -> int:
        """Number of buffers for the codes that a rank sends."""
        return 0 if self.form is None else self.exchanges

    @property
    def sums(self) -> int:
        """Buffers for sums over replicas.

        Once a sum is encoded, its buffer is free again. Sums in place need one buffer for the zeros of a rank without a
        gradient.
        """
        if self.replicas == 1:
            return 0
        return 1 if self.coded_sums or self.in_place else self.exchanges

    def sum_codes(self, shard_numels: Sequence[int]) -> list[int]:
        """Returns the bytes of each buffer for the codes of all replicas' sums of a shard."""
        nbytes = self.replicas * CODES.stored_nbytes(max(shard_numels))
        return [nbytes] * self.exchanges if self.coded_sums else []

    def sent_nbytes(self, numel: int) -> int:
        """Returns the bytes that ranks send for the gradients of `numel` elements."""
        return numel * self.dtype.itemsize if self.form is None else self.form.stored_nbytes(numel)

    def buffer_nbytes(self, unit_numels: Sequence[int], shard_numels: Sequence[int]) -> int:
        """Returns the bytes of all buffers, without sums of whole gradients."""
        largest = max(unit_numels)
        # Received and encoded gradients take the bytes that are sent; a bucket takes the bytes of values in `dtype`.
        through = (self.received + self.coded) * align_up(self.sent_nbytes(largest))
        sums = self.sums * align_up(max(shard_numels) * torch.float32.itemsize)
        sums += sum(map(align_up, self.sum_codes(shard_numels)))
        return self.buckets * align_up(largest * self.dtype.itemsize) + through + sums


def join(units: Sequence[int], numels: Sequence[int], most: int) -> tuple[int, ...]:
    """Returns the first of `units`, and those after it that one collective of at most `most` elements takes too."""
    total, count = 0, 0
    for unit in units:
        total += numels[unit]
        if count and total > most:
            break
        count += 1
    return tuple(units[:count])


# -- gathers -------------------------------------------------------------------------------------------
#
# Weights that ranks gather as codes, decided from the layouts alone.
#
#     a unit:  [ trainable region       | frozen region: values               | bytes of others, blocks of codes ]
#                zero_quantized_weights   zero_quantized_nontrainable_weights
#
# Both regions are divided evenly among the ranks, wherever that cuts a parameter. A frozen region with a parameter that
# is not stored as values is gathered as it is: its bytes are codes already.


class CodedGathers(NamedTuple):
    """The elements of each unit that ranks gather as codes; none by default."""

    dtype: torch.dtype = torch.float32
    """Dtype of the weights."""
    elements: tuple[range, ...] = ()
    """For each unit, the range of whole regions that ranks gather as codes, which may be empty; () for no unit."""
    largest: int = 0
    """Elements of the largest region; 0 if there are none."""

    @property
    def nbytes(self) -> int:
        """Bytes of the device memory for the codes of a gather."""
        return align_up(CODES.stored_nbytes(self.largest))


NO_CODES = CodedGathers()


def coded_gathers(config: Config, layouts: Sequence[UnitLayout], dtype: torch.dtype, shards: int) -> CodedGathers:
    """Returns the elements that the ranks of a replica gather as codes."""
    zero = config.zero_optimization
    elements, largest = [], 0
    for layout in layouts:
        stop = layout.trainable_stop
        if layout.in_fp32:  # codes would undo what the user asks for
            elements.append(range(0))
            continue
        trains = range(stop if zero.zero_quantized_weights else 0)
        in_values = layout.values_stop == layout.numel
        frozen = range(stop, layout.numel if zero.zero_quantized_nontrainable_weights and in_values else stop)
        largest = max(largest, len(trains), len(frozen))
        elements.append(range(0 if trains else frozen.start, frozen.stop if frozen else trains.stop))
    return CodedGathers(dtype, tuple(elements), largest) if largest and shards > 1 else NO_CODES


# -- node shards ---------------------------------------------------------------------------------------
#
# A second partition of the weights, over the ranks of one node, decided from sizes alone: hpZ of ZeRO++.
#
# four ranks, "zero_hpz_partition_size": 2      node 0: ranks 0, 1      node 1: ranks 2, 3
#
# a unit       [      │      │      │      ]
# shards       rank 0 │ rank 1 │ rank 2 │ rank 3      in its tier, with its states: what a step updates
# node shards  rank 0, rank 2  │ rank 1, rank 3       a copy on the device: what the gathers of a node read


class NodeShards(NamedTuple):
    """The partition of the weights over the ranks of a node. By default there is none: a node is one rank."""

    ranks: int = 1
    """Number of ranks of a node."""
    shards: int = 1
    """Number of shards of a unit over all ranks, a multiple of `ranks`."""
    unit_nbytes: tuple[int, ...] = ()
    """For each unit, the bytes that one rank keeps for its node."""

    @property
    def nbytes(self) -> int:
        """Bytes of the device memory for one rank's node shards of all units."""
        return align_up(sum(self.unit_nbytes))

    def range_of(self, shard: range, rank: int) -> range:
        """Returns the range of a unit's region that a rank keeps for its node, given the range of its own shard."""
        start = shard.start - rank * len(shard)
        nbytes = len(shard) * self.shards // self.ranks
        first = start + rank % self.ranks * nbytes
        return range(first, first + nbytes)


NO_NODE = NodeShards()


def check_node(size: int, ranks: int) -> None:
    """Raises `ConfigError` if `ranks` ranks cannot be divided into nodes of `size`, "zero_hpz_partition_size"."""
    if ranks % size:
        raise ConfigError(
            f"zero_optimization.zero_hpz_partition_size is {size}, the number of ranks of a node, and "
            f"{count_of(ranks, 'rank')} cannot be divided into such nodes: set it to a divisor of {ranks}, or leave it "
            "out"
        )


def node_shards_of(config: Config, layouts: Sequence[UnitLayout], mode: Mode, shards: int) -> NodeShards:
    """Returns the node shards; none without the key, or if one node contains all ranks."""
    size = config.zero_optimization.zero_hpz_partition_size
    if size == 1 or shards <= size:
        return NO_NODE
    # Both regions of a unit are divided evenly among all ranks, so they are among the ranks of a node too.
    sizes = (layout.numel * layout.mode_in(mode).weight_dtype.itemsize for layout in layouts)
    return NodeShards(size, shards, tuple(nbytes // size for nbytes in sizes))


def check_room(node: NodeShards, least: int, free: int) -> None:
    """Raises `BudgetError` if a device without a budget has no room for the shards of a node.

    `least` are the bytes of the smallest device arena that works, these shards included.
    """
    if node.nbytes and least > free:
        raise BudgetError(
            f"zero_optimization.zero_hpz_partition_size is {node.ranks}, so each rank keeps 1/{node.ranks} "
            f"of all weights on its device, {format_size(node.nbytes)}, and needs {format_size(least)} there in "
            f"all; {format_size(free)} is free: set it to more ranks of a node, or leave it out"
        )


# -- tiers ---------------------------------------------------------------------------------------------


class GradientDtypes(NamedTuple):
    """The dtypes of the gradients of a step's micro-batches.

    If `values` is narrower than `sums`, a sum is rounded once, when it is complete. The norm, the update and the user
    see the rounded sum, wherever it waits.
    """

    sums: torch.dtype
    """Dtype in which micro-batches are added."""
    values: torch.dtype
    """Dtype of a complete sum."""
    stored: torch.dtype
    """Dtype of the memory where a gradient waits for its update: that of `values` if sums are complete before they are
    stored there, otherwise that of `sums`."""

    @property
    def rounds(self) -> bool:
        """True if complete sums are rounded."""
        return self.values.itemsize < self.sums.itemsize

    @property
    def complete_first(self) -> bool:
        """True if sums are complete and rounded before they are stored."""
        return self.rounds and self.stored is self.values


class Together(NamedTuple):
    """Units that are on the device at the same time."""

    units: tuple[int, ...]
    """Units of a module and of those around it."""
    others: tuple[int, ...] = ()
    """Units of modules inside, such as experts, of which one at a time joins them."""


TierMap = tuple[Mapping[State, Tier], ...]
"""For each unit the tier of each state that this rank holds; for GRAD, the tier where it waits for its update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Partitions:
    """Bytes that this rank holds of each state of each unit. Units without trainable elements have a weight only."""

    nbytes: tuple[Mapping[State, int], ...]
    """For each unit, the bytes of each state. GRAD counts in the dtype in which it waits for its update."""
    trainable_numel: tuple[int, ...]
    """Elements of each unit that this rank updates."""
    unit_nbytes: tuple[int, ...]
    """Bytes of each unit on the device: the weights of all ranks, and the values of those stored as blocks."""
    largest_gradient: int
    """Bytes of the gradients of the largest unit as a backward produces them, over all ranks."""
    largest_parameter: int
    """Bytes of the largest parameter on the device, or of the largest part of one that is in parts."""
    gradients: GradientDtypes
    alone: bool
    """True if this rank holds all states, and reduces its gradients with no other."""
    whole: WholeSizes = NO_WHOLE_SIZES
    """Sizes of the parameters that a step needs as a whole, for optimizers that need it."""
    frozen: tuple[int, ...] = ()
    """Bytes at the end of each WEIGHT partition of the store that no update writes; may be empty if all are 0."""
    in_place_nbytes: tuple[int | None, ...] = ()
    """Bytes of each unit as it lies in the model's own files, None for units that are not read there. Empty if no unit
    is read there."""
    reduction: Reduction | None = None
    """None if there is one rank, or nothing trains."""
    unit_gradients: tuple[int, ...] = ()
    """Elements of each unit's gradients over all ranks (`Reduction.numels`), if several ranks reduce them."""
    whole_gradients: tuple[int, ...] = ()
    """Bytes of each unit's gradients over all ranks, in the dtype of sums, if this rank adds up a step's micro-batches
    before they are reduced. Empty if each micro-batch is reduced."""
    coded: CodedGathers = NO_CODES
    """Weights that ranks gather as codes."""
    node: NodeShards = NO_NODE
    """The node shards that this rank keeps for gathers within its node."""
    joined_gathers: int = 0
    """Most bytes of weights of units that are gathered by one collective; 0 for one unit at a time."""
    in_fp32: tuple[bool, ...] = ()
    """True for each unit whose weights stay in fp32."""
    together: tuple[Together, ...] = ()
    """Units that are on the device at the same time; see `units_together`."""
    groups: tuple[tuple[int, ...], ...] = ()
    """For each module whose groups of experts are units, these units."""
    host_addressable: bool = False
    """True if the device works in host memory, so that weights in HOST are used where they are."""

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Dtype of the memory where gradients wait for their update."""
        return self.gradients.stored

    def in_place(self, unit: int) -> bool:
        """Returns True if the weights of a unit are read from the model's own files."""
        return bool(self.in_place_nbytes) and self.in_place_nbytes[unit] is not None

    def sum_nbytes(self, unit: int) -> int:
        """Bytes of the sum of a unit's gradients on the device, before it is stored."""
        return self.trainable_numel[unit] * self.gradients.sums.itemsize

    @property
    def reduction_nbytes(self) -> int:
        """Bytes of the device buffers for the reduction of gradients; 0 if there is one rank.

        Each exchange takes a buffer for the gradients of a unit that this rank receives. The gradients that it sends
        are in a bucket, a sum, or codes. With several replicas, an exchange takes a buffer for the sum of this rank's
        shard instead.
        """
        if self.reduction is None:
            return 0
        buffers = self.reduction.buffer_nbytes(self.unit_gradients, self.trainable_numel)
        return sum(map(align_up, self.whole_gradients)) + buffers

    @property
    def collectives_nbytes(self) -> int:
        """Bytes of the device buffers for the reduction of gradients and the gathers of weights."""
        return self.reduction_nbytes + self.coded.nbytes + self.node.nbytes + align_up(self.joined_gathers)

    def pages_nbytes(self, partitions: Iterable[tuple[int, State]]) -> int:
        """Returns the bytes of some partitions, each rounded up to whole pages."""
        return sum(align_up(self.nbytes[unit][state]) for unit, state in partitions)

    def device_resident(self, unit: int, tiers: Mapping[State, Tier]) -> bool:
        """Returns True if a unit with these tiers never leaves the device, where its partition is all of it."""
        tier = tiers[State.WEIGHT]
        return (
            (tier is Tier.DEVICE or (tier is Tier.HOST and self.host_addressable))
            and self.alone
            and self.nbytes[unit][State.WEIGHT] == self.unit_nbytes[unit]
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementRequest:
    """The config's request. Counts are of elements, as in DeepSpeed's files; None leaves the choice to `place`."""

    weights: Tier
    states: Tier
    host_memory: int | None = None
    device_memory: int | None = None
    weights_on_device: float | None = None
    """Fraction of the weights that stays on the device, in place of `device_memory`; see `device_share`."""
    states_off_device: float = 1.0
    """Fraction of the states whose tier is not the device (`ratio`)."""
    cached_weights: int | None = None
    """Weights on DISK that HOST caches (`max_in_cpu`, `buffer_count` times `buffer_size`)."""
    small_unit: int = 0
    """Units of at most this many elements stay on the device (`stage3_param_persistence_threshold`)."""
    live: int | None = None
    """Elements on the device at a time, besides resident ones (`stage3_max_live_parameters`)."""
    tile: int | None = None
    """Largest number of elements of a tile (`sub_group_size`)."""
    keeps_weights: bool = False
    """True if gathered weights stay on the device until their update, where the device has room by default."""
    accumulation: int = 1
    """Micro-batches of an optimizer step."""
    early: bool = False
    """True if units that are on DISK alone can be updated under the backward."""
    inputs: int | None = 0
    """Bytes of host memory for inputs of recomputed blocks (`activation_memory`); None for a share by default."""
    spares_drives: bool = False
    """True to keep whole units in HOST where the budget allows, so that steps write less."""


_LEAST_INPUTS = 2 * GIB
_INPUTS_SHARE = 1 / 32
"""Bytes, or fraction of the host budget if that is more, that are set aside for inputs by default."""


def inputs_nbytes(request: PlacementRequest, budget: int, left: int) -> int:
    """Returns the bytes of a host `budget` that are set aside for inputs of blocks that are computed again.

    `left` are the bytes of the budget that remain after the least that weights and states need. Raises `BudgetError` if
    they are fewer than the configured bytes, and the budget is explicit.
    """
    left = max(left, 0)
    if request.inputs is None:
        # Their size is known only when the model runs, and a byte too much costs no less than a byte too few: a state
        # goes to a drive and back after `step()`, an input under the compute of a step. So they take a small share.
        # Whoever knows the tokens of a step, as the planner does, names their bytes in the config.
        return min(left // 2, max(_LEAST_INPUTS, int(_INPUTS_SHARE * budget))) // PAGE * PAGE
    nbytes = align_up(request.inputs)
    if request.host_memory is None:
        return min(nbytes, left // PAGE * PAGE)
    if nbytes > left:
        raise BudgetError(
            f'"activation_memory" is {format_size(nbytes)}, but only {format_size(left)} of "host_memory" are '
            'left beside the least that weights and states need: lower the former or raise the latter in "offload"'
        )
    return nbytes


def partitions(
    layouts: Sequence[UnitLayout],
    mode: Mode,
    gradients: GradientDtypes,
    rank: int,
    world_size: int,
    in_place_nbytes: Sequence[int | None] = (),
    *,
    alone: bool,
    reduction: Reduction | None = None,
    coded: CodedGathers = NO_CODES,
    node: NodeShards = NO_NODE,
    joined_gathers: int = 0,
    host_addressable: bool = False,
) -> Partitions:
    """Returns this rank's bytes of every unit and state."""
    rows: list[Mapping[State, int]] = []
    trainable = [len(layout.trainable(rank, world_size)) for layout in layouts]
    itemsizes = [layout.mode_in(mode).weight_dtype.itemsize for layout in layouts]
    for layout, numel, itemsize in zip(layouts, trainable, itemsizes, strict=True):
        row = {State.WEIGHT: (numel + len(layout.frozen(rank, world_size))) * itemsize}
        if numel:
            row |= {
                state: len(mode.padded_part(state, 0, numel)) * dtype.itemsize
                for state, dtype in layout.mode_in(mode).states.items()
                if state is not State.WEIGHT
            }
            # PACKED is sized by its fields. Some states exist only for the elements outside of matrices.
            if State.PACKED in row:
                row[State.PACKED] = layout.packed_numel(rank) * WORD
            row |= {state: len(layout.rest(rank, world_size)) * mode.states[state].itemsize for state in mode.partial}
            # States may be empty: an optimizer of torch may keep nothing for a unit's parameters on this rank.
            row = {state: nbytes for state, nbytes in row.items() if nbytes}
            row[State.GRAD] = numel * gradients.stored.itemsize
        rows.append(row)
    rows = [
        row if nbytes is None else {State.WEIGHT: nbytes}
        for row, nbytes in zip(rows, in_place_nbytes or [None] * len(rows), strict=True)
    ]
    wholes = [layout.gradient_numel for layout in layouts]
    reduction = reduction if any(trainable) else None
    return Partitions(
        nbytes=tuple(rows),
        trainable_numel=tuple(trainable),
        unit_nbytes=tuple(layout.device_numel * itemsize for layout, itemsize in zip(layouts, itemsizes, strict=True)),
        largest_gradient=max(map(operator.mul, wholes, itemsizes), default=0),
        largest_parameter=max(
            (
                segment.value_numel * itemsize
                for layout, itemsize in zip(layouts, itemsizes, strict=True)
                for segment in layout.segments
            ),
            default=0,
        ),
        gradients=gradients,
        alone=alone,
        whole=whole_sizes(layouts, mode, rank, world_size),
        frozen=tuple(
            0 if layout.in_files else len(layout.frozen(rank, world_size)) * itemsize
            for layout, itemsize in zip(layouts, itemsizes, strict=True)
        ),
        in_place_nbytes=tuple(in_place_nbytes),
        reduction=reduction,
        coded=coded,
        node=node,
        joined_gathers=joined_gathers,
        unit_gradients=() if reduction is None else tuple(reduction.numels(layouts)),
        whole_gradients=tuple(numel * gradients.sums.itemsize for numel in wholes)
        if reduction is not None and reduction.whole
        else (),
        in_fp32=tuple(layout.in_fp32 for layout in layouts),
        together=units_together(layouts),
        groups=_groups_of_experts(layouts),
        host_addressable=host_addressable,
    )


def units_together(layouts: Sequence[UnitLayout]) -> tuple[Together, ...]:
    """Returns the sets of two units or more that are on the device at the same time.

    A module needs all of its units: its weights in files, those in fp32 and all others, and those of weights that it
    shares with another module. While it runs, those of the modules around it stay.
    """
    of_module: dict[str, list[int]] = {}
    around_of: dict[str, list[str]] = {}
    for unit, layout in enumerate(layouts):
        for module, around_it in _modules_of(layout):
            of_module.setdefault(module, []).append(unit)
            around_of[module] = around_it
    enclosing = {outer for outers in around_of.values() for outer in outers}
    sets: dict[tuple[int, ...], list[int]] = {}
    for module, units in of_module.items():
        around = sorted({unit for outer in around_of[module] for unit in of_module.get(outer, ())} - {*units})
        if len(units) > 1:
            sets.setdefault(tuple(sorted([*around, *units])), [])
        elif around and module not in enclosing:
            sets.setdefault(tuple(sorted(around)), []).append(units[0])
    return tuple(Together(units, tuple(others)) for units, others in sets.items())


def _groups_of_experts(layouts: Sequence[UnitLayout]) -> tuple[tuple[int, ...], ...]:
    groups: dict[str, list[int]] = {}
    for unit, layout in enumerate(layouts):
        owner = layout.module.rpartition("[")[0]
        # A piece of a table has the name of its parameter, a group of experts that of its module.
        if any(segment.rows is not None and segment.stack != owner for segment in layout.segments):
            groups.setdefault(owner, []).append(unit)
    return tuple(map(tuple, groups.values()))


def _modules_of(layout: UnitLayout) -> Iterator[tuple[str, list[str]]]:
    """Yields the modules that need a unit, each with those around it. A part of a parameter counts as a module."""
    users = dict.fromkeys(user for segment in layout.segments for user in segment.users)
    owner, part, _ = layout.module.rpartition("[")
    if not part or not any(segment.stack for segment in layout.segments):
        for module in dict.fromkeys((layout.module, *users)):
            yield module, list(modules_around(module))
        return
    # Of the experts of a module, or of the pieces of a table, one at a time joins the units of the module.
    yield layout.module, [owner, *modules_around(owner)]
    for user in users:
        yield f"{user}.{layout.module}", [user, *modules_around(user)]


def configured(parts: Partitions, request: PlacementRequest, weight_itemsize: int) -> TierMap:
    """Returns the tiers that the config asks for, with all gradients in HOST."""
    on_device = (1.0 - request.states_off_device) * sum(parts.trainable_numel)
    rows: list[Mapping[State, Tier]] = []
    passed = 0
    for unit, (row, numel, unit_nbytes) in enumerate(
        zip(parts.nbytes, parts.trainable_numel, parts.unit_nbytes, strict=True)
    ):
        small = unit_nbytes <= request.small_unit * weight_itemsize
        # The ratio splits the elements into two sides. A unit goes to the side of its middle element.
        states = Tier.DEVICE if passed + numel / 2 <= on_device else request.states
        passed += numel
        tiers = dict.fromkeys(row, states)
        tiers[State.WEIGHT] = Tier.DEVICE if small else request.weights
        if parts.in_place(unit):
            tiers[State.WEIGHT] = Tier.DISK
        # Later decisions may move gradients from HOST to the device or to disk.
        if State.GRAD in row:
            tiers[State.GRAD] = Tier.HOST
        rows.append(tiers)
    return tuple(rows)


def gradients_on_device(parts: Partitions, tiers: TierMap, room: int) -> TierMap:
    """Returns `tiers` with gradients on DEVICE, greedily within `room` bytes, for units with all states on DEVICE.

    Such gradients accumulate on the device, and the device's own kernel updates their units. Gradients for which `room`
    is too small stay in HOST.
    """
    chosen: list[tuple[int, State]] = []
    for unit, (row, nbytes) in enumerate(zip(tiers, parts.nbytes, strict=True)):
        # The device's kernel needs all states of the unit in device memory.
        alone = State.GRAD in row and all(row[state] is Tier.DEVICE for state in row if state is not State.GRAD)
        if alone and align_up(nbytes[State.GRAD]) <= room:
            chosen.append((unit, State.GRAD))
            room -= align_up(nbytes[State.GRAD])
    return with_tier(tiers, chosen, Tier.DEVICE)


def to_add_up(parts: Partitions, tiers: TierMap) -> tuple[tuple[int, int], ...]:
    """Returns (unit, bytes) for units whose gradients leave the device: the bytes of their accumulation on the device.

    Gradients that spill come first: each micro-batch would read and write them again.
    """
    units = [unit for unit, row in enumerate(tiers) if row.get(State.GRAD, Tier.DEVICE) is not Tier.DEVICE]
    # The sort is stable: within both groups units keep the model's order.
    units.sort(key=lambda unit: tiers[unit][State.GRAD] is not Tier.DISK)
    return tuple((unit, align_up(parts.sum_nbytes(unit))) for unit in units)


def that_fit(totals: Iterable[tuple[int, int]], room: int) -> tuple[tuple[int, int], ...]:
    """Returns the pairs (unit, bytes) of `totals` that fit into `room` bytes, taken greedily in order."""
    fitting: list[tuple[int, int]] = []
    for unit, nbytes in totals:
        # A unit that does not fit is skipped, because a smaller one after it may.
        if nbytes <= room:
            fitting.append((unit, nbytes))
            room -= nbytes
    return tuple(fitting)


_DOWN = (
    State.GRAD,
    State.SERVER_ERROR,
    State.WORKER_ERROR,
    State.EXP_AVG_SQ_FRESH,
    State.EXP_AVG_SQ,
    State.EXP_AVG,
    State.SUM,
    State.MOMENTUM_BUFFER,
    State.PACKED,
    State.SCALES,
    State.MASTER_LOW_BITS,
    State.MASTER,
    State.WEIGHT,
)
"""States in the order in which they leave HOST, least used first: weights are read twice a step or more. The gradient
comes first."""


def demotions(tiers: TierMap, early: bool) -> list[list[tuple[int, State]]]:
    """Returns one or two series of partitions that move from HOST to DISK one after the other, the last unit first.

    With `early`, a unit that is on DISK alone can be updated under the backward. So units move one after the other, and
    gradients last: `to_promote` keeps the same units in HOST. Otherwise the drive has nothing to do under the backward
    but to write gradients, so these move first, and then one state of all units after the other.
    """
    units = range(len(tiers) - 1, -1, -1)
    states = [(unit, state) for state in _DOWN[1:] for unit in units]
    gradients = [(unit, State.GRAD) for unit in units]
    if early:
        # Python's sort is stable, so the states of a unit keep their order.
        orders = [[*sorted(states, key=lambda partition: -partition[0]), *gradients]]
    else:
        # The second series starts again and keeps gradients in HOST: the windows of gradients that spill may take more
        # memory than the spill saves.
        orders = [[*gradients, *states], states]
    return [[(unit, state) for unit, state in order if tiers[unit].get(state) is Tier.HOST] for order in orders]


_LEAST_FIRST = 64 * MIB
"""Bytes of the smallest states of the first unit that are kept in HOST: a drive moves fewer in no time."""


def first_states(tiers: TierMap, parts: Partitions, room: int) -> tuple[tuple[int, State], ...]:
    """Returns the states on DISK of the first unit that trains, to keep in HOST; none if `room` bytes are too few.

    A step uses this unit first, and its gradient is complete last. So its update hides under no backward, and the next
    forward waits for all of it.
    """
    first = next((unit for unit, numel in enumerate(parts.trainable_numel) if numel), None)
    if first is None:
        return ()
    moved = _states_on_disk(tiers[first], parts.nbytes[first])
    return tuple((first, state) for state in moved) if _LEAST_FIRST <= sum(moved.values()) <= room else ()


def to_promote(tiers: TierMap, parts: Partitions, room: int) -> tuple[tuple[int, State], ...]:
    """Returns the states to promote to HOST within `room` bytes: all states of some units, then some of one more.

    Chosen greedily, unit by unit. A unit without promoted states can be updated under the backward (`engine.update`),
    so small states of other units are not promoted without the large ones.
    """
    promoted: list[tuple[int, State]] = []
    divided = False
    for unit, (row, nbytes) in enumerate(zip(tiers, parts.nbytes, strict=True)):
        moved = _states_on_disk(row, nbytes)
        whole = sum(moved.values()) <= room
        if not whole and divided:
            continue
        divided = divided or not whole
        for state, size in moved.items():
            if size <= room:
                promoted.append((unit, state))
                room -= size
    return tuple(promoted)


def _states_on_disk(row: Mapping[State, Tier], nbytes: Mapping[State, int]) -> dict[State, int]:
    """Returns the optimizer states of a unit that are on DISK, with the bytes that each takes in HOST."""
    # The pager's cache serves weights, and gradients do not outlive a step.
    return {
        state: align_up(nbytes[state])
        for state in nbytes
        if state not in (State.WEIGHT, State.GRAD) and row[state] is Tier.DISK
    }


def most_written(tiers: TierMap, parts: Partitions, room: int) -> tuple[tuple[int, State], ...]:
    """Returns the partitions on DISK to keep in host memory, within `room` bytes, so that steps write the fewest bytes.

    These are all partitions of some units: a unit with any state on DISK is written in each step, and a unit in memory
    at commits alone. Units that are written most for the bytes that they take come first.
    """
    units = []
    for unit, (row, nbytes, numel) in enumerate(zip(tiers, parts.nbytes, parts.trainable_numel, strict=True)):
        moved = {
            state: align_up(nbytes[state]) for state in nbytes if state is not State.GRAD and row[state] is Tier.DISK
        }
        if numel and moved:
            frozen = parts.frozen[unit] if parts.frozen else 0
            written = sum(size for state, size in nbytes.items() if state is not State.GRAD) - frozen
            units.append((written / sum(moved.values()), unit, moved))
    kept: list[tuple[int, State]] = []
    # Python's sort is stable: of equal units the first ones, which the next forward awaits first.
    for _, unit, moved in sorted(units, key=lambda candidate: -candidate[0]):
        size = sum(moved.values())
        if size <= room:
            kept += [(unit, state) for state in moved]
            room -= size
    return tuple(kept)


def with_tier(tiers: TierMap, partitions: Iterable[tuple[int, State]], tier: Tier) -> TierMap:
    """Returns `tiers` with the tier of the given partitions replaced by `tier`."""
    # Rows are copied, because plans share their tier maps.
    rows = [dict(row) for row in tiers]
    for unit, state in partitions:
        rows[unit][state] = tier
    return tuple(rows)


def copied_memory(
    parts: Partitions, tiers: TierMap, promoted: Iterable[tuple[int, State]], early: bool
) -> PinnedRegions:
    """Returns the parts of the resident class, of promoted states and of tiles that an accelerator copies.

    If updates may run under the backward (`early`), they copy weights of the DISK tier from the device into tiles.
    """
    resident = sum(
        align_up(nbytes)
        for row, row_tiers in zip(parts.nbytes, tiers, strict=True)
        for state, nbytes in row.items()
        if state in (State.WEIGHT, State.GRAD) and row_tiers[state] is Tier.HOST
    )
    return PinnedRegions(
        resident=resident,
        promoted=parts.pages_nbytes(promoted),
        tiles=any(
            tier is Tier.DEVICE or (early and state is State.WEIGHT and tier is Tier.DISK)
            for row_tiers in tiers
            for state, tier in row_tiers.items()
        ),
    )


def tier_nbytes(parts: Partitions, tiers: TierMap, tier: Tier) -> int:
    """Returns the bytes of all partitions in `tier`, each rounded up to 4096."""
    return sum(
        align_up(nbytes)
        for row, places in zip(parts.nbytes, tiers, strict=True)
        for state, nbytes in row.items()
        if places[state] is tier
    )


def differences(parts: Partitions, before: TierMap, after: TierMap) -> str:
    """Returns in words which partitions moved, as "gradient of 3 of 12 units (1 GiB) to disk"; empty if none did."""
    moved: dict[tuple[State, Tier], list[int]] = {}
    for row, old, new in zip(parts.nbytes, before, after, strict=True):
        for state, nbytes in row.items():
            if old[state] is not new[state]:
                moved.setdefault((state, new[state]), []).append(nbytes)
    return ", ".join(
        f"{state.title} of {len(sizes)} of {count_of(len(parts.nbytes), 'unit')} ({format_size(sum(sizes))}) "
        f"to {tier.value}"
        for (state, tier), sizes in moved.items()
    )
