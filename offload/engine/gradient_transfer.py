"""Gradients in flight from a device that computes in parallel with the host. One thread receives them.

    backward's thread   collect ─► small gradients of a unit are joined ─► send
                        send ─► queue            waits only while more than `most` bytes would be in flight
    receiving thread            queue ─► download ─► its event ─┬► the copy is in its target
                                                                └► in a staging buffer, from which it is passed on

So a backward keeps the device busy while gradients are copied from it, added and, if they spill, written. The source of
a copy stays in device memory until the copy is done. All copies are on one stream, and the thread receives them in the
order of their sending.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeVar

import torch

from offload.aio.protocols import Future, wait_for_all
from offload.layout.flat_layout import ALIGNMENT
from offload.sizes import KIB, MIB, PAGE, align_up
from offload.swapper.memory.device import Device, Event
from offload.swapper.memory.host_arena import HostBuffer
from offload.swapper.memory.lock import InterruptibleLock
from offload.swapper.store.spill_file import SpillFile
from offload.threads import Thread
from offload.timeline import OFF, Row, Timeline, now

# -- small gradients -----------------------------------------------------------------------------------
#
# Gradients of one unit, joined on the device and copied to the host as one.
#
#     neighbours in host memory  ─► joined with the padding between them ─► one copy, straight to their places
#     all others                 ─► joined ─► one copy to a staging buffer ─► split on the host
#
# Every copy costs the host about the same time, whatever its size: for two events, for a wake-up of the receiving
# thread, and for turns of Python's lock, for which the launching thread waits. On the bus, a gradient of a norm or a
# bias takes a microsecond.
#
# A gradient of 8 MiB or more leaves alone, and at most 16 MiB are joined, or a staging buffer where that is smaller: to
# join a whole unit of any size would not pay. The device reads and writes each joined byte once more, 8 MiB in 17 us at
# 1 TB/s, and holds it twice. A copy of its own costs 10 to 20 us of Python, as measured without a GPU, and some five
# calls of CUDA. For a block of Llama-2-13B, 605 MiB of gradients in bf16, one copy in place of eight would take 1.3 ms
# and 605 MiB more.


SMALL = 8 * MIB
"""Bytes below which a gradient is joined with others."""
JOINED = 16 * MIB
"""Bytes of gradients that are joined at most."""
THROUGH_STAGING = 256 * KIB
"""Bytes below which neighbours in host memory are joined with others instead of being copied straight to their places.

The host then copies them once more, from the staging buffer: 256 KiB in about 25 us at 10 GB/s, which is what a copy of
their own costs.
"""

Place = tuple[int, int, int]
"""Unit, segment, and first element within the segment."""

Receive = Callable[[int, torch.Tensor], None]
"""Callback that receives a position and values, (n,) on the CPU, which are valid until it returns."""


class Piece(NamedTuple):
    """One gradient that waits for others."""

    place: Place
    source: torch.Tensor
    """(n,) on the device."""
    computed: Event
    """Recorded after the compute that produces `source`, on its stream."""
    target: torch.Tensor | None
    """(n,) of the same dtype in HOST, or None."""
    receive: Receive | None


class Group(NamedTuple):
    """Gradients of a unit that leave as one copy."""

    pieces: Sequence[Piece]
    gaps: Sequence[int] | None
    """Bytes of padding before each piece but the first, if all are neighbours in host memory; otherwise None."""


class SmallGradients:
    """The gradients of one unit that wait to be joined. Belongs to the thread that sends."""

    def __init__(self, most: int) -> None:
        """Begins empty. A staging buffer has room for `most` bytes, so that no gradient is cut."""
        self._most = min(most, JOINED)
        self.title = ""
        self.pieces: list[Piece] = []

    def accepts(self, source: torch.Tensor) -> bool:
        """Returns True if `source` is small."""
        return source.nbytes < SMALL and source.nbytes <= self._most

    def must_leave_before(self, place: Place | None, source: torch.Tensor) -> bool:
        """Returns True if the gradients in `pieces` must be sent before `source` is sent or added to them.

        So gradients of one place are received in order, and the small ones of a unit before any of the next unit.
        """
        if not self.pieces:
            return False
        if place is None or self.pieces[0].place[0] != place[0] or any(piece.place == place for piece in self.pieces):
            return True
        return self.accepts(source) and self.nbytes + source.nbytes > self._most

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients in `pieces`."""
        return sum(piece.source.nbytes for piece in self.pieces)

    def add(self, title: str, piece: Piece) -> None:
        """Adds a gradient that is small, of the same unit and of another place than all others."""
        self.title = title
        self.pieces.append(piece)

    def remove(self, sent: Sequence[Piece]) -> None:
        """Removes gradients that were sent."""
        places = {piece.place for piece in sent}
        self.pieces = [piece for piece in self.pieces if piece.place not in places]


