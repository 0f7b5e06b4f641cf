"""Files of `torch.save`, read without running code that their pickle names, and without a tensor in memory.

Such a file is a zip archive whose records are not compressed: `data.pkl`, a pickle of the object in which each tensor
names its storage, and the bytes of each storage as a record of its own. An ordinary unpickler imports the classes that
a pickle names and calls them, so a file from a stranger could run any code.

Here the pickle is data: `pickletools` of Python takes it apart, and `_Program` makes plain containers and tensors of
it. Any other name becomes a `Global`, and an object that a call of it would make becomes a `Record`: both have names
and values, and do nothing. The pickle's own length bounds the memory and the time for it: a hundred bytes can describe
2**60 values.

torch's reader of plain weights (`weights_only=True`) runs nothing either, but is not bounded: a pickle of 150 bytes
keeps it busy for hours, and one of 40 takes as much memory as it names. It also gives no position of a tensor in the
file, and cannot read the metadata of torch.distributed.checkpoint.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from offload.aio.unanswered import sync
from offload.errors import StoreError
from offload.fileio.atomic_write import naming_errors
from offload.fileio.inner_files import open_regular
from offload.fileio.safetensors_stream import Tensor
from offload.sizes import GIB, MIB
from offload.torch_internals import rebuild_tensor

_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Header of a record in a zip file: signature, lengths of name and extra field. The record's bytes follow both."""
_SIGNATURE = b"PK\x03\x04"
_STORAGES = {
    "torch.FloatStorage": torch.float32,
    "torch.DoubleStorage": torch.float64,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}
"""Dtype of the values in each typed storage, by the name in a pickle."""

_LONGEST_PICKLE = 256 * MIB
"""Most bytes of a pickle, which has no values of tensors. A checkpoint of a hundred ranks has 30 MiB of metadata."""
_LONGEST_READ = 64 * MIB
"""Most bytes of one value in a pickle, and of the index of a file."""
_LONGEST_NAME = 1024
"""Most characters of a class's name."""
_MOST_SHARED = 16
"""Most values in all containers, for each instruction of the pickle. A shared value counts in each container."""
_DEEPEST = 100
"""Most containers within each other."""
_MOST_DIMENSIONS = 64
_LONGEST_KEY = 16
"""Most values of a tuple that is the key of a dict."""
_LARGEST_IN_MEMORY = 4 * GIB
"""Most bytes of a storage that is read into memory, for buffers and counters."""


class Storage(NamedTuple):
    """The bytes of one storage in a file."""

    path: Path
    offset: int
    """First byte in the file."""
    nbytes: int
    crc32: int
    """CRC-32 of the bytes, from the zip file's index."""


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
            StoreError: If the file cannot be read, or the tensor is not small, or has more elements than its storage.
        """
        path, nbytes = self.storage.path, self.storage.nbytes
        if nbytes > _LARGEST_IN_MEMORY or self.numel * self.dtype.itemsize > nbytes:
            raise StoreError(
                f"{path} contains a tensor of shape {list(self.shape)} over {nbytes} bytes, which is not read into "
                f"memory: expected a counter or a buffer of its own memory, of {_LARGEST_IN_MEMORY} bytes at most"
            )
        whole = bytearray(nbytes)
        try:
            with open_regular(path) as file:
                file.seek(self.storage.offset)
                count = file.readinto(whole)  # type: ignore[attr-defined]
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error}") from error
        if count != nbytes or zlib.crc32(whole) != self.storage.crc32:
            raise StoreError(f"{path} is damaged: a tensor does not match its checksum")
        flat = torch.frombuffer(whole, dtype=self.dtype) if whole else torch.empty(0, dtype=self.dtype, device="cpu")
        return flat.as_strided(self.shape, self.stride, self.start).clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Global:
    """A class or function that a pickle names. Nothing is imported."""

    name: str
    """Module and name, with a dot between them."""


@dataclass(eq=False)
class Record:
    """An object of a class that this reader does not know: its values in the pickle, and no behaviour."""

    name: str
    """Module and name of the class, or of the function that would have made the object."""
    args: tuple[Any, ...] = ()
    """Arguments of the call that would have made the object."""
    state: Any = field(default_factory=dict)
    """Attributes by name, if the object has ordinary attributes."""


def plain(value: Any) -> Any:
    """Returns the number of an enumeration's member, which a pickle writes as a call; other values as they are."""
    return value.args[0] if isinstance(value, Record) and len(value.args) == 1 else value


