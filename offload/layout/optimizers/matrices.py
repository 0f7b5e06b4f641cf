"""Optimizers with a rule for matrices, Muon and SinkGD: the parameters that are matrices, and the states of each.

    a matrix of Muon      momentum_buffer             4 bytes an element
    a matrix of SinkGD    nothing
    any other parameter   exp_avg, exp_avg_sq         8 bytes an element: AdamW

Pure functions of the model. A run and the planner decide by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from offload.errors import ConfigError
from offload.layout.flat_layout import UnitLayout, with_kept
from offload.layout.opaque_state import StateField
from offload.swapper.modes import MUON, SINKGD

MATRIX_RULES = (MUON, SINKGD)
"""Names of the rules that step matrices in their own way, and all other parameters by AdamW."""
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


def states_of(rule: str, shape: tuple[int, ...], matrix: bool) -> tuple[StateField, ...]:
    """Returns the states that a rule of `MATRIX_RULES` keeps for a parameter.

    Args:
        rule: name of the rule.
        shape: shape of the parameter.
        matrix: True if the rule steps the parameter as a matrix.
    """
    if not matrix:
        return (StateField("exp_avg", "float32", shape), StateField("exp_avg_sq", "float32", shape))
    return (StateField("momentum_buffer", "float32", shape),) if rule == MUON else ()


def with_matrices(layouts: Sequence[UnitLayout], model: nn.Module) -> tuple[UnitLayout, ...]:
    """Returns the layouts of a model's units, whose segments know which of them are matrices."""
    matrices = matrices_of(model)
    return tuple(
        layout._replace(segments=tuple(s._replace(matrix=s.name in matrices) for s in layout.segments))
        for layout in layouts
    )


def with_states(layouts: Sequence[UnitLayout], rule: str) -> tuple[UnitLayout, ...]:
    """Returns the layouts with the states that the optimizer keeps of each trainable parameter.

    Args:
        layouts: the layout of each unit, from `with_matrices`.
        rule: name of the optimizer's rule; one outside of `MATRIX_RULES` changes nothing.
    """
    if rule not in MATRIX_RULES:
        return tuple(layouts)
    return tuple(
        with_kept(layout, {s.name: states_of(rule, s.shape, s.matrix) for s in layout.segments if s.trainable})
        for layout in layouts
    )


def product_flops(layouts: Sequence[UnitLayout], rule: str, iterations: int) -> float:
    """Returns the floating-point operations of Muon's products in one step; 0 for other rules.

    Args:
        layouts: the layout of each unit, from `with_matrices`.
        rule: name of the optimizer's rule.
        iterations: Newton-Schulz iterations.
    """
    if rule != MUON:
        return 0.0
    matrices = (s for layout in layouts for s in layout.segments if s.matrix and s.trainable)
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
