"""The plan of an engine: every decision, from config, model and sizes alone, before anything is touched.

`initialize` carries a plan out. With several ranks each makes its own, and they compare what must be equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from offload.config import Batch, Config
from offload.engine.build.checks import check_alone, check_batch_norm, check_model, check_same
from offload.engine.distributed.process_group import Ranks
from offload.engine.build.resume import FoundRun, find_run, leftovers, no_room
from offload.kernels import cuda
from offload.layout.config_request import buffer_dtype, mode_of
from offload.layout.flat_layout import UnitLayout, layouts_of
from offload.layout.memory_plan import MemoryPlan, MemoryRequest, PlacedStates, place_states, plan_memory, wanted_slots
from offload.layout.opaque_state import Kept
from offload.layout.placement import Machine, Placement
from offload.layout.tiers import Partitions
from offload.layout.units import Units, find_units
from offload.notices import Remark
from offload.sizes import format_size
from offload.states import State
from offload.swapper.memory.device import Device
from offload.swapper.memory.host_arena import process_memory
from offload.swapper.memory.limits import free_host_memory
from offload.swapper.modes import Mode


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All decisions, made before a file, a byte of memory or the model is touched."""

    config: Config
    batch: Batch
    device: Device
    ranks: Ranks | None
    mode: Mode
    units: Units
    layouts: tuple[UnitLayout, ...]
    parts: Partitions
    placement: Placement
    slots: int
    """Slots of each partition in the store: 2 durable, 1 written in place, 0 where there is no store."""
    buffer_dtype: torch.dtype | None
    """Of floating-point buffers; None leaves them as they are."""
    commit_every: int
    """Steps from one commit to the next; 0 where there is none."""
    resume: bool
    replace: bool
    """Whether a run of this name that is there goes."""
    device_kernels: bool
    """Whether the device has kernels of its own for AdamW and for sums of squares."""
    notices: tuple[str, ...]

    @property
    def rank(self) -> int:
        return 0 if self.ranks is None else self.ranks.rank

    @property
    def world_size(self) -> int:
        return 1 if self.ranks is None else self.ranks.size

    @property
    def shares(self) -> tuple[tuple[range, range], ...]:
        """This rank's trainable and frozen elements of each unit."""
        rank, size = self.rank, self.world_size
        return tuple((layout.trainable(rank, size), layout.frozen(rank, size)) for layout in self.layouts)


def decide(
    config: Config,
    batch: Batch,
    model: nn.Module,
    device: Device,
    ranks: Ranks | None,
    optimizer: str,
    kept: Mapping[str, tuple[Kept, ...]],
) -> Plan:
    """Returns the plan of this rank; every rank calls it. Nothing is changed, and disks are looked at only.

    Args:
        config: the whole config.
        batch: sizes of batches, as they follow from the config and the number of ranks.
        model: with all parameters in it, real or to be read.
        device: the compute device.
        ranks: all ranks; None where there is one.
        optimizer: name of the optimizer's rule.
        kept: for each parameter, the states of an optimizer of torch.

    Raises:
        ConfigError: where model and config do not fit each other.
        BudgetError: where a budget is too small.
        StoreError: where the run on the drives does not fit the configured "resume".
    """
    rank, world_size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    check_model(model)
    check_alone(optimizer, world_size)
    mode, buffers = mode_of(config, optimizer), buffer_dtype(config)
    units = find_units(model, config.units)
    layouts = layouts_of(model, units, world_size, kept)
    check_batch_norm(model, mode, device.torch, buffers)
    if ranks is not None:
        check_same(ranks, config, batch, mode, layouts, model)
    device_kernels, why_not = _device_kernels(device)
    request = MemoryRequest(
        config=config,
        layouts=layouts,
        optimizer=optimizer,
        accumulation=batch.accumulation,
        machine=_machine(config, device, ranks, device_kernels),
        rank=rank,
        world_size=world_size,
    )
    memory, found = _with_disks(place_states(request), ranks)
    return Plan(
        config=config,
        batch=batch,
        device=device,
        ranks=ranks,
        mode=memory.mode,
        units=units,
        layouts=layouts,
        parts=memory.parts,
        placement=memory.placement,
        slots=memory.slots,
        buffer_dtype=buffers,
        commit_every=memory.commit_every,
        resume=found.resume,
        replace=config.offload.resume == "restart" or bool(found.replaced),
        device_kernels=device_kernels,
        notices=(
            *config.notices,
            *(found.replaced if rank == 0 else ()),
            *memory.notices,
            *why_not,
            *(leftovers(config) if rank == 0 else ()),
        ),
    )


def _with_disks(placed: PlacedStates, ranks: Ranks | None) -> tuple[MemoryPlan, FoundRun]:
    """Returns the plan that fits the room and the runs on all ranks' drives, and the run that was found."""
    config = placed.request.config
    found = find_run(config, placed.placement.on_disk, ranks)
    wanted = wanted_slots(placed, on_disk=found.on_disk, resume=found.resume)
    full = no_room(config, placed, ranks) if wanted.depends_on_room else None
    return plan_memory(placed, wanted, full), found


def _machine(config: Config, device: Device, ranks: Ranks | None, device_kernels: bool) -> Machine:
    """Returns what this machine has for one of its ranks."""
    return Machine(
        free_host=free_host_memory() // (1 if ranks is None else ranks.here),
        free_device=device.free_bytes(),
        host_addressable=device.host_addressable,
        drives=bool(config.drives),
        other_engines=process_memory().needed_bytes,
        device_kernels=device_kernels,
    )


def _device_kernels(device: Device) -> tuple[bool, tuple[str, ...]]:
    """Whether a device whose memory the host cannot address has kernels of ours, and a line where it could have."""
    if device.host_addressable:
        return False, ()
    why_not = cuda.why_not(device.torch) if device.torch.type == "cuda" else None
    if why_not is None:
        return True, ()
    return False, (
        f"the CPU sums the squares of gradients and updates what lives on the GPU, and is slower: {why_not}",
    )


def _durability(plan: Plan) -> str:
    if not plan.commit_every:
        return ""
    often = "each step" if plan.commit_every == 1 else f"every {plan.commit_every} steps"
    without = plan.placement.store(plan.parts, 1).nbytes
    return f" (durable {often}; {format_size(without)} with durability none)"


def summary(plan: Plan) -> str:
    """One line: what lives where and what it takes."""
    placement = plan.placement
    stored = placement.store(plan.parts, plan.slots).nbytes
    clip = plan.config.gradient_clipping
    clipped = f"clipped to a norm of {clip:g}" if clip else "not clipped"
    states = [state for state in plan.mode.states if state is not State.WEIGHT]
    return Remark(
        f"{plan.mode.name} on {plan.device.torch}: weights on {placement.tiers(State.WEIGHT) or 'nothing'}, states on "
        f"{placement.tiers(*states) or 'nothing'}{', gradients on disk' if placement.spilled else ''}; host "
        f"{format_size(sum(placement.classes))}, device {format_size(placement.device_nbytes)}, swap files "
        f"{format_size(stored)}{_durability(plan)}; gradients {clipped}"
    )
