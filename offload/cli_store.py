"""The commands about swap files that are there: look at them, check them, take the weights out, delete them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from offload.cli_machine import Json, errors, signals
from offload.errors import StoreError
from offload.sizes import format_size, parse_size

_BAD_INPUT, _FAILED, _DAMAGED = 2, 1, 1
_SHOWN = 20
"""Damages that are told in words; `--json` has all."""


class Dtype(str, Enum):
    bf16 = "bf16"
    fp32 = "fp32"
    fp16 = "fp16"


Run = Annotated[Path, typer.Argument(help="A run's folder: NVME_PATH/RUN.")]


def register(app: typer.Typer) -> None:
    """Add these commands to `app`."""
    for command in (inspect, verify, export, rm):
        app.command()(command)


def inspect(
    path: Annotated[Path, typer.Argument(help="A run's folder, one rank's folder in it, or an nvme path with runs.")],
    json_output: Json = False,
) -> None:
    """Say what lies in a folder of swap files: model, commits, sizes, who has it, what is damaged.

    Changes nothing, and may look at a run that trains. Example: offload inspect /mnt/nvme
    """
    from offload.inspection import inspect as look

    with errors(_BAD_INPUT):
        found = look(path)
    if json_output:
        print(json.dumps(found))
        return
    console = Console(highlight=False, soft_wrap=True)
    if found["kind"] == "nvme_path":
        if found["runs"]:
            console.print(_runs_table(found["runs"]))
        else:
            console.print(f"there are no runs in {found['path']}", markup=False)
        return
    console.print(_run_table(found))
    for rank in found["ranks"]:
        console.print(_rank_table(rank))


def _runs_table(runs: list[dict[str, Any]]) -> Table:
    table = Table("run", "model", "mode", "ranks", "last commit", "on disk", "held by", "", box=None)
    for run in runs:
        model = run["model"]
        newest = [rank["commits"][0] for rank in run["ranks"] if rank["commits"]]
        last = min(newest, key=lambda commit: int(commit["serial"]), default=None)
        table.add_row(
            escape(run["run"]),
            "" if model is None else escape(f"{model['class']}, {model['parameters']:,}"),
            run["mode"] or "",
            str(run["world_size"] or ""),
            "" if last is None else f"epoch {last['epoch']}, {_age(last['age_seconds'])} ago",
            format_size(run["allocated_bytes"]),
            escape(", ".join(sorted({rank["holder"] for rank in run["ranks"] if rank["holder"]}))),
            escape(_state(run)),
        )
    return table


def _state(run: Mapping[str, Any]) -> str:
    words = []
    if run["finished"] is not None:
        words.append(f"finished at step {run['finished'].get('steps', '?')}")
    words += sorted(
        {f"format {r['other_format'].split(',')[0].split()[-1]}" for r in run["ranks"] if r["other_format"]}
    )
    if any(rank["damaged"] for rank in run["ranks"]):
        words.append("damaged")
    if run["leftovers"]:
        words.append("leftovers")
    return ", ".join(words)


def _run_table(run: Mapping[str, Any]) -> Table:
    table = Table(show_header=False, box=None)
    model = run["model"]
    rows: list[tuple[str, str]] = [("run", run["path"])]
    if model is not None:
        trained = "" if model["trainable"] == model["parameters"] else f", {model['trainable']:,} of them trained"
        rows += [
            ("model", f"{model['class']}, {model['parameters']:,} parameters{trained}, {model['units']} units"),
            ("mode", run["mode"]),
            ("ranks", str(run["world_size"])),
            ("slots", f"{run['slots']}{'' if run['slots'] == 2 else ': written in place, nothing is committed'}"),
            ("drives", ", ".join(run["drives"])),
            ("made by", f"offload {run['made_by']}"),
        ]
    rows.append(("on disk", format_size(run["allocated_bytes"])))
    if run["finished"] is not None:
        note = run["finished"]
        rows.append(("finished", f"at step {note.get('steps', '?')}, {note.get('date', 'date unknown')}"))
    if run["missing_ranks"]:
        rows.append(("not here", f"rank {', '.join(map(str, run['missing_ranks']))}: lost, or on another machine"))
    rows += [("left over", path) for path in run["leftovers"]]
    for name, value in rows:
        table.add_row(name, escape(value))
    return table


def _rank_table(rank: Mapping[str, Any]) -> Table:
    table = Table(show_header=False, box=None, title=f"rank {rank['rank']}", title_justify="left")
    rows = [("held by", rank["holder"] or "nobody")]
    if rank["other_format"]:
        rows.append(("other format", rank["other_format"]))
    if rank["drive"]:
        rows.append(("part", f"drive {rank['drive']}; the commits lie on the first"))
    for commit in rank["commits"]:
        words = f"epoch {commit['epoch']}, {commit['time']}, {_age(commit['age_seconds'])} ago, blob {commit['blob']}"
        rows.append((f"commit {commit['serial']}", f"{words} ({format_size(commit['blob_bytes'])})"))
    if not rank["commits"] and not rank["drive"] and not rank["other_format"]:
        rows.append(("commits", "none"))
    if rank["states"]:
        rows.append(("states", ", ".join(rank["states"])))
    rows += [(("on drive"), f"{format_size(d['allocated_bytes'])} in {d['path']}") for d in rank["drives"]]
    rows += [("damaged", f"{wrong['path']}: {wrong['reason']}") for wrong in rank["damaged"]]
    for name, value in rows:
        table.add_row(name, escape(value))
    return table


def _age(seconds: float) -> str:
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def verify(path: Run, json_output: Json = False) -> None:
    """Compare every byte of a run's last commit with its checksum.

    Ends with 0 where all is whole, 1 where something is damaged, 2 where there is nothing that can be verified, or a
    process holds it. Example: offload verify /mnt/nvme/my-run
    """
    from offload.aio import IoQueue
    from offload.verification import Checking

    console = Console(stderr=json_output, highlight=False, soft_wrap=True)
    with errors(_BAD_INPUT), signals():
        _check_folder(path)
        with Checking(path) as checking, IoQueue() as queue, _bar(console, checking.nbytes) as progress:
            report = checking.run(queue, progress)
    if json_output:
        print(json.dumps(report.as_json()))
    else:
        for line in report.lines(_SHOWN):
            console.print(line, markup=False)
    if not report.whole:
        raise typer.Exit(_DAMAGED)


def export(
    path: Run,
    out: Annotated[Path, typer.Argument(help="Folder to write; must not be there, or be empty.")],
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of the weights. fp32 gives the exact masters. [default: as they train]")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Bytes of a file at most.")] = "5GB",
    json_output: Json = False,
) -> None:
    """Write the weights of a run as safetensors files that transformers loads.

    Example: offload export /mnt/nvme/my-run ./my-model --dtype bf16
    """
    from offload.aio import IoQueue
    from offload.engine.source import StoreSource
    from offload.export import check_target, make_plan, read_nbytes
    from offload.export import export as write

    console = Console(stderr=json_output, highlight=False, soft_wrap=True)
    with errors(_FAILED), _refusals(), signals():
        _check_folder(path)
        check_target(out.absolute())
        shard_nbytes = parse_size(max_shard_size)
        with IoQueue() as queue:
            source = StoreSource(path, queue)
            try:
                plan = make_plan(source, None if dtype is None else dtype.value, shard_nbytes)
                with _bar(console, read_nbytes(plan)) as progress:
                    done = write(source, out, plan, progress)
            finally:
                source.close()
    for notice in done.notices:
        console.print(notice, markup=False)
    if json_output:
        print(json.dumps({**done._asdict(), "path": str(done.path)}))
    else:
        console.print(
            f"epoch {done.epoch}: {done.parameters:,} parameters, {format_size(done.nbytes)} in {done.dtype}, "
            f"in {done.path}",
            markup=False,
        )


def rm(
    path: Run,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete a run's swap files, on every drive that it lies on."""
    from offload.swapper.store import find_removal, remove_run

    with errors(_BAD_INPUT):
        _check_folder(path)
        removal = find_removal(path)
        for folder in removal.folders:
            typer.echo(f"  {folder}")
        for file in removal.files:
            typer.echo(f"  {file}{' (a kill has left it)' if file.suffix == '.tmp' else ''}")
        if not yes:
            size = format_size(removal.nbytes)
            typer.confirm(f"Delete {path} ({size}) and all that it could be resumed from?", abort=True)
        removal = remove_run(path)
        if removal.strangers:
            names = ", ".join(removal.strangers[:_SHOWN])
            typer.echo(f"{path} stays: it holds what is not of the run: {names}")


@contextmanager
def _refusals() -> Iterator[None]:
    """What is refused is bad input; what fails on the way is not."""
    try:
        yield
    except StoreError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(_BAD_INPUT) from None


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise StoreError(f"there is no folder {path}")


@contextmanager
def _bar(console: Console, nbytes: int) -> Iterator[Callable[[int], None]]:
    """A progress bar in a terminal; nothing elsewhere."""
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (BarColumn(30), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=nbytes)
        yield lambda count: progress.advance(task, count)
