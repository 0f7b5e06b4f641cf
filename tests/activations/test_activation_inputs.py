"""Inputs of blocks that are computed again wait in any tier, in any form and graph, and come back with their bits."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import offload
from offload.errors import UsageError
from offload.swapper.memory.host_arena import process_memory
from tests.models.test_autograd import LOOPS, Loop
from tests.models.test_module_kinds import DISK
from tests.support import models
from tests.support.modules.checkpointed import (
    INPUT,
    JOB,
    MEMORY,
    WIDTH,
    Block,
    Stack,
    batch,
    gives_back,
    running,
    small_inputs_move,
    used,
)
from tests.support.modules.checkpointed import TIERS as ALL_TIERS
from tests.support.oracle import Job, assert_same, room_for, run, train_step
from tests.support.processes.device_process import engine_device

AREA = "Activation checkpointing"
TIERS = ("cpu", "nvme")

CPU_ONLY = ("complex", "negated", "sparse")
"""What the test device has no kernels for."""


@pytest.fixture(autouse=True)
def _tiny_inputs_move(monkeypatch: pytest.MonkeyPatch) -> None:
    small_inputs_move(monkeypatch)


class Reformed(Stack):
    """A model that gives each block its hidden states in another form, and takes the output back."""

    def reform(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first(batch)
        for block in self.blocks:
            hidden = block(self.reform(hidden))
        return hidden


class Transposed(Reformed):
    def reform(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.t().contiguous().t()


class Strided(Reformed):
    """Every second column of a larger tensor: not dense."""

    def reform(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.stack((hidden, -hidden), -1)[..., 0]


class Expanded(Reformed):
    def reform(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.mean(0, keepdim=True).expand_as(hidden) + hidden.mean(1, keepdim=True).expand_as(hidden)


class ExpandedAlone(Reformed):
    def reform(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden * 2).mean(0, keepdim=True).expand_as(hidden)


class Sliced(Reformed):
    """A part of a larger tensor that is dense by itself."""

    def reform(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat((hidden, -hidden))[16 : 16 + len(hidden)]


class Complex(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.real + hidden.imag.sin())


class Conjugated(Reformed):
    """Complex inputs, some of which are only marked as conjugated."""

    def block(self, index: int) -> nn.Module:
        return Complex()

    def reform(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.complex(hidden, hidden * 0.5).conj()


class Negated(Reformed):
    """The imaginary part of a conjugated tensor, which is only marked as negated."""

    def reform(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(torch.stack((hidden, hidden * 0.5), -1)).conj().imag * 1.0 + hidden

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first(batch)
        for block in self.blocks:
            hidden = block(torch.complex(hidden, hidden * 0.5).conj().imag)
        return hidden


class FromSparse(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.to_dense())


class SparseInputs(Reformed):
    def block(self, index: int) -> nn.Module:
        return FromSparse()

    def reform(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.relu().to_sparse()


class Halved(Reformed):
    """Inputs of two dtypes and sizes in turn."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first(batch)
        for index, block in enumerate(self.blocks):
            hidden = block(hidden) if index % 2 else block(hidden[: 8 * (index + 1)]).repeat(9, 1)[: len(hidden)]
        return hidden


