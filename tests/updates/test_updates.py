"""Updates: their tiles, rules of speculation, and those from memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import kernels, testing
from offload.aio import IoQueue
from offload.engine.callbacks import Edit
from offload.engine.early_updates import HELD_IN_A_ROW, AutoSpeculation, reason_to_clip, run_may_speculate
from offload.engine.gradients import UnitCompletion
from offload.engine.update import UnitJob, unit_may_begin
from offload.engine.update_strategy import EditSteps, TileContent, UnitUpdate, grad_scale
from offload.layout.modes import MODES
from offload.report.figures import figures
from offload.report.log import read_log
from offload.report.page import page
from offload.states import State
from offload.swapper.policy import leaves_room_ahead
from tests.support import models
from tests.support.early_updates import counts
from tests.support.early_updates import train_step as train_step_reported
from tests.support.oracle import run, small_pieces, start, train_step


class Passes:
    """Steps of so many passes, without arithmetic."""

    in_place = False
    drafts: Sequence[State] = ()

    def __init__(self, passes: int, cuts: Sequence[range] = ()) -> None:
        self.passes, self.cuts = passes, cuts

    def run(self, tile: TileContent, last: bool) -> None:
        raise AssertionError("nothing is run here")


def job_of(numel: int, passes: int, tile_numel: int) -> UnitJob:
    update = UnitUpdate(unit=0, numel=numel)
    return UnitJob(update=update, steps=Passes(passes), host_buffer=None, delivered=False, tile_numel=tile_numel)


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize(("numel", "tile_numel"), [(10, 4), (8, 4), (3, 4), (1, 1)])
def test_every_pass_covers_the_unit_in_order(numel: int, tile_numel: int, passes: int) -> None:
    job = job_of(numel, passes, tile_numel)
    tiles = []
    while not job.all_begun:
        tiles.append(job.begin_tile())
    elements = [(passed, element) for tile, passed in tiles for element in tile]
    assert elements == [(passed, element) for passed in range(passes) for element in range(numel)]
    assert all(len(tile) <= tile_numel for tile, _ in tiles)


@pytest.mark.parametrize("passes", [1, 2])
def test_an_update_has_ended_when_all_that_is_kept_is_written(passes: int) -> None:
    job = job_of(numel=6, passes=passes, tile_numel=2)
    while not job.all_begun:
        job.begin_tile()
    assert [job.end_writes({}) for _ in range(2)] == [False, False], "not computed, and one tile is unwritten"
    job.computed = True
    assert job.end_writes({})


def test_writes_that_ended_before_the_last_tile_was_computed_do_not_end_an_update() -> None:
    job = job_of(numel=4, passes=1, tile_numel=2)
    job.begin_tile()
    assert not job.end_writes({}), "the other tile was not even begun"
    job.begin_tile()
    job.computed = True
    assert job.end_writes({})


def test_a_later_edit_of_the_same_elements_counts_and_others_stay() -> None:
    mode = MODES["fp32"]
    states = {state: torch.zeros(4, dtype=dtype) for state, dtype in mode.states.items()}
    edits = [
        Edit(start=0, stop=6, values=torch.arange(6.0)),
        Edit(start=5, stop=7, values=torch.tensor([50.0, 60.0])),
        Edit(start=4, stop=5, values=torch.tensor([7.0]), state=State.EXP_AVG),
        Edit(start=0, stop=4, values=torch.full((4,), -1.0)),  # of the tile before
    ]
    EditSteps(edits, mode).run(TileContent(start=4, stop=8, states=states, gradient=None), last=True)
    assert states[State.WEIGHT].tolist() == [4, 50, 60, 0]
    assert states[State.EXP_AVG].tolist() == [7, 0, 0, 0]
    assert not states[State.EXP_AVG_SQ].any()


RUN = {"wanted": True, "ranks": 1, "one_pass": True, "commits": True, "on_disk": True}
UNIT = {"on_disk": True, "gradient_on_host": True, "newest": 0, "target": 1}


class Calls:
    """The part of the engine that a completion calls."""

    def __init__(self, last: bool = True) -> None:
        self.last = last
        self.said: list[tuple[str, int]] = []

    def is_last_micro_batch(self) -> bool:
        return self.last

    def gradients_complete(self, unit: int) -> None:
        self.said.append(("complete", unit))

    def gradients_changed(self, unit: int) -> None:
        self.said.append(("changed", unit))


@pytest.mark.parametrize("lacking", ["wanted", "one_pass", "commits", "on_disk"])
def test_a_run_needs_every_property(lacking: str) -> None:
    assert run_may_speculate(**RUN)
    assert not run_may_speculate(**{**RUN, lacking: False})
    assert not run_may_speculate(**{**RUN, "ranks": 2})


@pytest.mark.parametrize("other", [{"on_disk": False}, {"gradient_on_host": False}, {"target": 0}], ids=str)
def test_a_unit_needs_every_property(other: dict[str, int]) -> None:
    assert unit_may_begin(**UNIT)
    assert not unit_may_begin(**{**UNIT, **other})


@pytest.mark.parametrize("loss_scale", [1.0, 3.0, 65536.0])
def test_a_step_that_does_not_clip_has_the_factor_of_the_guess(loss_scale: float) -> None:
    for norm, clip, held in ((0.5, 1.0, True), (0.0, 1.0, True), (9.0, 0.0, True), (1.5, 1.0, False)):
        scale = grad_scale(norm, clip, loss_scale)
        assert (reason_to_clip(norm, clip, scale, loss_scale) is None) is held
        assert (scale == 1.0 / loss_scale) is held
    assert reason_to_clip(float("nan"), 1.0, 1.0, 1.0) == "the gradient norm is nan"


def test_auto_pauses_for_so_many_steps_and_true_never() -> None:
    auto = AutoSpeculation("auto").after(True).after(False)
    for _ in range(HELD_IN_A_ROW):
        assert not auto.on
        auto = auto.after(True)
    assert auto.on
    assert AutoSpeculation(True).after(False).on and not AutoSpeculation(False).on


def test_a_unit_is_complete_when_it_has_what_the_backward_before_gave() -> None:
    calls = Calls(last=False)
    completion = UnitCompletion(calls)  # type: ignore[arg-type]
    for segment in (0, 1, 1):
        completion.arrived(7, segment)
    completion.end_backward()
    calls.last = True
    for segment in (1, 0):
        completion.arrived(7, segment)
    assert calls.said == []
    completion.arrived(7, 1)
    assert calls.said == [("complete", 7)]
    completion.arrived(7, 0)
    assert calls.said[1:] == [("changed", 7)]
    completion.end_backward()
    completion.end_step()
    completion.changed(7)
    assert len(calls.said) == 2


def test_a_schedule_that_knows_better_says_itself_what_is_complete() -> None:
    calls = Calls()
    completion = UnitCompletion(calls)  # type: ignore[arg-type]
    completion.guesses = False
    for _ in range(2):
        completion.arrived(3, 0)
        completion.end_backward()
    assert calls.said == []
    completion.unit_complete(3)
    assert calls.said == [("complete", 3)]


def test_fresh_weights_stay_in_memory_only_beside_the_next_two_reads() -> None:
    page = 4096
    assert leaves_room_ahead(4 * page, [page, page], [page, page, 100 * page])
    assert not leaves_room_ahead(4 * page, [page, page], [page, 2 * page])
    assert leaves_room_ahead(2 * page, [page + 1], [])


JOB = models.GPT2._replace(steps=4)
_LONGEST_HOLD = 30.0
"""Seconds after which writes that are held go on, so that a fault fails the test and does not stop it."""


class HeldWrite:
    """A write that has ended once nobody holds writes any more."""

    def __init__(self, future: Any, go: threading.Event) -> None:
        self._future, self._go = future, go

    def done(self) -> bool:
        return self._go.is_set() and bool(self._future.done())

    def wait(self, timeout: float | None = None) -> int:
        self._go.wait()
        return int(self._future.wait(timeout))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._future, name)


class HoldingQueue:
    """A queue whose writes do not end while `go` is clear."""

    def __init__(self) -> None:
        self._inner, self.go, self.held, self.held_nbytes = IoQueue(), threading.Event(), 0, 0
        self.backend, self.refusals, self.window_bytes = self._inner.backend, self._inner.refusals, 0
        self.go.set()

    def write(self, file: Any, offset: int, buffer: memoryview, **options: Any) -> HeldWrite:
        if not self.go.is_set():
            self.held += 1
            self.held_nbytes += len(buffer)
        return HeldWrite(self._inner.write(file, offset, buffer, **options), self.go)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_the_next_forward_ends_while_every_write_is_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)
    queue = HoldingQueue()
    testing.replace(monkeypatch, "io.queue", lambda *_, **__: queue)
    engine = start(JOB, ("nvme", "nvme"), tmp_path, host_memory="16MiB")  # room for every state
    worker = testing.inspect(engine).update_worker
    assert worker is not None
    losses = [train_step(engine, JOB, step) for step in range(2)]
    engine.synchronize()
    engine.backward(JOB.loss(engine, 2, 0))
    queue.go.clear()
    watchdog = threading.Timer(_LONGEST_HOLD, queue.go.set)
    watchdog.start()
    engine.step()
    loss = JOB.loss(engine, 3, 0)  # uses the weights of every unit
    assert not queue.go.is_set(), "the forward has waited for writes"
    tiles = -(-max(map(len, testing.inspect(engine).trainable)) // worker.tile_numel)
    assert queue.held > tiles > 3, "more tiles are in flight than there are buffers"
    spec = testing.inspect(engine).store.spec  # type: ignore[union-attr]
    assert queue.held_nbytes <= sum(sum(row.values()) for row in spec.partitions), (
        "each state is in flight once at most"
    )
    queue.go.set()
    watchdog.cancel()
    engine.backward(loss)
    engine.step()
    engine.destroy(remove=True)
    alone = run(JOB, ("none", "none"), tmp_path)
    assert [*losses, float(loss.detach())] == [*alone.losses[:2], alone.losses[3]]


@pytest.mark.parametrize(("placement", "pieces"), [(("cpu", "cpu"), 1), (("nvme", "nvme"), 4)], ids=["memory", "disk"])
def test_a_unit_of_which_nothing_is_read_or_written_is_one_tile(
    placement: tuple[str, str], pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the time between two tiles many cores would compute half a million elements."""
    small_pieces(monkeypatch)
    engine = start(JOB, placement, tmp_path)
    calls, update = list[int](), kernels.update
    testing.replace(
        monkeypatch, "kernel.update", lambda part, segments: (calls.append(len(part.weight)), update(part, segments))
    )
    train_step(engine, JOB, 0)
    engine.synchronize()
    units = [len(trainable) for trainable in testing.inspect(engine).trainable]
    assert (sorted(calls) == sorted(units)) == (pieces == 1)
    assert len(calls) >= pieces * len(units) - 3
    engine.destroy(remove=True)


CLIPPED = 2
"""The step that clips."""


@pytest.mark.parametrize("speculate", [True, False])
def test_each_update_that_held_or_did_not_is_counted(tmp_path: Path, speculate: bool) -> None:
    job = models.GPT2._replace(dtype="bf16", steps=4, clip=0.0)
    log = tmp_path / "log.jsonl"
    engine = start(job, ("nvme", "nvme"), tmp_path, speculate=speculate, log=str(log))
    for step in range(job.steps):
        if step == CLIPPED:
            engine.clip_grad_norm_(1e-3)
        train_step_reported(engine, job, step)
    made = counts(engine)
    engine.destroy()
    found = read_log(log)
    seen = [(values.get("early_updates"), values.get("early_updates_dropped")) for values in found.steps]
    shown = page(found, figures(found), None)
    if not speculate:
        assert seen == [(None, None)] * job.steps and "under the backward" not in shown
        return
    hits, misses = (sum(int(count or 0) for count in column) for column in zip(*seen, strict=True))
    assert (hits, misses) == (made.hits, made.misses)
    assert [bool(dropped) for _, dropped in seen] == [step == CLIPPED for step in range(job.steps)]
    assert hits > 0
    assert f"Of updates under the backward, {hits} held and {misses} came to nothing." in shown
