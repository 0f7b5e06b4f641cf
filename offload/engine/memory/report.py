"""RSS and device memory of a process by owner, in sums that add up."""

from __future__ import annotations

from typing import Any

import psutil
import torch

from offload.aio import resident_bytes
from offload.engine.training.components import EngineComponents
from offload.sizes import count_of, format_size
from offload.swapper.memory.device import memory_stats
from offload.swapper.memory.host_arena import HostArena, process_memory


class MemoryReport(dict[str, Any]):
    """Numbers of bytes by name; `str()` renders them as text."""

    def __str__(self) -> str:
        host, device = self["host"], self["device"]
        lines = [
            f"resident {format_size(host['rss'])} = {format_size(host['base'])} before training + "
            f"{format_size(host['arena'])} of the host budget + {format_size(host['device_arena'])} of a device that "
            f"is the CPU + {format_size(host['other_engines'])} of other engines + {format_size(host['other'])} of "
            "everything else"
        ]
        lines += [
            f"  {name}: {format_size(each['used'])} of {format_size(each['budget'])} in use, "
            f"{format_size(each['peak'])} at most"
            for name, each in self["classes"].items()
            if each["budget"]
        ]
        lines.append(
            f"device {format_size(device['allocated'])} = {format_size(device['arena'])} of the device budget "
            f"({format_size(device['in_use'])} in use) + {format_size(device['other'])} of everything else"
        )
        activations = self["activations"]
        if any(each["peak"] for each in activations.values()):
            lines.append(
                "inputs of checkpointed units, now and at most: "
                + ", ".join(
                    f"{format_size(each['used'])} and {format_size(each['peak'])} on {tier}"
                    for tier, each in activations.items()
                )
            )
        allocator = self["allocator"]
        if allocator:
            lines.append(
                f"torch's allocator: {format_size(allocator['allocated'])} allocated, "
                f"{format_size(allocator['allocated_peak'])} at most, of {format_size(allocator['reserved'])} "
                f"reserved, {format_size(allocator['reserved_peak'])} at most; "
                f"{count_of(allocator['retries'], 'retry', 'retries')} after it freed its cache, "
                f"{count_of(allocator['out_of_memory'], 'error')} of no memory"
            )
        return "\n".join(lines)


def resident_of_arenas(components: EngineComponents) -> tuple[int, int]:
    """Returns resident bytes of the host arena, and of the device arena if the device is the CPU."""
    blocks = [memory for _, memory in components.pager.arena.blocks if memory.device.type == "cpu" and memory.numel()]
    on_cpu = sum(resident_bytes(memory.data_ptr(), memory.numel()) for memory in blocks)
    return sum(resident_bytes(arena.address, arena.nbytes) for arena in _own_arenas(components)), on_cpu


def _own_arenas(components: EngineComponents) -> list[HostArena]:
    """Returns the host memory of one engine."""
    return [components.arena, *components.activations.arenas]


def base_bytes(components: EngineComponents) -> int:
    """Returns resident bytes of this process outside of this engine's arenas and the other engines' host arenas."""
    return int(psutil.Process().memory_info().rss) - sum(resident_of_arenas(components)) - _others(components)


def memory_report(components: EngineComponents, base: int) -> MemoryReport:
    """Returns the memory of this process by owner, in bytes.

    `host`: rss = base + arena + device_arena + other_engines + other. "other" came after the engine was built:
    activations, gradients in flight, libraries. `device`: allocated = arena + other. `allocator`: figures of torch's
    allocator of the device, in which the arena counts as allocated; empty on a CPU. Each of `classes` lists its budget
    in the host arena, the bytes in use now, and the peak. `activations` lists the inputs of checkpointed units by tier.

    Args:
        components: components of the engine.
        base: the result of `base_bytes` when the engine was built.
    """
    arena, device_arena = resident_of_arenas(components)
    others = _others(components)
    rss = int(psutil.Process().memory_info().rss)
    budget = components.pager.arena
    device = components.shards.device.torch
    # The CPU has no allocator to ask, so the arena stands for the whole device.
    on_cpu = device.type == "cpu"
    taken = 0 if budget.given_back else budget.nbytes
    allocated = taken if on_cpu else torch.get_device_module(device).memory_allocated(device)
    return MemoryReport(
        host={
            "rss": rss,
            "base": base,
            "arena": arena,
            "device_arena": device_arena,
            "other_engines": others,
            "other": rss - base - arena - device_arena - others,
        },
        host_memory=sum(each.nbytes for each in _own_arenas(components)),
        classes={
            name: {"budget": region.space.nbytes, "used": region.space.used_bytes, "peak": region.space.peak_bytes}
            for name, region in components.arena.regions.items()
        },
        device={
            "allocated": allocated,
            "arena": taken,
            "in_use": min(budget.used_bytes, taken),
            "other": allocated - taken,
        },
        activations=components.activations.bytes_by_tier(),
        allocator=_allocator(device),
    )


def _allocator(device: torch.device) -> dict[str, int]:
    """Returns bytes and counts of torch's allocator of a device since the start of the process; empty on a CPU.

    A retry means that torch had to give its cache back to the driver before an allocation succeeded: memory is short.
    """
    found = memory_stats(device)
    if not found:
        return {}
    return {
        "allocated": found.get("allocated_bytes.all.current", 0),
        "allocated_peak": found.get("allocated_bytes.all.peak", 0),
        "reserved": found.get("reserved_bytes.all.current", 0),
        "reserved_peak": found.get("reserved_bytes.all.peak", 0),
        "retries": found.get("num_alloc_retries", 0),
        "out_of_memory": found.get("num_ooms", 0),
    }


def _others(components: EngineComponents) -> int:
    """Returns resident bytes of the host arenas of other engines of this process."""
    own = _own_arenas(components)
    arenas = [arena for arena in process_memory().arenas if arena not in own]
    return sum(resident_bytes(arena.address, arena.nbytes) for arena in arenas)
