"""A benchmark of the I/O queue on a drive, with `fio` and plain Python packages, in turns on the same file.

The speed of drive and memory varies twofold within minutes on a shared machine. Every round therefore runs all
contenders one after the other, and a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psutil

from offload.aio import BACKENDS, IoQueue, StripedFile, aligned_empty, bandwidths
from offload.aio.backend import refusals
from offload.aio.measure import OPERATIONS, TimedTransfer, move, remove
from offload.bench import baselines
from offload.bench.measure import bars, pyplot, row_json, save_figure
from offload.errors import ConfigError, IoError
from offload.hardware.noise import fill_with_noise
from offload.notices import folder_to_make
from offload.sizes import MIB, PAGE, align_up, format_size

FIO_ENGINES = ("io_uring", "libaio")


class Case(NamedTuple):
    """The settings with which a contender moves the file."""

    backend: str
    block_bytes: int
    depth: int


@dataclass(frozen=True, kw_only=True, slots=True)
class IoRow:
    """The result of one contender in one operation: medians of the rounds."""

    backend: str
    op: str
    block_bytes: int
    depth: int
    bytes: int
    gb_per_s: float
    of_fio: float | None
    """The median over rounds of the ratio to the faster of fio's engines in the same round, on 2 MiB pages."""
    cpu_s_per_gb: float
    p50_us: float | None
    """Median microseconds from a block's submission to the kernel until its end; in "mixed", only of reads."""
    p99_us: float | None


class Contender(Protocol):
    """A program that moves the entire file once in each `run`."""

    def run(self, operation: str) -> TimedTransfer: ...
    def latency(self, operation: str, fraction: float) -> float | None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class IoPlan:
    """The settings of a measurement."""

    folders: tuple[str, ...]
    cases: tuple[Case, ...]
    operations: tuple[str, ...]
    nbytes: int
    request_bytes: int
    rounds: int
    with_fio: bool


