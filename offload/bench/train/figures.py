"""Figures and conclusions of `offload bench train`. Pure functions.

Each contender is compared with two numbers from the same run: the step of plain PyTorch, and a bound. The bound is the
larger of plain PyTorch's step and the time in which the drive alone moves the contender's bytes.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.bench.measure import DriveSpeeds, pyplot, row_json, save_figure
from offload.bench.train.loops import Result
from offload.bench.train.plan import PLAIN, TrainPlan
from offload.sizes import count_of, format_size

FORMAT = 1
"""Version of the JSON's keys."""

LOSS_BOUNDS = {"fp32": 1e-4, "bf16": 2e-2}
"""Largest relative difference from the losses of plain PyTorch that roundings explain.

A loss is computed through about a hundred successive roundings to the weights' dtype, and as many sums of some thousand
products in fp32. Roundings go up as often as down, so a hundred roundings add up to ten units: 2 % in bf16. Ten times
the square root of thousands of fp32 units is 5e-5.
"""

PHASES = ("forward", "backward", "update")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRow:
    """A contender: medians of all counted steps of all rounds, and the mean of bytes. None for unknown values."""

    name: str
    refused: str | None = None
    """The reason why the contender did not train, or the error of a later round."""
    turns: int = 0
    step_seconds: float | None = None
    least_seconds: float | None = None
    most_seconds: float | None = None
    forward_seconds: float | None = None
    """Phases are None where a GPU runs on after a call returns, or where micro-batches take turns."""
    backward_seconds: float | None = None
    update_seconds: float | None = None
    tokens_per_second: float | None = None
    seconds_to_first_step: float | None = None
    peak_host_bytes: int | None = None
    """Largest peak of resident memory (VmHWM) of a turn's process."""
    peak_device_bytes: int | None = None
    read_bytes: float | None = None
    """Bytes of a step, read from files."""
    written_bytes: float | None = None
    over_plain: float | None = None
    """The step divided by plain PyTorch's step, as the median of the rounds."""
    bound_seconds: float | None = None
    of_bound: float | None = None
    """The bound divided by the step: 1 if the step reaches the bound."""
    losses: tuple[float, ...] = ()
    """Losses of the first turn, from the first step on."""
    loss_difference: float | None = None
    """Largest relative difference from the losses of plain PyTorch, over all steps and rounds."""
    same_losses: bool | None = None
    """True if the difference is within the bound for the dtype."""


def make_rows(plan: TrainPlan, result: Result) -> list[TrainRow]:
    """Returns a row for each contender, in the order of their turns."""
    plain = result.turns.get(PLAIN, [])
    return [_row(plan, name, turns, plain, result) for name, turns in result.turns.items()]


def _row(
    plan: TrainPlan, name: str, turns: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]], result: Result
) -> TrainRow:
    refused = result.refused.get(name)
    if not turns:
        return TrainRow(name=name, refused=refused)
    seconds = [seconds_of_step for turn in turns for seconds_of_step in turn["seconds"]]
    step = statistics.median(seconds)
    moved = [_mean(turns, f"{way}_bytes") for way in ("read", "written")]
    # Plain PyTorch moves nothing, so its step is the compute.
    bound = _bound(result.rates, plain, moved)
    difference = loss_difference(turns, plain)
    return TrainRow(
        name=name,
        refused=refused,
        turns=len(turns),
        step_seconds=step,
        least_seconds=min(seconds),
        most_seconds=max(seconds),
        **{f"{phase}_seconds": _median(turns, f"{phase}_seconds") for phase in PHASES},
        tokens_per_second=plan.tokens / step,
        seconds_to_first_step=statistics.median(turn["seconds_to_first_step"] for turn in turns),
        peak_host_bytes=max(turn["peak_host_bytes"] for turn in turns),
        peak_device_bytes=max((turn["peak_device_bytes"] for turn in turns if turn["peak_device_bytes"]), default=None),
        read_bytes=moved[0],
        written_bytes=moved[1],
        over_plain=_over(turns, plain),
        bound_seconds=bound,
        of_bound=None if bound is None else bound / step,
        losses=tuple(turns[0]["losses"]),
        loss_difference=difference,
        same_losses=None if difference is None else difference <= LOSS_BOUNDS[plan.dtype],
    )


