"""The memory that a process may still allocate is what the limit of its cgroup leaves; files in memory give way."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from offload.sizes import MIB
from offload.swapper.memory import limits
from tests.support.processes.memory_limit import memory_limit

PROGRAM = """
import pathlib, sys
from offload.swapper.memory.limits import free_host_memory
file = pathlib.Path(sys.argv[1]) / "file"
file.write_bytes(bytes(1 << 20) * 48)
file.read_bytes()
(file.parent / "free").write_text(str(free_host_memory()))
"""


def test_files_that_were_read_do_not_count_against_a_limit(tmp_path: Path) -> None:
    """48 MiB of files in a limit of 112, by the kernel's own count."""
    with memory_limit(112 * MIB) as group:
        group.run([sys.executable, "-c", PROGRAM, tmp_path])
        assert group.charged > 48 * MIB
    assert 64 * MIB < int((tmp_path / "free").read_text()) < 112 * MIB


@pytest.mark.parametrize(
    ("line", "folder", "files"),
    [
        ("0::/mine", "/sys/fs/cgroup/mine", {"memory.max": "1000", "memory.current": "900"}),
        (
            "4:memory:/mine",
            "/sys/fs/cgroup/memory/mine",
            {"memory.limit_in_bytes": "1000", "memory.usage_in_bytes": "900"},
        ),
    ],
)
def test_both_versions_of_cgroups_are_read(
    line: str, folder: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_children = "total_" if "memory:" in line else ""
    stat = f"anon 500\ninactive_file 1\n{of_children}inactive_file 300\n{of_children}active_file 40\n"
    content = {"/proc/self/cgroup": line, **{f"{folder}/{name}": text for name, text in files.items()}}
    monkeypatch.setattr(limits, "_read", lambda path: content.get(path, ""))
    assert list(limits.memory_limits()) == [(1000, 900)], "without statistics"
    content[f"{folder}/memory.stat"] = stat
    assert list(limits.memory_limits()) == [(1000, 560)]
