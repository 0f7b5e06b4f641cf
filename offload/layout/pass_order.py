"""The order of a step's micro-batches through the model, decided from plain values.

micro-batch-major   one micro-batch after the other: forward and backward of the first, then of the second
layer-major         all micro-batches pass through a block before the next block is fetched, forward and backward

Layer-major fetches the weights of a block twice a step, for any number of micro-batches. It keeps the activations that
the backward needs, for all micro-batches. `initialize` and the planner call the same function, so a run follows the
plan.
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


def makes_early_updates(speculate: object, on_cpu: bool) -> bool:
    """Returns whether a run tries updates under the backward.

    On a CPU the kernels of updates take cores from the backward, so "auto" does not try. With a GPU these cores are
    idle.
    """
    return speculate is True or (speculate == "auto" and not on_cpu)


def may_take_turns(asked: str, micro_batches: int, blocks: int) -> bool:
    """Returns True if micro-batches may pass through the model in layer-major order, as far as memory allows it.

    The arguments are those of `choose_schedule`.
    """
    return asked != MICRO_BATCH_MAJOR and micro_batches > 1 and blocks >= _LEAST_BLOCKS


def choose_schedule(
    *,
    asked: str,
    micro_batches: int,
    blocks: int,
    moves: bool,
    checkpointed: bool,
    activation_nbytes: int | None,
    free_nbytes: int | None,
    tied_nbytes: int = 0,
) -> ScheduleChoice:
    """Returns the schedule of a run.

    An explicit "layer-major" is used if the model allows it, even if the activations may not fit. "auto" takes
    layer-major only where it saves a transfer and is known to fit.

    Args:
        blocks: number of repeated blocks that form a chain, where each block's output is the next one's input; 0
            without a chain.
        moves: True if the weights of any unit come to the device and leave it during a step.
        checkpointed: True if the backward recomputes every block, so that a block keeps only its input.
        activation_nbytes: bytes on the device for the activations of all micro-batches of a step; None if unknown.
        free_nbytes: bytes of the device that activations may take; None if unknown.
        tied_nbytes: bytes of the device for gradients of weights that two modules share. Autograd keeps a tied head's
            gradient for each micro-batch until its embedding has a gradient too. Used only if `activation_nbytes` is
            unknown.
    """
    assert asked in SCHEDULES, asked  # the config and the command line check what a user wrote
    if asked == MICRO_BATCH_MAJOR:
        return ScheduleChoice(MICRO_BATCH_MAJOR, "the config asks for it")
    if micro_batches < 2:
        return ScheduleChoice(MICRO_BATCH_MAJOR, "a step has one micro-batch, so both orders are the same")
    if blocks < _LEAST_BLOCKS:
        return ScheduleChoice(MICRO_BATCH_MAJOR, "the model is no chain of repeated blocks")
    if asked == LAYER_MAJOR:
        return ScheduleChoice(LAYER_MAJOR, "the config asks for it")
    if not moves:
        return ScheduleChoice(MICRO_BATCH_MAJOR, "all weights stay on the device, so no transfer would be saved")
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
    elif not checkpointed:
        return ScheduleChoice(
            MICRO_BATCH_MAJOR,
            f"blocks keep all activations, and it is unknown whether those of {micro_batches} micro-batches fit",
        )
    return ScheduleChoice(LAYER_MAJOR, f"each weight is fetched twice a step instead of {2 * micro_batches} times")
