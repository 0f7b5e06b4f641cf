"""A drive that forgets: what a power cut may leave of what a process has done.

    Recorder   the real code runs on a real folder; every write, sync and change of names is written down
    Disk       carries out what was written down, one event after the other, and gives any image that a cut may leave

After a cut there is all that was synced. Of what was not, each 512-byte sector of a file is as any write since the last
sync left it, its length likewise, and any of the changes of a folder's names may have reached the drive, whatever
their order; a rename has or has not. A new name is durable once its folder was synced, and no earlier.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from offload.aio import File, IoFuture, IoQueue, crc32c

SECTOR = 512
IGNORED = "lock"
"""A file whose contents mean nothing: the kernel keeps the lock."""

Image = Mapping[str, bytes | None]
"""What is on a drive, by path from the root: the bytes of files, None for folders."""
Cut = Callable[[Sequence[int]], "int | None"]
"""Of the events that a sector, a length or a name has seen since its last sync: the last one to reach the drive."""


class Event(NamedTuple):
    """Something that was done: a method of `Disk` and what it is given; a `note` changes nothing."""

    what: str
    arguments: tuple[Any, ...]
    path: str
    """What it was done to."""


# -- what is durable ----------------------------------------------------------------------------------


class _File:
    """Bytes, and the versions of each sector and of the length since the last sync, each with its event."""

    def __init__(self) -> None:
        self.live = bytearray()
        self.durable = b""
        self.sectors: dict[int, list[tuple[int, bytes]]] = {}
        self.lengths: list[tuple[int, int]] = []

    def write(self, at: int, offset: int, data: bytes) -> None:
        if offset + len(data) > len(self.live):
            self.resize(at, offset + len(data))
        self.live[offset : offset + len(data)] = data
        for sector in range(offset // SECTOR, (offset + len(data) - 1) // SECTOR + 1):
            now = bytes(self.live[sector * SECTOR : (sector + 1) * SECTOR])
            self.sectors.setdefault(sector, []).append((at, now))

    def resize(self, at: int, nbytes: int) -> None:
        self.live = self.live[:nbytes].ljust(nbytes, b"\0")
        self.lengths.append((at, nbytes))

    def sync(self) -> None:
        self.durable = bytes(self.live)
        self.sectors, self.lengths = {}, []

    def image(self, cut: Cut) -> bytes:
        if not self.sectors and not self.lengths:
            return self.durable
        which = cut([at for at, _ in self.lengths])
        nbytes = len(self.durable) if which is None else self.lengths[which][1]
        found = bytearray(self.durable[:nbytes].ljust(nbytes, b"\0"))
        for sector, versions in self.sectors.items():
            which = cut([at for at, _ in versions])
            if which is not None:
                found[sector * SECTOR : (sector + 1) * SECTOR] = versions[which][1]
        return bytes(found[:nbytes])


class _Folder:
    """Names, and what became of them since the last sync: (event, new name or None, number, name that is gone)."""

    def __init__(self) -> None:
        self.live: dict[str, int] = {}
        self.durable: dict[str, int] = {}
        self.changes: list[tuple[int, str | None, int, str | None]] = []

    def change(self, at: int, new: str | None, number: int, old: str | None) -> None:
        self._apply(self.live, new, number, old)
        self.changes.append((at, new, number, old))

    @staticmethod
    def _apply(names: dict[str, int], new: str | None, number: int, old: str | None) -> None:
        if old is not None and names.get(old) == number:
            del names[old]
        if new is not None:
            names[new] = number

    def sync(self) -> None:
        self.durable, self.changes = dict(self.live), []

    def image(self, cut: Cut) -> dict[str, int]:
        names = dict(self.durable)
        for at, new, number, old in self.changes:
            if cut([at]) is not None:
                self._apply(names, new, number, old)
        return names


class Disk:
    """Files and folders by number; 0 is the root."""

    def __init__(self) -> None:
        self.nodes: dict[int, _File | _Folder] = {0: _Folder()}
        self.events = 0

    def carry_out(self, event: Event) -> None:
        self.events += 1
        if event.what != "note":
            getattr(self, event.what)(*event.arguments)

    def make(self, folder: int, name: str, number: int, is_folder: bool) -> None:
        self.nodes[number] = _Folder() if is_folder else _File()
        self._folder(folder).change(self.events, name, number, None)

    def unlink(self, folder: int, name: str, number: int) -> None:
        self._folder(folder).change(self.events, None, number, name)

    def rename(self, folder: int, old: str, new: str, number: int) -> None:
        self._folder(folder).change(self.events, new, number, old)

    def write(self, number: int, offset: int, data: bytes) -> None:
        self._file(number).write(self.events, offset, data)

    def resize(self, number: int, nbytes: int) -> None:
        self._file(number).resize(self.events, nbytes)

    def sync(self, number: int) -> None:
        self.nodes[number].sync()

    def image(self, cut: Cut) -> dict[str, bytes | None]:
        """What may be there if the power went now."""
        found: dict[str, bytes | None] = {}
        self._collect("", self._folder(0), cut, found)
        return found

    def live(self) -> dict[str, bytes | None]:
        """What is there while the power is on."""
        return self.image(everything)

    def _collect(self, path: str, folder: _Folder, cut: Cut, found: dict[str, bytes | None]) -> None:
        for name, number in folder.image(cut).items():
            node = self.nodes[number]
            if isinstance(node, _Folder):
                found[path + name] = None
                self._collect(f"{path}{name}/", node, cut, found)
            else:
                found[path + name] = node.image(cut)

    def _folder(self, number: int) -> _Folder:
        node = self.nodes[number]
        assert isinstance(node, _Folder)
        return node

    def _file(self, number: int) -> _File:
        node = self.nodes[number]
        assert isinstance(node, _File)
        return node


# -- what a cut leaves --------------------------------------------------------------------------------


def everything(events: Sequence[int]) -> int | None:
    """All that was done reached the drive."""
    return len(events) - 1 if events else None


def nothing(events: Sequence[int]) -> int | None:
    """Only what was synced."""
    return None


def only(last: int) -> Cut:
    """The newest thing that was done, and of the rest what was synced: the drive did the last first."""

    def cut(events: Sequence[int]) -> int | None:
        return len(events) - 1 if events and events[-1] == last else None

    return cut


def all_but(last: int) -> Cut:
    """All but the newest thing that was done."""

    def cut(events: Sequence[int]) -> int | None:
        before = [index for index, event in enumerate(events) if event != last]
        return before[-1] if before else None

    return cut


def some(chance: random.Random, share: float) -> Cut:
    """Each sector, length and change of a name by itself."""

    def cut(events: Sequence[int]) -> int | None:
        if not events or chance.random() > share:
            return None
        return len(events) - 1 if chance.random() < 0.8 else chance.randrange(len(events))

    return cut


def some_events(chance: random.Random, share: float) -> Cut:
    """Each thing that was done, as a whole: it reached the drive or did not."""
    reached: dict[int, bool] = {}

    def cut(events: Sequence[int]) -> int | None:
        for event in events:
            if event not in reached:
                reached[event] = chance.random() < share
        there = [index for index, event in enumerate(events) if reached[event]]
        return there[-1] if there else None

    return cut


def put(image: Image, root: Path) -> None:
    """Make a folder of an image."""
    root.mkdir(parents=True, exist_ok=True)
    for path, data in image.items():
        if data is None:
            (root / path).mkdir(mode=0o700)
        else:
            (root / path).write_bytes(data)


def take(root: Path) -> dict[str, bytes | None]:
    """The image of a folder."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in sorted(root.rglob("*"))
        if path.name != IGNORED
    }


