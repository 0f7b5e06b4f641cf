"""The base class of DeepSpeed's learning-rate schedules."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from offload.config import check_order
from offload.config.blocks import ScheduleParams
from offload.errors import ConfigError, UsageError
from offload.records import MOST
from offload.sizes import count_of


def set_values(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Sets values of a group of parameters.

    A tensor in the group is filled, as torch's schedules do: a script or a compiled step may hold the tensor.

    Args:
        group: the group.
        values: numbers, or sequences of them, by key.
    """
    for key, value in values.items():
        present = group.get(key)
        if isinstance(present, torch.Tensor):
            with torch.no_grad():  # a rate may require gradients
                present.fill_(value)
        else:
            group[key] = value


def _are_numbers(values: Any) -> bool:
    """Returns True for a list or a tuple of numbers."""
    return isinstance(values, list | tuple) and all(isinstance(each, int | float) for each in values)


class Schedule(abc.ABC):
    """A schedule that sets `lr` of each group of an optimizer."""

    PEAK: ClassVar[str] = ""
    """Field of the params that is the highest rate of a group; empty if no field is."""

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
        """Sets the values of the last group, which was just added to the optimizer. Other groups keep theirs.

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
            UsageError: if the state is none, or has learning rates for another number of groups. Nothing changes.
            ConfigError: if a value of the next step is invalid. Nothing changes.
        """
        known = state if isinstance(state, Mapping) else {}
        # A resumed run scales the learning rates that were saved, not those of the script.
        position, rates = known.get("last_batch_iteration"), known.get("base_lrs", self.base_lrs)
        if not isinstance(position, int) or abs(position) > MOST or not _are_numbers(rates):
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
        """Returns what the schedule sets for the next step, by group and key."""
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
        """Raises `ConfigError` if a lower bound exceeds its upper bound in any group."""
        for low, high in self._params.ORDERED:
            more = " (the learning rate of its group)" if getattr(self._params, high) == "auto" else ""
            check_order(low, self._per_group(low), high + more, self._per_group(high))
