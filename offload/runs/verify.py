"""Implementation of `offload verify`: compares all bytes of a run's last commit, or of a checkpoint, with checksums.

A run is verified without importing torch. With `--repair` damaged bytes are replaced where there is a true copy; see
`offload.swapper.store.repair`. Without it nothing is changed, but a note that makes the next resume compare all data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from offload.aio import StripedFile
from offload.aio.protocols import Queue
from offload.checkpoint.files import instead_of, is_checkpoint, progress_file, read_manifest, wrong_files
from offload.errors import IoError, StoreError, UsageError
from offload.fileio import real_path
from offload.model_io.source import lock_and_look, ranks_of
from offload.notices import shell_command
from offload.runs.own_checkpoint import find_own
from offload.sizes import count_of, format_size
from offload.swapper.store.folder import RunNotes
from offload.swapper.store.format import last_of_all
from offload.swapper.store.inspection import COMMIT_BEGUN, Commit, Misplaced, RankFiles, Refused, Wrong, look
from offload.swapper.store.recovery import Damage, Mend, Undo, damages_of_commit
from offload.swapper.store.repair import Copies, FirstValues, lengthen


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """Result of one rank's folder."""

    folder: Path
    rank: int
    wrong: tuple[Wrong, ...]
    """Files that differ from what was written."""
    serial: int | None = None
    step: int | None = None
    """Step of the commit that was compared; None if no commit of the rank can be read.

    The compared commit is the newest that all ranks hold, from which a run resumes. For a rank that misses this commit,
    the rank's own newest commit is compared.
    """
    nbytes: int = 0
    """Bytes of this commit that were compared; 0 if the comparison was not completed."""
    damages: tuple[Damage, ...] = ()
    lengthened: tuple[str, ...] = ()
    """A line for each file that was cut short, and that the repair has given its size again."""
    places: tuple[tuple[tuple[str, int, int], ...], ...] = ()
    """For each damage, the file, the offset and the number of bytes on each drive."""
    before: str | None = None
    """Description of the commit before the compared one; None if there is none, or if it was not compared."""
    step_before: int | None = None
    """Step of the commit before the compared one, if it is intact."""
    wrong_model: bool = False
    """True if the model's own files do not have the frozen weights of the run."""
    common: bool = True
    """False if the rank misses the newest commit that all ranks should have."""
    compared: bool = True
    """False if an error ended the comparison of the states."""

    @property
    def whole(self) -> bool:
        return not self.wrong and all(damage.mended for damage in self.damages)

    @property
    def mended(self) -> int:
        """Number of places and files that were damaged, and are not any more."""
        return len(self.lengthened) + sum(bool(damage.mended) for damage in self.damages)

    @property
    def misplaced(self) -> bool:
        """True if a manifest is of another store or drive."""
        return any(isinstance(wrong, Misplaced) for wrong in self.wrong)

    @property
    def refused(self) -> bool:
        """True if there is something in the place of a file that a start opens."""
        return any(isinstance(wrong, Refused) for wrong in self.wrong)

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of the rank's intact commits, newest first: a resume of this rank alone takes the first one."""
        if not self.common or self.wrong_model or self.misplaced:
            return ()
        newest = self.step if self.compared and all(damage.mended for damage in self.damages) else None
        return tuple(step for step in (newest, self.step_before) if step is not None)


