"""`offload probe`: measures the machine, for `offload plan` and for the predictions of `offload train`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from offload.cli.console import BAD_INPUT, FAILED, Json, errors
from offload.cli.progress import measuring
from offload.cli.signals import signals
from offload.sizes import parse_size


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
    if json_output:
        print(json.dumps(probing.as_json(found)), flush=True)
    else:
        table = Table(show_header=False, box=None)
        for name, value in probing.lines(found):
            table.add_row(name, value)
        console.print(table, markup=False)
    # With --json the console is stderr: stdout contains the JSON object only.
    for doubt in found.doubts:
        console.print(f"warning: {doubt}", soft_wrap=True, markup=False)
    with errors(FAILED):
        cache = probing.keep(found) if keep else None
    if not json_output:
        console.print(f"measured in {found.seconds:.0f} s" + (f", stored in {cache}" if cache else ""), soft_wrap=True)
