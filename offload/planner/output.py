"""A plan as text. Every number is taken or derived from `Planned`; this module decides nothing."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from offload.hardware.gpus import ORIGINS, sentences
from offload.layout.drive_budget import excess
from offload.layout.pass_order import LAYER_MAJOR, MICRO_BATCH_MAJOR
from offload.layout.placement import usable_host
from offload.planner.activations import beside_weights, is_tiled, recomputed, tile_tokens
from offload.planner.hardware import Hardware
from offload.planner.memory import Memory
from offload.planner.ranks import Cluster, RanksPlan, fastest
from offload.planner.reach import Longest, Reach
from offload.planner.recommend import Advice, Ordered, Planned, Priced, PricedChange, writes_less
from offload.planner.step_time import Timing, hiding_tokens
from offload.planner.sustained import SustainedSteps
from offload.prices import as_json as cost_json
from offload.prices import dollars, in_words
from offload.sizes import count_of, format_count, format_decimal, format_size, format_time, rounded
from offload.states import State

# -- text ----------------------------------------------------------------------------------------------


YEAR = 365.25 * 24 * 3600
"""Seconds of a year."""
_DAY = 24 * 3600
_WORN_IN = 10 * _DAY
"""A plan warns of drives that wear out within so many seconds of training."""
_SHARE_OF_LIFE = 0.1
"""Fraction of a drive's rated writes that a run of known length may take without a warning, as in `drive_share`."""
_TYPICAL_TBW = 1200e12
"""Rated writes of a usual 2 TB drive, if the ratings of the drives are unknown."""
_NAMES = {
    **{state.value: state.title for state in State},
    "tiles of the optimizer": "buffers of the optimizer",
    "weights on their way": "buffers of weights",
    "weights kept (cache)": "cache of weights",
    "gradients on their way": "buffers of gradients",
}
_SCHEDULES: dict[str, str] = {LAYER_MAJOR: "layer-major", MICRO_BATCH_MAJOR: "micro-batch-major"}


class Asked(NamedTuple):
    """Quantities for the additional answers that a user may ask for."""

    tokens: int | None = None
    """Tokens to train on."""
    endurance: int | None = None
    """Rated bytes written (TBW) of all drives together."""

    def rated(self, drives: int) -> float:
        """Returns the rated bytes written of so many drives together; those of usual drives if unknown."""
        return _TYPICAL_TBW * drives if self.endurance is None else self.endurance


def in_short(planned: Planned, sustained: SustainedSteps | None = None) -> str:
    """Returns the prediction in one line, for the start of a run."""
    timing = planned.timing
    rates = [] if sustained is None else [_sustained_words(sustained)]
    return (
        f"predicted: {seconds_text(timing.seconds)} a step, {timing.tokens_per_second:,.0f} tokens/s, "
        f"{format_size(timing.moved.read)} read and {format_size(timing.moved.written)} written; "
        f"{'; '.join([_describe_limit(timing), *rates, *planned.hardware.doubts[-1:]])}"
    )


_EXAMPLE_TOKENS = 10**8
"""Tokens of a training whose duration a plan shows if the user names no number."""
_LONG_LIFE = 365 * _DAY
"""A plan says how to write less if the drives wear out within so many seconds of training."""
_PLACES = {"none": "GPU", "cpu": "RAM", "nvme": "drive"}
"""Where states are, by the names of the config."""
_TIERS = {"device": "GPU", "host": "RAM", "disk": "drive"}
"""The same, by the names of tiers."""
_CHEAPER = 0.95
"""A change is named the cheapest if a token costs less than this fraction with it."""
_WIDTH, _LABEL, _BAR = 80, 8, 30
"""Columns of a line of the summary, of its label and of its bars."""


