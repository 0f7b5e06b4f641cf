"""Moments in 8 bits: their tiles, rounding, bytes, keys, resumes, checkpoints and plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import offload
from offload import testing
from offload.cli.main import app
from offload.config import load_config
from offload.engine.params import handle_of
from offload.errors import ConfigError, StoreError
from offload.kernels import Noise, Partition, Segment, SGDStep, noise_stream, update
from offload.kernels.update import BLOCK, blocks_of, decode_moments
from offload.layout.flat_layout import layouts_of
from offload.layout.units import find_units
from offload.planner.activations import Load
from offload.planner.hardware import described, parse_drive
from offload.planner.memory import Room, settings, settle
from offload.planner.model_shape import from_count
from offload.planner.recommend import advise, plan
from offload.runs.inspection import inspect
from offload.sizes import GIB
from offload.states import State
from tests.optim.narrow_states import JOB, RULES, bytes_of_a_parameter
from tests.support import models
from tests.support.kernel_inputs import default_settings
from tests.support.oracle import (
    Job,
    Result,
    assert_same,
    assert_same_tensors,
    config,
    small_pieces,
    start,
    train_step,
    trained,
    weights_of,
)
from tests.support.ranks.rank_pool import RankPool

__all__ = ["default_settings"]  # fixtures

DISK, HOST = ("nvme", "nvme"), ("cpu", "cpu")
INT8: dict[str, Any] = {"moments": "int8"}

# -- the same bits ------------------------------------------------------------------------------------


@pytest.mark.numeric
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["AdamW", "Lamb", "Lion"])
def test_tiles_of_any_size_give_the_same_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit of 790,000 elements: in two tiles, and in tiles of the least size, a page of scales each."""
    job = RULES[name]._replace(clip=0.0, steps=2, model=lambda: models.gpt2(layers=1, width=256))
    tiles: list[int] = []

    def with_tiles(folder: Path, where: tuple[str, str] = DISK) -> Result:
        engine = start(job, where, folder, **INT8)
        worker = testing.inspect(engine).update_worker
        assert worker is not None
        tiles.append(worker.tile_numel)
        try:
            return trained(engine, job)
        finally:
            engine.destroy(remove=True)

    whole = with_tiles(tmp_path / "whole")
    small_pieces(monkeypatch)
    pieces = with_tiles(tmp_path / "pieces")
    assert tiles[1] == (1 << 18 if name == "Lion" else 1 << 17) and tiles[0] >= 3 * tiles[1]
    assert_same(whole._replace(norms=pieces.norms), pieces, name)
    # In memory a pass of LAMB whose results are dropped works on copies, of the scales too.
    resident = with_tiles(tmp_path / "host", HOST)
    assert tiles[2] == tiles[1]
    assert_same(pieces, resident._replace(norms=pieces.norms), name)


def test_the_bits_are_those_of_seed_unit_update_and_element(tmp_path: Path) -> None:
    """The momentum after two steps: that which the kernel makes of the same gradients with this noise."""
    job = RULES["momentum"]._replace(clip=0.0, weight_decay=0.0, seed=5)
    engine = start(job, DISK, tmp_path, **INT8)
    expected: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for step in range(2):
        engine.backward(job.loss(engine, step, 0))
        for name, parameter in engine.module.named_parameters():
            gradient = offload.safe_get_full_grad(parameter)
            assert gradient is not None
            handle = handle_of(parameter)
            assert handle is not None
            segment = testing.inspect(engine).layouts[handle.unit].segments[handle.position]
            assert segment.start % BLOCK == 0, "no block has elements of two parameters"
            numel = segment.numel
            none = torch.zeros(numel, dtype=torch.int8), torch.zeros(blocks_of(numel), 1)
            codes, scales = expected.setdefault(name, none)
            noise = Noise(noise_stream(5, handle.unit, step + 1), segment.start)
            rule = SGDStep(0.0, 0.9, 0.0, 0.0, False, step == 0)
            update(
                Partition(torch.zeros(numel), gradient.view(-1), (codes,), scales=scales),
                [Segment(0, numel, rule, noise)],
            )
        engine.step()
    for name, parameter in engine.module.named_parameters():
        moment = offload.safe_get_full_optimizer_state(parameter, "momentum_buffer")
        codes, scales = expected[name]
        values = torch.empty(len(codes))
        decode_moments(codes, scales, 0, values)
        assert moment is not None and torch.equal(moment.view(-1), values), name
    engine.destroy(remove=True)


