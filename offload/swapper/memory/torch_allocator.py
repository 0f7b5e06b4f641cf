"""torch's caching allocator of a device: shortages that it has met, and memory that it keeps for later tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Shortages(NamedTuple):
    """Counts of moments in which the device had no more memory, since the process began."""

    retries: int
    """Allocations for which torch gave up the memory that it kept, or tried to."""
    errors: int
    """Allocations that failed: torch raised its out-of-memory error."""


def shortages(device: torch.device) -> Shortages:
    """Returns the shortages of `device` so far; zeros for a device on which torch counts none."""
    if device.type == "cpu":
        return Shortages(0, 0)
    # Not `memory_stats`, which renames hundreds of entries: this is called at every entry of an engine that has grown.
    nested = getattr(torch.get_device_module(device), "memory_stats_as_nested_dict", None)
    stats = memory_stats(device) if nested is None else nested(device)
    return Shortages(int(stats.get("num_alloc_retries", 0)), int(stats.get("num_ooms", 0)))


def memory_stats(device: torch.device) -> dict[str, Any]:
    """Returns the allocator's figures by torch's names for them; empty for a device on which torch counts none."""
    if device.type == "cpu":
        return {}
    # Not every device's module has the function: that of MPS has none.
    found = getattr(torch.get_device_module(device), "memory_stats", None)
    return {} if found is None else dict(found(device))


def empty_cache(device: torch.device) -> None:
    """Gives the memory of freed tensors of `device` that torch keeps back to the driver, for any allocation to use."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
