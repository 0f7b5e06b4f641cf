"""A forward that does not fit beside the grown arena gets memory back, is repeated if it can be, and changes no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import testing
from offload.engine.snapshot import GeneratorStates
from offload.swapper.prefetch import Fetcher
from offload.swapper.table import UnitEntry
from tests.accelerators.grown_device import JOB, grown, small, too_much
from tests.support import models
from tests.support.devices.late_device import Ticks
from tests.support.oracle import Job, assert_same_tensors, run, train_step, weights_of


@pytest.mark.sample(1)
@pytest.mark.parametrize("job", [JOB, Job(models.gpt2_dropout, models.language_loss)], ids=["plain", "dropout"])
@pytest.mark.parametrize("placement", [("cpu", "cpu"), ("nvme", "nvme"), ("none", "cpu")], ids="-".join)
def test_a_forward_that_does_not_fit_is_repeated_with_more_memory_and_the_same_bits(
    placement: tuple[str, str], job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    job = job._replace(steps=4)
    expected = run(job, ("none", "none"), tmp_path / "plain")
    made = engine, device, hungry = small(monkeypatch, tmp_path, job, placement)
    at_first = engine.device_memory
    with Ticks(device):
        losses = [train_step(engine, job, 0)]
        after = engine.device_memory
        assert (after > at_first) == (placement[0] != "none")
        for step in range(1, job.steps):
            hungry.forward = too_much(made) if step == 2 and placement[0] != "none" else 0
            losses.append(train_step(engine, job, step))
    assert losses == expected.losses and device.broken == []
    assert_same_tensors(expected.weights, weights_of(engine))
    if placement[0] != "none":
        assert engine.device_memory == device.arena == at_first
        lines = [r.getMessage() for r in caplog.records if "gives back" in r.getMessage()]
        assert len(lines) == 1 and "a forward, which runs once more" in lines[0]
        assert hungry.calls == job.steps + 1
    engine.destroy(remove=True)


def test_a_forward_that_fits_nowhere_fails_after_one_repetition_with_the_old_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine, device, hungry = small(monkeypatch, tmp_path)
    grown(made)
    hungry.calls, hungry.forward = 0, device.total
    with pytest.raises(torch.OutOfMemoryError, match=r"smaller micro-batches.*expandable_segments:True") as caught:
        train_step(engine, JOB, 1)
    assert hungry.calls == 2 and len(caught.value.args) == 1
    engine.destroy(remove=True)


class Counting(nn.Module):
    """A model with a buffer, or other things, that its forward changes."""

    def __init__(self, changes: str) -> None:
        super().__init__()
        self.changes = changes
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.body = nn.BatchNorm1d(64) if changes == "running statistics" else nn.Identity()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, batch: Any, cache: Any = None) -> torch.Tensor:
        if self.changes == "a buffer":
            self.seen += 1
        if self.changes == "another buffer":
            self.seen = self.seen + 1
        if self.changes == "an input":
            batch += 1
        if self.changes in ("a list", "an object"):
            cache.append(batch)
        for layer in self.layers[:3]:
            batch = layer(batch)
        batch = self.body(batch)
        for layer in self.layers[3:]:
            batch = layer(batch)
        return batch.square().mean()


class Cache:
    def __init__(self) -> None:
        self.append = [].append


def counting_loss(model: Any, step: int, micro: int) -> torch.Tensor:
    batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + micro))
    changes = model.module.changes
    given: list[Any] = (
        [batch, [] if changes == "a list" else Cache()] if changes in ("a list", "an object") else [batch]
    )
    return model(*given)  # type: ignore[no-any-return]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "changes", ["nothing", "a buffer", "another buffer", "running statistics", "an input", "a list", "an object"]
)
def test_a_forward_that_has_changed_something_is_not_repeated_but_the_next_one_fits(
    changes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(lambda: Counting(changes), counting_loss)
    made = engine, _, hungry = small(monkeypatch, tmp_path, job)
    grown(made, job)
    hungry.calls, hungry.forward = 0, too_much(made)
    if changes == "nothing":
        train_step(engine, job, 1)
        assert hungry.calls == 2
    else:
        before = engine.device_memory
        with pytest.raises(torch.OutOfMemoryError, match=r"gives back .* with its next call.*expandable_segments"):
            train_step(engine, job, 1)
        assert hungry.calls == 1
        train_step(engine, job, 1)
        assert engine.device_memory < before
    engine.destroy(remove=True)


def test_with_several_ranks_a_forward_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold collectives of the user's, which the others would not repeat."""
    made = engine, *_ = small(monkeypatch, tmp_path)
    grown(made)
    calls: list[str] = []

    def forward() -> None:
        calls.append("")
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        testing.inspect(engine).device_budget.run(forward, (), alone=False)
    assert len(calls) == 1
    engine.destroy(remove=True)


class CountedOn:
    """Uses of a rank that has all units, until weights change."""

    def __init__(self, fetcher: Fetcher) -> None:
        self.settled, self._fetcher = True, fetcher

    def fetch(self, entry: UnitEntry, ahead: bool = False) -> None:
        self._fetcher.fetch(entry)

    def prefetch(self) -> None:
        pass

    def forget(self) -> None:
        self.settled = False


def test_what_other_ranks_count_on_stays_until_weights_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not ask any more once all ranks have all units, so they would not gather one that is missing."""
    made = engine, device, _ = small(monkeypatch, tmp_path)
    at_first = engine.device_memory
    grown(made)
    testing.inspect(engine).pager._fetcher = CountedOn(testing.inspect(engine).pager._fetcher)  # type: ignore[assignment]
    assert engine.empty_partition_cache() == 0 and engine.device_memory > at_first
    train_step(engine, JOB, 1)
    assert engine.device_memory == device.arena == at_first
    engine.destroy(remove=True)


def test_nothing_is_read_before_a_forward_that_could_not_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generators and buffers are read only while there is memory to give back."""
    engine, *_ = small(monkeypatch, tmp_path)
    reads: list[str] = []
    real = GeneratorStates.of
    testing.replace(monkeypatch, "generators.read", lambda device: reads.append("") or real(device))
    train_step(engine, JOB, 0)
    assert not reads
    train_step(engine, JOB, 1)
    assert len(reads) == 1
    engine.destroy(remove=True)