# -- what users see -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_bytes_of_a_parameter_and_step(tmp_path: Path) -> None:
    """14 of disk traffic in bf16, and a sixteenth for the scales: 6 each way, and 2 as the backward reads weights."""
    found = bytes_of_a_parameter(tmp_path, **INT8)
    assert found.moved <= 14.3
    assert 12 < found.stored <= 12.1


@pytest.mark.slow
def test_states_are_read_and_set_in_fp32(tmp_path: Path) -> None:
    engine = start(JOB, DISK, tmp_path, **INT8)
    train_step(engine, JOB, 0)
    for weight in engine.module.parameters():
        for name in ("exp_avg", "exp_avg_sq"):
            moment = offload.safe_get_full_optimizer_state(weight, name)
            assert moment is not None and moment.dtype is torch.float32
            # What is stored can be set, and is the same.
            offload.safe_set_full_optimizer_state(weight, moment, name)
            again = offload.safe_get_full_optimizer_state(weight, name)
            assert again is not None and torch.equal(again, moment)
    weight = next(iter(engine.module.parameters()))
    values = torch.linspace(0, 1, weight.numel()).view(weight.shape)
    for name, bound in (("exp_avg", 0.5 / 127), ("exp_avg_sq", 2 / 255)):
        offload.safe_set_full_optimizer_state(weight, values, name)
        found = offload.safe_get_full_optimizer_state(weight, name)
        assert found is not None and (found.cpu() - values).abs().max() <= bound * 1.01
    states = engine.optimizer.state_dict()["state"]
    assert all(state["exp_avg_sq"].dtype is torch.float32 for state in states.values())
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    after = engine.optimizer.state_dict()["state"]
    for number, state in states.items():
        assert all(torch.equal(state[name], after[number][name]) for name in ("exp_avg", "exp_avg_sq"))
    engine.destroy(remove=True)


def test_a_run_is_inspected_and_verified(tmp_path: Path) -> None:
    engine = start(JOB, DISK, tmp_path, **INT8)
    train_step(engine, JOB, 0)
    assert testing.inspect(engine).mode.name == "bf16 int8-moments"
    engine.destroy()
    assert inspect(tmp_path)["runs"][0]["mode"] == "bf16 int8-moments"
    done = CliRunner().invoke(app, ["verify", str(tmp_path / "default")])
    assert done.exit_code == 0, done.output


def test_two_keys_that_disagree_are_refused() -> None:
    asked = {"bf16": {"enabled": True, "bf16_optimizer_states": True}}
    with pytest.raises(ConfigError, match="for int8; leave one of them out"):
        load_config({**asked, "offload": INT8})
    params = {"lr": 1e-3, "fp32_optimizer_states": True}
    with pytest.raises(ConfigError, match="another key for int8"):
        load_config({"optimizer": {"type": "AdamW", "params": params}, "offload": INT8})


def test_an_optimizer_of_torch_refuses_them(tmp_path: Path) -> None:
    model = JOB.model()
    given = config(JOB, DISK, tmp_path, **INT8)
    del given["optimizer"]
    with pytest.raises(ConfigError, match=r"\"moments\" is int8.*runs by torch's own code.*leave"):
        offload.initialize(model=model, optimizer=torch.optim.NAdam(model.parameters(), lr=1e-3), config=given)


