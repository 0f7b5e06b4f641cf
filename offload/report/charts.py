"""Charts as self-contained SVG: lines and stacks. Colours are variables of the page's CSS.

A chart takes numbers by step and shows them in one unit, which the title names. If there are more steps than points,
each point covers several steps: the mean, and for a line also the range as a band.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from offload.sizes import count_of

POINTS = 240
"""Most points that a chart shows."""
# Coordinates of the SVG's view box. The page scales charts, so these are not pixels.
_WIDTH, _HEIGHT = 400, 204
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 12, 10, 40

Values = Sequence[float | None]


class Series(NamedTuple):
    """A line, or a layer of a stack."""

    name: str
    color: str
    """Name of the CSS variable of the colour."""
    values: Values
    """One value per step; None if a step has none."""


class Unit(NamedTuple):
    """A unit of an axis: name, and size in seconds, bytes or other base units."""

    name: str
    size: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Point:
    """Values of consecutive steps that are drawn as one point."""

    first: int
    last: int
    mean: float | None
    least: float | None
    most: float | None


def seconds_unit(most: float) -> Unit:
    """Returns the unit for times up to `most` seconds."""
    return Unit("s") if most >= 1 else Unit("ms", 1e-3) if most >= 1e-3 else Unit("µs", 1e-6)


def bytes_unit(most: float) -> Unit:
    """Returns the binary unit for sizes up to `most` bytes."""
    power = min(int(math.log(most, 1024)), 5) if most >= 1024 else 0
    return Unit(("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")[power], 1024.0**power)


def decimal_unit(most: float) -> Unit:
    """Returns the decimal unit for sizes up to `most` bytes, as drives' endurance is rated."""
    named = (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6))
    return next((Unit(*unit) for unit in named if most >= unit[1]), Unit("kB", 1e3))


def rate_unit(most: float) -> Unit:
    """Returns the decimal unit for rates up to `most` bytes per second, as drives are sold."""
    return Unit("GB/s", 1e9) if most >= 1e9 else Unit("MB/s", 1e6) if most >= 1e6 else Unit("kB/s", 1e3)


def plain_unit(most: float) -> Unit:
    """Returns the unit of plain numbers, which has no name."""
    return Unit("")


def points(steps: Sequence[int], values: Values, most: int = POINTS) -> list[Point]:
    """Divides steps into at most `most` ranges of nearly equal length, each with mean and range of its values."""
    count = min(len(steps), most)
    points_found: list[Point] = []
    for index in range(count):
        start, end = index * len(steps) // count, (index + 1) * len(steps) // count
        some = [value for value in values[start:end] if value is not None]
        points_found.append(
            Point(
                first=steps[start],
                last=steps[end - 1],
                mean=sum(some) / len(some) if some else None,
                least=min(some, default=None),
                most=max(some, default=None),
            )
        )
    return points_found


