"""DeepSpeed's names for training and its state: the engine, ZeRO, parameters, checkpoints, activations."""

from __future__ import annotations

from tests.pages.deepspeed_names.name import ABSENT, ENGINE, REFUSED, RIGHT, Name, each

_MODEL = "estimate_zero{}_model_states_mem_needs_all_{}"
_WITHOUT = "none of it here"
_MEGATRON = "there is no model parallelism"
_INFERENCE = "`init_inference` takes the config as a dict"

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
        Name("tp_model_init", REFUSED, "weights are paged, not divided within a layer"),
        Name("set_autotp_mode", REFUSED, "weights are paged, not divided within a layer"),
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
        Name(f"{ENGINE}.compile", REFUSED, "`block.compile()` for each block before `initialize`"),
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
        Name("checkpoint.ds_to_universal.main", ABSENT, "a checkpoint loads on any number of ranks as it is"),
    ),
    "Checkpointing of activations": (
        Name(
            "checkpointing.configure",
            RIGHT,
            "`mpu_` of groups of one rank",
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
}
