"""The simulated pager has the real engine's figures: equal without chance, near them with real threads and drives."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from offload import testing
from offload.aio import IoQueue
from offload.planner.simulation.machine import Moved, SimulatedRates
from offload.planner.simulation.simulate import Budgets, Simulation, Use
from offload.planner.simulation.updater import UpdateCost
from offload.sizes import align_up
from offload.states import State
from offload.swapper.memory.device import Device
from tests.gradients.test_gradient_spill import least_host_memory
from tests.models.test_vocabulary import WORDS, llama
from tests.planner.test_simulate import Case
from tests.support import models
from tests.support.devices.late_device import use_device
from tests.support.oracle import Job, small_pieces, start, train_step
from tests.swapper.test_placements import room_for

# -- the engine ---------------------------------------------------------------------------------------


class PromptQueue:
    """A queue whose requests are done when it has taken them."""

    def __init__(self) -> None:
        self._inner = IoQueue()
        self.backend, self.refusals = self._inner.backend, self._inner.refusals

    def read(self, *args: Any, **kwargs: Any) -> Any:
        future = self._inner.read(*args, **kwargs)
        future.wait()
        return future

    def write(self, *args: Any, **kwargs: Any) -> Any:
        future = self._inner.write(*args, **kwargs)
        future.wait()
        return future

    def close(self) -> None:
        self._inner.close()


class Apart(Device):
    """A device with memory of its own, whose copies are done when they have started."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.host_addressable = False


class Figures(NamedTuple):
    """Of one step; peaks since the first. Gradients that spill are left out."""

    read: int
    written: int
    uses: int
    hits: int
    host_peak: int
    device_peak: int


class Recorded(NamedTuple):
    """A run of the engine, and all that its simulation needs."""

    case: Case
    budgets: Budgets
    steps: list[Figures]
    spilled: tuple[int, ...]
    on_cpu: bool
    """False if the device has memory of its own, to which other threads than the model's copy as well."""

    def simulated(self, steps: int, overlap: bool) -> Simulation:
        return self.case.run(*self.budgets, rates=SimulatedRates(on_cpu=self.on_cpu), overlap=overlap, steps=steps)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)
    testing.replace(
        monkeypatch, "store.scrub", lambda store: None
    )  # a day's pass through what nothing reads is in no figure of a step


