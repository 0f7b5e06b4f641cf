"""Weight files of a model's folder, whose tensors are read one by one: safetensors, or else those of torch.save.

Files of `torch.save` (`pytorch_model.bin`) contain a pickle, of which nothing is executed: see
`offload.fileio.torch_file`.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch

from offload.errors import IoError, StoreError
from offload.fileio.inner_files import open_regular, read_bounded
from offload.fileio.safetensors_stream import Tensor, TensorLocation, read_header, unrepeated
from offload.fileio.stamp import Stamp
from offload.fileio.torch_file import StoredTensor, read_torch_file
from offload.sizes import MIB

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLE, _PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
CONFIG, GENERATION = "config.json", "generation_config.json"
_LONGEST_INDEX = 64 * MIB
_PIECE_NBYTES = MIB
"""Bytes of a chunk. Each chunk is copied to fp32; with larger copies the allocator was seen to keep a gigabyte."""


class Stored(NamedTuple):
    """A tensor in a file, without memory of its own; implements `Origin`."""

    name: str
    path: Path
    place: TensorLocation
    stamp: Stamp

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self.place.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor in the file."""
        return self.place.tensor.dtype

    def pieces(self, part: range | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields the elements in chunks, (n,) each, with the position of the chunk's first element.

        A chunk is valid until the next one is requested.

        Args:
            part: The elements to read, from whose first one positions are counted; None for all.

        Raises:
            IoError: If the file cannot be read.
            StoreError: If the file has changed since its header was read.
        """
        itemsize = self.dtype.itemsize
        begin, total = (0, self.place.tensor.nbytes) if part is None else (part.start * itemsize, len(part) * itemsize)
        # One buffer for all chunks: the consumer copies a chunk before it requests the next.
        buffer = memoryview(bytearray(min(total, _PIECE_NBYTES)))
        with self._open() as file:
            for start in range(0, total, _PIECE_NBYTES):
                chunk = buffer[: min(_PIECE_NBYTES, total - start)]
                self._fill(file.fileno(), self.place.offset + begin + start, chunk)
                yield start // itemsize, torch.frombuffer(chunk, dtype=self.dtype)

    def runs(self, part: range) -> list[Run]:
        """Returns the elements of the files that are `part` of the values, in order: of one tensor, one run."""
        return [Run(self, part.start, len(part))]

    def whole(self) -> torch.Tensor:
        """Returns the tensor, in memory of its own."""
        try:
            whole = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        except (RuntimeError, MemoryError) as error:
            raise StoreError(
                f"{self.path} contains a tensor of {self.place.tensor.nbytes} bytes, which this machine's memory "
                "cannot take in one piece; expected a small one"
            ) from error
        flat = whole.view(-1)
        for position, values in self.pieces():
            flat[position : position + len(values)] = values
        return whole

    def _open(self) -> BinaryIO:
        """Opens the file and checks that it is unchanged."""
        try:
            # Opened anew for each tensor, so that no file stays open between tensors and each read checks the stamp.
            file = open_regular(self.path)
        except OSError as error:
            raise IoError(str(self.path), 0, 0, error.errno or errno.EIO, "open") from error
        if Stamp.of(os.fstat(file.fileno())) != self.stamp:
            file.close()
            raise StoreError(
                f"{self.path} has changed since offload.load_pretrained read its header; load the model again"
            )
        return file

    def _fill(self, descriptor: int, offset: int, part: memoryview) -> None:
        """Fills `part` from a byte offset of the file."""
        done = 0
        try:
            while done < len(part):
                count = os.preadv(descriptor, [part[done:]], offset + done)
                # The file ends here: it was truncated after its header was read.
                if not count:
                    raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
                done += count
        except OSError as error:
            raise IoError(str(self.path), offset, len(part), error.errno or errno.EIO, "read") from error


class Run(NamedTuple):
    """Consecutive elements of a tensor in a file."""

    stored: Stored
    start: int
    numel: int


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Returns all tensors of a folder's weight files, or of one safetensors file, by name. Reads only headers.

    The tensors of a folder are in `model.safetensors`, or else in the files that its index names; in a folder without
    them in `pytorch_model.bin` or the files of that index.

    Raises:
        StoreError: If the folder contains neither, or a file is missing, incomplete or contradicts the index.
        IoError: If a file cannot be read.
    """
    if folder.is_file() and folder.suffix == ".safetensors":
        return _of_file(folder)
    if not folder.is_dir():
        raise StoreError(
            f"there is no folder {folder}; give a folder that save_pretrained has written. A model on the hub is "
            "fetched first: hf download OWNER/NAME --local-dir NAME"
        )
    # Folders of the hub often contain both; safetensors have the same values.
    single, index = (SINGLE, INDEX) if _has(folder, SINGLE, INDEX) else (_PICKLE, _PICKLE_INDEX)
    if (folder / single).is_file():
        return _of_file(folder / single)
    if not (folder / index).is_file():
        raise StoreError(_what_is_there(folder))
    places = _read_index(folder / index)
    found: dict[str, Stored] = {}
    for name in sorted(set(places.values())):
        if not (folder / name).is_file():
            raise StoreError(f"{folder / index} names {name}, which is missing; fetch all files of the model")
        # Tensors of this file that the index assigns to another file are left out; tensors that the index does not
        # list are included.
        held = _of_file(folder / name)
        found |= {tensor: held[tensor] for tensor in held if places.get(tensor, name) == name}
    lost = next((tensor for tensor in places if tensor not in found), None)
    if lost is not None:
        raise StoreError(
            f"{folder / index} assigns {lost} to {places[lost]}, which does not contain this tensor; fetch all files "
            "of the model"
        )
    return found


def _of_file(path: Path) -> dict[str, Stored]:
    """Returns the tensors of one file."""
    try:
        # Taken before the header is read, so that the first read of a tensor notices a change since.
        stamp = Stamp.of(path.stat())
    except OSError as error:
        raise IoError(str(path), 0, 0, error.errno or errno.EIO, "look at") from error
    places = _of_pickle(path) if path.suffix == ".bin" else read_header(path)[0]
    return {name: Stored(name, path, place, stamp) for name, place in places.items()}


def _of_pickle(path: Path) -> dict[str, TensorLocation]:
    """Returns the location of each tensor in a file of `torch.save`; raises `StoreError` if it is no dict of them."""
    content = read_torch_file(path)
    found: dict[str, TensorLocation] = {}
    for name, tensor in content.items() if isinstance(content, dict) else [("the object", content)]:
        if not isinstance(tensor, StoredTensor) or not tensor.contiguous:
            raise StoreError(
                f"{path}: {name} is not a tensor whose values are stored one after the other; save the weights by "
                "save_pretrained"
            )
        found[str(name)] = TensorLocation(Tensor(tensor.dtype, tensor.shape), tensor.offset)
    return found


def _has(folder: Path, *names: str) -> bool:
    """Returns whether a folder contains a file of one of these names."""
    return any((folder / name).is_file() for name in names)


def _read_index(path: Path) -> dict[str, str]:
    """Returns the file of each tensor. A file name with a path, which could lead out of the folder, is refused."""
    try:
        text = read_bounded(path, _LONGEST_INDEX)
        places = json.loads(text, object_pairs_hook=unrepeated)["weight_map"]
        wrong = next((name for name in places.values() if not _is_name(name)), None)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"{path} is not an index of safetensors files: {type(error).__name__}: {error}") from error
    # An index from a download must not make this process read files outside of the folder.
    if wrong is not None:
        raise StoreError(f"{path} names {wrong!r:.99}, which is not the name of a file beside it")
    return dict(places)


def _is_name(name: str) -> bool:
    """Returns whether a text can be the name of a file in a folder."""
    return name not in ("", "..") and Path(name).name == name and len(os.fsencode(name)) <= 255 and "\0" not in name


def _what_is_there(folder: Path) -> str:
    """Returns the reason why a folder cannot be loaded, and the next action."""
    names = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if "adapter_config.json" in names:
        return (
            f"{folder} contains an adapter of peft, not a model: load its base model, then "
            f"peft.PeftModel.from_pretrained(model, {str(folder)!r}, is_trainable=True)"
        )
    if pickles:
        return (
            f"{folder} contains {pickles[0]}, a pickle, and neither {SINGLE} nor {_PICKLE}; a checkpoint of DeepSpeed "
            "is loaded by engine.load_checkpoint, other pickles are converted once with transformers: "
            "AutoModel….from_pretrained(folder).save_pretrained(other)"
        )
    return f"{folder} contains neither {SINGLE} nor {INDEX}; give a folder that save_pretrained has written"
