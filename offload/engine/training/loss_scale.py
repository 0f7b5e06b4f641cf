"""Scale of an fp16 loss, which keeps small gradients above zero and large ones below infinity."""

from __future__ import annotations

from typing import Any

import torch

from offload.config import Fp16
from offload.errors import UsageError

_FACTOR = 2.0
"""Factor by which the scale changes."""


class LossScaler:
    """Loss scale, fixed or, if the config says 0, adapted during training as in Micikevicius et al. 2018.

    A gradient that is not finite is an overflow, and its step is skipped. The first `hysteresis` - 1 overflows keep the
    scale, each further one halves it, down to `min_loss_scale`. `loss_scale_window` steps in a row without overflow
    double the scale and restore the hysteresis; with `consecutive_hysteresis` every step without overflow restores
    the hysteresis.
    """

    def __init__(self, config: Fp16) -> None:
        self._config = config
        self.dynamic = config.loss_scale == 0
        self.scale = 2.0**config.initial_scale_power if self.dynamic else config.loss_scale
        self._steps = 0
        self._overflowed_at = -1
        self._patience = config.hysteresis
        self._multiplied = 0
        """Losses that were multiplied and whose backward has not begun."""

    def multiply(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns `loss` times the scale, in fp32, for one backward."""
        self._multiplied += 1
        return loss.float() * self.scale

    def begin_backward(self) -> None:
        """Raises `UsageError` if no loss was multiplied for the backward that begins."""
        if not self._multiplied:
            raise UsageError(
                f"in fp16 the loss must be multiplied by the loss scale, {self.scale:g} now: call "
                "engine.backward(loss), or engine.scale(loss).backward(), for each backward; in a loop of Accelerate, "
                "use offload.hf.Accelerator"
            )
        self._multiplied -= 1

    def forget_multiplied(self) -> None:
        """Forgets multiplied losses at the end of a step: their backward will not come any more."""
        self._multiplied = 0

    @property
    def kind(self) -> str | float:
        """The fixed scale, or "dynamic"."""
        return "dynamic" if self.dynamic else self.scale

    @property
    def exhausted(self) -> bool:
        """True if the next overflow would need a scale below the smallest."""
        return self.dynamic and self._patience == 1 and self.scale <= self._config.min_loss_scale

    def stepped(self, overflow: bool) -> None:
        """Adapts the scale after a step.

        Args:
            overflow: True if the step was skipped because of an overflow.
        """
        config = self._config
        if not self.dynamic:
            return
        if overflow:
            self._overflowed_at = self._steps
            if self._patience > 1:
                self._patience -= 1
            else:
                self.scale = max(self.scale / _FACTOR, config.min_loss_scale)
        else:
            window_is_over = (self._steps - self._overflowed_at) % config.loss_scale_window == 0
            if config.consecutive_hysteresis or window_is_over:
                self._patience = config.hysteresis
            if window_is_over:
                self.scale *= _FACTOR
        self._steps += 1

    def state(self) -> dict[str, Any]:
        """Returns the state as JSON, for `restore`."""
        return {
            "dynamic": self.dynamic,
            "scale": self.scale,
            "steps": self._steps,
            "overflowed_at": self._overflowed_at,
            "patience": self._patience,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from `state`; a fixed scale stays as configured, and no dynamic one goes on from a fixed one."""
        if self.dynamic and state.get("dynamic", True):  # states of before do not say it
            # The lower bound may have been raised since.
            self.scale, self._steps = max(state["scale"], self._config.min_loss_scale), state["steps"]
            self._overflowed_at, self._patience = state["overflowed_at"], state["patience"]
