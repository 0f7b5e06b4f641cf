"""The first Ctrl-C keeps every complete step; the second ends the process at once, with one line and exit code 130."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import warm_process

LONG = 240.0
"""Seconds that a process may take to begin, or to end: a slow machine that does much else."""
AT_ONCE = "stopped at once by a second Ctrl-C; steps that were committed are kept"
FOREVER = """\
import time

def forever():
    while True:
        time.sleep(0.01)

"""
"""A function that waits for a signal. One long sleep would miss a signal that comes just before its system call."""
BLOCK = "import ctypes; mutex = ctypes.create_string_buffer(64); lock = ctypes.CDLL(None).pthread_mutex_lock\n"
BLOCKED = "(lock(mutex), lock(mutex))"
"""A call of native code that never returns: no handler of Python's runs in it."""

TRAINING = """\
import sys
import time
import deepspeed
import torch

torch.manual_seed(0)
tier = {"device": "nvme", "nvme_path": "swap"}
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3, "offload_optimizer": tier},
    "offload": {"device": "cpu", "resume": "auto"},
}
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(8, 8), config=config)
for step in range(engine.global_steps, int(sys.argv[1])):
    loss = (engine(torch.ones(4, 8) * step) - 1).square().mean()
    engine.backward(loss)
    engine.step()
    print(step, loss.item(), flush=True)
    time.sleep(float(sys.argv[2]))
engine.destroy()
"""


