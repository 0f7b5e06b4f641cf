"""`deepspeed.pipe`: a model as a list of layers, divided over the processes of a pipeline.

A `LayerSpec` describes a layer, and only the processes of the layer's stage build it. `PipelineModule` divides the list
into stages of about equal weight. `PipelineEngine` runs a step or an evaluation in one call.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload.deepspeed.comm import init_distributed
from offload.deepspeed.engine import DeepSpeedEngine
from offload.deepspeed.utils import RepeatingLoader
from offload.engine.engine import Engine
from offload.engine.step import check_batches
from offload.errors import ConfigError, UsageError
from offload.parallel.stages import PipelineStages, Tie
from offload.sizes import count_of

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]


class LayerSpec:
    """A layer of a `PipelineModule`: its class and the arguments of its constructor."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        """Stores the arguments; a `typename` that is no class of a module is a `ConfigError`."""
        if not isinstance(typename, type) or not issubclass(typename, nn.Module):
            raise ConfigError(f"{type(self).__name__} expects a class of torch.nn.Module, got {typename!r}")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """Returns a new layer; `log` has no effect."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer whose weights all `TiedLayerSpec`s of the same key share, in any stages."""

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        """Stores the arguments.

        Args:
            key: the name that the uses of the layer share.
            typename: the class of the layer.
            *module_args: positional arguments of its constructor.
            forward_fn: computes this use of the layer, given the layer and its input; None to call the layer.
            tied_weight_attr: names of the layer's parameters whose gradients are added up over the stages.
            **module_kwargs: keywords of its constructor.
        """
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


class _Stage(nn.Module):
    """The layers of one stage in order, named by their numbers in the whole model.

    `calls` compute the layers, and `modules` are the layers that are modules, by name. The backward recomputes
    `interval` layers together; 0 keeps all activations.
    """

    def __init__(self, calls: Sequence[Callable[[Any], Any]], modules: Mapping[str, nn.Module], interval: int) -> None:
        super().__init__()
        # An ordinary list: torch would register a module among the calls a second time.
        self._calls, self._interval = list(calls), interval
        # An `nn.ModuleList`, so that each layer is a unit of the engine.
        self.layers = nn.ModuleList()
        for name, module in modules.items():
            self.layers.add_module(name, module)

    def forward(self, *inputs: Any) -> Any:
        """Returns the output of the last layer. Each layer receives the previous layer's output as one argument."""
        value = inputs[0] if len(inputs) == 1 else inputs
        step = self._interval or len(self._calls)
        # An evaluation has no backward, so nothing needs to be recomputed.
        again = bool(self._interval) and torch.is_grad_enabled()
        for first in range(0, len(self._calls), step):
            calls = self._calls[first : first + step]
            value = checkpoint(self._run, calls, value, use_reentrant=False) if again else self._run(calls, value)
        return value

    @staticmethod
    def _run(calls: Sequence[Callable[[Any], Any]], value: Any) -> Any:
        for call in calls:
            value = call(value)
        return value


