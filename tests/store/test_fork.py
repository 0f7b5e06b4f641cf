"""Branches of a run: kept steps and forks have the bits of their commit, and cost their origin nothing."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from offload import testing
from offload.cli.main import app
from offload.errors import IoError, StoreError
from tests.support.drives.fault_injection import die
from tests.support.drives.filesystems import disk
from tests.support.models import GPT2, LORA
from tests.support.oracle import Job, assert_same_tensors, dies, run, start, train_step, weights_of
from tests.support.ranks import rank_pool

DISK = ("nvme", "nvme")
JOB = GPT2._replace(steps=5)


def until(folder: Path, steps: int, job: Job = JOB, begin: Any = start, **options: Any) -> dict[str, Any]:
    """Trains to a step, closes the engine and leaves its files; returns its weights."""
    engine = begin(job, DISK, folder, **options)
    for step in range(engine.global_steps, steps):
        train_step(engine, job, step)
    weights = weights_of(engine)
    engine.destroy(remove=False)
    return weights


def command(*words: object) -> Any:
    return CliRunner().invoke(app, list(map(str, words)))


def contents(run_folder: Path) -> dict[str, str]:
    """The digest of each file of a run but of locks."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(run_folder.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


@pytest.mark.parametrize("job", [JOB, LORA._replace(steps=5)], ids=["trained", "frozen beside trained"])
def test_a_fork_goes_on_as_its_origin_does(job: Job, tmp_path: Path) -> None:
    unbroken = run(job, DISK, tmp_path / "unbroken")
    until(tmp_path, 3, job)
    before = contents(tmp_path / "default")
    forked = command("fork", tmp_path / "default", "branch", "--json")
    assert forked.exit_code == 0, forked.output
    assert json.loads(forked.stdout)["step"] == 3
    assert contents(tmp_path / "default") == before
    assert command("verify", tmp_path / "branch").exit_code == 0
    assert_same_tensors(until(tmp_path, 5, job, run="branch", resume="must"), unbroken.weights)
    assert contents(tmp_path / "default") == before, "the branch has trained in files of its own"
    assert_same_tensors(until(tmp_path, 5, job, resume="must"), unbroken.weights)


@pytest.mark.parametrize("gone", [(), ("commit",), ("commit", "blob.0", "blob.1")])
def test_a_fork_without_its_records_is_damaged_and_no_interrupted_start(gone: tuple[str, ...], tmp_path: Path) -> None:
    """A fork has one commit, as a start that is interrupted in its first one may have."""
    until(tmp_path, 3)
    assert command("fork", tmp_path / "default", "branch").exit_code == 0
    rank = tmp_path / "branch" / "rank0"
    (rank / "commit").write_bytes(b"cut")
    for name in gone:
        (rank / name).unlink(missing_ok=True)
    before = contents(tmp_path / "branch")
    words = "no commit record with a valid checksum"
    if gone:
        words = f"{re.escape(str(rank))}/commit is missing.*`offload rm "
    for resume in ("auto", "must", "never"):
        with pytest.raises(StoreError, match=f"{words}|did not end"):
            until(tmp_path, 4, run="branch", resume=resume)
    assert contents(tmp_path / "branch") == before
    assert command("verify", tmp_path / "branch").exit_code == 1
    assert json.loads(command("inspect", tmp_path / "branch", "--json").stdout)["ranks"][0]["damaged"]
    assert command("rm", tmp_path / "branch", "--yes").exit_code == 0 and not rank.exists()


def test_each_kept_step_can_be_forked(tmp_path: Path) -> None:
    unbroken = run(JOB, DISK, tmp_path / "unbroken")
    weights = {}
    engine = start(JOB, DISK, tmp_path, keep_every=2)
    for step in range(5):
        train_step(engine, JOB, step)
        weights[step + 1] = weights_of(engine)
    engine.destroy(remove=True)
    assert {path.name for path in tmp_path.iterdir()} >= {"default@2", "default@4"}
    rows = json.loads(command("log", tmp_path / "default", "--json").stdout)
    assert [(row["run"], row["step"], row["kept"]) for row in rows] == [("default@2", 2, True), ("default@4", 4, True)]
    for step in (2, 4):
        assert command("fork", tmp_path / f"default@{step}", f"from-{step}").exit_code == 0
        resumed = start(JOB, DISK, tmp_path, run=f"from-{step}", resume="must")
        assert_same_tensors(weights_of(resumed), weights[step])
        resumed.destroy(remove=False)
        assert_same_tensors(until(tmp_path, 5, run=f"from-{step}", resume="must"), unbroken.weights)
    words = command("log", tmp_path / "default@2").stdout
    assert "from default@2 at step 2" in words


def test_two_drives_are_forked_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    testing.replace(monkeypatch, "size.stripe", 4096)
    drives = [str(tmp_path / "a"), str(tmp_path / "b")]
    unbroken = until(tmp_path, 4, nvme_path=drives, keep_every=3)
    assert command("fork", tmp_path / "a" / "default@3", "branch").exit_code == 0
    assert (tmp_path / "b" / "branch" / "rank0" / "states").stat().st_size > 0
    assert_same_tensors(until(tmp_path, 4, nvme_path=drives, run="branch", resume="must"), unbroken)


