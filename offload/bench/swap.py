"""A benchmark of training with a stand-in for a model: how much of paging is hidden behind compute on given drives.

The stand-in has N units of S bytes of weights. Each unit "computes" for T ms in a forward and twice as long in a
backward. Everything else is real: the engine reads, uploads, takes gradients, updates with its AdamW kernel, writes and
commits, within a host and a device budget. Turns alternate between the swapped model, the same model in memory, and the
drive alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn

import offload
from offload.aio import BACKENDS
from offload.aio.backend import refusals
from offload.bench.measure import DriveSpeeds, drive_rates, kernel_bytes, median_rates, row_json
from offload.errors import ConfigError, OffloadError
from offload.notices import Remark, folder_to_make
from offload.sizes import MIB, PAGE, align_up, count_of, format_size

# -- swap plan -----------------------------------------------------------------------------------------
#
# The plan of `offload bench swap`, validated before any file is created.


TIERS = ("none", "cpu", "nvme")
DURABILITIES = ("auto", "step", "none")
BACKWARD = 2
"""Compute time of a backward as a multiple of the forward's."""

_WEIGHT, _STATES = 2, 10
"""Bytes of a parameter's bf16 weight; and of its other states: 16 low bits of the master and two fp32 moments."""
# For the estimate of memory: host memory of the engine's tiles, and units for which the device arena has room.
_TILES = 96 * MIB
_DEVICE_UNITS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapPlan:
    """The settings of a measurement."""

    folders: tuple[str, ...]
    units: int = 16
    unit_bytes: int = 64 * MIB
    compute_ms: tuple[float, ...] = (50.0,)
    """Simulated compute times of one unit's forward, in milliseconds; the benchmark runs with each."""
    steps: int = 4
    """Timed steps of a turn; the untimed steps at its start are extra."""
    rounds: int = 3
    """Number of turns, for the drive alone, the swapped model and the model in memory alike."""
    accumulation: int = 1
    """Micro-batches of a step."""
    weights: str = "nvme"
    states: str = "nvme"
    """Tier of the optimizer states, one of `TIERS`; `weights` is the tier of the weights."""
    durability: str = "auto"
    host_memory: int | None = None
    device_memory: int | None = None
    """Device budget in bytes; `host_memory` is the host budget. None for the engine's defaults."""
    overlap: bool = True
    """True if updates run during the next forward."""
    busy: bool = False
    """True if compute keeps a core busy instead of sleeping."""
    in_memory: bool | None = None
    """True to measure the compute time with the same model in memory, False to calculate it; None, before a plan is
    made, to measure it if memory suffices."""
    backend: str = "auto"
    block_bytes: int | None = None
    depth: int | None = None
    """I/O blocks in flight. None stands for the backend's default, here and for `block_bytes`."""
    probe_bytes: int = 256 * MIB

    @property
    def unit_numel(self) -> int:
        return self.unit_bytes // _WEIGHT

    @property
    def parameters(self) -> int:
        return self.units * self.unit_numel

    @property
    def update_read_bytes(self) -> int:
        """Returns the bytes that the updates of a step read at most. A step's other reads are weights for compute."""
        return self.parameters * (_WEIGHT * (self.weights == "nvme") + _STATES * (self.states == "nvme"))

    def forward_seconds(self, compute_ms: float) -> float:
        """Returns the compute time of the first micro-batch's forward."""
        return self.units * compute_ms / 1e3


def make_plan(folders: Sequence[str], **settings: Any) -> SwapPlan:
    """Returns the plan of the settings, which are fields of `SwapPlan`; creates no file, allocates no memory.

    The bytes of a unit are rounded down to pages, the bytes of the probe's file up.
    """
    wanted = SwapPlan(folders=tuple(folders), **settings)
    plan = replace(
        wanted,
        unit_bytes=wanted.unit_bytes // PAGE * PAGE,
        compute_ms=tuple(dict.fromkeys(wanted.compute_ms or (50.0,))),
        probe_bytes=align_up(wanted.probe_bytes),
    )
    _check_numbers(plan, wanted.unit_bytes, wanted.probe_bytes)
    _check_choices(plan)
    _check_room(plan)
    # Done last, since the estimate of memory needs valid settings.
    return replace(plan, in_memory=_fits_in_memory(plan))


