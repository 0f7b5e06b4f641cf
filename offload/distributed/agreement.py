"""Agreement of ranks: each announces its next collective, and all decide from the same list of announcements.

    all announce the same            all do it; weights that all have are not gathered again
    some announce another            one is chosen, a gather before a reduction. The other ranks serve it with
                                     their partition of the weights, or with their gradients of the unit, if any
    all that use weights have them   these ranks continue; the others announce again
    nothing announced can be next    `RankError` on every rank, with all announcements: no rank waits for ever

So ranks may take different paths as long as all of them reach the same `step()`. Models with experts do so, and loops
that evaluate on one rank. `next_collective` decides, from the list alone. A round is a message of a few numbers, which
the thread that runs the model or its backward sends. Background threads take part in no round.

[Note: series] Where all ranks announce the same series of gathers (see `swapper.pager`), each carries it out without a
further round. A rank that wants anything else first takes part in all that is left with its shards, and asks then. One
series is under way at a time, since a round begins each.

[Note: reductions have no series] Which gradients are added up together decides how their sum rounds. A rank may leave
the path that a series expects. It would send nothing for the units left in it, and its gradients later, by themselves.
The sum would then depend on whether there was a series: on the steps of this process, and on the room for units.
Each reduction is a round instead. A round decides on a reduction when every rank has reached one, or has none to come,
so the paths of the ranks alone decide which gradients are added up together.
"""

from __future__ import annotations

import contextlib
import enum
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from offload.distributed.gathers import WeightGathers
from offload.distributed.process_group import Ranks
from offload.engine.callbacks import Edit, EngineCallbacks, GradientStats
from offload.errors import BudgetError, RankError, StoreError, UsageError
from offload.states import State
from offload.swapper.memory.device import Event
from offload.swapper.pager import GatherDecision, UnitState
from offload.timeline import OFF, Row, Timeline

# -- step facts ----------------------------------------------------------------------------------------
#
# Each rank reports four numbers on a step, and the parameters that have a gradient.


STEP_FACTS = struct.Struct("<dqqq")
"""Sum of squares, micro-batches, steps, and checksum of the optimizer's settings."""
_SAME_BATCHES = "all ranks must train on equally many micro-batches (drop_last, or a sampler that pads)"
# Name, column of `STEP_FACTS` and advice for each number that all ranks must share at a step.
_MUST_AGREE = (
    ("micro-batches since the last boundary", 1, _SAME_BATCHES),
    ("steps so far", 2, _SAME_BATCHES),
    (
        "learning rates or other settings of the optimizer (checksums)",
        3,
        "all ranks must use the same settings: take a schedule's metric from engine.mean()",
    ),
)


def add_up_step(rows: Sequence[bytes], shards: int, of_one_rank: bool = False) -> GradientStats:
    """Returns the statistics of all ranks.

    The first `shards` rows are from the ranks of one replica. `of_one_rank` is that of the ranks' statistics. Raises
    `UsageError` if ranks differ in a number that all must share.
    """
    facts = [STEP_FACTS.unpack_from(row) for row in rows]
    for what, column, advice in _MUST_AGREE:
        numbers = [row[column] for row in facts]
        if len(set(numbers)) > 1:
            raise UsageError(f"the ranks differ in their {what}: {', '.join(map(str, numbers))}; {advice}")
    # All ranks add in rank order, so that they take the same decision. They add over one replica if all replicas have
    # the same gradients, and take the mean over the replicas otherwise.
    present = union([row[STEP_FACTS.size :] for row in rows])
    squares = [row[0] for row in facts]
    total = sum(squares) * shards / len(rows) if of_one_rank else sum(squares[:shards])
    return GradientStats(sum_squares=total, present=present, of_one_rank=of_one_rank)


def bitmap(segments: set[int]) -> bytes:
    """Returns a set of segments as a length in bytes (u32, little-endian), followed by one bit for each segment."""
    number = sum(1 << segment for segment in segments)
    length = (number.bit_length() + 7) // 8
    return struct.pack("<I", length) + number.to_bytes(length, "little")


def union(rows: Sequence[bytes]) -> list[set[int]]:
    """Returns, for each unit, the union of the segments in all rows."""
    return [set().union(*sets) for sets in zip(*(list(_segments(row)) for row in rows), strict=True)]


