"""Tensor parallelism beside ZeRO: the processes as a grid, and what is agreed on over all of it.

              coordinate 0    coordinate 1         a row       computes one layer together, on the same batch: the
    ZeRO 0    process 0       process 1                        user's collectives, in forward and backward
    ZeRO 1    process 2       process 3            a column    has the same shards, and other batches: ZeRO divides
                                                               states, gathers weights and reduces gradients in it

A column is a run of its own for everything that this package divides over ranks, with replicas of its own (`mesh`).
Over the whole grid the processes compare their configs, commit in step, and add up the norm.

**No deadlock.** Collectives of a row and of a column are never under way at the same time on one process, since all of
them belong to the thread that runs the model. Every process runs the same program, so that each of two processes that
meet in a collective has left behind the same collectives: none waits for one that waits for it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload.engine.callbacks import GradientStats
from offload.engine.distributed.communication import Communication
from offload.engine.distributed.process_group import Ranks
from offload.errors import ConfigError, RankError, UsageError
from offload.layout.flat_layout import UnitLayout

_FACTS = struct.Struct("<dqqq")  # sum of squares, micro-batches, steps, checksum of the optimizer's settings


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """This process's place in the grid."""

    everyone: Ranks
    """All processes."""
    zero: Ranks | None
    """The ranks of this process's column; None if it is alone there."""
    row: tuple[int, ...]
    """The processes that compute together with this one, by their rank in `everyone`, in the order of coordinates."""
    sharded: frozenset[str]
    """Names of the parameters of which each process of a row has another part."""

    @property
    def size(self) -> int:
        """Number of processes in a row."""
        return len(self.row)

    @property
    def coordinate(self) -> int:
        """Position of this process in its row."""
        return self.row.index(self.everyone.rank)

    @property
    def suffix(self) -> str:
        """The end of the name of a column's run: each column has swap files of its own."""
        return f"-tp{self.coordinate}of{self.size}"

    @property
    def description(self) -> dict[str, int]:
        """The place of a column in the grid, as its swap files contain it."""
        return {"size": self.size, "coordinate": self.coordinate}

    @property
    def sent(self) -> Communication:
        """What this process has sent in the collectives of ZeRO, and over the grid; not the user's own collectives."""
        return self.everyone.sent if self.zero is None else self.everyone.sent.plus(self.zero.sent)

    def is_sharded(self, parameter: str) -> bool:
        """Returns True if each process of a row has another part of the parameter, and False if each has all of it."""
        return parameter in self.sharded

    def counted_elsewhere(self, layouts: Sequence[UnitLayout]) -> frozenset[tuple[int, int]]:
        """Returns the parameters that another process of the row counts in the norm, as (unit, segment).

        All processes of a row have the same gradient of a parameter that is whole on each. The first counts it.
        """
        if self.coordinate == 0:
            return frozenset()
        return frozenset(
            (unit, position)
            for unit, layout in enumerate(layouts)
            for position, segment in enumerate(layout.segments)
            if not self.is_sharded(segment.parameter)
        )

    def step(self, known: GradientStats, micro_batches: int, global_steps: int, settings: int) -> GradientStats:
        """Returns the statistics of a step with the sum of squares of a row. Collective of all processes.

        Args:
            known: statistics of this process's column, without what is counted elsewhere.
            micro_batches: micro-batches since the last step.
            global_steps: steps so far.
            settings: checksum of the optimizer's settings.

        Raises:
            UsageError: on all processes, if they differ in any of the three numbers.
        """
        content = _FACTS.pack(known.sum_squares, micro_batches, global_steps, settings)
        try:
            rows = self.everyone.collect_bytes(content, "agree on a step")
        except BaseException:
            # By a Ctrl-C this process has left the others in the middle of a collective: they learn of it, and end.
            self.everyone.fail("it was interrupted while it waited for the other processes")
            raise
        facts = [_FACTS.unpack(row) for row in rows]
        for what, column in (("micro-batches", 1), ("steps", 2), ("settings of the optimizer (checksums)", 3)):
            numbers = [fact[column] for fact in facts]
            if len(set(numbers)) > 1:
                raise UsageError(
                    f"the processes of tensor parallelism differ in their {what}: {', '.join(map(str, numbers))}; all "
                    "must run the same loop"
                )
        # In the order of coordinates, so that every process of a row computes the same bits. Rows have equal numbers.
        return replace(known, sum_squares=sum(facts[process][0] for process in self.row))

    def end(self, remove: bool) -> None:
        """Returns when every process is about to close its engine. Collective of all processes.

        Raises:
            RankError: on all processes, if only some are about to delete their swap files (`remove`).
        """
        everyone = self.everyone.share(remove, "close its engine")
        if len(set(everyone)) > 1:
            deletes = [process for process, removes in enumerate(everyone) if removes]
            raise RankError(
                f"processes {deletes} of tensor parallelism delete their swap files, the others keep theirs: all must "
                "do the same; all are kept"
            )


def form_grid(everyone: Ranks | None, row: Sequence[int], sharded: frozenset[str]) -> TensorParallel | None:
    """Divides all processes into rows and columns. Collective.

    Args:
        everyone: all processes; None if there is only one.
        row: the processes of this one's row, by their rank; empty without tensor parallelism.
        sharded: names of the parameters of which this process has a part.

    Returns:
        The grid; None without tensor parallelism, and for a single process, whose part is all there is.

    Raises:
        ConfigError: on all processes, if the rows are no grid, or columns cannot be divided into replicas.
    """
    if everyone is None:
        return None
    rows = [tuple(each) for each in everyone.share(list(row), "compare their tensor parallelism")]
    if not any(rows):
        return None
    distinct = sorted(set(rows))
    in_order = sorted(process for each in distinct for process in each)
    if in_order != list(range(everyone.size)) or len({len(each) for each in distinct}) > 1:
        raise ConfigError(
            f"tensor parallelism divides {everyone.size} processes into {distinct}; expected groups of one size, with "
            'each process in one of them: take the mesh["tp"] of init_device_mesh(device, (n, m), '
            'mesh_dim_names=("dp", "tp")) over all processes'
        )
    wrong = [process for process, each in enumerate(rows) if process not in each]
    if wrong:
        raise ConfigError(f"process {wrong[0]} is not in the group {list(rows[wrong[0]])} of its tensor parallelism")
    mine = rows[everyone.rank]
    columns = [[each[coordinate] for each in distinct] for coordinate in range(len(mine))]
    return TensorParallel(everyone=everyone, zero=everyone.divided(columns), row=mine, sharded=sharded)
