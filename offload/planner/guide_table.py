"""Generator of the predictions in the guides: `python -m offload.planner.guide_table`.

The command writes all of docs/reference/plan-table.md, three models on three GPUs. In docs/guides/finetune-13b.md, 13B
on one card, the command replaces the rows of the table only.
"""

from __future__ import annotations

from pathlib import Path

from offload.errors import BudgetError
from offload.planner import recommend as choice
from offload.planner import report
from offload.planner.hardware import Hardware, described, parse_drive
from offload.planner.model_shape import from_count
from offload.planner.recommend import Planned
from offload.planner.timing import Load
from offload.sizes import GIB, format_size, format_time

# tests/test_plan_table.py generates rows anew and compares them with the pages: write the pages after any change.
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "plan-table.md"

MODELS = ((13, 40), (30, 60), (70, 80))
_GPUS = (("RTX 4090", 60e9), ("A100 80GB", 150e9), ("H200", 250e9))
"""Each GPU with the bandwidth of its host's memory, in bytes per second."""
CASES = tuple((gpu, bandwidth, drives) for gpu, bandwidth in _GPUS for drives in (1, 4))
"""The rows of each model: GPU, host bandwidth in bytes per second, number of drives."""
_DRIVE, _TBW, _RAM = "7GB/s,5GB/s,4TB", 2400e12, 128 * GIB
_SEQUENCE, _ACCUMULATION = 2048, 8
_BATCHES = (16, 8, 4, 2, 1)

_RATED = f"{_TBW / 1e12:.0f} TB"
_HEAD = f"""# Three models on three GPUs

Predictions of `offload plan`, made by `python -m offload.planner.guide_table`; nothing here was measured. One GPU,
{_RAM // GIB} GiB of RAM, drives that read 7 and write 5 GB/s, have 4 TB each and are rated for {_RATED} written.
bf16, AdamW, every step durable where there are swap files. A step has {_ACCUMULATION} micro-batches, each of the
largest power of two of sequences of {_SEQUENCE} tokens that fits, up to {_BATCHES[0]}. "drive life" is the time until
all drives reach their rated writes, training day and night. "limit" is the resource that takes most of a step's
seconds, and its share.

Assumed: matrix products reach half of the published speed, other work 70 % of the GPU's memory bandwidth, host memory
60, 150 and 250 GB/s beside the three GPUs. [How to read a plan](../guides/plan-a-run.md).

| model | GPU | drives | tiers (weights, states) | micro-batch | host | disk | step | tokens/s | limit | drive life |
|---|---|---|---|---|---|---|---|---|---|---|
"""


CARD_PAGE = PAGE.parents[1] / "guides" / "finetune-13b.md"
_CARD, _CARD_DRIVE, _CARD_TBW, _CARD_BANDWIDTH = "RTX 4090", "7GB/s,5GB/s,2TB", 1200e12, 60e9
_CARD_LOADS = ((Load(4, 8), "step"), (Load(4, 16), "step"), (Load(4, 8), "none"))
"""Load and durability of each row."""
CARD_CASES = tuple((ram, load, durability) for ram in (64, 128) for load, durability in _CARD_LOADS)
"""The rows of the card's table: GB of RAM, load, durability."""


def card_page(page: str) -> str:
    """Returns the text `page` with newly computed rows in its table."""
    lines = page.splitlines(keepends=True)
    at = [number for number, line in enumerate(lines) if is_of_card(line)]
    rows = [f"{card_row(*case)}\n" for case in CARD_CASES]
    # Only the rows are generated. The text around them is written by hand.
    return "".join([*lines[: at[0]], *rows, *lines[at[-1] + 1 :]])


def is_of_card(line: str) -> bool:
    """Returns True if `line` of the card's page is a row of the table."""
    return line.startswith(("| 64 GB |", "| 128 GB |"))


