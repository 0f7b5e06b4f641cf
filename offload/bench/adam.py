"""A benchmark of the fused AdamW step against the machine's memory and against peers, in turns on the same arrays.

The bound is a probe: the same threads read and write the same arrays with almost no arithmetic. A bf16 step
with a split master moves 26 bytes for each parameter: weight, low bits and two moments in and out, and the gradient in.
With bf16 moments, which are rounded stochastically, it moves 18.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offload import kernels
from offload.bench.measure import bars, pyplot, row_json, save_figure
from offload.errors import ConfigError
from offload.hardware.adam_arrays import STEP, Arrays, aligned_like
from offload.kernels import Noise, Segment, _native, noise_stream, settings
from offload.layout.modes import MOMENT_DTYPES
from offload.sizes import count_of

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
_NOISE = Noise(noise_stream(0, 0, STEP.step), 0)
# Elements, 1 MiB in fp32, so that a tile stays in a core's cache between the cast and the step.
_TILE = 1 << 18


class Case(NamedTuple):
    """One setting of the kernels."""

    weight_dtype: str
    grad_dtype: str
    moment_dtype: str
    threads: int
    isa: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamRow:
    """The result of one contender: medians of the rounds."""

    name: str
    numel: int
    weight_dtype: str
    grad_dtype: str
    moment_dtype: str
    threads: int
    isa: str
    ms: float
    gb_per_s: float
    """The probe's bytes divided by the contender's time. A contender that moves more bytes has a higher real rate."""
    of_probe: float
    """The probe's time divided by the contender's, as the median over the rounds."""


def cases(
    dtypes: Sequence[str],
    grad_dtypes: Sequence[str],
    threads: Sequence[int],
    isas: Sequence[str],
    moments: Sequence[str] = (),
) -> list[Case]:
    """Returns every combination of the requested settings.

    Empty sequences stand for bf16 weights, gradients of the weights' dtype, fp32 moments, one thread and all threads
    that the process may use, and the best instruction set.
    """
    known = _native.supported_isas()
    threads = threads or sorted({1, settings.threads_from(os.environ)})
    isas = isas or (settings.isa_from(os.environ, known),)
    for isa in isas:
        if isa not in known:
            raise ConfigError(f"this machine has no instruction set {isa!r}: expected {', '.join(known)}")
    for name in (*dtypes, *grad_dtypes):
        if name not in DTYPES:
            raise ConfigError(f"there is no dtype {name!r} here: expected {', '.join(DTYPES)}")
    for name in moments:
        if name not in MOMENT_DTYPES:
            raise ConfigError(f"there is no dtype {name!r} of moments here: expected {', '.join(MOMENT_DTYPES)}")
    for count in threads:
        if not 1 <= count <= settings.MOST_THREADS:
            raise ConfigError(f"expected --threads >= 1 and at most {settings.MOST_THREADS}, got {count}")
    kinds = [
        (dtype, grad, moment)
        for dtype in dtypes or ("bf16",)
        for grad in grad_dtypes or (dtype,)
        for moment in moments or ("fp32",)
    ]
    return [Case(*kind, count, isa) for kind, count, isa in itertools.product(kinds, threads, isas)]


def measure(
    numel: int, wanted: Sequence[Case], rounds: int, tell: Callable[[str], None] = lambda _: None
) -> list[AdamRow]:
    """Runs the contenders of each case in turns, after one untimed round, and returns a row for each.

    Restores the environment's settings of the kernels afterwards.
    """
    for name, number in (("--numel", numel), ("--rounds", rounds)):
        if number < 1:
            raise ConfigError(f"expected {name} of at least 1, got {number}")
    before = torch.get_num_threads()
    rows: list[AdamRow] = []
    try:
        for (dtype, grad, moment), group in itertools.groupby(wanted, key=lambda case: case[:3]):
            # One set of arrays at a time: at realistic sizes, two sets would not fit in memory.
            arrays = Arrays(numel, DTYPES[dtype], DTYPES[grad], MOMENT_DTYPES[moment])
            contenders = _contenders(arrays)
            for case in group:
                _native.configure(case.isa, case.threads)
                torch.set_num_threads(case.threads)
                rows.extend(_rows(case, arrays, contenders, rounds, tell))
    finally:
        torch.set_num_threads(before)
        _native.configure(settings.isa_from(os.environ, _native.supported_isas()), settings.threads_from(os.environ))
    return rows


def _rows(
    case: Case, arrays: Arrays, contenders: dict[str, Callable[[], object]], rounds: int, tell: Callable[[str], None]
) -> Iterable[AdamRow]:
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    # Contenders take turns: the bandwidth of a shared machine drifts, so each ratio compares times of one round.
    for turn in range(rounds + 1):
        for name, action in contenders.items():
            tell(f"{name}, {count_of(case.threads, 'thread')}, round {turn} of {rounds}")
            start = time.perf_counter()
            action()
            seconds[name].append(time.perf_counter() - start)
    for name, taken in seconds.items():
        times, bound = taken[1:], seconds["probe"][1:]  # the first round touches memory and selects kernels
        median = statistics.median(times)
        yield AdamRow(
            name=name,
            numel=arrays.weight.numel(),
            **case._asdict(),
            ms=median * 1e3,
            gb_per_s=arrays.weight.numel() * arrays.bytes_per_parameter / median / 1e9,
            of_probe=statistics.median(p / m for p, m in zip(bound, times, strict=True)),
        )


def _contenders(arrays: Arrays) -> dict[str, Callable[[], object]]:
    numel = arrays.weight.numel()
    contenders: dict[str, Callable[[], object]] = {
        "probe": lambda: kernels.probe(arrays.partition),
        "offload": lambda: kernels.update(arrays.partition, [Segment(0, numel, STEP, _NOISE)]),
    }
    if arrays.exp_avg.dtype is not torch.float32:
        return contenders  # no other contender rounds its moments
    return {**contenders, "torch fused": _torch_fused(arrays), **_deepspeed(arrays)}


def _torch_fused(arrays: Arrays) -> Callable[[], object]:
    """Returns a step of `torch.optim.AdamW(fused=True)` on fp32 masters, with the casts that 16-bit training needs."""
    master = torch.nn.Parameter(arrays.master)
    master.grad = arrays.grad if arrays.grad.dtype is torch.float32 else aligned_like(master.numel(), torch.float32)
    optimizer = torch.optim.AdamW([master], lr=STEP.lr, weight_decay=STEP.weight_decay, fused=True)
    # The state is set by hand, so that the contender works on the same arrays as the others.
    optimizer.state[master] = {
        # The optimizer counts up before the step.
        "step": torch.tensor(float(STEP.step - 1), dtype=torch.float32, device="cpu"),
        "exp_avg": arrays.exp_avg,
        "exp_avg_sq": arrays.exp_avg_sq,
    }

    def step() -> None:
        assert master.grad is not None
        if master.grad is not arrays.grad:
            master.grad.copy_(arrays.grad)
        optimizer.step()
        if arrays.weight is not arrays.master:
            arrays.weight.copy_(master.detach())

    return step


def _deepspeed(arrays: Arrays) -> dict[str, Callable[[], object]]:
    """Returns steps of DeepSpeed's CPU Adam; none if DeepSpeed is not installed.

    One step works on the flat array, as ZeRO-Offload does, the other on tiles that fit the cache.
    """
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return {}
    master = torch.nn.Parameter(arrays.master)
    numel, whole = master.numel(), arrays.grad.dtype is torch.float32
    gradient = arrays.grad if whole else aligned_like(numel, torch.float32)
    master.grad = gradient
    optimizer = DeepSpeedCPUAdam([master], lr=STEP.lr, eps=STEP.eps, weight_decay=STEP.weight_decay, adamw_mode=True)
    # DeepSpeed's state is set by hand as well, on the arrays of all contenders.
    optimizer.state[master] = {"step": STEP.step, "exp_avg": arrays.exp_avg, "exp_avg_sq": arrays.exp_avg_sq}

    def flat() -> None:
        if not whole:
            gradient.copy_(arrays.grad)
        optimizer.step()
        if arrays.weight is not arrays.master:
            arrays.weight.copy_(arrays.master)

    cast = torch.empty(_TILE, dtype=torch.float32, device="cpu")

    def tiled() -> None:
        for start in range(0, numel, _TILE):
            part = slice(start, min(start + _TILE, numel))
            tile = cast[: part.stop - start].copy_(arrays.grad[part])
            optimizer.ds_opt_adam.adam_update(
                optimizer.opt_id, STEP.step, STEP.lr, STEP.beta1, STEP.beta2, STEP.eps, STEP.weight_decay, True,
                arrays.master[part], tile, arrays.exp_avg[part], arrays.exp_avg_sq[part],
            )  # fmt: skip
            if arrays.weight is not arrays.master:
                arrays.weight[part].copy_(arrays.master[part])

    return {"deepspeed": flat, "deepspeed, tiled": tiled}


def as_json(machine: dict[str, Any], rows: Iterable[AdamRow]) -> dict[str, Any]:
    """Returns the content that `--json` prints."""
    return {"machine": machine, "rows": [row_json(row) for row in rows]}


def plot(rows: Sequence[AdamRow], path: Path) -> None:
    """Draws each contender's fraction of the probe's speed to a PNG, SVG or PDF file."""
    names = [f"{r.name}, {r.weight_dtype}, moments {r.moment_dtype}, {r.threads} x {r.isa}" for r in rows]
    figure, axis = pyplot().subplots(figsize=(8, 1.2 + 0.3 * len(rows)))
    bars(names, [row.of_probe for row in rows], [row.name == "offload" for row in rows], axis)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.set_xlabel("of the speed of memory")
    save_figure(figure, path)
