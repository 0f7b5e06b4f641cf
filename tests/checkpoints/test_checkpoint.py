"""A checkpoint goes on in any placement, in whole or in part, and wrong arguments change nothing."""

from __future__ import annotations

import argparse
import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from typer.testing import CliRunner

import offload
from offload import kernels, testing
from offload.checkpoint.files import checkpoints
from offload.cli.main import app
from offload.errors import ConfigError, IoError, StoreError, UsageError
from offload.runs.import_checkpoint import open_foreign
from offload.states import State
from offload.swapper.store.format import read_manifest, read_records
from tests.checkpoints.checkpoint_runs import engine, folder, inspect, names, saved_checkpoint
from tests.support import models, rounding_bounds
from tests.support.drives.fault_injection import flip_bit
from tests.support.oracle import Job, assert_same_tensors, config, run, start, train_step, weights_of

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
    job: Job, left: tuple[str, str], right: tuple[str, str], folder: Path, before: Any = (), after: Any = ()
) -> None:
    """Save in placement `one`, load in `other`; losses, norm and weights are those of a run that was not broken."""
    unbroken = run(job, right, folder / "whole")
    losses = saved(job, left, folder, **dict(before))
    engine = begin(job, right, folder / "second", **dict(after))
    train_step(engine, job, 9)  # so that leases, slices and moments hold something else
    path, client_state = engine.load_checkpoint(folder / "saved")
    assert path == str(folder / "saved" / "global_step2") and client_state == {} and engine.global_steps == 2
    losses += [train_step(engine, job, step) for step in range(2, job.steps)]
    assert losses == unbroken.losses and engine.get_global_grad_norm() == unbroken.norms[-1]
    assert_same_tensors(weights_of(engine), unbroken.weights)
    engine.destroy(remove=True)


# -- going on -----------------------------------------------------------------------------------------


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"durability": "none"},
    {"durability": {"every": 3}},
    {"host_memory": "64MiB"},
    {"durability": "step", "host_memory": "64MiB"},
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("left", "right"), [(DISK, DISK), (DISK, CPU), (CPU, NONE), (NONE, ("cpu", "nvme")), (("none", "cpu"), DISK)]
)
@pytest.mark.parametrize("model", ["dropout", "tied, frozen and unused parameters"])
def test_a_run_goes_on_in_another_placement(
    model: str, dtype: str, left: tuple[str, str], right: tuple[str, str], options: dict[str, Any], tmp_path: Path
) -> None:
    """Also with one slot, with commits now and then, and with a cache."""
    job = models.DROPOUT if model == "dropout" else models.MIXTURE
    given = [{**options, "durability": "none"} if where == NONE and options else options for where in (left, right)]
    goes_on(job._replace(dtype=dtype), left, right, tmp_path, *given)


@pytest.mark.numeric
def test_units_may_be_cut_otherwise(tmp_path: Path) -> None:
    """The same parameters in other units, by their names."""
    job = models.DROPOUT._replace(dtype="bf16")
    unbroken = run(job, DISK, tmp_path / "whole", units=["GPT2Block"])
    losses = saved(job, DISK, tmp_path)
    engine = begin(job, DISK, tmp_path / "second", units=["GPT2MLP", "GPT2Attention"])
    units = len(testing.inspect(engine).layouts)
    engine.load_checkpoint(tmp_path / "saved")
    losses += [train_step(engine, job, step) for step in range(2, job.steps)]
    manifest = checkpoints(tmp_path / "saved")["global_step2"]
    assert units != len(manifest.layout["units"])
    rounding_bounds.same_losses(losses, unbroken.losses, job)  # the norm's sum has another order
    engine.destroy(remove=True)


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
    expected = [train_step(unbroken, job, step) for step in range(job.steps)]
    calls = unbroken.module.calls.clone()
    unbroken.destroy(remove=True)
    first = made("first")
    losses = [train_step(first, job, step) for step in range(2)]
    state = {"best": 0.5, "names": ["a", None], "span": (1, 2), "by number": {3: True}}
    first.save_checkpoint(tmp_path / "saved", tag=7, client_state=state)
    first.destroy(remove=True)
    second = made("second")
    path, client_state = second.load_checkpoint(tmp_path / "saved")
    assert path == str(tmp_path / "saved" / "7") and client_state == state and second.micro_steps == 4
    losses += [train_step(second, job, step) for step in range(2, job.steps)]
    assert losses == expected and torch.equal(second.module.calls, calls)
    second.load_checkpoint(tmp_path / "saved", load_lr_scheduler_states=False)
    assert second.global_steps == 2 and second.lr_scheduler.last_epoch == job.steps
    second.destroy(remove=True)


