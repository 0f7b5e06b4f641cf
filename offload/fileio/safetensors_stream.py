"""Safetensors files that are written and read in chunks, without a complete tensor in memory.

The format is https://huggingface.co/docs/safetensors: the length of a header, the header in JSON, and the bytes of the
tensors one after the other. The safetensors library only writes complete tensors; it can read the files written here.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from offload.aio.unanswered import sync
from offload.errors import StoreError
from offload.fileio.atomic_write import naming_errors, write_all
from offload.fileio.inner_files import open_regular
from offload.sizes import MIB, PAGE, align_up

NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Name of each dtype in the format."""
DTYPES = {name: dtype for dtype, name in NAMES.items()}
_LENGTH = struct.Struct("<Q")
_LONGEST_HEADER = 100_000_000
"""Most bytes of a header, as in the safetensors library."""
_MOST_DIMENSIONS = 64
_MOST_BRACKETS = 3_000_000
"""Most lists and objects in a header. Each takes many times the memory of its two brackets."""


class Tensor(NamedTuple):
    """A tensor that a file contains or will contain."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorLocation(NamedTuple):
    """Position of a tensor's bytes in its file; `offset` is in bytes from the start of the file."""

    tensor: Tensor
    offset: int


def plan(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, TensorLocation]]:
    """Returns the head of a file and the location of each tensor.

    Tensors are stored in the order given. The first begins at a multiple of 4096 bytes, so that direct I/O can access
    it. Empty `metadata` are omitted.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header).encode()
    start = align_up(_LENGTH.size + len(text), PAGE)
    # The format allows spaces at the end of the header. They move the first tensor to a page boundary.
    head = _LENGTH.pack(start - _LENGTH.size) + text.ljust(start - _LENGTH.size)
    places = {name: TensorLocation(tensor, start + header[name]["data_offsets"][0]) for name, tensor in tensors.items()}
    return head, places


def read_header(path: Path) -> tuple[dict[str, TensorLocation], dict[str, str]]:
    """Returns the locations of the tensors in a file by name, and its metadata."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            # A damaged length must not make `read` allocate gigabytes.
            if length > min(_LONGEST_HEADER, size):
                raise ValueError(f"a header of {length} bytes")
            text = b"".join(_read_text(file, length))
        if text.count(b"[") + text.count(b"{") > _MOST_BRACKETS:
            raise ValueError(f"its header contains more than {_MOST_BRACKETS} lists and objects")
        header = json.loads(text, object_pairs_hook=unrepeated)
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its __metadata__ is not an object of strings")
        places: dict[str, TensorLocation] = {}
        for name, entry in header.items():
            dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            if dtype not in DTYPES:
                raise StoreError(f"{path}: dtype {dtype!r:.99} of {name!r:.99} is not supported")
            _check_numbers(name, shape, start, end)
            tensor = Tensor(DTYPES[dtype], tuple(shape))
            # A truncated file is noticed here, before any tensor is read.
            if end - start != tensor.nbytes or _LENGTH.size + length + end > size:
                raise ValueError(f"{name!r:.99} is stored at {start} to {end}, in a file of {size} bytes")
            places[name] = TensorLocation(tensor, _LENGTH.size + length + start)
        _check_apart(places)
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
        MemoryError,
        struct.error,
    ) as error:
        raise StoreError(f"{path} is not a complete safetensors file: {error}; fetch or save the file again") from error
    return places, metadata


def _read_text(file: BinaryIO, nbytes: int) -> Iterator[bytes]:
    """Yields bytes of a file; raises `ValueError` at a zero byte, which holes have and texts do not."""
    for start in range(0, nbytes, MIB):
        piece = file.read(min(MIB, nbytes - start))
        if b"\0" in piece:
            raise ValueError("its header is no text")
        yield piece


