"""Writes the predictions on pages: `python -m tests.pages.plan_table_page`, some minutes of one core.

The command writes all of docs/reference/plan-table.md: three models on three GPUs, two models on smaller cards, present
models on four cards, the rates of all GPUs with their origins, 13B on other machines, and predictions beside steps that
others measured. Of README.md, docs/guides/finetune-13b.md and docs/concepts/cost-model.md it replaces the rows of one
table each. No test makes the rows anew: tests/planner/pinned_steps.py pins such steps in seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from offload.errors import BudgetError
from offload.hardware.gpus import GPUS, Gpu, Rate
from offload.layout.pass_order import LAYER_MAJOR, MICRO_BATCH_MAJOR
from offload.planner import output, recommend, request
from offload.planner.activations import Load
from offload.planner.hardware import Hardware, described, parse_drive
from offload.planner.memory import settings
from offload.planner.model_shape import Shape, from_count
from offload.planner.options import PlanOptions
from offload.planner.recommend import Planned
from offload.planner.sustained import sustained_steps
from offload.sizes import GIB, format_size, format_time

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "plan-table.md"

MODELS = ((13, 40), (30, 60), (70, 80))
_GPUS = (("RTX 4090", 60e9), ("A100 80GB", 150e9), ("H200", 250e9))
"""Each GPU with the bandwidth of its host's memory, in bytes per second."""
CASES = tuple((gpu, bandwidth, drives) for gpu, bandwidth in _GPUS for drives in (1, 4))
"""The rows of each model: GPU, host bandwidth in bytes per second, number of drives."""
_DRIVE, _TBW, _RAM = "7GB/s,5GB/s,4TB", 2400e12, 128 * GIB
_SEQUENCE, _ACCUMULATION = 2048, 8
_BATCHES = (16, 8, 4, 2, 1)
_WORTH = 1.03
"""Speed-up from which a smaller micro-batch is worth its further writes of states for each token."""

SMALL = ("RTX 3060", "RTX 4060 Ti 16GB")
"""Cards of less than 24 GiB."""
SMALL_MODELS = ((8, 32), (13, 40))
_SMALL_RAM, _SMALL_BANDWIDTH = 64 * GIB, 40e9
"""RAM of the machines of such cards, and its bandwidth: two channels of DDR4."""

OTHERS = (
    ("RX 7900 XTX", 60e9),
    ("MI300X", 250e9),
    ("GH200", 250e9),
    ("MI300A", None),
    ("DGX Spark GB10", None),
    ("Ryzen AI MAX+ 395", None),
)
"""Machines with ROCm, a fast link or a unified memory: GPU, and host bandwidth; None for the one that plans assume."""


class Step(NamedTuple):
    """A step that others measured, and whose time no drive determined."""

    words: str
    gpu: str
    model: tuple[int, int]
    """Billions of parameters, and layers."""
    sequence: int
    batch: int
    tokens_per_second: int
    source: str


STEPS = (
    Step("torchtitan, FSDP, not compiled", "H100", (8, 32), 8192, 1, 5762, "torchtitan, llama3_h100_202412"),
    Step("LoHan, six SSDs", "RTX 4090", (13, 40), 1024, 64, 1942, "arXiv 2403.06504"),
    Step("llm.q, kernels of its own", "RTX 4090", (14, 48), 1024, 32, 1300, "github.com/IST-DASLab/llmq"),
)