# -- weights alone, other modes -----------------------------------------------------------------------


def masters(folder: Path) -> dict[str, torch.Tensor]:
    """The fp32 values in a bf16 checkpoint of one rank."""
    manifest = next(iter(checkpoints(folder).values()))
    tensors = safetensors.torch.load_file(folder / "global_step2" / "states.rank0.safetensors")
    values = {}
    for unit, row in enumerate(manifest.layout["units"]):
        weight, trainable = tensors[f"{unit}.weight"], row["trainable"]
        master = weight.float()
        if trainable:
            part = torch.empty(trainable)
            kernels.join_master(weight[:trainable].clone(), tensors[f"{unit}.residual"], part)
            master[:trainable] = part
        for parameter in row["parameters"]:
            shape = torch.Size(parameter["shape"])
            values[parameter["name"]] = master[parameter["start"] : parameter["start"] + shape.numel()].view(shape)
    return values


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


@pytest.mark.sample(1)
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
    job = MIXTURE._replace(dtype="bf16")
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
    losses += [train_step(second, job, step) for step in range(2, job.steps)]
    assert losses == unbroken.losses
    assert_same_tensors(weights_of(second), unbroken.weights)
    second.destroy(remove=True)


class Thawed(models.Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(True)
        self.blocks[3].requires_grad_(False)


@pytest.mark.sample(1)
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


__all__ = ["engine", "folder", "saved_checkpoint"]  # fixtures

ARGUMENTS_CPU = ("cpu", "cpu")
MINE, CONVERT = r"client_state\['mine'\] is a .*", r": convert the value, as by vars\(args\)"

# -- bad input ----------------------------------------------------------------------------------------


NAMELESS = (
    *("", ".", "..", ".x", "a/b", "latest"),
    *(" a", "a ", "a\n", "\ta", "a\x07b", "a\u2028b", "a\ud800b", "a\x00b", "x" * 247, "ü" * 124),
)


def test_a_tag_that_is_no_name(engine: offload.Engine, tmp_path: Path) -> None:
    for tag in NAMELESS:
        with pytest.raises(UsageError, match="cannot name a folder") as promoted:
            engine.save_checkpoint(tmp_path / "saved", tag=tag)
        assert repr(tag) in str(promoted.value) and not (tmp_path / "saved").exists()


def test_a_tag_that_is_unusual(engine: offload.Engine, folder: Path) -> None:
    tags = ("x" * 246, "ü" * 123, "two words", "日本", "latest.swp", "a.partial", "a.old")
    for tag in (*tags, tags[0]):
        engine.save_checkpoint(folder, tag=tag)
    assert names(folder) == {*tags, "latest"}
    engine.save_checkpoint(folder, tag="a", keep_last=1)
    assert names(folder) == {"a", "latest"}


def test_a_latest_that_names_nothing(engine: offload.Engine, saved_checkpoint: Path, folder: Path) -> None:
    shutil.copytree(saved_checkpoint, folder / "one")
    for text in ("", "\n", "../one", "a\x07", ".a.partial"):
        (folder / "latest").write_text(text)
        with pytest.raises(StoreError, match=r"latest must contain the tag .* in the folder: one"):
            engine.load_checkpoint(folder)
        assert "latest must contain the tag" in inspect("verify", folder).output, text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_last": 0}, "keep_last must be .*, got 0"),
        ({"keep_last": "2"}, "keep_last must be .*, got '2'"),
        ({"keep_last": 1.5}, r"keep_last must be .*, got 1\.5"),
        ({"keep_last": True}, "keep_last must be .*, got True"),
        ({"keep_last": -1}, "keep_last must be .*, got -1"),
        ({"client_state": [1, 2]}, "client_state must be a dict or None, got list"),
        ({"client_state": []}, "client_state must be a dict or None, got list"),
        ({"client_state": "abc"}, "client_state must be a dict or None, got str"),
        ({"client_state": {"mine": torch.zeros(20_000)}}, f"{MINE}Tensor.*{CONVERT}"),
        ({"client_state": {"mine": argparse.Namespace(lr=1)}}, f"{MINE}Namespace.*{CONVERT}"),
        ({"client_state": {"mine": {1, 2}}}, f"{MINE}set.*{CONVERT}"),
        ({"client_state": {"a": {"big": 10**5000}}}, r"client_state\['a'\]\['big'\] is a whole number of 16610 bits"),
        ({"client_state": {10**5000: 1}}, "a key of client_state is a whole number"),
        ({"save_dir": None}, "save_dir must be a path.*NoneType"),
        ({"save_dir": b"saved"}, "save_dir must be a path.*bytes"),
        ({"save_dir": "a\0b"}, "save_dir is 'a.x00b'"),
        ({"save_dir": "a\ud800b"}, "save_dir is 'a.ud800b'"),
    ],
)
def test_what_cannot_be_meant(options: dict[str, Any], message: str, engine: offload.Engine, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        engine.save_checkpoint(**{"save_dir": tmp_path / "saved", **options})
    assert not (tmp_path / "saved").exists()


def test_a_load_from_no_path(engine: offload.Engine) -> None:
    for path in (None, b"saved", 3):
        with pytest.raises(UsageError, match="load_dir must be a path"):
            engine.load_checkpoint(path)  # type: ignore[arg-type]


def test_a_number_too_long_for_a_commit_is_named(engine: offload.Engine, folder: Path) -> None:
    engine.client_state = {"big": 10**5000}
    try:
        with pytest.raises(UsageError, match=r"engine.client_state\['big'\] is a whole number"):
            engine.save_checkpoint(folder)
    finally:
        engine.client_state = {}
    engine.save_checkpoint(folder, client_state={"long": 10**4000})
    assert engine.load_checkpoint(folder)[1] == {"long": 10**4000}


def test_small_tensors_of_the_user_come_back_bit_for_bit(engine: offload.Engine, folder: Path) -> None:
    mine: dict[str, Any] = {
        "generator": torch.get_rng_state(),
        "best": torch.tensor(0.1, dtype=torch.float64),
        "half": [torch.arange(6).to(torch.bfloat16).view(2, 3).T],
        "mask": torch.tensor([True, False]),
        "none": torch.zeros(0),
    }
    engine.save_checkpoint(folder, client_state=mine)
    state = engine.load_checkpoint(folder)[1]
    assert state.keys() == mine.keys()
    pairs = [(state.pop("half")[0], mine.pop("half")[0]), *((state[name], mine[name]) for name in mine)]
    assert len(pairs) == 5
    for loaded, value in pairs:
        assert loaded.dtype == value.dtype and torch.equal(loaded, value)


def test_weights_that_are_gathered_are_not_saved(engine: offload.Engine, folder: Path) -> None:
    for modify in (True, False):
        with (
            offload.gathered(engine.module.transformer.wte.weight, modify=modify),
            pytest.raises(UsageError, match=r"while transformer.wte.weight is gathered: leave the `with` block"),
        ):
            engine.save_checkpoint(folder)
    assert not names(folder)
    engine.save_checkpoint(folder)


def test_an_import_of_a_checkpoint_of_ours_says_who_reads_it(saved_checkpoint: Path) -> None:
    with pytest.raises(StoreError, match="is a checkpoint of offload itself: engine"):
        open_foreign(saved_checkpoint, None)


def test_a_save_within_a_forward_is_refused(tmp_path: Path) -> None:
    engine = start(models.GPT2, ARGUMENTS_CPU, tmp_path / "run")

    class Saves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            engine.save_checkpoint(tmp_path / "saved")
            return x

    engine.module.transformer.drop = Saves()
    with pytest.raises(UsageError, match="between steps"):
        models.GPT2.loss(engine, 0, 0)
    assert not (tmp_path / "saved").exists() or not list((tmp_path / "saved").iterdir())
    engine.destroy()


# -- names --------------------------------------------------------------------------------------------


def test_the_latest_a_named_one_and_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = start(models.GPT2, ARGUMENTS_CPU, tmp_path / "run")
    assert engine.load_checkpoint(tmp_path / "saved") == (None, {})
    assert "no checkpoint was loaded" in caplog.text
    with pytest.raises(StoreError, match=r"no checkpoint x .*: none"):
        engine.load_checkpoint(tmp_path / "saved", tag="x")
    for step in range(3):
        train_step(engine, models.GPT2, step)
        engine.save_checkpoint(tmp_path / "saved", save_latest=step < 2)
    assert (tmp_path / "saved" / "latest").read_text() == "global_step2"
    assert engine.load_checkpoint(tmp_path / "saved")[0] == str(tmp_path / "saved" / "global_step2")
    assert engine.global_steps == 2
    with pytest.raises(StoreError, match="global_step1, global_step2, global_step3"):
        engine.load_checkpoint(tmp_path / "saved", tag="global_step4")
    assert engine.load_checkpoint(tmp_path / "saved" / "global_step3")[0] is not None and engine.global_steps == 3
    (tmp_path / "saved" / "theirs").mkdir()
    with pytest.raises(StoreError, match="not a checkpoint of offload"):
        engine.load_checkpoint(tmp_path / "saved", tag="theirs")
    engine.destroy()


def test_keep_last_removes_the_oldest_of_ours_and_nothing_else(tmp_path: Path) -> None:
    folder, job = tmp_path / "saved", models.GPT2
    engine = start(job, ARGUMENTS_CPU, tmp_path / "run")
    engine.save_checkpoint(folder, tag="base", save_latest=False)
    (folder / "global_step9").mkdir()
    (folder / "notes").write_text("")
    (folder / ".other.partial").mkdir()
    (folder / ".other.partial" / "thesis.txt").write_text("all of it")
    for step in range(4):
        train_step(engine, job, step)
        engine.save_checkpoint(folder, keep_last=2)
    there = {".other.partial", "global_step9", "latest", "notes"}
    assert {path.name for path in folder.iterdir()} == {*there, "global_step3", "global_step4"}
    engine.load_checkpoint(folder, tag="global_step3")
    engine.save_checkpoint(folder, tag="again", keep_last=1)
    assert {path.name for path in folder.iterdir()} == {*there, "again"}, "what was saved stays, whatever its epoch"
    engine.destroy()


class Pair(nn.Module):
    def __init__(self, both: bool, frozen: bool) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.linspace(-1, 1, 6000))
        if both:
            self.b = nn.Parameter(torch.linspace(1, 2, 6000))
        self.both = both
        if frozen:
            self.frozen = nn.Parameter(torch.linspace(2, 3, 6000), requires_grad=False)

    def forward(self, factor: float) -> torch.Tensor:
        return factor * (self.a.square().sum() + (self.b.square().sum() if self.both else 0))


