"""`deepspeed.checkpointing`: checkpointing of activations, by `offload.checkpointing`."""

from __future__ import annotations

from typing import Any

from offload.checkpointing import (
    checkpoint,
    configure,
    is_configured,
    non_reentrant_checkpoint,
    partition_activations_in_checkpoint,
)
from offload.deepspeed.refused import function

__all__ = [
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]

_MEGATRON = "there is no model parallelism, whose ranks need generators of their own: seed by torch.manual_seed"
get_cuda_rng_tracker = function("get_cuda_rng_tracker", _MEGATRON)
model_parallel_cuda_manual_seed = function("model_parallel_cuda_manual_seed", _MEGATRON)
model_parallel_reconfigure_tp_seed = function("model_parallel_reconfigure_tp_seed", _MEGATRON)


def reset() -> None:
    """Does nothing: DeepSpeed empties its buffers, but here each graph owns its buffers."""


def set_num_layers(nlayers: Any) -> None:
    """Does nothing: DeepSpeed sizes its buffers by the number of layers, but here each graph owns its buffers."""
