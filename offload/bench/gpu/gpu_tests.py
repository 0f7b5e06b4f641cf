"""A run of the tests that need a GPU, by pytest."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

from offload.bench.gpu.work import Save, Work

_ROOT = Path(__file__).resolve().parents[3]
"""Root of the checkout, if the package is part of one."""
FILES = (
    "tests/accelerators/test_gpu.py",
    "tests/kernels/test_kernels_cuda.py",
    "tests/kernels/test_kernels_blocks.py",
    "tests/swapper/test_pinning.py",
    "tests/aio/test_deepnvme_files.py",
)
_LAST_LINES = 30


def gpu_tests(work: Work, save: Save, files: tuple[str, ...] = FILES, marked: str = "gpu") -> None:
    """Runs the tests in `files` that have the marker `marked`, and saves the counts of their results.

    If pytest ends with an error, the last lines of its output are saved too.
    """
    missing = [name for name in files if not (_ROOT / name).exists()]
    if missing or importlib.util.find_spec("pytest") is None:
        what = f"there is no {missing[0]}" if missing else "pytest is not installed"
        save({"skipped": f"{what}: the tests are run from a checkout with its tools (make test)"})
        return
    command = [sys.executable, "-m", "pytest", "-m", marked, "-p", "no:cacheprovider", "--basetemp"]
    command += [str(work.folder / "pytest"), *files]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    found = {how: int(count) for count, how in re.findall(r"(\d+) (passed|failed|skipped|error)", (lines or [""])[-1])}
    save({"exit_code": done.returncode, **found, "last_lines": lines[-_LAST_LINES:] if done.returncode else []})
