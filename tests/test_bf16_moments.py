"""With `"moments": "bf16"` every rule trains with the same bits wherever its states are, and after any interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.config import load_config
from offload.engine.params.paged_parameter import handle_of
from offload.errors import ConfigError, StoreError
from offload.kernels import Noise, Partition, Segment, SGDStep, _native, noise_stream, update
from offload.planner.activations.load import Load
from offload.planner.advice import advise
from offload.planner.hardware import described, parse_drive
from offload.planner.memory import settings
from offload.planner.model_shape import from_count
from offload.planner.recommend import plan
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
    least_host_memory,
    run,
    same_bits,
    small_pieces,
    start,
    train_step,
    trained,
    weights_of,
)
from tests.support.rank_pool import RankPool
from tests.support.rank_pool import train as train_on_ranks

__all__ = ["default_settings"]  # fixtures

DISK, HOST = ("nvme", "nvme"), ("cpu", "cpu")
BF16: dict[str, Any] = {"moments": "bf16"}
JOB = models.GPT2._replace(dtype="bf16", steps=4)
RULES = {
    "AdamW": JOB,
    "Adam": JOB._replace(optimizer="Adam", params=(("adam_w_mode", False),)),
    "Lion": JOB._replace(optimizer="Lion", lr=1e-4),
    "Lamb": JOB._replace(optimizer="Lamb", lr=1e-2),
    "Adagrad": JOB._replace(optimizer="Adagrad", lr=1e-2),
    "momentum": JOB._replace(optimizer="SGD", lr=0.05, params=(("momentum", 0.9),)),
}

# -- the same bits ------------------------------------------------------------------------------------


@pytest.mark.numeric
@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", RULES)
def test_same_bits_in_every_placement(name: str, dtype: str, tmp_path: Path) -> None:
    job = RULES[name]._replace(dtype=dtype, steps=3)
    found = same_bits(job, tmp_path, **BF16)
    plain = run(job, DISK, tmp_path / "plain")
    assert found.losses[0] == plain.losses[0] and any(
        not torch.equal(value, plain.weights[key]) for key, value in found.weights.items()
    ), "the moments are those of fp32"


@pytest.mark.numeric
@pytest.mark.parametrize("name", ["AdamW", "Lamb"])
def test_tiles_of_any_size_give_the_same_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = RULES[name]._replace(clip=0.0)  # pieces of gradients are smaller too, and the last bits of a norm others
    whole = run(job, DISK, tmp_path / "whole", **BF16)
    small_pieces(monkeypatch)
    least = least_host_memory(job, tmp_path, **BF16)
    for name, options in (("roomy", BF16), ("tight", {**BF16, "host_memory": least})):
        pieces = run(job, DISK, tmp_path / name, **options)
        assert_same(whole._replace(norms=pieces.norms), pieces, name)


@pytest.mark.numeric
@pytest.mark.parametrize(("isa", "threads"), [(isa, 1 + number % 2) for number, isa in enumerate(ISAS)])
def test_threads_and_instruction_sets_give_the_same_bits(isa: str, threads: int, tmp_path: Path) -> None:
    whole = run(JOB, HOST, tmp_path / "default", **BF16)
    _native.configure(isa, threads)
    assert_same(whole, run(JOB, HOST, tmp_path / "other", **BF16), f"{isa}, {threads} threads")


@pytest.mark.numeric
def test_accumulated_micro_batches_give_the_same_bits_everywhere(tmp_path: Path) -> None:
    same_bits(JOB._replace(accumulation=3), tmp_path, [("none", "none"), HOST, DISK], **BF16)


def test_an_update_under_the_backward_and_its_repetition_round_alike(tmp_path: Path) -> None:
    """Confirmed, and made again for a step that clips."""
    for clip, kind in ((0.0, "hits"), (1e-3, "misses")):
        job = JOB._replace(clip=clip)
        late = run(job, DISK, tmp_path / f"late-{kind}", speculate=False, **BF16)
        engine = start(job, DISK, tmp_path / f"early-{kind}", speculate=True, **BF16)
        try:
            early = trained(engine, job, early_step)
            assert getattr(counts(engine), kind) > 0
        finally:
            engine.destroy(remove=True)
        assert_same(late, early, kind)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "late"), [("AdamW", 0.02), ("Lamb", 0.0), ("Lion", 0.0)])
def test_killed_and_resumed_is_unbroken(name: str, late: float, tmp_path: Path) -> None:
    job = RULES[name]._replace(steps=40 if late else 120)
    (tmp_path / "killed").mkdir()
    killed = kill_and_resume(job, DISK, tmp_path / "killed", kills=3, late=late, **BF16)
    assert_same(run(job, DISK, tmp_path / "whole", **BF16), killed, "unbroken and killed")


def on_two_ranks(job: Job, folder: Path) -> Result:
    """Both ranks have the same rows, so that their mean has the bits of one rank's gradient."""
    results = [train_on_ranks(job, each, folder / "-".join(each), **BF16) for each in (DISK, HOST)]
    assert_same(*results, "placements")
    return results[0]


