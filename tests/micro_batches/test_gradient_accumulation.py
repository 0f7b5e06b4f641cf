"""The division of a step into micro-batches, and the caller of its boundary, change only the order of sums."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import offload
from offload.errors import UsageError
from tests.support import models, rounding_bounds
from tests.support.oracle import Job, assert_same_tensors, run, start, weights_of

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


@pytest.mark.sample(2)
@pytest.mark.parametrize("loop", [as_accelerate, as_ddp, no_sync_with_steps])
@pytest.mark.parametrize("placement", [MEMORY, DISK])
def test_the_caller_of_a_boundary_changes_no_bit(loop: Loop, placement: tuple[str, str], tmp_path: Path) -> None:
    found = []
    for how in (counted, loop):
        engine = start(JOB, placement, tmp_path)
        for step in range(3):
            how(engine, JOB, step)
        assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (3, 12, 12)
        found.append((engine.get_global_grad_norm(), weights_of(engine)))
        engine.destroy(remove=True)
    (norm, weights), (other_norm, others) = found
    assert norm == other_norm
    assert_same_tensors(weights, others)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.numeric
def test_any_split_of_a_batch_gives_the_same_step(dtype: str, tmp_path: Path) -> None:
    rows = [models.tokens(step, 0, (8, 16), 61) for step in range(3)]
    found = []
    for parts in (1, 2, 4, 8):
        job = JOB._replace(accumulation=parts, dtype=dtype, lr=1e-2)
        engine = start(job, DISK, tmp_path)
        for batch in rows:
            for ids in batch.chunk(parts):
                engine.backward(models.token_loss(engine(ids), ids))
                engine.step()
        assert engine.global_steps == 3
        found.append((engine.get_global_grad_norm(), weights_of(engine)))
        engine.destroy(remove=True)
    job = JOB._replace(dtype=dtype, lr=1e-2, steps=3)
    for norm, weights in found[1:]:
        rounding_bounds.same_norms([norm], [found[0][0]], job)
        rounding_bounds.same_weights(weights, found[0][1], job, reordered=True)


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


def test_the_optimizer_called_by_itself(tmp_path: Path) -> None:
    """It is the boundary too, with the same count; and a second call is refused instead of waiting for ever."""
    job = models.GPT2
    engine = start(job, DISK, tmp_path / "called")
    for step in range(job.steps):
        engine.backward(job.loss(engine, step, 0))
        engine.optimizer.step()
        with pytest.raises(UsageError, match="0 backwards"):
            engine.optimizer.step()
    weights = engine.module.state_dict()
    engine.destroy(remove=True)
    expected = run(job, DISK, tmp_path / "plain").weights
    assert_same_tensors(weights, expected)
