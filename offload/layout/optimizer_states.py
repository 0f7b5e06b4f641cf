"""Parameters that an optimizer steps as a whole: their division among ranks, and the memory that a step needs.

A rank steps the parameters that it holds whole. A divided parameter is stepped on one of its ranks, its `home`: the
other ranks send their elements there, and receive the result of the step.

    Muon, SinkGD      matrices                there the update of the momentum (or the gradient), back the direction
    torch.optim.X     every parameter         there master and gradient, back the master

Pure functions of layouts.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from offload import kernels
from offload.errors import ConfigError
from offload.kernels.update import decode_moments, encode_moments
from offload.layout.flat_layout import (
    ParameterSegment,
    SegmentShard,
    StateField,
    UnitLayout,
    arrange,
    describe_state,
    home,
    segment_shards,
    with_kept,
)
from offload.layout.modes import ADAM, MOMENT_BLOCK, MUON, ONE_BIT_LAMB, RULE_LAYOUTS, TORCH, Mode
from offload.states import State

# -- whole ---------------------------------------------------------------------------------------------


class WholeSizes(NamedTuple):
    """Sizes of the parameters that an optimizer steps as a whole, in elements; 0 if it has none."""

    parameter: int = 0
    """The largest such parameter."""
    square: int = 0
    """The largest square of the smaller dimension of a matrix."""
    tile: int = 0
    """The largest run of this rank's elements that a tile must contain, with the padding after it."""
    traded: int = 0
    """Most elements of a unit that this rank sends to the homes of parameters, and receives as their home."""


NO_WHOLE_SIZES = WholeSizes()


class DividedParameter(NamedTuple):
    """A parameter that several ranks divide, and that is stepped as a whole."""

    number: int
    """Index of the parameter in its unit."""
    home: int
    """Rank that steps it."""
    parts: tuple[SegmentShard, ...]
    """The parts, one for each rank that holds some of the parameter, in order."""


def divided(layout: UnitLayout, mode: Mode, world_size: int) -> tuple[DividedParameter, ...]:
    """Returns the parameters of a unit that are stepped as a whole and that several ranks divide, in order."""
    parameters = []
    for index, segment in _stepped_whole(layout, mode):
        parts = tuple(segment_shards(layout, world_size, segment))
        if len(parts) > 1:
            parameters.append(DividedParameter(index, home(layout, world_size, segment), parts))
    return tuple(parameters)


def cuts(layout: UnitLayout, mode: Mode, part: range, alone: bool, tile_numel: int) -> tuple[range, ...]:
    """Returns the elements of each tile of a unit's update, counted in the rank's partition, in order.

    Elements outside of matrices are in tiles of any size. Another tile contains a matrix, or several small ones. With
    several ranks, one tile contains all of a rank's parts of matrices, since ranks exchange these parts at once. A tile
    has at most `tile_numel` elements, unless a whole matrix needs more.
    """
    rest = max(0, min(layout.rest_stop, part.stop) - part.start)
    ranges = [range(start, min(start + tile_numel, rest)) for start in range(0, rest, tile_numel)]
    borders = [rest, *_borders(layout)] if alone else [rest, len(part)]
    start = rest
    for border, following in zip(borders[1:], [*borders[2:], None], strict=True):
        if following is None or following - start > tile_numel:
            if start < border:
                ranges.append(range(start, border))
            start = border
    return tuple(ranges)


def whole_sizes(layouts: Sequence[UnitLayout], mode: Mode, rank: int, world_size: int) -> WholeSizes:
    """Returns one rank's sizes of the parameters that an optimizer steps as a whole."""
    if not mode.steps_whole:
        return NO_WHOLE_SIZES
    numels = [segment.numel for layout in layouts for _, segment in _stepped_whole(layout, mode)]
    shapes = [segment.shape for layout in layouts for _, segment in _stepped_whole(layout, mode)]
    # A rank sends its parts of divided parameters to their homes. As a home, it receives the parts of other ranks.
    traded = [
        sum(
            part.numel
            for parameter in divided(layout, mode, world_size)
            for part in parameter.parts
            if (part.rank == rank) is not (parameter.home == rank)
        )
        for layout in layouts
    ]
    return WholeSizes(
        parameter=max(numels, default=0),
        square=max((min(shape) ** 2 for shape in shapes if len(shape) == 2), default=0),
        tile=max((_longest(layout, mode, rank, world_size) for layout in layouts), default=0),
        traded=max(traded, default=0),
    )


