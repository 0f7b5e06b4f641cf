"""What is said of a name of DeepSpeed."""

from __future__ import annotations

from typing import NamedTuple

RIGHT, REFUSED, ABSENT = "right", "refused", "absent"
ENGINE = "runtime.engine.DeepSpeedEngine"


class Name(NamedTuple):
    """A name of DeepSpeed."""

    path: str
    """Behind "deepspeed."; behind the engine's class for a method."""
    outcome: str
    words: str = ""
    """What differs, or what to do instead."""
    parameters: str = ""
    """DeepSpeed's parameters in their order, where the name is right and is called."""


def each(outcome: str, words: str, *paths: str) -> tuple[Name, ...]:
    """Returns names of which the same is said."""
    return tuple(Name(path, outcome, words) for path in paths)
