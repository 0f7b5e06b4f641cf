"""Notes beside the swap files: how a run ended, and that a commit was found damaged.

The notes of an end are stored in the run's folder on its first drive, for all ranks. The note of damage is stored in
the rank's folder on that drive.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from offload.errors import StoreError
from offload.fileio import sync_folder
from offload.records import fields, read, whole
from offload.swapper.store.rank_folder import is_there, read_whole, reserve, unlink, write_durably

FINISHED = "finished.json"
"""Name of the note that the run ended. The files beside the note are remainders, from which no run resumes."""
CLOSED = "closed.json"
"""Name of the note that the run was closed without being kept. It can be resumed, or replaced by a start of its job.

Its contents are the steps, the job, and `saved`: true if the user has the weights of the last step in other files.
"""
RESHARDED = "resharded.json"
"""Name of the note that swap files for another number of ranks are complete, and replace those of the run."""


def read_finished(run: Path) -> dict[str, Any] | None:
    """Returns the note that the run in a folder has ended; None without one, and for a file that is no such note.

    A run writes the note durably before it deletes a file. What cannot be read is therefore damage or a file of
    somebody else's, and the swap files beside it may be the whole run.
    """
    try:
        note: dict[str, Any] = read(read_whole(run / FINISHED), fields({"steps": whole()}))
    except (OSError, ValueError):
        return None
    return note


class RunNotes:
    """The notes that one rank reads and writes. The rank's lock must be held."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the rank's folder on the first drive."""
        self._finished = folder.parent / FINISHED
        self._closed = folder.parent / CLOSED
        self._suspect = folder / "suspect"

    # -- the end of a run -----------------------------------------------------------------------------

    def write_finished(self, facts: Mapping[str, Any]) -> None:
        """Writes `finished.json` durably: `facts` and the date."""
        note = dict(facts, date=datetime.now(timezone.utc).isoformat(timespec="seconds"))
        write_durably(self._finished, json.dumps(note).encode())

    def write_closed(self, facts: Mapping[str, Any]) -> None:
        """Writes `closed.json` durably: `facts`."""
        write_durably(self._closed, json.dumps(facts).encode())

    def forget_end(self) -> None:
        """Deletes the notes of an earlier end durably. Afterwards the swap files count as a run that did not end.

        Raises:
            StoreError: if a folder has the name of a note.
        """
        notes = [note for note in (self._finished, self._closed) if is_there(note)]
        for note in notes:
            if note.is_dir():
                raise StoreError(f"{note} is a folder, expected a note of the run or nothing: remove or rename it")
        for note in notes:
            unlink(note)
        if notes:
            sync_folder(self._finished.parent)

    def unlink_end(self) -> None:
        """Deletes the notes of an end with the run. The deletion is not synced."""
        for note in (self._finished, self._closed):
            unlink(note)

    # -- damage ---------------------------------------------------------------------------------------

    @property
    def suspect(self) -> bool:
        """True if an earlier process found damage in the last commit. Then all of the commit is compared at `open`."""
        return is_there(self._suspect)

    def mark_suspect(self) -> None:
        """Writes the note of damage, which does not survive every power cut. Any thread may call this method."""
        # The caller reports the damage itself; a note that cannot be written must not hide that error. Nor does a
        # verification write into a folder of another user.
        with contextlib.suppress(OSError, StoreError):
            reserve(self._suspect, 1)

    def clear_suspect(self) -> None:
        """Deletes the note of damage, if there is one."""
        unlink(self._suspect)
