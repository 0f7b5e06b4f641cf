"""A run in swap files resumes with another number of ranks: the same states, and nothing is lost on the way."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import testing
from offload.aio import Bandwidth, IoQueue, aligned_empty
from offload.checkpoint.resharding import shards_of_scales
from offload.distributed import reshard
from offload.errors import IoError, StoreError
from offload.layout.fingerprint import described_layouts
from offload.layout.flat_layout import ParameterSegment, SegmentShard, UnitLayout, segment_shards
from offload.layout.modes import MODES, Mode
from offload.model_io.source import StoreSource
from offload.runs.inspection import inspect
from offload.runs.verify import RunChecking
from offload.states import State
from offload.swapper.store import find_removal, rank_folders, remove_run, run_status, store
from offload.swapper.store.folder import RESHARDED, Lock
from offload.swapper.store.inspection import is_run, look
from offload.swapper.store.recovery import check_startable
from tests.checkpoints.test_checkpoint_ranks import train
from tests.models.test_weights_in_fp32 import JOB as IN_FP32
from tests.support import models
from tests.support.drives.fault_injection import die
from tests.support.drives.filesystems import disk
from tests.support.modules.matrix_models import MUON
from tests.support.oracle import Job, assert_same_tensors, config, dies, weights_of
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


def states_in(run: Path) -> States:
    """Returns every state of every parameter in the last commit of a run, put together from all ranks."""
    found: States = {}
    with IoQueue() as queue:
        source = StoreSource(run, queue, [look(folder) for folder in rank_folders(run)])
        mode, size = MODES[source.description["mode"]], int(source.description["world_size"])
        for unit, layout in enumerate(described_layouts(source.description)):
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
                        found[f"{segment.name} {state.value}"] = torch.frombuffer(
                            bytearray(b"".join(parts)), dtype=torch.uint8
                        )
        source.close()
    return found


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
    for (states, losses, weights, notices), other in zip(after, run_after(loaded, case, folder), strict=True):
        if states is not None:
            assert_same_tensors(before, states)
        assert losses == other[0]
        assert_same_tensors(weights, other[1])
        assert any(notice.startswith("resharded from ") for notice in notices)
    names = sorted(path.name for path in (folder / "swap" / "default").iterdir())
    assert names == [f"rank{rank}" for rank in range(len(after))]


def alone(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Calls `function` as the only rank."""
    return [function(*arguments)]


@pytest.mark.sample(2)
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


def before(owner: Any, name: str, call: int = 1) -> Callable[[], None]:
    """Returns a function after which the `call`th call of `owner.name` kills this process."""

    def install() -> None:
        real, left = getattr(owner, name), [call]

        def counted(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                die()
            return real(*arguments, **named)

        setattr(owner, name, counted)

    return install


UNDECIDED: dict[str, Callable[[], None]] = {
    "states are written": before(reshard.Store, "commit"),
    "the new folder is complete": before(reshard, "write_durably"),
}
DECIDED: dict[str, Callable[[], None]] = {
    "the note is there": before(reshard, "_move", 1),
    "no rank 0 is in its place": before(reshard, "_move", 2),
    "rank 1 is still there": before(reshard, "_move", 3),
    "all have their names": before(reshard, "sync_folder", 1),
    "the note is gone": before(reshard, "sync_folder", 2),
    "one old folder is deleted": before(reshard, "remove_files", 2),
}


def killed(folder: Path, moment: str) -> None:
    logging.disable(logging.CRITICAL)
    {**UNDECIDED, **DECIDED}[moment]()
    resumed(PLAIN, folder)


@pytest.mark.sample(2)
@pytest.mark.parametrize("moment", [*UNDECIDED, *DECIDED])
def test_a_kill_leaves_the_run_before_or_the_one_after(moment: str, of_two: Path, run: Path, tmp_path: Path) -> None:
    """Another start then goes on, with the states that there were."""
    states = states_in(of_two / "swap" / "default")
    dies(killed, tmp_path, moment)
    assert run_status([tmp_path / "swap"], "default").exists
    if moment in UNDECIDED:
        assert inspect(run)["leftovers"] == [str(run / "new-rank0")]
        assert_same_tensors(states, states_in(run))
    found = resumed(PLAIN, tmp_path)
    assert_same_tensors(states, found[0] or {})
    assert any(notice.startswith("resharded") for notice in found[3]) == (moment in UNDECIDED)
    assert [path.name for path in run.iterdir()] == ["rank0"]


def test_after_a_kill_before_the_switch_as_many_ranks_as_before_go_on(
    of_two: Path, run: Path, ranks: RankPool, tmp_path: Path
) -> None:
    dies(killed, tmp_path, "the new folder is complete")
    found = ranks.run(resumed, PLAIN, tmp_path)
    assert_same_tensors(states_in(of_two / "swap" / "default"), found[0][0])
    assert not any(notice.startswith("resharded") for _, _, _, notices in found for notice in notices)
    assert sorted(path.name for path in run.iterdir()) == ["rank0", "rank1"]


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
    found = resumed(PLAIN, tmp_path)
    assert_same_tensors(states_in(of_two / "swap" / "default"), found[0] or {})


def test_another_model_is_told_before_anything_is_written(run: Path, tmp_path: Path) -> None:
    names = sorted(run.rglob("*"))
    for other, match in (
        (dataclasses.replace(PLAIN, options=NARROW), "or convert the run"),
        (dataclasses.replace(PLAIN, job=PLAIN.job._replace(dtype="fp32")), "resume in the dtype that the run had"),
    ):
        with pytest.raises(StoreError, match=match):
            resumed(other, tmp_path)
    assert sorted(run.rglob("*")) == names


def test_a_full_drive_keeps_the_run(of_two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = states_in(of_two / "swap" / "default")
    nbytes = sum(path.stat().st_blocks * 512 for path in of_two.rglob("swap/**/*"))
    with disk(tmp_path, nbytes + nbytes // 2) as place:
        shutil.copytree(of_two / "swap", place / "swap")
        run = place / "swap" / "default"
        refused(place, r"beside the present ones, .* free; free some room, or resume with 2 ranks")
        # Others take the room between the check and the writes.
        for module in (reshard, store):
            monkeypatch.setattr(module, "find_shortage", lambda *_: None)
        monkeypatch.setattr(store, "find_drive_shortage", lambda *_: None)
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
    zero, one = ranks.run(fails_on_one, tmp_path, "Store.wrote", _fail)
    assert zero.startswith("StoreError: rank 1 could not give the run another number of ranks") and "a file" in zero
    assert one.startswith("IoError")
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
