"""Sums of a shard's gradients over the replicas of the model.

    ranks of a replica: exchange ─► each adds up its shard in fp32 ─► ranks with the same shard: all-reduce

The first part, within a replica, is complete when the second begins. The second is under way beside the backward of
the next unit, if `overlap_comm` is on: it is the part that leaves a machine. With codes (`payload.gradients`) each rank
receives the codes of all sums of its shard instead, and adds their values up in the order of the replicas. A rank that
is a replica by itself has nothing to add up first: its fp32 gradients are all-reduced where they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from offload.engine.distributed.payload.gradients import values_of
from offload.engine.distributed.process_group import Ranks
from offload.engine.distributed.work import Work
from offload.kernels.blocks import quantize
from offload.layout.placement import CHUNK
from offload.layout.tiers import CODES


class ReplicaSum(NamedTuple):
    """A sum that has begun."""

    rows: torch.Tensor
    """(1, numel) fp32, the sum over all ranks once `work` is done; or (replicas, bytes) of codes of their sums."""
    work: Work


class ReplicaSums:
    """Memory of sums that are under way."""

    def __init__(self, ranks: Ranks, memory: Sequence[torch.Tensor], codes: Sequence[torch.Tensor]) -> None:
        """Takes over the memory.

        Args:
            ranks: all ranks.
            memory: for each sum that may be under way, (numel of the largest shard of a unit,) fp32 on the device; with
                codes or in place one for all.
            codes: for each sum that may be under way the memory of the codes of all replicas; none without codes.
        """
        self._ranks = ranks
        self._memory, self._codes = deque(memory), deque(codes)
        """That of the oldest sum first."""

    def begin_in_place(self, rows: torch.Tensor | None, numel: int) -> ReplicaSum:
        """Starts the sum over the replicas of the gradients of ranks each of which is one, in their own memory.

        Args:
            rows: (1, numel), in fp32; None for a rank without a gradient, no earlier sum of which may be under way.
            numel: elements of the unit.
        """
        if rows is None:
            rows = self._memory[0][:numel].zero_().view(1, -1)
        return ReplicaSum(rows, self._ranks.all_reduce(rows[0]))

    def begin(self, received: torch.Tensor, numel: int) -> ReplicaSum:
        """Adds up the rows of `received` in their order, and starts the sum over the replicas.

        Every rank calls this, also where no rank of its replica has a gradient.

        Args:
            received: (ranks of this replica that have gradients, ...), values or codes; not read any more once compute
                is ordered behind what the calling thread has started.
            numel: elements of the shard.
        """
        total = self._memory[0][:numel]
        self._memory.rotate(-1)
        if not len(received):
            total.zero_()
        # In chunks, so that the values of codes need little memory.
        for first in range(0, numel, CHUNK):
            part = total[first : first + CHUNK]
            for row in received[:1]:
                part.copy_(values_of(row, first, first + len(part)))
            for row in received[1:]:
                part += values_of(row, first, first + len(part))
        if not self._codes:
            return ReplicaSum(total.view(1, -1), self._ranks.all_reduce(total))
        mesh, width = self._ranks.mesh, CODES.stored_nbytes(numel)
        everyone = self._codes[0][: mesh.replicas * width]
        self._codes.rotate(-1)
        own = everyone.view(mesh.replicas, width)[mesh.replica_of(self._ranks.rank)]
        quantize(CODES, total, own)
        return ReplicaSum(everyone.view(mesh.replicas, width), self._ranks.gather_sums(everyone, own))
