"""Muon and SinkGD step matrices as their papers and torch do, in any tiles."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.config import load_config
from offload.errors import ConfigError, UsageError
from offload.layout.flat_layout import UnitLayout, lay_out
from offload.layout.modes import make_mode
from offload.layout.optimizer_states import cuts, matrices_of, product_flops, whole_sizes
from offload.optimizers.matrices import Workspace, balance, orthogonalize
from offload.planner.memory import Memory, Room, settings, settle
from offload.planner.model_shape import BY_BLOCKS, from_training
from offload.precision import has_products_in_bf16, products_in_bf16
from tests.optim.test_optimizers import assert_resumes_and_loads
from tests.support import rounding_bounds
from tests.support.models import gpt2, llama, mixtral
from tests.support.modules.matrix_models import MUON, SINKGD, Words, words_loss
from tests.support.oracle import (
    Job,
    assert_same,
    assert_same_tensors,
    config,
    least_host_memory,
    plain_loop,
    run,
    same_bits,
    start,
    train_step,
    weights_of,
)
from tests.support.processes.device_process import engine_device
from tests.support.rounding_bounds import sum_error

DISK = ("nvme", "nvme")
SOME = (DISK, ("cpu", "cpu"), ("none", "nvme"), ("none", "none"))
EXACT_SUMS = {"fp32": "auto", "bf16": "fp32", "fp16": "auto"}
"""The key `gradients` with which no sum of micro-batches is rounded, as none is in the plain loop."""
with_torch = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
in_bf16 = pytest.mark.skipif(not products_in_bf16(), reason="without products in bf16 they are in fp32")

NUMBERS: dict[str, tuple[tuple[str, Any], ...]] = {
    "default": (),
    "as AdamW": (("adjust_lr_fn", "match_rms_adamw"), ("muon_lr", 1e-3)),
    "no Nesterov": (("nesterov", False), ("momentum", 0.8)),
    "one iteration": (("ns_steps", 1), ("ns_coefficients", (2.0, -1.5, 0.5))),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "job", [pytest.param(MUON, marks=[with_torch, in_bf16], id="muon"), pytest.param(SINKGD, id="sinkgd")]
)
def test_it_is_the_muon_of_torch_or_what_its_paper_has_bit_for_bit(
    job: Job, dtype: str, accumulation: int, tmp_path: Path
) -> None:
    job = job._replace(dtype=dtype, accumulation=accumulation)
    mine, plain = run(job, DISK, tmp_path, gradients=EXACT_SUMS[dtype]), plain_loop(job)
    assert mine.losses == plain.losses
    assert_same_tensors(mine.weights, plain.weights)


@with_torch
@in_bf16
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NUMBERS)
def test_its_numbers_are_those_of_torch(name: str, tmp_path: Path) -> None:
    job = MUON._replace(steps=2, params=(*MUON.params, *NUMBERS[name]))
    mine, plain = run(job, ("cpu", "cpu"), tmp_path), plain_loop(job)
    assert mine.losses == plain.losses
    assert_same_tensors(mine.weights, plain.weights)


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (24, 24)])
@pytest.mark.numeric
def test_the_direction_is_the_polynomial_of_the_singular_values(shape: tuple[int, int]) -> None:
    """An iteration maps each singular value s to as + bs**3 + cs**5, and leaves the singular vectors."""
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    numel, square = shape[0] * shape[1], min(shape) ** 2
    workspace = Workspace(matrix.flatten().clone(), *(torch.empty(each) for each in (numel, square)))
    a, b, c = 3.4445, -4.7750, 2.0315
    direction = orthogonalize(shape, workspace, 5, (a, b, c)).double()
    u, values, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.square().sum().sqrt()
    growth = 1.0
    for _ in range(5):
        # A rounding grows by the largest derivative of the polynomial on the way that is left.
        growth *= float((a + 3 * b * values**2 + 5 * c * values**4).abs().max().clamp(min=1.0))
        values = a * values + b * values**3 + c * values**5
    expected = u @ torch.diag(values) @ v
    # Each iteration has three products, whose numbers are up to |a| + |b| + |c| times the matrix, in sums of a row.
    error = (abs(a) + abs(b) + abs(c)) * growth * rounding_bounds.sum_error(5 * 3 * max(shape))
    assert error < 0.1  # of a direction that is wrong, all is
    assert float((direction - expected).norm()) <= error * float(expected.norm())


@pytest.mark.sample(1)
@pytest.mark.parametrize("ns_steps", [4, 5])
def test_without_products_in_bf16_placements_have_the_same_bits(
    ns_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products are in fp32 then; after an even number of iterations the direction is in the master's memory."""
    if engine_device() != "cpu":
        pytest.skip("a device has products in bf16")
    testing.replace(monkeypatch, "muon.products_in_bf16", lambda: False)
    job = MUON._replace(steps=2, dtype="bf16", params=(*MUON.params, ("ns_steps", ns_steps)))
    slow = same_bits(job, tmp_path / "fp32", SOME)
    testing.replace(monkeypatch, "muon.products_in_bf16", lambda: True)
    fast = run(job, DISK, tmp_path / "bf16")
    assert not torch.equal(slow.weights["blocks.0.1.weight"], fast.weights["blocks.0.1.weight"])
    # Two runs of one direction: the second step starts from weights that are apart by roundings of a bf16 direction.
    assert slow.losses[0] == fast.losses[0]
    assert abs(slow.losses[1] - fast.losses[1]) < 0.01 * fast.losses[1]


