"""A drawing of one step of a timeline written by `--trace`, with rows of spans."""

from __future__ import annotations

import gzip
import statistics
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from markupsafe import Markup

from offload.errors import ConfigError
from offload.records import parse
from offload.report.charts import format_number, render, seconds_unit, ticks
from offload.report.links import BACKWARD, Interval, Span, phases, total, union
from offload.report.log import is_number, open_to_read, plain
from offload.sizes import MIB, format_size

COLORS = {
    "compute": "--blue",
    "waits": "--red",
    "ranks": "--violet",
    "uploads": "--yellow",
    "downloads": "--yellow",
    "reads": "--orange",
    "writes": "--magenta",
    "updates": "--green",
    "update worker": "--green",
    "commits": "--gray",
}
"""Rows of a timeline in the order in which they are shown, with their CSS variables."""
_MOST_BYTES = 128 * MIB
"""Most bytes of a timeline: twice the size of a timeline with the most events."""
_EARLY = "--violet"
"""CSS variable of updates that begin under a backward."""
_LANES = 6
"""Most lanes that are shown per row; overlapping spans occupy different lanes."""
_WIDTH, _LEFT, _LANE, _GAP = 1100, 104, 13, 7


@dataclass(frozen=True, kw_only=True)
class Window:
    """An interval of a timeline; `start` and `end` are in microseconds."""

    title: str
    start: float
    end: float
    spans: tuple[Span, ...]
    complete: bool
    """True if the file contains the complete run; False if recording stopped at the limit of events."""

    def seconds(self) -> dict[str, float]:
        """Returns the seconds in which each row had at least one span in progress."""
        # The union of intervals: spans of a row overlap if several are in flight.
        covered = {
            row: union(((s.start, s.end) for s in self.spans if s.row == row), self.start, self.end)
            for row in COLORS
            if any(s.row == row for s in self.spans)
        }
        return {row: total(intervals) / 1e6 for row, intervals in covered.items()}


def read_window(path: Path, within: Interval | None = None) -> Window:
    """Reads a timeline and returns the window `within`, in microseconds.

    Without `within`, the window is the step of median time, not counting the first two. If there is no other, it has
    all spans.
    """
    events = _events(path)
    # A process of the trace is a rank: the drawing shows the lowest one.
    first = min((event["pid"] for event in events if event.get("ph") == "X"), default=None)
    spans = [_span(event) for event in events if event.get("ph") == "X" and event["pid"] == first]
    if not spans:
        raise ConfigError(
            f"{path} contains no span: expected the file that `offload train --trace FILE` writes at its end"
        )
    complete = not any(event.get("ph") == "i" for event in events)
    start, end, title = _step(spans) if within is None else (*within, "a part of the run")
    # A window of zero length could not be scaled.
    end = max(end, start + 1)
    inside = tuple(span for span in spans if span.end > start and span.start < end)
    return Window(title=title, start=start, end=end, spans=inside, complete=complete)