class Report(NamedTuple):
    """Result of a run's folder."""

    path: Path
    step: int | None
    """Step of the newest commit that is complete on all ranks; None if a rank has no complete commit."""
    ranks: tuple[RankReport, ...]
    repaired: bool = False
    """True if true copies were looked for."""
    model: Path | None = None
    """Folder in which the user lets look for frozen weights."""

    @property
    def whole(self) -> bool:
        return all(rank.whole for rank in self.ranks)

    @property
    def resumes(self) -> int | None:
        """Step from which a resume goes on; None if it is refused, or no commit is known to be intact on all ranks."""
        return None if any(rank.refused for rank in self.ranks) else self._intact

    @property
    def _intact(self) -> int | None:
        """Step of the newest commit that is known to be intact on all ranks; None if there is none."""
        if not all(rank.steps for rank in self.ranks):
            return None
        # A rank that is a commit ahead resumes from the commit that all have.
        step = min(rank.steps[0] for rank in self.ranks)
        return step if all(step in rank.steps for rank in self.ranks) else None

    def next(self) -> list[str]:
        """Returns what to do about damage, in lines; none if all is intact."""
        if self.whole:
            return []
        rows = []
        damages = [damage for rank in self.ranks for damage in rank.damages if not damage.mended]
        if damages and not self.repaired:
            model = " --model FOLDER" if any(damage.frozen for damage in damages) else ""
            of = ", where FOLDER has the model with which the run began" if model else ""
            command = shell_command("verify", "--repair", self.path)
            rows.append(f"to mend what another place has: `{command}{model}`{of}")
        elif any(damage.frozen for damage in damages):
            rows.append(
                "frozen weights may be in the model's folder: give it by --model FOLDER"
                if self.model is None
                else f"{self.model} does not have the damaged frozen weights as they were when the run began"
            )
        if any(rank.wrong_model for rank in self.ranks):
            model = "" if self.model is None else ", --model neither"
            rows.append(
                f"no command mends the model's own files{model}: put them back as they were when the run began, or "
                "resume with an intact copy of them in another folder"
            )
        elif any(rank.misplaced for rank in self.ranks):
            rows.append("a resume refuses these drives: put those of the run back, in the order of its nvme_path")
        elif any(rank.refused for rank in self.ranks) and self._intact is not None:
            rows.append(
                f"step {self._intact} is intact, and a resume refuses what is in the place of a file: remove it, and "
                "verify again"
            )
        elif self.resumes is not None and "@" in self.path.name:
            rows.append(f"the states of step {self.resumes} are intact, and can be forked or exported")
        elif self.resumes is not None:
            if any(Path(wrong.path).name == "manifest.json" for rank in self.ranks for wrong in rank.wrong):
                rows.append("a resume writes the damaged manifest.json anew, from the copy in the commit")
            rows.append(f"a resume goes on from step {self.resumes}, all of which is intact")
        else:
            run = self.path.with_name(self.path.name.partition("@")[0])
            rows.append(
                "no commit is known to be intact, so a resume fails: bring back what is missing or damaged, or fork a "
                f"kept step (`{shell_command('log', run)}` lists them), or go back to a checkpoint"
            )
        return rows

    @property
    def mended(self) -> int:
        """Number of places and files that were damaged, and are not any more."""
        return sum(rank.mended for rank in self.ranks)

    def lines(self, most: int) -> list[str]:
        """Returns the report as lines of text, with at most `most` damages of the states of each rank."""
        rows: list[str] = []
        for rank in self.ranks:
            # Damaged files first, then damaged bytes, then the summary of the rank.
            rows += [f"rank {rank.rank}: damaged: {wrong}" for wrong in rank.wrong]
            rows += [f"rank {rank.rank}: {line}, and has its size again" for line in rank.lengthened]
            rows += [f"rank {rank.rank}: damaged: {damage}" for damage in rank.damages[:most]]
            if len(rank.damages) > most:
                rows.append(f"rank {rank.rank}: and {len(rank.damages) - most} more")
            if rank.step is None:
                rows.append(f"rank {rank.rank}: no commit can be read, neither the last one nor the one before")
            else:
                # A rank with a damaged file is not intact, although its states are.
                state = ("states intact" if rank.wrong else "intact") if rank.compared else "could not be read"
                left = sum(not damage.mended for damage in rank.damages)
                state = f"damaged in {count_of(left, 'place')}" if left else state
                state += f", {count_of(rank.mended, 'place')} mended" if rank.mended else ""
                before = f"; {rank.before}" if rank.before else ""
                words = f"step {rank.step}, commit {rank.serial}, {format_size(rank.nbytes)}"
                rows.append(f"rank {rank.rank}: {words}: {state}{before}")
        return rows + self.next()

    def as_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "whole": self.whole,
            "mended": self.mended,
            "resumes": self.resumes,
            "next": self.next(),
            "step": self.step,
            # `epoch` is the older name of `step`, kept for scripts.
            "epoch": self.step,
            "ranks": [
                {
                    "rank": rank.rank,
                    "serial": rank.serial,
                    "step": rank.step,
                    "epoch": rank.step,
                    "bytes": rank.nbytes,
                    "before": rank.before,
                    "lengthened": list(rank.lengthened),
                    "files": [wrong._asdict() for wrong in rank.wrong],
                    "damages": [
                        {**damage._asdict(), "places": [list(place) for place in places]}
                        for damage, places in zip(rank.damages, rank.places, strict=True)
                    ],
                }
                for rank in self.ranks
            ],
        }


