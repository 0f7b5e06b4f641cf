"""The plan of `offload bench swap`, validated before any file is created."""

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
"""Compute time of a backward as a multiple of the forward's."""

_WEIGHT, _STATES = 2, 10
"""Bytes of a parameter's bf16 weight; and of its other states: 16 low bits of the master and two fp32 moments."""
# For the estimate of memory: host memory of the engine's tiles, and units for which the device arena has room.
_TILES = 96 * MIB
_DEVICE_UNITS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The settings of a measurement."""

    folders: tuple[str, ...]
    units: int
    unit_bytes: int
    compute_ms: tuple[float, ...]
    """Simulated compute times of one unit's forward, in milliseconds; the benchmark runs with each."""
    steps: int
    """Timed steps of a turn, without the steps at its start that are not timed."""
    rounds: int
    """Turns of each of the drive by itself, the swapped model and the model in memory."""
    accumulation: int
    """Micro-batches of a step."""
    weights: str
    states: str
    """Tier of the optimizer states, one of `TIERS`; `weights` is the tier of the weights."""
    durability: str
    host_memory: int | None
    device_memory: int | None
    """Device budget in bytes; `host_memory` is the host budget. None for the engine's defaults."""
    overlap: bool
    """True if updates run during the next forward."""
    busy: bool
    """True if compute keeps a core busy instead of sleeping."""
    in_memory: bool
    """True if the compute time is measured with the same model in memory; False if it is calculated."""
    backend: str
    block_bytes: int | None
    depth: int | None
    """I/O blocks in flight. None stands for the backend's default, here and for `block_bytes`."""
    probe_bytes: int

    @property
    def unit_numel(self) -> int:
        """Returns the number of parameters of a unit."""
        return self.unit_bytes // _WEIGHT

    @property
    def parameters(self) -> int:
        """Returns the number of parameters of the model."""
        return self.units * self.unit_numel

    @property
    def update_read_bytes(self) -> int:
        """Returns the bytes that the updates of a step read at most. A step's other reads are weights for compute."""
        return self.parameters * (_WEIGHT * (self.weights == "nvme") + _STATES * (self.states == "nvme"))

    def forward_seconds(self, compute_ms: float) -> float:
        """Returns the compute time of the first micro-batch's forward."""
        return self.units * compute_ms / 1e3

    def pure_seconds(self, compute_ms: float) -> float:
        """Returns the compute time of a step: forwards and backwards of all micro-batches, without the optimizer."""
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
    """Returns the plan of the settings, named as in `Plan`, and validates it; creates no file, allocates no memory.

    Args:
        folders: folders on the drives to measure.
        unit_bytes: bytes of a unit's weights, rounded down to pages.
        compute_ms: simulated compute times of one unit's forward, in milliseconds; empty for 50.
        in_memory: True to measure the compute time with the same model in memory, False to calculate it; None to
            measure it if memory suffices.
        probe_bytes: bytes of the file that measures the drive, rounded up to pages.

    Raises:
        ConfigError: a setting is out of range, or memory or the drive is too small.
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
    _check_choices(plan)
    _check_room(plan)
    # Last: the estimate of memory needs valid settings.
    return replace(plan, in_memory=_fits_in_memory(plan, in_memory))


def _check_numbers(plan: Plan, unit_bytes: int, probe_bytes: int) -> None:
    """Raises `ConfigError` if a number is out of range."""
    for name in ("units", "steps", "rounds", "accumulation"):
        if getattr(plan, name) < 1:
            raise ConfigError(f"expected {name} >= 1, got {getattr(plan, name)}")
    for each in plan.compute_ms:
        if not 0 <= each <= 1e6:
            raise ConfigError(f"expected compute-ms from 0 to 1000000, got {each:g}")
    for name, nbytes in (("unit-size", unit_bytes), ("probe-size", probe_bytes)):
        if nbytes < PAGE:
            raise ConfigError(f"expected {name} of at least {PAGE} bytes, got {nbytes}")


def _check_choices(plan: Plan) -> None:
    """Raises `ConfigError` if a choice is unknown, the backend is refused, or nothing would be swapped."""
    known = {"weights": TIERS, "states": TIERS, "durability": DURABILITIES, "backend": ("auto", *BACKENDS)}
    for name, choices in known.items():
        if getattr(plan, name) not in choices:
            raise ConfigError(f"there is no {name} {getattr(plan, name)!r}: expected {', '.join(choices)}")
    refused = refusals().get(plan.backend)
    if refused:
        raise ConfigError(f"{refused}; take another backend")
    if "nvme" not in (plan.weights, plan.states) and plan.durability != "step":
        raise ConfigError(
            "nothing would be swapped: give --weights nvme, --states nvme, or --durability step, which writes a "
            "copy of all states each step"
        )


def _check_room(plan: Plan) -> None:
    """Raises `ConfigError` if a folder is missing or its drive has too little free space."""
    if not plan.folders:
        raise ConfigError("give at least one folder, on the drive to measure")
    two_slots, in_place = 2 * (_WEIGHT + _STATES) * plan.parameters, plan.update_read_bytes
    # A durable run keeps two slots of every state; otherwise states are overwritten in place.
    need = two_slots if plan.durability == "step" else in_place
    share = -(-(need + plan.probe_bytes) // len(plan.folders))
    asked: dict[int, int] = {}
    for folder in plan.folders:
        if not os.path.isdir(folder):
            raise ConfigError(f"there is no folder {folder}")
        # Folders of one file system share its free space, so their needs add up.
        device = os.stat(folder).st_dev
        asked[device] = asked.get(device, 0) + share
        free = shutil.disk_usage(folder).free
        if free < asked[device]:
            raise ConfigError(
                f"{folder} has {format_size(free)} free, the files take {format_size(asked[device])}: give fewer "
                f"--units or a smaller --unit-size"
            )


def _fits_in_memory(plan: Plan, wanted: bool | None) -> bool:
    """Returns `wanted` or, if that is None, True if memory has room for the same model beside the swapped one.

    Raises `ConfigError` if the swapped model alone does not fit, or the second one does not although it is requested.
    """
    available = psutil.virtual_memory().available
    # Gradients are bf16, or fp32 if they are accumulated over micro-batches.
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
            f"{format_size(budgets + working + beside)}: leave --in-memory out, and compute is calculated"
        )
    # A margin of 10 %, since other processes allocate too; an explicit request needs no margin.
    return available >= (budgets + working + beside) * 1.1 if wanted is None else wanted
