"""`offload export`: the weights of a run or a checkpoint as files that transformers loads.

What is written, and how, is `engine.model_write`. Everything is written into a folder beside the one that is asked for,
which takes its name in the end.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from offload.aio.protocols import Queue
from offload.engine.checkpoint.files import find
from offload.engine.model_io.checkpoint_source import CheckpointSource
from offload.engine.model_io.output_folder import arriving, check_room, copy_tokenizer, tokenizer_files
from offload.engine.model_io.weight_source import Source, StoreSource
from offload.engine.model_io.weight_writer import Files, Plan, make_plan, notices, read_nbytes, shard_size, stream
from offload.errors import StoreError
from offload.swapper.modes import dtype_name

__all__ = ["Exported", "check_target", "export", "make_plan", "open_source", "read_nbytes", "shard_size"]


class Exported(NamedTuple):
    """What was written."""

    path: Path
    epoch: int
    dtype: str
    files: tuple[str, ...]
    nbytes: int
    """Of all tensors."""
    parameters: int
    notices: tuple[str, ...]


def open_source(path: Path, queue: Queue) -> Source:
    """A run's folder, a checkpoint's, or one of checkpoints, of which it is the latest. Raises `StoreError`."""
    checkpoint = find(path, None)
    return StoreSource(path, queue) if checkpoint is None else CheckpointSource(Path(checkpoint), queue)


def export(
    source: Source,
    out: Path,
    plan: Plan,
    progress: Callable[[int], None] = lambda _: None,
    tokenizer: Path | None = None,
) -> Exported:
    """Write what is planned to the folder `out`, which must not be there, or be empty.

    The files of a tokenizer come along from the folder `tokenizer`. Where it fails, nothing is left; a kill leaves
    `<out>.partial`, which the next export removes. `progress` is told of bytes as they are read. Raises `StoreError`
    and `IoError`.
    """
    out = out.resolve()
    check_target(out)
    if tokenizer is not None:
        tokenizer_files(tokenizer)
    told: list[str] = []
    with arriving(out, told.append) as folder:
        check_room(folder, plan.nbytes, out)
        with Files(folder, plan, source.buffers) as files:
            beyond = stream(source, plan, files, progress)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, folder)
    return Exported(
        out,
        source.epoch,
        dtype_name(plan.dtype),
        tuple(sorted(path.name for path in out.iterdir())),
        plan.weights_nbytes,
        sum(s.numel for layout in plan.layouts for s in layout.segments if s.name in plan.names),
        (*told, *notices(source, plan, beyond)),
    )


def check_target(out: Path) -> None:
    """Raise `StoreError` where an export to `out` would touch what is there."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise StoreError(f"{out} is there already; give a folder that is not there, or an empty one")
    if out.is_mount():
        raise StoreError(f"{out} is a drive's root, which cannot be replaced; give a folder in it")
    if not out.parent.is_dir():
        raise StoreError(f"there is no folder {out.parent}")
