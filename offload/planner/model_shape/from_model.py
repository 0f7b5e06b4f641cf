"""The shape of a model that is built, or that is about to be trained, counted in one forward on fake tensors.

Fake tensors allocate no memory, so a model of any size can be run.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.errors import ConfigError
from offload.layout.experts import rows_of
from offload.layout.flat_layout import layouts_of
from offload.layout.frozen import opaque_parameters, stored_weights
from offload.layout.memory_plan import Division, divide
from offload.layout.optimizer_states import matrices_of
from offload.planner.model_shape.counter import Counter
from offload.planner.model_shape.experts import without_choice
from offload.planner.model_shape.from_preset import from_preset
from offload.planner.model_shape.shape import Experts, Shape
from offload.presets import (
    PRESETS,
    check_folder,
    check_name,
    check_positions,
    error_message,
    positions_of,
    quantized_bits,
    require_transformers,
)
from offload.torch_internals import fake_tensors

_MLP = re.compile(r"\.\d+\.(mlp|ffn|feed_?forward)$")
"""Path of the MLP of a repeated block."""


def from_name(
    name: str,
    sequence: int,
    dtype: torch.dtype = torch.bfloat16,
    units: Division | Sequence[str] = (),
    layers: int | None = None,
) -> Shape:
    """Returns the shape of a preset, or of a folder with a config.json.

    Args:
        name: the preset, or the folder's path.
        sequence: tokens of a sequence.
        dtype: dtype of the weights.
        units: the division into units, or names of units; none for the default.
        layers: layers to build; None for all of them.

    Raises:
        ConfigError: the name or config is invalid, or the model's code does not run on fake tensors.
    """
    named = units.named if isinstance(units, Division) else units
    known = None if named or layers is not None else from_preset(name, sequence, dtype.itemsize)
    if known is not None:
        return known
    config = config_of(name, layers)
    if quantized_bits(config) is not None:
        raise ConfigError(
            f"the weights of {name} are quantized, and quantized weights do not train; plan adapters on them, such as "
            "--lora r=16,targets=all-linear, or give the model before quantization"
        )
    try:
        # Fake tensors have shapes and dtypes but no memory, so a model of any size can be run.
        with fake_tensors(), torch.device("cpu"):
            check_positions(config, sequence)
            model = model_of(config, dtype)
            return _counted(model, model, list(model.parameters()), name, sequence, units)
    except ConfigError:
        raise
    except Exception as error:  # a model's own code may raise any error
        raise ConfigError(
            f"cannot run {name} without its weights ({type(error).__name__}: {error_message(error)}); "
            f"give --parameters and --layers"
        ) from error


class Adapters(NamedTuple):
    """Adapters over a model that is frozen otherwise."""

    make: Callable[[nn.Module], nn.Module]
    """Returns a model with adapters; the model is on the meta device."""
    frozen: str | None = None
    """Block format of frozen matrices, as in the config."""


def from_adapted(
    name: str, adapters: Adapters, sequence: int, dtype: torch.dtype, units: Division | Sequence[str] = ()
) -> Shape:
    """Returns the shape of a preset or folder of which the adapters alone are trained.

    Args:
        name: the preset, or the folder's path.
        adapters: makes the adapters.
        sequence: tokens of a sequence.
        dtype: dtype of the weights.
        units: the division into units, or names of units.

    Raises:
        ConfigError: the name or config is invalid, or the model's code does not run on fake tensors.
    """
    config = config_of(name)
    check_positions(config, sequence)
    with torch.device("meta"):
        model = adapters.make(model_of(config, dtype))
    # Layers of values stand for those of a quantized folder, whose bytes are nearly those of a format of ours.
    theirs = None if (bits := quantized_bits(config)) is None else "nf4" if bits <= 4 else "int8"
    return from_training(model, sequence, dtype, units, {}, adapters.frozen or theirs)._replace(name=name, adapted=True)


def from_training(
    model: nn.Module,
    sequence: int,
    dtype: torch.dtype,
    units: Division | Sequence[str],
    always: Mapping[str, Any],
    frozen: str | None = None,
) -> Shape:
    """Returns the shape of a model that is about to be trained. The model itself stays as it is.

    One forward runs on fake tensors in place of the parameters and buffers.

    Args:
        model: the model, with gradient checkpointing on or off.
        sequence: tokens of a sequence.
        dtype: dtype of the weights during training.
        units: the division into units, or names of units.
        always: keyword arguments of each forward, beside the batch.
        frozen: block format of frozen matrices, as in the config.

    Raises:
        ConfigError: the model's code needs the values of its tensors.
    """
    title = type(model).__name__
    try:
        with fake_tensors(allow_others=True), _without_checkpointing(model), _quantized_as_linear(model):
            made = _stand_ins(model, dtype)

            def forward(**inputs: Any) -> Any:
                return torch.func.functional_call(model, made, (), {**inputs, **always})

            weights = [made[name] for name, _ in model.named_parameters()]
            return _counted(model, forward, weights, title, sequence, units, (frozen, dtype))
    except Exception as error:  # a model's own code may raise any error
        raise ConfigError(f"cannot run {title} without its weights ({type(error).__name__}: {error})") from error


def _stand_ins(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns a fake tensor for each parameter, in `dtype`, and for each buffer. Tied parameters stay tied."""
    made: dict[int, torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    quantized = opaque_parameters(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in made:
            # Created inside `fake_tensors`, so nothing is allocated.
            owner = model.get_submodule(name.rpartition(".")[0])
            shape = _linear_shape(owner) if name in quantized else None
            values = torch.empty(parameter.shape if shape is None else shape, dtype=dtype, device="cpu")
            made[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
        found[name] = made[id(parameter)]
    for name, buffer in model.named_buffers(remove_duplicate=False):
        found[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
    return found


def _linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """Returns the shape of the weight of a linear layer, by the layer's widths; None for another module."""
    rows, columns = getattr(module, "out_features", None), getattr(module, "in_features", None)
    return (rows, columns) if isinstance(rows, int) and isinstance(columns, int) else None


@contextlib.contextmanager
def _quantized_as_linear(model: nn.Module) -> Iterator[None]:
    """Lets layers with quantized weights compute as linear ones inside the context: their own code needs values."""
    owners = {name.rpartition(".")[0]: None for name in opaque_parameters(model)}
    layers = [layer for name in owners if _linear_shape(layer := model.get_submodule(name))]
    for layer in layers:
        vars(layer)["forward"] = functools.partial(_as_linear, layer)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


def _as_linear(module: Any, values: torch.Tensor) -> torch.Tensor:
    """Computes what a linear layer does whose weight has its values."""
    return torch.nn.functional.linear(values, module.weight, module.bias)


@contextlib.contextmanager
def _without_checkpointing(model: nn.Module) -> Iterator[None]:
    """Sets training mode and turns gradient checkpointing off inside the context, then restores both.

    The forward must save all activations to be counted; `Load.recompute` accounts for recomputation later.
    """
    modules: list[Any] = list(model.modules())
    training = [module.training for module in modules]
    again = [module for module in modules if getattr(module, "gradient_checkpointing", False) is True]
    model.train()
    for module in again:
        module.gradient_checkpointing = False
    try:
        yield
    finally:
        for module, before in zip(modules, training, strict=True):
            module.training = before
        for module in again:
            module.gradient_checkpointing = True


def config_of(name: str, layers: int | None = None) -> Any:
    """Returns the transformers config of a preset or of a folder, optionally reduced to `layers` layers.

    Raises:
        ConfigError: the name is unknown, the config cannot be read, or its layers cannot be reduced.
    """
    folder = Path(name)
    if not folder.is_dir() or name in ("", *PRESETS):
        check_name(name)
    if name not in PRESETS:
        check_folder(folder)
    transformers = require_transformers()
    try:
        config = _config(transformers, name)
        text = config.get_text_config()
        # A key-value cache would count as saved bytes, and training has none.
        text.use_cache = False
    except Exception as error:  # transformers may raise any error for a foreign or damaged file
        raise ConfigError(
            f"cannot read the config of {name} ({type(error).__name__}: {error_message(error)})"
        ) from error
    if layers is not None:
        try:
            _cut(text, layers)
        except Exception as error:  # some configs derive the number of layers from other settings
            raise ConfigError(
                f"cannot cut {name} to {layers} layers ({type(error).__name__}: {error_message(error)})"
            ) from error
    return config


def _cut(text: Any, layers: int) -> None:
    """Reduces a text config to `layers` layers in place."""
    text.num_hidden_layers = layers
    # One entry per layer.
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]


def model_of(config: Any, dtype: torch.dtype) -> Any:
    """Returns the causal language model of a transformers config, on torch's default device."""
    model = require_transformers().AutoModelForCausalLM.from_config(config, dtype=dtype)
    if getattr(model, "loss_type", "") is None:
        vars(model)["loss_type"] = "ForCausalLM"
    return model


def _config(transformers: Any, name: str) -> Any:
    if name in PRESETS:
        return getattr(transformers, PRESETS[name].config)(**PRESETS[name].settings)
    return transformers.AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)


def _counted(
    model: nn.Module,
    forward: Callable[..., Any],
    weights: Sequence[torch.Tensor],
    name: str,
    sequence: int,
    division: Division | Sequence[str],
    frozen: tuple[str | None, torch.dtype] = (None, torch.bfloat16),
) -> Shape:
    """Returns the shape of a causal language model, counted during one call of `forward`.

    Args:
        model: the model, for its units and layouts.
        forward: runs the model on fake tensors.
        weights: the fake tensors that `forward` uses as parameters.
        name: the shape's name.
        sequence: tokens of a sequence.
        division: the division into units, or names of units.
        frozen: block format of frozen matrices, as in the config, and dtype of the weights.
    """
    units, stacks, _ = divide(model, division)
    stored = stored_weights(model, *frozen, rows_of(stacks))
    ids = torch.zeros(1, sequence, dtype=torch.long)
    counter = Counter({weight.untyped_storage()._cdata for weight in weights}, sequence)
    hooks = [
        model.get_submodule(site).register_forward_pre_hook(_begin(counter, needed), with_kwargs=True)
        for site, needed in (units.sites | {name: each[:1] for name, each in units.experts.items()}).items()
    ]
    for path, module in model.named_modules():
        if _MLP.search(path):
            hooks += [
                module.register_forward_pre_hook(_in_mlp(counter, True)),
                module.register_forward_hook(_in_mlp(counter, False)),
            ]
    try:
        with (
            without_choice(model) as per_token,
            counter,
            torch.autograd.graph.saved_tensors_hooks(counter.save, lambda packed: packed),
        ):
            forward(input_ids=ids, labels=ids)
    finally:
        for hook in hooks:
            hook.remove()
    text = getattr(model, "config", None)
    itemsize = max((weight.itemsize for weight in weights), default=2)
    return Shape(
        name=name,
        layouts=layouts_of(model, units, stored=stored),
        uses=tuple(counter.uses()),
        temporary=counter.largest,
        sequence=sequence,
        positions=None if text is None else positions_of(text),
        itemsize=itemsize,
        matrices=matrices_of(model),
        experts=tuple(
            Experts(every, per_token[module])
            for name, every in units.experts.items()
            if (module := id(model.get_submodule(name))) in per_token
        ),
    )


def _begin(counter: Counter, needed: Sequence[int]) -> Any:
    """Returns a forward pre-hook that starts the uses of the units `needed`."""

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        for unit in needed:
            counter.begin(unit, tensors[0].nbytes if tensors else 0, isinstance(module, nn.Embedding))

    return begin


def _in_mlp(counter: Counter, inside: bool) -> Any:
    """Returns a hook that marks the start or the end of an MLP's forward."""

    def mark(*_: Any) -> None:
        counter.in_mlp = inside

    return mark
