"""`deepspeed.ops.adagrad`: Adagrad for `initialize(optimizer=...)`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from offload.deepspeed.ops.options import SharedGroups, refuse_options
from offload.optimizers.registry import RULES

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(SharedGroups):
    """Adagrad, which an engine steps. `step()` without an engine is an error."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        """Makes the optimizer.

        Args:
            model_params: parameters, or groups of them.
            lr: learning rate.
            eps: added to the denominator.
            weight_decay: decay of the weights.
            amsgrad: must be False.
            fp32_optimizer_states: must be True.

        Raises:
            ConfigError: if an option has no kernel.
        """
        refuse_options("DeepSpeedCPUAdagrad", amsgrad=amsgrad, fp32_optimizer_states=not fp32_optimizer_states)
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "lr_decay": 0.0}
        super().__init__(model_params, numbers, RULES["adagrad"])
