"""Search of a model for the parameters that tensor parallelism divides, before anything is changed.

Torch's `parallelize_module`, and transformers, turn these parameters into DTensors. Megatron marks ordinary parameters,
and its `parallel_state` (`mpu`) knows the groups.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from offload.engine.callbacks import Extension
from offload.engine.params import ParamHandle, handle_of
from offload.errors import ConfigError, UsageError
from offload.parallel.experts import dispatch_tokens

# -- find ----------------------------------------------------------------------------------------------


_MARKS = ("tensor_model_parallel", "model_parallel")
"""Attributes that mark, for Megatron and DeepSpeed, a parameter that is divided over ranks."""
_OTHER_GROUPS = ("pipeline_model_parallel", "context_parallel", "expert_model_parallel")
"""Further dimensions of Megatron's, which an engine does not know."""
_SUMMED_BY_HOOKS = "replicated_with_grad_allreduce"
"""Style of transformers whose hooks add a gradient up when the engine has taken it."""


class LayerLayouts(NamedTuple):
    """Placements of the input and the output of a layer, under the names of torch's styles of parallelism."""

    mesh: Any
    input_layouts: tuple[Any, ...]
    """Of the input as it arrives, an ordinary tensor."""
    desired_input_layouts: tuple[Any, ...]
    """Of the input with which the layer computes."""
    output_layouts: tuple[Any, ...]
    """Of the output as it leaves, an ordinary tensor again."""

    def entering(self, value: torch.Tensor) -> torch.Tensor:
        """Returns an input as a DTensor with which the layer computes."""
        sharded = _tensor_module().DTensor.from_local(value, self.mesh, self.input_layouts, run_check=False)
        entered: torch.Tensor = sharded.redistribute(placements=self.desired_input_layouts)
        return entered

    def leaving(self, output: Any) -> torch.Tensor:
        """Returns the memory of an output in its layout."""
        local: torch.Tensor = output.redistribute(placements=self.output_layouts).to_local()
        return local


