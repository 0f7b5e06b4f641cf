"""Flat layout of a unit's parameters in one range of elements, and the partition of each rank.

    [ trainable segments, padding | frozen segments, padding ]
      rank 0 │ rank 1 │ …           rank 0 │ rank 1 │ …

Both regions are divided evenly, so that every rank holds equally many state elements and reads equally many bytes. A
rank's partition is its shard of the trainable region followed by its shard of the frozen region.

Frozen weights may be stored as blocks of codes, or as bytes that another library has made of them. Their segments come
last in the frozen region, first bytes, then blocks, and are counted in elements like all other segments. On the device
the unit has more elements than its partitions contain: the values of the blocks follow the two regions. The device
computes the values once the partitions are there.

    device:  [ trainable region | frozen region: weights, bytes, blocks of codes | values of the blocks, padding ]

With expert parallelism a unit has all experts of a layer. Each region is then divided by expert: the partitions of the
ranks that own some experts contain these experts alone, and on the device such a rank has nothing else of the unit.

For an optimizer with a rule for matrices, the matrices come last in the trainable region. Each matrix begins at a
page's border, so that tiles can be cut there. States that a matrix lacks then belong only to the elements before the
matrices.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.layout.modes import MOMENT_BLOCK, Mode
from offload.layout.units import Unit, Units, external_parameters
from offload.sizes import PAGE, align_up
from offload.swapper.memory.device_arena import ViewPlaces

# -- opaque state --------------------------------------------------------------------------------------
#
# Packing of the states that an optimizer keeps for one parameter, of any kind, into consecutive bytes.
#
#     [ one presence byte for each state | first state | second state | … ]     each at a multiple of 64 bytes
#
# An unpacked tensor is a view, so changes that the optimizer makes in place are packed already. Before the first step
# all presence bytes are zero, so `unpack` returns no states.


OPAQUE_ALIGNMENT = 64
"""Alignment of each state in bytes. It suits torch's vectorized code, and is the same for every placement."""
_NUMBERS: dict[str, type[bool] | type[int] | type[float]] = {"bool": bool, "int": int, "float": float}
_DTYPES: dict[str, torch.dtype] = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}


def is_kind(kind: str) -> bool:
    """Returns True if `kind` is a valid kind of a `StateField`."""
    return kind in _DTYPES or isinstance(getattr(torch, kind, None), torch.dtype)


