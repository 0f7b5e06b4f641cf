"""Bytes that two files share until one of them is written to: Btrfs, XFS and some others can (`FICLONERANGE`)."""

from __future__ import annotations

import fcntl
import struct

_FICLONERANGE = 0x4020940D
_RANGE = struct.Struct("=qQQQ")  # descriptor, offset and bytes of what is cloned, offset in the clone


def clone_range(source: int, start: int, nbytes: int, destination: int, offset: int) -> bool:
    """Let bytes of `destination` be those of `source`, without a copy; False where the file systems cannot.

    Both are open descriptors; offsets and `nbytes`, which is above 0, are multiples of 4096.
    """
    try:
        fcntl.ioctl(destination, _FICLONERANGE, _RANGE.pack(source, start, nbytes, offset))
    except OSError:
        return False  # another file system, or one that does not share: whoever asks copies, and meets real errors then
    return True
