"""Decisions of the pager and of tiers, as pure functions."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import BudgetError
from offload.layout.modes import MODES
from offload.layout.placement import MachineMemory, Placement, place, usable_host
from offload.layout.tiers import GradientDtypes, Partitions, PlacementRequest, TierMap, configured, differences
from offload.notices import Remark
from offload.sizes import GIB, MIB, align_up
from offload.states import State, Tier
from offload.swapper import policy
from offload.swapper.memory.allocator import Allocator
from offload.swapper.memory.device import Device
from offload.swapper.memory.device_arena import check_budget
from offload.swapper.memory.host_arena import HostArena, HostBudget
from offload.swapper.policy import (
    NEVER,
    AccessOrder,
    Floor,
    IdleBlocks,
    Limits,
    UnitBlock,
    find_room,
    keeps,
    largest_beside,
    next_to_fetch,
    row_reads,
    victims,
)
from tests.support.access_orders import access_order

PAGE = 4096
orders = st.lists(st.integers(0, 9), min_size=1, max_size=40)
sizes = st.lists(st.integers(1, 9), min_size=10, max_size=10)


def _filled(pages: list[int], present: set[int], total: int = 40) -> tuple[Allocator, list[UnitBlock]]:
    space = Allocator(total * PAGE, random.Random(0))
    blocks = [
        UnitBlock(unit, offset, pages[unit] * PAGE)
        for unit in sorted(present)
        if (offset := space.take(pages[unit] * PAGE)) is not None
    ]
    return space, blocks


def _latest(blocks: list[UnitBlock], trace: AccessOrder) -> list[UnitBlock]:
    units = trace.units()
    for block in blocks:
        units.put(block.unit, True)
    place = {block.unit: block for block in blocks}
    return [place[unit] for unit in units.latest()]


@given(st.sets(st.integers(0, 999), min_size=1, max_size=20), st.integers(1, 9000), st.integers(0, 5000))
def test_a_lookup_reads_the_pages_of_its_rows_or_all(rows: set[int], row_nbytes: int, start: int) -> None:
    nbytes = start + 1000 * row_nbytes
    reads = row_reads(sorted(rows), row_nbytes, start, nbytes, nbytes)
    places = [range(start + row * row_nbytes, start + (row + 1) * row_nbytes) for row in rows]
    if reads:
        assert all(any(read.start <= place.start and place.stop <= read.stop for read in reads) for place in places)
        assert all(read.start % PAGE == 0 and (read.stop % PAGE == 0 or read.stop == nbytes) for read in reads)
        assert all(after.start - before.stop > 64 << 10 for before, after in pairwise(reads)), "small gaps are read"
        assert sum(map(len, reads)) < nbytes
        assert not row_reads(sorted(rows), row_nbytes, start, nbytes, sum(map(len, reads)) - 1), "there is no room"
    else:
        assert len(rows) * ((64 << 10) + row_nbytes + 2 * PAGE) >= nbytes


@given(orders, sizes, st.sets(st.integers(0, 9)), st.integers(1, 40), st.integers(-1, 20))
def test_victims_make_room_and_no_more_than_that(
    order: list[int], pages: list[int], present: set[int], wanted: int, beyond: int
) -> None:
    trace = access_order(order)
    space, blocks = _filled(pages, present)
    later = [block for block in blocks if trace.distance(block.unit) > beyond]
    going = victims(space, wanted * PAGE, _latest(later, trace))
    if going is None:
        assert not space.could_take(wanted * PAGE, (block[1:] for block in later))
        return
    gone = [block for block in blocks if block.unit in going]
    assert all(block in later for block in gone)
    for block in gone:
        rest = [other[1:] for other in gone if other is not block]
        assert not space.could_take(wanted * PAGE, rest), "each of them was needed"
    for block in gone:
        space.give(*block[1:])
    assert space.take(wanted * PAGE) is not None


@given(orders, sizes, st.sets(st.integers(0, 9), min_size=1))
def test_one_victim_of_equal_size_is_the_one_used_last(order: list[int], pages: list[int], present: set[int]) -> None:
    trace = access_order(order)
    space, blocks = _filled([4] * 10, present, total=4 * len(present))
    (going,) = victims(space, 4 * PAGE, _latest(blocks, trace))
    assert trace.distance(going) == max(trace.distance(unit) for unit in present)


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(9, 17), st.booleans())
def test_two_units_that_have_room_together_can_be_in_use(uses: list[int], room: int, scatter: bool) -> None:
    """Whatever came and went before; the arena has room for the largest, or for more, up to the two largest."""
    pages = [2, 3, 5, 6, 8, 9]
    ascending = [(size * PAGE, unit) for unit, size in enumerate(pages)]
    space = Allocator(room * PAGE, random.Random(2) if scatter else None)
    trace = access_order(uses)
    at: dict[int, int] = {}
    held: list[int] = []
    for unit in uses:
        if unit not in at:
            free = IdleBlocks(trace)
            for held_unit, offset in at.items():
                if held_unit not in held:
                    free.add(UnitBlock(held_unit, offset, pages[held_unit] * PAGE))
            floor = Floor(0, room * PAGE, largest_beside(unit, pages[unit] * PAGE, ascending, room * PAGE))
            place = find_room(space, pages[unit] * PAGE, free, floor)
            if place is None:
                assert pages[unit] + sum(pages[other] for other in held) > room
                held = []
                continue
            for victim in place.victims:
                space.give(at.pop(victim), pages[victim] * PAGE)
            space.take_at(place.offset, pages[unit] * PAGE)
            at[unit] = place.offset
        held = [unit]  # the next one comes while this one is in use


def _arena_of_experts(count: int, uses: int, seed: int) -> tuple[Allocator, IdleBlocks, Floor]:
    """Units 0 to 3 are large, the others are experts. Some units are in use, and some memory is free."""
    chance = random.Random(seed)
    pages = [chance.choice((5, 9)) if unit < 4 else 2 for unit in range(count)]
    trace = access_order([chance.randrange(count) for _ in range(uses)])
    space, idle = Allocator(sum(pages) * PAGE), IdleBlocks(trace)
    blocks = [
        UnitBlock(unit, space.take(pages[unit] * PAGE) or 0, pages[unit] * PAGE)
        for unit in chance.sample(range(count), count)
    ]
    chance.shuffle(blocks)
    for block in blocks[:6]:
        space.give(*block[1:])
    for block in blocks[12:]:
        idle.add(block)
    for unit in trace.order[: uses // 3]:
        trace.use(unit)
    return space, idle, Floor(0, space.nbytes, 9 * PAGE)


@pytest.mark.parametrize("seed", range(40))
def test_a_look_at_a_few_of_many_units_finds_the_best_place(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exhaustive search has no place with a better score, and evicts no unit whose next use is further away."""
    space, idle, floor = _arena_of_experts(300, 900, seed)
    for pages in (1, 2, 5, 9, 40):
        for beyond in (-1, 0, 50, 300, 700, 899, NEVER):
            place = find_room(space, pages * PAGE, idle, floor, beyond)
            with monkeypatch.context() as patched:
                patched.setattr(policy, "_LATEST", 1 << 30)
                best = find_room(space, pages * PAGE, idle, floor, beyond)
            assert (place is None) == (best is None)
            if place is not None and best is not None:
                distances = [[idle.order.distance(unit) for unit in one.victims] for one in (place, best)]
                assert min(distances[0], default=NEVER + 1) == min(distances[1], default=NEVER + 1)
                assert place.safe == best.safe and (pages != 2 or place == best), "experts have one size"


