"""Agreement of ranks: each announces its next collective, and all decide from the same list of announcements.

    all announce the same            all do it; weights that all have are not gathered again
    some announce another            one is chosen, a gather before a reduction. The other ranks serve it with
                                     their partition of the weights, or with their gradients of the unit, if any
    all that use weights have them   these ranks continue; the others announce again
    nothing announced can be next    `RankError` on every rank, with all announcements: no rank waits for ever

So ranks may take different paths, as models with experts and loops that evaluate on one rank do, as long as all of them
reach the same `step()`. `next_collective` decides, from the list alone. A round is a message of a few numbers, sent by
the thread that runs the model or its backward. Background threads take part in no round.
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
from offload.engine.distributed.payload.weights import WeightGathers
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
    STEP = 2
    """Decision on a step."""
    EDIT = 3
    END = 4
    MEAN = 5
    """Exchange of a number, whose mean every rank receives."""
    FORGET = 6
    """Drop of gradients that were reduced."""
    SAVE = 7
    """Save of a checkpoint."""
    LOAD = 8
    """Load of a checkpoint."""
    LOOK = 9
    """Read of a parameter's state, or replacement of its gradient."""
    SLEEP = 10
    """Return of the memory to others, between steps."""


class RankIntent(NamedTuple):
    """The announcement of one rank."""

    kind: Collective
    unit: int = -1
    ready: bool = False
    """True if the rank has the weights (USE), has new values (EDIT), or deletes its store (END)."""
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
    """The next collective of all ranks. If `next` is None, ranks whose use is ready continue; others announce again."""

    next: RankIntent | None


