"""Memory is what the formula says: peaks, budgets, limits, and no growth from step to step."""

from __future__ import annotations

import gc
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
import transformers

import offload
from offload import testing
from offload.aio import IoQueue, aligned_empty, resident_bytes
from offload.sizes import MIB, PAGE, align_up
from offload.swapper.memory import limits
from tests.support import models
from tests.support.oracle import Job, least_host_memory, processes, small_pieces, start, train_step
from tests.support.processes.memory_limit import memory_limit
from tests.support.processes.process_measures import peak_in

TOLERANCE = 64 * MIB
"""What may be resident beside base and budgets: activations of one layer, libraries that come with the first step."""


def middle() -> torch.nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=8, n_embd=512, n_head=8, vocab_size=256, n_positions=64, use_cache=False)
    )


def loss(model: torch.nn.Module, step: int, micro: int) -> torch.Tensor:
    ids = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(step))
    return model(input_ids=ids, labels=ids).loss


def forked(function: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """Call `function` in a process that has imported torch and done nothing yet: its result and peak RSS in bytes."""
    return peak_in(processes(), function, *arguments)


def _train(folder: str, tiers: tuple[str, str]) -> dict[str, Any]:
    job = Job(middle, loss, steps=3, dtype="bf16")
    models.language_loss(models.gpt2().bfloat16(), 0, 0).backward()  # its libraries come with it
    engine = start(job, tiers, Path(folder))
    for step in range(job.steps):
        train_step(engine, job, step)
    before = psutil.Process().memory_info().rss
    report = engine.memory_report()
    rss = before, psutil.Process().memory_info().rss
    words = str(report)
    engine.destroy(remove=True)
    return {"report": dict(report), "rss": rss, "words": words, "host": engine.host_memory}


@pytest.mark.sample(1)
@pytest.mark.parametrize("tiers", [("nvme", "nvme"), ("cpu", "cpu"), ("none", "none")], ids=lambda tiers: tiers[0])
def test_it_adds_up_to_rss(tiers: tuple[str, str], tmp_path: Path) -> None:
    result = forked(_train, str(tmp_path), tiers)[0]
    host = result["report"]["host"]
    assert sum(nbytes for name, nbytes in host.items() if name != "rss") == host["rss"]
    before, after = sorted(result["rss"])  # threads of the engine may touch pages between the readings
    assert before - 2 * MIB <= host["rss"] <= after + 2 * MIB
    assert host["other_engines"] == 0
    assert abs(host["other"]) < TOLERANCE, "base and budgets explain RSS"
    assert 0 < host["arena"] <= align_up(result["host"]) and host["device_arena"] > 0
    assert "resident" in result["words"] and "tiles" in result["words"]


def test_classes_are_the_budget(tmp_path: Path) -> None:
    job = models.GPT2
    engine = start(job, ("nvme", "nvme"), tmp_path)
    train_step(engine, job, 0)
    report = engine.memory_report()
    assert sum(each["budget"] for each in report["classes"].values()) == report["host_memory"] == engine.host_memory
    assert all(each["used"] <= each["peak"] <= each["budget"] for each in report["classes"].values())
    # A CPU has no allocator to ask: the arena stands for the device.
    rest = 0 if engine.device.type == "cpu" else report["allocator"]["allocated"] - engine.device_memory
    assert report["device"] == {
        "allocated": engine.device_memory + rest,
        "arena": engine.device_memory,
        "in_use": testing.inspect(engine).device_arena.used_bytes,
        "other": rest,
    }
    assert rest >= 0
    second = offload.initialize(
        model=models.GPT2.model(),
        config={"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "offload": {"device": "cpu"}},
    )[0]
    assert second.memory_report()["host"]["other_engines"] > 0
    second.destroy()
    engine.destroy(remove=True)


def test_resident_bytes_are_those_that_were_touched() -> None:
    memory = aligned_empty(64 * MIB)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert resident_bytes(address, len(memory)) == 0
    memory[10 * MIB] = 1
    assert 0 < resident_bytes(address, len(memory)) <= 2 * MIB
    assert resident_bytes(address, 0) == 0


PROGRAM = """
import pathlib, sys
from offload.swapper.memory.limits import free_host_memory
file = pathlib.Path(sys.argv[1]) / "file"
file.write_bytes(bytes(1 << 20) * 48)
file.read_bytes()
(file.parent / "free").write_text(str(free_host_memory()))
"""


def test_files_that_were_read_do_not_count_against_a_limit(tmp_path: Path) -> None:
    """48 MiB of files in a limit of 112, by the kernel's own count."""
    with memory_limit(112 * MIB) as group:
        assert not group.run([sys.executable, "-c", PROGRAM, tmp_path])
        assert group.charged > 48 * MIB
    assert 64 * MIB < int((tmp_path / "free").read_text()) < 112 * MIB


@pytest.mark.parametrize(
    ("line", "folder", "files"),
    [
        ("0::/mine", "/sys/fs/cgroup/mine", {"memory.max": "1000", "memory.current": "900"}),
        (
            "4:memory:/mine",
            "/sys/fs/cgroup/memory/mine",
            {"memory.limit_in_bytes": "1000", "memory.usage_in_bytes": "900"},
        ),
    ],
)
def test_both_versions_of_cgroups_are_read(
    line: str, folder: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_children = "total_" if "memory:" in line else ""
    stat = f"anon 500\ninactive_file 1\n{of_children}inactive_file 300\n{of_children}active_file 40\n"
    content = {"/proc/self/cgroup": line, **{f"{folder}/{name}": text for name, text in files.items()}}
    testing.replace(monkeypatch, "machine.system_file", lambda path: content.get(path, ""))
    assert [limit[1:] for limit in limits.cgroup_limits()] == [(1000, 900)], "without statistics"
    content[f"{folder}/memory.stat"] = stat
    assert [limit[1:] for limit in limits.cgroup_limits()] == [(1000, 560)]
    around = folder.rpartition("/")[0]
    content |= {f"{around}/{name}": text for name, text in files.items()}
    content |= {f"{folder}/{name}": "2000" for name in files}
    assert [limit.free for limit in limits.cgroup_limits()] == [340, 100], "a group around it may be tighter"


@pytest.mark.parametrize(("name", "pages"), [("AS", "1000 7 7 7 7 7 7"), ("DATA", "7 7 7 7 7 1000 7")])
def test_a_limit_of_the_process_counts_for_it_alone(name: str, pages: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = 8000 * PAGE
    content = {"/proc/self/statm": pages}
    testing.replace(monkeypatch, "machine.system_file", lambda path: content.get(path, ""))
    number = getattr(resource, f"RLIMIT_{name}")
    monkeypatch.setattr(resource, "getrlimit", lambda asked: (nbytes if asked == number else -1, -1))
    assert limits.tightest_limit(8) == (f"RLIMIT_{name} (ulimit)", nbytes, 1000 * PAGE)


def _held(folder: Path) -> tuple[int, int, int, list[str]]:
    gc.collect()
    process = psutil.Process()
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    return process.num_fds(), process.num_threads(), threading.active_count(), files


@pytest.mark.parametrize(("first", "last"), [(15, 40), pytest.param(50, 200, marks=pytest.mark.slow)])
def test_nothing_grows_from_step_to_step(first: int, last: int, tmp_path: Path) -> None:
    job = models.GPT2._replace(dtype="bf16")
    engine = start(job, ("nvme", "nvme"), tmp_path, host_memory=least_host_memory(job, tmp_path))
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
        self.backend, self.refusals = self._inner.backend, self._inner.refusals
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
