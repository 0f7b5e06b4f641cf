"""Bytes and seconds of a step of each optimizer, with everything on disk: `python -m bench.optimizers bytes FOLDER`.

A model of square matrices, some of them in a unit, trains in bf16 with durable steps. The kernel counts the bytes of
the process (/proc/self/io); bound of the bytes: each state of an element once each way, and its weight once more for
the other pass of the step. The seconds are those from one return of `step()` to the next, with a forward and a
backward of few tokens.
Optimizers take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offload
from bench.measure import report, settings_for

BYTES = {"AdamW": 26, "Muon": 18, "Muon, bf16 moments": 14, "SinkGD": 10}
"""Of each optimizer, for an element of a matrix and a step."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.optimizers bytes")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--width", type=int, default=1024, help="rows and columns of each matrix")
    parser.add_argument("--units", type=int, default=16)
    parser.add_argument("--matrices", type=int, default=4, help="matrices of a unit")
    parser.add_argument("--only", choices=list(BYTES), nargs="+", default=list(BYTES))
    parser.add_argument("--host-memory", default="128MiB")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(arguments)
    numel = given.units * given.matrices * given.width**2
    found: dict[str, list[dict[str, float]]] = {name: [] for name in given.only}
    for turn in range(given.rounds):
        for name in given.only:
            found[name].append(_measured(given, name, numel, turn))
    report(
        "optimizers",
        {
            "parameters": numel,
            "width": given.width,
            "matrices of a unit": given.matrices,
            "host_memory": given.host_memory,
            **{
                name: {
                    "bound_bytes": BYTES[name],
                    **{key: round(statistics.median(row[key] for row in rows), 4) for key in rows[0]},
                }
                for name, rows in found.items()
            },
        },
    )


def _measured(given: argparse.Namespace, name: str, numel: int, turn: int) -> dict[str, float]:
    """Returns bytes read and written for each parameter, bytes of swap files, and seconds, of a step."""
    kind, _, moments = name.partition(", ")
    content: dict[str, Any] = settings_for(given.folder, f"bench-{kind}", "nvme", host_memory=given.host_memory)
    content["optimizer"] = {"type": kind, "params": {"lr": 1e-4}}
    content["offload"]["units"] = [str(index) for index in range(given.units)]
    if moments:
        content["offload"]["moments"] = moments.split()[0]
    torch.manual_seed(turn)
    model = nn.Sequential(
        *(
            nn.Sequential(*(nn.Linear(given.width, given.width, bias=False) for _ in range(given.matrices)))
            for _ in range(given.units)
        )
    )
    engine = offload.initialize(model=model, config=content)[0]
    try:
        rows = torch.randn(16, given.width, dtype=torch.bfloat16)
        _step(engine, rows)  # the first forward finds the order of the units
        _step(engine, rows)
        steps, before, start = 4, _io(), time.perf_counter()
        for _ in range(steps):
            _step(engine, rows)
        seconds, after = (time.perf_counter() - start) / steps, _io()
        stored = sum(path.stat().st_blocks * 512 for path in given.folder.rglob("*") if path.is_file())
    finally:
        engine.destroy(remove=True)
    read, written = ((after[key] - before[key]) / steps / numel for key in ("read_bytes", "write_bytes"))
    return {
        "bytes": read + written,
        "read": read,
        "written": written,
        "disk_bytes": stored / numel,
        "seconds": seconds,
    }


def _step(engine: offload.Engine, rows: torch.Tensor) -> None:
    engine.backward(engine(rows).float().square().mean())
    engine.step()


def _io() -> dict[str, int]:
    """Returns the counters of this process in /proc/self/io."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}
