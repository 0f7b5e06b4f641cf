"""Masters in bf24: their bits, bytes, keys, edits, resumes, checkpoints, conversions and plans."""

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
from offload.dtype_choice import auto_dtype
from offload.engine.params import handle_of
from offload.errors import ConfigError, StoreError
from offload.finetune.options import Options, in_options, merge
from offload.kernels import Noise, Partition, PlainSGDStep, Segment, noise_stream, update
from offload.layout.flat_layout import layouts_of
from offload.layout.units import find_units
from offload.planner.activations import Load
from offload.planner.hardware import described, parse_drive
from offload.planner.memory import Room, settings, settle
from offload.planner.model_shape import from_count
from offload.planner.recommend import advise, plan
from offload.sizes import GIB
from offload.states import State, Tier
from tests.kernels.test_kernels_bf24 import joined, split
from tests.optim.narrow_states import JOB, RULES, bytes_of_a_parameter
from tests.support import models
from tests.support.oracle import (
    Result,
    assert_same,
    assert_same_tensors,
    config,
    kill_and_resume,
    run,
    same_bits,
    start,
    train_step,
)
from tests.support.ranks.rank_pool import RankPool
from tests.support.ranks.rank_pool import train as train_on_ranks

DISK, HOST = ("nvme", "nvme"), ("cpu", "cpu")
BF24: dict[str, Any] = {"master": "bf24"}
SMALL: dict[str, Any] = {"master": "bf24", "moments": "int8"}
MUON = JOB._replace(optimizer="Muon", lr=1e-2, clip=0.0)


def nearest(master: torch.Tensor) -> torch.Tensor:
    return joined(*split(master.reshape(-1).contiguous())).view(master.shape)


def masters(engine: offload.Engine) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in engine.module.named_parameters():
        master = offload.safe_get_full_fp32_param(parameter)
        assert master is not None
        found[name] = master.cpu().clone()
    return found


def trained(folder: Path, job: Any = JOB, where: tuple[str, str] = DISK, **options: Any) -> offload.Engine:
    engine = start(job, where, folder, **options)
    for step in range(2):
        train_step(engine, job, step)
    return engine


def forms(name: str) -> dict[str, Any]:
    return {"fp32": {"master": "fp32"}, "bf24": BF24, "bf24, int8": SMALL}[name]


# -- bits and bytes -----------------------------------------------------------------------------------


def test_the_bits_are_those_of_seed_unit_update_and_element(tmp_path: Path) -> None:
    """The masters after two steps: those that the kernel makes of the same gradients with this noise."""
    job = RULES["momentum"]._replace(clip=0.0, weight_decay=0.0, seed=5, params=())
    engine = start(job, DISK, tmp_path, **BF24)
    expected = {name: split(master.view(-1)) for name, master in masters(engine).items()}
    for step in range(2):
        engine.backward(job.loss(engine, step, 0))
        for name, parameter in engine.module.named_parameters():
            gradient, handle = offload.safe_get_full_grad(parameter), handle_of(parameter)
            assert gradient is not None and handle is not None
            segment = testing.inspect(engine).layouts[handle.unit].segments[handle.position]
            weight, residual = expected[name]
            noise = Noise(noise_stream(5, handle.unit, step + 1), segment.start)
            part = Partition(weight, gradient.view(-1), (), residual)
            update(part, [Segment(0, segment.numel, PlainSGDStep(job.lr, 0.0), noise)])
        engine.step()
    for name, master in masters(engine).items():
        assert torch.equal(master.view(-1), joined(*expected[name])), name
    engine.destroy(remove=True)


@pytest.mark.slow
def test_the_bytes_of_a_parameter_and_step(tmp_path: Path) -> None:
    """12 of disk traffic, and a sixteenth for the scales: 5 each way, and 2 as the backward reads weights."""
    found = bytes_of_a_parameter(tmp_path, **SMALL)
    assert found.moved <= 12.3
    assert 10 < found.stored <= 10.1


