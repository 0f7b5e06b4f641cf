"""Linear layers whose matrix products torchao computes in fp8. Weights keep their dtype in every tier."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from offload.config import Config
from offload.errors import ConfigError
from offload.layout.frozen import quantized_by_other_library
from offload.layout.units import blocks_of

_MULTIPLE = 16
"""Kernels of products in fp8 take matrices of a multiple of so many rows and columns."""
_LEAST_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs of NVIDIA with products in fp8, as of torchao's kernels."""


def linear_layers(model: nn.Module, config: Config) -> tuple[str, ...]:
    """Returns the names of the layers that fp8 fits: plain linear layers of the blocks, in multiples of 16 features."""
    blocks = blocks_of(model, config.units)
    return tuple(
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module.in_features % _MULTIPLE == module.out_features % _MULTIPLE == 0
        and any(name == block or name.startswith(f"{block}.") for block in blocks)
    )


@contextmanager
def fp8_layers(model: nn.Module, config: Config, device: torch.device) -> Iterator[None]:
    """Puts layers of torchao in place of linear ones if the config asks for it; takes that back after an error.

    Layers of torchao have the same parameters and names. Raises `ConfigError` if torchao is missing, the device has no
    products in fp8, or no layer can be converted. The model is unchanged.
    """
    if not config.fp8.enabled:
        yield
        return
    convert, settings = _recipe(config, device)
    names = linear_layers(model, config)
    _check(model, config, names)
    replaced = {name: model.get_submodule(name) for name in names}
    try:
        convert(model, module_filter_fn=lambda _, name: name in replaced, config=settings)
        for name, layer in replaced.items():
            model.get_submodule(name).train(layer.training)
        yield
    except BaseException:
        for name, layer in replaced.items():
            model.set_submodule(name, layer)
        raise


def _recipe(config: Config, device: torch.device) -> tuple[Any, Any]:
    """Returns torchao's function that converts a model, and its settings."""
    emulate = config.fp8.emulate
    if not emulate and (device.type != "cuda" or torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY):
        raise ConfigError(
            f'"fp8" needs a GPU with products in fp8 (compute capability 8.9 or later), and this run computes on '
            f'{device}: switch it off, or set "emulate": true in the block to round as fp8 does, which saves no time'
        )
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ConfigError(
            f'"fp8" needs torchao, which cannot be imported ({error}): pip install "offload[fp8]", or switch it off'
        ) from error
    settings = Float8LinearConfig.from_recipe_name(config.fp8.recipe)
    return convert_to_float8_training, dataclasses.replace(settings, emulate=emulate)


def _check(model: nn.Module, config: Config, names: tuple[str, ...]) -> None:
    untried = {
        "weights in 4 or 8 bits": config.offload.frozen is not None or bool(quantized_by_other_library(model)),
        "tensor parallelism": config.tensor_parallel.autotp_size > 1,
    }
    for what, there in untried.items():
        if there:
            raise ConfigError(f'"fp8" was not tried with {what}: switch it off')
    if not names:
        raise ConfigError(
            f'"fp8" finds no torch.nn.Linear in the blocks of the model whose features are multiples of {_MULTIPLE}: '
            'switch it off, or name the modules of blocks in "units" of the "offload" block'
        )
    hooked = next((name for name in names if _has_hooks(model.get_submodule(name))), None)
    if hooked is not None:
        raise ConfigError(f'"fp8" replaces {hooked}, which has hooks: register them after offload.initialize')


def _has_hooks(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)
