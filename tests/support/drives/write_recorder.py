"""Runs the real code on a real folder and writes down each write, sync and change of names."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from offload.aio import File, IoFuture, IoQueue, crc32c
from offload.sizes import PAGE
from tests.support.drives.power_cut import IGNORED, Disk, Event, take

# -- writing down what is done ------------------------------------------------------------------------


class Recorder:
    """A recorder of what happens under `root`; the contents at its start are durable.

    Hooks are in the functions by which Python reaches files, not in the code that is tested. `check` compares what was
    written down with what is there, so nothing can be done that is not seen. Requests in flight go through `queue`.
    """

    def __init__(self, root: Path) -> None:
        self.log: list[Event] = []
        self._root = root
        self._numbers: dict[str, int] = {"": 0}
        self._next = 1
        self._open: dict[int, int] = {}
        """Numbers of what is open, by descriptor."""
        self._paths: dict[int, str] = {0: ""}
        self.in_flight: dict[int, int] = {}
        for path, data in take(root).items():
            number = self._make(path, data is None)
            if data:
                self.add("write", number, 0, data)
        for number in range(self._next):
            self.add("sync", number)

    def add(self, what: str, *arguments: Any) -> None:
        number = arguments[0] if arguments and isinstance(arguments[0], int) else 0
        self.log.append(Event(what, arguments, self._paths.get(number, "")))

    def note(self, *what: Any) -> None:
        """Records a note for the reader of the log."""
        self.log.append(Event("note", what, ""))

    def check(self) -> None:
        """Raises where something was done under `root` that was not seen."""
        disk = Disk()
        for event in self.log:
            disk.carry_out(event)
        assert disk.live() == take(self._root), "something was written in a way that is not recorded"

    # -- names --

    def _path(self, path: Any) -> str | None:
        """Returns the path below the root; None where it is elsewhere, or no path."""
        text = os.path.abspath(os.fspath(path))
        if os.path.basename(text) == IGNORED or not text.startswith(f"{self._root}/"):
            return "" if text == str(self._root) else None
        return text[len(str(self._root)) + 1 :]

    def _make(self, path: str, is_folder: bool) -> int:
        number, self._next = self._next, self._next + 1
        folder, _, name = path.rpartition("/")
        self._paths[number] = path
        self.add("make", self._numbers[folder], name, number, is_folder)
        self._numbers[path] = number
        return number

    def _made_folders(self, path: str) -> None:
        """Records `path` and the folders above it that may be new."""
        parts = path.split("/")
        for count in range(1, len(parts) + 1):
            folder = "/".join(parts[:count])
            if folder not in self._numbers and (self._root / folder).is_dir():
                self._make(folder, True)

    def _gone(self, path: str) -> None:
        if path in self._numbers and not os.path.lexists(self._root / path):
            folder, _, name = path.rpartition("/")
            self.add("unlink", self._numbers[folder], name, self._numbers.pop(path))

    # -- the functions --

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Records all that this process does under the root, inside of the block."""
        wraps = [(os, name, getattr(self, f"_wrap_{name}")) for name in ("open", "pwrite", "replace")]
        wraps += [(os, name, self._wrap_length) for name in ("posix_fallocate", "ftruncate")]
        wraps += [(os, name, self._wrap_sync) for name in ("fsync", "fdatasync")]
        wraps += [(Path, name, self._wrap_names) for name in ("mkdir", "unlink", "rmdir")]
        wraps += [(os, name, self._wrap_names_below) for name in ("mkdir", "unlink", "rmdir")]
        wraps += [(shutil, "rmtree", lambda _: _remove_tree)]
        with contextlib.ExitStack() as patches:
            for where, name, wrap in wraps:
                patches.enter_context(mock.patch.object(where, name, wrap(getattr(where, name))))
            yield

    def _wrap_open(self, real: Any) -> Any:
        def open_(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
            descriptor: int = real(path, flags, *arguments, **options)
            text = _whole(path, options.get("dir_fd"))
            if isinstance(text, str) and text.startswith("/proc/self/fd/"):
                number = self._open.get(int(text.rpartition("/")[2]))
            else:
                inside = self._path(text)
                if inside is not None and inside not in self._numbers:
                    self._make(inside, False)
                number = None if inside is None else self._numbers[inside]
            self._open.pop(descriptor, None)
            if number is not None:
                self._open[descriptor] = number
            return descriptor

        return open_

    def _wrap_pwrite(self, real: Any) -> Any:
        def pwrite(descriptor: int, data: Any, offset: int) -> int:
            done: int = real(descriptor, data, offset)
            self.wrote(descriptor, offset, bytes(data[:done]))
            return done

        return pwrite

    def wrote(self, descriptor: int, offset: int, data: bytes) -> int | None:
        """Bytes were written, or are on their way; the number of their file, where it is recorded."""
        number = self._open.get(descriptor)
        if number is not None:
            self.add("write", number, offset, data)
        return number

    def _wrap_length(self, real: Any) -> Any:
        def change(descriptor: int, *arguments: int) -> None:
            real(descriptor, *arguments)
            if descriptor in self._open:
                self.add("resize", self._open[descriptor], os.fstat(descriptor).st_size)

        return change

    def _wrap_sync(self, real: Any) -> Any:
        def sync(descriptor: int) -> None:
            number = self._open.get(descriptor)
            if number is not None:
                assert not self.in_flight.get(number), "a sync covers only writes that have ended"
                self.add("sync", number)
            real(descriptor)

        return sync

    def _wrap_replace(self, real: Any) -> Any:
        def replace(old: Any, new: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
            real(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            before, after = self._path(_whole(old, src_dir_fd)), self._path(_whole(new, dst_dir_fd))
            if before is not None and after is not None:
                (folder, _, source), (target_folder, _, target) = before.rpartition("/"), after.rpartition("/")
                assert folder == target_folder, "a rename from one folder to another is not modelled"
                number = self._numbers[after] = self._numbers.pop(before)
                self._paths[number] = after
                self.add("rename", self._numbers[folder], source, target, number)

        return replace

    def _wrap_names(self, real: Any) -> Any:
        def change(path: Path, *arguments: Any, **options: Any) -> None:
            real(path, *arguments, **options)
            inside = self._path(path)
            if inside:
                self._made_folders(inside)
                self._gone(inside)

        return change

    def _wrap_names_below(self, real: Any) -> Any:
        def change(name: Any, *arguments: Any, dir_fd: int | None = None) -> None:
            if dir_fd is None:  # of a path's own method, which is recorded
                real(name, *arguments)
                return
            real(name, *arguments, dir_fd=dir_fd)
            inside = self._path(_whole(name, dir_fd))
            if inside:
                self._made_folders(inside)
                self._gone(inside)

        return change


def _whole(name: Any, folder: int | None) -> str:
    """The path of a name in an open folder."""
    text = os.fspath(name)
    return text if folder is None else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)


def _remove_tree(path: Path, ignore_errors: bool = False) -> None:
    """Removes a folder as `shutil.rmtree` does, by functions that are recorded."""
    if not path.is_dir():
        assert ignore_errors
        return
    for child in path.iterdir():
        _remove_tree(child) if child.is_dir() else child.unlink()
    path.rmdir()


class _Ending:
    """A write under way, until it is waited for."""

    def __init__(self, future: IoFuture, recorder: Recorder, numbers: list[int]) -> None:
        self._future, self._recorder, self._numbers = future, recorder, numbers

    def done(self) -> bool:
        return self._future.done()

    def wait(self, timeout: float | None = None) -> int:
        nbytes = self._future.wait(timeout)
        while self._numbers:
            self._recorder.in_flight[self._numbers.pop()] -= 1
        return nbytes

    def crc32c(self) -> int:
        return self._future.crc32c()

    def page_crcs(self) -> bytes:
        return self._future.page_crcs()

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        self._future.add_done_callback(lambda _: function(self))


class RecordingQueue:
    """A queue that records a write at its submission: from then on any of it may reach the drive."""

    def __init__(self, inner: IoQueue, recorder: Recorder) -> None:
        self._inner, self._recorder = inner, recorder

    def read(self, file: File, offset: int, buffer: memoryview, **how: Any) -> IoFuture:
        return self._inner.read(file, offset, buffer, **how)

    def write(self, file: File, offset: int, buffer: memoryview, **how: Any) -> _Ending:
        numbers, at = [], 0
        for piece in file.pieces(offset, len(buffer)):
            number = self._recorder.wrote(piece.buffered, piece.offset, bytes(buffer[at : at + piece.nbytes]))
            at += piece.nbytes
            if number is not None:
                numbers.append(number)
                self._recorder.in_flight[number] = self._recorder.in_flight.get(number, 0) + 1
        future = self._inner.write(file, offset, buffer, **how)
        return _Ending(future, self._recorder, numbers)


def page_crcs(data: memoryview | bytes, offset: int) -> bytes:
    """Returns what `Future.page_crcs` returns of a request for `data` at `offset`."""
    first = PAGE - offset % PAGE
    cuts = [0, *range(first, len(data), PAGE), len(data)] if data else []
    return b"".join(crc32c(data[start:stop]).to_bytes(4, sys.byteorder) for start, stop in itertools.pairwise(cuts))


class Done:
    """A request that has ended at its submission."""

    def __init__(self, data: memoryview, offset: int) -> None:
        self._data, self._offset = data, offset

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> int:
        return len(self._data)

    def crc32c(self) -> int:
        return crc32c(self._data)

    def page_crcs(self) -> bytes:
        return page_crcs(self._data, self._offset)

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        function(self)


class PlainQueue:
    """A queue of plain calls, for thousands of tiny requests one after the other."""

    def read(self, file: File, offset: int, buffer: memoryview, **_: Any) -> Done:
        at = 0
        for piece in file.pieces(offset, len(buffer)):
            part = buffer[at : at + piece.nbytes]
            assert os.preadv(piece.buffered, [part], piece.offset) == piece.nbytes
            at += piece.nbytes
        return Done(buffer, offset)

    def write(self, file: File, offset: int, buffer: memoryview, **_: Any) -> Done:
        at = 0
        for piece in file.pieces(offset, len(buffer)):
            assert os.pwrite(piece.buffered, buffer[at : at + piece.nbytes], piece.offset) == piece.nbytes
            at += piece.nbytes
        return Done(buffer, offset)
