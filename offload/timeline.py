"""A time line of a run: who worked on what, and who waited for it, in the trace event format of Chrome and Perfetto.

    row              a span is
    compute          the forward of a module; a stretch of a backward in which one unit's turn it is; a step's decision
    waits            the model's thread, or autograd's, has to wait: for a read, an update, a lease, a commit
    ranks            what all ranks do together, and the wait for the slowest of them
    uploads          a unit's weights are copied to the device
    downloads        a gradient is brought to its lease in host memory
    reads, writes    a request to the drives, from its submission to its end
    updates          a unit's update, from its first read to the moment at which its weights may be used
    update worker    what that thread does: kernels, copies, waits for its reads and writes
    commits          a step becomes durable

Spans of one row that overlap in time stand below each other, in "reads 2", "reads 3" and so on. Any thread may record:
a span is one tuple in a list, and nothing is written before `close`. With several ranks each has a file, and a
process of its own in it; the clock is that of the machine, so files of one machine may be put together.
"""

from __future__ import annotations

import contextlib
import enum
import gzip
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from offload.errors import ConfigError
from offload.notices import Remark

logger = logging.getLogger("offload")

MOST_EVENTS = 400_000
"""About 100 MB of memory while the run goes on, and 60 MB of JSON."""
_SAME_WAIT = 100_000
"""Nanoseconds between two spans of one wait: who is woken by a change that is not the right one waits again."""
_WORKER_THREAD = "offload-update"


class Row(enum.Enum):
    """The rows, in the order in which they are shown."""

    COMPUTE = "compute"
    WAITS = "waits"
    RANKS = "ranks"
    UPLOADS = "uploads"
    DOWNLOADS = "downloads"
    READS = "reads"
    WRITES = "writes"
    UPDATES = "updates"
    WORKER = "update worker"
    COMMITS = "commits"


_NESTED = (Row.COMPUTE, Row.WAITS, Row.RANKS, Row.WORKER, Row.COMMITS)
"""Rows in which a span may lie within another."""
_ORDER = {row: index for index, row in enumerate(Row, 1)}
_TIDS = 1000
"""Threads of the file that each row may have."""


class Phase(enum.Enum):
    """The parts of a step that the model's own work makes up, and the forward that is no part of one."""

    FORWARD = "forward"
    BACKWARD = "backward"
    EVALUATION = "evaluation"
    """A forward without gradients."""


class Span(NamedTuple):
    """Nanoseconds of `now`, and the bytes that were moved, if any."""

    row: Row
    name: str
    start: int
    end: int
    nbytes: int


class _Sample(NamedTuple):
    name: str
    time: int
    value: int


now = time.perf_counter_ns


