"""DeepSpeed's schedules: the learning rate of each step is the one worked out by hand, from the first one on.

Also after a kill, from a checkpoint, and for each group; what cannot be meant is an error that names the key.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import offload
from offload import schedules
from offload.config import SCHEDULES, TORCH_SCHEDULES, load_config
from offload.engine import build_optimizer
from offload.errors import ConfigError
from tests.config.test_config_errors import ODD
from tests.support import rounding_bounds
from tests.support.processes.user_script import Script, Setup, assert_equal, train

LR = 0.01
"""Of the optimizer."""


def optimizer(*rates: float) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates or (LR,)]
    return torch.optim.AdamW(groups)


def rates(schedule: Any, steps: int, group: int = 0) -> list[float]:
    """The learning rates of the first steps, as they are set."""
    learning_rates = []
    for _ in range(steps):
        learning_rates.append(schedule.optimizer.param_groups[group]["lr"])
        assert schedule.get_lr() == schedule.get_last_lr() == [g["lr"] for g in schedule.optimizer.param_groups]
        schedule.step()
    return learning_rates


class Table(NamedTuple):
    """A schedule's block, and by hand what the steps have: the first number is the first step's."""

    type: str
    params: dict[str, Any]
    rates: list[float]
    momenta: list[float] | None = None

    @property
    def block(self) -> dict[str, Any]:
        return {"type": self.type, "params": self.params}


WARM = {"warmup_min_lr": 0.002, "warmup_max_lr": 0.01}

CYCLE = {"cycle_min_lr": 0.001, "cycle_max_lr": 0.005, "cycle_first_step_size": 4, "cycle_second_step_size": 2}

MOMENTUM = {"cycle_min_mom": 0.85, "cycle_max_mom": 0.95}

RANGE = {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.0}

TABLES = {
    # log(2) / log(4) = 0.5, log(3) / log(4) = 0.79248
    "log": Table("WarmupLR", {**WARM, "warmup_num_steps": 4}, [0.002, 0.002, 0.006, 0.00833985, 0.01, 0.01, 0.01]),
    "linear": Table(
        "WarmupLR",
        {**WARM, "warmup_num_steps": 4, "warmup_type": "linear"},
        [0.002, 0.002, 0.004, 0.006, 0.008, 0.01, 0.01],
    ),
    "one step of warm-up": Table("WarmupLR", {**WARM, "warmup_num_steps": 1}, [0.002, 0.002, 0.01, 0.01]),
    "no peak": Table("WarmupLR", {"warmup_num_steps": 2}, [0.0, 0.0, LR, LR]),
    "decay, log": Table(
        "WarmupDecayLR",
        {"total_num_steps": 8, "warmup_max_lr": 0.008, "warmup_num_steps": 4},
        [0.0, 0.0, 0.004, 0.00633985, 0.008, 0.008, 0.006, 0.004, 0.002, 0.0, 0.0],
    ),
    "decay, linear": Table(
        "WarmupDecayLR",
        {**WARM, "total_num_steps": 6, "warmup_num_steps": 2, "warmup_type": "linear"},
        [0.002, 0.002, 0.006, 0.01, 0.008, 0.006, 0.004, 0.002, 0.002],
    ),
    "decay without a peak": Table(
        "WarmupDecayLR", {"total_num_steps": 4, "warmup_num_steps": 2}, [0.0, 0.0, 0.001, 0.001, 0.0005, 0.0, 0.0]
    ),
    "cosine": Table(
        "WarmupCosineLR",
        {
            "total_num_steps": 6,
            "warmup_num_steps": 2,
            "warmup_min_ratio": 0.2,
            "cos_min_ratio": 0.1,
            "warmup_type": "linear",
        },
        # a quarter of the cosine is 0.853553, half of it 0.5, three quarters 0.146447
        [0.002, 0.002, 0.006, 0.00868198, 0.0055, 0.00231802, 0.001, 0.001, 0.001],
    ),
    "cosine, log": Table(
        "WarmupCosineLR",
        {"total_num_steps": 8, "warmup_num_steps": 4},
        [0.0, 0.0, 0.005, 0.00792481, 0.01, 0.00853568, 0.0050005, 0.00146532, 0.000001, 0.000001],
    ),
    "cycle": Table(
        "OneCycle",
        {**CYCLE, **MOMENTUM, "decay_lr_rate": 0.5, "decay_step_size": 2, "decay_mom_rate": 0.02},
        [0.001, 0.002, 0.003, 0.004, 0.005, 0.003, 0.001, 0.0008, 0.000666667, 0.000571429, 0.0005],
        [0.95, 0.925, 0.9, 0.875, 0.85, 0.9, 0.95, 0.9595, 0.969, 0.9785, 0.988],
    ),
    "cycle without decay": Table(
        "OneCycle",
        {**CYCLE, "cycle_second_step_size": None, "decay_lr_rate": 0.5},
        [0.001, 0.002, 0.003, 0.004, 0.005, 0.004, 0.003, 0.002, 0.001, 0.001, 0.001],
        [0.9, 0.875, 0.85, 0.825, 0.8, 0.825, 0.85, 0.875, 0.9, 0.9, 0.9],
    ),
    "cycle in stairs": Table(
        "OneCycle",
        {**CYCLE, "cycle_second_step_size": 4, "cycle_first_stair_count": 2, "cycle_second_stair_count": 1},
        [0.001, 0.001, 0.003, 0.003, 0.005, 0.001, 0.001, 0.001, 0.001],
        [0.9, 0.9, 0.85, 0.85, 0.8, 0.9, 0.9, 0.9, 0.9],
    ),
    "cycle in as many stairs": Table(
        "OneCycle", {**CYCLE, "cycle_first_stair_count": 2}, [0.001, 0.001, 0.003, 0.003, 0.005, 0.003, 0.001]
    ),
    "cycle without a fall": Table(
        "OneCycle",
        {**CYCLE, "cycle_second_step_size": 0, "decay_lr_rate": 0.5, "decay_step_size": 2},
        [0.001, 0.002, 0.003, 0.004, 0.001, 0.0008],
        [0.9, 0.875, 0.85, 0.825, 0.9, 0.9],
    ),
    "cycle of rates alone": Table("OneCycle", {**CYCLE, "cycle_momentum": False}, [0.001, 0.002, 0.003], [0.9] * 3),
    "range": Table("LRRangeTest", RANGE, [0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.045, 0.05]),
    "range in stairs": Table(
        "LRRangeTest",
        {**RANGE, "lr_range_test_staircase": True},
        [0.01, 0.01, 0.01, 0.01, 0.03, 0.03, 0.03, 0.03, 0.05],
    ),
    "one of torch": Table("StepLR", {"step_size": 2.0, "gamma": 0.5}, [0.01, 0.01, 0.005, 0.005, 0.0025]),
    "another of torch": Table(
        "linearlr", {"start_factor": 0.5, "total_iters": 2, "end_factor": "auto"}, [0.005, 0.0075, 0.01, 0.01]
    ),
}

OURS = [name for name, table in TABLES.items() if table.type in SCHEDULES]


def make(table: Table) -> Any:
    return getattr(offload.schedules, table.type)(optimizer(), **table.params)


def test_each_step_has_the_rate_and_the_momentum_of_the_table() -> None:
    for name in OURS:
        print(name)
        table = TABLES[name]
        assert rates(make(table), len(table.rates)) == pytest.approx(table.rates, rel=1e-6, abs=0)
        if table.momenta:
            schedule, betas = make(table), []
            for _ in table.rates:
                betas.append(schedule.optimizer.param_groups[0]["betas"])
                schedule.step()
            assert [first for first, _ in betas] == pytest.approx(table.momenta)
            assert {second for _, second in betas} == {0.999}, "the second moment's is the optimizer's"


def test_a_state_goes_on_with_the_table() -> None:
    """Rates and momenta are there at once, and a state of DeepSpeed, which has no more than the iteration, will do."""
    for name in OURS:
        print(name)
        table = TABLES[name]
        for at in range(len(table.rates)):
            schedule = make(table)
            for _ in range(at):
                schedule.step()
            for state in (schedule.state_dict(), {"last_batch_iteration": at - 1}):
                again = make(table)
                again.load_state_dict(state)
                (group,), (expected,) = again.optimizer.param_groups, schedule.optimizer.param_groups
                assert (group["lr"], group["betas"]) == (expected["lr"], expected["betas"])
                assert rates(again, len(table.rates) - at) == pytest.approx(table.rates[at:], rel=1e-6, abs=0)
        begun = getattr(offload.schedules, table.type)(optimizer(), **table.params, last_batch_iteration=2)
        assert begun.get_lr() == pytest.approx([table.rates[3]] if len(table.rates) > 3 else begun.get_lr(), rel=1e-6)
        begun.step(1)
        assert begun.get_last_lr() == pytest.approx([table.rates[2]], rel=1e-6)


def test_defaults_of_class_and_block_are_the_same() -> None:
    for name in SCHEDULES:
        print(name)
        signature = inspect.signature(getattr(offload.schedules, name)).parameters
        fields = SCHEDULES[name].model_fields
        assert set(signature) == {"optimizer", "last_batch_iteration", *fields} and set(schedules.MADE_BY) == set(
            SCHEDULES
        )
        for key, field in fields.items():
            default = None if field.default == "auto" else field.default
            assert signature[key].default == (inspect.Parameter.empty if field.is_required() else default), key


# -- groups -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("WarmupLR", {"warmup_min_lr": 1e-3, "warmup_max_lr": [1e-2], "warmup_num_steps": 4}),
        ("MultiStepLR", {"milestones": [1, 3], "gamma": 0.5}),
    ],
)
def test_a_number_in_quotes_is_that_number(name: str, params: dict[str, Any]) -> None:
    """Programs that turn YAML into JSON write "1e-3", and torch's schedules would fail at the first step."""

    def quoted(value: Any) -> Any:
        if isinstance(value, list):
            return [quoted(each) for each in value]
        return value if isinstance(value, bool) else str(value)

    rates: list[list[float]] = [[], []]
    for at, given in enumerate((params, {key: quoted(value) for key, value in params.items()})):
        block = load_config({"scheduler": {"type": name, "params": given}}).scheduler
        theirs = optimizer()
        schedule = build_optimizer.choose_scheduler(block, None, theirs).schedule
        for _ in range(6):
            rates[at] += schedule.get_last_lr()
            theirs.step()
            schedule.step()
    assert rates[0] == rates[1] and len({*rates[0]}) > 1


