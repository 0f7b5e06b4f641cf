"""Steps of several micro-batches add their gradients up as one batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import offload
from offload.errors import ConfigError, UsageError
from tests.support import models, rounding_bounds
from tests.support.oracle import Job, PlainEngine, assert_same_tensors, config, run, start, train_step, weights_of
from tests.support.ranks.rank_pool import RankPool
from tests.support.ranks.rank_pool import start as start_ranks

MEMORY, DISK = ("none", "none"), ("nvme", "nvme")
JOB = models.MIXTURE._replace(accumulation=4)
TWO = models.MIXTURE._replace(accumulation=2, steps=4)
Loop = Callable[[offload.Engine, Job, int], None]


def counted(engine: offload.Engine, job: Job, step: int) -> None:
    for micro in range(4):
        engine.backward(job.loss(engine, step, micro))
        engine.step()


def as_accelerate(engine: offload.Engine, job: Job, step: int) -> None:
    """It says before each backward whether the step ends, and calls `step` there alone."""
    for micro in range(4):
        engine.set_gradient_accumulation_boundary(is_boundary=micro == 3)
        assert engine.is_gradient_accumulation_boundary() == (micro == 3)
        engine.backward(job.loss(engine, step, micro))
        if micro == 3:
            engine.step()


def as_ddp(engine: offload.Engine, job: Job, step: int) -> None:
    with engine.no_sync():
        for micro in range(3):
            engine.backward(job.loss(engine, step, micro))
    engine.backward(job.loss(engine, step, 3))
    engine.step()


def no_sync_with_steps(engine: offload.Engine, job: Job, step: int) -> None:
    with engine.no_sync():
        for micro in range(3):
            engine.backward(job.loss(engine, step, micro))
            engine.step()
    engine.backward(job.loss(engine, step, 3))
    engine.step()


@pytest.mark.sample(1)
@pytest.mark.parametrize("loop", [as_accelerate, as_ddp, no_sync_with_steps])
@pytest.mark.parametrize("placement", [MEMORY, DISK])
def test_the_caller_of_a_boundary_changes_no_bit(loop: Loop, placement: tuple[str, str], tmp_path: Path) -> None:
    results = []
    for how in (counted, loop):
        engine = start(JOB, placement, tmp_path)
        for step in range(3):
            how(engine, JOB, step)
        assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (3, 12, 12)
        results.append((engine.get_global_grad_norm(), weights_of(engine)))
        engine.destroy(remove=True)
    (norm, weights), (other_norm, other_weights) = results
    assert norm == other_norm
    assert_same_tensors(weights, other_weights)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.numeric
def test_any_split_of_a_batch_gives_the_same_step(dtype: str, tmp_path: Path) -> None:
    rows = [models.tokens(step, 0, (8, 16), 61) for step in range(3)]
    results = []
    for parts in (1, 2, 4, 8):
        job = JOB._replace(accumulation=parts, dtype=dtype, lr=1e-2)
        engine = start(job, DISK, tmp_path)
        for batch in rows:
            for ids in batch.chunk(parts):
                engine.backward(models.token_loss(engine(ids), ids))
                engine.step()
        assert engine.global_steps == 3
        results.append((engine.get_global_grad_norm(), weights_of(engine)))
        engine.destroy(remove=True)
    job = JOB._replace(dtype=dtype, lr=1e-2, steps=3)
    for norm, weights in results[1:]:
        rounding_bounds.same_norms([norm], [results[0][0]], job)
        rounding_bounds.same_weights(weights, results[0][1], job, reordered=True)


def test_the_word_of_the_user_holds_until_the_next(tmp_path: Path) -> None:
    engine = start(JOB, DISK, tmp_path)
    engine.set_gradient_accumulation_boundary(False)
    for micro in range(6):
        engine.backward(JOB.loss(engine, 0, micro))
        engine.step()
    assert engine.global_steps == 0 and engine.micro_batches == 6
    with pytest.raises(UsageError, match=r"needs a boundary: set_gradient_accumulation_boundary\(False\)"):
        engine.optimizer.step()
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    assert (engine.global_steps, engine.micro_steps, engine.micro_batches) == (1, 7, 0)
    with pytest.raises(UsageError, match="no backward ran"):
        engine.step()
    engine.backward(JOB.loss(engine, 1, 0))
    engine.step()
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (2, 8, 7)
    engine.set_gradient_accumulation_boundary(None)
    counted(engine, JOB, 2)
    assert (engine.global_steps, engine.micro_steps) == (3, 12)
    with pytest.raises(UsageError, match="True, False or None"):
        engine.set_gradient_accumulation_boundary(1)  # type: ignore[arg-type]
    engine.destroy(remove=True)


def test_nothing_is_updated_inside_of_no_sync(tmp_path: Path) -> None:
    engine = start(JOB, DISK, tmp_path)
    with engine.no_sync(), engine.no_sync():
        for micro in range(4):
            engine.backward(JOB.loss(engine, 0, micro))
            engine.step()
        with pytest.raises(UsageError, match="no_sync"):
            engine.optimizer.step()
    assert engine.global_steps == 0 and engine.is_gradient_accumulation_boundary()
    engine.backward(JOB.loss(engine, 0, 4))
    with pytest.raises(UsageError, match=r"5 backwards .* gradient_accumulation_steps is 4"):
        engine.step()
    engine.zero_grad()
    with pytest.raises(ZeroDivisionError), engine.no_sync():
        raise ZeroDivisionError
    counted(engine, JOB, 1)
    assert engine.global_steps == 1
    engine.destroy(remove=True)


def test_train_batch_inside_of_no_sync_takes_no_data(tmp_path: Path) -> None:
    engine = start(JOB, MEMORY, tmp_path)
    data = iter([1, 2, 3])
    with engine.no_sync(), pytest.raises(UsageError, match=r"inside of no_sync\(\)"):
        engine.train_batch(data)
    assert list(data) == [1, 2, 3] and engine.micro_batches == 0
    engine.destroy()


def test_in_no_sync_each_backward_is_a_micro_batch_without_accumulation_too(tmp_path: Path) -> None:
    engine = start(JOB._replace(accumulation=1), MEMORY, tmp_path)
    for step in range(2):
        as_ddp(engine, JOB, step)
    assert (engine.global_steps, engine.micro_steps) == (2, 8)
    engine.backward(JOB.loss(engine, 2, 0))
    engine.step()
    assert (engine.global_steps, engine.micro_steps) == (3, 9)
    engine.destroy()


@pytest.mark.sample(1)
@pytest.mark.works("Graphs", "`loss.backward()` while micro-batches accumulate: added as it is, never divided", "right")
@pytest.mark.parametrize("mixed", [False, True])
def test_a_plain_backward_is_never_divided(mixed: bool, tmp_path: Path) -> None:
    expected = run(TWO, DISK, tmp_path / "divided")
    engine = start(TWO, DISK, tmp_path / "plain")
    for step in range(TWO.steps):
        for micro in range(2):
            loss = TWO.loss(engine, step, micro)
            if mixed and micro == 0:
                engine.backward(loss)
            else:
                (loss / 2).backward()
            engine.step()
        assert engine.get_global_grad_norm() == expected.norms[step]
    assert_same_tensors(engine.module.state_dict(), expected.weights)
    TWO.loss(engine, 9, 0).backward()
    engine.step()
    TWO.loss(engine, 9, 1).backward()
    TWO.loss(engine, 9, 1).backward()
    with pytest.raises(UsageError, match="2 backwards ran since the last step"):
        engine.step()
    engine.destroy(remove=True)


def clip_otherwise(folder: Path) -> str:
    engine = start_ranks(JOB, ("none", "none"), folder)
    engine.clip_grad_norm_(1.0 + engine.global_rank)
    try:
        counted(engine, JOB, 0)
    except UsageError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def test_different_clips_on_ranks_are_an_error(ranks: RankPool, tmp_path: Path) -> None:
    assert all("settings" in text for text in ranks.run(clip_otherwise, tmp_path))


BATCH_JOB = models.MIXTURE


class Scored(models.Mixture):
    """Returns its loss in a form that the test chooses."""

    form = "loss"

    def forward(self, ids: torch.Tensor) -> Any:
        logits = super().forward(ids)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())
        forms = {"loss": loss, "dict": {"loss": loss, "logits": logits}, "tuple": (loss, logits), "logits": logits}
        return forms[self.form]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield 0


def begin(folder: Path, form: str = "loss", **settings: Any) -> offload.Engine:
    torch.manual_seed(0)
    model = Scored()
    model.form = form
    return offload.initialize(model=model, config=config(BATCH_JOB, DISK, folder) | settings)[0]


def ids(count: int) -> list[torch.Tensor]:
    return [models.tokens(0, micro, (2, 8), 61) for micro in range(count)]


def batches(form: str, count: int) -> Iterator[Any]:
    wrap = {"loss": lambda b: b, "dict": lambda b: {"ids": b}, "tuple": lambda b: (b,)}[form]
    return iter([wrap(batch) for batch in ids(count)])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of three steps written out, and the weights."""
    engine = begin(tmp_path_factory.mktemp("written_out"))
    losses = []
    for batch in ids(6):
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = copy.deepcopy(engine.state_dict())
    engine.destroy(remove=True)
    return [(losses[i] + losses[i + 1]) / 2 for i in (0, 2, 4)], weights


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["loss", "dict", "tuple"])
@pytest.mark.numeric
def test_train_batch_is_the_loop(form: str, expected: Any, tmp_path: Path) -> None:
    engine, data = begin(tmp_path, form), batches(form, 6)
    losses = [engine.train_batch(data) for _ in range(3)]
    rounding_bounds.same_numbers([float(loss) for loss in losses], expected[0], rounding_bounds.sum_error(2))
    assert not losses[0].requires_grad
    assert_same_tensors(expected[1], engine.state_dict())
    engine.destroy(remove=True)