class Timeline:
    """A recorder of spans and counters, which `close` writes to `path`. `most` bounds how many.

    What begins before the first moment is not recorded. That is the construction, unless `waits`: then it is `start`.
    """

    def __init__(self, path: Path, rank: int = 0, most: int = MOST_EVENTS, *, waits: bool = False) -> None:
        self.path = path
        self.notices: tuple[str, ...] = (
            Remark(f"a time line is written to {path} at the end: see it at ui.perfetto.dev"),
        )
        self._rank, self._most = rank, most
        self._pid = rank + 1  # viewers take process 0 for the idle one
        self._spans: list[Span] = []
        self._samples: list[_Sample] = []
        self._last: dict[str, int] = {}
        self._begun: dict[tuple[Row, str], int] = {}
        self._full_at: int | None = None
        self._first = sys.maxsize if waits else 0
        """The first moment that is recorded."""
        self._began = time.time()
        self._written = False

    @property
    def recorded(self) -> Timeline:
        """The time line that keeps the spans; `OFF` where none does, although somebody may hear of them."""
        return self

    @property
    def started(self) -> bool:
        """True from the first moment on."""
        return self._first != sys.maxsize

    def start(self) -> None:
        """Begins to record. A span that has begun earlier, such as the first write of a weight, is dropped."""
        self._first = now()

    def span(self, row: Row, name: str, nbytes: int = 0) -> AbstractContextManager[None]:
        """What is done inside is a span."""
        if row is Row.WAITS and threading.current_thread().name == _WORKER_THREAD:
            row = Row.WORKER
        return _Open(self, row, name, nbytes)

    def begin(self, row: Row, name: str) -> None:
        """The start of a span that some thread will `end`; one of a name at a time."""
        self._begun[row, name] = now()

    def end(self, row: Row, name: str) -> None:
        """The end of what was begun, if it was."""
        start = self._begun.pop((row, name), None)
        if start is not None:
            self.add(row, name, start, now())

    def add(self, row: Row, name: str, start: int, end: int, nbytes: int = 0) -> None:
        """A span that is over."""
        if start >= self._first and self._has_room(end):
            self._spans.append(Span(row, name, start, end, nbytes))

    def count(self, name: str, value: int) -> None:
        """A counter is at `value` from now on."""
        at = now()
        if at >= self._first and self._last.get(name) != value and self._has_room(at):
            self._last[name] = value
            self._samples.append(_Sample(name, now(), value))

    def begin_phase(self, phase: Phase) -> None:
        """Marks the start of a phase, for who listens; the file shows a phase by its modules."""

    def end_phase(self, phase: Phase) -> None:
        """Marks the end of a phase. A phase that has not begun has no end."""

    def add_gradient(self, nbytes: int) -> None:
        """Marks the arrival of a gradient of `nbytes`, for who listens."""

    def _has_room(self, at: int) -> bool:
        if len(self._spans) + len(self._samples) < self._most:
            return True
        if self._full_at is None:
            self._full_at = at
            logger.warning(
                "the time line %s ends here: it holds %d events, the most there may be", self.path, self._most
            )
        return False

    def close(self) -> None:
        """Write the file, once. A drive that is full or gone by now is an error in the log, and not the run's."""
        if self._written:
            return
        try:
            with _open(self.path) as file:
                file.write(_BEGINS + '"ms", "otherData": ' + json.dumps(self._facts()) + ', "traceEvents": [\n')
                file.write(",\n".join(json.dumps(event) for event in self._events()))
                file.write("\n]}\n")
        except OSError as error:
            logger.error("cannot write the time line %s: %s", self.path, error.strerror)
        self._written = True

    # -- the file -----------------------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        return {
            "rank": self._rank,
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._began)),
            "events": len(self._spans) + len(self._samples),
            "complete": self._full_at is None,
        }

    def _events(self) -> Iterator[dict[str, Any]]:
        yield self._about("process_name", 0, name=f"rank {self._rank}")
        yield self._about("process_sort_index", 0, sort_index=self._rank)
        spans = list(self._spans)
        for row in Row:
            mine = [span for span in spans if span.row is row]
            if row is Row.WAITS:
                mine = _joined(mine)
            seen = -1
            for lane, span in _lanes(mine, row in _NESTED):
                tid = _ORDER[row] * _TIDS + min(lane, _TIDS - 1)
                if lane > seen:
                    seen = lane
                    yield self._about("thread_name", tid, name=f"{row.value} {lane + 1}" if lane else row.value)
                    yield self._about("thread_sort_index", tid, sort_index=tid)
                yield {
                    "ph": "X",
                    "pid": self._pid,
                    "tid": tid,
                    "cat": row.value,
                    "name": span.name,
                    "ts": span.start / 1000,
                    "dur": (span.end - span.start) / 1000,
                    **({"args": {"bytes": span.nbytes}} if span.nbytes else {}),
                }
        for name, at, value in sorted([*self._samples, *_in_flight(spans)], key=lambda sample: sample.time):
            yield {"ph": "C", "pid": self._pid, "name": name, "ts": at / 1000, "args": {"bytes": value}}
        if self._full_at is not None:
            words = f"no more was recorded: {self._most} events"
            yield {
                "ph": "i",
                "s": "g",
                "pid": self._pid,
                "tid": _ORDER[Row.COMPUTE] * _TIDS,
                "name": words,
                "ts": self._full_at / 1000,
            }

    def _about(self, what: str, tid: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "pid": self._pid, "tid": tid, "name": what, "args": args}


