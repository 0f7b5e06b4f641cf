"""Groups of stacked experts are units, and multiply by grouped products: the bits are those of all experts at once."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

import offload
from offload import testing
from offload.config import load_config
from offload.errors import BudgetError, StoreError
from offload.layout.experts import groups_of, makes_grouped_products, takes_groups
from offload.layout.memory_plan import Division, division_of
from offload.notices import Headline
from offload.planner.activations import Load
from offload.planner.hardware import described, parse_drive
from offload.planner.memory import settings
from offload.planner.model_shape import drawn, from_training
from offload.planner.recommend import plan
from offload.states import State
from tests import device
from tests.experts.test_stacked_experts import BOTH, FEW, SIXTEEN, few_tokens, large, moved, of_experts
from tests.experts.test_stacked_experts import JOB as RANKS_JOB
from tests.support import models, rounding_bounds
from tests.support.modules.mixtures import FAMILIES, grouped, mixtral, qwen, stacks_of, visits
from tests.support.oracle import (
    Job,
    Result,
    accumulated_step,
    assert_same,
    assert_same_tensors,
    config,
    plain_loop,
    run,
    same_bits,
    start,
    train_step,
    trained,
    weights_of,
)
from tests.support.ranks.rank_pool import RankPool, train

DISK, CPU, MEMORY = ("nvme", "nvme"), ("cpu", "cpu"), ("none", "none")
_FIRST = "model.layers.0.mlp.experts"


def groups_in(engine: offload.Engine) -> list[str]:
    """Returns the names of the units that are groups of experts."""
    return [layout.name for layout in testing.inspect(engine).layouts if ":" in layout.name]


def assert_as_whole(result: Result, whole: Result) -> None:
    """The norm adds squares in another order."""
    assert result.losses == whole.losses
    assert_same_tensors(result.weights, whole.weights)


# -- numbers -----------------------------------------------------------------------------------------------


@pytest.mark.works("Modules", "stacked experts in groups with grouped products: Mixtral, Qwen3-MoE, gpt-oss", "right")
@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("loss", [few_tokens, models.language_loss])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_numbers_are_those_of_all_experts_at_once(
    family: str, loss: Callable[..., Any], dtype: str, tmp_path: Path
) -> None:
    """Also of experts and groups that no token visits."""
    job = Job(partial(grouped, FAMILIES[family]), loss, steps=3, clip=0.0, dtype=dtype, accumulation=2)
    whole = run(job, MEMORY, tmp_path / "whole", experts="whole")
    assert_as_whole(same_bits(job, tmp_path), whole)
    assert_as_whole(run(job, DISK, tmp_path / "small", device_memory="200KB"), whole)


@pytest.mark.numeric
def test_the_numbers_are_those_of_plain_transformers_but_for_roundings(tmp_path: Path) -> None:
    job = Job(FEW.model, models.language_loss, steps=3)
    in_groups, plain = run(job, DISK, tmp_path / "groups"), plain_loop(job)
    rounding_bounds.same_training(in_groups, plain, job)
    rounding_bounds.same_training(run(job, DISK, tmp_path / "each", experts="each"), plain, job)


@pytest.mark.sample(2)
@pytest.mark.parametrize("rule", ["Adam", "Lion", "SGD", "Adagrad"])
@BOTH
def test_an_expert_without_a_token_is_updated_as_torch_updates_it(job: Job, rule: str, tmp_path: Path) -> None:
    """Its gradient is zero there: moments fade, and weights move by momentum and decay. Also in a group without one."""
    job = job._replace(clip=0.0, optimizer=rule, lr=1e-2)
    assert_as_whole(run(job, DISK, tmp_path / "parts"), run(job, MEMORY, tmp_path / "whole", experts="whole"))


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("options", [{}, {"activations": "cpu"}, {"activations": "nvme", "schedule": "layer_major"}])
@BOTH
def test_blocks_that_are_computed_again_visit_the_same_experts(
    job: Job, options: dict[str, Any], tmp_path: Path
) -> None:
    job = job._replace(accumulation=2)
    plain = run(job, MEMORY, tmp_path / "plain", accumulated_step)
    assert_same(run(job, DISK, tmp_path / "again", accumulated_step, **options), plain)


def large_groups() -> nn.Module:
    """Returns a model with frozen experts that are large enough for codes, and an adapter."""
    return grouped(large)


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["int8", "nf4"])
def test_frozen_experts_in_blocks_are_those_of_whole_stacks(form: str, tmp_path: Path) -> None:
    job = Job(large_groups, few_tokens, steps=2, clip=0.0)
    whole = run(job, MEMORY, tmp_path / "whole", experts="whole", frozen=form)
    assert_as_whole(same_bits(job, tmp_path, frozen=form), whole)
    assert_as_whole(run(job, DISK, tmp_path / "again", frozen=form, activations="cpu"), whole)


def test_a_choice_of_no_expert_adds_nothing(tmp_path: Path) -> None:
    """The number of experts stands for none, as in the loop."""
    engine = start(Job(partial(grouped, mixtral), models.language_loss), CPU, tmp_path, experts="grouped")
    stack = engine.module.get_submodule(_FIRST)
    weights = {
        name: engine.module.get_parameter(f"{_FIRST}.{name}").detach().clone() for name in ("gate_up_proj", "down_proj")
    }
    hidden = torch.randn(5, 32)
    chosen, scores = torch.tensor([[0, 8], [3, 5], [8, 8], [7, 1], [2, 2]]), torch.rand(5, 2)
    expected = torch.zeros_like(hidden)
    for token, slot in ((0, 0), (1, 0), (1, 1), (3, 0), (3, 1), (4, 0), (4, 1)):
        gate, up = (weights["gate_up_proj"][chosen[token, slot]] @ hidden[token]).chunk(2)
        down = weights["down_proj"][chosen[token, slot]]
        expected[token] += scores[token, slot] * (down @ (stack.act_fn(gate) * up))
    with torch.no_grad():
        output, none = stack(hidden, chosen, scores), stack(hidden, torch.full((5, 2), 8), scores)
    torch.testing.assert_close(output, expected)
    assert not bool(none.any()) and not bool(output[2].any())
    engine.destroy()


def test_a_copy_of_the_model_is_an_ordinary_one(tmp_path: Path) -> None:
    engine = start(FEW, DISK, tmp_path)
    with torch.no_grad():
        expected = few_tokens(engine, 0, 0)
        assert torch.equal(few_tokens(copy.deepcopy(engine.module), 0, 0), expected)
    engine.destroy(remove=True)


@pytest.mark.numeric
def test_where_torch_makes_grouped_products_in_bf16_alone_each_expert_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some of its builds do. The first lines say so, once."""
    job = FEW._replace(model=partial(with_adapters, FEW.model), steps=2)
    usual = run(job, MEMORY, tmp_path / "usual")
    made = torch.nn.functional.grouped_mm

    def bf16_alone(inputs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if inputs.dtype is not torch.bfloat16:
            raise RuntimeError("Expected mat_a to be BFloat16 matrix got Float")
        return made(inputs, *args, **kwargs)

    makes_grouped_products.cache_clear()
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", bf16_alone)
    try:
        engine = start(job, DISK, tmp_path / "disk", device_memory="200KB")
        lines = [notice for notice in engine.notices if "no grouped products in fp32 on cpu" in notice]
        assert len(lines) == 1 and groups_in(engine)
        rounding_bounds.same_training(trained(engine, job), usual, job)
        engine.destroy(remove=True)
        assert makes_grouped_products(torch.bfloat16, torch.device("cpu"))
    finally:
        makes_grouped_products.cache_clear()


# -- bytes and uses ------------------------------------------------------------------------------------------


def test_only_groups_with_a_token_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All groups are updated, as torch updates a stack."""
    engine = start(FEW, DISK, tmp_path, device_memory="200KB")
    worker = testing.inspect(engine).update_worker
    assert worker is not None and len(groups_in(engine)) == 16
    calls = moved(engine, monkeypatch)
    with visits(engine.module) as seen:
        train_step(engine, FEW, 0)
    worker.finish(commit=False)
    experts = [name.rpartition("[") for name in seen]
    groups = {f"{stack}[{int(row[:-1]) // 2 * 2}:{int(row[:-1]) // 2 * 2 + 2}]" for stack, _, row in experts}
    assert of_experts(calls["read"], State.WEIGHT) >= groups and len(groups) < 16
    assert of_experts(calls["write"]) == set(groups_in(engine))
    engine.destroy(remove=True)


# -- adapters of stacks ----------------------------------------------------------------------------------------


def with_adapters(make: Callable[[], Any]) -> nn.Module:
    """Returns a model with adapters of both stacks, whose rank fills no 16 bytes."""
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapters = peft.LoraConfig(r=6, target_modules=["q_proj"], target_parameters=stacks, init_lora_weights=False)
    return peft.get_peft_model(grouped(make), adapters)


@pytest.mark.numeric
@pytest.mark.works("Training", "LoRA on stacked experts in groups (peft's `target_parameters`)", "right")
@pytest.mark.works("Training", "LoRA on stacked experts themselves (peft's `target_parameters`)", "right")
@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("experts", ["auto", "each"])
def test_adapters_of_stacks_train_without_a_merged_stack(
    family: str, experts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(partial(with_adapters, FAMILIES[family]), models.language_loss, steps=2)
    plain = plain_loop(job)
    monkeypatch.setattr(peft.tuners.lora.layer.ParamWrapper, "get_delta_factors", None)  # peft's way to merge
    paged = run(job, DISK, tmp_path / "disk", device_memory="200KB", experts=experts)
    rounding_bounds.same_training(paged, plain, job)
    assert_same(run(job, MEMORY, tmp_path / "memory", experts=experts), paged)
    assert_same(run(job, DISK, tmp_path / "again", activations="cpu", experts=experts), paged)


@pytest.mark.parametrize("experts", ["grouped", "each"])
def test_adapters_of_stacks_apply_as_peft_says(experts: str, tmp_path: Path) -> None:
    """Also after the engine's end. An adapter that is disabled adds nothing."""
    job = FEW._replace(model=partial(with_adapters, FEW.model))
    engine = start(job, DISK, tmp_path, experts=experts)
    assert sum(layout.name.endswith("]") for layout in testing.inspect(engine).layouts) > 2
    model = engine.module
    with torch.no_grad():
        adapted_loss = few_tokens(engine, 0, 0)
        model.base_model.disable_adapter_layers()
        base_loss = few_tokens(engine, 0, 0)
        model.base_model.enable_adapter_layers()
        assert few_tokens(engine, 0, 0) == adapted_loss != base_loss
    weights = weights_of(engine)
    engine.destroy(remove=True)
    again = job.model()
    again.load_state_dict(weights)
    with torch.no_grad():
        torch.testing.assert_close(few_tokens(again, 0, 0), adapted_loss)


@pytest.mark.test_device
def test_a_layer_takes_at_most_twenty_uses_of_units(tmp_path: Path) -> None:
    """With 128 experts, 8 of them for each token, as Qwen3-30B-A3B. Single experts take 256 of them alone."""
    layers = 3
    job = Job(partial(grouped, partial(qwen, 128, layers, 8)), models.language_loss, steps=2, clip=0.0, dtype="bf16")
    uses = {}
    for experts in ("auto", "each"):
        engine = start(job, CPU, tmp_path / experts, experts=experts, device_memory="600KB")
        before = testing.inspect(engine).pager.counts().uses
        train_step(engine, job, 0)
        uses[experts] = testing.inspect(engine).pager.counts().uses - before
        engine.destroy(remove=True)
    assert uses["auto"] <= 20 * layers
    assert uses["each"] > 200 * layers


@pytest.mark.test_device
@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(3))
def test_on_a_device_with_late_streams_the_bits_are_those_of_the_cpu(seed: int, tmp_path: Path) -> None:
    job = FEW._replace(dtype="bf16", steps=2, accumulation=2)
    expected = run(job, MEMORY, tmp_path / "plain", device="cpu", experts="whole")
    device.seed(seed, 0.8)
    for placement in (CPU, DISK):
        engine = start(job, placement, tmp_path / placement[0], device_memory="150KB")
        assert engine.device.type == "test" and groups_in(engine)
        result = trained(engine, job)
        engine.destroy(remove=True)
        assert_as_whole(result, expected)


