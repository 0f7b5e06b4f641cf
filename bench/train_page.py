"""The page of training beside its peers: `python -m bench.train_page FOLDER`, or `make bench`.

Runs `offload bench train` with its defaults on the drive of FOLDER, and writes its table, with machine and versions,
between the two marks for its precision in docs/benchmarks/2026-11-train.md: a processor that computes in bf16 has one
table, and one that does not the other. The chart and all figures go into files beside it. The bound of a contender is
the larger of the step of plain PyTorch and of its bytes over the drive's rates, in the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from offload.bench.measure import DriveSpeeds
from offload.bench.train import figures
from offload.bench.train.loops import measure
from offload.bench.train.plan import TrainPlan, make_plan
from offload.errors import UsageError
from offload.hardware.info import machine
from offload.sizes import format_size

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "benchmarks" / "2026-11-train.md"
_PEERS = ("deepspeed", "torchao")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder on the drive to measure")
    options = parser.parse_args()
    plan = make_plan(options.folder)
    between(PAGE.read_text(), plan.dtype, "")  # a page without the marks is an error before half an hour of measuring
    result = measure(plan, lambda line: print(line, file=sys.stderr, flush=True))
    rows = figures.make_rows(plan, result)
    installed = {package.metadata["Name"] for package in metadata.distributions()}
    facts = machine() | {"peers": {name: metadata.version(name) for name in _PEERS if name in installed}}
    name = f"{PAGE.stem}-{plan.dtype}"
    chart = DOCS / "images" / f"{name}.svg"
    figures.plot(rows, chart)
    PAGE.with_name(f"{name}.json").write_text(json.dumps(figures.as_json(facts, plan, result), indent=1) + "\n")
    link = f"![Seconds of a step by contender](../images/{chart.name})"
    day = datetime.now(timezone.utc).date()
    versions = {"python": facts["python"], **facts["versions"], **facts["peers"]}
    hardware = f"{facts['processor']}, {facts['cores']} cores, {format_size(facts['memory_bytes'])} of RAM"
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    on = f"{hardware}, Linux {facts['kernel']}; {software}."
    content = f"{day}. {on}\n\n{markdown(plan, result.rates, rows)}\n\n{link}"
    PAGE.write_text(between(PAGE.read_text(), plan.dtype, content))
    print(content)


def markdown(plan: TrainPlan, rates: DriveSpeeds, rows: Sequence[figures.TrainRow]) -> str:
    """Returns heading, table and remarks as Markdown."""
    table = [figures.TITLES, ["---"] * len(figures.TITLES), *(figures.cells(row) for row in rows if row.turns)]
    lines = [*(f"{line}.  " for line in figures.heading(plan, rates)), ""]
    lines += ["| " + " | ".join(row) + " |" for row in table]
    remarks = figures.remarks(rows, plan.dtype)
    return "\n".join([*lines, *([""] if remarks else []), *(f"* {line}" for line in remarks)])


def between(page: str, dtype: str, content: str) -> str:
    """Returns a page with `content` between the two marks for `dtype`.

    Raises:
        UsageError: the page lacks a mark.
    """
    first, last = (f"<!-- make bench writes {dtype} {where} here -->" for where in ("from", "to"))
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise UsageError(f"{PAGE} needs the lines {first} and {last}, between which the table is written")
    return f"{before}{first}\n\n{content}\n\n{last}{after}"


if __name__ == "__main__":
    main()
