"""A storage of its own over device memory, which tells whether a view of it is alive, and views that are used again."""

from __future__ import annotations

from typing import NamedTuple

import torch

from offload.torch_internals import StorageReference, in_second_storage


class Cut(NamedTuple):
    """A division of memory into tensors."""

    dtype: torch.dtype
    pieces: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]
    """Shape, stride and offset (in elements) of each tensor."""


class ViewedMemory:
    """Device memory as tensors, in a storage that nobody else has.

    The arena's own storage never dies, so it cannot tell whether a unit's weights are still in use. This one counts
    the tensors in it: those of this object, and those that others have made of them.
    """

    def __init__(self, memory: torch.Tensor, cut: Cut) -> None:
        """Lays a storage over the memory.

        Args:
            memory: (nbytes,) uint8, kept alive by each view.
            cut: how to divide the memory.
        """
        self.memory, self.cut = memory, cut
        with torch.inference_mode(False):  # a later forward could not train with tensors of that mode
            flat = in_second_storage(memory).view(cut.dtype)
            self.flat: torch.Tensor | None = flat
            """All of the memory, in the dtype of `cut`."""
            self.views = tuple([flat.as_strided(size, stride, start) for size, stride, start in cut.pieces])
            """The tensors of `cut`."""
        self._storage, self.address = _reference(flat)
        self._own = self._storage.users()
        """Number of this object's own tensors in the storage; None if torch does not count them."""

    @property
    def counted(self) -> bool:
        """True if the memory can be used again: torch tells whether others have tensors in the storage."""
        return self._own is not None

    @property
    def viewed(self) -> bool:
        """True while a tensor in the storage exists that is not this object's own."""
        if self._own is None:
            return not self._storage.expired()
        return self._storage.users() != self._own

    def let_go(self) -> None:
        """Ends a use. Without a count also this object's own tensors end, so that the storage's end tells of others."""
        if self._own is None:
            self.flat, self.views = None, ()


def _reference(tensor: torch.Tensor) -> tuple[StorageReference, int]:
    """Returns a weak reference to the storage of a tensor, and its address. No object of Python for it remains."""
    storage = tensor.untyped_storage()
    return StorageReference(storage), storage.data_ptr()
