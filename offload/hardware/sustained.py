"""The rate of a drive that is written for long: how many bytes it takes at its burst rate, and what comes after them.

Consumer drives write into a cache of fast cells first. A training writes for days, so its rate is the one after that.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from offload.aio import DirectFile, IoQueue, aligned_empty
from offload.aio.file import open_new
from offload.aio.measure import move, remove
from offload.errors import ConfigError
from offload.fileio import cache_file, read_cache, write_cache
from offload.hardware.info import drive as about_drive
from offload.hardware.info import machine as about_machine
from offload.hardware.info import temperature_of, used_percent_of
from offload.hardware.noise import fill_with_noise
from offload.records import parse
from offload.sizes import MIB, PAGE, format_decimal

GIGABYTES = 500
"""Default of the GB that are written at most: the caches of drives of 2 TB take 280 to 400."""
IDLE_SECONDS = 60.0
"""Seconds without writes, after which the recovery is measured."""
USUAL_TBW = 1200e12
"""Rated writes of a usual 2 TB drive."""
_SPARE = 0.1
"""Fraction of the free bytes that stays free for others."""
_CHUNKS, _LARGEST = 256, 256 * MIB
"""Chunks of a measurement at least, and the bytes of one at most."""
_SAMPLE_SECONDS = 0.25
"""Seconds of a sample at least: drives, and limits of the kernel, let bytes pass in bursts of a tenth of a second."""
_REQUEST = 16 * MIB
_FALLEN = 0.75
"""A rate below this fraction of the burst rate has fallen; a drive's noise is less."""
_SMOOTHED = 5
"""Samples of a running median, which hides single slow ones."""
_CONFIRMED = 12
"""Samples at the lower rate after which the rate has fallen for good, and at least this share of those before:"""
_CONFIRMED_SHARE = 0.15
_POINTS = 200
"""Samples of a curve that are kept at most."""


class Sample(NamedTuple):
    """Chunks that were written one after the other."""

    nbytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Returns bytes a second."""
        return self.nbytes / max(self.seconds, 1e-9)


class Fall(NamedTuple):
    """The point where a drive's rate of writes falls."""

    burst_bytes: int
    """Bytes written before it."""
    burst: float
    """Bytes a second before it."""
    after: float
    """Bytes a second after it."""


class Curve(NamedTuple):
    """A drive's rate of writes over the bytes written."""

    path: str
    device: str
    written: int
    """Bytes that the measurement wrote in all."""
    burst: float
    """Bytes a second before the fall, or of all samples if there is none."""
    burst_bytes: int | None
    """Bytes written before the fall; None if the rate did not fall."""
    after: float | None
    """Bytes a second after it."""
    idle_seconds: float | None
    recovered_bytes: int | None
    """Bytes written at the burst rate after those seconds without writes. None if nothing was left to write."""
    temperature: tuple[float, float] | None
    """Degrees Celsius at the beginning and at the end; None where they cannot be read."""
    used_percent: int | None
    """Used life by SMART, in percent; None where it cannot be read."""
    date: str
    points: tuple[tuple[int, float], ...]
    """Bytes written so far, and bytes a second since the point before."""

    def rate(self, written: float) -> float:
        """Returns the bytes a second after so many bytes without a pause. Beyond the curve its last rate is assumed."""
        if self.after is None or self.burst_bytes is None:
            return self.burst
        return self.burst if written < self.burst_bytes else self.after


