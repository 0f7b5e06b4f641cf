"""What `offload train` says of its steps beside the numbers of each: what they were bound by, and what drives bear."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from offload.report.drive_wear import foresee, warning
from offload.report.phases import ADVICE, Bound, bound
from offload.report.prediction import compare, words
from offload.sizes import format_decimal

_STEADY = 3
"""The step of a process by which what a step writes is known."""


def wear(job: Any, reports: Sequence[Any]) -> Iterator[str]:
    """A warning for each drive of whose rated life the run will take more than was asked for; at one step alone."""
    block = job.engine.config["offload"]
    if len(reports) != _STEADY or block["drive_tbw"] is None:
        return
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of torchrun: each writes as much
    first, last = reports[0], reports[-1]
    left = max(job.steps - last.step, 0)
    for path, so_far in last.drives.items():
        a_step = (so_far - first.drives[path]) / (last.step - first.step)  # what is written late counts later
        words = warning(
            foresee(path, ranks * so_far, ranks * a_step, left, block["drive_tbw"]),
            block["drive_share"],
            left * last.seconds,
        )
        if words is not None:
            yield words


def facts(job: Any, reports: Sequence[Any]) -> dict[str, Any]:
    """What `--json` has of it."""
    by, engine = _bound(reports), job.engine
    return {
        "bound_by": None if by is None else by.by,
        "step_parts_seconds": {} if by is None else dict(by.parts),
        "drive_written_bytes": {
            each.path: {"run": each.run_bytes, "life": each.life_bytes} for each in engine.drive_writes()
        },
        "predicted": compare(job.predicted, _steady(reports)),
    }


def rows(reports: Sequence[Any], result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a person reads of it."""
    by = _bound(reports)
    if by is not None:
        yield "bound by", by.words()
        yield "to be faster", ADVICE[by.by]
    for path, each in result["drive_written_bytes"].items():
        so_far = f", {format_decimal(each['life'])} in the life of the run" if each["life"] > each["run"] else ""
        yield "written in all", f"{format_decimal(each['run'])} to {path}{so_far}"
    for index, each in enumerate(result["predicted"]):
        predicted, measured, difference = words(each)
        told = f"{each['what']}: {predicted}, {measured}" + (f" ({difference})" if difference else "")
        yield "" if index else "predicted, measured", told


def _bound(reports: Sequence[Any]) -> Bound | None:
    return bound(_steady(reports))


def _steady(reports: Sequence[Any]) -> list[dict[str, Any]]:
    """The steps, as the log has them, without the first, which records the order of uses."""
    return [report.line() for report in reports[1:] or reports]
