"""A process with a real limit of memory, where this machine lets the tests set one; elsewhere the test is skipped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from bench import memory_limit as cgroup
from bench.memory_limit import MemoryLimit


@contextlib.contextmanager
def memory_limit(nbytes: int) -> Iterator[MemoryLimit]:
    """Gives a cgroup whose processes have `nbytes` of memory together, and no swap beside it."""
    folder = cgroup.controller()
    if folder is None:
        pytest.skip("needs a memory controller of cgroups, and root")
    with cgroup.memory_limit(nbytes, folder) as group:
        yield group
