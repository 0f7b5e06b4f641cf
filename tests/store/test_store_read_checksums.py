"""Checksums of reads raise no false alarm and miss no damage, for any readers and chunks."""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.aio import File, IoQueue, aligned_empty, crc32c
from offload.aio.protocols import Future
from offload.errors import IoError
from offload.sizes import PAGE
from offload.states import State
from offload.swapper.store import Store, StoreSpec, format
from offload.swapper.store import store as store_module
from offload.swapper.store.format import ChecksumRange, ChecksumTable, Key, PageSums, Passages, Slot
from offload.swapper.store.requests import CheckedRead, DriveSpans
from offload.timeline import Timeline
from tests.support.drives.fault_injection import flip_bit
from tests.support.drives.write_recorder import Done, page_crcs

TRAINABLE, ALL = 12288, 20480
SPEC = StoreSpec(
    ({State.WEIGHT: ALL, State.EXP_AVG: TRAINABLE}, {State.WEIGHT: ALL}), 2, {}, frozen=(ALL - TRAINABLE, ALL)
)


@pytest.fixture
def store(tmp_path: Path, queue: IoQueue) -> Iterator[Store]:
    """One unit of which the weight is frozen from `TRAINABLE` on, and a frozen one; committed."""
    store = Store([tmp_path], "run", 0, SPEC, queue)
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


def update(store: Store, tile: int, seed: int) -> None:
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
            damage(store, 0, State.WEIGHT, damaged)
        store.close()
    other = Store([store.folders[0].parents[1]], "run", 0, SPEC, store._queue)
    other.open()
    yield other
    other.close()


def damage(store: Store, unit: int, state: State, at: int, slot: int | None = None) -> None:
    """Flip a bit, in the newest slot if none is given."""
    place = store._places[unit][state][store.newest[unit] if slot is None else slot]
    flip_bit(store.folders[0] / "states", place.offset(at))


def test_who_waits_late_for_a_read_is_not_alarmed_by_an_update(store: Store) -> None:
    """Two threads wait for one read; before the second looks at it, the unit is updated, in place within a window."""
    for seed in (1, 2, 3):
        with by_another_process(store) as other:
            _be_late(other, seed)


def _be_late(store: Store, seed: int) -> None:
    late = store.read(0, State.WEIGHT, store.newest[0], 0, aligned_empty(ALL))
    late._future.wait()  # type: ignore[attr-defined]
    chunk = store.read(0, State.EXP_AVG, store.newest[0], 0, aligned_empty(3000))
    chunk.wait()
    rest = store.read(0, State.EXP_AVG, store.newest[0], 3000, aligned_empty(TRAINABLE - 3000))
    rest._future.wait()  # type: ignore[attr-defined]
    update(store, 4096, seed)
    late.wait()
    rest.wait()
    read(store, 0, State.EXP_AVG, 3000, TRAINABLE)  # it begins in the middle: of the old ones nothing is known any more


@pytest.mark.parametrize("tile", [1024, 4096, 5000, TRAINABLE])
def test_damage_before_frozen_weights_is_noticed_whatever_the_tiles(tile: int, store: Store) -> None:
    """The update worker reads a tile, what is frozen behind all tiles, and then the other tiles."""
    update(store, 4096, 1)
    with by_another_process(store, 7000) as store, pytest.raises(IoError, match="use weight of unit 0"):
        read(store, 0, State.WEIGHT, 0, tile)
        read(store, 0, State.WEIGHT, TRAINABLE, ALL)
        for start in range(tile, TRAINABLE, tile):
            read(store, 0, State.WEIGHT, start, min(start + tile, TRAINABLE))


def test_damage_is_found_by_a_chunked_and_by_a_complete_read(store: Store) -> None:
    update(store, 4096, 1)
    with by_another_process(store, 11000) as other:
        for start, stop in ((0, 6000), (0, ALL), (6000, TRAINABLE)):
            with pytest.raises(IoError, match="use weight of unit 0"):
                read(other, 0, State.WEIGHT, start, stop)
        read(other, 0, State.WEIGHT, TRAINABLE, ALL)


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


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_damage_is_found_while_a_timeline_records(
    order: tuple[int, int], store: Store, queue: IoQueue, tmp_path: Path
) -> None:
    """The spans are made where and when the reads end: the comparison stays with the one who waits, in their order."""
    store.commit(1, {})
    damage(store, 0, State.WEIGHT, 7000)
    store.close()
    timeline, held = Timeline(tmp_path / "timeline.json"), HeldQueue(queue)
    other = Store([tmp_path], "run", 0, SPEC, held, spans=DriveSpans(timeline, ["one", "two"]))
    other.open()
    reads = [other.read(0, State.WEIGHT, other.newest[0], start, aligned_empty(4096)) for start in (0, 4096)]
    for index in order:
        held.reads[index].end()
    assert [span.name for span in timeline._spans] == ["one weight"] * 2
    for _ in range(2):  # who waits again, as a cleanup does, is told again
        for each in reads:
            with pytest.raises(IoError, match="use weight of unit 0"):
                each.wait()
    other.close()


