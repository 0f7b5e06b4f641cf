"""The check that a model's logits are numbers: a model whose weights contain NaN gives nothing but NaN, in silence."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from offload.errors import NumericsError


def refuse(place: str) -> NumericsError:
    """Returns the error for a record or prompt whose logits are not finite."""
    return NumericsError(
        f"the model's logits are not finite at {place}: its weights contain inf or NaN, or their products overflow in "
        "this dtype; look at the files of its folder, or give another --dtype, such as fp32"
    )


class FiniteLogits:
    """A logits processor of transformers that changes nothing."""

    def __init__(self, places: Sequence[str]) -> None:
        """Takes the places of a batch's prompts, each of which has as many rows."""
        self._places = places

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Returns `scores`, (rows, vocabulary).

        Raises:
            NumericsError: a row contains NaN or inf; -inf stands for tokens that the model must not generate.
        """
        # NaN is its own maximum.
        wrong = ~(scores.amax(-1) < math.inf)
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise refuse(self._places[row * len(self._places) // len(scores)])
        return scores
