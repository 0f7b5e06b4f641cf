"""A run resumes from its swap files, also in the middle of training, and tells what changed and what follows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import offload
from offload import testing
from offload.checkpoint.load import in_words
from offload.engine.state import Differences
from offload.errors import StoreError, UsageError
from offload.layout.modes import Mode, make_mode
from offload.swapper.store import run_status
from tests.deepspeed.test_schedules import CYCLE, LR, MOMENTUM
from tests.deepspeed.test_schedules import start as start_scheduled
from tests.support import models
from tests.support.modules.module_kinds import Layers
from tests.support.oracle import Job, assert_same_tensors, config, run, start, train_step, weights_of
from tests.support.processes import user_script, warm_process
from tests.support.processes.user_script import (
    Counter,
    Setup,
    assert_equal,
    multi_step,
    one_cycle,
    step_schedule,
    warm_up,
)
from tests.support.processes.user_script import Script as TrainingScript

DISK = ("nvme", "nvme")


@pytest.mark.sample(1)
@pytest.mark.parametrize("placement", [DISK, ("cpu", "cpu"), ("none", "nvme"), ("nvme", "none")])
def test_every_placement_resumes(placement: tuple[str, str], tmp_path: Path) -> None:
    """Homes above DISK are read back from the store that they were written through to."""
    job = models.DROPOUT
    reference = run(job, placement, tmp_path / "whole", durability="step")
    first = start(job, placement, tmp_path / "parts", durability="step")
    losses = [train_step(first, job, step) for step in range(2)]
    first.destroy()
    torch.manual_seed(99)  # the generators of the first run must come from the store
    model = job.model()
    second = offload.initialize(
        model=model, config=config(job, placement, tmp_path / "parts", durability="step", resume="must")
    )[0]
    assert second.global_steps == 2
    losses += [train_step(second, job, step) for step in range(2, job.steps)]
    weights = second.module.state_dict()
    second.destroy(remove=True)
    assert losses == reference.losses
    assert_same_tensors(weights, reference.weights)


def test_other_settings_are_reported(tmp_path: Path) -> None:
    start(models.GPT2, DISK, tmp_path).destroy()
    engine = start(models.GPT2._replace(lr=5e-4, clip=0.5), DISK, tmp_path, resume="auto")
    assert "gradient clipping 1.0 is now 0.5, learning rates [0.001] is now [0.0005]" in engine.notices[-1]
    engine.destroy()
    engine = start(models.GPT2._replace(lr=5e-4, clip=0.5), DISK, tmp_path, resume="auto")
    assert "settings" in engine.notices[-1], "epoch 0 is still the first run's"
    train_step(engine, models.GPT2, 0)
    engine.destroy()
    engine = start(models.GPT2._replace(lr=5e-4, clip=0.5), DISK, tmp_path, resume="auto")
    assert not any("settings" in notice.replace(str(tmp_path), "") for notice in engine.notices)
    engine.destroy(remove=True)


def test_a_run_that_is_removed_leaves_nothing(tmp_path: Path) -> None:
    engine = start(models.GPT2, DISK, tmp_path)
    train_step(engine, models.GPT2, 0)
    engine.destroy(remove=True)
    assert list(tmp_path.iterdir()) == []
    start(models.GPT2, DISK, tmp_path, resume="auto").destroy(remove=True)


def test_a_finished_run_leaves_a_note_and_starts_over(tmp_path: Path) -> None:
    engine = start(models.GPT2, DISK, tmp_path)
    train_step(engine, models.GPT2, 0)
    engine.finish({"of": "a job"})
    status = run_status([tmp_path], "default")
    assert not status.exists and status.finished is not None
    assert status.finished["steps"] == 1 and status.finished["of"] == "a job"
    assert sorted(path.name for path in (tmp_path / "default").iterdir()) == ["finished.json"]
    for resume in ("must", "auto"):
        with pytest.raises(StoreError, match="finished"):
            start(models.GPT2, DISK, tmp_path, resume=resume)
    start(models.GPT2, DISK, tmp_path).destroy()


def test_a_run_resumes_with_tiers_that_need_no_store(tmp_path: Path) -> None:
    """With more memory than it had, say: it keeps the store that it has, and goes on bit for bit."""
    job = models.GPT2
    unbroken = run(job, DISK, tmp_path / "unbroken")
    first = start(job, DISK, tmp_path)
    losses = [train_step(first, job, step) for step in range(2)]
    first.destroy()
    with pytest.raises(StoreError, match="keeps no store"):
        start(job, ("cpu", "cpu"), tmp_path, resume="auto", durability="none")
    second = start(job, ("cpu", "cpu"), tmp_path, resume="auto")
    losses += [train_step(second, job, step) for step in range(2, job.steps)]
    assert second.resumable is not None
    second.destroy(remove=True)
    assert losses == unbroken.losses


def test_must_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="must"):
        start(models.GPT2, DISK, tmp_path, resume="must")


def test_an_exit_without_destroy_commits(tmp_path: Path) -> None:
    """A script that ends without `destroy` loses nothing, whatever its last call was."""
    code = (
        "from pathlib import Path; from tests.support import models\n"
        "from tests.support.oracle import start, train_step\n"
        f"engine = start(models.GPT2, ('nvme', 'nvme'), Path({str(tmp_path)!r}))\n"
        "train_step(engine, models.GPT2, 0); train_step(engine, models.GPT2, 1)\n"
    )
    done = warm_process.python(code)
    assert done.returncode == 0, done.stderr
    assert "offload rm" in done.stderr, "it says how to go on"
    engine = start(models.GPT2, DISK, tmp_path, resume="must")
    assert engine.global_steps == 2
    engine.destroy(remove=True)


class Sharing(Layers):
    """Persistent buffers whose elements share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((1,), 2.0).expand(8))
        self.register_buffer("rows", torch.arange(3.0)[:, None].expand(3, 4))
        self.register_buffer("windows", torch.arange(8).unfold(0, 3, 1))


