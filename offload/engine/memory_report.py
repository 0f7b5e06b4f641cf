"""Where a process's memory is, so that it adds up: RSS and device memory by who holds it."""

from __future__ import annotations

from typing import Any

import psutil
import torch

from offload.aio import resident_bytes
from offload.engine.training.components import Parts
from offload.sizes import format_size
from offload.swapper.memory.host_arena import process_memory


class MemoryReport(dict[str, Any]):
    """Plain numbers of bytes, by name; `str()` says the same in words."""

    def __str__(self) -> str:
        host, device = self["host"], self["device"]
        lines = [
            f"resident {format_size(host['rss'])} = {format_size(host['base'])} before training"
            f" + {format_size(host['arena'])} of the host budget"
            f" + {format_size(host['device_arena'])} of a device that is the CPU"
            f" + {format_size(host['other_engines'])} of other engines"
            f" + {format_size(host['other'])} beside"
        ]
        lines += [
            f"  {name}: {format_size(each['used'])} of {format_size(each['budget'])} in use, "
            f"{format_size(each['peak'])} at most"
            for name, each in self["classes"].items()
            if each["budget"]
        ]
        lines.append(
            f"device {format_size(device['allocated'])} = {format_size(device['arena'])} of the device budget"
            f" ({format_size(device['in_use'])} in use) + {format_size(device['other'])} beside"
        )
        return "\n".join(lines)


def resident_of_arenas(parts: Parts) -> tuple[int, int]:
    """Bytes of RAM that the host arena has, and the device arena where the device is the CPU."""
    pieces = [memory for _, memory in parts.pager.arena.pieces if memory.device.type == "cpu" and memory.numel()]
    on_cpu = sum(resident_bytes(memory.data_ptr(), memory.numel()) for memory in pieces)
    return resident_bytes(parts.arena.address, parts.arena.nbytes), on_cpu


def base_bytes(parts: Parts) -> int:
    """What is resident and none of any engine's."""
    return int(psutil.Process().memory_info().rss) - sum(resident_of_arenas(parts)) - _others(parts)


def memory_report(parts: Parts, base: int) -> MemoryReport:
    """`base` is what `base_bytes` said when the engine began. All in bytes.

    `host`: rss = base + arena + device_arena + other_engines + other, where "other" has come since: activations,
    gradients on their way, libraries. `device`: allocated = arena + other. Each of `classes` has its part of the host
    budget, what is leased of it now, and the most that ever was.
    """
    arena, device_arena = resident_of_arenas(parts)
    others = _others(parts)
    rss = int(psutil.Process().memory_info().rss)
    budget = parts.pager.arena
    device = parts.held.device.torch
    allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else budget.nbytes
    return MemoryReport(
        host={
            "rss": rss,
            "base": base,
            "arena": arena,
            "device_arena": device_arena,
            "other_engines": others,
            "other": rss - base - arena - device_arena - others,
        },
        host_memory=parts.arena.nbytes,
        classes={
            name: {"budget": region.space.nbytes, "used": region.space.used_bytes, "peak": region.space.peak_bytes}
            for name, region in parts.arena.regions.items()
        },
        device={
            "allocated": allocated,
            "arena": budget.nbytes,
            "in_use": budget.used_bytes,
            "other": allocated - budget.nbytes,
        },
    )


def _others(parts: Parts) -> int:
    """Bytes of RAM of the host arenas of other engines of this process."""
    arenas = [arena for arena in process_memory().arenas if arena is not parts.arena]
    return sum(resident_bytes(arena.address, arena.nbytes) for arena in arenas)
