"""Memory estimators with the names and arguments of DeepSpeed's, for runs of this library.

The numbers are exact: the functions that place a run compute them from the layout, without rules of thumb.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from offload.errors import ConfigError
from offload.layout.flat_layout import UnitLayout, lay_out, layouts_of
from offload.layout.units import find_units
from offload.planner.memory import Room, settings, settle
from offload.planner.ranks import gradients_of, weights_of
from offload.sizes import format_size

_ENDLESS = Room(1 << 62, 1, None)
"""A host without limit, and a device without spare memory. Its arena has room for three units of the largest size."""

# Devices of weights and states, from the least memory to the most. With ZeRO-2 all weights are on the GPU.
_ZERO_3 = (("nvme", "nvme"), ("cpu", "nvme"), ("cpu", "cpu"), ("none", "cpu"), ("none", "none"))
_ZERO_2 = tuple(tiers for tiers in _ZERO_3 if tiers[0] == "none")


class Estimate(NamedTuple):
    """Bytes of one placement of weights and optimizer states."""

    weights: str
    states: str
    host: int
    """Bytes of one machine: the host budgets of all its ranks."""
    device: int
    """Bytes of one GPU without activations: in stage 3 the arena before it grows, in stage 2 with all weights."""
    disk: int
    """Bytes of one machine: two slots of all states that train, so every step is durable; 0 without nvme."""
    sent: int
    """Bytes of weights and gradients that one GPU sends in a step of one micro-batch."""


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints the bytes of the states of `model` in each placement.

    Args:
        model: a model whose parameters may be on the meta device.
        num_gpus_per_node: ranks of one machine.
        num_nodes: machines.
        additional_buffer_factor: without effect, since all buffers are counted.

    Raises:
        ConfigError: `num_gpus_per_node` or `num_nodes` is less than 1.
    """
    _print(_live(model, num_gpus_per_node, num_nodes, 3), num_gpus_per_node, num_nodes)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Prints the bytes of the states in each placement, for a model from its number of parameters.

    Args:
        total_params: parameters of the model, such as 2851e6; must be integral.
        largest_layer_params: parameters of the largest layer; must be integral.
        num_gpus_per_node: ranks of one machine.
        num_nodes: machines.
        additional_buffer_factor: without effect, since all buffers are counted.

    Raises:
        ConfigError: a number is not integral or is less than 1, or the largest layer exceeds the model.
    """
    rows = estimates_of_count(_count(total_params), _count(largest_layer_params), num_gpus_per_node, num_nodes, 3)
    _print(rows, num_gpus_per_node, num_nodes)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints those lines of `estimate_zero3_model_states_mem_needs_all_live` that have all weights on the GPU.

    The arguments and the error are the same.
    """
    _print(_live(model, num_gpus_per_node, num_nodes, 2), num_gpus_per_node, num_nodes)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Prints those lines of `estimate_zero3_model_states_mem_needs_all_cold` that have all weights on the GPU.

    The arguments and the error are the same. The largest layer is assumed to have 1/32 of the parameters.
    """
    total = _count(total_params)
    rows = estimates_of_count(total, -(-total // 32), num_gpus_per_node, num_nodes, 2)
    _print(rows, num_gpus_per_node, num_nodes)


def estimates(layouts: Sequence[UnitLayout], ranks: int, nodes: int, stage: int) -> list[Estimate]:
    """Returns the bytes of each placement, for bf16 and AdamW."""
    rows, uses = [], [*range(len(layouts)), *reversed(range(len(layouts)))]
    for weights, states in _ZERO_3 if stage == 3 else _ZERO_2:
        content = settings(weights, states)
        content["zero_optimization"]["stage"] = stage
        # All ranks of a machine have equal shards, so one rank's bytes times `ranks` are the machine's.
        memory = settle(layouts, content, _ENDLESS, world_size=ranks * nodes)
        if stage < 3:
            more = max(memory.placement.device_need.weights - memory.device, 0)
            memory = replace(memory, placement=memory.placement.grown(more))
        sent = 0
        if ranks * nodes > 1:
            gathered = weights_of(memory, uses, ranks * nodes)
            sent = gathered.nbytes + gradients_of(memory.parts, layouts, 1, ranks * nodes).nbytes
        rows.append(Estimate(weights, states, ranks * memory.host, memory.device, ranks * memory.stored, sent))
    return rows


def _live(model: nn.Module, ranks: int, nodes: int, stage: int) -> list[Estimate]:
    _check(ranks, nodes)
    return estimates(layouts_of(model, find_units(model), ranks * nodes), ranks, nodes, stage)


def estimates_of_count(total: int, largest: int, ranks: int, nodes: int, stage: int) -> list[Estimate]:
    """Returns the bytes of each placement of a model from its number of parameters, in all and of its largest layer."""
    _check(ranks, nodes)
    if not 1 <= largest <= total:
        raise ConfigError(f"expected a largest layer of 1 to {total} parameters, got {largest}")
    # As many units of the largest size as fit, and one for the remainder: the layout needs a size for each unit.
    sizes = [largest] * (total // largest) + ([total % largest] if total % largest else [])
    # One meta tensor per unit suffices: a layout depends on sizes only, and meta tensors allocate no memory.
    layouts = [
        lay_out(f"{index}", [("weight", nn.Parameter(torch.empty(size, device="meta")))], ranks * nodes)
        for index, size in enumerate(sizes)
    ]
    return estimates(layouts, ranks, nodes, stage)


def _count(number: float) -> int:
    """Returns a number of parameters as an int; DeepSpeed's documentation writes such numbers as floats."""
    # bool is a subclass of int.
    if not (isinstance(number, int | float) and not isinstance(number, bool) and number >= 1 and number % 1 == 0):
        raise ConfigError(f"expected a whole number of parameters, as 2851e6, got {number!r}")
    return int(number)


def _check(ranks: int, nodes: int) -> None:
    if ranks < 1 or nodes < 1:
        raise ConfigError(f"expected num_gpus_per_node and num_nodes of at least 1, got {ranks} and {nodes}")


def _print(rows: Sequence[Estimate], ranks: int, nodes: int) -> None:
    print(
        f"model states in bf16 with AdamW on {nodes} x {ranks} GPUs, without activations; host and disk of one "
        "machine; sent by each GPU in a step of one micro-batch:"
    )
    # DeepSpeed's functions print the table too, and return nothing.
    print(f"{'host':>10} | {'each GPU':>10} | {'disk':>10} | {'sent':>10} | tiers")
    for estimate in rows:
        sizes = " | ".join(
            f"{format_size(nbytes):>10}" for nbytes in (estimate.host, estimate.device, estimate.disk, estimate.sent)
        )
        print(f"{sizes} | offload_param={estimate.weights}, offload_optimizer={estimate.states}")
