"""Schedules that are passed or configured wrongly: what wins is named, and what cannot be meant is an error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import schedules
from offload.config import SCHEDULES, TORCH_SCHEDULES, load_config
from offload.engine import build_optimizer
from offload.errors import ConfigError
from tests.config.test_config_any_value import ODD
from tests.deepspeed.test_schedules import CYCLE, LR, TABLES, optimizer, rates

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
    found = []
    for _ in range(6):
        found += engine.get_lr()
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    assert found == pytest.approx(TABLES["log"].rates[:6], rel=1e-6)
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


@pytest.mark.parametrize("case", BAD)
def test_a_bad_block_is_named(case: str) -> None:
    block, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        load_config({"scheduler": block})


@pytest.mark.parametrize("name", SCHEDULES)
def test_any_value_is_a_schedule_or_a_config_error(name: str) -> None:
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


@pytest.mark.parametrize("name", TORCH_SCHEDULES)
def test_a_schedule_of_torch_that_cannot_be_made(name: str) -> None:
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


def test_a_warm_up_that_does_not_end_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "offload"):
        offload.schedules.WarmupDecayLR(optimizer(), 200)
    assert "total_num_steps 200 is less than warmup_num_steps 1000" in caplog.text
