"""CRC-32C made and compared on the way: damage is an error, and the parts add up to the whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from offload.aio import DirectFile, IoQueue, StripedFile, _native, aligned_empty, crc32c, crc32c_joined, crc32c_of_zeros
from offload.errors import IoError


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4097, 65536, 1_000_003])
def test_a_request_gives_the_checksum_of_its_bytes(backend: str, tmp_path: Path, nbytes: int) -> None:
    data = os.urandom(nbytes)
    with DirectFile(tmp_path / "file", create=True) as file, IoQueue(backend, block_bytes=8192, threads=2) as queue:
        assert queue.write(file, 100, data, checksum=True).crc32c() == crc32c(data)
        back = bytearray(nbytes)
        assert queue.read(file, 100, back, checksum=True).crc32c() == crc32c(data)
        assert queue.read(file, 100, back, expect_crc32c=crc32c(data)).wait() == nbytes


def test_over_several_files(backend: str, tmp_path: Path) -> None:
    data = os.urandom(1_000_003)
    paths = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    with StripedFile(paths, [3, 1, 2], stripe_bytes=4096, create=True) as file, IoQueue(backend) as queue:
        assert queue.write(file, 77, data, checksum=True).crc32c() == crc32c(data)
        assert queue.read(file, 77, bytearray(len(data)), expect_crc32c=crc32c(data)).wait() == len(data)


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


def test_a_checksum_that_was_not_asked_for(backend: str, tmp_path: Path) -> None:
    with (
        DirectFile(tmp_path / "file", create=True) as file,
        IoQueue(backend) as queue,
        pytest.raises(ValueError, match="checksum=True"),
    ):
        queue.write(file, 0, b"x").crc32c()


def test_long_ranges_have_the_checksum_of_the_table() -> None:
    """The three streams of the instruction, the folding, and what is left over."""
    data = os.urandom(100_000)
    for start in (0, 1, 7):
        for nbytes in (3 * 4096 - 1, 3 * 4096, 3 * 4096 + 1, 6 * 4096 + 9, 99_000):
            view = memoryview(data)[start : start + nbytes]
            assert {_native.crc32c_by(way, view, 5) for way in _native.crc32c_ways()} == {crc32c(view, 5)}


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 5), (5, 0), (4096, 1), (100_003, 70_001)])
def test_the_checksum_of_two_ranges_combines_theirs(first: int, second: int) -> None:
    left, right = os.urandom(first), os.urandom(second)
    assert crc32c_joined(crc32c(left), crc32c(right), second) == crc32c(left + right)


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 1_000_003])
def test_the_sum_of_zeros_needs_no_zeros(nbytes: int) -> None:
    assert crc32c_of_zeros(nbytes) == crc32c(bytes(nbytes))
