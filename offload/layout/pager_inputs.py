"""Inputs of the pager, and of `simulate`, which replays the pager: sizes of units, and limits of prefetching.

Pure functions of the results of `plan` and `placement`.
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
    """Returns the facts that the pager needs about each unit.

    Args:
        layouts: the layout of each unit.
        placement: the tiers of this rank's partitions.
        shares: this rank's trainable and frozen elements of each unit.
        mode: gives the dtype of the weights.
    """
    itemsize = mode.weight_dtype.itemsize
    sizes: list[UnitSize] = []
    for layout, tiers, parts in zip(layouts, placement.tiers, shares, strict=True):
        share = tuple(range(part.start * itemsize, part.stop * itemsize) for part in parts if part)
        sizes.append(UnitSize(layout.name, layout.numel * itemsize, tiers[State.WEIGHT], share))
    return sizes


def limits(config: Config, mode: Mode) -> Limits:
    """Returns the config's limits of the pager, in bytes of weights; None in a field means no limit."""
    zero, itemsize = config.zero_optimization, mode.weight_dtype.itemsize
    counts = (zero.stage3_prefetch_bucket_size, zero.stage3_max_reuse_distance)
    return Limits(*(None if count is None else count * itemsize for count in counts))
