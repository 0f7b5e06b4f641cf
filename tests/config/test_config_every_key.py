"""Every key that DeepSpeed's documentation has is honoured, named in a line at the start, or an error: none is dropped.

Offload, I/O, precision, optimizers, schedules, monitors and checkpoints; what a key is honoured with is held elsewhere.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from offload.config import load_config
from offload.errors import ConfigError

HONOURED: dict[str, Any] = {
    "checkpoint.load_universal": True,
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "sequence_parallel_size": 2,
    "communication_data_type": "fp16",
    "steps_per_print": 10,
    "memory_breakdown": True,
    "comms_logger.enabled": True,
    "flops_profiler.enabled": True,
    "wall_clock_breakdown": True,
    "zero_optimization": True,
    "zero_optimization.stage": 2,
    "zero_optimization.overlap_comm": False,
    "zero_optimization.zero_quantized_weights": True,
    "zero_optimization.zero_quantized_nontrainable_weights": True,
    "zero_optimization.zero_quantized_gradients": True,
    "zero_optimization.sub_group_size": 1e9,
    "zero_optimization.reduce_bucket_size": 5e7,
    "zero_optimization.allgather_bucket_size": 5e7,
    "zero_optimization.stage3_prefetch_bucket_size": 5e7,
    "zero_optimization.prefetch_bucket_size": 5e7,
    "zero_optimization.stage3_param_persistence_threshold": 1e5,
    "zero_optimization.param_persistence_threshold": 1e5,
    "zero_optimization.stage3_max_live_parameters": 1e9,
    "zero_optimization.max_live_parameters": 1e9,
    "zero_optimization.stage3_max_reuse_distance": 1e9,
    "zero_optimization.max_reuse_distance": 1e9,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": False,
    "zero_optimization.leaf_module.classes": ["Experts"],
    "zero_optimization.leaf_module.names": "model.experts",
    "zero_optimization.cpu_offload": True,
    "zero_optimization.cpu_offload_param": True,
    "zero_optimization.cpu_offload_params": True,
    "zero_optimization.offload_param.device": "cpu",
    "zero_optimization.offload_param.nvme_path": "/x",
    "zero_optimization.offload_param.buffer_count": 5,
    "zero_optimization.offload_param.buffer_size": 1e8,
    "zero_optimization.offload_param.max_in_cpu": 1e9,
    "zero_optimization.offload_optimizer.device": "cpu",
    "zero_optimization.offload_optimizer.nvme_path": "/x",
    "zero_optimization.offload_optimizer.ratio": 0.5,
    "aio.block_size": 1048576,
    "aio.queue_depth": 8,
    "aio.intra_op_parallelism": 1,
    "aio.thread_count": 1,
    "fp16.enabled": True,
    "fp16.auto_cast": True,
    "fp16.loss_scale": 128,
    "fp16.initial_scale_power": 8,
    "fp16.loss_scale_window": 10,
    "fp16.hysteresis": 1,
    "fp16.consecutive_hysteresis": True,
    "fp16.min_loss_scale": 2,
    "bf16.enabled": True,
    "bfloat16.enabled": True,
    "bf16.bf16_optimizer_states": True,
    "dataloader_drop_last": True,
    "torch_autocast.enabled": True,
    "tensor_parallel.autotp_size": 2,
    "expert_parallel.enabled": True,
    "expert_parallel.autoep_size": 2,
    "fp8.enabled": True,
    "fp8.recipe": "rowwise",
    "fp8.emulate": True,
    "compile.enabled": True,
    "compile.backend": "eager",
    "compile.deepcompile": True,
    "data_types.grad_accum_dtype": "fp32",
    "data_types.param_dtype": "fp32",
    "data_types.buffer_dtype": "fp32",
    "tensorboard.enabled": True,
    "tensorboard.output_path": "x",
    "tensorboard.job_name": "y",
    "csv_monitor.enabled": True,
    "csv_monitor.output_path": "x",
    "csv_monitor.job_name": "y",
    "wandb.enabled": True,
    "wandb.group": "a",
    "wandb.team": "b",
    "wandb.project": "c",
    "optimizer.type": "adam",
    "optimizer.params.lr": 1e-3,
    "optimizer.params.torch_adam": True,
    "optimizer.params.betas": [0.9, 0.99],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.1,
    "optimizer.params.bias_correction": True,
    "optimizer.params.adam_w_mode": False,
    "optimizer.params.fp32_optimizer_states": True,
    "scheduler.type": "WarmupLR",
}


def _each(path: str, message: str) -> dict[str, Any]:
    return {f"{path}{key}": True for key in message.split()}


NAMED: dict[str, Any] = {
    "timers": {"throughput": {"enabled": True, "synchronized": True}},
    "log_level": "info",
    "vocabulary_size": 100,
    "gradient_predivide_factor": 2.0,
    "seq_parallel_communication_data_type": "fp16",
    "zero_force_ds_cpu_optimizer": False,
    "autotuning": {"enabled": True},
    "nebula": {"enabled": True},
    "datastates_ckpt": {"enabled": True},
    "comet": {"enabled": True, "project": "x"},
    "checkpoint": {"tag_validation": "Fail"},
    **_each("", "dump_state disable_allgather sparse_gradients prescale_gradients zero_allow_untested_optimizer"),
    **_each("", "graph_harvesting use_data_before_expert_parallelism"),
    **_each(
        "zero_optimization.",
        """stage3_model_persistence_threshold chunk_size use_multi_rank_bucket_allreduce round_robin_gradients
        ignore_unused_parameters legacy_stage1 load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint
        memory_efficient_linear override_module_apply stage3_module_granularity_threshold
        stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential log_trace_cache_warnings
        enable_sanity_checks save_muon_momentum_buffer_in_memory
        mics_hierarchical_params_gather""",
    ),
    **dict.fromkeys(
        (
            f"zero_optimization.{key}"
            for key in "contiguous_gradients reduce_scatter allgather_partitions cpu_offload_use_pin_memory".split()
        ),
        False,
    ),
    "chunk_size": 5e6,
    "zero_optimization.offload_optimizer.pin_memory": False,
    "zero_optimization.offload_param.pin_memory": False,
    **_each(
        "zero_optimization.offload_optimizer.",
        """buffer_count buffer_size pipeline pipeline_read pipeline_write fast_init super_offload
        cpuadam_cores_perc""",
    ),
    **_each("aio.", "single_submit overlap_events use_gds"),
    "fp16.fused_mode": True,
    "bf16.immediate_grad_update": True,
    "bf16.check_grad_overflow": False,
    "torch_autocast.lower_precision_safe_modules": ["torch.nn.Linear"],
    **_each("checkpoint.", "use_node_local_storage parallel_write checkpoint_serialization writer"),
    "optimizer.legacy_fusion": True,
}
REFUSED: dict[str, Any] = {
    "managed_gradient_accumulation": False,
    "gradient_allreduce_op": "sum",
    "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}},
    "sparse_attention": {"mode": "fixed"},
    "pipeline": {"stages": 2},
    "expert_parallel.size": 2,
    "load_universal_checkpoint": True,
    "zenflow": {"topk_ratio": 0.1},
    **{
        key: {"enabled": True}
        for key in """elasticity data_efficiency curriculum_learning progressive_layer_drop eigenvalue hybrid_engine
        amp""".split()
    },
    **_each("zero_optimization.", "zeropp_loco_param zenflow"),
    "zero_optimization.leaf_module.name_suffixes": ["experts"],
    "zero_optimization.zero_hpz_partition_size": 8,
    "tensor_parallel_size": 2,
    "data_parallel_size": 2,
    "fp16.fp16_master_weights_and_grads": True,
    "bf16.bf16_master_weights_and_grads": True,
    **_each("activation_checkpointing.", "unheard_of"),
    "optimizer.params.fp32_optimizer_states": False,
    "data_types.param_dtype": "bf16",
    "optimizer.params.max_grad_norm": 1.0,
    "optimizer.type": "MuAdam",
}
_NEEDED: dict[str, dict[str, Any]] = {  # for the others of the block to mean anything
    "fp16": {"enabled": True},
    "bf16": {"enabled": True},
    "torch_autocast": {"enabled": True},
    "fp8": {"enabled": True},
    "expert_parallel": {"enabled": True},
}


def content(key: str, value: Any) -> dict[str, Any]:
    first, *rest = key.split(".")
    for name in reversed(rest):
        value = {name: value}
    return {first: {**_NEEDED[first], **value} if first in _NEEDED else value}


def test_honoured_without_a_word() -> None:
    for key, value in HONOURED.items():
        config = load_config(content(key, value))
        told = [line for line in config.notices if key in line and not line.startswith("nvme_path is used only if")]
        assert told == [], key
        given: Any = config
        for name in key.replace("bfloat16", "bf16").split("."):
            if name in type(given).model_fields:
                assert name in given.model_fields_set, f"{key} was dropped"
                given = getattr(given, name)
        assert config != config.__class__() or key in ("data_types.param_dtype",), key


def test_named_at_the_start() -> None:
    for key, value in NAMED.items():
        lines = load_config(content(key, value)).notices
        named = "checkpoint.tag_validation" if key == "checkpoint" else key
        assert any(re.search(rf"(^|[ ,]){re.escape(named)}($|[ ,])", line) for line in lines), (key, lines)


ALWAYS = (
    "contiguous_gradients reduce_scatter allgather_partitions cpu_offload_use_pin_memory offload_param.pin_memory "
    "offload_optimizer.pin_memory"
)


def test_a_key_that_asks_for_what_is_always_done_is_honoured() -> None:
    for key in ALWAYS.split():
        config = load_config(content(f"zero_optimization.{key}", True))
        assert f"zero_optimization.{key}" in config._findings.honoured
        assert not any(key.rpartition(".")[2] in line for line in config.notices), key


def test_a_key_without_support_is_refused() -> None:
    for key, value in REFUSED.items():
        with pytest.raises(ConfigError, match=re.escape(key)):
            load_config(content(key, value))
            pytest.fail(f"{key} is taken")


def test_what_is_off_needs_no_word() -> None:
    given: dict[str, Any]
    for given in (
        {"sequence_parallel_size": 1, "tensor_parallel_size": 1},
        {"zero_optimization": {"zero_hpz_partition_size": 1, "mics_shard_size": -1}},
        {"fp8": {"enabled": False}, "compile": {"deepcompile": False}},
        {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}},
        {"checkpoint": {"load_universal": False}},
        {"tensor_parallel": {"autotp_size": 1}},
        {"tensor_parallel": {"autotp_size": 0, "dtype": "bf16"}},
        {"tensor_parallel": {"enabled": False, "autotp_size": 4}},
    ):
        print(given)
        assert load_config(given).notices == ()


def test_the_message_names_the_key_and_the_fix() -> None:
    given: dict[str, Any]
    for given, message in (
        (
            {"optimizer": {"type": "OneBitLamb"}, "zero_optimization": {"stage": 3}},
            'OneBitLamb keeps all states on each rank.*stage 3 divides them: set "stage" to 0 or 1',
        ),
        (
            {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 2}},
            'OneBitAdam keeps all states on each rank.*stage 2 divides them: set "stage" to 0 or 1',
        ),
        (
            {"optimizer": {"type": "ZeroOneAdam"}, "zero_optimization": {"stage": 1, "mics_shard_size": 2}},
            "ZeroOneAdam keeps all states on each rank.*mics_shard_size is 2; leave it out",
        ),
        (
            {"optimizer": {"type": "OneBitAdam"}, "zero_optimization": {"zero_quantized_gradients": True}},
            "zero_quantized_gradients has ranks send.*OneBitAdam signs of momenta",
        ),
        (
            {"optimizer": {"type": "ZeroOneAdam", "params": {"bias_correction": True}}},
            "bias_correction true, and ZeroOneAdam corrects no bias",
        ),
        (
            {"optimizer": {"type": "OneBitLamb", "params": {"bias_correction": True}}},
            "bias_correction true, and OneBitLamb corrects no bias",
        ),
        ({"data_parallel_size": 4}, "the number of processes, which the launcher sets"),
        ({"hybrid_engine": {"enabled": True}}, "model.generate works under the engine"),
        ({"tensor_parallel_size": 2}, r'set "tensor_parallel": \{"autotp_size"'),
        ({"tensor_parallel": True}, r"tensor_parallel.*autotp_size"),
        ({"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}}, r"has the sizes \[2, 4\]; expected one"),
        ({"tensor_parallel": {"autotp_size": 2, "preset_model": "llama"}}, "divides layers by a plan of its own"),
        ({"load_universal_checkpoint": True}, r"is checkpoint\.load_universal of DeepSpeed.*by their files"),
        ({"activation_checkpointing": {"partition": True}}, "activation_checkpointing.partition;"),
    ):
        print(message)
        with pytest.raises(ConfigError, match=message) as caught:
            load_config(given)
        assert "changes the training" not in str(caught.value)
