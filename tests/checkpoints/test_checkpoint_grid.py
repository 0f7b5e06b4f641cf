"""Checkpoints of a grid: each process saves and loads its part, and a checkpoint has all parts, or is none."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import offload
from offload.checkpoint.directory import remove
from offload.errors import StoreError
from tests.support.oracle import Job, Result, assert_same_tensors, config
from tests.support.ranks import pipelines
from tests.support.ranks import tensor_parallel as tp
from tests.support.ranks.pipelines import Plan
from tests.support.ranks.rank_pool import RankPool, rank_and_size, shared_pool

DISK, MEMORY = ("nvme", "nvme"), ("none", "none")
TENSOR = Job(tp.Net, tp.one_loss, steps=3, lr=3e-4)
PIPELINE = pipelines.JOB._replace(accumulation=2)


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    with shared_pool(4) as ranks:
        yield ranks


def start(kind: str, placement: tuple[str, str], folder: Path) -> offload.Engine:
    if kind == "tensor":
        return tp.start(TENSOR, "sequence", 2, placement, folder)
    return pipelines.start(PIPELINE, Plan(tensor=2 if kind == "both" else 1), placement, folder)


def train(kind: str, engine: offload.Engine, first: int, last: int) -> Result:
    if kind == "tensor":
        return tp.steps(engine, TENSOR, 2, first, last)
    return pipelines.steps(engine, PIPELINE, Plan(tensor=2 if kind == "both" else 1), first, last)


def save_and_load(kind: str, folder: Path) -> list[str]:
    """An engine that loads the checkpoint of another goes on with the bits of the one that saved it."""
    saving = start(kind, DISK, folder / "one")
    train(kind, saving, 0, 1)
    saving.save_checkpoint(folder / "saved", client_state={"rank": rank_and_size()[0]})
    expected = train(kind, saving, 1, 3)
    saving.destroy(remove=True)
    engine = start(kind, MEMORY, folder / "two")
    path, state = engine.load_checkpoint(folder / "saved")
    assert path == str(folder / "saved" / "global_step1") and state == {"rank": rank_and_size()[0]}
    assert engine.global_steps == 1
    found = train(kind, engine, 1, 3)
    engine.destroy(remove=True)
    assert (found.losses, found.norms) == (expected.losses, expected.norms)
    assert_same_tensors(found.weights, expected.weights)
    return sorted(each.name for each in (folder / "saved" / "global_step1").iterdir())


@pytest.mark.sample(1)
@pytest.mark.works("Several ranks", "checkpoints of tensor parallelism, and of a pipeline", "right")
@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_a_grid_goes_on_from_its_checkpoint_bit_for_bit(kind: str, ranks: RankPool, tmp_path: Path) -> None:
    names = ranks.run(save_and_load, kind, tmp_path)[0]
    short = {"tensor": "tp", "pipeline": "pp"}[kind]
    assert names == ["manifest.json", f"{short}0of2", f"{short}1of2"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "pipeline", "both"])
def test_parts_are_divided_by_zero_too(kind: str, four: RankPool, tmp_path: Path) -> None:
    names = four.run(save_and_load, kind, tmp_path)[0]
    files = {each.name for each in (tmp_path / "saved" / "global_step1" / names[1]).iterdir()}
    ranks = range(1 if kind == "both" else 2)
    assert files == {
        "manifest.json",
        *(f"{what}.rank{rank}.safetensors" for what in ("states", "progress") for rank in ranks),
    }


def save_weights(kind: str, folder: Path) -> dict[str, Any]:
    engine = start(kind, MEMORY, folder / "one")
    weights = train(kind, engine, 0, 1).weights
    engine.save_checkpoint(folder / "saved")
    engine.destroy(remove=True)
    return weights


def load_weights(kind: str, folder: Path) -> dict[str, Any]:
    engine = start(kind, MEMORY, folder / "two")
    engine.load_checkpoint(folder / "saved")
    weights = {name: tp.whole(value) for name, value in engine.module.state_dict().items()}
    train(kind, engine, 1, 2)
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


def replace_and_prune(folder: Path) -> None:
    engine = start("pipeline", MEMORY, folder / "run")
    for step in range(3):
        train("pipeline", engine, step, step + 1)
        engine.save_checkpoint(folder / "saved", keep_last=2)
    engine.save_checkpoint(folder / "saved", "global_step3")  # over the one of that name
    engine.destroy(remove=True)


def test_old_checkpoints_of_a_grid_are_removed_and_replaced_whole(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(replace_and_prune, tmp_path)
    saved = tmp_path / "saved"
    assert sorted(each.name for each in saved.iterdir()) == ["global_step2", "global_step3", "latest"]
    (saved / "global_step3" / "pp1of2" / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"pp1of2/notes\.txt in .* does not belong to a checkpoint"):
        remove(saved / "global_step3")
    remove(saved / "global_step2")
    assert sorted(each.name for each in saved.iterdir()) == ["global_step3", "latest"]


def refused(damage: str, folder: Path) -> str:
    """The message of a load that fails on both ranks, and leaves the engine as it was."""
    engine = start("pipeline", MEMORY, folder / f"run-{damage}")
    before = pipelines.weights_of(engine)
    with pytest.raises(StoreError) as error:
        engine.load_checkpoint(folder / damage)
    assert_same_tensors(pipelines.weights_of(engine), before)
    train("pipeline", engine, 0, 1)
    engine.destroy(remove=True)
    return str(error.value)


def save_two(folder: Path) -> None:
    engine = start("pipeline", MEMORY, folder / "run")
    for tag in ("one", "two"):
        train("pipeline", engine, 0, 1)
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
    engine = start("tensor", MEMORY, folder / "run")
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


@pytest.mark.works("Several ranks", "a checkpoint of another grid, or of processes without one", "refused")
def test_a_checkpoint_of_another_grid_is_refused_with_the_way_out(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_two, tmp_path)
    words = r"was saved by processes with the parts pp0of2, pp1of2, this engine has processes without.*offload export"
    assert re.search(words, load_alone(PIPELINE, tmp_path))
    for whole, part, alone in ranks.run(load_another_grid, tmp_path):
        assert re.search(r"by processes with the parts pp0of2, pp1of2, .* with the parts tp0of2, tp1of2", whole)
        assert "was saved by processes with the parts a part of a grid" in part
        assert "was saved by processes without pipeline or tensor parallelism" in alone
