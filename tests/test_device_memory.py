"""What the device's memory is taken for, and what is said where it ends."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.engine.loader import to_device
from offload.errors import BudgetError
from offload.sizes import GIB
from offload.swapper.device import CudaDevice
from tests import models
from tests.oracle import start, train_step

JOB = models.GPT2


def full(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def in_forward(engine: Any) -> None:
    hook = engine.module.transformer.h[1].register_forward_pre_hook(full)
    try:
        JOB.loss(engine, 0, 0)
    finally:
        hook.remove()


def in_backward(engine: Any) -> None:
    hook = engine.module.transformer.h[1].ln_1.weight.register_hook(full)
    try:
        engine.backward(JOB.loss(engine, 0, 0))
    finally:
        hook.remove()


@pytest.mark.parametrize("act", [in_forward, in_backward])
def test_where_it_ends_the_error_says_what_to_change(act: Callable[[Any], None], tmp_path: Path) -> None:
    engine = start(JOB, ("nvme", "nvme"), tmp_path)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\. Tried") as caught:
        act(engine)
    assert len(caught.value.args) == 1, "accelerate looks for its words in the only argument"
    for words in ("smaller micro-batches", "gradient_checkpointing_enable", '"device_memory" in the "offload" block'):
        assert words in str(caught.value)
    least = int(re.findall(r"least that works is [^(]*\((\d+) bytes\)", str(caught.value))[0])
    assert 0 < least < engine.device_memory
    train_step(engine, JOB, 0)
    engine.destroy(remove=True)
    engine = start(JOB, ("nvme", "nvme"), tmp_path, device_memory=least)
    with pytest.raises(torch.OutOfMemoryError, match="smaller micro-batches") as caught:
        act(engine)
    assert "device_memory" not in str(caught.value), "it is the least already"
    train_step(engine, JOB, 0)
    engine.destroy(remove=True)
    with pytest.raises(BudgetError, match="device_memory"):
        start(JOB, ("nvme", "nvme"), tmp_path, device_memory=least - 4096)


@pytest.mark.parametrize(
    ("free", "reserved", "allocated", "fraction", "expected"),
    [
        (20, 0, 0, 1.0, 20),
        (10, 12, 2, 1.0, 20),  # torch keeps 10 that nobody uses
        (70, 10, 10, 0.3, 14),  # the user has limited the process to 24 of 80
        (70, 30, 30, 0.3, 0),
    ],
)
def test_what_is_free_is_what_this_process_may_allocate(
    free: int, reserved: int, allocated: int, fraction: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {
        "mem_get_info": (free * GIB, 80 * GIB),
        "memory_reserved": reserved * GIB,
        "memory_allocated": allocated * GIB,
        "get_per_process_memory_fraction": fraction,
        "Stream": None,
    }
    for name, value in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    assert CudaDevice(torch.device("cuda", 0)).free_bytes() == pytest.approx(expected * GIB, abs=1)


def test_a_batch_goes_to_a_gpu_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """From other memory the copy, and the thread with it, would wait for all compute before."""
    calls: list[str] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: calls.append("pin") or self)

    def to(self: torch.Tensor, device: torch.device, dtype: Any, non_blocking: bool) -> torch.Tensor:
        calls.append(f"to {device.type}, {non_blocking}")
        return self

    monkeypatch.setattr(torch.Tensor, "to", to)
    to_device({"ids": torch.zeros(2, 3), "name": "x"}, torch.device("cuda"))
    to_device(torch.zeros(2, 3), torch.device("cpu"))
    assert calls == ["pin", "to cuda, True", "to cpu, True"]
