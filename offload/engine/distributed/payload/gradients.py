"""Gradients on their way between ranks, as values or as codes of 8 bits (qgZ of ZeRO++, arXiv 2306.10209).

    values of a unit ─► codes ─► exchange ─► codes from each rank ─► values in fp32, added in rank order

A gradient becomes codes once, on the rank that has computed it, and the sum is not rounded again. A block of 128 values
with inf or NaN arrives as NaN, so an overflow on one rank is seen by the rank that adds up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from offload.engine.distributed.work import Work
from offload.kernels.blocks import dequantize, quantize
from offload.layout.tiers import CODES, Reduction


class Exchange(NamedTuple):
    """A reduction that has begun, and whose values are not added up."""

    unit: int
    received: torch.Tensor
    """(contributing ranks, or 1 for a sum over replicas; numel of this rank's partition, or the bytes of its codes)."""
    sent: torch.Tensor | None
    """Memory that holds what this rank has sent; None if it is no contributor, or the memory is free already."""
    work: Work


class ExchangeMemory:
    """Memory of exchanges that are under way: what is sent of a unit, and what is received."""

    def __init__(
        self,
        reduction: Reduction,
        largest: int,
        rounded: Sequence[torch.Tensor],
        keep: Callable[[int], torch.Tensor],
    ) -> None:
        """Takes the memory, a tensor for each exchange that may be under way.

        Args:
            reduction: what is sent, and how many exchanges may be under way.
            largest: elements of the gradients of the largest unit, over all ranks.
            rounded: memory into which values are rounded before they are sent; none if they are sent as they are.
            keep: allocates bytes of device memory.
        """
        self.form, nbytes = reduction.form, reduction.sent_nbytes(largest)
        dtype = reduction.dtype if self.form is None else torch.uint8
        # Gradients of any dtype become codes.
        self._sent = deque([keep(nbytes) for _ in range(reduction.coded)] or rounded)
        self._received = deque(keep(nbytes).view(dtype) for _ in range(reduction.received))
        """That of the oldest exchange first, as in `_sent`."""

    def send(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the rows that are sent for `values`, (shards, numel). Compute orders the memory's next use."""
        if not self._sent:
            return values
        # Ordered behind the exchange that sent from this memory before, as all additions are.
        memory = self._sent[0]
        self._sent.rotate(-1)
        if self.form is None:
            return memory[: values.numel()].view_as(values).copy_(values)
        # A shard is a whole number of blocks, so the codes of all rows are those of each.
        rows = memory[: self.form.stored_nbytes(values.numel())]
        quantize(self.form, values.view(-1), rows)
        return rows.view(len(values), -1)

    def receive(self, senders: int, numel: int) -> torch.Tensor:
        """Returns memory for the rows of `numel` elements that come from the ranks, (senders, ...)."""
        memory = self._received[0]
        self._received.rotate(-1)
        width = numel if self.form is None else self.form.stored_nbytes(numel)
        return memory[: senders * width].view(senders, width)


def values_of(row: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    """Returns elements [first, stop) of a row that came from a rank: a view, or of codes (uint8) new values in fp32."""
    if row.dtype is not torch.uint8:
        return row[first:stop]
    start = first // CODES.values * CODES.values
    numel = -(-(stop - start) // CODES.values) * CODES.values
    values = torch.empty(numel, dtype=torch.float32, device=row.device)
    at = start // CODES.values * CODES.nbytes
    dequantize(CODES, row[at : at + CODES.stored_nbytes(numel)], values)
    return values[first - start : stop - start]


def mean_of(received: torch.Tensor, first: int, stop: int, ranks: int, in_place: bool) -> torch.Tensor:
    """Returns the mean over `ranks` of elements [first, stop) of what some of them sent, in fp32.

    The rows are added up in the order of the ranks, so that every run of the same ranks gives the same bits.

    Args:
        received: (contributing ranks, ...), values or codes.
        first: first element.
        stop: end of the elements.
        ranks: number of all ranks.
        in_place: True if the mean may take the place of the first row's values, where these are fp32: new memory costs
            more than the arithmetic on it. Otherwise it is new memory.
    """
    # Each operation is a pass over memory, so nothing is copied before it is added or divided.
    row, *others = [values_of(row, first, stop) for row in received]
    out = row if in_place and row.dtype is torch.float32 else None
    if not others:
        return torch.div(row.to(torch.float32), ranks, out=out)
    total = torch.add(row.to(torch.float32), others[0], out=out)
    for other in others[1:]:
        total += other
    total /= ranks
    return total


def zero_between(memory: torch.Tensor, ranges: Iterable[tuple[int, int]]) -> None:
    """Zeroes the elements of `memory` that are in none of `ranges`, which have a first element and an end."""
    stop = 0
    for start, end in sorted(ranges):
        memory[stop:start].zero_()
        stop = end
    memory[stop:].zero_()
