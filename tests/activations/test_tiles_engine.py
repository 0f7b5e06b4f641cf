"""Tiled modules of a paged model have the same bits in every tier, and weights are brought once for all chunks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.engine.gradients import GradientAccumulator
from tests.activations.in_pieces import Gated
from tests.activations.test_chunked_loss import Peak
from tests.activations.test_tiles import DISK, JOBS, TIERS, of, tiled_by_hand
from tests.support import models, rounding_bounds
from tests.support.oracle import (
    DTYPES,
    Job,
    Result,
    assert_same,
    plain_loop,
    room_for,
    run,
    same_bits,
    start,
    train_step,
    trained,
)
from tests.support.ranks import rank_jobs, rank_pool
from tests.support.ranks.rank_pool import RankPool


@pytest.mark.numeric
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.works("Graphs", "MLPs computed in chunks of the sequence (`tile_mlp`, `offload.tiled`)", "right")
def test_bits_do_not_depend_on_the_tier(name: str, tmp_path: Path) -> None:
    """And numbers are those of the untiled model but for roundings; see the bound in `rounding_bounds`."""
    job = JOBS[name]
    mine = same_bits(job, tmp_path / "tiled", TIERS, tile_mlp=3)
    rounding_bounds.same_training(mine, plain_loop(job), job, reordered=True)
    assert mine.losses[1:] != run(job, DISK, tmp_path / "whole").losses[1:] or name != "llama, bf16", (
        "nothing was tiled"
    )


def test_dropout_draws_the_same_in_every_tier(tmp_path: Path) -> None:
    same_bits(models.DROPOUT._replace(steps=3), tmp_path, TIERS, tile_mlp=2)


def on_two_ranks(job: Job, folder: Path) -> tuple[Result, Result]:
    memory = rank_pool.train(job, ("none", "none"), folder / "memory", tile_mlp=3)
    return memory, rank_pool.train(job, DISK, folder / "disk", tile_mlp=3, device_memory=4 * room_for(job, 1))


@pytest.mark.slow
def test_ranks_train_tiles(ranks: RankPool, tmp_path: Path) -> None:
    """With the same bits in memory and on disk, and the numbers of one rank."""
    job = rank_jobs.JOBS["gpt2"]._replace(steps=3)
    alone = rank_pool.train(job, DISK, tmp_path / "alone", tile_mlp=3)
    for memory, disk in ranks.run(on_two_ranks, job, tmp_path):
        assert_same(memory, disk)
        rounding_bounds.same_training(disk, alone, job, reordered=True)


def test_the_config_the_call_and_plain_torch_give_the_same(tmp_path: Path) -> None:
    """The first two the same bits, and a plain loop the same numbers."""
    job = JOBS["llama"]
    by_hand = job._replace(model=tiled_by_hand)
    assert_same(run(job, DISK, tmp_path / "1", tile_mlp=3), run(by_hand, DISK, tmp_path / "2"))
    rounding_bounds.same_training(run(by_hand, DISK, tmp_path / "3"), plain_loop(by_hand), by_hand)


@pytest.mark.sample(1)
@pytest.mark.parametrize("units", [(), ("Linear",)], ids=["layers", "matrices"])
def test_a_small_budget_changes_no_bit(units: tuple[str, ...], tmp_path: Path) -> None:
    """With matrices as units and room for two, the three of an MLP never fit together."""
    job = JOBS["llama"]
    expected = run(job, ("none", "none"), tmp_path / "whole", tile_mlp=3)
    matrix = 64 * 128 * 4
    room = 2 * matrix + 2048 if units else room_for(job, 1)
    found = run(job, DISK, tmp_path / "small", tile_mlp=3, units=list(units), device_memory=room)
    assert_same(expected, found)


def acquired(engine: Any, work: Callable[[], Any]) -> list[str]:
    """Returns the units that the pager is asked for, in order, while `work` runs."""
    pager, found = testing.inspect(engine).pager, list[int]()
    with pytest.MonkeyPatch.context() as patch:
        testing.intercept(patch, "pager.acquire", lambda real, *call: (found.append(call[1]), real(*call))[1])
        work()
    names = [entry.size.name for entry in pager.table.entries]
    return [names[unit] for unit in found]


@pytest.mark.parametrize("chunks", [2, 8])
def test_weights_are_brought_once_for_all_chunks(chunks: int, tmp_path: Path) -> None:
    """In the forward by the layer, if it is a unit, else by the MLP; in the backward by the MLP."""
    for units in ([], ["Linear"]):
        job, room = JOBS["llama"], room_for(JOBS["llama"], 3)
        engine = start(job, DISK, tmp_path / str(len(units)), tile_mlp=chunks, units=units, device_memory=room)
        loss = list[torch.Tensor]()
        forward = acquired(engine, lambda: loss.append(models.language_loss(engine, 0, 0)))  # noqa: B023
        backward = acquired(engine, lambda: engine.backward(loss[0]))  # noqa: B023
        unit = "model.layers.0.mlp.up_proj" if units else "model.layers.0"
        assert forward.count(unit) == 1
        # The attention of the layer needs the unit again, after its MLP.
        assert backward.count(unit) == (1 if units else 2)
        engine.destroy(remove=True)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Mistral"])
def test_checkpointing_costs_no_further_forward(kind: str, tmp_path: Path) -> None:
    """Recomputation of a layer ends before its MLP, whose chunks are computed again in the backward alone."""

    def model() -> nn.Module:
        made: Any = of(kind)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            made.gradient_checkpointing_enable({"use_reentrant": False})
        return made.train()  # type: ignore[no-any-return]

    engine = start(JOBS["llama"]._replace(model=model), DISK, tmp_path, tile_mlp=4)
    calls = list[int]()
    engine.module.model.layers[0].mlp.act_fn.register_forward_hook(lambda *_: calls.append(1))
    engine.backward(models.language_loss(engine, 0, 0))
    assert len(calls) == 4 + 4
    engine.destroy(remove=True)


def test_a_parameter_has_one_gradient_a_micro_batch(tmp_path: Path) -> None:
    calls, adder = list[tuple[int, int]](), GradientAccumulator.adder

    def counting(self: GradientAccumulator, unit: int, at: int) -> Callable[[torch.Tensor], None]:
        add = adder(self, unit, at)

        def counted(gradient: torch.Tensor) -> None:
            calls.append((unit, at))
            add(gradient)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        testing.replace(patch, "gradient.adder", counting)  # before hooks bind it
        engine = start(JOBS["llama"], DISK, tmp_path, tile_mlp=4)
        engine.backward(models.language_loss(engine, 0, 0))
    assert len(calls) == len(set(calls)) == len(list(engine.module.parameters()))
    engine.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_a_chunk_is_recovered_from(error: type[BaseException], tmp_path: Path) -> None:
    """In the forward, and in the backward; the next micro-batch gives the bits that it would have given."""
    job = JOBS["llama"]._replace(accumulation=1)
    expected = run(job, DISK, tmp_path / "expected", tile_mlp=4)
    engine = start(job, DISK, tmp_path / "fails", tile_mlp=4)
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls in (2, 2 + 4 + 2):  # the second chunk of the first forward, and of the second one's backward
            raise error("in a chunk")

    hook = engine.module.model.layers[1].mlp.act_fn.register_forward_hook(fail)
    for _ in range(2):
        with pytest.raises(error, match="in a chunk"):
            engine.backward(models.language_loss(engine, 0, 0))
        engine.zero_grad()
    hook.remove()
    assert_same(trained(engine, job), expected)
    engine.destroy(remove=True)


def test_an_evaluation_computes_chunks_of_the_same_bits(tmp_path: Path) -> None:
    job = JOBS["llama"]
    losses = []
    for placement in TIERS:
        engine = start(job, placement, tmp_path / placement[0], tile_mlp=3)
        loss = float(models.language_loss(engine, 0, 0).detach())
        calls = list[int]()
        hook = engine.module.model.layers[0].mlp.act_fn.register_forward_hook(lambda *_: calls.append(1))  # noqa: B023
        with torch.no_grad():
            assert float(models.language_loss(engine, 0, 0)) == loss and len(calls) == 3
        hook.remove()
        ids = models.tokens(0, 0).to(engine.device)[:, :5]
        losses.append((loss, engine.module.generate(ids, max_new_tokens=4, do_sample=False).tolist()))
        engine.destroy(remove=True)
    assert losses[0] == losses[1] == losses[2]


def compiled() -> nn.Module:
    model: Any = models.llama()
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.cpu_only("the compiler knows no device of tests")
@pytest.mark.filterwarnings("ignore")  # of torch.compile itself
def test_compiled_layers_change_no_bit(tmp_path: Path) -> None:
    """The modules within have no hooks, so the tiled MLP fetches its weights itself."""
    job = JOBS["llama"]
    expected = run(job, ("none", "none"), tmp_path / "plain", tile_mlp=3)
    room = room_for(job, 2)
    assert_same(
        expected, run(job._replace(model=compiled), DISK, tmp_path / "compiled", tile_mlp=3, device_memory=room)
    )


def test_a_graph_made_before_a_step_is_refused(tmp_path: Path) -> None:
    """Chunks that were computed again would be those of newer weights."""

    def stack() -> nn.Module:
        return nn.Sequential(*(offload.tiled(nn.Sequential(nn.Linear(8, 8)), chunks=2) for _ in range(2)))

    def loss(model: Any, step: int, micro: int) -> torch.Tensor:
        return model(torch.ones(1, 6, 8)).square().mean()  # type: ignore[no-any-return]

    job = Job(stack, loss)
    engine = start(job, DISK, tmp_path)
    old = loss(engine, 0, 0)
    train_step(engine, job, 0)
    with pytest.raises(offload.UsageError, match=r"graph made before step\(\): the weights of 0\.weight of the tiled"):
        old.backward()
    engine.destroy(remove=True)


def test_a_tiled_module_runs_alone(tmp_path: Path) -> None:
    """Outside of the model's call, and its backward is then the whole backward."""
    job = JOBS["llama"]
    gradients = []
    for how in (3, False):
        engine = start(job, DISK, tmp_path / str(how), tile_mlp=how)
        mlp = engine.module.model.layers[0].mlp
        hidden = torch.ones(1, 9, 64).cumsum(1).div(9).to(engine.device).requires_grad_()
        mlp(hidden).square().sum().backward()
        gradients.append([hidden.grad, *(offload.safe_get_full_grad(each) for each in mlp.parameters())])
        engine.destroy(remove=True)
    for mine, right in zip(*gradients, strict=True):
        assert right.any() and torch.allclose(mine, right, rtol=0, atol=float(right.abs().max()) * 64 * 2.0**-24)


