"""What ranks do next, decided from what each is about to do: nobody waits for ever, whatever paths they take."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offload.engine.rounds import Kind, Wish, _bitmap, _union, choose

FREE = (Kind.AHEAD, Kind.GATHER, Kind.REDUCE)
TOGETHER = (Kind.STEP, Kind.EDIT, Kind.END, Kind.MEAN)

free = st.builds(Wish, st.sampled_from(FREE), st.integers(0, 3), st.booleans())
together = st.builds(Wish, st.sampled_from(TOGETHER), st.integers(-1, 3))


@st.composite
def programs(draw: st.DrawFn) -> list[list[Wish]]:
    """What each rank is going to do: the same things together, and between them whatever it likes."""
    shared = draw(st.lists(together, max_size=4))
    ranks = draw(st.integers(2, 4))
    return [
        [wish for common in [*shared, Wish(Kind.STEP)] for wish in [*draw(st.lists(free, max_size=6)), common]]
        for _ in range(ranks)
    ]


@given(programs())
def test_every_program_comes_to_its_end(programs: list[list[Wish]]) -> None:
    at = [0] * len(programs)
    done: list[Wish] = []
    while any(position < len(program) for position, program in zip(at, programs, strict=True)):
        # A rank cannot be past its end while another is not: the last wish is one that all must have.
        wishes = [program[position] for position, program in zip(at, programs, strict=True)]
        choice = choose(wishes)
        assert choice is not None, f"nothing can be next of {wishes}"
        moved = 0
        for rank, wish in enumerate(wishes):
            if wish.kind is Kind.AHEAD if choice.next is None else wish.same(choice.next):
                at[rank] += 1
                moved += 1
        assert moved, "every round brings somebody on"
        if choice.next is not None:
            done.append(choice.next)
            if choice.next.kind in TOGETHER:
                assert moved == len(programs), "what must be done together is done together"
    common = [wish for wish in programs[0] if wish.kind in TOGETHER]
    assert [wish for wish in done if wish.kind in TOGETHER] == common
    for program in programs:
        needed = [wish for wish in program if wish.kind in (Kind.GATHER, Kind.REDUCE)]
        assert all(any(wish.same(other) for other in done) for wish in needed)


@given(st.lists(together, min_size=2, max_size=4))
def test_what_must_be_the_same_and_is_not_can_never_be(wishes: list[Wish]) -> None:
    same = all(wish.same(wishes[0]) for wish in wishes)
    assert (choose(wishes) is None) == (not same)


@given(st.lists(st.one_of(free, together), min_size=1, max_size=5))
def test_every_rank_sees_the_same_choice(wishes: list[Wish]) -> None:
    """It depends on the list alone, and what the lowest rank needs comes before what others need of the same kind."""
    choice = choose(wishes)
    assert choice == choose(list(wishes))
    if choice is not None and choice.next is not None:
        assert choice.next == next(wish for wish in wishes if wish.kind is choice.next.kind)


@given(st.lists(st.lists(st.sets(st.integers(0, 300)), min_size=3, max_size=3), min_size=1, max_size=4))
def test_presence_is_what_any_rank_has(ranks: list[list[set[int]]]) -> None:
    rows = [b"".join(_bitmap(segments) for segments in units) for units in ranks]
    assert _union(rows) == [set().union(*(units[unit] for units in ranks)) for unit in range(3)]
