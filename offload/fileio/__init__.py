"""Files and folders that are written atomically, locked and cached; shared by the whole package."""

from __future__ import annotations

from offload.fileio.atomic_write import (
    atomic_write,
    keep_mode_and_owner,
    replace_durably,
    sync_folder,
    write_all,
    write_new,
)
from offload.fileio.cache_file import cache_file, cache_folder
from offload.fileio.locked_dir import DirLock, LockHeldError, holder_of, lock_folder, this_process

__all__ = [
    "DirLock",
    "LockHeldError",
    "atomic_write",
    "cache_file",
    "cache_folder",
    "holder_of",
    "keep_mode_and_owner",
    "lock_folder",
    "replace_durably",
    "sync_folder",
    "this_process",
    "write_all",
    "write_new",
]
