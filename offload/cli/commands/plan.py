"""`offload plan`: predicts a run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from offload.cli.console import (
    BAD_INPUT,
    FAILED,
    Json,
    errors,
    make_table,
    measuring,
    parse_count,
    status_line,
    without_collector,
)
from offload.cli.options import dtypes, option, takes_options
from offload.cli.signals import exit_on_signal
from offload.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from offload.planner.model_shape import Adapters
    from offload.planner.output import Asked
    from offload.planner.reach import Reach
    from offload.planner.recommend import Advice, Ordered, Planned, Priced
    from offload.planner.request import PlanRequest


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of `offload plan` as they are typed. None stands for an option that was not given."""

    name: str | None = typer.Argument(None, metavar="MODEL", help="The same as --model.", rich_help_panel="Model")
    model: str | None = option(
        "A preset, such as llama-7b, a folder with a config.json, or a model of the hub, as Qwen/Qwen3-8B.",
        "--model-name-or-path",
        group="Model",
    )
    parameters: str | None = option("Instead of a model: number of parameters, as 13B or 350M.")
    layers: int | None = option("With --parameters: number of layers.")
    lora: str | None = option("Train adapters alone, as `offload train --lora`.", metavar="r=N[,…]")
    load_in_4bit: bool = option("With --lora: store the frozen matrices in 4 bits (nf4).")
    load_in_8bit: bool = option("The same in 8 bits (int8).")
    gpu: str | None = option(
        "Describe a machine: 12GB, or a name as 'RTX 4090', 'A100 80GB', H200. [default: as probed]", group="Machine"
    )
    gpus: int | None = option("GPUs of each machine: plans ZeRO stages 0 to 3 by formulas.", metavar="N")
    nodes: int = option("With --gpus: machines.", default=1, metavar="N")
    link: str | None = option(
        "With --gpus: bandwidth of a machine's network, or of a GPU in one machine, as 25GB/s. [default: of --pcie]"
    )
    tensor: int = option("With --gpus: GPUs that divide each layer.", default=1, metavar="N")
    pipeline: int = option("With --gpus: stages of a pipeline.", default=1, metavar="N")
    ram: str | None = option("RAM of the machine, as 64GB. [described: 64GB]")
    drive: list[str] | None = option(
        "A drive, as 7GB/s,4GB/s or 7GB/s,4GB/s,2TB; may repeat.", metavar="READ,WRITE[,FREE]"
    )
    memory_bandwidth: str | None = option("Bandwidth of a described machine's RAM, as 80GB/s.")
    pcie: str | None = option("Bandwidth of copies to a described GPU, as 25GB/s.")
    nvme_path: list[str] | None = option("Folders on probed drives; may repeat. [default: the last]", metavar="PATH")
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
        "Bytes that may be written to each drive, as 1TB/day or 600TB/5y.", metavar="SIZE/TIME"
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
    longest_sequence: bool = option(
        "Search the longest sequence for each way to keep activations, instead.", group="Output"
    )
    measure: bool = option("Run the model, or some layers, on this machine first: a better prediction.")
    details: bool = option("Print all tables, changes, orders, rates and assumptions.")
    tokens: str | None = option("Tokens to train on, as 1B: predicts the time. [default: 100M]")
    price: float | None = option("Rent of the machine in dollars an hour: predicts the cost.")
    prices: str | None = option(
        "Predict dollars of power or rent and of worn drives, and the cheapest change. A TOML file, or usual: the "
        "package's prices.",
        metavar="usual|FILE",
    )
    steps: int | None = option("Instead of --tokens: steps to train, as 200: predicts the time.", "--max-steps")
    tbw: str | None = option("Rated endurance of each drive, as 1200TB. [default: by SMART]")
    write: Path | None = option(
        "Write a config to train with, with the defaults of `offload train`.", "--output", metavar="FILE"
    )
    json_output: Json = False


_REACH = ("inputs of blocks", "all logits", "in chunks", "micro-batch", "step")
_ORDERS = ("order", "updates under", "step", "read", "written", "if it clips")
_LONGEST = ("inputs of blocks", "all logits", "in chunks", "states", "step", "tokens/s")