def card_row(ram: int, load: Load, durability: str) -> str:
    """Returns the row of a 13B model on one card of 24 GB with one drive and `ram` GB of RAM."""
    shape = from_count(13 * 10**9, 40, _SEQUENCE)
    hardware = described(_CARD, ram * GIB, [parse_drive(_CARD_DRIVE)], _CARD_BANDWIDTH)
    planned = choice.choose(shape, hardware, load, None, durability=durability)
    memory, timing, zero = planned.memory, planned.timing, planned.memory.config.zero_optimization
    cells = (
        f"{ram} GB",
        f"{load.batch} x {_SEQUENCE} x {load.accumulation}",
        durability,
        f"{zero.offload_param.device}, {zero.offload_optimizer.device}",
        format_size(memory.device),
        format_size(memory.host),
        format_size(memory.stored + memory.spilled),
        f"{timing.seconds:.0f} s",
        f"{timing.compute_seconds:.0f} s",
        f"{timing.tokens_per_second:.0f}",
        _limit(planned),
        format_size(timing.moved.written),
        _drive_life(planned, _CARD_TBW),
    )
    return f"| {' | '.join(cells)} |"


def document() -> str:
    """Returns the text of docs/reference/plan-table.md."""
    return _HEAD + "".join(f"{row(model, *case)}\n" for model in MODELS for case in CASES)


def machine(gpu: str, bandwidth: float, drives: int) -> Hardware:
    """Returns one machine of the table; `bandwidth` is that of host memory, in bytes per second."""
    return described(gpu, _RAM, [parse_drive(_DRIVE)] * drives, bandwidth)


def row(model: tuple[int, int], gpu: str, bandwidth: float, drives: int) -> str:
    """Returns one row of the table.

    Args:
        model: billions of parameters, and layers.
        gpu: a name of `hardware.GPUS`.
        bandwidth: bytes per second of host memory.
        drives: number of drives.
    """
    billions, layers = model
    planned = _largest(billions, layers, machine(gpu, bandwidth, drives))
    memory, timing = planned.memory, planned.timing
    zero = memory.config.zero_optimization
    cells = (
        f"{billions}B",
        gpu,
        str(drives),
        f"{zero.offload_param.device}, {zero.offload_optimizer.device}",
        f"{planned.load.batch} x {_SEQUENCE}",
        format_size(memory.host),
        format_size(memory.stored + memory.spilled),
        f"{timing.seconds:.0f} s",
        f"{timing.tokens_per_second:.0f}",
        _limit(planned),
        # Writes are spread evenly over the drives, so the ratings add up.
        _drive_life(planned, _TBW * drives),
    )
    return f"| {' | '.join(cells)} |"


def _limit(planned: Planned) -> str:
    """Returns the name of the resource that takes most of the step's seconds, and the fraction of these seconds."""
    timing = planned.timing
    return f"{timing.limit} {timing.limit_seconds / timing.seconds:.0%}"


def _drive_life(planned: Planned, endurance: float) -> str:
    """Returns the time until `endurance` bytes are written by training day and night; empty if nothing is written."""
    years = report.years(planned, report.Asked(endurance=int(endurance)))
    return "" if years is None else format_time(years * report.YEAR)


def _largest(billions: int, layers: int, hardware: Hardware) -> Planned:
    """Returns the plan with the largest micro-batch of `_BATCHES` that fits."""
    shape = from_count(billions * 10**9, layers, _SEQUENCE)
    # In descending order: the first batch that fits is the largest.
    for batch in _BATCHES:
        try:
            return choice.choose(shape, hardware, Load(batch, _ACCUMULATION), None)
        except BudgetError:
            # Not even one sequence fits: the error says why.
            if batch == _BATCHES[-1]:
                raise
    raise AssertionError("unreachable")


if __name__ == "__main__":
    CARD_PAGE.write_text(card_page(CARD_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    PAGE.write_text(document(), encoding="utf-8")
