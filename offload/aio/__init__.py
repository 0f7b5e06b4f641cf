"""Asynchronous file I/O on aligned memory: buffers, files open for O_DIRECT, a queue, futures, checksums.

    with DirectFile("states", create=True) as file, IoQueue() as queue:
        file.reserve(len(buffer))
        queue.write(file, 0, buffer).wait()

A request of any size and alignment either moves all of its bytes, or its future raises `IoError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offload.aio._native import crc32c as _crc32c
from offload.aio._native import crc32c_joined as _crc32c_joined
from offload.aio._native import crc32c_of_zeros as _crc32c_of_zeros
from offload.aio.backend import BACKENDS
from offload.aio.file import DirectFile, StripedFile
from offload.aio.future import File, IoFuture
from offload.aio.measure import Bandwidth, bandwidths
from offload.aio.memory import (
    aligned_empty,
    huge_page_share,
    prefer_node,
    release_pages,
    release_pages_at,
    resident_bytes,
)
from offload.aio.queue import IoQueue, Priority

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "BACKENDS",
    "Bandwidth",
    "DirectFile",
    "File",
    "IoFuture",
    "IoQueue",
    "Priority",
    "StripedFile",
    "aligned_empty",
    "bandwidths",
    "crc32c",
    "crc32c_joined",
    "crc32c_of_zeros",
    "huge_page_share",
    "prefer_node",
    "release_pages",
    "release_pages_at",
    "resident_bytes",
]


def crc32c(buffer: Buffer, value: int = 0) -> int:
    """Returns the CRC-32C of `buffer`. Releases the GIL.

    Args:
        buffer: C-contiguous bytes, read only.
        value: CRC-32C of the bytes that precede `buffer`, from which the checksum continues; 0 if there are none.
    """
    return _crc32c(buffer, value)


def crc32c_joined(first: int, second: int, second_nbytes: int) -> int:
    """Returns the CRC-32C of two adjacent byte ranges, computed from their checksums without reading the bytes.

    Args:
        first: CRC-32C of the first range.
        second: CRC-32C of the second range, which directly follows the first.
        second_nbytes: length of the second range in bytes.
    """
    return _crc32c_joined(first, second, second_nbytes)


def crc32c_of_zeros(nbytes: int) -> int:
    """Returns the CRC-32C of `nbytes` zero bytes.

    Args:
        nbytes: number of zero bytes.
    """
    return _crc32c_of_zeros(nbytes)
