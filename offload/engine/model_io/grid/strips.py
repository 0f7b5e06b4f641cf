"""Pure arithmetic of a tensor that is cut along one dimension: which elements of the pieces are those of the whole.

whole (4, 6), cut along 1       a row of the whole has a part of each piece's row; neighbouring rows are read at once
a a a a | b b
a a a a | b b                   elements 8 to 20: the end of row 1, row 2, the begin of row 3
a a a a | b b
a a a a | b b
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Strip(NamedTuple):
    """Elements [start, stop) of one piece, which are the same columns of `rows` rows of the whole."""

    piece: int
    start: int
    stop: int
    at: int
    """Element of the range of the whole at which the first of them is."""
    rows: int


def strips(widths: Sequence[int], start: int, stop: int) -> Iterator[Strip]:
    """Yields the strips that make up elements [start, stop) of the whole.

    Args:
        widths: For each piece the elements between two elements of it that are one row apart: the product of its sizes
            from the dimension of the cut on. Their sum is a row of the whole.
        start: First element.
        stop: End of the elements.
    """
    borders, at = [0, *itertools.accumulate(widths)], start
    row = borders[-1]
    while at < stop:
        number, within = divmod(at, row)
        whole_rows = 0 if within else (stop - at) // row
        # Rows that are there as a whole are one read of each piece; at the ends a read for each part of a row.
        columns = range(row) if whole_rows else range(within, min(row, within + stop - at))
        rows = whole_rows or 1
        for piece, (left, right) in enumerate(itertools.pairwise(borders)):
            first, last = max(left, columns.start), min(right, columns.stop)
            if first < last:
                width = right - left
                begin = number * width + first - left
                end = begin + (rows - 1) * width + last - first
                yield Strip(piece, begin, end, at - start + first - columns.start, rows)
        at += rows * len(columns)
