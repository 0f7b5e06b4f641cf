"""Reader of logs: JSON lines of `offload train --log` or of the key "log", possibly truncated or repeated by kills."""

from __future__ import annotations

import errno
import os
import stat
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from offload.errors import ConfigError
from offload.records import parse


@dataclass(frozen=True, kw_only=True)
class Log:
    """Content of a log."""

    path: Path
    steps: tuple[Mapping[str, Any], ...]
    """Values of each step in order, from the last line about the step."""
    abouts: tuple[tuple[int, Mapping[str, Any]], ...]
    """For each process, its first step and its facts on the run."""
    truncated_lines: int
    """Number of lines that cannot be read, since a kill truncated them."""
    again: int
    """Number of lines about steps that were trained again later."""

    @property
    def about(self) -> Mapping[str, Any]:
        """Returns the facts on the run; for each key the newest value."""
        merged: dict[str, Any] = {}
        for _, about in self.abouts:
            # Later processes replace values, such as the number of steps.
            merged |= about
        return merged

    @property
    def resumed(self) -> tuple[int, ...]:
        """Returns the first step of each process except the first process."""
        return tuple(step for step, _ in self.abouts[1:])


def read_log(path: Path) -> Log:
    """Reads a log."""
    steps_by_number: dict[int, Mapping[str, Any]] = {}
    abouts: list[tuple[int, Mapping[str, Any]]] = []
    truncated_lines = again = 0
    for line in _lines(path):
        values = _values(line)
        if values is None:
            truncated_lines += bool(line.strip())
            continue
        step = values["step"]
        # A line of an evaluation belongs to the step before the evaluation.
        if "eval_loss" in values and "loss" not in values:
            if step in steps_by_number:
                steps_by_number[step] = {
                    **steps_by_number[step],
                    **{name: values[name] for name in values if name.startswith("eval_")},
                }
            continue
        # The run resumed from an earlier step: lines from that step on describe weights that no longer exist.
        if step in steps_by_number or (steps_by_number and step < next(reversed(steps_by_number))):
            for late in [number for number in steps_by_number if number >= step]:
                del steps_by_number[late]
                again += 1
            abouts = [about for about in abouts if about[0] < step]
        steps_by_number[step] = values
        if isinstance(values.get("about"), dict):
            abouts.append((step, values["about"]))
    if not steps_by_number:
        raise ConfigError(
            f"{path} contains no step of a run: expected a JSON object a line, as `offload train --log FILE` "
            'and the key "log" of the block "offload" write'
        )
    return Log(
        path=path,
        steps=tuple(steps_by_number.values()),
        abouts=tuple(abouts),
        truncated_lines=truncated_lines,
        again=again,
    )


def _lines(path: Path) -> Iterator[str]:
    """Yields the lines of a log. Lines that are too long for a step are split."""
    try:
        # A kill may have cut a line within a character, so decoding replaces errors.
        with open(path, encoding="utf-8", errors="replace", opener=open_to_read) as file:
            yield from iter(lambda: file.readline(_LONGEST_LINE), "")
    except OSError as error:
        raise ConfigError(
            f"cannot read the log {path}: {error.strerror}; give a file that "
            '`offload train --log` or the key "log" of the block "offload" wrote'
        ) from error


def open_to_read(path: str, flags: int) -> int:
    """Opens a file that a user names, or a pipe, as an `opener` of Python's `open`.

    A pipe without a writer counts as empty, since reading would wait forever. A file with holes is refused as no log.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_size > max(_LONGEST_FILE_OF_HOLES, status.st_blocks * 512 * 64):
        os.close(descriptor)
        raise OSError(errno.EFBIG, f"it has {status.st_size} bytes, most of which are holes", path)
    return descriptor


def _values(line: str) -> dict[str, Any] | None:
    """Returns the values of a line; None if the line is truncated or not about a step."""
    try:
        values = parse(line)
    except ValueError:
        return None
    step = values.get("step") if isinstance(values, dict) else None
    # Any JSON file can be given: the limit keeps absurd step numbers from the charts.
    if not isinstance(step, int) or isinstance(step, bool) or not 1 <= step <= _MOST_STEPS:
        return None
    cleaned = {name: _of_step(name, value) for name, value in values.items()}
    return {name: value for name, value in cleaned.items() if value is not None}


def _of_step(name: str, value: Any) -> Any:
    if name == "about":
        return plain(value) if isinstance(value, dict) else None
    if name == "drives":
        if not isinstance(value, dict):
            return None
        return {path: nbytes for path, nbytes in plain(value).items() if is_number(nbytes)}
    return value if is_number(value) else None


_LONGEST_LINE = 1 << 22
"""Most characters of a line. The longest line is the first of a process, which describes the run."""
_LONGEST_FILE_OF_HOLES = 1 << 26
_MOST_STEPS, _MOST, _LEAST = 10**12, 1e100, 1e-100
"""Limits of valid numbers. Within them, sums and quotients of a run's numbers stay finite."""


def is_number(value: Any) -> TypeGuard[float]:
    """Returns True for a number within the limits; False for a bool."""
    return type(value) in (int, float) and (value == 0 or _LEAST <= abs(value) <= _MOST)


def plain(value: Any) -> Any:
    """Returns parsed JSON with invalid numbers replaced by None and lone surrogates by "?"."""
    if isinstance(value, dict):
        return {plain(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    return value if isinstance(value, bool) or is_number(value) else None


def number(values: Mapping[str, Any], name: str) -> float | None:
    """Returns a field of a step; None if absent or not finite."""
    value: float | None = values.get(name)
    return value


def column(steps: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """Returns a field's values, of all steps that contain the field."""
    return [value for values in steps if (value := number(values, name)) is not None]


# -- rates of a step -----------------------------------------------------------------------------------

_RATES = {"tflops": "{:.4g} TFLOPS", "mfu": "MFU {:.1%}"}
"""Fields of the rates of a step, each with its words; `offload.metrics.flops` defines them."""


def median_rates(steps: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Returns the median of each rate, None if no step has it."""
    columns = {name: column(steps, name) for name in _RATES}
    return {name: statistics.median(values) if values else None for name, values in columns.items()}


def rate_words(rates: Mapping[str, Any]) -> str:
    """Returns the rates among `rates` for people; empty without any."""
    return ", ".join(text.format(rates[name]) for name, text in _RATES.items() if is_number(rates.get(name)))
