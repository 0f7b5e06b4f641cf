"""The secondary partition of the weights, over the ranks of one node, decided from sizes alone: hpZ of ZeRO++.

four ranks, "zero_hpz_partition_size": 2      node 0: ranks 0, 1      node 1: ranks 2, 3

a unit       [      │      │      │      ]
primary      rank 0 │ rank 1 │ rank 2 │ rank 3      in its tier, with its states: what a step updates
secondary    rank 0, rank 2  │ rank 1, rank 3       a copy on the device: what the gathers of a node read
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from offload.config import Config
from offload.errors import BudgetError, ConfigError
from offload.layout.flat_layout import UnitLayout
from offload.sizes import align_up, count_of, format_size


class Secondary(NamedTuple):
    """The secondary partition of a run."""

    ranks: int
    """Number of ranks of a node."""
    shards: int
    """Number of shards of the primary partition, a multiple of `ranks`."""
    unit_nbytes: tuple[int, ...]
    """Bytes of each unit's secondary partition on one rank."""

    @property
    def nbytes(self) -> int:
        """Bytes of the device memory for the secondary partitions of all units on one rank."""
        return align_up(sum(self.unit_nbytes))

    def range_of(self, mine: range, rank: int) -> range:
        """Returns the range that a rank keeps of a region of a unit.

        Args:
            mine: the range of the region in the rank's primary partition.
            rank: the rank.
        """
        start = mine.start - rank * len(mine)
        nbytes = len(mine) * self.shards // self.ranks
        first = start + rank % self.ranks * nbytes
        return range(first, first + nbytes)


def check_node(size: int, ranks: int) -> None:
    """Raises `ConfigError` if `ranks` ranks cannot be divided into nodes of `size`, "zero_hpz_partition_size"."""
    if ranks % size:
        raise ConfigError(
            f"zero_optimization.zero_hpz_partition_size is {size}, the number of ranks of a node, and "
            f"{count_of(ranks, 'rank')} cannot be divided into such nodes: set it to a divisor of {ranks}, or leave it "
            "out"
        )


def secondary_of(config: Config, layouts: Sequence[UnitLayout], itemsize: int, shards: int) -> Secondary | None:
    """Returns the secondary partition; None where it would save nothing: without the key, or if one node has all ranks.

    Args:
        config: the config.
        layouts: the layout of each unit.
        itemsize: bytes of an element of the weights.
        shards: number of ranks.
    """
    size = config.zero_optimization.zero_hpz_partition_size
    if size == 1 or shards <= size:
        return None
    # Both regions of a unit are divided evenly among the ranks, so among those of a node too.
    return Secondary(size, shards, tuple(layout.numel * itemsize // size for layout in layouts))


def check_room(secondary: Secondary | None, least: int, free: int) -> None:
    """Raises `BudgetError` if a device without a budget has no room for the secondary partition.

    Args:
        secondary: the secondary partition; None without one.
        least: bytes of the smallest device arena that works, this partition included.
        free: free bytes of the device.
    """
    if secondary is not None and least > free:
        raise BudgetError(
            f"zero_optimization.zero_hpz_partition_size is {secondary.ranks}, so each rank keeps 1/{secondary.ranks} "
            f"of all weights on its device, {format_size(secondary.nbytes)}, and needs {format_size(least)} there in "
            f"all; {format_size(free)} is free: set it to more ranks of a node, or leave it out"
        )
