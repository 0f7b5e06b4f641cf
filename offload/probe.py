"""How fast this machine is: what `offload plan` counts with, measured once and kept for the machine.

Everything is measured by what training will use: the I/O queue, the kernels, pinned memory, torch's matrix products.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from offload import kernels
from offload.aio import DirectFile, IoQueue, aligned_empty
from offload.aio.measure import OPERATIONS, move, remove
from offload.bench.adam import STEP, Arrays
from offload.bench.python_ways import fill_with_noise
from offload.errors import ConfigError
from offload.info import drive as about_drive
from offload.info import machine as about_machine
from offload.sizes import MIB, PAGE, align_up, format_size
from offload.swapper.device import open_device

_VERSION = 4
_ROUNDS = 5
_NUMEL = 1 << 24
_TILE = 1 << 20
"""Elements of an update that are computed at a time."""
_COPIED = 64 * MIB
_REQUEST = 16 * MIB
_LAYERS = 12


class DriveRates(NamedTuple):
    """One drive by itself, in bytes a second."""

    path: str
    device: str
    read: float
    write: float
    mixed: float
    """Half of the bytes read and half written, both at once."""


class Rates(NamedTuple):
    """What the processor, the memory and the compute device do in a second."""

    memory: float
    """Bytes that all threads move together, read and written: the bound of the optimizer."""
    copy: float
    """Bytes that are copied within host memory."""
    optimizer: float
    """Parameters that AdamW steps in bf16."""
    gradient: float
    """Parameters whose gradient is stored in bf16 and its squares summed."""
    upload: float
    """Bytes copied to the device; where that is the CPU, into its arena."""
    download: float
    matmul: float
    """Floating-point operations of matrix products in bf16, where the tokens are many."""
    weights: float
    """Bytes of weights in bf16 that a matrix product takes in, or makes a gradient of, beside its operations."""
    fresh: float
    """Bytes of a large tensor that are filled in new memory."""
    elementwise: float
    """Bytes that norms, activations, softmax, products and sums between the matrix products read and write."""


class Probed(NamedTuple):
    """What was measured, of which machine and when."""

    machine: dict[str, Any]
    rates: Rates
    drives: tuple[DriveRates, ...]
    date: str
    seconds: float


def probe(
    folders: Sequence[str], device: str = "auto", nbytes: int = 256 * MIB, tell: Callable[[str], None] = lambda _: None
) -> Probed:
    """Measure all of it. Each folder has a file of `nbytes` for a moment. `tell` is told what is going on."""
    start = time.perf_counter()
    compute = compute_device(device)
    drives = []
    for folder in folders:
        tell(f"the drive of {folder}")
        drives.append(drive_rates(folder, nbytes))
    rates = measure_rates(compute, tell)
    date = time.strftime("%Y-%m-%d")
    return Probed(_machine(compute), rates, tuple(drives), date, time.perf_counter() - start)


def drive_rates(folder: str, nbytes: int = 256 * MIB, rounds: int = 3) -> DriveRates:
    """What the drive under `folder` moves by itself, by the queue that will use it. Errors are `IoError`."""
    check_size(nbytes)
    buffer = aligned_empty(align_up(nbytes))
    fill_with_noise(buffer)
    request = min(_REQUEST, align_up(len(buffer) // 2))
    path = Path(folder) / f".offload-probe.{os.getpid()}"
    try:
        with DirectFile(path, create=True) as file, IoQueue() as queue:
            file.reserve(len(buffer))
            move(queue, file, buffer, "write", request)  # the first write of a block does more
            found = {
                name: statistics.median(
                    each.nbytes / each.seconds
                    for each in (move(queue, file, buffer, name, request) for _ in range(rounds))
                )
                for name in OPERATIONS
            }
    finally:
        remove(path)
    return DriveRates(
        os.path.realpath(folder), about_drive(folder)["device"], found["read"], found["write"], found["mixed"]
    )


def measure_rates(device: torch.device, tell: Callable[[str], None] = lambda _: None) -> Rates:
    """What is no drive's. A gigabyte of memory is taken for a moment."""
    tell("memory and the optimizer")
    host = _host_rates()
    tell("copies to and from the device")
    copies = _copies(device)
    tell("matrix products")
    return Rates(*host, *copies, *_products(device), _fresh(device), _elementwise(device))