def read_torch_file(path: Path, part: range | None = None) -> Any:
    """Returns the object that `torch.save` has written, with a `StoredTensor` for each tensor. Runs no code of it.

    `part` is the range of bytes that `torch.save` has written; None for the whole file.
    """
    with _naming(path), open_regular(path) as whole, _Part(whole, part) as file:
        try:
            archive = zipfile.ZipFile(file)
        except zipfile.BadZipFile as error:
            raise StoreError(
                f"{path} is not a complete file of torch.save: {error}; fetch the file again, or, if it was saved by a "
                "torch older than 1.6, load and save it with a newer one"
            ) from error
        with archive:
            records = _records(archive)
            # Before torch 2.1 there was no such record, and all files were little endian.
            order = records.get("byteorder")
            if order is not None and (order.nbytes > 6 or archive.read(order.info) != b"little"):
                raise ValueError("its bytes are not in little-endian order")
            with archive.open(records["data.pkl"].info) as data:
                buffered = io.BufferedReader(data, MIB)  # type: ignore[type-var]
                content = _Program(_Storages(path, file, records).find).run(buffered, records["data.pkl"].nbytes)
                while buffered.read(MIB):  # to the end, where the checksum is compared
                    pass
            return content


def read_pickle(path: Path) -> Any:
    """Returns the object of a pickle without tensors, with a `Record` for each object of a class.

    Runs no code of the file.
    """
    with _naming(path), open_regular(path) as data:
        nbytes = data.seek(0, io.SEEK_END)
        data.seek(0)
        return _Program(None).run(data, nbytes)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Converts any error of a damaged or made-up file into a `StoreError` with the path."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    # Errors of zipfile and MemoryError are among them: a damaged file can raise almost any error.
    except Exception as error:
        raise StoreError(
            f"{path} is not a complete file of torch.save or torch.distributed.checkpoint: {type(error).__name__}: "
            f"{error}; fetch the file again"
        ) from error


class _Part(io.RawIOBase):
    """Bytes of an open file, as a file of their own."""

    def __init__(self, file: BinaryIO, part: range | None) -> None:
        super().__init__()
        nbytes = file.seek(0, io.SEEK_END)
        self._file, self.bytes = file, range(nbytes) if part is None else part
        """Range of the open file's bytes that this file consists of."""
        if not 0 <= self.bytes.start <= self.bytes.stop <= nbytes:
            raise ValueError(f"it has {nbytes} bytes, expected {self.bytes.stop} at least")
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = max(0, offset + (0, self._at, len(self.bytes))[whence])
        return self._at

    def read(self, nbytes: int = -1, /) -> bytes:
        """Returns bytes, at most `nbytes`; raises `ValueError` for more than `_LONGEST_READ`."""
        # The length may come from a made-up index.
        nbytes = len(self.bytes) - self._at if nbytes < 0 else nbytes
        if nbytes > _LONGEST_READ:
            raise ValueError(f"a record or an index of {nbytes} bytes")
        return super().read(nbytes) or b""

    def readinto(self, buffer: Any, /) -> int:
        # A reader sees the end of the part as the end of the file.
        view = memoryview(buffer)[: max(0, len(self.bytes) - self._at)]
        self._file.seek(self.bytes.start + self._at)
        view[:] = data = self._file.read(len(view))
        self._at += len(data)
        return len(data)


class _ArchiveRecord(NamedTuple):
    info: zipfile.ZipInfo
    end: int
    """First byte that belongs to the next record, or to the index."""

    @property
    def nbytes(self) -> int:
        return self.info.file_size


