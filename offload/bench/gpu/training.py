"""Timed steps of a model, with the seconds of each step's waits."""

from __future__ import annotations

import itertools
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import offload
from offload.bench.configs import placed
from offload.bench.measure import limit_device_memory, random_ids, resident
from offload.errors import BudgetError, ConfigError
from offload.finetune.model import make_ready
from offload.kernels import cuda
from offload.layout.flat_layout import layouts_of
from offload.layout.pass_order import MICRO_BATCH_MAJOR
from offload.layout.placement import usable_host
from offload.layout.units import find_units
from offload.losses.causal_model import choose_loss
from offload.planner.activations import Load, need
from offload.planner.memory import Memory, Room, settings, settle
from offload.planner.model_shape import from_name
from offload.presets import build
from offload.report.links import Interval, total, union
from offload.sizes import MIB, format_size
from offload.swapper.memory.device import open_device
from offload.swapper.memory.limits import free_host_memory

# -- exposure ------------------------------------------------------------------------------------------
#
# Division of a step's time on the GPU, by torch's profiler: kernels, copies that no kernel hides, and idle time.


def exposure(seconds: float, kernels: Iterable[Interval], copies: Iterable[Interval]) -> dict[str, float]:
    """Returns the division of a step that took `seconds`; the intervals of kernels and copies may overlap."""
    computing, copying = (union(intervals, -math.inf, math.inf) for intervals in (kernels, copies))
    busy = total(union([*computing, *copying], -math.inf, math.inf))
    return {
        "seconds": seconds,
        "kernels": total(computing),
        "copies": total(copying),
        "exposed_copies": busy - total(computing),  # something was copied, and no kernel ran
        "idle": max(seconds - busy, 0.0),  # the GPU waited for a drive, for an update, or for the host
    }


class Profile(NamedTuple):
    """A step by torch's profiler, in seconds of `time.perf_counter`."""

    start: float
    end: float
    kernels: Sequence[Interval] | None
    """Kernels of the GPU, which may overlap; None without a GPU."""
    copies: Sequence[Interval] = ()
    """Copies between host and GPU."""


def profiled(device: torch.device, step: Callable[[], object]) -> Profile:
    """Runs one step under the profiler of the GPU, if `device` is one.

    The optimizer's updates may still run when the step ends.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return Profile(start, time.perf_counter(), None)
    mark = torch.zeros(1, device=device)
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        start = time.perf_counter()
        mark.fill_(1.0)  # the first kernel, some microseconds after `start`: the profiler has a clock of its own
        step()
        torch.cuda.synchronize(device)
        end = time.perf_counter()
    kernels, copies = split(seen.events())
    later = start - min((first for first, _ in kernels), default=start)
    return Profile(start, end, shifted(kernels, later), shifted(copies, later))


def shifted(intervals: Iterable[Interval], later: float) -> list[Interval]:
    """Returns intervals that start and end `later` seconds later."""
    return [(start + later, end + later) for start, end in intervals]


def split(events: Iterable[Any]) -> tuple[list[Interval], list[Interval]]:
    """Returns two lists of intervals from the events of torch's profiler: kernels, and copies between host and GPU.

    Other work of the GPU, such as copies within its memory, counts as kernels.
    """
    kernels: list[Interval] = []
    copies: list[Interval] = []
    for event in events:
        if event.device_type.name != "CUDA":
            continue
        between = "HtoD" in event.name or "DtoH" in event.name
        (copies if between else kernels).append((event.time_range.start / 1e6, event.time_range.end / 1e6))
    return kernels, copies


# -- work ----------------------------------------------------------------------------------------------
#
# Sizes, placements and configs of the parts, and their functions for measuring times.


Save = Callable[[dict[str, Any]], None]
"""A function that receives all figures so far, so that the figures of a stopped part are not lost."""

PLACEMENTS = tuple("none/none nvme/nvme cpu/cpu cpu/nvme none/nvme nvme/cpu none/cpu cpu/none nvme/none".split())
"""All nine placements, as weights/states, the most important first."""


TRAIN_BATCH, MICRO_BATCHES = "train_batch", "micro_batches"
LOOPS = (TRAIN_BATCH, MICRO_BATCHES)
"""Loops over the micro-batches of a step.