@pytest.mark.numeric
@pytest.mark.parametrize("name", ["AdamW", "Lion"])
def test_two_ranks_round_as_one(name: str, ranks: RankPool, tmp_path: Path) -> None:
    """An element has its number in the whole unit, whichever rank has it."""
    job = RULES[name]._replace(clip=0.0)
    one, other = ranks.run(on_two_ranks, job, tmp_path / "two")
    assert_same(one, other, "ranks")
    alone = run(job, DISK, tmp_path / "one", **BF16)
    assert_same_tensors(alone.weights, one.weights, "one rank and two")


def in_small_pieces(job: Job, folder: Path) -> Result:
    """The norms are taken chunk by chunk, of which a parameter has several."""
    with pytest.MonkeyPatch.context() as patch:
        small_pieces(patch)
        return on_two_ranks(job, folder)


@pytest.mark.numeric
def test_lamb_on_two_ranks_moves_by_the_norms_of_rounded_moments(ranks: RankPool, tmp_path: Path) -> None:
    """The norms come from another pass than the update, on the thread of `step()`."""
    job = RULES["Lamb"]._replace(clip=0.0)
    one, other = ranks.run(in_small_pieces, job, tmp_path / "two")
    assert_same(one, other, "ranks")
    # Ranks add the norms up in another order, in double. A ratio differs by some 1e-16, and its rounding to fp32 not.
    alone = run(job, DISK, tmp_path / "one", **BF16)
    assert_same_tensors(alone.weights, one.weights, "one rank and two")


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
            segment = engine._core.components.layouts[handle.unit].segments[handle.position]
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
    """18 of disk traffic in bf16: 8 read, 8 written, and 2 for the weights that the backward reads again."""
    job = JOB._replace(model=lambda: models.gpt2(layers=4, width=256), steps=1)
    moved = {}
    for name, options in (("fp32", {}), ("bf16", BF16)):
        engine = start(job, DISK, tmp_path / name, speculate=False, **options)
        store = engine._core.components.store
        assert store is not None
        numel = sum(len(part) for part in engine._core.components.trainable)
        queue = engine._core.components.queue
        assert queue is not None
        before = 0
        for step in range(3):
            train_step(engine, job, step)
            finish_step_before(engine)
            now = queue.read_bytes + queue.written_bytes
            moved[name], before = (now - before) / numel, now
        disk = store.spec.nbytes / numel
        assert disk == {"fp32": 24, "bf16": 16}[name]
        engine.destroy(remove=True)
    assert moved["bf16"] <= 18.3 and moved["fp32"] - moved["bf16"] == pytest.approx(8, abs=0.1)


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
    assert engine._core.components.shards.mode.name == "bf16 bf16-moments"
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
