"""The rates of a plan as a reader sees them: a value, its origin and its source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from offload.sizes import format_count

Origin = Literal["measured", "published", "given", "assumed"]
"""measured: by `offload probe` on this machine. published: measured by others, who say so in public. given: by an
option. assumed: a guess of this package, such as a fraction of a data sheet's figure."""

ORIGINS: tuple[Origin, ...] = ("measured", "published", "given", "assumed")
"""All origins, the most certain first."""


class Figure(NamedTuple):
    """A published figure."""

    value: float
    source: str
    """The place where the figure can be read: repository, issue, paper or page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """A rate that a plan computes with."""

    name: str
    value: float
    """Per second; infinite for work that takes no time."""
    unit: str
    """"flop/s", "B/s" or "parameters/s"."""
    origin: Origin
    source: str

    @property
    def amount(self) -> str:
        """Returns the value with its unit."""
        if math.isinf(self.value):
            return "no time"
        if self.unit == "flop/s":
            return f"{self.value / 1e12:.3g} Tflop/s"
        if self.unit == "B/s":
            return f"{self.value / 1e9:.4g} GB/s"
        return f"{format_count(int(self.value))} {self.unit}"

    @property
    def sentence(self) -> str:
        """Returns name, value and source as one clause."""
        return f"{self.name} {self.amount} ({self.source})"


def sentences(rates: Sequence[Rate], origin: Origin) -> list[str]:
    """Returns the clauses of the rates of one origin."""
    return [rate.sentence for rate in rates if rate.origin == origin]