class _Open:
    """A span that is being recorded."""

    __slots__ = ("_name", "_nbytes", "_row", "_start", "_timeline")

    def __init__(self, timeline: Timeline, row: Row, name: str, nbytes: int) -> None:
        self._timeline, self._row, self._name, self._nbytes = timeline, row, name, nbytes
        self._start = 0

    def __enter__(self) -> None:
        self._start = now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timeline.add(self._row, self._name, self._start, now(), self._nbytes)


class _Off(Timeline):
    """A time line that nobody asked for."""

    def __init__(self) -> None:
        super().__init__(Path(os.devnull), waits=True)
        self.notices = ()
        self._nothing = contextlib.nullcontext()

    def span(self, row: Row, name: str, nbytes: int = 0) -> AbstractContextManager[None]:
        return self._nothing

    def begin(self, row: Row, name: str) -> None:
        pass

    def end(self, row: Row, name: str) -> None:
        pass

    def add(self, row: Row, name: str, start: int, end: int, nbytes: int = 0) -> None:
        pass

    def count(self, name: str, value: int) -> None:
        pass

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass


OFF: Timeline = _Off()


def open_timeline(file: str | None, rank: int, world_size: int) -> Timeline:
    """Returns the time line of `file`, which `start` begins; `OFF` without a file. Raises as `path_of` does."""
    return OFF if file is None else Timeline(path_of(file, rank, world_size), rank, waits=True)


def path_of(file: str, rank: int, world_size: int) -> Path:
    """The file of one rank: with several, `trace.json.gz` is `trace.rank0.json.gz` for the first.

    Raises `ConfigError` where it cannot be written. Nothing is: a run that never begins leaves none.
    """
    path = Path(file).absolute()
    if world_size > 1:
        zipped = path.suffix if path.suffix == ".gz" else ""
        plain = Path(path.name.removesuffix(zipped))
        path = path.with_name(f"{plain.stem}.rank{rank}{plain.suffix}{zipped}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(
            f"cannot write the time line {path}: give a file in a folder that exists and that you may write"
        )
    if path.is_file() and not _is_ours(path):
        raise ConfigError(f"{path} is no time line, and would be overwritten; give another file")
    return path


_BEGINS = '{"displayTimeUnit": '


def _is_ours(path: Path) -> bool:
    """Whether a file is empty, or begins as a time line does."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
            return file.read(len(_BEGINS)) in ("", _BEGINS)
    except (OSError, EOFError, UnicodeDecodeError):
        return path.stat().st_size == 0


def _open(path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.open(path, "wt", compresslevel=5, encoding="utf-8")
    return open(path, "w", encoding="utf-8")


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Spans of the same wait, one after the other, as one."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda each: (each.start, -each.end)):
        last = joined[-1] if joined else None
        if last is not None and last.name == span.name and 0 <= span.start - last.end < _SAME_WAIT:
            joined[-1] = last._replace(end=span.end)
        else:
            joined.append(span)
    return joined


def _lanes(spans: Iterable[Span], nested: bool) -> Iterator[tuple[int, Span]]:
    """Each span with the first lane in which it overlaps no other, or with `nested` lies within those it overlaps."""
    lanes: list[list[int]] = []  # the ends of the spans that are open in each, outermost first
    for span in sorted(spans, key=lambda each: (each.start, -each.end)):
        for ends in lanes:
            while ends and ends[-1] <= span.start:
                ends.pop()
        fitting = (lane for lane, ends in enumerate(lanes) if not ends or (nested and span.end <= ends[-1]))
        lane = next(fitting, len(lanes))
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append(span.end)
        yield lane, span


def _in_flight(spans: Iterable[Span]) -> list[_Sample]:
    """The bytes of all requests that were under way, whenever that changed."""
    samples: list[_Sample] = []
    for row, name in _IN_FLIGHT.items():
        requests = [span for span in spans if span.row is row]
        changes = [(s.start, s.nbytes) for s in requests] + [(s.end, -s.nbytes) for s in requests]
        total = 0
        for at, change in sorted(changes):
            total += change
            samples.append(_Sample(name, at, total))
    return samples


_IN_FLIGHT: Mapping[Row, str] = {Row.READS: "reads in flight", Row.WRITES: "writes in flight"}
