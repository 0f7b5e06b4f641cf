"""Entries of a model's `state_dict()` that are neither parameters nor buffers: in each commit and checkpoint.

Modules make them by `get_extra_state`, and by hooks or methods of their own, and take them back in `load_state_dict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.engine.params.saved_state import extra_states, saved_state
from offload.errors import ConfigError, StoreError, UsageError
from offload.fileio.plain_json import from_plain, to_plain

_ADVICE = (
    "commits and checkpoints hold None, booleans, numbers, strings, bytes, dense tensors, and lists, tuples and dicts "
    "of them, never pickles. Let get_extra_state return such values, or register tensors as buffers"
)


class Entries(NamedTuple):
    """Entries as a commit holds them."""

    plain: Mapping[str, Any]
    """Entries by name, as JSON."""
    tensors: Mapping[str, torch.Tensor]
    """The tensors in them, as bytes, by the numbers that `plain` has for them."""


NO_ENTRIES = Entries({}, {})


class ModuleEntries:
    """The entries of one model."""

    def __init__(self, model: nn.Module, commits: bool) -> None:
        """Finds out which entries there are.

        Args:
            model: The model, before or after an engine takes it over.
            commits: True to refuse entries that a commit cannot hold.

        Raises:
            ConfigError: If a module cannot take its entries back, or, with `commits`, they are not plain values.
        """
        self._model, self._device_type = model, "cpu"
        self._extra = extra_states(model)
        others = {name for name in saved_state(model).others if name not in self._extra}
        self._others = _taken_back(model, others)
        self.problem = ""
        """Why no commit or checkpoint can contain the entries; empty if they can."""
        for module in self._extra.values():
            if type(module).set_extra_state is nn.Module.set_extra_state:
                raise ConfigError(
                    f"{type(module).__name__} has get_extra_state without set_extra_state, so what it returns could "
                    "not be restored in a resumed run: add set_extra_state to the class"
                )
        try:
            self.take()
        except UsageError as error:
            self.problem = str(error)
            if commits:
                raise ConfigError(
                    f'{error}; or set "durability": "none" in the "offload" block for a run without commits'
                ) from None

    def take(self) -> Entries:
        """Returns the present entries.

        Raises:
            UsageError: If an entry contains an object that is not plain.
        """
        if not self._extra and not self._others:
            return NO_ENTRIES
        found = {name: module.get_extra_state() for name, module in self._extra.items()}
        if self._others:
            found |= {name: value for name, value in saved_state(self._model).others.items() if name in self._others}
        tensors: list[torch.Tensor] = []
        plain = {name: to_plain(value, self._words(name), _ADVICE, tensors) for name, value in found.items()}
        return Entries(plain, {str(number): tensor for number, tensor in enumerate(tensors)})

    def check_fits(self, entries: Entries, what: str) -> None:
        """Raises `StoreError` if this model has other entries than a commit or checkpoint, which is called `what`."""
        for name in entries.plain:
            if name not in self._extra and name not in self._others:
                raise StoreError(
                    f"{what} contains the entry {name} of the model's state_dict(), which this model does not have: "
                    "give the model of the run"
                )

    def restore(self, entries: Entries, device: torch.device) -> list[str]:
        """Gives the entries back to the modules; returns notices about those that were not saved.

        Args:
            entries: The entries of a commit or checkpoint.
            device: Receives tensors that were on an accelerator.
        """
        held = {name: from_plain(value, entries.tensors, device) for name, value in entries.plain.items()}
        for name, module in self._extra.items():
            if name in held:
                module.set_extra_state(held.pop(name))
        if held:
            self._model.load_state_dict(held, strict=False)
        absent = [name for name in (*self._extra, *self._others) if name not in entries.plain]
        if not absent:
            return []
        return [f"{', '.join(absent)} of the model's state_dict() was not saved, and stays as the script has made it"]

    def _words(self, name: str) -> str:
        """Returns an entry's name for a message."""
        module = self._extra.get(name)
        return (
            f"entry {name} of state_dict()" if module is None else f"{type(module).__name__}.get_extra_state() ({name})"
        )


def _taken_back(model: nn.Module, names: set[str]) -> set[str]:
    """Returns which of the entries the model's `load_state_dict` takes; others are made of weights, or constant.

    Raises:
        ConfigError: If that cannot be told.
    """
    if not names:
        return set()
    others = {name: value for name, value in saved_state(model).others.items() if name in names}
    try:
        result = model.load_state_dict(others, strict=False)
    except Exception as error:  # any code of the model's
        raise ConfigError(
            f"state_dict() of {type(model).__name__} contains {min(names)}, which is neither a parameter nor a buffer, "
            f"and load_state_dict() does not take it alone ({error}); keep it by get_extra_state and set_extra_state, "
            "or register it as a buffer"
        ) from error
    return names - set(result.unexpected_keys)
