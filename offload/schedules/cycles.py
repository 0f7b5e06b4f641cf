"""Schedules that go up and down again, and the range test."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from offload.config import schedule_params
from offload.config.blocks.scheduler import (
    OneCycleParams,
    RangeTestParams,
)
from offload.errors import ConfigError
from offload.schedules.base import Schedule
from offload.sizes import count_of

logger = logging.getLogger("offload")


class OneCycle(Schedule):
    """Goes from one learning rate up to another and back, the momentum (betas[0]) the other way round; then decays.

    `cycle_min_lr`, `cycle_max_lr`, `cycle_min_mom` and `cycle_max_mom` are a number, or a list of one for each group.
    """

    PEAK = "cycle_max_lr"
    _params: OneCycleParams

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        given = {
            "cycle_min_lr": cycle_min_lr,
            "cycle_max_lr": cycle_max_lr,
            "decay_lr_rate": decay_lr_rate,
            "cycle_first_step_size": cycle_first_step_size,
            "cycle_second_step_size": cycle_second_step_size,
            "cycle_first_stair_count": cycle_first_stair_count,
            "cycle_second_stair_count": cycle_second_stair_count,
            "decay_step_size": decay_step_size,
            "cycle_momentum": cycle_momentum,
            "cycle_min_mom": cycle_min_mom,
            "cycle_max_mom": cycle_max_mom,
            "decay_mom_rate": decay_mom_rate,
        }
        super().__init__(optimizer, schedule_params(OneCycleParams, given), last_batch_iteration)

    def _begin(self) -> None:
        self._check_pairs()
        self._moves_momentum = self._params.cycle_momentum
        if self._moves_momentum and not all("betas" in group for group in self.optimizer.param_groups):
            logger.warning("OneCycle leaves the momentum as it is: %s has no betas", type(self.optimizer).__name__)
            self._moves_momentum = False

    def get_mom(self) -> list[float] | None:
        """The momentum of each group for the next step; None where it does not move."""
        return self._momenta(self.last_batch_iteration + 1) if self._moves_momentum else None

    def apply(self) -> None:
        momenta = self.get_mom()
        super().apply()
        for group, momentum in zip(self.optimizer.param_groups, momenta or (), strict=False):
            group["betas"] = (momentum, *group["betas"][1:])

    def _lrs(self, steps: int) -> list[float]:
        height, decay = self._height(steps), 1 + self._params.decay_lr_rate * self._intervals(steps)
        pairs = zip(self._of_each("cycle_min_lr"), self._of_each("cycle_max_lr"), strict=True)
        return [(low + (high - low) * height) / decay for low, high in pairs]

    def _momenta(self, steps: int) -> list[float]:
        height, growth = self._height(steps), 1 + self._params.decay_mom_rate * self._intervals(steps)
        pairs = zip(self._of_each("cycle_min_mom"), self._of_each("cycle_max_mom"), strict=True)
        momenta = [(high - (high - low) * height) * growth for low, high in pairs]
        if max(momenta) >= 1:
            raise ConfigError(
                f"decay_mom_rate {self._params.decay_mom_rate:g} has raised the momentum to {max(momenta):g} after "
                f"{count_of(steps, 'step')}, and it must stay below 1; lower it, or set it to 0"
            )
        return momenta

    @property
    def _sizes(self) -> tuple[int, int]:
        """Steps up, and down."""
        first, second = self._params.cycle_first_step_size, self._params.cycle_second_step_size
        return first, first if second is None else second

    def _height(self, steps: int) -> float:
        """How far up the cycle is: 1 in its middle, 0 at its ends and after it."""
        (up, down), params = self._sizes, self._params
        stairs = params.cycle_first_stair_count
        done, size = (steps, up) if steps <= up else (max(0, up + down - steps), down)
        if steps > up and params.cycle_second_stair_count is not None:
            stairs = params.cycle_second_stair_count
        return done * stairs // size / stairs if stairs else done / size

    def _intervals(self, steps: int) -> float:
        """Of the decay, since the end of the cycle."""
        size = self._params.decay_step_size
        return max(0, steps - sum(self._sizes)) / size if size else 0.0


class LRRangeTest(Schedule):
    """Rises without an end, in a line or in stairs, to find the largest learning rate that trains.

    `lr_range_test_min_lr` is a number, or a list of one for each group.
    """

    _params: RangeTestParams

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        given = {
            "lr_range_test_min_lr": lr_range_test_min_lr,
            "lr_range_test_step_size": lr_range_test_step_size,
            "lr_range_test_step_rate": lr_range_test_step_rate,
            "lr_range_test_staircase": lr_range_test_staircase,
        }
        super().__init__(optimizer, schedule_params(RangeTestParams, given), last_batch_iteration)

    def _lrs(self, steps: int) -> list[float]:
        params = self._params
        size = params.lr_range_test_step_size
        intervals = steps // size if params.lr_range_test_staircase else steps / size
        return [low * (1 + params.lr_range_test_step_rate * intervals) for low in self._of_each("lr_range_test_min_lr")]
