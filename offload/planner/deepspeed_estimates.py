"""DeepSpeed's estimators, by its names, with what this library takes: exact from the layout, not a rule of thumb."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from offload.errors import ConfigError
from offload.layout.flat_layout import UnitLayout, lay_out, layouts_of
from offload.layout.units import find_units
from offload.planner.memory import Room, settings, settle
from offload.sizes import format_size

_ENDLESS = Room(1 << 62, 1, None)
"""Room for all, on a device that has none to spare: three of the largest units come and go on it."""

_ZERO_3 = (("nvme", "nvme"), ("cpu", "nvme"), ("cpu", "cpu"), ("none", "cpu"), ("none", "none"))
_ZERO_2 = tuple(homes for homes in _ZERO_3 if homes[0] == "none")


class Estimate(NamedTuple):
    """Bytes with weights and states at home so."""

    weights: str
    states: str
    host: int
    """Of one machine: the host budgets of all its ranks."""
    device: int
    """Of one GPU, without activations."""
    disk: int
    """Of one machine: two slots, so every step is durable."""


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print what the states of `model` take in each placement; its parameters may be on the meta device.

    `additional_buffer_factor` has no effect: all buffers are counted.
    """
    _print(_live(model, num_gpus_per_node, num_nodes, _ZERO_3), num_gpus_per_node, num_nodes)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """The same for a model that is not there: its parameters, and those of its largest layer, such as 2851e6."""
    found = _cold(_count(total_params), _count(largest_layer_params), num_gpus_per_node, num_nodes, _ZERO_3)
    _print(found, num_gpus_per_node, num_nodes)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """As `estimate_zero3_model_states_mem_needs_all_live`, with weights on the GPU."""
    _print(_live(model, num_gpus_per_node, num_nodes, _ZERO_2), num_gpus_per_node, num_nodes)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """As `estimate_zero3_model_states_mem_needs_all_cold`, with weights on the GPU, in layers of a 32nd each."""
    total = _count(total_params)
    found = _cold(total, -(-total // 32), num_gpus_per_node, num_nodes, _ZERO_2)
    _print(found, num_gpus_per_node, num_nodes)


def estimates(
    layouts: Sequence[UnitLayout], ranks: int, nodes: int, homes: Sequence[tuple[str, str]]
) -> list[Estimate]:
    """What each placement takes, for bf16 and AdamW; `ranks` are those of one of `nodes` machines."""
    found = []
    for weights, states in homes:
        memory = settle(layouts, settings(weights, states), _ENDLESS, world_size=ranks * nodes)
        found.append(Estimate(weights, states, ranks * memory.host, memory.device, ranks * memory.stored))
    return found


def _live(model: nn.Module, ranks: int, nodes: int, homes: Sequence[tuple[str, str]]) -> list[Estimate]:
    _check(ranks, nodes)
    return estimates(layouts_of(model, find_units(model), ranks * nodes), ranks, nodes, homes)


def _cold(total: int, largest: int, ranks: int, nodes: int, homes: Sequence[tuple[str, str]]) -> list[Estimate]:
    _check(ranks, nodes)
    if not 1 <= largest <= total:
        raise ConfigError(f"expected a largest layer of 1 to {total} parameters, got {largest}")
    sizes = [largest] * (total // largest) + ([total % largest] if total % largest else [])
    layouts = [
        lay_out(f"{index}", [("weight", nn.Parameter(torch.empty(size, device="meta")))], ranks * nodes)
        for index, size in enumerate(sizes)
    ]
    return estimates(layouts, ranks, nodes, homes)


def _count(number: float) -> int:
    """A number of parameters, which DeepSpeed's documentation writes as a float."""
    if not (isinstance(number, int | float) and not isinstance(number, bool) and number >= 1 and number % 1 == 0):
        raise ConfigError(f"expected a whole number of parameters, as 2851e6, got {number!r}")
    return int(number)


def _check(ranks: int, nodes: int) -> None:
    if ranks < 1 or nodes < 1:
        raise ConfigError(f"expected num_gpus_per_node and num_nodes of at least 1, got {ranks} and {nodes}")


def _print(found: Sequence[Estimate], ranks: int, nodes: int) -> None:
    print(f"model states in bf16 with AdamW on {nodes} x {ranks} GPUs, without activations; host and disk a machine:")
    print(f"{'host':>10} | {'each GPU':>10} | {'disk':>10} | homes")
    for each in found:
        sizes = " | ".join(f"{format_size(nbytes):>10}" for nbytes in (each.host, each.device, each.disk))
        print(f"{sizes} | offload_param={each.weights}, offload_optimizer={each.states}")