def unrepeated(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object of JSON, a hook for `json.loads`; raises `ValueError` if it has a key twice.

    Readers differ in the choice between two values.
    """
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"the key {key!r:.99} is there twice")
        content[key] = value
    return content


def _check_numbers(name: str, shape: Any, start: Any, end: Any) -> None:
    """Raises `ValueError` for a shape or byte positions with floats, truth values or negative numbers."""
    numbers = [*shape, start, end] if isinstance(shape, list) and len(shape) <= _MOST_DIMENSIONS else [None]
    if not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
        raise ValueError(
            f"{name!r:.99} has the shape {shape!r:.99} at {start!r:.99} to {end!r:.99}, expected numbers from 0 on"
        )
    # torch computes sizes in 64-bit words, even if a dimension is 0.
    if math.prod(max(number, 1) for number in shape) >= 2**62:
        raise ValueError(f"{name!r:.99} has the shape {shape!r:.99}, which no tensor has")


def _check_apart(places: Mapping[str, TensorLocation]) -> None:
    """Raises `ValueError` if tensors share bytes: their sizes could add up to any multiple of the file's."""
    end, before = 0, ""
    for name, (tensor, offset) in sorted(places.items(), key=lambda item: item[1].offset):
        if tensor.nbytes:
            if offset < end:
                raise ValueError(f"{name!r:.99} and {before!r:.99} share bytes")
            end, before = offset + tensor.nbytes, name


class SafetensorsWriter:
    """A new safetensors file, whose tensors are written in chunks and in any order.

    All bytes of all tensors must be written before `close`, which makes them durable; the file's name is durable only
    after `sync_folder` of its folder. The file must not exist. Several threads need a lock.

    Args:
        reserved: True to allocate all disk space now; otherwise the caller calls `reserve` for each tensor.

    Raises:
        IoError: If the file cannot be made; then nothing is left of it. All methods raise it too.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, Tensor],
        metadata: Mapping[str, str] | None = None,
        reserved: bool = True,
    ) -> None:
        head, self.places = plan(tensors, metadata or {})
        self._path = path
        self._descriptor = -1
        self.nbytes = max((p.offset + p.tensor.nbytes for p in self.places.values()), default=len(head))
        # O_EXCL and O_NOFOLLOW: a file of another writer is never touched, not even through a link.
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        with naming_errors(path, "make", 0, self.nbytes):
            self._descriptor = os.open(path, flags, 0o666)
            try:
                # The file has its full size from the start, so chunks can be written in any order.
                os.ftruncate(self._descriptor, self.nbytes)
                # A full disk is noticed now and not in the middle of the writing.
                if reserved:
                    os.posix_fallocate(self._descriptor, 0, self.nbytes)
                self._put(0, head)
            except BaseException:
                # The caller has no object to close, so nothing may be left.
                self._drop()
                path.unlink(missing_ok=True)
                raise

    def reserve(self, name: str) -> None:
        """Allocates the disk space of a tensor, in a file that was not `reserved`."""
        place = self.places[name]
        with naming_errors(self._path, "reserve", place.offset, place.tensor.nbytes):
            # `posix_fallocate` refuses a length of zero, which an empty tensor has.
            os.posix_fallocate(self._descriptor, place.offset, max(place.tensor.nbytes, 1))

    def write(self, name: str, start: int, data: memoryview | bytes) -> None:
        """Writes bytes of the tensor `name`, from its byte `start` on."""
        place = self.places[name]
        assert 0 <= start <= start + len(data) <= place.tensor.nbytes
        self._put(place.offset + start, data)

    def write_tensor(self, name: str, value: torch.Tensor) -> None:
        """Writes a complete tensor, which must be on the CPU."""
        # The memory of a conjugated or negated view has other values than the view.
        flat: Any = value.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy()
        self.write(name, 0, memoryview(flat))

    @property
    def descriptor(self) -> int:
        """Descriptor of the open file, for callers that let the kernel copy into it."""
        return self._descriptor

    def close(self) -> None:
        """Makes the bytes of the file durable and closes the file; idempotent."""
        if self._descriptor < 0:
            return
        try:
            # A failed sync means that written bytes may be lost; the caller must discard the file.
            with naming_errors(self._path, "sync"):
                sync(self._descriptor, self._path)
        finally:
            self._drop()

    def _put(self, offset: int, data: memoryview | bytes) -> None:
        with naming_errors(self._path, "write", offset, len(data)):
            write_all(self._descriptor, offset, data)

    def _drop(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._drop()


def shard(tensors: Mapping[str, Tensor], most_nbytes: int) -> Sequence[dict[str, Tensor]]:
    """Splits `tensors`, in their order, into files of at most `most_nbytes`. A larger tensor gets a file of its own."""
    shards: list[dict[str, Tensor]] = []
    room = 0
    for name, tensor in tensors.items():
        if not shards or tensor.nbytes > room:
            shards.append({})
            room = most_nbytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    return shards