class StateField(NamedTuple):
    """Description of one state of a parameter: a tensor or a Python number."""

    name: str
    kind: str
    """"bool", "int", "float", or a dtype such as "float32"."""
    shape: tuple[int, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the packed form."""
        dtype = _DTYPES.get(self.kind) or getattr(torch, self.kind)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the packed form, without padding."""
        return math.prod(self.shape) * self.dtype.itemsize


def describe_state(state: Mapping[str, Any]) -> tuple[StateField, ...]:
    """Returns a description of each entry of an optimizer's `state` of one parameter, ordered by name.

    Raises `TypeError` if an entry has no fixed layout, such as a sparse tensor or a list.
    """
    fields: list[StateField] = []
    for name in sorted(state):
        value = state[name]
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.is_quantized:
                raise TypeError(f"{name} is a tensor that is not dense")
            fields.append(StateField(name, str(value.dtype).removeprefix("torch."), tuple(value.shape)))
        elif type(value) in _NUMBERS.values():
            fields.append(StateField(name, type(value).__name__))
        # None is the absence of a state, which the presence byte represents.
        elif value is not None:
            raise TypeError(f"{name} is a {type(value).__name__}, neither a tensor nor a number")
    return tuple(fields)


def packed_nbytes(kept: Sequence[StateField]) -> int:
    """Returns the bytes of a packed state; 0 if there are no fields."""
    return align_up(len(kept), OPAQUE_ALIGNMENT) + sum(align_up(field.nbytes, OPAQUE_ALIGNMENT) for field in kept)


def unpack(kept: Sequence[StateField], memory: torch.Tensor) -> dict[str, Any]:
    """Returns the state that is stored in `memory`, (nbytes,) uint8; its tensors are views of `memory`."""
    return {
        field.name: (value.item() if field.kind in _NUMBERS else value)
        for there, field, value in _fields(kept, memory)
        if there.item()
    }


def pack(kept: Sequence[StateField], state: Mapping[str, Any], memory: torch.Tensor) -> None:
    """Writes a state into `memory`; its tensors may be the views that `unpack` returned, which need no copy.

    `memory` is (nbytes,) uint8, owned by the caller. Raises `TypeError` if the state contains an entry that the dry run
    did not find, or one of another kind or shape.
    """
    # All fields are checked before the first byte is written.
    expected = {field.name: field for field in kept}
    changed = next((field for field in describe_state(state) if expected.get(field.name) != field), None)
    if changed is not None:
        raise TypeError(
            f"{changed.name} is {_describe(changed)} now and was {_describe(expected.get(changed.name))} in the dry run"
        )
    for there, field, place in _fields(kept, memory):
        value = state.get(field.name)
        there.fill_(value is not None)
        if value is None:
            continue
        if not isinstance(value, torch.Tensor):
            place.fill_(value)
        # Same address and strides: the optimizer changed the view in place, and its bytes are already packed.
        elif value.data_ptr() != place.data_ptr() or value.stride() != place.stride():
            place.copy_(value)


def _fields(
    fields: Sequence[StateField], memory: torch.Tensor
) -> Iterator[tuple[torch.Tensor, StateField, torch.Tensor]]:
    start = align_up(len(fields), OPAQUE_ALIGNMENT)
    for number, field in enumerate(fields):
        # Each field starts at a multiple of 64 bytes, so its view is aligned for any dtype.
        place = memory[start : start + field.nbytes].view(field.dtype).view(field.shape)
        yield memory[number], field, place
        start += align_up(field.nbytes, OPAQUE_ALIGNMENT)


def _describe(field: StateField | None) -> str:
    return "absent" if field is None else f"{field.kind} {list(field.shape)}"


# -- flat layout ---------------------------------------------------------------------------------------


ALIGNMENT = 32
"""Alignment of segments in elements: 64 bytes in 16 bits, 128 in fp32.

A misaligned fp32 `F.linear` was seen to change bits.
"""

_PARTITION_ALIGNMENT = 2048
"""Alignment of partitions in elements: 4096 bytes of a state with 2 bytes an element, the smallest; see `laid_out_for`.

Every state of every partition therefore takes full pages.
"""


WORD = 4
"""Bytes of a word; the size of a PACKED partition is a multiple of words."""


class FrozenStorage(NamedTuple):
    """How a frozen parameter is stored, if not as values."""

    form: str
    """Name of the block format; see `offload.kernels.blocks`. Empty for the bytes of inner tensors."""
    numel: int
    """Memory of the blocks or bytes, in elements of the weights' dtype."""
    inner: tuple[StateField, ...] = ()
    """Inner tensors; see `offload.layout.frozen`."""
    kind: str = ""
    """Class of a parameter with inner tensors, and other facts that decide how its bytes are read."""


class ParameterSegment(NamedTuple):
    """Position of one parameter in its unit, in elements."""

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int
    """Elements in the partitions: the parameter's elements, or the memory of its blocks or bytes in elements."""
    trainable: bool
    kept: tuple[StateField, ...] = ()
    """States of the parameter, for an optimizer whose states are packed."""
    packed_start: int = 0
    """Start of these states in the PACKED partition of their rank, in words of four bytes."""
    packed_rank: int = 0
    """Rank that keeps these states: the parameter's home."""
    form: str = ""
    """Name of the block format of a frozen parameter; empty for values in the dtype of the weights."""
    inner: tuple[StateField, ...] = ()
    """Inner tensors of a parameter that another library has quantized, and that is stored as their bytes."""
    stack: str = ""
    """Name of the model's parameter, if this is one expert's row or a part of it; empty for a whole parameter."""
    row: int = 0
    """Index of the expert in the stack."""
    kind: str = ""
    """Class of a parameter with inner tensors, and other facts that decide how its bytes are read."""
    rows: range | None = None
    """Rows that are this group of experts or piece of a table; None for one expert's row and a whole parameter."""
    users: tuple[str, ...] = ()
    """Further modules whose forward needs the parameter: that own it too, or have registered it as external."""

    @property
    def parameter(self) -> str:
        """Name of the model's parameter."""
        return self.stack or self.name

    @property
    def first(self) -> int:
        """Index of the first value in the model's parameter; 0 for a whole parameter."""
        if self.rows is not None:
            return self.rows.start * math.prod(self.shape[1:])
        return self.row * self.value_numel

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns the values of the segment, as a view of the model's parameter."""
        if self.rows is not None:
            return parameter[self.rows.start : self.rows.stop]
        return parameter[self.row] if self.stack else parameter

    def joined_to(self, before: tuple[int, ...] | None) -> tuple[int, ...]:
        """Returns the shape of the model's parameter as far as this segment; `before` is the shape without it, if any.

        The segments of a parameter come in their order.
        """
        if not self.stack:
            return self.shape
        rows = before[0] if before else 0
        return (rows + 1, *self.shape) if self.rows is None else (rows + self.shape[0], *self.shape[1:])

    @property
    def value_numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    @property
    def packed(self) -> range:
        """Words of the PACKED partition of `packed_rank` that belong to this parameter."""
        # Packed states are padded to 64 bytes, so the division leaves no remainder.
        return range(self.packed_start, self.packed_start + packed_nbytes(self.kept) // WORD)

    @property
    def stop(self) -> int:
        """End of the parameter's elements in the unit."""
        return self.start + self.numel


IN_FILES, IN_FP32 = "in files", "in fp32"
"""Ends of the names of units of a module beside others: of one that stays in the model's own files, or in fp32."""
ROOT = "the root"
"""Name of the root module's unit where another word follows."""


class UnitLayout(NamedTuple):
    """Flat layout of a unit: trainable segments first, then frozen ones.

    The elements between and after the segments are padding: zero at the start, and never read.
    """

    name: str
    segments: tuple[ParameterSegment, ...]
    numel: int
    """Elements in the partitions of all ranks."""
    trainable_stop: int
    """End of the trainable region. Both regions are padded to a multiple of world size times 2048."""
    matrices_start: int | None = None
    """Start of the matrices, which end the trainable region; None if the optimizer has no rule for them."""
    in_fp32: bool = False
    """True if the weights stay in fp32, whatever the mode of the run is."""
    ep_size: int = 1
    """Number of equal groups of consecutive partitions that have whole experts; 1 if ranks divide each parameter."""
    in_files: bool = False
    """True if all weights are frozen and stay in the model's own files, so that no store contains them."""

    @property
    def module(self) -> str:
        """The name of the module whose forward needs the unit, or of the part of a parameter that is the unit."""
        name = self.name.removesuffix(IN_FILES).rstrip() if self.in_files else self.name
        return name.removesuffix(IN_FP32).rstrip().removeprefix(ROOT) if self.in_fp32 else name

    def mode_in(self, run: Mode) -> Mode:
        """Returns the mode of the unit in a run: the run's mode, or the same mode with weights in fp32."""
        return run.in_fp32 if self.in_fp32 else run

    @property
    def rest_stop(self) -> int:
        """End of the trainable elements outside of matrices."""
        return self.trainable_stop if self.matrices_start is None else self.matrices_start

    def is_matrix(self, segment: ParameterSegment) -> bool:
        """Returns True if the optimizer's rule for matrices steps the parameter."""
        return segment.trainable and segment.start >= self.rest_stop

    @property
    def blocks_start(self) -> int:
        """Start of the segments that are stored as blocks; `numel` if there are none."""
        return min((segment.start for segment in self.segments if segment.form), default=self.numel)

    @property
    def values_stop(self) -> int:
        """End of the elements that are values: libraries' bytes and blocks begin there; `numel` if there are none."""
        return min((segment.start for segment in self.segments if segment.form or segment.inner), default=self.numel)

    @property
    def device_starts(self) -> tuple[int, ...]:
        """First element of each parameter's values on the device, in the order of the segments."""
        starts: list[int] = []
        end = self.local_numel
        for segment in self.segments:
            starts.append(end if segment.form else self.device_start(segment.start))
            if segment.form:
                end = align_up(end + segment.value_numel, ALIGNMENT)
        return tuple(starts)

    def device_start(self, element: int) -> int:
        """Returns the place of an element of the partitions on the device, of a rank that has the element there."""
        if self.ep_size == 1:
            return element
        if element < self.trainable_stop:
            return element % self.gradient_numel
        return self.gradient_numel + (element - self.trainable_stop) % (self.local_numel - self.gradient_numel)

    def computes(self, segment: ParameterSegment, part: range) -> bool:
        """Returns True if the rank whose trainable elements are `part` computes the gradient of a trainable segment."""
        return segment.start // self.gradient_numel == part.start // self.gradient_numel

    @property
    def local_numel(self) -> int:
        """Elements of the partitions that a rank has on the device: all of them, or those of its experts."""
        return self.numel // self.ep_size

    @property
    def gradient_numel(self) -> int:
        """Elements of the gradients that a rank computes: all that train, or those of its experts."""
        return self.trainable_stop // self.ep_size

    @property
    def device_numel(self) -> int:
        """Elements of the unit on the device: those of the partitions that are there, and the values of blocks."""
        values = sum(align_up(segment.value_numel, ALIGNMENT) for segment in self.segments if segment.form)
        return self.local_numel + align_up(values, _PARTITION_ALIGNMENT)

    @property
    def used_numel(self) -> int:
        """Elements that a use of the unit reads: the elements of its weights, without the elements of blocks."""
        return self.device_numel - (self.numel - self.blocks_start)

    def packed_numel(self, rank: int = 0) -> int:
        """Returns the words of a rank's PACKED partition, padded to full pages."""
        ends = (segment.packed.stop for segment in self.segments if segment.packed_rank == rank)
        return align_up(max(ends, default=0) * WORD, PAGE) // WORD

    def trainable(self, rank: int, world_size: int) -> range:
        """Returns this rank's elements of the trainable region, which come first in its partition and have states."""
        return _shard_of(range(self.trainable_stop), rank, world_size)

    def rest(self, rank: int, world_size: int) -> range:
        """Returns this rank's trainable elements outside of matrices, which come first among its trainable elements."""
        part = self.trainable(rank, world_size)
        return range(part.start, max(part.start, min(part.stop, self.rest_stop)))

    def frozen(self, rank: int, world_size: int) -> range:
        """Returns this rank's elements of the frozen region: the rest of its partition."""
        return _shard_of(range(self.trainable_stop, self.numel), rank, world_size)


def _shard_of(region: range, rank: int, world_size: int) -> range:
    """Returns one rank's even shard of a region; the length is a multiple of `world_size`."""
    length = len(region) // world_size
    return range(region.start + rank * length, region.start + (rank + 1) * length)


def lay_out(
    name: str,
    parameters: Iterable[tuple[str, nn.Parameter]],
    world_size: int,
    stored: Mapping[str, FrozenStorage] = {},
    matrices: Collection[str] | None = None,
    row: int | None = None,
    in_fp32: bool = False,
    rows: range | None = None,
    ep_size: int = 1,
) -> UnitLayout:
    """Places parameters one after the other, each at a multiple of 32 elements, and returns the layout.

    Args:
        stored: frozen parameters that are stored as blocks or bytes, by name; for a stack, the storage of one part.
        matrices: names of the parameters that the optimizer steps as matrices; None if it has no rule for them.
        row: the expert whose rows of the parameters are laid out; None for whole parameters.
        rows: the rows of the parameters that are laid out; None for whole parameters.
        ep_size: equal parts of `rows`, each with segments of its own, which other ranks have.
    """
    if rows is not None and ep_size > 1:
        named, size = list(parameters), len(rows) // ep_size
        parts = [range(first, first + size) for first in range(rows.start, rows.stop, size)]
        laid_out = [lay_out(name, named, world_size, stored, matrices, rows=part) for part in parts]
        of_all = [segment for layout in laid_out for segment in layout.segments]
        return arrange(name, of_all, world_size, matrices, in_fp32=in_fp32, ep_size=ep_size)
    segments = []
    for parameter_name, parameter in parameters:
        shape = tuple(parameter.shape if row is None else parameter.shape[1:])
        if rows is not None:
            shape = (len(rows), *shape[1:])
        storage = FrozenStorage("", math.prod(shape))
        if not parameter.requires_grad:
            storage = stored.get(parameter_name, storage)
        segment = ParameterSegment(
            parameter_name,
            shape,
            0,
            storage.numel,
            parameter.requires_grad,
            form=storage.form,
            inner=storage.inner,
            kind=storage.kind,
        )
        if row is not None:
            segment = segment._replace(name=f"{parameter_name}[{row}]", stack=parameter_name, row=row)
        if rows is not None:
            segment = segment._replace(
                name=f"{parameter_name}[{rows.start}:{rows.stop}]", stack=parameter_name, rows=rows
            )
        segments.append(segment)
    return arrange(name, segments, world_size, matrices, in_fp32=in_fp32)


def arrange(
    name: str,
    segments: Sequence[ParameterSegment],
    world_size: int,
    matrices: Collection[str] | None = None,
    mode: Mode | None = None,
    in_fp32: bool = False,
    ep_size: int = 1,
) -> UnitLayout:
    """Returns the layout of `segments`, whose positions are not known yet.

    With moments in 8 bits, each trainable parameter begins with a new block of moments. A state of one byte an element
    fills pages too. None for `mode` stands for a mode without 8-bit moments and such states. For the other arguments
    see `lay_out`.
    """
    if ep_size > 1:
        return _by_expert(name, segments, world_size, mode, ep_size)
    in_blocks = mode is not None and mode.in_blocks
    page_step = _PARTITION_ALIGNMENT if mode is None else mode.page_step
    step = world_size * page_step
    end = 0

    def place(chosen: Iterable[ParameterSegment], alignment: int = ALIGNMENT) -> list[ParameterSegment]:
        nonlocal end
        placed = []
        for segment in chosen:
            placed.append(segment._replace(start=end))
            end = align_up(end + segment.numel, alignment)
        return placed

    # Parameters keep the model's order among those that train, matrices, and frozen values, bytes and blocks.
    trainable = [segment for segment in segments if segment.trainable]
    rest = (segment for segment in trainable if segment.name not in (matrices or ()))
    placed = place(rest, MOMENT_BLOCK if in_blocks else ALIGNMENT)
    matrices_start = None
    if matrices is not None:
        matrices_start = end = align_up(end, page_step)
        placed += place((segment for segment in trainable if segment.name in matrices), page_step)
    # Each region ends at a multiple of the alignment of all ranks, so that `_shard_of` divides it evenly.
    trainable_stop = end = align_up(end, step)
    frozen = [segment for segment in segments if not segment.trainable]
    placed += place(sorted(frozen, key=lambda segment: 2 if segment.form else 1 if segment.inner else 0))
    # A unit whose parameters are all empty still gets one step of padding, so that no rank's partition is empty.
    return UnitLayout(name, tuple(placed), max(align_up(end, step), step), trainable_stop, matrices_start, in_fp32)


def _by_expert(
    name: str, segments: Sequence[ParameterSegment], world_size: int, mode: Mode | None, ep_size: int
) -> UnitLayout:
    """Returns the layout of `ep_size` groups of experts, each with partitions of its own; see `arrange`."""
    groups: dict[range | None, list[ParameterSegment]] = {}
    for segment in segments:
        groups.setdefault(segment.rows, []).append(segment)
    # All groups have the same shapes, so their layouts are alike.
    layouts = [arrange(name, group, max(1, world_size // ep_size), mode=mode) for group in groups.values()]
    stop = layouts[0].trainable_stop
    frozen = layouts[0].numel - stop
    placed = [
        segment._replace(start=segment.start + (group * stop if trains else (ep_size - 1) * stop + group * frozen))
        for trains in (True, False)
        for group, layout in enumerate(layouts)
        for segment in layout.segments
        if segment.trainable is trains
    ]
    return UnitLayout(name, tuple(placed), ep_size * (stop + frozen), ep_size * stop, ep_size=ep_size)


def with_kept(layout: UnitLayout, kept: Mapping[str, tuple[StateField, ...]], world_size: int = 1) -> UnitLayout:
    """Returns `layout` with the states that an optimizer of torch keeps for each parameter, packed one after the other.

    A parameter without an entry keeps no states.
    """
    segments: list[ParameterSegment] = []
    ends = [0] * world_size
    for segment in layout.segments:
        rank = home(layout, world_size, segment) if segment.trainable else 0
        # The end of a segment's packed range follows from its start, so the start is set first.
        fields = kept.get(segment.name, ())
        segments.append(segment._replace(kept=fields, packed_start=ends[rank], packed_rank=rank))
        ends[rank] = segments[-1].packed.stop
    return layout._replace(segments=tuple(segments))


def layouts_of(
    model: nn.Module,
    units: Units,
    world_size: int = 1,
    kept: Mapping[str, tuple[StateField, ...]] = {},
    stored: Mapping[str, FrozenStorage] = {},
    matrices: Collection[str] | None = None,
) -> tuple[UnitLayout, ...]:
    """Returns the layout of every unit of `model`."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    users = _users(model, parameters)

    def layout(unit: Unit) -> UnitLayout:
        of_the_unit = [(name, parameters[name]) for name in unit.parameters]
        name = f"{unit.name or ROOT} {IN_FP32}" if unit.in_fp32 else unit.name
        # A piece of a table is stored as values.
        of_unit = {} if units.tables.keys() & set(unit.parameters) and unit.rows is not None else stored
        rows = unit.row, unit.in_fp32, unit.rows, unit.ep_size
        laid_out = lay_out(name, of_the_unit, world_size, of_unit, matrices, *rows)
        segments = (segment._replace(users=users.get(segment.parameter, ())) for segment in laid_out.segments)
        return with_kept(laid_out._replace(segments=tuple(segments)), kept, world_size)

    return tuple(layout(unit) for unit in units.units)


def _users(model: nn.Module, parameters: dict[str, nn.Parameter]) -> dict[str, tuple[str, ...]]:
    """Returns the names of the modules that need a parameter of another module, by the parameter's first name."""
    first = {id(parameter): name for name, parameter in reversed(parameters.items())}
    needs = [(id(parameter), name.rpartition(".")[0]) for name, parameter in parameters.items()]
    needs += [
        (id(parameter), name) for name, module in model.named_modules() for parameter in external_parameters(module)
    ]
    users: dict[str, dict[str, None]] = {}
    for parameter, module in needs:
        name = first.get(parameter)
        if name is not None and module != name.rpartition(".")[0]:
            users.setdefault(name, {})[module] = None
    return {name: tuple(modules) for name, modules in users.items()}


class SegmentShard(NamedTuple):
    """Consecutive elements of a parameter that one rank holds."""

    rank: int
    position: int
    """Index of the first element in the parameter."""
    start: int
    """Index of the first element in the rank's WEIGHT partition; if trainable, in the partition of each state."""
    numel: int


def segment_shards(
    layout: UnitLayout, world_size: int, segment: ParameterSegment, start: int = 0, stop: int | None = None
) -> Iterator[SegmentShard]:
    """Yields the parts of elements [start, stop) of a parameter in order; one rank holds each part.

    Elements are counted in the parameter; a `stop` of None is the parameter's end.
    """
    region = range(layout.trainable_stop) if segment.trainable else range(layout.trainable_stop, layout.numel)
    shard_numel = len(region) // world_size
    before = 0 if segment.trainable else layout.trainable_stop // world_size  # the trainable shard comes first
    first = segment.start + start
    last = segment.stop if stop is None else segment.start + stop
    while first < last:
        # Both regions are divided evenly, so the rank follows from the position alone.
        rank, within = divmod(first - region.start, shard_numel)
        numel = min(last - first, shard_numel - within)
        yield SegmentShard(rank, first - segment.start, before + within, numel)
        first += numel


def home(layout: UnitLayout, world_size: int, segment: ParameterSegment) -> int:
    """Returns the rank that steps a trainable parameter, if the step needs the whole parameter.

    It is the rank with most of the parameter's elements. Among several such ranks the parameter's name decides, so that
    they share the work.
    """
    shards = list(segment_shards(layout, world_size, segment))
    most = max((shard.numel for shard in shards), default=0)
    ranks = [shard.rank for shard in shards if shard.numel == most] or [0]
    return ranks[zlib.crc32(segment.name.encode()) % len(ranks)]


def view_places(layout: UnitLayout, dtype: torch.dtype) -> ViewPlaces:
    """Returns the place of each parameter in a unit's device buffer."""
    # A parameter that is stored as bytes has tensors of its own, which are never placeholders: `PagedTensor`.
    tensors = [
        (segment.shape, torch.empty(segment.shape, device="meta").stride(), start)
        for segment, start in zip(layout.segments, layout.device_starts, strict=True)
        if not segment.inner
    ]
    return ViewPlaces(dtype=dtype, tensors=tuple(tensors))


# -- state pages ---------------------------------------------------------------------------------------
#
# Layouts of units with states of one byte an element: moments in 8 bits, in blocks with a scale, and bf24 masters.


def laid_out_for(layouts: Sequence[UnitLayout], mode: Mode, world_size: int) -> tuple[UnitLayout, ...]:
    """Returns the layouts as a mode needs them.

    A block of moments in 8 bits has one scale, so it may not contain elements of two parameters: each parameter begins
    at a multiple of a block. A state of one byte an element fills pages if partitions are multiples of 4096 elements.
    """
    return placed_for(layouts, mode, world_size) if mode.in_bytes else tuple(layouts)


def placed_for(layouts: Sequence[UnitLayout], mode: Mode, world_size: int) -> tuple[UnitLayout, ...]:
    """Returns the layouts as a mode needs them, like `laid_out_for`, but from layouts of any mode."""

    def placed(layout: UnitLayout) -> UnitLayout:
        matrices = None
        if layout.matrices_start is not None:
            matrices = {segment.name for segment in layout.segments if layout.is_matrix(segment)}
        arranged = arrange(layout.name, layout.segments, world_size, matrices, mode, layout.in_fp32, layout.ep_size)
        return arranged._replace(in_files=layout.in_files)

    return tuple(placed(layout) for layout in layouts)
