"""Bytes of a run in every tier.

A run and its plan use the same functions and the same config. So a run that finds as much free memory and disk as the
plan assumed uses exactly the planned bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from offload.config import Config, load_config
from offload.errors import ConfigError
from offload.layout.drive_budget import LONGEST, DriveBudget, Written
from offload.layout.flat_layout import UnitLayout, laid_out_for
from offload.layout.memory_plan import (
    MemoryPlan,
    MemoryRequest,
    mode_of,
    place_states,
    plan_memory,
    rule_name,
    wanted_slots,
    with_shadows,
)
from offload.layout.modes import ADAM, TORCH, Mode
from offload.layout.optimizer_states import for_rule, with_states_of_torch
from offload.layout.pass_order import makes_early_updates
from offload.layout.placement import MachineMemory, least_host
from offload.layout.tiers import tier_nbytes
from offload.sizes import align_up
from offload.states import State, Tier
from offload.swapper.store.model_files import FileRange, InPlaceLayout
from offload.swapper.table import UploadPiece

PATH = "/mnt/nvme"
"""Folder for swap files in the config of a described machine."""


class Room(NamedTuple):
    """Free memory and disk for a run, in bytes."""

    host: int
    device: int
    """0 if the CPU computes."""
    disk: int | None
    """None if unknown."""
    drives: int = 1
    unified: bool = False
    """True if device memory is host memory, although a GPU computes."""


class MemoryRow(NamedTuple):
    """One line of the plan's table: bytes of one item in each tier."""

    name: str
    device: int = 0
    host: int = 0
    disk: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory(MemoryPlan):
    """The plan of a run's memory, with its bytes in each tier, except activations and libraries."""

    early: frozenset[int]
    """The `early_units` of the run, which decides them before `timed` knows how often a drive budget lets it commit."""

    @property
    def config(self) -> Config:
        return self.request.config

    @property
    def budget(self) -> DriveBudget | None:
        text = self.config.offload.drive_budget
        return None if text is None else DriveBudget.of(text)

    @property
    def written(self) -> Written:
        """The bytes that a step and a commit write to each drive."""
        drives = max(len(self.config.drives), 1)
        return Written(
            *(nbytes / drives for nbytes in self.placement.written(self.parts, self.slots, self.commit_every))
        )

    @property
    def least_host(self) -> int:
        """Returns the bytes of the smallest host budget that works."""
        return sum(least_host(self.parts, self.mode, self.asked, self.request.machine))

    @property
    def rows(self) -> tuple[MemoryRow, ...]:
        """Returns one row per state, with its tier and its swap files, then one per kind of working memory."""
        return (*_states(self), *_working(self))

    @property
    def total(self) -> MemoryRow:
        rows = self.rows
        return MemoryRow("all", *(sum(column) for column in zip(*(row[1:] for row in rows), strict=True)))

    @property
    def host(self) -> int:
        """Returns the bytes of the host arena."""
        # The classes divide the arena completely.
        return sum(self.placement.classes)

    @property
    def device(self) -> int:
        """Returns the bytes of the device arena."""
        return self.placement.device_nbytes

    def nbytes_on_disk(self, *states: State) -> int:
        """Returns the bytes of these states whose tier is DISK, counted for one slot."""
        return sum(
            nbytes
            for row, tiers in zip(self.parts.nbytes, self.placement.tiers, strict=True)
            for state, nbytes in row.items()
            if state in states and tiers[state] is Tier.DISK
        )

    @property
    def stored(self) -> int:
        """Returns the bytes of the states file, on all drives together."""
        return self.placement.store(self.parts, self.slots, self.shadowed).nbytes

    @property
    def spilled(self) -> int:
        """Returns the bytes of the files to which gradients spill."""
        return sum(align_up(self.parts.nbytes[unit][State.GRAD]) for unit in self.placement.spilled)

    @property
    def export(self) -> int:
        """Returns the additional bytes on disk of exported weights."""
        return sum(
            segment.value_numel * layout.mode_in(self.mode).weight_dtype.itemsize
            for layout in self.request.layouts
            for segment in layout.segments
        )


def settle(
    layouts: Sequence[UnitLayout],
    content: Mapping[str, Any],
    room: Room,
    accumulation: int = 1,
    world_size: int = 1,
    matrices: Collection[str] = (),
    speculate: bool | None = None,
    in_turns: bool = False,
    replicas: int = 1,
) -> Memory:
    """Returns the memory of a run on the first rank, by the same decisions as `initialize`.

    `speculate` says whether updates may begin under the backward; None for the config's answer. `in_turns` is True if
    the micro-batches of a step take turns at a block. Each of the `replicas` is divided into `world_size` shards.
    """
    config = load_config(content)
    # Without an optimizer in the config the caller passes one to `initialize`; Adam is assumed.
    rule = ADAM if config.optimizer is None else rule_name(config.optimizer)
    if rule == TORCH and config.optimizer is not None:
        arguments = config.optimizer.settings
        layouts = with_states_of_torch(layouts, config.optimizer.type, arguments, world_size)
    layouts = for_rule(layouts, rule, matrices, world_size)
    layouts = laid_out_for(layouts, mode_of(config, rule), world_size)
    # `initialize` builds the same `MachineMemory` from the real machine, so that both decide alike.
    machine = MachineMemory(
        free_host=room.host,
        free_device=room.device,
        host_addressable=room.device == 0,
        drives=bool(config.drives),
        device_kernels=room.device > 0,
        unified=room.unified,
    )
    early = makes_early_updates(config.offload.speculate, room.device == 0) if speculate is None else speculate
    placed = place_states(
        MemoryRequest(
            config=config,
            layouts=layouts,
            optimizer=rule,
            accumulation=accumulation,
            machine=machine,
            world_size=world_size,
            replicas=replicas,
            speculate=early,
            in_turns=in_turns,
            in_place_layouts=_in_place_layouts(layouts, mode_of(config, rule)),
        )
    )
    # The steps below are those of `initialize`, in the same order.
    slots, may_fall_back = wanted_slots(placed, on_disk=placed.placement.on_disk)
    plan = plan_memory(placed, slots, _no_room(placed, room, may_fall_back) if slots == 2 else None)
    short = room.disk is not None and room.disk < plan.shadows_need
    plan = with_shadows(plan, room.disk if short else None)
    memory = Memory(**{field.name: getattr(plan, field.name) for field in fields(plan)}, early=plan.early_units)
    # Until `timed` knows, a drive budget allows the fewest commits.
    thinned = config.offload.thins_commits and plan.commit_every > 1
    return replace(memory, commit_every=int(LONGEST)) if thinned else memory