def test_a_decision_looks_at_as_many_of_thousands_of_units_as_of_hundreds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(question: Callable[[AccessOrder, int], int]) -> Callable[[AccessOrder, int], int]:
        return lambda order, unit: asked.append(unit) or question(order, unit)

    def looks(count: int) -> int:
        space, idle, floor = _arena_of_experts(count, 3 * count, seed=1)
        missing = idle.order.units()
        for unit in range(count):
            missing.put(unit, True)
        assert next(missing.upcoming()) is not None and idle.latest(1), "the units are sorted once a step"
        asked.clear()
        for beyond in (-1, 0, count):
            assert find_room(space, 2 * PAGE, idle, floor, beyond) is not None
        idle.order.use(idle.order.order[count])
        return len(asked)

    monkeypatch.setattr(AccessOrder, "position", counted(AccessOrder.position))
    monkeypatch.setattr(AccessOrder, "distance", counted(AccessOrder.distance))
    assert 0 < looks(4800) < 2 * looks(300)


def test_the_nearest_that_is_not_there_comes_first() -> None:
    trace = access_order([0, 1, 2, 3])

    def brought(ahead: int | None, here: set[int]) -> int | None:
        wanted = (unit for unit in trace.upcoming() if unit not in here)
        return next_to_fetch(trace, lambda unit: 2 * PAGE, wanted, Limits(ahead))

    assert brought(None, {0, 1, 2}) == 3 and brought(None, {0, 1, 2, 3}) is None
    assert brought(4 * PAGE, {0}) == 1 and brought(4 * PAGE, {0, 1}) is None, "the limit is of bytes"
    assert brought(1, set()) == 0 and brought(1, {0}) is None, "one unit at least"
    assert brought(0, set()) is None


