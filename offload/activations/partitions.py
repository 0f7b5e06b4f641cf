"""Inputs of recomputed blocks that the ranks of tensor parallelism share: each rank keeps a part of each input.

    forward      a block's input, whole on each rank ─► this rank's part, for the graph
    backward     the parts of all ranks ─► the input, the same bits ─► the block runs again

An input is divided if it needs a gradient and is the same on each rank, which the ranks compare in the first forward of
a block. Where a plan divides the sequence around blocks, each rank has only a part of the input already, and the graph
keeps it as it is. Masks and tables of positions, which all blocks share, stay whole.
"""

from __future__ import annotations

import torch
from torch import nn

from offload.distributed.process_group import Kind, Ranks
from offload.torch_internals import without_modes


class InputPartitions:
    """Divides inputs among the ranks of one row. Belongs to the thread that runs the model or its backward."""

    def __init__(self, ranks: Ranks) -> None:
        """Divides nothing yet. `ranks` compute one layer together."""
        self._ranks = ranks
        self._shared: dict[tuple[str, int], bool] = {}
        """For the inputs of each block, by position, whether all ranks have the same."""

    def part_of(self, block: str, position: int, value: object) -> torch.Tensor | None:
        """Returns what this rank keeps of an input of a block, a copy; None if the input stays as it is.

        Collective of the row in the first forward of a block.
        """
        if type(value) is not torch.Tensor or not value.requires_grad or not value.is_contiguous():
            return None
        with without_modes():
            length = -(-value.numel() // self._ranks.size)
            own = value.view(-1)[self._ranks.rank * length :][:length]
            # In the graph, since the tiers move what the graph has computed. No operation here saves a tensor.
            part = nn.functional.pad(own, (0, length - own.numel())) if own.numel() < length else own.clone()
            if (block, position) not in self._shared:
                self._shared[block, position] = self._is_shared(value, part)
        return part if self._shared[block, position] else None

    def whole(self, part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Returns the input of this shape of which `part_of` has returned a part. Collective of the row."""
        with torch.no_grad(), without_modes():
            part = part.detach()
            parts = torch.empty(self._ranks.size, part.numel(), dtype=part.dtype, device=part.device)
            # Each rank sends its part to every rank.
            sent = part.expand_as(parts).contiguous()
            self._ranks.exchange(parts, sent, range(self._ranks.size), Kind.ACTIVATIONS).order_compute()
            value = parts.view(-1)[: shape.numel()].view(shape)
        return value.requires_grad_()

    def _is_shared(self, value: torch.Tensor, part: torch.Tensor) -> bool:
        """Returns True if all ranks have the same input. Collective of the row."""
        # Lengths first: an exchange of parts of different lengths would never end.
        shapes = self._ranks.share([list(value.shape), str(value.dtype)], "compare inputs of blocks")
        if any(shape != shapes[0] for shape in shapes):
            return False
        same = torch.equal(self.whole(part, value.shape).detach(), value.detach())
        return all(self._ranks.share(same, "compare inputs of blocks"))
