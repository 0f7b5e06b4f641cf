"""GPUs by their published figures, and the rates of a machine that is described in words.

The table `gpus.toml` contains the figures and a source for each. If nobody published a rate, a plan assumes a fraction
of the data sheet's rate.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from offload.errors import ConfigError
from offload.sizes import GIB, format_count, format_size

# -- rate ----------------------------------------------------------------------------------------------
#
# The rates of a plan as a reader sees them: a value, its origin and its source.


Origin = Literal["measured", "published", "given", "assumed"]
"""measured: by `offload probe` on this machine. published: measured by others and published. given: by an option.
assumed: a guess of this package, such as a fraction of a data sheet's figure."""

ORIGINS: tuple[Origin, ...] = ("measured", "published", "given", "assumed")
"""All origins, the most certain first."""


class Figure(NamedTuple):
    """A published figure."""

    value: float
    source: str
    """The place where the figure can be read: repository, issue, paper or page."""


class Rate(NamedTuple):
    """A rate that a plan computes with."""

    name: str
    value: float
    """Per second; infinite for work that takes no time."""
    unit: str
    """"flop/s", "B/s" or "parameters/s"."""
    origin: Origin
    source: str

    @property
    def amount(self) -> str:
        if math.isinf(self.value):
            return "no time"
        if self.unit == "flop/s":
            return f"{self.value / 1e12:.3g} Tflop/s"
        if self.unit == "B/s":
            return f"{self.value / 1e9:.4g} GB/s"
        return f"{format_count(int(self.value))} {self.unit}"

    @property
    def sentence(self) -> str:
        return f"{self.name} {self.amount} ({self.source})"


def sentences(rates: Sequence[Rate], origin: Origin) -> list[str]:
    """Returns the clauses of the rates of one origin."""
    return [rate.sentence for rate in rates if rate.origin == origin]


# -- gpus ----------------------------------------------------------------------------------------------


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FASTEST_SLOT = 64e9
"""Bytes per second, each way, of 16 lanes of PCIe 5: no card in a slot has a faster link."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU's published figures."""

    name: str
    generation: str
    """Cards of one generation and kind, which reach about the same fraction of their data sheets. GeForce and
    workstation cards of one architecture are two generations: a GeForce card has half the rate with sums in fp32."""
    memory: int
    """Bytes; of a unified memory all bytes, which the CPU uses too."""
    flops: float
    """Dense operations per second in bf16, accumulated in fp32: the peak of the data sheet. For a GPU without bf16
    units, the operations in fp32, since torch then computes in fp32."""
    flops_fp32: float
    """Dense operations per second in fp32, without matrix units: torch uses TF32 only on request."""
    bandwidth: float
    """Bytes per second of the GPU's own memory: the peak of the data sheet."""
    link: Figure | None
    """Bytes per second that copies from pinned memory reach each way; None if GPU and CPU have one memory."""
    matmul: Figure | None = None
    """Operations per second that products of large matrices in bf16 reached in torch."""
    matmul_fp32: Figure | None = None
    """The same in fp32."""
    reached: Figure | None = None
    """Bytes per second that a program reached with the GPU's memory."""
    flops_fp16: float | None = None
    """`flops` in fp16 of a GPU that has matrix units for fp16 and none for bf16; None for any other."""
    matmul_fp16: Figure | None = None
    """`matmul` in fp16 of such a GPU."""

    @property
    def has_bf16(self) -> bool:
        """Returns True if products in bf16 are as fast as products in fp16."""
        return self.flops_fp16 is None

    @property
    def unified(self) -> bool:
        """Returns True if GPU and CPU have one memory, so that nothing has to be copied between them."""
        return self.link is None


