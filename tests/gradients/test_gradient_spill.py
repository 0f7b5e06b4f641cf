"""Gradients without room in host memory spill to disk, and large units are streamed: the same bits."""

from __future__ import annotations

import errno
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload import testing
from offload.engine.gradient_transfer import DiskSpill, windows
from offload.engine.gradients import borders, parameter_starts
from offload.errors import EngineFailed, IoError, StoreError
from offload.layout.flat_layout import lay_out
from offload.swapper.memory.device import Device
from offload.swapper.memory.host_arena import HostArena, HostBudget
from offload.swapper.store import spill_file as scratch
from offload.timeline import OFF
from tests.support import models
from tests.support.oracle import (
    Job,
    Result,
    assert_same,
    least_host_memory,
    run,
    small_pieces,
    start,
    train_step,
    trained,
)
from tests.support.sampling import drawn

DISK = ("nvme", "nvme")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)


def _run_in(folder: Path, job: Job, host_memory: int, **options: Any) -> tuple[Result, str]:
    engine = start(job, DISK, folder, host_memory=host_memory, **options)
    try:
        assert engine.host_memory <= host_memory
        return trained(engine, job), "\n".join(engine.notices)
    finally:
        engine.destroy(remove=True)


JOBS = {"gpt2": models.GPT2, "mixture": models.MIXTURE, "dropout": models.DROPOUT}


@pytest.mark.sample(1)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", JOBS)
def test_with_the_least_host_memory_the_bits_are_the_same(
    name: str, dtype: str, accumulation: int, tmp_path: Path
) -> None:
    job = JOBS[name]._replace(dtype=dtype, accumulation=accumulation)
    ample = run(job, ("none", "none"), tmp_path)
    tight, notices = _run_in(tmp_path, job, least_host_memory(job, tmp_path))
    assert "gradient of " in notices
    assert_same(ample, tight, "in memory and with the least host memory")


def test_any_budget_gives_the_same_bits(tmp_path: Path) -> None:
    """From the least on: whatever spills, streams or stays."""
    job = models.MIXTURE._replace(steps=3, dtype="bf16")
    ample = run(job, ("none", "none"), tmp_path)
    least = least_host_memory(job, tmp_path)
    for more in drawn((4096, 20_000, 70_000, 150_000, 400_000, 2_000_000), 3):
        tight, _ = _run_in(tmp_path, job, least + more)
        assert_same(ample, tight, f"with {more} bytes more than the least")


def test_a_step_that_is_dropped_leaves_nothing_of_its_gradients(tmp_path: Path) -> None:
    job = models.GPT2._replace(steps=3, dtype="bf16")
    plain = run(job, ("none", "none"), tmp_path)
    engine = start(job, DISK, tmp_path, host_memory=least_host_memory(job, tmp_path))
    losses = []
    for step in range(job.steps):
        engine.backward(job.loss(engine, 7 - step, 0))
        engine.zero_grad()
        losses.append(train_step(engine, job, step))
    engine.destroy(remove=True)
    assert losses == plain.losses


