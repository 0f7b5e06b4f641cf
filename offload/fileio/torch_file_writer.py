"""Files that `torch.load` reads, whose tensors are written in chunks, without a complete tensor in memory.

`torch.save` writes complete tensors alone. The format is that of `offload.fileio.torch_file`.
"""

from __future__ import annotations

import errno
import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offload.aio.unanswered import sync
from offload.errors import IoError
from offload.fileio.safetensors_stream import Tensor
from offload.torch_internals import rebuild_tensor

_ROOT = "archive"
_PROTOCOL = 2  # that of torch.save
_STORAGES = {
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.float64: torch.DoubleStorage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}


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
        """Returns how a tensor is made of its storage when the file is read."""
        if not isinstance(value, Tensor | torch.Tensor):
            return NotImplemented
        shape = tuple(value.shape)
        strides = tuple(torch.empty(shape, device="meta").stride())
        numel = torch.Size(shape).numel()
        storage = _Storage(_STORAGES[value.dtype], str(len(self.tensors)), numel)
        self.tensors.append(value)
        return rebuild_tensor, (storage, 0, shape, strides, False, OrderedDict())


class TorchFileWriter:
    """A new file of `torch.save`, whose tensors are written one after the other, in chunks.

    Call `begin` and then `write` for each of `tensors`. The file is durable after `close`; its name is so after
    `sync_folder` of its folder.

    Args:
        path: Path of the new file.
        content: Containers and plain values, with a `Tensor`, or a tensor of torch, for each tensor.

    Raises:
        IoError: If the file cannot be written. All methods raise it too.
    """

    def __init__(self, path: Path, content: Any) -> None:
        data = io.BytesIO()
        pickler = _Pickler(data)
        pickler.dump(content)
        self.tensors = pickler.tensors
        """Tensors of the content, in the order in which they are written."""
        self._path, self._next = path, 0
        with self._naming_errors():
            self._file = path.open("xb")
            self._zip = zipfile.ZipFile(self._file, "w", zipfile.ZIP_STORED)
            self._record: Any = None
            for name, value in (("data.pkl", data.getvalue()), ("byteorder", b"little"), ("version", b"3\n")):
                self._zip.writestr(f"{_ROOT}/{name}", value)

    def begin(self) -> None:
        """Begins the next tensor."""
        with self._naming_errors():
            self._end()
            info = zipfile.ZipInfo(f"{_ROOT}/data/{self._next}")
            # The size is not known to the archive before the end, and may exceed 4 GiB.
            self._record = self._zip.open(info, "w", force_zip64=True)
            self._next += 1

    def write(self, data: memoryview | bytes) -> None:
        """Writes the next bytes of the tensor that `begin` has begun."""
        with self._naming_errors():
            self._record.write(data)

    def close(self) -> None:
        """Makes the file durable and closes it."""
        with self._naming_errors():
            self._end()
            self._zip.close()
            self._file.flush()
            sync(self._file.fileno(), self._file.name)
            self._file.close()

    def _end(self) -> None:
        """Ends the present record."""
        if self._record is not None:
            self._record.close()
            self._record = None

    @contextmanager
    def _naming_errors(self) -> Iterator[None]:
        """Raises errors of the system as `IoError` with the path."""
        try:
            yield
        except OSError as error:
            raise IoError(str(self._path), 0, 0, error.errno or errno.EIO, "write") from error


def write_torch_file(path: Path, content: Any) -> None:
    """Writes a file of `torch.save` whose tensors are all in memory; durable afterwards.

    Args:
        path: Path of the new file.
        content: Containers, plain values and tensors.

    Raises:
        IoError: If the file cannot be written.
    """
    writer = TorchFileWriter(path, content)
    for tensor in writer.tensors:
        assert isinstance(tensor, torch.Tensor)
        writer.begin()
        flat: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        writer.write(memoryview(flat))
    writer.close()
