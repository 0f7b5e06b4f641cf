"""Writing of a model's weights as files that `transformers` loads, from any source of partitions.

    units ──► chunks of a rank's partition ──► requested dtype ──► each segment to its place in its file

A partition is read in order, a few chunks ahead, so the memory in use does not depend on the size of a unit or a
parameter. Bytes with checksums are compared as they are read. `offload export` writes from a store or a checkpoint,
`save_pretrained` from an engine.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch

from offload.aio import aligned_empty
from offload.engine.checkpoint.directory import write_new
from offload.engine.model_io.safetensors_folder import CONFIG, GENERATION, INDEX, SINGLE
from offload.engine.model_io.weight_source import Reading, Source
from offload.errors import ConfigError
from offload.fileio.safetensors_stream import Tensor, Writer, shard
from offload.fileio.safetensors_stream import plan as plan_file
from offload.layout.fingerprint import described_layouts
from offload.layout.flat_layout import UnitLayout
from offload.layout.master_weights import join, sources
from offload.sizes import count_of, parse_size
from offload.states import State
from offload.swapper.modes import DTYPES, MODES, Mode, dtype_name

_CHUNK_NUMEL = 1 << 21
"""Elements read at a time: 4 MiB in 16 bits, 8 MiB in fp32."""
_CHUNKS = 4
"""Number of chunks that are in memory at a time, most of them still being read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Names, dtypes and files of an export, decided before any file is created."""

    layouts: tuple[UnitLayout, ...]
    mode: Mode
    world_size: int
    frozen: bool
    """True if frozen weights are written."""
    dtype: torch.dtype
    names: Mapping[str, tuple[str, ...]]
    """For each parameter, the names under which it is written: its own, and tied names that no loader would tie."""
    shards: Mapping[str, Mapping[str, Tensor]]
    """Tensors of each file."""
    config: Mapping[str, Any] | None
    """Config of transformers; None if the model has none, or only weights are written."""
    generation: Mapping[str, Any] | None
    metadata: Mapping[str, str]

    @property
    def weights_nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensors in self.shards.values() for tensor in tensors.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all safetensors files, headers included."""
        heads = sum(len(plan_file(tensors, self.metadata)[0]) for tensors in self.shards.values())
        return heads + self.weights_nbytes


def shard_size(text: str | int) -> int:
    """Returns the limit of a file's size in bytes; raises `ConfigError`."""
    nbytes = parse_size(text)
    # A limit of 0 would put each tensor into a file of its own, which nobody means.
    if not nbytes:
        raise ConfigError(f"no weights fit in files of max_shard_size {text!r}; give a size such as 5GB")
    return nbytes


def make_plan(
    source: Source, dtype: str | torch.dtype | None, shard_nbytes: int, frozen: bool = True, name: str | None = None
) -> Plan:
    """Decides names, dtypes and files.

    Args:
        source: The weights.
        dtype: Dtype of the written weights; None for that of the model.
        shard_nbytes: Limit of a file's size in bytes.
        frozen: False to write only trainable weights and buffers.
        name: Name of the only file to write; None to write all files of a model's folder.

    Raises:
        ConfigError: If weights cannot be saved in `dtype`.
    """
    layouts = described_layouts(source.description)
    mode = MODES[source.description["mode"]]
    wanted = check_dtype(dtype) or mode.weight_dtype
    frozen = frozen and source.frozen
    tied: Mapping[str, str] = source.about.get("tied", {})
    config = source.about.get("config")
    # With a config, transformers ties weights as the config says. Without one, the files of a folder are for
    # `safetensors.torch.load_model`, which ties weights by the metadata, and a single file is for `load_state_dict`,
    # which expects all names.
    loader_ties = name is None if config is None else config.get("tie_word_embeddings", True)
    names: dict[str, tuple[str, ...]] = {}
    tensors: dict[str, Tensor] = {}
    for layout in layouts:
        for segment in layout.segments:
            if not (segment.trainable or frozen):
                continue
            others = () if loader_ties else (alias for alias, name in tied.items() if name == segment.name)
            names[segment.name] = (segment.name, *others)
            tensors |= dict.fromkeys(names[segment.name], Tensor(wanted, segment.shape))
    tensors |= {name: Tensor(value.dtype, tuple(value.shape)) for name, value in source.buffers.items()}
    metadata = {"format": "pt"} | (dict(tied) if config is None and loader_ties else {})
    if name is not None:
        files, config = {name: tensors}, None
    else:
        cut = shard(tensors, shard_nbytes) or [{}]
        files = {_file_name(index, len(cut)): each for index, each in enumerate(cut)}
    return Plan(
        layouts=layouts,
        mode=mode,
        world_size=int(source.description["world_size"]),
        frozen=frozen,
        dtype=wanted,
        names=names,
        shards=files,
        config=None if config is None else _config(config, source.about["class"], wanted),
        generation=None if config is None else source.about.get("generation_config"),
        metadata=metadata,
    )


