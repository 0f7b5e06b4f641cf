"""Files below a folder that a user names are reached without links, pipes and files of others."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offload.aio import DirectFile
from offload.errors import IoError, StoreError
from offload.fileio import (
    cache_folder,
    inner_folder,
    inner_name,
    inner_opener,
    inner_status,
    open_inner,
    read_cache,
    read_inner,
    write_cache,
)
from tests.support.processes.users import Users, needs_two_users, two_users


@pytest.fixture
def users() -> Iterator[Users]:
    with two_users() as two:
        yield two


def test_the_users_own_folder_may_be_a_link_and_what_is_below_it_may_not(tmp_path: Path) -> None:
    (tmp_path / "drive" / "run").mkdir(parents=True)
    (tmp_path / "drive" / "run" / "note").write_text("words")
    (tmp_path / "link").symlink_to("drive")
    (tmp_path / "drive" / "other").symlink_to("run")
    assert read_inner(tmp_path / "link" / "run" / "note", 2, 100) == b"words"
    for path, depth in ((tmp_path / "link" / "run" / "note", 3), (tmp_path / "drive" / "other" / "note", 2)):
        with pytest.raises(OSError, match="symbolic link") as caught:
            read_inner(path, depth, 100)
        assert caught.value.errno == errno.ELOOP, "not missing: a start would make it anew"
        with pytest.raises(OSError, match="symbolic link"):
            inner_status(path, depth)
    assert inner_status(tmp_path / "link" / "run" / "none", 2) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: os.mkfifo(path), "not a regular file"),
        (lambda path: path.mkdir(), "not a regular file"),
        (lambda path: path.symlink_to("/etc/hostname"), "symbolic link"),
        (lambda path: path.symlink_to("/dev/zero"), "symbolic link"),
        (lambda path: path.write_bytes(bytes(101)), "has 101 bytes, expected at most"),
    ],
    ids=["pipe", "folder", "link", "device", "size"],
)
def test_what_is_no_small_file_is_refused_at_once(make: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    make(tmp_path / "file")
    with pytest.raises(OSError, match=message):
        read_inner(tmp_path / "file", 1, 100)


def test_a_file_of_holes_is_not_read_for_hours(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.truncate(3 << 40)
    with pytest.raises(OSError, match=r"all but .* of which are holes"):
        read_inner(tmp_path / "file", 1, 1 << 60)
    with (tmp_path / "file").open("wb") as file:
        file.truncate(1 << 20)
    assert len(read_inner(tmp_path / "file", 1, 1 << 60)) == 1 << 20


def test_a_pipe_in_the_place_of_states_is_an_error_of_io(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "states")
    with pytest.raises(IoError, match=r"cannot open .*states.*not a regular file"):
        DirectFile(tmp_path / "states", writable=False, opener=inner_opener(1))


def test_a_name_that_leads_elsewhere_is_none() -> None:
    for name in ("", ".", "..", "/a", "a/b", "a\nb", "\x1b[0m", "a" * 256, "\u202e"):
        print(name)
        assert inner_name("model.layers.0") == "model.layers.0"
        with pytest.raises(ValueError, match="expected the name of a file"):
            inner_name(name)


def test_a_folder_that_others_may_write_is_closed_to_them_by_its_owner(tmp_path: Path) -> None:
    """As a umask of 002, or the group of a Kubernetes volume, leaves it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o2775)
    (tmp_path / "run" / "file").touch()
    (tmp_path / "run" / "file").chmod(0o664)
    os.close(open_inner(tmp_path / "run" / "file", 2, os.O_RDWR, ours=True))
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run", tmp_path / "run" / "file")]
    assert modes == [0o2755, 0o644]


@needs_two_users
def test_a_file_of_another_user_is_read_and_not_trusted(users: Users) -> None:
    """Somebody's checkpoint may be read. What is written, or executed, must be this user's."""
    folder = users.shared / "theirs"
    users.run(users.stranger, lambda: (folder.mkdir(), (folder / "file").write_text("theirs")))
    (users.shared / "roots").mkdir()
    (users.shared / "roots" / "file").write_text("root's")

    def look() -> None:
        assert read_inner(folder / "file", 2, 100) == b"theirs"
        with pytest.raises(StoreError, match=rf"theirs is of uid {users.stranger}, who could change it at any time"):
            open_inner(folder / "file", 2, ours=True)
        os.close(open_inner(users.shared / "roots" / "file", 2, ours=True))

    users.run(users.owner, look)


@needs_two_users
def test_a_hard_link_to_a_file_of_this_user_is_not_read_as_one_of_another(users: Users) -> None:
    secret = users.home(users.owner) / "secret"
    secret.write_text("secret")
    os.chown(secret, users.owner, users.owner)
    folder = users.shared / "theirs"
    users.run(users.stranger, folder.mkdir)
    os.link(secret, folder / "manifest.json")  # by root: the system may forbid it to others

    def look() -> None:
        with pytest.raises(OSError, match=rf"the file is of uid {users.owner}, in a folder of uid {users.stranger}"):
            read_inner(folder / "manifest.json", 1, 100)

    users.run(users.owner, look)


@needs_two_users
def test_a_cache_of_another_user_is_neither_read_nor_written(users: Users) -> None:
    """It holds machine code."""
    os.environ["XDG_CACHE_HOME"] = str(users.shared)
    path = cache_folder() / "kernels" / "adam.json"

    def theirs() -> None:
        os.umask(0)
        write_cache(path, "theirs")
        for folder in (path, path.parent, path.parent.parent):
            folder.chmod(0o777)

    def ours() -> None:
        with pytest.raises(OSError, match="who could change it at any time"):
            read_cache(path)
        with pytest.raises(OSError, match="who could change it at any time"):
            write_cache(path, "ours")
        with inner_folder(path.parent, 2):
            assert path.read_text() == "theirs"

    try:
        users.run(users.stranger, theirs)
        users.run(users.owner, ours)
        (users.shared / "offload").rename(users.shared / "away")
        users.run(users.owner, lambda: write_cache(path, "ours"))
        users.run(users.owner, lambda: None if read_cache(path) == "ours" else pytest.fail("another text"))
    finally:
        del os.environ["XDG_CACHE_HOME"]