_RATED = f"{_TBW / 1e12:.0f} TB"
_NAMES = (
    *("model", "GPU", "drives", "tiers (weights, states)", "micro-batch", "host", "disk"),
    *("step", "tokens/s", "limit", "drive life"),
)
_COLUMNS = f"| {' | '.join(_NAMES)} |\n|{'---|' * len(_NAMES)}\n"
_HEAD = f"""# Three models on three GPUs

Predictions of `offload plan`, written by `python -m tests.pages.plan_table_page`; **no step of this package here
was measured**. One GPU, {_RAM // GIB} GiB of RAM, drives that read 7 and write 5 GB/s, have 4 TB each and are rated for
{_RATED} written. bf16, AdamW, every step durable where there are swap files. A step has {_ACCUMULATION} micro-batches,
each of the power of two of sequences of {_SEQUENCE} tokens that is fastest, up to {_BATCHES[0]}, with the loss in
chunks as `offload train` computes it, in the faster of both
[orders](../concepts/cost-model.md#orders-of-micro-batches); where activations do not fit otherwise, blocks are
recomputed, and their inputs wait in host memory or on drives. No step is taken to clip. "drive life" is the time until
all drives reach their rated writes, training day and night.
"limit" is the resource that is busy for most of a step, and its share.

Matrix products and copies are at [published rates](#rates); host memory is assumed at 60, 150 and 250 GB/s beside the
three GPUs, and the drives as said. [How to read a plan](../guides/plan-a-run.md).

{_COLUMNS}"""
_SMALL_HEAD = f"""
## Cards of 12 and 16 GB

As the first table, with {_SMALL_RAM // GIB} GiB of RAM, at an assumed {_SMALL_BANDWIDTH / 1e9:.0f} GB/s, and one drive.

{_COLUMNS}"""
FAMILIES = ("qwen3-8b", "qwen3-14b", "qwen3-32b", "llama-3.3-70b", "qwen3-30b-a3b")
CARDS = (("RTX 3060", 12, 64), ("RTX 4060 Ti 16GB", 16, 64), ("RTX 4090", 24, 128), ("RTX 5090", 32, 128))
"""Cards with their GB of memory, and the GB of RAM beside them."""
_FAMILY_DRIVE, _FAMILY_TBW = "7GB/s,5GB/s,4TB", 2400e12
_FAMILY_NAMES = ("model", "card", *("weights, states", "tokens/s", "100M tokens", "step", "limit", "change", "wear"))
_FAMILY_HEAD = f"""
## Full fine-tuning of present models on one card

The lines of `offload plan MODEL --gpu CARD --ram RAM --drive {_FAMILY_DRIVE}
--tbw {_FAMILY_TBW / 1e12:.0f}TB --seq-len {_SEQUENCE}`, one row each.
The plan chooses micro-batches and their order. The bars are the columns GPU, RAM and drive, used of free. All weights
are trained, in bf16 with AdamW; adapters need far less.

| {" | ".join((*_FAMILY_NAMES, "GPU", "RAM", "drive"))} |
|{"---|" * (len(_FAMILY_NAMES) + 3)}
"""
_RATES_HEAD = """
## Rates

Every rate of a plan is one of four:

| | |
|---|---|
| measured | by `offload probe`, on the machine that the plan is for; none of this page |
| published | reached by a program, of others or of this project: the number in brackets is the source below |
| given | by an option, such as `--pcie` |
| assumed | where nobody published a figure: 70 % of the data sheet for other work; for products see below |

**Matrix products of a card without a figure** are assumed at the fraction of the data sheet that other cards of its
generation reached, by the median and at most all of it; 50 % where no card of a generation has a figure. The GeForce
cards of the series 30, 40 and 50 reached 91 to 113 % in bf16: their tensor cores have half the rate where sums are in
fp32, as in torch, and the data sheet has that half, at a clock that most cards exceed. NVIDIA's cards for workstations
and data centers have the whole rate, and reached 74 to 85 % of it. In fp32 GeForce cards reached 54 to 78 %.

`offload plan` prints the same marks. "one memory" is a
chip whose GPU and CPU share it: copies take no time in a plan, and both budgets come out of it. A run there still makes
the copies, inside of that memory, and `offload plan --write` gives it both budgets. ROCm cards are planned like others;
whether a run works on them was not tried. A GPU may be slower than here when it is hot or limited in power.

| GPU | memory | products, bf16 | products, fp32 | other work | copies, each way |
|---|---|---|---|---|---|
"""
_OTHERS_HEAD = f"""
## 13B on other machines

As the first table, with one drive. RAM is {_RAM // GIB} GiB; where it is one memory, that is all there is. Host memory
is assumed at 60 and 250 GB/s beside the cards, and at what the CPU's cores are assumed to reach in one memory.

{_COLUMNS}"""
_STEPS_HEAD = """
## Beside steps of others

The compute alone that a plan predicts, beside steps that others measured. Their programs keep more activations than
one column, recompute fewer than the other, or have fused kernels where a plan counts those of plain PyTorch: read it
as a check of the rates, not as a race. [Steps of this package](../benchmarks/2026-11-h200.md) were measured on an H200.

| measured by others | GPU | model, tokens | tokens/s | plan, nothing recomputed | plan, all recomputed | source |
|---|---|---|---|---|---|---|
"""


