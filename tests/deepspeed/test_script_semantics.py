"""Where `deepspeed.initialize` is as DeepSpeed 0.19.8, unlike `offload.initialize`: plain backwards, steps of NaN."""

from __future__ import annotations

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


def test_a_change_that_is_dropped_names_the_argument(tmp_path: Path) -> None:
    engine = begin(JOB, tmp_path)
    weight = engine.module.transformer.wte.weight
    with pytest.raises(UsageError, match="modifier_rank=0"), deepspeed.zero.GatheredParameters(weight):
        weight.data.zero_()
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
