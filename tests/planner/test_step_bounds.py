"""Simulated seconds of a step on many machines: a change of the schedule that costs time is seen without a GPU."""

from __future__ import annotations

import json

import pytest

from offload.planner import step_time
from offload.states import State, Tier
from tests.planner.pinned_steps import CASES, IN_RAM, PINS
from tests.support.sampling import drawn

RENEW = "python -m tests.planner.pinned_steps"


def test_a_step_takes_as_long_as_it_did() -> None:
    """A slower step is a regression of its schedule, bytes or formulas; a faster one is pinned anew."""
    pins, wrong = json.loads(PINS.read_text(encoding="utf-8")), []
    assert list(pins) == list(CASES), f"renew the pins: {RENEW}"
    for name in drawn(list(CASES), len(CASES) // 3):
        case, pin = CASES[name], pins[name]
        planned = case.planned()
        seconds = planned.timing.seconds
        assert planned.timing.formula_seconds <= seconds, name
        drives = any(Tier.DISK in tiers.values() for tiers in planned.memory.placement.tiers)
        assert drives == ("nvme" in case.tiers), name
        if seconds > 1.01 * pin:
            wrong.append(f"{name}: {seconds:.4g} s, slower than {pin:.4g}")
        elif seconds < 0.99 * pin:
            wrong.append(f"{name}: {seconds:.4g} s, faster than {pin:.4g}; renew the pins: {RENEW}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", IN_RAM)
def test_weights_before_moments_make_it_shorter(name: str) -> None:
    """A decay that is added to the gradient needs the old weight, so Adam's update takes one pass with it."""
    two_passes, one_pass = (CASES[name].planned(adam_w_mode=decoupled) for decoupled in (True, False))
    assert one_pass.timing.seconds > 1.04 * two_passes.timing.seconds


def test_a_pass_moves_eighteen_of_twenty_six_bytes() -> None:
    planned = CASES["H200, 7B, 32k tokens"].planned()
    assert step_time.passes_of(planned.memory.mode, 2) == (18 / 26, 18 / 26)
    numel = sum(planned.memory.parts.trainable_numel)
    assert sum(row[State.GRAD] for row in planned.memory.parts.nbytes) == 2 * numel


def test_renewed_pins_stay_below_the_bars() -> None:
    """A renewal may not hide a slow step: these are seconds that the schedule has reached on an H200 held to 24 GiB."""
    bars = {
        "H200, 7B, 32k tokens": 3.6,
        "H200, 7B, 8k tokens": 1.85,
        "H200, 8B, 32k tokens": 4.2,
        "H200, 13B in few bytes, 32k tokens": 6.6,
    }
    pins = json.loads(PINS.read_text(encoding="utf-8"))
    assert {name: pins[name] for name, bar in bars.items() if pins[name] > bar} == {}