def test_spill_files_have_no_name_and_are_gone_at_the_end(tmp_path: Path) -> None:
    job = models.GPT2._replace(dtype="bf16")
    engine = start(job, DISK, tmp_path, host_memory=least_host_memory(job, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["default"]
    open_files = [str(path.resolve()) for path in Path("/proc/self/fd").iterdir()]
    assert any("offload-spill" in name for name in open_files)
    engine.destroy(remove=True)
    open_files = [str(path.resolve()) for path in Path("/proc/self/fd").iterdir()]
    assert not any("offload-spill" in name for name in open_files)


def test_gradients_spill_beside_states_in_memory(tmp_path: Path) -> None:
    """No store is kept for their sake: what outlives a step is in memory."""
    job = models.GPT2._replace(dtype="bf16", steps=3)
    ample = run(job, ("none", "none"), tmp_path)
    need = least_host_memory(job, tmp_path, ("none", "none"))
    engine = start(job, ("none", "none"), tmp_path, host_memory=need)
    assert "gradient of " in "\n".join(engine.notices) and engine.resumable is None
    losses = [train_step(engine, job, step) for step in range(job.steps)]
    assert engine.io_bytes().written > 0
    engine.destroy()
    assert losses == ample.losses and list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_an_error_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = models.GPT2._replace(dtype="bf16")
    least = least_host_memory(job, tmp_path, ("none", "none"))
    real = scratch.DirectFile.reserve

    def refuse(file: Any, nbytes: int) -> None:
        raise IoError(file.path, 0, nbytes, 28, "reserve")

    testing.replace(monkeypatch, "file.reserve", refuse)
    with pytest.raises(StoreError, match=r"no room for gradients that do not fit host memory: .* needed"):
        start(job, ("none", "none"), tmp_path, host_memory=least)
    testing.replace(monkeypatch, "file.reserve", real)
    assert list(tmp_path.iterdir()) == []


def test_a_gradient_that_cannot_be_written_stops_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = models.GPT2._replace(dtype="bf16")
    engine = start(job, DISK, tmp_path, host_memory=least_host_memory(job, tmp_path))
    train_step(engine, job, 0)

    class Failed:
        def done(self) -> bool:
            return True

        def wait(self, timeout: float | None = None) -> int:
            raise IoError("spill", 0, 4096, 5, "write")

    testing.replace(monkeypatch, "spill.write", lambda *_: Failed())
    with pytest.raises((IoError, EngineFailed)):
        for step in range(1, 4):
            train_step(engine, job, step)
    with pytest.raises(EngineFailed, match="spill"):
        engine.step()
    engine.destroy()


class Waiting:
    """A write that has not looked at its buffer until somebody waits for it, or till the file is read."""

    def __init__(self, file: bytearray, start: int, buffer: memoryview) -> None:
        self._act = lambda: file.__setitem__(slice(start, start + len(buffer)), bytes(buffer))
        self._left = True

    def done(self) -> bool:
        return not self._left

    def wait(self, timeout: float | None = None) -> int:
        if self._left:
            self._left = False
            self._act()
        return 0


class MemoryScratch:
    """Files of spilled gradients in memory, written as late as can be."""

    def __init__(self, nbytes: int) -> None:
        self.file = bytearray(nbytes)
        self.writes: list[Waiting] = []

    def write(self, key: int, start: int, buffer: memoryview) -> Waiting:
        self.writes.append(Waiting(self.file, start, buffer))
        return self.writes[-1]

    def read(self, key: int, start: int, buffer: memoryview) -> Waiting:
        for write in self.writes:
            write.wait()
        buffer[:] = self.file[start : start + len(buffer)]
        done = Waiting(self.file, 0, memoryview(b""))
        done.wait()
        return done

    def close(self) -> None: ...


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_a_window_holds_what_was_added_whoever_writes_it_when(order: list[int]) -> None:
    """Windows in any order, each added to again and again, while writes end only when they are waited for."""
    numel, itemsize = 1024, 4
    arena = HostArena(HostBudget(0, 0, 3 * numel * itemsize, 0), Device(torch.device("cpu")))
    buffers = [taken for _ in range(3) if (taken := arena.gradients.take(numel * itemsize)) is not None]
    ranges = {0: tuple(range(start, start + numel) for start in range(0, 6 * numel, numel))}
    failures: list[BaseException] = []
    spill = DiskSpill(ranges, torch.float32, buffers, MemoryScratch(6 * numel * itemsize), failures.append, OFF)  # type: ignore[arg-type]
    expected = [0.0] * 6
    for number in order:
        part = spill.part(0, number * numel, (number + 1) * numel)
        part.fill_(0.0) if expected[number] == 0.0 else None
        part.add_(1.0)
        expected[number] += 1.0
        assert len(spill._here) + len(spill._writing) + len(spill._free) == len(buffers)
    spill.flush()
    values = torch.empty(6 * numel)
    spill.read(0, 0, 6 * numel, memoryview(values.numpy()).cast("B")).wait()
    for number in set(order):
        assert bool((values[number * numel : (number + 1) * numel] == expected[number]).all())
    assert failures == []


class Full:
    """A write that ends with an error."""

    def wait(self, timeout: float | None = None) -> int:
        raise IoError("spill", 0, 4096, errno.ENOSPC, "write")


@pytest.mark.parametrize("fault", ["cannot start", "fails"])
@pytest.mark.parametrize("method", ["read", "forget"])
def test_a_gradient_that_is_lost_stops_the_engine_whoever_notices(
    method: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush that cannot start a write has let go of the window, and a caught error would update with zeros."""
    numel, failures = 1024, list[BaseException]()
    arena = HostArena(HostBudget(0, 0, numel * 4, 0), Device(torch.device("cpu")))
    lease = arena.gradients.take(numel * 4)
    assert lease is not None
    stretches = {0: (range(numel),)}
    spill = DiskSpill(stretches, torch.float32, [lease], MemoryScratch(numel * 4), failures.append, OFF)  # type: ignore[arg-type]
    spill.part(0, 0, numel).fill_(1.0)

    def write(*_: Any) -> Full:
        if fault == "cannot start":
            raise IoError("spill", 0, 4096, errno.ENOMEM, "write")
        return Full()

    monkeypatch.setattr(MemoryScratch, "write", write)
    with pytest.raises(IoError) as caught:
        spill.flush()
        if method == "read":
            spill.read(0, 0, numel, memoryview(bytearray(numel * 4)))
        else:
            spill.forget(0)
    assert failures == [caught.value]


@given(
    st.lists(st.integers(1, 9000), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(1024 * 2 + 2048 * 3 + 32, 20_000),
)
def test_windows_cover_a_gradient_and_cut_it_between_chunks(numels: list[int], ranks: int, longest: int) -> None:
    parameters = [(f"p{i}", torch.nn.Parameter(torch.empty(numel, device="meta"))) for i, numel in enumerate(numels)]
    layout = lay_out("unit", parameters, ranks)
    for rank in range(ranks):
        part = layout.trainable(rank, ranks)
        at, starts = borders(layout, part), parameter_starts(layout, part)
        ranges = windows(at, starts, longest)
        assert [n for window in ranges for n in (window.start, window.stop)][:: 2 * len(ranges) - 1] == [0, len(part)]
        assert all(before.stop == after.start for before, after in itertools.pairwise(ranges))
        assert all(len(window) <= longest and window.start in at and window.stop in at for window in ranges)
        shared = [window for window in ranges if any(window.start < each < window.stop for each in starts)]
        assert all(len(window) <= longest // 16 for window in shared)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", JOBS)
def test_a_gradient_is_written_once_in_a_step_of_one_micro_batch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever order a backward reaches the parameters of a unit, hardly any window is written twice."""
    counts: Counter[tuple[int, int]] = Counter()
    nbytes: dict[tuple[int, int], int] = {}
    write = DiskSpill._write

    def counted(self: DiskSpill, key: tuple[int, int]) -> None:
        counts[key] += 1
        nbytes[key] = self._nbytes(key)
        write(self, key)

    testing.replace(monkeypatch, "gradient.spill", counted)
    job = JOBS[name]._replace(dtype="bf16", accumulation=1, steps=1)
    engine = start(job, DISK, tmp_path, host_memory=least_host_memory(job, tmp_path))
    train_step(engine, job, 0)
    engine.destroy(remove=True)
    assert nbytes and sum(counts[key] * nbytes[key] for key in counts) <= 1.05 * sum(nbytes.values())


def test_padding_longer_than_a_window_has_several() -> None:
    """A rank's share of a unit may end with more padding than a window holds."""
    assert windows([0, 64, 12288], [0, 64], 8192) == (range(64), range(64, 8256), range(8256, 12288))
