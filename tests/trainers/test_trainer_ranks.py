"""`OffloadTrainer` and Accelerate on two processes: what one process gives with the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from offload.hf import Accelerator
from tests.support import models, rounding_bounds
from tests.support.oracle import assert_same_tensors
from tests.support.ranks.rank_pool import RankPool, pool, rank_and_size
from tests.support.trainer_runs import (
    CHECKPOINTING,
    Run,
    Texts,
    assert_close,
    assert_same,
    config,
    ended,
    result,
    trainer,
)
from tests.trainers.test_trainer_checkpoints import Break

SAVED = {"save_strategy": "steps", "save_steps": 3}


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    with pool(2) as ranks:
        yield ranks


def train(folder: Path, until: int = 0, resume: bool = False, **changed: Any) -> Run:
    """On this rank; the batch of a step is the same on one process and on two."""
    rank, size = rank_and_size()
    transformers.logging.set_verbosity_error()
    changed |= {"ddp_backend": "gloo"} if size > 1 else {}
    with ended(trainer(folder, model=models.gpt2, per_device_train_batch_size=4 // size, **SAVED | changed)) as mine:
        mine.train_dataset = Texts(24)  # no rest: Accelerate would fill a rank's last batch up with rows of the first
        if until:
            mine.add_callback(Break(until))
        mine.train(resume_from_checkpoint=resume or None)
        assert mine.engine is not None and mine.engine.world_size == size and mine.engine.global_rank == rank
        return result(mine)


@pytest.mark.numeric
def test_two_ranks_give_what_one_gives(two: RankPool, tmp_path: Path) -> None:
    one = train(tmp_path / "one", save_strategy="no")
    mine, other = two.run(train, tmp_path / "two")
    assert_close(mine, one, reordered=True)
    assert_same(mine._replace(logs=[]), other._replace(logs=[]))
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "out" / "checkpoint-6").state_dict()
    assert_same_tensors(saved, mine.weights)


@pytest.mark.slow
def test_two_ranks_resume(two: RankPool, tmp_path: Path) -> None:
    single, _ = two.run(train, tmp_path / "whole")
    two.run(train, tmp_path / "broken", 4)
    resumed, _ = two.run(train, tmp_path / "broken", 0, True)
    assert_same(single, resumed)


def draw_on_one_rank(folder: Path) -> list[float]:
    """Dropout on rank 0 alone: by itself rank 1 would take turns from the third step on."""
    model = models.gpt2 if rank_and_size()[0] else models.gpt2_dropout
    changed = {CHECKPOINTING: True, "gradient_accumulation_steps": 2, "max_steps": 4, "ddp_backend": "gloo"}
    with ended(trainer(folder, model=model, per_device_train_batch_size=1, save_strategy="no", **changed)) as mine:
        mine.train()
        assert mine.engine is not None and mine.engine.schedule == "layer_major"
        return [log["loss"] for log in mine.state.log_history if "loss" in log]


def test_ranks_take_one_order_where_the_model_of_one_alone_draws_random_numbers(two: RankPool, tmp_path: Path) -> None:
    one, other = two.run(draw_on_one_rank, tmp_path)
    assert len(one) == 4 and one == other


def evaluate_and_save_best(folder: Path) -> tuple[list[float], float]:
    best = {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "load_best_model_at_end": True,
        "greater_is_better": True,
        "ddp_backend": "gloo",
    }
    with ended(trainer(folder, per_device_train_batch_size=2, **SAVED | best)) as mine:
        mine.train()
        losses = [log["eval_loss"] for log in mine.state.log_history if "eval_loss" in log]
        return losses, mine.evaluate()["eval_loss"]


def test_two_ranks_evaluate_and_load_the_best(two: RankPool, tmp_path: Path) -> None:
    for losses, loaded in two.run(evaluate_and_save_best, tmp_path):
        assert max(losses) > losses[-1] and loaded == max(losses)


def accelerated(folder: Path) -> list[float]:
    _, size = rank_and_size()
    torch.manual_seed(0)
    model = models.gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(Texts(24), batch_size=4 // size)
    accelerator = Accelerator(cpu=True, offload_config=config(folder))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    assert accelerator.engine is not None
    accelerator.engine.destroy(remove=True)
    return losses


@pytest.mark.numeric
def test_accelerate_on_two_ranks(two: RankPool, tmp_path: Path) -> None:
    one = accelerated(tmp_path / "one")
    mine, other = two.run(accelerated, tmp_path / "two")
    assert mine == other
    rounding_bounds.same_losses(mine, one, models.GPT2)
