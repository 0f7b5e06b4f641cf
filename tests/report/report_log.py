"""Logs and timelines of a run, as `offload report` reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ABOUT = {
    "run": "mine <b>",
    "model": "GPT2LMHeadModel",
    "parameters": 1000,
    "steps": 20,
    "samples_a_step": 4,
    "host_budget_bytes": 2**30,
    "drive_tbw": 1,
    "drive_share": 0.1,
}


def step(number: int, **more: Any) -> dict[str, Any]:
    return {
        "step": number,
        "loss": 10 / number,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": 100,
        "seconds": 2.0,
        "read_bytes": 3 * 2**30,
        "written_bytes": 2**30,
        "skipped_steps": 0.0,
        "host_peak_bytes": 2e9,
        "forward_seconds": 0.5,
        "backward_seconds": 0.9,
        "step_seconds": 0.1,
        "wait_for_reads_seconds": 0.25,
        "wait_for_updates_seconds": 0.4,
        "wait_for_commits_seconds": 0.05,
        "wait_for_memory_seconds": 0.0,
        "wait_for_uploads_seconds": 0.0,
        "update_kernels_seconds": 0.3,
        "update_copies_seconds": 0.0,
        "update_waits_for_reads_seconds": 0.2,
        "update_waits_for_writes_seconds": 0.5,
        "uploaded_bytes": 2**20,
        "gradients_bytes": 2**20,
        "drives": {"/mnt/a": number * 10**9},
        **more,
    }


def written(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("".join(line if isinstance(line, str) else f"{json.dumps(line)}\n" for line in lines))
    return path


def span(row: str, name: str, start: float, took: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "pid": 1, "tid": 1000, "cat": row, "name": name, "ts": start, "dur": took, **more}


def trace() -> dict[str, Any]:
    events = [span("compute", f"step {n}", n * 100, 5) for n in range(1, 5)]
    events += [span("reads", "h.0 <weight>", n * 100 + 20, 30, args={"bytes": 4096}) for n in range(1, 5)]
    return {"traceEvents": [{"ph": "M", "pid": 1, "tid": 0, "name": "process_name"}, *events]}
