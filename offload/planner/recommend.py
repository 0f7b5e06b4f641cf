"""The plan of a config, and the choice of tiers and host budget if the user names none.

Every candidate is tried by a prediction of its own.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from offload.config import load_config
from offload.errors import BudgetError, ConfigError
from offload.layout.flat_layout import UnitLayout
from offload.layout.memory_plan import first_that_fits
from offload.layout.pass_order import LAYER_MAJOR, MICRO_BATCH_MAJOR, ScheduleChoice, takes_turns
from offload.layout.peak_memory import PeakMemory
from offload.layout.placement import growth, usable_host
from offload.planner import activations
from offload.planner.activations import (
    Load,
    Need,
    beside_weights,
    for_device,
    host_peak,
    need,
    room_of,
    wish_of,
    with_host_memory,
)
from offload.planner.activations import Room as ActivationRoom
from offload.planner.hardware import Hardware
from offload.planner.memory import Memory, Room, settings, settle
from offload.planner.model_shape import Shape
from offload.planner.step_time import Timing, chain, choice_of, lower_bound, predict, timed, update_written
from offload.prices import Cost, Prices, cost
from offload.sizes import PAGE, format_size
from offload.states import State, Tier
from offload.swapper.memory.device import DeviceRoom

PLACEMENTS = (("none", "none"), ("none", "cpu"), ("cpu", "cpu"), ("nvme", "nvme"))
"""Devices of weights and of optimizer states; the fastest first, if all fit."""

WORTH = 1.03
"""Speed-up that a larger host budget, a smaller micro-batch or a higher ZeRO stage must bring."""
_WEAR = 1.1
"""Speed-up that a placement on drives must bring over one in memory, which wears nothing out."""


class Planned(NamedTuple):
    """A run that fits its machine."""

    shape: Shape
    hardware: Hardware
    load: Load
    content: Mapping[str, Any]
    """The config."""
    memory: Memory
    timing: Timing
    given: Load
    """`load` before the plan has chosen its schedule and the tiers of the blocks' inputs."""
    choice: ScheduleChoice
    """The schedule of `load`, and the reason for it."""

    @property
    def activations(self) -> int:
        """Returns the bytes of a micro-batch's activations on the device."""
        return self.needed.device

    @property
    def needed(self) -> Need:
        """Returns the bytes of a micro-batch's activations in every tier."""
        return need(self.shape, self.load)

    @property
    def least_host(self) -> int:
        """Returns the bytes of the smallest host budget known to work: the general least one, or the plan's if smaller.

        The plan's budget may be smaller, since the general least assumes no room for gradients on the device.
        """
        return min(self.memory.least_host, self.memory.host)

    @property
    def export(self) -> int:
        """Returns the additional bytes on disk of the saved model: of the adapters, if only they are trained."""
        if self.shape.adapted:
            return sum(self.memory.parts.trainable_numel) * self.memory.mode.weight_dtype.itemsize
        return self.memory.export

    @property
    def peak(self) -> PeakMemory:
        """Returns the peak of RAM beyond the bytes in use before the run, by what takes it."""
        return host_peak(self.memory, self.shape, self.hardware, self.load)

    @property
    def host_peak(self) -> int:
        """Returns the peak bytes of RAM beyond those in use before the run."""
        return sum(self.peak)

    def with_block(self, **changes: Any) -> dict[str, Any]:
        return {**self.content, "offload": {**self.content.get("offload", {}), **changes}}


