"""The process groups through which devices exchange weights and gradients."""

from __future__ import annotations

import datetime
from typing import Any, NamedTuple

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


def make_groups(mesh: Mesh, backend: str, timeout: datetime.timedelta | None) -> DeviceGroups:
    """Creates the groups of all ranks, and returns this rank's. All ranks call this at the same time.

    Args:
        mesh: the arrangement of the ranks.
        backend: name of the backend.
        timeout: that of a collective; None for the backend's default.
    """
    if mesh.replicas == 1:
        return DeviceGroups(dist.new_group(backend=backend, timeout=timeout), None)

    # Not by `init_device_mesh`: where a dimension has all ranks, it takes torch's default group, in which the user's
    # own messages are, and older versions of torch take no timeout there.
    def own(groups: list[list[int]]) -> Any:
        return dist.new_subgroups_by_enumeration(groups, timeout=timeout, backend=backend)[0]

    return DeviceGroups(None if mesh.shards == 1 else own(mesh.replica_groups), own(mesh.shard_groups))
