"""One process of a storm's run: it goes on from the last commit, trains, and writes down what it has seen.

Each line of `log.RANK.jsonl` is a list: what it is, the step, and values, which are often those of the calm run. A life
ends with status 0 when the run has ended, with `FAILED` after an error of the library, else as the weather ends it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import logging
import os
import random
import signal
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import offload
from offload import testing
from offload.errors import IoError, OffloadError
from offload.swapper.memory.host_arena import process_memory
from tests.storm.division import Pipeline, is_of_a_lost_rank, mine_of
from tests.storm.plan import Plan
from tests.storm.weather import Weather
from tests.support.least_budget import budget
from tests.support.modules.checkpointed import small_inputs_move
from tests.support.oracle import accumulated_step, small_pieces, start, train_step, weights_of
from tests.support.ranks.rank_pool import meet

FAILED = 3
"""Exit status after an `OffloadError`."""


class _PlannedError(Exception):
    """An error of the user's own, in the middle of a step."""


def live(plan: Plan, number: int, folder: Path, rank: int = 0, port: int = 0) -> None:
    """Lives life `number` of a plan, as one of its ranks, and ends the process.

    Args:
        plan: the plan.
        number: of the life; the last one has no fault.
        folder: of the trial: logs, and a folder `runs` for the drives.
        rank: this rank.
        port: where ranks meet; without meaning for one rank.
    """
    errors = (folder / f"stderr.{number}.{rank}").open("w")
    os.dup2(errors.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, file=errors)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    if plan.ranks > 1:
        meet(rank, plan.ranks, port)
        dist.init_process_group("gloo")
    log = _Log(folder / f"log.{rank}.jsonl")
    patches = pytest.MonkeyPatch()
    if plan.pieces:
        small_pieces(patches)
        testing.replace(patches, "size.kept_gradient", 1)
        testing.replace(patches, "size.gradient_window", 1 << 15)  # a unit of bf24 masters is padded to 4096 elements
    small_inputs_move(patches)
    weather = Weather(plan, number, folder / "runs", spared=rank != number % plan.ranks)
    before = _held()
    status = 0
    try:
        with weather.over(patches):
            _train(plan, folder, log, weather)
    except (OffloadError, KeyboardInterrupt) as error:
        status = FAILED
        log("error", -1, type(error).__name__, str(error)[:500], causes_of(error))
    except BaseException as error:
        status = 1
        if plan.division.of_torch and is_of_a_lost_rank(error):
            status = FAILED
            log("error", -1, type(error).__name__, str(error)[:500], causes_of(error))
        else:
            log("traceback", -1, traceback.format_exc()[-3000:])
    gc.collect()
    log("left", -1, [] if status else sorted(_held() - before))
    if weather.device is not None:
        log("broken", -1, sorted(set(weather.device.broken)))
    sys.stdout.flush()
    os._exit(status)  # threads of torch.distributed may wait for ranks that are gone


class _Log:
    """Lines of JSON, each written at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def __call__(self, what: str, step: int, *values: Any) -> None:
        print(json.dumps([what, step, *values]), file=self._file, flush=True)


def causes_of(error: BaseException) -> list[str]:
    """Returns the names of an error's causes, each once: two errors may be causes of each other."""
    causes: dict[int, str] = {}
    cause: BaseException | None = error
    while cause is not None and id(cause) not in causes:
        causes[id(cause)] = f"{type(cause).__name__}: {str(cause)[:200]}"
        cause = cause.__cause__ or cause.__context__
    return list(causes.values())[1:]


def is_of_the_drive(line: list[Any]) -> bool:
    """Returns whether an error's line names a failed request, itself or as a cause."""
    return any(IoError.__name__ in part or "StoreError" in part for part in [line[2], *line[4]])


