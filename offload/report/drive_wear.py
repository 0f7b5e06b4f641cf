"""Wear of drives: bytes that a run writes in relation to the drives' rated endurance."""

from __future__ import annotations

from dataclasses import dataclass

from offload.sizes import format_decimal, format_time

_TERA = 1e12


@dataclass(frozen=True, kw_only=True)
class DriveUse:
    """Bytes written to a drive so far and predicted for the end of the run."""

    path: str
    so_far_bytes: float
    at_end_bytes: float
    rated_bytes: float | None

    @property
    def share(self) -> float | None:
        """Returns the fraction of the rated endurance used at the end; None if the rating is unknown."""
        return None if self.rated_bytes is None else self.at_end_bytes / self.rated_bytes


def forecast(path: str, so_far: float, a_step: float, steps_left: int, tbw: float | None) -> DriveUse:
    """Predicts the bytes written to a drive at the end of a run.

    Args:
        path: folder on the drive.
        so_far: bytes written so far.
        a_step: bytes that each further step writes.
        steps_left: further steps.
        tbw: rated endurance in terabytes; None if unknown.
    """
    return DriveUse(
        path=path,
        so_far_bytes=so_far,
        at_end_bytes=so_far + a_step * steps_left,
        rated_bytes=None if tbw is None else tbw * _TERA,
    )


def warning(use: DriveUse, share: float, seconds_left: float) -> str | None:
    """Returns a warning if a run will use more than the fraction `share` of a drive's endurance, else None."""
    if use.share is None or use.share <= share:
        return None
    assert use.rated_bytes is not None
    return (
        f"warning: {use.path}: at its end, in {format_time(seconds_left)}, this run will have written "
        f"{format_decimal(use.at_end_bytes)} to this drive, {use.share:.1%} of its rated "
        f"{format_decimal(use.rated_bytes)} (drive_tbw); the warning is set to {share:.0%} (drive_share). More "
        f"micro-batches a step write less for each sample. States in RAM without a commit each step "
        f"(offload_optimizer cpu, durability) are not written"
    )