def make_plan(
    folders: Sequence[str],
    *,
    backends: Sequence[str] = (),
    blocks: Sequence[int] = (),
    depths: Sequence[int] = (),
    operations: Sequence[str] = (),
    nbytes: int = 1 << 30,
    request_bytes: int = 16 * MIB,
    rounds: int = 3,
    with_fio: bool = True,
) -> IoPlan:
    """Validates the settings before a file is created, and returns them with the defaults of this machine.

    Without `backends` every one that works is measured, and no peer. The file is a multiple of `request_bytes`.
    """
    usable = [name for name, refused in refusals().items() if refused is None]
    known = (*BACKENDS, *baselines.NAMES)
    chosen = tuple(dict.fromkeys(backends or usable))
    for name in chosen:
        if name not in known:
            raise ConfigError(f"there is no backend {name!r} to measure: expected {', '.join(known)}")
        if name in BACKENDS and name not in usable:
            raise ConfigError(f"{refusals()[name]}; measure another backend")
        baselines.check(name)
    for name in operations:
        if name not in OPERATIONS:
            raise ConfigError(f"there is no operation {name!r}: expected {', '.join(OPERATIONS)}")
    blocks, depths = blocks or (MIB, 4 * MIB), depths or (8, 32)
    _check_numbers(blocks, depths, nbytes, request_bytes, rounds)
    request_bytes = min(align_up(request_bytes), align_up(nbytes))
    nbytes = max(nbytes // request_bytes, 1) * request_bytes
    available = psutil.virtual_memory().available
    if available < nbytes:
        raise ConfigError(
            f"{format_size(available)} of memory are free, and the buffer needs as much as the file, "
            f"{format_size(nbytes)}: give a smaller --size"
        )
    if not folders:
        raise ConfigError("give at least one folder, on the drive to measure")
    for folder in folders:
        if not os.path.isdir(folder):
            raise ConfigError(f"there is no folder {folder_to_make(folder)}")
        free = shutil.disk_usage(folder).free
        if free < nbytes:
            raise ConfigError(
                f"{folder} has {format_size(free)} free, the file takes {format_size(nbytes)}; give --size"
            )
    # Plain Python packages come last in the table.
    ordered = sorted(chosen, key=known.index)
    cases = tuple(Case(name, block, depth) for name in ordered for block in blocks for depth in depths)
    return IoPlan(
        folders=tuple(folders),
        cases=cases,
        operations=tuple(dict.fromkeys(operations or OPERATIONS)),
        nbytes=nbytes,
        request_bytes=request_bytes,
        rounds=rounds,
        with_fio=with_fio and shutil.which("fio") is not None,
    )


def _check_numbers(blocks: Sequence[int], depths: Sequence[int], nbytes: int, request_bytes: int, rounds: int) -> None:
    for block in blocks:
        if block < PAGE or block % PAGE:
            raise ConfigError(f"expected a --block-size that is a multiple of {PAGE}, got {block}")
    for name, value in (("depth", min(depths)), ("rounds", rounds)):
        if value < 1:
            raise ConfigError(f"expected --{name} >= 1, got {value}")
    if max(depths) > 4096:
        raise ConfigError(f"expected --depth <= 4096, got {max(depths)}")
    if nbytes < PAGE or request_bytes < PAGE:
        raise ConfigError(f"expected --size and --request of at least {PAGE} bytes, got {nbytes} and {request_bytes}")


Passes = dict[tuple[Case, str], list[TimedTransfer]]


def measure(plan: IoPlan, tell: Callable[[str], None] = lambda _: None) -> list[IoRow]:
    """Runs all contenders in turns, removes the files, and returns a row for each operation and contender."""
    with _contenders(plan, tell) as contenders:
        passes = _in_turns(plan, contenders, tell)
        return [
            _row(case, operation, passes, contender)
            for operation in plan.operations
            for case, contender in contenders.items()
        ]


def passes_of(plan: IoPlan, tell: Callable[[str], None] = lambda _: None) -> Passes:
    """Runs all contenders as `measure` does, and returns the passes of each case and operation."""
    with _contenders(plan, tell) as contenders:
        return _in_turns(plan, contenders, tell)


@contextmanager
def _contenders(plan: IoPlan, tell: Callable[[str], None]) -> Iterator[dict[Case, Contender]]:
    with _file(plan, tell) as (file, buffer), ExitStack() as stack:
        contenders: dict[Case, Contender] = {}
        shapes = dict.fromkeys((case.block_bytes, case.depth) for case in plan.cases if plan.with_fio)
        fio = [Case(f"fio {engine}", *shape) for shape in shapes for engine in FIO_ENGINES]
        # All queues exist at once; an idle one has no block in flight and costs nothing.
        for case in [*plan.cases, *fio]:
            contenders[case] = contender = _open(case, plan, file, buffer)
            stack.callback(contender.close)
        yield contenders


def _in_turns(plan: IoPlan, contenders: dict[Case, Contender], tell: Callable[[str], None]) -> Passes:
    """Returns the passes of all contenders; every round runs each operation by each contender."""
    passes: Passes = {}
    for turn in range(plan.rounds):
        for operation in plan.operations:
            for case, contender in contenders.items():
                tell(f"round {turn + 1} of {plan.rounds}: {operation} by {case.backend}")
                passes.setdefault((case, operation), []).append(contender.run(operation))
    return passes


@contextmanager
def _file(plan: IoPlan, tell: Callable[[str], None]) -> Iterator[tuple[StripedFile, memoryview]]:
    """Yields a file full of random bytes and a buffer of the same length. Removes the file at the end."""
    paths = [
        os.path.join(folder, f"offload-bench-io.{os.getpid()}-{os.urandom(4).hex()}.{i}")
        for i, folder in enumerate(plan.folders)
    ]
    tell(f"writing {format_size(plan.nbytes)}")
    buffer = aligned_empty(plan.nbytes)
    fill_with_noise(buffer)
    try:
        # Bytes are divided among the drives as in a run, in proportion to their bandwidths.
        weights = [rate.swap for rate in bandwidths(plan.folders)] if len(paths) > 1 else None
        with StripedFile(paths, weights, create=True) as file, IoQueue() as queue:
            file.reserve(plan.nbytes)
            # The first write of a block is slower, so it is left out of all rounds.
            move(queue, file, buffer, "write", plan.request_bytes)
            yield file, buffer
    finally:
        for path in paths:
            remove(Path(path))


def _open(case: Case, plan: IoPlan, file: StripedFile, buffer: memoryview) -> Contender:
    """Returns the contender of a case. `buffer` stays the caller's and must outlive the contender."""
    if case.backend in BACKENDS:
        return _Queue(case, plan, file, buffer)
    paths = [part.path for part in file.parts()]
    if case.backend.startswith("fio "):
        return Fio(paths, case.backend.removeprefix("fio "), case.block_bytes, case.depth, plan.nbytes)
    # These packages do not stripe.
    return baselines.PythonContender(case.backend, paths[0], buffer, case.block_bytes, case.depth)


def _row(case: Case, operation: str, passes: Passes, contender: Contender) -> IoRow:
    timed = passes[case, operation]
    p50, p99 = (contender.latency(operation, fraction) for fraction in (0.5, 0.99))
    return IoRow(
        backend=case.backend,
        op=operation,
        block_bytes=case.block_bytes,
        depth=case.depth,
        bytes=timed[0].nbytes,
        gb_per_s=statistics.median(transfer.nbytes / transfer.seconds for transfer in timed) / 1e9,
        of_fio=_of_fio(case, operation, passes),
        cpu_s_per_gb=statistics.median(transfer.cpu_seconds / transfer.nbytes for transfer in timed) * 1e9,
        p50_us=None if p50 is None else p50 * 1e6,
        p99_us=None if p99 is None else p99 * 1e6,
    )


def _of_fio(case: Case, operation: str, passes: Passes) -> float | None:
    """Returns the median ratio to the faster one of fio's engines in the same round; None without fio."""
    peers = [passes.get((case._replace(backend=f"fio {engine}"), operation)) for engine in FIO_ENGINES]
    of_fio = [peer for peer in peers if peer is not None]
    if not of_fio:
        return None
    ratios: list[float] = []
    for ours, *others in zip(passes[case, operation], *of_fio, strict=True):
        ratios.append(ours.nbytes / ours.seconds / max(other.nbytes / other.seconds for other in others))
    return statistics.median(ratios)


class _Queue:
    def __init__(self, case: Case, plan: IoPlan, file: StripedFile, buffer: memoryview) -> None:
        self._queue = IoQueue(case.backend, block_bytes=case.block_bytes, depth=case.depth)
        self._file, self._buffer, self._request_bytes = file, buffer, plan.request_bytes

    def run(self, operation: str) -> TimedTransfer:
        return move(self._queue, self._file, self._buffer, operation, self._request_bytes)

    def latency(self, operation: str, fraction: float) -> float | None:
        # The queue keeps times by direction; for a mixed pass those of reads are shown, which a user waits for.
        return self._queue.latency("read" if operation == "mixed" else operation, fraction)

    def close(self) -> None:
        self._queue.close()


class Fio:
    """A contender that runs fio on the same file with O_DIRECT, its buffers on 2 MiB pages if `huge_pages`."""

    def __init__(
        self, paths: Sequence[str], engine: str, block_bytes: int, depth: int, nbytes: int, huge_pages: bool = True
    ) -> None:
        # fio separates files by colons, so colons of a path are escaped.
        names = ":".join(os.path.abspath(path).replace(":", "\\:") for path in paths)
        self._command = [
            *("fio", "--name=offload", f"--filename={names}", f"--size={nbytes}", f"--ioengine={engine}"),
            *(f"--bs={block_bytes}", f"--iodepth={depth}", "--direct=1", "--overwrite=1", "--output-format=json"),
        ]
        self._environment = dict(os.environ)
        if huge_pages:
            # fio allocates its buffers by malloc, which this setting of glibc puts on transparent huge pages.
            self._environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        self._latencies: dict[tuple[str, float], float] = {}

    def run(self, operation: str) -> TimedTransfer:
        command = [*self._command, f"--rw={'rw' if operation == 'mixed' else operation}"]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise IoError(self._command[2], 0, 0, 5, f"run fio ({(done.stderr or done.stdout).strip()[-300:]}) on")
        # fio may print warnings before the JSON.
        if "{" not in done.stdout:
            raise ConfigError(f"fio gave no figures: {(done.stdout + done.stderr).strip() or 'no output'}")
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        # A pass in one direction reports zeros for the other.
        sides = [job[side] for side in ("read", "write") if job[side]["io_bytes"]]
        for key, value in sides[0]["clat_ns"].get("percentile", {}).items():
            self._latencies[operation, float(key) / 100] = value / 1e9
        nbytes = sum(side["io_bytes"] for side in sides)
        seconds = max(side["runtime"] for side in sides) / 1e3
        if seconds < 1:  # `runtime` is in whole milliseconds; fio's own rate is finer
            seconds = nbytes / sum(side["bw_bytes"] for side in sides)
        cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
        return TimedTransfer(nbytes, seconds, cpu)

    def latency(self, operation: str, fraction: float) -> float | None:
        return self._latencies.get((operation, fraction))

    def close(self) -> None:
        pass


# -- output -------------------------------------------------------------------------------------------


def as_json(machine: dict[str, Any], plan: IoPlan, rows: Iterable[IoRow]) -> dict[str, Any]:
    """Returns the content that `--json` prints."""
    return {
        "machine": machine,
        "paths": list(plan.folders),
        "rounds": plan.rounds,
        "rows": [row_json(row) for row in rows],
    }


def plot(rows: Sequence[IoRow], path: Path) -> None:
    """Draws GB/s of every row, operations side by side, to a PNG, SVG or PDF file."""
    operations = list(dict.fromkeys(row.op for row in rows))
    figure, axes = pyplot().subplots(
        1, len(operations), figsize=(4.2 * len(operations) + 1.5, 1.2 + 0.28 * len(rows) / len(operations)), sharey=True
    )
    for operation, axis in zip(operations, [axes] if len(operations) == 1 else axes, strict=True):
        drawn = [row for row in rows if row.op == operation]
        names = [f"{row.backend}, {format_size(row.block_bytes)} x {row.depth}" for row in drawn]
        bars(names, [row.gb_per_s for row in drawn], [row.backend in BACKENDS for row in drawn], axis)
        if operation == operations[0]:
            axis.invert_yaxis()  # once: the operations share their axis
        axis.margins(x=0.15)
        axis.set_title(operation)
        axis.set_xlabel("GB/s")
    figure.suptitle("blue: offload, grey: others; block x depth")
    save_figure(figure, path)
