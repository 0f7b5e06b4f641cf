"""Implementation of `offload export --format deepspeed-universal`: a run as DeepSpeed's universal checkpoint.

    <out>/latest_universal                          the tag
    <out>/<tag>/zero/<name>/fp32.pt, exp_avg.pt, …  a parameter's master and moments, each in one piece
    <out>/<tag>/zero/optimizer_state.pt             numbers of the optimizer's groups
    <out>/<tag>/…_model_states.pt                   counters, schedule and buffers, for stages 1 and 2, and for stage 3

States are streamed unit by unit, so memory does not depend on the model. A parameter of a unit that several ranks share
comes from one rank after the other, and experts that are units of their own are rows of one file.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from offload.aio import aligned_empty
from offload.engine.checkpoint.deepspeed.contents import MASTER
from offload.engine.checkpoint.deepspeed.universal import OPTIMIZER_STATE, PARAMETERS
from offload.engine.model_io.output_folder import arriving, check_room
from offload.engine.model_io.weight_source import Reading, Source
from offload.engine.training.snapshot import Snapshot
from offload.errors import StoreError
from offload.fileio.buffered_copy import flow
from offload.fileio.plain_json import from_plain
from offload.fileio.safetensors_stream import Tensor
from offload.fileio.torch_file_writer import TorchFileWriter, write_torch_file
from offload.layout.fingerprint import described_layouts
from offload.layout.flat_layout import Segment, UnitLayout
from offload.layout.master_weights import join, sources
from offload.notices import shell_command
from offload.runs.export import Exported, check_target
from offload.sizes import KIB
from offload.states import State
from offload.swapper.modes import ADAM, MODES, Mode

_VERSION = "0.19.8"
"""Version of DeepSpeed whose format the files have."""
_UNIVERSAL_VERSION = 0.4
_CHUNK_NUMEL, _READS = 1 << 20, 8
_FILE_NBYTES = 8 * KIB
"""Bytes of a file beside its tensor, at most."""
_MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""Stages 1 and 2 read the first of these, stage 3 the second."""


class TrainedSource(Source, Protocol):
    """Protocol of a source of weights and of all that a run needs to resume."""

    progress: Snapshot
    client_state: Any
    """The user's own state, as `to_plain` gives it."""


