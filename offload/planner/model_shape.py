"""`Shape`: the numbers of a model that a prediction needs, its uses of units, and its repeated blocks."""

from __future__ import annotations

import contextlib
import functools
import math
import random
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.errors import ConfigError
from offload.layout.experts import find_stacks, parts_of
from offload.layout.flat_layout import IN_FILES, ParameterSegment, UnitLayout, arrange, lay_out, layouts_of
from offload.layout.frozen import quantized_by_other_library, stored_weights
from offload.layout.memory_plan import Division, divide
from offload.layout.modes import RULE_LAYOUTS
from offload.layout.optimizer_states import matrices_of
from offload.layout.units import Table
from offload.layout.vocabulary import find_tables, pieces_of
from offload.metrics.flops import ATTENTION, flop_formula
from offload.planner.options import Adapters
from offload.planner.simulation.pager import Expected
from offload.presets import (
    DECODERS,
    PRESETS,
    check_folder,
    check_length,
    check_name,
    check_positions,
    error_message,
    positions_of,
    quantized_bits,
    require_transformers,
)
from offload.swapper.policy import row_reads
from offload.torch_internals import RESHAPED, TorchDispatchMode, fake_tensors, tree_leaves

# -- shape ---------------------------------------------------------------------------------------------


_BLOCK = re.compile(r"(?:.*?\.)?\d+(?=\.|$)")
"""Name of a repeated block at the start of a unit's name: up to the first number, as "model.layers.3"."""


class Experts(NamedTuple):
    """The experts of a layer. Each expert is a unit, or each group of them."""

    units: range
    per_token: int
    """Experts that the router chooses for a token."""
    of_unit: int = 1
    """Experts of a unit: more than one in groups."""

    @property
    def number(self) -> int:
        return len(self.units) * self.of_unit

    def visited(self, tokens: int) -> float:
        """Returns the expected number of experts that `tokens` tokens visit if the router prefers none."""
        return self.number * (1 - (1 - self.per_token / self.number) ** tokens)

    def used(self, tokens: int) -> float:
        """Returns the expected number of units that `tokens` tokens visit if the router prefers none."""
        others = (max(0, self.number - self.per_token - of) / (self.number - of) for of in range(self.of_unit))
        return len(self.units) * (1 - math.prod(others) ** tokens)


class Use(NamedTuple):
    """A use of a unit in the forward of one sequence.

    Until `drawn` divides it, a use of a layer's first expert stands for the uses of all experts that are visited.
    """

    unit: int
    flops: float
    """Operations of matrix products and attention."""
    nbytes: float
    """Bytes that all other operations read and write."""
    saved: int
    """Bytes saved for the backward."""
    boundary: int
    """Bytes of the input. Activation checkpointing keeps only the input."""
    lookup: bool = False
    """True for an embedding, whose backward does not read the weights."""
    row_nbytes: int | None = None
    """Bytes that a lookup in a piece of a table reads from DISK; None for any other use, and before `drawn`."""
    largest: int = 0
    """Bytes of the largest tensor that the use creates outside its MLP."""
    attention: float = 0.0
    """Operations of attention, a part of `flops`; they grow with the square of the sequence."""
    mlp_flops: float = 0.0
    """Operations of the block's MLP, a part of `flops`."""
    mlp_saved: int = 0
    """Bytes that the block's MLP saves, its input among them; a part of `saved`."""
    mlp_largest: int = 0
    """Bytes of the largest tensor that the block's MLP creates."""
    divided: int = 0
    """Bytes of `saved` that ranks of tensor parallelism divide: what lies between two layers of its plan."""
    choice: Expected = Expected()
    """The router's choice of experts before the use."""


class RepeatedBlock(NamedTuple):
    """A repeated block: consecutive uses that activation checkpointing recomputes together."""

    name: str
    uses: range
    """Positions of the block's uses in `Shape.uses`."""


