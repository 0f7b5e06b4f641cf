"""Bytes to and from the drive, and peak memory, of a process."""

from __future__ import annotations

import gc
import logging
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

# -- bytes and memory ---------------------------------------------------------------------------------


class CountedBuffers:
    """Allocates buffers, and counts the bytes of those that are alive."""

    def __init__(self, allocate: Callable[[int], memoryview]) -> None:
        self._allocate = allocate
        self.now = self.most = 0

    def __call__(self, nbytes: int) -> memoryview:
        memory = self._allocate(nbytes)
        self.now += nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(memory, self._freed, nbytes)
        return memory

    def _freed(self, nbytes: int) -> None:
        self.now -= nbytes


class DiskBytes:
    """Bytes that this process has moved to and from block devices since the object was made."""

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[int, int]:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["read_bytes"]), int(fields["write_bytes"])

    @property
    def read(self) -> int:
        return self._now()[0] - self._start[0]

    @property
    def written(self) -> int:
        return self._now()[1] - self._start[1]


def resident() -> int:
    """Returns the bytes of RAM that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_rss() -> int:
    """Returns the peak RAM of this process in bytes. (`ru_maxrss` begins with that of the process that started it.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def _measured(function: Callable[..., Any], arguments: tuple[Any, ...], pipe: Any) -> None:
    logging.disable(logging.CRITICAL)
    value = function(*arguments)
    gc.collect()
    pipe.send((value, peak_rss()))


def peak_in(context: Any, function: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """Calls `function` in a process of `context`; one of `processes()` starts with its server's memory."""
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measured, args=(function, arguments, sender))
    process.start()
    sender.close()
    try:
        value, peak = receiver.recv()
    except EOFError as error:
        raise AssertionError("the measured process died") from error
    except BaseException:
        process.kill()  # a test whose time is over would wait for it below
        raise
    finally:
        process.join()
        receiver.close()
    return value, peak