@takes_options(PlanOptions)
@without_collector()
def plan(typed: PlanOptions) -> None:
    """Predict where a run's states go, and how fast a step is.

    Example: offload plan qwen3-8b --gpu 24GB --ram 64GB --drive 7GB/s,4GB/s
    """
    from rich.console import Console

    with _working("loading torch"):
        from offload.hub import local_model
        from offload.planner import output
        from offload.planner.reach import reach
        from offload.planner.recommend import advise, compare, priced
        from offload.planner.request import write_config
        from offload.planner.sustained import sustained_steps
        from offload.presets import PRESETS
        from offload.prices import read_prices

    console = Console(stderr=typed.json_output, highlight=False, markup=False)
    with errors(BAD_INPUT):
        if typed.name is not None:
            if typed.model is not None:
                raise ConfigError(f"give {typed.name} or --model {typed.model}, not both")
            typed = dataclasses.replace(typed, name=None, model=typed.name)
        if typed.model is not None:
            typed = dataclasses.replace(typed, model=local_model(typed.model, config_only=not typed.measure))
    if typed.longest_sequence:
        _print_longest(typed, console)
        return
    if typed.gpus is not None or (typed.nodes, typed.link, typed.tensor, typed.pipeline) != (1, None, 1, 1):
        _print_ranks(typed, console)
        return
    with errors(BAD_INPUT):
        prices = None if typed.prices is None else read_prices(typed.prices)
        planned = _planned(typed)
        wanted = _asked(typed, planned)
        costs: Priced | None = None
        with _working("trying what could be changed") as show:
            # Each of these takes longer than the plan: it repeats the prediction for every change, way or order.
            whole = typed.details or typed.json_output
            given = typed.config is not None or typed.batch_size is not None or typed.accumulation is not None
            advice, ways, orders = advise(planned, given or whole, best=not whole), [], []
            if prices is not None:
                # What was said of this machine comes before what is usual.
                if typed.price is not None:
                    prices = prices.with_(rent=(typed.price, "--price"))
                if wanted.endurance is not None:
                    rating = wanted.endurance / max(len(planned.hardware.drives), 1) / 1e12
                    prices = prices.with_(tbw=(rating, "SMART" if typed.tbw is None else "--tbw"))
                show("pricing what could be changed")
                costs = priced(planned, prices)
            sustained = sustained_steps(planned)
            if whole:
                show("searching the longest sequence of each way to keep activations")
                ways = reach(planned)
                show("trying the orders of micro-batches")
                orders = compare(planned)
    with errors(FAILED):
        if typed.write is not None:
            from offload.finetune.options import Start, recipe

            # As in `offload train`, the default learning rate depends on whether the model folder contains weights.
            folder = None if typed.model is None or typed.model in PRESETS else Path(typed.model)
            # Without a config file the written config also contains the recipe of `offload train`.
            write_config(
                planned, typed.write, recipe(Start.of(folder, typed.lora is not None)) if typed.config is None else {}
            )
    if typed.json_output:
        print(json.dumps(output.as_json(planned, advice, wanted, ways, orders, costs, sustained)), flush=True)
        return
    for line in output.wrapped(output.summary(planned, advice, wanted, typed.price, costs, sustained)):
        console.print(line, soft_wrap=True)
    if typed.details:
        console.print()
        _print_details(console, planned, advice, wanted, ways, orders)
        for line in [] if costs is None else output.of_money(costs):
            console.print(line, soft_wrap=True)
    else:
        console.print("more: --details has all tables, --write FILE writes the config", soft_wrap=True)
    if typed.write is not None:
        console.print(f"written to {typed.write}", soft_wrap=True)


def _print_details(
    console: Console, planned: Planned, advice: Advice, wanted: Asked, ways: Sequence[Reach], orders: Sequence[Ordered]
) -> None:
    from offload.planner import output

    for line in output.heading(planned):
        console.print(line, soft_wrap=True)
    console.print(make_table(("", "device", "host", "disk"), output.table(planned), right=1))
    for line in output.lines(planned, advice, wanted):
        console.print(line, soft_wrap=True)
    if orders:
        console.print(output.orders_heading(planned), soft_wrap=True)
        console.print(make_table(_ORDERS, output.orders_table(orders), right=1))
    console.print(output.reach_heading(planned), soft_wrap=True)
    console.print(make_table(_REACH, output.reach_table(planned, ways), right=1))
    for line in output.without_room(ways):
        console.print(line, soft_wrap=True)


