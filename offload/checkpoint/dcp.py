"""Reads the folders that torch.distributed.checkpoint (DCP) writes, of FSDP2, of FSDP, and of plain models.

.metadata                a pickle: entries by name, the chunks of each tensor, and their places
__<rank>_<i>.distcp      chunks and other values, each as `torch.save` writes it, one after the other

An entry has the path of keys that led to it in the state dict that was saved. Users choose the outer keys, so model and
optimizer are recognized by their contents: states of the optimizer are at (…, "state", parameter, state), or at (…,
"state.<parameter>.<state>") of a flattened optimizer; the model is the dict that contains these parameters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from offload.checkpoint.foreign_contents import (
    FLOATS,
    SavedContents,
    SavedCounters,
    SavedParameter,
    attributes,
    check_whole,
    fragment,
    shape_of,
    whole,
)
from offload.errors import StoreError
from offload.fileio.torch_file import Record, StoredTensor, read_pickle, read_torch_file
from offload.states import State

DCP = "torch.distributed.checkpoint"
METADATA = ".metadata"
_STATE, _GROUPS, _MEMBERS = "state", "param_groups", "params"
_MODELS, _SCHEDULES = ("model", "module"), ("scheduler", "lr_scheduler")
_TENSOR = "TensorStorageMetadata"
_MOST_RUNS = 4_000_000
"""Most runs of consecutive elements in a chunk, such as the rows of a matrix that is divided by columns."""
_FLOATS = frozenset(map(str, FLOATS))
_Path = tuple[Any, ...]


def is_dcp(folder: Path) -> bool:
    """Returns whether torch.distributed.checkpoint has saved into `folder`."""
    return (folder / METADATA).is_file()


class _Entry(NamedTuple):
    name: str
    path: _Path
    """Keys that led to the value."""
    about: Record
    """Metadata of the value."""

    @property
    def dtype(self) -> str:
        return str(self.about.state["properties"].state[0].name)

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.about.state["size"])

    @property
    def chunks(self) -> Sequence[Record]:
        chunks: Sequence[Record] = self.about.state["chunks"]
        return chunks

    @property
    def is_tensor(self) -> bool:
        return self.about.name.endswith(_TENSOR)


class _DcpFolder:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Everything in it is a record without behaviour: torch's own reader would run code that the pickle names.
        about = attributes(read_pickle(folder / METADATA))
        paths = about["planner_data"] or {}
        self.entries = [
            _Entry(name, tuple(paths.get(name, (name,))), entry) for name, entry in about["state_dict_metadata"].items()
        ]
        # By name and offset, as the chunks of a tensor lie in the files of several ranks.
        self._places = {
            (index.state["fqn"], index.state.get("offset")): place.state
            for index, place in about["storage_data"].items()
        }

    def value(self, entry: _Entry) -> Any:
        """Returns a small value: numbers, strings and containers of them; a tensor is read."""
        if not entry.is_tensor:
            return self._read(entry.name, None)
        (chunk,) = (candidate for candidate in entry.chunks if 0 not in candidate.state["sizes"])
        tensor = self._read(entry.name, chunk.state["offsets"])
        return tensor.read() if isinstance(tensor, StoredTensor) else tensor

    def tensor(self, entry: _Entry) -> StoredTensor:
        """Returns a tensor that is saved in one piece."""
        (chunk,) = entry.chunks
        value = self._read(entry.name, chunk.state["offsets"])
        if not isinstance(value, StoredTensor):
            raise ValueError(f"{entry.name} is no tensor")
        return value

    def fragments(self, entry: _Entry) -> list[Any]:
        """Returns a tensor as fragments in the order of its elements."""
        placed = []
        shape = entry.shape
        for chunk in entry.chunks:
            offsets, sizes = shape_of(chunk.state["offsets"]), shape_of(chunk.state["sizes"])
            # A rank without a part of a small tensor saves a chunk without elements.
            if 0 in sizes:
                continue
            what = f"{entry.name} in {self._folder}"
            tensor = self._read(entry.name, offsets)
            (all_of_it,) = whole(tensor, what)
            if all_of_it.numel != math.prod(sizes):
                raise StoreError(f"{what} has a chunk of {all_of_it.numel} elements, expected {math.prod(sizes)}")
            numel, starts = _runs(shape, offsets, sizes)
            for number, start in enumerate(starts):
                placed.append((start, fragment(tensor, number * numel, numel, what)))
        # The chunks come in any order. If they are columns, neighbouring runs come from different chunks.
        placed.sort(key=lambda pair: pair[0])
        position = 0
        for start, part in placed:
            if start != position:
                raise StoreError(
                    f"{self._folder} lacks elements of {entry.name}, or has them twice, at element {position}: files "
                    "of ranks are missing, or are of different saves"
                )
            position += part.numel
        return [part for _, part in placed]

    def _read(self, name: str, offsets: Any) -> Any:
        """Returns the value at the given offsets of an entry, without the bytes of a tensor."""
        place = self._places[name, None if offsets is None else tuple(offsets)]
        if place.get("transform_descriptors"):
            raise StoreError(
                f"{name} in {self._folder} is compressed ({', '.join(place['transform_descriptors'])}), which is not "
                "supported: save it without extensions of the writer"
            )
        file = place["relative_path"]
        # A made-up path must not leave the folder.
        if Path(file).name != file:
            raise StoreError(f"{self._folder} names the file {file}, which is not in it")
        return read_torch_file(self._folder / file, range(place["offset"], place["offset"] + place["length"]))


def _runs(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> tuple[int, list[int]]:
    """Returns the length of a chunk's runs of consecutive elements in its tensor, and the start of each run."""
    # From the last dimension that is cut on, all elements are consecutive.
    cut = max((at for at in range(len(shape)) if sizes[at] != shape[at]), default=0)
    numel = math.prod(sizes[cut:])
    strides = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    if math.prod(sizes[:cut]) > _MOST_RUNS:
        raise StoreError(
            f"a chunk of shape {list(sizes)} of a tensor of shape {list(shape)} is more than {_MOST_RUNS} runs of "
            "elements, which is not supported: save the checkpoint with tensors divided by rows"
        )
    outer = itertools.product(*(range(size) for size in sizes[:cut]))
    return numel, [first + sum(i * stride for i, stride in zip(index, strides, strict=False)) for index in outer]


