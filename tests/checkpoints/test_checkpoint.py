"""A run resumes from a checkpoint as the unbroken one, bit for bit; a checkpoint that does not fit changes nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import offload
from offload import kernels, testing
from offload.checkpoint.files import checkpoints
from offload.errors import StoreError
from tests.support import models, rounding_bounds
from tests.support.oracle import PLACEMENTS, Job, assert_same_tensors, config, run, start, train_step, weights_of

DISK, CPU, NONE = ("nvme", "nvme"), ("cpu", "cpu"), ("none", "none")
MIXTURE = models.MIXTURE._replace(accumulation=1)


def begin(job: Job, placement: tuple[str, str], folder: Path, **options: Any) -> offload.Engine:
    """An engine over other weights and generators than the job's."""
    torch.manual_seed(4711)
    return offload.initialize(model=job.model(), config=config(job, placement, folder, **options))[0]


def saved(job: Job, placement: tuple[str, str], folder: Path, steps: int = 2, **options: Any) -> list[float]:
    """Train, save to `folder`/saved after `steps`; the losses."""
    engine = start(job, placement, folder / "first", **options)
    losses = [train_step(engine, job, step) for step in range(steps)]
    assert engine.save_checkpoint(folder / "saved") is True
    engine.destroy(remove=True)
    return losses


def goes_on(
    job: Job, one: tuple[str, str], other: tuple[str, str], folder: Path, before: Any = (), after: Any = ()
) -> None:
    """Save in placement `one`, load in `other`; losses, norm and weights are those of a run that was not broken."""
    unbroken = run(job, other, folder / "whole")
    losses = saved(job, one, folder, **dict(before))
    engine = begin(job, other, folder / "second", **dict(after))
    train_step(engine, job, 9)  # so that leases, slices and moments hold something else
    path, client_state = engine.load_checkpoint(folder / "saved")
    assert path == str(folder / "saved" / "global_step2") and client_state == {} and engine.global_steps == 2
    losses += [train_step(engine, job, step) for step in range(2, job.steps)]
    assert losses == unbroken.losses and engine.get_global_grad_norm() == unbroken.norms[-1]
    assert_same_tensors(weights_of(engine), unbroken.weights)
    engine.destroy(remove=True)


# -- going on -----------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("one", "other"), [(DISK, DISK), (DISK, CPU), (CPU, NONE), (NONE, ("cpu", "nvme")), (("none", "cpu"), DISK)]
)
def test_a_run_goes_on_in_another_placement(
    dtype: str, one: tuple[str, str], other: tuple[str, str], tmp_path: Path
) -> None:
    goes_on(models.DROPOUT._replace(dtype=dtype, steps=4), one, other, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("other", PLACEMENTS)
@pytest.mark.parametrize("one", PLACEMENTS)
def test_a_run_goes_on_in_every_placement(one: tuple[str, str], other: tuple[str, str], tmp_path: Path) -> None:
    goes_on(models.DROPOUT._replace(dtype="bf16", steps=4), one, other, tmp_path)


@pytest.mark.sample(1)
@pytest.mark.parametrize("placement", [DISK, CPU])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_tied_frozen_and_unused_parameters_and_buffers(dtype: str, placement: tuple[str, str], tmp_path: Path) -> None:
    job = models.MIXTURE._replace(dtype=dtype, steps=4)
    goes_on(job, placement, DISK, tmp_path)
    goes_on(job, DISK, placement, tmp_path / "back")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [
        {"durability": "none"},
        {"durability": {"every": 3}},
        {"host_memory": "64MiB"},
        {"durability": "step", "host_memory": "64MiB"},
    ],
    ids=str,
)
def test_with_one_slot_with_commits_now_and_then_and_with_a_cache(options: dict[str, Any], tmp_path: Path) -> None:
    goes_on(models.DROPOUT._replace(dtype="bf16", steps=4), DISK, DISK, tmp_path, options, options)


@pytest.mark.numeric
def test_units_may_be_cut_otherwise(tmp_path: Path) -> None:
    """The same parameters in other units, by their names."""
    job = models.DROPOUT._replace(steps=4, dtype="bf16")
    unbroken = run(job, DISK, tmp_path / "whole", units=["GPT2Block"])
    losses = saved(job, DISK, tmp_path)
    engine = begin(job, DISK, tmp_path / "second", units=["GPT2MLP", "GPT2Attention"])
    units = len(testing.inspect(engine).layouts)
    engine.load_checkpoint(tmp_path / "saved")
    losses += [train_step(engine, job, step) for step in range(2, 4)]
    manifest = checkpoints(tmp_path / "saved")["global_step2"]
    assert units != len(manifest.layout["units"])
    rounding_bounds.same_losses(losses, unbroken.losses, job)  # the norm's sum has another order
    engine.destroy(remove=True)


