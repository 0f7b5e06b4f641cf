"""A schedule that rises and falls again, and the learning-rate range test."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from offload.config import schedule_params
from offload.config.blocks import OneCycleParams, RangeTestParams
from offload.errors import ConfigError
from offload.schedules.base import Schedule
from offload.sizes import count_of

logger = logging.getLogger("offload")


class OneCycle(Schedule):
    """A cycle from one learning rate up to another and back, with the momentum (betas[0]) reversed; then a decay.

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
        """Sets the learning rates and momenta of the next step.

        Args:
            optimizer: an optimizer with `param_groups`, or a wrapper that holds one as `optimizer`.
            cycle_min_lr: learning rate at both ends of the cycle.
            cycle_max_lr: learning rate in the middle.
            decay_lr_rate: after the cycle the rate is cycle_min_lr / (1 + decay_lr_rate * steps / decay_step_size).
            cycle_first_step_size: steps of the rise.
            cycle_second_step_size: steps of the fall; as many as of the rise by default.
            cycle_first_stair_count: stairs of the rise; 0 to rise in each step.
            cycle_second_stair_count: stairs of the fall; as many as of the rise by default.
            decay_step_size: steps of one interval of the decay; 0 for no decay.
            cycle_momentum: True to change betas[0] too.
            cycle_min_mom: momentum in the middle.
            cycle_max_mom: momentum at both ends of the cycle.
            decay_mom_rate: after the cycle the momentum is cycle_max_mom * (1 + decay_mom_rate * steps /
                decay_step_size).
            last_batch_iteration: number of the last step taken, from 0; -1 before the first.

        Raises:
            ConfigError: if a value is invalid or does not fit the groups of `optimizer`.
        """
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
        # The momentum of the cycle is betas[0], which optimizers such as SGD do not have.
        if self._moves_momentum and not all("betas" in group for group in self.optimizer.param_groups):
            logger.warning("OneCycle leaves the momentum as it is: %s has no betas", type(self.optimizer).__name__)
            self._moves_momentum = False

    def get_mom(self) -> list[float] | None:
        """Returns the momentum of each group for the next step; None if the momentum is not changed.

        Raises:
            ConfigError: if the decay has raised a momentum to 1 or more.
        """
        return self._momenta(self.last_batch_iteration + 1) if self._moves_momentum else None

    def _values(self) -> list[dict[str, Any]]:
        """Returns the learning rate of each group, and its betas if the momentum is changed."""
        values, momenta = super()._values(), self.get_mom()
        if momenta is None:
            return values
        groups = self.optimizer.param_groups
        return [
            each | {"betas": (momentum, *group["betas"][1:])}
            for each, momentum, group in zip(values, momenta, groups, strict=True)
        ]

    def _lrs(self, steps: int) -> list[float]:
        height, decay = self._height(steps), 1 + self._params.decay_lr_rate * self._intervals(steps)
        pairs = zip(self._per_group("cycle_min_lr"), self._per_group("cycle_max_lr"), strict=True)
        return [(low + (high - low) * height) / decay for low, high in pairs]

    def _momenta(self, steps: int) -> list[float]:
        """Returns the momentum of each group after `steps` steps."""
        height, growth = self._height(steps), 1 + self._params.decay_mom_rate * self._intervals(steps)
        pairs = zip(self._per_group("cycle_min_mom"), self._per_group("cycle_max_mom"), strict=True)
        # The momentum is highest where the learning rate is lowest.
        momenta = [(high - (high - low) * height) * growth for low, high in pairs]
        if max(momenta) >= 1:
            raise ConfigError(
                f"decay_mom_rate {self._params.decay_mom_rate:g} has raised the momentum to {max(momenta):g} after "
                f"{count_of(steps, 'step')}, and it must stay below 1; lower it, or set it to 0"
            )
        return momenta

    @property
    def _sizes(self) -> tuple[int, int]:
        """Steps of the rise and of the fall."""
        first, second = self._params.cycle_first_step_size, self._params.cycle_second_step_size
        return first, first if second is None else second

    def _height(self, steps: int) -> float:
        """Returns the position in the cycle after `steps` steps: 1 in its middle, 0 at its ends and after it."""
        (up, down), params = self._sizes, self._params
        if steps >= up + down:
            return 0.0
        stairs = params.cycle_first_stair_count
        done, size = (steps, up) if steps <= up else (max(0, up + down - steps), down)
        if steps > up and params.cycle_second_stair_count is not None:
            stairs = params.cycle_second_stair_count
        # The integer division rounds down to the last stair that is complete.
        return done * stairs // size / stairs if stairs else done / size

    def _intervals(self, steps: int) -> float:
        """Returns the number of decay intervals since the end of the cycle, with its fraction; 0 without a decay."""
        size = self._params.decay_step_size
        return max(0, steps - sum(self._sizes)) / size if size else 0.0


class LRRangeTest(Schedule):
    """A rise without an end, linear or in stairs, to find the largest learning rate that trains.

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
        """Sets the learning rates of the next step.

        Args:
            optimizer: an optimizer with `param_groups`, or a wrapper that holds one as `optimizer`.
            lr_range_test_min_lr: learning rate at the start.
            lr_range_test_step_size: steps in which the rate rises by min_lr * step_rate.
            lr_range_test_step_rate: factor of the rise.
            lr_range_test_staircase: True to rise only at the end of each step_size.
            last_batch_iteration: number of the last step taken, from 0; -1 before the first.

        Raises:
            ConfigError: if a value is invalid or does not fit the groups of `optimizer`.
        """
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
        return [
            low * (1 + params.lr_range_test_step_rate * intervals) for low in self._per_group("lr_range_test_min_lr")
        ]
