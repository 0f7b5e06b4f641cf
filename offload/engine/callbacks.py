"""The calls that the components of an engine make to the engine that owns them.

Imports go one way: the engine imports its components, and no component imports the engine. A component that must reach
up calls this protocol, which it receives through its constructor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from offload.states import State, Tier
from offload.swapper.memory.host_arena import HostArena


class EngineCallbacks(Protocol):
    """The engine as its components see it.

    Components store the object when they are built and call it only after the engine is complete.
    """

    def enter_forward(self) -> None:
        """Checks the engine and writes pending edits. Called before each outermost forward."""

    def enter_weights(self) -> None:
        """Checks the engine. Called before a user reads or edits weights."""

    def begin_backward(self) -> None:
        """Prepares an outermost backward. Called on its thread; if it raises, the backward has not started."""

    def end_backward(self) -> None:
        """Counts an outermost backward that has produced a gradient. Called on its thread."""

    def is_last_micro_batch(self) -> bool:
        """Returns True if the running backward is known to be the last of its step."""

    def gradients_complete(self, unit: int) -> None:
        """Notes that no further gradient of `unit` is expected in this step. Autograd's threads call this."""

    def gradients_changed(self, unit: int) -> None:
        """Notes that the gradient of a complete unit has changed after all. Autograd's threads call this."""

    def await_updates(self) -> None:
        """Waits until every scheduled update has read its gradient. Autograd's threads call this too."""

    def read_stored(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a parameter's weights as ranks store them, on the compute device. All ranks call this."""

    def apply_edits(self, unit: int, edits: Sequence[Edit]) -> None:
        """Writes new values of one unit, in order, before its weights are read again. All ranks call this."""

    def report_missed_gradient(self, name: str) -> None:
        """Tells the user where gradients are, after user code has read `.grad` of the parameter `name`."""

    def give_cache(self) -> None:
        """Gives this engine's cache of weights to another engine of the process, whose thread calls this method."""

    def pending_unit(self) -> int:
        """Returns the unit whose gradients wait to be reduced, or -1."""

    def serve_gather(self, unit: int) -> None:
        """Takes part in the gather of a unit that another rank needs."""

    def serve_reduce(self, unit: int, holders: Sequence[int]) -> None:
        """Takes part in the reduction of a unit's gradients. The ranks `holders` contribute to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientStats:
    """Statistics of a step's gradients. They decide the step's clip, and whether the step updates anything."""

    sum_squares: float
    """Sum of squares of all gradients, added in float64 in layout order; inf or NaN if any value is."""
    present: list[set[int]]
    """For each unit the segments that have a gradient."""

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
    """(stop - start,) on the CPU.

    Weights: fp32 values become the master. Values in the mode's weight dtype change only elements whose bits differ;
    the others keep the low bits of their master. Other states: fp32.
    """
    state: State = State.WEIGHT


class ActivationPolicy:
    """The treatment of blocks' activations between forward and backward. This class leaves them to autograd.

    `install`, `end_step`, `recover` and `close` belong to the thread that runs the model. A forward's thread calls
    `keep`, autograd's threads call `fetch`.
    """

    moves_inputs = False
    """True if `keep` may take inputs of checkpointed modules off the device."""
    notices: tuple[str, ...] = ()
    """Lines for the user, at the start."""

    def install(self, modules: Mapping[str, nn.Module]) -> None:
        """Installs hooks on the modules of the model, by name, outside of all that are installed so far."""

    def remove(self) -> None:
        """Removes the hooks. Idempotent."""

    def abandon(self) -> None:
        """Ends the calls of blocks that a Ctrl-C has ended without their post-hooks."""

    def end_step(self, step: int) -> None:
        """Ends an optimizer step."""

    def keep(self, tensor: torch.Tensor) -> Any:
        """Returns the object that a graph keeps in place of a checkpointed module's input; None to keep the input."""
        return None

    def fetch(self, kept: Any) -> torch.Tensor:
        """Returns, on the device, the input for which `keep` has returned `kept`."""
        raise AssertionError("no input was kept")

    @property
    def arenas(self) -> list[HostArena]:
        """Host memory that is mapped for inputs."""
        return []

    def bytes_by_tier(self) -> dict[str, dict[str, int]]:
        """Returns the bytes of moved inputs in each tier, now ("used") and at most ("peak")."""
        return {tier.value: {"used": 0, "peak": 0} for tier in Tier}

    def recover(self) -> None:
        """Takes back the memory of inputs that an aborted forward or backward has left."""

    def close(self) -> None:
        """Waits for transfers in flight and frees the memory of inputs. Idempotent."""


class Extension(Protocol):
    """A feature that the engine does not know, installed on the model outside of the engine's own hooks.

    Extensions are installed last and removed first. All methods are called by the thread that runs the model.
    """

    def abandon(self) -> None:
        """Clears leftovers of an interrupted call from the model. Every call of the engine begins with this."""
        return  # most features leave nothing

    def add_gradients(self, present: Sequence[set[int]]) -> None:
        """Adds gradients to a step, once the ranks know which segments of each unit have a gradient on any rank.

        Added segments join those in `present`.
        """
        return

    def remove(self) -> None:
        """Takes the feature off the model. Idempotent."""
