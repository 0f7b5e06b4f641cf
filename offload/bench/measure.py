"""What benchmarks of training measure with: times in turns, ratios of paired measurements, tokens, memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch


def seconds_of(action: Callable[[], object]) -> float:
    """Returns the seconds that a call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def in_turns(one: Callable[[], object], other: Callable[[], object], rounds: int) -> tuple[list[float], list[float]]:
    """Returns the seconds of each of two calls, measured alternately after one round that does not count."""
    one(), other()
    pairs = [(seconds_of(one), seconds_of(other)) for _ in range(rounds)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Returns the median of the ratios of paired measurements."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def random_ids(shape: tuple[int, int], vocabulary: int, seed: int = 0) -> torch.Tensor:
    """Returns random tokens on the CPU, the same ones for the same seed."""
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def peak_resident() -> int:
    """Returns the peak bytes of this process in RAM so far; `ru_maxrss` would include the peak of its parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
