"""Whatever users do with graphs: with inputs of blocks in any tier the same bits as without checkpointing."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import offload
from offload.errors import UsageError
from tests.models.test_autograd import LOOPS, Loop
from tests.models.test_module_kinds import DISK, MEMORY
from tests.support.modules.checkpointed import (
    JOB,
    Block,
    Stack,
    batch,
    gives_back,
    kept,
    running,
    small_inputs_move,
    used,
)
from tests.support.modules.checkpointed import TIERS as ALL_TIERS
from tests.support.oracle import Job, room_for, train_step
from tests.support.processes.device_process import engine_device

AREA = "Activation checkpointing"
TIERS = ("cpu", "nvme")
"""The two that move inputs, on the CPU and on other devices."""


@pytest.fixture(autouse=True)
def _tiny_inputs_move(monkeypatch: pytest.MonkeyPatch) -> None:
    small_inputs_move(monkeypatch)


# -- loops that other tests have ----------------------------------------------------------------------

ASKS_TWICE = (
    "an `autograd.Function` that saves a weight",
    "an `autograd.Function` that is given the weight of a module that does not run",
    "an `autograd.Function` that is given the `.data` of such a weight",
)
"""Functions of the user that ask for `ctx.saved_tensors` twice in a backward."""
ONCE = [name for name in LOOPS if name not in ASKS_TWICE]


def _numbers(loop: Loop, job: Job, placement: tuple[str, str], folder: Path, **options: Any) -> list[float]:
    with running(job, folder, placement, **options) as engine:
        return loop(engine, job)


@pytest.mark.works(AREA, '"activations" in any tier, with every loop of the table Graphs but the next', "right")
@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, in its jvp
@pytest.mark.parametrize("tier", ALL_TIERS)
@pytest.mark.parametrize("name", ONCE)
def test_every_loop_keeps_its_bits(name: str, tier: str, tmp_path: Path) -> None:
    if "inference_mode" in name and engine_device() != "cpu":
        pytest.skip("torch cannot set the data of a parameter in inference mode on such a device")
    loop, job, units = LOOPS[name]
    plain = _numbers(loop, job, MEMORY, tmp_path / "plain")
    options = {"device_memory": room_for(job, units), "activations": tier}
    assert _numbers(loop, job, DISK, tmp_path / "tier", **options) == plain


@pytest.mark.works(
    AREA, "an `autograd.Function` in a block that asks for `ctx.saved_tensors` twice", "refused by torch"
)
@pytest.mark.parametrize("name", ASKS_TWICE)
def test_a_function_that_asks_twice_is_refused(name: str, tmp_path: Path) -> None:
    loop, job, _ = LOOPS[name]
    with running(job, tmp_path, activations="nvme") as engine, pytest.raises(CheckpointError, match="only once"):
        loop(engine, job)


# -- orders of forward and backward -------------------------------------------------------------------


def _square(engine: Any, step: int, micro: int = 0) -> torch.Tensor:
    return JOB.loss(engine, step, micro)


def _newest_first(engine: offload.Engine, step: int) -> None:
    first, second = _square(engine, step, 0), _square(engine, step, 1)
    engine.backward(second)
    engine.backward(first)


def _oldest_first(engine: offload.Engine, step: int) -> None:
    first, second = _square(engine, step, 0), _square(engine, step, 1)
    engine.backward(first)
    engine.backward(second)


def _retained(engine: offload.Engine, step: int) -> None:
    loss = _square(engine, step)
    engine.backward(loss, retain_graph=True)
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)


def _dropped(engine: offload.Engine, step: int) -> None:
    _square(engine, step, 1)
    engine.backward(_square(engine, step))


def _dropped_between(engine: offload.Engine, step: int) -> None:
    loss = _square(engine, step)
    _square(engine, step, 1)
    engine.backward(loss)


def _evaluated_between(engine: offload.Engine, step: int) -> None:
    loss = _square(engine, step)
    engine.eval()
    with torch.no_grad():
        _square(engine, step, 1)
    engine.train()
    engine.backward(loss)


def _part_of_a_graph(engine: offload.Engine, step: int) -> None:
    """The gradient of some parameters alone, then all of them."""
    loss = _square(engine, step)
    asked = list(engine.module.blocks[5].parameters())
    torch.autograd.grad(loss, asked, retain_graph=True)
    engine.backward(loss)


def _failed_between(engine: offload.Engine, step: int) -> None:
    """A forward that fails in the middle leaves nothing behind."""

    def fail(*_: Any) -> None:
        raise ValueError("of the test")

    hook = engine.module.blocks[4].up.register_forward_hook(fail)
    with pytest.raises(ValueError, match="of the test"):
        _square(engine, step, 1)
    hook.remove()
    engine.backward(_square(engine, step))


ORDERS: dict[str, Callable[[offload.Engine, int], None]] = {
    "two forwards, the newest backward first": _newest_first,
    "two forwards, the oldest backward first": _oldest_first,
    "three backwards of a retained graph": _retained,
    "a graph that is dropped without a backward": _dropped,
    "a graph that is dropped between forward and backward of another": _dropped_between,
    "an evaluation between forward and backward": _evaluated_between,
    "`torch.autograd.grad` of one block, then a backward": _part_of_a_graph,
    "an exception in the middle of a forward": _failed_between,
}


def _after(order: str, folder: Path, **options: Any) -> list[float]:
    found = []
    with running(JOB, folder, **options) as engine:
        for step in range(JOB.steps):
            ORDERS[order](engine, step)
            engine.step()
            found.append(engine.get_global_grad_norm())
        found += [float(value.double().sum()) for value in engine.module.state_dict().values()]
        if options:
            gives_back(engine)
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("order", [pytest.param(name, marks=pytest.mark.works(AREA, name, "right")) for name in ORDERS])
def test_forwards_and_backwards_in_any_order_keep_their_bits(order: str, tier: str, tmp_path: Path) -> None:
    assert _after(order, tmp_path / tier, activations=tier) == _after(order, tmp_path / "plain")


@pytest.mark.sample(1)
@pytest.mark.parametrize("tier", TIERS)
def test_what_was_kept_is_forgotten_though_a_graph_is_always_alive(tier: str, tmp_path: Path) -> None:
    """The next forward begins before the backward of the last, for ever."""
    with running(JOB, tmp_path, activations=tier) as engine:
        last = _square(engine, 0)
        for step in range(1, 40):
            newest = _square(engine, step)
            torch.autograd.grad(last, list(engine.module.first.parameters()))
            last = newest
        assert len(kept(engine)._kept) < 150


@pytest.mark.works(AREA, "a graph that outlives `destroy()`", "refused")
@pytest.mark.parametrize("tier", TIERS)
def test_a_graph_of_a_destroyed_engine_is_refused_and_keeps_no_memory(tier: str, tmp_path: Path) -> None:
    with running(JOB, tmp_path, activations=tier) as engine:
        loss = _square(engine, 0)
        inputs = kept(engine)
        engine.destroy(remove=True)
    assert all(each.memory.tensor is None and each.memory.block is None for each in inputs._alive())
    with pytest.raises(UsageError, match="this engine was destroyed"):
        loss.backward()
    del loss
    gc.collect()
    assert not inputs._released


# -- what happens inside of a block -------------------------------------------------------------------


class Dropping(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(hidden), 0.3, self.training)


class Islands(Block):
    """A part without a graph, and an output that has none."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.up(hidden).abs().mean()
        return super().forward(hidden) / (1 + scale) + super().forward(hidden).detach()