CARD_PAGE = ROOT / "docs" / "guides" / "finetune-13b.md"
_CARD, _CARD_DRIVE, _CARD_TBW, _CARD_BANDWIDTH = "RTX 4090", "7GB/s,5GB/s,2TB", 1200e12, 60e9
_CARD_LOADS = tuple(
    (Load(4, micro_batches, chunked_loss=True, schedule=LAYER_MAJOR), durability)
    for micro_batches, durability in ((8, "step"), (16, "step"), (8, "none"))
)
"""Load and durability of each row."""
CARD_CASES = tuple((ram, load, durability) for ram in (64, 128) for load, durability in _CARD_LOADS)
"""The rows of the card's table: GB of RAM, load, durability."""

README = ROOT / "README.md"
README_CASES = (
    ((8, 32), "RTX 3060", "12 GiB", 1),
    ((13, 40), "RTX 4060 Ti 16GB", "16 GiB", 1),
    ((13, 40), "RTX 4090", "24 GiB", 1),
    ((30, 60), "RTX 4090", "24 GiB", 1),
    ((70, 80), "RTX 4090", "24 GiB", 4),
    ((70, 80), "H200", "141 GB", 4),
)
"""Rows of the plan table that the README has: model, GPU, its memory, number of drives."""

ORDER_PAGE = ROOT / "docs" / "concepts" / "cost-model.md"
ORDER_CASES = ((8, 1), (1, 8), (20, 1), (4, 5), (8, 8), (1, 64))
"""Steps of 13B whose orders the cost model compares: sequences of 1,024 tokens, and micro-batches."""
_ORDER_SEQUENCE = 1024


def replaced(path: Path, first: tuple[str, ...], rows: Sequence[str]) -> None:
    """Writes new rows into the table of a page whose rows begin with one of `first`; its other lines stay."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    at = [number for number, line in enumerate(lines) if line.startswith(first)]
    assert len(at) == len(rows) == at[-1] + 1 - at[0], f"the table of {path} has other rows"
    path.write_text("".join([*lines[: at[0]], *(f"{row}\n" for row in rows), *lines[at[-1] + 1 :]]), encoding="utf-8")


def readme_row(model: tuple[int, int], gpu: str, memory: str, drives: int) -> str:
    """Returns a row of the README's table: a row of the plan table in fewer columns."""
    bandwidth, ram = (_SMALL_BANDWIDTH, _SMALL_RAM) if gpu in SMALL else (dict(_GPUS)[gpu], _RAM)
    planned = fastest(model, gpu, bandwidth, drives, ram)
    timing = planned.timing
    limit = f"{timing.limit}, {timing.limit_seconds / timing.seconds:.0%}".replace("%", " %")
    name = gpu.removesuffix(" 16GB")
    cells = (f"{model[0]}B", f"{name}, {memory}", f"{ram // GIB} GiB", str(drives), f"{timing.seconds:,.0f} s")
    return f"| {' | '.join((*cells, _sustained(planned), f'{timing.tokens_per_second:,.0f}', limit))} |"


def _sustained(planned: Planned) -> str:
    """Returns the seconds of a step at the writes that drives sustain, which a plan assumes without their curves."""
    sustained = sustained_steps(planned)
    return f"{max([planned.timing.seconds, *(sustained.seconds.values() if sustained else ())]):,.0f} s"


def order_row(batch: int, accumulation: int) -> str:
    """Returns the row of a step in every order, with the tiers and budgets of the fastest."""
    drive = parse_drive("7GB/s,5GB/s")
    planned = recommend.choose(
        from_count(13 * 10**9, 40, _ORDER_SEQUENCE),
        described("RTX 4090", 64 * GIB, [drive]),
        Load(batch, accumulation, chunked_loss=True),
        None,
    )
    orders = [order for order in recommend.compare(planned) if order.planned is not None]
    seconds = {
        (order.schedule, order.speculate): order.planned.timing.seconds for order in orders if order.planned is not None
    }
    least, cells = min(seconds.values()), []
    for key in ((schedule, early) for schedule in (MICRO_BATCH_MAJOR, LAYER_MAJOR) for early in (False, True)):
        if key not in seconds:
            cells.append("")
            continue
        words = f"{seconds[key]:.1f} s" if seconds[key] < 200 else f"{seconds[key]:.0f} s"
        cells.append(f"**{words}**" if seconds[key] == least else words)
    option = f"--batch-size {batch}" + (f" --accumulation {accumulation}" if accumulation > 1 else "")
    last = next(order.planned for order in reversed(orders) if order.planned is not None)
    compute = f"{last.timing.compute_seconds:.1f} s"
    tokens = f"{batch * accumulation * _ORDER_SEQUENCE:,}: `{option}`"
    return f"| {' | '.join((tokens, *cells, compute))} |".replace("|  |", "| |").replace("|  |", "| |")