def wrapped(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Returns labels and words as lines of at most 80 columns."""
    return [
        line.rstrip()
        for label, words in rows
        for line in textwrap.wrap(f"{label:{_LABEL}}{words}", _WIDTH, subsequent_indent=_LABEL * " ")
    ]


def summary(
    planned: Planned,
    advice: Advice,
    asked: Asked,
    price: float | None = None,
    priced: Priced | None = None,
    sustained: SustainedSteps | None = None,
) -> list[tuple[str, str]]:
    """Returns a plan in about ten rows of a label and words, without the tables of `--details`.

    `price` is the machine's dollars an hour.
    """
    timing, hardware = planned.timing, planned.hardware
    tokens = asked.tokens or _EXAMPLE_TOKENS
    seconds = run_seconds(planned, tokens)
    cost = "" if price is None else f", ${price * seconds / 3600:,.0f} at ${price:g} an hour"
    zero = planned.memory.config.zero_optimization
    places = [_PLACES[device] for device in (zero.offload_param.device, zero.offload_optimizer.device)]
    if planned.memory.asked.spares_drives:
        placement = planned.memory.placement
        others = (state for state in planned.memory.mode.states if state is not State.WEIGHT)
        tiers = [placement.tiers_of(State.WEIGHT), placement.tiers_of(*others)]
        places = [" and ".join(_TIERS[tier] for tier in words.split(" and ")) if words else "GPU" for words in tiers]
    if hardware.on_cpu:
        places = ["RAM" if place == "GPU" else place for place in places]
    helps = advice.changes[0].sentence if advice.changes else "; ".join(_no_change(planned, advice))
    return [
        ("fits", f"{planned.shape.name} on {hardware.name}: weights on {places[0]}, states on {places[1]}"),
        *([("", "the whole training fits on the GPU: you do not need offload")] if fits_on_device(planned) else []),
        (
            "speed",
            f"{_rate(timing.tokens_per_second)} tokens/s; {format_count(tokens)} tokens take "
            f"{format_time(seconds)}{cost}",
        ),
        ("step", f"{_describe_step(planned)}, in {seconds_text(timing.seconds)}"),
        ("limit", _describe_limit(timing)),
        *([] if sustained is None else [("rates", _sustained_words(sustained))]),
        ("change", helps),
        *_of_wear(planned, asked),
        *_of_budget(planned),
        *([] if priced is None else [("cost", in_words(priced.cost)), ("", _cheapest(priced))]),
        *(("note", words) for words in cautions(planned, asked) if "worn out" not in words),
        *_bars(planned),
    ]


def _sustained_words(sustained: SustainedSteps) -> str:
    steps = ", ".join(f"{seconds_text(seconds)} {words}" for words, seconds in sustained.seconds.items())
    if sustained.measured:
        return f"a step takes {steps}"
    return f"burst rates, unverified{f'; a step takes {steps}' if steps else ''}"


def _cheapest(priced: Priced) -> str:
    if not priced.changes or priced.changes[0].share >= _CHEAPER:
        return "no change that was tried is more than 5 % cheaper"
    return f"cheapest change: {_priced_change(priced.changes[0])}"


def _priced_change(change: PricedChange) -> str:
    option = f" ({change.option})" if change.option else ""
    million = dollars(change.cost.a_million or 0.0)
    return f"{change.words}{option}: {change.share:.2f} times the dollars, {million} a million tokens"


def of_money(priced: Priced) -> list[str]:
    """Returns the lines of `--details` on dollars: the plan, all changes that were simulated, prices with sources."""
    prices = priced.prices._asdict()
    origins = [f"  {name} {prices[name]:g}: {source}" for name, source in priced.prices.sources.items()]
    return [
        in_words(priced.cost),
        "dollars of a token after one change, each simulated, the cheapest first:",
        *(f"  {_priced_change(change)}; {in_words(change.cost).partition('; ')[2]}" for change in priced.changes),
        "prices in US dollars:",
        *origins,
    ]


def fits_on_device(planned: Planned) -> bool:
    """Returns True if the GPU has room for the whole training, so that nothing moves between it and the host."""
    zero, needed = planned.memory.config.zero_optimization, planned.needed
    stay = zero.offload_param.device == zero.offload_optimizer.device == "none"
    return stay and not planned.hardware.on_cpu and not (needed.host or needed.disk or planned.memory.stored)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _of_wear(planned: Planned, asked: Asked) -> list[tuple[str, str]]:
    """Returns a line on what a training writes, and one on how to write less if the drives wear out within a year."""
    written = planned.timing.moved.written / planned.timing.seconds
    if not written:
        return []
    drives = max(len(planned.hardware.drives), 1)
    rated = asked.rated(drives)
    which = f"rated for {rated / drives / 1e12:.0f} TB" + (" (assumed)" if asked.endurance is None else "")
    one = f"a drive {which} lasts" if drives == 1 else f"{drives} drives {which} last"
    rows = [("wear", f"{format_decimal(_DAY * written)} a day; {one} {format_time(rated / written)}")]
    less = writes_less(planned) if rated / written < _LONG_LIFE else []
    if less:
        rows.append(("", "less: " + ", ".join(f"{option} writes {1 - share:.0%} less" for option, share in less)))
    return rows


def _of_budget(planned: Planned) -> list[tuple[str, str]]:
    """Returns a line on the drive budget: what a commit waits for, or when the budget ends; none without a budget."""
    memory, seconds = planned.memory, planned.timing.seconds
    budget, over = memory.budget, budget_excess(planned)
    if budget is None or not planned.hardware.drives:
        return []
    a_day = _DAY * planned.timing.moved.written / seconds / len(planned.hardware.drives)
    words = f"kept: {format_decimal(a_day)} a day to a drive"
    if over:
        a_day = _DAY * (budget.rate + over)
        words = (
            f"cannot be kept: {format_decimal(a_day)} a day, so the bytes of a period are spent after "
            f"{format_time(budget.nbytes * _DAY / a_day)}"
        )
    elif memory.config.offload.thins_commits and memory.commit_every == 1:
        words += "; each step is committed"
    elif memory.config.offload.thins_commits and memory.written.at_commit:
        words += (
            f"; a commit of {format_decimal(memory.written.at_commit)} every {count_of(memory.commit_every, 'step')}, "
            f"{format_time(memory.commit_every * seconds)}"
        )
    return [("budget", f"{budget.text} {words}")]


def budget_excess(planned: Planned) -> float:
    """Returns the bytes a second that a plan writes to a drive beyond its budget; 0 if it is kept, or there is none."""
    memory, seconds = planned.memory, planned.timing.seconds
    if memory.budget is None:
        return 0.0
    promised = None if memory.config.offload.thins_commits else max(memory.commit_every, 1) * seconds
    return excess(memory.budget, memory.written, seconds, promised)


def _bars(planned: Planned) -> list[tuple[str, str]]:
    """Returns a bar of used and free bytes for each tier."""
    memory, hardware, load = planned.memory, planned.hardware, planned.load
    on_device = memory.device + beside_weights(memory, planned.shape, load)
    tiers: list[tuple[str, int, int | None]] = []
    if hardware.unified:
        tiers.append(("memory", memory.host + on_device, hardware.gpu_memory))
    elif not hardware.on_cpu:
        tiers.append(("GPU", on_device, hardware.gpu_memory))
    if not hardware.unified:
        tiers.append(("RAM", planned.host_peak, hardware.ram))
    if drives := len(hardware.drives):
        used = memory.stored + memory.spilled + planned.needed.disk
        tiers.append(("drive" if drives == 1 else "drives", used, hardware.disk))
    return [(name, _bar(used, total)) for name, used, total in tiers]


def _bar(used: int, total: int | None) -> str:
    if total is None:
        return f"{'?' * _BAR}  {format_size(used)}" if used else f"{'.' * _BAR}  not used"
    # A tier that is used at all shows it.
    filled = min(_BAR, max(round(_BAR * used / total), bool(used))) if total else _BAR
    return f"{'#' * filled}{'.' * (_BAR - filled)}  {format_size(used)} of {format_size(total)}"


def cautions(planned: Planned, asked: Asked) -> list[str]:
    """Returns the warnings that come first: a disturbed probe, a drive that wears out, a run without resume."""
    warnings = list(planned.hardware.doubts[-1:])
    if planned.memory.slots == 1:
        warnings.append("no resume after a kill (durability none)")
    written = planned.timing.moved.written / planned.timing.seconds
    rated = asked.rated(max(len(planned.hardware.drives), 1))
    of_run = 0.0 if asked.tokens is None else run_seconds(planned, asked.tokens) * written
    short = asked.tokens is not None and of_run <= _SHARE_OF_LIFE * rated
    if written * _WORN_IN > rated and not short:
        which = f"a drive rated for {_TYPICAL_TBW / 1e12:.0f} TB" if asked.endurance is None else "the drives"
        warnings.append(
            f"{which} would be worn out in {format_time(rated / written)} of training"
            + (f", and this run takes {of_run / rated:.0%} of its life" if of_run else "")
        )
    return warnings


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
        f"{_describe_step(planned)}"
        f"{', loss in chunks' if load.chunked_loss else ', all logits in memory'}"
        f"{', tables of the vocabulary in pieces' if shape.uncut is not None else ''}"
        f"{f', MLPs in tiles of {tile_tokens(shape, load)} tokens' if is_tiled(shape, load) else ''}",
        *_describe_experts(planned),
        *planned.memory.notices,
    ]


def _describe_step(planned: Planned) -> str:
    load = planned.load
    return (
        f"{load.accumulation} x {load.batch} x {planned.shape.sequence} tokens"
        f"{', layer-major' if load.alive > 1 else ''}"
        f"{', activations recomputed' if load.recompute else ''}"
        f"{', attention kept' if load.keep_attention else ''}"
    )


def _describe_experts(planned: Planned) -> list[str]:
    experts = experts_of(planned)
    if experts is None:
        return []
    beside = f", a step {experts['step']:.4g}" if planned.load.accumulation > 1 else ""
    return [
        f"experts: a micro-batch visits {experts['micro_batch']:.4g} of {experts['of']:,}{beside}, by expectation with "
        f"a router that prefers none; {'only those' if experts['skips'] else 'all'} are updated"
    ]


def experts_of(planned: Planned) -> dict[str, Any] | None:
    """Returns the numbers of experts that a micro-batch and a step visit in all layers; None without expert units."""
    shape, load = planned.shape, planned.load
    every = sum(layer.number for layer in shape.experts)
    visited = {"micro_batch": load.batch * shape.sequence, "step": load.tokens(shape)}
    means = {name: shape.visited(tokens) for name, tokens in visited.items()}
    return {"of": every, **means, "skips": planned.memory.config.offload.experts == "visited"} if every else None


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
        *(f"  {change.sentence}" for change in advice.changes[:4]),
        *_no_change(planned, advice),
        *_of_rates(planned.hardware),
        "assumed: " + "; ".join(planned.hardware.assumptions),
    ]


def _of_rates(hardware: Hardware) -> list[str]:
    rows = []
    if (timed := hardware.measured) is not None:
        rows.append(
            f"measured: forward and backward of a micro-batch with {timed.layers} of {timed.of} layers, "
            f"{seconds_text(timed.seconds)}; by the probe's rates {seconds_text(timed.by_probe_seconds)}"
        )
    for origin in ORIGINS:
        # Assumed rates stand among all other assumptions.
        if origin != "assumed" and (words := sentences(hardware.rates, origin)):
            rows.append(f"{origin}: {'; '.join(words)}")
    return rows


def _of_memory(planned: Planned, advice: Advice) -> list[str]:
    memory = planned.memory
    least = format_size(planned.least_host)
    saved = "the saved adapters take" if planned.shape.adapted else "an export takes"
    rows = [
        f"host budget {format_size(memory.host)}, minimum {least}, recommended {format_size(advice.host)}; peak above "
        f"the memory of the process before the run {format_size(planned.host_peak)} = {planned.peak}",
        *_of_spare_ram(planned),
        f"activations {format_size(planned.activations)} beside {format_size(memory.device)} of device arena"
        f"{_describe_inputs(planned)}",
        f"disk {format_size(memory.stored + memory.spilled)} ({_describe_slots(memory)}); "
        f"{saved} {format_size(planned.export)} more",
    ]
    free = planned.hardware.disk
    if planned.hardware.drives and free is not None and memory.stored:
        rows[-1] += f", {format_size(free)} are free"
    return rows


def _describe_slots(memory: Memory) -> str:
    """Returns the slots of the store in words, and what becomes of a run that is killed."""
    early = " where updates begin under the backward"
    if memory.slots == 2:
        # Two slots alternate between commits, so the last commit survives a kill at any time.
        steps = memory.commit_every
        often = "every step" if steps == 1 else f"every {steps:,} steps"
        return f"two slots{f', three{early}' if memory.shadowed else ''}, {often} durable"
    slots = f"two slots{early}" if memory.shadowed else "one slot"
    return f"{slots}, no resume after a kill" if memory.slots else "no swap files"


def _of_spare_ram(planned: Planned) -> list[str]:
    """Returns a line on RAM that stays free although gradients are on disk; none if not both are the case."""
    memory = planned.memory
    spare = planned.hardware.ram - planned.host_peak
    if not memory.spilled or spare <= 0:
        return []
    if memory.config.offload.host_memory is None:
        ram, machine = planned.hardware.ram, memory.request.machine
        most = usable_host(ram, own_device_memory=machine.own_device_memory)
        why = (
            f'without "host_memory" a budget is at most {format_size(most)} of {format_size(ram)} of free RAM, which '
            f"leaves the rest to Python, torch, the loader and the cache of files"
        )
    else:
        why = f'"host_memory" of the config is {format_size(memory.host)}'
    return [
        f"  {format_size(spare)} of RAM stay free beside {format_size(memory.spilled)} of gradients on disk: {why}; a "
        f'larger "host_memory" takes more'
    ]


def inputs_of(planned: Planned) -> dict[str, int]:
    """Returns the number of blocks' inputs by the tier in which they wait; empty if blocks keep all activations."""
    load, count = planned.load, len(recomputed(planned.shape, planned.load))
    return {"device": count - load.on_host - load.on_disk, "host": load.on_host, "disk": load.on_disk}


def _describe_inputs(planned: Planned) -> str:
    """Returns the tiers of the blocks' inputs in words; empty if blocks keep all activations."""
    counts, needed = inputs_of(planned), planned.needed
    if not any(counts.values()):
        return ""
    beside = {"device": "on the device", "host": "in host memory", "disk": "on disk"}
    sizes = {"device": "", "host": f" ({format_size(needed.host)})", "disk": f" ({format_size(needed.disk)})"}
    parts = [f"{count} {beside[tier]}{sizes[tier]}" for tier, count in counts.items() if count]
    return f"; inputs of {sum(counts.values())} blocks: {', '.join(parts)}"


def _of_time(planned: Planned) -> list[str]:
    timing = planned.timing
    busy, waited = _seconds_of(timing.busy), _seconds_of(timing.waited._asdict())
    rows = [
        f"a step takes {seconds_text(timing.seconds)}, {timing.tokens_per_second:,.0f} tokens a second; "
        f"{_describe_limit(timing)}",
        f"  work: {busy}; waits: {waited or 'none'}; the lower bound by its order is "
        f"{seconds_text(timing.formula_seconds)}",
    ]
    rows += _of_order(planned)
    enough = hiding_tokens(planned.memory, planned.shape, planned.hardware, planned.load)
    have = planned.load.batch * planned.shape.sequence
    # The hint helps only if a larger micro-batch would hide more.
    if not timing.hidden and enough is not None and enough > have:
        rows.append(f"  with {enough:,} tokens in a micro-batch ({have:,} now) all I/O could hide behind compute")
    return rows


def _of_order(planned: Planned) -> list[str]:
    timing, rows = planned.timing, list[str]()
    if planned.load.accumulation > 1:
        rows.append(f"  {_SCHEDULES[planned.choice.schedule]}: {planned.choice.reason}")
    early, updates = len(timing.simulation.speculated), sum(numel > 0 for numel in planned.memory.parts.trainable_numel)
    if early:
        rows.append(
            f"  {early} of {count_of(updates, 'update')} begin under the backward; a step whose gradients are clipped "
            f"makes them again, in at most {seconds_text(timing.miss_seconds)} more"
        )
    return rows


def orders_heading(planned: Planned) -> str:
    """Returns the line above the table of `orders_table`."""
    return f"a step in each order, before and after; the plan is {_SCHEDULES[planned.choice.schedule]}:"


def orders_table(orders: Sequence[Ordered]) -> list[tuple[str, ...]]:
    """Returns one row per order: order, passes that hide updates, seconds, bytes moved, cost of a clipped step."""
    rows = []
    for order in orders:
        cells: tuple[str, ...] = ("does not fit", "", "", "")
        if order.planned is not None:
            timing = order.planned.timing
            moved = (format_size(timing.moved.read), format_size(timing.moved.written))
            miss = seconds_text(timing.miss_seconds) if timing.miss_seconds else ""
            cells = (seconds_text(timing.seconds), *moved, miss)
        rows.append((_SCHEDULES[order.schedule], "both" if order.speculate else "forward", *cells))
    return rows


def _describe_limit(timing: Timing) -> str:
    share = f"{min(timing.limit_seconds / timing.seconds, 1):.0%} of the step"
    # The budget is no hardware, so its sentence differs.
    if timing.limit == "budget":
        return f"the host budget limits ({share}: units wait for free host memory)"
    return f"{timing.limit} limits, busy for {share}"


def _of_drives(planned: Planned, asked: Asked) -> list[str]:
    timing, rows = planned.timing, list[str]()
    if timing.moved.written:
        # Training day and night.
        daily = timing.moved.written / timing.seconds * _DAY
        line = f"each step writes {format_size(timing.moved.written)}, {daily / 1e12:.1f} TB a day"
        life = years(planned, asked)
        if life is not None:
            line += (
                f": the drives reach their rated {(asked.endurance or 0) / 1e12:.0f} TB in {format_time(life * YEAR)}"
            )
        rows.append(line)
    if asked.tokens is not None:
        seconds = run_seconds(planned, asked.tokens)
        steps = asked.tokens / timing.tokens
        rows.append(f"{format_count(asked.tokens)} tokens take {format_time(seconds)}, {steps:,.0f} steps")
    return rows


def _no_change(planned: Planned, advice: Advice) -> list[str]:
    if advice.changes:
        return []
    if planned.timing.hidden:
        return ["nothing to change: compute hides the rest"]
    return ["no change that was tried is more than 5 % faster"]


def run_seconds(planned: Planned, tokens: int) -> float:
    """Returns the seconds of a training on `tokens` tokens."""
    return tokens / planned.timing.tokens_per_second


def years(planned: Planned, asked: Asked) -> float | None:
    """Returns the years until the drives reach their rated writes; None if unknown or if nothing is written."""
    written = planned.timing.moved.written / planned.timing.seconds
    # Bytes over bytes per second are seconds.
    return None if asked.endurance is None or not written else asked.endurance / written / YEAR


def _count(number: int) -> str:
    named = (("billion", 1e9), ("million", 1e6))
    return next((f"{number / size:.3g} {name}" for name, size in named if number >= size), f"{number:,}")


def _seconds_of(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds_text(value)}" for name, value in parts.items() if value)


def seconds_text(value: float) -> str:
    """Returns seconds with a unit that suits them."""
    return f"{value:.1f} s" if value >= 10 else f"{value:.2f} s" if value >= 0.1 else f"{value * 1e3:.1f} ms"


# -- several GPUs --------------------------------------------------------------------------------------
#
# A step on several GPUs and machines as text and as JSON. Every number is taken from `ranks`.


def ranks_summary(
    name: str, hardware: Hardware, cluster: Cluster, plans: dict[int, RanksPlan], tokens: int | None = None
) -> list[str]:
    """Returns the plans of all ZeRO stages in about ten lines of at most 80 columns."""
    best, tokens = fastest(plans), tokens or _EXAMPLE_TOKENS
    machines = "" if cluster.nodes == 1 else f" in {cluster.nodes} machines"
    divided = "".join(
        f", {kind} parallelism of {size}"
        for kind, size in (("tensor", cluster.tensor), ("pipeline", cluster.pipeline))
        if size > 1
    )
    load, busy = best.load, _seconds_of(best.busy)
    return wrapped(
        [
            (
                "fits",
                f"{name} on {cluster.gpus * cluster.nodes} x {hardware.name}{machines}{divided}: stage {best.stage}, "
                f"weights on {_PLACES[best.weights]}, states on {_PLACES[best.states]}",
            ),
            (
                "speed",
                f"at most {_rate(best.tokens_per_second)} tokens/s of all GPUs; {format_count(tokens)} tokens take "
                f"{format_time(tokens / best.tokens_per_second)}",
            ),
            (
                "step",
                f"{load.accumulation} x {load.batch} sequences on each GPU"
                f"{', activations recomputed' if load.recompute else ''}, in {seconds_text(best.seconds)}",
            ),
            ("limit", f"{best.limit}; {busy}"),
            *(
                (f"stage {stage}", _stage_words(plans[stage]) if stage in plans else "does not fit")
                for stage in range(4)
            ),
            ("note", "GPU counts activations; the sizes before it are what a GPU sends in a step"),
            ("note", "a step takes as long as its busiest resource, as if none waited for another"),
            ("GPU", _bar(best.device, hardware.gpu_memory)),
            ("RAM", _bar(best.host, hardware.ram)),
            *([("drives", _bar(best.disk, None))] if best.disk else []),
        ]
    )


def _stage_words(plan: RanksPlan) -> str:
    sent = plan.traffic
    kinds = ", ".join(
        f"{kind} {format_size(traffic.nbytes)}" for kind, traffic in sent._asdict().items() if traffic.nbytes
    )
    return f"{_rate(plan.tokens_per_second)} tokens/s; {kinds}; GPU {format_size(plan.device)}"


def ranks_json(name: str, cluster: Cluster, plans: dict[int, RanksPlan]) -> dict[str, Any]:
    """Returns the object that `--json` prints, in bytes, seconds, and tokens per second."""
    return {
        "model": name,
        "cluster": cluster._asdict(),
        "best": fastest(plans).stage,
        "stages": [
            {
                **{name: getattr(plan, name) for name in ("stage", "weights", "states", "device", "host", "disk")},
                **{name: getattr(plan.load, name) for name in ("batch", "accumulation", "recompute")},
                "sent": {kind: sent._asdict() for kind, sent in plan.traffic._asdict().items()},
                "busy_seconds": {name: rounded(value) for name, value in plan.busy.items()},
                "limit": plan.limit,
                "seconds": rounded(plan.seconds),
                "tokens": plan.tokens,
                "tokens_per_second": rounded(plan.tokens_per_second),
            }
            for plan in plans.values()
        ],
    }


# -- json object ---------------------------------------------------------------------------------------
#
# A plan as the object that `offload plan --json` prints. Every number is taken or derived from `Planned`.


def as_json(
    planned: Planned,
    advice: Advice,
    asked: Asked,
    reaches: Sequence[Reach] = (),
    orders: Sequence[Ordered] = (),
    priced: Priced | None = None,
    sustained: SustainedSteps | None = None,
) -> dict[str, Any]:
    """Returns the object that `--json` prints, in bytes, seconds, and bytes or tokens per second."""
    memory, shape = planned.memory, planned.shape
    return {
        "model": {"name": shape.name, "parameters": shape.parameters, "units": len(shape.layouts)},
        "machine": {
            "name": planned.hardware.name,
            "gpu_memory": planned.hardware.gpu_memory,
            "ram": planned.hardware.ram,
            "drives": [{"name": d.name, "read": d.read, "write": d.write} for d in planned.hardware.drives],
            # Work that takes no time has the rate None.
            "rates": [
                {**rate._asdict(), "value": None if math.isinf(rate.value) else rounded(rate.value)}
                for rate in planned.hardware.rates
            ],
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
            {
                **reach._asdict(),
                "way": reach.way.words,
                "activations": reach.way.tier,
                "seconds": rounded(reach.seconds),
            }
            for reach in reaches
        ],
        "orders": [_order_json(order) for order in orders],
        "host_peak": planned.host_peak,
        "host_peak_parts": planned.peak._asdict(),
        "step": _step_json(planned),
        "run_seconds": None if asked.tokens is None else rounded(run_seconds(planned, asked.tokens)),
        "drive_years": rounded(years(planned, asked)),
        # All changes; the text shows the best four only.
        "changes": [
            {
                "words": change.words,
                "option": change.option,
                "seconds": rounded(change.seconds),
                "gain": rounded(change.gain),
            }
            for change in advice.changes
        ],
        "cost": None if priced is None else _priced_json(priced),
        "drive_budget": _budget_json(planned),
        "sustained": None
        if sustained is None
        else {
            "measured": sustained.measured,
            "step_seconds": {words: rounded(seconds) for words, seconds in sustained.seconds.items()},
            "by_written": [[least, rounded(seconds)] for least, seconds in sustained.by_written],
        },
    }


def _budget_json(planned: Planned) -> dict[str, Any] | None:
    memory = planned.memory
    if memory.budget is None:
        return None
    return {
        "bytes_per_second": rounded(memory.budget.rate),
        "excess_bytes_per_second": rounded(budget_excess(planned)),
        "commit_every": memory.commit_every,
        **{f"{name}_bytes": rounded(nbytes) for name, nbytes in memory.written._asdict().items()},
    }


def _priced_json(priced: Priced) -> dict[str, Any]:
    return {
        **cost_json(priced.cost),
        "prices": priced.prices._asdict(),
        "changes": [
            {"words": change.words, "option": change.option, "share": rounded(change.share), **cost_json(change.cost)}
            for change in priced.changes
        ],
    }


def _step_json(planned: Planned) -> dict[str, Any]:
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
        "hiding_tokens": hiding_tokens(planned.memory, shape, planned.hardware, planned.load),
    }