def test_each_group_has_its_own() -> None:
    both = optimizer(0.01, 0.002)
    schedule = offload.schedules.WarmupLR(both, [0.0, 0.001], warmup_num_steps=2, warmup_type="linear")
    assert rates(schedule, 4, group=0) == [0.0, 0.0, 0.005, 0.01]
    schedule = offload.schedules.WarmupLR(both, [0.0, 0.001], warmup_num_steps=2, warmup_type="linear")
    assert rates(schedule, 4, group=1) == [0.001, 0.001, 0.0015, 0.002]
    cosine = offload.schedules.WarmupCosineLR(optimizer(0.01, 0.002), 4, warmup_num_steps=2)
    cosine.step(2)
    assert cosine.get_last_lr() == pytest.approx([0.0050005, 0.0010001])
    cycle = offload.schedules.OneCycle(optimizer(1, 1), [0.1, 0.2], [0.3, 0.3], cycle_min_mom=[0.5, 0.6])
    cycle.step(1999)
    assert cycle.get_last_lr() == pytest.approx([0.3, 0.3]) and cycle.get_mom() == pytest.approx([0.5, 0.6])
    assert rates(offload.schedules.LRRangeTest(optimizer(1, 1), [0.1, 0.2], 1), 2, group=1) == [0.2, 0.4]


