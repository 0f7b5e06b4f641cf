"""`deepspeed.runtime.zero.stage_1_and_2`: the estimates of memory."""

from offload.deepspeed.refused import estimate_zero2_model_states_mem_needs
from offload.deepspeed.zero import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)

__all__ = [
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]
