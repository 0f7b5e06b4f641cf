"""What an engine does with activations: which blocks are computed again, and where their inputs wait."""

from __future__ import annotations

from dataclasses import dataclass

from offload.activations.checkpoints import UnitCheckpoints
from offload.activations.kept_inputs import KeptInputs
from offload.states import Tier
from offload.swapper.memory.host_arena import HostArena


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """The activations of one engine's model."""

    checkpoints: UnitCheckpoints
    inputs: KeptInputs | None
    """None if inputs stay where the forward computes them."""
    notices: tuple[str, ...] = ()
    """Lines for the user, at the start."""

    @property
    def arenas(self) -> list[HostArena]:
        """Host memory that is mapped for inputs."""
        return [] if self.inputs is None else self.inputs.arenas

    def bytes_by_tier(self) -> dict[str, dict[str, int]]:
        """Returns the bytes of moved inputs in each tier, now ("used") and at most ("peak")."""
        used = {} if self.inputs is None else self.inputs.bytes_by_tier()
        peak = {} if self.inputs is None else self.inputs.peak
        return {tier.value: {"used": used.get(tier, 0), "peak": peak.get(tier, 0)} for tier in Tier}

    def recover(self) -> None:
        """Takes back the memory of inputs that an aborted forward or backward has left."""
        if self.inputs is not None:
            self.inputs.recover()

    def close(self) -> None:
        """Waits for transfers in flight and frees the memory of inputs. Idempotent."""
        if self.inputs is not None:
            self.inputs.close()