# -- what an entry is ---------------------------------------------------------------------------------


class _Optimizer(NamedTuple):
    states: Mapping[str, Mapping[str, _Entry]]
    """By parameter and state."""
    groups: Sequence[Mapping[str, Any]]
    members: Sequence[Sequence[str]]
    """Parameters of each group."""
    names: frozenset[str]
    """All its entries."""

    @property
    def trained(self) -> frozenset[str]:
        return frozenset(name for group in self.members for name in group) | self.states.keys()


def _optimizer(folder: _DcpFolder) -> _Optimizer:
    """Returns the entries of the optimizer; none if only a model was saved."""
    states: dict[str, dict[str, _Entry]] = {}
    groups: dict[Any, dict[str, Any]] = {}
    names = set()
    for entry in folder.entries:
        # A parameter's name has dots, and a state's name has none.
        kind, _, rest = str(entry.path[-1]).partition(".")
        first, _, last = rest.rpartition(".")
        if len(entry.path) > 2 and entry.path[-3] in (_STATE, _GROUPS):
            kind, first, last = entry.path[-3:]
        elif kind not in (_STATE, _GROUPS) or not first:
            continue
        if kind == _GROUPS:
            groups.setdefault(first, {})[str(last)] = folder.value(entry)
        else:
            states.setdefault(str(first), {})[str(last)] = entry
        names.add(entry.name)
    # An optimizer that is not flattened lists the parameters of each group, and has one set of numbers for them.
    listed = [group for group in groups.values() if _MEMBERS in group]
    # A flattened optimizer has numbers for each parameter: parameters with equal numbers are one group.
    flat: dict[str, dict[str, Any]] = {}
    for name, group in groups.items():
        if _MEMBERS not in group:
            flat.setdefault(repr(sorted(group.items())), {**group, _MEMBERS: []})[_MEMBERS].append(name)
    listed_groups = listed or list(flat.values())
    members = [list(map(str, group[_MEMBERS])) for group in listed_groups]
    # A learning rate may be a tensor.
    numbers = [
        {key: float(value) if hasattr(value, "item") else value for key, value in group.items() if key != _MEMBERS}
        for group in listed_groups
    ]
    return _Optimizer(states, numbers, members, frozenset(names))


