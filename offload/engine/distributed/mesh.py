"""Arrangement of ranks as replicas of the model, each of which is divided into shards.

    four ranks, "mics_shard_size": 2          shard 0     shard 1

                                  replica 0    rank 0      rank 1     gathers, reduce-scatters
                                  replica 1    rank 2      rank 3     gathers, reduce-scatters
                                                 │           │
                                             all-reduce  all-reduce

This is torch's `init_device_mesh(type, (replicas, shards), mesh_dim_names=("replicate", "shard"))`: the ranks of a
replica follow each other, as torchrun numbers those of a machine. A shard has the number of the rank that holds it in
replica 0. What needs one copy of the states, such as a checkpoint, is done there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from offload.errors import ConfigError
from offload.sizes import count_of


class Mesh(NamedTuple):
    """Numbers of replicas, and of the shards of each."""

    replicas: int = 1
    shards: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.replicas * self.shards

    def shard_of(self, rank: int) -> int:
        """Returns the shard that `rank` holds."""
        return rank % self.shards

    def replica_of(self, rank: int) -> int:
        """Returns the replica to which `rank` belongs."""
        return rank // self.shards

    def replica(self, rank: int) -> range:
        """Returns the ranks of the replica to which `rank` belongs, in the order of their shards."""
        first = rank - self.shard_of(rank)
        return range(first, first + self.shards)

    def shards_among(self, ranks: Iterable[int], rank: int) -> list[int]:
        """Returns the shards of those of `ranks` that are in the replica of `rank`."""
        own = self.replica(rank)
        return [self.shard_of(each) for each in ranks if each in own]

    @property
    def replica_groups(self) -> list[list[int]]:
        """The ranks of each replica."""
        return [list(self.replica(first)) for first in range(0, self.ranks, self.shards)]

    @property
    def shard_groups(self) -> list[list[int]]:
        """The ranks that hold each shard."""
        return [list(range(shard, self.ranks, self.shards)) for shard in range(self.shards)]

    def __str__(self) -> str:
        ranks = count_of(self.ranks, "rank")
        if self.replicas == 1:
            return ranks
        return f"{ranks} ({self.replicas} replicas of {count_of(self.shards, 'shard')})"


def mesh_of(shard_size: int, ranks: int, which: str = "") -> Mesh:
    """Returns the arrangement of `ranks` ranks.

    Args:
        shard_size: the config's "mics_shard_size"; 0 or less for one replica.
        ranks: number of ranks.
        which: words for which ranks they are, behind their number in the error; empty for all.

    Raises:
        ConfigError: if the ranks cannot be divided into replicas of this size.
    """
    if shard_size <= 0:
        return Mesh(shards=ranks)
    if ranks % shard_size:
        raise ConfigError(
            f"zero_optimization.mics_shard_size is {shard_size}, the number of ranks that hold one replica of the "
            f"model, and {count_of(ranks, 'rank')}{which} cannot be divided into such replicas: set it to a divisor "
            f"of {ranks}, or to -1 for one replica"
        )
    return Mesh(ranks // shard_size, shard_size)


def check_same(shards: Sequence[int]) -> None:
    """Raises `ConfigError` if ranks would create different groups, and so wait for each other.

    Args:
        shards: the number of shards of a replica, by the config of each rank.
    """
    for rank, others in enumerate(shards):
        if others != shards[0]:
            raise ConfigError(
                f"the mics_shard_size of rank {rank} and of rank 0 differ: {others}, not {shards[0]}; "
                "give every rank the same model and config"
            )
