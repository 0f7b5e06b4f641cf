"""The subcommand `offload bench train`: the same training by this package and by its peers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.commands.bench.group import bench, check_plot
from offload.cli.console import BAD_INPUT, FAILED, Json, errors, status_line
from offload.cli.options import takes_options
from offload.cli.signals import signals

if TYPE_CHECKING:
    from rich.table import Table

_LEAST_WIDTH = 180
"""Columns that the table may take."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of `offload bench train` as they are typed. None stands for an option that was not given."""

    folder: Annotated[Path, typer.Argument(help="Folder for swap files, on the drive to measure.")]
    model: Annotated[str, typer.Option(help="Preset that is trained.")] = "gpt2-small"
    batch_size: Annotated[int, typer.Option(help="Sequences of a micro-batch.")] = 1
    seq_len: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 256
    micro_batches: Annotated[
        int, typer.Option(help="Micro-batches of a step; with more than one layer-major order is measured too.")
    ] = 1
    dtype: Annotated[str, typer.Option(help="bf16, fp32; auto: the one that suits this machine.")] = "auto"
    rounds: Annotated[int, typer.Option(help="Rounds; each runs all contenders in turns.")] = 5
    steps: Annotated[int, typer.Option(help="Steps of a turn that count; two before them do not.")] = 3
    threads: Annotated[int | None, typer.Option(help="Threads of each contender. [default: all cores]")] = None
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only contenders whose names begin with this, and plain; may repeat. [default: all]"),
    ] = None
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the result: .png, .svg or .pdf.")] = None
    json_output: Json = False


@bench.command("train")
@takes_options(TrainOptions)
def bench_train(typed: TrainOptions) -> None:
    """Measure training: plain PyTorch, offload in its placements, DeepSpeed, FSDP2 and torchao, in turns.

    Contenders: plain; offload none/none, cpu/cpu, cpu/nvme, nvme/nvme (weights/states); deepspeed cpu/cpu, cpu/nvme,
    nvme/nvme; fsdp2 cpu; torchao cpu. All train the same model on the same tokens, and losses are compared. Needs
    transformers: pip install 'offload[bench]'.

    Example: offload bench train /mnt/nvme --model gpt2-small --only offload --only deepspeed
    """
    from rich.console import Console

    from offload.bench.train import figures, loops, plan
    from offload.bench.train import figures as output
    from offload.hardware.info import machine

    console = Console(stderr=typed.json_output, highlight=False)
    with errors(BAD_INPUT):
        check_plot(typed.plot)
        checked = plan.make_plan(
            typed.folder,
            model=typed.model,
            batch_size=typed.batch_size,
            seq_len=typed.seq_len,
            micro_batches=typed.micro_batches,
            dtype=typed.dtype,
            rounds=typed.rounds,
            steps=typed.steps,
            threads=typed.threads,
            only=typed.only or (),
        )
    with errors(FAILED), signals(), status_line(console) as tell:
        # Swap files are created: signals raise, so that the files are removed and the running contender ends.
        result = loops.measure(checked, tell)
    rows = figures.make_rows(checked, result)
    if typed.json_output:
        print(json.dumps(figures.as_json(machine(), checked, result)), flush=True)
    else:
        for line in output.heading(checked, result.rates):
            console.print(line, soft_wrap=True)
        # A pipe would be taken for 80 columns, and a table that is too wide loses the ends of its cells.
        console.width = max(console.width, _LEAST_WIDTH)
        console.print(_table(output.TITLES, [output.cells(row) for row in rows if row.turns]))
        for line in output.remarks(rows, checked.dtype):
            console.print(line, soft_wrap=True)
    with errors(FAILED):
        if typed.plot is not None:
            output.plot(rows, typed.plot)


def _table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    from rich.table import Table

    table = Table(box=None)
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
