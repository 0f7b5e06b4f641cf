"""`PipelineModule`: a list of layers, of which each process builds those of its stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload.deepspeed.comm import init_distributed
from offload.deepspeed.pipe.partition import partition
from offload.deepspeed.pipe.specs import LayerSpec, TiedLayerSpec
from offload.errors import ConfigError, UsageError
from offload.parallel.stages import PipelineStages, Tie


class _Stage(nn.Module):
    """The layers of one stage, one after the other, under their numbers in the whole model."""

    def __init__(self, calls: Sequence[Callable[[Any], Any]], modules: Mapping[str, nn.Module], interval: int) -> None:
        """Stores the layers.

        Args:
            calls: computes each layer.
            modules: the modules among them, by name.
            interval: number of layers that are computed again together in backward; 0 to keep all activations.
        """
        super().__init__()
        # In an ordinary list: a module would be registered once more under a name of the call.
        self._calls, self._interval = list(calls), interval
        # A list of torch, so that each layer is a unit of the engine.
        self.layers = nn.ModuleList()
        for name, module in modules.items():
            self.layers.add_module(name, module)

    def forward(self, *inputs: Any) -> Any:
        """Returns what the last layer returns; each layer receives the output of the one before, a tuple as one."""
        value = inputs[0] if len(inputs) == 1 else inputs
        step = self._interval or len(self._calls)
        for first in range(0, len(self._calls), step):
            run = _in_turn(self._calls[first : first + step])
            # In an evaluation there is no backward to compute anything again for.
            again = bool(self._interval) and torch.is_grad_enabled()
            value = checkpoint(run, value, use_reentrant=False) if again else run(value)
        return value


def _in_turn(calls: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """Returns a function that calls one after the other."""

    def run(value: Any) -> Any:
        for call in calls:
            value = call(value)
        return value

    return run


class PipelineModule(PipelineStages):
    """A model as a list of layers, divided into as many stages as there are processes in a pipeline.

    `deepspeed.initialize` takes it as the model and returns a `PipelineEngine`. Processes are numbered as in DeepSpeed:
    those of one stage follow each other.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Any = None,
        checkpointable_layers: Any = None,
        dynamic_shape: bool = False,
    ) -> None:
        """Builds the layers of this process. Every process calls it.

        Args:
            layers: `LayerSpec`s, modules, and functions of one argument, in their order.
            num_stages: number of stages, a divisor of the number of processes.
            topology: must be None; `num_stages` says all.
            loss_fn: returns the loss of (output of the last layer, labels): a function, or a module without parameters,
                such as `torch.nn.CrossEntropyLoss()`.
            seed_layers: True to seed the generators before each layer is built, so that its values do not depend on
                the division.
            seed_fn: seeds them; None for `torch.manual_seed`.
            base_seed: the seed of layer 0; that of each other layer is higher by its number.
            partition_method: "parameters", "uniform", or "type:" and a regular expression for names of classes.
            activation_checkpoint_interval: number of layers that are computed again together in backward; 0 for none.
            activation_checkpoint_func: must be None: torch's checkpointing is used.
            checkpointable_layers: must be None: all layers are.
            dynamic_shape: must be False: what stages send each other has the same shape in each micro-batch.

        Raises:
            ConfigError: if the layers cannot be divided in this way.
            UsageError: if an argument asks for what is not supported.
        """
        _refuse(
            topology=topology,
            activation_checkpoint_func=activation_checkpoint_func,
            checkpointable_layers=checkpointable_layers,
            dynamic_shape=dynamic_shape or None,
        )
        init_distributed()
        layers, count = list(layers), _checked_stages(num_stages)
        _check_layers(layers)
        _check_loss(loss_fn)
        data = dist.get_world_size() // count
        # As DeepSpeed numbers them: the processes of a stage follow each other.
        index = dist.get_rank() // data
        borders = partition(layers, count, partition_method)
        pipelines = [[first + data * stage for stage in range(count)] for first in range(data)]
        group = dist.new_subgroups_by_enumeration(pipelines)[0]
        seed = (seed_fn or torch.manual_seed) if seed_layers else None
        built = _built(layers, range(borders[index], borders[index + 1]), seed, base_seed)
        stage = _Stage(*built, activation_checkpoint_interval)
        super().__init__({index: stage}, count, group, _ties(layers, borders, index, pipelines, built[1]))
        # In an ordinary list: a module would be registered as a part of the model, beside the stages.
        self._loss, self.parts = [loss_fn], borders

    @property
    def loss_fn(self) -> Callable[[Any, Any], torch.Tensor] | None:
        """Returns the loss of (output of the last layer, labels); None if there is none."""
        return self._loss[0]

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises `UsageError`: an engine of `offload.initialize` was called, which knows torch's schedules alone.

        Args:
            *args: ignored.
            **kwargs: ignored.
        """
        raise UsageError(
            "a PipelineModule runs by train_batch(data_iter) and eval_batch(data_iter) of the engine that "
            "deepspeed.initialize(...) returns, not offload.initialize"
        )

    @property
    def stage_id(self) -> int:
        """Number of this process's stage."""
        return self.indices[0]


