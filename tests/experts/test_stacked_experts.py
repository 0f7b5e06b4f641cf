"""Experts that transformers stacks in one parameter are units of their own, in any form, on any ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

import offload
from offload import testing
from offload.errors import StoreError, UsageError
from offload.layout.experts import cut_stacks
from offload.layout.memory_plan import Division
from offload.layout.modes import ADAM
from offload.planner.activations import Load
from offload.planner.hardware import described, parse_drive
from offload.planner.memory import settings
from offload.planner.model_shape import drawn, from_training
from offload.planner.output import heading
from offload.planner.recommend import Planned, plan
from offload.states import State
from tests.support import models, rounding_bounds
from tests.support.modules import mixtures
from tests.support.modules.mixtures import FAMILIES, few_tokens, grouped, mixtral, qwen, stacks_of, visits
from tests.support.oracle import (
    Job,
    Result,
    assert_same,
    assert_same_tensors,
    run,
    same_bits,
    start,
    train_step,
    weights_of,
)
from tests.support.ranks.rank_jobs import my_rows
from tests.support.ranks.rank_pool import RankPool, train
from tests.support.ranks.rank_pool import start as start_ranks
from tests.support.trainer_runs import Texts, seeded
from tests.support.trainer_runs import config as config_parameters

DISK, CPU, MEMORY = ("nvme", "nvme"), ("cpu", "cpu"), ("none", "none")
SIXTEEN = Job(partial(qwen, 16), few_tokens, steps=3)
"""Four tokens visit at most eight of sixteen experts in a layer, and so not all of eight groups."""
FEW = SIXTEEN._replace(model=partial(grouped, SIXTEEN.model))
BOTH = pytest.mark.parametrize("job", [SIXTEEN, FEW], ids=["each", "groups"])


def device_nbytes(engine: offload.Engine, title: str) -> int:
    """Returns the bytes on the device of the units whose names contain `title`."""
    layouts = testing.inspect(engine).layouts
    return sum(4 * layout.device_numel for layout in layouts if title in layout.name)


def moved(engine: offload.Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[str, State]]]:
    """Returns lists that receive (unit's name, state) of each read and write of the store from now on."""
    inspected = testing.inspect(engine)
    requests: dict[str, list[tuple[str, State]]] = {"read": [], "write": []}

    def told(real: Any, calls: list[tuple[str, State]]) -> Any:
        def call(unit: int, state: State, *args: Any, **kwargs: Any) -> Any:
            calls.append((inspected.layouts[unit].name, state))
            return real(unit, state, *args, **kwargs)

        return call

    for way, calls in requests.items():
        monkeypatch.setattr(inspected.store, way, told(getattr(inspected.store, way), calls))
    return requests


def of_experts(calls: list[tuple[str, State]], *states: State) -> set[str]:
    """Returns the experts of which one of `states` has moved."""
    return {name for name, state in calls if name.endswith("]") and (not states or state in states)}


def adapted(**options: Any) -> nn.Module:
    import peft

    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
    return peft.get_peft_model(qwen(16), adapters)


@pytest.mark.works("Modules", "stacked experts of Mixtral, Qwen3-MoE, gpt-oss, each a unit of its own", "right")
@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_numbers_are_those_of_whole_stacks_in_memory(family: str, dtype: str, tmp_path: Path) -> None:
    """A clip would add the squares of gradients in another order."""
    job = Job(FAMILIES[family], models.language_loss, steps=2, clip=0.0, dtype=dtype, accumulation=2)
    whole = run(job, MEMORY, tmp_path / "whole", experts="whole")
    result = same_bits(job, tmp_path, (MEMORY, DISK))
    assert result.losses == whole.losses
    assert_same_tensors(result.weights, whole.weights)


def test_a_stack_larger_than_the_device_trains(tmp_path: Path) -> None:
    job = SIXTEEN._replace(dtype="fp32")
    whole = run(job, MEMORY, tmp_path / "memory")
    engine = start(job, DISK, tmp_path / "disk")
    stack = device_nbytes(engine, "layers.0.mlp.experts")
    engine.destroy(remove=True)
    assert_same(run(job, DISK, tmp_path / "small", device_memory=stack // 2), whole)
    with pytest.raises(offload.errors.BudgetError, match="device"):
        start(job, DISK, tmp_path / "whole", device_memory=stack // 2, experts="whole")


def test_a_forward_with_another_implementation_uses_all_experts(tmp_path: Path) -> None:
    """Code that takes the whole stack while a module runs gets it, with its gradient."""

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mixtral()
            self.layers = self.inner.model.layers

        def forward(self, **inputs: Any) -> Any:
            out = self.inner(**inputs)
            norm = sum(stack.down_proj.square().sum() for stack in stacks_of(self.inner).values())
            out.loss = out.loss + 0.1 * norm
            return out

    job = Job(Summed, models.language_loss, steps=2, clip=0.0)
    whole = run(job, MEMORY, tmp_path / "whole", experts="whole")
    result = run(job, DISK, tmp_path / "each")
    assert result.losses == whole.losses
    assert_same_tensors(result.weights, whole.weights)


@pytest.mark.sample(1)
@pytest.mark.parametrize("experts", ["each", "visited"])
def test_only_visited_experts_are_read(experts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(SIXTEEN, DISK, tmp_path, device_memory="150KB", experts=experts)
    worker = testing.inspect(engine).update_worker
    assert worker is not None
    every = {layout.name for layout in testing.inspect(engine).layouts if layout.name.endswith("]")}
    calls, before = moved(engine, monkeypatch), set[str]()
    for step in range(SIXTEEN.steps):
        worker.finish(commit=False)
        for units in calls.values():
            units.clear()
        with visits(engine.module) as seen:
            train_step(engine, SIXTEEN, step)
        worker.finish(commit=False)
        assert seen < every
        # The experts of the step before are what is read ahead of the router's choice.
        assert of_experts(calls["read"], State.WEIGHT) >= seen
        stepped = every if experts == "each" else seen
        assert of_experts(calls["read"], State.EXP_AVG) == stepped
        assert of_experts(calls["write"]) == stepped
        if experts == "visited":
            assert of_experts(calls["read"], State.WEIGHT) <= seen | before
        before = seen
    engine.destroy(remove=True)


def test_what_nobody_visits_keeps_its_bits_if_asked(tmp_path: Path) -> None:
    engine = start(SIXTEEN._replace(lr=1e-2), CPU, tmp_path, experts="visited")
    before, every = weights_of(engine), set[str]()
    for step in range(SIXTEEN.steps):
        with visits(engine.module) as seen:
            train_step(engine, SIXTEEN, step)
        every |= seen
    after = weights_of(engine)
    for name in stacks_of(engine.module):
        for own in ("gate_up_proj", "down_proj"):
            moment = offload.safe_get_full_optimizer_state(engine.module.get_parameter(f"{name}.{own}"), "exp_avg")
            assert moment is not None
            for expert in range(16):
                same = torch.equal(before[f"{name}.{own}"][expert], after[f"{name}.{own}"][expert])
                assert same == (f"{name}[{expert}]" not in every)
                # The last token has no loss, so what it alone visits in the last layer has a gradient of zeros.
                assert not same or not bool(moment[expert].any())
    assert len(every) < 32
    engine.destroy(remove=True)


def test_a_plan_counts_the_experts_that_so_many_tokens_visit() -> None:
    """By expectation, with a router that prefers none; states of the others do not move if a step skips them."""
    shape = from_training(qwen(16), 4, torch.bfloat16, Division(), {})
    of_one = 16 * (1 - (1 - 2 / 16) ** 4)
    assert shape.visited(1) == 4 and shape.visited(4) == pytest.approx(2 * of_one)
    few, some, all_of_them = drawn(shape, 4, 0), drawn(shape, 4, 1), drawn(shape, 10_000, 0)
    units = [{use.unit for use in each.uses} for each in (few, some, all_of_them)]
    experts = [use for use in few.uses if use.choice.units]
    assert [use.unit for use in experts] == [use.choice.units[0] for use in experts] and len(experts) == 2
    assert len(units[0]) == len(units[1]) == len(units[2]) - 2 * (16 - round(of_one)) and units[0] != units[1]
    assert sum(use.flops for use in few.uses) == pytest.approx(sum(use.flops for use in shape.uses))
    assert sum(use.saved for use in few.uses) == sum(use.saved for use in shape.uses)
    machine = described("24GB", 1 << 34, [parse_drive("7GB/s,5GB/s")])
    moved: dict[str, Planned] = {}
    for kind in ("each", "visited"):
        content = settings("nvme", "nvme", batch=1)
        content["offload"]["experts"] = kind
        moved[kind] = plan(shape, machine, Load(1, speculate=False), content)
    numel = [layout.trainable_stop for layout in shape.layouts]
    share = sum(numel[unit] for unit in units[0]) / sum(numel)
    written = [planned.timing.moved.written for planned in moved.values()]
    assert written[1] / written[0] == pytest.approx(share, rel=0.02)
    assert moved["visited"].timing.moved.read < moved["each"].timing.moved.read
    assert "experts: a micro-batch visits 13.24 of 32, by expectation" in " ".join(heading(moved["visited"]))


@pytest.mark.works("Training", "LoRA beside stacked experts that are frozen: only visited ones are read", "right")
@pytest.mark.parametrize(("make", "room"), [(adapted, "150KB"), (partial(grouped, adapted), "200KB")])
def test_adapters_train_beside_frozen_experts(
    make: Callable[[], nn.Module], room: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = SIXTEEN._replace(model=make)
    assert_same(run(job, DISK, tmp_path / "disk", device_memory=room), run(job, MEMORY, tmp_path / "memory"))
    engine = start(job, DISK, tmp_path / "read", device_memory=room)
    calls = moved(engine, monkeypatch)
    with visits(engine.module) as seen:
        train_step(engine, job, 0)
    read, every = of_experts(calls["read"]), [layout.name for layout in testing.inspect(engine).layouts]
    assert not of_experts(calls["write"]) and len(read) <= len(seen)
    assert read < {name for name in every if name.endswith("]")} and (make is not adapted or read == seen)
    engine.destroy(remove=True)


def large() -> nn.Module:
    """Returns a model whose experts are large enough to be stored as blocks of codes, and an adapter."""
    import peft
    import transformers

    widths = mixtures.DECODER | {"hidden_size": 64, "intermediate_size": 64}
    config = transformers.MixtralConfig(**widths, num_local_experts=8)
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    return peft.get_peft_model(transformers.MixtralForCausalLM(config), adapters)


@BOTH
def test_values_are_read_and_set_as_those_of_any_parameter(job: Job, tmp_path: Path) -> None:
    engine = start(job, DISK, tmp_path)
    stack = engine.module.get_parameter("model.layers.0.mlp.experts.down_proj")
    engine.backward(few_tokens(engine, 0, 0))
    gradient = offload.safe_get_full_grad(stack)
    assert gradient is not None and gradient.shape == stack.shape
    offload.safe_set_full_grad(stack, gradient * 2)
    twice = offload.safe_get_full_grad(stack)
    assert twice is not None and torch.equal(twice, gradient * 2)
    engine.step()
    values = torch.randn(stack.shape)
    offload.safe_set_full_fp32_param(stack, values)
    offload.safe_set_full_optimizer_state(stack, values.abs(), "exp_avg_sq")
    for value, expected in (
        (offload.safe_get_full_fp32_param(stack), values),
        (offload.safe_get_local_fp32_param(stack), values.view(-1)),
        (offload.safe_get_full_optimizer_state(stack, "exp_avg_sq"), values.abs()),
        (stack.clone().detach(), values),
        (stack.sum(0).detach(), values.sum(0)),
    ):
        assert value is not None and torch.equal(value.cpu(), expected)
    with offload.gathered(stack, modify=True):
        stack.data[3] = 7.0
    value = offload.safe_get_full_fp32_param(stack)
    assert value is not None and bool((value[3] == 7).all()) and torch.equal(value[4:].cpu(), values[4:])
    with torch.no_grad():
        stack.mul_(2)
    assert torch.equal(stack.detach().clone(), value * 2)
    with pytest.raises(UsageError, match="gathered"), offload.gathered(stack):
        train_step(engine, job, 1)
    engine.destroy(remove=True)


@BOTH
def test_a_saved_model_is_one_of_transformers(job: Job, tmp_path: Path) -> None:
    import transformers

    engine = start(job, DISK, tmp_path / "run")
    train_step(engine, job, 0)
    engine.save_pretrained(tmp_path / "saved")
    expected = weights_of(engine)
    engine.destroy(remove=True)
    loaded = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path / "saved")
    assert_same_tensors(loaded.state_dict(), expected)
    with offload.init():
        model = qwen(16)
    offload.load_pretrained(model, tmp_path / "saved")
    experts = "each" if job is SIXTEEN else "grouped"
    engine = start(job._replace(model=lambda: model), DISK, tmp_path / "second", experts=experts)
    assert_same_tensors(weights_of(engine), expected)
    engine.destroy(remove=True)


RANKS_DISK, HOST = ("nvme", "nvme"), ("cpu", "cpu")
STACK = "model.layers.0.mlp.experts.down_proj"


def rows_of_few_tokens(model: Any, step: int, micro: int) -> torch.Tensor:
    """The loss of this rank's row of two: two tokens, which visit at most four of sixteen experts in a layer."""
    ids = my_rows(torch.randint(128, (2, 2), generator=torch.Generator().manual_seed(100 * step + micro)))
    return model(input_ids=ids, labels=ids).loss


JOB = Job(partial(qwen, 16, 1), rows_of_few_tokens, steps=2, lr=3e-4, params=(("eps", 1e-6),))
"""Queries of two tokens have gradients that are differences of near terms: a small eps would step along noise."""


# -- the numbers --------------------------------------------------------------------------------------


def in_both_ways(job: Job, room: str, folder: Path) -> tuple[Result, Result]:
    """Whole stacks in host memory, and parts of them on disk with little room on the device and in host memory."""
    whole = train(job, HOST, folder / "whole", experts="whole")
    return whole, train(job, RANKS_DISK, folder / "disk", device_memory=room)


@pytest.mark.slow
@pytest.mark.numeric
@pytest.mark.works("Several ranks", "stacked experts in groups, of which each rank visits others", "right")
@pytest.mark.works("Several ranks", "stacked experts, of which each rank visits others, one by one", "right")
@pytest.mark.parametrize(("made", "room"), [(JOB.model, "300KB"), (partial(grouped, JOB.model), "500KB")])
def test_the_numbers_are_those_of_whole_stacks(made: Any, room: str, ranks: RankPool, tmp_path: Path) -> None:
    """Bit for bit with one micro-batch."""
    job = JOB._replace(model=made, clip=0.0)
    (whole, rank0), (_, rank1) = ranks.run(in_both_ways, job, room, tmp_path)
    assert_same(rank0, rank1, "ranks")
    assert rank0.losses == whole.losses
    assert_same_tensors(rank0.weights, whole.weights)


def visited_and_moved(job: Job, folder: Path) -> tuple[Result, set[str], set[str], set[str]]:
    """The result, the experts that this rank has visited, and those of which it has read and written states."""
    engine = start_ranks(job, RANKS_DISK, folder, device_memory="300KB", experts="visited")
    inspected, moved = testing.inspect(engine), {"read": set[str](), "write": set[str]()}
    store = inspected.store
    assert store is not None
    losses: list[float] = []
    with pytest.MonkeyPatch.context() as patch, visits(engine.module) as seen:
        for way, names in moved.items():
            real = getattr(store, way)

            def told(unit: int, state: State, *args: Any, _real: Any = real, _names: Any = names, **more: Any) -> Any:
                _names.add(inspected.layouts[unit].name)
                return _real(unit, state, *args, **more)

            patch.setattr(store, way, told)
        for step in range(job.steps):
            loss = job.loss(engine, step, 0)
            engine.backward(loss)
            losses.append(engine.mean(float(loss.detach())))
            engine.step()
        testing.settle(engine, commit=False)
    result = Result(losses, [], weights_of(engine))
    engine.destroy(remove=True)
    return result, seen, *({name for name in names if name.endswith("]")} for names in moved.values())


@pytest.mark.numeric
def test_ranks_read_and_update_what_any_of_them_visits(ranks: RankPool, tmp_path: Path) -> None:
    """And no other expert, whose weights keep their bits; one rank with both rows has the same numbers."""
    results = ranks.run(visited_and_moved, JOB, tmp_path / "two")
    (left, seen, read, written), (right, more, *moved) = results
    assert seen != more, "both ranks visit the same"
    assert read == written == seen | more == moved[0] == moved[1]
    assert_same_tensors(left.weights, right.weights, "ranks")
    torch.manual_seed(JOB.seed)
    first = JOB.model().state_dict()[STACK]
    for expert in range(16):
        same = torch.equal(left.weights[STACK][expert], first[expert])
        assert same == (f"{STACK.rpartition('.')[0]}[{expert}]" not in seen | more)
    alone = train(JOB, RANKS_DISK, tmp_path / "one", experts="visited")
    rounding_bounds.same_losses(left.losses, alone.losses, JOB)
    rounding_bounds.same_weights(left.weights, alone.weights, JOB, reordered=True)


# -- values and files ---------------------------------------------------------------------------------


def test_the_loop_takes_the_place_of_an_implementation_that_needs_all(tmp_path: Path) -> None:
    """Until the engine ends, and of no other model with the same config."""
    model = mixtral()
    model.set_experts_implementation("grouped_mm")
    engine = start(Job(lambda: model, models.language_loss), DISK, tmp_path, experts="each")
    assert any('16 experts are units of their own, in a loop in place of "grouped_mm"' in n for n in engine.notices)
    stacks = stacks_of(model).values()
    assert {stack.config._experts_implementation for stack in stacks} == {"eager"}
    assert model.config._experts_implementation == "grouped_mm"
    engine.destroy(remove=True)
    assert all(stack.config is model.config for stack in stacks)


def halved(module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """An implementation of the user's that computes something else."""
    return grouped_mm_experts_forward(module, *args, **kwargs) / 2


def test_an_implementation_of_the_users_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one of transformers' by a loop of the user's. The stacks stay whole, and a line says why."""
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "halved", halved)
    losses = []
    for name in ("grouped_mm", "halved"):
        model = seeded(mixtral)
        model.set_experts_implementation(name)
        plain = models.language_loss(model, 0, 0).item()
        engine = start(Job(lambda model=model: model, models.language_loss), DISK, tmp_path / name)
        losses.append(models.language_loss(engine, 0, 0).item())
        assert losses[-1] == pytest.approx(plain, rel=1e-6)
        whole = not any(layout.name.endswith("]") for layout in testing.inspect(engine).layouts)
        assert whole is (name == "halved")
        assert any('"halved" is halved' in notice for notice in engine.notices) is whole
        engine.destroy(remove=True)
    assert losses[0] != losses[1]


class Centred(nn.Module):
    """An activation that reads all its tokens at once: those of one expert in a loop, of all experts without one."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(hidden - hidden.mean(0, keepdim=True))


@pytest.mark.sample(1)
@pytest.mark.parametrize("change", ["activation", "gate", "hook"])
def test_what_mixes_the_tokens_of_experts_is_not_put_into_a_loop(change: str, tmp_path: Path) -> None:
    model = seeded(mixtral)
    model.set_experts_implementation("grouped_mm")
    stacks = stacks_of(model).values()
    before = models.language_loss(model, 0, 0).item()
    for stack in stacks:
        if change == "activation":
            stack.act_fn = Centred()
        elif change == "gate":
            stack._apply_gate = lambda hidden: Centred()(hidden.chunk(2, -1)[0])
        else:
            stack.act_fn.register_forward_hook(lambda _, args, output: output - output.mean(0))
    plain = models.language_loss(model, 0, 0).item()
    assert plain != pytest.approx(before, rel=1e-6)
    engine = start(Job(lambda: model, models.language_loss), DISK, tmp_path)
    assert models.language_loss(engine, 0, 0).item() == pytest.approx(plain, rel=1e-6)
    assert any("which a loop over the experts may not replace" in notice for notice in engine.notices)
    engine.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", ["LAMB", "Muon"])
def test_stacks_stay_whole_for_an_optimizer_that_looks_at_whole_parameters(rule: str, tmp_path: Path) -> None:
    engine = start(Job(mixtral, models.language_loss, optimizer=rule), DISK, tmp_path)
    assert any("the optimizer's rule looks at whole parameters" in notice for notice in engine.notices)
    assert not any(layout.name.endswith("]") for layout in testing.inspect(engine).layouts)
    engine.destroy(remove=True)


def test_a_module_that_is_one_unit_by_name_contains_its_experts(tmp_path: Path) -> None:
    engine = start(Job(mixtral, models.language_loss), DISK, tmp_path, units=["MixtralDecoderLayer"])
    assert not any(layout.name.endswith("]") for layout in testing.inspect(engine).layouts)
    engine.destroy(remove=True)


def test_a_run_resumes_with_the_experts_that_it_had(tmp_path: Path) -> None:
    """Experts that are skipped, and that are not, have the same swap files."""
    start(SIXTEEN, DISK, tmp_path).destroy()
    with pytest.raises(StoreError, match='resume with the "units", "experts", "vocabulary" and expert_parallel'):
        start(SIXTEEN, DISK, tmp_path, resume="must", experts="whole")
    start(SIXTEEN, DISK, tmp_path, resume="must", experts="visited").destroy(remove=True)


def test_a_stack_with_an_adapter_of_its_own_is_cut_as_one_without() -> None:
    for experts in ("each", "grouped"):
        for model in (adapted(), adapted(target_parameters=["mlp.experts.down_proj"])):
            assert len(cut_stacks(model, experts, ADAM)[0]) == 2


def adapted_parameters() -> Any:
    """Adapters of attention, and of both stacks of each layer, one around the other."""
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return peft.get_peft_model(mixtral(4), peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=stacks))


@pytest.mark.usefixtures("engines_end")
def test_a_stack_that_is_changed_while_its_experts_run_is_still_refused(tmp_path: Path) -> None:
    model = seeded(adapted_parameters)
    blocks = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "train_micro_batch_size_per_gpu": 2}
    content = config_parameters(tmp_path, MEMORY[0], **blocks)
    content["offload"]["experts"] = "whole"
    engine, *_ = offload.initialize(model=model, config=content)
    experts = next(module for name, module in model.named_modules() if type(module).__name__ == "MixtralExperts")

    def change(module: Any, *_: Any) -> None:
        with torch.no_grad():
            module.parametrizations.down_proj.original.add_(1)

    experts.register_forward_hook(change)
    ids = Texts()[0]["input_ids"][None]
    with pytest.raises(UsageError, match="down_proj was changed in place while its module ran"):
        engine(input_ids=ids, labels=ids)
    engine.destroy(remove=True)
