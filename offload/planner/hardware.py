"""A machine in numbers: probed or described, with a list of the assumptions made.

`probed` takes measured rates from `offload probe`; `described` takes published ones from a name such as "RTX 4090".
`Hardware.rates` lists the rates with their origins (measured, published, given or assumed) and their sources.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offload.errors import ConfigError
from offload.hardware import gpus
from offload.hardware.gpus import Origin, Rate, find_gpu, sentences
from offload.hardware.probe import DriveRates, Probed, drive_under
from offload.notices import shell_command
from offload.sizes import GIB, format_size, parse_rate, parse_size, with_unit

KERNEL_BYTES = {"bf16": 26, "fp32": 28, "fp16": 28}
"""Bytes that AdamW moves for each parameter. The weight, the low bits of the master (in fp16 the master itself) and the
moments are read and written; the gradient is read. An fp16 weight is written only."""
_ITEMSIZES = {"bf16": 2, "fp32": 4, "fp16": 2}

_USABLE_RAM = 0.9
_DRIVE = (7e9, 5e9)
_OF_UNIFIED = (
    "copies between GPU and CPU take no time, although a run still makes them inside of the one memory",
    "the CPU's optimizer and the GPU do not slow each other, although they share the memory's rate",
)
_HANDED_SECONDS = 0.3e-3
"""`Hardware.handed_seconds` if the CPU computes; measured on two cores at about 3 GHz, for units of up to a dozen
parameters (docs/benchmarks/2026-11-host-time.md)."""
_KEPT_SECONDS = 0.2e-3
"""Seconds of `handed_seconds` that a use saves if the unit's parameters keep their memory on the device: less than 0.1
of 0.3 ms is left, as measured there."""
_HANDED_TO_GPU_SECONDS = 0.6e-3
"""`Hardware.handed_seconds` on a GPU: twice the CPU's seconds, as the host also launches some 30 kernels per
transformer block and records events. This is a rule of thumb, not measured on a GPU."""
_HANDED_TO_GPU = f"each use of a unit takes the host {_HANDED_TO_GPU_SECONDS * 1e3:.1f} ms, beside the GPU's compute"


class Drive(NamedTuple):
    """A drive, in bytes and bytes per second."""

    name: str
    read: float
    write: float
    mixed: float
    """Total rate while half of the bytes are read and half are written at once."""
    free: int | None = None
    """Free bytes; None if unknown."""


class Measured(NamedTuple):
    """A timed forward and backward of one micro-batch of a model on this machine."""

    layers: int
    """Layers that were run."""
    of: int
    """Layers of the model."""
    seconds: float
    """Mean of several passes. A minimum would leave out the slow moments that training meets too."""
    by_probe_seconds: float
    """Prediction by the probe's rates for the same layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """The machine's side of a prediction, for weights of one dtype. All rates are per second."""

    name: str
    dtype: str
    """bf16, fp16 or fp32. The rates of products, elementwise work, optimizer and gradients apply to this dtype."""
    gpu_memory: int
    """Bytes of GPU memory that training may take; 0 if the CPU computes."""
    ram: int
    """Bytes of host memory that training may take."""
    matmul: float
    """Floating-point operations of matrix products."""
    weights: float
    """Bytes of weights that matrix products read. This time is added to the time of their operations."""
    fresh: float
    """Bytes of newly allocated device memory that can be filled."""
    elementwise: float
    """Bytes that all other work on the device reads and writes."""
    upload: float
    """Bytes copied to the device."""
    download: float
    """Bytes copied from the device."""
    memory: float
    """Bytes of host memory, read and written."""
    optimizer: float
    """Parameters that AdamW updates on the host."""
    device_optimizer: float
    """Parameters that AdamW updates on the device."""
    gradient: float
    """Parameters whose gradient is stored in host memory, with the sum of its squares."""
    handed_seconds: float
    """Seconds that the host takes for a use of a unit: to bind and release its weights, and on a GPU to launch its
    kernels. On a CPU nothing computes meanwhile. On a GPU queued work does, so a use takes the longer of both times."""
    drives: tuple[Drive, ...]
    assumed: tuple[str, ...]
    """Sentences, one per assumption that is no rate and was neither measured nor given."""
    rates: tuple[Rate, ...] = ()
    """The rates above with their origins, for a reader."""
    unified: bool = False
    """True if GPU and CPU have one memory: `ram` and `gpu_memory` are then the same bytes, and copies take no time."""
    doubts: tuple[str, ...] = ()
    """Sentences on what disturbed the probe; those on the load of other processes come last."""
    measured: Measured | None = None
    """The timing to which the rates of compute are scaled; None if they are the probe's own."""

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Returns all assumptions as sentences: `assumed`, doubts about a probe, then the assumed rates."""
        return (*self.assumed, *self.doubts, *sentences(self.rates, "assumed"))

    @property
    def itemsize(self) -> int:
        """Returns the bytes of one weight, and of one element of its gradient."""
        return _ITEMSIZES[self.dtype]

    def handed(self, stays: bool) -> float:
        """Returns the host's seconds for a use of a unit; `stays` is True if the unit never leaves the device."""
        return max(self.handed_seconds - (_KEPT_SECONDS if stays else 0.0), 0.0)

    @property
    def on_cpu(self) -> bool:
        return self.gpu_memory == 0

    @property
    def read(self) -> float:
        """Returns the bytes per second that all drives together read."""
        return sum(drive.read for drive in self.drives)

    @property
    def written(self) -> float:
        """Returns the bytes per second that all drives together write."""
        return sum(drive.write for drive in self.drives)

    @property
    def mixed(self) -> float:
        """Returns the bytes per second that all drives together move while they read and write at once."""
        return sum(drive.mixed for drive in self.drives)

    @property
    def disk(self) -> int | None:
        """Returns the free bytes of all drives together, over which files are spread; None if unknown for one."""
        return None if any(drive.free is None for drive in self.drives) else sum(d.free or 0 for d in self.drives)