def _held() -> set[str]:
    """Returns what a life must give back: threads that Python has started, open files, host memory."""
    files = {f"file {each.path}" for each in psutil.Process().open_files() if "/runs/" in each.path}
    ours = [each for each in threading.enumerate() if not isinstance(each, threading._DummyThread)]
    threads = {f"thread {each.name}" for each in ours if each.is_alive()}
    memory = {f"{process_memory().needed_bytes} bytes"} if process_memory().needed_bytes else set()
    return files | threads | memory


# -- the loop -----------------------------------------------------------------------------------------


def _options(plan: Plan, folder: Path) -> dict[str, Any]:
    drives = [folder / "runs" / f"drive{index}" for index in range(plan.drives)]
    for drive in drives:
        drive.mkdir(parents=True, exist_ok=True)
    return {**plan.options, "nvme_path": [str(drive) for drive in drives]}


def _train(plan: Plan, folder: Path, log: _Log, weather: Weather) -> None:
    """Trains from the last commit to the last step."""
    job, options = plan.job(), _options(plan, folder)
    # With little host memory a CPU cannot use all weights where they are, and the device needs room for some.
    for budget_name, above in (("host_memory", plan.host), ("device_memory", plan.device)):
        options |= budget(job, plan.placement, budget_name, above, folder / "runs", **options)
    engine = start(job, plan.placement, folder / "runs", resume="auto", **options)
    try:
        log("begin", engine.global_steps)
        asked = options.get("host_memory")
        if asked is not None and engine.host_memory > asked:
            log("traceback", -1, f"a host budget of {engine.host_memory} bytes where {asked} were asked for")
        with weather.computing():
            loop = _Loop(plan, folder, log, weather, engine)
            if plan.late_compute:
                _compute_late(engine.module, plan.late_compute, random.Random(plan.seed))
            while engine.global_steps < plan.steps:
                loop.step()
            weights = weights_of(engine)
        weights.pop("calls", None)  # a counter of forwards, also of those that failed
        log("weights", plan.steps, {name: _sum(value) for name, value in sorted(weights.items())})
        log("mended", -1, testing.inspect(engine).mended)
    finally:
        engine.destroy()


def _sum(value: torch.Tensor) -> int:
    return zlib.crc32(mine_of(value).detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def _compute_late(model: torch.nn.Module, most: float, chance: random.Random) -> None:
    """Makes some forwards of layers wait up to `most` seconds, as if a larger model computed.

    None of the head: a hook there may look at logits, so the loss would not come in chunks as it does in calm memory.
    """

    def wait(*_: Any) -> None:
        if chance.random() < 0.2:
            time.sleep(chance.uniform(0, most))

    heads = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "lm_head"]
    for layer in _layers(model):
        if layer not in heads:
            layer.register_forward_pre_hook(wait)


def _layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if isinstance(module, torch.nn.Linear | torch.nn.LayerNorm)]


