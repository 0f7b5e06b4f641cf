"""A benchmark of training with a stand-in for a model: how much of paging is hidden behind compute on given drives.

The stand-in has N units of S bytes of weights. Each "computes" for T ms in a forward and twice as long in a backward.
Everything else is real: the engine reads, uploads, takes gradients, updates with its AdamW kernel, writes and commits,
within a host and a device budget. The swapped model takes turns with the same model in memory and the drive by itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import offload
from offload.bench.drive import Rates, drive_rates, kernel_bytes, median_rates
from offload.bench.swap_figures import Result, Turn, make_row
from offload.bench.swap_plan import BACKWARD, Plan
from offload.errors import OffloadError
from offload.notices import Remark
from offload.sizes import count_of, format_size

UNCOUNTED = 2
"""Steps at the start of each turn that are not timed: no update runs beside the first, which records the access order.
"""

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
    """A unit with one parameter."""

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
    """A chain of units."""

    def __init__(self, units: int, load: Load) -> None:
        super().__init__()
        self.units = nn.ModuleList(_Unit(load) for _ in range(units))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for unit in self.units:
            inputs = unit(inputs)
        return inputs


# -- measuring ----------------------------------------------------------------------------------------


def measure(plan: Plan, tell: Callable[[str], None] = lambda _: None) -> Result:
    """Runs the workload and removes its files afterwards.

    Args:
        plan: the settings.
        tell: called with each line about the progress.

    Returns:
        The figures, with a row for each compute time.

    Raises:
        OffloadError: the engine or the drive fails.
    """
    load = Load(plan.unit_numel, plan.busy)
    swapped: dict[float, list[Turn]] = {each: [] for each in plan.compute_ms}
    in_memory: dict[float, list[Turn]] = {each: [] for each in plan.compute_ms}
    rates: dict[float, list[Rates]] = {each: [] for each in plan.compute_ms}
    with contextlib.ExitStack() as stack:
        tell(f"{count_of(plan.units, 'unit')} of {format_size(plan.unit_bytes)} into their tiers")
        engine = stack.enter_context(_engine(plan, load))
        beside = stack.enter_context(_engine(_in_memory(plan), load)) if plan.in_memory else None
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
            # What the machine or the drive has refused. A `Remark` tells of this module's own config.
            tuple(line for line in engine.notices if not isinstance(line, Remark)),
            median_rates([each for turns in rates.values() for each in turns]),
            tuple(
                make_row(plan, each, median_rates(rates[each]), swapped[each], in_memory[each])
                for each in plan.compute_ms
            ),
        )


def _in_memory(plan: Plan) -> Plan:
    """Returns the plan of the same model with everything in memory."""
    return replace(
        plan,
        folders=(),
        weights="none",
        states="none",
        durability="none",
        host_memory=None,
        device_memory=None,
        overlap=True,
    )


def _run() -> str:
    """Returns the name of the run's folder, unique to this process."""
    return f"offload-bench-swap.{os.getpid()}"


@contextlib.contextmanager
def _engine(plan: Plan, load: Load) -> Iterator[offload.Engine]:
    """Yields an engine on the workload. Removes its files at the end."""
    config = {
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,  # as by default: what a config leaves open has a notice
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
        # Weights are made unit by unit inside `init`, so the model may exceed the memory of the machine.
        with offload.init(config):
            model = _Model(plan.units, load)
        engine = offload.initialize(model=model, config=config)[0]
        try:
            yield engine
        except BaseException:
            with contextlib.suppress(OffloadError, OSError):  # the first error is the one to report
                engine.destroy(remove=True)
            raise
        # After the body has succeeded an error of the shutdown is the one to report.
        engine.destroy(remove=True)
    finally:
        for folder in plan.folders:
            shutil.rmtree(Path(folder) / _run(), ignore_errors=True)


class _Moved(NamedTuple):
    """Bytes read and written so far: those that the engine has requested, and those that Linux has counted."""

    engine: tuple[int, int]
    kernel: tuple[int, int] | None


def _turn(engine: offload.Engine, plan: Plan) -> Turn:
    """Runs the steps of one turn and returns the times of the timed ones, and the bytes of a step."""
    # `before` is the count in the last untimed step, so the difference covers exactly `plan.steps` steps.
    for _ in range(UNCOUNTED):
        before = _step(engine, plan)
    seconds: list[float] = []
    for _ in range(plan.steps):
        start = time.perf_counter()
        after = _step(engine, plan)
        seconds.append(time.perf_counter() - start)
    read, written = (now - then for then, now in zip(before.engine, after.engine, strict=True))
    counted: list[float | None] = [None, None]
    if before.kernel is not None and after.kernel is not None:
        counted = [(now - then) / plan.steps for then, now in zip(before.kernel, after.kernel, strict=True)]
    for parameter in engine.module.parameters():
        with offload.gathered(parameter):
            pass  # waits for the unit's update, so that the next turn runs alone
    return Turn(tuple(seconds), read / plan.steps, written / plan.steps, *counted)


def _step(engine: offload.Engine, plan: Plan) -> _Moved:
    """Performs a step and returns the bytes moved until the end of its last backward.

    By then every unit was used, so the reads and writes of all updates of the previous step have been requested, and
    none of this step's. Therefore the difference between two counts is the bytes of entire steps, however far the
    update worker is when `step()` returns.
    """
    for micro in range(plan.accumulation):
        engine.backward(engine(torch.zeros(1, dtype=torch.float32, device="cpu")).sum())
        if micro == plan.accumulation - 1:
            moved = _Moved(engine.io_bytes(), kernel_bytes())
        engine.step()
    return moved


def _bytes_in_files(plan: Plan) -> int:
    """Returns the bytes of the run's files on all drives."""
    return sum(
        path.stat().st_size for folder in plan.folders for path in (Path(folder) / _run()).rglob("*") if path.is_file()
    )
