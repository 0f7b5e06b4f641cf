"""Gathers weights as values or as codes of 8 bits, over all ranks or within a node.

    WeightGathers         values, over all ranks of a replica
    JoinedWeightGathers   values of several units at a time, over the same ranks
    CodedWeightGathers    codes, over the same ranks (qwZ of ZeRO++, arXiv 2306.10209)
    NodeGathers           one of these for the first gather, then within a node (hpZ of ZeRO++)
    ExpertGathers         experts among the ranks that own them, all other units by one of these

One thread at a time may call a gather: the thread that makes all collectives.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Sequence

import torch

from offload.distributed.process_group import Ranks
from offload.interrupts import uninterrupted
from offload.kernels.blocks import dequantize, quantize
from offload.layout.tiers import CODES, CodedGathers, NodeShards, join
from offload.swapper.memory.device import DONE, Device, Event, Later
from offload.swapper.table import UnitSize

# -- weights -------------------------------------------------------------------------------------------


class WeightGathers:
    """Gathers of values."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def gather(self, unit: int, unsharded: torch.Tensor, shard_ranges: Sequence[range], uploaded: Event) -> Event:
        """Fills `unsharded` with the partition of every rank of this replica; see `Ranks.gather`."""
        return self.ranks.gather(unsharded, shard_ranges, uploaded)

    def join(self, units: Sequence[int]) -> Sequence[int]:
        """Returns the first of `units`, which are gathered next, and those after it that the same collective gathers.

        Every rank calls `gather` for all of them before anything waits for one. After an exception the next call
        returns the units that are left.
        """
        return units[:1]

    def forget(self) -> None:
        """Drops kept weights, because weights may change now. Every rank calls this between the same two gathers."""


class JoinedGather(Later):
    """The weights of several units that one collective gathers, as an `Event`.

    On an accelerator the upload stream fills the units. Otherwise the first thread that waits does.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._filled = False

    def begin(self, fill: Callable[[], None]) -> None:
        """Stores `fill`, which waits for the collective, and copies the weights to their units."""
        self._fill = fill

    def done(self) -> bool:
        """Returns True if the weights are in their units."""
        return self._filled if self.known is None else self.known.done()

    @uninterrupted
    def wait(self) -> None:
        if self.known is not None:
            self.known.wait()
            return
        # any thread: whoever holds the lock waits for other ranks, with an end if one is lost.
        with self._lock:
            if not self._filled:
                self._fill()
                self._filled = True


class JoinedWeightGathers(WeightGathers):
    """Gathers of values, several small units at a time (`allgather_bucket_size`).

        this rank's shards of some units ─► one buffer ─► all-gather ─► the shards of each unit, of all ranks

    Only gathers whose order all ranks know are joined. The weights are copied twice more, which small units can afford.
    """

    def __init__(self, ranks: Ranks, device: Device, sizes: Sequence[UnitSize], memory: torch.Tensor) -> None:
        """Stores `memory`, device memory for the weights of a collective, uint8."""
        super().__init__(ranks)
        self._device, self._memory = device, memory
        # What the device computes from the gathered bytes of a unit would be computed before they are there.
        self._alone = {unit for unit, size in enumerate(sizes) if size.expanded_nbytes}
        self._nbytes = [size.nbytes for size in sizes]
        self._units: tuple[int, ...] = ()
        """Units of a collective that has not begun."""
        self._shards: dict[int, tuple[torch.Tensor, Sequence[range]]] = {}
        """For each of these units that has asked for its gather, its memory and this rank's ranges in it."""
        self._gather: Event = DONE
        """The last collective."""

    def join(self, units: Sequence[int]) -> Sequence[int]:
        if not self._units:
            if not self.ranks.on_gpu:  # else the upload stream orders the next use of the memory after the copies
                self._gather.wait()
            own = next((number for number, unit in enumerate(units) if unit in self._alone), len(units))
            together = join(units[: max(own, 1)], self._nbytes, len(self._memory))
            if len(together) == 1:
                return together
            self._units, self._shards, self._gather = together, {}, JoinedGather()
        return [unit for unit in self._units if unit not in self._shards]

    def gather(self, unit: int, unsharded: torch.Tensor, shard_ranges: Sequence[range], uploaded: Event) -> Event:
        if unit not in self._units:
            return super().gather(unit, unsharded, shard_ranges, uploaded)
        if not self.ranks.on_gpu:  # else the upload stream orders the copies of `_begin` after that of the shard
            uploaded.wait()
        self._shards[unit] = unsharded, shard_ranges
        gather = self._gather
        assert isinstance(gather, JoinedGather)
        if len(self._shards) == len(self._units):
            self._begin(gather)
            self._units = ()
        return gather

    def _begin(self, gather: JoinedGather) -> None:
        shards, pieces = self.ranks.mesh.shards, list[tuple[torch.Tensor, range]]()
        for unsharded, ranges in self._shards.values():
            pieces += [(unsharded, own) for own in ranges]
        nbytes = sum(len(own) for _, own in pieces)
        everyone = self._memory[: shards * nbytes].view(shards, nbytes)
        own_row = everyone[self.ranks.shard]

        def copy_out() -> None:
            at = 0
            for unsharded, own in pieces:
                first = own.start - self.ranks.shard * len(own)
                region = unsharded[first : first + shards * len(own)].view(shards, len(own))
                region.copy_(everyone[:, at : at + len(own)])
                at += len(own)

        # upload stream: on an accelerator it carries the copies and waits for the collective, and the host continues.
        with self._device.uploading():
            at = 0
            for unsharded, own in pieces:
                own_row[at : at + len(own)].copy_(unsharded[own.start : own.stop], non_blocking=True)
                at += len(own)
            work = self.ranks.gather_parts(everyone.view(-1), own_row)
            if self.ranks.on_gpu:
                work.order_compute()
                copy_out()
                gather.known = self._device.uploaded()
                return

        def fill() -> None:
            work.wait()
            copy_out()

        gather.begin(fill)