def _segments(row: bytes) -> Sequence[set[int]]:
    sets, position = [], 0
    while position < len(row):
        (length,) = struct.unpack_from("<I", row, position)
        position += 4
        number = int.from_bytes(row[position : position + length], "little")
        sets.append({bit for bit in range(number.bit_length()) if number >> bit & 1})
        position += length
    return sets


# -- intents -------------------------------------------------------------------------------------------
#
# Ranks announce collectives. A pure function decides the next collective from the announcements of all ranks.


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
    RESIZE = 11
    """Change of the budgets, between steps."""


class RankIntent(NamedTuple):
    """The announcement of one rank."""

    kind: Collective
    unit: int = -1
    ready: bool = False
    """True if the rank has the weights (USE), has no later micro-batch (REDUCE), has new values (EDIT), or deletes its
    store (END)."""
    holds: int = -1
    """The unit whose gradients on this rank wait to be reduced, or -1."""
    ahead: int = -1
    """For USE: the unit that the rank could gather next, or -1."""
    has_all: bool = False
    """For USE: True if the rank has the weights of all units."""
    series: int = 0
    """Checksum of the series that the rank could carry out without further rounds; 0 if there is none."""
    position: int = 0
    """For REDUCE: the place of the reduction among those of a step, by unit and micro-batch."""

    def same(self, other: RankIntent) -> bool:
        """Returns True if both ranks announce the same operation on the same unit."""
        return (self.kind, self.unit, self.position) == (other.kind, other.unit, other.position)


class NextCollective(NamedTuple):
    """The next collective of all ranks.

    If `next` is None, ranks whose use is ready continue, and all other ranks announce again.
    """

    next: RankIntent | None


def next_collective(intents: Sequence[RankIntent]) -> NextCollective | None:
    """Returns the next collective for the announcements of all ranks, in rank order; None if no collective can be next.

    A rank whose announcement was not chosen announces again, unless it announced a USE and all uses are ready. Only the
    reductions, not the gathers, decide which gradients are reduced together and in which order they are added. The
    first reduction in the order of a step comes first. So if a rank leaves out a unit, it waits at its next one for the
    others.
    """
    if all(intent.same(intents[0]) for intent in intents):
        return NextCollective(intents[0])
    uses = [intent for intent in intents if intent.kind is Collective.USE]
    # Gathers come first, so that a rank that still gathers can reach its reduction and join the others'.
    if uses:
        return NextCollective(next((intent for intent in uses if not intent.ready), None))
    reduces = [intent for intent in intents if intent.kind is Collective.REDUCE]
    return NextCollective(min(reduces, key=lambda intent: intent.position)) if reduces else None


_DOES = {
    Collective.USE: "uses the weights of {}",
    Collective.REDUCE: "reduces the gradients of {}",
    Collective.STEP: "is at step()",
    Collective.EDIT: "changes the weights of {}",
    Collective.END: "closes its engine",
    Collective.MEAN: "takes the mean of a number (engine.mean)",
    Collective.FORGET: "drops its gradients (zero_grad)",
    Collective.SAVE: "saves a checkpoint or a model",
    Collective.LOAD: "loads a checkpoint",
    Collective.LOOK: "accesses a state of a parameter",
    Collective.SLEEP: "gives its memory back (engine.sleep)",
    Collective.RESIZE: "changes its budgets (engine.resize)",
}


def describe(intent: RankIntent, names: Sequence[str]) -> str:
    """Returns an announcement as text for messages."""
    return _DOES[intent.kind].format(names[intent.unit] if intent.unit >= 0 else "")


# -- agreement -----------------------------------------------------------------------------------------


