"""A user's loop that stops anywhere and starts again has the losses, norms and weights of the unbroken one."""

from __future__ import annotations

import collections
import json
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from offload.errors import ConfigError, UsageError
from offload.fileio.plain_json import from_plain, to_plain
from tests.support.oracle import processes
from tests.support.processes.user_script import (
    Counter,
    Script,
    Setup,
    assert_equal,
    multi_step,
    step_schedule,
    train,
    warm_up,
)


def _until_killed(folder: Path, log: Path, setup: Setup, last: int) -> None:
    """Before the last step it waits to be killed, however long that takes."""
    script = Script(folder, setup)
    script.engine.client_state.setdefault("starts", []).append(script.engine.global_steps)
    with log.open("a") as lines:
        while (step := script.engine.global_steps) < last:
            print(json.dumps([step, *script.step()]), file=lines, flush=True)
    while last < MANY:
        time.sleep(1)
    starts = script.engine.client_state["starts"]
    rates = script.engine.get_lr()
    torch.save((starts, rates, script.end()), log.with_suffix(".end"))


MANY = 18


def _lines(log: Path) -> int:
    return log.read_text().count("\n") if log.exists() else 0


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """SIGKILL, twice, of a loop with our loader, a schedule of its own and a client_state."""
    setup, log = Setup("ours", registered=multi_step, draws=True), tmp_path / "log"
    chance = random.Random(1)
    for last in (MANY - 4, MANY - 2, MANY):
        before, kill = _lines(log), last < MANY
        child = processes().Process(target=_until_killed, args=(tmp_path / "killed", log, setup, last))
        child.start()
        while kill and child.is_alive() and _lines(log) < before + 2:  # the first of the two is committed by then
            time.sleep(0.002)
        if kill:
            time.sleep(chance.uniform(0, 0.05))
            child.kill()
        child.join()
        assert child.exitcode == (-signal.SIGKILL if kill else 0)
    seen: dict[int, list[float]] = {}
    for line in log.read_text().splitlines():
        step, *numbers = json.loads(line)
        assert seen.setdefault(step, numbers) == numbers, f"step {step} differs after a resume"
    starts, rates, weights = torch.load(log.with_suffix(".end"), weights_only=True)
    assert len(starts) >= 2 and starts == sorted(starts), "the dict goes on with the run"
    unbroken = train(tmp_path / "whole", setup, steps=MANY)
    assert_equal(unbroken, ([tuple(seen[step]) for step in range(MANY)], rates, weights))


# -- the loader's place -------------------------------------------------------------------------------


def test_epochs_are_counted(tmp_path: Path) -> None:
    """`for epoch in range(loader.epoch, epochs)` is the same loop in a new run and in a resumed one."""

    def loop(script: Script, most: int) -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []
        for epoch in range(script.loader.epoch, 3):
            for number, batch in enumerate(script.loader):
                if len(seen) == most:
                    return seen
                script.engine.backward(script.engine(batch).square().mean())
                script.engine.step()
                seen.append((epoch, number))
        return seen

    counts = []
    for most in (6, 4, 8, 99):  # at 6, at 10 = the end of the first pass, at 18, to the end
        script = Script(tmp_path)
        counts.append([epoch for epoch, _ in loop(script, most)])
        script.engine.destroy()
    assert counts == [[0] * 6, [0] * 4, [1] * 8, [1] * 2 + [2] * 10]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("change", "notice", "left"),
    [
        (Setup(samples=24), r"20 samples with seed 0, now 24 with 0\): pass 0 was at sample 12 .* pass 1 begins", 12),
        (Setup(config={"offload": {"seed": 9}}), "20 samples with seed 0, now 20 with 9", 10),
        (
            Setup(config={"train_micro_batch_size_per_gpu": 4}),
            "a batch is 4 samples .*, 2 in the resumed run; pass 0 had .* resumes at 12",
            2,
        ),
        (Setup(config={"train_micro_batch_size_per_gpu": 5}), "pass 0 had seen 12 and resumes at 10", 2),
        (Setup(config={"train_micro_batch_size_per_gpu": 7}), "pass 0 had seen 12 and resumes at 7", 2),
        (Setup(config={"gradient_accumulation_steps": 1}), "accumulation 2 is now 1", 4),
    ],
)
def test_another_data_set_or_batch_is_reported(change: Setup, notice: str, left: int, tmp_path: Path) -> None:
    first = Script(tmp_path)
    for _ in range(3):
        first.step()
    first.end()
    second = Script(tmp_path, change)
    (line,) = [line for line in second.engine.notices if re.search(notice, line)]
    assert len(list(second.loader)) == left, line
    second.engine.destroy()


