"""Where the time of a step goes: what the model computed, what it waited for, and by which of these a step is bound.

A wait for an update is a wait for whatever the update worker did meanwhile: its kernels, or its own waits for reads and
writes. It is shared out as the worker's time was.
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
"""The parts of a step, in the order in which they are shown, and what each is."""

ADVICE: Mapping[str, str] = {
    "compute": "a faster device, or less to recompute (activation checkpointing); paging is not what limits",
    "optimizer": "more processor cores, or more micro-batches a step (gradient_accumulation_steps)",
    "reads": 'more "host_memory", which keeps weights; a larger micro-batch; another drive in nvme_path',
    "writes": 'more micro-batches a step; another drive in nvme_path; "durability": {"every": 10}',
    "memory": 'more "host_memory": all of it belongs to reads and writes in progress',
    "uploads": 'more "device_memory", so that weights stay on the device',
    "loop": "a loader with workers; less to do between steps (evaluations, saves)",
}
"""What to change where a step is bound by a part."""


class Bound(NamedTuple):
    """What limits a step."""

    by: str
    """One of `PARTS`."""
    seconds: float
    """Of a mean step."""
    parts: Mapping[str, float]
    """Seconds of each part in a mean step; zeros are left out."""

    @property
    def share(self) -> float:
        return self.parts[self.by] / self.seconds if self.seconds else 0.0

    def words(self) -> str:
        """A sentence with the numbers."""
        rest = sorted((name for name in self.parts if name != self.by), key=lambda name: -self.parts[name])
        others = [f"{self.parts[name]:.3f} s {PARTS[name]}" for name in rest if self.parts[name] >= 0.0005]
        first = f"{self.by}: {self.parts[self.by]:.3f} of {self.seconds:.3f} s a step ({self.share:.0%})"
        return ", ".join([f"{first} {PARTS[self.by]}", *others])


def parts(values: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of each of `PARTS` in a step with such numbers; empty where its phases were not measured.

    They add up to the step's seconds.
    """
    if values.get("forward_seconds") is None:
        return {}

    def seconds(name: str) -> float:
        return float(values.get(f"{name}_seconds") or 0.0)

    phases = sum(map(seconds, ("forward", "backward", "step")))
    waits = {name: seconds(f"wait_for_{name}") for name in ("reads", "updates", "commits", "memory", "uploads")}
    worker = {
        "optimizer": seconds("update_kernels") + seconds("update_copies"),
        "reads": seconds("update_waits_for_reads"),
        "writes": seconds("update_waits_for_writes"),
    }
    busy = sum(worker.values())
    of_updates = {
        name: waits["updates"] * (part / busy if busy else name == "optimizer") for name, part in worker.items()
    }
    return {
        "compute": max(phases - sum(waits.values()), 0.0),
        "optimizer": of_updates["optimizer"],
        "reads": waits["reads"] + of_updates["reads"],
        "writes": waits["commits"] + of_updates["writes"],
        "memory": waits["memory"],
        "uploads": waits["uploads"],
        "loop": max((values.get("seconds") or 0.0) - phases, 0.0),
    }


def bound(steps: Iterable[Mapping[str, Any]]) -> Bound | None:
    """What steps with such numbers are bound by, on the whole; None where their phases were not measured."""
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
    means = {name: seconds / count for name, seconds in sums.items() if seconds > 0} or {"compute": 0.0}
    return Bound(max(means, key=lambda name: means[name]), total / count, means)
