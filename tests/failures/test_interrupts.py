"""A signal waits until a change has ended; Ctrl-C leaves an engine that goes on or a run that resumes."""

from __future__ import annotations

import _thread
import contextlib
import dis
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from offload import interrupts, testing
from offload.errors import EngineFailed
from offload.interrupts import defer_signals, interruptible, restore_signals, uninterrupted
from offload.swapper.memory.lock import InterruptibleLock
from offload.swapper.pager import Pager
from tests.failures import linear_engine
from tests.support.devices.late_device import LateDevice, Ticks, use_device
from tests.support.models import Mixture, mixture_loss
from tests.support.oracle import Job, room_for, start, train_step
from tests.support.processes import warm_process
from tests.support.sampling import examples

# A handler may raise between the `open` of another library and its `with`: Python closes the file, and warns.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <_io.FileIO:pytest.PytestUnraisableExceptionWarning"
)

STEPS = 5
_OURS = str(Path(offload.__file__).parent)


class Net(nn.Module):
    """Small, with dropout, so that a lost or repeated forward shows in the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(32, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = hidden + self.dropout(torch.tanh(block(hidden)))
        return self.head(hidden)


def net_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    torch.manual_seed(100 + step)  # dropout depends on the step alone, however often it is begun
    return model(torch.randn(2, 32, generator=generator)).pow(2).mean()


JOB = Job(Net, net_loss, steps=STEPS)


class _Arrival:
    """`_Arrival()[signal.SIGINT]` lets the signal come. CPython does not look for signals behind a subscript."""

    __getitem__ = _thread.interrupt_main


class Interrupt:
    """A trace function that lets Ctrl-C come at the `at`-th moment between two looks for signals."""

    def __init__(self, at: int) -> None:
        self.at, self.seen, self.where = at, 0, ""
        self._looked = False
        self._codes: dict[Any, dict[int, str]] = {}
        self._arrival = _Arrival()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(_OURS) and not name.endswith("threading.py"):
            return None
        frame.f_trace_opcodes = True
        self._looked = True
        return self._local

    def _local(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event != "opcode":
            return self._local
        code = frame.f_code
        names = self._codes.get(code)
        if names is None:
            names = self._codes[code] = {i.offset: i.opname for i in dis.get_instructions(code)}
        name, looked = names[frame.f_lasti], self._looked
        self._looked = name.startswith("CALL") or "JUMP_BACKWARD" in name
        if looked:
            self.seen += 1
            if self.seen == self.at:
                sys.settrace(None)
                self.where = f"{code.co_filename.rsplit('/', 1)[1]}:{frame.f_lineno}"
                self._arrival[signal.SIGINT]  # from here on nothing is called: it is handled in `frame`
        return self._local


class Deferred:
    """Counts signals that the library defers, and waits until each has arrived again."""

    def __init__(self) -> None:
        self._asked, self._again = interrupts._is_deferred, interrupts._signal_again
        self._begun = self._arrived = 0

    def is_deferred(self, frame: FrameType | None) -> bool:
        is_asked = self._asked(frame)
        self._begun += is_asked
        return is_asked

    def signal_again(self, number: int) -> None:
        self._again(number)
        self._arrived += 1

    def wait(self) -> None:
        while self._arrived < self._begun:
            time.sleep(0.001)


def come() -> None:
    """Waits for a signal that is sent again a moment later; a long sleep misses one just before its system call."""
    for _ in range(6000):
        time.sleep(0.01)


def _run(interrupt: Interrupt, act: Callable[[], object]) -> None:
    """Call `act` under `interrupt`; Ctrl-C ends it, and goes no further. An engine wraps the handler by itself."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    unraisable, sys.unraisablehook = sys.unraisablehook, _drop
    deferred = Deferred()
    try:
        with (
            mock.patch.object(interrupts, "_is_deferred", deferred.is_deferred),
            mock.patch.object(interrupts, "_signal_again", deferred.signal_again),
        ):
            try:
                sys.settrace(interrupt)
                act()
            finally:
                sys.settrace(None)
                deferred.wait()  # whatever `act` raised
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
        sys.unraisablehook = unraisable
        signal.signal(signal.SIGINT, before)


def _drop(_: object) -> None:
    """An error in a `__del__`, such as those of torch, which CPython drops whoever has caused it: training goes on.

    pytest would keep it, and so every view of weights in its frames.
    """


