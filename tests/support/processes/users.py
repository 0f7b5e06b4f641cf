"""Two users of one machine, as children of a test that runs as root."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

needs_two_users = pytest.mark.skipif(os.geteuid() != 0, reason="root alone can be two users")


class Users:
    """A user who works, another one, and a folder in which both may make files, as /tmp is.

    A function of a user runs in a fork, with the imports of the test: others may not be able to read the environment.
    """

    owner, stranger = 12811, 12812

    def __init__(self, root: Path) -> None:
        self._root = root
        root.chmod(0o755)
        self.shared = root / "shared"
        self.shared.mkdir()
        self.shared.chmod(0o1777)
        for user in (self.owner, self.stranger):
            self.home(user).mkdir(mode=0o700)
            os.chown(self.home(user), user, user)

    def home(self, user: int) -> Path:
        """The folder of one user alone."""
        return self._root / f"home{user}"

    def run(self, user: int, function: Callable[[], object]) -> str:
        """Runs a function as a user, and returns what it printed. Raises `AssertionError` if it raised anything."""
        printed = self._root / "printed"
        child = os.fork()
        if not child:
            code = 1
            try:
                output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                os.dup2(output, 1)
                os.dup2(output, 2)
                # Of the capturing runner, whose files another user may not write.
                sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
                os.environ["HOME"] = str(self.home(user))
                os.chdir(self.home(user))
                function()
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        text = printed.read_text()
        assert code == 0, text
        return text


@contextmanager
def two_users() -> Iterator[Users]:
    """Yields two users with folders that are deleted at the end."""
    root = Path(tempfile.mkdtemp(prefix="two-users-"))
    try:
        yield Users(root)
    finally:
        shutil.rmtree(root, ignore_errors=True)
