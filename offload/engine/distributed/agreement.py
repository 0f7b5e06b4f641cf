"""Agreement: before a rank uses a unit or moves gradients it says what it is about to do, and all see the same list.

    all about to do the same         it is done; weights that all have are not gathered again
    some are not                     what one rank needs comes first, and the others serve it: they give their part of
                                     the weights that it gathers, or nothing to the gradients that it reduces
    who uses what it has             goes on
    nothing of the list can be next  `RankError` on every rank, with what each was about to do: no rank waits for ever

So ranks may take different paths, as models with experts do and loops that evaluate on one rank alone, for as long as
all of them come to the same `step()`. `choose` decides, from the list alone. A round is a message of a few numbers,
sent by the thread that runs the model or its backward; background threads take part in none.
"""

from __future__ import annotations

import contextlib
import enum
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from offload.engine.callbacks import Edit, EngineCallbacks, Known
from offload.engine.distributed.process_group import Ranks
from offload.errors import RankError, UsageError
from offload.states import State
from offload.swapper.device_cache import Agreed, Having
from offload.swapper.memory.device import Event
from offload.timeline import OFF, Row, Timeline


class Kind(enum.IntEnum):
    """What a rank may be about to do."""

    USE = 0
    """Use the weights of a unit: in a forward, a backward or a look at them."""
    REDUCE = 1
    """Reduce the gradients of a unit."""
    STEP = 2
    """Decide on a step."""
    EDIT = 3
    """Change the weights of a unit."""
    END = 4
    """Close the engine."""
    MEAN = 5
    """Tell a number to all."""
    FORGET = 6
    """Drop gradients that were reduced."""
    SAVE = 7
    """Save a checkpoint."""
    LOAD = 8
    """Load one."""
    LOOK = 9
    """Look at a state of a parameter, or set a gradient."""


class Wish(NamedTuple):
    """What one rank is about to do."""

    kind: Kind
    unit: int = -1
    ready: bool = False
    """Of USE: whether it has them already. Of EDIT: whether it has new values. Of END: whether it deletes its store."""
    holds: int = -1
    """The unit of which it holds gradients that are not reduced."""
    ahead: int = -1
    """Of USE: the unit that it could gather next."""
    has_all: bool = False
    """Of USE: whether it has all units."""

    def same(self, other: Wish) -> bool:
        return (self.kind, self.unit) == (other.kind, other.unit)


class Choice(NamedTuple):
    """What all ranks do next; None where those that use what they have go on, and the others ask again."""

    next: Wish | None


def choose(wishes: Sequence[Wish]) -> Choice | None:
    """What comes next, for the wishes of all ranks in their order; None where nothing can.

    Every rank with a wish that was not chosen asks again. What is reduced together, and so in which order gradients are
    added, depends on what the ranks reduce alone: not on what they must gather first, which is another thing in every
    placement.
    """
    if all(wish.same(wishes[0]) for wish in wishes):
        return Choice(wishes[0])
    uses = [wish for wish in wishes if wish.kind is Kind.USE]
    if uses:
        return Choice(next((wish for wish in uses if not wish.ready), None))
    reduces = [wish for wish in wishes if wish.kind is Kind.REDUCE]
    return Choice(reduces[0]) if reduces else None


_FACTS = struct.Struct("<dqqq")  # sum of squares, micro-batches, steps, checksum of the optimizer's settings
_SAME_BATCHES = "each must train on as many micro-batches as the others (drop_last, or a sampler that pads)"
_MUST_AGREE = (
    ("micro-batches since the last boundary", 1, _SAME_BATCHES),
    ("steps so far", 2, _SAME_BATCHES),
    (
        "learning rates or other settings of the optimizer (checksums)",
        3,
        "each holds a part of every parameter, so all must use the same: take a schedule's metric from engine.mean()",
    ),
)


