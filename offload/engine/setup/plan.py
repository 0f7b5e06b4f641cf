"""The plan of an engine: all decisions, made from config, model, free memory and drives before anything is changed.

`initialize` carries a plan out. With several ranks each makes its own plan, and the ranks compare the facts that must
be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from offload.activations.checkpoints import blocks_of
from offload.activations.tiles import choose as choose_mlps
from offload.activations.tiles import notices as tile_notices
from offload.config import Batch, Config
from offload.distributed.process_group import Mesh, Ranks
from offload.engine.setup.checks import check_alone, check_batch_norm, check_same
from offload.engine.setup.resume import FoundRun, about_folders, find_run, no_room
from offload.kernels import cuda
from offload.layout.experts import rows_of
from offload.layout.flat_layout import StateField, UnitLayout, laid_out_for, layouts_of
from offload.layout.frozen import frozen_notices, stored_weights
from offload.layout.memory_plan import (
    MemoryPlan,
    MemoryRequest,
    PlacedStates,
    buffer_dtype,
    divide,
    division_of,
    mode_of,
    place_states,
    plan_memory,
    wanted_slots,
)
from offload.layout.modes import Mode
from offload.layout.pass_order import LAYER_MAJOR, MICRO_BATCH_MAJOR, Choice, choose_schedule
from offload.layout.placement import Machine, Placement
from offload.layout.tiers import Partitions
from offload.layout.units import Units, tied_numel
from offload.notices import Headline, Remark
from offload.parallel.sequence import SequenceParallel
from offload.parallel.sharded_params import Site
from offload.parallel.tensor import TensorParallel
from offload.sizes import format_size
from offload.states import State
from offload.swapper.memory.device import Device
from offload.swapper.memory.host_arena import process_memory
from offload.swapper.memory.limits import free_host_memory
from offload.swapper.store.model_files import UnitImage


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All decisions, made before a file, a byte of memory or the model is touched."""

    config: Config
    batch: Batch
    device: Device
    ranks: Ranks | None
    """The ranks among which ZeRO divides; None if this process is alone there."""
    mode: Mode
    units: Units
    layouts: tuple[UnitLayout, ...]
    parts: Partitions
    placement: Placement
    slots: int
    """Slots of each partition in the store: 2 if durable, 1 if written in place, 0 without a store."""
    buffer_dtype: torch.dtype | None
    """Dtype of floating-point buffers; None leaves them unchanged."""
    commit_every: int
    """Steps between commits; 0 without commits."""
    resume: bool
    replace: bool
    """True if an existing run of this name is deleted. With "never" a closed one is too, with a notice."""
    device_kernels: bool
    """True if the device has kernels of its own for AdamW and for sums of squares."""
    tiled_mlps: tuple[str, ...]
    """Modules that the config tiles, by name."""
    schedule: Choice
    """Order in which the micro-batches of a step pass through the model, for steps that the engine runs as one call."""
    notices: tuple[str, ...]
    grid: TensorParallel | None = None
    """This process's place in tensor parallelism; None without it."""
    sites: tuple[Site, ...] = ()
    """The modules that compute with DTensors."""
    sequence: SequenceParallel | None = None
    """This process's place in sequence parallelism; None without it."""
    node: Ranks | None = None
    """The ranks that keep a secondary partition of the weights together; None without one."""
    images: tuple[UnitImage | None, ...] = ()
    """Each unit as it lies in the model's own files, None for one that is not read there. Empty if none is."""

    @property
    def in_place(self) -> frozenset[int]:
        """Units that are read from the model's own files."""
        return frozenset(unit for unit, image in enumerate(self.images) if image is not None)

    @property
    def rank(self) -> int:
        """Rank of this process among those that ZeRO divides over."""
        return 0 if self.ranks is None else self.ranks.rank

    @property
    def world_size(self) -> int:
        """Number of those ranks."""
        return 1 if self.ranks is None else self.ranks.size

    @property
    def mesh(self) -> Mesh:
        """Arrangement of the ranks."""
        return Mesh() if self.ranks is None else self.ranks.mesh

    @property
    def everyone(self) -> Ranks | None:
        """All processes that train together; None if this one trains alone."""
        return self.ranks if self.grid is None else self.grid.everyone

    @property
    def process(self) -> int:
        """Number of this process among all that train together."""
        return 0 if self.everyone is None else self.everyone.rank

    @property
    def processes(self) -> int:
        """Number of all processes that train together."""
        return 1 if self.everyone is None else self.everyone.size

    @property
    def trainable(self) -> tuple[range, ...]:
        """Elements of each unit that this rank updates."""
        return tuple(trainable for trainable, _ in self.shares)

    @property
    def shares(self) -> tuple[tuple[range, range], ...]:
        """This rank's trainable and frozen elements of each unit."""
        mesh = self.mesh
        shard, shards = mesh.shard_of(self.rank), mesh.shards
        return tuple((layout.trainable(shard, shards), layout.frozen(shard, shards)) for layout in self.layouts)