def _steps(engine: offload.Engine, job: Job, first: int) -> dict[int, float]:
    return {step: train_step(engine, job, step) for step in range(first, STEPS)}


def _moments(job: Job, folder: Path, **options: Any) -> int:
    engine = start(job, ("nvme", "nvme"), folder, **options)
    interrupt = Interrupt(-1)
    train_step(engine, job, 0)
    _run(interrupt, lambda: train_step(engine, job, 1))
    engine.destroy(remove=True)
    return interrupt.seen


def _interrupted(
    job: Job, interrupt: Interrupt, folder: Path, expected: dict[int, float], **options: Any
) -> str | None:
    """Interrupt the second or third step and go on; what was wrong, or None."""
    engine = start(job, ("nvme", "nvme"), folder, **options)
    try:
        train_step(engine, job, 0)
        with contextlib.suppress(EngineFailed):
            _run(interrupt, lambda: [train_step(engine, job, step) for step in (1, 2)])
        engine.zero_grad()
        losses = _steps(engine, job, engine.global_steps)
        stopped = False
    except EngineFailed:
        stopped = True
    finally:
        engine.destroy()
    if stopped:
        engine = start(job, ("nvme", "nvme"), folder, resume="must")
        engine.zero_grad()  # the first call, which restores the generators: the loss seeds them itself
        losses = _steps(engine, job, engine.global_steps)
        engine.destroy()
    wrong = {step: value for step, value in losses.items() if value != expected[step]}
    return f"{interrupt.at} at {interrupt.where}: {'resumed' if stopped else 'went on'} with {wrong}" if wrong else None


def _whole(job: Job, folder: Path) -> dict[int, float]:
    engine = start(job, ("nvme", "nvme"), folder)
    losses = _steps(engine, job, 0)
    engine.destroy(remove=True)
    return losses


def _try(seed: int, count: int, folder: Path, job: Job = JOB, **options: Any) -> None:
    threads = threading.active_count()
    expected, moments = _whole(job, folder / "whole"), _moments(job, folder / "moments", **options)
    chance = random.Random(seed)
    wrong = []
    for trial in range(count):
        at = chance.randrange(1, 2 * moments)
        interrupt = Interrupt(at)
        try:
            wrong.append(_interrupted(job, interrupt, folder / str(trial), expected, **options))
        except Exception as error:
            wrong.append(f"{at} at {interrupt.where}: {type(error).__name__} {error}")
    wrong = [words for words in wrong if words]
    assert not wrong, "\n".join([f"{len(wrong)} of {count}", *wrong])
    assert threading.active_count() == threads


@pytest.mark.parametrize("call", ["a count", "a wait"])
def test_no_interrupt_leaves_the_lock_taken(call: str) -> None:
    """A call that ends a `with`, and one that gives the lock away meanwhile: it is free after both."""
    monitor = InterruptibleLock()
    trace = SimpleNamespace(unforeseen=0)
    pager = SimpleNamespace(lock=monitor.lock, _uses=0, _hits=0, table=SimpleNamespace(access_order=trace))
    whole = 0

    def waits() -> None:
        with monitor.lock:
            monitor.without_lock(lambda: None)
            assert monitor.lock._is_owned()  # type: ignore[attr-defined]

    def act() -> None:
        nonlocal whole
        defer_signals(monitor)
        if call == "a count":
            Pager.counts(pager)  # type: ignore[arg-type]
        else:
            waits()
        whole += 1

    counted = Interrupt(-1)
    _run(counted, act)
    for at in range(1, counted.seen + 1):
        interrupt = Interrupt(at)
        _run(interrupt, act)
        assert not monitor.lock._is_owned(), interrupt.where  # type: ignore[attr-defined]
    assert whole <= counted.seen, "one was interrupted at least"


@pytest.mark.works("Recovery", "Ctrl-C at any moment of a forward, a backward or a step", "right or refused")
def test_interrupts(tmp_path: Path) -> None:
    _try(0, examples(40), tmp_path)


BLOCKS = 6
AT = 3
"""The block in whose backward Ctrl-C comes; the blocks before it are still to come."""


