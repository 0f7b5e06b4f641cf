"""The content of the report page for `templates/page.html`, section by section.

The page is one self-contained file and loads nothing from a network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from markupsafe import Markup

from offload.prices import dollars
from offload.report import links as links_of
from offload.report.charts import (
    POINTS,
    Series,
    bytes_unit,
    decimal_unit,
    format_number,
    lines,
    rate_unit,
    render,
    seconds_unit,
    stack,
)
from offload.report.figures import budget_words, early_words, time_of, words
from offload.report.links import LINKS
from offload.report.log import Log, number, rate_words
from offload.report.phases import PARTS, parts, verdict
from offload.report.timeline_view import Window, rows
from offload.sizes import count_of, format_decimal, format_time

BEGIN = '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="generator" content="offload report">'
"""Start of every page. `offload report` overwrites an existing file only if the file starts with these bytes."""

# Layers are stacked in this order. `timeline_view.COLORS` uses the same colours for the same kinds of work.
_COLORS = {
    "compute": "--blue",
    "optimizer": "--green",
    "reads": "--orange",
    "writes": "--magenta",
    "memory": "--violet",
    "uploads": "--yellow",
    "loop": "--gray",
}


_LEGEND = {"compute": "compute", "loop": "loader and your loop"}


class Tile(NamedTuple):
    """A number at the top of the page."""

    name: str
    value: str
    more: str


class TableRow(NamedTuple):
    """A row of a table. `color` is a CSS variable; if set, the first cell begins with a mark of that colour."""

    cells: tuple[str, ...]
    color: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of a section."""

    head: tuple[str, ...]
    rows: tuple[TableRow, ...]


PageBlock = Markup | Table


class Section(NamedTuple):
    """Charts and tables below a heading; an empty section is left out."""

    name: str
    blocks: Sequence[PageBlock]


def page(log: Log, figures: Mapping[str, Any], window: Window | None) -> str:
    """Returns the HTML document."""
    predicted = Table(
        head=("", "predicted", "measured", "difference"),
        rows=(
            *(TableRow((row["what"], *words(row))) for row in figures["predicted"]),
            *([TableRow((figures["predicted_rates"], "", "", ""))] if figures["predicted_rates"] else ()),
        ),
    )
    sections = [
        Section("Learning", _learning(log)),
        Section("Where the time goes", _time(log, figures)),
        Section("Predicted and measured", [predicted] if predicted.rows else []),
        Section("Bytes", _moved(log)),
        Section("Memory and drives", [*_memory(log, figures), *_drives(log, figures)]),
        Section("One step in detail", [] if window is None else _window(window)),
    ]
    run = figures["about"].get("run")
    document = render(
        "page.html",
        begin=Markup(BEGIN),
        title=f"Run {run}" if isinstance(run, str) else "A run",
        subtitle=_subtitle(figures),
        verdict=verdict(figures),
        tiles=_tiles(figures),
        steps_a_point=f"{figures['steps'] / POINTS:,.0f}" if figures["steps"] > POINTS else "",
        # Charts without values are empty markup and are left out here.
        sections=[Section(name, [block for block in blocks if block]) for name, blocks in sections],
        notes=" ".join(_notes(figures)),
    )
    return f"{document}\n"


def _subtitle(figures: Mapping[str, Any]) -> str:
    about, facts = figures["about"], []
    if about.get("model"):
        facts.append(f"{about['model']}")
    if isinstance(about.get("parameters"), int):
        facts.append(count_of(about["parameters"], "parameter"))
    facts += [str(about[name]) for name in ("dtype", "device") if about.get(name)]
    for name, title in (("moments", "moments"), ("master", "masters")):
        if about.get(name) not in (None, "fp32"):
            facts.append(f"{title} in {about[name]}")
    # The facts come from a file, so any type may occur.
    if isinstance(about.get("ranks"), int) and about["ranks"] > 1:
        facts.append(f"{about['ranks']} ranks")
    facts.append(f"log {figures['log']}")
    return ", ".join(facts)


