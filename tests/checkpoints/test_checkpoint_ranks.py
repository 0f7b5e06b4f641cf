"""Checkpoints of several ranks: the same bits with as many, the same weights and moments with more or fewer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import testing
from offload.checkpoint import load, save
from offload.errors import IoError, RankError, StoreError, UsageError
from offload.states import State
from tests.support import rounding_bounds
from tests.support.oracle import Job, assert_same_tensors, config, weights_of
from tests.support.ranks.rank_jobs import JOBS
from tests.support.ranks.rank_pool import RankPool, rank_and_size, start

DISK, CPU = ("nvme", "nvme"), ("cpu", "cpu")


def train(engine: offload.Engine, job: Job, steps: range) -> list[float]:
    """The mean loss of all ranks at each step."""
    losses = []
    for step in steps:
        mean = 0.0
        for micro in range(job.accumulation):
            part = job.loss(engine, step, micro)
            engine.backward(part)
            mean += engine.mean(float(part.detach())) / job.accumulation
            engine.step()
        losses.append(mean)
    return losses


def save_at_two(job: Job, folder: Path, placement: tuple[str, str]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train four steps, save after two: the last two losses, and the last weights."""
    engine = start(job, placement, folder / "first")
    train(engine, job, range(2))
    engine.save_checkpoint(folder / "saved", client_state={"rank": engine.global_rank})
    losses, weights = train(engine, job, range(2, 4)), weights_of(engine)
    engine.destroy(remove=True)
    return losses, weights


def load_at_two(
    job: Job, folder: Path, placement: tuple[str, str], again: str = "again"
) -> tuple[list[float], dict[str, torch.Tensor], Any, tuple[str, ...]]:
    """Other weights, then those of the checkpoint, saved to `again` at once, and two steps."""
    torch.manual_seed(4711)
    engine = offload.initialize(model=job.model(), config=config(job, placement, folder / "second"))[0]
    train(engine, job, range(7, 8))
    path, client_state = engine.load_checkpoint(folder / "saved")
    assert path is not None and engine.global_steps == 2
    engine.save_checkpoint(folder / again)
    losses, weights, notices = train(engine, job, range(2, 4)), weights_of(engine), engine.notices
    engine.destroy(remove=True)
    return losses, weights, client_state, notices


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["gpt2", "mixture"])
@pytest.mark.parametrize(("one", "other"), [(DISK, DISK), (CPU, ("none", "nvme"))])
def test_the_same_ranks_go_on_bit_for_bit(
    name: str, one: tuple[str, str], other: tuple[str, str], ranks: RankPool, tmp_path: Path
) -> None:
    job = JOBS[name]._replace(dtype="bf16")
    unbroken = ranks.run(save_at_two, job, tmp_path, one)
    for rank, (losses, weights, client_state, _) in enumerate(ranks.run(load_at_two, job, tmp_path, other)):
        assert losses == unbroken[rank][0] and client_state == {"rank": rank}
        assert_same_tensors(unbroken[rank][1], weights)


def values(folder: Path) -> dict[tuple[str, State], torch.Tensor]:
    """Every state of every parameter in the latest checkpoint, put together from all ranks' files."""
    import safetensors.torch

    found = load.look(folder / (folder / "latest").read_text(), 0, 0, {})
    files = [
        safetensors.torch.load_file(found.folder / load.states_file(rank)) for rank in range(found.manifest.world_size)
    ]
    joined: dict[tuple[str, State], torch.Tensor] = {}
    for unit, layout in enumerate(found.layouts):
        for segment in layout.segments:
            for state in found.mode.states if segment.trainable else (State.WEIGHT,):
                parts = [
                    files[shard.rank][f"{unit}.{state.value}"][shard.start : shard.start + shard.numel]
                    for shard in checkpoint_pieces(layout, found.manifest.world_size, segment)
                ]
                joined[segment.name, state] = torch.cat(parts) if parts else torch.empty(0)
    return joined


def checkpoint_pieces(*arguments: Any) -> Any:
    from offload.layout.flat_layout import segment_shards

    return segment_shards(*arguments)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["gpt2", "mixture", "adapters"])
@pytest.mark.parametrize("more", [True, False], ids=["1 to 2", "2 to 1"])
@pytest.mark.numeric
def test_another_number_of_ranks(name: str, more: bool, ranks: RankPool, tmp_path: Path) -> None:
    """Weights and moments are equal exactly after the load; the steps after it as near as another order of sums is."""
    job = JOBS[name]._replace(lr=3e-4)
    if more:
        losses, weights = save_at_two(job, tmp_path, DISK)
        results = ranks.run(load_at_two, job, tmp_path, DISK)
    else:
        losses, weights = ranks.run(save_at_two, job, tmp_path, CPU)[0]
        results = [load_at_two(job, tmp_path, DISK)]
    one, other = values(tmp_path / "saved"), values(tmp_path / "again")
    assert_same_tensors(one, other)
    for after, loaded, client_state, notices in results:
        rounding_bounds.same_losses(after, losses, job)
        assert client_state == {"rank": 0}
        assert any("dropout draws other numbers" in notice for notice in notices)
        rounding_bounds.same_weights(loaded, weights, job, reordered=True)


