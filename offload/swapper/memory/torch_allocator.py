"""torch's caching allocator of a device: shortages that it has met, and memory that it keeps for later tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Shortages(NamedTuple):
    """Counts of moments in which the device had no more memory, since the process began."""

    retries: int
    """Allocations for which torch gave up the memory that it kept, or tried to."""
    errors: int
    """Allocations that failed: torch raised its out-of-memory error."""


def shortages(device: torch.device) -> Shortages:
    """Returns the shortages of `device` so far; zeros for a device on which torch counts none."""
    if device.type != "cuda":
        return Shortages(0, 0)
    # Not `memory_stats`, which renames hundreds of entries: this is called at every entry of an engine that has grown.
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    return Shortages(int(stats.get("num_alloc_retries", 0)), int(stats.get("num_ooms", 0)))


def empty_cache(device: torch.device) -> None:
    """Gives the memory of freed tensors that torch keeps back to the driver, so that any allocation may use it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