class TooSlowError(Exception):
    """The lower bound of a step, in seconds, is longer than is of interest."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"a step takes at least {seconds} seconds")
        self.seconds = seconds


def plan(
    shape: Shape,
    hardware: Hardware,
    load: Load,
    content: Mapping[str, Any],
    within: float = math.inf,
    coarse: bool = False,
) -> Planned:
    """Returns the plan of a config; `coarse` as for `predict`.

    `load` contains recomputation by the model itself. The config sets the tiers of the blocks' inputs, and the tiles.
    The schedule "auto" chooses the shorter step.

    Raises:
        TooSlowError: the lower bound of the step is at least `within` seconds. No step was simulated then.
    """
    whole, config = shape.uncut or shape, load_config(content)
    if whole.filed and config.weight_tier == "nvme" and config.offload.frozen_files:
        whole = whole.in_files()
    cut = None if shape.uncut is None else shape  # by an earlier plan
    in_groups = any(layer_experts.of_unit > 1 for layer_experts in whole.experts) and config.offload.experts == "auto"

    def place(experts: str, vocabulary: str) -> Callable[[], Planned]:
        if in_groups and experts == "each":
            divided = whole.by_expert().in_groups()
            divided = divided if vocabulary == "whole" else divided.in_pieces()
        else:
            divided = whole if vocabulary == "whole" else cut or whole.in_pieces()
        memory = _in_turns(divided, hardware, load, content)
        decide = functools.partial(_in_best_order, divided, hardware, load, content, memory, within, coarse)
        if not hardware.on_cpu:  # the run does not know the activations before they come
            return decide
        planned = decide()
        return lambda: planned

    adds_otherwise = load.schedule == LAYER_MAJOR and any(table.tied for table in whole.tables)
    vocabulary = config.offload.vocabulary if whole.tables and not adds_otherwise else "whole"
    return first_that_fits("auto" if in_groups else "each", vocabulary, place)()


def _in_turns(shape: Shape, hardware: Hardware, load: Load, content: Mapping[str, Any]) -> Memory:
    """Returns the memory of a config, with gradients as they wait in the order that is known before the run."""
    named = takes_turns(load.schedule, load.accumulation, chain(shape))
    memory = settled(shape, hardware, load, content, named or load.whole_steps)
    if named or not load.whole_steps:
        return memory
    wish = wish_of(memory.config)
    # Beside weights that stay, a run whose blocks keep all activations learns their bytes in its first step.
    known = wish.tier not in (None, "device") or any(
        row[State.WEIGHT] is not Tier.DEVICE for row in memory.placement.tiers
    )
    in_turns = known and choice_of(shape, hardware, load, memory, wish).in_turns
    return memory if in_turns else settled(shape, hardware, load, content)


def _in_best_order(
    shape: Shape,
    hardware: Hardware,
    load: Load,
    content: Mapping[str, Any],
    memory: Memory,
    within: float,
    coarse: bool,
) -> Planned:
    """Returns the plan with the schedule that takes the shorter step; arguments and errors as of `plan`."""
    wish = wish_of(memory.config)
    room = room_of(hardware, memory, wish, shape, load)
    if wish.tier == "nvme" and not room.drives:
        raise ConfigError(
            '"activations": "nvme" needs a drive and a folder on it; give --drive or --nvme-path, and set "nvme_path" '
            'in the block "offload" of a config'
        )
    choice = choice_of(shape, hardware, load, memory, wish)
    choices = [choice]
    if load.schedule == "auto" and choice.schedule != MICRO_BATCH_MAJOR and not load.whole_steps:
        choices.append(ScheduleChoice(MICRO_BATCH_MAJOR, "a layer-major step is not faster"))
    planned: Planned | None = None
    least = math.inf
    for choice in choices:
        most = within if planned is None else min(within, planned.timing.seconds)
        # Activations are checked before the arena grows, which takes only memory that they leave free.
        chosen = _checked(shape, hardware, load, memory, choice)
        grown = _grown(memory, shape, hardware, chosen)
        if not math.isinf(most) or coarse:
            bound = lower_bound(grown, shape, hardware, chosen)
            # The bound alone shows that this step is not shorter, or for a comparison that it hardly is.
            if bound >= most or (coarse and bound >= least):
                least = min(least, bound)
                continue
            least = bound
        grown, timing = timed(grown, shape, hardware, chosen, coarse)
        if planned is None or timing.seconds < planned.timing.seconds:
            planned = Planned(shape, hardware, chosen, content, grown, timing, load, choice)
    if planned is None:
        raise TooSlowError(least)
    return planned


def plan_if_it_fits(
    shape: Shape,
    hardware: Hardware,
    load: Load,
    content: Mapping[str, Any],
    within: float = math.inf,
    coarse: bool = False,
) -> Planned | None:
    """Returns the plan of a config; None if a budget is too small for it, or as `plan` raises `TooSlowError`."""
    try:
        return plan(shape, hardware, load, content, within, coarse)
    except (BudgetError, TooSlowError):
        return None


def _checked(shape: Shape, hardware: Hardware, load: Load, memory: Memory, choice: ScheduleChoice) -> Load:
    """Returns the load with a schedule and the tiers of its inputs; raises `BudgetError` if activations do not fit."""
    wish = wish_of(memory.config)
    chosen = load._replace(schedule=choice.schedule)
    room = room_of(hardware, memory, wish, shape, chosen, chosen.alive > 1)
    chosen = activations.within(shape, chosen, wish, room)
    activations.check(shape, chosen, wish, room)
    return chosen


def settled(shape: Shape, hardware: Hardware, load: Load, content: Mapping[str, Any], in_turns: bool = False) -> Memory:
    """Returns the memory of a config on a machine, as it is before the first step; `in_turns` as for `settle`."""
    # Only whether there are several micro-batches has a part in these bytes, and a plan tries many numbers.
    sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    content = {name: value for name, value in content.items() if name not in sizes}
    key, count = _Content(repr(content), content), min(load.accumulation, 2)
    room = Room(
        hardware.ram, hardware.gpu_memory, hardware.disk, max(len(hardware.drives), 1), unified=hardware.unified
    )
    memory = _settled(shape.layouts, key, room, count, shape.matrices, load.speculate, in_turns)
    if not hardware.drives and (memory.slots or memory.spilled):
        raise ConfigError("this machine has no drive, and the config needs one; give --drive or --nvme-path")
    return memory


@dataclass(frozen=True)
class _Content:
    """A config as part of a cache key: two are equal if their texts are."""

    text: str
    content: Mapping[str, Any] = field(compare=False)


# Advice, reach and orders settle the plan's own config again, and each of their configs more than once.
@functools.lru_cache(maxsize=128)
def _settled(
    layouts: tuple[UnitLayout, ...],
    config: _Content,
    room: Room,
    accumulation: int,
    matrices: frozenset[str],
    speculate: bool,
    in_turns: bool,
) -> Memory:
    return settle(
        layouts, config.content, room, accumulation, matrices=matrices, speculate=speculate, in_turns=in_turns
    )


def _grown(memory: Memory, shape: Shape, hardware: Hardware, load: Load) -> Memory:
    """Returns `memory` with the device arena as it is after the first step, which grows the arena into free memory."""
    if hardware.on_cpu:
        return memory
    beside = beside_weights(memory, shape, load)
    room = DeviceRoom(for_device(hardware, memory) - memory.device - beside, beside)
    more = growth(memory.device, memory.placement.device_need, room)
    return replace(memory, placement=memory.placement.grown(more))


def with_host_budget(planned: Planned, coarse: bool = False) -> Planned:
    """Returns the plan with the recommended host budget; `coarse` if the timing of `planned` is.

    Budgets are tried from the smallest up. A larger one replaces the best so far only if a step is faster by `WORTH`.
    """
    best = planned
    for budget in _budgets(planned):
        content = with_host_memory(planned.content, budget, planned.needed.host)
        most = best.timing.seconds / WORTH
        tried = plan_if_it_fits(planned.shape, planned.hardware, planned.given, content, most, coarse)
        if tried is not None and tried.timing.seconds < most:
            best = tried
    return best


def _budgets(planned: Planned) -> Iterator[int]:
    """Yields host budgets in bytes, ascending: for all weights, for half of the other states too, and for all states.

    Budgets beyond the RAM are left out; if there are any, the largest budget that the RAM allows comes last.
    """
    memory, hardware = planned.memory, planned.hardware
    most = usable_host(
        hardware.ram - (planned.host_peak - memory.host), own_device_memory=memory.request.machine.own_device_memory
    )
    weights = memory.nbytes_on_disk(State.WEIGHT)
    states = memory.nbytes_on_disk(*(state for state in memory.mode.states if state is not State.WEIGHT))
    for more in dict.fromkeys((weights, weights + states // 2, weights + states)):
        budget = (memory.host + more) // PAGE * PAGE
        # A budget that the plan has already, or that the RAM has no room for, is not tried.
        if more and memory.host < budget <= most:
            yield budget
    if memory.host < most < memory.host + weights + states:
        yield most // PAGE * PAGE


def choose(shape: Shape, hardware: Hardware, load: Load, recompute: bool | None, **options: Any) -> Planned:
    """Returns the plan with the fastest tiers that fit and the recommended host budget.

    `recompute` None tries a plan with and one without recomputation. `options` are the options of `memory.settings`. If
    nothing fits, the error comes from the candidate that takes the least memory.
    """
    error: Exception | None = None
    plans: list[Planned] = []
    for way in _ways(shape, hardware, load, recompute, options):
        # Moving blocks' inputs off the device may make a layer-major plan fit, if there is none so far.
        wanted = any(planned.given.accumulation > 1 and planned.given.schedule == "auto" for planned in plans)
        lacks_room = wanted and all(planned.choice.schedule == MICRO_BATCH_MAJOR for planned in plans)
        if plans and way.moves_inputs and not lacks_room:
            break
        # A step that is slower than the best one even by its lower bound is not simulated.
        most = min((planned.timing.seconds for planned in plans), default=math.inf) * _WEAR
        try:
            _check_device(shape, hardware, way.load, way.content)
            plans.append(_fitting(shape, hardware, way, most))
        except TooSlowError:
            continue
        except (BudgetError, ConfigError) as refusal:
            error = refusal
    if not plans:
        assert error is not None
        raise error
    # `plans` starts with the candidates that move the fewest bytes. The first one that is nearly as fast as the best is
    # preferred to a marginally faster one.
    best = max(plans, key=lambda planned: planned.timing.tokens_per_second)

    def near(planned: Planned) -> bool:
        wears = best.timing.moved.written > planned.timing.moved.written == 0
        return planned.timing.tokens_per_second * (_WEAR if wears else WORTH) >= best.timing.tokens_per_second

    best = next(filter(near, plans))
    if "nvme" in way_of(best.content):
        best = with_host_budget(best, coarse=True)
    best = _with_attention_kept(best)
    # So far its step was compared with others by a coarse simulation.
    return best._replace(timing=predict(best.memory, best.shape, best.hardware, best.load))


class _Way(NamedTuple):
    """A candidate: where the states and the blocks' inputs are, and what is computed again."""

    load: Load
    content: dict[str, Any]
    moves_inputs: bool
    """True if inputs of blocks may leave the device."""