def _events(path: Path) -> list[Mapping[str, Any]]:
    """Returns the events of a trace file, without spans of other programs."""
    try:
        with open(path, "rb", opener=open_to_read) as stored:
            # The size of a compressed file does not bound the size of its content.
            file: Any = gzip.open(stored) if path.suffix == ".gz" else stored
            data = file.read(1)
            data += file.read(_MOST_BYTES) if data == b"{" else b""
            if len(data) > _MOST_BYTES:
                raise ValueError(f"more than {format_size(_MOST_BYTES)}")
            events = parse(data)["traceEvents"]
            return [event for event in events if event.get("ph") != "X" or _is_ours(event)]
    except OSError as error:
        raise ConfigError(f"cannot read the timeline {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, RecursionError, zlib.error) as error:
        raise ConfigError(
            f"{path} is not a timeline: expected the JSON that `offload train --trace FILE` writes at its end, "
            f"got {type(error).__name__}: {error}"
        ) from error


def _is_ours(event: Mapping[str, Any]) -> bool:
    """Returns True if a span has the types that `--trace` writes; other programs write strings for some numbers."""
    return (
        all(type(event.get(key)) is int for key in ("pid", "tid"))
        and all(is_number(event.get(key)) for key in ("ts", "dur"))
        and all(isinstance(event.get(key), str) for key in ("cat", "name"))
    )


def _span(event: Mapping[str, Any]) -> Span:
    args, start = event.get("args"), float(event["ts"])
    nbytes = args.get("bytes", 0) if isinstance(args, Mapping) else 0
    return Span(
        row=event["cat"],
        # `timeline` numbers threads as 1000 * row + lane.
        lane=event["tid"] % 1000,
        name=plain(event["name"]),
        start=start,
        end=start + event["dur"],
        # A file may contain anything as "bytes"; the tooltip then leaves the size out.
        nbytes=int(nbytes) if is_number(nbytes) else 0,
    )


def _step(spans: Sequence[Span]) -> tuple[float, float, str]:
    """Returns start, end and name of the step of median time, from the end of one step to the end of the next.

    The first interval is left out, since the first steps read on demand. Without another one, all spans are the window.
    """
    ends = sorted((s.end, s.name) for s in spans if s.row == "compute" and s.name.startswith("step "))
    steady = [(before[0], after[0], after[1]) for before, after in pairwise(ends)][1:]
    if not steady:
        return min(s.start for s in spans), max(s.end for s in spans), "the complete run"
    # `median_low` is one of the values, so a step of exactly this duration exists.
    middle = statistics.median_low([end - start for start, end, _ in steady])
    return next(interval for interval in steady if interval[1] - interval[0] == middle)


def rows(window: Window) -> Markup:
    """Returns the window as a figure with a row per kind of work and spans drawn to scale."""
    used = seconds_unit((window.end - window.start) / 1e6)
    scale = (_WIDTH - _LEFT - 8) / (window.end - window.start or 1.0)
    backwards = [interval for phase, interval in phases(window.spans, window.start, window.end) if phase == BACKWARD]
    parts: list[str] = []
    y = 6
    for row, color in COLORS.items():
        # Rows are drawn in the order of `COLORS`; a row without spans takes no room.
        row_spans = [span for span in window.spans if span.row == row]
        lanes = sorted({span.lane for span in row_spans})
        if not row_spans:
            continue
        hidden = f" (+{len(lanes) - _LANES})" if len(lanes) > _LANES else ""
        parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{y + _LANE - 3}" text-anchor="end">{row}{hidden}</text>')
        for lane in lanes[:_LANES]:
            for span in _drawn([s for s in row_spans if s.lane == lane], 0.5 / scale):
                early = row == "updates" and any(first <= span.start < last for first, last in backwards)
                parts.append(_bar(span, window, scale, y, _EARLY if early else color, early))
            y += _LANE
        y += _GAP
    parts += _ruler(window, used.name, used.size * 1e6, scale, y)
    title = f"Timeline of {window.title}, {used.name}"
    return render(
        "figure.html",
        wide=True,
        title=title,
        label=title,
        numbers="",
        series=(),
        width=_WIDTH,
        height=y + 22,
        body=Markup("".join(parts)),
        note="Point at a span for its name, bytes and time. Spans that overlap are drawn below each other. Updates "
        "that begin under the backward are violet.",
    )


def _bar(span: Span, window: Window, scale: float, y: int, color: str, early: bool) -> str:
    left = _LEFT + max(span.start - window.start, 0) * scale
    right = _LEFT + min(span.end - window.start, window.end - window.start) * scale
    return (
        f'<rect class="span" style="--c: var({color})" x="{left:.2f}" y="{y}" '
        f'width="{max(right - left, 0.5):.2f}" height="{_LANE - 2}"><title>{_describe(span)}'
        f"{', begun under the backward' if early else ''}</title></rect>"
    )


def _drawn(spans: Sequence[Span], least: float) -> list[Span]:
    """Returns the spans to draw, with neighbours merged that are too small to be distinguished.

    `least` is the shortest visible duration, in microseconds.
    """
    drawn: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        last = drawn[-1] if drawn else None
        small = span.end - span.start < least
        # Thousands of tiny spans would make the page slow: neighbours become one, up to a visible length.
        if last is not None and small and last.end - last.start < 8 * least and span.start - last.end < least:
            names = last.name if last.name.endswith("…") or last.name == span.name else f"{last.name} …"
            drawn[-1] = replace(last, name=names, end=max(last.end, span.end), nbytes=last.nbytes + span.nbytes)
        else:
            drawn.append(span)
    return drawn


def _describe(span: Span) -> str:
    took = (span.end - span.start) / 1e6
    unit = seconds_unit(took)
    moved = f", {format_size(span.nbytes)}" if span.nbytes else ""
    return escape(f"{span.name}: {format_number(took / unit.size)} {unit.name}{moved}")


def _ruler(window: Window, unit: str, size: float, scale: float, y: float) -> list[str]:
    """Returns the SVG of grid lines at round times.

    `size` is the microseconds of the unit, `scale` the drawing units of a microsecond.
    """
    parts = []
    for mark in ticks(0, (window.end - window.start) / size, 6):
        x = _LEFT + mark * size * scale
        if x <= _WIDTH - 8:
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="2" y2="{y}"/>')
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{y + 15}" text-anchor="middle">{format_number(mark)}</text>'
            )
    return parts
