"""The way in which several ranks reduce their gradients, and the device memory that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offload.kernels.blocks import BLOCK_FORMATS, BlockFormat
from offload.sizes import align_up

CODES = BLOCK_FORMATS["int8"]
"""Format of the codes that ranks send. Every shard of a unit is a whole number of its blocks."""
MOST_CODED_REPLICAS = 7
"""Replicas up to which the codes of all sums, 130/128 bytes an element to each of r - 1 ranks, are fewer bytes than an
all-reduce in fp32, which sends 8 (r - 1) / r of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """The way in which several ranks reduce their gradients."""

    dtype: torch.dtype
    """Dtype of the gradients that ranks send each other, or from which they make codes."""
    exchanges: int = 1
    """Units whose reductions may be under way at a time."""
    buckets: int = 1
    """Buffers for gradients of `dtype` that wait to be sent; 0 if the sums of whole gradients themselves do."""
    whole: bool = False
    """True if each rank adds up the whole gradients of a step's micro-batches before they are reduced."""
    replicas: int = 1
    """Replicas of the model, which add up their sums in fp32 (`engine.distributed.replica_sums`)."""
    form: BlockFormat | None = None
    """Format of the codes that ranks of a replica send; None for values of `dtype`."""
    coded_sums: bool = False
    """True if replicas send codes of their sums."""
    in_place: bool = False
    """True if each rank is a replica by itself, whose gradients are summed over the replicas in their own memory."""

    @property
    def received(self) -> int:
        """Buffers for the gradients that a rank receives. Replicas have added them up before the next exchange."""
        if self.in_place:
            return 0
        return self.exchanges if self.replicas == 1 else 1

    @property
    def coded(self) -> int:
        """Buffers for the codes that a rank sends."""
        return 0 if self.form is None else self.exchanges

    @property
    def sums(self) -> int:
        """Buffers for sums over replicas.

        One that has become codes is free again. Sums in place need one for the zeros of a rank without a gradient.
        """
        if self.replicas == 1:
            return 0
        return 1 if self.coded_sums or self.in_place else self.exchanges

    def sum_codes(self, shard_numels: Sequence[int]) -> list[int]:
        """Returns the bytes of each buffer for the codes of all replicas' sums of a shard.

        Args:
            shard_numels: elements of each unit that this rank updates.
        """
        nbytes = self.replicas * CODES.stored_nbytes(max(shard_numels))
        return [nbytes] * self.exchanges if self.coded_sums else []

    def sent_nbytes(self, numel: int) -> int:
        """Returns the bytes in which the gradients of `numel` elements are sent."""
        return numel * self.dtype.itemsize if self.form is None else self.form.stored_nbytes(numel)

    def buffer_nbytes(self, unit_numels: Sequence[int], shard_numels: Sequence[int]) -> int:
        """Returns the bytes of all buffers, without sums of whole gradients.

        Args:
            unit_numels: elements of each unit that train, over all ranks.
            shard_numels: those that this rank updates.
        """
        largest = max(unit_numels)
        # What is received and what is coded has the bytes in which it is sent; a bucket has those of values.
        through = (self.received + self.coded) * align_up(self.sent_nbytes(largest))
        sums = self.sums * align_up(max(shard_numels) * torch.float32.itemsize)
        sums += sum(map(align_up, self.sum_codes(shard_numels)))
        return self.buckets * align_up(largest * self.dtype.itemsize) + through + sums
