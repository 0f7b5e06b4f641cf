"""A storage of its own over device memory, which tells whether a view of it is alive, and views that are used again."""

from __future__ import annotations

from typing import NamedTuple

import torch

from offload.torch_internals import StorageReference, StorageUsers, in_second_storage


class ViewPlaces(NamedTuple):
    """Places of the tensors into which memory is divided."""

    dtype: torch.dtype
    tensors: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]
    """Shape, stride and offset (in elements) of each tensor."""


class ViewedMemory:
    """Device memory as tensors, in a storage that nobody else has.

    The arena's own storage never dies, so it cannot tell whether a unit's weights are still in use. This one counts
    the tensors in it: those of this object, and those that others have made of them.
    """

    def __init__(self, memory: torch.Tensor, places: ViewPlaces) -> None:
        """Lays a storage over the memory.

        Args:
            memory: (nbytes,) uint8, kept alive by each view.
            places: how to divide the memory.
        """
        self.memory, self.places = memory, places
        with torch.inference_mode(False):  # a later forward could not train with tensors of that mode
            flat = in_second_storage(memory).view(places.dtype)
            self.flat: torch.Tensor | None = flat
            """All of the memory, in the dtype of `places`."""
            self.views = tuple([flat.as_strided(size, stride, start) for size, stride, start in places.tensors])
            """The tensors of `places`."""
        storage = flat.untyped_storage()
        self.address = storage.data_ptr()
        self._end = StorageReference(storage)
        self._users = StorageUsers(storage) if StorageUsers.counted() else None
        del storage  # it would count
        self._own = 0 if self._users is None else self._users.count()

    @property
    def counted(self) -> bool:
        """True if the memory can be used again: torch tells whether others use the storage."""
        return self._users is not None

    @property
    def viewed(self) -> bool:
        """True while anybody but this object has a tensor in the storage, or the storage itself."""
        if self._users is None:
            return not self._end.expired()
        return self._users.count() != self._own

    def viewed_beside(self, own: int) -> bool:
        """Returns True if more than `own` tensors beside this object's are in the storage; False without a count."""
        return self._users is not None and self._users.count() - self._own > own

    def let_go(self) -> None:
        """Ends a use. Without a count also this object's own tensors end, so that the storage's end tells of others."""
        if self._users is None:
            self.flat, self.views = None, ()


class Binding:
    """One pin of a unit, and the storage over the unit's device buffer."""

    __slots__ = ("flat", "memory", "unit", "updates", "waits")

    def __init__(self, unit: int, memory: ViewedMemory, updates: int | None, waits: bool) -> None:
        """Begins a use of the memory.

        Args:
            unit: the unit.
            memory: its device buffer, in a storage of its own.
            updates: how often the weights have changed; None for a unit that stays, whose weights change in place.
            waits: True if streams must wait for the upload of the unit.
        """
        self.unit, self.memory, self.updates, self.waits = unit, memory, updates, waits
        self.flat = memory.flat
        """All weights of the unit in a row; None once this object needs them no more."""

    def let_go(self) -> None:
        """Ends this object's own need of the weights: from now on views alone keep the binding alive."""
        self.flat = None
        self.memory.let_go()

    @property
    def alive(self) -> bool:
        """True while a view of the storage exists."""
        return self.flat is not None or self.memory.viewed
