"""First pass of loading a checkpoint: the ranks together compare all data that will be read with its checksums.

Only after this pass has succeeded on every rank does the second pass, `offload.engine.checkpoint.restore`, change the
engine. So a checkpoint that is damaged or does not fit changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch

from offload.aio import DirectFile, crc32c, crc32c_joined
from offload.aio.protocols import Future, Queue
from offload.engine.checkpoint.files import (
    Manifest,
    progress_file,
    read_manifest,
    states_file,
    tensors_of,
    wrong_files,
)
from offload.engine.checkpoint.resharding import difference, places
from offload.engine.params.local_shards import LocalShards
from offload.engine.training.snapshot import Snapshot
from offload.errors import IoError, StoreError
from offload.fileio.buffered_copy import BUFFER_NBYTES, flow, flow_buffers
from offload.fileio.safetensors_stream import TensorLocation, read_header
from offload.layout.fingerprint import described_layouts
from offload.layout.flat_layout import Segment, UnitLayout
from offload.layout.master_weights import KEPT
from offload.layout.opaque_state import StateField
from offload.sizes import count_of
from offload.states import State
from offload.swapper.modes import MODES, Mode

CLIENT_STATE = "client_state"
"""Name of the user's own state in the progress file."""


class LoadOptions(NamedTuple):
    """The parts of a checkpoint that are loaded."""

    strict: bool
    states: bool
    """True to load moments and step counts in addition to the weights."""
    schedule: bool
    module_only: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundCheckpoint:
    """A checkpoint whose files were checked, except for the bytes of its states."""

    folder: Path
    manifest: Manifest
    layouts: tuple[UnitLayout, ...]
    mode: Mode
    saved: Mapping[str, tuple[int, Segment]]
    places: Mapping[str, TensorLocation]
    """Location of each tensor, the same in every rank's file of states."""
    progress: Snapshot
    contents: Mapping[str, torch.Tensor]
    own: bool
    """True if `progress` is this rank's own; False if it is that of rank 0, because the number of ranks differs."""

    @property
    def client_state(self) -> Any:
        """Returns the user's own state, parsed from JSON."""
        return json.loads(bytes(self.contents[CLIENT_STATE].numpy()))

    def steps(self, layouts: Sequence[UnitLayout], now: Sequence[Sequence[int]]) -> list[list[int]]:
        """Returns the number of updates of each parameter of `layouts`.

        Args:
            layouts: Units of this engine.
            now: Present counts, which apply to parameters that the checkpoint does not contain.
        """
        # Tied names map to the same segment object, so its identity is the key.
        counts = self.progress.facts["parameter_steps"]
        saved = {id(s): counts[u][i] for u, row in enumerate(self.layouts) for i, s in enumerate(row.segments)}
        return [
            [
                saved[id(self.saved[segment.name][1])] if segment.name in self.saved else before
                for segment, before in zip(layout.segments, row, strict=True)
            ]
            for layout, row in zip(layouts, now, strict=True)
        ]


# -- reading and comparing ----------------------------------------------------------------------------


def look(folder: Path, rank: int, world_size: int, tied_here: Mapping[str, str]) -> FoundCheckpoint:
    """Reads all of a checkpoint except its states.

    Args:
        folder: The checkpoint.
        rank: This rank. Its progress is read if as many ranks saved the checkpoint; otherwise rank 0's is.
        world_size: Number of ranks of this engine; 0 if there is no engine.
        tied_here: First name of each tied parameter of this model, by its other names.

    Raises:
        StoreError: If something is missing or damaged.
    """
    manifest = read_manifest(folder)
    try:
        layouts, mode = described_layouts(manifest.layout), MODES[manifest.layout["mode"]]
        tied = manifest.about["tied"]
        # All ranks' partitions have equal shapes, so the same tensors are expected in every file.
        expected = tensors_of(layouts, mode, manifest.world_size, manifest.frozen)
        names = [name for each in range(manifest.world_size) for name in (states_file(each), progress_file(each))]
        found: dict[str, TensorLocation] = {}
        # Files that are missing or have another size come first: their names are the most useful message.
        if wrong := wrong_files(folder, manifest):
            raise ValueError("; ".join(f"{name} {reason}" for name, reason in wrong.items()))
        for name in names:
            if name.startswith("states."):
                # All files have tensors of the same names and shapes, so each tensor's location is the same in all.
                found, _ = read_header(folder / name)
                if {key: place.tensor for key, place in found.items()} != expected:
                    raise ValueError(f"{name} contains other tensors than the manifest lists")
                if found.keys() != manifest.files[name].sums.keys():
                    raise ValueError(f"the manifest lacks the checksum of a tensor of {name}")
        # With another number of ranks no saved progress belongs to this rank, so every rank reads that of rank 0.
        own = manifest.world_size == world_size
        name = progress_file(rank if own else 0)
        data = (folder / name).read_bytes()
        if crc32c(data) != manifest.files[name].sums[""]:
            raise ValueError(f"{name} is damaged: it does not match its checksum")
        contents = safetensors.torch.load(data)
        progress = Snapshot.unpack(contents)
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(
            f"the checkpoint {folder} is incomplete or damaged: {error}; load another checkpoint"
        ) from error
    saved = places(layouts, tied, manifest.frozen)
    # The checkpoint may have saved a tied parameter under a name that is not the first one in this model.
    saved |= {first: saved[name] for name, first in tied_here.items() if name in saved and first not in saved}
    return FoundCheckpoint(
        folder=folder,
        manifest=manifest,
        layouts=layouts,
        mode=mode,
        saved=saved,
        places=found,
        progress=progress,
        contents=contents,
        own=own,
    )


