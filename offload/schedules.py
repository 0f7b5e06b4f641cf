"""DeepSpeed's learning-rate schedules, step for step.

A schedule sets the rates of the first step when it is constructed, and those of the next step in each `step()`, which
the engine calls at the end of a step. With n steps taken, N steps of warm-up and T steps in all, the next step uses

    WarmupLR         min + (max - min) * rise            rise = log(n) / log(N), or (n - 1) / N; 0 at n = 0, at most 1
    WarmupDecayLR    the same up to n = N, then min + (max - min) * (T - n + 1) / (T - N), and no less than min
    WarmupCosineLR   lr * (min + (1 - min) * rise) up to n = N, then lr * (end + (1 - end) * fall)
                                                         fall = (1 + cos(pi * (n - N) / (T - N))) / 2, then 0
    OneCycle         min + (max - min) * height          height: 0 at n = 0, up to 1, and back to 0 at the end
                     then min / (1 + rate * more)        more: decay intervals since the end of the cycle
    LRRangeTest      min * (1 + rate * n / size)         n / size rounded down with a staircase

N is at least 2. The first three schedules count one step behind, so that their first two steps both use the start
value. DeepSpeed counts the same way, so a run has the same learning rates under both. If DeepSpeed's behaviour differs
from its documentation, these classes follow the documentation:

    the first step of WarmupCosineLR is at warmup_min_ratio             DeepSpeed: at 0
    the first step of OneCycle has the momentum of both ends            DeepSpeed: that of the middle
    OneCycle changes betas[0] and leaves betas[1]                       DeepSpeed: betas[1] becomes 0.99

The state consists of `last_batch_iteration`, the number of steps taken less one, and of the groups' own learning rates.
The params are not part of the state: after a resume the script's params apply, so that a run can be extended.

Scripts that import the classes from `deepspeed.runtime.lr_schedules` can import them from here:

    schedule = offload.schedules.WarmupLR(optimizer, warmup_num_steps=100)
    engine, *_ = offload.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
"""

from __future__ import annotations

import abc
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch

from offload.config import check_order, schedule_params
from offload.config.blocks import (
    OneCycleParams,
    RangeTestParams,
    ScheduleParams,
    WarmupCosineParams,
    WarmupDecayParams,
    WarmupParams,
)
from offload.errors import ConfigError, UsageError
from offload.records import MOST
from offload.sizes import count_of

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]


