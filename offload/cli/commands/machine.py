"""Commands about the machine: `offload info`, `offload tune`, `offload probe` and `offload bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from offload.cli.console import BAD_INPUT, FAILED, Json, errors, make_table, measuring, status_line, without_collector
from offload.cli.signals import signals
from offload.errors import ConfigError
from offload.options import checked
from offload.sizes import format_size, parse_size

if TYPE_CHECKING:
    pass


@without_collector()
def info(
    paths: list[str] | None = typer.Argument(None, help="Folders for swap files, one for each drive."),
    nvme_path: list[str] | None = typer.Option(None, metavar="PATH", help="The same, as for train; may repeat."),
    json_output: Json = False,
) -> None:
    """Describe this machine, the I/O backend that is used, and why. For bug reports.

    Example: offload info /mnt/nvme
    """
    from rich.console import Console

    from offload.hardware import info as about
    from offload.hardware.probe import drive_line, drive_under, kept

    facts, before = about.facts([*(paths or ()), *(nvme_path or ())]), kept()
    folders = [] if before is None else [drive["path"] for drive in facts["drives"]]
    probed = {path: rates for path in folders if before and (rates := drive_under(before, path))}
    if json_output:
        for drive in facts["drives"]:
            drive["probed"] = probed[drive["path"]]._asdict() if drive["path"] in probed else None
        print(json.dumps(facts))
    else:
        rows = [*about.lines(facts), *((path, drive_line(rates)) for path, rates in probed.items())]
        Console(highlight=False, markup=False).print(make_table((), rows))
    # The facts are printed in any case: they are meant for bug reports about such a drive.
    if any("error" in drive for drive in facts["drives"]):
        raise typer.Exit(BAD_INPUT)


@without_collector()
def doctor(
    paths: list[str] | None = typer.Argument(None, help="Folders for swap files, one for each drive."),
    json_output: Json = False,
) -> None:
    """Check what a run needs of this machine, and say what to do. Exits with 1 if something stops a run.

    Example: offload doctor /mnt/nvme
    """
    from rich.console import Console

    from offload.hardware import info as about
    from offload.hardware.probe import kept

    with errors(FAILED):
        findings = about.findings(about.facts(paths or ()), probed=kept() is not None)
    if json_output:
        print(json.dumps([finding._asdict() for finding in findings]))
    else:
        Console(highlight=False, markup=False).print(make_table((), findings))
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(FAILED)


def probe(
    paths: list[str] | None = typer.Argument(None, help="Folders for swap files, one for each drive. [default: .]"),
    device: str = typer.Option(
        "auto", help="Where training will compute: auto, cpu, cuda, or another accelerator of torch."
    ),
    size: str = typer.Option(
        "256MiB", help="Bytes at most of the file that is written and read on each drive.", **checked(parse_size)
    ),
    sustained: bool = typer.Option(
        False, "--sustained", help="Instead: write to the drives until their rates fall. Takes minutes and wears them."
    ),
    gigabytes: float | None = typer.Option(
        None, metavar="N", help="With --sustained: GB that are written to each drive at most. [default: 500]"
    ),
    keep: bool = typer.Option(True, "--keep/--no-keep", help="Store the result for `offload plan`."),
    json_output: Json = False,
) -> None:
    """Measure this machine in under a minute. It measures drives, memory, copies, products and the optimizer.

    Example: offload probe /mnt/nvme
    """
    from rich.console import Console

    from offload.hardware import probe as probing

    console = Console(stderr=json_output, highlight=False)
    with errors(BAD_INPUT):
        if gigabytes is not None and not sustained:
            raise ConfigError("--gigabytes goes with --sustained; --size is the file of the other measurements")
        if sustained:
            _probe_sustained(paths or ["."], gigabytes, keep, json_output)
            return
        nbytes = parse_size(size)
        # All checks precede the measurement, which takes up to a minute.
        probing.device_of(device)
        probing.check_size(nbytes)
        probing.check_folders(paths or ["."])
        if keep:
            probing.check_kept()
    with errors(FAILED), signals(), measuring() as tell:
        measured = probing.probe(paths or ["."], device, nbytes, tell)
    if json_output:
        print(json.dumps(probing.as_json(measured)), flush=True)
    else:
        console.print(make_table((), probing.lines(measured)), markup=False)
    # With --json the console is stderr: stdout contains the JSON object only.
    for doubt in measured.doubts:
        console.print(f"warning: {doubt}", soft_wrap=True, markup=False)
    with errors(FAILED):
        cache = probing.keep(measured) if keep else None
    if not json_output:
        stored = f", stored in {cache}" if cache else ""
        console.print(f"measured in {measured.seconds:.0f} s{stored}", soft_wrap=True)


def _probe_sustained(paths: list[str], gigabytes: float | None, keep: bool, json_output: bool) -> None:
    from rich.console import Console

    from offload.hardware import probe as probing
    from offload.hardware import sustained

    if gigabytes is not None and not 0 < gigabytes < 1e6:
        raise ConfigError(f"expected --gigabytes above 0 and below 1,000,000, got {gigabytes:g}")
    nbytes = int(1e9 * (sustained.GIGABYTES if gigabytes is None else gigabytes))
    for path in paths:
        sustained.check(path, nbytes)
    if keep:
        probing.check_kept()
    notes, console = Console(stderr=True, highlight=False), Console(highlight=False)
    for path in paths:
        notes.print(f"warning: {sustained.warning(path, nbytes)}", soft_wrap=True, markup=False)
    curves = []
    with errors(FAILED), signals(), measuring() as tell:
        for path in paths:
            curves.append(sustained.probe(path, nbytes, tell))
            if keep:
                sustained.keep(curves[-1])
    if json_output:
        print(json.dumps([curve._asdict() for curve in curves]), flush=True)
        return
    for curve in curves:
        console.print(make_table((), sustained.lines(curve)), markup=False)
    if keep:
        console.print(f"stored in {sustained.cache_path()}", soft_wrap=True)


def tune(
    paths: list[str] = typer.Argument(help="Folders for swap files, one for each drive."),
    config: Path | None = typer.Option(
        None, help="DeepSpeed JSON file to write the block into; created if it is missing."
    ),
    output: Path | None = typer.Option(None, help="Write the config here instead."),
    size: str = typer.Option("512MiB", help="Bytes of the test file.", **checked(parse_size)),
    json_output: Json = False,
) -> None:
    """Find the best `aio` block for a drive. Writes its keys into a config, which stays as it is otherwise.

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
            tuning.check_config(config, output or config)
    with errors(FAILED), signals(), status_line(console) as tell:
        tuned = tuning.tune(paths, backend, parse_size(size), tell=tell)
    if json_output:
        print(json.dumps(tuning.as_json(tuned)), flush=True)
    else:
        rows = [
            (format_size(trial.block_bytes), str(trial.depth), *(f"{rate / 1e9:.2f}" for rate in trial.rate))
            for trial in tuned.trials
        ]
        console.print(make_table(("block", "depth", "read GB/s", "write GB/s"), rows))
        console.print(f"of the settings as fast as the best, the one with the least in flight ({tuned.backend}):")
        console.print(json.dumps({"aio": tuned.aio}, indent=2), markup=False)
    with errors(FAILED, {"--config" if output is None else "--output": output or config}):
        if config is not None:
            tuning.write_config(config, output or config, tuned.aio)
            # A mistyped --config would otherwise go unnoticed.
            alone = "" if there else f": {config} did not exist, so the file contains only this block"
            console.print(f"written to {output or config}{alone}", markup=False)
