"""Tensor parallelism and pipelines with ZeRO: how the groups of each process make a grid (`distributed.world`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from offload.distributed.process_group import Ranks
from offload.distributed.world import World
from offload.errors import ConfigError


class PipelinePlace(NamedTuple):
    """The place of one process in a pipeline; all fields are empty without a pipeline."""

    processes: tuple[int, ...] = ()
    """The processes of the pipeline, by their rank among all, in their order."""
    num_stages: int = 0
    indices: tuple[int, ...] = ()
    """Numbers of the stages of this process."""
    counted_elsewhere: tuple[str, ...] = ()
    """Names of the parameters of this process that an earlier stage has too, and counts in the norm."""


def form_grid(
    everyone: Ranks, row: Sequence[int], sharded: frozenset[str], pipeline: PipelinePlace, dims: Mapping[str, int] = {}
) -> World:
    """Divides all processes into rows and columns. Collective.

    Tensor parallelism divides this process's parameters among `row`, ranks of `everyone`; empty without it. This
    process has a shard of the parameters `sharded`, each divided along its dimension in `dims`, where that is known.
    Without both kinds of parallelism, and for a single process, returns the world of ZeRO alone. Raises `ConfigError`
    on all processes, if the rows are no grid, or columns cannot be divided into replicas.
    """
    if everyone.size == 1:
        return World(everyone=everyone, ranks=everyone)
    shared = everyone.share([list(row), *pipeline[:3]], "compare their tensor parallelism")
    rows = [tuple(message[0]) for message in shared]
    places = [PipelinePlace(tuple(message[1]), message[2], tuple(message[3])) for message in shared]
    pipelines = [place.processes for place in places]
    if not any(rows) and not any(pipelines):
        return World(everyone=everyone, ranks=everyone)
    # Checked before the blocks are made of the groups.
    _check_own(pipelines, "pipeline")
    # For each process the processes that compute one batch with it: stage by stage, and in each stage its row.
    blocks = [
        tuple(member for stage in pipelines[process] or (process,) for member in rows[stage] or (stage,))
        for process in range(everyone.size)
    ]
    distinct = sorted(set(blocks))
    in_order = sorted(process for block in distinct for process in block)
    if in_order != list(range(len(blocks))) or len({len(block) for block in distinct}) > 1:
        kind = "pipeline" if any(pipelines) else "tensor"
        raise ConfigError(
            f"{kind} parallelism divides {len(blocks)} processes into {distinct}; expected groups of one size, with "
            f"each process in one of them: {_ADVICE[kind]} over all processes"
        )
    _check_own(rows, "tensor")
    _check_stages(pipelines, places)
    stages, block = max(map(len, pipelines)) or 1, blocks[everyone.rank]
    size = len(block) // stages
    positions = [members.index(process) // size for process, members in enumerate(blocks)]
    # Without a pipeline all processes have the same layers.
    stage = Ranks()
    if stages > 1 and size > 1:
        stage = everyone.divided(
            [[process for process, at in enumerate(positions) if at == position] for position in range(stages)]
        )
    return World(
        everyone=everyone,
        ranks=everyone.divided([[members[coordinate] for members in distinct] for coordinate in range(len(block))]),
        row=block,
        sharded=sharded,
        dims=dims,
        stages=stages,
        positions=tuple(positions) if stages > 1 else (),
        tied=frozenset(pipeline.counted_elsewhere),
        stage=stage,
    )


def form_row(world: World) -> Ranks:
    """Returns the group of this process's row, for the engine's own messages within it. Collective of all processes."""
    rows = world.everyone.share(list(world.row), "form the groups of rows")
    return world.everyone.divided(sorted({tuple(row) for row in rows}), -1)


_ADVICE = {
    "tensor": 'take the mesh["tp"] of init_device_mesh(device, (n, m), mesh_dim_names=("dp", "tp"))',
    "pipeline": 'take mesh["pp"].get_group() of init_device_mesh(device, (p, n, m), mesh_dim_names=("pp", "dp", "tp"))',
}
"""Advice for groups that are no grid."""


def _check_own(groups: Sequence[tuple[int, ...]], kind: str) -> None:
    """Raises `ConfigError` if a process is not in its own group of a dimension that other processes have."""
    wrong = [process for process, group in enumerate(groups) if any(groups) and process not in group]
    if wrong:
        raise ConfigError(
            f"process {wrong[0]} is not in the group {list(groups[wrong[0]])} of its {kind} parallelism: "
            f"{_ADVICE[kind]} on each process"
        )


def _check_stages(pipelines: Sequence[tuple[int, ...]], places: Sequence[PipelinePlace]) -> None:
    """Raises `ConfigError` if the processes of a pipeline do not have each of its stages once."""
    for processes in filter(None, sorted(set(pipelines))):
        count = places[processes[0]].num_stages
        stages = {process: list(places[process].indices) for process in processes}
        indices_of_all = sorted(index for indices in stages.values() for index in indices)
        if indices_of_all != list(range(count)) or any(places[process].num_stages != count for process in processes):
            raise ConfigError(
                f"the processes of a pipeline have the stages {stages}; expected each of 0 to {count - 1} once, "
                "and one num_stages on all: give PipelineStages of each process the stages that its place in the "
                "schedule has"
            )
