"""Hyperparameters of one step of each update rule, named as in `torch.optim`."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from offload.kernels.noise import Noise


class AdamWStep(NamedTuple):
    """A step of AdamW (Loshchilov & Hutter 2019), or of Adam with `decoupled=False`. Moments: exp_avg, exp_avg_sq."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """Number of this step, from 1."""
    grad_scale: float = 1.0
    """Factor of the gradient: the clip coefficient over the loss scale."""
    decoupled: bool = True
    """False adds the decay to the gradient (L2), as `torch.optim.Adam` does."""


class AdagradStep(NamedTuple):
    """A step of `torch.optim.Adagrad` (Duchi, Hazan & Singer 2011). Moment: the sum of squares."""

    lr: float
    lr_decay: float
    eps: float
    weight_decay: float
    step: int
    """Number of this step, from 1."""
    grad_scale: float = 1.0


class LionStep(NamedTuple):
    """A step of Lion (Chen et al. 2023) with decoupled decay. Moment: exp_avg."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    grad_scale: float = 1.0


class SGDStep(NamedTuple):
    """A step of `torch.optim.SGD` with momentum. Moment: momentum_buffer."""

    lr: float
    momentum: float
    """0 leaves the momentum buffer as it is, and dampens nothing."""
    dampening: float
    weight_decay: float
    nesterov: bool
    first: bool
    """True in the first step, which sets the momentum buffer to the gradient."""
    grad_scale: float = 1.0


class PlainSGDStep(NamedTuple):
    """A step of `torch.optim.SGD` without momentum. No moments."""

    lr: float
    weight_decay: float
    grad_scale: float = 1.0


class LambStep(NamedTuple):
    """A step of LAMB (You et al. 2020), whose length has the correction of the bias, as in DeepSpeed: `kernels.lamb`.

    Moments: exp_avg, exp_avg_sq.
    """

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
    """Upper bound of the trust ratio; `min_ratio` is the lower one. Both defaults are DeepSpeed's."""


# The rules that need one pass over the elements. LAMB needs two: see `kernels.lamb`.
Step: TypeAlias = AdamWStep | AdagradStep | LionStep | SGDStep | PlainSGDStep

RULES: dict[type, tuple[str, int]] = {
    AdamWStep: ("adamw", 2),
    AdagradStep: ("adagrad", 1),
    LionStep: ("lion", 1),
    SGDStep: ("sgd", 1),
    PlainSGDStep: ("plain_sgd", 0),
}
"""Name of the native rule and number of moments for each kind of step."""

ROOTS: dict[str, tuple[bool, ...]] = {
    "adamw": (False, True),
    "adagrad": (True,),
    "lion": (False,),
    "sgd": (False,),
    "lamb": (False, True),
    "probe": (False, True),
}
"""For each moment of a native rule whether moments in 8 bits hold its root, since it has no sign."""


class Segment(NamedTuple):
    """A range of elements, [start, stop), and the step to perform on them."""

    start: int
    stop: int
    step: Step | LambStep
    """Hyperparameters. `update` does not accept a `LambStep`, since LAMB needs two passes."""
    noise: Noise | None = None
    """Rounds bf16 and 8-bit moments, and bf24 masters; None where all are fp32, on which a noise has no effect."""
