"""The exchange of tokens between ranks that have whole experts of a layer; `parallel.experts` shows its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

Send: TypeAlias = Callable[[torch.Tensor, Sequence[int], Sequence[int]], torch.Tensor]
"""Sends rows to each rank, so many as the first list says, and returns those of each, so many as the second says."""


def exchange_tokens(
    forward: Callable[..., torch.Tensor],
    tokens: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    own: range,
    ranks: int,
    send: Send,
) -> torch.Tensor:
    """Returns the weighted sum of experts for each token of this rank. Collective of the ranks.

    Args:
        forward: of the module, for tokens whose experts are this rank's.
        tokens: (n, width).
        index: (n, k), the experts of each token among all; the number of experts stands for none.
        weights: (n, k).
        own: the experts of this rank, by the numbers that `forward` knows.
        ranks: number of ranks.
        send: an all-to-all of these ranks.
    """
    chosen, experts = index.reshape(-1), len(own)
    # Sorted, pairs are in the order of ranks, since each has consecutive experts; within an expert in that of tokens.
    order = torch.argsort(chosen, stable=True)
    given = torch.bincount(chosen, minlength=experts * ranks)[: experts * ranks]
    taken = send(given, [experts] * ranks, [experts] * ranks)
    gives, takes = torch.stack([given.view(ranks, experts).sum(1), taken.view(ranks, experts).sum(1)]).tolist()
    order = order[: sum(gives)]  # choices of no expert come last
    rows = _Exchange.apply(tokens[order // index.shape[-1]], gives, takes, send)  # type: ignore[no-untyped-call]
    local = torch.arange(own.start, own.stop, device=chosen.device).repeat(ranks).repeat_interleave(taken)
    count = rows.shape[0]
    if not count:
        # A row of zeros keeps the experts in the graph: each rank takes part in the exchanges of the backward.
        rows, local = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), local.new_full((1,), own.start)
    results = forward(rows, local.unsqueeze(-1), torch.ones_like(local, dtype=rows.dtype).unsqueeze(-1))[:count]
    back = _Exchange.apply(results, takes, gives, send)  # type: ignore[no-untyped-call]
    of_pairs = back.new_zeros(len(chosen), back.shape[1]).index_copy(0, order, back).view(*index.shape, back.shape[1])
    summed: torch.Tensor = (of_pairs * weights.unsqueeze(-1)).sum(1)
    return summed


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows: `gives` of them to each rank, `takes` from each; gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, gives: Sequence[int], takes: Sequence[int], send: Send) -> torch.Tensor:
        ctx.gives, ctx.takes, ctx.send = gives, takes, send
        return send(rows.contiguous(), gives, takes)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.send(gradient.contiguous(), ctx.takes, ctx.gives), None, None, None
