"""What a mutant is."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """`old` becomes `new` in `module`; `tests` must then fail."""

    name: str
    module: str
    old: str
    new: str
    tests: str
