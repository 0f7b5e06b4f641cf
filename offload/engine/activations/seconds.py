"""Seconds that the checkpointed blocks take, for the log: the key "profile" of "activation_checkpointing"."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import nn

logger = logging.getLogger("offload")


class UnitSeconds:
    """Sums of one step, block by block. One thread at a time runs a model, so no lock is needed."""

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        """Starts with no seconds; `blocks` are the modules by name."""
        self._names = {id(module): name for name, module in blocks.items()}
        self._blocks = blocks  # an id is valid as long as the module lives
        self._forward = dict.fromkeys(blocks, 0.0)
        self._again = dict.fromkeys(blocks, 0.0)

    def add_forward(self, name: str, seconds: float) -> None:
        """Adds a forward of a block."""
        self._forward[name] += seconds

    def add_recomputation(self, module: nn.Module, seconds: float) -> None:
        """Adds a recomputation of a block."""
        self._again[self._names[id(module)]] += seconds

    def end_step(self, step: int) -> None:
        """Logs the seconds of the step, and starts again."""
        rows = ", ".join(f"{name} {self._forward[name]:.4f} and {self._again[name]:.4f}" for name in self._blocks)
        logger.info("step %d, seconds of forward and recomputation: %s", step, rows)
        self._forward = dict.fromkeys(self._blocks, 0.0)
        self._again = dict.fromkeys(self._blocks, 0.0)
