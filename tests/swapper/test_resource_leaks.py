"""A long run leaks nothing: descriptors, threads, files and memory stay, and requests stay within the arena."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch

from offload import testing
from offload.aio import IoQueue
from offload.sizes import MIB
from tests.support import models
from tests.support.oracle import least_host_memory, small_pieces, start, train_step


def _held(folder: Path) -> tuple[int, int, int, list[str]]:
    gc.collect()
    process = psutil.Process()
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    return process.num_fds(), process.num_threads(), threading.active_count(), files


@pytest.mark.parametrize(
    ("tight", "first", "last"),
    [
        pytest.param(True, 15, 50, id="the least"),
        pytest.param(True, 50, 200, id="the least, many steps", marks=pytest.mark.slow),
        pytest.param(False, 50, 200, id="default budgets, many steps", marks=pytest.mark.slow),
    ],
)
def test_nothing_grows_from_step_to_step(tight: bool, first: int, last: int, tmp_path: Path) -> None:
    job = models.GPT2._replace(dtype="bf16")
    budget = {"host_memory": least_host_memory(job, tmp_path)} if tight else {}
    engine = start(job, ("nvme", "nvme"), tmp_path, **budget)
    for step in range(first):
        train_step(engine, job, step)
    held, rss = _held(tmp_path), psutil.Process().memory_info().rss
    for step in range(first, last):
        train_step(engine, job, step)
    assert _held(tmp_path) == held
    assert psutil.Process().memory_info().rss - rss <= 16 * MIB
    assert engine.global_steps == last
    assert engine.use_counts().unforeseen == 0
    engine.destroy(remove=True)


class Awaited:
    """A request that counts as in flight until somebody waits for it."""

    def __init__(self, future: Any) -> None:
        self._future, self.over = future, False

    def done(self) -> bool:
        return self.over

    def wait(self, timeout: float | None = None) -> int:
        moved = int(self._future.wait(timeout))
        self.over = True
        return moved

    def __getattr__(self, name: str) -> Any:
        return getattr(self._future, name)


class Request(NamedTuple):
    future: Awaited
    start: int
    stop: int


class Watched:
    """A queue that keeps the memory of each request, and notes requests in flight that share some."""

    def __init__(self) -> None:
        self._inner, self._lock = IoQueue(), threading.Lock()
        self.backend, self.refusals, self.window_bytes = self._inner.backend, self._inner.refusals, 0
        self._flying: list[Request] = []
        self.memory: set[tuple[int, int]] = set()
        self.sharing: list[tuple[str, Request]] = []
        self.most_nbytes = 0

    def read(self, file: Any, offset: int, buffer: memoryview, **options: Any) -> Awaited:
        return self._submit("read", file, offset, buffer, options)

    def write(self, file: Any, offset: int, buffer: memoryview, **options: Any) -> Awaited:
        return self._submit("write", file, offset, buffer, options)

    def _submit(self, operation: str, file: Any, offset: int, buffer: memoryview, options: dict[str, Any]) -> Awaited:
        start = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
        stop = start + len(buffer)
        with self._lock:
            self._flying = [each for each in self._flying if not each.future.over]
            self.sharing += [(operation, each) for each in self._flying if start < each.stop and each.start < stop]
            future = Awaited(getattr(self._inner, operation)(file, offset, buffer, **options))
            self._flying.append(Request(future, start, stop))
            self.memory.add((start, stop))
            self.most_nbytes = max(self.most_nbytes, sum(each.stop - each.start for each in self._flying))
        return future

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("host_memory", [None, "16MiB"], ids=["the least", "with room"])
def test_requests_in_flight_are_no_more_than_the_budgets(
    host_memory: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has memory of an arena of its own, so all that wait in the queue are bounded by the arenas."""
    job = models.GPT2._replace(accumulation=2)
    small_pieces(monkeypatch)
    budget = least_host_memory(job, tmp_path) if host_memory is None else host_memory
    queue = Watched()
    testing.replace(monkeypatch, "io.queue", lambda *_, **__: queue)
    engine = start(job, ("nvme", "nvme"), tmp_path, host_memory=budget)
    inspected = testing.inspect(engine)
    arenas = [(inspected.host_arena.address, inspected.host_arena.address + inspected.host_arena.nbytes)]
    if host_memory is None:  # large units are read into the memory of the CPU on which they are used
        arenas += inspected.device_arena.addresses()
    queue.memory.clear()  # at the start each unit's states were written from memory of their own, one after the other
    queue.most_nbytes = 0
    for step in range(3):
        train_step(engine, job, step)
    engine.destroy(remove=True)
    assert queue.sharing == []
    beside = [each for each in queue.memory if not any(first <= each[0] and each[1] <= last for first, last in arenas)]
    # What a commit reads of slots that nothing else has read goes to memory of its own.
    assert all(stop - start <= 1 << 18 for start, stop in beside) and len(beside) <= len(queue.memory) / 4
    assert (
        max(stop - start for start, stop in queue.memory)
        < queue.most_nbytes
        <= sum(last - first for first, last in arenas)
    )
