"""`offload export`: the weights of a run or a checkpoint as files that transformers loads.

    units ──► chunks of a rank's partition ──► in the dtype asked for ──► each stretch to its place in its file

A partition is read in order, a few chunks ahead, so neither a unit nor a parameter is ever in memory as a whole, and
all that is read is compared with its checksums. Everything is written into a folder beside the one that is asked for,
which takes its name in the end.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offload.aio import aligned_empty
from offload.engine.checkpoint_files import find
from offload.engine.checkpoint_source import CheckpointSource
from offload.engine.description import described_layouts
from offload.engine.layout import UnitLayout
from offload.engine.masters import join, sources
from offload.engine.source import Reading, Source, StoreSource
from offload.engine.tensor_file import Tensor, Writer, plan, shard
from offload.errors import IoError, StoreError
from offload.sizes import format_size
from offload.swapper.states import MODES, Mode, State
from offload.swapper.store import Queue
from offload.swapper.store.folder import Lock, sync_folder

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}

_CHUNK_NUMEL = 1 << 21
"""Elements read at a time: 4 MiB in 16 bits, 8 MiB in fp32."""
_CHUNKS = 4


class Exported(NamedTuple):
    """What was written."""

    path: Path
    epoch: int
    dtype: str
    files: tuple[str, ...]
    nbytes: int
    """Of all tensors."""
    parameters: int
    notices: tuple[str, ...]


class Plan(NamedTuple):
    """What will be written: decided before a file is made."""

    layouts: tuple[UnitLayout, ...]
    mode: Mode
    world_size: int
    frozen: bool
    """Whether weights that do not train are written."""
    dtype: torch.dtype
    names: Mapping[str, tuple[str, ...]]
    """For each parameter the names under which it is written: its own, and tied ones that no loader would tie."""
    shards: Mapping[str, Mapping[str, Tensor]]
    """For each file its tensors."""
    config: Mapping[str, Any] | None
    metadata: Mapping[str, str]

    @property
    def weights_nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensors in self.shards.values() for tensor in tensors.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all files of tensors."""
        heads = sum(len(plan(tensors, self.metadata)[0]) for tensors in self.shards.values())
        return heads + self.weights_nbytes


def open_source(path: Path, queue: Queue) -> Source:
    """A run's folder, a checkpoint's, or one of checkpoints, of which it is the latest. Raises `StoreError`."""
    checkpoint = find(path, None)
    return StoreSource(path, queue) if checkpoint is None else CheckpointSource(Path(checkpoint), queue)


def make_plan(source: Source, dtype: str | None, shard_nbytes: int) -> Plan:
    """Decide names, dtypes and files."""
    layouts = described_layouts(source.description)
    mode = MODES[source.description["mode"]]
    wanted = mode.weight_dtype if dtype is None else DTYPES[dtype]
    tied: Mapping[str, str] = source.about.get("tied", {})
    config = source.about.get("config")
    # A loader of transformers ties what the config says; without a config, `safetensors.torch.load_model` does.
    loader_ties = config is None or config.get("tie_word_embeddings", True)
    names: dict[str, tuple[str, ...]] = {}
    tensors: dict[str, Tensor] = {}
    for layout in layouts:
        for segment in layout.segments:
            if not (segment.trainable or source.frozen):
                continue
            others = () if loader_ties else (alias for alias, name in tied.items() if name == segment.name)
            names[segment.name] = (segment.name, *others)
            tensors |= dict.fromkeys(names[segment.name], Tensor(wanted, segment.shape))
    tensors |= {name: Tensor(value.dtype, tuple(value.shape)) for name, value in source.buffers.items()}
    cut = shard(tensors, shard_nbytes) or [{}]
    files = {_file_name(index, len(cut)): each for index, each in enumerate(cut)}
    metadata = {"format": "pt"} | (dict(tied) if config is None else {})
    config = None if config is None else _config(config, source.about["class"], wanted)
    return Plan(
        layouts, mode, int(source.description["world_size"]), source.frozen, wanted, names, files, config, metadata
    )


