"""The rates of a described machine: published ones where there are any, else fractions of the data sheet's figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

from offload.planner.published.gpu import Gpu
from offload.planner.published.gpus import GPUS
from offload.planner.published.rate import Figure, Rate

_MATMUL_SHARE = 0.5
"""Fraction of the data sheet's products where no figure of the GPU's generation was published."""
_DEVICE_SHARE = 0.7
_RAM_BANDWIDTH = 50e9
_CORES_BANDWIDTH = 100e9
HOST_SHARE = 0.9
"""Fraction of the host memory's rate that the optimizer is assumed to reach."""


def products(gpu: Gpu, dtype: str) -> Rate:
    """Returns the rate of matrix products: the one that others reached, else a fraction of the data sheet's.

    The fraction is the one that cards of the same generation reached, by the median and at most all of it.

    Args:
        gpu: the GPU.
        dtype: bf16, fp16 or fp32.
    """
    found, peak = _of_products(gpu, dtype)
    name = f"matrix products in {dtype}"
    if found is not None:
        return Rate(name=name, value=found.value, unit="flop/s", origin="published", source=found.source)
    kin = [_of_products(each, dtype) for each in GPUS if each.generation == gpu.generation]
    reached = [figure.value / most for figure, most in kin if figure is not None]
    share = min(statistics.median(reached), 1.0) if reached else _MATMUL_SHARE
    source = f"{share:.0%} of the data sheet's {peak / 1e12:.4g} Tflop/s"
    if reached:
        source += f", as other cards of {gpu.generation} reached"
    return Rate(name=name, value=share * peak, unit="flop/s", origin="assumed", source=source)


def _of_products(gpu: Gpu, dtype: str) -> tuple[Figure | None, float]:
    """Returns the rate of matrix products that others reached, or None, and that of the data sheet."""
    bf16 = (gpu.matmul, gpu.flops)
    fp16 = bf16 if gpu.has_bf16 else (gpu.matmul_fp16, gpu.flops_fp16 or gpu.flops)
    by_dtype: Mapping[str, tuple[Figure | None, float]] = {
        "bf16": bf16,
        "fp16": fp16,
        "fp32": (gpu.matmul_fp32, gpu.flops_fp32),
    }
    return by_dtype[dtype]


def half_precision(gpu: Gpu, dtype: str) -> list[str]:
    """Returns a sentence on fp16 if the card is faster in it than in `dtype`, by units that it lacks for bf16."""
    if gpu.has_bf16 or dtype == "fp16":
        return []
    return [f"{gpu.name} has matrix units for fp16 and none for bf16, so --dtype fp16 is faster there"]


def other_work(gpu: Gpu) -> Rate:
    """Returns the rate of all other work on the GPU, which its memory limits."""
    name = "other work on the GPU"
    if gpu.reached is not None:
        return Rate(name=name, value=gpu.reached.value, unit="B/s", origin="published", source=gpu.reached.source)
    source = f"{_DEVICE_SHARE:.0%} of the data sheet's {gpu.bandwidth / 1e9:.4g} GB/s"
    return Rate(name=name, value=_DEVICE_SHARE * gpu.bandwidth, unit="B/s", origin="assumed", source=source)


def copies(gpu: Gpu, given: float | None) -> Rate:
    """Returns the rate of copies to and from the GPU, each way."""
    name = "copies to and from the GPU, each way,"
    if given is not None:
        return Rate(name=name, value=given, unit="B/s", origin="given", source="--pcie")
    if gpu.link is None:
        return Rate(name=name, value=math.inf, unit="B/s", origin="assumed", source="GPU and CPU have one memory")
    return Rate(name=name, value=gpu.link.value, unit="B/s", origin="published", source=gpu.link.source)


def host_memory(gpu: Gpu, given: float | None) -> Rate:
    """Returns the rate at which the CPU reads and writes its memory."""
    name = "host memory"
    if given is not None:
        return Rate(name=name, value=given, unit="B/s", origin="given", source="--memory-bandwidth")
    if gpu.unified:
        # The cores of such chips reach a part of their memory's rate; most of it is for the GPU.
        value, source = _CORES_BANDWIDTH, "by the CPU's cores, of the memory that the GPU uses too"
    else:
        value, source = _RAM_BANDWIDTH, "two channels of DDR5"
    return Rate(name=name, value=value, unit="B/s", origin="assumed", source=source)


def optimizer(host: Rate, nbytes: int) -> Rate:
    """Returns the rate of AdamW on the CPU, which the host's memory limits.

    Args:
        host: the rate of host memory.
        nbytes: bytes that the update of one parameter reads and writes.
    """
    return Rate(
        name="AdamW on the CPU",
        value=HOST_SHARE * host.value / nbytes,
        unit="parameters/s",
        origin="assumed",
        source=f"{HOST_SHARE:.0%} of the host memory's rate",
    )
