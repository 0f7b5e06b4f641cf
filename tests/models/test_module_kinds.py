"""A model of any modules has the same bits on disk with room for two units as in memory, and trains as in PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from offload.errors import ConfigError, EngineFailed, UsageError
from tests.support import models, rounding_bounds
from tests.support.modules.module_kinds import (
    Adapters,
    AdaptersRecomputed,
    AdaptersReentrant,
    Asking,
    Attention,
    Branches,
    Containers,
    Convolutions,
    Elsewhere,
    Layers,
    Nested,
    Normed,
    One,
    OnlyEmpty,
    Partly,
    Recurrent,
    Recursive,
    Shared,
    Skipped,
    Small,
    Twice,
    Uneven,
    Views,
    convolution_loss,
)
from tests.support.modules.recomputed_regions import (
    FrozenRegion,
    ReentrantRegion,
    ReentrantRegionOfAll,
    ReentrantRegionOfTwo,
    Region,
    RegionOfAll,
    RegionOfTwo,
)
from tests.support.oracle import Job, assert_same, plain_loop, room_for, run, start, train_step
from tests.swapper.test_placements import image_loss

DISK, MEMORY = ("nvme", "nvme"), ("none", "none")


def recomputed_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    ids = models.tokens(step, micro, (4, 16), 61)
    logits = checkpoint(model, ids, use_reentrant=False)
    return models.token_loss(logits, ids)


def enabled(build: Callable[[], nn.Module], reentrant: bool) -> Callable[[], nn.Module]:
    def recomputing() -> nn.Module:
        model = build()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # a new name is coming; users have the old one
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        return model.train()

    return recomputing


def half() -> nn.Module:
    return models.gpt2().half()


class Case(NamedTuple):
    job: Job
    units: int = 2
    """For how many of the largest units the device has room."""
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    options: dict[str, Any] = {}  # noqa: RUF012  # never changed


def _simple(model: Callable[[], nn.Module], units: int = 2, **changes: Any) -> Case:
    return Case(Job(model, models.mixture_loss, steps=4)._replace(**changes), units)


AREAS: dict[str, dict[str, Case]] = {
    "Modules": {
        "branches that change from step to step": _simple(Branches, steps=8),
        "a unit that most steps skip": _simple(Skipped, steps=8),
        "a module called twice in a forward": _simple(Twice),
        "a module in two places": _simple(Shared),
        "a model whose forward calls itself": _simple(Recursive),
        "keyword inputs, nested outputs, outputs that are no tensors": _simple(Nested),
        "an output that is a view of a weight": _simple(Views),
        "modules that read `weight.dtype` and `.device` first": _simple(Asking),
        "parameters used outside of their module": _simple(Elsewhere),
        "scalars, single elements and empty parameters": _simple(Small),
        "a unit whose trainable parameters are all empty": _simple(OnlyEmpty),
        "`ParameterList`, `ParameterDict`": _simple(Containers),
        "a model that is one parameter": _simple(One),
        "one layer larger than all others": _simple(Uneven, units=1),
        "tied, frozen and unused weights": Case(models.MIXTURE._replace(steps=4), units=3),
        "partly frozen modules": _simple(Partly),
        "LoRA adapters on a frozen model": _simple(Adapters),
        "`nn.TransformerEncoder`, `nn.MultiheadAttention`": _simple(Attention),
        "`nn.GRU`": _simple(Recurrent),
        "`weight_norm` (parametrizations)": _simple(Normed),
        "a CNN with BatchNorm, no list of layers": Case(Job(Convolutions, convolution_loss, steps=4, buffers="same")),
        "nested lists: Swin": Case(Job(models.swin, image_loss, steps=4)),
        "fused experts: Mixtral": Case(Job(models.mixtral, models.language_loss, steps=4)),
        "a model given in float16": Case(Job(half, models.language_loss, steps=4)),
    },
    "Activation checkpointing": {
        "a region of one unit, dropout inside": _simple(Region, accumulation=2),
        "a region of two units, with room for two": _simple(RegionOfTwo),
        "a region of all units, with room for two": _simple(RegionOfAll),
        "a region round the whole model, with room for two units": Case(Job(Layers, recomputed_loss, steps=3)),
        "frozen modules in a region": _simple(FrozenRegion),
        "reentrant, a region of one unit": _simple(ReentrantRegion, accumulation=2),
        "reentrant, a region of two units": _simple(ReentrantRegionOfTwo),
        "reentrant, a region of all units": _simple(ReentrantRegionOfAll),
        "LoRA adapters, each layer recomputed": _simple(AdaptersRecomputed),
        "LoRA adapters, reentrant": _simple(AdaptersReentrant),
        "`gradient_checkpointing_enable()`: GPT-2": Case(
            Job(enabled(models.gpt2_dropout, False), models.language_loss, steps=4, accumulation=2)
        ),
        "`gradient_checkpointing_enable()`, reentrant: GPT-2": Case(
            Job(enabled(models.gpt2_dropout, True), models.language_loss, steps=4, accumulation=2)
        ),
        "`gradient_checkpointing_enable()`: Llama": Case(
            Job(enabled(models.llama, False), models.language_loss, steps=4)
        ),
    },
}

ROWS = [
    pytest.param(case, dtype, id=f"{name}-{dtype}", marks=pytest.mark.works(area, name, "right"))
    for area, cases in AREAS.items()
    for name, case in cases.items()
    for dtype in case.dtypes
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("case", "dtype"), ROWS)
@pytest.mark.numeric
def test_same_bits_and_as_pytorch(case: Case, dtype: str, tmp_path: Path) -> None:
    job = case.job._replace(dtype=dtype)
    in_memory = run(job, MEMORY, tmp_path / "memory", **case.options)
    on_disk = run(job, DISK, tmp_path / "disk", device_memory=room_for(job, case.units), **case.options)
    assert_same(in_memory, on_disk, "in memory and on disk")
    plain = plain_loop(job)
    rounding_bounds.same_losses(in_memory.losses, plain.losses, job)
    rounding_bounds.same_norms(in_memory.norms, plain.norms, job)


class Clamped(Layers):
    def through(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            layer.register_forward_pre_hook(clamp)
        return super().through(hidden, ids)


def clamp(module: nn.Module, _: Any) -> None:
    with torch.no_grad():
        module.weight.clamp_(-1, 1)


class Replaced(Layers):
    """A momentum encoder as it is often written."""

    def through(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.layers[0].weight.data = self.layers[0].weight.data * 0.5 + self.layers[1].weight.data * 0.5
        return super().through(hidden, ids)


@pytest.mark.parametrize("model", [Clamped, Replaced])
@pytest.mark.works("Modules", "a weight changed in place, or replaced by `.data`, inside of a forward", "refused")
def test_a_weight_changed_in_a_forward_is_refused(model: Callable[[], nn.Module], tmp_path: Path) -> None:
    job = Job(model, models.mixture_loss)
    engine = start(job, DISK, tmp_path)
    with pytest.raises(UsageError, match=r"layers\.0\.weight was changed in place"):
        train_step(engine, job, 0)
    with pytest.raises(EngineFailed):
        engine.step()
    engine.destroy()


class Filter(nn.Module):
    """Weighs frequencies, as models of Fourier layers do."""

    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(9, dtype=torch.complex64), requires_grad=trains)
        self.head = nn.Linear(16, 4)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return self.head(torch.fft.irfft(torch.fft.rfft(samples) * self.weight, n=16))


class Neighbours(nn.Module):
    """Averages over the neighbours in a graph, which a sparse buffer holds."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("neighbours", torch.eye(6)[[1, 2, 3, 4, 5, 0]].to_sparse(), persistent=persistent)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.neighbours, rows)