class CheckpointReport(NamedTuple):
    """Result of a checkpoint's folder."""

    path: Path
    step: int
    world_size: int
    nbytes: int
    """Bytes that were compared."""
    wrong: tuple[Wrong, ...]

    @property
    def whole(self) -> bool:
        return not self.wrong

    @property
    def mended(self) -> int:
        """Always 0: a checkpoint has no second copy of anything."""
        return 0

    def lines(self, most: int) -> list[str]:
        rows = [f"damaged: {wrong}" for wrong in self.wrong[:most]]
        if len(self.wrong) > most:
            rows.append(f"and {len(self.wrong) - most} more")
        state = f"damaged in {count_of(len(self.wrong), 'place')}" if self.wrong else "intact"
        rows.append(f"{self.path}: step {self.step}, {format_size(self.nbytes)}: {state}")
        return [*rows, f"a checkpoint has no second copy: {instead_of(self.path)}"] if self.wrong else rows

    def as_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "whole": self.whole,
            "step": self.step,
            "epoch": self.step,
            "world_size": self.world_size,
            "bytes": self.nbytes,
            "files": [wrong._asdict() for wrong in self.wrong],
        }


def open_checking(path: Path, repair: bool = False, model: Path | None = None) -> CheckpointChecking | RunChecking:
    """Opens a run, a checkpoint, or a folder of checkpoints, whose latest is taken, for verification.

    Args:
        repair: Mend a run where there are true copies.
        model: Folder of the model with which the run began; None for the one that `offload train` has recorded.

    Raises:
        UsageError: A checkpoint is to be repaired, or a model is given where nothing is.
    """
    if model is not None and not repair:
        raise UsageError(
            f"--model {model} is where --repair finds frozen weights, and nothing is mended without it: add --repair"
        )
    # A link that the user gives is followed here. No other link below is followed.
    checkpoint = find_own(path)
    if checkpoint is None:
        return RunChecking(real_path(path), repair, model)
    if repair:
        raise UsageError(f"{checkpoint} is a checkpoint, which has no second copy: --repair mends runs")
    return CheckpointChecking(checkpoint)


class CheckpointChecking:
    """A checkpoint whose manifest is valid; damage to other files is found when `run` reads them."""

    def __init__(self, checkpoint: Path) -> None:
        self._path, self._manifest = checkpoint, read_manifest(checkpoint)

    @property
    def nbytes(self) -> int:
        """Upper bound of the bytes that `run` reads, without the files of a part whose manifest is lost."""
        parts = filter(is_checkpoint, (self._path / part for part in self._manifest.parts))
        own = sum(file.nbytes for file in self._manifest.files.values())
        return own + sum(CheckpointChecking(part).nbytes for part in parts)

    def run(self, queue: Queue, progress: Callable[[int], None] = lambda _: None) -> CheckpointReport:
        """Reads and compares everything; calls `progress` with the number of bytes after each comparison.

        Failures to load a rank are damage in the report and raise nothing.
        """
        # Imported late: the module imports torch, which the verification of a run does not need.
        from offload.checkpoint.load import compare_bytes, look

        path, manifest, nbytes = self._path, self._manifest, 0
        wrong = [Wrong(str(path / name), reason) for name, reason in wrong_files(path, manifest).items()]

        def compared(count: int) -> None:
            nonlocal nbytes
            nbytes += count
            progress(count)

        def damaged(file: Path, name: str) -> None:
            wrong.append(Wrong(str(file), f"the checksum of {name} is not the one written"))

        for part in () if wrong else manifest.parts:
            report = CheckpointChecking(path / part).run(queue, progress)
            wrong.extend(report.wrong)
            nbytes += report.nbytes
        # If a file is missing or has another size, offsets are not valid, so no tensor is compared.
        for rank in range(0 if wrong or manifest.parts else manifest.ranks):
            try:
                rank_files = look(path, rank, manifest.ranks, {})
                # Ranks outside of the first replica have saved only their progress.
                names = rank_files.places[rank] if rank < manifest.world_size else ()
                compare_bytes(rank_files, [(rank, name) for name in names], queue, damaged, compared)
                compared(manifest.files[progress_file(rank)].nbytes)
            except (StoreError, IoError) as error:
                wrong.append(Wrong(str(path), str(error)))
        return CheckpointReport(path, manifest.step, manifest.ranks, nbytes, tuple(wrong))

    def close(self) -> None:
        """Does nothing: no file is open between calls."""


