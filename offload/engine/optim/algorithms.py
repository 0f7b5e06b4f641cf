"""The rules by which an optimizer moves a weight: the kernel of each, its moments, and the numbers of a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from offload import kernels
from offload.engine.optim.torch_fallback import TorchStep
from offload.swapper.modes import ADAM, LAMB, TORCH

_UNKNOWN = ("amsgrad", "maximize", "capturable", "differentiable", "initial_accumulator_value")
"""Options of torch's optimizers that the kernels do not know."""


class Rule(NamedTuple):
    """One of the kernels."""

    name: str
    """That of the mode, which says what moments there are."""
    scheduled: tuple[str, ...]
    """The numbers of a group that may change between steps (OneCycleLR moves the betas too)."""
    fixed: tuple[str, ...]
    """The others."""
    step: Callable[[Mapping[str, Any], int, float], kernels.Step | kernels.LambStep | TorchStep]
    """From a group, the number of the parameter's step and the factor of its gradient to what the kernel is told."""

    known_as: str = ""
    """The class of an optimizer that has no kernel."""

    def title(self, group: Mapping[str, Any]) -> str:
        """What the config calls it for `group`."""
        if self.known_as:
            return self.known_as
        if self.name == ADAM:
            return "AdamW" if group["decoupled"] else "Adam"
        return "SGD" if self.name in ("sgd", "momentum") else self.name.capitalize()

    def refused(self, group: Mapping[str, Any]) -> str | None:
        """An option that the group asks for by now, and that its kernel does not do."""
        if self.name == TORCH:
            return None
        asked = [option for option in _UNKNOWN if group.get(option)]
        if self.name == "sgd" and group.get("momentum"):  # of which nothing is kept
            asked.append("momentum")
        if self.name == ADAM and bool(group.get("decoupled_weight_decay", group["decoupled"])) != group["decoupled"]:
            asked.append("decoupled_weight_decay")
        return asked[0] if asked else None

    @property
    def keys(self) -> tuple[str, ...]:
        """What a group must have."""
        return (*self.scheduled, *self.fixed)


def _adam(group: Mapping[str, Any], count: int, grad_scale: float) -> kernels.Step:
    beta1, beta2 = group["betas"]
    return kernels.AdamWStep(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        step=count,
        grad_scale=grad_scale,
        decoupled=bool(group["decoupled"]),
    )


def _lamb(group: Mapping[str, Any], count: int, grad_scale: float) -> kernels.LambStep:
    beta1, beta2 = group["betas"]
    return kernels.LambStep(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        step=count,
        grad_scale=grad_scale,
        min_ratio=float(group["min_coeff"]),
        max_ratio=float(group["max_coeff"]),
    )


def _adagrad(group: Mapping[str, Any], count: int, grad_scale: float) -> kernels.Step:
    return kernels.AdagradStep(
        lr=float(group["lr"]),
        lr_decay=float(group["lr_decay"]),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        step=count,
        grad_scale=grad_scale,
    )


def _lion(group: Mapping[str, Any], count: int, grad_scale: float) -> kernels.Step:
    beta1, beta2 = group["betas"]
    return kernels.LionStep(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        weight_decay=float(group["weight_decay"]),
        grad_scale=grad_scale,
    )


def _momentum(group: Mapping[str, Any], count: int, grad_scale: float) -> kernels.Step:
    return kernels.SGDStep(
        lr=float(group["lr"]),
        momentum=float(group["momentum"]),
        dampening=float(group["dampening"]),
        weight_decay=float(group["weight_decay"]),
        nesterov=bool(group["nesterov"]),
        first=count == 1,
        grad_scale=grad_scale,
    )


def _sgd(group: Mapping[str, Any], count: int, grad_scale: float) -> kernels.Step:
    return kernels.PlainSGDStep(float(group["lr"]), float(group["weight_decay"]), grad_scale)


RULES = {
    rule.name: rule
    for rule in (
        Rule(ADAM, ("lr", "betas", "eps", "weight_decay"), ("decoupled",), _adam),
        Rule(LAMB, ("lr", "betas", "eps", "weight_decay"), ("min_coeff", "max_coeff"), _lamb),
        Rule("adagrad", ("lr", "eps", "weight_decay"), ("lr_decay",), _adagrad),
        Rule("lion", ("lr", "betas", "weight_decay"), (), _lion),
        Rule("momentum", ("lr", "momentum", "weight_decay"), ("dampening", "nesterov"), _momentum),
        Rule("sgd", ("lr", "weight_decay"), (), _sgd),
    )
}


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """What an optimizer of torch does: by a kernel, or, where none does it, by itself."""
    kind = type(optimizer)
    if any(group.get(option) for group in optimizer.param_groups for option in _UNKNOWN):
        return _by_itself(optimizer)
    if kind in (torch.optim.AdamW, torch.optim.Adam, kernels.CPUAdamW):
        return RULES[ADAM]
    if kind is torch.optim.Adagrad:
        return RULES["adagrad"]
    if kind is torch.optim.SGD:
        return RULES["momentum" if any(group["momentum"] for group in optimizer.param_groups) else "sgd"]
    return _by_itself(optimizer)


def _by_itself(optimizer: torch.optim.Optimizer) -> Rule:
    """Whatever is a float in some group may change between steps."""
    scheduled = sorted(
        {key for group in optimizer.param_groups for key, value in group.items() if _is_number_of(key, value)}
    )
    return Rule(TORCH, tuple(scheduled), (), _by_torch, type(optimizer).__name__)


def _by_torch(group: Mapping[str, Any], count: int, grad_scale: float) -> TorchStep:
    return TorchStep({key: value for key, value in group.items() if key != "params"}, grad_scale, {})


def _is_number_of(key: str, value: Any) -> bool:
    return key not in ("params", "param_names") and _is_float(value)


def _is_float(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.is_floating_point()
    return isinstance(value, float) or (isinstance(value, tuple | list) and any(map(_is_float, value)))
