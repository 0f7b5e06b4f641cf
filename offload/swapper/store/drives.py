"""Distribution of a store over drives: in proportion to their speeds, within their free space."""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from offload.aio import Bandwidth, bandwidths
from offload.aio.file import whole_weights
from offload.errors import StoreError
from offload.fileio import real_path
from offload.sizes import MIB, PAGE, format_size
from offload.swapper.store.format import StoreManifest, StoreSpec

logger = logging.getLogger("offload")

_STRIPE_BYTES = 2 * MIB
_LEAST_MEASURED, _MOST_MEASURED = 8 * MIB, 128 * MIB
"""Least and most bytes that a start moves to and from each drive in one pass of its measurement."""


class Shortage(NamedTuple):
    """Lack of free space: the paths of the file systems that are too small, the bytes needed and the bytes free."""

    path: str
    need: int
    free: int


def find_shortage(paths: Sequence[str | Path], need: int) -> Shortage | None:
    """Returns the shortage if the file systems of `paths` together have less than `need` bytes free; else None."""
    # Paths on one file system report the same free bytes, so each file system counts once.
    free = {device: nbytes for device, nbytes in _free_bytes(paths)}
    if sum(free.values()) >= need:
        return None
    return Shortage(" and ".join(str(path) for path in paths), need, sum(free.values()))


def shares(paths: Sequence[str | Path], speeds: Sequence[float], need: int) -> list[float]:
    """Divides `need` bytes among `paths`, in proportion to `speeds` as far as free space permits.

    Paths on one file system share its free space. All free space together must suffice for `need`. `speeds` may have
    any unit of measurement.
    """
    volumes = _free_bytes(paths)
    room: dict[int, float] = dict(volumes)
    left = float(need)
    assigned = [0.0] * len(paths)
    open_ = set(range(len(paths)))
    while left > 0.5 and open_:
        # Fill all drives in proportion until the first file system is full, then continue with the others. The limit
        # of half a byte ends the loop in spite of rounding.
        rate: dict[int, float] = {}
        for drive in open_:
            device = volumes[drive][0]
            rate[device] = rate.get(device, 0.0) + speeds[drive]
        step = min(left / sum(rate.values()), *(room[device] / r for device, r in rate.items()))
        for drive in open_:
            assigned[drive] += step * speeds[drive]
        for device, r in rate.items():
            room[device] -= step * r
        left -= step * sum(rate.values())
        open_ = {drive for drive in open_ if room[volumes[drive][0]] > 0.5}
    return assigned


def _free_bytes(paths: Sequence[str | Path]) -> list[tuple[int, int]]:
    """Returns device number and free bytes of each path's file system. A missing path counts as its nearest parent."""
    volumes: list[tuple[int, int]] = []
    for path in paths:
        place = Path(path).absolute()
        while not place.exists():
            place = place.parent
        volumes.append((os.stat(place).st_dev, shutil.disk_usage(place).free))
    return volumes


def find_drive_shortage(paths: Sequence[Path], needs: Sequence[int]) -> Shortage | None:
    """Returns the shortage of the first file system without room for its own part of a store; None if each has room.

    Some folders in `paths` may be on one file system.
    """
    need: dict[int, int] = {}
    for path, nbytes in zip(paths, needs, strict=True):
        device = os.stat(path).st_dev
        need[device] = need.get(device, 0) + nbytes
        free = shutil.disk_usage(path).free
        if free < need[device]:
            return Shortage(str(path), need[device], free)
    return None


def no_room(short: Shortage, spec: StoreSpec) -> StoreError:
    """Returns the error for a store that does not fit, with the bytes needed and free, and the remedies.

    For a store with two slots, the message suggests a store with one slot. A fork has the slots and drives of its run.
    """
    cure = "free some room, or add a drive to nvme_path"
    if "forked_from" in spec.about:
        cure = "free some room, for example by `offload rm` of a kept step or a run that is not needed"
    elif spec.slots == 2:
        cure += (
            ', or set "durability": "none" in the "offload" block (one slot instead of two for all trained state; a '
            "killed run cannot be resumed)"
        )
    return StoreError(
        f"the swap files need {format_size(short.need)}, {short.path} has {format_size(short.free)} free; {cure}"
    )


def places_of(folders: Sequence[Path]) -> tuple[str, ...]:
    """Returns the paths of the drives, as a manifest holds them."""
    return tuple(str(real_path(folder.parent.parent)) for folder in folders)


def new_manifest(
    run: str, rank: int, folders: Sequence[Path], spec: StoreSpec, run_id: str | None, stripes: Sequence[int] = ()
) -> StoreManifest:
    """Returns the manifest of a new store. Measures several drives, and divides the stripes by their speeds.

    All drives together must have room for the store. `stripes` has the division of a store on the same drives that this
    one shares bytes with; nothing is measured then.
    """
    drives = [folder.parent.parent for folder in folders]
    weights: Sequence[float] = stripes or [1.0]
    if len(folders) > 1 and not stripes:
        speeds = [bandwidth.swap for bandwidth in _measured(folders, spec.nbytes)]
        weights = [max(share, 1.0) for share in shares(drives, speeds, spec.nbytes)]
    return StoreManifest(
        id=uuid.uuid4().hex,
        run=run,
        rank=rank,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        drives=places_of(folders),
        weights=tuple(stripes) or whole_weights(weights),
        stripe_bytes=_STRIPE_BYTES,
        spec=spec,
        run_id=run_id,
    )


def _measured(folders: Sequence[Path], nbytes: int) -> list[Bandwidth]:
    """Measures each drive with a queue of default settings. For a small store of `nbytes`, the measurement is short."""
    most = min(max(nbytes, _LEAST_MEASURED), _MOST_MEASURED) // PAGE * PAGE
    measured = bandwidths(folders, nbytes=most, rounds=3)
    for folder, bandwidth in zip(folders, measured, strict=True):
        logger.info("%s reads %s/s, writes %s/s", folder, format_size(bandwidth.read), format_size(bandwidth.write))
    return measured