_INSTEAD = {
    "topology": "give num_stages",
    "activation_checkpoint_func": "torch's checkpointing is used",
    "checkpointable_layers": "all layers are computed again",
    "dynamic_shape": "give micro-batches of one shape",
}
"""What to do in place of each argument that is not supported."""


def _refuse(**given: Any) -> None:
    """Raises `UsageError` if one of these arguments is not None."""
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"PipelineModule: {name} is not supported: {_INSTEAD[name]}")


def _checked_stages(num_stages: int | None) -> int:
    """Returns the number of stages; raises `ConfigError` if the processes cannot be divided into such pipelines."""
    count = 1 if num_stages is None else num_stages
    if not isinstance(count, int) or count < 1 or dist.get_world_size() % count:
        raise ConfigError(
            f"PipelineModule got num_stages={num_stages!r}, and {dist.get_world_size()} processes cannot be "
            "divided into pipelines of so many: give a divisor of their number"
        )
    return count


def _check_layers(layers: Sequence[Any]) -> None:
    """Raises `ConfigError` if a layer is neither a spec, a module nor a function."""
    for number, layer in enumerate(layers):
        if not isinstance(layer, LayerSpec | nn.Module) and not callable(layer):
            raise ConfigError(f"layer {number} must be a LayerSpec, a module or a function, got {type(layer).__name__}")


def _check_loss(loss_fn: Any) -> None:
    """Raises `ConfigError` if a loss is no function, or has parameters, which would belong to no stage."""
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigError(f"PipelineModule: loss_fn must be a function or a module, got {type(loss_fn).__name__}")
    if isinstance(loss_fn, nn.Module) and next(loss_fn.parameters(), None) is not None:
        raise ConfigError(
            f"PipelineModule: loss_fn {type(loss_fn).__name__} has parameters, which would belong to no stage: "
            "make what has them the last of the layers"
        )


def _built(
    layers: Sequence[Any], mine: range, seed: Callable[[int], Any] | None, base_seed: int
) -> tuple[list[Callable[[Any], Any]], dict[str, nn.Module]]:
    """Returns a call for each layer of `mine`, and the modules among them by their names in the stage."""
    calls: list[Callable[[Any], Any]] = []
    modules: dict[str, nn.Module] = {}
    for number in mine:
        layer = layers[number]
        tied = isinstance(layer, TiedLayerSpec)
        name = f"tied_{layer.key}" if tied else str(number)
        # A further use of a key in this stage is the module that the first has built.
        if name not in modules and isinstance(layer, LayerSpec | nn.Module):
            # By the layer's number, so that its values do not depend on the stage that builds it.
            if seed is not None:
                seed(base_seed + number)
            modules[name] = layer.build() if isinstance(layer, LayerSpec) else layer
        call = modules.get(name, layer)
        calls.append(_used(layer.forward_fn, call) if tied and layer.forward_fn is not None else call)
    return calls, modules


def _used(forward: Callable[[nn.Module, Any], Any], module: nn.Module) -> Callable[[Any], Any]:
    """Returns the function that computes a use of a tied layer."""
    return lambda value: forward(module, value)


def _ties(
    layers: Sequence[Any],
    borders: Sequence[int],
    index: int,
    pipelines: Sequence[Sequence[int]],
    modules: Mapping[str, nn.Module],
) -> list[Tie]:
    """Returns the parameters of this stage that other stages have too, with the values of the first. Collective."""
    specs = [(number, layer) for number, layer in enumerate(layers) if isinstance(layer, TiedLayerSpec)]
    found = []
    for key in dict.fromkeys(layer.key for _, layer in specs):
        uses = [number for number, layer in specs if layer.key == key]
        stages = sorted({_stage_of(number, borders) for number in uses})
        # Within one stage autograd adds the gradients of the uses up itself.
        if len(stages) == 1:
            continue
        # All processes make the groups of each key, in one order.
        members = [[pipeline[stage] for stage in stages] for pipeline in pipelines]
        groups = [dist.new_group(each, backend="gloo") for each in members]
        if index not in stages:
            continue
        own = next(number for number, each in enumerate(members) if dist.get_rank() in each)
        # The specs of one key may have other arguments; the first use decides which weights are tied.
        for attribute in layers[uses[0]].tied_weight_attr:
            parameter = modules[f"tied_{key}"].get_parameter(attribute)
            # Through the CPU, since the group is gloo's: what NCCL would have to send is on no device yet.
            values = parameter.detach().cpu()
            dist.broadcast(values, members[own][0], groups[own])
            with torch.no_grad():
                parameter.copy_(values)
            found.append(Tie(f"{index}.layers.tied_{key}.{attribute}", groups[own], stages[0] == index))
    return found


def _stage_of(layer: int, borders: Sequence[int]) -> int:
    """Returns the stage that has a layer."""
    return next(stage for stage, end in enumerate(borders[1:]) if layer < end)
