"""Several ranks save one checkpoint, which any number of ranks, in any grid, loads."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import testing
from offload.checkpoint import load, save
from offload.errors import IoError, RankError, StoreError
from offload.states import State
from tests.support import rounding_bounds
from tests.support.oracle import Job, Result, assert_same_tensors, config, weights_of
from tests.support.ranks import pipelines
from tests.support.ranks import tensor_parallel as tp
from tests.support.ranks.pipelines import Plan
from tests.support.ranks.rank_jobs import JOBS
from tests.support.ranks.rank_pool import RankPool, rank_and_size, shared_pool, start

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
    """Train, and save after two steps: the losses after that, and the last weights."""
    engine = start(job, placement, folder / "first")
    train(engine, job, range(2))
    engine.save_checkpoint(folder / "saved", client_state={"rank": engine.global_rank})
    losses, weights = train(engine, job, range(2, job.steps)), weights_of(engine)
    engine.destroy(remove=True)
    return losses, weights


def load_at_two(
    job: Job, folder: Path, placement: tuple[str, str], again: str = "again"
) -> tuple[list[float], dict[str, torch.Tensor], Any, tuple[str, ...]]:
    """Other weights, then those of the checkpoint, saved to `again` at once, and the steps after it."""
    torch.manual_seed(4711)
    engine = offload.initialize(model=job.model(), config=config(job, placement, folder / "second"))[0]
    train(engine, job, range(7, 8))
    path, client_state = engine.load_checkpoint(folder / "saved")
    assert path is not None and engine.global_steps == 2
    engine.save_checkpoint(folder / again)
    losses, weights, notices = train(engine, job, range(2, job.steps)), weights_of(engine), engine.notices
    engine.destroy(remove=True)
    return losses, weights, client_state, notices


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["gpt2", "mixture"])
@pytest.mark.parametrize(("left", "right"), [(DISK, DISK), (CPU, ("none", "nvme"))])
def test_the_same_ranks_go_on_bit_for_bit(
    name: str, left: tuple[str, str], right: tuple[str, str], ranks: RankPool, tmp_path: Path
) -> None:
    job = JOBS[name]._replace(dtype="bf16")
    unbroken = ranks.run(save_at_two, job, tmp_path, left)
    for rank, (losses, weights, client_state, _) in enumerate(ranks.run(load_at_two, job, tmp_path, right)):
        assert losses == unbroken[rank][0] and client_state == {"rank": rank}
        assert_same_tensors(unbroken[rank][1], weights)


def values(folder: Path) -> dict[tuple[str, State], torch.Tensor]:
    """Every state of every parameter in the latest checkpoint, put together from all ranks' files."""
    import safetensors.torch

    rank_files = load.look(folder / (folder / "latest").read_text(), 0, 0, {})
    files = [
        safetensors.torch.load_file(rank_files.folder / load.states_file(rank))
        for rank in range(rank_files.manifest.world_size)
    ]
    joined: dict[tuple[str, State], torch.Tensor] = {}
    for unit, layout in enumerate(rank_files.layouts):
        for segment in layout.segments:
            for state in rank_files.mode.states if segment.trainable else (State.WEIGHT,):
                parts = [
                    files[shard.rank][f"{unit}.{state.value}"][shard.start : shard.start + shard.numel]
                    for shard in checkpoint_pieces(layout, rank_files.manifest.world_size, segment)
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
    left, right = values(tmp_path / "saved"), values(tmp_path / "again")
    assert_same_tensors(left, right)
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
    zero, rank1 = ranks.run(fails_on_one, tmp_path)
    assert zero.startswith("StoreError: rank 1 could not save a checkpoint") and "a file" in zero
    assert rank1.startswith("IoError")


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


GRID_DISK, MEMORY = ("nvme", "nvme"), ("none", "none")
TENSOR = Job(tp.Net, tp.one_loss, steps=3, lr=3e-4)
PIPELINE = pipelines.JOB._replace(accumulation=2)


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    with shared_pool(4) as ranks:
        yield ranks


def start_grid(kind: str, placement: tuple[str, str], folder: Path) -> offload.Engine:
    if kind == "tensor":
        return tp.start(TENSOR, "sequence", 2, placement, folder)
    return pipelines.start(PIPELINE, Plan(tensor=2 if kind == "both" else 1), placement, folder)


def train_grid(kind: str, engine: offload.Engine, first: int, last: int) -> Result:
    if kind == "tensor":
        return tp.steps(engine, TENSOR, 2, first, last)
    return pipelines.steps(engine, PIPELINE, Plan(tensor=2 if kind == "both" else 1), first, last)


def save_and_load(kind: str, folder: Path) -> list[str]:
    """An engine that loads the checkpoint of another goes on with the bits of the one that saved it."""
    saving = start_grid(kind, GRID_DISK, folder / "one")
    train_grid(kind, saving, 0, 1)
    saving.save_checkpoint(folder / "saved", client_state={"rank": rank_and_size()[0]})
    expected = train_grid(kind, saving, 1, 3)
    saving.destroy(remove=True)
    engine = start_grid(kind, MEMORY, folder / "two")
    path, state = engine.load_checkpoint(folder / "saved")
    assert path == str(folder / "saved" / "global_step1") and state == {"rank": rank_and_size()[0]}
    assert engine.global_steps == 1
    result = train_grid(kind, engine, 1, 3)
    engine.destroy(remove=True)
    assert (result.losses, result.norms) == (expected.losses, expected.norms)
    assert_same_tensors(result.weights, expected.weights)
    return sorted(each.name for each in (folder / "saved" / "global_step1").iterdir())


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.works("Several ranks", "checkpoints of tensor parallelism, and of a pipeline", "right")
@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_a_grid_goes_on_from_its_checkpoint_bit_for_bit(kind: str, ranks: RankPool, tmp_path: Path) -> None:
    names = ranks.run(save_and_load, kind, tmp_path)[0]
    short = {"tensor": "tp", "pipeline": "pp"}[kind]
    assert names == ["manifest.json", f"{short}0of2", f"{short}1of2"]


def save_weights(kind: str, folder: Path) -> dict[str, Any]:
    engine = start_grid(kind, MEMORY, folder / "one")
    weights = train_grid(kind, engine, 0, 1).weights
    engine.save_checkpoint(folder / "saved")
    engine.destroy(remove=True)
    return weights


def load_weights(kind: str, folder: Path) -> dict[str, Any]:
    engine = start_grid(kind, MEMORY, folder / "two")
    engine.load_checkpoint(folder / "saved")
    weights = {name: tp.whole(value) for name, value in engine.module.state_dict().items()}
    train_grid(kind, engine, 1, 2)
    engine.destroy(remove=True)
    return weights if kind == "tensor" else {name.partition(".")[2]: value for name, value in weights.items()}


@pytest.mark.works("Several ranks", "a checkpoint of a grid on more ranks of ZeRO", "right")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_more_ranks_of_zero_load_the_same_parts(kind: str, ranks: RankPool, four: RankPool, tmp_path: Path) -> None:
    saved = ranks.run(save_weights, kind, tmp_path)
    for number, loaded in enumerate(four.run(load_weights, kind, tmp_path)):
        # Two by two: those of one stage are neighbours in the mesh of a pipeline, as are those of a row.
        assert_same_tensors(loaded, saved[number // 2 if kind == "pipeline" else number % 2])


def refused(damage: str, folder: Path) -> str:
    """The message of a load that fails on both ranks, and leaves the engine as it was."""
    engine = start_grid("pipeline", MEMORY, folder / f"run-{damage}")
    before = pipelines.weights_of(engine)
    with pytest.raises(StoreError) as error:
        engine.load_checkpoint(folder / damage)
    assert_same_tensors(pipelines.weights_of(engine), before)
    train_grid("pipeline", engine, 0, 1)
    engine.destroy(remove=True)
    return str(error.value)


def save_two(folder: Path) -> None:
    engine = start_grid("pipeline", MEMORY, folder / "run")
    for tag in ("one", "two"):
        train_grid("pipeline", engine, 0, 1)
        engine.save_checkpoint(folder / "saved", tag)
    engine.destroy(remove=True)


def mixed(checkpoint: Path) -> None:
    """The second part of another save."""
    shutil.rmtree(checkpoint / "pp1of2")
    shutil.copytree(checkpoint.with_name("one") / "pp1of2", checkpoint / "pp1of2")


def cut_off(checkpoint: Path) -> None:
    path = checkpoint / "pp1of2" / "states.rank0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def flipped(checkpoint: Path) -> None:
    path = checkpoint / "pp1of2" / "states.rank0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "mixed": (mixed, r"pp1of2/manifest.json is not the manifest that was saved with this checkpoint"),
    "cut off": (cut_off, r"states.rank0.safetensors contains \d+ bytes, expected \d+"),
    "flipped": (flipped, r"pp1of2/states.rank0.safetensors is damaged: .*/one, the newest complete one before it"),
    "lost": (lambda path: shutil.rmtree(path / "pp1of2"), r"pp1of2"),
}


def test_damage_of_one_part_is_found_before_any_process_loads(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_two, tmp_path)
    for name, (damage, words) in DAMAGES.items():
        shutil.copytree(tmp_path / "saved", tmp_path / name)
        damage(tmp_path / name / "two")
        for message in ranks.run(refused, name, tmp_path):
            assert re.search(words, message), (name, message)


def load_another_grid(folder: Path) -> list[str]:
    """The messages of loads of a checkpoint of another grid, or of none; the engine is as before."""
    engine = start_grid("tensor", MEMORY, folder / "run")
    before = tp.steps(engine, TENSOR, 2, 0, 1)
    messages = []
    for saved in (folder / "saved", folder / "saved" / "one" / "pp0of2", folder / "alone"):
        with pytest.raises(StoreError) as error:
            engine.load_checkpoint(saved)
        messages.append(str(error.value))
    assert_same_tensors(before.weights, {name: tp.whole(each) for name, each in engine.module.state_dict().items()})
    engine.destroy(remove=True)
    return messages


def load_alone(job: Job, folder: Path) -> str:
    """The message of one process that loads a checkpoint of a pipeline, and then saves one of its own."""
    engine = offload.initialize(model=job.model(), config=config(job, MEMORY, folder / "alone-run"))[0]
    with pytest.raises(StoreError) as error:
        engine.load_checkpoint(folder / "saved")
    engine.save_checkpoint(folder / "alone")
    engine.destroy(remove=True)
    return str(error.value)


@pytest.mark.slow
@pytest.mark.works("Several ranks", "a checkpoint of another grid, or of processes without one", "refused")
def test_a_checkpoint_of_another_grid_is_refused_with_the_way_out(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_two, tmp_path)
    words = r"was saved by processes with the parts pp0of2, pp1of2, this engine has processes without.*offload export"
    assert re.search(words, load_alone(PIPELINE, tmp_path))
    for whole, part, alone in ranks.run(load_another_grid, tmp_path):
        assert re.search(r"by processes with the parts pp0of2, pp1of2, .* with the parts tp0of2, tp1of2", whole)
        assert "was saved by processes with the parts a part of a grid" in part
        assert "was saved by processes without pipeline or tensor parallelism" in alone
