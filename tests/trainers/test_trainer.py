"""`OffloadTrainer` trains as the stock Trainer: losses, norms, rates and weights, in any placement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from offload.config import load_config
from offload.hf import OffloadTrainer
from offload.hf.trainer import OVERRIDDEN
from tests.support import models, rounding_bounds
from tests.support.trainer_runs import (
    CHECKPOINTING,
    DISK,
    FEW,
    MANY,
    MEMORY,
    Texts,
    arguments,
    as_job,
    assert_close,
    assert_same,
    config,
    ended,
    offloaded,
    result,
    stock,
    trainer,
    unbroken,
)

CASES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "without a clip": {"max_grad_norm": 0.0},
    "checkpointing of activations": {CHECKPOINTING: True},
    "cosine, one micro-batch": {"lr_scheduler_type": "cosine", "gradient_accumulation_steps": 1},
    "Adagrad": {"optim": "adagrad", "learning_rate": 1e-2},
    "SGD": {"optim": "sgd", "learning_rate": 1e-1},
    "RMSprop, without a kernel": {"optim": "rmsprop"},
    "Adafactor, without a kernel": {"optim": "adafactor", "model": models.llama},
}


@pytest.mark.sample(1)
@pytest.mark.works("Trainers", "transformers' `Trainer`: losses, norms, rates and weights of the stock one", "right")
@pytest.mark.parametrize("changed", CASES.values(), ids=CASES)
@pytest.mark.numeric
def test_equals_the_stock_trainer(changed: dict[str, Any], tmp_path: Path) -> None:
    """Adafactor scales a tensor's step by all of it, so a bias of keys, which is noise, would be in the others."""
    mine, theirs = offloaded(tmp_path / "mine", **changed), stock(tmp_path / "stock", **changed)
    assert_close(mine, theirs, changed.get("model", models.gpt2))


@pytest.mark.numeric
def test_decay_has_the_groups_of_the_trainer(tmp_path: Path) -> None:
    """A decay that large shows in every weight that has it."""
    changed = {"weight_decay": 100.0}
    mine = offloaded(tmp_path / "mine", **changed)
    assert_close(mine, stock(tmp_path / "stock", **changed))
    assert float((mine.weights["transformer.ln_f.weight"] - 1).abs().max()) < 0.02, "norms have no decay"
    assert float(mine.weights["transformer.wte.weight"].std()) < 0.018, "the embedding has"


