"""`"audit": "random"` finds bits that have flipped before they are used, and changes no bit itself."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import offload
from offload import testing
from offload.activations.audit import SHARE, choose
from offload.errors import AuditError, EngineFailed, OffloadError, RankError
from offload.states import State
from offload.torch_internals import StorageUsers
from tests.support import models
from tests.support.devices.late_device import LateDevice, use_device
from tests.support.models import DROPOUT, LORA, MIXTURE, SHALLOW_DROPOUT
from tests.support.oracle import (
    Job,
    Result,
    accumulated_step,
    assert_same,
    assert_same_tensors,
    least_host_memory,
    run,
    small_pieces,
    start,
    train_step,
    trained,
    weights_of,
)
from tests.support.processes.device_process import engine_device
from tests.support.ranks import rank_pool

DISK = ("nvme", "nvme")


def audit_each_step(patch: pytest.MonkeyPatch) -> list[int]:
    """Makes every step audit a call; the list receives the number of checksums of each comparison."""
    compared: list[int] = []

    def compare(real: Callable[..., list[str]], first: dict[str, int], again: dict[str, int]) -> list[str]:
        compared.append(len(first.keys() & again.keys()))
        return real(first, again)

    testing.replace(patch, "size.audit_share", 1.0)
    testing.intercept(patch, "audit.compare", compare)
    return compared


@pytest.fixture
def audited(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return audit_each_step(monkeypatch)


def test_calls_are_drawn_alike_and_take_the_share_of_a_step_that_is_promised() -> None:
    steps, blocks, micro_batches = range(1, 8_001), 12, 4
    drawn = [choose(7, step, blocks, micro_batches) for step in steps]
    assert drawn == [choose(7, step, blocks, micro_batches) for step in steps]
    assert drawn != [choose(8, step, blocks, micro_batches) for step in steps]
    chosen = Counter(choice for choice in drawn if choice is not None)
    assert len(chosen) == blocks * micro_batches and max(choice.block for choice in chosen) == blocks - 1
    share = chosen.total() / blocks / micro_batches / len(steps)
    deviation = (SHARE / blocks / micro_batches / len(steps)) ** 0.5
    assert abs(share - SHARE) < 5 * deviation
    assert all(choose(7, step, 100, 4) is not None for step in range(100)), "400 calls: one of them is 0.25 %"
    assert choose(7, 1, 0, 1) is None, "a model without blocks"


@pytest.mark.sample(2)
@pytest.mark.works("Training", 'Audited gradients (`"audit": "random"`)', "right")
@pytest.mark.parametrize(
    ("job", "options"),
    [
        (DROPOUT._replace(accumulation=2), {}),
        (DROPOUT._replace(accumulation=2), {"schedule": "layer_major", "activations": "nvme", "seed": 10}),
        (DROPOUT._replace(dtype="bf16"), {"activations": "device", "speculate": True}),
        (LORA, {}),
    ],
    ids=["one by one", "layer by layer", "updates under the backward", "adapters"],
)
def test_no_bit_shows_whether_a_run_is_audited(
    job: Job, options: dict[str, Any], audited: list[int], tmp_path: Path
) -> None:
    by = accumulated_step if job.accumulation > 1 else train_step
    plain = run(job, DISK, tmp_path / "plain", by, **options)
    assert audited == []
    for placement in (DISK, ("none", "none")):
        audited.clear()
        assert_same(plain, run(job, placement, tmp_path / placement[0], by, audit="random", **options))
        assert len(audited) == job.steps, "each step has compared a call"
        assert min(audited) > 1, "its output, and gradients"


class _Flip(torch.autograd.Function):
    """The identity, whose backward flips the lowest bit of one element where it is told to."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, flips: Callable[[], bool]) -> torch.Tensor:
        ctx.flips = flips
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return flipped(gradient) if ctx.flips() else gradient, None


def flipped(values: torch.Tensor) -> torch.Tensor:
    values = values.clone()
    values.view(torch.int32).view(-1)[17] ^= 1
    return values


