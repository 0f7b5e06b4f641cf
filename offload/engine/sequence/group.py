"""Sequence parallelism beside ZeRO: groups of ranks that share each sequence, among all ranks that share the states.

    four ranks, "sequence_parallel_size": 2     part 0     part 1

                                     group 0    rank 0     rank 1    the same samples, all-to-alls round attention
                                     group 1    rank 2     rank 3    other samples

The ranks of a group follow each other, as torchrun numbers those of a machine: their link should be the fastest. ZeRO
divides states over all ranks, and a gradient is the mean over all of them, with one rule: the loss of each rank is that
of the whole sequence, and its backward crosses the ranks of the group. So the mean over n ranks is the mean over the
n / size different losses.

**No deadlock.** The thread that runs the model makes all collectives, those of groups and those of ZeRO, and every rank
of a group runs the same program. An exchange is no round of agreement: a rank that waits in one serves nobody. So
experts that are units, of which ranks use different ones, are refused (`checks.check_units`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from offload.distributed.process_group import Communication, Kind, Ranks
from offload.errors import ConfigError, UsageError
from offload.sizes import count_of


@dataclass(frozen=True, kw_only=True)
class SequenceParallel:
    """This rank's place in its group."""

    everyone: Ranks
    """All ranks."""
    group: Ranks
    """The ranks that share each sequence, in the order of its parts."""

    @property
    def size(self) -> int:
        """Number of parts of a sequence."""
        return self.group.size

    @property
    def part(self) -> int:
        """Number of this rank's part."""
        return self.group.rank

    @property
    def data_rank(self) -> int:
        """Number of this rank's group, whose samples are its own."""
        return self.everyone.rank // self.size

    @property
    def data_ranks(self) -> int:
        """Number of groups."""
        return self.everyone.size // self.size

    @property
    def sent(self) -> Communication:
        """What this rank has sent, in all collectives."""
        return self.everyone.sent.plus(self.group.sent)

    def exchange(self, sent: torch.Tensor) -> torch.Tensor:
        """Returns the rows that the ranks of the group have for this one. Collective of the group.

        Args:
            sent: (size, ...) contiguous on the device; row r is for rank r.

        Returns:
            (size, ...), row r from rank r; filled once compute that the calling thread starts from now on runs.
        """
        received = torch.empty_like(sent)
        # Rows of equal length, one for each rank: the exchange of ZeRO's gradients, with a message from everyone.
        rows = received.view(self.size, -1), sent.view(self.size, -1)
        self.group.exchange(*rows, range(self.size), Kind.SEQUENCE).order_compute()
        return received

    def check_same_batch(self, facts: list[int]) -> None:
        """Compares what describes the batch on each rank of the group. Collective of the group.

        Raises:
            UsageError: on all ranks of the group, if they have different batches.
        """
        # Every rank compares all with its own, so that all raise, or none.
        for rank, others in zip(self.group.members, self.group.collect(facts, "compare their batches"), strict=True):
            if others != facts:
                raise UsageError(
                    f"ranks {self.everyone.rank} and {rank} share each sequence (sequence_parallel_size is "
                    f"{self.size}), and called the model with different batches; give both the whole of one batch: a "
                    f"sampler of your own takes num_replicas={self.data_ranks} and rank=(the rank) // {self.size}, as "
                    "training_data= does"
                )

    def sum_of(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the sum of a tensor of one element over the group, the same bits on each rank. Differentiable."""
        # Each rank sends its value to all, and adds up in the order of ranks: an all-reduce promises no order, and
        # losses that differ in the last bit would be different losses in the logs of two ranks.
        rows = value.reshape(1).expand(self.size).contiguous()
        return all_to_all(self, rows).sum().view(value.shape)


class _AllToAll(torch.autograd.Function):
    """An exchange of rows, whose backward sends the gradient of each row back to the rank that it came from."""

    @staticmethod
    def forward(ctx: Any, parallel: SequenceParallel, rows: torch.Tensor) -> torch.Tensor:
        ctx.parallel = parallel
        return parallel.exchange(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        # What came from rank r goes back to rank r: the transpose of an exchange is the same exchange.
        return None, ctx.parallel.exchange(gradient.contiguous())


def all_to_all(parallel: SequenceParallel, rows: torch.Tensor) -> torch.Tensor:
    """Returns the rows that the ranks of a group have for this one, as a function of autograd. Collective.

    Args:
        parallel: the group.
        rows: (size, ...) contiguous on the device; row r is for rank r.
    """
    received: torch.Tensor = _AllToAll.apply(parallel, rows)  # type: ignore[no-untyped-call]
    return received


def form_groups(everyone: Ranks | None, size: int, tensor_parallel: bool) -> SequenceParallel | None:
    """Divides all ranks into groups that share sequences. Collective.

    Args:
        everyone: all ranks; None if there is only one.
        size: the config's "sequence_parallel_size".
        tensor_parallel: True if the model is divided by tensor parallelism.

    Returns:
        The place of this rank; None if no sequence is divided.

    Raises:
        ConfigError: on all ranks, if the ranks cannot be divided into such groups.
    """
    ranks = 1 if everyone is None else everyone.size
    # Compared first, and by ranks that share no sequence too: groups of different sizes would wait for each other.
    sizes = [size] if everyone is None else everyone.share(size, "compare their sequence parallelism")
    for rank, other in enumerate(sizes):
        if other != sizes[0]:
            raise ConfigError(
                f"the sequence_parallel_size of rank {rank} and of rank 0 differ: {other}, not {sizes[0]}; "
                "give every rank the same config"
            )
    if size == 1:
        return None
    if ranks % size:
        raise ConfigError(
            f"sequence_parallel_size is {size}, the number of ranks that share each sequence, and "
            f"{count_of(ranks, 'rank')} cannot be divided into such groups: set it to a divisor of {ranks}"
        )
    if tensor_parallel:
        raise ConfigError(
            f"sequence_parallel_size is {size}, and the model is divided by tensor parallelism: an engine knows one of "
            "the two; leave sequence_parallel_size out, or give a model before parallelize_module"
        )
    assert everyone is not None
    groups = [list(range(first, first + size)) for first in range(0, ranks, size)]
    # In one replica each, whatever "mics_shard_size" says of all ranks.
    group = everyone.divided(groups, -1)
    assert group is not None
    return SequenceParallel(everyone=everyone, group=group)