class PipelineModule(PipelineStages):
    """A model as a list of layers, divided into as many stages as there are processes in a pipeline.

    `deepspeed.initialize` takes it as the model and returns a `PipelineEngine`. Processes are numbered as in DeepSpeed:
    the processes of one stage have consecutive ranks.
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
            topology: must be None; use `num_stages`.
            loss_fn: returns the loss of (output of the last layer, labels): a function, or a module without parameters,
                such as `torch.nn.CrossEntropyLoss()`.
            seed_layers: True to seed the generators before each layer is built, so that its values do not depend on
                the division.
            seed_fn: seeds them; None for `torch.manual_seed`.
            base_seed: the seed of layer 0; layer n has the seed `base_seed + n`.
            partition_method: "parameters", "uniform", or "type:" and a regular expression for names of classes.
            activation_checkpoint_interval: number of layers that the backward recomputes together; 0 for none.
            activation_checkpoint_func: must be None: torch's checkpointing is used.
            checkpointable_layers: must be None: all layers are checkpointed.
            dynamic_shape: must be False: tensors between stages have the same shape in each micro-batch.

        Raises:
            ConfigError: if the layers cannot be divided in this way.
            UsageError: if an argument asks for what is not supported.
        """
        unsupported = (
            ("topology", topology, "give num_stages"),
            ("activation_checkpoint_func", activation_checkpoint_func, "torch's checkpointing is used"),
            ("checkpointable_layers", checkpointable_layers, "all layers are computed again"),
            ("dynamic_shape", dynamic_shape or None, "give micro-batches of one shape"),
        )
        for name, value, advice in unsupported:
            if value is not None:
                raise UsageError(f"PipelineModule: {name} is not supported: {advice}")
        init_distributed()
        layers, count = list(layers), 1 if num_stages is None else num_stages
        if not isinstance(count, int) or count < 1 or dist.get_world_size() % count:
            raise ConfigError(
                f"PipelineModule got num_stages={num_stages!r}, and {dist.get_world_size()} processes cannot be "
                "divided into pipelines of so many: give a divisor of their number"
            )
        for number, layer in enumerate(layers):
            if not isinstance(layer, LayerSpec | nn.Module) and not callable(layer):
                raise ConfigError(
                    f"layer {number} must be a LayerSpec, a module or a function, got {type(layer).__name__}"
                )
        if loss_fn is not None and not callable(loss_fn):
            raise ConfigError(f"PipelineModule: loss_fn must be a function or a module, got {type(loss_fn).__name__}")
        if isinstance(loss_fn, nn.Module) and next(loss_fn.parameters(), None) is not None:
            raise ConfigError(
                f"PipelineModule: loss_fn {type(loss_fn).__name__} has parameters, which would belong to no stage: "
                "make what has them the last of the layers"
            )
        data = dist.get_world_size() // count
        # DeepSpeed's numbering: the processes of a stage have consecutive ranks.
        index = dist.get_rank() // data
        borders = partition(layers, count, partition_method)
        pipelines = [[first + data * stage for stage in range(count)] for first in range(data)]
        group = dist.new_subgroups_by_enumeration(pipelines)[0]
        seed = (seed_fn or torch.manual_seed) if seed_layers else None
        built = _built(layers, range(borders[index], borders[index + 1]), seed, base_seed)
        stage = _Stage(*built, activation_checkpoint_interval)
        super().__init__({index: stage}, count, group, _ties(layers, borders, index, pipelines, built[1]))
        # An ordinary list: torch would register a loss that is a module as part of the model.
        self._loss, self.parts = [loss_fn], borders

    @property
    def loss_fn(self) -> Callable[[Any, Any], torch.Tensor] | None:
        """Returns the loss of (output of the last layer, labels); None if there is none."""
        return self._loss[0]

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises `UsageError`: engines of `offload.initialize` run only torch's pipeline schedules."""
        raise UsageError(
            "a PipelineModule runs by train_batch(data_iter) and eval_batch(data_iter) of the engine that "
            "deepspeed.initialize(...) returns, not offload.initialize"
        )

    @property
    def stage_id(self) -> int:
        """Number of this process's stage."""
        return self.indices[0]


def _built(
    layers: Sequence[Any], numbers: range, seed: Callable[[int], Any] | None, base_seed: int
) -> tuple[list[Callable[[Any], Any]], dict[str, nn.Module]]:
    """Returns a call for each layer of `numbers`, and the layers that are modules by their names in the stage."""
    calls: list[Callable[[Any], Any]] = []
    modules: dict[str, nn.Module] = {}
    for number in numbers:
        layer = layers[number]
        tied = isinstance(layer, TiedLayerSpec)
        name = f"tied_{layer.key}" if tied else str(number)
        # A further use of a key in this stage shares the module that the first use has built.
        if name not in modules and isinstance(layer, LayerSpec | nn.Module):
            # Seeded by the layer's number, so that its values do not depend on the stage that builds it.
            if seed is not None:
                seed(base_seed + number)
            modules[name] = layer.build() if isinstance(layer, LayerSpec) else layer
        call = modules.get(name, layer)
        calls.append(functools.partial(layer.forward_fn, call) if tied and layer.forward_fn is not None else call)
    return calls, modules


