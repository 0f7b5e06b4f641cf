"""What a run takes of the life that its drives are rated for."""

from __future__ import annotations

from dataclasses import dataclass

from offload.sizes import format_decimal, format_time

_TERA = 1e12


@dataclass(frozen=True, kw_only=True)
class Use:
    """What a drive has borne, and will have borne at the end."""

    path: str
    so_far_bytes: float
    at_end_bytes: float
    rated_bytes: float | None

    @property
    def share(self) -> float | None:
        """Of the rated life, at the end; None where nobody has said what it is."""
        return None if self.rated_bytes is None else self.at_end_bytes / self.rated_bytes


def foresee(path: str, so_far: float, a_step: float, steps_left: int, tbw: float | None) -> Use:
    """What a drive will have borne when `steps_left` more have written as much as those of now."""
    return Use(
        path=path,
        so_far_bytes=so_far,
        at_end_bytes=so_far + a_step * steps_left,
        rated_bytes=None if tbw is None else tbw * _TERA,
    )


def warning(use: Use, share: float, seconds_left: float) -> str | None:
    """What to say where a run would take more than `share` of a drive's rated life; None where it does not."""
    if use.share is None or use.share <= share:
        return None
    assert use.rated_bytes is not None
    return (
        f"warning: {use.path}: this run will have written {format_decimal(use.at_end_bytes)} to it in "
        f"{format_time(seconds_left)}, {use.share:.1%} of the {format_decimal(use.rated_bytes)} that it is rated for "
        f"(drive_tbw); asked to warn from {share:.0%} on (drive_share). More micro-batches a step write less for each "
        f"sample; states in RAM without a commit each step (offload_optimizer cpu, durability) are not written"
    )