def test_masters_are_read_set_and_exported(tmp_path: Path) -> None:
    """fp32 values are rounded to nearest, once; what is stored can be set, and is the same."""
    engine = trained(tmp_path, **SMALL)
    before = masters(engine)
    for name, weight in engine.module.named_parameters():
        offload.safe_set_full_fp32_param(weight, before[name])
    assert_same_tensors(masters(engine), before)
    assert all(torch.equal(each, nearest(each)) for each in before.values())
    name, weight = next(iter(engine.module.named_parameters()))
    values = torch.linspace(-1, 1, weight.numel()).view(weight.shape)
    offload.safe_set_full_fp32_param(weight, values)
    before[name] = nearest(values)
    assert_same_tensors(masters(engine), before)
    engine.destroy()
    done = CliRunner().invoke(app, ["export", str(tmp_path / "default"), str(tmp_path / "out"), "--dtype", "fp32"])
    assert done.exit_code == 0, done.output
    written = torch.cat([each.view(-1) for _, each in sorted(_safetensors(tmp_path / "out").items())])
    kept = torch.cat([each.view(-1) for key, each in sorted(before.items()) if key in _safetensors(tmp_path / "out")])
    assert torch.equal(written, kept)


def _safetensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {key: each for file in sorted(folder.glob("*.safetensors")) for key, each in load_file(file).items()}


def muon_on_ranks(folder: Path) -> Result:
    return train_on_ranks(MUON, DISK, folder, **BF24)


@pytest.mark.slow
def test_muon_rounds_the_masters_of_matrices_alike_everywhere(ranks: RankPool, tmp_path: Path) -> None:
    """In every placement, after a kill, and where two ranks divide the matrices of a unit."""
    found = same_bits(MUON, tmp_path / "one", [DISK, HOST], **BF24)
    (tmp_path / "killed").mkdir()
    job = MUON._replace(steps=40)
    killed = kill_and_resume(job, DISK, tmp_path / "killed", kills=2, late=0.02, **BF24)
    assert_same(run(job, DISK, tmp_path / "whole", **BF24), killed, "unbroken and killed")
    for each in ranks.run(muon_on_ranks, tmp_path / "two"):
        assert_same_tensors(found.weights, each.weights, "one rank and two")
    other = run(MUON, HOST, tmp_path / "other", seed=9, **BF24)
    matrix = next(name for name in found.weights if name.endswith("c_fc.weight"))
    assert not torch.equal(found.weights[matrix], other.weights[matrix]), "by chance, and not to nearest"


# -- what users see -----------------------------------------------------------------------------------


def test_other_weights_and_optimizers_of_torch_refuse_them(tmp_path: Path) -> None:
    for dtype, why in (("fp32", "an fp32 weight is its own master"), ("fp16", "shares no bits with it")):
        with pytest.raises(ConfigError, match=rf'"master" is bf24.*weights are {dtype}: .*{why}.*leave "master" out'):
            start(JOB._replace(dtype=dtype), DISK, tmp_path / dtype, **BF24)
        assert not (tmp_path / dtype).exists()
    model, given = JOB.model(), config(JOB, DISK, tmp_path, **BF24)
    del given["optimizer"]
    with pytest.raises(ConfigError, match=r"\"master\" is bf24, but this optimizer runs by torch's own code"):
        offload.initialize(model=model, optimizer=torch.optim.NAdam(model.parameters(), lr=1e-3), config=given)
    with pytest.raises(ConfigError, match=r"offload\.master"):
        load_config({"offload": {"master": "bf20"}})


def test_the_option_becomes_a_key_and_chooses_bf16() -> None:
    content, lines = merge({"offload": {"master": "fp32"}}, Options(master="bf24"))
    assert load_config(content).offload.master == "bf24" and lines == ("--master bf24 overrules offload.master fp32",)
    assert load_config(auto_dtype(merge(None, Options(master="bf24"))[0])).dtype == "bf16"


@pytest.mark.sample(1)
@pytest.mark.parametrize(("before", "after"), [("fp32", "bf24"), ("bf24", "fp32"), ("bf24", "bf24, int8")])
def test_a_run_with_another_master_is_refused(before: str, after: str, tmp_path: Path) -> None:
    trained(tmp_path, **forms(before)).destroy()
    advice = "--moments int8" if "int8" in after else f"--master {after}"
    with pytest.raises(
        StoreError, match=rf"offload convert .*default {advice}`.*save_checkpoint.*load_checkpoint"
    ) as no:
        start(JOB, DISK, tmp_path, resume="must", **forms(after))
    had = "--moments fp32" if "int8" in after else f"--master {before}"
    assert f"resume with {had}, as the run had;" in in_options(str(no.value), Options())
    again = start(JOB, DISK, tmp_path, resume="must", **forms(before))
    assert again.global_steps == 2 and f"{before}-master" in f"fp32-master {testing.inspect(again).mode.name}"
    again.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["AdamW", "Lion", "Lamb"])
