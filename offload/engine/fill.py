"""Moves the initial weights of a model into their tiers, one unit at a time."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from offload.aio import aligned_empty
from offload.aio.protocols import Future
from offload.distributed.world import World
from offload.engine.params import StorageForm
from offload.engine.shards import LocalShards, ResidentShard
from offload.fileio import naming_errors
from offload.layout.flat_layout import ParameterSegment, UnitLayout
from offload.layout.frozen import write_blocks
from offload.layout.modes import Mode
from offload.layout.optimizer_states import split
from offload.layout.placement import Placement
from offload.layout.tiers import Partitions
from offload.model_io.deferred import FirstValues, Origin, forget, make_deferred, origin_of
from offload.states import State, Tier
from offload.swapper.memory.device_arena import DeviceArena
from offload.swapper.memory.host_arena import HostArena

# -- forms ---------------------------------------------------------------------------------------------
#
# A form writes the first values of a segment to the memory of its unit, and empties the parameter.


class Values(StorageForm):
    """The form of weights that are stored in the dtype in which the model computes."""

    def __init__(self, segment: ParameterSegment) -> None:
        self.segment = segment

    def fill(self, model: nn.Module, chunk: range, flats: Mapping[State, torch.Tensor]) -> None:
        """Writes those first values of the segment that are in `chunk` to `flats`.

        `flats` contains the states of the masters of the chunk, each of shape (len(chunk),). A segment of bytes or
        codes is in one chunk.
        """
        segment = self.segment
        part = range(max(chunk.start - segment.start, 0), min(chunk.stop - segment.start, segment.numel))
        for position, values in self.pieces(model, part):
            first = segment.start + position - chunk.start
            split(values, {state: flat[first : first + len(values)] for state, flat in flats.items()})

    def pieces(self, model: nn.Module, part: range) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields the values in `part` of the segment, from an origin or from memory.

        Each item is a position in the segment and the values from there on, of shape (n,) on the CPU.
        """
        if not part:
            return
        parameter, first = model.get_parameter(self.segment.parameter), self.segment.first
        origin = origin_of(parameter)
        if origin is None:
            values = self.segment.of(parameter.detach()).reshape(-1)
            yield part.start, values[part.start : part.stop].to("cpu")
        else:
            for position, values in origin.pieces(range(first + part.start, first + part.stop)):
                yield part.start + position, values

    def memory(self, chunk: range, flats: Mapping[State, torch.Tensor]) -> torch.Tensor | None:
        """Returns the bytes of a segment that has no masters in a chunk of the unit; None if it is in another chunk."""
        begin = self.segment.start - chunk.start
        if begin not in range(len(chunk)):
            return None
        return flats[State.WEIGHT][begin : begin + self.segment.numel].view(torch.uint8)

    def empty(self, model: nn.Module, in_place: bool = False) -> None:
        """Frees the memory of the parameter, whose identity and ties stay; `in_place` if files contain the weights."""
        # The hooks make a parameter a placeholder of its shape; until then it has no memory.
        forget(model.get_parameter(self.segment.parameter))


class Codes(Values):
    """The form of a frozen weight that is stored as blocks of codes, because the config sets `"frozen"`."""

    def __init__(self, segment: ParameterSegment) -> None:
        super().__init__(segment)
        self.content = segment.form

    def fill(self, model: nn.Module, chunk: range, flats: Mapping[State, torch.Tensor]) -> None:
        memory = self.memory(chunk, flats)
        if memory is not None:
            pieces = self.pieces(model, range(self.segment.value_numel))
            write_blocks(self.segment.form, (values for _, values in pieces), memory)


# -- mending -------------------------------------------------------------------------------------------