# -- choice ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experts", "groups"), [(2, 2), (8, 8), (60, 6), (64, 8), (72, 8), (128, 8), (11, 1), (384, 8)]
)
def test_a_layer_has_at_most_eight_equal_groups(experts: int, groups: int) -> None:
    assert groups_of(experts) == groups


def test_the_choice_follows_the_models_own_products_unless_the_config_decides() -> None:
    assert takes_groups("auto", "grouped_mm", trains=True)
    assert not takes_groups("auto", "grouped_mm", trains=False), "few tokens"
    assert not takes_groups("auto", "eager", trains=True) and not takes_groups("auto", None, trains=True)
    assert takes_groups("grouped", "eager", trains=False) and not takes_groups("each", "grouped_mm", trains=True)


def test_a_line_says_what_the_units_are(tmp_path: Path) -> None:
    several = "experts in 8 groups a layer"
    for make, experts, words, why in (
        (
            FEW.model,
            "auto",
            "32 experts are 16 units of their own, in groups, with grouped products",
            f"{several}, since",
        ),
        (partial(qwen, 16), "grouped", 'with grouped products, in place of "eager"', f'{several}, as "experts" says'),
        (
            partial(qwen, 16),
            "auto",
            "32 experts are units of their own",
            "one by one, since the model makes no grouped",
        ),
    ):
        engine = start(FEW._replace(model=make), DISK, tmp_path, experts=experts)
        assert any(words in notice for notice in engine.notices)
        assert any(why in notice for notice in engine.notices if isinstance(notice, Headline))
        configs = {stack.config._experts_implementation for stack in stacks_of(engine.module).values()}
        assert configs == {"offload_by_group" if experts == "grouped" or make is FEW.model else "eager"}
        engine.destroy(remove=True)


