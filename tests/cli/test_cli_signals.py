"""A command that a signal or a closed output ends says so by its exit code and leaves a run that resumes."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload.cli.signals import exit_on_signal, signals
from tests.support.model_folders import make_folder
from tests.support.processes import warm_process

LONG = 240.0
"""Seconds that a process may take to begin, or to end: a slow machine that does much else."""


def begin(folder: Path, *arguments: str, code: str | None = None) -> warm_process.Process:
    """`offload` with these arguments, or some lines of Python, in a folder."""
    return warm_process.begin(
        [*(("-m", "offload") if code is None else ("-c", code)), *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"XDG_CACHE_HOME": str(folder / "cache")},
        whole_end=True,
    )


def stopped(process: warm_process.Process, number: int) -> str:
    """What it says after a signal, on stderr."""
    process.send_signal(number)
    try:
        output, errors = process.communicate(timeout=LONG)
    finally:
        process.kill()
    assert process.returncode == 128 + number, (output, errors)
    assert errors is not None and "Traceback" not in errors and not output
    return errors


def there(process: warm_process.Process, condition: Callable[[], Any]) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "command",
    [
        ("bench", "io", ".", "--size", "64MiB", "--rounds", "100000", "--no-fio"),
        ("bench", "swap", ".", "--units", "2", "--unit-size", "1MiB", "--probe-size", "1MiB", "--steps", "100000"),
        ("bench", "card", "."),
        ("tune", ".", "--size", "256MiB"),
    ],
)
def test_what_measures_a_drive(command: tuple[str, ...], tmp_path: Path) -> None:
    process = begin(tmp_path, *command)
    there(process, lambda: list(tmp_path.iterdir()))
    stopped(process, signal.SIGTERM)
    assert not list(tmp_path.iterdir()), "its files are gone"


NATIVE = "[ctypes.CDLL(None).pthread_mutex_lock(mutex) for _ in range(2)]"
"""A call of native code that never ends, without the interpreter's lock: no handler of Python's runs in it."""
MUTEX = "import ctypes\nmutex = ctypes.create_string_buffer(64)\n"


def script(lines: str) -> warm_process.Process:
    """A process of these lines, which have printed "ready"."""
    process = begin(Path.cwd(), code=lines)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    return process


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("work", "text"), [(NATIVE, "stopped before the first step"), ("time.sleep(1000)", "")], ids=["native", "sleep"]
)
def test_a_training_that_is_made_ready(work: str, text: str, number: int) -> None:
    """What it does before its first step may be one long call: weights are made, a text becomes tokens."""
    process = script(
        f"{MUTEX}import sys, time\n"
        "from offload.finetune import job\n"
        "from offload.cli.main import main\n"
        f"job.prepare = lambda *_: (print('ready', flush=True), {work})\n"
        "sys.argv = ['offload', 'train']\n"
        "main()\n"
    )
    assert stopped(process, number).startswith(text)


# -- in the way ---------------------------------------------------------------------------------------


def test_no_signal_comes_between_while_files_are_removed() -> None:
    removed = []

    class Last:
        def __del__(self) -> None:
            for _ in range(60):
                time.sleep(0.01)
            removed.append("by a finalizer")

    def body() -> None:
        last = Last()
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(LONG)
        finally:
            for _ in range(60):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            removed.append("at the end")
            del last

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit), signals():
        body()
    assert removed == ["by a finalizer", "at the end"] or removed == ["at the end", "by a finalizer"]
    assert signal.getsignal(signal.SIGTERM) is before
    assert not any(thread.name == "offload-signals" and thread.is_alive() for thread in threads_soon())


def test_what_is_ignored_stays_ignored() -> None:
    """SIGHUP under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals():
            signal.raise_signal(signal.SIGHUP)
            with exit_on_signal("never said"):
                signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def threads_soon() -> list[threading.Thread]:
    for thread in threading.enumerate():
        if thread.name == "offload-signals":
            thread.join(LONG)
    return threading.enumerate()


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


@pytest.mark.sample(1)
@pytest.mark.parametrize(("words", "steps"), [("", 1000), ("step 1/1", 1)], ids=["at the start", "at the end"])
def test_a_run_that_has_not_begun_or_has_ended_is_not_called_stopped(words: str, steps: int, tmp_path: Path) -> None:
    code, errors = closed_after(tmp_path, words, steps)
    assert (code, errors) in ((1, CLOSED), (0, "")) if words else (code, errors) == (1, CLOSED), errors