def check_fits(
    found: FoundCheckpoint,
    held: LocalShards,
    options: LoadOptions,
    names: set[str],
    buffers: Mapping[str, torch.Tensor],
) -> None:
    """Checks that the checkpoint fits this model and, if optimizer states are loaded, this mode.

    Args:
        found: The checkpoint.
        held: This rank's partitions.
        options: Choice of what to load.
        names: Names of all parameters of the model, tied ones included.
        buffers: Persistent buffers of the model.

    Raises:
        StoreError: If names, shapes, mode or optimizer states differ.
    """
    what = f"the checkpoint {found.folder}"
    shapes = {s.name: s.shape for layout in held.layouts for s in layout.segments}
    # Frozen weights that were left out of the save are not missing: they keep their values.
    absent: set[str] = set()
    if not found.manifest.frozen:
        absent = {s.name for layout in found.layouts for s in layout.segments if not s.trainable}
        absent |= {name for name, first in found.manifest.about["tied"].items() if first in absent}
    mine = {name: shape for name, shape in shapes.items() if name not in absent or name in found.saved}
    mine |= {name: tuple(value.shape) for name, value in buffers.items()}
    theirs = {name: segment.shape for name, (_, segment) in found.saved.items()}
    theirs |= {name: tuple(value.shape) for name, value in found.progress.buffers.items()}
    difference(mine, names | buffers.keys(), theirs).check(options.strict, what)
    # Moments of another dtype are converted.
    if options.states and found.mode._replace(moment_dtype=held.mode.moment_dtype) != held.mode:
        raise StoreError(
            f"{what} was saved in mode {found.mode.name}, this engine is in mode {held.mode.name}, so their optimizer "
            f"states differ: load the weights alone (load_optimizer_states=False), or train in {found.mode.name}"
        )
    _check_forms(found, held, what)
    for segment in (segment for layout in held.layouts for segment in layout.segments if options.states):
        # A parameter that the checkpoint does not contain keeps its states, so it cannot differ.
        kept = found.saved[segment.name][1].kept if segment.name in found.saved else segment.kept
        if kept != segment.kept:
            raise StoreError(
                f"{what} contains the states {_names(kept)} of {segment.name}, this optimizer keeps "
                f"{_names(segment.kept)}: load the weights alone (load_optimizer_states=False), or give the same "
                "optimizer"
            )


def _check_forms(found: FoundCheckpoint, held: LocalShards, what: str) -> None:
    """Raises `StoreError` if a frozen weight of the checkpoint is stored in another form than in this engine."""
    for segment in (segment for layout in held.layouts for segment in layout.segments):
        place = found.saved.get(segment.name)
        # Blocks are counted in elements of the weights' dtype, so the same blocks have other counts in another dtype.
        if place is not None and _stored(place[1]) != _stored(segment):
            raise StoreError(
                f"{what} contains {segment.name} as {_form(place[1], found.mode)}, this engine as "
                f'{_form(segment, held.mode)}: train with the "frozen" and the dtype of the checkpoint, or save it '
                "with exclude_frozen_parameters=True and load that"
            )


def _stored(segment: Segment) -> tuple[object, ...]:
    """Returns all on which the meaning of a parameter's bytes depends."""
    return segment.form, segment.numel, segment.inner, segment.kind


def _form(segment: Segment, mode: Mode) -> str:
    """Returns the form in which a parameter is stored, for a message."""
    if segment.inner:
        return f"{segment.kind} of {', '.join(f'{each.name} {each.kind} {list(each.shape)}' for each in segment.inner)}"
    return f"{segment.form} of a model in {mode.precision}" if segment.form else mode.precision


def _names(kept: Sequence[StateField]) -> str:
    """Returns the names of optimizer states for a message."""
    return ", ".join(each.name for each in kept) or "none"


def check_progress(found: FoundCheckpoint, options: LoadOptions, groups: int, schedule: Any) -> None:
    """Checks that the checkpoint has as many parameter groups as this optimizer, and the same keys of the schedule.

    Args:
        found: The checkpoint.
        options: Choice of what to load.
        groups: Number of parameter groups of this optimizer.
        schedule: State of this engine's learning-rate schedule.

    Raises:
        StoreError: If the number of groups or the keys of the schedule differ.
    """
    facts, what = found.progress.facts, f"the checkpoint {found.folder}"
    if len(facts["groups"]) != groups:
        raise StoreError(
            f"{what} has {count_of(len(facts['groups']), 'group')} of parameters, this optimizer has {groups}: give "
            "the optimizer the same groups, or load the weights alone (load_module_only=True)"
        )
    saved = facts["scheduler"]
    if options.schedule and isinstance(saved, dict) and isinstance(schedule, dict) and saved.keys() != schedule.keys():
        raise StoreError(
            f"{what} contains the state of another learning-rate schedule, with {', '.join(sorted(saved))}; this "
            f"schedule has {', '.join(sorted(schedule))}: give the same schedule, or pass "
            "load_lr_scheduler_states=False"
        )


