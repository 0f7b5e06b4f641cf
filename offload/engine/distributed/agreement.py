"""Agreement of ranks: each announces its next collective, and all decide from the same list of announcements.

    all announce the same            it is done; weights that all have are not gathered again
    some announce another            one need comes first, a gather before a reduction. The others serve it: they give
                                     their partition of the weights, or the gradients of the unit that they have, if any
    a rank uses weights it has       it continues
    nothing announced can be next    `RankError` on every rank, with all announcements: no rank waits for ever

So ranks may take different paths, as models with experts and loops that evaluate on one rank do, as long as all of them
reach the same `step()`. `next_collective` decides, from the list alone. A round is a message of a few numbers, sent by
the thread that runs the model or its backward. Background threads take part in none.
"""

from __future__ import annotations

import contextlib
import enum
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from offload.engine.callbacks import Edit, EngineCallbacks, GradientStats
from offload.engine.distributed.process_group import Ranks
from offload.errors import RankError, UsageError
from offload.states import State
from offload.swapper.device_cache import Agreed, Having
from offload.swapper.memory.device import Event
from offload.timeline import OFF, Row, Timeline


class Collective(enum.IntEnum):
    """An operation that a rank may announce."""

    USE = 0
    """Use of a unit's weights: in a forward, in a backward, or by a read."""
    REDUCE = 1
    """Reduction of a unit's gradients."""
    STEP = 2
    """Decision on a step."""
    EDIT = 3
    """Change of a unit's weights."""
    END = 4
    """End of the engine."""
    MEAN = 5
    """Exchange of a number for its mean."""
    FORGET = 6
    """Drop of gradients that were reduced."""
    SAVE = 7
    """Save of a checkpoint."""
    LOAD = 8
    """Load of a checkpoint."""
    LOOK = 9
    """Read of a parameter's state, or replacement of its gradient."""


class RankIntent(NamedTuple):
    """The announcement of one rank."""

    kind: Collective
    unit: int = -1
    ready: bool = False
    """For USE: True if the rank has the weights. For EDIT: if it has new values. For END: if it deletes its store."""
    holds: int = -1
    """The unit of which the rank has gradients that are not reduced, or -1."""
    ahead: int = -1
    """For USE: the unit that the rank could gather next, or -1."""
    has_all: bool = False
    """For USE: True if the rank has the weights of all units."""

    def same(self, other: RankIntent) -> bool:
        """Returns True if both ranks announce the same operation on the same unit."""
        return (self.kind, self.unit) == (other.kind, other.unit)


class NextCollective(NamedTuple):
    """What all ranks do next: the collective `next`. If it is None, ready uses continue and other ranks ask again."""

    next: RankIntent | None


def next_collective(wishes: Sequence[RankIntent]) -> NextCollective | None:
    """Returns the next collective for the announcements of all ranks, in rank order; None if there can be none.

    A rank whose announcement was not chosen asks again, unless all uses are ready and its own is one of them. Which
    gradients are reduced together, and so the order of their sum, depends on the reductions alone, not on gathers.
    """
    if all(wish.same(wishes[0]) for wish in wishes):
        return NextCollective(wishes[0])
    uses = [wish for wish in wishes if wish.kind is Collective.USE]
    # Gathers come first, so that a rank that still gathers can reach its reduction and join the others'.
    if uses:
        return NextCollective(next((wish for wish in uses if not wish.ready), None))
    reduces = [wish for wish in wishes if wish.kind is Collective.REDUCE]
    return NextCollective(reduces[0]) if reduces else None


_FACTS = struct.Struct("<dqqq")  # sum of squares, micro-batches, steps, checksum of the optimizer's settings
_SAME_BATCHES = "all ranks must train on equally many micro-batches (drop_last, or a sampler that pads)"
# Name, column of `_FACTS` and advice for each number that all ranks must share at a step.
_MUST_AGREE = (
    ("micro-batches since the last boundary", 1, _SAME_BATCHES),
    ("steps so far", 2, _SAME_BATCHES),
    (
        "learning rates or other settings of the optimizer (checksums)",
        3,
        "all ranks must use the same settings: take a schedule's metric from engine.mean()",
    ),
)


