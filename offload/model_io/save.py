"""`engine.save_pretrained` and `save_16bit_model`: save the weights, between steps, for other libraries to load.

All ranks iterate over all partitions in the same order. The rank that owns a partition reads it and broadcasts it, and
rank 0 writes. A peft adapter is small: every rank gathers the whole adapter, and rank 0 calls peft to write it.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import nn

from offload.aio import DirectFile, aligned_empty
from offload.aio.protocols import Future, Pending, Queue, wait_for_all
from offload.checkpoint.directory import LOCK, exchange, make_folder, only_save
from offload.checkpoint.files import check_folder
from offload.checkpoint.save import own_or_shared
from offload.config.blocks import short_dtype
from offload.distributed.agreement import AllOrNothing, Collective
from offload.engine.components import EngineComponents, together
from offload.engine.saved_state import SavedPart
from offload.engine.snapshot import all_persistent_buffers, persistent_buffers
from offload.errors import BudgetError, ConfigError, StoreError, UsageError
from offload.fileio import inner_folder, keep_mode_and_owner, naming_errors, real_path, sync_folder, write_new
from offload.fileio.buffered_copy import WriteBehind, flow, parts_of
from offload.fileio.safetensors_stream import SafetensorsWriter, Tensor, shard
from offload.fileio.safetensors_stream import plan as plan_file
from offload.kernels.blocks import BLOCK_FORMATS, dequantize
from offload.layout.fingerprint import about, describe, described_layouts, described_mode
from offload.layout.flat_layout import ParameterSegment, SegmentShard, UnitLayout, segment_shards
from offload.layout.modes import DTYPES, Mode, dtype_name
from offload.layout.optimizer_states import join, master_sources
from offload.model_io.base_files import as_metadata, find_difference
from offload.model_io.folder import CONFIG, GENERATION, INDEX, SINGLE
from offload.model_io.grid import whole_of_engine
from offload.model_io.saved_names import SavedNames, saved_names
from offload.model_io.source import Source
from offload.sizes import KIB, PAGE, count_of, format_size, parse_size
from offload.states import State

# -- output folder -------------------------------------------------------------------------------------
#
# Placement of a model's files in their folder: all of them, or none.
#
#     <folder>.partial             files being written, if the folder does not exist or contains only files that a save
#                                  writes; takes the folder's name, or is exchanged with the folder in one step
#     <folder>/.offload.partial    files being written, if foreign files in the folder must stay; the new files are
#                                  moved in one by one
#     .<folder>.lock               locked during a save; names the saving process. It is `.offload.lock` in the folder
#                                  if nothing can be made next to the folder
#
# Files are moved in one by one in the second case, and if the system cannot exchange folders. The config and the index
# are then deleted first and moved in last. A kill between two moves therefore leaves a folder that no loader takes for
# a model, never a mixture that loads.


_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_UNIVERSAL = re.compile(r"(fp32|exp_avg|exp_avg_sq|step|optimizer_state|\w+_model_states)\.pt|latest_universal")
"""Files of a universal checkpoint of DeepSpeed."""
_HEADS = (CONFIG, INDEX, SINGLE, "adapter_config.json")
"""Files that lead loaders to the weights; without them the folder is no model."""
TOKENIZER = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json vocab.txt merges.txt "
    "tokenizer.model spiece.model sentencepiece.bpe.model chat_template.jinja chat_template.json"
).split()
"""Files of a tokenizer, as transformers names them."""
_ADAPTER = ("adapter_model.safetensors", "adapter_config.json", "README.md")


@contextlib.contextmanager
def arriving(out: Path, notice: Callable[[str], None], whole: bool = True) -> Iterator[Path]:
    """Yields a staging folder whose files replace those in `out` if the context ends without an error.

    One writer at a time. After an error in the context `out` is unchanged. An error while the new files are moved into
    place is raised too; the files that are already in place stay.

    Args:
        notice: Called with a message about leftovers of a killed save, which are removed.
        whole: True if the files are a complete model: weights of an earlier model are removed. Otherwise every file in
            `out` stays, unless a new file has its name.

    Raises:
        StoreError: If another process writes to `out`, or the staging folder contains foreign files.
        IoError: If something cannot be written.
    """
    make_folder(out.parent)
    # The lock file must not depend on anything that a save changes: two saves at a time must use the same one, also if
    # one of them creates or replaces `out` meanwhile.
    inside = out.is_dir() and not os.access(out.parent, os.W_OK)
    with only_save(out, out.name, out / LOCK if inside else out.with_name(f".{out.name}.lock")):
        # The staging folder is next to `out` if `out` can be replaced as a whole, atomically; else inside of `out`. An
        # exchange would delete the working directory of this process.
        in_use = Path.cwd().is_relative_to(real_path(out))
        replaceable = out.exists() and not out.is_mount() and not out.is_symlink()
        free = not out.exists() or (replaceable and not any(out.iterdir()))
        beside = not in_use and (free or (whole and replaceable and _contains_only_model_files(out)))
        partial = out.with_name(f"{out.name}.partial") if beside else out / ".offload.partial"
        with naming_errors(partial, "make"):
            # A killed save may have left the folder; `_clear` removes its files or refuses them.
            partial.mkdir(exist_ok=True)
            # Where other users may write too, a folder of theirs, or a link, may have this name.
            with inner_folder(partial, 1, ours=True):
                pass
        _clear(partial, notice)
        try:
            yield partial
            with naming_errors(partial, "write"):
                if beside and out.exists():
                    # Files that this save does not write, such as a tokenizer's, stay.
                    for path in out.iterdir():
                        if not _WEIGHTS.fullmatch(path.name) and not (partial / path.name).exists():
                            shutil.copy2(path, partial / path.name)
                    keep_mode_and_owner(out.stat(), partial)
                sync_folder(partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        with naming_errors(out, "rename"):  # from here on the new files stay, whatever happens
            _arrive(partial, out) if beside else _move_in(partial, out, whole)


def check_room(folder: Path, nbytes: int, out: Path) -> None:
    """Raises `StoreError` if the drive has no room for `nbytes` more."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise StoreError(
            f"{out} needs {format_size(nbytes)}, but its drive has {format_size(free)} free; free some room, or "
            "choose another folder"
        )


