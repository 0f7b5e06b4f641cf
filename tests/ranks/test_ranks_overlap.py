"""With `overlap_comm` a unit is reduced beside the backward of the next one, and no bit changes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import testing
from offload.distributed.process_group import ProcessGroup, Work
from offload.distributed.reduce_scatter import ReduceScatterAccumulator
from offload.errors import BudgetError, OffloadError, RankError
from offload.layout.flat_layout import layouts_of
from offload.layout.units import find_units
from offload.sizes import align_up
from tests.support.oracle import Job, Result, assert_same
from tests.support.ranks.rank_jobs import JOBS
from tests.support.ranks.rank_pool import RankPool, rank_and_size, start, train

FP32 = 4
DISK, MEMORY = ("nvme", "nvme"), ("none", "none")
JOB = JOBS["gpt2"]._replace(steps=2, lr=3e-4)


class Late:
    """An exchange that begins only when somebody needs its values."""

    def __init__(self, begin: Callable[[], Work]) -> None:
        self._begin = begin

    def order_compute(self) -> None:
        self._begin().order_compute()


def train_late(job: Job, placement: tuple[str, str], folder: Path) -> Result:
    """Until an exchange is waited for, nothing is received, and what changes of the memory to be sent is sent."""

    def late(
        exchange: Any, ranks: ProcessGroup, received: torch.Tensor, sent: torch.Tensor | None, senders: Any
    ) -> Any:
        received.view(torch.uint8).fill_(0xFF)  # NaN in any dtype, and the scale of a block of codes
        return Late(lambda: exchange(ranks, received, sent, senders))

    with pytest.MonkeyPatch.context() as patch:
        testing.intercept(patch, "ranks.exchange", late)
        return train(job, placement, folder)


@pytest.mark.parametrize(("stage", "accumulation"), [(3, 2), (1, 3)])
def test_an_exchange_beside_the_backward_changes_no_bit(
    stage: int, accumulation: int, ranks: RankPool, tmp_path: Path
) -> None:
    """In stage 3 each micro-batch is sent from a bucket, in stage 1 the sums of a step."""
    job = JOB._replace(stage=stage, accumulation=accumulation)
    at_once = ranks.run(train, job._replace(overlap=False), MEMORY, tmp_path / "at once")
    beside = ranks.run(train_late, job._replace(overlap=True), DISK, tmp_path / "beside")
    for one, other in zip(at_once, beside, strict=True):
        assert_same(one, other)


def events(folder: Path, overlap: bool) -> tuple[list[tuple[str, int]], int]:
    """Returns what happens to the gradients of a step, in its order, and the number of reductions."""
    seen: list[tuple[str, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_add", "serve_reduce", "_put_mean"):
            real = getattr(ReduceScatterAccumulator, name)

            def record(self: Any, unit: int, *rest: Any, name: str = name, real: Any = real) -> None:
                seen.append((name, unit))
                real(self, unit, *rest)

            patch.setattr(ReduceScatterAccumulator, name, record)
        engine = start(JOB._replace(overlap=overlap), MEMORY, folder)
        engine.backward(JOB.loss(engine, 0, 0))
        reductions = engine.communication().gradients.collectives
    engine.destroy(remove=True)
    return seen, reductions


@pytest.mark.parametrize("overlap", [False, True])
def test_a_unit_is_reduced_while_the_next_makes_its_gradients(overlap: bool, ranks: RankPool, tmp_path: Path) -> None:
    """All are added up when the backward returns, and each has one exchange."""
    units = len(find_units(JOB.model()).units)
    for seen, reductions in ranks.run(events, tmp_path, overlap):
        begun = [position for position, (name, _) in enumerate(seen) if name == "serve_reduce"]
        assert reductions == len(begun) == units
        for position in begun:
            unit = seen[position][1]
            between = seen[position + 1 : seen.index(("_put_mean", unit))]
            beside = [unit for name, unit in between if name == "_add"]
            assert bool(beside) == (overlap and position != begun[-1]) and unit not in beside


# -- failures -----------------------------------------------------------------------------------------


def fail_in_the_additions(folder: Path, starts_over: bool) -> tuple[str, list[float]]:
    """Rank 1 has no memory for a sum at the end of its first backward. Returns its error, and the norms."""
    engine = start(JOB, MEMORY, folder)
    gradients, error_message, norms = testing.inspect(engine).gradients, "", list[float]()
    assert isinstance(gradients, ReduceScatterAccumulator)

    def short(put: Any, *arguments: Any) -> None:
        put(*arguments)
        raise torch.OutOfMemoryError

    def fall_short(finish: Any, *arguments: Any) -> None:
        testing.intercept(patch, "ranks.reduce", short)
        finish(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        if rank_and_size()[0] == 1:
            testing.intercept(patch, "ranks.finish_reduce", fall_short)
        with contextlib.suppress(torch.OutOfMemoryError):
            engine.backward(JOB.loss(engine, 0, 0))
    try:
        if starts_over:
            engine.zero_grad()
        for step in range(JOB.steps):
            engine.backward(JOB.loss(engine, step, 0))
            engine.step()
            norms.append(engine.get_global_grad_norm() or 0.0)
    except RankError as error:
        error_message = str(error)
    with contextlib.suppress(OffloadError):
        engine.destroy()
    return error_message, norms


def test_gradients_that_were_added_up_in_part_are_dropped_or_end_the_run(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(train, JOB, MEMORY, tmp_path)[0].norms
    assert ranks.run(fail_in_the_additions, tmp_path, True) == [("", expected)] * 2
    (one, _), (other, _) = ranks.run(fail_in_the_additions, tmp_path, False)
    assert re.match(r"rank 1 \(process .*\) has ended: it has failed while it added gradients up\. Rank 0 cannot", one)
    assert other.startswith("rank 1 has stopped, and the others with it: it has failed while it added gradients up")


class Broken:
    """A collective whose connection has broken."""

    def is_completed(self) -> bool:
        return True

    def wait(self, *timeout: Any) -> None:
        raise RuntimeError("connection closed")


def test_a_lost_rank_is_named_once_however_many_exchanges_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = object.__new__(ProcessGroup)
    ranks._lost, ranks.on_gpu = RankError("rank 1 was killed"), False
    testing.replace(monkeypatch, "ranks.gone", lambda *_: pytest.fail("the loss is known"))
    for _ in range(2):
        with pytest.raises(RankError) as caught:
            Work(ranks, Broken(), "reduce gradients").order_compute()
        assert caught.value is ranks._lost


class Streamed(Broken):
    """A collective of NCCL, whose `wait` without a limit orders the current stream, and with one blocks the host."""

    def __init__(self) -> None:
        self.waits: list[tuple[Any, ...]] = []

    def wait(self, *timeout: Any) -> None:
        self.waits.append(timeout)


def test_on_a_gpu_the_stream_waits_and_not_the_host() -> None:
    ranks, work = object.__new__(ProcessGroup), Streamed()
    ranks.on_gpu = True
    Work(ranks, work, "reduce gradients").order_compute()
    assert work.waits == [()]


# -- memory -------------------------------------------------------------------------------------------


def least_budget(folder: Path, job: Job) -> str:
    """Returns the error of an engine with no room on its device."""
    with pytest.raises(BudgetError) as caught:
        start(job, DISK, folder, device_memory=4096)
    return str(caught.value)


@pytest.mark.parametrize(("stage", "buffers"), [(3, 2), (1, 1)])
def test_the_device_budget_holds_a_second_set_of_buffers(
    stage: int, buffers: int, ranks: RankPool, tmp_path: Path
) -> None:
    """A bucket and what is received of it; in stages 0 and 1 the sums are sent, and need no bucket."""
    job = JOB._replace(stage=stage, accumulation=2)
    messages = [ranks.run(least_budget, tmp_path, job._replace(overlap=each))[0] for each in (True, False)]
    with_it, without = (int(re.findall(r"least that works is .*?\((\d+) bytes\)", each)[0]) for each in messages)
    model = job.model()
    largest = max(each.trainable_stop * FP32 for each in layouts_of(model, find_units(model), 2))
    assert with_it - without == buffers * align_up(largest)
    assert ("four times its gradients" in messages[0]) == (stage == 3)


def test_stage_3_overlaps_unless_the_config_says_otherwise(ranks: RankPool, tmp_path: Path) -> None:
    for stage, same in ((3, True), (2, False)):
        by_default, chosen = (
            ranks.run(least_budget, tmp_path, JOB._replace(stage=stage, overlap=each))[0] for each in (None, same)
        )
        assert by_default == chosen
