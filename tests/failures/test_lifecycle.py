"""Engines come and go in a process that lives on, and beside each other: nothing stays behind, nothing is shared."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

import offload
from offload import testing
from tests.support import models
from tests.support.oracle import assert_same_tensors, config, room_for, run, start, train_step, weights_of
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
        one, other = (layer.get_buffer("scale") for layer in engine.module.layers)
        assert one is other and one.dtype == torch.bfloat16
        engine.backward(engine(torch.ones(2, 8)))
        engine.step()
        engine.destroy()


def test_the_start_of_an_optimizer_without_states_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level("INFO", logger="offload"):
        offload.initialize(model, optimizer=optimizer, weights="cpu", states="cpu")[0].destroy()
    assert "fp32 sgd on cpu: weights on host, no states; host " in caplog.messages[-1], caplog.messages
