"""Bytes are checked when they are read, and damage is named before a result."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import offload
from offload import testing
from offload.aio import File, IoQueue, aligned_empty, crc32c
from offload.aio.protocols import Future
from offload.errors import EngineFailed, IoError, StoreError
from offload.runs.inspection import inspect
from offload.sizes import PAGE
from offload.states import State
from offload.swapper.store import Store, StoreSpec, format, inspection, run_status
from offload.swapper.store.folder import read_whole
from offload.swapper.store.format import (
    ChecksumRange,
    ChecksumTable,
    CommitRecord,
    Extent,
    Extents,
    Key,
    PageSums,
    Passages,
    Slot,
    read_manifest,
    read_records,
)
from offload.swapper.store.requests import CheckedRead, DriveSpans
from offload.swapper.store.runs import read_closed
from offload.timeline import Timeline
from tests.store.test_store import SIZES, blob, created, damage, opened, update
from tests.store.test_store import STORE_SPEC as SPEC
from tests.support import models
from tests.support.drives import filesystems
from tests.support.drives.fault_injection import flip_bit
from tests.support.drives.write_recorder import Done, page_crcs
from tests.support.oracle import Job, least_host_memory, processes, run, small_pieces, start, train_step


def read_in(store: Store, unit: int, state: State, nbytes: int) -> None:
    """Read the newest slot in pieces of `nbytes`, the last one shorter."""
    total = SIZES[state]
    for begin in range(0, total, nbytes):
        store.read(unit, state, store.newest[unit], begin, aligned_empty(min(nbytes, total - begin))).wait()


@pytest.mark.parametrize("chunk", [512, 6000, 16384])
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


@pytest.mark.parametrize(("slots", "chunk"), [(1, 3000), (2, 8192)])
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
        with pytest.raises(IoError, match=f"use exp_avg of unit 0, slot {'AB'[store.newest[0]]},") as caught:
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
    place, place_of_another = (store._places[unit][State.WEIGHT][store.newest[unit]].offset(4096) for unit in (0, 1))
    held = os.pread(states.descriptors.buffered, 4096, place)
    # The bytes of two steps before, which the drive had there; or those of another unit.
    os.pwrite(
        states.descriptors.buffered,
        bytes([1]) * 4096 if fault == "lost" else held,
        place + (place_of_another - place) * (fault != "lost"),
    )
    with pytest.raises(IoError, match=f"use weight of unit {int(fault != 'lost')}"):
        for unit in (0, 1):
            read_in(store, unit, State.WEIGHT, 8192)
    store.close()


def test_commits_read_on_in_what_nothing_else_reads(
    tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in a cache may rot for weeks otherwise, in both commits; what is read anyway is not read for that."""
    testing.replace(monkeypatch, "size.scrub", 4096)
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


