"""`deepspeed.ops.lion`: Lion for `initialize(optimizer=...)`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from offload.deepspeed.ops.options import SharedGroups, refuse_options
from offload.optimizers.registry import RULES

__all__ = ["DeepSpeedCPULion", "FusedLion"]


class FusedLion(SharedGroups):
    """Lion, which an engine steps. `step()` without an engine is an error."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        """Makes the optimizer.

        Args:
            params: parameters, or groups of them.
            lr: learning rate.
            betas: rates of the update and of the moment.
            weight_decay: decay of the weights.
            set_grad_none: without effect: the engine holds the gradients.
        """
        # A scheduler may write into the group, so a list of the script's own must not be shared.
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
        """Makes the optimizer.

        Args:
            model_params: parameters, or groups of them.
            lr: learning rate.
            betas: rates of the update and of the moment.
            weight_decay: decay of the weights.
            fp32_optimizer_states: must be True.

        Raises:
            ConfigError: if the states shall not be fp32.
        """
        refuse_options("DeepSpeedCPULion", fp32_optimizer_states=not fp32_optimizer_states)
        super().__init__(model_params, lr, betas, weight_decay)
