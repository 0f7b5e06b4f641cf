"""The optimizers of `deepspeed.ops`, for `initialize(optimizer=...)`.

An engine steps them by its own update rules. Without an engine, `step()` is an error, except for `DeepSpeedCPUAdam`.
Arguments are DeepSpeed's. A value that the kernels do not support, such as `amsgrad=True`, is a `ConfigError`, since
ignoring it would change results. `set_grad_none` has no effect: the engine owns the gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from offload.engine.optimizer import Optimizer, Rule
from offload.errors import ConfigError
from offload.kernels import CPUAdamW
from offload.layout.modes import ADAM, LAMB
from offload.optimizers.registry import RULES

__all__ = ["DeepSpeedCPUAdagrad", "DeepSpeedCPUAdam", "DeepSpeedCPULion", "FusedAdam", "FusedLamb", "FusedLion"]

_ADVICE = {
    "amsgrad": "it keeps a third moment; pass torch.optim.AdamW(amsgrad=True), which runs by torch's own code",
    "bias_correction": "the kernel corrects the bias of the moments",
    "eps_inside_sqrt": "the kernel adds eps to the root",
    "fp32_optimizer_states": 'moments are fp32; the key "moments" of the "offload" block stores them in fewer bits',
    "max_grad_norm": 'the engine clips: set "gradient_clipping" in the config',
}


class _SharedGroups(Optimizer):
    """An optimizer for an engine that keeps the group dicts it receives, as torch's constructors do.

    accelerate creates such an optimizer from the groups of the user's optimizer. The user's schedule still writes into
    these groups.
    """

    def __init__(self, params: Iterable[Any], numbers: Mapping[str, Any], rule: Rule) -> None:
        listed: list[Any] = [params] if isinstance(params, torch.Tensor) else list(params)
        groups = listed if listed and isinstance(listed[0], Mapping) else [{"params": listed}]
        super().__init__(groups, numbers, rule)
        for group, completed in zip(groups, self.param_groups, strict=True):
            group.update(completed)
        self.param_groups[:] = groups


def _refuse_options(kind: str, **unsupported: bool) -> None:
    # Called before torch's constructor, so that a refused option creates no optimizer.
    for name, refused in unsupported.items():
        if refused:
            raise ConfigError(f"{kind}: this value of {name} is not supported: {_ADVICE[name]}")


class FusedAdam(_SharedGroups):
    """AdamW, or Adam with `adam_w_mode=False`."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _refuse_options(type(self).__name__, amsgrad=amsgrad, bias_correction=not bias_correction)
        # Copied, since a scheduler may write into the group, and must not change the script's own list.
        numbers = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "decoupled": adam_w_mode}
        super().__init__(params, numbers, RULES[ADAM])


class DeepSpeedCPUAdam(FusedAdam):
    """AdamW, or Adam with `adamw_mode=False`, which an engine steps; without one, `step()` updates CPU parameters.

    Alone it is `offload.kernels.CPUAdamW`.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        # The config's "moments" sets the states' dtype for every optimizer.
        _refuse_options(type(self).__name__, fp32_optimizer_states=not fp32_optimizer_states)
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)

    @functools.cached_property
    def _alone(self) -> CPUAdamW:
        """The optimizer that steps without an engine. It shares the groups and states of this optimizer."""
        # The lists and dicts are shared, so that schedules and state dicts of this optimizer act on both.
        alone = CPUAdamW([dict(group) for group in self.param_groups])
        for shared, completed in zip(self.param_groups, alone.param_groups, strict=True):
            for key, value in completed.items():
                shared.setdefault(key, value)
        alone.param_groups, alone.state = self.param_groups, self.state
        return alone

    def step(self, closure: Any = None) -> Any:
        """Updates the parameters, on the CPU or by the engine; `closure` only without an engine."""
        # `states` belongs to an engine, and is set from `initialize` on.
        return self._alone.step(closure) if self.states is None else super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients; with an engine `set_to_none` has no effect."""
        if self.states is None:
            # Not the parent's method, which calls the engine.
            torch.optim.Optimizer.zero_grad(self, set_to_none)
        else:
            super().zero_grad(set_to_none)


class FusedLamb(_SharedGroups):
    """LAMB; `max_coeff` and `min_coeff` bound its trust ratio."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        _refuse_options(
            "FusedLamb",
            amsgrad=amsgrad,
            bias_correction=not bias_correction,
            eps_inside_sqrt=eps_inside_sqrt,
            max_grad_norm=bool(max_grad_norm),
        )
        numbers = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**numbers, "max_coeff": max_coeff, "min_coeff": min_coeff}, RULES[LAMB])


class FusedLion(_SharedGroups):
    """Lion."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        numbers = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay}
        super().__init__(params, numbers, RULES["lion"])


class DeepSpeedCPULion(FusedLion):
    """Lion under the name of DeepSpeed's optimizer on the CPU."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _refuse_options("DeepSpeedCPULion", fp32_optimizer_states=not fp32_optimizer_states)
        super().__init__(model_params, lr, betas, weight_decay)


class DeepSpeedCPUAdagrad(_SharedGroups):
    """Adagrad."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _refuse_options("DeepSpeedCPUAdagrad", amsgrad=amsgrad, fp32_optimizer_states=not fp32_optimizer_states)
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "lr_decay": 0.0}
        super().__init__(model_params, numbers, RULES["adagrad"])
