"""Division of a list of layers into stages of about equal weight. Pure functions, but for the count of parameters."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from offload.deepspeed.pipe.specs import LayerSpec, TiedLayerSpec
from offload.errors import ConfigError


def partition(layers: Sequence[Any], stages: int, method: str) -> list[int]:
    """Returns the first layer of each stage, and the number of layers as the last element.

    Args:
        layers: specs, modules and functions.
        stages: number of stages, each of which has a layer at the least.
        method: "uniform", "parameters", or "type:" with a regular expression for names of classes.

    Raises:
        ConfigError: if there are fewer layers than stages, or the method is another one.
    """
    if len(layers) < stages:
        raise ConfigError(f"PipelineModule has {len(layers)} layers for {stages} stages: each stage needs one")
    return balanced(_weigh(layers, method), stages)


def _weigh(layers: Sequence[Any], method: str) -> list[int]:
    """Returns the weight of each layer."""
    kind = method.lower()
    if kind == "uniform":
        return [1] * len(layers)
    if kind == "parameters":
        return _counted(layers)
    if kind.startswith("type:"):
        pattern = re.compile(method.split(":", 1)[1], re.IGNORECASE)
        found = [1 if pattern.search(_class_of(layer).__name__) else 0 for layer in layers]
        if not any(found):
            raise ConfigError(f'partition_method is "{method}", and no layer has a class of such a name')
        return found
    raise ConfigError(
        f'partition_method must be "parameters", "uniform" or "type:" and a regular expression, got {method!r}'
    )


def _class_of(layer: Any) -> Any:
    """Returns the class of a layer; of a function the function itself."""
    if isinstance(layer, LayerSpec):
        return layer.typename
    return type(layer) if isinstance(layer, nn.Module) else layer if hasattr(layer, "__name__") else type(layer)


def _counted(layers: Sequence[Any]) -> list[int]:
    """Returns the elements of each layer's parameters that train. A tied layer counts at its first use."""
    seen: set[str] = set()
    found = []
    for layer in layers:
        # Its weights are in the first stage that uses them already, as far as the balance goes.
        if isinstance(layer, TiedLayerSpec) and layer.key in seen:
            found.append(0)
            continue
        if isinstance(layer, TiedLayerSpec):
            seen.add(layer.key)
        built = layer
        if isinstance(layer, LayerSpec):
            # Without memory, and without a draw from the generators of the process.
            with torch.device("meta"), torch.random.fork_rng(devices=[]):
                built = layer.build()
        parameters = built.parameters() if isinstance(built, nn.Module) else ()
        found.append(sum(each.numel() for each in parameters if each.requires_grad))
    return found


def balanced(weights: Sequence[int], parts: int) -> list[int]:
    """Returns borders of `parts` runs of `weights`, none empty, whose heaviest is as light as possible.

    Of equally good ones the others are about equal too, and the first are the longest.

    Args:
        weights: weight of each item, 0 or more.
        parts: number of runs, at most that of items.
    """
    sums, count = [0, *itertools.accumulate(weights)], len(weights)
    # best[i]: of the division of the items from i on, the weight of its heaviest run, the sum of squares, its borders.
    best: dict[int, tuple[int, int, list[int]]] = {count: (0, 0, [])}
    # One run more in each turn; shorter divisions of the rest are complete by then.
    for _ in range(parts):
        former, best = best, {}
        for first in range(count):
            found = []
            for end in (each for each in former if each > first):
                heaviest, squares, borders = former[end]
                weight = sums[end] - sums[first]
                found.append((max(weight, heaviest), squares + weight**2, -end, borders))
            if found:
                heaviest, squares, end, borders = min(found)
                best[first] = (heaviest, squares, [-end, *borders])
    return [0, *best[0][2]]