@given(orders, st.integers(0, 9), st.integers(0, 30))
def test_a_unit_stays_where_its_next_use_is_near(order: list[int], unit: int, reuse: int) -> None:
    trace = access_order(order)
    near = trace.distance(unit) < NEVER and trace.distance(unit) * PAGE <= reuse * PAGE
    assert keeps(trace, unit, lambda _: PAGE, Limits(reuse=reuse * PAGE)) == near
    assert keeps(trace, unit, lambda _: PAGE, Limits())


MODE = MODES["bf16"]
STATES = (State.MASTER_LOW_BITS, State.EXP_AVG, State.EXP_AVG_SQ)


def parts_of(numels: list[int]) -> Partitions:
    rows = [
        {
            State.WEIGHT: 2 * numel,
            State.MASTER_LOW_BITS: 2 * numel,
            State.EXP_AVG: 4 * numel,
            State.EXP_AVG_SQ: 4 * numel,
            State.GRAD: 2 * numel,
        }
        for numel in numels
    ]
    sizes = tuple(2 * numel for numel in numels)
    return Partitions(
        nbytes=tuple(rows),
        trainable_numel=tuple(numels),
        unit_nbytes=sizes,
        largest_gradient=max(sizes),
        largest_parameter=max(sizes),
        gradients=GradientDtypes(torch.bfloat16, torch.bfloat16, torch.bfloat16),
        alone=True,
    )


def placed(
    numels: list[int], placement_request: PlacementRequest, drives: bool = True, free: int = 1 << 50
) -> Placement:
    return place(
        parts_of(numels),
        MODE,
        placement_request,
        MachineMemory(free_host=free, free_device=0, host_addressable=True, drives=drives),
    )


def tiers(tiers: TierMap, state: State) -> list[Tier]:
    return [row[state] for row in tiers]


MEGA = 1 << 20
BLOCKS = [8 * MEGA] * 10
FIRST = 80 * MIB
"""Bytes of the first unit's states, which stay in host memory where there is room."""
DISK = PlacementRequest(weights=Tier.DISK, states=Tier.DISK)
HOST = PlacementRequest(weights=Tier.HOST, states=Tier.HOST)


def test_with_room_every_state_is_in_its_configured_tier() -> None:
    placement = placed(BLOCKS, PlacementRequest(weights=Tier.DISK, states=Tier.HOST))
    assert set(tiers(placement.tiers, State.WEIGHT)) == {Tier.DISK}
    assert {tier for state in STATES for tier in tiers(placement.tiers, state)} == {Tier.HOST}
    assert placement.spilled == () and placement.window_numel == 0 and placement.notices == ()
    assert placement.classes.resident == 80 * MEGA * 12 and placement.classes.weights == 2 * 16 * MIB


def test_gradients_leave_the_host_first_then_moments_then_the_rest() -> None:
    """From the ample budget down to the least, what is on DISK only grows, in this order of states."""
    order = [State.GRAD, State.EXP_AVG_SQ, State.EXP_AVG, State.MASTER_LOW_BITS, State.WEIGHT]
    seen: list[tuple[int, ...]] = []
    for budget in range(sum(placed(BLOCKS, HOST).classes), 0, -16 * MIB):
        try:
            placement = placed(BLOCKS, replace(HOST, host_memory=budget))
        except BudgetError:
            break
        assert sum(placement.classes) <= budget
        on_disk = tuple(tiers(placement.tiers, state).count(Tier.DISK) for state in order)
        first = next((index for index, count in enumerate(on_disk) if count < len(BLOCKS)), len(order))
        assert not any(on_disk[first + 1 :]), "a state moves only when those before it have"
        seen.append(on_disk)
    assert seen == sorted(seen) and seen[0] == (0, 0, 0, 0, 0) and seen[-1] == (10, 10, 10, 10, 10)