class Watch:
    """The blocks whose backward began, last first, and the thread of each."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.threads: set[int] = set()
        self.armed = self.in_change = False


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@interrupts.uninterrupted
def interrupt_a_change() -> None:
    interrupt()


class BackwardMark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, watch: Watch, block: int) -> torch.Tensor:
        ctx.watch, ctx.block = watch, block
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.watch.blocks.append(ctx.block)
        ctx.watch.threads.add(threading.get_ident())
        if ctx.watch.armed and ctx.block == AT:
            (interrupt_a_change if ctx.watch.in_change else interrupt)()
        return gradient.clone(), None, None


class BackwardNet(nn.Module):
    def __init__(self, recomputes: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(BLOCKS))
        self.watch, self._reentrant = Watch(), recomputes

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if self._reentrant is None:
                hidden = block(hidden)
            else:
                hidden = checkpoint(block, hidden, use_reentrant=self._reentrant)
            hidden = torch.tanh(BackwardMark.apply(hidden, self.watch, index))
        return hidden


class Recomputed(BackwardNet):
    def __init__(self) -> None:
        super().__init__(False)


class Reentrant(BackwardNet):
    def __init__(self) -> None:
        super().__init__(True)


def loss_backward(model: Any, step: int, micro: int) -> torch.Tensor:
    hidden = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
    return model(hidden.requires_grad_()).pow(2).mean()  # a reentrant checkpoint wants an input that does


BACKWARD_JOB = Job(BackwardNet, loss_backward, steps=3)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevice]:
    """A device that obeys the caller's wish for one thread, as torch does; the handler is Python's."""
    device = LateDevice(0, 0.5)
    use_device(monkeypatch, device, always=False)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield device
    signal.signal(signal.SIGINT, before)


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", [BackwardNet, Recomputed, Reentrant])
def test_ctrl_c_ends_a_backward_within_one_unit(model: type[BackwardNet], device: LateDevice, tmp_path: Path) -> None:
    job = BACKWARD_JOB._replace(model=model)
    expected = start(job, ("nvme", "nvme"), tmp_path / "whole")
    losses = [train_step(expected, job, step) for step in range(job.steps)]
    expected.destroy(remove=True)
    engine = start(job, ("nvme", "nvme"), tmp_path / "interrupted")
    with Ticks(device):
        assert train_step(engine, job, 0) == losses[0]
        watch = engine.module.watch
        watch.blocks.clear()
        watch.armed = True
        with pytest.raises(KeyboardInterrupt):
            engine.backward(loss_backward(engine, 1, 0))
        assert watch.blocks[: BLOCKS - AT] == list(range(BLOCKS - 1, AT - 1, -1))
        assert len(watch.blocks) <= BLOCKS - AT + 1, "the next unit at most"
        watch.armed = False
        engine.zero_grad()
        assert [train_step(engine, job, step) for step in (1, 2)] == losses[1:]
    assert watch.threads == {threading.get_ident()} and device.broken == []
    engine.destroy(remove=True)


def test_a_ctrl_c_that_had_to_wait_for_a_change_is_obeyed_by_the_next_unit(
    device: LateDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However soon the next units are done: the signal arrives again only after a moment."""
    testing.replace(monkeypatch, "clock.interrupts", 0.3)
    engine = start(BACKWARD_JOB, ("nvme", "nvme"), tmp_path, device_memory=room_for(BACKWARD_JOB, 2))
    watch = engine.module.watch
    watch.armed = watch.in_change = True
    with Ticks(device), pytest.raises(KeyboardInterrupt):
        engine.backward(loss_backward(engine, 0, 0))
    assert len(watch.blocks) <= BLOCKS - AT + 1
    engine.destroy(remove=True)


def test_a_backward_of_torch_is_ended_when_it_is_over(device: LateDevice, tmp_path: Path) -> None:
    """Where the loop calls `loss.backward()`: as in plain PyTorch on a GPU. Training goes on as right."""
    engine = start(BACKWARD_JOB, ("nvme", "nvme"), tmp_path)
    watch = engine.module.watch
    watch.armed = True
    with Ticks(device):
        with pytest.raises(KeyboardInterrupt):
            loss_backward(engine, 0, 0).backward()
        assert watch.blocks == list(range(BLOCKS - 1, -1, -1)) and threading.get_ident() not in watch.threads
        watch.armed = False
        engine.zero_grad()
        train_step(engine, BACKWARD_JOB, 0)
    assert device.broken == []
    engine.destroy(remove=True)


