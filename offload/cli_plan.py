"""The commands about a run that is not there yet: how fast the machine is, and what a model would be on it."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from offload.cli_machine import BAD_INPUT, FAILED, Json, errors, signals, telling
from offload.sizes import parse_size


def register(app: typer.Typer) -> None:
    """Add these commands to `app`."""
    app.command()(probe)


def probe(
    paths: Annotated[
        list[str] | None, typer.Argument(help="Folders for swap files, one for each drive. [default: .]")
    ] = None,
    device: Annotated[str, typer.Option(help="Where training will compute: auto, cpu, cuda.")] = "auto",
    size: Annotated[str, typer.Option(help="Bytes of the file that is written and read on each drive.")] = "256MiB",
    keep: Annotated[bool, typer.Option("--keep/--no-keep", help="Keep the result for `offload plan`.")] = True,
    json_output: Json = False,
) -> None:
    """Measure this machine, in under a minute: memory, drives, copies, optimizer, matrix products.

    Example: offload probe /mnt/nvme
    """
    from offload import probe as probing

    console = Console(stderr=json_output, highlight=False)
    with errors(BAD_INPUT):
        nbytes = parse_size(size)
        probing.compute_device(device)
        probing.check_folders(paths or ["."])
    with errors(FAILED), signals(), telling(console) as tell:
        found = probing.probe(paths or ["."], device, nbytes, tell)
        where = probing.keep(found) if keep else None
    if json_output:
        print(json.dumps(probing.as_json(found)), flush=True)
        return
    table = Table(show_header=False, box=None)
    for name, value in probing.lines(found):
        table.add_row(name, value)
    console.print(table, markup=False)
    console.print(f"measured in {found.seconds:.0f} s" + (f", kept in {where}" if where else ""), soft_wrap=True)
