"""Checks of a model before an engine takes it over, and of the equality of all ranks' arguments."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from offload.activations.checkpoints import check_tier
from offload.config import Batch, Config
from offload.distributed.process_group import Ranks
from offload.engine.params.deferred_parameter import is_deferred, origin_of
from offload.engine.params.opaque.paged_tensor import is_under_engine
from offload.engine.params.paged_parameter import PagedParameter
from offload.engine.setup.shared_memory import check_shared_memory
from offload.errors import ConfigError, UsageError
from offload.hardware.mounts import check_folders
from offload.layout.flat_layout import Segment, UnitLayout
from offload.layout.frozen import is_of_bitsandbytes, is_packed, waits_for_quantization
from offload.layout.modes import LAMB, MUON, Mode, dtype_name
from offload.layout.tiers import check_node
from offload.optimizers.matrices import in_bf16
from offload.parallel.sharded_params import FoundShards, is_dtensor
from offload.parallel.tensor import TensorParallel
from offload.sizes import count_of
from offload.swapper.memory.device import Device
from offload.torch_internals import inner_tensors


def check_alone(config: Config, model: nn.Module, grid: TensorParallel | None) -> None:
    """Checks what a rank can check without the others.

    Args:
        config: The whole config.
        model: The model.
        grid: The place of this process in the grid of tensor parallelism; None without one.

    Raises:
        ConfigError: If the model, a tier or a folder for swap files cannot be used.
    """
    check_model(model)
    _check_partitioned_activations(config, grid)
    check_tier(config.activation_tier, bool(config.drives))
    if config.wants_store or config.activation_tier not in (None, "device"):
        check_folders(config.drives)


def _check_partitioned_activations(config: Config, grid: TensorParallel | None) -> None:
    """Raises `ConfigError` if inputs are to be partitioned over ranks that share a batch.

    Data-parallel ranks have inputs of their own: there is nothing to partition, in DeepSpeed either.
    """
    if config.activation_checkpointing.partition_activations and grid is not None and grid.size > 1:
        raise ConfigError(
            "activation_checkpointing.partition_activations divides an input over the ranks of a model-parallel group, "
            f"of which this run has {grid.size}; that is not supported: leave it out, and set "
            '"activations" to "cpu" in the "offload" block to free device memory'
        )


def check_same(
    ranks: Ranks | None,
    config: Config,
    batch: Batch,
    mode: Mode,
    layouts: Sequence[UnitLayout],
    model: nn.Module,
    device: Device,
    grid: TensorParallel | None,
) -> None:
    """Compares config and model of all processes. Collective.

    Called before the disks are inspected: ranks with different configs would look for different runs.

    Args:
        ranks: All processes; None if there is only one.
        config: The whole config.
        batch: Sizes of batches.
        mode: States and dtypes.
        layouts: All units.
        model: The model before it is taken over.
        device: The compute device.
        grid: The place of this process in tensor parallelism; None without it.

    Raises:
        ConfigError: If the ranks differ, on every rank.
    """
    if ranks is None:
        return
    # Facts that decide the layout, the collectives or the numbers. Values of weights and buffers are not among them:
    # all ranks receive those of rank 0. Paths may differ: each machine has its own drives.
    facts = {
        "batch": list(batch),
        "weights": config.weight_tier,
        "states": config.optimizer_tier,
        "mode": mode.name,
        "accumulation dtype": config.data_types.grad_accum_dtype,
        "clip": config.gradient_clipping,
        "torch_autocast": config.torch_autocast.model_dump(),
        "auto_cast": config.casts_inputs is not False,
        "fp16": config.fp16.model_dump(exclude={"auto_cast"}) if config.dtype == "fp16" else None,
        "buffer_dtype": config.data_types.buffer_dtype,
        "seed": config.offload.seed,
        "on_nonfinite": config.offload.on_nonfinite,
        # The columns of tensor parallelism have runs of their own.
        "run": config.offload.run.removesuffix("" if grid is None else grid.suffix),
        "durability": repr(config.offload.durability),
        "resume": config.offload.resume,
        "blocks computed again": [
            config.activation_tier is not None,
            config.activation_checkpointing.number_checkpoints,
        ],
        "units": [layout.name for layout in layouts],
        "parameters": [_compared(segment, grid) for layout in layouts for segment in layout.segments],
        "frozen": config.offload.frozen,
        # What decides the order, the lengths and the dtypes of what ranks send.
        **{name: getattr(config.zero_optimization, name) for name in _OF_COLLECTIVES},
        "communication_data_type": config.communication_data_type,
        "schedule": config.offload.schedule,
        # Ranks send each other matrices of Muon in this dtype.
        "dtype of Muon's products": ("bf16" if in_bf16(device) else "fp32") if mode.optimizer == MUON else None,
        "quantized weights": [[s.name, s.kind, *s.inner] for layout in layouts for s in layout.segments if s.inner],
        "buffers": [[name, str(b.dtype), list(b.shape)] for name, b in model.named_buffers()],
        "weights given": [name for name, parameter in model.named_parameters() if not parameter.is_meta],
        "weights to be read": [
            name for name, parameter in model.named_parameters() if origin_of(parameter) is not None
        ],
    }
    # Every rank receives all facts and raises the same error, so that no rank waits for another.
    _compare(ranks.share(facts), grid)


_OF_COLLECTIVES = (
    *("stage", "overlap_comm", "zero_hpz_partition_size"),
    *("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"),
)
"""Keys of ZeRO that decide what ranks send each other, and when."""
_SHORT = 4
"""Items of a list up to which a message has all of them."""
_OF_LAYERS = (
    *("blocks computed again", "units", "parameters", "quantized weights", "buffers"),
    *("weights given", "weights to be read"),
)
"""Facts in which the stages of a pipeline differ."""


def _compare(everyone: Sequence[dict[str, Any]], grid: TensorParallel | None) -> None:
    """Raises `ConfigError` if the facts of any rank differ from those of rank 0, or of the first of its stage."""
    for name in everyone[0]:
        for rank, others in enumerate(everyone):
            first = 0 if grid is None or name not in _OF_LAYERS else grid.first_of_stage(rank)
            mine = everyone[first][name]
            if others[name] != mine:
                theirs, own = _first_difference(others[name], mine)
                raise ConfigError(
                    f"the {name} of rank {rank} and of rank {first} differ: {theirs}, not {own}; "
                    "give every rank the same model and config"
                )


def _first_difference(theirs: Any, own: Any) -> tuple[str, str]:
    """Returns two values that differ as short texts: of lists, which may have thousands of items, the first such."""
    if isinstance(theirs, list) and isinstance(own, list) and max(len(theirs), len(own)) > _SHORT:
        pairs = itertools.zip_longest(theirs, own, fillvalue="none more")
        theirs, own = next((one, other) for one, other in pairs if one != other)
    return _brief(theirs), _brief(own)


def _compared(segment: Segment, grid: TensorParallel | None) -> list[Any]:
    """Returns what all processes must have alike of a parameter. Shards of tensor parallelism may differ in size."""
    sharded = grid is not None and grid.is_sharded(segment.parameter)
    return [segment.name, "sharded" if sharded else list(segment.shape), segment.trainable]


def check_groups(grid: TensorParallel | None, shards: FoundShards, device: torch.device) -> None:
    """Raises `ConfigError` if the groups of tensor parallelism are not those that an engine forms.

    Args:
        grid: The place of this process; None without tensor parallelism.
        shards: What the model and `mpu` say.
        device: The device on which the model will compute.
    """
    for name, form in shards.dtensors.items():
        if form.mesh.device_type != device.type:
            raise ConfigError(
                f"parameter {name} is a DTensor on a mesh of {form.mesh.device_type}, and this engine computes on "
                f'{device.type}: make the mesh by init_device_mesh("{device.type}", …)'
            )
    if grid is None or shards.data_ranks is None:
        return
    column = (grid.everyone.rank,) if grid.zero is None else grid.zero.members
    if set(shards.data_ranks) != set(column):
        raise ConfigError(
            f"mpu= has the data-parallel group {list(shards.data_ranks)}; expected {list(column)}, the processes with "
            "the same place in their groups of model parallelism"
        )


def check_tensor_parallel(
    grid: TensorParallel | None,
    mode: Mode,
    layouts: Sequence[UnitLayout],
    experts: bool,
    tiled: bool,
    codes: bool,
) -> None:
    """Raises `ConfigError` for what does not go together with tensor parallelism.

    Args:
        grid: The place of this process in the grid; all is allowed without tensor parallelism.
        mode: States and dtypes.
        layouts: All units.
        experts: True if experts of the model are units.
        tiled: True if the config tiles MLPs.
        codes: True if ranks send codes.
    """
    if grid is None or grid.size == 1:
        return
    segments = [segment for layout in layouts for segment in layout.segments]
    whole = mode.steps_whole or mode.optimizer == LAMB
    refused = (
        (whole, "an optimizer that needs whole parameters", "take AdamW, Adam, Lion, Adagrad or SGD with a kernel"),
        (any(each.form or each.inner for each in segments), "quantized frozen weights", 'leave "frozen" out'),
        (experts, "experts that are units of their own", 'name the class of their module in "units"'),
        (tiled, "tiled MLPs", 'leave "tile_mlp" out'),
        # A block may span a parameter that is divided and one that is whole, whose copies in a row would differ.
        (codes, "codes of weights and gradients", 'leave the keys "zero_quantized_..." out'),
    )
    for holds, what, cure in refused:
        if holds:
            raise ConfigError(f"tensor parallelism does not go together with {what} here: {cure}")


def check_nodes(config: Config, ranks: Ranks | None, grid: TensorParallel | None) -> None:
    """Raises `ConfigError` if the processes cannot be divided into nodes that keep a secondary partition.

    Args:
        config: The config.
        ranks: All processes; None if there is only one.
        grid: The place of this process in a grid of pipeline and tensor parallelism; None without it.
    """
    size = config.zero_optimization.zero_hpz_partition_size
    if size == 1:
        return
    if grid is not None:
        raise ConfigError(
            "zero_optimization.zero_hpz_partition_size divides all processes into nodes, and with tensor parallelism "
            "or a pipeline not all of them share weights: leave it out"
        )
    check_node(size, 1 if ranks is None else ranks.size)


def _brief(value: Any) -> str:
    """Returns a value as text, shortened for a message."""
    text = str(value)
    return text if len(text) <= 100 else f"{text[:80]}…"


def check_model(model: nn.Module) -> None:
    """Raises `ConfigError` or `UsageError` if an engine cannot take over `model`."""
    _check_values(model)
    _check_renormed(model)
    _check_quantized(model)
    check_shared_memory(model)
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if lost:
        raise ConfigError(
            f"buffer {lost[0]} is on the meta device, so its values are gone; build the model inside offload.init, "
            "which leaves buffers real, but a module that computes buffers from weights (spectral_norm, pruning) "
            "outside of it, on the CPU"
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


def _check_values(model: nn.Module) -> None:
    """Raises `ConfigError` if a parameter has no values yet, or complex ones, which a cast would make real."""
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


def _check_renormed(model: nn.Module) -> None:
    """Raises `ConfigError` if an embedding changes its own weight in its forward, as one with `max_norm` does."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ConfigError(
                f"{name or 'the model'} is an embedding with max_norm={module.max_norm:g}, which changes its weight in "
                "each forward; set max_norm to None, and shorten long rows between steps, under torch.no_grad()"
            )