def test_an_optimizer_without_betas_keeps_its_momentum(caplog: pytest.LogCaptureFixture) -> None:
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=LR, momentum=0.9)
    assert rates(offload.schedules.OneCycle(sgd, **CYCLE), 2) == [0.001, 0.002]
    assert "SGD has no betas" in caplog.text and "betas" not in sgd.param_groups[0]


# -- in an engine -------------------------------------------------------------------------------------


def start(folder: Path, block: Any, resume: str = "auto", lr: float = LR) -> Script:
    params = {"lr": lr, "weight_decay": 0.1}
    config = {"scheduler": block, "optimizer": {"type": "AdamW", "params": params}}
    return Script(folder, Setup(config=config), resume)


def test_a_resumed_schedule_equals_the_unbroken_one(tmp_path: Path) -> None:
    """Losses, norms and weights too, with rates and momenta that move."""
    setup = Setup(config={"scheduler": TABLES["cycle"].block})
    assert_equal(train(tmp_path / "whole", setup, steps=9), train(tmp_path / "parts", setup, (0, 1, 3, 7), steps=9))


@pytest.mark.numeric
def test_the_engine_trains_with_these_rates(tmp_path: Path) -> None:
    """As a loop over torch's AdamW does in which each step is given the number of the table by hand."""
    table = TABLES["cycle"]
    assert table.momenta is not None
    torch.manual_seed(0)
    rows, mine, theirs = torch.randn(8, 6), nn.Linear(6, 1), nn.Linear(6, 1)
    theirs.load_state_dict(mine.state_dict())
    plain = torch.optim.AdamW(theirs.parameters(), lr=1.0, weight_decay=0.0)
    engine, *_ = offload.initialize(
        model=mine,
        config={
            "train_batch_size": 8,
            "gradient_clipping": 0,
            "optimizer": {"params": {"lr": 1.0}},
            "scheduler": table.block,
            "offload": {"device": "cpu"},
        },
    )
    gone = 0.0
    for rate, momentum in zip(table.rates, table.momenta, strict=True):
        engine.backward(engine(rows).square().mean())
        engine.step()
        plain.param_groups[0].update(lr=rate, betas=(momentum, 0.999))
        plain.zero_grad()
        theirs(rows).square().mean().backward()
        plain.step()
        gone += rate
        error = rounding_bounds.sum_error(8 * 6) * gone  # 8 rows of 6 numbers
        torch.testing.assert_close(mine.weight.detach().clone(), theirs.weight.detach(), rtol=error, atol=error)
    engine.destroy()


