"""The weights of a grid of processes, between steps, as those of a whole model. All of them read the same bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offload.aio.protocols import Pending
from offload.checkpoint.directory import CheckpointPlace
from offload.checkpoint.load import SavedStates
from offload.distributed.process_group import Ranks
from offload.engine.distributed.tensor_parallel import TensorParallel
from offload.engine.model_io.grid.layout import PartLayout
from offload.engine.model_io.grid.source import Part, WholeSource
from offload.engine.model_io.weight_source import Source
from offload.engine.training.components import EngineComponents
from offload.engine.training.snapshot import persistent_buffers
from offload.layout.fingerprint import about, describe, described_layouts, described_mode
from offload.states import State


class _Partitions:
    """The partitions of one part, each of which its own process reads and sends; implements `PartitionReader`."""

    def __init__(self, own: Source, processes: Sequence[int]) -> None:
        self._own, self._processes = own, processes

    def read(self, rank: int, unit: int, state: State, start: int, buffer: memoryview) -> Pending:
        """Begins to fill `buffer` from byte `start` of a rank's partition on. Collective."""
        return self._own.read(self._processes[rank], unit, state, start, buffer)

    def close(self) -> None:
        """Does nothing: no file is open."""


def whole_of_engine(module: nn.Module, components: EngineComponents, grid: TensorParallel, own: Source) -> WholeSource:
    """Returns the weights of all processes as one model. Collective of all of them.

    Args:
        module: The model of this process.
        components: The components of its engine.
        grid: Its place.
        own: Reads the partition of a process, by its rank among all, and sends it to all others.

    Raises:
        StoreError: On all processes, if the parts cannot be put together.
    """
    rows = grid.everyone.share(_described(module, components, grid), "describe the model")
    parts = []
    # In one order on all processes, since buffers are sent in between.
    for name in grid.parts:
        processes = [number for number, row in enumerate(rows) if row["part"] == name]
        first = rows[processes[0]]
        description, said = first["layout"], first["about"]
        layouts, mode = described_layouts(description, part=True), described_mode(description)
        layout = PartLayout.of(description, said, layouts, mode)
        # Processes of a column are in the order of their ranks; those of other replicas follow, and read nothing.
        shards = int(description["world_size"])
        states = SavedStates(layouts, mode, shards, _Partitions(own, processes[:shards]))
        parts.append(Part(layout, states, _buffers(module, grid.everyone, processes[0], first["buffers"]), True))
    return WholeSource(parts, own.step)


def _described(module: nn.Module, components: EngineComponents, grid: TensorParallel) -> dict[str, Any]:
    """Returns what the others need to know of this process; of a column one process describes it."""
    place = CheckpointPlace(rank=components.rank, mesh=components.mesh, grid=grid)
    # The description names each parameter, and would be sent once for each rank.
    if components.rank:
        return {"part": grid.part}
    layout, said = place.described(
        describe(components.layouts, components.shards.mode, components.mesh.shards), about(module)
    )
    buffers = {
        name: [str(value.dtype).removeprefix("torch."), list(value.shape)]
        for name, value in persistent_buffers(module).items()
    }
    return {"part": grid.part, "layout": layout, "about": said, "buffers": buffers}


def _buffers(
    module: nn.Module, everyone: Ranks, source: int, described: Mapping[str, Sequence[Any]]
) -> dict[str, torch.Tensor]:
    """Returns the buffers of process `source`, on each process. Collective."""
    own = persistent_buffers(module) if everyone.rank == source else {}
    found = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
        for name, (dtype, shape) in described.items()
    }
    for name, value in found.items():
        if name in own:
            value.copy_(own[name].detach())
        everyone.broadcast(value, source)
    return found
