"""A training whose output is closed, as by `| head -3`, says so, keeps its steps, and is resumed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.model_folders import make_folder
from tests.support.processes import warm_process

TRAIN = (
    "train --model model --text text.py --seq-len 32 --batch-size 2 --device cpu --log-every 1 --eval-every 0".split()
)
CLOSED = "error: cannot write the output: [Errno 32] the program that reads this output has closed it\n"


def closed_after(folder: Path, words: str, steps: int, *options: str) -> tuple[int, str]:
    """Returns exit code and stderr of a training whose output is closed when a line of it begins with these words."""
    make_folder(folder / "model")
    (folder / "text.py").write_text("def double(number):\n    return 2 * number\n\n\n" * 50)
    reading, writing = os.pipe()
    with open(reading, encoding="utf-8") as output:
        with open(writing, "wb") as target:
            command = ["-m", "offload", *TRAIN, "--steps", str(steps), *options]
            process = warm_process.begin(command, cwd=folder, stdout=target, stderr=subprocess.PIPE)
        while words and not output.readline().startswith(words):
            assert process.poll() is None, process.communicate()[1]
    _, errors = process.communicate(timeout=240)
    assert process.returncode is not None and errors is not None
    return process.returncode, errors


def test_the_steps_are_kept_and_the_last_lines_say_how_to_go_on(tmp_path: Path) -> None:
    code, errors = closed_after(tmp_path, "step 1/", 1000)
    assert code == 1 and "stopped; the last committed step is kept in" in errors, errors
    assert "--resume auto, or delete" in errors and errors.endswith(CLOSED) and "Traceback" not in errors
    resumed = warm_process.run(["-m", "offload", *TRAIN, "--steps", "1", "--resume", "must"], cwd=tmp_path)
    assert resumed.returncode == 0 and "already at step" in resumed.stdout, resumed.stderr


@pytest.mark.parametrize(("words", "steps"), [("", 1000), ("step 1/1", 1)], ids=["at the start", "at the end"])
def test_a_run_that_has_not_begun_or_has_ended_is_not_called_stopped(words: str, steps: int, tmp_path: Path) -> None:
    code, errors = closed_after(tmp_path, words, steps)
    assert (code, errors) in ((1, CLOSED), (0, "")) if words else (code, errors) == (1, CLOSED), errors
