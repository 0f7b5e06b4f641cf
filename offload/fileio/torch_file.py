"""Files of `torch.save`, read without running what their pickle says, and without a tensor in memory.

Such a file is a zip archive whose records are not compressed: `data.pkl`, a pickle of the object in which each tensor
names its storage, and the bytes of each storage as a record of its own. An ordinary unpickler imports the classes that
a pickle names and calls them, so a file from a stranger could run any code. The unpickler here knows plain containers
and tensors alone. Any other name becomes a `Record`: it keeps the name and the values, and does nothing.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple

import torch

from offload.errors import StoreError

_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Of a zip file: signature, length of the name, length of the extra field. The record's bytes follow both."""
_SIGNATURE = b"PK\x03\x04"
_STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
"""Dtype of the values in each typed storage, by the name in a pickle."""
_CONTAINERS = {"set": set, "frozenset": frozenset}


class Storage(NamedTuple):
    """The bytes of one storage in a file."""

    path: Path
    offset: int
    """First byte in the file."""
    nbytes: int
    crc32: int
    """CRC-32 of the bytes, as zip files have it."""


class StoredTensor(NamedTuple):
    """A tensor in a file, without memory of its own."""

    storage: Storage
    dtype: torch.dtype
    start: int
    """First element, counted in the storage."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def offset(self) -> int:
        """First byte of a contiguous tensor in the file."""
        return self.storage.offset + self.start * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """True if the elements lie in row-major order, without gaps."""
        numel = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != numel:
                return not self.numel
            numel *= size
        return True

    def read(self) -> torch.Tensor:
        """Returns the tensor, in memory of its own; for small ones.

        Raises:
            StoreError: If the file cannot be read.
        """
        whole = bytearray(self.storage.nbytes)
        try:
            with self.storage.path.open("rb") as file:
                file.seek(self.storage.offset)
                count = file.readinto(whole)
        except OSError as error:
            raise StoreError(f"{self.storage.path} cannot be read: {error}") from error
        if count != len(whole) or zlib.crc32(whole) != self.storage.crc32:
            raise StoreError(f"{self.storage.path} is damaged: a tensor does not match its checksum")
        flat = torch.frombuffer(whole, dtype=self.dtype) if whole else torch.empty(0, dtype=self.dtype, device="cpu")
        return flat.as_strided(self.shape, self.stride, self.start).clone(memory_format=torch.contiguous_format)


class Record:
    """An object of a class that this reader does not know: what the pickle says of it, and no behaviour."""

    name: ClassVar[str] = ""
    """Module and name of the class in the pickle."""

    def __new__(cls, *args: Any, **_: Any) -> Record:
        """Returns a record of a call; nothing is called."""
        found = object.__new__(cls)
        found.args, found.state = args, {}
        return found

    args: tuple[Any, ...]
    """Arguments of the call that would have made the object."""
    state: Any
    """Attributes by name, where the object has ordinary ones."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        """Keeps the attributes."""
        self.state = state

    def append(self, _: Any) -> None:
        """Drops an item: that of a list whose class is not known."""

    def extend(self, _: Any) -> None:
        """Drops items."""

    def __setitem__(self, _: Any, __: Any) -> None:
        """Drops an item: that of a dict whose class is not known."""


def plain(value: Any) -> Any:
    """Returns the number of an enumeration's member, which a pickle writes as a call; other values as they are."""
    return value.args[0] if isinstance(value, Record) and len(value.args) == 1 else value


def read_torch_file(path: Path, part: range | None = None) -> Any:
    """Returns the object that `torch.save` has written, with a `StoredTensor` for each tensor. Runs nothing of it.

    Args:
        path: The file.
        part: Bytes of the file that `torch.save` has written; None for all.

    Raises:
        StoreError: If the file is missing, not complete, of the format before torch 1.6, or no such file at all.
    """
    try:
        with path.open("rb") as whole, _Part(whole, part) as file, zipfile.ZipFile(file) as archive:
            records = dict(_records(archive))
            # Before torch 2.1 there was no such record, and all files were little endian.
            if "byteorder" in records and archive.read(records["byteorder"]) != b"little":
                raise ValueError("its bytes are not in little-endian order")
            return _Unpickler(io.BytesIO(archive.read(records["data.pkl"])), path, file, records).load()
    except zipfile.BadZipFile as error:
        raise StoreError(
            f"{path} is not a complete file of torch.save: {error}; fetch the file again, or, if it was saved by a "
            "torch older than 1.6, load and save it with a newer one"
        ) from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    # A damaged pickle makes the unpickler raise almost anything.
    except Exception as error:
        raise StoreError(
            f"{path} is not a complete file of torch.save: {type(error).__name__}: {error}; fetch the file again"
        ) from error


def read_pickle(path: Path) -> Any:
    """Returns the object of a pickle without tensors, with a `Record` for each object of a class. Runs nothing of it.

    Args:
        path: The file.

    Raises:
        StoreError: If the file is missing, not complete, or no pickle.
    """
    try:
        return _Unpickler(io.BytesIO(path.read_bytes()), path, None, {}).load()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    # A damaged pickle makes the unpickler raise almost anything.
    except Exception as error:
        raise StoreError(
            f"{path} is not a complete pickle: {type(error).__name__}: {error}; fetch the file again"
        ) from error


