"""Files that somebody else may have put there, opened without waiting and read within bounds."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file for reading. The open of a pipe would wait for a writer.

    Args:
        path: The file, or a link to it.

    Raises:
        OSError: If there is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bounded(path: Path, most_nbytes: int) -> bytes:
    """Returns the bytes of a regular file.

    Args:
        path: The file.
        most_nbytes: Bytes that the file may have; a sparse file may claim terabytes.

    Raises:
        OSError: If there is no regular file, or it cannot be read.
        ValueError: If the file is larger.
    """
    with open_regular(path) as file:
        data = file.read(most_nbytes + 1)
    if len(data) > most_nbytes:
        raise ValueError(f"it has more than {most_nbytes} bytes")
    return data
