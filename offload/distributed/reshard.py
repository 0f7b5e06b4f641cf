"""Resharding: starts a run with another number of ranks. Each rank writes its new part of the states.

    rank 0 locks the run's folders ─► all compare every byte with its checksum ─► each writes new-rank<r>, its first
    commit ─► rank 0 switches (`switch`) ─► the start resumes the run as one of this number of ranks

As in a checkpoint, the names of parameters identify states. No file of the run changes before the new folders are
complete on every rank. So after an error or a kill the former number of ranks resumes the run.

In a grid each column is a run of its own. Each column reshards itself from the last commit that all columns have, and
gives its new commit the same number. A kill may leave columns with different numbers of ranks. A start with either
number then works: it reshards the columns with the other number from the same commit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from offload.aio.protocols import Pending, Queue
from offload.checkpoint.load import EVERYTHING, SavedStates
from offload.checkpoint.resharding import places
from offload.checkpoint.restore import CheckpointRestorer
from offload.distributed.agreement import AllOrNothing
from offload.distributed.process_group import Mesh
from offload.engine.shards import StoredShards
from offload.engine.snapshot import Snapshot
from offload.errors import IoError, StoreError
from offload.fileio import inner_folder, sync_folder
from offload.fileio.buffered_copy import BUFFER_NBYTES, flow, flow_buffers
from offload.layout.fingerprint import described_layouts, store_specs
from offload.layout.flat_layout import ParameterSegment, UnitLayout, placed_for, with_kept
from offload.layout.modes import Mode
from offload.model_io.places import TensorPlaces
from offload.model_io.source import StoreSource, known_run_id, lock_and_look, ranks_of
from offload.notices import shell_command
from offload.records import fields, read, rows, text
from offload.sizes import format_size
from offload.states import State
from offload.swapper.store import Store, StoreSpec, find_shortage, rank_folders
from offload.swapper.store.folder import (
    REPLACED,
    RESHARDED,
    STAGED,
    Lock,
    folders_aside,
    read_whole,
    remove_files,
    unlink,
    write_durably,
)
from offload.swapper.store.format import compare, last_of_all
from offload.swapper.store.inspection import RankFiles, is_rank, look, store_id
from offload.swapper.store.model_files import ModelFiles
from offload.swapper.store.recovery import check_drives, check_one_run, check_startable

# -- found run -----------------------------------------------------------------------------------------
#
# The last commit of a run is the source of the states for the new ranks.


@dataclass(frozen=True, kw_only=True, slots=True)
class FormerRun:
    """The run of another number of ranks, whose commit fits this model; implements `FoundStates`."""

    source: StoreSource
    specs: Sequence[StoreSpec]
    """Contents of each rank's store. Only the ranks of the first replica are included."""
    layouts: tuple[UnitLayout, ...]
    mode: Mode
    saved: Mapping[str, tuple[int, ParameterSegment]]
    """For each parameter its unit and its segment in `layouts`."""
    written: Sequence[bytes | None]
    """Counts of the bytes that each rank of the run has written, in packed form."""

    @property
    def world_size(self) -> int:
        """Number of shards of each unit."""
        return len(self.specs)

    def mode_of(self, unit: int) -> Mode:
        """Returns the mode of a unit: the run's mode, or the same mode with weights in fp32."""
        return self.layouts[unit].mode_in(self.mode)

    def open(self, queue: Queue) -> SavedStates:
        """Returns the states. The source reads through `queue` already."""
        return SavedStates(self.layouts, self.mode, self.world_size, self.source)

    def compare(self, rank: int, size: int) -> None:
        """Compares this rank's share of the bytes of the commit with their checksums. `size` ranks divide the bytes.

        Raises `IoError` if bytes are damaged or cannot be read.
        """

        def begin(chunk: tuple[int, int, State, range], buffer: memoryview) -> Sequence[Pending]:
            store_index, unit, state, part = chunk
            return [self.source.read(store_index, unit, state, part.start, buffer[: len(part)])]

        flow(flow_buffers(), self._chunks(rank, size), begin, lambda *_: (), lambda *_: None)

    def _chunks(self, rank: int, size: int) -> Iterator[tuple[int, int, State, range]]:
        """Yields chunks as index of the store, unit, state, and bytes of the partition."""
        partitions = [
            (store_index, unit, state, nbytes)
            for store_index, spec in enumerate(self.specs)
            for unit, row in enumerate(spec.partitions)
            for state, nbytes in row.items()
        ]
        # The chunks are in the order of the bytes, because `StoreSource` compares them in this order.
        for index, unit, state, nbytes in partitions[rank::size]:
            for start in range(0, nbytes, BUFFER_NBYTES):
                yield index, unit, state, range(start, min(start + BUFFER_NBYTES, nbytes))