def test_a_buffer_whose_elements_share_memory_comes_back(tmp_path: Path) -> None:
    job = Job(Sharing, models.mixture_loss, steps=2)
    engine = start(job, DISK, tmp_path / "swap")
    train_step(engine, job, 0)
    engine.module.scale.as_strided((1,), (1,)).fill_(5)
    train_step(engine, job, 1)
    engine.save_checkpoint(tmp_path / "saved")
    engine.destroy()

    def assert_back(engine: offload.Engine) -> None:
        assert engine.module.scale.tolist() == [5] * 8
        assert torch.equal(engine.module.rows.cpu(), torch.arange(3.0)[:, None].expand(3, 4))
        assert torch.equal(engine.module.windows.cpu(), torch.arange(8).unfold(0, 3, 1))
        engine.destroy(remove=True)

    assert_back(start(job, DISK, tmp_path / "swap", resume="must"))
    for weights_alone in (False, True):
        engine = start(job, DISK, tmp_path / "other")
        engine.load_checkpoint(tmp_path / "saved", load_module_only=weights_alone)
        assert_back(engine)


def test_a_schedule_that_does_not_take_its_saved_state_is_an_error_of_ours(tmp_path: Path) -> None:
    """torch's take any dict for their state, and fail in their own code at values that somebody has made up."""

    class Steps(torch.optim.lr_scheduler.MultiStepLR):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict({**state, "milestones": 7})
            self.step()

    def begin(kind: type[torch.optim.lr_scheduler.MultiStepLR]) -> offload.Engine:
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        kind.__name__ = "MultiStepLR"
        settings = config(models.GPT2, DISK, tmp_path, resume="auto")
        del settings["optimizer"]
        settings.pop("scheduler", None)
        schedule = kind(optimizer, [2, 3])
        return offload.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=settings)[0]

    engine = begin(torch.optim.lr_scheduler.MultiStepLR)
    engine.backward(engine(torch.ones(4, 4)).sum())
    engine.step()
    engine.destroy(remove=False)
    with pytest.raises(StoreError, match=r"the schedule MultiStepLR does not take its saved state \(TypeError"):
        begin(Steps)
    begin(torch.optim.lr_scheduler.MultiStepLR).destroy(remove=True)


