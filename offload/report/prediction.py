"""Comparison of predicted and measured numbers of a run.

Predictions come from the log's "about" or from the output of `offload plan --json`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.errors import ConfigError
from offload.records import parse
from offload.report.charts import format_number, seconds_unit
from offload.report.log import column, is_number, open_to_read, plain
from offload.report.phases import PARTS, bound
from offload.sizes import format_size

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
    Phases of `PARTS` that are 0 in the prediction and in the measurement are left out.

    Args:
        predicted: the predicted numbers by the log's keys; anything but a mapping gives no rows.
        steps: the measured steps.
    """
    if not isinstance(predicted, Mapping):
        return []
    rows = []
    for name, label in _STEP.items():
        expected, values = predicted.get(name), column(steps, name)
        if is_number(expected) and values:
            measured = max(values) if "peak" in name else statistics.median(values)
            rows.append(_row(name, label, expected, measured))
    parts, by = predicted.get("parts_seconds"), bound(steps)
    if isinstance(parts, Mapping) and by is not None:
        for name, label in PARTS.items():
            expected, measured = parts.get(name), by.parts.get(name, 0.0)
            if is_number(expected) and max(expected, measured) > 0:
                rows.append(_row(name, label, expected, measured))
    return rows


def _row(name: str, label: str, expected: float, measured: float) -> dict[str, Any]:
    """Returns a row: key, description, predicted and measured number, and measured divided by predicted."""
    ratio = measured / expected if expected else None
    return {"name": name, "what": label, "predicted": expected, "measured": measured, "ratio": ratio}


def words(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Returns a row's predicted number, measured number and difference in percent as texts."""
    predicted, measured = (_format(row["name"], row[key]) for key in ("predicted", "measured"))
    return predicted, measured, "" if row["ratio"] is None else f"{row['ratio'] - 1:+.1%}"


def _format(name: str, value: float) -> str:
    """Returns a number with the unit that belongs to its key."""
    if name.endswith("_bytes"):
        return format_size(round(value))
    return time_of(value) if name == "seconds" or name in PARTS else f"{value:,.0f}"


def time_of(seconds: float) -> str:
    """Returns a time as a text with four significant digits and a unit."""
    unit = seconds_unit(seconds)
    return f"{format_number(seconds / unit.size)} {unit.name}"


def read_plan(path: Path) -> dict[str, Any]:
    """Reads the output of `offload plan --json` from a file and returns the predicted numbers by the log's keys.

    Raises:
        ConfigError: the file cannot be read or is not a plan.
    """
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
