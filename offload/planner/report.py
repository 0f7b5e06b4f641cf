"""A plan as text and as JSON. Every number is taken or derived from `Planned`; this module decides nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from offload.planner.activations.formulas import is_tiled, recomputed, tile_tokens
from offload.planner.published.rate import ORIGINS, Rate, sentences
from offload.planner.reach import Longest, Reach
from offload.planner.recommend import Advice, Planned
from offload.planner.step_time import Timing, hiding_tokens
from offload.sizes import format_count, format_size, format_time

YEAR = 365.25 * 24 * 3600
"""Seconds of a year."""
_NAMES = {
    "grad": "gradient",
    "exp_avg": "first moment",
    "exp_avg_sq": "second moment",
    "weights on their way": "weights in transit",
    "weights kept (cache)": "weights in the cache",
    "gradients on their way": "gradients in transit",
}


class Asked(NamedTuple):
    """Quantities for the additional answers that a user may ask for."""

    tokens: int | None = None
    """Tokens to train on."""
    endurance: int | None = None
    """Bytes that all drives together are rated to have written to them (TBW)."""


def as_json(planned: Planned, advice: Advice, asked: Asked, reaches: Sequence[Reach] = ()) -> dict[str, Any]:
    """Returns the object that `--json` prints, in bytes, seconds, and bytes or tokens per second.

    Args:
        planned: the plan.
        advice: what to change.
        asked: quantities for additional answers.
        reaches: the ways to keep activations, with the longest sequence and the largest micro-batch of each.
    """
    memory, timing, shape = planned.memory, planned.timing, planned.shape
    return {
        "model": {"name": shape.name, "parameters": shape.parameters, "units": len(shape.layouts)},
        "machine": {
            "name": planned.hardware.name,
            "gpu_memory": planned.hardware.gpu_memory,
            "ram": planned.hardware.ram,
            "drives": [{"name": d.name, "read": d.read, "write": d.write} for d in planned.hardware.drives],
            "rates": [_as_json(rate) for rate in planned.hardware.rates],
            "unified": planned.hardware.unified,
            "assumed": list(planned.hardware.assumptions),
            "measured": None if planned.hardware.measured is None else planned.hardware.measured._asdict(),
        },
        "config": dict(planned.content),
        "tiers": [row._asdict() for row in (*memory.rows, memory.total)],
        "slots": memory.slots,
        "notices": list(memory.notices),
        "host_memory": memory.host,
        "least_host_memory": memory.least_host,
        "recommended_host_memory": advice.host,
        "device_memory": memory.device,
        "disk": memory.stored + memory.spilled,
        "export": memory.export,
        "activations": planned.activations,
        "activation_tiers": {**planned.needed._asdict(), "inputs": _inputs(planned)},
        "ways": [
            {**each._asdict(), "way": each.way.words, "activations": each.way.tier, "seconds": _rounded(each.seconds)}
            for each in reaches
        ],
        "host_peak": planned.host_peak,
        "step": {
            "batch": planned.load.batch,
            "sequence": shape.sequence,
            "accumulation": planned.load.accumulation,
            "recompute": planned.load.recompute,
            "chunked_loss": planned.load.chunked_loss,
            "tile_tokens": tile_tokens(shape, planned.load),
            "tokens": timing.tokens,
            "seconds": _rounded(timing.seconds),
            "tokens_per_second": _rounded(timing.tokens_per_second),
            # The keys of this object are public: `offload report --plan` reads them, see `report.prediction`.
            "parts_seconds": {name: _rounded(value) for name, value in timing.parts.items()},
            "compute_seconds": _rounded(timing.compute_seconds),
            "formula_seconds": _rounded(timing.formula_seconds),
            "busy_seconds": {name: _rounded(value) for name, value in timing.busy.items()},
            "waited_seconds": {name: _rounded(value) for name, value in timing.waited._asdict().items()},
            "limit": timing.limit,
            "read_bytes": timing.moved.read,
            "written_bytes": timing.moved.written,
            "hiding_tokens": _hiding(planned),
        },
        "run_seconds": None if asked.tokens is None else _rounded(_run_seconds(planned, asked.tokens)),
        "drive_years": _rounded(years(planned, asked)),
        # All changes; the text shows the best four only.
        "changes": [
            {"words": each.words, "seconds": _rounded(each.seconds), "gain": _rounded(each.gain)}
            for each in advice.changes
        ],
    }


def in_short(planned: Planned) -> str:
    """Returns the prediction in one line, for the start of a run."""
    timing = planned.timing
    return (
        f"predicted: {_seconds(timing.seconds)} a step, {timing.tokens_per_second:,.0f} tokens/s, "
        f"{format_size(timing.moved.read)} read and {format_size(timing.moved.written)} written; "
        f"{_describe_limit(timing)}"
    )


def heading(planned: Planned) -> list[str]:
    """Returns the lines above the table of tiers."""
    shape, hardware, load = planned.shape, planned.hardware, planned.load
    drives = ", ".join(f"{d.name} ({d.read / 1e9:.1f}, {d.write / 1e9:.1f} GB/s)" for d in hardware.drives) or "none"
    device = "" if hardware.on_cpu or hardware.unified else f", {format_size(hardware.gpu_memory)} of GPU memory"
    shared = " that the GPU shares" if hardware.unified else ""
    zero = planned.memory.config.zero_optimization
    return [
        f"{shape.name}: {_count(shape.parameters)} parameters in {len(shape.layouts)} units",
        f"{hardware.name}{device}, {format_size(hardware.ram)} of RAM{shared}; drives: {drives}",
        f"weights on {zero.offload_param.device}, states on {zero.offload_optimizer.device}; a step is "
        f"{load.accumulation} x {load.batch} x {shape.sequence} tokens"
        f"{', activations recomputed' if load.recompute else ''}{', loss in chunks' if load.chunked_loss else ''}"
        f"{f', MLPs in tiles of {tile_tokens(shape, load)} tokens' if is_tiled(shape, load) else ''}",
        *planned.memory.notices,
    ]


def table(planned: Planned) -> list[tuple[str, ...]]:
    """Returns the plan's rows and their sums: name, device, host, disk."""
    return [
        (_NAMES.get(row.name, row.name), *(format_size(nbytes) if nbytes else "" for nbytes in row[1:]))
        for row in (*planned.memory.rows, planned.memory.total)
    ]