class Agreement:
    """The agreement of one rank with all ranks. This class is for a process that trains alone, and never waits.

    `Rounds` overrides the methods to agree with other ranks.
    """

    ranks = Ranks()
    """The ranks that agree."""

    @property
    def interrupted(self) -> bool:
        """True if this rank has left the others in the middle of a collective."""
        return False

    def step(
        self, micro_batches: int, global_steps: int, settings: int, known: Callable[[], GradientStats]
    ) -> GradientStats:
        """Returns the statistics of a step, summed over shards. By then each rank has ended its previous updates.

        `known` is called when every rank has arrived, since gradients of other ranks may come in until then. Raises
        `UsageError` on all ranks if they differ in `micro_batches`, `global_steps` or `settings`.
        """
        return known()

    def add_up(self, numbers: Sequence[float]) -> list[float]:
        """Returns the sums of `numbers` over the ranks of a replica, added in rank order.

        Call it only within a `step`.
        """
        return list(numbers)

    def edit(self, unit: int, edits: Sequence[Edit]) -> Sequence[Edit]:
        """Returns the edits of `unit` that all ranks apply. These are the edits of the lowest rank that has edits."""
        return edits

    def mean(self, value: float) -> float:
        return value

    @contextlib.contextmanager
    def meeting(self, kind: Collective) -> Iterator[None]:
        """Waits until every rank has announced `kind`. Within the context the ranks may exchange values.

        The body must raise an `Exception` on all ranks or on none. After any other `BaseException`, as from Ctrl-C,
        this rank counts as interrupted.
        """
        yield

    def end(self, remove: bool) -> None:
        """Returns when every rank is about to close its engine. Until then this rank serves gathers of its weights.

        Raises `RankError` on all ranks, if only some are about to delete their stores (`remove`).
        """


