"""The experts of a stack are read, set, saved and loaded under the names of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import offload
from offload.errors import UsageError
from tests.experts.stacked_experts import DISK, MEMORY, SIXTEEN
from tests.support.modules.mixtures import few_tokens, qwen
from tests.support.oracle import assert_same_tensors, run, start, train_step, weights_of


def test_the_parameters_are_those_of_the_model(tmp_path: Path) -> None:
    engine = start(SIXTEEN, DISK, tmp_path)
    reference = qwen(16)
    assert [(n, p.shape) for n, p in engine.module.named_parameters()] == [
        (n, p.shape) for n, p in reference.named_parameters()
    ]
    assert engine.module.state_dict().keys() == reference.state_dict().keys()
    engine.module.load_state_dict(reference.state_dict())
    assert_same_tensors(weights_of(engine), reference.state_dict())
    engine.destroy(remove=True)


def test_values_are_read_and_set_as_those_of_any_parameter(tmp_path: Path) -> None:
    engine = start(SIXTEEN, DISK, tmp_path)
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
    for found, expected in (
        (offload.safe_get_full_fp32_param(stack), values),
        (offload.safe_get_local_fp32_param(stack), values.view(-1)),
        (offload.safe_get_full_optimizer_state(stack, "exp_avg_sq"), values.abs()),
        (stack.clone().detach(), values),
        (stack.sum(0).detach(), values.sum(0)),
    ):
        assert found is not None and torch.equal(found.cpu(), expected)
    with offload.gathered(stack, modify=True):
        stack.data[3] = 7.0
    found = offload.safe_get_full_fp32_param(stack)
    assert found is not None and bool((found[3] == 7).all()) and torch.equal(found[4:].cpu(), values[4:])
    with torch.no_grad():
        stack.mul_(2)
    assert torch.equal(stack.detach().clone(), found * 2)
    with pytest.raises(UsageError, match="gathered"), offload.gathered(stack):
        train_step(engine, SIXTEEN, 1)
    engine.destroy(remove=True)


def test_optimizer_states_have_the_shape_of_the_stack(tmp_path: Path) -> None:
    engine = start(SIXTEEN, DISK, tmp_path)
    train_step(engine, SIXTEEN, 0)
    state = engine.optimizer.state_dict()
    shapes = {tuple(each["exp_avg"].shape) for each in state["state"].values()}
    assert (16, 32, 48) in shapes
    engine.optimizer.load_state_dict(state)
    again = engine.optimizer.state_dict()
    for number, each in state["state"].items():
        assert_same_tensors(each, again["state"][number])
    engine.destroy(remove=True)


def test_a_saved_model_is_one_of_transformers(tmp_path: Path) -> None:
    import transformers

    engine = start(SIXTEEN, DISK, tmp_path / "run")
    train_step(engine, SIXTEEN, 0)
    engine.save_pretrained(tmp_path / "saved")
    expected = weights_of(engine)
    engine.destroy(remove=True)
    loaded = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path / "saved")
    assert_same_tensors(loaded.state_dict(), expected)
    with offload.init():
        model = qwen(16)
    offload.load_pretrained(model, tmp_path / "saved")
    engine = start(SIXTEEN._replace(model=lambda: model), DISK, tmp_path / "second")
    assert_same_tensors(weights_of(engine), expected)
    engine.destroy(remove=True)


def test_a_model_of_transformers_that_saves_experts_one_by_one_is_loaded(tmp_path: Path) -> None:
    source = qwen(16)
    source.save_pretrained(tmp_path / "saved")
    with offload.init():
        model = qwen(16)
    offload.load_pretrained(model, tmp_path / "saved")
    engine = start(SIXTEEN._replace(model=lambda: model), DISK, tmp_path / "run")
    assert_same_tensors(weights_of(engine), source.state_dict())
    engine.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("first", "second"), [("each", "whole"), ("whole", "each"), ("each", "each")])
def test_a_checkpoint_loads_whether_stacks_are_whole_or_not(first: str, second: str, tmp_path: Path) -> None:
    job = SIXTEEN._replace(dtype="bf16", clip=0.0)
    unbroken = run(job, MEMORY, tmp_path / "unbroken", experts=first)
    engine = start(job, DISK, tmp_path / "first", experts=first)
    for step in range(2):
        train_step(engine, job, step)
    engine.save_checkpoint(tmp_path / "saved")
    engine.destroy(remove=True)
    engine = start(job._replace(seed=5), DISK, tmp_path / "second", experts=second)
    engine.load_checkpoint(tmp_path / "saved")
    losses = [train_step(engine, job, step) for step in range(2, job.steps)]
    assert losses == unbroken.losses[2:]
    assert_same_tensors(weights_of(engine), unbroken.weights)
    engine.destroy(remove=True)
