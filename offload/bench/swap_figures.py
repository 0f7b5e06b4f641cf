"""Figures and conclusions of `offload bench swap`. Pure functions.

A step is compared with three bounds: compute, the time of the same step in memory; the drive, the time to move the
step's bytes without compute; and the order of a step, which follows from both:

    forward    a unit's update must precede its use, so only the first forward hides the updates' I/O
    the rest   the compute after the first forward hides reads of weights, and nothing else
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from offload.bench.drive import Rates
from offload.bench.output import rounded
from offload.bench.swap_plan import BACKWARD, Plan
from offload.sizes import count_of, format_size

_NEAR = 0.05
"""Fraction of a bound within which a step counts as having reached the bound."""


class Turn(NamedTuple):
    """Consecutive steps. Bytes are those of one step."""

    seconds: tuple[float, ...]
    read_bytes: float
    written_bytes: float
    kernel_read_bytes: float | None
    """Bytes fetched from drives for this process according to /proc/self/io; None if unavailable."""
    kernel_written_bytes: float | None
    """Bytes sent to drives for this process according to /proc/self/io; None if unavailable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A step at one `compute_ms`: medians of all counted steps of all rounds; bytes are means."""

    compute_ms: float
    step_seconds: float
    compute_seconds: float
    """Seconds of the same step in memory or, if that was not measured, of its forwards and backwards."""
    io_seconds: float
    """Seconds in which the drives move the step's bytes without compute."""
    order_seconds: float
    """Lower bound of a step in which updates precede their use; see the module's docstring."""
    exposed_seconds: float
    """Seconds by which the step exceeds compute."""
    hidden_seconds: float
    hidden_percent: float | None
    """Hidden time in percent of `io_seconds`."""
    efficiency: float
    """The longer one of compute and I/O over the step: 1 if one hides the other completely."""
    read_bytes: float
    written_bytes: float
    bytes_per_parameter: float
    kernel_read_bytes: float | None
    kernel_written_bytes: float | None
    hiding_compute_ms: float | None
    """Least `compute_ms` at which the order of a step lets all I/O be hidden; None without overlap."""
    limit: str
    """The bound that determines the step: compute, drive, order, or budgets."""


class Result(NamedTuple):
    """All measurements."""

    file_bytes: int
    host_memory: int
    device_memory: int
    durable: bool
    notices: tuple[str, ...]
    """What the machine or the drive has refused, such as a backend of I/O."""
    rates: Rates
    rows: tuple[Row, ...]


# -- conclusions --------------------------------------------------------------------------------------


def make_row(
    plan: Plan, compute_ms: float, rates: Rates, swapped: Sequence[Turn], in_memory: Sequence[Turn] = ()
) -> Row:
    """Derives a row from measurements.

    Args:
        plan: the settings.
        compute_ms: milliseconds of one unit's forward.
        rates: bandwidth of the drives.
        swapped: turns of the model that is swapped.
        in_memory: turns of the same model in memory; if empty, compute is calculated.
    """
    step = _median_step(swapped)
    pure, forward = plan.pure_seconds(compute_ms), plan.forward_seconds(compute_ms)
    # The step in memory contains the optimizer, which the calculated time lacks.
    compute = max(_median_step(in_memory), pure) if in_memory else pure
    read = statistics.mean(turn.read_bytes for turn in swapped)
    written = statistics.mean(turn.written_bytes for turn in swapped)
    io = rates.seconds(read, written)
    # Reads of updates are known from the plan; the others are reads of weights for compute.
    updates_read = min(read, plan.update_read_bytes)
    updates = rates.seconds(updates_read, written)
    weights = (read - updates_read) / rates.read
    # Updates run during the first forward, or with overlap switched off before it.
    first = max(updates, forward) if plan.overlap else updates + forward
    order = max(first + max(compute - forward, weights), compute)
    exposed = max(step - compute, 0.0)
    hidden = min(max(io - exposed, 0.0), io)
    # Passes over the units after the first forward: the other forwards, and backwards that take `BACKWARD` forwards.
    passes_after = (1 + BACKWARD) * plan.accumulation - 1
    return Row(
        compute_ms=compute_ms,
        step_seconds=step,
        compute_seconds=compute,
        io_seconds=io,
        order_seconds=order,
        exposed_seconds=exposed,
        hidden_seconds=hidden,
        hidden_percent=100 * hidden / io if io else None,
        efficiency=max(compute, io) / step,
        read_bytes=read,
        written_bytes=written,
        bytes_per_parameter=(read + written) / plan.parameters,
        kernel_read_bytes=_mean_of_known([turn.kernel_read_bytes for turn in swapped]),
        kernel_written_bytes=_mean_of_known([turn.kernel_written_bytes for turn in swapped]),
        hiding_compute_ms=1e3 * max(updates, weights / passes_after) / plan.units if plan.overlap else None,
        limit=find_limit(step, compute, io, order),
    )


