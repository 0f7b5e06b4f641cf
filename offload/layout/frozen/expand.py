"""The values of frozen weights that are stored as blocks, made on the device behind the unit's partitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from offload.kernels.blocks import BLOCK_FORMATS, dequantize
from offload.layout.flat_layout import Segment, UnitLayout


def expander(layouts: Sequence[UnitLayout], dtype: torch.dtype) -> Callable[[int, torch.Tensor], None]:
    """Returns a function that makes the values of a unit's blocks, in the unit's own memory on the device.

    The function takes the index of the unit, and its memory, (nbytes,) uint8, in which the partitions of all ranks are.
    On an accelerator it submits its work to the current stream.

    Args:
        layouts: the layout of each unit.
        dtype: dtype of the weights.
    """
    rows = [
        [(segment, start) for segment, start in zip(layout.segments, layout.device_starts, strict=True) if segment.form]
        for layout in layouts
    ]

    def expand(unit: int, memory: torch.Tensor) -> None:
        flat = memory.view(dtype)
        for segment, start in rows[unit]:
            first = segment.start * dtype.itemsize
            values_of(segment, memory[first:], flat[start : start + segment.value_numel])

    return expand


def values_of(segment: Segment, memory: torch.Tensor, values: torch.Tensor) -> None:
    """Writes the values of a parameter into `values`.

    Args:
        segment: the parameter, which is stored as blocks.
        memory: uint8 that begin with its blocks.
        values: (value_numel,) in the dtype of the weights, on the same device.
    """
    form = BLOCK_FORMATS[segment.form]
    dequantize(form, memory[: form.stored_nbytes(segment.value_numel)], values)
