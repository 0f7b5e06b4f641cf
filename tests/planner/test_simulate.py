"""The simulated pager has the engine's figures."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.errors import BudgetError
from offload.planner.simulation.machine import Clock, Moved, SimulatedRates
from offload.planner.simulation.pager import Expected
from offload.planner.simulation.simulate import Budgets, Input, Simulation, Use, simulate
from offload.planner.simulation.updater import UpdateCost
from offload.states import Tier
from offload.swapper.policy import Limits
from offload.swapper.table import UnitSize, pieces_of
from tests.support.oracle import small_pieces
from tests.support.sampling import examples

PAGE = 4096


def unit(pages: int, tier: Tier = Tier.DISK) -> UnitSize:
    return UnitSize(f"{pages} pages", pages * PAGE, tier, pages * PAGE, pieces_of([range(pages * PAGE)]))


def cost(pages: int, tier: Tier = Tier.DISK, spills: bool = False) -> UpdateCost:
    """Returns the cost of updating a bf16 unit all of whose states are in one tier."""
    numel, on_disk = pages * PAGE // 2, tier is Tier.DISK
    sizes = (2 * numel, 10 * numel, 12 * numel) if on_disk else (0, 0, 0)
    return UpdateCost(numel, *sizes, 2 * numel * spills, revocable=on_disk)


# -- any run ------------------------------------------------------------------------------------------


class Case(NamedTuple):
    uses: list[Use]
    sizes: list[UnitSize]
    updates: list[UpdateCost | None]
    tile_numel: int | None
    limits: Limits

    @property
    def moving(self) -> list[int]:
        """Bytes of the units that are not stored on the device."""
        return sorted(size.nbytes for size in self.sizes if not size.device_resident) or [0]

    @property
    def on_disk(self) -> list[int]:
        return sorted(size.nbytes for size in self.sizes if size.tier is Tier.DISK) or [0]

    def run(self, host: int, device: int, steps: int = 3, **options: Any) -> Simulation:
        return simulate(
            [self.uses] * steps,
            self.sizes,
            self.updates,
            Budgets(host, device),
            self.limits,
            tile_numel=self.tile_numel,
            **options,
        )


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)


# -- any run ------------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn, tiers: tuple[Tier, ...] = (Tier.DISK, Tier.DISK, Tier.HOST, Tier.DEVICE)) -> Case:
    """Two units at most are in use at a time."""
    pages = draw(st.lists(st.integers(1, 8), min_size=1, max_size=7))
    tiers = [draw(st.sampled_from(tiers)) for _ in pages]
    numbers = st.integers(0, len(pages) - 1)
    seconds = st.floats(0.0, 3.0)
    inputs = st.builds(Input, st.sampled_from((0, 0, PAGE, 5 * PAGE)), st.booleans())
    rows = st.sampled_from((None, None, 0, PAGE, 3 * PAGE))
    uses = draw(
        st.lists(
            st.builds(
                Use, numbers, seconds, st.integers(1, 2), inputs, inputs, st.just(()), st.just(Expected()), lookup=rows
            ),
            min_size=1,
            max_size=20,
        )
    )
    spills = draw(st.booleans())
    return Case(
        uses,
        [unit(n, tier) for n, tier in zip(pages, tiers, strict=True)],
        [cost(n, tier, spills) if draw(st.integers(0, 5)) else None for n, tier in zip(pages, tiers, strict=True)],
        draw(st.sampled_from((None, 2048, 5000))),
        Limits(*(draw(st.none() | st.integers(0, 20 * PAGE)) for _ in range(2))),
    )


rates = st.none() | st.builds(
    SimulatedRates,
    *(st.sampled_from((PAGE / 3, 1.0 * PAGE, 10.0 * PAGE, 1e30)) for _ in range(2)),
    st.sampled_from((None, PAGE / 3, 15.0 * PAGE)),
    st.sampled_from((PAGE / 3, 1.0 * PAGE, 10.0 * PAGE, 1e30)),
    st.sampled_from((1000.0, 4096.0, 1e30)),
    st.booleans(),
    st.sampled_from((PAGE / 3, 1e30)),
)


@settings(max_examples=examples(300), deadline=None)
@given(cases(), st.integers(2, 60), st.integers(0, 40), rates, st.booleans(), st.integers(1, 4), st.booleans())
def test_every_run_ends_within_its_budgets(
    case: Case, host: int, more: int, rates: SimulatedRates | None, overlap: bool, steps: int, speculate: bool
) -> None:
    """From two pages of leases and room for two units on; nobody waits in a circle."""
    device = sum(case.moving[-2:]) + more * PAGE
    simulation = case.run(host * PAGE, device, rates=rates, overlap=overlap, steps=steps, speculate=speculate)
    assert simulation.host_peak <= host * PAGE and simulation.device_peak <= device
    assert simulation.hits <= simulation.uses <= len(case.uses)
    assert (simulation.seconds == 0) or rates is not None or any(use.seconds for use in case.uses)
    used = {use.unit for use in case.uses if use.lookup is None}
    costs = [update for update in case.updates if update is not None]
    assert len(simulation.speculated) <= (len(costs) if speculate and overlap else 0)
    if speculate and overlap:
        return  # an update may be in this step or in the next one, so one step says nothing of their bytes
    if not overlap or steps > 1:
        assert simulation.moved.updates_written == sum(update.written_nbytes for update in costs)
        least = sum(update.state_nbytes for update in costs)
        most = least + sum(size.nbytes for size, update in zip(case.sizes, case.updates, strict=True) if update)
        if not overlap or rates is None or steps > 2:
            assert simulation.moved.updates_read >= least
        assert simulation.moved.updates_read <= most
    if steps == 1:
        first_reads = sum(case.sizes[u].nbytes for u in used if case.sizes[u].tier is Tier.DISK)
        assert simulation.moved.weights_read >= first_reads


@settings(max_examples=examples(150), deadline=None)
@given(cases(), st.integers(2, 60), st.integers(0, 40), rates, st.booleans(), st.booleans())
def test_the_thread_that_runs_the_model_computes_or_waits(
    case: Case, host: int, more: int, rates: SimulatedRates | None, overlap: bool, speculate: bool
) -> None:
    rates = (rates or SimulatedRates())._replace(on_cpu=False)
    simulation = case.run(
        host * PAGE, sum(case.moving[-2:]) + more * PAGE, rates=rates, overlap=overlap, speculate=speculate
    )
    compute = sum(use.seconds for use in case.uses)
    assert simulation.seconds == pytest.approx(compute + sum(simulation.waited), abs=1e-9)
    assert simulation.busy.get("model", 0.0) == pytest.approx(compute)


@settings(max_examples=examples(150), deadline=None)
@given(cases(), st.integers(2, 60), st.integers(0, 40), st.booleans())
def test_with_room_for_everything_no_weights_are_read_and_with_less_never_fewer_bytes(
    case: Case, host: int, more: int, overlap: bool
) -> None:
    """More memory that is still too little may read more, in one of some hundred random cases: what is kept is the
    furthest choice of each moment, blocks of different sizes leave holes, and a lease more lets an update be delivered
    that costs another its place. Between a budget and room for everything it never does."""
    fetched = {use.unit for use in case.uses if use.lookup is None}  # other lookups read their rows each time
    uses = [use if use.unit in fetched else use._replace(lookup=None) for use in case.uses]
    case = case._replace(uses=uses, limits=Limits())
    everything = 2 * sum(case.on_disk) + 2 * PAGE
    some = case.run(host * PAGE, sum(case.moving[-2:]) + more * PAGE, overlap=overlap)
    ample = case.run(everything, sum(case.moving) + 2 * case.moving[-1], overlap=overlap)
    assert ample.moved.weights_read == 0 and ample.undelivered == 0
    assert ample.moved.read <= some.moved.read and ample.moved.written == some.moved.written


def test_twenty_six_bytes_for_each_parameter() -> None:
    """Everything on disk, two leases, room for two units on the device: what the design says a step costs."""
    n, pages = 20, 4
    simulation = simulate(
        [passes(n, 0.0, 0.0)] * 3, [unit(pages)] * n, [cost(pages)] * n, Budgets(2 * pages * PAGE, 2 * pages * PAGE)
    )
    weights = pages * PAGE
    ahead = 2 * weights  # the turn finds two units in place, and two updates find the old weights in their leases
    assert simulation.moved == Moved(n * weights - ahead, n * 6 * weights - ahead, n * 6 * weights)
    # The first use waits for its update. Later ones find their unit in place, which its update has sent there.
    assert (simulation.undelivered, simulation.uses, simulation.hits) == (0, 2 * n, 2 * n - 1)


def test_a_block_of_experts_is_read_once_for_its_recomputation_and_its_backward() -> None:
    """Its groups fit into both caches together, and groups of no other block take their place between the two."""
    layers, groups = 4, 8
    forward, backward = list[Use](), list[Use]()
    for layer in range(layers):
        first = layer * (groups + 1)
        experts = tuple(range(first + 1, first + 1 + groups))
        for at_once in (False, True):
            held = Use(first, held=groups + 1)
            chosen = [Use(expert) for expert in experts]
            chosen[0] = chosen[0]._replace(expects=Expected(experts, experts, at_once=at_once))
            if not at_once:
                forward += [held, *chosen]
            else:
                backward = [held, *chosen, *(Use(expert) for expert in reversed(experts)), Use(first), *backward]
    units = layers * (groups + 1) + 1
    uses = [*forward, Use(units - 1), *backward]
    sizes, updates = [unit(1)] * units, [None] * units
    simulation = simulate([uses] * 4, sizes, updates, Budgets(6 * PAGE, 4 * PAGE))
    assert simulation.moved.weights_read <= 2.2 * units * PAGE, "once for the forward, and once for the rest"


def test_a_region_that_has_no_room_is_an_error() -> None:
    uses = [Use(0, held=3), Use(1, held=2), Use(2)]
    with pytest.raises(BudgetError, match="1 pages needs"):
        simulate([uses] * 3, [unit(1)] * 3, [None] * 3, Budgets(9 * PAGE, 2 * PAGE))
    assert simulate([uses] * 3, [unit(1)] * 3, [None] * 3, Budgets(9 * PAGE, 3 * PAGE)).device_peak == 3 * PAGE


# -- time ---------------------------------------------------------------------------------------------


def passes(n: int, forward: float, backward: float) -> list[Use]:
    return [*(Use(u, forward) for u in range(n)), *(Use(u, backward) for u in reversed(range(n)))]


def test_equal_arguments_give_equal_figures() -> None:
    chance = random.Random(3)
    uses = [Use(chance.randrange(6), chance.random()) for _ in range(30)]
    sizes, costs = [unit(n) for n in (1, 2, 3, 4, 5, 6)], [cost(n) for n in (1, 2, 3, 4, 5, 6)]
    budgets, rates = Budgets(14 * PAGE, 12 * PAGE), SimulatedRates(1e4, 1e4, upload=1e5, kernel=1e4)
    assert simulate([uses] * 3, sizes, costs, budgets, rates=rates) == simulate(
        [uses] * 3, sizes, costs, budgets, rates=rates
    )


# -- micro-batches that are alike ---------------------------------------------------------------------------


@settings(max_examples=examples(200), deadline=None)
@given(cases(), st.integers(2, 60), st.integers(0, 40), rates, st.booleans(), st.integers(2, 12))
def test_micro_batches_that_are_passed_over_change_no_figure(
    case: Case, host: int, more: int, rates: SimulatedRates | None, speculate: bool, times: int
) -> None:
    """Other uses of the same units follow them."""
    first, *rest = case.uses
    device = sum(case.moving[-2:]) + more * PAGE
    every, some = (
        case._replace(uses=[*[first._replace(period=period), *rest] * times, *reversed(case.uses)]).run(
            host * PAGE, device, rates=rates, speculate=speculate
        )
        for period in (0, len(case.uses))
    )
    assert some.moved == every.moved and some.speculated == every.speculated
    for figure in ("host_peak", "device_peak", "uses", "hits", "undelivered", "seconds", "waited", "worked", "busy"):
        assert getattr(some, figure) == pytest.approx(getattr(every, figure), rel=1e-9, abs=1e-9), figure


def test_the_time_of_a_simulation_does_not_grow_with_its_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are read for each of them, in both orders of the micro-batches."""
    advances = 0
    advance = Clock.advance

    def counted(clock: Clock) -> bool:
        nonlocal advances
        advances += 1
        return advance(clock)

    monkeypatch.setattr(Clock, "advance", counted)
    n = 20
    for uses in ([passes(n, 0.1, 0.2)], [[Use(unit, 0.1)] for unit in range(n)]):
        counts = []
        for times in (100, 200):
            step = [use._replace(period=len(one) if use is one[0] else 0) for one in uses for use in one * times]
            advances = 0
            simulate([step] * 3, [unit(1)] * n, [None] * n, Budgets(9 * PAGE, 3 * PAGE), rates=SimulatedRates(1e5, 1e5))
            counts.append(advances)
        assert counts[1] == counts[0] < 40 * n