class Rounds(Agreement):
    """The agreement of several ranks; implements the pager's `Peers`.

    This rank serves other ranks until its own announcement is chosen.
    """

    def __init__(
        self, gathers: WeightGathers, names: Sequence[str], callbacks: EngineCallbacks, timeline: Timeline = OFF
    ) -> None:
        self._gathers, self._names, self._callbacks, self._timeline = gathers, names, callbacks, timeline
        self.ranks = gathers.ranks
        self._agree_titles = [f"agree to gather {name}" for name in names]
        self._reduce_titles = [f"reduce the gradients of {name}" for name in names]
        # autograd thread: two autograd threads may call at the same time. A thread takes this lock before the pager's
        # lock, and never inside of it: `CommonUses` releases the pager's lock before it asks.
        self.lock = threading.RLock()
        self._agreed_unit = -1
        """The unit that all ranks are gathering or reducing now; -1 between collectives."""
        self._retry_answer: GatherDecision
        """Result of a further call of `agree` for `_agreed_unit`, such as after a lack of memory."""
        self._served_short = False
        """True if this rank had no room to gather `_agreed_unit` for another rank.

        All other ranks then wait for this rank.
        """
        self._series: tuple[int, ...] = ()
        """Units in the order in which all ranks gather them. Each is gathered before its first use."""
        self._begun = self._ahead = 0
        """Number of gathers of the series that have begun, and number of gathers that begin before they are needed."""
        self._joined = 0
        """Number of gathers of the series up to the last one of a collective that has begun, or that a Ctrl-C ended."""
        self._in_question = False
        """True during an exchange with all ranks, and from then on if the exchange was interrupted."""

    @property
    def interrupted(self) -> bool:
        return self._in_question or self._agreed_unit >= 0

    # -- collectives --------------------------------------------------------------------------------

    def agree(self, unit: int, state: Callable[[], UnitState]) -> GatherDecision:
        """Returns the common decision on this rank's use of `unit`. Each round calls `state`."""
        latest: list[UnitState] = []

        def look() -> UnitState:
            latest[:] = [state()]
            return latest[0]

        # autograd thread: the lock is held to the end, since a thread that asks after a series has begun must begin
        # its gathers first.
        with self._timeline.span(Row.RANKS, self._agree_titles[unit]), self.lock:
            if self._served_short:  # this rank tries again, since it has made room
                self._serve(RankIntent(Collective.USE, self._agreed_unit), ())
            if self._agreed_unit == unit:  # the gather was agreed on before, when this rank lacked memory
                return self._retry_answer
            intents = self._await_all(Collective.USE, unit, look)
            announcement = intents[self.ranks.rank]
            together = all(intent.same(announcement) for intent in intents)
            series = latest[0].series
            if together and series is not None and all(intent.series == announcement.series for intent in intents):
                self._series, self._begun, self._joined, self._ahead = series.missing, 0, 0, series.ahead
                series.begin()
                return GatherDecision(gather=False, together=True, series=True)
            gather = any(intent.same(announcement) and not intent.ready for intent in intents)
            # The ranks agree on a prefetch only if all use the same unit and have it. Then no rank waits for a gather
            # of this unit.
            following = _common([intent.ahead for intent in intents]) if together and not gather else -1
            answer = GatherDecision(gather, together, all(intent.has_all for intent in intents), following)
            self._agreed_unit, self._retry_answer = unit if gather else following, answer
            return answer

    def agree_ahead(self, ahead: Callable[[], int]) -> int:
        """Returns the unit that every rank could gather next, or -1.

        Called right after a gather that all have announced.
        """
        with self._timeline.span(Row.RANKS, "agree to gather ahead"), self.lock:
            self._check()
            candidate = ahead()
            # calling thread: waits for every rank. All have announced the same gather, so all ask this.
            with self._question():
                rows = self.ranks.collect([candidate], "agree on what to gather ahead")
            following = _common([row[0] for row in rows])
            self._agreed_unit, self._retry_answer = following, GatherDecision(gather=True, together=False)
            return following

    @property
    def behind(self) -> bool:
        """True if gathers of the series have not begun."""
        return self._begun < len(self._series)

    def go_on(self, unit: int) -> None:
        """Begins the gathers of the series up to that of `unit`, and as many gathers ahead as on other ranks."""
        # autograd thread: two autograd threads may come here with different units. Under the lock the gathers begin in
        # the order of the series, as on all other ranks.
        with self.lock:
            if unit in self._series:
                self._gather_series(self._series.index(unit) + 1 + self._ahead)

    def _gather_series(self, stop: int) -> None:
        """Begins the gathers of the series before position `stop`. An interrupted gather is begun again."""
        while self._begun < min(max(stop, self._joined), len(self._series)):
            # Units of one collective begin together, since none of them has its weights before the last has begun.
            units = self._gathers.join(self._series[self._begun :])
            self._joined = self._begun + len(units)
            for unit in units:
                self._check(retried=unit)
                # Set until the gather has begun: if this thread leaves before, by a Ctrl-C, the others wait for it.
                self._agreed_unit = unit
                self._callbacks.serve_gather(unit)
                self._agreed_unit = -1
                self._begun += 1

    def gather(self, unit: int, unsharded: torch.Tensor, share: Sequence[range], uploaded: Event) -> Event:
        """Fills in the other ranks' shards of a unit, as agreed; see `Ranks.gather`."""
        with self._timeline.span(Row.RANKS, "gather"):
            # upload stream: on a GPU the gather runs there, and this thread continues.
            gathered = self._gathers.gather(unit, unsharded, share, uploaded)
            self._agreed_unit = -1
            return gathered

    def reduce(self, unit: int) -> None:
        """Reduces the gradients of `unit` over all ranks that have gradients of it."""
        with self._timeline.span(Row.RANKS, self._reduce_titles[unit]), self.lock:
            position, last = self._callbacks.reduction_position(unit), self._callbacks.is_last_micro_batch()
            intents = self._await_all(Collective.REDUCE, unit, last, position)
            if self._callbacks.pending_unit() == unit:  # otherwise it was sent just now, with the sums of other ranks
                self._serve(intents[self.ranks.rank], intents)

    def step(
        self, micro_batches: int, global_steps: int, settings: int, known: Callable[[], GradientStats]
    ) -> GradientStats:
        with self._timeline.span(Row.RANKS, "agree on a step"):
            self._await_all(Collective.STEP, -1)
            # calling thread: calls `known` only now. Until every rank had arrived, this rank could still receive
            # gradients of others.
            stats = known()
            flags = b"".join(bitmap(segments) for segments in stats.present)
            message = STEP_FACTS.pack(stats.sum_squares, micro_batches, global_steps, settings) + flags
            with self._question():
                rows = self.ranks.collect_bytes(message, "agree on a step")
        return add_up_step(rows, self.ranks.mesh.shards, stats.of_one_rank)

    def add_up(self, numbers: Sequence[float]) -> list[float]:
        # calling thread: waits for every rank. All are within the same step, so all bring their numbers.
        packed = struct.Struct(f"<{len(numbers)}d")
        with self._question():
            rows = self.ranks.collect_bytes(packed.pack(*numbers), "add up the norms")[: self.ranks.mesh.shards]
        return [sum(column) for column in zip(*map(packed.unpack, rows), strict=True)]

    def edit(self, unit: int, edits: Sequence[Edit]) -> list[Edit]:
        # A rank without edits asks too, because edits of other ranks change its weights.
        intents = self._await_all(Collective.EDIT, unit, bool(edits))
        source = next((rank for rank, intent in enumerate(intents) if intent.ready), None)
        if source is None:
            return []
        with self._question():
            headers = [[e.start, e.stop, str(e.values.dtype).removeprefix("torch."), e.state.value] for e in edits]
            rows = self.ranks.share(headers, "edit weights")
            agreed: list[Edit] = []
            for position, (start, stop, dtype, state) in enumerate(rows[source]):
                # calling thread: every rank waits in the same number of broadcasts, one for each header of the source.
                if source == self.ranks.rank:
                    values = edits[position].values
                else:
                    values = torch.empty(stop - start, dtype=getattr(torch, dtype), device="cpu")
                self.ranks.broadcast(values, source)
                agreed.append(Edit(start=start, stop=stop, values=values, state=State(state)))
        return agreed

    def mean(self, value: float | torch.Tensor) -> float:
        # The loss may have a graph; torch warns of that.
        value = float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
        self._await_all(Collective.MEAN, -1)
        with self._question():
            values: list[float] = self.ranks.share(value, "take the mean of a number")
        return sum(values) / len(values)

    def forget(self) -> None:
        """Returns when every rank is about to drop its gradients.

        Each rank's gradients contain parts of other ranks.
        """
        self._await_all(Collective.FORGET, -1)

    @contextlib.contextmanager
    def meeting(self, kind: Collective) -> Iterator[None]:
        self._await_all(kind, -1)
        # calling thread: the body raises an `Exception` on all ranks or on none. After a Ctrl-C the mark stays, since
        # the other ranks may still wait for this one.
        self._in_question = True
        try:
            yield
        except Exception:
            self._in_question = False
            raise
        self._in_question = False

    def end(self, remove: bool) -> None:
        intents = self._await_all(Collective.END, -1, remove)
        if len({intent.ready for intent in intents}) > 1:
            described = "; ".join(
                f"rank {rank} {'deletes' if intent.ready else 'keeps'} its store" for rank, intent in enumerate(intents)
            )
            raise RankError(f"{described}: all ranks must do the same; all stores are kept")

    # -- the round ----------------------------------------------------------------------------------

    def _check(self, retried: int = -1) -> None:
        """Raises `RankError`, and notifies the other ranks, if this rank has left an earlier collective unfinished."""
        # calling thread: `fail` publishes the end of this rank, so the other ranks' waits end too.
        if self._agreed_unit not in (-1, retried):
            raise self.ranks.fail(f"it left an exchange of {self._names[self._agreed_unit]} unfinished")
        if self._in_question:
            raise self.ranks.fail("it was interrupted while it waited for the other ranks")

    def _await_all(
        self, kind: Collective, unit: int, ready: bool | Callable[[], UnitState] = False, position: int = 0
    ) -> list[RankIntent]:
        """Serves other ranks until this rank's announcement is chosen, or until it is a USE and all uses are ready.

        A REDUCE also ends when other ranks have reduced this rank's sum of the unit with theirs.

        For a USE, each round calls the function `ready`, which also returns the series. Returns the announcements of
        the last round.
        """
        with self.lock:
            # Other ranks may still follow the series, and join no round before its end.
            self._gather_series(len(self._series))
            self._check()
            while True:
                state = UnitState(ready, all=False, ahead=-1) if isinstance(ready, bool) else ready()
                series = 0 if state.series is None else state.series.checksum
                pending = self._callbacks.pending_unit()
                announcement = RankIntent(kind, unit, state.unit, pending, state.ahead, state.all, series, position)
                # calling thread: waits for the announcement of every rank, in one small all-gather a round. A rank that
                # has served others repeats its announcement. If a rank is lost, the wait ends with `RankError`.
                numbers = [int(field) for field in announcement]
                with self._question():
                    rows = self.ranks.collect(numbers, f"agree what is next: it {describe(announcement, self._names)}")
                intents = [
                    RankIntent(Collective(row[0]), row[1], bool(row[2]), row[3], row[4], bool(row[5]), row[6], row[7])
                    for row in rows
                ]
                choice = next_collective(intents)
                if choice is None:
                    described = [describe(intent, self._names) for intent in intents]
                    calls = self.ranks.described(described)
                    raise RankError(
                        f"the ranks have reached different calls: {calls}. Every rank must make the same steps, and "
                        "the same edits between them; `with offload.gathered(..., modify=True)` applies one rank's "
                        "edits on all"
                    )
                if choice.next is None:
                    if kind is Collective.USE:  # all uses are ready, this one among them
                        return intents
                elif choice.next.same(announcement):
                    if kind in (Collective.STEP, Collective.EDIT, Collective.LOAD, Collective.SLEEP, Collective.RESIZE):
                        self._gathers.forget()
                    return intents
                else:
                    self._serve(choice.next, intents)
                    if kind is Collective.REDUCE and self._callbacks.pending_unit() != unit:
                        return intents

    @contextlib.contextmanager
    def _question(self) -> Iterator[None]:
        """Marks an exchange with all ranks as under way. The mark stays after an exception: others have moved on."""
        self._in_question = True
        yield
        self._in_question = False  # not in a `finally`: see above

    def _serve(self, chosen: RankIntent, intents: Sequence[RankIntent]) -> None:
        """Takes part in the chosen collective.

        An exception leaves `_agreed_unit` set, since the other ranks then wait.
        """
        # calling thread: the callbacks wait for reads and updates of this rank at most, which need no other rank.
        self._agreed_unit = chosen.unit
        if chosen.kind is Collective.REDUCE:
            # A rank that asks for anything else in the middle of a unit contributes what it has of the unit.
            holders = [
                rank
                for rank, intent in enumerate(intents)
                if (intent.same(chosen) if intent.kind is Collective.REDUCE else intent.holds == chosen.unit)
            ]
            self._callbacks.serve_reduce(chosen.unit, holders, complete=chosen.ready)
        else:
            try:
                self._callbacks.serve_gather(chosen.unit)
            except BudgetError:
                self._served_short = True
                raise
            self._served_short = False
        self._agreed_unit = -1