def _stepped_whole(layout: UnitLayout, mode: Mode) -> Iterator[tuple[int, ParameterSegment]]:
    for index, segment in enumerate(layout.segments):
        if (
            segment.trainable
            and segment.numel
            and (mode.whole_units or (mode.matrix_rule and layout.is_matrix(segment)))
        ):
            yield index, segment


def _borders(layout: UnitLayout) -> list[int]:
    """Returns the first element of each matrix of a unit after the first one, and the end of the last one's padding."""
    starts = sorted(segment.start for segment in layout.segments if layout.is_matrix(segment) and segment.numel)
    return [*starts[1:], layout.trainable_stop]


def _longest(layout: UnitLayout, mode: Mode, rank: int, world_size: int) -> int:
    part = layout.trainable(rank, world_size)
    if mode.whole_units:
        return len(part)
    rest = len(layout.rest(rank, world_size))
    if world_size > 1:
        return len(part) - rest
    borders = [rest, *_borders(layout)]
    return max(stop - start for start, stop in pairwise(borders))


# -- master weights ------------------------------------------------------------------------------------
#
# Conversion between an fp32 master and its stored states: the weight alone, with its low bits, or with a full copy.


KEPT = (State.WEIGHT, State.MASTER_LOW_BITS, State.MASTER)
"""States that can hold a master; each mode uses some of them."""


def split(values: torch.Tensor, states: Mapping[State, torch.Tensor], noise: kernels.Noise | None = None) -> None:
    """Writes masters into the states that hold them.

    `values`, (n,), may have any floating dtype; the states of the mode are (n,) each. `noise` rounds masters of fewer
    bits than fp32 stochastically; without it they are rounded to nearest.
    """
    weight = states[State.WEIGHT]
    if State.MASTER_LOW_BITS in states:
        kernels.split_master(values.float(), weight, states[State.MASTER_LOW_BITS], noise)
        return
    if State.MASTER in states:
        states[State.MASTER].copy_(values)
    weight.copy_(values)


def weights_of(masters: torch.Tensor, kept: Mapping[State, torch.dtype]) -> torch.Tensor:
    """Returns the weights that `split` stores for `masters`. `masters` are (n,) fp32 on the CPU."""
    states = {state: torch.empty(len(masters), dtype=dtype, device="cpu") for state, dtype in kept.items()}
    split(masters, states)
    return states[State.WEIGHT]


def master_sources(weights: Collection[State]) -> tuple[State, ...]:
    """Returns the states, among those that hold a master, that `join` reads."""
    return (State.MASTER,) if State.MASTER in weights else tuple(weights)