def _contains_only_model_files(out: Path) -> bool:
    known = (CONFIG, GENERATION, *TOKENIZER)
    return all(
        (path.name in known or _WEIGHTS.fullmatch(path.name)) and path.is_file() and not path.is_symlink()
        for path in out.iterdir()
    )


def _clear(partial: Path, notice: Callable[[str], None]) -> None:
    """Removes leftovers of a killed save; raises `StoreError` if `partial` contains a foreign file."""
    left = [path for path in partial.rglob("*") if path.is_file()]
    known = (CONFIG, GENERATION, *TOKENIZER, *_ADAPTER)
    foreign = [
        path.name
        for path in left
        if path.name not in known and not any(pattern.fullmatch(path.name) for pattern in (_WEIGHTS, _UNIVERSAL))
    ]
    if foreign:
        raise StoreError(
            f"{partial} contains {foreign[0]}, which was not left by a save; move that file away, or choose another "
            "name"
        )
    if left:
        # `st_blocks` counts units of 512 bytes, whatever the file system's block size is.
        nbytes = sum(path.stat().st_blocks * 512 for path in left)
        notice(f"removed {partial}, {format_size(nbytes)} of an interrupted save or export")
    for path in left:
        path.unlink()
    for path in sorted((path for path in partial.rglob("*") if path.is_dir()), reverse=True):
        path.rmdir()


def _arrive(partial: Path, out: Path) -> None:
    """Gives the staging folder its final name and deletes the folder that had the name.

    If the system cannot exchange folders, the files are moved in one by one.
    """
    if not out.exists() or not any(out.iterdir()):
        os.rename(partial, out)
        sync_folder(out.parent)
        return
    # After the exchange `partial` is the old folder.
    if exchange(partial, out):
        sync_folder(out.parent)
        shutil.rmtree(partial, ignore_errors=True)
    else:
        _move_in(partial, out, whole=True)


def _move_in(partial: Path, out: Path, whole: bool) -> None:
    """Moves files into `out` one by one; if they are a `whole` model, weights of an earlier model are deleted."""
    new = sorted(path.relative_to(partial) for path in partial.rglob("*") if path.is_file())
    heads = [path for path in new if path.name in _HEADS]
    gone = [path for path in out.iterdir() if whole and _WEIGHTS.fullmatch(path.name)]
    gone += [out / path for path in heads if (out / path).exists() and out / path not in gone]
    # A single file that replaces a single file needs no deletion first: `os.replace` below is atomic.
    if len(new) > 1 or gone != [out / new[0]]:
        for path in sorted(gone, key=lambda path: (path.name not in _HEADS, path.name)):
            path.unlink()
        sync_folder(out)
    # The config comes last of all: loaders look for it first.
    for name in [*(path for path in new if path not in heads), *sorted(heads, key=lambda path: path.name == CONFIG)]:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(partial / name, out / name)
    sync_folder(out)
    shutil.rmtree(partial, ignore_errors=True)


def copy_tokenizer(folder: Path, out: Path) -> None:
    """Copies the files of a tokenizer; `out` must not contain them. Raises `IoError`."""
    for name in tokenizer_files(folder):
        with naming_errors(out / name, "write"):
            shutil.copyfile(folder / name, out / name)


def tokenizer_files(folder: Path) -> list[str]:
    """Returns the names of a tokenizer's files; raises `StoreError` if the folder contains none."""
    present = [name for name in TOKENIZER if (folder / name).is_file()]
    if not present:
        raise StoreError(f"{folder} contains no file of a tokenizer, such as {TOKENIZER[0]}")
    return present


# -- weight plan ---------------------------------------------------------------------------------------
#
# Decisions of an export, made before any file is created: names, dtypes, files and the place of each tensor.


class FilePlace(NamedTuple):
    """First byte of a tensor: name of the file, and byte offset in the file."""

    file: str
    offset: int


