"""Ranks that send codes of 8 bits send a byte an element and a scale a block, and the budget has room for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from offload import testing
from offload.distributed.process_group import Communication, Sent
from offload.layout import memory_plan
from offload.sizes import align_up
from tests.ranks.int8_collectives import BLOCK, BYTES, HOST, JOB, Seen, train_and_look
from tests.ranks.test_ranks_overlap import least_budget
from tests.support.oracle import Job, assert_same_tensors
from tests.support.ranks.rank_jobs import JOBS
from tests.support.ranks.rank_pool import RankPool, pool, start


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    """Four ranks."""
    with pool(4) as ranks:
        yield ranks


class Step(NamedTuple):
    """The second step of one rank."""

    sent: Communication
    units: list[tuple[int, int]]
    """Elements of each unit that train, and of its frozen region."""


def second_step(job: Job, folder: Path, **options: Any) -> Step:
    """Trains two steps with room for all units on the device; the first records the order of uses."""
    engine = start(job, HOST, folder, device_memory="64MiB", **options)
    before = engine.communication()
    for step in range(2):
        before = engine.communication()
        engine.backward(job.loss(engine, step, 0))
        engine.step()
    layouts = testing.inspect(engine).layouts
    units = [(layout.trainable_stop, layout.numel - layout.trainable_stop) for layout in layouts]
    found = Step(engine.communication().since(before), units)
    engine.destroy(remove=True)
    return found


def codes(numel: int) -> int:
    """Returns the bytes of the codes of a shard."""
    assert numel % BLOCK == 0
    return numel // BLOCK * BYTES


@pytest.mark.parametrize(("dtype", "nbytes"), [("fp32", 4), ("bf16", 2)])
def test_a_step_sends_a_byte_an_element_and_a_scale_a_block(
    dtype: str, nbytes: int, ranks: RankPool, tmp_path: Path
) -> None:
    """130 bytes for 128 elements: 0.254 of fp32, 0.508 of bf16. Each collective is one as before."""
    exact = ranks.run(second_step, JOB._replace(dtype=dtype), tmp_path)
    for found, other in zip(
        ranks.run(second_step, JOB._replace(dtype=dtype, quantized="weights gradients"), tmp_path), exact, strict=True
    ):
        shard = sum(trainable for trainable, _ in found.units) // 2
        assert other.sent.weights == Sent(len(found.units), shard * nbytes)
        assert found.sent.weights == found.sent.gradients == Sent(len(found.units), codes(shard))
        assert found.sent.messages == other.sent.messages
        # A round for each reduction, in place of one for all: there is one bucket, and none for zeros beside it.
        assert found.sent.agreement.collectives == other.sent.agreement.collectives + len(found.units) - 1
    for found in ranks.run(second_step, JOB._replace(dtype=dtype, quantized="gradients"), tmp_path):
        assert (found.sent.weights, found.sent.gradients) == (other.sent.weights, Sent(len(found.units), codes(shard)))


def test_replicas_send_codes_of_their_sums(four: RankPool, tmp_path: Path) -> None:
    """To each of the other replicas all of a shard's."""
    for found in four.run(second_step, JOB._replace(shard_size=2, quantized="weights gradients"), tmp_path / "two"):
        units, shard = len(found.units), sum(trainable for trainable, _ in found.units) // 2
        assert found.sent.weights == Sent(units, codes(shard))
        assert found.sent.gradients == Sent(2 * units, 2 * codes(shard))
    for found in four.run(second_step, JOB._replace(shard_size=1, quantized="weights gradients"), tmp_path / "four"):
        whole = sum(trainable for trainable, _ in found.units)
        assert (found.sent.weights, found.sent.gradients) == (Sent(), Sent(units, 3 * codes(whole)))


def with_many_replicas(job: Job, folder: Path) -> Step:
    """Two replicas that take themselves for too many."""
    with pytest.MonkeyPatch.context() as patch:
        testing.replace(patch, "size.coded_replicas", 1)
        return second_step(job, folder)


def test_many_replicas_add_their_sums_up_in_fp32(four: RankPool, tmp_path: Path) -> None:
    """Where the codes of all sums would be more bytes than an all-reduce, 2 (r - 1) / r of 4 bytes an element."""
    coded, summed = (
        [each(r) for r in range(2, 12)] for each in (lambda r: (r - 1) * BYTES / BLOCK, lambda r: 8 - 8 / r)
    )
    fewer = [one < other for one, other in zip(coded, summed, strict=True)]
    assert fewer == [r <= memory_plan.MOST_CODED_REPLICAS for r in range(2, 12)]
    for found in four.run(with_many_replicas, JOB._replace(shard_size=2, quantized="gradients"), tmp_path):
        units, shard = len(found.units), sum(trainable for trainable, _ in found.units) // 2
        assert found.sent.gradients == Sent(2 * units, codes(shard) + 4 * shard)


def test_frozen_weights_are_sent_as_the_config_says(ranks: RankPool, tmp_path: Path) -> None:
    job = JOBS["adapters"]._replace(steps=2)
    sizes: list[tuple[str, Callable[[int], int], Callable[[int], int]]] = [
        ("weights", codes, lambda numel: 4 * numel),
        ("nontrainable_weights", lambda numel: 4 * numel, codes),
        ("weights nontrainable_weights", codes, codes),
    ]
    for words, of_trainable, of_frozen in sizes:
        for found in ranks.run(second_step, job._replace(quantized=words), tmp_path):
            # A unit that never changes was gathered in the first step, and stays.
            changing = [(one // 2, other // 2) for one, other in found.units if one]
            expected = sum(of_trainable(one) + of_frozen(other) for one, other in changing)
            assert found.sent.weights.nbytes == expected, words


def frozen_in_blocks(job: Job, folder: Path) -> tuple[Step, Seen]:
    return second_step(job, folder / "step", frozen="int8"), train_and_look(job, folder / "look", frozen="int8")


def test_frozen_weights_that_are_codes_already_are_sent_as_they_are(ranks: RankPool, tmp_path: Path) -> None:
    """Their blocks are no values of which codes could be made."""
    job = JOBS["adapters"]._replace(dtype="bf16")
    exact = ranks.run(frozen_in_blocks, job, tmp_path / "exact")
    coded = ranks.run(frozen_in_blocks, job._replace(quantized="nontrainable_weights"), tmp_path / "coded")
    for (step, seen), (other, expected) in zip(coded, exact, strict=True):
        assert step.sent.weights == other.sent.weights
        bases = [name for name in seen.used if "base" in name]
        assert len(bases) == 6 and any("weight" in name for name in bases)
        assert_same_tensors({name: seen.used[name] for name in bases}, {name: expected.used[name] for name in bases})


def least(folder: Path, job: Job) -> int:
    message = least_budget(folder, job)
    assert "for gradients and codes that ranks send each other" in message or not job.quantized
    return int(message.split("least that works is ")[1].split("(")[1].split(" bytes")[0])


def test_the_device_budget_holds_the_memory_of_codes(ranks: RankPool, tmp_path: Path) -> None:
    """For gradients a bucket, and the codes of two exchanges, sent and received; for weights the codes of a gather."""
    needs = {
        words: ranks.run(least, tmp_path, JOB._replace(quantized=words))[0] for words in ("", "weights", "gradients")
    }
    layouts = ranks.run(second_step, JOB, tmp_path)[0].units
    largest = max(trainable for trainable, _ in layouts)
    assert needs["weights"] - needs[""] == align_up(codes(largest))
    assert needs["gradients"] - needs[""] == 4 * align_up(codes(largest)) - 3 * align_up(4 * largest)