class FirstWeights:
    """Makes a rank's frozen weights again from the model's files, to mend their slots; see `swapper.store.repair`."""

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        mode: Mode,
        shares: Sequence[tuple[range, range]],
        origins: Mapping[str, Origin],
    ) -> None:
        """`shares` are this rank's trainable and frozen elements of each unit, `origins` those of frozen parameters."""
        self._layouts, self._mode, self._shares, self._model = layouts, mode, shares, _Deferred(origins)

    def __call__(self, unit: int, start: int, nbytes: int) -> memoryview | None:
        """Returns frozen bytes of a partition as the first fill wrote them; None if the files lack a parameter.

        The memory belongs to the caller. Raises `StoreError` or `IoError` if the files cannot be read.
        """
        layout, (trainable, frozen) = self._layouts[unit], self._shares[unit]
        mode = layout.mode_in(self._mode)
        first = frozen.start + start // mode.weight_dtype.itemsize - len(trainable)
        wanted = range(first, first + nbytes // mode.weight_dtype.itemsize)
        segments = [
            segment for segment in layout.segments if segment.start < wanted.stop and wanted.start < segment.stop
        ]
        if any(segment.parameter not in self._model.origins or segment.inner for segment in segments):
            return None
        # The blocks of a parameter are written as a whole.
        coded = [segment for segment in segments if segment.form]
        chunk = range(
            min([wanted.start, *(segment.start for segment in coded)]),
            max([wanted.stop, *(segment.stop for segment in coded)]),
        )
        flats = {state: torch.zeros(len(chunk), dtype=dtype) for state, dtype in mode.weights.items()}
        for segment in segments:
            (Codes(segment) if segment.form else Values(segment)).fill(self._model, chunk, flats)
        buffer = aligned_empty(nbytes)
        part = flats[State.WEIGHT][wanted.start - chunk.start :][: len(wanted)]
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(part.view(torch.uint8))
        return buffer


class _Deferred(nn.Module):
    """Stands for a model whose parameters have origins, and no values."""

    def __init__(self, origins: Mapping[str, Origin]) -> None:
        super().__init__()
        self.origins = origins

    def get_parameter(self, target: str) -> nn.Parameter:
        parameter = nn.Parameter(torch.empty(self.origins[target].shape, device="meta"), requires_grad=False)
        make_deferred(parameter, self.origins[target])
        return parameter


# -- initial fill --------------------------------------------------------------------------------------


CHUNK = 1 << 24
"""Number of elements of a unit that are split into states at once. It is a power of two, so chunks begin at pages."""


def make_resident_shards(
    parts: Partitions, modes: Sequence[Mode], placement: Placement, host: HostArena, device: DeviceArena
) -> dict[tuple[int, State], ResidentShard]:
    """Allocates all partitions above DISK, except for weights and gradients, and fills them with zeros.

    A promoted state is also stored on DISK. It takes a buffer of the weight cache.
    """
    tiers = placement.tiers
    residents: dict[tuple[int, State], ResidentShard] = {}
    for unit, (row, mode) in enumerate(zip(parts.nbytes, modes, strict=True)):
        for state, nbytes in row.items():
            if state in (State.WEIGHT, State.GRAD) or tiers[unit][state] is Tier.DISK:
                continue
            if tiers[unit][state] is Tier.HOST:
                # A promoted state may leave HOST between steps, so it takes a buffer of the cache and keeps that as
                # `spare`.
                promoted = (unit, state) in placement.promoted
                host_buffer = host.weights.take_last(nbytes) if promoted else host.resident.take(nbytes)
                assert host_buffer is not None, (
                    "the arena classes were sized for the units of the host tier and for the promoted units"
                )
                resident = ResidentShard(
                    host_buffer.tensor(mode.states[state]), host_buffer.buffer, host_buffer if promoted else None
                )
            else:
                resident = ResidentShard(device.keep(nbytes).view(mode.states[state]), None)
            resident.tensor.zero_()
            residents[unit, state] = resident
    return residents


def _chunks(layout: UnitLayout) -> Iterator[range]:
    """Yields the elements of a unit in chunks of `CHUNK`. The last chunk contains all segments of bytes or codes."""
    start = 0
    while start + CHUNK <= layout.values_stop:
        yield range(start, start + CHUNK)
        start += CHUNK
    if start < layout.numel:
        yield range(start, layout.numel)


def fill_tiers(
    model: nn.Module,
    layouts: Sequence[UnitLayout],
    forms: Sequence[Sequence[Values]],
    shards: LocalShards,
    world: World,
    seed: int,
    in_place: Collection[int] = (),
    tables: Collection[str] = (),
) -> None:
    """Moves the weights of `model` into their tiers, and into the store if it keeps them.

    Deferred parameters are read from their origin, or initialized. Each parameter is emptied as soon as it has been
    copied. Temporary buffers hold the masters of one chunk of a unit. The host arena contains only partitions at this
    time: its caches, tiles and staging buffers are not used yet. Values of the units `in_place` stay in the model's own
    files. `tables` names the tables in pieces, whose module makes all values at once, in memory that the drive lends.

    Raises:
        ConfigError: if a deferred parameter has no initial value.
        IoError: if the drive has no room for the first values of a table.
    """
    nbytes: dict[State, int] = {}
    for index, layout in enumerate(layouts):
        room = 0 if index in in_place else max(map(len, _chunks(layout)), default=0)
        for state, dtype in shards.mode_of(index).weights.items():
            nbytes[state] = max(nbytes.get(state, 0), room * dtype.itemsize)
    buffers = {state: aligned_empty(most) for state, most in nbytes.items()}
    units = [
        [segment.parameter for segment in layout.segments] if index not in in_place else []
        for index, layout in enumerate(layouts)
    ]

    def new(name: str, parameter: torch.Tensor) -> torch.Tensor:
        if name in tables and shards.store.folders:
            return _in_file(parameter, shards.store.folders[0])
        return torch.empty_like(parameter, device="cpu")

    values = FirstValues(model, units, seed, new)
    order = list(values.order())
    last = {segment.parameter: index for index in order for segment in layouts[index].segments}
    for index in order:
        layout = layouts[index]
        # A stack of experts or a table in pieces has rows in several units, and is empty after the last of them.
        ending = [form for form in forms[index] if last[form.segment.parameter] == index]
        if index in in_place:
            for form in ending:
                form.empty(model, in_place=True)
            continue
        has_values = any(not model.get_parameter(segment.parameter).is_meta for segment in layout.segments)
        values.make(index)
        writes: dict[State, list[tuple[int, Future]]] = {}
        for chunk in _chunks(layout):
            flats: dict[State, torch.Tensor] = {}
            for state, dtype in shards.mode_of(index).weights.items():
                flats[state] = torch.frombuffer(buffers[state], dtype=dtype)[: len(chunk)]
                flats[state].zero_()
            for form in forms[index]:
                form.fill(model, chunk, flats)
            if has_values:  # weights that users give may differ between ranks; drawn weights do not
                for flat in flats.values():
                    world.ranks.broadcast(flat, 0)
            if world.replicated.size > 1:
                # Parameters that are not divided within a stage begin with the values of the stage's first process.
                for segment in layout.segments:
                    first, stop = max(segment.start, chunk.start), min(segment.stop, chunk.stop)
                    if first < stop and not world.is_sharded(segment.parameter):
                        for flat in flats.values():
                            world.replicated.broadcast(flat[first - chunk.start : stop - chunk.start], 0)
            _put(shards, index, chunk, flats, buffers, writes)
        if writes:
            shards.store.wrote(index, 0, writes)
        for form in ending:
            form.empty(model)


def _in_file(like: torch.Tensor, folder: Path) -> torch.Tensor:
    """Returns memory of a file without a name, which the kernel writes to the drive and takes back as it needs."""
    nbytes = like.numel() * like.itemsize
    with naming_errors(folder, "write", 0, nbytes), tempfile.TemporaryFile(dir=folder) as file:
        # A write to memory whose file has no room would end the process.
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=like.dtype).view(like.shape)


