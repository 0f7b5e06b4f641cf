"""Another program's checkpoint in the form that an engine loads: each parameter is a unit of its own.

Weights count as masters in fp32, whatever dtype the model has, so the checkpoint counts as an fp32 engine's. The
loading engine makes its own weights from these masters. Tensors stay in the program's files until they are read, chunk
by chunk.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offload.aio import DirectFile
from offload.aio.protocols import Future, Pending, Queue
from offload.checkpoint.dcp import DCP, is_dcp, read_dcp
from offload.checkpoint.deepspeed import is_universal, is_zero, read_universal, read_zero
from offload.checkpoint.files import Manifest
from offload.checkpoint.foreign_contents import Fragment, SavedContents, SavedParameter
from offload.checkpoint.load import CLIENT_STATE, FoundCheckpoint, LoadOptions, with_first_names
from offload.checkpoint.resharding import Run, places
from offload.engine.snapshot import Snapshot, as_bytes
from offload.errors import IoError, StoreError, UsageError
from offload.fileio.buffered_copy import BUFFER_NBYTES, flow, flow_buffers
from offload.fileio.plain_json import to_plain
from offload.fileio.torch_file import Storage
from offload.layout.fingerprint import describe
from offload.layout.flat_layout import ParameterSegment, arrange
from offload.layout.modes import ADAM, LAMB, RULE_LAYOUTS, Mode, make_mode
from offload.states import State

# -- progress ------------------------------------------------------------------------------------------
#
# Counters, schedule, loss scale and the user's own state of another program, as an engine's snapshot.


def snapshot(contents: SavedContents) -> Snapshot:
    """Returns the counters, the schedule, the groups' numbers, the loss scale and the buffers.

    Other programs save neither random generators, nor the position in the data, nor the class of the schedule. So the
    snapshot has no generators, and its settings name no schedule and no optimizer.
    """
    groups = [_numbers(group) for group in contents.groups]
    facts = {
        **dataclasses.asdict(contents.counters),
        "parameter_steps": [[parameter.steps] for parameter in contents.parameters.values()],
        "scheduler": _plain(contents.scheduler),
        "loss_scale": contents.loss_scale,
        "client_state": {},
        "registered": [],
        "data": None,
        "groups": groups,
        "configured": [
            {**values, "lr": float(group.get("initial_lr", values["lr"]))}
            for values, group in zip(groups, contents.groups, strict=True)
        ],
        "settings": {},
        **({"members": list(map(list, contents.members))} if len(contents.members) > 1 else {}),
    }
    buffers = {name: tensor.read() for name, tensor in contents.buffers.items()}
    return Snapshot(facts, {}, buffers)


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the finite numbers of an optimizer's group, with lists for tuples."""

    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max

    numbers: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(value, list | tuple) and key != "params" and all(map(is_number, value)):
            numbers[key] = list(map(float, value))
        elif is_number(value):
            numbers[key] = float(value)
    return numbers


def _plain(value: Any) -> Any:
    """Returns a value as JSON; None if it contains objects that JSON cannot represent."""
    try:
        return to_plain(value, "a value", "")
    except UsageError:
        return None


# -- checkpoint ----------------------------------------------------------------------------------------


_PRECISION = "fp32"
_OPEN = 64
"""Most files that are open at a time: a universal checkpoint has three for each parameter."""

_NAMED = 3
"""Most names in a line."""


_FORMATS = (
    ("DeepSpeed", is_universal, read_universal),
    ("DeepSpeed", is_zero, read_zero),
    (DCP, is_dcp, read_dcp),
)
"""For each format: the program, a test for a folder of this format, and a reader of everything but tensors."""


def is_foreign(folder: Path) -> bool:
    """Returns whether `folder` is one checkpoint of DeepSpeed or of torch.distributed.checkpoint."""
    return any(matches(folder) for _, matches, _ in _FORMATS)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignCheckpoint(FoundCheckpoint):
    """A checkpoint of another program whose files were checked, except for the bytes of its tensors."""

    parameters: Sequence[SavedParameter]
    """The parameter of each unit."""

    def open(self, queue: Queue) -> ForeignStates:
        return ForeignStates(self.parameters, queue)

    def check_bytes(self, options: LoadOptions, queue: Queue, rank: int, world_size: int) -> None:
        """Compares this rank's share of the storages that any rank will read with their checksums.

        For the arguments see `FoundCheckpoint.check_bytes`.
        """
        storages = dict.fromkeys(
            part.storage
            for parameter in self.parameters
            for state, parts in parameter.states.items()
            if options.states or state is State.WEIGHT
            for part in parts
        )
        try:
            # In the order of files: the shards of a tensor are in the files of several ranks.
            compare_storages(sorted(storages)[rank::world_size], queue)
        except IoError as error:
            raise StoreError(
                f"the checkpoint {self.folder} cannot be read: {error}; load another checkpoint"
            ) from error


