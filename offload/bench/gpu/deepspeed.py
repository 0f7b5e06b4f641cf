"""The steps of cpu/cpu by DeepSpeed's ZeRO-3, with weights and states in RAM, if DeepSpeed is installed."""

from __future__ import annotations

import importlib.util
import os
import time
from typing import Any

import torch

from offload.bench.configs import ALONE, for_deepspeed
from offload.bench.gpu.training import sizes, step, timed, times
from offload.bench.gpu.work import Save, Work, config_for
from offload.bench.measure import random_ids


def deepspeed_steps(work: Work, save: Save) -> None:
    """Trains the model of `work` as cpu/cpu does, by DeepSpeed, and times its steps."""
    if importlib.util.find_spec("deepspeed") is None:
        save({"skipped": "DeepSpeed is not installed"})
        return
    import deepspeed

    end = time.monotonic() + work.seconds
    settings = for_deepspeed(config_for("cpu/cpu", work, "bf16", work.accumulation))
    work.keep_limit()
    os.environ.update(ALONE)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model: Any = work.build()
    parameters = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())
    ids = random_ids((work.batch_size, work.seq_len), model.config.vocab_size).to(work.device)
    engine = deepspeed.initialize(model=model, config=settings)[0]
    losses = [step(engine, ids, work.accumulation) for _ in range(2)]
    for seconds, loss in timed(work, end, lambda: step(engine, ids, work.accumulation)):
        losses.append(loss)
        save(sizes(work, parameters) | times(work, seconds, parameters) | {"losses": losses})
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
