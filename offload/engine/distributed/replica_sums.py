"""Sums of a shard's gradients over the replicas of the model.

    ranks of a replica: exchange ─► each adds up its shard in fp32 ─► ranks with the same shard: all-reduce

The first part, within a replica, is complete when the second begins. The second is under way beside the backward of
the next unit, if `overlap_comm` is on: it is the part that leaves a machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from offload.engine.distributed.process_group import Ranks
from offload.engine.distributed.work import Work


class ReplicaSum(NamedTuple):
    """A sum that has begun."""

    total: torch.Tensor
    """(1, numel) fp32, the sum over all ranks once `work` is done."""
    work: Work


class ReplicaSums:
    """Memory of sums that are under way."""

    def __init__(self, ranks: Ranks, memory: Sequence[torch.Tensor]) -> None:
        """Takes over the memory.

        Args:
            ranks: all ranks.
            memory: for each sum that may be under way, (numel of the largest shard of a unit,) fp32 on the device.
        """
        self._ranks = ranks
        self._memory = deque(memory)
        """That of the oldest sum first."""

    def begin(self, received: torch.Tensor) -> ReplicaSum:
        """Adds up the rows of `received` in their order, and starts the sum over the replicas.

        Every rank calls this, also where no rank of its replica has a gradient.

        Args:
            received: (ranks of this replica that have gradients, numel); not read any more once compute is ordered
                behind what the calling thread has started.
        """
        total = self._memory[0][: received.shape[1]]
        self._memory.rotate(-1)
        total.zero_()
        for row in received:
            total += row
        return ReplicaSum(total.view(1, -1), self._ranks.all_reduce(total))
