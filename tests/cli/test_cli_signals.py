"""Ctrl-C and SIGTERM end a run with the right code; its store and its log agree, and it resumes bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offload.cli.commands.train_run import Signals, Stopped
from offload.cli.main import app
from offload.cli.signals import ENDING
from offload.presets import PRESETS
from tests.support.processes import warm_process

STEPS = 40
ARGUMENTS = ("--batch-size", "2", "--seq-len", "32", "--device", "cpu", "--log", "log")


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of one's own, a default model of 0.2M, and handlers that let a late signal pass."""
    monkeypatch.chdir(tmp_path)
    tiny = PRESETS["gpt2-tiny"]
    monkeypatch.setitem(PRESETS, "gpt2-tiny", tiny._replace(settings=tiny.settings | {"n_layer": 2, "n_embd": 64}))
    (tmp_path / "text.py").write_text("def double(number):\n    return 2 * number\n\n\n" * 50)
    before = {number: signal.signal(number, lambda *_: None) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def train(*arguments: str) -> Any:
    return CliRunner().invoke(
        app, ["train", "--text", "text.py", "--steps", str(STEPS), *ARGUMENTS, *arguments], catch_exceptions=False
    )


def log() -> list[tuple[int, float]]:
    lines = Path("log").read_text().splitlines()
    return [(line["step"], line["loss"]) for line in map(json.loads, lines) if "loss" in line]


@contextlib.contextmanager
def signalled(number: int, delay: float) -> Iterator[None]:
    """Inside, this process gets a signal `delay` seconds after a step was logged; one that comes late is ignored."""
    over = threading.Event()

    def send() -> None:
        path = Path("log").absolute()
        seen = path.stat().st_size if path.exists() else 0
        while not over.wait(0.001) and (path.stat().st_size if path.exists() else 0) <= seen:
            pass
        if not over.wait(delay):
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.slow
def test_stopped_again_and_again() -> None:
    assert train().exit_code == 0
    unbroken = log()
    Path("log").unlink()
    chance, reached = random.Random(3), 0
    for number in (signal.SIGINT, signal.SIGTERM) * 4:
        with signalled(number, chance.uniform(0.0, 0.08)):
            result = train("--resume", "auto" if reached else "never")
        if result.exit_code == 0:
            break
        assert result.exit_code == 128 + number, result.output
        assert "--resume auto" in result.stderr and "offload rm" in result.stderr
        resumed = re.search(r"resuming after step (\d+) of the run", result.stdout)
        assert (int(resumed[1]) if resumed else 0) == reached, "store and log do not agree"
        assert log()[-1][0] >= reached
        reached = log()[-1][0]
    else:
        assert train("--resume", "must").exit_code == 0
    assert 0 < reached < STEPS, "no run was stopped"
    assert log() == unbroken


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopped_within_a_window_of_commits(number: int) -> None:
    """With a commit every 100 steps: the end of the run is one, so nothing that was logged is done again."""
    Path("every.json").write_text(json.dumps({"offload": {"durability": {"every": 100}}}))
    assert train("--config", "every.json").exit_code == 0
    unbroken = log()
    Path("log").unlink()
    with signalled(number, 0.03):
        result = train("--config", "every.json")
    assert result.exit_code == 128 + number, result.output
    reached = log()[-1][0]
    assert 0 < reached < STEPS
    result = train("--config", "every.json", "--resume", "must")
    assert result.exit_code == 0
    resumed = re.search(r"resuming after step (\d+) of the run", result.stdout)
    assert resumed is not None and int(resumed[1]) == reached
    assert log() == unbroken


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_process_that_is_stopped(number: int) -> None:
    """The real command, in a process of its own."""
    process = warm_process.begin(
        ["-m", "offload", "train", "--text", "text.py", "--steps", "100000", *ARGUMENTS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        whole_end=True,
    )
    while process.poll() is None and not (Path("log").exists() and Path("log").stat().st_size):
        time.sleep(0.005)
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == 128 + number, errors
    assert "Traceback" not in errors and "--resume auto" in errors
    assert len(errors.splitlines()) == 1, "libraries have words of their own"
    assert Path("swap/default").is_dir()


@pytest.mark.slow
def test_a_terminal_that_closes() -> None:
    """The run ends as on SIGTERM, though nothing can be printed any more."""
    master, slave = os.openpty()
    os.set_blocking(master, False)
    # The first terminal that the leader of a session opens becomes its own.
    command = f'exec "$0" "$@" <{os.ttyname(slave)} >{os.ttyname(slave)} 2>&1'
    words = [sys.executable, "-m", "offload", "train", "--text", "text.py", "--steps", "100000", *ARGUMENTS]
    process = subprocess.Popen(["sh", "-c", command, *words], start_new_session=True)
    try:
        while process.poll() is None and not (Path("log").exists() and len(log()) > 1):
            with contextlib.suppress(BlockingIOError):
                os.read(master, 1 << 16)
            time.sleep(0.005)
        assert process.poll() is None, "it ended before"
        os.close(slave)
        os.close(master)
        assert process.wait(120) == 128 + signal.SIGHUP
    finally:
        process.kill()
    found = CliRunner().invoke(app, ["inspect", "swap/default", "--json"], catch_exceptions=False)
    assert json.loads(found.stdout)["ranks"][0]["commits"][0]["step"] == log()[-1][0]


def test_a_signal_that_the_parent_ignores_stays_ignored() -> None:
    """As SIGHUP under nohup, and SIGINT in the background jobs of a script."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
        with Signals():
            signal.raise_signal(number)
            assert signal.getsignal(number) is signal.SIG_IGN
        assert signal.getsignal(number) is signal.SIG_IGN


def test_a_terminal_may_hang_up_twice() -> None:
    with pytest.raises(Stopped) as stopped, Signals() as signals, signals.hold():
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
    assert stopped.value.number == signal.SIGHUP


def test_a_signal_raises_at_once() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped) as stopped, Signals():
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("the signal did not raise")
    assert stopped.value.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_held_signal_raises_at_the_end() -> None:
    done = False
    with pytest.raises(Stopped), Signals() as signals:
        with signals.hold():
            signal.raise_signal(signal.SIGINT)
            done = True
        raise AssertionError("the held signal was lost")
    assert done


def test_without_a_signal_holding_does_nothing() -> None:
    with Signals() as signals, signals.hold():
        pass