# -- the user's own -----------------------------------------------------------------------------------


def test_client_state_is_that_of_the_committed_step(tmp_path: Path) -> None:
    script = Script(tmp_path)
    for step in range(3):
        script.step()
        script.engine.client_state["seen"] = [step, {"best": 0.1 * step, 7: ("a", None)}]
    script.engine.destroy()
    script = Script(tmp_path)
    assert script.engine.client_state == {"seen": [2, {"best": 0.2, 7: ("a", None)}]}
    next(script.batches)
    script.engine.client_state = {"epoch": float("inf")}
    script.step()
    script.engine.destroy()
    script = Script(tmp_path)
    assert script.engine.client_state == {"epoch": float("inf")}
    script.engine.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(2), r"client_state\['a'\]\[1\] is a torch.Tensor; .* nothing is lost"),
        (np.int64(3), r"client_state\['a'\]\[1\] is a numpy.int64"),
        ({(1, 2): 3}, r"client_state\['a'\]\[1\] contains the key \(1, 2\), a builtins.tuple"),
    ],
)
def test_a_value_that_is_not_plain_is_named_and_can_be_replaced(value: Any, message: str, tmp_path: Path) -> None:
    unbroken = train(tmp_path / "whole", Setup(), steps=3)
    script = Script(tmp_path / "parts")
    seen = [script.step()]
    script.engine.client_state["a"] = [1, value]
    with pytest.raises(UsageError, match=message):
        script.engine(torch.zeros(2, 6))
    with pytest.raises(UsageError, match=message):
        script.engine.destroy()
    script.engine.client_state["a"] = "mended"
    seen += [script.step() for _ in range(2)]
    assert_equal(unbroken, (seen, script.engine.get_lr(), script.end()))
    script = Script(tmp_path / "parts")
    assert script.engine.global_steps == 3 and script.engine.client_state == {"a": "mended"}
    script.engine.client_state = []
    script.step()
    with pytest.raises(UsageError, match=r"client_state must be a dict, got list"):
        script.engine.destroy()
    script.engine.client_state = {}
    script.engine.destroy(remove=True)


def test_objects_come_back_in_order(tmp_path: Path) -> None:
    script = Script(tmp_path)
    counters = [Counter(), Counter()]
    script.engine.register_for_checkpointing(*counters)
    for _ in range(3):
        script.step()
        counters[0].count += 1
        counters[1].count -= 1
    script.engine.destroy()
    script = Script(tmp_path)
    first, second = Counter(), Counter()
    script.engine.register_for_checkpointing(first)
    with pytest.raises(
        UsageError, match=r"contains 2 registered objects, of which 1 is registered: a Counter would be lost"
    ):
        script.step()
    script.engine.register_for_checkpointing(second)
    assert (first.count, second.count) == (3, -3)
    script.engine.step()  # nothing of the one that was refused had begun
    assert script.engine.global_steps == 4
    script.engine.destroy()


def test_other_objects_than_the_run_had_are_errors(tmp_path: Path) -> None:
    script = Script(tmp_path, Setup(registered=multi_step))
    script.step()
    script.end()
    script = Script(tmp_path)
    with pytest.raises(UsageError, match="a MultiStepLR next, got a StepLR"):
        script.engine.register_for_checkpointing(step_schedule(script.optimizer))
    script.engine.destroy()
    script = Script(tmp_path, Setup(registered=multi_step))
    with pytest.raises(UsageError, match=r"contains 1 registered object, and this would be number 2.*after the first"):
        script.engine.register_for_checkpointing(Counter())
    script.step()
    script.engine.register_for_checkpointing(Counter(4))
    script.end()
    script = Script(tmp_path, Setup(registered=multi_step))
    counter = Counter()
    script.engine.register_for_checkpointing(counter)
    assert counter.count == 4
    script.engine.destroy(remove=True)


def test_objects_that_have_not_come_yet_stay_in_the_run(tmp_path: Path) -> None:
    """A script that looks at a resumed run, changes a weight and ends has not lost the schedule."""
    script = Script(tmp_path, Setup(registered=step_schedule))
    for _ in range(3):
        script.step()
    rates = script.engine.get_lr()
    script.end()
    script = Script(tmp_path)
    with torch.no_grad():
        script.engine.module.last.bias.fill_(3.0)
    script.end()
    script = Script(tmp_path, Setup(registered=step_schedule))
    assert script.engine.module.last.bias.item() == 3.0
    assert script.engine.get_lr() == rates and script.scheduler.last_epoch == 3
    script.engine.destroy(remove=True)