class SavedRange(NamedTuple):
    """Elements [start, stop) of a parameter that form one tensor in the files."""

    start: int
    stop: int
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportPlan:
    """Names, dtypes and files of an export, decided before any file is created."""

    layouts: tuple[UnitLayout, ...]
    mode: Mode
    world_size: int
    frozen: bool
    """True if frozen weights are written."""
    dtype: torch.dtype
    cuts: Mapping[str, tuple[SavedRange, ...]]
    """For each segment, the ranges of its parameter that are written.

    By default this is the whole parameter, under each of its names that the loader does not tie to another one, and
    under at least one name. A model's class may give other names, or cut the parameter.
    """
    buffers: Mapping[str, tuple[str, ...]]
    """For each persistent buffer, the names of its tensors in the files."""
    shards: Mapping[str, Mapping[str, Tensor]]
    """Tensors of each file."""
    config: Mapping[str, Any] | None
    """Config of transformers; None if the model has none, or only weights are written."""
    generation: Mapping[str, Any] | None
    metadata: Mapping[str, str]
    left_out: tuple[str, ...]
    """Entries of the model's `state_dict` that no file contains."""
    unconverted: bool
    """True if weights are written in their in-memory form, although transformers would compute another for files."""
    in_fp32: bool = False
    """True if weights that stay in fp32 are written in fp32; False if all weights are written in `dtype`."""

    def dtype_of(self, unit: int) -> torch.dtype:
        """Returns the dtype of the written weights of a unit."""
        return torch.float32 if self.in_fp32 and self.layouts[unit].in_fp32 else self.dtype

    def weights(self, unit: int) -> Mapping[State, torch.dtype]:
        return self.layouts[unit].mode_in(self.mode).weights

    def places(self) -> dict[str, FilePlace]:
        return {
            name: FilePlace(file, location.offset)
            for file, tensors in self.shards.items()
            for name, location in plan_file(tensors, self.metadata)[1].items()
        }

    @property
    def weights_nbytes(self) -> int:
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
) -> ExportPlan:
    """Returns the plan of an export: names, dtypes and files.

    Args:
        name: Name of the only file to write; None to write all files of a model's folder.
        saved: The tensors that the model's class writes into files; None to write each weight under its own name.
    """
    layouts = described_layouts(source.description)
    mode = described_mode(source.description)
    checked = check_dtype(dtype)
    wanted = checked or mode.weight_dtype
    frozen = frozen and source.frozen
    tied: Mapping[str, str] = source.about.get("tied", {})
    tied_buffers: Mapping[str, str] = source.about.get("tied_buffers", {})
    config = source.about.get("config")
    left_out = _left_to_the_loader(source.about, name)
    cuts: dict[str, tuple[SavedRange, ...]] = {}
    by_class = saved is not None
    saved = saved or SavedNames(parts={}, ties={}, values={}, left_out=(), computed=None)
    by_source: dict[str, dict[str, SavedPart]] = {}
    for tensor_name, part in saved.parts.items():
        by_source.setdefault(part.source, {})[tensor_name] = part

    def written(name: str, shape: tuple[int, ...], aliases: Sequence[str]) -> dict[str, SavedPart]:
        # The tensors in the files that come from one parameter or buffer, by name: the parts that the class names, or
        # the whole of it.
        return by_source.get(name, {}) if by_class else {alias: SavedPart(name, 0, shape) for alias in aliases}

    tensors: dict[str, Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for segment in (segment for layout in layouts for segment in layout.segments):
        shapes[segment.parameter] = segment.joined_to(shapes.get(segment.parameter))
    for layout in layouts:
        own_dtype = checked or layout.mode_in(mode).weight_dtype
        for segment in layout.segments:
            if not (segment.trainable or frozen):
                continue
            if segment.inner:
                raise ConfigError(
                    f"{segment.name} is quantized by another library, whose bytes are stored as they are, so weights "
                    "cannot be written as values: save the adapters by engine.save_pretrained of a model of peft, or "
                    "what trains by exclude_frozen_parameters=True"
                )
            # Experts, or pieces, that are units are one tensor in the files, as they are one parameter in the model.
            shape = shapes[segment.parameter]
            names = [segment.parameter, *(alias for alias, first in tied.items() if first == segment.parameter)]
            own = [alias for alias in names if alias not in left_out] or [max(names)]
            parts = written(segment.parameter, shape, own)
            if not parts:
                continue
            cuts[segment.name] = tuple(
                SavedRange(part.start, part.start + math.prod(part.shape), tensor_name)
                for tensor_name, part in parts.items()
            )
            if segment.form and any(cut.stop - cut.start != math.prod(shape) for cut in cuts[segment.name]):
                raise ConfigError(
                    f"{segment.parameter} is stored in {segment.form}, and the model's class saves parts of it, which "
                    'is not supported: train with "frozen" left out of the config'
                )
            tensors |= {tensor_name: Tensor(own_dtype, part.shape) for tensor_name, part in parts.items()}
    buffers: dict[str, tuple[str, ...]] = {}
    for first, value in source.buffers.items():
        aliases = (alias for alias, own_name in tied_buffers.items() if own_name == first and alias not in left_out)
        buffers[first] = tuple(written(first, tuple(value.shape), [first, *aliases]))
        tensors |= dict.fromkeys(buffers[first], Tensor(value.dtype, tuple(value.shape)))
    tensors |= {tensor_name: Tensor(value.dtype, tuple(value.shape)) for tensor_name, value in saved.values.items()}
    in_fp32 = checked is None and any(layout.in_fp32 for layout in layouts)
    if in_fp32:  # in the order of safetensors, so that each begins at a multiple of its element size
        tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))
    ties = saved.ties if by_class else {**tied, **tied_buffers} if config is None and left_out else {}
    if of_peft(source.about):
        config = None  # a folder with a config would pass for a model, and its weights would be random
    if name is not None:
        files, config = {name: tensors}, None
    else:
        shards = shard(tensors, shard_nbytes) or [{}]
        # The names that transformers expects.
        files = {
            SINGLE if len(shards) == 1 else f"model-{index:05d}-of-{len(shards):05d}.safetensors": file_tensors
            for index, file_tensors in enumerate(shards, 1)
        }
    return ExportPlan(
        layouts=layouts,
        mode=mode,
        world_size=int(source.description["world_size"]),
        frozen=frozen,
        dtype=wanted,
        cuts=cuts,
        buffers={**buffers, **{tensor_name: (tensor_name,) for tensor_name in saved.values}},
        shards=files,
        config=None if config is None else _config(config, source.about["class"], wanted),
        generation=None if config is None else source.about.get("generation_config"),
        metadata={"format": "pt", **ties},
        left_out=saved.left_out,
        unconverted=saved.unconverted,
        in_fp32=in_fp32,
    )


def _left_to_the_loader(about: Mapping[str, Any], name: str | None) -> set[str]:
    """Returns the further names of tied tensors that are not written, since a loader ties them."""
    tied = about.get("tied", {})
    config = about.get("config")
    if config is not None:
        # transformers ties the names that its classes list, if the config allows it. A layer that a user has put into a
        # model twice is written under each name.
        return set(about.get("loader_ties", tied)) if config.get("tie_word_embeddings", True) else set()
    # Without a config, the files of a folder are for `safetensors.torch.load_model`, which ties by the metadata, and a
    # single file is for `load_state_dict`, which expects all names.
    return {*tied, *about.get("tied_buffers", {})} if name is None else set()


def check_dtype(wanted: str | torch.dtype | None) -> torch.dtype | None:
    """Returns the dtype that a user asks for, None for None; raises `ConfigError` if weights cannot be saved in it."""
    if wanted is None:
        return None
    torch_dtype = DTYPES.get(short_dtype(wanted)) if isinstance(wanted, str) else wanted
    if torch_dtype is None or torch_dtype not in DTYPES.values():
        raise ConfigError(f"expected a dtype of saved weights from {', '.join(DTYPES)}, got {wanted!r}")
    return torch_dtype