def test_a_checkpoint_has_the_schedule(tmp_path: Path) -> None:
    table = TABLES["decay, linear"]
    first = start(tmp_path / "first", table.block)
    for _ in range(3):
        first.step()
    first.engine.save_checkpoint(tmp_path / "saved")
    first.engine.destroy(remove=True)
    second = start(tmp_path / "second", table.block)
    second.step()
    second.engine.load_checkpoint(tmp_path / "saved", load_lr_scheduler_states=False)
    assert second.engine.get_lr() == pytest.approx([table.rates[1]])
    second.engine.load_checkpoint(tmp_path / "saved")
    for rate in table.rates[3:]:
        assert second.engine.get_lr() == pytest.approx([rate])
        second.step()
    second.engine.destroy(remove=True)


def test_the_current_block_counts_after_a_resume(tmp_path: Path) -> None:
    """From the very next step on, with a line; the optimizer's own learning rate stays the run's."""

    def block(total: int) -> dict[str, Any]:
        params = {"total_num_steps": total, "warmup_num_steps": 2, "cos_min_ratio": 0.0}
        return {"type": "WarmupCosineLR", "params": params}

    script = start(tmp_path, block(6))
    for _ in range(4):
        script.step()
    assert script.engine.get_lr() == pytest.approx([LR / 2])
    script.end()
    script = start(tmp_path, block(10), lr=0.5)
    (notice,) = [line for line in script.engine.notices if "other settings" in line]
    assert "the schedule's total_num_steps 6 is now 10" in notice and "(a schedule continues from the former)" in notice
    assert "cos_min_ratio" not in notice
    assert script.engine.get_lr() == pytest.approx([LR * 0.853553])
    script.step()
    script.end()
    script = start(tmp_path, TABLES["linear"].block)
    (notice,) = [line for line in script.engine.notices if "other settings" in line]
    assert "schedule WarmupCosineLR is now WarmupLR" in notice and "total_num_steps" not in notice
    assert script.engine.get_lr() == [0.002], "another kind begins at its start"
    script.engine.destroy(remove=True)


def test_a_new_group_has_the_values_of_the_cycle_at_once() -> None:
    adam = optimizer()
    cycle = offload.schedules.OneCycle(adam, **CYCLE)
    cycle.step()
    adam.param_groups[0]["lr"] = 0.5  # the user's own: only the new group is set
    adam.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 1e-3})
    cycle.take_in()
    first, new = adam.param_groups
    assert (first["lr"], new["betas"], new["lr"]) == (0.5, first["betas"], cycle.get_lr()[0])


