"""A grid resumes with another number of ranks beside tensor parallelism: from the last step that all columns have."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import testing
from offload.aio import IoQueue, aligned_empty
from offload.distributed import reshard
from offload.errors import IoError, OffloadError, StoreError
from offload.layout.fingerprint import described_layouts
from offload.layout.flat_layout import segment_shards
from offload.layout.modes import MODES
from offload.model_io.source import StoreSource
from offload.swapper.store import rank_folders
from offload.swapper.store.inspection import look
from offload.swapper.store.store import Store
from tests.support.drives.fault_injection import die
from tests.support.oracle import Job, assert_same_tensors, train_step
from tests.support.ranks import pipelines as pp
from tests.support.ranks import tensor_parallel as tp
from tests.support.ranks.rank_pool import pool, rank_and_size

JOB = Job(tp.Net, tp.one_loss, lr=3e-4)
COLUMNS = ("default-tp0of2", "default-tp1of2")

States = dict[str, torch.Tensor]


def start(folder: Path, **options: Any) -> offload.Engine:
    return tp.start(JOB, "weights", 2, ("nvme", "nvme"), folder, **options)


def states_in(run: Path, at: int | None = None) -> States:
    """Returns every state of every parameter in a commit of a column, put together from all ranks."""
    found: States = {}
    with IoQueue() as queue, contextlib.closing(StoreSource(run, queue, at=at)) as source:
        mode, size = MODES[source.description["mode"]], int(source.description["world_size"])
        for unit, layout in enumerate(described_layouts(source.description, part=True)):
            for segment in layout.segments:
                for state, dtype in mode.states.items():
                    parts = []
                    for shard in segment_shards(layout, size, segment):
                        buffer = aligned_empty(shard.numel * dtype.itemsize)
                        source.read(shard.rank, unit, state, shard.start * dtype.itemsize, buffer).wait()
                        parts.append(bytes(buffer))
                    found[f"{segment.name} {state.value}"] = torch.frombuffer(
                        bytearray(b"".join(parts)), dtype=torch.uint8
                    )
    return found


def killed_beside_an_edit(folder: Path) -> None:
    """Process 1 commits the second step and edits, and process 0 is killed before it commits; then process 1 is too."""
    engine, edited = start(folder), folder / "edited"
    for step in range(2):
        train_step(engine, JOB, step)
    if rank_and_size()[0] == 0:
        Store.commit = lambda *_: die()  # type: ignore[method-assign]
        while not edited.exists():
            time.sleep(0.01)
        die()
    for weight in (engine.module.head.weight, engine.module.embed.weight):
        offload.safe_set_full_fp32_param(weight, torch.zeros(weight.shape))
    assert not offload.safe_get_full_fp32_param(engine.module.head.weight).any()
    edited.touch()
    die()


def resumed(folder: Path, step: int) -> tuple[str, ...]:
    engine = start(folder, resume="must")
    assert engine.global_steps == step
    notices = engine.notices
    engine.destroy(remove=False)
    return notices


def told(every: list[tuple[str, ...]]) -> list[bool]:
    """Tells for each process whether it says that the run was divided anew."""
    return [any(notice.startswith("resharded from") for notice in notices) for notices in every]


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Swap files of a grid of two, of which one was killed before its last commit, and one behind an edit."""
    folder = tmp_path_factory.mktemp("edited")
    with pool(2) as two:
        with pytest.raises((AssertionError, EOFError, OSError)):
            two.run(killed_beside_an_edit, folder)
        for process in two.processes:
            process.join(60)
    assert (folder / COLUMNS[1] / "rank0" / "undo").exists()
    newest = [look(folder / column / "rank0").whole[0].record.step for column in COLUMNS]
    assert newest == [1, 2], "one process is ahead"
    return folder


def test_other_ranks_go_on_from_the_last_step_of_all(edited: Path, tmp_path: Path) -> None:
    """The states are those of a resume with as many as before, also where an edit has written over them."""
    shutil.copytree(edited, tmp_path / "same")
    shutil.copytree(edited, tmp_path / "other")
    with pool(2) as two:
        assert told(two.run(resumed, tmp_path / "same", 1)) == [False, False]
    with pool(4) as four:
        assert told(four.run(resumed, tmp_path / "other", 1)) == [True] * 4
        assert told(four.run(resumed, tmp_path / "other", 1)) == [False] * 4
    for column in COLUMNS:
        before = states_in(tmp_path / "same" / column)
        assert len(before) > 20
        assert_same_tensors(before, states_in(tmp_path / "other" / column))
        assert [each.name for each in rank_folders(tmp_path / "other" / column)] == ["rank0", "rank1"]
    with pool(2) as two:
        assert told(two.run(resumed, tmp_path / "other", 1)) == [True, True]
    for column in COLUMNS:
        assert_same_tensors(states_in(tmp_path / "same" / column), states_in(tmp_path / "other" / column))