# -- switch --------------------------------------------------------------------------------------------
# The switch replaces the folders of a run by the folders for another number of ranks. The note `resharded.json` decides
# which folders are the run.
#
#     new-rank<r> written and committed ─► resharded.json ─► rank<r> becomes old-rank<r>, new-rank<r> becomes rank<r>
#                                                         └─► no resharded.json ─► old-rank<r> deleted
#
# Without the note the folders `rank<r>` are the run, and the next start deletes the folders next to them. With the
# note, the stores that it names are the run, and the next start finishes the renames. Either way a kill loses no state.
# The process that holds the locks of the run's ranks also owns the folders next to them.


class Switch(NamedTuple):
    """Content of the note: the ids of the stores of all ranks, before and after."""

    before: tuple[str, ...]
    after: tuple[str, ...]

    def pack(self) -> bytes:
        return json.dumps(self._asdict()).encode()


def carry_out(folders: Sequence[Path], change: Switch) -> None:
    """Replaces the run's folders by the new folders, and deletes the former. The caller holds the locks of both.

    The new stores are complete and durable. Raises `StoreError` if a folder of the new ranks is missing.
    """
    _check_complete(folders, change)
    write_durably(folders[0] / RESHARDED, change.pack())
    _rename(folders, change)
    _delete_aside(folders)


def finish(folders: Sequence[Path]) -> None:
    """Finishes a switch that a kill has interrupted, if its note exists. Deletes the folders that are not the run.

    Raises `StoreError` if a process uses the run, or a folder of the new ranks is missing.
    """
    if _read_note(folders[0]) is None and not any(folders_aside(folder) for folder in folders):
        return
    with contextlib.ExitStack() as locks:
        for folder in (*rank_folders(folders[0]), *folders_aside(folders[0])):
            locks.enter_context(Lock(folder))
        # The note is read again, because another process may have finished the switch before this one held the locks.
        change = _read_note(folders[0])
        if change is not None:
            _check_complete(folders, change)
            _rename(folders, change)
        _delete_aside(folders)


def discard(folders: Sequence[Path]) -> None:
    """Deletes the folders next to the run after an error, unless the note says that they are the run.

    `folders` are the run's folders, the first drive first. The caller holds the locks of its ranks.
    """
    if _read_note(folders[0]) is None:
        _delete_aside(folders)


def _read_note(folder: Path) -> Switch | None:
    path = folder / RESHARDED
    try:
        ids = rows(text())
        content = read(read_whole(path), fields({name: ids for name in Switch._fields}))
        return Switch(*(tuple(content[name]) for name in Switch._fields))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read {path}, which says which ranks' folders are the run: {error}") from error


def _check_complete(folders: Sequence[Path], change: Switch) -> None:
    """Raises `StoreError` if the folder of a new rank is missing on a drive, before anything is renamed."""
    for folder in folders:
        for rank, new in enumerate(change.after):
            places = [folder / f"{prefix}rank{rank}" for prefix in ("", STAGED)]
            if new not in map(store_id, places):
                raise StoreError(
                    f"neither {places[0]} nor {places[1].name} is rank {rank} of {len(change.after)}, to which the run "
                    "is resharded: mount the drives of the run and give them in their former order"
                )


def _rename(folders: Sequence[Path], change: Switch) -> None:
    """Puts the new folders into their places on each drive, and deletes the note. May be repeated after a kill."""
    for folder in folders:
        for rank in range(max(len(change.before), len(change.after))):
            place = folder / f"rank{rank}"
            new = change.after[rank] if rank < len(change.after) else None
            # If no new rank takes this place, a folder is moved only if it belongs to this run. Folders of other runs
            # stay.
            leaves = new is not None or store_id(place) == change.before[rank]
            if place.exists() and leaves and store_id(place) != new:
                _move(folder, place.name, f"{REPLACED}rank{rank}")
            if new is not None and store_id(place) != new:
                _move(folder, f"{STAGED}rank{rank}", place.name)
        # The new names become durable before the note is deleted. Without the note, no start would finish renames that
        # a power cut has undone.
        sync_folder(folder)
    unlink(folders[0] / RESHARDED)
    sync_folder(folders[0])


