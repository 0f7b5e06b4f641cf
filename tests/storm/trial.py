"""A trial: the lives of a run one after the other, and what must be true of what they have written.

nothing is lost      losses, norms, evaluations, looks and final weights have the bits of the calm run, however often a
                     step was done; a life begins at most one commit before the last step that had ended
nothing is leaked    a life that ends by itself gives back its threads, files and memory; a step that has ended keeps
                     no input of a block
nothing is silent    a life that ends otherwise was killed, or raises an error that names the request that failed;
                     of bytes that a drive has changed no line shows a result
nothing waits        a life goes on until it ends: see `_wait`
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

from tests.storm.life import FAILED, is_of_the_drive, live
from tests.storm.plan import Plan
from tests.storm.weather import IMAGE
from tests.support.drives.power_cut import put
from tests.support.drives.rot import KINDS as ROT
from tests.support.oracle import processes
from tests.support.ranks.rank_pool import free_port

PATIENCE = 240
"""Seconds without a line of any rank, after which a life waits for ever. Waits for a processor do not count."""

Line = list[Any]

_PROCESSES = threading.Lock()
"""Held where a process is started, or asked how it ended.

Python asks all processes at each start, and none can be asked by two threads: the second reads a pipe that is empty by
then, and calls the status 255.
"""


class Life(NamedTuple):
    """How one life ended: for each rank its exit status (None: it never ended) and its lines."""

    statuses: tuple[int | None, ...]
    lines: tuple[list[Line], ...]


def run(plan: Plan, folder: Path) -> list[str]:
    """Carries out a plan in an empty folder, and returns what was wrong."""
    calm = _lives(plan.calm(), folder / "calm")
    if calm[-1].statuses != (0,) * plan.ranks:
        return [f"the calm run: {_told(calm[-1])}"]
    return faults(plan, calm[-1].lines, _lives(plan, folder / "storm"))


def _lives(plan: Plan, folder: Path) -> list[Life]:
    """Runs the lives of a plan until one ends with 0, or ends as no weather can end it."""
    lives = []
    folder.mkdir(parents=True)
    for number in range(len(plan.faults) + 1):
        lives.append(_live(plan, number, folder))
        if (folder / IMAGE).exists():
            shutil.rmtree(folder / "runs")
            put(pickle.loads((folder / IMAGE).read_bytes()), folder / "runs")
            (folder / IMAGE).unlink()
        ended = set(lives[-1].statuses)
        if ended == {0} or not ended <= {0, FAILED, -signal.SIGKILL}:
            break
    return lives


def _live(plan: Plan, number: int, folder: Path) -> Life:
    logs = [folder / f"log.{rank}.jsonl" for rank in range(plan.ranks)]
    seen = [log.stat().st_size if log.exists() else 0 for log in logs]
    port = free_port() if plan.ranks > 1 else 0
    lives = [processes().Process(target=live, args=(plan, number, folder, rank, port)) for rank in range(plan.ranks)]
    for result in lives:
        with _PROCESSES:
            result.start()
    _wait(lives, logs)
    statuses = [_status(each) for each in lives]
    waiting = [life for life in lives if _status(life) is None]
    for life in waiting:
        with contextlib.suppress(ProcessLookupError):
            os.kill(life.pid or 0, signal.SIGUSR1)  # it writes down where its threads are
    if waiting:
        time.sleep(2)  # all of them, before the end of one changes what the others do
    for life in waiting:
        life.kill()
        connection.wait([life.sentinel])
        _status(life)
    return Life(tuple(statuses), tuple(_read(log, start) for log, start in zip(logs, seen, strict=True)))


def _status(life: Any) -> int | None:
    """Returns how a process has ended; None if it has not."""
    with _PROCESSES:
        status: int | None = life.exitcode
        return status


def _wait(lives: Sequence[Any], logs: Sequence[Path]) -> None:
    """Waits until all processes have ended, or have written nothing for `PATIENCE` seconds, however slow they are."""
    seen, since, delay = 0, time.monotonic(), 0.0
    while running := [life for life in lives if _status(life) is None]:
        connection.wait([life.sentinel for life in running], 1)
        written = sum(log.stat().st_size for log in logs if log.exists())
        if written != seen:
            seen, since, delay = written, time.monotonic(), _delay(running)
        if time.monotonic() - since > PATIENCE + max(0.0, _delay(running) - delay):
            return


def _delay(lives: Sequence[Any]) -> float:
    """Returns the seconds that the thread of `lives` with the longest sum of waits has waited for a processor."""
    delays = [0.0]
    for life in lives:
        tasks = Path(f"/proc/{life.pid}/task")
        with contextlib.suppress(OSError):  # the process, or a thread, has ended
            delays += [int((tasks / task / "schedstat").read_text().split()[1]) / 1e9 for task in os.listdir(tasks)]
    return max(delays)


def _read(log: Path, start: int) -> list[Line]:
    if not log.exists():
        return []
    # A kill may leave the last line cut off.
    lines = log.read_bytes()[start:].split(b"\n")[:-1]
    return [json.loads(line) for line in lines]


# -- what must be true --------------------------------------------------------------------------------


def faults(plan: Plan, calm: Sequence[list[Line]], lives: Sequence[Life]) -> list[str]:
    """Returns what is wrong in the lives of a plan, of which the last should have ended the run."""
    faults_found = []
    for rank in range(plan.ranks):
        expected = {(line[0], line[1]): line[2:] for line in calm[rank] if line[0] in _COMPARED}
        faults_found += [f"rank {rank}, {words}" for words in _wrong_bits(expected, lives, rank)]
        faults_found += [f"rank {rank}, {words}" for words in _lost_steps(plan, lives, rank)]
    for number, life in enumerate(lives):
        faults_found += [f"life {number}: {words}" for words in _wrong_end(plan, number, life)]
    # Of a drive that has changed both commits, the run is refused.
    if lives[-1].statuses != (0,) * plan.ranks and not _has_rotten(plan, len(lives) - 1):
        faults_found.append(f"the last life did not end the run: {_told(lives[-1])}")
    return faults_found


def _has_rotten(plan: Plan, number: int) -> bool:
    """Returns True if the drive has rotted in life `number` or in one before."""
    return any(fault.what in ROT for fault in plan.faults[: number + 1])


_COMPARED = ("step", "evaluate", "look", "weights")


def _wrong_bits(expected: dict[tuple[str, int], list[Any]], lives: Sequence[Life], rank: int) -> Iterator[str]:
    for number, life in enumerate(lives):
        for line in life.lines[rank]:
            what, step, *values = line
            if what not in _COMPARED:
                continue
            # A look or an evaluation in the middle of a step that is done again is one of that step.
            if expected.get((what, step)) != values:
                calm = expected.get((what, step))
                yield f"life {number}: {what} of step {step} is {_brief(values, calm)}"


def _brief(values: list[Any], calm: list[Any] | None) -> str:
    if calm and isinstance(values[0], dict):
        names = [name for name, value in values[0].items() if calm[0].get(name) != value]
        return f"otherwise in {', '.join(names)}"
    return f"{values} in place of {calm}"


def _lost_steps(plan: Plan, lives: Sequence[Life], rank: int) -> Iterator[str]:
    """Compares where each life begins with the last step that had ended before."""
    done, back = 0, _allowed(plan)
    for number, life in enumerate(lives):
        for what, step, *_ in life.lines[rank]:
            if what == "begin":
                if back is not None and step < done - back and not _has_rotten(plan, number):
                    yield f"life {number}: begins after step {step}, though {done} steps had ended"
                done = step
            elif what == "step":
                done = max(done, step + 1)
            elif what == "loading":
                done = min(done, step)
            elif what == "cut":  # what follows came after the image of the drives
                break


def _allowed(plan: Plan) -> int | None:
    """Returns how many steps a kill may take; None where nothing is promised."""
    durability = plan.options.get("durability", "auto")
    if durability == "step" or (durability == "auto" and plan.placement == ("nvme", "nvme")):
        return 1
    if isinstance(durability, dict):
        return int(durability["every"]) + 1
    return None


def _wrong_end(plan: Plan, number: int, life: Life) -> Iterator[str]:
    what = plan.faults[number].what if number < len(plan.faults) else "nothing"
    for rank, (status, lines) in enumerate(zip(life.statuses, life.lines, strict=True)):
        for name, _, *values in lines:
            if name == "left" and values[0]:
                yield f"rank {rank} left {values[0]}"
            if name == "broken" and values[0]:
                yield f"the device: {values[0]}"
            if name == "kept":
                yield f"rank {rank} keeps inputs of blocks after a step: {values[0]}"
            # On a drive that changes no bytes, the store itself has taken these from a wrong place.
            if name == "mended" and values[0] and not _has_rotten(plan, number):
                yield f"rank {rank} has mended {values[0]} ranges of slots"
            if name == "traceback":
                yield values[0]
        errors = [line for line in lines if line[0] == "error"]
        has_peers = plan.ranks > 1  # of a rank that is lost the others say so
        if status is None:
            yield f"rank {rank} waits, and had not ended, see stderr.{number}.{rank}"
        elif status == -signal.SIGKILL and what not in ("kill", "power"):
            yield f"rank {rank} was killed in a life of {what}"
        elif status == FAILED and _has_rotten(plan, number) and any(map(is_of_the_drive, errors)):
            continue  # noticed, in this life or by the one that would go on
        elif status == FAILED and what in ROT:
            yield f"rank {rank} does not name the bytes that the drive has changed: {errors}"
        elif status == FAILED and what == "nothing":
            yield f"rank {rank} failed in calm weather: {errors}"
        elif status == FAILED and what in ("error", "full") and not has_peers and not any(map(is_of_the_drive, errors)):
            yield f"rank {rank} does not name the request that failed: {errors}"
        elif status == FAILED and what in ("kill", "power") and not has_peers:
            yield f"rank {rank} failed though nothing had failed: {errors}"
        elif status not in (0, FAILED, -signal.SIGKILL):
            yield f"rank {rank} ended with {status}"


def _told(life: Life) -> str:
    told = [line for lines in life.lines for line in lines if line[0] in ("error", "traceback")]
    return f"statuses {life.statuses}, {told}"
