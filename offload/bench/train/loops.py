"""The contenders of this package, and plain PyTorch, with which all are compared."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offload
from offload.bench.configs import LEARNING_RATE, WEIGHT_DECAY, placed
from offload.bench.train.plan import Contender, Job
from offload.bench.train.trainer import Batch, Step, Trainer, in_phases, model_of


def config_of(job: Job, contender: Contender) -> dict[str, Any]:
    """Returns the config of a job in a contender's placement, for engines that read DeepSpeed's JSON."""
    device = torch.device(job.device)
    return placed(contender.placement, Path(job.folder), device, job.batch_size, job.dtype, job.micro_batches)


def plain(job: Job, contender: Contender) -> Trainer:
    """Returns plain PyTorch: everything in memory, torch's fused AdamW, in bf16 on fp32 masters."""
    model: Any = model_of(job.model).to(job.device)
    parameters = list(model.parameters())
    masters = parameters
    if job.dtype == "bf16":
        # The masters take the memory of the fp32 weights over, so that these exist once.
        masters = [nn.Parameter(parameter.detach()) for parameter in parameters]
        for parameter in parameters:
            parameter.data = parameter.detach().bfloat16()
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)

    @torch.no_grad()
    def update(last: bool) -> None:
        if not last:
            return
        for parameter, master in zip(parameters, masters, strict=True):
            if master is not parameter and parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        # In fp32 a weight is its own master.
        for parameter, master in zip(parameters, masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)

    return Trainer(
        parameters=sum(parameter.numel() for parameter in parameters),
        vocabulary=model.config.vocab_size,
        step=lambda batches: in_phases(
            job,
            batches,
            lambda batch: model(**batch).loss,
            lambda loss: (loss / job.micro_batches).backward(),
            update,
        ),
    )


def ours(job: Job, contender: Contender) -> Trainer:
    """Returns an engine of this package, in the contender's placement and order."""
    settings = config_of(job, contender)
    settings["offload"] |= {"run": "bench-train", "schedule": contender.schedule}
    with offload.init(settings):
        model: Any = model_of(job.model)
    # `offload.init` draws other numbers than plain PyTorch, which fills one parameter after the other.
    offload.load_pretrained(model, job.weights)
    engine = offload.initialize(model=model, config=settings)[0]

    def whole(batches: Sequence[Batch]) -> Step:
        # Micro-batches take turns in the forward and the backward, so neither has a time of its own.
        start = time.perf_counter()
        loss = float(engine.train_batch(iter(batches)))
        return Step(loss, time.perf_counter() - start)

    def phases(batches: Sequence[Batch]) -> Step:
        return in_phases(job, batches, lambda batch: engine(**batch).loss, engine.backward, lambda last: engine.step())

    return Trainer(
        parameters=engine.parameter_count,
        vocabulary=model.config.vocab_size,
        step=whole if contender.schedule == "layer_major" else phases,
        settle=engine.synchronize,
        moved=engine.io_bytes,
        close=lambda: engine.destroy(remove=True),
    )