def test_reads_of_an_earlier_commit_take_the_copies(edited: Path, tmp_path: Path) -> None:
    shutil.copytree(edited, tmp_path / "same")
    with pool(2) as two:
        two.run(resumed, tmp_path / "same", 1)
    shutil.copytree(edited / COLUMNS[1], tmp_path / "read")
    expected = states_in(tmp_path / "same" / COLUMNS[1])
    assert_same_tensors(expected, states_in(tmp_path / "read", at=2))
    (tmp_path / "read" / "rank0" / "undo").unlink()
    with pytest.raises(AssertionError):
        assert_same_tensors(expected, states_in(tmp_path / "read", at=2))


def killed_between(folder: Path) -> None:
    """Process 0 has switched its column, and process 1 is killed before it does."""
    if rank_and_size()[0] == 1:
        reshard.carry_out = lambda *_: die()
    with contextlib.suppress(OffloadError):
        start(folder, resume="must")
    die()


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_kill_between_two_columns_leaves_a_run_for_either_number(ranks: int, edited: Path, tmp_path: Path) -> None:
    shutil.copytree(edited, tmp_path / "same")
    shutil.copytree(edited, tmp_path / "other")
    with pool(2) as two:
        two.run(resumed, tmp_path / "same", 1)
    with pool(4) as four:
        with pytest.raises((AssertionError, EOFError, OSError)):
            four.run(killed_between, tmp_path / "other")
        for process in four.processes:
            process.join(60)
    assert [len(rank_folders(tmp_path / "other" / column)) for column in COLUMNS] == [2, 1]
    with pool(ranks) as others:
        assert told(others.run(resumed, tmp_path / "other", 1)).count(True) == ranks // 2
    for column in COLUMNS:
        assert_same_tensors(states_in(tmp_path / "same" / column), states_in(tmp_path / "other" / column))


def fails_in_one_column(folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if rank_and_size()[0] == 1:
            testing.replace(
                patch, "store.wrote", lambda *_: (_ for _ in ()).throw(IoError("a file", 0, 10, 5, "write"))
            )
        try:
            start(folder, resume="must")
        except (StoreError, IoError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_an_error_in_one_column_keeps_the_run_in_all(edited: Path, tmp_path: Path) -> None:
    shutil.copytree(edited, tmp_path / "other")
    names = sorted(path for path in (tmp_path / "other").rglob("*"))
    with pool(4) as four:
        messages = four.run(fails_in_one_column, tmp_path / "other")
    assert all("a file" in message for message in messages), messages
    kept = sorted(path for path in (tmp_path / "other").rglob("*"))
    assert kept == names


def pipeline_begun(folder: Path) -> None:
    engine = pp.start(pp.JOB, pp.Plan(), ("nvme", "nvme"), folder)
    pp.steps(engine, pp.JOB, pp.Plan(), 0, 2)
    engine.destroy(remove=False)


def pipeline_resumed(folder: Path) -> tuple[str, ...]:
    """Resumes, and trains another step."""
    engine = pp.start(pp.JOB, pp.Plan(), ("nvme", "nvme"), folder, resume="must")
    assert engine.global_steps == 2
    pp.steps(engine, pp.JOB, pp.Plan(), 2, 3)
    notices = engine.notices
    engine.destroy(remove=False)
    return notices


@pytest.mark.slow
def test_a_pipeline_goes_on_with_other_ranks(tmp_path: Path) -> None:
    with pool(2) as two:
        two.run(pipeline_begun, tmp_path)
    stages = ("default-pp0of2", "default-pp1of2")
    before = [states_in(tmp_path / stage) for stage in stages]
    with pool(4) as four:
        assert told(four.run(pipeline_resumed, tmp_path)) == [True] * 4
    for stage, states in zip(stages, before, strict=True):
        assert_same_tensors(
            states, states_in(tmp_path / stage, at=look(tmp_path / stage / "rank0").commits[1].record.serial)
        )
