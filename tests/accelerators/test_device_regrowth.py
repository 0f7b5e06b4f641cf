"""The arena shrinks as asked, grows again after calm steps, and remembers how much activations needed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import UsageError
from offload.layout.placement import ArenaHistory, DeviceNeed, growth, next_growth
from offload.sizes import GIB, MIB, PAGE
from offload.swapper.memory.device import DeviceRoom
from tests.accelerators.grown_device import CALM, JOB, grown, sizes, small
from tests.support.devices.late_device import Ticks
from tests.support.oracle import assert_same_tensors, run, train_step, weights_of


def test_the_user_may_ask_for_it_between_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = engine, device, _ = small(monkeypatch, tmp_path)
    assert engine.empty_partition_cache() == 0 and device.emptied == 1, "torch's own cache goes all the same"
    at_first = engine.device_memory
    grown(made)
    more = engine.device_memory - at_first
    with caplog.at_level("INFO", "offload"):
        assert engine.empty_partition_cache() == more
    assert "as asked: the engine gives back" in caplog.text
    assert engine.device_memory == device.arena == at_first and engine.empty_partition_cache() == 0
    assert str(engine.memory_report())
    refused: list[str] = []

    def ask(*_: Any) -> None:
        with pytest.raises(UsageError, match="between steps"):
            engine.empty_partition_cache()
        refused.append("")

    hook = engine.module.transformer.h[0].register_forward_hook(ask)
    train_step(engine, JOB, 1)
    hook.remove()
    assert refused
    engine.destroy(remove=True)


def test_the_arena_grows_again_after_calm_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = JOB
    expected = run(job, ("none", "none"), tmp_path / "plain")
    engine, device, _ = small(monkeypatch, tmp_path)
    at_first = engine.device_memory
    sizes, losses = [], []
    with Ticks(device):
        for step in range(job.steps):
            losses.append(train_step(engine, job, step))
            sizes.append(engine.device_memory)
            if step == 2:
                engine.empty_partition_cache()
    more = sizes[0]
    assert sizes == [more] * 3 + [at_first] * (CALM - 1) + [more] * (job.steps - CALM - 2) and more > at_first
    assert losses == expected.losses and device.broken == []
    assert_same_tensors(expected.weights, weights_of(engine))
    engine.destroy(remove=True)


def test_a_budget_of_the_user_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, device, hungry = small(monkeypatch, tmp_path, device_memory=8 * MIB)
    before = engine.device_memory
    train_step(engine, JOB, 0)
    hungry.forward = device.total
    with pytest.raises(torch.OutOfMemoryError, match="smaller micro-batches"):
        JOB.loss(engine, 1, 0)
    hungry.forward = 0
    train_step(engine, JOB, 1)
    assert engine.device_memory == before and engine.empty_partition_cache() == 0
    engine.destroy(remove=True)


def test_a_run_sees_few_shortages_whatever_its_batches_are() -> None:
    """The arena of 80 GiB grows after each calm time, and each time a longer batch comes that has no room."""
    total, need = 80 * GIB, DeviceNeed(least=GIB, most=79 * GIB, unit=256 * MIB, weights=79 * GIB)
    history, arena, beside = ArenaHistory(), GIB, list[int]()
    for _ in range(10_000):
        history = history.after_step()
        room = DeviceRoom(total - arena - 10 * MIB, 10 * MIB)
        more = next_growth(arena, need, room, history)
        if history.wait == 0:
            history = history.after_growth(more, room)
        arena += more
        if history.grown:
            beside.append(history.beside)
            history = history.after_return(DeviceRoom(total - arena, 0), short=True)
            arena = GIB
    assert 3 < len(beside) < 16
    assert all(later >= 1.5 * before for before, later in pairwise(beside))


@given(sizes, sizes, sizes, sizes, sizes, st.lists(st.tuples(st.integers(0, 9), sizes), max_size=4))
def test_growth_leaves_room_for_the_largest_need_that_is_known(
    nbytes: int, most: int, free: int, kept: int, peak: int, totals: list[tuple[int, int]]
) -> None:
    need = DeviceNeed(least=0, most=nbytes + most, unit=PAGE, weights=nbytes + most // 2, totals=tuple(totals))
    room = DeviceRoom(free, kept)
    more = next_growth(nbytes, need, room, ArenaHistory(peak=peak, wait=0))
    assert 0 <= more <= max(free, 0)
    if more:
        assert free + kept - more >= 1.5 * max(peak, kept) - PAGE
    assert next_growth(nbytes, need, room, ArenaHistory(wait=0)) == growth(nbytes, need, room), "the first, as planned"
    assert next_growth(nbytes, need, room, ArenaHistory(peak=peak, wait=1)) == 0
    assert next_growth(nbytes, need, room, ArenaHistory(peak=peak, wait=None)) == 0


@given(sizes, sizes, sizes, st.booleans())
def test_a_return_forgets_no_need(free: int, kept: int, more: int, short: bool) -> None:
    history = ArenaHistory(wait=0, peak=PAGE).after_growth(more, DeviceRoom(free + more, kept))
    after = history.after_return(DeviceRoom(free, kept), short)
    assert after.grown == 0 and after.wait == CALM and after.peak >= max(PAGE, kept)
    if short and more:
        assert after.peak >= free + kept, "it needed more than was left"
