"""Gathers of weights within a node, from a secondary partition (hpZ of ZeRO++, arXiv 2306.10209).

    first gather of a unit since weights changed     over all ranks, then each rank keeps its part of the node's copy
    every other gather                               over the ranks of the node, from what they have kept

A secondary partition has the bits of a gather, so a run has those of one without it. It holds from the gather that
fills it to the next call that may change weights. Every rank takes part in all gathers and in all such calls, in one
order (`Agreement`), so all know without a message which of the two a gather is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from offload.engine.distributed.process_group import Ranks
from offload.layout.tiers import Secondary
from offload.swapper.memory.device import Device, Event


class SecondaryShards:
    """The secondary partitions of one rank. One thread at a time may call, that of all collectives."""

    def __init__(self, secondary: Secondary, rank: int, node: Ranks, device: Device, memory: torch.Tensor) -> None:
        """Stores the memory, which contains nothing yet.

        Args:
            secondary: sizes.
            rank: this rank, among all.
            node: the ranks of its node.
            device: the device.
            memory: (secondary.nbytes,) uint8 on the device.
        """
        self._secondary, self._rank, self._node, self._device = secondary, rank, node, device
        ends = list(itertools.accumulate(secondary.unit_nbytes))
        self._units = [memory[end - nbytes : end] for end, nbytes in zip(ends, secondary.unit_nbytes, strict=True)]
        self._filled: set[int] = set()
        """Units whose secondary partition has the weights of now."""

    def gather(
        self,
        unit: int,
        whole: torch.Tensor,
        shard_ranges: Sequence[range],
        uploaded: Event,
        over_all: Callable[[], Event],
    ) -> Event:
        """Fills `whole` with a unit, from the node if its ranks have kept it; for the arguments see `Ranks.gather`.

        Args:
            unit: index of the unit.
            whole: (nbytes,) uint8 on the device.
            shard_ranges: this rank's byte ranges.
            uploaded: event after which these are filled.
            over_all: gathers the unit over all ranks in place of this, and returns the event.
        """
        kept = [self._secondary.range_of(mine, self._rank) for mine in shard_ranges]
        stops = list(itertools.accumulate(map(len, kept)))
        pairs = [
            (whole[part.start : part.stop], self._units[unit][stop - len(part) : stop])
            for part, stop in zip(kept, stops, strict=True)
        ]
        if unit in self._filled:
            # This rank's shard is there already. The gather writes over it, with the same bytes or, where all compute
            # with values of codes, with those.
            return self._node.gather(whole, kept, self._copy(uploaded, pairs))
        filled = self._copy(over_all(), [(target, source) for source, target in pairs])
        self._filled.add(unit)
        return filled

    def forget(self) -> None:
        """Makes the next gather of each unit one over all ranks, since weights may change now."""
        self._filled.clear()

    def _copy(self, after: Event, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Event:
        """Copies the second tensor of each pair into the first, after an event, and returns the event of the copies."""
        # On the upload stream, which orders them behind the gather before and ahead of the one after. On a CPU the
        # calling thread waits for the event and copies.
        with self._device.uploading():
            self._device.wait_event(after)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return self._device.uploaded()


def form_node(ranks: Ranks | None, secondary: Secondary | None) -> Ranks | None:
    """Divides all ranks into nodes, and returns this rank's; None without a secondary partition. Collective."""
    if ranks is None or secondary is None:
        return None
    nodes = [list(range(first, first + secondary.ranks)) for first in range(0, ranks.size, secondary.ranks)]
    return ranks.divided(nodes, -1)
