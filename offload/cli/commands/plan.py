"""`offload plan`: predicts a run."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from offload.cli.console import (
    BAD_INPUT,
    FAILED,
    Json,
    errors,
    make_table,
    measuring,
    status_line,
    without_collector,
)
from offload.cli.options import takes_options
from offload.cli.signals import exit_on_signal
from offload.errors import ConfigError
from offload.planner.options import Adapters, PlanOptions
from offload.sizes import parse_count, parse_rate

if TYPE_CHECKING:
    from rich.console import Console

    from offload.planner.output import Asked
    from offload.planner.reach import Reach
    from offload.planner.recommend import Advice, Ordered, Planned, Priced


_REACH = ("inputs of blocks", "all logits", "in chunks", "micro-batch", "step")
_ORDERS = ("order", "updates under", "step", "read", "written", "if it clips")
_LONGEST = ("inputs of blocks", "all logits", "in chunks", "states", "step", "tokens/s")


@takes_options(PlanOptions)
@without_collector()
def plan(options: PlanOptions, json_output: Json = False) -> None:
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

    console = Console(stderr=json_output, highlight=False, markup=False)
    with errors(BAD_INPUT):
        if options.name is not None:
            if options.model is not None:
                raise ConfigError(f"give {options.name} or --model {options.model}, not both")
            options = dataclasses.replace(options, name=None, model=options.name)
        if options.model is not None:
            options = dataclasses.replace(options, model=local_model(options.model, config_only=not options.measure))
    if options.longest_sequence:
        _print_longest(options, console, json_output)
        return
    if options.gpus is not None or (options.nodes, options.link, options.tensor, options.pipeline) != (1, None, 1, 1):
        _print_ranks(options, console, json_output)
        return
    with errors(BAD_INPUT):
        prices = None if options.prices is None else read_prices(options.prices)
        planned = _planned(options)
        wanted = _asked(options, planned)
        costs: Priced | None = None
        with _working("trying what could be changed") as show:
            # Each of these takes longer than the plan: it repeats the prediction for every change, way or order.
            whole = options.details or json_output
            has_batch = options.config is not None or options.batch_size is not None or options.accumulation is not None
            advice, ways, orders = advise(planned, has_batch or whole, best=not whole), [], []
            if prices is not None:
                # What was said of this machine comes before what is usual.
                if options.price is not None:
                    prices = prices.with_(rent=(options.price, "--price"))
                if wanted.endurance is not None:
                    rating = wanted.endurance / max(len(planned.hardware.drives), 1) / 1e12
                    prices = prices.with_(tbw=(rating, "SMART" if options.tbw is None else "--tbw"))
                show("pricing what could be changed")
                costs = priced(planned, prices)
            sustained = sustained_steps(planned)
            if whole:
                show("searching the longest sequence of each way to keep activations")
                ways = reach(planned)
                show("trying the orders of micro-batches")
                orders = compare(planned)
    with errors(FAILED):
        if options.write is not None:
            from offload.finetune.options import Start, recipe

            # As in `offload train`, the default learning rate depends on whether the model folder contains weights.
            folder = None if options.model is None or options.model in PRESETS else Path(options.model)
            # Without a config file the written config also contains the recipe of `offload train`.
            write_config(
                planned,
                options.write,
                recipe(Start.of(folder, options.lora is not None)) if options.config is None else {},
            )
    if json_output:
        print(json.dumps(output.as_json(planned, advice, wanted, ways, orders, costs, sustained)), flush=True)
        return
    for line in output.wrapped(output.summary(planned, advice, wanted, options.price, costs, sustained)):
        console.print(line, soft_wrap=True)
    if options.details:
        console.print()
        _print_details(console, planned, advice, wanted, ways, orders)
        for line in [] if costs is None else output.of_money(costs):
            console.print(line, soft_wrap=True)
    else:
        console.print("more: --details has all tables, --write FILE writes the config", soft_wrap=True)
    if options.write is not None:
        console.print(f"written to {options.write}", soft_wrap=True)


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


def _asked(options: PlanOptions, planned: Planned) -> Asked:
    from offload.planner.output import Asked
    from offload.planner.request import endurance

    if options.price is not None and not 0 <= options.price < math.inf:
        raise ConfigError(f"expected --price of at least 0, got {options.price}")
    if options.steps is not None:
        if options.tokens is not None:
            raise ConfigError("--tokens and --steps both say how long the run is; give one of them")
        tokens: int | None = options.steps * planned.timing.tokens
    else:
        tokens = None if options.tokens is None else parse_count(options.tokens)
    return Asked(tokens, endurance(planned.hardware, options.tbw))


def _print_longest(options: PlanOptions, console: Console, json_output: bool) -> None:
    from offload.planner import output, request

    with errors(BAD_INPUT):
        if options.write is not None or options.measure:
            raise ConfigError("--longest-sequence writes and measures nothing; leave out --write and --measure")
        with _working("searching the longest sequence of each way to keep activations"):
            answer = request.longest(_complete(options))
    if json_output:
        print(json.dumps(output.longest_json(answer)), flush=True)
        return
    console.print(output.longest_heading(answer), soft_wrap=True)
    console.print(make_table(_LONGEST, output.longest_table(answer), right=1))
    for line in output.longest_lines(answer):
        console.print(line, soft_wrap=True)


def _print_ranks(options: PlanOptions, console: Console, json_output: bool) -> None:
    from offload.planner import output, request
    from offload.planner.ranks import Cluster

    with errors(BAD_INPUT):
        if options.gpus is None:
            raise ConfigError("--nodes, --link, --tensor and --pipeline describe several GPUs: give --gpus too")
        if (
            options.write is not None
            or options.measure
            or options.details
            or options.price is not None
            or options.prices is not None
            or options.drive_budget is not None
        ):
            raise ConfigError(
                "a plan of several GPUs has no tables, writes and measures nothing: leave out --details, --write, "
                "--measure, --price, --prices and --drive-budget beside --gpus"
            )
        link = None if options.link is None else parse_rate(options.link)
        cluster = Cluster(options.gpus, options.nodes, link, options.tensor, options.pipeline)
        with _working("planning each ZeRO stage"):
            shape, hardware, plans = request.ranks(_complete(options), cluster)
        tokens = None if options.tokens is None else parse_count(options.tokens)
    if json_output:
        print(json.dumps(output.ranks_json(shape.name, cluster, plans)), flush=True)
        return
    for line in output.ranks_summary(shape.name, hardware, cluster, plans, tokens):
        console.print(line, soft_wrap=True)


def _planned(options: PlanOptions) -> Planned:
    from offload.planner import request
    from offload.planner.request import check_target

    with _working("reading the model's config"):
        options = _complete(options)
    # The file to write is checked before the model is timed: a bad path must not cost minutes.
    check_target(options.write)
    if not options.measure:
        with _working("counting the model's bytes and operations, and simulating a step"):
            return request.planned(options)
    # Nothing needs cleaning up while the model runs, so a signal may end the process inside native code.
    with exit_on_signal("stopped; nothing was written"), measuring() as tell:
        return request.planned(options, tell)


def _complete(options: PlanOptions) -> PlanOptions:
    """Returns the options with what the planner must know of the model. The planner takes no dtype for "auto"."""
    # A count of parameters stands for a Llama, whose loss can be computed in chunks.
    chunks = options.model is None or options.chunked_loss is False
    if options.model is not None and not chunks:
        from offload.finetune.model import allows_chunks

        chunks = allows_chunks(options.model)
    dtype = None if options.dtype == "auto" else options.dtype
    return dataclasses.replace(options, dtype=dtype, chunks=chunks, adapters=_adapters(options))


def _adapters(options: PlanOptions) -> Adapters | None:
    """Returns the adapters that the options ask for; None for a model that trains as a whole."""
    formats = (("nf4", options.load_in_4bit), ("int8", options.load_in_8bit))
    forms: list[str | None] = [form for form, wanted in formats if wanted]
    if len(forms) > 1 or (forms and (options.lora is None or options.config is not None)):
        raise ConfigError(
            '--load-in-4bit or --load-in-8bit goes with --lora; beside --config set "frozen" in the config'
        )
    if options.lora is None:
        return None
    if options.model is None:
        raise ConfigError(
            "--lora needs the layers of a model: give --model, a preset as llama-13b or a folder with a config.json"
        )
    from offload.config import load_config, read_json
    from offload.finetune.model import adapt, parse_lora

    if options.config is not None:
        forms.append(load_config(read_json(options.config)).offload.frozen)
    lora = parse_lora(options.lora)
    return Adapters(lambda model: adapt(model, lora), forms[0] if forms else None)
