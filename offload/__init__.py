"""Train PyTorch models larger than the GPU and larger than the RAM, from NVMe.

engine, optimizer, loader, scheduler = offload.initialize(model=model, config="ds_config.json")
"""

from __future__ import annotations

from offload import schedules
from offload.engine.birth import init
from offload.engine.calls import (
    register_external_parameter,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    unregister_external_parameter,
)
from offload.engine.dtype_choice import auto_dtype
from offload.engine.engine import Engine
from offload.engine.initialize import initialize
from offload.engine.pretrained import load_pretrained
from offload.engine.weights import gathered
from offload.errors import (
    BudgetError,
    ConfigError,
    EngineFailed,
    IoError,
    NumericsError,
    OffloadError,
    RankError,
    StoreError,
    UsageError,
)
from offload.planner.estimates import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "ConfigError",
    "Engine",
    "EngineFailed",
    "IoError",
    "NumericsError",
    "OffloadError",
    "RankError",
    "StoreError",
    "UsageError",
    "__version__",
    "auto_dtype",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "gathered",
    "init",
    "initialize",
    "load_pretrained",
    "register_external_parameter",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "schedules",
    "unregister_external_parameter",
]
