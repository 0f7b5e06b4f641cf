"""Tensors of a model that can be read in place: the model computes with the same bytes that its files contain."""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.fileio.cache_file import Stamp
from offload.fileio.inner_files import sampled_crc32
from offload.layout.flat_layout import ParameterSegment, UnitLayout
from offload.layout.frozen import OWN, inner_starts, inner_tensors_of, quantized_by_other_library
from offload.layout.modes import Mode, dtype_name
from offload.model_io.deferred import is_deferred, origin_of
from offload.model_io.folder import FileBytes, Stored, StoredRun
from offload.model_io.load import ConvertedParameter
from offload.quantized.paged_tensor import PagedTensor
from offload.sizes import MIB
from offload.swapper.store.model_files import FileRange, InPlaceLayout, arrange_in_place

_MOST_RUNS, _LEAST_RUN = 64, MIB // 4
"""A parameter that is read in place is at most so many runs in the files, or runs of so many elements on average: each
costs a copy to the device."""


class TensorPlaces:
    """Places of a model's tensors in its files. Made before an engine takes the model over."""

    def __init__(self, model: nn.Module, small_numel: int = 0, *, quantized: bool = True) -> None:
        """Collects the files.

        Units of at most `small_numel` elements stay on the device, and are read once. Without `quantized`, weights that
        another library has quantized are not read in place.
        """
        self._model, self._small_numel, self._quantized = model, small_numel, quantized
        self.stamps: dict[str, Stamp] = {}
        """Stamp of each file as its header was read, by path without links."""
        for _, stored in _tensors_in_files(model):
            self.stamps[os.path.realpath(stored.path)] = stored.stamp

    def frozen(self, dtype: torch.dtype, in_fp32: Collection[str], other: Collection[str]) -> frozenset[str]:
        """Returns the frozen parameters that can be read in place, by first name, if others of their unit are trained.

        `dtype` is that of the run's weights. Parameters `in_fp32` stay in fp32, and those of `other` are codes.
        """
        return frozenset(
            name
            for name, parameter in self._model.named_parameters()
            if not parameter.requires_grad
            and name not in other
            and self._why_not(name, torch.float32 if name in in_fp32 else dtype) is None
        )

    def in_place_layouts(
        self, layouts: Sequence[UnitLayout], mode: Mode, asked: Sequence[int] = (0,), shards: int = 1
    ) -> list[tuple[InPlaceLayout | None, ...]]:
        """Returns, for each of the `asked` of the `shards`, its place of each unit in the files.

        None stands for a unit that is not read from the files, for any shard. Empty if no unit is read from them.
        """
        sizes = {path: stamp.nbytes for path, stamp in self.stamps.items()}
        units: list[Sequence[InPlaceLayout | None]] = []
        for layout in layouts:
            dtype, segments = layout.mode_in(mode).weight_dtype, layout.segments
            of_shards: list[InPlaceLayout] = []
            small = layout.device_numel <= self._small_numel
            if not small and all(self.why_not(segment, dtype) is None for segment in segments):
                tensors = [place for segment in segments for place in self._ranges(segment, dtype.itemsize)]
                for number in range(shards):
                    share = layout.frozen(number, shards)
                    nbytes = range(share.start * dtype.itemsize, share.stop * dtype.itemsize)
                    # A shard of padding alone receives one byte: its upload waits for the last use of the memory.
                    padding = [(place._replace(nbytes=1), nbytes.start) for place, _ in tensors[:1]]
                    of_shards.append(arrange_in_place(list(_within(tensors, nbytes)) or padding, sizes))
            # Empty parameters need no file.
            whole = bool(of_shards) and all(one.nbytes and one.aligned for one in of_shards)
            units.append([of_shards[number] if whole else None for number in asked])
        return list(zip(*units, strict=True)) if any(map(any, units)) else [()] * len(asked)

    def described(self) -> list[Any]:
        """Returns, as JSON, what distinguishes the files and the parameters in them from those of another rank."""
        names = [name for name, parameter in self._model.named_parameters() if origin_of(parameter) is not None]
        files = [[stamp.nbytes, sampled_crc32(Path(path))] for path, stamp in self.stamps.items()]
        return [files, zlib.crc32("\n".join(names).encode())]

    def _ranges(self, segment: ParameterSegment, itemsize: int) -> Iterator[tuple[FileRange, int]]:
        """Yields the ranges of bytes in the files that make up a parameter, each with its first byte in the unit."""
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

    def _runs(self, segment: ParameterSegment) -> list[StoredRun]:
        """Returns the runs of elements in the files that make up a parameter, or an expert's row of a parameter."""
        origin = origin_of(self._model.get_parameter(segment.parameter))
        assert isinstance(origin, Stored | ConvertedParameter)
        return origin.runs(range(segment.first, segment.first + segment.numel))

    def why_not(self, segment: ParameterSegment, dtype: torch.dtype) -> str | None:
        """Returns why a parameter cannot be read in place, as a clause after its name; None if it can."""
        if segment.trainable:
            return "is trained"
        if segment.form:
            return "is quantized"
        if segment.inner:
            if not self._quantized:
                return "is quantized by another library"
            return None if OWN in _inner_tensors(self._model, segment.name) else "is quantized, and in memory already"
        if (reason := self._why_not(segment.parameter, dtype)) is not None:
            return reason
        runs = self._runs(segment)
        if segment.numel and not (runs and (len(runs) <= _MOST_RUNS or segment.numel >= len(runs) * _LEAST_RUN)):
            return "is made of other tensors of the files"
        return None

    def _why_not(self, name: str, dtype: torch.dtype) -> str | None:
        """Returns `why_not` of a parameter in values, whatever its part."""
        parameter = self._model.get_parameter(name)
        origin = origin_of(parameter)
        if origin is None:
            return "gets its first values from its module" if is_deferred(parameter) else "is in memory already"
        if not isinstance(origin, Stored | ConvertedParameter):
            return "is merged with an adapter"
        stored_dtype = next((stored.dtype for stored in _tensors_of(origin) if stored.dtype != dtype), None)
        if stored_dtype is not None:
            return f"is stored as {str(stored_dtype).removeprefix('torch.')}, not as {dtype_name(dtype)}"
        return None


