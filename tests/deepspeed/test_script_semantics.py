"""Where `deepspeed.initialize` is as DeepSpeed 0.19.8, unlike `offload.initialize`: plain backwards, steps of NaN."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload.deepspeed as deepspeed
from offload.errors import NumericsError, UsageError
from tests.support import models
from tests.support.oracle import Job, assert_same_tensors, config

JOB = models.GPT2._replace(accumulation=2, clip=0.0)


def begin(job: Job, folder: Path, **options: Any) -> Any:
    torch.manual_seed(0)
    return deepspeed.initialize(model=job.model(), config=config(job, ("nvme", "nvme"), folder, **options))[0]


def parts(engine: Any, micro: int) -> Any:
    ids = torch.randint(128, (2, 8), generator=torch.Generator().manual_seed(micro))
    return engine(input_ids=ids, labels=ids)


def by_engine(engine: Any, micro: int) -> None:
    output = parts(engine, micro)
    engine.backward(output.loss + output.logits.square().mean())


def plainly(engine: Any, micro: int) -> None:
    """The loss comes from the logits, which are an output too: each way in is divided once."""
    output = parts(engine, micro)
    (output["loss"] + output[1].square().mean()).backward()


def by_turns(engine: Any, micro: int) -> None:
    (plainly if micro % 2 else by_engine)(engine, micro)


def undivided(engine: Any, micro: int) -> None:
    output = parts(engine, micro)
    engine.backward((output.loss + output.logits.square().mean()) / 2, scale_wrt_gas=False)


def weights_after(backward: Callable[[Any, int], None], folder: Path) -> dict[str, torch.Tensor]:
    engine = begin(JOB, folder)
    for micro in range(4):
        backward(engine, micro)
        engine.step()
    weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.destroy(remove=True)
    return weights


@pytest.mark.works("Graphs", "the same with an engine of `deepspeed.initialize`: divided, as DeepSpeed does", "right")
@pytest.mark.parametrize("backward", [plainly, by_turns, undivided])
def test_a_plain_backward_is_divided_by_the_accumulation(backward: Callable[[Any, int], None], tmp_path: Path) -> None:
    assert_same_tensors(weights_after(backward, tmp_path / "a"), weights_after(by_engine, tmp_path / "b"))


def net() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))


def small(accumulation: int) -> Any:
    content = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }
    return deepspeed.initialize(model=net(), config=content)[0]


def energy(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


def by_grad(model: Any, x: torch.Tensor, create_graph: bool = False) -> torch.Tensor:
    point = x.clone().requires_grad_()
    return torch.autograd.grad(energy(model, point), point, create_graph=create_graph)[0]


def of_output(model: Any, x: torch.Tensor) -> torch.Tensor:
    point = x.clone().requires_grad_()
    output = model(point)
    return torch.cat(torch.autograd.grad(output.square().sum(), (output, point)))


def of_output_alone(model: Any, x: torch.Tensor) -> torch.Tensor:
    output = model(x)
    return torch.autograd.grad(output.square().sum(), output)[0]


def of_weights(model: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(energy(model, x), list(getattr(model, "module", model).parameters()))[0]


@pytest.mark.works("Graphs", "`torch.autograd.grad` and torch.func through it: not divided", "right")
@pytest.mark.parametrize(
    "taken",
    [
        by_grad,
        of_output,
        of_output_alone,
        of_weights,
        lambda model, x: torch.func.grad(functools.partial(energy, model))(x),
        lambda model, x: torch.func.vjp(model, x)[1](torch.ones(2))[0],
        lambda model, x: torch.func.jacrev(model)(x),
    ],
)
def test_a_gradient_that_is_returned_is_that_of_the_function(taken: Any) -> None:
    engine, x = small(3), torch.linspace(-1, 1, 6)
    torch.testing.assert_close(taken(engine, x), taken(net(), x), rtol=1e-5, atol=1e-7)
    engine.destroy()


def penalized(model: Any, x: torch.Tensor) -> torch.Tensor:
    return by_grad(model, x, create_graph=True).square().sum() + energy(model, x)


def named(engine: Any, loss: torch.Tensor) -> None:
    loss.backward(inputs=list(engine.module.parameters()))


@pytest.mark.parametrize(
    ("loss_of", "backward"), [(penalized, lambda engine, loss: engine.backward(loss)), (energy, named)]
)
def test_a_step_goes_by_the_mean_of_losses_with_gradients_in_them(loss_of: Any, backward: Any) -> None:
    engine, plain = small(3), net()
    for x in torch.randn(3, 6, generator=torch.Generator().manual_seed(2)):
        backward(engine, loss_of(engine, x))
        (loss_of(plain, x) / 3).backward()
        engine.step()
    for mine, theirs, before in zip(engine.module.parameters(), plain.parameters(), net().parameters(), strict=True):
        torch.testing.assert_close(before - mine, theirs.grad, rtol=1e-5, atol=1e-6)
    engine.destroy()


def test_a_plain_backward_of_a_gradient_is_refused_where_it_would_be_divided_in_part() -> None:
    engine, x = small(3), torch.ones(6)
    with pytest.raises(UsageError, match=r"undivided by the 3 .* call engine.backward\(loss\)"):
        penalized(engine, x).backward()
    engine.destroy()
    engine = small(1)
    penalized(engine, x).backward()
    engine.step()
    engine.destroy()


def test_without_accumulation_the_output_is_the_models_own(tmp_path: Path) -> None:
    engine = begin(JOB._replace(accumulation=1), tmp_path)
    given: list[Any] = []
    engine.module.register_forward_hook(lambda _, inputs, output: given.append(output))
    assert parts(engine, 0) is given[0]
    engine.destroy(remove=True)


def test_an_output_may_be_changed_in_place(tmp_path: Path) -> None:
    engine = begin(JOB, tmp_path)
    logits = parts(engine, 0).logits
    logits *= 2
    logits.square().mean().backward()
    engine.step()
    with torch.no_grad():
        assert not parts(engine, 1).logits.requires_grad
    engine.destroy(remove=True)


def test_answers_of_the_config_and_a_name_that_is_not_there(tmp_path: Path) -> None:
    content = {**config(JOB, ("cpu", "cpu"), tmp_path), "steps_per_print": 7, "wall_clock_breakdown": True}
    engine, optimizer, *_ = deepspeed.initialize(model=JOB.model(), config=content)
    assert (engine.steps_per_print(), engine.wall_clock_breakdown(), engine.zero_cpu_offload()) == (7, True, True)
    assert engine.dp_world_size == 1 and optimizer.cur_scale == optimizer.loss_scale == 1
    with pytest.raises(AttributeError, match=r"no attribute 'client_optimizer'.*reference/deepspeed-names"):
        _ = engine.client_optimizer
    engine.destroy(remove=True)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_step_of_nan_is_skipped(dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = begin(JOB._replace(accumulation=1, dtype=dtype), tmp_path)
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.backward(parts(engine, 0).loss * math.nan)
    with caplog.at_level(logging.WARNING, "offload"):
        engine.step()
    assert engine.skipped_steps == 1 and not engine.was_step_applied() and "step 1 skipped" in caplog.text
    assert_same_tensors(engine.module.state_dict(), before)
    engine.backward(parts(engine, 0).loss)
    engine.step()
    assert engine.was_step_applied()
    engine.destroy(remove=True)


def test_the_config_may_ask_for_an_error(tmp_path: Path) -> None:
    engine = begin(JOB._replace(accumulation=1), tmp_path, on_nonfinite="raise")
    engine.backward(parts(engine, 0).loss * math.nan)
    with pytest.raises(NumericsError):
        engine.step()
    engine.destroy(remove=True)
