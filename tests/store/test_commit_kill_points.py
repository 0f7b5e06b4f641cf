"""SIGKILL at each point of a commit, of a start, of taking a commit back: it goes on as if it had not been killed."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from offload.swapper.store import Store, run_status
from offload.swapper.store import store as swap_files
from tests.support import models
from tests.support.drives.fault_injection import die, die_after_writes
from tests.support.oracle import Job, Result, assert_same, dies, kill_and_resume, run, start, train_step, weights_of

DISK = ("nvme", "nvme")
JOB = models.DROPOUT._replace(dtype="bf16", steps=6)
EPOCH = 3
"""The commit in which a process is killed, where it is not the first."""


class Point(NamedTuple):
    """Where to die: at the `count`th call of `os.<call>` for a file whose name begins so."""

    call: str
    file: str
    moment: str
    """before, halfway (through the bytes of a write) or after."""
    count: int = 1


def deadly(point: Point) -> Callable[[], None]:
    """Make the point deadly in this process from the moment that what is returned is called."""
    real, armed = getattr(os, point.call), False
    left = point.count

    def call(target: Any, *arguments: Any) -> Any:
        nonlocal left
        name = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)
        if not armed or not os.path.basename(name).startswith(point.file):
            return real(target, *arguments)
        left -= 1
        if left:
            return real(target, *arguments)
        if point.moment == "halfway":
            data, offset = arguments
            real(target, memoryview(data)[: len(data) // 2], offset)
        elif point.moment == "after":
            real(target, *arguments)
        die()

    def arm() -> None:
        nonlocal armed
        armed = True

    setattr(os, point.call, call)
    return arm


def in_commit_of(epoch: int, point: Point) -> None:
    arm, commit = deadly(point), Store.commit

    def commit_and_die(store: Store, number: int, contents: Any) -> None:
        if number == epoch:
            arm()
        commit(store, number, contents)

    Store.commit = commit_and_die  # type: ignore[method-assign]


def in_call_of(method: str, point: Point) -> None:
    """`method` of a store."""
    arm, real = deadly(point), getattr(Store, method)

    def call(store: Store, *arguments: Any, **options: Any) -> Any:
        arm()
        return real(store, *arguments, **options)

    setattr(Store, method, call)


def one_commit_back(point: Point | None) -> None:
    """As where another rank has not made the last commit; die on the way, if a point is given."""
    newest = Store.newest_serial
    Store.newest_serial = lambda store: newest(store) - 1  # type: ignore[method-assign,operator]
    if point is not None:
        in_call_of("open", point)


def after_commit_of(epoch: int, writes: int) -> None:
    """In the updates of the step behind it: so many of their writes have ended."""
    commit, write = Store.commit, Store.write
    left = [0]

    def commit_and_arm(store: Store, number: int, contents: Any) -> None:
        commit(store, number, contents)
        left[0] = writes if number == epoch else 0

    def write_and_die(store: Store, *arguments: Any) -> Any:
        future = write(store, *arguments)
        if left[0]:
            future.wait()
            left[0] -= 1
            if not left[0]:
                die()
        return future

    Store.commit, Store.write = commit_and_arm, write_and_die  # type: ignore[method-assign]


# -- a process that dies ------------------------------------------------------------------------------


def _train(folder: Path, log: Path, steps: int, prepare: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    logging.disable(logging.CRITICAL)
    prepare(*arguments)
    engine = start(JOB, DISK, folder, resume="auto")
    _steps(engine, log, steps)
    engine.destroy()


def _steps(engine: Any, log: Path, steps: int) -> None:
    with log.open("a") as lines:
        while engine.global_steps < steps:
            step = engine.global_steps
            loss = train_step(engine, JOB, step)
            print(json.dumps([step, loss, engine.get_global_grad_norm()]), file=lines, flush=True)


def killed(folder: Path, prepare: Callable[..., None], *arguments: Any) -> None:
    """Train in a process that dies where `prepare` says."""
    dies(_train, folder, folder / "log", JOB.steps, prepare, arguments)


def resumed(folder: Path, expected: int, unbroken: Result) -> None:
    """Go on in this process, from the step `expected`; all steps, those done twice too, are as in the unbroken run."""
    assert run_status([folder], "default").exists == (expected >= 0)
    engine = start(JOB, DISK, folder, resume="auto")
    assert engine.global_steps == max(expected, 0)
    _steps(engine, folder / "log", JOB.steps)
    weights = weights_of(engine)
    engine.destroy(remove=True)
    found: dict[int, tuple[float, float]] = {}
    for line in (folder / "log").read_text().splitlines():
        step, *rest = json.loads(line)
        assert found.setdefault(step, rest) == rest, f"step {step} differs after a resume"
    steps = sorted(found)
    assert_same(unbroken, Result([found[s][0] for s in steps], [found[s][1] for s in steps], weights))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(JOB, DISK, tmp_path_factory.mktemp("whole"))


NONE = -1
"""There is nothing to resume, and nothing in the way of a start."""

IN_COMMIT = {
    "before the data is synced": (Point("fdatasync", "states", "before"), 0),
    "when the data is synced": (Point("fdatasync", "states", "after"), 0),
    "halfway through the blob": (Point("pwrite", "blob", "halfway"), 0),
    "before the blob is synced": (Point("fsync", "blob", "before"), 0),
    "when the blob is synced": (Point("fsync", "blob", "after"), 0),
    "halfway through the record": (Point("pwrite", "commit", "halfway"), 0),
    "before the record is synced": (Point("fsync", "commit", "before"), 1),
    "when the record is synced": (Point("fsync", "commit", "after"), 1),
}
"""And whether the commit then counts."""

IN_CREATE = {
    "before the room is reserved": Point("posix_fallocate", "states", "before"),
    "when the room is reserved": Point("posix_fallocate", "states", "after"),
    "halfway through the empty records": Point("pwrite", "commit", "halfway"),
    "halfway through the manifest": Point("pwrite", "manifest", "halfway"),
    "before the manifest has its name": Point("replace", "manifest", "before"),
    "when the manifest has its name": Point("replace", "manifest", "after"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("point", IN_COMMIT)
def test_a_kill_in_a_commit_loses_at_most_that_commit(point: str, tmp_path: Path, unbroken: Result) -> None:
    where, counts = IN_COMMIT[point]
    killed(tmp_path, in_commit_of, EPOCH, where)
    resumed(tmp_path, EPOCH - 1 + counts, unbroken)


@pytest.mark.sample(1)
@pytest.mark.parametrize("point", [*IN_COMMIT, "when the first blob is reserved", "when both blobs are reserved"])
def test_in_the_first_commit(point: str, tmp_path: Path, unbroken: Result) -> None:
    if point in IN_COMMIT:
        where, counts = IN_COMMIT[point]
        count = 3 if where[:2] == ("fsync", "blob") else 1  # the first two are of their reservation
        killed(tmp_path, in_commit_of, 0, where._replace(count=count))
    else:
        counts = 0
        killed(tmp_path, in_commit_of, 0, Point("posix_fallocate", "blob", "after", 1 + ("both" in point)))
    resumed(tmp_path, 0 if counts else NONE, unbroken)


@pytest.mark.sample(1)
@pytest.mark.parametrize("point", IN_CREATE)
def test_a_kill_in_the_start_leaves_a_store_that_starts_again(point: str, tmp_path: Path, unbroken: Result) -> None:
    killed(tmp_path, in_call_of, "create", IN_CREATE[point])
    resumed(tmp_path, NONE, unbroken)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("moment", "goes_back"),
    [
        (Point("pwrite", "commit", "before"), False),
        (Point("pwrite", "commit", "halfway"), True),
        (Point("fsync", "commit", "before"), True),
        (Point("fsync", "commit", "after"), True),
    ],
)
def test_while_a_commit_is_taken_back(moment: Point, goes_back: bool, tmp_path: Path, unbroken: Result) -> None:
    engine = start(JOB, DISK, tmp_path)
    _steps(engine, tmp_path / "log", EPOCH)
    engine.destroy()
    killed(tmp_path, one_commit_back, moment)
    resumed(tmp_path, EPOCH - goes_back, unbroken)


def test_when_a_commit_was_taken_back(tmp_path: Path, unbroken: Result) -> None:
    """The step is done again, over the slots of the one that was taken back, and killed half done."""
    engine = start(JOB, DISK, tmp_path)
    _steps(engine, tmp_path / "log", EPOCH)
    engine.destroy()
    killed(tmp_path, _back_and_dead, 7)
    resumed(tmp_path, EPOCH - 1, unbroken)


def _back_and_dead(writes: int) -> None:
    one_commit_back(None)
    die_after_writes(writes)


@pytest.mark.sample(1)
@pytest.mark.parametrize("writes", [1, 2, 9])
def test_in_the_first_update_after_a_commit(writes: int, tmp_path: Path, unbroken: Result) -> None:
    killed(tmp_path, after_commit_of, EPOCH, writes)
    resumed(tmp_path, EPOCH, unbroken)


def test_while_the_run_is_removed(tmp_path: Path, unbroken: Result) -> None:
    """It has ended, and is not begun again by `"resume": "auto"`; see `test_power_cut.py` for each moment."""
    killed(tmp_path, _dead_in_removal)
    status = run_status([tmp_path], "default")
    assert not status.exists and status.finished is not None and status.finished["steps"] == JOB.steps
    start(JOB, DISK, tmp_path).destroy(remove=True)


def _dead_in_removal() -> None:
    def remove_half(folder: Path) -> None:
        (folder / "states").unlink()
        die()

    swap_files.remove_files = remove_half  # type: ignore[assignment]
    Store.close = lambda store: (store.note_end({"steps": JOB.steps}), store.remove())  # type: ignore


# -- random moments -----------------------------------------------------------------------------------

PLACEMENTS = (DISK, ("cpu", "nvme"), ("nvme", "cpu"), ("none", "nvme"), ("cpu", "cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["step", {"every": 3}], ids=str)
@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_a_hundred_random_moments(placement: tuple[str, str], durability: Any, tmp_path: Path) -> None:
    """Ten for each of ten ways to train; requests come late, so that most moments lie within updates and commits."""
    job = models.DROPOUT._replace(dtype="bf16", steps=160, accumulation=2)
    options = {"durability": durability}
    seed = sum(map(ord, str((placement, durability))))
    broken = kill_and_resume(job, placement, tmp_path, kills=10, seed=seed, late=0.01, **options)
    assert_same(run(job, placement, tmp_path / "whole"), broken, "unbroken and killed")


@pytest.mark.sample(1)
@pytest.mark.parametrize("when", [0, 3, 7])
def test_an_optimizer_without_states_has_two_slots_too(when: int, tmp_path: Path) -> None:
    """In fp32 its units have weights alone, as frozen ones do: what a commit names must not be written over."""
    job = JOB._replace(dtype="fp32", optimizer="SGD", lr=0.1, weight_decay=0.0)
    unbroken = run(job, DISK, tmp_path / "whole")
    dies(_die_in_a_write, job, tmp_path / "run", when)
    engine = start(job, DISK, tmp_path / "run", resume="must")
    first = engine.global_steps
    losses = [train_step(engine, job, step) for step in range(first, job.steps)]
    assert losses == unbroken.losses[first:]
    engine.destroy(remove=True)


def _die_in_a_write(job: Job, folder: Path, when: int) -> None:
    write, left = Store.write, when

    def deadly_write(self: Store, *arguments: object) -> object:
        nonlocal left
        if self.durable is not None and self.durable.step >= EPOCH:
            left -= 1
            if left < 0:
                die()
        return write(self, *arguments)  # type: ignore[arg-type]

    Store.write = deadly_write  # type: ignore[method-assign,assignment]
    run(job, DISK, folder)
