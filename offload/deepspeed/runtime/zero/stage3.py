"""`deepspeed.runtime.zero.stage3`: the estimates of memory, and generation."""

from offload.deepspeed.refused import estimate_zero3_model_states_mem_needs
from offload.deepspeed.zero import (
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
    unwrap_model_for_generation,
)

__all__ = [
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "unwrap_model_for_generation",
]