@contextmanager
def _working(first: str) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows what is being computed as a status line on stderr, if that is a terminal."""
    from rich.console import Console

    with status_line(Console(stderr=True, highlight=False, markup=False)) as show:
        show(first)
        yield show


def _asked(typed: PlanOptions, planned: Planned) -> Asked:
    from offload.planner.output import Asked
    from offload.planner.request import endurance

    if typed.steps is not None:
        if typed.tokens is not None:
            raise ConfigError("--tokens and --steps both say how long the run is; give one of them")
        if typed.steps < 1:
            raise ConfigError(f"expected --steps of at least 1, got {typed.steps}")
        tokens: int | None = typed.steps * planned.timing.tokens
    else:
        tokens = None if typed.tokens is None else parse_count(typed.tokens)
    return Asked(tokens, endurance(planned.hardware, typed.tbw))


def _print_longest(typed: PlanOptions, console: Console) -> None:
    from offload.planner import output, request

    with errors(BAD_INPUT):
        if typed.write is not None or typed.measure:
            raise ConfigError("--longest-sequence writes and measures nothing; leave out --write and --measure")
        with _working("searching the longest sequence of each way to keep activations"):
            answer = request.longest(_request(typed))
    if typed.json_output:
        print(json.dumps(output.longest_json(answer)), flush=True)
        return
    console.print(output.longest_heading(answer), soft_wrap=True)
    console.print(make_table(_LONGEST, output.longest_table(answer), right=1))
    for line in output.longest_lines(answer):
        console.print(line, soft_wrap=True)


def _print_ranks(typed: PlanOptions, console: Console) -> None:
    from offload.planner import output, request
    from offload.planner.hardware import parse_rate
    from offload.planner.ranks import Cluster

    with errors(BAD_INPUT):
        if typed.gpus is None:
            raise ConfigError("--nodes, --link, --tensor and --pipeline describe several GPUs: give --gpus too")
        if (
            typed.write is not None
            or typed.measure
            or typed.details
            or typed.price is not None
            or typed.prices is not None
            or typed.drive_budget is not None
        ):
            raise ConfigError(
                "a plan of several GPUs has no tables, writes and measures nothing: leave out --details, --write, "
                "--measure, --price, --prices and --drive-budget beside --gpus"
            )
        link = None if typed.link is None else parse_rate(typed.link)
        cluster = Cluster(typed.gpus, typed.nodes, link, typed.tensor, typed.pipeline)
        with _working("planning each ZeRO stage"):
            shape, hardware, plans = request.ranks(_request(typed), cluster)
        tokens = None if typed.tokens is None else parse_count(typed.tokens)
    if typed.json_output:
        print(json.dumps(output.ranks_json(shape.name, cluster, plans)), flush=True)
        return
    for line in output.ranks_summary(shape.name, hardware, cluster, plans, tokens):
        console.print(line, soft_wrap=True)


def _planned(typed: PlanOptions) -> Planned:
    from offload.planner import request
    from offload.planner.request import check_target

    with _working("reading the model's config"):
        options = _request(typed)
    # The file to write is checked before the model is timed: a bad path must not cost minutes.
    check_target(typed.write)
    if not typed.measure:
        with _working("counting the model's bytes and operations, and simulating a step"):
            return request.planned(options)
    # Nothing needs cleaning up while the model runs, so a signal may end the process inside native code.
    with exit_on_signal("stopped; nothing was written"), measuring() as tell:
        return request.planned(options, measure=True, tell=tell)


def _request(typed: PlanOptions) -> PlanRequest:
    from offload.planner.request import PlanRequest

    # A count of parameters stands for a Llama, whose loss can be computed in chunks.
    chunks = typed.model is None or typed.chunked_loss is False
    if typed.model is not None and not chunks:
        from offload.finetune.model import allows_chunks

        chunks = allows_chunks(typed.model)
    options = {name: value for name, value in vars(typed).items() if name in PlanRequest._fields}
    # The planner takes None for "auto".
    options |= {"dtype": None if typed.dtype == "auto" else typed.dtype, "chunks": chunks}
    if typed.parameters is not None:
        options["parameters"] = parse_count(typed.parameters)
    return PlanRequest(**options, adapters=_adapters(typed))


def _adapters(typed: PlanOptions) -> Adapters | None:
    """Returns the adapters that the options ask for; None for a model that trains as a whole."""
    given = (("nf4", typed.load_in_4bit), ("int8", typed.load_in_8bit))
    forms: list[str | None] = [form for form, wanted in given if wanted]
    if len(forms) > 1 or (forms and (typed.lora is None or typed.config is not None)):
        raise ConfigError(
            '--load-in-4bit or --load-in-8bit goes with --lora; beside --config set "frozen" in the config'
        )
    if typed.lora is None:
        return None
    if typed.model is None:
        raise ConfigError(
            "--lora needs the layers of a model: give --model, a preset as llama-13b or a folder with a config.json"
        )
    from offload.config import load_config, read_json
    from offload.finetune.model import adapt, parse_lora
    from offload.planner.model_shape import Adapters

    if typed.config is not None:
        forms.append(load_config(read_json(typed.config)).offload.frozen)
    lora = parse_lora(typed.lora)
    return Adapters(lambda model: adapt(model, lora), forms[0] if forms else None)
