"""Growth of the device arena after the first step, and advice when the device is out of memory.

first step ─► torch's allocator holds what activations took ─► the arena grows into what they have left free:
              memory for all units, and beyond that for gradients that accumulate on the device
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch

from offload.errors import BudgetError
from offload.layout.device_need import DeviceNeed, growth
from offload.sizes import format_size
from offload.swapper.memory.device import Device
from offload.swapper.memory.device_arena import DeviceArena
from offload.swapper.pager import Pager

logger = logging.getLogger("offload")


def grow(pager: Pager, need: DeviceNeed, device: Device) -> dict[int, torch.Tensor]:
    """Grows the device arena into memory that the first step has left free. Must be called between steps.

    Args:
        pager: owner of the device arena.
        need: bounds of the arena, in bytes.
        device: the compute device.

    Returns:
        Memory for gradient totals by unit, (nbytes,) uint8 each, owned by the arena; empty if the arena does not grow.
    """
    before, room = pager.arena.nbytes, device.room()
    nbytes = growth(before, need, room)
    if not nbytes:
        return {}
    added = need.added(before + nbytes)
    try:
        memory = pager.grow_device(nbytes, [each for _, each in added])
    # Another process may have allocated the memory since `room()` was read. The engine works without the growth.
    except BudgetError as error:
        logger.info("the device budget stays %s: %s", format_size(before), error)
        return {}
    logger.info(
        "device memory grows from %s to %s: the activations of the first step took at most %s and left %s free. "
        '"device_memory" in the "offload" block sets another size',
        format_size(before),
        format_size(before + nbytes),
        format_size(room.kept),
        format_size(room.free),
    )
    return {unit: each for (unit, _), each in zip(added, memory, strict=True)}


@contextlib.contextmanager
def advised(arena: DeviceArena, need: DeviceNeed) -> Iterator[None]:
    """Adds advice to the message of an out-of-memory error that torch raises in the context. The error keeps its type.

    Args:
        arena: the device arena, whose size the advice contains.
        need: bounds of the arena; `need.least` is the smallest size that works.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.args = (f"{error} {advice(arena.nbytes, need.least)}",)
        raise


def advice(nbytes: int, least: int) -> str:
    """Returns advice for a device on which activations do not fit beside the arena.

    Args:
        nbytes: size of the arena, in bytes.
        least: the smallest size that works, in bytes.
    """
    ways = "smaller micro-batches, shorter sequences, or model.gradient_checkpointing_enable() leave more room"
    if nbytes > least:
        ways += (
            '; so does a smaller "device_memory" in the "offload" block: the least that works is '
            f"{format_size(least)} ({least} bytes)"
        )
    return (
        f"The engine uses {format_size(nbytes)} of the device for weights. Activations, and gradients until they are "
        f"copied to the host, use the rest: {ways}"
    )
