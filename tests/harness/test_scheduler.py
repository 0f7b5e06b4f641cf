"""The scheduler of threads: a seed fixes the order, and what no order may do is found and reduced."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.storm.scheduler import Listed, Scheduler, Seeded, Stuck, shrunk

Program = Callable[[Scheduler], object]


def run(program: Program, chooser: Listed | Seeded, patience: int = 1000) -> tuple[list[str], str, Any]:
    """Returns the trace of a program, how it failed (or nothing), and its result."""
    scheduler = Scheduler(chooser, patience)
    before = threading.active_count()
    failure, result = "", None
    try:
        result = program(scheduler)
        scheduler.close()
    except (Stuck, AssertionError) as error:
        failure = str(error)
        if scheduler.failure is None:
            scheduler.close()
    scheduler.join()
    assert threading.active_count() == before, "a thread goes on"
    return scheduler.trace, failure, result


def first_failure(program: Program, seeds: int = 300) -> tuple[dict[int, int], str]:
    """Returns the choices of the first seed with which a program fails, and how."""
    for seed in range(seeds):
        chooser = Seeded(seed)
        _, failure, _ = run(program, chooser)
        if failure:
            return chooser.choices, failure
    raise AssertionError(f"none of {seeds} seeds fails")


def in_two_threads(scheduler: Scheduler, *works: Callable[[], object]) -> None:
    threads = [scheduler.threads.Thread(target=work, name=f"thread {number}") for number, work in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def counting(scheduler: Scheduler) -> None:
    """Two threads count up without a lock."""
    count = [0]

    def add() -> None:
        for _ in range(3):
            seen = count[0]
            scheduler.point("between read and write")
            count[0] = seen + 1

    in_two_threads(scheduler, add, add)
    assert count[0] == 6, f"{count[0]} of 6 were counted"


def crossing(scheduler: Scheduler) -> None:
    """Two threads take two locks in both orders."""
    locks = [scheduler.threads.Lock(), scheduler.threads.Lock()]

    def take(first: int) -> None:
        for _ in range(3):
            with locks[first], locks[1 - first]:
                pass

    in_two_threads(scheduler, lambda: take(0), lambda: take(1))


def forgetting(scheduler: Scheduler) -> None:
    """A thread looks whether there is work, and then clears the notice that there is some."""
    work, notice = [3], scheduler.threads.Event()

    def serve() -> None:
        while work[0]:
            notice.wait()
            work[0] -= 1
            notice.clear()

    def ask() -> None:
        for _ in range(3):
            notice.set()

    in_two_threads(scheduler, serve, ask)


@pytest.mark.parametrize("program", [counting, crossing, forgetting])
def test_a_seed_fixes_the_order(program: Program) -> None:
    traces = []
    for seed in range(20):
        chooser = Seeded(seed)
        first = run(program, chooser)
        assert run(program, Seeded(seed)) == first
        assert run(program, Listed(chooser.choices)) == first
        traces.append(first[0])
    assert len(set(map(tuple, traces))) > 2


@pytest.mark.parametrize(
    ("program", "words", "most"),
    [
        (counting, "of 6 were counted", 2),
        (crossing, "nobody can go on: caller at end of thread 0; thread 0 at lock of", 2),
        (forgetting, "nobody can go on: caller at end of thread 0; thread 0 at an event", 1),
    ],
)
def test_a_fault_of_the_order_is_found_and_reduced_to_its_last_choices(program: Program, words: str, most: int) -> None:
    choices, failure = first_failure(program)
    assert words in failure
    fewest = shrunk(choices, lambda fewer: words in run(program, Listed(fewer))[1])
    assert len(fewest) <= most
    assert words in run(program, Listed(fewest))[1]


def test_no_progress_is_a_failure() -> None:
    def spin(scheduler: Scheduler) -> None:
        done = scheduler.threads.Event()

        def look() -> None:
            while not done.is_set():
                scheduler.point("looks again")

        in_two_threads(scheduler, look)

    assert "no progress: caller at end of thread 0; thread 0 at looks again" in run(spin, Listed())[1]

    def advance(scheduler: Scheduler) -> int:
        for _ in range(5_000):
            scheduler.point("works")
            scheduler.progress()
        return 5_000

    assert run(advance, Listed())[2] == 5_000


def test_time_passes_where_all_wait() -> None:
    def wait(scheduler: Scheduler) -> list[float]:
        began, ended = scheduler.clock.monotonic(), []
        never = scheduler.threads.Event()

        def late(seconds: float) -> None:
            assert not never.wait(seconds)
            ended.append(round(scheduler.clock.monotonic() - began))

        in_two_threads(scheduler, lambda: late(600), lambda: late(60))
        return ended

    assert run(wait, Listed())[2] == [60, 600]


def test_only_threads_of_the_scheduler_pass_points() -> None:
    errors: list[str] = []
    scheduler = Scheduler(Listed())

    def stranger() -> None:
        try:
            scheduler.point("somewhere")
        except AssertionError as error:
            errors.append(str(error))

    thread = threading.Thread(target=stranger, name="stranger")
    thread.start()
    thread.join()
    assert errors == ["stranger does not belong to the scheduler, and is at somewhere"]