def test_where_groups_have_no_room_each_expert_is_a_unit(tmp_path: Path) -> None:
    """A device with room for a quarter of a group, which is two experts and more than the rest of a layer."""
    job = Job(partial(grouped, partial(qwen, 64, 1)), few_tokens, steps=2)
    engine = start(job, DISK, tmp_path / "groups")
    largest = max(4 * layout.device_numel for layout in testing.inspect(engine).layouts)
    assert len(groups_in(engine)) == 8
    engine.destroy(remove=True)
    engine = start(job, DISK, tmp_path / "each", device_memory=largest * 3 // 4)
    assert not groups_in(engine) and engine.module.model.layers[0].mlp.experts.config._experts_implementation == "eager"
    assert any("one by one, since a group has no room on the device" in notice for notice in engine.notices)
    losses = trained(engine, job).losses
    engine.destroy(remove=True)
    assert losses == run(job, MEMORY, tmp_path / "memory", experts="each").losses
    with pytest.raises(BudgetError):
        start(job, DISK, tmp_path / "asked", device_memory=largest * 3 // 4, experts="grouped")


def least_named(refused: pytest.ExceptionInfo[BudgetError]) -> int:
    """Returns the bytes of the least device memory that an error names."""
    bytes_named = re.search(r"the least that works is .*?\((\d+) bytes\); it must hold", str(refused.value))
    assert bytes_named is not None
    return int(bytes_named[1])


@pytest.mark.parametrize("experts", ["grouped", "each"])
def test_the_least_device_memory_holds_experts_beside_the_rest_of_their_layer(experts: str, tmp_path: Path) -> None:
    job = FEW._replace(steps=1)
    with pytest.raises(BudgetError, match="with those that are there at the same time") as refused:
        start(job, DISK, tmp_path / "none", device_memory=1, experts=experts)
    least = run(job, DISK, tmp_path / "least", device_memory=least_named(refused), experts=experts)
    assert_same(least, run(job, MEMORY, tmp_path / "memory", experts=experts))


# -- runs and checkpoints --------------------------------------------------------------------------------------


@pytest.mark.parametrize("begun", ["each", "whole", "grouped"])
def test_a_run_keeps_the_units_with_which_it_was_begun(begun: str, tmp_path: Path) -> None:
    """Such as those of versions without groups."""
    start(FEW, DISK, tmp_path, experts=begun).destroy()
    other_experts = "each" if begun == "grouped" else "grouped"
    with pytest.raises(StoreError, match='"experts"'):
        start(FEW, DISK, tmp_path, resume="must", experts=other_experts)
    engine = start(FEW, DISK, tmp_path, resume="must")
    names = [layout.name for layout in testing.inspect(engine).layouts if layout.name.endswith("]")]
    assert len(names) == {"each": 32, "whole": 0, "grouped": 16}[begun]
    assert any("as the run was begun" in notice for notice in engine.notices) is bool(names)
    engine.destroy(remove=True)


def test_groups_of_one_expert_are_not_taken_for_single_experts(tmp_path: Path) -> None:
    """Eight experts are eight units either way."""
    job = Job(partial(grouped, mixtral), few_tokens)
    start(job, DISK, tmp_path, experts="each").destroy()
    with pytest.raises(StoreError, match='"experts"'):
        start(job, DISK, tmp_path, resume="must", experts="grouped")
    engine = start(job, DISK, tmp_path, resume="must")
    assert not groups_in(engine)
    engine.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (a, b)
        for a in ("each", "grouped", "whole")
        for b in ("each", "grouped", "whole")
        if (a, b) != ("whole", "whole")
    ],
)
@pytest.mark.parametrize("form", [None, "nf4"])
def test_a_checkpoint_loads_whatever_the_units_are(first: str, second: str, form: str | None, tmp_path: Path) -> None:
    job = FEW._replace(dtype="bf16", clip=0.0) if form is None else Job(large_groups, few_tokens, clip=0.0)
    engine = start(job, DISK, tmp_path / "first", experts=first, frozen=form)
    train_step(engine, job, 0)
    engine.save_checkpoint(tmp_path / "saved")
    expected = weights_of(engine)
    moments = _moments(engine)
    engine.destroy(remove=True)
    engine = start(job._replace(seed=5), DISK, tmp_path / "second", experts=second, frozen=form)
    engine.load_checkpoint(tmp_path / "saved")
    assert_same_tensors(weights_of(engine), expected)
    assert_same_tensors(_moments(engine), moments)
    engine.destroy(remove=True)


