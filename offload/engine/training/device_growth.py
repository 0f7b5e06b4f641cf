"""Growth of the device arena after the first step, its shrinking, and advice when the device is out of memory.

    first step     ─► torch's allocator shows the memory that activations took ─► the arena grows into the memory that
                      they left free, for all units, and beyond that for gradients that accumulate on the device
    out of memory  ─► units in grown memory are dropped, totals of gradients there are copied to the host ─► torch has
                      the memory again

Memory is given back only between calls of the model, when no view of weights is alive in it: at once before a forward
is repeated or when the user asks, else at the next call of the engine. Errors that the engine does not see, as those
of `model.generate`, are found in the counters of torch's allocator. Where torch freed its own cache instead of raising,
memory is given back at the end of the step.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.engine.gradients.accumulator import GradientAccumulator
from offload.engine.training.snapshot import GeneratorStates
from offload.errors import BudgetError
from offload.interrupts import uninterrupted
from offload.layout.placement import ArenaHistory, DeviceNeed, next_growth
from offload.sizes import format_size
from offload.swapper.memory.device import Device, empty_cache, shortages
from offload.swapper.pager import Pager
from offload.torch_internals import inside_backward, tree_leaves

logger = logging.getLogger("offload")

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
"""Types of inputs, beside tensors, that a forward cannot change."""


Buffers = Mapping[str, torch.Tensor | None]
"""Buffers of one module, by name: the dict that the module keeps."""


_BACKWARD = (
    "The backward ended in the middle and cannot be resumed; gradients that it had made by then stay in the step. Call "
    "zero_grad() and run the forward and backward of every micro-batch of this step again"
)


class _Reason(NamedTuple):
    """Cause for which grown memory is given back."""

    words: str
    short: bool
    """True if the device ran out of memory; False if the user asked."""


_ASKED = _Reason("as asked", short=False)
_FAILED = _Reason("the device was out of memory", short=True)
_RETRIED = _Reason("the last step was short of device memory", short=True)
_REPEATED = _Reason("the device was out of memory in a forward, which runs once more", short=True)


class DeviceBudget:
    """The size of one engine's device arena. Belongs to the thread that runs the model."""

    def __init__(
        self, module: nn.Module, pager: Pager, gradients: GradientAccumulator, device: Device, need: DeviceNeed
    ) -> None:
        """Stores the components.

        Args:
            module: the model.
            pager: owner of the device arena.
            gradients: receives grown memory for totals.
            device: the compute device.
            need: bounds of the arena, in bytes.
        """
        self._module, self._pager, self._gradients, self._device, self._need = module, pager, gradients, device, need
        self._history = ArenaHistory()
        self._added: tuple[int, ...] = ()
        """Units whose gradients are added up in grown memory."""
        self._buffers: list[Buffers] = []
        """Buffers of each module of the model when the arena grew last: a walk of the modules takes too long."""
        self._seen = shortages(device.torch)
        """Counts of shortages when the arena grew last: only later shortages concern its present size."""
        self._owed: _Reason | None = None
        """Cause for which memory is to be given back as soon as no weights in it are in use."""

    def end_step(self) -> None:
        """Grows the arena into memory that steps leave free, or gives memory back if the step was short of some."""
        self._history = self._history.after_step()
        if self._history.wait == 0:
            self._grow()
        elif self._owed is not None:
            self._give_back(self._owed)
        elif self._history.grown and shortages(self._device.torch) != self._seen:
            self._give_back(_RETRIED)

    def relieve(self) -> None:
        """Gives memory back if an earlier call ran out of memory, or wanted to give memory back and could not.

        No forward or backward may run.
        """
        if self._owed is not None:
            self._give_back(self._owed)
        elif self._history.grown and shortages(self._device.torch).errors != self._seen.errors:
            self._give_back(_FAILED)

    def release(self) -> int:
        """Gives back the bytes by which the arena has grown, and all that torch caches; returns the former."""
        nbytes = self._give_back(_ASKED)
        empty_cache(self._device.torch)
        return nbytes

    def _grow(self) -> None:
        """Grows the arena as far as `next_growth` says."""
        arena, room = self._pager.arena, self._device.room()
        before = arena.nbytes
        nbytes = next_growth(before, self._need, room, self._history)
        added = self._need.added(before + nbytes) if nbytes else ()
        try:
            memory = self._pager.grow_device(nbytes, [each for _, each in added]) if nbytes else []
        # Another process may have allocated the memory since `room()` was read. The engine works without the growth.
        except BudgetError as error:
            logger.info("the device budget stays %s: %s", format_size(before), error)
            nbytes, added, memory = 0, (), []
        self._history = self._history.after_growth(nbytes, room)
        # A growth that failed, and one for which torch emptied its cache, are no shortage of the steps to come.
        self._seen = shortages(self._device.torch)
        if not nbytes:
            return
        self._added = tuple(unit for unit, _ in added)
        self._buffers = buffers_of(self._module)
        self._gradients.add_up_in(dict(zip(self._added, memory, strict=True)))
        logger.info(
            "device memory grows from %s to %s: activations took at most %s so far, and %s are free. "
            '"device_memory" in the "offload" block sets another size',
            format_size(before),
            format_size(before + nbytes),
            format_size(self._history.peak),
            format_size(room.free),
        )

    @uninterrupted
    def _give_back(self, reason: _Reason) -> int:
        """Gives grown memory back to torch, and returns its bytes; 0 if there is none, or if weights in it are in use.

        In the latter case memory is given back later.
        """
        if not self._history.grown:
            return 0
        room, before = self._device.room(), self._pager.arena.nbytes
        memory = self._gradients.stop_adding_up_in(self._added) if self._added else {}
        nbytes = self._pager.shrink_device()
        if not nbytes:
            self._gradients.add_up_in(memory)
            self._owed = reason
            return 0
        del memory  # the last references to the allocation that the pager has given up
        self._history, self._added, self._owed = self._history.after_return(room, reason.short), (), None
        empty_cache(self._device.torch)
        logger.log(
            logging.WARNING if reason.short else logging.INFO,
            "%s: the engine gives back %s of the %s that it used on the device for weights",
            reason.words,
            format_size(nbytes),
            format_size(before),
        )
        return nbytes

    # -- calls of the model -------------------------------------------------------------------------

    def run(self, forward: Callable[[], Any], inputs: Any, alone: bool) -> Any:
        """Returns the result of `forward`, which runs again if device memory ran out and grown memory was given back.

        A forward is repeated only where the repetition changes nothing but the time: neither a buffer of the model nor
        an input was changed, and the random generators are restored first.

        Args:
            forward: runs the model.
            inputs: all that the model is given.
            alone: True if no other rank takes part in this forward.
        """
        before = _State.of(self._buffers, inputs, self._device.torch) if self._history.grown and alone else None
        try:
            return forward()
        except torch.OutOfMemoryError as error:
            if before is None or inside_backward() or not before.holds(self._module, inputs):
                raise
            # Frames of the failed forward hold its activations, and perhaps views of weights in grown memory.
            traceback.clear_frames(error.__traceback__)
            gc.collect()
            if not self._give_back(_REPEATED):
                raise
        before.generators.restore(self._device.torch)
        return forward()

    @contextlib.contextmanager
    def advised(self, backward: bool = False) -> Iterator[None]:
        """Adds advice to an out-of-memory error that torch raises in the context. The error keeps its type.

        Args:
            backward: True if the context is a backward. It is not repeated, because by then it has freed the tensors
                that autograd had saved.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            # Not given back here: the error's frames, and a backward that has not ended, may hold views of weights.
            self._owed = _FAILED if self._history.grown else None
            words = f"{error} {advice(self._pager.arena.nbytes, self._need.least, self._history.grown)}"
            error.args = (f"{words} {_BACKWARD}" if backward else words,)
            raise


@dataclass(frozen=True, kw_only=True)
class _State:
    """The state that a forward could change beside its own outputs, as it was before the forward."""

    generators: GeneratorStates
    tensors: list[tuple[torch.Tensor, int]]
    """Buffers of the model and tensors among the inputs, each with its version."""

    @classmethod
    def of(cls, buffers: Sequence[Buffers], inputs: Any, device: torch.device) -> _State | None:
        """Returns the present state; None if a change of an input or a buffer would not be noticed."""
        tensors = _versions(buffers, inputs)
        return None if tensors is None else cls(generators=GeneratorStates.of(device), tensors=tensors)

    def holds(self, module: nn.Module, inputs: Any) -> bool:
        """Returns True if buffers and inputs are the same tensors, unchanged; random generators may differ."""
        # Of all modules that there are now: one that came since the last growth differs, if it has buffers.
        now = _versions(buffers_of(module), inputs)
        return (
            now is not None
            and len(now) == len(self.tensors)
            and all(a is b and old == new for (a, old), (b, new) in zip(self.tensors, now, strict=True))
        )


def buffers_of(module: nn.Module) -> list[Buffers]:
    """Returns the buffers of each module, by name, as the modules themselves keep them."""
    return [part._buffers for part in module.modules()]


def _versions(modules: Sequence[Buffers], inputs: Any) -> list[tuple[torch.Tensor, int]] | None:
    """Returns all buffers and input tensors, each with the number of its changes in place.

    Returns None if an input has an unknown type, such as a cache of keys and values, or a tensor does not count its
    changes.
    """
    leaves = [leaf for leaf in tree_leaves(inputs) if not isinstance(leaf, _PLAIN)]
    buffers = [each for part in modules if part for each in part.values() if each is not None]
    tensors = [*buffers, *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))]
    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves) or any(each.is_inference() for each in tensors):
        return None
    return [(each, each._version) for each in tensors]


def advice(nbytes: int, least: int, returned: int = 0) -> str:
    """Returns advice for a device on which activations do not fit beside the arena.

    Args:
        nbytes: size of the arena, in bytes.
        least: the smallest size that works, in bytes.
        returned: bytes of the arena that the engine's next call gives back.
    """
    used = f"The engine uses {format_size(nbytes)} of the device for weights"
    pieces = (
        "Free memory in many pieces is joined by PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"
    )
    if returned:
        return (
            f"{used}, and gives back {format_size(returned)} of them with its next call: after zero_grad() the same "
            f"step has that much more memory. {pieces}"
        )
    ways = 'smaller micro-batches, shorter sequences, or "activations": "auto" in the "offload" block leave more room'
    if nbytes > least:
        ways += (
            '; so does a smaller "device_memory" in the "offload" block: the least that works is '
            f"{format_size(least)} ({least} bytes)"
        )
    return f"{used}. Activations, and gradients until they are copied to the host, use the rest: {ways}. {pieces}"
