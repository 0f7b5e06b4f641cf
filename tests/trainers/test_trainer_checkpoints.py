"""A Trainer's checkpoints by `OffloadTrainer`: resumed bit for bit, loaded by transformers, the best one, and few."""

from __future__ import annotations

import inspect
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import offload
from offload.errors import StoreError
from tests.support import models
from tests.support.oracle import assert_same_tensors
from tests.support.trainer_runs import (
    DISK,
    FEW,
    MEMORY,
    Run,
    Texts,
    arguments,
    assert_same,
    config,
    ended,
    offloaded,
    result,
    seeded,
    trainer,
    unbroken,
)

pytestmark = pytest.mark.filterwarnings("ignore:mtime may not be reliable:UserWarning")
"""What transformers 5.0 says of checkpoints that are quickly made."""

SAVED = {"save_strategy": "steps", "save_steps": 2}


class Break(transformers.TrainerCallback):
    """Ends a training after a step, as a kill would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == self.step


def broken_off(folder: Path, step: int, tier: str = DISK, model: Any = models.shallow_dropout, **changed: Any) -> None:
    """Train up to a step behind a checkpoint."""
    with ended(trainer(folder, tier, model, rows=FEW, **SAVED | changed)) as mine:
        mine.add_callback(Break(step))
        mine.train()


def resumed(
    folder: Path, checkpoint: Any = True, tier: str = DISK, model: Any = models.shallow_dropout, **changed: Any
) -> Run:
    """Go on from the last checkpoint, with a model that knows nothing of it."""
    with ended(trainer(folder, tier, model, rows=FEW, **SAVED | changed)) as mine:
        with torch.no_grad():
            for parameter in mine.model.parameters():
                parameter.zero_()
        mine.train(resume_from_checkpoint=checkpoint)
        return result(mine)


@pytest.mark.sample(1)
@pytest.mark.works("Trainers", "`resume_from_checkpoint` is the unbroken run, bit for bit", "right")
@pytest.mark.parametrize("changed", [{}, {"bf16": True}, {"fp16": True}, {"lr_scheduler_type": "cosine"}], ids=str)
def test_resumed_is_the_unbroken_run(changed: dict[str, Any], tmp_path: Path) -> None:
    """With dropout and a shuffle, from the middle of an epoch."""
    complete = offloaded(tmp_path / "whole", model=models.shallow_dropout, **changed)
    broken_off(tmp_path / "broken", 3, **changed)
    assert_same(complete, resumed(tmp_path / "broken", **changed))


@pytest.mark.slow
def test_resumed_where_a_sampler_draws_from_the_generator_of_all(tmp_path: Path) -> None:
    """The order of an epoch's rows is drawn again before the resumed batch, whose dropout comes of later numbers."""
    old = "group_by_length" in inspect.signature(transformers.TrainingArguments).parameters
    grouped = {"group_by_length": True} if old else {"train_sampling_strategy": "group_by_length"}
    complete = offloaded(tmp_path / "whole", model=models.shallow_dropout, **grouped)
    broken_off(tmp_path / "broken", 3, **grouped)
    assert_same(complete, resumed(tmp_path / "broken", **grouped))


def test_transformers_and_an_engine_of_ones_own_load_what_a_checkpoint_holds(tmp_path: Path) -> None:
    with ended(trainer(tmp_path, rows=FEW, save_total_limit=2, **SAVED)) as mine:
        mine.train()
        mine.save_model(str(tmp_path / "final"))
        weights = result(mine).weights
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint-4", "checkpoint-6"]
    checkpoint = tmp_path / "out" / "checkpoint-6"
    for folder in (checkpoint, tmp_path / "final"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert loaded.keys() == weights.keys()
        assert_same_tensors(loaded, weights)
    names = {path.name for path in checkpoint.iterdir()}
    own = {"latest", "global_step6", "training_args.bin", "trainer_state.json", "rng_state.pth", "scheduler.pt"}
    assert own <= names and "optimizer.pt" not in names
    content = config(tmp_path / "other", MEMORY) | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    engine, *_ = offload.initialize(model=seeded(), config=content)
    folder, _ = engine.load_checkpoint(checkpoint, load_module_only=True)
    assert folder is not None and Path(folder).name == "global_step6"
    assert_same_tensors(engine.state_dict(), weights)
    engine.destroy()


def test_a_model_that_is_not_of_transformers(tmp_path: Path) -> None:
    """Its weights are one file, with its own names."""

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = torch.nn.Embedding(128, 16), torch.nn.Linear(16, 128)

        def forward(self, input_ids: Any, labels: Any) -> dict[str, Any]:
            logits = self.head(self.embedding(input_ids))
            return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    complete = offloaded(tmp_path / "whole", model=Plain)
    broken_off(tmp_path, 3, model=Plain)
    assert_same(complete, resumed(tmp_path, model=Plain))
    saved = load_file(tmp_path / "out" / "checkpoint-6" / "model.safetensors")
    assert saved.keys() == complete.weights.keys()
    assert_same_tensors(saved, complete.weights)


@pytest.mark.slow
def test_save_only_model_leaves_weights_to_begin_with(tmp_path: Path) -> None:
    broken_off(tmp_path, 3, model=models.shallow, save_only_model=True)
    folder = tmp_path / "out" / "checkpoint-2"
    assert not (folder / "latest").exists() and (folder / "model.safetensors").exists()
    logs = resumed(tmp_path, model=models.shallow, save_only_model=True).logs
    assert len(logs) == 6 and logs[2]["loss"] < 4.6, "the weights are those of the checkpoint, not zero"


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    """The best is the one with the largest loss here: an early one. Its masters come back, not its bf16 weights."""
    best = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    with ended(
        trainer(tmp_path, rows=FEW, load_best_model_at_end=True, greater_is_better=True, bf16=True, **best)
    ) as mine:
        mine.train()
        evaluated = {log["step"]: log["eval_loss"] for log in mine.state.log_history if "eval_loss" in log}
        step = max(evaluated, key=evaluated.__getitem__)
        assert step != 6 and mine.evaluate()["eval_loss"] == evaluated[step]
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / f"checkpoint-{step}").state_dict()
        weights = result(mine).weights
        master = offload.safe_get_full_fp32_param(mine.model.transformer.wpe.weight)
    assert_same_tensors(weights, loaded)
    assert not torch.equal(master, loaded["transformer.wpe.weight"].float())