def test_what_was_loaded_is_what_a_kill_leaves(tmp_path: Path) -> None:
    """The load is the next commit of the store, whatever its epoch."""
    job = models.DROPOUT._replace(steps=4, dtype="bf16")
    unbroken = run(job, DISK, tmp_path / "whole")
    losses = saved(job, DISK, tmp_path)
    engine = begin(job, DISK, tmp_path / "second")
    for step in range(5, 9):
        train_step(engine, job, step)
    engine.load_checkpoint(tmp_path / "saved")
    testing.abandon(engine, remove=False)  # as a kill would: nothing is finished
    again = begin(job, DISK, tmp_path / "second", resume="must")
    assert again.global_steps == 2
    losses += [train_step(again, job, step) for step in range(2, 4)]
    assert losses == unbroken.losses
    assert_same_tensors(weights_of(again), unbroken.weights)
    again.destroy(remove=True)


def test_schedule_groups_counts_and_client_state_come_back(tmp_path: Path) -> None:
    job = models.MIXTURE

    def made(folder: str) -> offload.Engine:
        torch.manual_seed(0)

        def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
            return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=10)

        return offload.initialize(
            model=job.model(), lr_scheduler=schedule, config=config(job, DISK, tmp_path / folder)
        )[0]

    unbroken = made("whole")
    expected = [train_step(unbroken, job, step) for step in range(6)]
    calls = unbroken.module.calls.clone()
    unbroken.destroy(remove=True)
    first = made("first")
    losses = [train_step(first, job, step) for step in range(3)]
    state = {"best": 0.5, "names": ["a", None], "span": (1, 2), "by number": {3: True}}
    first.save_checkpoint(tmp_path / "saved", tag=7, client_state=state)
    first.destroy(remove=True)
    second = made("second")
    path, client_state = second.load_checkpoint(tmp_path / "saved")
    assert path == str(tmp_path / "saved" / "7") and client_state == state and second.micro_steps == 6
    losses += [train_step(second, job, step) for step in range(3, 6)]
    assert losses == expected and torch.equal(second.module.calls, calls)
    second.load_checkpoint(tmp_path / "saved", load_lr_scheduler_states=False)
    assert second.global_steps == 3 and second.lr_scheduler.last_epoch == 6
    second.destroy(remove=True)


def test_gradients_of_before_a_load_are_dropped(tmp_path: Path) -> None:
    job = models.GPT2._replace(accumulation=2, steps=3)
    unbroken = run(job, DISK, tmp_path / "whole")
    losses = saved(job, DISK, tmp_path)
    engine = begin(job, DISK, tmp_path / "second")
    engine.backward(job.loss(engine, 50, 0))
    engine.step()
    engine.load_checkpoint(tmp_path / "saved")
    assert engine.micro_batches == 0
    assert [*losses, train_step(engine, job, 2)] == unbroken.losses
    engine.destroy(remove=True)


# -- weights alone, other modes -----------------------------------------------------------------------


def masters(folder: Path) -> dict[str, torch.Tensor]:
    """The fp32 values in a bf16 checkpoint of one rank."""
    manifest = next(iter(checkpoints(folder).values()))
    tensors = safetensors.torch.load_file(folder / "global_step2" / "states.rank0.safetensors")
    found = {}
    for unit, row in enumerate(manifest.layout["units"]):
        weight, trainable = tensors[f"{unit}.weight"], row["trainable"]
        master = weight.float()
        if trainable:
            part = torch.empty(trainable)
            kernels.join_master(weight[:trainable].clone(), tensors[f"{unit}.residual"], part)
            master[:trainable] = part
        for each in row["parameters"]:
            shape = torch.Size(each["shape"])
            found[each["name"]] = master[each["start"] : each["start"] + shape.numel()].view(shape)
    return found


