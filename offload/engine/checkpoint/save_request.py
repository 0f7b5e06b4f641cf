"""What is saved, and where: the arguments of a save, checked, and the state of a rank beside its partitions."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offload.engine.checkpoint.directory import holds_run
from offload.engine.checkpoint.files import check_folder, check_tag
from offload.errors import UsageError
from offload.swapper.store.inspection import is_rank


class SaveRequest(NamedTuple):
    """Content and destination of a save."""

    folder: Path
    tag: str
    latest: bool
    """True to write the tag into `latest`."""
    frozen: bool
    """True to save frozen weights."""
    keep_last: int | None
    """Number of checkpoints to keep in the folder; None for all."""

    @property
    def checkpoint(self) -> Path:
        """Folder of the checkpoint."""
        return self.folder / self.tag

    @classmethod
    def checked(cls, folder: Any, tag: Any, latest: bool, frozen: bool, keep_last: Any) -> SaveRequest:
        """Returns the request for a user's arguments.

        Args:
            folder: Folder of checkpoints.
            tag: Name of the checkpoint in the folder.
            latest: True to write the tag into `latest`.
            frozen: True to save frozen weights.
            keep_last: Number of checkpoints to keep; None for all.

        Raises:
            UsageError: If an argument is not valid.
        """
        if keep_last is not None:
            keep_last = _count(keep_last)
        path = check_folder(folder, "save_dir")
        if holds_run(path) or is_rank(path):
            raise UsageError(
                f"save_dir is {path}, which holds the swap files of a run: give a folder of checkpoints beside it, "
                f"such as {path.absolute().parent / 'checkpoints'}"
            )
        return cls(path, check_tag(tag), bool(latest), bool(frozen), keep_last)


def _count(keep_last: Any) -> int:
    """Returns `keep_last` as an integer of at least 1; raises `UsageError`."""
    try:
        # `operator.index` accepts integers of numpy, which are valid, and True, which is a mistake.
        if not isinstance(keep_last, bool):
            keep_last = operator.index(keep_last)
            if keep_last >= 1:
                return int(keep_last)
    except TypeError:
        pass
    raise UsageError(
        f"keep_last must be a whole number of at least 1, got {keep_last!r}: the new checkpoint is always kept; give "
        "None to keep all"
    )


class Moment(NamedTuple):
    """State of a rank at the time of the save, beside its partitions."""

    step: int
    contents: Mapping[str, torch.Tensor]
    """This rank's progress and client state."""
    layout: Mapping[str, Any]
    about: Mapping[str, Any]
