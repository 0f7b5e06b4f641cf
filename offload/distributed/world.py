"""The world of one process: all processes that train together, and the group among which ZeRO divides states.

With ZeRO alone, the group contains all processes. A process that trains alone is a world of one. With tensor
parallelism or a pipeline, the processes form a grid:

              coordinate 0    coordinate 1         a row       computes one layer together, on the same batch: the
    ZeRO 0    process 0       process 1                        user's collectives, in forward and backward
    ZeRO 1    process 2       process 3            a column    has the same shards, and other batches: ZeRO divides
                                                               states, gathers weights and reduces gradients in it

With a pipeline, a row contains the processes of all its stages, one stage after the other. A column contains the
processes with the same layers and the same part of each parameter.

Each column is a run of its own, with its own swap files, shards and replicas (`mesh`). The processes of the whole grid
compare their configs, commit the same steps, and add up the norm.

**No deadlock.** Collectives of a row and of a column are never under way at the same time on one process, since all of
them belong to the thread that runs the model. Every process runs the same program, so two processes that meet in a
collective have finished the same collectives before: no process waits for one that waits for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from offload.distributed.agreement import STEP_FACTS
from offload.distributed.process_group import Communication, Ranks
from offload.engine.callbacks import GradientStats
from offload.errors import RankError, UsageError
from offload.layout.flat_layout import UnitLayout


@dataclass(frozen=True, kw_only=True)
class World:
    """All processes that train together, and the position of this process. The default is a world of one."""

    everyone: Ranks = field(default_factory=Ranks)
    """All processes."""
    ranks: Ranks = field(default_factory=Ranks)
    """The processes among which ZeRO divides states: all processes, or in a grid the column of this process."""
    row: tuple[int, ...] = ()
    """Ranks in `everyone` of the processes that compute together with this process; empty without a grid.

    The processes are in the order of pipeline stages, and within a stage in the order of coordinates.
    """
    sharded: frozenset[str] = frozenset()
    """Names of the parameters that the processes of a stage divide."""
    dims: Mapping[str, int] = field(default_factory=dict)
    """The dimension along which each sharded parameter is divided. For Megatron's parameters it is not known."""
    stages: int = 1
    """Number of stages of a pipeline; 1 without a pipeline."""
    positions: tuple[int, ...] = ()
    """Position of each process in its pipeline, by its rank in `everyone`; empty without a pipeline."""
    tied: frozenset[str] = frozenset()
    """Names of the parameters of this process that an earlier stage of its pipeline has too."""
    stage: Ranks = field(default_factory=Ranks)
    """With a pipeline and tensor parallelism, the processes that have the same layers; otherwise this process alone."""
    sequence: Ranks = field(default_factory=Ranks)
    """The ranks that share each sequence, in the order of its parts; without sequence parallelism this rank alone."""
    inputs: Ranks = field(default_factory=Ranks)
    """The ranks that divide the inputs of recomputed blocks: with `partition_activations` those of a row."""
    experts: Ranks = field(default_factory=Ranks)
    """The ranks that own the experts of a layer together, in the experts' order, and send each other tokens.

    Without expert parallelism over ranks with batches of their own, this rank alone.
    """
    expert_shards: Ranks = field(default_factory=Ranks)
    """The ranks that own the same experts, whose states ZeRO divides among them; usually this rank alone."""
    node: Ranks = field(default_factory=Ranks)
    """The ranks that keep a secondary partition of the weights together; without such a partition this rank alone."""

    @property
    def data_rank(self) -> int:
        """Index of this process's samples in a batch. Ranks that share sequences have the same index."""
        return self.ranks.rank // self.sequence.size

    @property
    def data_ranks(self) -> int:
        """Number of processes with samples of their own."""
        return self.ranks.size // self.sequence.size

    @property
    def shares_batches(self) -> bool:
        """True if processes compute batches together. Each process then waits for the others within the batch."""
        return self.divides_model or self.sequence.size > 1 or self.experts.size > 1

    @property
    def divides_model(self) -> bool:
        """True if the processes are a grid: each has a part of the model."""
        return bool(self.row)

    @property
    def tensor_size(self) -> int:
        """Number of processes among which tensor parallelism divides a parameter; 1 without it."""
        return max(1, len(self.row) // self.stages)

    @property
    def coordinate(self) -> int:
        """Position of this process among the processes that divide a parameter."""
        return self.row.index(self.everyone.rank) % self.tensor_size if self.row else 0

    @property
    def position(self) -> int:
        """Position of this process in its pipeline; 0 without one."""
        return self.row.index(self.everyone.rank) // self.tensor_size if self.row else 0

    @property
    def kind(self) -> str:
        """The kinds of parallelism of the grid, for messages."""
        kinds = ("tensor" if self.tensor_size > 1 else "", "pipeline" if self.stages > 1 else "")
        return f"{' and '.join(filter(None, kinds))} parallelism"

    @property
    def suffix(self) -> str:
        """The end of the name of a column's run, because each column has its own swap files."""
        return f"-{self.part}" if self.part else ""

    @property
    def part(self) -> str:
        """The name of a column: its stages, and its part of each divided parameter."""
        return self._part(self.position, self.coordinate)

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of all columns, in the order of stages and then coordinates; empty without a grid."""
        if not self.row:
            return ()
        places = itertools.product(range(self.stages), range(self.tensor_size))
        return tuple(self._part(position, coordinate) for position, coordinate in places)

    def _part(self, position: int, coordinate: int) -> str:
        pipeline = f"pp{position}of{self.stages}" if self.stages > 1 else ""
        tensor = f"tp{coordinate}of{self.tensor_size}" if self.tensor_size > 1 else ""
        return "-".join(filter(None, (pipeline, tensor)))

    @property
    def description(self) -> dict[str, dict[str, int]]:
        """The place of a column in the grid, as its swap files contain it."""
        description: dict[str, dict[str, int]] = {}
        if self.tensor_size > 1:
            description["tensor_parallel"] = {"size": self.tensor_size, "coordinate": self.coordinate}
        if self.stages > 1:
            description["pipeline"] = {"size": self.stages, "position": self.position}
        return description

    @property
    def sent(self) -> Communication:
        """The collectives and bytes that this process has sent, without the user's own collectives."""
        sent = self.everyone.sent
        for group in (self.sequence, self.inputs, self.experts, self.expert_shards):
            sent = sent.plus(group.sent)
        if self.row:
            sent = sent.plus(self.ranks.sent)
        # The ranks of a node send each other only weights.
        return sent.plus(Communication(node_weights=self.node.sent.weights))

    @property
    def replicated(self) -> Ranks:
        """The processes with copies of parameters that tensor parallelism leaves whole; without it this one alone."""
        return self.everyone if self.tensor_size > 1 and self.stages == 1 else self.stage

    def first_of_stage(self, process: int) -> int:
        """Returns the first process that has the same layers as `process`. Both are ranks in `everyone`."""
        return self.positions.index(self.positions[process]) if self.positions else 0

    def is_sharded(self, parameter: str) -> bool:
        """Returns True if the processes of a stage have different parts of a parameter, False if each has all of it."""
        return parameter in self.sharded

    def counted_elsewhere(self, layouts: Sequence[UnitLayout]) -> frozenset[tuple[int, int]]:
        """Returns the parameters that another process of the stage counts in the norm, as (unit, segment).

        A parameter that is whole on each process of a stage has the same gradient on all of them. The first process
        counts it.
        """
        if not self.row:
            return frozenset()
        return frozenset(
            (unit, position)
            for unit, layout in enumerate(layouts)
            for position, segment in enumerate(layout.segments)
            if segment.parameter in self.tied or (self.coordinate and not self.is_sharded(segment.parameter))
        )

    def step(self, known: GradientStats, micro_batches: int, global_steps: int, settings: int) -> GradientStats:
        """Returns the statistics of a step with the sum of squares of a row. Collective of all processes.

        `known` are the statistics of this process's column, without the parameters that are counted elsewhere. Raises
        `UsageError` on all processes if they differ in `micro_batches`, `global_steps` or `settings`.
        """
        if not self.row:
            return known
        # All processes of the grid compare the numbers that the ranks of a data-parallel group compare.
        content = STEP_FACTS.pack(known.sum_squares, micro_batches, global_steps, settings)
        try:
            rows = self.everyone.collect_bytes(content, "agree on a step")
        except BaseException:
            # If a Ctrl-C ends the collective on this process, the other processes are notified, and end.
            self.everyone.fail("it was interrupted while it waited for the other processes")
            raise
        facts = [STEP_FACTS.unpack(row) for row in rows]
        for what, column in (("micro-batches", 1), ("steps", 2), ("settings of the optimizer (checksums)", 3)):
            numbers = [fact[column] for fact in facts]
            if len(set(numbers)) > 1:
                raise UsageError(
                    f"the processes of {self.kind} differ in their {what}: {', '.join(map(str, numbers))}; all "
                    "must run the same loop"
                )
        # The sum is in the order of coordinates, so that every process of a row computes the same bits. All rows have
        # equal numbers.
        return replace(known, sum_squares=sum(facts[process][0] for process in self.row))

    def end(self, remove: bool) -> None:
        """Returns when every process of the grid is about to close its engine. Collective of all processes.

        Raises `RankError` on all processes, if only some are about to delete their swap files (`remove`).
        """
        everyone = self.everyone.share(remove, "close its engine")
        if len(set(everyone)) > 1:
            deletes = [process for process, removes in enumerate(everyone) if removes]
            raise RankError(
                f"processes {deletes} of {self.kind} delete their swap files, the others keep theirs: all must "
                "do the same; all are kept"
            )
