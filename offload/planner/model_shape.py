"""A model in numbers: layouts of its units, the work of each, and the bytes saved for the backward.

A preset or a folder's config is built and run once on fake tensors, which allocate no memory. A count of parameters
needs no model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from offload.errors import ConfigError
from offload.layout.flat_layout import UnitLayout, lay_out, layouts_of
from offload.layout.units import find_units
from offload.presets import PRESETS, check_folder, check_name, check_positions, error_message, require_transformers
from offload.torch_internals import TorchDispatchMode, fake_tensors, tree_leaves

_VOCABULARY = 32000
_MOST_PARAMETERS = 10**15
_MOST_LAYERS = 100_000
"""Far more than any model has, and few enough for torch's sizes and for a simulation."""


class Use(NamedTuple):
    """A use of a unit in the forward of one sequence."""

    unit: int
    flops: float
    """Operations of matrix products and attention."""
    nbytes: float
    """Bytes that all other operations read and write."""
    saved: int
    """Bytes saved for the backward."""
    boundary: int
    """Bytes of the input, which is all that activation checkpointing keeps."""
    lookup: bool = False
    """True for an embedding, whose backward does not read the weights."""


class Shape(NamedTuple):
    """The model's side of a prediction."""

    name: str
    layouts: tuple[UnitLayout, ...]
    uses: tuple[Use, ...]
    """Uses in the order of the forward."""
    temporary: int
    """Bytes of the largest tensor that one sequence creates, usually the logits."""
    sequence: int
    """Tokens of a sequence."""

    @property
    def parameters(self) -> int:
        """Returns the number of parameters; a tied one counts once."""
        return sum(segment.numel for layout in self.layouts for segment in layout.segments)


# -- from numbers -------------------------------------------------------------------------------------

_LAYER = {2: (46, 440), 4: (85, 745)}
"""The key is the bytes of a weight. The values are the bytes that a layer saves, and the bytes that it moves, per token
and per element of the hidden size, for Llama's layer, whose norms and rotary embeddings are always in fp32."""


def from_count(parameters: int, layers: int, sequence: int, itemsize: int = 2) -> Shape:
    """Returns the shape of a decoder of equal layers, with an untied embedding and head of 32000 tokens.

    Args:
        parameters: parameters of the model, embedding and head included.
        layers: layers between embedding and head.
        sequence: tokens of a sequence.
        itemsize: bytes per element of weights and activations; the loss is always in fp32.

    Raises:
        ConfigError: a number is less than 1 or too large, or the parameters are too few for the layers.
    """
    if parameters < 1 or layers < 1 or sequence < 1:
        raise ConfigError(
            f"expected parameters, layers and tokens of at least 1, got {parameters}, {layers}, {sequence}"
        )
    if parameters > _MOST_PARAMETERS or layers > _MOST_LAYERS:
        raise ConfigError(
            f"expected at most 1e15 parameters and {_MOST_LAYERS:,} layers, got {float(min(parameters, 1e300)):.3g} "
            f"and {float(min(layers, 1e300)):.3g}"
        )
    hidden = _hidden(parameters, layers)
    outer = _VOCABULARY * hidden
    inner = (parameters - 2 * outer) // layers
    if inner < 1:
        raise ConfigError(
            f"{parameters} parameters are too few for {layers} layers between an embedding and a head of {_VOCABULARY} "
            f"tokens; give a --model"
        )
    # The embedding takes the remainder of the division, so that the sizes sum to `parameters` exactly.
    sizes = [outer + parameters - 2 * outer - inner * layers, *[inner] * layers, outer]
    names = ["embedding", *(f"layers.{index}" for index in range(layers)), "head"]
    layouts = tuple(
        lay_out(name, [(f"{name}.weight", nn.Parameter(torch.empty(size, device="meta")))], 1)
        for name, size in zip(names, sizes, strict=True)
    )
    tokens = sequence * hidden
    # 2 operations per weight and token, and 4 * sequence * hidden per token for the two products of attention.
    flops = 2.0 * inner * sequence + 4.0 * sequence * tokens
    saved, traffic = _LAYER[itemsize]
    layer = (flops, float(traffic * tokens), saved * tokens, itemsize * tokens)
    logits = sequence * _VOCABULARY
    # The embedding reads no weights in its backward; the head keeps the logits in fp32, at 4 bytes each.
    uses = (
        Use(0, 0.0, 2.0 * itemsize * tokens, 0, 8 * sequence, lookup=True),
        *(Use(index, *layer) for index in range(1, layers + 1)),
        Use(layers + 1, 2.0 * outer * sequence, 57.0 * logits, 4 * logits, itemsize * tokens),
    )
    return Shape(f"{parameters / 1e9:.3g}B in {layers} layers", layouts, uses, 4 * logits, sequence)


