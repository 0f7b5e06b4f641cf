"""Expert parallelism: each rank of a row has whole experts of a layer, and tokens travel to the ranks of their experts.

    the row's batch, the same on each rank
      ─► this rank's tokens          a slice of them, so that no token is computed twice
      ─► all-to-all                  each pair of a token and an expert goes to the expert's rank
      ─► the module's own forward    over the experts of this rank, each pair with weight 1
      ─► all-to-all                  results go back, are weighted, and added up for each token
      ─► the row's batch             all slices, on each rank

The backward goes the same way back. Sums are in another order than on one rank, as for any division of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def dispatch_tokens(module: Any, mesh: Any) -> Callable[[], None]:
    """Makes the forward of a module of stacked experts send tokens to the ranks of `mesh`, in the order of experts.

    The module has the experts of this rank alone. The returned function gives the module its forward back.
    """
    own, count = module.__dict__.get("forward"), module.num_experts
    module.num_experts = count // mesh.size()
    inner = module.forward

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        tokens, index, weights = (_slice(value, mesh) for value in (hidden_states, top_k_index, top_k_weights))
        output = _exchanged(inner, tokens, index, weights, module.num_experts, mesh)
        return _whole(output, mesh, hidden_states.shape).to(hidden_states.dtype)

    module.forward = forward

    def undo() -> None:
        module.num_experts = count
        if own is None:
            del module.forward
        else:
            module.forward = own

    return undo


def _exchanged(
    forward: Callable[..., torch.Tensor],
    tokens: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    experts: int,
    mesh: Any,
) -> torch.Tensor:
    """Returns the weighted sum of experts for each token of this rank. Collective of the row.

    Args:
        forward: of the module, over the `experts` of this rank.
        tokens: (n, width).
        index: (n, k), the experts of each token among all.
        weights: (n, k).
    """
    group, ranks = mesh.get_group(), mesh.size()
    chosen = index.reshape(-1)
    # Sorted, pairs are in the order of ranks, since each has consecutive experts; within an expert in that of tokens.
    order = torch.argsort(chosen, stable=True)
    given = torch.bincount(chosen, minlength=experts * ranks)
    taken = torch.empty_like(given)
    dist.all_to_all_single(taken, given, group=group)
    gives, takes = torch.stack([given.view(ranks, experts).sum(1), taken.view(ranks, experts).sum(1)]).tolist()
    rows = _Exchange.apply(tokens[order // index.shape[-1]], gives, takes, group)  # type: ignore[no-untyped-call]
    local = torch.arange(experts, device=chosen.device).repeat(ranks).repeat_interleave(taken)
    count = rows.shape[0]
    if not count:
        # A row of zeros keeps the experts in the graph: each rank takes part in the exchanges of the backward.
        rows, local = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), local.new_zeros(1)
    results = forward(rows, local.unsqueeze(-1), torch.ones_like(local, dtype=rows.dtype).unsqueeze(-1))[:count]
    back = _Exchange.apply(results, takes, gives, group)  # type: ignore[no-untyped-call]
    of_pairs = torch.empty_like(back).index_copy(0, order, back).view(*index.shape, -1)
    return (of_pairs * weights.unsqueeze(-1)).sum(1)


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows: `gives` of them to each rank, `takes` from each; gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, gives: Sequence[int], takes: Sequence[int], group: Any) -> torch.Tensor:
        ctx.gives, ctx.takes, ctx.group = gives, takes, group
        return _sent(rows, gives, takes, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _sent(gradient, ctx.takes, ctx.gives, ctx.group), None, None, None


def _sent(rows: torch.Tensor, gives: Sequence[int], takes: Sequence[int], group: Any) -> torch.Tensor:
    received = rows.new_empty(sum(takes), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), list(takes), list(gives), group=group)
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
