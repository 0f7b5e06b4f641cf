"""Gradients in flight from a device that computes beside the host, received by one thread.

    backward's thread   collect ─► small gradients of a unit are joined ─► send
                        send ─► queue            waits only while more than `most` bytes would be in flight
    receiving thread            queue ─► download ─► its event ─┬► the copy is in its target
                                                                └► in a staging buffer, from which it is passed on

So a backward keeps the device busy while gradients are copied from it, added and, if they spill, written. The source of
a copy stays in device memory until the copy is done. All copies are on one stream, and are received in the order in
which they were sent.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch

from offload.engine.gradients.small_gradients import Group, Piece, Place, Receive, SmallGradients, copy_of, group
from offload.swapper.memory.device import Device, Event
from offload.swapper.memory.host_arena import HostBuffer
from offload.swapper.memory.lock import InterruptibleLock
from offload.timeline import OFF, Row, Timeline, now

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
    """Tensors of which `source` was made.

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
        """Starts the receiving thread.

        Args:
            device: the device to copy from.
            staging: host buffers for copies without a target.
            most: most bytes in flight; a single larger tensor is allowed.
            sums: True if the device can sum squares.
            fail: called on the receiving thread with an error that ends it.
            check: called on the sending thread after such an error, and raises it there.
            timeline: records each copy.
        """
        self.device, self.sums = device, sums
        self._timeline = timeline
        self._most, self._fail, self._check = most, fail, check
        self._small = SmallGradients(min((each.nbytes for each in staging), default=0))
        self._changed = InterruptibleLock()
        self._sent: deque[_Sent] = deque()
        """All tensors sent and not yet received, oldest first; only the receiving thread removes any."""
        self._ended = self._closing = False
        # Everything below belongs to the receiving thread, so no lock guards it.
        self._begun = self._position = 0
        """Number of tensors of `_sent` whose copies have all begun; `_position` is the progress in the next one."""
        self._free = list(staging)
        self._arriving: deque[_Arriving] = deque()
        self._thread = threading.Thread(target=self._run, name="offload-gradients", daemon=True)
        self._thread.start()

    # -- the thread of the backward, or of the step ---------------------------------------------------

    def send(self, title: str, source: torch.Tensor, target: torch.Tensor | None, receive: Receive | None) -> None:
        """Copies `source` to `target`, or passes it to `receive` chunk by chunk, on the receiving thread.

        Args:
            title: name of the copy on the timeline.
            source: (n,) on the device, computed by work that the calling thread has started.
            target: (n,) of the same dtype on the host, or None.
            receive: called for each chunk on arrival, or None.
        """
        # The event is recorded on the caller's compute stream, before the receiving thread can start the copy.
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

        Args:
            title: name of the copy on the timeline, the same for all gradients of a unit.
            place: the position of the gradient `source`; None for one that is always sent alone.
            source: see `send`; unchanged until it is received.
            target: see `send`.
            receive: see `send`.
        """
        if self._small.must_leave_before(place, source):
            self.flush()
        if place is not None and self._small.accepts(source):
            self._small.add(title, Piece(place, source, self.device.record_event(), target, receive))
        else:
            self.send(title, source, target, receive)

    def flush(self) -> None:
        """Sends the small gradients that were collected, neighbours in host memory as one copy, all others as one."""
        for each in group(self._small.pieces):
            for piece in each.pieces:  # computed on their backward's streams; this stream may be another
                self.device.wait_event(piece.computed)
            try:
                copies = [copy_of(each)]
            # A copy of each gradient by itself needs no memory on the device, and brings the same bytes.
            except torch.OutOfMemoryError:
                copies = [copy_of(Group([piece], [])) for piece in each.pieces]
            for copy in copies:
                joined = tuple(piece.source for piece in copy.pieces) if len(copy.pieces) > 1 else ()
                computed = self.device.record_event()
                self._send(_Sent(self._small.title, copy.source, computed, copy.target, copy.receive, joined))
                # Removed last: if a Ctrl-C ends the wait above, the next call sends the same gradients.
                self._small.remove(copy.pieces)

    def with_memory(self, allocate: Callable[[], _T]) -> _T:
        """Returns the result of `allocate`, which runs again if device memory ran out while gradients are in flight.

        Their memory is torch's again once they are received. An operation of the backward itself cannot be repeated so.

        Args:
            allocate: changes nothing if it raises.
        """
        try:
            return allocate()
        # The error is dropped before the second attempt: its frames refer to what the first one has allocated.
        except torch.OutOfMemoryError:
            if not self._sent and not self._small.pieces:
                raise
        self.drain()
        return allocate()

    def _send(self, sent: _Sent) -> None:
        """Queues a copy, once the bytes in flight leave room for it."""
        with self._changed.lock:
            while self._sent and not self._ended and self._nbytes + sent.source.nbytes > self._most:
                self._changed.wait()  # costs no speed: the device is busy with the bytes in flight
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
            self._changed.notify_all()
            while self._sent and not self._ended:
                self._changed.wait()
        if self._ended:
            self._check()

    def when_received(self, act: Callable[[], None]) -> None:
        """Calls `act` on the receiving thread once everything sent or collected so far has been received."""
        self.flush()
        # Received in the order of sending, as all other copies.
        mark = torch.empty(0, dtype=torch.uint8, device=self.device.torch)
        self.send("mark", mark, None, lambda position, some: act())

    def fetch(self, values: torch.Tensor) -> torch.Tensor:
        """Returns a host copy of `values`, (n,), made after everything sent before. Blocks until the copy is done."""
        found = torch.empty(len(values), dtype=values.dtype, device="cpu")

        def receive(position: int, some: torch.Tensor) -> None:
            found[position : position + len(some)] = some

        self.flush()
        self.send("sums of squares", values, None, receive)
        self.drain()
        return found

    def close(self) -> None:
        """Receives everything sent, and joins the thread. Small gradients that were not flushed are dropped."""
        with self._changed.lock:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    # -- the receiving thread -------------------------------------------------------------------------

    def _run(self) -> None:
        """Runs on the receiving thread until `close` or an error."""
        self.device.enter_thread()
        try:
            while self._work():
                pass
        except BaseException as error:  # copies may be in flight: their memory stays referenced
            self._fail(error)
        with self._changed.lock:
            self._ended = True
            self._changed.notify_all()

    def _work(self) -> bool:
        """Begins every copy for which there is memory, then receives the oldest. Returns False at the thread's end."""
        while self._begin():
            pass
        if self._arriving:
            self._receive()
            return True
        with self._changed.lock:
            if not self._sent and not self._closing:
                self._changed.wait()
            return bool(self._sent) or not self._closing

    def _begin(self) -> bool:
        """Starts the next copy. Returns False if there is none, or no staging buffer is free."""
        # Read without the lock: only this thread removes entries, and one appended meanwhile is found next time.
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
        done = self.device.download(values.view(torch.uint8), part.view(torch.uint8), (sent.computed,))
        last = first + numel == len(sent.source)
        self._arriving.append(_Arriving(sent, first, values, staging, done, last, began))
        self._position = 0 if last else first + numel
        self._begun += last

    def _receive(self) -> None:
        """Waits for the oldest copy, and passes its values on. Only the receiving thread is blocked."""
        arriving = self._arriving[0]
        arriving.done.wait()
        sent = arriving.sent
        if sent.receive is not None:
            sent.receive(arriving.first, arriving.values)
        if arriving.staging is not None:
            self._free.append(arriving.staging)
        self._arriving.popleft()
        if arriving.values.nbytes:  # not the mark of `when_received`
            self._timeline.add(Row.DOWNLOADS, sent.title, arriving.began, now(), arriving.values.nbytes)
        if arriving.last:
            # Removed last: until here `drain` must wait, and `source` must stay referenced, or its memory is reused.
            self._begun -= 1
            # No reference may outlive the notice: whoever waits may return the memory to torch at once.
            del arriving, sent
            with self._changed.lock:
                self._sent.popleft()
                self._changed.notify_all()
