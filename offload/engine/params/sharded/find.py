"""Search of a model for the parameters that tensor parallelism divides, before anything is changed.

Torch's `parallelize_module`, and transformers, make DTensors of them. Megatron marks ordinary parameters, and its
`parallel_state` (`mpu`) has the groups.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from offload.errors import ConfigError, UsageError

_MARKS = ("tensor_model_parallel", "model_parallel")
"""Attributes by which Megatron, and DeepSpeed with it, know a parameter of which each rank has another part."""
_OTHER_GROUPS = ("pipeline_model_parallel", "context_parallel", "expert_model_parallel")
"""Further dimensions of Megatron's, which an engine does not know."""
_SUMMED_BY_HOOKS = "replicated_with_grad_allreduce"
"""Style of transformers whose hooks add a gradient up when the engine has taken it."""


class DTensorForm(NamedTuple):
    """All of a DTensor but its memory."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def over(self, local: torch.Tensor) -> torch.Tensor:
        """Returns the DTensor over this process's memory. Its gradient arrives at `local` in these placements."""
        # As torch's own operators see it, and without communication: reduced to the placements is the gradient alone.
        dtensor: torch.Tensor = _tensor_module().DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )
        return dtensor

    def part_of(self, value: torch.Tensor, local_shape: torch.Size) -> torch.Tensor:
        """Returns this process's part of a DTensor or of a whole tensor; other tensors are returned as they are."""
        if is_dtensor(value):
            dtensor: Any = value
            part: torch.Tensor = dtensor.redistribute(self.mesh, self.placements).to_local()
            return part
        if value.shape != self.shape or value.shape == local_shape:
            return value
        # Each process cuts its own part out of its own copy.
        cut = _tensor_module().distribute_tensor(value.detach(), self.mesh, self.placements, src_data_rank=None)
        whole: torch.Tensor = cut.to_local()
        return whole


@dataclass(frozen=True, kw_only=True)
class FoundShards:
    """Tensor parallelism of a model, as this process finds it."""

    row: tuple[int, ...] = ()
    """The processes that compute together; empty if this one computes alone."""
    dtensors: Mapping[str, DTensorForm] = field(default_factory=dict)
    """The parameters that are DTensors, sharded or replicated, by name."""
    sharded: frozenset[str] = frozenset()
    """Names of the parameters of which each process of the row has another part."""
    dims: Mapping[str, int] = field(default_factory=dict)
    """The dimension along which each DTensor among them is divided. Megatron's marks do not say it."""
    data_ranks: tuple[int, ...] | None = None
    """The data-parallel group of `mpu`; None without one."""


def is_dtensor(value: Any) -> bool:
    """Returns True for a DTensor."""
    module = _tensor_module()
    return module is not None and isinstance(value, module.DTensor)


def _tensor_module() -> Any:
    """Returns `torch.distributed.tensor`; None if nothing has imported it, as before the first DTensor."""
    return sys.modules.get("torch.distributed.tensor")


def find_shards(model: nn.Module, mpu: Any = None) -> FoundShards:
    """Returns the tensor parallelism of `model`. Pure, and local to this process.

    Args:
        model: the model as the user gives it.
        mpu: Megatron's `parallel_state`, or an object with its functions; None without one.

    Raises:
        ConfigError: if a parameter is divided in a way that an engine cannot page.
        UsageError: if `mpu` lacks a function, or has groups that an engine does not know.
    """
    dtensors = {name: parameter for name, parameter in model.named_parameters() if is_dtensor(parameter)}
    _check_buffers(model)
    found = _of_dtensors(model, dtensors) if dtensors else FoundShards()
    if mpu is None:
        return found
    given = _of_mpu(model, mpu)
    if dtensors and found.row != given.row:
        raise ConfigError(
            f"mpu= has the group {list(given.row)} for model parallelism, and {next(iter(dtensors))} is a DTensor over "
            f"{list(found.row)}: give a model of one kind of tensor parallelism, and leave mpu out for DTensors"
        )
    return FoundShards(
        row=given.row,
        dtensors=found.dtensors,
        sharded=found.sharded | given.sharded,
        dims=found.dims,
        data_ranks=given.data_ranks,
    )


