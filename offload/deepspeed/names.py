"""DeepSpeed's modules and their names: for each name, the module of this library that defines it.

DeepSpeed's module tree is a table here. A module of the table is created when it is imported or read as an attribute of
its package. At the first use of a name it imports the module that defines the name. Like `import offload`,
`import offload.deepspeed` is light: a launcher and `find_spec` import it without torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from offload.deepspeed.refused import missing_module

_PACKAGE = "offload.deepspeed"

_COLLECTIVES = (
    "ReduceOp all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single allgather_fn "
    "barrier broadcast broadcast_object_list configure destroy_process_group gather get_all_ranks_from_group "
    "get_global_rank get_local_rank get_rank get_world_group get_world_size inference_all_reduce init_distributed "
    "irecv is_available is_initialized isend log_summary monitored_barrier new_group recv reduce reduce_scatter "
    "reduce_scatter_fn reduce_scatter_tensor scatter send"
)
MODULES: dict[str, dict[str, str]] = {
    "": {
        "comm": "init_distributed",
        "config": "DeepSpeedConfig DeepSpeedConfigError",
        "engine": "DeepSpeedEngine DeepSpeedOptimizer",
        "lr_schedules": "add_tuning_arguments",
        "accelerator": "get_accelerator",
        "initialization": "InferenceEngine add_config_arguments init_inference initialize",
        "pipe": "PipelineEngine PipelineModule",
        "utils": "DeepSpeedDataLoader OnDevice log_dist logger",
        "refused": "DeepSpeedHybridEngine DeepSpeedInferenceConfig DeepSpeedTransformerConfig "
        "DeepSpeedTransformerLayer default_inference_config replace_transformer_layer set_autotp_mode tp_model_init",
    },
    "accelerator.abstract_accelerator": {"accelerator": "DeepSpeedAccelerator"},
    "accelerator.real_accelerator": {
        "accelerator": "get_accelerator is_current_accelerator_supported",
        "refused": "set_accelerator",
    },
    "checkpoint": {"refused": "DeepSpeedCheckpoint"},
    "checkpoint.deepspeed_checkpoint": {"refused": "DeepSpeedCheckpoint"},
    "checkpoint.utils": {"utils": "clone_tensors_for_torch_save"},
    "comm.comm": {"comm": _COLLECTIVES},
    "inference": {"initialization": "InferenceEngine"},
    "inference.engine": {"initialization": "InferenceEngine"},
    "launcher": {},
    "launcher.runner": {"refused": "DEEPSPEED_ENVIRONMENT_NAME main"},
    "moe": {},
    "moe.layer": {"refused": "MoE"},
    "ops": {},
    "ops.adagrad": {"optimizers": "DeepSpeedCPUAdagrad"},
    "ops.adagrad.cpu_adagrad": {"optimizers": "DeepSpeedCPUAdagrad"},
    "ops.adam": {"optimizers": "DeepSpeedCPUAdam FusedAdam"},
    "ops.adam.cpu_adam": {"optimizers": "DeepSpeedCPUAdam"},
    "ops.adam.fused_adam": {"optimizers": "FusedAdam"},
    "ops.aio": {"accelerator": "AsyncIOBuilder"},
    "ops.lamb": {"optimizers": "FusedLamb"},
    "ops.lamb.fused_lamb": {"optimizers": "FusedLamb"},
    "ops.lion": {"optimizers": "DeepSpeedCPULion FusedLion"},
    "ops.lion.cpu_lion": {"optimizers": "DeepSpeedCPULion"},
    "ops.lion.fused_lion": {"optimizers": "FusedLion"},
    "ops.op_builder": {"accelerator": "AsyncIOBuilder NotImplementedBuilder", "refused": "GDSBuilder"},
    "ops.op_builder.async_io": {"accelerator": "AsyncIOBuilder"},
    "ops.op_builder.gds": {"refused": "GDSBuilder"},
    "profiling": {},
    "profiling.flops_profiler": {"flops_profiler": "FlopsProfiler get_model_profile"},
    "profiling.flops_profiler.profiler": {"flops_profiler": "FlopsProfiler get_model_profile"},
    "runtime": {},
    "runtime.activation_checkpointing": {},
    "runtime.activation_checkpointing.checkpointing": {
        "checkpointing": "checkpoint configure get_cuda_rng_tracker is_configured model_parallel_cuda_manual_seed "
        "model_parallel_reconfigure_tp_seed non_reentrant_checkpoint partition_activations_in_checkpoint reset "
        "set_num_layers"
    },
    "runtime.config": {"config": "DeepSpeedConfig DeepSpeedConfigError"},
    "runtime.dataloader": {"utils": "DeepSpeedDataLoader RepeatingLoader"},
    "runtime.engine": {
        "engine": "DeepSpeedEngine DeepSpeedOptimizer DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable"
    },
    "runtime.lr_schedules": {
        "lr_schedules": "LR_RANGE_TEST LR_SCHEDULE LRRangeTest ONE_CYCLE OneCycle VALID_LR_SCHEDULES WARMUP_COSINE_LR "
        "WARMUP_DECAY_LR WARMUP_LR WarmupCosineLR WarmupDecayLR WarmupLR add_tuning_arguments get_config_from_args "
        "get_lr_from_config"
    },
    "runtime.pipe": {"pipe": "LayerSpec PipelineModule TiedLayerSpec"},
    "runtime.pipe.engine": {"pipe": "PipelineEngine"},
    "runtime.pipe.module": {"pipe": "LayerSpec PipelineModule TiedLayerSpec"},
    "runtime.sequence_parallel": {},
    "runtime.sequence_parallel.parallel_state_sp": {"sequence_parallel": "SequenceGroups"},
    "runtime.sequence_parallel.ulysses_sp": {
        "sequence_parallel": "SequenceTiledCompute TiledFusedLogitsLoss TiledMLP UlyssesSPAttentionHF "
        "UlyssesSPDataLoaderAdapter sequence_tiled_compute"
    },
    "runtime.utils": {
        "utils": "clip_grad_norm_ copy_to_device empty_cache ensure_directory_exists move_to_device see_memory_usage "
        "set_random_seed"
    },
    "runtime.zero": {
        "zero": "GatheredParameters Init TiledLinear TiledLinearReturnBias ZeroParamStatus ZeroParamType "
        "estimate_zero2_model_states_mem_needs_all_cold estimate_zero2_model_states_mem_needs_all_live "
        "estimate_zero3_model_states_mem_needs_all_cold estimate_zero3_model_states_mem_needs_all_live "
        "register_external_parameter unregister_external_parameter unwrap_model_for_generation",
        "refused": "MiCS_Init",
    },
    "runtime.zero.offload_config": {"zero": "OffloadDeviceEnum OffloadStateTypeEnum"},
    "runtime.zero.parameter_offload": {"zero": "DeepSpeedZeRoOffload"},
    # transformers replaces `zero_wrapper_for_fp_tensor_constructor` in this module while it loads a model.
    "runtime.zero.partition_parameters": {
        "zero": "GatheredParameters Init ZeroParamStatus ZeroParamType _orig_torch_arange is_zero_param "
        "register_external_parameter unregister_external_parameter zero_wrapper_for_fp_tensor_constructor",
        "accelerator": "get_accelerator",
    },
    "runtime.zero.stage3": {
        "zero": "estimate_zero3_model_states_mem_needs_all_cold estimate_zero3_model_states_mem_needs_all_live "
        "unwrap_model_for_generation",
        "refused": "estimate_zero3_model_states_mem_needs",
    },
    "runtime.zero.stage_1_and_2": {
        "zero": "estimate_zero2_model_states_mem_needs_all_cold estimate_zero2_model_states_mem_needs_all_live",
        "refused": "estimate_zero2_model_states_mem_needs",
    },
    "runtime.zero.tiling": {"zero": "TiledLinear TiledLinearReturnBias"},
    "utils": {},
    "utils.groups": {
        "sequence_parallel": "_get_data_parallel_group _get_data_parallel_rank _get_data_parallel_world_size "
        "_get_sequence_parallel_group _get_sequence_parallel_rank _get_sequence_parallel_world_size "
        "get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size get_model_parallel_rank "
        "get_model_parallel_world_size get_tensor_model_parallel_rank get_tensor_model_parallel_world_size"
    },
    "utils.init_on_device": {"utils": "OnDevice"},
    "utils.logging": {"utils": "log_dist log_dist_once logger set_log_level_from_string"},
    "utils.tensor_fragment": {
        "utils": "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_get_local_fp32_param "
        "safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad "
        "safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state "
        "safe_update_full_grad_vectorized"
    },
    "utils.z3_leaf_module": {
        "utils": "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name "
        "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module"
    },
}
"""For each module of DeepSpeed, below `deepspeed`, its names by the module of this package that defines them.

