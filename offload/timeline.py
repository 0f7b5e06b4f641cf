"""A timeline of a run, written in the trace event format of Chrome and Perfetto.

    row              a span shows
    compute          the forward of a module; the part of a backward that belongs to one unit; the end of a step
    waits            the model's thread, or autograd's, waits: for a read, an update, a host buffer, a commit
    ranks            a collective operation, and the wait for the slowest rank
    uploads          a copy of a unit's weights to the device
    downloads        a copy of a gradient to its host buffer
    reads, writes    a request to the drives, from its submission to its end
    updates          a unit's update, from its first read to the moment when its weights may be used
    update worker    the work of the thread that updates: kernels, copies, waits for its reads and writes
    commits          a step becomes durable

Spans of one row that overlap in time are shown in lanes below each other: "reads", "reads 2" and so on. In the rows
of `_NESTED` a span that another contains shares its lane. Any thread may record: a span is one tuple appended to a
list, and nothing is written before `close`. Each rank writes its own file,
which viewers show as a process. All processes of a machine share the clock, so files may be merged.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import gzip
import json
import logging
import os
import sys
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from offload.errors import ConfigError
from offload.notices import Remark

logger = logging.getLogger("offload")

MOST_EVENTS = 400_000
"""Default limit of events: about 100 MB of memory during the run, and 60 MB of JSON."""
_SAME_WAIT = 100_000
"""Nanoseconds. Waits of one name with a shorter gap are shown as one: a thread woken by another change waits again."""
_WORKER_THREAD = "offload-update"


class Row(enum.Enum):
    """Rows of the timeline, in display order."""

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
"""Rows whose spans may contain others."""
_ORDER = {row: index for index, row in enumerate(Row, 1)}
_TIDS = 1000
"""Thread numbers that are reserved for each row in the file."""


class Phase(enum.Enum):
    """Phases of a step that the model itself computes in, and the evaluation forward, which belongs to no step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    EVALUATION = "evaluation"
    """A forward without gradients."""


class Span(NamedTuple):
    """A span. `start` and `end` are nanoseconds of `now`; `nbytes` is the number of bytes moved, 0 if none."""

    row: Row
    name: str
    start: int
    end: int
    nbytes: int


# CLOCK_MONOTONIC on Linux, which all processes of a machine share.
now = time.perf_counter_ns


