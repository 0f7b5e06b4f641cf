"""Flipped bits in memory: that each is found in the step that is promised, and made again with the calm run's bits.

A cell of memory fails in one block, and flips its bit again in each step. Promised is the first step that audits the
block. A flip within a call may round away, and then changes nothing that an audit could compare.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn

from offload import testing
from offload.activations.audit import choose
from offload.aio import File
from offload.errors import AuditError, EngineFailed, IoError, NumericsError
from offload.states import State
from offload.torch_internals import inside_backward
from tests.support.drives.fault_injection import LateQueue, flip_bit, use_queue
from tests.support.drives.write_recorder import Done
from tests.support.oracle import Job, start, train_step

BLOCKS, STEPS, WIDTH = 3, 24, 32
IN_CALLS = ("weights after the forward", "saved activation", "gradient")
"""Faults in each call of one block."""
IN_MEMORY = ("weights before the forward", "weights in RAM", "moment in RAM")
"""Faults in memory that the update of one block has written, before or between its calls."""
WAITING = "gradient that waits for its update"
ON_DRIVES = ("read", "moment on the drive")
"""Faults that come once."""


class _Gradient(torch.autograd.Function):
    """The identity, whose backward passes the gradient to a function."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, change: Callable[[torch.Tensor], None]) -> torch.Tensor:
        ctx.change = change
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone()
        ctx.change(gradient)
        return gradient, None


class Block(nn.Module):
    """A block in whose memory bits flip, if it is told to."""

    fault = ""
    element, bit = 0, 0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def flip(self, where: str, values: torch.Tensor, again: bool) -> None:
        """Flips a bit in place, so that autograd does not notice, if this is the fault and no audit's second call."""
        if self.fault == where and not again:
            flip(values, self.element, self.bit)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        again = inside_backward()
        self.flip("weights before the forward", self.up.weight, again)
        inner = torch.tanh(self.up(hidden))
        changed: Any = _Gradient.apply
        output: torch.Tensor = self.down(changed(inner, lambda gradient: self.flip("gradient", gradient, again)))
        self.flip("weights after the forward", self.down.weight, again)
        self.flip("saved activation", inner, again)
        return hidden + output


