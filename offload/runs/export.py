"""Implementation of `offload export`: writes the weights of a run or a checkpoint as files that transformers loads.

`model_io.save` decides the content and writes it. All files are written into a folder beside the requested
one, and this folder is renamed at the end, so that the output folder is complete or absent.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from offload.aio.protocols import Queue
from offload.checkpoint.files import read_manifest
from offload.checkpoint.load import CheckpointSource
from offload.errors import StoreError
from offload.fileio import atomic_write, naming_errors, real_path
from offload.layout.modes import dtype_name
from offload.model_io.base_files import as_metadata
from offload.model_io.folder import CONFIG
from offload.model_io.grid import WholeSource, whole_of_checkpoint
from offload.model_io.save import (
    ExportPlan,
    Files,
    arriving,
    check_room,
    copy_tokenizer,
    make_plan,
    notices,
    stream,
    tokenizer_files,
)
from offload.model_io.saved_names import described_adapter, described_names
from offload.model_io.source import Source, StoreSource
from offload.notices import announce, folder_to_make
from offload.offline.merge import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from offload.runs.own_checkpoint import find_own
from offload.swapper.store import note_saved as write_note


class Exported(NamedTuple):
    """Result of an export."""

    path: Path
    step: int
    dtype: str
    files: tuple[str, ...]
    nbytes: int
    """Bytes of all tensors."""
    parameters: int
    notices: tuple[str, ...]


def open_source(path: Path, queue: Queue) -> StoreSource | CheckpointSource | WholeSource:
    """Opens the weights in `path`.

    `path` is a run's folder, a checkpoint's, or a folder of several checkpoints, whose latest is taken. The queue is
    the caller's.
    """
    checkpoint = find_own(path)
    if checkpoint is None:
        source = StoreSource(real_path(path), queue)
        for wrong in source.wrong:
            announce(f"{wrong}; the step that is read is {source.step}, and a later one may be lost")
        return source
    if read_manifest(checkpoint).parts:
        return whole_of_checkpoint(checkpoint, queue)
    return CheckpointSource(checkpoint, queue)


def with_states(source: StoreSource | CheckpointSource | WholeSource, path: Path) -> StoreSource | CheckpointSource:
    """Returns a source with optimizer states; raises `StoreError` for a source of parts, which has only weights."""
    if isinstance(source, WholeSource):
        raise StoreError(
            f"{path} was saved in parts by a pipeline or tensor parallelism, of which weights alone are put together: "
            "export without --format; optimizer states are loaded by engine.load_checkpoint in the same grid"
        )
    return source


def plan_export(source: Source, dtype: str | None, shard_nbytes: int) -> tuple[ExportPlan, Mapping[str, Any] | None]:
    """Returns the plan of an export, and the config of the adapter if the source trains one of peft alone.

    An adapter that names its base model is exported as peft saves it, without the base model's weights.
    """
    adapter = described_adapter(source.about)
    if adapter is None:
        return make_plan(source, dtype, shard_nbytes, saved=described_names(source.about)), None
    config = adapter.config
    recorded = source.files[0] if isinstance(source, StoreSource) else None
    if recorded and Path(config["base_model_name_or_path"]).is_absolute():
        # A resume records where the model's files are now; the config is that of the first start. The files of the
        # hub's cache are links to another folder.
        folder = Path(recorded["files"][0]["path"]).parent
        if (folder / CONFIG).is_file():
            config = {**config, "base_model_name_or_path": str(folder)}
    plan = make_plan(source, dtype, shard_nbytes, frozen=False, name=ADAPTER_WEIGHTS, saved=adapter.names)
    return replace(plan, metadata={**plan.metadata, **as_metadata(adapter.base_files)}), config


def export(
    source: Source,
    out: Path,
    plan: ExportPlan,
    queue: Queue,
    progress: Callable[[int], None] = lambda _: None,
    tokenizer: Path | None = None,
    write_tokenizer: Callable[[Path], None] | None = None,
    adapter: Mapping[str, Any] | None = None,
) -> Exported:
    """Writes the planned weights to the folder `out`, which must not exist, or be empty.

    After a failure nothing is left. A kill leaves `<out>.partial`, which the next export removes. The source stays
    open, and the queue is the caller's, best that of the source's reads. `progress` receives the bytes of each read.
    The tokenizer is copied from the folder `tokenizer`, or written by `write_tokenizer` into the folder that it
    receives. `plan` and `adapter` are the results of `plan_export`.
    """
    out = real_path(out)
    check_target(out)
    if tokenizer is not None:
        # A folder without a tokenizer is reported before anything is written.
        tokenizer_files(tokenizer)
    messages: list[str] = []
    # Everything is written into a staging folder; `out` appears complete when the context ends.
    with arriving(out, messages.append) as folder:
        # The staging folder is on the same drive as `out` and exists already.
        check_room(folder, plan.nbytes, out)
        with Files(folder, plan, source.buffers, queue) as files:
            beyond = stream(source, plan, files.put, progress)
        if adapter is not None:
            atomic_write(folder / ADAPTER_CONFIG, json.dumps(adapter, indent=2))
        if tokenizer is not None:
            copy_tokenizer(tokenizer, folder)
        elif write_tokenizer is not None:
            with naming_errors(folder, "write"):
                write_tokenizer(folder)
    return Exported(
        out,
        source.step,
        dtype_name(plan.dtype),
        tuple(sorted(path.name for path in out.iterdir())),
        plan.weights_nbytes,
        sum(s.value_numel for layout in plan.layouts for s in layout.segments if s.name in plan.cuts),
        (*messages, *notices(source, plan, beyond, adapter)),
    )


def check_target(out: Path) -> None:
    """Raises `StoreError` if `out` exists and is not an empty folder, is a mount point, or has no parent folder."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise StoreError(f"{out} exists already; give a folder that does not exist, or an empty one")
    if out.is_symlink() and not out.exists():
        raise StoreError(f"{out} is a link to a folder that is not there; make the folder, or give another")
    # A mount point cannot be renamed, so the folder could not be put in place at the end.
    if out.is_mount():
        raise StoreError(f"{out} is a drive's root, which cannot be replaced; give a folder in it")
    if not out.parent.is_dir():
        raise StoreError(f"there is no folder {folder_to_make(out.parent)}")


def note_saved(source: Source, path: Path) -> None:
    """Records that the weights of an ended run are in other files, so that any start may replace the run."""
    if isinstance(source, StoreSource):
        # A copy of a run may be on a read-only drive. Without the note such a start is refused, as before.
        with contextlib.suppress(OSError):
            write_note(path, source.step)
