"""Experts that transformers stacks in one parameter are units of their own, and give the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import offload
from tests.experts.stacked_experts import CPU, DISK, MEMORY, SIXTEEN, device_nbytes
from tests.support import models
from tests.support.modules.mixtures import FAMILIES, mixtral, stacks_of
from tests.support.oracle import (
    Job,
    accumulated_step,
    assert_same,
    assert_same_tensors,
    kill_and_resume,
    run,
    same_bits,
    start,
)


@pytest.mark.works("Modules", "stacked experts of Mixtral, Qwen3-MoE, gpt-oss, each a unit of its own", "right")
@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_numbers_are_those_of_whole_stacks_in_memory(family: str, dtype: str, tmp_path: Path) -> None:
    """A clip would add the squares of gradients in another order."""
    job = Job(FAMILIES[family], models.language_loss, steps=4, clip=0.0, dtype=dtype, accumulation=2)
    whole = run(job, MEMORY, tmp_path / "whole", experts="whole")
    each = same_bits(job, tmp_path, (MEMORY, CPU, DISK))
    assert each.losses == whole.losses
    assert_same_tensors(each.weights, whole.weights)


@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", ["Adam", "Lion", "SGD", "Adagrad"])
def test_an_expert_without_a_token_is_updated_as_torch_updates_it(rule: str, tmp_path: Path) -> None:
    """Its gradient is zero there: moments fade, and weights move by momentum and decay."""
    job = SIXTEEN._replace(clip=0.0, optimizer=rule, lr=1e-2)
    whole = run(job, MEMORY, tmp_path / "whole", experts="whole")
    assert_same_tensors(run(job, DISK, tmp_path / "each").weights, whole.weights)


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

    job = Job(Summed, models.language_loss, steps=3, clip=0.0)
    whole = run(job, MEMORY, tmp_path / "whole", experts="whole")
    each = run(job, DISK, tmp_path / "each")
    assert each.losses == whole.losses
    assert_same_tensors(each.weights, whole.weights)


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{}, {"activations": "cpu"}, {"activations": "nvme", "schedule": "layer_major"}])
def test_blocks_that_are_computed_again_visit_the_same_experts(options: dict[str, Any], tmp_path: Path) -> None:
    job = SIXTEEN._replace(accumulation=2)
    plain = run(job, MEMORY, tmp_path / "plain", accumulated_step)
    assert_same(run(job, DISK, tmp_path / "again", accumulated_step, **options), plain)


@pytest.mark.sample(1)
@pytest.mark.parametrize("experts", ["each", "visited"])
def test_a_killed_run_resumes(experts: str, tmp_path: Path) -> None:
    job = SIXTEEN._replace(steps=8, dtype="bf16")
    unbroken = run(job, MEMORY, tmp_path / "unbroken", experts=experts)
    (tmp_path / "killed").mkdir()
    assert_same(kill_and_resume(job, DISK, tmp_path / "killed", kills=2, experts=experts), unbroken)