class RunChecking:
    """A run whose ranks are locked while they are verified."""

    def __init__(self, run: Path, repair: bool = False, model: Path | None = None) -> None:
        self._run, self._repair, self._model = run, repair, model
        self._open = contextlib.ExitStack()
        try:
            looked = lock_and_look(run, self._open, "train" if repair else "read")
            self._lengthened = {files.rank: _lengthened(files) if repair else () for files in looked}
            if any(self._lengthened.values()):
                looked = [look(files.folder) for files in looked]
            self._found = ranks_of(run, looked, replicas=True)
            for files in self._found:
                if not files.commits and not files.wrong:
                    raise StoreError(f"{files.folder}: nothing was committed yet")
        except BaseException:
            # The locks must not outlive a failed construction.
            self._open.close()
            raise

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(c) for files in self._found for c in files.commits)

    def run(self, queue: Queue, progress: Callable[[int], None] = lambda _: None) -> Report:
        """Reads and compares the newest commit that is complete on all ranks."""
        # A kill may leave ranks at different commits; a run resumes from the newest that all ranks hold.
        serial = last_of_all(files.whole[0].record.serial for files in self._found if files.whole) or 0
        ranks = []
        for files in self._found:
            checked = _check(files, serial, queue, progress, self._repair, self._model)
            ranks.append(replace(checked, lengthened=self._lengthened[files.rank]))
        # A rank that misses the commit was compared with another of its own.
        step = next((rank.step for rank in ranks if rank.serial == serial), None)
        step = None if any(rank.step is None for rank in ranks) else step
        return Report(self._run, step, tuple(ranks), self._repair, self._model)

    def close(self) -> None:
        self._open.close()


def _lengthened(files: RankFiles) -> tuple[str, ...]:
    """Gives the states of a rank their size again where they were cut, and returns a line for each file."""
    if files.manifest is None or files.drive or files.other_format or not files.whole:
        return ()
    try:
        with files.open_states(writable=True) as file:
            lines = tuple(lengthen(file, files.manifest.spec.nbytes))
    except IoError:
        return ()  # a file is missing, and `files.wrong` says so
    if lines:
        RunNotes(files.folder).mark_suspect()
    return lines


def _check(
    files: RankFiles,
    serial: int,
    queue: Queue,
    progress: Callable[[int], None],
    repair: bool = False,
    model: Path | None = None,
) -> RankReport:
    """Compares one rank's commit `serial` with its checksums, and mends it if `repair`.

    `serial` is the newest commit that is complete on all ranks; 0 if there is none.
    """
    wrong = list(files.wrong)
    damaged_places: list[Damage] = []
    places: list[tuple[tuple[str, int, int], ...]] = []
    before, step_before, compared, model_wrong = None, None, False, list[Wrong]()
    if not files.whole:
        return RankReport(folder=files.folder, rank=files.rank, wrong=files.wrong)
    commit = files.commit(serial)
    if commit is None:
        # The rank misses the commit that the others hold; its own newest is compared, so that the report is complete.
        commit = files.whole[0]
        have = ", ".join(str(c.record.serial) for c in files.commits)
        wrong.append(
            Wrong(
                str(files.folder), f"the folder contains commits {have}; the last complete commit elsewhere is {serial}"
            )
        )
    record = commit.record
    try:
        with files.open_states(writable=repair) as file:
            mend = None
            if repair:
                assert files.manifest is not None, "a commit that is whole has one"
                first_values = _first_values(files, commit, model)
                mend = Copies(files.folder, files.manifest.spec, file, queue, first_values).mend
            for damage in _damages(files, commit, file, queue, progress, mend):
                damaged_places.append(damage)
                at = file.layout.places(damage.offset, damage.nbytes)
                places.append(tuple((file.parts()[drive].path, offset, nbytes) for drive, offset, nbytes in at))
            compared = True
            model_wrong += _wrong_model_files(files, queue)
            wrong += model_wrong
            # The line about the commit before is only a hint for the user: damage to that commit does not count.
            other = next((c for c in files.commits if c.record.serial < record.serial), None)
            if other is not None:
                before, intact = _before(files, other, file, queue, progress)
                step_before = other.record.step if intact else None
            if files.begun:
                before = COMMIT_BEGUN if before is None else f"{before}; {COMMIT_BEGUN}"
        left = any(not damage.mended for damage in damaged_places)
        if left and serial == max(c.record.serial for c in files.commits):
            # If the file "suspect" exists, the next resume compares all bytes, and falls back to an intact commit
            # before.
            RunNotes(files.folder).mark_suspect()
        elif repair and not wrong:
            RunNotes(files.folder).clear_suspect()
    except IoError as error:
        # An error at a path that `wrong` names already, such as a missing file, is not reported twice.
        here = Path(error.path)
        if not any(here.is_relative_to(named.path) or Path(named.path).is_relative_to(here) for named in wrong):
            wrong.append(Wrong(error.path, str(error)))
    return RankReport(
        folder=files.folder,
        rank=files.rank,
        serial=record.serial,
        step=record.step,
        nbytes=_nbytes(commit) if compared else 0,
        wrong=tuple(wrong),
        damages=tuple(damaged_places),
        places=tuple(places),
        before=before,
        compared=compared,
        step_before=step_before,
        wrong_model=bool(model_wrong),
        common=files.commit(serial) is not None,
    )


