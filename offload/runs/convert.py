"""Implementation of `offload convert`: writes a run again, as a new run whose moments or masters have another form.

    last commit of the run ─► state by state, a few buffers at a time ─► files of the new run ─► its first commit

The run itself is only read. A kill leaves it as it is, beside a new run without a commit, which the next conversion
replaces. Counters, schedules, generators and buffers are copied, so the new run resumes at the same step.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from offload.aio.protocols import Queue
from offload.errors import StoreError
from offload.fileio import real_path
from offload.layout.fingerprint import described_layouts, described_mode, store_specs
from offload.layout.flat_layout import placed_for
from offload.layout.modes import Mode, make_mode, moments_name
from offload.model_io.source import StoreSource
from offload.runs.converted_states import Side, StateConverter
from offload.states import State
from offload.swapper.store import Store
from offload.swapper.store.format import StoreSpec

__all__ = ["Conversion", "Converted", "StoreSource", "convert", "plan"]


class Converted(NamedTuple):
    """Result of a conversion."""

    run: Path
    """The new run, on its first drive."""
    step: int
    before: Mapping[str, str]
    after: Mapping[str, str]
    """Forms of the "master" and of the "moments"."""
    nbytes: int
    """Bytes of the new run's swap files, of all ranks."""


class Conversion(NamedTuple):
    """A conversion, as planned from the run that is converted."""

    run: str
    """Name of the new run."""
    before: Side
    after: Side
    about: Mapping[str, Any]

    @property
    def specs(self) -> list[StoreSpec]:
        """Returns the specification of each rank's swap files."""
        return store_specs(*self.after, self.about)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the new swap files, of all ranks."""
        return sum(spec.nbytes for spec in self.specs)


def plan(source: StoreSource, run: Path, forms: Mapping[str, str], name: str | None) -> Conversion:
    """Returns the conversion of a run.

    Args:
        source: the run.
        run: its folder.
        forms: forms that change: of the "master" one of `MASTERS`, of the "moments" one of `MOMENT_DTYPES`; one at
            least.
        name: name of the new run; None for that of the run with the forms behind it.

    Raises:
        StoreError: the run cannot be converted to these forms, or cannot have this name.
    """
    old = described_mode(source.description)
    new = _mode_after(old, run, forms)
    layouts, size = described_layouts(source.description), int(source.description["world_size"])
    name = "-".join((real_path(run).name, *dict.fromkeys(forms.values()))) if name is None else name
    if name == real_path(run).name or "/" in name or not name.strip(". "):
        raise StoreError(f"the new run needs a name of its own, without a slash, got {name!r}; give --run")
    return Conversion(name, Side(layouts, old, size), Side(placed_for(layouts, new, size), new, size), source.about)


def _mode_after(old: Mode, run: Path, forms: Mapping[str, str]) -> Mode:
    """Returns the mode of the new run; arguments and errors are those of `plan`."""
    if State.PACKED in old.moments:
        raise StoreError(
            f"{run} is a run in mode {old.name}, whose optimizer runs by torch's own code: its states have one form"
        )
    if "moments" in forms and not old.moments:
        raise StoreError(f"{run} is a run in mode {old.name}, which has no moments to convert")
    if forms.get("moments") == "int8" and old.matrix_rule:
        raise StoreError(
            f"{run} is a run in mode {old.name}, and moments of matrices have no blocks of 8 bits; convert it to bf16"
        )
    if forms.get("master", "fp32") != "fp32" and State.MASTER_LOW_BITS not in old.weights:
        raise StoreError(
            f"{run} is a run in mode {old.name}, and only masters of bf16 weights can be {forms['master']}; leave "
            "--master out"
        )
    new = make_mode(old.precision, old.optimizer, **{**_forms_of(old), **forms})
    if new == old:
        listed = " and ".join(f"{what} in {form}" for what, form in forms.items())
        raise StoreError(f"{run} has {listed} already; resume the run as it is")
    return new


def _forms_of(mode: Mode) -> dict[str, str]:
    return {"master": mode.master, "moments": moments_name(mode.moment_dtype)}


def convert(
    source: StoreSource, made: Conversion, queue: Queue, progress: Callable[[int], None] = lambda _: None
) -> Converted:
    """Writes the new run and commits it. The run that is converted stays as it is.

    Args:
        source: the run; stays open.
        made: made by `plan` for this run.
        queue: queue for reads and writes; owned by the caller.
        progress: called with the number of bytes after each write.

    Raises:
        StoreError: if there is a run of the new name, there is not enough room, or the run is damaged.
        IoError: if something cannot be read or written. Nothing is left of the new run then.
    """
    stores: list[Store] = []
    run_id = uuid.uuid4().hex
    with contextlib.ExitStack() as opened:
        try:
            for rank, spec in enumerate(made.specs):
                paths = [folder.parent.parent for folder in source.folders[rank]]
                store = Store(paths, made.run, rank, spec, queue)
                opened.callback(store.close)
                store.create(run_id=run_id)
                stores.append(store)
            for rank, store in enumerate(stores):
                StateConverter(source, made.before, made.after, rank, store, progress).run()
            # Last: until all ranks have a commit there is no run of the new name that could be resumed.
            for commit, store in zip(source.commits, stores, strict=True):
                store.commit(commit.record.step, commit.contents)
        except BaseException:
            for store in stores:
                store.remove()
            raise
        return Converted(
            run=stores[0].folders[0].parent,
            step=source.step,
            before=_forms_of(made.before.mode),
            after=_forms_of(made.after.mode),
            nbytes=made.nbytes,
        )
