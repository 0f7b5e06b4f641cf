"""The hyperparameters of one step of each rule, named as in `torch.optim`."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class AdamWStep(NamedTuple):
    """AdamW (Loshchilov & Hutter 2019), or Adam with `decoupled=False`. Moments: exp_avg, exp_avg_sq."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """Number of this step, from 1."""
    grad_scale: float = 1.0
    """Multiplies the gradient: the clip coefficient over the loss scale."""
    decoupled: bool = True
    """False: the decay is added to the gradient (L2), as `torch.optim.Adam` does."""


class AdagradStep(NamedTuple):
    """`torch.optim.Adagrad` (Duchi, Hazan & Singer 2011). Moment: the sum of squares."""

    lr: float
    lr_decay: float
    eps: float
    weight_decay: float
    step: int
    """Number of this step, from 1."""
    grad_scale: float = 1.0


class LionStep(NamedTuple):
    """Lion (Chen et al. 2023), with decoupled decay. Moment: exp_avg."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    grad_scale: float = 1.0


class SGDStep(NamedTuple):
    """`torch.optim.SGD` with momentum. Moment: momentum_buffer."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    first: bool
    """Whether this is the first step: the momentum buffer is then set to the gradient."""
    grad_scale: float = 1.0


class PlainSGDStep(NamedTuple):
    """`torch.optim.SGD` without momentum. No moments."""

    lr: float
    weight_decay: float
    grad_scale: float = 1.0


class LambStep(NamedTuple):
    """LAMB (You et al. 2020), with bias correction. Moments: exp_avg, exp_avg_sq. See `kernels.lamb`."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """Number of this step, from 1."""
    grad_scale: float = 1.0
    min_ratio: float = 0.01
    max_ratio: float = 10.0
    """Bounds of the trust ratio, DeepSpeed's by default."""


Step: TypeAlias = AdamWStep | AdagradStep | LionStep | SGDStep | PlainSGDStep

RULES: dict[type, tuple[str, int]] = {
    AdamWStep: ("adamw", 2),
    AdagradStep: ("adagrad", 1),
    LionStep: ("lion", 1),
    SGDStep: ("sgd", 1),
    PlainSGDStep: ("plain_sgd", 0),
}
"""The native rule of each kind of step, and how many moments it has."""


class Segment(NamedTuple):
    """What to do to elements [start, stop)."""

    start: int
    stop: int
    step: Step | LambStep
    """`update` does not take that of LAMB, which needs two passes."""
