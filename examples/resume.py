"""A run that is killed goes on bit for bit.

    python examples/resume.py

starts `examples/train_loop.py` in a folder of its own, kills it by SIGKILL in the middle, starts it again, and compares
the losses with those of a run that nobody has killed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("train_loop.py").absolute()
KILLED_AT = 8


def start(folder: Path) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, SCRIPT], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def follow(process: subprocess.Popen[str], last: int | None = None) -> dict[int, str]:
    """The loss of each step, up to the end of the process, or to step `last`, when it is killed."""
    losses: dict[int, str] = {}
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            match = re.match(r"step (\d+)  loss (\S+)", line)
            if match:
                losses[int(match[1])] = match[2]
            if last in losses:
                process.kill()
                break
    return losses


def main() -> None:
    for folder in (Path("killed"), Path("whole")):
        shutil.rmtree(folder, ignore_errors=True)
    before = follow(start(Path("killed")), last=KILLED_AT)
    after = follow(start(Path("killed")))
    whole = follow(start(Path("whole")))
    print(f"killed in step {max(before) + 1}, gone on with step {min(after)}, ended with step {max(after)}")
    print(f"each loss is that of the unbroken run: {before | after == whole and max(whole) == max(after)}")


if __name__ == "__main__":
    main()
