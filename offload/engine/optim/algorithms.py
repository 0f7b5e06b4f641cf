"""Update rules of the optimizers: the kernel of each, its moments, and the numbers of a group that it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from offload import kernels
from offload.engine.optim.torch_fallback import TorchStep
from offload.swapper.modes import ADAM, LAMB, TORCH

_UNKNOWN = ("amsgrad", "maximize", "capturable", "differentiable", "initial_accumulator_value")
"""Options of torch's optimizers that the kernels do not implement."""


class Rule(NamedTuple):
    """An update rule: one of the kernels, or an optimizer of torch that runs by itself."""

    name: str
    """Name of the rule in the mode, which determines the moments."""
    scheduled: tuple[str, ...]
    """Keys of a group's numbers that may change between steps (OneCycleLR moves the betas too)."""
    fixed: tuple[str, ...]
    """Keys of a group's numbers that are constant."""
    step: Callable[[Mapping[str, Any], int, float], kernels.Step | kernels.LambStep | TorchStep]
    """Makes a kernel's arguments from a group, the count of the parameter's steps and the gradient's factor."""

    known_as: str = ""
    """Class name of an optimizer without a kernel; empty for rules that have one."""

    def title(self, group: Mapping[str, Any]) -> str:
        """Returns the name by which the config knows the optimizer of `group`."""
        if self.known_as:
            return self.known_as
        if self.name == ADAM:
            return "AdamW" if group["decoupled"] else "Adam"
        return "SGD" if self.name in ("sgd", "momentum") else self.name.capitalize()

    def refused(self, group: Mapping[str, Any]) -> str | None:
        """Returns an option that the group asks for and its kernel does not implement, or None.

        The rule is chosen at `initialize`, but users may set options on a group later.
        """
        if self.name == TORCH:
            return None
        asked = [option for option in _UNKNOWN if group.get(option)]
        if self.name == "sgd" and group.get("momentum"):  # the rule has no state for momentum
            asked.append("momentum")
        # The kernel's kind of decay was chosen at `initialize`; torch's own key may have been changed since.
        if self.name == ADAM and bool(group.get("decoupled_weight_decay", group["decoupled"])) != group["decoupled"]:
            asked.append("decoupled_weight_decay")
        return asked[0] if asked else None

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of a group that the rule reads."""
        return (*self.scheduled, *self.fixed)


def _floats(group: Mapping[str, Any], *names: str) -> dict[str, float]:
    """Returns numbers of a group, which may be tensors there, as floats."""
    return {name: float(group[name]) for name in names}


def _betas(group: Mapping[str, Any]) -> dict[str, float]:
    """Returns the two betas of a group as the kernels name them."""
    return {name: float(beta) for name, beta in zip(("beta1", "beta2"), group["betas"], strict=True)}


def _adam(group: Mapping[str, Any], count: int, grad_scale: float) -> kernels.Step:
    """Returns the arguments of the Adam and AdamW kernel."""
    return kernels.AdamWStep(
        **_floats(group, "lr", "eps", "weight_decay"),
        **_betas(group),
        step=count,
        grad_scale=grad_scale,
        decoupled=bool(group["decoupled"]),
    )


def _lamb(group: Mapping[str, Any], count: int, grad_scale: float) -> kernels.LambStep:
    """Returns the arguments of the LAMB kernels."""
    return kernels.LambStep(
        **_floats(group, "lr", "eps", "weight_decay"),
        **_betas(group),
        step=count,
        grad_scale=grad_scale,
        min_ratio=float(group["min_coeff"]),
        max_ratio=float(group["max_coeff"]),
    )


def _adagrad(group: Mapping[str, Any], count: int, grad_scale: float) -> kernels.Step:
    """Returns the arguments of the Adagrad kernel."""
    numbers = _floats(group, "lr", "lr_decay", "eps", "weight_decay")
    return kernels.AdagradStep(**numbers, step=count, grad_scale=grad_scale)


def _lion(group: Mapping[str, Any], count: int, grad_scale: float) -> kernels.Step:
    """Returns the arguments of the Lion kernel."""
    return kernels.LionStep(**_floats(group, "lr", "weight_decay"), **_betas(group), grad_scale=grad_scale)


def _momentum(group: Mapping[str, Any], count: int, grad_scale: float) -> kernels.Step:
    """Returns the arguments of the kernel of SGD with momentum."""
    return kernels.SGDStep(
        **_floats(group, "lr", "momentum", "dampening", "weight_decay"),
        nesterov=bool(group["nesterov"]),
        # torch starts the buffer with the first gradient undamped, so the kernel must know the first step.
        first=count == 1,
        grad_scale=grad_scale,
    )


def _sgd(group: Mapping[str, Any], count: int, grad_scale: float) -> kernels.Step:
    """Returns the arguments of the kernel of SGD without momentum."""
    return kernels.PlainSGDStep(**_floats(group, "lr", "weight_decay"), grad_scale=grad_scale)


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
"""Rules with a kernel, by name."""


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """Returns the rule for a torch optimizer: a kernel's if one computes the same, else the optimizer's own code."""
    # The exact class counts: a subclass may override `step`.
    kind = type(optimizer)
    # If a single group sets such an option, torch's own code updates all groups.
    if any(group.get(option) for group in optimizer.param_groups for option in _UNKNOWN):
        return _by_itself(optimizer)
    if kind in (torch.optim.AdamW, torch.optim.Adam, kernels.CPUAdamW):
        return RULES[ADAM]
    if kind is torch.optim.Adagrad:
        return RULES["adagrad"]
    if kind is torch.optim.SGD:
        # One group with momentum gives all units a momentum buffer.
        return RULES["momentum" if any(group["momentum"] for group in optimizer.param_groups) else "sgd"]
    return _by_itself(optimizer)


def _by_itself(optimizer: torch.optim.Optimizer) -> Rule:
    """Returns the rule of an optimizer without a kernel.

    Any float of a group may change between steps. Integers count as options, such as flags: `scheduled` omits them.
    """
    scheduled = sorted(
        {key for group in optimizer.param_groups for key, value in group.items() if _is_number_of(key, value)}
    )
    return Rule(TORCH, tuple(scheduled), (), _by_torch, type(optimizer).__name__)


def _by_torch(group: Mapping[str, Any], count: int, grad_scale: float) -> TorchStep:
    """Returns the arguments of a step by torch's own code; the parameter's attributes are added later."""
    # A copy of the numbers: the user may change the group while the update is in flight.
    return TorchStep({key: value for key, value in group.items() if key != "params"}, grad_scale, {})


def _is_number_of(key: str, value: Any) -> bool:
    """Returns True if a group's entry is or contains a float of the optimizer, not a parameter or its name."""
    return key not in ("params", "param_names") and _is_float(value)


def _is_float(value: Any) -> bool:
    """Returns True for a float, a floating-point tensor of one element, or a sequence that contains one of them."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.is_floating_point()
    return isinstance(value, float) or (isinstance(value, tuple | list) and any(map(_is_float, value)))
