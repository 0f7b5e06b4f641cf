"""Training of PyTorch models that are larger than the GPU and the RAM, from NVMe.

    engine, optimizer, loader, scheduler = offload.initialize(model=model, config="ds_config.json")

`import offload` is light: the module of a public name, and torch with it, is imported when the name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
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
_MODULE_OF = {
    "BudgetError": "offload.errors",
    "ConfigError": "offload.errors",
    "Engine": "offload.engine.engine",
    "EngineFailed": "offload.errors",
    "InferenceEngine": "offload.inference_engine",
    "IoError": "offload.errors",
    "NumericsError": "offload.errors",
    "OffloadError": "offload.errors",
    "PipelineStages": "offload.parallel.stages",
    "RankError": "offload.errors",
    "StoreError": "offload.errors",
    "TiledLinear": "offload.activations.linear",
    "UsageError": "offload.errors",
    "auto_dtype": "offload.dtype_choice",
    "estimate_zero2_model_states_mem_needs_all_cold": "offload.planner.deepspeed_estimates",
    "estimate_zero2_model_states_mem_needs_all_live": "offload.planner.deepspeed_estimates",
    "estimate_zero3_model_states_mem_needs_all_cold": "offload.planner.deepspeed_estimates",
    "estimate_zero3_model_states_mem_needs_all_live": "offload.planner.deepspeed_estimates",
    "gathered": "offload.engine.access",
    "inference": "offload.inference_engine",
    "init": "offload.model_io.load",
    "initialize": "offload.engine.setup",
    "load_pretrained": "offload.model_io.load",
    "register_external_parameter": "offload.engine.access",
    "safe_get_full_fp32_param": "offload.engine.access",
    "safe_get_full_grad": "offload.engine.access",
    "safe_get_full_optimizer_state": "offload.engine.access",
    "safe_get_local_fp32_param": "offload.engine.access",
    "safe_get_local_grad": "offload.engine.access",
    "safe_get_local_optimizer_state": "offload.engine.access",
    "safe_set_full_fp32_param": "offload.engine.access",
    "safe_set_full_grad": "offload.engine.access",
    "safe_set_full_optimizer_state": "offload.engine.access",
    "safe_set_local_fp32_param": "offload.engine.access",
    "safe_set_local_grad": "offload.engine.access",
    "safe_set_local_optimizer_state": "offload.engine.access",
    "tiled": "offload.activations.tiles",
    "unregister_external_parameter": "offload.engine.access",
    "untiled": "offload.activations.tiles",
}
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
        """Returns the object of a public name, and stores it in this module.

        Args:
            name: a public name, or a key of `_PARTS`.

        Raises:
            AttributeError: if there is no such name. For a name of DeepSpeed the message states the replacement.
        """
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
