"""What a commit holds beside the states: a file in the safetensors format, of the engine's tensors and of the store's.

Who looks at a run from outside needs some of its bytes and no tensor, so torch is imported where tensors are asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SUMS, MANIFEST, WRITTEN = "store.sums", "store.manifest", "store.written"
"""What the store adds to the engine's tensors."""
_LENGTH_NBYTES = 8


class Blob:
    """The bytes of a blob whose checksum was right."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._start = _LENGTH_NBYTES + int.from_bytes(data[:_LENGTH_NBYTES], "little")
        self._header = json.loads(data[_LENGTH_NBYTES : self._start])

    @property
    def sums(self) -> bytes:
        """See `sums.unpack`."""
        return self._bytes(SUMS)

    @property
    def manifest(self) -> bytes:
        """See `Manifest.unpack`."""
        return self._bytes(MANIFEST)

    @property
    def written(self) -> bytes | None:
        """See `written.read_written`; None where the commit is older than these counts."""
        return self._bytes(WRITTEN) if WRITTEN in self._header else None

    def contents(self) -> dict[str, torch.Tensor]:
        """What was committed, without what the store adds."""
        import safetensors.torch

        tensors = safetensors.torch.load(self._data)
        return {name: value for name, value in tensors.items() if name not in (SUMS, MANIFEST, WRITTEN)}

    def _bytes(self, name: str) -> bytes:
        start, end = self._header[name]["data_offsets"]
        return self._data[self._start + start : self._start + end]


def pack(contents: Mapping[str, torch.Tensor], table: torch.Tensor, manifest: bytes, written: bytes) -> bytes:
    """The file of a commit's `contents`, with the checksums `table` that `sums.pack` made."""
    import safetensors.torch
    import torch

    def as_bytes(data: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    packed: bytes = safetensors.torch.save(
        {**contents, SUMS: table, MANIFEST: as_bytes(manifest), WRITTEN: as_bytes(written)}
    )
    return packed
