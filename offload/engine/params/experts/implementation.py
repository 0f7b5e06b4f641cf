"""Setting of the modules of transformers whose experts are units: the loop that takes one expert after the other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from offload.layout.experts import LOOP


def take_one_by_one(module: nn.Module) -> Callable[[], None]:
    """Makes the forward of a module of stacked experts use one expert after the other; others need all at once.

    The module gets a config of its own, since other models may share the one that it has.

    Args:
        module: the module.

    Returns:
        A function that gives the module its config back.
    """
    theirs: Any = getattr(module, "config", None)
    if getattr(theirs, "_experts_implementation", LOOP) == LOOP:
        return lambda: None
    own = copy.deepcopy(theirs)
    own._experts_implementation = LOOP
    module.config = own

    def give_back() -> None:
        module.config = theirs

    return give_back
