"""Choice of tiers and host budget if the user names none, and advice on what to change.

Every candidate is tried by a prediction of its own.
"""

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

PLACEMENTS = (("none", "none"), ("none", "cpu"), ("cpu", "cpu"), ("nvme", "nvme"))
"""Devices of weights and of optimizer states; the fastest first, if all fit."""

_HOST_SHARE = 0.8
"""Fraction of the RAM beside the process's own needs that a recommended host budget may take."""
_WORTH = 1.03
"""Speed-up that a larger host budget must bring over a smaller one."""
_GAIN = 1.05
"""Speed-up from which a change is reported."""


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
        """Returns the bytes of a micro-batch's activations."""
        return activations(self.shape, self.load)

    @property
    def host_peak(self) -> int:
        """Returns the peak bytes of RAM beyond those in use before the run."""
        return host_peak(self.memory, self.shape, self.hardware, self.load)


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
    """Tokens per second with the change, divided by those without it."""


def plan(shape: Shape, hardware: Hardware, load: Load, content: Mapping[str, Any]) -> Planned:
    """Returns the plan of a config.

    Args:
        shape: the model.
        hardware: the machine.
        load: micro-batch, accumulation and recomputation of a step.
        content: a config in DeepSpeed's form.

    Raises:
        ConfigError: the config is wrong, or needs a drive that the machine does not have.
        BudgetError: a budget is too small, or the activations do not fit.
    """
    memory = settle(shape.layouts, content, _room(hardware), load.accumulation)
    if not hardware.drives and (memory.slots or memory.spilled):
        raise ConfigError("this machine has no drive, and the config needs one; give --drive or --nvme-path")
    # Activations are checked before the arena grows, which takes only memory that they leave free.
    _check_activations(shape, hardware, load, memory)
    memory = _grown(memory, shape, hardware, load)
    return Planned(shape, hardware, load, content, memory, predict(memory, shape, hardware, load))


def _grown(memory: Memory, shape: Shape, hardware: Hardware, load: Load) -> Memory:
    """Returns `memory` with the device arena as it is after the first step, which grows the arena into free memory."""
    if hardware.on_cpu:
        return memory
    kept = beside_weights(memory, shape, load)
    room = DeviceRoom(_for_device(hardware, memory) - memory.device - kept, kept)
    more = growth(memory.device, memory.placement.device_need, room)
    return replace(memory, placement=memory.placement.grown(more))


def _check_activations(shape: Shape, hardware: Hardware, load: Load, memory: Memory) -> None:
    """Raises `BudgetError` if the activations have no room beside the budgets."""
    need = activations(shape, load)
    if hardware.on_cpu:
        have = hardware.ram - memory.host - memory.device
    else:
        have = _for_device(hardware, memory) - memory.device - (beside_weights(memory, shape, load) - need)
    if need > have:
        raise _too_long(shape, load, have)


def _for_device(hardware: Hardware, memory: Memory) -> int:
    """Returns the bytes that the GPU may take; of a memory that it shares, those that the host arena leaves."""
    return hardware.gpu_memory - memory.host if hardware.unified else hardware.gpu_memory


def _too_long(shape: Shape, load: Load, have: int) -> BudgetError:
    """Returns the error for activations that exceed `have` bytes, with the largest micro-batch that fits."""
    most = max(have, 0) // activations(shape, load._replace(batch=1))
    advice = f"--batch-size {most} fits" if most else "not even one sequence fits: lower --seq-len"
    if not load.recompute:
        advice += ", or recompute them in backward (--gradient-checkpointing)"
    return BudgetError(
        f"activations of {load.batch} x {shape.sequence} tokens take {format_size(activations(shape, load))}, and "
        f"{format_size(max(have, 0))} is free beside the budgets; {advice}"
    )


def _room(hardware: Hardware) -> Room:
    """Returns the machine's room for a run; disk space is unknown if that of one drive is."""
    disk = None if any(drive.free is None for drive in hardware.drives) else sum(d.free or 0 for d in hardware.drives)
    return Room(hardware.ram, hardware.gpu_memory, disk, max(len(hardware.drives), 1))