def _move(run: Path, name: str, new: str) -> None:
    with inner_folder(run, 1, ours=True) as folder:
        os.rename(name, new, src_dir_fd=folder, dst_dir_fd=folder)


def _delete_aside(folders: Sequence[Path]) -> None:
    """Deletes the folders next to the run. The first drive comes last: its lock keeps other processes out."""
    for folder in reversed(folders):
        for aside in folders_aside(folder):
            remove_files(aside)


# -- reshard -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class NewRanks:
    """The run after resharding, with the parts that concern this rank."""

    drives: Sequence[str]
    run: str
    spec: StoreSpec
    """Contents of this rank's store."""
    layouts: tuple[UnitLayout, ...]
    mode: Mode
    shares: Sequence[tuple[range, range]]
    places: TensorPlaces | None
    """The places of frozen weights in the model's own files; None if no unit stays there."""
    ranks: AllOrNothing
    """The ranks among which states are divided; in a grid, the ranks of a column."""
    everyone: AllOrNothing
    """All processes of a grid; without a grid, this process alone."""
    place: Mapping[str, Any]
    """The position of the column in the grid, in the form in which its swap files store it."""
    mesh: Mesh

    @property
    def folders(self) -> list[Path]:
        return [Path(drive).absolute() / self.run for drive in self.drives]

    def model_files(
        self, layouts: Sequence[UnitLayout], asked: Sequence[int], shards: int, queue: Queue
    ) -> Iterator[tuple[int, ModelFiles]]:
        """Yields each of the `asked` of the `shards`, with its part of the model's own files, opened."""
        if self.places is None:
            return
        of_shards = self.places.in_place_layouts(layouts, self.mode, asked, shards)
        for shard, in_place_layouts in zip(asked, of_shards, strict=True):
            with contextlib.closing(ModelFiles(in_place_layouts, self.places.stamps, queue)) as files:
                yield shard, files


class _Written(NamedTuple):
    """This rank's part of the new run."""

    id: str
    """Id of its store."""
    nbytes: int
    """Bytes of its states."""


def reshard(new: NewRanks, queue: Queue, check: Callable[[Snapshot], None]) -> str | None:
    """Divides the states of the run among the ranks of this start, if their number or arrangement differs. Collective.

    Returns a line for the user; None if the run has as many ranks as this start, in as many replicas. Raises
    `StoreError`, and leaves the run as it was, if the run does not fit or is damaged, if a rank does not see its
    drives, or if there is no room.
    """
    ranks, began = new.ranks, time.monotonic()
    before, at = _found(new)
    changes = before is not None and before != new.mesh
    # A column that keeps its arrangement calls `settle` too, and so waits for the columns that change.
    if not any(new.everyone.settle(lambda: changes)):
        return None
    if new.mode.rule.of_one_rank:
        raise StoreError(
            f"{new.folders[0]} is a run of {before}, and this start has {new.mesh}: each rank of {new.mode.optimizer} "
            f"has errors of its own, which no other number of ranks can continue; resume with {before}, or call "
            "save_checkpoint in the run and load_checkpoint in a new one, whose errors begin at zero"
        )
    with contextlib.ExitStack() as opened:
        prepared = new.everyone.settle(
            lambda: _prepare(new, before, at, queue, check, opened) if before is not None and changes else None
        )[new.everyone.rank]
        if before is None or prepared is None:
            return None
        written = [_Written(*args) for args in prepared]
        ids = tuple(str(store_id(new.folders[0] / f"rank{rank}")) for rank in range(before.ranks))
        ranks.by_first(lambda: carry_out(new.folders, Switch(ids, tuple(store.id for store in written))))
    seconds = time.monotonic() - began
    return (
        f"resharded from {before} to {new.mesh}: {format_size(sum(e.nbytes for e in written))} of "
        f"states in {seconds:.1f} s; each rank continues with the random generators of rank 0, so dropout draws other "
        "numbers"
    )


def _found(new: NewRanks) -> tuple[Mesh | None, int | None]:
    """Returns the mesh of the run, None without a run. In a grid, also returns the last commit that all columns have.

    Nothing is locked yet. If another process replaces the commit before the locks are taken, `_open` raises an error.
    Raises `StoreError` if the columns are of two runs.
    """
    run = new.folders[0]
    known: list[int] | None = new.ranks.by_first(lambda: _mesh_of(run))  # a list, as JSON has no tuples
    if new.everyone.size == 1:
        return (None if known is None else Mesh(*known)), None
    # Only rank 0 of each column inspects the folders, because other ranks may not see all of them.
    own = new.ranks.by_first(lambda: _last_commit(run))
    answers = new.everyone.settle(lambda: [str(run / "rank0"), *own])
    check_one_run([(folder, run_id) for folder, _, run_id in answers])
    return (None if known is None else Mesh(*known)), last_of_all(serial for _, serial, _ in answers)


