"""The same training by `OffloadTrainer` and by the stock `Trainer`: data, arguments, configs."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from offload.hf import OffloadTrainer
from tests.support import models, rounding_bounds
from tests.support.oracle import Job, assert_same_tensors

LOGGED = ("loss", "grad_norm", "learning_rate")
MEMORY, DISK = "none", "nvme"
_NEWER = "activation_checkpointing" in transformers.TrainingArguments.__dataclass_fields__
CHECKPOINTING = "activation_checkpointing" if _NEWER else "gradient_checkpointing"
"""The name of the argument, which has changed."""


MANY, FEW = 22, 10
"""Rows of two epochs of six steps and of three, the last of each with one micro-batch."""


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A data set of `count` rows of 12 ids; a row is always the same."""

    def __init__(self, count: int = MANY) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        if row >= self._count:
            raise IndexError(row)  # the end for who iterates
        ids = torch.randint(0, 128, (12,), generator=torch.Generator().manual_seed(row))
        return {"input_ids": ids, "labels": ids}


def arguments(folder: Path, kind: Any = transformers.TrainingArguments, **changed: Any) -> Any:
    """Returns the arguments of two epochs of `MANY` or `FEW` rows; clip, warm-up and decay act."""
    usual: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "warmup_steps": 2,
        "save_strategy": "no",
    }
    return kind(**usual | changed)


def config(folder: Path, tier: str = DISK, **blocks: Any) -> dict[str, Any]:
    """Returns a config that leaves the rest to the arguments. Poison is always on."""
    return {
        "zero_optimization": {"stage": 3, "offload_param": {"device": tier}, "offload_optimizer": {"device": tier}},
        "offload": {"nvme_path": str(folder / "swap"), "debug": {"poison": True}},
        **blocks,
    }


def seeded(model: Any = models.shallow) -> Any:
    """Returns a model that is the same each time."""
    torch.manual_seed(0)
    return model()


@contextlib.contextmanager
def ended(trainer: Any) -> Iterator[Any]:
    """Yields the trainer, whose engine ends with the block."""
    try:
        yield trainer
    finally:
        if trainer.engine is not None:
            trainer.engine.destroy(remove=True)


class Run(NamedTuple):
    logs: list[dict[str, float]]
    """What was logged of each step."""
    weights: dict[str, torch.Tensor]


def result(trainer: Any) -> Run:
    """Returns the losses, norms, rates and weights of a training."""
    logs = [{key: log[key] for key in LOGGED if key in log} for log in trainer.state.log_history if "loss" in log]
    return Run(logs, {name: value.clone() for name, value in trainer.model.state_dict().items()})


def stock(folder: Path, model: Any = models.shallow, rows: int = FEW, **changed: Any) -> Run:
    """Trains by transformers alone."""
    trainer = transformers.Trainer(model=seeded(model), args=arguments(folder, **changed), train_dataset=Texts(rows))
    trainer.train()
    return result(trainer)


def offloaded(
    folder: Path, tier: str = DISK, model: Any = models.shallow, blocks: Any = None, rows: int = FEW, **changed: Any
) -> Run:
    """Trains by `OffloadTrainer`."""
    with ended(trainer(folder, tier, model, blocks, rows, **changed)) as mine:
        mine.train()
        return result(mine)


@functools.cache
def unbroken(model: Any = models.shallow) -> Run:
    """Returns the result of `offloaded` with a model alone: trained once, for all tests that compare with it."""
    with tempfile.TemporaryDirectory() as folder:
        return offloaded(Path(folder), model=model)


def trainer(
    folder: Path,
    tier: str = DISK,
    model: Any = models.shallow,
    blocks: Any = None,
    rows: int = MANY,
    kind: Any = OffloadTrainer,
    chunked_loss: bool | None = None,
    **changed: Any,
) -> Any:
    return kind(
        model=seeded(model),
        args=arguments(folder, **changed),
        train_dataset=Texts(rows),
        eval_dataset=Texts(5),
        offload_config=config(folder, tier, **blocks or {}),
        chunked_loss=chunked_loss,
    )


def assert_same(left: Run, right: Run) -> None:
    """Asserts that two runs are equal, bit for bit."""
    assert left.logs == right.logs
    assert_same_tensors(left.weights, right.weights)


def as_job(logs: Sequence[dict[str, float]], model: Any, dtype: str = "fp32") -> Job:
    """Returns the job of a training, for its bounds: the largest rate in each step."""
    return Job(model, lambda *_: torch.zeros(()), len(logs), lr=max(log["learning_rate"] for log in logs), dtype=dtype)


def assert_close(mine: Run, theirs: Run, model: Any = models.shallow, reordered: bool = False) -> None:
    """Asserts that two runs are equal within `tests.support.rounding_bounds` for fp32."""
    job = as_job(theirs.logs, model)
    assert len(mine.logs) == len(theirs.logs)
    for left, right in zip(mine.logs, theirs.logs, strict=True):
        assert left.keys() == right.keys() and left["learning_rate"] == right["learning_rate"]
        for key in left.keys() - {"learning_rate"}:
            rounding_bounds.same_numbers([left[key]], [right[key]], rounding_bounds.norm_error(job))
    assert mine.weights.keys() == theirs.weights.keys()
    rounding_bounds.same_weights(mine.weights, theirs.weights, job, reordered=reordered)
