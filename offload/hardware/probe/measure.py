"""All of it, one after the other: drives, memory, the device in each dtype, and the first of it once more."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from offload.aio import DirectFile, IoQueue, aligned_empty
from offload.aio.measure import OPERATIONS, move, remove
from offload.errors import ConfigError
from offload.hardware.info import drive as about_drive
from offload.hardware.info import machine as about_machine
from offload.hardware.noise import fill_with_noise
from offload.hardware.probe.compute import Compute
from offload.hardware.probe.disturb import Others, apart
from offload.hardware.probe.host import Host
from offload.hardware.probe.pace import Pace
from offload.hardware.probe.rates import DTYPES, DriveRates, DtypeRates, Probed, Rates
from offload.sizes import MIB, PAGE, align_up, format_size
from offload.swapper.memory.device import compute_device

SECONDS = 30.0
"""That all of it takes, about, on a machine of any speed."""
_OF_DRIVES = 0.3
"""Of the seconds."""
_OF_THE_FIRST_WRITE = 0.15
"""Of a drive's."""
_REQUEST = 16 * MIB
_CHECKED = "fp32"
"""The dtype of the products that are measured twice: every machine multiplies it well."""

Tell = Callable[[str, float], None]
"""Is told what is measured next, and how much of all is done by then, from 0 to 1."""


def probe(
    folders: Sequence[str],
    device: str = "auto",
    nbytes: int = 256 * MIB,
    tell: Tell = lambda *_: None,
    seconds: float = SECONDS,
) -> Probed:
    """Measure all of it, in about so many seconds. Each folder has a file of at most `nbytes` for a moment."""
    start = time.perf_counter()
    compute = device_of(device)
    drives = []
    for index, folder in enumerate(folders):
        tell(f"the drive of {folder}", _OF_DRIVES * index / len(folders))
        drives.append(drive_rates(folder, nbytes, seconds=_OF_DRIVES * seconds / len(folders)))
    share = _OF_DRIVES if folders else 0.0
    rates, doubts = _measure(compute, lambda words, done: tell(words, share + (1 - share) * done), seconds)
    date = time.strftime("%Y-%m-%d")
    return Probed(machine_of(compute), rates, tuple(drives), date, time.perf_counter() - start, doubts)


def drive_rates(folder: str, nbytes: int = 256 * MIB, rounds: int = 3, seconds: float = SECONDS) -> DriveRates:
    """What the drive under `folder` moves by itself, by the queue that will use it. Errors are `IoError`.

    A drive that is slow has a shorter file than `nbytes` and fewer rounds, but one.
    """
    check_size(nbytes)
    buffer = aligned_empty(align_up(nbytes))
    fill_with_noise(buffer)
    request = min(_REQUEST, align_up(len(buffer) // 2))
    path = Path(folder) / f".offload-probe.{os.getpid()}"
    start = time.perf_counter()
    taken: dict[str, list[float]] = {name: [] for name in OPERATIONS}
    try:
        with DirectFile(path, create=True) as file, IoQueue() as queue:
            file.reserve(len(buffer))
            part = buffer[: _written(queue, file, buffer, request, _OF_THE_FIRST_WRITE * seconds)]
            while not taken["read"] or (len(taken["read"]) < rounds and time.perf_counter() - start < seconds):
                for name in OPERATIONS:
                    each = move(queue, file, part, name, request)
                    taken[name].append(each.nbytes / each.seconds)
    finally:
        remove(path)
    found = {name: statistics.median(each) for name, each in taken.items()}
    return DriveRates(
        os.path.realpath(folder), about_drive(folder)["device"], found["read"], found["write"], found["mixed"]
    )


def _written(queue: IoQueue, file: DirectFile, buffer: memoryview, request: int, seconds: float) -> int:
    """Write the beginning of the buffer once, since the first write of a block does more: how many bytes of it.

    From two requests on twice as many, until they have taken so many seconds or all is written.
    """
    start, written = time.perf_counter(), 0
    while written < len(buffer) and (not written or time.perf_counter() - start < seconds):
        written = min(max(2 * request, 2 * written), len(buffer))
        move(queue, file, buffer[:written], "write", request)
    return written


def measure_rates(device: torch.device, tell: Tell = lambda *_: None, seconds: float = SECONDS) -> Rates:
    """What is no drive's. A gigabyte of memory is taken for a moment."""
    return _measure(device, tell, seconds)[0]


def _measure(device: torch.device, tell: Tell, seconds: float) -> tuple[Rates, tuple[str, ...]]:
    """The rates, and what makes them doubtful."""
    others, steps = Others(), 2 + 3 * len(DTYPES) + 2
    done = iter(range(steps))

    def say(words: str) -> None:
        tell(words, next(done) / steps)

    say("memory")
    host, compute = Host(Pace.of(seconds)), Compute(device, Pace.of(seconds))
    memory, copy = host.memory(), host.copy()
    products, elementwise, stepped = {}, {}, {}
    for name in DTYPES:
        say(f"matrix products in {name}")
        products[name] = compute.products(name)
    say("copies to and from the device")
    upload, download = compute.copies()
    for name in DTYPES:
        say(f"norms, activations and sums in {name}")
        elementwise[name] = compute.elementwise(name)
        say(f"optimizer and gradients in {name}")
        stepped[name] = host.optimizer(name)
    say("new memory")
    fresh = compute.fresh()
    say("memory, matrix products and norms once more")
    doubts = (
        *apart("memory", memory, host.memory(), lambda rate: f"{rate / 1e9:.1f} GB/s"),
        *apart(
            f"matrix products in {_CHECKED}",
            products[_CHECKED][0],
            compute.products(_CHECKED)[0],
            lambda rate: f"{rate / 1e12:.3g} Tflop/s",
        ),
        *apart(
            f"norms, activations and sums in {_CHECKED}",
            elementwise[_CHECKED],
            compute.elementwise(_CHECKED),
            lambda rate: f"{rate / 1e9:.1f} GB/s",
        ),
        *others.doubts(),
    )
    by_dtype = {name: DtypeRates(*products[name], elementwise[name], *stepped[name]) for name in DTYPES}
    return Rates(memory, copy, upload, download, fresh, by_dtype), doubts


def check_size(nbytes: int) -> None:
    """Raise `ConfigError` for a file of which nothing can be measured, or for which there is no buffer."""
    if nbytes < 2 * PAGE:
        raise ConfigError(f"expected a size of at least {2 * PAGE} bytes, got {nbytes}")
    free = psutil.virtual_memory().available
    if nbytes > free // 2:
        raise ConfigError(
            f"{format_size(free)} of memory are free, and the buffer is as long as the file, {format_size(nbytes)}: "
            f"give a smaller --size"
        )


def check_folders(folders: Sequence[str]) -> None:
    """Raise `IoError` for one that is not there or cannot be written."""
    for folder in folders:
        about_drive(folder)


def device_of(name: str) -> torch.device:
    """Returns the device that `--device` names. Raises `ConfigError`, in the command line's words, if there is none."""
    return compute_device(name, "--device")


def machine_of(device: torch.device) -> dict[str, Any]:
    """What it is, and its GPU where that computes."""
    found = about_machine() | {"name": platform.node(), "gpu": None, "gpu_memory_bytes": 0}
    if device.type == "cuda":
        of = torch.cuda.get_device_properties(device)
        found |= {"gpu": of.name, "gpu_memory_bytes": of.total_memory}
    return found
