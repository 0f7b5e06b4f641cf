"""Blocks that fill or read a cache of keys and values keep the bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import offload
from tests.support import models
from tests.support.modules.checkpointed import MEMORY, running, small_inputs_move
from tests.support.oracle import Job, assert_same, run

AREA = "Activation checkpointing"
TIERS = ("cpu", "nvme")


@pytest.fixture(autouse=True)
def _tiny_inputs_move(monkeypatch: pytest.MonkeyPatch) -> None:
    small_inputs_move(monkeypatch)


def cached_llama() -> nn.Module:
    model = models.llama()
    model.config.use_cache = True
    return model


def cached_t5() -> nn.Module:
    model = models.t5()
    model.config.use_cache = True
    return model


CACHED = {
    "`use_cache=True`: Llama": Job(cached_llama, models.language_loss, steps=3),
    "`use_cache=True`: T5": Job(cached_t5, models.translation_loss, steps=3),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("tier", ["device", *TIERS])
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.works(AREA, name, "right")) for name in CACHED])
def test_a_model_with_a_cache_keeps_its_bits(name: str, tier: str, tmp_path: Path) -> None:
    job = CACHED[name]
    plain = run(job, MEMORY, tmp_path / "plain")
    assert_same(plain, run(job, MEMORY, tmp_path / tier, activations=tier))


def _with_prefix(engine: offload.Engine) -> float:
    """A loss with keys and values of before, as of a learned prefix."""
    ids = models.tokens(0, 0)
    cache = transformers.DynamicCache()
    keys = torch.linspace(-1, 1, 2 * 2 * 4 * 16).view(2, 2, 4, 16).to(engine.device)
    for layer in range(2):
        cache.update(keys + layer, keys - layer, layer)
    loss = engine(input_ids=ids, labels=ids, past_key_values=cache).loss
    engine.backward(loss)
    engine.step()
    return float(loss.detach()) + engine.get_global_grad_norm()


def _continued(engine: offload.Engine) -> float:
    """An evaluation that goes on with the cache of another one, without `no_grad`."""
    engine.eval()
    ids = models.tokens(0, 0)
    first = engine(input_ids=ids[:, :16], use_cache=True)
    again = engine(input_ids=ids[:, 16:], past_key_values=first.past_key_values, use_cache=True)
    return float(again.logits.detach().double().sum())


@pytest.mark.works(AREA, "a cache of keys and values that is in use, as of a learned prefix", "right")
@pytest.mark.parametrize("play", [_with_prefix, _continued])
def test_a_cache_that_is_in_use_is_used(play: Any, tmp_path: Path) -> None:
    job = CACHED["`use_cache=True`: Llama"]
    with running(job, tmp_path / "plain") as engine:
        plain = play(engine)
    with running(job, tmp_path / "tier", activations="nvme") as engine:
        assert play(engine) == plain


@pytest.mark.parametrize("tier", TIERS)
def test_a_frozen_prefix_that_fills_a_cache_leaves_the_blocks_behind_it_checkpointed(tier: str, tmp_path: Path) -> None:
    def frozen_prefix() -> nn.Module:
        model = cached_llama()
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[:1].requires_grad_(False)
        return model

    job = Job(frozen_prefix, models.language_loss, steps=3)
    plain = run(job, MEMORY, tmp_path / "plain")
    with running(job, tmp_path / tier, activations=tier) as engine:
        again = [
            name
            for name, block in engine.module.model.layers.named_children()
            if _is_computed_again(engine, job, block)
        ]
        assert again == [name for name, _ in engine.module.model.layers.named_children()][1:]
    assert_same(plain, run(job, MEMORY, tmp_path / f"{tier}-bits", activations=tier))


def _is_computed_again(engine: offload.Engine, job: Job, block: nn.Module) -> bool:
    """Returns True if a step calls a block twice."""
    calls = []
    hook = block.register_forward_pre_hook(lambda *_: calls.append(None))
    engine.backward(job.loss(engine, 0, 0))
    engine.zero_grad()
    hook.remove()
    return len(calls) == 2
