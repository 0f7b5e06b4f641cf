"""Homes and a host budget where the user names none, and what to change first: each is tried by a prediction."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from offload.errors import BudgetError, ConfigError
from offload.layout.device_need import growth
from offload.planner.hardware import Hardware
from offload.planner.memory import Memory, Room, settings, settle
from offload.planner.model_shape import Shape
from offload.planner.timing import Load, Timing, activations, beside_weights, host_peak, predict
from offload.sizes import PAGE, format_size
from offload.states import State
from offload.swapper.memory.device import DeviceRoom

HOMES = (("none", "none"), ("none", "cpu"), ("cpu", "cpu"), ("nvme", "nvme"))
"""Of weights and states, the fastest first where all fit."""

_HOST_SHARE = 0.8
_WORTH = 1.03
"""A larger host budget must be so much faster than a smaller one."""
_GAIN = 1.05
"""What a change must bring to be worth a line."""


class Planned(NamedTuple):
    """A run that fits its machine."""

    shape: Shape
    hardware: Hardware
    load: Load
    content: Mapping[str, Any]
    """The config."""
    memory: Memory
    timing: Timing

    @property
    def activations(self) -> int:
        """Bytes of a micro-batch's activations."""
        return activations(self.shape, self.load)

    @property
    def host_peak(self) -> int:
        """Bytes of RAM above what the process has before."""
        return host_peak(self.memory, self.shape, self.hardware, self.load)


class Advice(NamedTuple):
    """What might be otherwise."""

    changes: tuple[Change, ...]
    """The best first."""
    host: int
    """Bytes of the host budget that is worth its memory."""


class Change(NamedTuple):
    """One thing done otherwise, and what comes of it."""

    words: str
    seconds: float
    gain: float
    """Tokens a second, of those without it."""


def plan(shape: Shape, hardware: Hardware, load: Load, content: Mapping[str, Any]) -> Planned:
    """The run of a config. Raises `ConfigError` and `BudgetError` where it does not fit."""
    memory = settle(shape.layouts, content, _room(hardware), load.accumulation)
    if not hardware.drives and (memory.slots or memory.spilled):
        raise ConfigError("this machine has no drive, and the config needs one; give --drive or --nvme-path")
    _check_activations(shape, hardware, load, memory)
    memory = _grown(memory, shape, hardware, load)
    return Planned(shape, hardware, load, content, memory, predict(memory, shape, hardware, load))


def _grown(memory: Memory, shape: Shape, hardware: Hardware, load: Load) -> Memory:
    """With the device arena as the first step of a run leaves it."""
    if hardware.on_cpu:
        return memory
    kept = beside_weights(memory, shape, load)
    room = DeviceRoom(hardware.gpu_memory - memory.device - kept, kept)
    more = growth(memory.device, memory.placement.device_need, room)
    return replace(memory, placement=memory.placement.grown(more))


def _check_activations(shape: Shape, hardware: Hardware, load: Load, memory: Memory) -> None:
    need = activations(shape, load)
    if hardware.on_cpu:
        have = hardware.ram - memory.host - memory.device
    else:
        have = hardware.gpu_memory - memory.device - (beside_weights(memory, shape, load) - need)
    if need > have:
        raise _too_long(shape, load, have)


def _too_long(shape: Shape, load: Load, have: int) -> BudgetError:
    most = max(have, 0) // activations(shape, load._replace(batch=1))
    advice = f"--batch-size {most} fits" if most else "not even one sequence fits: lower --seq-len"
    if not load.recompute:
        advice += ", or compute them again (--gradient-checkpointing)"
    return BudgetError(
        f"activations of {load.batch} x {shape.sequence} tokens take {format_size(activations(shape, load))}, beside "
        f"the budgets {format_size(max(have, 0))} are free; {advice}"
    )


def _room(hardware: Hardware) -> Room:
    disk = None if any(drive.free is None for drive in hardware.drives) else sum(d.free or 0 for d in hardware.drives)
    return Room(hardware.ram, hardware.gpu_memory, disk, max(len(hardware.drives), 1))


def with_host_budget(planned: Planned) -> Planned:
    """The same with the host budget that is worth its memory: from the least that a run takes, as far as it pays."""
    best = planned
    for budget in _budgets(planned):
        content = copy.deepcopy(dict(planned.content))
        content.setdefault("offload", {})["host_memory"] = budget
        try:
            tried = plan(planned.shape, planned.hardware, planned.load, content)
        except BudgetError:
            continue
        if tried.timing.seconds * _WORTH < best.timing.seconds:
            best = tried
    return best