def flip(values: torch.Tensor, element: int, bit: int) -> None:
    flat = values.data.view(-1).view(torch.int32)
    flat[element % len(flat)] ^= 1 << bit


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.first(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def loss(model: Any, step: int, micro: int) -> torch.Tensor:
    rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    value: torch.Tensor = model(rows).square().mean()
    return value


JOB = Job(Model, loss, steps=STEPS, lr=1e-2)


class FlippingQueue(LateQueue):
    """A queue that flips a bit of a read on its way from the drive."""

    flips = -1
    """Reads until the one that is changed."""

    def __init__(self) -> None:
        super().__init__(0, 0.0)

    def read(self, file: File, offset: int, buffer: memoryview, **_: Any) -> Any:
        future = self._inner.read(file, offset, buffer, checksum=True)
        self.flips -= 1
        if self.flips == 0:
            future.wait()
            buffer[len(buffer) // 2] ^= 16
            return Done(buffer, offset)
        return future


@cache
def calm() -> list[float]:
    with TemporaryDirectory() as folder:
        engine = start(JOB, ("nvme", "nvme"), Path(folder))
        losses = [train_step(engine, JOB, step) for step in range(STEPS)]
        engine.destroy(remove=True)
    return losses


def strike(seed: int, folder: Path, faults: tuple[str, ...] = IN_CALLS + IN_MEMORY + ON_DRIVES) -> tuple[str, str]:
    """Trains under one of `faults`. Returns where it is, and what found it."""
    chance = random.Random(seed)
    where, moment = chance.choice(faults), chance.randrange(1, 4)
    number, element, bit = chance.randrange(BLOCKS), chance.randrange(1 << 20), chance.randrange(32)
    # A copy of weights on a drive may be read again between forward and backward, and is right then.
    weights = {IN_CALLS[0]: "none", "weights in RAM": "cpu", IN_MEMORY[0]: chance.choice(["none", "cpu", "nvme"])}
    moments = {"moment in RAM": chance.choice(["none", "cpu"])}
    placement = (weights.get(where, "nvme"), moments.get(where, "nvme"))
    with pytest.MonkeyPatch.context() as patch:
        testing.replace(patch, "size.audit_share", 1.0)
        queue = FlippingQueue()
        use_queue(patch, lambda: queue)
        engine = start(JOB, placement, folder / f"{seed}", audit="random", durability="step")
        block: Any = engine.module.get_submodule(f"blocks.{number}")
        block.element, block.bit = element, bit
        seen, notice, losses = testing.inspect(engine), "", list[float]()
        unit = next(unit for unit, layout in enumerate(seen.layouts) if layout.name == f"blocks.{number}")
        promised = next(
            step for step in range(moment, STEPS) if (drawn := choose(0, step + 1, BLOCKS, 1)) and drawn.block == number
        )

        def train(step: int) -> float:
            engine.backward(value := loss(engine, step, 0))
            if block.fault == WAITING:
                flip(seen.waiting_gradient(unit, 0), element, bit)
            engine.step()
            return float(value.detach())

        words = f"seed {seed}: bit {bit} of {where} of block {number} in step {moment + 1}, {placement}"
        for step in range(STEPS):
            if step == moment:
                testing.settle(engine)
                block.fault = where
                if where == "read":
                    queue.flips = chance.randrange(1, 20)
                elif where == "moment on the drive":
                    path, place = seen.state_place(unit, State.EXP_AVG)
                    flip_bit(path, place + element % seen.state_bytes[unit][State.EXP_AVG], 1 << bit % 8)
            if block.fault in IN_MEMORY:
                # The checksum is made by the write, so a flip before it is none: see "What is not audited".
                testing.settle(engine)
            if block.fault in ("moment in RAM", "weights in RAM"):
                if where == "moment in RAM":
                    values = seen.residents[unit, State.EXP_AVG]
                else:
                    values = seen.pager.weight_updates.tier_buffer(unit).tensor(torch.float32)
                flip(values, element, bit)
            try:
                losses.append(train(step))
            except AuditError as error:
                assert f"step {step + 1}: " in str(error) and f"blocks.{number}" in str(error), (words, error)
                notice = "the audit" if step == promised else "a later audit"
                block.fault = ""
                engine.zero_grad()
                losses.append(train(step))
            except NumericsError:
                notice = "the norm"  # a high bit of an exponent: the step was not applied
                break
            except (IoError, EngineFailed) as error:
                assert "the bytes are damaged" in str(error)
                notice = "the compare of reads"
                break
            if where in (*IN_MEMORY, WAITING):
                assert notice or step < promised, f"{words}: not found in step {promised + 1}"
            if (notice and step > moment) or (where in ON_DRIVES and step == moment + 2):
                break
        changed = losses != calm()[: len(losses)]
        if where not in ON_DRIVES:
            # A low bit may round away in the steps that are audited, and in no other one.
            rounds = where in ("saved activation", "gradient") and bit < 8
            assert notice or not changed or rounds, f"{words}: never found, and audited in step {promised + 1}"
            # Steps before the audit were made with flipped bits: the audit finds the fault, and cannot undo them.
            if promised == moment and notice == "the audit":
                assert not changed, f"{words}: the step that was made again has other bits"
        elif where == "read":
            assert not changed and not notice, f"{words}: {notice}"
            notice = "read again"
        else:
            assert notice == "the compare of reads" and not changed, f"{words}: {notice}"
        testing.abandon(engine, remove=True)
        return where, notice or "changed nothing"


def test_flips_are_found_where_that_is_promised(tmp_path: Path) -> None:
    counts = Counter(strike(seed, tmp_path) for seed in range(7))
    assert counts.total() == 7


@pytest.mark.slow
def test_twenty_five_flips_of_gradients_that_wait(tmp_path: Path) -> None:
    """`-s` prints what found how many."""
    counts = Counter(strike(seed, tmp_path, (WAITING,)) for seed in range(25))
    print("\n".join(f"{count:4} {where}: {by}" for (where, by), count in sorted(counts.items())))
    assert counts.total() == 25


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_two_hundred_flips(part: int, tmp_path: Path) -> None:
    """`-s` prints what found how many."""
    counts = Counter(strike(100 + 50 * part + seed, tmp_path) for seed in range(50))
    print("\n".join(f"{count:4} {where}: {by}" for (where, by), count in sorted(counts.items())))
    assert counts.total() == 50
