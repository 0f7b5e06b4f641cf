"""The longest sequences of a machine as text and as JSON. Every number is taken from `reach`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from offload.planner.reach import Longest, Reach
from offload.planner.recommend import Planned
from offload.planner.report.text import inputs_of, rounded, seconds_text


def reach_heading(planned: Planned) -> str:
    """Returns the line above the table of `reach_table`."""
    batch, sequence = planned.load.batch, planned.shape.sequence
    return (
        f"tokens of the longest sequence with {batch} in a micro-batch, with all logits in memory and with the loss in "
        f"chunks; sequences of {sequence:,} tokens in the largest micro-batch; the step beside that of the plan:"
    )


def reach_table(planned: Planned, reaches: Sequence[Reach]) -> list[tuple[str, ...]]:
    """Returns the rows on ways to keep activations: words, longest sequences, micro-batch, seconds relative to now.

    A way by which nothing fits has no row: `without_room` names it.
    """
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
        if _has_room(each)
    ]


def without_room(ways: Sequence[Reach | Longest]) -> list[str]:
    """Returns a line on the ways by which not even one sequence fits; none if each has room for some."""
    names = [each.way.words for each in ways if not _has_room(each)]
    return [f"no sequence fits: {', '.join(names)}"] if 0 < len(names) < len(ways) else []


def _has_room(each: Reach | Longest) -> bool:
    """Returns True if a sequence of some length fits."""
    return bool(each.sequence or each.sequence_chunked)


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
        "activation_tiers": {**planned.needed._asdict(), "inputs": inputs_of(planned)},
        "seconds": rounded(timing.seconds),
        "tokens_per_second": rounded(timing.tokens_per_second),
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
    return [_longest_row(each) for each in found if _has_room(each)]


def _longest_row(each: Longest) -> tuple[str, ...]:
    """Returns the row of one way."""
    start = (each.way.words, _tokens(each.sequence), _tokens(each.sequence_chunked))
    if each.planned is None:
        return (*start, "", "", "")
    timing, zero = each.planned.timing, each.planned.memory.config.zero_optimization
    tiers = f"{zero.offload_param.device}, {zero.offload_optimizer.device}"
    return (*start, tiers, seconds_text(timing.seconds), f"{timing.tokens_per_second:,.0f}")


def longest_lines(found: Sequence[Longest]) -> list[str]:
    """Returns the lines below the table: what to set for the longest sequence, and a limit of the model."""
    plans = [each.planned for each in found if each.planned is not None]
    if not plans:
        return ["no sequence fits, with any tiers: the device has no room beside the weights in use"]
    best = max(plans, key=lambda planned: planned.shape.sequence)
    set_ = {name: best.content[name] for name in ("zero_optimization", "offload")}
    lines_found = [*without_room(found), f"for {best.shape.sequence:,} tokens set: {json.dumps(set_)[1:-1]}"]
    if best.load.chunked_loss:
        lines_found.append("and compute the loss in chunks: offload.losses.chunk_loss_of(model) before initialize")
    positions = best.shape.positions
    if positions is not None and positions < best.shape.sequence:
        lines_found.append(f"the config of the model allows {positions:,} positions: more need another one")
    return [*lines_found, "assumed: attention keeps no matrix of tokens times tokens (FlashAttention)"]