def look_foreign(folder: Path, states: bool, tied_here: Mapping[str, str]) -> ForeignCheckpoint:
    """Reads all of another program's checkpoint except its tensors. Nothing in it is executed."""
    program, read_contents = next((program, reader) for program, matches, reader in _FORMATS if matches(folder))
    try:
        contents = read_contents(folder, states)
        mode = _mode(contents, folder, states)
        layouts = tuple(
            arrange(name, [ParameterSegment(name, parameter.shape, 0, parameter.numel, parameter.trainable)], 1)
            for name, parameter in contents.parameters.items()
        )
        progress = snapshot(contents)
    # A file of torch.save may contain anything under the names that are expected.
    # RuntimeError: torch's, for a tensor that is no number; RecursionError is one.
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        lacks = f"the entry {error} is missing" if isinstance(error, KeyError) else "an entry is of another type"
        raise StoreError(
            f"{folder} does not have the contents of a checkpoint of {program}: expected files of one "
            f"save, and {lacks}; fetch all of its files again, or load another checkpoint"
        ) from error
    # The user's own values as JSON, and the names of values that JSON cannot hold.
    plain = {str(key): _plain(value) for key, value in contents.theirs.items()}
    lost = [str(key) for key, value in contents.theirs.items() if value is not None and plain[str(key)] is None]
    client = {key: value for key, value in plain.items() if key not in lost}
    about = {"class": f"{program}'s", "config": None, "tied": dict(contents.tied)}
    manifest = Manifest(progress.facts["global_steps"], "", True, describe(layouts, mode, 1), about, {})
    return ForeignCheckpoint(
        folder=folder,
        manifest=manifest,
        layouts=layouts,
        mode=mode,
        saved=with_first_names(places(layouts, contents.tied, True), tied_here),
        places=(),
        progress=progress,
        contents={CLIENT_STATE: as_bytes(json.dumps(client).encode())},
        own=True,
        notices=_notices(folder, contents, lost, mode.moments if states else ()),
        parameters=tuple(contents.parameters.values()),
    )


def _mode(contents: SavedContents, folder: Path, states: bool) -> Mode:
    """Returns the mode with the optimizer states of a checkpoint; raises `StoreError` if there is no such mode."""
    if not states:
        return make_mode(_PRECISION, ADAM)
    for name, rule in RULE_LAYOUTS.items():
        same = frozenset(state.value for state in rule.moments) == contents.moments
        if same and (name == LAMB) == ("lamb" in contents.optimizer):
            return make_mode(_PRECISION, name)
    raise StoreError(
        f"{folder} contains the optimizer states {', '.join(sorted(contents.moments))}, which no optimizer here has: "
        "load the weights alone (load_module_only=True)"
    )


def _notices(folder: Path, contents: SavedContents, lost: Sequence[str], moments: Sequence[State]) -> tuple[str, ...]:
    """Returns lines about contents that the checkpoint lacks, or that are not loaded."""
    notices = [
        f"{folder} is a checkpoint of {contents.program}, of which neither random generators nor a position in the "
        "data are loaded: both go on from where they are"
    ]
    without = [
        name
        for name, parameter in contents.parameters.items()
        if parameter.trainable and not all(parameter.states.get(state) for state in moments)
    ]
    if without:
        more = f" and {len(without) - _NAMED} more" if len(without) > _NAMED else ""
        notices.append(
            f"{folder} has no moments of {', '.join(without[:_NAMED])}{more}: they begin at zero, as for a parameter "
            "that never had a gradient"
        )
    if lost:
        notices.append(
            f"the client state {', '.join(lost)} of {folder} consists of other than plain values: not loaded"
        )
    return tuple(notices)


# -- bytes --------------------------------------------------------------------------------------------


