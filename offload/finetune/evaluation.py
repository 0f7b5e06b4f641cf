"""The loss of `offload train` on sequences that it does not learn from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

MOST = 16
"""Sequences that are held out at most: some thousands of tokens tell of a trend, and cost few forwards."""
_SHARE = 20
"""One of so many sequences is held out."""
_IGNORED = -100  # of torch's cross entropy


def choose(count: int) -> np.ndarray:
    """(k,) which of `count` sequences are held out, evenly spread: one in twenty, at most 16."""
    k = min(count // _SHARE, MOST)
    return (np.arange(k) * count // max(k, 1) + count // max(2 * k, 1)).astype(int)


class Evaluation(NamedTuple):
    """What an evaluation has found, after so many steps."""

    step: int
    loss: float
    """The mean over the tokens that are learned."""
    seconds: float

    def line(self) -> dict[str, Any]:
        """What the log has of it."""
        return {"step": self.step, "eval_loss": self.loss, "eval_seconds": self.seconds}


class HeldOut:
    """Sequences to evaluate on, in batches; of several ranks each has a share of every batch."""

    def __init__(self, inputs: Mapping[str, np.ndarray], size: int, rank: int = 0, world_size: int = 1) -> None:
        """`inputs` are what a model is given, (n, length) each, with labels of -100 where nothing is learned."""
        self._inputs, self._size, self._rank, self._world_size = inputs, size, rank, world_size
        self.count = len(inputs["labels"])
        self.largest_id = int(inputs["input_ids"].max())

    def batches(self) -> Iterator[tuple[dict[str, torch.Tensor], int]]:
        """Batches of this rank, and how many of their tokens count.

        Every rank has as many, since all of them take part in a forward: one that has no rows left gets a row again,
        of which nothing counts.
        """
        for begin in range(0, self.count, self._size * self._world_size):
            first = begin + self._rank * self._size
            rows = slice(first, min(first + self._size, self.count)) if first < self.count else slice(0, 1)
            inputs = {name: torch.from_numpy(array[rows].astype(np.int64)) for name, array in self._inputs.items()}
            counted = int((inputs["labels"][:, 1:] != _IGNORED).sum()) if first < self.count else 0
            yield inputs, counted

    def loss(self, loss_of: Callable[[dict[str, torch.Tensor]], float], mean: Callable[[float], float]) -> float:
        """The mean loss of a token.

        Args:
            loss_of: the mean loss of a batch.
            mean: the mean over ranks.
        """
        total, tokens = 0.0, 0
        for inputs, counted in self.batches():
            found = loss_of(inputs)
            if counted:  # without a token to learn there is no mean
                total, tokens = total + found * counted, tokens + counted
        return mean(total) / mean(float(tokens))
