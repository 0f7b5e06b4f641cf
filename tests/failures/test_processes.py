"""Engines in forked and spawned processes, and several in one, keep to themselves."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import offload
from offload import testing
from offload.errors import StoreError, UsageError
from tests.failures import linear_engine
from tests.support import models
from tests.support.drives.fault_injection import LateQueue, use_queue
from tests.support.oracle import Job, processes, run, start, train_step
from tests.support.processes import warm_process

DISK = ("nvme", "nvme")
MIB = 1 << 20
# Python 3.12 warns of each fork beside threads, and torch of more workers than cores; both are what is tested here.
forks = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:This DataLoader will create:UserWarning")


class Wide(nn.Module):
    """16.8M parameters in 16 units, so that a copy of its memory is seen; dropout, so that generators matter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(16))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + functional.dropout(torch.tanh(layer(hidden)), 0.1, self.training)
        return hidden


class Batches(Dataset[Any]):
    """Four batches, each with the process that made it."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(4, 1024, generator=torch.Generator().manual_seed(index)), os.getpid()


def _memory(*processes: int) -> int:
    """Bytes of anonymous memory that `processes` have together; a page that several share counts once."""
    total = 0
    for process in processes:
        for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                total += int(line.split()[1]) * 1024
    return total


def _grown_by_workers() -> int:
    """By how many bytes parent and four workers grow that find no engine: they write to objects of Python."""
    me, makers, grown = os.getpid(), set(), 0
    before = _memory(me)
    for _, maker in DataLoader(Batches(), batch_size=None, num_workers=4, multiprocessing_context="fork"):
        makers.add(maker)
        grown = _memory(me, *makers) - before
    return grown


def _train_from_loader(engine: offload.Engine, workers: int, gate: threading.Event) -> tuple[list[float], int]:
    """Two steps, and a round over `Batches`: the losses, and by how many bytes parent and workers grew in the round.

    No read or write of the engine begins while `gate` is clear: from the second step until the workers are there.
    """
    me, losses, makers, grown = os.getpid(), [], set(), 0
    for index in range(2):
        loss = engine(Batches()[index][0]).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    gate.clear()
    context = "fork" if workers else None
    loader = DataLoader(Batches(), batch_size=None, num_workers=workers, multiprocessing_context=context)
    before = _memory(me)
    batches = iter(loader)
    forked = engine.io_bytes().written
    gate.set()
    for index, (batch, maker) in enumerate(batches):
        loss = engine(batch).square().mean()
        if index == 0:
            assert engine.io_bytes().written > forked, "no update was in flight when the workers were forked"
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        makers.add(maker)
        if workers:
            grown = _memory(me, *makers) - before
    assert (me in makers, len(makers)) == (not workers, workers or 1)
    return losses, grown


@pytest.mark.works(
    "Engines and processes", "`DataLoader(num_workers=4)` while updates run: no copies of states", "right"
)
@forks
def test_forked_workers_copy_nothing_while_updates_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forked while leases are read and written, and live while all of them are overwritten four times."""
    if "Pss_Anon" not in Path("/proc/self/smaps_rollup").read_text():
        pytest.skip("this kernel does not tell anonymous memory apart")
    gate = threading.Event()
    gate.set()
    use_queue(monkeypatch, lambda: LateQueue(0, 0.0, lambda *_: not gate.wait()))
    job, results, others = Job(Wide, models.mixture_loss), [], _grown_by_workers()
    for workers in (0, 4):
        engine = start(job, DISK, tmp_path / str(workers), host_memory="256MiB")
        host = engine.host_memory
        try:
            results.append(_train_from_loader(engine, workers, gate))
        finally:
            gate.set()  # or a failed test would wait for ever
            engine.destroy(remove=True)
    (plain, _), (forked, grown) = results
    assert forked == plain
    # Measured: 71 to 92 MiB, about 55 of them autograd's own gradients. An update reads these while workers are forked,
    # and frees them while the workers still have them. A fork that takes the arena along adds 145 MiB.
    more = grown - others
    assert more < host // 2, f"{more // MIB} MiB more with an engine, the host arena has {host // MIB}"


