"""Names of DeepSpeed without a counterpart here: each can be imported, and its use is an error with an explanation.

A class stays a class, so that `isinstance(layer, deepspeed.moe.layer.MoE)` is False and not an error. Modules without a
counterpart cannot be imported: `INSTEAD` has the words of the import error.
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

MoE = refused_class(
    "MoE", "use the model's own experts, paged in groups or one by one; expert_parallel divides them over ranks"
)
GDSBuilder = refused_class("GDSBuilder", "files are read into host memory: use AsyncIOBuilder, and copy to the GPU")


# -- modules -------------------------------------------------------------------------------------------

_KERNELS = "layers are the model's own, and offload.kernels has the kernels of optimizers: leave the import out"
_JSON = "the JSON alone configures an engine; `offload check-config` says what becomes of each key"
_OPTIMIZERS = 'initialize makes the optimizer, and "bf16", "fp16" or "torch_autocast" in the JSON choose the numbers'
_CHECKPOINTS = "engine.save_checkpoint and engine.load_checkpoint write and read folders, for any number of ranks"
_INTERNAL = "it is a part of DeepSpeed's own machinery, and a script needs none of it: leave the import out"

INSTEAD = {
    "": "it is none of the modules of DeepSpeed 0.19 that scripts import",
    "accelerator": "deepspeed.get_accelerator() is the accelerator that torch finds, or the CPU",
    "autotuning": "`offload plan MODEL` predicts placements and micro-batches before a run, and names the fastest",
    "checkpoint": f"{_CHECKPOINTS}; `offload inspect` and `offload export` read them",
    "comm": "deepspeed.comm itself has the collectives, over torch.distributed",
    "compat": _INTERNAL,
    "compile": 'the block "compile" of the JSON, or engine.compile(), compiles each block by torch.compile',
    "compression": '"frozen" in the "offload" block keeps frozen weights in 4 or 8 bits; pruning is the script\'s',
    "constants": _JSON,
    "datastates": '"durability" in the "offload" block commits steps to the swap files while training goes on',
    "elasticity": "a run resumes on any number of ranks as it is: start it again with the ranks there are",
    "env_report": "call the command `offload doctor`",
    "git_version_info": "offload.__version__ is the version, and deepspeed.__version__ that of the names",
    "git_version_info_installed": "offload.__version__ is the version, and deepspeed.__version__ that of the names",
    "inference": "deepspeed.init_inference, or offload.inference, runs models that are larger than memory",
    "io": "deepspeed.ops.op_builder.AsyncIOBuilder, or offload.aio, reads and writes files",
    "launcher": "start scripts by the command `offload launch`",
    "linear": '"frozen" in the "offload" block keeps frozen weights in 4 or 8 bits, under adapters of peft',
    "model_implementations": _LAYERS,
    "module_inject": f"{_LAYERS}; the guide to tensor parallelism divides them by torch",
    "moe": "experts are the model's own, and paged in groups or one by one: the guide to mixtures of experts says how",
    "monitor": 'the blocks "tensorboard", "wandb" and "csv_monitor" of the JSON write the numbers of each step',
    "nvme": 'call the command `offload tune` for the block "aio", or `offload bench io` for the rates of a drive',
    "ops": _KERNELS,
    "ops.gds": "files are read into host memory: use deepspeed.ops.op_builder.AsyncIOBuilder, and copy to the GPU",
    "ops.op_builder": "kernels need no build: deepspeed.get_accelerator().create_op_builder says which there are",
    "ops.pin_memory": "tensors that deepspeed.ops.op_builder.AsyncIOBuilder makes by new_cpu_locked_tensor are pinned",
    "ops.random_ltd": "random layer-token dropping changes the training and is not supported",
    "pipe": "deepspeed.pipe itself has PipelineModule, LayerSpec and TiedLayerSpec",
    "profiling": "deepspeed.profiling.flops_profiler has FlopsProfiler and get_model_profile",
    "runtime": _INTERNAL,
    "runtime.activation_checkpointing": 'deepspeed.checkpointing, or the block "activation_checkpointing", does it',
    "runtime.activation_checkpointing.offload_activations": (
        '"activations" in the "offload" block says where inputs of recomputed blocks wait'
    ),
    "runtime.base_optimizer": _OPTIMIZERS,
    "runtime.bf16_optimizer": _OPTIMIZERS,
    "runtime.checkpoint_engine": _CHECKPOINTS,
    "runtime.chunked_cross_entropy": "offload.losses.causal_lm computes the loss in chunks of tokens",
    "runtime.comm": "deepspeed.comm has the collectives, over torch.distributed",
    "runtime.compiler": 'the block "compile" of the JSON, or engine.compile(), compiles each block by torch.compile',
    "runtime.config_utils": _JSON,
    "runtime.constants": _JSON,
    "runtime.data_pipeline": (
        "curricula, sampling by metrics and dropped tokens change the training and are not supported: leave them out"
    ),
    "runtime.domino": "the guide to tensor parallelism divides layers by torch",
    "runtime.fp16": _OPTIMIZERS,
    "runtime.fp16.onebit": (
        '"optimizer": {"type": "OneBitAdam"} in the JSON has ranks send signs in stages 0 and 1, as do ZeroOneAdam '
        "and OneBitLamb"
    ),
    "runtime.hybrid_engine": "model.generate works under the engine as it is",
    "runtime.hybrid_engine_graph": "model.generate works under the engine as it is",
    "runtime.keep_in_fp32": '"keep_in_fp32" in the "offload" block names the weights',
    "runtime.model_checkpointing": _CHECKPOINTS,
    "runtime.pipe": "deepspeed.pipe.PipelineModule divides a model into stages; processes of a stage follow each other",
    "runtime.precision_config": _OPTIMIZERS,
    "runtime.rollout": "model.generate works under the engine as it is",
    "runtime.sequence_parallel": '"sequence_parallel_size" in the JSON shares sequences among ranks',
    "runtime.sparse_tensor": "gradients of embeddings are dense",
    "runtime.state_dict_factory": "offload.load_pretrained, or from_pretrained in zero.Init, streams files",
    "runtime.superoffload": '"speculate" in the "offload" block updates under the backward, by default on a GPU',
    "runtime.swap_tensor": "the engine pages all states; deepspeed.ops.op_builder.AsyncIOBuilder reads files",
    "runtime.tensor_parallel": "the guide to tensor parallelism divides layers by torch, before initialize",
    "runtime.torch_autocast": 'set the block "torch_autocast" of the JSON',
    "runtime.weight_quantizer": '"frozen" in the "offload" block keeps frozen weights in 4 or 8 bits',
    "runtime.zenflow": "updates run beside the next forward with the numbers of plain steps: leave ZenFlow out",
    "runtime.zero.config": _JSON,
    "runtime.zero.leaf_module_config": "deepspeed.utils.set_z3_leaf_modules names modules that are one unit",
    "runtime.zero.muon": 'set "optimizer": {"type": "Muon"} in the JSON',
    "runtime.zero.offload_states": "engine.offload_states and engine.reload_states free the GPU and take it back",
    "sequence": '"sequence_parallel_size" in the JSON shares the sequences of models of transformers among ranks',
    "sequence.linear_cross_entropy": "offload.losses.causal_lm computes the loss in chunks of tokens",
    "utils": _INTERNAL,
    "utils.comms_logging": "engine.communication() counts collectives, and deepspeed.comm.log_summary prints them",
    "utils.numa": "start ranks below numactl",
    "utils.nvtx": 'torch.cuda.nvtx.range marks a range; "trace" in the "offload" block records the engine\'s own spans',
    "utils.timer": '"wall_clock_breakdown" in the JSON times the phases, and engine.measured has the last step\'s',
    "utils.zero_to_torch": "`offload export CHECKPOINT FOLDER` writes the weights of a checkpoint",
}
"""What a script uses in place of a module that is not here, and of those below it; the longest prefix counts."""


def missing_module(path: str) -> ModuleNotFoundError:
    """Returns the error of an import of `deepspeed.PATH`, which has no counterpart here."""
    prefix = path
    while prefix not in INSTEAD:
        prefix = prefix.rpartition(".")[0]
    return ModuleNotFoundError(
        f"offload has no counterpart of deepspeed.{path}: {INSTEAD[prefix]}. docs/reference/deepspeed-names.md lists "
        "what there is",
        name=f"deepspeed.{path}",
    )
