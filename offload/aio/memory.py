"""Host memory that O_DIRECT likes: whole 2 MiB pages, private to this process."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import re
import weakref

from offload.sizes import PAGE

_HUGE_PAGE = 2 << 20
_MBIND = {"x86_64": 237, "aarch64": 235}
"""The number of the system call, which has no function in the C library."""
_MPOL_PREFERRED = 1
_NODES = 1024
"""More than any kernel is built for."""


def aligned_empty(nbytes: int) -> memoryview:
    """Zeroed writable memory of `nbytes` bytes that starts at a multiple of 2 MiB, unmapped with its last view.

    Asks for 2 MiB pages: O_DIRECT moves up to 1.6 times as many bytes a second from them. A forked child does not
    have this memory at all; otherwise the first write after a fork would copy every page, outside of any budget.
    """
    if nbytes < 0:
        raise ValueError(f"expected a number of bytes, got {nbytes}")
    room = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
    mapping = mmap.mmap(-1, room + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages: slower, not wrong
        mapping.madvise(mmap.MADV_HUGEPAGE)
        # The last page lies behind the buffer. Being of another kind, it keeps the kernel from counting this memory
        # and a neighbour's as one mapping, of which `huge_page_share` could not tell whose the huge pages are.
        mapping.madvise(mmap.MADV_NOHUGEPAGE, room + _HUGE_PAGE - PAGE, PAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % _HUGE_PAGE
    _mappings.add(mapping)
    return memoryview(mapping)[start : start + nbytes]


def release_pages(buffer: memoryview) -> None:
    """Give the whole pages in `buffer`, memory of `aligned_empty`, back to the system; they read as zero then."""
    mapping = buffer.obj
    assert isinstance(mapping, mmap.mmap), "memory of aligned_empty"
    base = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    offset = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) - base if buffer else 0
    start, stop = -(-offset // PAGE) * PAGE, (offset + len(buffer)) // PAGE * PAGE
    if start < stop:
        mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)


def prefer_node(buffer: memoryview, node: int) -> bool:
    """Take the pages of `buffer`, memory of `aligned_empty`, from a NUMA node for as long as it has free ones.

    Holds for pages that nobody has written to yet. False where the kernel refuses, and all stays as it was: it has no
    such node, or, as in many containers, does not let this process choose. See mbind(2).
    """
    number = _MBIND.get(platform.machine())
    if number is None or not buffer or not 0 <= node < _NODES:
        return False
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    start = address // _HUGE_PAGE * _HUGE_PAGE  # whole huge pages: the mapping has all of the first and the last
    nbytes = -(-(address + len(buffer)) // _HUGE_PAGE) * _HUGE_PAGE - start
    nodes = (ctypes.c_uint64 * (_NODES // 64))()
    nodes[node // 64] = 1 << node % 64
    arguments = (start, nbytes, _MPOL_PREFERRED, ctypes.addressof(nodes), _NODES + 1, 0)
    return bool(ctypes.CDLL(None).syscall(*map(ctypes.c_long, (number, *arguments))) == 0)


def huge_page_share(buffer: memoryview) -> float:
    """The share of `buffer`, memory of `aligned_empty` that was written to, that lies on 2 MiB pages: 0 to 1."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    huge, inside = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            if span := _SPAN.match(line):
                # The mapping begins within a huge page before the buffer, and ends within one behind it.
                inside = int(span[1], 16) < start + len(buffer) and int(span[2], 16) > start
            elif inside and line.startswith("AnonHugePages:"):
                huge += int(line.split()[1]) << 10
    return min(huge / max(len(buffer), 1), 1.0)


def resident_bytes(address: int, nbytes: int) -> int:
    """How many of the bytes from `address` on, mapped by this process, are in RAM, in whole pages. See mincore(2)."""
    start = address // PAGE * PAGE
    pages = -(-(address + nbytes - start) // PAGE) if nbytes else 0
    found = ctypes.create_string_buffer(max(pages, 1))
    libc = ctypes.CDLL(None, use_errno=True)
    if pages and libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * PAGE), found):
        raise OSError(ctypes.get_errno(), "mincore")
    return found.raw[:pages].count(1) * PAGE


_SPAN = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")
_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def _disown() -> None:
    """In a forked child nothing is mapped there, until the child's own memory is: never unmap that."""
    for mapping in list(_mappings):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))
    _mappings.clear()


os.register_at_fork(after_in_child=_disown)
