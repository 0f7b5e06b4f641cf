"""Moments in bf16 and 8 bits, masters of 24 bits: rounding, bytes, keys, resumes, checkpoints, plans, conversions."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
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
from offload.errors import ConfigError, IoError, StoreError
from offload.finetune.options import Options, in_options, merge
from offload.kernels import Noise, Partition, PlainSGDStep, Segment, SGDStep, _native, noise_stream, update
from offload.kernels.update import BLOCK
from offload.layout.flat_layout import layouts_of
from offload.layout.units import find_units
from offload.planner.memory import Room, settle
from offload.runs.inspection import inspect
from offload.sizes import GIB
from offload.states import State
from offload.swapper.store import Store
from tests.kernels.test_kernels_bf24 import joined, split
from tests.support import models
from tests.support.drives.fault_injection import flip_bit
from tests.support.early_updates import counts, finish_step_before
from tests.support.early_updates import train_step as early_step
from tests.support.kernel_inputs import ISAS, default_settings
from tests.support.oracle import (
    Job,
    Result,
    assert_same,
    assert_same_tensors,
    config,
    kill_and_resume,
    run,
    same_bits,
    small_pieces,
    start,
    train_step,
    trained,
    weights_of,
)
from tests.support.ranks.rank_pool import RankPool
from tests.support.ranks.rank_pool import train as train_on_ranks

JOB = models.SHALLOW._replace(dtype="bf16", steps=3)
RULES = {
    "AdamW": JOB,
    "Adam": JOB._replace(optimizer="Adam", params=(("adam_w_mode", False),)),
    "Lion": JOB._replace(optimizer="Lion", lr=1e-4),
    "Lamb": JOB._replace(optimizer="Lamb", lr=1e-2),
    "Adagrad": JOB._replace(optimizer="Adagrad", lr=1e-2),
    "momentum": JOB._replace(optimizer="SGD", lr=0.05, params=(("momentum", 0.9),)),
}
FORMS: dict[str, dict[str, Any]] = {
    "bf16": {"moments": "bf16"},
    "int8": {"moments": "int8"},
    "bf24": {"master": "bf24"},
    "bf24, int8": {"master": "bf24", "moments": "int8"},
}
"""Options of the block "offload"."""


__all__ = ["default_settings"]  # fixtures

DISK, HOST = ("nvme", "nvme"), ("cpu", "cpu")
FORM = pytest.mark.parametrize("form", [form for form in FORMS if form != "bf24"])
"""With a master in bf24 moments are in 8 bits; a placement and a kill have it with moments in fp32 too."""


@pytest.mark.numeric
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("dtype", "form"),
    [(dtype, form) for dtype in ("bf16", "fp16", "fp32") for form in FORMS if "bf24" not in form or dtype == "bf16"],
)
@pytest.mark.parametrize("name", RULES)
def test_same_bits_in_every_placement(name: str, dtype: str, form: str, tmp_path: Path) -> None:
    job = RULES[name]._replace(dtype=dtype, steps=2)
    result = same_bits(job, tmp_path, **FORMS[form])
    plain = run(job, DISK, tmp_path / "plain")
    # A master that is rounded as it comes in may round its weight the other way.
    assert ("bf24" in form or result.losses[0] == plain.losses[0]) and any(
        not torch.equal(value, plain.weights[key]) for key, value in result.weights.items()
    ), "moments and masters are those of fp32"


@pytest.mark.sample(1)
@pytest.mark.numeric
@FORM
@pytest.mark.parametrize(("isa", "threads"), [(isa, 1 + number % 2) for number, isa in enumerate(ISAS)])
def test_threads_and_instruction_sets_give_the_same_bits(isa: str, threads: int, form: str, tmp_path: Path) -> None:
    whole = run(JOB, HOST, tmp_path / "default", **FORMS[form])
    _native.configure(isa, threads)
    assert_same(whole, run(JOB, HOST, tmp_path / "other", **FORMS[form]), f"{isa}, {threads} threads")


@FORM
@pytest.mark.sample(1)
def test_an_update_under_the_backward_and_its_repetition_round_alike(form: str, tmp_path: Path) -> None:
    """Confirmed, and made again for a step that clips."""
    for clip, kind in ((0.0, "hits"), (1e-3, "misses")):
        job = JOB._replace(clip=clip)
        late = run(job, DISK, tmp_path / f"late-{kind}", speculate=False, **FORMS[form])
        engine = start(job, DISK, tmp_path / f"early-{kind}", speculate=True, **FORMS[form])
        try:
            early = trained(engine, job, early_step)
            assert getattr(counts(engine), kind) > 0
        finally:
            engine.destroy(remove=True)
        assert_same(late, early, kind)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "late"), [("AdamW", 0.02), ("Lamb", 0.0), ("Lion", 0.0)])
def test_killed_and_resumed_is_unbroken(name: str, late: float, form: str, tmp_path: Path) -> None:
    job = RULES[name]._replace(steps=40 if late else 120)
    (tmp_path / "killed").mkdir()
    killed = kill_and_resume(job, DISK, tmp_path / "killed", kills=3, late=late, **FORMS[form])
    assert_same(run(job, DISK, tmp_path / "whole", **FORMS[form]), killed, "unbroken and killed")


def on_two_ranks(job: Job, form: str, folder: Path) -> Result:
    """Both ranks have the same rows, so that their mean has the bits of one rank's gradient."""
    results = [train_on_ranks(job, each, folder / "-".join(each), **FORMS[form]) for each in (DISK, HOST)]
    assert_same(*results, "placements")
    return results[0]