@pytest.mark.parametrize(
    ("before", "after"),
    [("fp32", "bf24"), ("bf24", "fp32"), ("bf24", "bf24"), ("fp32", "bf24, int8"), ("bf24, int8", "fp32")],
)
def test_a_checkpoint_converts_masters(before: str, after: str, name: str, tmp_path: Path) -> None:
    """To bf24 to nearest, from it exactly; the units are others, and the files those of another form."""
    engine = trained(tmp_path / "one", RULES[name], **forms(before))
    expected = masters(engine)
    if "bf24" in after:
        expected = {key: nearest(each) for key, each in expected.items()}
    engine.save_checkpoint(str(tmp_path / "saved"))
    engine.destroy(remove=True)
    other = start(RULES[name], HOST, tmp_path / "two", units=["GPT2MLP"], **forms(after))
    other.load_checkpoint(str(tmp_path / "saved"))
    assert_same_tensors(masters(other), expected)
    train_step(other, RULES[name], 2)
    other.destroy(remove=True)


def with_a_frozen_part() -> Any:
    model = JOB.model()
    model.transformer.wte.weight.requires_grad_(False)
    return model


def convert(*given: object) -> Any:
    return CliRunner().invoke(app, ["convert", *map(str, given)])


@pytest.mark.slow
def test_a_converted_run_goes_on(tmp_path: Path) -> None:
    """To bf24 to nearest, with moments alone bit for bit; there and back with all moments; also what is frozen."""
    job = JOB._replace(model=with_a_frozen_part)
    engine = trained(tmp_path, job)
    exact, moments = masters(engine), engine.optimizer.state_dict()["state"]
    engine.destroy()
    frozen = {name for name, each in job.model().named_parameters() if not each.requires_grad}
    expected = {key: each if key in frozen else nearest(each) for key, each in exact.items()}
    done = convert(tmp_path / "default", "--master", "bf24")
    assert done.exit_code == 0 and "master in bf24 in place of fp32" in done.output, done.output
    assert "--run default-bf24 --master bf24 --resume must" in done.output
    assert convert(tmp_path / "default-bf24", "--moments", "int8", "--run", "small").exit_code == 0
    assert convert(tmp_path / "small", "--master", "fp32", "--moments", "fp32", "--run", "wide").exit_code == 0
    for name, options in (("default-bf24", BF24), ("small", SMALL), ("wide", {})):
        engine = start(job, DISK, tmp_path, run=name, resume="must", **options)
        assert engine.global_steps == 2
        assert_same_tensors(masters(engine), expected)
        states = engine.optimizer.state_dict()["state"]
        if name == "default-bf24":
            for number, state in moments.items():
                assert all(torch.equal(states[number][key], value) for key, value in state.items())
        train_step(engine, job, 2)
        engine.destroy(remove=True)


def test_units_of_several_chunks_are_loaded_and_converted(tmp_path: Path) -> None:
    """A unit of 2.1 million elements."""
    job = JOB._replace(model=lambda: models.gpt2(layers=1, width=416))
    engine = start(job, DISK, tmp_path)
    train_step(engine, job, 0)
    expected = {key: nearest(each) for key, each in masters(engine).items()}
    engine.save_checkpoint(str(tmp_path / "saved"))
    engine.destroy()
    assert convert(tmp_path / "default", "--master", "bf24").exit_code == 0
    for run_name, resume in (("default-bf24", "must"), ("loaded", "never")):
        engine = start(job, DISK, tmp_path, run=run_name, resume=resume, **BF24)
        if run_name == "loaded":
            engine.load_checkpoint(str(tmp_path / "saved"))
        assert_same_tensors(masters(engine), expected)
        engine.destroy(remove=True)


