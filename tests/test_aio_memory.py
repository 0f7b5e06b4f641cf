"""Host memory is aligned, on huge pages where there are any, and not there in a forked child. CRC-32C is CRC-32C."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.aio import _native, aligned_empty, crc32c, huge_page_share

HUGE = 2 << 20


def _address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


@pytest.mark.parametrize("nbytes", [1, 4096, HUGE, 3 * HUGE + 5])
def test_memory_is_aligned_zeroed_and_of_that_size(nbytes: int) -> None:
    buffer = aligned_empty(nbytes)
    assert len(buffer) == nbytes and not any(buffer) and _address(buffer) % HUGE == 0
    buffer[-1] = 7


def test_no_bytes() -> None:
    assert len(aligned_empty(0)) == 0
    with pytest.raises(ValueError):
        aligned_empty(-1)


def test_it_is_unmapped_with_its_last_view() -> None:
    buffer = aligned_empty(64 << 20)
    view = buffer[4096:8192]
    address = _address(buffer)
    del buffer
    assert f"{address:x}-" in Path("/proc/self/maps").read_text() or not any(view)
    view[0] = 1
    del view
    mapped = re.findall(r"^([0-9a-f]+)-([0-9a-f]+)", Path("/proc/self/maps").read_text(), re.MULTILINE)
    assert not any(int(start, 16) <= address < int(stop, 16) for start, stop in mapped)


def test_huge_pages() -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text():
        pytest.skip("no transparent huge pages")
    buffer = aligned_empty(32 * HUGE)
    buffer[:] = bytes(len(buffer))
    share = huge_page_share(buffer)
    if share == 0:
        pytest.skip("the kernel had no huge page to give")
    assert share >= 0.5


def test_memory_that_is_not_there_has_no_huge_page() -> None:
    assert huge_page_share(aligned_empty(4 * HUGE)) == 0


def test_a_forked_child_does_not_have_it() -> None:
    buffer = aligned_empty(HUGE)
    buffer[0] = 1
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        _ = buffer[0]
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


def test_a_forked_child_keeps_what_it_maps_in_its_place() -> None:
    buffer = aligned_empty(16 * HUGE)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        own = [mmap.mmap(-1, 2 * HUGE) for _ in range(32)]
        del buffer
        for mapping in own:
            mapping[HUGE] = 1
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_crc_of_the_standard() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4
    assert crc32c(bytes([255]) * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E


@given(st.binary(max_size=200), st.integers(0, 200))
def test_crc_goes_on_from_a_value(data: bytes, cut: int) -> None:
    assert crc32c(data[cut:], crc32c(data[:cut])) == crc32c(data)


@given(st.binary(max_size=100))
def test_crc_is_that_of_the_definition(data: bytes) -> None:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    assert crc32c(data) == crc ^ 0xFFFFFFFF
    assert {_native.crc32c_by(way, data, 0) for way in _native.crc32c_ways()} == {crc ^ 0xFFFFFFFF}


@given(st.binary(max_size=1500), st.integers(0, 2**32 - 1))
def test_crc_is_the_same_in_every_way(data: bytes, value: int) -> None:
    assert {_native.crc32c_by(way, data, value) for way in _native.crc32c_ways()} == {crc32c(data, value)}


def test_crc_has_no_other_way() -> None:
    with pytest.raises(ValueError, match="no way"):
        _native.crc32c_by("magic", b"", 0)