def lines(planned: Planned, advice: Advice, asked: Asked) -> list[str]:
    """Returns the lines below the table."""
    return [
        *_of_memory(planned, advice),
        *_of_time(planned),
        *_of_drives(planned, asked),
        *(["what to change first:"] if advice.changes else []),
        *(f"  {each.words}: {each.gain:.2f} times the tokens a second" for each in advice.changes[:4]),
        *_no_change(planned, advice),
        *_measured(planned),
        *_of_rates(planned),
        "assumed: " + "; ".join(planned.hardware.assumptions),
    ]


def _as_json(rate: Rate) -> dict[str, Any]:
    """Returns a rate for `--json`; work that takes no time has the rate None."""
    value = None if math.isinf(rate.value) else _rounded(rate.value)
    return {"name": rate.name, "value": value, "unit": rate.unit, "origin": rate.origin, "source": rate.source}


def _of_rates(planned: Planned) -> list[str]:
    """Returns a line of rates for each origin except "assumed"; none for an origin that no rate has."""
    of = {origin: sentences(planned.hardware.rates, origin) for origin in ORIGINS if origin != "assumed"}
    return [f"{origin}: {'; '.join(words)}" for origin, words in of.items() if words]


def _measured(planned: Planned) -> list[str]:
    """Returns a line on the timed model; none if the probe's rates apply."""
    found = planned.hardware.measured
    if found is None:
        return []
    return [
        f"measured: forward and backward of a micro-batch with {found.layers} of {found.of} layers, "
        f"{_seconds(found.seconds)}; by the probe's rates {_seconds(found.by_probe_seconds)}"
    ]


def _of_memory(planned: Planned, advice: Advice) -> list[str]:
    """Returns the lines on host budget, activations and disk."""
    memory = planned.memory
    # Two slots alternate between commits, so the last commit survives a kill at any time.
    slots = {0: "no swap files", 1: "one slot, no resume after a kill", 2: "two slots, every step durable"}
    least = format_size(memory.least_host)
    lines_found = [
        f"host budget {format_size(memory.host)}, minimum {least}, recommended {format_size(advice.host)}; peak above "
        f"the memory of the process before the run {format_size(planned.host_peak)}",
        f"activations {format_size(planned.activations)} beside {format_size(memory.device)} of device arena"
        f"{_describe_inputs(planned)}",
        f"disk {format_size(memory.stored + memory.spilled)} ({slots[memory.slots]}); an export takes "
        f"{format_size(memory.export)} more",
    ]
    free = [drive.free for drive in planned.hardware.drives]
    if free and all(each is not None for each in free) and memory.stored:
        # Free space is shown only if known for all drives, since files are spread over them.
        lines_found[-1] += f", {format_size(sum(each or 0 for each in free))} are free"
    return lines_found


