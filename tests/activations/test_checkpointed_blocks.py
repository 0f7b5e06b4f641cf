"""Blocks that a model recomputes by itself: frozen ones, and what is fetched ahead of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

from offload import testing
from offload.swapper.pager import Pager
from offload.swapper.table import Residency
from tests.support import models
from tests.support.oracle import Job, assert_same, room_for, run, start, train_step

DISK, MEMORY = ("nvme", "nvme"), ("none", "none")


def adapted(model: Any, reentrant: bool | None, **adapters: Any) -> nn.Module:
    """Returns a model with adapters, which checkpoints its layers unless `reentrant` is None."""
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
    wanted: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **adapters}
    return peft.get_peft_model(model, peft.LoraConfig(**wanted))


def llama(reentrant: bool | None, **adapters: Any) -> nn.Module:
    widths = models.DECODER | {"num_hidden_layers": 5}
    return adapted(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**widths, use_cache=False)), reentrant, **adapters
    )


@pytest.mark.sample(1)
@pytest.mark.works("Training", "LoRA beside `gradient_checkpointing_enable()`, with the default budgets", "right")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("reentrant", "adapters", "options"),
    [(False, {}, {}), (True, {}, {"frozen": "int8"}), (False, {"use_dora": True}, {"moments": "int8"})],
)
def test_adapters_train_within_the_default_budgets(
    reentrant: bool, adapters: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    job = Job(partial(llama, None, **adapters), models.language_loss, steps=3)
    plain = run(job, MEMORY, tmp_path / "plain", **options)
    again = job._replace(model=partial(llama, reentrant, **adapters))
    assert_same(plain, run(again, DISK, tmp_path / "again", **options))


LAYERS = 8


def model() -> nn.Module:
    """Returns a language model whose embedding, which is its head too, is as large as three blocks and a half."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS, "vocab_size": 2200}
    sizes = models.DECODER | sizes | {"max_position_embeddings": 64}
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, use_cache=False, tie_word_embeddings=True))
    made.activation_checkpointing_enable()
    return made.train()


JOB = Job(model, models.language_loss, dtype="bf16")


def in_backward(engine: Any, begin: Callable[[], None]) -> None:
    """Calls `begin` at the start of the next backward."""
    real = engine.backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        begin()
        return real(*args, **kwargs)

    engine.backward = backward


def test_blocks_are_on_the_device_at_each_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has room for three, whose pins would leave none, were they held until the end of the backward."""
    # All weights are in host buffers after a step, so no read is late.
    engine = start(JOB, ("nvme", "cpu"), tmp_path, device_memory=room_for(JOB, 1), host_memory="64MiB")
    for step in range(2):
        train_step(engine, JOB, step)
    residencies: list[tuple[str, Residency]] = []

    def watched(acquire: Any, pager: Pager, unit: int, *ahead: bool, **safe: bool) -> torch.Tensor:
        residencies.append((pager.sizes[unit].name, pager.table.entries[unit].residency))
        return acquire(pager, unit, *ahead, **safe)

    testing.intercept(monkeypatch, "pager.acquire", watched)
    in_backward(engine, residencies.clear)
    train_step(engine, JOB, 2)
    blocks = [residency for name, residency in residencies if "layers" in name]
    assert len(blocks) >= LAYERS
    assert set(blocks[2:]) == {Residency.DEVICE}, "the head needs all of the device until the last block is used"
    engine.destroy(remove=True)