def test_a_step_in_which_the_data_end_goes_on_with_the_next(expected: Any, tmp_path: Path) -> None:
    engine, data = begin(tmp_path), ids(6)
    first = iter(data[:3])
    engine.train_batch(first)
    with pytest.raises(StopIteration):
        engine.train_batch(first)
    assert engine.global_steps == 1 and engine.micro_batches == 1
    rest = iter(data[3:])
    engine.train_batch(rest)
    engine.train_batch(rest)
    assert engine.global_steps == 3
    assert_same_tensors(expected[1], engine.state_dict())
    engine.destroy(remove=True)


def test_what_train_batch_cannot_know(tmp_path: Path) -> None:
    engine = begin(tmp_path, "logits")
    with pytest.raises(UsageError, match="expects an iterator of micro-batches, got list"):
        engine.train_batch(ids(2))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="expects a model that returns its loss"):
        engine.train_batch(iter(ids(2)))
    engine.destroy(remove=True)


def test_deepspeed_io_is_the_loader_of_training_data(tmp_path: Path) -> None:
    data = TensorDataset(torch.arange(10))
    torch.manual_seed(0)
    engine, _, loader, _ = offload.initialize(
        model=models.Mixture(), training_data=data, config=config(BATCH_JOB, MEMORY, tmp_path)
    )
    assert loader is not None
    assert [int(b[0]) for b in engine.deepspeed_io(data)] == [int(b[0]) for b in loader]
    by_four = list(engine.deepspeed_io(data, batch_size=4, collate_fn=lambda rows: torch.stack([r[0] for r in rows])))
    assert [len(batch) for batch in by_four] == [4, 4, 2]
    with pytest.raises(UsageError, match="batch_size of at least 1"):
        engine.deepspeed_io(data, batch_size=0)
    with pytest.raises(UsageError, match="expects a data set, got None"):
        engine.deepspeed_io(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="has no length"):
        engine.deepspeed_io(Endless())
    engine.destroy()


