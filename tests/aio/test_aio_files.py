"""Files of the queue: stripes over drives, checksums, and random requests beside each other."""

from __future__ import annotations

import errno
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.aio import (
    DirectFile,
    IoQueue,
    Priority,
    StripedFile,
    _native,
    aligned_empty,
    crc32c,
    crc32c_joined,
    crc32c_of_zeros,
)
from offload.aio.file import Layout, whole_weights
from offload.errors import ConfigError, IoError
from tests.support.sampling import examples

layouts = st.builds(
    Layout, st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple), st.sampled_from([4096, 8192])
)


@given(layouts, st.integers(0, 300_000))
def test_sizes_are_those_of_the_places(layout: Layout, nbytes: int) -> None:
    ends = [0] * len(layout.weights)
    for file, start, count in layout.places(0, nbytes):
        ends[file] = max(ends[file], start + count)
    assert layout.file_nbytes(nbytes) == ends
    assert layout.nbytes(ends) == nbytes


@given(layouts, st.integers(0, 300_000), st.integers(0, 300_000), st.integers(0, 100_000))
def test_a_request_is_the_same_wherever_it_is_cut(layout: Layout, offset: int, first: int, second: int) -> None:
    def bytes_of(start: int, nbytes: int) -> dict[int, int]:
        share: dict[int, int] = {}
        for file, _, count in layout.places(start, nbytes):
            share[file] = share.get(file, 0) + count
        return share

    complete, parts = bytes_of(offset, first + second), bytes_of(offset, first)
    for file, count in bytes_of(offset + first, second).items():
        parts[file] = parts.get(file, 0) + count
    assert complete == parts


def test_weights_become_small_whole_numbers() -> None:
    weights: list[float]
    complete: tuple[int, ...] | None
    for weights, complete in (
        ([1, 1], (1, 1)),
        ([4, 2], (2, 1)),
        ([7, 4], (7, 4)),
        ([3.5, 3.5], (1, 1)),
        ([6.9, 3.5], (2, 1)),
        ([5.1e9, 2.6e9, 0.05e9], None),
    ):
        print(weights)
        whole = whole_weights(weights)
        assert whole == complete or (complete is None and all(weight >= 1 for weight in whole) and sum(whole) <= 40)
        assert whole_weights(whole) == whole, "given again they are the same"


def test_drives_get_their_share(backend: str, tmp_path: Path) -> None:
    paths = [tmp_path / "fast", tmp_path / "slow"]
    data = random.Random(0).randbytes(6 << 20)
    with StripedFile(paths, [2.0, 1.0], stripe_bytes=1 << 20, create=True) as file, IoQueue(backend) as queue:
        file.reserve(len(data))
        assert [path.stat().st_size for path in paths] == [4 << 20, 2 << 20]
        assert queue.write(file, 0, data).wait() == len(data)
        file.sync()
        assert file.size() == len(data) and file.layout.weights == (2, 1)
    fast, slow = (path.read_bytes() for path in paths)
    assert fast[: 2 << 20] == data[: 2 << 20] and slow[: 1 << 20] == data[2 << 20 : 3 << 20]
    with StripedFile(paths, (2, 1), stripe_bytes=1 << 20, writable=False) as file, IoQueue(backend) as queue:
        back = bytearray(len(data))
        assert queue.read(file, 0, back).wait() == len(data) and back == data


def test_an_error_names_the_drive(backend: str, tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    with StripedFile(paths, create=True, stripe_bytes=4096) as file, IoQueue(backend) as queue:
        queue.write(file, 0, bytes(8 * 4096)).wait()
        os.truncate(paths[1], 4096)
        assert file.size() == 3 * 4096
        with pytest.raises(IoError) as caught:
            # Of several missing stripes any may be told.
            queue.read(file, 0, bytearray(4 * 4096)).wait()
        assert (caught.value.errno, caught.value.path) == (errno.ENODATA, str(paths[1]))
        assert (caught.value.offset, caught.value.nbytes) == (4096, 4096)
        # Within one stripe there is one drive, whose file has the bytes at another offset.
        with pytest.raises(IoError) as caught:
            queue.read(file, 3 * 4096 + 8, bytearray(16)).wait()
        assert (caught.value.errno, caught.value.path) == (errno.ENODATA, str(paths[1]))
        assert (caught.value.offset, caught.value.nbytes) == (4096 + 8, 16)


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for arguments, words in (
        (([],), "at least one path"),
        (([a, b], [1]), "one weight for each of 2"),
        (([a, b], [1, 0]), "above 0"),
        (([a, b], [1, float("nan")]), "above 0"),
        (([a, a],), "different files"),
    ):
        with pytest.raises(ConfigError, match=words):
            StripedFile(*arguments, create=True)
    with pytest.raises(ConfigError, match="multiple of 4096"):
        StripedFile([a, b], stripe_bytes=1000, create=True)
    assert not a.exists()
    a.write_bytes(b"")
    os.link(a, b)
    with pytest.raises(ConfigError, match="different files"):
        StripedFile([a, b])


def test_a_path_that_cannot_be_opened_closes_the_others(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(IoError) as caught:
        StripedFile([tmp_path / "a", tmp_path / "none" / "b"], create=True)
    assert caught.value.errno == errno.ENOENT and len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4097, 65536, 1_000_003])