@pytest.mark.numeric
@FORM
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["AdamW", "Lion", "Lamb"])
def test_two_ranks_round_as_one(name: str, form: str, ranks: RankPool, tmp_path: Path) -> None:
    """An element has its number in the whole unit, whichever rank has it, and ranks hold whole blocks.

    Ranks add the norms of LAMB up in another order, in double: a ratio differs by some 1e-16, and its rounding to fp32
    does not.
    """
    job = RULES[name]._replace(clip=0.0, steps=2)
    rank0, rank1 = ranks.run(on_two_ranks, job, form, tmp_path / "two")
    assert_same(rank0, rank1, "ranks")
    alone = run(job, DISK, tmp_path / "one", **FORMS[form])
    assert_same_tensors(alone.weights, rank0.weights, "one rank and two")


BF16: dict[str, Any] = {"moments": "bf16"}

# -- the same bits ------------------------------------------------------------------------------------


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


@pytest.mark.slow
@pytest.mark.parametrize(("moments", "stored", "most"), [("fp32", 24, 26.3), ("bf16", 16, 18.3), ("int8", 12.1, 14.4)])
def test_the_bytes_of_a_parameter_and_step(moments: str, stored: float, most: float, tmp_path: Path) -> None:
    """Of states and weights in bf16, half is read and half written; 2 more where weights are read twice."""
    job = JOB._replace(model=lambda: models.gpt2(layers=4, width=256), steps=1)
    engine = start(job, DISK, tmp_path, speculate=False, moments=moments)
    store, queue = testing.inspect(engine).store, testing.inspect(engine).queue
    assert store is not None and queue is not None
    numel = sum(len(part) for part in testing.inspect(engine).trainable)
    totals = [0]
    for step in range(5):  # three count: the first records the order, the second has no update beside it yet
        train_step(engine, job, step)
        finish_step_before(engine)
        totals.append(queue.read_bytes + queue.written_bytes)
    # On a busy machine a step may read a unit again that was read ahead of it too early.
    moved = min(after - before for before, after in pairwise(totals[2:])) / numel
    assert store.spec.nbytes / numel == pytest.approx(stored, rel=0.01)
    assert most - 2.4 <= moved <= most
    engine.destroy(remove=True)


