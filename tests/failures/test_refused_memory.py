"""Memory that the system refuses, at any moment, is one error with a cure, and takes no committed step.

Mappings of buffers, a limit of the process (`ulimit -v`), and each `operator new` of the native code.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload import testing
from offload.errors import BudgetError, EngineFailed, no_memory
from offload.threads import Thread
from tests import ROOT
from tests.support import models
from tests.support.model_folders import make_folder
from tests.support.oracle import run, start, train_step
from tests.support.processes import warm_process

DISK = ("nvme", "nvme")
JOB = models.SHALLOW._replace(steps=2)
CURE = r"raise the limit \(ulimit -v\), end other programs, or give a smaller host_memory, batch or sequence"


class Refusal:
    """Lets the mapping of this number fail."""

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0

    def __call__(self, real: Callable[[int], Any], nbytes: int) -> Any:
        self.seen += 1
        if self.seen == self.at + 1:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return real(nbytes)


def _train(folder: Path, refusal: Refusal | None = None) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        if refusal is not None:
            testing.intercept(patch, "memory.map", refusal)
        engine = start(JOB, DISK, folder, resume="auto")
        try:
            losses = [train_step(engine, JOB, step) for step in range(engine.global_steps, JOB.steps)]
            engine.save_checkpoint(folder / "saved")
            return losses
        finally:
            engine.destroy()


def test_every_mapping_that_is_refused_is_one_error_with_its_size(tmp_path: Path) -> None:
    expected = run(JOB, DISK, tmp_path / "whole").losses
    refusal = Refusal(0)
    for refusal in map(Refusal, range(0, 1000, 3)):
        folder = tmp_path / str(refusal.at)
        try:
            _train(folder, refusal)
        except (BudgetError, EngineFailed) as error:
            assert re.search(rf"no host memory for [0-9.]+ .?i?B.* \(.*Cannot allocate memory\): {CURE}", str(error))
        else:
            assert refusal.seen <= refusal.at, "the refusal was swallowed"
            break
        losses = _train(folder)
        assert losses == expected[JOB.steps - len(losses) :]
    assert refusal.at > 5


# -- a limit of the process ------------------------------------------------------------------------------

LIMITED = """
import ctypes, resource, sys
from pathlib import Path
import pytest
import offload.finetune.job
from offload import testing
from offload.cli.main import main

def limit():
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + {more}, resource.RLIM_INFINITY))

def commit(real, *arguments):
    limit()
    return real(*arguments)

if {begins}:
    limit()
else:
    ctypes.CDLL(None).mallopt(-3, 65536)  # each block of 64 KiB is a mapping, which the limit refuses
    testing.intercept(pytest.MonkeyPatch(), "update.commit", commit)
