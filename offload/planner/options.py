"""Options of `offload plan`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from offload.options import argument, checked, dtypes, option, switch
from offload.sizes import parse_budget, parse_count, parse_memory, parse_rate, parse_tbw

if TYPE_CHECKING:
    from torch import nn


class Adapters(NamedTuple):
    """Adapters over a model that is frozen otherwise."""

    make: Callable[[nn.Module], nn.Module]
    """Returns a model with adapters; the model is on the meta device."""
    frozen: str | None = None
    """Block format of frozen matrices, as in the config."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `offload plan`. None and () leave a value to its default, the config, or the machine."""

    name: str | None = argument("The same as --model.", default=None, metavar="MODEL", group="Model")
    model: str | None = option(
        "A preset, such as llama-7b, a folder with a config.json, or a model of the hub, as Qwen/Qwen3-8B.",
        "--model-name-or-path",
        group="Model",
    )
    parameters: str | None = option("Instead of a model: number of parameters, as 13B or 350M.", **checked(parse_count))
    layers: int | None = option("With --parameters: number of layers.", min=1)
    lora: str | None = option("Train adapters alone, as `offload train --lora`.", metavar="r=N[,…]")
    load_in_4bit: bool = switch("With --lora: store the frozen matrices in 4 bits (nf4).")
    load_in_8bit: bool = switch("The same in 8 bits (int8).")
    gpu: str | None = option(
        "Describe a machine: 12GB, or a name as 'RTX 4090', 'A100 80GB', H200. [default: as probed]", group="Machine"
    )
    gpus: int | None = option("GPUs of each machine: plans ZeRO stages 0 to 3 by formulas.", metavar="N")
    nodes: int = option("With --gpus: machines.", default=1, metavar="N")
    link: str | None = option(
        "With --gpus: bandwidth of a machine's network, or of a GPU in one machine, as 25GB/s. [default: of --pcie]",
        **checked(parse_rate),
    )
    tensor: int = option("With --gpus: GPUs that divide each layer.", default=1, metavar="N")
    pipeline: int = option("With --gpus: stages of a pipeline.", default=1, metavar="N")
    ram: str | None = option("RAM of the machine, as 64GB. [described: 64GB]", **checked(parse_memory))
    drive: tuple[str, ...] = option(
        "A drive, as 7GB/s,4GB/s or 7GB/s,4GB/s,2TB; may repeat.", default=(), metavar="READ,WRITE[,FREE]"
    )
    memory_bandwidth: str | None = option("Bandwidth of a described machine's RAM, as 80GB/s.", **checked(parse_rate))
    pcie: str | None = option("Bandwidth of copies to a described GPU, as 25GB/s.", **checked(parse_rate))
    nvme_path: tuple[str, ...] = option(
        "Folders on probed drives; may repeat. [default: the last]", default=(), metavar="PATH"
    )
    config: Path | None = option(
        "DeepSpeed JSON file to plan for. [default: tiers that fit]", "--deepspeed", group="Step"
    )
    dtype: str | None = option(
        "auto, bf16, fp16 or fp32; auto: as train, bf16 where described. [default: auto]", **dtypes()
    )
    moments: str | None = option("Form of the optimizer's moments: fp32, bf16 or int8. [default: fp32]")
    master: str | None = option("Form of the master of a bf16 weight: fp32 or bf24. [default: fp32]")
    durability: str | None = option(
        "auto, step or none, or steps from one commit to the next. [default: auto]", metavar="WORD|STEPS"
    )
    drive_budget: str | None = option(
        "Bytes that may be written to each drive, as 1TB/day or 600TB/5y.",
        **checked(parse_budget) | {"metavar": "SIZE/TIME"},
    )
    batch_size: int | None = option(
        "Sequences of a micro-batch. [default: what is fastest, up to 32,768 tokens]", "--per-device-train-batch-size"
    )
    seq_len: int = option("Tokens of a sequence.", "--max-length", "--max-seq-length", default=1024)
    accumulation: int | None = option(
        "Micro-batches of a step. [default: steps of 65,536 tokens]", "--gradient-accumulation-steps"
    )
    recompute: bool | None = option(
        "Recompute activations in backward. [default: if they do not fit]",
        "--recompute/--no-recompute",
        "--activation-checkpointing/--no-activation-checkpointing",
        name="--gradient-checkpointing/--no-gradient-checkpointing",
    )
    activations: str | None = option(
        "Recompute blocks, and keep their inputs on: device, cpu, nvme or auto. [default: if they do not fit]"
    )
    chunked_loss: bool | None = option(
        "Compute the loss for chunks of tokens, or from all logits. [default: as train, in chunks where the model "
        "allows it]",
        name="--chunked-loss/--no-chunked-loss",
    )
    tile_mlp: str | None = option("Compute MLPs in tiles of the sequence: auto, off or their number. [default: off]")
    schedule: str | None = option(
        "auto, layer_major (all micro-batches pass a block before the next) or micro_batch_major. [default: auto]"
    )
    speculate: bool | None = option(
        "Update layers under the backward. [default: where states are on disk]", name="--speculate/--no-speculate"
    )
    longest_sequence: bool = switch(
        "Search the longest sequence for each way to keep activations, instead.", group="Output"
    )
    measure: bool = switch("Run the model, or some layers, on this machine first: a better prediction.")
    details: bool = switch("Print all tables, changes, orders, rates and assumptions.")
    tokens: str | None = option("Tokens to train on, as 1B: predicts the time. [default: 100M]", **checked(parse_count))
    price: float | None = option("Rent of the machine in dollars an hour: predicts the cost.")
    prices: str | None = option(
        "Predict dollars of power or rent and of worn drives, and the cheapest change. A TOML file, or usual: the "
        "package's prices.",
        metavar="usual|FILE",
    )
    steps: int | None = option("Instead of --tokens: steps to train, as 200: predicts the time.", "--max-steps")
    tbw: str | None = option("Rated endurance of each drive, as 1200TB. [default: by SMART]", **checked(parse_tbw))
    write: Path | None = option(
        "Write a config to train with, with the defaults of `offload train`.", "--output", metavar="FILE"
    )
    adapters: Adapters | None = None
    """Of the options --lora and --load-in-…; None for a model that trains as a whole."""
    chunks: bool = True
    """True if the loss of the model can be computed for chunks of tokens."""