def begin(folder: Path, text: str, *arguments: str) -> subprocess.Popen[str]:
    """Begins a script as `offload run` does, in a folder: before accelerate is imported, so in no warm process."""
    (folder / "train.py").write_text(text)
    command = [sys.executable, "-m", "offload.deepspeed", "train.py", *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(process: warm_process.Process | subprocess.Popen[str], word: str) -> list[str]:
    """Returns the lines of its output until one that begins with `word`."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if line.startswith(word):
            return lines
    raise AssertionError(f"it ended and never said {word!r}: {process.communicate()}")


def completed(process: subprocess.Popen[str]) -> list[str]:
    """Returns the lines of its output, to its end."""
    output, errors = process.communicate(timeout=LONG)
    assert process.returncode == 0, errors
    return output.splitlines()


def interrupted(process: warm_process.Process | subprocess.Popen[str]) -> str:
    """Returns what it says on stderr after a Ctrl-C that ends it."""
    process.send_signal(signal.SIGINT)
    try:
        _, errors = process.communicate(timeout=LONG)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert errors is not None and "Traceback" not in errors
    return errors


# -- offload run --------------------------------------------------------------------------------------


@pytest.mark.timeout(900)  # three processes, one after the other, import everything
def test_the_first_ends_after_the_last_complete_step_and_the_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    # With a pause behind each step, so that a slow machine does not make thousands before the signal comes.
    process = begin(parts, TRAINING, "1000000", "0.2")
    seen = wait_for(process, "7 ")
    errors = interrupted(process)
    first, kept = errors.strip().splitlines()[-2:]
    assert first.startswith("stopped by Ctrl-C in train.py, line ") and first.endswith("; Ctrl-C again ends at once")
    step = re.search(r"the run is kept in \S+/swap/default, at step (\d+): ", kept)
    assert step is not None and '"resume": "auto" goes on' in kept
    steps = int(step[1]) + 4
    unbroken, resumed = (completed(begin(folder, TRAINING, str(steps), "0")) for folder in (whole, parts))
    assert len(unbroken) == steps and unbroken[:8] == seen
    assert resumed == unbroken[-4:]


ENDINGS = {
    "in a finally": """\
try:
    print("ready", flush=True)
    forever()
finally:
    print("ending", flush=True)
    forever()
""",
    "at exit": """\
atexit.register(lambda: (print("ending", flush=True), forever()))
print("ready", flush=True)
forever()
""",
    "beside a thread": """\
def work():
    time.sleep(0.1)
    print("ready", flush=True)
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    print("ending", flush=True)
    forever()

threading.Thread(target=work).start()
forever()
""",
}
"""Scripts that take long to end."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_second_ends_it_at_once(ending: str, tmp_path: Path) -> None:
    process = begin(tmp_path, f"{FOREVER}import atexit, threading\n{ENDINGS[ending]}")
    wait_for(process, "ready")
    process.send_signal(signal.SIGINT)
    wait_for(process, "ending")
    assert interrupted(process).splitlines()[-1] == AT_ONCE


def test_the_second_ends_native_code_that_does_not_return(tmp_path: Path) -> None:
    text = f"{FOREVER}{BLOCK}import atexit\natexit.register(lambda: (print('ending', flush=True), {BLOCKED}))\n"
    process = begin(tmp_path, text + "print('ready', flush=True)\nforever()\n")
    wait_for(process, "ready")
    process.send_signal(signal.SIGINT)
    wait_for(process, "ending")
    assert interrupted(process).splitlines()[-1] == AT_ONCE


def test_a_script_that_catches_each_is_never_ended(tmp_path: Path) -> None:
    text = (
        f"{FOREVER}"
        "for number in range(3):\n"
        "    try:\n"
        "        print('ready', flush=True)\n"
        "        forever()\n"
        "    except KeyboardInterrupt:\n"
        "        print('caught', number, flush=True)\n"
    )
    process = begin(tmp_path, text)
    for _ in range(3):
        wait_for(process, "ready")
        process.send_signal(signal.SIGINT)
        wait_for(process, "caught")
    _, errors = process.communicate(timeout=LONG)
    assert process.returncode == 0 and not errors, errors


def test_offload_run_itself(tmp_path: Path) -> None:
    """The real command, from its start: also while it imports."""
    text = "import time\nprint('ready', flush=True); [time.sleep(0.01) for _ in range(100_000)]\n"
    (tmp_path / "train.py").write_text(text)
    command = [sys.executable, "-m", "offload", "run", "train.py"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(process, "ready")
    assert interrupted(process) == "stopped by Ctrl-C in train.py, line 2; Ctrl-C again ends at once\n"


def test_while_the_imports_of_offload_run_take_their_time(tmp_path: Path) -> None:
    from offload.cli.commands.launch import _START

    blocked = _START.replace("from offload", f"print('ready', flush=True)\n{FOREVER}forever()\nfrom offload")
    process = subprocess.Popen(
        [sys.executable, "-c", blocked, "train.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for(process, "ready")
    assert interrupted(process) == "stopped before the script began\n"


# -- offload train ------------------------------------------------------------------------------------


@pytest.mark.parametrize("work", ["forever()", BLOCKED], ids=["sleep", "native"])
def test_the_second_ends_a_training_that_saves_its_model(work: str, tmp_path: Path) -> None:
    process = warm_process.begin(
        [
            "-c",
            f"{FOREVER}{BLOCK}import signal\n"
            "from offload.cli.commands.train_run import Signals\n"
            "with Signals() as signals, signals.hold():\n"
            "    print('ready', flush=True)\n"
            "    while signal.getsignal(signal.SIGINT) == signals._stop:\n"
            "        time.sleep(0.01)\n"
            f"    print('held', flush=True)\n    {work}\n",
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    wait_for(process, "ready")
    process.send_signal(signal.SIGINT)
    wait_for(process, "held")
    assert interrupted(process) == "stopped at once by a second signal; steps that were committed are kept\n"


@pytest.mark.parametrize("pause", [0.0, 0.02])
def test_two_in_a_row_lose_no_committed_step_of_offload_train(pause: float, tmp_path: Path) -> None:
    (tmp_path / "text.py").write_text("def double(number):\n    return 2 * number\n\n\n" * 50)
    command = ["-m", "offload", "train", "--text", "text.py", "--batch-size", "2", "--seq-len", "32", "--log", "log"]
    train = [*command, "--device", "cpu", "--resume", "auto", "--steps"]
    process = warm_process.begin(
        [*train, "100000"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, whole_end=True
    )
    while process.poll() is None and not ((tmp_path / "log").exists() and (tmp_path / "log").stat().st_size):
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    time.sleep(pause)  # where the second arrives is left to chance: each moment must do
    errors = interrupted(process)
    assert "stopped" in errors
    logged = [json.loads(line)["step"] for line in (tmp_path / "log").read_text().splitlines()]
    done = warm_process.begin(
        [*train, str(logged[-1] + 2)], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    output, errors = done.communicate()
    assert done.returncode == 0 and output is not None, errors
    # The step that was being committed may be made again, as after a kill.
    assert any(
        f"resuming after step {step} of the run" in output for step in (logged[-1] - 1, logged[-1], logged[-1] + 1)
    )