sys.argv = ["offload", *{arguments!r}]
main()
"""
TRAIN = "train --model model --text text.py --seq-len 32 --batch-size 2 --device cpu --eval-every 0 --steps 3".split()


def _losses(path: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["step"]: line["loss"] for line in lines}


@pytest.mark.slow
def test_a_limit_of_the_process_is_an_error_of_one_line(tmp_path: Path) -> None:
    """At the start, in a process of its own: a fork has stacks of the threads of its parent, and needs no memory."""
    make_folder(tmp_path / "model")
    (tmp_path / "text.py").write_text("def double(number):\n    return 2 * number\n\n\n" * 50)
    calm = warm_process.run(["-m", "offload", *TRAIN, "--run", "calm", "--log", "calm", "--no-output"], cwd=tmp_path)
    assert calm.returncode == 0, calm.stderr
    arguments = [*TRAIN, "--log", "log", "--no-output", "--resume", "auto"]
    for begins, more in ((True, 1 << 20), (False, 1 << 20), (False, 0)):  # without any, no thread can begin
        code = LIMITED.format(more=more, begins=begins, arguments=arguments)
        command = [sys.executable, "-c", code]
        if begins:
            done = subprocess.run(
                command, cwd=tmp_path, env=_environment(), capture_output=True, text=True, check=False
            )
        else:
            done = warm_process.python(code, cwd=tmp_path)
        assert done.returncode in (1, 2), (more, done.stdout[-1000:], done.stderr[-3000:])
        told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(told) == 1 and re.search(f"{CURE}|this batch has no room: .* or a larger limit", told[0]), (
            done.stderr
        )
        assert "Traceback" not in done.stderr
    resumed = warm_process.run(["-m", "offload", *arguments], cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert _losses(tmp_path / "log") == _losses(tmp_path / "calm")


@pytest.mark.timeout(60)
def test_a_thread_that_finds_no_memory_to_begin_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """`threading.Thread.start` would wait for ever."""

    def bootstrap(_: threading.Thread) -> None:
        raise MemoryError

    ran = list[int]()
    thread = Thread(target=ran.append, args=(1,), daemon=True)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "_bootstrap", bootstrap)
        patch.setattr(sys, "unraisablehook", lambda _: None)
        with pytest.raises(RuntimeError, match="can't start new thread") as caught:
            thread.start()
    assert isinstance(no_memory(caught.value), BudgetError)
    assert not ran and thread not in threading.enumerate()


def test_a_thread_that_begins_is_one_of_python() -> None:
    ran = list[threading.Thread]()
    thread = Thread(target=lambda: ran.append(threading.current_thread()), name="one")
    thread.start()
    thread.join()
    assert ran == [thread] and thread.name == "one" and thread.ident and not thread.is_alive()
    with pytest.raises(RuntimeError, match="once"):
        thread.start()


def _environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)} | more


# -- each `operator new` of the native code

NATIVE = """
import ctypes, itertools, sys
from pathlib import Path
from offload.errors import OffloadError
from tests.failures import linear_engine
refuse = ctypes.CDLL(sys.argv[1]).refuse_new
refuse.argtypes, refuse.restype = [ctypes.c_long], ctypes.c_long

def live(folder, resume):
    engine = None
    try:
        engine = linear_engine.start(folder, resume=resume)
        while engine.global_steps < 3:
            linear_engine.train(engine)
        return engine.module.weight.sum().item()
    finally:
        if engine is not None:
            engine.destroy()

expected = live(Path(sys.argv[2]) / "whole", "never")
stride = int(sys.argv[3])
for at in itertools.count(0, stride):
    folder, before = Path(sys.argv[2]) / str(at), refuse(at)
    told = ""
    try:
        live(folder, "never")
    except (OffloadError, MemoryError) as error:
        told = f"{type(error).__name__}: {error}"
    refused = refuse(-1) - before
    assert bool(told) == bool(refused) or not told, told
    assert live(folder, "auto") == expected, at
    print(at, refused, told, flush=True)
    if not refused:
        break
"""


@pytest.mark.parametrize("stride", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_each_native_allocation_that_fails_is_one_error(stride: int, tmp_path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a compiler")
    library = tmp_path / "refused_new.so"
    source = ROOT / "tests" / "failures" / "native" / "refused_new.cpp"
    subprocess.run([compiler, "-std=c++20", "-O1", "-shared", "-fPIC", source, "-o", library, "-ldl"], check=True)
    command = [sys.executable, "-c", NATIVE, str(library), str(tmp_path), str(stride)]
    environment = _environment(LD_PRELOAD=str(library))
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout[-500:], done.stderr[-3000:])
    *lines, last = done.stdout.splitlines()
    assert len(lines) > 2 and last.split()[1] == "0", "the last one was beyond all allocations"
    # Of a call of the engine it is Python's own error, as of any other call that finds no memory. Kernels that find
    # none for a further thread go on without it.
    named = rf"^\d+ 1 $|MemoryError: std::bad_alloc$|{CURE}|the system has no memory for this request; raise the limit"
    assert not [line for line in lines if not re.search(named, line)]