def _config(config: Mapping[str, Any], architecture: str, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the config as `save_pretrained` writes it. transformers 5 uses another key for the dtype."""
    made_by = str(config.get("transformers_version", "")).partition(".")[0]
    key = "dtype" if "dtype" in config or (made_by.isdigit() and int(made_by) >= 5) else "torch_dtype"
    return {**config, "architectures": [architecture], key: str(dtype).removeprefix("torch.")}


# -- block chunks --------------------------------------------------------------------------------------
#
# Chunks of frozen weights that are stored as blocks, for an export: the files receive their values.
#
# A chunk is whole blocks of one parameter, on one rank or on several. Chunks are yielded in the order of the
# partitions, with the padding between the parameters, because a source compares bytes with their checksums in this
# order.


VALUES = 1 << 20
"""Values of a chunk: an even number of blocks of any format, since two blocks fill a whole number of elements."""


class BlockChunk(NamedTuple):
    """Blocks of one parameter that are read together."""

    unit: int
    segment: ParameterSegment
    first: int
    """First value, counted in the parameter."""
    stop: int
    """End of the values."""
    shards: tuple[SegmentShard, ...]
    """Elements of the partitions that contain the blocks, and the padding after the last block of the parameter."""

    @property
    def numel(self) -> int:
        return sum(shard.numel for shard in self.shards)


def block_chunks(plan: ExportPlan) -> Iterator[BlockChunk]:
    """Yields the chunks of all parameters that are stored as blocks, unit by unit; none if the plan leaves them out."""
    itemsize = plan.mode.weight_dtype.itemsize
    for unit, layout in enumerate(plan.layouts) if plan.frozen else ():
        blocks = [segment for segment in layout.segments if segment.form]
        for segment, stop in zip(blocks, [*(block.start for block in blocks[1:]), layout.numel], strict=False):
            form = BLOCK_FORMATS[segment.form]
            if segment.name not in plan.cuts:  # the model's class leaves it out
                continue
            for first in range(0, segment.value_numel, VALUES):
                last = min(first + VALUES, segment.value_numel)
                start = form.stored_nbytes(first) // itemsize
                end = form.stored_nbytes(last) // itemsize if last < segment.value_numel else stop - segment.start
                shards = segment_shards(layout, plan.world_size, segment, start, end)
                yield BlockChunk(unit, segment, first, last, tuple(shards))


# -- weight stream -------------------------------------------------------------------------------------
#
# Stream of weights from a source into files, through a few buffers.
#
#     read ahead ──► a chunk ──► joined and cast ──► bytes in the order of a file ──► write behind
#
# Reads of later chunks and writes of earlier ones are in flight while a chunk is converted, so the drive does not wait
# for the processor. The converted bytes of a chunk are placed where O_DIRECT can write them: at an address that differs
# from their offset in the file by whole pages. The memory in use does not depend on the size of a unit or a parameter.


_CHUNK_NUMEL = 1 << 20
"""Elements read at a time: 2 MiB in 16 bits, 4 MiB in fp32, such as the master of a bf16 weight."""
_READS, _WRITES = 12, 12
"""Number of chunks that are being read, and that are being written; a chunk has at most 4 MiB."""
_GAPS = 64 * KIB
"""Most bytes of a buffer that may stay unused so that a `FileRun` begins where O_DIRECT can write it."""

Put = Callable[[str, int, memoryview], Sequence[Pending]]
"""Begins to write bytes at an offset of a file, and returns the writes. The bytes are in use until the writes end."""


class WeightChunk(NamedTuple):
    """Elements of a partition that are read and written together."""

    rank: int
    unit: int
    start: int
    """First element, in the unit's layout."""
    position: int
    """First element, in the partition."""
    numel: int
    states: tuple[State, ...]
    """States that are read: the weight alone, or those that hold the master weight."""


class FileRun(NamedTuple):
    """Bytes of a buffer that are consecutive in a file too."""

    place: FilePlace
    at: int
    nbytes: int


def stream(source: Source, plan: ExportPlan, put: Put, progress: Callable[[int], None] = lambda _: None) -> int:
    """Reads all weights, converts them to the dtype of the plan, and passes the bytes of each file to `put`.

    Every read and write has ended when this returns or raises.

    Args:
        put: Called on the calling thread.
        progress: Called with the number of bytes after each read.

    Returns:
        The number of finite values that became infinite in the dtype of the plan.
    """
    beyond, places = 0, plan.places()
    # At most 4 bytes are read for an element.
    buffers = [aligned_empty(_CHUNK_NUMEL * 4) for _ in range(_READS)]
    itemsize = torch.float32.itemsize if plan.in_fp32 else plan.dtype.itemsize
    rooms = [aligned_empty(_CHUNK_NUMEL * itemsize + _GAPS) for _ in range(_WRITES)]

    def begin(chunk: WeightChunk, buffer: memoryview) -> Iterator[Pending]:
        for state, memory in _regions(plan, chunk, buffer).items():
            start = chunk.position * plan.weights(chunk.unit)[state].itemsize
            yield source.read(chunk.rank, chunk.unit, state, start, memory)

    with WriteBehind(rooms) as behind:

        def end(chunk: WeightChunk, buffer: memoryview) -> tuple[()]:
            nonlocal beyond
            regions = _regions(plan, chunk, buffer)
            for memory in regions.values():
                progress(len(memory))
            room, writes = behind.take()
            pieces, runs = arranged(plan, places, chunk)
            beyond += _convert(plan, chunk.unit, regions, pieces, room)
            for run in runs:
                writes += put(*run.place, room[run.at : run.at + run.nbytes])
            return ()

        def begin_blocks(chunk: BlockChunk, buffer: memoryview) -> Iterator[Pending]:
            at, width = 0, plan.mode.weight_dtype.itemsize
            for part in chunk.shards:
                memory = buffer[at : at + part.numel * width]
                yield source.read(part.rank, chunk.unit, State.WEIGHT, part.start * width, memory)
                at += part.numel * width

        def end_blocks(chunk: BlockChunk, buffer: memoryview) -> tuple[()]:
            nonlocal beyond
            progress(chunk.numel * plan.mode.weight_dtype.itemsize)
            room, writes = behind.take()
            form, numel = BLOCK_FORMATS[chunk.segment.form], chunk.stop - chunk.first
            chunk_values = values[:numel]
            blocks = torch.frombuffer(buffer, dtype=torch.uint8, count=form.stored_nbytes(numel))
            dequantize(form, blocks, chunk_values)
            skipped = (chunk.segment.first + chunk.first) * plan.dtype.itemsize
            targets = [places[cut.name] for cut in plan.cuts[chunk.segment.name]]
            # O_DIRECT needs a byte of the buffer that differs from the offset in the first file by whole pages.
            at = (targets[0].offset + skipped) % PAGE
            out = torch.frombuffer(room, dtype=plan.dtype, count=numel, offset=at).copy_(chunk_values)
            if plan.dtype is torch.float16:
                beyond += int((out.isinf() & ~chunk_values.isinf()).sum())
            for file, offset in targets:
                writes += put(file, offset + skipped, room[at : at + out.nbytes])
            return ()

        flow(buffers, chunks(plan), begin, end)
        values = torch.frombuffer(aligned_empty(VALUES * 4), dtype=plan.mode.weight_dtype)
        flow(buffers, block_chunks(plan), begin_blocks, end_blocks)
    return beyond


# -- decisions ----------------------------------------------------------------------------------------


def read_nbytes(plan: ExportPlan) -> int:
    """Returns the bytes that an export reads."""
    values = sum(
        chunk.numel * plan.weights(chunk.unit)[state].itemsize for chunk in chunks(plan) for state in chunk.states
    )
    blocks = sum(chunk.numel for chunk in block_chunks(plan)) * plan.mode.weights[State.WEIGHT].itemsize
    return values + blocks


def chunks(plan: ExportPlan) -> Iterator[WeightChunk]:
    """Yields the chunks of all partitions, unit by unit and rank by rank, in order within each partition.

    Weights that are stored as blocks are left out: they come last in their partitions, and `block_chunks` yields them.
    """
    weight: tuple[State, ...] = (State.WEIGHT,)
    # In the model's own dtype the weights are written as they are; for any other dtype the masters are rounded once.
    for unit, layout in enumerate(plan.layouts):
        stored = plan.weights(unit)
        wanted = weight if plan.dtype_of(unit) is stored[State.WEIGHT] else master_sources(stored)
        for rank in range(plan.world_size):
            position = 0
            trainable, frozen = layout.trainable(rank, plan.world_size), layout.frozen(rank, plan.world_size)
            frozen = range(frozen.start, max(frozen.start, min(frozen.stop, layout.blocks_start)))
            for share, states in ((trainable, wanted), (frozen if plan.frozen else range(0), weight)):
                for start in range(share.start, share.stop, _CHUNK_NUMEL):
                    numel = min(_CHUNK_NUMEL, share.stop - start)
                    yield WeightChunk(rank, unit, start, position, numel, states)
                    position += numel


def arranged(
    plan: ExportPlan, places: Mapping[str, FilePlace], chunk: WeightChunk
) -> tuple[list[tuple[int, int, int]], list[FileRun]]:
    """Returns the pieces of a chunk, as (start, stop, byte of a buffer), and the runs of these bytes in the files.

    Parameters that are neighbours in a file become one run. A run begins at a byte of the buffer that differs from its
    offset in the file by whole pages. A run whose gap would exceed `_GAPS` is written through the page cache instead. A
    parameter that is written under several names has several runs of the same bytes.
    """
    itemsize, gaps = plan.dtype_of(chunk.unit).itemsize, 0
    pieces: list[tuple[int, int, int]] = []
    runs: list[FileRun] = []
    again: list[FileRun] = []
    for segment in plan.layouts[chunk.unit].segments:
        start, stop = max(chunk.start, segment.start), min(chunk.start + chunk.numel, segment.stop)
        # From here on elements are counted in the parameter, since a tensor of the files may be a part of it.
        first = segment.first + start - segment.start
        ranges: dict[tuple[int, int], list[FilePlace]] = {}
        for cut in plan.cuts.get(segment.name, ()) if start < stop else ():
            begin, end = max(first, cut.start), min(first + stop - start, cut.stop)
            if begin < end:
                file, offset = places[cut.name]
                ranges.setdefault((begin, end), []).append(FilePlace(file, offset + (begin - cut.start) * itemsize))
        for (begin, end), (place, *copies) in sorted(ranges.items()):
            nbytes = (end - begin) * itemsize
            at = runs[-1].at + runs[-1].nbytes if runs else 0
            if runs and place == runs[-1].place._replace(offset=runs[-1].place.offset + runs[-1].nbytes):
                runs[-1] = runs[-1]._replace(nbytes=runs[-1].nbytes + nbytes)
            else:
                gap = (place.offset - at) % PAGE
                if gaps + gap <= _GAPS:
                    at, gaps = at + gap, gaps + gap
                runs.append(FileRun(place, at, nbytes))
            position = start - chunk.start + begin - first
            pieces.append((position, position + end - begin, at))
            again += [FileRun(target, at, nbytes) for target in copies]
    return pieces, runs + again


# -- bytes --------------------------------------------------------------------------------------------


def _regions(plan: ExportPlan, chunk: WeightChunk, buffer: memoryview) -> dict[State, memoryview]:
    dtypes = plan.weights(chunk.unit)
    return parts_of(buffer, [(state, chunk.numel * dtypes[state].itemsize) for state in chunk.states])


def _convert(
    plan: ExportPlan,
    unit: int,
    regions: Mapping[State, memoryview],
    pieces: Sequence[tuple[int, int, int]],
    room: memoryview,
) -> int:
    """Writes the weights of a chunk into `room`, in the dtype of the plan.

    Returns:
        The number of finite values that became infinite.
    """
    stored, dtype = plan.weights(unit), plan.dtype_of(unit)
    states = {state: torch.frombuffer(memory, dtype=stored[state]) for state, memory in regions.items()}
    beyond = 0
    for start, stop, at in pieces:
        out = torch.frombuffer(room, dtype=dtype, count=stop - start, offset=at)
        values = {state: tensor[start:stop] for state, tensor in states.items()}
        if tuple(values) == (State.WEIGHT,):
            master = values[State.WEIGHT]
        else:
            # If the file is in fp32, the states are joined directly in the buffer of the file's bytes.
            master = join(values, out if dtype is torch.float32 else None)
        if master is not out:
            out.copy_(master)
        # bf16 has the range of fp32, so only fp16 is checked.
        if dtype is torch.float16:
            beyond += int((out.isinf() & ~master.isinf()).sum())
    return beyond


# -- weight writer -------------------------------------------------------------------------------------
#
# Writing of a model's weights as files that `transformers` loads, from any source of partitions.
#
#     source ──► `stream` reads and converts ──► the queue writes each file ──► index and config
#
# The plan has decided names, dtypes and files before. `offload export` writes from a store or a checkpoint,
# `save_pretrained` from an engine.


class Files:
    """The files of a plan, created in a folder that contains none of them; durable when the context ends.

    Raises:
        IoError: If a file cannot be written. A full disk shows before any weight is written.
    """

    def __init__(self, folder: Path, plan: ExportPlan, buffers: Mapping[str, torch.Tensor], queue: Queue) -> None:
        self._folder, self._plan, self._queue = folder, plan, queue
        self._files: dict[str, DirectFile] = {}
        self._open = contextlib.ExitStack()
        try:
            for name, tensors in plan.shards.items():
                # The writer reserves the file and makes it durable at the end; the queue writes the weights into it.
                writer = self._open.enter_context(SafetensorsWriter(folder / name, tensors, plan.metadata))
                self._files[name] = self._open.enter_context(DirectFile(folder / name))
                for buffer, value in buffers.items():
                    for tensor_name in plan.buffers[buffer]:
                        if tensor_name in tensors:
                            writer.write_tensor(tensor_name, value)
        except BaseException as error:
            self._open.__exit__(type(error), error, error.__traceback__)
            raise

    def put(self, file: str, offset: int, data: memoryview) -> Sequence[Pending]:
        return [self._queue.write(self._files[file], offset, data)]

    def __enter__(self) -> Files:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)
        if kind is None:
            # Written last, when all weights are durable: without index and config nobody takes the folder for a model.
            plan = self._plan
            if len(plan.shards) > 1:
                total = {"total_size": plan.weights_nbytes}
                places = {name: file for file, tensors in plan.shards.items() for name in tensors}
                _write_json(self._folder / INDEX, {"metadata": total, "weight_map": dict(sorted(places.items()))})
            if plan.config is not None:
                _write_json(self._folder / CONFIG, plan.config)
            if plan.generation is not None:
                _write_json(self._folder / GENERATION, plan.generation)


