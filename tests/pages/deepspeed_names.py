"""Every public name of DeepSpeed's documentation: right, refused or absent here. The page of names is written from it.

`python -m tests.pages.deepspeed_names` writes docs/reference/deepspeed-names.md.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple

from offload.deepspeed.refused import INSTEAD

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "deepspeed-names.md"

RIGHT, REFUSED, ABSENT = "right", "refused", "absent"
ENGINE = "runtime.engine.DeepSpeedEngine"


class Name(NamedTuple):
    """A name of DeepSpeed."""

    path: str
    """Behind "deepspeed."; behind the engine's class for a method."""
    outcome: str
    words: str = ""
    """What differs, or what to do instead."""
    parameters: str = ""
    """DeepSpeed's parameters in their order, where the name is right and is called."""


def each(outcome: str, words: str, *paths: str) -> tuple[Name, ...]:
    """Returns names of which the same is said."""
    return tuple(Name(path, outcome, words) for path in paths)


_MODEL = "estimate_zero{}_model_states_mem_needs_all_{}"
_WITHOUT = "none of it here"
_MEGATRON = "there is no model parallelism"
_INFERENCE = "`init_inference` takes the config as a dict"
_PIPELINE = "`num_stages`; processes of a stage follow each other"
_SIGNS = (
    "`optimizer.type` in the JSON, as `OneBitAdam`: [signs of "
    "momenta](../concepts/quantized-collectives.md#signs-of-momenta)"
)
_COUNTED = (
    "number and bytes of the engines' collectives by kind; messages are not timed, but [the "
    "timeline](../guides/find-the-bottleneck.md#record-a-timeline) draws them"
)
_ALST = "runtime.sequence_parallel.ulysses_sp"
_LAYERS = "layers are the model's own"
_SCHEDULE = "with the differences of [learning rates](deepspeed-compatibility.md#learning-rates)"

