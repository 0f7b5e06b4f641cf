"""The uses of a step in their order, with their seconds of compute: the input of `simulate` and of the lower bound.

micro-batch-major   forward and backward of each micro-batch
layer-major         forward     each block for all micro-batches; what stands before the blocks counts as one more
                    loss        what follows the blocks, forward and at once backward, for one micro-batch at a time
                    backward    each block for all micro-batches, the last block first

In layer-major the gradients of a unit are summed on the device, and leave once, with the unit's last micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from offload.layout.pass_order import LAYER_MAJOR
from offload.planner.activations.load import Load
from offload.planner.hardware import Hardware
from offload.planner.memory import Memory
from offload.planner.model_shape import Shape
from offload.planner.simulation.kept_inputs import Input
from offload.planner.simulation.simulate import Expected, Use
from offload.planner.step_time.passes import NO_SUMS, Pass, Sums, backward_seconds, completing
from offload.states import State


def step_of(
    shape: Shape, firsts: Sequence[Sequence[Pass]], memory: Memory, hardware: Hardware, load: Load
) -> tuple[list[Use], ...]:
    """Returns the uses of a step in passes: those up to the end of the first forward, then those of each other pass.

    A pass uses each unit at least once for every time that its weights have to come: in layer-major there are two, the
    forward with the first micro-batch's head, and the rest.

    Args:
        shape: the model, as one of the micro-batches uses it.
        firsts: uses of each micro-batch's forward. They may be of other experts, as many of each layer.
        memory: the placement.
        hardware: the machine.
        load: work of a step, with its schedule.
    """
    if load.schedule == LAYER_MAJOR:
        return _with_the_rest(*_layer_major(shape, firsts, memory, hardware, load))
    numels, totals = memory.parts.trainable_numel, dict(memory.placement.added)
    made: dict[tuple[int, bool], tuple[list[Use], list[Use]]] = {}
    found: list[list[Use]] = []
    for number, first in enumerate(firsts, 1):
        key = (id(first), last := number == len(firsts))
        if key not in made:  # micro-batches without experts are one object
            back = backward(first, numels, hardware, load.recompute, Sums(totals, leave=last), completes=last)
            made[key] = [_forward(each) for each in first], back
        found += made[key]
    return _with_the_rest(*found)


def _with_the_rest(*passes: list[Use]) -> tuple[list[Use], ...]:
    """Returns the passes of a step; units that its last micro-batch does not use are complete at the step's end."""
    every, named = set[int](), set[int]()
    for use in (use for one in passes for use in one):
        every.add(use.unit)
        named.update(use.completes)
    last = passes[-1][-1]
    passes[-1][-1] = last._replace(completes=(*last.completes, *sorted(every - named)))
    return passes


def backward(
    first: Sequence[Pass],
    parts_numel: Sequence[int],
    hardware: Hardware,
    recompute: bool,
    sums: Sums = NO_SUMS,
    completes: bool = True,
) -> list[Use]:
    """Returns the uses of a micro-batch's backward.

    Args:
        first: uses of the micro-batch's forward.
        parts_numel: trainable elements of this rank's partition, per unit.
        hardware: the machine.
        recompute: True if the backward computes the forward again.
        sums: gradients that accumulate on the device.
        completes: True if the micro-batch is the last one of a step.
    """
    found: list[Use] = []
    ends = completing(first)
    for position in reversed(range(len(first))):
        each = first[position]
        ended = ends[each.unit] == position
        seconds = backward_seconds(each, ended, parts_numel, hardware, recompute, sums)
        _append(found, each, seconds, (each.unit,) if completes and ended else ())
    return found


def segments(shape: Shape) -> list[range]:
    """Returns the uses of a forward in groups: each repeated block, and each run of uses between blocks."""
    found: list[range] = []
    position = 0
    for block in shape.blocks:
        if block.uses.start > position:
            found.append(range(position, block.uses.start))
        found.append(block.uses)
        position = block.uses.stop
    return [*found, range(position, len(shape.uses))]


def chain(shape: Shape) -> int:
    """Returns the number of repeated blocks if each is the input of the next, else 0."""
    blocks = shape.blocks
    follows = all(before.uses.stop == after.uses.start for before, after in pairwise(blocks))
    return len(blocks) if follows else 0


def _layer_major(
    shape: Shape, firsts: Sequence[Sequence[Pass]], memory: Memory, hardware: Hardware, load: Load
) -> tuple[list[Use], ...]:
    """Returns the two passes of a layer-major step."""
    *body, tail = segments(shape)
    numels, ends = memory.parts.trainable_numel, [completing(first) for first in firsts]
    totals = {unit: nbytes.get(State.GRAD, 0) for unit, nbytes in enumerate(memory.parts.nbytes)}
    count = load.accumulation

    def back(into: list[Use], positions: Iterable[int], number: int) -> None:
        first, last = firsts[number], number == count - 1
        for position in positions:
            each, sums = first[position], Sums(totals if count > 1 else {}, leave=last)
            ended = ends[number][each.unit] == position
            seconds = backward_seconds(each, ended, numels, hardware, load.recompute, sums)
            _append(into, each, seconds, (each.unit,) if last and ended else ())

    opening = [_forward(first[position]) for segment in body for first in firsts for position in segment]
    rest: list[Use] = []
    for number in range(count):
        # The first head belongs to the first pass: the updates of its units have to end before it, too.
        (rest if number else opening).extend(_forward(firsts[number][position]) for position in tail)
        back(rest, reversed(tail), number)
    for segment in reversed(body):
        for number in range(count):
            back(rest, reversed(segment), number)
    return opening, rest


def _forward(each: Pass) -> Use:
    """Returns a use of a forward."""
    return Use(each.unit, each.seconds, sends=Input(*each.sends), expects=Expected(*each.choice))


def _append(found: list[Use], each: Pass, seconds: float, completes: tuple[int, ...]) -> None:
    """Appends a use of a backward. That of an embedding fetches no weights, so it is part of the use before."""
    if each.lookup and found:
        before = found[-1]
        found[-1] = before._replace(seconds=before.seconds + seconds, completes=(*before.completes, *completes))
    else:
        found.append(Use(each.unit, seconds, receives=Input(*each.receives), completes=completes))