def _load() -> tuple[Gpu, ...]:
    table = tomllib.loads((files("offload.hardware") / "gpus.toml").read_text("utf-8"))
    sources = table["sources"]

    def scaled(number: float, power: int) -> float:
        # By decimal digits: a product would round once more.
        return float(f"{number}e{power}")

    def figure(row: Mapping[str, Any], name: str, power: int) -> Figure | None:
        if name not in row:
            return None
        source = re.sub(r"^\$(\w+)", lambda key: sources[key[1]], row[name]["source"])
        return Figure(scaled(row[name]["value"], power), source)

    return tuple(
        Gpu(
            name=row["name"],
            generation=row["generation"],
            memory=row["memory"] * GIB,
            flops=scaled(row["tflops"], 12),
            flops_fp32=scaled(row["tflops_fp32"], 12),
            flops_fp16=scaled(row["tflops_fp16"], 12) if "tflops_fp16" in row else None,
            bandwidth=scaled(row["bandwidth"], 9),
            link=figure(row, "link", 9),
            matmul=figure(row, "matmul", 12),
            matmul_fp32=figure(row, "matmul_fp32", 12),
            matmul_fp16=figure(row, "matmul_fp16", 12),
            reached=figure(row, "reached", 9),
        )
        for row in table["gpu"]
    )


GPUS = _load()

_MAKERS = re.compile(r"\b(nvidia|geforce|tesla|amd|instinct|sxm\d*)\b")
"""Words that `nvidia-smi` and torch write around a card's name."""


def find_gpu(text: str) -> tuple[Gpu, str | None]:
    """Returns the GPU that `text` names, and an assumption in words or None.

    `text` is a name or a part of one, such as "4090" or "NVIDIA GeForce RTX 4090", or a memory size such as "24GB". A
    size selects the smallest and slowest RTX card with that much memory, or else the smallest and slowest other card.
    """
    wanted = re.sub(r"[^a-z0-9]", "", _MAKERS.sub(" ", text.lower()))
    names = {re.sub(r"[^a-z0-9]", "", gpu.name.lower()): gpu for gpu in GPUS}
    if wanted in names:
        return names[wanted], None
    named = [gpu for name, gpu in names.items() if wanted and wanted in name]
    # "4060" is the RTX 4060, and not the RTX 4060 Ti.
    named = [gpu for name, gpu in names.items() if wanted and name.endswith(wanted)] or named
    size = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*gi?b", text.strip().lower())
    # GPUs sold as 24 GB contain 24 GiB.
    nbytes = 0 if size is None else int(float(size[1]) * GIB)
    # Without a size, the entry with the most memory represents the name: "A100" is the 80 GB card.
    if size is None and named:
        return max(named, key=lambda gpu: gpu.memory), None
    if nbytes:
        # A size alone means a card in a slot, not a chip that shares its memory or its board with a processor.
        cards = [gpu for gpu in GPUS if gpu.link is not None and gpu.link.value < _FASTEST_SLOT]
        of_size = sorted((gpu for gpu in cards if gpu.memory >= nbytes), key=lambda gpu: (gpu.memory, gpu.flops))
        # A bare memory size usually means a consumer card, so RTX cards are preferred.
        largest = max(cards, key=lambda gpu: gpu.memory)
        like = next((gpu for gpu in of_size if gpu.name.startswith("RTX")), None) or (of_size or [largest])[0]
        return replace(
            like, name=f"GPU of {format_size(nbytes)}", memory=nbytes
        ), f"the GPU is as fast as a {like.name}"
    known = ", ".join(gpu.name for gpu in GPUS)
    raise ConfigError(f"there is no GPU {text!r} here: give a size such as 24GB, or one of {known}")


def peak_products(name: str) -> dict[str, float] | None:
    """Returns the data sheet's operations per second, by dtype, of the GPU that torch calls `name`.

    None for a GPU that is not in the table. Another version of one that is, such as an "H100 PCIe", is not in it.
    """

    def model_of(words: str) -> str:
        # A card of two memory sizes has one peak.
        return re.sub(r"\d+gb\b|hbm\w+|[^a-z0-9]", "", _MAKERS.sub(" ", words.lower()))

    gpu = next((gpu for gpu in GPUS if model_of(gpu.name) == model_of(name)), None)
    return None if gpu is None else {dtype: _of_products(gpu, dtype)[1] for dtype in ("bf16", "fp16", "fp32")}


