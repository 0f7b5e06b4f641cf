"""Small steps under orders of threads that a seed draws: `python -m tests.storm.interleavings --seed 7 --count 100`.

A life of an engine over a tiny model takes some steps, in which the `scheduler` decides at each point which thread goes
on, which request of the drive ends, and which copy of the device is carried out:

    the caller   autograd's thread   the update worker   the receiver of gradients   the callbacks of the queue
    the drive    copies to the device, copies from it, compute

Its losses, norms and weights have the bits of the run in memory, it leaks nothing, and it never stands still. In some
lives the power or a request fails: a second engine resumes from what the drives may have then.

A seed fixes all of it. The choices of a failure are dropped one after the other as long as it still fails.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import errno
import functools
import gc
import logging
import os
import random
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from offload import testing
from offload.aio import File
from offload.errors import IoError, OffloadError
from offload.swapper.memory.host_arena import process_memory
from tests.storm.scheduler import Event, Listed, Scheduler, Seeded, shrunk
from tests.support.devices.backward_thread import use_backward_thread
from tests.support.devices.late_device import LateDevice, Ticks, use_device
from tests.support.drives.power_cut import Cut, Disk, everything, nothing, put, some, some_events
from tests.support.drives.write_recorder import Done, PlainQueue, Recorder
from tests.support.early_updates import counts
from tests.support.least_budget import budget
from tests.support.oracle import Job, start, weights_of

# -- the world -------------------------------------------------------------------------------------------


class _Request:
    """A request of a `Drive`, under way until the scheduler ends it."""

    def __init__(self, drive: Drive, operation: str, carry_out: Callable[[], Done], checksum: bool) -> None:
        self._drive, self.operation, self._carry_out, self._checksum = drive, operation, carry_out, checksum
        self._result: tuple[int, int, bytes] | IoError | None = None
        self._callbacks: list[Callable[[Any], object]] = []

    def end(self) -> None:
        try:
            done, sums = self._carry_out(), self._checksum
            # The checksums now: the buffer belongs to the queue no longer.
            self._result = done.wait(), done.crc32c() if sums else 0, done.page_crcs() if sums else b""
        except IoError as error:
            self._result = error
        self._drive.ended(self, self._callbacks)

    def done(self) -> bool:
        self._drive.scheduler.point(f"{self.operation}, asked")
        return self._result is not None

    def wait(self, timeout: float | None = None) -> int:
        return self._ended()[0]

    def crc32c(self) -> int:
        return self._ended()[1]

    def page_crcs(self) -> bytes:
        return self._ended()[2]

    def _ended(self) -> tuple[int, int, bytes]:
        self._drive.scheduler.point(f"a {self.operation}", lambda: self._result is not None)
        assert self._result is not None
        if isinstance(self._result, IoError):
            raise copy.copy(self._result)
        return self._result

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        if self._result is None:
            self._callbacks.append(function)
            self._drive.begin_callbacks()
        else:
            function(self)


class Drive:
    """A queue whose requests end when the scheduler chooses, in any order; until then a read's buffer holds NaN."""

    backend, refusals = "scheduled", ()

    def __init__(self, scheduler: Scheduler, fails: int = -1) -> None:
        """Begins without a request; the one with the number `fails` will end with an error."""
        self.scheduler, self.requests, self._fails = scheduler, 0, fails
        self._plain, self._flying = PlainQueue(), list[_Request]()
        self._due: list[tuple[Callable[[Any], object], _Request]] = []
        self._thread: Any = None
        self._closed = False
        scheduler.world.append(self._events)

    def read(self, file: File, offset: int, buffer: memoryview, *, checksum: bool = False, **_: Any) -> _Request:
        buffer[:] = b"\xff" * len(buffer)
        return self._submit("read", self._plain.read, file, offset, buffer, checksum)

    def write(self, file: File, offset: int, buffer: memoryview, *, checksum: bool = False, **_: Any) -> _Request:
        return self._submit("write", self._plain.write, file, offset, buffer, checksum)

    def _submit(
        self,
        operation: str,
        plain: Callable[[File, int, memoryview], Done],
        file: File,
        offset: int,
        buffer: memoryview,
        checksum: bool,
    ) -> _Request:
        fails = self.requests == self._fails
        self.requests += 1

        def carry_out() -> Done:
            if fails:
                raise IoError(file.path, offset, len(buffer), errno.EIO, operation)
            return plain(file, offset, buffer)

        request = _Request(self, operation, carry_out, checksum)
        self._flying.append(request)
        self.scheduler.point(f"{operation}, submitted")
        return request

    def _events(self) -> list[Event]:
        return [Event(f"{request.operation}s", request.end) for request in self._flying]

    def ended(self, request: _Request, callbacks: list[Callable[[Any], object]]) -> None:
        self._flying.remove(request)
        self._due += [(function, request) for function in callbacks]

    def begin_callbacks(self) -> None:
        if self._thread is None:
            self._thread = self.scheduler.threads.Thread(target=self._call, name="callbacks", daemon=True)
            self._thread.start()

    def _call(self) -> None:
        """Runs on the thread of callbacks."""
        while True:
            self.scheduler.point("a callback", lambda: bool(self._due) or (self._closed and not self._flying))
            if not self._due:
                return
            function, request = self._due.pop(0)
            function(request)

    def close(self) -> None:
        self.scheduler.point("the end of all requests", lambda: not self._flying)
        self._closed = True
        if self._thread is not None:
            self._thread.join()
        self.scheduler.world.remove(self._events)