class _Widened:
    """A read of 16-bit values into the end of their memory. The first `wait` widens them to fp32, in all of it."""

    def __init__(self, future: Future, memory: memoryview, dtype: torch.dtype) -> None:
        self._future, self._memory, self._dtype = future, memory, dtype
        self._widened = False

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> int:
        nbytes = self._future.wait()
        if not self._widened:
            # Copied first: the wider values would overwrite 16-bit values that are not widened yet.
            memory, dtype = self._memory, self._dtype
            values = torch.frombuffer(memory, dtype=dtype, offset=len(memory) - nbytes).clone()
            torch.frombuffer(memory, dtype=torch.float32).copy_(values)
            self._widened = True
        return nbytes


class ForeignStates:
    """The files of another program's states, open until `close`; implements `StateReader`."""

    def __init__(self, parameters: Sequence[SavedParameter], queue: Queue) -> None:
        self._parameters, self._queue = parameters, queue
        self._files: dict[Path, DirectFile] = {}

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def scales(self, unit: int) -> torch.Tensor:
        raise AssertionError(unit)

    def read(self, run: Run, state: State, memory: memoryview, start: int) -> Iterator[Pending]:
        """Begins to read the elements of a run, from each file that contains some of them.

        Args:
            memory: Memory of the state for the whole chunk.
            start: Element of `memory` where the run begins.
        """
        source, itemsize = run.saved, torch.float32.itemsize
        assert source is not None
        first, last = source.start, source.start + run.stop - run.start
        parts = self._parameters[source.unit].states.get(state, [])
        if not parts:
            # A parameter that had no gradient yet has no moments.
            torch.frombuffer(memory, dtype=torch.float32)[start : start + last - first].zero_()
        position = 0
        for part in parts:
            begin, end = max(position, first), min(position + part.numel, last)
            if begin < end:
                at = (start + begin - first) * itemsize
                yield self._read(part, begin - position, memory[at : at + (end - begin) * itemsize])
            position += part.numel

    def _read(self, part: Fragment, start: int, memory: memoryview) -> Pending:
        """Begins to read elements of a fragment, from `start` on, which fill `memory` as fp32."""
        nbytes = len(memory) // torch.float32.itemsize * part.dtype.itemsize
        # 16-bit values fill the second half of their memory, and are then widened to all of it.
        file, offset = self._open(part.storage.path), part.offset + start * part.dtype.itemsize
        future = self._queue.read(file, offset, memory[len(memory) - nbytes :])
        return future if part.dtype is torch.float32 else _Widened(future, memory, part.dtype)

    def _open(self, path: Path) -> DirectFile:
        """Returns an open file. Beyond `_OPEN` files the oldest is closed; its reads in flight end normally."""
        if path not in self._files:
            if len(self._files) >= _OPEN:
                self._files.pop(next(iter(self._files))).close()
            self._files[path] = DirectFile(path, writable=False)
        return self._files[path]


class _StorageChunk(NamedTuple):
    """Bytes of a storage."""

    storage: Storage
    start: int
    nbytes: int


def compare_storages(storages: Iterable[Storage], queue: Queue) -> None:
    """Compares storages with their checksums."""
    sums: dict[Storage, int] = {}
    files: dict[Path, DirectFile] = {}

    def begin(chunk: _StorageChunk, buffer: memoryview) -> Sequence[Future]:
        path = chunk.storage.path
        if path not in files:
            # Storages of a file follow one another, so only reads in flight still use the file before.
            files.clear()
            files[path] = DirectFile(path, writable=False)
        return [queue.read(files[path], chunk.storage.offset + chunk.start, buffer[: chunk.nbytes])]

    def end(chunk: _StorageChunk, buffer: memoryview) -> tuple[()]:
        # Chunks end in order, so a storage's sum continues from the chunk before.
        total = zlib.crc32(buffer[: chunk.nbytes], sums.pop(chunk.storage, 0))
        if chunk.start + chunk.nbytes < chunk.storage.nbytes:
            sums[chunk.storage] = total
        elif total != chunk.storage.crc32:
            raise StoreError(
                f"{chunk.storage.path} is damaged: the tensor at byte {chunk.storage.offset} does not match its "
                "checksum; load another checkpoint"
            )
        return ()

    def chunks() -> Iterator[_StorageChunk]:
        for storage in storages:
            for start in range(0, storage.nbytes, BUFFER_NBYTES):
                yield _StorageChunk(storage, start, min(BUFFER_NBYTES, storage.nbytes - start))

    flow(flow_buffers(), chunks(), begin, end)
