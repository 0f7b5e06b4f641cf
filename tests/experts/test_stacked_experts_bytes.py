"""Experts that no token visits are neither read, nor moved, nor counted by a plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import offload
from offload import testing
from offload.config import load_config
from offload.layout.memory_plan import Division, division_of
from offload.planner.activations import Load
from offload.planner.hardware import described, parse_drive
from offload.planner.memory import settings
from offload.planner.model_shape import drawn, from_name, from_training
from offload.planner.output import heading
from offload.planner.recommend import Planned, plan
from offload.states import State
from tests.experts.stacked_experts import CPU, DISK, SIXTEEN, moved, of_experts
from tests.support import models
from tests.support.modules.mixtures import FAMILIES, qwen, stacks_of, visits
from tests.support.oracle import Job, config, start, train_step, weights_of


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
        for each in calls.values():
            each.clear()
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


def test_a_generation_reads_as_many_bytes_as_it_visits_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(SIXTEEN, DISK, tmp_path, device_memory="150KB", host_memory="1100KB")
    read = {}
    for tokens in (1, 64):
        ids = torch.arange(tokens)[None] % 128
        with torch.no_grad():
            engine(input_ids=ids)  # the next one is foreseen
            calls = moved(engine, monkeypatch)
            with visits(engine.module) as seen:
                engine(input_ids=ids)
        assert of_experts(calls["read"]) <= seen
        read[tokens] = len(seen)
        monkeypatch.undo()
    assert read[1] == 4 and read[64] > 24  # two experts of each of two layers; nearly all of sixteen
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


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_divides_as_the_run_does(family: str, tmp_path: Path) -> None:
    """Also for a model whose own implementation goes by the router's choice, which a plan does not know."""
    for options, experts in (({}, True), ({"experts": "whole"}, False)):
        job = Job(FAMILIES[family], models.language_loss, steps=1)
        content = config(job, DISK, tmp_path, **options)
        shape = from_training(FAMILIES[family](), 16, torch.float32, division_of(load_config(content)), {})
        engine = start(job, DISK, tmp_path, **options)
        assert shape.layouts == testing.inspect(engine).layouts
        train_step(engine, job, 0)
        used = [unit for unit in testing.inspect(engine).pager.end_step()]
        engine.destroy(remove=True)
        planned = [use.unit for use in drawn(shape, 10_000, 0).uses]
        assert len(planned) == len(set(planned)), "each unit is used once in a forward"
        assert set(used) <= set(planned)
        assert any(shape.layouts[unit].name.endswith("]") for unit in planned) == experts


def test_a_plan_of_experts_needs_less_device_memory(tmp_path: Path) -> None:
    qwen(16).save_pretrained(tmp_path / "model")
    whole, each = (
        from_name(str(tmp_path / "model"), 16, torch.float32, Division(experts=x)) for x in ("whole", "each")
    )
    assert whole.parameters == each.parameters
    assert sum(use.flops for use in whole.uses) == pytest.approx(sum(use.flops for use in each.uses))
    assert sum(use.saved for use in whole.uses) == sum(use.saved for use in each.uses)
    assert (
        max(layout.device_numel for layout in each.layouts) < max(layout.device_numel for layout in whole.layouts) / 4
    )


def test_a_plan_counts_the_experts_that_so_many_tokens_visit() -> None:
    """By expectation, with a router that prefers none; states of the others do not move if a step skips them."""
    shape = from_training(qwen(16), 4, torch.bfloat16, Division(), {})
    of_one = 16 * (1 - (1 - 2 / 16) ** 4)
    assert shape.visited(1) == 4 and shape.visited(4) == pytest.approx(2 * of_one)
    few, others, all_of_them = drawn(shape, 4, 0), drawn(shape, 4, 1), drawn(shape, 10_000, 0)
    units = [{use.unit for use in each.uses} for each in (few, others, all_of_them)]
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
    written = [each.timing.moved.written for each in moved.values()]
    assert written[1] / written[0] == pytest.approx(share, rel=0.02)
    assert moved["visited"].timing.moved.read < moved["each"].timing.moved.read
    assert "experts: a micro-batch visits 13.24 of 32, by expectation" in " ".join(heading(moved["visited"]))
