"""A small language model with matrices, an embedding, a head and norms, and plain loops of the rules for matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from offload.kernels import CPUAdamW
from tests.support.oracle import PLAIN, Job

TOKENS = 61
"""Tokens of the vocabulary; no matrix of `Words` has so many rows or columns."""


class Words(nn.Module):
    """Blocks with a tall, a wide and a square matrix each, between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 24)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24), nn.Linear(24, 24))
            for _ in range(3)
        )
        self.head = nn.Linear(24, TOKENS, bias=False)
        # The rule knows a head by the name or by the model; this name says nothing.
        self.head.weight.use_muon = False  # type: ignore[assignment]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


def words_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    """Returns the cross-entropy of a batch that step and micro-batch determine."""
    ids = torch.randint(0, TOKENS, (4, 9), generator=torch.Generator().manual_seed(100 * step + micro))
    logits = model(ids).float()
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten().to(logits.device))


class _Plain:
    """Two optimizers in turn: one of matrices, and AdamW for all else."""

    def __init__(self, matrices: torch.optim.Optimizer, rest: torch.optim.Optimizer) -> None:
        self._optimizers = (matrices, rest)

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()


class SinkGD(torch.optim.Optimizer):
    """SinkGD as its paper has it: normalized rows, then columns, and no state; with a decoupled decay."""

    def __init__(self, params: Any, lr: float, weight_decay: float, iterations: int) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "iterations": iterations})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                x = p.grad.clone()
                rows, columns = x.shape
                for _ in range(group["iterations"]):
                    x = x * (math.sqrt(columns) / x.norm(dim=1, keepdim=True).clamp(min=1e-20))
                    x = x * (math.sqrt(rows) / x.norm(dim=0, keepdim=True).clamp(min=1e-20))
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(x, alpha=-group["lr"])


def _divided(params: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the matrices of `Words` and its other parameters."""
    matrices = [p for p in params if p.ndim == 2 and TOKENS not in p.shape]
    return matrices, [p for p in params if not any(p is matrix for matrix in matrices)]


def plain_muon(params: Sequence[torch.Tensor], lr: float, weight_decay: float, **options: Any) -> _Plain:
    """Returns torch's Muon for the matrices, and AdamW for all else."""
    rates = {"muon_lr": lr, "adam_lr": lr, **options}
    mine = {key: value for key, value in options.items() if not key.endswith("_lr")}
    matrices, rest = _divided(params)
    return _Plain(
        torch.optim.Muon(matrices, lr=rates["muon_lr"], weight_decay=weight_decay, **mine),
        CPUAdamW(rest, lr=rates["adam_lr"], betas=(0.9, 0.95), eps=1e-10, weight_decay=weight_decay),
    )


def plain_sinkgd(
    params: Sequence[torch.Tensor], lr: float, weight_decay: float, iterations: int = 5, adam_lr: float | None = None
) -> _Plain:
    """Returns SinkGD for the matrices, and AdamW for all else."""
    matrices, rest = _divided(params)
    return _Plain(
        SinkGD(matrices, lr=lr, weight_decay=weight_decay, iterations=iterations),
        CPUAdamW(rest, lr=lr if adam_lr is None else adam_lr, weight_decay=weight_decay),
    )


PLAIN["Muon"] = plain_muon
PLAIN["SinkGD"] = plain_sinkgd

MUON = Job(Words, words_loss, steps=4, lr=2e-2, clip=0.0, optimizer="Muon", params=(("adam_lr", 3e-3),))
SINKGD = Job(Words, words_loss, steps=4, lr=1e-3, clip=0.0, optimizer="SinkGD", params=(("adam_lr", 3e-3),))
