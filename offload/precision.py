"""Whether this machine multiplies bf16 as fast as fp32, which decides between them where nobody has.

GPUs since Ampere and processors with the instructions for it do, and bf16 halves what is moved. Where a processor lacks
them, torch multiplies bf16 many times slower than fp32, and a model in bf16 takes hours in place of minutes.

    decide     from two rates to a dtype, pure
    rates      of this processor: as they were kept, else measured, which takes some 20 ms, and kept
    choose     of a device
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offload.fileio import atomic_write, cache_file

_VERSION = 1
_TOKENS, _WIDTH = 128, 256
"""Of the products. At 7 Gflop/s the three of them take 7 ms; the ratio is that of larger ones within a third."""
_ROUNDS = 4
_ENOUGH = 0.01
"""Seconds after which no further round begins."""
_LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
"""What tells torch and its libraries to leave instructions out."""
_OF_PROCESSOR = ("model name", "flags", "Features", "CPU implementer", "CPU part")
"""Lines of /proc/cpuinfo that say which one it is."""
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Rates(NamedTuple):
    """Floating-point operations a second of matrix products, in one thread."""

    half: float
    """In bf16 or fp16, as was asked."""
    fp32: float

    @property
    def slower(self) -> float:
        """How many times as long as in fp32 products take."""
        return self.fp32 / self.half


class Choice(NamedTuple):
    """A dtype, and a line for who would have expected bf16; none where it is."""

    dtype: str
    line: str | None = None


def decide(found: Rates) -> str:
    """bf16 where its products are at least as fast as those of fp32, else fp32."""
    return "bf16" if found.half >= found.fp32 else "fp32"


def choose(device: torch.device) -> Choice:
    """bf16 or fp32, whichever `device` is made for."""
    if device.type == "cuda":
        if not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False):
            return Choice("bf16")
        return Choice("fp32", f"fp32: {torch.cuda.get_device_name(device)} has no arithmetic in bf16")
    found = rates("bf16")
    if decide(found) == "bf16":
        return Choice("bf16")
    return Choice("fp32", f"fp32: this processor multiplies it {figures('bf16', found)}")


def figures(half: str, found: Rates) -> str:
    """How much faster fp32 is, in words that follow a verb."""
    return (
        f"{found.slower:.1f} times as fast as {half} ({found.fp32 / 1e9:.0f} and {found.half / 1e9:.1f} Gflop/s "
        f"in a thread)"
    )


# -- measured -----------------------------------------------------------------------------------------


def measure(half: str) -> Rates:
    """The rates of "bf16" or "fp16" and of fp32: of a forward's product and the two of its backward.

    One thread runs them, and its own time counts: on a busy machine several would wait for each other.
    """
    works = [_products(dtype) for dtype in (_HALVES[half], torch.float32)]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for work in works:
            work()  # finds memory and kernels
        best, began = [math.inf, math.inf], time.thread_time()
        for _ in range(_ROUNDS):
            for each, work in enumerate(works):
                best[each] = min(best[each], _seconds(work))
            if time.thread_time() - began > _ENOUGH:
                break
    finally:
        torch.set_num_threads(before)
    return Rates(*(6 * _TOKENS * _WIDTH * _WIDTH / seconds for seconds in best))


def _products(dtype: torch.dtype) -> Callable[[], object]:
    inputs = torch.full((_TOKENS, _WIDTH), 0.01, dtype=dtype, device="cpu")
    weight = torch.full((_WIDTH, _WIDTH), 0.01, dtype=dtype, device="cpu")

    def work() -> None:
        output = torch.nn.functional.linear(inputs, weight)
        output @ weight
        output.t() @ inputs

    return work


def _seconds(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return max(time.thread_time() - start, 1e-9)


# -- kept ---------------------------------------------------------------------------------------------


def rates(half: str) -> Rates:
    """Those of this processor, as they were kept, so that a machine does not choose otherwise from start to start.

    They are measured where none are kept, or those of another processor, torch or limit; where they cannot be kept, in
    each process.
    """
    path, key = kept_at(), f"{half}: {_about()}"
    kept = _read(path)
    if (found := _as_rates(kept.get(key))) is not None:
        return found
    found = measure(half)
    with contextlib.suppress(OSError):
        _keep(path, {**kept, key: [float(f"{rate:.3g}") for rate in found]})
    return found


_SANE = (1e6, 1e16)
"""Floating-point operations a second that a thread of a processor may reach: what is kept beyond is damage."""


def _as_rates(kept: Any) -> Rates | None:
    """What `_keep` has written; None for anything else."""
    if not (isinstance(kept, list) and len(kept) == 2 and all(type(rate) in (int, float) for rate in kept)):
        return None
    return Rates(*map(float, kept)) if all(_SANE[0] <= rate <= _SANE[1] for rate in kept) else None


def kept_at() -> Path:
    """The file that holds what was measured on this machine, beside that of `offload probe`."""
    return cache_file("products")


def _about() -> str:
    """All that the rates depend on, in one line."""
    lines = [line.partition(":") for line in _cpuinfo().partition("\n\n")[0].splitlines()]
    said = {name.strip(): value.strip() for name, _, value in lines if name.strip() in _OF_PROCESSOR}
    processor = f"{said.get('model name', platform.machine())} {zlib.crc32(repr(sorted(said.items())).encode()):08x}"
    limits = [f"{name}={value}" for name in _LIMITS if (value := os.environ.get(name))]
    return ", ".join([processor, f"{len(os.sched_getaffinity(0))} cores", f"torch {torch.__version__}", *limits])


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        kept = content["products"] if content["version"] == _VERSION else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _keep(path: Path, products: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, json.dumps({"version": _VERSION, "products": products}, indent=2) + "\n", durable=False)
