"""Arguments of one step of a matrix, named as in `torch.optim`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from offload import kernels
from offload.layout.optimizer_states import MARK


class MuonStep(NamedTuple):
    """A step of Muon (Jordan et al. 2024), as `torch.optim.Muon` makes it. State: a momentum."""

    lr: float
    momentum: float
    weight_decay: float
    nesterov: bool
    ns_steps: int
    """Newton-Schulz iterations."""
    ns_coefficients: tuple[float, float, float]
    adjust_lr_fn: str
    """How the learning rate follows from the shape: "original" or "match_rms_adamw"."""
    grad_scale: float = 1.0
    """Factor of the gradient: the clip coefficient over the loss scale."""

    def length(self, shape: Sequence[int]) -> float:
        """Returns the factor of the orthogonal matrix, for a matrix of `shape`."""
        rows, columns = shape
        if self.adjust_lr_fn == "match_rms_adamw":
            return self.lr * (0.2 * math.sqrt(max(rows, columns)))
        return self.lr * math.sqrt(max(1, rows / columns))


class SinkGDStep(NamedTuple):
    """A step of SinkGD (Scetbon et al. 2025, arXiv 2502.06742), with decoupled decay. No state."""

    lr: float
    weight_decay: float
    iterations: int
    """Normalizations of the rows, each followed by one of the columns."""
    grad_scale: float = 1.0


MatrixStep: TypeAlias = MuonStep | SinkGDStep


class MatrixSegment(NamedTuple):
    """A step for elements [start, stop) of a rank's partition, which are a matrix, or what the rank has of it."""

    start: int
    stop: int
    step: MatrixStep
    noise: kernels.Noise | None = None
    """Rounds a bf16 momentum and bf24 masters; None for fp32."""


def muon(group: Mapping[str, Any], count: int, grad_scale: float) -> MuonStep | kernels.AdamWStep:
    """Returns the arguments of a step by a group of the optimizer Muon."""
    if not group[MARK]:
        return _adamw(group, count, grad_scale)
    first, second, third = group["ns_coefficients"]
    return MuonStep(
        lr=float(group["lr"]),
        momentum=float(group["momentum"]),
        weight_decay=float(group["weight_decay"]),
        nesterov=bool(group["nesterov"]),
        ns_steps=int(group["ns_steps"]),
        ns_coefficients=(float(first), float(second), float(third)),
        adjust_lr_fn=group["adjust_lr_fn"],
        grad_scale=grad_scale,
    )


def sinkgd(group: Mapping[str, Any], count: int, grad_scale: float) -> SinkGDStep | kernels.AdamWStep:
    """Returns the arguments of a step by a group of the optimizer SinkGD."""
    if not group[MARK]:
        return _adamw(group, count, grad_scale)
    return SinkGDStep(
        lr=float(group["lr"]),
        weight_decay=float(group["weight_decay"]),
        iterations=int(group["iterations"]),
        grad_scale=grad_scale,
    )


def _adamw(group: Mapping[str, Any], count: int, grad_scale: float) -> kernels.AdamWStep:
    beta1, beta2 = group["betas"]
    return kernels.AdamWStep(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        step=count,
        grad_scale=grad_scale,
    )