# -- two lanes of updates -----------------------------------------------------------------------------


def seven_billions(on_disk: int) -> Simulation:
    """A step of 7B in 24 GiB of an H200, 32k tokens, each block for all micro-batches in turn.

    The states are in RAM, but for the moments of the last `on_disk` units, which are on a drive of 2 GB/s.
    """
    numels = [131_000_000, *[202_400_000] * 32, 131_000_000]
    sizes = [UnitSize("unit", 2 * n, Tier.HOST, 2 * n, pieces_of([range(2 * n)])) for n in numels]
    first = len(numels) - on_disk
    costs = [UpdateCost(n, 0, *[8 * n if unit >= first else 0] * 2) for unit, n in enumerate(numels)]
    rates = SimulatedRates(1.77e9, 2.74e9, 2.15e9, 50e9, 4.9e9, download=50e9)
    simulation = simulate(
        [passes(len(numels), 0.82 / len(numels), 2.47 / len(numels))] * 4,
        sizes,
        costs,
        Budgets(0, 20 << 30),
        rates=rates,
        tile_numel=max(numels) // 16,
    )
    assert simulation.moved.read == simulation.moved.written == 8 * sum(numels[first:])
    return simulation


@pytest.mark.parametrize(("on_disk", "seconds"), [(0, 3.88), (1, 3.90), (4, 7.96)])
def test_units_on_the_drive_are_updated_beside_those_in_memory(on_disk: int, seconds: float) -> None:
    """In one lane the last two would take 4.76 and 9.16 s: the drive would wait for the updates in memory."""
    assert seven_billions(on_disk).seconds == pytest.approx(seconds, rel=0.05)


