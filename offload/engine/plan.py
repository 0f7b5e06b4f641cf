"""Decides the plan of an engine from config, model, free memory and drives, before anything is changed.

    checks of the model ─► units, layouts ─► tiers that fit the free memory ─► runs on the drives, slots ─► Plan

`initialize` carries a plan out. Each rank makes its own plan, and the ranks compare the facts that must be equal.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import nn

from offload.activations.checkpoints import check_tier
from offload.activations.tiles import choose as choose_mlps
from offload.activations.tiles import notices as tile_notices
from offload.aio.memory import release_heap
from offload.config import Batch, Config
from offload.distributed.agreement import AllOrNothing
from offload.distributed.process_group import Mesh, Ranks
from offload.distributed.world import World
from offload.engine.optimizer import Optimizer, Rule
from offload.engine.params import PagedParameter
from offload.engine.saved_state import ModuleEntries
from offload.engine.shared_memory import check_shared_memory
from offload.engine.snapshot import Snapshot, persistent_buffers
from offload.engine.state import Differences
from offload.errors import BudgetError, ConfigError, StoreError, UsageError
from offload.fileio import check_name
from offload.fileio.cache_file import Stamp
from offload.hardware import probe
from offload.hardware.system import check_folders, folder_notices
from offload.kernels import cuda
from offload.layout.drive_budget import DriveBudget
from offload.layout.experts import cut_stacks, makes_grouped_products, parts_of
from offload.layout.flat_layout import IN_FILES, StateField, UnitLayout, laid_out_for, layouts_of
from offload.layout.frozen import frozen_notices, is_of_bitsandbytes, is_packed, stored_weights, waits_for_quantization
from offload.layout.memory_plan import (
    DividedModel,
    MemoryPlan,
    MemoryRequest,
    buffer_dtype,
    divide,
    division_of,
    first_that_fits,
    mode_of,
    place_states,
    plan_memory,
    wanted_slots,
    with_shadows,
)
from offload.layout.modes import Mode, dtype_name
from offload.layout.pass_order import (
    LAYER_MAJOR,
    MICRO_BATCH_MAJOR,
    Schedule,
    ScheduleChoice,
    Transfers,
    choose_schedule,
    makes_early_updates,
    takes_turns,
    transfers,
)
from offload.layout.peak_memory import BesideBudgets
from offload.layout.placement import MachineMemory, device_fixed
from offload.layout.tiers import check_node
from offload.layout.units import Table, Units, blocks_of, tied_numel
from offload.layout.vocabulary import cut_tables
from offload.model_io.deferred import is_deferred, origin_of
from offload.model_io.places import TensorPlaces
from offload.notices import Headline, Remark, shell_command
from offload.parallel.sharded_params import FoundShards, Site, is_dtensor
from offload.quantized.tensors import is_under_engine
from offload.sizes import count_of, format_decimal, format_size, format_time
from offload.states import State, Tier
from offload.swapper.memory.device import Device
from offload.swapper.memory.host_arena import process_memory
from offload.swapper.memory.limits import tightest_limit
from offload.swapper.store import (
    Shortage,
    StoreSpec,
    check_unused,
    find_removal,
    find_shortage,
    other_runs,
    rank_folders,
    read_closed,
    run_status,
)
from offload.swapper.store.folder import CLOSED
from offload.swapper.store.format import layout_difference
from offload.swapper.store.inspection import look
from offload.swapper.store.model_files import InPlaceLayout
from offload.torch_internals import inner_tensors

_T = TypeVar("_T")

# -- plan ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All decisions about an engine. They are made before a file, a byte of memory or the model is touched."""

    config: Config
    batch: Batch
    device: Device
    world: World
    """All processes that train together, and the position of this process among them."""
    memory: MemoryPlan
    """Mode, tiers and placement of all states, and the slots of the store."""
    units: Units
    layouts: tuple[UnitLayout, ...]
    buffer_dtype: torch.dtype | None
    """Dtype of floating-point buffers; None leaves them unchanged."""
    resume: bool
    replace: bool
    """True to delete an existing run of this name: with "restart" any run, with "never" only a closed run."""
    device_kernels: bool
    """True if the device runs our kernels for AdamW and for sums of squares, instead of the CPU."""
    tiled_mlps: tuple[str, ...]
    """Names of the MLP modules that the config tiles."""
    schedule: ScheduleChoice
    """The order in which a step's micro-batches pass through the model, if one call of the engine runs them all."""
    notices: tuple[str, ...]
    of_experts: str
    """Words on the units of experts, and why they are so; empty if no expert is a unit."""
    sites: tuple[Site, ...] = ()
    """The modules that compute with DTensors."""
    in_place_layouts: tuple[InPlaceLayout | None, ...] = ()
    """Each unit's place in the model's own files; None for a unit that is not read from these files.

    The tuple is empty if no unit is read from the model's own files.
    """
    stamps: Mapping[str, Stamp] = dataclasses.field(default_factory=dict)
    """Stamps of these files, by path."""

    @property
    def in_place(self) -> frozenset[int]:
        """Units that are read from the model's own files."""
        return frozenset(unit for unit, layout in enumerate(self.in_place_layouts) if layout is not None)

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Mode of each unit. It is the run's mode, or the same mode with weights in fp32."""
        return tuple(layout.mode_in(self.memory.mode) for layout in self.layouts)

    @property
    def trainable(self) -> tuple[range, ...]:
        """Elements of each unit that this rank updates."""
        return tuple(trainable for trainable, _ in self.shares)

    @property
    def shares(self) -> tuple[tuple[range, range], ...]:
        """This rank's trainable and frozen elements of each unit."""
        shard, shards = self.world.ranks.shard, self.world.ranks.mesh.shards
        return tuple((layout.trainable(shard, shards), layout.frozen(shard, shards)) for layout in self.layouts)


