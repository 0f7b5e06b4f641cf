"""Uses of units in one forward and one backward of a micro-batch, with their seconds of compute.

compute of a use     flops / matmul + bytes of weights / weights + bytes / elementwise, once more if recomputed,
                     + `handed_seconds` if the CPU computes; on a GPU at least `handed_seconds`, since the host
                     prepares a use while the GPU computes the one before
backward of a use    the products once for the gradient of the input, and once more for that of trainable weights,
                     + 2 * bytes / elementwise
of a tiled MLP       its products once more, and sums of its gradients for each tile; a loss in chunks has sums alone
of an embedding      bytes of its gradient / fresh, and the same for each other use of the unit, to sum the gradients
gradient of a unit   copied beside the backward's compute on a GPU, after the compute on a CPU
accumulated          (2 * bytes of the total + bytes of the gradient) / elementwise; the last micro-batch copies the
                     total to the host

Only repeated blocks are recomputed, not the head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from offload.planner.activations.formulas import Moving, moving, recomputed
from offload.planner.activations.load import Load
from offload.planner.activations.seconds import of_chunks, of_tiles
from offload.planner.hardware import Hardware
from offload.planner.model_shape import Choice, Shape


class Pass(NamedTuple):
    """A use of a unit and its seconds of compute."""

    unit: int
    seconds: float
    backward: float = 0.0
    """Seconds of the backward, for a use in a forward."""
    lookup: bool = False
    block: bool = False
    """True for a use in a block that is computed again if there is recomputation."""
    sends: Moving = Moving()
    """Input of the block before, which leaves the device in the forward meanwhile."""
    receives: Moving = Moving()
    """Input of the use's block, which has to be on the device before the backward of the use."""
    choice: Choice = Choice()
    """The router's choice of experts before the use."""


def forward(shape: Shape, hardware: Hardware, load: Load, stay: Collection[int] = ()) -> list[Pass]:
    """Returns the uses of one micro-batch's forward, in order; units in `stay` never leave the device."""
    found, times = [], Counter(use.unit for use in shape.uses)
    blocks = recomputed(shape, load._replace(recompute=True))
    batch, inside = load.batch, {position for block in blocks for position in block.uses}
    for position, use in enumerate(shape.uses):
        layout = shape.layouts[use.unit]
        learning, nbytes = layout.trainable_stop / layout.used_numel, hardware.itemsize * layout.used_numel
        # The time to read weights is paid once per use, for any batch.
        products = batch * use.flops / hardware.matmul + (nbytes / hardware.weights if use.flops else 0.0)
        other = batch * use.nbytes / hardware.elementwise
        # A tied embedding receives a gradient from each of its uses, and all of them are summed.
        made = times[use.unit] * learning * nbytes / hardware.fresh if use.lookup else 0.0
        # One product for the gradient of the input, one for that of the weights if these train.
        back = (1 + learning) * products + 2 * other + made + of_tiles(shape, use, load, hardware)
        if position == len(shape.uses) - 1:
            back += of_chunks(shape, load, hardware)
        handed = hardware.handed(use.unit in stay)
        seconds, back = (_with_host(each, handed, hardware.on_cpu) for each in (products + other, back))
        found.append(Pass(use.unit, seconds, back, use.lookup, position in inside, choice=use.choice))
    return _with_inputs(found, shape, load)


def _with_inputs(passes: list[Pass], shape: Shape, load: Load) -> list[Pass]:
    """Returns the uses of a forward with the inputs of blocks that they send and receive."""
    blocks, moves = shape.blocks, moving(shape, load)
    for block, after, each in zip(blocks, blocks[1:], moves, strict=False):
        # An input leaves once the next one has come. In the backward the last use of a block is its first one.
        passes[after.uses[0]] = passes[after.uses[0]]._replace(sends=each)
        passes[block.uses[-1]] = passes[block.uses[-1]]._replace(receives=each)
    return passes


def _with_host(seconds: float, handed: float, on_cpu: bool) -> float:
    """Returns a use's seconds with the host's `handed`: after the compute on a CPU, beside it on a GPU."""
    return seconds + handed if on_cpu else max(seconds, handed)


class Sums(NamedTuple):
    """Gradients that accumulate on the device over the micro-batches of a step, as one micro-batch treats them."""

    nbytes: Mapping[int, int] = {}
    """Bytes of each total, by unit. Gradients of other units leave the device in every micro-batch."""
    leave: bool = True
    """True if the totals are copied to the host in this micro-batch, the last one."""


NO_SUMS = Sums()
"""Every gradient leaves the device in its micro-batch."""


def backward_seconds(
    each: Pass,
    completes: bool,
    parts_numel: Sequence[int],
    hardware: Hardware,
    recompute: bool,
    sums: Sums = NO_SUMS,
) -> float:
    """Returns the seconds of the backward of one use, with what its unit's gradient takes.

    A gradient is complete with the last use of its unit in the backward, which is the first one in the forward.

    Args:
        each: the use, in the forward.
        completes: True if the unit's gradient of the micro-batch is complete then; see `completing`.
        parts_numel: trainable elements of this rank's partition, per unit.
        hardware: the machine.
        recompute: True if the backward computes the forward again.
        sums: gradients that accumulate on the device.
    """
    seconds = each.backward + (each.seconds if recompute and each.block else 0.0)
    if not completes:
        return seconds
    numel = parts_numel[each.unit]
    if each.unit not in sums.nbytes:
        return _with_gradient(seconds, numel, hardware)
    nbytes = sums.nbytes[each.unit]
    seconds += (2 * nbytes + hardware.itemsize * numel) / hardware.elementwise
    if not sums.leave:
        return seconds
    return seconds + numel / hardware.gradient if hardware.on_cpu else max(seconds, nbytes / hardware.download)


def completing(first: Sequence[Pass]) -> dict[int, int]:
    """Returns for each unit the position of the use whose backward completes the unit's gradient of a micro-batch."""
    return {each.unit: position for position, each in reversed(list(enumerate(first)))}


def _with_gradient(seconds: float, numel: int, hardware: Hardware) -> float:
    """Returns the seconds of a backward with the copy of its gradient: after compute on a CPU, beside it on a GPU."""
    kept = numel / hardware.gradient
    return seconds + kept if hardware.on_cpu else max(seconds, kept, hardware.itemsize * numel / hardware.download)
