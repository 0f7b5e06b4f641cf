"""A model of any modules has the bits of memory on disk, and trains as in PyTorch."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import offload
from bench.measure import settings_for
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
from tests.support.modules.module_trees import TREES, Tree, job_of, room, unclipped
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
from tests.support.sampling import examples
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
    return models.shallow().half()


class Case(NamedTuple):
    job: Job
    units: int = 2
    """For how many of the largest units the device has room."""
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    options: dict[str, Any] = {}  # noqa: RUF012  # never changed


def _simple(model: Callable[[], nn.Module], units: int = 2, **changes: Any) -> Case:
    return Case(Job(model, models.mixture_loss)._replace(**changes), units)


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
        "tied, frozen and unused weights": Case(models.MIXTURE, units=3),
        "partly frozen modules": _simple(Partly),
        "LoRA adapters on a frozen model": _simple(Adapters),
        "`nn.TransformerEncoder`, `nn.MultiheadAttention`": _simple(Attention),
        "`nn.GRU`": _simple(Recurrent),
        "`weight_norm` (parametrizations)": _simple(Normed),
        "a CNN with BatchNorm, no list of layers": Case(Job(Convolutions, convolution_loss, buffers="same")),
        "nested lists: Swin": Case(Job(models.swin, image_loss)),
        "fused experts: Mixtral": Case(Job(models.mixtral, models.language_loss)),
        "a model given in float16": Case(Job(half, models.language_loss)),
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
            Job(enabled(models.shallow_dropout, False), models.language_loss, accumulation=2)
        ),
        "`gradient_checkpointing_enable()`, reentrant: GPT-2": Case(
            Job(enabled(models.shallow_dropout, True), models.language_loss, accumulation=2)
        ),
        "`gradient_checkpointing_enable()`: Llama": Case(Job(enabled(models.llama, False), models.language_loss)),
    },
}

ROWS = [
    pytest.param(case, dtype, id=f"{name}-{dtype}", marks=pytest.mark.works(area, name, "right"))
    for area, cases in AREAS.items()
    for name, case in cases.items()
    for dtype in case.dtypes
]


@pytest.mark.sample(2)
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


@pytest.mark.parametrize("placement", [DISK, MEMORY])
@pytest.mark.parametrize("model", [Clamped, Replaced])
@pytest.mark.works("Modules", "a weight changed in place, or replaced by `.data`, inside of a forward", "refused")
def test_a_weight_changed_in_a_forward_is_refused(
    model: Callable[[], nn.Module], placement: tuple[str, str], tmp_path: Path
) -> None:
    job = Job(model, models.mixture_loss)
    engine = start(job, placement, tmp_path)
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
        (lambda: graph(persistent=True), "buffer 0.neighbours is sparse, and files hold dense tensors"),
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


_HEALTH = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


def check(tree: Tree, folder: Path) -> None:
    """Disk and memory give the same bits, and nearly what a plain loop gives."""
    job = job_of(tree)
    in_memory = run(job, MEMORY, folder / "memory")
    assert_same(in_memory, run(job, DISK, folder / "disk", device_memory=room(tree)), "in memory and on disk")
    plain = plain_loop(job._replace(clip=unclipped(job.clip)))
    if tree.dtype == "fp32":
        rounding_bounds.same_losses(in_memory.losses, plain.losses, job)
        rounding_bounds.same_norms(in_memory.norms, plain.norms, job)
    else:
        # The engine rounds ties of a master away from zero, and adds in fp32 what torch adds in bf16.
        rounding_bounds.same_losses(in_memory.losses[:1], plain.losses[:1], job)
        rounding_bounds.same_numbers(in_memory.norms[:1], plain.norms[:1], rounding_bounds.step_error(job))
        rounding_bounds.same_numbers(in_memory.losses, plain.losses, rounding_bounds.step_error(job))


def check_in_a_folder(tree: Tree, root: Path) -> None:
    folder = Path(tempfile.mkdtemp(dir=root))
    try:
        check(tree, folder)
    finally:
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of torch, with a frozen embedding
@pytest.mark.works("Modules", "random trees of all these pieces, one hundred of them", "right")
@pytest.mark.timeout(1200)  # shrinking what fails takes longer than finding it
@settings(max_examples=examples(100), deadline=None, derandomize=True, database=None, suppress_health_check=_HEALTH)
@given(tree=TREES)
@pytest.mark.numeric
def test_random_module_trees_train_with_the_same_bits(tree: Tree, tmp_path_factory: pytest.TempPathFactory) -> None:
    check_in_a_folder(tree, tmp_path_factory.getbasetemp())


WIDTH = 16


class Scale(nn.Module):
    """Returns its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.01))

    def forward(self) -> torch.Tensor:
        return self.weight


