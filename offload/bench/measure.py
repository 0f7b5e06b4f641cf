"""Measurements that all benchmarks share: times in turns, ratios of pairs, tokens, memory, rates of drives."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from offload.aio import IoQueue, StripedFile, aligned_empty
from offload.aio.measure import move, remove
from offload.hardware.noise import fill_with_noise
from offload.sizes import MIB, align_up, rounded

if TYPE_CHECKING:
    import torch


def seconds_of(action: Callable[[], object]) -> float:
    """Returns the seconds that a call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def in_turns(one: Callable[[], object], other: Callable[[], object], rounds: int) -> tuple[list[float], list[float]]:
    """Returns the seconds of each of two calls, measured alternately after one round that does not count."""
    one(), other()
    pairs = [(seconds_of(one), seconds_of(other)) for _ in range(rounds)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Returns the median of the ratios of paired measurements."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def random_ids(shape: tuple[int, int], vocabulary: int, seed: int = 0) -> torch.Tensor:
    """Returns random tokens on the CPU, the same ones for the same seed."""
    import torch  # takes seconds, and benchmarks of drives do not need it

    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def resident(field: str = "VmRSS") -> int:
    """Returns the bytes of this process in RAM; "VmHWM" is their peak (`ru_maxrss` would begin with the parent's)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def limit_device_memory(device: torch.device, nbytes: int) -> None:
    """Limits this process to `nbytes` of GPU memory from now on, as torch allocates it."""
    import torch

    # torch refuses a device without an index here, and takes it for the current one elsewhere.
    index = torch.cuda.current_device() if device.index is None else device.index
    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(nbytes / total, 1.0), index)


def kernel_bytes() -> tuple[int, int] | None:
    """Returns the bytes that this process has read from and written to drives; None if Linux does not count them."""
    try:
        lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(lines["read_bytes"]), int(lines["write_bytes"])
    except (OSError, KeyError, ValueError):
        return None


# -- drives --------------------------------------------------------------------------------------------

_REQUEST_BYTES = 16 * MIB


class DriveSpeeds(NamedTuple):
    """Bytes a second of the drives by themselves: reading, writing, and both at once in equal parts."""

    read: float
    write: float
    mixed: float

    def as_json(self) -> dict[str, float]:
        return {f"{name}_gb_per_s": rounded(rate / 1e9) for name, rate in self._asdict().items()}

    def seconds(self, read_bytes: float, written_bytes: float) -> float:
        """Returns the least seconds to move these bytes: one direction after the other, or both at once."""
        # Equal numbers of bytes move at the mixed rate; the rest moves at the rate of its own direction.
        both = min(read_bytes, written_bytes)
        at_once = 2 * both / self.mixed + (read_bytes - both) / self.read + (written_bytes - both) / self.write
        return min(at_once, read_bytes / self.read + written_bytes / self.write)


def median_rates(rates: Sequence[DriveSpeeds]) -> DriveSpeeds:
    """Returns the median of each rate."""
    return DriveSpeeds(*(statistics.median(column) for column in zip(*rates, strict=True)))


@contextlib.contextmanager
def drive_rates(
    paths: Sequence[Path], nbytes: int, backend: str = "auto", block_bytes: int | None = None, depth: int | None = None
) -> Iterator[Callable[[], DriveSpeeds]]:
    """Yields a function that measures the rates of all drives together, with a queue and files like an engine's.

    `paths` are one file for each drive, created here and removed afterwards; together they, and a buffer in memory,
    have `nbytes`.
    """
    buffer = aligned_empty(nbytes)
    fill_with_noise(buffer)
    try:
        with StripedFile(paths, create=True) as file, IoQueue(backend, block_bytes=block_bytes, depth=depth) as queue:
            file.reserve(len(buffer))
            move(queue, file, buffer, "write", _REQUEST_BYTES)  # untimed: first writes are slower

            def rate(operation: str) -> float:
                # Two requests at least, so that a mixed pass reads and writes.
                request_bytes = min(_REQUEST_BYTES, align_up(len(buffer) // 2))
                passes = [move(queue, file, buffer, operation, request_bytes) for _ in range(3)]
                return statistics.median(one.nbytes / one.seconds for one in passes)

            yield lambda: DriveSpeeds(rate("read"), rate("write"), rate("mixed"))
    finally:
        for path in paths:
            remove(path)


# -- output --------------------------------------------------------------------------------------------


def row_json(row: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass for `--json`, with four digits of each float."""
    return {name: rounded(value) for name, value in dataclasses.asdict(row).items()}


def bars(names: Sequence[str], values: Sequence[float], ours: Sequence[bool], axis: Any) -> None:
    """Draws a bar with its value for each contender; ours are blue."""
    drawn = axis.barh(names, values, color=["tab:blue" if mine else "0.65" for mine in ours])
    axis.bar_label(drawn, [f"{value:.2f}" for value in values], padding=3, fontsize=8)


def save_figure(figure: Any, path: Path, **options: Any) -> None:
    """Writes a figure to a PNG, SVG or PDF file, and frees it."""
    figure.tight_layout()
    figure.savefig(path, dpi=120, **options)
    pyplot().close(figure)


def pyplot() -> ModuleType:
    """Returns matplotlib's pyplot, which then draws to files and needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
