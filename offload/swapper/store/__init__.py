"""The swap store: the files that hold every partition, and that are the checkpoint.

    <drive>/<run>/rank<r>/states        the extents of this rank, striped over its drives
    <drive>/<run>/rank<r>/manifest.json what lies where
    <first drive>/<run>/rank<r>/        commit, blob.0, blob.1, lock
    <first drive>/<run>/finished.json   after a run that ended: steps and date
    <first drive>/<run>/closed.json     after a `destroy()` that said nothing of keeping: a start may replace the run

Each unit has two slots, A and B, for all its states. An update reads the slot of the newest copy and writes the slot
that the last durable record does not name. What is frozen of its weight is part of both and lies once: updates write
only what lies before it. A commit makes the data durable, writes a blob with all else that a step is
made of, the checksums of the data among it, then one of two alternating records:

    writes ► fdatasync of every drive ► blob ► fsync ► record ► fsync

No byte that a durable record names is overwritten before the next record is durable, and folders are synced where
names are new, so a process may be killed and the power may go at any moment. A torn record fails its checksum, and
the other one counts. docs/store-format.md is for who reads it without us.

| file | what it is |
|---|---|
| `record.py` | the commit record, 4096 bytes |
| `blob.py` | all else that a step is made of; what of it needs no torch, without |
| `manifest.py` | what lies where, and whether two stores are of one run |
| `sums.py` | checksums of stretches, and comparing what is read with them |
| `drives.py` | how much each drive takes |
| `folder.py` | locks, private folders, small files that are replaced whole |
| `requests.py` | what is asked of an I/O queue; bytes of a slot as one request; a read that is compared |
| `store.py` | a rank's store, open |
| `check.py` | all of a commit, compared |
| `look.py` | a rank's folder from outside: what is there, what is wrong |
| `clone.py` | bytes that two files share |
| `written.py` | how much went to each drive, over the life of the run |
| `run.py` | a run's folder from outside |
"""

from offload.swapper.store.drives import Shortage, find_shortage
from offload.swapper.store.format.manifest import StoreSpec
from offload.swapper.store.rank_folder import close_in_children, holder
from offload.swapper.store.requests import Compared, bytes_of
from offload.swapper.store.runs import find_removal, open_rank, other_runs, rank_folders, remove_run, run_status
from offload.swapper.store.store import Store
from offload.swapper.store.write_counts import DriveWrites, Rating, Written

__all__ = [
    "Compared",
    "DriveWrites",
    "Rating",
    "Shortage",
    "Store",
    "StoreSpec",
    "Written",
    "bytes_of",
    "close_in_children",
    "find_removal",
    "find_shortage",
    "holder",
    "open_rank",
    "other_runs",
    "rank_folders",
    "remove_run",
    "run_status",
]
