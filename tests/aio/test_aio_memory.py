"""Host memory is aligned, on huge pages where there are any, on the NUMA node that was asked for, and not there in a
forked child. CRC-32C is CRC-32C.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import re
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload import testing
from offload.aio import _native, aligned_empty, crc32c, huge_page_share, prefer_node, release_pages
from tests.support.processes import warm_process
from tests.support.processes.seccomp import refusing

HUGE = 2 << 20


def _address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def test_memory_is_aligned_zeroed_and_of_that_size() -> None:
    for nbytes in (1, 4096, HUGE, 3 * HUGE + 5):
        print(nbytes)
        buffer = aligned_empty(nbytes)
        assert len(buffer) == nbytes and not any(buffer) and _address(buffer) % HUGE == 0
        buffer[-1] = 7


def test_an_empty_allocation_is_allowed() -> None:
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


def test_pages_are_those_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 KiB on many aarch64 kernels, whose madvise refuses any other start."""
    testing.replace(monkeypatch, "size.system_page", 64 << 10)
    buffer = aligned_empty(HUGE)
    buffer[:] = b"x" * HUGE
    start = -(_address(buffer) - ctypes.addressof(ctypes.c_char.from_buffer(buffer.obj))) % (64 << 10)
    page = buffer[start : start + (64 << 10)]
    release_pages(buffer[start + 4096 : start + (192 << 10)])
    assert bytes(page) == b"x" * len(page), "only a part of it was given back"
    assert not any(buffer[start + (64 << 10) : start + (192 << 10)])
    assert buffer[start + (192 << 10)] == ord("x")


def test_large_allocations_use_huge_pages() -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text():
        pytest.skip("no transparent huge pages")
    buffer = aligned_empty(32 * HUGE)
    buffer[:] = bytes(len(buffer))
    share = huge_page_share(buffer)
    if share == 0:
        pytest.skip("the kernel had no huge page to give")
    assert share >= 0.5


def _policy(address: int) -> tuple[int, int]:
    """What the kernel says of the page at `address`: the mode, and the nodes as bits."""
    call = {"x86_64": 239, "aarch64": 236}.get(platform.machine())
    if call is None:
        pytest.skip("the number of get_mempolicy is not known here")
    mode, nodes = ctypes.c_int(), (ctypes.c_uint64 * 16)()
    arguments = (ctypes.addressof(mode), ctypes.addressof(nodes), 1025, address, 2)  # MPOL_F_ADDR
    if ctypes.CDLL(None).syscall(*map(ctypes.c_long, (call, *arguments))) != 0:
        pytest.skip("the kernel does not tell")
    return mode.value, sum(bits << 64 * index for index, bits in enumerate(nodes))


@pytest.mark.parametrize("nbytes", [1, 4096, HUGE, 3 * HUGE + 5])
def test_memory_prefers_a_node(nbytes: int) -> None:
    buffer = aligned_empty(nbytes)
    start = _address(buffer)
    stop, before = start + -(-nbytes // HUGE) * HUGE, _policy(start)
    if not prefer_node(buffer, 0):
        pytest.skip("this kernel, or this container, does not let us choose")
    assert _policy(start) == _policy(stop - 1) == (1, 1), "MPOL_PREFERRED, node 0"
    assert _policy(stop) == before, "and nothing behind"
    buffer[-1] = 7
    assert buffer[-1] == 7


@pytest.mark.parametrize("node", [-1, 63, 1000, 1023, 1024, 10**12])
def test_a_node_that_does_not_exist_changes_nothing(node: int) -> None:
    if Path(f"/sys/devices/system/node/node{node}").exists():
        pytest.skip("it does exist")
    buffer = aligned_empty(HUGE)
    before = _policy(_address(buffer))
    assert prefer_node(buffer, node) is False
    assert _policy(_address(buffer)) == before


@pytest.mark.sample(1)
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_a_kernel_that_refuses_nodes_is_no_error(error: int, tmp_path: Path) -> None:
    code = "from offload.aio import aligned_empty, prefer_node\nprint(prefer_node(aligned_empty(4096), 0))"
    assert refusing(tmp_path, {"mbind": error}, code) == ["False"]


def test_a_machine_whose_calls_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert prefer_node(aligned_empty(4096), 0) is False


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


# -- malloc's heap ------------------------------------------------------------------------------------

HEAP = """\
import ctypes
from offload.aio.memory import release_heap
from tests.support.processes.process_measures import resident

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def block(nbytes):
    address = libc.malloc(ctypes.c_size_t(nbytes))
    ctypes.memset(address, 1, nbytes)
    return address

def free(*addresses):
    for address in addresses:
        libc.free(ctypes.c_void_p(address))

free(block(24 << 20))  # from here on glibc takes blocks of that size from its heap
blocks, above = [block(8 << 20) for _ in range(16)], block(1 << 20)
full = resident()
free(*blocks)
print((full - resident()) >> 20)
release_heap()
print((full - resident()) >> 20)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's malloc alone")
def test_freed_memory_that_malloc_keeps_is_given_back() -> None:
    kept, given_back = map(int, warm_process.python(HEAP).stdout.split())
    assert kept < 8 and given_back > 120


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's malloc alone")
def test_malloc_keeps_no_large_block_once_it_must_not() -> None:
    program = HEAP.replace("libc = ", "release_heap(for_good=True)\nlibc = ", 1)
    at_once, _ = map(int, warm_process.python(program).stdout.split())
    assert at_once > 120