class DTensorForm(NamedTuple):
    """All of a DTensor but its memory."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def over(self, local: torch.Tensor) -> torch.Tensor:
        """Returns the DTensor over this process's memory. Its gradient arrives at `local` in these placements."""
        # No communication here: only the gradient is reduced to the placements, as by torch's own operators.
        dtensor: torch.Tensor = _tensor_module().DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )
        return dtensor

    def cut(self, value: torch.Tensor) -> torch.Tensor:
        """Returns this process's part of a whole tensor: of the values of the first process. Collective of the mesh."""
        dtensor: Any = _tensor_module().distribute_tensor(value.detach(), self.mesh, self.placements)
        # The mesh may be one of GPUs, and the weights wait in host memory for the engine.
        part: torch.Tensor = dtensor.to_local().to(value.device)
        return part

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
    """The parameters that are DTensors, sharded or replicated, by name; or that a plan makes such of whole ones."""
    layouts: Mapping[str, LayerLayouts] = field(default_factory=dict)
    """The layers whose inputs and outputs the engine lays out, by the module's name; torch's styles do so by hooks."""
    experts: frozenset[str] = frozenset()
    """Names of the modules of stacked experts of which each process of the row has some."""
    sharded: frozenset[str] = frozenset()
    """Names of the parameters that are divided over the processes of the row."""
    dims: Mapping[str, int] = field(default_factory=dict)
    """The dimension along which each sharded DTensor is divided. Megatron's marks do not contain it."""
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

    `mpu` is Megatron's `parallel_state`, or an object with its functions. Raises `ConfigError` if a parameter is
    divided in a way that an engine cannot page, and `UsageError` if `mpu` lacks a function, or has groups that an
    engine does not know.
    """
    dtensors = {name: parameter for name, parameter in model.named_parameters() if is_dtensor(parameter)}
    wrong = next((name for name, buffer in model.named_buffers() if is_dtensor(buffer)), None)
    if wrong is not None:
        raise ConfigError(
            f"buffer {wrong} is a DTensor; an engine pages parameters alone, and keeps buffers as ordinary tensors: "
            "leave its module out of the plan of parallelize_module"
        )
    of_dtensors = _of_dtensors(model, dtensors) if dtensors else FoundShards()
    if mpu is None:
        return of_dtensors
    of_mpu = _of_mpu(model, mpu)
    if dtensors and of_dtensors.row != of_mpu.row:
        raise ConfigError(
            f"mpu= has the group {list(of_mpu.row)} for model parallelism, and {next(iter(dtensors))} is a DTensor "
            f"over {list(of_dtensors.row)}: give a model of one kind of tensor parallelism, and leave mpu out for "
            "DTensors"
        )
    return FoundShards(
        row=of_mpu.row,
        dtensors=of_dtensors.dtensors,
        sharded=of_dtensors.sharded | of_mpu.sharded,
        dims=of_dtensors.dims,
        data_ranks=of_mpu.data_ranks,
    )


def _of_dtensors(model: nn.Module, dtensors: Mapping[str, Any]) -> FoundShards:
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
        if any(type(placement) not in (tensor.Shard, tensor.Replicate) for placement in placements):
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
        name: DTensorForm(dtensor.device_mesh, tuple(dtensor.placements), dtensor.shape, tuple(dtensor.stride()))
        for name, dtensor in dtensors.items()
    }
    dims = {
        name: placement.dim % dtensor.ndim
        for name, dtensor in dtensors.items()
        for placement in dtensor.placements
        if isinstance(placement, tensor.Shard)
    }
    return FoundShards(row=row if len(row) > 1 else (), dtensors=forms, sharded=frozenset(dims), dims=dims)


# -- Megatron ------------------------------------------------------------------------------------------


def _of_mpu(model: nn.Module, mpu: Any) -> FoundShards:
    """Returns the tensor parallelism that Megatron's functions and marks describe."""
    # Checked first: Megatron's model-parallel group spans pipelines too, and would look like a row.
    for division in _OTHER_GROUPS:
        size = getattr(mpu, f"get_{division}_world_size", None)
        if callable(size) and size() not in (None, 1):
            raise UsageError(
                f"mpu= divides over {size()} ranks by {division}, which an engine does not know; expected tensor and "
                "data parallelism alone"
            )
    row = _ranks_of(mpu, "get_tensor_model_parallel_group", "get_model_parallel_group")
    data = _ranks_of(mpu, "get_data_parallel_group")
    named = list(model.named_parameters())
    partial = next(
        (
            name
            for name, parameter in named
            if parameter.requires_grad and getattr(parameter, "sequence_parallel", False)
        ),
        None,
    )
    if partial is not None and len(row) > 1:
        raise ConfigError(
            f"parameter {partial} is marked sequence_parallel: each rank has a part of its gradient, which Megatron "
            "adds up when the engine has taken it; build the model without sequence_parallel"
        )
    # `is True`, since Megatron marks whole parameters by False.
    marked = {name for name, parameter in named if any(getattr(parameter, mark, False) is True for mark in _MARKS)}
    return FoundShards(row=row if len(row) > 1 else (), sharded=frozenset(marked), data_ranks=data)


def _ranks_of(mpu: Any, *names: str) -> tuple[int, ...]:
    """Returns the ranks of the group that the first of these functions returns.

    Raises `UsageError` if `mpu` has none of them.
    """
    function = next((getter for name in names if callable(getter := getattr(mpu, name, None))), None)
    if function is None:
        raise UsageError(
            f"mpu= expects Megatron's parallel_state, or an object with get_model_parallel_group() and "
            f"get_data_parallel_group(), got {type(mpu).__name__} without {names[-1]}; leave it out if each rank has "
            "the whole model"
        )
    ranks: Sequence[int] = dist.get_process_group_ranks(function())
    return tuple(ranks)


# -- takeover ------------------------------------------------------------------------------------------
#
# Ordinary parameters of this process's shards in place of a model's DTensors, and the way back after an error.


class Site(NamedTuple):
    """A module that computes with DTensors of its own."""

    module: nn.Module
    forms: Mapping[str, DTensorForm]
    """The DTensors by the module's own names for them."""
    layouts: LayerLayouts | None = None
    """What the engine does to the input and the output; None if hooks of torch's styles do it."""
    experts: bool = False
    """True if the module has some of the experts of a layer, and computes with ordinary parameters."""


