"""The summary of `offload train`: the limiting phase of the steps, the wear of drives, and the prediction."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from offload.launch.environment import rank_number
from offload.report.drive_wear import forecast, warning
from offload.report.phases import Bound, advice, bound
from offload.report.prediction import compare, words
from offload.sizes import format_decimal

_STEADY = 3
"""Number of steps of a process after which the bytes written per step are known."""


def wear(job: Any, reports: Sequence[Any]) -> Iterator[str]:
    """Yields a warning for each drive of which the run will use more than `drive_share` of the rated endurance.

    Warnings are computed only after step `_STEADY` of a process, so each appears once.

    Args:
        job: the job that runs.
        reports: reports of all steps of this process so far.
    """
    block = job.engine.config["offload"]
    if len(reports) != _STEADY or block["drive_tbw"] is None:
        return
    ranks = rank_number(os.environ, "LOCAL_WORLD_SIZE", 1)  # set by torchrun; each rank writes the same amount
    first, last = reports[0], reports[-1]
    left = max(job.steps - last.step, 0)
    for path, so_far in last.drives.items():
        a_step = (so_far - first.drives[path]) / (
            last.step - first.step
        )  # a mean, since writes may end in a later step
        words = warning(
            forecast(path, ranks * so_far, ranks * a_step, left, block["drive_tbw"]),
            block["drive_share"],
            left * last.seconds,
        )
        if words is not None:
            yield words


def facts(job: Any, reports: Sequence[Any]) -> dict[str, Any]:
    """Returns the summary's fields of `--json`."""
    by, engine = _bound(reports), job.engine
    return {
        "bound_by": None if by is None else by.by,
        "step_parts_seconds": {} if by is None else dict(by.parts),
        "drive_written_bytes": {
            each.path: {"run": each.run_bytes, "life": each.life_bytes} for each in engine.drive_writes()
        },
        "predicted": compare(job.predicted, _steady(reports)),
        "doubts": list(job.predicted.get("doubts", ())),
    }


def rows(reports: Sequence[Any], result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the summary's rows of the table: name and value."""
    by = _bound(reports)
    if by is not None:
        yield "bound by", by.words()
        yield "to be faster", advice(by.by, result["others_share"])
    for path, each in result["drive_written_bytes"].items():
        so_far = f", {format_decimal(each['life'])} in the life of the run" if each["life"] > each["run"] else ""
        yield "written in all", f"{format_decimal(each['run'])} to {path}{so_far}"
    for index, each in enumerate(result["predicted"]):
        predicted, measured, difference = words(each)
        told = f"{each['what']}: {predicted}, {measured}" + (f" ({difference})" if difference else "")
        yield "" if index else "predicted, measured", told
    if result["predicted"]:
        for doubt in result["doubts"]:
            yield "", doubt


def _bound(reports: Sequence[Any]) -> Bound | None:
    """Returns the limiting phase of the steady steps."""
    return bound(_steady(reports))


def _steady(reports: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the log's values of all steps but the first, which records the access order."""
    return [report.line() for report in reports[1:] or reports]