def check_dtype(wanted: str | torch.dtype | None) -> torch.dtype | None:
    """Returns the dtype that a user asks for, None for None; raises `ConfigError` if weights cannot be saved in it."""
    if wanted is None:
        return None
    found = DTYPES.get(wanted) if isinstance(wanted, str) else wanted
    if found is None or found not in DTYPES.values():
        raise ConfigError(f"expected a dtype of saved weights from {', '.join(DTYPES)}, got {wanted!r}")
    return found


def _file_name(index: int, count: int) -> str:
    """Returns the name that transformers expects for file `index` of `count` files of weights."""
    return SINGLE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _config(config: Mapping[str, Any], architecture: str, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the config as `save_pretrained` writes it. transformers 5 uses another key for the dtype."""
    made_by = str(config.get("transformers_version", "")).partition(".")[0]
    key = "dtype" if "dtype" in config or (made_by.isdigit() and int(made_by) >= 5) else "torch_dtype"
    return {**config, "architectures": [architecture], key: str(dtype).removeprefix("torch.")}


# -- writing ------------------------------------------------------------------------------------------


class Sink(Protocol):
    """Protocol of a receiver of tensors."""

    def put(self, name: str, start: int, data: memoryview) -> None:
        """Receives bytes of a tensor.

        Args:
            name: Name of the tensor.
            start: First byte of the tensor.
            data: Valid until this returns.
        """
        ...


class Files:
    """The files of a plan, created in a folder that contains none of them; durable when the context ends.

    Args:
        folder: Must exist.
        plan: Names and sizes.
        buffers: Persistent buffers of the model, which are written by the constructor.

    Raises:
        IoError: If a file cannot be written. A full disk shows before any weight is written.
    """

    def __init__(self, folder: Path, plan: Plan, buffers: Mapping[str, torch.Tensor]) -> None:
        self._folder, self._plan = folder, plan
        self._writers: dict[str, Writer] = {}
        self._open = contextlib.ExitStack()
        try:
            for name, tensors in plan.shards.items():
                writer = self._open.enter_context(Writer(folder / name, tensors, plan.metadata))
                self._writers |= dict.fromkeys(tensors, writer)
            for name, value in buffers.items():
                self._writers[name].write_tensor(name, value)
        except BaseException as error:
            self._open.__exit__(type(error), error, error.__traceback__)
            raise

    def put(self, name: str, start: int, data: memoryview) -> None:
        """Writes bytes of a tensor into its file."""
        self._writers[name].write(name, start, data)

    def _write_heads(self) -> None:
        """Writes the index and the configs."""
        plan = self._plan
        if len(plan.shards) > 1:
            total = {"total_size": plan.weights_nbytes}
            places = {name: file for file, tensors in plan.shards.items() for name in tensors}
            _write_json(self._folder / INDEX, {"metadata": total, "weight_map": dict(sorted(places.items()))})
        if plan.config is not None:
            _write_json(self._folder / CONFIG, plan.config)
        if plan.generation is not None:
            _write_json(self._folder / GENERATION, plan.generation)

    def __enter__(self) -> Files:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)
        if kind is None:
            # Written last, when all weights are durable: without index and config nobody takes the folder for a model.
            self._write_heads()


def stream(source: Source, plan: Plan, sink: Sink, progress: Callable[[int], None] = lambda _: None) -> int:
    """Reads all weights, converts them to the dtype of the plan, and passes their bytes to `sink`.

    Args:
        source: The weights.
        plan: Made by `make_plan` for this source.
        sink: Receives the bytes, on the calling thread.
        progress: Called with the number of bytes after each read.

    Returns:
        The number of finite values that became infinite in the dtype of the plan.

    Raises:
        IoError: If bytes cannot be read or are damaged.
    """
    beyond = 0
    for chunk in _chunks(source, plan, progress):
        values = chunk.values.to(plan.dtype)
        # bf16 has the range of fp32, so only fp16 is checked.
        if plan.dtype is torch.float16:
            beyond += int((values.isinf() & ~chunk.values.isinf()).sum())
        for segment in plan.layouts[chunk.unit].segments:
            first, last = max(chunk.start, segment.start), min(chunk.start + len(values), segment.stop)
            if first < last and segment.name in plan.names:
                part: Any = values[first - chunk.start : last - chunk.start].view(torch.uint8).numpy()
                at = (first - segment.start) * plan.dtype.itemsize
                for name in plan.names[segment.name]:
                    sink.put(name, at, memoryview(part))
    return beyond


def notices(source: Source, plan: Plan, beyond: int) -> tuple[str, ...]:
    """Returns messages for the user about the written files.

    Args:
        source: The weights.
        plan: The plan that was written.
        beyond: Result of `stream`.
    """
    found: list[str] = []
    if beyond:
        found.append(
            f"{count_of(beyond, 'value is', 'values are')} out of the range of {dtype_name(plan.dtype)} and saved as "
            "infinite"
        )
    if source.about.get("config") is None:
        found.append("the model has no transformers config, so only weights are saved")
    elif str(source.about["class"]).startswith("Peft"):
        found.append("the names are those of peft's model; engine.save_pretrained saves the adapter alone")
    absent = sum(segment.name not in plan.names for layout in plan.layouts for segment in layout.segments)
    if absent:
        found.append(
            f"{count_of(absent, 'frozen weight is', 'frozen weights are')} not in the files, because they were left out"
        )
    return tuple(found)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes `content` to a new file, readable for people."""
    write_new(path, (json.dumps(content, indent=2) + "\n").encode())


# -- reading ------------------------------------------------------------------------------------------


class _Chunk(NamedTuple):
    """Consecutive weights of a unit, in the dtype of the weight, or in fp32 if they are master weights."""

    unit: int
    start: int
    """First element, in the unit's layout."""
    values: torch.Tensor


class _SegmentRange(NamedTuple):
    """Elements of a partition that are read together, as one chunk."""

    rank: int
    unit: int
    start: int
    """First element, in the unit's layout."""
    position: int
    """First element, in the partition."""
    numel: int
    states: tuple[State, ...]
    """States that are read: the weight alone, or those that hold the master weight."""


def read_nbytes(plan: Plan) -> int:
    """Returns the bytes that an export reads."""
    return sum(s.numel * plan.mode.weights[state].itemsize for s in _segments(plan) for state in s.states)


def _segments(plan: Plan) -> Iterator[_SegmentRange]:
    """Yields the chunks of all partitions, unit by unit and rank by rank, in order within each partition."""
    weight: tuple[State, ...] = (State.WEIGHT,)
    # In the model's own dtype the weights are written as they are; for any other dtype the masters are rounded once.
    wanted = weight if plan.dtype is plan.mode.weight_dtype else sources(plan.mode.weights)
    for unit, layout in enumerate(plan.layouts):
        for rank in range(plan.world_size):
            position = 0
            trainable, frozen = layout.trainable(rank, plan.world_size), layout.frozen(rank, plan.world_size)
            for share, states in ((trainable, wanted), (frozen if plan.frozen else range(0), weight)):
                for start in range(share.start, share.stop, _CHUNK_NUMEL):
                    numel = min(_CHUNK_NUMEL, share.stop - start)
                    yield _SegmentRange(rank, unit, start, position, numel, states)
                    position += numel


def _chunks(source: Source, plan: Plan, progress: Callable[[int], None]) -> Iterator[_Chunk]:
    """Yields the chunks of all units, reading a few chunks ahead. A chunk is valid until the next one is requested."""
    dtypes = plan.mode.weights
    buffers = [aligned_empty(_CHUNK_NUMEL * 4) for _ in range(_CHUNKS)]  # at most 4 bytes are read for an element
    flying: deque[tuple[_SegmentRange, dict[State, memoryview], list[Reading]]] = deque()

    def deliver() -> _Chunk:
        segment, read, readings = flying[0]
        for reading in readings:
            progress(reading.wait())
        flying.popleft()
        # The values may be views of the buffer, which is reused only when the consumer requests the next chunk.
        parts = {state: torch.frombuffer(memory, dtype=dtypes[state]) for state, memory in read.items()}
        values = parts[State.WEIGHT] if segment.states == (State.WEIGHT,) else join(parts)
        return _Chunk(segment.unit, segment.start, values)

    try:
        for count, segment in enumerate(_segments(plan)):
            if len(flying) == _CHUNKS:
                yield deliver()
            read: dict[State, memoryview] = {}
            readings: list[Reading] = []
            flying.append((segment, read, readings))
            end = 0
            for state in segment.states:
                start, end = end, end + segment.numel * dtypes[state].itemsize
                read[state] = buffers[count % _CHUNKS][start:end]
                at = segment.position * dtypes[state].itemsize
                # The entry is in `flying` before its reads begin: if a later one fails to begin, `finally` waits for
                # the others.
                readings.append(source.read(segment.rank, segment.unit, state, at, read[state]))
        while flying:
            yield deliver()
    finally:
        # Reads are pending here after an error, or if the consumer stops early; their buffers must outlive them.
        for *_, readings in flying:
            for reading in readings:
                with contextlib.suppress(OSError):
                    reading.wait()
