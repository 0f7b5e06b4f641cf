"""`load_checkpoint` in the middle of a loop restores data, schedules and the user's objects from the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import testing
from offload.errors import StoreError, UsageError
from tests.support.oracle import assert_same_tensors, weights_of
from tests.support.processes.user_script import (
    Counter,
    Script,
    Setup,
    assert_equal,
    multi_step,
    one_cycle,
    step_schedule,
    warm_up,
)

STEPS, SAVED = 9, 3
"""Five steps are a pass, so what is loaded again goes from the middle of the first over its end."""
SETUPS = [
    Setup("ours", draws=True),
    Setup("ours", schedule=multi_step),
    Setup("ours", schedule=one_cycle, registered=warm_up, draws=True),
    Setup("ours", registered=one_cycle),
]


def saved(folder: Path, setup: Setup, steps: int = SAVED) -> tuple[Script, list[Any]]:
    """A script that has made some steps, with a checkpoint of then in `folder`/saved."""
    script = Script(folder / "run", setup)
    seen = [script.step() for _ in range(steps)]
    script.engine.client_state["at"] = [steps]
    script.engine.save_checkpoint(folder / "saved")
    return script, seen


def to_the_end(script: Script) -> list[Any]:
    return [script.step() for _ in range(script.engine.global_steps, STEPS)]


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


@pytest.mark.sample(1)
@pytest.mark.parametrize("loads", [1, 2])
def test_two_loads_in_a_row_are_one(loads: int, tmp_path: Path) -> None:
    setup = SETUPS[2]
    expected = unbroken(tmp_path, setup)
    script, seen = saved(tmp_path, setup)
    generator = torch.get_rng_state()
    script.step()
    for _ in range(loads):
        script.engine.load_checkpoint(tmp_path / "saved")
        next(script.batches)  # which draws, and is not trained
    script.engine.load_checkpoint(tmp_path / "saved")
    torch.manual_seed(99)
    script.engine.get_lr(), script.engine.mean(0.0)  # no batch of the loader: the generators are put back here
    assert torch.equal(torch.get_rng_state(), generator)
    assert_equal(([*seen, *to_the_end(script)], script.engine.get_lr(), script.end()), expected)


def killed_after(script: Script) -> None:
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
            script = Script(tmp_path / name / "run", setup, "must")
        else:
            script.batches = script._ours()
        assert script.engine.global_steps == at and script.engine.client_state == {"at": [at]}
        ends.append((to_the_end(script), script.engine.get_lr(), script.end()))
    assert_equal(*ends)


def test_a_load_of_before_the_first_step_is_a_new_run(tmp_path: Path) -> None:
    """There each `iter` begins the next pass."""
    script, _ = saved(tmp_path, Setup("ours"), 0)
    script.step()
    for _ in range(2):
        script.engine.load_checkpoint(tmp_path / "saved")
        passes = [[rows.tolist() for rows in script.loader] for _ in range(2)]
        assert passes[0] != passes[1] and script.loader.epoch == 2 and len(passes[0]) == 10
    script.engine.destroy(remove=True)


# -- registered objects -------------------------------------------------------------------------------


def with_counters(folder: Path, *counts: int) -> tuple[Script, list[Counter]]:
    script = Script(folder)
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


def test_objects_that_the_checkpoint_has_not_stay_as_they_are(tmp_path: Path) -> None:
    checkpoint = counters_saved(tmp_path, 4)
    script, (first, second) = with_counters(tmp_path / "second", 0, 7)
    script.engine.load_checkpoint(checkpoint)
    assert (first.count, second.count) == (4, 7)
    assert "the last 1 registered object was not saved" in script.engine.notices[-1]
    third = Counter(8)
    script.engine.register_for_checkpointing(third)
    killed_after(script)
    script, counters = with_counters(tmp_path / "second", 0, 0)
    assert [each.count for each in counters] == [4, 7], "the third came after the commit"
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


def test_objects_that_a_resumed_run_still_waits_for_are_those_of_the_checkpoint_then(tmp_path: Path) -> None:
    checkpoint = counters_saved(tmp_path, 4, 5)
    script, _ = with_counters(tmp_path / "second", 1)
    script.step()
    script.engine.destroy()
    script = Script(tmp_path / "second")
    script.engine.load_checkpoint(checkpoint)
    first, second = Counter(), Counter()
    script.engine.register_for_checkpointing(first, second)
    assert (first.count, second.count) == (4, 5)
    script.engine.destroy(remove=True)


# -- learning rates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [step_schedule, one_cycle])
def test_without_schedule_states_the_schedule_and_its_values_stay(schedule: Callable[..., Any], tmp_path: Path) -> None:
    """The objects of the user are loaded all the same."""
    script = Script(tmp_path / "run", Setup("ours", schedule=schedule))
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
        script = Script(tmp_path / "run", Setup("ours", schedule=schedule), "must")
        script.engine.register_for_checkpointing(counter)
        assert counter.count == 0
    script.engine.destroy(remove=True)
