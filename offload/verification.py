"""`offload verify`: every byte of a run's last commit, compared with its checksum."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from offload.aio import StripedFile
from offload.engine.source import check_can_be_read
from offload.errors import IoError, StoreError
from offload.sizes import format_size
from offload.swapper.store import Queue, rank_folders
from offload.swapper.store.check import Damage, damages
from offload.swapper.store.folder import Lock
from offload.swapper.store.look import Commit, Found, Wrong, look


class RankReport(NamedTuple):
    """What was found in one rank's folder."""

    folder: Path
    rank: int
    serial: int | None
    epoch: int | None
    """Of the commit that was read: the last that is whole on all ranks, so that a resume would take it."""
    nbytes: int
    """Compared, of that commit."""
    wrong: tuple[Wrong, ...]
    """Files that are not what was written."""
    damages: tuple[Damage, ...]
    places: tuple[tuple[tuple[str, int, int], ...], ...]
    """For each damage the file, offset and bytes on each drive."""
    before: str | None
    """The commit before, in words; None where there is none."""

    @property
    def whole(self) -> bool:
        return not (self.wrong or self.damages)


class Report(NamedTuple):
    """What was found in a run's folder."""

    path: Path
    epoch: int | None
    ranks: tuple[RankReport, ...]

    @property
    def whole(self) -> bool:
        return all(rank.whole for rank in self.ranks)

    def lines(self, most: int) -> list[str]:
        """In words, with at most so many damages of each rank."""
        found: list[str] = []
        for each in self.ranks:
            found += [f"rank {each.rank}: damaged: {wrong}" for wrong in each.wrong]
            found += [f"rank {each.rank}: damaged: {damage}" for damage in each.damages[:most]]
            if len(each.damages) > most:
                found.append(f"rank {each.rank}: and {len(each.damages) - most} more")
            if each.epoch is None:
                found.append(f"rank {each.rank}: no commit is whole; it cannot be resumed, go back to a checkpoint")
            else:
                state = f"damaged in {len(each.damages)} places" if each.damages else "whole"
                before = f"; {each.before}" if each.before else ""
                words = f"epoch {each.epoch}, commit {each.serial}, {format_size(each.nbytes)}"
                found.append(f"rank {each.rank}: {words}: {state}{before}")
        return found

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "path": str(self.path),
            "whole": self.whole,
            "epoch": self.epoch,
            "ranks": [
                {
                    "rank": each.rank,
                    "serial": each.serial,
                    "epoch": each.epoch,
                    "bytes": each.nbytes,
                    "before": each.before,
                    "files": [wrong._asdict() for wrong in each.wrong],
                    "damages": [
                        {**damage._asdict(), "places": [list(place) for place in places]}
                        for damage, places in zip(each.damages, each.places, strict=True)
                    ],
                }
                for each in self.ranks
            ],
        }


class Checking:
    """A run whose ranks are locked while they are read. Raises `StoreError` where it cannot be verified."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._open = contextlib.ExitStack()
        try:
            folders = rank_folders(run)
            if not folders:
                raise StoreError(f"{run} holds no rank<r> folder: give the folder of a run that has swap files")
            for folder in folders:
                self._open.enter_context(Lock(folder))
            self._found = [look(folder) for folder in folders]
            for each in self._found:
                check_can_be_read(each)
                if not each.commits and not each.wrong:
                    raise StoreError(f"{each.folder}: nothing was committed yet")
        except BaseException:
            self._open.close()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes that will be read at most."""
        return sum(_nbytes(c) for each in self._found for c in each.commits)

    def run(self, queue: Queue, progress: Callable[[int], None] = lambda _: None) -> Report:
        """Read and compare all."""
        newest = [_newest_whole(each) for each in self._found]
        serial = min((commit.record.serial for commit in newest if commit is not None), default=0)
        ranks = [_check(each, serial, queue, progress) for each in self._found]
        lost = any(rank.epoch is None for rank in ranks)
        return Report(self._run, None if lost else ranks[0].epoch, tuple(ranks))

    def close(self) -> None:
        """Give the locks back; idempotent."""
        self._open.close()

    def __enter__(self) -> Checking:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _newest_whole(found: Found) -> Commit | None:
    return next((commit for commit in found.commits if commit.blob is not None), None)


def _check(found: Found, serial: int, queue: Queue, progress: Callable[[int], None]) -> RankReport:
    wrong = list(found.wrong)
    bad: list[Damage] = []
    places: list[tuple[tuple[str, int, int], ...]] = []
    before: str | None = None
    commit = next((c for c in found.commits if c.record.serial == serial and c.blob is not None), None)
    if commit is None:
        commit = _newest_whole(found)
        have = ", ".join(str(c.record.serial) for c in found.commits) or "none"
        wrong.append(Wrong(str(found.folder), f"it holds commits {have}; the last that is whole elsewhere is {serial}"))
    if commit is None:
        return RankReport(found.folder, found.rank, None, None, 0, tuple(found.wrong), (), (), None)
    record = commit.record
    try:
        with found.open_states() as file:
            for damage in _damages(found, commit, file, queue, progress):
                bad.append(damage)
                places.append(_places(file, damage))
            other = next((c for c in found.commits if c.record.serial < record.serial), None)
            if other is not None:
                before = _before(found, other, file, queue, progress)
    except IoError as error:  # missing: it is among what is wrong, unless it cannot be opened for another reason
        if not any(each.path.startswith(error.path) or error.path.startswith(each.path) for each in wrong):
            wrong.append(Wrong(error.path, str(error)))
    return RankReport(
        found.folder,
        found.rank,
        record.serial,
        record.epoch,
        _nbytes(commit),
        tuple(wrong),
        tuple(bad),
        tuple(places),
        before,
    )


def _damages(
    found: Found, commit: Commit, file: StripedFile, queue: Queue, progress: Callable[[int], None]
) -> Iterator[Damage]:
    assert found.manifest is not None
    spec = found.manifest.spec
    return damages(file, queue, spec.extents(), commit.record.slots, commit.table, spec.title, progress)


def _before(found: Found, commit: Commit, file: StripedFile, queue: Queue, progress: Callable[[int], None]) -> str:
    """Whether one could still go back. The step after the last commit writes over it, which is no damage."""
    epoch = f"the commit before, epoch {commit.record.epoch},"
    if commit.blob is None:
        return f"{epoch} is already written over"
    looking = _damages(found, commit, file, queue, progress)
    try:
        return f"{epoch} is already written over" if next(looking, None) else f"{epoch} is whole too"
    finally:
        looking.close()  # type: ignore[attr-defined]  # what it reads ahead ends before the file is closed


def _places(file: StripedFile, damage: Damage) -> tuple[tuple[str, int, int], ...]:
    parts = file.parts()
    return tuple(
        (parts[drive].path, offset, nbytes)
        for drive, offset, nbytes in file.layout.places(damage.offset, damage.nbytes)
    )


def _nbytes(commit: Commit) -> int:
    return sum(stretch.nbytes for slot in commit.table.values() for stretch in slot)
