"""Commands about the machine: `offload info`, `offload tune` and `offload bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload.cli.commands.bench import bench
from offload.cli.console import BAD_INPUT, FAILED, Json, errors, status_line, without_collector
from offload.cli.signals import signals
from offload.errors import ConfigError
from offload.sizes import format_size, parse_size

if TYPE_CHECKING:
    from rich.console import Console

    from offload.hardware.probe import DriveRates


def register(app: typer.Typer) -> None:
    """Adds these commands to `app`."""
    app.command()(info)
    app.command()(tune)
    app.add_typer(bench, name="bench")


@without_collector()
def info(
    paths: Annotated[list[str] | None, typer.Argument(help="Folders for swap files, one for each drive.")] = None,
    nvme_path: Annotated[
        list[str] | None, typer.Option(metavar="PATH", help="The same, as for train; may repeat.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Describe this machine, the I/O backend that is used, and why. For bug reports.

    Example: offload info /mnt/nvme
    """
    from rich.console import Console
    from rich.table import Table

    from offload.hardware import info as about
    from offload.hardware.probe import drive_line

    found = about.facts([*(paths or ()), *(nvme_path or ())])
    probed = _probed([drive["path"] for drive in found["drives"]])
    if json_output:
        for drive in found["drives"]:
            drive["probed"] = probed[drive["path"]]._asdict() if drive["path"] in probed else None
        print(json.dumps(found))
    else:
        table = Table(show_header=False, box=None)
        for name, value in [*about.lines(found), *((path, drive_line(rates)) for path, rates in probed.items())]:
            table.add_row(name, value)
        Console(highlight=False, markup=False).print(table)
    # The facts are printed in any case: they are meant for bug reports about such a drive.
    if any("error" in drive for drive in found["drives"]):
        raise typer.Exit(BAD_INPUT)


def _probed(folders: list[str]) -> dict[str, DriveRates]:
    from offload.hardware.probe import drive_under, kept

    before = kept()
    return {} if before is None else {each: rates for each in folders if (rates := drive_under(before, each))}


def tune(
    paths: Annotated[list[str], typer.Argument(help="Folders for swap files, one for each drive.")],
    config: Annotated[
        Path | None, typer.Option(help="DeepSpeed JSON file to write the block into; created if it is missing.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the config here instead.")] = None,
    size: Annotated[str, typer.Option(help="Bytes of the test file.")] = "512MiB",
    json_output: Json = False,
) -> None:
    """Find the best `aio` block for a drive, and write its keys into a config, which stays as it is otherwise.

    Example: offload tune /mnt/nvme --config ds_config.json
    """
    from rich.console import Console

    from offload.aio import IoQueue
    from offload.bench import tune_io as tuning
    from offload.config import load_config, read_json

    console = Console(stderr=json_output, highlight=False)
    with errors(BAD_INPUT):
        if output is not None and config is None:
            raise ConfigError("--output names the file for the extended copy of --config: give both")
        there = config is not None and config.exists()
        wanted = load_config(read_json(config)).offload.io_backend if config is not None and there else "auto"
        # The queue resolves "auto" to the backend that works on this machine, and is closed before the trials.
        with IoQueue(wanted) as queue:
            backend = queue.backend
        if config is not None:
            # The check precedes a minute of trials, whose result could not be written otherwise.
            tuning.check_writable(config, output or config)
    with errors(FAILED), signals(), status_line(console) as tell:
        found = tuning.tune(paths, backend, parse_size(size), tell=tell)
    if json_output:
        print(json.dumps(tuning.as_json(found)), flush=True)
    else:
        _print_tuned(console, found)
    with errors(FAILED):
        if config is not None:
            tuning.write_config(config, output or config, found.aio)
            # A mistyped --config would otherwise go unnoticed.
            alone = "" if there else f": {config} did not exist, so the file contains only this block"
            console.print(f"written to {output or config}{alone}", markup=False)


def _print_tuned(console: Console, found: Any) -> None:
    from rich.table import Table

    table = Table("block", "depth", "read GB/s", "write GB/s", box=None)
    for trial in found.trials:
        name = format_size(trial.block_bytes)
        table.add_row(name, str(trial.depth), f"{trial.rate.read / 1e9:.2f}", f"{trial.rate.write / 1e9:.2f}")
    console.print(table)
    console.print(f"of the settings as fast as the best, the one with the least in flight ({found.backend}):")
    console.print(json.dumps({"aio": found.aio}, indent=2), markup=False)