# -- the size of a step -------------------------------------------------------------------------------


@pytest.mark.numeric
def test_another_batch_size_counts_from_the_next_step_on(tmp_path: Path) -> None:
    wide = BATCH_JOB._replace(accumulation=3)
    engine, plain = start(BATCH_JOB, DISK, tmp_path), PlainEngine(BATCH_JOB)
    rounding_bounds.same_losses([train_step(engine, BATCH_JOB, 0)], [train_step(plain, BATCH_JOB, 0)], BATCH_JOB)
    engine.set_train_batch_size(3)
    plain._job = wide
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (3, 3)
    assert engine.config["gradient_accumulation_steps"] == 3
    for step in (1, 2):
        rounding_bounds.same_losses([train_step(engine, wide, step)], [train_step(plain, wide, step)], wide)
        rounding_bounds.same_norms([engine.get_global_grad_norm()], [plain.get_global_grad_norm()], wide)
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (3, 8, 8)
    engine.destroy(remove=True)


def test_a_batch_size_that_cannot_be(tmp_path: Path) -> None:
    engine = start(BATCH_JOB._replace(dtype="bf16", accumulation=1), MEMORY, tmp_path)
    for bad in (0, -1, 1.5, True, "2"):
        with pytest.raises(UsageError, match="must be a multiple"):
            engine.set_train_batch_size(bad)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="grad_accum_dtype"):
        engine.set_train_batch_size(2)
    engine.destroy()
    engine = start(BATCH_JOB, MEMORY, tmp_path)
    engine.backward(BATCH_JOB.loss(engine, 0, 0))
    with pytest.raises(UsageError, match="1 micro-batch of this step ran"):
        engine.set_train_batch_size(4)
    assert engine.train_batch_size() == 2
    engine.destroy()


