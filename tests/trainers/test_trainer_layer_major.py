"""A Trainer whose micro-batches pass through a block together trains as one whose micro-batches pass one by one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers

from offload.hf import OffloadTrainer
from tests.support import models
from tests.support.trainer_runs import (
    CHECKPOINTING,
    DISK,
    FEW,
    MEMORY,
    Run,
    Texts,
    assert_close,
    assert_same,
    config,
    ended,
    offloaded,
    result,
    stock,
    unbroken,
)
from tests.support.trainer_runs import trainer as any_trainer

LAYERED, ONE_BY_ONE = "layer_major", "micro_batch_major"
BY_FOUR = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 1}
"""Ten rows are two steps of four micro-batches and one of two: one epoch."""


def trainer(folder: Path, schedule: str, model: Any = models.shallow, blocks: Any = None, **changed: Any) -> Any:
    """Returns a Trainer with a schedule; the data are `FEW` rows."""
    content = {**(blocks or {}), "offload": config(folder)["offload"] | {"schedule": schedule}}
    return any_trainer(folder, DISK, model, content, FEW, **{"num_train_epochs": 1} | BY_FOUR | changed)


def trained(folder: Path, schedule: str, **changed: Any) -> Run:
    with ended(trainer(folder / schedule, schedule, **changed)) as mine:
        mine.train()
        return result(mine)


class Unlearned(transformers.GPT2LMHeadModel):
    """A model that takes no `num_items_in_batch`: the Trainer divides its loss by the micro-batches of a step."""

    def forward(self, input_ids: Any = None, labels: Any = None) -> Any:  # type: ignore[override]
        return super().forward(input_ids=input_ids, labels=labels)


def unlearned() -> Any:
    return Unlearned(models.shallow().config)


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
    "logs of several steps": {"logging_steps": 3, "num_train_epochs": 2},
}


@pytest.mark.sample(1)
@pytest.mark.works("Trainers", "several micro-batches, layer by layer: the bits of one after the other", "right")
@pytest.mark.parametrize("changed", CASES.values(), ids=CASES)
def test_losses_logs_and_weights_have_the_same_bits(changed: dict[str, Any], tmp_path: Path) -> None:
    assert_same(trained(tmp_path, ONE_BY_ONE, **changed), trained(tmp_path, LAYERED, **changed))


class Calls(transformers.TrainerCallback):
    """The calls of the loop."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.calls.append("begin")

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self.calls.append("substep")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.calls.append("end")


# -- dropout ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.works(
    "Trainers", "dropout with accumulation and blocks computed again: the stock Trainer's losses", "right"
)
def test_dropout_is_the_stock_trainers_in_every_tier_unless_the_config_asks_for_turns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By itself the engine takes turns on disk alone, where it saves transfers: masks must not depend on that."""
    changed: dict[str, Any] = {CHECKPOINTING: True, "num_train_epochs": 1} | BY_FOUR
    expected = stock(tmp_path / "stock", models.shallow_dropout, **changed)
    memory, disk = (
        offloaded(tmp_path / tier, tier, models.shallow_dropout, rows=FEW, **changed) for tier in (MEMORY, DISK)
    )
    assert_close(disk, expected)
    assert_same(memory, disk)
    assert caplog.text.count("it draws random numbers, such as dropout's") == 1
    asked = trained(tmp_path, LAYERED, model=models.shallow_dropout, **changed)
    assert asked.logs[0]["loss"] != disk.logs[0]["loss"]


class Told(OffloadTrainer):
    """A Trainer that notes where its losses begin and end."""

    notes: ClassVar[list[str]] = []

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.notes.append("begin")
        loss = super().compute_loss(*args, **kwargs)
        self.notes.append("end")
        return loss


class ToldModel(transformers.GPT2LMHeadModel):
    """A model that notes where its forwards begin and end."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        Told.notes.append("begin")
        output = super().forward(*args, **kwargs)
        Told.notes.append("end")
        return output


def told_model() -> Any:
    return ToldModel(models.shallow().config)