class Shape(NamedTuple):
    """The model's side of a prediction."""

    name: str
    layouts: tuple[UnitLayout, ...]
    uses: tuple[Use, ...]
    """Uses in the order of the forward."""
    temporary: int
    """Bytes of the largest tensor that one sequence creates, usually the logits."""
    sequence: int
    """Tokens of a sequence."""
    positions: int | None = None
    """Most tokens of a sequence, by the model's config; None if there is no limit."""
    itemsize: int = 2
    """Bytes of an element of weights and activations."""
    matrices: frozenset[str] = frozenset()
    """Names of the parameters that Muon and SinkGD step as matrices."""
    experts: tuple[Experts, ...] = ()
    """The experts of each layer whose experts are units."""
    adapted: bool = False
    """True if only adapters are trained. A saved model then consists of the adapters."""
    tables: tuple[Table, ...] = ()
    """Whole tables of the vocabulary that `in_pieces` cuts."""
    capped: bool = False
    """True if the model limits the absolute values of its logits."""
    uncut: Shape | None = None
    """The shape with whole tables, if this one has them in pieces."""
    filed: frozenset[str] = frozenset()
    """Names of frozen parameters that `in_files` leaves in the model's own files."""

    @property
    def parameters(self) -> int:
        """Returns the number of parameters; a tied one counts once."""
        return sum(segment.value_numel for layout in self.layouts for segment in layout.segments)

    @property
    def blocks(self) -> tuple[RepeatedBlock, ...]:
        return _blocks(tuple([None if use.lookup else self.layouts[use.unit].name for use in self.uses]))

    def visited(self, tokens: int) -> float:
        """Returns the expected number of experts of all layers that `tokens` tokens visit."""
        return sum(layer_experts.visited(tokens) for layer_experts in self.experts)

    def at(self, sequence: int) -> Shape:
        """Returns the shape for sequences of another length.

        Bytes and operations grow with the number of tokens. Operations of attention grow with its square.
        """

        def scaled(nbytes: int) -> int:
            # An integer division, so that rounding never gives a longer sequence fewer bytes.
            return nbytes * sequence // self.sequence

        times = sequence / self.sequence
        uses = tuple(
            use._replace(
                flops=(use.flops - use.attention) * times + use.attention * times**2,
                nbytes=use.nbytes * times,
                saved=scaled(use.saved),
                boundary=scaled(use.boundary),
                largest=scaled(use.largest),
                attention=use.attention * times**2,
                mlp_flops=use.mlp_flops * times,
                mlp_saved=scaled(use.mlp_saved),
                mlp_largest=scaled(use.mlp_largest),
                divided=scaled(use.divided),
            )
            for use in self.uses
        )
        uncut = None if self.uncut is None else self.uncut.at(sequence)
        return self._replace(uses=uses, temporary=scaled(self.temporary), sequence=sequence, uncut=uncut)

    @property
    def chooses(self) -> bool:
        """Returns True if it depends on the micro-batch which units are used: not all are visited."""
        return any(
            round(layer_experts.used(self.sequence)) < len(layer_experts.units) for layer_experts in self.experts
        )

    def in_groups(self) -> Shape:
        """Returns the shape with groups of experts as units, if a sequence visits all experts anyway.

        A prediction then counts some hundreds of units, not thousands. A group has at most half the bytes of the
        largest unit, so that the memory for units in use is the same.
        """
        expert = self.experts[0] if self.experts and self.uncut is None else None
        if expert is None or expert.of_unit > 1 or round(expert.visited(self.sequence)) < expert.number:
            return self
        largest = max(layout.device_numel for layout in self.layouts)
        size = 1
        while expert.number % (2 * size) == 0 and 4 * size * self.layouts[expert.units[0]].device_numel <= largest:
            size *= 2
        if size == 1:
            return self
        inside = {unit: (unit - layer.units[0]) % size for layer in self.experts for unit in layer.units}
        layouts, places = list[UnitLayout](), list[range]()
        for unit, layout in enumerate(self.layouts):
            if not inside.get(unit, 0):
                layouts.append(_of_experts(layout, size, 1) if unit in inside else layout)
            places.append(range(len(layouts) - 1, len(layouts)))
        return self._moved(layouts, places, of_unit=size)

    def by_expert(self) -> Shape:
        """Returns the shape with single experts as units, in place of groups."""
        of_unit = {unit: layer.of_unit for layer in self.experts for unit in layer.units}
        layouts, places = list[UnitLayout](), list[range]()
        for unit, layout in enumerate(self.layouts):
            count = of_unit.get(unit, 1)
            places.append(range(len(layouts), len(layouts) + count))
            if count == 1:
                layouts.append(layout)
                continue
            one, (stack, _, group) = _of_experts(layout, 1, count), layout.name.rpartition("[")
            numbers, _, end = group.partition("]")  # "0:32", or "0" of a group that `in_groups` has made
            first = int(numbers.partition(":")[0])
            layouts += [one._replace(name=f"{stack}[{row}]{end}") for row in range(first, first + count)]
        return self._moved(layouts, places, of_unit=1)

    def _moved(
        self,
        layouts: Iterable[UnitLayout],
        places: Sequence[Sequence[int]],
        part: Callable[[Use, Sequence[int]], Iterable[Use]] = lambda use, units: (use._replace(unit=units[0]),),
        of_unit: int = 0,
    ) -> Shape:
        """Returns the shape with other units: `places` has those of each unit, which `part` lets a use visit."""
        experts = tuple(
            Experts(
                range(places[layer.units[0]][0], places[layer.units[-1]][-1] + 1),
                layer.per_token,
                of_unit or layer.of_unit,
            )
            for layer in self.experts
        )
        uses = tuple(new for use in self.uses for new in part(use, places[use.unit]))
        return self._replace(layouts=tuple(layouts), uses=uses, experts=experts)

    def in_files(self) -> Shape:
        """Returns the shape with frozen weights in the model's own files, in units of their own, as `find_units`."""
        layouts, places = list[UnitLayout](), list[range]()
        for layout in self.layouts:
            filed = [segment for segment in layout.segments if segment.parameter in self.filed and not segment.form]
            rest = [segment for segment in layout.segments if segment not in filed]
            first = len(layouts)
            for segments in filter(None, (filed, rest)):
                whole = len(segments) == len(layout.segments)
                part = layout if whole else arrange(layout.name, segments, 1, in_fp32=layout.in_fp32)
                if segments is filed:
                    part = part._replace(in_files=True, name=f"{layout.name} {IN_FILES}".strip())
                layouts.append(part)
            places.append(range(first, len(layouts)))
        return self._moved(layouts, places, partial(_by_parts, layouts))._replace(filed=frozenset())

    def in_pieces(self) -> Shape:
        """Returns the shape with its tables in pieces, as `find_units` divides them: each use visits all pieces."""
        cut = {table.parameter for table in self.tables}
        layouts: list[UnitLayout] = []
        places: list[tuple[int, ...]] = []
        """The new units of each unit: itself, if it keeps any parameter, and the pieces of its tables."""
        segments = {segment.name: segment for layout in self.layouts for segment in layout.segments}
        for layout in self.layouts:
            rest = [segment for segment in layout.segments if segment.name not in cut]
            places.append((len(layouts),) if rest else ())
            if rest:
                whole = len(rest) == len(layout.segments)
                left = layout if whole else arrange(layout.name, rest, 1, in_fp32=layout.in_fp32)
                layouts.append(left._replace(in_files=layout.in_files))
        for name, pieces, _ in self.tables:
            parameter = nn.Parameter(torch.empty(segments[name].shape, device="meta"), segments[name].trainable)
            unit = next(unit for unit, layout in enumerate(self.layouts) if segments[name] in layout.segments)
            places[unit] += tuple(range(len(layouts), len(layouts) + len(pieces)))
            for rows in pieces:
                piece = lay_out(f"{name}[{rows.start}:{rows.stop}]", [(name, parameter)], 1, rows=rows)
                (segment,) = piece.segments
                segment = segment._replace(users=segments[name].users)
                layouts.append(piece._replace(segments=(segment,), in_files=self.layouts[unit].in_files))
        return self._moved(layouts, places, _by_pieces)._replace(tables=(), uncut=self)