def decide(
    config: Config,
    batch: Batch,
    model: nn.Module,
    device: Device,
    world: World,
    rule: Rule,
    kept_states: Mapping[str, tuple[StateField, ...]],
    matrices: Collection[str] | None,
    places: TensorPlaces | None = None,
    beside: Mapping[str, BesideBudgets] = MappingProxyType({}),
    whole_steps: bool = False,
) -> Plan:
    """Returns the plan of this rank. Collective. Changes nothing; disks are only inspected.

    The model has all its parameters, real or deferred, and has passed `check_model`. `kept_states` contains the states
    of each parameter that a torch optimizer keeps. `matrices` names the parameters that the optimizer steps as
    matrices; None if the optimizer has no rule for matrices. `places` has the weights that may be read from the model's
    own files; None if all weights are in the config's tier. `beside` is what a step takes beside both budgets with
    tables that are "whole" or in "pieces", if the batch is known. `whole_steps` is True if the caller runs all
    micro-batches of every step by one call of `accumulate`, and the model keeps no value between two blocks.

    Raises:
        ConfigError: If model and config do not fit each other.
        BudgetError: If a budget is too small.
        StoreError: If the run on the drives does not fit the configured "resume".
    """
    mesh, everyone = world.ranks.mesh, world.everyone
    # A rank first checks what it can check alone, so that the user sees the error of these checks first.
    _check_config(config, world)
    tiled_mlps = choose_mlps(model, config.offload.tile_mlp)
    mode, buffers = mode_of(config, rule.name), buffer_dtype(config)
    division = division_of(config, rule.name)
    if world.divides_model:  # `_check_config` has refused configs that name weights
        division = dataclasses.replace(division, keep_in_fp32=())
    division = dataclasses.replace(division, ep_size=world.experts.size)
    device_kernels, why_not = _device_kernels(device)
    blocks, held = blocks_of(model, config.units), _weights_held(model)
    trains = any(parameter.requires_grad for parameter in model.parameters())

    def place(experts: str, vocabulary: str) -> tuple[DividedModel, MemoryPlan]:
        by = dataclasses.replace(division, experts=experts, vocabulary=vocabulary)
        divided = divide(model, by)
        in_fp32, parts = divided.units.in_fp32, parts_of(divided.stacks)
        stored = stored_weights(model, config.offload.frozen, mode.weight_dtype, parts, in_fp32)
        in_files = frozenset[str]() if places is None else places.frozen(mode.weight_dtype, in_fp32, stored)
        if in_files and trains:
            divided = divide(model, dataclasses.replace(by, in_files=in_files))
        units = divided.units
        layouts = laid_out_for(layouts_of(model, units, mesh.shards, kept_states, stored, matrices), mode, mesh.shards)
        _check_batch_norm(model, mode, device.torch, buffers, units.in_fp32)
        # This check comes before the disks are inspected, because ranks with different configs would look for different
        # runs.
        _check_same(world, config, batch, mode, layouts, model, rule.facts(device))
        # The free memory decides the tiers of the states. The ranks of one machine divide its memory evenly.
        in_place_layouts: tuple[InPlaceLayout | None, ...] = ()
        if places is not None:
            in_place_layouts = places.in_place_layouts(layouts, mode, [world.ranks.shard], mesh.shards)[0]
        if in_place_layouts:
            # Such a unit has another name than the same module's other unit, if there is one.
            end = f" {IN_FILES}" if trains else ""
            layouts = tuple(
                layout if in_place is None else layout._replace(in_files=True, name=f"{layout.name}{end}".strip())
                for layout, in_place in zip(layouts, in_place_layouts, strict=True)
            )
        limit = tightest_limit(everyone.here)
        machine = MachineMemory(
            free_host=limit.free,
            free_device=device.free_bytes(),
            host_addressable=device.host_addressable,
            drives=bool(config.drives),
            other_engines=process_memory().needed_bytes,
            device_kernels=device_kernels,
            unified=device.unified,
            limit=str(limit),
            weights_held=held,
        )
        named = takes_turns(config.offload.schedule, batch.accumulation, len(blocks))
        request = MemoryRequest(
            config=config,
            layouts=layouts,
            optimizer=rule.name,
            accumulation=batch.accumulation,
            machine=machine,
            rank=world.ranks.shard,
            world_size=mesh.shards,
            replicas=mesh.replicas,
            in_place_layouts=in_place_layouts,
            speculate=makes_early_updates(config.offload.speculate, device.host_addressable) and everyone.alone,
            in_turns=everyone.alone and (named or whole_steps),
            tied=bool(tied_numel(model, except_for=units.tables)),
            beside=beside.get(vocabulary),
        )
        placed = place_states(request)
        if request.in_turns and not named and not order_of(units, placed)[0].in_turns:
            placed = place_states(dataclasses.replace(request, in_turns=False))
        return divided, placed

    def order_of(units: Units, placed: MemoryPlan) -> tuple[ScheduleChoice, tuple[str, ...]]:
        tied = any(table.tied for table in tables if table.parameter in units.tables)
        return _schedule(model, blocks, placed, everyone, tied)

    release_heap()  # a freed forecast is no memory in use
    tables = cut_tables(model, "pieces", rule.name)
    experts, vocabulary = _experts(config, model, world, rule.name), _vocabulary(config, world, tables)
    tries = _together(everyone, place) if "auto" in (experts, vocabulary) else place
    (units, _, division_lines), placed = first_that_fits(experts, vocabulary, tries)
    layouts, in_place_layouts = placed.request.layouts, placed.request.in_place_layouts
    schedule, schedule_notices = order_of(units, placed)

    # The run on the drives. Ranks with different free memory may have different tiers, but either all ranks have a
    # store or none has. A kill during the first start may leave one rank's drive empty. `assemble` then decides by the
    # commits.
    def anywhere(here: bool) -> bool:
        return any(everyone.share(here))

    on_disk = anywhere(placed.placement.keeps_on_disk(placed.parts))
    resumes_here, replaced = _resume(config, on_disk)
    resume = anywhere(resumes_here)
    if resume and places is not None:
        _check_recorded_files(config, world, places, layouts, mode)
    # The room on the drives is measured only if it can change the number of slots.
    slots, may_fall_back = wanted_slots(placed, on_disk=on_disk, resume=resume)
    memory = plan_memory(placed, slots, _no_room(placed, everyone) if may_fall_back else None, anywhere)
    # Files of a run that is resumed keep the slots that they have. Only a run of one rank has units to shadow, so no
    # other rank needs to know.
    if memory.to_shadow and not resume:
        short = find_shortage(config.drives, memory.shadows_need)
        memory = with_shadows(memory, None if short is None else short.free)

    notices = (*config.notices, *memory.notices, *why_not)
    if everyone.rank == 0:  # every rank finds the same run, and one notice is enough
        folders = _about_folders(config)
        notices = (*config.notices, *_mesh_notices(mesh), *replaced, *memory.notices, *why_not, *folders)
    frozen = frozen_notices(config.offload.frozen, layouts, mode.weight_dtype.itemsize)
    grouped = any(units.units[of_layer.start].rows is not None for of_layer in units.experts.values())
    if grouped and not makes_grouped_products(mode.weight_dtype, device.torch):
        named = f"{dtype_name(mode.weight_dtype)} on {device.torch.type}"
        division_lines += (Remark(f"torch makes no grouped products in {named}: each expert of a group has its own"),)
    tiles = tile_notices(model, tiled_mlps, config.offload.tile_mlp)
    plan = Plan(
        config=config,
        batch=batch,
        device=device,
        world=world,
        memory=memory,
        units=units,
        layouts=layouts,
        buffer_dtype=buffers,
        resume=resume,
        replace=config.offload.resume == "restart" or bool(replaced),
        device_kernels=device_kernels,
        tiled_mlps=tiled_mlps,
        schedule=schedule,
        notices=(*notices, *frozen, *division_lines, *tiles, *schedule_notices),
        of_experts=_on_experts(config, experts, units, resume, any(placed.parts.trainable_numel)),
        in_place_layouts=in_place_layouts,
        stamps={} if places is None else places.stamps,
    )
    if not everyone.alone:
        # A difference is an error of this package: ranks that went on would wait for each other for ever.
        facts = {"slots": memory.slots, "commit_every": memory.commit_every, "schedule": schedule.schedule}
        AllOrNothing(everyone, "plan the run").same(facts)
    if places is None or everyone.rank:
        return plan
    return dataclasses.replace(plan, notices=(*plan.notices, *_place_notices(plan, places)))


