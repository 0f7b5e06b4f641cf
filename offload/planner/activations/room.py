"""Room for activations beside the budgets of a run, and the longest sequence and largest micro-batch that fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from offload.errors import BudgetError
from offload.planner.activations.budgets import beside_activations, gradients_in_flight
from offload.planner.activations.formulas import Need, need
from offload.planner.activations.kept import Wish, placed
from offload.planner.activations.load import Load
from offload.planner.hardware import Hardware
from offload.planner.memory import Memory
from offload.planner.model_shape import Shape
from offload.sizes import format_size

HOST_SHARE = 0.8
"""Fraction of the host memory beside the host arena that inputs may take, if no budget is set."""
_RESERVE = 4
"""On an accelerator, "auto" leaves a quarter of the device's room to everything but inputs, as the engine does."""
_UNKNOWN = 1 << 62
"""Room on drives whose free space is not known."""
_MOST = 1 << 40
"""Most tokens or sequences that a search tries."""


class Room(NamedTuple):
    """Bytes that activations may take in each tier."""

    device: int
    host: int
    disk: int
    one_memory: bool = False
    """True if device memory is host memory, so that inputs in HOST take the device's room."""
    drives: bool = True

    def has(self, needed: Need) -> bool:
        """Returns True if there is room for `needed` in every tier."""
        on_device = needed.device + (needed.host if self.one_memory else 0)
        return on_device <= self.device and needed.host <= self.host and needed.disk <= self.disk


def for_device(hardware: Hardware, memory: Memory) -> int:
    """Returns the bytes that the GPU may take; of a memory that it shares, those that the host arena leaves."""
    return hardware.gpu_memory - memory.host if hardware.unified else hardware.gpu_memory


def room_of(
    hardware: Hardware, memory: Memory, wish: Wish, shape: Shape, load: Load, layer_major: bool = False
) -> Room:
    """Returns the room for activations beside a run's budgets.

    Args:
        hardware: the machine.
        memory: the placement and the budgets.
        wish: the config's keys on activations.
        shape: the model.
        load: work of a step.
        layer_major: True if gradients are summed on the device, a unit at a time.
    """
    rest = hardware.ram - memory.host
    if hardware.on_cpu:
        device = rest - memory.device - beside_activations(memory, shape, load)
    else:
        device = for_device(hardware, memory) - memory.device - gradients_in_flight(memory, layer_major)
    if memory.config.offload.host_memory is not None and memory.placement.inputs_nbytes is not None:
        host = memory.placement.inputs_nbytes
    else:
        host = max(int(HOST_SHARE * rest), 0) if wish.host is None else min(wish.host, rest)
    # Files of inputs are in the folders that the config names.
    drives = hardware.drives if memory.config.drives else ()
    unknown = any(drive.free is None for drive in drives)
    free = _UNKNOWN if unknown else sum(drive.free or 0 for drive in drives) - memory.stored - memory.spilled
    return Room(device, host, free if drives else 0, hardware.on_cpu or hardware.unified, bool(drives))


def within(shape: Shape, load: Load, wish: Wish, room: Room) -> Load:
    """Returns `load` with the tiers of the blocks' inputs under a wish; more than `room` may be needed."""
    # A copy within one memory frees nothing, so none is made.
    host = 0 if room.one_memory else room.host
    tier = "auto" if wish.tier == "cpu" and room.one_memory else wish.tier
    most = None if room.one_memory else room.device - room.device // _RESERVE
    return placed(shape, load, wish._replace(tier=tier), Need(room.device, host, room.disk), room.drives, most)


def fits(shape: Shape, load: Load, wish: Wish, room: Room) -> bool:
    """Returns True if a micro-batch's activations have room in every tier."""
    return room.has(need(shape, within(shape, load, wish, room)))


def longest_sequence(shape: Shape, load: Load, wish: Wish, room: Room) -> int:
    """Returns the tokens of the longest sequence that fits at the load's micro-batch; 0 if none does."""
    return _most(lambda tokens: fits(shape.at(tokens), load, wish, room))


def largest_batch(shape: Shape, load: Load, wish: Wish, room: Room) -> int:
    """Returns the sequences of the largest micro-batch that fits; 0 if none does."""
    return _most(lambda batch: fits(shape, load._replace(batch=batch), wish, room))


def _most(fitting: Callable[[int], bool]) -> int:
    """Returns the largest number up to `_MOST` for which `fitting` is true, given that it is for all smaller ones."""
    low, high = 0, 1
    while high <= _MOST and fitting(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fitting(middle) else (low, middle)
    return low


def check(shape: Shape, load: Load, wish: Wish, room: Room) -> None:
    """Raises `BudgetError` if the activations have no room beside the budgets.

    Args:
        shape: the model.
        load: work of a step, with the tiers of the blocks' inputs.
        wish: the config's keys on activations.
        room: bytes for activations.
    """
    needed = need(shape, load)
    if room.has(needed):
        return
    if room.disk < 0:
        raise BudgetError(
            f"the swap files take {format_size(-room.disk)} more than is free on the drives; give larger drives or "
            f'more (--drive), or store fewer bytes ("durability": "none", "moments": "int8")'
        )
    if needed.disk > room.disk:
        raise BudgetError(
            f"inputs of {load.on_disk} blocks take {format_size(needed.disk)} of disk, and "
            f"{format_size(room.disk)} is free beside the swap files; give more drives (--drive), lower "
            f"--seq-len, or keep them in host memory (--activations cpu)"
        )
    if needed.host > room.host:
        raise BudgetError(
            f"inputs of {load.on_host} blocks take {format_size(needed.host)} of host memory, and "
            f"{format_size(max(room.host, 0))} is for them; raise activation_memory, lower host_memory or --seq-len, "
            f"or keep them on drives (--activations nvme)"
        )
    raise too_long(shape, load, wish, room)


def too_long(shape: Shape, load: Load, wish: Wish, room: Room) -> BudgetError:
    """Returns the error for activations that exceed the device's room, with the largest micro-batch that fits."""
    most = largest_batch(shape, load, wish, room)
    advice = f"--batch-size {most} fits" if most else "not even one sequence fits: lower --seq-len"
    if not load.recompute:
        advice += ", or recompute them in backward (--gradient-checkpointing)"
    elif not (load.on_host or load.on_disk or room.one_memory):
        advice += ", or keep the inputs of blocks in host memory (--activations cpu)"
    if load.alive > 1:
        advice += ", or keep one micro-batch's at a time (--schedule micro_batch_major)"
    if not load.chunked_loss:
        advice += ", or compute the loss in chunks (--chunked-loss)"
    times = f"{load.alive} x " if load.alive > 1 else ""
    needed, free = format_size(need(shape, load).device), format_size(max(room.device, 0))
    return BudgetError(
        f"activations of {times}{load.batch} x {shape.sequence} tokens take {needed}, and {free} is free beside the "
        f"budgets; {advice}"
    )
