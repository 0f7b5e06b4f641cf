"""Orders of threads find faults of the store and of threads: what `python -m tests.mutants storm` runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.mutants.importing import VARIABLE
from tests.storm import interleavings

STEPS = 1_000
"""In which a mutant must be found."""


@pytest.mark.timeout(3600)
@pytest.mark.skipif(VARIABLE not in os.environ, reason="needs a mutant: python -m tests.mutants storm")
def test_no_order_of_threads_changes_a_bit(tmp_path: Path) -> None:
    steps = seed = 0
    while steps + interleavings.scenario_of(seed).steps <= STEPS:
        outcome = interleavings.run(seed, tmp_path)
        assert not outcome.faults, interleavings.told(seed, outcome.faults, outcome.choices)
        steps, seed = steps + interleavings.scenario_of(seed).steps, seed + 1
