"""A module that needs its weight in fp32 is named under bf16 and fp16, and trains by the advice of the error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import offload
from offload.errors import UsageError
from tests.support.oracle import Job, config, start, train_step


class Gate(nn.Module):
    """Scores of three experts, which are computed in fp32 whatever the model's dtype is."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.randn(3, 12, dtype=torch.float32) / 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        with torch.autocast(values.device.type, enabled=False):
            return nn.functional.linear(values.float(), self.scores).softmax(-1)


class Routed(nn.Module):
    def __init__(self, gate: Callable[[], nn.Module] = Gate) -> None:
        super().__init__()
        self.experts, self.gate = nn.ModuleList(nn.Linear(12, 12) for _ in range(3)), gate()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        weights = self.gate(values).to(values.dtype)
        return sum(weights[:, [number]] * expert(values) for number, expert in enumerate(self.experts))


def loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    rows = torch.randn(5, 12, generator=torch.Generator().manual_seed(step))
    return (model(rows).float() - 1).square().mean()


@pytest.mark.works("Precision", "a module that needs its weight in fp32 (a router) under `bf16`", "refused")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_module_that_needs_fp32_is_named(dtype: str, tmp_path: Path) -> None:
    job = Job(Routed, loss, dtype=dtype)
    engine = start(job, ("none", "cpu"), tmp_path)
    with pytest.raises(
        UsageError, match=rf"^gate computes in fp32 with a weight or an input in {dtype}: .*torch_autocast"
    ):
        job.loss(engine, 0, 0)
    engine.destroy(remove=True)


@pytest.mark.numeric
def test_the_advice_trains_as_pytorch_does(tmp_path: Path) -> None:
    job = Job(Routed, loss, steps=3, lr=1e-2, clip=0)
    torch.manual_seed(job.seed)
    plain = Routed()
    optimizer, expected = torch.optim.AdamW(plain.parameters(), lr=job.lr, weight_decay=job.weight_decay), []
    for step in range(job.steps):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            value = loss(plain, step, 0)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(value.item())
    content = config(job, ("nvme", "nvme"), tmp_path) | {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    torch.manual_seed(job.seed)
    engine = offload.initialize(model=Routed(), config=content)[0]
    losses = [train_step(engine, job, step) for step in range(job.steps)]
    engine.destroy(remove=True)
    assert losses[0] == expected[0] and torch.allclose(torch.tensor(losses), torch.tensor(expected), atol=1e-3)


def test_an_error_about_something_else_stays_torchs(tmp_path: Path) -> None:
    job = Job(lambda: Routed(lambda: nn.Linear(13, 3)), loss, dtype="bf16")
    engine = start(job, ("none", "cpu"), tmp_path)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as error:
        job.loss(engine, 0, 0)
    assert not isinstance(error.value, UsageError)
    engine.destroy(remove=True)


class Marked(nn.Module):
    """Marks weights as classes of transformers do."""

    _keep_in_fp32_modules_strict = ("gate.scores", "rates")

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.separates = Routed(lambda: nn.Sequential(nn.Linear(12, 3))), nn.Parameter(torch.ones(12))
        self.gate, self.rates = Gate(), nn.ParameterList([torch.ones(2)])

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.inner(values) * self.separates


def test_weights_that_transformers_would_load_in_fp32_are_told(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, logger="offload")
    start(Job(Marked, loss, dtype="bf16"), ("none", "cpu"), tmp_path).destroy(remove=True)
    assert (
        "computes with 2 weights in bf16 that transformers would load in fp32, the first is gate.scores" in caplog.text
    )
    caplog.clear()
    start(Job(Marked, loss), ("none", "cpu"), tmp_path).destroy(remove=True)
    assert "would load in fp32" not in caplog.text
