"""Weights and states of a checkpoint that `save_checkpoint` made, read without the model's code."""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path

from offload.aio import crc32c_joined
from offload.aio.protocols import Queue
from offload.checkpoint.files import states_file, tensor_name
from offload.checkpoint.load import look, open_states
from offload.engine.model_io.weight_source import Reading
from offload.errors import IoError
from offload.states import State
from offload.swapper.store import Compared


class CheckpointSource:
    """A checkpoint as source of weights. Changes nothing; implements `Source`.

    Damage of a tensor shows when its last byte has been read.

    Args:
        checkpoint: Folder of the checkpoint.
        queue: Queue for the reads; owned by the caller.

    Raises:
        StoreError: If a file is missing or of another size, or if anything but a tensor of states is damaged.
    """

    def __init__(self, checkpoint: Path, queue: Queue) -> None:
        self._found = look(checkpoint, 0, 0, {})
        manifest = self._found.manifest
        self._queue = queue
        self._sums: dict[tuple[int, str], int] = {}
        self._files = open_states(self._found)
        self.description, self.about, self.step = manifest.layout, manifest.about, manifest.step
        self.frozen = manifest.frozen
        self.progress = self._found.progress
        self.buffers, self.client_state = self.progress.buffers, self._found.client_state

    def read(self, rank: int, unit: int, state: State, start: int, buffer: memoryview) -> Reading:
        """Begins to read bytes of a rank's partition; see `Source.read`."""
        name = tensor_name(unit, state)
        place = self._found.places[rank][name]
        assert start + len(buffer) <= place.tensor.nbytes
        future = self._queue.read(self._files[rank], place.offset + start, buffer, checksum=True)
        return Compared(future, partial(self._compare, rank, name, start))

    def _compare(self, rank: int, name: str, start: int, nbytes: int, crc: int) -> None:
        """Joins the CRC-32C of bytes to that of the bytes before, and compares the result at the end of the tensor.

        Args:
            rank: Rank of the partition.
            name: Name of the tensor.
            start: First byte; reads of a tensor end in order.
            nbytes: Number of bytes.
            crc: Their CRC-32C.

        Raises:
            IoError: If the tensor has been read completely and differs from the saved one.
        """
        place, file = self._found.places[rank][name], states_file(rank)
        total = crc32c_joined(self._sums.pop((rank, name), 0), crc, nbytes)
        if start + nbytes < place.tensor.nbytes:
            self._sums[rank, name] = total
        elif total != self._found.manifest.files[file].sums[name]:
            path = str(self._found.folder / file)
            raise IoError(path, place.offset, place.tensor.nbytes, errno.EBADMSG, f"use {name},")

    def close(self) -> None:
        """Closes the files; idempotent."""
        for file in self._files:
            file.close()
