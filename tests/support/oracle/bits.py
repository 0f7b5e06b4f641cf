"""Comparisons of tensors and of whole runs, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.oracle.job import PLACEMENTS, Job, Result
from tests.support.oracle.training import run
from tests.support.sampling import drawn


def assert_same_tensors(left: Mapping[str, Any], right: Mapping[str, Any], what: str = "") -> None:
    """Asserts that two dicts of tensors are equal, bit for bit, on whichever devices they are."""
    assert left.keys() == right.keys(), f"{what}: only one has {sorted(left.keys() ^ right.keys())}"
    for name, value in left.items():
        assert torch.equal(value.cpu(), right[name].cpu()), f"{what}: {name} differs"


def assert_same(left: Result, right: Result, what: str = "") -> None:
    """Asserts that two results are equal, bit for bit."""
    assert left.losses == right.losses, f"{what}: losses differ"
    assert left.norms == right.norms, f"{what}: norms differ"
    assert_same_tensors(left.weights, right.weights, what)


def same_bits(job: Job, folder: Path, placements: Sequence[tuple[str, str]] | None = None, **options: Any) -> Result:
    """Trains `job` in several placements, asserts that all are equal, and returns the result.

    Without `placements` these are all in memory, all on disk, and one of the others as the test draws it.
    """
    if placements is None:
        placements = [PLACEMENTS[0], *drawn(PLACEMENTS[1:-1], 1), PLACEMENTS[-1]]
    first: Result | None = None
    for placement in placements:
        result = run(job, placement, folder / "-".join(placement), **options)
        first = first or result
        assert_same(first, result, f"{placements[0]} and {placement}")
    assert first is not None
    return first
