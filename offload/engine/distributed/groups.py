"""The process groups of ranks: for messages between hosts, and for weights and gradients between devices.

Groups are made for *divisions* of all processes: one of all, or the columns of tensor parallelism.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from offload.engine.distributed.mesh import Mesh


class DeviceGroups(NamedTuple):
    """One rank's groups, None where they would have this rank alone. They are those of a two-dimensional mesh."""

    replica: Any
    """The ranks of this rank's replica."""
    across: Any
    """The ranks that hold the same shard."""

    @property
    def all(self) -> list[Any]:
        """Both groups, as far as there are any."""
        return [group for group in self if group is not None]


LONG = datetime.timedelta(days=7)
"""Timeout of groups of gloo. A rank may evaluate alone for hours; the heartbeat shows whether it lives."""


def make_control(divisions: Sequence[Sequence[int]]) -> Any:
    """Creates a group for messages in each of `divisions`, and returns this process's. All processes call this."""
    return _own([list(members) for members in divisions], "gloo", LONG)


def make_groups(
    mesh: Mesh, divisions: Sequence[Sequence[int]], backend: str, timeout: datetime.timedelta | None
) -> DeviceGroups:
    """Creates the groups of all divisions, and returns this rank's. All processes call this at the same time.

    Args:
        mesh: the arrangement of the ranks of each division.
        divisions: for each, its ranks by their number in torch's default group; the same list on every process.
        backend: name of the backend.
        timeout: that of a collective; None for the backend's default.
    """

    def own(groups: list[list[int]]) -> Any:
        return _own([[members[rank] for rank in group] for members in divisions for group in groups], backend, timeout)

    return DeviceGroups(
        None if mesh.shards == 1 else own(mesh.replica_groups), None if mesh.replicas == 1 else own(mesh.shard_groups)
    )


def _own(groups: list[list[int]], backend: str, timeout: datetime.timedelta | None) -> Any:
    """Creates `groups`, and returns the one of this process."""
    # Not by `init_device_mesh`: where a dimension has all ranks, it takes torch's default group, in which the user's
    # own messages are, and older versions of torch take no timeout there.
    return dist.new_subgroups_by_enumeration(groups, timeout=timeout, backend=backend)[0]


def gather_into(everyone: torch.Tensor, mine: torch.Tensor, group: Any) -> Any:
    """Starts an all-gather of `mine` into `everyone`."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name up to torch 2.12
    return gather(everyone, mine, group=group, async_op=True)
