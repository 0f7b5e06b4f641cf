"""Moments in bf16 and 8 bits: their rounding, bytes, keys, resumes, checkpoints and plans."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from typer.testing import CliRunner

import offload
from offload import testing
from offload.cli.main import app
from offload.config import load_config
from offload.engine.params import handle_of
from offload.errors import ConfigError, StoreError
from offload.kernels import Noise, Partition, Segment, SGDStep, _native, noise_stream, update
from offload.kernels.update import BLOCK
from offload.planner.activations import Load
from offload.planner.hardware import described, parse_drive
from offload.planner.memory import settings
from offload.planner.model_shape import from_count
from offload.planner.recommend import advise, plan
from offload.runs.inspection import inspect
from offload.sizes import GIB
from tests.support import models
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

JOB = models.GPT2._replace(dtype="bf16", steps=4)
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


class Bytes(NamedTuple):
    """What a parameter costs a drive."""

    moved: float
    """Read and written, in a step."""
    stored: float


def bytes_of_a_parameter(folder: Path, job: Job = JOB, **options: Any) -> Bytes:
    """Trains with everything on disk, and counts by the queue and the store; nearly all parameters are matrices."""
    job = job._replace(model=lambda: models.gpt2(layers=4, width=256), steps=1)
    engine = start(job, ("nvme", "nvme"), folder, speculate=False, **options)
    store, queue = testing.inspect(engine).store, testing.inspect(engine).queue
    assert store is not None and queue is not None
    numel = sum(len(part) for part in testing.inspect(engine).trainable)
    totals = [0]
    for step in range(5):  # three count: the first records the order, the second has no update beside it yet
        train_step(engine, job, step)
        finish_step_before(engine)
        totals.append(queue.read_bytes + queue.written_bytes)
    # On a busy machine a step may read a unit again that was read ahead of it too early.
    moved = min(after - before for before, after in pairwise(totals[2:]))
    found = Bytes(moved / numel, store.spec.nbytes / numel)
    engine.destroy(remove=True)
    return found


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
    job = RULES[name]._replace(dtype=dtype, steps=3)
    found = same_bits(job, tmp_path, **FORMS[form])
    plain = run(job, DISK, tmp_path / "plain")
    # A master that is rounded as it comes in may round its weight the other way.
    assert ("bf24" in form or found.losses[0] == plain.losses[0]) and any(
        not torch.equal(value, plain.weights[key]) for key, value in found.weights.items()
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
    assert_unbroken(job, form, 3, late, tmp_path)


def assert_unbroken(job: Job, form: str, kills: int, late: float, folder: Path) -> None:
    (folder / "killed").mkdir()
    killed = kill_and_resume(job, DISK, folder / "killed", kills=kills, late=late, **FORMS[form])
    assert_same(run(job, DISK, folder / "whole", **FORMS[form]), killed, "unbroken and killed")


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
    job = RULES[name]._replace(clip=0.0)
    one, other = ranks.run(on_two_ranks, job, form, tmp_path / "two")
    assert_same(one, other, "ranks")
    alone = run(job, DISK, tmp_path / "one", **FORMS[form])
    assert_same_tensors(alone.weights, one.weights, "one rank and two")


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


def test_a_run_is_inspected_and_verified(tmp_path: Path) -> None:
    engine = start(JOB, DISK, tmp_path, **INT8)
    train_step(engine, JOB, 0)
    assert testing.inspect(engine).mode.name == "bf16 int8-moments"
    engine.destroy()
    assert inspect(tmp_path)["runs"][0]["mode"] == "bf16 int8-moments"
    done = CliRunner().invoke(app, ["verify", str(tmp_path / "default")])
    assert done.exit_code == 0, done.output


FP32_STATES = {"lr": 1e-3, "fp32_optimizer_states": True}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"offload": {"moments": "fp32"}}, "leave one of them out"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "fp32_optimizer_states": True}}},
            "leave one of them out",
        ),
        ({"offload": {"moments": "int8"}}, "for int8; leave one of them out"),
    ],
)
def test_two_keys_that_disagree_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({"bf16": {"enabled": True, "bf16_optimizer_states": True}, **given})
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


def assert_close_to_nearest(found: torch.Tensor, exact: torch.Tensor, root: bool) -> None:
    """Each value, or its root, is half a step of its block's codes from the exact one at most."""
    for start_of in range(0, len(exact), BLOCK):
        one, other = (each[start_of : start_of + BLOCK].double() for each in (found, exact))
        if root:
            one, other = one.sqrt(), other.sqrt()
        step = other.abs().max() / (255 if root else 127)
        bound = torch.where(one <= 1.01 * step, step, step / 2) if root else step / 2
        assert ((one - other).abs() <= 1.01 * bound).all()


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
