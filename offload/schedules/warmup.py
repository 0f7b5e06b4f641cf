"""Schedules that rise to a learning rate and then stay, fall linearly, or fall by a cosine."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from offload.config import schedule_params
from offload.config.blocks import WarmupCosineParams, WarmupDecayParams, WarmupParams
from offload.schedules.base import Schedule

logger = logging.getLogger("offload")


def _rise(steps: int, params: WarmupParams | WarmupCosineParams) -> float:
    """Returns the completed fraction of the warm-up, from 0 to 1.

    Args:
        steps: steps taken, at most `_length(params)`.
        params: params with the length and the type of the warm-up.
    """
    # log(0) is not defined, and the linear formula would be negative.
    if not steps:
        return 0.0
    length = _length(params)
    # One step behind, as DeepSpeed counts: the first two steps both use the start value.
    return math.log(steps) / math.log(length) if params.warmup_type == "log" else (steps - 1) / length


def _length(params: WarmupParams | WarmupCosineParams) -> int:
    """Returns the steps of the warm-up, at least 2: log(1) = 0 must not be a divisor."""
    return max(2, params.warmup_num_steps)


def _warn_of_short_training(params: WarmupDecayParams | WarmupCosineParams) -> None:
    """Warns if training ends before the warm-up does."""
    if params.total_num_steps < params.warmup_num_steps:
        logger.warning(
            "total_num_steps %d is less than warmup_num_steps %d: the learning rate still rises when training ends",
            params.total_num_steps,
            params.warmup_num_steps,
        )


class WarmupLR(Schedule):
    """A rise to a learning rate over a number of steps, after which the rate stays.

    `warmup_min_lr` and `warmup_max_lr` are a number, or a list of one for each group. A `warmup_max_lr` of None or
    "auto" is each group's own learning rate.
    """

    PEAK = "warmup_max_lr"
    _params: WarmupParams

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | str | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        """Sets the learning rates of the next step.

        Args:
            optimizer: an optimizer with `param_groups`, or a wrapper that holds one as `optimizer`.
            warmup_min_lr: learning rate at the start.
            warmup_max_lr: learning rate at the end of the warm-up; None or "auto" for each group's own.
            warmup_num_steps: steps of the warm-up; 1 counts as 2.
            warmup_type: "log" rises fast at first, "linear" evenly.
            last_batch_iteration: number of the last step taken, from 0; -1 before the first.

        Raises:
            ConfigError: if a value is invalid or does not fit the groups of `optimizer`.
        """
        given = {
            "warmup_min_lr": warmup_min_lr,
            "warmup_max_lr": "auto" if warmup_max_lr is None else warmup_max_lr,
            "warmup_num_steps": warmup_num_steps,
            "warmup_type": warmup_type,
        }
        super().__init__(optimizer, schedule_params(WarmupParams, given), last_batch_iteration)

    def _begin(self) -> None:
        self._check_pairs()

    def _lrs(self, steps: int) -> list[float]:
        fraction = self._fraction(steps)
        pairs = zip(self._per_group("warmup_min_lr"), self._per_group("warmup_max_lr"), strict=True)
        return [low + (high - low) * fraction for low, high in pairs]

    def _fraction(self, steps: int) -> float:
        """Returns the position between the lowest and the highest rate after `steps` steps, from 0 to 1."""
        return _rise(steps, self._params) if steps <= _length(self._params) else 1.0


class WarmupDecayLR(WarmupLR):
    """A rise to a learning rate and a linear fall until `total_num_steps`, to `warmup_min_lr`."""

    _params: WarmupDecayParams

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | str | None = 1e-3,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        """Sets the learning rates of the next step.

        Args:
            optimizer: an optimizer with `param_groups`, or a wrapper that holds one as `optimizer`.
            total_num_steps: steps of the whole training.
            warmup_min_lr: learning rate at the start and at the end.
            warmup_max_lr: learning rate at the end of the warm-up; None or "auto" for each group's own.
            warmup_num_steps: steps of the warm-up; 1 counts as 2.
            warmup_type: "log" rises fast at first, "linear" evenly.
            last_batch_iteration: number of the last step taken, from 0; -1 before the first.

        Raises:
            ConfigError: if a value is invalid or does not fit the groups of `optimizer`.
        """
        given = {
            "total_num_steps": total_num_steps,
            "warmup_min_lr": warmup_min_lr,
            "warmup_max_lr": "auto" if warmup_max_lr is None else warmup_max_lr,
            "warmup_num_steps": warmup_num_steps,
            "warmup_type": warmup_type,
        }
        # Not `super()`: WarmupLR would validate the values as `WarmupParams`, which have no `total_num_steps`.
        Schedule.__init__(self, optimizer, schedule_params(WarmupDecayParams, given), last_batch_iteration)

    def _begin(self) -> None:
        self._check_pairs()
        _warn_of_short_training(self._params)

    def _fraction(self, steps: int) -> float:
        length, total = _length(self._params), self._params.total_num_steps
        if steps <= length:
            return _rise(steps, self._params)
        # The fall counts one behind as well: after N + 1 steps the rate is still the highest.
        return max(0.0, (total - steps + 1) / max(1, total - length))


class WarmupCosineLR(Schedule):
    """A rise to each group's own learning rate and a fall along a cosine to `cos_min_ratio` of it."""

    _params: WarmupCosineParams

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 1e-4,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        """Sets the learning rates of the next step.

        Args:
            optimizer: an optimizer with `param_groups`, or a wrapper that holds one as `optimizer`.
            total_num_steps: steps of the whole training.
            warmup_min_ratio: fraction of the learning rate at the start.
            warmup_num_steps: steps of the warm-up; 1 counts as 2.
            cos_min_ratio: fraction of the learning rate at the end.
            warmup_type: "log" rises fast at first, "linear" evenly.
            last_batch_iteration: number of the last step taken, from 0; -1 before the first.

        Raises:
            ConfigError: if a value is invalid or does not fit the groups of `optimizer`.
        """
        given = {
            "total_num_steps": total_num_steps,
            "warmup_min_ratio": warmup_min_ratio,
            "warmup_num_steps": warmup_num_steps,
            "cos_min_ratio": cos_min_ratio,
            "warmup_type": warmup_type,
        }
        super().__init__(optimizer, schedule_params(WarmupCosineParams, given), last_batch_iteration)

    def _begin(self) -> None:
        _warn_of_short_training(self._params)

    def _lrs(self, steps: int) -> list[float]:
        ratio = self._ratio(steps)
        return [base * ratio for base in self.base_lrs]

    def _ratio(self, steps: int) -> float:
        """Returns the fraction of the own learning rate after `steps` steps."""
        params, length = self._params, _length(self._params)
        if steps <= length:
            start = params.warmup_min_ratio
            return start + (1 - start) * _rise(steps, params)
        # After the last step the rate stays at the end of the cosine.
        done = min(1.0, (steps - length) / max(1, params.total_num_steps - length))
        return params.cos_min_ratio + (1 - params.cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2
