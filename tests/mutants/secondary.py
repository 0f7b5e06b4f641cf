"""Faults in gathers within a node, from a secondary partition of the weights, and the tests that must notice them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_TESTS = "tests/ranks/test_ranks_secondary.py"

MUTANTS = (
    Mutant(
        "gather the weights of the step before within a node",
        "offload.distributed.agreement",
        "if kind in (Collective.STEP, Collective.EDIT,",
        "if kind in (Collective.EDIT,",
        _TESTS,
    ),
    Mutant(
        "gather weights within a node that an edit has changed",
        "offload.distributed.agreement",
        "if kind in (Collective.STEP, Collective.EDIT,",
        "if kind in (Collective.STEP,",
        _TESTS,
    ),
    Mutant(
        "gather within a node what sleep has given back",
        "offload.distributed.agreement",
        "Collective.LOAD, Collective.SLEEP):",
        "Collective.LOAD):",
        _TESTS,
    ),
    Mutant(
        "keep the part of another rank of the node",
        "offload.layout.tiers",
        "start + rank % self.ranks * nbytes",
        "start + rank // self.ranks * nbytes",
        _TESTS,
    ),
    Mutant(
        "gather over all ranks although the node has kept the unit",
        "offload.distributed.gathers",
        "        self._filled.add(unit)\n",
        "",
        _TESTS,
    ),
    Mutant(
        "keep a unit that has not arrived",
        "offload.distributed.gathers",
        "            self._device.wait_event(after)\n",
        "",
        _TESTS,
    ),
)
