"""Expert parallelism: each rank has whole experts of a layer, and tokens travel to the ranks of their experts.

    this rank's tokens             its own batch; or a slice of the row's batch, so that no token is computed twice
      ─► all-to-all                each pair of a token and an expert goes to the expert's rank
      ─► the module's own forward  over the experts of this rank, each pair with weight 1
      ─► all-to-all                results go back, are weighted, and added up for each token
      ─► this rank's tokens        beside tensor parallelism all slices, on each rank

The backward goes the same way back. Sums are in another order than on one rank, as for any division of a batch.

Ranks with batches of their own share the experts of a layer in groups of `autoep_size`. ZeRO divides the states of
experts among the ranks that own the same ones, and all other states among all ranks:

    four ranks, autoep_size 2      rank 0    rank 1    rank 2    rank 3
    experts of a layer             first half          second half
    tokens travel between          0 and 2,  1 and 3

So the partitions of the ranks are those of ZeRO over all ranks, laid out by expert (`layout.flat_layout`): a step, a
commit, a checkpoint and an export know nothing of experts. Each rank takes part in each exchange, with or without
tokens, so that all ranks use the same units and make the same collectives in the same order.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from offload.config import Config
from offload.distributed.world import World
from offload.errors import ConfigError
from offload.experts.exchange import exchange_tokens
from offload.layout.experts import expert_stacks, parameter_adapters
from offload.sizes import count_of
from offload.torch_internals import inner_tensors


def form_experts(world: World, config: Config, model: nn.Module) -> World:
    """Returns the world with the groups of ranks that own experts together. Collective, if `config` asks for them.

    Tensor parallelism forms the groups of its rows itself. Raises `ConfigError` if the ranks cannot be divided into
    such groups, or the config cannot go together with them.
    """
    size, ranks = config.expert_parallel.size, world.everyone.size
    if size == 1 or config.tensor_parallel.autotp_size > 1:
        return world
    request, zero = f"expert_parallel.autoep_size is {size}", config.zero_optimization
    all_stacks = expert_stacks(model, size)
    stacks = [model.get_parameter(name) for stack in all_stacks for name in stack.parameters]
    if ranks % size:
        raise ConfigError(
            f"{request}, the number of ranks that own the experts of a layer together, and {count_of(ranks, 'rank')} "
            f"cannot be divided into such groups: set it to a divisor of {ranks}"
        )
    refused = (
        (world.divides_model, "a model that is divided already", "leave expert_parallel out"),
        (config.sequence_parallel_size > 1, "sequence_parallel_size", "leave one of them out"),
        (world.ranks.mesh.replicas > 1, "replicas of all states", "set stage 1, 2 or 3, without mics_shard_size"),
        (zero.zero_hpz_partition_size > 1, "zero_hpz_partition_size", "leave one of them out"),
        (zero.sends_codes, "codes of weights and gradients", 'leave the keys "zero_quantized_..." out'),
        (config.offload.frozen is not None, "quantized frozen weights", 'leave "frozen" out'),
        (
            any(parameter_adapters(model, stack.module) for stack in all_stacks),
            "adapters of stacked experts",
            "leave one out",
        ),
        (any(map(inner_tensors, stacks)), "experts that a library has quantized", "leave expert_parallel out"),
        (config.offload.experts not in ("auto", "grouped"), "experts of another kind", 'leave "experts" out'),
    )
    for holds, what, cure in refused:
        if holds:
            raise ConfigError(f"{request}, which does not go together with {what}: {cure}")
    owners = ranks // size  # of each expert
    groups = [list(range(first, first + owners)) for first in range(0, ranks, owners)]
    return dataclasses.replace(
        world,
        experts=world.everyone.divided([list(range(first, ranks, owners)) for first in range(owners)], -1),
        expert_shards=world.everyone.divided(groups, -1),
    )


# -- tokens --------------------------------------------------------------------------------------------


def dispatch_tokens(module: Any, mesh: Any) -> Callable[[], None]:
    """Makes the forward of a module of stacked experts send tokens to the ranks of `mesh`, in the order of experts.

    The module has the experts of this rank alone, and all ranks have the same batch. The returned function gives the
    module its forward back.
    """
    own, count = module.__dict__.get("forward"), module.num_experts
    send = functools.partial(_sent, group=mesh.get_group())
    module.num_experts = count // mesh.size()
    inner = module.forward

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        tokens, index, weights = (_slice(value, mesh) for value in (hidden_states, top_k_index, top_k_weights))
        output = exchange_tokens(inner, tokens, index, weights, range(module.num_experts), mesh.size(), send)
        return _whole(output, mesh, hidden_states.shape).to(hidden_states.dtype)

    module.forward = forward

    def undo() -> None:
        module.num_experts = count
        if own is None:
            del module.forward
        else:
            module.forward = own

    return undo


def _sent(rows: torch.Tensor, gives: Sequence[int], takes: Sequence[int], group: Any) -> torch.Tensor:
    received = rows.new_empty(sum(takes), *rows.shape[1:])
    dist.all_to_all_single(received, rows, list(takes), list(gives), group=group)
    return received


def _slice(value: torch.Tensor, mesh: Any) -> torch.Tensor:
    """Returns this rank's rows of a tensor that all ranks have. Its backward gathers the gradients of all rows."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    whole = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    rows: torch.Tensor = whole.redistribute(placements=[Shard(0)]).to_local()
    return rows


def _whole(rows: torch.Tensor, mesh: Any, shape: torch.Size) -> torch.Tensor:
    """Returns the rows of all ranks, a tensor of this shape, on each rank."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    stride = (shape[1], 1)
    parts = DTensor.from_local(rows.contiguous(), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    whole: torch.Tensor = parts.redistribute(placements=[Replicate()]).to_local()
    return whole