_LEAST = 1e-300
"""Smallest magnitude that is not drawn as zero."""


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Returns at least two round numbers, from at most `low` to at least `high`; about `about` of them."""
    size = max(abs(low), abs(high), _LEAST)
    # A span within rounding error is one value.
    span = high - low if high - low > 1e-9 * size else size if size > _LEAST else 1.0
    # The step is the smallest of 1, 2, 2.5, 5 or 10 times a power of ten that gives at most `about` intervals.
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor * about >= span * 0.999)
    # The tolerance keeps a value on a tick from adding another tick by rounding.
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def format_number(value: float) -> str:
    """Returns a number as a text with four significant digits, or with five between 10,000 and 100,000."""
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    mantissa, _, power = f"{value:.3e}".partition("e")
    return f"{float(mantissa):g}e{int(power)}"


class _Axes:
    """A chart's frame with round numbers, and the mapping from values to coordinates."""

    def __init__(self, first: float, last: float, low: float, high: float) -> None:
        self.marks = ticks(low, high)
        self._first, self._last = first, last
        self._low, self._high = self.marks[0], self.marks[-1]

    def x(self, step: float) -> float:
        # A single step is drawn in the middle.
        share = 0.5 if self._last == self._first else (step - self._first) / (self._last - self._first)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self._low) / (self._high - self._low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def frame(self) -> str:
        """Returns the SVG of grid lines at round values, and below of step labels and the name of their axis."""
        parts = []
        for mark in self.marks:
            y = self.y(mark)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(
                f'<text class="tick" x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{format_number(mark)}</text>'
            )
        for mark in _steps(self._first, self._last):
            x = self.x(mark)
            # A label at the right end would be cut off, so its end is aligned instead of its middle.
            side = "end" if x > _WIDTH - _RIGHT - 20 else "middle"
            at = min(x + 8, _WIDTH) if side == "end" else x
            parts.append(f'<text class="tick" x="{at:.1f}" y="{_HEIGHT - 22}" text-anchor="{side}">{mark:,}</text>')
        # The axis of values is named by the title, which contains the unit.
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        parts.append(f'<text class="tick" x="{middle:.1f}" y="{_HEIGHT - 6}" text-anchor="middle">step</text>')
        return "".join(parts)

    def resumed(self, steps: Sequence[int]) -> str:
        """Returns the SVG of marks at steps where another process resumed the run."""
        parts = []
        for x in (self.x(step) for step in steps if self._first < step <= self._last):
            parts.append(
                f'<line class="resumed" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}">'
                f"<title>resumed here</title></line>"
            )
        return "".join(parts)


def _steps(first: float, last: float) -> list[int]:
    if last - first < 7:
        return list(range(math.ceil(first), math.floor(last) + 1))
    return [int(tick) for tick in ticks(first, last, 4) if first <= tick <= last and tick == int(tick)]


def lines(
    title: str,
    steps: Sequence[int],
    series: Sequence[Series],
    unit: Callable[[float], Unit] = plain_unit,
    zero: bool = True,
    resumed: Sequence[int] = (),
    bounds: Sequence[tuple[str, float]] = (),
    note: str = "",
) -> Markup:
    """Returns a chart of lines; empty if no series contains a value.

    Series and bounds are in base units; `unit` selects the shown unit. Without a `note`, the chart counts missing
    values.
    """
    drawn = [curve for curve in series if any(value is not None for value in curve.values)]
    if not drawn:
        return Markup()
    shown = [points(steps, curve.values) for curve in drawn]
    every = [value for row in shown for p in row for value in (p.least, p.most) if value is not None]
    # Bounds extend the axis, so that a budget far above the values is visible too.
    every += [value for _, value in bounds]
    low, high = (min(0.0, *every) if zero else min(every)), max(every)
    used = unit(max(abs(low), abs(high)))
    # Axes work in the shown unit, so that tick values are round in that unit.
    axes = _Axes(steps[0], steps[-1], low / used.size, high / used.size)
    body = [axes.frame(), axes.resumed(resumed)]
    for name, value in bounds:
        y = axes.y(value / used.size)
        body.append(f'<line class="bound" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        position = f'x="{_WIDTH - _RIGHT - 4}" y="{y - 4:.1f}" text-anchor="end"'
        body.append(f'<text class="tick label" {position}>{escape(name)}</text>')
    for curve, row in zip(drawn, shown, strict=True):
        body += _line(axes, curve, row, used)
    # JSON stores NaN and infinity of a loss as null, so such steps have no value.
    missing = sum(value is None for value in drawn[0].values)
    if missing and not note:
        note = f"no finite value in {missing:,} of {count_of(len(steps), 'step')}"
    rows = [
        [None if p.mean is None else format_number(p.mean / used.size) + _range(p, used) for p in row] for row in shown
    ]
    return _figure(title, used, drawn, "".join(body), axes, shown[0], rows, note)


def _range(point: Point, unit: Unit) -> str:
    if point.first == point.last or point.least is None or point.most is None:
        return ""
    return f" ({format_number(point.least / unit.size)} to {format_number(point.most / unit.size)})"


def _line(axes: _Axes, series: Series, row: Sequence[Point], unit: Unit) -> list[str]:
    style = f'style="--c: var({series.color})"'
    drawn: list[str] = []
    for run in _runs(row):
        at = [(axes.x((p.first + p.last) / 2), p) for p in run]
        if any(p.least != p.most for p in run):
            above = [f"{x:.1f},{axes.y((p.most or 0) / unit.size):.1f}" for x, p in at]
            below = [f"{x:.1f},{axes.y((p.least or 0) / unit.size):.1f}" for x, p in reversed(at)]
            drawn.append(f'<polygon class="band" {style} points="{" ".join([*above, *below])}"/>')
        spots = [f"{x:.1f},{axes.y((p.mean or 0) / unit.size):.1f}" for x, p in at]
        if len(spots) == 1:
            x, _, y = spots[0].partition(",")
            drawn.append(f'<circle class="dot" {style} cx="{x}" cy="{y}" r="3.5"/>')
        else:
            drawn.append(f'<polyline class="line" {style} points="{" ".join(spots)}"/>')
    return drawn


def _runs(row: Sequence[Point]) -> list[list[Point]]:
    runs: list[list[Point]] = [[]]
    for point in row:
        if point.mean is None:
            runs.append([])
        else:
            runs[-1].append(point)
    return [run for run in runs if run]


def stack(
    title: str,
    steps: Sequence[int],
    series: Sequence[Series],
    unit: Callable[[float], Unit],
    resumed: Sequence[int] = (),
    note: str = "",
) -> Markup:
    """Returns a chart of stacked columns; empty if no series contains a value other than 0.

    The layers come from the bottom up, in base units; None counts as 0.
    """
    drawn = [curve for curve in series if any(curve.values)]
    if not drawn:
        return Markup()
    shown = [points(steps, curve.values) for curve in drawn]
    tops = [sum(row[index].mean or 0.0 for row in shown) for index in range(len(shown[0]))]
    used = unit(max(tops))
    # Half a column more at either end gives the first and the last column room.
    half = (steps[-1] - steps[0] + 1) / len(shown[0]) / 2
    axes = _Axes(steps[0] - half, steps[-1] + half, 0.0, max(tops) / used.size)
    width = min((_WIDTH - _LEFT - _RIGHT) / len(shown[0]), 48.0)
    inner = _Columns(axes, shown[0], width)
    body = [axes.frame()]
    below = [0.0] * len(shown[0])
    for curve, row in zip(drawn, shown, strict=True):
        above = [under + (point.mean or 0.0) / used.size for under, point in zip(below, row, strict=True)]
        path = inner.path(below, above)
        body.append(f'<path class="area" style="--c: var({curve.color})" d="{path}"/>')
        below = above
    body.append(axes.resumed(resumed))
    rows = [[None if p.mean is None else format_number(p.mean / used.size) for p in row] for row in shown]
    return _figure(title, used, drawn, "".join(body), axes, shown[0], rows, note)


class _Columns:
    """Coordinates of a stack's columns, which stand side by side inside the frame."""

    def __init__(self, axes: _Axes, row: Sequence[Point], width: float) -> None:
        self._axes, self._half = axes, width / 2 * (0.86 if len(row) <= 60 else 1.0)
        self._middles = [axes.x((p.first + p.last) / 2) for p in row]

    def path(self, below: Sequence[float], above: Sequence[float]) -> str:
        """Returns the SVG path of one layer between two heights per column. A path per layer keeps the page small."""
        parts = []
        for middle, low, high in zip(self._middles, below, above, strict=True):
            if high > low:
                # Columns at the ends are clipped at the frame.
                left, right = max(middle - self._half, _LEFT), min(middle + self._half, _WIDTH - _RIGHT)
                top, bottom = self._axes.y(high), self._axes.y(low)
                parts.append(f"M{left:.1f} {bottom:.2f}V{top:.2f}H{right:.1f}V{bottom:.2f}z")
        return "".join(parts)


def _figure(
    title: str,
    unit: Unit,
    series: Sequence[Series],
    body: str,
    axes: _Axes,
    row: Sequence[Point],
    rows: Sequence[Sequence[str | None]],
    note: str,
) -> Markup:
    heading = f"{title}, {unit.name}" if unit.name else title
    about = {
        "x": [round(axes.x((p.first + p.last) / 2), 1) for p in row],
        "step": [f"step {p.first:,}" if p.first == p.last else f"steps {p.first:,} to {p.last:,}" for p in row],
        "names": [curve.name for curve in series],
        "rows": rows,
        "unit": unit.name,
    }
    cursor = f'<line class="cursor" x1="0" x2="0" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
    return render(
        "figure.html",
        wide=False,
        title=heading,
        label=f"{heading} by step",
        # The script of the page, templates/pointer.js, reads this attribute.
        numbers=json.dumps(about, separators=(",", ":")),
        series=series,
        width=_WIDTH,
        height=_HEIGHT,
        body=Markup(body + cursor),
        note=note,
    )


@functools.cache
def _templates() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=jinja2.select_autoescape(("html",)),
        undefined=jinja2.StrictUndefined,
    )


def render(name: str, **values: Any) -> Markup:
    """Returns the template `name` filled with `values`. Text is escaped; `Markup` is inserted unchanged."""
    return Markup(_templates().get_template(name).render(**values))