def _common(units: Sequence[int]) -> int:
    return units[0] if len(set(units)) == 1 else -1


# -- all or nothing ------------------------------------------------------------------------------------
#
# All ranks do such work at the same place of the program. It succeeds on all ranks or on none.


class AllOrNothing:
    """Common work of `ranks`, on this rank. A process that trains alone is the only rank."""

    def __init__(self, ranks: Ranks, what: str) -> None:
        """Stores `what`, words for the work that error messages contain."""
        self.rank, self.size = ranks.rank, ranks.size
        self._ranks, self._what = ranks, what

    def settle(self, action: Callable[[], Any]) -> list[Any]:
        """Runs `action` on every rank, and returns the results of all ranks; several ranks exchange them as JSON.

        If `action` raises an `Exception` on one rank, this method raises on all ranks. A rank on which `action` failed
        raises its own error. All other ranks raise a `StoreError` that names the first rank that failed.
        """
        if self.size == 1:
            return [action()]
        value, failure = None, None
        try:
            value = action()
        except Exception as error:
            failure = error
        message = None if failure is None else f"{type(failure).__name__}: {failure}"
        # calling thread: waits for every rank. A rank whose action failed shares its message too, so the wait ends.
        rows = self._ranks.share([message, value], self._what)
        if failure is not None:
            raise failure
        for rank, (message, _) in enumerate(rows):
            if message is not None:
                raise StoreError(f"rank {rank} could not {self._what}, so no rank did: {message}")
        return [value for _, value in rows]

    def by_first(self, action: Callable[[], Any]) -> Any:
        """Runs `action` on rank 0 only, and returns its result on every rank."""
        return self.settle(lambda: action() if self.rank == 0 else None)[0]

    def same(self, facts: dict[str, Any]) -> None:
        """Raises `RankError` on all ranks if the `facts` of any rank differ from those of rank 0."""
        everyone = self.settle(lambda: facts)
        for rank, row in enumerate(everyone):
            for name, value in everyone[0].items():
                if row[name] != value:
                    raise RankError(
                        f"the ranks were asked to {self._what} with different values of {name}: rank 0 with "
                        f"{value!r}, rank {rank} with {row[name]!r}; give every rank the same value"
                    )


@contextlib.contextmanager
def all_or_nothing(agreement: Agreement, kind: Collective, what: str) -> Iterator[AllOrNothing]:
    """Waits until every rank is about to do this work, and yields an `AllOrNothing` for it.

    Any exception that leaves the body must come from the yielded object, so that all ranks raise.
    """
    with agreement.meeting(kind):
        yield AllOrNothing(agreement.ranks, what)