def _of_experts(layout: UnitLayout, count: int, of: int) -> UnitLayout:
    """Returns the layout of `count` equal experts from that of `of`: each parameter has as many times the rows."""
    segments = [
        segment._replace(shape=(segment.shape[0] * count // of, *segment.shape[1:]), numel=segment.numel * count // of)
        for segment in layout.segments
    ]
    return arrange(layout.name, segments, 1, in_fp32=layout.in_fp32)._replace(in_files=layout.in_files)


def tied_in_pieces(shape: Shape) -> bool:
    """Returns True if a tied table is in pieces: its micro-batches come one after the other."""
    return shape.uncut is not None and any(table.tied for table in shape.uncut.tables)


@functools.lru_cache
def _blocks(units: tuple[str | None, ...]) -> tuple[RepeatedBlock, ...]:
    """Returns the repeated blocks among uses. `units` has the name of each use's unit, or None for a look-up.

    Cached, since a plan calls it about a thousand times for few models.
    """

    def name_of(position: int) -> str | None:
        unit = units[position]
        matched = None if unit is None else _BLOCK.match(unit)
        return None if matched is None else matched.group()

    blocks = []
    for name, positions in groupby(range(len(units)), name_of):
        first, *others = positions
        if name is not None:
            blocks.append(RepeatedBlock(name, range(first, first + 1 + len(others))))
    return tuple(blocks)


# -- counter -------------------------------------------------------------------------------------------
#
# A counter of operations and bytes while a model runs.


class Counter(TorchDispatchMode):
    """A dispatch mode that attributes operations to the unit whose use started last."""

    def __init__(self, weights: set[int], sequence: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights, self._known = weights, set(weights)
        self._rows: list[dict[str, Any]] = []
        self._storages: list[Any] = []
        """References that keep storages alive: a new storage at a freed one's address would be taken for known."""
        self.largest = 0
        self.in_mlp = False
        """True while the MLP of a repeated block runs."""
        self.is_divided = False
        """True between two layers that tensor parallelism divides, where a rank has a part of each tensor."""
        self._mask = (1, 1, sequence, sequence)

    def begin(self, unit: int, boundary: int, lookup: bool) -> None:
        """Starts a use of `unit` unless the last use is of the same unit; its input has `boundary` bytes."""
        if not self._rows or self._rows[-1]["unit"] != unit:
            counts = dict.fromkeys(("flops", "nbytes", "attention", "mlp_flops"), 0.0)
            sizes = dict.fromkeys(("saved", "largest", "mlp_saved", "mlp_largest", "divided"), 0)
            self._rows.append({"unit": unit, "boundary": boundary, "lookup": lookup, **counts, **sizes})

    def uses(self) -> list[Use]:
        return [Use(**row) for row in self._rows]

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts a tensor that autograd saves, once per storage and without weights, and returns the tensor."""
        storage = tensor.untyped_storage()
        if self._rows and storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._storages.append(storage)
            # transformers creates a causal mask only for fake tensors; with real ones attention is causal without it.
            if tuple(tensor.shape) != self._mask:
                self._rows[-1]["saved"] += storage.nbytes()
                self._rows[-1]["mlp_saved"] += storage.nbytes() if self.in_mlp else 0
                self._rows[-1]["divided"] += storage.nbytes() if self.is_divided else 0
        return tensor

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if not self._rows:
            return out
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        # An operation counts by its FLOPs if torch has a formula, else by its traffic; views move nothing.
        formula = flop_formula(function)
        if formula is not None:
            row, flops = self._rows[-1], formula(*args, **kwargs, out_val=out)
            row["flops"] += flops
            row["attention"] += flops if ATTENTION in function.name() else 0.0
            row["mlp_flops"] += flops if self.in_mlp else 0.0
        elif made and not function.is_view and function is not RESHAPED:  # a query, such as of the device, makes none
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            # Reads of weights are left out: the rate `Hardware.weights` accounts for them.
            taken = [tensor for tensor in given if tensor.untyped_storage()._cdata not in self._weights]
            moved = [tensor for tensor in (*taken, *made) if tuple(tensor.shape) != self._mask]  # see `save`
            self._rows[-1]["nbytes"] += sum(tensor.nbytes for tensor in moved)
        if not function.is_view:
            largest = max((tensor.nbytes for tensor in made if tuple(tensor.shape) != self._mask), default=0)
            self.largest = max(self.largest, largest)
            name = "mlp_largest" if self.in_mlp else "largest"
            self._rows[-1][name] = max(self._rows[-1][name], largest)
        return out


# -- experts -------------------------------------------------------------------------------------------
#
# Uses of a layer's experts in a plan: the experts that a micro-batch visits, one after the other.
#
# On fake tensors the router cannot choose, so the forward sends all tokens through one expert in place of all. With E
# experts in a layer, k of them for each token, and a router that prefers none, t tokens visit E * (1 - (1 - k/E)**t)
# experts by expectation. For each micro-batch of each step, a plan draws that number of experts in each layer at
# random. By expectation, several micro-batches together then visit as many experts as all their tokens.


_IMPLEMENTATION = "offload_plan"
"""Name under which transformers finds `_through_one`."""


@contextlib.contextmanager
def without_choice(model: nn.Module) -> Iterator[dict[int, int]]:
    """Makes stacked experts compute without the router's choice inside the context; the amount of work is the same.

    Yields:
        The number of experts of each token, by the id of the experts' module. A module is added when it has run.
    """
    per_token: dict[int, int] = {}
    configs: list[Any] = [model.get_submodule(stack.module).config for stack in find_stacks(model)]
    if configs:
        # Late, since a plan of a model without experts needs no transformers.
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register(_IMPLEMENTATION, partial(_through_one, per_token))
    # Models may share a config, so the context restores it.
    before = [config._experts_implementation for config in configs]
    for config in configs:
        config._experts_implementation = _IMPLEMENTATION
    try:
        yield per_token
    finally:
        for config, used in zip(configs, before, strict=True):
            config._experts_implementation = used


def _through_one(
    per_token: dict[int, int], experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, scores: torch.Tensor
) -> torch.Tensor:
    """Returns the output of a module of stacked experts if all tokens chose its first one.

    `hidden` is (tokens, features); `chosen` and `scores` are (tokens, n). `per_token` receives n.
    """
    # The work equals the work of a real choice: as many rows, through weights of the same shape.
    count = per_token[id(experts)] = chosen.shape[-1]
    rows = hidden.repeat_interleave(count, dim=0)
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    inner = _product(experts, name, rows)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    weighted = _product(experts, "down_proj", inner) * scores.reshape(-1, 1)
    output: torch.Tensor = weighted.view(-1, count, hidden.shape[-1]).sum(dim=1).to(hidden.dtype)
    return output


def _product(experts: Any, name: str, rows: torch.Tensor) -> torch.Tensor:
    """Returns the product of tokens with a projection of the first expert."""
    weight = getattr(experts, name)[0]
    product: torch.Tensor = rows @ (weight if experts.is_transposed else weight.T)
    if experts.has_bias:
        product = product + getattr(experts, f"{name}_bias")[0]
    return product


def drawn(shape: Shape, tokens: int, draw: int) -> Shape:
    """Returns the shape of a micro-batch that visits as many experts of each layer, and rows of a table, as expected.

    The number `draw` of the micro-batch decides by chance which experts it visits.
    """
    if shape.uncut is not None:
        nbytes = _row_nbytes(shape, tokens)
        shape = shape._replace(
            uses=tuple(use._replace(row_nbytes=nbytes.get(use.unit)) if use.lookup else use for use in shape.uses)
        )
    if not shape.experts:
        return shape
    chance = random.Random(draw)
    choices = {
        layer_experts.units[0]: Expected(
            tuple(sorted(chance.sample(layer_experts.units, round(layer_experts.used(tokens))))), layer_experts.units
        )
        for layer_experts in shape.experts
    }
    uses = tuple(
        part
        for use in shape.uses
        for part in (_divided(use, choices[use.unit].units, choices[use.unit]) if use.unit in choices else (use,))
    )
    return shape._replace(uses=uses)


def _row_nbytes(shape: Shape, tokens: int) -> dict[int, int]:
    """Returns the bytes that a lookup of tokens without preference reads of each piece on DISK, by unit."""
    assert shape.uncut is not None
    units = {layout.name: unit for unit, layout in enumerate(shape.layouts)}
    nbytes: dict[int, int] = {}
    for name, pieces, _ in shape.uncut.tables:
        names = [f"{name}[{rows.start}:{rows.stop}]" for rows in pieces]
        row = math.prod(shape.layouts[units[names[0]]].segments[0].shape[1:]) * shape.itemsize
        nbytes |= dict(zip((units[piece] for piece in names), _page_nbytes(pieces, row, tokens), strict=True))
    return nbytes


@functools.lru_cache
def _page_nbytes(pieces: tuple[range, ...], row_nbytes: int, tokens: int) -> tuple[int, ...]:
    """Returns the bytes that lookups read of each piece of a table, all of it if it is fetched; cached as `_blocks`."""
    words, read, sizes = pieces[-1].stop, [], [len(rows) * row_nbytes for rows in pieces]
    if tokens >= words:
        return tuple(sizes)
    visited = sorted(random.Random(0).sample(range(words), round(words * (1 - (1 - 1 / words) ** tokens))))
    for rows, size in zip(pieces, sizes, strict=True):
        inside = visited[bisect_left(visited, rows.start) : bisect_left(visited, rows.stop)]
        reads = row_reads((word - rows.start for word in inside), row_nbytes, 0, size, size)
        read.append(sum(map(len, reads)) if reads or not inside else size)
    return tuple(read)


def _by_pieces(use: Use, units: Sequence[int]) -> Iterator[Use]:
    """Yields the uses of the pieces of a table. The last one has what all of them save together."""
    if len(units) == 1:
        yield use._replace(unit=units[0])
        return
    if not use.lookup:  # a loss in chunks computes the logits of a piece once more, in the backward
        use = use._replace(flops=use.flops * 4 / 3)
    *before, last = _divided(use, units)
    yield from (block._replace(saved=0, largest=0) for block in before)
    # A head has the logits of one piece at a time, a lookup the rows of all its tokens.
    yield last._replace(saved=use.saved, largest=use.largest if use.lookup else use.largest // len(units))


def _by_parts(layouts: Sequence[UnitLayout], use: Use, units: Sequence[int]) -> Iterator[Use]:
    """Yields the uses of the units of a module; the last one has what all of them save together."""
    numel = sum(layouts[unit].device_numel for unit in units)
    for unit in units:
        share, last = layouts[unit].device_numel / numel, unit == units[-1]
        yield use._replace(
            unit=unit,
            saved=use.saved * last,
            mlp_saved=use.mlp_saved * last,
            divided=use.divided * last,
            **{name: getattr(use, name) * share for name in ("flops", "nbytes", "attention", "mlp_flops")},
        )


def _divided(use: Use, units: Sequence[int], choice: Expected | None = None) -> Iterator[Use]:
    count = len(units)
    for position, unit in enumerate(units):
        # The first part receives the remainder of the integer division.
        rest = {
            name: getattr(use, name) // count + (getattr(use, name) % count if position == 0 else 0)
            for name in ("saved", "mlp_saved")
        }
        yield use._replace(
            unit=unit,
            flops=use.flops / count,
            nbytes=use.nbytes / count,
            attention=use.attention / count,
            mlp_flops=use.mlp_flops / count,
            choice=choice if choice is not None and position == 0 else Expected(),
            **rest,
        )


# -- from preset ---------------------------------------------------------------------------------------
#
# The shape of a decoder preset in closed form, equal to the counts of a forward on fake tensors: Llama, Mistral, Qwen3
# and its mixtures of experts.
#
# A forward needs transformers. Importing it and building its models would take longer than all other parts of a plan.
# A test checks that each number here equals the counted one.


_FP32 = 4
"""Bytes of an element of norms, logits and rotary embeddings inside of their operations."""
_IDS = 8
"""Bytes of a token's id, and of an expert's number."""
_ROTARY = {2: 54, 4: 42}
"""Bytes that rotary embeddings move for each token and feature of a head, by the bytes of a weight."""
_LOSS = {2: 18, 4: 12}
"""Bytes that a softmax of 16-bit or fp32 values moves for each of them: bf16 values are copied to fp32 first."""


class _Decoder(NamedTuple):
    """Sizes of a decoder's layers. A layer has one gated MLP, or `experts` of them and a router."""

    layers: int
    vocabulary: int
    hidden: int
    inner: int
    """Width of an MLP, or of an expert."""
    heads: int
    key_heads: int
    features: int
    """Width of a head."""
    normed: bool
    """True if the queries and keys of each head are normalized."""
    tied: bool
    """True if the head is the embedding."""
    experts: int
    per_token: int

    @property
    def queries(self) -> int:
        """Returns the width of the queries of all heads."""
        return self.heads * self.features

    @property
    def keys(self) -> int:
        """Returns the width of the keys of all groups of heads."""
        return self.key_heads * self.features


def _decoder(settings: Mapping[str, Any], normed: bool) -> _Decoder:
    hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
    return _Decoder(
        layers=settings["num_hidden_layers"],
        vocabulary=settings["vocab_size"],
        hidden=hidden,
        inner=settings.get("moe_intermediate_size", settings["intermediate_size"]),
        heads=heads,
        key_heads=settings["num_key_value_heads"],
        features=settings.get("head_dim", hidden // heads),
        normed=normed,
        # Configs of these families have a head of its own by default.
        tied=settings.get("tie_word_embeddings", False),
        experts=settings.get("num_experts", 0),
        per_token=settings.get("num_experts_per_tok", 0),
    )


def from_preset(name: str, sequence: int, itemsize: int) -> Shape | None:
    """Returns the shape of a preset in the default division into units; None if only a forward can determine it."""
    if name not in PRESETS or PRESETS[name].config not in DECODERS:
        return None
    settings = PRESETS[name].settings
    of = _decoder(settings, PRESETS[name].config.startswith("Qwen3"))
    # The counter skips tensors of the causal mask's shape. At these lengths other tensors have that shape, too.
    if sequence in (1, of.features):
        return None
    check_length(settings["max_position_embeddings"], sequence)
    uses = tuple(_uses(of, sequence, itemsize))
    layouts = tuple(_layouts(of))
    # The embedding, the layers, the norm, and the head unless it is the embedding; then the experts.
    first = of.layers + (2 if of.tied else 3)
    return Shape(
        name=name,
        layouts=layouts,
        uses=uses,
        temporary=max(max(use.largest, use.mlp_largest) for use in uses),
        sequence=sequence,
        positions=settings["max_position_embeddings"],
        itemsize=itemsize,
        matrices=frozenset(
            segment.name
            for layout in layouts[:first]
            for segment in layout.segments
            if segment.name.endswith(("_proj.weight", ".gate.weight"))
        ),
        experts=tuple(
            Experts(range(first + index * of.experts, first + (index + 1) * of.experts), of.per_token)
            for index in range(of.layers if of.experts else 0)
        ),
        tables=tuple(
            Table(segment.name, pieces_of(*segment.shape), of.tied)
            for layout in layouts[:first]
            for segment in layout.segments
            if segment.shape[0] == of.vocabulary and len(segment.shape) == 2
        ),
    )


def _layouts(of: _Decoder) -> Iterator[UnitLayout]:
    """Yields the layouts of the embedding, of each layer, of the norm, and of the head unless it is the embedding.

    The layouts of all experts follow, layer by layer.
    """
    hidden, inner = of.hidden, of.inner
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (of.queries, hidden),
        "self_attn.k_proj": (of.keys, hidden),
        "self_attn.v_proj": (of.keys, hidden),
        "self_attn.o_proj": (hidden, of.queries),
    }
    if of.normed:
        layer |= {"self_attn.q_norm": (of.features,), "self_attn.k_norm": (of.features,)}
    if of.experts:
        layer["mlp.gate"] = (of.experts, hidden)
    else:
        layer |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    layer |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    embedding = _layout("model.embed_tokens", {"": (of.vocabulary, hidden)})
    head = ("lm_head",) if of.tied else ()
    yield embedding._replace(segments=tuple(segment._replace(users=head) for segment in embedding.segments))
    for index in range(of.layers):
        yield _layout(f"model.layers.{index}", {f".{module}": shape for module, shape in layer.items()})
    yield _layout("model.norm", {"": (hidden,)})
    if not of.tied:
        yield _layout("lm_head", {"": (of.vocabulary, hidden)})
    stacks = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
    for index in range(of.layers if of.experts else 0):
        name = f"model.layers.{index}.mlp.experts"
        first = arrange(
            f"{name}[0]",
            [
                ParameterSegment(f"{name}.{stack}[0]", shape, 0, math.prod(shape), True, stack=f"{name}.{stack}")
                for stack, shape in stacks.items()
            ],
            1,
        )
        # All experts have the layout of the first, under their own names.
        for row in range(of.experts):
            segments = tuple(segment._replace(name=f"{segment.stack}[{row}]", row=row) for segment in first.segments)
            yield first._replace(name=f"{name}[{row}]", segments=segments)


def _layout(unit: str, shapes: Mapping[str, tuple[int, ...]]) -> UnitLayout:
    segments = [
        ParameterSegment(f"{unit}{module}.weight", shape, 0, math.prod(shape), True) for module, shape in shapes.items()
    ]
    return arrange(unit, segments, 1)


def _uses(of: _Decoder, tokens: int, itemsize: int) -> Iterator[Use]:
    boundary = itemsize * tokens * of.hidden
    norm = _norm(of.hidden, 1, itemsize)
    yield Use(
        0,
        0.0,
        float(82 + 2 * of.features + tokens * (290 + itemsize * of.hidden + _ROTARY[itemsize] * of.features)),
        saved=_IDS * tokens,
        boundary=_IDS * tokens,
        lookup=True,
        largest=boundary,
    )
    layer, expert = _layer(of, tokens, itemsize), _expert(of, tokens, itemsize)
    first_expert = of.layers + (2 if of.tied else 3)
    for index in range(of.layers):
        # The first layer saves the rotary embeddings of all.
        rotary = 0 if index else 2 * itemsize * tokens * of.features
        yield layer._replace(unit=1 + index, saved=layer.saved + rotary, divided=layer.divided + rotary)
        if of.experts:
            yield expert._replace(unit=first_expert + index * of.experts)
    yield Use(
        of.layers + 1,
        0.0,
        float(tokens * norm[0]),
        saved=tokens * norm[1],
        boundary=boundary,
        largest=_FP32 * tokens * of.hidden,
    )
    yield Use(
        0 if of.tied else of.layers + 2,
        2.0 * tokens * of.hidden * of.vocabulary,
        float(16 + tokens * (24 + _LOSS[itemsize] * of.vocabulary)),
        saved=12 + tokens * (_IDS + itemsize * of.hidden + _FP32 * of.vocabulary),
        boundary=boundary,
        largest=_FP32 * tokens * of.vocabulary,
    )


def _norm(width: int, count: int, itemsize: int) -> tuple[int, int]:
    """Returns the bytes for each token that `count` norms of `width` elements in all move, and those that they save."""
    return 24 * count + (44 - 4 * itemsize) * width, _FP32 * count + (_FP32 + itemsize) * width


def _layer(of: _Decoder, tokens: int, itemsize: int) -> Use:
    """Returns the use of a layer without its experts."""
    hidden, inner, queries, keys = of.hidden, of.inner, of.queries, of.keys
    attention = 4.0 * tokens * tokens * queries
    moved, saved = _norm(2 * hidden, 2, itemsize)
    divided = 4 * itemsize * queries + _FP32 * of.heads
    if of.normed:
        norms = _norm(queries + keys, of.heads + of.key_heads, itemsize)
        moved, divided = moved + norms[0], divided + norms[1]
    moved += 6 * itemsize * hidden + itemsize * (10 * queries + 10 * keys + 4 * of.features)
    # Keys and values of a group of heads are copied for each head.
    moved += 0 if of.key_heads == of.heads else 4 * itemsize * queries
    saved += itemsize * hidden + divided
    if of.experts:
        # A router: the scores of all experts in fp32, and the weights and numbers of those that are chosen.
        moved += 8 - 3 * itemsize * hidden + _LOSS[itemsize] * of.experts + (44 - 3 * itemsize) * of.per_token
        mlp_flops = 2.0 * tokens * hidden * of.experts
        mlp_saved = itemsize * hidden + _FP32 * (1 + of.experts) + (_FP32 + _IDS) * of.per_token
        mlp_largest = max(_FP32 * of.experts, _IDS * of.per_token)
    else:
        moved += 5 * itemsize * inner
        mlp_flops = 6.0 * tokens * hidden * inner
        mlp_saved = itemsize * (hidden + 4 * inner)
        divided += 4 * itemsize * inner
        mlp_largest = itemsize * max(hidden, inner)
    return Use(
        1,
        4.0 * tokens * hidden * (queries + keys) + mlp_flops + attention,
        float(4 * itemsize + tokens * moved),
        saved=tokens * (saved + mlp_saved),
        boundary=itemsize * tokens * hidden,
        largest=tokens * max(_FP32 * hidden, (_FP32 if of.normed else itemsize) * queries),
        attention=attention,
        mlp_flops=mlp_flops,
        mlp_saved=tokens * mlp_saved,
        mlp_largest=tokens * mlp_largest,
        divided=tokens * divided,
    )


def _expert(of: _Decoder, tokens: int, itemsize: int) -> Use:
    """Returns the use of a layer's first expert, which stands for all that are visited."""
    rows, flops = tokens * of.per_token, 6.0 * tokens * of.per_token * of.hidden * of.inner
    saved = itemsize * rows * (1 + 2 * of.hidden + 4 * of.inner)
    return Use(
        0,
        flops,
        float(itemsize * (4 * tokens * of.hidden + rows * (1 + 5 * of.hidden + 5 * of.inner))),
        saved=saved,
        boundary=itemsize * tokens * of.hidden,
        largest=itemsize * tokens * of.hidden,
        mlp_flops=flops,
        mlp_saved=saved,
        mlp_largest=itemsize * rows * max(of.hidden, 2 * of.inner),
    )


# -- from model ----------------------------------------------------------------------------------------
#
# The shape of a model from its config or its modules, counted in one forward on fake tensors.
#
# Fake tensors allocate no memory, so a model of any size can be run.


_MLP = re.compile(r"\.\d+\.(mlp|ffn|feed_?forward)$")
"""Path of the MLP of a repeated block."""
_INDEX = re.compile(r"\.\d+(?=\.|$)")
"""Number of a block in a path, for which plans of tensor parallelism write a star."""
BY_BLOCKS = Division()
"""The default division into units."""


def from_name(
    name: str,
    sequence: int,
    dtype: torch.dtype = torch.bfloat16,
    division: Division = BY_BLOCKS,
    layers: int | None = None,
) -> Shape:
    """Returns the shape of a preset, or of a folder with a config.json."""
    known = None if division.named or layers is not None else from_preset(name, sequence, dtype.itemsize)
    whole = not RULE_LAYOUTS[division.rule].elementwise
    if known is not None and not (whole and known.experts):  # a rule for matrices divides experts otherwise
        return known._replace(tables=()) if whole else known
    config = config_of(name, layers)
    if quantized_bits(config) is not None:
        raise ConfigError(
            f"the weights of {name} are quantized, and quantized weights do not train; plan adapters on them, such as "
            "--lora r=16,targets=all-linear, or give the model before quantization"
        )
    try:
        # Fake tensors have shapes and dtypes but no memory, so a model of any size can be run.
        with fake_tensors(), torch.device("cpu"):
            check_positions(config, sequence)
            model = model_of(config, dtype)
            return _counted(model, model, list(model.parameters()), name, sequence, division)
    except ConfigError:
        raise
    except Exception as error:  # a model's own code may raise any error
        raise ConfigError(
            f"cannot run {name} without its weights ({type(error).__name__}: {error_message(error)}); "
            f"give --parameters and --layers"
        ) from error


_ALIKE = 4
"""Layers of the model that is counted in place of one with more layers that are alike: the first, two, and the last."""


def from_adapted(
    name: str, adapters: Adapters, sequence: int, dtype: torch.dtype, division: Division = BY_BLOCKS
) -> Shape:
    """Returns the shape of a preset or folder with adapters. Only the adapters are trained."""
    config = config_of(name)
    check_positions(config, sequence)
    layers = config.get_text_config().num_hidden_layers
    if name in PRESETS and PRESETS[name].config in DECODERS and layers > _ALIKE:
        with contextlib.suppress(ConfigError):  # of a target that only another layer has
            few = _of_adapted(name, config_of(name, _ALIKE), adapters, sequence, dtype, division)
            if (shape := repeated(few, layers)) is not None:
                return shape
    return _of_adapted(name, config, adapters, sequence, dtype, division)


def _of_adapted(
    name: str, config: Any, adapters: Adapters, sequence: int, dtype: torch.dtype, division: Division
) -> Shape:
    with torch.device("meta"):
        model = adapters.make(model_of(config, dtype))
    # A quantized folder is modeled by plain layers in a block format of ours: their bytes are nearly the same.
    theirs = None if (bits := quantized_bits(config)) is None else "nf4" if bits <= 4 else "int8"
    shape = from_training(model, sequence, dtype, division, {}, adapters.frozen or theirs)
    # Published weights are in bf16 unless the config says otherwise; those in codes stay no values.
    same = dtype is (getattr(config, "dtype", None) or torch.bfloat16)
    filed = {own for own, parameter in model.named_parameters() if not parameter.requires_grad and same and not theirs}
    return shape._replace(name=name, adapted=True, filed=frozenset(filed))


def repeated(shape: Shape, layers: int) -> Shape | None:
    """Returns the shape of a model of more layers, from that of four of them; None if the middle ones differ.

    The layers of the model must be alike, but for the first and the last one.
    """
    numbers = [_layer_of(layout.name) for layout in shape.layouts]
    one, other = ([unit for unit, number in enumerate(numbers) if number == layer] for layer in (1, 2))
    uses = [
        [use._replace(unit=units.index(use.unit)) for use in shape.uses if use.unit in units] for units in (one, other)
    ]
    if uses[0] != uses[1] or [_renumbered(shape.layouts[unit], 2) for unit in one] != [
        shape.layouts[unit] for unit in other
    ]:
        return None
    every: dict[int | None, Sequence[int | None]] = {None: [None], 0: [0], 1: [1]}
    every |= {_ALIKE - 2: range(_ALIKE - 2, layers - 1), _ALIKE - 1: [layers - 1]}
    layouts, places = list[UnitLayout](), dict[tuple[int, int | None], int]()
    for number, group in groupby(range(len(numbers)), numbers.__getitem__):
        units = list(group)
        for layer in every[number]:
            places |= {(unit, layer): len(layouts) + position for position, unit in enumerate(units)}
            layouts += [_renumbered(shape.layouts[unit], layer) for unit in units]
    runs = [(number, list(group)) for number, group in groupby(shape.uses, lambda use: numbers[use.unit])]
    return shape._replace(
        layouts=tuple(layouts),
        uses=tuple(
            use._replace(unit=places[use.unit, layer]) for number, run in runs for layer in every[number] for use in run
        ),
        experts=tuple(
            experts._replace(units=range(places[experts.units[0], layer], places[experts.units[-1], layer] + 1))
            for experts in shape.experts
            for layer in every[numbers[experts.units[0]]]
        ),
        matrices=frozenset(_in_layer(name, layer) for name in shape.matrices for layer in every[_layer_of(name)]),
        filed=frozenset(_in_layer(name, layer) for name in shape.filed for layer in every[_layer_of(name)]),
    )


def _layer_of(name: str) -> int | None:
    matched = _BLOCK.match(name)
    return None if matched is None else int(matched.group().rpartition(".")[2])


def _in_layer(name: str, layer: int | None) -> str:
    matched = _BLOCK.match(name)
    if matched is None:
        return name
    return f"{matched.group().rpartition('.')[0]}.{layer}{name[matched.end() :]}"


def _renumbered(layout: UnitLayout, layer: int | None) -> UnitLayout:
    segments = tuple(
        segment._replace(name=_in_layer(segment.name, layer), stack=_in_layer(segment.stack, layer))
        for segment in layout.segments
    )
    return layout._replace(name=_in_layer(layout.name, layer), segments=segments)


def from_training(
    model: nn.Module,
    sequence: int,
    dtype: torch.dtype,
    division: Division,
    always: Mapping[str, Any],
    frozen: str | None = None,
) -> Shape:
    """Returns the shape of a model that is about to be trained. The model itself stays as it is.

    One forward runs on fake tensors in place of the parameters and buffers. `always` are further keyword arguments of
    each forward, `frozen` is the block format of frozen matrices.
    """
    title = type(model).__name__
    try:
        with fake_tensors(allow_others=True), _without_checkpointing(model), _quantized_as_linear(model):
            made = _stand_ins(model, dtype)

            def forward(**inputs: Any) -> Any:
                return torch.func.functional_call(model, made, (), {**inputs, **always})

            weights = [made[name] for name, _ in model.named_parameters()]
            return _counted(model, forward, weights, title, sequence, division, (frozen, dtype))
    except Exception as error:  # a model's own code may raise any error
        # torch adds the calls of a product that it cannot make on fake tensors, line by line.
        reason = error_message(error).partition("\n")[0]
        raise ConfigError(f"cannot run {title} without its weights ({type(error).__name__}: {reason})") from error


def _stand_ins(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns a fake tensor for each parameter, in `dtype`, and for each buffer. Tied parameters stay tied."""
    made: dict[int, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    quantized = quantized_by_other_library(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in made:
            # Created inside `fake_tensors`, so nothing is allocated.
            owner = model.get_submodule(name.rpartition(".")[0])
            shape = _linear_shape(owner) if name in quantized else None
            values = torch.empty(parameter.shape if shape is None else shape, dtype=dtype, device="cpu")
            made[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
        tensors[name] = made[id(parameter)]
    for name, buffer in model.named_buffers(remove_duplicate=False):
        tensors[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
    return tensors


def _linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """Returns the shape of a linear layer's weight, taken from the layer's widths; None for another module."""
    rows, columns = getattr(module, "out_features", None), getattr(module, "in_features", None)
    return (rows, columns) if isinstance(rows, int) and isinstance(columns, int) else None


@contextlib.contextmanager
def _quantized_as_linear(model: nn.Module) -> Iterator[None]:
    """Makes layers with quantized weights compute as linear layers inside the context: their own code needs values."""
    owners = {name.rpartition(".")[0]: None for name in quantized_by_other_library(model)}
    layers = [layer for name in owners if _linear_shape(layer := model.get_submodule(name))]
    for layer in layers:
        vars(layer)["forward"] = functools.partial(_as_linear, layer)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


def _as_linear(module: Any, values: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(values, module.weight, module.bias)


@contextlib.contextmanager
def _without_checkpointing(model: nn.Module) -> Iterator[None]:
    """Sets training mode and turns gradient checkpointing off inside the context, then restores both.

    The forward must save all activations to be counted; `Load.recompute` accounts for recomputation later.
    """
    modules: list[Any] = list(model.modules())
    training = [module.training for module in modules]
    again = [module for module in modules if getattr(module, "gradient_checkpointing", False) is True]
    model.train()
    for module in again:
        module.gradient_checkpointing = False
    try:
        yield
    finally:
        for module, before in zip(modules, training, strict=True):
            module.training = before
        for module in again:
            module.gradient_checkpointing = True


def config_of(name: str, layers: int | None = None) -> Any:
    """Returns the transformers config of a preset or of a folder, optionally reduced to `layers` layers."""
    folder = Path(name)
    if not folder.is_dir() or name in ("", *PRESETS):
        check_name(name)
    if name not in PRESETS:
        check_folder(folder)
    transformers = require_transformers()
    try:
        if name in PRESETS:
            config = getattr(transformers, PRESETS[name].config)(**PRESETS[name].settings)
        else:
            config = transformers.AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
        text = config.get_text_config()
        # A key-value cache would count as saved bytes, and training has none.
        text.use_cache = False
    except Exception as error:  # transformers may raise any error for a foreign or damaged file
        raise ConfigError(
            f"cannot read the config of {name} ({type(error).__name__}: {error_message(error)})"
        ) from error
    if layers is not None:
        try:
            text.num_hidden_layers = layers
            # One entry per layer.
            if getattr(text, "layer_types", None):
                text.layer_types = text.layer_types[:layers]
        except Exception as error:  # some configs derive the number of layers from other settings
            raise ConfigError(
                f"cannot cut {name} to {layers} layers ({type(error).__name__}: {error_message(error)})"
            ) from error
    return config


def model_of(config: Any, dtype: torch.dtype) -> Any:
    """Returns the causal language model of a transformers config, on torch's default device."""
    model = require_transformers().AutoModelForCausalLM.from_config(config, dtype=dtype)
    if getattr(model, "loss_type", "") is None:
        vars(model)["loss_type"] = "ForCausalLM"
    return model


def _counted(
    model: nn.Module,
    forward: Callable[..., Any],
    weights: Sequence[torch.Tensor],
    name: str,
    sequence: int,
    division: Division,
    frozen: tuple[str | None, torch.dtype] = (None, torch.bfloat16),
) -> Shape:
    units, stacks, _ = divide(model, replace(division, vocabulary="whole"))
    # In the order of the units that `find_units` makes of pieces.
    of_pieces = divide(model, replace(division, vocabulary="pieces")).units.tables
    tables = tuple(table for table in find_tables(model) if table.parameter in of_pieces)
    stored = stored_weights(model, *frozen, parts_of(stacks), units.in_fp32)
    rows = {stack.module: stack.rows for stack in stacks}
    ids = torch.zeros(1, sequence, dtype=torch.long)
    counter = Counter({weight.untyped_storage()._cdata for weight in weights}, sequence)
    plan = getattr(model, "tp_plan", None) or {}
    hooks = [
        model.get_submodule(site).register_forward_pre_hook(_begin(counter, needed), with_kwargs=True)
        for site, needed in (units.sites | {name: groups[:1] for name, groups in units.experts.items()}).items()
    ]
    for path, module in model.named_modules():
        if _MLP.search(path):
            hooks += [
                module.register_forward_pre_hook(_marks(counter, "in_mlp", True)),
                module.register_forward_hook(_marks(counter, "in_mlp", False)),
            ]
        style = plan.get(_INDEX.sub(".*", path))
        if style in ("colwise", "rowwise"):  # the first divides its output, the second has added its parts up
            hooks.append(module.register_forward_hook(_marks(counter, "is_divided", style == "colwise")))
    try:
        with (
            without_choice(model) as per_token,
            counter,
            torch.autograd.graph.saved_tensors_hooks(counter.save, lambda packed: packed),
        ):
            forward(input_ids=ids, labels=ids)
    finally:
        for hook in hooks:
            hook.remove()
    text = getattr(model, "config", None)
    itemsize = max((weight.itemsize for weight in weights), default=2)
    return Shape(
        name=name,
        layouts=layouts_of(model, units, stored=stored),
        uses=tuple(counter.uses()),
        temporary=counter.largest,
        sequence=sequence,
        positions=None if text is None else positions_of(text),
        itemsize=itemsize,
        matrices=matrices_of(model),
        experts=tuple(
            Experts(every, per_token[module], rows[name] // len(every))
            for name, every in units.experts.items()
            if (module := id(model.get_submodule(name))) in per_token
        ),
        tables=tables,
        # The config of the language model, where transformers has one of its own for it.
        capped=getattr(getattr(text, "get_text_config", lambda: text)(), "final_logit_softcapping", None) is not None,
    )


def _begin(counter: Counter, needed: Sequence[int]) -> Any:
    """Returns a forward pre-hook that starts the uses of the units `needed`."""

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        for unit in needed:
            counter.begin(unit, tensors[0].nbytes if tensors else 0, isinstance(module, nn.Embedding))

    return begin


def _marks(counter: Counter, name: str, inside: bool) -> Any:
    def mark(*_: Any) -> None:
        setattr(counter, name, inside)

    return mark


# -- from count ----------------------------------------------------------------------------------------
#
# A decoder of equal layers, from its number of parameters.


_VOCABULARY = 32000
_MOST_PARAMETERS = 10**15
_MOST_LAYERS = 100_000
"""Far more than any model has, and few enough for torch's sizes and for a simulation."""

_LAYER = {2: (46, 151), 4: (85, 214)}
"""The key is the bytes of a weight. The values are the bytes that a layer saves, and the bytes that it moves, per token
and per element of the hidden size, for Llama's layer, whose norms and rotary embeddings are always in fp32."""
_WIDE = (43, 16)
"""Width of a gated MLP as a fraction of the hidden size, as in Llama: 11008 / 4096. It saves four tensors this wide."""
_MLP_SHARE = 8 / 12
"""Fraction of a layer's weights that its MLP contains."""


def from_count(parameters: int, layers: int, sequence: int, itemsize: int = 2) -> Shape:
    """Returns the shape of a decoder of equal layers, with an untied embedding and head of 32000 tokens.

    `itemsize` is the bytes of an element of weights and activations; the loss is always in fp32.
    """
    if parameters < 1 or layers < 1 or sequence < 1:
        raise ConfigError(
            f"expected parameters, layers and tokens of at least 1, got {parameters}, {layers}, {sequence}"
        )
    if parameters > _MOST_PARAMETERS or layers > _MOST_LAYERS:
        raise ConfigError(
            f"expected at most 1e15 parameters and {_MOST_LAYERS:,} layers, got {float(min(parameters, 1e300)):.3g} "
            f"and {float(min(layers, 1e300)):.3g}"
        )
    hidden = _hidden(parameters, layers)
    outer = _VOCABULARY * hidden
    inner = (parameters - 2 * outer) // layers
    if inner < 1:
        raise ConfigError(
            f"{parameters} parameters are too few for {layers} layers between an embedding and a head of {_VOCABULARY} "
            f"tokens; give a --model"
        )
    # The embedding takes the remainder of the division, so that the sizes sum to `parameters` exactly.
    sizes = [outer + parameters - 2 * outer - inner * layers, *[inner] * layers, outer]
    names = ["embedding", *(f"layers.{index}" for index in range(layers)), "head"]
    layouts = tuple(
        lay_out(name, [(f"{name}.weight", nn.Parameter(torch.empty(size, device="meta")))], 1)
        for name, size in zip(names, sizes, strict=True)
    )
    matrices = frozenset(f"{name}.weight" for name in names[1:-1])
    tokens = sequence * hidden
    # 2 operations per weight and token, and 4 * sequence * hidden per token for the two products of attention.
    flops = 2.0 * inner * sequence + 4.0 * sequence * tokens
    saved, traffic = _LAYER[itemsize]
    wide = itemsize * tokens * _WIDE[0] // _WIDE[1]
    layer = Use(
        0,
        flops,
        float(traffic * tokens),
        saved * tokens,
        itemsize * tokens,
        largest=_FP32 * tokens,  # the input of a norm
        attention=4.0 * sequence * tokens,
        mlp_flops=_MLP_SHARE * 2.0 * inner * sequence,
        mlp_saved=itemsize * tokens + 4 * wide,
        mlp_largest=wide,
        divided=4 * (wide + itemsize * tokens),
    )
    logits = sequence * _VOCABULARY
    # The embedding reads no weights in its backward; the head keeps the logits in fp32, at 4 bytes each.
    uses = (
        Use(0, 0.0, 2.0 * itemsize * tokens, 0, 8 * sequence, lookup=True),
        *(layer._replace(unit=index) for index in range(1, layers + 1)),
        Use(
            layers + 1,
            2.0 * outer * sequence,
            float(_LOSS[itemsize] * logits),
            _FP32 * logits,
            itemsize * tokens,
            largest=_FP32 * logits,
        ),
    )
    return Shape(
        f"{parameters / 1e9:.3g}B in {layers} layers", layouts, uses, _FP32 * logits, sequence, None, itemsize, matrices
    )


def _hidden(parameters: int, layers: int) -> int:
    """Returns the root of 12 * layers * hidden**2 + 2 * vocabulary * hidden = parameters, as a multiple of 64.

    A root below 64 is only rounded down to an integer.
    """
    # A decoder layer contains 12 * hidden**2 parameters: 4 for attention, 8 for a feed-forward of four times the width.
    a, b = 12 * layers, 2 * _VOCABULARY
    hidden = (math.sqrt(b * b + 4 * a * parameters) - b) / (2 * a)
    return max(64, round(hidden / 64) * 64) if hidden >= 64 else max(1, int(hidden))