def of_peft(about: Mapping[str, Any]) -> bool:
    """Returns True if the described model is one of peft, whose names transformers does not know."""
    return str(about["class"]).startswith("Peft")


def notices(source: Source, plan: ExportPlan, beyond: int, adapter: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """Returns messages for the user about the written files. `adapter` is the config of an adapter that is written."""
    lines: list[str] = []
    absent = sum(not segment.trainable for layout in plan.layouts for segment in layout.segments)
    if beyond:
        lines.append(
            f"{count_of(beyond, 'value is', 'values are')} out of the range of {dtype_name(plan.dtype)} and saved as "
            "infinite"
        )
    if adapter is not None:
        folder = Path(adapter["base_model_name_or_path"])
        different = find_difference(plan.metadata, folder) if folder.is_dir() else None
        if different is not None:
            lines.append(different)
        lines.append(
            f"the files are an adapter of peft; its base model is {adapter['base_model_name_or_path']}, whose "
            f"{count_of(absent, 'frozen weight')} this export has not read"
        )
        return tuple(lines)
    if source.about.get("config") is None:
        lines.append("the model has no transformers config, so only weights are saved")
    elif of_peft(source.about):
        lines.append(
            "the files have the weights of base model and adapters under the names of peft's model, and no config, "
            "since from_pretrained of transformers does not know these names: load each file into the same model with "
            "its adapters, by load_state_dict(safetensors.torch.load_file(FILE), strict=False). For the adapters alone "
            "resume the run: call engine.save_pretrained(folder), or give the same command of `offload train --lora` "
            "with --resume must and --output FOLDER"
        )
    if absent and not plan.frozen:
        lines.append(
            f"{count_of(absent, 'frozen weight is', 'frozen weights are')} not in the files, because they were left out"
        )
    if plan.unconverted:
        lines.append(
            "some weights have the names and the form that transformers 5 has in memory and loads, since their form on "
            "the hub is computed from several weights: engine.module.save_pretrained(folder) writes that, with all "
            "weights in RAM"
        )
    if plan.left_out:
        lines.append(
            f"{', '.join(plan.left_out)} of the model's state_dict() is not in the files: save_checkpoint and "
            "torch.save keep what is no tensor, and engine.save_pretrained of a resumed run writes tensors"
        )
    return tuple(lines)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_new(path, (json.dumps(content, indent=2) + "\n").encode())


# -- save pretrained -----------------------------------------------------------------------------------


logger = logging.getLogger("offload")

_ONE_FILE = 1 << 62
"""Limit of a file's size in bytes that no model reaches, so that all weights are in one file."""


class SaveOptions(NamedTuple):
    """Arguments of a save as a user gives them."""

    folder: Any
    max_shard_size: Any = "50GB"
    dtype: Any = None
    tokenizer: Any = None
    frozen: bool = True
    file_name: str | None = None
    """Name of the only file to write; None to write all files of a model's folder."""

    def check(self) -> None:
        out = check_folder(self.folder, "save_directory")
        if os.path.lexists(out) and not out.is_dir():
            raise StoreError(f"{out} is not a folder; give a folder, or a name that does not exist")
        shard_size(self.max_shard_size)
        check_dtype(self.dtype)
        if self.tokenizer is not None and not hasattr(self.tokenizer, "save_pretrained"):
            raise UsageError(
                f"tokenizer must be a tokenizer of transformers, with save_pretrained, got {self.tokenizer!r}"
            )
        if self.file_name is not None and Path(self.file_name).name != self.file_name:
            raise UsageError(
                f"save_filename is {self.file_name!r}, a path; expected the name of a file in save_directory: give "
                "the folder as save_directory"
            )
        if self.file_name is not None and not self.file_name.endswith(".safetensors"):
            raise UsageError(
                f"save_filename is {self.file_name!r}, but only safetensors files are written, never pickles: give a "
                "name that ends with .safetensors, such as model.safetensors"
            )


class EngineSource:
    """The weights of an engine between steps, as a `Source`. All ranks must read the same bytes in the same order."""

    def __init__(
        self,
        module: nn.Module,
        components: EngineComponents,
        step: int,
        ranks: AllOrNothing,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        # `check` raises if this rank has failed. It is called at each read, when the error can be raised on all ranks.
        self._components, self._ranks, self._check = components, ranks, check
        self.description: Mapping[str, Any] = describe(
            components.layouts, components.shards.mode, components.world.ranks.mesh.shards
        )
        self.about: Mapping[str, Any] = about(module)
        self.step, self.frozen = step, True
        self.buffers: Mapping[str, torch.Tensor] = {
            name: value.detach().to("cpu") for name, value in persistent_buffers(module).items()
        }
        self._over = False

    def read(self, rank: int, unit: int, state: State, start: int, buffer: memoryview) -> Pending:
        """Begins to read bytes of a rank's partition, on the rank that owns it; see `Source.read`."""
        # Only the owner in the first replica reads. The others receive the bytes in `wait`, in the same order of reads.
        futures = self._components.shards.read(unit, state, start, buffer) if rank == self._ranks.rank else []
        return _NotifyingFuture(self, rank, buffer, futures)

    def completed(self, rank: int, buffer: memoryview, futures: list[Future]) -> None:
        """Waits for a read of `rank` and broadcasts its bytes. Collective.

        The first failure is raised on all ranks; later calls raise nothing and broadcast nothing.

        Args:
            futures: Pending reads of the owner; [] on the other ranks.
        """

        def wait_for_own() -> None:
            for future in futures:
                future.wait()
            self._check()

        # After a failure, pending reads are still waited for, because their buffers are about to be freed. The other
        # ranks are not contacted again.
        if self._over:
            wait_for_all(futures)
            return
        try:
            self._ranks.settle(wait_for_own)
        except BaseException:
            self._over = True
            raise
        # The broadcast is reached only if no rank has failed, so all ranks take part in it.
        self._components.world.everyone.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), rank)

    def close(self) -> None:
        """Does nothing: no file is open."""