def _order_json(ordered: Ordered) -> dict[str, Any]:
    order = {"schedule": ordered.schedule, "speculate": ordered.speculate}
    if ordered.planned is None:
        return {**order, "seconds": None}
    timing = ordered.planned.timing
    return {
        **order,
        "seconds": rounded(timing.seconds),
        "read_bytes": timing.moved.read,
        "written_bytes": timing.moved.written,
        "updates_under_backward": len(timing.simulation.speculated),
        "miss_seconds": rounded(timing.miss_seconds),
    }


# -- reach ---------------------------------------------------------------------------------------------
#
# The longest sequences of a machine as text and as JSON. Every number is taken from `reach`.


def reach_heading(planned: Planned) -> str:
    """Returns the line above the table of `reach_table`."""
    batch, sequence = planned.load.batch, planned.shape.sequence
    return (
        f"tokens of the longest sequence with {batch} in a micro-batch, with all logits in memory and with the loss in "
        f"chunks; sequences of {sequence:,} tokens in the largest micro-batch; the step beside that of the plan:"
    )


def reach_table(planned: Planned, reaches: Sequence[Reach]) -> list[tuple[str, ...]]:
    """Returns one row per way to keep activations: words, longest sequences, micro-batch, seconds relative to now.

    `without_room` names the ways by which no sequence fits; they have no row.
    """
    now = planned.timing.seconds
    return [
        (
            reach.way.words,
            _tokens(reach.sequence),
            _tokens(reach.sequence_chunked),
            f"{reach.batch:,}" if reach.batch else "none",
            "does not fit" if reach.seconds is None else f"{reach.seconds / now:.2f} x",
        )
        for reach in reaches
        if _has_room(reach)
    ]