def _hidden(parameters: int, layers: int) -> int:
    """Returns the root of 12 * layers * hidden**2 + 2 * vocabulary * hidden = parameters, as a multiple of 64.

    A root below 64 is only rounded down to an integer.
    """
    # A decoder layer contains 12 * hidden**2 parameters: 4 for attention, 8 for a feed-forward of four times the width.
    a, b = 12 * layers, 2 * _VOCABULARY
    hidden = (math.sqrt(b * b + 4 * a * parameters) - b) / (2 * a)
    return max(64, round(hidden / 64) * 64) if hidden >= 64 else max(1, int(hidden))


# -- from a model -------------------------------------------------------------------------------------


def from_name(
    name: str,
    sequence: int,
    dtype: torch.dtype = torch.bfloat16,
    units: Sequence[str] = (),
    layers: int | None = None,
) -> Shape:
    """Returns the shape of a preset, or of a folder with a config.json.

    Args:
        name: the preset, or the folder's path.
        sequence: tokens of a sequence.
        dtype: dtype of the weights.
        units: names of the units, as in the config; none for the default division.
        layers: layers to build; None for all of them.

    Raises:
        ConfigError: the name or config is invalid, or the model's code does not run on fake tensors.
    """
    config = config_of(name, layers)
    try:
        # Fake tensors have shapes and dtypes but no memory, so a model of any size can be run.
        with fake_tensors(), torch.device("cpu"):
            check_positions(config, sequence)
            model = model_of(config, dtype)
            return _counted(model, model, model.parameters(), name, sequence, units)
    except ConfigError:
        raise
    except Exception as error:  # a model's own code may raise any error
        raise ConfigError(
            f"cannot run {name} without its weights ({type(error).__name__}: {error_message(error)}); "
            f"give --parameters and --layers"
        ) from error


def from_training(
    model: nn.Module, sequence: int, dtype: torch.dtype, units: Sequence[str], always: Mapping[str, Any]
) -> Shape:
    """Returns the shape of a model that is about to be trained. The model itself stays as it is.

    One forward runs on fake tensors in place of the parameters and buffers.

    Args:
        model: the model, with gradient checkpointing on or off.
        sequence: tokens of a sequence.
        dtype: dtype of the weights during training.
        units: names of the units, as in the config.
        always: keyword arguments of each forward, beside the batch.

    Raises:
        ConfigError: the model's code needs the values of its tensors.
    """
    title = type(model).__name__
    try:
        with fake_tensors(allow_others=True), _without_checkpointing(model):
            made = _stand_ins(model, dtype)

            def forward(**inputs: Any) -> Any:
                return torch.func.functional_call(model, made, (), {**inputs, **always})

            weights = [made[name] for name, _ in model.named_parameters()]
            return _counted(model, forward, weights, title, sequence, units)
    except Exception as error:  # a model's own code may raise any error
        raise ConfigError(f"cannot run {title} without its weights ({type(error).__name__}: {error})") from error