def _host_rates() -> tuple[float, float, float, float]:
    """The first four of `Rates`."""
    arrays = Arrays(_NUMEL, torch.bfloat16, torch.bfloat16)
    lease = torch.frombuffer(aligned_empty(2 * _NUMEL), dtype=torch.bfloat16)
    size = min(_TILE, _NUMEL)
    tiles = [_part(arrays.partition, start, start + size) for start in range(0, _NUMEL, size)]
    segments = [kernels.Segment(0, size, STEP)]

    gradient = torch.ones(_NUMEL, dtype=torch.bfloat16)  # in memory as autograd's

    def accumulate() -> None:
        for start in range(0, _NUMEL, size):
            kernels.accumulate(lease[start : start + size], gradient[start : start + size], add=False)

    def update() -> None:
        for tile in tiles:
            kernels.update(tile, segments)

    return (
        _NUMEL * arrays.bytes_per_parameter / _seconds(lambda: kernels.probe(arrays.partition)),
        lease.nbytes / _seconds(lambda: lease.copy_(arrays.weight)),
        _NUMEL / _seconds(update),
        _NUMEL / _seconds(accumulate),
    )


def _part(whole: kernels.Partition, start: int, stop: int) -> kernels.Partition:
    """Elements [start, stop) of a partition in bf16."""
    assert whole.residual is not None
    moments = tuple(each[start:stop] for each in whole.moments)
    return kernels.Partition(whole.weight[start:stop], whole.grad[start:stop], moments, whole.residual[start:stop])


def _copies(device: torch.device) -> tuple[float, float]:
    """Between memory as the engine's arena is, and the device."""
    opened = open_device(device)
    host = torch.frombuffer(aligned_empty(_COPIED), dtype=torch.uint8)
    there = torch.ones(_COPIED, dtype=torch.uint8, device=device)
    opened.register(host)  # before the first touch
    try:
        host.fill_(1)
        up = _COPIED / _seconds(lambda: there.copy_(host, non_blocking=True), device)
        down = _COPIED / _seconds(lambda: host.copy_(there, non_blocking=True), device)
    finally:
        opened.unregister(host)
    return up, down


def _products(device: torch.device) -> tuple[float, float]:
    """Of a linear layer's forward and the two products of its backward: operations, and bytes of weights, a second.

    As in a model each weight was not used for a while, and a gradient is larger than what malloc keeps for later.
    """
    width, wide, few, many = (2048, 8192, 128, 1024) if device.type == "cpu" else (8192, 8192, 1024, 8192)
    weights = [torch.full((wide, width), 0.01, dtype=torch.bfloat16, device=device) for _ in range(3)]
    taken = itertools.cycle(weights)

    def products(inputs: torch.Tensor) -> Callable[[], object]:
        def work() -> None:
            weight = next(taken)
            output = torch.nn.functional.linear(inputs, weight)
            output @ weight
            output.t() @ inputs

        return work

    inputs = (torch.full((tokens, width), 0.01, dtype=torch.bfloat16, device=device) for tokens in (few, many))
    small, large = _seconds_in_turns([products(each) for each in inputs], device)
    each = max(large - small, 0.5 * large) / (many - few)  # of a token; the rest is of the weights
    rest = min(max(small - few * each, 0.01 * small), 0.5 * small)
    return 6 * wide * width / each, 3 * weights[0].nbytes / rest


def _fresh(device: torch.device) -> float:
    return _COPIED / _seconds(lambda: torch.full((_COPIED,), 0, dtype=torch.uint8, device=device), device)


def _elementwise(device: torch.device) -> float:
    """What a transformer does between its products, into new memory each time as it does: a CPU is bound by it."""
    tokens, width = (512, 1024) if device.type == "cpu" else (8192, 8192)
    values = torch.full((tokens, width), 0.5, dtype=torch.bfloat16, device=device)
    weight = torch.ones(width, dtype=torch.bfloat16, device=device)

    def layers() -> None:
        for _ in range(_LAYERS):
            hidden = torch.nn.functional.layer_norm(values, (width,), weight, weight)
            hidden = torch.nn.functional.gelu(hidden, approximate="tanh")
            hidden = torch.softmax(hidden, -1)
            torch.add(hidden * values, values)

    return _LAYERS * 12 * values.nbytes / _seconds(layers, device)


def _seconds(action: Callable[[], object], device: torch.device | None = None) -> float:
    """The median of some runs, after one that finds memory and kernels."""
    return _seconds_in_turns([action], device)[0]