def _check_numbers(plan: SwapPlan, unit_bytes: int, probe_bytes: int) -> None:
    for name in ("units", "steps", "rounds", "accumulation"):
        if getattr(plan, name) < 1:
            raise ConfigError(f"expected --{name} >= 1, got {getattr(plan, name)}")
    for ms in plan.compute_ms:
        if not 0 <= ms <= 1e6:
            raise ConfigError(f"expected --compute-ms from 0 to 1000000, got {ms:g}")
    for name, nbytes in (("unit-size", unit_bytes), ("probe-size", probe_bytes)):
        if nbytes < PAGE:
            raise ConfigError(f"expected --{name} of at least {PAGE} bytes, got {nbytes}")


def _check_choices(plan: SwapPlan) -> None:
    known = {"weights": TIERS, "states": TIERS, "durability": DURABILITIES, "backend": ("auto", *BACKENDS)}
    for name, choices in known.items():
        if getattr(plan, name) not in choices:
            raise ConfigError(f"there is no {name} {getattr(plan, name)!r}: expected {', '.join(choices)}")
    refused = refusals().get(plan.backend)
    if refused:
        raise ConfigError(f"{refused}; take another backend")
    if "nvme" not in (plan.weights, plan.states) and plan.durability != "step":
        raise ConfigError(
            "nothing would be swapped: give --weights nvme, --states nvme, or --durability step, which writes a "
            "copy of all states each step"
        )