def begin_load(folder: Path, both: bool, frozen: bool, model: nn.Module | None = None) -> offload.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "nvme"}},
        "offload": {"nvme_path": str(folder), "device": "cpu", "resume": "auto", "units": ["Pair"]},
    }
    # A copy: the model of a destroyed engine has no weights.
    return offload.initialize(model=copy.deepcopy(model) or Pair(both, frozen), config=config).engine


def step(engine: offload.Engine) -> None:
    engine.backward(engine(1e-3))
    engine.step()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("state", "frozen", "element"),
    [(State.WEIGHT, False, 9000), (State.EXP_AVG_SQ, False, 9000), (State.WEIGHT, True, 17000)],
)
@pytest.mark.parametrize("damaged", [True, False])
def test_damage_in_what_stays_is_an_error(
    state: State, frozen: bool, element: int, damaged: bool, tmp_path: Path
) -> None:
    saver = begin_load(tmp_path / "other", both=False, frozen=False)
    step(saver)
    saver.save_checkpoint(tmp_path / "saved")
    saver.destroy(remove=True)
    run = tmp_path / "run"
    engine = begin_load(run, True, frozen)
    for _ in range(2):
        step(engine)
    engine.destroy()
    rank = run / "default" / "rank0"
    record = read_records(rank / "commit").valid[0]
    place = read_manifest(rank / "manifest.json").spec.places()[0][state][record.slots[0]]
    if damaged:
        flip_bit(rank / "states", place.offset(4 * element))
    engine = begin_load(run, True, frozen)
    if damaged:
        with pytest.raises(IoError, match="checksum") as caught:
            engine.load_checkpoint(tmp_path / "saved", load_module_strict=False)
        # While the caller still holds the exception, and with its frames the loader.
        assert caught.value is not None
        open_files = [str(path.resolve()) for path in Path("/proc/self/fd").iterdir()]
        assert not any(name.startswith(str(tmp_path / "saved")) for name in open_files)
        engine.destroy()
        assert read_records(rank / "commit").valid[0] == record
        assert CliRunner().invoke(app, ["verify", str(run / "default")]).exit_code == 1
    else:
        engine.load_checkpoint(tmp_path / "saved", load_module_strict=False)
        step(engine)
        engine.destroy()
        assert CliRunner().invoke(app, ["verify", str(run / "default")]).exit_code == 0