def test_masters_of_a_bf16_checkpoint_are_weights_in_fp32_and_back(tmp_path: Path) -> None:
    """And moments are moments, bit for bit."""
    job = MIXTURE._replace(dtype="bf16")
    saved(job, DISK, tmp_path)
    expected = masters(tmp_path / "saved")
    before = safetensors.torch.load_file(tmp_path / "saved" / "global_step2" / "states.rank0.safetensors")
    engine = begin(job._replace(dtype="fp32"), CPU, tmp_path / "second")
    engine.load_checkpoint(tmp_path / "saved")
    (line,) = [line for line in engine.notices if "another form" in line]
    assert (
        "dtype bf16 is now fp32 (masters and moments are taken over, and layers compute in fp32 from here on)" in line
    )
    loaded = weights_of(engine)
    assert_same_tensors({name: loaded[name] for name in expected}, expected)
    shutil.rmtree(tmp_path / "saved")
    assert engine.global_steps == 2
    engine.save_checkpoint(tmp_path / "saved")
    after = safetensors.torch.load_file(tmp_path / "saved" / "global_step2" / "states.rank0.safetensors")
    assert_same_tensors(*({n: t for n, t in each.items() if "exp_avg" in n} for each in (after, before)))
    engine.destroy()
    back = begin(job, DISK, tmp_path / "third")
    back.load_checkpoint(tmp_path / "saved", load_module_only=True)
    assert back.global_steps == 0
    shutil.rmtree(tmp_path / "saved")
    back.save_checkpoint(tmp_path / "saved", tag="global_step2")
    assert_same_tensors(expected, masters(tmp_path / "saved"))
    back.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("placement", [DISK, CPU])
def test_without_optimizer_states_moments_stay(placement: tuple[str, str], tmp_path: Path) -> None:
    job = MIXTURE._replace(dtype="bf16")
    saved(job, DISK, tmp_path)
    engine = begin(job, placement, tmp_path / "second", durability="step")
    for step in range(3):
        train_step(engine, job, 20 + step)
    engine.save_checkpoint(tmp_path / "before")
    engine.load_checkpoint(tmp_path / "saved", load_optimizer_states=False)
    engine.save_checkpoint(tmp_path / "after")
    first, before, after = (
        safetensors.torch.load_file(tmp_path / name / f"global_step{step}" / "states.rank0.safetensors")
        for name, step in (("saved", 2), ("before", 3), ("after", 2))
    )
    for name, value in after.items():
        assert torch.equal(value, (before if "exp_avg" in name else first)[name]), name
    assert testing.inspect(engine).parameter_steps[0][0] == 3 and engine.global_steps == 2
    engine.destroy(remove=True)


@pytest.mark.parametrize("states", [True, False])
def test_without_optimizer_states_the_groups_stay(states: bool, tmp_path: Path) -> None:
    """What the saved run had set in its groups in the middle comes with the states alone."""
    engine = begin(MIXTURE, DISK, tmp_path / "first")
    engine.optimizer.param_groups[0].update(lr=0.5, weight_decay=0.25)
    train_step(engine, MIXTURE, 0)
    engine.save_checkpoint(tmp_path / "saved")
    engine.destroy(remove=True)
    other = begin(MIXTURE, DISK, tmp_path / "second")
    fresh = [(group["lr"], group["weight_decay"]) for group in other.optimizer.param_groups]
    other.load_checkpoint(tmp_path / "saved", load_optimizer_states=states)
    found = [(group["lr"], group["weight_decay"]) for group in other.optimizer.param_groups]
    assert found == ([(0.5, 0.25), *fresh[1:]] if states else fresh) and fresh[0] != (0.5, 0.25)
    other.destroy(remove=True)


# -- what fits ----------------------------------------------------------------------------------------