def _place_notices(plan: Plan, places: TensorPlaces) -> tuple[str, ...]:
    """Returns notices on the weights that are read from the model's own files, and on the first that is not."""
    read = [layout for layout in plan.in_place_layouts if layout is not None]
    trains, lines = any(plan.memory.parts.trainable_numel), list[str]()
    if read:
        units = f"{count_of(len(read), 'unit')} of {len(plan.layouts)} ({format_size(sum(u.nbytes for u in read))})"
        files = len({extent.path for layout in read for extent in layout.extents})
        nothing = "nothing of them is written" if trains else "nothing is written"
        lines.append(f"{units} are read from {count_of(files, 'file')} of the model at each use; {nothing}")
    others, nbytes, first = 0, 0, ""
    for unit, (layout, mode) in enumerate(zip(plan.layouts, plan.modes, strict=True)):
        resident = plan.memory.placement.tiers[unit][State.WEIGHT] is Tier.DEVICE
        segments = [segment for segment in layout.segments if not segment.trainable]
        if layout.in_files or not segments or (resident and not trains):
            continue
        others += 1
        nbytes += sum(segment.numel for segment in segments) * mode.weight_dtype.itemsize
        reasons = ((segment.name, places.why_not(segment, mode.weight_dtype)) for segment in segments)
        first = first or next((f"{name} {reason}" for name, reason in reasons if reason is not None), "")
    if others and trains:
        lines.append(f"{format_size(nbytes)} of frozen weights are copied to the swap files: {first}")
    elif others:
        units_are = count_of(others, f"unit ({format_size(nbytes)}) is", f"units ({format_size(nbytes)}) are")
        lines.append(f"{units_are} kept in host memory: {first}")
    return tuple(map(Remark, lines))


def frozen_places(config: Config, model: nn.Module, world: World) -> TensorPlaces | None:
    """Returns the places of frozen weights in the model's own files; None if swap files shall contain them. Collective.

    Each of several ranks reads its partition of them, if all ranks have equal files.
    Raises `StoreError` if the run that this start resumes reads them from the model's files, and this start cannot.
    """
    divided = world.divides_model or world.experts.size > 1
    unfit = "ranks that divide layers or own experts" if divided or config.offload.debug.collectives else ""
    unfit = unfit or ("weights outside of nvme" if config.weight_tier != "nvme" else "")
    unfit = unfit or ('"frozen_files": false' if not config.offload.frozen_files else "")
    places = TensorPlaces(model, quantized=False)
    if not world.everyone.alone:
        # On every rank, before ranks whose configs differ go different ways.
        own, *others = world.everyone.share("" if unfit else places.described(), "compare the model's own files")
        unfit = unfit or ("other files on another rank" if any(other != own for other in others) else "")
    units = _recorded_units(config, world)
    in_files = any(unit.get("in_files") for unit in units or ())
    if in_files and unfit:
        raise StoreError(
            f"the run {config.offload.run} reads frozen weights from the model's own files, and this start has "
            f"{unfit}: resume with the same files on each rank, offload_param on nvme and without frozen_files, or "
            "choose another run name"
        )
    return None if unfit or (units is not None and not in_files) else places


def _check_recorded_files(
    config: Config, world: World, places: TensorPlaces, layouts: Sequence[UnitLayout], mode: Mode
) -> None:
    """Raises `StoreError` if a weight that the run to resume reads from the model's files is elsewhere now. Collective.

    Without this check the units would differ, and the error would take this model for another one.
    """
    others = {
        segment.name: places.why_not(segment, layout.mode_in(mode).weight_dtype)
        for layout in layouts
        if not layout.in_files
        for segment in layout.segments
    }
    units = [unit for unit in _recorded_units(config, world) or () if unit.get("in_files")]
    for unit in units:
        lost = next((entry["name"] for entry in unit["parameters"] if others.get(entry["name"]) is not None), None)
        if lost is None:
            continue
        for path in (path for unit in units for path in unit["files"] if not os.path.exists(path)):
            raise StoreError(
                f"the run {config.offload.run} reads frozen weights from {path}, which is missing: put the file back, "
                "or give the model in its new folder"
            )
        raise StoreError(
            f"the run {config.offload.run} reads {lost} from {unit['files'][0]}, and here it {others[lost]}: give the "
            "model with which the run began, as `offload.load_pretrained` reads it from its files, in the dtype of the "
            "run"
        )


