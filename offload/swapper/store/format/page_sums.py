"""Checksums of one slot's bytes in memory, page by page, so that every read of any bytes can be compared.

The blob of a commit contains a few checksums of a slot, one for each range that an update has written. A read of other
bytes could not be compared with them. In memory a slot therefore has a CRC-32C for each page of 4096 bytes: the native
queue computes those of a request beside that of the whole, at no cost of its own.

    pages     the usual case: a read of whole pages is compared by one comparison of memory
    parts     of a page that two writes share, a checksum for each; a read that cuts a part splits it first
    ranges    of a slot that an earlier process wrote, until their bytes are read whole for the first time
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from offload.aio import crc32c, crc32c_joined, crc32c_of_zeros
from offload.sizes import PAGE
from offload.swapper.store.format.checksums import ChecksumRange

_SUM_NBYTES = 4
_BYTE_ORDER = sys.byteorder


class _Part(NamedTuple):
    """Bytes [start, stop) of a slot, all in one page, and their CRC-32C."""

    start: int
    stop: int
    crc: int


class PageSums:
    """The checksums of all bytes of one slot. Whoever replaces the slot makes another object.

    Any thread may call any method.
    """

    def __init__(self, nbytes: int, ranges: Iterable[ChecksumRange] = ()) -> None:
        """Creates the checksums of zeros, but for `ranges`.

        Args:
            nbytes: number of bytes of the slot.
            ranges: ranges of which only the checksum of the whole is known.
        """
        self.nbytes = nbytes
        self._sums = bytearray(_packed(crc32c_of_zeros(PAGE)) * (nbytes // PAGE))
        if nbytes % PAGE:
            self._sums += _packed(crc32c_of_zeros(nbytes % PAGE))
        self._parts: dict[int, list[_Part]] = {}
        """The parts of pages that are not written as a whole, in order, by the number of the page."""
        self._ranges = list(ranges)
        self._lock = threading.Lock()

    def renewed(self, writes: Sequence[tuple[int, int, bytes]]) -> PageSums:
        """Returns the checksums after the slot was written from byte 0 on. Bytes behind the last write keep theirs.

        Args:
            writes: start, number of bytes and checksums of the pages of each write, in order, without gaps.
        """
        new = PageSums(0)
        new.nbytes, end = self.nbytes, sum(writes[-1][:2])
        with self._lock:
            new._sums = bytearray(self._sums)
            new._parts = {page: parts for page, parts in self._parts.items() if page * PAGE >= end}
            new._ranges = [each for each in self._ranges if each.start >= end]
        for start, nbytes, _ in writes:
            # Of the bytes before, nothing is left in a page that several writes share.
            for border in (start, start + nbytes):
                if border % PAGE:
                    new._parts[border // PAGE] = []
        for write in writes:
            new.record(*write)
        return new

    def record(self, start: int, nbytes: int, sums: bytes) -> None:
        """Enters the checksums of bytes that were written, or proven right.

        Args:
            start: first byte.
            nbytes: number of bytes.
            sums: the checksum of the bytes in each page, as `Future.page_crcs` returns them.
        """
        stop, first = start + nbytes, start // PAGE
        whole = self._whole_pages(start, stop)
        with self._lock:
            self._sums[_at(whole.start) : _at(whole.stop)] = sums[_at(whole.start - first) : _at(whole.stop - first)]
            if self._parts:
                for page in [page for page in self._parts if page in whole]:
                    del self._parts[page]
            for begin, end in self._cut_pages(start, stop):
                page = begin // PAGE
                self._put(page, _Part(begin, end, _unpacked(sums, page - first)))

    def mark_proven(self, ranges: Iterable[ChecksumRange]) -> None:
        """Removes ranges all of whose bytes were recorded from those that `unproven` returns."""
        proven = set(ranges)
        with self._lock:
            self._ranges = [each for each in self._ranges if each not in proven]

    def unproven(self, start: int, nbytes: int) -> list[ChecksumRange]:
        """Returns the ranges with bytes in [start, start + nbytes) of whose pages no checksums are known yet."""
        if not self._ranges:
            return []
        with self._lock:
            return [each for each in self._ranges if each.start < start + nbytes and start < each.start + each.nbytes]

    def pages_to_read(self, start: int, nbytes: int) -> list[range]:
        """Returns the bytes of pages that a comparison of [start, start + nbytes) needs as a whole."""
        with self._lock:
            cut = [each for each in self._cut_pages(start, start + nbytes) if self._joined(*each) is None]
        return [self._page(page) for page in sorted({begin // PAGE for begin, _ in cut})]

    def first_damage(self, start: int, nbytes: int, sums: bytes, pages: Mapping[int, memoryview]) -> range | None:
        """Compares bytes that were read, none of which is in an unproven range; returns the first damaged page.

        Args:
            start: first byte.
            nbytes: number of bytes.
            sums: the checksum of the bytes in each page.
            pages: the bytes of `pages_to_read`, by the number of the page.
        """
        stop, first = start + nbytes, start // PAGE
        whole = self._whole_pages(start, stop)
        with self._lock:
            cut = self._cut_pages(start, stop)
            for begin, end in cut:
                if begin == start and not self._fits(begin, end, _unpacked(sums, begin // PAGE - first), pages):
                    return self._page(begin // PAGE)  # its other bytes may be those that are damaged
            right = self._sums[_at(whole.start) : _at(whole.stop)]
            found = sums[_at(whole.start - first) : _at(whole.stop - first)]
            if right != found:
                page = next(n for n in range(len(whole)) if right[_at(n) : _at(n + 1)] != found[_at(n) : _at(n + 1)])
                return self._page(whole[page])
            for begin, end in cut:
                if begin != start and not self._fits(begin, end, _unpacked(sums, begin // PAGE - first), pages):
                    return self._page(begin // PAGE)  # its other bytes may be those that are damaged
        return None

    # -- pages and parts; the caller of all that follows holds the lock where it reads or changes parts --------------

    def _page(self, page: int) -> range:
        return range(page * PAGE, min((page + 1) * PAGE, self.nbytes))

    def _whole_pages(self, start: int, stop: int) -> range:
        """Returns the pages all of whose bytes are in [start, stop)."""
        last = -(-stop // PAGE) if stop == self.nbytes else stop // PAGE
        return range(-(-start // PAGE), max(last, -(-start // PAGE)))

    def _cut_pages(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Returns the bytes of [start, stop) in pages that it does not contain as a whole: none, one or two ranges."""
        whole = self._whole_pages(start, stop)
        if not whole and start < stop and start // PAGE == (stop - 1) // PAGE:
            return [(start, stop)]
        cut = [(start, whole.start * PAGE), (max(whole.stop * PAGE, start), stop)]
        return [(begin, end) for begin, end in cut if begin < end]

    def _parts_of(self, page: int) -> list[_Part]:
        parts = self._parts.get(page)
        if parts is not None:
            return parts
        of = self._page(page)
        return [_Part(of.start, of.stop, _unpacked(self._sums, page))]

    def _put(self, page: int, new: _Part) -> None:
        """Enters a part. What is left of parts that it overwrites is known only if it is zeros."""
        parts = [new]
        for old in self._parts_of(page):
            for begin, end in ((old.start, min(old.stop, new.start)), (max(old.start, new.stop), old.stop)):
                if begin < end and (begin, end) == (old.start, old.stop):
                    parts.append(old)
                elif begin < end and old.crc == crc32c_of_zeros(old.stop - old.start):
                    parts.append(_Part(begin, end, crc32c_of_zeros(end - begin)))
        self._parts[page] = sorted(parts)
        of = self._page(page)
        # None: some bytes of the page are unknown, and a read of them fails.
        crc = self._joined(of.start, of.stop)
        self._sums[_at(page) : _at(page + 1)] = _packed(0 if crc is None else crc)

    def _joined(self, start: int, stop: int) -> int | None:
        """Returns the CRC-32C of bytes of one page; None if they do not begin and end where parts do."""
        crc, at = 0, start
        for part in self._parts_of(start // PAGE):
            if part.start == at and part.stop <= stop:
                crc, at = crc32c_joined(crc, part.crc, part.stop - part.start), part.stop
        return crc if at == stop else None

    def _fits(self, start: int, stop: int, crc: int, pages: Mapping[int, memoryview]) -> bool:
        """Returns True if `crc` is that of bytes of one page, whose parts are split at both ends if necessary."""
        expected = self._joined(start, stop)
        page = start // PAGE
        if expected is None and page in pages:
            memory, split = pages[page], list[_Part]()
            for part in self._parts_of(page):
                cuts = {each for each in (start, stop) if part.start < each < part.stop}
                borders = sorted({part.start, part.stop, *cuts})
                if cuts:
                    if crc32c(memory[part.start % PAGE : part.start % PAGE + part.stop - part.start]) != part.crc:
                        return False
                    for begin, end in itertools.pairwise(borders):
                        some = memory[begin % PAGE : begin % PAGE + end - begin]
                        split.append(_Part(begin, end, crc32c(some)))
                else:
                    split.append(part)
            # The checksum of the page stays.
            self._parts[page] = split
            expected = self._joined(start, stop)
        return expected == crc


def _at(page: int) -> int:
    return page * _SUM_NBYTES


def _packed(crc: int) -> bytes:
    return crc.to_bytes(_SUM_NBYTES, _BYTE_ORDER)


def _unpacked(sums: bytes | bytearray, page: int) -> int:
    return int.from_bytes(sums[_at(page) : _at(page + 1)], _BYTE_ORDER)