def card_shape() -> Shape:
    """Returns the model of the card's page."""
    return from_count(13 * 10**9, 40, _SEQUENCE)


def card_machine(ram: int) -> Hardware:
    """Returns the machine of the card's page with `ram` GB of RAM."""
    return described(_CARD, ram * GIB, [parse_drive(_CARD_DRIVE)], _CARD_BANDWIDTH)


def card_row(ram: int, load: Load, durability: str) -> str:
    """Returns the row of a 13B model on one card of 24 GB with one drive and `ram` GB of RAM."""
    planned = recommend.choose(card_shape(), card_machine(ram), load, None, durability=durability)
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
        _sustained(planned),
        f"{timing.compute_seconds:.0f} s",
        f"{timing.tokens_per_second:.0f}",
        _limit(planned),
        format_size(timing.moved.written),
        _drive_life(planned, _CARD_TBW),
    )
    return f"| {' | '.join(cells)} |"


def document() -> str:
    """Returns the text of docs/reference/plan-table.md."""
    sources = list(dict.fromkeys(rate.source for gpu in GPUS for rate in _rates(gpu) if rate.origin == "published"))
    return "".join(
        [
            _HEAD,
            *(f"{row(model, *case)}\n" for model in MODELS for case in CASES),
            _SMALL_HEAD,
            *(f"{small_row(model, gpu)}\n" for model in SMALL_MODELS for gpu in SMALL),
            _FAMILY_HEAD,
            *(f"{family_row(model, *card)}\n" for model in FAMILIES for card in CARDS),
            _RATES_HEAD,
            *(f"{rates_row(gpu, sources)}\n" for gpu in GPUS),
            "\n",
            *(f"{number}. {source}\n" for number, source in enumerate(sources, 1)),
            _OTHERS_HEAD,
            *(f"{row(MODELS[0], gpu, bandwidth, 1)}\n" for gpu, bandwidth in OTHERS),
            _STEPS_HEAD,
            *(f"{step_row(step)}\n" for step in STEPS),
        ]
    )


def _rates(gpu: Gpu) -> tuple[Rate, Rate, Rate, Rate]:
    products, work, copies, *_ = described(gpu.name).rates
    return products, described(gpu.name, dtype="fp32").rates[0], work, copies


def rates_row(gpu: Gpu, sources: Sequence[str]) -> str:
    """Returns the row of a GPU's rates.

    A cell refers to its source by the position in `sources`, from 1.
    """

    def cell(rate: Rate) -> str:
        return f"{rate.amount}, {rate.origin}" + (
            f" [{sources.index(rate.source) + 1}]" if rate.source in sources else ""
        )

    cells = [cell(rate) for rate in _rates(gpu)]
    if not gpu.has_bf16:
        cells[0] += f"; in fp16 {cell(described(gpu.name, dtype='fp16').rates[0])}"
    memory = f"{gpu.memory // GIB} GiB" + (", one memory" if gpu.unified else "")
    return f"| {gpu.name} | {memory} | {' | '.join(cells)} |"


def step_row(step: Step) -> str:
    """Returns the row of a step of others, beside the prediction for the same GPU with unlimited memory."""
    shape = from_count(step.model[0] * 10**9, step.model[1], step.sequence)
    on = replace(described(step.gpu), gpu_memory=1 << 50)
    content = settings("none", "none", batch=step.batch)
    plans = (recommend.plan(shape, on, Load(step.batch, 1, again), content) for again in (False, True))
    cells = (
        step.words,
        step.gpu,
        f"{step.model[0]}B, {step.batch} x {step.sequence}",
        f"{step.tokens_per_second:,}",
        *(f"{planned.timing.tokens / planned.timing.compute_seconds:,.0f}" for planned in plans),
        step.source,
    )
    return f"| {' | '.join(cells)} |"


