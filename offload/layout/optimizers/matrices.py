"""Optimizers with a rule for matrices, Muon and SinkGD: the parameters that are matrices, and the states of each.

    a matrix of Muon      momentum_buffer             4 bytes an element, in the place of exp_avg
    a matrix of SinkGD    nothing
    any other parameter   exp_avg, exp_avg_sq         8 bytes an element: AdamW

Pure functions of the model and its layout. A run and the planner decide by them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from offload.errors import ConfigError
from offload.layout.flat_layout import Segment, UnitLayout, arrange
from offload.layout.modes import MUON, NOT_OF_MATRICES, Mode
from offload.states import State

MATRIX_RULES = tuple(NOT_OF_MATRICES)
"""Names of the rules that step matrices in their own way, and all other parameters by AdamW."""
MOMENTUM = "momentum_buffer"
"""torch's name of the state of a matrix of Muon."""
MARK = "use_muon"
"""Attribute of a parameter, and key of a group, by which a user decides; DeepSpeed's name."""
_ENDS = ("embed", "lm_head")
"""Parts of names of embeddings and heads, as DeepSpeed excludes them; in lower case."""


def matrices_of(model: nn.Module) -> frozenset[str]:
    """Returns the names of the parameters that a rule for matrices steps.

    A parameter is one of them if it has two dimensions, each above 1, and is no embedding and no head: no
    `nn.Embedding` contains it, the model does not name it as its output embeddings, and neither "embed" nor "lm_head"
    is in its name. The attribute `use_muon` of a parameter comes before this rule.

    Raises:
        ConfigError: a parameter is marked that has no two dimensions.
    """
    ends = _embeddings(model)
    found = set()
    for name, parameter in model.named_parameters():
        mark = getattr(parameter, MARK, None)
        if mark is None:
            wanted = _is_inner(name, tuple(parameter.shape)) and id(parameter) not in ends
        else:
            wanted = checked_mark(mark, name, tuple(parameter.shape))
        if wanted:
            found.add(name)
    return frozenset(found)


def checked_mark(mark: Any, name: str, shape: Sequence[int]) -> bool:
    """Returns a mark as a bool.

    Args:
        mark: the value of `use_muon` on a parameter, or in the parameter's group.
        name: name of the parameter, for the error.
        shape: shape of the parameter.

    Raises:
        ConfigError: the mark is true, and the parameter has no two dimensions.
    """
    if mark and len(shape) != 2:
        raise ConfigError(
            f"{name} is marked with {MARK}=True and has shape {list(shape)}, but only a parameter of two dimensions is "
            "a matrix; set the mark to False, so that AdamW trains the parameter"
        )
    return bool(mark)


def states_of(mode: Mode, layout: UnitLayout, segment: Segment) -> dict[str, State]:
    """Returns the moments that a kernel of ours keeps of a parameter, by the names that torch gives them.

    Args:
        mode: the mode.
        layout: the parameter's unit.
        segment: the parameter.
    """
    if not (mode.matrix_rule and layout.is_matrix(segment)):
        return {state.value: state for state in mode.moments if state is not State.PACKED}
    of_matrices = [state for state in mode.moments if state not in mode.partial]
    return dict(zip((MOMENTUM,), of_matrices, strict=False))


def for_rule(
    layouts: Sequence[UnitLayout], rule: str, matrices: Collection[str], world_size: int
) -> tuple[UnitLayout, ...]:
    """Returns the layouts as a rule needs them: with the matrices last, if it has a way of its own for them.

    Args:
        layouts: the layout of each unit.
        rule: name of the optimizer's rule.
        matrices: names of the parameters that are matrices.
        world_size: number of ranks.
    """
    if rule not in MATRIX_RULES:
        return tuple(layouts)
    return tuple(arrange(layout.name, layout.segments, world_size, matrices) for layout in layouts)


def product_flops(layouts: Sequence[UnitLayout], rule: str, iterations: int) -> float:
    """Returns the floating-point operations of Muon's products in one step; 0 for other rules.

    Args:
        layouts: the layout of each unit, from `for_rule`.
        rule: name of the optimizer's rule.
        iterations: Newton-Schulz iterations.
    """
    if rule != MUON:
        return 0.0
    matrices = (segment for layout in layouts for segment in layout.segments if layout.is_matrix(segment))
    return float(iterations) * sum(_flops(s.shape) for s in matrices)


def _flops(shape: tuple[int, ...]) -> float:
    """Returns the operations of an iteration on a matrix; a layer of which only the size is known is 12 squares."""
    if len(shape) != 2:
        # A decoder layer has four squares in attention, and an MLP of eight.
        return 12 * 6 * float((shape[0] / 12) ** 1.5)
    small, large = min(shape), max(shape)
    return 4.0 * small * small * large + 2.0 * small**3


def _is_inner(name: str, shape: tuple[int, ...]) -> bool:
    """Returns True if a parameter is a matrix by shape and name."""
    return len(shape) == 2 and min(shape) > 1 and not any(part in name.lower() for part in _ENDS)


def _embeddings(model: nn.Module) -> set[int]:
    """Returns the ids of the parameters of embeddings, and of the head that the model names."""
    found = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for parameter in module.parameters()
    }
    # transformers' models name their head by this method; a tied one is the embedding's parameter anyhow.
    head = getattr(model, "get_output_embeddings", None)
    module = head() if callable(head) else None
    if isinstance(module, nn.Module):
        found |= {id(parameter) for parameter in module.parameters()}
    return found
