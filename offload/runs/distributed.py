"""Implementation of `offload export --format dcp`: a run as a folder of torch.distributed.checkpoint.

    <out>/__0_0.distcp          numbers of the optimizer's groups, counts of steps, buffers, the user's own values
    <out>/__0_1.distcp, …       a parameter's master, or one of its moments, in one piece
    <out>/.metadata             a pickle of torch's own classes: the place of each of these

`dcp.load` reads it into `{"model": …, "optim": …}` as `get_state_dict` gives them, of a plain model or of FSDP2 on any
mesh, with an optimizer that is flattened or not. `offload.runs.states_by_parameter` streams the states.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Callable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from offload.aio.unanswered import sync
from offload.checkpoint.dcp import METADATA
from offload.checkpoint.foreign_contents import MASTER
from offload.engine.snapshot import DECOUPLED
from offload.errors import StoreError
from offload.fileio import real_path
from offload.fileio.plain_json import from_plain
from offload.fileio.safetensors_stream import Tensor
from offload.model_io.save import arriving, check_room
from offload.runs.export import Exported, check_target
from offload.runs.states_by_parameter import StatesPlan, TrainedSource, write_states
from offload.sizes import count_of
from offload.torch_internals import flatten_state_dict, stored_at

KIND = "a folder of torch.distributed.checkpoint"
"""Name of the output, for messages."""
_SMALL = "__0_0.distcp"
_VERSION = "1.0.0"
"""Version of the format."""
_SLACK = 1 << 20
_OF_ADAM = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}
"""Values of a group of torch's Adam and AdamW that are no numbers."""


def export_distributed(
    source: TrainedSource, out: Path, plan: StatesPlan, progress: Callable[[int], None] = lambda _: None
) -> Exported:
    """Writes a folder of torch.distributed.checkpoint, completely or not at all.

    The source stays open; `out` must not exist, or be empty.
    """
    out = real_path(out)
    check_target(out)
    state = _state_dict(source, plan)
    messages: list[str] = []
    with arriving(out, messages.append) as folder:
        check_room(folder, plan.nbytes + _SLACK, out)
        writing = _Writing(folder, source.about.get("tied", {}))
        write_states(source, plan, writing.place, progress)
        writing.finish(state)
    files = sorted(path.name for path in out.iterdir())
    return plan.exported(out, source.step, files, (*messages, *_notices(source)))


def _notices(source: TrainedSource) -> Iterator[str]:
    yield "random generators and the position in the data are not in the folder: both begin there as the script says"
    if source.progress.facts["loss_scale"] is not None:
        yield "the loss scale is not in the folder: it begins there as the script says"


def _state_dict(source: TrainedSource, plan: StatesPlan) -> dict[str, Any]:
    """Returns the state dict as torch would save it, without the states that are streamed."""
    facts = source.progress.facts
    groups = _groups(facts, plan)
    optimizer: dict[str, Any] = {
        "state": {
            name: {"step": torch.tensor(float(steps), dtype=torch.float32, device="cpu")}
            for name, steps in plan.trainable.items()
        },
        "param_groups": groups,
    }
    # A flattened optimizer looks for the numbers under each parameter, an ordinary one in the list. Both are written.
    optimizer |= {
        f"param_groups.{name}.{key}": value
        for group in groups
        for name in group["params"]
        for key, value in group.items()
        if key != "params"
    }
    # Placed before the model and the optimizer, so that no name of the user replaces them.
    theirs = from_plain(source.client_state)
    schedule = from_plain(facts["scheduler"])
    return {
        **(theirs if isinstance(theirs, Mapping) else {}),
        **({"scheduler": schedule} if isinstance(schedule, Mapping) else {}),
        "model": dict(source.buffers),
        "optim": optimizer,
    }