class Device(LateDevice):
    """A late device whose copies are carried out, and whose compute goes on, when the scheduler chooses."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(0, 1.0)
        scheduler.world.append(self._events)

    def _events(self) -> list[Event]:
        events = [
            Event(f"{name}s", self._end(stream)) for name, stream in self._streams.items() if self._may_end(stream)
        ]
        if self.progress < self._clock:
            events.append(Event("compute", self._compute))
        return events

    @staticmethod
    def _may_end(stream: list[Any]) -> bool:
        return bool(stream) and stream[0].ready()

    @staticmethod
    def _end(stream: list[Any]) -> Callable[[], None]:
        return lambda: stream.pop(0).finish()

    def _compute(self) -> None:
        self.progress = self._clock


# -- scenarios -------------------------------------------------------------------------------------------

ROWS = 2
"""Of a micro-batch."""


class _Layers(nn.Module):
    """Four small units."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _loss(width: int, model: Any, step: int, micro: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(100 * step + micro)
    x = torch.randn(ROWS, width, generator=chance)
    dtype = next(model.module.parameters()).dtype
    return functional.mse_loss(model(x.to(dtype)).float(), torch.flip(x, [1]))


class Scenario(NamedTuple):
    """What is trained, and where its states are."""

    name: str
    placement: tuple[str, str] = ("nvme", "nvme")
    options: Mapping[str, Any] = {}
    host: float | None = None
    """How far the host budget is above the least, in times of it; None for the default."""
    device: float | None = None
    """The same of the device's budget."""
    late: bool = False
    """True for a device with memory and streams of its own."""
    fault: str = ""
    """"power" or "error": the power fails, or a request does, when the seed says; a second life resumes."""
    width: int = 24
    """Of a layer."""
    accumulation: int = 1
    keeps: bool = False
    """True to keep gradients of any size where autograd has made them, as those of large parameters are."""
    evaluates: bool = False
    """True to evaluate in every other step before its `step()`, where an early update has replaced weights."""
    steps: int = 6

    @property
    def may_lose(self) -> int:
        """Steps that a fault may take."""
        every = self.options["durability"]
        return 1 if every == "step" else every["every"] + 1

    def job(self) -> Job:
        model, loss = functools.partial(_Layers, self.width), functools.partial(_loss, self.width)
        return Job(model, loss, steps=self.steps, accumulation=self.accumulation, dtype="bf16")

    def train_step(self, engine: Any, step: int) -> tuple[float, ...]:
        """Returns the losses and the norm of a step."""
        job, losses = self.job(), list[float]()
        for micro in range(job.accumulation):
            loss = job.loss(engine, step, micro)
            engine.backward(loss)
            losses.append(float(loss.detach()))
            if self.evaluates and step % 2:
                with torch.no_grad():
                    losses.append(float(job.loss(engine, step, micro)))
            engine.step()
        engine.zero_grad()
        return (*losses, engine.get_global_grad_norm() or 0.0)


