"""The simulated hardware: a discrete-event clock, and drives, links and cores that take time, with their counters.

Work     a work item with its seconds at full speed
Server   a drive, a link or a processor: runs one work item at a time, the most urgent first
Clock    all servers and the time; servers of one `group` are the same hardware, and busy ones share its speed
SimulatedMachine  the servers of a machine, by the work that they do
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Generator, Mapping
from operator import attrgetter
from typing import NamedTuple, TypeVar

from offload.aio import Priority

_PRIORITY = attrgetter("priority")


class Work:
    """A work item of a server. A smaller `priority` runs first and preempts a larger one."""

    __slots__ = ("done", "left", "priority", "row", "seconds", "start", "unit")

    def __init__(self, row: str, unit: int, seconds: float, priority: int) -> None:
        self.row, self.unit, self.seconds, self.priority = row, unit, seconds, priority
        self.left = seconds
        self.start = math.nan
        # An attribute rather than a property: every actor's condition reads `done` after each event.
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
        """Returns the fraction of full speed at which this server now works."""
        if self.group.working == 1:
            return 1.0
        # A drive that reads and writes at once does not halve its bandwidth, so `_beside` sets the fraction.
        return 1 / self.group.working if self._beside is None else self._beside


class Clock:
    """The simulated time, in seconds from 0, and all servers."""

    def __init__(self) -> None:
        self.now = 0.0
        self.busy: dict[str, float] = {}
        """Seconds of the work items that have ended in this step, by kind, without those before the step."""
        self._began = 0.0
        """Begin of the step."""
        self._servers: list[Server] = []
        self._groups: dict[str, _Group] = {}

    def begin_step(self) -> None:
        self.busy, self._began = {}, self.now

    def server(self, group: str, beside: float | None = None) -> Server:
        """Returns a new server of `group`.

        `beside` is the fraction of full speed while another server of the group works; None divides the speed equally.
        """
        self._servers.append(Server(self._groups.setdefault(group, _Group()), beside))
        return self._servers[-1]

    def begin(self, server: Server, row: str, unit: int, seconds: float, priority: int = 0) -> Work:
        """Enqueues a work item and returns the item.

        `seconds` is the duration at full speed. An item of 0 seconds is done at once and leaves no span.
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
                seconds = end - max(work.start, self._began)
                self.busy[work.row] = self.busy.get(work.row, 0.0) + seconds
        self.now = end
        return True

    def pending(self) -> tuple[tuple[tuple[str, int, float, int], ...], ...]:
        """Returns the rest of the work of each server, in which equal states of a simulation agree."""
        return tuple(
            [
                tuple([(work.row, work.unit, work.left, work.priority) for work in server.works])
                for server in self._servers
            ]
        )

    def skip(self, seconds: float, busy: Mapping[str, float]) -> None:
        """Advances the time by `seconds`, in which work as in `busy` ends and as much begins."""
        self.now += seconds
        for row, spent in busy.items():
            self.busy[row] = self.busy.get(row, 0.0) + spent
        for work in (work for server in self._servers for work in server.works):
            work.start += seconds


# -- machine -------------------------------------------------------------------------------------------


_T = TypeVar("_T")
Acting = Generator[Callable[[], bool], None, _T]
"""A coroutine of an actor. The coroutine yields a condition and is resumed once the condition is true."""


class SimulatedRates(NamedTuple):
    """Speeds of the simulated hardware; infinite by default."""

    read: float = math.inf
    """Bytes per second from the drives while nothing is written."""
    written: float = math.inf
    """Bytes per second to the drives while nothing is read."""
    mixed: float | None = None
    """Total bytes per second while the drives read and write at once. None: as long as one after the other."""
    upload: float = math.inf
    """Bytes per second to the device."""
    kernel: float = math.inf
    """Elements updated per second."""
    on_cpu: bool = False
    """True if the device is the CPU: compute and kernel share the cores, and the model's thread makes the copies."""
    download: float = math.inf
    """Bytes per second from the device, during copies to the device as well."""

    @property
    def beside(self) -> tuple[float, float]:
        """Returns the fractions of their speeds that reads and writes keep while the drives do both."""
        # An infinite rate has no meaningful fraction; work at infinite rates takes no time anyway.
        if math.isinf(self.read) or math.isinf(self.written):
            return 0.5, 0.5
        # `mixed` was measured with as many bytes read as written. Writes get half of the total, or more if reads
        # cannot use the other half.
        mixed = 2 / (1 / self.read + 1 / self.written) if self.mixed is None else self.mixed
        written = min(self.written, max(mixed / 2, mixed - self.read))
        return min(1.0, (mixed - written) / self.read), written / self.written

    def drive_seconds(self, read: float, written: float) -> float:
        """Returns the seconds to move these bytes, reading and writing at once for as long as both have work."""
        alone = (read / self.read, written / self.written)
        # Without both kinds of traffic, or with infinite rates, nothing overlaps.
        if not all(alone):
            return sum(alone)
        together = min(seconds / beside for seconds, beside in zip(alone, self.beside, strict=True))
        return together + sum(s - together * beside for s, beside in zip(alone, self.beside, strict=True))


