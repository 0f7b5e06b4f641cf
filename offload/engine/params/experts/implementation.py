"""Setting of the models of transformers whose experts are units: the loop that takes one expert after the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from offload.layout.experts.stacks import LOOP


def take_one_by_one(model: nn.Module, modules: Iterable[str]) -> None:
    """Makes the forwards of modules of stacked experts use one expert after the other; other ones need all at once.

    Args:
        model: the model.
        modules: names of the modules.
    """
    for name in modules:
        config: Any = getattr(model.get_submodule(name), "config", None)
        if getattr(config, "_experts_implementation", LOOP) != LOOP:
            config._experts_implementation = LOOP