def next_collective(intents: Sequence[RankIntent]) -> NextCollective | None:
    """Returns the next collective for the announcements of all ranks, in rank order; None if there can be none.

    A rank whose announcement was not chosen announces again, unless it announced a USE and all uses are ready. Which
    gradients are reduced together, and so the order of their sum, depends on the reductions alone, not on gathers.
    """
    if all(intent.same(intents[0]) for intent in intents):
        return NextCollective(intents[0])
    uses = [intent for intent in intents if intent.kind is Collective.USE]
    # Gathers come first, so that a rank that still gathers can reach its reduction and join the others'.
    if uses:
        return NextCollective(next((intent for intent in uses if not intent.ready), None))
    reduces = [intent for intent in intents if intent.kind is Collective.REDUCE]
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
    """One rank's side of every agreement, and its pager's `Peers`. Serves others until its announcement is chosen."""

    def __init__(
        self, gathers: WeightGathers, names: Sequence[str], callbacks: EngineCallbacks, timeline: Timeline = OFF
    ) -> None:
        """Prepares the agreement. `names` are those of the units; `timeline` includes each wait for other ranks."""
        self._gathers, self._names, self._callbacks, self._timeline = gathers, names, callbacks, timeline
        self._ranks = ranks = gathers.ranks
        self._agree_titles = [f"agree to gather {name}" for name in names]
        self._reduce_titles = [f"reduce the gradients of {name}" for name in names]
        self.rank, self.size = ranks.rank, ranks.size
        self.lock = threading.RLock()  # two of autograd's threads may call at the same time
        self._agreed_unit = -1
        """The unit that all ranks are gathering or reducing now; -1 between collectives."""
        self._retry_answer: Agreed
        """Result of `agree` if this rank calls it again for `_agreed_unit`, as after a lack of memory."""
        self._in_question = False
        """True during an exchange with all ranks, and from then on if the exchange was interrupted."""

    # -- collectives --------------------------------------------------------------------------------

    def agree(self, unit: int, having: Callable[[], Having]) -> Agreed:
        """Returns the common decision on this rank's use of `unit`; `having` is called in each round."""
        with self._timeline.span(Row.RANKS, self._agree_titles[unit]):
            return self._agree(unit, having)

    def _agree(self, unit: int, having: Callable[[], Having]) -> Agreed:
        """Announces the use of `unit`, and derives the decision from the last round."""
        if self._agreed_unit == unit:  # the gather was agreed on before, when this rank lacked memory
            return self._retry_answer
        intents = self._await_all(Collective.USE, unit, having)
        mine = intents[self._ranks.rank]
        together = all(intent.same(mine) for intent in intents)
        gather = any(intent.same(mine) and not intent.ready for intent in intents)
        # A prefetch is agreed on only if all ranks use the same unit and have it: none of them then waits for a gather
        # of the unit itself.
        following = _common([intent.ahead for intent in intents]) if together and not gather else -1
        answer = Agreed(gather, together, all(intent.has_all for intent in intents), following)
        self._agree_on(unit if gather else following, answer)
        return answer

    def agree_ahead(self, ahead: Callable[[], int]) -> int:
        """Returns the unit that every rank could gather next, or -1. Called right after a gather announced by all."""
        with self._timeline.span(Row.RANKS, "agree to gather ahead"), self.lock:
            self._check()
            mine = ahead()
            with self._question():
                rows = self._ranks.collect([mine], "agree on what to gather ahead")
            following = _common([row[0] for row in rows])
            self._agree_on(following, Agreed(gather=True, together=False))
            return following

    def _agree_on(self, unit: int, again: Agreed) -> None:
        """Records that all ranks gather `unit` now (-1: none); `again` is this rank's result if it repeats `agree`."""
        self._agreed_unit, self._retry_answer = unit, again

    def gather(self, unit: int, whole: torch.Tensor, share: Sequence[range], uploaded: Event) -> Event:
        """Fills in the other ranks' partitions of a unit, as agreed; see `Ranks.gather`."""
        with self._timeline.span(Row.RANKS, "gather"):
            gathered = self._gathers.gather(unit, whole, share, uploaded)
            self._agreed_unit = -1
            return gathered

    def reduce(self, unit: int) -> None:
        """Reduces the gradients of `unit` with those of all ranks that have some."""
        with self._timeline.span(Row.RANKS, self._reduce_titles[unit]), self.lock:
            self._serve(Collective.REDUCE, unit, self._await_all(Collective.REDUCE, unit))

    def step(
        self, micro_batches: int, global_steps: int, settings: int, known: Callable[[], GradientStats]
    ) -> GradientStats:
        """Returns the statistics of a step, summed over shards. By then each rank has ended its previous updates.

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
        """Exchanges the statistics."""
        self._await_all(Collective.STEP, -1)
        # Called only now: until every rank had arrived, this rank could still receive gradients of others.
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
        # In rank order on every rank, so that all take the same decision; over one replica, since all have the same.
        present = _union([row[_FACTS.size :] for row in rows])
        return GradientStats(sum_squares=sum(row[0] for row in facts[: self._ranks.mesh.shards]), present=present)

    def add_up(self, numbers: Sequence[float]) -> list[float]:
        """Returns the sums of `numbers` over the shards of a replica, added in their order. Only within a `step`."""
        packed = struct.Struct(f"<{len(numbers)}d")
        with self._question():
            rows = self._ranks.collect_bytes(packed.pack(*numbers), "add up the norms")[: self._ranks.mesh.shards]
        return [sum(column) for column in zip(*map(packed.unpack, rows), strict=True)]

    def edit(self, unit: int, edits: Sequence[Edit]) -> list[Edit]:
        """Returns the edits of `unit` that apply on every rank: those of the lowest rank that has any."""
        intents = self._await_all(Collective.EDIT, unit, bool(edits))
        source = next((rank for rank, intent in enumerate(intents) if intent.ready), None)
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
        self._await_all(Collective.MEAN, -1)
        with self._question():
            values: list[float] = self._ranks.share(value, "take the mean of a number")
        return sum(values) / len(values)

    def forget(self) -> None:
        """Returns when every rank is about to drop its gradients, which contain contributions of other ranks."""
        self._await_all(Collective.FORGET, -1)

    @contextlib.contextmanager
    def meeting(self, kind: Collective) -> Iterator[Callable[[Any, str], list[Any]]]:
        """Waits until every rank has announced `kind`, and yields `Ranks.share` for the exchange of values.

        The body must raise an `Exception` on all ranks or on none. After any other `BaseException`, as from Ctrl-C,
        this rank counts as interrupted.
        """
        self._await_all(kind, -1)
        self._in_question = True
        try:
            yield self._ranks.share
        except Exception:
            self._in_question = False
            raise
        self._in_question = False

    def end(self, remove: bool) -> None:
        """Returns when every rank is about to close its engine. Until then this rank serves gathers of its weights.

        Raises:
            RankError: on all ranks, if only some are about to delete their stores (`remove`).
        """
        intents = self._await_all(Collective.END, -1, remove)
        if len({intent.ready for intent in intents}) > 1:
            described = "; ".join(
                f"rank {rank} {'deletes' if intent.ready else 'keeps'} its store" for rank, intent in enumerate(intents)
            )
            raise RankError(f"{described}: all ranks must do the same; all stores are kept")

    # -- the round ----------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raises `RankError`, and notifies the other ranks, if this rank has left an earlier collective unfinished."""
        if self._agreed_unit >= 0:
            raise self._ranks.fail(f"it left an exchange of {self._names[self._agreed_unit]} unfinished")
        if self._in_question:
            raise self._ranks.fail("it was interrupted while it waited for the other ranks")

    def _await_all(self, kind: Collective, unit: int, what: bool | Callable[[], Having] = False) -> list[RankIntent]:
        """Serves other ranks until this rank's announcement is chosen, or is a USE and all uses are ready.

        Returns the last announcements. `what` is this rank's field `ready`; for USE, a function called in each round.
        """
        with self.lock:
            self._check()
            while True:
                has = Having(what, all=False, ahead=-1) if isinstance(what, bool) else what()
                mine = RankIntent(kind, unit, has.unit, self._callbacks.pending_unit(), has.ahead, has.all)
                # One small all-gather for each round. A rank that has served others repeats its announcement.
                numbers = [int(field) for field in mine]
                with self._question():
                    rows = self._ranks.collect(numbers, _describe(mine, self._names))
                intents = [
                    RankIntent(Collective(row[0]), row[1], bool(row[2]), row[3], row[4], bool(row[5])) for row in rows
                ]
                choice = next_collective(intents)
                if choice is None:
                    described = [_describe(intent, self._names) for intent in intents]
                    calls = self._ranks.heartbeat.tell(self._ranks.members, described)
                    raise RankError(
                        f"the ranks have reached different calls: {calls}. Every rank must make the same steps, and "
                        "the same edits between them; `with offload.gathered(..., modify=True)` applies one rank's "
                        "edits on all"
                    )
                if choice.next is None:
                    if kind is Collective.USE:  # all uses are ready, this one among them
                        return intents
                elif choice.next.same(mine):
                    if kind in (Collective.STEP, Collective.EDIT, Collective.LOAD, Collective.SLEEP):
                        self._gathers.forget()
                    return intents
                else:
                    self._serve(choice.next.kind, choice.next.unit, intents)

    @property
    def interrupted(self) -> bool:
        """True if this rank has left the others in the middle of a collective."""
        return self._in_question or self._agreed_unit >= 0

    @contextlib.contextmanager
    def _question(self) -> Iterator[None]:
        """Marks an exchange with all ranks as under way. The mark stays after an exception: others have moved on."""
        self._in_question = True
        yield
        self._in_question = False  # not in a `finally`: see above

    def _serve(self, kind: Collective, unit: int, intents: Sequence[RankIntent]) -> None:
        """Takes part in the chosen collective. An exception leaves `_agreed_unit` set, since the others then wait."""
        self._agreed_unit = unit
        if kind is Collective.REDUCE:
            self._callbacks.serve_reduce(unit, [rank for rank, intent in enumerate(intents) if intent.holds == unit])
        else:
            self._callbacks.serve_gather(unit)
        self._agreed_unit = -1


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
    Collective.SLEEP: "gives its memory back (engine.sleep)",
}


def _describe(intent: RankIntent, names: Sequence[str]) -> str:
    """Returns an announcement as text for messages."""
    return _DOES[intent.kind].format(names[intent.unit] if intent.unit >= 0 else "")


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
