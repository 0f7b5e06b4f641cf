"""Protocols through which components and features call the engine, and the engine calls features.

The engine imports its components, and no component imports the engine. A component that must call the engine receives
an `EngineCallbacks` in its constructor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from offload.states import State, Tier
from offload.swapper.memory.device import DeviceRoom
from offload.swapper.memory.host_arena import HostArena


class EngineCallbacks(Protocol):
    """The methods of the engine that its components call.

    Components store the object when they are built. They call its methods only after the engine is complete.
    """

    def enter_forward(self) -> None:
        """Checks the engine and writes pending edits. Called before each outermost forward."""

    def enter_weights(self) -> None:
        """Checks the engine. Called before a user reads or edits weights."""

    def begin_backward(self) -> None:
        """Prepares an outermost backward, on its thread. If this call raises, the backward does not start."""

    def end_backward(self) -> None:
        """Counts an outermost backward that has produced a gradient. Called on the thread of the backward."""

    def steps_so_far(self) -> int:
        """Returns the number of optimizer steps of the run, those before a resume included."""

    def is_last_micro_batch(self) -> bool:
        """Returns True if the running backward is known to be the last of its step."""

    def keeps_gradients(self) -> bool:
        """Returns True if the ranks do not add up the gradients of the step under way; see `Rule.keeps_gradients`."""

    def gradients_complete(self, unit: int) -> None:
        """Notes that no further gradient of `unit` is expected in this step. Called on an autograd thread."""

    def gradients_changed(self, unit: int) -> None:
        """Notes that a gradient has changed although its unit was complete. Called on an autograd thread."""

    def await_gradient(self, unit: int) -> None:
        """Waits until the update of `unit` has read its gradient. May be called on an autograd thread."""

    def device_room(self) -> DeviceRoom:
        """Returns the device's memory that is not in use, or that the device budget could give back between calls."""

    def read_stored(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a parameter's weights as ranks store them, on the compute device. All ranks call this."""

    def apply_edits(self, unit: int, edits: Sequence[Edit]) -> None:
        """Writes new values of one unit, in order, before its weights are read again. All ranks call this."""

    def report_missed_gradient(self, name: str) -> None:
        """Explains to the user where gradients are. Called when user code has read `.grad` of the parameter `name`."""

    def give_cache(self) -> None:
        """Gives this engine's cache of weights to another engine of the process.

        Called on the other engine's thread.
        """

    def give_host_memory(self, nbytes: int) -> None:
        """Gives about `nbytes` of the host budget back to the system, as far as clean pages allow it at once."""

    def leave_weights(self) -> None:
        """Gives up the weights that a backward viewed last, unless a graph holds them. Called on an autograd thread."""

    def read_back(self) -> bool:
        """Drops copies of weights, and reads states in memory again, as far as files contain them. Between passes.

        Returns False, and does nothing, with several ranks.
        """

    def pending_unit(self) -> int:
        """Returns the unit whose gradients wait to be reduced, or -1."""

    def serve_gather(self, unit: int) -> None:
        """Takes part in the gather of a unit that another rank needs."""

    def reduction_position(self, unit: int) -> int:
        """Returns the place of a reduction of `unit` now in the order of a step's reductions, as all ranks know it."""

    def serve_reduce(self, unit: int, holders: Sequence[int], complete: bool) -> None:
        """Takes part in the reduction of a unit's gradients. The ranks `holders` contribute to it.

        The sums of the step are `complete` with it.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientStats:
    """Statistics of a step's gradients. They decide the step's clip, and whether the step updates anything."""

    sum_squares: float
    """Sum of squares of all gradients, added in float64 in layout order. It is inf or NaN if any gradient is."""
    present: list[set[int]]
    """For each unit, the indices of the segments that have a gradient."""
    of_one_rank: bool = False
    """True if these are gradients of one rank alone, and not their mean over all replicas."""

    @property
    def norm(self) -> float:
        """The global 2-norm."""
        return math.sqrt(self.sum_squares) if self.sum_squares >= 0 else math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """New values for elements [start, stop) of a unit."""

    start: int
    stop: int
    values: torch.Tensor
    """The new values, of shape (stop - start,), on the CPU.

    fp32 values of a weight become its master. Weights in the mode's weight dtype change only elements whose bits
    differ, and all other elements keep the low bits of their master. Values of other states are fp32.
    """
    state: State = State.WEIGHT


class ActivationPolicy:
    """Decides where the activations of blocks wait between forward and backward. This class leaves them to autograd.

    Only the thread that runs the model calls `install`, `end_step`, `recover` and `close`. The thread of a forward
    calls `keep`, and an autograd thread calls `fetch`.
    """

    moves_inputs = False
    """True if `keep` may take inputs of checkpointed modules off the device."""
    notices: tuple[str, ...] = ()
    """Lines for the user, shown when the engine starts."""

    def install(self, modules: Mapping[str, nn.Module]) -> None:
        """Installs hooks on `modules`, given by name. The hooks run outside of all hooks that are installed so far."""

    def remove(self) -> None:
        """Removes the hooks. Idempotent."""

    def abandon(self) -> None:
        """Cleans up after calls of blocks that a Ctrl-C has ended before their post-hooks."""

    def end_step(self, step: int) -> None:
        """Ends an optimizer step."""

    def keep(self, tensor: torch.Tensor) -> Any:
        """Returns the object that the graph keeps instead of the input `tensor` of a checkpointed module.

        None leaves the input in the graph.
        """
        return None

    def fetch(self, kept: Any) -> torch.Tensor:
        """Returns the input for which `keep` has returned `kept`. The input is on the device."""
        raise AssertionError("no input was kept")

    @property
    def arenas(self) -> list[HostArena]:
        """Host memory that is mapped for inputs."""
        return []

    def bytes_by_tier(self) -> dict[str, dict[str, int]]:
        """Returns for each tier the bytes of moved inputs there: now ("used"), and at most so far ("peak")."""
        return {tier.value: {"used": 0, "peak": 0} for tier in Tier}

    def recover(self) -> None:
        """Frees the memory of inputs that an aborted forward or backward has left."""

    def close(self) -> None:
        """Waits for transfers in flight and frees the memory of inputs. Idempotent."""


class Extension(Protocol):
    """A feature on the modules of the model. Its hooks run outside of the engine's own hooks.

    Extensions are installed last and removed first. All methods are called by the thread that runs the model.
    """

    def abandon(self) -> None:
        """Removes all leftovers of an interrupted call from the model. Every call of the engine begins with this."""
        return  # most features leave nothing

    def check_step(self, step: int, micro_batches: int) -> None:
        """Raises to refuse step number `step`, of `micro_batches` micro-batches, before anything of it is applied.

        The updates of the step before have ended. A caller that goes on drops the gradients first, by `zero_grad`.
        """
        return

    def add_gradients(self, present: Sequence[set[int]]) -> None:
        """Adds gradients to a step.

        `present` contains for each unit the segments that have a gradient on any rank. This call adds its segments.
        """
        return

    def remove(self) -> None:
        """Removes the feature from the model. Idempotent."""