def test_states_are_read_and_set_in_fp32(tmp_path: Path) -> None:
    engine = start(JOB, DISK, tmp_path, **BF16)
    train_step(engine, JOB, 0)
    weight = next(iter(engine.module.parameters()))
    moment = offload.safe_get_full_optimizer_state(weight, "exp_avg")
    assert moment is not None and moment.dtype is torch.float32 and moment.any()
    assert torch.equal(moment, moment.bfloat16().float()), "it is a value of bf16"
    offload.safe_set_full_optimizer_state(weight, torch.full_like(moment, 1.25), "exp_avg")
    values = offload.safe_get_full_optimizer_state(weight, "exp_avg")
    assert values is not None and (values == 1.25).all()
    states = engine.optimizer.state_dict()["state"]
    assert all(state["exp_avg_sq"].dtype is torch.float32 for state in states.values())
    engine.destroy(remove=True)


def test_deepspeeds_key_and_ours_mean_the_same(tmp_path: Path) -> None:
    theirs: dict[str, Any] = {"bf16": {"enabled": True, "bf16_optimizer_states": True}}
    for given in (theirs, {"offload": BF16}):
        assert load_config(given).moments == "bf16"
    for given in (
        {},
        {"bf16": {"enabled": False, "bf16_optimizer_states": True}},
        {"bf16": {"enabled": True, "bf16_optimizer_states": False}},
        {"offload": {"moments": "fp32"}},
        {"offload": {"moments": "auto"}},
    ):
        assert load_config(given).moments == "fp32"
    torch.manual_seed(0)
    engine = offload.initialize(model=JOB.model(), config=config(JOB, DISK, tmp_path) | theirs)[0]
    assert testing.inspect(engine).mode.name == "bf16 bf16-moments"
    engine.destroy(remove=True)


INT8: dict[str, Any] = {"moments": "int8"}


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


# -- what users see -----------------------------------------------------------------------------------


FP32_STATES = {"lr": 1e-3, "fp32_optimizer_states": True}


