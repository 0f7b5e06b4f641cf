"""`deepspeed.zero`: models without weights, gathered parameters, external parameters, tiled layers."""

from __future__ import annotations

from offload.deepspeed.parameters import ZeroParamStatus, ZeroParamType
from offload.deepspeed.refused import MiCS_Init
from offload.deepspeed.zero.gathered import GatheredParameters, unwrap_model_for_generation
from offload.deepspeed.zero.init_context import Init
from offload.deepspeed.zero.tiled import TiledLinear, TiledLinearReturnBias
from offload.engine.access import register_external_parameter, unregister_external_parameter
from offload.planner.deepspeed_estimates import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "ZeroParamType",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]