SECTIONS: dict[str, tuple[Name, ...]] = {
    "Beginning": (
        Name(
            "initialize",
            RIGHT,
            "without an optimizer the model is frozen and evaluates, and the optimizer is None; nothing is committed "
            'to the swap files unless the "offload" block sets "durability" or "resume"; `mpu` of tensor parallelism '
            "alone, no `mesh_param`",
            "args model optimizer model_parameters training_data lr_scheduler distributed_port mpu dist_init_required "
            "collate_fn config mesh_param config_params",
        ),
        Name("add_config_arguments", RIGHT, "", "parser"),
        Name("add_tuning_arguments", RIGHT, "", "parser"),
        Name(
            "init_distributed",
            RIGHT,
            "joins the ranks of torchrun, srun or mpirun; a process alone gets a group of one, without a port",
            "dist_backend auto_mpi_discovery distributed_port verbose timeout init_method dist_init_required config "
            "rank world_size",
        ),
        Name("OnDevice", RIGHT, "", "dtype device enabled"),
        Name("DeepSpeedEngine", RIGHT, "an `offload.Engine`, no `torch.nn.Module`; for `isinstance`"),
        Name(
            "DeepSpeedConfig", RIGHT, "the batch sizes, the clip, the stage; for `isinstance`", "config mpu mesh_device"
        ),
        Name("DeepSpeedConfigError", RIGHT, "`offload.ConfigError`"),
        Name("runtime.config.DeepSpeedConfig", RIGHT),
        Name("DeepSpeedOptimizer", RIGHT, "for `isinstance`"),
        Name("DeepSpeedDataLoader", RIGHT, "for `isinstance`"),
        Name("__version__", RIGHT, "that of DeepSpeed whose names these are"),
        Name("version", RIGHT),
        Name("logger", RIGHT),
        Name("log_dist", RIGHT, "", "message ranks level"),
        Name(
            "init_inference",
            RIGHT,
            "[`offload.inference`](../guides/score-and-generate.md): `dtype` and `zero`; keys about DeepSpeed's own "
            "layers have no effect, tensor parallelism is an error",
            "model config",
        ),
        Name("default_inference_config", REFUSED, _INFERENCE),
        Name("InferenceEngine", RIGHT, "for `isinstance`"),
        Name("inference.engine.InferenceEngine", RIGHT),
        Name("DeepSpeedInferenceConfig", REFUSED, _INFERENCE),
        Name("DeepSpeedHybridEngine", REFUSED, _INFERENCE),
        Name("tp_model_init", REFUSED, '`initialize` divides layers: `"tensor_parallel": {"autotp_size": 2}`'),
        Name("set_autotp_mode", REFUSED, '`initialize` divides layers: `"tensor_parallel": {"autotp_size": 2}`'),
    ),
    "The engine": (
        *each(
            RIGHT,
            "see [the engine](deepspeed-compatibility.md#the-engine)",
            *(
                f"{ENGINE}.{name}"
                for name in "forward step scale zero_grad train eval no_sync is_gradient_accumulation_boundary "
                "set_gradient_accumulation_boundary was_step_applied get_lr get_mom get_type get_global_grad_norm "
                "global_steps global_samples micro_steps skipped_steps global_rank local_rank world_size config "
                "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps set_train_batch_size "
                "zero_optimization_stage fp16_enabled bfloat16_enabled zero_gather_16bit_weights_on_model_save "
                "train_batch module_state_dict state_dict empty_partition_cache destroy lr_scheduler loss_scale".split()
            ),
        ),
        Name(f"{ENGINE}.backward", RIGHT, "", "self loss retain_graph scale_wrt_gas"),
        Name(f"{ENGINE}.deepspeed_io", RIGHT, "of DeepSpeed's arguments these three"),
        Name(f"{ENGINE}.eval_batch", RIGHT, "of DeepSpeed's arguments these two", "self data_iter num_micro_batches"),
        Name(
            f"{ENGINE}.save_checkpoint",
            RIGHT,
            "[in a format of ours](../guides/checkpoints.md)",
            "self save_dir tag client_state save_latest exclude_frozen_parameters",
        ),
        Name(
            f"{ENGINE}.load_checkpoint",
            RIGHT,
            "`custom_load_fn` is refused: weights are read by name",
            "self load_dir tag load_module_strict load_optimizer_states load_lr_scheduler_states load_module_only "
            "custom_load_fn",
        ),
        Name(
            f"{ENGINE}.save_16bit_model",
            RIGHT,
            "`pytorch_model.bin` as there, or a name with `.safetensors`, which is streamed",
            "self save_dir save_filename exclude_frozen_parameters",
        ),
        *each(
            RIGHT,
            "",
            *(
                f"{ENGINE}.{name}"
                for name in "save_fp16_model get_batch_info gradient_clipping zero_optimization optimizer_name "
                "zero_optimization_partition_gradients zero_optimization_partition_weights dynamic_loss_scale "
                "get_data_parallel_rank get_model_parallel_rank get_tensor_parallel_rank steps_per_print "
                "wall_clock_breakdown zero_cpu_offload dp_world_size".split()
            ),
        ),
        Name(
            f"{ENGINE}.compile",
            RIGHT,
            "compiles each block by itself; no `schedule`, no `compiled_autograd_enabled`",
            "self backend compile_kwargs schedule compiled_autograd_enabled",
        ),
        Name(f"{ENGINE}.set_train_micro_batch_size", REFUSED, "`set_train_batch_size` changes the number of them"),
        Name(
            f"{ENGINE}.offload_states",
            RIGHT,
            "the [device arena](../guides/give-the-gpu-back.md) goes as a whole, to the CPU alone",
            "self include device pin_memory non_blocking",
        ),
        Name(f"{ENGINE}.reload_states", RIGHT, "", "self non_blocking"),
        *each(
            ABSENT,
            "gradients are reduced as they come",
            f"{ENGINE}.coalesce_grad_reduction",
            f"{ENGINE}.allreduce_gradients",
            f"{ENGINE}.allreduce_bucket",
        ),
        *each(ABSENT, _WITHOUT, f"{ENGINE}.flops_profiler_enabled", f"{ENGINE}.curriculum_learning_enabled"),
    ),
    "ZeRO": (
        Name(
            "zero.Init",
            RIGHT,
            "weights have no values until `initialize`, so `remote_device` and `pin_memory` have no effect; groups, "
            "`mpu` and quantized weights are refused, and a `dtype` other than the config's",
            "module data_parallel_group mem_efficient_linear remote_device pin_memory config_dict_or_path config "
            "enabled dtype mpu zero_param_parallel_group zero_quantized_weights zero_quantized_nontrainable_weights "
            "sequence_data_parallel_group param_swapper tensor_overrides",
        ),
        Name(
            "zero.GatheredParameters",
            RIGHT,
            "a change without `modifier_rank` is an error; inside of a forward there is nothing to gather",
            "params modifier_rank fwd_module enabled",
        ),
        Name("zero.register_external_parameter", RIGHT, "", "module parameter"),
        Name("zero.unregister_external_parameter", RIGHT, "", "module parameter"),
        Name(
            "zero.TiledLinear",
            RIGHT,
            "split inputs and outputs and other classes of layers are refused",
            "in_features out_features bias in_splits out_splits input_is_already_split combine_out_splits linear_cls "
            "init_linear",
        ),
        Name("zero.TiledLinear.copy_params_from", RIGHT, "", "self other"),
        Name("zero.TiledLinearReturnBias", REFUSED, "`TiledLinear`"),
        Name("zero.unwrap_model_for_generation", RIGHT, "nothing has to be gathered", "model"),
        *each(RIGHT, "", "zero.ZeroParamStatus", "zero.ZeroParamType"),
        Name("runtime.zero.partition_parameters.ZeroParamStatus", RIGHT),
        Name("runtime.zero.partition_parameters.is_zero_param", RIGHT),
        *(
            Name(f"runtime.zero.{module}.{_MODEL.format(stage, kind)}", RIGHT, "the bytes of this library's placements")
            for module, stage in (("stage3", 3), ("stage_1_and_2", 2))
            for kind in ("live", "cold")
        ),
        *each(
            REFUSED,
            "those of `_all_live` and `_all_cold`, or `offload plan`",
            "runtime.zero.stage3.estimate_zero3_model_states_mem_needs",
            "runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs",
        ),
        Name("runtime.zero.config.DeepSpeedZeroConfig", ABSENT, "[configuration](configuration.md)"),
        Name("zero.MiCS_Init", REFUSED, "`zero.Init`, and `mics_shard_size` in the JSON"),
    ),
    "Parameters and gradients": (
        *(
            Name(f"utils.safe_get_{which}_{what}", RIGHT, "", f"param{more}")
            for which in ("full", "local")
            for what, more in (("fp32_param", ""), ("grad", ""), ("optimizer_state", " optim_state_key"))
        ),
        *(
            Name(f"utils.safe_set_{which}_{what}", RIGHT, "", f"param value{more}")
            for which in ("full", "local")
            for what, more in (("fp32_param", ""), ("grad", ""), ("optimizer_state", " optim_state_key"))
        ),
        Name("utils.safe_update_full_grad_vectorized", RIGHT, "", "param_list update_func"),
        Name("utils.set_z3_leaf_modules", RIGHT, "a unit each", "model leaf_module_classes raise_if_not_found"),
        Name("utils.unset_z3_leaf_modules", RIGHT, "", "model leaf_module_classes raise_if_not_found"),
        Name("utils.set_z3_leaf_modules_by_name", RIGHT, "", "model module_names flag raise_if_not_found"),
        Name("utils.set_z3_leaf_modules_by_suffix", RIGHT, "", "model module_name_suffixes flag raise_if_not_found"),
        Name("utils.set_z3_leaf_module", RIGHT, "", "model flag"),
        Name("utils.get_z3_leaf_modules", RIGHT, "", "model"),
        Name("utils.z3_leaf_module", RIGHT, "", "model"),
        Name("utils.RepeatingLoader", RIGHT, "", "loader"),
        *each(RIGHT, "", "utils.logger", "utils.log_dist", "utils.groups", "utils.OnDevice"),
    ),
    "Checkpoints": (
        Name(
            "utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint",
            RIGHT,
            "of this library's checkpoints; `lazy_mode` has no effect",
            "checkpoint_dir tag exclude_frozen_parameters lazy_mode",
        ),
        Name(
            "utils.zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict",
            RIGHT,
            "of this library's checkpoints",
            "checkpoint_dir output_dir max_shard_size safe_serialization tag exclude_frozen_parameters",
        ),
        Name(
            "utils.zero_to_fp32.convert_zero_checkpoint_to_state_dict",
            RIGHT,
            "of this library's checkpoints",
            "checkpoint_dir output_dir dtype max_shard_size safe_serialization tag exclude_frozen_parameters",
        ),
        Name(
            "utils.zero_to_fp32.load_state_dict_from_zero_checkpoint",
            RIGHT,
            "of this library's checkpoints",
            "model checkpoint_dir tag",
        ),
        Name("checkpoint.utils.clone_tensors_for_torch_save", RIGHT, "", "item device"),
        Name("checkpoint.DeepSpeedCheckpoint", REFUSED, "`offload inspect`, `offload export`"),
        Name(
            "checkpoint.ds_to_universal.main",
            RIGHT,
            "of this library's checkpoints, as `offload export --format deepspeed-universal`; a checkpoint loads on "
            "any number of ranks without it",
            "args",
        ),
    ),
    "Checkpointing of activations": (
        Name(
            "checkpointing.configure",
            RIGHT,
            "`mpu_` is not needed: the groups are those of the model",
            "mpu_ deepspeed_config partition_activations contiguous_checkpointing num_checkpoints checkpoint_in_cpu "
            "synchronize profile",
        ),
        Name("checkpointing.checkpoint", RIGHT, "with keywords too, never reentrant", "function"),
        Name("checkpointing.non_reentrant_checkpoint", RIGHT, "", "function"),
        Name("checkpointing.is_configured", RIGHT),
        Name("checkpointing.reset", RIGHT, "without effect: graphs have the buffers"),
        Name("checkpointing.partition_activations_in_checkpoint", RIGHT, "", "partition_activation"),
        Name("checkpointing.set_num_layers", RIGHT, "without effect", "nlayers"),
        *each(
            REFUSED,
            _MEGATRON,
            "checkpointing.get_cuda_rng_tracker",
            "checkpointing.model_parallel_cuda_manual_seed",
            "checkpointing.model_parallel_reconfigure_tp_seed",
        ),
        Name("runtime.activation_checkpointing.checkpointing.checkpoint", RIGHT),
    ),
    "Optimizers": (
        Name(
            "ops.adam.DeepSpeedCPUAdam",
            RIGHT,
            "alone, [`CPUAdamW`](python/kernels.md); `amsgrad` and 16-bit states are refused",
            "model_params lr bias_correction betas eps weight_decay amsgrad adamw_mode fp32_optimizer_states",
        ),
        Name(
            "ops.adam.FusedAdam",
            RIGHT,
            "for `initialize`; `step()` alone is an error",
            "params lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none",
        ),
        Name(
            "ops.lamb.FusedLamb",
            RIGHT,
            "for `initialize`; `step()` alone is an error",
            "params lr bias_correction betas eps eps_inside_sqrt weight_decay max_grad_norm max_coeff min_coeff "
            "amsgrad",
        ),
        Name(
            "ops.lion.DeepSpeedCPULion",
            RIGHT,
            "for `initialize`; `step()` alone is an error",
            "model_params lr betas weight_decay fp32_optimizer_states",
        ),
        Name(
            "ops.lion.FusedLion",
            RIGHT,
            "for `initialize`; `step()` alone is an error",
            "params lr betas weight_decay set_grad_none",
        ),
        Name(
            "ops.adagrad.DeepSpeedCPUAdagrad",
            RIGHT,
            "for `initialize`; `step()` alone is an error",
            "model_params lr eps weight_decay amsgrad fp32_optimizer_states",
        ),
        *each(
            ABSENT,
            _SIGNS,
            "runtime.fp16.onebit.adam.OnebitAdam",
            "runtime.fp16.onebit.zoadam.ZeroOneAdam",
            "runtime.fp16.onebit.lamb.OnebitLamb",
        ),
    ),
    "Learning rates": (
        Name("runtime.lr_schedules.LRRangeTest", RIGHT, _SCHEDULE),
        Name("runtime.lr_schedules.OneCycle", RIGHT, _SCHEDULE),
        Name("runtime.lr_schedules.WarmupLR", RIGHT, _SCHEDULE),
        Name("runtime.lr_schedules.WarmupDecayLR", RIGHT, _SCHEDULE),
        Name("runtime.lr_schedules.WarmupCosineLR", RIGHT, _SCHEDULE),
        Name("runtime.lr_schedules.VALID_LR_SCHEDULES", RIGHT),
        Name("runtime.lr_schedules.add_tuning_arguments", RIGHT, "", "parser"),
        Name("runtime.lr_schedules.get_config_from_args", RIGHT, "", "args"),
        Name("runtime.lr_schedules.get_lr_from_config", RIGHT, "", "config"),
    ),
    "Ranks and devices": (
        *each(
            RIGHT,
            "of torch.distributed, in a process that trains alone too",
            *(
                f"comm.{name}"
                for name in "init_distributed is_initialized is_available get_rank get_world_size get_local_rank "
                "get_world_group get_global_rank get_all_ranks_from_group new_group destroy_process_group barrier "
                "monitored_barrier broadcast broadcast_object_list all_gather all_gather_into_tensor all_gather_object "
                "allgather_fn all_reduce inference_all_reduce reduce reduce_scatter reduce_scatter_tensor "
                "reduce_scatter_fn gather scatter all_to_all all_to_all_single send recv isend irecv ReduceOp".split()
            ),
        ),
        Name("comm.log_summary", RIGHT, _COUNTED, "show_straggler return_dict"),
        Name(
            "comm.configure",
            RIGHT,
            "without effect: collectives are always counted",
            "deepspeed_config enabled prof_all prof_ops verbose debug",
        ),
        Name("get_accelerator", RIGHT),
        Name(
            "accelerator.get_accelerator",
            RIGHT,
            "all of its methods; [differences](deepspeed-compatibility.md#the-accelerator)",
        ),
        Name("accelerator.is_current_accelerator_supported", RIGHT),
        Name("accelerator.set_accelerator", REFUSED, 'the key "device" of the "offload" block'),
        *each(RIGHT, "", "utils.groups.get_data_parallel_world_size", "utils.groups.get_model_parallel_world_size"),
        *each(
            RIGHT,
            "",
            "runtime.utils.see_memory_usage",
            "runtime.utils.set_random_seed",
            "runtime.utils.move_to_device",
            "runtime.utils.clip_grad_norm_",
        ),
        Name("launcher.runner.DEEPSPEED_ENVIRONMENT_NAME", RIGHT),
        Name(
            "launcher.runner.main", REFUSED, "the command [`offload launch`](deepspeed-compatibility.md#the-launcher)"
        ),
    ),
    "Pipelines, experts, kernels": (
        Name(
            "PipelineModule",
            RIGHT,
            "by torch's 1F1B schedule, or GPipe's with fewer micro-batches than stages; no `topology`, "
            "`dynamic_shape` or checkpointing of your own; see "
            "[pipelines](../guides/pipeline-parallelism.md)",
            "layers num_stages topology loss_fn seed_layers seed_fn base_seed partition_method "
            "activation_checkpoint_interval activation_checkpoint_func checkpointable_layers dynamic_shape",
        ),
        Name("pipe.PipelineModule", RIGHT),
        Name("PipelineEngine", RIGHT, "`train_batch`, `eval_batch`; made by `initialize`"),
        Name("pipe.LayerSpec", RIGHT, "", "typename"),
        Name("pipe.TiedLayerSpec", RIGHT, "gradients are added up over the stages before each step", "key typename"),
        Name("runtime.pipe.ProcessTopology", ABSENT, _PIPELINE),
        Name(
            "moe.layer.MoE",
            REFUSED,
            "[experts of the model](../guides/mixtures-of-experts.md), in groups or one by one",
        ),
        *each(REFUSED, _LAYERS, "DeepSpeedTransformerLayer", "DeepSpeedTransformerConfig", "replace_transformer_layer"),
        Name("ops.op_builder.AsyncIOBuilder", RIGHT, "[DeepNVMe](../guides/from-deepnvme.md)"),
        Name("ops.op_builder.GDSBuilder", REFUSED, "`AsyncIOBuilder`, and a copy to the GPU"),
        Name(
            "runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF.register_with_transformers",
            RIGHT,
            "returns groups for `mpu`; the engine registers [the attention](../guides/sequence-parallelism.md) of the "
            "model that it gets; no `disable_in_eval`, no flex attention",
            "model_name_or_path core_attn_implementation sequence_parallel_size micro_batch_size seq_length "
            "seq_length_is_variable",
        ),
        Name(
            "runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF.unregister_from_transformers",
            RIGHT,
            "frees groups",
        ),
        Name(
            "runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter",
            RIGHT,
            "rows without attention masks or packed documents",
            "dl sp_rank sp_group sp_world_size device",
        ),
        Name(
            f"{_ALST}.TiledMLP.apply",
            RIGHT,
            "[`offload.tiled`](python/tiles.md) of the module",
            "fn self x shards compute_params",
        ),
        Name(
            f"{_ALST}.sequence_tiled_compute",
            RIGHT,
            "by torch's checkpoint of each piece",
            "fn seqlen shards kwargs_to_shard kwargs_to_pass grad_requiring_tensor_key compute_params "
            "output_unshard_dimension output_reduction",
        ),
        Name(f"{_ALST}.SequenceTiledCompute.apply", RIGHT, "by torch's checkpoint of each piece"),
        Name(
            f"{_ALST}.TiledFusedLogitsLoss.apply",
            RIGHT,
            "by torch's checkpoint of each piece; [`causal_lm`](python/losses.md) computes nothing twice",
            "fn self x y mask shards compute_params output_reduction",
        ),
        Name(
            "sequence.layer.DistributedAttention",
            ABSENT,
            "[`sequence_parallel_size`](../guides/sequence-parallelism.md) for models of transformers",
        ),
        Name("ops.sparse_attention.SparseSelfAttention", ABSENT, _LAYERS),
        Name(
            "compression.compress.init_compression",
            ABSENT,
            "[frozen weights](../guides/frozen-weights.md) in 4 or 8 bits",
        ),
        Name(
            "profiling.flops_profiler.FlopsProfiler",
            RIGHT,
            "products, convolutions and attention, [as torch counts them](metrics.md#tflops-and-mfu); no `ignore_list`",
            "model ds_engine recompute_fwd_factor",
        ),
        *(
            Name(f"profiling.flops_profiler.FlopsProfiler.{name}", RIGHT)
            for name in "start_profile stop_profile reset_profile end_profile get_total_flops get_total_macs "
            "get_total_params get_total_duration print_model_profile".split()
        ),
        Name(
            "profiling.flops_profiler.get_model_profile",
            RIGHT,
            "as `FlopsProfiler`; no `ignore_modules`",
            "model input_shape args kwargs print_profile detailed module_depth top_modules warm_up as_string "
            "output_file ignore_modules mode",
        ),
        Name("autotuning.Autotuner", ABSENT, "`offload plan` decides before a run"),
        Name("elasticity.compute_elastic_config", ABSENT, "a run resumes on any number of ranks as it is"),
        Name("monitor.monitor.MonitorMaster", ABSENT, "the [JSON's blocks](../guides/monitor-a-run.md)"),
    ),
}
"""The names by section of the page."""