class ChannelsLast(nn.Module):
    """A CNN with BatchNorm in channels_last, whose kernels depend on strides."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(images).contiguous(memory_format=torch.channels_last)
        for block in self.blocks:
            hidden = block(hidden)
        assert hidden.is_contiguous(memory_format=torch.channels_last) or not hidden.is_cpu
        return self.head(hidden.mean((2, 3)))


def images_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(step, micro, (4, 3, 8, 8))).float().square().mean()
    return loss


def _job(model: type[nn.Module]) -> Job:
    return JOB._replace(model=model)


FORMS = {
    "inputs with permuted strides": _job(Transposed),
    "inputs that are not dense": _job(Strided),
    "expanded inputs": _job(Expanded),
    "inputs that are one row, expanded": _job(ExpandedAlone),
    "inputs that are a part of a tensor": _job(Sliced),
    "complex inputs, conjugated": _job(Conjugated),
    "inputs that are marked as negated": _job(Negated),
    "sparse inputs": _job(SparseInputs),
    "inputs of several sizes": _job(Halved),
    "a CNN with BatchNorm in channels_last": JOB._replace(model=ChannelsLast, loss=images_loss),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("tier", ["device", *TIERS])
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.works(AREA, name, "right")) for name in FORMS])
def test_inputs_of_every_form_keep_the_bits(name: str, tier: str, tmp_path: Path) -> None:
    if engine_device() != "cpu" and any(word in name for word in CPU_ONLY):
        pytest.skip("the test device has no kernels for such tensors")
    job = FORMS[name]
    plain = run(job, MEMORY, tmp_path / "plain")
    assert_same(plain, run(job, MEMORY, tmp_path / tier, activations=tier))


class Pair(NamedTuple):
    x: torch.Tensor
    scale: float


@dataclasses.dataclass
class State:
    x: torch.Tensor
    scale: float


class Takes(Block):
    """A block with arguments of many kinds, that notes what it has seen in a list of the caller."""

    def forward(self, hidden: torch.Tensor, *rest: Any, notes: list[torch.Tensor], **named: Any) -> torch.Tensor:  # type: ignore[override]
        pair, state, inner = rest[0], named["state"], named["inner"]
        hidden = hidden + pair.x * pair.scale + state.x * state.scale + inner["deep"][0] + inner["deep"][1]
        output = super().forward(hidden)
        notes.append(output.square().mean())
        return output


class Passes(Stack):
    """The mean of what the blocks have noted is part of the output, as a loss of experts is."""

    def block(self, index: int) -> nn.Module:
        return Takes()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first(batch)
        notes: list[torch.Tensor] = []
        for block in self.blocks:
            half = hidden * 0.5
            inner = collections.OrderedDict(deep=(half, hidden[0]), other=None)
            hidden = block(hidden, Pair(half, 0.1), notes=notes, state=State(half * 2, 0.2), inner=inner)
        assert len(notes) == len(self.blocks)
        return hidden + torch.stack(notes).mean()


@pytest.mark.sample(1)
@pytest.mark.works(AREA, "inputs in tuples, dictionaries, dataclasses, and a list that a block extends", "right")
@pytest.mark.parametrize("tier", ["device", *TIERS])
def test_arguments_of_every_kind_keep_the_bits(tier: str, tmp_path: Path) -> None:
    job = _job(Passes)
    plain = run(job, MEMORY, tmp_path / "plain")
    assert_same(plain, run(job, MEMORY, tmp_path / tier, activations=tier))


BUFFERS_TIERS = ("device", "cpu", "nvme")


class Normed(Block):
    """A block with statistics that its forward changes, and does not read while it trains."""

    norm: Any = nn.BatchNorm1d
    options: dict[str, Any] = {}  # noqa: RUF012  # never changed

    def __init__(self) -> None:
        super().__init__()
        self.statistics = self.norm(WIDTH, **self.options)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(self.statistics(hidden))


class Cumulative(Normed):
    options = {"momentum": None}  # noqa: RUF012


class Tracking(Normed):
    norm = nn.InstanceNorm1d
    options = {"track_running_stats": True, "affine": True}  # noqa: RUF012

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return Block.forward(
            self, self.statistics(hidden.view(4, -1, WIDTH).transpose(1, 2)).transpose(1, 2).flatten(0, 1)
        )


def _stack(block: type[nn.Module]) -> Job:
    return JOB._replace(model=type("Of" + block.__name__, (Stack,), {"block": lambda self, index: block()}))


NORMS = {
    "statistics of BatchNorm": Normed,
    "statistics of BatchNorm with a cumulative mean": Cumulative,
    "statistics of InstanceNorm": Tracking,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("tier", BUFFERS_TIERS)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.works(AREA, name, "right")) for name in NORMS])
def test_statistics_are_those_of_the_plain_model(name: str, tier: str, tmp_path: Path) -> None:
    """With several micro-batches, and two forwards before a backward."""
    job = _stack(NORMS[name])._replace(accumulation=2)
    plain = run(job, MEMORY, tmp_path / "plain")
    assert any("running_mean" in key for key in plain.weights)
    assert_same(plain, run(job, MEMORY, tmp_path / tier, activations=tier))

    def both(model: Any, step: int, micro: int) -> torch.Tensor:
        return JOB.loss(model, step, micro) + JOB.loss(model, step, micro + 2)

    job = job._replace(loss=both)
    plain = run(job, MEMORY, tmp_path / "plain")
    assert_same(plain, run(job, MEMORY, tmp_path / tier, activations=tier))


class Counting(Block):
    """A block that reads the count that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(hidden) / self.calls


