"""A Trainer whose micro-batches pass through a block together trains as one whose micro-batches pass one by one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from offload.hf import OffloadTrainer
from tests.support import models
from tests.support.trainer_runs import (
    CHECKPOINTING,
    DISK,
    FEW,
    Run,
    Texts,
    arguments,
    assert_same,
    config,
    ended,
    result,
    seeded,
)

LAYERED, ONE_BY_ONE = "layer_major", "micro_batch_major"
BY_FOUR = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1}
"""Ten rows are two steps of four micro-batches and one of two."""


def trainer(
    folder: Path, schedule: str, model: Any = models.gpt2, kind: Any = OffloadTrainer, blocks: Any = None, **changed: Any
) -> Any:
    """Returns a Trainer with a schedule; the data are `FEW` rows."""
    content = config(folder, DISK, **blocks or {})
    content["offload"]["schedule"] = schedule
    return kind(
        model=seeded(model),
        args=arguments(folder, **BY_FOUR | changed),
        train_dataset=Texts(FEW),
        eval_dataset=Texts(5),
        offload_config=content,
    )


def trained(folder: Path, schedule: str, **changed: Any) -> Run:
    with ended(trainer(folder / schedule, schedule, **changed)) as mine:
        mine.train()
        return result(mine)


class Unlearned(transformers.GPT2LMHeadModel):
    """A model that takes no `num_items_in_batch`: the Trainer divides its loss by the micro-batches of a step."""

    def forward(self, input_ids: Any = None, labels: Any = None) -> Any:  # type: ignore[override]
        return super().forward(input_ids=input_ids, labels=labels)


def unlearned() -> Any:
    return Unlearned(models.gpt2().config)


class Summed(OffloadTrainer):
    """A Trainer whose loss is its own."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss + outputs.logits.float().pow(2).mean()
        return (loss, outputs) if return_outputs else loss


CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16 with a skip": {"fp16": True, "blocks": {"fp16": {"enabled": True, "initial_scale_power": 17}}},
    "autocast": {"bf16": True, "blocks": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}},
    "two micro-batches of two": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    "one micro-batch": {"gradient_accumulation_steps": 1},
    "checkpointing of activations": {CHECKPOINTING: True},
    "without a clip": {"max_grad_norm": 0.0},
    "max_steps in the middle of an epoch": {"max_steps": 4},
    "evaluation between steps": {"eval_strategy": "steps", "eval_steps": 1},
    "a loss divided by the micro-batches": {"model": unlearned},
    "a loss of the user's": {"kind": Summed},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "llama": {"model": models.llama},
    "logs of several steps": {"logging_steps": 3},
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("changed", CASES.values(), ids=CASES)
def test_losses_logs_and_weights_have_the_same_bits(changed: dict[str, Any], tmp_path: Path) -> None:
    assert_same(trained(tmp_path, ONE_BY_ONE, **changed), trained(tmp_path, LAYERED, **changed))
