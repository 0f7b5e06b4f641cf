"""The device's memory beside the arena, which activations take: what they leave free, and what to say when it ends.

first step ─► what torch keeps now is what activations took ─► the arena grows into what they have left free:
              room for all units, and beyond that for gradients that are added up there
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
    """Let the arena take what the first step has left free. Between steps.

    Returns memory for totals of gradients, (nbytes,) uint8 each, by unit.
    """
    before, room = pager.arena.nbytes, device.room()
    nbytes = growth(before, need, room)
    if not nbytes:
        return {}
    added = need.added(before + nbytes)
    try:
        memory = pager.grow_device(nbytes, [each for _, each in added])
    except BudgetError as error:  # somebody else was faster
        logger.info("the device budget stays %s: %s", format_size(before), error)
        return {}
    logger.info(
        "device memory grows from %s to %s: beside the activations of the first step, which took %s at most, %s were "
        'free. "device_memory" in the "offload" block sets another size',
        format_size(before),
        format_size(before + nbytes),
        format_size(room.kept),
        format_size(room.free),
    )
    return {unit: each for (unit, _), each in zip(added, memory, strict=True)}


@contextlib.contextmanager
def advised(arena: DeviceArena, need: DeviceNeed) -> Iterator[None]:
    """torch's error of a device that is full says in here what to change as well; it stays torch's own."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.args = (f"{error} {advice(arena.nbytes, need.least)}",)
        raise


def advice(nbytes: int, least: int) -> str:
    """What to change where activations have no room beside an arena of `nbytes`."""
    ways = "smaller micro-batches, shorter sequences, or model.gradient_checkpointing_enable() give them room"
    if nbytes > least:
        ways += (
            f'; so does a smaller "device_memory" in the "offload" block: the least that works is '
            f"{format_size(least)} ({least} bytes)"
        )
    return (
        f"The engine has {format_size(nbytes)} of the device for weights; activations, and gradients until they are "
        f"copied to the host, have the rest: {ways}"
    )
