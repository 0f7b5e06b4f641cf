"""A learning-rate schedule: what all of DeepSpeed's have in common."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

from offload.config import check_order
from offload.config.blocks.scheduler import (
    ScheduleParams,
)
from offload.errors import ConfigError, UsageError
from offload.sizes import count_of


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