def _records(archive: zipfile.ZipFile) -> dict[str, _ArchiveRecord]:
    """Returns the records of a file by name, without the name of their common folder."""
    infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
    ends = [*(info.header_offset for info in infos[1:]), archive.start_dir]
    places: dict[str, _ArchiveRecord] = {}
    for info, end in zip(infos, ends, strict=True):
        name = info.filename.partition("/")[2]
        # Records that share bytes could add up to more bytes than the file has.
        if info.header_offset < 0 or info.header_offset + info.file_size > end:
            raise ValueError(f"the record {name[:99]!r} reaches beyond its place")
        if info.compress_type != zipfile.ZIP_STORED or name in places:
            raise ValueError(f"the record {name[:99]!r} is compressed, or there are two of this name")
        places[name] = _ArchiveRecord(info, end)
    return places


class _Storages:
    """The storages of a file, by their names in the pickle."""

    def __init__(self, path: Path, file: _Part, records: dict[str, _ArchiveRecord]) -> None:
        self._path, self._file, self._records = path, file, records
        self._found: dict[str, Storage] = {}

    def find(self, key: str) -> Storage:
        """Returns the place of a storage's bytes, which follow the local header of the record."""
        # Tied tensors share a storage, so its place is looked up once.
        if key not in self._found:
            info, end = self._records[f"data/{key}"]
            self._file.seek(info.header_offset)
            signature, name, extra = _LOCAL_HEADER.unpack(self._file.read(_LOCAL_HEADER.size))
            offset = info.header_offset + _LOCAL_HEADER.size + name + extra
            # The index at the file's end and the headers before the records must agree.
            if signature != _SIGNATURE or offset + info.file_size > end:
                raise ValueError(f"record {info.filename[:99]!r} is not where the index says")
            self._found[key] = Storage(self._path, self._file.bytes.start + offset, info.file_size, info.CRC)
        return self._found[key]


