"""DeepSpeed's `PipelineModule` trains as its layers do in one process, with tied layers in two stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import offload
import offload.deepspeed as deepspeed
from offload.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec, balanced, partition
from offload.errors import ConfigError, OffloadError, UsageError
from tests.support import models, rounding_bounds
from tests.support.oracle import Job, Result, assert_same_tensors, config
from tests.support.oracle import run as train_alone
from tests.support.ranks.pipelines import VOCABULARY, Head, micro_batch
from tests.support.ranks.rank_pool import RankPool, pool, rank_and_size, shared_pool
from tests.support.ranks.tensor_parallel import Block

WIDTH, SEED = 32, 7
DISK = ("nvme", "nvme")


def logits(embed: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, embed.weight)  # type: ignore[arg-type]


def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def layers(tied: bool, blocks: int = 4) -> list[Any]:
    """Specs, a function, and an embedding that may be the head too."""
    middle = [doubled, *(LayerSpec(Block, WIDTH) for _ in range(blocks))]
    if not tied:
        return [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), *middle, LayerSpec(Head, WIDTH)]
    embed = ("embed", nn.Embedding, VOCABULARY, WIDTH)
    return [TiedLayerSpec(*embed), *middle, nn.LayerNorm(WIDTH), TiedLayerSpec(*embed, forward_fn=logits)]


class Whole(nn.Module):
    """The layers in one process, seeded as `seed_layers` seeds them."""

    def __init__(self, tied: bool, blocks: int = 4) -> None:
        super().__init__()
        self.specs, self.layers = layers(tied, blocks), nn.ModuleList()
        for number, spec in enumerate(self.specs):
            torch.manual_seed(SEED + number)
            if isinstance(spec, TiedLayerSpec):
                if not hasattr(self.layers, "tied_embed"):
                    self.layers.add_module("tied_embed", spec.build())
            elif isinstance(spec, LayerSpec | nn.Module):
                self.layers.add_module(str(number), spec.build() if isinstance(spec, LayerSpec) else spec)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, spec in enumerate(self.specs):
            if isinstance(spec, TiedLayerSpec):
                embed = self.layers.tied_embed
                x = spec.forward_fn(embed, x) if spec.forward_fn else embed(x)
            else:
                x = getattr(self.layers, str(number))(x) if isinstance(spec, LayerSpec | nn.Module) else spec(x)
        return x


def untied() -> nn.Module:
    return Whole(False)


def tied() -> nn.Module:
    return Whole(True)


def deep() -> nn.Module:
    return Whole(False, blocks=6)


def whole_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    ids = micro_batch(step, micro)
    return models.token_loss(model(ids), ids)


JOB = Job(untied, whole_loss, steps=3, accumulation=4, clip=0.0, lr=3e-4)


def batches(job: Job, share: int, shares: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields (inputs, labels) of each micro-batch: the rows of one pipeline of several."""
    for step in range(job.steps):
        for micro in range(job.accumulation):
            ids = micro_batch(step, micro).chunk(shares)[share]
            yield ids, ids


def pipeline(job: Job, stages: int, **options: Any) -> PipelineModule:
    return PipelineModule(
        layers(job.model is tied, 6 if job.model is deep else 4),
        num_stages=stages,
        loss_fn=models.token_loss,
        seed_layers=True,
        base_seed=SEED,
        **options,
    )


def train(job: Job, folder: Path, stages: int, **options: Any) -> Result:
    model = pipeline(job, stages, **options)
    content = config(job, DISK, folder)
    engine, optimizer, loader, _ = deepspeed.initialize(
        model=model, config=content, model_parameters=[p for p in model.parameters() if p.requires_grad]
    )
    assert isinstance(engine, deepspeed.PipelineEngine) and optimizer is engine.optimizer and loader is None
    rank, size = rank_and_size()
    shares = size // stages
    data = batches(job, rank % shares, shares)
    losses, norms = [], []
    for _ in range(job.steps):
        losses.append(float(engine.train_batch(data_iter=data)))
        norms.append(engine.get_global_grad_norm())
    weights = {name.partition(".")[2]: value.clone() for name, value in engine.module.state_dict().items()}
    before = engine.global_steps
    evaluated = engine.eval_batch(batches(job, rank % shares, shares))
    again, outputs = engine.eval_batch(
        batches(job, rank % shares, shares), return_logits=True, num_micro_batches=job.accumulation
    )
    assert torch.equal(evaluated, again) and engine.global_steps == before and engine.module.training
    assert (outputs is not None) is engine.is_last_stage()
    engine.destroy(remove=True)
    return Result(losses, norms, weights)