class InPlace(Block):
    """Changes of what the block has computed itself."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = self.up(hidden).clone()
        inner.mul_(0.5).tanh_()
        return self.down(inner).add_(hidden)


class NestedRegion(Block):
    """A region of the user inside of the block."""

    reentrant = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        again: torch.Tensor = checkpoint(super().forward, hidden, use_reentrant=self.reentrant)
        return super().forward(again)


class NestedReentrant(NestedRegion):
    reentrant = True


class SavedOnCpu(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().forward(hidden)


class Detached(Block):
    """The gradient goes past the block."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + super().forward(hidden.detach())


INSIDE = {
    "dropout in a block": Dropping,
    "a `no_grad` island and a detached part in a block": Islands,
    "in-place operations on what a block has computed": InPlace,
    "a region of the user in a block": NestedRegion,
    "a reentrant region of the user in a block": NestedReentrant,
    "`save_on_cpu` in a block": SavedOnCpu,
    "a block that detaches its input": Detached,
}


def _of(block: type[Block]) -> Job:
    return JOB._replace(model=type("Of" + block.__name__, (Stack,), {"block": lambda self, index: block()}))


@pytest.mark.sample(1)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.works(AREA, name, "right")) for name in INSIDE])
def test_what_a_block_does_keeps_its_bits(name: str, tier: str, tmp_path: Path) -> None:
    def trained(folder: Path, **options: Any) -> list[float]:
        job = _of(INSIDE[name])._replace(accumulation=2)
        with running(job, folder, **options) as engine:
            losses = [train_step(engine, job, step) for step in range(job.steps)]
            return losses + [float(value.double().sum()) for value in engine.module.state_dict().values()]

    assert trained(tmp_path / tier, activations=tier) == trained(tmp_path / "plain")