def _inputs(planned: Planned) -> dict[str, int]:
    """Returns how many blocks' inputs wait in each tier for the backward; none if blocks keep all activations."""
    load, count = planned.load, len(recomputed(planned.shape, planned.load))
    return {"device": count - load.on_host - load.on_disk, "host": load.on_host, "disk": load.on_disk}


def _describe_inputs(planned: Planned) -> str:
    """Returns where the inputs of blocks wait, in words; nothing if blocks keep all activations."""
    counts, needed = _inputs(planned), planned.needed
    if not any(counts.values()):
        return ""
    beside = {"device": "on the device", "host": "in host memory", "disk": "on disk"}
    sizes = {"device": "", "host": f" ({format_size(needed.host)})", "disk": f" ({format_size(needed.disk)})"}
    parts = [f"{count} {beside[tier]}{sizes[tier]}" for tier, count in counts.items() if count]
    return f"; inputs of {sum(counts.values())} blocks: {', '.join(parts)}"


def reach_heading(planned: Planned) -> str:
    """Returns the line above the table of `reach_table`."""
    batch, sequence = planned.load.batch, planned.shape.sequence
    return (
        f"tokens of the longest sequence with {batch} in a micro-batch, with all logits in memory and with the loss in "
        f"chunks; sequences of {sequence:,} tokens in the largest micro-batch; the step beside that of the plan:"
    )


def reach_table(planned: Planned, reaches: Sequence[Reach]) -> list[tuple[str, ...]]:
    """Returns the rows on ways to keep activations: words, longest sequences, micro-batch, seconds relative to now."""
    now = planned.timing.seconds
    return [
        (
            each.way.words,
            _tokens(each.sequence),
            _tokens(each.sequence_chunked),
            f"{each.batch:,}" if each.batch else "none",
            "does not fit" if each.seconds is None else f"{each.seconds / now:.2f} x",
        )
        for each in reaches
    ]


def _tokens(count: int) -> str:
    return f"{count:,}" if count else "none"


def longest_json(found: Sequence[Longest]) -> dict[str, Any]:
    """Returns the object that `--longest-sequence --json` prints: for each way, lengths, needs and config."""
    return {"longest": [_longest_json(each) for each in found]}


def _longest_json(each: Longest) -> dict[str, Any]:
    """Returns the JSON object of one way."""
    way = {"way": each.way.words, "sequence": each.sequence, "sequence_chunked": each.sequence_chunked}
    if each.planned is None:
        return way
    planned, timing = each.planned, each.planned.timing
    return {
        **way,
        "chunked_loss": planned.load.chunked_loss,
        "activation_tiers": {**planned.needed._asdict(), "inputs": _inputs(planned)},
        "seconds": _rounded(timing.seconds),
        "tokens_per_second": _rounded(timing.tokens_per_second),
        "limit": timing.limit,
        "config": dict(planned.content),
    }


def longest_heading(found: Sequence[Longest]) -> str:
    """Returns the line above the table of `longest_table`."""
    batch = next((each.planned.load.batch for each in found if each.planned is not None), 1)
    return (
        f"tokens of the longest sequence with {batch} in a micro-batch, with all logits in memory and with the loss in "
        f"chunks; a step of the longer one:"
    )


def longest_table(found: Sequence[Longest]) -> list[tuple[str, ...]]:
    """Returns the rows of `--longest-sequence`: words, longest sequences, tiers, seconds, tokens per second."""
    return [_longest_row(each) for each in found]


def _longest_row(each: Longest) -> tuple[str, ...]:
    """Returns the row of one way."""
    start = (each.way.words, _tokens(each.sequence), _tokens(each.sequence_chunked))
    if each.planned is None:
        return (*start, "", "", "")
    timing, zero = each.planned.timing, each.planned.memory.config.zero_optimization
    tiers = f"{zero.offload_param.device}, {zero.offload_optimizer.device}"
    return (*start, tiers, _seconds(timing.seconds), f"{timing.tokens_per_second:,.0f}")


