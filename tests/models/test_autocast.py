"""`torch_autocast`: fp32 weights under torch's autocast train as a plain loop does, with the same bits everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import offload
from offload.config import load_config
from offload.errors import ConfigError
from tests.support import models, rounding_bounds
from tests.support.oracle import (
    DTYPES,
    Job,
    PlainEngine,
    Result,
    assert_same,
    assert_same_tensors,
    config,
    room_for,
    start,
    train_step,
    trained,
)
from tests.support.processes.device_process import plain_device

pytestmark = pytest.mark.numeric

MEMORY, DISK = ("none", "none"), ("nvme", "nvme")
ON = {"enabled": True, "dtype": "bfloat16"}


class Checkpointed(models.Mixture):
    """Its blocks are run again in the backward, where torch must cast again."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids) * self.scale
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=False)
        assert hidden.dtype == torch.float32 and block(hidden).dtype == torch.bfloat16
        return self.head(hidden)


JOBS = {
    "tied and frozen": models.MIXTURE,
    "gpt2 with dropout": models.SHALLOW_DROPOUT._replace(steps=3, accumulation=2),
    "checkpointing": models.MIXTURE._replace(model=Checkpointed, steps=3),
}


def train(job: Job, placement: tuple[str, str], folder: Path, **options: Any) -> Result:
    torch.manual_seed(job.seed)
    settings = config(job, placement, folder, **options) | {"torch_autocast": ON}
    engine = offload.initialize(model=job.model(), config=settings)[0]
    result = trained(engine, job)
    engine.destroy(remove=True)
    return result


class PlainAutocast(PlainEngine):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(plain_device().type, torch.bfloat16, cache_enabled=False):
            return super().__call__(*args, **kwargs)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", JOBS)
def test_as_a_plain_loop_and_the_same_bits_everywhere(name: str, tmp_path: Path) -> None:
    job = JOBS[name]
    memory = train(job, MEMORY, tmp_path)
    room = room_for(job, 2)
    assert_same(memory, train(job, DISK, tmp_path, device_memory=room), "memory and disk with little room")
    assert_same(memory, train(job, ("cpu", "nvme"), tmp_path), "memory and host")
    plain = PlainAutocast(job)
    for step, (loss, norm) in enumerate(zip(memory.losses, memory.norms, strict=True)):
        expected = train_step(plain, job, step)
        if not step:
            assert loss == expected, "before the first update every bit is torch's"
        rounding_bounds.same_losses([loss], [expected], job._replace(dtype="bf16"))
        rounding_bounds.same_norms([norm], [plain.get_global_grad_norm()], job._replace(dtype="bf16"))
    assert all(value.dtype != torch.bfloat16 for value in memory.weights.values())


class Told(models.Mixture):
    """Says whether torch would keep what it casts in here."""

    kept: bool | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.kept = torch.is_autocast_cache_enabled()
        return super().forward(ids)


@pytest.mark.sample(1)
@pytest.mark.parametrize("recomputed", [False, True])
def test_under_a_context_of_the_users_own(recomputed: bool, tmp_path: Path) -> None:
    """The same bits, and torch keeps no casts of weights on the device until the context ends."""
    job = JOBS["checkpointing" if recomputed else "tied and frozen"]
    expected = train(job, DISK, tmp_path / "config", device_memory=room_for(job, 2))
    engine = start(
        job._replace(model=job.model if recomputed else Told), DISK, tmp_path, device_memory=room_for(job, 2)
    )
    norms = []
    for step in range(job.steps):
        for micro in range(job.accumulation):
            with torch.autocast(engine.device.type, torch.bfloat16):
                loss = job.loss(engine, step, micro)
                assert torch.is_autocast_cache_enabled() and torch.is_autocast_enabled(engine.device.type)
            engine.backward(loss)
            engine.step()
        norms.append(engine.get_global_grad_norm())
    assert norms == expected.norms
    assert recomputed or engine.module.kept is False
    assert_same_tensors(engine.state_dict(), expected.weights)
    engine.destroy(remove=True)


def test_after_a_ctrl_c_in_a_forward_torch_keeps_casts_again(tmp_path: Path) -> None:
    engine = start(models.MIXTURE, DISK, tmp_path)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = next(engine.module.children()).register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine(torch.zeros(1, 2, dtype=torch.int64))
    hook.remove()
    engine(torch.zeros(1, 2, dtype=torch.int64))
    assert torch.is_autocast_cache_enabled()
    engine.destroy(remove=True)


def test_it_is_on_inside_of_the_engine_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    settings = config(models.MIXTURE, DISK, tmp_path) | {"torch_autocast": ON}
    engine = offload.initialize(model=models.Mixture(), config=settings)[0]
    ids = models.tokens(0, 0, (2, 4), 61).to(engine.device)
    assert engine(ids).dtype == torch.bfloat16 and engine.module(ids).dtype == torch.float32
    assert not torch.is_autocast_enabled(engine.device.type) and torch.is_autocast_cache_enabled()
    with pytest.raises(RuntimeError), torch.no_grad():
        engine(ids.float())
    assert not torch.is_autocast_enabled(engine.device.type)
    assert engine.config["torch_autocast"] == {"enabled": True, "dtype": "bf16"}
    engine.destroy(remove=True)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_16_bit_weights_and_autocast_are_one_or_the_other(name: str) -> None:
    with pytest.raises(ConfigError, match=f"torch_autocast and {name} are both enabled"):
        load_config({name: {"enabled": True}, "torch_autocast": ON})
    assert load_config({name: {"enabled": True}, "torch_autocast": {"enabled": False}}).dtype == name
    assert name in DTYPES


def test_what_needs_a_loss_scale_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"torch_autocast\.dtype is fp16"):
        load_config({"torch_autocast": {"enabled": True, "dtype": "float16"}})
    with pytest.raises(ConfigError, match=r"torch_autocast\.dtype should be 'bf16' or 'fp16'"):
        load_config({"torch_autocast": {"enabled": True, "dtype": "int8"}})