def _of_dtensors(model: nn.Module, dtensors: Mapping[str, Any]) -> FoundShards:
    """Returns what the DTensors of a model say."""
    tensor = _tensor_module()
    rows: dict[tuple[int, ...], str] = {}
    for name, parameter in dtensors.items():
        mesh, placements = parameter.device_mesh, parameter.placements
        if mesh.ndim != 1:
            raise ConfigError(
                f"parameter {name} is a DTensor over {mesh.ndim} dimensions of a mesh ({list(placements)}); expected "
                "the dimension of tensor parallelism alone, since the engine divides states over the other one: call "
                'parallelize_module with mesh["tp"], and neither fully_shard nor replicate'
            )
        if any(type(each) not in (tensor.Shard, tensor.Replicate) for each in placements):
            raise ConfigError(
                f"parameter {name} is a DTensor with the placements {list(placements)}; expected Shard or Replicate: "
                "give that module another style of parallelism, or leave it whole"
            )
        if parameter.is_meta:
            raise ConfigError(
                f"parameter {name} is a DTensor without values, on the meta device: build the model with values, "
                "outside of offload.init and load_pretrained, and call parallelize_module then"
            )
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"parameter {name} is a DTensor with gradient hooks, which would be lost: register them after "
                "offload.initialize, on the parameters that the model has then"
            )
        rows.setdefault(tuple(mesh.mesh.flatten().tolist()), name)
    if len(rows) > 1:
        first, second, *_ = rows.items()
        raise ConfigError(
            f"parameters {first[1]} and {second[1]} are DTensors over different processes, {list(first[0])} and "
            f"{list(second[0])}: parallelise the whole model over one mesh"
        )
    if _SUMMED_BY_HOOKS in (getattr(model, "_tp_plan", None) or {}).values():
        raise ConfigError(
            f"the tensor-parallel plan of {type(model).__name__} has the style {_SUMMED_BY_HOOKS}, whose hooks add up "
            "gradients that the engine has taken by then: leave the projections around those norms out of the plan"
        )
    # One mesh in all: checked above.
    (row,) = rows
    forms = {
        name: DTensorForm(each.device_mesh, tuple(each.placements), each.shape, tuple(each.stride()))
        for name, each in dtensors.items()
    }
    dims = {
        name: placement.dim % each.ndim
        for name, each in dtensors.items()
        for placement in each.placements
        if isinstance(placement, tensor.Shard)
    }
    return FoundShards(row=row if len(row) > 1 else (), dtensors=forms, sharded=frozenset(dims), dims=dims)


def _check_buffers(model: nn.Module) -> None:
    """Raises `ConfigError` if a buffer is a DTensor."""
    wrong = next((name for name, buffer in model.named_buffers() if is_dtensor(buffer)), None)
    if wrong is not None:
        raise ConfigError(
            f"buffer {wrong} is a DTensor; an engine pages parameters alone, and keeps buffers as ordinary tensors: "
            "leave its module out of the plan of parallelize_module"
        )


# -- Megatron ------------------------------------------------------------------------------------------


def _of_mpu(model: nn.Module, mpu: Any) -> FoundShards:
    """Returns the tensor parallelism that Megatron's functions and marks describe."""
    # Checked first: the model-parallel group of Megatron's spans pipelines too, and would look like a row.
    for other in _OTHER_GROUPS:
        size = getattr(mpu, f"get_{other}_world_size", None)
        if callable(size) and size() not in (None, 1):
            raise UsageError(
                f"mpu= divides over {size()} ranks by {other}, which an engine does not know; expected tensor and data "
                "parallelism alone"
            )
    row = _ranks_of(mpu, "get_tensor_model_parallel_group", "get_model_parallel_group")
    data = _ranks_of(mpu, "get_data_parallel_group")
    named = list(model.named_parameters())
    partial = next(
        (name for name, each in named if each.requires_grad and getattr(each, "sequence_parallel", False)), None
    )
    if partial is not None and len(row) > 1:
        raise ConfigError(
            f"parameter {partial} is marked sequence_parallel: each rank has a part of its gradient, which Megatron "
            "adds up when the engine has taken it; build the model without sequence_parallel"
        )
    # `is True`, since Megatron marks whole parameters by False.
    marked = {name for name, each in named if any(getattr(each, mark, False) is True for mark in _MARKS)}
    return FoundShards(row=row if len(row) > 1 else (), sharded=frozenset(marked), data_ranks=data)


def _ranks_of(mpu: Any, *names: str) -> tuple[int, ...]:
    """Returns the ranks of the group that the first of these functions returns.

    Raises:
        UsageError: if `mpu` has none of them.
    """
    function = next((found for name in names if callable(found := getattr(mpu, name, None))), None)
    if function is None:
        raise UsageError(
            f"mpu= expects Megatron's parallel_state, or an object with get_model_parallel_group() and "
            f"get_data_parallel_group(), got {type(mpu).__name__} without {names[-1]}; leave it out if each rank has "
            "the whole model"
        )
    ranks: Sequence[int] = dist.get_process_group_ranks(function())
    return tuple(ranks)
