"""`offload inspect`: the content of a folder of runs or checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from offload.cli.console import BAD_INPUT, Json, errors


def inspect(
    path: Annotated[
        Path,
        typer.Argument(help="A run, one rank of it, an nvme path with runs; a checkpoint, or a folder of them."),
    ],
    json_output: Json = False,
) -> None:
    """List what a folder of swap files or checkpoints holds: model, commits, sizes, who uses it, what is damaged.

    Changes nothing, and may look at a run that trains. Example: offload inspect /mnt/nvme
    """
    from offload.runs.inspection import inspect as look

    with errors(BAD_INPUT):
        found = look(path)
    if json_output:
        print(json.dumps(found))
        return
    from rich.console import Console

    from offload.cli.commands.inspection_tables import tables

    console = Console(highlight=False, soft_wrap=True)
    for table in tables(found):
        console.print(table)