def test_where_updates_run_under_the_backward_whole_units_leave_the_host_and_gradients_last() -> None:
    """The last units leave first, and a budget for states on DISK keeps the same ones in HOST."""
    asks, seen = replace(HOST, early=True), set()
    for budget in range(sum(placed(BLOCKS, asks).classes), 0, -16 * MIB):
        try:
            placement = placed(BLOCKS, replace(asks, host_memory=budget))
        except BudgetError:
            break
        assert sum(placement.classes) <= budget
        counts = [sum(row[state] is Tier.DISK for state in (*STATES, State.WEIGHT)) for row in placement.tiers]
        assert counts == sorted(counts) and sum(0 < count < 4 for count in counts) <= 1, "one unit at most in part"
        assert not placement.spilled or counts == [4] * len(BLOCKS), "gradients move when all states have"
        seen.add(sum(count == 4 for count in counts))
    assert seen == set(range(len(BLOCKS) + 1)) and len(placement.spilled) == len(BLOCKS)


def test_moved_states_are_reported() -> None:
    ample = sum(placed(BLOCKS, DISK).classes)
    (notice,) = placed(BLOCKS, replace(DISK, host_memory=ample - FIRST - 140 * MIB)).notices
    assert "gradient of " in notice and "to disk" in notice
    (notice,) = placed(BLOCKS, replace(DISK, host_memory=ample + 400 * MIB)).notices
    assert "low bits of masters of " in notice and "second moment of " in notice and "to host" in notice


def test_room_that_is_left_is_for_the_cache_of_weights_first_then_for_states() -> None:
    ample = placed(BLOCKS, DISK)
    weights = 2 * sum(BLOCKS)
    more = placed(BLOCKS, replace(DISK, host_memory=sum(ample.classes) + weights - ample.classes.weights))
    assert more.classes.weights + more.classes.cache == weights + FIRST and more.tiers == ample.tiers
    most = placed(BLOCKS, replace(DISK, host_memory=2 * GIB))
    assert set(tiers(most.tiers, State.EXP_AVG_SQ)) == {Tier.HOST} and len(most.promoted) == 3 * len(BLOCKS)
    assert most.classes.weights + most.classes.cache == weights + sum(BLOCKS) * 10
    half = placed(BLOCKS, replace(DISK, host_memory=sum(more.classes) + 5 * 80 * MIB))
    moved = [all(row[state] is Tier.HOST for state in STATES) for row in half.tiers]
    assert moved == [True] * 6 + [False] * 4, "a fixed share, unit by unit, and the first in any case"


def test_the_first_unit_keeps_its_states_in_host_memory() -> None:
    """It is complete last and used first, so nothing hides its update. Small states, and a small memory, are left."""
    numels, states = [16 * MEGA, *BLOCKS], [(0, state) for state in STATES]
    ample = placed(numels, DISK)
    assert list(ample.promoted) == states and ample.on_disk
    (notice,) = ample.notices
    assert isinstance(notice, Remark) and "moved: low bits of masters of 1 of 11 units (32.0 MiB) to host" in notice
    assert not placed([6 * MEGA, *BLOCKS], DISK).promoted, "60 MiB are read in no time"
    assert placed(numels, DISK, free=160 * MIB * 16).promoted and not placed(numels, DISK, free=159 * MIB * 16).promoted
    exact = sum(ample.classes)
    assert list(placed(numels, replace(DISK, host_memory=exact)).promoted) == states, "before any weight is cached"
    assert not placed(numels, replace(DISK, host_memory=exact - 100 * MIB)).promoted[3:]
    assert placed(numels, HOST).promoted == ()


def test_one_unit_at_most_is_in_memory_in_part() -> None:
    """A unit all of whose states are on disk can be updated under the backward, so small states do not go before."""
    ample = placed(BLOCKS, DISK)
    base = sum(ample.classes) + 2 * sum(BLOCKS) - ample.classes.weights
    for room in range(0, 400, 10):
        placement = placed(BLOCKS, replace(DISK, host_memory=base + room * MIB))
        counts = [sum(row[state] is Tier.HOST for state in STATES) for row in placement.tiers]
        assert counts == sorted(counts, reverse=True), "in the model's order"
        assert counts.count(1) + counts.count(2) <= 1, f"{room} MiB"


def test_without_a_disk_nothing_moves_and_the_error_names_the_least() -> None:
    need = sum(placed(BLOCKS, HOST, drives=False).classes)
    with pytest.raises(BudgetError, match="with an nvme_path") as caught:
        placed(BLOCKS, replace(HOST, host_memory=500 * MIB), drives=False)
    least = int(str(caught.value).split("is 1.1 GiB (")[1].split()[0])
    assert need - 97 * MIB < least < need - 95 * MIB, "with the smallest tiles"