def without_room(ways: Sequence[Reach | Longest]) -> list[str]:
    """Returns a line on the ways by which no sequence fits; none if a sequence fits by each way."""
    names = [length.way.words for length in ways if not _has_room(length)]
    return [f"no sequence fits: {', '.join(names)}"] if 0 < len(names) < len(ways) else []


def _has_room(length: Reach | Longest) -> bool:
    return bool(length.sequence or length.sequence_chunked)


def _tokens(count: int) -> str:
    return f"{count:,}" if count else "none"


def longest_json(lengths: Sequence[Longest]) -> dict[str, Any]:
    """Returns the object that `--longest-sequence --json` prints: for each way, lengths, needs and config."""
    rows = []
    for way, sequence, sequence_chunked, planned in lengths:
        row: dict[str, Any] = {"way": way.words, "sequence": sequence, "sequence_chunked": sequence_chunked}
        if planned is not None:
            row |= {
                "chunked_loss": planned.load.chunked_loss,
                "activation_tiers": {**planned.needed._asdict(), "inputs": inputs_of(planned)},
                "seconds": rounded(planned.timing.seconds),
                "tokens_per_second": rounded(planned.timing.tokens_per_second),
                "limit": planned.timing.limit,
                "config": dict(planned.content),
            }
        rows.append(row)
    return {"longest": rows}


