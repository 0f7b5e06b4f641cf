"""Exchange of parameters that several ranks divide, and whose step needs them as a whole.

    part of each rank ─► the parameter's home ─► the step of the whole ─► part of each rank

A home is the rank with the most of a parameter (`layout.optimizers.whole`), so a parameter that one rank holds goes
nowhere. All that a unit exchanges goes in one message to each rank, and one back.

Threads. The update worker calls everything, while the thread that runs the model waits in `step()`: only then no other
collective is under way. Every rank updates the same units in the same order, each in one exchange or more, and takes
part even if it has nothing to send or to receive. So a wait ends when the other workers arrive, which wait for their
drives and for the exchanges before; or as every collective does, when a rank is lost. Messages go through the host, as
updates do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from offload.distributed.process_group import Ranks
from offload.layout.flat_layout import UnitLayout
from offload.layout.modes import Mode
from offload.layout.optimizer_states import Divided, divided
from offload.sizes import align_up


class Exchange:
    """One rank's side of the exchanges of its engine."""

    def __init__(self, *, ranks: Ranks, layouts: Sequence[UnitLayout], mode: Mode, memory: torch.Tensor) -> None:
        """Takes over the memory.

        Args:
            ranks: all ranks.
            layouts: the layout of each unit.
            mode: the mode.
            memory: (n,) fp32 of the host arena: what this rank sends and receives of the largest unit at once.
        """
        self._ranks, self._memory = ranks, memory
        self._divided = [divided(layout, mode, ranks.mesh.shards) for layout in layouts]

    @property
    def rank(self) -> int:
        """This rank, as a replica counts: its shard."""
        return self._ranks.shard

    def begin(self, unit: int, indices: Sequence[int], dtype: torch.dtype, number: int = 0, of: int = 1) -> Trade:
        """Returns an exchange of some parameters of a unit, the same on every rank.

        Args:
            unit: index of the unit.
            indices: indices of the parameters that have a gradient and are divided.
            dtype: dtype of the elements that are exchanged.
            number: number of this exchange, if several of a unit are under way at once.
            of: number of these.
        """
        found = [each for each in self._divided[unit] if each.number in indices]
        numel = len(self._memory) // of
        memory = self._memory[number * numel : (number + 1) * numel].view(dtype)
        return Trade(self._ranks, found, memory)


class Trade:
    """One exchange: `away` parts of this rank go out and come back, `here` come in and go back."""

    def __init__(self, ranks: Ranks, found: Sequence[Divided], memory: torch.Tensor) -> None:
        """Lays the parts out in `memory`: first what goes out, home by home, then what comes in, rank by rank."""
        self._ranks, own, shards = ranks, ranks.shard, ranks.mesh.shards
        self.away = {each.number: _mine(each, own) for each in found if each.home != own}
        """Position and length of this rank's part of each parameter whose home is another rank; both 0 for none."""
        self.here = tuple(each for each in found if each.home == own)
        """Parameters whose home is this rank."""
        self._sent, self._got = [0] * shards, [0] * shards
        self._places: dict[tuple[int, int], torch.Tensor] = {}
        end = 0
        for home in range(shards):
            for each in (each for each in found if each.home == home != own):
                numel = self.away[each.number][1]
                self._places[each.number, own] = memory[end : end + numel]
                self._sent[home] += numel
                end += numel
        self._out, first = memory[:end], end
        for rank in range(shards):
            for each in self.here if rank != own else ():
                _, numel = _mine(each, rank)
                self._places[each.number, rank] = memory[end : end + numel]
                self._got[rank] += numel
                end += numel
        self._in = memory[first:end]

    def part(self, index: int, rank: int) -> torch.Tensor:
        """Returns the memory of a rank's part of a parameter, (n,): before `go` and after `back` this rank's own."""
        return self._places[index, rank]

    def go(self) -> None:
        """Sends the parts of this rank to the parameters' homes, and receives those of others."""
        self._ranks.swap(self._in, self._got, self._out, self._sent, "gather what a step needs as a whole")

    def back(self) -> None:
        """Sends the parts of other ranks back, and receives those of this rank."""
        self._ranks.swap(self._out, self._sent, self._in, self._got, "scatter what a step has made")


def _mine(each: Divided, rank: int) -> tuple[int, int]:
    """Returns position and length of a rank's part of a parameter; both are 0 if it has none."""
    return next(((part.position, part.numel) for part in each.parts if part.rank == rank), (0, 0))


def carve(memory: torch.Tensor, *numels: int) -> tuple[torch.Tensor, ...]:
    """Returns at least as many elements of `memory`, (n,), as each number says, in full pages."""
    itemsize = memory.element_size()
    sizes = [align_up(numel * itemsize) // itemsize for numel in numels]
    starts = accumulate(sizes, initial=0)
    return tuple(memory[start : start + size] for start, size in zip(starts, sizes, strict=False))
