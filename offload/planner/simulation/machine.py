"""What takes time and is counted when the pager and the update worker are played: drives, links, cores."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import NamedTuple, TypeVar

from offload.aio import Priority
from offload.planner.simulation.clock import Clock, Work

_T = TypeVar("_T")
Acting = Generator[Callable[[], bool], None, _T]
"""An actor, or a part of what it does: it yields a condition, and goes on once that is true."""


class Rates(NamedTuple):
    """How fast everything is; infinite where it is not said."""

    read: float = math.inf
    """Bytes in a second from the drives, while they write nothing."""
    written: float = math.inf
    """Bytes in a second to the drives, while they read nothing."""
    mixed: float | None = None
    """Bytes in a second of both together, while they do both; None where that takes what one after the other does."""
    upload: float = math.inf
    """Bytes in a second to the device."""
    kernel: float = math.inf
    """Elements updated in a second."""
    on_cpu: bool = False
    """The device is the CPU: compute and kernel share its cores, and the thread that runs the model copies itself."""

    @property
    def beside(self) -> tuple[float, float]:
        """What reads and writes keep of their speeds while the drives do both."""
        if math.isinf(self.read) or math.isinf(self.written):
            return 0.5, 0.5
        mixed = 2 / (1 / self.read + 1 / self.written) if self.mixed is None else self.mixed
        written = min(self.written, max(mixed / 2, mixed - self.read))
        return min(1.0, (mixed - written) / self.read), written / self.written

    def drive_seconds(self, read: float, written: float) -> float:
        """So many bytes, as much of both at once as can be."""
        alone = (read / self.read, written / self.written)
        if not all(alone):
            return sum(alone)
        together = min(seconds / beside for seconds, beside in zip(alone, self.beside, strict=True))
        return together + sum(s - together * beside for s, beside in zip(alone, self.beside, strict=True))


class Moved(NamedTuple):
    """Bytes between HOST and DISK."""

    weights_read: int = 0
    """Brought for a use."""
    updates_read: int = 0
    updates_written: int = 0
    gradients_read: int = 0
    gradients_written: int = 0

    @property
    def read(self) -> int:
        return self.weights_read + self.updates_read + self.gradients_read

    @property
    def written(self) -> int:
        return self.updates_written + self.gradients_written


class Waited(NamedTuple):
    """Seconds in which the thread that runs the model stood still."""

    update: float = 0.0
    read: float = 0.0
    upload: float = 0.0
    room: float = 0.0
    """For a lease of weights."""


class Worked(NamedTuple):
    """Seconds of the update worker: in its kernels, and waiting for its own reads and writes."""

    kernels: float = 0.0
    reads: float = 0.0
    writes: float = 0.0


class Machine:
    """Begins what takes time, and counts what it comes to."""

    def __init__(self, rates: Rates) -> None:
        self.clock = Clock()
        self.on_cpu = rates.on_cpu
        self._rates = rates
        self._reads, self._writes = (self.clock.server("drive", beside) for beside in rates.beside)
        self._kernel = self.clock.server("cores")
        self._compute = self.clock.server("cores" if rates.on_cpu else "device")
        self._link = self.clock.server("cores" if rates.on_cpu else "link")
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
        """Read from the drive; `cause` is a field of `Moved`."""
        self._moved[cause] += nbytes
        return self.clock.begin(self._reads, row, unit, nbytes / self._rates.read, priority)

    def write(self, row: str, cause: str, unit: int, nbytes: int) -> Work:
        """Write to the drive; `cause` is a field of `Moved`."""
        self._moved[cause] += nbytes
        return self.clock.begin(self._writes, row, unit, nbytes / self._rates.written)

    def upload(self, unit: int, nbytes: int) -> Work:
        return self.clock.begin(self._link, "upload", unit, nbytes / self._rates.upload)

    def update(self, unit: int, numel: int) -> Work:
        """Run the optimizer's kernel."""
        return self.clock.begin(self._kernel, "kernel", unit, numel / self._rates.kernel)

    def compute(self, unit: int, seconds: float) -> Work:
        """Run a part of the model."""
        return self.clock.begin(self._compute, "model", unit, seconds)

    def counted(self, cause: str, acting: Acting[_T]) -> Acting[_T]:
        """Let the thread that runs the model do what may wait; for how long counts as `cause`, a field of `Waited`."""
        start = self.clock.now
        result = yield from acting
        self._waited[cause] += self.clock.now - start
        return result

    def spent(self, on: str, work: Work | None) -> Acting[None]:
        """Let the update worker wait for the end of `work`; for how long counts as `on`, a field of `Worked`."""
        start = self.clock.now
        yield from until(work)
        self._worked[on] += self.clock.now - start


def until(work: Work | None) -> Acting[None]:
    """Wait for the end of a work."""
    while work is not None and not work.done:
        yield lambda: work.done
