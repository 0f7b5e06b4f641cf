"""Buffers of the model: moved to the compute device, with the values of rank 0."""

from __future__ import annotations

import torch
from torch import nn

from offload.engine.distributed.process_group import Ranks
from offload.engine.setup.plan import Plan


def move_buffers(model: nn.Module, plan: Plan) -> None:
    """Moves buffers to the device, in their dtype, with the values of rank 0; shared buffers stay shared."""
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the original, so that no new one gets its id
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in moved:
                value = buffer if plan.ranks is None else _of_rank_0(buffer, plan.ranks)
                dtype = plan.buffer_dtype if buffer.is_floating_point() else None
                moved[id(buffer)] = (buffer, value.to(plan.device.torch, dtype))
            module._buffers[name] = moved[id(buffer)][1]


def _of_rank_0(buffer: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Returns a copy of the buffer as it is on rank 0. Collective."""
    values = buffer.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    ranks.broadcast(values, 0)
    return values
