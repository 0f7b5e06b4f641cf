"""A drive that forgets: what a power cut may leave of what a process has done.

    Recorder   the real code runs on a real folder; every write, sync and change of names is written down
    Disk       carries out what was written down, one event after the other, and gives any image that a cut may leave

After a cut there is all that was synced. Of what was not, each 512-byte sector of a file is as any write since the last
sync left it, its length likewise, and any of the changes of a folder's names may have reached the drive, whatever
their order; a rename has or has not. A new name is durable once its folder was synced, and no earlier.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SECTOR = 512

IGNORED = "lock"
"""A file whose contents mean nothing: the kernel keeps the lock."""

Image = Mapping[str, bytes | None]
"""What is on a drive, by path from the root: the bytes of files, None for folders."""

Cut = Callable[[Sequence[int]], "int | None"]
"""Of the events that a sector, a length or a name has seen since its last sync: the last one to reach the drive."""


class Event(NamedTuple):
    """An event: a method of `Disk` and its arguments; a `note` changes nothing."""

    what: str
    arguments: tuple[Any, ...]
    path: str
    """What it was done to."""


# -- what is durable ----------------------------------------------------------------------------------


class _File:
    """The bytes of a file, and the versions of each sector and of its length since the last sync, by event."""

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
        version = cut([at for at, _ in self.lengths])
        nbytes = len(self.durable) if version is None else self.lengths[version][1]
        content = bytearray(self.durable[:nbytes].ljust(nbytes, b"\0"))
        for sector, versions in self.sectors.items():
            version = cut([at for at, _ in versions])
            if version is not None:
                content[sector * SECTOR : (sector + 1) * SECTOR] = versions[version][1]
        return bytes(content[:nbytes])


class _Folder:
    """The names in a folder, and their changes since the last sync: (event, new name or None, number, old name)."""

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
        """Returns one image that a power cut at this moment may leave."""
        files: dict[str, bytes | None] = {}
        self._collect("", self._folder(0), cut, files)
        return files

    def live(self) -> dict[str, bytes | None]:
        """Returns the image while the power is on."""
        return self.image(everything)

    def _collect(self, path: str, folder: _Folder, cut: Cut, files: dict[str, bytes | None]) -> None:
        for name, number in folder.image(cut).items():
            node = self.nodes[number]
            if isinstance(node, _Folder):
                files[path + name] = None
                self._collect(f"{path}{name}/", node, cut, files)
            else:
                files[path + name] = node.image(cut)

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
    """Keeps every event: all of them reached the drive."""
    return len(events) - 1 if events else None


def nothing(events: Sequence[int]) -> int | None:
    """Keeps what was synced, and nothing else."""
    return None


def only(last: int) -> Cut:
    """Keeps the newest event and, of the rest, what was synced: the drive did the last first."""

    def cut(events: Sequence[int]) -> int | None:
        return len(events) - 1 if events and events[-1] == last else None

    return cut


def all_but(last: int) -> Cut:
    """Keeps all but the newest event."""

    def cut(events: Sequence[int]) -> int | None:
        before = [index for index, event in enumerate(events) if event != last]
        return before[-1] if before else None

    return cut


def some(chance: random.Random, share: float) -> Cut:
    """Keeps each sector, length and change of a name by chance, independently."""

    def cut(events: Sequence[int]) -> int | None:
        if not events or chance.random() > share:
            return None
        return len(events) - 1 if chance.random() < 0.8 else chance.randrange(len(events))

    return cut


def some_events(chance: random.Random, share: float) -> Cut:
    """Keeps each event completely or not at all, by chance."""
    reached: dict[int, bool] = {}

    def cut(events: Sequence[int]) -> int | None:
        for event in events:
            if event not in reached:
                reached[event] = chance.random() < share
        there = [index for index, event in enumerate(events) if reached[event]]
        return there[-1] if there else None

    return cut


def put(image: Image, root: Path) -> None:
    """Makes a folder of an image."""
    root.mkdir(parents=True, exist_ok=True)
    for path, data in image.items():
        if data is None:
            (root / path).mkdir(mode=0o700)
        else:
            (root / path).write_bytes(data)


def take(root: Path) -> dict[str, bytes | None]:
    """Returns the image of a folder."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in sorted(root.rglob("*"))
        if path.name != IGNORED
    }
