"""Inputs of blocks of every kind, passed in every way, keep their values; what is no activation is never copied."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn

import offload
from tests.support import models
from tests.support.checkpointed import (
    INPUT,
    JOB,
    MEMORY,
    WIDTH,
    Block,
    Stack,
    batch,
    running,
    small_inputs_move,
    used,
)
from tests.support.device_process import engine_device
from tests.support.oracle import Job, assert_same, run, start, train_step

AREA = "Activation checkpointing"
TIERS = ("cpu", "nvme")


@pytest.fixture(autouse=True)
def _tiny_inputs_move(monkeypatch: pytest.MonkeyPatch) -> None:
    small_inputs_move(monkeypatch)


# -- forms of tensors ---------------------------------------------------------------------------------


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
CPU_ONLY = ("complex", "negated", "sparse")
"""What the test device has no kernels for."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("tier", ["device", *TIERS])
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.works(AREA, name, "right")) for name in FORMS])
def test_inputs_of_every_form_keep_the_bits(name: str, tier: str, tmp_path: Path) -> None:
    if engine_device() != "cpu" and any(word in name for word in CPU_ONLY):
        pytest.skip("the test device has no kernels for such tensors")
    job = FORMS[name]
    plain = run(job, MEMORY, tmp_path / "plain")
    assert_same(plain, run(job, MEMORY, tmp_path / tier, activations=tier))


# -- ways to pass them --------------------------------------------------------------------------------


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


# -- caches of keys and values ------------------------------------------------------------------------


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


@pytest.mark.sample(2)
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


# -- what is kept, and how often ----------------------------------------------------------------------


class Rewrapped(Stack):
    """Each input goes to two blocks: as it is, and as a view of another shape."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first(batch)
        for first, second in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            hidden = first(hidden) + second(hidden.view(4, -1, WIDTH)).view(-1, WIDTH)
        return hidden


@pytest.mark.works(AREA, "views of one input: kept once", "right")
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


@pytest.mark.parametrize("tier", TIERS)
def test_memory_that_has_changed_is_another_input(tier: str, tmp_path: Path) -> None:
    job = _job(Overwritten)
    plain = run(job, MEMORY, tmp_path / "plain")
    assert_same(plain, run(job, MEMORY, tmp_path / tier, activations=tier))


@pytest.mark.works(AREA, "an encoder's output for all layers of a decoder: kept once", "right")
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


@pytest.mark.parametrize("tier", TIERS)
def test_a_frozen_prefix_that_fills_a_cache_leaves_the_blocks_behind_it_checkpointed(tier: str, tmp_path: Path) -> None:
    def frozen_prefix() -> nn.Module:
        model = cached_llama()
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[:1].requires_grad_(False)
        return model

    job = Job(frozen_prefix, models.language_loss, steps=3)
    plain = run(job, MEMORY, tmp_path / "plain")
    with running(job, tmp_path / tier, activations=tier) as engine:
        again = [
            name
            for name, block in engine.module.model.layers.named_children()
            if _is_computed_again(engine, job, block)
        ]
        assert again == [name for name, _ in engine.module.model.layers.named_children()][1:]
    assert_same(plain, run(job, MEMORY, tmp_path / f"{tier}-bits", activations=tier))


def _is_computed_again(engine: offload.Engine, job: Job, block: nn.Module) -> bool:
    """Returns True if a step calls a block twice."""
    calls = []
    hook = block.register_forward_pre_hook(lambda *_: calls.append(None))
    engine.backward(job.loss(engine, 0, 0))
    engine.zero_grad()
    hook.remove()
    return len(calls) == 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("tier", TIERS)
def test_weights_and_batches_are_never_copied(tier: str, tmp_path: Path) -> None:
    """A block whose inputs are the batch, one that needs a gradient, and a weight of another module."""

    class Blends(Block):
        def forward(self, hidden: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(hidden + sum(each.sum() for each in others) * 1e-3)

    class Blended(Stack):
        def block(self, index: int) -> nn.Module:
            return Blends()

        def forward(self, batch: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            hidden = batch
            for block in self.blocks:
                hidden = block(hidden, batch, asked, self.first.weight)
            return hidden

    def loss(model: Any, step: int, micro: int) -> torch.Tensor:
        found: torch.Tensor = model(batch(step), batch(7).requires_grad_()).square().mean()
        return found

    job = JOB._replace(model=Blended, loss=loss)
    plain = run(job, MEMORY, tmp_path / "plain")
    engine = start(job, ("nvme", "nvme"), tmp_path / tier, activations=tier)
    assert [train_step(engine, job, step) for step in range(job.steps)] == plain.losses
    alive = job.loss(engine, 5, 0)
    # The first block has the batch itself. What needs a gradient is computed on a device: it is a copy of the user's.
    assert sum(used(engine).values()) == (7 + (engine_device() != "cpu")) * INPUT
    del alive
    engine.destroy(remove=True)