class _Part(io.RawIOBase):
    """Bytes of an open file, as a file of their own."""

    def __init__(self, file: BinaryIO, part: range | None) -> None:
        super().__init__()
        nbytes = file.seek(0, io.SEEK_END)
        self._file, self.bytes = file, range(nbytes) if part is None else part
        """Bytes of the file that this one consists of."""
        if self.bytes.stop > nbytes:
            raise ValueError(f"it has {nbytes} bytes, expected {self.bytes.stop} at least")
        self._at = 0

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Moves to a byte, and returns its number."""
        self._at = max(0, offset + (0, self._at, len(self.bytes))[whence])
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Reads as many bytes as there are, at most as many as fit."""
        # The end of the part is the end of the file to whoever reads it.
        view = memoryview(buffer)[: max(0, len(self.bytes) - self._at)]
        self._file.seek(self.bytes.start + self._at)
        view[:] = data = self._file.read(len(view))
        self._at += len(data)
        return len(data)


def _records(archive: zipfile.ZipFile) -> Iterator[tuple[str, zipfile.ZipInfo]]:
    """Yields the records of a file by name, without the name of the folder that they all are in."""
    for info in archive.infolist():
        if info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{info.filename} is compressed")
        yield info.filename.partition("/")[2], info


class _Unpickler(pickle.Unpickler):
    """Unpickler that imports nothing: see the module's text."""

    def __init__(self, data: io.BytesIO, path: Path, file: _Part | None, records: dict[str, zipfile.ZipInfo]) -> None:
        super().__init__(data)
        self._path, self._file, self._records = path, file, records
        self._storages: dict[str, Storage] = {}

    def find_class(self, module: str, name: str, /) -> Any:
        """Returns what stands for a name of the pickle: our own functions, containers, or a class of records."""
        if (module, name) in _REBUILDS:
            return _REBUILDS[module, name]
        if module in ("builtins", "__builtin__") and name in _CONTAINERS:
            return _CONTAINERS[name]
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        # Made anew for each name and file, so that nothing that a pickle does to a class outlives it.
        return type("Record", (Record,), {"name": f"{module}.{name}"})

    def persistent_load(self, pid: Any, /) -> tuple[Storage, torch.dtype]:
        """Returns the storage that a tensor names, and the dtype of its values."""
        kind, dtype, key, _, numel = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise ValueError(f"a tensor is stored as {getattr(dtype, 'name', kind)}, which is not supported")
        # Tied tensors share a storage, whose place is looked up once.
        if key not in self._storages:
            self._storages[key] = self._storage(str(key))
        storage = self._storages[key]
        if storage.nbytes != numel * dtype.itemsize:
            raise ValueError(f"storage {key} has {storage.nbytes} bytes, expected {numel * dtype.itemsize}")
        return storage, dtype

    def _storage(self, key: str) -> Storage:
        """Returns the place of a storage's bytes, which follow the local header of the record."""
        info = self._records[f"data/{key}"]
        assert self._file is not None, "there are records"
        self._file.seek(info.header_offset)
        signature, name, extra = _LOCAL_HEADER.unpack(self._file.read(_LOCAL_HEADER.size))
        offset = info.header_offset + _LOCAL_HEADER.size + name + extra
        # The index at the file's end and the headers before the records must agree.
        if signature != _SIGNATURE or offset + info.file_size > len(self._file.bytes):
            raise ValueError(f"record {info.filename} is not where the index says")
        return Storage(self._path, self._file.bytes.start + offset, info.file_size, info.CRC)


def _rebuild_tensor(place: tuple[Storage, torch.dtype], start: int, shape: Any, stride: Any, *_: Any) -> StoredTensor:
    """Returns the tensor of which a pickle names storage, first element, shape and strides."""
    storage, dtype = place
    shape, stride = tuple(map(int, shape)), tuple(map(int, stride))
    # A made-up pickle must not name bytes of other records, or of nothing.
    reach = start + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
    inside = min((start, *shape, *stride), default=0) >= 0 and reach * dtype.itemsize <= storage.nbytes
    if not inside and 0 not in shape:
        raise ValueError(f"a tensor of shape {list(shape)} reaches beyond its storage of {storage.nbytes} bytes")
    return StoredTensor(storage, dtype, start, shape, stride)


def _rebuild_parameter(data: StoredTensor, *_: Any) -> StoredTensor:
    """Returns the tensor of a parameter."""
    return data


def _rebuild_with_attributes(rebuild: Any, kind: Any, args: Any, *_: Any) -> Any:
    """Returns the tensor to which someone has given attributes, without them; of a subclass, a record of its class."""
    plain = rebuild in _REBUILDS.values() and getattr(kind, "name", "") in _PLAIN_TENSORS
    return rebuild(*args) if plain else Record(rebuild, kind, args)


_REBUILDS = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_with_attributes,
}
"""Functions that stand for those of torch by which a pickle makes tensors."""
_PLAIN_TENSORS = ("torch.Tensor", "torch.nn.parameter.Parameter")