def longest_heading(lengths: Sequence[Longest]) -> str:
    """Returns the line above the table of `longest_table`."""
    batch = next((length.planned.load.batch for length in lengths if length.planned is not None), 1)
    return (
        f"tokens of the longest sequence with {batch} in a micro-batch, with all logits in memory and with the loss in "
        f"chunks; a step of the longer one:"
    )


def longest_table(lengths: Sequence[Longest]) -> list[tuple[str, ...]]:
    """Returns the rows of `--longest-sequence`: words, longest sequences, tiers, seconds, tokens per second."""
    rows = []
    for length in filter(_has_room, lengths):
        # A way by which a sequence fits has a plan, unless the loss was chosen for which none does.
        cells: tuple[str, ...] = ("", "", "")
        if length.planned is not None:
            timing, zero = length.planned.timing, length.planned.memory.config.zero_optimization
            tiers = f"{zero.offload_param.device}, {zero.offload_optimizer.device}"
            cells = (tiers, seconds_text(timing.seconds), f"{timing.tokens_per_second:,.0f}")
        rows.append((length.way.words, _tokens(length.sequence), _tokens(length.sequence_chunked), *cells))
    return rows


def longest_lines(lengths: Sequence[Longest]) -> list[str]:
    """Returns the lines below the table: the settings for the longest sequence, and a limit of the model."""
    plans = [length.planned for length in lengths if length.planned is not None]
    if not plans:
        return ["no sequence fits, with any tiers: the device has no room beside the weights in use"]
    best = max(plans, key=lambda planned: planned.shape.sequence)
    set_ = {name: best.content[name] for name in ("zero_optimization", "offload")}
    rows = [*without_room(lengths), f"for {best.shape.sequence:,} tokens set: {json.dumps(set_)[1:-1]}"]
    if best.load.chunked_loss:
        rows.append("and compute the loss in chunks: offload.losses.chunk_loss_of(model) before initialize")
    positions = best.shape.positions
    if positions is not None and positions < best.shape.sequence:
        rows.append(f"the config of the model allows {positions:,} positions: more need another one")
    return [*rows, "assumed: attention keeps no matrix of tokens times tokens (FlashAttention)"]
