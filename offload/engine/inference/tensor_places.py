"""Tensors of a model that can be read in place: their bytes in its files are those that the model computes with."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from offload.engine.params.deferred_parameter import is_deferred, origin_of
from offload.engine.params.opaque.paged_tensor import PagedTensor
from offload.fileio.stamp import Stamp
from offload.layout.flat_layout import Segment, UnitLayout
from offload.layout.frozen import OWN, inner_starts, inner_tensors_of, opaque_parameters
from offload.layout.modes import Mode, dtype_name
from offload.model_io.folder import FileBytes, Run, Stored
from offload.model_io.load import Converted
from offload.swapper.store.model_files import FileRange, UnitImage, image_of

_MOST_RUNS = 64
"""Runs of a parameter in the files, each of which is a copy to the device, up to which it is read in place."""


class TensorPlaces:
    """Places of a model's tensors in its files. Made before an engine takes the model over."""

    def __init__(self, model: nn.Module, small_numel: int) -> None:
        """Collects the files.

        Args:
            model: the model, whose parameters may be deferred.
            small_numel: units of at most so many elements stay on the device, and are read once.
        """
        self._model, self._small_numel = model, small_numel
        self.stamps: dict[str, Stamp] = {}
        """Stamp of each file as its header was read, by path without links."""
        every = [stored for parameter in model.parameters() for stored in _tensors_of(origin_of(parameter))]
        for name in opaque_parameters(model):
            every += _inner_tensors(model, name).values()
        for stored in every:
            self.stamps[os.path.realpath(stored.path)] = stored.stamp

    def images(self, layouts: Sequence[UnitLayout], mode: Mode) -> tuple[UnitImage | None, ...]:
        """Returns each unit as it lies in the files; None for a unit that is not read there."""
        return tuple(self._image(layout, mode.weight_dtype) for layout in layouts)

    def _image(self, layout: UnitLayout, dtype: torch.dtype) -> UnitImage | None:
        """Returns the image of a unit, or None."""
        small = layout.device_numel <= self._small_numel
        if small or any(self.why_not(segment, dtype) is not None for segment in layout.segments):
            return None
        tensors = [each for segment in layout.segments for each in self._ranges(segment, dtype.itemsize)]
        image = image_of(tensors, {path: stamp.nbytes for path, stamp in self.stamps.items()})
        return image if image.nbytes else None  # empty parameters need no file

    def _ranges(self, segment: Segment, itemsize: int) -> Iterator[tuple[FileRange, int]]:
        """Yields the bytes in the files that make up a parameter, each with their first byte in the unit."""
        target = segment.start * itemsize
        if segment.inner:
            starts = inner_starts(segment.inner)
            for name, stored in _inner_tensors(self._model, segment.name).items():
                if name in starts:  # another name of the same tensor has no bytes of its own
                    place = FileRange(os.path.realpath(stored.path), stored.place.offset, stored.place.tensor.nbytes)
                    yield place, target + starts[name]
            return
        for stored, start, numel in self._runs(segment):
            nbytes = numel * itemsize
            yield FileRange(os.path.realpath(stored.path), stored.place.offset + start * itemsize, nbytes), target
            target += nbytes

    def _runs(self, segment: Segment) -> list[Run]:
        """Returns the elements of the files that make up a parameter, or an expert's row of one."""
        origin = origin_of(self._model.get_parameter(segment.parameter))
        assert isinstance(origin, Stored | Converted)
        return origin.runs(range(segment.first, segment.first + segment.numel))

    def why_not(self, segment: Segment, dtype: torch.dtype) -> str | None:
        """Returns the reason, a clause after the parameter's name, why it cannot be read in place; None if it can.

        Args:
            segment: the parameter in its unit.
            dtype: dtype in which the model computes.
        """
        if segment.form:
            return "is quantized"
        if segment.inner:
            return None if OWN in _inner_tensors(self._model, segment.name) else "is quantized, and in memory already"
        parameter = self._model.get_parameter(segment.parameter)
        origin = origin_of(parameter)
        if origin is None:
            return "is made by its module" if is_deferred(parameter) else "is in memory already"
        other = next((stored.dtype for stored in _tensors_of(origin) if stored.dtype != dtype), None)
        if other is not None:
            return f"is stored as {str(other).removeprefix('torch.')}, not as {dtype_name(dtype)}"
        if segment.numel and not 0 < len(self._runs(segment)) <= _MOST_RUNS:
            return "is made of other tensors of the files"
        return None


def _inner_tensors(model: nn.Module, name: str) -> dict[str, Stored]:
    """Returns those inner tensors of a quantized parameter that are in a file, such as its codes and scales."""
    owner = model.get_submodule(name.rpartition(".")[0])
    sources = {
        inner: tensor.source
        for inner, tensor in inner_tensors_of(model.get_parameter(name), owner).items()
        if isinstance(tensor, PagedTensor)
    }
    return {inner: source.stored for inner, source in sources.items() if isinstance(source, FileBytes)}


def _tensors_of(origin: Any) -> Sequence[Stored]:
    """Returns the tensors of the files that are read for an origin."""
    if isinstance(origin, Converted):
        return [stored for stored, _ in origin.conversion.parts]
    return [origin] if isinstance(origin, Stored) else []
