"""The numbers of a run, computed from the log for `offload report --json` and for the page."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from offload.errors import ConfigError, printable
from offload.prices import Cost, Prices, as_json, cost, dollars, in_words
from offload.records import parse
from offload.report.charts import format_number, seconds_unit
from offload.report.links import busy, updates
from offload.report.log import Log, column, is_number, median_rates, number, open_to_read, plain
from offload.report.phases import PARTS, advice, bound
from offload.report.timeline_view import Window
from offload.sizes import count_of, format_decimal, format_share, format_size, format_time

# -- drive wear ----------------------------------------------------------------------------------------
#
# Wear of drives: bytes that a run writes in relation to the drives' rated endurance.


_TERA = 1e12


@dataclass(frozen=True, kw_only=True)
class DriveUse:
    """Bytes written to a drive so far and predicted for the end of the run."""

    path: str
    so_far_bytes: float
    at_end_bytes: float
    rated_bytes: float | None

    @property
    def share(self) -> float | None:
        """Returns the fraction of the rated endurance used at the end; None if the rating is unknown."""
        return None if self.rated_bytes is None else self.at_end_bytes / self.rated_bytes


def forecast(path: str, so_far: float, a_step: float, steps_left: int, tbw: float | None) -> DriveUse:
    """Predicts the bytes written to a drive at the end of a run.

    `tbw` is the rated endurance in terabytes.
    """
    return DriveUse(
        path=path,
        so_far_bytes=so_far,
        at_end_bytes=so_far + a_step * steps_left,
        rated_bytes=None if tbw is None else tbw * _TERA,
    )


def warning(use: DriveUse, share: float, seconds_left: float) -> str | None:
    """Returns a warning if a run will use more than the fraction `share` of a drive's endurance, else None."""
    if use.share is None or use.share <= share:
        return None
    assert use.rated_bytes is not None
    return (
        f"warning: {use.path}: at its end, in {format_time(seconds_left)}, this run will have written "
        f"{format_decimal(use.at_end_bytes)} to this drive, {use.share:.1%} of its rated "
        f"{format_decimal(use.rated_bytes)} (drive_tbw); the warning is set to {share:.0%} (drive_share). More "
        f"micro-batches a step write less for each sample. States in RAM without a commit each step "
        f"(offload_optimizer cpu, durability) are not written"
    )


# -- prediction ----------------------------------------------------------------------------------------
#
# Comparison of predicted and measured numbers of a run.
#
# Predictions come from the log's "about" or from the output of `offload plan --json`.


_LONGEST = 1 << 24
"""Characters of a plan at most."""
_STEP: Mapping[str, str] = {
    "seconds": "seconds a step",
    "tokens": "tokens a step",
    "read_bytes": "bytes read a step",
    "written_bytes": "bytes written a step",
    "host_peak_bytes": "peak of RAM",
    "device_peak_bytes": "peak of device memory",
}
"""Keys of the log, except the phases, whose numbers may be predicted, with a description of each."""


