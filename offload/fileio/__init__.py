"""Files and folders that are written atomically, locked and cached; shared by the whole package."""

from __future__ import annotations

from offload.fileio.atomic_write import (
    atomic_write,
    check_name,
    check_place,
    check_writable,
    keep_mode_and_owner,
    naming_errors,
    replace_durably,
    sync_folder,
    write_all,
    write_new,
)
from offload.fileio.cache_file import cache_file, cache_folder, own_cache_folder, read_cache, write_cache
from offload.fileio.inner_files import (
    check_ours,
    foreign_owner,
    inner_folder,
    inner_name,
    inner_opener,
    inner_status,
    open_inner,
    read_inner,
    real_path,
)
from offload.fileio.locked_dir import DirLock, LockHeldError, holder_of, lock_folder, this_process

__all__ = [
    "DirLock",
    "LockHeldError",
    "atomic_write",
    "cache_file",
    "cache_folder",
    "check_name",
    "check_ours",
    "check_place",
    "check_writable",
    "foreign_owner",
    "holder_of",
    "inner_folder",
    "inner_name",
    "inner_opener",
    "inner_status",
    "keep_mode_and_owner",
    "lock_folder",
    "naming_errors",
    "open_inner",
    "own_cache_folder",
    "read_cache",
    "read_inner",
    "real_path",
    "replace_durably",
    "sync_folder",
    "this_process",
    "write_all",
    "write_cache",
    "write_new",
]
