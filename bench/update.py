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
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offload
from bench.measure import report, settings_for
from offload import kernels
from offload.bench.measure import drive_rates, seconds_of
from offload.hardware.adam_arrays import STEP, Arrays
from offload.layout.modes import MASTERS, MOMENT_DTYPES
from offload.sizes import GIB, MIB

_BYTES = {"fp32": 24, "bf16": 16, "int8": 12}
"""Of I/O for each parameter, by the dtype of the moments."""
_TILE = 32 * MIB // 12 // 256 * 256


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
    options = parser.parse_args(arguments)
    forms = {"moments": options.moments, "master": options.master}
    numel = int(options.parameters) // options.units // 2048 * 2048
    total = numel * options.units
    half = total * (_BYTES[options.moments] - (2 if options.master == "bf24" else 0)) / 2
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(0)).mul_(1e-3).to(torch.bfloat16)
    more = {"host_memory": options.host_memory, "debug": {"overlap": False}, **forms}
    engine = offload.initialize(
        model=nn.Sequential(*(_Unit(gradient) for _ in range(options.units))),
        config=settings_for(options.folder, "bench-update", "nvme", **more),
    )[0]
    low_bits = torch.int8 if options.master == "bf24" else torch.int16
    tile = Arrays(_TILE, torch.bfloat16, torch.bfloat16, MOMENT_DTYPES[options.moments], low_bits).partition
    segments = [kernels.Segment(0, _TILE, STEP, kernels.Noise(0, 0))]
    updates, ios, steps = [], [], []
    try:
        with drive_rates([options.folder / "bench-update.rates"], GIB) as drive:
            for number in range(options.rounds + 1):
                engine.backward(engine(torch.zeros(1, requires_grad=True)).sum())
                update = seconds_of(engine.step)  # all states are read, computed and written within
                io = drive().seconds(half, half)
                step = seconds_of(lambda: kernels.update(tile, segments)) / _TILE * total
                if number:
                    updates.append(update)
                    ios.append(io)
                    steps.append(step)
    finally:
        engine.destroy(remove=True)
    bounds = [max(io, step) / update for update, io, step in zip(updates, ios, steps, strict=True)]
    figures = {
        "parameters": total,
        "units": options.units,
        **forms,
        "host_memory": engine.host_memory,
        "seconds": statistics.median(updates),
        "io_alone_seconds": statistics.median(ios),
        "kernel_alone_seconds": statistics.median(steps),
        "of_the_bound": statistics.median(bounds),
        "rounds": [round(bound, 3) for bound in bounds],
    }
    report("update", figures)


if __name__ == "__main__":
    main()
