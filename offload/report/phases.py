"""Phases of a step: compute, waits by cause, and the phase that limits the step.

A wait for an update is a wait for the update worker's kernels, or for the worker's own reads and writes. The time of
the wait is divided among kernels, reads and writes in proportion to the time that the worker spends on each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

PARTS: Mapping[str, str] = {
    "compute": "forward and backward",
    "optimizer": "waits for the optimizer's kernels",
    "reads": "waits for reads",
    "writes": "waits for writes and commits",
    "memory": "waits for host memory",
    "uploads": "waits for uploads",
    "loop": "the loader and the loop's own code",
}
"""Phases of a step, in the order in which they are shown, with a description of each."""

ADVICE: Mapping[str, str] = {
    "compute": "a faster device, or less to recompute (activation checkpointing); paging is not the limit",
    "optimizer": "more processor cores, or more micro-batches a step (gradient_accumulation_steps)",
    "reads": 'more "host_memory", which keeps weights; a larger micro-batch; another drive in nvme_path',
    "writes": 'more micro-batches a step; another drive in nvme_path; "durability": {"every": 10}',
    "memory": 'more "host_memory": reads and writes in progress occupy all of it',
    "uploads": 'more "device_memory", so that weights stay on the device',
    "loop": "a loader with workers; less to do between steps (evaluations, saves)",
}
"""Advice for faster steps, by the phase that limits a step; the keys are those of `PARTS`."""


_OF_CORES = ("compute", "optimizer")
"""Phases that other work on the cores makes longer."""
_BUSY = 0.15
"""Fraction of the cores above which the work of other processes is mentioned, as in `offload probe`."""


def advice(by: str, others: float | None = None) -> str:
    """Returns advice for faster steps.

    `others` is the fraction of the cores that other processes used meanwhile.
    """
    if by not in _OF_CORES or others is None or others <= _BUSY:
        return ADVICE[by]
    return f"end the other work on this machine, which took {others:.0%} of its cores; {ADVICE[by]}"


class Bound(NamedTuple):
    """The limiting phase of a mean step."""

    by: str
    """A key of `PARTS`."""
    seconds: float
    """Seconds of a mean step."""
    parts: Mapping[str, float]
    """Seconds of each phase in a mean step; zeros are left out."""

    @property
    def share(self) -> float:
        """Returns the fraction of the step that the limiting phase takes."""
        return self.parts[self.by] / self.seconds if self.seconds else 0.0

    def words(self) -> str:
        """Returns the phases and their seconds in one line, the limiting phase first."""
        rest = sorted((name for name in self.parts if name != self.by), key=lambda name: -self.parts[name])
        others = [f"{self.parts[name]:.3f} s {PARTS[name]}" for name in rest if self.parts[name] >= 0.0005]
        first = f"{self.by}: {self.parts[self.by]:.3f} of {self.seconds:.3f} s a step ({self.share:.0%})"
        return ", ".join([f"{first} {PARTS[self.by]}", *others])


class Verdict(NamedTuple):
    """The limit of a run's speed, and changes against it."""

    bound_by: str
    """A key of `PARTS`; empty if the log has no phases."""
    more: str
    """The share of the step, in words."""
    advice: str
    """The advice; without phases, how to measure them."""

    @property
    def first_change(self) -> str:
        """Returns the change that helps most, the first of the advice."""
        return self.advice.partition(";")[0]


def verdict(facts: Mapping[str, Any]) -> Verdict:
    """Returns the limit of the run's speed with advice, or how to measure the phases."""
    by, spent = facts["bound_by"], facts["step_parts_seconds"]
    if by is None:
        return Verdict("", "", 'Phases were not measured: set "wall_clock_breakdown" in the config.')
    # The small number avoids a division by zero for steps of zero length.
    share = spent[by] / max(sum(spent.values()), 1e-12)
    return Verdict(by, f"{share:.0%} of a step: {PARTS[by]}", facts["advice"])


def parts(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the seconds of each phase of `PARTS` in a step; empty if the phases were not measured.

    They sum to the step's seconds but for noise of the clock.
    """
    if values.get("forward_seconds") is None:
        return {}

    def seconds(name: str) -> float:
        return float(values.get(f"{name}_seconds") or 0.0)

    phases = sum(map(seconds, ("forward", "backward", "step")))
    waits = {name: seconds(f"wait_for_{name}") for name in ("reads", "updates", "commits", "memory", "uploads")}
    # The worker's own copies count as the optimizer's time, since `PARTS` has no phase for them.
    worker = {
        "optimizer": seconds("update_kernels") + seconds("update_copies"),
        "reads": seconds("update_waits_for_reads"),
        "writes": seconds("update_waits_for_writes"),
    }
    busy = sum(worker.values())
    # Without measurements of the worker, the complete wait counts as the optimizer's.
    of_updates = {
        name: waits["updates"] * (part / busy if busy else name == "optimizer") for name, part in worker.items()
    }
    return {
        # Waits happen inside of forward, backward and step, so the rest of the three is compute. Noise of the clock
        # could make the rest negative.
        "compute": max(phases - sum(waits.values()), 0.0),
        "optimizer": of_updates["optimizer"],
        "reads": waits["reads"] + of_updates["reads"],
        "writes": waits["commits"] + of_updates["writes"],
        "memory": waits["memory"],
        "uploads": waits["uploads"],
        "loop": max((values.get("seconds") or 0.0) - phases, 0.0),
    }


def bound(steps: Iterable[Mapping[str, Any]]) -> Bound | None:
    """Returns the limiting phase of the mean of several steps; None if their phases were not measured."""
    sums = dict.fromkeys(PARTS, 0.0)
    total, count = 0.0, 0
    for values in steps:
        mine = parts(values)
        if mine:
            count += 1
            total += values.get("seconds") or 0.0
            for name, seconds in mine.items():
                sums[name] += seconds
    if not count:
        return None
    # Means, not medians: only means of the phases sum to the mean step.
    means = {name: seconds / count for name, seconds in sums.items() if seconds > 0} or {"compute": 0.0}
    return Bound(max(means, key=lambda name: means[name]), total / count, means)