def compare(predicted: Any, steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each number that was both predicted and measured.

    The measured number of a peak is the maximum over `steps`, that of a phase is the mean, and any other is the median.
    Phases of `PARTS` that are 0 in the prediction and in the measurement are left out. `predicted` has numbers by the
    keys of the log; anything but a mapping gives no rows.
    """
    if not isinstance(predicted, Mapping):
        return []
    rows = []
    for name, label in _STEP.items():
        expected, values = predicted.get(name), column(steps, name)
        if name == "seconds" and len(falling := _by_prediction(steps)) > 1:
            rows += [_row(name, label + words, *values) for words, values in zip(_FALLS, falling, strict=False)]
        elif is_number(expected) and values:
            measured = max(values) if "peak" in name else statistics.median(values)
            rows.append(_row(name, label, expected, measured))
    parts, by = predicted.get("parts_seconds"), bound(steps)
    if isinstance(parts, Mapping) and by is not None:
        for name, label in PARTS.items():
            expected, measured = parts.get(name), by.parts.get(name, 0.0)
            if is_number(expected) and max(expected, measured) > 0:
                rows.append(_row(name, label, expected, measured))
    return rows


_FALLS = (" before the drives' rate fell", *(f" after the drives' rate fell{more}" for more in ("", " again")))
"""Words for the steps before the drives' rates of writes fall, after they fell, and after one of them fell again."""


def _by_prediction(steps: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Returns each predicted duration of a step in the order of the steps, with the median of the measured ones.

    By the curve of a drive the prediction changes with the bytes that the run has written.
    """
    groups: dict[float, list[float]] = {}
    for values in steps:
        expected, seconds = number(values, "predicted_seconds"), number(values, "seconds")
        if expected is not None and seconds is not None:
            groups.setdefault(expected, []).append(seconds)
    return [(expected, statistics.median(seconds)) for expected, seconds in groups.items()]


def rates_words(predicted: Any) -> str | None:
    """Returns a sentence on the rates of drives in a prediction of the log; None if nothing is known of them."""
    sustained = predicted.get("sustained") if isinstance(predicted, Mapping) else None
    if not isinstance(sustained, Mapping):
        return None
    seconds = sustained.get("seconds")
    if sustained.get("measured") is not True or not isinstance(seconds, Mapping):
        return "predicted by burst rates of the drives, unverified: `offload probe --sustained` measures them"
    times = ", ".join(f"{time_of(value)} {when}" for when, value in seconds.items() if is_number(value))
    return f"by the curves of its drives a step takes {times}"


def _row(name: str, label: str, expected: float, measured: float) -> dict[str, Any]:
    ratio = measured / expected if expected else None
    return {"name": name, "what": label, "predicted": expected, "measured": measured, "ratio": ratio}


def words(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Returns a row's predicted number, measured number and difference in percent as texts."""
    predicted, measured = (_format(row["name"], row[key]) for key in ("predicted", "measured"))
    return predicted, measured, "" if row["ratio"] is None else f"{row['ratio'] - 1:+.1%}"


def _format(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return format_size(round(value))
    return time_of(value) if name == "seconds" or name in PARTS else f"{value:,.0f}"


def time_of(seconds: float) -> str:
    """Returns a time as a text with four significant digits and a unit."""
    unit = seconds_unit(seconds)
    return f"{format_number(seconds / unit.size)} {unit.name}"


def read_plan(path: Path) -> dict[str, Any]:
    """Reads the output of `offload plan --json` from a file and returns the predicted numbers by the log's keys."""
    try:
        with open(path, encoding="utf-8", opener=open_to_read) as file:
            text = file.read(_LONGEST + 1)
        if len(text) > _LONGEST:
            raise ValueError(f"more than {_LONGEST} characters")
        step = parse(text)["step"]
        known = {name: step[name] for name in ("seconds", "tokens", "read_bytes", "written_bytes")}
        if not all(value is None or is_number(value) for value in known.values()):
            raise TypeError("a number that cannot be counted with")
        return known | {"parts_seconds": plain(step.get("parts_seconds"))}
    except OSError as error:
        raise ConfigError(
            f"cannot read the plan {path}: {error.strerror}; give the output of `offload plan --json`"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a plan: expected the output of `offload plan --json`") from error


# -- updates under the backward ------------------------------------------------------------------------


def early_updates(steps: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Returns how many updates under the backward held and how many were dropped, and the steps that dropped some."""
    held, dropped = column(steps, "early_updates"), column(steps, "early_updates_dropped")
    return {
        "early_updates": int(sum(held)),
        "early_updates_dropped": int(sum(dropped)),
        "early_updates_dropped_steps": sum(count > 0 for count in dropped),
    }


def early_words(counts: Mapping[str, Any]) -> str | None:
    """Returns the counts of `early_updates` in words; None if no update was made under the backward."""
    held, dropped, steps = (counts[name] for name in early_updates(()))
    if not held + dropped:
        return None
    return f"{held:,} held" + (f", {dropped:,} in {count_of(steps, 'step')} came to nothing" if dropped else "")


# -- figures -------------------------------------------------------------------------------------------


def figures(
    log: Log, plan: Mapping[str, float] | None = None, window: Window | None = None, prices: Prices | None = None
) -> dict[str, Any]:
    """Returns the numbers of a run as a JSON object, in seconds and bytes, and with `prices` in dollars.

    Medians and rates leave out the first step of each process: without a recorded access order, it reads on demand.
    """
    first = {log.steps[0]["step"], *log.resumed}
    steady = [values for values in log.steps if values["step"] not in first] or log.steps
    by = bound(steady)
    about = {name: value for name, value in log.about.items() if name != "predicted"}
    seconds, shares = column(steady, "seconds"), column(steady, "others_share")
    others = statistics.fmean(shares) if shares else None
    samples = about.get("samples_a_step")
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
        **early_updates(log.steps),
        "seconds": sum(column(log.steps, "seconds")),
        "step_seconds": _spread(seconds),
        "tokens_per_second": _rate(steady, "tokens"),
        "samples_per_second": samples * len(seconds) / sum(seconds)
        if isinstance(samples, int) and sum(seconds) > 0
        else None,
        **median_rates(steady),
        "bound_by": None if by is None else by.by,
        "bound_words": None if by is None else by.words(),
        "advice": None if by is None else advice(by.by, others),
        "others_share": others,
        "step_parts_seconds": {} if by is None else dict(by.parts),
        **{
            name: _bytes(log.steps, steady, name)
            for name in ("read_bytes", "written_bytes", "uploaded_bytes", "gradients_bytes")
        },
        "read_bytes_per_second": _rate(steady, "read_bytes"),
        "written_bytes_per_second": _rate(steady, "written_bytes"),
        "host_peak_bytes": max(column(log.steps, "host_peak_bytes"), default=None),
        "device_peak_bytes": max(column(log.steps, "device_peak_bytes"), default=None),
        "drives": _drives(log, steady, about),
        "drive_budget": _budget(log, about),
        "cost": None if prices is None else _cost(log, about, prices),
        "links": None if window is None else busy(window.spans, window.start, window.end),
        "updates": None if window is None else updates(window.spans, window.start, window.end),
        "predicted": compare(log.about.get("predicted") if plan is None else plan, steady),
        "predicted_rates": rates_words(log.about.get("predicted")),
    }


def _ends(values: Sequence[float]) -> dict[str, float] | None:
    return {"first": values[0], "last": values[-1], "least": min(values), "most": max(values)} if values else None


def _spread(values: Sequence[float]) -> dict[str, float] | None:
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


def _bytes(
    steps: Sequence[Mapping[str, Any]], steady: Sequence[Mapping[str, Any]], name: str
) -> dict[str, float] | None:
    """Returns a field's total, and its median over the steady steps; None if no step contains the field."""
    every = column(steps, name)
    return {"total": sum(every), "median": statistics.median(column(steady, name) or every)} if every else None


def _cost(log: Log, about: Mapping[str, Any], prices: Prices) -> dict[str, Any]:
    """Returns the dollars of the steps in the log, by the bytes that each wrote and the rating in the run's config."""
    tbw = about.get("drive_tbw")
    if is_number(tbw) and tbw > 0:
        prices = prices.with_(tbw=(float(tbw), "drive_tbw"))
    sums = {name: sum(column(log.steps, name)) for name in ("seconds", "tokens", "written_bytes")}
    spent = cost(prices, sums["seconds"], sums["tokens"], sums["written_bytes"])
    return {**as_json(spent), "seconds": spent.seconds, "tokens": spent.tokens, "prices": prices._asdict()}


def dollars_of(figures: Mapping[str, Any]) -> list[str]:
    """Returns a line on the dollars of a run; none if `figures` were made without prices."""
    about = figures["cost"]
    if about is None:
        return []
    spent = Cost(about["parts_dollars"], about["seconds"], about["tokens"])
    return [f"cost: {dollars(spent.total)} so far; {in_words(spent)}"]


def _budget(log: Log, about: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the drive budget of a run, and the fraction of its period that the last step has used; None without."""
    text, used = about.get("drive_budget"), column(log.steps, "drive_budget_used")
    return {"budget": text, "used": used[-1]} if isinstance(text, str) and used else None


def budget_words(figures: Mapping[str, Any]) -> list[str]:
    """Returns a line on the drive budget of a run; none without one."""
    budget = figures["drive_budget"]
    if budget is None:
        return []
    return [f"drive budget {printable(budget['budget'])}: {format_share(budget['used'])} used by the last step"]


def _drives(log: Log, steady: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> list[dict[str, Any]]:
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