def fitting(
    progress: Snapshot, buffers: Mapping[str, torch.Tensor], steps: Sequence[Sequence[int]], schedule: bool
) -> Snapshot:
    """Returns the part of `progress` that applies to this engine, with `steps` in place of the saved counts.

    Args:
        progress: Progress as it was saved.
        buffers: Persistent buffers of the model; others are dropped.
        steps: Number of updates of each parameter of this engine.
        schedule: True to keep the state of the learning-rate schedule.
    """
    facts = {**progress.facts, "parameter_steps": [list(row) for row in steps]}
    if not schedule:
        facts["scheduler"] = None
    mine = {name: value for name, value in progress.buffers.items() if name in buffers}
    return Snapshot(facts, progress.generators, mine)


def check_bytes(found: FoundCheckpoint, options: LoadOptions, queue: Queue, rank: int, world_size: int) -> None:
    """Compares this rank's share of the tensors that any rank will read with their checksums.

    Args:
        found: The checkpoint.
        options: Choice of what to load.
        queue: Queue for the reads.
        rank: This rank.
        world_size: Number of ranks. They divide the tensors among them.

    Raises:
        StoreError: If a tensor is damaged or cannot be read.
    """
    states = found.mode.states if options.states else KEPT
    wanted = [name for name in found.places if State(name.partition(".")[2]) in states]
    # Round robin over all tensors: each is compared by exactly one rank.
    work = [(each, name) for each in range(found.manifest.world_size) for name in wanted][rank::world_size]

    def damaged(path: Path, name: str) -> None:
        raise StoreError(f"{path} is damaged: {name} does not match its checksum; load another checkpoint")

    try:
        compare_bytes(found, work, queue, damaged)
    except IoError as error:
        raise StoreError(f"the checkpoint {found.folder} cannot be read: {error}; load another checkpoint") from error


def compare_bytes(
    found: FoundCheckpoint,
    work: Iterable[tuple[int, str]],
    queue: Queue,
    damaged: Callable[[Path, str], None],
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Compares tensors with their checksums.

    Args:
        found: The checkpoint.
        work: Rank and name of each tensor.
        queue: Queue for the reads.
        damaged: Called with the file and the name of each tensor that differs.
        progress: Called after each chunk with its number of bytes.

    Raises:
        IoError: If something cannot be read.
        StoreError: If a file cannot be opened.
    """
    files = open_states(found)
    sums: dict[tuple[int, str], int] = {}

    def begin(chunk: _Chunk, buffer: memoryview) -> Sequence[Future]:
        offset = found.places[chunk.name].offset + chunk.start
        chunk.reads.append(queue.read(files[chunk.rank], offset, buffer[: chunk.nbytes], checksum=True))
        return chunk.reads

    def ended(chunk: _Chunk, _: Sequence[Future]) -> None:
        progress(chunk.nbytes)
        key = chunk.rank, chunk.name
        # The manifest has one checksum for a whole tensor. Chunks end in order, so their checksums are joined.
        sums[key] = crc32c_joined(sums.get(key, 0), chunk.reads[0].crc32c(), chunk.nbytes)
        # More chunks of this tensor follow.
        if chunk.start + chunk.nbytes < found.places[chunk.name].tensor.nbytes:
            return
        path = found.folder / states_file(chunk.rank)
        if sums.pop(key) != found.manifest.files[path.name].sums[chunk.name]:
            damaged(path, chunk.name)

    def chunks() -> Iterator[_Chunk]:
        for each, name in work:
            nbytes = found.places[name].tensor.nbytes
            for start in range(0, nbytes, BUFFER_NBYTES):
                yield _Chunk(each, name, start, min(BUFFER_NBYTES, nbytes - start), [])

    try:
        flow(flow_buffers(), chunks(), begin, lambda *_: (), ended)
    finally:
        for file in files:
            file.close()


class _Chunk(NamedTuple):
    """Chunk of a tensor in one rank's file, with its pending reads."""

    rank: int
    name: str
    start: int
    nbytes: int
    reads: list[Future]


def open_states(found: FoundCheckpoint) -> list[DirectFile]:
    """Opens every rank's file of states; the caller closes them. Raises `StoreError` if a file cannot be opened."""
    files: list[DirectFile] = []
    try:
        for rank in range(found.manifest.world_size):
            files.append(DirectFile(found.folder / states_file(rank), writable=False))
    except IoError as error:
        for file in files:
            file.close()
        raise StoreError(f"the checkpoint {found.folder} cannot be read: {error}") from error
    return files
