"""A plan as the object that `offload plan --json` prints. Every number is taken or derived from `Planned`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from offload.planner.activations.formulas import tile_tokens
from offload.planner.advice import Advice, Ordered
from offload.planner.rate import Rate
from offload.planner.reach import Reach
from offload.planner.recommend import Planned
from offload.planner.report.text import Asked, cautions, experts_of, hiding, inputs_of, rounded, run_seconds, years


def as_json(
    planned: Planned, advice: Advice, asked: Asked, reaches: Sequence[Reach] = (), orders: Sequence[Ordered] = ()
) -> dict[str, Any]:
    """Returns the object that `--json` prints, in bytes, seconds, and bytes or tokens per second.

    Args:
        planned: the plan.
        advice: what to change.
        asked: quantities for additional answers.
        reaches: the ways to keep activations, with the longest sequence and the largest micro-batch of each.
        orders: the plan's step in each order of micro-batches.
    """
    memory, shape = planned.memory, planned.shape
    return {
        "model": {"name": shape.name, "parameters": shape.parameters, "units": len(shape.layouts)},
        "machine": {
            "name": planned.hardware.name,
            "gpu_memory": planned.hardware.gpu_memory,
            "ram": planned.hardware.ram,
            "drives": [{"name": d.name, "read": d.read, "write": d.write} for d in planned.hardware.drives],
            "rates": [_rate_json(rate) for rate in planned.hardware.rates],
            "unified": planned.hardware.unified,
            "assumed": list(planned.hardware.assumptions),
            "measured": None if planned.hardware.measured is None else planned.hardware.measured._asdict(),
        },
        "config": dict(planned.content),
        "tiers": [row._asdict() for row in (*memory.rows, memory.total)],
        "slots": memory.slots,
        "notices": list(memory.notices),
        "cautions": cautions(planned, asked),
        "host_memory": memory.host,
        "least_host_memory": planned.least_host,
        "recommended_host_memory": advice.host,
        "device_memory": memory.device,
        "disk": memory.stored + memory.spilled,
        "export": planned.export,
        "activations": planned.activations,
        "activation_tiers": {**planned.needed._asdict(), "inputs": inputs_of(planned)},
        "ways": [
            {**each._asdict(), "way": each.way.words, "activations": each.way.tier, "seconds": rounded(each.seconds)}
            for each in reaches
        ],
        "orders": [_order_json(each) for each in orders],
        "host_peak": planned.host_peak,
        "step": _step_json(planned),
        "run_seconds": None if asked.tokens is None else rounded(run_seconds(planned, asked.tokens)),
        "drive_years": rounded(years(planned, asked)),
        # All changes; the text shows the best four only.
        "changes": [
            {"words": each.words, "option": each.option, "seconds": rounded(each.seconds), "gain": rounded(each.gain)}
            for each in advice.changes
        ],
    }


def _step_json(planned: Planned) -> dict[str, Any]:
    """Returns the work and the seconds of a step for `--json`."""
    timing, shape = planned.timing, planned.shape
    return {
        "batch": planned.load.batch,
        "sequence": shape.sequence,
        "accumulation": planned.load.accumulation,
        "schedule": planned.choice.schedule,
        "schedule_reason": planned.choice.reason,
        "updates_under_backward": len(timing.simulation.speculated),
        "miss_seconds": rounded(timing.miss_seconds),
        "recompute": planned.load.recompute,
        "chunked_loss": planned.load.chunked_loss,
        "tile_tokens": tile_tokens(shape, planned.load),
        "tokens": timing.tokens,
        "experts": experts_of(planned),
        "seconds": rounded(timing.seconds),
        "tokens_per_second": rounded(timing.tokens_per_second),
        # The keys of this object are public: `offload report --plan` reads them, see `report.prediction`.
        "parts_seconds": {name: rounded(value) for name, value in timing.parts.items()},
        "compute_seconds": rounded(timing.compute_seconds),
        "formula_seconds": rounded(timing.formula_seconds),
        "busy_seconds": {name: rounded(value) for name, value in timing.busy.items()},
        "waited_seconds": {name: rounded(value) for name, value in timing.waited._asdict().items()},
        "limit": timing.limit,
        "read_bytes": timing.moved.read,
        "written_bytes": timing.moved.written,
        "hiding_tokens": hiding(planned),
    }


def _rate_json(rate: Rate) -> dict[str, Any]:
    """Returns a rate for `--json`; work that takes no time has the rate None."""
    value = None if math.isinf(rate.value) else rounded(rate.value)
    return {"name": rate.name, "value": value, "unit": rate.unit, "origin": rate.origin, "source": rate.source}


def _order_json(each: Ordered) -> dict[str, Any]:
    """Returns an order for `--json`; a step that does not fit has no numbers."""
    order = {"schedule": each.schedule, "speculate": each.speculate}
    if each.planned is None:
        return {**order, "seconds": None}
    timing = each.planned.timing
    return {
        **order,
        "seconds": rounded(timing.seconds),
        "read_bytes": timing.moved.read,
        "written_bytes": timing.moved.written,
        "updates_under_backward": len(timing.simulation.speculated),
        "miss_seconds": rounded(timing.miss_seconds),
    }
