"""A process with a real limit of memory: a cgroup of its own below that of the tests, in which the kernel counts.

cgroup v1's memory controller alone, as root. Elsewhere there is none, and a test that needs one is skipped.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

_MEMORY = Path("/sys/fs/cgroup/memory")


class MemoryLimit:
    """A cgroup with a limit."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def enter(self) -> None:
        """Moves the calling process into the cgroup, which charges it for the pages that it touches from then on."""
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def run(self, command: Sequence[str | os.PathLike[str]]) -> int:
        """Runs a program that is in the cgroup from its first byte on, and returns the peak RAM of it in bytes.

        The peak is that of memory of its own. What the kernel keeps of files is in the limit, and gives way to it.
        """
        process = subprocess.Popen(command, preexec_fn=self.enter)
        peak = 0
        try:
            while process.poll() is None:
                peak = max(peak, int(dict(self._rows("memory.stat"))["rss"]))
                time.sleep(0.05)
        finally:
            process.kill()  # without effect if it has ended
            process.wait()
        assert process.returncode == 0, f"{command} ended with {process.returncode}"
        return peak

    @property
    def charged(self) -> int:
        """The most bytes that the kernel has charged at once, those of files included."""
        return int((self._folder / "memory.max_usage_in_bytes").read_text())

    def _rows(self, name: str) -> Iterator[list[str]]:
        return (line.split() for line in (self._folder / name).read_text().splitlines())


@contextlib.contextmanager
def memory_limit(nbytes: int) -> Iterator[MemoryLimit]:
    """Gives a cgroup whose processes have `nbytes` of memory together, and no swap beside it."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    mine = next((line.split(":", 2)[2] for line in lines if line.split(":")[1] == "memory"), None)
    if mine is None or not os.access(_MEMORY / mine.lstrip("/"), os.W_OK):
        pytest.skip("needs the memory controller of cgroup v1, and root")
    folder = _MEMORY / mine.lstrip("/") / f"offload-test-{os.getpid()}"
    folder.mkdir()
    try:
        for name in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):
            if (folder / name).exists():
                (folder / name).write_text(str(nbytes))
        yield MemoryLimit(folder)
    finally:
        folder.rmdir()