class TakenShards:
    """The parameters that were replaced in a model by ordinary parameters over this process's parts.

    A DTensor is replaced by one over the same memory, a whole parameter by one over its part.
    """

    def __init__(self, model: nn.Module, shards: FoundShards) -> None:
        """Replaces the parameters, if there are any. Names, values, ties and attributes stay.

        Collective of the row, if a plan divides whole parameters.
        """
        # By identity, since a tied parameter has several names, and is to stay one parameter.
        by_id = {id(model.get_parameter(name)): form for name, form in shards.dtensors.items()}
        self._taken: list[tuple[nn.Module, str, Any]] = []
        self._local: dict[int, nn.Parameter] = {}
        """The ordinary parameter for each replaced one, by the id of the latter."""
        self._optimizer: torch.optim.Optimizer | None = None
        self.sites: list[Site] = []
        try:
            for path, module in model.named_modules():
                self._take(module, by_id, shards.layouts.get(path), path in shards.experts)
        except BaseException:  # a rank that is gone, in a collective
            self.restore()
            raise

    def _take(
        self, module: nn.Module, by_id: Mapping[int, DTensorForm], layouts: LayerLayouts | None, experts: bool
    ) -> None:
        forms: dict[str, DTensorForm] = {}
        for name, parameter in module._parameters.items():
            form = None if parameter is None else by_id.get(id(parameter))
            if form is None:
                continue
            forms[name] = form
            self._taken.append((module, name, parameter))
            if id(parameter) not in self._local:
                self._local[id(parameter)] = _ordinary(parameter, form)
            module._parameters[name] = self._local[id(parameter)]
        if forms:
            self.sites.append(Site(module, forms, layouts, experts))

    def translated(self, argument: Any) -> Any:
        """Returns the user's `model_parameters`, or None, with ordinary parameters in place of the replaced ones."""
        if (
            not self._taken
            or argument is None
            or isinstance(argument, str | Mapping)
            or not isinstance(argument, Iterable)
        ):
            return argument
        if isinstance(argument, torch.Tensor):
            return self._own(argument)
        return [
            {**item, "params": self.translated(item["params"])}
            if isinstance(item, Mapping) and "params" in item
            else self._own(item)
            for item in argument
        ]

    def translate_optimizer(self, optimizer: Any) -> None:
        """Puts the ordinary parameters into the groups of an optimizer of torch; does nothing to anything else."""
        if self._taken and isinstance(optimizer, torch.optim.Optimizer):
            self._optimizer = optimizer
            for group in optimizer.param_groups:
                group["params"] = [self._own(parameter) for parameter in group["params"]]

    def restore(self) -> None:
        """Puts the replaced parameters back, unless `keep` was called. Idempotent."""
        back = {id(self._local[id(dtensor)]): dtensor for _, _, dtensor in self._taken if id(dtensor) in self._local}
        for module, name, dtensor in self._taken:
            module._parameters[name] = dtensor
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["params"] = [back.get(id(parameter), parameter) for parameter in group["params"]]
        self.keep()

    def keep(self) -> None:
        """Drops the replaced parameters, whose memory the engine is about to free parameter by parameter."""
        self._taken, self._local, self._optimizer = [], {}, None

    def _own(self, parameter: Any) -> Any:
        """Returns the ordinary parameter in place of a replaced one, and anything else as it is."""
        return self._local.get(id(parameter), parameter)


def _ordinary(replaced: Any, form: DTensorForm) -> nn.Parameter:
    """Returns an ordinary parameter over this process's part of another one, with the attributes of that one."""
    # Without gradients `to_local` is the memory itself, not a node of a graph over it.
    with torch.no_grad():
        part = replaced.to_local().detach() if is_dtensor(replaced) else form.cut(replaced)
        made = nn.Parameter(part, requires_grad=replaced.requires_grad)
    # Marks of the user and of other libraries, such as the mark of a parameter without weight decay.
    made.__dict__.update({name: value for name, value in replaced.__dict__.items() if not name.startswith("_")})
    return made


@contextlib.contextmanager
def taken_over(model: nn.Module, shards: FoundShards) -> Iterator[TakenShards]:
    """Yields the parameters of `model` that are replaced; they are put back if the body raises before `keep`."""
    taken = TakenShards(model, shards)
    try:
        yield taken
    except BaseException:
        taken.restore()
        raise


# -- views ---------------------------------------------------------------------------------------------
#
# DTensors over this process's shards, for as long as a module runs, and in state dicts.
#
#     pre-forward hook     the unit is on the device     module.weight: DTensor over the parameter's memory
#     forward, backward    torch's operators on DTensors communicate, as without an engine
#     post-forward hook    module.weight: the ordinary parameter again, a placeholder once the unit is released
#
# The engine knows the ordinary parameter alone. `DTensor.from_local` is a function of autograd: its backward reduces
# the gradient to the placements of the weight, so that the engine receives the gradient of this process's shard. For a
# replicated weight whose gradient is partial on each process, as in sequence parallelism, the engine receives the sum.