class CodedWeightGathers(WeightGathers):
    """Gathers of codes for the elements of each unit that `CodedGathers` lists, and of values for all others.

        this rank's shard ─► codes ─► all-gather ─► codes of all ranks ─► values of all shards, this rank's among them

    Each rank computes with decoded values, also of its own shard, so all ranks have the same weights, bit for bit. The
    shard stays exact in its tier, and updates, commits and checkpoints use the exact values.

    A unit on the device may be gathered again for a rank that lacks it. This rank's shard on the device then contains
    decoded values. Their codes have the same values again (`tests/ranks/test_quantized_collectives.py` tries all), so
    a second gather changes no weight that compute is reading.
    """

    def __init__(self, ranks: Ranks, device: Device, coded: CodedGathers, codes: torch.Tensor) -> None:
        """Stores `codes`, device memory for the codes of one gather: (coded.nbytes,) uint8."""
        super().__init__(ranks)
        self._device, self._coded, self._codes = device, coded, codes

    def gather(self, unit: int, unsharded: torch.Tensor, shard_ranges: Sequence[range], uploaded: Event) -> Event:
        elements, itemsize = self._coded.elements[unit], self._coded.dtype.itemsize
        coded = [shard_range for shard_range in shard_ranges if shard_range.start // itemsize in elements]
        if not coded:
            return self.ranks.gather(unsharded, shard_ranges, uploaded)
        if not self.ranks.on_gpu:
            uploaded.wait()
        exact = self.ranks.gather(
            unsharded, [shard_range for shard_range in shard_ranges if shard_range not in coded], uploaded
        )
        # upload stream: on an accelerator it orders the codes of one gather after the codes of the gather before.
        with self._device.uploading():
            for shard_range in coded:
                self._gather_codes(unsharded, shard_range)
            if self.ranks.on_gpu:
                return self._device.uploaded()
        exact.wait()
        return DONE

    def _gather_codes(self, unsharded: torch.Tensor, own_range: range) -> None:
        """Gathers one of this rank's byte ranges and the other ranks' ranges around it."""
        shards, shard, dtype = self.ranks.mesh.shards, self.ranks.shard, self._coded.dtype
        first = own_range.start - shard * len(own_range)
        nbytes = CODES.stored_nbytes(len(own_range) // dtype.itemsize)
        codes = self._codes[: shards * nbytes]
        own = codes[shard * nbytes : (shard + 1) * nbytes]
        quantize(CODES, unsharded[own_range.start : own_range.stop].view(dtype), own)
        # calling thread: on a CPU it waits for the other ranks here, which are in the same gather.
        self.ranks.gather_parts(codes, own).order_compute()
        dequantize(CODES, codes, unsharded[first : first + shards * len(own_range)].view(dtype))


class NodeGathers(WeightGathers):
    """Gathers within a node. The ranks of the node keep parts of a unit's first gather for its later gathers.

        first gather of a unit since weights changed    over all ranks, then each keeps its part of the node's copy
        every other gather                              over the ranks of the node, from what they have kept

    The kept parts have the bits of the first gather, so they change no bit of a run. They are valid until the next call
    that may change weights. Every rank takes part in all gathers and all such calls in the same order (`Rounds`), so
    all ranks know without a message whether a gather is a first gather.
    """

    def __init__(
        self, over_all: WeightGathers, shards: NodeShards, node: Ranks, device: Device, memory: torch.Tensor
    ) -> None:
        """Stores `over_all`, which makes first gathers, and `memory`, empty device memory of (shards.nbytes,) uint8."""
        super().__init__(over_all.ranks)
        self._over_all, self._shards, self._node, self._device = over_all, shards, node, device
        ends = list(itertools.accumulate(shards.unit_nbytes))
        self._units = [memory[end - nbytes : end] for end, nbytes in zip(ends, shards.unit_nbytes, strict=True)]
        self._filled: set[int] = set()
        """Units whose kept part has the current weights."""

    def gather(self, unit: int, unsharded: torch.Tensor, shard_ranges: Sequence[range], uploaded: Event) -> Event:
        node_ranges = [self._shards.range_of(own, self.ranks.rank) for own in shard_ranges]
        stops = list(itertools.accumulate(map(len, node_ranges)))
        pairs = [
            (unsharded[part.start : part.stop], self._units[unit][stop - len(part) : stop])
            for part, stop in zip(node_ranges, stops, strict=True)
        ]
        if unit in self._filled:
            # The gather overwrites this rank's shard, which is in `unsharded` already. The new bytes are the same or,
            # if weights travel as codes, the decoded values that all ranks use.
            return self._node.gather(unsharded, node_ranges, self._copy(uploaded, pairs))
        gathered = self._over_all.gather(unit, unsharded, shard_ranges, uploaded)
        filled = self._copy(gathered, [(target, source) for source, target in pairs])
        self._filled.add(unit)
        return filled

    def forget(self) -> None:
        self._filled.clear()

    def _copy(self, after: Event, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Event:
        """Copies the second tensor of each pair into the first, after the event `after`.

        Returns the event of the copies.
        """
        # upload stream: orders the copies after the previous gather and before the next one. On a CPU the calling
        # thread waits for the event and copies.
        with self._device.uploading():
            self._device.wait_event(after)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return self._device.uploaded()


class ExpertGathers(WeightGathers):
    """Gathers of experts among the ranks that own the same ones, and of other units over all ranks.

    All ranks take part in the gather of a unit of experts at the same time, each in that of its own experts.
    """

    def __init__(self, others: WeightGathers, owners: Ranks, units: Collection[int]) -> None:
        """`owners` are the ranks that own the experts of this rank, in each of `units`."""
        super().__init__(others.ranks)
        self._others, self._owners, self._units = others, owners, units

    def gather(self, unit: int, unsharded: torch.Tensor, shard_ranges: Sequence[range], uploaded: Event) -> Event:
        if unit in self._units:
            return self._owners.gather(unsharded, shard_ranges, uploaded)
        return self._others.gather(unit, unsharded, shard_ranges, uploaded)


def form_node(ranks: Ranks, size: int) -> Ranks:
    """Divides all ranks into nodes of `size`, and returns this rank's node. Collective, unless a node is one rank."""
    if size == 1:
        return Ranks()
    return ranks.divided([list(range(first, first + size)) for first in range(0, ranks.size, size)], -1)
