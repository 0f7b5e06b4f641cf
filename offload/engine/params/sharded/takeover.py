"""Ordinary parameters of this process's shards in place of a model's DTensors, and the way back after an error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.engine.params.sharded.find import DTensorForm, FoundShards, is_dtensor


class Site(NamedTuple):
    """A module that computes with DTensors of its own."""

    module: nn.Module
    forms: Mapping[str, DTensorForm]
    """The DTensors by the module's own names for them."""


class TakenShards:
    """The DTensors of a model, in whose places the model has ordinary parameters over the same memory."""

    def __init__(self, model: nn.Module, found: FoundShards) -> None:
        """Replaces the DTensors, if there are any. Names, values, ties and attributes stay."""
        # By identity, since a tied parameter has several names, and is to stay one parameter.
        by_id = {id(model.get_parameter(name)): form for name, form in found.dtensors.items()}
        self._taken: list[tuple[nn.Module, str, Any]] = []
        self._local: dict[int, nn.Parameter] = {}
        """The ordinary parameter for each DTensor, by the id of the DTensor."""
        self._optimizer: torch.optim.Optimizer | None = None
        self.sites: list[Site] = []
        for module in model.modules():
            mine = {name: each for name, each in module._parameters.items() if is_dtensor(each)}
            for name, dtensor in mine.items():
                self._taken.append((module, name, dtensor))
                module._parameters[name] = self._local.setdefault(id(dtensor), _ordinary(dtensor))
            if mine:
                self.sites.append(Site(module, {name: by_id[id(each)] for name, each in mine.items()}))

    def translated(self, given: Any) -> Any:
        """Returns parameters or groups of parameters with the ordinary ones in place of the DTensors.

        Args:
            given: the user's `model_parameters`, or None.
        """
        if not self._taken or given is None or isinstance(given, str | Mapping) or not isinstance(given, Iterable):
            return given
        if isinstance(given, torch.Tensor):
            return self._own(given)
        return [
            {**each, "params": self.translated(each["params"])}
            if isinstance(each, Mapping) and "params" in each
            else self._own(each)
            for each in given
        ]

    def translate_optimizer(self, given: Any) -> None:
        """Puts the ordinary parameters into the groups of an optimizer of torch; does nothing to anything else."""
        if self._taken and isinstance(given, torch.optim.Optimizer):
            self._optimizer = given
            for group in given.param_groups:
                group["params"] = [self._own(each) for each in group["params"]]

    def restore(self) -> None:
        """Puts the DTensors back, unless `keep` was called. Idempotent."""
        back = {id(self._local[id(dtensor)]): dtensor for _, _, dtensor in self._taken}
        for module, name, dtensor in self._taken:
            module._parameters[name] = dtensor
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["params"] = [back.get(id(each), each) for each in group["params"]]
        self.keep()

    def keep(self) -> None:
        """Drops the DTensors, whose memory the engine is about to free parameter by parameter."""
        self._taken, self._local, self._optimizer = [], {}, None

    def _own(self, parameter: Any) -> Any:
        """Returns the ordinary parameter in place of a DTensor, and anything else as it is."""
        return self._local.get(id(parameter), parameter)


def _ordinary(dtensor: Any) -> nn.Parameter:
    """Returns an ordinary parameter over the memory of this process's shard, with the attributes of the DTensor."""
    # Without gradients `to_local` is the memory itself, not a node of a graph over it.
    with torch.no_grad():
        made = nn.Parameter(dtensor.to_local().detach(), requires_grad=dtensor.requires_grad)
    # Marks of the user and of other libraries, such as that of a parameter without weight decay.
    made.__dict__.update({name: value for name, value in dtensor.__dict__.items() if not name.startswith("_")})
    return made


@contextlib.contextmanager
def taken_over(model: nn.Module, found: FoundShards) -> Iterator[TakenShards]:
    """Yields the DTensors of `model`, which are replaced; they are put back if the body raises before `keep`."""
    taken = TakenShards(model, found)
    try:
        yield taken
    except BaseException:
        taken.restore()
        raise