def longest_lines(found: Sequence[Longest]) -> list[str]:
    """Returns the lines below the table: what to set for the longest sequence, and a limit of the model."""
    plans = [each.planned for each in found if each.planned is not None]
    if not plans:
        return ["no sequence fits, with any tiers: the device has no room beside the weights in use"]
    best = max(plans, key=lambda planned: planned.shape.sequence)
    set_ = {name: best.content[name] for name in ("zero_optimization", "offload")}
    lines_found = [f"for {best.shape.sequence:,} tokens set: {json.dumps(set_)[1:-1]}"]
    if best.load.chunked_loss:
        lines_found.append("and compute the loss in chunks: offload.losses.chunk_loss_of(model) before initialize")
    positions = best.shape.positions
    if positions is not None and positions < best.shape.sequence:
        lines_found.append(f"the config of the model allows {positions:,} positions: more need another one")
    return [*lines_found, "assumed: attention keeps no matrix of tokens times tokens (FlashAttention)"]


def _of_time(planned: Planned) -> list[str]:
    """Returns the lines on the seconds of a step, its work and its waits."""
    timing = planned.timing
    busy = ", ".join(f"{name} {_seconds(value)}" for name, value in timing.busy.items() if value)
    waited = ", ".join(f"{name} {_seconds(value)}" for name, value in timing.waited._asdict().items() if value)
    lines_found = [
        f"a step takes {_seconds(timing.seconds)}, {timing.tokens_per_second:,.0f} tokens a second; "
        f"{_describe_limit(timing)}",
        f"  work: {busy}; waits: {waited or 'none'}; the lower bound by its order is "
        f"{_seconds(timing.formula_seconds)}",
    ]
    enough = _hiding(planned)
    have = planned.load.batch * planned.shape.sequence
    # The hint is of use only if a larger micro-batch can be reached.
    if not timing.hidden and enough is not None and enough > have:
        lines_found.append(
            f"  with {enough:,} tokens in a micro-batch ({have:,} now) all I/O could hide behind compute"
        )
    return lines_found


def _describe_limit(timing: Timing) -> str:
    """Returns the limiting resource and its fraction of the step, in words."""
    share = f"{timing.limit_seconds / timing.seconds:.0%} of the step"
    # The budget is no hardware, so its sentence differs.
    if timing.limit == "budget":
        return f"the host budget limits ({share}: units wait for free host memory)"
    return f"{timing.limit} limits ({share})"


def _of_drives(planned: Planned, asked: Asked) -> list[str]:
    """Returns the lines on bytes written, drive life and the length of the training."""
    timing, lines_found = planned.timing, []
    if timing.moved.written:
        # 86400 seconds: training day and night.
        daily = timing.moved.written / timing.seconds * 86400
        line = f"each step writes {format_size(timing.moved.written)}, {daily / 1e12:.1f} TB a day"
        life = years(planned, asked)
        if life is not None:
            line += (
                f": the drives reach their rated {(asked.endurance or 0) / 1e12:.0f} TB in {format_time(life * YEAR)}"
            )
        lines_found.append(line)
    if asked.tokens is not None:
        seconds = _run_seconds(planned, asked.tokens)
        steps = asked.tokens / timing.tokens
        lines_found.append(f"{format_count(asked.tokens)} tokens take {format_time(seconds)}, {steps:,.0f} steps")
    return lines_found


def _no_change(planned: Planned, advice: Advice) -> list[str]:
    """Returns a line that explains why there is no advice; none if there is some."""
    if advice.changes:
        return []
    if planned.timing.hidden:
        return ["nothing to change: compute limits"]
    return ["no change that was tried is more than 5 % faster"]


def _hiding(planned: Planned) -> int | None:
    return hiding_tokens(planned.memory, planned.shape, planned.hardware, planned.load)


def _run_seconds(planned: Planned, tokens: int) -> float:
    return tokens / planned.timing.tokens_per_second


def years(planned: Planned, asked: Asked) -> float | None:
    """Returns the years until the drives reach their rated writes; None if unknown or if nothing is written."""
    written = planned.timing.moved.written / planned.timing.seconds
    # Bytes over bytes per second are seconds.
    return None if asked.endurance is None or not written else asked.endurance / written / YEAR


def _count(number: int) -> str:
    """Returns a count in words; large ones have three digits."""
    named = (("billion", 1e9), ("million", 1e6))
    return next((f"{number / size:.3g} {name}" for name, size in named if number >= size), f"{number:,}")


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s" if value >= 0.1 else f"{value * 1e3:.1f} ms"


def _rounded(value: float | None) -> float | None:
    """Returns four significant digits: predictions have no more, and JSON stays readable."""
    return None if value is None else float(f"{value:.4g}")