class Agreement:
    """One rank's side of every agreement, and its pager's `Peers`. Serves other ranks until its own turn comes."""

    def __init__(
        self, ranks: Ranks, names: Sequence[str], callbacks: EngineCallbacks, timeline: Timeline = OFF
    ) -> None:
        """Prepares the agreement. `names` are those of the units; `timeline` includes each wait for other ranks."""
        self._ranks, self._names, self._callbacks, self._timeline = ranks, names, callbacks, timeline
        self._agree_titles = [f"agree to gather {name}" for name in names]
        self._reduce_titles = [f"reduce the gradients of {name}" for name in names]
        self.rank, self.size = ranks.rank, ranks.size
        self._lock = threading.RLock()  # two of autograd's threads may call at the same time
        self._agreed = -1
        """The unit that all ranks are gathering or reducing now; -1 between collectives."""
        self._again: Agreed
        """Result of `agree` if this rank asks once more for that unit."""
        self._asking = False
        """True while a question to all ranks is under way, and after an interrupt of one."""

    # -- collectives --------------------------------------------------------------------------------

    def agree(self, unit: int, having: Callable[[], Having]) -> Agreed:
        """Returns the common decision on this rank's use of `unit`; `having` is called in each round."""
        with self._timeline.span(Row.RANKS, self._agree_titles[unit]):
            return self._agree(unit, having)

    def _agree(self, unit: int, having: Callable[[], Having]) -> Agreed:
        """Announces the use of `unit`, and derives the decision from the last round."""
        if self._agreed == unit:  # the gather was agreed on before, when this rank lacked memory
            return self._again
        wishes = self._reach(Collective.USE, unit, having)
        mine = wishes[self._ranks.rank]
        together = all(wish.same(mine) for wish in wishes)
        gather = any(wish.same(mine) and not wish.ready for wish in wishes)
        # A prefetch is only agreed on if all ranks use the same unit and have it: all can then spend the time on the
        # next.
        following = _common([wish.ahead for wish in wishes]) if together and not gather else -1
        answer = Agreed(gather, together, all(wish.has_all for wish in wishes), following)
        self._agree_on(unit if gather else following, answer)
        return answer

    def agree_ahead(self, ahead: Callable[[], int]) -> int:
        """Returns the unit that every rank could gather next, or -1. Only right after a gather announced by all."""
        with self._timeline.span(Row.RANKS, "agree to gather ahead"), self._lock:
            self._check()
            mine = ahead()
            with self._question():
                rows = self._ranks.collect([mine], "agree on what to gather ahead")
            following = _common([row[0] for row in rows])
            self._agree_on(following, Agreed(gather=True, together=False))
            return following

    def _agree_on(self, unit: int, again: Agreed) -> None:
        """Records that all ranks gather `unit` now, if any; `again` answers this rank if it must retry."""
        self._agreed, self._again = unit, again

    def gather(self, whole: torch.Tensor, share: Sequence[range], uploaded: Event) -> Event:
        """Fills in the other ranks' partitions of a unit, as agreed; see `Ranks.gather`."""
        with self._timeline.span(Row.RANKS, "gather"):
            gathered = self._ranks.gather(whole, share, uploaded)
            self._agreed = -1
            return gathered

    def reduce(self, unit: int) -> None:
        """Reduces the gradients of `unit` with those of all ranks that have some."""
        with self._timeline.span(Row.RANKS, self._reduce_titles[unit]), self._lock:
            self._serve(Collective.REDUCE, unit, self._reach(Collective.REDUCE, unit))

    def step(
        self, micro_batches: int, global_steps: int, settings: int, known: Callable[[], GradientStats]
    ) -> GradientStats:
        """Returns the sum over ranks of a step's statistics. Each has ended the updates of the step before by then.

        Args:
            micro_batches: micro-batches of this rank since the last step.
            global_steps: steps so far.
            settings: checksum of the optimizer's settings.
            known: called when every rank has arrived, since gradients of other ranks may come in until then.

        Raises:
            UsageError: on all ranks, if they differ in any of the three numbers.
        """
        with self._timeline.span(Row.RANKS, "agree on a step"):
            return self._step(micro_batches, global_steps, settings, known)

    def _step(
        self, micro_batches: int, global_steps: int, settings: int, known: Callable[[], GradientStats]
    ) -> GradientStats:
        """Exchanges the statistics; see `step`."""
        self._reach(Collective.STEP, -1)
        # Only now: before every rank had arrived, gradients of others could still be served.
        mine = known()
        flags = b"".join(_bitmap(segments) for segments in mine.present)
        content = _FACTS.pack(mine.sum_squares, micro_batches, global_steps, settings) + flags
        with self._question():
            rows = self._ranks.collect_bytes(content, "agree on a step")
        facts = [_FACTS.unpack_from(row) for row in rows]
        for what, column, advice in _MUST_AGREE:
            numbers = [row[column] for row in facts]
            if len(set(numbers)) > 1:
                raise UsageError(f"the ranks differ in their {what}: {', '.join(map(str, numbers))}; {advice}")
        # Summed in rank order on every rank, so that all compute the same bits and take the same decision.
        present = _union([row[_FACTS.size :] for row in rows])
        return GradientStats(sum_squares=sum(row[0] for row in facts), present=present)

    def add_up(self, numbers: Sequence[float]) -> list[float]:
        """Returns the sums of `numbers` over all ranks, added in rank order. Only within a `step`."""
        with self._question():
            rows = self._ranks.collect_bytes(struct.pack(f"<{len(numbers)}d", *numbers), "add up the norms")
        return [sum(column) for column in zip(*(struct.unpack(f"<{len(numbers)}d", row) for row in rows), strict=True)]

    def edit(self, unit: int, edits: Sequence[Edit]) -> list[Edit]:
        """Returns the edits of `unit` that apply on every rank: those of the lowest rank that has any."""
        wishes = self._reach(Collective.EDIT, unit, bool(edits))
        source = next((rank for rank, wish in enumerate(wishes) if wish.ready), None)
        if source is None:
            return []
        with self._question():
            mine = [[e.start, e.stop, str(e.values.dtype).removeprefix("torch."), e.state.value] for e in edits]
            what = self._ranks.share(mine, "edit weights")
            agreed: list[Edit] = []
            for position, (start, stop, dtype, state) in enumerate(what[source]):
                # All ranks take part in the broadcast, and only the source has the values.
                if source == self._ranks.rank:
                    values = edits[position].values
                else:
                    values = torch.empty(stop - start, dtype=getattr(torch, dtype), device="cpu")
                self._ranks.broadcast(values, source)
                agreed.append(Edit(start=start, stop=stop, values=values, state=State(state)))
        return agreed

    def mean(self, value: float) -> float:
        """Returns the mean of every rank's `value`."""
        value = float(value)
        self._reach(Collective.MEAN, -1)
        with self._question():
            values: list[float] = self._ranks.share(value, "take the mean of a number")
        return sum(values) / len(values)

    def forget(self) -> None:
        """Returns when every rank is about to drop its gradients, to which other ranks have contributed."""
        self._reach(Collective.FORGET, -1)

    @contextlib.contextmanager
    def meeting(self, kind: Collective) -> Iterator[Callable[[Any, str], list[Any]]]:
        """Waits until every rank is about to do the same, and yields `Ranks.share` for the exchange of values.

        The body must raise an `Exception` on all ranks or on none; after any other, such as Ctrl-C, this rank counts
        as interrupted.
        """
        self._reach(kind, -1)
        self._asking = True
        try:
            yield self._ranks.share
        except Exception:
            self._asking = False
            raise
        self._asking = False

    def end(self, remove: bool) -> None:
        """Returns when every rank is about to close its engine: until then others may need this rank's weights.

        Raises:
            RankError: on all ranks, if only some are about to delete their stores (`remove`).
        """
        wishes = self._reach(Collective.END, -1, remove)
        if len({wish.ready for wish in wishes}) > 1:
            told = "; ".join(
                f"rank {rank} {'deletes' if wish.ready else 'keeps'} its store" for rank, wish in enumerate(wishes)
            )
            raise RankError(f"{told}: all ranks must do the same; all stores are kept")

    # -- the round ----------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raises the error of a rank that has left an earlier collective unfinished."""
        if self._agreed >= 0:
            raise self._ranks.fail(f"it could not take part in moving {self._names[self._agreed]}")
        if self._asking:
            raise self._ranks.fail("it was interrupted while it waited for the other ranks")

    def _reach(
        self,
        kind: Collective,
        unit: int,
        what: bool | Callable[[], Having] = False,
    ) -> list[RankIntent]:
        """Serves other ranks until all announce the same, or this one needs no other; returns the last announcements.

        `what` is `ready` of the announcement; for USE a function that is called in each round.
        """
        with self._lock:
            self._check()
            while True:
                has = Having(what, all=False, ahead=-1) if isinstance(what, bool) else what()
                mine = RankIntent(kind, unit, has.unit, self._callbacks.pending_unit(), has.ahead, has.all)
                # One small all-gather for each round. A rank that has served others announces its own need again.
                numbers = [int(field) for field in mine]
                with self._question():
                    rows = self._ranks.collect(numbers, _words(mine, self._names))
                wishes = [
                    RankIntent(Collective(row[0]), row[1], bool(row[2]), row[3], row[4], bool(row[5])) for row in rows
                ]
                choice = next_collective(wishes)
                if choice is None:
                    told = "; ".join(f"rank {rank} {_words(wish, self._names)}" for rank, wish in enumerate(wishes))
                    raise RankError(
                        f"the ranks have reached different calls: {told}. Every rank must make the same steps, and "
                        "the same edits between them; `with offload.gathered(..., modify=True)` applies one rank's "
                        "edits on all"
                    )
                if choice.next is None:
                    if kind is Collective.USE:  # of weights in memory, or this use would be next
                        return wishes
                elif choice.next.same(mine):
                    return wishes
                else:
                    self._serve(choice.next.kind, choice.next.unit, wishes)

    @property
    def interrupted(self) -> bool:
        """True if this rank has left the others in the middle of a collective."""
        return self._asking or self._agreed >= 0

    @contextlib.contextmanager
    def _question(self) -> Iterator[None]:
        """Marks a question to all ranks as under way."""
        self._asking = True
        yield
        self._asking = False  # stays set after an exception: only the other ranks have moved on

    def _serve(self, kind: Collective, unit: int, wishes: Sequence[RankIntent]) -> None:
        """Takes part in the chosen collective. An exception leaves `_agreed` set, since the others then wait."""
        self._agreed = unit
        if kind is Collective.REDUCE:
            self._callbacks.serve_reduce(unit, [rank for rank, wish in enumerate(wishes) if wish.holds == unit])
        else:
            self._callbacks.serve_gather(unit)
        self._agreed = -1


