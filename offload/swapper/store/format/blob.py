"""The blob of a commit: a safetensors file with the engine's tensors and three tensors of the store.

The store's tensors are read as bytes, so that the inspection of a run does not import torch; only `pack` and
`Blob.contents`, which returns the engine's tensors, import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from offload.errors import StoreError
from offload.records import fields, read, rows, text, whole

if TYPE_CHECKING:
    import torch

SUMS, MANIFEST, WRITTEN = "store.sums", "store.manifest", "store.written"
"""Names of the tensors that the store adds to the engine's: checksums, manifest and write counts."""
_ROW_NBYTES = 5 * 8
"""Bytes of a row of the table of checksums; see `checksums.pack`."""
_LENGTH_NBYTES = 8
"""Bytes of the header's length, with which a safetensors file begins."""


_PLACE = fields({"dtype": text(), "data_offsets": rows(whole(), 2, 2)})


class Blob:
    """The bytes of a blob, whose checksum the caller has verified.

    Raises:
        ValueError: If the bytes are no blob, which a right checksum does not tell.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._start = _LENGTH_NBYTES + int.from_bytes(data[:_LENGTH_NBYTES], "little")
        if self._start > len(data):
            raise ValueError(f"the header ends at byte {self._start} of {len(data)}")
        self._header = read(
            data[_LENGTH_NBYTES : self._start], fields({SUMS: _PLACE, MANIFEST: _PLACE}, {WRITTEN: _PLACE})
        )
        for name in (SUMS, MANIFEST, *((WRITTEN,) if WRITTEN in self._header else ())):
            start, end = self._header[name]["data_offsets"]
            if not start <= end <= len(data) - self._start:
                raise ValueError(f"{name} is at bytes {start} to {end} of {len(data) - self._start}")
        if len(self.sums) % _ROW_NBYTES:
            raise ValueError(f"the table of checksums has {len(self.sums)} bytes, expected rows of {_ROW_NBYTES}")

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
        try:
            tensors = tensors_in(self._data)
        except ValueError as error:
            raise StoreError(f"the blob of a commit is damaged: {error}; go back to a checkpoint") from error
        return {name: value for name, value in tensors.items() if name not in (SUMS, MANIFEST, WRITTEN)}

    def _bytes(self, name: str) -> bytes:
        """Returns the bytes of one tensor."""
        start, end = self._header[name]["data_offsets"]
        return self._data[self._start + start : self._start + end]


def tensors_in(data: bytes) -> dict[str, torch.Tensor]:
    """Returns the tensors of a safetensors file's bytes; raises `ValueError` if they are none."""
    import safetensors
    import safetensors.torch

    try:
        return dict(safetensors.torch.load(data))
    # The library checks sizes and places, and raises these for the rest: a dtype that torch has not, a shape of it.
    except (safetensors.SafetensorError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"the bytes are no safetensors file: {type(error).__name__}: {error}") from error


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
