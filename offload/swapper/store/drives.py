"""Distribution of a store over drives: in proportion to their speeds, within their free space."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Shortage(NamedTuple):
    """File systems without enough free space: their paths, the bytes needed and the bytes free."""

    path: str
    need: int
    free: int


def find_shortage(paths: Sequence[str | Path], need: int) -> Shortage | None:
    """Returns the shortage if the file systems of `paths` together have less than `need` bytes free; else None."""
    # Paths on one file system report the same free bytes, so each device counts once.
    free = {device: nbytes for device, nbytes in _free_bytes(paths)}
    if sum(free.values()) >= need:
        return None
    return Shortage(" and ".join(str(path) for path in paths), need, sum(free.values()))


def shares(paths: Sequence[str | Path], speeds: Sequence[float], need: int) -> list[float]:
    """Returns the bytes of `need` for each of `paths`, in proportion to `speeds` and within each one's free space.

    Paths on one file system use the same free space. All free space together must suffice for `need`.

    Args:
        paths: a folder on each drive.
        speeds: speed of each drive, in any one unit.
        need: bytes to distribute.
    """
    found = _free_bytes(paths)
    room: dict[int, float] = dict(found)
    left = float(need)
    given = [0.0] * len(paths)
    open_ = set(range(len(paths)))
    while left > 0.5 and open_:
        # Fill all drives in proportion until the first file system is full, then continue with the others. The limit
        # of half a byte ends the loop in spite of rounding.
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
    """Returns the device number and free bytes of each path's file system; of the nearest parent of a missing path."""
    found: list[tuple[int, int]] = []
    for path in paths:
        place = Path(path).absolute()
        while not place.exists():
            place = place.parent
        found.append((os.stat(place).st_dev, shutil.disk_usage(place).free))
    return found