def test_a_state_of_another_number_of_groups_changes_nothing() -> None:
    single, two = (offload.schedules.WarmupLR(optimizer(*[1.0] * groups), warmup_num_steps=8) for groups in (1, 2))
    for _ in range(3):
        two.step()
    before = single.state_dict(), single.get_last_lr()
    with pytest.raises(offload.UsageError, match="has 2 learning rates, and the optimizer 1 group"):
        single.load_state_dict(two.state_dict())
    assert (single.state_dict(), single.get_last_lr()) == before


def test_a_state_that_no_schedule_has_changes_nothing() -> None:
    state: Any
    for state in (
        [],
        {"base_lrs": [1.0]},
        {"last_batch_iteration": "3"},
        {"last_batch_iteration": 10**30},
        {"last_batch_iteration": 3, "base_lrs": 1.0},
        {"last_batch_iteration": 3, "base_lrs": ["1"]},
    ):
        print(state)
        schedule = offload.schedules.WarmupLR(optimizer(), warmup_num_steps=8)
        before = schedule.state_dict(), schedule.get_last_lr()
        with pytest.raises(offload.UsageError, match="expected a whole number and a list of numbers"):
            schedule.load_state_dict(state)
        assert (schedule.state_dict(), schedule.get_last_lr()) == before


# --------------------------------------------------------------------------------------------------
# Schedules that are passed or configured wrongly: what wins is named, and what cannot be meant is an error.


# -- what is passed -----------------------------------------------------------------------------------


def begin(**given: Any) -> offload.Engine:
    config = {"optimizer": {"params": {"lr": LR}}, "offload": {"device": "cpu"}, **given.pop("config", {})}
    return offload.initialize(**{"model": nn.Linear(2, 2), "config": config, **given})[0]


def test_what_is_passed_wins_with_a_line() -> None:
    block = {"scheduler": TABLES["log"].block}
    for given in (
        lambda theirs: offload.schedules.WarmupDecayLR(theirs, 4, warmup_max_lr=None),
        torch.optim.lr_scheduler.ConstantLR,
    ):
        engine = begin(config=block, lr_scheduler=given)
        assert isinstance(engine.lr_scheduler, offload.schedules.WarmupDecayLR | torch.optim.lr_scheduler.ConstantLR)
        assert "the schedule WarmupLR of the config is not used, because lr_scheduler= was passed" in engine.notices
        engine.destroy()


def test_schedules_over_the_users_own_optimizer() -> None:
    """Made before `initialize`, as scripts for DeepSpeed make them."""
    model = nn.Linear(2, 2)
    theirs = torch.optim.AdamW(model.parameters(), lr=LR)
    schedule = offload.schedules.WarmupLR(theirs, 0.002, None, 4)
    engine, _, _, returned = offload.initialize(
        model=model, optimizer=theirs, lr_scheduler=schedule, config={"offload": {"device": "cpu"}}
    )
    assert returned is schedule is engine.lr_scheduler
    learning_rates = []
    for _ in range(6):
        learning_rates += engine.get_lr()
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    assert learning_rates == pytest.approx(TABLES["log"].rates[:6], rel=1e-6)
    engine.destroy()


@pytest.mark.parametrize("make", [offload.schedules.WarmupLR, torch.optim.lr_scheduler.ConstantLR])
def test_a_schedule_of_another_optimizer_is_an_error(make: Callable[[Any], Any]) -> None:
    """Otherwise the learning rate would stay as it is, and nobody would know."""
    with pytest.raises(ConfigError, match=rf"the {make.__name__} that.*another optimizer.*optimizer="):
        begin(lr_scheduler=make(optimizer()))
    with pytest.raises(ConfigError, match="expects an optimizer, got int"):
        offload.schedules.WarmupLR(3)


def test_an_optimizers_rate_without_effect_is_reported() -> None:
    for block, message in (
        (
            {"type": "WarmupDecayLR", "params": {"total_num_steps": 2000}},
            "whose warmup_max_lr is 0.001; the optimizer's 0.01",
        ),
        ({"type": "OneCycle", "params": {**CYCLE}}, "whose cycle_max_lr is 0.005; the optimizer's 0.01"),
    ):
        engine = begin(config={"scheduler": block})
        (notice,) = [line for line in engine.notices if line.startswith("the learning rate follows")]
        assert message in notice
        engine.destroy()
    engine = begin(config={"scheduler": TABLES["log"].block})
    assert not any("the learning rate follows" in line for line in engine.notices)
    engine.destroy()


