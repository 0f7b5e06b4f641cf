"""An engine on a small device into whose free memory its arena has grown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

import offload
from offload import testing
from offload.sizes import GIB, MIB, PAGE
from tests.accelerators.small_device import Hungry, SmallDevice, use_small_device
from tests.support import models
from tests.support.oracle import Job, start, train_step

TOTAL = 300 * MIB
"""Of a device: 256 MiB of it are always left free."""
JOB = models.GPT2._replace(steps=16)
CALM = 8

Made = tuple[offload.Engine, SmallDevice, Hungry]


def small(
    patch: pytest.MonkeyPatch, folder: Path, job: Job = JOB, placement: tuple[str, str] = ("cpu", "cpu"), **options: Any
) -> Made:
    """Returns an engine on a small device, with a module that is hungry in the middle of the model."""
    device = SmallDevice(TOTAL)
    use_small_device(patch, device)
    engine = start(job, placement, folder, **options)
    module = next(child for name, child in engine.module.named_modules() if name.endswith("h.1") or name == "body")
    return engine, device, Hungry(device, module)


def grown(made: Made, job: Job = JOB) -> list[float]:
    """Trains the first step, after which the arena has grown, and returns its loss."""
    engine, device, _ = made
    before = engine.device_memory
    found = [train_step(engine, job, 0)]
    assert engine.device_memory > before and device.arena == engine.device_memory
    return found


def too_much(made: Made) -> int:
    """Returns bytes of activations that fit beside the arena of the start alone."""
    engine, device, _ = made
    return device.total - testing.inspect(engine).device_arena.blocks[0][1].numel()


sizes = st.integers(0, 80 * GIB // PAGE).map(lambda pages: pages * PAGE)