def test_a_model_without_dropout_takes_turns_after_a_step_and_a_forward_that_were_watched(tmp_path: Path) -> None:
    """The Trainer watches the first for random numbers, the engine one forward for values between blocks."""
    Told.notes.clear()
    more: dict[str, Any] = {CHECKPOINTING: True, "remove_unused_columns": False}
    with ended(trainer(tmp_path, "auto", told_model, max_steps=3, **more)) as mine:
        mine.train()
    turns = [note for step in (3, 2) for note in (*["begin"] * step, *["end"] * step)]
    assert Told.notes == ["begin", "end"] * 5 + turns


@pytest.mark.slow
def test_a_loss_of_the_users_takes_turns_only_where_the_config_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may keep a value from before the model to after it, as this one does, in ways that no text shows."""
    for schedule, turns in (("auto", False), (LAYERED, True)):
        caplog.clear()
        Told.notes.clear()
        with ended(trainer(tmp_path / schedule, schedule, kind=Told, max_steps=3, **{CHECKPOINTING: True})) as mine:
            mine.train()
        assert (Told.notes == ["begin", "end"] * 10) is not turns
        assert ("Told.compute_loss is code of its own" in caplog.text) is not turns


# -- code of the user's -------------------------------------------------------------------------------


class Steps(OffloadTrainer):
    """A Trainer with a step of its own."""

    steps = 0

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.steps += 1
        changed = {**inputs, "labels": inputs["labels"].clone()}
        return super().training_step(model, changed, *args, **kwargs)


class Stores(OffloadTrainer):
    """A Trainer whose loss reads what it has stored before the model ran."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        self.present = inputs["labels"]
        outputs = model(**inputs)
        loss = outputs.loss + 1e-3 * self.present.float().mean() * outputs.logits.float().pow(2).mean()
        return (loss, outputs) if return_outputs else loss


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Steps, "Steps has a training_step of its own"), (Stores, "Stores.compute_loss stores self.present")],
)
def test_code_that_must_not_run_in_parts_runs_one_by_one_and_is_told_once(
    kind: Any, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = trained(tmp_path, ONE_BY_ONE, kind=kind)
    assert "one after the other: " + reason not in caplog.text
    with caplog.at_level(logging.WARNING, "offload"):
        assert_same(plain, trained(tmp_path, LAYERED, kind=kind))
    assert caplog.text.count("micro-batches pass through the model one after the other: " + reason) == 1


@pytest.mark.slow
def test_a_step_that_a_script_sets_on_the_trainer_runs_one_by_one(tmp_path: Path) -> None:
    plain = trained(tmp_path, ONE_BY_ONE, chunked_loss=False)
    with ended(trainer(tmp_path / LAYERED, LAYERED, chunked_loss=False)) as mine:
        usual, seen = mine.training_step, []
        mine.training_step = lambda model, inputs, *args: seen.append(1) or usual(model, inputs, *args)
        mine.train()
        assert len(seen) == 10
        assert_same(plain, result(mine))


@pytest.mark.slow
def test_a_step_beside_the_loops_runs_as_ever(tmp_path: Path) -> None:
    """A callback may run a batch of its own, whose gradients count in the step."""

    class Beside(transformers.TrainerCallback):
        def on_substep_end(self, *_: Any, **__: Any) -> None:
            batch = {name: value[None] for name, value in Texts()[21].items()}
            mine.training_step(mine.model, batch, torch.tensor(11))

    with ended(trainer(tmp_path, LAYERED, max_grad_norm=0.0)) as mine:
        mine.add_callback(Beside())
        mine.train()
        logs = result(mine).logs
    assert len(logs) == 3 and logs[0]["loss"] == pytest.approx(unbroken().logs[0]["loss"], abs=1e-3)
    assert logs[0]["grad_norm"] > 4


@pytest.mark.slow
def test_callbacks_see_each_micro_batch_and_a_step_that_failed_is_dropped(tmp_path: Path) -> None:
    with ended(trainer(tmp_path / "whole", LAYERED)) as mine:
        callback = Calls()
        mine.add_callback(callback)
        mine.train()
        expected = result(mine)
    assert callback.calls == [*["begin", *["substep"] * 3, "end"] * 2, "begin", "substep", "end"]
    with ended(trainer(tmp_path / "failed", LAYERED)) as mine:
        block = mine.model.transformer.h[1]

        def fail(*_: Any) -> None:
            raise RuntimeError("as the test wants it")

        handle = block.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="as the test wants it"):
            mine.train()
        handle.remove()
        mine.train()
        assert_same(expected, result(mine))
