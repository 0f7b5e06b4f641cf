"""A run in a process that is killed and resumed."""

from __future__ import annotations

import functools
import json
import logging
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker, spawn
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.drives.fault_injection import LateQueue, use_queue
from tests.support.oracle.job import Job, Result
from tests.support.oracle.training import start, train_step, weights_of
from tests.support.processes import warm_process


def processes() -> Any:
    """Returns a context whose processes start from a server that has imported what tests need, and no more."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_preloaded())
    _fork_the_server()
    return context


def start_server(*modules: str) -> None:
    """Starts the server of `processes` with modules that it imports beside: before its first process, in a program."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_preloaded(*modules))
    forkserver.ensure_running()


def _preloaded(*more: str) -> list[str]:
    return [
        "pytest",
        "tests.support.models",
        "tests.support.drives.fault_injection",
        "transformers.models.gpt2.modeling_gpt2",
        # What the first engine of a process imports: half a second of each.
        "torch.distributed.pipelining",
        "offload.engine.setup",
        "offload.parallel.pipeline",
        "tests.support.oracle",
        *more,
        "tests.support.processes.frozen_heap",
    ]


@functools.cache
def _fork_the_server() -> None:
    """Starts the server from the one that the workers of a run share, which has imported all of that already."""
    python = warm_process.python_of_run()
    if python is not None:
        resource_tracker.ensure_running()  # a small process, by Python itself
        usual = spawn.get_executable()
        spawn.set_executable(python)
        try:
            forkserver.ensure_running()
        finally:
            spawn.set_executable(usual)


def dies(function: Callable[..., Any], *arguments: Any) -> None:
    """Calls `function` in a process that SIGKILL must end."""
    process = processes().Process(target=function, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL, f"it ended with {process.exitcode}"


def _until_killed(
    job: Job,
    placement: tuple[str, str],
    folder: Path,
    log: Path,
    by: Callable[..., float],
    late: float,
    options: dict[str, Any],
    last: int,
) -> None:
    """Trains to step `last`, and writes a line of JSON for each step that `step()` has ended.

    Before the end of the job it then waits to be killed, however long that takes.
    """
    logging.disable(logging.CRITICAL)
    if late:
        use_queue(pytest.MonkeyPatch(), lambda: LateQueue(os.getpid(), late))
    engine = start(job, placement, folder, resume="auto", **options)
    with log.open("a") as lines:
        while engine.global_steps < last:
            step = engine.global_steps
            loss = by(engine, job, step)
            print(json.dumps([step, loss, engine.get_global_grad_norm()]), file=lines, flush=True)
    while last < job.steps:
        time.sleep(1)
    torch.save(weights_of(engine), log.with_suffix(".weights"))
    engine.destroy(remove=True)


def kill_and_resume(
    job: Job,
    placement: tuple[str, str],
    folder: Path,
    kills: int,
    seed: int = 0,
    late: float = 0.0,
    by: Callable[..., float] = train_step,
    **options: Any,
) -> Result:
    """Runs `job` in a process that is SIGKILLed `kills` times at random moments of its steps, and resumed.

    `late` makes each request up to so many seconds late, so that most moments lie between the first write of an update
    and its commit.
    Steps that ran again after a resume must have given the same bits again.
    """
    chance = random.Random(seed)
    log = folder / "steps.jsonl"
    for attempt in range(kills + 1):
        # At least one step is left for each later process.
        last = job.steps - (kills - attempt)
        arguments = (job, placement, folder, log, by, late, options, last)
        process = processes().Process(target=_until_killed, args=arguments)
        seen = log.stat().st_size if log.exists() else 0
        process.start()
        if attempt < kills:
            # Wait for the first step of this process, so that it is killed while it trains.
            while process.is_alive() and (log.stat().st_size if log.exists() else 0) == seen:
                time.sleep(0.005)
            time.sleep(chance.uniform(0.0, 0.2))
            process.kill()
        process.join()
        assert process.exitcode == (-signal.SIGKILL if attempt < kills else 0), f"it ended with {process.exitcode}"
    losses: dict[int, tuple[float, float]] = {}
    for line in log.read_text().splitlines():
        step, loss, norm = json.loads(line)
        assert losses.setdefault(step, (loss, norm)) == (loss, norm), f"step {step} differs after a resume"
    weights = torch.load(log.with_suffix(".weights"), weights_only=True)
    order = sorted(losses)
    return Result([losses[s][0] for s in order], [losses[s][1] for s in order], weights)