@pytest.mark.parametrize("optimizer", ["Muon", "SinkGD"])
def test_a_rule_of_matrices_refuses_them(tmp_path: Path, optimizer: str) -> None:
    content = config(JOB, DISK, tmp_path, moments="int8")
    content["optimizer"] = {"type": optimizer, "params": {"lr": 1e-3}}
    with pytest.raises(ConfigError, match=r"\"moments\" is int8, but Muon and SinkGD.*set bf16"):
        offload.initialize(model=JOB.model(), config=content)


@pytest.mark.sample(1)
@pytest.mark.parametrize("other", ["fp32", "bf16"])
def test_a_run_with_other_moments_is_refused(other: str, tmp_path: Path) -> None:
    for before, after in ((other, "int8"), ("int8", other)):
        folder = tmp_path / before
        engine = start(JOB, DISK, folder, moments=before)
        train_step(engine, JOB, 0)
        engine.destroy()
        with pytest.raises(StoreError, match=rf'resume with "moments": "{before}".*save_checkpoint.*load_checkpoint'):
            start(JOB, DISK, folder, resume="must", moments=after)
        again = start(JOB, DISK, folder, resume="must", moments=before)
        assert again.global_steps == 1, "nothing was touched"
        again.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["AdamW", "Lion", "Adagrad", "Lamb"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("before", "after"),
    [("fp32", "int8"), ("int8", "fp32"), ("bf16", "int8"), ("int8", "bf16"), ("int8", "int8")],
)
def test_a_checkpoint_converts_moments(before: str, after: str, dtype: str, name: str, tmp_path: Path) -> None:
    """From 8 bits exactly, to 8 bits to nearest; between equal forms bit for bit, whatever the units."""
    job = RULES[name]._replace(dtype=dtype)
    engine = start(job, DISK, tmp_path / "one", moments=before)
    for step in range(2):
        train_step(engine, job, step)
    states = engine.optimizer.state_dict()["state"]
    weights = weights_of(engine)
    engine.save_checkpoint(str(tmp_path / "saved"))
    engine.destroy(remove=True)
    other = start(job, HOST, tmp_path / "two", units=["GPT2MLP"], moments=after)
    other.load_checkpoint(str(tmp_path / "saved"))
    assert_same_tensors(weights, weights_of(other))
    found = other.optimizer.state_dict()["state"]
    assert found.keys() == states.keys()
    for number, state in states.items():
        for key, value in state.items():
            if key == "step" or after == "fp32" or before == after:
                assert torch.equal(found[number][key], value), (number, key)
            elif after == "bf16":
                assert torch.equal(found[number][key], value.bfloat16().float()), (number, key)
            else:
                assert_close_to_nearest(found[number][key].view(-1), value.view(-1), key in ("exp_avg_sq", "sum"))
    train_step(other, job, 2)
    other.destroy(remove=True)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("fp32", "int8"), ("int8", "fp32"), ("int8", "int8")])
def test_units_of_several_chunks_are_loaded(before: str, after: str, tmp_path: Path) -> None:
    """A unit of 2.1 million elements, whose parameters begin within blocks where moments are not in 8 bits."""
    job = JOB._replace(model=lambda: models.gpt2(layers=1, width=416))
    engine = start(job, DISK, tmp_path / "one", moments=before)
    train_step(engine, job, 0)
    states = engine.optimizer.state_dict()["state"]
    engine.save_checkpoint(str(tmp_path / "saved"))
    engine.destroy(remove=True)
    other = start(job, DISK, tmp_path / "two", moments=after)
    other.load_checkpoint(str(tmp_path / "saved"))
    found = other.optimizer.state_dict()["state"]
    for number, state in states.items():
        for key in ("exp_avg", "exp_avg_sq"):
            if before == "int8":
                assert torch.equal(found[number][key], state[key]), (number, key)
            else:
                assert_close_to_nearest(found[number][key].view(-1), state[key].view(-1), key == "exp_avg_sq")
    other.destroy(remove=True)