@pytest.fixture
def spilled(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Bytes of gradients that were read and written."""
    counts = {"read": 0, "write": 0}

    def counted(name: str, real: Any, *args: Any) -> Any:
        counts[name] += len(args[-1])
        return real(*args)

    for name in counts:
        testing.intercept(monkeypatch, f"spill.{name}", partial(counted, name))
    yield counts


def record(job: Job, folder: Path, overlap: bool, spilled: dict[str, int], steps: int = 4, **options: Any) -> Recorded:
    """Train `job` with everything on disk; what the uses were, what they came to."""
    engine = start(job, ("nvme", "nvme"), folder, debug={"overlap": overlap}, **options)
    inspected = testing.inspect(engine)
    pager, store = inspected.pager, inspected.store
    assert store is not None
    calls: list[tuple[str, int, int | None]] = []

    def log(name: str, real: Any) -> None:
        def called(unit: int, *args: Any, **kwargs: Any) -> Any:
            calls.append((name, unit, sum(map(len, args[-1])) if name == "look_up" else None))
            return real(unit, *args, **kwargs)

        setattr(pager, name, called)

    for name in ("acquire", "release", "look_up"):
        log(name, getattr(pager, name))
    sizes = list(inspected.sizes)
    costs: list[UpdateCost | None] = []
    for index, part in enumerate(inspected.trainable):
        of = {s: len(part) * d.itemsize for s, d in inspected.mode.states.items() if store.keeps(index, s)}
        read = sum(n for s, n in of.items() if s is not State.WEIGHT and (index, s) not in inspected.residents)
        costs.append(UpdateCost(len(part), of.get(State.WEIGHT, 0), read, sum(of.values())) if part else None)
    promoted, home = pager.host.weights.space.used_bytes, pager.arena.used_bytes
    budgets = Budgets(pager.host.weights.space.nbytes - promoted, pager.arena.nbytes - home)

    def totals() -> list[int]:
        moved, counts = engine.io_bytes(), engine.use_counts()
        return [moved.read - spilled["read"], moved.written - spilled["write"], counts.uses, counts.on_device]

    figures, before, uses = [], totals(), None
    for step in range(steps):
        calls.clear()
        train_step(engine, job, step)
        if step == steps - 1:
            testing.settle(engine, commit=False)
        after = totals()
        peaks = pager.host.weights.space.peak_bytes - promoted, pager.arena.space.peak_bytes - home
        figures.append(Figures(*(new - old for new, old in zip(after, before, strict=True)), *peaks))
        assert uses in (None, uses_of(calls)), "a step is like the one before"
        before, uses = after, uses_of(calls)
    assert uses is not None
    trained = {use.unit for use in uses}
    case = Case(
        uses,
        sizes,
        [each if index in trained else None for index, each in enumerate(costs)],
        inspected.tile_numel,
        inspected.prefetch_limits,
    )
    spill = inspected.gradients.spill
    on_cpu = inspected.device.host_addressable
    recorded = Recorded(case, budgets, figures, () if spill is None else tuple(spill._windows), on_cpu)
    engine.destroy(remove=True)
    return recorded


def uses_of(calls: list[tuple[str, int, int | None]]) -> list[Use]:
    """Of pins that were taken and given back, and of lookups, in order."""
    uses: list[Use] = []
    begun: dict[int, list[int]] = {}
    for name, unit, lookup in calls:
        if lookup is not None:
            uses.append(Use(unit, lookup=lookup))
        elif name == "acquire":
            begun.setdefault(unit, []).append(len(uses))
            uses.append(Use(unit))
        else:
            position = begun[unit].pop()
            uses[position] = Use(unit, held=len(uses) - position)
    assert not any(begun.values())
    return uses


def same_tokens(model: Any, step: int, micro: int) -> torch.Tensor:
    ids = models.tokens(0, 0, (2, 10), 4 * WORDS)
    result: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return result


TABLES = Job(partial(llama, True, words=4 * WORDS), same_tokens)
JOBS = {"gpt2": models.GPT2, "mixture": models.MIXTURE, "dropout": models.DROPOUT._replace(accumulation=2)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("device", [None, Apart()], ids=["cpu", "apart"])
@pytest.mark.parametrize("more", [0, 20_000, 400_000, 2_000_000])
@pytest.mark.parametrize("units", [2, 3])
@pytest.mark.parametrize("name", JOBS)
def test_without_chance_every_figure_is_the_engines(
    name: str,
    units: int,
    more: int,
    device: Device | None,
    tmp_path: Path,
    spilled: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bytes, hits and both peaks of each step, from the least host memory, where units stream, to enough for all."""
    testing.replace(monkeypatch, "io.queue", lambda *_, **__: PromptQueue())
    if device is not None:
        use_device(monkeypatch, device)
    job = JOBS[name]._replace(dtype="bf16")
    on_device = room_for(job, units) + 4096 * (units - 2)
    budget = least_host_memory(job, tmp_path, device_memory=on_device) + more
    real = record(job, tmp_path, False, spilled, host_memory=budget, device_memory=on_device)
    for number, figures in enumerate(real.steps, start=1):
        simulation = real.simulated(number, overlap=False)
        assert figures == Figures(
            simulation.moved.read,
            simulation.moved.written,
            simulation.uses,
            simulation.hits,
            simulation.host_peak,
            simulation.device_peak,
        ), f"step {number}"
    streamed = any(2 * align_up(size.shard_nbytes) > real.budgets.host for size in real.case.sizes)
    if more in (0, 2_000_000):
        assert streamed == bool(real.spilled) == (more == 0)


def test_lookups_without_chance_have_the_engines_figures(
    tmp_path: Path, spilled: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    testing.replace(monkeypatch, "io.queue", lambda *_, **__: PromptQueue())
    testing.replace(monkeypatch, "size.row_request", 0)
    budgets = {"host_memory": 1_500_000, "device_memory": 64 << 10}
    real = record(TABLES, tmp_path, False, spilled, steps=3, vocabulary="pieces", **budgets)
    assert any(use.lookup for use in real.case.uses)
    for number, figures in enumerate(real.steps, start=1):
        simulation = real.simulated(number, overlap=False)
        assert figures == Figures(
            simulation.moved.read,
            simulation.moved.written,
            simulation.uses,
            simulation.hits,
            simulation.host_peak,
            simulation.device_peak,
        ), f"step {number}"


@pytest.mark.sample(1)
@pytest.mark.parametrize("more", [0, 20_000, 150_000, 800_000])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "mixture"])
def test_with_real_threads_and_drives_the_figures_are_near(
    name: str, overlap: bool, more: int, tmp_path: Path, spilled: dict[str, int]
) -> None:
    job = JOBS[name]._replace(dtype="bf16")
    budget = least_host_memory(job, tmp_path, device_memory=room_for(job, 2)) + more
    real = record(job, tmp_path, overlap, spilled, host_memory=budget, device_memory=room_for(job, 2))
    steps = len(real.steps)
    simulations = [real.simulated(number, overlap) for number in range(1, steps + 1)]
    last = real.simulated(steps + 1, overlap).moved if overlap else Moved()  # the last updates come after the last step
    read = sum(each.moved.read for each in simulations) + last.updates_read
    assert (
        sum(step.written for step in real.steps)
        == sum(each.moved.written for each in simulations) + last.updates_written
    )
    assert sum(step.read for step in real.steps) == pytest.approx(read, rel=0.25)
    assert [each.uses for each in real.steps] == [each.uses for each in simulations]
    assert real.steps[-1].host_peak <= real.budgets.host and real.steps[-1].device_peak <= real.budgets.device
