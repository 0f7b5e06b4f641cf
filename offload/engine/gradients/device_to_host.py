"""Gradients on their way from a device that computes beside the host: one thread receives them.

    backward's thread   send ─► queue            blocks only where more than `most` bytes would be on their way
    receiving thread            queue ─► download ─► its event ─┬► it lies in its target
                                                                └► in a staging buffer, from which it is handed on

So a backward goes on giving work to the device while gradients leave it, are added and, where they spill, written. What
leaves stays in device memory until its copy is done. Copies are on one stream, and are received in the order in which
they were sent.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from offload.swapper.memory.device import Device, Event
from offload.swapper.memory.host_arena import Lease
from offload.swapper.memory.interruptible_lock import Monitor
from offload.timeline import OFF, Row, Timeline, now

Receive = Callable[[int, torch.Tensor], None]
"""Gets a position and values, (n,) on the CPU, valid until it returns."""


class _Sent(NamedTuple):
    title: str
    source: torch.Tensor
    """(n,) on the device."""
    computed: Event
    target: torch.Tensor | None
    """(n,) of the same dtype in HOST; None where it goes through staging buffers."""
    receive: Receive | None


class _Arriving(NamedTuple):
    """A copy that has begun."""

    sent: _Sent
    first: int
    values: torch.Tensor
    """Where it arrives, on the host."""
    staging: Lease | None
    done: Event
    last: bool
    """Whether this is the end of what was sent."""
    began: int


class Downloads:
    """Owns the receiving thread. `send`, `drain` and `fetch` are called by one thread at a time.

    A Ctrl-C may come between any two lines of theirs: what is in the queue by then is received, and nothing else.
    """

    def __init__(
        self,
        device: Device,
        staging: Sequence[Lease],
        most: int,
        sums: bool,
        fail: Callable[[BaseException], None],
        check: Callable[[], None],
        *,
        timeline: Timeline = OFF,
    ) -> None:
        """At most `most` bytes are on their way, or one tensor. `sums` says whether the device can sum squares. An
        error in the thread is told to `fail`; `check` raises from then on."""
        self.device, self.sums = device, sums
        self._timeline = timeline
        self._most, self._fail, self._check = most, fail, check
        self._changed = Monitor()
        self._sent: deque[_Sent] = deque()
        """All that was sent and not received, oldest first; only the receiving thread takes from it."""
        self._ended = self._closing = False
        # What follows is the receiving thread's own.
        self._begun = self._position = 0
        """How many of `_sent` were begun to their end, and how much of the next was."""
        self._free = list(staging)
        self._arriving: deque[_Arriving] = deque()
        self._thread = threading.Thread(target=self._run, name="offload-gradients", daemon=True)
        self._thread.start()

    # -- the thread of the backward, or of the step ---------------------------------------------------

    def send(self, title: str, source: torch.Tensor, target: torch.Tensor | None, receive: Receive | None) -> None:
        """Copy `source`, (n,) on the device, to `target`, or hand it to `receive` piece by piece, on the other thread.

        What computes it must have been started by the calling thread.
        """
        sent = _Sent(title, source, self.device.computed(), target, receive)
        with self._changed.lock:
            while self._sent and not self._ended and self._nbytes + source.nbytes > self._most:
                self._changed.wait()  # nothing is lost: the device has so much to compute yet, or to copy
            if not self._ended:
                self._sent.append(sent)
                self._changed.notify_all()
        if self._ended:
            self._check()

    @property
    def _nbytes(self) -> int:
        return sum(sent.source.nbytes for sent in self._sent)

    def drain(self) -> None:
        """Wait until all that was sent is received."""
        with self._changed.lock:
            self._changed.notify_all()
            while self._sent and not self._ended:
                self._changed.wait()
        if self._ended:
            self._check()

    def fetch(self, values: torch.Tensor) -> torch.Tensor:
        """A copy of `values`, (n,), on the host, behind all that was sent: blocks until the device has made it."""
        found = torch.empty(len(values), dtype=values.dtype, device="cpu")

        def receive(position: int, some: torch.Tensor) -> None:
            found[position : position + len(some)] = some

        self.send("sums of squares", values, None, receive)
        self.drain()
        return found

    def close(self) -> None:
        """Receive what was sent, and join the thread."""
        with self._changed.lock:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    # -- the receiving thread -------------------------------------------------------------------------

    def _run(self) -> None:
        self.device.enter_thread()
        try:
            while self._work():
                pass
        except BaseException as error:  # copies may be under way: what they read and write is kept
            self._fail(error)
        with self._changed.lock:
            self._ended = True
            self._changed.notify_all()

    def _work(self) -> bool:
        """Begin what has room, then receive the oldest; False when the thread shall end."""
        while self._begin():
            pass
        if self._arriving:
            self._receive(self._arriving[0])
            return True
        with self._changed.lock:
            if not self._sent and not self._closing:
                self._changed.wait()
            return bool(self._sent) or not self._closing

    def _begin(self) -> bool:
        """Start the next copy; whether there was one, and room for it."""
        if self._begun == len(self._sent):
            return False
        sent = self._sent[self._begun]
        if sent.target is not None:
            self._start(sent, len(sent.source), sent.target, None)
        elif self._free:
            lease = self._free[-1]
            room = lease.tensor(torch.uint8)
            numel = min(len(sent.source) - self._position, len(room) // sent.source.itemsize)
            self._start(sent, numel, room[: numel * sent.source.itemsize].view(sent.source.dtype), lease)
            self._free.pop()
        else:
            return False
        return True

    def _start(self, sent: _Sent, numel: int, values: torch.Tensor, staging: Lease | None) -> None:
        first, began = self._position, now()
        part = sent.source[first : first + numel]
        done = self.device.download(values.view(torch.uint8), part.view(torch.uint8), (sent.computed,))
        last = first + numel == len(sent.source)
        self._arriving.append(_Arriving(sent, first, values, staging, done, last, began))
        self._position = 0 if last else first + numel
        self._begun += last

    def _receive(self, arriving: _Arriving) -> None:
        """Wait for the oldest copy, and hand it on. This thread alone is blocked."""
        arriving.done.wait()
        sent = arriving.sent
        if sent.receive is not None:
            sent.receive(arriving.first, arriving.values)
        if arriving.staging is not None:
            self._free.append(arriving.staging)
        self._arriving.popleft()
        self._timeline.add(Row.DOWNLOADS, sent.title, arriving.began, now(), arriving.values.nbytes)
        if arriving.last:
            self._begun -= 1
            with self._changed.lock:
                self._sent.popleft()
                self._changed.notify_all()