def _check_quantized(model: nn.Module) -> None:
    """Raises `ConfigError` if a quantized parameter is not quantized yet, or shall train."""
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
    """Raises `ConfigError` if a parameter has lost its values, or its shape differs from its file's.

    Values are also lost in a module that is made from another module's weights before these are read.
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


def check_batch_norm(model: nn.Module, mode: Mode, device: torch.device, buffer_dtype: torch.dtype | None) -> None:
    """Raises `ConfigError` if a BatchNorm on the CPU has statistics in another dtype than its weights.

    torch's CPU kernel refuses them too, but only in the first forward.

    Args:
        model: The model.
        mode: Gives the dtype of weights.
        device: The compute device.
        buffer_dtype: Configured dtype of buffers; None leaves them unchanged.
    """
    dtype = mode.weight_dtype
    if device.type != "cpu":
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and isinstance(module.running_mean, torch.Tensor):
            # `buffer_dtype` is applied when the engine takes the model over, so it decides if given.
            have = buffer_dtype or module.running_mean.dtype
            if module.weight is not None and have != dtype:
                raise ConfigError(
                    f"{name} is a BatchNorm, whose statistics are {have} and whose weights are {dtype}, which torch "
                    f'cannot compute with on the CPU; set "data_types": {{"buffer_dtype": "{dtype_name(dtype)}"}}'
                )