class Faulty(nn.Module):
    """A block that computes one call with a flipped bit, in the part "output" or "gradient", in the training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.faults: dict[str, int] = {"output": -1, "gradient": -1}
        """For each part the number of calls until the one that fails; counted down."""

    def fails(self, part: str) -> bool:
        self.faults[part] -= 1
        return self.faults[part] == 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        flip: Any = _Flip.apply
        output: torch.Tensor = self.down(flip(self.up(values), partial(self.fails, "gradient")).relu())
        return flipped(output) if self.fails("output") else output


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(61, 16), nn.Linear(16, 61)
        self.blocks = nn.ModuleList(Faulty() for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


STACK = Job(Stack, models.mixture_loss, accumulation=3, steps=4)


class TiedStack(Stack):
    """A stack whose blocks share a weight, which the model's own code uses too."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[1:]:
            assert isinstance(block, Faulty)
            block.up.weight = self.blocks[0].get_parameter("up.weight")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = super().forward(ids)
        return logits + F.linear(self.embedding(ids), self.blocks[0].get_parameter("up.weight")).mean()


@pytest.mark.sample(3)
@pytest.mark.parametrize("part", ["output", "gradient"])
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (Stack, {}),
        (Stack, {"schedule": "layer_major"}),
        (Stack, {"activations": "nvme"}),
        (TiedStack, {}),
    ],
    ids=["plain", "in turns", "recomputed", "tied"],
)
def test_a_flipped_bit_stops_the_step_which_is_made_again(
    part: str, model: Callable[[], nn.Module], options: dict[str, Any], audited: list[int], tmp_path: Path
) -> None:
    job = STACK._replace(model=model)
    by = accumulated_step if "schedule" in options else train_step
    calm = run(job, DISK, tmp_path / "calm", by, **options)
    engine = start(job, DISK, tmp_path / "faulty", audit="random", **options)
    losses = [by(engine, job, step) for step in range(2)]
    choice = choose(job.seed, 3, 3, 3)
    assert choice is not None
    block = engine.module.get_submodule(f"blocks.{choice.block}")
    assert isinstance(block, Faulty)
    # The forward of the call; or its backward, which the audit has computed just before.
    block.faults[part] = choice.micro_batch + 1 + (part == "gradient")
    before = weights_of(engine)
    words = f"step 3: the {part}.* of blocks.{choice.block}, micro-batch {choice.micro_batch}, came out"
    with pytest.raises(AuditError, match=words):
        by(engine, job, 2)
    assert engine.global_steps == 2
    for name, values in weights_of(engine).items():
        assert torch.equal(values, before[name]), name
    engine.zero_grad()
    losses += [by(engine, job, step) for step in range(2, 4)]
    assert losses == calm.losses
    for name, values in weights_of(engine).items():
        assert torch.equal(values, calm.weights[name]), name
    engine.destroy(remove=True)


class Twice(Stack):
    """A model that calls each block twice, whose gradients are added up before anybody sees them."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in (*self.blocks, *self.blocks):
            hidden = hidden + block(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


class Summed(nn.Module):
    """A block that saves no input."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(16))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.bias


class InPlace(Stack):
    """A model that changes the inputs of its blocks after their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Summed() for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            values = hidden + 1
            output = block(values)
            hidden = values.mul_(2) + output
        logits: torch.Tensor = self.head(hidden)
        return logits


class Reentrant(nn.Module):
    """A block with a part that a reentrant checkpoint computes again, behind one that no checkpoint does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = checkpoint(self.inner, self.norm(values), use_reentrant=True)
        return output


class ReentrantParts(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Reentrant() for _ in range(3))


@pytest.mark.parametrize("model", [Twice, InPlace, ReentrantParts])
def test_what_cannot_be_compared_passes(model: Callable[[], nn.Module], audited: list[int], tmp_path: Path) -> None:
    job = STACK._replace(model=model)
    assert_same(run(job, DISK, tmp_path / "plain"), run(job, DISK, tmp_path / "audited", audit="random"))
    assert audited == []


def test_a_model_with_frozen_and_unused_layers_and_a_counting_buffer(audited: list[int], tmp_path: Path) -> None:
    assert_same(run(MIXTURE, DISK, tmp_path / "plain"), run(MIXTURE, DISK, tmp_path / "audited", audit="random"))
    assert 0 < len(audited) <= MIXTURE.steps