class _Loop:
    """The training loop of a user who looks, edits, saves, loads and errs."""

    def __init__(self, plan: Plan, folder: Path, log: _Log, weather: Weather, engine: offload.Engine) -> None:
        self._plan, self._folder, self._log, self._weather = plan, folder, log, weather
        self._engine, self._job = engine, plan.job()
        self._pipeline = Pipeline(engine, self._job, plan.division) if plan.division.what == "pipeline" else None
        self._done: set[tuple[int, str]] = set()
        """Deeds that are done once in a life."""

    def step(self) -> None:
        """Does what the plan has for the next step, and trains it; an error of the user's own begins it again."""
        step = self._engine.global_steps
        try:
            for deed in self._plan.deeds:
                if deed.step == step:
                    self._weather.tick()
                    self._do(deed.what, step)
                if self._engine.global_steps != step:  # a load: the deeds of that step come first
                    return
            with self._errors(step):
                loss = self._trained(step)
            self._log("step", step, loss, self._engine.get_global_grad_norm())
            kept = {tier: each["used"] for tier, each in self._engine.memory_report()["activations"].items()}
            if any(kept.values()):
                self._log("kept", step, kept)
            self._weather.tick()
        except _PlannedError:
            self._engine.zero_grad()
        except KeyboardInterrupt:
            if self._plan.division.what:  # other ranks wait in the middle of a batch, so the user ends the run
                raise
            self._engine.zero_grad()

    def _trained(self, step: int) -> float | list[float]:
        """Trains a step, and returns its loss."""
        if self._pipeline is not None:
            return self._pipeline.step(step)
        by = train_step if self._plan.options.get("schedule") is None else accumulated_step
        loss = by(self._engine, self._job, step)
        if step % 2:
            self._engine.zero_grad()  # as loops of plain PyTorch do, while updates go on
        return loss

    def _once(self, step: int, what: str) -> bool:
        """Returns True the first time that a deed is asked for in this life."""
        first = (step, what) not in self._done
        self._done.add((step, what))
        return first

    def _do(self, what: str, step: int) -> None:
        engine = self._engine
        if what == "evaluate":
            engine.eval()
            with torch.no_grad():
                pipeline, at = self._pipeline, 1_000 + step
                loss = float(self._job.loss(engine, at, 0)) if pipeline is None else pipeline.evaluate(at)
            engine.train()
            self._log("evaluate", step, loss)
        elif what == "look":
            self._log("look", step, self._looked(step))
        elif what == "edit":
            _, parameter = self._parameter(step)
            value = offload.safe_get_full_fp32_param(parameter)
            assert value is not None
            offload.safe_set_full_fp32_param(parameter, torch.full_like(value, 0.01 * (step + 1)))
        elif what == "save":
            engine.save_checkpoint(self._folder / "saved", tag=f"step{step}")
        elif what == "load":
            self._load(step)
        elif what == "state_dict":
            engine.state_dict()
        elif what == "cache":
            engine.empty_partition_cache()
        elif what == "sleep":
            engine.sleep(host=step % 2 == 0)
            engine.wake()
        elif what == "forward alone" and self._once(step, what):
            self._job.loss(engine, step, 0)

    def _parameter(self, step: int) -> tuple[str, Any]:
        """Returns a trainable parameter that the step chooses."""
        named = [(name, p) for name, p in self._engine.module.named_parameters() if p.requires_grad]
        return named[(7 * step) % len(named)]

    def _looked(self, step: int) -> dict[str, int]:
        name, parameter = self._parameter(step)
        value = offload.safe_get_full_fp32_param(parameter)
        assert value is not None
        return {name: _sum(value)}

    def _load(self, step: int) -> None:
        """Goes back to an earlier checkpoint, once in a run."""
        marker = self._folder / f"loaded.{step}"
        saved = [deed.step for deed in self._plan.deeds if deed.what == "save" and deed.step < step]
        if marker.exists() or not saved:
            return
        self._log("loading", saved[-1])
        self._engine.load_checkpoint(self._folder / "saved", tag=f"step{saved[-1]}")
        marker.touch()
        self._log("begin", self._engine.global_steps)

    @contextlib.contextmanager
    def _errors(self, step: int) -> Iterator[None]:
        """Lets a step fail once, in the forward, in the backward or behind it, where the plan says so."""
        wanted = [d.what for d in self._plan.deeds if d.step == step and d.what.startswith("raise")]
        wanted = [what for what in wanted if self._once(step, what)][:1]
        if not wanted:
            yield
            return
        layers = _layers(self._engine.module)
        middle = layers[len(layers) // 2]
        if wanted == ["raise before step"]:
            with _replaced(self._engine, "step", _raise):
                yield
            return
        hook = _raise if wanted == ["raise in forward"] else _raise_in_backward
        handle = middle.register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()


def _raise(*_: Any) -> None:
    raise _PlannedError


def _raise_in_backward(_module: Any, _arguments: Any, output: torch.Tensor) -> None:
    if output.requires_grad:
        output.register_hook(_raise)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    setattr(owner, name, function)
    try:
        yield
    finally:
        delattr(owner, name)
