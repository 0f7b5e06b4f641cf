"""Engines come and go, in a process that lives on and in forked and spawned ones: nothing stays, nothing is shared."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

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
from tests.support.oracle import Job, assert_same_tensors, config, room_for, run, start, train_step, weights_of
from tests.support.processes import warm_process
from tests.support.processes.process_measures import resident

DISK = ("nvme", "nvme")
MIB = 1 << 20


class Held(NamedTuple):
    """What this process holds of the system."""

    descriptors: int
    threads: int
    tasks: int
    tensors: int
    mappings: int
    resident: int
    """Bytes."""

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        # By type(), because isinstance() asks __class__, and some libraries' objects answer that with a warning.
        tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
        return cls(
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=len(threading.enumerate()),
            tasks=len(os.listdir("/proc/self/task")),
            tensors=tensors,
            mappings=len(Path("/proc/self/maps").read_text().splitlines()),
            resident=resident(),
        )


@pytest.mark.works("Engines and processes", "threads after `destroy()`: none", "right")
@pytest.mark.works("Engines and processes", "ten engines in a row: memory, files and threads stay", "right")
def test_ten_engines_leave_nothing_behind(tmp_path: Path) -> None:
    held = []
    for index in range(10):
        engine = start(models.GPT2, DISK, tmp_path / str(index))
        train_step(engine, models.GPT2, 0)
        host = engine.host_memory
        engine.destroy(remove=True)
        del engine
        gc.collect()
        if index == 0:
            gc.freeze()  # the libraries that the first has loaded
        if index in (4, 9):
            held.append(Held.now())
    fifth, last = held
    assert last[:4] == fifth[:4], "descriptors, threads, tasks or tensors grow"
    # Five leaked engines would be five mappings at the least; the allocator has a few of its own, now and then.
    assert last.mappings <= fifth.mappings + 4
    # Two arenas in five engines would be seen. Measured: less than 0.2 MiB, and 4 once, beside five other tests.
    assert last.resident - fifth.resident < 2 * host, f"{last.resident - fifth.resident} bytes more"


@pytest.mark.works("Engines and processes", "a destroyed engine and its model are freed", "right")
@pytest.mark.parametrize("placement", [DISK, ("none", "none")])
def test_a_destroyed_engine_can_be_collected_and_so_can_its_model(placement: tuple[str, str], tmp_path: Path) -> None:
    """Also each without the other: a model that is kept keeps neither the engine nor its memory."""

    def trained() -> offload.Engine:
        engine = start(models.GPT2, placement, tmp_path)
        train_step(engine, models.GPT2, 0)
        engine.destroy(remove=True)
        return engine

    trained()  # the first loads libraries
    gc.collect()
    before = Held.now().mappings
    engine = trained()
    gone = weakref.ref(engine), weakref.ref(engine.module), weakref.ref(engine.optimizer)
    del engine
    gc.collect()
    assert [reference() for reference in gone] == [None, None, None]

    engine = trained()
    arenas = weakref.ref(testing.inspect(engine).host_arena), weakref.ref(testing.inspect(engine).pager)
    module, gone_engine = engine.module, weakref.ref(engine)
    del engine
    gc.collect()
    assert gone_engine() is None
    assert [reference() for reference in arenas] == [None, None]
    assert len(list(module.parameters())) > 0
    del module
    assert Held.now().mappings <= before + 4


def test_an_engine_after_an_exception_can_be_collected(tmp_path: Path) -> None:
    """One that a forward or a backward has ended in the middle."""
    job = models.GPT2
    engine = start(job, DISK, tmp_path)
    train_step(engine, job, 0)
    hook = engine.module.transformer.h[1].register_forward_pre_hook(_boom)
    with pytest.raises(ZeroDivisionError):
        job.loss(engine, 1, 0)
    hook.remove()
    loss = job.loss(engine, 1, 0)
    loss.grad_fn.register_prehook(_boom)
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss)
    engine.destroy(remove=True)
    gone = weakref.ref(engine), weakref.ref(engine.module)
    del engine, hook, loss
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def _boom(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.works("Engines and processes", "several engines, one training inside of another's step", "right")
@pytest.mark.parametrize("inside", [False, True], ids=["between forward and backward", "inside of a forward"])
def test_engines_inside_of_one_anothers_steps(inside: bool, tmp_path: Path) -> None:
    """One accumulates, one trains within each of its micro-batches, one generates: the bits of each alone."""
    outer_job, inner_job = models.GPT2._replace(accumulation=2, steps=2), models.DROPOUT._replace(steps=4, lr=3e-3)
    alone = run(outer_job, DISK, tmp_path / "outer alone"), run(inner_job, DISK, tmp_path / "inner alone")
    torch.manual_seed(5)
    frozen = models.gpt2().requires_grad_(False).eval()
    expected = _generate(frozen)
    third = offload.initialize(model=frozen, config=config(models.GPT2, DISK, tmp_path / "third"))[0]
    outer = start(outer_job, DISK, tmp_path / "outer", device_memory=room_for(outer_job, 2))
    # Last, because dropout draws from the generators that `start` has seeded, and nobody else does.
    inner = start(inner_job, DISK, tmp_path / "inner", device_memory=room_for(inner_job, 2))
    inner_losses: list[float] = []

    def meanwhile(*_: object) -> None:
        inner_losses.append(train_step(inner, inner_job, len(inner_losses)))
        assert torch.equal(_generate(third.module), expected)

    if inside:
        outer.module.transformer.h[1].register_forward_pre_hook(meanwhile)
    losses, norms = [], []
    for step in range(outer_job.steps):
        mean = torch.zeros(())
        for micro in range(outer_job.accumulation):
            loss = outer_job.loss(outer, step, micro)
            if not inside:
                meanwhile()
            outer.backward(loss)
            mean = mean + loss.detach() / outer_job.accumulation
            outer.step()
        losses.append(float(mean))
        norms.append(outer.get_global_grad_norm())
    weights = [weights_of(engine) for engine in (outer, inner)]
    for engine in (outer, inner, third):
        engine.destroy(remove=True)
    assert (losses, norms) == (alone[0].losses, alone[0].norms)
    assert inner_losses == alone[1].losses
    for mine, result in zip(weights, alone, strict=True):
        assert_same_tensors(mine, result.weights)


def _generate(model: nn.Module) -> torch.Tensor:
    prompt = torch.tensor([[1, 2, 3]])
    return model.generate(prompt, max_new_tokens=6, do_sample=False, use_cache=True, pad_token_id=0)


def test_a_process_ends_cleanly_after_destroy(tmp_path: Path) -> None:
    """Not a word but of the start and no error, although the engine is still there when the interpreter ends."""
    code = (
        "from pathlib import Path; from tests.support import models\n"
        "from tests.support.oracle import start, train_step\n"
        f"engine = start(models.MIXTURE, ('nvme', 'nvme'), Path({str(tmp_path)!r}))\n"
        "train_step(engine, models.MIXTURE, 0)\n"
        "engine.destroy(remove=True)\n"
    )
    done = warm_process.python(code)
    assert (done.returncode, done.stdout) == (0, "")
    (start,) = done.stderr.splitlines()
    assert start.startswith("offload: fp32 on cpu: weights on disk, states on disk"), start


class SharedBuffer(nn.Module):
    """Two modules with one buffer, as rotary embeddings have."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        scale = torch.ones(8)
        for layer in self.layers:
            layer.register_buffer("scale", scale)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            value = layer(value) * layer.scale.to(value.dtype)
        return value.float().square().mean()


def test_a_buffer_of_two_modules_stays_one(tmp_path: Path) -> None:
    content = config(models.GPT2, ("nvme", "nvme"), tmp_path, resume="auto")
    content["data_types"] = {"buffer_dtype": "bf16"}  # moves it, as a GPU does
    for _ in range(2):
        engine = offload.initialize(model=SharedBuffer(), config=content)[0]
        left, right = (layer.get_buffer("scale") for layer in engine.module.layers)
        assert left is right and left.dtype == torch.bfloat16
        engine.backward(engine(torch.ones(2, 8)))
        engine.step()
        engine.destroy()


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


@pytest.mark.slow
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
    job, results, base = Job(Wide, models.mixture_loss), [], _grown_by_workers()
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
    more = grown - base
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


def test_a_destroyed_engine_is_not_kept_until_the_process_ends(tmp_path: Path) -> None:
    from multiprocessing import util

    before = len(util._finalizer_registry)
    linear_engine.start(tmp_path).destroy(remove=True)
    assert len(util._finalizer_registry) == before
