"""`initialize`: from a model and a config to an engine, in four values.

    config    what the user asks for, parsed and checked by itself
    world     all processes, and the position of this process           `join`
    plan      every decision; nothing has been changed so far           `make_plan`
    engine    files, memory, threads and hooks                          `assemble`, in `assembly`

If a step fails, the steps before it are undone, and the other ranks receive the reason.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset

from offload.checkpointing import with_configured
from offload.config import Batch, Config, effective, load_config, resolve_batch
from offload.distributed.gathers import form_node
from offload.distributed.process_group import UNABLE, Ranks, check_same, join_ranks, meet_others, stay_away
from offload.distributed.world import World
from offload.engine import build_optimizer
from offload.engine.assembly import STARTING, assemble
from offload.engine.compiled_blocks import compiled_blocks
from offload.engine.data import Loader, check_data, load
from offload.engine.dtype_mismatch import precision_notices
from offload.engine.engine import Engine
from offload.engine.fp8_layers import fp8_layers
from offload.engine.keywords import PlainKeywords, plain_config, refuse
from offload.engine.optimizer import Optimizer, check_options, refuse_others
from offload.engine.plan import (
    Plan,
    check_division,
    check_groups,
    check_model,
    check_nodes,
    check_tensor_parallel,
    decide,
    frozen_places,
)
from offload.engine.saved_state import ModuleEntries
from offload.engine.snapshot import keep_generators
from offload.errors import ConfigError
from offload.layout.pass_order import LAYER_MAJOR, MICRO_BATCH_MAJOR
from offload.layout.peak_memory import BesideBudgets
from offload.model_io.saved_names import saved_names
from offload.notices import announce
from offload.parallel.experts import form_experts
from offload.parallel.sequence import check_model as check_sequences
from offload.parallel.sequence import check_units, form_groups
from offload.parallel.sharded_params import FoundShards, Site, find_shards, taken_over
from offload.parallel.stages import PipelineStages, check_pipeline, pipeline_place
from offload.parallel.tensor import form_grid, form_row
from offload.parallel.tensor_plan import planned_shards
from offload.precision import warn_if_slow
from offload.quantized.tensors import with_adopted_buffers
from offload.sizes import count_of, format_size
from offload.swapper.memory.device import Device, compute_device, let_segments_grow, open_device

if TYPE_CHECKING:
    from typing_extensions import Unpack


logger = logging.getLogger("offload")


class Initialized(NamedTuple):
    """Result of `initialize`: the 4-tuple of DeepSpeed."""

    engine: Engine
    """The engine, which the training loop calls."""
    optimizer: Optimizer
    """Parameter groups, whose settings may be changed between steps; `engine.step()` steps it."""
    loader: Loader | None
    """Batches of `training_data` on the engine's device, each rank's own rows; None without data."""
    lr_scheduler: Any
    """The schedule of the arguments or of the config, which `engine.step()` advances; None if there is no schedule."""


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    config_params: Any = None,
    *,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    distributed_port: int | None = None,
    mesh_param: Any = None,
    **plain: Unpack[PlainKeywords],
) -> Initialized:
    """Returns an engine over `model`, as `deepspeed.initialize` does: (engine, optimizer, loader, lr_scheduler).

    The engine takes over the parameters: placeholders outside of forward and backward. All ranks must call it.

    Args:
        args: Namespace whose `deepspeed_config` is read if `config` and `config_params` are None.
        model: The model to train.
        optimizer: One of torch's that has not stepped, a callable that makes one from the parameters, or None for the
            config's. An optimizer without a kernel runs unchanged, on the CPU.
        model_parameters: Parameters or groups for the config's optimizer or the callable; None for all that train.
        training_data: Dataset to load batches from; without it the loader is None.
        lr_scheduler: An object with `step()`, a callable that makes one from the optimizer, or None for the config's.
        collate_fn: Makes a batch from samples; None for torch's default.
        config: Path of a DeepSpeed JSON file, or its content as a dict.
        config_params: Another name of `config`.
        mpu: Megatron's `parallel_state`, whose groups divide the parameters that it has marked; None without it.
        dist_init_required: For compatibility; None or a bool, without effect.
        distributed_port: For compatibility; None or the launcher's port.
        mesh_param: For compatibility; must be None.
        **plain: Keywords that stand for a config: weights, states, path, host_memory, device_memory, dtype, and so on.

    Raises:
        ConfigError: If the config is wrong or does not fit the model. This and the following come before any change.
        BudgetError: If a memory budget is too small.
        StoreError: If a disk is too small, or the run on it does not fit.
        UsageError: If a compatibility keyword is refused, or the model is under an engine already.
        RankError: If another rank has ended before it made its engine.
    """
    return start(
        *(args, model, optimizer, model_parameters, training_data, lr_scheduler, collate_fn, config, config_params),
        *(mpu, dist_init_required, distributed_port, mesh_param, plain),
    )


def start(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    config_params: Any = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    distributed_port: int | None = None,
    mesh_param: Any = None,
    plain: Mapping[str, Any] = MappingProxyType({}),
    beside: Mapping[str, BesideBudgets] = MappingProxyType({}),
    whole_steps: bool = False,
) -> Initialized:
    """Returns what `initialize` returns, for a caller that knows `beside` and `whole_steps` of `decide`."""
    # This call comes first, because an error before it would leave the other ranks waiting for this one.
    meet_others()
    try:
        refuse(dist_init_required=dist_init_required, distributed_port=distributed_port, mesh_param=mesh_param)
        if model is None and isinstance(args, nn.Module):
            args, model = None, args
        model = check_model_type(model)
        shards = find_shards(model, mpu)
        settings = with_configured(load_config(chosen_config(args, config, config_params, model, plain)))
        check_data(training_data, collate_fn)
        let_segments_grow(settings.offload.device)  # before CUDA is used
        device = open_device(compute_device(settings.offload.device))
    except BaseException as error:  # a Ctrl-C too: the process may live on, and the others would wait for it
        # The process group of this engine does not exist yet, so the reason goes through torch's store.
        stay_away(f"{type(error).__name__}: {error}")
        raise
    ranks = Ranks()
    try:
        ranks = join_ranks(device, settings.zero_optimization.mics_shard_size, settings.offload.debug.collectives)
        with STARTING, with_adopted_buffers(model):
            _check_same_sizes(settings, ranks)
            shards = planned_shards(model, settings, device.torch, shards, ranks.size)
            world = join(settings, model, device, ranks, shards)
            together = bool(shards.dtensors) or world.shares_batches or isinstance(model, PipelineStages)
            settings = _of_a_column(settings, world, one_at_a_time=together)
            if together and settings.compile.enabled:
                raise ConfigError(
                    "compiled blocks were not tried in a model that is divided among processes: leave compile out"
                )
            batch = resolve_batch(settings, world.data_ranks)
            _check_same_data(world.everyone, training_data)
            # Layers are replaced before they are compiled.
            converted = fp8_layers(model, settings, device.torch)
            with converted, compiled_blocks(model, settings), taken_over(model, shards) as taken:
                taken.translate_optimizer(optimizer)
                groups = build_optimizer.choose(
                    settings.optimizer, model, optimizer, taken.translated(model_parameters)
                )
                plan = make_plan(settings, batch, model, device, world, groups, taken.sites, beside, whole_steps)
                # From now on the weights leave the model, and no error could bring them back.
                taken.keep()
                schedule, notices = build_optimizer.choose_scheduler(settings.scheduler, lr_scheduler, groups)
                notices = (*plan.notices, *notices, *groups.rule.notices())
                if optimizer is not None and settings.optimizer is not None:  # the user's wins, as in DeepSpeed
                    unused = settings.optimizer.type
                    notices += (f"the optimizer {unused} of the config is not used, because optimizer= is given",)
                plan = dataclasses.replace(plan, notices=notices)
                loader: Loader | None = None
                if training_data is not None:
                    rows = batch.micro, world.data_rank, world.data_ranks
                    seed, drop_last = settings.offload.seed, settings.dataloader_drop_last
                    loader = load(training_data, *rows, seed, collate_fn, device.torch, drop_last)
                engine = assemble(plan, model, groups, Engine, schedule, loader)
            if world.everyone.rank == 0:
                warn_if_slow(settings, device.torch, plan.resume)
                logger.info(effective(settings, batch, world.data_ranks))
                for notice in engine.notices:
                    announce(notice)
                logger.debug("the complete config: %s", json.dumps(engine.config, indent=2))
            # A step of another optimizer on these parameters would have no effect, so it raises from now on.
            refuse_others()
            return Initialized(engine, groups, loader, schedule)
    except BaseException as error:
        # The other ranks wait for this one, and receive the reason.
        ranks.close(f"{UNABLE}{type(error).__name__}: {error}")
        raise


def join(config: Config, model: nn.Module, device: Device, ranks: Ranks, shards: FoundShards) -> World:
    """Returns all processes that train together, and the position of this process. Collective.

    Raises `ConfigError` if the model or the config does not fit the processes.
    """
    # This comes before the first message, since each rank comes to the same result by itself.
    check_sequences(model, config)
    check_pipeline(model, config)
    world = form_grid(ranks, shards.row, shards.sharded, pipeline_place(model), shards.dims)
    check_groups(world, shards, device.torch)
    check_nodes(config, world)
    world = dataclasses.replace(world, sequence=form_groups(world, config.sequence_parallel_size))
    world = form_experts(world, config, model)
    if config.activation_checkpointing.partition_activations and world.tensor_size > 1:
        return dataclasses.replace(world, inputs=form_row(world))
    return world


def make_plan(
    config: Config,
    batch: Batch,
    model: nn.Module,
    device: Device,
    world: World,
    optimizer: Optimizer,
    sites: Sequence[Site],
    beside: Mapping[str, BesideBudgets],
    whole_steps: bool,
) -> Plan:
    """Returns every decision about an engine that trains. Collective. Changes nothing; drives are only inspected.

    The model has all its parameters, real or deferred. `beside` and `whole_steps` as in `decide`.

    Raises:
        ConfigError: If model, optimizer and config do not fit each other, or no commit could contain their state.
        BudgetError: If a budget is too small.
        StoreError: If the run on the drives does not fit the configured "resume".
    """
    check_options(optimizer)
    check_model(model)  # before the optimizer's own code meets parameters without a shape
    with keep_generators(device.torch):  # the optimizer's own code may draw in its dry run
        states = optimizer.rule.packed(build_optimizer.trainable_names(model))
    matrices = build_optimizer.matrices_by(optimizer, model)
    places = frozen_places(config, model, world)
    plan = decide(config, batch, model, device, world, optimizer.rule, states, matrices, places, beside, whole_steps)
    check_tensor_parallel(plan)
    check_units(world.sequence.size, bool(plan.units.experts))
    world = dataclasses.replace(world, node=form_node(world.ranks, plan.memory.parts.node.ranks))
    ModuleEntries(model, commits=bool(plan.memory.commit_every))  # refuses entries that no commit could contain
    notices = (*plan.notices, *_as_trained(plan, model))
    if world.divides_model and saved_names(model) is not None:
        notices += (
            f"{type(model).__name__} saves entries of its own, or under names of its own: with tensor parallelism or a "
            "pipeline, model files and exports have the names of the parameters, and no other entries",
        )
    notices += let_segments_grow(config.offload.device)
    return dataclasses.replace(plan, sites=tuple(sites), world=world, notices=notices)


def _of_a_column(loaded: Config, world: World, one_at_a_time: bool) -> Config:
    """Returns the config of a column of the grid, which is a run of its own.

    `one_at_a_time` is True if micro-batches must not take turns: the model computes with DTensors or is stages of a
    pipeline, or ranks share sequences.

    Raises:
        ConfigError: If micro-batches shall take turns.
        StoreError: If the run of this name was divided otherwise.
    """
    block, suffix = loaded.offload, world.suffix
    check_division(loaded.drives, block.run, suffix, block.resume)
    if not world.divides_model and not one_at_a_time:
        return loaded
    if block.schedule == LAYER_MAJOR:
        raise ConfigError(
            '"schedule": "layer_major" runs several micro-batches at once, which a model that is divided among '
            "processes cannot: leave it out with tensor parallelism, pipelines, sequence_parallel_size and "
            "expert_parallel"
        )
    changes = {"schedule": MICRO_BATCH_MAJOR, "run": f"{block.run}{suffix}"}
    return loaded.model_copy(update={"offload": block.model_copy(update=changes)})


def _check_same_sizes(config: Config, everyone: Ranks) -> None:
    """Raises `ConfigError` if ranks differ in the sizes of their groups, which would wait for each other. Collective.

    All ranks compare them, also ranks that ask for no groups.
    """
    sizes = config.sequence_parallel_size, config.tensor_parallel.autotp_size, config.expert_parallel.size
    shared = everyone.share(sizes, "compare the sizes of their groups")
    settings = "sequence_parallel_size", "tensor_parallel.autotp_size", "expert_parallel.autoep_size"
    for position, setting in enumerate(settings):
        check_same(setting, [of_rank[position] for of_rank in shared])


def _check_same_data(everyone: Ranks, data: Any) -> None:
    """Raises `ConfigError`, on all ranks, if data sets of two ranks differ in length. Collective."""
    lengths: list[int | None] = everyone.share(None if data is None else len(data))
    counted = {rank: length for rank, length in enumerate(lengths) if length is not None}
    first = next(iter(counted), 0)
    for rank, length in counted.items():
        if length != counted[first]:
            raise ConfigError(
                f"training_data= contains {count_of(counted[first], 'sample')} on rank {first} and {length} on rank "
                f"{rank}: give every rank the same data set, of which the loader takes each rank's own rows"
            )


def _as_trained(plan: Plan, model: nn.Module) -> tuple[str, ...]:
    """Returns notices if training differs from the model's own settings, or from older DeepSpeed with this config."""
    config, parts, mesh = plan.config, plan.memory.parts, plan.world.ranks.mesh
    lines: list[str] = []
    if "gradient_clipping" not in config.model_fields_set:
        why = "since the config does not say"
        if "gradient_clipping" in config.left_open:
            why = 'which "auto" means where no Trainer sets the number'
        lines.append(
            f"gradients are clipped to a global norm of {config.gradient_clipping:g}, {why}; "
            '"gradient_clipping": 0 turns clipping off, as in older DeepSpeed'
        )
    stage = config.zero_optimization.stage
    if mesh.shards > 1 and stage < 3:  # with one shard each rank holds all: the notice on replicas covers that
        reduced = "the numbers are the same"
        if parts.whole_gradients:
            reduced = (
                f"but micro-batches are added up on each rank, in {format_size(parts.reduction_nbytes)} of the "
                "device's memory, and each step is reduced once"
            )
        if stage == 0:
            reduced += '; "stage": 0 without "mics_shard_size" keeps all of them on each rank, as in DeepSpeed'
        gathers = "weights are gathered for each use"
        if config.weight_tier == "none":
            need, nbytes = plan.memory.placement.device_need, plan.memory.placement.device_nbytes
            gathers = "gathered weights stay on the device until their update"
            if nbytes < need.weights and need.most < need.weights:
                gathers = (
                    f"the device has no room for all weights ({format_size(need.weights)}), so each use may gather "
                    "them, as in stage 3"
                )
            elif nbytes < need.weights:
                gathers += ", as far as the first steps leave room"
        lines.append(
            f"ZeRO stage {stage} on {plan.world.ranks.size} ranks: weights, gradients and states are partitioned, and "
            f"{gathers}; {reduced}"
        )
    limit = config.zero_optimization.reduce_bucket_size
    if parts.reduction is not None and limit is not None:
        largest = max(sum(segment.numel for segment in unit.segments if segment.trainable) for unit in plan.layouts)
        if largest > limit:
            lines.append(
                f"ranks reduce the gradients of a unit together, as soon as they are complete: {largest} elements at "
                f'most, more than reduce_bucket_size ({limit}); name smaller modules in "units" to lower this'
            )
    node = config.zero_optimization.zero_hpz_partition_size
    if parts.node.nbytes:
        lines.append(
            f"each rank keeps 1/{node} of all weights on its device, {format_size(parts.node.nbytes)}, for "
            "gathers within a node (zero_hpz_partition_size); a step gathers each unit over all ranks once"
        )
    elif node > 1:
        lines.append(
            f"zero_hpz_partition_size has no effect: a node of {node} has all ranks, and their weights with them"
        )
    wide = next((name for name, parameter in model.named_parameters() if parameter.dtype == torch.float64), None)
    if wide is not None:
        masters = "" if config.dtype == "fp32" else ", with masters of 32 bits"
        lines.append(
            f"{wide} is float64, which is not supported: the model is trained in {config.dtype}{masters}; call "
            "model.float() before initialize to silence this message"
        )
    named_by_config = config.offload.keep_in_fp32 != "auto"
    return (*lines, *precision_notices(model, plan.memory.mode.weight_dtype, plan.units.in_fp32, named_by_config))


def check_model_type(model: Any) -> nn.Module:
    """Returns `model`; raises `ConfigError` if it is no module."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"initialize expects model, a torch.nn.Module, got {type(model).__name__}")
    return model


def chosen_config(
    args: Any, config: Any, config_params: Any, model: Any = None, plain: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """Returns the single config of the arguments of `initialize`; raises `ConfigError`."""
    configs = [c for c in (config, config_params, getattr(args, "deepspeed_config", None)) if c is not None]
    # Two configs are an error of their own.
    if plain and len(configs) < 2:
        return plain_config(model, configs[0] if configs else None, plain)
    if len(configs) != 1:
        raise ConfigError(
            f"expected one of config, config_params and args.deepspeed_config, got {len(configs)}; "
            f'give the path of a DeepSpeed JSON file or its content as a dict, or keywords such as states="nvme"'
        )
    return configs[0]