SCENARIOS = (
    Scenario("all on drives", options={"durability": "step"}, host=0.0, device=0.0, keeps=True),
    Scenario("power cut", options={"durability": "step"}, host=0.2, device=0.0, fault="power"),
    Scenario("late device", options={"durability": "step", "speculate": False}, host=0.0, device=0.0, late=True),
    Scenario(
        "under the backward",
        options={"durability": "step", "speculate": True},
        host=0.4,
        device=0.0,
        late=True,
        evaluates=True,
    ),
    Scenario("weights in host memory", ("cpu", "cpu"), {"durability": "none"}, device=0.0, late=True, keeps=True),
    Scenario("states on drives", ("cpu", "nvme"), {"durability": "step"}, host=0.0, device=0.0, late=True),
    Scenario(
        "power cut between commits", options={"durability": {"every": 2}, "speculate": True}, host=0.3, fault="power"
    ),
    Scenario("two micro-batches", options={"durability": "none"}, host=0.0, device=0.0, late=True, accumulation=2),
    Scenario(
        "failed request", options={"durability": {"every": 2}}, host=0.3, device=0.0, accumulation=2, fault="error"
    ),
    Scenario(
        "failed request under the backward",
        options={"durability": "step", "speculate": True},
        host=0.1,
        device=0.0,
        late=True,
        fault="error",
    ),
    Scenario("streamed units", options={"durability": "step"}, host=0.0, device=0.0, late=True, width=80, steps=3),
)


class Outcome(NamedTuple):
    """What came of an interleaving."""

    faults: list[str]
    """What was wrong."""
    choices: dict[int, int]
    """The choices that were not calm."""
    points: int
    trace: list[str]
    early_updates: int = 0
    """Updates under the backward that a step has confirmed, before a fault."""


# -- one interleaving ------------------------------------------------------------------------------------

_POINTS = ("kernel.update", "store.commit", "store.sync", "device.copy", "gradient.begin_download")
"""Points of `offload.testing` that a thread passes beside its locks and waits, where it works on memory of others."""


class _World(NamedTuple):
    """What surrounds an engine."""

    drives: list[Drive]
    device: LateDevice | None