@pytest.mark.parametrize("sizes", [[38 * MEGA, *[7 * MEGA] * 12], [250 * MEGA, *[60 * MEGA] * 16], [317 * MEGA] * 40])
def test_the_least_does_not_grow_with_the_model(sizes: list[int]) -> None:
    """As the guide says: 161 MiB, and 48 MiB more with a GPU."""
    for on_cpu, enough in ((True, 161 * MIB), (False, 209 * MIB)):
        machine = MachineMemory(
            free_host=1 << 50, free_device=0 if on_cpu else GIB, host_addressable=on_cpu, drives=True
        )
        placement = place(parts_of(sizes), MODE, replace(DISK, host_memory=enough), machine)
        assert enough - MIB < sum(placement.classes) <= enough and len(placement.spilled) == len(sizes)
        with pytest.raises(BudgetError, match="the least that works"):
            place(parts_of(sizes), MODE, replace(DISK, host_memory=enough - MIB), machine)


def test_staging_buffers_are_of_whole_chunks_and_larger_where_memory_is_not_short() -> None:
    facts = MachineMemory(free_host=1 << 50, free_device=GIB, host_addressable=False, drives=True)

    def staging(numel: int, **budget: int) -> int:
        return place(parts_of([numel] * 4), MODE, replace(DISK, **budget), facts).classes.staging

    assert staging(60 * MEGA, host_memory=209 * MIB) == 3 * 16 * MIB
    assert staging(60 * MEGA, host_memory=8 * GIB) == staging(60 * MEGA) == 3 * 64 * MIB
    assert staging(MEGA) == staging(MEGA, host_memory=8 * GIB) == 3 * 4 * MEGA // PAGE * PAGE


def test_the_default_budget_is_what_is_needed_at_most_80_percent_of_what_is_free() -> None:
    ample = placed(BLOCKS, HOST)
    assert placed(BLOCKS, HOST, free=sum(ample.classes) * 2).classes == ample.classes
    tight = placed(BLOCKS, HOST, free=sum(ample.classes))
    assert sum(tight.classes) <= 0.8 * sum(ample.classes) and tight.spilled
    with pytest.raises(BudgetError, match=r"64\.0 MiB is free, of which at most .* by default"):
        placed(BLOCKS, HOST, free=64 * MIB)


def test_beside_a_gpu_the_default_budget_is_all_free_memory_but_a_reserve() -> None:
    """6 GiB, or 5 % of a large memory, are left. A memory that GPU and CPU share leaves a fifth, a small one too."""
    usable = partial(usable_host, own_device_memory=True)
    assert usable(100 * GIB) == 94 * GIB and usable(1000 * GIB) == 950 * GIB
    assert usable(20 * GIB) == 16 * GIB and usable_host(100 * GIB, own_device_memory=False) == 80 * GIB
    states = [800 * MEGA] * 9  # 9.4 GiB a unit with its gradient

    def spills(**machine: bool) -> bool:
        facts = MachineMemory(
            free_host=106 * GIB, free_device=8 * GIB, host_addressable=False, drives=True, unified=machine["unified"]
        )
        placement = place(parts_of(states), MODE, HOST, facts)
        return bool(differences(parts_of(states), configured(parts_of(states), HOST, 2), placement.tiers))

    assert not spills(unified=False) and spills(unified=True)


def test_a_memory_that_gpu_and_cpu_share_has_one_budget_and_one_copy_of_each_weight() -> None:
    """As on GB10 and AI MAX, by the sizes alone: neither has run."""
    parts, free = parts_of([100 * MEGA] * 40), 64 * GIB
    shared = MachineMemory(
        free_host=free, free_device=free, host_addressable=False, drives=True, unified=True, device_kernels=False
    )
    own = replace(shared, unified=False, free_device=8 * GIB)
    for asks in (HOST, DISK):
        here, beside = (place(parts, MODE, asks, machine) for machine in (shared, own))
        both = sum(here.classes) + here.device_nbytes
        assert here.peak.host_budget + here.peak.device_budget == both <= free and sum(beside.peak) == sum(
            beside.classes
        )
        assert here.device_need.least == beside.device_need.least
        # Weights in RAM are not copied into a larger arena, weights on a drive are kept in one.
        grows = here.device_need.most > here.device_nbytes
        assert grows == (asks is DISK) and beside.device_need.most > beside.device_nbytes
    with pytest.raises(BudgetError):
        room = replace(shared, free_host=56 * GIB, free_device=56 * GIB)
        place(parts, MODE, replace(HOST, host_memory=56 * GIB, device_memory=8 * GIB), room)
    tight = place(parts_of([800 * MEGA] * 9), MODE, HOST, replace(shared, free_host=106 * GIB, free_device=106 * GIB))
    assert sum(tight.classes) <= 0.8 * (106 * GIB - tight.device_nbytes)