class Fails(Block):
    """Fails when it is computed again."""

    fails = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.fails and torch._C._current_graph_task_id() != -1:
            raise ValueError("of the test")
        return super().forward(hidden)


@pytest.mark.sample(1)
@pytest.mark.works(AREA, "an exception in the middle of a recomputation", "right")
@pytest.mark.parametrize("tier", ("device", *TIERS))
def test_after_an_exception_in_a_recomputation_training_goes_on(tier: str, tmp_path: Path) -> None:
    job = _of(Fails)
    with running(job, tmp_path / "plain") as engine:
        expected = [train_step(engine, job, step) for step in range(job.steps)]
    with running(job, tmp_path / tier, activations=tier) as engine:
        losses = [train_step(engine, job, 0)]
        engine.module.blocks[3].fails = True
        with pytest.raises(ValueError, match="of the test"):
            engine.backward(_square(engine, 1))
        engine.module.blocks[3].fails = False
        engine.zero_grad()
        assert sum(used(engine).values()) == 0
        assert losses + [train_step(engine, job, step) for step in (1, 2)] == expected
        if tier != "device":
            gives_back(engine)


class Overwrites(Stack):
    """Changes an input of a block after the block has run."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first(batch)
        for index, block in enumerate(self.blocks):
            before, hidden = hidden, block(hidden)
            if index == 2:
                with torch.no_grad():
                    before.mul_(2)
        return hidden


@pytest.mark.works(AREA, "an input of a block that is changed in place afterwards", "refused")
@pytest.mark.parametrize("tier", ("device", *TIERS))
def test_an_input_that_is_changed_afterwards_is_refused(tier: str, tmp_path: Path) -> None:
    """As torch does where nothing is moved. On a device it was copied already, or would be after the change."""
    job = JOB._replace(model=Overwrites)
    with running(job, tmp_path, activations=tier) as engine:
        for step in range(2):
            with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace operation"):
                engine.backward(_square(engine, step))
            engine.zero_grad()


def test_the_batch_and_small_tensors_are_not_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with running(JOB, tmp_path, activations="nvme") as engine:
        loss = engine(batch(0, shape=(15, 64))).square().mean()  # 3840 bytes, less than a page
        assert sum(used(engine).values()) == 0
        engine.backward(loss)