def _stand_ins(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns a fake tensor for each parameter, in `dtype`, and for each buffer. Tied parameters stay tied."""
    made: dict[int, torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in made:
            # Created inside `fake_tensors`, so nothing is allocated.
            values = torch.empty(parameter.shape, dtype=dtype, device="cpu")
            made[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
        found[name] = made[id(parameter)]
    for name, buffer in model.named_buffers(remove_duplicate=False):
        found[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
    return found


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
    except Exception as error:  # transformers may raise any error for a foreign or damaged file
        raise ConfigError(
            f"cannot read the config of {name} ({type(error).__name__}: {error_message(error)})"
        ) from error
    text = config.get_text_config()
    # A key-value cache would count as saved bytes, and training has none.
    text.use_cache = False
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
    weights: Iterable[torch.Tensor],
    name: str,
    sequence: int,
    named: Sequence[str],
) -> Shape:
    """Returns the shape of a causal language model, counted during one call of `forward`.

    Args:
        model: the model, for its units and layouts.
        forward: runs the model on fake tensors.
        weights: the fake tensors that `forward` uses as parameters.
        name: the shape's name.
        sequence: tokens of a sequence.
        named: names of the units, as in the config.
    """
    units = find_units(model, named)
    ids = torch.zeros(1, sequence, dtype=torch.long)
    counter = _Counter({weight.untyped_storage()._cdata for weight in weights})
    hooks = [
        model.get_submodule(site).register_forward_pre_hook(_begin(counter, needed), with_kwargs=True)
        for site, needed in units.sites.items()
    ]
    try:
        with counter, torch.autograd.graph.saved_tensors_hooks(counter.save, lambda packed: packed):
            forward(input_ids=ids, labels=ids)
    finally:
        for hook in hooks:
            hook.remove()
    return Shape(name, layouts_of(model, units), tuple(counter.uses()), counter.largest, sequence)


def _begin(counter: _Counter, needed: Sequence[int]) -> Any:
    """Returns a forward pre-hook that starts the uses of the units `needed`."""

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        for unit in needed:
            counter.begin(unit, tensors[0].nbytes if tensors else 0, isinstance(module, nn.Embedding))

    return begin


class _Counter(TorchDispatchMode):
    """A dispatch mode that attributes operations to the unit whose use started last."""

    def __init__(self, weights: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights, self._known = weights, set(weights)
        self._rows: list[dict[str, Any]] = []
        self._storages: list[Any] = []
        """References that keep storages alive: a freed storage's address could be used again and be taken for known."""
        self.largest = 0

    def begin(self, unit: int, boundary: int, lookup: bool) -> None:
        """Starts a use of `unit`, unless the last use is of the same unit; `boundary` is the bytes of its input."""
        if not self._rows or self._rows[-1]["unit"] != unit:
            self._rows.append(
                {"unit": unit, "flops": 0.0, "nbytes": 0.0, "saved": 0, "boundary": boundary, "lookup": lookup}
            )

    def uses(self) -> list[Use]:
        """Returns the uses in the order in which they started."""
        return [Use(**row) for row in self._rows]

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts a tensor that autograd saves, once per storage and without weights, and returns the tensor."""
        storage = tensor.untyped_storage()
        if self._rows and storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._storages.append(storage)
            self._rows[-1]["saved"] += storage.nbytes()
        return tensor

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if not self._rows:
            return out
        made = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        # An operation counts by its FLOPs if torch has a formula, else by its traffic; views move nothing.
        formula = flop_registry.get(function._overloadpacket)
        if formula is not None:
            self._rows[-1]["flops"] += formula(*args, **kwargs, out_val=out)
        elif not function.is_view:
            given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            # Reads of weights are left out: the rate `Hardware.weights` accounts for them.
            taken = [each for each in given if each.untyped_storage()._cdata not in self._weights]
            self._rows[-1]["nbytes"] += sum(each.nbytes for each in (*taken, *made))
        if not function.is_view:
            self.largest = max([self.largest, *(each.nbytes for each in made)])
        return out