class Other(nn.Module):
    """One layer of the mixture's names, one of another shape, one that it has not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 33)
        self.more = nn.Linear(33, 61)
        self.unused = nn.Linear(33, 6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.more(self.embedding(ids))


class Same(Other):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(33, 5)


def test_what_does_not_fit_is_named_as_load_state_dict_does(tmp_path: Path) -> None:
    saved(MIXTURE, DISK, tmp_path)
    job = MIXTURE._replace(model=Other)
    engine = begin(job, DISK, tmp_path / "second")
    before = weights_of(engine)
    with pytest.raises(StoreError) as promoted:
        engine.load_checkpoint(tmp_path / "saved", load_module_only=True)
    message = str(promoted.value)
    assert "Missing key(s): more.weight, more.bias" in message and "Unexpected key(s): " in message
    assert "head.weight" in message and "calls" in message
    assert "size mismatch for unused.weight: the checkpoint has [5, 33], this model has [6, 33]" in message
    with pytest.raises(StoreError, match=r"^(?!.*Missing)[^$]*size mismatch for unused.bias"):
        engine.load_checkpoint(tmp_path / "saved", load_module_strict=False)
    assert_same_tensors(weights_of(engine), before)
    engine.destroy(remove=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("placement", [DISK, CPU])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_not_strict_loads_what_both_have(placement: tuple[str, str], dtype: str, tmp_path: Path) -> None:
    saved(MIXTURE._replace(dtype="bf16"), DISK, tmp_path)
    job = MIXTURE._replace(model=Same, dtype=dtype)
    engine = begin(job, placement, tmp_path / "second")
    train_step(engine, job, 0)
    before, expected = weights_of(engine), masters(tmp_path / "saved")
    engine.load_checkpoint(tmp_path / "saved", load_module_strict=False, load_module_only=True)
    after = weights_of(engine)
    for name, value in after.items():
        assert torch.equal(value, before[name] if "more" in name else expected[name].to(value.dtype)), name
    engine.destroy(remove=True)


def test_frozen_weights_may_be_left_out_and_are_those_of_the_model_then(tmp_path: Path) -> None:
    job = MIXTURE._replace(dtype="bf16", steps=4)
    unbroken = run(job, DISK, tmp_path / "whole")
    first = start(job, DISK, tmp_path / "first")
    losses = [train_step(first, job, step) for step in range(2)]
    first.save_checkpoint(tmp_path / "all")
    first.save_checkpoint(tmp_path / "some", exclude_frozen_parameters=True)
    first.destroy(remove=True)
    sizes = [(tmp_path / name / "global_step2" / "states.rank0.safetensors").stat().st_size for name in ("some", "all")]
    assert sizes[0] < sizes[1]
    second = start(job, CPU, tmp_path / "second")  # the job's seed gives the frozen weights of the first
    second.load_checkpoint(tmp_path / "some")
    losses += [train_step(second, job, step) for step in range(2, 4)]
    assert losses == unbroken.losses
    assert_same_tensors(weights_of(second), unbroken.weights)
    second.destroy(remove=True)


class Thawed(models.Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(True)
        self.blocks[3].requires_grad_(False)


@pytest.mark.parametrize("placement", [DISK, NONE])
def test_other_parameters_may_be_frozen(placement: tuple[str, str], tmp_path: Path) -> None:
    """What trains now and did not then begins with moments of zero and its first step."""
    job = MIXTURE._replace(dtype="bf16")
    saved(job, DISK, tmp_path)
    thawed = job._replace(model=Thawed)
    engine = begin(thawed, placement, tmp_path / "second")
    train_step(engine, thawed, 3)
    engine.load_checkpoint(tmp_path / "saved")
    loaded = weights_of(engine)
    assert all(torch.equal(loaded[n], value.to(torch.bfloat16)) for n, value in masters(tmp_path / "saved").items())
    engine.save_checkpoint(tmp_path / "again", tag="t")
    tensors = safetensors.torch.load_file(tmp_path / "again" / "t" / "states.rank0.safetensors")
    layouts, steps = testing.inspect(engine).layouts, testing.inspect(engine).parameter_steps
    unit = next(i for i, layout in enumerate(layouts) if layout.name == "blocks.1")
    assert not tensors[f"{unit}.exp_avg"].any() and not tensors[f"{unit}.residual"].any() and steps[unit] == [0] * 4
    train_step(engine, thawed, 4)
    engine.destroy(remove=True)


def test_an_engine_that_trains_nothing_loads_weights_of_any_mode(tmp_path: Path) -> None:
    saved(models.GPT2, DISK, tmp_path)

    def still() -> nn.Module:
        return models.gpt2().requires_grad_(False)

    engine = begin(models.GPT2._replace(model=still, dtype="bf16"), DISK, tmp_path / "second")
    engine.load_checkpoint(tmp_path / "saved")
    tensors = safetensors.torch.load_file(tmp_path / "saved" / "global_step2" / "states.rank0.safetensors")
    loaded = weights_of(engine)["transformer.wte.weight"]
    row = json.loads((tmp_path / "saved" / "global_step2" / "manifest.json").read_text())["layout"]["units"]
    unit, each = next((u, p) for u, r in enumerate(row) for p in r["parameters"] if p["name"].endswith("wte.weight"))
    values = tensors[f"{unit}.weight"][each["start"] : each["start"] + loaded.numel()].view(loaded.shape)
    assert torch.equal(loaded, values.to(torch.bfloat16))
    engine.save_checkpoint(tmp_path / "again")
    engine.destroy()