def fall(samples: Sequence[Sample]) -> Fall | None:
    """Returns where the rate of the samples falls for the first time and for good; None if it does not.

    Two constant rates are fitted to the logarithms of the rates, in the sense of least squares. A drive that falls
    twice has the median of the last quarter of its samples as its rate after the fall.
    """
    if len(samples) < 2 * _CONFIRMED:
        return None
    rates = [sample.rate for sample in samples]
    half = _SMOOTHED // 2
    logs = np.log([statistics.median(rates[max(at - half, 0) : at + half + 1]) for at in range(len(rates))])
    count = np.arange(1, len(logs))
    # The sum of squares about two means is least where the squares of the two sums, by their counts, are most.
    before = np.cumsum(logs)[:-1]
    after = logs.sum() - before
    at = int(np.argmax(before**2 / count + after**2 / (len(logs) - count))) + 1
    enough = max(_CONFIRMED, math.ceil(_CONFIRMED_SHARE * at))
    if at < _CONFIRMED // 2 or len(rates) - at < enough:
        return None
    burst = statistics.median(rates[:at])
    last = statistics.median(rates[max(at, len(rates) * 3 // 4) :])
    if max(statistics.median(rates[at:]), last) > _FALLEN * burst:
        return None
    return Fall(sum(sample.nbytes for sample in samples[:at]), burst, last)


def measure(
    write: Callable[[int], float],
    nbytes: int,
    chunk: int,
    idle: Callable[[], float],
    tell: Callable[[str, float], None] = lambda *_: None,
) -> tuple[list[Sample], Fall | None, tuple[float, int] | None]:
    """Writes chunks until the rate has fallen, or `nbytes` are written. What is left measures the recovery.

    Args:
        write: writes the chunk with this number, and returns the seconds that it took.
        nbytes: bytes that are written at most.
        chunk: bytes of a chunk.
        idle: waits, and returns the seconds.
        tell: receives the measurement in words, and the fraction that is done.

    Returns:
        The samples before the wait; the fall; the seconds of the wait with the bytes then written at the burst rate.
    """
    samples: list[Sample] = []
    drop: Fall | None = None
    most, done = nbytes // chunk, 0

    def sample() -> Sample:
        nonlocal done
        seconds, first = 0.0, done
        while done < most and seconds < _SAMPLE_SECONDS:
            seconds += write(done)
            done += 1
        return Sample((done - first) * chunk, seconds)

    while done < most and drop is None:
        samples.append(sample())
        tell(f"{format_decimal(done * chunk)} written, {samples[-1].rate / 1e9:.2f} GB/s", done / most)
        drop = fall(samples)
    if drop is None or done == most:
        return samples, drop, None
    tell("the recovery while idle", done / most)
    seconds, recovered, slow = idle(), 0, list[Sample]()
    # Between both rates, in the sense of their ratio. Two slow samples in a row end the burst, one may be noise.
    least = math.sqrt(drop.burst * drop.after)
    while done < most and len(slow) < 2:
        latest = sample()
        if latest.rate < least:
            slow.append(latest)
        else:
            recovered += latest.nbytes + sum(sample.nbytes for sample in slow)
            slow.clear()
    return samples, drop, (seconds, recovered)


def check(folder: str, nbytes: int) -> None:
    """Raises `ConfigError` if the folder's file system has too little room for a file of `nbytes`."""
    about = about_drive(folder)
    if not about["o_direct"]:
        raise ConfigError(
            f"the file system of {folder} ({about['file_system']}) writes through memory alone, so its drive cannot be "
            f"measured; give a folder on ext4, XFS or btrfs"
        )
    room = int((1 - _SPARE) * about["free_bytes"])
    if nbytes < _CHUNKS * PAGE:
        raise ConfigError(f"expected --gigabytes of at least {_CHUNKS * PAGE / 1e9:g}, got {nbytes / 1e9:g}")
    if nbytes > room:
        raise ConfigError(
            f"{folder}: {format_decimal(about['free_bytes'])} are free, of which a tenth stays so, and "
            f"{format_decimal(nbytes)} have no room; give --gigabytes {room // 10**9} or less, or another folder"
        )


def warning(folder: str, nbytes: int) -> str:
    """Returns a sentence on what a measurement writes."""
    return (
        f"{folder}: writes up to {format_decimal(nbytes)} in a file that is removed afterwards, "
        f"{nbytes / USUAL_TBW:.2%} of the {USUAL_TBW / 1e12:.0f} TB for which a usual drive is rated; Ctrl-C ends it"
    )


def probe(
    folder: str, nbytes: int, tell: Callable[[str, float], None] = lambda *_: None, idle_seconds: float = IDLE_SECONDS
) -> Curve:
    """Measures the drive under `folder` by writing at most `nbytes` to a file of that length, which it removes."""
    chunk = min(max(nbytes // _CHUNKS // PAGE * PAGE, PAGE), _LARGEST)
    buffer = aligned_empty(chunk)
    fill_with_noise(buffer)
    path = Path(folder) / f".offload-probe.{os.getpid()}-{os.urandom(4).hex()}"
    about, warm, written = about_drive(folder), temperature_of(folder), 0
    try:
        with DirectFile(path, create=True, opener=open_new) as file, IoQueue() as queue:
            file.reserve(nbytes)

            def write(number: int) -> float:
                nonlocal written
                start = time.perf_counter()
                requests = [
                    queue.write(file, number * chunk + at, buffer[at : at + _REQUEST])
                    for at in range(0, chunk, _REQUEST)
                ]
                for request in requests:
                    request.wait()
                written += chunk
                return time.perf_counter() - start

            def idle() -> float:
                file.sync()
                time.sleep(idle_seconds)
                return idle_seconds

            # The first writes after an opening are slower, and a fall is not looked for in them.
            move(queue, file, buffer[: min(chunk, _REQUEST)], "write", _REQUEST)
            samples, fall, recovery = measure(write, nbytes, chunk, idle, tell)
    finally:
        remove(path)
    total = sum(sample.nbytes for sample in samples)
    hot = temperature_of(folder)
    return Curve(
        path=os.path.realpath(folder),
        device=about["device"],
        written=written,
        burst=total / sum(sample.seconds for sample in samples) if fall is None else fall.burst,
        burst_bytes=None if fall is None else fall.burst_bytes,
        after=None if fall is None else fall.after,
        idle_seconds=None if recovery is None else recovery[0],
        recovered_bytes=None if recovery is None else recovery[1],
        temperature=None if warm is None or hot is None else (warm, hot),
        used_percent=used_percent_of(folder),
        date=time.strftime("%Y-%m-%d"),
        points=tuple(_points(samples)),
    )


def _points(samples: Sequence[Sample]) -> list[tuple[int, float]]:
    size, points, written = math.ceil(len(samples) / _POINTS), list[tuple[int, float]](), 0
    for at in range(0, len(samples), size):
        group = samples[at : at + size]
        nbytes = sum(sample.nbytes for sample in group)
        written += nbytes
        points.append((written, nbytes / sum(sample.seconds for sample in group)))
    return points


def lines(curve: Curve) -> list[tuple[str, str]]:
    """Returns a curve for people, as pairs of name and value."""
    rows = [("drive", f"{curve.path} ({curve.device})")]
    if curve.burst_bytes is None or curve.after is None:
        rows.append(("writes", f"{curve.burst / 1e9:.2f} GB/s; no fall within {format_decimal(curve.written)}"))
    else:
        rows.append(("burst", f"{curve.burst / 1e9:.2f} GB/s for {format_decimal(curve.burst_bytes)}"))
        rows.append(("after", f"{curve.after / 1e9:.2f} GB/s"))
    if curve.recovered_bytes is not None:
        words = f"{format_decimal(curve.recovered_bytes)} at the burst rate after {curve.idle_seconds:.0f} s idle"
        rows.append(("recovery", words))
    if curve.temperature is not None:
        rows.append(("heat", f"{curve.temperature[0]:.0f} degrees Celsius before, {curve.temperature[1]:.0f} after"))
    if curve.used_percent is not None:
        rows.append(("used", f"{curve.used_percent} % of the drive's life, by SMART"))
    return rows


# -- cache ---------------------------------------------------------------------------------------------

_VERSION = 1


def cache_path() -> Path:
    """Returns the path of this machine's curves, beside the cache of `offload probe`."""
    return cache_file("sustained")


def keep(curve: Curve) -> Path:
    """Caches a curve for the planner, beside those of other drives, and returns the path."""
    others = [other for other in kept() if other.path != curve.path]
    content = {"version": _VERSION, **_machine(), "curves": [one_curve._asdict() for one_curve in (*others, curve)]}
    write_cache(cache_path(), json.dumps(content, indent=2) + "\n")
    return cache_path()


def kept() -> list[Curve]:
    """Returns the cached curves; none if there are none, or if they are of another machine."""
    # A missing or damaged cache is no curve: the next probe replaces it.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = parse(read_cache(cache_path()))
        if content["version"] == _VERSION and all(content[key] == value for key, value in _machine().items()):
            for curve in content["curves"]:
                curve["points"] = tuple(map(tuple, curve["points"]))
                curve["temperature"] = curve["temperature"] and tuple(curve["temperature"])
            return [Curve(**curve) for curve in content["curves"]]
    return []


def curve_under(folder: str) -> Curve | None:
    """Returns the curve measured in `folder`, or else in another folder of its file system; None without any."""
    path = os.path.realpath(folder)
    if not os.path.isdir(path):
        return None
    here = [curve for curve in kept() if os.path.isdir(curve.path)]
    system = os.stat(path).st_dev
    same = [curve for curve in here if os.stat(curve.path).st_dev == system]
    return next((curve for curve in same if curve.path == path), same[-1] if same else None)


def _machine() -> dict[str, Any]:
    about = about_machine()
    return {key: about[key] for key in ("processor", "cores")}
