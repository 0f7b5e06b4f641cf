"""Measurement of copies to and from the engine's host memory, in turns with copies of torch's own pinned memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from offload.bench.gpu.work import Save, Work
from offload.bench.measure import in_turns, median_ratio
from offload.swapper.memory.device import Device, open_device
from offload.swapper.memory.host_arena import Classes, Copied, HostArena, HostBuffer


def copies(work: Work, save: Save) -> None:
    """Measures copies to and from a host arena by the device object, in turns with the same copies by torch."""
    nbytes, device = work.copy_nbytes, open_device(work.device)
    copied = None if device.host_addressable else Copied(resident=0, promoted=0, tiles=True)
    arena = HostArena(Classes(nbytes, 0, 0, 0), device, copied=copied)  # registers its memory
    buffer = arena.tiles.take(nbytes)
    assert buffer is not None
    ours = buffer.tensor(torch.uint8).random_(0, 256)
    pinned = torch.ones(nbytes, dtype=torch.uint8, pin_memory=work.device.type == "cuda")
    away = torch.empty(nbytes, dtype=torch.uint8, device=work.device)
    figures: dict[str, Any] = {"nbytes": nbytes, "host_bytes": arena.nbytes, "pinned_bytes": arena.pinned_bytes}

    def upload() -> None:
        device.upload(away, ours).wait()

    def download() -> None:
        device.download(ours, away).wait()

    figures["upload"] = _rates(work, upload, lambda: _copy(away, pinned))
    upload()  # again, since the last copy was torch's
    figures["upload"]["right"] = torch.equal(away.cpu(), ours)
    save(figures)
    away.copy_(ours.flip(0))
    device.synchronize()
    figures["download"] = _rates(work, download, lambda: _copy(pinned, away))
    figures["download"]["right"] = torch.equal(ours, away.cpu())
    save(figures)
    figures["both"] = _both(work, device, buffer)
    save(figures)
    arena.close()


def _both(work: Work, device: Device, buffer: HostBuffer) -> dict[str, Any]:
    """Returns the rates of copies in both directions at once, half of the bytes each; a bus can move both at a time."""
    half = work.copy_nbytes // 2
    up, down = buffer.tensor(torch.uint8)[:half], buffer.tensor(torch.uint8)[half : 2 * half]
    pinned = [torch.ones(half, dtype=torch.uint8, pin_memory=work.device.type == "cuda") for _ in range(2)]
    there, away = (torch.full((half,), value, dtype=torch.uint8, device=work.device) for value in (3, 5))
    streams = [torch.cuda.Stream(work.device) for _ in range(2)] if work.device.type == "cuda" else []
    up.fill_(7)
    device.synchronize()

    def ours() -> None:
        for event in (device.upload(there, up), device.download(down, away)):
            event.wait()

    def theirs() -> None:
        for number, (destination, source) in enumerate(((there, pinned[0]), (pinned[1], away))):
            with torch.cuda.stream(streams[number]) if streams else nullcontext():
                destination.copy_(source, non_blocking=True)
        for stream in streams:
            stream.synchronize()

    found = _rates(work, ours, theirs)
    ours()  # again, since the last copies were torch's
    found["right"] = bool((there.cpu() == 7).all()) and bool((down == 5).all())
    return found


def _copy(destination: torch.Tensor, source: torch.Tensor) -> None:
    destination.copy_(source, non_blocking=True)
    if destination.is_cuda or source.is_cuda:
        torch.cuda.current_stream().synchronize()


def _rates(work: Work, mine: Callable[[], None], theirs: Callable[[], None]) -> dict[str, Any]:
    seconds, bound = in_turns(mine, theirs, work.rounds)
    return {
        "gigabytes_per_second": work.copy_nbytes / statistics.median(seconds) / 1e9,
        "pinned_gigabytes_per_second": work.copy_nbytes / statistics.median(bound) / 1e9,
        "fraction_of_pinned": median_ratio(bound, seconds),
    }
