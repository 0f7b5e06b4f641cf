"""Codes of 8 bits (`zero_quantized_*`) by torch's operations, and ranks that note the weights they compute with."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import offload
from offload import testing
from offload.layout.flat_layout import UnitLayout
from tests.support.oracle import Job, weights_of
from tests.support.ranks.rank_jobs import JOBS
from tests.support.ranks.rank_pool import start

MEMORY, HOST, DISK = ("none", "none"), ("cpu", "cpu"), ("nvme", "nvme")
JOB = JOBS["gpt2"]._replace(steps=2, lr=3e-4)
ALL = "weights nontrainable_weights gradients"
BLOCK, BYTES = 128, 130


def through_codes(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the values of the codes of `values`, (n,) with whole blocks: 127 steps up to the largest magnitude."""
    rows = values.float().view(-1, BLOCK)
    scale = rows.abs().amax(1, keepdim=True).bfloat16().float()
    share = torch.where(scale > 0, rows / scale, 0.0)
    codes = (share * 127).clamp(-127, 127).round()
    return (codes * (scale * torch.tensor(1 / 127))).to(dtype).view(-1)


def flat(layout: UnitLayout, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns a unit as its memory has it, zeros between the parameters."""
    memory = torch.zeros(layout.numel, dtype=next(iter(values.values())).dtype)
    for segment in layout.segments:
        memory[segment.start : segment.stop] = values[segment.name].reshape(-1)
    return memory


def look_on(module: nn.Module, seen: dict[str, torch.Tensor]) -> None:
    """Has each module note the weights that it computes with."""

    def note(prefix: str, module: nn.Module, _: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            seen[prefix + name] = parameter.detach().clone()

    for path, each in module.named_modules():
        each.register_forward_pre_hook(functools.partial(note, f"{path}." if path else ""))


class Seen(NamedTuple):
    """Of one rank."""

    used: dict[str, torch.Tensor]
    """Weights in the second forward."""
    stored: dict[str, torch.Tensor]
    """Masters at that time."""
    state_dict: dict[str, torch.Tensor]
    layouts: tuple[UnitLayout, ...]


def train_and_look(job: Job, folder: Path, **options: Any) -> Seen:
    engine = start(job, DISK, folder, **options)
    engine.backward(job.loss(engine, 0, 0))
    engine.step()
    used: dict[str, torch.Tensor] = {}
    look_on(engine.module, used)
    stored = {}
    for name, parameter in engine.module.named_parameters():
        master = offload.safe_get_full_fp32_param(parameter)
        assert master is not None
        stored[name] = master
    with torch.no_grad():
        job.loss(engine, 1, 0)
    found = Seen(used, stored, weights_of(engine), tuple(testing.inspect(engine).layouts))
    engine.destroy(remove=True)
    return found
