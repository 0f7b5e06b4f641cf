"""`deepspeed.ops.adam`: AdamW and Adam for `initialize(optimizer=...)`."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from offload.deepspeed.ops.options import SharedGroups, refuse_options
from offload.kernels import CPUAdamW
from offload.layout.modes import ADAM
from offload.optimizers.registry import RULES

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


class FusedAdam(SharedGroups):
    """AdamW, or Adam with `adam_w_mode=False`, which an engine steps. `step()` without an engine is an error."""

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
        """Makes the optimizer.

        Args:
            params: parameters, or groups of them.
            lr: learning rate.
            bias_correction: must be True.
            betas: decay rates of the two moments.
            eps: added to the denominator.
            adam_w_mode: True for the decay of AdamW, False for that of Adam.
            weight_decay: decay of the weights.
            amsgrad: must be False.
            set_grad_none: without effect: the engine holds the gradients.

        Raises:
            ConfigError: if an option has no kernel.
        """
        # Without a kernel it would change results silently.
        refuse_options(type(self).__name__, amsgrad=amsgrad, bias_correction=not bias_correction)
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
        """Makes the optimizer.

        Args:
            model_params: parameters, or groups of them.
            lr: learning rate.
            bias_correction: must be True.
            betas: decay rates of the two moments.
            eps: added to the denominator.
            weight_decay: decay of the weights.
            amsgrad: must be False.
            adamw_mode: True for the decay of AdamW, False for that of Adam.
            fp32_optimizer_states: must be True.

        Raises:
            ConfigError: if an option has no kernel.
        """
        # The config's "moments" decides on their dtype, for each optimizer alike.
        refuse_options(type(self).__name__, fp32_optimizer_states=not fp32_optimizer_states)
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)

    @functools.cached_property
    def _alone(self) -> CPUAdamW:
        """The optimizer that steps without an engine. Its groups and states are this one's."""
        # The lists and dicts are shared, so that schedules and state dicts of this optimizer act on the other.
        alone = CPUAdamW([dict(group) for group in self.param_groups])
        for mine, theirs in zip(self.param_groups, alone.param_groups, strict=True):
            for key, value in theirs.items():
                mine.setdefault(key, value)
        alone.param_groups, alone.state = self.param_groups, self.state
        return alone

    def step(self, closure: Any = None) -> Any:
        """Updates the parameters, on the CPU or by the engine.

        Args:
            closure: reevaluates the model; only without an engine.
        """
        # `states` are an engine's: they are there from `initialize` on.
        return self._alone.step(closure) if self.states is None else super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients.

        Args:
            set_to_none: as in torch; without effect with an engine.
        """
        if self.states is None:
            # Past the parent's, which asks an engine.
            torch.optim.Optimizer.zero_grad(self, set_to_none)
        else:
            super().zero_grad(set_to_none)
