"""The experts that a forward will use are known once the router has chosen: they are fetched ahead, in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from offload.engine.params.experts.implementation import take_one_by_one
from offload.interrupts import uninterrupted
from offload.swapper.pager import Pager
from offload.torch_internals import outside_of_compiled_code


class ExpertTurns:
    """The hooks on the modules of stacked experts, which tell the pager the router's choice, and their loops."""

    def __init__(self, modules: Mapping[str, nn.Module], experts: Mapping[str, range], pager: Pager) -> None:
        """Stores what `install` needs.

        Args:
            modules: all modules of the model, by name.
            experts: units of each module whose experts are units, expert by expert.
            pager: fetches units.
        """
        self._sites = [(modules[name], units) for name, units in experts.items()]
        self._pager = pager
        self.units = frozenset(unit for _, units in self._sites for unit in units)
        """All experts."""

    def install(self) -> list[Callable[[], None]]:
        """Hooks the modules, behind the hooks that make them sites, and makes their forwards loops over experts.

        Returns:
            Functions that remove the hooks, and give the modules their own way back.
        """
        return [undo for module, units in self._sites for undo in (self._hook(module, units), take_one_by_one(module))]

    def _hook(self, module: nn.Module, units: range) -> Callable[[], None]:
        """Hooks one module and returns the function that removes the hook."""

        def before(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if called is module:
                self._expect(units, (*args, *kwargs.values()))

        return module.register_forward_pre_hook(outside_of_compiled_code(before), with_kwargs=True).remove

    @uninterrupted
    def _expect(self, units: range, values: tuple[Any, ...]) -> None:
        """Tells the pager which experts a forward with these arguments uses."""
        choice = next((each for each in values if _is_choice(each)), None)
        if choice is None:
            return
        # Sorted, as the loop over them goes; a number that is no expert stands for a token without one.
        chosen = [units[number] for number in choice.unique().tolist() if 0 <= number < len(units)]
        with self._pager.lock:
            self._pager.table.access_order.expect(chosen, units)
        self._pager.prefetch()


def _is_choice(value: Any) -> bool:
    """Returns True for the router's choice: the argument that contains whole numbers."""
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64)
