"""Memory for arrays of tokens: RAM for small arrays, temporary files for large ones, which may exceed the RAM.

A file is mapped and unlinked, so the file disappears with the process. The kernel keeps pages in RAM while there is
room and writes them out otherwise.
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
"""Bytes of an array, or of all arrays of a pool, up to which RAM is used."""
_BLOCK = 64 << 20
"""Smallest size of a pool's file."""
_AT_ONCE = 16 << 20
"""Bytes of an array that are scanned or copied at a time."""


def make_array(shape: tuple[int, ...], dtype: Any, fill: int = 0) -> np.ndarray:
    """Returns an array filled with `fill`; the array owns its memory.

    Raises:
        ConfigError: The array needs a file, and the folder of temporary files has no room.
    """
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if nbytes <= _IN_RAM:
        return np.full(shape, fill, dtype)
    array: np.ndarray = _map(nbytes).view(dtype).reshape(shape)
    if fill:
        array.fill(fill)
    return array


def take_rows(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns a copy of `array[rows]` in memory of `make_array`, copied about 16 MiB at a time."""
    taken = make_array((len(rows), *array.shape[1:]), array.dtype)
    for some in pieces_of(taken):
        taken[some] = array[rows[some]]
    return taken


def join(arrays: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    """Returns the concatenation of the arrays, (n,) of `dtype`, in memory of `make_array`."""
    return np.concatenate(arrays, out=make_array((sum(map(len, arrays)),), dtype))


def pieces_of(array: np.ndarray) -> Iterator[slice]:
    """Returns an iterator over slices of an array's rows; a copy of one slice takes about 16 MiB."""
    step = max(_AT_ONCE // array[:1].nbytes, 1) if len(array) else 1
    return (slice(begin, begin + step) for begin in range(0, len(array), step))


class Pool:
    """Memory for many small arrays of one dtype. A file of the pool is freed with the last array in it."""

    def __init__(self, dtype: Any) -> None:
        self._free = np.empty(0, dtype)
        self._kept = 0

    def keep(self, values: np.ndarray) -> np.ndarray:
        """Returns `values`, (n,) of the pool's dtype, while the pool is small, else a copy of `values` in a file."""
        self._kept += values.nbytes
        if self._kept <= _IN_RAM:
            return values
        if len(values) > len(self._free):
            self._free = _map(max(values.nbytes, _BLOCK)).view(self._free.dtype)
        place, self._free = self._free[: len(values)], self._free[len(values) :]
        place[:] = values
        return place


def _map(nbytes: int) -> np.ndarray:
    """Returns zeros, (nbytes,) uint8, in a mapped file without a name."""
    try:
        with tempfile.TemporaryFile(prefix="offload-tokens-") as file:
            # Reserves the blocks now: on a full disk a later write to the mapping would raise SIGBUS.
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
    except OSError as error:
        raise ConfigError(
            f"{format_size(nbytes)} of the data's tokens do not fit in {tempfile.gettempdir()}: {error.strerror}; free "
            f"some of it, or set TMPDIR to a folder of a larger disk"
        ) from error