class _NotifyingFuture(NamedTuple):
    """A read in flight on one rank; all ranks wait for it."""

    source: EngineSource
    rank: int
    buffer: memoryview
    futures: list[Future]

    def done(self) -> bool:
        return all(future.done() for future in self.futures)

    def wait(self) -> int:
        self.source.completed(self.rank, self.buffer, self.futures)
        return len(self.buffer)


class _ForgivingFuture(NamedTuple):
    """A write in flight whose failure is recorded and not raised."""

    write: Pending
    failures: list[Exception]

    def done(self) -> bool:
        return self.write.done()

    def wait(self) -> int:
        try:
            return self.write.wait()
        except Exception as error:
            self.failures.append(error)
            return 0


class PretrainedWriter:
    """Writes an engine's model into folders. Only between steps, when no update is in progress."""

    def __init__(self, module: nn.Module, components: EngineComponents) -> None:
        self._module, self._components = module, components

    def save(self, wanted: SaveOptions, step: int) -> None:
        """Writes the whole model, or the adapter of a peft model if no file is named. Collective."""
        adapter = wanted.file_name is None and hasattr(self._module, "peft_config")
        if adapter:
            self._components.refuse_shards("save_pretrained of adapters")
        # Only a whole saved model takes the names of its class. DeepSpeed's weight file, adapters and a divided model
        # keep the names of the parameters.
        own_names = wanted.file_name is None and not adapter and not self._components.divides_parameters
        saved = saved_names(self._module) if own_names else None
        # Gathered before the meeting below begins: a rank that is in the meeting cannot serve another rank's gather.
        gathered = gather_adapter(self._module, self._components) if adapter else Adapter({}, {})
        whole: dict[str, Any] = {}
        if saved is not None and saved.computed:
            dtype = self._components.shards.mode.weight_dtype
            if (check_dtype(wanted.dtype) or dtype) is not dtype:
                raise ConfigError(
                    f"{saved.computed}, so the model's own code writes the files, in {dtype_name(dtype)}: leave dtype "
                    "out, and convert the saved model by transformers"
                )
            whole = self._module.state_dict()
        elif (
            saved is not None
            and saved.unconverted
            and wanted.dtype is None
            and self._components.world.everyone.size == 1
        ):
            with contextlib.suppress(BudgetError):  # a larger model is saved under in-memory names, with a notice
                whole = self._module.state_dict()
        with together(self._components, Collective.SAVE, "save the model") as ranks:
            ranks.settle(wanted.check)
            ranks.settle(lambda: self._components.unit_views.check_not_gathered("saved"))
            names = {"folder": str(wanted.folder), "file": wanted.file_name}
            ranks.same({**names, "dtype": str(wanted.dtype), "frozen": wanted.frozen})
            out = Path(wanted.folder).absolute()
            if adapter:
                ranks.by_first(lambda: self._write_adapter(wanted, out, gathered))
            elif whole:
                ranks.by_first(lambda: self._write_whole(wanted, out, whole))
            else:
                self._write(wanted, out, step, ranks, saved)

    def _write(self, wanted: SaveOptions, out: Path, step: int, ranks: AllOrNothing, saved: SavedNames | None) -> None:
        """Writes the model; only rank 0 opens files. Collective."""
        failures: list[Exception] = []
        made: list[tuple[Path, Files]] = []  # filled on rank 0 only

        def check() -> None:
            if failures:
                raise failures[0]

        def put(file: str, offset: int, data: memoryview) -> Sequence[Pending]:
            # Rank 0 must take part in every broadcast: an exception in the middle would leave the other ranks waiting.
            # `check` raises the first failure on all ranks, at the next read.
            if not made or failures:
                return ()
            try:
                return [_ForgivingFuture(write, failures) for write in made[0][1].put(file, offset, data)]
            except Exception as error:
                failures.append(error)
                return ()

        own = EngineSource(self._module, self._components, step, ranks, check)
        divided = self._components.world.divides_model
        source = whole_of_engine(self._module, self._components, own) if divided else own
        shard_nbytes = _ONE_FILE if wanted.file_name else shard_size(wanted.max_shard_size)
        plan = make_plan(source, wanted.dtype, shard_nbytes, wanted.frozen, wanted.file_name, saved)
        buffers = {**source.buffers, **({} if saved is None else saved.values)}
        # Two stacks, because the files must be durable and closed before the folder is renamed.
        with (
            own_or_shared(self._components.queue) as queue,
            contextlib.ExitStack() as folder_open,
            contextlib.ExitStack() as files_open,
        ):

            def begin() -> None:
                folder = folder_open.enter_context(arriving(out, logger.warning, wanted.file_name is None))
                check_room(folder, plan.nbytes, out)
                made.append((folder, files_open.enter_context(Files(folder, plan, buffers, queue))))

            def end() -> None:
                check()
                files_open.close()
                _save_tokenizer(wanted.tokenizer, made[0][0])
                folder_open.close()

            # Only rank 0 opens the staging folder; the other ranks iterate over the same bytes and write nothing.
            ranks.by_first(begin)
            beyond = stream(source, plan, put)
            ranks.by_first(end)
        for notice in notices(source, plan, beyond) if ranks.rank == 0 else ():
            logger.warning("%s: %s", out, notice)
        if (
            ranks.rank == 0
            and wanted.file_name is not None
            and saved_names(self._module, conversions=False) is not None
        ):
            logger.warning(
                "%s: %s saves entries of its own, or under names of its own: this file has the names of the parameters "
                "and buffers, and no other entries, as in DeepSpeed's stage 3; save_pretrained writes the class's",
                out / wanted.file_name,
                type(self._module).__name__,
            )

    def _write_whole(self, wanted: SaveOptions, out: Path, state: dict[str, Any]) -> None:
        """Lets the model's own code write the weights `state`, which are in memory. Runs on rank 0."""
        module: Any = self._module
        with arriving(out, logger.warning) as folder, naming_errors(folder, "write"):
            check_room(folder, sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor)), out)
            if hasattr(module, "save_pretrained"):
                module.save_pretrained(str(folder), state_dict=state, max_shard_size=wanted.max_shard_size)
            else:
                first: dict[tuple[int, torch.Size], str] = {}
                tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
                names = {
                    name: first.setdefault((value.data_ptr(), value.shape), name) for name, value in tensors.items()
                }
                own = {name: tensors[name].contiguous() for name, first_name in names.items() if name == first_name}
                ties = {name: first_name for name, first_name in names.items() if name != first_name}
                safetensors.torch.save_file(own, folder / SINGLE, {"format": "pt", **ties})
            _save_tokenizer(wanted.tokenizer, folder)

    def _write_adapter(self, wanted: SaveOptions, out: Path, adapter: Adapter) -> None:
        """Calls peft to write the adapter into `out`. Runs on rank 0."""
        module: Any = self._module
        with arriving(out, logger.warning, whole=False) as folder, naming_errors(folder, "write"):
            check_room(folder, sum(value.nbytes for value in adapter.state.values()), out)
            if (out / "README.md").is_file():
                # peft extends an existing model card, so the staging folder must contain the card of `out`.
                shutil.copyfile(out / "README.md", folder / "README.md")
            with _in_place(module, adapter.encoders):
                module.save_pretrained(str(folder), state_dict=adapter.state)
            if base := as_metadata(self._components.base_files):
                # peft writes metadata of its own alone. Each adapter of several has a folder.
                for path in folder.rglob(_ADAPTER[0]):
                    tensors = safetensors.torch.load(path.read_bytes())
                    safetensors.torch.save_file(tensors, path, {"format": "pt", **base})
            _save_tokenizer(wanted.tokenizer, folder)


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    if tokenizer is not None:
        with naming_errors(folder, "write"):
            tokenizer.save_pretrained(str(folder))


