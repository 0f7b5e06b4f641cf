"""Weights that ranks gather as codes, decided from the layouts alone.

    a unit:  [ trainable region       | frozen region: values               | bytes of others, blocks of codes ]
               zero_quantized_weights   zero_quantized_nontrainable_weights

Both regions are divided evenly among the ranks, wherever that cuts a parameter. A frozen region with a parameter that
is not stored as values is gathered as it is: its bytes are codes already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from offload.config import Config
from offload.layout.collectives.reduction import CODES
from offload.layout.flat_layout import UnitLayout
from offload.sizes import align_up


class CodedGathers(NamedTuple):
    """The elements of each unit that ranks gather as codes."""

    dtype: torch.dtype
    """Dtype of the weights."""
    elements: tuple[range, ...]
    """For each unit whole regions; may be empty."""
    largest: int
    """Elements of the largest region."""

    @property
    def nbytes(self) -> int:
        """Bytes of the device memory for the codes of a gather."""
        return align_up(CODES.stored_nbytes(self.largest))


def coded_gathers(
    config: Config, layouts: Sequence[UnitLayout], dtype: torch.dtype, shards: int
) -> CodedGathers | None:
    """Returns what the ranks of a replica gather as codes; None for nothing.

    Args:
        config: the config.
        layouts: the layout of each unit.
        dtype: dtype of the weights.
        shards: number of ranks of a replica.
    """
    zero = config.zero_optimization
    elements, largest = [], 0
    for layout in layouts:
        stop = layout.trainable_stop
        trains = range(stop if zero.zero_quantized_weights else 0)
        in_values = layout.values_stop == layout.numel
        frozen = range(stop, layout.numel if zero.zero_quantized_nontrainable_weights and in_values else stop)
        largest = max(largest, len(trains), len(frozen))
        elements.append(range(0 if trains else frozen.start, frozen.stop if frozen else trains.stop))
    return CodedGathers(dtype, tuple(elements), largest) if largest and shards > 1 else None
