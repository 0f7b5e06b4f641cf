"""What is measured with: a config, turns, medians, and what every result says about the machine."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import offload
from offload import kernels


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def in_turns(one: Callable[[], object], other: Callable[[], object], rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each, measured alternately after one round that does not count."""
    one(), other()
    pairs = [(seconds(one), seconds(other)) for _ in range(rounds)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def median_ratio(numerators: list[float], denominators: list[float]) -> float:
    """The median of the ratios of paired measurements."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


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
