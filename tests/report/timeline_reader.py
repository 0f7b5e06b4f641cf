"""Reads timelines and checks that their spans nest; a small job that records one."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload.timeline import Row
from tests.support.oracle import (
    Job,
    run,
)

DISK = ("nvme", "nvme")


class Net(nn.Module):
    """A model of blocks, a bias of the root's own, and a block whose forward is recomputed in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.bias = nn.Parameter(torch.zeros(32))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.h[0](hidden + self.bias)
        hidden = checkpoint(self.h[1], hidden, use_reentrant=False)
        return self.h[2](hidden)


def loss(model: Any, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 10 + micro)
    return model(torch.randn(4, 32, generator=generator)).pow(2).mean()


JOB = Job(Net, loss, steps=3, accumulation=2)

# -- reading a timeline ------------------------------------------------------------------------------


class Slice(NamedTuple):
    name: str
    start: int
    end: int
    nbytes: int


def read(path: Path) -> dict[str, Any]:
    """Returns the file after a check that it has the trace event format and rows that can be drawn."""
    data = path.read_bytes()
    content: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    assert content["displayTimeUnit"] in ("ms", "ns")
    for event in content["traceEvents"]:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["ts"] > 0 and event["dur"] >= 0 and isinstance(event["tid"], int)
            assert event.get("args", {}).get("bytes", 1) > 0
        elif event["ph"] == "C":
            assert event["ts"] > 0 and event["args"]["bytes"] >= 0
        else:
            assert event["ph"] in ("M", "i")
    for spans in threads(content).values():
        _check_nested(spans)
    return content


def _check_nested(spans: list[Slice]) -> None:
    """Asserts that any two spans of a thread are disjoint or nested."""
    open_until: list[int] = []
    for span in sorted(spans, key=lambda each: (each.start, -each.end)):
        while open_until and open_until[-1] <= span.start:
            open_until.pop()
        assert not open_until or span.end <= open_until[-1], span
        open_until.append(span.end)


def threads(content: dict[str, Any]) -> dict[str, list[Slice]]:
    """Returns the spans of each thread of the file, by its name."""
    events = content["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert len(set(names.values())) == len(names)
    found: dict[str, list[Slice]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start, nbytes = round(event["ts"] * 1000), event.get("args", {}).get("bytes", 0)
            found[names[event["tid"]]].append(Slice(event["name"], start, start + round(event["dur"] * 1000), nbytes))
    return found


def row(content: dict[str, Any], row: Row) -> list[Slice]:
    """Returns the spans of a row, on all of its lanes."""
    every = threads(content).items()
    return [span for name, spans in every if name.rstrip(" 0123456789") == row.value for span in spans]


def names(content: dict[str, Any], of: Row) -> set[str]:
    return {span.name for span in row(content, of)}


def counters(content: dict[str, Any]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for event in content["traceEvents"]:
        if event["ph"] == "C":
            found[event["name"]].append(event["args"]["bytes"])
    return found


# -- what it holds ------------------------------------------------------------------------------------


def _content(job: Job, placement: tuple[str, str], folder: Path, **options: Any) -> dict[str, Any]:
    run(job, placement, folder / "swap", trace=str(folder / "trace.json"), **options)
    return read(folder / "trace.json")