def _in_place_layouts(layouts: Sequence[UnitLayout], mode: Mode) -> tuple[InPlaceLayout | None, ...]:
    """Returns the place of each unit in the model's own files, as if its tensors came one after the other in one file.

    A page more than they need is read: tensors begin anywhere in a page.
    """
    layouts_in_place: list[InPlaceLayout | None] = []
    for layout in layouts:
        itemsize, at, pieces = layout.mode_in(mode).weight_dtype.itemsize, 1, list[UploadPiece]()
        for segment in layout.segments if layout.in_files else ():
            target = range(segment.start * itemsize, (segment.start + segment.numel) * itemsize)
            pieces.append(UploadPiece(at, target))
            at += len(target)
        layouts_in_place.append(InPlaceLayout((FileRange("", 0, align_up(at)),), tuple(pieces)) if pieces else None)
    return tuple(layouts_in_place) if any(layouts_in_place) else ()


def _no_room(placed: MemoryPlan, room: Room, may_fall_back: bool) -> str | None:
    """Returns a notice if the disk has no room for two slots, else None.

    Raises:
        ConfigError: the config demands two slots.
    """
    if room.disk is None or placed.two_slots_nbytes <= room.disk:
        return None
    if not may_fall_back:
        raise ConfigError(
            f'"durability" needs {placed.two_slots_nbytes} bytes of disk for two slots, {room.disk} are free; give '
            f'more drives, or set "durability": "none"'
        )
    return "durability none: the drives have no room for two slots"


def settings(
    weights: str = "nvme",
    states: str = "nvme",
    *,
    dtype: str = "bf16",
    host_memory: int | None = None,
    device_memory: int | None = None,
    durability: Any = "auto",
    drive_budget: str | None = None,
    batch: int = 1,
    accumulation: int = 1,
    paths: Sequence[str] = (PATH,),
    activations: str | None = None,
    tile_mlp: int | str | None = None,
    frozen: str | None = None,
    moments: str | None = None,
    master: str | None = None,
) -> dict[str, Any]:
    """Returns a config in DeepSpeed's form, with AdamW.

    Arguments that are None keep the config's default. The config names folders only if something may need them.
    """
    block: dict[str, Any] = {"durability": durability}
    # Without paths there is no store, and with "auto" nothing is durable.
    if "nvme" in (weights, states) or durability == "step" or isinstance(durability, dict):
        block["nvme_path"] = list(paths)
    elif activations in ("nvme", "auto") and paths:
        block["nvme_path"] = list(paths)
        block["durability"] = "none" if durability == "auto" else durability
    given = {
        "host_memory": host_memory,
        "device_memory": device_memory,
        "moments": moments,
        "master": master,
        "activations": activations,
        "drive_budget": drive_budget,
        "tile_mlp": tile_mlp,
        "frozen": frozen,
    }
    block |= {name: value for name, value in given.items() if value is not None}
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": accumulation,
        **({dtype: {"enabled": True}} if dtype != "fp32" else {}),
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": weights},
            "offload_optimizer": {"device": states},
        },
        "offload": block,
    }


def _states(memory: Memory) -> list[MemoryRow]:
    parts, placement = memory.parts, memory.placement
    store = placement.store(parts, memory.slots, memory.shadowed)
    rows = []
    for state in State:
        at = dict.fromkeys(Tier, 0)
        # Totals of gradient accumulation stay on the device until the last micro-batch, in addition to GRAD's own tier.
        if state is State.GRAD:
            at[Tier.DEVICE] = sum(nbytes for _, nbytes in placement.added)
        for nbytes, tiers in zip(parts.nbytes, placement.tiers, strict=True):
            if state in nbytes and (state is State.GRAD or tiers[state] is not Tier.DISK):
                at[tiers[state]] += align_up(nbytes[state])
        # If the run commits, slots on DISK exist for states of every tier.
        at[Tier.DISK] += store.nbytes_of(state)
        if any(at.values()):
            rows.append(MemoryRow(state.value, at[Tier.DEVICE], at[Tier.HOST], at[Tier.DISK]))
    return rows


def _working(memory: Memory) -> list[MemoryRow]:
    classes, placement, parts = memory.placement.classes, memory.placement, memory.parts
    promoted = parts.pages_nbytes(placement.promoted)
    rows = [
        MemoryRow("tiles of the optimizer", host=classes.tiles),
        MemoryRow("weights on their way", host=classes.weights),
        MemoryRow("weights kept (cache)", host=classes.cache - promoted),
        MemoryRow("gradients on their way", host=classes.gradients + classes.staging),
        # States whose tier is DEVICE have rows of their own.
        MemoryRow("layers in use", device=placement.moving_nbytes - tier_nbytes(parts, placement.tiers, Tier.DEVICE)),
    ]
    return [row for row in rows if any(row[1:])]