def group(pieces: Sequence[Piece]) -> list[Group]:
    """Returns the pieces, grouped by their copy: neighbours in host memory, then all others together."""
    # The thread that launches the backward runs this for each unit, so each pair of neighbours is looked at once.
    runs: list[tuple[list[Piece], list[int]]] = []
    # A gradient that is added, or whose squares the host sums, is split on the host, where its callback receives it.
    straight = [piece for piece in pieces if piece.target is not None and piece.receive is None]
    for piece in sorted(straight, key=_address):
        gap = _gap(runs[-1][0][-1], piece) if runs else None
        if gap is None:
            runs.append(([piece], []))
        else:
            runs[-1][0].append(piece)
            runs[-1][1].append(gap)
    if len(runs) == 1 and len(straight) == len(pieces):
        return [Group(*runs[0])]
    # Short runs between parameters without a gradient would each be a copy again: they join the others.
    groups = [Group(*run) for run in runs if sum(piece.source.nbytes for piece in run[0]) >= THROUGH_STAGING]
    leaving = {piece.place for run in groups for piece in run.pieces}
    singles = [piece for piece in pieces if piece.place not in leaving]
    return [*groups, Group(singles, None)] if singles else groups


def copy_of(group: Group) -> tuple[torch.Tensor, torch.Tensor | None, Receive | None]:
    """Returns source, target and callback of the copy of one group, whose pieces the current stream may read."""
    pieces = group.pieces
    if len(pieces) == 1:
        return pieces[0].source, pieces[0].target, pieces[0].receive
    if group.gaps is not None:
        return *_side_by_side(pieces, group.gaps), None
    source, receive = join(pieces)
    return source, None, receive


def _address(piece: Piece) -> int:
    assert piece.target is not None
    return piece.target.data_ptr()


def _gap(left: Piece, right: Piece) -> int | None:
    """Returns the bytes of padding between two places in host memory; None if they are no neighbours.

    A parameter of one element takes `ALIGNMENT` elements, so a smaller gap contains none.
    """
    assert left.target is not None and right.target is not None
    # Two allocations may be next to each other by chance, and no tensor can span both.
    if left.target.untyped_storage().data_ptr() != right.target.untyped_storage().data_ptr():
        return None
    gap = right.target.data_ptr() - left.target.data_ptr() - left.target.nbytes
    alike = left.target.dtype == right.target.dtype
    return gap if alike and 0 <= gap < ALIGNMENT * left.target.itemsize else None