def test_a_slot_of_which_only_the_end_is_read_is_scrubbed(
    tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a user who looks at the last parameter of a unit after each step."""
    testing.replace(monkeypatch, "size.scrub", 4096)
    store = created(tmp_path, queue)
    store.commit(0, blob("zero"))
    nbytes = SPEC.partitions[0][State.WEIGHT]
    damage(tmp_path / "run" / "rank0" / "states", SPEC.places()[0][State.WEIGHT][0].offset(100), 8)
    buffer = aligned_empty(nbytes - 4096)

    def commits() -> None:
        for step in range(sum(sizes[state] for sizes in SPEC.partitions for state in sizes) // 4096):
            store.read(0, State.WEIGHT, 0, 4096, buffer).wait()
            store.commit(step, blob("one"))

    with pytest.raises(IoError, match="use weight of unit 0"):
        commits()
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
    store.read(0, State.WEIGHT, store.newest[0], 0, buffer).wait()
    assert bytes(buffer) == bytes([9]) * 8192
    assert "read 4096 bytes at offset" in caplog.text and "twice" in caplog.text
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


TRAINABLE, ALL = 12288, 20480
CHECKSUMS_SPEC = StoreSpec(
    ({State.WEIGHT: ALL, State.EXP_AVG: TRAINABLE}, {State.WEIGHT: ALL}), 2, {}, frozen=(ALL - TRAINABLE, ALL)
)


@pytest.fixture
def store(tmp_path: Path, queue: IoQueue) -> Iterator[Store]:
    """One unit of which the weight is frozen from `TRAINABLE` on, and a frozen one; committed."""
    store = Store([tmp_path], "run", 0, CHECKSUMS_SPEC, queue)
    store.create()
    for unit in (0, 1):
        writes = [
            write(store, unit, State.WEIGHT, 0, start, stop) for start, stop in ((0, TRAINABLE), (TRAINABLE, ALL))
        ]
        store.wrote(unit, 0, {State.WEIGHT: writes})
    store.commit(0, {})
    yield store
    store.close()


def write(store: Store, unit: int, state: State, slot: int, start: int, stop: int, seed: int = 0) -> tuple:
    buffer = aligned_empty(stop - start)
    buffer[:] = random.Random(f"{unit} {state} {seed if stop <= TRAINABLE else 0} {start}").randbytes(stop - start)
    future = store.write(unit, state, slot, start, buffer)
    future.wait()
    return start, future


def update_checksums(store: Store, tile: int, seed: int) -> None:
    slot = store.target(0)
    written = {
        state: [write(store, 0, state, slot, s, min(s + tile, TRAINABLE), seed) for s in range(0, TRAINABLE, tile)]
        for state in (State.WEIGHT, State.EXP_AVG)
    }
    store.wrote(0, slot, written)


def read(store: Store, unit: int, state: State, start: int, stop: int) -> None:
    store.read(unit, state, store.newest[unit], start, aligned_empty(stop - start)).wait()


@contextmanager
def by_another_process(store: Store, damaged: int | None = None) -> Iterator[Store]:
    """The store opened again: of what another process wrote, only the checksums of a commit are known.

    A bit of byte `damaged` of the first weight flips in between.
    """
    if store._files.locked:
        store.commit(store.durable.step + 1 if store.durable else 0, {})
        if damaged is not None:
            damage_checksums(store, 0, State.WEIGHT, damaged)
        store.close()
    process_store = Store([store.folders[0].parents[1]], "run", 0, CHECKSUMS_SPEC, store._queue)
    process_store.open()
    yield process_store
    process_store.close()


def damage_checksums(store: Store, unit: int, state: State, at: int, slot: int | None = None) -> None:
    """Flip a bit, in the newest slot if none is given."""
    place = store._places[unit][state][store.newest[unit] if slot is None else slot]
    flip_bit(store.folders[0] / "states", place.offset(at))


def test_who_waits_late_for_a_read_is_not_alarmed_by_an_update(store: Store) -> None:
    """Two threads wait for one read; before the second looks at it, the unit is updated, in place within a window."""
    for seed in (1, 2, 3):
        with by_another_process(store) as other_store:
            _be_late(other_store, seed)


def _be_late(store: Store, seed: int) -> None:
    late = store.read(0, State.WEIGHT, store.newest[0], 0, aligned_empty(ALL))
    late._future.wait()  # type: ignore[attr-defined]
    chunk = store.read(0, State.EXP_AVG, store.newest[0], 0, aligned_empty(3000))
    chunk.wait()
    rest = store.read(0, State.EXP_AVG, store.newest[0], 3000, aligned_empty(TRAINABLE - 3000))
    rest._future.wait()  # type: ignore[attr-defined]
    update_checksums(store, 4096, seed)
    late.wait()
    rest.wait()
    read(store, 0, State.EXP_AVG, 3000, TRAINABLE)  # it begins in the middle: of the old ones nothing is known any more


@pytest.mark.parametrize("tile", [1024, 5000])
def test_damage_before_frozen_weights_is_noticed_whatever_the_tiles(tile: int, store: Store) -> None:
    """The update worker reads a tile, what is frozen behind all tiles, and then the other tiles."""
    update_checksums(store, 4096, 1)
    with by_another_process(store, 7000) as store, pytest.raises(IoError, match="use weight of unit 0"):
        read(store, 0, State.WEIGHT, 0, tile)
        read(store, 0, State.WEIGHT, TRAINABLE, ALL)
        for start in range(tile, TRAINABLE, tile):
            read(store, 0, State.WEIGHT, start, min(start + tile, TRAINABLE))


class HeldQueue:
    """A queue whose reads end, one after the other, when the test says so."""

    def __init__(self, inner: IoQueue) -> None:
        self._inner, self.reads = inner, list[Held]()

    def read(self, file: File, offset: int, buffer: memoryview, **how: Any) -> Held:
        self.reads.append(Held(self._inner.read(file, offset, buffer, **how)))
        return self.reads[-1]

    def write(self, file: File, offset: int, buffer: memoryview, **how: Any) -> Future:
        return self._inner.write(file, offset, buffer, **how)


class Held:
    """A read that calls nobody back before `end`."""

    def __init__(self, inner: Future) -> None:
        self._inner, self._callbacks = inner, list[Callable[[Any], object]]()
        self.done, self.wait, self.crc32c, self.page_crcs = inner.done, inner.wait, inner.crc32c, inner.page_crcs

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        self._callbacks.append(function)

    def end(self) -> None:
        for function in self._callbacks:
            function(self)


def test_damage_is_found_while_a_timeline_records(store: Store, queue: IoQueue, tmp_path: Path) -> None:
    """The spans are made where and when the reads end: the comparison stays with the one who waits, in their order."""
    store.commit(1, {})
    damage_checksums(store, 0, State.WEIGHT, 7000)
    store.close()
    timeline, held = Timeline(tmp_path / "timeline.json"), HeldQueue(queue)
    other_store = Store([tmp_path], "run", 0, CHECKSUMS_SPEC, held, spans=DriveSpans(timeline, ["one", "two"]))
    other_store.open()
    reads = [
        other_store.read(0, State.WEIGHT, other_store.newest[0], start, aligned_empty(4096)) for start in (0, 4096)
    ]
    for index in (1, 0):
        held.reads[index].end()
    assert [span.name for span in timeline._spans] == ["one weight"] * 2
    for _ in range(2):  # who waits again, as a cleanup does, is told again
        for read in reads:
            with pytest.raises(IoError, match="use weight of unit 0"):
                read.wait()
    other_store.close()


def test_a_read_that_is_submitted_during_an_update_is_compared_with_the_bytes_before(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checksums are replaced when the store has taken them, before `newest` names the slot."""
    with by_another_process(store) as other_store:
        pages, target = ChecksumTable.pages, other_store.target(0)

        def replaced_then(table: ChecksumTable, key: Key) -> PageSums:
            answer = pages(table, key)
            table.replace(key, [write(other_store, 0, State.WEIGHT, target, 0, TRAINABLE, seed=2)], TRAINABLE)
            return answer

        monkeypatch.setattr(ChecksumTable, "pages", replaced_then)
        other_store.read(0, State.WEIGHT, other_store.newest[0], 0, aligned_empty(TRAINABLE)).wait()


def test_frozen_weights_are_compared_whichever_slot_is_the_newest(store: Store) -> None:
    """An update before anybody has read them proves nothing of them, and changes nothing."""
    update_checksums(store, 4096, 1)
    with by_another_process(store) as other_store:
        update_checksums(other_store, 4096, 3)
        read(other_store, 0, State.WEIGHT, TRAINABLE, ALL)
    with by_another_process(store) as other_store:
        damage_checksums(other_store, 0, State.WEIGHT, ALL - 100, other_store.target(0))
        update_checksums(other_store, 4096, 2)
        read(other_store, 0, State.WEIGHT, 0, TRAINABLE)
        for start in (TRAINABLE, 0):
            with pytest.raises(IoError, match="use weight of unit 0"):
                read(other_store, 0, State.WEIGHT, start, ALL)


@pytest.mark.parametrize(("start", "stop"), [(5000, TRAINABLE + 1), (TRAINABLE - 1, ALL)])
def test_a_read_goes_on_behind_what_trains_in_either_slot(start: int, stop: int, store: Store) -> None:
    """One request: frozen weights lie behind slot B, and behind slot A there is B."""
    seen = set()
    for seed in (1, 2, 3):
        update_checksums(store, 4096, seed)
        store.commit(seed, {})
        slot = store.newest[0]
        expected = b"".join(
            random.Random(f"0 {State.WEIGHT} {seed} {first}").randbytes(4096) for first in range(0, TRAINABLE, 4096)
        ) + random.Random(f"0 {State.WEIGHT} 0 {TRAINABLE}").randbytes(ALL - TRAINABLE)
        buffer = aligned_empty(stop - start)
        store.read(0, State.WEIGHT, slot, start, buffer, compare=True).wait()
        assert bytes(buffer) == expected[start:stop]
        seen.add(slot)
    assert seen == {0, 1}


@pytest.mark.parametrize(("nbytes", "stops_at"), [(TRAINABLE, 1), (ALL, None), (ALL, 0), (ALL, 1)])
def test_a_slot_is_shared_extent_by_extent(
    nbytes: int, stops_at: int | None, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file system that can does it: here by copies, all of them or not."""
    done = 0

    def copy(source: int, start: int, count: int, destination: int, offset: int) -> bool:
        nonlocal done
        if done == stops_at:
            return False
        done += 1
        return os.pwrite(destination, os.pread(source, count, start), offset) == count

    testing.replace(monkeypatch, "store.clone_range", copy)
    update_checksums(store, 4096, 1)
    expected = aligned_empty(nbytes)
    store.read(0, State.WEIGHT, store.newest[0], 0, expected).wait()
    with (tmp_path / "other").open("w+b") as file:
        shared = store.clone(0, State.WEIGHT, nbytes, file.fileno(), 8192)
        assert shared is (stops_at is None or (stops_at == 1 and nbytes <= TRAINABLE))
        if shared:
            assert file.read() == bytes(8192) + bytes(expected)


@given(st.data())
def test_page_sums_notice_each_damage_and_no_more(data: st.DataObject) -> None:
    """Writes and reads begin and end anywhere; a commit knows one checksum for each write."""
    nbytes = data.draw(st.integers(1, 4 * PAGE + 7))
    now, sums = bytearray(nbytes), PageSums(nbytes)

    def borders(most: int) -> list[int]:
        return sorted({0, nbytes, *data.draw(st.lists(st.integers(0, nbytes), max_size=most))})

    cuts = borders(5)
    for _ in range(data.draw(st.integers(0, 2))):
        now[:] = random.Random(data.draw(st.integers(0, 9))).randbytes(nbytes)
        cuts = borders(5)
        writes = [(a, b - a, page_crcs(bytes(now[a:b]), a)) for a, b in itertools.pairwise(cuts)]
        sums = sums.renewed(writes)
    of_commit = [ChecksumRange(a, b - a, crc32c(now[a:b])) for a, b in itertools.pairwise(cuts)]
    if data.draw(st.booleans()):
        sums = PageSums(nbytes, of_commit)
    drive = bytearray(now)
    if flips := data.draw(st.booleans()):
        at = data.draw(st.integers(0, nbytes - 1))
        drive[at] ^= 1 << data.draw(st.integers(0, 7))
    noticed = False
    for begin, stop in data.draw(st.permutations(list(itertools.pairwise(borders(5))))):
        buffer = memoryview(bytearray(stop - begin))
        read = CheckedRead(
            sums,
            begin,
            buffer,
            partial(read_of, drive),
            lambda request: IoError("file", request.start, len(request), 74),
        )
        try:
            read.wait()
        except IoError as error:
            noticed = True
            assert error.offset <= at < error.offset + error.nbytes
        else:
            assert bytes(buffer) == now[begin:stop], "no wrong byte is ever handed over"
    assert noticed == flips


def read_of(drive: bytearray, start: int, buffer: memoryview) -> Future:
    buffer[:] = drive[start : start + len(buffer)]
    return cast(Future, Done(buffer, start))


@st.composite
def passes(draw: st.DrawFn) -> tuple[Slot, bytes, list[list[tuple[int, int]]], list[int]]:
    """Stretches of some bytes, readers that go through all in pieces of their own, and whose turn it is."""
    data = draw(st.binary(min_size=1, max_size=60))

    def cuts() -> list[int]:
        inner = draw(st.sets(st.integers(1, len(data) - 1))) if len(data) > 1 else set()
        return [0, *sorted(inner), len(data)]

    slot = tuple(ChecksumRange(a, b - a, crc32c(data[a:b])) for a, b in itertools.pairwise(cuts()))
    readers = [list(itertools.pairwise(cuts())) for _ in range(draw(st.integers(1, 3)))]
    turns = draw(st.permutations([number for number, pieces in enumerate(readers) for _ in pieces]))
    return slot, data, readers, turns


def verdicts(slot: Slot, data: bytes, readers: list[list[tuple[int, int]]], turns: list[int]) -> list[bool]:
    passages, left = Passages(), [iter(pieces) for pieces in readers]
    verdict_list = []
    for reader in turns:
        start, stop = next(left[reader])
        verdict_list.append(passages.compare((0, State.WEIGHT), slot, start, stop - start, crc32c(data[start:stop]))[0])
    return verdict_list


@given(passes())
def test_readers_that_take_turns_are_never_alarmed_by_what_is_right(case) -> None:  # type: ignore[no-untyped-def]
    assert all(verdicts(*case))


@given(passes(), st.data())
def test_readers_that_take_turns_never_miss_damage(case, more: st.DataObject) -> None:  # type: ignore[no-untyped-def]
    """Each who reads all of it meets it: there are as many alarms as readers at least."""
    slot, data, readers, turns = case
    wrong = bytearray(data)
    wrong[more.draw(st.integers(0, len(data) - 1))] ^= 1 << more.draw(st.integers(0, 7))
    assert verdicts(slot, bytes(wrong), readers, turns).count(False) >= len(readers)


def test_reads_that_never_reach_a_border_are_forgotten_and_alarm_nobody() -> None:
    """As looks at the first elements of a frozen parameter, again and again."""
    data = random.Random(0).randbytes(1000)
    slot, key, passages = (ChecksumRange(0, len(data), crc32c(data)),), (0, State.WEIGHT), Passages()
    for stop in range(1, 1000):
        assert passages.compare(key, slot, 0, stop, crc32c(data[:stop])) == (True, range(0))
    assert len(passages._open[key][1]) == format._MOST_PASSAGES
    newest, oldest = (passages.compare(key, slot, start, 1000 - start, crc32c(data[start:])) for start in (999, 1))
    assert newest == (True, range(1000)) and oldest == (True, range(0))
    assert passages.compare(key, slot, 998, 2, crc32c(b"??")) == (False, range(1000))


DISK = ("nvme", "nvme")


class Partly(nn.Module):
    """Layers of which some weights are frozen, and a layer that is frozen as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)) for _ in "123")
        self.layers[0][2].requires_grad_(False)
        self.layers[1].requires_grad_(False)
        self.head = nn.Linear(64, 61)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