def _file_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _config(config: Mapping[str, Any], architecture: str, dtype: torch.dtype) -> dict[str, Any]:
    """As `save_pretrained` writes it: transformers 5 has another name for the dtype."""
    made_by = str(config.get("transformers_version", "")).partition(".")[0]
    key = "dtype" if "dtype" in config or (made_by.isdigit() and int(made_by) >= 5) else "torch_dtype"
    return {**config, "architectures": [architecture], key: str(dtype).removeprefix("torch.")}


# -- the folder ---------------------------------------------------------------------------------------


def export(source: Source, out: Path, plan: Plan, progress: Callable[[int], None] = lambda _: None) -> Exported:
    """Write what is planned to the folder `out`, which must not be there, or be empty.

    Where it fails, nothing is left; a kill leaves `<out>.partial`, which the next export removes. `progress` is told
    of bytes as they are read. Raises `StoreError` and `IoError`.
    """
    out = out.resolve()
    check_target(out)
    notices: list[str] = []
    with _partial(out, notices) as folder:
        free = shutil.disk_usage(folder).free
        if free < plan.nbytes:
            raise StoreError(
                f"{out} needs {format_size(plan.nbytes)}, its drive has {format_size(free)} free; free some room, or "
                f"choose another folder"
            )
        beyond = _write(source, folder, plan, progress)
        if beyond:
            notices.append(f"{beyond} values are beyond what {_short(plan.dtype)} holds: they are infinite now")
        if plan.config is None:
            notices.append("the model has no transformers config, so there are weights alone")
        absent = sum(s.name not in plan.names for layout in plan.layouts for s in layout.segments)
        if absent:
            notices.append(f"{absent} frozen weights are not in it: they were left out when it was saved")
    return Exported(
        out,
        source.epoch,
        _short(plan.dtype),
        tuple(sorted(path.name for path in out.iterdir())),
        plan.weights_nbytes,
        sum(s.numel for layout in plan.layouts for s in layout.segments if s.name in plan.names),
        tuple(notices),
    )


def check_target(out: Path) -> None:
    """Raise `StoreError` where an export to `out` would touch what is there."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise StoreError(f"{out} is there already; give a folder that is not there, or an empty one")
    if out.is_mount():
        raise StoreError(f"{out} is a drive's root, which cannot be replaced; give a folder in it")
    if not out.parent.is_dir():
        raise StoreError(f"there is no folder {out.parent}")


@contextlib.contextmanager
def _partial(out: Path, notices: list[str]) -> Iterator[Path]:
    """A locked folder beside `out`, which has its name in the end, or is gone."""
    folder = out.with_name(f"{out.name}.partial")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise IoError(str(folder), 0, 0, error.errno or errno.EIO, "make") from error
    with Lock(folder):
        left = [path for path in folder.iterdir() if path.name != "lock"]
        foreign = [path.name for path in left if not (path.name.startswith("model") or path.name == "config.json")]
        if foreign:
            raise StoreError(
                f"{folder} holds {foreign[0]}, which no export leaves; move it away, or choose another name"
            )
        if left:
            nbytes = sum(path.stat().st_blocks * 512 for path in left)
            notices.append(f"removed {folder}, {format_size(nbytes)} that an export left that was cut short")
        for path in left:
            path.unlink()
        try:
            yield folder
            (folder / "lock").unlink()
            sync_folder(folder)
            os.rename(folder, out)
            sync_folder(out.parent)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _write(source: Source, folder: Path, plan: Plan, progress: Callable[[int], None]) -> int:
    """All files. Returns how many finite values have become infinite."""
    with contextlib.ExitStack() as stack:
        writers: dict[str, Writer] = {}
        for name, tensors in plan.shards.items():
            writer = stack.enter_context(Writer(folder / name, tensors, plan.metadata))
            writers |= dict.fromkeys(tensors, writer)
        for name, value in source.buffers.items():
            writers[name].write_tensor(name, value)
        beyond = 0
        for chunk in _chunks(source, plan, progress):
            values = chunk.values.to(plan.dtype)
            if plan.dtype is torch.float16:
                beyond += int((values.isinf() & ~chunk.values.isinf()).sum())
            for segment in plan.layouts[chunk.unit].segments:
                first, last = max(chunk.start, segment.start), min(chunk.start + len(values), segment.stop)
                if first < last:
                    part: Any = values[first - chunk.start : last - chunk.start].view(torch.uint8).numpy()
                    at = (first - segment.start) * plan.dtype.itemsize
                    for name in plan.names[segment.name]:
                        writers[name].write(name, at, memoryview(part))
    if len(plan.shards) > 1:
        total = {"total_size": plan.weights_nbytes}
        places = {name: file for file, tensors in plan.shards.items() for name in tensors}
        index = {"metadata": total, "weight_map": dict(sorted(places.items()))}
        _write_json(folder / "model.safetensors.index.json", index)
    if plan.config is not None:
        _write_json(folder / "config.json", plan.config)
    return beyond


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("x") as file:
        file.write(json.dumps(content, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _short(dtype: torch.dtype) -> str:
    return next(name for name, each in DTYPES.items() if each is dtype)


# -- reading ------------------------------------------------------------------------------------------


class _Chunk(NamedTuple):
    unit: int
    start: int
    """The first element, in the unit's layout."""
    values: torch.Tensor


