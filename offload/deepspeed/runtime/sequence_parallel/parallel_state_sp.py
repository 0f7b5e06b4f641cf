"""The groups of sequence parallelism, which DeepSpeed calls an `mpu`: `deepspeed.initialize` takes them.

An engine makes groups of its own of the same ranks, so that the messages of a script are apart from its own.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from offload.deepspeed.comm import get_rank, get_world_group, get_world_size, init_distributed
from offload.errors import UsageError


class SequenceGroups:
    """Groups of `sequence_parallel_size` ranks, which follow each other."""

    def __init__(self, sequence_parallel_size: int) -> None:
        """Creates the groups. All ranks call this.

        Args:
            sequence_parallel_size: ranks that share a sequence, a divisor of their number.

        Raises:
            UsageError: if it is none.
        """
        init_distributed()
        size, ranks = sequence_parallel_size, get_world_size()
        if isinstance(size, bool) or not isinstance(size, int) or size < 1 or ranks % size:
            raise UsageError(
                f"sequence_parallel_size expects a divisor of the number of ranks, {ranks}, got {size!r}; start a "
                "multiple of it, or set it to 1"
            )
        groups = [list(range(first, first + size)) for first in range(0, ranks, size)]
        self._size, self._group = size, dist.new_subgroups_by_enumeration(groups)[0]

    def get_sequence_parallel_group(self) -> Any:
        """Returns the group of ranks that share sequences with this one."""
        return self._group

    def get_sequence_parallel_world_size(self) -> int:
        """Returns the number of ranks that share a sequence."""
        return self._size

    def get_sequence_parallel_rank(self) -> int:
        """Returns the part of each sequence that this rank has."""
        return get_rank() % self._size

    def get_sequence_data_parallel_group(self) -> Any:
        """Returns the group over which ZeRO divides states: that of all ranks."""
        return get_world_group()

    def get_sequence_data_parallel_world_size(self) -> int:
        """Returns the number of ranks over which ZeRO divides states."""
        return get_world_size()

    def get_sequence_data_parallel_rank(self) -> int:
        """Returns the number of this rank among those over which ZeRO divides states."""
        return get_rank()

    def get_data_parallel_world_size(self) -> int:
        """Returns the number of groups with samples of their own."""
        return get_world_size() // self._size

    def get_data_parallel_rank(self) -> int:
        """Returns the number of this rank's group."""
        return get_rank() // self._size


_formed: list[SequenceGroups] = []
"""The groups of this process: none, or one."""


def form(sequence_parallel_size: int) -> SequenceGroups:
    """Returns the groups of this size, which a script makes once. All ranks call this.

    Args:
        sequence_parallel_size: ranks that share a sequence.

    Raises:
        UsageError: if it divides the ranks unevenly, or there are groups of another size.
    """
    if _formed and _formed[0].get_sequence_parallel_world_size() != sequence_parallel_size:
        raise UsageError(
            f"sequence_parallel_size is {sequence_parallel_size}, and this process has groups of "
            f"{_formed[0].get_sequence_parallel_world_size()} ranks for sequences already; call "
            "register_with_transformers with one size"
        )
    if not _formed:
        _formed.append(SequenceGroups(sequence_parallel_size))
    return _formed[0]


def formed() -> SequenceGroups | None:
    """Returns the groups of this process; None if no script has made any."""
    return _formed[0] if _formed else None


def forget() -> None:
    """Destroys the groups, if there are any."""
    while _formed:
        dist.destroy_process_group(_formed.pop().get_sequence_parallel_group())
