"""DeepSpeed's names of components: optimizers, learning rates, ranks, pipelines, experts, kernels."""

from __future__ import annotations

from tests.pages.deepspeed_names.name import ABSENT, REFUSED, RIGHT, Name, each

_PIPELINE = "`num_stages`; processes of a stage follow each other"
_COMPRESSED = (
    "`AdamW`; `zero_quantized_gradients` and `zero_quantized_weights` send [int8 "
    "codes](../concepts/quantized-collectives.md)"
)
_NOT_LOGGED = (
    "without effect, as a warning says: `steps_per_print` has the number and bytes of collectives, and [the "
    "timeline](../guides/find-the-bottleneck.md#record-a-timeline) draws them"
)
_LAYERS = "layers are the model's own"
_SCHEDULE = "with the differences of [learning rates](deepspeed-compatibility.md#learning-rates)"

SECTIONS: dict[str, tuple[Name, ...]] = {
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
        *each(ABSENT, _COMPRESSED, "runtime.fp16.onebit.adam.OnebitAdam", "runtime.fp16.onebit.lamb.OnebitLamb"),
        Name("runtime.fp16.onebit.zoadam.ZeroOneAdam", ABSENT, _COMPRESSED),
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
        Name("comm.log_summary", RIGHT, _NOT_LOGGED, "show_straggler"),
        Name("comm.configure", RIGHT, _NOT_LOGGED, "deepspeed_config enabled prof_all prof_ops verbose debug"),
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
            "by torch's 1F1B schedule; no `topology`, `dynamic_shape` or checkpointing of your own; see "
            "[pipelines](../guides/pipeline-parallelism.md)",
            "layers num_stages topology loss_fn seed_layers seed_fn base_seed partition_method "
            "activation_checkpoint_interval activation_checkpoint_func checkpointable_layers dynamic_shape",
        ),
        Name("pipe.PipelineModule", RIGHT),
        Name("PipelineEngine", RIGHT, "`train_batch`, `eval_batch`; made by `initialize`"),
        Name("pipe.LayerSpec", RIGHT, "", "typename"),
        Name("pipe.TiedLayerSpec", RIGHT, "gradients are added up over the stages before each step", "key typename"),
        Name("runtime.pipe.ProcessTopology", ABSENT, _PIPELINE),
        Name("moe.layer.MoE", REFUSED, "[experts of the model](../guides/mixtures-of-experts.md), paged one by one"),
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
        *each(
            ABSENT,
            "[tiles](python/tiles.md), and [losses](python/losses.md)",
            *(
                f"runtime.sequence_parallel.ulysses_sp.{name}"
                for name in ("SequenceTiledCompute", "TiledMLP", "TiledFusedLogitsLoss")
            ),
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
        *each(
            ABSENT,
            "[the timeline](../guides/find-the-bottleneck.md#record-a-timeline); torch's own counter of operations",
            "profiling.flops_profiler.FlopsProfiler",
            "profiling.flops_profiler.get_model_profile",
        ),
        Name("autotuning.Autotuner", ABSENT, "`offload plan` decides before a run"),
        Name("elasticity.compute_elastic_config", ABSENT, "a run resumes on any number of ranks as it is"),
        Name("monitor.monitor.MonitorMaster", ABSENT, "the [JSON's blocks](../guides/monitor-a-run.md)"),
    ),
}
