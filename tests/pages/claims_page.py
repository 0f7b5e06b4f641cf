"""Writes docs/reference/claims.md: what tutorials of DeepSpeed claim in numbers, and what shows it: `python -m
tests.pages.claims_page`.

All numbers of the tables come from the planner and the estimators. Sentences about measurements cite the page that has
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from offload.layout.modes import SIGN_BLOCK
from offload.optimizers.one_bit import ROW_NBYTES
from offload.planner.activations import Load, need
from offload.planner.deepspeed_estimates import Estimate, estimates_of_count
from offload.planner.hardware import described, parse_drive
from offload.planner.model_shape import from_count, from_preset
from offload.planner.output import seconds_text
from offload.planner.ranks import Cluster, fastest, plan_stages
from offload.sizes import GIB, format_size

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "claims.md"
_PLACES = {"none": "GPU", "cpu": "RAM", "nvme": "drive"}
_DRIVE = "7GB/s,4GB/s"

_HEAD = """<!-- written by: python -m tests.pages.claims_page -->
# Claims in numbers

Tutorials of DeepSpeed promise numbers. This page answers each: **by count** (bytes follow from the layout of a run),
**by simulation** (a plan with published rates), **by measurement** (a page of figures), or **not shown**. Machines are
those of the tutorials; none of them was at hand. One H200 was measured, and no two GPUs have run this library.

## Models on several GPUs