class Rounds:
    """One rank's side of every agreement; `pager.Peers` for its pager. Serves others until its own turn comes."""

    def __init__(
        self, ranks: Ranks, names: Sequence[str], callbacks: EngineCallbacks, timeline: Timeline = OFF
    ) -> None:
        """`names` has the name of each unit. `timeline` shows what is done with other ranks, with the wait for them."""
        self._ranks, self._names, self._callbacks, self._timeline = ranks, names, callbacks, timeline
        self._agree_titles = [f"agree to gather {name}" for name in names]
        self._reduce_titles = [f"reduce the gradients of {name}" for name in names]
        self.rank, self.size = ranks.rank, ranks.size
        self._lock = threading.RLock()  # two of autograd's threads may come at once
        self._agreed = -1
        """The unit that all ranks are gathering or reducing now; -1 between collectives."""
        self._again: Agreed
        """What `agree` answers where this rank asks once more for that unit."""
        self._asking = False
        """Whether a question to all ranks is under way; still so after an interrupt."""

    # -- what a rank may be about to do -------------------------------------------------------------

    def agree(self, unit: int, having: Callable[[], Having]) -> Agreed:
        """What all ranks do for this one's use of `unit`; `having` is asked in each round."""
        with self._timeline.span(Row.RANKS, self._agree_titles[unit]):
            return self._agree(unit, having)

    def _agree(self, unit: int, having: Callable[[], Having]) -> Agreed:
        if self._agreed == unit:  # it was to be gathered, there was no room, and now there is some
            return self._again
        wishes = self._reach(Kind.USE, unit, having)
        mine = wishes[self._ranks.rank]
        together = all(wish.same(mine) for wish in wishes)
        gather = any(wish.same(mine) and not wish.ready for wish in wishes)
        following = _common([wish.ahead for wish in wishes]) if together and not gather else -1
        answer = Agreed(gather, together, all(wish.has_all for wish in wishes), following)
        self._agree_on(unit if gather else following, answer)
        return answer

    def agree_ahead(self, ahead: Callable[[], int]) -> int:
        """The unit that every rank could gather next, or -1. Only right after a gather to which all had come."""
        with self._timeline.span(Row.RANKS, "agree to gather ahead"), self._lock:
            self._check()
            mine = ahead()
            with self._question():
                rows = self._ranks.collect([mine], "agree on what to gather ahead")
            following = _common([row[0] for row in rows])
            self._agree_on(following, Agreed(gather=True, together=False))
            return following

    def _agree_on(self, unit: int, again: Agreed) -> None:
        """All gather `unit` now, if any. Where this rank has no room for it and tries again, the answer is `again`."""
        self._agreed, self._again = unit, again

    def gather(self, whole: torch.Tensor, share: Sequence[range], uploaded: Event) -> Event:
        """Fill in what the other ranks have of a unit, as all have agreed to; see `Ranks.gather`."""
        with self._timeline.span(Row.RANKS, "gather"):
            gathered = self._ranks.gather(whole, share, uploaded)
            self._agreed = -1
            return gathered

    def reduce(self, unit: int) -> None:
        """Reduce the gradients of `unit` with those of all ranks that have some."""
        with self._timeline.span(Row.RANKS, self._reduce_titles[unit]), self._lock:
            self._serve(Kind.REDUCE, unit, self._reach(Kind.REDUCE, unit))

    def step(self, micro_batches: int, global_steps: int, settings: int, known: Callable[[], Known]) -> Known:
        """Add up what the ranks know of a step. By the time that it returns, each has the step before on disk.

        `known` is asked when every rank is here: until then gradients of others may still come in; `settings` is a
        checksum of the optimizer's. Raises `UsageError` on all ranks where they are not at the same step, had not as
        many micro-batches, or have other settings.
        """
        with self._timeline.span(Row.RANKS, "agree on a step"):
            return self._step(micro_batches, global_steps, settings, known)

    def _step(self, micro_batches: int, global_steps: int, settings: int, known: Callable[[], Known]) -> Known:
        self._reach(Kind.STEP, -1)
        mine = known()
        flags = b"".join(_bitmap(segments) for segments in mine.present)
        content = _FACTS.pack(mine.sum_squares, micro_batches, global_steps, settings) + flags
        with self._question():
            rows = self._ranks.collect_bytes(content, "decide on a step")
        facts = [_FACTS.unpack_from(row) for row in rows]
        for what, column, advice in _MUST_AGREE:
            numbers = [row[column] for row in facts]
            if len(set(numbers)) > 1:
                raise UsageError(f"the ranks differ in their {what}: {', '.join(map(str, numbers))}; {advice}")
        present = _union([row[_FACTS.size :] for row in rows])
        return Known(sum_squares=sum(row[0] for row in facts), present=present)

    def add_up(self, numbers: Sequence[float]) -> list[float]:
        """The sums over all ranks, added in their order. As a part of `step`, which every rank has come to."""
        with self._question():
            rows = self._ranks.collect_bytes(struct.pack(f"<{len(numbers)}d", *numbers), "weigh the parameters")
        return [sum(column) for column in zip(*(struct.unpack(f"<{len(numbers)}d", row) for row in rows), strict=True)]

    def edit(self, unit: int, edits: Sequence[Edit]) -> list[Edit]:
        """The new values of `unit` that count on every rank: those of the lowest rank that has any."""
        wishes = self._reach(Kind.EDIT, unit, bool(edits))
        source = next((rank for rank, wish in enumerate(wishes) if wish.ready), None)
        if source is None:
            return []
        with self._question():
            mine = [[e.start, e.stop, str(e.values.dtype).removeprefix("torch."), e.state.value] for e in edits]
            what = self._ranks.share(mine, "change weights")
            agreed: list[Edit] = []
            for position, (start, stop, dtype, state) in enumerate(what[source]):
                if source == self._ranks.rank:
                    values = edits[position].values
                else:
                    values = torch.empty(stop - start, dtype=getattr(torch, dtype), device="cpu")
                self._ranks.broadcast(values, source)
                agreed.append(Edit(start=start, stop=stop, values=values, state=State(state)))
        return agreed

    def mean(self, value: float) -> float:
        """The mean of every rank's `value`."""
        value = float(value)
        self._reach(Kind.MEAN, -1)
        with self._question():
            values: list[float] = self._ranks.share(value, "tell a number")
        return sum(values) / len(values)

    def forget(self) -> None:
        """Return when every rank is about to drop its gradients, which are in part those of others."""
        self._reach(Kind.FORGET, -1)

    @contextlib.contextmanager
    def meeting(self, kind: Kind) -> Iterator[Callable[[Any, str], list[Any]]]:
        """Wait until every rank is about to do this; gives what tells every rank's values to all, as `Ranks.share`.

        An `Exception` that leaves it is known to all ranks; after anything else this rank has left the others alone.
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
        """Return when every rank is about to close its engine: until then others may need this one's weights.

        Raises `RankError` on all where only some are about to delete their stores.
        """
        wishes = self._reach(Kind.END, -1, remove)
        if len({wish.ready for wish in wishes}) > 1:
            told = "; ".join(
                f"rank {rank} {'deletes' if wish.ready else 'keeps'} its store" for rank, wish in enumerate(wishes)
            )
            raise RankError(f"{told}: all must do the same, else nothing can be resumed; all are kept")

    # -- the round ----------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raise what there is to raise before a question, after an earlier error."""
        if self._agreed >= 0:
            raise self._ranks.fail(f"it could not take its part in moving {self._names[self._agreed]}")
        if self._asking:
            raise self._ranks.fail("it was interrupted while it waited for the others")

    def _reach(
        self,
        kind: Kind,
        unit: int,
        what: bool | Callable[[], Having] = False,
    ) -> list[Wish]:
        """Serve other ranks until all are about to do this, or until this one needs no other; the last wishes."""
        with self._lock:
            self._check()
            while True:
                has = Having(what, all=False, ahead=-1) if isinstance(what, bool) else what()
                mine = Wish(kind, unit, has.unit, self._callbacks.pending_unit(), has.ahead, has.all)
                numbers = [int(field) for field in mine]
                with self._question():
                    rows = self._ranks.collect(numbers, _words(mine, self._names))
                wishes = [Wish(Kind(row[0]), row[1], bool(row[2]), row[3], row[4], bool(row[5])) for row in rows]
                choice = choose(wishes)
                if choice is None:
                    told = "; ".join(f"rank {rank} {_words(wish, self._names)}" for rank, wish in enumerate(wishes))
                    raise RankError(
                        f"the ranks have come to different places: {told}. Every rank must make the same steps, and "
                        f"the same edits between them; `with offload.gathered(..., modify=True)` takes one rank's for "
                        f"all"
                    )
                if choice.next is None:
                    if kind is Kind.USE:  # of what is here: else it would have been chosen
                        return wishes
                elif choice.next.same(mine):
                    return wishes
                else:
                    self._serve(choice.next.kind, choice.next.unit, wishes)

    @property
    def interrupted(self) -> bool:
        """Whether this rank has left the others in the middle of something."""
        return self._asking or self._agreed >= 0

    @contextlib.contextmanager
    def _question(self) -> Iterator[None]:
        self._asking = True
        yield
        self._asking = False  # not so after an exception: the others have moved on, and this rank has not

    def _serve(self, kind: Kind, unit: int, wishes: Sequence[Wish]) -> None:
        """Take part in what was chosen. An exception on the way leaves the others waiting, and is known as that."""
        self._agreed = unit
        if kind is Kind.REDUCE:
            self._callbacks.serve_reduce(unit, [rank for rank, wish in enumerate(wishes) if wish.holds == unit])
        else:
            self._callbacks.serve_gather(unit)
        self._agreed = -1


