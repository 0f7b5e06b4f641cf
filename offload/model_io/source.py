"""Reads weights and states of a run from the stores of all its ranks, without the model's code."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from offload.aio.protocols import Pending, Queue
from offload.checkpoint.files import refuse_rank
from offload.errors import IoError, StoreError
from offload.notices import shell_command
from offload.states import State
from offload.swapper.store import Compared, bytes_of, rank_folders, repair
from offload.swapper.store.folder import FINISHED, RESHARDED, Lock, Use, removal_begun
from offload.swapper.store.format import Extents, Passages, StoreManifest, check_rank, check_whole, last_of_all
from offload.swapper.store.inspection import Commit, RankFiles, is_rank, look
from offload.swapper.store.recovery import Undo, check_one_run

if TYPE_CHECKING:
    import torch

    from offload.layout.flat_layout import UnitLayout
    from offload.layout.modes import Mode
    from offload.swapper.store.model_files import ModelFiles


# -- weight source -------------------------------------------------------------------------------------


class Source(Protocol):
    """A source of weights for an export."""

    description: Mapping[str, Any]
    """Made by `offload.layout.fingerprint.describe`."""
    about: Mapping[str, Any]
    step: int
    frozen: bool
    """True if frozen weights are included."""
    buffers: Mapping[str, torch.Tensor]
    """Persistent buffers of the model, by name."""

    def read(self, rank: int, unit: int, state: State, start: int, buffer: memoryview) -> Pending:
        """Starts to fill `buffer` from a rank's partition. `wait` of the result raises `IoError` if bytes are damaged.

        A partition must be read in order, so that its bytes can be compared with their checksums.

        Args:
            buffer: Filled; owned by the caller, and in use until the read has ended.
        """
        ...

    def close(self) -> None: ...


class StoreSource:
    """The last commit that all ranks of a run have, as source of weights. Changes nothing; implements `Source`.

    The run is locked until `close`. Damage is noticed as the bytes are read.

    Args:
        looked: The ranks' folders, if the caller has inspected them and keeps them locked. None to do both here.
        at: Number of the commit; None for the last one.
    """

    def __init__(
        self, run: Path, queue: Queue, looked: Sequence[RankFiles] | None = None, at: int | None = None
    ) -> None:
        # Imported late: the module imports torch, which `offload verify` does not need.
        from offload.engine.snapshot import Snapshot

        self._queue = queue
        self._open = contextlib.ExitStack()
        try:
            # All folders are locked before one is inspected: a commit in progress would change them.
            all_ranks = ranks_of(run, lock_and_look(run, self._open) if looked is None else looked)
            self.commits = commits_of_all(all_ranks, at)
            """Each rank's part of the commit."""
            self.wrong = [wrong for looked_rank in all_ranks for wrong in looked_rank.wrong]
            """Files that are damaged or missing, and that this commit does not need: a later step may be lost."""
            self.run_id = known_run_id(all_ranks)
            """Id of the run; None if unknown."""
            self.folders = [looked_rank.folders for looked_rank in all_ranks]
            """Each rank's folder on each drive."""
            self._files = [self._open.enter_context(looked_rank.open_states()) for looked_rank in all_ranks]
            self._specs = [_manifest(looked_rank).spec for looked_rank in all_ranks]
            self._places = [spec.places() for spec in self._specs]
            self._tables = [commit.table for commit in self.commits]
            for looked_rank, table, places in zip(all_ranks, self._tables, self._places, strict=True):
                check_whole(table, places)
                self._layouts, self._mode = _checked_layouts(_manifest(looked_rank))
            self._copied = [
                self._open.enter_context(Undo(looked_rank.folder).slots(file, commit.record, places, table))
                for looked_rank, file, commit, places, table in zip(
                    all_ranks, self._files, self.commits, self._places, self._tables, strict=True
                )
            ]
            # Pending comparisons of each rank's file.
            self._passages = [Passages() for _ in all_ranks]
            first = _manifest(all_ranks[0])
            self.files: Sequence[Mapping[str, Any]] = [spec.files for spec in self._specs]
            """The model's own files that have frozen weights of each rank; see `StoreSpec.files`."""
            self.description, self.about = first.spec.fingerprint, first.spec.about
            self.step, self.frozen = self.commits[0].record.step, True
            self.progress = Snapshot.unpack(self.commits[0].contents)
            self.progress.check_fits(self._layouts)
            self.buffers, self.client_state = self.progress.buffers, self.progress.facts["client_state"]
        except BaseException:
            self._open.close()
            raise

    def read(self, rank: int, unit: int, state: State, start: int, buffer: memoryview) -> Pending:
        if unit in self._units_in_files:
            share = self._layouts[unit].frozen(rank, len(self._places))
            first = share.start * self._layouts[unit].mode_in(self._mode).weight_dtype.itemsize
            return _Reads(self._model_files[rank].read(unit, first + start, buffer))
        slot = self.commits[rank].record.slots[unit]
        place = self._places[rank][unit][state][slot]
        assert start + len(buffer) <= place.nbytes
        copied = self._copied[rank].get((unit, state))
        file, offset = bytes_of(self._files[rank], place, start, len(buffer), copied)
        future = self._queue.read(file, offset, buffer, checksum=True)
        return Compared(future, partial(self._compare, rank, unit, state, start, place))

    @functools.cached_property
    def _units_in_files(self) -> frozenset[int]:
        return frozenset(unit["unit"] for files in self.files for unit in files.get("units", ()))

    @functools.cached_property
    def _model_files(self) -> list[ModelFiles]:
        """The model's own files of each rank, opened at the first read: an export of adapters needs none."""
        # Imported late: the module imports torch, which `offload verify` does not need.
        from offload.swapper.store.model_files import ModelFiles

        of_ranks = []
        for recorded in self.files:
            files = self._open.enter_context(contextlib.closing(ModelFiles.of_run(recorded, self._queue)))
            files.expect(recorded, self.folders[0][0].parent)
            of_ranks.append(files)
        return of_ranks

    def _compare(self, rank: int, unit: int, state: State, start: int, place: Extents, nbytes: int, crc: int) -> None:
        """Compares bytes that were read with their checksums, and raises `IoError` if they differ.

        Bytes that end within a checksummed range are compared later, together with the rest of the range.
        """
        key = (unit, state)
        right, _ = self._passages[rank].compare(key, self._tables[rank][key], start, nbytes, crc)
        if not right:
            path, what = self._files[rank].path, f"use {state.value} of {self._specs[rank].title(unit)},"
            run = self.folders[rank][0].parent
            raise IoError(path, place.offset(start), nbytes, errno.EBADMSG, what, repair.cure(run))

    def close(self) -> None:
        self._open.close()


