"""Adapters train beside experts that are frozen, plain or in blocks of few bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from tests.experts.stacked_experts import DISK, MEMORY, SIXTEEN, adapted, moved, of_experts
from tests.support.modules import mixtures
from tests.support.modules.mixtures import few_tokens, visits
from tests.support.oracle import Job, assert_same, assert_same_tensors, run, same_bits, start, train_step


@pytest.mark.works("Training", "LoRA beside stacked experts that are frozen: only visited ones are read", "right")
def test_adapters_train_beside_frozen_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = SIXTEEN._replace(model=adapted)
    assert_same(run(job, DISK, tmp_path / "disk", device_memory="150KB"), run(job, MEMORY, tmp_path / "memory"))
    engine = start(job, DISK, tmp_path / "read", device_memory="150KB")
    calls = moved(engine, monkeypatch)
    with visits(engine.module) as seen:
        train_step(engine, job, 0)
    assert of_experts(calls["read"]) == seen and not of_experts(calls["write"])
    engine.destroy(remove=True)


def large() -> nn.Module:
    """Returns a model whose experts are large enough to be stored as blocks of codes, and an adapter."""
    import peft
    import transformers

    widths = mixtures.DECODER | {"hidden_size": 64, "intermediate_size": 64}
    config = transformers.MixtralConfig(**widths, num_local_experts=8)
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    return peft.get_peft_model(transformers.MixtralForCausalLM(config), adapters)


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["int8", "nf4"])
def test_frozen_experts_in_blocks_are_those_of_whole_stacks(form: str, tmp_path: Path) -> None:
    job = Job(large, few_tokens, steps=3, clip=0.0)
    whole = run(job, MEMORY, tmp_path / "whole", experts="whole", frozen=form)
    each = same_bits(job, tmp_path, (MEMORY, DISK), frozen=form)
    assert each.losses == whole.losses
    assert_same_tensors(each.weights, whole.weights)
