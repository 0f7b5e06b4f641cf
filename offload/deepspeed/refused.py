"""Names of DeepSpeed without a counterpart here: each can be imported, and its use is an error with an explanation.

A class stays a class, so that `isinstance(layer, deepspeed.moe.layer.MoE)` is False and not an error.
"""

from __future__ import annotations

from typing import Any, NoReturn

from offload.errors import UsageError

_TENSORS = 'leave the call out: with "tensor_parallel": {"autotp_size": 2} in its config, initialize divides the layers'
_INFERENCE = "call deepspeed.init_inference(model, config) with the config as a dict: weights are paged"
_LAYERS = "layers are the model's own: leave the call out"


def refused_class(name: str, instead: str) -> Any:
    """Returns a class whose construction is an error."""

    def __init__(self: object, *args: Any, **kwargs: Any) -> NoReturn:
        raise _error(name, instead)

    # Created by `type`, since the classes differ only in their names and messages.
    return type(name, (), {"__init__": __init__, "__doc__": f"Not supported: {instead}.", "__module__": __name__})


def function(name: str, instead: str) -> Any:
    """Returns a function that raises an error."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise _error(name, instead)

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Raises `UsageError`: {instead}."
    return refuse


def _error(name: str, instead: str) -> UsageError:
    return UsageError(f"deepspeed's {name} has no counterpart here: {instead}")


# -- inference -----------------------------------------------------------------------------------------

default_inference_config = function("default_inference_config", _INFERENCE)
DeepSpeedInferenceConfig = refused_class("DeepSpeedInferenceConfig", _INFERENCE)
DeepSpeedHybridEngine = refused_class("DeepSpeedHybridEngine", _INFERENCE)

tp_model_init = function("tp_model_init", _TENSORS)
set_autotp_mode = function("set_autotp_mode", _TENSORS)

# -- memory, checkpoints and devices -------------------------------------------------------------------

MiCS_Init = refused_class("MiCS_Init", 'use zero.Init, and "mics_shard_size" in the block "zero_optimization"')
estimate_zero3_model_states_mem_needs = function(
    "estimate_zero3_model_states_mem_needs",
    "call estimate_zero3_model_states_mem_needs_all_live(model) or _all_cold, or the command `offload plan`",
)
estimate_zero2_model_states_mem_needs = function(
    "estimate_zero2_model_states_mem_needs",
    "call estimate_zero2_model_states_mem_needs_all_live(model) or _all_cold, or the command `offload plan`",
)
DeepSpeedCheckpoint = refused_class(
    "DeepSpeedCheckpoint", "the command `offload inspect` lists checkpoints, and `offload export` writes their weights"
)
set_accelerator = function("set_accelerator", 'set "device" in the block "offload"')
main = function("launcher.runner.main", "start scripts by the command `offload launch`")
DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"  # the file in which accelerate leaves environment variables

# -- layers and optimizers -----------------------------------------------------------------------------

DeepSpeedTransformerLayer = refused_class("DeepSpeedTransformerLayer", _LAYERS)
DeepSpeedTransformerConfig = refused_class("DeepSpeedTransformerConfig", _LAYERS)
replace_transformer_layer = function("replace_transformer_layer", _LAYERS)

MoE = refused_class("MoE", "experts are not divided over ranks: use the model's own, which are paged one by one")
GDSBuilder = refused_class("GDSBuilder", "files are read into host memory: use AsyncIOBuilder, and copy to the GPU")