def _last_commit(run: Path) -> tuple[int | None, str | None]:
    ranks_with_commit = [rank_files for rank_files in _look(run) if rank_files.whole]
    return last_of_all(rank_files.whole[0].record.serial for rank_files in ranks_with_commit), known_run_id(
        ranks_with_commit
    )


def _prepare(
    new: NewRanks,
    before: Mesh,
    at: int | None,
    queue: Queue,
    check: Callable[[Snapshot], None],
    opened: contextlib.ExitStack,
) -> list[_Written]:
    """Writes a new folder for every rank, next to the folders of the run. Collective.

    `at` is the number of the commit, None for the last one; `opened` closes the files and releases the locks.
    """
    ranks, run = new.ranks, new.folders[0]
    _check_visible(new, before)
    looked: list[RankFiles] = []
    # Rank 0 locks for all ranks, before any other rank reads: a process that uses the run would change it meanwhile.
    ranks.by_first(lambda: looked.extend(lock_and_look(run, opened, "train")))
    ranks.settle(lambda: looked.extend(_look(run) if ranks.rank else ()))
    opened_run: list[FormerRun] = []
    ranks.settle(lambda: opened_run.append(_open(new, before, at, looked, queue, check, opened)))
    blob = opened_run[0].source.commits[0].record.blob_nbytes
    # Room for two blobs: each commit reserves a blob and a quarter.
    need = sum(ranks.settle(lambda: new.spec.nbytes + 5 * blob // 2))

    def check_room() -> None:
        short = find_shortage(new.drives, need)
        if short is not None:
            raise StoreError(
                f"{run} is a run of {before}; its swap files for {new.mesh} need "
                f"{format_size(short.need)} beside the present ones, {short.path} has {format_size(short.free)} free; "
                f"free some room, or resume with {before}; or call save_checkpoint in the run and "
                "load_checkpoint in a new one, on any number of ranks"
            )

    def compare_share() -> None:
        try:
            opened_run[0].compare(ranks.rank, ranks.size)
        except IoError as error:
            raise StoreError(
                f"the run in {run} is damaged or cannot be read, and stays as it is: {error}; "
                f"`{shell_command('verify', run)}` says where, and {before} may resume the "
                "commit before",
                damaged=True,
            ) from error

    def compare_model_files() -> None:
        # The part of a new rank has no checksum yet: the parts of the former ranks, which together are the same bytes,
        # are compared with theirs before the new ones are recorded.
        former, asked = opened_run[0], range(before.shards)[ranks.rank :: ranks.size]
        for shard, files in new.model_files(former.layouts, asked, before.shards, queue):
            files.compare(former.source.files[shard], run)

    ranks.by_first(check_room)
    ranks.settle(compare_share)
    ranks.settle(compare_model_files)
    # Only rank 0 holds the locks, and knows whether the note was written. The other ranks delete nothing.
    if ranks.rank == 0:
        opened.push(lambda kind, *_: discard(new.folders) if kind else None)
    return ranks.settle(lambda: _write(new, opened_run[0], queue, opened))


def _mesh_of(run: Path) -> Mesh | None:
    """Returns the mesh of the run's ranks; None if there is no manifest, or if the run makes no commits."""
    manifests = (look(folder).manifest for folder in rank_folders(run) if is_rank(folder))
    known = next((manifest for manifest in manifests if manifest is not None), None)
    if known is None or known.spec.slots < 2:
        return None
    shards = int(known.spec.fingerprint.get("world_size", 1))
    return Mesh(known.spec.ranks // shards, shards)


def _check_visible(new: NewRanks, before: Mesh) -> None:
    """Raises `StoreError` on all ranks if a rank does not see every folder of the first replica."""
    run = new.folders[0]
    folders = [run / f"rank{rank}" for rank in range(before.shards)]
    everyone = new.ranks.settle(lambda: [store_id(folder) for folder in folders])
    for rank, ids in enumerate(everyone):
        # On another machine a folder of the same name belongs to another store.
        pairs = zip(folders, ids, everyone[0], strict=True)
        missing = [str(folder) for folder, its, first in pairs if its is None or its != first]
        if missing:
            raise StoreError(
                f"{run} is a run of {before}, this start has {new.mesh}, and rank {rank} does not "
                f"see the swap files of the run in {', '.join(missing)}: mount the drives of all ranks where each rank "
                f"sees them, or resume with {before}; or call save_checkpoint in the run and "
                "load_checkpoint in a new one, on any number of ranks"
            )


def _look(run: Path) -> list[RankFiles]:
    return [look(folder) for folder in rank_folders(run) if is_rank(folder)]


def _open(
    new: NewRanks,
    before: Mesh,
    at: int | None,
    looked: Sequence[RankFiles],
    queue: Queue,
    check: Callable[[Snapshot], None],
    opened: contextlib.ExitStack,
) -> FormerRun:
    """Opens a commit of the run and compares it with this model. Changes nothing.

    Replicas have equal states, so only the first is read. `looked` are the run's folders on their first drive.
    """
    run = new.folders[0]
    sources = [_on_drives(rank_files, new) for rank_files in ranks_of(run, looked)]
    source = opened.enter_context(contextlib.closing(StoreSource(run, queue, sources, at)))
    keep_flags = {segment.name: segment.kept for layout in new.layouts for segment in layout.segments}
    # These are the layouts in which the former ranks would store this model. `compare` reports differences, as in any
    # resume.
    expected = placed_for(new.layouts, new.mode, len(sources))
    expected = tuple(with_kept(layout, keep_flags, len(sources)) for layout in expected)
    specs = store_specs(expected, new.mode, before.shards, replicas=before.replicas)
    for spec, source_rank in zip(specs, sources, strict=True):
        spec = spec._replace(fingerprint={**spec.fingerprint, **new.place})
        assert source_rank.manifest is not None, "a commit that is whole holds one"
        compare(spec, source_rank.manifest.spec, source_rank.folder)
    check(source.progress)
    for rank in range(new.ranks.size):
        check_startable([folder / f"rank{rank}" for folder in new.folders], over=True)
    layouts = described_layouts(source.description, part=True)
    # Other replicas contribute only the counts of written bytes in their newest commits.
    replicas = [
        rank_files.whole[0]
        for rank_files in looked
        if rank_files.whole and before.shards <= rank_files.rank < before.ranks
    ]
    return FormerRun(
        source=source,
        specs=specs,
        layouts=layouts,
        mode=new.mode,
        saved=places(layouts, {}, True),
        written=[commit.blob.written for commit in (*source.commits, *replicas) if commit.blob is not None],
    )


def _on_drives(rank_files: RankFiles, new: NewRanks) -> RankFiles:
    """Returns `rank_files` with the paths of this start, because the drives may be mounted elsewhere than in the run.

    Raises `StoreError` if the drives of this start are not those of the run.
    """
    if rank_files.manifest is None:
        return rank_files  # has no commit either: `StoreSource` reports that
    folders = [folder / rank_files.folder.name for folder in new.folders]
    check_drives(folders, rank_files.manifest, rank_files.commits[0].record.step if rank_files.commits else 0)
    drives = tuple(str(folder.parent) for folder in new.folders)
    return rank_files._replace(manifest=dataclasses.replace(rank_files.manifest, drives=drives))


def _write(new: NewRanks, source_run: FormerRun, queue: Queue, opened: contextlib.ExitStack) -> _Written:
    """Writes this rank's states into a folder next to those of the run, and commits them.

    `opened` closes the files and releases the lock.
    """
    rank, commits = new.ranks.rank, source_run.source.commits
    store = Store(new.drives, new.run, rank, new.spec, queue, first=commits[0].record.serial)
    opened.callback(store.close)
    for _, files in new.model_files(new.layouts, [new.mesh.shard_of(rank)], new.mesh.shards, queue):
        files.scan()
        store.name_files(files.described())
    store.create(run_id=source_run.source.run_id)
    shards = StoredShards(mode=new.mode, layouts=new.layouts, shares=new.shares, store=store)
    CheckpointRestorer(source_run, shards, EVERYTHING, queue, new.mesh.shard_of(rank)).run()
    # Rank 0 continues the count of written bytes from the sum over all former ranks: the drives are the same.
    store.written.go_on(*(source_run.written if rank == 0 else ()))
    # No saved progress belongs to this rank. As after a load of a checkpoint, every rank continues with the progress of
    # rank 0.
    store.commit(commits[0].record.step, commits[0].contents)
    return _Written(str(store_id(store.folders[0])), sum(sum(row.values()) for row in new.spec.partitions))
