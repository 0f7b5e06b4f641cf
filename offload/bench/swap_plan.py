"""What `offload bench swap` shall measure, checked before anything is touched."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil

from offload.aio import BACKENDS
from offload.aio.backend import refusals
from offload.errors import ConfigError
from offload.sizes import MIB, PAGE, align_up, format_size

TIERS = ("none", "cpu", "nvme")
DURABILITIES = ("auto", "step", "none")
BACKWARD = 2
"""Times of a forward."""

_WEIGHT, _STATES = 2, 10
"""Bytes of a parameter: bf16, and beside it 16 more bits of the master and two moments."""
_TILES = 96 * MIB
_DEVICE_UNITS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to measure."""

    folders: tuple[str, ...]
    units: int
    unit_bytes: int
    compute_ms: tuple[float, ...]
    """Of one unit's forward; each is measured."""
    steps: int
    rounds: int
    accumulation: int
    weights: str
    states: str
    durability: str
    host_memory: int | None
    device_memory: int | None
    overlap: bool
    busy: bool
    in_memory: bool
    """Whether compute is measured in memory, or added up."""
    backend: str
    block_bytes: int | None
    depth: int | None
    probe_bytes: int

    @property
    def unit_numel(self) -> int:
        return self.unit_bytes // _WEIGHT

    @property
    def parameters(self) -> int:
        return self.units * self.unit_numel

    @property
    def update_read_bytes(self) -> int:
        """The most that the updates of a step read; what is read beside are weights for compute."""
        return self.parameters * (_WEIGHT * (self.weights == "nvme") + _STATES * (self.states == "nvme"))

    def forward_seconds(self, compute_ms: float) -> float:
        """Of the first micro-batch."""
        return self.units * compute_ms / 1e3

    def pure_seconds(self, compute_ms: float) -> float:
        """What a step computes, forwards and backwards of all micro-batches, without the optimizer."""
        return self.forward_seconds(compute_ms) * (1 + BACKWARD) * self.accumulation


def make_plan(
    folders: Sequence[str],
    *,
    units: int = 16,
    unit_bytes: int = 64 * MIB,
    compute_ms: Sequence[float] = (),
    steps: int = 4,
    rounds: int = 3,
    accumulation: int = 1,
    weights: str = "nvme",
    states: str = "nvme",
    durability: str = "auto",
    host_memory: int | None = None,
    device_memory: int | None = None,
    overlap: bool = True,
    busy: bool = False,
    in_memory: bool | None = None,
    backend: str = "auto",
    block_bytes: int | None = None,
    depth: int | None = None,
    probe_bytes: int = 256 * MIB,
) -> Plan:
    """Check everything before a file is made or memory taken; `ConfigError` where something is wrong.

    `in_memory` None measures compute in memory where there is room for it.
    """
    plan = Plan(
        folders=tuple(folders),
        units=units,
        unit_bytes=unit_bytes // PAGE * PAGE,
        compute_ms=tuple(dict.fromkeys(compute_ms or (50.0,))),
        steps=steps,
        rounds=rounds,
        accumulation=accumulation,
        weights=weights,
        states=states,
        durability=durability,
        host_memory=host_memory,
        device_memory=device_memory,
        overlap=overlap,
        busy=busy,
        in_memory=True,
        backend=backend,
        block_bytes=block_bytes,
        depth=depth,
        probe_bytes=align_up(probe_bytes),
    )
    _check_numbers(plan, unit_bytes, probe_bytes)
    _check_words(plan)
    _check_room(plan)
    return replace(plan, in_memory=_fits_in_memory(plan, in_memory))


def _check_numbers(plan: Plan, unit_bytes: int, probe_bytes: int) -> None:
    for name in ("units", "steps", "rounds", "accumulation"):
        if getattr(plan, name) < 1:
            raise ConfigError(f"expected {name} >= 1, got {getattr(plan, name)}")
    for each in plan.compute_ms:
        if not 0 <= each <= 1e6:
            raise ConfigError(f"expected compute-ms from 0 to 1000000, got {each:g}")
    for name, nbytes in (("unit-size", unit_bytes), ("probe-size", probe_bytes)):
        if nbytes < PAGE:
            raise ConfigError(f"expected {name} of at least {PAGE} bytes, got {nbytes}")


def _check_words(plan: Plan) -> None:
    known = {"weights": TIERS, "states": TIERS, "durability": DURABILITIES, "backend": ("auto", *BACKENDS)}
    for name, words in known.items():
        if getattr(plan, name) not in words:
            raise ConfigError(f"there is no {name} {getattr(plan, name)!r}: expected {', '.join(words)}")
    refused = refusals().get(plan.backend)
    if refused:
        raise ConfigError(f"{refused}; take another backend")
    if "nvme" not in (plan.weights, plan.states) and plan.durability != "step":
        raise ConfigError(
            "nothing would be swapped: give --weights nvme, --states nvme, or --durability step, which writes a "
            "copy of all states each step"
        )


def _check_room(plan: Plan) -> None:
    if not plan.folders:
        raise ConfigError("give at least one folder, on the drive to measure")
    two_slots, in_place = 2 * (_WEIGHT + _STATES) * plan.parameters, plan.update_read_bytes
    need = two_slots if plan.durability == "step" else in_place
    share = -(-(need + plan.probe_bytes) // len(plan.folders))
    asked: dict[int, int] = {}
    for folder in plan.folders:
        if not os.path.isdir(folder):
            raise ConfigError(f"there is no folder {folder}")
        device = os.stat(folder).st_dev
        asked[device] = asked.get(device, 0) + share
        free = shutil.disk_usage(folder).free
        if free < asked[device]:
            raise ConfigError(
                f"{folder} has {format_size(free)} free, the files take {format_size(asked[device])}: give fewer "
                f"--units or a smaller --unit-size"
            )


def _fits_in_memory(plan: Plan, wanted: bool | None) -> bool:
    """Whether the same model has room in memory beside the one that is swapped; `ConfigError` where neither has."""
    available = psutil.virtual_memory().available
    gradients = plan.parameters * (2 if plan.accumulation == 1 else 4)
    in_tier = {
        tier: (_WEIGHT * (plan.weights == tier) + _STATES * (plan.states == tier)) * plan.parameters for tier in TIERS
    }
    host = plan.host_memory or gradients + in_tier["cpu"] + _TILES + 2 * plan.unit_bytes
    budgets = host + (plan.device_memory or in_tier["none"] + _DEVICE_UNITS * plan.unit_bytes)
    working = plan.probe_bytes + 6 * plan.unit_bytes  # the drive's probe, a gradient, weights while they are made
    beside = (_WEIGHT + _STATES) * plan.parameters + gradients + _TILES
    if available < budgets + working:
        raise ConfigError(
            f"{format_size(available)} of memory are free, budgets and gradients take "
            f"{format_size(budgets + working)}: give fewer --units, a smaller --unit-size or smaller budgets"
        )
    if wanted and available < budgets + working + beside:
        raise ConfigError(
            f"{format_size(available)} of memory are free, the model beside its copy in memory takes "
            f"{format_size(budgets + working + beside)}: leave --in-memory out, and compute is added up"
        )
    return available >= (budgets + working + beside) * 1.1 if wanted is None else wanted