def test_flags_of_the_processor_and_limits_decide_on_bf16() -> None:
    assert has_products_in_bf16("flags : fpu avx512_bf16 amx_tile", {})
    assert has_products_in_bf16("Features : fp asimd bf16", {})
    assert not has_products_in_bf16("flags : fpu avx2 avx512f", {})
    assert not has_products_in_bf16("flags : fpu amx_bf16", {"ONEDNN_MAX_CPU_ISA": "AVX2"})


BOTH = pytest.mark.parametrize("job", [MUON, SINKGD], ids=["Muon", "SinkGD"])


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 2])
@BOTH
def test_placements_have_the_same_bits(job: Job, accumulation: int, dtype: str, tmp_path: Path) -> None:
    same_bits(job._replace(dtype=dtype, accumulation=accumulation, clip=0.1), tmp_path, SOME)


@pytest.mark.sample(1)
@BOTH
def test_a_small_budget_has_the_same_bits(job: Job, tmp_path: Path) -> None:
    job = job._replace(dtype="bf16")
    least = least_host_memory(job, tmp_path / "least")
    assert_same(run(job, DISK, tmp_path / "small", host_memory=least), run(job, ("none", "none"), tmp_path / "large"))


@pytest.mark.slow
@pytest.mark.sample(1)
@BOTH
def test_a_run_is_resumed_and_saved_with_its_states(job: Job, tmp_path: Path) -> None:
    assert_resumes_and_loads(job._replace(dtype="bf16"), tmp_path, units=["blocks.0", "embed"])