def test_inputs_take_a_small_share_of_a_budget_and_all_that_states_leave() -> None:
    """Half of what the least leaves would push states to the drive, for bytes that no input may take."""
    asks = replace(HOST, inputs=None)
    every = 1000 * MEGA * 14
    tight = placed([100 * MEGA] * 10, replace(asks, host_memory=every + 3 * GIB))
    assert tight.inputs_nbytes is not None and 2 * GIB <= tight.inputs_nbytes <= 3 * GIB
    assert not any(tier is Tier.DISK for row in tight.tiers for tier in row.values())
    ample = placed([100 * MEGA] * 10, replace(asks, host_memory=2 * every))
    assert ample.inputs_nbytes == (2 * every - sum(ample.classes)) // PAGE * PAGE
    little = placed(BLOCKS, replace(asks, host_memory=400 * MIB))
    assert little.inputs_nbytes is not None and little.inputs_nbytes <= 200 * MIB, "states need the other half"


def test_without_a_budget_inputs_beside_a_gpu_take_what_the_arena_leaves_of_the_default() -> None:
    facts = MachineMemory(free_host=100 * GIB, free_device=8 * GIB, host_addressable=False, drives=True)
    parts = parts_of([800 * MEGA] * 12)
    for inputs, least in ((None, 94 * GIB // 32), (3 * GIB, 3 * GIB), (1 << 50, 93 * GIB)):
        placement = place(parts, MODE, replace(HOST, inputs=inputs), facts)
        assert placement.inputs_nbytes is not None and placement.inputs_nbytes >= least
        assert placement.inputs_nbytes + sum(placement.classes) <= 94 * GIB


def test_on_a_cpu_the_default_arena_leaves_most_of_a_small_memory_to_others() -> None:
    """Three of the largest unit, or a quarter of what a backward leaves, and never less than one unit."""
    sizes = [400 * MEGA, *BLOCKS]
    unit = placed(sizes, DISK).device_nbytes // 3
    assert unit == 800 * MIB
    # A backward takes two gradients, a copy of the weights, and libraries beside it.
    beside = 3 * unit + 32 * MIB
    assert placed(sizes, DISK, free=beside + 4 * GIB).device_nbytes == GIB
    assert placed(sizes, DISK, free=beside + 3 * GIB).device_nbytes == unit


def test_a_unit_without_room_for_two_device_buffers_is_streamed() -> None:
    numels = [4 * MEGA, 400 * MEGA, 4 * MEGA]
    whole = placed(numels, replace(DISK, host_memory=3 * GIB))
    assert whole.classes.weights >= 2 * 800 * MIB
    pieces = placed(numels, replace(DISK, host_memory=600 * MIB))
    assert pieces.classes.weights < 2 * 800 * MIB and 1 in pieces.spilled
    assert pieces.window_numel * 2 <= 32 * MIB, "nor is its gradient ever whole"


def test_ratio_is_the_share_of_states_that_leaves_the_device() -> None:
    for ratio in (0.0, 0.3, 0.5, 1.0):
        print(ratio)
        placement = placed(BLOCKS, PlacementRequest(weights=Tier.DEVICE, states=Tier.HOST, states_off_device=ratio))
        assert tiers(placement.tiers, State.EXP_AVG).count(Tier.HOST) == round(10 * ratio)


def on_gpu(
    numels: list[int], placement_request: PlacementRequest, free: int, kernels: bool = True, mode: str = "bf16"
) -> Placement:
    return place(
        parts_of(numels),
        MODES[mode],
        placement_request,
        MachineMemory(free_host=1 << 50, free_device=free, host_addressable=False, drives=True, device_kernels=kernels),
    )


def test_gradients_of_what_lives_on_a_gpu_altogether_stay_there_as_far_as_there_is_room() -> None:
    states, gradients = 80 * MEGA * 12, 8 * MEGA * 2
    whole = PlacementRequest(weights=Tier.DEVICE, states=Tier.DEVICE)
    ample = on_gpu(BLOCKS, whole, 100 * GIB)
    assert set(tiers(ample.tiers, State.GRAD)) == {Tier.DEVICE} and ample.classes.resident == 0
    assert ample.device_nbytes == states + 10 * gradients and ample.device_need.least == states
    some = on_gpu(BLOCKS, replace(whole, device_memory=states + 3 * gradients + 4096), 100 * GIB)
    assert tiers(some.tiers, State.GRAD) == [Tier.DEVICE] * 3 + [Tier.HOST] * 7
    assert some.classes.resident == 7 * gradients and some.device_need.least == states
    scarce = on_gpu(BLOCKS, whole, states + 10 * gradients)
    assert Tier.DEVICE not in tiers(scarce.tiers, State.GRAD), "activations need room as well"
    with pytest.raises(BudgetError, match=rf"\({states} bytes\)"):
        on_gpu(BLOCKS, replace(whole, device_memory=states - 4096), 100 * GIB)


def test_else_they_come_to_the_host() -> None:
    placement_request: PlacementRequest
    for placement_request, kernels, mode in (
        (PlacementRequest(weights=Tier.HOST, states=Tier.DEVICE), True, "bf16"),
        (PlacementRequest(weights=Tier.DEVICE, states=Tier.HOST), True, "bf16"),
        (PlacementRequest(weights=Tier.DEVICE, states=Tier.DEVICE), False, "bf16"),
        (PlacementRequest(weights=Tier.DEVICE, states=Tier.DEVICE), True, "bf16 lamb"),
    ):
        print(mode)
        assert Tier.DEVICE not in tiers(on_gpu(BLOCKS, placement_request, 100 * GIB, kernels, mode).tiers, State.GRAD)


def test_on_a_gpu_the_arena_may_grow_to_all_units_where_no_number_was_given() -> None:
    """At first it has room for three of the largest; what activations leave is known after a step."""
    block = 2 * BLOCKS[0]
    placement = on_gpu(BLOCKS, DISK, 100 * GIB)
    need = placement.device_need
    assert placement.device_nbytes == 3 * block and (need.least, need.most, need.unit) == (block, 11 * block, block)
    given = on_gpu(BLOCKS, replace(DISK, device_memory=4 * block), 100 * GIB)
    assert given.device_nbytes == given.device_need.most == 4 * block
    assert on_gpu(BLOCKS, replace(DISK, live=2 * BLOCKS[0]), 100 * GIB).device_need.most == 2 * block
    assert placed(BLOCKS, DISK).device_need.most == 3 * block, "where the CPU computes it never grows"


def test_where_micro_batches_accumulate_a_gpu_adds_up_what_it_has_room_for_beyond_all_weights() -> None:
    """Those that spill first; no weight goes for them, and no budget that worked before is too small."""
    block, whole = 2 * BLOCKS[0], 11 * 2 * BLOCKS[0]
    placement_request = replace(DISK, accumulation=2)

    def added(asked: PlacementRequest) -> list[int]:
        placement = on_gpu(BLOCKS, asked, 100 * GIB)
        assert placement.device_nbytes == asked.device_memory
        assert placement.device_need.least == block
        return [unit for unit, nbytes in placement.added if nbytes == block]

    assert added(replace(placement_request, device_memory=whole)) == []
    assert added(replace(placement_request, device_memory=whole + 3 * block + 4096)) == [0, 1, 2]
    assert added(replace(DISK, device_memory=100 * block)) == []
    least = sum(on_gpu(BLOCKS, replace(placement_request, states=Tier.HOST), 100 * GIB).classes)
    some = replace(placement_request, states=Tier.HOST, device_memory=whole + 6 * block, host_memory=least - 160 * MIB)
    spilled = on_gpu(BLOCKS, some, 100 * GIB).spilled
    assert 0 < len(spilled) < 6 and set(spilled) == set(range(10 - len(spilled), 10))
    assert added(some) == [*spilled, *range(6 - len(spilled))]


def without_totals(placement: Placement) -> tuple[int, ...]:
    need = placement.device_need
    return need.least, need.most, need.unit, need.weights


def test_without_a_budget_a_gpu_adds_gradients_up_in_what_a_first_step_has_left_free() -> None:
    block = 2 * BLOCKS[0]
    placement = on_gpu(BLOCKS, replace(DISK, accumulation=4), 100 * GIB)
    assert placement.device_nbytes == 3 * block and placement.added == ()
    assert without_totals(placement) == (block, 21 * block, block, 11 * block)
    assert [unit for unit, _ in placement.grown(10 * block).added] == [0, 1]
    live = on_gpu(BLOCKS, replace(DISK, accumulation=4, live=BLOCKS[0] * 2), 100 * GIB)
    assert live.device_nbytes == 2 * block and without_totals(live) == (block, 12 * block, block, 2 * block)
    given = on_gpu(BLOCKS, replace(DISK, accumulation=4, live=BLOCKS[0] * 2, device_memory=5 * block), 100 * GIB)
    assert given.device_nbytes == 5 * block and len(given.added) == 3
    on_cpu = placed(BLOCKS, replace(DISK, accumulation=4))
    assert on_cpu.device_need.most == 3 * block and not on_cpu.grown(100 * block).added


def test_deepspeeds_numbers_are_inputs() -> None:
    assert placed([1000, *BLOCKS], replace(DISK, small_unit=1000)).tiers[0][State.WEIGHT] is Tier.DEVICE
    block = 2 * BLOCKS[0]
    assert placed(BLOCKS, DISK).device_nbytes == 3 * block
    assert placed(BLOCKS, replace(DISK, live=2 * BLOCKS[0])).device_nbytes == 2 * block
    assert placed(BLOCKS, replace(DISK, live=1)).device_nbytes == block, "one unit at least"
    assert placed(BLOCKS, replace(DISK, live=10**9)).device_nbytes == 3 * block
    assert placed(BLOCKS, replace(DISK, tile=100_000)).tile_numel <= 102_400
    assert placed(BLOCKS, replace(DISK, tile=10**9)).tile_numel == placed(BLOCKS, DISK).tile_numel
    assert placed(BLOCKS, replace(DISK, cached_weights=4 * BLOCKS[0])).classes.cache == FIRST + 2 * block
    whole = placed(BLOCKS, replace(DISK, cached_weights=10**9)).classes.cache
    assert whole == FIRST + 8 * block, "no more than there are"


numels = st.lists(st.integers(1, 40).map(lambda n: n * 2048 * 97), min_size=1, max_size=12)
any_tier = st.sampled_from(list(Tier))


@given(numels, any_tier, any_tier, st.integers(0, 2 * GIB), st.booleans())
def test_any_budget_is_kept_or_refused_with_the_least_that_works(
    sizes: list[int], weights: Tier, states: Tier, budget: int, drives: bool
) -> None:
    placement_request = PlacementRequest(weights=weights, states=states, host_memory=budget)
    try:
        placement = placed(sizes, placement_request, drives)
    except BudgetError as error:
        least = int(str(error).split("the least that works is ")[1].split("(")[1].split(" ")[0])
        assert least > budget
        with pytest.raises(BudgetError):
            placed(sizes, replace(placement_request, host_memory=least - 4096), drives)
        placement = placed(sizes, replace(placement_request, host_memory=least), drives)
        budget = least
    assert sum(placement.classes) <= budget
    row_bytes = MODE.element_bytes + (2 if placement.spilled else 0)
    assert placement.tile_numel > 0 and 3 * placement.tile_numel * row_bytes <= placement.classes.tiles
    kept = sum(
        -(-nbytes // 4096) * 4096
        for unit, (row, home) in enumerate(zip(parts_of(sizes).nbytes, placement.tiers, strict=True))
        for state, nbytes in row.items()
        if home[state] is Tier.HOST and (unit, state) not in placement.promoted
    )
    assert kept == placement.classes.resident


CPU = Device(torch.device("cpu"))

operations = st.lists(st.one_of(st.integers(1, 40_000), st.integers(-20, -1)), max_size=80)


@given(operations, st.booleans())
@settings(deadline=None)
def test_blocks_are_aligned_disjoint_and_come_back(steps: list[int], scatter: bool) -> None:
    space = Allocator(256 * 1024, random.Random(1) if scatter else None)
    held: list[tuple[int, int]] = []
    for step in steps:
        if step > 0:
            offset = space.take(step)
            if offset is None:
                continue
            assert offset % 4096 == 0 and offset + step <= space.nbytes
            for start, nbytes in held:
                assert offset + align_up(step) <= start or start + align_up(nbytes) <= offset
            held.append((offset, step))
        elif held:
            space.give(*held.pop(step % len(held)))
        assert space.used_bytes == sum(align_up(nbytes) for _, nbytes in held)
    for block in held:
        space.give(*block)
    assert space.take(space.nbytes) == 0, "all holes have become one again"


def test_classes_do_not_lend_to_each_other() -> None:
    host = HostArena(HostBudget(4096, 8192, 4096, 0), CPU)
    assert host.tiles.take(4096) is not None and host.tiles.take(4096) is None
    first = host.weights.take(8192)
    assert first is not None and host.weights.take(1) is None
    first.release()
    assert host.weights.take(8192) is not None


def test_a_budget_that_is_too_small_is_an_error_with_the_least() -> None:
    with pytest.raises(BudgetError, match=r"host_memory is 1\.0 KiB .*least that works is 2\.0 KiB .*do this"):
        check_budget("host_memory", 1024, 2048, "do this")
