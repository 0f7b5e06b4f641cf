"""Arrays of tokens: in RAM while they are small, else in temporary files, so that data may be larger than the RAM.

A file is mapped and has no name, so it ends with the process. Its pages are in RAM while there is room; the kernel
writes them out where there is none.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from offload.errors import ConfigError
from offload.sizes import format_size

_IN_RAM = 256 << 20
"""Bytes of an array, or of all arrays of a pool, up to which no file is made."""
_BLOCK = 64 << 20
"""Bytes of a file of a pool, at least."""
_AT_ONCE = 16 << 20
"""Bytes of an array that are looked at or copied at a time."""


def make_array(shape: tuple[int, ...], dtype: Any, fill: int = 0) -> np.ndarray:
    """Returns an array of `fill`; the array owns its memory.

    Raises:
        ConfigError: It needs a file, and there is no room for one in the folder of temporary files.
    """
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if nbytes <= _IN_RAM:
        return np.full(shape, fill, dtype)
    array: np.ndarray = _map(nbytes).view(dtype).reshape(shape)
    if fill:
        array.fill(fill)
    return array


def take_rows(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns a copy of `array[rows]`, made a few rows at a time, in memory of `make_array`."""
    taken = make_array((len(rows), *array.shape[1:]), array.dtype)
    for some in pieces_of(taken):
        taken[some] = array[rows[some]]
    return taken


def join(arrays: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    """Returns (n,) of `dtype`: a copy of the arrays one behind the other, in memory of `make_array`."""
    return np.concatenate(arrays, out=make_array((sum(map(len, arrays)),), dtype))


def pieces_of(array: np.ndarray) -> Iterator[slice]:
    """Yields slices of the rows of an array, few enough each that a copy of them is small."""
    step = max(_AT_ONCE // array[:1].nbytes, 1) if len(array) else 1
    return (slice(begin, begin + step) for begin in range(0, len(array), step))


class Pool:
    """Memory of many small arrays of one dtype that stay until the last of them goes."""

    def __init__(self, dtype: Any) -> None:
        self._free = np.empty(0, dtype)
        self._kept = 0

    def keep(self, values: np.ndarray) -> np.ndarray:
        """Returns `values`, (n,) of the pool's dtype: themselves while all are small, else a copy of them in a file."""
        self._kept += values.nbytes
        if self._kept <= _IN_RAM:
            return values
        if len(values) > len(self._free):
            self._free = _map(max(values.nbytes, _BLOCK)).view(self._free.dtype)
        place, self._free = self._free[: len(values)], self._free[len(values) :]
        place[:] = values
        return place


def _map(nbytes: int) -> np.ndarray:
    """Returns (nbytes,) uint8 zeros in a file without a name."""
    try:
        with tempfile.TemporaryFile(prefix="offload-tokens-") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)  # else a full disk is a SIGBUS, at whichever write comes then
            return np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
    except OSError as error:
        raise ConfigError(
            f"{format_size(nbytes)} of the data's tokens do not fit in {tempfile.gettempdir()}: {error.strerror}; free "
            f"some of it, or set TMPDIR to a folder of a larger disk"
        ) from error