def join(states: Mapping[State, torch.Tensor], room: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the master that `split` wrote, (n,) fp32; without a copy if one of the states is the master itself.

    The states of the mode are (n,) each. `room` is memory for the result, (n,) fp32, if weight and low bits must be
    joined; None allocates it.
    """
    if State.MASTER in states:
        return states[State.MASTER]
    weight = states[State.WEIGHT]
    if State.MASTER_LOW_BITS not in states:
        return weight.float()
    master = torch.empty(len(weight), dtype=torch.float32, device="cpu") if room is None else room
    kernels.join_master(weight, states[State.MASTER_LOW_BITS], master)
    return master


def put_weight(values: torch.Tensor, states: Mapping[State, torch.Tensor]) -> None:
    """Writes `values`, (n,) in the weight's dtype. Elements whose bits do not change keep their master."""
    # Bits are compared as int16, not as floats: NaN differs from NaN, and -0.0 equals 0.0, as floats.
    weight = states[State.WEIGHT]
    if State.MASTER_LOW_BITS in states:
        states[State.MASTER_LOW_BITS].mul_(weight.view(torch.int16) == values.view(torch.int16))
    elif State.MASTER in states:
        master = states[State.MASTER]
        torch.where(weight.view(torch.int16) == values.view(torch.int16), master, values.float(), out=master)
    weight.copy_(values)


# -- matrices ------------------------------------------------------------------------------------------
#
# Optimizers with a rule for matrices, Muon and SinkGD: the parameters that are matrices, and the states of each.
#
#     a matrix of Muon      momentum_buffer             4 bytes an element, in the place of exp_avg
#     a matrix of SinkGD    nothing
#     any other parameter   exp_avg, exp_avg_sq         8 bytes an element: AdamW
#
# Pure functions of the model and its layout. A run and the planner decide by them.


MOMENTUM = "momentum_buffer"
"""torch's name for the state that Muon keeps for a matrix."""
MARK = "use_muon"
"""Attribute of a parameter, and key of a group, by which a user chooses the matrices; DeepSpeed's name."""
_ENDS = ("embed", "lm_head")
"""Parts of names of embeddings and heads, as DeepSpeed excludes them; in lower case."""


def matrices_of(model: nn.Module) -> frozenset[str]:
    """Returns the names of the parameters that a rule for matrices steps.

    A parameter is one of them if it has two dimensions, each above 1, and is no embedding and no head: no
    `nn.Embedding` contains it, the model does not name it as its output embeddings, and neither "embed" nor "lm_head"
    is in its name. The attribute `use_muon` of a parameter overrides this rule. Raises `ConfigError` if a marked
    parameter does not have two dimensions.
    """
    ends = _embeddings(model)
    names = set()
    for name, parameter in model.named_parameters():
        mark = getattr(parameter, MARK, None)
        if mark is None:
            shape, lower = tuple(parameter.shape), name.lower()
            inner = len(shape) == 2 and min(shape) > 1 and not any(part in lower for part in _ENDS)
            wanted = inner and id(parameter) not in ends
        else:
            wanted = checked_mark(mark, name, tuple(parameter.shape))
        if wanted:
            names.add(name)
    return frozenset(names)


def checked_mark(mark: Any, name: str, shape: Sequence[int]) -> bool:
    """Returns a mark as a bool.

    Raises `ConfigError` if the mark is true, and the parameter does not have two dimensions.
    """
    if mark and len(shape) != 2:
        raise ConfigError(
            f"{name} is marked with {MARK}=True and has shape {list(shape)}, but only a parameter of two dimensions is "
            "a matrix; set the mark to False, so that AdamW trains the parameter"
        )
    return bool(mark)


LAMB_COEFFICIENTS = tuple(
    StateField(name, "float") for name in ("lamb_coeff_freeze", "last_factor", "momentum_scale", "scaling_coeff")
)
"""Numbers of 1-bit LAMB for a parameter, by DeepSpeed's names; `momentum_scale` is the root mean square of the momentum
at the end of the warm-up."""


def states_of(mode: Mode, layout: UnitLayout, segment: ParameterSegment) -> dict[str, State]:
    """Returns the moments that the library's kernel keeps for a parameter, by torch's names."""
    if not (mode.matrix_rule and layout.is_matrix(segment)):
        return {state.value: state for state in mode.moments if state not in (State.PACKED, *mode.rule.of_one_rank)}
    of_matrices = [state for state in mode.moments if state not in mode.partial]
    return dict(zip((MOMENTUM,), of_matrices, strict=False))


def for_rule(
    layouts: Sequence[UnitLayout], rule: str, matrices: Collection[str], world_size: int
) -> tuple[UnitLayout, ...]:
    """Returns the layouts as a rule needs them.

    The matrices are last if the rule steps matrices in its own way. 1-bit LAMB packs coefficients of each parameter.
    """
    if rule == ONE_BIT_LAMB:
        return tuple(
            with_kept(layout, {s.name: LAMB_COEFFICIENTS for s in layout.segments if s.trainable}, world_size)
            for layout in layouts
        )
    if not RULE_LAYOUTS[rule].not_of_matrices:
        return tuple(layouts)
    return tuple(
        arrange(layout.name, layout.segments, world_size, matrices, in_fp32=layout.in_fp32) for layout in layouts
    )


def product_flops(layouts: Sequence[UnitLayout], rule: str, iterations: int) -> float:
    """Returns the floating-point operations of Muon's products in one step; 0 for other rules."""
    if rule != MUON:
        return 0.0
    matrices = (segment for layout in layouts for segment in layout.segments if layout.is_matrix(segment))
    return float(iterations) * sum(_flops(s.shape) for s in matrices)


def _flops(shape: tuple[int, ...]) -> float:
    """Returns the operations of one iteration on a matrix; a layer of known size only counts as 12 squares."""
    if len(shape) != 2:
        # A decoder layer has four squares in attention, and an MLP of eight.
        return 12 * 6 * float((shape[0] / 12) ** 1.5)
    small, large = min(shape), max(shape)
    return 4.0 * small * small * large + 2.0 * small**3


def _embeddings(model: nn.Module) -> set[int]:
    ids = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for parameter in module.parameters()
    }
    # transformers' models return their head by this method. A tied head is the embedding's parameter anyhow.
    head = getattr(model, "get_output_embeddings", None)
    module = head() if callable(head) else None
    if isinstance(module, nn.Module):
        ids |= {id(parameter) for parameter in module.parameters()}
    return ids


