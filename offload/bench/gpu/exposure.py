"""The GPU's seconds of a step by the profiler: kernels, copies that no kernel hides, and neither."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

Interval = tuple[float, float]
"""(start, end), in seconds."""


class Exposure(NamedTuple):
    """Seconds of one step."""

    seconds: float
    """All of it."""
    kernels: float
    """Some kernel ran."""
    copies: float
    """Something was copied to the GPU or from it."""
    exposed_copies: float
    """Something was copied, and no kernel ran."""
    idle: float
    """Neither: the GPU waited for a drive, for an update, or for the host."""


def exposure(seconds: float, kernels: Iterable[Interval], copies: Iterable[Interval]) -> Exposure:
    """Returns the parts of a step of so many seconds; its kernels and copies may overlap as they like."""
    computing, copying = union(kernels), union(copies)
    busy = length(union([*computing, *copying]))
    return Exposure(seconds, length(computing), length(copying), busy - length(computing), max(seconds - busy, 0.0))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the same time in intervals that do not overlap, ascending."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Returns the sum of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


def profiled(device: torch.device, step: Callable[[], object]) -> Exposure | None:
    """Returns the parts of one step; None without a GPU. The step may end before its updates do."""
    if device.type != "cuda":
        step()
        return None
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        start = time.perf_counter()
        step()
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
    kernels, copies = split(seen.events())
    return exposure(seconds, kernels, copies)


def split(events: Iterable[Any]) -> tuple[list[Interval], list[Interval]]:
    """Returns the times of kernels, and of copies between host and GPU, among the events of torch's profiler."""
    kernels: list[Interval] = []
    copies: list[Interval] = []
    for event in events:
        if event.device_type.name != "CUDA":
            continue
        between = "HtoD" in event.name or "DtoH" in event.name
        (copies if between else kernels).append((event.time_range.start / 1e6, event.time_range.end / 1e6))
    return kernels, copies
