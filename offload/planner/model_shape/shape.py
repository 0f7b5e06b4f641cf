"""The numbers of a model that a prediction needs: `Shape`, its uses of units, and the repeated blocks among them."""

from __future__ import annotations

import functools
import re
from itertools import groupby
from typing import NamedTuple

from offload.layout.flat_layout import UnitLayout

_BLOCK = re.compile(r"(?:.*?\.)?\d+(?=\.|$)")
"""Name of a repeated block at the start of a unit's name: up to the first number, as "model.layers.3"."""


class Experts(NamedTuple):
    """The experts of a layer, each of which is a unit of its own."""

    units: range
    per_token: int
    """Experts that the router chooses for a token."""

    def visited(self, tokens: int) -> float:
        """Returns how many experts so many tokens visit by expectation, if the router prefers none."""
        count = len(self.units)
        return count * (1 - (1 - self.per_token / count) ** tokens)


class Choice(NamedTuple):
    """The experts of a layer that a router has chosen, in their order."""

    units: tuple[int, ...] = ()
    """Empty for no choice."""
    of: range = range(0)
    """All experts of the layer."""


class Use(NamedTuple):
    """A use of a unit in the forward of one sequence.

    A use of the first of a layer's experts stands for those of all that are visited, until `drawn` divides it.
    """

    unit: int
    flops: float
    """Operations of matrix products and attention."""
    nbytes: float
    """Bytes that all other operations read and write."""
    saved: int
    """Bytes saved for the backward."""
    boundary: int
    """Bytes of the input, which is all that activation checkpointing keeps."""
    lookup: bool = False
    """True for an embedding, whose backward does not read the weights."""
    largest: int = 0
    """Bytes of the largest tensor that the use creates, an MLP's own tensors aside."""
    attention: float = 0.0
    """Operations of attention, a part of `flops`; they grow with the square of the sequence."""
    mlp_flops: float = 0.0
    """Operations of the block's MLP, a part of `flops`."""
    mlp_saved: int = 0
    """Bytes that the block's MLP saves, its input among them; a part of `saved`."""
    mlp_largest: int = 0
    """Bytes of the largest tensor that the block's MLP creates."""
    choice: Choice = Choice()
    """The choice of the router that is made before the use."""


class Block(NamedTuple):
    """A repeated block: the consecutive uses that activation checkpointing computes again together."""

    name: str
    uses: range
    """Positions of the block's uses in `Shape.uses`."""


class Shape(NamedTuple):
    """The model's side of a prediction."""

    name: str
    layouts: tuple[UnitLayout, ...]
    uses: tuple[Use, ...]
    """Uses in the order of the forward."""
    temporary: int
    """Bytes of the largest tensor that one sequence creates, usually the logits."""
    sequence: int
    """Tokens of a sequence."""
    positions: int | None = None
    """Most tokens of a sequence, by the model's config; None if there is no limit."""
    itemsize: int = 2
    """Bytes of an element of weights and activations."""
    matrices: frozenset[str] = frozenset()
    """Names of the parameters that Muon and SinkGD step as matrices."""
    experts: tuple[Experts, ...] = ()
    """The experts of each layer of which they are units."""
    adapted: bool = False
    """True if adapters alone are trained, so that a saved model consists of them."""

    @property
    def parameters(self) -> int:
        """Returns the number of parameters; a tied one counts once."""
        return sum(segment.value_numel for layout in self.layouts for segment in layout.segments)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Returns the repeated blocks in the order of the forward."""
        return _blocks(tuple([None if use.lookup else self.layouts[use.unit].name for use in self.uses]))

    def visited(self, tokens: int) -> float:
        """Returns how many experts of all layers so many tokens visit by expectation."""
        return sum(each.visited(tokens) for each in self.experts)

    def at(self, sequence: int) -> Shape:
        """Returns the shape for sequences of another length.

        Bytes grow with the tokens, as do all operations but those of attention, which grow with their square.
        """

        def scaled(nbytes: int) -> int:
            # A division of integers: a longer sequence never has fewer bytes, however long it is.
            return nbytes * sequence // self.sequence

        times = sequence / self.sequence
        uses = tuple(
            use._replace(
                flops=(use.flops - use.attention) * times + use.attention * times**2,
                nbytes=use.nbytes * times,
                saved=scaled(use.saved),
                boundary=scaled(use.boundary),
                largest=scaled(use.largest),
                attention=use.attention * times**2,
                mlp_flops=use.mlp_flops * times,
                mlp_saved=scaled(use.mlp_saved),
                mlp_largest=scaled(use.mlp_largest),
            )
            for use in self.uses
        )
        return self._replace(uses=uses, temporary=scaled(self.temporary), sequence=sequence)


@functools.lru_cache
def _blocks(units: tuple[str | None, ...]) -> tuple[Block, ...]:
    """Returns the repeated blocks among uses, given by the names of their units; None for a look-up.

    A plan asks a thousand times about few models.
    """

    def name_of(position: int) -> str | None:
        unit = units[position]
        matched = None if unit is None else _BLOCK.match(unit)
        return None if matched is None else matched.group()

    found = []
    for name, positions in groupby(range(len(units)), name_of):
        first, *others = positions
        if name is not None:
            found.append(Block(name, range(first, first + 1 + len(others))))
    return tuple(found)
