"""Gathers of weights as codes of 8 bits (qwZ of ZeRO++, arXiv 2306.10209).

    this rank's shard ─► codes ─► all-gather ─► codes of all ranks ─► values of all shards, this rank's among them

Each rank computes with the values of the codes, also of its own shard, so all have the same weights, bit for bit. The
shard itself stays exact in its tier: updates, commits and checkpoints know nothing of codes.

A unit that is on the device may be gathered again for a rank that lacks it. Its shard there has the values of codes,
whose codes give the same values again (`tests/ranks/test_ranks_quantized_weights.py` tries all), so nothing changes
under compute that reads them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from offload.engine.distributed.payload.secondary import SecondaryShards
from offload.engine.distributed.process_group import Ranks
from offload.kernels.blocks import dequantize, quantize
from offload.layout.tiers import CODES, CodedGathers
from offload.swapper.memory.device import DONE, Device, Event


class WeightGathers:
    """The gathers of one engine, of codes or of values. One thread at a time may call, that of all collectives."""

    def __init__(
        self,
        ranks: Ranks,
        device: Device,
        coded: CodedGathers | None,
        codes: torch.Tensor | None,
        secondary: SecondaryShards | None = None,
    ) -> None:
        """Takes the memory.

        Args:
            ranks: all ranks.
            device: the device.
            coded: what is gathered as codes; None for nothing.
            codes: (coded.nbytes,) uint8 on the device, for one gather after the other.
            secondary: the secondary partition, for gathers within a node; None without one.
        """
        self.ranks, self._device, self._coded, self._codes = ranks, device, coded, codes
        self._secondary = secondary

    def gather(self, unit: int, whole: torch.Tensor, shard_ranges: Sequence[range], uploaded: Event) -> Event:
        """Fills `whole` with the partition of every rank of this replica; see `Ranks.gather`."""
        if self._secondary is None:
            return self._gather(unit, whole, shard_ranges, uploaded)
        over_all = functools.partial(self._gather, unit, whole, shard_ranges, uploaded)
        return self._secondary.gather(unit, whole, shard_ranges, uploaded, over_all)

    def forget(self) -> None:
        """Drops what gathers have kept of weights, which may change now. Called on every rank between two gathers."""
        if self._secondary is not None:
            self._secondary.forget()

    def _gather(self, unit: int, whole: torch.Tensor, shard_ranges: Sequence[range], uploaded: Event) -> Event:
        """Gathers the unit over all ranks."""
        coded = self._in_codes(unit, shard_ranges)
        if not coded:
            return self.ranks.gather(whole, shard_ranges, uploaded)
        if not self.ranks.on_gpu:
            uploaded.wait()
        exact = self.ranks.gather(whole, [each for each in shard_ranges if each not in coded], uploaded)
        # On an accelerator the upload stream orders the codes of one gather behind those of the one before.
        with self._device.uploading():
            for mine in coded:
                self._gather_codes(whole, mine)
            if self.ranks.on_gpu:
                return self._device.uploaded()
        exact.wait()
        return DONE

    def _in_codes(self, unit: int, shard_ranges: Sequence[range]) -> list[range]:
        """Returns those of this rank's byte ranges that are gathered as codes."""
        if self._coded is None:
            return []
        elements, itemsize = self._coded.elements[unit], self._coded.dtype.itemsize
        return [each for each in shard_ranges if each.start // itemsize in elements]

    def _gather_codes(self, whole: torch.Tensor, mine: range) -> None:
        """Gathers one of this rank's byte ranges and the other ranks' ranges around it.

        On a CPU the calling thread waits for the other ranks, which are in the same gather.
        """
        assert self._coded is not None and self._codes is not None, "memory was planned for codes"
        shards, shard, dtype = self.ranks.mesh.shards, self.ranks.shard, self._coded.dtype
        first = mine.start - shard * len(mine)
        nbytes = CODES.stored_nbytes(len(mine) // dtype.itemsize)
        codes = self._codes[: shards * nbytes]
        own = codes[shard * nbytes : (shard + 1) * nbytes]
        quantize(CODES, whole[mine.start : mine.stop].view(dtype), own)
        self.ranks.gather_parts(codes, own).order_compute()
        dequantize(CODES, codes, whole[first : first + shards * len(mine)].view(dtype))