class Timeline:
    """A recorder of at most `most` spans and counter values. `close` writes `path`, compressed if it ends in .gz.

    Spans that start before recording are dropped. Recording starts on construction or, with `waits`, when `start` is
    called.
    """

    def __init__(self, path: Path, rank: int = 0, most: int = MOST_EVENTS, *, waits: bool = False) -> None:
        self.path = path
        self.notices: tuple[str, ...] = (
            Remark(f"the timeline will be written to {path} at the end; open it at ui.perfetto.dev"),
        )
        self._rank, self._most = rank, most
        self._pid = rank + 1  # viewers treat process 0 as the idle one
        # Appending to a list is atomic under the GIL, so recording needs no lock.
        self._spans: list[Span] = []
        self._samples: list[tuple[str, int, int]] = []
        """Name of a counter, nanoseconds of `now`, and its value from then on."""
        self._last: dict[str, int] = {}
        self._begun: dict[tuple[Row, str], int] = {}
        self._full_at: int | None = None
        self._first = sys.maxsize if waits else 0
        """Moment in nanoseconds of `now` when recording starts."""
        self._began = time.time()
        self._written = False

    @property
    def recorded(self) -> Timeline:
        """The timeline that stores the spans. Without one it is `OFF`, even if a meter receives the spans."""
        return self

    @property
    def started(self) -> bool:
        return self._first != sys.maxsize

    def start(self) -> None:
        """Starts recording. A span that started earlier, such as the first write of a weight, is dropped."""
        self._first = now()

    def span(self, row: Row, name: str, nbytes: int = 0) -> AbstractContextManager[None]:
        """Returns a context that records its body as a span. `nbytes` is the number of bytes that the body moves."""
        # The same code may wait on the model's thread and on the worker's; only the former stalls the model.
        if row is Row.WAITS and threading.current_thread().name == _WORKER_THREAD:
            row = Row.WORKER
        return _Open(self, row, name, nbytes)

    def begin(self, row: Row, name: str) -> None:
        """Marks the start of a span that any thread may `end`. At most one span of a row and name may be open."""
        self._begun[row, name] = now()

    def end(self, row: Row, name: str) -> None:
        start = self._begun.pop((row, name), None)
        if start is not None:
            self.add(row, name, start, now())

    def add(self, row: Row, name: str, start: int, end: int, nbytes: int = 0) -> None:
        """Records a span that has ended. `start` and `end` are nanoseconds of `now`."""
        if start >= self._first and self._has_room(end):
            self._spans.append(Span(row, name, start, end, nbytes))

    def count(self, name: str, value: int) -> None:
        """Records that the counter `name` equals `value` from now on. An unchanged value is not recorded."""
        at = now()
        if at >= self._first and self._last.get(name) != value and self._has_room(at):
            self._last[name] = value
            self._samples.append((name, at, value))

    def begin_phase(self, phase: Phase) -> None:
        """Marks the start of a phase for a listener. The file shows the modules of a phase, not the phase itself."""

    def end_phase(self, phase: Phase) -> None:
        """Marks the end of a phase for a listener. The end of a phase that has not started is ignored."""

    def add_gradient(self, nbytes: int) -> None:
        """Marks the arrival of a gradient of `nbytes` bytes for a listener."""

    def _has_room(self, at: int) -> bool:
        """Returns True if another event may be recorded; otherwise logs a warning, once."""
        # Checked without a lock: threads may exceed the limit by one event each.
        if len(self._spans) + len(self._samples) < self._most:
            return True
        if self._full_at is None:
            self._full_at = at
            logger.warning(
                "the timeline %s ends here: it contains %d events, the most that are recorded", self.path, self._most
            )
        return False

    def close(self) -> None:
        """Writes the file, once. An error of the drive is logged, so that it does not fail the run."""
        if self._written:
            return
        try:
            facts = {
                "rank": self._rank,
                "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._began)),
                "events": len(self._spans) + len(self._samples),
                "complete": self._full_at is None,
            }
            opened: Any = functools.partial(gzip.open, compresslevel=5) if self.path.suffix == ".gz" else open
            with opened(self.path, "wt", encoding="utf-8") as file:
                file.write(_BEGINS + '"ms", "otherData": ' + json.dumps(facts) + ', "traceEvents": [\n')
                file.write(",\n".join(json.dumps(event) for event in self._events()))
                file.write("\n]}\n")
        except OSError as error:
            logger.error("cannot write the timeline %s: %s", self.path, error.strerror)
            with contextlib.suppress(OSError):
                if self.path.is_file():
                    self.path.unlink()  # no program reads a part of it
        self._written = True

    # -- the file -----------------------------------------------------------------------------------

    def _events(self) -> Iterator[dict[str, Any]]:
        """Yields the events of the file: names of rows, spans, counters, and a mark where recording stopped early."""
        yield self._about("process_name", 0, name=f"rank {self._rank}")
        yield self._about("process_sort_index", 0, sort_index=self._rank)
        # A copy: a daemon thread may still record while the file is written.
        spans = list(self._spans)
        for row in Row:
            row_spans = [span for span in spans if span.row is row]
            # A thread that waits for one change is woken by other changes too; the file shows one wait.
            if row is Row.WAITS:
                row_spans = _joined(row_spans)
            seen = -1
            for lane, span in _lanes(row_spans, row in _NESTED):
                # Viewers draw overlapping spans of one thread wrongly, hence a thread number for each lane.
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
                    "ts": span.start / 1000,  # microseconds
                    "dur": (span.end - span.start) / 1000,
                    **({"args": {"bytes": span.nbytes}} if span.nbytes else {}),
                }
        for name, at, value in sorted([*self._samples, *_in_flight(spans)], key=lambda sample: sample[1]):
            yield {"ph": "C", "pid": self._pid, "name": name, "ts": at / 1000, "args": {"bytes": value}}
        if self._full_at is not None:
            yield {
                "ph": "i",
                "s": "g",
                "pid": self._pid,
                "tid": _ORDER[Row.COMPUTE] * _TIDS,
                "name": f"recording stopped after {self._most} events",
                "ts": self._full_at / 1000,
            }

    def _about(self, what: str, tid: int, **args: Any) -> dict[str, Any]:
        """Returns a metadata event, which names or orders a process or thread in the viewer."""
        return {"ph": "M", "pid": self._pid, "tid": tid, "name": what, "args": args}