NAMES = tuple(name for names in SECTIONS.values() for name in names)

_HEAD = """<!-- Written by `python -m tests.pages.deepspeed_names`. Do not edit. -->
# DeepSpeed's names

`import offload.deepspeed as deepspeed` has these names of DeepSpeed 0.19, and so has `import deepspeed` in a script
that [`offload run`](../guides/from-deepspeed.md) starts, or behind `offload.deepspeed.install()`.

| word | meaning |
|---|---|
| right | takes DeepSpeed's arguments in their order, and does what DeepSpeed documents, but for what stands beside it |
| refused | can be imported, and its use is an error that says what to do |
| absent | cannot be imported |

Parameters of `zero.Init` and of `initialize` have `ds_id`, `ds_shape`, `ds_numel`, `ds_status`, `ds_persist` and
`ds_tensor`; no others have. `ds_tensor` is a copy of this rank's partition, in the dtype of the weights: change it by
`safe_set_local_fp32_param`. They are read, not set.
"""

_MODULES = """
## Modules without a counterpart

The import of one of these modules, or of one below it, is a `ModuleNotFoundError` with these words. The longest name
counts; a module that has a name above is there.

| `deepspeed.` | in its place |
|---|---|
"""


def document() -> str:
    """Returns the page."""
    parts = [_HEAD]
    for section, names in SECTIONS.items():
        parts.append(f"\n## {section}\n\n| `deepspeed.` | here | |\n|---|---|---|\n")
        for (outcome, words), some in itertools.groupby(names, lambda name: (name.outcome, name.words)):
            shown = ", ".join(f"`{_shown(name.path)}`" for name in some)
            parts.append(f"| {shown} | {outcome} | {words} |\n")
    parts.append(_MODULES)
    for words, modules in itertools.groupby(INSTEAD.items(), lambda item: item[1]):
        names = ", ".join(f"`{name}`" for name, _ in modules if name)
        parts.append(f"| {names} | {words.replace('<', '&lt;')} |\n" if names else "")
    return "".join(parts)


def _shown(path: str) -> str:
    """Returns the path as a user writes it."""
    return path.replace(ENGINE, "DeepSpeedEngine")


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
