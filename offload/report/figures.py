"""The numbers of a run, computed from the log for `offload report --json` and for the page."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from offload.report.drive_wear import forecast
from offload.report.links import busy, updates
from offload.report.log import Log, column, is_number, number
from offload.report.phases import advice, bound
from offload.report.prediction import compare
from offload.report.timeline_view import Window


def figures(log: Log, plan: Mapping[str, float] | None = None, window: Window | None = None) -> dict[str, Any]:
    """Returns the numbers of a run as a JSON object, in seconds and bytes.

    Medians and rates leave out the first step of each process: without a recorded access order, it reads on demand.

    Args:
        log: the log.
        plan: a prediction to compare with; by default the one in the log.
        window: one step of a timeline, for the shares of the links; None without a timeline.
    """
    steady = _steady(log)
    by = bound(steady)
    about = {name: value for name, value in log.about.items() if name != "predicted"}
    seconds, shares = column(steady, "seconds"), column(steady, "others_share")
    others = statistics.fmean(shares) if shares else None
    return {
        "log": str(log.path),
        "about": about,
        "steps": len(log.steps),
        "first_step": log.steps[0]["step"],
        "last_step": log.steps[-1]["step"],
        "resumed_at": list(log.resumed),
        # "torn_lines" is part of the published JSON and must keep its name.
        "torn_lines": log.truncated_lines,
        "repeated_steps": log.again,
        "loss": _ends(column(log.steps, "loss")),
        "eval_loss": _ends(column(log.steps, "eval_loss")),
        "grad_norm": _ends(column(log.steps, "grad_norm")),
        "lr": _ends(column(log.steps, "lr")),
        "skipped_steps": int(max(column(log.steps, "skipped_steps"), default=0)),
        "early_updates": int(sum(column(log.steps, "early_updates"))),
        "early_updates_dropped": int(sum(column(log.steps, "early_updates_dropped"))),
        "seconds": sum(column(log.steps, "seconds")),
        "step_seconds": _spread(seconds),
        "tokens_per_second": _rate(steady, "tokens"),
        "samples_per_second": _samples_rate(steady, about),
        "bound_by": None if by is None else by.by,
        "bound_words": None if by is None else by.words(),
        "advice": None if by is None else advice(by.by, others),
        "others_share": others,
        "step_parts_seconds": {} if by is None else dict(by.parts),
        **{f"{name}_bytes": _bytes(log.steps, steady, f"{name}_bytes") for name in ("read", "written")},
        **{f"{name}_bytes": _bytes(log.steps, steady, f"{name}_bytes") for name in ("uploaded", "gradients")},
        "read_bytes_per_second": _rate(steady, "read_bytes"),
        "written_bytes_per_second": _rate(steady, "written_bytes"),
        "host_peak_bytes": max(column(log.steps, "host_peak_bytes"), default=None),
        "device_peak_bytes": max(column(log.steps, "device_peak_bytes"), default=None),
        "drives": _drives(log, steady, about),
        "links": None if window is None else busy(window.spans, window.start, window.end),
        "updates": None if window is None else updates(window.spans, window.start, window.end),
        "predicted": compare(log.about.get("predicted") if plan is None else plan, steady),
    }


def _steady(log: Log) -> Sequence[Mapping[str, Any]]:
    """Returns the steps without the first step of each process, or all steps if that leaves none."""
    first = {log.steps[0]["step"], *log.resumed}
    return [values for values in log.steps if values["step"] not in first] or log.steps


def _ends(values: Sequence[float]) -> dict[str, float] | None:
    """Returns first, last, least and largest value; None without values."""
    return {"first": values[0], "last": values[-1], "least": min(values), "most": max(values)} if values else None


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    """Returns median, 95th percentile, least and largest value; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    # One of the measured values, without interpolation.
    most = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return {"median": statistics.median(ordered), "p95": most, "least": ordered[0], "most": ordered[-1]}


def _rate(steps: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Returns a field's sum per second, over the steps with the field and a duration; None without such steps."""
    both = [(number(values, name), number(values, "seconds")) for values in steps]
    totals = [(amount, seconds) for amount, seconds in both if amount is not None and seconds]
    return sum(amount for amount, _ in totals) / sum(seconds for _, seconds in totals) if totals else None


def _samples_rate(steps: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> float | None:
    """Returns the samples per second; None if the log does not state the samples of a step."""
    samples, seconds = about.get("samples_a_step"), column(steps, "seconds")
    return samples * len(seconds) / sum(seconds) if isinstance(samples, int) and sum(seconds) > 0 else None


def _bytes(
    steps: Sequence[Mapping[str, Any]], steady: Sequence[Mapping[str, Any]], name: str
) -> dict[str, float] | None:
    """Returns a field's total, and its median over the steady steps; None if no step contains the field."""
    every = column(steps, name)
    return {"total": sum(every), "median": statistics.median(column(steady, name) or every)} if every else None


def _drives(log: Log, steady: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns for each drive the bytes that all processes of the run have written, and a forecast for the run's end."""
    tbw, ends = about.get("drive_tbw"), about.get("steps")
    rows = [values["drives"] for values in log.steps if values.get("drives")]
    if not rows:
        return []
    # Without the run's number of steps, the forecast for the end is the present state.
    left = max(ends - log.steps[-1]["step"], 0) if isinstance(ends, int) else 0
    drives = []
    for path, so_far in rows[-1].items():
        totals = [row[path] for row in rows if path in row]
        # The counter may fall after a resume from an earlier step: such a pair of steps is left out.
        grown = [after - before for before, after in pairwise(totals) if after >= before]
        a_step = statistics.median(grown) if grown else None
        use = forecast(path, so_far, a_step or 0, left, tbw if is_number(tbw) and tbw > 0 else None)
        drives.append({**dataclasses.asdict(use), "step_bytes": a_step, "share": use.share})
    return drives