JOB = Job(Partly, models.mixture_loss, steps=6, dtype="bf16")
DONE = 3
"""Steps of the run before something happens to it."""


def records(folder: Path) -> tuple[CommitRecord, ...]:
    return read_records(folder / "default" / "rank0" / "commit").valid


def begin(folder: Path, placement: tuple[str, str] = DISK, **options: Any) -> list[float]:
    """A run of `DONE` steps that was closed; its losses."""
    engine = start(JOB, placement, folder, **options)
    losses = [train_step(engine, JOB, step) for step in range(DONE)]
    engine.destroy()
    return losses


def go_on(folder: Path, expected: int, unbroken: list[float], placement: tuple[str, str] = DISK) -> None:
    """To the end, from the step `expected`, as the unbroken run did."""
    engine = start(JOB, placement, folder, resume="must")
    assert engine.global_steps == expected
    losses = [train_step(engine, JOB, step) for step in range(expected, JOB.steps)]
    engine.destroy(remove=True)
    assert losses == unbroken[expected:]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return run(JOB, DISK, tmp_path_factory.mktemp("whole")).losses


# -- bits that flip while the run is closed -----------------------------------------------------------

PLACES = {
    "a weight": ("layers.2", State.WEIGHT, 0.4),
    "a weight beside frozen ones": ("layers.0", State.WEIGHT, 0.2),
    "a frozen weight beside others": ("layers.0", State.WEIGHT, 0.9),
    "a weight of a frozen unit": ("layers.1", State.WEIGHT, 0.5),
    "what bf16 leaves of a weight": ("layers.2", State.MASTER_LOW_BITS, 0.3),
    "a moment": ("layers.0", State.EXP_AVG, 0.01),
    "the last byte of a moment": ("layers.2", State.EXP_AVG_SQ, 1.0),
}


