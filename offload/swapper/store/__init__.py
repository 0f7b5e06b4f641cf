"""The swap store: files that hold every partition on disk, and are the checkpoint that a run resumes from.

    <drive>/<run>/rank<r>/states        the slots of this rank, striped over its drives
    <drive>/<run>/rank<r>/manifest.json the place of each slot
    <first drive>/<run>/rank<r>/        commit, blob.0, blob.1, lock; suspect, if a read found damage;
                                        undo, after an edit on a grid
    <first drive>/<run>/finished.json   after a run that ended: steps and date
    <first drive>/<run>/closed.json     after a `destroy()` without `remove=False`: a start may replace it

Each unit has two slots, A and B, for all its states. An update reads the slot of the newest copy and writes the slot
that the last durable record does not name. If not every step commits, units that may be updated under the backward have
a third slot, C: they write a slot that is not the newest either. Frozen weights belong to all slots and are stored
once: updates write only the bytes before them. A commit makes the data durable. Then it writes a blob with everything
else that belongs to the step, such as the checksums of the data. Last it writes the record. Blobs and records alternate
between two places:

    writes ► fdatasync of every drive ► blob ► fsync ► record ► fsync

No byte that the last durable record names is overwritten before the next record is durable, except frozen weights when
a load replaces them. Whoever adds a name to a folder then syncs the folder. So a process may be killed, and the power
may fail, at any moment. **Recovery.** The newest record with a valid checksum wins. docs/reference/store-format.md
describes the files for other programs.

| file | contents |
|---|---|
| `store.py` | a rank's store while it is open: its files together, reads, writes, commits |
| `recovery.py` | decides which commit a run resumes from, compares its data; slots that an edit has overwritten |
| `drives.py` | the room that a store needs, and how it is divided among drives |
| `requests.py` | requests to an I/O queue; reads compared with checksums; bytes written to each drive |
| `folder.py` | locks, private folders, small files that are replaced atomically, notes such as finished.json |
| `inspection.py` | a rank's folder from outside: contents and damage |
| `runs.py` | a run's folder from outside: status, removal |
| `spill_file.py` | files without a name for gradients and inputs, whose reads are compared too |
| `format.py` | commit record, manifest and blob; checksums of byte ranges and of pages |
| `model_files.py` | the model's own files as a source of weights |
"""

from offload.swapper.store.drives import Shortage, find_shortage
from offload.swapper.store.folder import close_in_children
from offload.swapper.store.format import StoreSpec
from offload.swapper.store.requests import Compared, DriveByteCounter, DriveWrites, Rating, bytes_of
from offload.swapper.store.runs import (
    check_unused,
    find_removal,
    note_saved,
    other_runs,
    rank_folders,
    read_closed,
    remove_run,
    run_status,
)
from offload.swapper.store.store import NoStore, Store

__all__ = [
    "Compared",
    "DriveByteCounter",
    "DriveWrites",
    "NoStore",
    "Rating",
    "Shortage",
    "Store",
    "StoreSpec",
    "bytes_of",
    "check_unused",
    "close_in_children",
    "find_removal",
    "find_shortage",
    "note_saved",
    "other_runs",
    "rank_folders",
    "read_closed",
    "remove_run",
    "run_status",
]
