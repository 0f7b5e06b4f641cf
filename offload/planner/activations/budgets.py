"""Activations beside the budgets: peaks of device and host memory of a planned step."""

from __future__ import annotations

from offload.layout.placement import LIBRARIES, beside_arenas
from offload.planner.activations.formulas import head_copy, need
from offload.planner.activations.load import Load
from offload.planner.hardware import Hardware
from offload.planner.memory import Memory
from offload.planner.model_shape import Shape
from offload.states import State, Tier


def activations(shape: Shape, load: Load) -> int:
    """Returns the bytes of activations on the device."""
    return need(shape, load).device


def beside_weights(memory: Memory, shape: Shape, load: Load) -> int:
    """Returns the bytes of GPU memory for activations, and for gradients that wait for their copy to the host."""
    return activations(shape, load) + gradients_in_flight(memory, load.alive > 1)


def gradients_in_flight(memory: Memory, layer_major: bool) -> int:
    """Returns the bytes of gradients on a GPU that wait for their copy to the host.

    A micro-batch's gradient of one unit, and in a layer-major step two sums: one that is added to, one that leaves.
    """
    # Gradients whose tier is DEVICE stay in the arena, which is counted already.
    copies_out = any(tiers.get(State.GRAD, Tier.DEVICE) is not Tier.DEVICE for tiers in memory.placement.tiers)
    sums = 2 * max((nbytes.get(State.GRAD, 0) for nbytes in memory.parts.nbytes), default=0) if layer_major else 0
    return memory.parts.largest_gradient + sums if copies_out else 0


def host_peak(memory: Memory, shape: Shape, hardware: Hardware, load: Load) -> int:
    """Returns the peak bytes of RAM beyond those in use before the run.

    On a GPU these are the bytes of the host arena and of inputs in HOST. If the CPU computes, they also include the
    device arena and activations. The host arena then counts only touched pages: no tiles if states are updated in
    place. torch also allocates a gradient, a copy of a layer's weights in the layout that its products use, and a
    second gradient if weights are tied.
    """
    needed = need(shape, load)
    if not hardware.on_cpu:
        # The arena is pinned at the start, which touches all of its pages.
        return memory.host + needed.host
    touched = memory.host - (0 if memory.slots or memory.spilled else memory.placement.classes.tiles)
    return touched + memory.device + needed.device + needed.host + beside_activations(memory, shape, load)


def beside_activations(memory: Memory, shape: Shape, load: Load) -> int:
    """Returns the bytes of RAM that torch allocates in a backward on the CPU beside both arenas and activations."""
    parts, units = memory.parts, [use.unit for use in shape.uses]
    # A unit that is used twice has tied weights.
    gradients = 2 if len(set(units)) < len(units) else 1
    head = memory.layouts[units[-1]].numel if units else 0
    # A loss in chunks holds the head's gradient twice while it scales it, which is among the activations, and a copy of
    # the head's weights before that. The rest of the backward takes no more if the head is the largest unit.
    if load.chunked_loss and head == max(layout.numel for layout in memory.layouts):
        return LIBRARIES + head_copy(shape, load)
    return beside_arenas(parts, gradients)
