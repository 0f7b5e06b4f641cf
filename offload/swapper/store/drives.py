"""How much of a store each drive takes: in proportion to how fast it is, as far as its room goes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Shortage(NamedTuple):
    """File systems that have not the room for what would be put there."""

    path: str
    need: int
    free: int


def find_shortage(paths: Sequence[str | Path], need: int) -> Shortage | None:
    """Where the file systems of `paths` together have not `need` bytes free: what they have, or None."""
    free = {device: nbytes for device, nbytes in _free_bytes(paths)}
    if sum(free.values()) >= need:
        return None
    return Shortage(" and ".join(str(path) for path in paths), need, sum(free.values()))


def shares(paths: Sequence[str | Path], speeds: Sequence[float], need: int) -> list[float]:
    """Bytes of `need` for each of `paths`, in proportion to `speeds`, none more than its file system has free.

    Paths may be folders of one file system, which then share its room. The room must be enough for all.
    """
    found = _free_bytes(paths)
    room: dict[int, float] = dict(found)
    left = float(need)
    given = [0.0] * len(paths)
    open_ = set(range(len(paths)))
    while left > 0.5 and open_:
        # Fill all in proportion until the first file system is full, then go on with the others.
        rate: dict[int, float] = {}
        for drive in open_:
            device = found[drive][0]
            rate[device] = rate.get(device, 0.0) + speeds[drive]
        step = min(left / sum(rate.values()), *(room[device] / r for device, r in rate.items()))
        for drive in open_:
            given[drive] += step * speeds[drive]
        for device, r in rate.items():
            room[device] -= step * r
        left -= step * sum(rate.values())
        open_ = {drive for drive in open_ if room[found[drive][0]] > 0.5}
    return given


def _free_bytes(paths: Sequence[str | Path]) -> list[tuple[int, int]]:
    """The file system of each path, or of the first folder above that is there, and what it has free."""
    found: list[tuple[int, int]] = []
    for path in paths:
        place = Path(path).absolute()
        while not place.exists():
            place = place.parent
        found.append((os.stat(place).st_dev, shutil.disk_usage(place).free))
    return found
