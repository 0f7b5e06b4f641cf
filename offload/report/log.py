"""The steps of a log: JSON lines of `offload train --log` or of the key "log", as a kill or a resume has left them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from offload.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Log:
    """What a log tells."""

    path: Path
    steps: tuple[Mapping[str, Any], ...]
    """Of each step the last line that tells of it, in order."""
    abouts: tuple[tuple[int, Mapping[str, Any]], ...]
    """What each process has said of the run, with the first of its steps."""
    in_critical_section: int
    """Lines that are none: a kill has cut them short."""
    again: int
    """Lines of steps that a later line tells of again."""

    @property
    def about(self) -> Mapping[str, Any]:
        """What is said of the run, the newest of each."""
        said: dict[str, Any] = {}
        for _, about in self.abouts:
            said |= about
        return said

    @property
    def resumed(self) -> tuple[int, ...]:
        """The first step of each process but the first."""
        return tuple(step for step, _ in self.abouts[1:])


def read_log(path: Path) -> Log:
    """Read a log. Raises `ConfigError` where there is none, or it is none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot read the log {path}: {error.strerror}; give what `--log` has written") from error
    found: dict[int, Mapping[str, Any]] = {}
    abouts: list[tuple[int, Mapping[str, Any]]] = []
    in_critical_section = again = 0
    for line in text.splitlines():
        values = _values(line)
        if values is None:
            in_critical_section += bool(line.strip())
            continue
        step = values["step"]
        if "eval_loss" in values and "loss" not in values:  # of an evaluation after that step
            if step in found:
                found[step] = {**found[step], **{name: values[name] for name in values if name.startswith("eval_")}}
            continue
        if step in found or (found and step < next(reversed(found))):  # it went on from before: what follows is void
            for late in [each for each in found if each >= step]:
                del found[late]
                again += 1
            abouts = [each for each in abouts if each[0] < step]
        found[step] = values
        if isinstance(values.get("about"), dict):
            abouts.append((step, values["about"]))
    if not found:
        raise ConfigError(
            f"{path} has no step of a run: expected a JSON object a line, as `offload train --log FILE` writes"
        )
    return Log(
        path=path,
        steps=tuple(found.values()),
        abouts=tuple(abouts),
        in_critical_section=in_critical_section,
        again=again,
    )


def _values(line: str) -> dict[str, Any] | None:
    """What a line tells of a step; None where it is torn or tells of none."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = values.get("step") if isinstance(values, dict) else None
    if not isinstance(step, int) or isinstance(step, bool) or not 1 <= step <= _MOST_STEPS:
        return None
    fine = {name: _of_step(name, value) for name, value in values.items()}
    return {name: value for name, value in fine.items() if value is not None}


def _of_step(name: str, value: Any) -> Any:
    """A value that is of the kind that belongs there; None else."""
    if name == "about":
        return plain(value) if isinstance(value, dict) else None
    if name == "drives":
        return _of_drives(value) if isinstance(value, dict) else None
    return value if is_number(value) else None


def _of_drives(value: dict[str, Any]) -> dict[str, Any]:
    return {path: nbytes for path, nbytes in plain(value).items() if is_number(nbytes)}


_MOST_STEPS, _MOST, _LEAST = 10**12, 1e100, 1e-100
"""What is beyond is no number of a run: sums and quotients of those within are finite."""


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it can be counted with."""
    return type(value) in (int, float) and (value == 0 or _LEAST <= abs(value) <= _MOST)


def plain(value: Any) -> Any:
    """What a file has said, without numbers that cannot be counted with and without half characters."""
    if isinstance(value, dict):
        return {plain(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    return value if isinstance(value, bool) or is_number(value) else None


def number(values: Mapping[str, Any], name: str) -> float | None:
    """A number of a step; None where it has none, or one that was not finite."""
    value: float | None = values.get(name)
    return value


def column(steps: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """That number of each step that has one."""
    return [value for values in steps if (value := number(values, name)) is not None]