class UniversalPlan(NamedTuple):
    """Contents of the export, decided before any file is made."""

    layouts: tuple[UnitLayout, ...]
    mode: Mode
    world_size: int
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each parameter."""
    trainable: Mapping[str, int]
    """Number of updates of each parameter that trains."""

    @property
    def parts(self) -> dict[str, tuple[State, ...]]:
        """Returns the states from which each kind of file is made, by its name."""
        moments = {state.value: (state,) for state in self.mode.moments}
        return {MASTER: sources(self.mode.weights), **moments}

    @property
    def nbytes(self) -> int:
        """Bytes of all files, at most."""
        files = {name: len(self.parts) if name in self.trainable else 1 for name in self.shapes}
        return sum(
            count * (math.prod(self.shapes[name]) * torch.float32.itemsize + _FILE_NBYTES)
            for name, count in files.items()
        )


def plan_universal(source: TrainedSource, path: Path) -> UniversalPlan:
    """Returns the plan of an export.

    Args:
        source: The run or checkpoint.
        path: Its folder, for messages.

    Raises:
        StoreError: If DeepSpeed has no form for its states.
    """
    mode = MODES[source.description["mode"]]
    layouts = described_layouts(source.description)
    # DeepSpeed names the files by Adam's moments, and reads no others.
    if mode.optimizer != ADAM or mode.in_blocks:
        raise StoreError(
            f"{path} is in mode {mode.name}; a universal checkpoint has the moments of AdamW in fp32: convert moments "
            f"in 8 bits first (`{shell_command('convert', path, '--moments', 'fp32')}`), or export weights alone, "
            "without --format"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    trainable: dict[str, int] = {}
    for layout, steps in zip(layouts, source.progress.facts["parameter_steps"], strict=True):
        for segment, count in zip(layout.segments, steps, strict=True):
            if segment.form or segment.inner:
                raise StoreError(
                    f"{path} has {segment.parameter} in {segment.form or segment.kind}, for which a universal "
                    "checkpoint has no form: export its weights, without --format"
                )
            if segment.trainable or source.frozen:
                # Counted: each row of stacked experts is a segment of its own.
                rows = shapes.get(segment.parameter, (0,))[0] + 1
                shapes[segment.parameter] = (rows, *segment.shape) if segment.stack else segment.shape
            if segment.trainable:
                trainable[segment.parameter] = max(count, trainable.get(segment.parameter, 0))
    return UniversalPlan(layouts, mode, int(source.description["world_size"]), shapes, trainable)


def export_universal(
    source: TrainedSource, out: Path, plan: UniversalPlan, progress: Callable[[int], None] = lambda _: None
) -> Exported:
    """Writes a universal checkpoint into the folder `out`, completely or not at all.

    Args:
        source: The run or checkpoint; stays open.
        out: Must not exist, or be empty.
        plan: Made by `plan_universal` for this source.
        progress: Called with the number of bytes after each write.

    Raises:
        StoreError: If `out` cannot be used, there is not enough room, or the source is damaged.
        IoError: If something cannot be read or written.
    """
    out = out.resolve()
    check_target(out)
    messages: list[str] = []
    tag = f"global_step{source.step}"
    with arriving(out, messages.append) as folder:
        check_room(folder, plan.nbytes, out)
        (folder / tag / PARAMETERS).mkdir(parents=True)
        # All folders first: the files of experts' rows are open side by side.
        for name in plan.shapes:
            (folder / tag / PARAMETERS / name).mkdir()
        _write_states(source, plan, folder / tag / PARAMETERS, progress)
        for name, steps in plan.trainable.items():
            write_torch_file(folder / tag / PARAMETERS / name / "step.pt", _count(steps))
        write_torch_file(folder / tag / PARAMETERS / OPTIMIZER_STATE, _optimizer_state(source, plan))
        for name in _MODEL_FILES:
            write_torch_file(folder / tag / name, _model_states(source, plan))
        # Last, since it makes the folder a checkpoint to DeepSpeed.
        (folder / "latest_universal").write_text(tag)
    return Exported(
        out,
        source.step,
        "fp32",
        ("latest_universal", tag),
        plan.nbytes,
        sum(map(math.prod, plan.shapes.values())),
        (*messages, *_notices(source, plan)),
    )


def _notices(source: TrainedSource, plan: UniversalPlan) -> Iterator[str]:
    """Yields lines about what DeepSpeed does not take from a universal checkpoint."""
    if len(plan.trainable) < len(plan.shapes) or source.buffers:
        yield (
            "DeepSpeed loads neither frozen weights nor buffers from a universal checkpoint: build the model with them "
            "there"
        )
    if source.progress.facts["loss_scale"] is not None:
        yield "the loss scale is not in a universal checkpoint: it begins there as the config says"


# -- small files --------------------------------------------------------------------------------------


def _count(steps: int) -> torch.Tensor:
    """Returns a number of updates in the form that most optimizers of DeepSpeed and torch count with.

    Those of DeepSpeed hand it to C++ as an integer, those of torch add to a tensor.
    """
    return torch.tensor(steps, dtype=torch.int64)


def _optimizer_state(source: TrainedSource, plan: UniversalPlan) -> dict[str, Any]:
    """Returns the content of `optimizer_state.pt`: for stages 1 and 2, and under a key of its own for stage 3."""
    groups = [
        {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()} | {"params": [index]}
        for index, group in enumerate(source.progress.facts["groups"])
    ]
    steps = _count(max(plan.trainable.values(), default=0))
    return {
        "overflow": False,
        "ds_version": _VERSION,
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {"step": steps}}, "param_groups": groups},
    }


def _model_states(source: TrainedSource, plan: UniversalPlan) -> dict[str, Any]:
    """Returns the content of a file of model states: counters, schedule, buffers, client state."""
    facts = source.progress.facts
    return {
        **from_plain(source.client_state),
        "module": dict(source.buffers),
        "buffer_names": list(source.buffers),
        "optimizer": None,
        "param_shapes": [OrderedDict((name, torch.Size(plan.shapes[name])) for name in plan.trainable)],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": dict(source.about.get("tied", {})),
        "lr_scheduler": from_plain(facts["scheduler"]),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": facts["skipped_steps"],
        "global_steps": facts["global_steps"],
        "global_samples": facts["global_samples"],
        "dp_world_size": plan.world_size,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": _VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": _UNIVERSAL_VERSION},
    }


# -- states -------------------------------------------------------------------------------------------


class _Chunk(NamedTuple):
    """Elements of a partition that are read together."""

    rank: int
    unit: int
    name: str
    """Kind of file."""
    states: tuple[State, ...]
    start: int
    """First element, in the unit's layout."""
    position: int
    """First element, in the rank's partition."""
    numel: int


