"""The contenders of other packages: DeepSpeed's ZeRO-3, FSDP2 with CPU offload, torchao's optimizer on the CPU.

Each is set up as its own documentation says, with settings by which its states fit and its drive is used; a comment
says why where a setting is not a default.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from offload.bench.configs import ALONE, LEARNING_RATE, WEIGHT_DECAY, for_deepspeed
from offload.bench.train.loops import config_of
from offload.bench.train.plan import Contender, Job
from offload.bench.train.trainer import Trainer, in_phases, model_of
from offload.sizes import MIB

_ADAMW: dict[str, Any] = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "fused": True}
_BUFFERS = 8
"""Parameters that DeepSpeed has in buffers at a time."""


def deepspeed(job: Job, contender: Contender) -> Trainer:
    """Returns DeepSpeed's ZeRO-3 in the contender's placement.

    The model is built in full and handed over: inside of `deepspeed.zero.Init` the weights would be other ones, and
    losses could not be compared. The peak of memory contains it.
    """
    os.environ.update(ALONE | {"MASTER_PORT": str(_free_port())})
    if job.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    # Imported after the environment is set, which DeepSpeed reads when it is imported.
    import deepspeed

    model: Any = model_of(job.model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    settings = for_deepspeed(config_of(job, contender), pin_memory=job.device != "cpu")
    _use_drive(settings, job, max(parameter.numel() for parameter in model.parameters()))
    engine = deepspeed.initialize(model=model, config=settings, model_parameters=model.parameters())[0]
    return Trainer(
        parameters=parameters,
        vocabulary=model.config.vocab_size,
        step=lambda batches: in_phases(
            job, batches, lambda batch: engine(**batch).loss, engine.backward, lambda last: engine.step()
        ),
        close=_leave_group,
    )


def _use_drive(settings: dict[str, Any], job: Job, largest: int) -> None:
    """Adds what DeepSpeed needs for tiers on the drive.

    Args:
        settings: its config.
        job: the work of the turn.
        largest: elements of the largest parameter, which one buffer must hold.
    """
    zero = settings["zero_optimization"]
    for key in ("offload_param", "offload_optimizer"):
        if zero[key]["device"] == "nvme":
            zero[key] |= {"nvme_path": job.folder, "buffer_count": _BUFFERS}
    if zero["offload_param"]["device"] == "nvme":
        # Without the limit of 0 weights of a small model stay in RAM, and with prefetches buffers run out.
        zero["offload_param"] |= {"buffer_size": largest, "max_in_cpu": 0}
        zero["stage3_prefetch_bucket_size"] = 0
    # Its default of 8 requests in flight is few for an NVMe drive.
    settings["aio"] = {"block_size": MIB, "queue_depth": 32, "overlap_events": True, "single_submit": False}


def fsdp2(job: Job, contender: Contender) -> Trainer:
    """Returns FSDP2 with weights, gradients and states in RAM, in a process group of one."""
    from torch.distributed import init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    backend = "gloo" if job.device == "cpu" else "cpu:gloo,cuda:nccl"
    init_process_group(backend, rank=0, world_size=1, store=torch.distributed.HashStore())  # type: ignore[attr-defined]
    model: Any = model_of(job.model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    options: dict[str, Any] = {
        "mesh": init_device_mesh(job.device, (1,)),
        "offload_policy": CPUOffloadPolicy(pin_memory=job.device != "cpu"),
    }
    if job.dtype == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # Blocks before the model, which then owns only what is left.
    for block in _blocks(model):
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), **_ADAMW)
    return _with_optimizer(job, model, parameters, optimizer, _leave_group)


def torchao(job: Job, contender: Contender) -> Trainer:
    """Returns torchao's CPUOffloadOptimizer: weights on the GPU in fp32, in bf16 by autocast, states in RAM."""
    from torchao.optim import CPUOffloadOptimizer

    model: Any = model_of(job.model).to(job.device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, **_ADAMW)
    return _with_optimizer(job, model, parameters, optimizer, autocast=job.dtype == "bf16")


def _with_optimizer(
    job: Job,
    model: Any,
    parameters: int,
    optimizer: Any,
    close: Callable[[], None] = lambda: None,
    autocast: bool = False,
) -> Trainer:
    """Returns the ordinary loop over a model and an optimizer.

    Args:
        job: the work of the turn.
        model: the model, ready to train.
        parameters: elements of its parameters.
        optimizer: an optimizer over them.
        close: ends what was begun for them.
        autocast: True if the forward computes in bf16 on weights in fp32.
    """

    def forward(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast(job.device, torch.bfloat16, enabled=autocast):
            loss: torch.Tensor = model(**batch).loss
        return loss

    def update(last: bool) -> None:
        if last:
            optimizer.step()
            optimizer.zero_grad()

    return Trainer(
        parameters=parameters,
        vocabulary=model.config.vocab_size,
        step=lambda batches: in_phases(
            job, batches, forward, lambda loss: (loss / job.micro_batches).backward(), update
        ),
        close=close,
    )


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the blocks of a model, the children of its longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=[]))


def _leave_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