class ShardedViews(Extension):
    """The hooks on modules that compute with DTensors. Belongs to the thread that runs the model."""

    def __init__(self, sites: Sequence[Site]) -> None:
        """Hooks the modules. Their hooks for weights and for state dicts must exist already."""
        self._running: list[tuple[nn.Module, dict[str, nn.Parameter]]] = []
        """Modules that run now, outermost first, with the parameters that their DTensors stand for."""
        self._removers: list[Callable[[], None]] = []
        for site in sites:
            # In this order, as torch's styles have it: the parameters are ordinary ones outside of the layouts, and
            # the engine's own hooks see ordinary inputs and outputs.
            if site.layouts is not None:
                self._lay_out(site.module, site.layouts)
            self._hook_state_dicts(site.module, site.forms)
            if site.experts:
                mesh = next(iter(site.forms.values())).mesh
                self._removers.append(dispatch_tokens(site.module, mesh))
            else:
                self._hook(site.module, site.forms)

    def _lay_out(self, module: nn.Module, layouts: LayerLayouts) -> None:
        def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (layouts.entering(args[0]), *args[1:])

        def leave(_: nn.Module, __: Any, output: Any) -> torch.Tensor:
            return layouts.leaving(output)

        self._removers += [
            module.register_forward_pre_hook(enter, prepend=True).remove,
            module.register_forward_hook(leave, prepend=True).remove,
        ]

    def _hook(self, module: nn.Module, forms: Mapping[str, DTensorForm]) -> None:
        def before(called: nn.Module, _: Any) -> None:
            parameters = ((name, called._parameters[name]) for name in forms)
            replaced = {
                name: parameter for name, parameter in parameters if parameter is not None and not is_dtensor(parameter)
            }
            # Made first: reading a placeholder calls the engine, which hides all DTensors.
            dtensors: dict[str, Any] = {
                name: forms[name].over(_memory_of(parameter)) for name, parameter in replaced.items()
            }
            self._running.append((called, replaced))
            called._parameters.update(dtensors)

        def after(called: nn.Module, _: Any, __: Any) -> None:
            # If a pre-hook has failed, the module still has its parameters.
            if self._running and self._running[-1][0] is called:
                _, parameters = self._running.pop()
                called._parameters.update(parameters)

        # The engine's own pre-hook runs first, and this one last. After the forward this hook runs first, before the
        # unit is released: a DTensor that is still alive is a view of the unit's memory.
        self._removers += [
            module.register_forward_pre_hook(before).remove,
            module.register_forward_hook(after, prepend=True, always_call=True).remove,
        ]

    def _hook_state_dicts(self, module: nn.Module, forms: Mapping[str, DTensorForm]) -> None:
        def save(saved: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
            for name, form in forms.items():
                value = state.get(prefix + name)
                if type(value) is torch.Tensor:  # a copy, where the engine has put one
                    state[prefix + name] = form.over(value)

        def load(loaded: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
            for name, form in forms.items():
                value = state.get(prefix + name)
                if isinstance(value, torch.Tensor):
                    local = loaded._parameters[name]
                    assert local is not None
                    state[prefix + name] = form.part_of(value, local.shape)

        self._removers += [
            module.register_state_dict_post_hook(save).remove,
            module.register_load_state_dict_pre_hook(load).remove,
        ]

    def remove(self) -> None:
        self.abandon()
        while self._removers:
            self._removers.pop()()

    def abandon(self) -> None:
        """Hides the DTensors of modules that a Ctrl-C left open: torch calls no hooks after a `KeyboardInterrupt`."""
        while self._running:
            module, parameters = self._running.pop()
            module._parameters.update(parameters)


def _memory_of(parameter: nn.Parameter) -> torch.Tensor:
    """Returns the parameter if it holds its weights, otherwise weights that are read for its placeholder."""
    handle: ParamHandle | None = handle_of(parameter)
    if handle is None:
        return parameter
    here = handle.here()
    if here is not None:
        return here
    # A layer that is called by itself, while no module of the model runs.
    return handle.read_with_gradient() if torch.is_grad_enabled() and parameter.requires_grad else handle.read()
