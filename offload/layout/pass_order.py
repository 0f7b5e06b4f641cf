"""The order of a step's micro-batches through the model, decided from plain values.

micro-batch-major   one micro-batch after the other: forward and backward of the first, then of the second
layer-major         all micro-batches pass through a block before the next block is fetched, forward and backward

Layer-major fetches the weights of a block twice a step, for any number of micro-batches, and sends each gradient once.
It keeps the activations that the backward needs, for all micro-batches. `initialize` and the planner call the same
function, so a run follows the plan. Before its first step a run does not know its activations: where that decides, the
run calls the function again after the step.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from offload.sizes import format_size

Schedule = Literal["layer_major", "micro_batch_major"]
LAYER_MAJOR: Schedule = "layer_major"
MICRO_BATCH_MAJOR: Schedule = "micro_batch_major"
SCHEDULES = ("auto", LAYER_MAJOR, MICRO_BATCH_MAJOR)
"""Values of the key "schedule"."""

_LEAST_BLOCKS = 2
"""Least number of blocks where the order of micro-batches and blocks makes a difference."""
_TIED_SHARE = 2
"""Gradients of tied weights may take the free memory divided by this number; activations need the rest."""


class ScheduleChoice(NamedTuple):
    """A schedule, and why it was chosen."""

    schedule: Schedule
    reason: str
    """A clause for a message, without a full stop."""
    after_a_step: bool = False
    """True if the first step, one micro-batch after the other, must show that the activations of all of them fit."""

    @property
    def in_turns(self) -> bool:
        """Returns True if micro-batches take turns from the first step on, in a loop that runs them by one call."""
        return self.schedule == LAYER_MAJOR and not self.after_a_step


def makes_early_updates(speculate: object, on_cpu: bool) -> bool:
    """Returns whether a run tries updates under the backward.

    On a CPU the kernels of updates take cores from the backward, so "auto" does not try. With a GPU these cores are
    idle.
    """
    return speculate is True or (speculate == "auto" and not on_cpu)


def takes_turns(asked: str, micro_batches: int, blocks: int) -> bool:
    """Returns True if the user asks by name for the layer-major order, and the model has one.

    Such a run completes the sums of gradients on the device. "auto" may run in either order, unless it is known that
    one call runs all micro-batches of a step: the user's loop, or the first step, decides. The arguments are those of
    `choose_schedule`.
    """
    return asked == LAYER_MAJOR and micro_batches > 1 and blocks >= _LEAST_BLOCKS


def choose_schedule(
    *,
    asked: str,
    micro_batches: int,
    blocks: int,
    moves: bool,
    sends: bool,
    checkpointed: bool,
    activation_nbytes: int | None,
    free_nbytes: int | None,
    tied_nbytes: int = 0,
    learns: bool = False,
    tied_pieces: bool = False,
) -> ScheduleChoice:
    """Returns the schedule of a run.

    An explicit "layer-major" is used if the model allows it, even if the activations may not fit. "auto" takes
    layer-major only where it saves a transfer and is known to fit. Where all weights stay on the device, no weight can
    make room for activations, so their bytes must be known.

    Args:
        blocks: number of repeated blocks that form a chain, where each block's output is the next one's input; 0
            without a chain.
        moves: True if the weights of any unit come to the device and leave it during a step.
        sends: True if the gradients of any unit leave the device, for memory that is not the device's own.
        checkpointed: True if the backward recomputes every block, so that a block keeps only its input; where all
            weights stay on the device, only if this input can leave it.
        activation_nbytes: bytes on the device for the activations of all micro-batches of a step; None if unknown.
        free_nbytes: bytes of the device that activations may take; None if unknown.
        tied_nbytes: bytes of the device for gradients of weights that two modules share. Autograd keeps a tied head's
            gradient for each micro-batch until its embedding has a gradient too. Used only if `activation_nbytes` is
            unknown.
        learns: True if a step can show the bytes of the activations.
        tied_pieces: True if a table in pieces has several uses. Each adds its gradient by itself, for all micro-batches
            in layer-major order before the next use: the sum would have other bits.
    """
    assert asked in SCHEDULES, asked  # the config and the command line check what a user wrote
    if asked == MICRO_BATCH_MAJOR:
        return ScheduleChoice(MICRO_BATCH_MAJOR, "the config asks for it")
    if micro_batches < 2:
        return ScheduleChoice(MICRO_BATCH_MAJOR, "a step has one micro-batch, so both orders are the same")
    if blocks < _LEAST_BLOCKS:
        return ScheduleChoice(MICRO_BATCH_MAJOR, "the model is no chain of repeated blocks")
    if tied_pieces:
        return ScheduleChoice(MICRO_BATCH_MAJOR, "both uses of a tied table in pieces add up their gradients")
    if asked == LAYER_MAJOR:
        return ScheduleChoice(LAYER_MAJOR, "the config asks for it")
    if not moves and not sends:
        return ScheduleChoice(
            MICRO_BATCH_MAJOR, "all weights and gradients stay on the device, so no transfer would be saved"
        )
    saved = "gradients leave the device once a step instead of with each micro-batch"
    if moves:
        saved = f"each weight is fetched twice a step instead of {2 * micro_batches} times"
    if activation_nbytes is not None and free_nbytes is not None:
        if activation_nbytes > free_nbytes:
            return ScheduleChoice(
                MICRO_BATCH_MAJOR,
                f"activations of {micro_batches} micro-batches take {format_size(activation_nbytes)}, and "
                f"{format_size(max(free_nbytes, 0))} is free",
            )
    elif free_nbytes is not None and _TIED_SHARE * tied_nbytes > free_nbytes:
        return ScheduleChoice(
            MICRO_BATCH_MAJOR,
            f"gradients of tied weights of {micro_batches} micro-batches take {format_size(tied_nbytes)}, of "
            f"{format_size(max(free_nbytes, 0))} that is free",
        )
    elif not checkpointed and not moves and learns:
        return ScheduleChoice(LAYER_MAJOR, saved, after_a_step=True)
    elif not checkpointed:
        return ScheduleChoice(
            MICRO_BATCH_MAJOR, f"it is unknown whether the activations of {micro_batches} micro-batches fit"
        )
    return ScheduleChoice(LAYER_MAJOR, saved)


# -- transfers -----------------------------------------------------------------------------------------


class Transfers(NamedTuple):
    """Bytes that a step moves."""

    uploaded: int
    """Weights copied to the device."""
    downloaded: int
    """Gradients copied from it."""
    read: int
    """Weights read from drives for a use. Updates of states on drives move the same bytes in each order."""

    def seconds(self, upload: float, download: float, read: float) -> float:
        """Returns the least seconds at these rates, in bytes a second: the three links move at once."""
        return max(self.uploaded / upload, self.downloaded / download, self.read / read)


def transfers(
    schedule: Schedule,
    micro_batches: int,
    *,
    weights: int,
    kept: int,
    on_disk: int,
    cached: int,
    gradient: int,
    total: int,
    added: int,
) -> Transfers:
    """Returns the transfers of a step in an order.

    An update leaves every weight in host memory, so the first pass of a step uploads all of them and reads none. In
    each further pass the units that were used last are there already, as many as have room.

    Args:
        weights: bytes of the weights that move.
        kept: bytes of the device for them.
        on_disk: bytes of those weights whose tier is DISK.
        cached: bytes of host memory for them.
        gradient: bytes of the gradients that leave the device, as a micro-batch gives them.
        total: bytes of their sums over the micro-batches.
        added: bytes of the sums that the device forms in either order.
    """
    layered = schedule == LAYER_MAJOR
    again = (2 if layered else 2 * micro_batches) - 1
    of_one = gradient * (total - added) // max(total, 1)
    return Transfers(
        uploaded=weights + again * max(weights - kept, 0),
        downloaded=total if layered else added + micro_batches * of_one,
        read=again * max(on_disk - cached, 0),
    )