def flip(folder: Path, unit_name: str, state: State, where: float) -> None:
    """One bit of the newest slot, so far into it."""
    rank = folder / "default" / "rank0"
    spec = read_manifest(rank / "manifest.json").spec
    unit = next(number for number, row in enumerate(spec.fingerprint["units"]) if row["name"] == unit_name)
    place = spec.places()[unit][state][records(folder)[0].slots[unit]]
    at = place.offset(int(where * (place.nbytes - 1)))
    flip_bit(rank / "states", at, random.Random(where).choice([1, 16, 128]))


def refused(folder: Path, unit_name: str, state: State, placement: tuple[str, str] = DISK, **options: Any) -> None:
    """A resumed run raises, and names what is damaged; nothing is committed."""
    before = records(folder)
    with pytest.raises((EngineFailed, IoError)) as caught:
        engine = start(JOB, placement, folder, resume="must", **options)
        try:
            for step in range(DONE, JOB.steps):
                train_step(engine, JOB, step)
        finally:
            engine.destroy()
    cause: Any = caught.value
    while not isinstance(cause, IoError):
        cause = cause.__cause__
    assert cause.errno == errno.EBADMSG
    assert f"use {state.value} of {unit_name}, slot " in str(cause)
    assert records(folder) == before


WAYS = {"on disk": DISK, "in small pieces": DISK, "read back to the host": ("cpu", "cpu"), "weights": ("none", "nvme")}