class _Open:
    __slots__ = ("_name", "_nbytes", "_row", "_start", "_timeline")

    def __init__(self, timeline: Timeline, row: Row, name: str, nbytes: int) -> None:
        self._timeline, self._row, self._name, self._nbytes = timeline, row, name, nbytes
        self._start = 0

    def __enter__(self) -> None:
        self._start = now()

    def __exit__(self, *_: object) -> None:
        self._timeline.add(self._row, self._name, self._start, now(), self._nbytes)


class _Off(Timeline):
    def __init__(self) -> None:
        super().__init__(Path(os.devnull), waits=True)
        self.notices = ()
        # One context for all spans: a span costs one call and allocates nothing.
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
"""The timeline of a run without one."""


def open_timeline(file: str | None, rank: int, world_size: int) -> Timeline:
    """Returns a timeline that records to `file` once `start` is called; `OFF` for None. Raises as `path_of` does."""
    return OFF if file is None else Timeline(path_of(file, rank, world_size), rank, waits=True)


def path_of(file: str, rank: int, world_size: int) -> Path:
    """Returns the path of a rank's file: `trace.rank0.json.gz` for `trace.json.gz` with several ranks. Writes nothing.

    Raises `ConfigError` if the path cannot be written, or if a file that is not a timeline is there.
    """
    path = Path(file).absolute()
    if world_size > 1:
        zipped = path.suffix if path.suffix == ".gz" else ""
        plain = Path(path.name.removesuffix(zipped))
        path = path.with_name(f"{plain.stem}.rank{rank}{plain.suffix}{zipped}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"cannot write the timeline {path}: give a file in a folder that exists and is writable")
    # A slip in the config must not destroy a file of the user.
    if path.is_file() and not _is_ours(path):
        raise ConfigError(f"{path} is not a timeline and would be overwritten; give another file")
    return path


# First characters of every timeline file.
_BEGINS = '{"displayTimeUnit": '


def _is_ours(path: Path) -> bool:
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
            return file.read(len(_BEGINS)) in ("", _BEGINS)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error):
        return path.stat().st_size == 0


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Returns the spans sorted by start, with consecutive spans of the same wait merged."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda item: (item.start, -item.end)):
        last = joined[-1] if joined else None
        if last is not None and last.name == span.name and 0 <= span.start - last.end < _SAME_WAIT:
            joined[-1] = last._replace(end=span.end)
        else:
            joined.append(span)
    return joined


def _lanes(spans: Iterable[Span], nested: bool) -> Iterator[tuple[int, Span]]:
    """Yields each span with the first lane that has no open span.

    If `nested`, a lane whose open spans all contain the span serves too.
    """
    lanes: list[list[int]] = []  # ends of the open spans of each lane, outermost first
    # Sorted by start, a longer span first, so that an outer span comes before those inside.
    for span in sorted(spans, key=lambda item: (item.start, -item.end)):
        for ends in lanes:
            while ends and ends[-1] <= span.start:
                ends.pop()
        fitting = (lane for lane, ends in enumerate(lanes) if not ends or (nested and span.end <= ends[-1]))
        lane = next(fitting, len(lanes))
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append(span.end)
        yield lane, span


def _in_flight(spans: Iterable[Span]) -> list[tuple[str, int, int]]:
    """Returns samples of the bytes of all reads in flight, and of all writes, one for each change."""
    samples: list[tuple[str, int, int]] = []
    for row, name in ((Row.READS, "reads in flight"), (Row.WRITES, "writes in flight")):
        requests = [span for span in spans if span.row is row]
        changes = [(s.start, s.nbytes) for s in requests] + [(s.end, -s.nbytes) for s in requests]
        total = 0
        for at, change in sorted(changes):
            total += change
            samples.append((name, at, total))
    return samples
