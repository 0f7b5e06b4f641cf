"""The parts of a checkpoint that a grid of processes has saved: stages of a pipeline, shards of tensor parallelism.

    <tag>/manifest.json                     describes the whole, with the checksum of each part's manifest
    <tag>/pp0of2-tp1of2/manifest.json       a part: a checkpoint of the processes that have the same layers and the
    <tag>/pp0of2-tp1of2/states.rank0...     same shards

All parts are written into one folder, which gets its name at the end: a checkpoint has all of them, or is none.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.engine.checkpoint.files import MANIFEST, PART, Manifest, instead_of, read_manifest, wrong_files
from offload.errors import StoreError
from offload.fileio import inner_folder

if TYPE_CHECKING:  # these import torch, which looking at a checkpoint does not need
    from offload.distributed.process_group import Mesh
    from offload.engine.distributed.tensor_parallel import TensorParallel
    from offload.layout.flat_layout import UnitLayout

_FILES = re.compile(r"manifest\.json|(states|progress)\.rank[0-9]+\.safetensors")


@dataclass(frozen=True, kw_only=True)
class CheckpointPlace:
    """The files of a checkpoint that one process writes, and reads again."""

    rank: int
    """This process among those that divide states by ZeRO, whose number its files have."""
    mesh: Mesh
    """The arrangement of those."""
    grid: TensorParallel | None
    """None if there is ZeRO alone, and one part that is the checkpoint itself."""

    @property
    def part(self) -> str:
        """Name of the folder of this process's part; empty for the checkpoint itself."""
        return "" if self.grid is None else self.grid.part

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of all parts; none if the checkpoint is whole."""
        return () if self.grid is None else self.grid.parts

    def described(self, layout: Mapping[str, Any], about: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the description of this process's part, and what is said about its model.

        Args:
            layout: Made by `offload.layout.fingerprint.describe`.
            about: Made by `offload.layout.fingerprint.about`.
        """
        if self.grid is None:
            return dict(layout), dict(about)
        divided = {name: self.grid.dims.get(name) for name in sorted(self.grid.sharded)}
        return {**layout, **self.grid.description}, {**about, "divided": divided, "elsewhere": sorted(self.grid.tied)}

    def own(self, checkpoint: Path) -> Path:
        """Returns the folder of this process's part of a checkpoint.

        Raises:
            StoreError: If another grid has saved the checkpoint, or none, or files of a part are missing.
        """
        manifest = read_manifest(checkpoint)
        saved = manifest.parts or tuple(filter(None, [_part_of(manifest.layout)]))
        if saved == self.parts:
            check_parts(checkpoint, manifest)
            return checkpoint / self.part
        raise StoreError(
            f"the checkpoint {checkpoint} was saved by {_grid(saved)}, this engine has {_grid(self.parts)}: start as "
            "many processes in the same grid; or take the weights alone, by offload export, and give them to the "
            "model before offload.initialize"
        )


def _part_of(layout: Mapping[str, Any]) -> str:
    """Returns a name for the part that a manifest describes; empty for that of a whole model."""
    return "a part of a grid" if "tensor_parallel" in layout or "pipeline" in layout else ""


def _grid(parts: Sequence[str]) -> str:
    """Returns a grid in words."""
    return (
        f"processes with the parts {', '.join(parts)}" if parts else "processes without pipeline or tensor parallelism"
    )


def counted_units(described: Mapping[str, Any], layouts: Sequence[UnitLayout], place: CheckpointPlace) -> list[Any]:
    """Returns the units of a part for people, without parameters that another part has counted.

    Args:
        described: Made by `offload.layout.fingerprint.describe`.
        layouts: The layouts that it describes.
        place: This process.
    """
    grid = place.grid
    if grid is None:
        return list(described["units"])
    elsewhere = grid.counted_elsewhere(layouts)
    units = []
    for unit, content in enumerate(described["units"]):
        # Of a parameter that is divided each part counts its own.
        kept = [each for position, each in enumerate(content["parameters"]) if (unit, position) not in elsewhere]
        units.append({"name": content["name"], "parameters": kept})
    return [each for each in units if each["parameters"]]


# -- folders ------------------------------------------------------------------------------------------


def strangers(folder: Path) -> list[str]:
    """Returns the names in a folder that are not files of a checkpoint, or of its parts."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if PART.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                found += [f"{entry.name}/{name}" for name in strangers(Path(entry.path))]
            elif not _FILES.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
                found.append(entry.name)
    return sorted(found)


def delete(folder: Path, depth: int = 1) -> None:
    """Deletes a folder of ours, file by file. The manifest is deleted last: it identifies the folder as ours.

    A file that another process has deleted meanwhile is no error. A file that was added meanwhile is kept, and so is
    the folder; this raises `OSError`.

    Args:
        folder: The folder.
        depth: Number of names at its end that no link may have.
    """
    with contextlib.suppress(FileNotFoundError):
        # From the folder itself: by its path, a link that somebody puts there would lead to files of others.
        with inner_folder(folder, depth) as here:
            for name in sorted(os.listdir(here), key=lambda name: name == MANIFEST):
                if PART.fullmatch(name) and stat.S_ISDIR(os.stat(name, dir_fd=here, follow_symlinks=False).st_mode):
                    delete(folder / name, depth + 1)
                elif _FILES.fullmatch(name):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=here)
        with inner_folder(folder.parent, depth - 1) as above:
            os.rmdir(folder.name, dir_fd=above)


def check_parts(checkpoint: Path, manifest: Manifest) -> None:
    """Raises `StoreError` if a part of a checkpoint is incomplete, or is that of another save."""
    # A whole checkpoint is checked as it is read.
    if manifest.parts and (wrong := wrong_files(checkpoint, manifest)):
        reasons = "; ".join(f"{name} {reason}" for name, reason in wrong.items())
        raise StoreError(f"the checkpoint {checkpoint} is incomplete or damaged: {reasons}; {instead_of(checkpoint)}")