def _moments(engine: offload.Engine) -> dict[str, torch.Tensor]:
    trained = {name: each for name, each in engine.module.named_parameters() if each.requires_grad}
    moments = {name: offload.safe_get_full_optimizer_state(each, "exp_avg") for name, each in trained.items()}
    return {name: moment for name, moment in moments.items() if moment is not None}


# -- ranks -----------------------------------------------------------------------------------------------------


def with_the_least_memory(folder: Path) -> tuple[Result, Result]:
    """Groups with the usual room on the device, and with the bytes that an error names."""
    job = RANKS_JOB._replace(model=partial(grouped, RANKS_JOB.model), steps=1)
    with pytest.raises(BudgetError) as refused:
        train(job, DISK, folder / "none", device_memory=1)
    usual = train(job, DISK, folder / "usual")
    return usual, train(job, DISK, folder / "least", device_memory=least_named(refused))


def test_ranks_that_visit_different_groups_train_with_the_least_device_memory(ranks: RankPool, tmp_path: Path) -> None:
    """A group that waits for its use makes room for the group of the other rank."""
    for usual, least in ranks.run(with_the_least_memory, tmp_path):
        assert_same(least, usual)


# -- plan ------------------------------------------------------------------------------------------------------


def test_a_plan_divides_as_the_run_does(tmp_path: Path) -> None:
    for name, job, units in (("each", SIXTEEN, [16, 16]), ("groups", FEW, [8, 8])):
        content = config(job, DISK, tmp_path / name)
        shape = from_training(job.model(), 16, torch.float32, division_of(load_config(content)), {})
        engine = start(job, DISK, tmp_path / name)
        assert shape.layouts == testing.inspect(engine).layouts
        engine.destroy(remove=True)
        assert [len(each.units) for each in shape.experts] == units
    assert shape.experts[0].used(1) == pytest.approx(8 * (1 - (14 * 13) / (16 * 15)))
    assert len(drawn(shape, 10_000, 0).uses) - len(drawn(shape, 1, 0).uses) == 2 * (8 - round(8 * (1 - 182 / 240)))


def test_a_plan_takes_single_experts_where_groups_have_no_room() -> None:
    shape = from_training(grouped(partial(qwen, 64, 1)), 64, torch.bfloat16, Division(), {})
    machine = described("24GB", 1 << 34, [parse_drive("7GB/s,5GB/s")])
    content = settings("nvme", "nvme", batch=1)
    largest = max(2 * layout.device_numel for layout in shape.layouts)
    units = []
    for room in (largest * 4, largest * 3 // 4):
        content["offload"]["device_memory"] = room
        units.append(len(plan(shape, machine, Load(1, speculate=False), content).memory.request.layouts))
    assert units[0] == len(shape.layouts) < units[1]
