"""Options of `offload plan`, in groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from offload.cli.console import Json
from offload.cli.options import option

_MODEL, _MACHINE, _STEP, _OUTPUT = "Model", "Machine", "Step", "Output"


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `offload plan` as they are typed. None stands for an option that was not given."""

    model: Annotated[
        str | None,
        option(
            _MODEL, "--model", "A preset, such as llama-7b, or a folder with a config.json.", "--model-name-or-path"
        ),
    ] = None
    parameters: Annotated[
        str | None, option(_MODEL, "--parameters", "Instead of a model: number of parameters, as 13B or 350M.")
    ] = None
    layers: Annotated[int | None, option(_MODEL, "--layers", "With --parameters: number of layers.")] = None
    lora: Annotated[
        str | None,
        option(_MODEL, "--lora", "Train adapters alone, as `offload train --lora`.", metavar="r=N[,…]"),
    ] = None
    load_in_4bit: Annotated[
        bool, option(_MODEL, "--load-in-4bit", "With --lora: store the frozen matrices in 4 bits (nf4).")
    ] = False
    load_in_8bit: Annotated[bool, option(_MODEL, "--load-in-8bit", "The same in 8 bits (int8).")] = False
    gpu: Annotated[
        str | None,
        option(
            _MACHINE,
            "--gpu",
            "Describe a machine: 12GB, or a name as 'RTX 4090', 'A100 80GB', H200. [default: as probed]",
        ),
    ] = None
    ram: Annotated[str | None, option(_MACHINE, "--ram", "RAM of the machine, as 64GB. [described: 64GB]")] = None
    drive: Annotated[
        list[str] | None,
        option(
            _MACHINE,
            "--drive",
            "A drive, as 7GB/s,4GB/s or 7GB/s,4GB/s,2TB; may repeat.",
            metavar="READ,WRITE[,FREE]",
        ),
    ] = None
    memory_bandwidth: Annotated[
        str | None, option(_MACHINE, "--memory-bandwidth", "Bandwidth of a described machine's RAM, as 80GB/s.")
    ] = None
    pcie: Annotated[str | None, option(_MACHINE, "--pcie", "Bandwidth of copies to a described GPU, as 25GB/s.")] = None
    nvme_path: Annotated[
        list[str] | None,
        option(_MACHINE, "--nvme-path", "Folders on probed drives; may repeat. [default: the last]", metavar="PATH"),
    ] = None
    config: Annotated[
        Path | None,
        option(_STEP, "--config", "DeepSpeed JSON file to plan for. [default: tiers that fit]", "--deepspeed"),
    ] = None
    dtype: Annotated[
        str | None,
        option(_STEP, "--dtype", "auto, bf16, fp16 or fp32; auto: as train, bf16 where described. [default: auto]"),
    ] = None
    moments: Annotated[
        str | None, option(_STEP, "--moments", "Form of the optimizer's moments: fp32, bf16 or int8. [default: fp32]")
    ] = None
    master: Annotated[
        str | None, option(_STEP, "--master", "Form of the master of a bf16 weight: fp32 or bf24. [default: fp32]")
    ] = None
    durability: Annotated[str | None, option(_STEP, "--durability", "auto, step or none. [default: auto]")] = None
    batch_size: Annotated[
        int | None,
        option(_STEP, "--batch-size", "Sequences of a micro-batch. [default: 1]", "--per-device-train-batch-size"),
    ] = None
    seq_len: Annotated[int, option(_STEP, "--seq-len", "Tokens of a sequence.", "--max-length", "--max-seq-length")] = (
        1024
    )
    accumulation: Annotated[
        int | None,
        option(_STEP, "--accumulation", "Micro-batches of a step. [default: 1]", "--gradient-accumulation-steps"),
    ] = None
    recompute: Annotated[
        bool | None,
        option(
            _STEP,
            "--gradient-checkpointing/--no-gradient-checkpointing",
            "Recompute activations in backward. [default: if they do not fit]",
            "--recompute/--no-recompute",
            "--activation-checkpointing/--no-activation-checkpointing",
        ),
    ] = None
    activations: Annotated[
        str | None,
        option(
            _STEP,
            "--activations",
            "Recompute blocks, and keep their inputs on: device, cpu, nvme or auto. [default: if they do not fit]",
        ),
    ] = None
    chunked_loss: Annotated[
        bool | None,
        option(
            _STEP,
            "--chunked-loss/--no-chunked-loss",
            "Compute the loss for chunks of tokens, or from all logits. [default: as train, in chunks where the model "
            "allows it]",
        ),
    ] = None
    tile_mlp: Annotated[
        str | None,
        option(_STEP, "--tile-mlp", "Compute MLPs in tiles of the sequence: auto, off or their number. [default: off]"),
    ] = None
    schedule: Annotated[
        str | None,
        option(
            _STEP,
            "--schedule",
            "auto, layer_major (all micro-batches pass a block before the next) or micro_batch_major. [default: auto]",
        ),
    ] = None
    speculate: Annotated[
        bool | None,
        option(
            _STEP, "--speculate/--no-speculate", "Update layers under the backward. [default: where states are on disk]"
        ),
    ] = None
    longest_sequence: Annotated[
        bool,
        option(_OUTPUT, "--longest-sequence", "Search the longest sequence for each way to keep activations, instead."),
    ] = False
    measure: Annotated[
        bool,
        option(_OUTPUT, "--measure", "Run the model, or some layers, on this machine first: a better prediction."),
    ] = False
    tokens: Annotated[str | None, option(_OUTPUT, "--tokens", "Tokens to train on, as 1B: predicts the time.")] = None
    steps: Annotated[
        int | None,
        option(_OUTPUT, "--steps", "Instead of --tokens: steps to train, as 200: predicts the time.", "--max-steps"),
    ] = None
    tbw: Annotated[
        str | None,
        option(_OUTPUT, "--tbw", "Rated endurance of each drive, as 1200TB. [default: by SMART]"),
    ] = None
    write: Annotated[
        Path | None,
        option(
            _OUTPUT,
            "--write",
            "Write a config to train with, with the defaults of `offload train`.",
            "--output",
            metavar="FILE",
        ),
    ] = None
    json_output: Json = False
