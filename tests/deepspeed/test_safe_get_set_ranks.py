"""DeepSpeed's safe_get_* and safe_set_* agree on several ranks: each gives its shard, or all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.errors import OffloadError, RankError
from tests.support import models
from tests.support.oracle import Job, start, train_step
from tests.support.param_states import (
    DISK,
    LOCAL,
    MIXTURE,
    Found,
    a_round,
    backward,
    differences,
    everything,
    everything_local,
    halved,
    same_but_for_roundings,
)
from tests.support.ranks.rank_pool import RankPool, rank_and_size
from tests.support.ranks.rank_pool import start as start_rank


def rows_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    rank, size = rank_and_size()
    ids = models.tokens(step, micro, (4, 16), 61).chunk(size)[rank]
    return models.token_loss(model(ids), ids)


ROWS = MIXTURE._replace(loss=rows_loss)


def look_and_set(job: Job, placement: tuple[str, str], folder: Path) -> tuple[list[Found], Found, list[float]]:
    """Of one rank or of several: what is found in a round, and after everything was set; and losses after that."""
    engine = (start_rank if rank_and_size()[1] > 1 else start)(job, placement, folder)
    found = a_round(engine, job, lambda: everything(engine.module))
    halved(engine)
    backward(engine, job, 3)
    for parameter in engine.module.parameters():
        gradient = offload.safe_get_full_grad(parameter)
        if gradient is not None:
            offload.safe_set_full_grad(parameter, gradient * 2)
    after = everything(engine.module)
    engine.step()
    losses = []
    for step in (4, 5):
        losses.append(engine.mean(float(job.loss(engine, step, 0).detach())))
        if step == 4:
            train_step(engine, job, step)
    engine.destroy(remove=True)
    return found, after, losses


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.numeric
def test_two_ranks_read_and_set_as_one(dtype: str, ranks: RankPool, tmp_path: Path) -> None:
    job = ROWS._replace(dtype=dtype)
    alone = look_and_set(job, DISK, tmp_path / "alone")
    first = None
    for placement in (DISK, ("none", "cpu")):
        one, other = ranks.run(look_and_set, job, placement, tmp_path / "-".join(placement))
        first = first or one
        for found, after, losses in (one, other):
            assert losses == first[2] and differences(after, first[1]) == []
            for mine, expected in zip(found, first[0], strict=True):
                assert differences(mine, expected) == []
    assert first is not None
    for mine, expected in zip([*first[0], first[1]], [*alone[0], alone[1]], strict=True):
        same_but_for_roundings(mine, expected, job, reordered=True)


def different_places(folder: Path) -> list[str]:
    """What is said where the ranks look at different things, or one looks while the other steps."""
    engine = start_rank(ROWS, DISK, folder)
    rank, _ = rank_and_size()
    messages = []
    weight = engine.module.embedding.weight if rank else engine.module.scale
    with pytest.raises(RankError) as error:
        offload.safe_get_full_fp32_param(weight)
    messages.append(str(error.value))
    backward(engine, ROWS, 0)
    with pytest.raises(RankError) as error:
        if rank:
            offload.safe_set_full_grad(engine.module.scale, torch.ones(()))
        else:
            engine.step()
    messages.append(str(error.value))
    engine.destroy(remove=True)
    return messages


def test_ranks_at_different_places(ranks: RankPool, tmp_path: Path) -> None:
    for messages in ranks.run(different_places, tmp_path):
        assert "with different values of parameter: rank 0 with 'scale', rank 1 with 'embedding.weight'" in messages[0]
        assert "rank 0 is at step(); rank 1 accesses a state of a parameter" in messages[1]


def _is_divided(engine: offload.Engine, name: str) -> bool:
    """Returns True if this rank stores a part of a parameter, and not all of it."""
    inspected = testing.inspect(engine)
    for layout, part in zip(inspected.layouts, inspected.trainable, strict=True):
        for segment in layout.segments:
            if segment.name == name:
                return 0 < len(range(max(segment.start, part.start), min(segment.stop, part.stop))) < segment.numel
    raise AssertionError(f"no unit contains {name}")


def values_of_each(folder: Path) -> list[float]:
    """Each rank sets other values of a parameter of which both hold a part."""
    engine = start_rank(ROWS, DISK, folder)
    rank, _ = rank_and_size()
    weight = engine.module.blocks[2][2].weight
    assert _is_divided(engine, "blocks.2.2.weight")
    offload.safe_set_full_optimizer_state(weight, torch.full(weight.shape, 1.0 + rank), "exp_avg")
    offload.safe_set_full_grad(weight, torch.full(weight.shape, 3.0 + rank))
    found = [offload.safe_get_full_optimizer_state(weight, "exp_avg"), offload.safe_get_full_grad(weight)]
    engine.destroy(remove=True)
    return [number for value in found if value is not None for number in value.unique().tolist()]


def test_the_values_of_the_first_rank_count(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(values_of_each, tmp_path) == [[1.0, 3.0], [1.0, 3.0]]


def shards_and_complete(job: Job, folder: Path) -> tuple[list[Found], list[Found], Found]:
    """Each rank's parts in a round, beside the whole; and the whole after every part was doubled."""
    engine = start_rank(job, DISK, folder)
    looks: list[Found] = []

    def look() -> Found:
        looks.append(everything_local(engine.module))
        return everything(engine.module)

    complete = a_round(engine, job, look)
    backward(engine, job, 3)
    for parameter in engine.module.parameters():
        for get, put in LOCAL.values():
            mine = get(parameter)
            if mine is not None and parameter.requires_grad:
                put(parameter, mine * 2)
    doubled = everything(engine.module)
    engine.step()
    engine.destroy(remove=True)
    return looks, complete, doubled


