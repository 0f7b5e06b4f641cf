"""`deepspeed.runtime.lr_schedules`: the schedules, and their options on a command line."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from offload.schedules import LRRangeTest as LRRangeTest
from offload.schedules import OneCycle as OneCycle
from offload.schedules import WarmupCosineLR as WarmupCosineLR
from offload.schedules import WarmupDecayLR as WarmupDecayLR
from offload.schedules import WarmupLR as WarmupLR

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST, ONE_CYCLE = "LRRangeTest", "OneCycle"
WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

# Defaults of the command line. They differ from the classes' defaults; a script that prints its arguments shows them.
_RANGE = {
    "lr_range_test_min_lr": 0.001,
    "lr_range_test_step_rate": 1.0,
    "lr_range_test_step_size": 1000,
    "lr_range_test_staircase": False,
}
_CYCLE = {
    "cycle_first_step_size": 1000,
    "cycle_first_stair_count": -1,
    "cycle_second_step_size": -1,
    "cycle_second_stair_count": -1,
    "decay_step_size": 1000,
    "cycle_min_lr": 0.01,
    "cycle_max_lr": 0.1,
    "decay_lr_rate": 0.0,
    "cycle_min_mom": 0.8,
    "cycle_max_mom": 0.9,
    "decay_mom_rate": 0.0,
}
_WARMUP = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000, "warmup_type": "log"}
_COSINE = {"warmup_num_steps": 1000, "warmup_type": "log", "warmup_min_ratio": 0.01, "cos_min_ratio": 0.01}
_FLAGS = {"cycle_momentum": False}
_OPTIONS: dict[str, dict[str, Any]] = {
    LR_RANGE_TEST: _RANGE,
    ONE_CYCLE: _CYCLE,
    WARMUP_LR: _WARMUP,
    WARMUP_DECAY_LR: _WARMUP,
    WARMUP_COSINE_LR: _COSINE,
}
"""Options of each schedule, with DeepSpeed's defaults."""


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds `--lr_schedule` and the options of all schedules to a parser, and returns the parser."""
    group = parser.add_argument_group("Learning rates")
    group.add_argument("--lr_schedule", default=None, help="the schedule: one of " + ", ".join(VALID_LR_SCHEDULES))
    for name, default in {**_RANGE, **_CYCLE, **_FLAGS, **_WARMUP, **_COSINE}.items():
        words = f"option of {', '.join(kind for kind, options in _OPTIONS.items() if name in options) or ONE_CYCLE}"
        # argparse would read the word "False" as True.
        if isinstance(default, bool):
            group.add_argument(f"--{name}", action="store_true", help=words)
        else:
            group.add_argument(f"--{name}", type=type(default), default=default, help=words)
    return parser


def get_config_from_args(args: Any) -> tuple[dict[str, Any] | None, str | None]:
    """Returns (block "scheduler" of a config, None) from parsed arguments, or (None, reason) on failure."""
    kind = getattr(args, LR_SCHEDULE, None)
    if kind is None:
        return None, f"--{LR_SCHEDULE} is not given"
    if kind not in _OPTIONS:
        return None, f"{kind} is no schedule: expected one of {', '.join(VALID_LR_SCHEDULES)}"
    values = {name: getattr(args, name, None) for name in _OPTIONS[kind]}
    # In DeepSpeed, -1 stands for a value that is left out.
    return {"type": kind, "params": {name: value for name, value in values.items() if value not in (None, -1)}}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """Returns (initial learning rate, "") for a block "scheduler", or (None, reason) on failure."""
    for key in ("type", "params"):
        if key not in config:
            return None, f'the schedule has no "{key}"'
    kind, params = config["type"], config["params"]
    if kind not in _OPTIONS:
        return None, f"{kind} is no schedule: expected one of {', '.join(VALID_LR_SCHEDULES)}"
    if kind == WARMUP_COSINE_LR:
        return None, f"{kind} multiplies the optimizer's learning rate"
    return params[{LR_RANGE_TEST: "lr_range_test_min_lr", ONE_CYCLE: "cycle_max_lr"}.get(kind, "warmup_max_lr")], ""