`train_batch` hands all of them to the engine, as Trainer and `offload train` do, so they may take turns at a block. In
`micro_batches` the loop calls engine, backward and step for each, as most scripts of DeepSpeed do.
"""


class StepSize(NamedTuple):
    """The size of a step of one micro-batch."""

    batch_size: int
    seq_len: int
    recompute: bool = False


DEFAULT_STEP = StepSize(8, 512)


class Work(NamedTuple):
    """The work of a part."""

    device: torch.device
    folder: Path
    """An empty folder for swap files."""
    model: str = "llama-1b"
    layers: int | None = None
    """Layers of the model; None for all of them."""
    batch_size: int = 8
    seq_len: int = 512
    accumulation: int = 1
    recompute: bool = False
    """True if activations are computed again in the backward."""
    chunked_loss: bool = False
    """True if the loss is computed in chunks where the model allows it, as `offload train` does."""
    limit: int | None = None
    """Bytes of GPU memory that may be taken; None for all of it."""
    loops: tuple[str, ...] = (TRAIN_BATCH,)
    """Loops of `LOOPS` whose steps are timed, one after the other on the same engine."""
    moments: str | None = None
    """Form of the optimizer's moments, and below of the masters; None for fp32."""
    master: str | None = None
    grad_dtype: str | None = None
    """Dtype in which gradients of several micro-batches are added up (`grad_accum_dtype`); None for the default."""
    steps: int = 8
    """Timed steps; fewer if they would take longer than `seconds`."""
    seconds: float = 60.0
    copy_nbytes: int = 256 * MIB
    rounds: int = 15

    @property
    def tokens(self) -> int:
        return self.batch_size * self.seq_len * self.accumulation

    def keep_limit(self) -> None:
        """Limits this process to `limit` bytes of GPU memory from now on."""
        if self.limit is not None and self.device.type == "cuda":
            limit_device_memory(self.device, self.limit)

    def build(self) -> nn.Module:
        """Returns the model. Inside of `offload.init` it takes no memory."""
        model = build(self.model, self.layers)
        make_ready(model, self.recompute)
        if self.chunked_loss:
            choose_loss(model, None, off="")
        return model

    def with_forms(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Returns a config with the forms of moments, masters and sums of gradients."""
        forms = {"moments": self.moments, "master": self.master}
        block = {name: form for name, form in forms.items() if form is not None}
        sums = {} if self.grad_dtype is None else {"data_types": {"grad_accum_dtype": self.grad_dtype}}
        return settings | {"offload": settings["offload"] | block} | sums


def config_for(placement: str, work: Work, dtype: str, accumulation: int = 1, clip: float = 0.0) -> dict[str, Any]:
    """Returns the config of a placement, written as weights/states."""
    settings = placed(placement, work.folder, work.device, work.batch_size, dtype, accumulation, clip)
    return work.with_forms(settings)


# -- training ------------------------------------------------------------------------------------------


_WARM_UP = 3
"""Steps of each loop that do not count.

The first records the access order, and passes micro-batches one after the other. The second is the first that overlaps
an update, and in which micro-batches take turns; the device arena may grow after it.
"""

_DRAWN = 1 << 20
"""Number of drawn values in a tensor; the other values repeat them."""


def measure_steps(
    work: Work, settings: dict[str, Any], save: Save, watch: Callable[[Profile], None] = lambda _: None
) -> None:
    """Trains the model of `work` with a config and times its steps, from one return of `step()` to the next.

    The last step of each loop is profiled, and passed to `watch` while the swap files are still there.
    """
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
        _time_steps(work, engine, ids, end, save, watch)
    finally:
        engine.destroy(remove=True)


@contextmanager
def values_repeated() -> Iterator[None]:
    """Draws a million normal values of a tensor, and repeats them.

    A step takes as long as with drawn values, but the model is built much faster: torch draws with one thread, which
    takes minutes for 13B parameters.
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


def _time_steps(
    work: Work, engine: offload.Engine, ids: torch.Tensor, end: float, save: Save, watch: Callable[[Profile], None]
) -> None:
    """Times the steps of each loop. The figures of the first contain those of the others, as `other_loops` by name."""
    first, *others = work.loops
    # Every loop may take an equal part of the time that is left.
    until = time.monotonic() + (end - time.monotonic()) / len(work.loops)
    timed = _time_loop(work, engine, ids, first, until, save, watch)
    for number, loop in enumerate(others, 1):
        until = time.monotonic() + (end - time.monotonic()) / (len(work.loops) - number)
        mine = timed.setdefault("other_loops", {})

        def save_beside(figures: dict[str, Any], mine: dict[str, Any] = mine, loop: str = loop) -> None:
            mine[loop] = figures
            save(timed)

        _time_loop(work, engine, ids, loop, until, save_beside, watch)


def _time_loop(
    work: Work,
    engine: offload.Engine,
    ids: torch.Tensor,
    loop: str,
    end: float,
    save: Save,
    watch: Callable[[Profile], None],
) -> dict[str, Any]:
    """Times the steps of one loop, and returns the figures that it has saved last."""

    def act() -> float:
        return step(engine, ids, work.accumulation, loop)

    losses = [act() for _ in range(_WARM_UP)]
    before, measured, figures = engine.io_bytes(), list[Mapping[str, float]](), dict[str, Any]()
    for seconds, loss in timed(work, end, act):
        losses.append(loss)
        measured.append(engine.measured)
        # Waits for reads of weights, for updates, and for host memory that an update holds.
        names = ("reads", "updates", "memory")
        waits = [[step.get(f"wait_for_{name}_seconds", 0.0) for name in names] for step in measured]
        after, moved = engine.io_bytes(), len(seconds) * engine.parameter_count
        figures = sizes(work, engine.parameter_count) | times(work, seconds, engine.parameter_count)
        figures |= {
            "loop": loop,
            "schedule": engine.schedule if loop == TRAIN_BATCH else MICRO_BATCH_MAJOR,
            "exposed_io_seconds": statistics.median(sum(wait) for wait in waits),
            "read_wait_seconds": statistics.median(wait[0] for wait in waits),
            "update_wait_seconds": statistics.median(sum(wait[1:]) for wait in waits),
            "read_bytes_per_parameter": (after.read - before.read) / moved,
            "written_bytes_per_parameter": (after.written - before.written) / moved,
            **{
                f"{way}_bytes_per_parameter": sum(step[f"{way}_bytes"] for step in measured) / moved
                for way in ("uploaded", "downloaded")
            },
            "host_memory": engine.host_memory,
            "device_memory": engine.device_memory,
            "notices": list(engine.notices),
            "no_device_kernels": cuda.why_not(work.device) if work.device.type == "cuda" else None,
            "losses": losses,
        }
        save(figures)
    seen = profiled(work.device, act)
    known = seen.kernels is not None
    figures |= {"profiled": exposure(seen.end - seen.start, seen.kernels or (), seen.copies) if known else None}
    save(figures)
    watch(seen)
    return figures


def timed(work: Work, end: float, act: Callable[[], float]) -> Iterator[tuple[list[float], float]]:
    """Calls `act` up to `work.steps` times, fewer if `end` is near. Yields the seconds of all calls, and the result."""
    seconds: list[float] = []
    # The time of three steps must be left: the next one, one for the profiler, and the last update before `destroy`.
    while len(seconds) < work.steps and (not seconds or time.monotonic() + 3 * statistics.median(seconds) < end):
        began = time.perf_counter()
        result = act()
        seconds.append(time.perf_counter() - began)
        yield seconds, result


def step(engine: Any, ids: torch.Tensor, accumulation: int, loop: str = MICRO_BATCHES) -> float:
    """Makes one step of `accumulation` micro-batches of the same tokens in one of `LOOPS`; returns a loss.

    `train_batch` returns the mean of the micro-batches, the other loop the loss of the last one. The call waits for the
    device, as a loop that logs does.
    """
    if loop == TRAIN_BATCH:
        return float(engine.train_batch(itertools.repeat({"input_ids": ids, "labels": ids}, accumulation)))
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
        "micro_batches": work.accumulation,
        "recompute": work.recompute,
        "limit": work.limit,
        "peak_host_bytes": resident("VmHWM"),
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


# -- planned -------------------------------------------------------------------------------------------
#
# A model too large for the GPU, with as many layers as fit; the planner places its states on host and disk.


_DISK_SHARE = 0.95
"""Fraction of the free disk that the run may take."""
_PLACEMENTS = (("cpu", "cpu"), ("cpu", "nvme"), ("nvme", "nvme"))
"""Devices of weights and of states. Partitions on nvme are promoted into RAM as far as there is room."""


_GPU_SHARE = 0.9
"""Fraction of the GPU's memory that states and activations may take."""
_OF_A_PARAMETER = 14
"""Bytes of a parameter in none/none: weight and gradient in bf16, low bits of the master, and two moments in fp32."""
_STEPS = (
    StepSize(8, 4096),
    *(StepSize(8, tokens, recompute=True) for tokens in (4096, 2048, 1024, 512)),
    *(StepSize(sequences, 512, recompute=True) for sequences in (4, 2, 1)),
)
"""Steps to try, the largest first."""


class Fitted(NamedTuple):
    """The number of layers of a model that fit on a machine."""

    layers: int
    """0 if not even one fits."""
    settings: dict[str, Any]
    words: str


def fit(work: Work, room: Room) -> Fitted:
    """Returns the largest number of layers that fit and their config: all in RAM, or else in RAM and on disk."""
    with offload.init():
        model: Any = work.build()
    whole = int(model.config.num_hidden_layers)
    least, most = 0, whole
    fitting: Memory | None = None
    while least < most:  # a bisection for the most layers that fit
        middle = (least + most + 1) // 2
        memory = _settled(work._replace(layers=middle), room)
        if memory is None:
            most = middle - 1
        else:
            least, fitting = middle, memory
    has = f"of RAM {format_size(room.host)} and of disk {format_size(room.disk or 0)} are free"
    if fitting is None:
        return Fitted(0, {}, f"not one layer of {work.model} fits: {has}")
    takes = (
        f"take {format_size(fitting.host)} of RAM and {format_size(fitting.stored + fitting.spilled)} of disk; {has}"
    )
    what = "all" if least == whole else f"{least} of"
    zero = fitting.config.zero_optimization
    content = _config_of(work, (zero.offload_param.device, zero.offload_optimizer.device), room)
    content["offload"]["device"] = work.device.type
    return Fitted(least, content, f"{what} {whole} layers of {work.model} {takes}")


def largest_step(model: str, memory: int) -> StepSize:
    """Returns the largest size of a step with which weights, states and activations of a model fit on a GPU.

    If none fits, returns the smallest. The bytes of none/none decide, so that all placements have the same step.
    """
    for size in _STEPS:
        try:
            shape = from_name(model, size.seq_len, torch.bfloat16)
        except ConfigError:  # more tokens than the model has positions
            continue
        beside = need(shape, Load(size.batch_size, recompute=size.recompute)).device
        if _OF_A_PARAMETER * shape.parameters + beside <= _GPU_SHARE * memory:
            return size
    return _STEPS[-1]


def room_of(work: Work) -> Room:
    """Returns the free memory and disk of this machine that a run may take."""
    device = open_device(work.device)
    disk = int(_DISK_SHARE * shutil.disk_usage(work.folder).free)
    own = not device.host_addressable and not device.unified
    host = usable_host(free_host_memory(), own_device_memory=own)
    return Room(host, device.free_bytes(), disk, unified=device.unified)


def _settled(work: Work, room: Room) -> Memory | None:
    with offload.init():
        model = work.build()
    layouts = layouts_of(model, find_units(model))
    for tiers in _PLACEMENTS:
        try:
            memory = settle(layouts, _config_of(work, tiers, room), room, work.accumulation)
        except BudgetError:
            continue
        if memory.stored + memory.spilled <= (room.disk or 0):
            return memory
    return None


def _config_of(work: Work, tiers: tuple[str, str], room: Room) -> dict[str, Any]:
    return work.with_forms(
        settings(
            *tiers,
            host_memory=room.host if "nvme" in tiers else None,
            durability="none",
            batch=work.batch_size,
            accumulation=work.accumulation,
            paths=[str(work.folder)],
        )
    )
