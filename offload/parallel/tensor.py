"""Tensor parallelism and pipelines beside ZeRO: the processes as a grid, and what is agreed on over all of it.

              coordinate 0    coordinate 1         a row       computes one layer together, on the same batch: the
    ZeRO 0    process 0       process 1                        user's collectives, in forward and backward
    ZeRO 1    process 2       process 3            a column    has the same shards, and other batches: ZeRO divides
                                                               states, gathers weights and reduces gradients in it

With a pipeline a row has the processes of all of its stages, one stage after the other, and a column those with the
same layers, and the same part of each parameter.

A column is a run of its own for everything that this package divides over ranks, with replicas of its own (`mesh`).
Over the whole grid the processes compare their configs, commit in step, and add up the norm.

**No deadlock.** Collectives of a row and of a column are never under way at the same time on one process, since all of
them belong to the thread that runs the model. Every process runs the same program, so that each of two processes that
meet in a collective has left behind the same collectives: none waits for one that waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from offload.distributed.agreement import STEP_FACTS
from offload.distributed.process_group import Communication, Ranks
from offload.engine.callbacks import GradientStats
from offload.errors import ConfigError, RankError, UsageError
from offload.layout.flat_layout import UnitLayout


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """This process's place in the grid."""

    everyone: Ranks
    """All processes."""
    zero: Ranks
    """The ranks of this process's column."""
    row: tuple[int, ...]
    """The processes that compute together with this one, by their rank in `everyone`, in the order of coordinates:
    stage by stage of a pipeline."""
    sharded: frozenset[str]
    """Names of the parameters of which each process of a stage has another part."""
    dims: Mapping[str, int] = field(default_factory=dict)
    """The dimension along which each of them is divided; those of Megatron are not known."""
    stages: int = 1
    """Number of processes of a pipeline, one behind the other; 1 without one."""
    positions: tuple[int, ...] = ()
    """Position of each process in its pipeline, by its rank in `everyone`; empty without one."""
    tied: frozenset[str] = frozenset()
    """Names of the parameters of this process that an earlier stage of its pipeline has too."""
    stage: Ranks = field(default_factory=Ranks)
    """The processes with this one's layers, if there is a pipeline and tensor parallelism divides them; else this one
    alone."""

    @property
    def size(self) -> int:
        """Number of processes among which tensor parallelism divides a parameter; 1 in a pipeline alone."""
        return len(self.row) // self.stages

    @property
    def coordinate(self) -> int:
        """Position of this process among them."""
        return self.row.index(self.everyone.rank) % self.size

    @property
    def position(self) -> int:
        """Position of this process in its pipeline; 0 without one."""
        return self.row.index(self.everyone.rank) // self.size

    @property
    def kind(self) -> str:
        """What the grid is of, for messages."""
        kinds = ("tensor" if self.size > 1 else "", "pipeline" if self.stages > 1 else "")
        return f"{' and '.join(filter(None, kinds))} parallelism"

    @property
    def suffix(self) -> str:
        """The end of the name of a column's run: each column has swap files of its own."""
        return f"-{self.part}" if self.part else ""

    @property
    def part(self) -> str:
        """The name of a column: its stages, and its part of each divided parameter."""
        return self._part(self.position, self.coordinate)

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of all columns, stage by stage, in each by coordinate."""
        return tuple(self._part(position, each) for position in range(self.stages) for each in range(self.size))

    def _part(self, position: int, coordinate: int) -> str:
        """Returns the name of a column."""
        pipeline = f"pp{position}of{self.stages}" if self.stages > 1 else ""
        tensor = f"tp{coordinate}of{self.size}" if self.size > 1 else ""
        return "-".join(filter(None, (pipeline, tensor)))

    @property
    def description(self) -> dict[str, dict[str, int]]:
        """The place of a column in the grid, as its swap files contain it."""
        found: dict[str, dict[str, int]] = {}
        if self.size > 1:
            found["tensor_parallel"] = {"size": self.size, "coordinate": self.coordinate}
        if self.stages > 1:
            found["pipeline"] = {"size": self.stages, "position": self.position}
        return found

    @property
    def sent(self) -> Communication:
        """What this process has sent in the collectives of ZeRO, and over the grid; not the user's own collectives."""
        return self.everyone.sent.plus(self.zero.sent)

    @property
    def replicated(self) -> Ranks:
        """The processes that have this one's whole parameters, by tensor parallelism; this one alone without it."""
        return self.everyone if self.size > 1 and self.stages == 1 else self.stage

    def first_of_stage(self, process: int) -> int:
        """Returns the first process that has the same layers as `process`, both by their rank in `everyone`."""
        return self.positions.index(self.positions[process]) if self.positions else 0

    def is_sharded(self, parameter: str) -> bool:
        """Returns True if each process of a stage has another part of the parameter, False if each has all of it."""
        return parameter in self.sharded

    def counted_elsewhere(self, layouts: Sequence[UnitLayout]) -> frozenset[tuple[int, int]]:
        """Returns the parameters that another process of the stage counts in the norm, as (unit, segment).

        All processes of a stage have the same gradient of a parameter that is whole on each. The first counts it.
        """
        return frozenset(
            (unit, position)
            for unit, layout in enumerate(layouts)
            for position, segment in enumerate(layout.segments)
            if segment.parameter in self.tied or (self.coordinate and not self.is_sharded(segment.parameter))
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
        # The numbers that ranks of a data-parallel group compare, here of all processes of the grid.
        content = STEP_FACTS.pack(known.sum_squares, micro_batches, global_steps, settings)
        try:
            rows = self.everyone.collect_bytes(content, "agree on a step")
        except BaseException:
            # By a Ctrl-C this process has left the others in the middle of a collective: they learn of it, and end.
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
                f"processes {deletes} of {self.kind} delete their swap files, the others keep theirs: all must "
                "do the same; all are kept"
            )