def _ties(
    layers: Sequence[Any],
    borders: Sequence[int],
    index: int,
    pipelines: Sequence[Sequence[int]],
    modules: Mapping[str, nn.Module],
) -> list[Tie]:
    """Returns the parameters that this stage shares with others, after copying the first stage's values. Collective."""
    specs = [(number, layer) for number, layer in enumerate(layers) if isinstance(layer, TiedLayerSpec)]
    ties = []
    for key in dict.fromkeys(layer.key for _, layer in specs):
        uses = [number for number, layer in specs if layer.key == key]
        stages = sorted({bisect.bisect_right(borders, number) - 1 for number in uses})
        # Within one stage autograd sums the gradients of the uses.
        if len(stages) == 1:
            continue
        # All processes create the groups of all keys in the same order.
        members = [[pipeline[stage] for stage in stages] for pipeline in pipelines]
        groups = [dist.new_group(ranks, backend="gloo") for ranks in members]
        if index not in stages:
            continue
        own = next(number for number, ranks in enumerate(members) if dist.get_rank() in ranks)
        # The specs of one key may differ in their arguments; the first use determines the tied weights.
        for attribute in layers[uses[0]].tied_weight_attr:
            parameter = modules[f"tied_{key}"].get_parameter(attribute)
            # Through the CPU with gloo, since NCCL needs values on a GPU and these are not there yet.
            values = parameter.detach().cpu()
            dist.broadcast(values, members[own][0], groups[own])
            with torch.no_grad():
                parameter.copy_(values)
            ties.append(Tie(f"{index}.layers.tied_{key}.{attribute}", groups[own], stages[0] == index))
    return ties


def partition(layers: Sequence[Any], stages: int, method: str) -> list[int]:
    """Returns the first layer of each stage, and the number of layers as the last element."""
    if len(layers) < stages:
        raise ConfigError(f"PipelineModule has {len(layers)} layers for {stages} stages: each stage needs one")
    kind = method.lower()
    if kind == "uniform":
        weights = [1] * len(layers)
    elif kind == "parameters":
        weights = _trained_elements(layers)
    elif kind.startswith("type:"):
        pattern = re.compile(method.split(":", 1)[1], re.IGNORECASE)
        weights = [1 if pattern.search(_class_of(layer).__name__) else 0 for layer in layers]
        if not any(weights):
            raise ConfigError(f'partition_method is "{method}", and no layer has a class of such a name')
    else:
        raise ConfigError(
            f'partition_method must be "parameters", "uniform" or "type:" and a regular expression, got {method!r}'
        )
    return balanced(weights, stages)


def _class_of(layer: Any) -> Any:
    if isinstance(layer, LayerSpec):
        return layer.typename
    return type(layer) if isinstance(layer, nn.Module) else layer if hasattr(layer, "__name__") else type(layer)


def _trained_elements(layers: Sequence[Any]) -> list[int]:
    """Returns the number of elements of each layer's trainable parameters. A tied layer counts at its first use."""
    seen: set[str] = set()
    counts = []
    for layer in layers:
        # For the balance, tied weights count only in the first stage that uses them.
        if isinstance(layer, TiedLayerSpec) and layer.key in seen:
            counts.append(0)
            continue
        if isinstance(layer, TiedLayerSpec):
            seen.add(layer.key)
        built = layer
        if isinstance(layer, LayerSpec):
            # The meta device allocates no memory, and the fork leaves the process's generators unchanged.
            with torch.device("meta"), torch.random.fork_rng(devices=[]):
                built = layer.build()
        parameters = built.parameters() if isinstance(built, nn.Module) else ()
        counts.append(sum(parameter.numel() for parameter in parameters if parameter.requires_grad))
    return counts