@pytest.mark.sample(1)
@pytest.mark.parametrize("changed", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_on_disk_it_is_what_it_is_in_memory(changed: dict[str, Any], tmp_path: Path) -> None:
    """With dropout, so that the generators matter."""
    runs = [offloaded(tmp_path / tier, tier, models.gpt2_dropout, **changed) for tier in (DISK, MEMORY)]
    assert_same(*runs)


@pytest.mark.numeric
def test_bf16_keeps_fp32_masters_and_follows_fp32(tmp_path: Path) -> None:
    """Steps follow the fp32 ones, for rounding does not add up in the masters."""
    mine, plain = offloaded(tmp_path / "mine", rows=MANY, bf16=True), stock(tmp_path / "stock", rows=MANY)
    assert all(value.dtype == torch.bfloat16 for value in mine.weights.values())
    for one, other in zip(mine.logs, plain.logs, strict=True):
        rounding_bounds.same_losses([one["loss"]], [other["loss"]], as_job(plain.logs, models.gpt2, "bf16"))
        assert one["learning_rate"] == other["learning_rate"]


@pytest.mark.numeric
def test_torch_autocast_is_the_stock_trainers_bf16(tmp_path: Path) -> None:
    """fp32 weights, and matrix products in bf16: the same graph up to the order of sums of a clip."""
    blocks = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    mine, plain = offloaded(tmp_path / "mine", blocks=blocks, bf16=True), stock(tmp_path / "stock", bf16=True)
    job = as_job(plain.logs, models.gpt2, "bf16")
    for one, other in zip(mine.logs, plain.logs, strict=True):
        rounding_bounds.same_losses([one["loss"]], [other["loss"]], job)
        rounding_bounds.same_norms([one["grad_norm"]], [other["grad_norm"]], job)


def test_in_fp16_a_step_that_overflows_moves_no_schedule(tmp_path: Path) -> None:
    applied: list[bool] = []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            applied.append(mine.engine.was_step_applied())

    blocks = {"fp16": {"enabled": "auto", "initial_scale_power": 20, "hysteresis": 1}}
    rates = [log["learning_rate"] for log in unbroken().logs]
    with ended(trainer(tmp_path, blocks=blocks, rows=FEW, fp16=True)) as mine:
        mine.add_callback(Watch)
        mine.train()
        assert mine.state.global_step == 6 and 0 < mine.engine.skipped_steps == applied.count(False) < 5
        expected = [rates[sum(applied[:step])] for step in range(6)]
        assert [log["learning_rate"] for log in result(mine).logs] == expected


def test_a_second_train_goes_on_with_the_engine(tmp_path: Path) -> None:
    with ended(trainer(tmp_path, rows=FEW)) as mine:
        mine.train()
        first, engine = result(mine), mine.engine
        mine.train()
        assert mine.engine is engine and engine.global_steps == 12
        assert result(mine).logs[0]["loss"] < first.logs[0]["loss"] - 0.1, "it begins with what was trained"
        assert [log["learning_rate"] for log in result(mine).logs] == [log["learning_rate"] for log in first.logs]


def test_model_init_makes_a_new_engine_for_each_train(tmp_path: Path) -> None:
    mine = OffloadTrainer(
        model_init=lambda: models.gpt2(),
        args=arguments(tmp_path),
        train_dataset=Texts(FEW),
        offload_config=config(tmp_path),
    )
    with ended(mine):
        mine.train()
        first = result(mine)
        mine.train()
        assert_same(first, result(mine))


# -- the config's own optimizer and schedule ----------------------------------------------------------


def test_auto_is_what_the_arguments_say(tmp_path: Path) -> None:
    """Every key to which transformers' own integration gives a value, at once; all parameters have the decay."""
    auto = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
        },
    }
    changed = {"adam_beta1": 0.8, "adam_beta2": 0.99, "adam_epsilon": 1e-6}
    with ended(trainer(tmp_path, blocks=auto, rows=FEW, **changed)) as mine:
        mine.train()
        settled = mine.engine.config
        group = mine.engine.optimizer.param_groups[0]
        rates = [log["learning_rate"] for log in result(mine).logs]
    keys = ("train_batch_size", "gradient_accumulation_steps", "gradient_clipping")
    assert [settled[key] for key in keys] == [4, 2, 0.5]
    assert not settled["bf16"]["enabled"] and settled["offload"]["device"] == "cpu"
    assert (tuple(group["betas"]), group["eps"], group["weight_decay"]) == ((0.8, 0.99), 1e-6, 0.1)
    expected = [0, 0, 10, 10, 7.5, 5]  # DeepSpeed's begins and falls one behind
    assert rates == pytest.approx([rate * 1e-4 for rate in expected])


def test_the_configs_optimizer_may_be_one_that_the_arguments_do_not_know(tmp_path: Path) -> None:
    blocks = {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}
    with ended(trainer(tmp_path, blocks=blocks, rows=FEW)) as mine:
        mine.train()
        assert mine.engine.get_type() == ["Lion"]
        assert result(mine).logs[-1]["loss"] < result(mine).logs[0]["loss"] - 0.1


# -- what it leans on ---------------------------------------------------------------------------------


def test_what_it_overrides_is_there() -> None:
    assert [name for name in OVERRIDDEN if not callable(getattr(transformers.Trainer, name, None))] == []


def test_the_file_of_a_config_is_left_alone(tmp_path: Path) -> None:
    content = config(tmp_path)
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(content))
    with ended(trainer(tmp_path, rows=FEW)) as mine:
        mine.train()
    assert json.loads(path.read_text()) == content and load_config(path).gradient_clipping == 1.0