class Adapter(NamedTuple):
    """The tensors and modules from which peft saves a model's adapters, on the CPU or on the device that computes."""

    state: dict[str, torch.Tensor]
    """Tensors by the model's names, on the CPU."""
    encoders: dict[str, nn.Module]
    """Copies of the prompt encoders, by adapter: peft computes prompts with them, not from a state."""


def gather_adapter(module: Any, components: EngineComponents) -> Adapter:
    """Returns the tensors and modules that peft's `save_pretrained` needs.

    To find the tensors, peft selects from tensors on the meta device, one for each weight. Only the selected weights
    are gathered. If peft computes from its selection, all weights of that adapter are gathered.
    """
    from peft import get_peft_model_state_dict

    # A copy of a module under an engine is an ordinary module, with weights of its own.
    encoders = {name: copy.deepcopy(encoder) for name, encoder in getattr(module, "prompt_encoder", {}).items()}
    named = {**dict(module.named_parameters(remove_duplicate=False)), **all_persistent_buffers(module)}
    # Values on meta cost no memory: a model larger than the RAM still has a small adapter.
    empty = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in named.items()}
    names = {id(value): name for name, value in empty.items()}
    taken: set[str] = set()
    with _in_place(module, encoders):
        for adapter in module.peft_config:
            selected = get_peft_model_state_dict(module, state_dict=dict(empty), adapter_name=adapter).values()
            taken |= {names[id(value)] for value in selected if id(value) in names}
            # A value that is not on meta comes from elsewhere, such as from a copy in `encoders`.
            if any(value.is_meta and id(value) not in names for value in selected):
                taken |= {name for name in empty if f".{adapter}." in f"{name}."}
    return Adapter({name: _gather(named[name], components) for name in empty if name in taken}, encoders)


@contextlib.contextmanager
def _in_place(module: Any, encoders: Mapping[str, nn.Module]) -> Iterator[None]:
    """Replaces the model's prompt encoders by their copies while the context is open."""
    own = {name: module.prompt_encoder[name] for name in encoders}
    for name, encoder in encoders.items():
        module.prompt_encoder[name] = encoder
    try:
        yield
    finally:
        for name, encoder in own.items():
            module.prompt_encoder[name] = encoder


def _gather(value: torch.Tensor, components: EngineComponents) -> torch.Tensor:
    place = components.weights.handle(value)
    return (
        value.detach().to("cpu", copy=True) if place is None else components.weights.weight(place.unit, place.position)
    )
