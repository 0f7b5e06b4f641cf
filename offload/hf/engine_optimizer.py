"""An engine's optimizer as Accelerate's loop holds it."""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

from offload.engine.engine import Engine


class EngineOptimizer(AcceleratedOptimizer):
    """An engine's optimizer in Accelerate's wrapper: steps only when gradients are complete."""

    def __init__(self, engine: Engine) -> None:
        """Wraps the optimizer of `engine`."""
        # Device placement would replace the groups, which the user's schedule refers to.
        super().__init__(engine.optimizer, device_placement=False, scaler=None)
        self.engine = engine
        self.norms: list[torch.Tensor] = []
        """Tensors returned by `clip_grad_norm_` that the next step fills."""

    def step(self, closure: Any = None) -> None:
        """Steps if gradients are complete, and fills the norms that `clip_grad_norm_` has returned."""
        super().step(closure)
        if self.gradient_state.sync_gradients:
            norm = self.engine.get_global_grad_norm()
            for given in self.norms:
                given.fill_(math.nan if norm is None else norm)
            self.norms.clear()

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was not applied: an overflow in fp16, otherwise `"on_nonfinite": "skip"`."""
        return bool(self.optimizer.overflow)
