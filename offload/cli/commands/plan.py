"""Commands that precede a run: `offload probe` measures the machine, `offload plan` predicts a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offload.cli.console import BAD_INPUT, FAILED, Json, errors, parse_count
from offload.cli.options import UNDERSCORES, Grouped, option, takes_options
from offload.cli.progress import measuring
from offload.cli.signals import exit_on_signal, signals
from offload.errors import ConfigError
from offload.sizes import parse_size

if TYPE_CHECKING:
    from rich.console import Console

    from offload.planner.model_shape import Adapters
    from offload.planner.recommend import Planned
    from offload.planner.request import Described, Model, Step

_MODEL, _MACHINE, _STEP, _OUTPUT = "Model", "Machine", "Step", "Output"
_REACH = ("inputs of blocks", "all logits", "in chunks", "micro-batch", "step")
_ORDERS = ("order", "updates under", "step", "read", "written", "if it clips")
_LONGEST = ("inputs of blocks", "all logits", "in chunks", "states", "step", "tokens/s")


def register(app: typer.Typer) -> None:
    """Adds these commands to `app`."""
    app.command()(probe)
    app.command(cls=Grouped, context_settings=UNDERSCORES)(plan)


def probe(
    paths: Annotated[
        list[str] | None, typer.Argument(help="Folders for swap files, one for each drive. [default: .]")
    ] = None,
    device: Annotated[
        str, typer.Option(help="Where training will compute: auto, cpu, cuda, or another accelerator of torch.")
    ] = "auto",
    size: Annotated[
        str, typer.Option(help="Bytes at most of the file that is written and read on each drive.")
    ] = "256MiB",
    keep: Annotated[bool, typer.Option("--keep/--no-keep", help="Store the result for `offload plan`.")] = True,
    json_output: Json = False,
) -> None:
    """Measure this machine, in under a minute: drives, memory, copies, matrix products and optimizer in each dtype.

    Example: offload probe /mnt/nvme
    """
    from rich.console import Console
    from rich.table import Table

    from offload.hardware import probe as probing

    console = Console(stderr=json_output, highlight=False)
    with errors(BAD_INPUT):
        nbytes = parse_size(size)
        # All checks precede the measurement, which takes up to a minute.
        probing.device_of(device)
        probing.check_size(nbytes)
        probing.check_folders(paths or ["."])
        if keep:
            probing.check_kept()
    with errors(FAILED), signals(), measuring() as tell:
        found = probing.probe(paths or ["."], device, nbytes, tell)
        cache = probing.keep(found) if keep else None
    if json_output:
        for doubt in found.doubts:
            console.print(f"warning: {doubt}", soft_wrap=True, markup=False)
        # Warnings went to stderr above: stdout contains the JSON object only.
        print(json.dumps(probing.as_json(found)), flush=True)
        return
    table = Table(show_header=False, box=None)
    for name, value in probing.lines(found):
        table.add_row(name, value)
    console.print(table, markup=False)
    for doubt in found.doubts:
        console.print(f"warning: {doubt}", soft_wrap=True, markup=False)
    console.print(f"measured in {found.seconds:.0f} s" + (f", stored in {cache}" if cache else ""), soft_wrap=True)


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
            "Describe a machine: 24GB, or a name as 'RTX 4090', 'A100 80GB', H200. [default: as probed]",
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
            _STEP, "--chunked-loss/--no-chunked-loss", "Compute the loss for chunks of tokens. [default: all logits]"
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


@takes_options(PlanOptions)
def plan(typed: PlanOptions) -> None:
    """Predict where a run's states go and how fast a step will be, without a run.

    Example: offload plan --parameters 13B --layers 40 --gpu 24GB --ram 64GB --drive 7GB/s,4GB/s
    """
    from rich.console import Console

    from offload.finetune.options import Start, recipe
    from offload.planner import request as ask
    from offload.planner.advice import advise, compare
    from offload.planner.reach import reach
    from offload.planner.report import reach as reach_report
    from offload.planner.report import text as report
    from offload.planner.report.json_object import as_json
    from offload.presets import PRESETS

    console = Console(stderr=typed.json_output, highlight=False, markup=False)
    if typed.longest_sequence:
        _print_longest(typed, console)
        return
    with errors(BAD_INPUT):
        planned = _planned(typed)
        wanted = report.Asked(
            None if typed.tokens is None else parse_count(typed.tokens), ask.endurance(planned.hardware, typed.tbw)
        )
        # This call takes the longest: it repeats the prediction for every change that could be advised.
        advice = advise(planned)
        ways = reach(planned)
        orders = compare(planned)
    with errors(FAILED):
        if typed.write is not None:
            # As in `offload train`, the default learning rate depends on whether the model folder contains weights.
            folder = None if typed.model is None or typed.model in PRESETS else Path(typed.model)
            # Without a config file the written config also contains the recipe of `offload train`.
            ask.write_config(
                planned, typed.write, recipe(Start.of(folder, typed.lora is not None)) if typed.config is None else {}
            )
    if typed.json_output:
        print(json.dumps(as_json(planned, advice, wanted, ways, orders)), flush=True)
        return
    console.print(report.verdict(planned, advice), soft_wrap=True)
    for line in report.heading(planned):
        console.print(line, soft_wrap=True)
    _print_table(console, ("", "device", "host", "disk"), report.table(planned))
    for line in report.lines(planned, advice, wanted):
        console.print(line, soft_wrap=True)
    if orders:
        console.print(report.orders_heading(planned), soft_wrap=True)
        _print_table(console, _ORDERS, report.orders_table(orders))
    console.print(reach_report.reach_heading(planned), soft_wrap=True)
    _print_table(console, _REACH, reach_report.reach_table(planned, ways))
    if typed.write is not None:
        console.print(f"written to {typed.write}", soft_wrap=True)


def _print_table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table whose first column is text and whose others are numbers."""
    from rich.table import Table

    table = Table(box=None)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _print_longest(typed: PlanOptions, console: Console) -> None:
    """Prints the longest sequence for each way to keep activations, and the config of the longest."""
    from offload.planner import request as ask
    from offload.planner.report import reach as reach_report

    with errors(BAD_INPUT):
        if typed.write is not None or typed.measure:
            raise ConfigError("--longest-sequence writes and measures nothing; leave out --write and --measure")
        found = ask.longest(_model(typed), _machine(typed), _step(typed), typed.config)
    if typed.json_output:
        print(json.dumps(reach_report.longest_json(found)), flush=True)
        return
    console.print(reach_report.longest_heading(found), soft_wrap=True)
    _print_table(console, _LONGEST, reach_report.longest_table(found))
    for line in reach_report.longest_lines(found):
        console.print(line, soft_wrap=True)