def with_host_budget(planned: Planned) -> Planned:
    """Returns the plan with the recommended host budget.

    Budgets are tried from the smallest up. A larger one replaces the best so far only if a step is faster by `_WORTH`.
    """
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
    """Yields host budgets in bytes, ascending: room for all weights, for half of the other states too, and for all.

    Budgets beyond the RAM are left out; if there are any, the largest budget that the RAM allows comes last.
    """
    memory, hardware = planned.memory, planned.hardware
    most = int(_HOST_SHARE * (hardware.ram - (planned.host_peak - memory.host)))
    weights = memory.nbytes_on_disk(State.WEIGHT)
    states = memory.nbytes_on_disk(*(state for state in memory.mode.states if state is not State.WEIGHT))
    for more in dict.fromkeys((weights, weights + states // 2, weights + states)):
        budget = (memory.host + more) // PAGE * PAGE
        # A budget that the plan has already, or that the RAM has no room for, is not tried.
        if more and memory.host < budget <= most:
            yield budget
    if memory.host < most < memory.host + weights + states:
        yield most // PAGE * PAGE


def recommended_host(planned: Planned) -> int:
    """Returns the bytes of the recommended host budget, regardless of the budget in the config."""
    content = copy.deepcopy(dict(planned.content))
    content.get("offload", {}).pop("host_memory", None)
    try:
        base = plan(planned.shape, planned.hardware, planned.load, content)
    except BudgetError:
        return planned.memory.host
    return with_host_budget(base).memory.host


def choose(shape: Shape, hardware: Hardware, load: Load, recompute: bool | None, **options: Any) -> Planned:
    """Returns the plan with the fastest tiers that fit and the recommended host budget.

    Args:
        shape: the model.
        hardware: the machine.
        load: micro-batch and accumulation of a step.
        recompute: True or False to fix recomputation of activations; None to try both and to prefer none.
        options: keyword arguments of `memory.settings`, such as `durability` and `dtype`.

    Raises:
        ConfigError: nothing fits; the error is that of the candidate that takes the least memory.
        BudgetError: likewise.
    """
    error: Exception | None = None
    found: list[Planned] = []
    # Without recomputation first: if both are about as fast, the simpler run is chosen.
    for again in (False, True) if recompute is None else (recompute,):
        if not hardware.on_cpu and activations(shape, load._replace(recompute=again)) > hardware.gpu_memory:
            error = error or _too_long(shape, load._replace(recompute=again), hardware.gpu_memory)
            continue
        for weights, states in PLACEMENTS:
            # Without drives these tiers cannot exist; the next candidate is tried.
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
    # Candidates that move the least come first in `found`: the first one near the best is preferred to a marginally
    # faster one.
    best = max(each.timing.tokens_per_second for each in found)
    return next(each for each in found if each.timing.tokens_per_second * _WORTH >= best)


def _fitting(shape: Shape, hardware: Hardware, load: Load, content: dict[str, Any], tiers: tuple[str, str]) -> Planned:
    """Returns the plan with the default device budget, or with a smaller one if the activations need the room.

    Args:
        shape: the model.
        hardware: the machine.
        load: work of a step.
        content: the candidate's config; a smaller device budget is written into it.
        tiers: devices of weights and of optimizer states in `content`.
    """
    try:
        planned = plan(shape, hardware, load, content)
    except BudgetError:
        if hardware.on_cpu or "nvme" not in tiers:
            raise
        memory = settle(shape.layouts, content, _room(hardware))
        room = _for_device(hardware, memory) - beside_weights(memory, shape, load)
        content["offload"]["device_memory"] = max(room // PAGE * PAGE, 0)
        planned = plan(shape, hardware, load, content)
    _check_moved(planned, tiers)
    return with_host_budget(planned) if "nvme" in tiers else planned


def _check_moved(planned: Planned, tiers: tuple[str, str]) -> None:
    """Raises `BudgetError` if states that should stay in memory are placed on DISK, as in another candidate."""
    if "nvme" not in tiers and planned.memory.placement.on_disk:
        raise BudgetError(f"the host budget has no room for {' and '.join(dict.fromkeys(tiers))}")


# -- advice -------------------------------------------------------------------------------------------


def advise(planned: Planned) -> Advice:
    """Returns the changes that are predicted to make the run faster, and the recommended host budget."""
    found: list[Change] = []
    for words, act in _ideas(planned):
        try:
            other = act()
        except (BudgetError, ConfigError):
            continue
        # Tokens per second, not seconds: some changes alter the number of tokens in a step.
        gain = other.timing.tokens_per_second / planned.timing.tokens_per_second
        if gain >= _GAIN:
            found.append(Change(words, other.timing.seconds, gain))
    return Advice(tuple(sorted(found, key=lambda change: -change.gain)), recommended_host(planned))


def _ideas(planned: Planned) -> Iterator[tuple[str, Callable[[], Planned]]]:
    """Yields candidate changes: a description, and a function that predicts the changed run."""
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
        # Files are spread evenly over all drives, so one more drive speeds up reads and writes.
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