class Again(nn.Module):
    """Calls itself within its own call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor, times: int = 3) -> torch.Tensor:
        x = torch.tanh(x @ self.weight)
        return self(x, times - 1) if times else x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.again = nn.Linear(WIDTH, WIDTH), Scale(), Again()
        self.kept: list[torch.Tensor] = []
        self.packed: list[torch.Size] = []
        """Shapes of what hooks of the user have received, from a layer of torch."""
        self.packed_of_ours: list[torch.Size] = []
        """The same from a module of the user."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def into(packed: list[torch.Size]) -> Any:
            return saved_tensors_hooks(lambda tensor: (packed.append(tensor.shape), tensor)[1], lambda tensor: tensor)

        with into(self.packed):
            x = self.linear(x)
        with into(self.packed_of_ours):
            x = self.again(x, 0)
        self.kept.append(self.scale())
        return self.again(x) * self.scale()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).to(torch.bfloat16)


@pytest.fixture
def batch() -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def started(folder: Path) -> offload.Engine:
    return offload.initialize(model=model(), config=settings_for(folder, "nested", "cpu"))[0]


def test_results_are_those_of_plain_torch(tmp_path: Path, batch: torch.Tensor) -> None:
    plain, engine = model(), started(tmp_path)
    expected = plain(batch).float().sum()
    expected.backward()
    loss = engine(batch).float().sum()
    assert loss == expected
    engine.backward(loss)
    for name, parameter in engine.module.named_parameters():
        gradient = plain.get_parameter(name).grad
        assert gradient is not None and torch.equal(offload.safe_get_full_grad(parameter), gradient.float()), name
    engine.destroy(remove=True)


def test_a_weight_that_an_inner_module_returns_is_a_copy(tmp_path: Path, batch: torch.Tensor) -> None:
    """A view would hold the unit on the device, and `step()` would refuse to change it."""
    engine = started(tmp_path)
    for _ in range(2):
        engine.backward(engine(batch).float().sum())
        engine.step()
    block: Any = engine.module[0]
    first, second = block.kept
    assert torch.equal(first, torch.full((WIDTH,), 0.01, dtype=torch.bfloat16)) and not torch.equal(second, first)
    engine.destroy(remove=True)


def test_hooks_of_the_user_receive_no_weights_of_a_module_inside(tmp_path: Path, batch: torch.Tensor) -> None:
    engine = started(tmp_path)
    block: Any = engine.module[1]  # whose input needs a gradient
    engine.backward(engine(batch).float().sum())
    assert block.packed_of_ours == [batch.shape] * 2, "the input, and the result of tanh"
    assert sorted(block.packed) == sorted([batch.shape, block.linear.weight.shape]), "as in torch"
    engine.destroy(remove=True)


def test_a_layer_of_torch_that_is_called_alone_trains(tmp_path: Path, batch: torch.Tensor) -> None:
    plain, engine = model(), started(tmp_path)
    layer: Any = plain[0].linear
    layer(batch).float().sum().backward()
    engine.backward(engine.module[0].linear(batch).float().sum())
    for name, parameter in engine.module[0].linear.named_parameters():
        assert torch.equal(offload.safe_get_full_grad(parameter), layer.get_parameter(name).grad.float()), name
    engine.step()
    engine.destroy(remove=True)


class Parts(nn.Module):
    """Its units are containers, which nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.ModuleDict({"fixed": nn.Linear(WIDTH, WIDTH).requires_grad_(False), "learns": nn.Linear(WIDTH, WIDTH)})
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = torch.tanh(part["fixed"](x) + part["learns"](x))
        return x


def test_layers_inside_of_a_module_that_is_never_called_keep_their_hooks(tmp_path: Path, batch: torch.Tensor) -> None:
    """Units of frozen weights too are then released one after the other, so that two have room enough."""
    torch.manual_seed(0)
    settings = settings_for(tmp_path, "parts", "cpu", device_memory=2 << 12)
    engine = offload.initialize(model=Parts().to(torch.bfloat16), config=settings)[0]
    engine.backward(engine(batch).float().sum())
    engine.step()
    engine.destroy(remove=True)
