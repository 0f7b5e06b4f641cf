"""Division of a step's time on the GPU, by torch's profiler: kernels, copies that no kernel hides, and idle time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

Interval = tuple[float, float]
"""(start, end), in seconds."""


class Exposure(NamedTuple):
    """Seconds of one step, by the activity of the GPU."""

    seconds: float
    """Duration of the step."""
    kernels: float
    """Seconds in which at least one kernel ran."""
    copies: float
    """Seconds in which something was copied to or from the GPU."""
    exposed_copies: float
    """Seconds in which something was copied and no kernel ran."""
    idle: float
    """Seconds without kernels and copies: the GPU waited for a drive, for an update, or for the host."""


def exposure(seconds: float, kernels: Iterable[Interval], copies: Iterable[Interval]) -> Exposure:
    """Returns the division of a step that took `seconds`; the intervals of kernels and copies may overlap."""
    computing, copying = union(kernels), union(copies)
    busy = length(union([*computing, *copying]))
    return Exposure(seconds, length(computing), length(copying), busy - length(computing), max(seconds - busy, 0.0))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the union of intervals, as ascending intervals that do not overlap."""
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
    """Runs one step and returns the division of its time; None without a GPU.

    The optimizer's updates may still run when the step ends.
    """
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
    """Returns two lists of intervals from the events of torch's profiler: kernels, and copies between host and GPU.

    Other work of the GPU, such as copies within its memory, counts as kernels.
    """
    kernels: list[Interval] = []
    copies: list[Interval] = []
    for event in events:
        if event.device_type.name != "CUDA":
            continue
        between = "HtoD" in event.name or "DtoH" in event.name
        (copies if between else kernels).append((event.time_range.start / 1e6, event.time_range.end / 1e6))
    return kernels, copies
