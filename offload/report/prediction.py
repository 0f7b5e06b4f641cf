"""What was foreseen of a run, beside what came: of the log's "about", or of the JSON of `offload plan`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.errors import ConfigError
from offload.report.charts import say, seconds_unit
from offload.report.log import column, is_number, plain
from offload.report.phases import PARTS, bound
from offload.sizes import format_size

_STEP: Mapping[str, str] = {
    "seconds": "seconds a step",
    "tokens": "tokens a step",
    "read_bytes": "bytes read a step",
    "written_bytes": "bytes written a step",
    "host_peak_bytes": "peak of RAM",
    "device_peak_bytes": "peak of device memory",
}
"""Numbers of the log that may be foreseen, and what each is."""


def compare(said: Any, steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each number that was foreseen, and what came in `steps`: the median, of a peak the most, of a part the mean.

    Parts, by their names in `PARTS`, are left out where both are nothing.
    """
    if not isinstance(said, Mapping):
        return []
    found = []
    for name, what in _STEP.items():
        expected, values = said.get(name), column(steps, name)
        if is_number(expected) and values:
            came = max(values) if "peak" in name else statistics.median(values)
            found.append(_row(name, what, expected, came))
    parts, by = said.get("parts_seconds"), bound(steps)
    if isinstance(parts, Mapping) and by is not None:
        for name, what in PARTS.items():
            expected, came = parts.get(name), by.parts.get(name, 0.0)
            if is_number(expected) and max(expected, came) > 0:
                found.append(_row(name, what, expected, came))
    return found


def _row(name: str, what: str, expected: float, came: float) -> dict[str, Any]:
    ratio = came / expected if expected else None
    return {"name": name, "what": what, "predicted": expected, "measured": came, "ratio": ratio}


def words(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """A row for people: what was foreseen, what came, and by how much that is another."""
    predicted, measured = (_said(row["name"], row[key]) for key in ("predicted", "measured"))
    return predicted, measured, "" if row["ratio"] is None else f"{row['ratio'] - 1:+.1%}"


def _said(name: str, value: float) -> str:
    """A number by its name, with its unit."""
    if name.endswith("_bytes"):
        return format_size(round(value))
    return time_of(value) if name == "seconds" or name in PARTS else f"{value:,.0f}"


def time_of(seconds: float) -> str:
    """Four digits that count."""
    unit = seconds_unit(seconds)
    return f"{say(seconds / unit.size)} {unit.name}"


def read_plan(path: Path) -> dict[str, Any]:
    """What a plan foresees of a step, by the log's names. Raises `ConfigError` where the file is no plan."""
    try:
        step = json.loads(path.read_text(encoding="utf-8"))["step"]
        known = {name: step[name] for name in ("seconds", "tokens", "read_bytes", "written_bytes")}
        if not all(value is None or is_number(value) for value in known.values()):
            raise TypeError("a number that cannot be counted with")
        return known | {"parts_seconds": plain(step.get("parts_seconds"))}
    except OSError as error:
        raise ConfigError(
            f"cannot read the plan {path}: {error.strerror}; give what `offload plan --json` prints"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is no plan: expected what `offload plan --json` prints") from error
