"""Host time of a unit's use beyond plain PyTorch: `python -m bench.host_time`.

Microseconds of the launching thread's CPU time, in a forward and in a backward, that an engine takes more for each
unit than the same model without one: hooks, pager, views, gradients. Units are tiny transformer blocks of nine
parameters, so that little else takes time. On a CPU a unit's copy to the device, and the copy of its gradients with
the sum of their squares, run on the same thread; they are of 26 KB here. Other load on the machine makes CPU time
longer as well, so the difference of the least of all rounds stands beside the median of the differences. Bars: 150 µs
where units come and go, 30 µs where all stay.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import offload
from bench.measure import report, settings_for

_WIDTH, _HEADS, _INNER = 32, 2, 96
_BYTES = 2 * (4 * _WIDTH * _WIDTH + 3 * _WIDTH * _INNER + 2 * _WIDTH)
"""Bytes of a unit's weights in bf16."""
_ROOM = 4
"""Units for which the device has room, where they come and go."""


class Block(nn.Module):
    """A transformer block of nine parameters, in nine modules."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(_WIDTH), nn.RMSNorm(_WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(_WIDTH, _INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(_INNER, _WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        query, key, value = (
            projection(y).unflatten(-1, (_HEADS, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        x = x + self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(-2))
        y = self.between(x)
        y = self.down(F.silu(self.gate(y)) * self.up(y))
        return torch.add(x, y)


class Blocks(nn.Module):
    """`count` blocks, one after the other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.float().sum()


class Seconds(NamedTuple):
    """Seconds of the calling thread's CPU time."""

    forward: float
    backward: float


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--units", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        report("host_time", {"units": options.units, **_figures(options.units, options.rounds, Path(folder))})


def _figures(units: int, rounds: int, folder: Path) -> dict[str, float]:
    """Medians over the rounds, in each of which plain model and engines take turns."""
    x = torch.randn(1, 8, _WIDTH, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    plain = Blocks(units).to(torch.bfloat16)
    engines = {
        "all_stay": offload.initialize(model=Blocks(units), config=settings_for(folder, "stay", "none"))[0],
        "come_and_go": offload.initialize(
            model=Blocks(units), config=settings_for(folder, "go", "cpu", device_memory=_ROOM * (_BYTES + 4096))
        )[0],
    }
    try:
        seconds: dict[str, list[Seconds]] = {name: [] for name in ("plain", *engines)}
        for _ in range(rounds + 2):
            seconds["plain"].append(_seconds(plain, torch.Tensor.backward, plain.zero_grad, x))
            for name, engine in engines.items():
                seconds[name].append(_seconds(engine, engine.backward, engine.step, x))
    finally:
        for engine in engines.values():
            engine.destroy(remove=True)
    figures = {}
    for direction in Seconds._fields:
        # The first rounds record the order of uses.
        times = {
            name: [getattr(turn, direction) / units * 1e6 for turn in turns[2:]] for name, turns in seconds.items()
        }
        for name in engines:
            more = [paged - plain_time for paged, plain_time in zip(times[name], times["plain"], strict=True)]
            figures[f"{name}_{direction}_us"] = statistics.median(more)
            figures[f"{name}_{direction}_least_us"] = min(times[name]) - min(times["plain"])
        figures[f"plain_{direction}_us"] = statistics.median(times["plain"])
    return figures


def _seconds(model: Any, backward: Callable[[torch.Tensor], Any], end: Callable[[], Any], x: torch.Tensor) -> Seconds:
    """One forward and backward; `end` ends the step and does not count."""
    start = time.thread_time()
    loss = model(x)
    middle = time.thread_time()
    backward(loss)
    stop = time.thread_time()
    end()
    return Seconds(middle - start, stop - middle)


if __name__ == "__main__":
    main()
