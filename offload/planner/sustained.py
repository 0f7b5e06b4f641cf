"""The step of a plan at the rates that its drives sustain, beside the one at their burst rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from offload.hardware.sustained import curve_under
from offload.planner.hardware import Drive
from offload.planner.recommend import Planned
from offload.planner.step_time import predict

USUAL = 2.5e9
"""Bytes a second that a good drive of 2 TB writes, by reviews, when its cache of fast cells is full."""
_WHEN = {"in the first minute": 60.0, "after an hour": 3600.0, "after a day": 86400.0}


class SustainedSteps(NamedTuple):
    """Seconds of a step at the rates that drives sustain."""

    measured: bool
    """True if all drives have a curve; else the rates of the plan are burst rates that nobody verified."""
    seconds: dict[str, float]
    """By the words for the time since the start, or for the rate that is assumed."""
    by_written: tuple[tuple[float, float], ...] = ()
    """Bytes that the run has written since its start, to all drives together, from which a step takes so many seconds.

    Ascending, the first ones 0; empty without a curve of each drive.
    """


def sustained_steps(planned: Planned, assumed: bool = True) -> SustainedSteps | None:
    """Returns the step at sustained rates, by `offload probe --sustained`; None if nothing is written.

    Without a curve of each drive it has the step at `USUAL`, if that is `assumed`.
    """
    drives = planned.hardware.drives
    if not drives or not planned.timing.moved.written:
        return None
    curves = [curve_under(drive.name) for drive in drives]
    known = [curve for curve in curves if curve is not None]
    if len(known) < len(drives):
        slower = tuple(_written_at(drive, USUAL) for drive in drives) if assumed else drives
        return SustainedSteps(False, {} if slower == drives else {"at 2.5 GB/s of writes": _seconds(planned, slower)})
    # Files are striped, so each drive takes an equal share of what the run writes.
    falls = sorted({curve.burst_bytes for curve in known if curve.burst_bytes is not None})
    by_written = tuple(
        (
            float(share * len(drives)),
            _seconds(
                planned,
                tuple(_written_at(drive, curve.rate(share)) for drive, curve in zip(drives, known, strict=True)),
            ),
        )
        for share in (0, *falls)
    )
    a_second = planned.timing.moved.written / planned.timing.seconds
    return SustainedSteps(
        True, {words: step_seconds(by_written, a_second * seconds) for words, seconds in _WHEN.items()}, by_written
    )


def step_seconds(by_written: Sequence[Sequence[float]], written: float) -> float:
    """Returns the seconds of a step after a run has written so many bytes; `by_written` as of `SustainedSteps`."""
    return next(seconds for least, seconds in reversed(by_written) if least <= written)


def _written_at(drive: Drive, rate: float) -> Drive:
    """Returns the drive with a lower rate of writes; a higher one changes nothing."""
    if rate >= drive.write:
        return drive
    # The drive that writes more slowly reads beside its writes as before: for the same fraction of the shorter of both.
    read, write, slower = 1 / drive.read, 1 / drive.write, 1 / rate
    beside = min(max((read + write - 2 / drive.mixed) / min(read, write), 0.0), 1.0)
    mixed = 2 / (read + slower - beside * min(read, slower))
    return drive._replace(write=rate, mixed=min(drive.mixed, mixed))


def _seconds(planned: Planned, drives: tuple[Drive, ...]) -> float:
    if drives == planned.hardware.drives:
        return planned.timing.seconds
    return predict(planned.memory, planned.shape, replace(planned.hardware, drives=drives), planned.load).seconds