def test_a_request_gives_the_checksum_of_its_bytes(backend: str, tmp_path: Path, nbytes: int) -> None:
    data = os.urandom(nbytes)
    with DirectFile(tmp_path / "file", create=True) as file, IoQueue(backend, block_bytes=8192, threads=2) as queue:
        assert queue.write(file, 100, data, checksum=True).crc32c() == crc32c(data)
        back = bytearray(nbytes)
        assert queue.read(file, 100, back, checksum=True).crc32c() == crc32c(data)
        assert queue.read(file, 100, back, expect_crc32c=crc32c(data)).wait() == nbytes


@pytest.mark.parametrize("bit", [0, 12_345_678])
def test_one_bit_is_noticed(backend: str, tmp_path: Path, bit: int) -> None:
    data = bytearray(os.urandom(2 << 20))
    known = crc32c(data)
    data[bit // 8] ^= 1 << bit % 8
    (tmp_path / "file").write_bytes(data)
    with DirectFile(tmp_path / "file") as file, IoQueue(backend, block_bytes=65536) as queue:
        with pytest.raises(IoError, match="damaged") as caught:
            queue.read(file, 0, aligned_empty(2 << 20), expect_crc32c=known).wait()
        assert (caught.value.errno, caught.value.offset, caught.value.nbytes) == (errno.EBADMSG, 0, 2 << 20)


def test_a_failed_request_raises_its_own_error_and_not_that_of_its_checksum(backend: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    with DirectFile(tmp_path / "file") as file, IoQueue(backend) as queue:
        future = queue.read(file, 0, bytearray(200), expect_crc32c=0)
        for ask in (future.wait, future.crc32c):
            with pytest.raises(IoError) as caught:
                ask()
            assert caught.value.errno == errno.ENODATA


def test_long_ranges_have_the_checksum_of_the_table() -> None:
    """The three streams of the instruction, the folding, and what is left over."""
    data = os.urandom(100_000)
    for start in (0, 1, 7):
        for nbytes in (3 * 4096 - 1, 3 * 4096, 3 * 4096 + 1, 6 * 4096 + 9, 99_000):
            view = memoryview(data)[start : start + nbytes]
            assert {_native.crc32c_by(way, view, 5) for way in _native.crc32c_ways()} == {crc32c(view, 5)}


def test_the_checksum_of_two_ranges_combines_theirs() -> None:
    for first, second in ((0, 0), (0, 5), (5, 0), (4096, 1), (100_003, 70_001)):
        print(first)
        left, right = os.urandom(first), os.urandom(second)
        assert crc32c_joined(crc32c(left), crc32c(right), second) == crc32c(left + right)


def test_the_sum_of_zeros_needs_no_zeros() -> None:
    for nbytes in (0, 1, 4096, 1_000_003):
        print(nbytes)
        assert crc32c_of_zeros(nbytes) == crc32c(bytes(nbytes))


MIB = 1 << 20


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
    seed: int,
) -> None:
    """Writes one after the other where they overlap, else at once; then all reads at once, in another order."""
    chance = random.Random(seed)
    reference = bytearray(12 * MIB)
    paths = [folder / f"part{index}" for index in range(max(len(weights), 1))]
    for path in paths:
        path.unlink(missing_ok=True)
    file = StripedFile(paths, weights, create=True) if weights else DirectFile(paths[0], create=True)
    shape = {"threads": threads, "depth": depth, "block_bytes": block_bytes}
    with file, IoQueue(backend, **shape) as queue:
        file.reserve(len(reference))
        assert file.size() >= len(reference)
        in_flight: list[tuple[Request, memoryview, object]] = []
        for request in requests:
            end = request.offset + request.nbytes
            for request_before, data, future in list(in_flight):
                if request.offset < request_before.offset + request_before.nbytes and request_before.offset < end:
                    assert future.wait() == request_before.nbytes
                    in_flight.remove((request_before, data, future))
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