def _budgets(planned: Planned) -> Iterator[int]:
    """Room for all weights beside what is needed, then for all states, as far as the machine has it."""
    memory, hardware = planned.memory, planned.hardware
    most = int(_HOST_SHARE * (hardware.ram - (planned.host_peak - memory.host)))
    weights = memory.at_home_on_disk(State.WEIGHT)
    states = memory.at_home_on_disk(*(state for state in memory.mode.states if state is not State.WEIGHT))
    for more in dict.fromkeys((weights, weights + states // 2, weights + states)):
        budget = (memory.host + more) // PAGE * PAGE
        if more and memory.host < budget <= most:
            yield budget
    if memory.host < most < memory.host + weights + states:
        yield most // PAGE * PAGE


def recommended_host(planned: Planned) -> int:
    """Bytes of the host budget that is worth its memory, whatever the config has."""
    content = copy.deepcopy(dict(planned.content))
    content.get("offload", {}).pop("host_memory", None)
    try:
        base = plan(planned.shape, planned.hardware, planned.load, content)
    except BudgetError:
        return planned.memory.host
    return with_host_budget(base).memory.host


def choose(shape: Shape, hardware: Hardware, load: Load, recompute: bool | None, **options: Any) -> Planned:
    """The fastest homes that fit, with the host budget that is worth its memory.

    `recompute` None computes activations again only where they do not fit otherwise. Raises the error of what takes
    least memory where nothing fits.
    """
    error: Exception | None = None
    found: list[Planned] = []
    for again in (False, True) if recompute is None else (recompute,):
        if not hardware.on_cpu and activations(shape, load._replace(recompute=again)) > hardware.gpu_memory:
            error = error or _too_long(shape, load._replace(recompute=again), hardware.gpu_memory)
            continue
        for weights, states in HOMES:
            if "nvme" in (weights, states) and not hardware.drives:
                continue
            content = settings(weights, states, batch=load.batch, accumulation=load.accumulation, **options)
            try:
                found.append(_fitting(shape, hardware, load._replace(recompute=again), content, (weights, states)))
            except (BudgetError, ConfigError) as refusal:
                error = refusal
    if not found:
        assert error is not None
        raise error
    best = max(each.timing.tokens_per_second for each in found)
    return next(each for each in found if each.timing.tokens_per_second * _WORTH >= best)


def _fitting(shape: Shape, hardware: Hardware, load: Load, content: dict[str, Any], homes: tuple[str, str]) -> Planned:
    """With the default device budget, or a smaller one where activations need the room."""
    try:
        planned = plan(shape, hardware, load, content)
    except BudgetError:
        if hardware.on_cpu or "nvme" not in homes:
            raise
        room = hardware.gpu_memory - beside_weights(settle(shape.layouts, content, _room(hardware)), shape, load)
        content["offload"]["device_memory"] = max(room // PAGE * PAGE, 0)
        planned = plan(shape, hardware, load, content)
    _check_moved(planned, homes)
    return with_host_budget(planned) if "nvme" in homes else planned


def _check_moved(planned: Planned, homes: tuple[str, str]) -> None:
    """What was to stay in memory and has no room there is another choice's."""
    if "nvme" not in homes and planned.memory.placement.on_disk:
        raise BudgetError(f"the host budget has no room for {' and '.join(dict.fromkeys(homes))}")


# -- what to change -----------------------------------------------------------------------------------


def advise(planned: Planned) -> Advice:
    """What makes it faster, and the host budget to take; each is a prediction of its own."""
    found: list[Change] = []
    for words, act in _ideas(planned):
        try:
            other = act()
        except (BudgetError, ConfigError):
            continue
        gain = other.timing.tokens_per_second / planned.timing.tokens_per_second
        if gain >= _GAIN:
            found.append(Change(words, other.timing.seconds, gain))
    return Advice(tuple(sorted(found, key=lambda change: -change.gain)), recommended_host(planned))


def _ideas(planned: Planned) -> Iterator[tuple[str, Callable[[], Planned]]]:
    shape, hardware, load, content = planned.shape, planned.hardware, planned.load, planned.content
    sequence = shape.sequence
    for times in (2, 4):
        more = load._replace(batch=load.batch * times)
        yield f"micro-batches of {more.batch} x {sequence} tokens", partial(plan, shape, hardware, more, content)
    many = load._replace(accumulation=load.accumulation * 4)
    yield f"{many.accumulation} micro-batches a step", lambda: plan(shape, hardware, many, content)
    if load.recompute:
        yield "no recomputation", lambda: plan(shape, hardware, load._replace(recompute=False), content)
    if hardware.drives and planned.memory.slots:
        one = hardware.drives[0]
        wider = replace(hardware, drives=(*hardware.drives, one._replace(name="one more")))
        yield "one more drive like the first", lambda: plan(shape, wider, load, content)
    if planned.memory.slots == 2:
        block = {**content.get("offload", {}), "durability": "none"}
        yield (
            "durability none: no resume after a kill",
            lambda: plan(shape, hardware, load, {**content, "offload": block}),
        )
    double = replace(hardware, ram=2 * hardware.ram)
    if planned.memory.slots:
        yield f"{format_size(double.ram)} of RAM", lambda: with_host_budget(plan(shape, double, load, content))
