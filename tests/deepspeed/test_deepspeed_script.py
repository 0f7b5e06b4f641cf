"""Scripts written for DeepSpeed run unchanged, point by point as there."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import offload
import offload.deepspeed as deepspeed
from offload.errors import NumericsError, UsageError
from tests.support import models
from tests.support.oracle import Job, assert_same_tensors, config
from tests.support.processes.device_process import engine_device

JOB = models.SHALLOW._replace(accumulation=2, clip=0.0)


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
def test_a_plain_backward_is_divided_by_the_accumulation(tmp_path: Path) -> None:
    expected = weights_after(by_engine, tmp_path / "engine")
    for backward in (plainly, by_turns, undivided):
        assert_same_tensors(weights_after(backward, tmp_path / backward.__name__), expected)


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


def test_a_step_of_nan_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = begin(JOB._replace(accumulation=1, dtype="bf16"), tmp_path)
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


PARITY_JOB = models.MIXTURE
LRS = [0.25, 0.25, 0.375, 0.5]
"""Of a linear WarmupLR of two steps from 0.25 to 0.5, after so many steps: its first step is that of iteration 0."""


class Point(NamedTuple):
    """What is asked at each point."""

    boundary: bool
    micro_steps: int
    global_steps: int
    global_samples: int
    skipped_steps: int
    applied: bool
    normed: bool
    """Whether there is a norm."""
    lr: list[float]


def asked(engine: offload.Engine) -> Point:
    return Point(
        engine.is_gradient_accumulation_boundary(),
        engine.micro_steps,
        engine.global_steps,
        engine.global_samples,
        engine.skipped_steps,
        engine.was_step_applied(),
        engine.get_global_grad_norm() is not None,
        engine.get_lr(),
    )


def points(engine: offload.Engine, job: Job, steps: int) -> Iterator[Point]:
    """Four for each micro-batch."""
    for micro in range(steps * job.accumulation):
        yield asked(engine)
        loss = job.loss(engine, *divmod(micro, job.accumulation))
        yield asked(engine)
        engine.backward(loss)
        yield asked(engine)
        engine.step()
        yield asked(engine)


def begin_parity(job: Job, folder: Path, samples: int = 1, **more: Any) -> offload.Engine:
    torch.manual_seed(0)
    content = config(job, ("none", "none"), folder) | {"train_micro_batch_size_per_gpu": samples} | more
    return offload.initialize(model=job.model(), config=content)[0]


SCHEDULER = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0.25, "warmup_max_lr": 0.5, "warmup_num_steps": 2, "warmup_type": "linear"},
}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_at_each_point_of_three_steps(accumulation: int, tmp_path: Path) -> None:
    """`micro_steps` grows at the end of each `step()`, and the boundary is the micro-batch that completes a step."""
    engine = begin_parity(PARITY_JOB._replace(accumulation=accumulation), tmp_path, samples=3, scheduler=SCHEDULER)
    expected, was_boundary = [], False
    for micro in range(3 * accumulation):
        for done, was in ((micro, was_boundary), (micro + 1, (micro + 1) % accumulation == 0)):
            steps = done // accumulation
            point = Point(
                (done + 1) % accumulation == 0, done, steps, 3 * accumulation * steps, 0, was, steps > 0, [LRS[steps]]
            )
            expected += [point] * (3 if done == micro else 1)
            was_boundary = was
    assert list(points(engine, PARITY_JOB._replace(accumulation=accumulation), 3)) == expected
    engine.destroy()


@pytest.mark.parametrize("word", [True, False])
def test_a_boundary_that_is_set_by_hand_holds_until_it_is_reset(word: bool, tmp_path: Path) -> None:
    engine = begin_parity(PARITY_JOB, tmp_path)
    engine.set_gradient_accumulation_boundary(word)
    marks = list(points(engine, PARITY_JOB, 1))
    assert {point.boundary for point in marks} == {word}
    assert marks[-1].micro_steps == 2 and marks[-1].global_steps == (2 if word else 0)
    engine.set_gradient_accumulation_boundary(None)
    assert engine.is_gradient_accumulation_boundary() == (not word), "two of two have run, or a new step begins"
    engine.destroy()


def test_micro_batches_without_a_step_are_counted_by_the_next(tmp_path: Path) -> None:
    """Otherwise than DeepSpeed, which counts calls: a resumed run skips as many batches."""
    engine = begin_parity(PARITY_JOB._replace(accumulation=4), tmp_path)
    for is_boundary in (False, False, False, True):
        engine.set_gradient_accumulation_boundary(is_boundary)
        engine.backward(PARITY_JOB.loss(engine, 0, 0))
    assert engine.micro_steps == 0
    engine.step()
    assert engine.micro_steps == 4 and engine.was_step_applied()
    engine.destroy()


def test_a_skipped_step_counts(tmp_path: Path) -> None:
    """In fp16, by the loss scale: global_steps and samples grow, the schedule stays."""
    fp16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 8, "hysteresis": 1}
    job = PARITY_JOB._replace(accumulation=1, dtype="fp16")
    engine = begin_parity(job, tmp_path, fp16=fp16, scheduler=SCHEDULER)
    assert float(engine.scale(torch.ones(()))) == engine.loss_scale == 256
    engine.backward(job.loss(engine, 0, 0) * math.inf)
    engine.step()
    point = asked(engine)._replace(normed=True)
    assert point == Point(True, 1, 1, 1, 1, False, True, [0.25])
    assert engine.loss_scale == 128 and engine.fp16_enabled() and not engine.bfloat16_enabled()
    engine.destroy()


def test_what_a_commit_holds_is_up_to_the_boundary(tmp_path: Path) -> None:
    """Gradients of the micro-batches behind it are made again, so their batches are not to be skipped."""
    content = config(PARITY_JOB, ("nvme", "nvme"), tmp_path, resume="auto")
    engine = offload.initialize(model=PARITY_JOB.model(), config=content)[0]
    for micro in range(3):
        engine.backward(PARITY_JOB.loss(engine, micro // 2, micro % 2))
        engine.step()
    assert engine.micro_steps == 3
    with torch.no_grad():
        engine.module.scale.mul_(2)  # an edit: the commit at the end is taken anew
    engine.destroy(remove=False)
    again = offload.initialize(model=PARITY_JOB.model(), config=content)[0]
    assert (again.micro_steps, again.global_steps) == (2, 1)
    assert not again.is_gradient_accumulation_boundary() and not again.was_step_applied()
    again.destroy(remove=True)


def test_what_does_not_change_in_a_loop(tmp_path: Path) -> None:
    job = PARITY_JOB._replace(dtype="bf16")
    engine = begin_parity(job, tmp_path, samples=3, data_types={"grad_accum_dtype": "fp32"})
    for _ in points(engine, job, 1):
        sizes = (
            engine.train_batch_size(),
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
        )
        assert sizes == (6, 3, 2) and engine.zero_optimization_stage() == 3
        assert engine.bfloat16_enabled() and not engine.fp16_enabled()
        assert engine.get_mom() == [(0.9, 0.999)]
        assert (engine.global_rank, engine.local_rank, engine.world_size) == (0, 0, 1)
        assert engine.device.type == engine_device()
        assert float(engine.scale(torch.ones(()))) == 1 and engine.training
    engine.set_train_batch_size(9)
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (9, 3)
    assert engine.eval().training is False and engine.train().training is True
    engine.destroy()


def test_backward_gives_the_loss_over_the_accumulation(tmp_path: Path) -> None:
    engine = begin_parity(PARITY_JOB, tmp_path)
    loss = PARITY_JOB.loss(engine, 0, 0)
    assert engine.backward(loss, retain_graph=True) == loss / 2
    assert engine.backward(loss, scale_wrt_gas=False) == loss
    engine.destroy()


def test_the_norm_is_that_before_the_clip_and_stays_until_the_next_step(tmp_path: Path) -> None:
    norms = []
    for clip in (0.0, 1e-3):
        engine = begin_parity(PARITY_JOB._replace(clip=clip), tmp_path)
        for _ in points(engine, PARITY_JOB, 1):
            pass
        norms.append(engine.get_global_grad_norm())
        engine.backward(PARITY_JOB.loss(engine, 1, 0))
        engine.step()
        assert engine.get_global_grad_norm() == norms[-1] and norms[-1] > 1e-3
        engine.destroy()
    assert norms[0] == norms[1]
