"""Parts, each in a process of its own, as far as the minutes go; and what all of them came to."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from offload.bench.gpu.work import PLACEMENTS
from offload.sizes import GIB


class Part(NamedTuple):
    name: str
    seconds: float
    """What it takes from start to end, roughly, with the model of 1B parameters."""
    placement: str = ""
    """Of a part that trains a model: weights/states, or "planned"; else empty."""
    changes: Mapping[str, Any] = {}
    """What of `Work` is otherwise than the command says."""


LIMIT = 24 * GIB
"""Of a card that many have."""
PLANNED = "planned"
_USUAL = {"none/none": 60.0, "nvme/nvme": 110.0, "cpu/cpu": 60.0}
_13B = {"model": "llama-13b", "batch_size": 4, "seq_len": 2048, "accumulation": 4, "recompute": True, "limit": LIMIT}
_LAYERS = {"layers": 4, "accumulation": 1}


def _placed(name: str) -> Part:
    return Part(name, _USUAL.get(name, 75), name)


def _limited(name: str) -> Part:
    return Part(f"{name} in 24 GiB", _USUAL.get(name, 75), name, {"limit": LIMIT})


PARTS = (
    Part("bits", 75),
    Part("copies", 25),
    Part("rates", 25),
    *map(_placed, PLACEMENTS[:3]),
    Part("13B layers", 90, "nvme/nvme", _13B | _LAYERS),
    Part("tests", 150),
    *map(_limited, PLACEMENTS[:3]),
    *map(_placed, PLACEMENTS[3:]),
    Part("DeepSpeed", 120),
    Part("7B", 240, PLANNED, _13B | {"model": "llama-7b"}),
    Part("13B", 420, PLANNED, _13B),
)
"""Most important first: with 8 minutes as many as fit, with `--only` those that are asked for."""

WAYS = ("upload", "download", "both")
"""Of copies."""

_LEAVING = 5.0
"""Seconds in which a process that has measured ends: more where a step is long, which the part itself knows."""

_LAST_LINES = 15
_ROOT = Path(__file__).resolve().parents[2]


def fitting(parts: Sequence[Part], seconds: float) -> list[Part]:
    """Those of `parts`, most important first, that fit into `seconds` one after the other."""
    chosen = []
    for part in parts:
        if part.seconds <= seconds:
            chosen.append(part)
            seconds -= part.seconds
    return chosen


def run_parts(
    parts: Sequence[Part],
    budget: float,
    run: Callable[[Part, float, float], dict[str, Any]],
    now: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run what fits into `budget` seconds; each part's name and how it went, those that were left out last.

    `run` gets a part, the seconds after which it should come to an end, and those after which it must.
    """
    deadline, pending = now() + budget, list(parts)
    while fits := fitting(pending, deadline - now()):
        part, left = fits[0], deadline - now()
        pending.remove(part)
        spare = left - sum(other.seconds for other in fits)
        soft = min(part.seconds + spare / len(fits), left - _LEAVING)
        yield part.name, run(part, soft, left)
    for part in pending:
        yield part.name, {"state": "skipped", "needs_seconds": part.seconds}


def run_child(command: Sequence[str], figures: Path, seconds: float, **environment: str) -> dict[str, Any]:
    """Run a part's process for at most `seconds`: how it ended, its last lines, and what it left in `figures`."""
    log, start = figures.with_suffix(".log"), time.monotonic()
    with log.open("w") as words:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=subprocess.STDOUT,
                timeout=max(seconds, 0.0),
                cwd=_ROOT,
                env=os.environ | environment,
                check=False,
            )
            state = "failed" if done.returncode else "done"
        except subprocess.TimeoutExpired:
            state = "stopped"
    result: dict[str, Any] = {"state": state, "seconds": time.monotonic() - start, "figures": None}
    if figures.exists():
        result["figures"] = json.loads(figures.read_text())
    if state == "failed":
        result["exit_code"] = done.returncode
        result["last_lines"] = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    return result


def judge(parts: Mapping[str, Mapping[str, Any]]) -> int:
    """The exit code: 1 where a placement gave other bits, a copy other bytes, or a part failed; else 0."""
    if any(part["state"] == "failed" for part in parts.values()):
        return 1
    jobs = figures_of(parts, "bits").get("jobs", {}).values()
    wrong = [job for job in jobs if job["different"] or job["failed"]]
    ways = [figures_of(parts, "copies").get(way) for way in WAYS]
    red = figures_of(parts, "tests").get("exit_code", 0)
    return 1 if wrong or red or not all(way["right"] for way in ways if way) else 0


def figures_of(parts: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    return parts.get(name, {}).get("figures") or {}


def add_exposure(parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Give each placement, of the GPU limited or not, the seconds that its step takes beyond that of none/none."""
    base = figures_of(parts, "none/none").get("step_seconds")
    for part in PARTS:
        of_the_model = part.placement in PLACEMENTS and "model" not in part.changes
        if base is not None and of_the_model and (figures := figures_of(parts, part.name)):
            figures["exposed_seconds"] = figures["step_seconds"] - base