def balanced(weights: Sequence[int], parts: int) -> list[int]:
    """Returns borders of `parts` runs of `weights`, none empty, whose heaviest is as light as possible.

    Among equally good divisions it takes the most even one, whose first runs are the longest.
    """
    sums, count = [0, *itertools.accumulate(weights)], len(weights)
    # best[i] describes the division of the items from i on: weight of its heaviest run, sum of squares, borders.
    best: dict[int, tuple[int, int, list[int]]] = {count: (0, 0, [])}
    # Each iteration adds one run in front of the best divisions into one run fewer.
    for _ in range(parts):
        former, best = best, {}
        for first in range(count):
            divisions = []
            for end in (border for border in former if border > first):
                heaviest, squares, borders = former[end]
                weight = sums[end] - sums[first]
                divisions.append((max(weight, heaviest), squares + weight**2, -end, borders))
            if divisions:
                heaviest, squares, end, borders = min(divisions)
                best[first] = (heaviest, squares, [-end, *borders])
    return [0, *best[0][2]]


class PipelineEngine(DeepSpeedEngine):
    """A `DeepSpeedEngine` over a `PipelineModule`, by torch's 1F1B or GPipe schedule. Made by `initialize`."""

    def __init__(self, engine: Engine, model: PipelineModule, loader: Any) -> None:
        """Takes the place of an engine of `offload.initialize`; `loader` yields the batches of `training_data`."""
        super().__init__(engine)
        self._model = model
        self._batches = None if loader is None else RepeatingLoader(loader)
        self._schedules: dict[tuple[int, bool], Any] = {}
        """Schedules by their number of micro-batches and True for an evaluation."""

    def is_first_stage(self) -> bool:
        """Returns True if this process has the first stage, which reads inputs."""
        return self._model.stage_id == 0

    def is_last_stage(self) -> bool:
        """Returns True if this process has the last stage, which reads labels."""
        return self._model.stage_id == self._model.num_stages - 1

    def set_dataloader(self, loader: Any) -> None:
        """Sets the loader for calls of `train_batch` without `data_iter`. A loader that ends starts anew."""
        self._batches = RepeatingLoader(loader)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Runs the micro-batches of a step through the pipeline, then the optimizer step. Every process calls it.

        Args:
            data_iter: an iterator of micro-batches (inputs, labels) of one size. `inputs` is a tensor or a tuple of
                tensors, `labels` a tensor. The first and the last stage read the same batches; the other stages read
                none. None for the batches of `training_data` or of `set_dataloader`.

        Returns:
            The mean loss of all micro-batches on all processes, () fp32, on each of them.

        Raises:
            UsageError: if `data_iter` is no iterator, or a micro-batch has another form or size.
            NumericsError: as in `step`.
            StopIteration: if the data end too early. They must then end on the first and on the last stage alike.
        """
        if self._model.loss_fn is None:
            raise UsageError("train_batch needs a loss: give PipelineModule loss_fn=")
        count = self.gradient_accumulation_steps()
        inputs, labels = self._taken(data_iter, count, "train_batch")
        losses: list[torch.Tensor] = []
        self._schedule(count, evaluates=False).step(*inputs, target=labels, losses=losses, return_outputs=False)
        self.step()
        return self._mean_of_all(losses)

    def eval_batch(  # type: ignore[override]
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Returns the mean loss of some micro-batches, without gradients and in evaluation mode.

        Args:
            data_iter: as for `train_batch`.
            return_logits: True to return (loss, outputs of the last stage for all micro-batches, None on others).
            compute_loss: must be True.
            reduce_output: must be "avg".
            bcast_loss: without effect: each process receives the loss.
            num_micro_batches: number of micro-batches; by default as many as in a step.

        Raises:
            UsageError: as in `train_batch`, and if an argument has an unsupported value.
        """
        if not compute_loss or reduce_output != "avg" or self._model.loss_fn is None:
            raise UsageError(
                'eval_batch of a pipeline computes the mean loss: give compute_loss=True, reduce_output="avg", and '
                "PipelineModule loss_fn="
            )
        count = self.gradient_accumulation_steps() if num_micro_batches is None else num_micro_batches
        inputs, labels = self._taken(data_iter, count, "eval_batch")
        # After an error the model must be in its previous mode.
        mode, losses = self.module.training, list[torch.Tensor]()
        self.eval()
        try:
            with torch.no_grad():
                outputs = self._schedule(count, evaluates=True).eval(*inputs, target=labels, losses=losses)
        finally:
            self.train(mode)
        loss = self._mean_of_all(losses)
        return (loss, outputs) if return_logits else loss

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises `UsageError`: a step is one call of `train_batch`."""
        raise UsageError("a pipeline runs by engine.train_batch(data_iter) and engine.eval_batch(data_iter)")

    __call__ = forward

    def _schedule(self, micro_batches: int, evaluates: bool) -> Any:
        """Returns torch's schedule for so many micro-batches. torch prepares each for training or for evaluation."""
        # Imported here, since torch's pipelines take a while to import.
        from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

        key = (micro_batches, evaluates)
        # Created at the first use, as the number of micro-batches may change between steps.
        if key not in self._schedules:
            (stage,) = self.pipeline_stages()
            loss = self._model.loss_fn
            # A loss may have buffers, such as class weights. The engine does not move them, as the loss is not part of
            # the model.
            loss = loss.to(self.device) if isinstance(loss, nn.Module) else loss
            # 1F1B wants as many micro-batches as stages. Fewer never fill the pipeline, so all forwards may come first.
            kind = Schedule1F1B if micro_batches >= self._model.num_stages else ScheduleGPipe
            self._schedules[key] = kind(stage, micro_batches, loss_fn=loss)
        return self._schedules[key]

    def _taken(self, data_iter: Iterator[Any] | None, count: int, call: str) -> tuple[tuple[Any, ...], Any]:
        """Returns the concatenated inputs and labels of `count` micro-batches, as far as this stage needs them."""
        batches = self._batches if data_iter is None else data_iter
        # Processes of middle stages need no data, and may have none.
        if not (self.is_first_stage() or self.is_last_stage()):
            return (), None
        if batches is None:
            raise UsageError(f"{call} needs data: pass an iterator, or give initialize training_data")
        check_batches(batches)
        micro_batches = list(itertools.islice(batches, count))
        if len(micro_batches) < count:
            raise StopIteration
        if any(not isinstance(pair, tuple | list) or len(pair) != 2 for pair in micro_batches):
            raise UsageError(
                f"{call} of a pipeline expects micro-batches (inputs, labels), got {type(micro_batches[0]).__name__}"
            )
        inputs = [pair[0] if isinstance(pair[0], tuple | list) else (pair[0],) for pair in micro_batches]
        stacked = tuple(self._stacked([row[n] for row in inputs], call) for n in range(len(inputs[0])))
        labels = self._stacked([pair[1] for pair in micro_batches], call)
        return stacked if self.is_first_stage() else (), labels if self.is_last_stage() else None

    def _stacked(self, parts: Sequence[Any], call: str) -> torch.Tensor:
        shapes = {tuple(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__ for part in parts}
        if len(shapes) > 1 or not isinstance(parts[0], torch.Tensor):
            raise UsageError(
                f"{call} of a pipeline expects micro-batches of tensors of one shape, got {sorted(map(str, shapes))} "
                f"in {count_of(len(parts), 'micro-batch', 'micro-batches')}: pad them, and drop the last incomplete one"
            )
        return torch.cat([part.to(self.device) for part in parts])

    def _mean_of_all(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the mean of the losses on the last stages of all pipelines, on each process."""
        value = torch.zeros((), dtype=torch.float32, device=self.device)
        if self.is_last_stage():
            value.fill_(self.mean(float(torch.stack([loss.detach().float() for loss in losses]).mean())))
        # The processes of other stages have no loss of their own, so they receive the mean.
        if self._model.num_stages > 1:
            dist.broadcast(value, self._model.processes[-1], self._model.group)
        return value