The modules of `_FILES` define their names themselves.
"""

_FILES = (
    *("accelerator", "checkpoint", "checkpoint.ds_to_universal", "checkpointing", "comm", "pipe"),
    *("utils", "utils.zero_to_fp32", "zero"),
)
"""DeepSpeed's modules that are files here."""


def public_names(module: str) -> list[str]:
    """Returns the names and the submodules of a module of the table."""
    names = [name for names in MODULES[module].values() for name in names.split()]
    return sorted(name for name in (*names, *_submodules(module)) if not name.startswith("_"))


def _submodules(module: str) -> list[str]:
    prefix = f"{module}." if module else ""
    below = [path.removeprefix(prefix) for path in (*MODULES, *_FILES) if path.startswith(prefix)]
    return sorted({name for name in below if name and "." not in name})


def attributes_of(module: str) -> Callable[[str], object]:
    """Returns the `__getattr__` of a module of the table, which imports submodules and names at their first use."""
    full_name = f"{_PACKAGE}.{module}".removesuffix(".")
    source_of = {name: source for source, names in MODULES[module].items() for name in names.split()}
    submodules = _submodules(module)

    def __getattr__(name: str) -> object:
        if name in submodules:
            return import_module(f"{full_name}.{name}")
        if name not in source_of:
            raise AttributeError(
                f"module {full_name!r} has no attribute {name!r}; its page is reference/deepspeed-names"
            )
        value = getattr(import_module(f"{_PACKAGE}.{source_of[name]}"), name)
        # Stored in the module, since Python calls `__getattr__` only for missing names.
        setattr(sys.modules[full_name], name, value)
        return value

    return __getattr__


class _TableFinder(MetaPathFinder, Loader):
    """Finder and loader of the modules of the table that are not files. It comes last: any other module is an error."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{_PACKAGE}."):
            return None
        module = fullname.removeprefix(f"{_PACKAGE}.")
        if module not in MODULES:
            # `from deepspeed.x import y` asks for a module of that name too. Python drops the error, and its words, if
            # it has the name of the module that was sought; DeepSpeed's own name keeps them.
            raise missing_module(module)
        # A package, so that Python asks for the modules below it here.
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__.removeprefix(f"{_PACKAGE}.")
        module.__doc__ = f"`deepspeed.{name}`: names that offload.deepspeed.names lists."
        vars(module)["__all__"] = public_names(name)
        vars(module)["__getattr__"] = attributes_of(name)
        vars(module)["__dir__"] = lambda: sorted({*vars(module), *public_names(name)})


# After Python's own finders, which find the files.
sys.meta_path.append(_TableFinder())
