"""Pure decisions about updates under the backward.

An update under the backward is a guess: that no further gradient of its unit arrives, that the norm clips nothing, and
that no number of the optimizer changes before `step()`. It writes the slot that the last commit does not name. So the
guess costs time and bytes if it fails, and never a bit of the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

HELD_IN_A_ROW = 8
"""Steps that must hold in a row, after a miss, before `auto` guesses again.

By Laplace's rule of succession the next step fails with a chance of 1 in n + 2 after n that held: 1 in 10. A miss reads
and writes the states of a unit once more, so the expected extra traffic stays below a tenth of an update's. A smaller
number would guess within the bursts of large gradients in which clipped steps come, and a larger one would give up more
steps that hold than it saves.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Properties of a run on which it depends whether any update may be made under the backward."""

    wanted: bool
    """True if the config allows them."""
    ranks: int
    one_pass: bool
    """True if the update rule is one of ours, and needs one pass."""
    commits: bool
    """True if the store has two slots of each state, and commits them."""
    on_disk: bool
    """True if there is a unit all of whose states are on DISK."""


def run_may_speculate(facts: RunFacts) -> bool:
    """Returns True if updates of the run may be made under the backward."""
    # Ranks would have to agree on every guess. LAMB needs norms first, and a tile of torch's optimizers is an entire
    # unit, without room for its old states beside.
    return facts.wanted and facts.ranks == 1 and facts.one_pass and facts.commits and facts.on_disk


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitFacts:
    """A unit whose gradients are complete, at the moment at which its update could begin."""

    on_disk: bool
    """True if every state is on DISK. Above it, an update changes the state in place."""
    gradient_on_host: bool
    """True if the gradient is in host memory. A window of one on DISK would have to be written and read first."""
    newest: int
    """The slot of the newest copy."""
    target: int
    """The slot that an update writes."""


def unit_may_begin(facts: UnitFacts) -> bool:
    """Returns True if the update of a unit can be made now and dropped later without a loss.

    Both slots are the same if no commit is durable, and within the steps between two commits.
    """
    return facts.on_disk and facts.gradient_on_host and facts.newest != facts.target


def reason_to_clip(norm: float, clip: float, scale: float, loss_scale: float) -> str | None:
    """Returns the reason for which a step does not apply its gradients as they are; None if it does.

    Args:
        norm: the norm of the gradient.
        clip: the largest norm.
        scale: the factor of every gradient.
        loss_scale: the factor of the loss.
    """
    if not math.isfinite(norm):
        return f"the gradient norm is {norm}"
    if scale != 1.0 / loss_scale:
        return f"the gradient of norm {norm:.4g} was clipped to {clip:g}"
    return None


@dataclass(frozen=True, slots=True)
class AutoSpeculation:
    """The state of `"speculate"` between steps: whether the next backward may guess."""

    speculate: Literal["auto"] | bool
    held: int = HELD_IN_A_ROW
    """Steps in a row that held, or would have; at most `HELD_IN_A_ROW`."""

    @property
    def on(self) -> bool:
        """True if the next backward may guess."""
        return self.speculate is True or (self.speculate == "auto" and self.held == HELD_IN_A_ROW)

    def after(self, held: bool) -> AutoSpeculation:
        """Returns the state after a step.

        Args:
            held: True if every guess of the step was right, or would have been.
        """
        return replace(self, held=min(self.held + 1, HELD_IN_A_ROW) if held else 0)
