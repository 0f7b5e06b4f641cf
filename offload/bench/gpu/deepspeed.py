"""The steps of cpu/cpu by DeepSpeed's ZeRO-3, with weights and states in RAM, if DeepSpeed is installed."""

from __future__ import annotations

import importlib.util
import os
import time
from typing import Any

import torch

from offload.bench.gpu.training import sizes, step, timed, times
from offload.bench.gpu.work import Save, Work, config_for, random_ids

_ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",
}


def deepspeed_steps(work: Work, save: Save) -> None:
    """Trains the model of `work` as cpu/cpu does, by DeepSpeed, and times its steps."""
    if importlib.util.find_spec("deepspeed") is None:
        save({"skipped": "DeepSpeed is not installed"})
        return
    import deepspeed

    end, settings = time.monotonic() + work.seconds, theirs(work)
    work.keep_limit()
    os.environ.update(_ALONE)
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


def theirs(work: Work) -> dict[str, Any]:
    """Returns the config of cpu/cpu without keys that DeepSpeed does not know, and with pinned memory."""
    settings = config_for("cpu/cpu", work, "bf16", work.accumulation)
    del settings["offload"]
    for key in ("offload_param", "offload_optimizer"):
        settings["zero_optimization"][key]["pin_memory"] = True
    return settings