def _tiles(figures: Mapping[str, Any]) -> list[Tile]:
    step = figures["step_seconds"]
    tiles = [
        Tile(
            "steps",
            f"{figures['first_step']:,} to {figures['last_step']:,}",
            format_time(figures["seconds"]) + " in all",
        )
    ]
    for title, loss in (("loss", figures["loss"]), ("evaluation loss", figures["eval_loss"])):
        if loss is not None:
            more = f"from {format_number(loss['first'])}, least {format_number(loss['least'])}"
            tiles.append(Tile(title, format_number(loss["last"]), more))
    if step is not None:
        unit = seconds_unit(step["median"])
        slow = f"95 % below {format_number(step['p95'] / unit.size)} {unit.name}"
        tiles.append(Tile("median step", f"{format_number(step['median'] / unit.size)} {unit.name}", slow))
    for name in ("tokens", "samples"):
        # Logs of `offload train` contain tokens; those of other loops only samples.
        if figures[f"{name}_per_second"]:
            tiles.append(Tile("speed", f"{figures[f'{name}_per_second']:,.4g} {name}/s", rate_words(figures)))
            break
    if figures["drives"]:
        total = sum(drive["so_far_bytes"] for drive in figures["drives"])
        # The worst drive counts: it fails first.
        shares = [drive["share"] for drive in figures["drives"] if drive["share"] is not None]
        more = f"{max(shares):.2%} of rated life at the end" if shares else "drive_tbw is not set"
        more = "; ".join((more, *budget_words(figures)))
        tiles.append(Tile("written to drives", format_decimal(total), more))
    if (spent := figures["cost"]) is not None:
        parts = ", ".join(f"{name} {dollars(value)}" for name, value in spent["parts_dollars"].items())
        tiles.append(Tile("cost", dollars(spent["dollars"]), parts))
    return tiles


# -- sections -----------------------------------------------------------------------------------------


def _steps(log: Log) -> list[int]:
    return [values["step"] for values in log.steps]


def _series(log: Log, name: str, color: str, field: str, over: str | None = None) -> Series:
    """Returns a field of each step as a series.

    `over` is the key of a divisor, such as "seconds" for a rate.
    """
    points: list[float | None] = []
    for step in log.steps:
        value, divisor = number(step, field), 1.0 if over is None else number(step, over)
        points.append(value / divisor if value is not None and divisor else None)
    return Series(name, color, points)


def _chart(log: Log, title: str, *series: Series, **options: Any) -> Markup:
    """Returns a chart of lines over the steps of the log; `options` are those of `lines`."""
    return lines(title, _steps(log), series, resumed=log.resumed, **options)


def _learning(log: Log) -> list[PageBlock]:
    losses = (_series(log, "training", "--blue", "loss"), _series(log, "evaluation", "--orange", "eval_loss"))
    return [
        _chart(log, "Loss", *losses, zero=False),
        _chart(log, "Learning rate", _series(log, "learning rate", "--blue", "lr")),
        _chart(log, "Norm of the gradient before the clip", _series(log, "norm", "--blue", "grad_norm")),
        _chart(log, "Loss scale", _series(log, "scale", "--blue", "loss_scale")),
    ]


def _time(log: Log, figures: Mapping[str, Any]) -> list[PageBlock]:
    steps = _steps(log)
    phases = [parts(values) for values in log.steps]
    # A stack needs all phases of a step: steps without measurements give empty columns.
    layers = [
        Series(_LEGEND.get(name, f"waits: {name}"), color, [row.get(name, 0.0) if row else None for row in phases])
        for name, color in _COLORS.items()
    ]
    whole = _chart(log, "Complete step", _series(log, "step", "--blue", "seconds"), unit=seconds_unit)
    parted = stack("Parts of a step", steps, layers, seconds_unit, log.resumed)
    worker = [
        _series(log, "kernels", "--green", "update_kernels_seconds"),
        _series(log, "waits for reads", "--orange", "update_waits_for_reads_seconds"),
        _series(log, "waits for writes", "--magenta", "update_waits_for_writes_seconds"),
        _series(log, "copies", "--yellow", "update_copies_seconds"),
    ]
    beside = stack(
        "Update worker, beside the model",
        steps,
        worker,
        seconds_unit,
        log.resumed,
        "The worker costs time only while the model waits for it.",
    )
    return [_parts_table(figures), parted, whole, _speed(log, figures), beside]


def _speed(log: Log, figures: Mapping[str, Any]) -> PageBlock:
    """Returns the chart of tokens a second, or of samples a second for a log without tokens; empty without both."""
    tokens = _series(log, "tokens", "--green", "tokens", "seconds")
    if any(value is not None for value in tokens.values):
        return _chart(log, "Tokens a second", tokens)
    size = figures["about"].get("samples_a_step")
    if not isinstance(size, int):
        return Markup()
    seconds = [number(values, "seconds") for values in log.steps]
    samples = Series("samples", "--green", [size / step_seconds if step_seconds else None for step_seconds in seconds])
    return _chart(log, "Samples a second", samples)


def _parts_table(figures: Mapping[str, Any]) -> PageBlock:
    """Returns the table of a mean step's phases; empty if the log lacks them."""
    spent = figures["step_parts_seconds"]
    if not spent:
        return Markup()
    whole = sum(spent.values())
    unit = seconds_unit(whole)
    whole = whole or 1.0  # steps that took no time: each phase is 0 % of them
    rows = tuple(
        TableRow(
            (PARTS[name], f"{format_number(spent[name] / unit.size)} {unit.name}", f"{spent[name] / whole:.1%}"),
            _COLORS[name],
        )
        for name in sorted(spent, key=lambda phase: -spent[phase])
    )
    head = ("a mean step", "time", "share")
    return Table(head=head, rows=rows)


