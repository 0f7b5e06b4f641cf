"""Moments in bf16: their rounding, bytes, keys, resumes, checkpoints and plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import testing
from offload.config import load_config
from offload.engine.params import handle_of
from offload.errors import ConfigError, StoreError
from offload.kernels import Noise, Partition, Segment, SGDStep, noise_stream, update
from offload.planner.activations import Load
from offload.planner.hardware import described, parse_drive
from offload.planner.memory import settings
from offload.planner.model_shape import from_count
from offload.planner.recommend import advise, plan
from offload.runs.inspection import inspect
from offload.sizes import GIB
from tests.optim.narrow_states import JOB, RULES, bytes_of_a_parameter
from tests.support.kernel_inputs import default_settings
from tests.support.oracle import (
    assert_same,
    assert_same_tensors,
    config,
    least_host_memory,
    run,
    small_pieces,
    start,
    train_step,
    weights_of,
)

__all__ = ["default_settings"]  # fixtures

DISK, HOST = ("nvme", "nvme"), ("cpu", "cpu")
BF16: dict[str, Any] = {"moments": "bf16"}

# -- the same bits ------------------------------------------------------------------------------------


@pytest.mark.numeric
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["AdamW", "Lamb"])
def test_tiles_of_any_size_give_the_same_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = RULES[name]._replace(clip=0.0)  # pieces of gradients are smaller too, and the last bits of a norm others
    whole = run(job, DISK, tmp_path / "whole", **BF16)
    small_pieces(monkeypatch)
    least = least_host_memory(job, tmp_path, **BF16)
    for name, options in (("roomy", BF16), ("tight", {**BF16, "host_memory": least})):
        pieces = run(job, DISK, tmp_path / name, **options)
        assert_same(whole._replace(norms=pieces.norms), pieces, name)


def test_the_bits_are_those_of_seed_unit_update_and_element(tmp_path: Path) -> None:
    """The second moments after a step: those that the kernel makes of the same gradient with this noise."""
    job = RULES["momentum"]._replace(clip=0.0, weight_decay=0.0, seed=5)
    engine = start(job, DISK, tmp_path, **BF16)
    expected: dict[str, torch.Tensor] = {}
    for step in range(2):
        engine.backward(job.loss(engine, step, 0))
        for name, parameter in engine.module.named_parameters():
            gradient = offload.safe_get_full_grad(parameter)
            assert gradient is not None
            handle = handle_of(parameter)
            assert handle is not None
            segment = testing.inspect(engine).layouts[handle.unit].segments[handle.position]
            before = expected.get(name, torch.zeros(segment.numel, dtype=torch.bfloat16))
            noise = Noise(noise_stream(5, handle.unit, step + 1), segment.start)
            rule = SGDStep(0.0, 0.9, 0.0, 0.0, False, step == 0)
            update(
                Partition(torch.zeros(segment.numel), gradient.view(-1), (before,)),
                [Segment(0, segment.numel, rule, noise)],
            )
            expected[name] = before
        engine.step()
    for name, parameter in engine.module.named_parameters():
        moment = offload.safe_get_full_optimizer_state(parameter, "momentum_buffer")
        assert moment is not None and torch.equal(moment.view(-1), expected[name].float()), name
    engine.destroy(remove=True)


# -- what users see -----------------------------------------------------------------------------------


def test_the_bytes_of_a_parameter_and_step(tmp_path: Path) -> None:
    """18 of disk traffic in bf16: 8 read, 8 written, and 2 for weights read twice, unless they stayed."""
    whole, narrow = bytes_of_a_parameter(tmp_path / "fp32"), bytes_of_a_parameter(tmp_path / "bf16", **BF16)
    assert (whole.stored, narrow.stored) == (24, 16)
    assert 16 <= narrow.moved <= 18.3 and 24 <= whole.moved <= 26.3


def test_states_are_read_and_set_in_fp32(tmp_path: Path) -> None:
    engine = start(JOB, DISK, tmp_path, **BF16)
    train_step(engine, JOB, 0)
    weight = next(iter(engine.module.parameters()))
    moment = offload.safe_get_full_optimizer_state(weight, "exp_avg")
    assert moment is not None and moment.dtype is torch.float32 and moment.any()
    assert torch.equal(moment, moment.bfloat16().float()), "it is a value of bf16"
    offload.safe_set_full_optimizer_state(weight, torch.full_like(moment, 1.25), "exp_avg")
    found = offload.safe_get_full_optimizer_state(weight, "exp_avg")
    assert found is not None and (found == 1.25).all()
    states = engine.optimizer.state_dict()["state"]
    assert all(state["exp_avg_sq"].dtype is torch.float32 for state in states.values())
    engine.destroy(remove=True)


@pytest.mark.parametrize("given", [{"bf16": {"enabled": True, "bf16_optimizer_states": True}}, {"offload": BF16}])
def test_deepspeeds_key_and_ours_mean_the_same(given: dict[str, Any], tmp_path: Path) -> None:
    assert load_config(given).moments == "bf16"
    torch.manual_seed(0)
    whole = config(JOB, DISK, tmp_path)
    whole |= {key: {**whole[key], **value} for key, value in given.items()}
    engine = offload.initialize(model=JOB.model(), config=whole)[0]
    assert testing.inspect(engine).mode.name == "bf16 bf16-moments"
    engine.destroy(remove=True)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"bf16": {"enabled": False, "bf16_optimizer_states": True}},
        {"bf16": {"enabled": True, "bf16_optimizer_states": False}},
        {"offload": {"moments": "fp32"}},
        {"offload": {"moments": "auto"}},
    ],
)
def test_moments_are_fp32_unless_asked_for(given: dict[str, Any]) -> None:
    assert load_config(given).moments == "fp32"


def test_two_keys_that_disagree_are_refused() -> None:
    asked = {"bf16": {"enabled": True, "bf16_optimizer_states": True}}
    for other in (
        {"offload": {"moments": "fp32"}},
        {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "fp32_optimizer_states": True}}},
    ):
        with pytest.raises(ConfigError, match="leave one of them out"):
            load_config({**asked, **other})


def test_an_optimizer_of_torch_refuses_them(tmp_path: Path) -> None:
    model = JOB.model()
    given = config(JOB, DISK, tmp_path, **BF16)
    del given["optimizer"]
    with pytest.raises(ConfigError, match=r"runs by torch's own code.*leave"):
        offload.initialize(model=model, optimizer=torch.optim.NAdam(model.parameters(), lr=1e-3), config=given)


@pytest.mark.parametrize(("before", "after"), [({}, BF16), (BF16, {})])
def test_a_run_with_other_moments_is_refused(before: dict[str, Any], after: dict[str, Any], tmp_path: Path) -> None:
    engine = start(JOB, DISK, tmp_path, **before)
    train_step(engine, JOB, 0)
    engine.destroy()
    here, there = (each.get("moments", "fp32") for each in (after, before))
    message = rf'resume with "moments": "{there}".*save_checkpoint.*load_checkpoint'
    with pytest.raises(StoreError, match=message):
        start(JOB, DISK, tmp_path, resume="must", **after)
    assert here != there
    again = start(JOB, DISK, tmp_path, resume="must", **before)
    assert again.global_steps == 1, "nothing was touched"
    again.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("before", "after"), [({}, BF16), (BF16, {}), (BF16, BF16)])
def test_a_checkpoint_converts_moments(
    before: dict[str, Any], after: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    """From bf16 exactly, to bf16 rounded to nearest; between equal forms bit for bit, whatever the units."""
    job = JOB._replace(dtype=dtype)
    engine = start(job, DISK, tmp_path / "one", **before)
    for step in range(2):
        train_step(engine, job, step)
    states = engine.optimizer.state_dict()["state"]
    weights = weights_of(engine)
    engine.save_checkpoint(str(tmp_path / "saved"))
    engine.destroy(remove=True)
    other = start(job, HOST, tmp_path / "two", units=["GPT2MLP"], **after)
    other.load_checkpoint(str(tmp_path / "saved"))
    assert_same_tensors(weights, weights_of(other))
    found = other.optimizer.state_dict()["state"]
    assert found.keys() == states.keys()
    for number, state in states.items():
        for name, value in state.items():
            expected = value.bfloat16().float() if after and name != "step" else value
            assert torch.equal(found[number][name], expected), (number, name)
    train_step(other, job, 2)
    other.destroy(remove=True)


def test_the_run_names_its_moments(tmp_path: Path) -> None:
    engine = start(JOB, DISK, tmp_path, **BF16)
    train_step(engine, JOB, 0)
    engine.destroy()
    assert inspect(tmp_path)["runs"][0]["mode"] == "bf16 bf16-moments"


@pytest.mark.slow
def test_a_plan_counts_them_and_names_them_as_a_change() -> None:
    """16 bytes of disk in place of 24, and 16 of 24 bytes of updates; the drive is the bound, so a step is shorter."""
    shape, machine = from_count(7_000_000_000, 32, 1024), described("24GB", 16 * GIB, [parse_drive("7GB/s,5GB/s")])
    content = settings("nvme", "nvme", dtype="bf16", batch=1)
    other = {**content, "offload": {**content.get("offload", {}), "moments": "bf16"}}
    fp32, bf16 = (plan(shape, machine, Load(1), each) for each in (content, other))
    assert bf16.memory.stored / fp32.memory.stored == pytest.approx(16 / 24, rel=0.01)
    moved = [each.timing.moved.read + each.timing.moved.written for each in (fp32, bf16)]
    numel = sum(fp32.memory.parts.trainable_numel)
    assert (moved[0] - moved[1]) / numel == pytest.approx(8, rel=0.05)
    assert bf16.timing.seconds < fp32.timing.seconds
    assert "moments in bf16" in [change.words for change in advise(fp32).changes]
    assert "moments in bf16" not in [change.words for change in advise(bf16).changes]