def way_of(content: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the devices of weights and states in a config."""
    zero = content["zero_optimization"]
    return zero["offload_param"]["device"], zero["offload_optimizer"]["device"]


def _ways(
    shape: Shape, hardware: Hardware, load: Load, recompute: bool | None, options: Mapping[str, Any]
) -> Iterator[_Way]:
    """Yields the candidates of `choose`; those that move the fewest bytes first."""
    drives, on_cpu = bool(hardware.drives), hardware.on_cpu
    rooms = {"none": hardware.ram if on_cpu else hardware.gpu_memory, "cpu": hardware.ram, "nvme": math.inf}
    # Frozen weights may be stored in fewer bytes than their dtype.
    weights_nbytes = 0 if shape.adapted else shape.parameters * shape.itemsize
    # Without a drive, a folder could not store anything.
    options = dict(options) if drives else {**options, "paths": ()}
    # Recomputation by the model, and the tier of the blocks' inputs. Without recomputation first: if both are about as
    # fast, the simpler run is chosen. The last two move inputs of blocks, so they are tried only for runs that fit in
    # no other way.
    ways: list[tuple[bool, str | None]] = [(False, None), (False, "device"), (False, "cpu"), (False, "nvme")]
    if (tier := options.pop("activations", None)) is not None or recompute is not None:
        ways = [(bool(recompute), tier)]
    for again, tier in ways:
        for weights, states in PLACEMENTS:
            # Without drives these tiers cannot exist. With drives a candidate follows whose weights have room.
            if drives and weights_nbytes > rooms[weights]:
                continue
            if drives or "nvme" not in (weights, states, tier):
                content = settings(
                    weights, states, activations=tier, batch=load.batch, accumulation=load.accumulation, **options
                )
                yield _Way(load._replace(recompute=again), content, tier not in (None, "device"))


STEP_TOKENS, _MICRO_BATCH_TOKENS = 65536, 32768
"""Tokens of a step, and most tokens of a micro-batch, that a plan chooses by itself."""


def loads(load: Load, sequence: int, batch: int | None, accumulation: int | None) -> Iterator[Load]:
    """Yields the loads that a plan tries, the largest micro-batch first; a number that the user gives stays.

    Steps have `STEP_TOKENS` tokens, rounded to a power of two of sequences, if the user gives no number.
    """
    every = 1 << max(STEP_TOKENS // sequence, 1).bit_length() - 1
    most = min(1 << max(_MICRO_BATCH_TOKENS // sequence, 1).bit_length() - 1, every)
    while most:
        size = most if batch is None else batch
        yield load._replace(batch=size, accumulation=accumulation or max(every // size, 1))
        most = 0 if batch is not None else most // 2


def choose_load(
    shape: Shape, hardware: Hardware, tried: Iterable[Load], recompute: bool | None, **options: Any
) -> Planned:
    """Returns the plan of `choose` with one of the loads: the one whose step is the shortest by its lower bound.

    A smaller micro-batch has to be faster by `WORTH`. If nothing fits, the error is that of the last load.
    """
    loads = list(tried)
    rates = [_bound(shape, hardware, load, recompute, options) for load in loads] if len(loads) > 1 else [1.0]
    best = max(rates)
    chosen = next(load for load, rate in zip(loads, rates, strict=True) if rate * WORTH >= best)
    return choose(shape, hardware, chosen if best else loads[-1], recompute, **options)


def _bound(shape: Shape, hardware: Hardware, load: Load, recompute: bool | None, options: Mapping[str, Any]) -> float:
    """Returns the most tokens a second of a load, by lower bounds; 0 if nothing fits."""
    most = 0.0
    for way in _ways(shape, hardware, load, recompute, options):
        with contextlib.suppress(BudgetError, ConfigError):
            _check_device(shape, hardware, way.load, way.content)
            try:
                seconds = _fitting(shape, hardware, way, 0.0).timing.seconds
            except TooSlowError as bound:
                seconds = bound.seconds
            most = max(most, load.tokens(shape) / seconds)
    return most


def _with_attention_kept(planned: Planned) -> Planned:
    """Returns the plan with outputs of attention kept, if they have room and the step is faster by `WORTH`.

    Inputs of blocks in host memory may make that room.
    """
    load, tier = planned.load, wish_of(load_config(planned.content)).tier
    flops = load.batch * load.accumulation * sum(use.attention for use in planned.shape.uses)
    # No step is shorter by more than the seconds of attention.
    most = flops / planned.hardware.matmul
    if tier is None or (planned.timing.seconds - most) * WORTH >= planned.timing.seconds:
        return planned
    for inputs in dict.fromkeys((tier, "cpu")):
        content, most = planned.with_block(activations=inputs, keep_attention=True), planned.timing.seconds / WORTH
        tried = plan_if_it_fits(planned.shape, planned.hardware, planned.given, content, most, coarse=True)
        if tried is not None and tried.timing.seconds < most:
            return tried
    return planned


def _check_device(shape: Shape, hardware: Hardware, load: Load, content: Mapping[str, Any]) -> None:
    """Raises `BudgetError` if not even a GPU without a budget for weights has room for the activations.

    The error comes before any budget is tried. It names the largest micro-batch that fits beside `content`'s budgets.
    """
    if hardware.on_cpu:
        return
    wish = wish_of(load_config(content))
    whole = ActivationRoom(hardware.gpu_memory, 1 << 62, 1 << 62, drives=bool(hardware.drives))
    if not whole.has(need(shape, activations.within(shape, load, wish, whole))):
        room = room_of(hardware, settled(shape, hardware, load, content), wish, shape, load)
        raise activations.too_long(shape, activations.within(shape, load, wish, room), wish, room)


def _fitting(shape: Shape, hardware: Hardware, way: _Way, within: float) -> Planned:
    """Returns the plan with the default budgets, or with smaller ones if the activations need the room.

    Smaller budgets are written into the content of `way`. `within` as for `plan`.
    """
    load, content, on_drives = way.load, way.content, "nvme" in way_of(way.content)
    try:
        planned = plan(shape, hardware, load, content, within, coarse=True)
    except BudgetError:
        if not on_drives:
            raise
        if hardware.on_cpu:
            # The default budgets take a share of the RAM in whole units. On a larger machine they may thus leave less
            # memory to the activations than on a smaller one, and what fits the smaller one must fit both.
            memory = settled(shape, hardware, load, content)
            content["offload"]["host_memory"] = memory.least_host
            least_host = plan_if_it_fits(shape, hardware, load, content, coarse=True)
            if least_host is None:
                content["offload"]["device_memory"] = memory.placement.device_need.least
                least_host = plan_if_it_fits(shape, hardware, load, content, coarse=True)
            if least_host is None:
                raise
            planned = least_host
        else:
            memory = settled(shape, hardware, load, content)
            wish = wish_of(memory.config)
            # With no room on the device, all inputs that can leave it do.
            room = room_of(hardware, memory, wish, shape, load)._replace(device=0)
            least = activations.within(shape, load, wish, room)
            free = for_device(hardware, memory) - beside_weights(memory, shape, least)
            content["offload"]["device_memory"] = max(free // PAGE * PAGE, 0)
            planned = plan(shape, hardware, load, content, within, coarse=True)
    # Another candidate covers states on DISK.
    if not on_drives and planned.memory.placement.on_disk:
        raise BudgetError(f"the host budget has no room for {' and '.join(dict.fromkeys(way_of(content)))}")
    return planned


# -- advice --------------------------------------------------------------------------------------------
#
# Advice on a plan: faster changes, the recommended host budget, and the step in each order of micro-batches.
#
# Every change and every order is predicted on its own.


_GAIN = 1.05
"""Speed-up from which a change is reported."""


class Advice(NamedTuple):
    """Advice on a plan."""

    changes: tuple[Change, ...]
    """Changes, the best first."""
    host: int
    """Bytes of the recommended host budget."""


class Change(NamedTuple):
    """One change of a plan and its predicted effect."""

    words: str
    seconds: float
    gain: float
    """Tokens per second with the change, divided by tokens per second without it."""
    option: str = ""
    """The option of `offload plan` that makes the change; empty for a change of the machine."""

    @property
    def sentence(self) -> str:
        option = f" ({self.option})" if self.option else ""
        return f"{self.words}{option}: {self.gain:.2f} times the tokens/s"


class Priced(NamedTuple):
    """The dollars of a plan's step, and of the step after each change."""

    cost: Cost
    prices: Prices
    changes: tuple[PricedChange, ...]
    """All changes that were simulated, the cheapest for a token first; those that make a token dearer too."""


class PricedChange(NamedTuple):
    """One change of a plan and its predicted dollars."""

    words: str
    option: str
    cost: Cost
    share: float
    """Dollars of a token with the change, divided by those without it."""


class Ordered(NamedTuple):
    """A step in one order."""

    schedule: str
    speculate: bool
    """True if units are updated under the backward."""
    planned: Planned | None
    """The plan of the step; None if its activations do not fit."""


def advise(planned: Planned, of_tokens: bool = True, best: bool = False) -> Advice:
    """Returns the changes that are predicted to make the run faster, and the recommended host budget.

    `of_tokens` False leaves out changes of the tokens of a step. With `best`, only the change that helps most is
    returned: the changes with the shortest lower bounds are compared by coarse simulations, and the host budget is that
    of the plan.
    """
    before = planned
    if best:
        before = planned._replace(timing=predict(planned.memory, planned.shape, planned.hardware, planned.load, True))
    changes: list[Change] = []
    ideas = [idea for idea in _ideas(planned, best) if of_tokens or idea.tokens == 1]
    for idea in _promising(ideas) if best else ideas:
        within = before.timing.seconds * idea.tokens / _GAIN if best else math.inf
        with contextlib.suppress(BudgetError, ConfigError, TooSlowError):
            timing = idea.act(within).timing
            # Tokens per second, not seconds: some changes alter the number of tokens in a step.
            gain = timing.tokens_per_second / before.timing.tokens_per_second
            if gain >= _GAIN:
                changes.append(Change(idea.words, timing.seconds, gain, idea.option))
    changes.sort(key=lambda change: -change.gain)
    return Advice(tuple(changes[: 1 if best else None]), planned.memory.host if best else recommended_host(planned))


def priced(planned: Planned, prices: Prices) -> Priced:
    """Returns the dollars of a plan and of every change that fits; no change gives up what the plan makes durable."""
    # Changes are simulated coarsely, so they are compared with the same plan simulated coarsely.
    timing = predict(planned.memory, planned.shape, planned.hardware, planned.load, coarse=True)
    before = _cost(planned._replace(timing=timing), planned, prices)
    ideas = [idea for idea in _ideas(planned, coarse=True) if idea.option != "--durability none"]
    if planned.memory.slots == 2 and planned.memory.commit_every < _COMMIT_EVERY:
        seldom = planned.with_block(durability={"every": _COMMIT_EVERY})
        ideas.append(
            _Idea(
                f"commits every {_COMMIT_EVERY} steps",
                f'"durability": {{"every": {_COMMIT_EVERY}}}',
                lambda within: plan(planned.shape, planned.hardware, planned.given, seldom, within, coarse=True),
            )
        )
    changes = []
    for idea in ideas:
        with contextlib.suppress(BudgetError, ConfigError):
            after = _cost(idea.act(math.inf), planned, prices)
            share = after.total * before.tokens / (before.total * after.tokens) if before.total else 1.0
            changes.append(PricedChange(idea.words, idea.option, after, share))
    changes.sort(key=lambda change: change.share)
    return Priced(_cost(planned, planned, prices), prices, tuple(changes))


def _cost(planned: Planned, before: Planned, prices: Prices) -> Cost:
    """Returns the dollars of a step; what `planned` has more of than `before` is bought for it."""
    ram = planned.hardware.ram - before.hardware.ram
    drives = len(planned.hardware.drives) - len(before.hardware.drives)
    timing = planned.timing
    return cost(prices, timing.seconds, timing.tokens, timing.moved.written, ram, drives)


_COMMIT_EVERY = 10
"""Steps between the commits of the change that commits less often."""
_TRIED = 3
"""Changes that are simulated to find the best one."""


def _promising(ideas: Iterable[_Idea]) -> list[_Idea]:
    """Returns the ideas with the most tokens a second by their lower bounds, the best first."""
    bounds: list[tuple[float, _Idea]] = []
    for idea in ideas:
        try:
            bounds.append((idea.act(0.0).timing.seconds / idea.tokens, idea))
        except TooSlowError as bound:
            bounds.append((bound.seconds / idea.tokens, idea))
        except (BudgetError, ConfigError):
            continue  # it does not fit
    return [idea for _, idea in sorted(bounds, key=lambda bound: bound[0])[:_TRIED]]


class _Idea(NamedTuple):
    words: str
    option: str
    act: Callable[[float], Planned]
    """Predicts the changed run; the argument is the `within` of `plan`."""
    tokens: int = 1
    """Factor of the tokens of a step."""


def _ideas(planned: Planned, coarse: bool) -> Iterator[_Idea]:
    """Yields candidate changes, which `coarse` simulations predict."""
    hardware, load, mode = planned.hardware, planned.given, planned.memory.mode

    def changed(hardware: Hardware = hardware, load: Load = load, **block: Any) -> Callable[[float], Planned]:
        content = planned.with_block(**block)
        return lambda within: plan(planned.shape, hardware, load, content, within, coarse)

    for times in (2, 4):
        more = load._replace(batch=load.batch * times)
        words = f"micro-batches of {more.batch} x {planned.shape.sequence} tokens"
        yield _Idea(words, f"--batch-size {more.batch}", changed(load=more), times)
    many = load._replace(accumulation=load.accumulation * 4)
    words = f"{many.accumulation} micro-batches a step"
    yield _Idea(words, f"--accumulation {many.accumulation}", changed(load=many), 4)
    if load.schedule == "auto" and planned.choice.schedule == LAYER_MAJOR:
        named = changed(load=load._replace(schedule=LAYER_MAJOR))
        words = "the order by name, with which gradients wait in fewer bytes"
        yield _Idea(words, f"--schedule {LAYER_MAJOR}", named)
    if planned.load.recompute:
        kept = {**planned.with_block(activations=None), "activation_checkpointing": {}}
        every = load._replace(recompute=False)
        yield _Idea(
            "no recomputation",
            "--no-gradient-checkpointing",
            lambda within: plan(planned.shape, hardware, every, kept, within, coarse),
        )
    if hardware.drives and planned.memory.slots:
        # Files are spread evenly over all drives, so one more drive speeds up reads and writes.
        wider = replace(hardware, drives=(*hardware.drives, hardware.drives[0]._replace(name="one more")))
        yield _Idea("one more drive like the first", "", changed(wider))
    if planned.memory.slots == 2:
        yield _Idea("no resume after a kill", "--durability none", changed(durability="none"))
    narrower = {torch.float32: ("bf16", "int8"), torch.bfloat16: ("int8",)}.get(mode.moment_dtype, ())
    for form in narrower if planned.memory.slots and mode.moments and State.PACKED not in mode.moments else ():
        yield _Idea(f"moments in {form}", f"--moments {form}", changed(moments=form))
    if planned.memory.slots and State.MASTER_LOW_BITS in mode.weights and mode.master == "fp32":
        yield _Idea("masters in bf24", "--master bf24", changed(master="bf24"))
    if planned.memory.slots:
        double = replace(hardware, ram=2 * hardware.ram)
        more_ram = changed(double)

        def with_ram(within: float) -> Planned:
            # A larger budget may make the step shorter than the bound of the default one.
            return with_host_budget(more_ram(math.inf if within else within), coarse)

        yield _Idea(f"{format_size(double.ram)} of free RAM", "", with_ram)


def writes_less(planned: Planned) -> list[tuple[str, float]]:
    """Returns options with which fewer bytes are written for each token, each with the fraction that is still written.

    Nothing is simulated: an update writes its states, whatever the order.
    """
    memory, load, written = planned.memory, planned.load, planned.timing.moved.written
    inputs = planned.timing.moved.inputs_written
    options = []

    def share_with(**changes: Any) -> float:
        """Returns the fraction of the bytes that is written with other values in the block "offload"."""
        other = settled(planned.shape, planned.hardware, planned.given, planned.with_block(**changes), load.alive > 1)
        share = update_written(other, planned.shape) / max(update_written(memory, planned.shape), 1)
        return (inputs + (written - inputs) * share) / written

    # A commit writes what is in memory; states on a drive are written in each step.
    if memory.slots == 2 and memory.commit_every < _COMMIT_EVERY:
        with contextlib.suppress(BudgetError, ConfigError):
            share = share_with(durability={"every": _COMMIT_EVERY})
            if share < 1 / 2:
                options.append((f"--durability {_COMMIT_EVERY}", share))
    if State.PACKED not in memory.mode.moments and memory.mode.moments and memory.mode.moment_dtype != torch.int8:
        with contextlib.suppress(BudgetError, ConfigError):
            options.append(("--moments int8", share_with(moments="int8")))
    options.append((f"--accumulation {2 * load.accumulation}", (inputs + (written - inputs) / 2) / written))
    return options


def recommended_host(planned: Planned) -> int:
    """Returns the bytes of the recommended host budget, regardless of the budget in the config."""
    content = copy.deepcopy(dict(planned.content))
    for name in ("host_memory", "activation_memory"):
        content.get("offload", {}).pop(name, None)
    base = plan_if_it_fits(planned.shape, planned.hardware, planned.given, content)
    return planned.memory.host if base is None else with_host_budget(base).memory.host


def compare(planned: Planned) -> list[Ordered]:
    """Returns the plan's step in each order that its model allows, the oldest order first.

    A step that moves nothing, or that has one micro-batch, has fewer orders. Empty if there is only one.
    """
    orders = []
    for schedule, speculate in itertools.product((MICRO_BATCH_MAJOR, LAYER_MAJOR), (False, True)):
        load = planned.given._replace(schedule=schedule, speculate=speculate)
        other = plan_if_it_fits(planned.shape, planned.hardware, load, planned.content)
        # A model whose blocks form no chain has one order. Without units that can be updated early, `speculate` changes
        # nothing.
        if other is None or (other.load.schedule == schedule and (not speculate or other.timing.simulation.speculated)):
            orders.append(Ordered(schedule, speculate, other))
    return orders if len(orders) > 1 else []