def decide(
    config: Config,
    batch: Batch,
    model: nn.Module,
    device: Device,
    ranks: Ranks | None,
    optimizer: str,
    kept: Mapping[str, tuple[StateField, ...]],
    matrices: Collection[str] | None,
    find_images: Callable[[Sequence[UnitLayout], Mode], tuple[UnitImage | None, ...]] | None = None,
    grid: TensorParallel | None = None,
) -> Plan:
    """Returns the plan of this rank. Collective. Changes nothing; disks are only inspected.

    Args:
        config: The whole config.
        batch: Sizes of batches, which follow from the config and the number of ranks.
        model: The model with all its parameters, real or deferred.
        device: The compute device.
        ranks: The ranks among which ZeRO divides; None if there is only one.
        optimizer: Name of the optimizer's rule.
        kept: States that an optimizer of torch keeps of each parameter.
        matrices: Names of the parameters that the optimizer steps as matrices; None if it has no rule for them.
        find_images: Returns `Plan.images`; None if the weights have the tier of the config.
        grid: The place of this process in tensor parallelism; None without it.

    Raises:
        ConfigError: If model and config do not fit each other.
        BudgetError: If a budget is too small.
        StoreError: If the run on the drives does not fit the configured "resume".
    """
    mesh, everyone = Mesh() if ranks is None else ranks.mesh, ranks if grid is None else grid.everyone
    # What needs no other rank comes first, so that its error is the one that is reported.
    check_alone(config, model, grid)
    tiled_mlps = choose_mlps(model, config.offload.tile_mlp)
    mode, buffers = mode_of(config, optimizer), buffer_dtype(config)
    units, stacks, experts = divide(model, division_of(config, optimizer))
    stored = stored_weights(model, config.offload.frozen, mode.weight_dtype, rows_of(stacks))
    layouts = laid_out_for(layouts_of(model, units, mesh.shards, kept, stored, matrices), mode, mesh.shards)
    tiles = tile_notices(model, tiled_mlps, config.offload.tile_mlp)
    more = (*frozen_notices(config.offload.frozen, layouts, mode.weight_dtype.itemsize), *experts, *tiles)
    check_batch_norm(model, mode, device.torch, buffers)
    check_same(everyone, config, batch, mode, layouts, model, device, grid)
    device_kernels, why_not = _device_kernels(device)
    images = () if find_images is None else find_images(layouts, mode)
    request = _request(config, layouts, optimizer, batch, device, ranks, everyone, device_kernels, images)
    memory, found = _with_disks(place_states(request), everyone)
    schedule, schedule_notices = _schedule(config, batch, model, memory, request.machine, everyone)
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
        tiled_mlps=tiled_mlps,
        schedule=schedule,
        notices=(*_notices(config, found, memory, why_not, everyone, mesh), *more, *schedule_notices),
        images=images,
    )


