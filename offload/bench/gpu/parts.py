"""Parts of the benchmark, each run in a process of its own within the budget, and conclusions from their figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from offload.bench.gpu.work import PLACEMENTS
from offload.sizes import GIB


class Part(NamedTuple):
    """A part of the benchmark."""

    name: str
    seconds: float
    """Rough seconds from start to end, with the model of 1B parameters."""
    placement: str = ""
    """Placement of a part that trains a model, as weights/states, or "planned"; empty for other parts."""
    changes: Mapping[str, Any] = {}
    """Fields of `Work` that replace those from the command's options."""


LIMIT = 24 * GIB
"""Bytes of memory of a common GPU."""
PLANNED = "planned"
BASE = "none/none"
"""The part whose step bounds those of the other placements."""
_SAME_WORK = ("model", "layers", "parameters", "tokens_per_step", "recompute")
_USUAL = {"none/none": 60.0, "nvme/nvme": 110.0, "cpu/cpu": 60.0}
_13B = {"model": "llama-13b", "batch_size": 4, "seq_len": 2048, "accumulation": 4, "recompute": True, "limit": LIMIT}
_FEW_BYTES = {"moments": "int8", "master": "bf24"}
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
    Part("13B in few bytes", 300, PLANNED, _13B | _FEW_BYTES),
    Part("13B", 420, PLANNED, _13B),
)
"""All parts, the most important first. `--only` restricts the choice; of the others, those that fit the budget run."""

DIRECTIONS = ("upload", "download", "both")
"""Directions of copies."""

_LEAVING = 5.0
"""Seconds that a part's process needs to end after its last measurement. A part whose steps take longer stops earlier
by itself: see `training.timed`."""


def fitting(parts: Sequence[Part], seconds: float) -> list[Part]:
    """Returns the parts that fit into `seconds` one after the other; earlier ones in `parts` take precedence."""
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
    """Runs the parts that fit into `budget` seconds. Yields each part's name and result, then those of skipped parts.

    `run` receives a part, the seconds after which the part should end, and the seconds after which it must have ended.
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


def judge(parts: Mapping[str, Mapping[str, Any]]) -> int:
    """Returns the exit code: 1 if a placement gave other bits, a copy other bytes, or a test or part failed; else 0."""
    if any(part["state"] == "failed" for part in parts.values()):
        return 1
    jobs = figures_of(parts, "bits").get("jobs", {}).values()
    wrong = [job for job in jobs if job["different"] or job["failed"]]
    ways = [figures_of(parts, "copies").get(way) for way in DIRECTIONS]
    red = figures_of(parts, "tests").get("exit_code", 0)
    return 1 if wrong or red or not all(way["right"] for way in ways if way) else 0


def figures_of(parts: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Returns the figures of a part; empty if there are none."""
    return parts.get(name, {}).get("figures") or {}


def add_exposure(parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Adds to the figures of each placement the seconds that its step takes beyond the step of none/none.

    Only steps of the same work are compared: the same model, tokens and recomputation. Nothing is added if the figures
    of none/none are missing or invalid.
    """
    base = figures_of(parts, BASE)
    if "step_seconds" not in base or BASE in invalid(parts):
        return
    for part in PARTS:
        figures = figures_of(parts, part.name)
        if part.placement in PLACEMENTS and all(figures.get(key) == base.get(key) for key in _SAME_WORK):
            figures["exposed_seconds"] = figures["step_seconds"] - base["step_seconds"]


def invalid(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Returns the parts whose figures would mislead, each with the reason."""
    found = {}
    for name in parts:
        placement = name.partition(" in ")[0]
        missing = figures_of(parts, name).get("no_device_kernels")
        # States on the GPU are then copied to the host for each update and back: 12 bytes a parameter each way.
        if missing and placement in PLACEMENTS and placement.endswith("/none"):
            found[name] = f"the host, not the GPU, updated states that are on the GPU: {missing}"
    return found


def refused(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Returns the parts whose figures are missing or incomplete, each with the reason."""
    found = {}
    for name, part in parts.items():
        if part["state"] == "failed":
            found[name] = f"failed with exit code {part['exit_code']}: {(part['last_lines'] or ['no words'])[-1]}"
        elif part["state"] == "stopped":
            found[name] = "stopped when the budget was over" + ("" if part["figures"] else ", without figures")
        elif part["state"] == "skipped":
            found[name] = f"not run: {part['needs_seconds']:.0f} s did not fit into the budget"
        elif why := figures_of(parts, name).get("skipped"):
            found[name] = why
    return found


def bounds(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the bounds of the figures; those that were not measured, or are invalid, are None or left out."""
    base, copies = figures_of(parts, BASE), figures_of(parts, "copies")
    return {
        "step_seconds": None if BASE in invalid(parts) else base.get("step_seconds"),
        "matmul": figures_of(parts, "rates").get("plain_matmul"),
        "pinned_gigabytes_per_second": {
            way: copies[way]["pinned_gigabytes_per_second"] for way in DIRECTIONS if way in copies
        },
        "most_read_bytes_per_parameter": 14,
        "most_written_bytes_per_parameter": 12,
    }
