"""The blob of a commit: a safetensors file with the engine's tensors and three tensors of the store.

The store's tensors are read as bytes, so that the inspection of a run does not import torch; only `pack` and
`Blob.contents`, which returns the engine's tensors, import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SUMS, MANIFEST, WRITTEN = "store.sums", "store.manifest", "store.written"
"""Names of the tensors that the store adds to the engine's: checksums, manifest and write counts."""
_LENGTH_NBYTES = 8
"""Bytes of the header's length, with which a safetensors file begins."""


class Blob:
    """The bytes of a blob, whose checksum the caller has verified."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._start = _LENGTH_NBYTES + int.from_bytes(data[:_LENGTH_NBYTES], "little")
        self._header = json.loads(data[_LENGTH_NBYTES : self._start])

    @property
    def sums(self) -> bytes:
        """Returns the packed checksums; see `checksums.unpack`."""
        return self._bytes(SUMS)

    @property
    def manifest(self) -> bytes:
        """Returns the packed manifest; see `Manifest.unpack`."""
        return self._bytes(MANIFEST)

    @property
    def written(self) -> bytes | None:
        """Returns the packed write counts, see `write_counts.read_written`; None if the commit has none."""
        return self._bytes(WRITTEN) if WRITTEN in self._header else None

    def contents(self) -> dict[str, torch.Tensor]:
        """Returns the engine's tensors, without those of the store."""
        import safetensors.torch

        tensors = safetensors.torch.load(self._data)
        return {name: value for name, value in tensors.items() if name not in (SUMS, MANIFEST, WRITTEN)}

    def _bytes(self, name: str) -> bytes:
        """Returns the bytes of one tensor."""
        start, end = self._header[name]["data_offsets"]
        return self._data[self._start + start : self._start + end]


def pack(contents: Mapping[str, torch.Tensor], table: torch.Tensor, manifest: bytes, written: bytes) -> bytes:
    """Returns the bytes of a commit's blob.

    Args:
        contents: the engine's tensors.
        table: the checksums, as `checksums.pack` returns them.
        manifest: the manifest, as `Manifest.pack` returns it.
        written: the write counts, as `Written.pack` returns them.
    """
    import safetensors.torch
    import torch

    def as_bytes(data: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    packed: bytes = safetensors.torch.save(
        {**contents, SUMS: table, MANIFEST: as_bytes(manifest), WRITTEN: as_bytes(written)}
    )
    return packed