def test_what_cannot_be_registered_is_an_error(tmp_path: Path) -> None:
    script = Script(tmp_path)
    with pytest.raises(UsageError, match=r"got a dict without state_dict and load_state_dict; .*client_state"):
        script.engine.register_for_checkpointing({})
    with pytest.raises(UsageError, match=r"object 1, Counter: its state_dict\(\)\['count'\] is a builtins.object"):
        script.engine.register_for_checkpointing(Counter(object()))
    script.step()
    script.end()
    script = Script(tmp_path)  # and neither is in the run
    script.step()
    script.engine.destroy(remove=True)


def test_a_schedule_that_cannot_be_held_is_an_error_at_the_start(tmp_path: Path) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
        made = step_schedule(optimizer)
        made.history = torch.zeros(3)
        return made

    with pytest.raises(ConfigError, match=r"StepLR\['history'\] is a torch.Tensor; .*engine.client_state"):
        Script(tmp_path, Setup(schedule=schedule))
    assert not (tmp_path / "default").exists() or not list((tmp_path / "default").glob("rank*"))


@pytest.mark.parametrize(
    "value",
    [
        [1, 2.5, None, True, "a", [], {}],
        {"a": (1, (2,)), 3: {"b": {None: 1.5, True: 2}}},
        {"\0dict": [1], "x": {"\0tuple": 1}},
        collections.Counter([3, 3, 5]),
        float("-inf"),
    ],
)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    back = from_plain(json.loads(json.dumps(to_plain(value, "it", "no"))))
    assert back == value and type(back) is type(value)


def test_a_value_that_holds_itself_is_an_error() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UsageError, match="nested more than 100 levels deep, or contains itself; no"):
        to_plain(value, "it", "no")


# -- learning rates -----------------------------------------------------------------------------------


def _configured(**params: Any) -> Setup:
    return Setup(config={"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, **params}}})


def test_what_was_set_by_hand_comes_back_unless_the_config_changed(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.optimizer.param_groups[0].update(lr=3e-3, betas=(0.8, 0.9))
    script.step()
    script.end()
    script = Script(tmp_path)
    group = script.optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (3e-3, (0.8, 0.9), 0.1)
    assert not any("other settings" in line for line in script.engine.notices)
    script.engine.destroy()
    script = Script(tmp_path, _configured(lr=5e-3, weight_decay=0.2))
    group = script.optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (5e-3, (0.8, 0.9), 0.2)
    (notice,) = [line for line in script.engine.notices if "other settings" in line]
    assert "learning rates [0.01] is now [0.005], weight decay [0.1] is now [0.2]" in notice
    script.step()
    script.end()
    script = Script(tmp_path, _configured(lr=5e-3, weight_decay=0.2))
    assert script.engine.get_lr() == [5e-3] and not any("other settings" in line for line in script.engine.notices)
    script.engine.destroy(remove=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["schedule", "registered"])
def test_a_schedule_goes_on_from_its_own_rate(how: str, tmp_path: Path) -> None:
    """Whatever the config says now; the weight decay, which it does not move, is the config's."""
    script = Script(tmp_path, Setup(**{how: warm_up}))
    for _ in range(3):
        script.step()
    rates = script.engine.get_lr()
    script.end()
    assert rates == [pytest.approx(1e-2 * 0.775)]
    script = Script(tmp_path, _configured(lr=0.5, weight_decay=0.2)._replace(**{how: warm_up}))
    assert script.engine.get_lr() == rates and script.optimizer.param_groups[0]["weight_decay"] == 0.2
    (notice,) = [line for line in script.engine.notices if "other settings" in line]
    assert "learning rates [0.01] is now [0.5] (a schedule continues from the former)" in notice
    script.engine.destroy(remove=True)


def test_another_kind_of_schedule_begins_at_its_start(tmp_path: Path) -> None:
    script = Script(tmp_path, Setup(schedule=step_schedule))
    for _ in range(4):
        script.step()
    script.end()
    script = Script(tmp_path, Setup(schedule=warm_up))
    assert script.engine.get_lr() == [pytest.approx(1e-3)]
    assert any("schedule StepLR is now SequentialLR" in line for line in script.engine.notices)
    script.engine.destroy(remove=True)