class _Reads(NamedTuple):
    """Reads that together fill a buffer."""

    futures: Sequence[Pending]

    def done(self) -> bool:
        return all(future.done() for future in self.futures)

    def wait(self) -> int:
        return sum(future.wait() for future in self.futures)


def lock_and_look(run: Path, stack: contextlib.ExitStack, use: Use = "read") -> list[RankFiles]:
    """Locks and inspects each rank's folder of a run.

    Args:
        stack: Receives the locks; other processes are kept out until it is closed.
    """
    if (run / RESHARDED).is_file():
        raise StoreError(
            f"{run} was about to change its number of ranks when it was interrupted: start the run again with "
            '"resume": "auto", which completes that first'
        )
    folders = [folder for folder in rank_folders(run) if is_rank(folder)]
    if not folders:
        refuse_rank(run)
        if (run / FINISHED).is_file():
            raise StoreError(
                f"the run in {run} has ended, and its swap files were removed at the end: give the folder of its model "
                "(offload train --output), or train again with --keep, or with engine.destroy(remove=False)"
            )
        raise StoreError(
            f"{run} contains neither swap files (no rank<r> folder) nor a checkpoint: give a run's folder, or a "
            "folder that save_checkpoint has written"
        )
    for folder in folders:
        # `Lock` raises if another process holds the lock. The caller's stack releases the locks taken so far.
        stack.enter_context(Lock(folder, use))
    for folder in folders:
        if removal_begun(folder):
            raise StoreError(
                f"{folder} is what an interrupted deletion of the run has left, and nothing in it can be read: "
                f"`{shell_command('rm', run)}` deletes the rest, and a start begins the run anew"
            )
    return [look(folder) for folder in folders]


