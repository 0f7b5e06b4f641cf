"""A module that is computed chunk by chunk, and comparisons with the module as it is."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Gated(nn.Module):
    """The MLP of a Llama."""

    def __init__(self, features: int = 16, inner: int = 40, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(features, inner, bias=False), nn.Linear(features, inner, bias=False)
        self.down, self.dropout = nn.Linear(inner, features), nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.down(F.silu(self.gate(hidden)) * self.up(hidden)))  # type: ignore[no-any-return]


def inputs(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def in_pieces(module: nn.Module, hidden: torch.Tensor, length: int) -> torch.Tensor:
    """Returns what a loop over chunks computes, whose graph holds everything."""
    return torch.cat([module(part) for part in hidden.split(length, 1)], 1)


def gradients(module: nn.Module, output: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
    """Returns the gradients of a sum of squares: those of `others`, then those of the module."""
    wanted = [*others, *(each for each in module.parameters() if each.requires_grad)]
    return list(torch.autograd.grad(output.float().square().sum(), wanted))


def equal(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