class _Stretch(NamedTuple):
    """Elements of a partition that are read at a time."""

    rank: int
    unit: int
    start: int
    """The first, in the unit's layout."""
    position: int
    """The first, in the partition."""
    numel: int
    states: tuple[State, ...]
    """What is read of them: the weight, or that of which the master is made."""


def read_nbytes(plan: Plan) -> int:
    """Bytes that an export reads."""
    return sum(s.numel * plan.mode.weights[state].itemsize for s in _stretches(plan) for state in s.states)


def _stretches(plan: Plan) -> Iterator[_Stretch]:
    weight: tuple[State, ...] = (State.WEIGHT,)
    wanted = weight if plan.dtype is plan.mode.weight_dtype else sources(plan.mode.weights)
    for unit, layout in enumerate(plan.layouts):
        for rank in range(plan.world_size):
            position = 0
            trainable, frozen = layout.trainable(rank, plan.world_size), layout.frozen(rank, plan.world_size)
            for share, states in ((trainable, wanted), (frozen if plan.frozen else range(0), weight)):
                for start in range(share.start, share.stop, _CHUNK_NUMEL):
                    numel = min(_CHUNK_NUMEL, share.stop - start)
                    yield _Stretch(rank, unit, start, position, numel, states)
                    position += numel


def _chunks(source: Source, plan: Plan, progress: Callable[[int], None]) -> Iterator[_Chunk]:
    """The elements of all units, a few chunks read ahead; in fp32 where there is more of them than the weight."""
    dtypes = plan.mode.weights
    buffers = [aligned_empty(_CHUNK_NUMEL * 4) for _ in range(_CHUNKS)]  # at most 4 bytes are read of an element
    flying: deque[tuple[_Stretch, dict[State, memoryview], list[Reading]]] = deque()

    def deliver() -> _Chunk:
        stretch, read, readings = flying[0]
        for reading in readings:
            progress(reading.wait())
        flying.popleft()
        parts = {state: torch.frombuffer(memory, dtype=dtypes[state]) for state, memory in read.items()}
        values = parts[State.WEIGHT] if stretch.states == (State.WEIGHT,) else join(parts)
        return _Chunk(stretch.unit, stretch.start, values)

    try:
        for count, stretch in enumerate(_stretches(plan)):
            if len(flying) == _CHUNKS:
                yield deliver()
            read: dict[State, memoryview] = {}
            readings: list[Reading] = []
            flying.append((stretch, read, readings))
            end = 0
            for state in stretch.states:
                start, end = end, end + stretch.numel * dtypes[state].itemsize
                read[state] = buffers[count % _CHUNKS][start:end]
                at = stretch.position * dtypes[state].itemsize
                readings.append(source.read(stretch.rank, stretch.unit, state, at, read[state]))
        while flying:
            yield deliver()
    finally:
        for *_, readings in flying:
            for reading in readings:
                with contextlib.suppress(OSError):  # what has ended this is told; memory must outlive its requests
                    reading.wait()
