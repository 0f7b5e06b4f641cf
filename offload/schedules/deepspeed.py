"""DeepSpeed's schedules of learning rates, step for step.

A schedule sets the rates of the first step when it is made, and those of the next in each `step()`, which the engine
calls at the end of a step. With n steps taken, N steps of warm-up and T steps in all, the next step has

    WarmupLR         min + (max - min) * rise            rise = log(n) / log(N), or (n - 1) / N; 0 at n = 0, at most 1
    WarmupDecayLR    the same up to n = N, then min + (max - min) * (T - n + 1) / (T - N), and no less than min
    WarmupCosineLR   lr * (min + (1 - min) * rise) up to n = N, then lr * (end + (1 - end) * fall)
                                                         fall = (1 + cos(pi * (n - N) / (T - N))) / 2, then 0
    OneCycle         min + (max - min) * height          height: 0 at n = 0, up to 1, and back to 0 at the end
                     then min / (1 + rate * more)        more: intervals since
    LRRangeTest      min * (1 + rate * n / size)         n / size rounded down with a staircase

The first three count one behind, so that their first two steps are both at the start. DeepSpeed counts so, and the
learning rates of a run are the same there and here. Where DeepSpeed does otherwise than it says, this does as it says:

    the first step of WarmupCosineLR is at warmup_min_ratio             there at 0
    the first step of OneCycle has the momentum of both ends            there that of the middle
    OneCycle moves betas[0] and leaves betas[1]                         there it becomes 0.99
    warmup_max_lr "auto" is each group's own learning rate              there all have that of the first
    a list of one value for each group works for OneCycle too           there it fails

The state is how many steps were taken (`last_batch_iteration`, one less) and the groups' own learning rates. What the
params say now counts after a resume, so that a longer run can be asked for.
"""

from __future__ import annotations

import abc
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from offload.config import check_order, schedule_params
from offload.config.blocks.scheduler import (
    OneCycleParams,
    RangeTestParams,
    ScheduleParams,
    WarmupCosineParams,
    WarmupDecayParams,
    WarmupParams,
)
from offload.errors import ConfigError, UsageError
from offload.sizes import count_of

logger = logging.getLogger("offload")


