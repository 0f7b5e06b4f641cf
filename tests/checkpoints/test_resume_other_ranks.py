"""A run resumes on another number of ranks, in another grid, and among runs of both kinds."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

import offload
from offload import testing
from offload.aio import Bandwidth, IoQueue, aligned_empty
from offload.checkpoint.resharding import shards_of_scales
from offload.cli.main import app
from offload.distributed import reshard
from offload.errors import IoError, OffloadError, StoreError
from offload.layout.fingerprint import described_layouts
from offload.layout.flat_layout import ParameterSegment, SegmentShard, UnitLayout, segment_shards
from offload.layout.modes import MODES, Mode
from offload.model_io.source import StoreSource
from offload.runs.inspection import inspect
from offload.runs.verify import RunChecking
from offload.states import State
from offload.swapper.store import find_removal, rank_folders, remove_run, run_status
from offload.swapper.store.folder import RESHARDED, Lock
from offload.swapper.store.inspection import is_run, look
from offload.swapper.store.recovery import check_startable
from offload.swapper.store.store import Store
from tests.checkpoints.test_checkpoint_ranks import train
from tests.models.test_weights_in_fp32 import JOB as IN_FP32
from tests.support import models
from tests.support.drives.fault_injection import die, dies_before
from tests.support.drives.filesystems import disk
from tests.support.modules.matrix_models import MUON
from tests.support.oracle import Job, assert_same_tensors, config, dies, train_step, weights_of
from tests.support.oracle import start as start_runs
from tests.support.ranks import tensor_parallel as tp
from tests.support.ranks.rank_jobs import JOBS, language_rows_loss, rows_loss
from tests.support.ranks.rank_pool import RankPool, pool, rank_and_size, shared_pool, start

DISK, CACHED = ("nvme", "nvme"), ("cpu", "nvme")
NARROW = {"moments": "int8", "master": "bf24"}

States = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """A run that changes its number of ranks."""

    job: Job
    placement: tuple[str, str] = DISK
    options: dict[str, str] = dataclasses.field(default_factory=dict)


CASES = {
    "bf16, some frozen": Case(JOBS["mixture"]._replace(dtype="bf16"), CACHED),
    "fp32, most frozen": Case(JOBS["adapters"]),
    "8-bit moments": Case(JOBS["gpt2"]._replace(dtype="bf16"), DISK, NARROW),
    "fp16": Case(JOBS["gpt2"]._replace(dtype="fp16"), CACHED),
    "Muon": Case(MUON._replace(dtype="bf16")),
    "a router in fp32": Case(IN_FP32),
    "torch's own": Case(JOBS["gpt2"]._replace(optimizer="torch.optim.NAdam", clip=0.0)),
}
PLAIN = CASES["bf16, some frozen"]


def states_in(run: Path, at: int | None = None) -> States:
    """Returns every state of every parameter in a commit of a run, or of a column, put together from all ranks."""
    states: States = {}
    looked = [look(folder) for folder in rank_folders(run)]  # without a lock, which an engine may have
    with IoQueue() as queue, contextlib.closing(StoreSource(run, queue, looked, at)) as source:
        mode, size = MODES[source.description["mode"]], int(source.description["world_size"])
        for unit, layout in enumerate(described_layouts(source.description, part=True)):
            for segment in layout.segments:
                dtypes = layout.mode_in(mode).states
                for state in dtypes if segment.trainable else (State.WEIGHT,):
                    parts = [b""]
                    for shard in _shards(layout, size, segment, state, mode):
                        itemsize = dtypes[state].itemsize
                        buffer = aligned_empty(shard.numel * itemsize)
                        source.read(shard.rank, unit, state, shard.start * itemsize, buffer).wait()
                        parts.append(bytes(buffer))
                    if any(parts):
                        states[f"{segment.name} {state.value}"] = torch.frombuffer(
                            bytearray(b"".join(parts)), dtype=torch.uint8
                        )
    return states


def _shards(layout: UnitLayout, size: int, segment: ParameterSegment, state: State, mode: Mode) -> list[SegmentShard]:
    if state is State.PACKED:
        return [SegmentShard(segment.packed_rank, 0, segment.packed.start, len(segment.packed))]
    if state is State.SCALES:
        part = mode.part(state, segment.start, segment.stop)
        scales = segment._replace(start=part.start, numel=len(part))
        return list(shards_of_scales(layout, size, scales, mode))
    if state in mode.partial and layout.is_matrix(segment):
        return []
    return list(segment_shards(layout, size, segment))


# -- what ranks do ---------------------------------------------------------------------------------------


def begun(case: Case, folder: Path) -> None:
    """Two steps in swap files, and the same as a checkpoint."""
    engine = start(case.job, case.placement, folder / "swap", **case.options)
    train(engine, case.job, range(2))
    engine.save_checkpoint(folder / "saved")
    engine.destroy(remove=False)


def resumed(case: Case, folder: Path) -> tuple[States | None, list[float], States, tuple[str, ...]]:
    """Returns the states that the run has now, and a step from there: losses, weights; and what was said."""
    torch.manual_seed(99)
    model = case.job.model()
    options = config(case.job, case.placement, folder / "swap", resume="must", **case.options)
    engine = offload.initialize(model=model, config=options)[0]
    assert engine.global_steps == 2
    engine.mean(0.0)  # all have started
    states = states_in(folder / "swap" / "default") if engine.global_rank == 0 else None
    losses, weights = train(engine, case.job, range(2, 3)), weights_of(engine)
    notices = engine.notices
    engine.destroy(remove=False)
    return states, losses, weights, notices


def loaded(case: Case, folder: Path) -> tuple[list[float], States]:
    """Returns losses and weights of the same step after a load of the checkpoint."""
    engine = start(case.job, case.placement, folder / "other", **case.options)
    engine.load_checkpoint(folder / "saved")
    losses, weights = train(engine, case.job, range(2, 3)), weights_of(engine)
    engine.destroy(remove=True)
    return losses, weights


def check(case: Case, folder: Path, run_before: Callable[..., Any], run_after: Callable[..., Any]) -> None:
    """Compares the states before and after, and the step after with that of the checkpoint, bit for bit."""
    run_before(begun, case, folder)
    before = states_in(folder / "swap" / "default")
    after = run_after(resumed, case, folder)
    for (states, losses, weights, notices), other_run in zip(after, run_after(loaded, case, folder), strict=True):
        if states is not None:
            assert_same_tensors(before, states)
        assert losses == other_run[0]
        assert_same_tensors(weights, other_run[1])
        assert any(notice.startswith("resharded from ") for notice in notices)
    names = sorted(path.name for path in (folder / "swap" / "default").iterdir())
    assert names == [f"rank{rank}" for rank in range(len(after))]


def alone(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Calls `function` as the only rank."""
    return [function(*arguments)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("more", [True, False], ids=["1 to 2", "2 to 1"])
def test_another_number_of_ranks_goes_on_with_the_same_states(
    name: str, more: bool, ranks: RankPool, tmp_path: Path
) -> None:
    both = (alone, ranks.run) if more else (ranks.run, alone)
    check(CASES[name], tmp_path, *both)


def with_whole_batches(case: Case) -> Case:
    """Returns the case with a loss of all rows on every rank: four rows are none of the third of three ranks."""
    whole = {language_rows_loss: models.GPT2.loss, rows_loss: models.MIXTURE.loss}
    return dataclasses.replace(case, job=case.job._replace(loss=whole.get(case.job.loss, case.job.loss)))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_become_three(name: str, ranks: RankPool, tmp_path: Path) -> None:
    """Borders between partitions then lie within those of before."""
    with pool(3) as three:
        check(with_whole_batches(CASES[name]), tmp_path, ranks.run, three.run)


def on_two_drives(case: Case, folder: Path, function: Callable[..., Any]) -> Any:
    """Calls `function` with swap files on two drives, whose speeds are not measured."""
    paths = [str(folder / "swap"), str(folder / "swap2")]
    with pytest.MonkeyPatch.context() as patch:
        testing.replace(patch, "drives.measured", lambda folders, nbytes: [Bandwidth(1e9, 1e9) for _ in folders])
        return function(dataclasses.replace(case, options={"nvme_path": paths}), folder)


def test_each_of_several_drives_gets_its_part(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(on_two_drives, PLAIN, tmp_path, begun)
    before = states_in(tmp_path / "swap" / "default")
    with pytest.raises(StoreError, match="is stored on 2 drives"):
        resumed(PLAIN, tmp_path)
    states = on_two_drives(PLAIN, tmp_path, resumed)[0]
    assert_same_tensors(before, states)
    for drive in ("swap", "swap2"):
        assert [path.name for path in (tmp_path / drive / "default").iterdir()] == ["rank0"]


# -- kills -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks; tests copy it."""
    folder = tmp_path_factory.mktemp("of two")
    with shared_pool(2) as two:
        two.run(begun, PLAIN, folder)
    return folder


@pytest.fixture
def run(of_two: Path, tmp_path: Path) -> Path:
    """The folder of a run of two ranks, in `tmp_path`/swap."""
    shutil.copytree(of_two / "swap", tmp_path / "swap")
    return tmp_path / "swap" / "default"


UNDECIDED: dict[str, Callable[[], None]] = {
    "states are written": dies_before(reshard.Store, "commit"),
    "the new folder is complete": dies_before(reshard, "write_durably"),
}
DECIDED: dict[str, Callable[[], None]] = {
    "the note is there": dies_before(reshard, "_move", 1),
    "no rank 0 is in its place": dies_before(reshard, "_move", 2),
    "rank 1 is still there": dies_before(reshard, "_move", 3),
    "all have their names": dies_before(reshard, "sync_folder", 1),
    "the note is gone": dies_before(reshard, "sync_folder", 2),
    "one old folder is deleted": dies_before(reshard, "remove_files", 2),
}


def killed(folder: Path, moment: str) -> None:
    logging.disable(logging.CRITICAL)
    {**UNDECIDED, **DECIDED}[moment]()
    resumed(PLAIN, folder)


@pytest.mark.sample(1)
@pytest.mark.parametrize("moment", [*UNDECIDED, *DECIDED])
def test_a_kill_leaves_the_run_before_or_the_one_after(moment: str, of_two: Path, run: Path, tmp_path: Path) -> None:
    """Another start then goes on, with the states that there were."""
    states = states_in(of_two / "swap" / "default")
    dies(killed, tmp_path, moment)
    assert run_status([tmp_path / "swap"], "default").exists
    if moment in UNDECIDED:
        assert inspect(run)["leftovers"] == [str(run / "new-rank0")]
        assert_same_tensors(states, states_in(run))
    result = resumed(PLAIN, tmp_path)
    assert_same_tensors(states, result[0] or {})
    assert any(notice.startswith("resharded") for notice in result[3]) == (moment in UNDECIDED)
    assert [path.name for path in run.iterdir()] == ["rank0"]


def test_commands_name_a_switch_that_was_interrupted(run: Path, tmp_path: Path) -> None:
    dies(killed, tmp_path, "no rank 0 is in its place")
    assert (run / RESHARDED).is_file()
    aside = [str(run / "new-rank0"), str(run / "old-rank0")]
    assert inspect(run)["kind"] == "run" and inspect(run)["leftovers"] == [], "the run is among them"
    with pytest.raises(StoreError, match=r'about to change its number of ranks.*"resume": "auto"'):
        RunChecking(run)
    with pytest.raises(StoreError, match="another start is changing the number of ranks"):
        check_startable([run / "rank0"], over=True)
    assert {*map(Path, aside), run / "rank1"} == set(find_removal(run).folders) and not find_removal(run).strangers
    # No commit is in its place now, and the run is there all the same.
    (run / "rank1").rename(run / "old-rank1")
    assert run_status([tmp_path / "swap"], "default").exists and is_run(run)
    remove_run(run)
    assert not run.exists()


def test_an_error_after_the_note_is_made_up_for_by_the_next_start(
    of_two: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        testing.replace(patch, "folder.rename", _fail)
        with pytest.raises(IoError, match="a file"):
            resumed(PLAIN, tmp_path)
    states, _, _, notices = resumed(PLAIN, tmp_path)
    assert_same_tensors(states_in(of_two / "swap" / "default"), states or {})
    assert not any(notice.startswith("resharded") for notice in notices)


# -- errors ----------------------------------------------------------------------------------------------


def refused(folder: Path, match: str) -> None:
    """Checks that one rank does not go on, for a reason, and that the run of two is as it was."""
    run = folder / "swap" / "default"
    names = sorted(run.rglob("*"))
    with pytest.raises((StoreError, IoError), match=match):
        resumed(PLAIN, folder)
    assert sorted(run.rglob("*")) == names


def test_what_cannot_be_read_is_an_error_and_changes_nothing(of_two: Path, run: Path, tmp_path: Path) -> None:
    (run / "rank1").rename(tmp_path / "away")
    refused(tmp_path, rf"rank 0 does not see .* in {run}/rank1: .*resume with 2 ranks; or call save_checkpoint")
    (tmp_path / "away").rename(run / "rank1")
    with Lock(run / "rank1"):
        refused(tmp_path, "rank1 is in use by process")
    with (run / "rank1" / "states").open("r+b") as states:
        kept = bytearray(states.read())
        states.seek(0)
        states.write(bytes(255 - byte for byte in kept))
    refused(tmp_path, "is damaged or cannot be read, and stays as it is: .*2 ranks may resume the commit before")
    (run / "rank1" / "states").write_bytes(kept)
    result = resumed(PLAIN, tmp_path)
    assert_same_tensors(states_in(of_two / "swap" / "default"), result[0] or {})


def test_another_model_is_told_before_anything_is_written(run: Path, tmp_path: Path) -> None:
    names = sorted(run.rglob("*"))
    for other_job, match in (
        (dataclasses.replace(PLAIN, options=NARROW), "or convert the run"),
        (dataclasses.replace(PLAIN, job=PLAIN.job._replace(dtype="fp32")), "resume in the dtype that the run had"),
    ):
        with pytest.raises(StoreError, match=match):
            resumed(other_job, tmp_path)
    assert sorted(run.rglob("*")) == names


def test_a_full_drive_keeps_the_run(of_two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = states_in(of_two / "swap" / "default")
    nbytes = sum(path.stat().st_blocks * 512 for path in of_two.rglob("swap/**/*"))
    with disk(tmp_path, nbytes + nbytes // 2) as place:
        shutil.copytree(of_two / "swap", place / "swap")
        run = place / "swap" / "default"
        refused(place, r"beside the present ones, .* free; free some room, or resume with 2 ranks")
        # Others take the room between the check and the writes.
        testing.replace(monkeypatch, "disk.shortage_of_store", lambda *_: None)
        refused(place, "No space left on device")
        assert_same_tensors(states, states_in(run))


def fails_on_one(folder: Path, name: str, fault: Callable[..., Any]) -> str:
    """Returns this rank's error of a start in which `fault` is in the place of a function on rank 1."""
    with pytest.MonkeyPatch.context() as patch:
        if rank_and_size()[0]:
            patch.setattr(f"offload.distributed.reshard.{name}", fault, raising=False)
        try:
            resumed(PLAIN, folder)
        except (StoreError, IoError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def _fail(*_: Any) -> None:
    raise IoError("a file", 0, 10, 5, "write")


def test_an_error_on_one_rank_keeps_the_run_on_all(ranks: RankPool, tmp_path: Path) -> None:
    begun(PLAIN, tmp_path)
    run = tmp_path / "swap" / "default"
    states = states_in(run)
    zero, rank1 = ranks.run(fails_on_one, tmp_path, "Store.wrote", _fail)
    assert zero.startswith("StoreError: rank 1 could not give the run another number of ranks") and "a file" in zero
    assert rank1.startswith("IoError")
    # On another machine the folder of that name is of another store.
    for message in ranks.run(fails_on_one, tmp_path, "store_id", str):
        assert f"rank 1 does not see the swap files of the run in {run}/rank0: " in message
    # Another run has its second drive where the new rank 1 would be.
    (run / "rank1").mkdir()
    (run / "rank1" / "manifest.json").write_text('{"id": "other", "drive": 1, "drives": ["/elsewhere", "/here"]}')
    for message in ranks.run(fails_on_one, tmp_path, "_fails_nowhere", _fail):
        assert f"{run}/rank1 holds drive 1 of a run whose first drive is /elsewhere" in message
    shutil.rmtree(run / "rank1")
    assert [path.name for path in run.iterdir()] == ["rank0"]
    assert_same_tensors(states, resumed(PLAIN, tmp_path)[0] or {})


JOB = Job(tp.Net, tp.one_loss, lr=3e-4)
COLUMNS = ("default-tp0of2", "default-tp1of2")


def start_ranks(folder: Path, **options: Any) -> offload.Engine:
    return tp.start(JOB, "weights", 2, DISK, folder, **options)


def killed_beside_an_edit(folder: Path) -> None:
    """Process 1 commits the second step and edits, and process 0 is killed before it commits; then process 1 is too."""
    engine, edited = start_ranks(folder), folder / "edited"
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


def resumed_ranks(folder: Path, step: int) -> tuple[str, ...]:
    engine = start_ranks(folder, resume="must")
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
        two.run_to_the_death(killed_beside_an_edit, folder)
    assert (folder / COLUMNS[1] / "rank0" / "undo").exists()
    newest = [look(folder / column / "rank0").whole[0].record.step for column in COLUMNS]
    assert newest == [1, 2], "one process is ahead"
    return folder


@pytest.fixture(scope="module")
def alike(edited: Path, tmp_path_factory: pytest.TempPathFactory) -> list[States]:
    """States of both columns after a resume with as many ranks as before."""
    folder = tmp_path_factory.mktemp("alike") / "same"
    shutil.copytree(edited, folder)
    with shared_pool(2) as two:
        assert told(two.run(resumed_ranks, folder, 1)) == [False, False]
    return [states_in(folder / column) for column in COLUMNS]


@pytest.mark.slow
def test_other_ranks_go_on_from_the_last_step_of_all(edited: Path, alike: list[States], tmp_path: Path) -> None:
    """The states are those of a resume with as many as before, also where an edit has written over them.

    A read of the commit before takes what the edit has set aside.
    """
    shutil.copytree(edited, tmp_path / "other")
    shutil.copytree(edited / COLUMNS[1], tmp_path / "read")
    expected = alike[1]
    assert_same_tensors(expected, states_in(tmp_path / "read", at=2))
    (tmp_path / "read" / "rank0" / "undo").unlink()
    with pytest.raises(AssertionError):
        assert_same_tensors(expected, states_in(tmp_path / "read", at=2))
    with shared_pool(4) as four:
        assert told(four.run(resumed_ranks, tmp_path / "other", 1)) == [True] * 4
    for column, before in zip(COLUMNS, alike, strict=True):
        assert len(before) > 20
        assert_same_tensors(before, states_in(tmp_path / "other" / column))
        assert [each.name for each in rank_folders(tmp_path / "other" / column)] == ["rank0", "rank1"]
    with shared_pool(2) as two:
        assert told(two.run(resumed_ranks, tmp_path / "other", 1)) == [True, True]
    for column, before in zip(COLUMNS, alike, strict=True):
        assert_same_tensors(before, states_in(tmp_path / "other" / column))


def killed_between(folder: Path) -> None:
    """Process 0 has switched its column, and process 1 is killed before it does."""
    if rank_and_size()[0] == 1:
        reshard.carry_out = lambda *_: die()
    with contextlib.suppress(OffloadError):
        start_ranks(folder, resume="must")
    die()


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_kill_between_two_columns_leaves_a_run_for_either_number(
    ranks: int, edited: Path, alike: list[States], tmp_path: Path
) -> None:
    shutil.copytree(edited, tmp_path / "other")
    with pool(4) as four:
        four.run_to_the_death(killed_between, tmp_path / "other")
    assert [len(rank_folders(tmp_path / "other" / column)) for column in COLUMNS] == [2, 1]
    with shared_pool(ranks) as other_pool:
        assert told(other_pool.run(resumed_ranks, tmp_path / "other", 1)).count(True) == ranks // 2
    for column, before in zip(COLUMNS, alike, strict=True):
        assert_same_tensors(before, states_in(tmp_path / "other" / column))


RUNS_JOB = JOBS["gpt2"]
REFUSED = r"{} has the swap files of another run than \S+/{}: run id (\w+), expected (?!\1)\w+\. Folders of two runs"

# -- what ranks do ---------------------------------------------------------------------------------------


def begun_runs(folder: Path, first: int) -> States:
    """Two steps, by data that begin at `first`."""
    engine = start_runs(RUNS_JOB, DISK, folder)
    train(engine, RUNS_JOB, range(first, first + 2))
    weights = weights_of(engine)
    engine.destroy(remove=False)
    return weights


def begun_without_id(folder: Path, ranks: tuple[int, ...]) -> States:
    """The same, where `ranks` store no id, as older versions of the package do."""
    create = Store.create

    def older(store: Store, over: bool = False, run_id: str | None = None) -> None:
        create(store, over, None if rank_and_size()[0] in ranks else run_id)

    with mock.patch.object(Store, "create", older):
        return begun_runs(folder, 0)


def resumed_runs(folder: Path, resume: str = "must") -> str | States:
    """Starts, and returns the weights, or the words of the error."""
    try:
        engine = start_runs(RUNS_JOB, DISK, folder, resume=resume)
    except StoreError as error:
        return str(error)
    weights = weights_of(engine)
    engine.destroy(remove=False)
    return weights


def grid_begun(folder: Path, first: int) -> None:
    """Two steps of two processes that divide each weight."""
    engine = start_ranks(folder)
    for step in range(first, first + 2):
        train_step(engine, JOB, step)
    engine.destroy(remove=False)


def grid_resumed(folder: Path) -> str:
    try:
        start_ranks(folder, resume="must").destroy(remove=False)
    except StoreError as error:
        return str(error)
    return ""


# -- what is in a folder ---------------------------------------------------------------------------------


def contents(folder: Path) -> dict[Path, bytes]:
    """Returns the bytes of all files but locks, which name their last holder."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "lock"}


def ids(run: Path) -> list[str | None]:
    """Returns the id of each rank, which its last commit and its manifest have."""
    rank_files = [look(folder) for folder in sorted(run.glob("rank*"))]
    for files in rank_files:
        assert files.whole and f'"run_id": "{files.run_id}"' in (files.folder / "manifest.json").read_text()
    return [manifest.run_id for manifest in rank_files]


def replace(folder: Path, source: Path) -> None:
    """Puts a copy of another folder in the place of `folder`."""
    shutil.rmtree(folder)
    shutil.copytree(source, folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of two ranks, at the same step, in one/default and other/default; tests copy them."""
    folder = tmp_path_factory.mktemp("runs")
    with shared_pool(2) as two:
        two.run(begun_runs, folder / "one", 0)
        two.run(begun_runs, folder / "other", 5)
    return folder


@pytest.fixture
def mixed(runs: Path, tmp_path: Path) -> Path:
    """The drive of the first run, with the rank 1 of the other one."""
    shutil.copytree(runs / "one", tmp_path / "mixed")
    replace(tmp_path / "mixed" / "default" / "rank1", runs / "other" / "default" / "rank1")
    return tmp_path / "mixed"


# -- two runs --------------------------------------------------------------------------------------------


def test_a_resume_refuses_ranks_of_two_runs_and_changes_nothing(mixed: Path, runs: Path, ranks: RankPool) -> None:
    before = contents(mixed)
    for message in ranks.run(resumed_runs, mixed):
        assert re.search(REFUSED.format("rank1", "rank0"), message), message
    assert contents(mixed) == before
    replace(mixed / "default" / "rank1", runs / "one" / "default" / "rank1")
    assert all(isinstance(found, dict) for found in ranks.run(resumed_runs, mixed))


def test_commands_refuse_them_too(mixed: Path, tmp_path: Path) -> None:
    run = mixed / "default"
    for command, more in (("verify", []), ("export", [str(tmp_path / "out")]), ("convert", ["--moments", "int8"])):
        result = CliRunner(env={"COLUMNS": "1000"}).invoke(app, [command, str(run), *more])
        assert result.exit_code == 2 and re.search(REFUSED.format("rank1", "rank0"), result.output), result.output
        assert f"offload inspect {run}" in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mixed"]
    shown = CliRunner(env={"COLUMNS": "1000"}).invoke(app, ["inspect", str(run)])
    for rank in inspect(run)["ranks"]:
        assert f"{rank['run_id']}, made {rank['created']}" in shown.output


@pytest.mark.slow
def test_a_grid_refuses_columns_of_two_runs(tmp_path: Path, ranks: RankPool) -> None:
    ranks.run(grid_begun, tmp_path / "one", 0)
    ranks.run(grid_begun, tmp_path / "other", 5)
    assert {*ids(tmp_path / "one" / COLUMNS[0])} == {*ids(tmp_path / "one" / COLUMNS[1])}
    replace(tmp_path / "one" / COLUMNS[1], tmp_path / "other" / COLUMNS[1])
    before = contents(tmp_path / "one")
    for message in ranks.run(grid_resumed, tmp_path / "one"):
        assert re.search(REFUSED.format(f"{COLUMNS[1]}/rank0", f"{COLUMNS[0]}/rank0"), message), message
    with shared_pool(4) as four:  # which would divide each column anew
        for message in four.run(grid_resumed, tmp_path / "one"):
            assert re.search(REFUSED.format(f"{COLUMNS[1]}/rank0", f"{COLUMNS[0]}/rank0"), message), message
    assert contents(tmp_path / "one") == before


# -- one run ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_keeps_its_id_until_it_starts_over(runs: Path, ranks: RankPool, tmp_path: Path) -> None:
    shutil.copytree(runs / "one", tmp_path / "copy")
    run = tmp_path / "copy" / "default"
    first, second = ids(run)
    assert first == second and first not in ids(runs / "other" / "default")
    resumed_runs(tmp_path / "copy")
    assert ids(run) == [first], "another number of ranks goes on with the run"
    ranks.run(resumed_runs, tmp_path / "copy")
    assert ids(run) == [first] * 2
    # A copy is of the same run: at one commit it has the same bytes.
    shutil.copytree(run, tmp_path / "again")
    replace(run / "rank1", tmp_path / "again" / "rank1")
    assert all(isinstance(rank, dict) for rank in ranks.run(resumed_runs, tmp_path / "copy"))
    assert ids(run) == [first] * 2
    ranks.run(resumed_runs, tmp_path / "copy", "restart")
    anew = ids(run)
    assert anew[0] == anew[1] != first


def test_a_conversion_is_another_run(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "one", tmp_path / "one")
    run = tmp_path / "one" / "default"
    for name in ("new", "again"):
        result = CliRunner().invoke(app, ["convert", str(run), "--moments", "int8", "--run", name])
        assert result.exit_code == 0, result.output
    run_ids = [ids(run.parent / name) for name in ("default", "new", "again")]
    assert len({each for every in run_ids for each in every}) == 3 and all(len({*every}) == 1 for every in run_ids)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("without", [(1,), (0, 1)])
def test_a_run_of_an_older_version_is_read_as_before(without: tuple[int, ...], ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(begun_without_id, tmp_path, without)
    run = tmp_path / "default"
    assert [look(run / f"rank{rank}").run_id is None for rank in range(2)] == [rank in without for rank in range(2)]
    for weights, before in zip(ranks.run(resumed_runs, tmp_path), expected, strict=True):
        assert_same_tensors(weights, before)
    assert CliRunner().invoke(app, ["verify", str(run)]).exit_code == 0
    with IoQueue() as queue:
        source = StoreSource(run, queue)
        assert (source.run_id is None) == (len(without) == 2)
        source.close()
    weights = resumed_runs(tmp_path)  # on another number of ranks
    assert isinstance(weights, dict)
    assert_same_tensors(weights, expected[0])
