"""Rows of tokens: the records of files as a model takes them, and batches that are padded to their longest row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from offload.finetune.corpus.packing import Document

IGNORED = -100
"""Label of a token that does not count, as in torch's cross entropy."""

_T = TypeVar("_T")


class Row(NamedTuple):
    """A row of tokens of one record."""

    ids: np.ndarray
    """(n,) int32"""
    labels: np.ndarray
    """(n,) int32; -100 for tokens that do not count."""

    @property
    def counted(self) -> int:
        """Tokens whose likelihood counts: those with a label, but the first, which nothing precedes."""
        return int((self.labels[1:] != IGNORED).sum())


def rows_of(document: Document, length: int) -> list[Row]:
    """Returns the rows of a record, each of at most `length` tokens.

    A text is cut into windows, of which the next begins with the last token of the one before: so each token but the
    first counts once. A chat or a completion is one row, of its first tokens.

    Args:
        document: tokens of the record.
        length: most tokens of a row, at least 2.
    """
    # The label of a row's first token is ignored by the shift of the loss, as nothing precedes that token.
    labels = np.where(document.learned, document.ids, np.int32(IGNORED))
    last = max(len(document.ids) - 1, 1) if document.divisible else 1
    starts = range(0, last, length - 1)
    return [Row(document.ids[start : start + length], labels[start : start + length]) for start in starts]


def in_groups(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    """Yields lists of `size` items, the last of which may be shorter."""
    group: list[_T] = []
    for item in items:
        group.append(item)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def padded(rows: Sequence[np.ndarray], fill: int, left: bool = False) -> torch.Tensor:
    """Returns rows as (rows, longest) int64, padded with `fill` behind each row, or before it if `left`."""
    longest = max(len(row) for row in rows)
    found = np.full((len(rows), longest), fill, np.int64)  # embeddings take no int32 on every device
    for at, row in enumerate(rows):
        found[at, longest - len(row) :] = row if left else found[at, longest - len(row) :]
        if not left:
            found[at, : len(row)] = row
    return torch.from_numpy(found)