class Replacing(Counting):
    """The same by assignment."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return Block.forward(self, hidden) / self.calls


class Spectral(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.spectral_norm(self.up)


REFUSED = {
    "a block that changes another buffer in its forward": Counting,
    "a block that replaces another buffer in its forward": Replacing,
    "`spectral_norm` in a block": Spectral,
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("tier", BUFFERS_TIERS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.works(AREA, name, "refused")) for name in REFUSED]
)
def test_a_block_that_changes_another_buffer_is_refused(name: str, tier: str, tmp_path: Path) -> None:
    with running(_stack(REFUSED[name]), tmp_path, activations=tier) as engine:
        for _ in range(2):
            with pytest.raises(UsageError, match=r"blocks.0 changes its buffer .* in forward"):
                JOB.loss(engine, 0, 0)
        engine.eval()
        with torch.no_grad():
            JOB.loss(engine, 0, 0)  # is not computed again


class Table(Block):
    """A block with a table that grows with the batch, and a constant that is made anew in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(0), persistent=False)
        self.register_buffer("constant", torch.ones(1), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if len(self.table) < len(hidden):
            self.table = torch.arange(len(hidden), device=hidden.device) / 64
        self.constant = torch.ones(1, device=hidden.device)
        return super().forward(hidden) + self.table[: len(hidden), None] * self.constant


@pytest.mark.sample(1)
@pytest.mark.works(AREA, "a block with a table that grows", "right")
@pytest.mark.parametrize("tier", BUFFERS_TIERS)
def test_a_table_that_grows_keeps_the_bits(tier: str, tmp_path: Path) -> None:
    job = _stack(Table)
    plain = run(job, MEMORY, tmp_path / "plain")
    with running(job, tmp_path / tier, activations=tier) as engine:
        assert [train_step(engine, job, step) for step in range(job.steps)] == plain.losses


class Rewrapped(Stack):
    """Each input goes to two blocks: as it is, and as a view of another shape."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first(batch)
        for first, second in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            hidden = first(hidden) + second(hidden.view(4, -1, WIDTH)).view(-1, WIDTH)
        return hidden


@pytest.mark.works(AREA, "views of one input: kept once", "right")
@pytest.mark.sample(1)
@pytest.mark.parametrize("tier", TIERS)
def test_views_of_an_input_are_kept_once(tier: str, tmp_path: Path) -> None:
    job = _job(Rewrapped)
    plain = run(job, MEMORY, tmp_path / "plain")
    with running(job, tmp_path / tier, activations=tier) as engine:
        losses = [train_step(engine, job, step) for step in range(job.steps)]
        assert losses == plain.losses
        loss = job.loss(engine, 9, 0)
        assert sum(used(engine).values()) == len(engine.module.blocks) // 2 * INPUT
        del loss


class Overwritten(Stack):
    """Memory that is an input twice, with other values. The graph of the first is alive, and never run backward."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first(batch)
        self.unused: list[torch.Tensor] = []
        for block in self.blocks:
            self.unused.append(block(hidden))
            hidden.mul_(0.5)
            hidden = block(hidden)
        return hidden


@pytest.mark.sample(1)
@pytest.mark.parametrize("tier", TIERS)
def test_memory_that_has_changed_is_another_input(tier: str, tmp_path: Path) -> None:
    job = _job(Overwritten)
    plain = run(job, MEMORY, tmp_path / "plain")
    assert_same(plain, run(job, MEMORY, tmp_path / tier, activations=tier))


@pytest.mark.works(AREA, "an encoder's output for all layers of a decoder: kept once", "right")
@pytest.mark.sample(1)
@pytest.mark.parametrize("tier", TIERS)
def test_the_output_of_an_encoder_is_kept_once(tier: str, tmp_path: Path) -> None:
    job = Job(models.t5, models.translation_loss)
    with running(job, tmp_path, activations=tier) as engine:
        loss = job.loss(engine, 0, 0)
        hidden = 2 * 32 * 32 * 4
        layers = 2 * 2
        # Each layer's hidden states, and once the encoder's. Position biases of the two stacks are inputs of the second
        # layers: 4 heads of 32 x 32.
        biases = 2 * (4 * 32 * 32 * 4)
        assert sum(used(engine).values()) == (layers + 1) * hidden + biases
        engine.backward(loss)


@pytest.mark.works(AREA, "LoRA: no input of a frozen prefix is kept", "right")
@pytest.mark.sample(1)
@pytest.mark.parametrize("tier", TIERS)
def test_no_input_of_a_frozen_prefix_is_kept(tier: str, tmp_path: Path) -> None:
    def frozen_prefix() -> nn.Module:
        model = Stack()
        model.first.requires_grad_(False)
        model.blocks[:5].requires_grad_(False)
        return model

    job = JOB._replace(model=frozen_prefix)
    plain = run(job, MEMORY, tmp_path / "plain")
    with running(job, tmp_path / tier, activations=tier) as engine:
        loss = job.loss(engine, 0, 0)
        # The first block that trains has an input without a graph, which stays where it is.
        assert sum(used(engine).values()) == 2 * INPUT
        engine.backward(loss)
        engine.step()
        assert float(loss.detach()) == plain.losses[0]
        assert [train_step(engine, job, step) for step in (1, 2)] == plain.losses[1:]


def cached_llama() -> nn.Module:
    model = models.llama()
    model.config.use_cache = True
    return model


def cached_t5() -> nn.Module:
    model = models.t5()
    model.config.use_cache = True
    return model


CACHED = {
    "`use_cache=True`: Llama": Job(cached_llama, models.language_loss, steps=3),
    "`use_cache=True`: T5": Job(cached_t5, models.translation_loss, steps=3),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("tier", ["device", *TIERS])
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.works(AREA, name, "right")) for name in CACHED])
def test_a_model_with_a_cache_keeps_its_bits(name: str, tier: str, tmp_path: Path) -> None:
    job = CACHED[name]
    plain = run(job, MEMORY, tmp_path / "plain")
    assert_same(plain, run(job, MEMORY, tmp_path / tier, activations=tier))


