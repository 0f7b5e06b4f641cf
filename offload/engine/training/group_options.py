"""Entries of an optimizer's groups beside the numbers of its rule: flags, words, and a script's own counters.

torch saves every entry of a group, and so does a commit. Nearly all are constants that the script sets anew, so a
commit contains those alone that differ from what `initialize` found, each with what it found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from offload.engine.optim.optimizer import Optimizer
from offload.errors import ConfigError, UsageError
from offload.fileio.plain_json import from_plain, to_plain

_OF_SCHEDULES = ("initial_lr", "max_lr", "min_lr", "base_lr", "swa_lr", "base_momentum", "max_momentum")
"""Entries that torch's schedules make for themselves, from the learning rates of their start."""
_ADVICE = (
    "a commit holds None, booleans, numbers, strings, small tensors, and lists, tuples and dicts of them. Keep other "
    "objects outside of the optimizer's groups, and register those that change by engine.register_for_checkpointing"
)


_CONSTANT = (bool, int, float, str)
_ABSENT = object()


class GroupOptions:
    """Changes of such entries since `initialize`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._first = [self._of(group) for group in optimizer.param_groups]
        """The entries of each group as they were, as JSON; functions and classes as they are."""
        self._objects = [dict(group) for group in optimizer.param_groups]

    def _of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the entries of a group that are none of its rule's numbers."""
        return {key: _plain(key, group[key]) for key in group if self._has(key)}

    def _has(self, key: str) -> bool:
        return key not in ("params", "param_names", *self._optimizer.rule.scheduled, *_OF_SCHEDULES)

    def changes(self) -> list[dict[str, Any]]:
        """Returns the entries of each group that differ, as JSON: the value, after the first one if there was one.

        Raises:
            UsageError: an entry is no plain value.
        """
        found: list[dict[str, Any]] = []
        for first, objects, group in zip(self._first, self._objects, self._optimizer.param_groups, strict=True):
            found.append({})
            for key in group:
                # At each step: an object that cannot change is compared by identity.
                same = group[key] is objects.get(key) and (group[key] is None or isinstance(group[key], _CONSTANT))
                if same or not self._has(key) or (now := _plain(key, group[key])) == first.get(key, _ABSENT):
                    continue
                if _is_code(now) or _is_code(first.get(key)):
                    raise UsageError(
                        f"{key} of a group of the optimizer is another {type(now).__name__} now; {_ADVICE}"
                    )
                found[-1][key] = [*([first[key]] if key in first else ()), now]
        return found

    def apply(self, changes: Sequence[Mapping[str, Sequence[Any]]]) -> None:
        """Gives the groups entries of a commit, but for those that this script sets otherwise than the former one."""
        for first, group, changed in zip(self._first, self._optimizer.param_groups, changes, strict=False):
            for key, (*former, value) in changed.items():
                if former == ([first[key]] if key in first else []):
                    group[key] = from_plain(value)

    def regrouped(self) -> None:
        """Takes in a group that was added: its entries are those that it begins with."""
        added = self._optimizer.param_groups[len(self._first) :]
        self._first += [self._of(group) for group in added]
        self._objects += [dict(group) for group in added]


def check_options(optimizer: Optimizer) -> None:
    """Raises `ConfigError` if a group contains an object that no commit could contain."""
    try:
        GroupOptions(optimizer)
    except UsageError as error:
        raise ConfigError(str(error)) from None


def _is_code(value: Any) -> bool:
    """Returns True for functions, classes and the like, which the script makes anew."""
    return callable(value) and not isinstance(value, torch.Tensor)


def _plain(key: str, value: Any) -> Any:
    """Returns an entry as JSON; functions, classes and the like as they are."""
    if _is_code(value):
        return value
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
    return to_plain(value, f"{key} of a group of the optimizer", _ADVICE, tensors=True)