@pytest.mark.parametrize("kind", ["WarmupDecayLR", "WarmupCosineLR"])
def test_a_warm_up_longer_than_the_training_is_reported(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    for total, reported in ((9, True), (10, False)):
        block = {"type": kind, "params": {"total_num_steps": total, "warmup_num_steps": 10}}
        with caplog.at_level(logging.WARNING, logger="offload"):
            build_optimizer.choose_scheduler(load_config({"scheduler": block}).scheduler, None, optimizer())
        message = "total_num_steps 9 is less than warmup_num_steps 10: the learning rate still rises when training ends"
        assert (message in caplog.text) is reported
        caplog.clear()


# -- what cannot be meant -----------------------------------------------------------------------------


def test_auto_is_the_default() -> None:
    for name, params in SCHEDULES.items():
        needed = {key: 1 for key, field in params.model_fields.items() if field.is_required()}
        auto = {key: "auto" for key in params.model_fields if key not in needed and key != "warmup_max_lr"}
        made = [schedules.MADE_BY[name](optimizer(), **needed, **more) for more in (auto, {})]
        assert made[0].parameters == made[1].parameters
    decay = {"type": "WarmupDecayLR", "params": {"total_num_steps": 3, "warmup_max_lr": "auto", "warmup_num_steps": 2}}
    made = build_optimizer.choose_scheduler(load_config({"scheduler": decay}).scheduler, None, optimizer())
    assert rates(made.schedule, 4) == [0.0, 0.0, LR, LR] and made.notices == ()
    assert load_config({"scheduler": "auto"}).scheduler is None


WARMUP_BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no steps": ({"warmup_num_steps": 0}, "warmup_num_steps should be greater than 0, got 0"),
    "a fraction": ({"warmup_num_steps": 2.5}, r"warmup_num_steps.*got 2\.5"),
    "a share": ({"warmup_num_steps": True}, "warmup_num_steps should be a number, got True"),
    "words": ({"warmup_min_lr": "low"}, "warmup_min_lr should be a number of at least 0, or a list.*got 'low'"),
    "below zero": ({"warmup_max_lr": -1}, "warmup_max_lr should be a number of at least 0.*got -1"),
    "a list with words": ({"warmup_max_lr": [1, "x"]}, "warmup_max_lr should be"),
    "an empty list": ({"warmup_max_lr": []}, "warmup_max_lr should be"),
    "exchanged": ({"warmup_min_lr": 0.1, "warmup_max_lr": 0.01}, r"warmup_min_lr 0.1 is above.*warmup_max_lr 0.01"),
    "exchanged in a list": ({"warmup_min_lr": 0.1, "warmup_max_lr": [1, 0.01]}, "warmup_min_lr 0.1 is above"),
    "exchanged in lists": ({"warmup_min_lr": [0.1, 0.1], "warmup_max_lr": [1, 0.01]}, "warmup_min_lr 0.1 is above"),
    "a shape": ({"warmup_type": "cosine"}, "warmup_type should be 'log' or 'linear', got 'cosine'"),
    "a typo": ({"warmup_steps": 3}, r'unknown key scheduler\.params\.warmup_steps; did you mean "warmup_num_steps"'),
}

