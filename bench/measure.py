"""What is measured with: options, models, turns, processes, and what every result says about the machine."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import offload
from offload import kernels
from offload.bench.measure import in_turns, median_ratio, random_ids
from offload.bench.measure import seconds_of as seconds
from offload.presets import build

__all__ = ["in_turns", "median_ratio", "random_ids", "seconds"]  # what other benchmarks take from here

STEPS = 4
"""Steps of a turn: the update of the last one runs into the other engine's turn, so one would be too few."""


def settings_for(folder: Path, run: str, tier: str, **more: Any) -> dict[str, Any]:
    """A config: bf16 AdamW on the CPU, weights and states on `tier`, and `more` for the "offload" block."""
    return {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": tier},
            "offload_optimizer": {"device": tier},
        },
        "offload": {"nvme_path": str(folder), "run": run, "device": "cpu", **more},
    }


def options(about: str | None, seq_len: int, rounds: int) -> argparse.ArgumentParser:
    """What a benchmark that trains a preset in a folder may be told; it adds its own."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="gpt2-small")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=seq_len)
    parser.add_argument("--rounds", type=int, default=rounds)
    return parser


def engine_of(model: str, settings: dict[str, Any]) -> offload.Engine:
    """An engine over the preset of this name."""
    with offload.init(settings):
        made = build(model)
    return offload.initialize(model=made, config=settings)[0]


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function` returns in a process of its own, which it has the memory of."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(send, function, arguments))
    process.start()
    send.close()
    result = receive.recv()
    process.join()
    return result


def _send(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    pipe.send(function(*arguments))


def resident(name: str = "VmRSS") -> int:
    """Bytes of this process in RAM, "VmHWM" for the most so far (`ru_maxrss` begins with that of its parent)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def report(name: str, figures: dict[str, Any]) -> None:
    """Print `figures`, rounded, with the machine that gave them, as one JSON object on one line."""
    machine = {
        "cores": os.cpu_count(),
        "threads": kernels.thread_count(),
        "processor": platform.processor() or platform.machine(),
        "kernel": platform.release(),
        "torch": torch.__version__,
        "offload": offload.__version__,
    }
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}
    print(json.dumps({"benchmark": name, **rounded, "machine": machine}))