def _check_room(plan: SwapPlan) -> None:
    if not plan.folders:
        raise ConfigError("give at least one folder, on the drive to measure")
    two_slots, in_place = 2 * (_WEIGHT + _STATES) * plan.parameters, plan.update_read_bytes
    # A durable run keeps two slots of every state; otherwise states are overwritten in place.
    need = two_slots if plan.durability == "step" else in_place
    share = -(-(need + plan.probe_bytes) // len(plan.folders))
    asked: dict[int, int] = {}
    for folder in plan.folders:
        if not os.path.isdir(folder):
            raise ConfigError(f"there is no folder {folder_to_make(folder)}")
        # Folders of one file system share its free space, so their needs add up.
        device = os.stat(folder).st_dev
        asked[device] = asked.get(device, 0) + share
        free = shutil.disk_usage(folder).free
        if free < asked[device]:
            raise ConfigError(
                f"{folder} has {format_size(free)} free, the files take {format_size(asked[device])}: give fewer "
                f"--units or a smaller --unit-size"
            )


def _fits_in_memory(plan: SwapPlan) -> bool:
    """Returns the plan's choice or, if it is None, True if memory has room for the swapped model and its copy.

    Raises `ConfigError` if the swapped model does not fit, or if the copy is requested and does not fit.
    """
    available = psutil.virtual_memory().available
    # Gradients are bf16, or fp32 if they are accumulated over micro-batches.
    gradients = plan.parameters * (2 if plan.accumulation == 1 else 4)
    in_tier = {
        tier: (_WEIGHT * (plan.weights == tier) + _STATES * (plan.states == tier)) * plan.parameters for tier in TIERS
    }
    host = plan.host_memory or gradients + in_tier["cpu"] + _TILES + 2 * plan.unit_bytes
    budgets = host + (plan.device_memory or in_tier["none"] + _DEVICE_UNITS * plan.unit_bytes)
    working = plan.probe_bytes + 6 * plan.unit_bytes  # the drive's probe, a gradient, weights while they are made
    beside = (_WEIGHT + _STATES) * plan.parameters + gradients + _TILES
    if available < budgets + working:
        raise ConfigError(
            f"{format_size(available)} of memory are free, budgets and gradients take "
            f"{format_size(budgets + working)}: give fewer --units, a smaller --unit-size or smaller budgets"
        )
    if plan.in_memory and available < budgets + working + beside:
        raise ConfigError(
            f"{format_size(available)} of memory are free, the model beside its copy in memory takes "
            f"{format_size(budgets + working + beside)}: leave --in-memory out, and compute is calculated"
        )
    # A margin of 10 %, since other processes allocate too; an explicit request needs no margin.
    return available >= (budgets + working + beside) * 1.1 if plan.in_memory is None else plan.in_memory


# -- swap figures --------------------------------------------------------------------------------------
#
# Figures and conclusions of `offload bench swap`. Pure functions.
#
# A step is compared with three bounds: compute, the time of the same step in memory; the drive, the time to move the
# step's bytes without compute; and the order of a step, which follows from both:
#
#     forward    a unit's update must precede its use, so only the first forward hides the updates' I/O
#     the rest   the compute after the first forward hides reads of weights, and nothing else


_NEAR = 0.05
"""Fraction of a bound within which a step counts as having reached the bound."""


class Turn(NamedTuple):
    """Consecutive steps. Bytes are those of one step."""

    seconds: tuple[float, ...]
    read_bytes: float
    written_bytes: float
    kernel_read_bytes: float | None
    """Bytes fetched from drives for this process according to /proc/self/io; None if unavailable."""
    kernel_written_bytes: float | None
    """Bytes sent to drives for this process according to /proc/self/io; None if unavailable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapRow:
    """A step at one `compute_ms`: medians of all counted steps of all rounds; bytes are means."""

    compute_ms: float
    step_seconds: float
    compute_seconds: float
    """Seconds of the same step in memory or, if that was not measured, of its forwards and backwards."""
    io_seconds: float
    """Seconds in which the drives move the step's bytes without compute."""
    order_seconds: float
    """Lower bound of a step in which updates precede their use; see the module's docstring."""
    exposed_seconds: float
    """Seconds by which the step exceeds compute."""
    hidden_seconds: float
    hidden_percent: float | None
    """Hidden time in percent of `io_seconds`."""
    efficiency: float
    """The longer of compute and I/O, divided by the step: 1 if one hides the other completely."""
    read_bytes: float
    written_bytes: float
    bytes_per_parameter: float
    kernel_read_bytes: float | None
    kernel_written_bytes: float | None
    hiding_compute_ms: float | None
    """Least `compute_ms` at which compute can hide all I/O, given the order of a step; None without overlap."""
    limit: str
    """The bound that determines the step: compute, drive, order, or budgets."""


class Result(NamedTuple):
    """All measurements."""

    file_bytes: int
    host_memory: int
    device_memory: int
    durable: bool
    notices: tuple[str, ...]
    """Lines on what the machine or the drive refused, such as an I/O backend."""
    rates: DriveSpeeds
    rows: tuple[SwapRow, ...]


# -- conclusions --------------------------------------------------------------------------------------


def make_row(
    plan: SwapPlan, compute_ms: float, rates: DriveSpeeds, swapped: Sequence[Turn], in_memory: Sequence[Turn] = ()
) -> SwapRow:
    """Derives a row from measurements.

    Without turns in memory compute is calculated.
    """
    step = _median_step(swapped)
    forward = plan.forward_seconds(compute_ms)
    pure = forward * (1 + BACKWARD) * plan.accumulation  # of all micro-batches, without the optimizer
    # The step in memory contains the optimizer, which the calculated time lacks.
    compute = max(_median_step(in_memory), pure) if in_memory else pure
    read = statistics.mean(turn.read_bytes for turn in swapped)
    written = statistics.mean(turn.written_bytes for turn in swapped)
    io = rates.seconds(read, written)
    # The plan determines the reads of updates; all other reads are weights for compute.
    updates_read = min(read, plan.update_read_bytes)
    updates = rates.seconds(updates_read, written)
    weights = (read - updates_read) / rates.read
    # Updates run during the first forward, or with overlap switched off before it.
    first = max(updates, forward) if plan.overlap else updates + forward
    order = max(first + max(compute - forward, weights), compute)
    exposed = max(step - compute, 0.0)
    hidden = min(max(io - exposed, 0.0), io)
    # Passes over the units after the first forward: the other forwards, and backwards that take `BACKWARD` forwards.
    passes_after = (1 + BACKWARD) * plan.accumulation - 1
    return SwapRow(
        compute_ms=compute_ms,
        step_seconds=step,
        compute_seconds=compute,
        io_seconds=io,
        order_seconds=order,
        exposed_seconds=exposed,
        hidden_seconds=hidden,
        hidden_percent=100 * hidden / io if io else None,
        efficiency=max(compute, io) / step,
        read_bytes=read,
        written_bytes=written,
        bytes_per_parameter=(read + written) / plan.parameters,
        kernel_read_bytes=_mean_of_known([turn.kernel_read_bytes for turn in swapped]),
        kernel_written_bytes=_mean_of_known([turn.kernel_written_bytes for turn in swapped]),
        hiding_compute_ms=1e3 * max(updates, weights / passes_after) / plan.units if plan.overlap else None,
        limit=find_limit(step, compute, io, order),
    )


def find_limit(step: float, compute: float, io: float, order: float) -> str:
    """Returns the bound that determines a step: "compute", "drive", "order" or "budgets"."""
    if step <= compute * (1 + _NEAR):
        return "compute"
    # Well above every bound of drive and compute, only the budgets are left as a cause.
    if step > order * (1 + 4 * _NEAR):
        return "budgets"
    return "drive" if max(io, compute) == io and io >= order * (1 - _NEAR) else "order"


def _median_step(turns: Sequence[Turn]) -> float:
    return statistics.median(seconds for turn in turns for seconds in turn.seconds)


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


# -- output -------------------------------------------------------------------------------------------


def as_json(machine: dict[str, Any], plan: SwapPlan, result: Result) -> dict[str, Any]:
    """Returns the content that `--json` prints."""
    return {
        "machine": machine,
        "paths": list(plan.folders),
        **{name: getattr(plan, name) for name in ("parameters", "units", "unit_bytes", "accumulation")},
        **{name: getattr(plan, name) for name in ("weights", "states", "overlap", "busy", "steps", "rounds")},
        "durability": "step" if result.durable else "none",
        "host_memory": result.host_memory,
        "device_memory": result.device_memory,
        "file_bytes": result.file_bytes,
        "notices": list(result.notices),
        "compute_measured": plan.in_memory,
        "drive": result.rates.as_json(),
        "rows": [row_json(row) for row in result.rows],
    }


def heading(plan: SwapPlan, result: Result) -> list[str]:
    """Returns the lines above the table."""
    rates, row = result.rates, result.rows[0]
    counted = ""
    if row.kernel_read_bytes is not None and row.kernel_written_bytes is not None:
        counted = f" (the kernel counts {format_size(row.kernel_read_bytes)}, {format_size(row.kernel_written_bytes)})"
    return [
        *result.notices,
        f"{count_of(plan.units, 'unit')} of {format_size(plan.unit_bytes)}, {plan.parameters / 1e6:.0f} M parameters; "
        f"weights on {plan.weights}, states on {plan.states}",
        f"{format_size(result.file_bytes)} in files, durability {'step' if result.durable else 'none'}; host budget "
        f"{format_size(result.host_memory)}, device budget {format_size(result.device_memory)}",
        f"the drive alone reads {rates.read / 1e9:.1f}, writes {rates.write / 1e9:.1f}, both at once "
        f"{rates.mixed / 1e9:.1f} GB/s; a step reads {format_size(row.read_bytes)}, writes "
        f"{format_size(row.written_bytes)}{counted}",
        f"compute is {'that of the same model in memory' if plan.in_memory else 'calculated'}; seconds of a step:",
    ]


def in_words(plan: SwapPlan, row: SwapRow) -> str:
    """Returns a sentence about the limit of a step, and about a change that would lift it."""
    start = f"at {row.compute_ms:g} ms a unit"
    if row.limit == "compute":
        part = "all of" if row.exposed_seconds < 0.005 else f"all but {row.exposed_seconds:.2f} s of"
        return f"{start} compute limits: {part} the {row.io_seconds:.2f} s of I/O are hidden"
    # If the row's compute time already suffices, the step was slower for another reason, and the hint would be wrong.
    hides = row.hiding_compute_ms is not None and row.hiding_compute_ms > row.compute_ms
    enough = f"; from about {row.hiding_compute_ms:.0f} ms on all could be hidden" if hides else ""
    compute, io, order = (f"{seconds:.2f} s" for seconds in (row.compute_seconds, row.io_seconds, row.order_seconds))
    if row.limit == "drive":
        return f"{start} the drive limits: {io} of I/O beside {compute} of compute{enough}"
    if row.limit == "order":
        forward = plan.forward_seconds(row.compute_ms)
        return (
            f"{start} the drive limits: updates must come before the weights are used, so only the first forward, "
            f"{forward:.2f} s, hides their I/O, and a step takes at least {order}{enough}"
        )
    return (
        f"{start} budgets limit: compute and drive would allow {order}, the step takes {row.step_seconds:.2f} s; try a "
        f"larger --host-memory (if this does not help, another process uses the cores)"
    )


# -- swap ----------------------------------------------------------------------------------------------


UNCOUNTED = 2
"""Untimed steps at the start of each turn. The first one records the access order, and no update overlaps it."""

_NOISE = 1 << 20


class Load:
    """A stand-in for compute, which sleeps like a CPU that waits for a GPU, or keeps one core busy."""

    def __init__(self, numel: int, busy: bool) -> None:
        self.seconds = 0.0
        """Seconds of one unit's forward; set between turns."""
        # The seed is fixed, so that every turn and both models compute on the same values.
        noise = torch.randn(
            min(numel, _NOISE), generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
        ).mul_(1e-3)
        # The pattern of 2 MiB is repeated: drives that compress look for repetition within shorter ranges.
        self.gradient = noise.to(torch.bfloat16).repeat(-(-numel // _NOISE))[:numel].contiguous()
        """(numel,) bf16: the gradient, the same for every unit and step."""
        self._busy = busy
        self._values, self._result = (
            torch.zeros(1 << 14, dtype=torch.float32, device="cpu"),
            torch.empty(1 << 14, dtype=torch.float32, device="cpu"),
        )  # so few elements that torch uses one thread

    def take(self, seconds: float) -> None:
        """Returns after `seconds`, spent asleep or busy."""
        if not self._busy:
            time.sleep(seconds)
            return
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            torch.exp(self._values, out=self._result)


class _Compute(torch.autograd.Function):
    """The stand-in for a unit's forward and backward."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, load: Load) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.load = load
        load.take(load.seconds)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        weight = ctx.saved_tensors  # kept to the end, as in a real backward, which reads the weight
        load: Load = ctx.load
        load.take(BACKWARD * load.seconds)
        del weight
        return gradients[0], load.gradient.view(-1), None  # a new view, which autograd takes over without a copy


class _Unit(nn.Module):
    def __init__(self, load: Load) -> None:
        super().__init__()
        self._load = load
        self.weight = nn.Parameter(torch.empty(load.gradient.numel(), dtype=torch.bfloat16))

    def reset_parameters(self) -> None:
        """Fills the weights in place. `offload.init` calls this when it materializes the unit."""
        with torch.no_grad():
            torch.mul(self._load.gradient, 20, out=self.weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _Compute.apply(inputs, self.weight, self._load)  # type: ignore[no-untyped-call]
        return output


class _Model(nn.Module):
    def __init__(self, units: int, load: Load) -> None:
        super().__init__()
        self.units = nn.ModuleList(_Unit(load) for _ in range(units))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for unit in self.units:
            inputs = unit(inputs)
        return inputs


# -- measuring ----------------------------------------------------------------------------------------


def measure(plan: SwapPlan, tell: Callable[[str], None] = lambda _: None) -> Result:
    """Runs the workload, removes its files, and returns the figures with a row for each compute time."""
    load = Load(plan.unit_numel, plan.busy)
    swapped: dict[float, list[Turn]] = {ms: [] for ms in plan.compute_ms}
    in_memory: dict[float, list[Turn]] = {ms: [] for ms in plan.compute_ms}
    rates: dict[float, list[DriveSpeeds]] = {ms: [] for ms in plan.compute_ms}
    with contextlib.ExitStack() as stack:
        tell(f"{count_of(plan.units, 'unit')} of {format_size(plan.unit_bytes)} into their tiers")
        engine = stack.enter_context(_engine(plan, load))
        beside = None
        if plan.in_memory:
            here = replace(plan, folders=(), weights="none", states="none", durability="none", overlap=True)
            beside = stack.enter_context(_engine(replace(here, host_memory=None, device_memory=None), load))
        drive = stack.enter_context(
            drive_rates(
                [Path(folder) / f"{_run()}.probe" for folder in plan.folders],
                plan.probe_bytes,
                plan.backend,
                plan.block_bytes,
                plan.depth,
            )
        )
        # Drive, swapped model and model in memory take turns, since a shared machine's speed drifts within minutes.
        for turn in range(plan.rounds):
            for ms in plan.compute_ms:
                load.seconds = ms / 1e3
                tell(f"round {turn + 1} of {plan.rounds}: the drive by itself")
                rates[ms].append(drive())
                tell(f"round {turn + 1} of {plan.rounds}: {ms:g} ms a unit, swapped")
                swapped[ms].append(_turn(engine, plan))
                if beside is not None:
                    tell(f"round {turn + 1} of {plan.rounds}: {ms:g} ms a unit, in memory")
                    in_memory[ms].append(_turn(beside, plan))
        return Result(
            sum(
                path.stat().st_size
                for folder in plan.folders
                for path in (Path(folder) / _run()).rglob("*")
                if path.is_file()
            ),
            engine.host_memory,
            engine.device_memory,
            engine.resumable is not None,
            # Notices on what the machine or the drive refused, without `Remark`s on this module's own config.
            tuple(line for line in engine.notices if not isinstance(line, Remark)),
            median_rates([speeds for turns in rates.values() for speeds in turns]),
            tuple(make_row(plan, ms, median_rates(rates[ms]), swapped[ms], in_memory[ms]) for ms in plan.compute_ms),
        )


def _run() -> str:
    return f"offload-bench-swap.{os.getpid()}"


@contextlib.contextmanager
def _engine(plan: SwapPlan, load: Load) -> Iterator[offload.Engine]:
    config = {
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,  # the default, set explicitly to avoid a notice
        "gradient_accumulation_steps": plan.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": plan.weights},
            "offload_optimizer": {"device": plan.states},
        },
        "aio": {"block_size": plan.block_bytes, "queue_depth": plan.depth},
        "offload": {
            "nvme_path": list(plan.folders),
            "run": _run(),
            "device": "cpu",
            "host_memory": plan.host_memory,
            "device_memory": plan.device_memory,
            "durability": plan.durability,
            "io_backend": plan.backend,
            "debug": {"overlap": plan.overlap},
        },
    }
    try:
        # `init` creates weights unit by unit, so the model may exceed the memory of the machine.
        with offload.init(config):
            model = _Model(plan.units, load)
        engine = offload.initialize(model=model, config=config)[0]
        try:
            yield engine
        except BaseException:
            with contextlib.suppress(OffloadError, OSError):  # the first error is the one to report
                engine.destroy(remove=True)
            raise
        # The body has succeeded, so an error of the shutdown is reported.
        engine.destroy(remove=True)
    finally:
        for folder in plan.folders:
            shutil.rmtree(Path(folder) / _run(), ignore_errors=True)


def _turn(engine: offload.Engine, plan: SwapPlan) -> Turn:
    # `before` is the count in the last untimed step, so the difference covers exactly `plan.steps` steps.
    for _ in range(UNCOUNTED):
        before, counted_before = _step(engine, plan)
    seconds: list[float] = []
    for _ in range(plan.steps):
        start = time.perf_counter()
        after, counted_after = _step(engine, plan)
        seconds.append(time.perf_counter() - start)
    read, written = (now - then for then, now in zip(before, after, strict=True))
    counted: list[float | None] = [None, None]
    if counted_before is not None and counted_after is not None:
        counted = [(now - then) / plan.steps for then, now in zip(counted_before, counted_after, strict=True)]
    for parameter in engine.module.parameters():
        with offload.gathered(parameter):
            pass  # waits for the unit's update, so that the next turn runs alone
    return Turn(tuple(seconds), read / plan.steps, written / plan.steps, *counted)


def _step(engine: offload.Engine, plan: SwapPlan) -> tuple[tuple[int, int], tuple[int, int] | None]:
    """Performs a step and returns the bytes moved until the end of its last backward: by the engine, and by Linux.

    By then every unit was used. So all reads and writes of the previous step's updates have been requested, but none of
    this step's updates. Therefore the difference between two counts is the bytes of entire steps, regardless of the
    update worker's progress when `step()` returns.
    """
    for micro in range(plan.accumulation):
        engine.backward(engine(torch.zeros(1, dtype=torch.float32, device="cpu")).sum())
        if micro == plan.accumulation - 1:
            moved = engine.io_bytes(), kernel_bytes()
        engine.step()
    return moved
