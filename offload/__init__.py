"""Training of PyTorch models that are larger than the GPU and the RAM, from NVMe.

    engine, optimizer, loader, scheduler = offload.initialize(model=model, config="ds_config.json")

`import offload` is light: the module of a public name, and torch with it, is imported when the name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "AuditError",
    "BudgetError",
    "ConfigError",
    "Engine",
    "EngineFailed",
    "InferenceEngine",
    "IoError",
    "NumericsError",
    "OffloadError",
    "PipelineStages",
    "RankError",
    "StoreError",
    "TiledLinear",
    "UsageError",
    "__version__",
    "auto_dtype",
    "checkpointing",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "gathered",
    "inference",
    "init",
    "initialize",
    "load_pretrained",
    "losses",
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
    "tiled",
    "unregister_external_parameter",
    "untiled",
]

# Strings instead of imports: `offload --help` must not wait seconds for torch.
_NAMES_IN = {
    "offload.activations.linear": "TiledLinear",
    "offload.activations.tiles": "tiled untiled",
    "offload.dtype_choice": "auto_dtype",
    "offload.engine.access": "gathered register_external_parameter safe_get_full_fp32_param safe_get_full_grad "
    "safe_get_full_optimizer_state safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state "
    "safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state safe_set_local_fp32_param "
    "safe_set_local_grad safe_set_local_optimizer_state unregister_external_parameter",
    "offload.engine.engine": "Engine",
    "offload.engine.setup": "initialize",
    "offload.errors": "AuditError BudgetError ConfigError EngineFailed IoError NumericsError OffloadError RankError "
    "StoreError UsageError",
    "offload.inference_engine": "InferenceEngine inference",
    "offload.model_io.load": "init load_pretrained",
    "offload.parallel.stages": "PipelineStages",
    "offload.planner.deepspeed_estimates": "estimate_zero2_model_states_mem_needs_all_cold "
    "estimate_zero2_model_states_mem_needs_all_live estimate_zero3_model_states_mem_needs_all_cold "
    "estimate_zero3_model_states_mem_needs_all_live",
}
_MODULE_OF = {name: module for module, names in _NAMES_IN.items() for name in names.split()}
"""Module of each public name. A test compares it with `__all__` and with the imports for type checkers below."""

_PARTS = {
    "aio": "offload.aio",
    "checkpointing": "offload.checkpointing",
    "config": "offload.config",
    "engine": "offload.engine.setup",
    "errors": "offload.errors",
    "kernels": "offload.kernels",
    "losses": "offload.losses",
    "planner": "offload.planner.deepspeed_estimates",
    "schedules": "offload.schedules",
    "sizes": "offload.sizes",
    "swapper": "offload.engine.setup",
}
"""Submodules that are attributes of `offload` after `import offload` alone, each with the module to import first.

The import of that module makes the submodule's own submodules attributes too.
"""

_OF_DEEPSPEED = {
    "zero": "offload.init is zero.Init, offload.gathered is zero.GatheredParameters",
    "comm": "use torch.distributed for collectives; initialize joins the ranks that torchrun has started",
    "init_distributed": "call nothing: initialize joins the ranks that torchrun has started",
    "add_config_arguments": "add no arguments: config= of initialize takes the path of the JSON file",
}
"""Names of DeepSpeed that this library does not have, with the replacement."""

# Type checkers do not execute `__getattr__`, so they need the imports.
if TYPE_CHECKING:
    from offload import checkpointing, losses, schedules
    from offload.activations.linear import TiledLinear
    from offload.activations.tiles import tiled, untiled
    from offload.dtype_choice import auto_dtype
    from offload.engine.access import (
        gathered,
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
    from offload.engine.engine import Engine
    from offload.engine.setup import initialize
    from offload.errors import (
        AuditError,
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
    from offload.inference_engine import InferenceEngine, inference
    from offload.model_io.load import init, load_pretrained
    from offload.parallel.stages import PipelineStages
    from offload.planner.deepspeed_estimates import (
        estimate_zero2_model_states_mem_needs_all_cold,
        estimate_zero2_model_states_mem_needs_all_live,
        estimate_zero3_model_states_mem_needs_all_cold,
        estimate_zero3_model_states_mem_needs_all_live,
    )
else:

    def __getattr__(name: str) -> object:
        """Returns the object of a public name, and stores it in this module; or a submodule of `_PARTS`."""
        if name in _PARTS:
            import_module(_PARTS[name])
            return import_module(f"{__name__}.{name}")
        if name not in _MODULE_OF:
            instead = f": {_OF_DEEPSPEED[name]}" if name in _OF_DEEPSPEED else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}")
        value = getattr(import_module(_MODULE_OF[name]), name)
        # Python looks up module attributes first, so the next access does not call `__getattr__`.
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        """Returns all public names, imported or not."""
        return sorted({*globals(), *__all__, *_PARTS})
