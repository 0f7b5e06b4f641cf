"""A drive that changes, loses or confuses what a live process has written to it, and says nothing."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offload.aio import DirectFile, File, IoFuture, IoQueue
from offload.aio.file import FilePiece
from offload.sizes import PAGE
from tests.support.drives.fault_injection import LateQueue

KINDS = ("bit", "lost", "stale", "misdirected")
"""A bit flips at rest; a write changes nothing; earlier bytes return; a write goes to another place of its file."""


class Rot:
    """One fault of a drive, at the first request of which `due` returns True and that can have it."""

    def __init__(self, kind: str, seed: int, due: Callable[[str], bool], folder: Path) -> None:
        """Prepares the fault.

        Args:
            kind: one of `KINDS`.
            seed: of the place.
            due: asked about each request, with its operation.
            folder: for a file that receives lost writes.
        """
        self._kind, self._chance, self._due, self._folder = kind, random.Random(seed), due, folder
        self._lock, self._waits = threading.Lock(), False
        self._before: dict[tuple[int, int], bytes] = {}
        """The bytes before the last write, by file and offset."""
        self.struck = ""
        """What was done to which file; empty before."""
        self.was_read = False
        """True once bytes were read that are not those written. Others are of no use, and nothing notices them."""
        self._wrong: list[tuple[int, int, int]] = []
        """File, first byte and end of the ranges that have wrong bytes."""

    def carry_out(self, queue: IoQueue, operation: str, file: File, offset: int, buffer: memoryview) -> IoFuture:
        """Runs a request to its end, with the fault if its time has come."""
        pieces = file.pieces(offset, len(buffer))
        with self._lock:
            self._waits = not self.struck and (self._waits or self._due(operation))
            strikes = self._waits and bool(buffer) and self._can_strike(operation, pieces)
            if strikes:
                self.struck = f"{self._kind} in a {operation} of {len(buffer)} bytes of {pieces[0].owner.path}"
                self._waits = False
        if operation == "write":
            for piece in pieces if self._kind == "stale" and not self.struck else ():
                self._before[_inode(piece), piece.offset] = os.pread(piece.buffered, piece.nbytes, piece.offset)
            if strikes and self._kind == "lost":
                file, offset = DirectFile(self._folder / "lost", create=True), offset % PAGE
            elif strikes and self._kind == "misdirected":
                file, offset = self._other(file, pieces[0])
            if strikes:
                self._wrong = [_bytes_of(each) for each in (*pieces, *file.pieces(offset, len(buffer)))]
            elif self.struck:
                self._overwrite([_bytes_of(each) for each in pieces])
        elif strikes and self._kind == "stale":
            for piece in pieces:
                if (old := self._before.get((_inode(piece), piece.offset))) is not None:
                    os.pwrite(piece.buffered, old[: piece.nbytes], piece.offset)
        if operation == "read" and self.struck:
            self.was_read |= strikes or any(
                _overlap(_bytes_of(each), wrong) for each in pieces for wrong in self._wrong
            )
        if strikes and self._kind == "bit" and operation == "read":
            self._flip(pieces)
        future: IoFuture = getattr(queue, operation)(file, offset, buffer, checksum=True)
        future.wait()
        if strikes and self._kind == "bit" and operation == "write":
            self._flip(pieces)
        return future

    def _can_strike(self, operation: str, pieces: list[FilePiece]) -> bool:
        if self._kind in ("lost", "misdirected"):
            return operation == "write"
        if self._kind == "bit":
            return True
        old = [self._before.get((_inode(each), each.offset)) for each in pieces]
        now = [os.pread(each.buffered, each.nbytes, each.offset) for each in pieces]
        return operation == "read" and any(a is not None and a[: len(b)] != b for a, b in zip(old, now, strict=True))

    def _overwrite(self, written: list[tuple[int, int, int]]) -> None:
        """Forgets wrong bytes that are written again."""
        for file, start, stop in written:
            self._wrong = [
                (which, a, b)
                for which, first, last in self._wrong
                for a, b in (
                    [(first, min(last, start)), (max(first, stop), last)] if which == file else [(first, last)]
                )
                if a < b
            ]

    def _flip(self, pieces: list[FilePiece]) -> None:
        piece = self._chance.choice([each for each in pieces if each.nbytes])
        at = piece.offset + self._chance.randrange(piece.nbytes)
        (byte,) = os.pread(piece.buffered, 1, at)
        os.pwrite(piece.buffered, bytes([byte ^ 1 << self._chance.randrange(8)]), at)

    def _other(self, file: File, piece: FilePiece) -> tuple[File, int]:
        """Returns another place of the file of a piece, at the same offset in its page."""
        part = next(each for each in file.parts() if each.descriptors is piece.owner)
        pages = max((part.size() - piece.nbytes) // PAGE, 1)
        at = piece.offset
        while at == piece.offset:
            if pages == 1:  # a file without another place: what went elsewhere is lost
                return DirectFile(self._folder / "lost", create=True), piece.offset % PAGE
            at = self._chance.randrange(pages) * PAGE + piece.offset % PAGE
        return part, at


def _inode(piece: FilePiece) -> int:
    return os.fstat(piece.buffered).st_ino


def _bytes_of(piece: FilePiece) -> tuple[int, int, int]:
    return _inode(piece), piece.offset, piece.offset + piece.nbytes


def _overlap(left: tuple[int, int, int], right: tuple[int, int, int]) -> bool:
    return left[0] == right[0] and left[1] < right[2] and right[1] < left[2]


class RottingQueue(LateQueue):
    """A queue over a drive with one fault. Requests end at their submission, so that a seed fixes all of them."""

    def __init__(self, rot: Rot) -> None:
        super().__init__(0, 0.0)
        self._rot = rot

    def read(self, file: File, offset: int, buffer: memoryview, **_: Any) -> Any:
        return self._rot.carry_out(self._inner, "read", file, offset, buffer)

    def write(self, file: File, offset: int, buffer: memoryview, **_: Any) -> Any:
        return self._rot.carry_out(self._inner, "write", file, offset, buffer)
