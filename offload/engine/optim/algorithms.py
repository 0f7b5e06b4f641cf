"""Update rules of the optimizers: the kernel of each, its moments, and the numbers of a group that it reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from offload import kernels
from offload.errors import UsageError
from offload.layout.modes import ADAM, LAMB, MUON, SINKGD, TORCH
from offload.layout.optimizer_states import MARK, WITHOUT_KERNEL, kernel_rule
from offload.optimizers.matrix_steps import MuonStep, SinkGDStep, muon, sinkgd
from offload.optimizers.of_torch import TorchStep, numbers_of

_FLAGS = ("decoupled", "nesterov", MARK)
"""Keys of groups that a kernel reads as True or False."""


class Rule(NamedTuple):
    """An update rule: one of the kernels, or an optimizer of torch that runs by itself."""

    name: str
    """Name of the rule in the mode, which determines the moments."""
    scheduled: tuple[str, ...]
    """Keys of a group's numbers that may change between steps (OneCycleLR moves the betas too)."""
    fixed: tuple[str, ...]
    """Keys of a group's numbers that are constant."""
    step: Callable[[Mapping[str, Any], int, float], kernels.Step | kernels.LambStep | TorchStep | MuonStep | SinkGDStep]
    """Makes a kernel's arguments from a group, the count of the parameter's steps and the gradient's factor."""

    known_as: str = ""
    """Name of the optimizer, if it is not the capitalized name of the rule."""
    defaults: tuple[str, ...] = ()
    """Further keys that every group has from the optimizer's defaults, such as words."""

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
        asked = [option for option in WITHOUT_KERNEL if group.get(option)]
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
        Rule(
            MUON,
            ("lr", "momentum", "betas", "eps", "weight_decay"),
            (MARK, "nesterov", "ns_steps"),
            muon,
            defaults=("adjust_lr_fn", "ns_coefficients"),
        ),
        Rule(SINKGD, ("lr", "betas", "eps", "weight_decay"), (MARK, "iterations"), sinkgd, "SinkGD"),
    )
}
"""Rules by name: those with a kernel, and those for matrices."""


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """Returns the rule for a torch optimizer: a kernel's if one computes the same, else the optimizer's own code."""
    name = kernel_rule(type(optimizer), optimizer.param_groups)
    return RULES[name] if name in RULES else _by_itself(optimizer)


def _by_itself(optimizer: torch.optim.Optimizer) -> Rule:
    """Returns the rule of an optimizer without a kernel.

    Any number of a group may change between steps, also one that is an integer now, such as torch's `weight_decay=0`.
    Flags are no numbers.
    """
    scheduled = sorted(
        {key for group in optimizer.param_groups for key, value in group.items() if _is_number_of(key, value)}
    )
    defaults = [key for key in optimizer.defaults if all(key in group for group in optimizer.param_groups)]
    return Rule(TORCH, tuple(scheduled), (), partial(_by_torch, optimizer), type(optimizer).__name__, tuple(defaults))


def _by_torch(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], count: int, grad_scale: float) -> TorchStep:
    """Returns the arguments of a step by torch's own code; the parameter's attributes are added later."""
    # Copies: the user may change the group and the optimizer while the update is in flight.
    return TorchStep(numbers_of(group), grad_scale, {}, dict(vars(optimizer)))


def _is_number_of(key: str, value: Any) -> bool:
    """Returns True if a group's entry is an integer, or is or contains a float, but no parameter, name or flag."""
    return key not in ("params", "param_names") and (type(value) is int or _is_float(value))


def _is_float(value: Any) -> bool:
    """Returns True for a float, a floating-point tensor of one element, or a sequence that contains one of them."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.is_floating_point()
    return isinstance(value, float) or (isinstance(value, tuple | list) and any(map(_is_float, value)))


# -- numbers of groups ------------------------------------------------------------------------------


def check_numbers(groups: Iterable[Mapping[str, Any]], rule: Rule) -> None:
    """Checks the groups before a step reads them.

    Raises:
        UsageError: a group lacks a key, or has a number that is not finite, or an option that its kernel lacks.
    """
    for number, group in enumerate(groups):
        for key in (*rule.defaults, *(rule.keys if rule.name != TORCH else ())):
            if key not in group:
                raise UsageError(f"group {number} has no {key} any more; set it again; nothing was changed")
        # A NaN in a group would reach every weight of the group with the next update.
        for key in (key for key in rule.keys if key in group and key not in _FLAGS):
            if not _is_valid(key, group[key], rule):
                expected = "two finite numbers" if key == "betas" else "a finite number"
                raise UsageError(f"{key} of group {number} is {group[key]!r}, expected {expected}; nothing was changed")
        refused = rule.refused(group)
        if refused is not None:
            raise UsageError(
                f"group {number} has {refused}={group[refused]!r} now, which its kernel does not support; set the "
                "option before offload.initialize, which then chooses another kernel or torch's own code"
            )


def _is_valid(key: str, value: Any, rule: Rule) -> bool:
    """Returns True if a group's entry is a finite number, or as many of them as the rule reads."""
    items = list(value) if isinstance(value, list | tuple) else [value]
    if rule.name == TORCH:  # its own code knows how many it reads, and None may be one of them (Adafactor's eps)
        return all(item is None or _is_finite(item) for item in items) and (key != "betas" or len(items) >= 2)
    several = isinstance(value, list | tuple)
    return all(map(_is_finite, items)) and (several and len(items) == 2 if key == "betas" else not several)


def _is_finite(value: Any) -> bool:
    """Returns True if `value` is a finite number; False for objects that are no number."""
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, RuntimeError):
        return False


_SET_BY_SCHEDULES = {"lr", "betas", "momentum"}


def merge_values(
    committed: Sequence[Mapping[str, Any]],
    then: Sequence[Mapping[str, Any]],
    now: Sequence[Mapping[str, Any]],
    scheduled: bool,
    unscheduled: bool,
) -> list[dict[str, Any]]:
    """Returns the groups' values of a resumed run.

    A value is the committed one, unless its configured value has changed between the runs: then it is the new one. So
    is a value that the commit lacks, because it was None in that run.

    Args:
        committed: the values of each group in the commit.
        then: the values as configured in the run that made the commit.
        now: the values as configured in this run.
        scheduled: True if a schedule sets the learning rates, which then always are the committed ones.
        unscheduled: True if a schedule set values in the run that made the commit, and none does now. The committed
            ones are a point on its curve, often near 0, so those that schedules set are the new ones.
    """
    merged = []
    for values, old, new in zip(committed, then, now, strict=True):
        kept = {key for key in old if key in new and (old[key] == new[key] or (scheduled and key == "lr"))}
        kept -= _SET_BY_SCHEDULES if unscheduled else set()
        group = {key: values[key] if key in kept and key in values else new[key] for key in new}
        merged.append({key: tuple(value) if isinstance(value, list) else value for key, value in group.items()})
    return merged


def plain(value: Any, rule_name: str) -> Any:
    """Returns a group's number, which may be a tensor, as a float; several as a list of floats.

    Args:
        value: a number, a sequence of numbers, or None.
        rule_name: name of the update rule. For torch's own code, which may count with it, an integer stays one.
    """
    if isinstance(value, list | tuple):
        return [plain(item, "") for item in value]
    return value if value is None or (rule_name == TORCH and type(value) is int) else float(value)