def test_two_keys_that_disagree_are_refused() -> None:
    theirs = {"bf16": {"enabled": True, "bf16_optimizer_states": True}}
    for given, message in (
        ({"offload": {"moments": "fp32"}}, "leave one of them out"),
        ({"optimizer": {"type": "AdamW", "params": FP32_STATES}}, "leave one of them out"),
        ({"offload": INT8}, "for int8; leave one of them out"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config({**theirs, **given})
    with pytest.raises(ConfigError, match="another key for int8"):
        load_config({"optimizer": {"type": "AdamW", "params": FP32_STATES}, "offload": INT8})


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
@pytest.mark.parametrize("form", ["fp32", "bf16"])
def test_a_run_with_other_moments_is_refused(form: str, tmp_path: Path) -> None:
    for before, after in ((form, "int8"), ("int8", form)):
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
    [
        ("fp32", "int8"),
        ("int8", "fp32"),
        ("bf16", "int8"),
        ("int8", "bf16"),
        ("int8", "int8"),
        ("fp32", "bf16"),
        ("bf16", "fp32"),
    ],
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
    other_engine = start(job, HOST, tmp_path / "two", units=["GPT2MLP"], moments=after)
    other_engine.load_checkpoint(str(tmp_path / "saved"))
    assert_same_tensors(weights, weights_of(other_engine))
    optimizer_states = other_engine.optimizer.state_dict()["state"]
    assert optimizer_states.keys() == states.keys()
    for number, state in states.items():
        for key, value in state.items():
            if key == "step" or after == "fp32" or before == after:
                assert torch.equal(optimizer_states[number][key], value), (number, key)
            elif after == "bf16":
                assert torch.equal(optimizer_states[number][key], value.bfloat16().float()), (number, key)
            else:
                assert_close_to_nearest(
                    optimizer_states[number][key].view(-1), value.view(-1), key in ("exp_avg_sq", "sum")
                )
    train_step(other_engine, job, 2)
    other_engine.destroy(remove=True)


def assert_close_to_nearest(values: torch.Tensor, exact: torch.Tensor, root: bool) -> None:
    """Each value, or its root, is half a step of its block's codes from the exact one at most."""
    for start_of in range(0, len(exact), BLOCK):
        left, right = (tensor[start_of : start_of + BLOCK].double() for tensor in (values, exact))
        if root:
            left, right = left.sqrt(), right.sqrt()
        step = right.abs().max() / (255 if root else 127)
        bound = torch.where(left <= 1.01 * step, step, step / 2) if root else step / 2
        assert ((left - right).abs() <= 1.01 * bound).all()


BF24: dict[str, Any] = {"master": "bf24"}
SMALL: dict[str, Any] = {"master": "bf24", "moments": "int8"}
MUON = JOB._replace(optimizer="Muon", lr=1e-2, clip=0.0)


def nearest(master: torch.Tensor) -> torch.Tensor:
    return joined(*split(master.reshape(-1).contiguous())).view(master.shape)


def masters(engine: offload.Engine) -> dict[str, torch.Tensor]:
    masters = {}
    for name, parameter in engine.module.named_parameters():
        master = offload.safe_get_full_fp32_param(parameter)
        assert master is not None
        masters[name] = master.cpu().clone()
    return masters


def trained_masters(folder: Path, job: Any = JOB, where: tuple[str, str] = DISK, **options: Any) -> offload.Engine:
    engine = start(job, where, folder, **options)
    for step in range(2):
        train_step(engine, job, step)
    return engine


def forms(name: str) -> dict[str, Any]:
    return {"fp32": {"master": "fp32"}, "bf24": BF24, "bf24, int8": SMALL}[name]


# -- bits and bytes -----------------------------------------------------------------------------------


def test_the_bits_are_those_of_seed_unit_update_and_element_masters(tmp_path: Path) -> None:
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


def test_masters_are_read_set_and_exported(tmp_path: Path) -> None:
    """fp32 values are rounded to nearest, once; what is stored can be set, and is the same."""
    engine = trained_masters(tmp_path, **SMALL)
    before = masters(engine)
    for name, weight in engine.module.named_parameters():
        offload.safe_set_full_fp32_param(weight, before[name])
    assert_same_tensors(masters(engine), before)
    assert all(torch.equal(tensor, nearest(tensor)) for tensor in before.values())
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
    trained_masters(tmp_path, **forms(before)).destroy()
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
    engine = trained_masters(tmp_path / "one", RULES[name], **forms(before))
    expected = masters(engine)
    if "bf24" in after:
        expected = {key: nearest(each) for key, each in expected.items()}
    engine.save_checkpoint(str(tmp_path / "saved"))
    engine.destroy(remove=True)
    other_engine = start(RULES[name], HOST, tmp_path / "two", units=["GPT2MLP"], **forms(after))
    other_engine.load_checkpoint(str(tmp_path / "saved"))
    assert_same_tensors(masters(other_engine), expected)
    train_step(other_engine, RULES[name], 2)
    other_engine.destroy(remove=True)


def with_a_frozen_part() -> Any:
    model = JOB.model()
    model.transformer.wte.weight.requires_grad_(False)
    return model


def convert(*given: object) -> Any:
    return CliRunner().invoke(app, ["convert", *map(str, given)])


@pytest.mark.slow
def test_a_run_of_muon_is_converted(tmp_path: Path) -> None:
    """Matrices begin elsewhere, and lack a moment."""
    engine = trained_masters(tmp_path, MUON)
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


def moments_of(engine: offload.Engine) -> dict[str, torch.Tensor]:
    states = engine.optimizer.state_dict()["state"]
    return {f"{number} {name}": torch.as_tensor(each) for number, row in states.items() for name, each in row.items()}


def trained_moments(job: Job, folder: Path, **options: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A run of two steps: its weights and its moments."""
    engine = start(job, DISK, folder, **options)
    for step in range(2):
        train_step(engine, job, step)
    result = weights_of(engine), moments_of(engine)
    engine.destroy()
    return result


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


def assert_converted(states: dict[str, torch.Tensor], before: dict[str, torch.Tensor], form: str) -> None:
    assert states.keys() == before.keys()
    for key, value in before.items():
        if form == "fp32" or key.endswith("step"):
            assert torch.equal(states[key], value), key
        elif form == "bf16":
            assert torch.equal(states[key], value.bfloat16().float()), key
        else:
            assert_close_to_nearest(states[key].view(-1), value.view(-1), key.endswith(("exp_avg_sq", "sum")))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["AdamW", "Lion", "Adagrad"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(
    ("before", "after"), [("fp32", "int8"), ("int8", "fp32"), ("bf16", "int8"), ("int8", "bf16"), ("fp32", "bf16")]
)
def test_a_converted_run_goes_on(name: str, dtype: str, before: str, after: str, tmp_path: Path) -> None:
    """On two drives, with weights that are frozen: masters stay bit for bit, and so does what fp32 can hold."""
    job = RULES[name]._replace(dtype=dtype, model=with_a_frozen_part)
    drives = [str(tmp_path / each) for each in ("one", "two")]
    weights, moments = trained_moments(job, tmp_path, moments=before, nvme_path=drives)
    kept = {each: files(Path(each) / "default") for each in drives}
    done = convert(tmp_path / "one" / "default", "--moments", after)
    assert done.exit_code == 0, done.output
    assert f"moments in {after} in place of {before}" in done.output
    assert {each: files(Path(each) / "default") for each in drives} == kept, "the run is only read"
    engine = start(job, DISK, tmp_path, moments=after, nvme_path=drives, run=f"default-{after}", resume="must")
    assert engine.global_steps == 2
    assert_same_tensors(weights, weights_of(engine))
    assert_converted(moments_of(engine), moments, after)
    train_step(engine, job, 2)
    engine.destroy(remove=True)


@pytest.mark.slow
def test_units_of_several_chunks_are_converted_and_loaded(tmp_path: Path) -> None:
    """A unit of 2.1 million elements, whose parameters begin within blocks where moments are not in 8 bits."""
    job, folder = JOB._replace(model=lambda: models.gpt2(layers=1, width=416)), tmp_path / "my files"
    engine = trained_masters(folder, job)
    moments = moments_of(engine)
    expected = {key: nearest(each) for key, each in masters(engine).items()}
    engine.save_checkpoint(str(tmp_path / "saved"))
    engine.destroy()
    done = convert(folder / "default", "--moments", "int8", "--master", "bf24", "--run", "other")
    assert done.exit_code == 0 and f"`offload rm '{folder}/default'` deletes" in done.output, "no line to paste"
    engine = start(job, DISK, folder, run="other", resume="must", **SMALL)
    assert_same_tensors(masters(engine), expected)
    assert_converted(moments_of(engine), moments, "int8")
    engine.load_checkpoint(str(tmp_path / "saved"))
    assert_same_tensors(masters(engine), expected)
    narrow = moments_of(engine)
    assert_converted(narrow, moments, "int8")
    engine.destroy()
    assert convert(folder / "other", "--moments", "fp32", "--run", "wide").exit_code == 0
    engine = start(job, DISK, folder, run="wide", resume="must", **BF24)
    assert_same_tensors(moments_of(engine), narrow)
    engine.destroy(remove=True)


def on_two_ranks_masters(job: Job, folder: Path, run: str, moments: str) -> dict[str, torch.Tensor]:
    engine = start(job, DISK, folder, run=run, moments=moments, resume="auto")
    for step in range(engine.global_steps, 2):
        train_step(engine, job, step)
    result = moments_of(engine)
    engine.destroy()
    return result


def fails_for_rank_1(store: Store, step: int, contents: Any, real: Any = Store.commit) -> None:
    if store.folders[0].name == "rank1":
        raise IoError(str(store.folders[0]), 0, 4096, errno.ENOSPC)
    real(store, step, contents)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("fp32", "int8"), ("int8", "bf16")])
def test_a_run_of_two_ranks_is_converted(before: str, after: str, ranks: RankPool, tmp_path: Path) -> None:
    job = JOB._replace(clip=0.0)
    moments, _ = ranks.run(on_two_ranks_masters, job, tmp_path, "default", before)
    with pytest.MonkeyPatch.context() as patch:
        testing.replace(patch, "store.commit", fails_for_rank_1)
        assert convert(tmp_path / "default", "--moments", after, "--run", "other").exit_code == 1
    assert not (tmp_path / "other").exists(), "a part of the new run is left"
    done = convert(tmp_path / "default", "--moments", after, "--run", "other")
    assert done.exit_code == 0, done.output
    for result in ranks.run(on_two_ranks_masters, job, tmp_path, "other", after):
        assert_converted(result, moments, after)


def test_what_cannot_be_converted_is_refused_and_json_names_the_new_run(tmp_path: Path) -> None:
    trained_moments(JOB, tmp_path)
    trained_moments(JOB._replace(optimizer="SGD", lr=0.05), tmp_path, run="plain")
    trained_moments(JOB._replace(dtype="fp16"), tmp_path, run="half")
    run, before = tmp_path / "default", files(tmp_path)
    for given, message in (
        ((run, "--moments", "int4"), "'int4' is not one of"),
        ((run, "--moments", "fp32"), "has moments in fp32 already"),
        ((run, "--moments", "int8", "--run", "default"), "needs a name of its own"),
        ((run, "--moments", "int8", "--run", "a/b"), "letters, digits, '.', '_' and '-'"),
        ((run, "--moments", "int8", "--run", "my run"), "letters, digits, '.', '_' and '-'"),
        ((run, "--moments", "int8", "--run", "plain"), "plain"),
        ((run,), "expected --moments or --master, or both, got neither"),
        ((run, "--master", "fp32"), "has master in fp32 already"),
        ((tmp_path / "half", "--master", "bf24"), "only masters of bf16 weights can be bf24"),
        ((tmp_path / "plain", "--moments", "int8"), "has no moments to convert"),
        ((tmp_path / "none", "--moments", "int8"), "there is no folder"),
    ):
        done = convert(*given)
        assert done.exit_code == 2 and message in done.output, (given, done.output)
    assert files(tmp_path) == before
    report = json.loads(convert(run, "--moments", "int8", "--json").stdout)
    assert report["run"] == f"{run}-int8" and report["step"] == 2
    wide, narrow = ({"master": "fp32", "moments": form} for form in ("fp32", "int8"))
    assert (report["before"], report["after"]) == (wide, narrow)
    states = run / "rank0" / "states"
    size = (tmp_path / "default-int8" / "rank0" / "states").stat().st_size
    assert report["nbytes"] == size < states.stat().st_size
    modes = {each["run"]: each["mode"] for each in inspect(tmp_path)["runs"]}
    assert modes["default-int8"] == "bf16 int8-moments" and _is_whole(tmp_path / "default-int8")
    for offset in range(0, states.stat().st_size, 4096):  # both slots of some state
        flip_bit(states, offset)
    done = convert(run, "--moments", "int8", "--run", "damaged")
    assert done.exit_code == 1 and "is damaged, and is not converted" in done.output, done.output
    assert not (tmp_path / "damaged").exists()


@pytest.mark.slow
def test_a_killed_conversion_leaves_the_run_and_can_be_made_again(tmp_path: Path) -> None:
    job = JOB._replace(model=lambda: models.gpt2(layers=8, width=256))
    weights, moments = trained_moments(job, tmp_path)
    kept = files(tmp_path / "default")
    command = [sys.executable, "-m", "offload", "convert", str(tmp_path / "default"), "--moments", "int8"]
    chance = random.Random(0)
    killed = 0
    for _ in range(3):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ))
        made = tmp_path / "default-int8" / "rank0"
        while process.poll() is None and not made.exists():  # it is about to write
            time.sleep(0.002)
        with_luck = chance.random() * 0.1
        time.sleep(with_luck)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() < 0
        assert files(tmp_path / "default") == kept
        if (made / "commit").exists() and process.returncode == 0:
            break
        if convert(tmp_path / "default-int8").exit_code != 2:
            raise AssertionError("no form was given")
    assert killed
    if not _is_whole(tmp_path / "default-int8"):
        done = convert(tmp_path / "default", "--moments", "int8")
        assert done.exit_code == 0, done.output
    engine = start(job, DISK, tmp_path, moments="int8", run="default-int8", resume="must")
    assert_same_tensors(weights, weights_of(engine))
    assert_converted(moments_of(engine), moments, "int8")
    engine.destroy(remove=True)


def _is_whole(run: Path) -> bool:
    return CliRunner().invoke(app, ["verify", str(run)]).exit_code == 0