class Trespassing(Dataset[Any]):
    """Its one item says what the engine's calls did in the process that makes it."""

    def __init__(self, engine: offload.Engine, old: torch.Tensor) -> None:
        self.engine, self.old = engine, old

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, str]:
        engine, ids = self.engine, models.tokens(9, 9)
        calls: dict[str, Callable[[], object]] = {
            "forward": lambda: engine(input_ids=ids),
            "module": lambda: engine.module(input_ids=ids),
            "backward": lambda: engine.backward(self.old),
            "step": engine.step,
            "optimizer.step": engine.optimizer.step,
            "zero_grad": engine.zero_grad,
            "state_dict": lambda: engine.module.state_dict(),
        }
        figures = {}
        for name, call in calls.items():
            try:
                call()
                figures[name] = "nothing"
            except Exception as error:
                figures[name] = type(error).__name__
        # These do nothing at all in a child, or its end would be the end of its parent's run.
        engine.destroy(remove=True)
        testing.leave(engine)
        return figures


@pytest.mark.works("Engines and processes", "the engine called in a forked worker", "refused")
@forks
def test_a_forked_worker_cannot_use_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call in a worker is a `UsageError`, and the parent's training does not notice."""
    job, parent = models.GPT2._replace(steps=4), os.getpid()
    engine = start(job, DISK, tmp_path / "trespassed")

    def capturing(_: Any) -> bool:
        if os.getpid() != parent:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        return False

    monkeypatch.setattr(type(testing.inspect(engine).device), "capturing", capturing)
    losses = []
    for step in range(job.steps):
        losses.append(train_step(engine, job, step))
        if step == 2:
            old = job.loss(engine, 9, 0)
            trespassing = Trespassing(engine, old)
            loader = DataLoader(trespassing, batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=60)
            (figures,) = loader
            assert set(figures.values()) == {UsageError.__name__}, figures
    engine.destroy(remove=True)
    assert losses == run(job, DISK, tmp_path / "plain").losses


@pytest.mark.works("Engines and processes", "resuming while forked workers of the last engine live", "right")
@forks
def test_a_run_goes_on_while_workers_of_its_last_engine_live(tmp_path: Path) -> None:
    """`destroy()` gives the run back, whoever was forked meanwhile."""
    engine = start(models.GPT2, DISK, tmp_path)
    train_step(engine, models.GPT2, 0)
    with _child():
        engine.destroy()
        again = start(models.GPT2, DISK, tmp_path, resume="must")
        assert again.global_steps == 1
        again.destroy(remove=True)


@contextlib.contextmanager
def _child() -> Iterator[int]:
    """A forked child that does nothing until the end of the block."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(theirs)
        os.read(ours, 1)
        os._exit(0)
    try:
        yield child
    finally:
        os.close(ours)
        os.close(theirs)
        os.waitpid(child, 0)


def by_torch(folder: Path, fails: bool) -> None:
    if fails:
        with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="a bad batch"):
            torch.multiprocessing.spawn(linear_engine.train_in_a_process, (folder, True))
    else:
        torch.multiprocessing.spawn(linear_engine.train_in_a_process, (folder, False))


def by_python(folder: Path, fails: bool) -> None:
    process = torch.multiprocessing.get_context("spawn").Process(
        target=linear_engine.train_in_a_process, args=(0, folder, fails)
    )
    process.start()
    process.join()
    assert process.exitcode == int(fails)


@pytest.fixture
def warm_python(tmp_path: Path) -> Iterator[None]:
    """multiprocessing starts a Python that is forked, with modules that take longer to import than a test."""
    multiprocessing.set_executable(str(warm_process.commands(tmp_path / "commands") / "python"))
    yield
    multiprocessing.set_executable(sys.executable)


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("spawn", [by_torch, pytest.param(by_python, marks=pytest.mark.slow)])
def test_an_exception_keeps_the_run(spawn: Callable[[Path, bool], None], tmp_path: Path) -> None:
    spawn(tmp_path, True)
    with pytest.raises(StoreError, match="resume"):
        linear_engine.start(tmp_path)
    engine = linear_engine.start(tmp_path, resume="must")
    assert engine.global_steps == 1
    engine.destroy(remove=True)


@pytest.mark.slow
def test_the_end_of_the_function_is_an_end_of_the_run(tmp_path: Path) -> None:
    by_torch(tmp_path, False)
    engine = linear_engine.start(tmp_path)
    assert engine.global_steps == 0
    engine.destroy(remove=True)


def begin_and_end(folder: Path) -> None:
    """Begins and ends an engine, and looks at what is called at the end of the process."""
    from multiprocessing import util

    before = len(util._finalizer_registry)
    linear_engine.start(folder).destroy(remove=True)
    assert len(util._finalizer_registry) == before


def test_a_destroyed_engine_is_not_kept_until_the_process_ends(tmp_path: Path) -> None:
    process = processes().Process(target=begin_and_end, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0