def _with_prefix(engine: offload.Engine) -> float:
    """A loss with keys and values of before, as of a learned prefix."""
    ids = models.tokens(0, 0)
    cache = transformers.DynamicCache()
    keys = torch.linspace(-1, 1, 2 * 2 * 4 * 16).view(2, 2, 4, 16).to(engine.device)
    for layer in range(2):
        cache.update(keys + layer, keys - layer, layer)
    loss = engine(input_ids=ids, labels=ids, past_key_values=cache).loss
    engine.backward(loss)
    engine.step()
    return float(loss.detach()) + engine.get_global_grad_norm()


def _continued(engine: offload.Engine) -> float:
    """An evaluation that goes on with the cache of another one, without `no_grad`."""
    engine.eval()
    ids = models.tokens(0, 0)
    first = engine(input_ids=ids[:, :16], use_cache=True)
    again = engine(input_ids=ids[:, 16:], past_key_values=first.past_key_values, use_cache=True)
    return float(again.logits.detach().double().sum())


@pytest.mark.works(AREA, "a cache of keys and values that is in use, as of a learned prefix", "right")
@pytest.mark.parametrize("play", [_with_prefix, _continued])
def test_a_cache_that_is_in_use_is_used(play: Any, tmp_path: Path) -> None:
    job = CACHED["`use_cache=True`: Llama"]
    with running(job, tmp_path / "plain") as engine:
        plain = play(engine)
    with running(job, tmp_path / "tier", activations="nvme") as engine:
        assert play(engine) == plain


"""The two that move inputs, on the CPU and on other devices."""


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
@pytest.mark.sample(2)
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
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ASKS_TWICE)
def test_a_function_that_asks_twice_is_refused(name: str, tmp_path: Path) -> None:
    loop, job, _ = LOOPS[name]
    with running(job, tmp_path, activations="nvme") as engine, pytest.raises(CheckpointError, match="only once"):
        loop(engine, job)


# -- orders of forward and backward -------------------------------------------------------------------