def parse_drive(text: str) -> Drive:
    """Returns the drive that "READ", "READ,WRITE" or "READ,WRITE,FREE" describes, such as "7GB/s,4GB/s,2TB".

    Without WRITE, READ is the rate of reads and writes.
    """
    fields = [field.strip() for field in text.split(",")]
    try:
        if not 1 <= len(fields) <= 3:
            raise ConfigError(f"{len(fields)} numbers")
        read, write = _drive_rate(fields[0]), _drive_rate(fields[1] if len(fields) > 1 else fields[0])
        free = parse_size(with_unit(fields[2])) if len(fields) == 3 else None
    except ConfigError as error:
        raise ConfigError(
            f"expected a --drive such as '7GB/s,4GB/s' (reads, writes) or '7GB/s,4GB/s,2TB' (free), got {text!r}: "
            f"{error}"
        ) from error
    return Drive(f"drive of {fields[0]}", read, write, 2 / (1 / read + 1 / write), free)


def _drive_rate(text: str) -> float:
    # A user who types "2TB" means a drive's size. As a rate it would be 300 times the rate of the fastest drive.
    if re.fullmatch(r"[0-9.]+\s*[kmgt]i?b", text, re.IGNORECASE):
        raise ConfigError(f"{text!r} is a size, not a rate; write {text}/s if it is a rate")
    return parse_rate(text)


def described(
    gpu: str | None = None,
    ram: int | None = None,
    drives: Sequence[Drive] = (),
    memory: float | None = None,
    link: float | None = None,
    dtype: str = "bf16",
    autocast: bool = False,
) -> Hardware:
    """Returns a machine that need not exist, from published figures. `Hardware.assumptions` lists every assumption.

    `gpu` is a text for `find_gpu`. `memory` and `link` are bytes per second of RAM, and of PCIe each way. With
    `autocast` fp32 weights are multiplied in bf16.
    """
    if gpu is None:
        raise ConfigError("a described machine needs --gpu, such as 24GB or 'RTX 4090'")
    card, like = find_gpu(gpu)
    if card.unified and link is not None:
        raise ConfigError(f"{card.name} has one memory for GPU and CPU, so --pcie has no meaning there")
    assumed = [] if like is None else [like]
    if not card.has_bf16 and dtype != "fp16":
        assumed.append(f"{card.name} has matrix units for fp16 and none for bf16, so --dtype fp16 is faster there")
    assumed.append(_HANDED_TO_GPU)
    if ram is None:
        ram = card.memory if card.unified else 64 * GIB
        assumed.append(f"there are {format_size(ram)} of RAM")
    of_drives = drive_rates(drives, "given", "--drive")
    if not drives:
        # The mixed rate is the harmonic mean: reading and writing at once takes as long as one after the other.
        drives = [Drive("one drive", *_DRIVE, 2 / (1 / _DRIVE[0] + 1 / _DRIVE[1]))]
        of_drives = drive_rates(drives, "assumed", "a fast drive in PCIe 4")
    assumed.append("drives move as many bytes a second when they read and write at once as one after the other")
    if card.unified:
        assumed += _OF_UNIFIED
    assumed.append(f"{_USABLE_RAM:.0%} of the RAM and {_USABLE_RAM:.0%} of the GPU's memory are free")
    # Under autocast fp32 weights are multiplied in bf16, at the rate of tensor cores.
    products = gpus.products(card, "bf16" if autocast else dtype)
    device = gpus.other_work(card)
    copies = gpus.copies(card, link)
    host = gpus.host_memory(card, memory)
    optimizer = Rate(
        "AdamW on the CPU",
        gpus.HOST_SHARE * host.value / KERNEL_BYTES[dtype],
        "parameters/s",
        "assumed",
        f"{gpus.HOST_SHARE:.0%} of the host memory's rate",
    )
    return Hardware(
        name=card.name,
        dtype=dtype,
        gpu_memory=int(_USABLE_RAM * (ram if card.unified else card.memory)),
        ram=int(_USABLE_RAM * ram),
        matmul=products.value,
        # Published figures contain one bandwidth, so all memory-bound rates are equal here.
        weights=device.value,
        fresh=device.value,
        elementwise=device.value,
        upload=copies.value,
        download=copies.value,
        memory=host.value,
        optimizer=optimizer.value,
        device_optimizer=device.value / KERNEL_BYTES[dtype],
        # Each element of a gradient is read once and written once.
        gradient=gpus.HOST_SHARE * host.value / (2 * _ITEMSIZES[dtype]),
        handed_seconds=_HANDED_TO_GPU_SECONDS,
        drives=tuple(drives),
        assumed=tuple(assumed),
        rates=(products, device, copies, host, optimizer, *of_drives),
        unified=card.unified,
    )


