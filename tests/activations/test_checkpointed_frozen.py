"""A model's own checkpoints, beside weights that are frozen, need no more of the device than without them.

transformers checkpoints the `forward` of a layer, outside of the layer's hooks. What the backward computes again then
takes each weight by itself.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import transformers
from torch import nn

from tests.support import models
from tests.support.modules.mixtures import few_tokens, qwen
from tests.support.oracle import Job, assert_same, run

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


def mixture(reentrant: bool | None) -> nn.Module:
    return adapted(qwen(16), reentrant, target_modules=["q_proj", "v_proj"])


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


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_frozen_experts_are_taken_one_by_one_in_a_recomputation_too(tmp_path: Path) -> None:
    job = Job(partial(mixture, None), few_tokens, steps=3)
    plain = run(job, MEMORY, tmp_path / "plain")
    again = job._replace(model=partial(mixture, False))
    assert_same(plain, run(again, DISK, tmp_path / "again", device_memory="150KB"))
