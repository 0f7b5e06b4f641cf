"""No file of one user is read, written or deleted through a run or a checkpoint of another."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offload.aio import IoQueue
from offload.cli.main import app
from offload.errors import ConfigError, StoreError
from offload.finetune.options import Options
from offload.finetune.output import MARK, Identity, is_marked, output_of
from offload.swapper.store import Store, find_removal, remove_run
from offload.swapper.store.folder import FILES
from tests.store.test_store import SPEC, blob, created, update
from tests.support.processes.users import Users, needs_two_users, two_users

CHECKPOINT = ("manifest.json", "states.rank0.safetensors", "progress.rank0.safetensors")


@pytest.fixture
def users(tmp_path: Path) -> Iterator[Users]:
    # All is imported before a user without rights is there: the environment may be readable by this one alone.
    train(tmp_path / "own")
    assert command("verify", tmp_path / "own" / "run")[0] == 0
    with two_users() as found:
        yield found


def train(drive: Path) -> None:
    """A run of one commit that stays."""
    with IoQueue() as queue:
        store = created(drive, queue)
        update(store, 0, 7)
        store.commit(1, blob("one"))
        store.close()


def start(drive: Path) -> str:
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
    for each in (folder, *folder.iterdir()):
        os.chown(each, user, user)
    return {each.name: each.read_text() for each in folder.iterdir()}


@needs_two_users
@pytest.mark.parametrize("made", ["run", "rank0"])
def test_a_start_does_not_train_in_a_folder_that_another_user_has_made(made: str, users: Users) -> None:
    def theirs() -> None:
        os.umask(0)
        (users.shared / "run" / "rank0").mkdir(parents=True) if made == "rank0" else (users.shared / "run").mkdir()

    users.run(users.other, theirs)
    said = users.run(users.this, lambda: print(start(users.shared)))
    assert f"is of uid {users.other}, who could change it at any time" in said, said
    assert not list(users.shared.rglob("lock"))


@needs_two_users
@pytest.mark.parametrize("place", ["run", "rank0", "lock", "states"])
def test_a_link_of_another_user_leads_neither_a_start_nor_a_removal_to_files(place: str, users: Users) -> None:
    """Where a folder is theirs, all of it is; in a folder of this user they can put nothing."""
    work = users.home(users.this) / "work"
    before = precious(work, users.this)
    (work / "rank0").mkdir()
    os.chown(work / "rank0", users.this, users.this)

    def theirs() -> None:
        os.umask(0)
        path = users.shared / {"run": "run", "rank0": "run/rank0"}.get(place, f"run/rank0/{place}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(work / place if place in before else work)

    users.run(users.other, theirs)
    said = users.run(users.this, lambda: print(start(users.shared)))
    assert "exists and is not a folder" in said or "who could change it at any time" in said, said
    code, said = 0, users.run(users.this, lambda: print(*command("rm", users.shared / "run", "--yes")))
    assert said.startswith("2 error: "), said
    assert code == 0 and before == {each.name: each.read_text() for each in work.iterdir() if each.is_file()}


@needs_two_users
def test_a_run_of_another_user_is_verified_and_nothing_is_made_in_it(users: Users) -> None:
    def theirs() -> None:
        train(users.shared)
        shutil.rmtree(users.shared / "run" / "rank0" / "lock", ignore_errors=True)
        for each in (users.shared / "run").rglob("*"):
            each.chmod(0o777 if each.is_dir() else 0o666)
        (users.shared / "run").chmod(0o777)

    users.run(users.other, theirs)
    files = {each: each.stat() for each in (users.shared / "run").rglob("*")}
    assert users.run(users.this, lambda: print(*command("verify", users.shared / "run"))).startswith("0 ")
    after = {each: each.stat() for each in (users.shared / "run").rglob("*")}
    assert {p: (s.st_mtime_ns, s.st_size) for p, s in files.items()} == {
        p: (s.st_mtime_ns, s.st_size) for p, s in after.items()
    }
    assert users.run(users.this, lambda: print(*command("rm", users.shared / "run", "--yes"))).startswith("2 error: ")
    assert (users.shared / "run" / "rank0" / "states").exists()


@needs_two_users
@pytest.mark.parametrize("name", ["manifest.json", "commit", "blob.0", "states"])
def test_a_link_in_a_run_of_another_user_is_not_read(name: str, users: Users) -> None:
    secret = users.home(users.this) / "secret"
    secret.write_text("a secret of this user")
    os.chown(secret, users.this, users.this)

    def theirs() -> None:
        os.umask(0)
        train(users.shared)
        for each in (users.shared / "run").rglob("*"):
            each.chmod(0o755 if each.is_dir() else 0o644)
        (users.shared / "run").chmod(0o755)
        (users.shared / "run" / "rank0" / name).unlink()
        (users.shared / "run" / "rank0" / name).symlink_to(secret)

    users.run(users.other, theirs)
    said = users.run(users.this, lambda: print(command("verify", users.shared / "run")))
    assert "a secret" not in said and "link" in said, said


def test_a_removal_does_not_believe_a_manifest_that_names_other_folders(tmp_path: Path, queue: IoQueue) -> None:
    """Nothing seals it. The folders that it names are of the run if their own manifests say so."""
    train(tmp_path / "drive")
    path = tmp_path / "drive" / "run" / "rank0" / "manifest.json"
    before = precious(tmp_path / "home", os.geteuid())
    (tmp_path / "work" / "run").mkdir(parents=True)
    (tmp_path / "home").rename(tmp_path / "work" / "run" / "rank0")
    manifest = json.loads(path.read_text())
    manifest["drives"].append(str(tmp_path / "work"))
    manifest["stripes"]["weights"].append(1)
    path.write_text(json.dumps(manifest))
    found = find_removal(tmp_path / "drive" / "run")
    assert found.folders == (path.parent,), found
    remove_run(tmp_path / "drive" / "run")
    work = tmp_path / "work" / "run" / "rank0"
    assert {each.name: each.read_text() for each in work.iterdir()} == before


def test_a_removal_follows_no_link_that_a_user_gives(tmp_path: Path) -> None:
    train(tmp_path / "drive")
    (tmp_path / "link").symlink_to(tmp_path / "drive" / "run")
    assert command("verify", tmp_path / "link")[0] == 0
    code, said = command("rm", tmp_path / "link", "--yes")
    assert code == 2 and "is a symbolic link, which is not followed" in said
    assert (tmp_path / "drive" / "run" / "rank0" / "states").exists()


@pytest.mark.parametrize("kind", ["pipe", "folder"])
@pytest.mark.parametrize("name", ["lock", "undo", "states", "suspect"])
def test_a_start_and_the_commands_end_at_what_is_no_file(name: str, kind: str, tmp_path: Path) -> None:
    """None of them waits for somebody who writes to a pipe."""
    train(tmp_path)
    path = tmp_path / "run" / "rank0" / name
    path.unlink(missing_ok=True)
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    said = start(tmp_path)
    assert f"cannot use {path}: the path is not a regular file; expected a folder of swap files" in said, said
    code, said = command("verify", tmp_path / "run")
    assert code in (1, 2) or name == "suspect", said
    assert command("inspect", tmp_path / "run")[0] == 0
    command("rm", tmp_path / "run", "--yes")


@needs_two_users
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_model_is_not_saved_to_a_folder_of_another_user_that_nobody_has_named(kind: str, users: Users) -> None:
    """They know the default name beforehand, and could change the weights."""
    (users.home(users.this) / "mine").mkdir()
    os.chown(users.home(users.this) / "mine", users.this, users.this)

    def theirs() -> None:
        os.umask(0)
        path = users.shared / "run-output"
        path.mkdir() if kind == "folder" else path.symlink_to(users.home(users.this) / "mine")

    def ours() -> None:
        os.chdir(users.shared)
        options = Options(model="gpt2-tiny", text=("a.py",))
        with pytest.raises(ConfigError, match=rf"run-output, which is of uid {users.other}, who could change it"):
            output_of(options, "run")
        assert output_of(options, "other")[0] == Path("other-output")
        Path("mine-output").symlink_to(users.home(users.this) / "mine")
        assert output_of(options, "mine")[0] == Path("mine-output"), "a link of this user's own"

    users.run(users.other, theirs)
    users.run(users.this, ours)


def test_a_pipe_in_the_place_of_a_jobs_mark_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / MARK)
    assert not is_marked(tmp_path, Identity("gpt2-tiny", "", None, {}, None, 1, {}))
