"""Folders of two runs of one model are never read together: a run has an id, which each of its ranks stores."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from offload.aio import IoQueue
from offload.cli.main import app
from offload.errors import StoreError
from offload.model_io.source import StoreSource
from offload.runs.inspection import inspect
from offload.swapper.store.inspection import look
from offload.swapper.store.store import Store
from tests.checkpoints.test_checkpoint_ranks import train
from tests.support.oracle import Job, assert_same_tensors, start, train_step, weights_of
from tests.support.ranks import tensor_parallel as tp
from tests.support.ranks.rank_jobs import JOBS
from tests.support.ranks.rank_pool import RankPool, pool, rank_and_size, shared_pool

DISK = ("nvme", "nvme")
JOB = JOBS["gpt2"]
GRID = Job(tp.Net, tp.one_loss, lr=3e-4)
COLUMNS = ("default-tp0of2", "default-tp1of2")
REFUSED = r"{} has the swap files of another run than \S+/{}: run id (\w+), expected (?!\1)\w+\. Folders of two runs"

Weights = dict[str, torch.Tensor]


# -- what ranks do ---------------------------------------------------------------------------------------


def begun(folder: Path, first: int) -> Weights:
    """Two steps, by data that begin at `first`."""
    engine = start(JOB, DISK, folder)
    train(engine, JOB, range(first, first + 2))
    weights = weights_of(engine)
    engine.destroy(remove=False)
    return weights


def begun_without_id(folder: Path, ranks: tuple[int, ...]) -> Weights:
    """The same, where `ranks` store no id, as older versions of the package do."""
    create = Store.create

    def older(store: Store, over: bool = False, run_id: str | None = None) -> None:
        create(store, over, None if rank_and_size()[0] in ranks else run_id)

    with mock.patch.object(Store, "create", older):
        return begun(folder, 0)


def resumed(folder: Path, resume: str = "must") -> str | Weights:
    """Starts, and returns the weights, or the words of the error."""
    try:
        engine = start(JOB, DISK, folder, resume=resume)
    except StoreError as error:
        return str(error)
    weights = weights_of(engine)
    engine.destroy(remove=False)
    return weights


def grid_begun(folder: Path, first: int) -> None:
    """Two steps of two processes that divide each weight."""
    engine = tp.start(GRID, "weights", 2, DISK, folder)
    for step in range(first, first + 2):
        train_step(engine, GRID, step)
    engine.destroy(remove=False)


def grid_resumed(folder: Path) -> str:
    try:
        tp.start(GRID, "weights", 2, DISK, folder, resume="must").destroy(remove=False)
    except StoreError as error:
        return str(error)
    return ""


# -- what is in a folder ---------------------------------------------------------------------------------


def contents(folder: Path) -> dict[Path, bytes]:
    """Returns the bytes of all files but locks, which name their last holder."""
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "lock"}


def ids(run: Path) -> list[str | None]:
    """Returns the id of each rank, which its last commit and its manifest have."""
    found = [look(folder) for folder in sorted(run.glob("rank*"))]
    for each in found:
        assert each.whole and f'"run_id": "{each.run_id}"' in (each.folder / "manifest.json").read_text()
    return [each.run_id for each in found]


def replace(folder: Path, other: Path) -> None:
    """Puts a copy of another folder in the place of `folder`."""
    shutil.rmtree(folder)
    shutil.copytree(other, folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of two ranks, at the same step, in one/default and other/default; tests copy them."""
    folder = tmp_path_factory.mktemp("runs")
    with shared_pool(2) as two:
        two.run(begun, folder / "one", 0)
        two.run(begun, folder / "other", 5)
    return folder


@pytest.fixture
def mixed(runs: Path, tmp_path: Path) -> Path:
    """The drive of the first run, with the rank 1 of the other one."""
    shutil.copytree(runs / "one", tmp_path / "mixed")
    replace(tmp_path / "mixed" / "default" / "rank1", runs / "other" / "default" / "rank1")
    return tmp_path / "mixed"


# -- two runs --------------------------------------------------------------------------------------------


def test_a_resume_refuses_ranks_of_two_runs_and_changes_nothing(
    mixed: Path, runs: Path, ranks: RankPool, tmp_path: Path
) -> None:
    before = contents(mixed)
    for message in ranks.run(resumed, mixed):
        assert re.search(REFUSED.format("rank1", "rank0"), message), message
    assert contents(mixed) == before
    replace(mixed / "default" / "rank1", runs / "one" / "default" / "rank1")
    shutil.copytree(runs / "one", tmp_path / "one")
    for weights, expected in zip(ranks.run(resumed, mixed), ranks.run(resumed, tmp_path / "one"), strict=True):
        assert_same_tensors(weights, expected)


