"""One process owns a run; runs of others are refused and left alone."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import offload
from offload import testing
from offload.aio import IoQueue
from offload.cli.main import app
from offload.errors import ConfigError, IoError, StoreError
from offload.finetune.options import Options
from offload.finetune.output import MARK, Identity, is_marked, output_of
from offload.swapper.store import Store, find_removal, remove_run, run_status
from offload.swapper.store.folder import FILES, Lock, remove_files, reserve, write_in_place
from offload.swapper.store.format import was_committed
from tests.store.test_store import STORE_SPEC as SPEC
from tests.store.test_store import blob, created, text_of, update
from tests.support import models
from tests.support.drives.fault_injection import flip_bit
from tests.support.oracle import start, train_step
from tests.support.processes.users import Users, needs_two_users, two_users
from tests.support.ranks import rank_pool

JOB = models.GPT2._replace(dtype="bf16")
DISK = ("nvme", "nvme")


def train(drives: list[Path], steps: int, **options: Any) -> offload.Engine:
    engine = start(JOB, DISK, drives[0], nvme_path=list(map(str, drives)), **options)
    for step in range(engine.global_steps, steps):
        train_step(engine, JOB, step)
    return engine


def verified(run: Path) -> int:
    return CliRunner().invoke(app, ["verify", str(run)]).exit_code


@pytest.fixture
def drives(tmp_path: Path) -> list[Path]:
    """Two drives with a run of two steps."""
    folders = [tmp_path / "a", tmp_path / "b"]
    train(folders, 2).destroy()
    return folders


# -- drives that have gone elsewhere ------------------------------------------------------------------


def test_drives_that_are_not_mounted_added_in_front_or_in_use(drives: list[Path], tmp_path: Path) -> None:
    a, b = drives
    for paths in ([tmp_path / "new", a], [b], [tmp_path / "new", b], [b, a]):
        with pytest.raises(StoreError):
            train(paths, 1)
        assert verified(a / "default") == 0
    engine = train(drives, 3, resume="must")
    for paths in ([b], [b, a]):
        with pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
            train(paths, 1)
    train_step(engine, JOB, 3)
    engine.destroy()
    assert verified(a / "default") == 0
    a.rename(tmp_path / "unmounted")
    for resume in ("auto", "never"):
        with pytest.raises(StoreError, match=r"holds drive 1 of a run whose first drive is .*/a/default/rank0"):
            train(drives, 1, resume=resume)
    shutil.rmtree(a)
    (tmp_path / "unmounted").rename(a)
    assert verified(a / "default") == 0
    train(drives, 5, resume="must").destroy()


def test_what_a_removal_that_was_cut_short_has_left_is_no_strangers(drives: list[Path]) -> None:
    a, b = drives
    rest = b / "default" / "rank0"
    shutil.copytree(rest, b / "kept")
    train(drives, 2, resume="must").finish({})
    assert not rest.exists() and run_status(drives, "default").finished is not None
    rest.parent.mkdir(exist_ok=True)
    (b / "kept").rename(rest)
    train(drives, 1).destroy()
    assert verified(a / "default") == 0


def test_a_start_where_no_folder_can_be_made_ends() -> None:
    with pytest.raises(StoreError, match=r"cannot make the swap folder /proc/1/.*: No such file or directory; set"):
        start(JOB, DISK, Path("/proc/1"))


def test_one_folder_under_two_names(tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "drive")
    with pytest.raises(StoreError, match="names a folder twice"):
        train([tmp_path / "drive", tmp_path / "link"], 1)


def test_a_process_that_changes_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "other")
    train([Path("swap")], 2).destroy()
    monkeypatch.chdir(tmp_path / "one")
    engine = train([Path("swap")], 1)
    monkeypatch.chdir(tmp_path / "other")
    for step in (1, 2):
        train_step(engine, JOB, step)
    engine.destroy()
    for name, steps in (("one", 3), ("other", 2)):
        assert verified(tmp_path / name / "swap" / "default") == 0
        monkeypatch.chdir(tmp_path / name)
        engine = train([Path("swap")], 0, resume="must")
        assert engine.global_steps == steps
        engine.destroy()


# -- removal ------------------------------------------------------------------------------------------


def test_the_removal_of_a_copy_leaves_the_original(drives: list[Path], tmp_path: Path) -> None:
    shutil.copytree(drives[0], tmp_path / "copy")
    assert find_removal(tmp_path / "copy" / "default").folders == (tmp_path / "copy" / "default" / "rank0",)
    remove_run(tmp_path / "copy" / "default")
    assert not (tmp_path / "copy" / "default").exists() and verified(drives[0] / "default") == 0


def test_a_run_on_two_drives_without_its_records_is_damaged(drives: list[Path]) -> None:
    a, b = drives
    (a / "default" / "rank0" / "commit").unlink()
    before = {path: path.read_bytes() for path in (*a.rglob("*/states"), *b.rglob("*/states"))}
    for resume in ("auto", "must"):
        with pytest.raises(StoreError, match="commit is missing"):
            train(drives, 1, resume=resume)
    assert len(before) == 2 and {path: path.read_bytes() for path in before} == before
    assert verified(a / "default") == 1


@pytest.mark.parametrize("files", range(8))
def test_a_deletion_that_was_interrupted_is_completed_or_begun_over(
    files: int, drives: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any file: of a run on two drives, whose records have not been damaged."""
    unlink, left = os.unlink, files

    def failing(*arguments: Any, **options: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        with_missing_ok(*arguments, **options)

    def with_missing_ok(*arguments: Any, **options: Any) -> None:
        try:
            unlink(*arguments, **options)
        except FileNotFoundError:
            nonlocal left
            left += 1
            raise

    run = drives[0] / "default"
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", failing)
        with pytest.raises(OSError, match="Input/output error"):
            remove_run(run)
    assert not run_status(drives, "default").exists
    told = CliRunner().invoke(app, ["verify", str(run)])
    assert told.exit_code == 2 and "an interrupted deletion of the run has left" in told.output
    (described,) = json.loads(CliRunner().invoke(app, ["inspect", str(run.parent), "--json"]).stdout)["runs"]
    assert str(run / "rank0") in described["leftovers"] and not described["ranks"][0]["damaged"]
    if files % 2:
        engine = train(drives, 1, resume="auto")
        assert engine.global_steps == 1
        engine.destroy()
        assert verified(run) == 0 and not (run / "rank0" / "removed").exists()
    remove_run(run)
    assert not run.exists() and not (drives[1] / "default" / "rank0").exists()


def test_a_removal_deletes_by_name(drives: list[Path]) -> None:
    notes = drives[1] / "default" / "rank0" / "notes.txt"
    notes.write_text("mine")
    removal = remove_run(drives[0] / "default")
    assert removal.strangers == ("rank0/notes.txt",)
    assert notes.read_text() == "mine" and [path.name for path in notes.parent.iterdir()] == ["notes.txt"]


def test_a_folder_that_only_looks_like_a_rank(tmp_path: Path) -> None:
    folder = tmp_path / "mine" / "rank0"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    for command in (["verify"], ["export"], ["rm", "--yes"], ["inspect"]):
        more = [str(tmp_path / "out")] if command == ["export"] else []
        CliRunner().invoke(app, [*command, str(folder.parent), *more])
        assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def _removed_without_the_first(folder: Path) -> None:
    engine = rank_pool.start(JOB, DISK, folder)
    train_step(engine, JOB, 0)
    if engine.global_rank == 0:
        Store.remove = lambda store, notes: store.close()  # type: ignore[method-assign]  # as if it were killed before
    engine.destroy(remove=True)


def test_a_run_of_two_ranks_has_ended_before_anything_of_it_goes(tmp_path: Path) -> None:
    with rank_pool.pool(2) as ranks:
        ranks.run(_removed_without_the_first, tmp_path)
    assert was_committed(tmp_path / "default" / "rank0") and not (tmp_path / "default" / "rank1").exists()
    status = run_status([tmp_path], "default")
    assert not status.exists and status.finished is not None and status.finished["steps"] == 1
    train([tmp_path], 1).destroy(remove=True)


# -- a start ------------------------------------------------------------------------------------------


def test_a_start_that_failed_has_nothing_more_to_remove(
    tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = Store([tmp_path], "run", 0, SPEC._replace(partitions=SPEC.partitions * 1000, frozen=()), queue)
    testing.replace(monkeypatch, "disk.shortage_of_store", lambda *_: _raise(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        failed.create()
    monkeypatch.undo()
    assert not (tmp_path / "run").exists()
    other_store = created(tmp_path, queue)
    failed.remove()
    other_store.commit(0, blob("zero"))
    other_store.close()
    assert was_committed(tmp_path / "run" / "rank0")


def _raise(error: Exception) -> None:
    raise error


def test_a_start_that_failed_leaves_the_note_of_the_end(tmp_path: Path, queue: IoQueue) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "finished.json").write_text('{"steps": 3}')
    huge = SPEC._replace(partitions=({state: 1 << 50 for state in SPEC.partitions[0]},), frozen=())
    store = Store([tmp_path], "run", 0, huge, queue)
    with pytest.raises(StoreError, match=r"the swap files need .*has [0-9.]+ .iB free"):
        store.create()
    assert run_status([tmp_path], "run").finished == {"steps": 3}
    store = created(tmp_path, queue)
    assert run_status([tmp_path], "run").finished == {"steps": 3}, "nothing is committed yet"
    store.commit(0, blob("zero"))
    store.close()
    assert run_status([tmp_path], "run")[:2] == (True, None)


def test_a_run_that_another_process_has_made_meanwhile(tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    store.commit(0, blob("zero"))
    store.close()
    late = Store([tmp_path], "run", 0, SPEC, queue)  # it had looked before
    with pytest.raises(StoreError, match="holds a run that did not end"):
        late.create()
    again = Store([tmp_path], "run", 0, SPEC, queue)
    assert text_of(again.open()) == "zero"
    again.close()


def test_a_lock_of_a_folder_that_was_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process removes the folder and makes it anew between the two calls of whoever locks it."""
    (tmp_path / "rank0").mkdir()
    locks = list[Lock]()

    def remade(real: Callable[[int, int], None], descriptor: int, operation: int) -> None:
        monkeypatch.undo()
        shutil.rmtree(tmp_path / "rank0")
        (tmp_path / "rank0").mkdir()
        locks.append(Lock(tmp_path / "rank0"))
        real(descriptor, operation)

    testing.intercept(monkeypatch, "file.lock", remade)
    with pytest.raises(StoreError, match="in use by"):
        Lock(tmp_path / "rank0")
    locks[0].release()
    Lock(tmp_path / "rank0").release()


def test_a_file_system_without_locks_is_not_said_to_be_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    testing.replace(monkeypatch, "file.lock", refuses)
    (tmp_path / "rank0").mkdir()
    with pytest.raises(StoreError, match=r"cannot be locked \(No locks available\).*set nvme_path to") as caught:
        Lock(tmp_path / "rank0")
    assert "in use" not in str(caught.value)


# -- files of another kind ----------------------------------------------------------------------------


@pytest.mark.parametrize("obstacle", ["run", "rank0"])
@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_a_folder_of_a_rank_that_cannot_be_made(obstacle: str, kind: str, tmp_path: Path) -> None:
    """A link is in the way, wherever it leads: an error, and no loop."""
    path = tmp_path / "drive" / "run" if obstacle == "run" else tmp_path / "drive" / "run" / "rank0"
    path.parent.mkdir(parents=True)
    if kind == "file":
        path.touch()
    else:
        path.symlink_to(tmp_path / "away")
    if kind == "folder":
        (tmp_path / "away").mkdir()
    said = start_others(tmp_path / "drive")
    assert f"{path} exists and is not a folder; remove it, or choose another run name" in said
    assert kind != "folder" or not any((tmp_path / "away").iterdir())


@pytest.mark.parametrize("write", [lambda path: write_in_place(path, b"x"), lambda path: reserve(path, 4096)])
def test_a_small_file_that_cannot_be_opened_is_an_error_of_io(write: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "blob.0").symlink_to(tmp_path / "away")
    for path in (tmp_path / "blob.0", tmp_path / "none" / "blob.0", tmp_path):
        with pytest.raises(IoError, match=f"cannot open {path}: "):
            write(path)
    assert not (tmp_path / "away").exists()


# -- damage of the last commit ------------------------------------------------------------------------


def _damage(run: Path, state: str, offset: int = 0) -> None:
    """Flip a bit of what the last commit names."""
    from offload.swapper.store.inspection import look

    rank_files = look(run / "rank0")
    assert rank_files.manifest is not None
    slots = rank_files.commits[0].record.slots
    row = rank_files.manifest.spec.places()[0]
    place = next(places for each, places in row.items() if each.value == state)[slots[0]]
    flip_bit(run / "rank0" / "states", place.offset(offset))


@pytest.mark.sample(1)
@pytest.mark.parametrize("found_by", ["training", "verify"])
def test_after_damage_the_commit_before_is_taken(found_by: str, tmp_path: Path) -> None:
    engine = train([tmp_path], 3)
    losses = [train_step(engine, JOB, step) for step in (3, 4)]
    engine.destroy(remove=True)
    train([tmp_path], 4).destroy()
    run = tmp_path / "default"
    _damage(run, "weight")
    if found_by == "verify":
        result = CliRunner().invoke(app, ["verify", str(run)])
        assert result.exit_code == 1 and "the commit before, step 3, is intact too" in result.output
    else:
        engine = train([tmp_path], 0, resume="must")
        assert engine.global_steps == 4
        with pytest.raises((offload.errors.EngineFailed, offload.errors.IoError)):
            train_step(engine, JOB, 4)
        engine.destroy()
    engine = train([tmp_path], 0, resume="auto")
    assert engine.global_steps == 3 and any(
        "all data of step 3 was compared and is intact" in line for line in engine.notices
    )
    assert [train_step(engine, JOB, step) for step in (3, 4)] == losses
    engine.destroy()
    assert verified(run) == 0 and not (run / "rank0" / "suspect").exists()


def test_a_store_without_an_intact_commit_is_an_error(tmp_path: Path) -> None:
    train([tmp_path], 4).destroy()
    run = tmp_path / "default"
    _damage(run, "weight")
    states_file = run / "rank0" / "states"
    states_file.write_bytes(bytes(b ^ 1 if i % 4096 == 7 else b for i, b in enumerate(states_file.read_bytes())))
    assert verified(run) == 1
    with pytest.raises(StoreError, match=r"no commit is intact: step 4: .*; step 3: "):
        train([tmp_path], 0, resume="auto")


def test_bytes_behind_the_records_are_cut_off(tmp_path: Path) -> None:
    train([tmp_path], 2).destroy()
    commit = tmp_path / "default" / "rank0" / "commit"
    with commit.open("ab") as file:
        file.write(bytes(5000))
    assert verified(tmp_path / "default") == 1
    train([tmp_path], 3, resume="must").destroy()
    assert commit.stat().st_size == 8192 and verified(tmp_path / "default") == 0


CHECKPOINT = ("manifest.json", "states.rank0.safetensors", "progress.rank0.safetensors")


@pytest.fixture
def users(tmp_path: Path) -> Iterator[Users]:
    # All is imported before a user without rights is there: the environment may be readable by this one alone.
    train_others(tmp_path / "own")
    assert command("verify", tmp_path / "own" / "run")[0] == 0
    with two_users() as two:
        yield two


def train_others(drive: Path) -> None:
    """A run of one commit that stays."""
    with IoQueue() as queue:
        store = created(drive, queue)
        update(store, 0, 7)
        store.commit(1, blob("one"))
        store.close()


def start_others(drive: Path) -> str:
    """The error of a start; "" without one."""
    with IoQueue() as queue:
        try:
            Store([drive], "run", 0, SPEC, queue).close()
        except StoreError as error:
            return str(error)
    return ""


def command(*words: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def precious(folder: Path, user: int) -> dict[str, str]:
    """Files of a user with the names that a run's files have."""
    folder.mkdir()
    for name in (*FILES, *CHECKPOINT, "thesis.tmp", "finished.json", "latest"):
        (folder / name).write_text("precious")
    for path in (folder, *folder.iterdir()):
        os.chown(path, user, user)
    return {each.name: each.read_text() for each in folder.iterdir()}


@needs_two_users
@pytest.mark.parametrize("made", ["run", "rank0"])
def test_a_start_does_not_train_in_a_folder_that_another_user_has_made(made: str, users: Users) -> None:
    def theirs() -> None:
        os.umask(0)
        (users.shared / "run" / "rank0").mkdir(parents=True) if made == "rank0" else (users.shared / "run").mkdir()

    users.run(users.stranger, theirs)
    said = users.run(users.owner, lambda: print(start_others(users.shared)))
    assert f"is of uid {users.stranger}, who could change it at any time" in said, said
    assert not list(users.shared.rglob("lock"))


@needs_two_users
@pytest.mark.sample(2)
@pytest.mark.parametrize("place", ["run", "rank0", "lock", "states"])
def test_a_link_of_another_user_leads_neither_a_start_nor_a_removal_to_files(place: str, users: Users) -> None:
    """Where a folder is theirs, all of it is; in a folder of this user they can put nothing."""
    work = users.home(users.owner) / "work"
    before = precious(work, users.owner)
    (work / "rank0").mkdir()
    os.chown(work / "rank0", users.owner, users.owner)

    def theirs() -> None:
        os.umask(0)
        path = users.shared / {"run": "run", "rank0": "run/rank0"}.get(place, f"run/rank0/{place}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(work / place if place in before else work)

    users.run(users.stranger, theirs)
    said = users.run(users.owner, lambda: print(start_others(users.shared)))
    assert "exists and is not a folder" in said or "who could change it at any time" in said, said
    code, said = 0, users.run(users.owner, lambda: print(*command("rm", users.shared / "run", "--yes")))
    assert said.startswith("2 error: "), said
    assert code == 0 and before == {each.name: each.read_text() for each in work.iterdir() if each.is_file()}


@needs_two_users
def test_a_run_of_another_user_is_verified_and_nothing_is_made_in_it(users: Users) -> None:
    def theirs() -> None:
        train_others(users.shared)
        shutil.rmtree(users.shared / "run" / "rank0" / "lock", ignore_errors=True)
        for path in (users.shared / "run").rglob("*"):
            path.chmod(0o777 if path.is_dir() else 0o666)
        (users.shared / "run").chmod(0o777)

    users.run(users.stranger, theirs)
    files = {each: each.stat() for each in (users.shared / "run").rglob("*")}
    assert users.run(users.owner, lambda: print(*command("verify", users.shared / "run"))).startswith("0 ")
    after = {each: each.stat() for each in (users.shared / "run").rglob("*")}
    assert {p: (s.st_mtime_ns, s.st_size) for p, s in files.items()} == {
        p: (s.st_mtime_ns, s.st_size) for p, s in after.items()
    }
    assert users.run(users.owner, lambda: print(*command("rm", users.shared / "run", "--yes"))).startswith("2 error: ")
    assert (users.shared / "run" / "rank0" / "states").exists()


@needs_two_users
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["manifest.json", "commit", "blob.0", "states"])
def test_a_link_in_a_run_of_another_user_is_not_read(name: str, users: Users) -> None:
    secret = users.home(users.owner) / "secret"
    secret.write_text("a secret of this user")
    os.chown(secret, users.owner, users.owner)

    def theirs() -> None:
        os.umask(0)
        train_others(users.shared)
        for path in (users.shared / "run").rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        (users.shared / "run").chmod(0o755)
        (users.shared / "run" / "rank0" / name).unlink()
        (users.shared / "run" / "rank0" / name).symlink_to(secret)

    users.run(users.stranger, theirs)
    said = users.run(users.owner, lambda: print(command("verify", users.shared / "run")))
    assert "a secret" not in said and "link" in said, said


def test_a_removal_does_not_believe_a_manifest_that_names_other_folders(tmp_path: Path, queue: IoQueue) -> None:
    """Nothing seals it. The folders that it names are of the run if their own manifests say so."""
    train_others(tmp_path / "drive")
    path = tmp_path / "drive" / "run" / "rank0" / "manifest.json"
    before = precious(tmp_path / "home", os.geteuid())
    (tmp_path / "work" / "run").mkdir(parents=True)
    (tmp_path / "home").rename(tmp_path / "work" / "run" / "rank0")
    manifest = json.loads(path.read_text())
    manifest["drives"].append(str(tmp_path / "work"))
    manifest["stripes"]["weights"].append(1)
    path.write_text(json.dumps(manifest))
    removal = find_removal(tmp_path / "drive" / "run")
    assert removal.folders == (path.parent,), removal
    remove_run(tmp_path / "drive" / "run")
    work = tmp_path / "work" / "run" / "rank0"
    assert {each.name: each.read_text() for each in work.iterdir()} == before


def test_a_removal_follows_no_link_that_a_user_gives(tmp_path: Path) -> None:
    train_others(tmp_path / "drive")
    (tmp_path / "link").symlink_to(tmp_path / "drive" / "run")
    assert command("verify", tmp_path / "link")[0] == 0
    code, said = command("rm", tmp_path / "link", "--yes")
    assert code == 2 and "is a symbolic link, which is not followed" in said
    assert (tmp_path / "drive" / "run" / "rank0" / "states").exists()


READ = ("commit", "blob.0", "manifest.json")
"""Files that may be links nowhere: the commands read them whole."""


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in ("lock", "undo", "states", "suspect") for kind in ("pipe", "folder")),
        *((name, kind) for name in READ for kind in ("pipe", "folder", "link")),
    ],
)
def test_a_start_and_the_commands_end_at_what_is_no_file(name: str, kind: str, tmp_path: Path) -> None:
    """None of them waits for somebody who writes to a pipe."""
    train_others(tmp_path)
    path = tmp_path / "run" / "rank0" / name
    path.rename(tmp_path / "away") if path.exists() else (tmp_path / "away").touch()
    if kind == "link":
        path.symlink_to(tmp_path / "away")
    else:
        os.mkfifo(path) if kind == "pipe" else path.mkdir()
    code, told = command("verify", tmp_path / "run")
    if name in READ:
        assert code in ((0, 1) if name == "blob.0" else (1, 2)) and (code == 0 or name in told), told
        return
    assert code in (1, 2) or name == "suspect", told
    said = start_others(tmp_path)
    assert f"cannot use {path}: the path is not a regular file; expected a folder of swap files" in said, said
    assert command("inspect", tmp_path / "run")[0] == 0
    command("rm", tmp_path / "run", "--yes")


@needs_two_users
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_model_is_not_saved_to_a_folder_of_another_user_that_nobody_has_named(kind: str, users: Users) -> None:
    """They know the default name beforehand, and could change the weights."""
    (users.home(users.owner) / "mine").mkdir()
    os.chown(users.home(users.owner) / "mine", users.owner, users.owner)

    def theirs() -> None:
        os.umask(0)
        path = users.shared / "run-output"
        path.mkdir() if kind == "folder" else path.symlink_to(users.home(users.owner) / "mine")

    def ours() -> None:
        os.chdir(users.shared)
        options = Options(model="gpt2-tiny", text=("a.py",))
        with pytest.raises(ConfigError, match=rf"run-output, which is of uid {users.stranger}, who could change it"):
            output_of(options, "run")
        assert output_of(options, "other")[0] == Path("other-output")
        Path("mine-output").symlink_to(users.home(users.owner) / "mine")
        assert output_of(options, "mine")[0] == Path("mine-output"), "a link of this user's own"

    users.run(users.stranger, theirs)
    users.run(users.owner, ours)


def test_a_pipe_in_the_place_of_a_jobs_mark_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / MARK)
    assert not is_marked(tmp_path, Identity("gpt2-tiny", "", None, {}, None, 1, {}))


