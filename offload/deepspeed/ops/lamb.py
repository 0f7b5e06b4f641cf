"""`deepspeed.ops.lamb`: LAMB for `initialize(optimizer=...)`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from offload.deepspeed.ops.options import SharedGroups, refuse_options
from offload.layout.modes import LAMB
from offload.optimizers.registry import RULES

__all__ = ["FusedLamb"]


class FusedLamb(SharedGroups):
    """LAMB, which an engine steps. `step()` without an engine is an error."""

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
        """Makes the optimizer.

        Args:
            params: parameters, or groups of them.
            lr: learning rate.
            bias_correction: must be True.
            betas: decay rates of the two moments.
            eps: added to the denominator.
            eps_inside_sqrt: must be False.
            weight_decay: decay of the weights.
            max_grad_norm: must be 0: the engine clips.
            max_coeff: largest trust ratio.
            min_coeff: smallest trust ratio.
            amsgrad: must be False.

        Raises:
            ConfigError: if an option has no kernel.
        """
        # Before torch's constructor: an option that is refused leaves no optimizer behind.
        refuse_options(
            "FusedLamb",
            amsgrad=amsgrad,
            bias_correction=not bias_correction,
            eps_inside_sqrt=eps_inside_sqrt,
            max_grad_norm=bool(max_grad_norm),
        )
        numbers = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**numbers, "max_coeff": max_coeff, "min_coeff": min_coeff}, RULES[LAMB])