def set_values(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Sets values of a group of parameters, numbers or sequences of numbers, by key.

    A tensor in the group is filled, as torch's schedules fill it: a script or a compiled step may hold the tensor.
    """
    for key, value in values.items():
        present = group.get(key)
        if isinstance(present, torch.Tensor):
            with torch.no_grad():  # a rate may require gradients
                present.fill_(value)
        else:
            group[key] = value


class Schedule(abc.ABC):
    """A schedule that sets `lr` of each group of an optimizer."""

    PEAK: ClassVar[str] = ""
    """Name of the param that is the highest rate of a group; empty if there is no such param."""

    def __init__(self, optimizer: Any, params: ScheduleParams, last_batch_iteration: int) -> None:
        """Sets the learning rates of the next step.

        Args:
            optimizer: an optimizer with `param_groups`, or a wrapper that holds one as `optimizer`.
            params: checked params of the schedule.
            last_batch_iteration: number of the last step taken, from 0; -1 before the first.

        Raises:
            ConfigError: if `optimizer` is not an optimizer, or the params do not fit its groups.
        """
        # DeepSpeed's and Accelerate's wrappers hold the optimizer as `optimizer`.
        optimizer = optimizer if hasattr(optimizer, "param_groups") else getattr(optimizer, "optimizer", optimizer)
        if not hasattr(optimizer, "param_groups"):
            raise ConfigError(f"{type(self).__name__} expects an optimizer, got {type(optimizer).__name__}")
        self.optimizer, self._params = optimizer, params
        self.base_lrs: list[float] = []
        """Each group's own learning rate."""
        self._record_rates()
        self.last_batch_iteration = last_batch_iteration
        self._begin()
        self.apply()

    @property
    def peaks(self) -> list[float]:
        """The highest rate of each group; empty if no param sets one, or if all equal the groups' own rates."""
        peaks = self._per_group(self.PEAK) if self.PEAK else self.base_lrs
        return [] if peaks == self.base_lrs else peaks

    @property
    def parameters(self) -> dict[str, Any]:
        """The params, as JSON values."""
        return self._params.model_dump(mode="json")

    def get_lr(self) -> list[float]:
        """Returns the learning rate of each group for the next step."""
        return self._lrs(self.last_batch_iteration + 1)

    def get_last_lr(self) -> list[float]:
        """Returns the learning rate of each group as it is set now."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, iteration: int | None = None) -> None:
        """Advances by one step and sets the values of the next step. If the call raises, nothing changes.

        Args:
            iteration: number of the step taken, from 0; by default one more than the last.

        Raises:
            ConfigError: if a value of the next step is invalid, such as a momentum of 1 or more.
        """
        before = self.last_batch_iteration
        self.last_batch_iteration = before + 1 if iteration is None else iteration
        try:
            self.apply()
        # An invalid value must not advance the schedule: the user may change the params and step again.
        except ConfigError:
            self.last_batch_iteration = before
            raise

    def take_in(self) -> None:
        """Sets the values of the last group, which was just added to the optimizer. Other groups keep their values.

        Raises:
            UsageError: if the params have no value for the group.
        """
        before = self.base_lrs
        self._record_rates()
        try:
            set_values(self.optimizer.param_groups[-1], self._values()[-1])
        except ConfigError as error:
            self.base_lrs = before
            raise UsageError(f"{type(self).__name__} has no learning rate for a new group: {error}") from error

    def _record_rates(self) -> None:
        """Records the own learning rate of each group that was added since the last call."""
        groups = self.optimizer.param_groups
        for group in groups:
            # torch's schedules use the same key, so a rate that one of them has recorded counts here.
            group.setdefault("initial_lr", float(group["lr"]))
        self.base_lrs = [*self.base_lrs, *(float(group["initial_lr"]) for group in groups[len(self.base_lrs) :])]

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of the last step taken, from 0, and each group's own learning rate."""
        return {"last_batch_iteration": self.last_batch_iteration, "base_lrs": list(self.base_lrs)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a state and sets the values of the next step.

        Args:
            state: the result of `state_dict`, or a state of DeepSpeed, which holds only the iteration.

        Raises:
            UsageError: if `state` is not a state of a schedule, or has learning rates for another number of groups.
                Nothing changes.
            ConfigError: if a value of the next step is invalid. Nothing changes.
        """
        known = state if isinstance(state, Mapping) else {}
        # A resumed run scales the saved learning rates, not the script's.
        position, rates = known.get("last_batch_iteration"), known.get("base_lrs", self.base_lrs)
        are_numbers = isinstance(rates, list | tuple) and all(isinstance(rate, int | float) for rate in rates)
        if not isinstance(position, int) or abs(position) > MOST or not are_numbers:
            raise UsageError(
                f"the state of {type(self).__name__} has the last_batch_iteration {position!r:.99} and the base_lrs "
                f"{rates!r:.99}, expected a whole number and a list of numbers, as state_dict() returns them"
            )
        rates = list(rates)
        if len(rates) != len(self.base_lrs):
            raise UsageError(
                f"the state of {type(self).__name__} has {count_of(len(rates), 'learning rate')}, and the optimizer "
                f"{count_of(len(self.base_lrs), 'group')} of parameters; add the groups of that run first"
            )
        before = self.last_batch_iteration, self.base_lrs
        self.last_batch_iteration, self.base_lrs = position, rates
        try:
            self.apply()
        except ConfigError:
            self.last_batch_iteration, self.base_lrs = before
            raise

    def apply(self) -> None:
        """Sets the values of the next step in the groups."""
        # All values are computed before the first is set, so that an invalid one changes nothing.
        for group, values in zip(self.optimizer.param_groups, self._values(), strict=True):
            set_values(group, values)

    def _values(self) -> list[dict[str, Any]]:
        return [{"lr": rate} for rate in self.get_lr()]

    def _begin(self) -> None:
        """Checks the params against the groups. Called once, before the first `apply`."""
        return  # most schedules have nothing to check

    @abc.abstractmethod
    def _lrs(self, steps: int) -> list[float]:
        """Returns the learning rates after `steps` steps."""

    def _per_group(self, name: str) -> list[float]:
        """Returns the params' `name` for each group; "auto" is the group's own learning rate.

        Raises:
            ConfigError: if a list has another length than the groups.
        """
        value = getattr(self._params, name)
        if value == "auto":
            return self.base_lrs
        if not isinstance(value, tuple):
            return [value] * len(self.base_lrs)
        if len(value) != len(self.base_lrs):
            raise ConfigError(
                f"{name} has {count_of(len(value), 'value')}, the optimizer has "
                f"{count_of(len(self.base_lrs), 'group')} of parameters; give one value for all of them, or one for "
                f"each"
            )
        return list(value)

    def _check_pairs(self) -> None:
        for low, high in self._params.ORDERED:
            more = " (the learning rate of its group)" if getattr(self._params, high) == "auto" else ""
            check_order(low, self._per_group(low), high + more, self._per_group(high))


logger = logging.getLogger("offload")

P = TypeVar("P", bound=ScheduleParams)


def _given(model: type[P], arguments: Mapping[str, Any]) -> P:
    """Returns the params among the arguments of a constructor, checked; None counts as "auto"."""
    values = {name: arguments[name] for name in model.model_fields}
    return schedule_params(model, {name: "auto" if value is None else value for name, value in values.items()})


def _rise(steps: int, params: WarmupParams | WarmupCosineParams) -> float:
    """Returns the completed fraction of the warm-up, from 0 to 1, after at most `_length(params)` steps."""
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
    if params.total_num_steps < params.warmup_num_steps:
        logger.warning(
            "total_num_steps %d is less than warmup_num_steps %d: the learning rate still rises when training ends",
            params.total_num_steps,
            params.warmup_num_steps,
        )


class WarmupLR(Schedule):
    """A rise to a learning rate over a number of steps, after which the rate stays.

    `warmup_min_lr` and `warmup_max_lr` are a number, or a list with one number per group. A `warmup_max_lr` of None or
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
        super().__init__(optimizer, _given(WarmupParams, locals()), last_batch_iteration)

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
        # Not `super()`: WarmupLR would validate the values as `WarmupParams`, which have no `total_num_steps`.
        Schedule.__init__(self, optimizer, _given(WarmupDecayParams, locals()), last_batch_iteration)

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
        super().__init__(optimizer, _given(WarmupCosineParams, locals()), last_batch_iteration)

    def _begin(self) -> None:
        _warn_of_short_training(self._params)

    def _lrs(self, steps: int) -> list[float]:
        params, length = self._params, _length(self._params)
        if steps <= length:
            start = params.warmup_min_ratio
            ratio = start + (1 - start) * _rise(steps, params)
        else:
            # After the last step the rate stays at the end of the cosine.
            done = min(1.0, (steps - length) / max(1, params.total_num_steps - length))
            ratio = params.cos_min_ratio + (1 - params.cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2
        return [base * ratio for base in self.base_lrs]


class OneCycle(Schedule):
    """A cycle from one learning rate up to another and back, with the momentum (betas[0]) reversed; then a decay.

    `cycle_min_lr`, `cycle_max_lr`, `cycle_min_mom` and `cycle_max_mom` are a number, or a list of one per group.
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
        super().__init__(optimizer, _given(OneCycleParams, locals()), last_batch_iteration)

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
        values, momenta = super()._values(), self.get_mom()
        if momenta is None:
            return values
        groups = self.optimizer.param_groups
        return [
            value | {"betas": (momentum, *group["betas"][1:])}
            for value, momentum, group in zip(values, momenta, groups, strict=True)
        ]

    def _lrs(self, steps: int) -> list[float]:
        height, decay = self._height(steps), 1 + self._params.decay_lr_rate * self._intervals(steps)
        pairs = zip(self._per_group("cycle_min_lr"), self._per_group("cycle_max_lr"), strict=True)
        return [(low + (high - low) * height) / decay for low, high in pairs]

    def _momenta(self, steps: int) -> list[float]:
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
        """Returns the decay intervals since the end of the cycle, also in part; 0 without a decay."""
        size = self._params.decay_step_size
        return max(0, steps - sum(self._sizes)) / size if size else 0.0


class LRRangeTest(Schedule):
    """A rise without an end, linear or in stairs, to find the largest learning rate that trains.

    `lr_range_test_min_lr` is a number, or a list with one number per group.
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
        super().__init__(optimizer, _given(RangeTestParams, locals()), last_batch_iteration)

    def _lrs(self, steps: int) -> list[float]:
        params = self._params
        size = params.lr_range_test_step_size
        intervals = steps // size if params.lr_range_test_staircase else steps / size
        return [
            low * (1 + params.lr_range_test_step_rate * intervals) for low in self._per_group("lr_range_test_min_lr")
        ]


MADE_BY: dict[str, Callable[..., Schedule]] = {
    "WarmupLR": WarmupLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupCosineLR": WarmupCosineLR,
    "OneCycle": OneCycle,
    "LRRangeTest": LRRangeTest,
}
"""Class of each type that a config can name."""
