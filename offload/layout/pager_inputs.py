"""What a plan is to the pager, and to `simulate`, which plays it: sizes of units, costs of updates, room for leases.

Pure functions of what `plan` and `placement` have decided.
"""

from __future__ import annotations

from collections.abc import Sequence

from offload.config import Config
from offload.layout.flat_layout import UnitLayout
from offload.layout.placement import Placement
from offload.states import State
from offload.swapper.modes import Mode
from offload.swapper.policy import Limits
from offload.swapper.unit_table import UnitSize


def unit_sizes(
    layouts: Sequence[UnitLayout], placement: Placement, shares: Sequence[tuple[range, range]], mode: Mode
) -> list[UnitSize]:
    """What the pager must know of each unit; `shares` are this rank's trainable and frozen elements."""
    itemsize = mode.weight_dtype.itemsize
    sizes: list[UnitSize] = []
    for layout, homes, parts in zip(layouts, placement.homes, shares, strict=True):
        share = tuple(range(part.start * itemsize, part.stop * itemsize) for part in parts if part)
        sizes.append(UnitSize(layout.name, layout.numel * itemsize, homes[State.WEIGHT], share))
    return sizes


def limits(config: Config, mode: Mode) -> Limits:
    """What the config asks of the pager, in bytes of weights."""
    zero, itemsize = config.zero_optimization, mode.weight_dtype.itemsize
    counts = (zero.stage3_prefetch_bucket_size, zero.stage3_max_reuse_distance)
    return Limits(*(None if count is None else count * itemsize for count in counts))
