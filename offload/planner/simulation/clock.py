"""The discrete-event clock of `simulate`, which advances from the end of one work item to the next.

Work     a work item with its seconds at full speed
Server   a drive, a link or a processor: runs one work item at a time, the most urgent first
Clock    all servers and the time; servers of one `group` are the same hardware, so busy ones share its speed
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

_PRIORITY = attrgetter("priority")


class Span(NamedTuple):
    """An interval of the timeline, from `start` to `end` in seconds."""

    row: str
    """Kind of the work: "model", "kernel", "weight read" and so on."""
    unit: int
    start: float
    end: float


class Work:
    """A work item of a server. A smaller `priority` runs first and preempts a larger one."""

    __slots__ = ("done", "left", "priority", "row", "seconds", "start", "unit")

    def __init__(self, row: str, unit: int, seconds: float, priority: int) -> None:
        self.row, self.unit, self.seconds, self.priority = row, unit, seconds, priority
        self.left = seconds
        self.start = math.nan
        # Every actor's condition reads it after each event, so it is an attribute.
        self.done = not seconds


class _Group:
    """Servers that are the same hardware."""

    def __init__(self) -> None:
        self.working = 0
        """Servers that have work."""


class Server:
    """A queue of work items for the same hardware."""

    def __init__(self, group: _Group, beside: float | None) -> None:
        self.group = group
        self._beside = beside
        self.works: list[Work] = []
        """Work items that have not ended; the first one is running."""

    @property
    def speed(self) -> float:
        """Returns the fraction of full speed while as many servers of the group work as do, including this one."""
        if self.group.working == 1:
            return 1.0
        # A drive that reads and writes does not give each half of its bandwidth, so the fraction is given.
        return 1 / self.group.working if self._beside is None else self._beside


class Clock:
    """The simulated time, in seconds from 0, and all servers."""

    def __init__(self) -> None:
        self.now = 0.0
        self._ended: list[tuple[Work, float]] = []
        """Ended work items and their ends, in the order of these."""
        self._servers: list[Server] = []
        self._groups: dict[str, _Group] = {}

    def spans(self, after: float = -math.inf, until: float = math.inf) -> Iterator[Span]:
        """Yields the intervals of work items that ended later than `after`, and not later than `until`."""
        for work, end in self._ended:
            if after < end <= until:
                yield Span(work.row, work.unit, work.start, end)

    def server(self, group: str, beside: float | None = None) -> Server:
        """Returns a new server of `group`.

        `beside` is the fraction of full speed while another server of the group works; None divides the speed equally.
        """
        self._servers.append(Server(self._groups.setdefault(group, _Group()), beside))
        return self._servers[-1]

    def begin(self, server: Server, row: str, unit: int, seconds: float, priority: int = 0) -> Work:
        """Enqueues a work item and returns the item.

        `seconds` are those at full speed: an item of 0 seconds is done at once and leaves no span.
        """
        work = Work(row, unit, seconds, priority)
        if seconds:
            if server.works:
                # A stable order: work items of equal priority run in the order of their start.
                insort(server.works, work, key=_PRIORITY)
            else:
                server.group.working += 1
                server.works.append(work)
        return work

    def advance(self) -> bool:
        """Advances the time to the next end of a work item. Returns False if no server is busy."""
        running = []
        passed = math.inf
        for server in self._servers:
            if server.works:
                work, speed = server.works[0], server.speed if server.group.working > 1 else 1.0
                running.append((server, work, speed))
                passed = min(passed, work.left / speed)
        if not running:
            return False
        # Speeds are constant until the next end, so time can jump there.
        end = self.now + passed
        for server, work, speed in running:
            if work.start != work.start:  # NaN: the start is set once, since a preempted item may reach the front again
                work.start = self.now
            work.left -= passed * speed
            if work.left <= work.seconds * 1e-12:  # the rest is rounding
                work.left, work.done = 0.0, True
                del server.works[0]
                if not server.works:
                    server.group.working -= 1
                self._ended.append((work, end))
        self.now = end
        return True
