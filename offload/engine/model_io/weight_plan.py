"""Decisions of an export, made before any file is created: names, dtypes, files and the place of each tensor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from offload.engine.model_io.safetensors_folder import SINGLE
from offload.engine.model_io.saved_names import SavedNames
from offload.engine.model_io.weight_source import Source
from offload.engine.params.saved_state import Part
from offload.errors import ConfigError
from offload.fileio.safetensors_stream import Tensor, shard
from offload.fileio.safetensors_stream import plan as plan_file
from offload.layout.fingerprint import described_layouts, described_mode
from offload.layout.flat_layout import UnitLayout
from offload.layout.modes import DTYPES, Mode
from offload.sizes import parse_size


class Place(NamedTuple):
    """First byte of a tensor: name of the file, and byte offset in the file."""

    file: str
    offset: int


class Cut(NamedTuple):
    """Elements [start, stop) of a parameter, which are one tensor of the files."""

    start: int
    stop: int
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Names, dtypes and files of an export, decided before any file is created."""

    layouts: tuple[UnitLayout, ...]
    mode: Mode
    world_size: int
    frozen: bool
    """True if frozen weights are written."""
    dtype: torch.dtype
    cuts: Mapping[str, tuple[Cut, ...]]
    """For each segment, what is written of its parameter: all of it, under its name and tied ones that no loader ties.

    A model's class may give it other names, or cut it.
    """
    buffers: Mapping[str, tuple[str, ...]]
    """The same for each persistent buffer."""
    shards: Mapping[str, Mapping[str, Tensor]]
    """Tensors of each file."""
    config: Mapping[str, Any] | None
    """Config of transformers; None if the model has none, or only weights are written."""
    generation: Mapping[str, Any] | None
    metadata: Mapping[str, str]
    left_out: tuple[str, ...]
    """Entries of the model's `state_dict` that no file contains."""
    unconverted: bool
    """True if weights have the form that transformers has in memory, where it would compute another for files."""

    def places(self) -> dict[str, Place]:
        """Returns the place of each tensor in the files, by name."""
        return {
            name: Place(file, location.offset)
            for file, tensors in self.shards.items()
            for name, location in plan_file(tensors, self.metadata)[1].items()
        }

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
    source: Source,
    dtype: str | torch.dtype | None,
    shard_nbytes: int,
    frozen: bool = True,
    name: str | None = None,
    saved: SavedNames | None = None,
) -> Plan:
    """Decides names, dtypes and files.

    Args:
        source: The weights.
        dtype: Dtype of the written weights; None for that of the model.
        shard_nbytes: Limit of a file's size in bytes.
        frozen: False to write only trainable weights and buffers.
        name: Name of the only file to write; None to write all files of a model's folder.
        saved: What the model's class makes of its weights in files; None for each under its own name.

    Raises:
        ConfigError: If weights cannot be saved in `dtype`.
    """
    layouts = described_layouts(source.description)
    mode = described_mode(source.description)
    wanted = check_dtype(dtype) or mode.weight_dtype
    frozen = frozen and source.frozen
    tied: Mapping[str, str] = source.about.get("tied", {})
    tied_buffers: Mapping[str, str] = source.about.get("tied_buffers", {})
    config = source.about.get("config")
    left_out = _left_to_the_loader(source.about, name)
    cuts: dict[str, tuple[Cut, ...]] = {}
    parts = _by_source(saved)
    tensors: dict[str, Tensor] = {}
    rows = Counter(segment.stack for layout in layouts for segment in layout.segments)
    for layout in layouts:
        for segment in layout.segments:
            if not (segment.trainable or frozen):
                continue
            if segment.inner:
                raise ConfigError(
                    f"{segment.name} is quantized by another library, whose bytes are stored as they are, so weights "
                    "cannot be written as values: save the adapters by engine.save_pretrained of a model of peft, or "
                    "what trains by exclude_frozen_parameters=True"
                )
            # Experts that are units of their own are one tensor in the files, as they are one parameter in the model.
            shape = (rows[segment.stack], *segment.shape) if segment.stack else segment.shape
            if parts is None:
                names = [segment.parameter, *(alias for alias, name in tied.items() if name == segment.name)]
                own = [each for each in names if each not in left_out] or [max(names)]
                written = {each: Part(segment.parameter, 0, shape) for each in own}
            else:
                written = parts.get(segment.parameter, {})
            if not written:
                continue
            cuts[segment.name] = tuple(
                Cut(part.start, part.start + math.prod(part.shape), each) for each, part in written.items()
            )
            if segment.form and any(cut.stop - cut.start != math.prod(shape) for cut in cuts[segment.name]):
                raise ConfigError(
                    f"{segment.parameter} is stored in {segment.form}, and the model's class saves parts of it, which "
                    'is not supported: train with "frozen" left out of the config'
                )
            tensors |= {each: Tensor(wanted, part.shape) for each, part in written.items()}
    buffers: dict[str, tuple[str, ...]] = {}
    for first, value in source.buffers.items():
        if parts is not None:
            buffers[first] = tuple(parts.get(first, {}))
            tensors |= dict.fromkeys(buffers[first], Tensor(value.dtype, tuple(value.shape)))
            continue
        others = (alias for alias, name in tied_buffers.items() if name == first and alias not in left_out)
        buffers[first] = (first, *others)
        tensors |= dict.fromkeys(buffers[first], Tensor(value.dtype, tuple(value.shape)))
    values = {} if saved is None else saved.values
    tensors |= {each: Tensor(value.dtype, tuple(value.shape)) for each, value in values.items()}
    metadata = {"format": "pt"} | ({**tied, **tied_buffers} if config is None and left_out else {})
    if saved is not None:
        metadata = {"format": "pt", **saved.ties}
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
        cuts=cuts,
        buffers={**buffers, **{each: (each,) for each in values}},
        shards=files,
        config=None if config is None else _config(config, source.about["class"], wanted),
        generation=None if config is None else source.about.get("generation_config"),
        metadata=metadata,
        left_out=() if saved is None else saved.left_out,
        unconverted=saved is not None and saved.unconverted,
    )


def _by_source(saved: SavedNames | None) -> dict[str, dict[str, Part]] | None:
    """Returns the parts of each parameter and buffer, by their names in the files; None if no class decides on them."""
    if saved is None:
        return None
    found: dict[str, dict[str, Part]] = {}
    for name, part in saved.parts.items():
        found.setdefault(part.source, {})[name] = part
    return found


def _left_to_the_loader(about: Mapping[str, Any], name: str | None) -> set[str]:
    """Returns the further names of tied tensors that are not written, since a loader ties them.

    Args:
        about: What is known of the model.
        name: Name of the only file to write; None for a model's folder.
    """
    tied = about.get("tied", {})
    config = about.get("config")
    if config is not None:
        # transformers ties what its classes name, if the config says so. A layer that a user has put into a model twice
        # is written under each name.
        return set(about.get("loader_ties", tied)) if config.get("tie_word_embeddings", True) else set()
    # Without a config, the files of a folder are for `safetensors.torch.load_model`, which ties by the metadata, and a
    # single file is for `load_state_dict`, which expects all names.
    return {*tied, *about.get("tied_buffers", {})} if name is None else set()


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
