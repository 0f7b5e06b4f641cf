"""Weight files of a model's folder, whose tensors are read one by one: safetensors, or else files of torch.save.

Files of `torch.save` (`pytorch_model.bin`) contain a pickle, and nothing in it is executed: see
`offload.fileio.torch_file`.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import torch

from offload.errors import ConfigError, StoreError
from offload.fileio.atomic_write import naming_errors
from offload.fileio.cache_file import Stamp
from offload.fileio.inner_files import open_regular, read_bounded
from offload.fileio.safetensors_stream import Tensor, TensorLocation, read_header, unrepeated
from offload.fileio.torch_file import StoredTensor, read_torch_file
from offload.quantized.paged_tensor import PagedTensor, paged, paged_kind
from offload.sizes import MIB

# -- safetensors folder --------------------------------------------------------------------------------


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
        return self.place.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.place.tensor.dtype

    def pieces(self, part: range | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields the elements in chunks, (n,) each, with the position of the chunk's first element.

        A chunk is valid until the next one is requested.

        Args:
            part: The elements to read; None for all. Positions are counted from the first of them.
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

    def runs(self, part: range) -> list[StoredRun]:
        """Returns the elements of the files that make up `part` of the values: one run, since this is one tensor."""
        return [StoredRun(self, part.start, len(part))]

    def whole(self) -> torch.Tensor:
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
        with naming_errors(self.path, "open"):
            # Opened anew for each tensor, so that no file stays open between tensors and each read checks the stamp.
            file = open_regular(self.path)
        if Stamp.of(os.fstat(file.fileno())) != self.stamp:
            file.close()
            raise StoreError(
                f"{self.path} has changed since offload.load_pretrained read its header; load the model again"
            )
        return file

    def _fill(self, descriptor: int, offset: int, part: memoryview) -> None:
        done = 0
        with naming_errors(self.path, "read", offset, len(part)):
            while done < len(part):
                count = os.preadv(descriptor, [part[done:]], offset + done)
                # The file ends here: it was truncated after its header was read.
                if not count:
                    raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
                done += count


class StoredRun(NamedTuple):
    """Consecutive elements of a tensor in a file."""

    stored: Stored
    start: int
    numel: int


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Returns all tensors of a folder's weight files, or of one safetensors file, by name. Reads only headers.

    The tensors of a folder are in `model.safetensors`, or else in the files that its index names. In a folder without
    safetensors they are in `pytorch_model.bin`, or in the files that its index names.
    """
    if folder.is_file() and folder.suffix == ".safetensors":
        return _of_file(folder)
    if not folder.is_dir():
        raise StoreError(
            f"there is no folder {folder}; give a folder that save_pretrained has written. A model on the hub is "
            "fetched first: hf download OWNER/NAME --local-dir NAME"
        )
    # Folders of the hub often contain both; safetensors have the same values.
    safe = (folder / SINGLE).is_file() or (folder / INDEX).is_file()
    single, index = (SINGLE, INDEX) if safe else (_PICKLE, _PICKLE_INDEX)
    if (folder / single).is_file():
        return _of_file(folder / single)
    if not (folder / index).is_file():
        raise StoreError(_what_is_there(folder))
    places = _read_index(folder / index)
    tensors: dict[str, Stored] = {}
    for name in sorted(set(places.values())):
        if not (folder / name).is_file():
            raise StoreError(f"{folder / index} names {name}, which is missing; fetch all files of the model")
        # Tensors of this file that the index assigns to another file are left out; tensors that the index does not
        # list are included.
        in_file = _of_file(folder / name)
        tensors |= {tensor: in_file[tensor] for tensor in in_file if places.get(tensor, name) == name}
    lost = next((tensor for tensor in places if tensor not in tensors), None)
    if lost is not None:
        raise StoreError(
            f"{folder / index} assigns {lost} to {places[lost]}, which does not contain this tensor; fetch all files "
            "of the model"
        )
    return tensors


def _of_file(path: Path) -> dict[str, Stored]:
    with naming_errors(path, "look at"):
        # Taken before the header is read, so that the first read of a tensor notices a change since.
        stamp = Stamp.of(path.stat())
    places = _of_pickle(path) if path.suffix == ".bin" else read_header(path)[0]
    return {name: Stored(name, path, place, stamp) for name, place in places.items()}


def _of_pickle(path: Path) -> dict[str, TensorLocation]:
    """Returns the location of each tensor in a file of `torch.save`; raises `StoreError` without a dict of tensors."""
    content = read_torch_file(path)
    locations: dict[str, TensorLocation] = {}
    for name, tensor in content.items() if isinstance(content, dict) else [("the object", content)]:
        if not isinstance(tensor, StoredTensor) or not tensor.contiguous:
            raise StoreError(
                f"{path}: {name} is not a tensor whose values are stored one after the other; save the weights by "
                "save_pretrained"
            )
        locations[str(name)] = TensorLocation(Tensor(tensor.dtype, tensor.shape), tensor.offset)
    return locations


def _read_index(path: Path) -> dict[str, str]:
    """Returns the file of each tensor. A file name with a path, which could lead out of the folder, is refused."""
    try:
        text = read_bounded(path, _LONGEST_INDEX)
        places = json.loads(text, object_pairs_hook=unrepeated)["weight_map"]
        # An index from a download must not make this process read files outside of the folder.
        wrong = next(
            (
                name
                for name in places.values()
                if name in ("", "..") or Path(name).name != name or len(os.fsencode(name)) > 255 or "\0" in name
            ),
            None,
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"{path} is not an index of safetensors files: {type(error).__name__}: {error}") from error
    if wrong is not None:
        raise StoreError(f"{path} names {wrong!r:.99}, which is not the name of a file beside it")
    return dict(places)


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