_DOES = {
    Collective.USE: "uses the weights of {}",
    Collective.REDUCE: "reduces the gradients of {}",
    Collective.STEP: "is at step()",
    Collective.EDIT: "changes the weights of {}",
    Collective.END: "closes its engine",
    Collective.MEAN: "takes the mean of a number (engine.mean)",
    Collective.FORGET: "drops its gradients (zero_grad)",
    Collective.SAVE: "saves a checkpoint",
    Collective.LOAD: "loads a checkpoint",
    Collective.LOOK: "accesses a state of a parameter",
}


def _words(wish: RankIntent, names: Sequence[str]) -> str:
    """Returns an announcement as text for messages."""
    return _DOES[wish.kind].format(names[wish.unit] if wish.unit >= 0 else "")


def _common(units: Sequence[int]) -> int:
    """Returns the unit that all agree on, or -1."""
    return units[0] if len(set(units)) == 1 else -1


def _bitmap(segments: set[int]) -> bytes:
    """Returns a set of segments as a length in bytes (u32, little-endian), followed by one bit for each segment."""
    number = sum(1 << segment for segment in segments)
    length = (number.bit_length() + 7) // 8
    return struct.pack("<I", length) + number.to_bytes(length, "little")


def _union(rows: Sequence[bytes]) -> list[set[int]]:
    """Returns, for each unit, the union of the segments in all rows."""
    return [set().union(*sets) for sets in zip(*(list(_segments(row)) for row in rows), strict=True)]


def _segments(row: bytes) -> Sequence[set[int]]:
    """Returns, for each unit, the segments of a row of bitmaps."""
    found, position = [], 0
    while position < len(row):
        (length,) = struct.unpack_from("<I", row, position)
        position += 4
        number = int.from_bytes(row[position : position + length], "little")
        found.append({bit for bit in range(number.bit_length()) if number >> bit & 1})
        position += length
    return found
