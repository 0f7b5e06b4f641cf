"""The block of the learning rate schedule, and the params of each schedule."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from offload.config.blocks.block import Block, split_names
from offload.config.blocks.values import Count, Elements, Momentum, Number, Rates, RatesOrAuto, Ratio, WarmupType


class ScheduleParams(Block):
    """The params of a schedule; `SCHEDULES` lists its type."""

    ORDERED: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of fields; the first must not exceed the second."""


class RangeTestParams(ScheduleParams):
    """LRRangeTest: rises without end, to find the largest learning rate that trains."""

    lr_range_test_min_lr: Rates = Field(1e-3, description="learning rate at the start")
    lr_range_test_step_size: Count = Field(2000, description="steps in which it rises by min_lr * step_rate")
    lr_range_test_step_rate: Number = Field(1.0, description="how fast it rises")
    lr_range_test_staircase: bool = Field(False, description="rise only at the end of each step_size")


class OneCycleParams(ScheduleParams):
    """OneCycle: up and down once, the momentum the other way round; then a decay."""

    ORDERED = (("cycle_min_lr", "cycle_max_lr"), ("cycle_min_mom", "cycle_max_mom"))

    cycle_min_lr: Rates = Field(description="learning rate at both ends of the cycle; required")
    cycle_max_lr: Rates = Field(description="learning rate in the middle; required")
    decay_lr_rate: Number = Field(
        0.0, description="after the cycle: cycle_min_lr / (1 + decay_lr_rate * steps / decay_step_size)"
    )
    cycle_first_step_size: Count = Field(2000, description="steps up")
    cycle_second_step_size: Elements | None = Field(None, description="steps down; default: as many as up")
    cycle_first_stair_count: Elements = Field(0, description="stairs on the way up; 0: each step rises")
    cycle_second_stair_count: Elements | None = Field(None, description="stairs down; default: as many as up")
    decay_step_size: Elements = Field(0, description="steps of the decay's unit; 0: no decay")
    cycle_momentum: bool = Field(True, description="whether the momentum, betas[0], moves too")
    cycle_min_mom: Momentum = Field(0.8, description="momentum in the middle")
    cycle_max_mom: Momentum = Field(0.9, description="momentum at both ends of the cycle")
    decay_mom_rate: Number = Field(
        0.0, description="after the cycle: cycle_max_mom * (1 + decay_mom_rate * steps / decay_step_size)"
    )


_MAX_LR = 'learning rate at the end of the warm-up; "auto": each group\'s own learning rate'
_WARM_UP = "steps of the warm-up, 1 counts as 2"
_WARMUP_TYPE = "log: fast at first; linear: evenly"
_TOTAL = "steps of the complete training; required, except in `offload train` and with a Trainer, which set it"


class WarmupParams(ScheduleParams):
    """WarmupLR: rises, and stays."""

    ORDERED = (("warmup_min_lr", "warmup_max_lr"),)
    OWN_AUTO = ("warmup_max_lr",)

    warmup_min_lr: Rates = Field(0.0, description="learning rate at the start")
    warmup_max_lr: RatesOrAuto = Field("auto", description=_MAX_LR)
    warmup_num_steps: Count = Field(1000, description=_WARM_UP)
    warmup_type: WarmupType = Field("log", description=_WARMUP_TYPE)


class WarmupDecayParams(WarmupParams):
    """WarmupDecayLR: rises, and falls to 0 in a line."""

    total_num_steps: Count = Field(description=_TOTAL)
    warmup_max_lr: RatesOrAuto = Field(1e-3, description=_MAX_LR)


class WarmupCosineParams(ScheduleParams):
    """WarmupCosineLR: rises to each group's own learning rate, and falls along a cosine."""

    total_num_steps: Count = Field(description=_TOTAL)
    warmup_min_ratio: Ratio = Field(0.0, description="fraction of the learning rate at which the warm-up begins")
    warmup_num_steps: Count = Field(1000, description=_WARM_UP)
    cos_min_ratio: Ratio = Field(1e-4, description="fraction of the learning rate at which the cosine ends")
    warmup_type: WarmupType = Field("log", description=_WARMUP_TYPE)


SCHEDULES: dict[str, type[ScheduleParams]] = {
    "WarmupLR": WarmupParams,
    "WarmupDecayLR": WarmupDecayParams,
    "WarmupCosineLR": WarmupCosineParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": RangeTestParams,
}
# Other schedules of torch need functions or schedulers as arguments, which a file cannot contain.
TORCH_SCHEDULES = split_names(
    """StepLR MultiStepLR ConstantLR LinearLR ExponentialLR PolynomialLR CosineAnnealingLR CosineAnnealingWarmRestarts
    CyclicLR OneCycleLR"""
)
"""Schedules of torch.optim.lr_scheduler whose arguments are an optimizer and numbers."""


def _schedule(name: str) -> str:
    """Returns the type of a schedule, given in any case of letters. Raises `ValueError` if the type is unknown."""
    known = {word.lower(): word for word in (*SCHEDULES, *TORCH_SCHEDULES)}
    if name.lower() in known:
        return known[name.lower()]
    near = difflib.get_close_matches(name.lower(), known, 1, 0.6)
    hint = f'did you mean "{known[near[0]]}"? ' if near else ""
    raise ValueError(
        f"should be {', '.join(SCHEDULES)}, or one of torch.optim.lr_scheduler that a file can describe, got {name!r}; "
        f"{hint}Any other schedule can be passed to offload.initialize as lr_scheduler="
    )


class SchedulerBlock(Block):
    """The schedule of learning rates, which `engine.step()` advances; without this block they stay as they are."""

    SUGGESTION: ClassVar[Mapping[str, Any]] = {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}

    type: Annotated[str, AfterValidator(_schedule)] = Field(
        description="`WarmupLR`, `WarmupDecayLR`, `WarmupCosineLR`, `OneCycle`, `LRRangeTest`, or of "
        f"torch.optim.lr_scheduler {', '.join(f'`{name}`' for name in TORCH_SCHEDULES)}"
    )
    params: dict[Any, Any] = Field({}, description="see below; torch's schedules take torch's arguments")
