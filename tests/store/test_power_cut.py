"""After a power cut at any moment the store contains the last commit that had returned, or the one under way."""

from __future__ import annotations

import errno
import itertools
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from offload import testing
from offload.aio import IoQueue
from offload.errors import OffloadError
from offload.swapper.store import StoreSpec, run_status
from offload.swapper.store.folder import sync_names
from offload.swapper.store.format import read_records
from tests.store.test_store import (
    PAGE,
    SPEC,
    TRAINABLE,
    Contents,
    Run,
    everything_that_runs_do,
    label_of,
    several_updates_between_commits,
)
from tests.support.drives.power_cut import (
    Disk,
    Event,
    Image,
    all_but,
    everything,
    nothing,
    only,
    put,
    some,
    some_events,
)
from tests.support.drives.write_recorder import PlainQueue, Recorder, RecordingQueue
from tests.support.sampling import drawn


@pytest.fixture(scope="module")
def queue() -> Iterator[IoQueue]:
    with IoQueue() as queue:
        yield queue


@pytest.fixture
def room() -> Iterator[Path]:
    """A folder in memory where there is one: an image is written and read thousands of times."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="offload-power-", dir=memory if memory.is_dir() else None))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def _small_drives(equal_drives: None, monkeypatch: pytest.MonkeyPatch) -> None:
    testing.replace(monkeypatch, "size.stripe", PAGE)


# -- what a run does ----------------------------------------------------------------------------------


Allowed = tuple[str | None, ...]
"""The commits of which one must be found; None is "none yet"."""

Log = tuple[list[Event], dict[str, Contents]]


def recorded(
    root: Path,
    drives: int,
    queue: Any,
    work: Callable[[Run], None],
    seed: int = 1,
    commits: dict[str, Contents] | None = None,
    begins: Allowed = (None,),
    just_made: bool = False,
    spec: StoreSpec = SPEC,
) -> Log:
    """What was done under `root`, where at first one of the commits `begins` is, and what the commits hold.

    With `just_made` the user has made the folders of the drives a moment before, and has not synced them.
    """
    root.mkdir(exist_ok=True)
    recorder, commits = Recorder(root), {} if commits is None else commits
    recorder.note(*begins)
    with recorder.recording():
        for drive in range(drives if just_made else 0):
            (root / "drives" / str(drive)).mkdir(parents=True)
        run = Run(root, drives, RecordingQueue(queue, recorder), commits, seed, recorder.note, spec)
        work(run)
        run.store.close()
    recorder.check()
    return recorder.log, commits


# -- what a cut leaves --------------------------------------------------------------------------------


class Case(NamedTuple):
    """What a cut may leave after the event `at`."""

    at: int
    image: Image
    allowed: Allowed


def cases(log: Sequence[Event], random_cuts: int, seed: int = 0) -> Iterator[Case]:
    """Different images, for a cut after each event."""
    chance, disk, seen = random.Random(seed), Disk(), set()
    allowed: Allowed = ()
    for at, event in enumerate(log):
        if event.what == "note":
            allowed = event.arguments
        disk.carry_out(event)
        if not allowed:  # what was there before the run
            continue
        cuts = [everything, nothing, only(disk.events), all_but(disk.events)]
        cuts += [some(chance, chance.choice([0.1, 0.5, 0.9])) for _ in range(random_cuts)]
        cuts += [some_events(chance, chance.choice([0.3, 0.7])) for _ in range(random_cuts)]
        for image in itertools.chain(map(disk.image, cuts), one_drive_behind(disk)):
            key = hash((allowed, tuple(sorted(image.items()))))
            if key not in seen:
                seen.add(key)
                yield Case(at, image, allowed)


def one_drive_behind(disk: Disk) -> Iterator[Image]:
    """Images of a cut after which one drive has what was synced, and all others everything."""
    behind, ahead = disk.image(nothing), disk.image(everything)
    for drive in sorted(path for path in ahead if re.fullmatch(r"drives/\d+", path)):
        rest = {path: data for path, data in ahead.items() if not f"{path}/".startswith(f"{drive}/")}
        yield rest | {path: data for path, data in behind.items() if f"{path}/".startswith(f"{drive}/")}


def verdict(case: Case, commits: Mapping[str, Contents], drives: int, room: Path, goes_on: bool = False) -> str | None:
    """What is wrong when the real store opens the image; None where nothing is. With `goes_on` it then trains on."""
    root = room / "image"
    put(case.image, root)
    run = Run(root, drives, PlainQueue(), dict(commits))
    try:
        records = read_records(run.store.folders[0] / "commit")
        assert records.doubt is None or records.invalid_pages, f"no record is lost, and {records.doubt}"
        _open_or_begin(run, case.allowed)
        run.compare()
        if goes_on:
            for unit in TRAINABLE:
                run.update(unit)
            run.commit()
            run.resume()
            run.compare()
    except (AssertionError, OffloadError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        run.store.close()
        shutil.rmtree(root)
    return None


def _open_or_begin(run: Run, allowed: Allowed) -> None:
    """What the engine does with `"resume": "auto"`."""
    status = run_status(run.paths, "run")
    assert status.finished or status.exists == (run.store.newest_serial() is not None)
    if not status.exists:
        assert None in allowed, f"nothing is there, expected {allowed}"
        run.create()
        run.commit()
        run.resume()
        return
    run.open()
    assert run.last in allowed, f"{run.last} is there, expected {allowed}"


def faults(log: Log, drives: int, room: Path, tried: Iterable[Case]) -> Iterator[str]:
    """What is wrong in each case where something is; every fourth trains on."""
    for number, case in enumerate(tried):
        wrong = verdict(case, log[1], drives, room, goes_on=number % 4 == 0)
        if wrong is not None:
            event = log[0][case.at]
            yield f"a cut after event {case.at} ({event.what} of {event.path}): {wrong}"


def expect_none(log: Log, drives: int, room: Path, random_cuts: int, seed: int = 0) -> int:
    """Fail where a cut loses something; the number of images, of which a third is opened without `--whole`."""
    tried = list(cases(log[0], random_cuts, seed))
    wrong = list(itertools.islice(faults(log, drives, room, drawn(tried, -(-len(tried) // 3))), 5))
    assert not wrong, "\n".join(wrong)
    return len(tried)


@pytest.mark.sample(1)
@pytest.mark.parametrize("drives", [1, 2])
def test_a_power_cut_at_any_moment(drives: int, tmp_path: Path, room: Path, queue: IoQueue) -> None:
    log = recorded(tmp_path, drives, queue, everything_that_runs_do)
    assert expect_none(log, drives, room, 0) > 300


def test_a_power_cut_between_commits_of_units_with_three_slots(tmp_path: Path, room: Path, queue: IoQueue) -> None:
    spec = SPEC._replace(shadowed=frozenset({0, 1}))
    log = recorded(tmp_path, 1, queue, several_updates_between_commits, spec=spec)
    assert expect_none(log, 1, room, 0) > 100


def edits_on_a_grid(run: Run) -> None:
    run.create()
    run.commit()
    for unit in TRAINABLE:
        run.update(unit)
    run.commit()
    for unit in (0, 1, 0):
        run.edit(unit)
    run.take_back()


def without_the_commit_before(log: Log, drives: int, room: Path, cuts: int) -> tuple[int, list[str]]:
    """Returns the number of images of a cut behind the second commit, and what is wrong with the first in them."""
    second = next(at for at, event in enumerate(log[0]) if event.what == "note" and event.arguments == ("commit 1",))
    later = [case for case in cases(log[0], cuts) if case.at > second]
    wrong = []
    for case in later:
        root = room / "image"
        put(case.image, root)
        run = Run(root, drives, PlainQueue(), dict(log[1]))
        try:
            assert run.store.newest_serial() in (1, 2)
            run.last, run.now = label_of(run.store.open(1)), dict(log[1]["commit 0"])
            assert run.last == "commit 0"
            run.compare()
        except (AssertionError, OffloadError) as error:
            wrong.append(f"a cut after event {case.at} ({log[0][case.at].what}): {error}")
        finally:
            run.store.close()
            shutil.rmtree(root)
    return len(later), wrong


@pytest.mark.sample(1)
@pytest.mark.parametrize("drives", [1, 2])
def test_a_power_cut_after_edits_on_a_grid_leaves_the_commit_before(
    drives: int, tmp_path: Path, room: Path, queue: IoQueue
) -> None:
    """Another process may not have made the last one, and all then resume from the one before."""
    log = recorded(tmp_path, drives, queue, edits_on_a_grid)
    count, wrong = without_the_commit_before(log, drives, room, 1)
    assert count > 50 and not wrong, wrong[:5]


@pytest.mark.sample(1)
@pytest.mark.parametrize("just_made", [False, True])
def test_a_power_cut_while_a_run_begins(just_made: bool, tmp_path: Path, room: Path, queue: IoQueue) -> None:
    """Without a commit the next start begins anew: no drive looks like one of a run whose first drive is missing."""

    def work(run: Run) -> None:
        run.create()
        run.commit()
        run.start_over()
        run.commit()

    expect_none(recorded(tmp_path, 2, queue, work, just_made=just_made), 2, room, 0)


@pytest.mark.sample(2)
@pytest.mark.parametrize("drives", [1, 2])
@pytest.mark.parametrize("end", ["start_over", "delete"])
def test_a_power_cut_while_a_run_that_did_not_end_is_deleted(
    end: str, drives: int, tmp_path: Path, room: Path, queue: IoQueue
) -> None:
    """It can be resumed, or nothing is in the way of a start: a deletion does not look like lost records."""

    def work(run: Run) -> None:
        run.create()
        for _ in range(2):
            run.commit()
            run.update(0)
        run.commit()
        getattr(run, end)()

    log = recorded(tmp_path, drives, queue, work)
    found = [case for case in cases(log[0], 1) if None in case.allowed]
    assert len(found) > 40 and not list(faults(log, drives, room, found))


def test_names_are_synced_behind_a_link_and_above_a_folder_that_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed" / "swap" / "run").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "closed" / "swap")
    synced, real = [], os.open

    def open_(path: Any, *arguments: Any) -> int:
        if Path(path).name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *arguments)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").resolve()))
    sync_names(tmp_path / "link" / "run")
    assert synced[:2] == [tmp_path / "closed" / "swap", tmp_path]
    assert synced[-1].is_mount()


@pytest.mark.slow
def test_a_power_cut_while_a_run_is_removed(tmp_path: Path, room: Path, queue: IoQueue) -> None:
    def work(run: Run) -> None:
        for _ in range(2):
            run.create()
            run.commit()
            run.update(0)
            run.commit()
            run.remove()
            run.restart()

    expect_none(recorded(tmp_path, 2, queue, work), 2, room, 2)


def random_run(steps: int) -> Callable[[Run], None]:
    def work(run: Run) -> None:
        run.create()
        run.commit()
        run.anything(steps)

    return work


def one_after_the_other(seed: int, cuts: int, root: Path, room: Path) -> None:
    """Each run begins with what a cut has left of the one before."""
    chance = random.Random(seed)
    drives, commits = chance.choice([1, 2]), {}  # type: ignore[var-annotated]
    case = Case(0, {}, (None,))
    for number in range(cuts):
        folder = root / str(number)
        put(case.image, folder)

        def work(run: Run) -> None:
            if run.store.newest_serial() is None:
                run.create()
                run.commit()
            else:
                run.open()
            run.compare()
            run.anything(3)

        log = recorded(folder, drives, PlainQueue(), work, seed * 100 + number, commits, case.allowed)
        all_cases = list(cases(log[0], 2, seed))
        case = chance.choice(all_cases)
        wrong = verdict(case, commits, drives, room)
        assert wrong is None, f"seed {seed}, cut {number}: {wrong}"
        shutil.rmtree(folder)


def test_cut_again_and_again(room: Path) -> None:
    for seed in drawn(range(300), 2):
        one_after_the_other(seed, 4, room / "runs", room)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_a_power_cut_at_any_moment_of_any_run(seed: int, room: Path) -> None:
    drives = 1 + seed % 3
    expect_none(recorded(room / "run", drives, PlainQueue(), random_run(12), seed), drives, room, 12, seed)
