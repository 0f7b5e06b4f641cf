"""Each read of a store is compared with the checksums of what was written, by this process or by an earlier one."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any, cast

import pytest

from offload.aio import File, IoQueue, aligned_empty, crc32c
from offload.aio.protocols import Future
from offload.errors import IoError
from offload.states import State
from offload.swapper.store import Store
from offload.swapper.store import store as store_module
from offload.swapper.store.format import ChecksumTable, Extent, Extents
from tests.store.test_store import SIZES, SPEC, blob, created, damage, opened, update
from tests.support.drives.fault_injection import flip_bit
from tests.support.drives.write_recorder import page_crcs


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


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("chunk", [512, 3000, 8192])
def test_what_was_written_or_compared_here_is_compared_at_each_read(
    slots: int, chunk: int, tmp_path: Path, queue: IoQueue
) -> None:
    """Without durability too: a drive may lose or change bytes while the process that wrote them runs."""
    store = created(tmp_path, queue, SPEC._replace(slots=slots))
    update(store, 0, 7)
    (states,) = store._files.states.parts()
    for at in (5000, 9000):
        read_in(store, 0, State.EXP_AVG, chunk)
        offset = store._places[0][State.EXP_AVG][store.newest[0]].offset(at)
        os.pwrite(states.descriptors.buffered, b"!", offset)
        with pytest.raises(IoError, match="use exp_avg of unit 0, slot A,") as caught:
            read_in(store, 0, State.EXP_AVG, chunk)
        assert caught.value.errno == errno.EBADMSG
        assert caught.value.offset <= offset < caught.value.offset + caught.value.nbytes
        os.pwrite(states.descriptors.buffered, bytes([7]), offset)
    store.close()


@pytest.mark.parametrize("fault", ["lost", "misdirected"])
def test_a_write_that_went_elsewhere_is_noticed_by_the_process_that_made_it(
    fault: str, tmp_path: Path, queue: IoQueue
) -> None:
    store = created(tmp_path, queue)
    (states,) = store._files.states.parts()
    for value in (1, 2, 3):
        for unit in (0, 1):
            update(store, unit, value + 10 * unit)
        store.commit(value, blob(str(value)))
    place, other = (store._places[unit][State.WEIGHT][store.newest[unit]].offset(4096) for unit in (0, 1))
    held = os.pread(states.descriptors.buffered, 4096, place)
    # The bytes of two steps before, which the drive had there; or those of another unit.
    os.pwrite(
        states.descriptors.buffered,
        bytes([1]) * 4096 if fault == "lost" else held,
        place + (other - place) * (fault != "lost"),
    )
    with pytest.raises(IoError, match=f"use weight of unit {int(fault != 'lost')}"):
        for unit in (0, 1):
            read_in(store, unit, State.WEIGHT, 8192)
    store.close()


def test_commits_read_on_in_what_nothing_else_reads(
    tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in a cache may rot for weeks otherwise, in both commits; what is read anyway is not read for that."""
    monkeypatch.setattr(store_module, "_SCRUB_NBYTES", 4096)
    store = created(tmp_path, queue)
    for unit in (0, 1):
        update(store, unit, unit)
    pages = sum(sizes[state] for sizes in SPEC.partitions for state in sizes) // 4096
    for step in range(pages):
        store.commit(step, blob("one"))
    for unit in (0, 1):
        for state in (State.WEIGHT, State.EXP_AVG):
            read_in(store, unit, state, 8192)
    damage(tmp_path / "run" / "rank0" / "states", SPEC.places()[2][State.WEIGHT][0].offset(100), 8)
    with pytest.raises(IoError, match="use weight of unit 2"):
        store.commit(pages, blob("two"))
    store.close()


class OnceWrong:
    """A queue of which the bytes of one read change on their way from the drive."""

    def __init__(self, inner: IoQueue) -> None:
        self._inner, self.wrong = inner, False
        self.write = inner.write

    def read(self, file: File, offset: int, buffer: memoryview, **how: Any) -> Future:
        future = self._inner.read(file, offset, buffer, **how)
        if self.wrong:
            self.wrong = False
            future.wait()
            buffer[0] ^= 1
            return cast(Future, Written(bytes(buffer)))
        return future


def test_bytes_that_differ_are_read_once_more(tmp_path: Path, queue: IoQueue, caplog: pytest.LogCaptureFixture) -> None:
    faulty = OnceWrong(queue)
    store = created(tmp_path, faulty)  # type: ignore[arg-type]
    update(store, 0, 9)
    faulty.wrong, buffer = True, aligned_empty(8192)
    store.read(0, State.WEIGHT, 0, 0, buffer).wait()
    assert bytes(buffer) == bytes([9]) * 8192
    assert "read 4096 bytes at offset" in caplog.text and "twice" in caplog.text
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


class Written:
    """A write that has ended."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> int:
        return len(self._data)

    def crc32c(self) -> int:
        return crc32c(self._data)

    def page_crcs(self) -> bytes:
        return page_crcs(self._data, 0)


def in_pages(data: bytes) -> list[tuple[int, Future]]:
    """Returns writes of 4096 bytes."""
    return [(start, cast(Future, Written(data[start : start + 4096]))) for start in range(0, len(data), 4096)]


def test_tiny_tiles_have_few_checksums() -> None:
    """Which a blob has room for, and which are those of the bytes."""
    data, key, table = random.Random(0).randbytes(1 << 20), (0, State.WEIGHT), ChecksumTable()
    table.fill_zeros([{State.WEIGHT: [Extents((Extent(0, len(data)),))]}])
    table.replace(key, in_pages(data), len(data))
    assert len(table.pack()) <= 2 + len(data) // (256 << 10)
    assert table.sum_of(key, len(data)) == crc32c(data)


def test_an_update_leaves_the_checksums_of_frozen_weights() -> None:
    """Tiny writes of both are not joined over the border."""
    data, key, table, own = random.Random(0).randbytes(1 << 20), (0, State.WEIGHT), ChecksumTable(), 300 << 10
    table.fill_zeros([{State.WEIGHT: [Extents((Extent(0, len(data)),))]}])
    table.replace(key, in_pages(data), own)
    table.replace(key, in_pages(data[:own]), own)
    assert len(table.pack()) <= 2 + len(data) // (256 << 10)
    assert table.sum_of(key, len(data)) == crc32c(data)
