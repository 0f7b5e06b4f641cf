"""An update from DISK to DISK against the slower of its I/O and its kernel alone: `python -m bench.update FOLDER`.

Nothing else runs: forward and backward take no time, and `step()` waits for its updates. Bound of the bytes: an update
reads 12 and writes 12 for each parameter (weight 2, residual 2, moments 8), of which up to 2 are read before, for the
backward; with `--moments bf16` 8 and 8, with `--moments int8` 6 and 6, with `--master bf24` 1 less each. I/O alone is
the faster of all reads and then all writes, and both at once, by the same queue on the same drive; the kernel alone is
the same kernel on memory, tile after tile. All take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offload
from bench.measure import report, seconds, settings_for
from offload import kernels
from offload.aio import DirectFile, IoQueue, aligned_empty
from offload.aio.measure import move, remove
from offload.hardware.adam_arrays import Arrays
from offload.layout.modes import MASTERS, MOMENT_DTYPES
from offload.sizes import GIB, MIB

_BYTES = {"fp32": 24, "bf16": 16, "int8": 12}
"""Of I/O for each parameter, by the dtype of the moments."""
_TILE = 32 * MIB // 12 // 256 * 256
_REQUEST = 16 * MIB


class _Gradient(torch.autograd.Function):
    """A gradient of every element that costs nothing to compute."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], ctx.gradient.view(-1), None


class _Unit(nn.Module):
    def __init__(self, gradient: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(len(gradient), dtype=torch.bfloat16))
        self.gradient = gradient

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _Gradient.apply(inputs, self.weight, self.gradient)  # type: ignore[no-untyped-call]
        return output


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parameters", type=float, default=500e6)
    parser.add_argument("--units", type=int, default=20)
    parser.add_argument("--host-memory", default="2GiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--moments", choices=list(_BYTES), default="fp32")
    parser.add_argument("--master", choices=list(MASTERS), default="fp32")
    given = parser.parse_args(arguments)
    numel = int(given.parameters) // given.units // 2048 * 2048
    engine = make_engine(given, numel, moments=given.moments, master=given.master)
    nbytes = _BYTES[given.moments] - (2 if given.master == "bf24" else 0)
    file = given.folder / "bench-update.rates"
    buffer = aligned_empty(GIB)
    torch.frombuffer(buffer, dtype=torch.int32).random_()
    updates, ios, steps = [], [], []
    try:
        with IoQueue() as queue, DirectFile(file, create=True) as drive:
            drive.reserve(GIB)
            tile = _tile(given.moments, given.master)
            for turn in range(given.rounds + 1):
                update = _update(engine)
                rates = {name: GIB / move(queue, drive, buffer, name, _REQUEST).seconds for name in ("write", "read")}
                rates["mixed"] = GIB / move(queue, drive, buffer, "mixed", _REQUEST).seconds
                kernel = seconds(lambda: _step(tile)) / _TILE
                if turn:
                    half = nbytes / 2
                    total = numel * given.units
                    updates.append(update)
                    io = min(half / rates["read"] + half / rates["write"], nbytes / rates["mixed"])
                    ios.append(io * total)
                    steps.append(kernel * total)
    finally:
        remove(file)
        engine.destroy(remove=True)
    report(
        "update",
        {
            "parameters": numel * given.units,
            "units": given.units,
            "moments": given.moments,
            "master": given.master,
            "host_memory": engine.host_memory,
            "seconds": statistics.median(updates),
            "io_alone_seconds": statistics.median(ios),
            "kernel_alone_seconds": statistics.median(steps),
            "of_the_bound": statistics.median(
                max(io, step) / update for update, io, step in zip(updates, ios, steps, strict=True)
            ),
            "rounds": [round(max(io, step) / update, 3) for update, io, step in zip(updates, ios, steps, strict=True)],
        },
    )


def make_engine(given: argparse.Namespace, numel: int, run: str = "bench-update", **forms: str) -> offload.Engine:
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(0)).mul_(1e-3).to(torch.bfloat16)
    settings = settings_for(given.folder, run, "nvme", host_memory=given.host_memory, debug={"overlap": False}, **forms)
    model = nn.Sequential(*(_Unit(gradient) for _ in range(given.units)))
    return offload.initialize(model=model, config=settings)[0]


def _update(engine: offload.Engine) -> float:
    """Seconds in which all updates of a step are read, computed and written."""
    engine.backward(engine(torch.zeros(1, requires_grad=True)).sum())
    start = time.perf_counter()
    engine.step()
    return time.perf_counter() - start


def _tile(moments: str, master: str) -> kernels.Partition:
    low_bits = torch.int8 if master == "bf24" else torch.int16
    return Arrays(_TILE, torch.bfloat16, torch.bfloat16, MOMENT_DTYPES[moments], low_bits).partition


def _step(tile: kernels.Partition) -> None:
    step = kernels.AdamWStep(
        lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=2, grad_scale=1.0, decoupled=True
    )
    kernels.update(tile, [kernels.Segment(0, _TILE, step, kernels.Noise(0, 0))])


if __name__ == "__main__":
    main()