def test_a_checkpoint_of_the_stock_trainer_is_refused(tmp_path: Path) -> None:
    stock = transformers.Trainer(model=seeded(), args=arguments(tmp_path, **SAVED), train_dataset=Texts(FEW))
    stock.add_callback(Break(2))
    stock.train()
    mine = trainer(tmp_path, rows=FEW, **SAVED)
    with pytest.raises(offload.StoreError, match=r"checkpoint-2 is a checkpoint of the stock Trainer"):
        mine.train(resume_from_checkpoint=True)
    assert mine.engine is None, "nothing was touched"


@pytest.mark.sample(1)
@pytest.mark.parametrize("left", [None, b'{"epoch": 0.5, "glo'], ids=["without a state", "with half a state"])
def test_what_a_kill_leaves_is_passed_over(
    left: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Swap files without a commit, and a save that was cut short: the Trainer writes its state last."""
    complete = unbroken(models.shallow_dropout)
    swap = tmp_path / "swap"
    with ended(trainer(tmp_path, model=models.shallow_dropout, rows=FEW, **SAVED)) as first:
        first.add_callback(Break(5))
        first.train()
        assert first.engine is not None and first.engine.resumable is None
        shutil.copytree(swap, tmp_path / "left")
    assert not any(swap.rglob("manifest.json")), "one that ends leaves nothing"
    shutil.rmtree(swap)
    (tmp_path / "left").rename(swap)
    assert any(swap.rglob("manifest.json"))
    cut = tmp_path / "out" / "checkpoint-4"
    (cut / "trainer_state.json").unlink() if left is None else (cut / "trainer_state.json").write_bytes(left)
    assert_same(complete, resumed(tmp_path))
    assert f"the save of {cut} was cut short: the training resumes from the checkpoint before, " in caplog.text
    assert (cut / "trainer_state.json").is_file()  # saved once more on the way


@pytest.mark.slow
def test_a_checkpoint_without_a_file_of_the_trainers_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A kill in the middle of a save, or a copy that was not one. The error names the complete one before."""
    broken_off(tmp_path, 5)
    checkpoint, cut = tmp_path / "out" / "checkpoint-2", tmp_path / "out" / "checkpoint-4"
    (cut / "trainer_state.json").unlink()
    with pytest.raises(StoreError, match=rf"{cut} contains no complete .*; resume from {checkpoint}, the one before"):
        resumed(tmp_path, cut)
    for name in ("trainer_state.json", "scheduler.pt", "rng_state.pth"):
        complete = (checkpoint / name).read_bytes()
        for left in (None, b"", complete[: len(complete) // 2], "a pipe"):
            (checkpoint / name).unlink(missing_ok=True)
            if left is not None:
                (checkpoint / name).write_bytes(left) if isinstance(left, bytes) else os.mkfifo(checkpoint / name)
            if left is None and name == "rng_state.pth":
                continue
            with pytest.raises(
                StoreError, match=rf"checkpoint-2 contains no complete {name}: .* no checkpoint before it is complete"
            ):
                resumed(tmp_path, checkpoint)
        (checkpoint / name).unlink(missing_ok=True)
        (checkpoint / name).write_bytes(complete)
    (checkpoint / "rng_state.pth").unlink()
    with caplog.at_level(logging.WARNING, "offload"):
        resumed(tmp_path, checkpoint)
    assert "contains no rng_state.pth: dropout continues with other random numbers" in caplog.text