def family_row(model: str, gpu: str, gigabytes: int, ram: int) -> str:
    """Returns the lines of `offload plan` for a preset on a card, as a row."""
    asked = PlanOptions(model=model, gpu=gpu, ram=f"{ram}GB", drive=(_FAMILY_DRIVE,), seq_len=_SEQUENCE)
    name = f"{gpu.removesuffix(' 16GB')}, {gigabytes} GB"
    try:
        planned = request.planned(asked)
    except BudgetError:
        return f"| {' | '.join((model, name, 'does not fit', *[''] * (len(_FAMILY_NAMES)), ''))} |"
    advice = recommend.advise(planned, of_tokens=False, best=True)
    rows = output.summary(planned, advice, output.Asked(endurance=int(_FAMILY_TBW)))
    text = {label: words for label, words in rows if label}
    timing = planned.timing
    cells = (
        text["fits"].partition(": ")[2].replace("weights on ", "").replace("states on ", ""),
        text["speed"].partition(" tokens/s")[0],
        text["speed"].partition("take ")[2],
        text["step"].replace(" tokens", ""),
        f"{timing.limit} {timing.limit_seconds / timing.seconds:.0%}",
        text["change"].replace(" the tokens/s", ""),
        text.get("wear", "none").rpartition("lasts ")[2],
        *(text[tier].rpartition("  ")[2] for tier in ("GPU", "RAM", "drive")),
    )
    return f"| {' | '.join((model, name, *cells))} |"


def small_row(model: tuple[int, int], gpu: str) -> str:
    """Returns one row of the table of smaller cards; the arguments are those of `row`."""
    return row(model, gpu, _SMALL_BANDWIDTH, 1, _SMALL_RAM)


def row(model: tuple[int, int], gpu: str, bandwidth: float | None, drives: int, ram: int = _RAM) -> str:
    """Returns one row of the table.

    A model is billions of parameters, and layers; None is the bandwidth that a plan assumes.
    """
    planned = fastest(model, gpu, bandwidth, drives, ram)
    memory, timing = planned.memory, planned.timing
    zero = memory.config.zero_optimization
    cells = (
        f"{model[0]}B",
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
    timing = planned.timing
    return f"{timing.limit} {timing.limit_seconds / timing.seconds:.0%}"


def _drive_life(planned: Planned, endurance: float) -> str:
    """Returns the time until `endurance` bytes are written by training day and night; empty if nothing is written."""
    years = output.years(planned, output.Asked(endurance=int(endurance)))
    return "" if years is None else format_time(years * output.YEAR)


@functools.cache
def fastest(model: tuple[int, int], gpu: str, bandwidth: float | None, drives: int, ram: int) -> Planned:
    """Returns the plan with the fastest micro-batch of `_BATCHES`; a smaller one has to be faster by `_WORTH`.

    The arguments are those of `row`.
    """
    billions, layers = model
    hardware = described(gpu, ram, [parse_drive(_DRIVE)] * drives, bandwidth)
    shape = from_count(billions * 10**9, layers, _SEQUENCE)
    best: Planned | None = None
    for batch in _BATCHES:
        try:
            choice = recommend.choose(shape, hardware, Load(batch, _ACCUMULATION, chunked_loss=True), None)
        except BudgetError:
            # Not even one sequence fits: the error says why.
            if batch == _BATCHES[-1] and best is None:
                raise
            continue
        if best is None or choice.timing.tokens_per_second > _WORTH * best.timing.tokens_per_second:
            best = choice
        if best.load.alive > 1:
            break  # smaller micro-batches move the same bytes, and compute less well
    assert best is not None
    return best


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
    replaced(
        README,
        tuple(f"| {model[0]}B | {gpu[:8]}" for model, gpu, *_ in README_CASES),
        [readme_row(*case) for case in README_CASES],
    )
    replaced(CARD_PAGE, ("| 64 GB |", "| 128 GB |"), [card_row(*case) for case in CARD_CASES])
    replaced(ORDER_PAGE, ("| 8,192: ", "| 20,480: ", "| 65,536: "), [order_row(*case) for case in ORDER_CASES])