def test_two_threads_that_wait_for_one_read_both_learn_of_damage(store: Store) -> None:
    with by_another_process(store, 7000) as other:
        future = other.read(0, State.WEIGHT, other.newest[0], 6144, aligned_empty(TRAINABLE - 6144))
        with ThreadPoolExecutor(2) as pool:
            waits = [pool.submit(future.wait) for _ in range(2)]
            assert all(isinstance(wait.exception(), IoError) for wait in waits)


def test_a_read_that_is_submitted_during_an_update_is_compared_with_the_bytes_before(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checksums are replaced when the store has taken them, before `newest` names the slot."""
    with by_another_process(store) as other:
        pages, target = ChecksumTable.pages, other.target(0)

        def replaced_then(table: ChecksumTable, key: Key) -> PageSums:
            answer = pages(table, key)
            table.replace(key, [write(other, 0, State.WEIGHT, target, 0, TRAINABLE, seed=2)], TRAINABLE)
            return answer

        monkeypatch.setattr(ChecksumTable, "pages", replaced_then)
        other.read(0, State.WEIGHT, other.newest[0], 0, aligned_empty(TRAINABLE)).wait()


def test_frozen_weights_are_compared_whichever_slot_is_the_newest(store: Store) -> None:
    """An update before anybody has read them proves nothing of them, and changes nothing."""
    update(store, 4096, 1)
    with by_another_process(store) as other:
        update(other, 4096, 3)
        read(other, 0, State.WEIGHT, TRAINABLE, ALL)
    with by_another_process(store) as other:
        damage(other, 0, State.WEIGHT, ALL - 100, other.target(0))
        update(other, 4096, 2)
        read(other, 0, State.WEIGHT, 0, TRAINABLE)
        for start in (TRAINABLE, 0):
            with pytest.raises(IoError, match="use weight of unit 0"):
                read(other, 0, State.WEIGHT, start, ALL)


@pytest.mark.parametrize(("start", "stop"), [(0, ALL), (5000, TRAINABLE + 1), (TRAINABLE - 1, ALL), (TRAINABLE, ALL)])
def test_a_read_goes_on_behind_what_trains_in_either_slot(start: int, stop: int, store: Store) -> None:
    """One request: frozen weights lie behind slot B, and behind slot A there is B."""
    seen = set()
    for seed in (1, 2, 3):
        update(store, 4096, seed)
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


@pytest.mark.parametrize("nbytes", [4096, TRAINABLE, TRAINABLE + 4096, ALL])
@pytest.mark.parametrize("stops_at", [None, 0, 1])
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

    monkeypatch.setattr(store_module, "clone_range", copy)
    update(store, 4096, 1)
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
    for start, stop in data.draw(st.permutations(list(itertools.pairwise(borders(5))))):
        buffer = memoryview(bytearray(stop - start))
        read = CheckedRead(
            sums, start, buffer, partial(read_of, drive), lambda each: IoError("file", each.start, len(each), 74)
        )
        try:
            read.wait()
        except IoError as error:
            noticed = True
            assert error.offset <= at < error.offset + error.nbytes
        else:
            assert bytes(buffer) == now[start:stop], "no wrong byte is ever handed over"
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
    found = []
    for reader in turns:
        start, stop = next(left[reader])
        found.append(passages.compare((0, State.WEIGHT), slot, start, stop - start, crc32c(data[start:stop]))[0])
    return found


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


def test_many_threads_read_while_one_updates(store: Store) -> None:
    """As in training: readers of the frozen unit at any time, those of the other between its updates."""
    update(store, 4096, 0)
    errors: list[BaseException] = []
    over, turn = threading.Event(), threading.Lock()

    def reader(seed: int) -> None:
        chance = random.Random(seed)
        try:
            while not over.is_set():
                chunk = chance.choice([1024, 3000, 4096, 6000, ALL])
                unit = chance.randrange(2)
                with turn if unit == 0 else threading.Lock():
                    for start in range(0, ALL, chunk):
                        if chance.random() < 0.02:
                            break  # an interrupt
                        read(store, unit, State.WEIGHT, start, min(start + chunk, ALL))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for seed in range(60):
        with turn:
            update(store, random.Random(seed).choice([1024, 4096, 5000]), seed)
            if seed % 3 == 0:
                store.commit(seed, {})
    over.set()
    for thread in threads:
        thread.join()
    assert not errors
