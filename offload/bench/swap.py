"""Training without a model: how much of the paging a drive and two memory budgets can hide behind compute.

N units of S bytes of weights, each of which "computes" for T ms in a forward and twice as long in a backward. All else
is real: the engine reads, uploads, takes gradients, updates by its AdamW kernel, writes and commits.

The bounds, measured in the same run, in turns: the same model in memory (compute), and the bytes of a step moved by
themselves (the drive). A third follows from both, since a step has an order:

    forward    a unit's update must come before its use: the updates' I/O hides behind the first forward alone
    the rest   what is computed after that hides the reads of weights, and nothing else
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn

import offload
from offload.aio import BACKENDS, IoQueue, StripedFile, aligned_empty
from offload.aio.backend import refusals
from offload.aio.measure import move, remove
from offload.bench.python_ways import fill_with_noise
from offload.errors import ConfigError, OffloadError
from offload.sizes import MIB, PAGE, align_up, format_size

TIERS = ("none", "cpu", "nvme")
DURABILITIES = ("auto", "step", "none")

UNCOUNTED = 2
"""Steps at the start of each turn: the first has no updates beside it, and shows the engine the order of uses."""

_WEIGHT, _STATES = 2, 10
"""Bytes of a parameter: bf16, and beside it 16 more bits of the master and two moments."""
_BACKWARD = 2
"""Times of a forward."""
_REQUEST_BYTES = 16 * MIB
_TILES = 96 * MIB
_DEVICE_UNITS = 3
_NOISE = 1 << 20
_NEAR = 0.05
"""Of a bound: what is within it has reached it."""


class Plan(NamedTuple):
    """What to measure."""

    folders: tuple[str, ...]
    units: int
    unit_bytes: int
    compute_ms: tuple[float, ...]
    """Of one unit's forward; each is measured."""
    steps: int
    rounds: int
    accumulation: int
    weights: str
    states: str
    durability: str
    host_memory: int | None
    device_memory: int | None
    overlap: bool
    busy: bool
    in_memory: bool
    """Whether compute is measured in memory, or added up."""
    backend: str
    block_bytes: int | None
    depth: int | None
    probe_bytes: int

    @property
    def unit_numel(self) -> int:
        return self.unit_bytes // _WEIGHT

    @property
    def parameters(self) -> int:
        return self.units * self.unit_numel

    @property
    def update_read_bytes(self) -> int:
        """The most that the updates of a step read; what is read beside are weights for compute."""
        return self.parameters * (_WEIGHT * (self.weights == "nvme") + _STATES * (self.states == "nvme"))

    def forward_seconds(self, compute_ms: float) -> float:
        """Of the first micro-batch."""
        return self.units * compute_ms / 1e3

    def pure_seconds(self, compute_ms: float) -> float:
        """What a step computes, forwards and backwards of all micro-batches, without the optimizer."""
        return self.forward_seconds(compute_ms) * (1 + _BACKWARD) * self.accumulation


def make_plan(
    folders: Sequence[str],
    *,
    units: int = 16,
    unit_bytes: int = 64 * MIB,
    compute_ms: Sequence[float] = (),
    steps: int = 4,
    rounds: int = 3,
    accumulation: int = 1,
    weights: str = "nvme",
    states: str = "nvme",
    durability: str = "auto",
    host_memory: int | None = None,
    device_memory: int | None = None,
    overlap: bool = True,
    busy: bool = False,
    in_memory: bool | None = None,
    backend: str = "auto",
    block_bytes: int | None = None,
    depth: int | None = None,
    probe_bytes: int = 256 * MIB,
) -> Plan:
    """Check everything before a file is made or memory taken; `ConfigError` where something is wrong.

    `in_memory` None measures compute in memory where there is room for it.
    """
    plan = Plan(
        tuple(folders),
        units,
        unit_bytes // PAGE * PAGE,
        tuple(dict.fromkeys(compute_ms or (50.0,))),
        steps,
        rounds,
        accumulation,
        weights,
        states,
        durability,
        host_memory,
        device_memory,
        overlap,
        busy,
        True,
        backend,
        block_bytes,
        depth,
        align_up(probe_bytes),
    )
    _check_numbers(plan, unit_bytes, probe_bytes)
    _check_words(plan)
    _check_room(plan)
    return plan._replace(in_memory=_fits_in_memory(plan, in_memory))