def fails_on_one(folder: Path) -> str:
    """Rank 1 cannot write; afterwards both train on, and save."""
    job = JOBS["gpt2"]
    engine = start(job, DISK, folder / "run")
    train(engine, job, range(1))
    engine.save_checkpoint(folder / "saved")
    real = save._write_states

    def write(*arguments: Any) -> Any:
        if rank_and_size()[0] == 1:
            raise IoError("a file", 0, 10, 5, "write")
        return real(*arguments)

    save._write_states = write  # type: ignore[assignment]
    message = ""
    try:
        engine.save_checkpoint(folder / "saved", tag="two")
    except (StoreError, IoError) as error:
        message = f"{type(error).__name__}: {error}"
    finally:
        save._write_states = real
    engine.mean(0.0)  # rank 0 has removed what was begun
    names = sorted(path.name for path in (folder / "saved").iterdir())
    assert names == ["global_step1", "latest"], names
    train(engine, job, range(1, 2))
    engine.save_checkpoint(folder / "saved")
    engine.destroy(remove=True)
    return message


def test_an_error_on_one_rank_is_an_error_on_all(ranks: RankPool, tmp_path: Path) -> None:
    zero, one = ranks.run(fails_on_one, tmp_path)
    assert zero.startswith("StoreError: rank 1 could not save a checkpoint") and "a file" in zero
    assert one.startswith("IoError")


def one_is_wrong(folder: Path) -> list[str]:
    """What only rank 1 asks for cannot be; each time both are told, and go on together."""
    job = JOBS["gpt2"]
    engine = start(job, CPU, folder / "run")
    rank, message = rank_and_size()[0], []
    right: dict[str, Any] = {"save_dir": folder / "saved", "tag": "one"}
    wrong: list[dict[str, Any]] = [{"tag": "a/b"}, {"keep_last": 0}, {"keep_last": "2"}, {"save_dir": None}]
    wrong += [{"client_state": [1]}, {"client_state": {"big": 10**5000}}]
    for each in wrong:
        try:
            engine.save_checkpoint(**{**right, **(each if rank else {})})
        except (StoreError, UsageError) as error:
            message.append(f"{type(error).__name__}: {error}")
    assert not (folder / "saved").exists()
    engine.save_checkpoint(**right)
    for load_dir in (None if rank else folder / "saved", folder / "saved"):
        try:
            engine.load_checkpoint(load_dir)  # type: ignore[arg-type]
        except (StoreError, UsageError) as error:
            message.append(f"{type(error).__name__}: {error}")
    train(engine, job, range(1))
    engine.destroy(remove=True)
    return message


def test_an_error_of_one_rank_is_raised_on_all(ranks: RankPool, tmp_path: Path) -> None:
    zero, one = ranks.run(one_is_wrong, tmp_path)
    assert len(zero) == len(one) == 7
    for mine, theirs in zip(zero, one, strict=True):
        assert theirs.startswith("UsageError: ") and mine.startswith("StoreError: rank 1 could not "), (mine, theirs)
        assert theirs in mine


def test_nothing_of_a_save_is_left_for_any_rank_to_see(ranks: RankPool, tmp_path: Path) -> None:
    for each in ranks.run(names_after_saves, tmp_path):
        assert each == ["global_step0", "latest"]


def names_after_saves(folder: Path) -> list[str]:
    engine = start(JOBS["gpt2"], CPU, folder / "run")
    seen: set[str] = set()
    for _ in range(5):
        engine.save_checkpoint(folder / "saved")
        seen |= {path.name for path in (folder / "saved").iterdir()}
        engine.mean(0.0)
    engine.destroy(remove=True)
    return sorted(seen)


def one_saves_alone(folder: Path, what: str) -> str:
    job = JOBS["gpt2"]
    engine = start(job, CPU, folder / "run")
    rank = rank_and_size()[0]
    try:
        if what == "tags":
            engine.save_checkpoint(folder / "saved", tag=f"of {rank}")
        elif rank == 0:
            engine.save_checkpoint(folder / "saved")
        elif what == "load":
            engine.load_checkpoint(folder / "saved")
        else:
            engine.mean(1.0)
    except RankError as error:
        return str(error)
    finally:
        testing.abandon(engine, remove=True)
    return ""


@pytest.mark.sample(1)
@pytest.mark.parametrize("what", ["mean", "load", "tags"])
def test_ranks_that_disagree_get_an_error(what: str, ranks: RankPool, tmp_path: Path) -> None:
    for message in ranks.run(one_saves_alone, tmp_path, what):
        assert (
            "different values of tag" if what == "tags" else "rank 0 saves a checkpoint or a model; rank 1"
        ) in message
    assert not (tmp_path / "saved").exists()


def damaged_on_one(folder: Path) -> str:
    """Each rank compares a share of the files: what one finds, both are told, and nothing has changed."""
    job = JOBS["gpt2"]
    engine = start(job, DISK, folder / "run")
    train(engine, job, range(2))
    weights, message = weights_of(engine), ""
    try:
        engine.load_checkpoint(folder / "saved")
    except StoreError as error:
        message = str(error)
    assert_same_tensors(weights, weights_of(engine))
    train(engine, job, range(2, 3))
    engine.destroy(remove=True)
    return message


def test_damage_is_reported_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_at_two, JOBS["gpt2"], tmp_path, DISK)
    path = tmp_path / "saved" / "global_step2" / "states.rank1.safetensors"
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1
    path.write_bytes(data)
    for message in ranks.run(damaged_on_one, tmp_path):
        assert "states.rank1.safetensors is damaged" in message
    assert json.loads((path.parent / "manifest.json").read_text())["epoch"] == 2
