"""Processes with a real limit of memory: a cgroup of their own, in which the kernel counts. Needs root.

Either version of cgroups: in version 1 the group is below that of this process, in version 2 next to it, since a group
of version 2 has processes or groups, not both.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

_ROOT = Path("/sys/fs/cgroup")
_LOOK_SECONDS = 0.02


class Usage(NamedTuple):
    """Bytes that the kernel charges to a cgroup."""

    own: int = 0
    """Memory of the processes' own, which a limit cannot take back."""
    kernel: int = 0
    """The kernel's memory for them: page tables, stacks, tables of files."""
    files: int = 0
    """Pages of files, libraries among them, which give way to a limit."""


class MemoryLimit:
    """A cgroup with a limit of memory."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._unified = folder, (folder / "memory.max").exists()
        self.peak = Usage()
        """The usage with the most of `own` and `kernel` that `run` has seen since it was called."""

    def limit(self, nbytes: int) -> None:
        """Lets the processes of the group have `nbytes` together, and no swap."""
        names = "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"
        for name, value in {"memory.max": nbytes, "memory.swap.max": 0, **dict.fromkeys(names, nbytes)}.items():
            if (self._folder / name).exists():
                (self._folder / name).write_text(str(value))

    def enter(self) -> None:
        """Moves the calling process into the cgroup, which charges it for the pages that it touches from then on."""
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def usage(self) -> Usage:
        """Returns what the group has now."""
        rows = {name: int(value) for name, value in map(str.split, self._read("memory.stat").splitlines())}
        if self._unified:
            # Kernels before 5.18 have no sum.
            kernel = rows.get("kernel", sum(rows.get(name, 0) for name in ("kernel_stack", "pagetables", "slab")))
            return Usage(rows["anon"] + rows["shmem"], kernel, rows["file"] - rows["shmem"])
        shared = rows.get("shmem", 0)
        return Usage(rows["rss"] + shared, int(self._read("memory.kmem.usage_in_bytes")), rows["cache"] - shared)

    @property
    def charged(self) -> int:
        """The most bytes that the kernel has charged at once, those of files included.

        In version 1 since `run` was called, in version 2 since the group was made.
        """
        return int(self._read("memory.peak" if self._unified else "memory.max_usage_in_bytes"))

    def run(
        self,
        command: Sequence[str | os.PathLike[str]],
        until: Callable[[], bool] = lambda: False,
        stderr: IO[str] | None = None,
    ) -> int:
        """Runs a program that is in the cgroup from its first byte on, and returns its exit status.

        It is killed as soon as `until()` is true. Its errors go to `stderr`, or to that of this process.
        """
        self.peak = Usage()
        if not self._unified:
            (self._folder / "memory.max_usage_in_bytes").write_text("0")
        process = subprocess.Popen(command, preexec_fn=self.enter, stderr=stderr)
        try:
            while process.poll() is None:
                self.peak = max(self.peak, self.usage(), key=lambda usage: usage.own + usage.kernel)
                if until():
                    process.kill()
                time.sleep(_LOOK_SECONDS)
        finally:
            process.kill()  # without effect if it has ended
            process.wait()
        return process.returncode

    def _read(self, name: str) -> str:
        return (self._folder / name).read_text()


def controller(root: Path = _ROOT, groups: str = "/proc/self/cgroup") -> Path | None:
    """Returns the folder in which a group with a limit can be made, or None without a memory controller.

    Args:
        root: Where cgroups are mounted.
        groups: The file with the groups of this process.
    """
    lines = (line.split(":", 2) for line in Path(groups).read_text().splitlines())
    of_controller = {name: group.lstrip("/") for _, names, group in lines for name in names.split(",")}
    if "memory" in of_controller:
        folder = root / "memory" / of_controller["memory"]
    else:
        folder = root / of_controller.get("", "")
        folder = folder if folder == root else folder.parent
        if "memory" not in _words(folder / "cgroup.controllers"):
            return None
    return folder if os.access(folder, os.W_OK) else None


@contextlib.contextmanager
def memory_limit(nbytes: int, folder: Path) -> Iterator[MemoryLimit]:
    """Yields a new group in `folder`, whose processes have `nbytes` of memory together."""
    switch = folder / "cgroup.subtree_control"  # version 2
    if switch.exists() and "memory" not in _words(switch):
        switch.write_text("+memory")
    folder = folder / f"offload-{os.getpid()}"
    folder.mkdir()
    try:
        group = MemoryLimit(folder)
        group.limit(nbytes)
        yield group
    finally:
        folder.rmdir()


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []
