"""Updates: their tiles, rules of speculation, and those from memory."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from offload import kernels, testing
from offload.aio import IoQueue
from offload.report.figures import figures
from offload.report.log import read_log
from offload.report.page import page
from tests.support import models
from tests.support.early_updates import counts
from tests.support.early_updates import train_step as train_step_reported
from tests.support.oracle import run, small_pieces, start, train_step

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
        monkeypatch, "kernel.update", lambda part, *args: (calls.append(len(part.weight)), update(part, *args))
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
    assert f"Of updates under the backward, {hits} held, {misses} in 1 step came to nothing." in shown
