"""`offload report`: a page of what a log tells."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from offload.cli_machine import BAD_INPUT, FAILED, errors
from offload.cli_signals import signals
from offload.errors import ConfigError
from offload.sizes import count_of


def report(
    log: Annotated[Path, typer.Argument(help='What `offload train --log`, or the key "log", has written.')],
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What --trace has written: one step of it is drawn.")
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What `offload plan --json` has printed: shown beside what came."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The page. [default: LOG with .html]")
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print the figures as one JSON object; a page only with --output.")
    ] = False,
) -> None:
    """Make an HTML page of a run: loss, time by phase, bytes, memory, wear of the drives. It needs no network.

    May be called while the run goes on. Ends with 0, with 1 where the page cannot be written, with 2 where LOG or FILE
    is not what was expected. Example: offload report run.jsonl --trace trace.json.gz -o run.html
    """
    from offload.report.figures import figures
    from offload.report.log import read_log
    from offload.report.page import page
    from offload.report.predicted import read_plan
    from offload.report.spans import read_window

    with errors(BAD_INPUT):
        place = output or log.parent / f"{log.stem}.html"
        if place.resolve() in {each.resolve() for each in (log, trace, plan) if each is not None}:
            raise ConfigError(f"the page would take the place of {place}; give another --output")
        steps = read_log(log)
        window = None if trace is None else read_window(trace)
        found = figures(steps, None if plan is None else read_plan(plan))
    if output is not None or not json_output:
        with errors(FAILED), signals():
            _write(place, page(steps, found, window))
    if json_output:
        print(json.dumps(found, allow_nan=False))
    else:
        print(f"{place}: {count_of(found['steps'], 'step')}, {found['first_step']:,} to {found['last_step']:,}")


def _write(place: Path, text: str) -> None:
    """The page as a whole, or what was there before."""
    new = place.with_name(f".{place.name}.{os.getpid()}") if place.is_file() or not place.exists() else place
    try:
        try:
            new.write_text(text, encoding="utf-8")
            if new != place:
                os.replace(new, place)
        finally:
            if new != place:
                new.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(f"cannot write the page {place}: {error.strerror}; give another place with --output") from error
