"""What was foreseen of a run: the JSON of `offload plan`, or what the log's "about" says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from offload.errors import ConfigError

PREDICTED: Mapping[str, str] = {
    "seconds": "seconds a step",
    "tokens": "tokens a step",
    "read_bytes": "bytes read a step",
    "written_bytes": "bytes written a step",
    "host_peak_bytes": "peak of RAM",
    "device_peak_bytes": "peak of device memory",
}
"""Numbers of the log that may be foreseen, and what each is."""


def read_plan(path: Path) -> dict[str, float]:
    """What a plan foresees of a step, by the log's names. Raises `ConfigError` where the file is no plan."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        step = {name: found["step"][name] for name in ("seconds", "tokens", "read_bytes", "written_bytes")}
    except OSError as error:
        raise ConfigError(
            f"cannot read the plan {path}: {error.strerror}; give what `offload plan --json` prints"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no plan: expected what `offload plan --json` prints") from error
    return {name: value for name, value in step.items() if isinstance(value, int | float)}