def frozen_tensors(model: nn.Module) -> list[Stored]:
    """Returns the tensors in files of which frozen parameters will be made, before an engine takes the model over."""
    return [stored for parameter, stored in _tensors_in_files(model) if not parameter.requires_grad]


def _tensors_in_files(model: nn.Module) -> Iterator[tuple[nn.Parameter, Stored]]:
    for parameter in model.parameters():
        yield from ((parameter, stored) for stored in _tensors_of(origin_of(parameter)))
    for name in quantized_by_other_library(model):
        yield from ((model.get_parameter(name), stored) for stored in _inner_tensors(model, name).values())


def _within(tensors: Sequence[tuple[FileRange, int]], part: range) -> Iterator[tuple[FileRange, int]]:
    """Yields the parts of tensors that are within `part` of the bytes of their unit."""
    for (path, start, nbytes), target in tensors:
        first, stop = max(target, part.start), min(target + nbytes, part.stop)
        if first < stop:
            yield FileRange(path, start + first - target, stop - first), first


def _inner_tensors(model: nn.Module, name: str) -> dict[str, Stored]:
    """Returns the inner tensors of a quantized parameter, such as codes and scales, that are in a file."""
    owner = model.get_submodule(name.rpartition(".")[0])
    sources = {
        inner: tensor.source
        for inner, tensor in inner_tensors_of(model.get_parameter(name), owner).items()
        if isinstance(tensor, PagedTensor)
    }
    return {inner: source.stored for inner, source in sources.items() if isinstance(source, FileBytes)}


def _tensors_of(origin: Any) -> Sequence[Stored]:
    """Returns the tensors of the files that are read for an origin."""
    if isinstance(origin, ConvertedParameter):
        return [stored for stored, _ in origin.conversion.parts]
    return [origin] if isinstance(origin, Stored) else []
