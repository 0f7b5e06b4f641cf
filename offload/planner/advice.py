"""Advice on a plan: what to change, the host budget that pays, and the step in each order of micro-batches.

Every change and every order is tried by a prediction of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from offload.errors import BudgetError, ConfigError
from offload.layout.pass_order import LAYER_MAJOR, MICRO_BATCH_MAJOR
from offload.planner.recommend import Planned, plan, with_host_budget
from offload.sizes import format_size
from offload.states import State

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
    """Tokens per second with the change, divided by those without it."""
    option: str = ""
    """The option of `offload plan` that makes the change; empty for a change of the machine."""

    @property
    def sentence(self) -> str:
        """Returns the change, its option and its gain."""
        option = f" ({self.option})" if self.option else ""
        return f"{self.words}{option}: {self.gain:.2f} times the tokens a second"


class Ordered(NamedTuple):
    """A step in one order."""

    schedule: str
    speculate: bool
    """True if units are updated under the backward."""
    planned: Planned | None
    """The plan of the step; None if its activations do not fit."""


def advise(planned: Planned) -> Advice:
    """Returns the changes that are predicted to make the run faster, and the recommended host budget."""
    found: list[Change] = []
    for words, option, act in _ideas(planned):
        try:
            other = act()
        except (BudgetError, ConfigError):
            continue
        # Tokens per second, not seconds: some changes alter the number of tokens in a step.
        gain = other.timing.tokens_per_second / planned.timing.tokens_per_second
        if gain >= _GAIN:
            found.append(Change(words, other.timing.seconds, gain, option))
    return Advice(tuple(sorted(found, key=lambda change: -change.gain)), recommended_host(planned))


def _ideas(planned: Planned) -> Iterator[tuple[str, str, Callable[[], Planned]]]:
    """Yields candidate changes: a description, the option, and a function that predicts the changed run."""
    shape, hardware, load, content = planned.shape, planned.hardware, planned.given, planned.content
    sequence = shape.sequence
    for times in (2, 4):
        more = load._replace(batch=load.batch * times)
        words, option = f"micro-batches of {more.batch} x {sequence} tokens", f"--batch-size {more.batch}"
        yield words, option, partial(plan, shape, hardware, more, content)
    many = load._replace(accumulation=load.accumulation * 4)
    words, option = f"{many.accumulation} micro-batches a step", f"--accumulation {many.accumulation}"
    yield words, option, lambda: plan(shape, hardware, many, content)
    if planned.load.recompute:
        kept = {
            **content,
            "offload": {**content.get("offload", {}), "activations": None},
            "activation_checkpointing": {},
        }
        words, option = "no recomputation", "--no-gradient-checkpointing"
        yield words, option, lambda: plan(shape, hardware, load._replace(recompute=False), kept)
    if hardware.drives and planned.memory.slots:
        one = hardware.drives[0]
        # Files are spread evenly over all drives, so one more drive speeds up reads and writes.
        wider = replace(hardware, drives=(*hardware.drives, one._replace(name="one more")))
        yield "one more drive like the first", "", lambda: plan(shape, wider, load, content)
    if planned.memory.slots == 2:
        block = {**content.get("offload", {}), "durability": "none"}
        yield (
            "no resume after a kill",
            "--durability none",
            lambda: plan(shape, hardware, load, {**content, "offload": block}),
        )
    mode = planned.memory.mode
    narrower = {torch.float32: ("bf16", "int8"), torch.bfloat16: ("int8",)}.get(mode.moment_dtype, ())
    for form in narrower if planned.memory.slots and mode.moments and State.PACKED not in mode.moments else ():
        fewer = {**content, "offload": {**content.get("offload", {}), "moments": form}}
        yield f"moments in {form}", f"--moments {form}", partial(plan, shape, hardware, load, fewer)
    if planned.memory.slots and State.MASTER_LOW_BITS in mode.weights and mode.master == "fp32":
        fewer = {**content, "offload": {**content.get("offload", {}), "master": "bf24"}}
        yield "masters in bf24", "--master bf24", partial(plan, shape, hardware, load, fewer)
    double = replace(hardware, ram=2 * hardware.ram)
    if planned.memory.slots:
        yield f"{format_size(double.ram)} of free RAM", "", lambda: with_host_budget(plan(shape, double, load, content))


def recommended_host(planned: Planned) -> int:
    """Returns the bytes of the recommended host budget, regardless of the budget in the config."""
    content = copy.deepcopy(dict(planned.content))
    for name in ("host_memory", "activation_memory"):
        content.get("offload", {}).pop(name, None)
    try:
        base = plan(planned.shape, planned.hardware, planned.given, content)
    except BudgetError:
        return planned.memory.host
    return with_host_budget(base).memory.host


def compare(planned: Planned) -> list[Ordered]:
    """Returns the plan's step in each order that its model allows, the oldest one first.

    A step that moves nothing, or has one micro-batch, has fewer orders; a single one is no comparison, and left out.
    """
    found = [
        Ordered(schedule, speculate, _plan(planned, schedule, speculate))
        for schedule in (MICRO_BATCH_MAJOR, LAYER_MAJOR)
        for speculate in (False, True)
    ]
    shown = [each for each in found if each.planned is None or _differs(each, each.planned)]
    return shown if len(shown) > 1 else []


def _differs(each: Ordered, planned: Planned) -> bool:
    """Returns True if a step has the order that it was asked for, and one that no other step of the table has."""
    # A model that is no chain has one order. Without a unit that can be updated early both steps are the same.
    return planned.load.schedule == each.schedule and bool(not each.speculate or planned.timing.simulation.speculated)


def _plan(planned: Planned, schedule: str, speculate: bool) -> Planned | None:
    """Returns the plan with another order; None if its activations do not fit."""
    load = planned.given._replace(schedule=schedule, speculate=speculate)
    try:
        return plan(planned.shape, planned.hardware, load, planned.content)
    except BudgetError:
        return None