def test_another_number_of_ranks_refuses_them_too(mixed: Path) -> None:
    before = contents(mixed)
    message = resumed(mixed)
    assert isinstance(message, str) and re.search(REFUSED.format("rank1", "rank0"), message), message
    assert contents(mixed) == before


@pytest.mark.parametrize("command", ["verify", "export", "convert"])
def test_commands_refuse_them_too(command: str, mixed: Path, tmp_path: Path) -> None:
    run = mixed / "default"
    more = {"verify": [], "export": [str(tmp_path / "out")], "convert": ["--moments", "int8"]}[command]
    result = CliRunner(env={"COLUMNS": "1000"}).invoke(app, [command, str(run), *more])
    assert result.exit_code == 2 and re.search(REFUSED.format("rank1", "rank0"), result.output), result.output
    assert f"offload inspect {run}" in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mixed"]
    shown = CliRunner(env={"COLUMNS": "1000"}).invoke(app, ["inspect", str(run)])
    for rank in inspect(run)["ranks"]:
        assert f"{rank['run_id']}, made {rank['created']}" in shown.output


def test_a_grid_refuses_columns_of_two_runs(tmp_path: Path, ranks: RankPool) -> None:
    ranks.run(grid_begun, tmp_path / "one", 0)
    ranks.run(grid_begun, tmp_path / "other", 5)
    assert {*ids(tmp_path / "one" / COLUMNS[0])} == {*ids(tmp_path / "one" / COLUMNS[1])}
    replace(tmp_path / "one" / COLUMNS[1], tmp_path / "other" / COLUMNS[1])
    before = contents(tmp_path / "one")
    for message in ranks.run(grid_resumed, tmp_path / "one"):
        assert re.search(REFUSED.format(f"{COLUMNS[1]}/rank0", f"{COLUMNS[0]}/rank0"), message), message
    with pool(4) as four:  # which would divide each column anew
        for message in four.run(grid_resumed, tmp_path / "one"):
            assert re.search(REFUSED.format(f"{COLUMNS[1]}/rank0", f"{COLUMNS[0]}/rank0"), message), message
    assert contents(tmp_path / "one") == before


# -- one run ---------------------------------------------------------------------------------------------


def test_a_run_keeps_its_id_until_it_starts_over(runs: Path, ranks: RankPool, tmp_path: Path) -> None:
    shutil.copytree(runs / "one", tmp_path / "copy")
    run = tmp_path / "copy" / "default"
    first, second = ids(run)
    assert first == second and first not in ids(runs / "other" / "default")
    ranks.run(resumed, tmp_path / "copy")
    assert ids(run) == [first] * 2
    resumed(tmp_path / "copy")
    assert ids(run) == [first], "another number of ranks goes on with the run"
    ranks.run(resumed, tmp_path / "copy")
    assert ids(run) == [first] * 2
    # A copy is of the same run: at one commit it has the same bytes.
    shutil.copytree(run, tmp_path / "again")
    replace(run / "rank1", tmp_path / "again" / "rank1")
    assert all(isinstance(each, dict) for each in ranks.run(resumed, tmp_path / "copy"))
    ranks.run(resumed, tmp_path / "copy", "restart")
    anew = ids(run)
    assert anew[0] == anew[1] != first


def test_a_conversion_is_another_run(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "one", tmp_path / "one")
    run = tmp_path / "one" / "default"
    for name in ("new", "again"):
        result = CliRunner().invoke(app, ["convert", str(run), "--moments", "int8", "--run", name])
        assert result.exit_code == 0, result.output
    found = [ids(run.parent / name) for name in ("default", "new", "again")]
    assert len({each for every in found for each in every}) == 3 and all(len({*every}) == 1 for every in found)


@pytest.mark.parametrize("without", [(0,), (1,), (0, 1)])
def test_a_run_of_an_older_version_is_read_as_before(without: tuple[int, ...], ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(begun_without_id, tmp_path, without)
    run = tmp_path / "default"
    assert [look(run / f"rank{rank}").run_id is None for rank in range(2)] == [rank in without for rank in range(2)]
    for weights, before in zip(ranks.run(resumed, tmp_path), expected, strict=True):
        assert_same_tensors(weights, before)
    assert CliRunner().invoke(app, ["verify", str(run)]).exit_code == 0
    with IoQueue() as queue:
        source = StoreSource(run, queue)
        assert (source.run_id is None) == (len(without) == 2)
        source.close()
    weights = resumed(tmp_path)  # on another number of ranks
    assert isinstance(weights, dict)
    assert_same_tensors(weights, expected[0])