_DOES = {
    Kind.USE: "uses the weights of {}",
    Kind.REDUCE: "reduces the gradients of {}",
    Kind.STEP: "is at step()",
    Kind.EDIT: "changes the weights of {}",
    Kind.END: "closes its engine",
    Kind.MEAN: "tells a number to all",
    Kind.FORGET: "drops its gradients (zero_grad)",
    Kind.SAVE: "saves a checkpoint",
    Kind.LOAD: "loads a checkpoint",
    Kind.LOOK: "looks at a state of a parameter",
}


def _words(wish: Wish, names: Sequence[str]) -> str:
    return _DOES[wish.kind].format(names[wish.unit] if wish.unit >= 0 else "")


def _common(units: Sequence[int]) -> int:
    """The one that all are, or -1."""
    return units[0] if len(set(units)) == 1 else -1


def _bitmap(segments: set[int]) -> bytes:
    """The length in bytes, then a bit for each segment."""
    number = sum(1 << segment for segment in segments)
    length = (number.bit_length() + 7) // 8
    return struct.pack("<I", length) + number.to_bytes(length, "little")


def _union(rows: Sequence[bytes]) -> list[set[int]]:
    """For each unit, the segments of which any row's bitmap has the bit."""
    return [set().union(*sets) for sets in zip(*(list(_segments(row)) for row in rows), strict=True)]


def _segments(row: bytes) -> Sequence[set[int]]:
    found, position = [], 0
    while position < len(row):
        (length,) = struct.unpack_from("<I", row, position)
        position += 4
        number = int.from_bytes(row[position : position + length], "little")
        found.append({bit for bit in range(number.bit_length()) if number >> bit & 1})
        position += length
    return found