class Ranged(nn.Module):
    """Divides by the largest input so far, as modules of 8 bits do; its state is of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.largest, self.seen = torch.zeros((), dtype=torch.bfloat16), 0
        self.history: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.largest = torch.maximum(self.largest, x.detach().abs().max().bfloat16())
            self.seen += len(x)
            self.history.append((float("inf"), bytes([self.seen]), None, torch.tensor([], dtype=torch.int8)))
        return self.layer(x) / (1 + self.largest.float() + len(self.history))

    def get_extra_state(self) -> Any:
        return {"largest": self.largest, 7: self.seen, "history": self.history}

    def set_extra_state(self, state: Any) -> None:
        self.largest, self.seen, self.history = state["largest"], state[7], state["history"]


class Metric(nn.Module):
    """Saves and loads tensors that are no buffers, as the metrics of torchmetrics do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.total = nn.Linear(8, 8), torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total = self.total + x.detach().mean()
        return self.layer(x) + self.total.sum()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}total"] = self.total

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        if f"{prefix}total" in state:
            self.total = state.pop(f"{prefix}total")
        super()._load_from_state_dict(state, prefix, *args)


def renamed() -> nn.Module:
    """A model whose hooks rename its weights, and add a constant that nobody loads."""
    model = nn.Sequential(nn.Linear(8, 8), Ranged())

    def save(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}matrix"] = state.pop(f"{prefix}weight")
        state[f"{prefix}format"] = torch.tensor(2)

    model[0].register_state_dict_post_hook(save)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "extra state": lambda: nn.Sequential(Ranged(), nn.Tanh(), Ranged()),
    "own methods": lambda: nn.Sequential(Metric(), nn.Tanh(), Metric()),
    "hooks": renamed,
}


