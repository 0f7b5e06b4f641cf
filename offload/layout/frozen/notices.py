"""Lines for the user on frozen weights that are not stored as values."""

from __future__ import annotations

from collections.abc import Sequence

from offload.layout.flat_layout import UnitLayout
from offload.notices import Remark
from offload.sizes import count_of, format_size


def frozen_notices(form: str | None, layouts: Sequence[UnitLayout], itemsize: int) -> tuple[str, ...]:
    """Returns a line on the frozen weights that are stored as blocks, or on why there are none.

    Args:
        form: the key "frozen" of the config.
        layouts: the units.
        itemsize: bytes of a weight.
    """
    as_bytes = _bytes_notices(layouts, itemsize)
    if form is None:
        return as_bytes
    blocks = [segment for layout in layouts for segment in layout.segments if segment.form]
    if not blocks:
        no_effect = f'"frozen": "{form}" has no effect: the model has no frozen matrix of a linear layer'
        return (*as_bytes, f"{no_effect} in values" if as_bytes else no_effect)
    stored, values = (sum(numel) * itemsize for numel in zip(*((s.numel, s.value_numel) for s in blocks), strict=True))
    matrices = count_of(len(blocks), "frozen matrix is", "frozen matrices are")
    return (
        *as_bytes,
        Remark(f"{matrices} stored in {form}: {format_size(stored)} instead of {format_size(values)}"),
    )


def _bytes_notices(layouts: Sequence[UnitLayout], itemsize: int) -> tuple[str, ...]:
    """Returns a line on the frozen weights that another library has quantized, if there are any."""
    found = [segment for layout in layouts for segment in layout.segments if segment.inner]
    if not found:
        return ()
    nbytes = sum(segment.numel for segment in found) * itemsize
    weights = count_of(len(found), "quantized weight is", "quantized weights are")
    return (Remark(f"{weights} stored as the model has {'it' if len(found) == 1 else 'them'}: {format_size(nbytes)}"),)
