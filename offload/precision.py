"""The choice between bf16 and fp32 if the user leaves it open: bf16 if this machine multiplies it as fast as fp32.

GPUs since Ampere do, and so do processors with instructions for bf16. bf16 also halves the bytes that are moved. On a
processor without such instructions torch multiplies bf16 many times slower than fp32: a model in bf16 takes hours
instead of minutes.

    decide     returns the dtype for two rates; pure
    rates      returns the rates of this processor: from the cache, or measured in some 20 ms and cached
    choose     returns the dtype for a device

`warn_if_slow` warns if this machine is slow in the dtype that the user has chosen.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offload.config import Config
from offload.fileio import cache_file, read_cache, write_cache
from offload.records import parse

_VERSION = 1
_TOKENS, _WIDTH = 128, 256
"""Shape of the products. At 7 Gflop/s all three take 7 ms. The dtypes' ratio is within a third of a larger shape's."""
_ROUNDS = 4
_MAX_SECONDS = 0.01
"""Seconds after which no further round starts."""
_ISA_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
"""Environment variables that keep torch and its libraries from using instruction sets."""
_CPUINFO_FIELDS = ("model name", "flags", "Features", "CPU implementer", "CPU part")
"""Lines of /proc/cpuinfo that identify the processor."""
_BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
"""Flags of processors with instructions for products in bf16; the last one is Arm's."""
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class ProductRates(NamedTuple):
    """Floating-point operations a second of matrix products in one thread."""

    half: float
    """In bf16 or fp16, as requested."""
    fp32: float

    @property
    def slower(self) -> float:
        return self.fp32 / self.half


class Choice(NamedTuple):
    """A dtype, and a line for users who would have expected bf16; None if the dtype is bf16."""

    dtype: str
    line: str | None = None


def decide(measured: ProductRates) -> str:
    """Returns "bf16" if its products are at least as fast as those in fp32, else "fp32"."""
    return "bf16" if measured.half >= measured.fp32 else "fp32"


def choose(device: torch.device) -> Choice:
    """Returns the choice of bf16 or fp32 that suits `device`."""
    if device.type == "cuda":
        # Without a GPU the run fails later with a better message. Emulated bf16 is slow, so it does not count.
        if not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False):
            return Choice("bf16")
        return Choice(
            "fp32",
            f"fp32: {torch.cuda.get_device_name(device)} has no arithmetic in bf16; "
            '"fp16": {"enabled": true} in the config is faster there',
        )
    if device.type != "cpu":
        # Each accelerator's module of torch has a check of its own, or none. Only a check that says no leads to fp32.
        supported = getattr(torch.get_device_module(device), "is_bf16_supported", None)
        if supported is None or supported():
            return Choice("bf16")
        return Choice("fp32", f"fp32: this {device.type} device has no arithmetic in bf16")
    measured = rates("bf16")
    if decide(measured) == "bf16":
        return Choice("bf16")
    return Choice("fp32", f"dtype fp32: on this processor it is {figures('bf16', measured)}")


def figures(half: str, measured: ProductRates) -> str:
    """Returns the ratio of fp32 to the 16-bit dtype, in words that follow a verb."""
    return (
        f"{measured.slower:.1f} times as fast as {half} ({measured.fp32 / 1e9:.0f} and "
        f"{measured.half / 1e9:.1f} Gflop/s in a thread)"
    )


def products_in_bf16() -> bool:
    """Returns True if this processor multiplies matrices in bf16 by instructions of its own.

    For choices that must be the same in each run on a machine, and so may not be measured.
    """
    return has_products_in_bf16(_cpuinfo(), os.environ)


def has_products_in_bf16(cpuinfo: str, environ: Mapping[str, str]) -> bool:
    """Returns True if a processor multiplies matrices in bf16 by instructions of its own.

    Args:
        environ: the environment, where a user may keep torch from using them.
    """
    words = {word.lower() for word in cpuinfo.split()}
    limited = any("avx2" in environ.get(name, "").lower() for name in _ISA_VARIABLES)
    return not limited and not words.isdisjoint(_BF16_FLAGS)


# -- measured -----------------------------------------------------------------------------------------


def measure(half: str) -> ProductRates:
    """Measures the rates of "bf16" or "fp16" and of fp32: a forward's product and the two of its backward.

    One thread computes, and its processor time counts: on a busy machine several threads would wait for each other.
    """
    works = [_products(dtype) for dtype in (_HALVES[half], torch.float32)]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for work in works:
            work()  # warm-up: allocates memory and selects kernels
        best, began = [math.inf, math.inf], time.thread_time()
        for _ in range(_ROUNDS):
            # In turns and by the minimum: a disturbance hits both dtypes, and a single disturbance does not decide.
            for index, work in enumerate(works):
                start = time.thread_time()
                work()
                best[index] = min(best[index], max(time.thread_time() - start, 1e-9))
            if time.thread_time() - began > _MAX_SECONDS:
                break
    finally:
        torch.set_num_threads(before)
    return ProductRates(*(6 * _TOKENS * _WIDTH * _WIDTH / seconds for seconds in best))