def _dies_while_keeping(folder: Path) -> None:
    testing.replace(pytest.MonkeyPatch(), "store.copy_range", die)
    until(folder, 4, keep_every=3)


def test_a_kill_while_a_step_is_kept_costs_nothing(tmp_path: Path) -> None:
    unbroken = run(JOB, DISK, tmp_path / "unbroken")
    dies(_dies_while_keeping, tmp_path)
    assert_same_tensors(until(tmp_path, 5, keep_every=3, resume="must"), unbroken.weights)
    assert command("fork", tmp_path / "default@3", "branch").exit_code == 0, "the resumed run has kept it"
    assert_same_tensors(until(tmp_path, 5, run="branch", resume="must"), unbroken.weights)


def _dies_while_forking(folder: Path) -> None:
    testing.replace(pytest.MonkeyPatch(), "store.copy_range", die)
    command("fork", folder / "default", "branch")


def test_a_fork_that_was_killed_is_made_again(tmp_path: Path) -> None:
    weights = until(tmp_path, 2)
    before = contents(tmp_path / "default")
    dies(_dies_while_forking, tmp_path)
    assert contents(tmp_path / "default") == before
    assert command("fork", tmp_path / "default", "branch").exit_code == 0
    assert_same_tensors(until(tmp_path, 2, run="branch", resume="must"), weights)


def test_a_full_drive_costs_the_copy_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise IoError("states", 0, 4096, errno.ENOSPC, "copy")

    unbroken = run(JOB, DISK, tmp_path / "unbroken")
    testing.replace(monkeypatch, "store.copy_range", full)
    assert_same_tensors(until(tmp_path, 5, keep_every=2), unbroken.weights)
    assert re.search("offload: step 2 is not kept: .*No space left", capfd.readouterr().err)
    assert {path.name for path in tmp_path.iterdir()} == {"default", "unbroken"}


def test_a_fork_without_room_is_told_to_free_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    until(tmp_path, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1 << 40, used=1 << 40, free=4096))
    done = command("fork", tmp_path / "default", "branch")
    assert done.exit_code and re.search("free; free some room, for example by `offload rm`", done.stderr), done.stderr
    assert "durability" not in done.output, "a fork has the slots of its run"


def test_steps_of_another_run_of_the_name_stay(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    until(tmp_path, 2, keep_every=2)
    before = contents(tmp_path / "default@2")
    until(tmp_path, 2, keep_every=2, resume="restart", seed=1)
    assert contents(tmp_path / "default@2") == before
    assert re.search("offload: step 2 is not kept: .*offload rm", capfd.readouterr().err)


def test_bytes_are_shared_where_the_file_system_can(tmp_path: Path) -> None:
    with disk(tmp_path, 400 << 20, ("mkfs.xfs", "-q", "-m", "reflink=1")) as place:
        unbroken = until(place, 4, keep_every=3)
        forked = json.loads(command("fork", place / "default@3", "branch", "--json").stdout)
        assert forked["shared"]
        assert_same_tensors(until(place, 4, run="branch", resume="must"), unbroken)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("default", "default"), "a name of its own"),
        (("default", "a@b"), "run"),
        (("default", "taken"), "holds a run that did not end"),
        (("default@7", "branch"), "has no step 7: expected one of 2"),
        (("nothing", "branch"), "there is no folder"),
    ],
)
def test_what_cannot_be_forked_is_refused(arguments: tuple[str, str], words: str, tmp_path: Path) -> None:
    until(tmp_path, 2)
    command("fork", tmp_path / "default", "taken")
    before = contents(tmp_path)
    refused = command("fork", tmp_path / arguments[0], arguments[1])
    assert refused.exit_code == 2, refused.output
    assert words in refused.output.replace("\n", " ")
    assert contents(tmp_path) == before


def test_a_run_that_trains_is_not_forked_and_its_log_is_shown(tmp_path: Path) -> None:
    engine = start(JOB, DISK, tmp_path)
    train_step(engine, JOB, 0)
    engine.synchronize()
    refused = command("fork", tmp_path / "default", "branch")
    assert refused.exit_code == 2
    assert "in use by" in refused.output
    assert command("log", tmp_path / "default").exit_code == 0
    engine.destroy(remove=True)


def _keeps(folder: Path) -> dict[str, Any]:
    return until(folder, 4, begin=rank_pool.start, keep_every=3)


def _resumes(folder: Path) -> dict[str, Any]:
    return until(folder, 4, begin=rank_pool.start, run="branch", resume="must")


def test_two_ranks_keep_and_fork_together(ranks: rank_pool.RankPool, tmp_path: Path) -> None:
    unbroken = ranks.run(_keeps, tmp_path)
    assert command("verify", tmp_path / "default@3").exit_code == 0
    assert command("fork", tmp_path / "default@3", "branch").exit_code == 0
    for after, before in zip(ranks.run(_resumes, tmp_path), unbroken, strict=True):
        assert_same_tensors(after, before)