@contextlib.contextmanager
def _scheduled(
    scheduler: Scheduler, scenario: Scenario, recorder: Recorder | None = None, fails: int = -1
) -> Iterator[_World]:
    """Gives the threads, the clock, the queue and the device of engines that are made inside to the scheduler."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        _small(patch, scenario)
        world = _World([], Device(scheduler) if scenario.late else None)

        def drive(*_: Any, **__: Any) -> Drive:
            world.drives.append(Drive(scheduler, fails))
            return world.drives[-1]

        testing.replace(patch, "threads.module", scheduler.threads)
        testing.replace(patch, "threads.thread", scheduler.threads.Thread)
        testing.replace(patch, "threads.clock", scheduler.clock)
        testing.replace(patch, "io.queue", drive)
        # A power cut takes what was not synced from the recorder's image, so no real sync is needed.
        patch.setattr(os, "fsync", lambda _: None)
        patch.setattr(os, "fdatasync", lambda _: None)
        if recorder is not None:
            stack.enter_context(recorder.recording())
        for point in _POINTS:
            testing.intercept(patch, point, functools.partial(_passing, scheduler, point))
        if world.device is not None:
            use_device(patch, world.device)
            use_backward_thread(patch, hand_over=functools.partial(_on_its_thread, scheduler))
        yield world


def _small(patch: pytest.MonkeyPatch, scenario: Scenario) -> None:
    """Makes pieces of states and gradients small."""
    if scenario.keeps:
        testing.replace(patch, "size.kept_gradient", 1)
    testing.replace(patch, "size.chunk", 1024)
    testing.replace(patch, "size.first_weights", 8192)
    testing.replace(patch, "size.tile_buffers", 2)
    testing.replace(patch, "size.gradient_window", 8192)
    testing.replace(patch, "size.stream", 8192)
    testing.replace(patch, "size.update_tile", range(16_000, 48_000))


def _passing(scheduler: Scheduler, point: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    scheduler.point(point)
    return real(*args, **kwargs)


def _on_its_thread(scheduler: Scheduler, work: Callable[[], None]) -> None:
    """Runs a backward on a thread of autograd."""
    thread = scheduler.threads.Thread(target=work, name="autograd", daemon=True)
    thread.start()
    thread.join()


class _Log(NamedTuple):
    """What a life has seen."""

    steps: dict[int, tuple[float, ...]]
    """Losses and norm of each step."""
    weights: dict[str, int]
    """Checksums of the final weights."""


def _sums(engine: Any) -> dict[str, int]:
    return {name: zlib.crc32(value.view(torch.uint8).numpy().tobytes()) for name, value in weights_of(engine).items()}


class _Life:
    """A life of an engine in a world that the scheduler owns."""

    def __init__(self, scenario: Scenario, setting: _Setting, chooser: Listed | Seeded) -> None:
        self.log = _Log({}, {})
        self.scheduler = Scheduler(chooser)
        self.first = self.requests = self.early_updates = 0
        """The step after which it began, the requests to the drive, and the confirmed updates under the backward."""
        self._scenario, self._setting = scenario, setting

    def live(self, folder: Path, recorder: Recorder | None = None, fails: int = -1) -> list[str]:
        """Trains from the last commit to the last step; returns what differs from the run in memory, or was left.

        With `fails`, the number of a request that ends with an error, the life may end with that error too.
        """
        faults: list[str] = []
        with _scheduled(self.scheduler, self._scenario, recorder, fails) as world:
            try:
                faults += self._train(folder, world.device)
            except OffloadError as error:
                if not (0 <= fails and any(isinstance(cause, IoError) for cause in _causes(error))):
                    raise
            self.scheduler.close()
        faults += self._wrong()
        self.requests = sum(drive.requests for drive in world.drives)
        if world.device is not None:
            faults += [f"the device: {what}" for what in sorted(set(world.device.broken))]
        return faults

    def _train(self, folder: Path, device: LateDevice | None) -> list[str]:
        scenario, log, job = self._scenario, self.log, self._scenario.job()
        options = {**scenario.options, **self._setting.budgets}
        engine = start(job, scenario.placement, folder, resume="auto", **options)
        self.first = engine.global_steps
        try:
            for layer in engine.module.get_submodule("layers").children():
                layer.register_forward_pre_hook(lambda *_: self.scheduler.point("forward of a layer"))
            with contextlib.nullcontext() if device is None else Ticks(device):
                while (step := engine.global_steps) < job.steps:
                    log.steps[step] = scenario.train_step(engine, step)
                    self.scheduler.progress()
                log.weights.update(_sums(engine))
            testing.settle(engine)
            parts = testing.inspect(engine)
            left = [
                f"{nbytes} bytes are left in {tier}" for tier, nbytes in parts.unaccounted_memory().items() if nbytes
            ]
            left += [f"{unit} is in use after the last step" for unit in parts.busy_units]
            # No drive here changes bytes: what the store mends, it has itself taken from a wrong place.
            left += [f"{parts.mended} ranges of slots were mended"] if parts.mended else []
        finally:
            self.early_updates = counts(engine).hits
            engine.destroy()
        return left

    def _wrong(self) -> Iterator[str]:
        """Yields what differs from the run in memory, of all that was logged."""
        expected, log = self._setting.expected, self.log
        for step, values in log.steps.items():
            if expected.steps[step] != values:
                yield f"step {step} is {values} in place of {expected.steps[step]}"
        names = [name for name, value in log.weights.items() if expected.weights[name] != value]
        if names:
            yield f"weights differ: {', '.join(names)}"


def interleave(scenario: Scenario, chooser: Listed | Seeded, folder: Path, seed: int = 0) -> Outcome:
    """Runs one interleaving in a folder, which is removed at the end.

    Args:
        scenario: what is trained.
        chooser: who decides.
        folder: for swap files.
        seed: when the power fails, and what reaches the drive by then.
    """
    faults: list[str] = []
    try:
        setting = _setting(scenario, folder.parent)
    except Exception as error:
        return Outcome([f"the calm run: {_told(error)}"], {}, 0, [])
    life, chance, before = (
        _Life(scenario, setting, chooser),
        random.Random(f"fault {seed}"),
        process_memory().needed_bytes,
    )
    folder.mkdir(parents=True)
    # Finalizers would run at other points each time.
    gc.disable()
    try:
        recorder = _Recorder(folder, life, chance, setting) if scenario.fault == "power" else None
        faults += life.live(folder, recorder, chance.choice(setting.requests) if scenario.fault == "error" else -1)
        done = len(life.log.steps)
        if recorder is not None and recorder.image is not None:
            done = recorder.done
            shutil.rmtree(folder)
            put(recorder.image, folder)
        if scenario.fault and not faults:
            faults += _resumed(_Life(scenario, setting, Listed()), folder, done - scenario.may_lose)
    except Exception as error:
        faults.append(_told(error))
    finally:
        shutil.rmtree(folder)
        gc.enable()
    if not faults and process_memory().needed_bytes > before:
        faults.append("host memory is left")
    return Outcome(faults, chooser.choices, life.scheduler.now, life.scheduler.trace, life.early_updates)


def _resumed(life: _Life, folder: Path, least: int) -> Iterator[str]:
    """Resumes, in the calm order, from what a fault has left; yields what is wrong."""
    for words in life.live(folder):
        yield f"resumed: {words}"
    if life.first < least:
        yield f"resumed after step {life.first}, though {least} steps were durable"


def _told(error: BaseException) -> str:
    return " <- ".join(f"{type(cause).__name__}: {str(cause)[:400]}" for cause in _causes(error)[:4])


def _causes(error: BaseException) -> list[BaseException]:
    """Returns an error and its causes, each once: two errors may be causes of each other."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    return causes