BAD: dict[str, tuple[dict[str, Any], str]] = {
    **{name: ({"type": "WarmupLR", "params": params}, message) for name, (params, message) in WARMUP_BAD.items()},
    "no type": ({"params": {}}, "scheduler.type is required"),
    "a typo in the type": ({"type": "WarmupRL"}, 'scheduler.type should be WarmupLR, .*did you mean "WarmupLR"'),
    "a typo in one of torch": ({"type": "StepRL"}, 'did you mean "StepLR"'),
    "no such type": ({"type": "Noam"}, r"got 'Noam'; Any other schedule.*lr_scheduler=$"),
    "one that needs a function": ({"type": "LambdaLR"}, "got 'LambdaLR'.*lr_scheduler="),
    "a type that is a number": ({"type": 3}, "scheduler.type should be text, got 3"),
    "params that are a list": ({"type": "WarmupLR", "params": [1]}, r"scheduler.params should be a block.*got \[1\]"),
    "no end": ({"type": "WarmupDecayLR"}, "scheduler.params.total_num_steps is required; give the steps"),
    "an end that is auto": (
        {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}},
        "scheduler.params.total_num_steps is required; give the steps of the complete training",
    ),
    "an end at 0": (
        {"type": "WarmupCosineLR", "params": {"total_num_steps": 0}},
        "total_num_steps should be greater than 0, got 0; give the steps",
    ),
    "a ratio above 1": (
        {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "cos_min_ratio": 2}},
        "cos_min_ratio should be less than or equal to 1",
    ),
    "no bounds": ({"type": "OneCycle"}, "scheduler.params.cycle_min_lr is required"),
    "a cycle upside down": (
        {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.01}},
        "cycle_min_lr 0.1 is above scheduler.params.cycle_max_lr 0.01; exchange them",
    ),
    "a momentum upside down": ({"type": "OneCycle", "params": {**CYCLE, "cycle_min_mom": 0.95}}, "cycle_max_mom 0.9"),
    "a momentum of 1": ({"type": "OneCycle", "params": {**CYCLE, "cycle_max_mom": 1}}, "cycle_max_mom should be below"),
    "no steps up": (
        {"type": "OneCycle", "params": {**CYCLE, "cycle_first_step_size": 0}},
        "cycle_first_step_size should be greater than 0, got 0",
    ),
    "stairs that are words": ({"type": "LRRangeTest", "params": {"lr_range_test_staircase": "up"}}, "staircase"),
}


def test_a_bad_block_is_named() -> None:
    for case in BAD:
        print(case)
        block, message = BAD[case]
        with pytest.raises(ConfigError, match=message):
            load_config({"scheduler": block})


def test_any_value_is_a_schedule_or_a_config_error() -> None:
    for name in SCHEDULES:
        print(name)
        needed = {key: 1 for key, field in SCHEDULES[name].model_fields.items() if field.is_required()}
        for key in SCHEDULES[name].model_fields:
            for value in ODD:
                block = {"type": name, "params": {**needed, key: value}}
                try:
                    chosen = build_optimizer.choose_scheduler(
                        load_config({"scheduler": block}).scheduler, None, optimizer()
                    )
                except ConfigError as error:
                    assert key in str(error), f"{value!r}: the key is not named: {error}"
                else:
                    assert all(rate >= 0 for rate in rates(chosen.schedule, 4))


def test_a_schedule_of_torch_that_cannot_be_made() -> None:
    for name in TORCH_SCHEDULES:
        print(name)
        assert issubclass(getattr(torch.optim.lr_scheduler, name), torch.optim.lr_scheduler.LRScheduler)
        with pytest.raises(ConfigError, match=rf"scheduler.params .*'nonsense': 1.* do not make a torch {name}"):
            begin(config={"scheduler": {"type": name, "params": {"nonsense": 1}}})


def test_what_shows_when_the_groups_are_known() -> None:
    for params, message in (
        ({"warmup_min_lr": 0.1}, r"warmup_min_lr 0.1 is above warmup_max_lr \(the learning rate of its group\) 0.01"),
        (
            {"warmup_min_lr": [0.1, 0.2, 0.3], "warmup_max_lr": 1},
            "warmup_min_lr has 3 values, the optimizer has 1 group of",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            begin(config={"scheduler": {"type": "WarmupLR", "params": params}})
    with pytest.raises(ConfigError, match="lr_range_test_min_lr has 1 value, the optimizer has 2 groups"):
        offload.schedules.LRRangeTest(optimizer(1, 2), [0.1])
    with pytest.raises(ConfigError, match=r"^warmup_num_steps should be greater than 0, got 0$"):
        offload.schedules.WarmupLR(optimizer(), warmup_num_steps=0)


def test_a_momentum_that_has_grown_to_one_is_an_error_and_nothing_moved() -> None:
    schedule = offload.schedules.OneCycle(optimizer(), 0.1, 0.2, 0, 1, 1, decay_step_size=1, decay_mom_rate=0.1)
    schedule.step(2)
    before = (schedule.state_dict(), schedule.get_last_lr(), schedule.get_mom())
    with pytest.raises(ConfigError, match=r"decay_mom_rate 0.1 has raised the momentum to 1.08 after 4 steps"):
        schedule.step()
    assert (schedule.state_dict(), schedule.get_last_lr(), schedule.get_mom()) == before