def _put(
    shards: LocalShards,
    unit: int,
    chunk: range,
    flats: Mapping[State, torch.Tensor],
    buffers: Mapping[State, memoryview],
    writes: dict[State, list[tuple[int, Future]]],
) -> None:
    """Copies this rank's elements of a chunk to their tiers. Moments need no copy: they are zero, also in new files.

    `buffers` are the memory of `flats`, aligned for the store. Adds the writes of the chunk to `writes`, each with its
    start in the partition, and returns when they have ended.
    """
    begun: list[Future] = []
    trainable, frozen = shards.shares[unit]
    for state, flat in flats.items():
        if state not in shards.states(unit):
            continue
        itemsize, before = flat.element_size(), 0
        resident = shards.resident_of(unit, state)
        for share in (trainable, frozen) if state is State.WEIGHT else (trainable,):
            both = range(max(share.start, chunk.start), min(share.stop, chunk.stop))
            if both:
                start = (before + both.start - share.start) * itemsize
                first, last = (both.start - chunk.start) * itemsize, (both.stop - chunk.start) * itemsize
                if resident is not None:
                    shards.device.copy(
                        resident.tensor.view(torch.uint8)[start : start + last - first],
                        flat.view(torch.uint8)[first:last],
                    )
                if shards.store.keeps(unit, state):
                    write = shards.store.write(unit, state, 0, start, buffers[state][first:last])
                    writes.setdefault(state, []).append((start, write))
                    begun.append(write)
            before += len(share)
    # All writes of the chunk are in flight together. They must end before the next chunk reuses the buffers.
    for write in begun:
        write.wait()