class Moved(NamedTuple):
    """Bytes between HOST and DISK."""

    weights_read: int = 0
    """Weights read for a use."""
    updates_read: int = 0
    updates_written: int = 0
    gradients_read: int = 0
    gradients_written: int = 0
    inputs_read: int = 0
    """Inputs of repeated blocks, for the backward."""
    inputs_written: int = 0

    @property
    def read(self) -> int:
        return self.weights_read + self.updates_read + self.gradients_read + self.inputs_read

    @property
    def written(self) -> int:
        return self.updates_written + self.gradients_written + self.inputs_written


class Waited(NamedTuple):
    """Seconds for which the model's thread was blocked, by cause."""

    update: float = 0.0
    read: float = 0.0
    upload: float = 0.0
    room: float = 0.0
    """Waits for a host buffer of weights."""


class Worked(NamedTuple):
    """Seconds of the update worker in kernels, and in waits for its own reads and writes."""

    kernels: float = 0.0
    reads: float = 0.0
    writes: float = 0.0


class SimulatedMachine:
    """Servers of the simulated hardware. The methods start work and count bytes and waits."""

    def __init__(self, rates: SimulatedRates) -> None:
        self.clock = Clock()
        self.on_cpu = rates.on_cpu
        self._rates = rates
        # Reads and writes share the drives; on a CPU, compute, kernel and copies share the cores.
        self._reads, self._writes = (self.clock.server("drive", beside) for beside in rates.beside)
        self._kernel = self.clock.server("cores")
        self._compute = self.clock.server("cores" if rates.on_cpu else "device")
        self._link = self.clock.server("cores" if rates.on_cpu else "link")
        # A link copies both ways at once.
        self._link_down = self.clock.server("cores" if rates.on_cpu else "link down")
        # Mutable counters; the properties return them as tuples.
        self._moved = dict.fromkeys(Moved._fields, 0)
        self._waited = dict.fromkeys(Waited._fields, 0.0)
        self._worked = dict.fromkeys(Worked._fields, 0.0)

    @property
    def moved(self) -> Moved:
        return Moved(**self._moved)

    @property
    def waited(self) -> Waited:
        return Waited(**self._waited)

    @property
    def worked(self) -> Worked:
        return Worked(**self._worked)

    def read(self, row: str, cause: str, unit: int, nbytes: int, priority: Priority) -> Work:
        """Starts a read from the drives.

        `row` is the kind of work for the timeline, `cause` the field of `Moved` that counts the bytes.
        """
        self._moved[cause] += nbytes
        return self.clock.begin(self._reads, row, unit, nbytes / self._rates.read, priority)

    def write(self, row: str, cause: str, unit: int, nbytes: int) -> Work:
        """Starts a write to the drives; `cause` is a field of `Moved`."""
        self._moved[cause] += nbytes
        return self.clock.begin(self._writes, row, unit, nbytes / self._rates.written)

    def upload(self, unit: int, nbytes: int, row: str = "upload") -> Work:
        """Starts a copy from host to device; `row` is the kind of the copy, for the timeline."""
        return self.clock.begin(self._link, row, unit, nbytes / self._rates.upload)

    def download(self, row: str, unit: int, nbytes: int) -> Work:
        return self.clock.begin(self._link_down, row, unit, nbytes / self._rates.download)

    def update(self, unit: int, numel: float) -> Work:
        return self.clock.begin(self._kernel, "kernel", unit, numel / self._rates.kernel)

    def compute(self, unit: int, seconds: float) -> Work:
        return self.clock.begin(self._compute, "model", unit, seconds)

    def skip(self, times: int, seconds: float, moved: Moved, waited: Waited, busy: Mapping[str, float]) -> None:
        """Lets the seconds, bytes, waits and work of a part of a step pass so many times. The worker is idle."""
        self.clock.skip(times * seconds, {row: times * spent for row, spent in busy.items()})
        for name, nbytes in moved._asdict().items():
            self._moved[name] += times * nbytes
        for name, spent in waited._asdict().items():
            self._waited[name] += times * spent

    def counted(self, cause: str, acting: Acting[_T]) -> Acting[_T]:
        """Runs a coroutine on the model's thread and adds the elapsed time to `cause`, a field of `Waited`."""
        start = self.clock.now
        result = yield from acting
        self._waited[cause] += self.clock.now - start
        return result

    def spent(self, on: str, work: Work | None) -> Acting[None]:
        """Waits on the update worker for the end of `work` and adds the time to `on`, a field of `Worked`."""
        if work is not None and not work.done:
            start = self.clock.now
            yield from until(work)
            self._worked[on] += self.clock.now - start


def until(work: Work | None) -> Acting[None]:
    """Waits for the end of `work`; returns at once for None."""
    while work is not None and not work.done:
        yield lambda: work.done