def _moved(log: Log) -> list[PageBlock]:
    ways = (("read", "--orange", "read_bytes"), ("written", "--magenta", "written_bytes"))
    device = (
        _series(log, "weights to the device", "--yellow", "uploaded_bytes"),
        _series(log, "gradients from the device", "--violet", "gradients_bytes"),
    )
    return [
        _chart(log, "Drives, a step", *(_series(log, *way) for way in ways), unit=bytes_unit),
        _chart(log, "Drives, over a step's time", *(_series(log, *way, "seconds") for way in ways), unit=rate_unit),
        _chart(log, "Device, a step", *device, unit=bytes_unit),
    ]


def _memory(log: Log, figures: Mapping[str, Any]) -> list[PageBlock]:
    about = figures["about"]
    ram = [("host budget", about["host_budget_bytes"])] if isinstance(about.get("host_budget_bytes"), int) else []
    host = _series(log, "RAM of the process", "--blue", "host_peak_bytes")
    device = _series(log, "allocated on the device", "--blue", "device_peak_bytes")
    note = "The peak so far. Besides the budget it includes Python, torch and, on a CPU, activations."
    return [
        _chart(log, "Peak of RAM", host, unit=bytes_unit, bounds=ram, note=note),
        _chart(log, "Peak of device memory", device, unit=bytes_unit),
    ]


def _drives(log: Log, figures: Mapping[str, Any]) -> list[PageBlock]:
    if not figures["drives"]:
        return []
    colors = ("--magenta", "--blue", "--green", "--orange", "--violet", "--yellow", "--gray")
    series = [
        Series(
            use["path"],
            colors[index % len(colors)],
            # A resumed run may have other drives, so a step need not contain each path.
            [(row.get("drives") or {}).get(use["path"]) for row in log.steps],
        )
        for index, use in enumerate(figures["drives"])
    ]
    chart = _chart(log, "Written in the life of the run", *series, unit=decimal_unit)
    head = ("drive", "written so far", "a step", "at the last step", "rated life", "used")
    # The chart comes first, so that it shares a row with the charts of memory.
    rows = []
    for drive in figures["drives"]:
        rated = "unknown: set drive_tbw" if drive["rated_bytes"] is None else format_decimal(drive["rated_bytes"])
        used = "unknown" if drive["share"] is None else f"{drive['share']:.2%}"
        known = [drive[key] for key in ("so_far_bytes", "step_bytes", "at_end_bytes")]
        sizes = ["unknown" if nbytes is None else format_decimal(nbytes) for nbytes in known]
        rows.append(TableRow((drive["path"], *sizes, rated, used)))
    return [chart, Table(head=head, rows=tuple(rows))]


def _window(window: Window) -> list[PageBlock]:
    # The window counts in microseconds, `Window.seconds` in seconds.
    took = window.end - window.start
    busy = tuple(
        TableRow((row, time_of(seconds), f"{seconds * 1e6 / took:.0%}")) for row, seconds in window.seconds().items()
    )
    shares = (window.spans, window.start, window.end)
    links = tuple(TableRow((LINKS[link], f"{share:.0%}")) for link, share in links_of.busy(*shares).items())
    under = tuple(
        TableRow((f"under the {phase}", f"{share:.0%}")) for phase, share in links_of.updates(*shares).items()
    )
    return [
        rows(window),
        Table(head=("busy with", "time", "share"), rows=busy),
        Table(head=("link", "busy"), rows=links),
        Table(head=("updates", "share of the step"), rows=under),
    ]


def _notes(figures: Mapping[str, Any]) -> list[str]:
    truncated_lines = count_of(figures["torn_lines"], "line of the log is", "lines of the log are")
    again = count_of(figures["repeated_steps"], "step was", "steps were")
    skipped = count_of(figures["skipped_steps"], "step was", "steps were")
    early = early_words(figures)
    return [
        "Times and medians leave out the first step of each process, which reads everything on demand.",
        *([f"Resumed at step {', '.join(map(str, figures['resumed_at']))}."] if figures["resumed_at"] else []),
        *([f"{truncated_lines} cut short."] if figures["torn_lines"] else []),
        *([f"{again} trained again; the later time counts."] if figures["repeated_steps"] else []),
        *([f"{skipped} skipped."] if figures["skipped_steps"] else []),
        *([f"Of updates under the backward, {early}."] if early else []),
    ]
