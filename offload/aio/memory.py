"""Host memory that suits O_DIRECT: 2 MiB pages, private to this process."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import re
import weakref

from offload.errors import naming_memory
from offload.sizes import PAGE, format_size

_SYSTEM_PAGE = max(mmap.PAGESIZE, PAGE)
"""Unit of madvise and mincore in bytes: 64 KiB on many aarch64 kernels, which refuse any other address."""
_HUGE_PAGE = 2 << 20
_MBIND = {"x86_64": 237, "aarch64": 235}
"""System call numbers of mbind, which has no wrapper in the C library."""
_MPOL_PREFERRED = 1
_NODES = 1024
"""Largest number of NUMA nodes that a Linux kernel supports: NODES_SHIFT is at most 10."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _OF_BLOCK = -1, -3, 128 << 10
"""Settings of malloc and the value of both with which glibc begins, before frees raise it. See malloc.h."""


def aligned_empty(nbytes: int) -> memoryview:
    """Returns zeroed writable memory that starts at a multiple of 2 MiB and is unmapped with its last view.

    Requests 2 MiB pages: O_DIRECT moves up to 1.6 times as many bytes a second as with 4 KiB pages. A forked
    child does not inherit this memory: otherwise the first write to each page after a fork would copy the page, and no
    budget would count the copy.

    Args:
        nbytes: number of bytes; the mapping is rounded up to 2 MiB pages and has one page more, for the alignment.

    Raises:
        ValueError: `nbytes` is negative.
        BudgetError: the system has no memory, or a limit of the process allows no more.
    """
    if nbytes < 0:
        raise ValueError(f"expected a number of bytes, got {nbytes}")
    room = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
    with naming_memory(format_size(nbytes)):
        mapping = _map(room + _HUGE_PAGE)
    mapping.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages: slower, not wrong
        mapping.madvise(mmap.MADV_HUGEPAGE)
        # The last page, which follows the buffer, has the opposite setting. Otherwise the kernel would merge this
        # mapping with an adjacent one, and `huge_page_share` could not count the huge pages of one mapping.
        mapping.madvise(mmap.MADV_NOHUGEPAGE, room + _HUGE_PAGE - _SYSTEM_PAGE, _SYSTEM_PAGE)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % _HUGE_PAGE
    _mappings.add(mapping)
    return memoryview(mapping)[start : start + nbytes]


def _map(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def release_pages(buffer: memoryview) -> None:
    """Returns the pages that `buffer` covers completely to the system. The pages read as zeros afterwards.

    Args:
        buffer: memory of `aligned_empty`, or a part of it; the caller still owns the memory.
    """
    assert isinstance(buffer.obj, mmap.mmap), "memory of aligned_empty"
    if buffer:
        release_pages_at(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), len(buffer))


def release_pages_at(address: int, nbytes: int) -> None:
    """Returns the pages of a range to the system, like `release_pages`, for a range that is given by its address.

    Args:
        address: first byte, mapped by this process.
        nbytes: length of the range in bytes.

    Raises:
        OSError: madvise fails, for example because the range is not mapped.
    """
    start = -(-address // _SYSTEM_PAGE) * _SYSTEM_PAGE
    stop = (address + nbytes) // _SYSTEM_PAGE * _SYSTEM_PAGE
    libc = ctypes.CDLL(None, use_errno=True)
    if start < stop and libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise")


def release_heap(for_good: bool = False) -> None:
    """Returns freed memory of malloc to the kernel, if the C library can do that. See malloc_trim(3) and mallopt(3).

    Once blocks of up to 32 MiB were freed, such as tensors of a few million elements, glibc takes blocks of this size
    from its heap. Memory that is freed below a block in use stays resident.

    Args:
        for_good: True if from now on every block of 128 KiB or more returns to the kernel when it is freed. The next
            one of its size costs a fault for each page.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):  # only glibc has it
        return
    if for_good:
        for setting in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
            libc.mallopt(setting, _OF_BLOCK)
    libc.malloc_trim(0)


def prefer_node(buffer: memoryview, node: int) -> bool:
    """Makes a NUMA node the preferred source of the pages of `buffer`. See mbind(2).

    Pages that were written before stay on their nodes.

    Args:
        buffer: memory of `aligned_empty`, or a part of it.
        node: number of the NUMA node, which serves pages as long as it has free ones.

    Returns:
        True if the kernel accepts the preference. False, without effect, if the node does not exist, `buffer` is empty,
        this process may not choose (as in many containers), or mbind's number is unknown for this machine.
    """
    number = _MBIND.get(platform.machine())
    if number is None or not buffer or not 0 <= node < _NODES:
        return False
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    start = address // _HUGE_PAGE * _HUGE_PAGE  # rounded to huge pages, which the mapping contains
    nbytes = -(-(address + len(buffer)) // _HUGE_PAGE) * _HUGE_PAGE - start
    nodes = (ctypes.c_uint64 * (_NODES // 64))()
    nodes[node // 64] = 1 << node % 64
    # The kernel reads one bit less than mbind's `maxnode`, hence `_NODES + 1`.
    arguments = (start, nbytes, _MPOL_PREFERRED, ctypes.addressof(nodes), _NODES + 1, 0)
    return bool(ctypes.CDLL(None).syscall(*map(ctypes.c_long, (number, *arguments))) == 0)


def huge_page_share(buffer: memoryview) -> float:
    """Returns the fraction of `buffer`, 0 to 1, that is stored on 2 MiB pages.

    Args:
        buffer: memory of `aligned_empty` that was written to; untouched pages count as 4 KiB pages.
    """
    start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    huge, inside = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            if span := _SPAN.match(line):
                # A mapping that overlaps the buffer contains no other buffer: `aligned_empty` keeps the kernel from
                # merging neighbours. Its pages outside of the buffer are not written.
                inside = int(span[1], 16) < start + len(buffer) and int(span[2], 16) > start
            elif inside and line.startswith("AnonHugePages:"):
                huge += int(line.split()[1]) << 10
    return min(huge / max(len(buffer), 1), 1.0)


def resident_bytes(address: int, nbytes: int) -> int:
    """Returns how many bytes of a mapped range are in RAM, counted in whole pages. See mincore(2).

    Args:
        address: first byte, mapped by this process.
        nbytes: length of the range in bytes.

    Raises:
        OSError: mincore fails, for example because the range is not mapped.
    """
    start = address // _SYSTEM_PAGE * _SYSTEM_PAGE
    pages = -(-(address + nbytes - start) // _SYSTEM_PAGE) if nbytes else 0
    residency = ctypes.create_string_buffer(max(pages, 1))
    libc = ctypes.CDLL(None, use_errno=True)
    if pages and libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * _SYSTEM_PAGE), residency):
        raise OSError(ctypes.get_errno(), "mincore")
    return residency.raw[:pages].count(1) * _SYSTEM_PAGE


_SPAN = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")
_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def _disown() -> None:
    """Keeps the parent's mapping objects alive in a forked child, so that they never unmap anything.

    MADV_DONTFORK leaves these addresses unmapped in the child, so the child may have mapped other memory there.
    """
    for mapping in list(_mappings):
        # A reference that is never released: the object's finalizer, which would unmap, cannot run.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))
    _mappings.clear()


os.register_at_fork(after_in_child=_disown)