def _side_by_side(pieces: Sequence[Piece], gaps: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the bytes of neighbours with the padding between them, on their device, and their places in one."""
    first, parts = pieces[0], [pieces[0].source.view(torch.uint8)]
    assert first.target is not None
    for piece, gap in zip(pieces[1:], gaps, strict=True):
        if gap:
            # Zeros, as the padding was at the start: nobody reads it, and no run's files shall depend on it.
            parts.append(torch.zeros(gap, dtype=torch.uint8, device=piece.source.device))
        parts.append(piece.source.view(torch.uint8))
    source = torch.cat(parts)
    return source, first.target.view(torch.uint8).as_strided((source.nbytes,), (1,))


def join(pieces: Sequence[Piece]) -> tuple[torch.Tensor, Receive]:
    """Returns the bytes of `pieces` as one tensor on their device, and the callback that splits it on the host.

    The current stream must be allowed to read the pieces.
    """
    # In the order of descending item sizes, each gradient is aligned to its item size.
    pieces = sorted(pieces, key=lambda piece: -piece.source.itemsize)
    joined = torch.cat([piece.source.view(torch.uint8) for piece in pieces])
    # The callback must not keep the sources: the sender decides how long their memory is needed.
    shares = [(piece.source.nbytes, piece.source.dtype, piece.target, piece.receive) for piece in pieces]

    def receive(position: int, values: torch.Tensor) -> None:
        assert position == 0 and len(values) == sum(nbytes for nbytes, *_ in shares), "joined gradients are not cut"
        start = 0
        for nbytes, dtype, target, passed_on in shares:
            part = values[start : start + nbytes].view(dtype)
            start += nbytes
            if target is not None:
                # receiving thread: `copy_` would start a team of threads for it, in addition to the kernels' team.
                ctypes.memmove(target.data_ptr(), part.data_ptr(), nbytes)
            if passed_on is not None:
                passed_on(0, part)

    return joined, receive


# -- device to host ------------------------------------------------------------------------------------


_T = TypeVar("_T")


class _Sent(NamedTuple):
    """One tensor to copy, queued by `send`."""

    title: str
    source: torch.Tensor
    """(n,) on the device."""
    computed: Event
    """Recorded after the compute that produces `source`; the copy's stream waits for this event."""
    target: torch.Tensor | None
    """(n,) of the same dtype in HOST; None for a copy through staging buffers."""
    receive: Receive | None
    joined: tuple[torch.Tensor, ...] = ()
    """Tensors that `source` was made of.

    Referenced until the copy is done: if they were allocated on another stream than the one that joins them, torch
    could reuse their memory before the join has read it.
    """


class _Arriving(NamedTuple):
    """A copy that has begun."""

    sent: _Sent
    first: int
    values: torch.Tensor
    """Destination of the copy, on the host."""
    staging: HostBuffer | None
    done: Event
    last: bool
    """True if this copy is the end of its source."""
    began: int


class DeviceToHost:
    """Owner of the receiving thread. All public methods are called by one other thread at a time.

    The callers are `uninterrupted`: a Ctrl-C ends a wait, and tensors that were sent by then are received.
    """

    copies = True
    """False if the host can address the gradients of a backward, so that nothing is copied."""

    def __init__(
        self,
        device: Device,
        staging: Sequence[HostBuffer],
        most: int,
        sums: bool,
        fail: Callable[[BaseException], None],
        check: Callable[[], None],
        *,
        timeline: Timeline = OFF,
    ) -> None:
        """Starts the receiving thread, which passes an error that ends it to `fail`; `check` raises it for a sender.

        `staging` serves copies without a target. `most` bytes are in flight; a single larger tensor is allowed. `sums`
        is True if the device can sum squares.
        """
        self.device, self.sums = device, sums
        self._timeline = timeline
        self._most, self._fail, self._check = most, fail, check
        self._small = SmallGradients(min((buffer.nbytes for buffer in staging), default=0))
        self._changed = InterruptibleLock()
        self._sent: deque[_Sent] = deque()
        """All tensors sent and not yet received, oldest first; only the receiving thread removes any."""
        self._ended = self._closing = False
        # Everything below belongs to the receiving thread, so no lock guards it.
        self._begun = self._position = 0
        """Number of tensors of `_sent` whose copies have all begun; `_position` is the progress in the next one."""
        self._free = list(staging)
        self._arriving: deque[_Arriving] = deque()
        self._thread = Thread(target=self._run, name="offload-gradients", daemon=True)
        self._thread.start()

    # -- the thread of the backward, or of the step ---------------------------------------------------

    def send(self, title: str, source: torch.Tensor, target: torch.Tensor | None, receive: Receive | None) -> None:
        """Copies `source` to `target`, or passes it to `receive` chunk by chunk, on the receiving thread.

        Work that the calling thread has started computes `source`, (n,) on the device; `target` has its dtype.
        """
        # compute stream: the caller records the event here, before the receiving thread can start the copy.
        self._send(_Sent(title, source, self.device.record_event(), target, receive))

    def collect(
        self,
        title: str,
        place: Place | None,
        source: torch.Tensor,
        target: torch.Tensor | None,
        receive: Receive | None,
    ) -> None:
        """Copies `source` as `send` does, but a small one later, together with other small gradients of its unit.

        `source` is unchanged until it is received. A gradient without a `place` is always sent alone.
        """
        if self._small.must_leave_before(place, source):
            self.flush()
        if place is not None and self._small.accepts(source):
            # compute stream: the event marks the end of the gradient's compute. `flush` may join it on another stream.
            self._small.add(title, Piece(place, source, self.device.record_event(), target, receive))
        else:
            self.send(title, source, target, receive)

    def flush(self) -> None:
        """Sends the small gradients that were collected, neighbours in host memory as one copy, all others as one."""
        for batch in group(self._small.pieces):
            # compute stream: the backward may have computed the pieces on other streams, so this stream waits for them
            # before it joins them. On a GPU the host thread continues.
            for piece in batch.pieces:
                self.device.wait_event(piece.computed)
            try:
                copies = [(batch, copy_of(batch))]
            # A copy of each gradient by itself needs no memory on the device, and brings the same bytes.
            except torch.OutOfMemoryError:
                singles = [Group([piece], []) for piece in batch.pieces]
                copies = [(single, copy_of(single)) for single in singles]
            for sent, (source, target, receive) in copies:
                joined = tuple(piece.source for piece in sent.pieces) if len(sent.pieces) > 1 else ()
                # compute stream: the download stream waits for this event, and so reads the bytes after the join.
                computed = self.device.record_event()
                self._send(_Sent(self._small.title, source, computed, target, receive, joined))
                # Removed last: if a Ctrl-C ends the wait above, the next call sends the same gradients.
                self._small.remove(sent.pieces)

    def with_memory(self, allocate: Callable[[], _T]) -> _T:
        """Returns the result of `allocate`, which runs again if device memory ran out while gradients are in flight.

        Their memory is torch's again once they are received. `allocate` changes nothing if it raises; an operation of
        the backward itself cannot be repeated so.
        """
        try:
            return allocate()
        # The error is dropped before the second attempt: its frames refer to what the first one has allocated.
        except torch.OutOfMemoryError:
            if not self._sent and not self._small.pieces:
                raise
        # calling thread: waits until the receiving thread has removed every entry, and with it the reference to the
        # source. torch may then reuse the memory.
        self.drain()
        return allocate()

    def _send(self, sent: _Sent) -> None:
        with self._changed.lock:
            while self._sent and not self._ended and self._nbytes + sent.source.nbytes > self._most:
                # calling thread: the wait ends. The receiving thread removes entries as copies end, and sets `_ended`
                # if an error stops it. The wait costs no speed: the device is busy with the bytes in flight.
                self._changed.wait()
            if not self._ended:
                self._sent.append(sent)
                self._changed.notify_all()
        if self._ended:
            self._check()

    @property
    def _nbytes(self) -> int:
        return sum(sent.source.nbytes for sent in self._sent)

    def drain(self) -> None:
        """Waits until everything sent or collected has been received."""
        self.flush()
        with self._changed.lock:
            # calling thread: the wait ends, as in `_send`, which has woken the receiving thread for each copy. That
            # thread needs nothing of this one.
            while self._sent and not self._ended:
                self._changed.wait()
        if self._ended:
            self._check()

    def when_received(self, act: Callable[[], None]) -> None:
        """Calls `act` on the receiving thread once everything sent or collected so far has been received."""
        self.flush()
        # receiving thread: receives in the order of sending, so the mark comes after everything sent before.
        mark = torch.empty(0, dtype=torch.uint8, device=self.device.torch)
        self.send("mark", mark, None, lambda position, some: act())

    def fetch(self, values: torch.Tensor) -> torch.Tensor:
        """Returns a host copy of `values`, (n,), made after everything sent before. Blocks until the copy is done."""
        copy = torch.empty(len(values), dtype=values.dtype, device="cpu")

        def receive(position: int, some: torch.Tensor) -> None:
            copy[position : position + len(some)] = some

        # receiving thread: it alone writes `copy`, and has written all of it once `drain` returns.
        self.flush()
        self.send("sums of squares", values, None, receive)
        self.drain()
        return copy

    def close(self) -> None:
        """Receives everything sent, and joins the thread. Small gradients that were not flushed are dropped."""
        with self._changed.lock:
            self._closing = True
            self._changed.notify_all()
        # calling thread: the join ends. The receiving thread waits for device and drives alone, until `_sent` is empty.
        self._thread.join()

    # -- the receiving thread -------------------------------------------------------------------------

    def _run(self) -> None:
        """Runs on the receiving thread until `close` or an error."""
        try:
            self.device.enter_thread()
            while self._work():
                pass
        except BaseException as error:  # copies may be in flight: their memory stays referenced
            self._fail(error)
        # receiving thread: wakes the threads that wait in `_send` and `drain`, since nobody will remove an entry again.
        with self._changed.lock:
            self._ended = True
            self._changed.notify_all()

    def _work(self) -> bool:
        """Begins every copy that has memory, then receives the oldest. Returns False at the thread's end."""
        while self._begin():
            pass
        if self._arriving:
            self._receive()
            return True
        with self._changed.lock:
            if not self._sent and not self._closing:
                # receiving thread: no copy is in flight. `_send` and `close` notify under this lock, so no notice is
                # lost.
                self._changed.wait()
            return bool(self._sent) or not self._closing

    def _begin(self) -> bool:
        """Starts the next copy. Returns False if there is none, or no staging buffer is free."""
        # receiving thread: reads without the lock, since it alone removes entries, and finds a later one next time.
        if self._begun == len(self._sent):
            return False
        sent = self._sent[self._begun]
        if sent.target is not None:
            self._start(sent, len(sent.source), sent.target, None)
        elif self._free:
            # Removed from the list only once the copy has begun, so that an error does not lose the buffer.
            host_buffer = self._free[-1]
            room = host_buffer.tensor(torch.uint8)
            numel = min(len(sent.source) - self._position, len(room) // sent.source.itemsize)
            self._start(sent, numel, room[: numel * sent.source.itemsize].view(sent.source.dtype), host_buffer)
            self._free.pop()
        else:
            return False
        return True

    def _start(self, sent: _Sent, numel: int, values: torch.Tensor, staging: HostBuffer | None) -> None:
        """Starts the copy of the next `numel` elements on the download stream, after the compute that produces them."""
        first, began = self._position, now()
        part = sent.source[first : first + numel]
        # download stream: waits on the device for the compute that produces `source`; this thread begins the next copy.
        done = self.device.download(values.view(torch.uint8), part.view(torch.uint8), (sent.computed,))
        last = first + numel == len(sent.source)
        self._arriving.append(_Arriving(sent, first, values, staging, done, last, began))
        self._position = 0 if last else first + numel
        self._begun += last

    def _receive(self) -> None:
        """Waits for the oldest copy, and passes its values on. Only the receiving thread is blocked."""
        arriving = self._arriving[0]
        # receiving thread: waits until the download stream has copied the bytes. The backward's thread launches further
        # compute meanwhile.
        arriving.done.wait()
        sent = arriving.sent
        if sent.receive is not None:
            sent.receive(arriving.first, arriving.values)
        if arriving.staging is not None:
            # receiving thread: `receive` has returned, so the next copy may overwrite the staging buffer.
            self._free.append(arriving.staging)
        self._arriving.popleft()
        if arriving.values.nbytes:  # not the mark of `when_received`
            self._timeline.add(Row.DOWNLOADS, sent.title, arriving.began, now(), arriving.values.nbytes)
        if arriving.last:
            # receiving thread: removes the entry last. Until here `drain` must wait, and `source` must stay referenced,
            # or its memory is reused.
            self._begun -= 1
            # No reference may outlive the notice: whoever waits may return the memory to torch at once.
            del arriving, sent
            with self._changed.lock:
                self._sent.popleft()
                self._changed.notify_all()


class NoDownloads(DeviceToHost):
    """The downloads from a device whose memory the host can address: none."""

    copies = sums = False

    def __init__(self) -> None:
        return

    def flush(self) -> None:
        return

    def drain(self) -> None:
        return

    def when_received(self, act: Callable[[], None]) -> None:
        act()

    def close(self) -> None:
        return


# -- disk spill ----------------------------------------------------------------------------------------
#
# Gradients that wait for their update on DISK: a few windows of them are in HOST, the rest is in files.
#
#     added to ─► its window is in HOST ─► another window is needed: written ─► read by the update, into its tile
#                     ▲                                              │
#                     └────────────── added to once more: read ──────┘
#
# A window is a range of one unit's gradient, of one parameter if it is large. A backward fills one after the other, so
# all but the newest are written while the backward runs; only a window that is added to again, by another micro-batch,
# is waited for.


_TOGETHER = 16
"""Fraction of the longest window, 1/16, up to which parameters share one."""


def windows(borders: Sequence[int], starts: Sequence[int], numel: int) -> tuple[range, ...]:
    """Returns ranges of at most `numel` elements that begin and end at some of `borders` and cover all between them.

    Chunks begin at `borders`, parameters at `starts`; both are sorted. Parameters share a window only while it is
    small. Their gradients come in any order, so a large window would be written, read back for the next parameter, and
    written once more.
    """
    # A partition ends with padding, where no chunk begins.
    borders = [*(cut for between in itertools.pairwise(borders) for cut in range(*between, numel)), borders[-1]]
    ranges: list[range] = []
    start = borders[0]
    for before, border in zip(borders, [*borders[1:], None], strict=True):
        shared = bisect_right(starts, before) > bisect_right(starts, start)
        if border is None or border - start > (numel // _TOGETHER if shared else numel):
            if start < before:
                ranges.append(range(start, before))
            start = before
    assert all(len(window) <= numel for window in ranges), "two borders are further apart than a window is long"
    return tuple(ranges)


def _pages_of(changed: Iterable[range], itemsize: int, first: int, nbytes: int) -> list[range]:
    """Returns the bytes of a window in all pages with `changed` elements: disjoint ranges in ascending order.

    The window has `nbytes` from byte `first` of the gradient on.
    """
    pages: list[range] = []
    for elements in sorted(changed, key=lambda some: some.start):
        start = max((first + elements.start * itemsize) // PAGE * PAGE - first, 0)
        stop = min(align_up(first + elements.stop * itemsize) - first, nbytes)
        if pages and start <= pages[-1].stop:
            pages[-1] = range(pages[-1].start, max(pages[-1].stop, stop))
        else:
            pages.append(range(start, stop))
    return pages


class DiskSpill:
    """The gradients of some units, in host buffers and a scratch file.

    Any thread may call `part`, one at a time. The update worker calls `read`, and `forget` after an update. All other
    methods, and `forget` without an update, belong to the thread that calls `step()`. The lock's holder waits only for
    I/O. An error loses a gradient: it is raised in the caller and reported to `fail`.
    """

    def __init__(
        self,
        windows: Mapping[int, Sequence[range]],
        dtype: torch.dtype,
        host_buffers: Sequence[HostBuffer],
        scratch: SpillFile,
        fail: Callable[[BaseException], None],
        timeline: Timeline,
    ) -> None:
        """Takes the memory of `host_buffers`, each as large as the largest window, and owns `scratch` from now on.

        `windows` are those of each unit, in order. `fail` receives an error that loses a gradient.
        """
        self._windows = windows
        self._dtype, self.scratch, self._fail, self._timeline = dtype, scratch, fail, timeline
        self._lock = threading.Lock()
        self._free = list(host_buffers)
        self._here: dict[tuple[int, int], HostBuffer] = {}
        """Windows whose newest bytes are in a host buffer only, by unit and number; oldest first."""
        self._changed: dict[tuple[int, int], list[range]] = {}
        """Windows in a host buffer that the file has as well, except for these elements."""
        self._writing: dict[tuple[int, int], tuple[HostBuffer, list[Future]]] = {}
        """Windows whose writes are in flight; the buffer must not change until its futures are done."""
        self._written: set[tuple[int, int]] = set()

    def __contains__(self, unit: int) -> bool:
        return unit in self._windows

    def part(self, unit: int, start: int, stop: int, changed: Sequence[range] | None = None) -> torch.Tensor:
        """Returns elements [start, stop) of a unit's gradient, all in one window, to be used before the next call.

        The caller changes no elements but `changed`, ranges counted from `start`; None for any. If the file has the
        window, only pages with such elements are written again.
        """
        # The last window that begins at or before `start`.
        number = bisect_right(self._windows[unit], start, key=lambda window: window.start) - 1
        window = self._windows[unit][number]
        assert window.start <= start and stop <= window.stop
        with self._locked():
            host_buffer = self._fetch((unit, number))
            if changed is None:
                self._changed.pop((unit, number), None)
            elif (unit, number) in self._changed:
                at = start - window.start
                self._changed[unit, number] += [range(at + some.start, at + some.stop) for some in changed]
        # any thread: the window stays here without the lock. Only the next call, or `flush`, starts to write it.
        return host_buffer.tensor(torch.uint8)[: len(window) * self._dtype.itemsize].view(self._dtype)[
            start - window.start : stop - window.start
        ]

    def flush(self) -> None:
        """Starts the writes of all windows in HOST, since updates read gradients from the file."""
        with self._locked():
            for key in list(self._here):
                self._write(key)

    def read(self, unit: int, start: int, stop: int, buffer: memoryview) -> Future:
        """Starts to fill `buffer` with elements [start, stop) of a unit's gradient, which must have been flushed."""
        with self._locked():
            # update thread: the file contains a window only after its write has ended. The I/O queue alone ends it.
            for key in [key for key in self._writing if key[0] == unit]:
                self._end_write(key)
        return self.scratch.read(unit, start * self._dtype.itemsize, buffer)

    def forget(self, unit: int) -> None:
        """Drops the gradient of a unit; its buffers may be reused."""
        with self._locked():
            for key in [key for key in self._writing if key[0] == unit]:
                self._end_write(key)
            for key in [key for key in self._here if key[0] == unit]:
                self._free.append(self._here.pop(key))
                self._changed.pop(key, None)
            # So the unit's next gradient does not read back the bytes of this step.
            self._written = {key for key in self._written if key[0] != unit}

    def close(self) -> None:
        """Waits for writes in flight, whose errors no longer matter, and frees the space on the drives."""
        with self._lock:
            wait_for_all(future for _, futures in self._writing.values() for future in futures)
            self.scratch.close()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Takes the lock for a change of windows. An error in the context loses a gradient, and so stops the engine."""
        with self._lock:
            try:
                yield
            except BaseException as error:  # also Ctrl-C: the state of writes in flight is unknown then
                self._fail(error)
                raise

    # -- under the lock -----------------------------------------------------------------------------

    def _fetch(self, key: tuple[int, int]) -> HostBuffer:
        """Returns the host buffer of a window, read back from the file if the window was written before."""
        if key in self._here:
            return self._here[key]
        if key in self._writing:
            host_buffer, futures = self._writing[key]
            with self._waits("write"):
                for future in futures:
                    future.wait()  # a write's buffer may not change before its end
            del self._writing[key]
        else:
            host_buffer = self._take()
            # A window that was never written needs no read: its first gradients are stored, not added.
            if key in self._written:
                with self._waits("read"):
                    self.scratch.read(key[0], self._offset(key), host_buffer.buffer[: self._nbytes(key)]).wait()
        # Start to write all other windows now: the backward does not return to them, so writes overlap the compute.
        for window in list(self._here):
            self._write(window)
        self._here[key] = host_buffer
        if key in self._written:
            self._changed[key] = []
        return host_buffer

    def _take(self) -> HostBuffer:
        """Returns a free host buffer, after the oldest write if necessary."""
        if not self._free:
            # If no write is in flight that would free a buffer, the oldest window is written.
            if not self._writing:
                self._write(next(iter(self._here)))
            with self._waits("write"):
                self._end_write(next(iter(self._writing)))
        return self._free.pop()

    def _write(self, key: tuple[int, int]) -> None:
        host_buffer, first, nbytes = self._here.pop(key), self._offset(key), self._nbytes(key)
        changed = self._changed.pop(key, None)
        parts = [range(nbytes)] if changed is None else _pages_of(changed, self._dtype.itemsize, first, nbytes)
        self._writing[key] = (host_buffer, [])
        for part in parts:
            written = self.scratch.write(key[0], first + part.start, host_buffer.buffer[part.start : part.stop])
            self._writing[key][1].append(written)
        self._written.add(key)

    def _end_write(self, key: tuple[int, int]) -> None:
        host_buffer, futures = self._writing[key]
        for future in futures:
            future.wait()
        del self._writing[key]
        self._free.append(host_buffer)

    def _waits(self, act: str) -> AbstractContextManager[None]:
        return self._timeline.span(Row.WAITS, f"waits for the {act} of gradients")

    def _offset(self, key: tuple[int, int]) -> int:
        return self._windows[key[0]][key[1]].start * self._dtype.itemsize

    def _nbytes(self, key: tuple[int, int]) -> int:
        return len(self._windows[key[0]][key[1]]) * self._dtype.itemsize


class NoSpill(DiskSpill):
    """The spill of a run whose gradients all wait in memory."""

    def __init__(self) -> None:
        self._windows = {}

    def flush(self) -> None:
        return

    def close(self) -> None:
        return