class _Bytes:
    """The bytes of a pickle for `pickletools`, with a limit for each read: a length in a pickle may be made up."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, nbytes: int) -> bytes:
        if nbytes > _LONGEST_READ:
            raise ValueError(f"a value of {nbytes} bytes")
        data: bytes = self._file.read(nbytes)
        return data

    def readline(self) -> bytes:
        """Returns the next line, which is a part of a name."""
        line: bytes = self._file.readline(_LONGEST_NAME)
        return line


_MARK = object()
_VALUES = frozenset(
    "BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 "
    "BINSTRING SHORT_BINSTRING".split()
)
"""Instructions whose argument is the value."""
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple, "EMPTY_SET": set}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUTS, _GETS = ("BINPUT", "LONG_BINPUT"), ("BINGET", "LONG_BINGET")
_REBUILD = ("torch._utils._rebuild_tensor_v2",)
_OF_PARAMETER = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_WITH_ATTRIBUTES = "torch._tensor._rebuild_from_type_v2"
"""Functions of torch that a pickle names to make tensors; none is called."""
_PLAIN_TENSORS = ("torch.Tensor", "torch.nn.parameter.Parameter")


class _Program:
    """The machine that runs a pickle's instructions, except for those that would run other code.

    Args:
        storage: Returns the place of a storage by its name in the pickle; None for a pickle without storages.
    """

    def __init__(self, storage: Callable[[str], Storage] | None) -> None:
        self._storage = storage
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._steps = self._copied = 0

    def run(self, data: Any, nbytes: int) -> Any:
        """Returns the object of an open pickle.

        Raises:
            ValueError: If the pickle is not one that `torch.save` writes. Almost any other error is possible, too.
        """
        if nbytes > _LONGEST_PICKLE:
            raise ValueError(f"a pickle of {nbytes} bytes, expected {_LONGEST_PICKLE} at most")
        for opcode, argument, _ in pickletools.genops(_Bytes(data)):  # type: ignore[arg-type]
            self._steps += 1
            if opcode.name == "STOP":
                break
            self._do(opcode.name, argument)
        (content,) = self._stack
        _check_size(content, _MOST_SHARED * self._steps)
        return content

    def _do(self, name: str, argument: Any) -> None:
        """Carries out one instruction; raises `ValueError` for those that torch.save does not write."""
        stack = self._stack
        if name in _VALUES:
            stack.append(argument)
        elif name in _GETS:
            stack.append(self._memo[argument])
        elif name in _PUTS or name == "MEMOIZE":
            self._memo[len(self._memo) if argument is None else argument] = stack[-1]
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack[-count:] = [tuple(self._last(count))]
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "TUPLE":
            stack.append(tuple(self._behind_mark()))
        elif name in ("APPEND", "APPENDS", "ADDITEMS"):
            _add([stack.pop()] if name == "APPEND" else self._behind_mark(), stack[-1])
        elif name in ("SETITEM", "SETITEMS"):
            items = [stack.pop(-2), stack.pop()] if name == "SETITEM" else self._behind_mark()
            _set(list(zip(items[::2], items[1::2], strict=True)), stack[-1])
        elif name == "FROZENSET":
            stack.append(frozenset(map(_key, self._behind_mark())))
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            module, attribute = argument.split(" ", 1) if name == "GLOBAL" else (stack.pop(-2), stack.pop())
            stack.append(_global(module, attribute))
        elif name in ("REDUCE", "NEWOBJ", "NEWOBJ_EX"):
            if name == "NEWOBJ_EX":
                stack.pop()
            arguments, made_by = stack.pop(), stack.pop()
            stack.append(self._made(made_by, arguments))
        elif name == "BUILD":
            state = stack.pop()
            if isinstance(stack[-1], Record):
                stack[-1].state = state
            elif not isinstance(stack[-1], OrderedDict):  # whose attributes are ignored
                raise ValueError(f"attributes of {type(stack[-1]).__name__}")
        elif name == "BINPERSID":
            stack.append(self._stored(stack.pop()))
        elif name == "POP":
            stack.pop()
        elif name == "POP_MARK":
            self._behind_mark()
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"the instruction {name}, which torch.save does not write")

    def _last(self, count: int) -> list[Any]:
        values = self._stack[-count:]
        if len(values) < count or any(value is _MARK for value in values):
            raise ValueError("fewer values than an instruction takes")
        return values

    def _behind_mark(self) -> list[Any]:
        """Removes the last mark, and the values after it, from the stack; returns the values."""
        at = len(self._stack) - 1
        while at >= 0 and self._stack[at] is not _MARK:
            at -= 1
        if at < 0:
            raise ValueError("values without a mark before them")
        values = self._stack[at + 1 :]
        del self._stack[at:]
        return values

    def _stored(self, name: Any) -> _TypedStorage:
        """Returns the storage that a tensor names, and the dtype of its values."""
        kind, made_by, key, _, numel = name
        dtype = _STORAGES.get(made_by.name) if kind == "storage" and isinstance(made_by, Global) else None
        if dtype is None or self._storage is None:
            raise ValueError(f"a tensor is stored as {getattr(made_by, 'name', kind)!r:.99}, which is not supported")
        if not isinstance(key, str) or type(numel) is not int:
            raise ValueError(f"a storage is named {key!r:.99}, and has {numel!r:.99} elements")
        storage = self._storage(key)
        if storage.nbytes != numel * dtype.itemsize:
            raise ValueError(f"storage {key[:99]!r} has {storage.nbytes} bytes, expected {numel * dtype.itemsize}")
        return _TypedStorage(storage, dtype)

    def _made(self, made_by: Any, arguments: Any) -> Any:
        """Returns the result of a call: a container or tensor of torch.save, or a `Record` for anything else."""
        if not isinstance(made_by, Global) or not isinstance(arguments, tuple):
            raise ValueError(f"a call of {type(made_by).__name__}")
        name = made_by.name
        if name in _REBUILD:
            return _tensor(*arguments)
        if name in _OF_PARAMETER:
            return arguments[0]
        if name == _WITH_ATTRIBUTES:
            rebuild, kind, inner = arguments[:3]
            known = isinstance(rebuild, Global) and rebuild.name in (*_REBUILD, *_OF_PARAMETER)
            plain = known and isinstance(kind, Global) and kind.name in _PLAIN_TENSORS
            return self._made(rebuild, inner) if plain else Record(name, (rebuild, kind, inner))
        if name not in ("collections.OrderedDict", "torch.Size", "builtins.set", "builtins.frozenset"):
            return Record(name, arguments)
        values = arguments[0] if arguments else ()
        if not isinstance(values, list | tuple):
            raise ValueError(f"{name} of {type(values).__name__}")
        # Each call copies all values, and a pickle needs only four bytes for another call.
        self._copied += len(values)
        if self._copied > _MOST_SHARED * self._steps:
            raise ValueError("it copies a container again and again")
        if name == "torch.Size":
            return tuple(map(_size, values))
        if name == "collections.OrderedDict":
            made: OrderedDict[Any, Any] = OrderedDict()
            _set([(key, value) for key, value in values], made)
            return made
        return (set if name == "builtins.set" else frozenset)(map(_key, values))


class _TypedStorage(NamedTuple):
    storage: Storage
    dtype: torch.dtype


def _global(module: Any, name: Any) -> Global:
    if not isinstance(module, str) or not isinstance(name, str) or len(module) + len(name) > _LONGEST_NAME:
        raise ValueError("a class has no name, or one of thousands of characters")
    return Global(f"{'builtins' if module == '__builtin__' else module}.{name}")


def _key(value: Any) -> Any:
    """Returns `value` if it may be a key of a dict or an item of a set; raises `ValueError` if its hash may be slow.

    A hash of tuples within tuples can take hours, and large integers can all have the same hash.
    """
    for item in value if type(value) is tuple and len(value) <= _LONGEST_KEY else (value,):
        known = isinstance(item, str | bytes | float | Global | Record | None)
        if not known and not (isinstance(item, int) and abs(item) < 2**60):
            raise ValueError(f"a {type(item).__name__} as a key, or a large number")
    return value


def _add(values: list[Any], to: Any) -> None:
    """Adds values to a list or a set. Drops them for a `Record`, whose class may be derived from a list."""
    if type(to) is list:
        to.extend(values)
    elif type(to) is set:
        to.update(map(_key, values))
    elif not isinstance(to, Record):
        raise ValueError(f"items of a {type(to).__name__}")


def _set(items: list[tuple[Any, Any]], to: Any) -> None:
    """Sets items of a dict. Drops them for a `Record`, whose class may be derived from a dict."""
    if isinstance(to, dict):
        to.update((_key(key), value) for key, value in items)
    elif not isinstance(to, Record):
        raise ValueError(f"items of a {type(to).__name__}")


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"the number {value!r:.99} in the shape of a tensor")
    return value


def _tensor(place: Any, start: Any, shape: Any, stride: Any, *_: Any) -> StoredTensor:
    """Returns a tensor with the storage, first element, shape and strides that a pickle names."""
    if not isinstance(place, _TypedStorage) or not len(shape) == len(stride) <= _MOST_DIMENSIONS:
        raise ValueError("a tensor without storage, or with a stride for none of its dimensions")
    storage, dtype = place
    start, shape, stride = _size(start), tuple(map(_size, shape)), tuple(map(_size, stride))
    # A made-up pickle must not name bytes of other records, or of nothing.
    reach = start + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
    if reach * dtype.itemsize > storage.nbytes and 0 not in shape:
        raise ValueError(f"a tensor of shape {list(shape)} reaches beyond its storage of {storage.nbytes} bytes")
    return StoredTensor(storage, dtype, start, shape, stride)


def _check_size(content: Any, most: int) -> None:
    """Raises `ValueError` if the containers add up to more than `most` values, or contain themselves.

    A container counts as often as other containers contain it, as a reader would visit it so often. A record is no
    container, and is visited once.
    """
    pending: list[tuple[Any, int]] = [(content, 0)]
    records: dict[int, Record] = {}
    count = 0
    while pending:
        value, depth = pending.pop()
        count += 1
        inner: Any = ()
        if isinstance(value, Record):
            if id(value) not in records:
                records[id(value)] = value
                inner, depth = (value.args, value.state), 0
        elif isinstance(value, dict):
            inner = value.values()
        elif type(value) in (list, tuple):
            inner = value
        if count + len(inner) > most or depth > _DEEPEST:
            raise ValueError("containers that contain one another too often")
        pending.extend((child, depth + 1) for child in inner)


# -- torch file writer ---------------------------------------------------------------------------------
#
# Files that `torch.load` reads, whose tensors are written in chunks, without a complete tensor in memory.
# `torch.save` can only write complete tensors. The format is the one that this module reads.


_ROOT = "archive"
_PROTOCOL = 2  # that of torch.save
_STORAGE_NAMES = {dtype: getattr(torch, name.removeprefix("torch.")) for name, dtype in _STORAGES.items()}


class _Storage(NamedTuple):
    """The storage that a pickled tensor names."""

    kind: Any
    key: str
    numel: int


class _Pickler(pickle.Pickler):
    """Pickler that writes each tensor as the name of its storage, and collects them in order."""

    def __init__(self, data: io.BytesIO) -> None:
        super().__init__(data, _PROTOCOL)
        self.tensors: list[Tensor | torch.Tensor] = []

    def persistent_id(self, value: Any, /) -> Any:
        """Returns the name of a storage; None for all else, which is pickled as usual."""
        return ("storage", value.kind, value.key, "cpu", value.numel) if isinstance(value, _Storage) else None

    def reducer_override(self, value: Any, /) -> Any:
        """Returns the call that makes a tensor from its storage when the file is read."""
        if not isinstance(value, Tensor | torch.Tensor):
            return NotImplemented
        shape = tuple(value.shape)
        strides = tuple(torch.empty(shape, device="meta").stride())
        numel = torch.Size(shape).numel()
        storage = _Storage(_STORAGE_NAMES[value.dtype], str(len(self.tensors)), numel)
        self.tensors.append(value)
        return rebuild_tensor, (storage, 0, shape, strides, False, OrderedDict())


class TorchFileWriter:
    """A new file of `torch.save`, whose tensors are written one after the other, in chunks.

    Call `begin` and then `write` for each of `tensors`. The file is durable after `close`, and its name after
    `sync_folder` of its folder.

    Args:
        content: Containers and plain values, with a `Tensor`, or a tensor of torch, for each tensor.

    Raises:
        IoError: If the file cannot be written. All methods raise it too.
    """

    def __init__(self, path: Path, content: Any) -> None:
        data = io.BytesIO()
        pickler = _Pickler(data)
        pickler.dump(content)
        self.tensors = pickler.tensors
        """Tensors of the content, in the order of the file."""
        self._path, self._next = path, 0
        with naming_errors(self._path, "write"):
            self._file = path.open("xb")
            self._zip = zipfile.ZipFile(self._file, "w", zipfile.ZIP_STORED)
            self._record: Any = None
            for name, value in (("data.pkl", data.getvalue()), ("byteorder", b"little"), ("version", b"3\n")):
                self._zip.writestr(f"{_ROOT}/{name}", value)

    def begin(self) -> None:
        with naming_errors(self._path, "write"):
            self._end()
            info = zipfile.ZipInfo(f"{_ROOT}/data/{self._next}")
            # The size is not known to the archive before the end, and may exceed 4 GiB.
            self._record = self._zip.open(info, "w", force_zip64=True)
            self._next += 1

    def write(self, data: memoryview | bytes) -> None:
        """Writes the next bytes of the tensor that `begin` has begun."""
        with naming_errors(self._path, "write"):
            self._record.write(data)

    def close(self) -> None:
        """Makes the file durable and closes it."""
        with naming_errors(self._path, "write"):
            self._end()
            self._zip.close()
            self._file.flush()
            sync(self._file.fileno(), self._file.name)
            self._file.close()

    def _end(self) -> None:
        if self._record is not None:
            self._record.close()
            self._record = None


def write_torch_file(path: Path, content: Any) -> None:
    """Writes a file of `torch.save` whose tensors are all in memory; durable afterwards."""
    writer = TorchFileWriter(path, content)
    for tensor in writer.tensors:
        assert isinstance(tensor, torch.Tensor)
        writer.begin()
        flat: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        writer.write(memoryview(flat))
    writer.close()