# -- of bitsandbytes -----------------------------------------------------------------------------------
#
# Folders that bitsandbytes has quantized: layers of its classes are built, whose codes `initialize` reads later.
#
# In such a folder a weight of 4 bits is several tensors: its codes under the weight's name, and below that name scales,
# the code book, both again for scales that are quantized themselves, and a JSON text in bytes. A weight of 8 bits has
# codes, and scales of its rows. Codes and scales are paged tensors, whose bytes stay in the files until `initialize`
# reads them. Code that asks for them before, as DoRA's does, reads them then. Small tensors are read at once.


_METHOD = "bitsandbytes"
_STATE = ".quant_state.bitsandbytes__"
"""Part of the name of the tensor that contains the JSON text of a weight of 4 bits."""


class FileBytes:
    """A tensor in a file, as the source of paged tensors; implements `PagedBytes`."""

    def __init__(self, stored: Stored) -> None:
        self.name, self.device, self.stored = stored.name, torch.device("cpu"), stored

    def tensor(self, kind: type[PagedTensor] = PagedTensor) -> PagedTensor:
        return paged(kind, self, torch.empty(self.stored.shape, dtype=self.stored.dtype, device="meta"))

    def read(self, geometry: torch.Tensor) -> torch.Tensor:
        values = self.stored.whole().view(geometry.dtype)
        return values.as_strided(geometry.size(), geometry.stride(), geometry.storage_offset())


def build_layers(model: Any, folder: Path, stored: Mapping[str, Stored], built: bool) -> set[str]:
    """Puts layers of bitsandbytes into a model whose folder bitsandbytes has quantized.

    Args:
        built: True if `load_pretrained` has built the model, so that its layers may be replaced.

    Returns:
        The names of all tensors of quantized weights, which need no further treatment.
    """
    settings = getattr(getattr(model, "config", None), "quantization_config", None)
    if settings is None:
        return set()
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    if not built or getattr(method, "value", method) != _METHOD:
        raise ConfigError(
            f"{folder} holds quantized weights, of which load_pretrained reads those of bitsandbytes, for a model that "
            "it builds; load it by from_pretrained of transformers outside of offload.init, freeze it and give the "
            "model to offload.initialize, or give a folder in bf16, fp16 or fp32"
        )
    _replace(model, settings, folder)
    taken: set[str] = set()
    for name, module in list(model.named_modules()):
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if "Linear4bit" in kinds:
            taken |= _four_bits(f"{name}.weight", module, stored, folder)
        elif "Linear8bitLt" in kinds:
            taken |= _eight_bits(name, module, stored, folder)
    return taken


def _replace(model: Any, settings: Any, folder: Path) -> None:
    """Lets transformers replace linear layers by layers of bitsandbytes, as its own `from_pretrained` does."""
    from transformers import quantizers

    library: Any = quantizers
    try:
        quantizer = library.AutoHfQuantizer.from_config(settings, pre_quantized=True)
        quantizer.validate_environment(device_map={"": "cpu"})
        quantizer.preprocess_model(model, device_map={"": "cpu"})
        quantizer.postprocess_model(model)
        model.hf_quantizer = quantizer
    # The quantizer is transformers' own code, and its error names a missing package.
    except (ImportError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"transformers cannot build the quantized layers of {folder}: {error}") from error


def _four_bits(name: str, module: Any, stored: Mapping[str, Stored], folder: Path) -> set[str]:
    """Gives a Linear4bit its weight, and returns the names of its tensors."""
    from bitsandbytes import functional, nn

    parts = {key[len(name) + 1 :]: stored[key] for key in stored if key.startswith(f"{name}.")}
    if name not in stored or "absmax" not in parts or not any(_STATE in f".{key}" for key in parts):
        raise _lacks(name, folder)
    # The scales stay in the file, so the state is made with empty scales first.
    small = {key: part.whole() for key, part in parts.items() if key != "absmax"}
    state: Any = functional.QuantState.from_dict(
        {**small, "absmax": torch.empty(0, dtype=torch.float32, device="cpu")}, device=torch.device("cpu")
    )
    state.absmax = FileBytes(parts["absmax"]).tensor()
    weight: Any = FileBytes(stored[name]).tensor(paged_kind(cast(Any, nn).Params4bit))
    weight.quant_state, weight.module, weight.bnb_quantized = state, module, True
    weight.blocksize, weight.compress_statistics = state.blocksize, state.nested
    weight.quant_type, weight.quant_storage = state.quant_type, stored[name].dtype
    module.weight, module.quant_state = weight, state
    return {name, *(f"{name}.{key}" for key in parts)}


def _eight_bits(name: str, module: Any, stored: Mapping[str, Stored], folder: Path) -> set[str]:
    """Gives a Linear8bitLt its weight, and returns the names of its tensors."""
    from bitsandbytes import nn

    codes, scales = stored.get(f"{name}.weight"), stored.get(f"{name}.SCB")
    if codes is None or scales is None or codes.dtype is not torch.int8:
        raise _lacks(f"{name}.weight", folder)
    source = FileBytes(codes)
    weight: Any = source.tensor(paged_kind(cast(Any, nn).Int8Params))
    weight.CB, weight.SCB, weight.has_fp16_weights = source.tensor(), FileBytes(scales).tensor(), False
    module.weight = weight
    return {f"{name}.{key}" for key in ("weight", "SCB", "weight_format")}


def _lacks(name: str, folder: Path) -> StoreError:
    return StoreError(
        f"{folder} lacks codes or scales of {name}, though its config says that bitsandbytes has quantized it; save "
        "the quantized model again with save_pretrained"
    )
