"""Uses of the experts of a layer in a plan: each is used in each forward, one after the other.

A forward on fake tensors has no router's choice, so all tokens go through one expert, which takes the place of all. A
batch of some thousand tokens visits nearly all of them; a plan for fewer tokens reads more than the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from offload.layout.experts.stacks import find_stacks
from offload.planner.model_shape.shape import Use

_IMPLEMENTATION = "offload_plan"
"""Name under which transformers finds `_through_one`."""


@contextlib.contextmanager
def without_choice(model: nn.Module) -> Iterator[None]:
    """Makes stacked experts compute without the router's choice inside of the context, as much as with it."""
    configs: list[Any] = [model.get_submodule(stack.module).config for stack in find_stacks(model)]
    if configs:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register(_IMPLEMENTATION, _through_one)
    before = [each._experts_implementation for each in configs]
    for each in configs:
        each._experts_implementation = _IMPLEMENTATION
    try:
        yield
    finally:
        for each, used in zip(configs, before, strict=True):
            each._experts_implementation = used


def _through_one(experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Returns the output of a module of stacked experts if all tokens chose its first one.

    Args:
        experts: the module, as transformers decorates it.
        hidden: (tokens, features).
        chosen: (tokens, n), the experts of each token.
        scores: of the same shape, their weights.
    """
    count = chosen.shape[-1]
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


def by_expert(uses: Iterable[Use], experts: Mapping[str, range]) -> tuple[Use, ...]:
    """Returns the uses of a forward in which each use of a first expert stands for those of all.

    Args:
        uses: the uses in order.
        experts: units of each module of stacked experts.
    """
    stack_of = {units[0]: units for units in experts.values()}
    return tuple(each for use in uses for each in _divided(use, stack_of.get(use.unit, range(use.unit, use.unit + 1))))


def _divided(use: Use, units: range) -> Iterator[Use]:
    """Yields an equal part of a use for each of `units`."""
    count = len(units)
    for position, unit in enumerate(units):
        # The first has what an integer division leaves over.
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
            **rest,
        )