def _check_numbers(plan: Plan, unit_bytes: int, probe_bytes: int) -> None:
    for name in ("units", "steps", "rounds", "accumulation"):
        if getattr(plan, name) < 1:
            raise ConfigError(f"expected {name} >= 1, got {getattr(plan, name)}")
    for each in plan.compute_ms:
        if not 0 <= each <= 1e6:
            raise ConfigError(f"expected compute-ms from 0 to 1000000, got {each:g}")
    for name, nbytes in (("unit-size", unit_bytes), ("probe-size", probe_bytes)):
        if nbytes < PAGE:
            raise ConfigError(f"expected {name} of at least {PAGE} bytes, got {nbytes}")


def _check_words(plan: Plan) -> None:
    known = {"weights": TIERS, "states": TIERS, "durability": DURABILITIES, "backend": ("auto", *BACKENDS)}
    for name, words in known.items():
        if getattr(plan, name) not in words:
            raise ConfigError(f"there is no {name} {getattr(plan, name)!r}: expected {', '.join(words)}")
    refused = refusals().get(plan.backend)
    if refused:
        raise ConfigError(f"{refused}; take another backend")
    if "nvme" not in (plan.weights, plan.states) and plan.durability != "step":
        raise ConfigError(
            "nothing would be swapped: give --weights nvme, --states nvme, or --durability step, which writes a "
            "copy of all states each step"
        )


