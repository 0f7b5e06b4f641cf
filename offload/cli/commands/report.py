"""`offload report`: an HTML page made from a log."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import typer

from offload.cli.console import BAD_INPUT, FAILED, errors
from offload.cli.signals import signals
from offload.errors import ConfigError
from offload.fileio import atomic_write, inner_status
from offload.sizes import count_of


def report(
    log: Path = typer.Argument(help='The log that `offload train --log`, or the key "log", wrote.'),
    trace: Path | None = typer.Option(
        None, metavar="FILE", help="The timeline that --trace wrote: one step of it is drawn."
    ),
    plan: Path | None = typer.Option(
        None, metavar="FILE", help="The output of `offload plan --json`: shown beside the measurements."
    ),
    prices: str | None = typer.Option(
        None,
        metavar="usual|FILE",
        help="Dollars of the run by part, at prices of a TOML file; usual: at the package's prices.",
    ),
    output: Path | None = typer.Option(
        None, "--output", "-o", metavar="FILE", help="The page. [default: LOG with .html]"
    ),
    json_output: bool = typer.Option(
        False, "--json", help="Print the figures as one JSON object; a page only with --output."
    ),
) -> None:
    """Make an HTML page of a run. Loss, time by phase, bytes, memory, wear of the drives; it needs no network.

    May be called during the run. Exit code 0; 1 if the page cannot be written; 2 if LOG or FILE
    is not what was expected. Example: offload report run.jsonl --trace trace.json.gz -o run.html
    """
    from offload.prices import read_prices
    from offload.report.figures import budget_words, dollars_of, figures, read_plan
    from offload.report.links import LINKS
    from offload.report.log import read_log
    from offload.report.page import page
    from offload.report.phases import verdict
    from offload.report.timeline_view import read_window

    with errors(BAD_INPUT):
        target = output or log.parent / f"{log.stem}.html"
        writes_page = output is not None or not json_output
        if writes_page and os.path.realpath(target) in {
            os.path.realpath(source) for source in (log, trace, plan) if source
        }:
            raise ConfigError(f"the page would replace {target}; give another --output")
        if writes_page and _is_foreign(target, named=output is not None):
            raise ConfigError(
                f"{target} exists and is not a page of offload report; give another --output, or remove it"
            )
        steps = read_log(log)
        window = None if trace is None else read_window(trace)
        of_parts = None if prices is None else read_prices(prices)
        facts = figures(steps, None if plan is None else read_plan(plan), window, of_parts)
    if writes_page:
        with errors(FAILED), signals():
            try:
                # Atomically: after an error the file that the page would replace is unchanged.
                atomic_write(target, page(steps, facts, window), durable=False)
            except OSError as error:
                message = f"cannot write the page {target}: {error.strerror}; give another place with --output"
                raise OSError(message) from error
    if json_output:
        print(json.dumps(facts, allow_nan=False))
    else:
        print(f"{target}: {count_of(facts['steps'], 'step')}, {facts['first_step']:,} to {facts['last_step']:,}")
        by = verdict(facts)
        if by.bound_by:
            print(f"bound by {by.bound_by}, {by.more}")
            print(f"change first: {by.first_change}")
        else:
            print(by.advice)
        rates = [facts["predicted_rates"]] if facts["predicted_rates"] else []
        for line in (*rates, *budget_words(facts), *dollars_of(facts)):
            print(line)
        if facts["links"]:
            print("busy: " + ", ".join(f"{LINKS[link]} {share:.0%}" for link, share in facts["links"].items()))


def _is_foreign(target: Path, named: bool) -> bool:
    """Returns True for a regular file that is neither empty nor a page of this command.

    The command may write to devices, pipes and links that the user names. It must not follow a link beside a log: the
    log's folder may belong to another user, and the link may lead to any file. Raises `ConfigError` for a file that
    cannot be read, since it may belong to another program.
    """
    from offload.report.page import BEGIN

    if not named and (status := inner_status(target, 1)) is not None and not stat.S_ISREG(status.st_mode):
        return True

    if not target.is_file():
        return False
    try:
        with target.open("rb") as file:
            head = file.read(len(BEGIN))
    except OSError as error:
        raise ConfigError(
            f"{target} exists and cannot be read: {error.strerror}; give another --output, or remove it"
        ) from error
    return head not in (b"", BEGIN.encode())