# -- what holds for all interleavings of a scenario ------------------------------------------------------


class _Setting(NamedTuple):
    expected: _Log
    """Of the run in memory."""
    budgets: dict[str, int]
    events: range = range(1)
    """What the calm run does to the drive after its start: after one of these the power fails."""
    requests: range = range(1)
    """The requests of the calm run, one of which fails."""


_settings: dict[str, _Setting] = {}


def _setting(scenario: Scenario, folder: Path) -> _Setting:
    """Returns the setting of a scenario, which needs some runs: once in a process."""
    if scenario.name not in _settings:
        setting = _Setting(_in_memory(scenario, folder), _budgets(scenario, folder))
        if scenario.fault:
            place = folder / "calm"
            place.mkdir()
            life = _Life(scenario, setting, Listed())
            recorder = _Recorder(place, life, random.Random(), setting)
            wrong = life.live(place, recorder)
            assert not wrong, "; ".join(wrong)
            events, requests = len(recorder.log), life.requests
            setting = setting._replace(events=range(events // 3, events), requests=range(requests))
            shutil.rmtree(place)
        _settings[scenario.name] = setting
    return _settings[scenario.name]


def _in_memory(scenario: Scenario, folder: Path) -> _Log:
    job, log = scenario.job(), _Log({}, {})
    with pytest.MonkeyPatch.context() as patch:
        _small(patch, scenario)
        engine = start(job, ("none", "none"), folder / "memory")
        for step in range(job.steps):
            log.steps[step] = scenario.train_step(engine, step)
        log.weights.update(_sums(engine))
        engine.destroy(remove=True)
    return log


def _budgets(scenario: Scenario, folder: Path) -> dict[str, int]:
    budgets: dict[str, int] = {}
    with _scheduled(scheduler := Scheduler(Listed()), scenario):
        for budget_name, above in (("host_memory", scenario.host), ("device_memory", scenario.device)):
            budgets |= budget(
                scenario.job(), scenario.placement, budget_name, above, folder, **scenario.options, **budgets
            )
        scheduler.close()
    return budgets


class _Recorder(Recorder):
    """Records what is done to the drive, and keeps an image of what a power cut at one moment leaves."""

    def __init__(self, root: Path, life: _Life, chance: random.Random, setting: _Setting) -> None:
        self._steps, self._chance, self._at = life.log.steps, chance, chance.choice(setting.events)
        self.image: Mapping[str, bytes | None] | None = None
        self.done = 0
        """Number of steps that had ended by then."""
        super().__init__(root)

    def add(self, what: str, *arguments: Any) -> None:
        super().add(what, *arguments)
        if len(self.log) == self._at:
            self.done = len(self._steps)
            disk = Disk()
            for event in self.log:
                disk.carry_out(event)
            self.image = disk.image(self._cut())

    def _cut(self) -> Cut:
        share = self._chance.choice([0.1, 0.5, 0.9])
        return self._chance.choice([everything, nothing, some(self._chance, share), some_events(self._chance, share)])


# -- seeds -----------------------------------------------------------------------------------------------


def scenario_of(seed: int) -> Scenario:
    """Returns what a seed trains."""
    return SCENARIOS[seed % len(SCENARIOS)]


def run(seed: int, folder: Path, choices: Mapping[int, int] | None = None) -> Outcome:
    """Runs the life of a seed, in the order that the seed draws or that `choices` list."""
    chooser = Seeded(seed) if choices is None else Listed(choices)
    return interleave(scenario_of(seed), chooser, folder / f"seed{seed}", seed)


def shortest(seed: int, folder: Path, most: int) -> dict[int, int]:
    """Returns the fewest choices, found in `most` runs, with which the life of a seed still fails as it does."""

    def fails(choices: dict[int, int]) -> bool:
        return bool(run(seed, folder, choices).faults)

    return shrunk(run(seed, folder).choices, fails, most)


def told(seed: int, faults: Sequence[str], choices: Mapping[int, int]) -> str:
    """Returns lines about a failure, with the command that repeats it."""
    listed = " ".join(f"{point}:{choice}" for point, choice in sorted(choices.items()))
    repeat = f'python -m tests.storm.interleavings --seed {seed} --choices "{listed}"'
    return "\n    ".join([f"seed {seed} ({scenario_of(seed).name}) FAILED", *faults[:6], f"repeat: {repeat}"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.storm.interleavings", description="orders of threads")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=100, help="so many seeds, each a life of some steps")
    parser.add_argument("--choices", help="in place of the seed's own choices: those that a failure has printed")
    parser.add_argument("--shrink", type=int, default=100, help="runs that look for the fewest choices of a failure")
    parser.add_argument("--stop", action="store_true", help="begin none after the first failure")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    listed = None
    if arguments.choices is not None:
        arguments.count = 1
        listed = {int(at): int(choice) for at, _, choice in (each.partition(":") for each in arguments.choices.split())}
    failed = points = count = 0
    with tempfile.TemporaryDirectory(prefix="offload-interleavings-") as name:
        for count in range(1, arguments.count + 1):
            seed = arguments.seed + count - 1
            outcome = run(seed, Path(name), listed)
            points += outcome.points
            if outcome.faults:
                failed += 1
                choices = outcome.choices if listed is not None else shortest(seed, Path(name), arguments.shrink)
                print(told(seed, outcome.faults, choices), flush=True)
            if failed and arguments.stop:
                break
    print(f"{count} lives, {points} points, {time.process_time():.1f} s of CPU; {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