# -- the rates of a described machine ---------------------------------------------------------------------

_MATMUL_SHARE = 0.5
"""Assumed fraction of the data sheet's rate of products, if no figure of the GPU's generation was published."""
_DEVICE_SHARE = 0.7
_RAM_BANDWIDTH = 50e9
_CORES_BANDWIDTH = 100e9
HOST_SHARE = 0.9
"""Fraction of the host memory's rate that the optimizer is assumed to reach."""


def products(gpu: Gpu, dtype: str) -> Rate:
    """Returns the rate of matrix products: the published one, or else a fraction of the data sheet's rate.

    The fraction is the median of the published fractions of cards of the same generation, and at most 1.
    """
    figure, peak = _of_products(gpu, dtype)
    name = f"matrix products in {dtype}"
    if figure is not None:
        return Rate(name, figure.value, "flop/s", "published", figure.source)
    kin = [_of_products(kin_gpu, dtype) for kin_gpu in GPUS if kin_gpu.generation == gpu.generation]
    reached = [figure.value / most for figure, most in kin if figure is not None]
    share = min(statistics.median(reached), 1.0) if reached else _MATMUL_SHARE
    source = f"{share:.0%} of the data sheet's {peak / 1e12:.4g} Tflop/s"
    if reached:
        source += f", as other cards of {gpu.generation} reached"
    return Rate(name, share * peak, "flop/s", "assumed", source)


def _of_products(gpu: Gpu, dtype: str) -> tuple[Figure | None, float]:
    """Returns the published rate of matrix products, or None, and the data sheet's rate."""
    bf16 = (gpu.matmul, gpu.flops)
    fp16 = bf16 if gpu.has_bf16 else (gpu.matmul_fp16, gpu.flops_fp16 or gpu.flops)
    by_dtype: Mapping[str, tuple[Figure | None, float]] = {
        "bf16": bf16,
        "fp16": fp16,
        "fp32": (gpu.matmul_fp32, gpu.flops_fp32),
    }
    return by_dtype[dtype]


def other_work(gpu: Gpu) -> Rate:
    """Returns the rate of all other work on the GPU. The GPU's memory limits this rate."""
    name = "other work on the GPU"
    if gpu.reached is not None:
        return Rate(name, gpu.reached.value, "B/s", "published", gpu.reached.source)
    source = f"{_DEVICE_SHARE:.0%} of the data sheet's {gpu.bandwidth / 1e9:.4g} GB/s"
    return Rate(name, _DEVICE_SHARE * gpu.bandwidth, "B/s", "assumed", source)


def copies(gpu: Gpu, given: float | None) -> Rate:
    """Returns the rate of copies to and from the GPU, each way."""
    name = "copies to and from the GPU, each way,"
    if given is not None:
        return Rate(name, given, "B/s", "given", "--pcie")
    if gpu.link is None:
        return Rate(name, math.inf, "B/s", "assumed", "GPU and CPU have one memory")
    return Rate(name, gpu.link.value, "B/s", "published", gpu.link.source)


def host_memory(gpu: Gpu, given: float | None) -> Rate:
    """Returns the rate at which the CPU reads and writes its memory."""
    name = "host memory"
    if given is not None:
        return Rate(name, given, "B/s", "given", "--memory-bandwidth")
    if gpu.unified:
        # The CPU cores of such chips reach only a part of the memory's rate; the GPU can use most of it.
        return Rate(name, _CORES_BANDWIDTH, "B/s", "assumed", "by the CPU's cores, of the memory that the GPU uses too")
    return Rate(name, _RAM_BANDWIDTH, "B/s", "assumed", "two channels of DDR5")
