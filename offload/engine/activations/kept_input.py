"""One input of a checkpointed unit, as the graph holds it, with the memory that it has in each tier."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch

from offload.aio.protocols import Future
from offload.engine.activations.disk_slots import Slot
from offload.engine.activations.host_blocks import Block
from offload.errors import IoError
from offload.interrupts import uninterrupted
from offload.sizes import PAGE
from offload.states import Tier
from offload.swapper.memory.device import DONE, Event

LEAST_NBYTES = PAGE
"""Bytes of the smallest input that is moved: a smaller one would take a whole page elsewhere."""


@dataclass(eq=False, slots=True)
class Memory:
    """All memory of one input; None where there is none of a kind. At least one of the first three has the bytes."""

    tensor: torch.Tensor | None = None
    """The tensor of the forward, until compute is ordered after its download."""
    block: Block | None = None
    """Host memory that has the bytes after `downloaded` and `reading`."""
    slot: Slot | None = None
    """Room on disk that has the bytes after `writing`."""
    arriving: torch.Tensor | None = None
    """A tensor on the device that has the bytes after `uploaded`."""
    downloaded: Event = DONE
    uploaded: Event = DONE
    writing: Future | None = None
    reading: Future | None = None

    @property
    def tier(self) -> Tier:
        """The highest tier that has the bytes, or will have them."""
        if self.tensor is not None or self.arriving is not None:
            return Tier.DEVICE
        return Tier.HOST if self.block is not None else Tier.DISK

    @property
    def transfers_done(self) -> bool:
        """True if no read or write is in flight."""
        return all(each is None or each.done() for each in (self.writing, self.reading))

    def settle(self) -> None:
        """Waits for a read or write in flight, whose error no longer matters."""
        for each in (self.writing, self.reading):
            if each is not None:
                with contextlib.suppress(IoError):
                    each.wait()
        self.writing = self.reading = None


class KeptInput:
    """One input. Graphs alone hold the object; when the last drops it, `released` receives its memory."""

    __slots__ = (
        *("__weakref__", "changed", "form", "memory", "nbytes"),
        *("position", "released", "stays", "version", "wanted"),
    )

    def __init__(self, tensor: torch.Tensor, position: int, wanted: tuple[int, ...], released: deque[Memory]) -> None:
        """Keeps `tensor`, detached: the graph must not refer to itself.

        Args:
            tensor: a dense tensor on the device.
            position: index of the input in the order of the forward.
            wanted: what sorts inputs in the order in which the backward is expected to ask for them.
            released: receives the memory in the end.
        """
        self.memory = Memory(tensor=tensor.detach())
        self.version = tensor._version
        self.form = Form.of(tensor)
        self.nbytes = tensor.numel() * tensor.element_size()
        self.position, self.wanted, self.released = position, wanted, released
        self.changed = False
        """True if the tensor was changed in place before its copy was complete."""
        self.stays = False
        """True if the input stays on the device, because no other tier had room."""

    @uninterrupted  # Python drops what is raised in here, a Ctrl-C too
    def __del__(self) -> None:
        # Any thread, at any time: no lock may be taken here.
        memory = self.memory
        if memory.downloaded is DONE:  # no copy reads the tensor
            memory.tensor = None
        if (
            memory.tensor is not None
            or memory.arriving is not None
            or memory.block is not None
            or memory.slot is not None
        ):
            self.released.append(memory)


@dataclass(frozen=True, slots=True)
class Form:
    """Shape, strides and dtype of a dense tensor. Kernels may depend on strides, so bits would, too."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        """Returns the form of `tensor`."""
        return cls(tensor.size(), tensor.stride(), tensor.dtype)

    def empty(self, device: torch.device) -> torch.Tensor:
        """Returns an uninitialized tensor of this form."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a view of this form of the memory of a dense tensor with as many bytes."""
        return bytes_of(tensor).view(self.dtype).as_strided(self.size, self.stride)


class InputView(NamedTuple):
    """What a graph holds for an input: the memory, which inputs of other forms may have as well, and the form."""

    kept: KeptInput
    form: Form


def may_move(tensor: torch.Tensor, device: torch.device) -> bool:
    """Returns True for an activation that moving can free: dense, not tiny, computed, on the device.

    A leaf is somebody else's: a batch, or a parameter.
    """
    return (
        type(tensor) is torch.Tensor
        and tensor.grad_fn is not None
        and tensor.device == device
        and tensor.layout is torch.strided
        and not tensor.is_nested
        # The bytes of these two are not their values.
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.numel() * tensor.element_size() >= LEAST_NBYTES
        and is_dense(tensor.size(), tensor.stride())
    )


def is_dense(size: torch.Size, stride: tuple[int, ...]) -> bool:
    """Returns True if elements of this shape and these strides fill a range of memory, each once."""
    expected = 1
    for step, count in sorted((step, count) for step, count in zip(stride, size, strict=True) if count != 1):
        if step != expected:
            return False
        expected *= count
    return True


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a dense tensor, (nbytes,) uint8."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8)