# -- moment values -------------------------------------------------------------------------------------
#
# Values of moments in any form: fp32 and bf16 as they are, 8 bits by the codes and scales of their blocks.


def scales_of(mode: Mode, scales: torch.Tensor, numel: int, offset: int = 0) -> torch.Tensor:
    """Returns the scales of the blocks of `numel` elements as the kernels take them, (blocks, moments).

    `scales`, (n,), begin with the first of these blocks. `offset` is the number of the first element in its block.
    """
    return scales[: len(mode.part(State.SCALES, 0, offset + numel))].view(-1, len(mode.moments))


def moment_sources(mode: Mode, state: State) -> tuple[State, ...]:
    """Returns the states that together give the values of `state`: moments in 8 bits need their scales."""
    return (state, State.SCALES) if mode.in_blocks and state in mode.moments else (state,)


def read(mode: Mode, states: Mapping[State, torch.Tensor], state: State, offset: int = 0) -> torch.Tensor:
    """Returns the values of a moment, without a copy if it is fp32 or bf16.

    `states` are (n,) of the moment on the CPU, and for moments in 8 bits also the scales from the moment's first block
    on. `offset` is the number of the first element in its block.
    """
    stored = states[state]
    if not mode.in_blocks:
        return stored
    values = torch.empty(len(stored), dtype=torch.float32, device="cpu")
    scales = scales_of(mode, states[State.SCALES], len(stored), offset)
    decode_moments(stored, scales, mode.moments.index(state), values, offset)
    return values


def write(mode: Mode, states: Mapping[State, torch.Tensor], state: State, start: int, values: torch.Tensor) -> None:
    """Replaces elements of a moment, rounded to nearest where it is not fp32.

    The values end with a block, or with their parameter: the rest of the last block is padding. `states` are the moment
    and the scales of its blocks on the CPU, each from the first element of a block on. `start` is the first element of
    a block. `values`, (n,), may have any floating dtype.
    """
    stop = start + len(values)
    if not mode.in_blocks:
        states[state][start:stop].copy_(values)
        return
    assert start % MOMENT_BLOCK == 0, "parameters, tiles and partitions begin at a border of blocks"
    part = mode.part(State.SCALES, start, stop)
    scales = states[State.SCALES][part.start : part.stop].view(-1, len(mode.moments))
    encode_moments(values.float(), states[state][start:stop], scales, mode.moments.index(state))


# -- of torch ------------------------------------------------------------------------------------------
#
# Optimizers of torch by name: their classes, the ones that a kernel of the library computes, and the other ones'
# states.


WITHOUT_KERNEL = ("amsgrad", "maximize", "capturable", "differentiable", "initial_accumulator_value")
"""Options of torch's optimizers that the kernels do not implement."""
_REFUSED = {
    "LBFGS": "it computes the loss again and again by a closure, and a step of an engine has the gradients alone",
    "SparseAdam": "it takes sparse gradients, and those of an engine are dense",
}
"""Classes of torch that no engine can run, with the reason."""