def _write_states(source: Source, plan: UniversalPlan, folder: Path, progress: Callable[[int], None]) -> None:
    """Writes masters and moments, chunk by chunk, each file from its first element to its last."""
    files = _StateFiles(folder, plan.shapes)

    def begin(chunk: _Chunk, buffer: memoryview) -> Iterator[Reading]:
        for state, memory in _regions(plan, chunk, buffer).items():
            start = chunk.position * plan.mode.states[state].itemsize
            yield source.read(chunk.rank, chunk.unit, state, start, memory)

    def end(chunk: _Chunk, buffer: memoryview) -> tuple[()]:
        regions = _regions(plan, chunk, buffer)
        states = {state: torch.frombuffer(each, dtype=plan.mode.states[state]) for state, each in regions.items()}
        values = join(states) if State.WEIGHT in states or State.MASTER in states else next(iter(states.values()))
        for segment in plan.layouts[chunk.unit].segments:
            start, stop = max(chunk.start, segment.start), min(chunk.start + chunk.numel, segment.stop)
            if start < stop:
                files.put(segment, chunk.name, values[start - chunk.start : stop - chunk.start].float())
                progress((stop - start) * torch.float32.itemsize)
        return ()

    room = _CHUNK_NUMEL * sum(plan.mode.states[state].itemsize for state in plan.parts[MASTER])
    buffers = [aligned_empty(max(room, _CHUNK_NUMEL * torch.float32.itemsize)) for _ in range(_READS)]
    try:
        flow(buffers, _chunks(plan, source.frozen), begin, end, lambda *_: None)
    finally:
        files.close()


def _chunks(plan: UniversalPlan, frozen: bool) -> Iterator[_Chunk]:
    """Yields the chunks of all units: kind after kind, and of each the ranks' partitions in order.

    Args:
        plan: The plan.
        frozen: True to read frozen weights too, which have no other states.
    """
    size = plan.world_size
    for unit, layout in enumerate(plan.layouts):
        trainable = [layout.trainable(rank, size) for rank in range(size)]
        for name, states in plan.parts.items():
            # Rank after rank before the next kind: a parameter's file then grows from its first element to its last.
            yield from _cut(unit, name, states, trainable, [0] * size)
        rest = [layout.frozen(rank, size) for rank in range(size)] if frozen else []
        yield from _cut(unit, MASTER, (State.WEIGHT,), rest, [len(part) for part in trainable])


def _cut(
    unit: int, name: str, states: tuple[State, ...], shares: Sequence[range], positions: Sequence[int]
) -> Iterator[_Chunk]:
    """Yields chunks of each rank's share, which begins at its position in the rank's partition."""
    for rank, (share, position) in enumerate(zip(shares, positions, strict=False)):
        for start in range(0, len(share), _CHUNK_NUMEL):
            numel = min(_CHUNK_NUMEL, len(share) - start)
            yield _Chunk(rank, unit, name, states, share.start + start, position + start, numel)


def _regions(plan: UniversalPlan, chunk: _Chunk, buffer: memoryview) -> dict[State, memoryview]:
    """Returns the part of a buffer that receives each state of a chunk."""
    found: dict[State, memoryview] = {}
    end = 0
    for state in chunk.states:
        start, end = end, end + chunk.numel * plan.mode.states[state].itemsize
        found[state] = buffer[start:end]
    return found


class _StateFiles:
    """Files of states, each open from its parameter's first element to its last."""

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._folder, self._shapes = folder, shapes
        self._open: dict[tuple[str, str], tuple[TorchFileWriter, int]] = {}

    def put(self, segment: Segment, name: str, values: torch.Tensor) -> None:
        """Writes the next elements of a parameter's state, (n,) fp32."""
        key, shape = (segment.parameter, name), self._shapes[segment.parameter]
        if key not in self._open:
            content = {"param": Tensor(torch.float32, shape), "cat_dim": 0}
            writer = TorchFileWriter(self._folder / segment.parameter / f"{name}.pt", content)
            writer.begin()
            self._open[key] = (writer, 0)
        # Elements come in order: units, ranks and rows of experts all ascend.
        writer, done = self._open.pop(key)
        flat: Any = values.contiguous().view(torch.uint8).numpy()
        writer.write(memoryview(flat))
        done += len(values)
        if done == math.prod(shape):
            writer.close()
        else:
            self._open[key] = (writer, done)

    def close(self) -> None:
        """Closes what an error has left open."""
        # Behind an error: a file that is complete has closed itself.
        for writer, _ in self._open.values():
            writer.close()
        self._open.clear()