def doubled_complete(job: Job, folder: Path) -> Found:
    engine = start_rank(job, DISK, folder)
    a_round(engine, job, dict)
    backward(engine, job, 3)
    found = everything(engine.module)
    engine.destroy(remove=True)
    frozen = {name for name, parameter in engine.module.named_parameters() if not parameter.requires_grad}
    return {name: value if value is None or name.split()[0] in frozen else value * 2 for name, value in found.items()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_shards_of_all_ranks_are_complete(dtype: str, ranks: RankPool, tmp_path: Path) -> None:
    job = ROWS._replace(dtype=dtype)
    (one, complete, doubled), (other, _, also) = ranks.run(shards_and_complete, job, tmp_path / "parts")
    lengths = set()
    for first, second, expected in zip(one, other, complete, strict=True):
        for name, value in expected.items():
            mine, theirs = first[name], second[name]
            if value is None:
                assert mine is None and theirs is None
            else:
                assert mine is not None and theirs is not None
                lengths.add((len(mine) > 0, len(theirs) > 0))
                assert torch.equal(torch.cat([mine, theirs]), value.flatten()), name
    assert lengths >= {(True, True), (True, False), (False, True)}
    assert differences(doubled, also) == []
    assert differences(doubled, ranks.run(doubled_complete, job, tmp_path / "whole")[0]) == []


def alone_and_wrong(folder: Path) -> list[str]:
    """A rank that looks at its parts alone, and one that sets a part of another length."""
    engine = start_rank(ROWS, DISK, folder)
    rank, _ = rank_and_size()
    weight = engine.module.blocks[2][2].weight
    if rank:
        assert offload.safe_get_local_fp32_param(weight) is not None
        assert offload.safe_get_local_optimizer_state(weight, "exp_avg") is not None
    # With an edit that is pending the call waits for the others, who come to it with their forward.
    offload.safe_set_full_fp32_param(weight, torch.full(weight.shape, 0.25))
    if rank:
        edited = offload.safe_get_local_fp32_param(weight)
        assert edited is not None and bool((edited == 0.25).all())
    backward(engine, ROWS, 0)
    mine = offload.safe_get_local_grad(weight)
    assert mine is not None
    with pytest.raises(OffloadError) as error:
        offload.safe_set_local_grad(weight, mine[rank:])
    same = offload.safe_get_local_grad(weight)
    assert same is not None and torch.equal(mine, same)
    engine.step()
    engine.destroy(remove=True)
    return [str(error.value)]


def test_a_single_rank_and_a_shard_of_another_length_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    (one,), (other,) = ranks.run(alone_and_wrong, tmp_path)
    assert "values of this rank's shard of the " in other and "got shape" in other
    assert "rank 1 could not set a shard of a parameter, so no rank did: UsageError: values of" in one
