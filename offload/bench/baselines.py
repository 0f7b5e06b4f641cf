"""Peers of the I/O queue: other ways in which a Python program can read and write a file."""

from __future__ import annotations

import asyncio
import importlib
import os
import resource
import time
from typing import Any

from offload.aio.measure import TimedTransfer
from offload.errors import ConfigError

NAMES = ("aiofiles", "python-libaio")
_MODULES = {"aiofiles": "aiofiles", "python-libaio": "libaio"}


def check(name: str) -> None:
    """Raises `ConfigError` if the package that `name` needs is not installed, or lacks a system library."""
    module = _MODULES.get(name)
    if module is None:
        return
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{name} needs the package {module}: pip install 'offload[bench]'") from error
    except OSError as error:  # python-libaio loads a system library
        raise ConfigError(f"{name} needs libaio.so.1 (Debian: apt install libaio1): {error}") from error


class PythonContender:
    """A contender that moves the caller's buffer to and from a file with one of `NAMES`."""

    def __init__(self, name: str, path: str, buffer: memoryview, block_bytes: int, depth: int) -> None:
        self._run = _aiofiles if name == "aiofiles" else _libaio
        self._path, self._depth = path, depth
        nbytes = min(len(buffer), os.stat(path).st_size)
        starts = range(0, nbytes // block_bytes * block_bytes, block_bytes)
        self._blocks = [(start, buffer[start : start + block_bytes]) for start in starts]

    def run(self, operation: str) -> TimedTransfer:
        """Moves every complete block once and returns the pass. "mixed" writes every other block."""
        work = [
            (start, block, operation == "write" or (operation == "mixed" and index % 2 == 1))
            for index, (start, block) in enumerate(self._blocks)
        ]
        # aiofiles reads through the page cache; a cached file would measure memory.
        _forget(self._path)
        # Processor time of the entire process, since these packages use threads of their own.
        usage, start_time = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        self._run(self._path, work, self._depth)
        seconds, after = time.perf_counter() - start_time, resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime
        return TimedTransfer(sum(len(block) for _, block, _ in work), seconds, cpu)

    def latency(self, operation: str, fraction: float) -> float | None:
        """Returns None: these packages report no times of single blocks."""
        return None

    def close(self) -> None:
        """Does nothing: no resource is held between passes."""


def _forget(path: str) -> None:
    """Writes the file back and drops its cached pages, so that the next read comes from the drive."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # The sync must come first: dirty pages cannot be dropped.
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _aiofiles(path: str, work: list[tuple[int, memoryview, bool]], depth: int) -> None:
    """Moves the blocks in `depth` tasks through the page cache, each task with a file handle; syncs at the end."""
    import aiofiles

    async def task(mine: list[tuple[int, memoryview, bool]]) -> None:
        async with aiofiles.open(path, "r+b", buffering=0) as file:
            for start, block, writes in mine:
                await file.seek(start)
                done = await (file.write(block) if writes else file.readinto(block))
                if done != len(block):
                    raise OSError(f"aiofiles moved {done} of {len(block)} bytes")

    async def all_tasks() -> None:
        await asyncio.gather(*(task(work[index::depth]) for index in range(depth)))

    asyncio.run(all_tasks())
    if any(writes for _, _, writes in work):
        descriptor = os.open(path, os.O_RDONLY)
        os.fdatasync(descriptor)
        os.close(descriptor)


def _libaio(path: str, work: list[tuple[int, memoryview, bool]], depth: int) -> None:
    """Moves the blocks with the kernel's AIO and O_DIRECT, `depth` blocks in flight, from one thread."""
    import libaio

    descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)
    waiting: Any = iter(work)

    def request(start: int, block: memoryview, writes: bool) -> Any:
        mode = libaio.AIOBLOCK_MODE_WRITE if writes else libaio.AIOBLOCK_MODE_READ
        return libaio.AIOBlock(mode=mode, target_file=descriptor, buffer_list=[block], offset=start)

    try:
        with libaio.AIOContext(depth) as context:
            left = 0
            # `range` first: once exhausted, `zip` stops before it takes another item from `waiting`.
            for _, item in zip(range(depth), waiting, strict=False):
                context.submit([request(*item)])
                left += 1
            while left:
                for block, moved, _ in context.getEvents():
                    left -= 1
                    if moved != sum(len(part) for part in block.buffer_list):
                        raise OSError(f"libaio moved {moved} bytes of a block")
                    item = next(waiting, None)
                    if item is not None:
                        context.submit([request(*item)])
                        left += 1
    finally:
        os.close(descriptor)
