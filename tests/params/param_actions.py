"""What users do with parameters between steps, and a round of training with it in the middle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

DISK, MEMORY = ("nvme", "nvme"), ("none", "none")

Action = Callable[[nn.Module], Any]


def sums(module: nn.Module) -> list[float]:
    with torch.no_grad():
        return [float(parameter.double().sum()) for parameter in module.parameters()]


def edits(module: nn.Module) -> Any:
    with torch.no_grad():
        module.transformer.ln_f.weight.mul_(0.5).add_(0.25)
        module.transformer.ln_f.bias.data.fill_(0.125)
        module.transformer.h[0].mlp.c_fc.weight[3:5] = 0.0
        module.transformer.h[1].mlp.c_fc.weight.data *= 0.5
        module.transformer.h[1].mlp.c_proj.weight.data = module.transformer.h[1].mlp.c_proj.weight.data * 0.5
        torch._foreach_mul_(list(module.transformer.h[0].parameters()), 0.75)
    nn.init.ones_(module.transformer.ln_f.weight)
    return sums(module)


def rows(area: str, names: Any, outcome: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.works(area, name, outcome)) for name in names]