def find_limit(step: float, compute: float, io: float, order: float) -> str:
    """Returns the bound that determines a step: "compute", "drive", "order" or "budgets".

    Args:
        step: seconds of the step.
        compute: seconds of compute alone.
        io: seconds of I/O alone.
        order: the least seconds of a step whose updates precede their use.
    """
    if step <= compute * (1 + _NEAR):
        return "compute"
    # Well above every bound of drive and compute, only the budgets are left as a cause.
    if step > order * (1 + 4 * _NEAR):
        return "budgets"
    return "drive" if max(io, compute) == io and io >= order * (1 - _NEAR) else "order"


def _median_step(turns: Sequence[Turn]) -> float:
    """Returns the median seconds of all steps of all turns."""
    return statistics.median(seconds for turn in turns for seconds in turn.seconds)


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    """Returns the mean of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


# -- output -------------------------------------------------------------------------------------------


def as_json(machine: dict[str, Any], plan: Plan, result: Result) -> dict[str, Any]:
    """Returns the content that `--json` prints."""
    return {
        "machine": machine,
        "paths": list(plan.folders),
        "parameters": plan.parameters,
        "units": plan.units,
        "unit_bytes": plan.unit_bytes,
        "accumulation": plan.accumulation,
        "weights": plan.weights,
        "states": plan.states,
        "durability": "step" if result.durable else "none",
        "overlap": plan.overlap,
        "busy": plan.busy,
        "host_memory": result.host_memory,
        "device_memory": result.device_memory,
        "file_bytes": result.file_bytes,
        "notices": list(result.notices),
        "steps": plan.steps,
        "rounds": plan.rounds,
        "compute_measured": plan.in_memory,
        "drive": {
            f"{name}_gb_per_s": rounded(value / 1e9) for name, value in zip(Rates._fields, result.rates, strict=True)
        },
        "rows": [{key: rounded(value) for key, value in asdict(row).items()} for row in result.rows],
    }


def heading(plan: Plan, result: Result) -> list[str]:
    """Returns the lines above the table."""
    rates, row = result.rates, result.rows[0]
    counted = ""
    if row.kernel_read_bytes is not None and row.kernel_written_bytes is not None:
        counted = f" (the kernel counts {format_size(row.kernel_read_bytes)}, {format_size(row.kernel_written_bytes)})"
    return [
        *result.notices,
        f"{count_of(plan.units, 'unit')} of {format_size(plan.unit_bytes)}, {plan.parameters / 1e6:.0f} M parameters; "
        f"weights on {plan.weights}, states on {plan.states}",
        f"{format_size(result.file_bytes)} in files, durability {'step' if result.durable else 'none'}; host budget "
        f"{format_size(result.host_memory)}, device budget {format_size(result.device_memory)}",
        f"the drive alone reads {rates.read / 1e9:.1f}, writes {rates.write / 1e9:.1f}, both at once "
        f"{rates.mixed / 1e9:.1f} GB/s; a step reads {format_size(row.read_bytes)}, writes "
        f"{format_size(row.written_bytes)}{counted}",
        f"compute is {'that of the same model in memory' if plan.in_memory else 'calculated'}; seconds of a step:",
    ]


def in_words(plan: Plan, row: Row) -> str:
    """Returns a sentence about the limit of a step, and about a change that would lift it."""
    start = f"at {row.compute_ms:g} ms a unit"
    if row.limit == "compute":
        part = "all of" if row.exposed_seconds < 0.005 else f"all but {row.exposed_seconds:.2f} s of"
        return f"{start} compute limits: {part} the {row.io_seconds:.2f} s of I/O are hidden"
    # A row that has that time already was slower than the order of a step allows: it would say nothing true.
    hides = row.hiding_compute_ms is not None and row.hiding_compute_ms > row.compute_ms
    enough = f"; from about {row.hiding_compute_ms:.0f} ms on all could be hidden" if hides else ""
    compute, io, order = (f"{each:.2f} s" for each in (row.compute_seconds, row.io_seconds, row.order_seconds))
    if row.limit == "drive":
        return f"{start} the drive limits: {io} of I/O beside {compute} of compute{enough}"
    if row.limit == "order":
        forward = plan.forward_seconds(row.compute_ms)
        return (
            f"{start} the drive limits: updates must come before the weights are used, so only the first forward, "
            f"{forward:.2f} s, hides their I/O, and a step takes at least {order}{enough}"
        )
    return (
        f"{start} budgets limit: compute and drive would allow {order}, the step takes {row.step_seconds:.2f} s; try a "
        f"larger --host-memory (if this does not help, another process uses the cores)"
    )