def test_a_run_of_muon_is_converted(tmp_path: Path) -> None:
    """Matrices begin elsewhere, and lack a moment."""
    engine = trained(tmp_path, MUON)
    exact, moments = masters(engine), engine.optimizer.state_dict()["state"]
    engine.destroy()
    assert convert(tmp_path / "default", "--master", "bf24", "--moments", "bf16").exit_code == 0
    engine = start(MUON, DISK, tmp_path, run="default-bf24-bf16", resume="must", master="bf24", moments="bf16")
    assert_same_tensors(masters(engine), {key: nearest(each) for key, each in exact.items()})
    states = engine.optimizer.state_dict()["state"]
    for number, state in moments.items():
        for key, value in state.items():
            expected = value if key == "step" else value.bfloat16().float()
            assert torch.equal(states[number][key], expected), key
    train_step(engine, MUON, 2)
    engine.destroy(remove=True)


def test_what_cannot_be_converted_is_refused(tmp_path: Path) -> None:
    for dtype in ("bf16", "fp16"):
        trained(tmp_path / dtype, JOB._replace(dtype=dtype)).destroy()
    for given, message in (
        ((tmp_path / "bf16" / "default",), "expected --moments or --master, or both, got neither"),
        ((tmp_path / "bf16" / "default", "--master", "fp32"), "has master in fp32 already"),
        ((tmp_path / "fp16" / "default", "--master", "bf24"), "only masters of bf16 weights can be bf24"),
    ):
        done = convert(*given)
        assert done.exit_code == 2 and message in done.output, (given, done.output)


# -- plans --------------------------------------------------------------------------------------------


def test_a_plan_is_what_a_run_takes(tmp_path: Path) -> None:
    job = JOB._replace(model=lambda: models.gpt2(layers=2, width=256))
    for number, options in enumerate((BF24, SMALL)):
        given = config(job, DISK, tmp_path / str(number), **options)
        engine = offload.initialize(model=job.model(), config=given)[0]
        model = job.model()
        planned = settle(layouts_of(model, find_units(model)), given, Room(host=8 * GIB, device=0, disk=None))
        assert all(nbytes % 4096 == 0 for row in planned.parts.nbytes for nbytes in row.values()), "pages of their own"
        assert planned.parts.nbytes == testing.inspect(engine).state_bytes
        assert planned.stored == testing.inspect(engine).store.spec.nbytes  # type: ignore[union-attr]
        low = sum(row.get(State.MASTER_LOW_BITS, 0) for row in planned.parts.nbytes)
        assert low == sum(planned.parts.trainable_numel)
        engine.destroy(remove=True)


def test_a_device_with_kernels_updates_them_and_keeps_their_gradients(tmp_path: Path) -> None:
    model = JOB.model()
    plain = layouts_of(model, find_units(model))
    lion = JOB._replace(optimizer="Lion")
    for job, options, tier in ((JOB, BF24, Tier.DEVICE), (JOB, SMALL, Tier.DEVICE), (lion, BF24, Tier.HOST)):
        given = config(job, ("none", "none"), tmp_path, **options)
        planned = settle(plain, given, Room(host=8 * GIB, device=8 * GIB, disk=None))
        assert {row[State.GRAD] for row in planned.placement.tiers} == {tier}


@pytest.mark.slow
def test_a_plan_counts_them_and_names_them_as_a_change() -> None:
    """10 bytes of disk in place of 12, and 2 of updates less, of states in RAM more; the drive bounds the step."""
    shape, machine = from_count(7_000_000_000, 32, 1024), described("24GB", 16 * GIB, [parse_drive("7GB/s,5GB/s")])
    whole, small = (
        plan(shape, machine, Load(1), settings("nvme", "nvme", dtype="bf16", batch=1, moments="int8", master=master))
        for master in ("fp32", "bf24")
    )
    assert small.memory.stored / whole.memory.stored == pytest.approx(10 / 12, rel=0.01)
    moved = [each.timing.moved.read + each.timing.moved.written for each in (whole, small)]
    assert 2 <= (moved[0] - moved[1]) / sum(whole.memory.parts.trainable_numel) < 3
    assert small.timing.seconds < whole.timing.seconds
    assert "masters in bf24" in [change.words for change in advise(whole).changes]
    assert "masters in bf24" not in [change.words for change in advise(small).changes]
