"""The probe of a machine: drives, memory and the device in each dtype; some measurements are repeated at the end."""

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
from offload.aio.file import open_new
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
"""Approximate duration of the entire probe on a machine of any speed."""
_OF_DRIVES = 0.3
"""Fraction of the probe's seconds that the drives take, all together."""
_OF_THE_FIRST_WRITE = 0.15
"""Fraction of a drive's seconds that its first write takes."""
_REQUEST = 16 * MIB
_CHECKED = "fp32"
"""Dtype of the measurements that are repeated at the end, since no machine is slow in fp32."""

Tell = Callable[[str, float], None]
"""Receives the name of the next measurement, and the fraction of the work that is done, from 0 to 1."""


def probe(
    folders: Sequence[str],
    device: str = "auto",
    nbytes: int = 256 * MIB,
    tell: Tell = lambda *_: None,
    seconds: float = SECONDS,
) -> Probed:
    """Measures the machine.

    Each folder holds a file of at most `nbytes` meanwhile.

    Raises:
        ConfigError: the device does not exist, or `nbytes` is out of range.
        IoError: a file cannot be written or read.
    """
    start = time.perf_counter()
    compute = device_of(device)
    drives = []
    for index, folder in enumerate(folders):
        tell(f"the drive of {folder}", _OF_DRIVES * index / len(folders))
        drives.append(drive_rates(folder, nbytes, seconds=_OF_DRIVES * seconds / len(folders)))
    # The progress of the remaining measurements is mapped to the rest of the bar.
    share = _OF_DRIVES if folders else 0.0
    rates, doubts, spread = _measure(compute, lambda words, done: tell(words, share + (1 - share) * done), seconds)
    date = time.strftime("%Y-%m-%d")
    return Probed(machine_of(compute), rates, tuple(drives), date, time.perf_counter() - start, doubts, spread)


def drive_rates(folder: str, nbytes: int = 256 * MIB, rounds: int = 5, seconds: float = SECONDS) -> DriveRates:
    """Measures the drive under `folder` with the I/O queue that runs use, on a temporary file.

    Args:
        folder: a folder on the drive.
        nbytes: bytes of the file and of a host buffer; a slow drive writes less.
        rounds: rounds of all operations; a slow drive runs fewer, but at least one.
        seconds: approximate duration.

    Raises:
        ConfigError: `nbytes` is out of range.
        IoError: the file cannot be written or read.
    """
    check_size(nbytes)
    buffer = aligned_empty(align_up(nbytes))
    fill_with_noise(buffer)
    # Two requests at least, so that the mixed operation reads and writes.
    request = min(_REQUEST, align_up(len(buffer) // 2))
    path = Path(folder) / f".offload-probe.{os.getpid()}-{os.urandom(4).hex()}"
    start = time.perf_counter()
    taken: dict[str, list[float]] = {name: [] for name in OPERATIONS}
    try:
        with DirectFile(path, create=True, opener=open_new) as file, IoQueue() as queue:
            file.reserve(len(buffer))
            part = buffer[: _written(queue, file, buffer, request, _OF_THE_FIRST_WRITE * seconds)]
            while not taken["read"] or (len(taken["read"]) < rounds and time.perf_counter() - start < seconds):
                # Operations take turns in each round, so a slow moment of the drive affects all of them.
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
    """Writes the beginning of the buffer, because first writes of blocks are slower; returns the bytes written.

    Starts with the bytes of two requests, and writes twice as many, again from the start, until `seconds` have passed
    or the buffer is written completely.
    """
    start, written = time.perf_counter(), 0
    while written < len(buffer) and (not written or time.perf_counter() - start < seconds):
        written = min(max(2 * request, 2 * written), len(buffer))
        move(queue, file, buffer[:written], "write", request)
    return written


def measure_rates(device: torch.device, tell: Tell = lambda *_: None, seconds: float = SECONDS) -> Rates:
    """Measures everything except the drives. Allocates about a gigabyte of memory temporarily."""
    return _measure(device, tell, seconds)[0]


def _measure(device: torch.device, tell: Tell, seconds: float) -> tuple[Rates, tuple[str, ...], float]:
    """Measures everything except the drives. Returns the rates, sentences about causes for doubt, and the spread."""
    others, steps = Others(), 2 + 3 * len(DTYPES) + 2
    done = iter(range(steps))

    def report(words: str) -> None:
        tell(words, next(done) / steps)

    report("memory")
    host, compute = Host(Pace.of(seconds)), Compute(device, Pace.of(seconds))
    # Some measurements are repeated at the end: if others use the machine, or if it throttles, the rates differ.
    memory, copy = host.memory(), host.copy()
    products, elementwise, stepped = {}, {}, {}
    for name in DTYPES:
        report(f"matrix products in {name}")
        products[name] = compute.products(name)
    report("copies to and from the device")
    upload, download = compute.copies()
    for name in DTYPES:
        report(f"norms, activations and sums in {name}")
        elementwise[name] = compute.elementwise(name)
        report(f"optimizer and gradients in {name}")
        stepped[name] = host.optimizer(name)
    report("new memory")
    fresh = compute.fresh()
    report("memory, matrix products and norms once more")
    twice: tuple[tuple[str, float, float, Callable[[float], str]], ...] = (
        ("memory", memory, host.memory(), lambda rate: f"{rate / 1e9:.1f} GB/s"),
        (
            f"matrix products in {_CHECKED}",
            products[_CHECKED][0],
            compute.products(_CHECKED)[0],
            lambda rate: f"{rate / 1e12:.3g} Tflop/s",
        ),
        (
            f"norms, activations and sums in {_CHECKED}",
            elementwise[_CHECKED],
            compute.elementwise(_CHECKED),
            lambda rate: f"{rate / 1e9:.1f} GB/s",
        ),
    )
    doubts = (*(sentence for rate in twice for sentence in apart(*rate)), *others.doubts())
    spread = max(max(first, last) / min(first, last) for _, first, last, _ in twice)
    by_dtype = {name: DtypeRates(*products[name], elementwise[name], *stepped[name]) for name in DTYPES}
    return Rates(memory, copy, upload, download, fresh, by_dtype), doubts, spread


def check_size(nbytes: int) -> None:
    """Raises `ConfigError` if a file of `nbytes` is too short, or its buffer needs more than half of free memory."""
    if nbytes < 2 * PAGE:
        raise ConfigError(f"expected a size of at least {2 * PAGE} bytes, got {nbytes}")
    free = psutil.virtual_memory().available
    if nbytes > free // 2:
        raise ConfigError(
            f"{format_size(free)} of memory are free, and the buffer is as long as the file, {format_size(nbytes)}: "
            f"give a smaller --size"
        )


def check_folders(folders: Sequence[str]) -> None:
    """Raises `IoError` if a folder does not exist or cannot be written to."""
    for folder in folders:
        # Creates and removes a file in the folder.
        about_drive(folder)


def device_of(name: str) -> torch.device:
    """Returns the device called `name`. Raises `ConfigError`, which mentions `--device`, if it does not exist."""
    return compute_device(name, "--device")


def machine_of(device: torch.device) -> dict[str, Any]:
    """Returns the properties of the machine, with its GPU if `device` is one."""
    found = about_machine() | {"name": platform.node(), "gpu": None, "gpu_memory_bytes": 0}
    if device.type != "cpu":
        of = torch.get_device_module(device).get_device_properties(device)
        found |= {"gpu": of.name, "gpu_memory_bytes": of.total_memory}
    return found