# -- writing down what is done ------------------------------------------------------------------------


class Recorder:
    """Writes down what happens under `root`; what is there at first is durable.

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
        """Something that is told to who reads the log."""
        self.log.append(Event("note", what, ""))

    def check(self) -> None:
        """Raise where something was done under `root` that was not seen."""
        disk = Disk()
        for event in self.log:
            disk.carry_out(event)
        assert disk.live() == take(self._root), "something was written in a way that is not recorded"

    # -- names --

    def _path(self, path: Any) -> str | None:
        """The path below the root; None where it is elsewhere, or means nothing."""
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
        """`path` and what is above it may be new."""
        parts = path.split("/")
        for count in range(1, len(parts) + 1):
            each = "/".join(parts[:count])
            if each not in self._numbers and (self._root / each).is_dir():
                self._make(each, True)

    def _gone(self, path: str) -> None:
        if path in self._numbers and not os.path.lexists(self._root / path):
            folder, _, name = path.rpartition("/")
            self.add("unlink", self._numbers[folder], name, self._numbers.pop(path))

    # -- the functions --

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, all that this process does under the root is seen."""
        wraps = [(os, name, getattr(self, f"_wrap_{name}")) for name in ("open", "pwrite", "replace")]
        wraps += [(os, name, self._wrap_length) for name in ("posix_fallocate", "ftruncate")]
        wraps += [(os, name, self._wrap_sync) for name in ("fsync", "fdatasync")]
        wraps += [(Path, name, self._wrap_names) for name in ("mkdir", "unlink", "rmdir")]
        wraps += [(shutil, "rmtree", lambda _: _remove_tree)]
        with contextlib.ExitStack() as patches:
            for where, name, wrap in wraps:
                patches.enter_context(mock.patch.object(where, name, wrap(getattr(where, name))))
            yield

    def _wrap_open(self, real: Any) -> Any:
        def open_(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
            descriptor: int = real(path, flags, *arguments, **options)
            text = os.fspath(path)
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
        def replace(old: Any, new: Any) -> None:
            real(old, new)
            before, after = self._path(old), self._path(new)
            if before is not None and after is not None:
                (folder, _, source), (other, _, target) = before.rpartition("/"), after.rpartition("/")
                assert folder == other, "a rename from one folder to another is not modelled"
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


def _remove_tree(path: Path, ignore_errors: bool = False) -> None:
    """`shutil.rmtree` by functions that are recorded."""
    if not path.is_dir():
        assert ignore_errors
        return
    for each in path.iterdir():
        _remove_tree(each) if each.is_dir() else each.unlink()
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

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        self._future.add_done_callback(lambda _: function(self))


class RecordingQueue:
    """Writes down what is written when it is asked for: from then on any of it may reach the drive."""

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


class _Done:
    """A request that has ended before anybody asks."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> int:
        return len(self._data)

    def crc32c(self) -> int:
        return crc32c(self._data)

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        function(self)


class PlainQueue:
    """A queue of plain calls, for thousands of tiny requests one after the other."""

    def read(self, file: File, offset: int, buffer: memoryview, **_: Any) -> _Done:
        at = 0
        for piece in file.pieces(offset, len(buffer)):
            part = buffer[at : at + piece.nbytes]
            assert os.preadv(piece.buffered, [part], piece.offset) == piece.nbytes
            at += piece.nbytes
        return _Done(buffer)

    def write(self, file: File, offset: int, buffer: memoryview, **_: Any) -> _Done:
        at = 0
        for piece in file.pieces(offset, len(buffer)):
            assert os.pwrite(piece.buffered, buffer[at : at + piece.nbytes], piece.offset) == piece.nbytes
            at += piece.nbytes
        return _Done(buffer)
