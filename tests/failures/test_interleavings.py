"""Small steps have the bits of the calm run, leak nothing and never stand still, whatever the order of threads and I/O.

A failure prints the command that repeats it: `python -m tests.storm.interleavings`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storm import heartbeats, interleavings
from tests.storm.interleavings import SCENARIOS, told
from tests.storm.scheduler import Seeded

pytestmark = pytest.mark.timeout(3600)  # two threads that hand over to each other are slow on a busy machine

LIVES, ALL_LIVES = 8, 165
"""Of each scenario. A life has six steps, three where units are streamed: 504 in all, and 10,395."""
RANKS, ALL_RANKS = 10, 1_000


def live(number: int, lives: range, folder: Path) -> None:
    """Runs lives of a scenario."""
    for life in lives:
        seed = number + life * len(SCENARIOS)
        outcome = interleavings.run(seed, folder)
        assert not outcome.faults, told(seed, outcome.faults, outcome.choices)


@pytest.mark.parametrize("number", range(len(SCENARIOS)), ids=[scenario.name for scenario in SCENARIOS])
def test_no_order_of_threads_and_requests_changes_a_bit_or_stops_a_step(tmp_path: Path, number: int) -> None:
    live(number, range(LIVES), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SCENARIOS)), ids=[scenario.name for scenario in SCENARIOS])
def test_no_order_of_ten_thousand_steps_does(tmp_path: Path, number: int) -> None:
    live(number, range(LIVES, ALL_LIVES), tmp_path)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["power cut", "under the backward", "failed request"])
def test_a_seed_alone_repeats_a_life(tmp_path: Path, name: str) -> None:
    seed = next(seed for seed in range(len(SCENARIOS)) if SCENARIOS[seed].name == name)
    first = interleavings.run(seed, tmp_path)
    assert interleavings.run(seed, tmp_path) == first
    assert interleavings.run(seed, tmp_path, first.choices) == first
    assert len(first.choices) > 10


def test_scenarios_with_early_updates_make_some(tmp_path: Path) -> None:
    for number, scenario in enumerate(SCENARIOS):
        seeds = range(number, LIVES * len(SCENARIOS), len(SCENARIOS))
        if scenario.options.get("speculate"):
            assert any(interleavings.run(seed, tmp_path).early_updates for seed in seeds), scenario.name


def test_ranks_notice_a_cut_cable_and_nothing_else_in_any_order() -> None:
    for seed in range(RANKS):
        assert heartbeats.run(Seeded(seed), seed)[0] == [], seed


@pytest.mark.slow
def test_a_thousand_orders_of_heartbeats_do() -> None:
    for seed in range(RANKS, ALL_RANKS):
        assert heartbeats.run(Seeded(seed), seed)[0] == [], seed