def _newest_first(engine: offload.Engine, step: int) -> None:
    first, second = JOB.loss(engine, step, 0), JOB.loss(engine, step, 1)
    engine.backward(second)
    engine.backward(first)


def _oldest_first(engine: offload.Engine, step: int) -> None:
    first, second = JOB.loss(engine, step, 0), JOB.loss(engine, step, 1)
    engine.backward(first)
    engine.backward(second)


def _retained(engine: offload.Engine, step: int) -> None:
    loss = JOB.loss(engine, step, 0)
    engine.backward(loss, retain_graph=True)
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)


def _dropped(engine: offload.Engine, step: int) -> None:
    JOB.loss(engine, step, 1)
    engine.backward(JOB.loss(engine, step, 0))


def _dropped_between(engine: offload.Engine, step: int) -> None:
    loss = JOB.loss(engine, step, 0)
    JOB.loss(engine, step, 1)
    engine.backward(loss)


def _evaluated_between(engine: offload.Engine, step: int) -> None:
    loss = JOB.loss(engine, step, 0)
    engine.eval()
    with torch.no_grad():
        JOB.loss(engine, step, 1)
    engine.train()
    engine.backward(loss)


def _part_of_a_graph(engine: offload.Engine, step: int) -> None:
    """The gradient of some parameters alone, then all of them."""
    loss = JOB.loss(engine, step, 0)
    asked = list(engine.module.blocks[5].parameters())
    torch.autograd.grad(loss, asked, retain_graph=True)
    engine.backward(loss)


def _failed_between(engine: offload.Engine, step: int) -> None:
    """A forward that fails in the middle leaves nothing behind."""

    def fail(*_: Any) -> None:
        raise ValueError("of the test")

    hook = engine.module.blocks[4].up.register_forward_hook(fail)
    with pytest.raises(ValueError, match="of the test"):
        JOB.loss(engine, step, 1)
    hook.remove()
    engine.backward(JOB.loss(engine, step, 0))


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
    values = []
    with running(JOB, folder, **options) as engine:
        for step in range(JOB.steps):
            ORDERS[order](engine, step)
            engine.step()
            values.append(engine.get_global_grad_norm())
        values += [float(value.double().sum()) for value in engine.module.state_dict().values()]
        if options:
            gives_back(engine)
    return values


@pytest.mark.sample(1)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("order", [pytest.param(name, marks=pytest.mark.works(AREA, name, "right")) for name in ORDERS])
def test_forwards_and_backwards_in_any_order_keep_their_bits(order: str, tier: str, tmp_path: Path) -> None:
    assert _after(order, tmp_path / tier, activations=tier) == _after(order, tmp_path / "plain")


@pytest.mark.works(AREA, "a graph that outlives `destroy()`", "refused")
@pytest.mark.sample(1)
@pytest.mark.parametrize("tier", TIERS)
def test_a_graph_of_a_destroyed_engine_is_refused_and_keeps_no_memory(tier: str, tmp_path: Path) -> None:
    with running(JOB, tmp_path, activations=tier) as engine:
        loss = JOB.loss(engine, 0, 0)
        before = process_memory().needed_bytes
        engine.destroy(remove=True)
    assert process_memory().needed_bytes < before
    with pytest.raises(UsageError, match="this engine was destroyed"):
        loss.backward()


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
            engine.backward(JOB.loss(engine, 1, 0))
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
@pytest.mark.sample(1)
@pytest.mark.parametrize("tier", ("device", *TIERS))
def test_an_input_that_is_changed_afterwards_is_refused(tier: str, tmp_path: Path) -> None:
    """As torch does where nothing is moved. On a device it was copied already, or would be after the change."""
    job = JOB._replace(model=Overwrites)
    with running(job, tmp_path, activations=tier) as engine:
        for step in range(2):
            with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace operation"):
                engine.backward(JOB.loss(engine, step, 0))
            engine.zero_grad()


def test_the_batch_and_small_tensors_are_not_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with running(JOB, tmp_path, activations="nvme") as engine:
        loss = engine(batch(0, shape=(15, 64))).square().mean()  # 3840 bytes, less than a page
        assert sum(used(engine).values()) == 0
        engine.backward(loss)
