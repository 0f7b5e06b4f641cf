"""One logical file over several: every byte has one place, drives get their share, errors name the drive."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.aio import DirectFile, IoQueue, StripedFile
from offload.aio.file import Layout, whole_weights
from offload.errors import ConfigError, IoError

layouts = st.builds(
    Layout,
    st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    st.sampled_from([4096, 8192]),
)


@given(layouts, st.integers(0, 200_000), st.integers(0, 200_000))
def test_every_byte_has_one_place(layout: Layout, offset: int, nbytes: int) -> None:
    places = list(layout.places(offset, nbytes))
    assert sum(count for _, _, count in places) == nbytes and all(count > 0 for *_, count in places if nbytes)
    taken = [set() for _ in layout.weights]
    for file, start, count in places:
        assert not taken[file] & set(range(start, start + count, 512))
        taken[file] |= set(range(start, start + count, 512))


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


@pytest.mark.parametrize(
    ("weights", "complete"),
    [
        ([1, 1], (1, 1)),
        ([4, 2], (2, 1)),
        ([7, 4], (7, 4)),
        ([3.5, 3.5], (1, 1)),
        ([6.9, 3.5], (2, 1)),
        ([5.1e9, 2.6e9, 0.05e9], None),
    ],
)
def test_weights_become_small_whole_numbers(weights: list[float], complete: tuple[int, ...] | None) -> None:
    found = whole_weights(weights)
    assert found == complete or (complete is None and all(weight >= 1 for weight in found) and sum(found) <= 40)
    assert whole_weights(found) == found, "given again they are the same"


@given(st.lists(st.floats(0.3, 12), min_size=2, max_size=6))
def test_no_drive_is_kept_waiting(weights: list[float]) -> None:
    found = whole_weights(weights)
    slowest = max(share / sum(found) * sum(weights) / weight for share, weight in zip(found, weights, strict=True))
    best = max(1.0, sum(weights) / min(weights) / sum(found))
    assert slowest <= max(1.25, best * 1.05)


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


def test_drives_of_different_kinds(backend: str, tmp_path: Path) -> None:
    """One with O_DIRECT and one in memory, in one file."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        pytest.skip("no /dev/shm")
    other = shared / f"offload-test-stripe-{os.getpid()}"
    data = random.Random(0).randbytes(300_001)
    try:
        with StripedFile([tmp_path / "disk", other], create=True, stripe_bytes=8192) as file, IoQueue(backend) as queue:
            queue.write(file, 3, data).wait()
            back = bytearray(len(data))
            queue.read(file, 3, back).wait()
            assert back == data
    finally:
        other.unlink(missing_ok=True)


def test_an_error_names_the_drive(backend: str, tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    with StripedFile(paths, create=True, stripe_bytes=4096) as file, IoQueue(backend) as queue:
        queue.write(file, 0, bytes(8 * 4096)).wait()
        os.truncate(paths[1], 4096)
        assert file.size() == 3 * 4096
        with pytest.raises(IoError) as caught:
            queue.read(file, 0, bytearray(8 * 4096)).wait()
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


def test_a_checksum_covers_the_complete_request(backend: str, tmp_path: Path) -> None:
    with StripedFile([tmp_path / "a", tmp_path / "b"], create=True, stripe_bytes=4096) as file:
        with IoQueue(backend) as queue:
            queue.write(file, 0, bytes(40_960)).wait()
            for nbytes in (0, 40_960):
                with pytest.raises(IoError, match="damaged") as caught:
                    queue.read(file, 0, bytearray(nbytes), expect_crc32c=1).wait()
                assert (caught.value.errno, caught.value.nbytes) == (errno.EBADMSG, nbytes)
                assert caught.value.path == file.path


def test_a_path_that_cannot_be_opened_closes_the_others(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(IoError) as caught:
        StripedFile([tmp_path / "a", tmp_path / "none" / "b"], create=True)
    assert caught.value.errno == errno.ENOENT and len(os.listdir("/proc/self/fd")) == before


def test_one_path_is_an_ordinary_file(backend: str, tmp_path: Path) -> None:
    data = random.Random(0).randbytes(100_000)
    with StripedFile([tmp_path / "file"], create=True) as file, IoQueue(backend) as queue:
        queue.write(file, 0, data).wait()
    with DirectFile(tmp_path / "file") as plain, IoQueue(backend) as queue:
        back = bytearray(len(data))
        queue.read(plain, 0, back).wait()
        assert back == data
