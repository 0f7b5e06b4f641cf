"""Implementation of `offload import`: writes another program's checkpoint again, as one of ours.

The files are read chunk by chunk, so memory does not depend on the model, and nothing in them is executed. The new
checkpoint has masters and moments in fp32, each parameter as a unit of its own; an engine of any dtype, units and ranks
loads it, and `offload verify`, `inspect` and `export` read it without the model's code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
import torch

from offload.aio import DirectFile, crc32c, crc32c_joined
from offload.aio.protocols import Future, Pending, Queue
from offload.checkpoint.directory import begin_folder, drop_partial, end_folder, make_folder, only_save
from offload.checkpoint.files import (
    MANIFEST,
    Saved,
    check_tag,
    find,
    is_checkpoint,
    progress_file,
    states_file,
    tensor_name,
    tensors_of,
)
from offload.checkpoint.foreign import ForeignCheckpoint, is_foreign, look_foreign
from offload.checkpoint.load import EVERYTHING
from offload.checkpoint.resharding import Run, SavedElement
from offload.errors import StoreError
from offload.fileio import check_place, real_path, write_new
from offload.fileio.buffered_copy import BUFFER_NBYTES, flow, flow_buffers
from offload.fileio.safetensors_stream import SafetensorsWriter, Tensor
from offload.model_io.save import check_room
from offload.states import State

_SLACK = 1 << 20
"""Bytes reserved for the manifest and the progress."""


class Imported(NamedTuple):
    """Result of an import."""

    path: Path
    """The new checkpoint."""
    step: int
    parameters: int
    nbytes: int
    """Bytes of all states."""
    notices: tuple[str, ...]


def open_foreign(path: Path, tag: str | None) -> ForeignCheckpoint:
    """Returns a checkpoint of another program, read except for its tensors.

    Without a tag the latest is opened, or `path` itself.
    """
    folder = find(path, tag, is_foreign)
    if folder is not None and is_checkpoint(Path(folder)):
        raise StoreError(
            f"{folder} is a checkpoint of offload itself: engine.load_checkpoint reads it, and offload export writes a "
            "model from it"
        )
    if folder is None or not is_foreign(Path(folder)):
        raise StoreError(
            f"{folder or path} contains no checkpoint of DeepSpeed (files such as mp_rank_00_model_states.pt, or a "
            "folder zero), nor one of torch.distributed.checkpoint (a file .metadata): give the folder that "
            "save_checkpoint or dcp.save has written, or one of its tags with --tag"
        )
    return look_foreign(Path(folder), True, {})


def check_output(out: Path) -> None:
    """Raises `StoreError` if there cannot be a folder `out`, because a file is there or above, or by `check_place`."""
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not there.is_dir():
        raise StoreError(f"{there} is a file; expected a folder of checkpoints, or a new path: give another folder")
    check_place(out, "OUT", there)


def nbytes_of(checkpoint: ForeignCheckpoint) -> int:
    """Returns the bytes of the states of an import."""
    return sum(tensor.nbytes for tensor in _tensors(checkpoint).values())


def import_checkpoint(
    foreign: ForeignCheckpoint, out: Path, queue: Queue, progress: Callable[[int], None] = lambda _: None
) -> Imported:
    """Writes a checkpoint into the folder `out`, under the tag that it has, completely or not at all.

    `out` is created if it does not exist, and its `latest` names the new checkpoint. The queue is the caller's.
    """
    checkpoint = out / check_tag(real_path(foreign.folder).name)
    # Read twice, as in a load, so that damage is noticed before anything is written.
    foreign.check_bytes(EVERYTHING, queue, 0, 1)
    make_folder(out)
    with only_save(out, checkpoint.name):
        partial = begin_folder(checkpoint, True)
        try:
            check_room(partial, nbytes_of(foreign) + _SLACK, checkpoint)
            files = {states_file(0): _write_states(foreign, partial / states_file(0), queue, progress)}
            contents = safetensors.torch.save({**foreign.progress.pack(), **foreign.contents})
            write_new(partial / progress_file(0), contents)
            # Small, so its sum is made in memory.
            files[progress_file(0)] = Saved(len(contents), {"": crc32c(contents)})
            now = datetime.now(timezone.utc).isoformat()
            write_new(partial / MANIFEST, foreign.manifest._replace(created=now, files=files).pack())
            end_folder(checkpoint, True)
        except BaseException:
            drop_partial(checkpoint)
            raise
    parameters = sum(segment.numel for layout in foreign.layouts for segment in layout.segments)
    return Imported(checkpoint, foreign.manifest.step, parameters, nbytes_of(foreign), foreign.notices)


def _tensors(checkpoint: ForeignCheckpoint) -> dict[str, Tensor]:
    return tensors_of(checkpoint.layouts, checkpoint.mode, 0, 1, True)


class _ImportedChunk(NamedTuple):
    """Elements [start, stop) of a unit, of one state."""

    unit: int
    state: State
    start: int
    stop: int

    @property
    def name(self) -> str:
        return tensor_name(self.unit, self.state)


def _write_states(checkpoint: ForeignCheckpoint, path: Path, queue: Queue, progress: Callable[[int], None]) -> Saved:
    sums: dict[str, int] = {}
    itemsize = torch.float32.itemsize
    with (
        contextlib.closing(checkpoint.open(queue)) as reader,
        SafetensorsWriter(path, _tensors(checkpoint)) as writer,
        DirectFile(path) as file,
    ):

        def begin(chunk: _ImportedChunk, buffer: memoryview) -> Iterator[Pending]:
            stop = min(chunk.stop, checkpoint.parameters[chunk.unit].numel)
            # The rest of the chunk is padding.
            torch.frombuffer(buffer, dtype=torch.float32)[max(0, stop - chunk.start) : chunk.stop - chunk.start].zero_()
            if chunk.start < stop:
                source = SavedElement(chunk.unit, chunk.start, checkpoint.parameters[chunk.unit].trainable)
                memory = buffer[: (stop - chunk.start) * itemsize]
                yield from reader.read(Run(chunk.start, stop, source), chunk.state, memory, 0)

        def end(chunk: _ImportedChunk, buffer: memoryview) -> Sequence[Future]:
            offset = writer.places[chunk.name].offset + chunk.start * itemsize
            nbytes = (chunk.stop - chunk.start) * itemsize
            return [queue.write(file, offset, buffer[:nbytes], checksum=True)]

        def ended(chunk: _ImportedChunk, writes: Sequence[Future]) -> None:
            nbytes = (chunk.stop - chunk.start) * itemsize
            # Chunks of a tensor end in order, so that their sums can be joined as they come.
            sums[chunk.name] = crc32c_joined(sums.get(chunk.name, 0), writes[0].crc32c(), nbytes)
            progress(nbytes)

        flow(flow_buffers(), _chunks(checkpoint), begin, end, ended)
        return Saved(writer.nbytes, sums)


def _chunks(checkpoint: ForeignCheckpoint) -> Iterator[_ImportedChunk]:
    step = BUFFER_NBYTES // torch.float32.itemsize
    for unit, layout in enumerate(checkpoint.layouts):
        for state in checkpoint.mode.states:
            # Frozen parameters have only a weight.
            numel = layout.numel if state is State.WEIGHT else layout.trainable_stop
            for start in range(0, numel, step):
                yield _ImportedChunk(unit, state, start, min(start + step, numel))