# -- a removal takes no folder from a process that is about to use it ---------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("drive", ["a", "b"])
def test_a_run_that_has_no_more_than_its_locks_is_held(drive: str, tmp_path: Path, queue: IoQueue) -> None:
    """A start holds the locks for some time before it writes the first file."""
    store = Store([tmp_path / "a", tmp_path / "b"], "run", 0, SPEC, queue)
    with pytest.raises(StoreError, match="in use by process"):
        remove_run(tmp_path / drive / "run")
    assert (tmp_path / "a" / "run" / "rank0" / "lock").exists() and (tmp_path / "b" / "run" / "rank0" / "lock").exists()
    store.create()
    store.remove()


def test_a_drive_on_which_a_process_starts_anew_is_held(tmp_path: Path, queue: IoQueue) -> None:
    """The second drive holds a lock alone, and the manifest on the first names it."""
    store = Store([tmp_path / "a", tmp_path / "b"], "run", 0, SPEC, queue)
    store.create()
    store.commit(1, blob("one"))
    store.close()
    second = tmp_path / "b" / "run" / "rank0"
    for name in ("states", "manifest.json"):
        (second / name).unlink()
    with Lock(second), pytest.raises(StoreError, match="in use by process"):
        remove_run(tmp_path / "a" / "run")
    remove_run(tmp_path / "a" / "run")
    assert not second.exists() and not (tmp_path / "a" / "run").exists()


def test_the_lock_is_the_last_file_that_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who gets the lock next may write temporary files at once."""
    for name in ("lock", "commit", "manifest.tmp"):
        (tmp_path / name).touch()
    gone: list[str] = []
    unlink = os.unlink

    def record(name: str, *, dir_fd: int) -> None:
        gone.append(name)
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", record)
    remove_files(tmp_path)
    assert gone[-1] == "lock" and "manifest.tmp" in gone and not tmp_path.exists()
