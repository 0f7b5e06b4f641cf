"""A checkpoint that a grid of processes has saved, as the weights of a whole model."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

from offload.aio.protocols import Queue
from offload.checkpoint.directory import check_parts
from offload.checkpoint.files import read_manifest, states_file
from offload.checkpoint.load import FoundCheckpoint, compare_bytes, look
from offload.engine.model_io.grid.layout import PartLayout
from offload.engine.model_io.grid.source import Part, WholeSource
from offload.errors import IoError
from offload.layout.optimizer_states import KEPT
from offload.states import State


def whole_of_checkpoint(checkpoint: Path, queue: Queue) -> WholeSource:
    """Opens all parts of a checkpoint, after their weights have been compared with the checksums.

    They are read twice: pieces of a parameter are not read in the order in which the checksums are.

    Args:
        checkpoint: Folder of the checkpoint.
        queue: Queue for the reads; owned by the caller.

    Raises:
        StoreError: If something is missing.
        IoError: If weights are damaged.
    """
    manifest = read_manifest(checkpoint)
    check_parts(checkpoint, manifest)
    # Rank 0 of no engine: the progress of rank 0 has the buffers, which all ranks of a part have.
    found = [look(checkpoint / part, 0, 0, {}) for part in manifest.parts]
    for each in found:
        _compare(each, queue)
    # Files that are open already are closed if a later part cannot be opened, or the parts do not fit.
    with contextlib.ExitStack() as opened:
        parts = []
        for each in found:
            states = opened.enter_context(contextlib.closing(each.open(queue)))
            layout = PartLayout.of(each.manifest.layout, each.manifest.about, each.layouts, each.mode)
            parts.append(Part(layout, states, each.progress.buffers, each.manifest.frozen))
        return WholeSource(parts, manifest.step, opened.pop_all().close)


def _compare(found: FoundCheckpoint, queue: Queue) -> None:
    """Raises `IoError` if weights of a part are damaged."""
    # Moments are not read, so damage of them does not keep anyone from the weights.
    work = [
        (rank, name)
        for rank, tensors in enumerate(found.places)
        for name in tensors
        if State(name.partition(".")[2]) in KEPT
    ]

    def damaged(path: Path, name: str) -> None:
        tensor = next(each[name] for rank, each in enumerate(found.places) if states_file(rank) == path.name)
        raise IoError(str(path), tensor.offset, tensor.tensor.nbytes, errno.EBADMSG, f"use {name},")

    compare_bytes(found, work, queue, damaged)