def together(results: Sequence[Result]) -> Result:
    """All processes have the losses and norms; copies of a parameter have the same bits."""
    weights: dict[str, torch.Tensor] = {}
    for result in results:
        assert (result.losses, result.norms) == (results[0].losses, results[0].norms)
        for name, value in result.weights.items():
            assert torch.equal(weights.setdefault(name, value), value), name
    return Result(results[0].losses, results[0].norms, weights)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Callable[[Job], Result]]:
    """One process that trains the whole model, with as many threads as a rank has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda job: train_alone(job, DISK, tmp_path / "one")
    torch.set_num_threads(threads)


@pytest.mark.works("Several ranks", "DeepSpeed's `PipelineModule` with `train_batch` and `eval_batch`", "right")
@pytest.mark.parametrize(
    ("interval", "dtype", "micro_batches"), [(0, "fp16", 4), (2, "fp32", 1)], ids=["1F1B", "fewer than stages"]
)
def test_a_pipeline_module_trains_as_one_process_bit_for_bit(
    interval: int, dtype: str, micro_batches: int, ranks: RankPool, alone: Callable[[Job], Result], tmp_path: Path
) -> None:
    job = JOB._replace(dtype=dtype, accumulation=micro_batches)
    result = together(ranks.run(train_with_interval, job, tmp_path / "two", interval))
    expected = alone(job)
    assert result.losses == pytest.approx(expected.losses, rel=1e-6)  # the mean of four, in another order
    assert_same_tensors(result.weights, expected.weights)
    assert result.norms == pytest.approx(expected.norms, rel=1e-12)


@pytest.mark.slow
@pytest.mark.works("Several ranks", "`PipelineModule` in 8 stages with 4 micro-batches and ZeRO-2", "right")
def test_eight_stages_and_four_micro_batches_train_as_one_process(
    alone: Callable[[Job], Result], tmp_path: Path
) -> None:
    job = JOB._replace(model=deep, stage=2, dtype="bf16", steps=2)
    with pool(8) as eight:
        result = together(eight.run(train, job, tmp_path / "eight", 8))
    expected = alone(job)
    assert result.losses == pytest.approx(expected.losses, rel=1e-6)
    assert_same_tensors(result.weights, expected.weights)
    assert result.norms == pytest.approx(expected.norms, rel=1e-12)


def train_with_interval(job: Job, folder: Path, interval: int) -> Result:
    return train(job, folder, 2, activation_checkpoint_interval=interval)


class WeighedLoss(nn.Module):
    """A loss as a module with a buffer, as `CrossEntropyLoss(weight=...)` is one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor(2.0))

    def forward(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return models.token_loss(output, labels) * self.weight


def weighed_loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return models.token_loss(output, labels) * 2.0


def losses_and_names(job: Job, folder: Path, loss: Callable[..., Any]) -> tuple[list[float], list[str]]:
    model = PipelineModule(layers(False), num_stages=2, loss_fn=loss, seed_layers=True, base_seed=SEED)
    engine, *_ = deepspeed.initialize(model=model, config=config(job, DISK, folder))
    data = batches(job, 0, 1)
    losses = [float(engine.train_batch(data)) for _ in range(2)] + [float(engine.eval_batch(data))]
    names = list(engine.module.state_dict())
    engine.destroy(remove=True)
    return losses, names


@pytest.mark.slow
def test_a_loss_may_be_a_module_and_is_no_part_of_the_model(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(losses_and_names, JOB, tmp_path / "module", WeighedLoss())
    assert results == ranks.run(losses_and_names, JOB, tmp_path / "function", weighed_loss)


@pytest.mark.slow
@pytest.mark.works("Several ranks", "`PipelineModule` with tied layers beside ZeRO, on two by two ranks", "right")
@pytest.mark.works("Several ranks", "layers that are tied between two stages (`TiedLayerSpec`)", "right")
@pytest.mark.numeric
@pytest.mark.parametrize("size", [2, 4])
def test_tied_layers_stay_equal_and_train_as_one(size: int, alone: Callable[[Job], Result], tmp_path: Path) -> None:
    job = JOB._replace(model=tied, clip=0.05)
    with shared_pool(size) as ranks:
        result = together(ranks.run(train, job, tmp_path / "ranks", 2))
    rounding_bounds.same_training(result, alone(job), job, reordered=True)


def started(job: Job, folder: Path) -> Any:
    return deepspeed.initialize(model=pipeline(job, 2), config=config(job, DISK, folder))[0]


def save_and_load(job: Job, folder: Path) -> list[float]:
    """The weights of this process have the names of the whole model, and a load goes on with the bits of the save."""
    engine = started(job, folder / "one")
    data = batches(job, 0, 1)
    engine.train_batch(data_iter=data)
    assert engine.save_checkpoint(str(folder / "saved"))
    engine.save_pretrained(folder / "model")
    expected = [float(engine.train_batch(data_iter=data)) for _ in range(2)]
    weights = {name.partition(".")[2]: value.clone() for name, value in engine.module.state_dict().items()}
    engine.destroy(remove=True)
    engine = started(job, folder / "two")
    path, state = engine.load_checkpoint(str(folder / "saved"))
    assert path.endswith("global_step1") and state == {} and engine.global_steps == 1
    data = batches(job, 0, 1)
    for _ in range(job.accumulation):
        next(data)
    assert [float(engine.train_batch(data_iter=data)) for _ in range(2)] == expected
    assert_same_tensors({name.partition(".")[2]: value for name, value in engine.module.state_dict().items()}, weights)
    engine.destroy(remove=True)
    return expected


@pytest.mark.slow
@pytest.mark.works("Several ranks", "checkpoints and `save_pretrained` of a `PipelineModule` with tied layers", "right")
def test_a_pipeline_module_goes_on_from_its_checkpoint_and_is_saved_whole(ranks: RankPool, tmp_path: Path) -> None:
    job = JOB._replace(model=tied)
    ranks.run(save_and_load, job, tmp_path)
    (file,) = (tmp_path / "model").glob("*.safetensors")
    saved = load_file(file)
    # The layer that both stages have is there once.
    assert saved.keys() == tied().state_dict().keys()
    tied().load_state_dict(saved)


# -- the division --------------------------------------------------------------------------------------


def test_layers_are_divided_into_parts_of_about_one_weight() -> None:
    weights: list[int]
    borders: list[int]
    for weights, parts, borders in (
        ([1] * 7, 2, [0, 4, 7]),
        ([1] * 8, 3, [0, 3, 6, 8]),
        ([100, *[10] * 6], 3, [0, 1, 4, 7]),
        ([0, 0, 3], 3, [0, 1, 2, 3]),
        ([2] * 4, 4, [0, 1, 2, 3, 4]),
    ):
        print(parts)
        assert balanced(weights, parts) == borders


def test_the_method_decides_what_weighs() -> None:
    borders: list[int]
    for method, borders in (
        ("uniform", [0, 4, 7]),
        ("parameters", [0, 4, 7]),
        ("type:block", [0, 4, 7]),
        ("type:Embedding|Head", [0, 6, 7]),
    ):
        print(method)
        state = torch.get_rng_state()
        assert partition(layers(False), 2, method)[0::2] == [0, 7]
        assert partition(layers(False), 2, method) == borders
        assert torch.equal(torch.get_rng_state(), state)


# -- what is refused -----------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "stages": ({"num_stages": 3}, "cannot be divided into pipelines"),
    "method": ({"partition_method": "best"}, "partition_method must be"),
    "type": ({"partition_method": "type:transformer"}, "no layer has a class of such a name"),
    "topology": ({"topology": object()}, "topology is not supported"),
    "shapes": ({"dynamic_shape": True}, "dynamic_shape is not supported"),
    "layers": ({"layers": [1, 2]}, "layer 0 must be a LayerSpec"),
    "few": ({"layers": [doubled]}, "has 1 layers for 2 stages"),
    "loss": ({"loss_fn": "mse"}, "loss_fn must be a function or a module, got str"),
    "learned loss": ({"loss_fn": nn.Linear(2, 1)}, "loss_fn Linear has parameters.*last of the layers"),
}


def make_wrongly(folder: Path) -> None:
    for arguments, words in WRONG.values():
        with pytest.raises(OffloadError, match=words):
            PipelineModule(**{"layers": layers(False), "num_stages": 2, **arguments})
    job = JOB._replace(model=tied)
    model = pipeline(job, 2)
    content = config(job._replace(dtype="bf16"), DISK, folder, master="bf24")
    with pytest.raises(ConfigError, match="rounded stochastically"):
        offload.initialize(model=model, config=content)
    content = config(job, DISK, folder)
    content["zero_optimization"]["zero_quantized_gradients"] = True
    with pytest.raises(ConfigError, match="sent as codes"):
        offload.initialize(model=model, config=content)
    ids = micro_batch(0, 0)
    with pytest.raises(UsageError, match=r"of the engine that deepspeed\.initialize\(\.\.\.\) returns"):
        model(ids)
    engine, *_ = deepspeed.initialize(model=model, config=config(job, DISK, folder))
    with pytest.raises(UsageError, match=r"runs by engine\.train_batch"):
        engine(ids)
    for batch, words in (
        ([(ids, ids)] * 4, "expects an iterator"),
        (iter([ids] * 4), r"micro-batches \(inputs, labels\)"),
        (iter([(ids, ids)] * 3 + [(ids[:1], ids[:1])]), "tensors of one shape"),
        (None, "needs data"),
    ):
        with pytest.raises(UsageError, match=words):
            engine.train_batch(batch)
    with pytest.raises(StopIteration):
        engine.train_batch(iter([(ids, ids)] * 3))
    assert float(engine.train_batch(iter([(ids, ids)] * 4))) > 0
    engine.destroy(remove=True)


def test_what_cannot_be_a_pipeline_is_an_error(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(make_wrongly, tmp_path)


@pytest.mark.parametrize("kind", [LayerSpec, lambda value: TiedLayerSpec("key", value)])
def test_a_spec_of_no_module_is_an_error(kind: Callable[[Any], Any]) -> None:
    with pytest.raises(ConfigError, match=r"expects a class of torch\.nn\.Module"):
        kind(nn.Linear(1, 1))
