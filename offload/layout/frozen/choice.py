"""The frozen weights that `"frozen"` of the config stores as blocks of codes.

**The rule.** A parameter is stored as blocks if it is frozen and is

* the weight of a linear layer (2 dimensions), or
* a stack of matrices (3 dimensions, at least 2 x 64 x 64) of a module outside of torch, as experts are stacked,

and if no module uses it as an embedding or as the output layer of a model, and it is not part of an adapter of peft.
Norms, biases, embeddings, convolutions and all that trains stay in the dtype of the model, and what another library has
quantized stays as that library has it (`opaque`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from offload.kernels.blocks import BLOCK_FORMATS
from offload.layout.flat_layout import Stored
from offload.layout.frozen.opaque import opaque_parameters, stored_as_bytes

_LEAST = 64
"""Rows and columns of a matrix in a stack. A stack of smaller ones is no stack of experts."""


def stored_weights(
    model: nn.Module, form: str | None, dtype: torch.dtype, rows: Mapping[str, int] = {}
) -> dict[str, Stored]:
    """Returns how each frozen parameter is stored that is not stored as values: as blocks, or as another's bytes.

    The arguments are those of `stored_as_blocks`.
    """
    return stored_as_blocks(model, form, dtype, rows) | stored_as_bytes(model, dtype)


def stored_as_blocks(
    model: nn.Module, form: str | None, dtype: torch.dtype, rows: Mapping[str, int] = {}
) -> dict[str, Stored]:
    """Returns how each parameter that is stored as blocks is stored, by its first name.

    Args:
        model: the model, whose parameters give shapes and `requires_grad`.
        form: name of the block format; None for no parameter.
        dtype: dtype of the weights. A unit is laid out in elements of this dtype.
        rows: number of experts of each stack that is cut, by the parameter's name; the result is then of one expert.
    """
    if form is None:
        return {}
    return {
        name: Stored(form, blocks_numel(form, parameter.numel() // rows.get(name, 1), dtype))
        for name, parameter in _chosen(model)
        if parameter.numel()
    }


def blocks_numel(form: str, numel: int, dtype: torch.dtype) -> int:
    """Returns the elements of `dtype` whose memory the blocks of `numel` values take."""
    return math.ceil(BLOCK_FORMATS[form].stored_nbytes(numel) / dtype.itemsize)


def _chosen(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the parameters that the rule names, by their first names."""
    modules = dict(model.named_modules())
    kept = _kept(model, modules) | {id(parameter) for parameter in opaque_parameters(model).values()}
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or id(parameter) in kept:
            continue
        # A tied parameter must be a matrix of every module that owns it.
        if all(_is_matrix(parameter, *_owner(each, modules)) for each in owners[id(parameter)]):
            yield name, parameter


def _owner(name: str, modules: Mapping[str, nn.Module]) -> tuple[nn.Module | None, str]:
    """Returns the module that owns a parameter, and the parameter's name in it; None for a second place of a module."""
    path, _, own = name.rpartition(".")
    return modules.get(path), own


def _is_matrix(parameter: nn.Parameter, owner: nn.Module | None, own: str) -> bool:
    """Returns True if `parameter` is a matrix, or a stack of matrices, by which its module multiplies."""
    if owner is None:
        return True  # the module's first place decides
    shape = tuple(parameter.shape)
    if len(shape) == 2:
        # transformers' Conv1D, of GPT-2, is a linear layer with a transposed weight.
        transposed = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", nn.Linear)
        return own == "weight" and isinstance(owner, nn.Linear | transposed)
    outside = not type(owner).__module__.startswith("torch.nn.modules.")
    return outside and len(shape) == 3 and shape[0] > 1 and min(shape[1:]) >= _LEAST


def _kept(model: nn.Module, modules: Mapping[str, nn.Module]) -> set[int]:
    """Returns the ids of parameters that are never stored as blocks: of output layers, and of adapters of peft."""
    found: set[int] = set()
    for module in modules.values():
        get_output: Any = getattr(module, "get_output_embeddings", None)
        output = get_output() if callable(get_output) else None
        if isinstance(output, nn.Module):
            found |= {id(parameter) for parameter in output.parameters()}
        # A layer of peft names the containers of its adapters. A second adapter may be frozen while the first trains.
        for name in getattr(module, "adapter_layer_names", ()):
            container = getattr(module, name, None)
            if isinstance(container, nn.Module):
                found |= {id(parameter) for parameter in container.parameters()}
    return found