def _check_room(plan: Plan) -> None:
    if not plan.folders:
        raise ConfigError("give at least one folder, on the drive to measure")
    two_slots, in_place = 2 * (_WEIGHT + _STATES) * plan.parameters, plan.update_read_bytes
    need = two_slots if plan.durability == "step" else in_place
    share = -(-(need + plan.probe_bytes) // len(plan.folders))
    asked: dict[int, int] = {}
    for folder in plan.folders:
        if not os.path.isdir(folder):
            raise ConfigError(f"there is no folder {folder}")
        device = os.stat(folder).st_dev
        asked[device] = asked.get(device, 0) + share
        free = shutil.disk_usage(folder).free
        if free < asked[device]:
            raise ConfigError(
                f"{folder} has {format_size(free)} free, the files take {format_size(asked[device])}: give fewer "
                f"--units or a smaller --unit-size"
            )


def _fits_in_memory(plan: Plan, wanted: bool | None) -> bool:
    """Whether the same model has room in memory beside the one that is swapped; `ConfigError` where neither has."""
    available = psutil.virtual_memory().available
    gradients = plan.parameters * (2 if plan.accumulation == 1 else 4)
    at_home = {
        tier: (_WEIGHT * (plan.weights == tier) + _STATES * (plan.states == tier)) * plan.parameters for tier in TIERS
    }
    host = plan.host_memory or gradients + at_home["cpu"] + _TILES + 2 * plan.unit_bytes
    budgets = host + (plan.device_memory or at_home["none"] + _DEVICE_UNITS * plan.unit_bytes)
    working = plan.probe_bytes + 6 * plan.unit_bytes  # the drive's probe, a gradient, weights while they are made
    beside = (_WEIGHT + _STATES) * plan.parameters + gradients + _TILES
    if available < budgets + working:
        raise ConfigError(
            f"{format_size(available)} of memory are free, budgets and gradients take "
            f"{format_size(budgets + working)}: give fewer --units, a smaller --unit-size or smaller budgets"
        )
    if wanted and available < budgets + working + beside:
        raise ConfigError(
            f"{format_size(available)} of memory are free, the model beside its copy in memory takes "
            f"{format_size(budgets + working + beside)}: leave --in-memory out, and compute is added up"
        )
    return available >= (budgets + working + beside) * 1.1 if wanted is None else wanted


# -- the model ----------------------------------------------------------------------------------------


class Load:
    """Takes the time of compute: asleep, as a CPU beside a GPU, or with one core busy."""

    def __init__(self, numel: int, busy: bool) -> None:
        self.seconds = 0.0
        """Of a unit's forward."""
        noise = torch.randn(min(numel, _NOISE), generator=torch.Generator().manual_seed(0)).mul_(1e-3)
        # Drives may compress what repeats itself within less than these 2 MiB.
        self.gradient = noise.to(torch.bfloat16).repeat(-(-numel // _NOISE))[:numel].contiguous()
        """(numel,) bf16: of every unit and step."""
        self._busy = busy
        self._values, self._result = torch.zeros(1 << 14), torch.empty(1 << 14)  # so few that torch takes one thread

    def take(self, seconds: float) -> None:
        if not self._busy:
            time.sleep(seconds)
            return
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            torch.exp(self._values, out=self._result)


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, load: Load) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.load = load
        load.take(load.seconds)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        weight = ctx.saved_tensors  # held to the end, as by what reads it
        load: Load = ctx.load
        load.take(_BACKWARD * load.seconds)
        del weight
        return gradients[0], load.gradient.view(-1), None  # a new view, which autograd takes over without a copy


class _Unit(nn.Module):
    def __init__(self, load: Load) -> None:
        super().__init__()
        self._load = load
        self.weight = nn.Parameter(torch.empty(load.gradient.numel(), dtype=torch.bfloat16))

    def reset_parameters(self) -> None:
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


class Rates(NamedTuple):
    """Bytes a second of the drives by themselves: reading, writing, and half of each at once."""

    read: float
    write: float
    mixed: float

    def seconds(self, read_bytes: float, written_bytes: float) -> float:
        """The least that so many bytes take: one after the other, or both at once, whichever is faster."""
        both = min(read_bytes, written_bytes)
        at_once = 2 * both / self.mixed + (read_bytes - both) / self.read + (written_bytes - both) / self.write
        return min(at_once, read_bytes / self.read + written_bytes / self.write)


class Turn(NamedTuple):
    """Some steps in a row. Bytes are those of one step."""

    seconds: tuple[float, ...]
    read_bytes: float
    written_bytes: float
    kernel_read_bytes: float | None
    """By /proc/self/io: what this process has had fetched from and sent to drives; None where that is not told."""
    kernel_written_bytes: float | None


class Row(NamedTuple):
    """A step at one `compute_ms`: medians of all counted steps of all rounds, bytes are means."""

    compute_ms: float
    step_seconds: float
    compute_seconds: float
    """Of the same step in memory; where that was not measured, of its forwards and backwards."""
    io_seconds: float
    """Of the step's bytes by themselves."""
    order_seconds: float
    """The least that a step can take, since updates come before their use; see the top of this file."""
    exposed_seconds: float
    """That the step takes longer than compute."""
    hidden_seconds: float
    hidden_percent: float | None
    """Of `io_seconds`."""
    efficiency: float
    """The larger of compute and I/O alone over the step: 1 where one hides all of the other."""
    read_bytes: float
    written_bytes: float
    bytes_per_parameter: float
    kernel_read_bytes: float | None
    kernel_written_bytes: float | None
    hiding_compute_ms: float | None
    """From which on the order of a step allows all I/O to be hidden; None without overlap, where it never does."""
    limit: str
    """compute, drive, order, or budgets: what made the step as long as it was."""


class Result(NamedTuple):
    """What was measured."""

    file_bytes: int
    host_memory: int
    device_memory: int
    durable: bool
    rates: Rates
    rows: tuple[Row, ...]


def measure(plan: Plan, tell: Callable[[str], None] = lambda _: None) -> Result:
    """Run the workload. The files are removed at the end. `tell` is told what is going on."""
    load = Load(plan.unit_numel, plan.busy)
    swapped: dict[float, list[Turn]] = {each: [] for each in plan.compute_ms}
    in_memory: dict[float, list[Turn]] = {each: [] for each in plan.compute_ms}
    rates: dict[float, list[Rates]] = {each: [] for each in plan.compute_ms}
    with contextlib.ExitStack() as stack:
        tell(f"{plan.units} units of {format_size(plan.unit_bytes)} into their homes")
        engine = stack.enter_context(_engine(plan, load))
        beside = stack.enter_context(_engine(_in_memory(plan), load)) if plan.in_memory else None
        drive = stack.enter_context(_drive(plan))
        for turn in range(plan.rounds):
            for each in plan.compute_ms:
                load.seconds = each / 1e3
                tell(f"round {turn + 1} of {plan.rounds}: the drive by itself")
                rates[each].append(drive())
                tell(f"round {turn + 1} of {plan.rounds}: {each:g} ms a unit, swapped")
                swapped[each].append(_turn(engine, plan))
                if beside is not None:
                    tell(f"round {turn + 1} of {plan.rounds}: {each:g} ms a unit, in memory")
                    in_memory[each].append(_turn(beside, plan))
        return Result(
            _bytes_in_files(plan),
            engine.host_memory,
            engine.device_memory,
            engine.resumable is not None,
            _median_rates([each for turns in rates.values() for each in turns]),
            tuple(
                make_row(plan, each, _median_rates(rates[each]), swapped[each], in_memory[each])
                for each in plan.compute_ms
            ),
        )


def _in_memory(plan: Plan) -> Plan:
    return plan._replace(
        folders=(), weights="none", states="none", durability="none", host_memory=None, device_memory=None, overlap=True
    )


def _run() -> str:
    return f"offload-bench-swap.{os.getpid()}"


@contextlib.contextmanager
def _engine(plan: Plan, load: Load) -> Iterator[offload.Engine]:
    config = {
        "bf16": {"enabled": True},
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
        with offload.init(config):
            model = _Model(plan.units, load)
        engine = offload.initialize(model=model, config=config)[0]
        try:
            yield engine
        except BaseException:
            with contextlib.suppress(OffloadError, OSError):  # the first error is the one to tell
                engine.destroy(remove=True)
            raise
        engine.destroy(remove=True)
    finally:
        for folder in plan.folders:
            shutil.rmtree(Path(folder) / _run(), ignore_errors=True)


@contextlib.contextmanager
def _drive(plan: Plan) -> Iterator[Callable[[], Rates]]:
    """A function that measures the drives, by a queue and files like the engine's."""
    paths = [Path(folder) / f"{_run()}.probe" for folder in plan.folders]
    buffer = aligned_empty(plan.probe_bytes)
    fill_with_noise(buffer)
    try:
        with (
            StripedFile(paths, create=True) as file,
            IoQueue(plan.backend, block_bytes=plan.block_bytes, depth=plan.depth) as queue,
        ):
            file.reserve(len(buffer))
            move(queue, file, buffer, "write", _REQUEST_BYTES)  # the first write of a block does more

            def rate(operation: str) -> float:
                request_bytes = min(_REQUEST_BYTES, align_up(len(buffer) // 2))
                passes = [move(queue, file, buffer, operation, request_bytes) for _ in range(3)]
                return statistics.median(each.nbytes / each.seconds for each in passes)

            yield lambda: Rates(rate("read"), rate("write"), rate("mixed"))
    finally:
        for path in paths:
            remove(path)


def _turn(engine: offload.Engine, plan: Plan) -> Turn:
    for _ in range(UNCOUNTED):
        _step(engine, plan)
    seconds: list[float] = []
    moved, kernel = engine.io_bytes(), _kernel_bytes()
    for _ in range(plan.steps):
        start = time.perf_counter()
        _step(engine, plan)
        seconds.append(time.perf_counter() - start)
    read, written = (after - before for before, after in zip(moved, engine.io_bytes(), strict=True))
    counted: list[float | None] = [None, None]
    if kernel is not None and (now := _kernel_bytes()) is not None:
        counted = [(after - before) / plan.steps for before, after in zip(kernel, now, strict=True)]
    for parameter in engine.module.parameters():
        with offload.gathered(parameter):
            pass  # waits for the unit's update, so that the next turn has the machine to itself
    return Turn(tuple(seconds), read / plan.steps, written / plan.steps, *counted)


def _step(engine: offload.Engine, plan: Plan) -> None:
    for _ in range(plan.accumulation):
        engine.backward(engine(torch.zeros(1)).sum())
        engine.step()


def _kernel_bytes() -> tuple[int, int] | None:
    """Bytes that this process has read from and written to drives, by the kernel's count."""
    try:
        lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(lines["read_bytes"]), int(lines["write_bytes"])
    except (OSError, KeyError, ValueError):
        return None


def _bytes_in_files(plan: Plan) -> int:
    return sum(
        path.stat().st_size for folder in plan.folders for path in (Path(folder) / _run()).rglob("*") if path.is_file()
    )


# -- judging ------------------------------------------------------------------------------------------


def make_row(
    plan: Plan, compute_ms: float, rates: Rates, swapped: Sequence[Turn], in_memory: Sequence[Turn] = ()
) -> Row:
    """From what was measured to what it means. Without `in_memory`, compute is added up."""
    step = _median_step(swapped)
    pure, forward = plan.pure_seconds(compute_ms), plan.forward_seconds(compute_ms)
    compute = max(_median_step(in_memory), pure) if in_memory else pure
    read = statistics.mean(turn.read_bytes for turn in swapped)
    written = statistics.mean(turn.written_bytes for turn in swapped)
    io = rates.seconds(read, written)
    updates_read = min(read, plan.update_read_bytes)
    updates = rates.seconds(updates_read, written)
    weights = (read - updates_read) / rates.read
    first = max(updates, forward) if plan.overlap else updates + forward
    order = max(first + max(compute - forward, weights), compute)
    exposed = max(step - compute, 0.0)
    hidden = min(max(io - exposed, 0.0), io)
    passes_after = (1 + _BACKWARD) * plan.accumulation - 1
    return Row(
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
        kernel_read_bytes=_mean_where_told([turn.kernel_read_bytes for turn in swapped]),
        kernel_written_bytes=_mean_where_told([turn.kernel_written_bytes for turn in swapped]),
        hiding_compute_ms=1e3 * max(updates, weights / passes_after) / plan.units if plan.overlap else None,
        limit=find_limit(step, compute, io, order),
    )


def find_limit(step: float, compute: float, io: float, order: float) -> str:
    """What made a step as long as it was; all in seconds."""
    if step <= compute * (1 + _NEAR):
        return "compute"
    if step > order * (1 + 4 * _NEAR):
        return "budgets"
    return "drive" if max(io, compute) == io and io >= order * (1 - _NEAR) else "order"


def _median_rates(rates: Sequence[Rates]) -> Rates:
    return Rates(*(statistics.median(each) for each in zip(*rates, strict=True)))


def _median_step(turns: Sequence[Turn]) -> float:
    return statistics.median(seconds for turn in turns for seconds in turn.seconds)


def _mean_where_told(values: Sequence[float | None]) -> float | None:
    told = [value for value in values if value is not None]
    return statistics.mean(told) if told else None


# -- telling ------------------------------------------------------------------------------------------


def as_json(machine: dict[str, Any], plan: Plan, result: Result) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "machine": machine,
        "paths": list(plan.folders),
        "parameters": plan.parameters,
        "units": plan.units,
        "unit_bytes": plan.unit_bytes,
        "accumulation": plan.accumulation,
        "weights": plan.weights,
        "states": plan.states,
        "durability": "step" if result.durable else "none",
        "overlap": plan.overlap,
        "busy": plan.busy,
        "host_memory": result.host_memory,
        "device_memory": result.device_memory,
        "file_bytes": result.file_bytes,
        "steps": plan.steps,
        "rounds": plan.rounds,
        "compute_measured": plan.in_memory,
        "drive": {
            f"{name}_gb_per_s": rounded(value / 1e9) for name, value in zip(Rates._fields, result.rates, strict=True)
        },
        "rows": [{key: rounded(value) for key, value in row._asdict().items()} for row in result.rows],
    }


def heading(plan: Plan, result: Result) -> list[str]:
    """What stands above the table."""
    rates, row = result.rates, result.rows[0]
    counted = ""
    if row.kernel_read_bytes is not None and row.kernel_written_bytes is not None:
        counted = f" (the kernel counts {format_size(row.kernel_read_bytes)}, {format_size(row.kernel_written_bytes)})"
    return [
        f"{plan.units} units of {format_size(plan.unit_bytes)}, {plan.parameters / 1e6:.0f} M parameters; weights on "
        f"{plan.weights}, states on {plan.states}",
        f"{format_size(result.file_bytes)} in files, durability {'step' if result.durable else 'none'}; host budget "
        f"{format_size(result.host_memory)}, device budget {format_size(result.device_memory)}",
        f"the drive by itself reads {rates.read / 1e9:.1f}, writes {rates.write / 1e9:.1f}, both at once "
        f"{rates.mixed / 1e9:.1f} GB/s; a step reads {format_size(row.read_bytes)}, writes "
        f"{format_size(row.written_bytes)}{counted}",
        f"compute is {'that of the same model in memory' if plan.in_memory else 'added up'}; seconds of a step:",
    ]


def in_words(plan: Plan, row: Row) -> str:
    """What limits the step, and what would change it."""
    start = f"at {row.compute_ms:g} ms a unit"
    if row.limit == "compute":
        return f"{start} compute limits: the I/O is hidden ({row.exposed_seconds:.2f} s are not)"
    enough = (
        "" if row.hiding_compute_ms is None else f"; from about {row.hiding_compute_ms:.0f} ms on all could be hidden"
    )
    compute, io, order = (f"{each:.2f} s" for each in (row.compute_seconds, row.io_seconds, row.order_seconds))
    if row.limit == "drive":
        return f"{start} the drive limits: {io} of I/O beside {compute} of compute{enough}"
    if row.limit == "order":
        forward = plan.forward_seconds(row.compute_ms)
        return (
            f"{start} the drive limits: updates must come before the weights are used, so the first forward, "
            f"{forward:.2f} s, hides what it can, and {order} is the least{enough}"
        )
    return (
        f"{start} budgets limit: compute and drive would allow {order}, the step takes {row.step_seconds:.2f} s; try a "
        f"larger --host-memory (where it does not help, something besides uses the cores)"
    )


def rounded(value: Any) -> Any:
    """Four digits of a float."""
    return float(f"{value:.4g}") if isinstance(value, float) else value