def loss_difference(turns: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the largest relative difference between the losses of two contenders; infinite for losses that are NaN.

    Without losses to compare with, there is none.
    """
    if not plain:
        return None
    expected: list[float] = plain[0]["losses"]
    differences = [
        abs(mine - theirs) / abs(theirs)
        for turn in turns
        for mine, theirs in zip(turn["losses"], expected, strict=True)
    ]
    # A comparison with NaN is false, so `max` would ignore NaN.
    return max(difference if difference == difference else float("inf") for difference in differences)


def _over(turns: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the median over the rounds of the median step of a turn over that of plain PyTorch in the same round."""
    if not plain:
        return None
    # A contender that fails takes no further turns, so turn n belongs to round n.
    ratios: list[float] = [
        statistics.median(mine["seconds"]) / statistics.median(theirs["seconds"])
        for mine, theirs in zip(turns, plain, strict=False)
    ]
    return statistics.median(ratios)


def _bound(rates: DriveSpeeds, plain: Sequence[Mapping[str, Any]], moved: Sequence[float | None]) -> float | None:
    """Returns the larger of plain PyTorch's step and the drive's seconds for the bytes of a step."""
    if not plain:
        return None
    compute: float = statistics.median(seconds_of_step for turn in plain for seconds_of_step in turn["seconds"])
    read, written = (nbytes or 0.0 for nbytes in moved)
    return max(compute, rates.seconds(read, written))


def _median(turns: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values: list[float] = [value for turn in turns for value in turn[key] if value is not None]
    return statistics.median(values) if values else None


def _mean(turns: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values: list[float] = [turn[key] for turn in turns if turn[key] is not None]
    return statistics.mean(values) if values else None


def as_json(machine: Mapping[str, Any], plan: TrainPlan, result: Result) -> dict[str, Any]:
    """Returns the content that `--json` prints."""
    of_a_step = ("batch_size", "seq_len", "micro_batches", "dtype", "recompute")
    names = ("model", "device", *of_a_step, "gpu_memory", "rounds", "steps", "threads")
    return {
        "benchmark": "train",
        "format": FORMAT,
        "machine": machine,
        **{name: getattr(plan, name) for name in names},
        "tokens": plan.tokens,
        "parameters": next((turn["parameters"] for turns in result.turns.values() for turn in turns), None),
        "drive": result.rates.as_json(),
        "loss_bound": LOSS_BOUNDS[plan.dtype],
        "rows": [row_json(row) for row in make_rows(plan, result)],
    }


# -- output --------------------------------------------------------------------------------------------
#
# The rows of `offload bench train` as cells of a table, as Markdown, and as a chart.


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


def cells(row: TrainRow) -> list[str]:
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
        *("" if nbytes is None else format_size(nbytes) for nbytes in (row.peak_host_bytes, row.read_bytes)),
        "" if row.written_bytes is None else format_size(row.written_bytes),
        *(_number(figure, ".2f") for figure in (row.over_plain, row.bound_seconds, row.of_bound)),
        losses,
    ]


def heading(plan: TrainPlan, rates: DriveSpeeds) -> list[str]:
    """Returns the lines above the table."""
    micro = f"{count_of(plan.micro_batches, 'micro-batch', 'micro-batches')} of {plan.batch_size} x {plan.seq_len}"
    again = ", activations computed again" if plan.recompute else ""
    within = f" in {format_size(plan.gpu_memory)} but for {PLAIN}" if plan.gpu_memory is not None else ""
    return [
        f"{plan.model} in {plan.dtype} on {plan.device}{within}: {micro} tokens{again}, "
        f"{count_of(plan.threads, 'thread')}; medians of {count_of(plan.rounds, 'round')} of "
        f"{count_of(plan.steps, 'step')}",
        f"the drive alone reads {rates.read / 1e9:.2f}, writes {rates.write / 1e9:.2f}, both at once "
        f"{rates.mixed / 1e9:.2f} GB/s; a bound is the larger of the step of plain PyTorch and of a row's bytes over "
        "these rates",
    ]


def remarks(rows: Sequence[TrainRow], dtype: str) -> list[str]:
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


def plot(rows: Sequence[TrainRow], path: Path) -> None:
    """Draws the seconds of each contender's step with their range, and its bound as a line across the bar.

    The background is transparent, and the text readable on a light and on a dark one.
    """
    drawn = [row for row in rows if row.step_seconds is not None]  # the table names the others
    figure, axis = pyplot().subplots(figsize=(8, 1.4 + 0.36 * len(drawn)))
    for place, row in enumerate(drawn):
        color = "tab:blue" if row.name.startswith("offload") else "#a0a0a0"
        axis.barh(place, row.step_seconds, color=color)
        axis.hlines(place, row.least_seconds, row.most_seconds, color=_INK, linewidth=1)
        if row.bound_seconds is not None:
            # Contenders move different numbers of bytes, so each has its own bound.
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
    save_figure(figure, path, transparent=True)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
