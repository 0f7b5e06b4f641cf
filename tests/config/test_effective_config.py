"""The effective config is logged once, at the start: a line of derived values, and the complete config."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.config import effective, load_config, resolve_batch

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}


def line_of(content: dict[str, Any], world_size: int = 1) -> str:
    config = load_config(content)
    return effective(config, resolve_batch(config, world_size), world_size)


@pytest.mark.parametrize(
    ("content", "ranks", "message"),
    [
        (
            {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.5},
            2,
            "config: 32 samples a step = 4 in a micro-batch * 4 micro-batches * 2 ranks",
        ),
        (
            {},
            1,
            "config: 1 sample a step = 1 in a micro-batch * 1 micro-batch * 1 rank; "
            "gradient_clipping 1 by default, which was 0 in older DeepSpeed",
        ),
    ],
)
def test_sizes_and_the_clip(content: dict[str, Any], ranks: int, message: str) -> None:
    assert line_of(content, ranks) == message


AUTO: dict[str, tuple[dict[str, Any], str]] = {
    "a size": ({"train_batch_size": "auto", "gradient_accumulation_steps": 3}, "train_batch_size 3"),
    "a mode, which is off then": ({"bf16": {"enabled": "auto"}}, "bf16.enabled false"),
    "a mode, by its older name": ({"bfloat16": {"enabled": "auto"}}, "bfloat16.enabled false"),
    "a block, by its older name": ({"bfloat16": "auto"}, "bfloat16 (its defaults)"),
    "a block": ({"fp16": "auto"}, "fp16 (its defaults)"),
    "a clip": ({"gradient_clipping": "auto"}, "gradient_clipping 1.0"),
    "an optimizer": ({"optimizer": "auto"}, "optimizer (its default)"),
    "its numbers": (
        {"optimizer": {"type": "Lion", "params": {"lr": 1, "betas": "auto"}}},
        "optimizer.params.betas [0.9, 0.999]",
    ),
    "its rate": (
        {"optimizer": {"type": "Lion", "params": {"lr": "auto"}}},
        "optimizer.params.lr (that of optimizer=)",
    ),
    "a schedule's": (
        {
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"},
            }
        },
        "scheduler.params.warmup_num_steps 1000",  # of "auto" as a rate each group knows its own
    ),
    "a schedule's numbers": ({"scheduler": {"type": "WarmupLR", "params": "auto"}}, "scheduler.params (its defaults)"),
    "what there is none of": ({"offload": {"log": "auto"}}, "offload.log (its default)"),
    "what is decided here, by its older name": (
        {"zero_optimization": {"prefetch_bucket_size": "auto"}},
        "zero_optimization.prefetch_bucket_size (its default)",
    ),
    "what is a value": ({"offload": {"resume": "auto"}}, ""),
    "what has no effect": ({"zero_optimization": {"reduce_bucket_size": "auto"}}, ""),
    "null": ({"fp16": None, "bf16": {"enabled": None}}, ""),
}


@pytest.mark.parametrize("case", AUTO)
def test_values_that_replace_auto_are_reported(case: str) -> None:
    content, message = AUTO[case]
    _, auto, became = line_of(content).partition('; "auto": ')
    assert became == message and bool(auto) == bool(message)


def test_a_clip_of_auto_is_not_told_twice() -> None:
    line, default = line_of({"gradient_clipping": "auto"}), line_of({})
    assert "by default" not in line and "gradient_clipping 1 by default" in default


def test_the_effective_config_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAMW, "offload": {"device": "cpu"}}
    with caplog.at_level(logging.DEBUG, logger="offload"):
        engine, *_ = offload.initialize(model=nn.Linear(4, 1), config=content)
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 4)).mean())
            engine.step()
    info = [each.getMessage() for each in caplog.records if each.getMessage().startswith("config: ")]
    complete = [each for each in caplog.records if each.getMessage().startswith("the complete config: ")]
    assert len(info) == 1 and info[0].startswith("config: 2 samples a step")
    assert [each.levelno for each in complete] == [logging.DEBUG]
    assert json.loads(complete[0].getMessage().partition(": ")[2]) == engine.config
    engine.destroy()
