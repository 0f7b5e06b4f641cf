"""The tests that need a GPU, by pytest."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from bench.gpu.work import Save, Work

_ROOT = Path(__file__).resolve().parents[2]
FILES = ("tests/test_gpu.py", "tests/test_kernels_cuda.py", "tests/test_pinning.py", "tests/test_deepnvme_files.py")
_LAST_LINES = 30


def gpu_tests(work: Work, save: Save, files: tuple[str, ...] = FILES, marked: str = "gpu") -> None:
    """Run those of `files`: how many passed, failed or were skipped, and the last lines where any failed."""
    command = [sys.executable, "-m", "pytest", "-m", marked, "-p", "no:cacheprovider", "--basetemp"]
    command += [str(work.folder / "pytest"), *files]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    found = {how: int(count) for count, how in re.findall(r"(\d+) (passed|failed|skipped|error)", (lines or [""])[-1])}
    save({"exit_code": done.returncode, **found, "last_lines": lines[-_LAST_LINES:] if done.returncode else []})