def _request(
    config: Config,
    layouts: tuple[UnitLayout, ...],
    optimizer: str,
    batch: Batch,
    device: Device,
    ranks: Ranks | None,
    everyone: Ranks | None,
    device_kernels: bool,
    images: tuple[UnitImage | None, ...],
) -> MemoryRequest:
    """Returns all on which the placement of this rank's states depends."""
    mesh = Mesh() if ranks is None else ranks.mesh
    return MemoryRequest(
        config=config,
        layouts=layouts,
        optimizer=optimizer,
        accumulation=batch.accumulation,
        # Units that are not read from the model's files are kept in host memory: there is no store beside the files.
        machine=_machine(config, device, everyone, device_kernels, bool(config.drives) and not images),
        rank=0 if ranks is None else ranks.shard,
        world_size=mesh.shards,
        replicas=mesh.replicas,
        images=images,
    )


def _schedule(
    config: Config, batch: Batch, model: nn.Module, memory: MemoryPlan, machine: Machine, ranks: Ranks | None
) -> tuple[Choice, tuple[str, ...]]:
    """Returns the order of micro-batches and blocks, and lines on it where it matters.

    Args:
        config: the whole config.
        batch: sizes of a batch.
        model: the model.
        memory: tiers and budgets of this rank.
        machine: what is free; memory that the device shares with the host counts as unknown.
        ranks: all that train together; None if this process is alone.
    """
    asked, blocks = config.offload.schedule, blocks_of(model, config.units)
    # A block of transformers that checkpoints itself has this attribute.
    by_itself = all(getattr(model.get_submodule(name), "gradient_checkpointing", False) for name in blocks)
    checkpointed = config.activation_tier is not None or by_itself
    moves = not all(memory.parts.stays(unit, row) for unit, row in enumerate(memory.placement.tiers))
    free = None if machine.host_addressable else machine.free_device - memory.placement.device_nbytes
    if free is not None and ranks is not None:
        # All ranks pass through the blocks in one order, so the device with the least memory decides.
        free = min(ranks.share(free))
    choice = choose_schedule(
        asked=asked,
        # A step of one micro-batch by the config may have several by the loop, if it asks for the order by name.
        micro_batches=max(batch.accumulation, 2 if asked == LAYER_MAJOR else 1),
        blocks=len(blocks),
        moves=moves,
        checkpointed=checkpointed,
        activation_nbytes=None,
        free_nbytes=free,
        # The newest micro-batch's is among the gradients that any order needs.
        tied_nbytes=(batch.accumulation - 1) * tied_numel(model) * memory.mode.weight_dtype.itemsize,
    )
    if asked == LAYER_MAJOR and choice.schedule != LAYER_MAJOR:
        return choice, (f'"schedule": "layer_major" has no effect: {choice.reason}',)
    if batch.accumulation < 2 or not moves or asked == MICRO_BATCH_MAJOR:
        return choice, ()
    if choice.schedule == MICRO_BATCH_MAJOR:
        return choice, (Remark(f"micro-batches pass through the model one after the other: {choice.reason}"),)
    kept = "their blocks' inputs" if checkpointed else "their activations"
    told = (
        f"train_batch and accumulate take all {batch.accumulation} micro-batches of a step through a block before the "
        f"next, so each weight is fetched twice a step; {kept} are kept at once"
    )
    return choice, (Remark(told),)


def _notices(
    config: Config,
    found: FoundRun,
    memory: MemoryPlan,
    why_not: tuple[str, ...],
    everyone: Ranks | None,
    mesh: Mesh,
) -> tuple[str, ...]:
    """Returns the lines that the plan has for the user, in the order in which they are reported."""
    if everyone is not None and everyone.rank:
        # Every rank finds the same run, and one notice is enough.
        return (*config.notices, *memory.notices, *why_not)
    return (*config.notices, *_mesh_notices(mesh), *found.replaced, *memory.notices, *why_not, *about_folders(config))