def assert_close_to_nearest(found: torch.Tensor, exact: torch.Tensor, root: bool) -> None:
    """Each value, or its root, is half a step of its block's codes from the exact one at most."""
    for start_of in range(0, len(exact), BLOCK):
        one, other = (each[start_of : start_of + BLOCK].double() for each in (found, exact))
        if root:
            one, other = one.sqrt(), other.sqrt()
        step = other.abs().max() / (255 if root else 127)
        bound = torch.where(one <= 1.01 * step, step, step / 2) if root else step / 2
        assert ((one - other).abs() <= 1.01 * bound).all()


def save_and_load(job: Job, folder: Path, save: bool) -> dict[str, torch.Tensor]:
    """Trains two steps and saves on these ranks, or loads; returns the moments."""
    engine = start(job, DISK, folder / ("saving" if save else "loading"), **INT8)
    if save:
        for step in range(2):
            train_step(engine, job, step)
        engine.save_checkpoint(str(folder / "saved"))
    else:
        engine.load_checkpoint(str(folder / "saved"))
    found = {}
    for name, parameter in engine.module.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            value = offload.safe_get_full_optimizer_state(parameter, key)
            assert value is not None
            found[f"{name} {key}"] = value
    engine.destroy(remove=True)
    return found


@pytest.mark.slow
def test_a_checkpoint_loads_on_another_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """Codes and scales are copied: bit for bit, from two ranks to one and back."""
    job = JOB._replace(clip=0.0)
    saved = ranks.run(save_and_load, job, tmp_path / "two", True)[0]
    assert_same_tensors(saved, save_and_load(job, tmp_path / "two", False))
    saved = save_and_load(job, tmp_path / "one", True)
    for each in ranks.run(save_and_load, job, tmp_path / "one", False):
        assert_same_tensors(saved, each)


def test_a_plan_is_what_a_run_takes(tmp_path: Path) -> None:
    """Bytes of each state, those of the scales too, whose blocks begin with each parameter."""
    job = JOB._replace(model=lambda: models.gpt2(layers=2, width=256))
    given = config(job, DISK, tmp_path, **INT8)
    engine = offload.initialize(model=job.model(), config=given)[0]
    model = job.model()
    plain = layouts_of(model, find_units(model))
    planned = settle(plain, given, Room(host=8 * GIB, device=0, disk=None))
    assert all(nbytes % 4096 == 0 for row in planned.parts.nbytes for nbytes in row.values()), "pages of their own"
    assert planned.parts.nbytes == testing.inspect(engine).state_bytes
    assert planned.stored == testing.inspect(engine).store.spec.nbytes  # type: ignore[union-attr]
    scales = sum(row.get(State.SCALES, 0) for row in planned.parts.nbytes)
    assert 8 / 256 <= scales / sum(planned.parts.trainable_numel) <= 12 / 256, "padded to pages"
    engine.destroy(remove=True)


def test_a_plan_counts_them_and_names_them_as_a_change() -> None:
    """12 bytes of disk in place of 24, and 12 of 24 bytes of updates; the drive is the bound, so a step is shorter."""
    shape, machine = from_count(7_000_000_000, 32, 1024), described("24GB", 16 * GIB, [parse_drive("7GB/s,5GB/s")])
    content = settings("nvme", "nvme", dtype="bf16", batch=1)
    fp32, int8 = (
        plan(shape, machine, Load(1), each)
        for each in (content, settings("nvme", "nvme", dtype="bf16", batch=1, moments="int8"))
    )
    assert int8.memory.stored / fp32.memory.stored == pytest.approx(12 / 24, rel=0.01)
    moved = [each.timing.moved.read + each.timing.moved.written for each in (fp32, int8)]
    numel = sum(fp32.memory.parts.trainable_numel)
    assert (moved[0] - moved[1]) / numel == pytest.approx(12, rel=0.05)
    assert int8.timing.seconds < fp32.timing.seconds
    assert "moments in int8" in [change.words for change in advise(fp32).changes]
    assert "moments in int8" not in [change.words for change in advise(int8).changes]