def _planned(typed: PlanOptions) -> Planned:
    """Returns the plan that the options ask for. With `--measure` the model is timed first, which may take minutes."""
    from offload.planner import request as ask

    model, machine, step = _model(typed), _machine(typed), _step(typed)
    # The file to write is checked before the model is timed: a bad path must not cost minutes.
    ask.check_target(typed.write)
    if not typed.measure:
        return ask.planned(model, machine, step, typed.config)
    # Nothing needs cleaning up while the model runs, so a signal may end the process inside native code.
    with exit_on_signal("stopped; nothing was written"), measuring() as tell:
        return ask.planned(model, machine, step, typed.config, measure=True, tell=tell)


def _model(typed: PlanOptions) -> Model:
    """Returns the options that describe the model."""
    from offload.planner.request import Model

    return Model(
        name=typed.model,
        parameters=None if typed.parameters is None else parse_count(typed.parameters),
        layers=typed.layers,
        adapters=_adapters(typed),
    )


def _adapters(typed: PlanOptions) -> Adapters | None:
    """Returns the adapters that the options ask for; None for a model that trains as a whole."""
    from offload.config import load_config, read_json
    from offload.finetune.lora import adapt, parse_lora
    from offload.planner.model_shape import Adapters

    given = (("nf4", typed.load_in_4bit), ("int8", typed.load_in_8bit))
    forms: list[str | None] = [form for form, wanted in given if wanted]
    if len(forms) > 1 or (forms and (typed.lora is None or typed.config is not None)):
        raise ConfigError(
            '--load-in-4bit or --load-in-8bit goes with --lora; beside --config set "frozen" in the config'
        )
    if typed.lora is None:
        return None
    if typed.model is None:
        raise ConfigError("--lora makes adapters of a model that is built: give --model")
    if typed.config is not None:
        forms.append(load_config(read_json(typed.config)).offload.frozen)
    lora = parse_lora(typed.lora)
    return Adapters(lambda model: adapt(model, lora), forms[0] if forms else None)


def _machine(typed: PlanOptions) -> Described:
    """Returns the options that describe the machine."""
    from offload.planner.request import Described

    return Described(
        gpu=typed.gpu,
        ram=typed.ram,
        drives=tuple(typed.drive or ()),
        memory=typed.memory_bandwidth,
        link=typed.pcie,
        paths=tuple(typed.nvme_path or ()),
    )


def _step(typed: PlanOptions) -> Step:
    """Returns the options that describe a step."""
    from offload.planner.request import Step

    return Step(
        batch=typed.batch_size,
        sequence=typed.seq_len,
        accumulation=typed.accumulation,
        recompute=typed.recompute,
        # The planner takes None for "auto".
        dtype=None if typed.dtype == "auto" else typed.dtype,
        moments=typed.moments,
        master=typed.master,
        durability=typed.durability,
        activations=typed.activations,
        chunked_loss=typed.chunked_loss,
        tile_mlp=typed.tile_mlp,
        schedule=typed.schedule,
        speculate=typed.speculate,
    )