def test_its_state_dict_names_the_states_as_torch(tmp_path: Path) -> None:
    engine = start(MUON, DISK, tmp_path)
    assert engine.optimizer.state_dict()["state"] == {}
    train_step(engine, MUON, 0)
    state_dict = engine.optimizer.state_dict()
    names = {name: p for name, p in engine.module.named_parameters()}
    numbered = [id(p) for group in engine.optimizer.param_groups for p in group["params"]]
    states = {name: state_dict["state"][numbered.index(id(p))] for name, p in names.items()}
    assert set(states["blocks.0.1.weight"]) == {"step", "momentum_buffer"}
    assert states["blocks.0.1.weight"]["momentum_buffer"].shape == (40, 24)
    assert set(states["head.weight"]) == set(states["blocks.0.1.bias"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert float(states["head.weight"]["step"]) == 1
    momentum = offload.safe_get_full_optimizer_state(names["blocks.0.1.weight"], "momentum_buffer")
    assert momentum is not None and torch.equal(momentum.cpu(), states["blocks.0.1.weight"]["momentum_buffer"])
    for parameter, there in ((names["blocks.0.1.weight"], "momentum_buffer"), (names["head.weight"], "exp_avg")):
        other_name = "exp_avg" if there == "momentum_buffer" else "momentum_buffer"
        with pytest.raises(UsageError, match=f"keeps no state '{other_name}' of .*, whose states are: \"{there}\""):
            offload.safe_get_full_optimizer_state(parameter, other_name)
    engine.destroy(remove=True)


def test_its_states_can_be_set(tmp_path: Path) -> None:
    """A state dict goes into another engine, which then trains as the first one does."""
    source = start(MUON, DISK, tmp_path / "one")
    train_step(source, MUON, 0)
    states, weights = source.optimizer.state_dict(), weights_of(source)
    target = start(MUON, ("cpu", "cpu"), tmp_path / "other")
    target.module.load_state_dict(weights)
    target.optimizer.load_state_dict(states)
    for engine in (source, target):
        train_step(engine, MUON, 1)
    assert_same_tensors(weights_of(source), weights_of(target))
    momentum = target.module.get_parameter("blocks.0.1.weight")
    offload.safe_set_full_optimizer_state(momentum, torch.full((40, 24), 0.5), "momentum_buffer")
    moment = offload.safe_get_full_optimizer_state(momentum, "momentum_buffer")
    assert moment is not None and torch.equal(moment.cpu(), torch.full((40, 24), 0.5))
    source.destroy(remove=True)
    target.destroy(remove=True)


# -- which parameters are matrices ---------------------------------------------------------------------


def test_embeddings_heads_norms_and_biases_are_no_matrices() -> None:
    blocks = {f"transformer.h.{i}.{name}.weight" for i in range(3) for name in ("attn.c_attn", "attn.c_proj")}
    blocks |= {f"transformer.h.{i}.mlp.{name}.weight" for i in range(3) for name in ("c_fc", "c_proj")}
    assert matrices_of(gpt2()) == blocks  # wte is tied to the head, and wpe an embedding too
    matrices = matrices_of(llama())
    assert "lm_head.weight" not in matrices and "model.embed_tokens.weight" not in matrices
    assert len(matrices) == 2 * 7
    # Experts that are stacked into one tensor of three dimensions are no matrices.
    assert all("experts" not in name for name in matrices_of(mixtral()))


def test_a_mark_comes_before_the_rule() -> None:
    model = Words()
    model.embed.weight.use_muon = True  # type: ignore[assignment]
    model.blocks[0][1].weight.use_muon = False  # type: ignore[index, assignment, union-attr]
    matrices = matrices_of(model)
    assert "embed.weight" in matrices and "blocks.0.1.weight" not in matrices and "blocks.0.3.weight" in matrices
    model.blocks[0][1].bias.use_muon = True  # type: ignore[index, assignment, union-attr]
    with pytest.raises(ConfigError, match=r"blocks\.0\.1\.bias is marked with use_muon=True and has shape \[40\]"):
        matrices_of(model)


def test_a_group_decides_for_its_parameters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Words()
    first = model.blocks[0][1].weight  # type: ignore[index, union-attr]
    groups = [
        {"params": [first], "use_muon": False, "lr": 0.5},
        {"params": [p for p in model.parameters() if p is not first], "weight_decay": 0.3},
    ]
    engine = offload.initialize(model=model, model_parameters=groups, config=config(MUON, DISK, tmp_path))[0]
    settings = [
        (group["use_muon"], group["lr"], group["weight_decay"], len(group["params"]))
        for group in engine.optimizer.param_groups
    ]
    assert settings == [(False, 0.5, 0.1, 1), (True, 0.02, 0.3, 8), (False, 3e-3, 0.3, 17)]
    engine.destroy(remove=True)


def test_a_parameter_stays_what_it_was(tmp_path: Path) -> None:
    engine = start(MUON, DISK, tmp_path)
    train_step(engine, MUON, 0)
    weight = engine.module.get_parameter("blocks.0.1.weight")
    engine.optimizer.add_param_group({"params": [weight], "lr": 1e-3})
    assert engine.optimizer.param_groups[-1]["use_muon"]
    train_step(engine, MUON, 1)
    with pytest.raises(
        UsageError, match=r"use_muon of a group differs from that at offload\.initialize for 1 parameter"
    ):
        engine.optimizer.add_param_group({"params": [weight], "use_muon": False})
    engine.optimizer.param_groups[-1]["use_muon"] = False
    loss = words_loss(engine, 2, 0)
    engine.backward(loss)
    with pytest.raises(UsageError, match="set it back"):
        engine.step()
    engine.optimizer.param_groups[-1]["use_muon"] = True
    engine.step()
    engine.destroy(remove=True)


# -- configs -------------------------------------------------------------------------------------------


def test_wrong_params_are_errors_that_name_the_key() -> None:
    for params, message in (
        ({"momentum": 1.0}, "params.momentum 1, which Muon needs to be below 1"),
        ({"ns_steps": 0}, "optimizer.params.ns_steps"),
        ({"ns_steps": 100}, "optimizer.params.ns_steps"),
        ({"adjust_lr_fn": "root"}, "optimizer.params.adjust_lr_fn"),
        ({"ns_method": "gram"}, "optimizer.params.ns_method"),
        ({"ns_coefficients": [1, 2]}, "optimizer.params.ns_coefficients"),
        ({"dampening": 0.1}, "contains params.dampening, and Muon takes lr, muon_lr, adam_lr"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config({"optimizer": {"type": "muon", "params": {"lr": 1e-3, **params}}})
    with pytest.raises(ConfigError, match=r"contains params\.momentum, and SinkGD takes lr, sinkgd_lr, adam_lr"):
        load_config({"optimizer": {"type": "sinkgd", "params": {"lr": 1e-3, "momentum": 0.9}}})


def test_two_learning_rates_stand_for_one(tmp_path: Path) -> None:
    def begin(**params: Any) -> offload.Engine:
        content = config(MUON, DISK, tmp_path)
        content["optimizer"]["params"] = params
        return offload.initialize(model=Words(), config=content)[0]

    engine = begin(muon_lr=0.5, adam_lr=0.25)
    assert [(group["use_muon"], group["lr"]) for group in engine.optimizer.param_groups] == [(True, 0.5), (False, 0.25)]
    engine.destroy(remove=True)
    for params in ({"muon_lr": 0.5}, {"adam_lr": 0.5}, {}):
        with pytest.raises(ConfigError, match="learning rate"):
            begin(**params)


def test_a_model_without_matrices_trains_by_adamw(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 1), nn.Linear(1, 1))

    def loss(model: Any, step: int, micro: int) -> torch.Tensor:
        rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        loss: torch.Tensor = model(rows).square().mean()
        return loss

    job = Job(make, loss, steps=3, clip=0.0)
    numbers = (("betas", (0.9, 0.999)), ("eps", 1e-8))
    assert_same(
        run(job._replace(optimizer="Muon", params=numbers), DISK, tmp_path / "a"), run(job, DISK, tmp_path / "b")
    )


# -- plans ---------------------------------------------------------------------------------------------


def _plan(optimizer: str) -> Memory:
    shape = from_training(gpt2(), 16, torch.bfloat16, BY_BLOCKS, {})
    content = settings() | {"optimizer": {"type": optimizer, "params": {"lr": 1e-3}}}
    return settle(shape.layouts, content, Room(host=8 << 30, device=0, disk=None), matrices=shape.matrices)


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["Muon", "SinkGD"])
def test_a_plan_has_the_bytes_of_the_run(optimizer: str, tmp_path: Path) -> None:
    content = config(MUON._replace(dtype="bf16", optimizer=optimizer, params=()), DISK, tmp_path)
    engine = offload.initialize(model=gpt2(), config=content)[0]
    inspected = testing.inspect(engine)
    plan = _plan(optimizer)
    assert plan.request.layouts == inspected.layouts
    assert plan.parts.nbytes == inspected.state_bytes
    engine.destroy(remove=True)


def test_a_plan_counts_the_products() -> None:
    layouts = _plan("Muon").request.layouts
    matrices = [s for layout in layouts for s in layout.segments if layout.is_matrix(s)]
    assert sum(s.numel for s in matrices if len(set(s.shape)) == 1) == 3 * 64 * 64
    by_hand = 0.0
    for layout in layouts:
        for segment in layout.segments:
            if segment in matrices:
                small, large = sorted(segment.shape)
                # X X', its square, and both times X.
                by_hand += 5 * (2 * small * small * large + 2 * small**3 + 2 * small * small * large)
    assert product_flops(layouts, "muon", 5) == by_hand
    assert product_flops(layouts, "sinkgd", 5) == product_flops(layouts, "adam", 5) == 0


def test_rows_and_columns_get_their_norms() -> None:
    """After the last pass the columns have their norm but for roundings, and the rows nearly, by convergence."""
    for rows, columns in ((40, 24), (24, 40), (2, 2), (1, 5)):
        torch.manual_seed(0)
        gradient = torch.randn(rows, columns) * torch.logspace(-6, 3, rows).view(-1, 1)
        balance(gradient, 50)
        norms = gradient.norm(dim=0)
        assert torch.allclose(norms, torch.tensor(math.sqrt(rows)), rtol=2 * sum_error(rows), atol=0)
        assert torch.allclose(gradient.norm(dim=1), torch.tensor(math.sqrt(columns)), rtol=1e-3, atol=0)


def test_rows_without_a_gradient_stay_where_they_are() -> None:
    gradient = torch.zeros(3, 4)
    gradient[1] = torch.tensor([1.0, -2.0, 0.0, 1e-30])
    balance(gradient, 5)
    assert gradient.isfinite().all() and not gradient[0].any() and not gradient[2].any() and gradient[1].any()


MODE = make_mode("bf16", "muon")


def layout_of(ranks: int, vector_numel: int, *shapes: tuple[int, int]) -> UnitLayout:
    """A unit of a vector and matrices."""
    made = {f"{n}.weight": nn.Parameter(torch.empty(shape, device="meta")) for n, shape in enumerate(shapes)}
    vector = nn.Parameter(torch.empty(vector_numel, device="meta"))
    return lay_out("unit", [("vector", vector), *made.items()], ranks, matrices=made.keys())


def borders(layout: UnitLayout) -> set[int]:
    return {segment.start for segment in layout.segments if layout.is_matrix(segment)} | {layout.trainable_stop}


@pytest.mark.parametrize("tile_numel", [2048, 6144, 10**9])
@pytest.mark.parametrize("vector_numel", [1, 9000])
def test_tiles_cover_a_unit_in_order_and_end_at_borders_of_matrices(vector_numel: int, tile_numel: int) -> None:
    layout = layout_of(1, vector_numel, (64, 64), (64, 96), (24, 24), (24, 24), (96, 64))
    part = layout.trainable(0, 1)
    tiles = cuts(layout, MODE, part, True, tile_numel)
    assert [each for tile in tiles for each in tile] == list(part)
    assert all(tile.stop in borders(layout) for tile in tiles if tile.stop > layout.rest_stop)
    assert all(tile.stop <= layout.rest_stop or tile.start >= layout.rest_stop for tile in tiles)
    assert all(len(tile) <= max(tile_numel, whole_sizes([layout], MODE, 0, 1).tile) for tile in tiles)
    # Small matrices share a tile, and a larger one has its own.
    if tile_numel == 6144:
        inside = [sum(layout.segments[n].start in tile for n in range(1, 6)) for tile in tiles]
        assert [count for count in inside if count] == [1, 1, 2, 1]


def test_of_several_ranks_each_has_its_parts_of_matrices_in_one_tile() -> None:
    layout = layout_of(2, 6000, (64, 64), (64, 96))
    for rank in range(2):
        part = layout.trainable(rank, 2)
        tiles = cuts(layout, MODE, part, False, 4096)
        assert [each for tile in tiles for each in tile] == list(range(len(part)))
        of_matrices = [tile for tile in tiles if tile.stop > len(layout.rest(rank, 2))]
        assert of_matrices == [range(len(layout.rest(rank, 2)), len(part))]
