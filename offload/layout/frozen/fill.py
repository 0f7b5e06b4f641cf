"""Values of a frozen weight on their way in: they come in pieces of any length and leave as blocks."""

from __future__ import annotations

import torch

from offload.kernels.blocks import BLOCK_FORMATS, quantize


class BlockWriter:
    """Writer of one parameter's blocks. Its values come in order; less than a block of them waits for the next."""

    def __init__(self, form: str, memory: torch.Tensor) -> None:
        """Begins at the parameter's first value.

        Args:
            form: name of the block format.
            memory: uint8 that begin with the parameter's blocks; written, and owned by the caller.
        """
        self._form, self._memory = BLOCK_FORMATS[form], memory
        self._at = 0
        self._rest: torch.Tensor | None = None

    def put(self, values: torch.Tensor) -> None:
        """Writes the next values, (n,) of any floating dtype on the CPU."""
        if values.dtype is torch.float64:
            values = values.float()
        if self._rest is not None:
            values = torch.cat((self._rest.to(values.dtype), values))
        whole = len(values) // self._form.values * self._form.values
        self._write(values[:whole])
        self._rest = values[whole:].clone() if whole < len(values) else None

    def end(self) -> None:
        """Writes the last block, which may have fewer values than the others."""
        if self._rest is not None:
            self._write(self._rest)
            self._rest = None

    def _write(self, values: torch.Tensor) -> None:
        """Writes blocks of `values`, (n,)."""
        if len(values):
            stop = self._at + self._form.stored_nbytes(len(values))
            quantize(self._form, values.contiguous(), self._memory[self._at : stop])
            self._at = stop