[`offload plan --gpus`](../guides/plan-a-run.md#several-gpus-and-machines) for each machine, with sequences of 2,048
tokens and AdamW. A step takes as long as its busiest resource, so **no run is faster than these rows**. "sent" is what
one GPU sends in a step, as `engine.communication()` counts it. A dash stands for a row whose claim has no number.

| model | machine | stage; weights, states | a GPU | sent | step | limit | at most tokens/s | claimed tokens/s |
|---|---|---|---|---|---|---|---|---|
"""
_STATES_HEAD = """
## States of a model with 13B parameters

By count, in bf16 with AdamW, without activations: the bytes of one GPU, by
`offload.estimate_zero2_model_states_mem_needs_all_cold` and `…zero3…`. In stage 2 all weights stay on the GPU. In
stage 3 a GPU has its shard, and room for three layers.

| GPUs | stage 2 | stage 2, states in RAM | stage 3 | stage 3, states in RAM | stage 3, all in RAM or on drives |
|---|---|---|---|---|---|
"""
_CLAIMS_HEAD = """
## Each claim

| claim | shown | answer |
|---|---|---|
"""


class Machine(NamedTuple):
    """A machine of a tutorial."""

    words: str
    gpu: str
    ram: int
    """GiB of each machine."""
    cluster: Cluster
    dtype: str = "bf16"


A100 = Machine("8 x A100 80 GB, 512 GB", "A100 80GB", 512, Cluster(8, link=300e9))
T4 = Machine("2 x T4, 64 GB", "T4", 64, Cluster(2), "fp16")
V100 = Machine("16 x V100 32 GB in 2 machines, 25 Gbit/s", "V100", 512, Cluster(8, 2, 25e9 / 8), "fp16")

MODELS: tuple[tuple[str, tuple[int, int], Machine, str], ...] = (
    ("LLaMA 7B", (7, 32), A100, "about 7,000 (ZeRO-2)"),
    ("LLaMA 13B", (13, 40), A100, "-"),
    ("LLaMA 30B", (30, 60), A100, "-"),
    ("LLaMA 65B", (65, 80), A100, "-"),
    ("1B", (1, 16), T4, "- (it trains)"),
    ("13B", (13, 40), V100, "-"),
)


def row(name: str, model: tuple[int, int], machine: Machine, claimed: str) -> str:
    """Returns the row of a model, in billions of parameters and layers, on the fastest stage of a machine."""
    hardware = described(machine.gpu, machine.ram * GIB, [parse_drive(_DRIVE)], dtype=machine.dtype)
    shape = from_count(model[0] * 10**9, model[1], 2048)
    plan = fastest(plan_stages(shape, hardware, Load(1, 1, chunked_loss=True), machine.cluster, dtype=machine.dtype))
    cells = (
        name,
        machine.words,
        f"{plan.stage}; {_PLACES[plan.weights]}, {_PLACES[plan.states]}",
        format_size(plan.device),
        format_size(plan.traffic.nbytes),
        seconds_text(plan.seconds),
        plan.limit,
        f"{plan.tokens_per_second:,.0f}",
        claimed,
    )
    return f"| {' | '.join(cells)} |"


def estimates_of_13b(gpus: int, stage: int) -> list[Estimate]:
    """Returns the bytes of 13B in 40 layers, on machines of 8 GPUs at most."""
    return estimates_of_count(13 * 10**9, 13 * 10**9 // 40, min(gpus, 8), max(gpus // 8, 1), stage)


def states_row(gpus: int) -> str:
    """Returns the bytes of one of so many GPUs in each stage."""
    second = {(each.weights, each.states): format_size(each.device) for each in estimates_of_13b(gpus, 2)}
    third = {(each.weights, each.states): format_size(each.device) for each in estimates_of_13b(gpus, 3)}
    cells = (second["none", "none"], second["none", "cpu"], third["none", "none"], third["none", "cpu"])
    return f"| {gpus} | {' | '.join(cells)} | {third['nvme', 'nvme']} |"


def saved_by_recomputation() -> float:
    """Returns the fraction of activations that recomputed blocks leave out, for llama-13b at 4 x 2,048 tokens."""
    shape = from_preset("llama-13b", 2048, 2)
    assert shape is not None
    kept, again = (need(shape, Load(4, 1, recompute, chunked_loss=True)).device for recompute in (False, True))
    return 1 - again / kept


def claims() -> list[tuple[str, str, str]]:
    """Returns each claim, how it is shown, and the answer."""
    single, eight, many = ({(e.weights, e.states): e.device for e in estimates_of_13b(n, 3)} for n in (1, 8, 64))
    whole, kept = single["none", "none"], {(e.weights, e.states): e.device for e in estimates_of_13b(64, 2)}
    times = {n: whole / each["none", "none"] for n, each in ((8, eight), (64, many))}
    return [
        (
            "ZeRO divides states: 4 times and up to 8 times less memory of each GPU",
            "by count",
            f"stage 3 on 8 GPUs: {times[8]:.1f} times less for 13B, on 64: {times[64]:.0f} times. The states alone, "
            "without buffers, are divided by the number of GPUs in stages 1 to 3. Stage 2 keeps the weights: "
            f"{whole / kept['none', 'none']:.1f} times less on 64",
        ),
        (
            "13B: 48 GB, 16 GB and 6 GB of a GPU",
            "by count",
            f"a GPU takes {format_size(many['none', 'none'])} in stage 3 on 64 GPUs, "
            f"{format_size(eight['none', 'none'])} on 8, and {format_size(single['nvme', 'nvme'])} on one GPU with all "
            "states in RAM or on drives. The tutorials do not say on how many GPUs theirs are",
        ),
        (
            "ZeRO-Infinity takes 4 times less memory than tensor parallelism",
            "by count",
            f"states of 13B take {format_size(whole)} of one GPU without offload and "
            f"{format_size(single['nvme', 'nvme'])} with it; Megatron itself was not measured",
        ),
        ("models 3 to 5 times larger than with DDP on the same machine", "by count and by measurement", larger()),
        (
            "activation checkpointing saves 80 % of the activations",
            "by count",
            f"{saved_by_recomputation():.0%} for llama-13b at 4 x 2,048 tokens with the loss in chunks".replace(
                "%", " %"
            ),
        ),
        (
            "13B trains on one GPU",
            "by measurement",
            "on an H200 held to 24 GiB: 20.8 s for one step, with int8 moments and masters of 24 bits "
            "([figures](../benchmarks/2026-11-h200.md)). A whole run, and 13B in full precision on a card of 24 GB, "
            "are [planned](../guides/finetune-13b.md) and not run",
        ),
        (
            "20B needs 48 GB of a GPU",
            "by simulation",
            "fewer: `offload plan --parameters 20B --layers 44 --gpu 'RTX 3090'`",
        ),
        ("1B trains on two T4", "by simulation", "the row above; no T4 has run it"),
        (
            "consumer cards such as an RTX 3090",
            "by simulation",
            "[the plan table](plan-table.md); no consumer card has run it",
        ),
        (
            "176 TFLOPS of each of 800 A100",
            "not shown",
            "one H200 reached 364 TFLOPS with llama-1b in memory, 260 with weights and states in RAM "
            "([figures](../benchmarks/2026-11-h200.md))",
        ),
        (
            "89 % efficiency from 256 to 512 GPUs; thousands of GPUs",
            "not shown",
            "eight ranks on one CPU are the most that ran",
        ),
        (
            "1-bit Adam: 5 times fewer bytes between ranks",
            "by count",
            "over a run whose warm-up is that of the paper, 23,000 of 152,000 steps: "
            f"{fewer_by_signs(4):.1f} times fewer than gradients in fp32, {fewer_by_signs(2):.1f} than in 16 bits, "
            "as `engine.communication()` counts on gloo ranks: two of 1-bit LAMB, two and four of 1-bit Adam",
        ),
        (
            "fused Adam: steps of the optimizer 5 times faster",
            "not shown",
            "Adam on the CPU runs at the rate of the memory ([figures](../benchmarks/README.md)); the "
            "GPU's was not compared with an unfused one",
        ),
        (
            "states on NVMe make 20B 1.2 times faster",
            "by simulation: false",
            "a drive is slower than RAM: a plan says that NVMe limits",
        ),
        (
            "150 samples/s of a 1B model; training 30 % faster by accumulation",
            "not shown",
            "accumulation sends fewer bytes, by count: [what ranks send](../concepts/several-ranks.md#what-ranks-send)",
        ),
        ("200B with 16-way model parallelism", "not shown", "tensor parallelism was run on 8 ranks at most"),
        ("sparse attention 4 times faster", "not shown", "there is no sparse attention here; the key is refused"),
        ("copies between CPU and GPU 20 % cheaper on new chips", "not shown", "none of them was at hand"),
    ]


def fewer_by_signs(itemsize: int) -> float:
    """Returns how many times fewer bytes a run of 1-bit Adam sends than one whose ranks add up whole gradients.

    Signs and gradients take the same two ways: to the rank that adds them up, and back.
    """
    warm = 23 / 152
    return 1 / (warm + (1 - warm) * ROW_NBYTES / SIGN_BLOCK / itemsize)


def larger() -> str:
    """Returns the bytes of 7B on a GPU of 8 with DDP's states and with divided ones."""
    per_gpu = {
        stage: {(e.weights, e.states): e.device for e in estimates_of_count(7 * 10**9, 7 * 10**9 // 32, 8, 1, stage)}
        for stage in (2, 3)
    }
    ddp = 16 * 7 * 10**9
    times = [ddp / per_gpu[2]["none", "cpu"], ddp / per_gpu[3]["none", "none"]]
    return (
        f"DDP keeps 16 bytes a parameter on each GPU, {format_size(ddp)} for 7B; on 8 GPUs stage 2 with states in RAM "
        f"takes {times[0]:.1f} times less, stage 3 {times[1]:.1f} times less. Larger than RAM: 9.2B in 4 GiB "
        "([figures](../benchmarks/2026-11-larger.md))"
    )


def document() -> str:
    """Returns the text of the page."""
    rows = [row(*case) for case in MODELS]
    states = [states_row(gpus) for gpus in (1, 8, 64)]
    answers = [f"| {' | '.join(answer)} |" for answer in claims()]
    return "".join([_HEAD, *(f"{line}\n" for line in rows), _STATES_HEAD, *(f"{line}\n" for line in states)]) + (
        _CLAIMS_HEAD + "".join(f"{line}\n" for line in answers)
    )


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