class PipelinePlace(NamedTuple):
    """Stages of a pipeline, as one process has them; all empty without a pipeline."""

    processes: tuple[int, ...] = ()
    """The processes of the pipeline, by their rank among all, in their order."""
    num_stages: int = 0
    indices: tuple[int, ...] = ()
    """Numbers of the stages of this process."""
    counted_elsewhere: tuple[str, ...] = ()
    """Names of the parameters of this process that an earlier stage has too, and counts in the norm."""


def form_grid(
    everyone: Ranks,
    row: Sequence[int],
    sharded: frozenset[str],
    pipeline: PipelinePlace,
    dims: Mapping[str, int] = {},
) -> TensorParallel | None:
    """Divides all processes into rows and columns. Collective.

    Args:
        everyone: all processes.
        row: the processes among which tensor parallelism divides this one's parameters, by their rank; empty without.
        sharded: names of the parameters of which this process has a part.
        pipeline: the stages of this process.
        dims: the dimension along which each of `sharded` is divided, where that is known.

    Returns:
        The grid; None without either, and for a single process, whose part is all there is.

    Raises:
        ConfigError: on all processes, if the rows are no grid, or columns cannot be divided into replicas.
    """
    if everyone.size == 1:
        return None
    shared = everyone.share([list(row), *pipeline[:3]], "compare their tensor parallelism")
    rows = [tuple(each[0]) for each in shared]
    places = [PipelinePlace(tuple(each[1]), each[2], tuple(each[3])) for each in shared]
    pipelines = [place.processes for place in places]
    if not any(rows) and not any(pipelines):
        return None
    # Before the blocks, which are made of the groups.
    _check_own(pipelines, "pipeline")
    blocks = [_block(process, rows, pipelines) for process in range(everyone.size)]
    distinct = _distinct(blocks, any(pipelines))
    _check_own(rows, "tensor")
    _check_stages(pipelines, places)
    stages, mine = max(map(len, pipelines)) or 1, blocks[everyone.rank]
    size = len(mine) // stages
    positions = [block.index(process) // size for process, block in enumerate(blocks)]
    # Where there is no pipeline, the processes with the same layers are all.
    stage = Ranks()
    if stages > 1 and size > 1:
        stage = everyone.divided(
            [[each for each, at in enumerate(positions) if at == position] for position in range(stages)]
        )
    return TensorParallel(
        everyone=everyone,
        zero=everyone.divided([[each[coordinate] for each in distinct] for coordinate in range(len(mine))]),
        row=mine,
        sharded=sharded,
        dims=dims,
        stages=stages,
        positions=tuple(positions) if stages > 1 else (),
        tied=frozenset(pipeline.counted_elsewhere),
        stage=stage,
    )


_ADVICE = {
    "tensor": 'take the mesh["tp"] of init_device_mesh(device, (n, m), mesh_dim_names=("dp", "tp"))',
    "pipeline": 'take mesh["pp"].get_group() of init_device_mesh(device, (p, n, m), mesh_dim_names=("pp", "dp", "tp"))',
}
"""What to do about groups that are no grid."""


def _check_own(groups: Sequence[tuple[int, ...]], kind: str) -> None:
    """Raises `ConfigError` if a process is not in its own group of a dimension that others have."""
    wrong = [process for process, each in enumerate(groups) if any(groups) and process not in each]
    if wrong:
        raise ConfigError(
            f"process {wrong[0]} is not in the group {list(groups[wrong[0]])} of its {kind} parallelism: "
            f"{_ADVICE[kind]} on each process"
        )


def _block(process: int, rows: Sequence[tuple[int, ...]], pipelines: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the processes that compute one batch with `process`, stage by stage, in each those of its row."""
    return tuple(each for stage in pipelines[process] or (process,) for each in rows[stage] or (stage,))


def _distinct(blocks: Sequence[tuple[int, ...]], has_pipelines: bool) -> list[tuple[int, ...]]:
    """Returns the blocks that make a grid, each once; raises `ConfigError` if they make none."""
    distinct = sorted(set(blocks))
    in_order = sorted(process for each in distinct for process in each)
    if in_order != list(range(len(blocks))) or len({len(each) for each in distinct}) > 1:
        kind = "pipeline" if has_pipelines else "tensor"
        raise ConfigError(
            f"{kind} parallelism divides {len(blocks)} processes into {distinct}; expected groups of one size, with "
            f"each process in one of them: {_ADVICE[kind]} over all processes"
        )
    return distinct


def _check_stages(pipelines: Sequence[tuple[int, ...]], places: Sequence[PipelinePlace]) -> None:
    """Raises `ConfigError` if the processes of a pipeline do not have each of its stages once."""
    for processes in filter(None, sorted(set(pipelines))):
        count = places[processes[0]].num_stages
        held = {process: list(places[process].indices) for process in processes}
        every = sorted(index for each in held.values() for index in each)
        if every != list(range(count)) or any(places[process].num_stages != count for process in processes):
            raise ConfigError(
                f"the processes of a pipeline have the stages {held}; expected each of 0 to {count - 1} once, and one "
                "num_stages on all: give PipelineStages of each process the stages that its place in the schedule has"
            )