# -- the clip -----------------------------------------------------------------------------------------


@pytest.mark.numeric
def test_a_clip_of_ones_own_is_for_one_step(tmp_path: Path) -> None:
    job = BATCH_JOB._replace(optimizer="SGD", weight_decay=0.0, lr=0.1, clip=1.0)
    engine, plain = start(job, DISK, tmp_path), PlainEngine(job)
    norms = []
    for step, clip in enumerate([0.05, None, 0.0]):
        plain._job = job if clip is None else job._replace(clip=clip)
        if clip is not None:
            engine.clip_grad_norm_(clip)
        train_step(engine, job, step)
        train_step(plain, job, step)
        norms.append(plain.get_global_grad_norm())
        rounding_bounds.same_norms([engine.get_global_grad_norm()], norms[-1:], job)
    rounding_bounds.same_weights(engine.state_dict(), plain.module.state_dict(), job._replace(steps=3, clip=0.0), norms)
    for bad in (-1, float("nan"), "1", True):
        with pytest.raises(UsageError, match="clip_grad_norm_ expects"):
            engine.clip_grad_norm_(bad)  # type: ignore[arg-type]
    engine.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_torchs_own_clip_is_refused_rather_than_nothing(clip: Any, tmp_path: Path) -> None:
    engine = start(BATCH_JOB, DISK, tmp_path)
    train_step(engine, BATCH_JOB, 0)
    for micro in range(2):
        engine.backward(BATCH_JOB.loss(engine, 1, micro))
    with pytest.raises(UsageError, match=r"engine\.clip_grad_norm_\(max_norm\)"):
        clip(engine.parameters(), 1.0)
    assert engine.module.head.weight.grad is None
    engine.zero_grad()
    train_step(engine, BATCH_JOB, 1)
    engine.destroy(remove=True)
