"""Timed steps of a model, with the time that each spends in waits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

import offload
from offload.bench.gpu.exposure import profiled
from offload.bench.gpu.work import Save, Work
from offload.bench.measure import peak_resident, random_ids
from offload.kernels import cuda

_WARM_UP = 2
"""Steps that do not count: the first records the access order, and the second is the first beside an update."""

_DRAWN = 1 << 20
"""Values of a tensor that are drawn; the others repeat them."""


class Waits(NamedTuple):
    """Seconds of one step in which a thread that runs the model waited, as the engine measures them."""

    reads: float
    """Waits for reads of weights."""
    updates: float
    """Waits for updates."""
    memory: float
    """Waits for host memory that an update holds."""

    @classmethod
    def of(cls, measured: Mapping[str, float]) -> Waits:
        """Returns the waits among the numbers of a step, by the names of docs/reference/metrics.md."""
        return cls(*(measured.get(f"wait_for_{name}_seconds", 0.0) for name in ("reads", "updates", "memory")))


def measure_steps(work: Work, settings: dict[str, Any], save: Save) -> None:
    """Trains the model of `work` with a config and times its steps, from one return of `step()` to the next."""
    end = time.monotonic() + work.seconds
    work.keep_limit()
    if work.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(work.device)
    settings = settings | {"wall_clock_breakdown": True}  # so that the engine measures its waits
    with offload.init(settings):
        model = work.build()
    shape: Any = model.config
    ids = random_ids((work.batch_size, work.seq_len), shape.vocab_size)
    with values_repeated():
        engine = offload.initialize(model=model, config=settings)[0]
    torch.manual_seed(0)  # for dropout: losses can be compared between placements
    try:
        _time_steps(work, engine, ids, end, save)
    finally:
        engine.destroy(remove=True)


@contextmanager
def values_repeated() -> Iterator[None]:
    """Draws a million normal values of a tensor, and repeats them.

    A step takes as long, and a model is there much sooner: torch draws with one thread, minutes for 13B parameters.
    """
    drawn = torch.Tensor.normal_

    def normal_(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self.is_contiguous():
            return drawn(self, *args, **kwargs)
        values = self.view(-1)
        drawn(values[:_DRAWN], *args, **kwargs)
        for part in values[_DRAWN:].split(_DRAWN):
            part.copy_(values[: len(part)])
        return self

    with patch.object(torch.Tensor, "normal_", normal_):
        yield


def _time_steps(work: Work, engine: offload.Engine, ids: torch.Tensor, end: float, save: Save) -> None:
    losses = [step(engine, ids, work.accumulation) for _ in range(_WARM_UP)]
    before, waits, figures = engine.io_bytes(), list[Waits](), dict[str, Any]()
    for seconds, loss in timed(work, end, lambda: step(engine, ids, work.accumulation)):
        losses.append(loss)
        waits.append(Waits.of(engine.measured))
        after, moved = engine.io_bytes(), len(seconds) * engine.parameter_count
        figures = sizes(work, engine.parameter_count) | times(work, seconds, engine.parameter_count)
        figures |= _waited(waits) | {
            "read_bytes_per_parameter": (after.read - before.read) / moved,
            "written_bytes_per_parameter": (after.written - before.written) / moved,
            "host_memory": engine.host_memory,
            "device_memory": engine.device_memory,
            "notices": list(engine.notices),
            "no_device_kernels": no_device_kernels(work.device),
            "losses": losses,
        }
        save(figures)
    seen = profiled(work.device, lambda: step(engine, ids, work.accumulation))
    save(figures | {"profiled": None if seen is None else seen._asdict()})


def no_device_kernels(device: torch.device) -> str | None:
    """Returns why the package's kernels do not run on a GPU, so that the host updates its weights; None if they do.

    Returns None for a CPU too.
    """
    return cuda.why_not(device) if device.type == "cuda" else None


def timed(work: Work, end: float, act: Callable[[], float]) -> Iterator[tuple[list[float], float]]:
    """Calls `act` up to `work.steps` times, fewer if `end` is near. Yields the seconds of all calls, and the result."""
    seconds: list[float] = []
    # The time of three steps must be left: the next one, one for the profiler, and the last update before `destroy`.
    while len(seconds) < work.steps and (not seconds or time.monotonic() + 3 * statistics.median(seconds) < end):
        began = time.perf_counter()
        result = act()
        seconds.append(time.perf_counter() - began)
        yield seconds, result


def step(engine: Any, ids: torch.Tensor, accumulation: int) -> float:
    """Makes one step of `accumulation` micro-batches of the same tokens; returns the loss of the last one.

    The call waits for the device, as a loop that logs does.
    """
    for _ in range(accumulation):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
    return float(loss.detach())


def sizes(work: Work, parameters: int) -> dict[str, Any]:
    """Returns the sizes of a part, and the peaks of host and device memory so far."""
    return {
        "model": work.model,
        "layers": work.layers,
        "parameters": parameters,
        "tokens_per_step": work.tokens,
        "recompute": work.recompute,
        "limit": work.limit,
        "peak_host_bytes": peak_resident(),
        "peak_device_bytes": torch.cuda.max_memory_allocated(work.device) if work.device.type == "cuda" else None,
    }


def times(work: Work, seconds: Sequence[float], parameters: int) -> dict[str, Any]:
    """Returns the times of steps, and tokens and floating-point operations per second.

    6 operations count for each parameter and token ("6n"), or 8 if the backward recomputes the forward ("8n").
    """
    tokens = work.tokens / statistics.median(seconds)
    return {
        "steps": len(seconds),
        "step_seconds": statistics.median(seconds),
        "all_step_seconds": list(seconds),
        "tokens_per_second": tokens,
        "teraflops_6n": 6 * parameters * tokens / 1e12,
        "teraflops_8n": 8 * parameters * tokens / 1e12,
    }


def _waited(waits: Sequence[Waits]) -> dict[str, Any]:
    return {
        "exposed_io_seconds": statistics.median(sum(wait) for wait in waits),
        "read_wait_seconds": statistics.median(wait.reads for wait in waits),
        "update_wait_seconds": statistics.median(wait.updates + wait.memory for wait in waits),
    }