def test_autocast_inside_of_the_engine_is_replayed(tmp_path: Path) -> None:
    def loss(model: Any, step: int, micro: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return models.language_loss(model, step, micro)

    job = Job(models.llama, loss, steps=2)
    found = same_bits(job, tmp_path, TIERS, tile_mlp=3)
    rounded = job._replace(dtype="bf16")
    rounding_bounds.same_losses(found.losses, plain_loop(job).losses, rounded)


class Stack(nn.Module):
    """Residual MLPs, as in a decoder without attention."""

    def __init__(self, layers: int, features: int, inner: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gated(features, inner) for _ in range(layers))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return hidden


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("positions", [1024, 4096])
def test_device_memory_of_a_step_is_the_hidden_states_and_one_tile(positions: int, dtype: str, tmp_path: Path) -> None:
    """Beside the arena: a hidden state for each layer, some of the backward, one tile, and gradients of one MLP."""
    layers, features, inner, length, size = 3, 32, 128, 64, DTYPES[dtype].itemsize

    def stack() -> nn.Module:
        model = Stack(layers, features, inner)
        for layer in model.layers:
            offload.tiled(layer, chunk_length=length)
        return model

    engine = start(Job(stack, models.language_loss, dtype=dtype), ("cpu", "cpu"), tmp_path)
    hidden = torch.randn(1, positions, features, dtype=DTYPES[dtype])
    with Peak() as counted:
        output = engine(hidden)
        output.backward(torch.ones_like(output))
    engine.destroy(remove=True)
    state = positions * features * size
    tile = length * (6 * inner + 2 * features) * size
    gradients = (3 * features * inner + features) * (4 + size)
    small = 4 * torch.get_rng_state().numel() + 1024
    # States: the sums of the layers, and in the backward the slope, the slope of the MLP's input, and their sum.
    formula = (layers + 3) * state + tile + gradients + small
    assert (layers + 1) * state < counted.peak <= formula < layers * positions * 4 * inner * size
