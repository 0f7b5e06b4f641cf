"""A clock that goes from the end of one piece of work to the next: what `simulate` tells the time by.

Work     something that takes seconds where nothing disturbs it
Server   does one work at a time, the most urgent first: a drive, a link, a processor
Clock    all servers and the time; servers of one `group` are the same thing, so those that work share its speed
"""

from __future__ import annotations

import math
from bisect import insort
from typing import NamedTuple


class Span(NamedTuple):
    """Something that took from `start` to `end`, in seconds."""

    row: str
    """What it was: "model", "kernel", "weight read", ..."""
    unit: int
    start: float
    end: float


class Work:
    """A piece of work; `done` once it has ended. Smaller `priority` goes first, and may come in between."""

    def __init__(self, row: str, unit: int, seconds: float, priority: int) -> None:
        self.row, self.unit, self.seconds, self.priority = row, unit, seconds, priority
        self.left = seconds
        self.start = math.nan

    @property
    def done(self) -> bool:
        return self.left == 0


class Server:
    """Works that wait for the same thing."""

    def __init__(self, group: str, beside: float | None) -> None:
        self.group = group
        self._beside = beside
        self.works: list[Work] = []
        """Those that have not ended, the one that is being done first."""

    def speed(self, working: int) -> float:
        """Where so many of its group work, itself among them; 1 is undisturbed."""
        if working == 1:
            return 1.0
        return 1 / working if self._beside is None else self._beside


class Clock:
    """The time, in seconds from 0."""

    def __init__(self) -> None:
        self.now = 0.0
        self.spans: list[Span] = []
        """What has ended and took time, in the order of the ends."""
        self._servers: list[Server] = []

    def server(self, group: str, beside: float | None = None) -> Server:
        """A server that shares the speed of `group` with the others of it, equally, or goes at `beside` beside them."""
        self._servers.append(Server(group, beside))
        return self._servers[-1]

    def begin(self, server: Server, row: str, unit: int, seconds: float, priority: int = 0) -> Work:
        """Ask for work; what takes no time is done at once."""
        work = Work(row, unit, seconds, priority)
        if seconds:
            insort(server.works, work, key=lambda other: other.priority)
        return work

    def advance(self) -> bool:
        """Go on to the next end of a work; False where none is being done."""
        busy = [server for server in self._servers if server.works]
        if not busy:
            return False
        groups = [server.group for server in busy]
        speeds = [server.speed(groups.count(server.group)) for server in busy]
        passed = min(server.works[0].left / speed for server, speed in zip(busy, speeds, strict=True))
        for server, speed in zip(busy, speeds, strict=True):
            work = server.works[0]
            if math.isnan(work.start):
                work.start = self.now
            work.left -= passed * speed
            if work.left <= work.seconds * 1e-12:  # what is left is rounding
                work.left = 0.0
                server.works.pop(0)
                self.spans.append(Span(work.row, work.unit, work.start, self.now + passed))
        self.now += passed
        return True