def drive_rates(drives: Sequence[Drive], origin: Origin, source: str) -> tuple[Rate, ...]:
    """Returns the rates of all drives together, reading and writing; nothing without drives."""
    if not drives:
        return ()
    sums = {"reads": sum(drive.read for drive in drives), "writes": sum(drive.write for drive in drives)}
    of = "the drive" if len(drives) == 1 else f"{len(drives)} drives"
    return tuple(Rate(f"{name} of {of}", value, "B/s", origin, source) for name, value in sums.items())


def probed(
    probe: Probed, free_host: int, folders: Sequence[str] = (), dtype: str = "bf16", autocast: bool = False
) -> Hardware:
    """Returns the machine that `offload probe` measured.

    Each drive of `folders` counts once; without folders it is the drive that was probed last.
    """
    rates, gpu, products = probe.rates, probe.machine["gpu"], "bf16" if autocast else dtype
    of = rates.by_dtype[dtype]._replace(matmul=rates.by_dtype[products].matmul)
    # The keys of a dict keep the order and count a drive once if several folders are on it.
    of_folders: dict[DriveRates, None] = {}
    for folder in folders:
        drive = drive_under(probe, folder)
        if drive is None:
            raise ConfigError(f"the drive of {folder} was not measured: run `{shell_command('probe', folder)}`")
        of_folders[drive] = None
    drives = tuple(map(_drive, of_folders if folders else probe.drives[-1:]))
    gpu_memory = int(_USABLE_RAM * probe.machine["gpu_memory_bytes"])
    assumed = ["nothing else runs on the machine"]
    if gpu:
        assumed += (_HANDED_TO_GPU, f"{_USABLE_RAM:.0%} of the GPU's memory is free")
    else:
        assumed.append(f"each use of a unit takes {_HANDED_SECONDS * 1e3:.1f} ms to receive its weights")

    def measured(name: str, value: float, unit: str) -> Rate:
        return Rate(name, value, unit, "measured", "offload probe")

    device_optimizer = of.elementwise / KERNEL_BYTES[dtype]
    on_gpu = (
        measured("copies to the GPU", rates.upload, "B/s"),
        measured("copies from the GPU", rates.download, "B/s"),
        Rate("AdamW on the GPU", device_optimizer, "parameters/s", "assumed", "at the rate of elementwise work"),
    )
    return Hardware(
        name=gpu or f"{probe.machine['processor']}, {probe.machine['cores']} cores",
        dtype=dtype,
        gpu_memory=gpu_memory,
        ram=free_host,
        **of._asdict(),
        fresh=rates.fresh,
        upload=rates.upload,
        download=rates.download,
        memory=rates.memory,
        device_optimizer=device_optimizer if gpu else of.optimizer,
        handed_seconds=_HANDED_TO_GPU_SECONDS if gpu else _HANDED_SECONDS,
        drives=drives,
        assumed=tuple(assumed),
        doubts=probe.doubts,
        rates=(
            measured(f"matrix products in {products}", of.matmul, "flop/s"),
            measured("other work", of.elementwise, "B/s"),
            *(on_gpu if gpu else ()),
            measured("host memory", rates.memory, "B/s"),
            measured("AdamW on the CPU", of.optimizer, "parameters/s"),
            *drive_rates(drives, "measured", "offload probe"),
        ),
    )


def _drive(rates: DriveRates) -> Drive:
    try:
        free = shutil.disk_usage(rates.path).free
    except OSError:
        free = None
    return Drive(rates.path, rates.read, rates.write, rates.mixed, free)