def graph(persistent: bool) -> nn.Module:
    return nn.Sequential(Neighbours(persistent), nn.Linear(5, 5))


@pytest.mark.cpu_only("the test device multiplies no sparse matrices")
def test_a_sparse_buffer_that_no_file_holds_is_as_in_pytorch(tmp_path: Path) -> None:
    model = graph(persistent=False)
    rows = torch.randn(6, 5)
    expected = model(rows)
    engine = offload.initialize(
        model, optimizer=torch.optim.SGD(model.parameters()), states="nvme", path=tmp_path
    ).engine
    assert torch.equal(engine(rows), expected)
    engine.save_checkpoint(tmp_path / "saved")
    engine.destroy()


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Filter(trains=True), "weight is complex64, and offload stores real numbers; .* torch.view_as_real"),
        (lambda: Filter(trains=False), "weight is complex64, and offload stores real numbers"),
        (
            lambda: nn.Sequential(nn.LazyLinear(4)),
            "0.weight belongs to a lazy module and has no shape yet: call the model",
        ),
        (
            lambda: nn.Sequential(nn.Linear(4, 4), nn.Embedding(8, 4, max_norm=1.5)),
            "^1 is an embedding with max_norm=1.5, which changes its weight .* set max_norm to None",
        ),
        (
            lambda: graph(persistent=True),
            "buffer 0.neighbours is sparse, and files hold dense tensors",
        ),
    ],
    ids=["complex", "frozen", "lazy", "max_norm", "sparse"],
)
@pytest.mark.works(
    "Modules", "complex parameters, those of a lazy module that has not run, embeddings with `max_norm`", "refused"
)
def test_a_parameter_that_cannot_be_paged_is_refused(build: Callable[[], nn.Module], words: str) -> None:
    """A cast to fp32 would drop imaginary parts, and training would go on."""
    model = build()
    parameter = next(iter(model.parameters()))
    with pytest.raises(ConfigError, match=words):
        offload.initialize(model, optimizer=torch.optim.SGD(model.parameters()), weights="cpu", states="cpu")
    assert next(iter(model.parameters())) is parameter


def test_a_lazy_module_is_refused_whatever_the_optimizer() -> None:
    """The states of an optimizer without a kernel are found by a step of its own code, which needs shapes."""
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(ConfigError, match=r"0\.weight belongs to a lazy module and has no shape yet"):
        offload.initialize(model, optimizer=torch.optim.NAdam(model.parameters()), weights="cpu", states="cpu")