def _seconds_in_turns(actions: Sequence[Callable[[], object]], device: torch.device | None = None) -> list[float]:
    """The same of each of some actions, one after the other in each round: a machine that is slow for a moment is so
    for all."""
    taken: list[list[float]] = [[] for _ in actions]
    for _ in range(_ROUNDS + 1):
        for action, seconds in zip(actions, taken, strict=True):
            start = time.perf_counter()
            action()
            if device is not None and device.type == "cuda":
                torch.cuda.synchronize(device)  # it is what is measured
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds[1:]) for seconds in taken]


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


def check_kept() -> None:
    """Raise `ConfigError` where a result could not be kept."""
    path = kept_at()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"the result cannot be kept in {path.parent}: {error.strerror}; set XDG_CACHE_HOME, or give --no-keep"
        ) from error


def check_folders(folders: Sequence[str]) -> None:
    """Raise `IoError` for one that is not there or cannot be written."""
    for folder in folders:
        about_drive(folder)


def compute_device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"there is no device {name!r}: expected auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("torch finds no CUDA device; give --device cpu, or leave it out")
    return torch.device("cuda", 0) if name != "cpu" and torch.cuda.is_available() else torch.device("cpu")


def _machine(device: torch.device) -> dict[str, Any]:
    found = about_machine() | {"name": platform.node(), "gpu": None, "gpu_memory_bytes": 0}
    if device.type == "cuda":
        of = torch.cuda.get_device_properties(device)
        found |= {"gpu": of.name, "gpu_memory_bytes": of.total_memory}
    return found


# -- kept ---------------------------------------------------------------------------------------------


def kept_at() -> Path:
    """The file that holds what was measured on this machine."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # as its specification has it
        cache = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "offload" / f"probe-{platform.node() or 'machine'}.json"


def keep(found: Probed) -> Path:
    """Keep it for the planner; drives that were measured earlier and are not in `found` stay. Errors are `OSError`."""
    path = kept_at()
    before = kept()
    mine = {each.path for each in found.drives}
    drives = [*(each for each in (before.drives if before else ()) if each.path not in mine), *found.drives]
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(json.dumps(as_json(found._replace(drives=tuple(drives))), indent=2) + "\n", encoding="utf-8")
    os.replace(new, path)
    return path


def kept() -> Probed | None:
    """What was measured on this machine; None where nothing was, or on what is another machine by now."""
    try:
        content = json.loads(kept_at().read_text(encoding="utf-8"))
        if content["version"] != _VERSION:
            return None
        found = Probed(
            content["machine"],
            Rates(**content["rates"]),
            tuple(DriveRates(**each) for each in content["drives"]),
            content["date"],
            content["seconds"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None  # none yet, or not what `keep` has written: another probe takes its place
    here = about_machine()
    return found if all(found.machine.get(key) == here[key] for key in ("processor", "cores")) else None


def as_json(found: Probed) -> dict[str, Any]:
    """What `--json` prints, and what is kept."""
    return {
        "version": _VERSION,
        "machine": found.machine,
        "rates": {name: float(f"{value:.4g}") for name, value in found.rates._asdict().items()},
        "drives": [
            {name: float(f"{v:.4g}") if isinstance(v, float) else v for name, v in each._asdict().items()}
            for each in found.drives
        ],
        "date": found.date,
        "seconds": round(found.seconds, 1),
    }


def lines(found: Probed) -> list[tuple[str, str]]:
    """The same for people: names and values."""
    host, rates = found.machine, found.rates
    device = host["gpu"] or f"{host['processor']}, {host['cores']} cores"
    told = [
        ("compute", device),
        ("memory", f"{rates.memory / 1e9:.1f} GB/s read and written, {rates.copy / 1e9:.1f} GB/s copied"),
        ("optimizer", f"{rates.optimizer / 1e6:.0f} M parameters a second"),
        ("gradients", f"{rates.gradient / 1e6:.0f} M parameters a second"),
        ("to the device", f"{rates.upload / 1e9:.1f} GB/s, and from it {rates.download / 1e9:.1f} GB/s"),
        ("matrix products", f"{rates.matmul / 1e12:.3g} Tflop/s in bf16, {rates.weights / 1e9:.1f} GB/s of weights"),
        ("new memory", f"{rates.fresh / 1e9:.1f} GB/s"),
        ("elementwise", f"{rates.elementwise / 1e9:.1f} GB/s"),
    ]
    return told + [
        (each.path, f"reads {each.read / 1e9:.2f}, writes {each.write / 1e9:.2f}, both {each.mixed / 1e9:.2f} GB/s")
        for each in found.drives
    ]