def _model(folder: _DcpFolder, optimizer: _Optimizer, where: Path) -> dict[str, _Entry]:
    # A model's state dict is flat: its tensors share all keys but the last one, the name.
    dicts: dict[_Path, dict[str, _Entry]] = {}
    for entry in folder.entries:
        if entry.is_tensor and entry.name not in optimizer.names:
            dicts.setdefault(entry.path[:-1], {})[str(entry.path[-1])] = entry
    trained = optimizer.trained
    fitting = {path: members for path, members in dicts.items() if trained <= members.keys()}
    named = {path: members for path, members in fitting.items() if path and path[-1] in _MODELS}
    for choice in (fitting, named):
        if len(choice) == 1:
            return next(iter(choice.values()))
    raise StoreError(
        f"{where} has tensors under {', '.join(sorted('.'.join(map(str, path)) or '(no key)' for path in dicts))}, and "
        f"none or several of these can be the model{' of its optimizer' * bool(trained)}: save "
        '{"model": …, "optim": …}, as get_state_dict gives them'
    )


def _lists(value: Any) -> Any:
    """Returns a value with lists for the dicts whose keys count up from zero."""
    if not isinstance(value, dict):
        return value
    inner = {key: _lists(item) for key, item in value.items()}
    return list(inner.values()) if inner and list(inner) == list(range(len(inner))) else inner


# -- reading ------------------------------------------------------------------------------------------


def read_dcp(where: Path, states: bool) -> SavedContents:
    """Reads all but the tensors of a checkpoint."""
    folder = _DcpFolder(where)
    optimizer = _optimizer(folder)
    trained = optimizer.trained
    parameters: dict[str, SavedParameter] = {}
    buffers: dict[str, StoredTensor] = {}
    for name, entry in _model(folder, optimizer, where).items():
        # Parameters have floats. A buffer of floats is taken for a frozen weight: only a model can distinguish them.
        if name not in trained and entry.dtype not in _FLOATS:
            buffers[name] = folder.tensor(entry)
            continue
        saved_states = optimizer.states.get(name, {})
        entries = {State.WEIGHT: entry} | {
            state: saved_states[state.value] for state in State if states and state.value in saved_states
        }
        parts = {state: folder.fragments(part) for state, part in entries.items()}
        # One update if there are states and no count, as with momentum.
        steps = int(folder.value(saved_states["step"])) if "step" in saved_states else int(bool(saved_states))
        # Without an optimizer it is not known which parameters trained.
        trainable = name in trained or not trained
        parameters[name] = SavedParameter(entry.shape, trainable, parts, steps)
    check_whole(parameters, where)
    # Values that are neither tensors nor the optimizer's, as the nested dict that was saved.
    nested: dict[Any, Any] = {}
    for entry in folder.entries:
        if not entry.is_tensor and entry.name not in optimizer.names:
            inner = nested
            for key in entry.path[:-1]:
                inner = inner.setdefault(key, {})
            inner[entry.path[-1]] = folder.value(entry)
    client_state = {key: _lists(value) for key, value in nested.items()}
    # The user's values are in one dict with the schedule, under the name that most scripts give it.
    schedule = next((client_state.pop(name) for name in _SCHEDULES if name in client_state), None)
    # DCP saves no count of steps: the parameter with the most updates was updated in every step.
    global_steps = max((parameter.steps for parameter in parameters.values()), default=0)
    return SavedContents(
        program=DCP,
        parameters=parameters,
        tied={},
        buffers=buffers,
        groups=optimizer.groups,
        members=optimizer.members,
        moments=frozenset(
            state for entry_states in optimizer.states.values() for state in entry_states if state != "step"
        ),
        counters=SavedCounters(global_steps=global_steps, skipped_steps=0, micro_steps=global_steps, global_samples=0),
        scheduler=schedule,
        theirs=client_state,
    )