def _groups(facts: Mapping[str, Any], plan: StatesPlan) -> list[dict[str, Any]]:
    """Returns the groups of the optimizer as `get_state_dict` does: their numbers, and names of trained parameters."""
    groups = facts["groups"]
    members = [plan.trainable] if len(groups) == 1 else facts.get("members")
    if members is None:
        raise StoreError(
            f"the optimizer has {count_of(len(groups), 'group')} of parameters, and {KIND} names the parameters of "
            "each, which this one, of DeepSpeed or an older version, does not: resume the run and commit a step, or "
            "export weights alone, without --format"
        )
    # An imported checkpoint does not contain this setting: it is taken for AdamW's.
    decoupled = facts["settings"].get(DECOUPLED, [True] * len(groups))
    counts = [
        len(collection) if isinstance(collection, Sized) else 0
        for collection in (groups, facts["configured"], members, decoupled)
    ]
    if len(set(counts)) > 1:
        raise StoreError(f"the facts on a step are damaged, or made up: they are of {counts} groups of parameters")
    return [
        {
            **_OF_ADAM,
            "decoupled_weight_decay": is_decoupled,
            "initial_lr": configured.get("lr"),
            **{key: tuple(value) if isinstance(value, list) else value for key, value in group.items()},
            "params": [name for name in names if name in plan.trainable],
        }
        for group, configured, names, is_decoupled in zip(groups, facts["configured"], members, decoupled, strict=True)
    ]


class _Writing:
    def __init__(self, folder: Path, tied: Mapping[str, str]) -> None:
        self._folder, self._tied = folder, tied
        self._numbers = itertools.count(1)
        self._metadata = Metadata({}, {}, {}, StorageMeta())
        self._metadata.version = _VERSION  # no argument in torch 2.6, which writes none; later ones read it

    def place(self, parameter: str, kind: str, tensor: Tensor) -> tuple[Path, Any]:
        """Returns path and content of the file of a state, and names it in the metadata; see `StateFile`."""
        path = self._folder / f"__0_{next(self._numbers)}.distcp"
        paths: list[tuple[str, ...]] = [("optim", "state", parameter, kind)]
        if kind == MASTER:
            # A model's state dict has a tied parameter under all its names.
            others = (name for name, first in self._tied.items() if first == parameter)
            paths = [("model", name) for name in (parameter, *others)]
        for key_path in paths:
            # The length is known when the file is complete.
            self._enter(".".join(key_path), key_path, tensor, path.name, 0, 0)
        return path, tensor

    def finish(self, state: Mapping[str, Any]) -> None:
        """Writes all but the streamed states, and the metadata."""
        flat, paths = flatten_state_dict(state)
        with (self._folder / _SMALL).open("xb") as file:
            for name, value in flat.items():
                start = file.tell()
                # Copied, since torch would write the whole storage of a view.
                torch.save(value.clone() if isinstance(value, torch.Tensor) else value, file)
                self._enter(name, paths[name], value, _SMALL, start, file.tell() - start)
            # Durable before the metadata, which name it.
            file.flush()
            sync(file.fileno(), file.name)
        places = self._metadata.storage_data
        for index, place in tuple(places.items()):
            if not place.length:
                file_nbytes = (self._folder / place.relative_path).stat().st_size
                places[index] = stored_at(place.relative_path, 0, file_nbytes)
        data = io.BytesIO()
        pickle.dump(self._metadata, data)
        # Written last, since torch takes a folder with metadata for a checkpoint.
        with (self._folder / METADATA).open("xb") as file:
            file.write(data.getbuffer())
            file.flush()
            sync(file.fileno(), file.name)

    def _enter(self, name: str, path: tuple[Any, ...], value: Any, file: str, start: int, nbytes: int) -> None:
        is_tensor = isinstance(value, torch.Tensor | Tensor)
        entry: Any = BytesStorageMetadata()
        offsets = None
        if is_tensor:
            shape = torch.Size(value.shape)
            offsets = torch.Size([0] * len(shape))
            entry = TensorStorageMetadata(TensorProperties(value.dtype), shape, [ChunkStorageMetadata(offsets, shape)])
        self._metadata.state_dict_metadata[name] = entry
        self._metadata.planner_data[name] = path
        self._metadata.storage_data[MetadataIndex(name, offsets, 0 if is_tensor else None)] = stored_at(
            file, start, nbytes
        )