def ranks_of(run: Path, folders: Sequence[RankFiles], *, replicas: bool = False) -> list[RankFiles]:
    """Returns the ranks of a run, in the order of `folders`, without those left by an earlier run with more ranks.

    Args:
        replicas: True for the ranks of all replicas, whose states are equal; False for the first replica's ranks.
    """
    manifest = next((rank.manifest for rank in folders if rank.manifest is not None), None)
    size = len(folders)
    if manifest is not None:
        size = manifest.spec.ranks if replicas else int(manifest.spec.fingerprint.get("world_size", 1))
    ranks = [rank for rank in folders if rank.rank < size]
    for rank in ranks:
        if rank.other_format is not None:
            raise StoreError(f"{rank.folder} has {rank.other_format}")
        if rank.drive:
            first = "" if rank.manifest is None else f" ({rank.manifest.drives[0]})"
            raise StoreError(f"{rank.folder} is on drive {rank.drive} of its run; give its folder on the first{first}")
        if rank.manifest is not None and rank.manifest.spec.slots == 1:
            raise StoreError(f'{rank.folder} was made with "durability": "none": nothing in it was ever committed')
        # If the folder were read as another rank's, its bytes would be taken for other parameters.
        if rank.manifest is not None:
            check_rank(rank.manifest, rank.rank, rank.folder)
    check_one_run([(rank.folder, rank.run_id) for rank in ranks])
    # All ranks are needed, because the weights of a unit are divided among them.
    missing = sorted(set(range(size)) - {rank.rank for rank in ranks})
    if missing:
        raise StoreError(
            f"{run} contains no folder of rank {', '.join(map(str, missing))} of {size}: copy the folders of all "
            "ranks into one"
        )
    if len({json.dumps(rank.manifest.spec.fingerprint) for rank in ranks if rank.manifest is not None}) > 1:
        raise StoreError(
            f"the ranks' folders in {run} belong to different models or settings; give the folders of one run"
        )
    return ranks


def known_run_id(ranks: Sequence[RankFiles]) -> str | None:
    """Returns the id of the run to which these ranks belong; None if unknown."""
    return next((rank.run_id for rank in ranks if rank.run_id is not None), None)


def commits_of_all(ranks: Sequence[RankFiles], at: int | None = None) -> list[Commit]:
    """Returns each rank's part of the last commit that is complete on every rank.

    Args:
        at: Number of another commit that is complete on every rank; None for the last one.
    """
    for rank in ranks:
        if not rank.whole:
            words = "; ".join(map(str, rank.wrong)) or "nothing was committed yet"
            log = f"`{shell_command('log', rank.folder.parent)}` lists them"
            # No copy of a record or of a blob is elsewhere, so `verify --repair` cannot help.
            cure = f"; fork a kept step ({log}), or go back to a checkpoint" if rank.wrong else ""
            raise StoreError(f"{rank.folder} contains no intact commit: {words}{cure}", damaged=bool(rank.wrong))
    # A kill may leave one rank a commit ahead. This rank then still has the last commit of all other ranks.
    serial = last_of_all(rank.whole[0].record.serial for rank in ranks) if at is None else at
    # At least one rank exists, so there is a last commit.
    assert serial is not None
    chosen: list[Commit] = []
    for rank in ranks:
        commit = rank.commit(serial)
        if commit is None:
            have = ", ".join(str(c.record.serial) for c in rank.commits)
            raise StoreError(
                f"{rank.folder} contains commits {have}, but the last one that all ranks contain is {serial}"
            )
        chosen.append(commit)
    return chosen


def _checked_layouts(manifest: StoreManifest) -> tuple[Sequence[UnitLayout], Mode]:
    """Returns the layouts and the mode of a store; raises `StoreError` if its sizes do not fit the described model."""
    from offload.layout.fingerprint import described_layouts, described_mode, store_specs

    described = manifest.spec.fingerprint
    layouts, mode = described_layouts(described, part=True), described_mode(described)
    specs = store_specs(layouts, mode, described["world_size"])
    if manifest.spec.partitions != specs[manifest.rank % len(specs)].partitions:
        raise StoreError(
            "the manifest describes a model whose states take other bytes than its extents, so it is made up"
        )
    return layouts, mode


def _manifest(rank: RankFiles) -> StoreManifest:
    assert rank.manifest is not None, "a commit that is whole holds one"
    return rank.manifest
