"""The checksums of a commit are compared by the first reader of each range, once."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import cast

import pytest

from offload.aio import IoQueue, aligned_empty, crc32c
from offload.aio.protocols import Future
from offload.errors import IoError
from offload.states import State
from offload.swapper.store import Store
from offload.swapper.store.format.checksum_table import ChecksumTable
from offload.swapper.store.requests import Compared
from tests.store.test_store import SIZES, SPEC, blob, created, damage, opened, update
from tests.support.drives.fault_injection import flip_bit


def read_in(store: Store, unit: int, state: State, nbytes: int) -> None:
    """Read the newest slot in pieces of `nbytes`, the last one shorter."""
    total = SIZES[state]
    for start in range(0, total, nbytes):
        store.read(unit, state, store.newest[unit], start, aligned_empty(min(nbytes, total - start))).wait()


@pytest.mark.parametrize("chunk", [512, 4096, 3000, 6000, 8192, 16384])
def test_a_flipped_bit_is_noticed_however_it_is_read(chunk: int, tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    update(store, 0, 7)
    store.commit(1, blob("one"))
    slot = store.newest[0]
    store.close()
    store, _ = opened(tmp_path, queue)
    at = store._places[0][State.WEIGHT][slot].offset(5000)
    flip_bit(tmp_path / "run" / "rank0" / "states", at)
    with pytest.raises(IoError, match=r"use weight of unit 0, slot [AB],") as caught:
        read_in(store, 0, State.WEIGHT, chunk)
    assert caught.value.errno == errno.EBADMSG
    read_in(store, 0, State.EXP_AVG, chunk)
    read_in(store, 1, State.WEIGHT, chunk)
    with pytest.raises(IoError):
        read_in(store, 0, State.WEIGHT, chunk)
    store.close()


@pytest.mark.parametrize("chunk", [512, 3000, 8192])
def test_what_was_compared_once_is_not_compared_again(chunk: int, tmp_path: Path, queue: IoQueue) -> None:
    """A sum costs time; what this process has written or found right, it may read as it is."""
    store = created(tmp_path, queue)
    update(store, 0, 7)
    assert not isinstance(store.read(0, State.WEIGHT, store.newest[0], 0, aligned_empty(4096)), Compared)
    store.commit(1, blob("one"))
    store.close()
    store, _ = opened(tmp_path, queue)
    read_in(store, 0, State.WEIGHT, chunk)
    again = store.read(0, State.WEIGHT, store.newest[0], 0, aligned_empty(4096))
    moments = store.read(0, State.EXP_AVG, store.newest[0], 0, aligned_empty(4096))
    assert not isinstance(again, Compared) and isinstance(moments, Compared)
    again.wait(), moments.wait()
    update(store, 0, 8)
    assert not isinstance(store.read(0, State.EXP_AVG, store.newest[0], 0, aligned_empty(4096)), Compared)
    store.close()


def test_swapped_extents_are_noticed(tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    for unit in (0, 1):
        update(store, unit, 20 + unit)
    store.commit(1, blob("one"))
    offsets = [store._places[unit][State.EXP_AVG][store.newest[unit]].offset(0) for unit in (0, 1)]
    store.close()
    path = tmp_path / "run" / "rank0" / "states"
    data = bytearray(path.read_bytes())
    left, right = (slice(offset, offset + 16384) for offset in offsets)
    data[left], data[right] = data[right], data[left]
    path.write_bytes(data)
    store, _ = opened(tmp_path, queue)
    with pytest.raises(IoError, match="use exp_avg of unit 1"):
        read_in(store, 1, State.EXP_AVG, 4096)
    store.close()


def test_room_that_was_never_written_is_checked_too(tmp_path: Path, queue: IoQueue) -> None:
    store = created(tmp_path, queue)
    store.commit(0, blob("zero"))
    store.close()
    offset = SPEC.places()[1][State.EXP_AVG][0].offset(0)
    damage(tmp_path / "run" / "rank0" / "states", offset + 100, 8)
    store, _ = opened(tmp_path, queue)
    read_in(store, 0, State.EXP_AVG, 4096)
    with pytest.raises(IoError, match="use exp_avg of unit 1, slot A"):
        read_in(store, 1, State.EXP_AVG, 6000)
    store.close()


def test_a_stale_slot_is_noticed(tmp_path: Path, queue: IoQueue) -> None:
    """A drive that says that it has written and has not."""
    store = created(tmp_path, queue)
    update(store, 0, 1)
    store.commit(1, blob("one"))
    path = tmp_path / "run" / "rank0" / "states"
    lost = path.read_bytes()
    update(store, 0, 2)
    store.commit(2, blob("two"))
    store.close()
    path.write_bytes(lost)
    store, _ = opened(tmp_path, queue)
    with pytest.raises(IoError, match="use weight of unit 0"):
        read_in(store, 0, State.WEIGHT, 8192)
    store.close()


def test_without_durability_nothing_is_compared(tmp_path: Path, queue: IoQueue) -> None:
    """One slot is written in place, and no resume ever reads it."""
    store = created(tmp_path, queue, SPEC._replace(slots=1))
    update(store, 0, 3)
    (states,) = store._files.states.parts()
    os.pwrite(int(states.descriptors.buffered), os.urandom(64), 0)
    store.read(0, State.WEIGHT, 0, 0, aligned_empty(8192)).wait()
    store.close()


class Written:
    """A write that has ended."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def wait(self) -> int:
        return len(self._data)

    def crc32c(self) -> int:
        return crc32c(self._data)


def in_pages(data: bytes) -> list[tuple[int, Future]]:
    """Returns writes of 4096 bytes."""
    return [(start, cast(Future, Written(data[start : start + 4096]))) for start in range(0, len(data), 4096)]


def test_tiny_tiles_have_few_checksums() -> None:
    """Which a blob has room for, and which are those of the bytes."""
    data, key, table = random.Random(0).randbytes(1 << 20), (0, State.WEIGHT), ChecksumTable()
    table._slots[key] = ()
    table.replace(key, in_pages(data), len(data))
    assert len(table.slot(key)) <= 2 + len(data) // (256 << 10)
    assert table.sum_of(key, len(data)) == crc32c(data)


def test_an_update_leaves_the_checksums_of_frozen_weights() -> None:
    """Tiny writes of both are not joined over the border."""
    data, key, table, own = random.Random(0).randbytes(1 << 20), (0, State.WEIGHT), ChecksumTable(), 300 << 10
    table._slots[key] = ()
    table.replace(key, in_pages(data), own)
    table.replace(key, in_pages(data[:own]), own)
    assert len(table.slot(key)) <= 2 + len(data) // (256 << 10)
    assert table.sum_of(key, len(data)) == crc32c(data)
