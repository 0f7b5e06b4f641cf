"""Ranks decide the next collective from all ranks' intents: no rank waits for ever, on any paths."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.distributed.agreement import (
    Collective,
    NextCollective,
    RankIntent,
    Rounds,
    bitmap,
    next_collective,
    union,
)
from offload.errors import BudgetError, RankError
from offload.swapper.pager import UnitState

FREE = (Collective.USE, Collective.REDUCE)
TOGETHER = (Collective.STEP, Collective.EDIT, Collective.END, Collective.MEAN)

free = st.builds(RankIntent, st.sampled_from(FREE), st.integers(0, 3), st.booleans())
together = st.builds(RankIntent, st.sampled_from(TOGETHER), st.integers(-1, 3))


def goes_on(intent: RankIntent, choice: NextCollective) -> bool:
    """Returns True if a rank with this intent has what it needs by the end of the round."""
    return intent.kind is Collective.USE if choice.next is None else intent.same(choice.next)


@st.composite
def programs(draw: st.DrawFn) -> list[list[RankIntent]]:
    """What each rank is going to do: the same things together, and between them whatever it likes."""
    shared = draw(st.lists(together, max_size=4))
    ranks = draw(st.integers(2, 4))
    return [
        [
            intent
            for common in [*shared, RankIntent(Collective.STEP)]
            for intent in [*draw(st.lists(free, max_size=6)), common]
        ]
        for _ in range(ranks)
    ]


def test_a_gather_comes_before_a_reduction_which_waits_for_all_uses() -> None:
    """Which gradients are reduced together must not depend on the gathers of other ranks."""
    reduce, missing = RankIntent(Collective.REDUCE, 1), RankIntent(Collective.USE, 2)
    ready = missing._replace(ready=True)
    assert next_collective([reduce, missing, ready]) == NextCollective(missing)
    assert next_collective([reduce, ready, ready]) == NextCollective(None)
    assert next_collective([reduce, RankIntent(Collective.STEP)]) == NextCollective(reduce)


@given(programs())
def test_every_program_comes_to_its_end(programs: list[list[RankIntent]]) -> None:
    at = [0] * len(programs)
    done: list[RankIntent] = []
    while any(position < len(program) for position, program in zip(at, programs, strict=True)):
        # A rank cannot be past its end while another is not: the last intent is one that all must have.
        intents = [program[position] for position, program in zip(at, programs, strict=True)]
        choice = next_collective(intents)
        assert choice is not None, f"nothing can be next of {intents}"
        moved = [rank for rank, intent in enumerate(intents) if goes_on(intent, choice)]
        for rank in moved:
            at[rank] += 1
        assert moved, "every round brings somebody on"
        if choice.next is None:
            assert all(intents[rank].ready for rank in moved), "nobody uses what it has not"
        else:
            done.append(choice.next)
            if choice.next.kind in TOGETHER:
                assert len(moved) == len(programs), "what must be done together is done together"
    common = [intent for intent in programs[0] if intent.kind in TOGETHER]
    assert [intent for intent in done if intent.kind in TOGETHER] == common
    for program in programs:
        needed = [
            intent
            for intent in program
            if intent.kind is Collective.REDUCE or (intent.kind is Collective.USE and not intent.ready)
        ]
        assert all(any(intent.same(other) for other in done) for intent in needed)


@given(st.lists(st.tuples(st.sampled_from(FREE), st.integers(0, 3)), max_size=8), st.integers(2, 4), st.data())
def test_ranks_on_one_path_move_together(path: list[tuple[Collective, int]], ranks: int, data: st.DataObject) -> None:
    """Whatever each has on its device: none runs ahead, so collectives of the user's own may stand anywhere between."""
    for kind, unit in path:
        choice = next_collective([RankIntent(kind, unit, data.draw(st.booleans())) for _ in range(ranks)])
        assert choice is not None and choice.next is not None and choice.next.same(RankIntent(kind, unit))


@given(st.lists(together, min_size=2, max_size=4))
def test_what_must_be_the_same_and_is_not_can_never_be(intents: list[RankIntent]) -> None:
    same = all(intent.same(intents[0]) for intent in intents)
    assert (next_collective(intents) is None) == (not same)


@given(st.lists(st.one_of(free, together), min_size=1, max_size=5))
def test_every_rank_sees_the_same_choice(intents: list[RankIntent]) -> None:
    """It depends on the list alone, and what the lowest rank needs comes before what others need of the same kind."""
    choice = next_collective(intents)
    assert choice == next_collective(list(intents))
    if choice is not None and choice.next is not None and not all(intent.same(intents[0]) for intent in intents):
        needs = [
            intent
            for intent in intents
            if intent.kind is choice.next.kind and not (intent.kind is Collective.USE and intent.ready)
        ]
        assert choice.next == needs[0]


@given(st.lists(st.lists(st.sets(st.integers(0, 300)), min_size=3, max_size=3), min_size=1, max_size=4))
def test_presence_is_what_any_rank_has(ranks: list[list[set[int]]]) -> None:
    rows = [b"".join(bitmap(segments) for segments in units) for units in ranks]
    assert union(rows) == [set().union(*(units[unit] for units in ranks)) for unit in range(3)]


def test_a_gather_for_another_rank_is_tried_again_once_there_is_room() -> None:
    """The other rank waits for it, whatever this rank needs itself."""
    served: list[int] = []

    def serve(unit: int) -> None:
        served.append(unit)
        if len(served) == 1:
            raise BudgetError("no room")

    def collect(mine: list[int], _: str) -> list[list[int]]:
        return [mine, [int(field) for field in RankIntent(Collective.USE, 1, ready=len(served) > 1)]]

    two: Any = SimpleNamespace(rank=0, size=2, mesh=SimpleNamespace(shards=2), collect=collect, fail=RankError)
    callbacks: Any = SimpleNamespace(pending_unit=lambda: -1, serve_gather=serve)
    agreement = Rounds(SimpleNamespace(ranks=two), ["a", "b"], callbacks)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(BudgetError) if not served else contextlib.nullcontext():
            agreement.agree(0, lambda: UnitState(unit=True, all=False, ahead=-1))
    assert served == [1, 1] and not agreement.interrupted