def test_a_ctrl_c_as_the_backward_ends_leaves_no_setting_behind(
    device: LateDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(BACKWARD_JOB, ("cpu", "cpu"), tmp_path)
    setting = torch.autograd.set_multithreading_enabled
    leave = setting.__exit__

    def interrupted(self: Any, *error: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        leave(self, *error)

    ended = loss_backward(engine, 0, 0)
    monkeypatch.setattr(setting, "__exit__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.backward(ended)
        come()
    monkeypatch.undo()
    assert torch._C._is_multithreading_enabled()
    engine.destroy(remove=True)


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
import time
import deepspeed
from tests.failures import linear_engine

engine = linear_engine.start("swap", resume="auto")
while True:
    linear_engine.train(engine)
    print(engine.global_steps, flush=True)
    time.sleep(0.2)  # so that a slow machine does not make thousands of steps before the signal comes
"""


AS_RUN = """\
import runpy, sys
for name in [name for name in sys.modules if name.split(".")[0] in ("accelerate", "transformers")]:
    del sys.modules[name]  # they have asked for DeepSpeed already
sys.argv = ["offload.deepspeed", "train.py"]
runpy.run_module("offload.deepspeed", run_name="__main__", alter_sys=True)
"""


def begin(folder: Path, text: str) -> warm_process.Process:
    """Begins a script in a folder as `offload run` does."""
    (folder / "train.py").write_text(text)
    return warm_process.begin(["-c", AS_RUN], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for(process: warm_process.Process | subprocess.Popen[str], word: str) -> list[str]:
    """Returns the lines of its output until one that begins with `word`."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if line.startswith(word):
            return lines
    raise AssertionError(f"it ended and never said {word!r}: {process.communicate()}")


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


def test_the_first_ends_after_the_last_complete_step_and_keeps_the_run(tmp_path: Path) -> None:
    process = begin(tmp_path, TRAINING)
    wait_for(process, "2")
    errors = interrupted(process)
    first, last = errors.strip().splitlines()[-2:]
    assert first.startswith("stopped by Ctrl-C in train.py, line ") and first.endswith("; Ctrl-C again ends at once")
    step = re.search(r"the run is kept in \S+swap/default, at step (\d+): ", last)
    assert step is not None and '"resume": "auto" goes on' in last
    engine = linear_engine.start(tmp_path / "swap", resume="must")
    assert engine.global_steps == int(step[1]) >= 2
    engine.destroy(remove=True)


ENDINGS = {
    "in a finally": """\
try:
    print("ready", flush=True)
    forever()
finally:
    print("ending", flush=True)
    forever()
""",
    "in native code at exit": f"""\
{BLOCK}
atexit.register(lambda: (print("ending", flush=True), {BLOCKED}))
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


@pytest.mark.parametrize(
    "ending", [pytest.param(name, marks=() if "native" in name else pytest.mark.slow) for name in ENDINGS]
)
def test_the_second_ends_it_at_once(ending: str, tmp_path: Path) -> None:
    process = begin(tmp_path, f"{FOREVER}import atexit, threading\n{ENDINGS[ending]}")
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


def test_while_the_imports_of_offload_run_take_their_time(tmp_path: Path) -> None:
    from offload.cli.commands.launch import _START

    blocked = _START.replace("from offload", f"print('ready', flush=True)\n{FOREVER}forever()\nfrom offload")
    process = subprocess.Popen(
        [sys.executable, "-c", blocked, "train.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for(process, "ready")
    assert interrupted(process) == "stopped before the script began\n"


# -- offload train ------------------------------------------------------------------------------------


def test_the_second_ends_a_training_that_saves_its_model(tmp_path: Path) -> None:
    process = warm_process.begin(
        [
            "-c",
            f"{FOREVER}{BLOCK}import signal\n"
            "from offload.cli.commands.train_run import Signals\n"
            "with Signals() as signals, signals.hold():\n"
            "    print('ready', flush=True)\n"
            "    while signal.getsignal(signal.SIGINT) == signals._stop:\n"
            "        time.sleep(0.01)\n"
            f"    print('held', flush=True)\n    {BLOCKED}\n",
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    wait_for(process, "ready")
    process.send_signal(signal.SIGINT)
    wait_for(process, "held")
    assert interrupted(process) == "stopped at once by a second signal; steps that were committed are kept\n"


@pytest.mark.parametrize("pause", [0.0, pytest.param(0.02, marks=pytest.mark.slow)])
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


SCRIPT = """
import os, signal
from offload import testing
from pathlib import Path
from tests.failures import linear_engine
engine = linear_engine.start(Path({folder!r}), durability={{"every": 2}})
for _ in range(3):
    linear_engine.train(engine)
testing.inspect(engine).update_worker.come_to_rest = lambda: os.kill(os.getpid(), signal.SIGINT)
{ending}
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "ending", ["", "engine.destroy()", "engine.destroy(remove=True)"], ids=["at exit", "destroy", "remove"]
)
def test_the_run_is_kept_and_told(ending: str, tmp_path: Path) -> None:
    done = warm_process.python(SCRIPT.format(folder=str(tmp_path), ending=ending))
    assert done.stderr.count("the run is kept in") == 1, done.stderr
    assert "at step 2, the last committed one of 3" in done.stderr
    assert "is refused while the run is there" in done.stderr
    if not ending:
        assert "at exit: stopped by Ctrl-C" in done.stderr and "Traceback" not in done.stderr
    assert (done.returncode == 0) == (not ending), "Python's status, whatever a handler at exit meets"
    engine = linear_engine.start(tmp_path, durability={"every": 2}, resume="must")
    assert engine.global_steps == 2
    linear_engine.train(engine)
    engine.destroy(remove=True)


OF_PARAMETERS = tuple(f"/offload/engine/{name}.py" for name in ("hooks", "params", "unit_views"))
"""Files of the code that runs between a module's call and its parameters."""


class Owner:
    """An engine's part in this."""


OWNER = Owner()


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    restore_signals(OWNER)
    for number, previous in before.items():
        signal.signal(number, previous)


def _signal(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # CPython handles the signal here


def test_a_change_is_completed_before_the_handler_runs() -> None:
    steps: list[str] = []

    @uninterrupted
    def change() -> None:
        steps.append("first half")
        _signal()
        steps.append("second half")

    defer_signals(OWNER)
    with pytest.raises(KeyboardInterrupt):
        change()
        come()
    assert steps == ["first half", "second half"]


def test_a_wait_within_a_change_is_interrupted() -> None:
    @interruptible
    def wait() -> None:
        _signal()
        raise AssertionError("the handler did not run")

    @uninterrupted
    def change() -> None:
        wait()

    defer_signals(OWNER)
    with pytest.raises(KeyboardInterrupt):
        change()


def test_a_handler_that_raises_another_exception_waits_too() -> None:
    class Stopped(Exception):
        pass

    def stop(number: int, frame: object) -> None:
        raise Stopped

    @uninterrupted
    def change() -> None:
        _signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    defer_signals(OWNER)
    with pytest.raises(Stopped):
        change()
        come()


def test_handlers_stay_wrapped_while_one_engine_lives() -> None:
    owner = Owner()
    defer_signals(OWNER)
    defer_signals(owner)
    restore_signals(OWNER)
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    restore_signals(owner)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("action", [signal.SIG_DFL, signal.SIG_IGN])
def test_an_action_that_is_no_function_is_left_alone(action: signal.Handlers) -> None:
    signal.signal(signal.SIGTERM, action)
    defer_signals(OWNER)
    assert signal.getsignal(signal.SIGTERM) == action


def test_another_thread_changes_no_handler() -> None:
    thread = threading.Thread(target=defer_signals, args=(OWNER,))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_engine_wraps_a_handler_that_was_set_between_steps_and_restores_it(tmp_path: Path) -> None:
    """Jupyter sets the default handler before each cell."""
    engine = start(Job(Mixture, mixture_loss), ("nvme", "nvme"), tmp_path)
    for step in range(2):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        engine.backward(mixture_loss(engine, step, 0))
        engine.step()
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    engine.destroy()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("after", range(5, 60, 18))
def test_a_handler_may_destroy_the_engine_at_any_moment_of_a_forward(after: int, tmp_path: Path) -> None:
    """The forward that was interrupted raises the handler's error, or that the engine is closed."""
    engine = start(Job(Mixture, mixture_loss), ("nvme", "nvme"), tmp_path)
    calls = 0

    class Stopped(Exception):
        pass

    def stop(number: int, frame: object) -> None:
        engine.destroy()
        raise Stopped

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.endswith(OF_PARAMETERS)
        if calls == after:
            calls += 1
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    sys.setprofile(count)
    try:
        with pytest.raises(Stopped):
            for step in range(2):
                mixture_loss(engine, step, 0)
            come()
    finally:
        sys.setprofile(None)
    assert calls > after