def start_entries(model: nn.Module, folder: Path, name: str, **more: Any) -> offload.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "nvme"}},
        "offload": {"nvme_path": str(folder), "run": name, **more},
    }
    return offload.initialize(model=model, config=config)[0]


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind]()


def losses(engine: offload.Engine, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)) * (6 - step)
        loss = (engine(x) - 1).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", MODELS)
def test_a_run_that_goes_on_equals_an_unbroken_one(kind: str, tmp_path: Path) -> None:
    engine = start_entries(made(kind), tmp_path, "unbroken")
    expected = losses(engine, range(5))
    engine.destroy(remove=True)
    first = start_entries(made(kind), tmp_path, "run")
    assert losses(first, range(3)) == expected[:3]
    first.save_checkpoint(tmp_path / "saved")
    first.destroy()
    again = start_entries(made(kind), tmp_path, "run", resume="must")
    assert losses(again, range(3, 5)) == expected[3:]
    again.load_checkpoint(tmp_path / "saved")
    assert losses(again, range(3, 5)) == expected[3:]
    again.load_checkpoint(tmp_path / "saved", load_module_only=True)
    assert losses(again, range(3, 4)) == expected[3:4]
    again.destroy(remove=True)


class Unplain(Ranged):
    def get_extra_state(self) -> Any:
        return {"names": {"a set"}}


class Giver(nn.Linear):
    def get_extra_state(self) -> Any:
        return 1


class Stubborn(Metric):
    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.total = state[f"{prefix}total"] * state[f"{prefix}layer.weight"].numel()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Unplain, r"Unplain\.get_extra_state\(\) \(0\._extra_state\)\['names'\] is a builtins\.set"),
        (lambda: Giver(8, 8), "Giver has get_extra_state without set_extra_state"),
        (Stubborn, r"contains 0\.total, which is neither a parameter nor a buffer, and load_state_dict\(\) does not"),
    ],
)
def test_what_no_commit_can_hold_is_refused(model: Callable[[], nn.Module], message: str, tmp_path: Path) -> None:
    built = nn.Sequential(model())
    with pytest.raises(ConfigError, match=message):
        start_entries(built, tmp_path, "run")
    assert not list(tmp_path.iterdir()) and bool(built(torch.ones(2, 8)).isfinite().all()), "nothing was touched"


def test_without_commits_a_checkpoint_is_refused_and_the_start_says_so(tmp_path: Path) -> None:
    engine = start_entries(nn.Sequential(Unplain()), tmp_path, "run", durability="none")
    assert any("no checkpoint of this run can be saved: Unplain.get_extra_state()" in each for each in engine.notices)
    losses(engine, range(1))
    with pytest.raises(UsageError, match="Unplain"):
        engine.save_checkpoint(tmp_path / "saved")
    losses(engine, range(1, 2))
    engine.destroy(remove=True)


def test_a_model_without_the_entries_of_the_run_is_refused(tmp_path: Path) -> None:
    engine = start_entries(nn.Sequential(Metric()), tmp_path, "run")
    losses(engine, range(1))
    engine.save_checkpoint(tmp_path / "saved")
    engine.destroy()

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    with pytest.raises(StoreError, match=r"the run contains the entry 0\.total of the model's state_dict"):
        start_entries(nn.Sequential(Plain()), tmp_path, "run", resume="must")
    other_engine = start_entries(nn.Sequential(Plain()), tmp_path, "other")
    with pytest.raises(StoreError, match=r"contains the entry 0\.total of the model's state_dict"):
        other_engine.load_checkpoint(tmp_path / "saved")
    other_engine.destroy(remove=True)
