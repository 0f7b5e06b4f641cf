"""What a training run of a test is made of, its result, and the config of an engine for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.support.processes.device_process import engine_device

TIERS = ("none", "cpu", "nvme")

PLACEMENTS = tuple(itertools.product(TIERS, TIERS))
"""(weights, optimizer): all nine."""


class Job(NamedTuple):
    """A training run: the model, its data, its length, and the numbers of AdamW."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, int], torch.Tensor]
    """(model, step, micro-batch) to the loss."""
    steps: int = 3
    accumulation: int = 1
    lr: float = 1e-3
    weight_decay: float = 0.1
    clip: float = 1.0
    dtype: str = "fp32"
    seed: int = 0
    buffers: str | None = None
    """"same" gives floating-point buffers the dtype of the weights."""
    optimizer: str = "AdamW"
    params: tuple[tuple[str, Any], ...] = ()
    """Of the optimizer, beside lr and weight decay."""
    loss_scale: float = 256.0
    """In fp16."""
    logits: float = 1.0
    """The size of the largest, about: what a loss is a difference of (`tests.support.rounding_bounds`)."""
    stage: int = 3
    """Of ZeRO."""
    overlap: bool | None = None
    """`overlap_comm` of ZeRO."""
    sent: str | None = None
    """`communication_data_type`."""
    shard_size: int = -1
    """`mics_shard_size` of ZeRO: ranks of a replica, all by default."""
    bucket: int | None = None
    """`allgather_bucket_size` of ZeRO."""
    node: int = 1
    """`zero_hpz_partition_size` of ZeRO: ranks of a node."""
    quantized: str = ""
    """Words after `zero_quantized_` of the keys of ZeRO that are on."""
    sequence: int = 1
    """`sequence_parallel_size`: ranks that share each sequence."""
    experts: int = 1
    """`autoep_size`: ranks that own the experts of a layer together."""
    keep_in_fp32: tuple[str, ...] = ()
    """Parts of names of parameters."""
    fp8: str = ""
    """`recipe` of the block "fp8", emulated; without it the block is off."""


class Result(NamedTuple):
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def config(job: Job, placement: tuple[str, str], folder: Path, **options: Any) -> dict[str, Any]:
    """Returns the DeepSpeed-style config of `job`; `options` go to the "offload" block. Poison is always on."""
    weights, states = placement
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": job.accumulation,
        "gradient_clipping": job.clip,
        "communication_data_type": job.sent,
        **({"sequence_parallel_size": job.sequence} if job.sequence > 1 else {}),
        **({"expert_parallel": {"enabled": True, "autoep_size": job.experts}} if job.experts > 1 else {}),
        "bf16": {"enabled": job.dtype == "bf16"},
        "fp16": {"enabled": job.dtype == "fp16", "loss_scale": job.loss_scale},
        **({"fp8": {"enabled": True, "recipe": job.fp8, "emulate": True}} if job.fp8 else {}),
        "data_types": {"buffer_dtype": job.dtype if job.buffers else None},
        "optimizer": {
            "type": job.optimizer,
            "params": {"lr": job.lr, "weight_decay": job.weight_decay, **dict(job.params)},
        },
        "zero_optimization": {
            "stage": job.stage,
            "overlap_comm": job.overlap,
            "mics_shard_size": job.shard_size,
            "zero_hpz_partition_size": job.node,
            "allgather_bucket_size": job.bucket,
            **{f"zero_quantized_{word}": True for word in job.quantized.split()},
            "offload_param": {"device": weights},
            "offload_optimizer": {"device": states},
        },
        "offload": {
            "nvme_path": str(folder),
            "device": engine_device(),
            "seed": job.seed,
            "debug": {"poison": True},
            **({"keep_in_fp32": list(job.keep_in_fp32)} if job.keep_in_fp32 else {}),
            **options,
        },
    }