def _products(dtype: torch.dtype) -> Callable[[], object]:
    inputs = torch.full((_TOKENS, _WIDTH), 0.01, dtype=dtype, device="cpu")
    weight = torch.full((_WIDTH, _WIDTH), 0.01, dtype=dtype, device="cpu")

    def work() -> None:
        output = torch.nn.functional.linear(inputs, weight)
        output @ weight
        output.t() @ inputs

    return work


# -- kept ---------------------------------------------------------------------------------------------


def rates(half: str) -> ProductRates:
    """Returns the rates of this processor, from the cache if possible.

    The cache keeps the choice the same from run to run. Measures if the cache has no rates for this processor, number
    of cores, version of torch and limits. If the cache cannot be written, each process measures.
    """
    path, key = cache_path(), f"{half}: {_cache_key()}"
    cached = _read_cache(path)
    if (measured := _parse_rates(cached.get(key))) is not None:
        return measured
    # Processes that start together may all measure; `write_cache` leaves one complete result.
    measured = measure(half)
    products = {**cached, key: [float(f"{rate:.3g}") for rate in measured]}
    with contextlib.suppress(OSError):
        write_cache(path, json.dumps({"version": _VERSION, "products": products}, indent=2) + "\n")
    return measured


_VALID_RATES = (1e6, 1e16)
"""Range of rates that a thread of a processor can reach. A cached number outside of it is damaged."""


def _parse_rates(cached: Any) -> ProductRates | None:
    """Returns the rates that `rates` wrote, or None if `cached` is anything else."""
    if not (isinstance(cached, list) and len(cached) == 2 and all(type(rate) in (int, float) for rate in cached)):
        return None
    valid = all(_VALID_RATES[0] <= rate <= _VALID_RATES[1] for rate in cached)
    return ProductRates(*map(float, cached)) if valid else None


def cache_path() -> Path:
    """Returns the path of the cache, next to the cache of `offload probe`."""
    return cache_file("products")


def _cache_key() -> str:
    """Returns a line with everything that the rates depend on, the key of the cache."""
    lines = [line.partition(":") for line in _cpuinfo().partition("\n\n")[0].splitlines()]
    fields = {name.strip(): value.strip() for name, _, value in lines if name.strip() in _CPUINFO_FIELDS}
    processor = (
        f"{fields.get('model name', platform.machine())} {zlib.crc32(repr(sorted(fields.items())).encode()):08x}"
    )
    # A run under such a limit has rates of its own, which must not replace the rates of other runs.
    limits = [f"{name}={value}" for name in _ISA_VARIABLES if (value := os.environ.get(name))]
    return ", ".join([processor, f"{len(os.sched_getaffinity(0))} cores", f"torch {torch.__version__}", *limits])


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def _read_cache(path: Path) -> dict[str, Any]:
    try:
        content = parse(read_cache(path))
        cached = content["products"] if content["version"] == _VERSION else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return cached if isinstance(cached, dict) else {}


# -- explicitly chosen dtypes -------------------------------------------------------------------------


logger = logging.getLogger("offload")

_WARNED_FROM = 1.5
"""Warning threshold, as a multiple of fp32's time. Below it, users may have chosen the dtype to save memory."""
warned: set[str] = set()
"""Dtypes that this process has already been warned of."""


def warn_if_slow(config: Config, device: torch.device, goes_on: bool) -> None:
    """Warns once in a process if this machine is slow in the config's dtype.

    A processor is measured, and slow if it multiplies the dtype much slower than fp32. A GPU is asked whether it has
    arithmetic in bf16. A resumed run cannot change its dtype, so its advice differs.
    """
    autocasts = config.torch_autocast.enabled
    dtype = config.torch_autocast.dtype if autocasts else config.dtype
    # Each dtype is worth one warning.
    if dtype == "fp32" or dtype in warned:
        return
    warned.add(dtype)
    if device.type == "cuda":
        if dtype != "bf16" or torch.cuda.is_bf16_supported(including_emulation=False):
            return
        # The config does not contain which of these ways the user has taken, so the message names all.
        cure = (
            'choose fp16 where bf16 was chosen: "fp16": {"enabled": true} in the config, fp16=True in '
            'TrainingArguments, mixed_precision="fp16" in Accelerator, dtype="fp16" in initialize; offload train: '
            "--dtype fp16"
        )
        if autocasts:
            cure = 'leave the block "torch_autocast" out of the config, and set "fp16": {"enabled": true}'
        elif goes_on:
            cure = "a resumed run keeps its dtype; start another run in fp16, or resume this run on a newer GPU"
        gpu = torch.cuda.get_device_name(device)
        logger.warning("offload: %s has no arithmetic in bf16, which torch emulates slowly: %s", gpu, cure)
        return
    slower = rates(dtype).slower
    if slower < _WARNED_FROM:
        return
    cure = (
        f'offload train: --dtype fp32; elsewhere leave out the block "{dtype}" of the config, {dtype}=True of '
        f'TrainingArguments, mixed_precision="{dtype}" of Accelerator, or dtype="{dtype}" of initialize'
    )
    if goes_on and config.dtype != "fp32":
        cure = "a resumed run keeps its dtype; start another run in fp32, or resume this run on another machine"
    elif autocasts:
        cure = 'leave the block "torch_autocast" out of the config'
    logger.warning("offload: %s products are %.1f times slower than fp32 on this processor: %s", dtype, slower, cure)
