"""Agreement of ranks: each announces its next collective, and all decide from the same list of announcements.

    all announce the same            all do it; weights that all have are not gathered again
    some announce another            one is chosen, a gather before a reduction. The other ranks serve it with
                                     their partition of the weights, or with their gradients of the unit, if any
    all that use weights have them   these ranks continue; the others announce again
    nothing announced can be next    `RankError` on every rank, with all announcements: no rank waits for ever

So ranks may take different paths, as models with experts and loops that evaluate on one rank do, as long as all of them
reach the same `step()`. `next_collective` decides, from the list alone. A round is a message of a few numbers, sent by
the thread that runs the model or its backward. Background threads take part in no round.

[Note: series] Where all ranks announce the same series, of gathers (see `swapper.ranks.common_uses`) or of reductions,
each carries it out without a further round. A rank that wants anything else first takes part in all that is left, with
its shards and with zeros for gradients, and asks then. One series is under way at a time, since a round begins each.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from offload.engine.callbacks import Edit, EngineCallbacks, GradientStats
from offload.engine.distributed.payload.step_facts import add_up_step, pack_step
from offload.engine.distributed.payload.weights import WeightGathers
from offload.engine.distributed.rounds.intents import Collective, RankIntent, describe, next_collective
from offload.errors import BudgetError, RankError
from offload.states import State
from offload.swapper.memory.device import Event
from offload.swapper.pager import Agreed, Having, checksum
from offload.timeline import OFF, Row, Timeline


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
        self._served_short = False
        """True if this rank had no room for `_agreed_unit`, which another rank needs and for which all others wait."""
        self._series: tuple[int, ...] = ()
        """Units that all ranks gather in this order, each before its first use there."""
        self._begun = self._ahead = 0
        """Number of gathers of the series that have begun, and of those that begin before they are needed."""
        self._reductions: deque[int] = deque()
        """Units that all ranks reduce next in this order, without a round."""
        self._uses_ask = ranks.mesh.shards > 1
        """False while all ranks know that their next uses need no round, as where each has whole weights."""
        self._strayed = False
        """True if this rank has left a series of reductions. It takes part in no other."""
        self._in_question = False
        """True during an exchange with all ranks, and from then on if the exchange was interrupted."""

    # -- collectives --------------------------------------------------------------------------------

    def agree(self, unit: int, having: Callable[[], Having]) -> Agreed:
        """Returns the common decision on this rank's use of `unit`; `having` is called in each round."""
        # The lock is held to the end, since a thread that asks after a series has begun must begin its gathers first.
        with self._timeline.span(Row.RANKS, self._agree_titles[unit]), self.lock:
            return self._agree(unit, having)

    def _agree(self, unit: int, having: Callable[[], Having]) -> Agreed:
        """Announces the use of `unit`, and derives the decision from the last round."""
        if self._served_short:  # this rank tries again, since it has made room
            self._serve(Collective.USE, self._agreed_unit, ())
        if self._agreed_unit == unit:  # the gather was agreed on before, when this rank lacked memory
            return self._retry_answer
        latest: list[Having] = []

        def look() -> Having:
            latest[:] = [having()]
            return latest[0]

        intents = self._await_all(Collective.USE, unit, look)
        mine = intents[self._ranks.rank]
        together = all(intent.same(mine) for intent in intents)
        series = latest[0].series
        if together and series is not None and all(intent.series == mine.series for intent in intents):
            self._series, self._begun, self._ahead = series.missing, 0, series.ahead
            series.begin()
            self._uses_ask = False
            return Agreed(gather=False, together=True, series=True)
        gather = any(intent.same(mine) and not intent.ready for intent in intents)
        # A prefetch is agreed on only if all ranks use the same unit and have it: none of them then waits for a gather
        # of the unit itself.
        following = _common([intent.ahead for intent in intents]) if together and not gather else -1
        answer = Agreed(gather, together, all(intent.has_all for intent in intents), following)
        self._agree_on(unit if gather else following, answer)
        self._uses_ask = not answer.all
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

    @property
    def behind(self) -> bool:
        """True if gathers of the series have not begun."""
        return self._begun < len(self._series)

    def go_on(self, unit: int) -> None:
        """Begins the gathers of the series up to that of `unit`, and some ahead: as many on all ranks."""
        with self.lock:
            if unit in self._series:
                self._gather_series(self._series.index(unit) + 1 + self._ahead)

    def _gather_series(self, stop: int) -> None:
        """Begins the gathers of the series before its position `stop`. What was interrupted is begun again."""
        for unit in self._series[self._begun : stop]:
            self._check(retried=unit)
            self._agreed_unit = unit
            self._callbacks.serve_gather(unit)
            self._agreed_unit = -1
            self._begun += 1

    def gather(self, unit: int, whole: torch.Tensor, share: Sequence[range], uploaded: Event) -> Event:
        """Fills in the other ranks' partitions of a unit, as agreed; see `Ranks.gather`."""
        with self._timeline.span(Row.RANKS, "gather"):
            gathered = self._gathers.gather(unit, whole, share, uploaded)
            self._agreed_unit = -1
            return gathered

    def reduce(self, unit: int, expected: Sequence[int] = ()) -> None:
        """Reduces the gradients of `unit` with those of all ranks that have some.

        Args:
            unit: the unit, of which this rank has gradients.
            expected: all units that this backward is expected to reduce, in their order, from `unit` on. If all ranks
                expect the same, and use units without rounds, those after `unit` need none either.
        """
        with self._timeline.span(Row.RANKS, self._reduce_titles[unit]), self.lock:
            if self._reductions and self._reductions[0] == unit:
                self._check()
                self._reduce_next()
                return
            self._end_series()
            if self._callbacks.pending_unit() != unit:
                return  # reduced just now, with what the other ranks have
            series = 0 if self._uses_ask or self._strayed or not expected else checksum(*expected)
            intents = self._await_all(Collective.REDUCE, unit, series=series)
            if series and all(intent.same(intents[0]) and intent.series == series for intent in intents):
                self._reductions.extend(expected[1:])
            self._serve(Collective.REDUCE, unit, intents)

    def _reduce_next(self) -> None:
        """Reduces the next unit of the series, to which every rank contributes: zeros if it has no gradients."""
        unit = self._agreed_unit = self._reductions.popleft()
        self._callbacks.serve_reduce(unit, range(self._ranks.size))
        self._agreed_unit = -1

    def end_reductions(self) -> None:
        """Takes part in all reductions that are left of a series, at the end of a backward that has made fewer."""
        with self.lock:
            if self._reductions:
                self._end_series()

    def _end_series(self) -> None:
        """Begins all that is left of a series. Other ranks may follow it, and learn of no round before its end."""
        self._gather_series(len(self._series))
        self._check()
        while self._reductions:
            self._strayed = True
            self._reduce_next()

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
        with self._question():
            rows = self._ranks.collect_bytes(pack_step(mine, micro_batches, global_steps, settings), "agree on a step")
        return add_up_step(rows, self._ranks.mesh.shards)

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

    def mean(self, value: float | torch.Tensor) -> float:
        """Returns the mean of every rank's `value`."""
        # A loss with a graph may be given, of which torch warns.
        value = float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
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

    def _check(self, retried: int = -1) -> None:
        """Raises `RankError`, and notifies the other ranks, if this rank has left an earlier collective unfinished.

        Args:
            retried: a unit whose gather is begun again, which is no reason.
        """
        if self._agreed_unit not in (-1, retried):
            raise self._ranks.fail(f"it left an exchange of {self._names[self._agreed_unit]} unfinished")
        if self._in_question:
            raise self._ranks.fail("it was interrupted while it waited for the other ranks")

    def _await_all(
        self, kind: Collective, unit: int, ready: bool | Callable[[], Having] = False, series: int = 0
    ) -> list[RankIntent]:
        """Serves other ranks until this rank's announcement is chosen, or is a USE and all uses are ready.

        Args:
            kind: the announcement.
            unit: its unit, or -1.
            ready: this rank's field of that name; for USE, a function called in each round.
            series: this rank's field `series`; for USE, that function returns it.

        Returns:
            The last announcements.
        """
        with self.lock:
            self._end_series()
            while True:
                has = Having(ready, all=False, ahead=-1) if isinstance(ready, bool) else ready()
                mark = series if has.series is None else has.series.checksum
                mine = RankIntent(kind, unit, has.unit, self._callbacks.pending_unit(), has.ahead, has.all, mark)
                # One small all-gather for each round. A rank that has served others repeats its announcement.
                numbers = [int(field) for field in mine]
                with self._question():
                    rows = self._ranks.collect(numbers, f"agree what is next: it {describe(mine, self._names)}")
                intents = [
                    RankIntent(Collective(row[0]), row[1], bool(row[2]), row[3], row[4], bool(row[5]), row[6])
                    for row in rows
                ]
                choice = next_collective(intents)
                if choice is None:
                    described = [describe(intent, self._names) for intent in intents]
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
            try:
                self._callbacks.serve_gather(unit)
            except BudgetError:
                self._served_short = True
                raise
            self._served_short = False
        self._agreed_unit = -1


def _common(units: Sequence[int]) -> int:
    """Returns the unit that all agree on, or -1."""
    return units[0] if len(set(units)) == 1 else -1
