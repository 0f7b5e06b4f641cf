"""Requests of any size, offset, order and number give the bytes of a reference file, on every backend."""

from __future__ import annotations

import os
import random
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from offload.aio import DirectFile, IoQueue, Priority, StripedFile, aligned_empty, crc32c
from tests.support.sampling import examples

MIB = 1 << 20
LONGEST = 64 * MIB


class Request(NamedTuple):
    """A stretch of the file, and how far its buffer is from a page."""

    offset: int
    nbytes: int
    skew: int
    priority: Priority
    checksum: bool


def _lengths(longest: int) -> st.SearchStrategy[int]:
    """Mostly about pages and blocks, where mistakes live."""
    near = st.builds(lambda n, d: min(max(n + d, 1), longest), st.sampled_from([4096, 65536, MIB]), st.integers(-2, 2))
    return st.one_of(near, st.integers(1, 20_000), st.integers(1, longest))


requests = st.lists(
    st.builds(
        Request,
        st.one_of(st.integers(0, 8 * MIB), st.integers(0, 2048).map(lambda page: page * 4096)),
        _lengths(3 * MIB),
        st.sampled_from([0, 0, 1, 511, 512, 4095]),
        st.sampled_from(Priority),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")) as folder:
        yield Path(folder)


def _buffer(request: Request) -> memoryview:
    return aligned_empty(request.nbytes + request.skew)[request.skew :]


@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(
    requests,
    st.integers(1, 40),
    st.integers(1, 3),
    st.integers(1, 300).map(lambda pages: pages * 4096),
    st.lists(st.floats(0.5, 4), min_size=0, max_size=3),
    st.sampled_from([0, 0, 4096, MIB]),
    st.integers(0, 2**32),
)
def test_bytes_are_those_of_a_reference(
    backend: str,
    folder: Path,
    requests: list[Request],
    depth: int,
    threads: int,
    block_bytes: int,
    weights: list[float],
    window_bytes: int,
    seed: int,
) -> None:
    """Writes one after the other where they overlap, else at once; then all reads at once, in another order."""
    chance = random.Random(seed)
    reference = bytearray(12 * MIB)
    paths = [folder / f"part{index}" for index in range(max(len(weights), 1))]
    for path in paths:
        path.unlink(missing_ok=True)
    file = StripedFile(paths, weights, create=True) if weights else DirectFile(paths[0], create=True)
    shape = {"threads": threads, "depth": depth, "block_bytes": block_bytes, "window_bytes": window_bytes}
    with file, IoQueue(backend, **shape) as queue:
        file.reserve(len(reference))
        assert file.size() >= len(reference)
        in_flight: list[tuple[Request, memoryview, object]] = []
        for request in requests:
            end = request.offset + request.nbytes
            for other, data, future in list(in_flight):
                if request.offset < other.offset + other.nbytes and other.offset < end:
                    assert future.wait() == other.nbytes
                    in_flight.remove((other, data, future))
            data = _buffer(request)
            data[:] = chance.randbytes(request.nbytes)
            reference[request.offset : end] = data
            future = queue.write(file, request.offset, data, priority=request.priority, checksum=request.checksum)
            in_flight.append((request, data, future))
            if request.checksum:
                assert future.crc32c() == crc32c(data)
        for request, _, future in in_flight:
            assert future.wait() == request.nbytes
        chance.shuffle(requests)
        reads = []
        for request in requests:
            back = _buffer(request)
            expected = memoryview(reference)[request.offset : request.offset + request.nbytes]
            known = crc32c(expected) if request.checksum else None
            future = queue.read(file, request.offset, back, priority=request.priority, expect_crc32c=known)
            reads.append((future, back, expected))
        for future, back, expected in reads:
            assert future.wait() == len(expected) and back == expected
        assert queue.written_bytes == queue.read_bytes == sum(request.nbytes for request in requests)


@pytest.mark.sample(1)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(_lengths(LONGEST), st.integers(0, 3 * MIB), st.sampled_from([0, 1, 4095]), st.integers(0, 2**32))
@example(LONGEST, 0, 0, 0)
@example(LONGEST - 1, 4095, 1, 0)
def test_long_requests_move_all_bytes(
    backend: str, folder: Path, nbytes: int, offset: int, skew: int, seed: int
) -> None:
    with DirectFile(folder / "long", create=True) as file, IoQueue(backend) as queue:
        data, back = (aligned_empty(nbytes + skew)[skew:] for _ in range(2))
        data[:] = random.Random(seed).randbytes(nbytes)
        assert queue.write(file, offset, data).wait() == nbytes
        assert queue.read(file, offset, back).wait() == nbytes
        assert back == data


@pytest.mark.sample(1)
def test_ten_thousand_requests_at_once(backend: str, tmp_path: Path) -> None:
    count, nbytes = 10_000, 1000
    with DirectFile(tmp_path / "file", create=True) as file, IoQueue(backend) as queue:
        data = random.Random(1).randbytes(count * nbytes)
        views = [memoryview(data)[start : start + nbytes] for start in range(0, len(data), nbytes)]
        order = list(range(count))
        random.Random(2).shuffle(order)
        writes = [queue.write(file, index * nbytes, views[index]) for index in order]
        assert all(write.wait() == nbytes for write in writes)
        back = bytearray(len(data))
        targets = [memoryview(back)[start : start + nbytes] for start in range(0, len(data), nbytes)]
        reads = [queue.read(file, index * nbytes, targets[index]) for index in order]
        assert all(read.wait() == nbytes for read in reads)
        assert back == data


def test_threads_that_share_a_queue(backend: str, tmp_path: Path) -> None:
    """Each has its own stretch, of a size that is no multiple of anything."""
    span = 777_777
    wrong: list[int] = []
    with DirectFile(tmp_path / "file", create=True) as file, IoQueue(backend, threads=2, depth=5) as queue:
        file.reserve(8 * span)
        start = threading.Barrier(8)

        def work(index: int) -> None:
            chance = random.Random(index)
            mine = bytearray(span)
            start.wait()
            for _ in range(25):
                at = chance.randrange(span)
                data = chance.randbytes(chance.randrange(1, span - at + 1))
                mine[at : at + len(data)] = data
                queue.write(file, index * span + at, data).wait()
                back = bytearray(len(data))
                queue.read(file, index * span + at, back).wait()
                if back != data:
                    wrong.append(index)
            back = bytearray(span)
            queue.read(file, index * span, back).wait()
            if back != mine:
                wrong.append(index)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
    assert not wrong