def _mesh_notices(mesh: Mesh) -> tuple[str, ...]:
    """Returns a line on the replicas, if there are several."""
    if mesh.replicas == 1:
        return ()
    part = "all" if mesh.shards == 1 else f"1/{mesh.shards}"
    told = "weights are gathered within a replica, and the sums of gradients are added up over the replicas"
    if mesh.shards == 1:
        told = "gradients are added up over all ranks; ZeRO stages 1 to 3 without mics_shard_size divide all of them"
    return (Remark(f"{mesh}: each rank has {part} of the weights, gradients and states; {told}"),)


def _with_disks(placed: PlacedStates, ranks: Ranks | None) -> tuple[MemoryPlan, FoundRun]:
    """Returns the memory plan that fits the room and the runs on all ranks' drives, and the run that was found."""
    config = placed.request.config
    found = find_run(config, placed.placement.on_disk and not placed.request.images, ranks)
    # Room is measured only if it can change the result.
    wanted = wanted_slots(placed, on_disk=found.on_disk, resume=found.resume)
    full = no_room(config, placed, ranks) if wanted.depends_on_room else None
    return plan_memory(placed, wanted, full), found


def _machine(config: Config, device: Device, ranks: Ranks | None, device_kernels: bool, drives: bool) -> Machine:
    """Returns the resources of this machine that one of its ranks may use.

    Args:
        config: The whole config.
        device: The compute device.
        ranks: All ranks; None if there is only one.
        device_kernels: True if the device has kernels of ours.
        drives: True if there are drives for swap files.
    """
    return Machine(
        # The ranks of one machine divide its free memory evenly.
        free_host=free_host_memory() // (1 if ranks is None else ranks.here),
        free_device=device.free_bytes(),
        host_addressable=device.host_addressable,
        drives=drives,
        other_engines=process_memory().needed_bytes,
        device_kernels=device_kernels,
    )


def _device_kernels(device: Device) -> tuple[bool, tuple[str, ...]]:
    """Returns whether the device has kernels of ours, and a notice if it could have them but has not."""
    # Memory that the CPU can address is updated by the CPU kernels.
    if device.host_addressable:
        return False, ()
    why_not = cuda.why_not(device.torch) if device.torch.type == "cuda" else None
    # A device of type cpu that the host cannot address is one of the tests; its kernels are those of the CPU.
    if device.torch.type not in ("cpu", "cuda"):
        why_not = f"there are kernels for CUDA alone, and this device is {device.torch.type}"
    if why_not is None:
        return True, ()
    slower = "the CPU, not the GPU, sums the squares of gradients and updates weights on the GPU, which is slower"
    return False, (f"{slower}: {why_not}",)


def _durability(plan: Plan) -> str:
    """Returns the part of the summary about commits."""
    if not plan.commit_every:
        return ""
    often = "each step" if plan.commit_every == 1 else f"every {plan.commit_every} steps"
    without = plan.placement.store(plan.parts, 1).nbytes
    return f" (durable {often}; {format_size(without)} with durability none)"


def summary(plan: Plan) -> str:
    """Returns one line about the tier and the size of each kind of state; without states if nothing trains."""
    placement = plan.placement
    stored = placement.store(plan.parts, plan.slots).nbytes
    states, clipped = "", ""
    if any(plan.parts.trainable_numel):
        clip = plan.config.gradient_clipping
        clipped = f"; gradients clipped to a norm of {clip:g}" if clip else "; gradients not clipped"
        tiers = placement.tiers_of(*(state for state in plan.mode.states if state is not State.WEIGHT))
        # SGD without momentum keeps no state.
        kept = f"states on {tiers}" if tiers else "no states"
        states = f", {kept}{', gradients on disk' if placement.spilled else ''}"
    return Headline(
        f"{plan.mode.name} on {plan.device.torch}: weights on {placement.tiers_of(State.WEIGHT) or 'nothing'}{states}; "
        f"host {format_size(sum(placement.classes))}, device {format_size(placement.device_nbytes)}, swap files "
        f"{format_size(stored)}{_durability(plan)}{clipped}"
    )