@pytest.mark.sample(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
def test_a_flipped_bit_is_named_before_it_is_committed(
    place: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resumed with less memory, what was written in one request is read in many, and units come piece by piece."""
    begin(tmp_path, WAYS[way], durability="step")
    flip(tmp_path, *PLACES[place])
    options = {"durability": "step"}
    if way == "in small pieces":
        small_pieces(monkeypatch)
        options["host_memory"] = least_host_memory(JOB, tmp_path, resume="must")  # type: ignore[assignment]
    refused(tmp_path, *PLACES[place][:2], WAYS[way], **options)


# -- two processes ------------------------------------------------------------------------------------


def _hold(folder: Path, pipe: Any) -> None:
    logging.disable(logging.CRITICAL)
    engine = start(JOB, DISK, folder, resume="auto")
    train_step(engine, JOB, engine.global_steps)
    testing.settle(engine)
    pipe.send(os.getpid())
    pipe.recv()


def test_the_error_of_a_second_process_names_the_holder_of_the_run(tmp_path: Path, unbroken: list[float]) -> None:
    begin(tmp_path)
    mine, theirs = processes().Pipe()
    process = processes().Process(target=_hold, args=(tmp_path, theirs))
    process.start()
    holder = mine.recv()
    for resume in ("auto", "must"):
        with pytest.raises(
            StoreError, match=rf"is in use by process {holder} on .*; end that process, or give a run beside it a name"
        ):
            start(JOB, DISK, tmp_path, resume=resume)
    os.kill(holder, signal.SIGKILL)
    process.join()
    go_on(tmp_path, DONE + 1, unbroken)


# -- a full disk --------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with filesystems.disk(tmp_path, 24 << 20) as mount:
        yield mount


def fill(disk: Path, leave: int = 0) -> None:
    """Somebody else takes all of the room, or all but so many bytes."""
    with (disk / "filler").open("ab") as file, contextlib.suppress(OSError):
        while shutil.disk_usage(disk).free > leave:
            file.write(bytes(min(1 << 16, max(shutil.disk_usage(disk).free - leave, 1))))
            file.flush()


def test_a_disk_that_others_fill_later(disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All room was reserved, that of the blobs too, which then hold many more checksums than at the start."""
    job = models.GPT2._replace(dtype="bf16", steps=4)
    expected = run(job, DISK, tmp_path / "whole").losses
    testing.replace(monkeypatch, "size.update_tile", range(2048 * 12, 2048 * 12 + 1))
    testing.replace(monkeypatch, "size.least_checksum", 2048)
    folder = disk / "swap"
    losses: list[float] = []
    for resume in ("never", "must"):
        engine = start(job, DISK, folder, resume=resume)
        fill(disk)
        assert shutil.disk_usage(disk).free == 0
        losses += [train_step(engine, job, step) for step in range(len(losses), len(losses) + 2)]
        engine.destroy()
    assert losses == expected


def test_a_disk_that_is_full_at_the_start_or_when_the_first_blob_comes(
    disk: Path, unbroken: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that fails leaves nothing behind."""
    fill(disk, 200 << 10)
    with pytest.raises(StoreError, match=r"the swap files need .* free; free some room, or add a drive to nvme_path"):
        start(JOB, DISK, disk / "swap", durability="step")
    assert not (disk / "swap" / "default").exists()
    (disk / "filler").unlink()
    with monkeypatch.context() as patch:
        testing.intercept(patch, "store.create", lambda create, *args, **given: (create(*args, **given), fill(disk))[0])
        with pytest.raises(IoError, match="No space left") as caught:
            start(JOB, DISK, disk / "swap")
        assert caught.value.errno == errno.ENOSPC
    assert not (disk / "swap" / "default").exists()
    (disk / "filler").unlink()
    begin(disk / "swap")
    go_on(disk / "swap", DONE, unbroken)


# -- a commit that fails ------------------------------------------------------------------------------

CALLS = {
    "the sync of the data": ("fdatasync", "states"),
    "the write of the blob": ("pwrite", "blob"),
    "the sync of the blob": ("fsync", "blob"),
    "the write of the record": ("pwrite", "commit"),
}


def failing(call: str, file: str, number: int) -> Callable[..., Any]:
    real = getattr(os, call)

    def fail(descriptor: int, *arguments: Any) -> Any:
        if os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")).startswith(file):
            raise OSError(number, os.strerror(number))
        return real(descriptor, *arguments)

    return fail


@pytest.mark.sample(2)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("what", CALLS)
def test_a_commit_that_fails_stops_the_engine_at_the_one_before(
    what: str, number: int, tmp_path: Path, unbroken: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(JOB, DISK, tmp_path)
    for step in range(DONE):
        train_step(engine, JOB, step)
    testing.settle(engine, commit=False)
    with monkeypatch.context() as patch:
        patch.setattr(os, CALLS[what][0], failing(*CALLS[what], number))
        with pytest.raises(EngineFailed) as caught:
            for step in range(DONE, JOB.steps):
                train_step(engine, JOB, step)
    cause = caught.value.__cause__
    assert isinstance(cause, IoError) and cause.errno == number
    assert os.path.basename(cause.path).startswith(CALLS[what][1])
    engine.destroy()  # the drive works again, but a sync that failed once must not be believed the next time
    assert records(tmp_path)[0].step == DONE - 1
    go_on(tmp_path, DONE - 1, unbroken)


@pytest.mark.sample(1)
@pytest.mark.parametrize("what", CALLS)
def test_the_last_commit_of_all_fails(
    what: str, tmp_path: Path, unbroken: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of `destroy`, of an edit: the error is raised, the lock is given back, nothing is committed later."""
    begin(tmp_path)
    engine = start(JOB, DISK, tmp_path, resume="must")
    with offload.gathered(engine.module.head, modify=True):
        engine.module.head.weight.data.zero_()
    with monkeypatch.context() as patch:
        patch.setattr(os, CALLS[what][0], failing(*CALLS[what], errno.EIO))
        with pytest.raises(IoError):
            engine.destroy()
    engine.destroy()
    testing.leave(engine)
    go_on(tmp_path, DONE, unbroken)


@pytest.fixture
def rank(tmp_path: Path, queue: IoQueue) -> Path:
    """The folder of a rank with one commit, of step 1."""
    store = created(tmp_path, queue)
    store.commit(1, blob("one"))
    store.close()
    return tmp_path / "run" / "rank0"


def test_a_commit_that_is_intact_after_all_is_not_called_damaged(rank: Path, tmp_path: Path, queue: IoQueue) -> None:
    (rank / "suspect").touch()
    store, text = opened(tmp_path, queue)
    store.close()
    assert text == "one" and store.notices == [
        "a commit or its record looked damaged; all data of step 1 was compared and is intact, and the run resumes "
        "from it"
    ]


# -- records that are lost ----------------------------------------------------------------------------


def committed(tmp_path: Path, queue: IoQueue, *steps: int) -> None:
    store, _ = opened(tmp_path, queue)
    for step in steps:
        store.commit(step, blob(str(step)))
    store.close()


def said(tmp_path: Path, queue: IoQueue) -> tuple[str, str]:
    """Opens the store; returns the text of its commit, and what it says."""
    store, text = opened(tmp_path, queue)
    store.close()
    return text, "\n".join(store.notices)


def replace_page(rank: Path, number: int, page: bytes) -> bytes:
    """Returns the page of the commit file that was there."""
    with (rank / "commit").open("r+b") as file:
        file.seek(number * PAGE)
        old = file.read(PAGE)
        file.seek(number * PAGE)
        file.write(page)
    return old


@pytest.mark.parametrize("more", [(2, 3), (2, 3, 4)])
def test_a_newest_record_that_is_zeros_is_damage_and_the_step_before_is_compared(
    more: tuple[int, ...], rank: Path, tmp_path: Path, queue: IoQueue
) -> None:
    committed(tmp_path, queue, *more)
    assert not inspection.look(rank).wrong
    replace_page(rank, read_records(rank / "commit").valid[0].blob, bytes(PAGE))
    (wrong,) = inspection.look(rank).wrong
    assert wrong.path == str(rank / "commit") and "a record that was written is lost" in wrong.reason
    text, notices = said(tmp_path, queue)
    assert text == str(more[-2]) and "is lost" in notices and f"all data of step {more[-2]} was compared" in notices
    committed(tmp_path, queue, 9)
    assert said(tmp_path, queue) == ("9", "") and not inspection.look(rank).wrong


def test_a_record_that_a_resume_has_erased_is_not_called_lost(rank: Path, tmp_path: Path, queue: IoQueue) -> None:
    committed(tmp_path, queue, 2, 3)
    store = Store([tmp_path], "run", 0, SPEC, queue)
    store.open(2)
    store.close()
    rank_files = inspection.look(rank)
    assert (
        [commit.record.serial for commit in rank_files.commits] == [2] and not rank_files.wrong and not rank_files.begun
    )
    assert said(tmp_path, queue) == ("2", "")
    # The mark of another record vouches for none.
    replace_page(rank, 0, format.erasure(1, 0))
    assert len(inspection.look(rank).wrong) == 1


def test_a_store_whose_first_commit_is_not_commit_1_has_lost_nothing(tmp_path: Path, queue: IoQueue) -> None:
    """A start on another number of ranks makes one."""
    store = Store([tmp_path], "run", 0, SPEC, queue, first=7)
    store.create()
    assert not format.was_committed(store.folders[0])
    store.commit(1, blob("one"))
    store.close()
    records = read_records(store.folders[0] / "commit")
    assert records.valid[0].serial == 7 and records.doubt is None


@pytest.mark.parametrize("more", [(2,), (2, 3)])
def test_a_write_of_a_record_that_a_drive_has_lost_is_said_as_a_kill_is(
    more: tuple[int, ...], rank: Path, tmp_path: Path, queue: IoQueue
) -> None:
    """The files are those of a kill between blob and record; once the run goes on, a record is missing."""
    committed(tmp_path, queue, *more[:-1])
    blob = 1 - read_records(rank / "commit").valid[0].blob
    before = (rank / "commit").read_bytes()[blob * PAGE :][:PAGE]
    committed(tmp_path, queue, more[-1])
    lost = replace_page(rank, blob, before)
    rank_files = inspection.look(rank)
    assert not rank_files.wrong and rank_files.begun
    text, notices = said(tmp_path, queue)
    assert text == ("one", "2")[len(more) - 1] and inspection.COMMIT_BEGUN in notices
    replace_page(rank, blob, lost)
    committed(tmp_path, queue, 9)
    replace_page(rank, blob, before)  # as the process left it that did not know of the loss
    if more == (2, 3):
        assert "a record that was written is lost" in inspection.look(rank).wrong[0].reason


# -- files that cannot be read ------------------------------------------------------------------------


def unreadable(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, number: int) -> None:
    """Makes each read of the files of this name fail in `module`, as a drive or a limit of the process does."""

    def read(path: Path) -> bytes:
        if path.name == name:
            raise OSError(number, os.strerror(number), str(path))
        return read_whole(path)

    monkeypatch.setattr(module, "read_whole", read)


@pytest.mark.parametrize(("name", "number"), [("commit", errno.EIO), ("blob.1", errno.EMFILE)])
def test_a_run_whose_commits_cannot_be_read_is_not_taken_for_none(
    name: str, number: int, rank: Path, tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start would delete it."""
    if name == "blob.1":
        (rank / "commit").write_bytes(bytes(8192))  # the records are lost, the second blob tells of two commits
    store = Store([tmp_path], "run", 0, SPEC, queue)
    with monkeypatch.context() as patch:
        unreadable(patch, format, name, number)
        for call in (lambda: run_status([tmp_path], "run"), store.newest_serial, store.create):
            with pytest.raises(IoError, match=f"cannot read {rank / name}: ") as caught:
                call()
            assert caught.value.errno == number
    store.close()
    assert (rank / "states").stat().st_size == SPEC.nbytes


def test_a_blob_that_cannot_be_read_is_not_damaged(
    rank: Path, tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit before would be resumed, and the newest written over."""
    store, _ = opened(tmp_path, queue)
    store.commit(2, blob("two"))
    store.close()
    store = Store([tmp_path], "run", 0, SPEC, queue)
    with monkeypatch.context() as patch:
        for module in (inspection, format):
            unreadable(patch, module, "blob.1", errno.EACCES)
        with pytest.raises(IoError, match=f"cannot read {rank / 'blob.1'}: ") as caught:
            store.newest_serial()
        assert caught.value.errno == errno.EACCES
    store.close()
    store, text = opened(tmp_path, queue)
    store.close()
    assert text == "two" and not store.notices


def test_a_drive_whose_manifest_cannot_be_read_is_not_taken(
    tmp_path: Path, queue: IoQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the second drive of another run, which a start would write over."""
    first, two, three = (tmp_path / name for name in ("one", "two", "three"))
    theirs = Store([first, two], "run", 0, SPEC, queue)
    theirs.create()
    theirs.commit(1, blob("theirs"))
    theirs.close()
    manifest = two / "run" / "rank0" / "manifest.json"
    before = manifest.read_bytes()
    for begin in (
        lambda: Store([three, two], "run", 0, SPEC, queue),
        lambda: Store([first, two], "run", 0, SPEC, queue),
    ):
        mine = begin()
        with monkeypatch.context() as patch:
            for module in (inspection, format):
                unreadable(patch, module, "manifest.json", errno.EIO)
            with pytest.raises(IoError, match=r"cannot read .*manifest\.json: "):
                mine.create() if mine.newest_serial() is None else mine.open(mine.newest_serial())
        mine.close()
        assert manifest.read_bytes() == before


@pytest.mark.parametrize("name", ["commit", "blob.0", "manifest.json"])
def test_an_unreadable_file_is_not_called_missing(name: str, rank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from offload.swapper.store import format

    with monkeypatch.context() as patch:
        for module in (inspection, format):
            unreadable(patch, module, name, errno.EIO)
        rank_files = inspection.look(rank)
    reasons = [wrong.reason for wrong in rank_files.wrong if wrong.path == str(rank / name)]
    assert len(reasons) == 1 and reasons[0].startswith("the file cannot be read: Input/output error")
    (rank / name).unlink()
    reasons = [wrong.reason for wrong in inspection.look(rank).wrong if wrong.path == str(rank / name)]
    assert len(reasons) == 1 and reasons[0].startswith("the file is missing")


# -- manifests that are JSON and yet damaged ----------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        {"drives": ["/a", "/b"]},
        {"drives": []},
        {"drives": [7]},
        {"drives": {"a": 1}},
        {"drive": "first"},
        {"drive": [1]},
        {"stripes": {"bytes": 0, "weights": [1]}},
        {"stripes": {"bytes": 4096, "weights": [0]}},
        {"stripes": {"bytes": 4096, "weights": 1}},
        {"layout": []},
        {"about": "me"},
        {"format": 99, "about": "me"},
    ],
    ids=str,
)
def test_a_manifest_with_impossible_values_is_reported(
    damage: dict[str, Any], rank: Path, tmp_path: Path, queue: IoQueue
) -> None:
    path = rank / "manifest.json"
    right = path.read_text()
    path.write_text(json.dumps(json.loads(right) | damage))
    with pytest.raises(StoreError, match=str(path)):
        read_manifest(path)
    assert any(wrong.path == str(path) for wrong in inspection.look(rank).wrong)
    (rank / "commit").rename(tmp_path / "away")  # as on a later drive, or after a start that was killed
    inspection.look(rank)
    inspection.place_of(rank)
    (tmp_path / "away").rename(rank / "commit")
    store, text = opened(tmp_path, queue)
    store.close()
    assert text == "one" and path.read_text() == right


def test_a_manifest_that_differs_from_the_commit_is_said_to(rank: Path) -> None:
    path = rank / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"created": "never"}))
    assert [wrong.reason for wrong in inspection.look(rank).wrong] == [
        "the file differs from the copy in the last commit"
    ]


def test_a_manifest_nested_deeper_than_python_parses_is_damage(rank: Path, tmp_path: Path, queue: IoQueue) -> None:
    (rank / "manifest.json").write_text('{"a":' * 100_000)
    (wrong,) = inspection.look(rank).wrong
    assert wrong.path == str(rank / "manifest.json")
    with pytest.raises(StoreError, match="cannot read"):
        read_manifest(rank / "manifest.json")
    store, text = opened(tmp_path, queue)
    store.close()
    assert text == "one" and inspection.look(rank).wrong == (), "the copy in the commit is written anew"


@pytest.mark.parametrize("name", ["finished.json", "closed.json"])
@pytest.mark.parametrize("content", ["[" * 100_000, "", '{"steps": "3"}', '{"step": 3}'])
def test_a_note_that_cannot_be_read_ends_no_run(content: str, name: str, rank: Path, tmp_path: Path) -> None:
    """The swap files beside it may be all that there is of the run: no start takes them for remainders."""
    (rank.parent / name).write_text(content)
    status = run_status([tmp_path], "run")
    assert (status.exists, status.finished, status.closed) == (True, None, name == "closed.json")
    closed = json.loads(content) if content == '{"step": 3}' else {}
    assert read_closed(rank.parent) == (closed if name == "closed.json" else None)
    assert inspect(rank.parent)["finished"] == status.finished


def test_a_folder_in_the_place_of_a_note_is_named(rank: Path, tmp_path: Path, queue: IoQueue) -> None:
    note = rank.parent / "closed.json"
    note.mkdir()
    with pytest.raises(StoreError, match=f"{note} is a folder, expected a note of the run or nothing"):
        opened(tmp_path, queue)
    note.rmdir()
    store, text = opened(tmp_path, queue)
    store.close()
    assert text == "one"