def kernel_rule(kind: type, groups: Iterable[Mapping[str, Any]]) -> str:
    """Returns the name of the rule whose kernel computes what an optimizer does; TORCH if none does.

    A subclass may override `step`, so the exact class counts.
    """
    options = list(groups)
    # If a single group sets such an option, torch's own code updates all groups.
    if any(group.get(option) for group in options for option in WITHOUT_KERNEL):
        return TORCH
    if kind in (torch.optim.AdamW, torch.optim.Adam, kernels.CPUAdamW):
        return ADAM
    if kind is torch.optim.Adagrad:
        return "adagrad"
    if kind is torch.optim.SGD:
        # One group with momentum gives all units a momentum buffer.
        return "momentum" if any(group.get("momentum") for group in options) else "sgd"
    return TORCH


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Returns a class of `torch.optim` by a name such as "torch.optim.NAdam".

    Raises `ConfigError` if there is no such class, or an engine cannot run it.
    """
    known = {
        class_name: value
        for class_name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    short = name.rpartition(".")[2]
    if name != f"torch.optim.{short}" or short not in known:
        usable = ", ".join(sorted(known.keys() - _REFUSED.keys()))
        raise ConfigError(f"optimizer.type {name} is no optimizer of torch {torch.__version__}, which has {usable}")
    if short in _REFUSED:
        raise ConfigError(f"optimizer.type {name} is not supported: {_REFUSED[short]}; use AdamW")
    return known[short]


def make(name: str, params: Sequence[Any], arguments: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Returns a new optimizer of torch.

    Raises `ConfigError` if the class does not exist or does not take the arguments.
    """
    kind: Any = optimizer_class(name)
    known = [argument for argument in inspect.signature(kind).parameters if argument != "params"]
    unknown = [key for key in arguments if key not in known]
    if unknown:
        raise ConfigError(f"optimizer.params contains {unknown[0]}, and {name} takes {', '.join(known)}")
    keywords = {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
    try:
        made: torch.optim.Optimizer = kind(params, **keywords)
    except Exception as error:  # the class checks its numbers, by errors of any type
        raise ConfigError(f"optimizer.params do not make a {name}: {error}") from error
    return made


def with_states_of_torch(
    layouts: Sequence[UnitLayout], name: str, arguments: Mapping[str, Any], world_size: int = 1
) -> tuple[UnitLayout, ...]:
    """Returns the layouts with the states that an optimizer of torch keeps of each trainable parameter.

    Used by a plan, which has no optimizer. The parameters are meta tensors, or real tensors of a few elements if the
    optimizer's code needs values. The states of real tensors are scaled up.
    """
    known: dict[tuple[int, ...], tuple[StateField, ...]] = {}
    completed = []
    for layout in layouts:
        trainable = [segment for segment in layout.segments if segment.trainable]
        for segment in trainable:
            if segment.shape not in known:
                known[segment.shape] = _states(name, arguments, segment.shape)
        completed.append(with_kept(layout, {segment.name: known[segment.shape] for segment in trainable}, world_size))
    return tuple(completed)


def _states(name: str, arguments: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[StateField, ...]:
    with contextlib.suppress(RuntimeError):
        return describe_state(_stepped(name, arguments, shape, "meta"))
    # Each dimension of a state is a dimension of the parameter, or 1. Small dimensions that differ show which.
    small = tuple(5 + number for number in range(len(shape)))
    sizes = dict(zip(small, shape, strict=True))
    return tuple(
        field._replace(shape=tuple(sizes.get(size, size) for size in field.shape))
        for field in describe_state(_stepped(name, arguments, small, "cpu"))
    )


def _stepped(name: str, arguments: Mapping[str, Any], shape: tuple[int, ...], device: str) -> Mapping[str, Any]:
    parameter = nn.Parameter(torch.ones(shape, dtype=torch.float32, device=device))
    optimizer: Any = make(name, [parameter], arguments)
    for _ in range(2):
        parameter.grad = torch.ones(shape, dtype=torch.float32, device=device)
        with torch.device("cpu"):  # whatever the default device of the process
            optimizer.step()
    states: Mapping[str, Any] = optimizer.state[parameter]
    return states
