"""The rows of `offload bench train` as cells of a table, as Markdown, and as a chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from offload.bench import output
from offload.bench.drive import Rates
from offload.bench.train.figures import LOSS_BOUNDS, PHASES, Row
from offload.bench.train.plan import Plan
from offload.sizes import count_of, format_size

TITLES = (
    "",
    "s/step",
    "range",
    *PHASES,
    "tokens/s",
    "peak RSS",
    "read",
    "written",
    "over plain",
    "bound s",
    "of bound",
    "losses",
)
"""Heads of the columns."""

_INK = "#7a7a7a"
"""Colour of text and lines that is readable on white and on dark grey."""


def cells(row: Row) -> list[str]:
    """Returns the cells of a row that has figures, one for each of `TITLES`."""
    losses = "" if row.loss_difference is None else f"{row.loss_difference:.0e}" if row.loss_difference else "equal"
    if row.same_losses is False:
        losses = f"DIFFER: {losses}"
    return [
        row.name,
        _number(row.step_seconds, ".3f"),
        f"{_number(row.least_seconds, '.3f')}-{_number(row.most_seconds, '.3f')}",
        *(_number(getattr(row, f"{phase}_seconds"), ".3f") for phase in PHASES),
        _number(row.tokens_per_second, ".0f"),
        *("" if each is None else format_size(each) for each in (row.peak_host_bytes, row.read_bytes)),
        "" if row.written_bytes is None else format_size(row.written_bytes),
        *(_number(each, ".2f") for each in (row.over_plain, row.bound_seconds, row.of_bound)),
        losses,
    ]


def heading(plan: Plan, rates: Rates) -> list[str]:
    """Returns the lines above the table."""
    micro = f"{count_of(plan.micro_batches, 'micro-batch', 'micro-batches')} of {plan.batch_size} x {plan.seq_len}"
    return [
        f"{plan.model} in {plan.dtype} on {plan.device}: {micro} tokens, {count_of(plan.threads, 'thread')}; medians "
        f"of {count_of(plan.rounds, 'round')} of {count_of(plan.steps, 'step')}",
        f"the drive alone reads {rates.read / 1e9:.2f}, writes {rates.write / 1e9:.2f}, both at once "
        f"{rates.mixed / 1e9:.2f} GB/s; a bound is the larger of the step of plain PyTorch and of a row's bytes over "
        "these rates",
    ]


def remarks(rows: Sequence[Row], dtype: str) -> list[str]:
    """Returns a line for each contender that did not train, and for each whose losses differ from plain PyTorch's."""
    lines = []
    for row in rows:
        if row.refused is not None:
            after = f" after {count_of(row.turns, 'round')}" if row.turns else ""
            lines.append(f"{row.name}{after}: {row.refused}")
        if row.same_losses is False:
            lines.append(
                f"{row.name}: its losses differ from those of plain PyTorch by up to {row.loss_difference:.1%}; "
                f"roundings of {dtype} explain {LOSS_BOUNDS[dtype]:.2%}"
            )
    return lines


def markdown(plan: Plan, rates: Rates, rows: Sequence[Row]) -> str:
    """Returns heading, table and remarks as Markdown."""
    table = [TITLES, ["---"] * len(TITLES), *(cells(row) for row in rows if row.turns)]
    lines = [*(f"{line}.  " for line in heading(plan, rates)), ""]
    lines += ["| " + " | ".join(each) + " |" for each in table]
    said = remarks(rows, plan.dtype)
    return "\n".join([*lines, *([""] if said else []), *(f"* {line}" for line in said)])


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draws the seconds of each contender's step with their range, and its bound as a line across the bar.

    The background is transparent, and the text readable on a light and on a dark one.

    Args:
        rows: the rows; those without figures are left out.
        path: a PNG, SVG or PDF file.
    """
    pyplot = output.pyplot()
    drawn = [row for row in rows if row.step_seconds is not None]  # the table names the others
    figure, axis = pyplot.subplots(figsize=(8, 1.4 + 0.36 * len(drawn)))
    for place, row in enumerate(drawn):
        color = "tab:blue" if row.name.startswith("offload") else "#a0a0a0"
        axis.barh(place, row.step_seconds, color=color)
        axis.hlines(place, row.least_seconds, row.most_seconds, color=_INK, linewidth=1)
        if row.bound_seconds is not None:
            # Each contender moves other bytes, so each has a bound of its own.
            axis.vlines(row.bound_seconds, place - 0.45, place + 0.45, color="tab:orange", linewidth=2.5)
        axis.annotate(
            f"{row.step_seconds:.2f}",
            (max(row.most_seconds or 0.0, row.bound_seconds or 0.0), place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=_INK,
            fontsize=8,
        )
    axis.set_yticks(range(len(drawn)), [row.name for row in drawn])
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.set_xlim(left=0)
    axis.set_xlabel("seconds a step; orange: the bound; thin lines: from the shortest step to the longest", color=_INK)
    axis.tick_params(colors=_INK)
    for spine in axis.spines.values():
        spine.set_color(_INK)
    figure.tight_layout()
    figure.savefig(path, dpi=120, transparent=True)
    pyplot.close(figure)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
