"""First values of the parameters of each unit: drawn by their modules, or those of the parameter that they copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from offload.engine.params.building.draws import Draw
from offload.engine.params.deferred_parameter import DeferredParameter
from offload.engine.params.meta_init import materialize
from offload.errors import ConfigError


class FirstValues:
    """Maker of the values of one unit after the other.

    A unit follows soon after those that it copies, since the values of these stay in memory until then.
    """

    def __init__(self, model: nn.Module, units: Sequence[Sequence[str]], seed: int) -> None:
        """Finds out which parameters are copies of which.

        Args:
            model: the model.
            units: names of the parameters of each unit.
            seed: seed of the initialization. Each unit derives its own from it.

        Raises:
            ConfigError: if a parameter is a copy of one that the model does not contain, nor any like it.
        """
        self._model, self._units, self._seed = model, units, seed
        self._shapes = {id(parameter): parameter.shape for parameter in model.parameters()}
        self._unit_of = {name: unit for unit, names in reversed(list(enumerate(units))) for name in names}
        self._sources = _sources(model, list(self._unit_of))
        self._waiting = Counter(self._sources.values())
        """Number of copies of each parameter that have no values yet."""
        self._kept: dict[str, torch.Tensor] = {}
        """Values of the parameters with such copies."""

    def order(self) -> Iterator[int]:
        """Yields each unit once: the units that copy a unit, then the others."""
        copies: dict[int, set[int]] = {}
        for name, source in self._sources.items():
            copies.setdefault(self._unit_of[source], set()).add(self._unit_of[name])
        done: set[int] = set()
        for first in range(len(self._units)):
            waiting = [first]
            while waiting:
                unit = waiting.pop()
                if unit not in done:
                    done.add(unit)
                    yield unit
                    waiting += sorted(copies.get(unit, ()), reverse=True)

    def make(self, unit: int) -> None:
        """Makes the deferred parameters of a unit real; those that will be read from an origin stay as they are.

        Raises:
            ConfigError: if a parameter has no initial value.
        """
        names = self._draw(unit)
        for name in names:
            source = self._sources.get(name)
            if source is None:
                continue
            # This unit may come before the one that it copies, whose values then wait for their turn.
            self._draw(self._unit_of[source])
            with torch.no_grad():
                self._model.get_parameter(name).copy_(self._kept[source])
            self._waiting[source] -= 1
            if not self._waiting[source]:
                del self._kept[source]

    def _draw(self, unit: int) -> list[str]:
        """Lets the modules of a unit initialize its parameters, and returns the names of those made now."""
        parameters = {name: self._model.get_parameter(name) for name in self._units[unit]}
        absent = [name for name, parameter in parameters.items() if parameter.is_meta]
        # Distinct for every pair of seed and unit, as no model has a million units, and within torch's 64 bits.
        materialize(self._model, self._units[unit], (self._seed * 1_000_003 + unit) % 2**63, self._shapes)
        made = [name for name in absent if not parameters[name].is_meta]
        for name in made:
            if self._waiting[name]:
                # An alias, which keeps the memory after the parameter was emptied.
                self._kept[name] = parameters[name].detach()
        return made


def _sources(model: nn.Module, names: Sequence[str]) -> Mapping[str, str]:
    """Returns the copies among parameters, each with the name of the parameter whose module makes the values of all."""
    groups: dict[Draw, list[str]] = {}
    for name in names:
        parameter = model.get_parameter(name)
        if isinstance(parameter, DeferredParameter) and parameter.origin is None and parameter.draw is not None:
            groups.setdefault(parameter.draw, []).append(name)
    found: dict[str, str] = {}
    for draw, group in groups.items():
        if not draw.copied:
            continue
        places = [name.rpartition(".") for name in group]
        makes = [draw.is_made_in(model.get_submodule(path), leaf) for path, _, leaf in places]
        if not any(makes):
            kind = type(model.get_submodule(places[0][0])).__name__
            raise ConfigError(
                f"parameter {group[0]} is a copy of a parameter outside of the model, and {kind} does not initialize "
                "it as the other's module does; "
                "build this model outside of offload.init"
            )
        source = group[makes.index(max(makes))]
        found |= {name: source for name in group if name != source}
    return found
