"""Inputs of blocks whose micro-batches take turns are brought back in the order in which the backward asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from offload import testing
from offload.activations.kept_inputs import KeptInputs, _RequestOrder
from tests.support import models
from tests.support.oracle import accumulated_step, start

JOB = models.GPT2._replace(accumulation=3, steps=3)


def test_the_order_is_newest_first_and_within_a_unit_by_micro_batch() -> None:
    schedule = mock.Mock(interleaves=False, micro_batch=0)
    order = _RequestOrder(schedule)
    alone = [order.next() for _ in range(3)]
    assert sorted(alone) == alone[::-1]
    schedule.interleaves, places = True, {}
    for unit in range(3):
        for schedule.micro_batch in range(3):
            places[unit, schedule.micro_batch] = order.next()
    assert sorted(places, key=lambda place: places[place]) == [
        (unit, micro) for unit in (2, 1, 0) for micro in range(3)
    ]
    assert max(places.values()) < min(alone)


def test_the_backward_asks_in_the_expected_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    testing.replace(monkeypatch, "size.least_kept_input", 1)
    asked: list[tuple[int, ...]] = []
    fetch = KeptInputs.fetch

    def noted(self: KeptInputs, view: Any) -> Any:
        asked.append(view.kept.wanted)
        return fetch(self, view)

    testing.replace(monkeypatch, "input.fetch", noted)
    engine = start(JOB, ("nvme", "nvme"), tmp_path, schedule="layer_major", activations="nvme")
    for step in range(JOB.steps):
        asked.clear()
        accumulated_step(engine, JOB, step)
        if step:  # in the first step the micro-batches pass one after the other
            assert len(asked) == 9 and asked == sorted(asked)
    engine.destroy(remove=True)