def _weights_held(model: nn.Module) -> int:
    """Returns the bytes of the model's weights in host memory, which the start gives back."""
    plain = [weight for weight in model.parameters() if type(weight) is nn.Parameter and weight.device.type == "cpu"]
    storages = [weight.untyped_storage() for weight in plain if not is_deferred(weight)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _vocabulary(config: Config, world: World, tables: Sequence[Table]) -> str:
    """Returns "whole", "pieces", or "auto" if the budgets decide. Collective with "auto".

    `tables` are those that can be cut. Raises `ConfigError` if the config asks for pieces that cannot be right.
    """
    asked, tied = config.offload.vocabulary, next((table.parameter for table in tables if table.tied), None)
    in_turns = config.offload.schedule == LAYER_MAJOR and tied is not None
    if asked == "pieces" and in_turns:
        raise ConfigError(
            f'{tied} is tied, and "vocabulary" is "pieces": both uses add to one gradient, in another order with '
            '"schedule": "layer_major"; leave one of these keys out'
        )
    if asked != "auto":
        return asked
    # `_check_config` refuses pieces there.
    if not tables or in_turns or world.divides_model or world.sequence.size > 1:
        return "whole"
    # A run that resumes keeps its division, whatever the budgets are now.
    names = {table.parameter for table in tables}
    parts = _recorded_parts(config, world)
    return "auto" if parts is None else "pieces" if names & parts.keys() else "whole"


def _experts(config: Config, model: nn.Module, world: World, rule: str) -> str:
    """Returns the config's "experts"; for "auto" those of the run that this start resumes. Collective with "auto".

    The result is "auto" only if experts are then in groups, unless the budgets are too small.
    """
    asked = config.offload.experts
    if world.experts.size > 1:
        return "grouped"
    if asked != "auto":
        return asked
    # Ranks that divide a layer divide its experts, or have them all; ranks that share sequences use the same units.
    if world.tensor_size > 1 or world.sequence.size > 1:
        return "whole"
    stacks, _ = cut_stacks(model, "auto", rule)
    if not any(stack.groups for stack in stacks):
        return "each"
    names = parts_of(stacks).keys()
    parts = _recorded_parts(config, world)
    if parts is None:
        return "auto"
    in_groups = {parts[name] for name in names if name in parts}
    return "whole" if not in_groups else "grouped" if True in in_groups else "each"


def _on_experts(config: Config, experts: str, units: Units, resume: bool, trains: bool) -> str:
    """Returns words on the units of experts, and why they are so; `experts` is the result of `_experts`."""
    if not units.experts:
        return ""
    of_layer = next(iter(units.experts.values()))
    in_groups = units.units[of_layer.start].rows is not None
    why = "since the model makes no grouped products"
    if config.offload.experts != "auto":
        why = 'as "experts" says'
    elif resume:
        why = "as the run was begun"
    elif in_groups:
        why = "since the tokens of a step visit most of them"
    elif experts == "auto":
        why = "since a group has no room on the device"
    elif not trains:
        why = "since nothing trains"
    return f"; experts {f'in {len(of_layer)} groups a layer' if in_groups else 'one by one'}, {why}"


def _recorded_parts(config: Config, world: World) -> Mapping[str, bool] | None:
    """Returns the parameters in parts of the run that this start resumes; None if there is no such run. Collective.

    The value is True for a parameter in pieces or groups of several rows, and False for one whose experts are units.
    """
    units = _recorded_units(config, world)
    if units is None:
        return None
    entries = (entry for unit in units for entry in unit["parameters"])
    return {entry["stack"]: "rows" in entry for entry in entries if "stack" in entry}


def _recorded_units(config: Config, world: World) -> Sequence[Mapping[str, Any]] | None:
    """Returns the units of the run that this start resumes, as `describe` does; None without such a run. Collective.

    A unit in the model's own files has the paths of its tensors' files too, under "files".
    """

    def of_this_rank() -> Sequence[Mapping[str, Any]] | None:
        if config.offload.resume not in ("auto", "must") or not config.drives:
            return None
        for folder in rank_folders(Path(config.drives[0]) / config.offload.run):
            manifest = look(folder).manifest
            if manifest is not None:
                units, files = manifest.spec.fingerprint.get("units", ()), manifest.spec.files
                # `StoreManifest.unpack` has checked that each unit in files has its places there.
                paths = {
                    place["unit"]: [files["files"][tensor[0]]["path"] for tensor in place["tensors"]]
                    for place in files.get("units", ())
                }
                return tuple({**unit, "files": paths.get(number, [])} for number, unit in enumerate(units))
        return None

    return next((units for units in world.everyone.share(of_this_rank()) if units is not None), None)


def _together(ranks: Ranks, place: Callable[[str, str], _T]) -> Callable[[str, str], _T]:
    """Returns a function as `place` that raises `BudgetError` on every rank if it raises one on any."""

    def place_alike(experts: str, vocabulary: str) -> _T:
        error = None
        try:
            result = place(experts, vocabulary)
        except BudgetError as raised:
            error = raised
        if any(ranks.share(error is not None)):
            raise error or BudgetError("the units do not fit on another rank")
        return result

    return place_alike


def _schedule(
    model: nn.Module, blocks: Sequence[str], placed: MemoryPlan, ranks: Ranks, tied_pieces: bool
) -> tuple[ScheduleChoice, tuple[str, ...]]:
    """Returns the order in which micro-batches pass through `blocks`, and notices for the user if it matters.

    `tied_pieces` as for `choose_schedule`.
    """
    config, machine, accumulation = placed.request.config, placed.request.machine, placed.request.accumulation
    asked = config.offload.schedule
    # This attribute is True on a block of transformers that checkpoints itself.
    by_itself = all(getattr(model.get_submodule(name), "gradient_checkpointing", False) for name in blocks)
    checkpointed = config.activation_tier is not None or by_itself
    placement = placed.placement
    moves = not all(placed.parts.device_resident(unit, row) for unit, row in enumerate(placement.tiers))
    sends = not machine.host_addressable and placement.sends_gradients
    free = None if machine.host_addressable else machine.free_device - placement.device_nbytes
    # All ranks use the same order, although their tiers may differ, and the device with the least free memory decides.
    rows = ranks.share([moves, sends, free])
    moves, sends = any(row[0] for row in rows), any(row[1] for row in rows)
    free = None if free is None else min(row[2] for row in rows)
    choice = choose_schedule(
        asked=asked,
        # If the config asks for layer_major, the user's loop may run several micro-batches at once, although the config
        # has one micro-batch per step.
        micro_batches=max(accumulation, 2 if asked == LAYER_MAJOR else 1),
        blocks=len(blocks),
        moves=moves,
        sends=sends,
        # Beside weights that all stay, only inputs of blocks that leave the device when it is full surely fit.
        checkpointed=checkpointed if moves else config.activation_tier not in (None, "device"),
        activation_nbytes=None,
        free_nbytes=free,
        # Every order needs one tied gradient. Only those of the other micro-batches take extra memory, so one is
        # subtracted.
        tied_nbytes=(accumulation - 1) * tied_numel(model) * placed.mode.weight_dtype.itemsize,
        # Every rank would learn of its own device alone, and all ranks need one order.
        learns=not machine.host_addressable and ranks.alone,
        tied_pieces=tied_pieces,
    )
    if asked == LAYER_MAJOR and choice.schedule != LAYER_MAJOR:
        return choice, (f'"schedule": "layer_major" has no effect: {choice.reason}',)
    if accumulation < 2 or not (moves or sends) or asked == MICRO_BATCH_MAJOR:
        return choice, ()
    if choice.schedule == MICRO_BATCH_MAJOR:
        return choice, (Remark(f"micro-batches pass through the model one after the other: {choice.reason}"),)
    content = "their blocks' inputs" if checkpointed else "their activations"
    so = "each weight is fetched twice a step" if moves else "gradients leave the device once a step"
    provided = ", if the first step shows that all fit" if choice.after_a_step else ""
    gradients = placed.parts.gradients
    narrow = f"; gradients wait in {dtype_name(gradients.stored)}" if gradients.complete_first else ""
    line = (
        f"all {accumulation} micro-batches of a step pass through a block before the next (not in a loop of "
        f"forward and backward), so {so}; {content} are kept at once{provided}{narrow}"
    )
    return choice, (Remark(line),)


def _mesh_notices(mesh: Mesh) -> tuple[str, ...]:
    if mesh.replicas == 1:
        return ()
    part = "all" if mesh.shards == 1 else f"1/{mesh.shards}"
    line = "weights are gathered within a replica, and the sums of gradients are added up over the replicas"
    if mesh.shards == 1:
        line = "gradients are added up over all ranks; ZeRO stages 1 to 3 without mics_shard_size divide all of them"
    return (Remark(f"{mesh}: each rank has {part} of the weights, gradients and states; {line}"),)


def _device_kernels(device: Device) -> tuple[bool, tuple[str, ...]]:
    """Returns True if the device runs our kernels, and a notice if it could run them but does not."""
    # If the CPU can address the device's memory, the CPU kernels update it.
    if device.host_addressable:
        return False, ()
    why_not = cuda.why_not(device.torch) if device.torch.type == "cuda" else None
    # Test devices have type cpu and are not host-addressable. They run the CPU kernels as their own.
    if device.torch.type not in ("cpu", "cuda"):
        why_not = f"there are kernels for CUDA alone, and this device is {device.torch.type}"
    if why_not is None:
        return True, ()
    slower = "the CPU, not the GPU, sums the squares of gradients and updates weights on the GPU, which is slower"
    return False, (f"{slower}: {why_not}",)


def summary(plan: Plan, store: StoreSpec) -> str:
    """Returns one line about tiers and sizes: weights, and also states and gradients if anything trains.

    `store` are the contents of the swap files.
    """
    memory, placement = plan.memory, plan.memory.placement
    details: list[str] = []
    budgeted = _under_budget(plan)
    if memory.commit_every:
        often = "each step" if memory.commit_every == 1 else f"every {memory.commit_every} steps"
        without = placement.store(memory.parts, 1).nbytes
        details += [f"durable {budgeted or often}", f"{format_size(without)} with durability none"]
    elif budgeted and any(memory.parts.trainable_numel):
        details.append(budgeted)
    if store.shadowed:
        without = placement.store(memory.parts, memory.slots).nbytes
        details += [f"{format_size(without)} without a slot for updates under the backward"]
    elif plan.resume and memory.updates_early and memory.commit_every > 1:
        details += ["no third slot, so updates begin under the backward in the step after a commit alone"]
    durable = f" ({'; '.join(details)})" if details else ""
    states, clipped = "", ""
    if any(memory.parts.trainable_numel):
        clip = plan.config.gradient_clipping
        clipped = f"; gradients clipped to a norm of {clip:g}" if clip else "; gradients not clipped"
        tiers = placement.tiers_of(*(state for state in memory.mode.states if state is not State.WEIGHT))
        # SGD without momentum keeps no state.
        moments = f"states on {tiers}" if tiers else "no states"
        states = f", {moments}{', gradients on disk' if placement.spilled else ''}"
    in_place = (
        " (weights are used in host memory)" if plan.device.host_addressable and not placement.device_nbytes else ""
    )
    more = "" if placement.peak.activations or not plan.device.host_addressable else " and activations"
    return Headline(
        f"{memory.mode.name} on {plan.device.torch}: weights on "
        f"{placement.tiers_of(State.WEIGHT) or 'nothing'}{states}; "
        f"host {format_size(sum(placement.classes))}, device {format_size(placement.device_nbytes)}"
        f"{' (of one memory)' if plan.device.unified else in_place}, swap files {format_size(store.nbytes)}{durable}; "
        f"RAM at most {format_size(sum(placement.peak))} more{more}{clipped}"
        f"{plan.of_experts}"
    )


def _under_budget(plan: Plan) -> str:
    """Returns words on what a drive budget does, which follow "durable" if anything is; empty without a budget."""
    offload = plan.config.offload
    if offload.drive_budget is None:
        return ""
    budget, drives = DriveBudget.of(offload.drive_budget), len(plan.config.drives)
    written = plan.memory.placement.written(plan.memory.parts, plan.memory.slots, plan.memory.commit_every)
    each_step, at_commit = (nbytes / max(drives, 1) for nbytes in written)
    often = "each step" if plan.memory.commit_every == 1 else f"every {plan.memory.commit_every} steps"
    if not plan.memory.commit_every:
        words = f"{budget.text} (drive_budget)"
    elif not offload.thins_commits:
        words = f"{often} as the config promises, whatever {budget.text} (drive_budget) allows"
        each_step += at_commit / plan.memory.commit_every
    elif at_commit:
        words = (
            f"as often as {budget.text} (drive_budget) allows, {format_decimal(at_commit)} to a drive at each commit "
            "and at least one a day"
        )
    else:
        words = f"each step, since no layer is in memory alone ({budget.text}, drive_budget)"
    if each_step:
        least = format_time(each_step / budget.rate)
        words += (
            f"; a step writes {format_decimal(each_step)} to a drive, so one shorter than {least} exceeds the budget"
        )
    return words


# -- loops ---------------------------------------------------------------------------------------------
#
# What a loop loses that calls engine, backward and step for each micro-batch, while the plan lets them take turns.


def line_for_a_loop_of_calls(plan: Plan) -> str | None:
    """Returns the line for a loop that runs each micro-batch by itself; None if it loses nothing by that.

    It has the bytes that a step moves in either order, and their seconds by the rates of `offload probe`, if these are
    kept. Several ranks send bytes to each other too, which the line leaves out.
    """
    if plan.schedule.schedule != LAYER_MAJOR or plan.batch.accumulation < 2:
        return None
    one_by_one, in_turns = (_transfers(plan, order) for order in (MICRO_BATCH_MAJOR, LAYER_MAJOR))
    if sum(one_by_one) <= sum(in_turns):
        return None
    moved = [
        format_size(sum(copies)) + ("" if seconds is None else f" in {format_time(seconds)} or more")
        for copies, seconds in zip((one_by_one, in_turns), _seconds_of(plan, one_by_one, in_turns), strict=True)
    ]
    fits = ", where their activations fit" if plan.schedule.after_a_step else ""
    return Headline(
        f"this loop runs one micro-batch after the other, and a step copies and reads {moved[0]}; "
        f"engine.train_batch(iterator), or engine.accumulate(micro_batches) and one engine.step(), takes all "
        f"{plan.batch.accumulation} through a block before the next: {moved[1]}{fits}"
    )


def _transfers(plan: Plan, order: Schedule) -> Transfers:
    """Returns the bytes of this rank that a step moves in an order; on a CPU those of the drives alone."""
    parts, placement = plan.memory.parts, plan.memory.placement
    rows = list(enumerate(placement.tiers))
    moving = [unit for unit, row in rows if not parts.device_resident(unit, row)]
    nbytes = {unit: parts.nbytes[unit][State.WEIGHT] for unit in moving}
    weights, whole = sum(nbytes.values()), sum(parts.unit_nbytes[unit] for unit in moving)
    sent = [unit for unit, row in rows if row.get(State.GRAD, Tier.DEVICE) is not Tier.DEVICE]
    room = max(placement.moving_nbytes - device_fixed(parts, placement.tiers), 0)
    copies = transfers(
        order,
        plan.batch.accumulation,
        weights=weights,
        # A rank keeps units whole, of which it uploads its own part.
        kept=room * weights // max(whole, 1),
        on_disk=sum(nbytes[unit] for unit in moving if placement.tiers[unit][State.WEIGHT] is Tier.DISK),
        cached=placement.classes.cache - parts.pages_nbytes(placement.promoted),
        gradient=sum(parts.trainable_numel[unit] for unit in sent) * plan.memory.mode.weight_dtype.itemsize,
        total=sum(parts.nbytes[unit][State.GRAD] for unit in sent),
        added=sum(nbytes for _, nbytes in placement.added),
    )
    return copies._replace(uploaded=0, downloaded=0) if plan.device.host_addressable else copies


def _seconds_of(plan: Plan, *orders: Transfers) -> list[float | None]:
    """Returns the least seconds of transfers by the kept rates of this machine; None for each without rates."""
    rates = probe.kept()
    # A probe of another device says nothing about these copies, nor does one without a drive of the run.
    if rates is None or (rates.machine["gpu"] is None) != plan.device.host_addressable:
        return [None] * len(orders)
    folders = plan.config.drives if any(copies.read for copies in orders) else ()
    drives = [probe.drive_under(rates, folder) for folder in folders]
    if None in drives:
        return [None] * len(orders)
    read = sum(drive.read for drive in drives if drive is not None) if drives else math.inf
    return [copies.seconds(rates.rates.upload, rates.rates.download, read) for copies in orders]


# -- checks --------------------------------------------------------------------------------------------
#
# These functions check a model before an engine takes it over, and that all ranks have equal arguments.


def _check_config(config: Config, world: World) -> None:
    """Makes the checks of a config for which a rank needs no other rank.

    Raises `ConfigError` if a tier or a folder for swap files cannot be used.
    """
    if config.activation_checkpointing.partition_activations and world.tensor_size > 1 and world.stages > 1:
        raise ConfigError(
            "activation_checkpointing.partition_activations was not tried with a pipeline: leave it out, and set "
            '"activations" to "cpu" in the "offload" block to free device memory'
        )
    names = config.offload.keep_in_fp32
    if world.divides_model and config.dtype != "fp32" and names != "auto" and names:
        raise ConfigError(
            f'"keep_in_fp32" names {names[0]}, but tensor parallelism and pipelines have all weights in one dtype: '
            "leave the key out, or train with ZeRO alone"
        )
    if config.offload.vocabulary == "pieces" and (world.divides_model or world.sequence.size > 1):
        raise ConfigError(
            '"vocabulary" is "pieces", but tensor parallelism, pipelines and sequence parallelism need whole tables: '
            "leave the key out, or train with ZeRO alone"
        )
    check_tier(config.activation_tier, bool(config.drives))
    if config.wants_store or config.activation_tier not in (None, "device"):
        check_folders(config.drives)


def check_model(model: nn.Module) -> None:
    """Raises `ConfigError` or `UsageError` if an engine cannot take over `model`."""
    # Parameters without values and complex parameters are refused. A cast would drop imaginary parts.
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ConfigError(
                f"parameter {name} belongs to a lazy module and has no shape yet: call the model once with a batch "
                "before offload.initialize"
            )
        if parameter.is_complex():
            raise ConfigError(
                f"parameter {name} is {str(parameter.dtype).removeprefix('torch.')}, and offload stores real numbers; "
                "make the parameter of torch.view_as_real(values), and use torch.view_as_complex(parameter.float()) in "
                "the forward (complex buffers stay as they are)"
            )
    # An embedding with `max_norm` changes its own weight in its forward.
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ConfigError(
                f"{name or 'the model'} is an embedding with max_norm={module.max_norm:g}, which changes its weight in "
                "each forward; set max_norm to None, and shorten long rows between steps, under torch.no_grad()"
            )
    _check_quantized(model)
    check_shared_memory(model)
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if lost:
        raise ConfigError(
            f"buffer {lost[0]} is on the meta device, so its values are gone; build the model inside offload.init, "
            "which leaves buffers real, but a module that computes buffers from weights (spectral_norm, pruning) "
            "outside of it, on the CPU"
        )
    sparse = next(
        (name for name, buffer in persistent_buffers(model).items() if buffer.layout is not torch.strided), None
    )
    if sparse is not None:
        raise ConfigError(
            f"buffer {sparse} is sparse, and files hold dense tensors: register it with persistent=False where the "
            "constructor makes its values, or register its indices and values"
        )
    left = next((name for name, parameter in model.named_parameters() if is_dtensor(parameter)), None)
    if left is not None:
        raise ConfigError(
            f"parameter {left} is a DTensor, which offload.initialize takes alone: give this call a model before "
            "parallelize_module"
        )
    _check_absent(model)
    if any(isinstance(parameter, PagedParameter) or is_under_engine(parameter) for parameter in model.parameters()):
        raise UsageError(
            "this model is under an engine already, and destroy() does not restore its weights: build a new model"
        )


def _check_quantized(model: nn.Module) -> None:
    named = dict(model.named_parameters())
    waiting = [name for name, parameter in named.items() if waits_for_quantization(parameter)]
    if waiting:
        raise ConfigError(
            f"{count_of(len(waiting), 'weight is', 'weights are')} of a class of bitsandbytes and not quantized yet, "
            f'the first is {waiting[0]}: move the model to a device, model.to("cpu") for one, before offload.initialize'
        )
    packed = [name for name, parameter in named.items() if is_packed(parameter)]
    if packed:
        raise ConfigError(
            f"{count_of(len(packed), 'weight was', 'weights were')} packed for the CPU by bitsandbytes, as the model "
            f"ran in evaluation mode, the first is {packed[0]}; load the model anew and call offload.initialize "
            "before the model runs"
        )
    training = [
        name
        for name, parameter in named.items()
        if parameter.requires_grad and (is_of_bitsandbytes(parameter) or inner_tensors(parameter) is not None)
    ]
    if training:
        raise ConfigError(
            f"{count_of(len(training), 'parameter that shall train is', 'parameters that shall train are')} quantized, "
            f"the first is {training[0]}; offload trains bf16, fp16 and fp32 weights: freeze quantized ones by "
            "requires_grad_(False) and train adapters on them, or give the model before quantization"
        )


def _check_absent(model: nn.Module) -> None:
    """Raises `ConfigError` if a parameter has lost its values, or has another shape than its tensor in the file.

    A module that computes its weights from another module's weights also loses its values if those are not read yet.
    """
    named = dict(model.named_parameters())
    lost = [name for name, parameter in named.items() if parameter.is_meta and not is_deferred(parameter)]
    if lost and any(map(is_deferred, named.values())):
        raise ConfigError(
            f"parameter {lost[0]} was put on the meta device outside of offload.init and load_pretrained, or computed "
            "from another parameter inside, so its values are gone; create the parameter on the CPU, or inside of "
            "offload.init; build a model that computes parameters from others outside of it"
        )
    for name, parameter in named.items():
        origin = origin_of(parameter)
        if origin is not None and origin.shape != tuple(parameter.shape):
            raise ConfigError(
                f"parameter {name} has shape {list(parameter.shape)} now, but load_pretrained found shape "
                f"{list(origin.shape)} in the folder; resize the model before its folder is written, or build the "
                "model in its new size and load with ignore_mismatched_sizes=True"
            )


def _check_batch_norm(
    model: nn.Module, mode: Mode, device: torch.device, buffer_dtype: torch.dtype | None, in_fp32: Collection[str] = ()
) -> None:
    """Raises `ConfigError` if a BatchNorm on the CPU has statistics in another dtype than its weights.

    torch's CPU kernel also refuses such a BatchNorm, but only in the first forward.
    """
    if device.type != "cpu":
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and isinstance(module.running_mean, torch.Tensor):
            # If `buffer_dtype` is given, the engine casts buffers to it when it takes the model over.
            have = buffer_dtype or module.running_mean.dtype
            dtype = torch.float32 if f"{name}.weight" in in_fp32 else mode.weight_dtype
            if module.weight is not None and have != dtype:
                raise ConfigError(
                    f"{name} is a BatchNorm, whose statistics are {have} and whose weights are {dtype}, which torch "
                    f'cannot compute with on the CPU; set "data_types": {{"buffer_dtype": "{dtype_name(dtype)}"}}'
                )


def _check_same(
    world: World,
    config: Config,
    batch: Batch,
    mode: Mode,
    layouts: Sequence[UnitLayout],
    model: nn.Module,
    facts_of_rule: Mapping[str, Any],
) -> None:
    """Raises `ConfigError` on every rank if two processes differ in config or model. Collective."""
    if world.everyone.size == 1:
        return
    # These facts decide the layout, the collectives or the numbers. Values of weights and buffers may differ, because
    # all ranks receive rank 0's values. Paths may differ, because each machine has its own drives.
    facts = {
        "batch": list(batch),
        "weights": config.weight_tier,
        "states": config.optimizer_tier,
        "mode": mode.name,
        "accumulation dtype": config.data_types.grad_accum_dtype,
        "gradients": config.offload.gradients,
        "clip": config.gradient_clipping,
        "torch_autocast": config.torch_autocast.model_dump(),
        "auto_cast": config.casts_inputs is not False,
        "fp16": config.fp16.model_dump(exclude={"auto_cast"}) if config.dtype == "fp16" else None,
        "buffer_dtype": config.data_types.buffer_dtype,
        "seed": config.offload.seed,
        "on_nonfinite": config.offload.on_nonfinite,
        # Each column of tensor parallelism has a run of its own, whose name ends with the suffix.
        "run": config.offload.run.removesuffix(world.suffix),
        "durability": repr(config.offload.durability),
        "resume": config.offload.resume,
        "blocks computed again": [
            config.activation_tier is not None,
            config.activation_checkpointing.number_checkpoints,
        ],
        "units": [layout.name for layout in layouts],
        # Shards of tensor parallelism may differ in size.
        "parameters": [
            [segment.name, "sharded" if world.is_sharded(segment.parameter) else list(segment.shape), segment.trainable]
            for layout in layouts
            for segment in layout.segments
        ],
        "frozen": config.offload.frozen,
        # Settings that decide the order, the lengths and the dtypes of messages between ranks.
        **{name: getattr(config.zero_optimization, name) for name in _OF_COLLECTIVES},
        "communication_data_type": config.communication_data_type,
        "schedule": config.offload.schedule,
        **facts_of_rule,
        "quantized weights": [[s.name, s.kind, *s.inner] for layout in layouts for s in layout.segments if s.inner],
        "buffers": [[name, str(b.dtype), list(b.shape)] for name, b in model.named_buffers()],
        "weights given": [name for name, parameter in model.named_parameters() if not parameter.is_meta],
        "weights to be read": [
            name for name, parameter in model.named_parameters() if origin_of(parameter) is not None
        ],
    }
    # Every rank receives all facts and raises the same error, so that no rank waits for another.
    everyone = world.everyone.share(facts)
    for name in everyone[0]:
        for rank, rank_facts in enumerate(everyone):
            first = world.first_of_stage(rank) if name in _OF_LAYERS else 0
            if rank_facts[name] != everyone[first][name]:
                value, expected = _first_difference(rank_facts[name], everyone[first][name])
                raise ConfigError(
                    f"the {name} of rank {rank} and of rank {first} differ: {value}, not {expected}; "
                    "give every rank the same model and config"
                )


_OF_COLLECTIVES = (
    *("stage", "overlap_comm", "zero_hpz_partition_size"),
    *("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"),
)
"""Keys of ZeRO that decide what ranks send to each other, and when."""
_SHORT = 4
"""Longest list that an error message shows in full."""
_OF_LAYERS = (
    *("blocks computed again", "units", "parameters", "quantized weights", "buffers"),
    *("weights given", "weights to be read"),
)
"""Facts that may differ between the stages of a pipeline, and so are compared only within a stage."""


def _first_difference(value: Any, expected: Any) -> tuple[str, ...]:
    """Returns two different values as short texts. Of two long lists, returns the first items that differ."""
    if isinstance(value, list) and isinstance(expected, list) and max(len(value), len(expected)) > _SHORT:
        pairs = itertools.zip_longest(value, expected, fillvalue="none more")
        value, expected = next((entry, expected_entry) for entry, expected_entry in pairs if entry != expected_entry)
    return tuple(text if len(text) <= 100 else f"{text[:80]}…" for text in (str(value), str(expected)))


def check_groups(world: World, shards: FoundShards, device: torch.device) -> None:
    """Raises `ConfigError` if the groups of tensor parallelism differ from the groups that an engine forms."""
    for name, form in shards.dtensors.items():
        if form.mesh.device_type != device.type:
            raise ConfigError(
                f"parameter {name} is a DTensor on a mesh of {form.mesh.device_type}, and this engine computes on "
                f'{device.type}: make the mesh by init_device_mesh("{device.type}", …)'
            )
    if not world.divides_model or shards.data_ranks is None:
        return
    column = world.ranks.members
    if set(shards.data_ranks) != set(column):
        raise ConfigError(
            f"mpu= has the data-parallel group {list(shards.data_ranks)}; expected {list(column)}, the processes with "
            "the same place in their groups of model parallelism"
        )


def check_tensor_parallel(plan: Plan) -> None:
    """Raises `ConfigError` for features that tensor parallelism does not support."""
    if plan.world.tensor_size == 1:
        return
    segments = [segment for layout in plan.layouts for segment in layout.segments]
    whole = not plan.memory.mode.rule.elementwise
    codes = plan.config.zero_optimization.sends_codes
    refused = (
        (whole, "an optimizer that needs whole parameters", "take AdamW, Adam, Lion, Adagrad or SGD with a kernel"),
        (any(segment.form or segment.inner for segment in segments), "quantized frozen weights", 'leave "frozen" out'),
        (plan.units.experts, "experts that are units of their own", 'set "experts" to "whole" or leave it out'),
        (plan.tiled_mlps, "tiled MLPs", 'leave "tile_mlp" out'),
        # A block of codes may span a divided and an undivided parameter. The ranks' copies of the latter would then
        # differ.
        (codes, "codes of weights and gradients", 'leave the keys "zero_quantized_..." out'),
    )
    for holds, what, cure in refused:
        if holds:
            raise ConfigError(f"tensor parallelism does not go together with {what} here: {cure}")


def check_nodes(config: Config, world: World) -> None:
    """Raises `ConfigError` if the processes cannot be divided into nodes that keep a secondary partition."""
    size = config.zero_optimization.zero_hpz_partition_size
    if size == 1:
        return
    if world.divides_model:
        raise ConfigError(
            "zero_optimization.zero_hpz_partition_size divides all processes into nodes, and with tensor parallelism "
            "or a pipeline not all of them share weights: leave it out"
        )
    check_node(size, world.ranks.size)


# -- runs on the drives --------------------------------------------------------------------------------
#
# At its start, an engine looks on the drives for a run to resume or replace, for room, and for leftovers of other runs.


_COLUMN = re.compile(r"(?:-pp\d+of(\d+))?(?:-tp\d+of(\d+))?")
"""Pattern of the end of a run's name, if the run is one column of a pipeline or of tensor parallelism."""
_SHOWN = 5
"""Largest number of other runs that a notice names."""


def _resume(config: Config, on_disk: bool) -> tuple[bool, tuple[str, ...]]:
    """Returns True if this start resumes a run, and a notice if it replaces one.

    Raises `StoreError` if the config forbids both, or asks to resume and there is nothing to resume.
    """
    offload = config.offload
    if not config.drives or not (on_disk or offload.wants_store):
        # A run without a store has no commits, so nothing exists that this start could resume.
        if offload.resume == "must":
            raise StoreError('"resume" is must, but this configuration keeps no store to resume from')
        if offload.resume != "auto" or not config.drives or not run_status(config.drives, offload.run).exists:
            return False, ()
        if offload.durability == "auto":
            return True, ()  # the run had a store, and memory or tiers have changed since: keep the store
        raise StoreError(
            f"{os.path.join(config.drives[0], offload.run)} contains a run, but this configuration keeps no "
            'store: give the config the tiers of the run, or set "durability": "step", or choose another run name'
        )
    status = run_status(config.drives, offload.run)
    folder = os.path.join(config.drives[0], offload.run)
    if status.exists and offload.resume in ("never", "restart"):
        # A run in use must not be deleted under the process that trains it.
        check_unused(Path(folder))
        # A closed run may be replaced. `check_replaced` checks later whether its last step was saved.
        if not (status.closed or offload.resume == "restart"):
            raise StoreError(
                f"{folder} holds a run that did not end, or that was kept (--keep, destroy(remove=False)); resume the "
                'run with "resume": "auto" in the "offload" block, or start over with "resume": "restart" there '
                "(offload train: --resume auto, --resume restart), or delete the run with "
                f"`{shell_command('rm', folder)}`, or choose another run name"
            )
        size = format_size(find_removal(Path(folder)).nbytes)
        how = "which was closed at its end" if status.closed else "which did not end"
        keeps = '"resume": "auto" would resume such a run, another run name keeps it'
        return False, (f"the run in {folder} ({size}), {how}, is replaced; {keeps}",)
    if status.finished is not None and not status.exists and offload.resume not in ("never", "restart"):
        raise StoreError(
            f"{folder} was finished at step {status.finished.get('steps')}, so no step is left to resume; choose "
            'another run name, or start over with "resume": "never" in the "offload" block (offload train: '
            "--resume never)"
        )
    if not status.exists and offload.resume == "must":
        raise StoreError(f'"resume" is must, but {folder} holds no committed step')
    return status.exists, ()


def check_division(drives: Sequence[str], run: str, suffix: str, resume: str) -> None:
    """Raises `StoreError` if tensor parallelism or a pipeline divides the run to resume otherwise than this start.

    Raises `ConfigError` if the system takes no path as that of the drive.

    `suffix` ends the run's name and names this column, such as "-tp0of2" or "-pp0of2". It is empty if neither divides
    the model.
    """
    if not drives or resume not in ("auto", "must"):
        return
    check_name(Path(drives[0]), '"nvme_path"')
    for folder in sorted(Path(drives[0]).glob(f"{run}*")):
        end = folder.name.removeprefix(run)
        # All columns of one grid have the same sizes in their names. They differ only in their coordinates.
        is_ours = _COLUMN.fullmatch(end) is not None
        if not is_ours or _size(end) == _size(suffix) or not run_status(drives, folder.name).exists:
            continue
        raise StoreError(
            f"{folder} is a run with {_size(end)}, and this start has {_size(suffix)}: resume with "
            "the division that the run had, or choose another run name"
        )


def _size(end: str) -> str:
    """Returns words for the sizes of the pipeline and of tensor parallelism. `end` is the end of a run's name."""
    match = _COLUMN.fullmatch(end)
    assert match is not None, "the names of other runs were left out"
    pipeline, tensor = match.groups()
    tensors = f"tensor parallelism of {tensor}" if tensor else "no tensor parallelism"
    return f"a pipeline of {pipeline} and {tensors}" if pipeline else tensors


def _no_room(placed: MemoryPlan, ranks: Ranks) -> str | None:
    """Returns a notice if the drives of any rank have no room for two slots, else None. Collective."""
    drives = placed.request.config.drives
    shortages = ranks.share(find_shortage(drives, placed.two_slots_nbytes * ranks.here))
    short = next((Shortage(*shortage) for shortage in shortages if shortage is not None), None)
    if short is None:
        return None
    return (
        f"durability none: two slots need {format_size(short.need)}, {short.path} has {format_size(short.free)} free; "
        "one slot is used and overwritten in place, so a killed run cannot be resumed"
    )


def check_replaced(folder: Path, spec: StoreSpec, job: Mapping[str, Any]) -> None:
    """Checks that nothing is lost if this start replaces the run in `folder`, which was closed at its end.

    Nothing is lost if the user has saved the last step, or if this start has the same job and so repeats the run.
    Raises `StoreError` if the last step was not saved, and the run had another or an unknown job. Nothing was changed.
    """
    note = read_closed(folder)
    if note is None or note.get("saved"):
        return
    manifest = next(
        (run_folder.manifest for run_folder in map(look, rank_folders(folder)) if run_folder.manifest is not None), None
    )
    layout = "its manifest cannot be read" if manifest is None else layout_difference(spec, manifest.spec)
    differences = [str(Differences(note.get("job", {}), job)), layout or ""]
    if "job" not in note:
        differences = [f"its note {CLOSED} does not say what it was"]
    if not any(differences):
        return
    raise StoreError(
        f"{folder} holds a run that ended at step {note.get('steps', '?')} and that nothing has saved since, such as "
        f"save_checkpoint or save_pretrained, and this start is another job: {', '.join(filter(None, differences))}. "
        'Give this start another run name ("run" in the "offload" block, offload train: --run) or another nvme_path, '
        'or replace the run with "resume": "restart" there (--resume restart). '
        f"`{shell_command('export', folder, 'FOLDER')}` writes its weights, and any start may then replace it"
    )


def _about_folders(config: Config) -> tuple[str, ...]:
    """Returns warnings about folders that may be on the wrong drive, and a notice about other runs in the folders.

    The notice lists runs that take room and that no process uses. This function deletes none of them.
    """
    misplaced = [line for line in folder_notices(config.drives) if not isinstance(line, Remark)]
    lines = misplaced if config.wants_store else []
    runs = other_runs(config.drives, config.offload.run)
    if not runs:
        return tuple(lines)
    shown = ", ".join(f"{run.path} ({format_size(run.nbytes)})" for run in runs[:_SHOWN])
    more = f" and {len(runs) - _SHOWN} more" if len(runs) > _SHOWN else ""
    are = "other run that no process uses takes" if len(runs) == 1 else "other runs that no process uses take"
    return (
        *lines,
        Remark(
            f"{len(runs)} {are} {format_size(sum(run.nbytes for run in runs))}: {shown}{more}; "
            f"`{shell_command('inspect', runs[0].path.parent)}` describes them, `offload rm` deletes one"
        ),
    )


def check_fits(progress: Snapshot, model: nn.Module, optimizer: Optimizer) -> None:
    """Raises `StoreError` if buffers, further entries of the state dict or parameter groups differ from the run's."""
    shapes = {name: list(buffer.shape) for name, buffer in persistent_buffers(model).items()}
    saved = {name: list(buffer.shape) for name, buffer in progress.buffers.items()}
    if shapes != saved:
        name = next(name for name in {**shapes, **saved} if shapes.get(name) != saved.get(name))
        raise StoreError(f"buffer {name} has shape {saved.get(name)} in the run and {shapes.get(name)} in this model")
    ModuleEntries(model, commits=False).check_fits(progress.entries, "the run")
    if len(progress.facts["groups"]) != len(optimizer.param_groups):
        raise StoreError(
            f"the run contains {count_of(len(progress.facts['groups']), 'group')} of parameters, this optimizer "
            f"contains {len(optimizer.param_groups)}"
        )
