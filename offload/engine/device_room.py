"""The device's memory beside the arena, which activations take: what to say when it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from offload.sizes import format_size
from offload.swapper.arena import DeviceArena


@contextlib.contextmanager
def advised(arena: DeviceArena, least: int) -> Iterator[None]:
    """torch's error of a device that is full says in here what to change as well; it stays torch's own.

    `least` are the bytes of the smallest arena that works.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.args = (f"{error} {advice(arena.nbytes, least)}",)
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