class Schedule(abc.ABC):
    """Sets `lr` of each group of an optimizer; what all schedules of DeepSpeed have in common."""

    PEAK: ClassVar[str] = ""
    """The field of the params that is the highest rate, where that does not follow from the groups' own."""

    def __init__(self, optimizer: Any, params: ScheduleParams, last_batch_iteration: int) -> None:
        optimizer = optimizer if hasattr(optimizer, "param_groups") else getattr(optimizer, "optimizer", optimizer)
        if not hasattr(optimizer, "param_groups"):
            raise ConfigError(f"{type(self).__name__} expects an optimizer, got {type(optimizer).__name__}")
        self.optimizer, self._params = optimizer, params
        self.base_lrs: list[float] = []
        """Each group's own learning rate."""
        self._note_rates()
        self.last_batch_iteration = last_batch_iteration
        self._begin()
        self.apply()

    @property
    def peaks(self) -> list[float]:
        """The highest rate of each group, where it is not their own."""
        peaks = self._of_each(self.PEAK) if self.PEAK else self.base_lrs
        return [] if peaks == self.base_lrs else peaks

    @property
    def parameters(self) -> dict[str, Any]:
        """What it was made with, as JSON has it."""
        return self._params.model_dump(mode="json")

    def get_lr(self) -> list[float]:
        """The learning rate of each group for the next step."""
        return self._lrs(self.last_batch_iteration + 1)

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group as it is set."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, iteration: int | None = None) -> None:
        """A step was taken: set what the next one has. `iteration` is the number of the one taken, from 0."""
        before = self.last_batch_iteration
        self.last_batch_iteration = before + 1 if iteration is None else iteration
        try:
            self.apply()
        except ConfigError:
            self.last_batch_iteration = before
            raise

    def take_in(self) -> None:
        """Set the rate of a group that came last too. Raises `UsageError` where the params have none for it."""
        before = self.base_lrs
        self._note_rates()
        try:
            self.optimizer.param_groups[-1]["lr"] = self.get_lr()[-1]
        except ConfigError as error:
            self.base_lrs = before
            raise UsageError(f"{type(self).__name__} has no learning rate for a further group: {error}") from error

    def _note_rates(self) -> None:
        groups = self.optimizer.param_groups
        for group in groups:
            group.setdefault("initial_lr", float(group["lr"]))  # where torch's schedules note it too
        self.base_lrs = [*self.base_lrs, *(float(group["initial_lr"]) for group in groups[len(self.base_lrs) :])]

    def state_dict(self) -> dict[str, Any]:
        """The number of the last step taken, from 0, and each group's own learning rate."""
        return {"last_batch_iteration": self.last_batch_iteration, "base_lrs": list(self.base_lrs)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; DeepSpeed's states have only the iteration."""
        self.last_batch_iteration = state["last_batch_iteration"]
        self.base_lrs = list(state.get("base_lrs", self.base_lrs))
        self.apply()

    def apply(self) -> None:
        """Set what the next step has."""
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate

    def _begin(self) -> None:
        """Check the params against the groups."""
        return  # most have nothing to check

    @abc.abstractmethod
    def _lrs(self, steps: int) -> list[float]:
        """The learning rates after so many steps."""

    def _of_each(self, name: str) -> list[float]:
        """The params' `name` for each group; "auto" is the group's own learning rate."""
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
            check_order(low, self._of_each(low), high + more, self._of_each(high))


def _rise(steps: int, params: WarmupParams | WarmupCosineParams) -> float:
    """How much of the warm-up is done, from 0 to 1, while `steps` are at most those of the warm-up."""
    if not steps:
        return 0.0
    length = _length(params)
    return math.log(steps) / math.log(length) if params.warmup_type == "log" else (steps - 1) / length


def _length(params: WarmupParams | WarmupCosineParams) -> int:
    return max(2, params.warmup_num_steps)


def _tell_of_no_end(params: WarmupDecayParams | WarmupCosineParams) -> None:
    if params.total_num_steps < params.warmup_num_steps:
        logger.warning(
            "total_num_steps %d is less than warmup_num_steps %d: the learning rate still rises when training ends",
            params.total_num_steps,
            params.warmup_num_steps,
        )


class WarmupLR(Schedule):
    """Rises to a learning rate over so many steps, and stays there.

    `warmup_min_lr` and `warmup_max_lr` are a number, or a list of one for each group; None is the group's own.
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
        share = self._share(steps)
        pairs = zip(self._of_each("warmup_min_lr"), self._of_each("warmup_max_lr"), strict=True)
        return [low + (high - low) * share for low, high in pairs]

    def _share(self, steps: int) -> float:
        return _rise(steps, self._params) if steps <= _length(self._params) else 1.0


class WarmupDecayLR(WarmupLR):
    """Rises to a learning rate, and falls in a line until `total_num_steps`: to 0, or to `warmup_min_lr`."""

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
        given = {
            "total_num_steps": total_num_steps,
            "warmup_min_lr": warmup_min_lr,
            "warmup_max_lr": "auto" if warmup_max_lr is None else warmup_max_lr,
            "warmup_num_steps": warmup_num_steps,
            "warmup_type": warmup_type,
        }
        Schedule.__init__(self, optimizer, schedule_params(WarmupDecayParams, given), last_batch_iteration)

    def _begin(self) -> None:
        self._check_pairs()
        _tell_of_no_end(self._params)

    def _share(self, steps: int) -> float:
        length, total = _length(self._params), self._params.total_num_steps
        if steps <= length:
            return _rise(steps, self._params)
        return max(0.0, (total - steps + 1) / max(1, total - length))


class WarmupCosineLR(Schedule):
    """Rises to each group's own learning rate, and falls along a cosine to `cos_min_ratio` of it."""

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
        given = {
            "total_num_steps": total_num_steps,
            "warmup_min_ratio": warmup_min_ratio,
            "warmup_num_steps": warmup_num_steps,
            "cos_min_ratio": cos_min_ratio,
            "warmup_type": warmup_type,
        }
        super().__init__(optimizer, schedule_params(WarmupCosineParams, given), last_batch_iteration)

    def _begin(self) -> None:
        _tell_of_no_end(self._params)

    def _lrs(self, steps: int) -> list[float]:
        ratio = self._ratio(steps)
        return [base * ratio for base in self.base_lrs]

    def _ratio(self, steps: int) -> float:
        params, length = self._params, _length(self._params)
        if steps <= length:
            start = params.warmup_min_ratio
            return start + (1 - start) * _rise(steps, params)
        done = min(1.0, (steps - length) / max(1, params.total_num_steps - length))
        return params.cos_min_ratio + (1 - params.cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2


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


MADE_BY: dict[str, Callable[..., Schedule]] = {
    "WarmupLR": WarmupLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupCosineLR": WarmupCosineLR,
    "OneCycle": OneCycle,
    "LRRangeTest": LRRangeTest,
}
"""By the type that a config names."""
