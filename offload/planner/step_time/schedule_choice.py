"""The schedule of a planned run, by the function that a run decides by."""

from __future__ import annotations

from offload.layout.pass_order import LAYER_MAJOR, Choice, choose_schedule
from offload.planner.activations.formulas import Need, need
from offload.planner.activations.kept import Wish
from offload.planner.activations.load import Load
from offload.planner.activations.room import Room, room_of, within
from offload.planner.hardware import Hardware
from offload.planner.memory import Memory
from offload.planner.model_shape import Shape
from offload.planner.step_time.step_order import chain
from offload.states import State, Tier


def choice_of(shape: Shape, hardware: Hardware, load: Load, memory: Memory, wish: Wish) -> Choice:
    """Returns the schedule of a step.

    Args:
        shape: the model.
        hardware: the machine.
        load: work of a step, with the schedule that was asked for.
        memory: the placement and the budgets before the first step.
        wish: the config's keys on activations.
    """
    room = room_of(hardware, memory, wish, shape, load, layer_major=True)
    tried = within(shape, load._replace(schedule=LAYER_MAJOR), wish, room)
    needed, free = _scarcest(need(shape, tried), room)
    return choose_schedule(
        asked=load.schedule,
        micro_batches=load.accumulation,
        blocks=chain(shape),
        moves=any(tiers[State.WEIGHT] is not Tier.DEVICE for tiers in memory.placement.tiers),
        checkpointed=tried.recompute,
        activation_nbytes=needed,
        free_nbytes=free,
    )


def _scarcest(needed: Need, room: Room) -> tuple[int, int]:
    """Returns needed and free bytes of the tier that lacks most; of the device if none lacks any."""
    on_device = needed.device + (needed.host if room.one_memory else 0)
    tiers = ((on_device, room.device), (needed.host, room.host), (needed.disk, room.disk))
    return max(tiers, key=lambda tier: max(tier[0] - tier[1], 0))