# -- two passes of an update ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward", "backward", "one_pass", "two_passes"),
    [
        (0.1, 2.0, 30.1, 27.3),
        (0.1, 0.5, 15.1, 13.1),
        (0.1, 0.1, 11.1, 10.8),
        (0.1, 0.01, 10.2, 10.3),
        (1.5, 0.5, 21.0, 20.7),
    ],
    ids=["the backward hides all", "most", "as many as it can", "none", "nobody waits but for the first unit"],
)
def test_weights_are_written_before_moments_as_far_as_the_backward_hides_them(
    forward: float, backward: float, one_pass: float, two_passes: float
) -> None:
    """Ten units, each updated in a second, or in two passes of 18 of its 26 bytes each."""
    n, pages = 10, 4
    numel = pages * PAGE // 2

    def seconds(parts: tuple[float, float] | None) -> float:
        return simulate(
            [passes(n, forward, backward)] * 12,
            [unit(pages, Tier.HOST)] * n,
            [UpdateCost(numel, passes=parts)] * n,
            Budgets(0, 3 * pages * PAGE),
            rates=SimulatedRates(kernel=float(numel)),
            counted=8,
        ).seconds

    assert seconds(None) == pytest.approx(one_pass, abs=0.05)
    assert seconds((18 / 26, 18 / 26)) == pytest.approx(two_passes, abs=0.05)
