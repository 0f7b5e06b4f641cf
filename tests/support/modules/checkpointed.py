"""A stack of blocks for tests of activations, and what its engine keeps of their inputs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.activations.kept_inputs import KeptInputs
from tests.support.oracle import Job, start

TIERS = ("device", "cpu", "nvme", "auto")
MEMORY = ("none", "none")
WIDTH, ROWS = 64, 64
INPUT = ROWS * WIDTH * 4
"""Bytes of a block's input in fp32."""


class Block(nn.Module):
    """A block that saves more than its input."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Stack(nn.Module):
    """A layer, so that the first block's input is computed, and the blocks."""

    depth = 8

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.block(index) for index in range(self.depth))

    def block(self, index: int) -> nn.Module:
        return Block()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first(batch)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def stack(depth: int) -> Callable[[], nn.Module]:
    """Returns a model of `depth` blocks."""
    return lambda: type(f"Stack{depth}", (Stack,), {"depth": depth})()


def batch(step: int, micro: int = 0, shape: tuple[int, ...] = (ROWS, WIDTH)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + micro))


def square_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(step, micro)).float().square().mean()
    return loss


JOB = Job(Stack, square_loss, steps=3, lr=1e-3)


def small_inputs_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of tiny models are moved too."""
    testing.replace(monkeypatch, "size.least_kept_input", 1)


def kept(engine: offload.Engine) -> KeptInputs:
    """Returns the keeper of an engine's inputs."""
    inputs = testing.inspect(engine).inputs
    assert inputs is not None
    return inputs


def used(engine: offload.Engine) -> dict[str, int]:
    """Returns the bytes of inputs in each tier, now."""
    return {tier: each["used"] for tier, each in engine.memory_report()["activations"].items()}


def peak(engine: offload.Engine) -> dict[str, int]:
    """Returns the most bytes of inputs in each tier at a time."""
    return {tier: each["peak"] for tier, each in engine.memory_report()["activations"].items()}


def gives_back(engine: offload.Engine) -> None:
    """Asserts that all memory of inputs is free, apart from that of graphs that are alive."""
    gc.collect()
    inputs = kept(engine)
    with inputs._lock:
        inputs._let_go_of_leaving()
        inputs._recover()
        for memory in list(inputs._staging._ending):
            inputs._staging.give_back(memory)
            inputs._staging._ending.remove(memory)
    assert not any(tier["used"] for tier in inputs.bytes_by_tier().values()), "a graph is alive"
    for slabs in inputs._staging._blocks._slabs.values():
        assert all(len(slab.free) == slab.count for slab in slabs), "a block is lost"
    slots = inputs._staging._slots
    if slots is not None:
        assert sum(map(len, slots._free.values())) == sum(count for _, count in slots._files.values()), "a slot is lost"


@contextlib.contextmanager
def running(job: Job, folder: Path, placement: tuple[str, str] = MEMORY, **options: Any) -> Iterator[offload.Engine]:
    """Yields an engine that ends with the context."""
    engine = start(job, placement, folder, **options)
    try:
        yield engine
    finally:
        engine.destroy(remove=True)
