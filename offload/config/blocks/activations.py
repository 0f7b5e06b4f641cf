"""The block "activation_checkpointing" of DeepSpeed."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from offload.config.blocks.block import Block
from offload.config.blocks.values import Count


class ActivationCheckpointing(Block):
    """Repeated blocks of the model keep their inputs, and compute everything else again in backward."""

    REFUSED: ClassVar[dict[str, str]] = {}

    number_checkpoints: Count | None = Field(
        None, description="blocks that are computed again, the first ones of the model; default: all"
    )
    cpu_checkpointing: bool = Field(False, description='true: the same as `"activations": "cpu"` in "offload"')
    contiguous_memory_optimization: bool = Field(
        False, description="host memory for all inputs is allocated at once, with the first one"
    )
    partition_activations: bool = Field(
        False,
        description="blocks are computed again, and nothing is divided: data-parallel ranks have inputs of their own; "
        "refused with tensor parallelism",
    )
    synchronize_checkpoint_boundary: bool = Field(
        False, description="wait for the device at the border of each block; slower, for measurements"
    )
    profile: bool = Field(False, description="log the seconds of each block's forward and recomputation, step by step")

    @property
    def computes_again(self) -> bool:
        """True if a key asks for blocks to be computed again."""
        return bool(
            self.number_checkpoints
            or self.cpu_checkpointing
            or self.contiguous_memory_optimization
            or self.partition_activations
        )
