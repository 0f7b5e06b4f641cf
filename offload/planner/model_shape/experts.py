"""Uses of the experts of a layer in a plan: those that a micro-batch visits, one after the other.

A forward on fake tensors has no router's choice, so all tokens go through one expert, which takes the place of all.
With E experts of a layer, k of them for each token, and a router that prefers none, t tokens visit E * (1 - (1 -
k/E)**t) by expectation. A plan draws so many of each layer for each micro-batch of each step, by chance. Several
micro-batches then visit as many together as all their tokens, by expectation.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from offload.layout.experts import find_stacks
from offload.planner.model_shape.shape import Choice, Shape, Use

_IMPLEMENTATION = "offload_plan"
"""Name under which transformers finds `_through_one`."""


@contextlib.contextmanager
def without_choice(model: nn.Module) -> Iterator[dict[int, int]]:
    """Makes stacked experts compute without the router's choice inside of the context, as much as with it.

    Yields:
        The number of experts of each token, by the id of the experts' module, once that has run.
    """
    per_token: dict[int, int] = {}
    configs: list[Any] = [model.get_submodule(stack.module).config for stack in find_stacks(model)]
    if configs:
        # Late, since a plan of a model without experts needs no transformers.
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register(_IMPLEMENTATION, partial(_through_one, per_token))
    # Models may share a config, so it is put back to what it was.
    before = [each._experts_implementation for each in configs]
    for each in configs:
        each._experts_implementation = _IMPLEMENTATION
    try:
        yield per_token
    finally:
        for each, used in zip(configs, before, strict=True):
            each._experts_implementation = used


def _through_one(
    per_token: dict[int, int], experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, scores: torch.Tensor
) -> torch.Tensor:
    """Returns the output of a module of stacked experts if all tokens chose its first one.

    Args:
        per_token: receives the number of experts of each token.
        experts: the module, as transformers decorates it.
        hidden: (tokens, features).
        chosen: (tokens, n), the experts of each token.
        scores: of the same shape, their weights.
    """
    # The work is that of the real choice: as many rows, through weights of the same shape.
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
    """Returns the shape of a micro-batch that visits as many experts of each layer as expected.

    Args:
        shape: the model; its uses are those of a micro-batch that visits all of a layer's experts at once.
        tokens: tokens of the micro-batch.
        draw: number of the micro-batch, which decides by chance which experts it visits.
    """
    if not shape.experts:
        return shape
    chance = random.Random(draw)
    choices = {
        each.units[0]: Choice(tuple(sorted(chance.sample(each.units, round(each.visited(tokens))))), each.units)
        for each in shape.experts
    }
    uses = tuple(
        part for use in shape.uses for part in (_divided(use, choices[use.unit]) if use.unit in choices else (use,))
    )
    return shape._replace(uses=uses)


def _divided(use: Use, choice: Choice) -> Iterator[Use]:
    """Yields an equal part of a use for each expert that is chosen."""
    count = len(choice.units)
    for position, unit in enumerate(choice.units):
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
            choice=choice if position == 0 else Choice(),
            **rest,
        )
