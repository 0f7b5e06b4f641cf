"""The mean of several ranks' values, which they send each other as signs, with the errors of both roundings fed back.

    each rank      values + worker error ─► signs, scales; what they lose is the new worker error
    rank b % n     mean of all ranks' signs + server error ─► signs, scales; what they lose is the new server error
    each rank      the values of these signs, in every block

It is the compressed all-reduce of 1-bit Adam (Tang et al. 2021, arXiv 2102.02888). A block of `SIGN_BLOCK` elements has
one scale, and is averaged by one rank: block b of a unit by rank b % n, whatever the tiles are. So tiles, tiers and a
resume change no bit.
"""

from __future__ import annotations

import numpy as np
import torch

from offload import kernels
from offload.distributed.process_group import Ranks
from offload.layout.modes import SIGN_BLOCK

# A row is a block as ranks send it: its scale in fp32, and a bit for each element, 1 for values of at least 0.


_SCALE_NBYTES = 4
ROW_NBYTES = _SCALE_NBYTES + SIGN_BLOCK // 8
BLOCKS_AT_ONCE = 64
"""Blocks whose values are in memory at once, beside the states of a tile."""


def to_signs(values: torch.Tensor, trained: torch.Tensor, rows: torch.Tensor) -> None:
    """Writes blocks of values as rows. The values of a row have the norm of the values that it replaces.

    Args:
        values: (blocks, SIGN_BLOCK) fp32, contiguous; 0 where an element is not trained.
        trained: the same shape, bool.
        rows: (blocks, ROW_NBYTES) uint8, overwritten.
    """
    # The kernel adds in float64 in a fixed order, so a scale does not depend on the processor.
    squares = torch.tensor(kernels.squares_of_chunks(values.view(-1), SIGN_BLOCK), dtype=torch.float64, device="cpu")
    scales = (squares / trained.sum(1).clamp_(min=1)).sqrt_().float()
    rows[:, :_SCALE_NBYTES] = scales.view(-1, 1).view(torch.uint8)
    rows[:, _SCALE_NBYTES:] = torch.from_numpy(np.packbits((values >= 0).numpy(), axis=1))


def from_signs(rows: torch.Tensor, trained: torch.Tensor) -> torch.Tensor:
    """Returns the values of rows, (blocks, SIGN_BLOCK) fp32; 0 where an element is not `trained`."""
    scales = rows[:, :_SCALE_NBYTES].contiguous().view(torch.float32)
    signs = torch.from_numpy(np.unpackbits(rows[:, _SCALE_NBYTES:].numpy(), axis=1))
    return signs.float().mul_(2).sub_(1).mul_(scales).mul_(trained)


class SignMean:
    """The mean of values over ranks that send each other signs, with the errors of both compressions fed back."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def replace(
        self, first: int, values: torch.Tensor, trained: torch.Tensor, worker: torch.Tensor, server: torch.Tensor
    ) -> None:
        """Replaces this rank's values by the mean of all ranks. Collective; each rank passes the same elements.

        Args:
            first: number of the first block in its unit.
            values: (blocks, SIGN_BLOCK) fp32, overwritten where `trained`.
            trained: the same shape, bool, with the same values on each rank. Others are neither sent nor changed.
            worker: this rank's error, of the same shape, replaced by the new one.
            server: the error of the blocks that this rank averages; other blocks are neither read nor written.
        """
        blocks, ranks, size = len(values), self._ranks, self._ranks.size
        # The blocks of the tile that each rank averages.
        served = [range((rank - first) % size, blocks, size) for rank in range(size)]
        own = served[ranks.rank]
        rows = torch.empty(blocks, ROW_NBYTES, dtype=torch.uint8, device="cpu")
        for some in _parts(range(blocks)):
            total = worker[some].add(values[some]).mul_(trained[some])
            to_signs(total, trained[some], rows[some])
            total.sub_(from_signs(rows[some], trained[some]))
            worker[some] = torch.where(trained[some], total, worker[some])
        sent = torch.cat([rows[_slice(part)] for part in served])
        received = torch.empty(size, len(own), ROW_NBYTES, dtype=torch.uint8, device="cpu")
        counts = [len(part) * ROW_NBYTES for part in served]
        own_counts = [len(own) * ROW_NBYTES] * size
        ranks.swap(received.view(-1), own_counts, sent.view(-1), counts, "exchange signs of momenta")
        means = torch.empty(len(own), ROW_NBYTES, dtype=torch.uint8, device="cpu")
        for some in _parts(range(len(own))):
            place = _slice(own[some])
            here = trained[place]
            total = from_signs(received[0, some], here)
            for other in received[1:]:  # in the order of the ranks
                total.add_(from_signs(other[some], here))
            total.div_(size).add_(server[place]).mul_(here)
            to_signs(total, here, means[some])
            total.sub_(from_signs(means[some], here))
            server[place] = torch.where(here, total, server[place])
        ranks.swap(sent.view(-1), counts, means.repeat(size, 1).view(-1), own_counts, "exchange means of momenta")
        for part, mean in zip(served, sent.split([len(part) for part in served]), strict=True):
            rows[_slice(part)] = mean
        for some in _parts(range(blocks)):
            values[some] = torch.where(trained[some], from_signs(rows[some], trained[some]), values[some])


def _parts(blocks: range) -> list[slice]:
    return [slice(start, min(start + BLOCKS_AT_ONCE, blocks.stop)) for start in range(0, len(blocks), BLOCKS_AT_ONCE)]


def _slice(blocks: range) -> slice:
    return slice(blocks.start, blocks.stop, blocks.step)