def _wrong_model_files(files: RankFiles, queue: Queue) -> Iterator[Wrong]:
    """Compares the frozen weights that a run reads from the model's own files with their checksums."""
    assert files.manifest is not None
    recorded = files.manifest.spec.files
    if not recorded:
        return
    # Imported late: the module imports torch, which the verification of a run without model files does not need.
    from offload.swapper.store.model_files import CURE, ModelFiles

    try:
        with contextlib.closing(ModelFiles.of_run(recorded, queue)) as model:
            crcs = model.scan()
    except (StoreError, IoError) as error:
        # The error names the file.
        yield Wrong(str(Path(recorded["files"][0]["path"]).parent), str(error))
        return
    for unit in recorded["units"]:
        if crcs[unit["unit"]] != unit["crc"]:
            path = recorded["files"][unit["tensors"][0][0]]["path"]
            title = files.manifest.spec.title(unit["unit"])
            yield Wrong(path, f"frozen weights of {title} are not those of the run; {CURE}")


def _first_values(files: RankFiles, commit: Commit, model: Path | None) -> FirstValues | None:
    """Returns what makes frozen weights again from the model's folder; None if no folder is known."""
    assert files.manifest is not None, "a commit that is whole has one"
    spec = files.manifest.spec
    if not any(spec.frozen):
        return None
    # Imported late: these modules import torch, which the verification of a run does not need.
    from offload.engine.fill import FirstWeights
    from offload.engine.snapshot import Snapshot
    from offload.layout.fingerprint import described_layouts, described_mode
    from offload.model_io.folder import stored_tensors

    if model is None:
        client_state = Snapshot.unpack(commit.contents).facts["client_state"]
        command = client_state.get("command", {}) if isinstance(client_state, Mapping) else {}
        model = Path(command.get("options", {}).get("model") or "")  # a folder, or the name of a preset or on the hub
        if not model.is_dir() or not any(model.glob("*.safetensors")):
            return None
    stored = stored_tensors(model)
    layouts, size = described_layouts(spec.fingerprint, part=True), int(spec.fingerprint["world_size"])
    names = {segment.parameter for layout in layouts for segment in layout.segments if not segment.trainable}
    # peft puts the model into a module of its own, and each adapted layer into another.
    plain = {name: name.removeprefix("base_model.model.").replace(".base_layer.", ".") for name in names}
    rank = files.rank % size
    return FirstWeights(
        layouts,
        described_mode(spec.fingerprint),
        [(layout.trainable(rank, size), layout.frozen(rank, size)) for layout in layouts],
        {name: stored[plain[name]] for name in names if plain[name] in stored},
    )


def _damages(
    files: RankFiles,
    commit: Commit,
    file: StripedFile,
    queue: Queue,
    progress: Callable[[int], None],
    mend: Mend | None = None,
) -> Generator[Damage]:
    assert files.manifest is not None
    spec, undo = files.manifest.spec, Undo(files.folder)
    return damages_of_commit(file, queue, spec, commit.record, commit.table, undo, files.rank, progress, mend)


def _before(
    files: RankFiles, commit: Commit, file: StripedFile, queue: Queue, progress: Callable[[int], None]
) -> tuple[str, bool]:
    """Returns a line that says whether an older commit is intact, so that a resume could fall back to it, and whether.

    The step after the last commit overwrites the slots of the older commit, as intended. Overwritten bytes cannot be
    told apart from damaged ones.
    """
    commit_before = f"the commit before, step {commit.record.step},"
    either = "the step after the last commit has begun to overwrite this commit, or this commit is damaged"
    if commit.blob is None:
        why = f"its blob.{commit.record.blob} differs from the bytes written"
        return f"{commit_before} is not intact: {why}; {either}", False
    comparison = _damages(files, commit, file, queue, progress)
    try:
        first = next(comparison, None)
        if first is None:
            return f"{commit_before} is intact too", True
        return f"{commit_before} is not intact: {first}; {either}", False
    finally:
        # The first damage is enough. Pending reads must end before the file is closed.
        comparison.close()


def _nbytes(commit: Commit) -> int:
    """Returns the bytes of a commit that have checksums."""
    return sum(segment.nbytes for slot in commit.table.values() for segment in slot)
