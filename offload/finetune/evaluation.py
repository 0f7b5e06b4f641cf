"""The evaluation of `offload train`: the loss on held-out sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

MOST = 16
"""Upper limit of held-out sequences: a few thousand tokens show a trend and cost few forwards."""
_SHARE = 20
"""One sequence in this many is held out."""
_IGNORED = -100  # of torch's cross entropy


def choose(count: int) -> np.ndarray:
    """Returns the indices of held-out sequences, (k,), evenly spread over `count`: one in twenty, at most 16."""
    k = min(count // _SHARE, MOST)
    return (np.arange(k) * count // max(k, 1) + count // max(2 * k, 1)).astype(int)


class Evaluation(NamedTuple):
    """Result of an evaluation after `step` steps."""

    step: int
    loss: float
    """Mean over all tokens whose label is not -100."""
    seconds: float

    def line(self) -> dict[str, Any]:
        """Returns the evaluation's line for the log."""
        return {"step": self.step, "eval_loss": self.loss, "eval_seconds": self.seconds}


class HeldOut:
    """Batches of held-out sequences. Each rank evaluates its own rows of every batch."""

    def __init__(self, inputs: Mapping[str, np.ndarray], size: int, rank: int = 0, world_size: int = 1) -> None:
        """Stores the arrays by reference.

        Args:
            inputs: keyword arguments of the model, (n, length) each; labels are -100 for tokens that do not count.
            size: rows of a batch on each rank.
            rank: this rank.
            world_size: number of ranks.
        """
        self._inputs, self._size, self._rank, self._world_size = inputs, size, rank, world_size
        self.count = len(inputs["labels"])
        self.largest_id = int(inputs["input_ids"].max())

    def batches(self) -> Iterator[tuple[dict[str, torch.Tensor], int]]:
        """Yields batches of this rank, each with the number of tokens that count.

        Every rank yields the same number of batches, since a forward gathers weights from all ranks. A rank that has no
        rows left yields the first row, of which no token counts then.
        """
        for begin in range(0, self.count, self._size * self._world_size):
            first = begin + self._rank * self._size
            rows = slice(first, min(first + self._size, self.count)) if first < self.count else slice(0, 1)
            inputs = {name: torch.from_numpy(array[rows].astype(np.int64)) for name, array in self._inputs.items()}
            counted = int((inputs["labels"][:, 1:] != _IGNORED).sum()) if first < self.count else 0
            yield inputs, counted

    def loss(self, loss_of: Callable[[dict[str, torch.Tensor]], float], mean: Callable[[float], float]) -> float:
        """Returns the mean loss over all counted tokens of all ranks. All ranks must call together.

        Args:
            loss_of: returns the mean loss of a batch.
            mean: returns the mean of a number over ranks; a collective.
        """
        total, tokens = 0.0, 0
        for inputs, counted in self.batches():
            found = loss_of(inputs)
            if counted:  # the mean loss of no tokens is NaN
                total, tokens = total + found * counted, tokens + counted
        return mean(total) / mean(float(tokens))