class FrozenMiddle(Stack):
    """A stack with a block that does not train, above one that does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)


def test_of_a_frozen_block_above_trainable_ones_the_output_is_compared(audited: list[int], tmp_path: Path) -> None:
    job = STACK._replace(model=FrozenMiddle)
    drawn = [choose(job.seed, step, 3, job.accumulation) for step in range(1, job.steps + 1)]
    frozen = [choice.block == 1 for choice in drawn if choice is not None]
    plain = run(job, DISK, tmp_path / "plain", accumulated_step)
    assert_same(plain, run(job, DISK, tmp_path / "audited", accumulated_step, audit="random"))
    assert [compared == 1 for compared in audited] == frozen and 0 < sum(frozen) < len(drawn)


class Wide(nn.Module):
    """Blocks whose updates take several tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(128, 128) for _ in range(3)))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.blocks(values)
        return output


def wide_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    rows = torch.randn(4, 128, generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = model(rows).square().mean()
    return loss


WIDE = Job(Wide, wide_loss, steps=6)


def rows_of(step: int, micro: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(3 * step + micro))


def square_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    loss: torch.Tensor = model(rows_of(step, micro)).square().mean()
    return loss


class Normed(nn.Module):
    """Blocks whose norm changes buffers that autograd has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(3)))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.blocks(rows)
        return output


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("placement", [("none", "none"), DISK], ids=["in memory", "paged"])
def test_statistics_of_a_norm_are_those_of_a_run_without_an_audit(
    placement: tuple[str, str], accumulation: int, audited: list[int], tmp_path: Path
) -> None:
    job = Job(Normed, square_loss, steps=6, accumulation=accumulation)
    plain = run(job, placement, tmp_path / "plain")
    assert "blocks.0.1.running_mean" in plain.weights
    assert_same(plain, run(job, placement, tmp_path / "audited", audit="random"))
    assert audited == [5] * job.steps, "the output, two weights and two biases"


class Tied(nn.Module):
    """Two of the blocks have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.tie()

    def tie(self) -> None:
        self.blocks[2].get_submodule("0").weight = self.blocks[0].get_parameter("0.weight")

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            rows = block(rows)
        return rows


class UsedElsewhere(Tied):
    """The model uses the weight of a block before and after the block."""

    def tie(self) -> None:
        return

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        weight = self.blocks[1].get_parameter("0.weight")
        return F.linear(super().forward(F.linear(rows, weight)), weight)


class UsedTwiceInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(self.up(rows).tanh(), self.up.weight)


class TiedTwice(Tied):
    """A weight is used twice in each of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(UsedTwiceInside() for _ in range(3))
        self.blocks[2].get_submodule("up").weight = self.blocks[0].get_parameter("up.weight")


@pytest.mark.parametrize("model", [Tied, UsedElsewhere, TiedTwice])
@pytest.mark.parametrize("placement", [("none", "none"), DISK], ids=["in memory", "paged"])
def test_of_a_weight_with_other_uses_the_part_of_the_block_is_compared(
    placement: tuple[str, str], model: Callable[[], nn.Module], audited: list[int], tmp_path: Path
) -> None:
    job = Job(model, square_loss, steps=8, accumulation=2)
    plain = run(job, placement, tmp_path / "plain")
    assert_same(plain, run(job, placement, tmp_path / "audited", audit="random"))
    assert audited == [3] * job.steps, "the output, the weight and the bias"


class Routed(nn.Module):
    """A block that gives the loss two tensors by attributes: one that it uses once more, and one that it uses twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.once = self.up(rows)
        self.twice = self.once.tanh()
        output: torch.Tensor = self.twice + self.down(self.twice)
        return output


class RoutedBlocks(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Routed() for _ in range(3))


def routed_loss(attribute: str, model: Any, step: int, micro: int) -> torch.Tensor:
    loss: torch.Tensor = square_loss(model, step, micro)
    if step % 2:
        loss = loss + sum(getattr(block, attribute).square().mean() for block in model.module.blocks)
    return loss


@pytest.mark.parametrize("attribute", ["once", "twice"])
def test_a_tensor_that_a_block_gives_the_loss_by_an_attribute_is_no_flip(
    attribute: str, audited: list[int], tmp_path: Path
) -> None:
    job = Job(RoutedBlocks, partial(routed_loss, attribute), steps=4)
    assert_same(run(job, DISK, tmp_path / "plain"), run(job, DISK, tmp_path / "audited", audit="random"))
    assert audited == [5, 1, 5, 1], "in every other step the output alone"


def loss_after_another_gradient(model: Any, step: int, micro: int) -> torch.Tensor:
    rows = rows_of(step, micro).requires_grad_()
    output = model(rows)
    (sensitivity,) = torch.autograd.grad(output.sum(), rows, retain_graph=True)
    loss: torch.Tensor = (output - sensitivity).square().mean()
    return loss


def test_a_gradient_that_a_loss_asks_for_first_is_no_flip(audited: list[int], tmp_path: Path) -> None:
    job = Job(Tied, loss_after_another_gradient, steps=4)
    assert_same(run(job, DISK, tmp_path / "plain"), run(job, DISK, tmp_path / "audited", audit="random"))
    assert audited == [1] * job.steps, "the output alone"


def unit_of(engine: Any, block: str) -> int:
    return next(unit for unit, layout in enumerate(testing.inspect(engine).layouts) if layout.name == block)


@pytest.mark.parametrize("tier", ["none", "cpu"])
def test_a_flip_in_the_only_copy_of_a_moment_stops_the_engine(tier: str, audited: list[int], tmp_path: Path) -> None:
    calm = run(WIDE, DISK, tmp_path / "calm")
    options: dict[str, Any] = {"audit": "random", "durability": {"every": 2}}
    engine = start(WIDE, (tier, tier), tmp_path / "run", **options)
    losses = [train_step(engine, WIDE, step) for step in range(3)]
    testing.settle(engine)
    drawn = choose(WIDE.seed, 4, 3, 1)
    assert drawn is not None
    # The last commit is of step 2, so no file contains the moments of step 3.
    moment = testing.inspect(engine).residents[unit_of(engine, f"blocks.{drawn.block}"), State.EXP_AVG_SQ]
    moment.view(torch.int32)[-1] ^= 1
    with pytest.raises(AuditError, match=rf"step 4: exp_avg_sq of blocks\.{drawn.block} in memory .* has stopped"):
        train_step(engine, WIDE, 3)
    with pytest.raises(EngineFailed, match="the last committed step is intact"):
        engine.zero_grad()
        train_step(engine, WIDE, 3)
    testing.abandon(engine)
    engine = start(WIDE, (tier, tier), tmp_path / "run", resume="must", **options)
    assert engine.global_steps == 2
    assert losses[:2] + [train_step(engine, WIDE, step) for step in range(2, WIDE.steps)] == calm.losses
    engine.destroy(remove=True)


KEEPS_GRADIENTS = pytest.mark.skipif(
    engine_device() != "cpu" or not StorageUsers.counted(), reason="gradients are copied on this device or build"
)
WAITING: dict[str, tuple[Job, tuple[str, str], dict[str, Any]]] = {
    "in host memory": (WIDE, DISK, {}),
    "kept": (STACK._replace(accumulation=1), DISK, {}),
    "on the device": (WIDE._replace(accumulation=2), ("none", "none"), {"device_memory": 1 << 24}),
    "in a file": (WIDE._replace(accumulation=2), DISK, {}),
    "beside its update": (WIDE, DISK, {"speculate": True}),
    "rounded": (WIDE._replace(accumulation=2, dtype="bf16"), DISK, {"gradients": "16bit"}),
}


@pytest.mark.parametrize(
    "where", [pytest.param("kept", marks=KEEPS_GRADIENTS), *(where for where in WAITING if where != "kept")]
)
def test_a_flip_in_a_gradient_that_waits_for_its_update_stops_the_step(
    where: str, audited: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job, placement, options = WAITING[where]
    if where == "on the device":
        use_device(monkeypatch, LateDevice(0, 0.9))
    if where == "kept":
        testing.replace(monkeypatch, "size.kept_gradient", 1)
    if where == "in a file":
        small_pieces(monkeypatch)
        options = {"host_memory": least_host_memory(job, tmp_path / "least")}
    calm = run(job, placement, tmp_path / "calm", **options)
    engine = start(job, placement, tmp_path / "run", audit="random", **options)
    losses = [train_step(engine, job, step) for step in range(2)]
    seen, drawn = testing.inspect(engine), choose(job.seed, 3, 3, job.accumulation)
    assert drawn is not None
    # Hooks on the gradients of the block itself refer to them, so the engine keeps those of another unit alone.
    name = "head" if where == "kept" else f"blocks.{drawn.block}"
    unit = unit_of(engine, name)
    for micro in range(job.accumulation):
        engine.backward(job.loss(engine, 2, micro))
        if micro < job.accumulation - 1:
            engine.step()
    if where == "beside its update":
        testing.settle_early_updates(engine)
    gradient = seen.waiting_gradient(unit, 0)
    assert (seen.gradients_spill(unit), seen.gradients_stay(unit)) == (where == "in a file", where == "on the device")
    assert bool(seen.gradients_kept(unit)) == (where == "kept")
    gradient.view(torch.uint8)[-1] ^= 128  # the sign, which no sum of squares shows
    with pytest.raises(AuditError, match=rf"step 3: the gradient of {name}\..* has other bits"):
        engine.step()
    assert engine.global_steps == 2
    engine.zero_grad()
    assert losses + [train_step(engine, job, step) for step in range(2, job.steps)] == calm.losses
    engine.destroy(remove=True)


@pytest.mark.parametrize("tier", ["none", "cpu"])
def test_a_flip_in_frozen_weights_is_found_at_the_next_audit_of_their_block(
    tier: str, audited: list[int], tmp_path: Path
) -> None:
    job = LORA._replace(steps=8)
    calm = run(job, DISK, tmp_path / "calm")
    engine = start(job, (tier, "nvme"), tmp_path / "run", audit="random", durability="step")
    seen = testing.inspect(engine)
    names = [layout.name for layout in seen.layouts if layout.name.rpartition(".")[2].isdigit()]
    draws = [choose(job.seed, step + 1, len(names), 1) for step in range(job.steps)]
    again = next(step for step in range(1, job.steps - 1) if draws[step] in draws[:step])
    losses = [train_step(engine, job, step) for step in range(again)]
    testing.settle(engine)
    block = draws[again]
    assert block is not None
    unit = unit_of(engine, names[block.block])
    copies = list[torch.Tensor]()
    seen.pager.read_copies(unit, lambda pieces: copies.append(pieces[-1]))
    copies[0][-5] ^= 1  # the frozen weights follow the trainable ones
    copies.clear()
    with pytest.raises(AuditError, match=rf"step {again + 1}: weight of .*{names[block.block]} .* read again"):
        train_step(engine, job, again)
    engine.zero_grad()
    assert losses + [train_step(engine, job, step) for step in range(again, job.steps)] == calm.losses
    engine.destroy(remove=True)


def test_an_edit_between_two_micro_batches_is_no_flip(
    audited: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    testing.replace(monkeypatch, "size.update_tile", range(16_000, 48_000))
    job = WIDE._replace(accumulation=2, steps=3)
    engine = start(job, ("nvme", "cpu"), tmp_path / "run", audit="random", durability="none")
    assert testing.inspect(engine).tile_numel < 128 * 128, "an update takes several tiles"
    for step in range(job.steps):
        for micro in range(2):
            engine.backward(wide_loss(engine, step, micro))
            for weight in engine.module.parameters():
                with torch.no_grad():
                    weight.mul_(0.5)
            engine.step()
    assert engine.global_steps == job.steps and audited
    engine.destroy(remove=True)


class PartlyUsed(nn.Module):
    """A block of which some calls use the bias alone."""

    whole = True

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(128, 128)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(values) if self.whole else values + self.inner.bias
        return output


class PartlyUsedBlocks(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(PartlyUsed() for _ in range(3)))


def partly_used_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    rows = torch.randn(4, 128, generator=torch.Generator().manual_seed(step))
    for block in model.module.blocks:
        block.whole = micro == 0
    loss: torch.Tensor = model(rows.to(next(model.module.parameters()).dtype)).float().square().mean()
    return loss


@pytest.mark.parametrize(
    ("dtype", "options"),
    [("fp32", {}), ("bf16", {"gradients": "16bit", "schedule": "layer_major"}), ("fp32", {"host_memory": 0})],
    ids=["in memory", "rounded", "in a file"],
)
def test_gradients_that_a_user_sets_drops_or_adds_after_the_last_micro_batch_are_no_flips(
    dtype: str, options: dict[str, Any], audited: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = Job(PartlyUsedBlocks, partly_used_loss, steps=4, accumulation=2, dtype=dtype)
    if "host_memory" in options:
        small_pieces(monkeypatch)
        options = {"host_memory": least_host_memory(job, tmp_path / "least")}
    engine = start(job, DISK, tmp_path / "run", audit="random", **options)
    weight = engine.module.get_parameter("blocks.0.inner.weight")
    for step in range(job.steps):
        for micro, last in enumerate((True, False)):
            engine.set_gradient_accumulation_boundary(last)
            if step == 2 and not last:
                engine.zero_grad()
            engine.backward(job.loss(engine, step, micro))
        engine.set_gradient_accumulation_boundary(True)
        if step == 3:
            offload.safe_set_full_grad(weight, torch.ones(128, 128))
        engine.step()
    assert engine.global_steps == job.steps
    engine.destroy(remove=True)


def _of_two_ranks(job: Job, folder: Path, audit: str | None) -> tuple[Result, int]:
    with pytest.MonkeyPatch.context() as patch:
        compared = audit_each_step(patch)
        engine = rank_pool.start(job, DISK, folder, audit=audit)
        result = trained(engine, job)
        engine.destroy(remove=True)
        return result, len(compared)


@pytest.mark.parametrize(
    "job",
    [SHALLOW_DROPOUT, SHALLOW_DROPOUT._replace(quantized="weights"), Job(UsedElsewhere, square_loss, steps=4)],
    ids=["plain", "codes of weights", "a weight with other uses"],
)
def test_two_ranks_audit_the_same_calls(job: Job, ranks: rank_pool.RankPool, tmp_path: Path) -> None:
    plain, audited_ranks = (ranks.run(_of_two_ranks, job, tmp_path, audit) for audit in (None, "random"))
    for (left, none), (right, all_steps) in zip(plain, audited_ranks, strict=True):
        assert_same(left, right)
        assert (none, all_steps) == (0, job.steps)


RANKS = WIDE._replace(accumulation=1, steps=5)
ON_RANKS: dict[str, Any] = {"audit": "random", "durability": "step"}


def _flip_on_one_rank(where: str, folder: Path) -> str:
    """Flips a bit on rank 1 in step 3, and returns the error with which this rank ends."""
    with pytest.MonkeyPatch.context() as patch:
        audit_each_step(patch)
        engine = rank_pool.start(RANKS, ("cpu", "cpu"), folder, **ON_RANKS)
        for step in range(2):
            train_step(engine, RANKS, step)
        drawn = choose(RANKS.seed, 3, 3, 1)
        assert drawn is not None
        unit, seen, is_hit = (
            unit_of(engine, f"blocks.{drawn.block}"),
            testing.inspect(engine),
            os.environ["RANK"] == "1",
        )
        try:
            testing.settle(engine)
            if is_hit and where == "moment":
                seen.residents[unit, State.EXP_AVG].view(torch.int32)[-1] ^= 1
            engine.backward(RANKS.loss(engine, 2, 0))
            if is_hit and where != "moment":
                seen.waiting_gradient(unit, 0).view(torch.int32)[-1] ^= 1
            engine.step()
            train_step(engine, RANKS, 3)
        except OffloadError as error:
            if is_hit and where == "gradient, and goes on":
                with pytest.raises(RankError, match="rank 1 drops its gradients"):
                    engine.zero_grad()
            with contextlib.suppress(RankError):
                engine.destroy()
            return f"{type(error).__name__}: {error}"
        raise AssertionError("the step was made")


def _resumed(folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    engine = rank_pool.start(RANKS, ("cpu", "cpu"), folder, resume="auto", **ON_RANKS)
    first = engine.global_steps
    for step in range(first, RANKS.steps):
        train_step(engine, RANKS, step)
    weights = weights_of(engine)
    engine.destroy(remove=True)
    return first, weights


@pytest.mark.parametrize("where", ["gradient", "gradient, and goes on", "moment"])
def test_a_flip_on_one_rank_ends_the_others_which_name_it_and_all_resume(where: str, tmp_path: Path) -> None:
    with rank_pool.pool(2) as ranks:
        calm = ranks.run(_resumed, tmp_path / "calm")
        rank1, rank0 = ranks.run(_flip_on_one_rank, where, tmp_path / "run")
        assert re.match("AuditError: step 3: ", rank0)
        cause = "drops its gradients" if "goes on" in where else r".*, after offload\.errors\.AuditError: step 3: "
        assert re.match(f"RankError: .*rank 1 {cause}", rank1)
        resumed = ranks.run(_resumed, tmp_path / "run")
    for (_, expected), (first, weights) in zip(calm, resumed, strict=True):
        assert first == 2
        assert_same_tensors(expected, weights)