STEPS = 9


class Rows(Dataset[torch.Tensor]):
    """Draws for each row, in this process or in a worker."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), index / 12) + 0.1 * torch.rand(4)


class Script:
    def __init__(self, folder: Path, workers: int, accumulation: int = 1) -> None:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(7)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": accumulation,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}},
            "offload": {"nvme_path": str(folder), "device": "cpu", "resume": "auto"},
        }
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.engine = offload.initialize(model=model, config=config).engine
        order = torch.Generator().manual_seed(3)
        loader = DataLoader(Rows(), 2, shuffle=True, num_workers=workers, generator=order)
        self.batches = itertools.chain.from_iterable(itertools.repeat(loader))
        for _ in range(self.engine.micro_steps):
            next(self.batches)
        self.engine.restore_generators()

    def draw(self) -> torch.Tensor:
        rows = next(self.batches)
        return rows + torch.randn_like(rows) * random.random() + float(np.random.rand())

    def step(self) -> list[float]:
        losses = []
        for _ in range(self.engine.gradient_accumulation_steps()):
            loss = self.engine(self.draw()).square().mean()
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.item())
        return losses


@pytest.mark.sample(1)
@pytest.mark.parametrize(("workers", "accumulation"), [(0, 1), (2, 1), (0, 2)])
def test_draws_before_the_first_call_come_again(workers: int, accumulation: int, tmp_path: Path) -> None:
    unbroken = Script(tmp_path / "whole", workers, accumulation)
    expected = [unbroken.step() for _ in range(STEPS)]
    unbroken.engine.destroy()
    seen: list[list[float]] = []
    for stop, batch in ((2, False), (6, True), (STEPS, False)):
        script = Script(tmp_path / "cut", workers, accumulation)
        seen += [script.step() for _ in range(len(seen), stop)]
        if batch:
            script.draw()  # a batch was fetched and drawn for, and not trained on
        script.engine.destroy()
    assert seen == expected


def test_a_checkpoint_of_a_run_without_a_loader_restores_the_generators(tmp_path: Path) -> None:
    """Also where the loader has restored others, of an earlier resume."""
    first = user_script.Script(tmp_path / "plain", user_script.Setup("plain 0"))
    first.step()
    first.engine.save_checkpoint(tmp_path / "saved")
    rows = torch.ones(user_script.MICRO, 6)
    expected = first.engine(rows)
    first.engine.destroy()
    second = user_script.Script(tmp_path / "ours")
    second.step()
    second.engine.destroy()
    second = user_script.Script(tmp_path / "ours")
    second.step()
    second.engine.load_checkpoint(tmp_path / "saved")
    assert torch.equal(second.engine(rows), expected)  # with the masks of the dropout
    second.engine.destroy()


TRAINING_STEPS, SAVED = 9, 3
"""Five steps are a pass, so what is loaded again goes from the middle of the first over its end."""
SETUPS = [
    Setup("ours", draws=True),
    Setup("ours", schedule=multi_step),
    Setup("ours", schedule=one_cycle, registered=warm_up, draws=True),
    Setup("ours", registered=one_cycle),
]


def saved(folder: Path, setup: Setup, steps: int = SAVED) -> tuple[TrainingScript, list[Any]]:
    """A script that has made some steps, with a checkpoint of then in `folder`/saved."""
    script = TrainingScript(folder / "run", setup)
    seen = [script.step() for _ in range(steps)]
    script.engine.client_state["at"] = [steps]
    script.engine.save_checkpoint(folder / "saved")
    return script, seen


def to_the_end(script: TrainingScript) -> list[Any]:
    return [script.step() for _ in range(script.engine.global_steps, TRAINING_STEPS)]


def unbroken(folder: Path, setup: Setup) -> tuple[Any, ...]:
    script, seen = saved(folder / "whole", setup)
    seen += to_the_end(script)
    return seen, script.engine.get_lr(), script.end()


@pytest.mark.sample(1)
@pytest.mark.parametrize("begin_anew", [False, True], ids=["same iterator", "new iterator"])
@pytest.mark.parametrize("setup", SETUPS, ids=Setup.title)
def test_a_loop_that_loads_goes_on_as_the_one_that_saved(setup: Setup, begin_anew: bool, tmp_path: Path) -> None:
    """Twice, from before and behind the end of a pass; with the iterator that was under way, or a new one."""
    expected = unbroken(tmp_path, setup)
    script, seen = saved(tmp_path, setup)
    for more in (1, 4):
        for _ in range(more):
            script.step()
        script.engine.client_state["at"].append("later")
        script.optimizer.param_groups[0]["weight_decay"] = 0.7
        script.engine.load_checkpoint(tmp_path / "saved")
        assert script.engine.client_state == {"at": [SAVED]}
        assert script.optimizer.param_groups[0]["weight_decay"] == 0.1
        assert script.scheduler is None or script.scheduler.last_epoch == SAVED
        assert script.loader.epoch == 0
        if begin_anew:
            script.batches = script._ours()
    seen += to_the_end(script)
    assert_equal((seen, script.engine.get_lr(), script.end()), expected)


def killed_after(script: TrainingScript) -> None:
    """As a kill would leave it: nothing is finished."""
    testing.abandon(script.engine, remove=False)


@pytest.mark.sample(1)
@pytest.mark.parametrize("at", [0, SAVED, 5])
@pytest.mark.parametrize("setup", SETUPS, ids=Setup.title)
def test_a_kill_right_after_a_load_loses_nothing_of_it(setup: Setup, at: int, tmp_path: Path) -> None:
    """The commit that a load makes holds all that it gave: a resumed run is the one that was not killed."""
    ends = []
    for name in ("goes on", "killed"):
        script, _ = saved(tmp_path / name, setup, at)
        for _ in range(at, 7):
            script.step()
        script.engine.load_checkpoint(tmp_path / name / "saved")
        if name == "killed":
            killed_after(script)
            script = TrainingScript(tmp_path / name / "run", setup, "must")
        else:
            script.batches = script._ours()
        assert script.engine.global_steps == at and script.engine.client_state == {"at": [at]}
        ends.append((to_the_end(script), script.engine.get_lr(), script.end()))
    assert_equal(*ends)


# -- registered objects -------------------------------------------------------------------------------


def with_counters(folder: Path, *counts: int) -> tuple[TrainingScript, list[Counter]]:
    script = TrainingScript(folder)
    counters = [Counter(count) for count in counts]
    script.engine.register_for_checkpointing(*counters)
    return script, counters


def counters_saved(folder: Path, *counts: int) -> Path:
    script, _ = with_counters(folder / "first", *counts)
    script.step()
    script.engine.save_checkpoint(folder / "saved")
    script.engine.destroy(remove=True)
    return folder / "saved"


def test_objects_beyond_those_registered_are_waited_for(tmp_path: Path) -> None:
    checkpoint = counters_saved(tmp_path, 4, 5)
    script, (first,) = with_counters(tmp_path / "second", 0)
    for _ in range(2):
        script.engine.load_checkpoint(checkpoint)
        assert first.count == 4
    with pytest.raises(
        UsageError, match="contains 2 registered objects, of which 1 is registered: a Counter would be lost"
    ):
        script.step()
    killed_after(script)
    script, (first,) = with_counters(tmp_path / "second", 0)
    second = Counter()
    script.engine.register_for_checkpointing(second)
    assert (first.count, second.count) == (4, 5), "the commit of the load held the one that had not come"
    script.step()
    script.engine.destroy(remove=True)


def test_other_objects_are_an_error_before_anything_changes(tmp_path: Path) -> None:
    checkpoint = counters_saved(tmp_path, 4, 5)
    script, (first,) = with_counters(tmp_path / "second", 1)
    script.engine.register_for_checkpointing(step_schedule(script.optimizer))
    for _ in range(2):
        script.step()
    before = weights_of(script.engine)
    with pytest.raises(
        StoreError, match=r"contains the registered objects a Counter, a Counter; number 2 of this engine is a StepLR"
    ):
        script.engine.load_checkpoint(checkpoint)
    assert first.count == 1 and script.engine.global_steps == 2
    assert_same_tensors(before, script.engine.module.state_dict())
    first.count = object()
    with pytest.raises(UsageError, match="registered object 1, Counter"):
        script.engine.load_checkpoint(checkpoint, load_module_only=True)
    first.count = 1
    script.engine.load_checkpoint(checkpoint, load_module_only=True)
    assert first.count == 1 and script.engine.global_steps == 2
    script.step()
    script.engine.destroy(remove=True)


# -- learning rates -----------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", [step_schedule, one_cycle])
def test_without_schedule_states_the_schedule_and_its_values_stay(schedule: Callable[..., Any], tmp_path: Path) -> None:
    """The objects of the user are loaded all the same."""
    script = TrainingScript(tmp_path / "run", Setup("ours", schedule=schedule))
    counter = Counter()
    script.engine.register_for_checkpointing(counter)
    script.step()
    script.engine.save_checkpoint(tmp_path / "saved")
    for _ in range(4):
        script.step()
    counter.count, values = 3, script.optimizer.values()
    script.engine.load_checkpoint(tmp_path / "saved", load_lr_scheduler_states=False)
    for _ in range(2):
        assert script.engine.global_steps == 1 and script.engine.lr_scheduler.last_epoch == 5
        assert script.optimizer.values() == values
        killed_after(script)
        script = TrainingScript(tmp_path / "run", Setup("ours", schedule=schedule), "must")
        script.engine.register_for_checkpointing(counter)
        assert counter.count == 0
    script.engine.destroy(remove=True)


THEN = {
    "seed": 0,
    "micro-batch size": 2,
    "accumulation": 4,
    "learning rates": [0.01],
    "schedule": "StepLR",
    "the schedule's total_num_steps": 6,
}
COSINE = {"total_num_steps": 4, "warmup_num_steps": 2, "cos_min_ratio": 0.0}
OTHERWISE = "the steps from here on take the present values, so losses and weights are not those"


def test_each_is_told_from_what_to_what() -> None:
    differences = Differences(THEN, {**THEN, "seed": 7, "learning rates": [0.5]})
    assert str(differences) == "seed 0 is now 7, learning rates [0.01] is now [0.5]"
    assert differences.consequences().startswith(OTHERWISE)
    assert not Differences(THEN, dict(THEN))
    assert not Differences({"seed": 0}, THEN) and not Differences(THEN, {"seed": 0}), "only one of both has it"


BATCH = {"micro-batch size": 4, "accumulation": 2, "samples of a step": 8}
"""Settings of a run that knows the samples of a step."""
FORMER = f"{OTHERWISE} that the run would have had; the former values give those"
AS_BEFORE = "a step has 8 samples as before, in other micro-batches: where"


@pytest.mark.parametrize(
    ("then", "now", "begins", "ends"),
    [
        ({}, {"accumulation": 8}, f"a step has 16 samples a rank in place of 8; {OTHERWISE}", ""),
        ({}, {"micro-batch size": 8, "accumulation": 1}, OTHERWISE, ""),
        ({}, {"schedule": "WarmupLR"}, f"WarmupLR begins at its start; {OTHERWISE}", ""),
        ({}, {"schedule": None}, f"without a schedule the optimizer's own learning rates count; {OTHERWISE}", ""),
        ({}, {"the schedule's total_num_steps": 10}, OTHERWISE, ""),
        # Two ranks share the batch of one: the former micro-batch would make it twice as large.
        (BATCH, {"micro-batch size": 2}, f"{AS_BEFORE} each sample weighs", ""),
        (BATCH, {"micro-batch size": 8, "accumulation": 1}, AS_BEFORE, ""),
        (BATCH, {"micro-batch size": 2, "seed": 7}, FORMER, ", on 1 rank"),
        (BATCH, {"samples of a step": 16}, f"{FORMER}, on 1 r", ""),
        (BATCH, {"accumulation": 4, "samples of a step": 16}, FORMER, "those"),
    ],
)
def test_what_follows(then: dict[str, object], now: dict[str, object], begins: str, ends: str) -> None:
    words = Differences({**THEN, **then}, {**THEN, **then, **now}).consequences()
    assert words.startswith(begins) and words.endswith(ends)


def test_of_a_rate_that_a_schedule_has_nothing_follows() -> None:
    """Who resumes a Trainer with another rate keeps the former, for the Trainer restores its schedule later."""
    differences = Differences(THEN, {**THEN, "learning rates": [0.5]}, scheduled=True)
    assert str(differences) == "learning rates [0.01] is now [0.5] (a schedule continues from the former)"
    words = differences.consequences()
    assert words.startswith("the steps are those that the run would have made; ") and "--schedule constant" in words
    but = "the steps from here on take the present values but for the learning rates, so"
    more = Differences(THEN, {**THEN, "learning rates": [0.5], "seed": 7}, scheduled=True)
    assert more.consequences().startswith(but)
    then = {**THEN, "schedule": None}
    group = {"lr": 0.25, "initial_lr": 0.5}
    differences = Differences(then, {**then, "learning rates": [0.5]}, groups=[group])
    assert str(differences) == "learning rates [0.01] is now [0.5] (set by the schedule of the loop)"
    assert differences.consequences().startswith(
        "the schedule of the loop makes the learning rates: those that the run"
    )
    more = Differences(then, {**then, "learning rates": [0.5], "seed": 7}, groups=[group])
    assert "take the present values but for the learning rates, so" in more.consequences()
    # The engine's own schedules mark groups too.
    own = Differences(THEN, {**THEN, "learning rates": [0.5]}, groups=[group])
    assert str(own) == "learning rates [0.01] is now [0.5]"


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["OneCycle", "WarmupCosineLR"])
@pytest.mark.parametrize("lr", [LR, 0.5])
def test_without_the_schedule_a_resumed_run_has_its_own_rates(kind: str, lr: float, tmp_path: Path) -> None:
    """Not the point of the curve at which the schedule was left, which may be 0; and they stay."""
    params = {**CYCLE, **MOMENTUM} if kind == "OneCycle" else COSINE
    script = start_scheduled(tmp_path, {"type": kind, "params": params})
    for _ in range(4):
        script.step()
    assert script.engine.get_lr() != [LR]
    script.end()
    for resumed in range(2):
        script = start_scheduled(tmp_path, None, lr=lr)
        group = script.engine.optimizer.param_groups[0]
        assert script.engine.get_lr() == [lr] and group["betas"] == (0.9, 0.999)
        told = any("the optimizer's own learning rates count" in line for line in script.engine.notices)
        assert told is (resumed == 0)
        script.step()
        script.end()
    start_scheduled(tmp_path, None, lr=lr).engine.destroy(remove=True)


@pytest.mark.parametrize(
    ("saved", "mine", "words"),
    [
        (make_mode("fp32", "adam"), make_mode("bf16", "adam"), "dtype fp32 is now bf16 (masters and moments are"),
        (
            make_mode("bf16", "adam"),
            make_mode("bf16", "adam", "int8"),
            "moments fp32 are now int8 (rounded to nearest)",
        ),
        (make_mode("bf16", "adam", "bf16"), make_mode("bf16", "adam"), "moments bf16 are now fp32; losses"),
        (make_mode("bf16", "adam"), make_mode("bf16", "adam", master="bf24"), "master fp32 is now bf24 (rounded to 24"),
        (
            make_mode("bf16", "adam", master="bf24"),
            make_mode("fp32", "adam"),
            "fp32 from here on), master bf24 is now fp32;",
        ),
    ],
)
def test_a_load_into_another_form_says_what_is_rounded(saved: Mode, mine: Mode, words: str) -> None:
    line = in_words(saved, mine, states=True)
    assert line is not None and words in line and line.endswith("are not those that the run would have had")
    assert in_words(mine, mine, states=True) is None


def test_of_moments_that_are_not_loaded_nothing_is_told() -> None:
    saved, mine = make_mode("bf16", "adam"), make_mode("fp32", "adam", "int8")
    line = in_words(saved, mine, states=False)
    assert line is not None and "moments" not in line and "(masters are taken over, and" in line
