"""Tensor parallelism by the plan that transformers has for the class of a model: DeepSpeed's "AutoTP".

A plan names a style for each layer that is divided; `STYLES` says what a style means. The engine cuts whole parameters
into parts when it takes them over, and lays inputs and outputs out while it owns the model (`sharded_params`). Layers
that no style names are whole on each rank of a row, and compute the same there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from offload.config import Config
from offload.errors import ConfigError
from offload.layout.experts import expert_stacks
from offload.layout.units import Stack
from offload.parallel.sharded_params import DTensorForm, FoundShards, LayerLayouts
from offload.sizes import count_of


class Style(NamedTuple):
    """The dimensions along which a layer is divided. None stands for all of it on each rank."""

    weight: int | None = None
    bias: int | None = None
    arrives: int | None = None
    """Of the input, as the layer before has left it."""
    enters: int | None = None
    """Of the input with which the layer computes."""
    leaves: int | None = None
    """Of the output."""


_GATHERED = Style(weight=0, bias=0)
_SPLIT = Style(weight=1, enters=-1)
STYLES: Mapping[str, Style] = {
    "colwise": Style(weight=0, bias=0, leaves=-1),
    "colwise_gather_output": _GATHERED,
    "colwise_rep": _GATHERED,
    "rowwise": Style(weight=1, arrives=-1, enters=-1),
    "rowwise_split_input": _SPLIT,
    "rowwise_rep": _SPLIT,
    "embedding_rowwise": Style(weight=0),
    "embedding_colwise": Style(weight=1),
    # A norm over each head, of which a rank has some. The gradient of its weight is the sum over the ranks, which a
    # DTensor knows if its input is divided along any dimension but the last.
    "replicated_with_grad_allreduce": Style(arrives=0, enters=0, leaves=0),
}
"""The styles of transformers' plans that an engine knows."""
_WHOLE = ("moe_tp_experts",)
"""Styles of modules that stay whole on each rank: stacked experts."""


def planned_shards(
    model: nn.Module, config: Config, device: torch.device, shards: FoundShards, ranks: int
) -> FoundShards:
    """Returns the tensor parallelism of `model`: as it is, or by its plan over rows of consecutive ranks.

    Collective of all processes, all of which have the same sizes in `config`. Changes nothing yet. `shards` is what the
    model has already, and `ranks` the number of all processes. Raises `ConfigError` if the ranks cannot be divided into
    such rows, or the model cannot be divided by its plan.
    """
    size, experts = config.tensor_parallel.autotp_size, config.expert_parallel.size
    if size == 1:
        return shards
    if experts not in (1, size):
        raise ConfigError(
            f"expert_parallel.autoep_size is {experts}, and tensor_parallel.autotp_size is {size}; expected one "
            "number: experts are divided among the ranks of tensor parallelism, which share a batch"
        )
    if shards.row or shards.dtensors:
        if len(shards.row) == size and experts == 1:
            return shards
        raise ConfigError(
            f"tensor_parallel.autotp_size is {size}, and the model is divided among {max(1, len(shards.row))} ranks "
            "already: set it to that number, or leave it out"
        )
    styles = layer_styles(model, size)
    if ranks % size:
        raise ConfigError(
            f"tensor_parallel.autotp_size is {size}, the number of ranks that compute each layer together, and "
            f"{count_of(ranks, 'rank')} cannot be divided into such groups: set it to a divisor of {ranks}"
        )
    stacks = expert_stacks(model, size) if experts > 1 else ()
    return _shards(model, styles, stacks, _row(device.type, size))


def layer_styles(model: Any, size: int) -> dict[str, Style]:
    """Returns the style of each layer that the plan of `model` divides over `size` ranks, by name. Pure.

    Raises `ConfigError` if the model has no plan, or one that an engine cannot follow.
    """
    request, other = (
        f"tensor_parallel.autotp_size is {size}",
        "divide it by torch's parallelize_module, or leave it out",
    )
    kind = getattr(sys.modules.get("transformers"), "PreTrainedModel", ())
    plan: Mapping[str, str] = (getattr(model, "tp_plan", None) or {}) if isinstance(model, kind) else {}
    # Plans write stars for the numbers of layers.
    rules = {name: re.sub(r"\.\d+(?=\.|$)", ".*", name) for name, _ in model.named_modules()}
    named = {name: plan[rule] for name, rule in rules.items() if rule in plan}
    if not named:
        raise ConfigError(
            f"{request}, and {type(model).__name__} has no tensor-parallel plan of transformers for its layers: {other}"
        )
    unknown = next((name for name, style in named.items() if style not in (*STYLES, *_WHOLE)), None)
    if unknown is not None:
        raise ConfigError(
            f"{request}, and the plan of {type(model).__name__} has the style {named[unknown]!r} for {unknown}, which "
            f"offload does not know: {other}"
        )
    config = model.config.get_text_config()
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        if "colwise" in plan.values() and isinstance(heads, int) and heads % size:
            raise ConfigError(f"{request}, which does not divide {key}, {heads}: set it to a divisor of that number")
    styles = {name: STYLES[style] for name, style in named.items() if style in STYLES}
    for name in [*styles]:
        layer = model.get_submodule(name)
        # Scaled, for example, by code of its own, which knows nothing of parts: it stays whole.
        if isinstance(layer, nn.Embedding) and type(layer).forward is not nn.Embedding.forward:
            del styles[name]
        else:
            _check_layer(layer, name, styles[name], size, request)
    return _without_half_ties(model, styles)


def _check_layer(layer: Any, name: str, style: Style, size: int, request: str) -> None:
    """Raises `ConfigError` if a layer cannot be divided over `size` ranks in this style."""
    is_norm = style.weight is None
    if not is_norm and type(layer) not in (nn.Linear, nn.Embedding) and type(layer).forward is not nn.Linear.forward:
        raise ConfigError(
            f"{request}, and {name} is a {type(layer).__name__}; expected a torch.nn.Linear or an Embedding, whose "
            "product the plan divides: put adapters and quantized layers into a model without tensor_parallel"
        )
    for own, parameter in layer.named_parameters(recurse=False):
        if parameter.is_meta:
            raise ConfigError(
                f"{request}, and parameter {name}.{own} has no values yet: build the model with values, outside of "
                "offload.init and load_pretrained"
            )
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"{request}, and parameter {name}.{own} has gradient hooks, which would be lost: register them after "
                "offload.initialize, on the parameters that the model has then"
            )
    # Rows of an embedding and of the head may be divided unevenly, since all of them are gathered.
    if style.leaves == -1 or style.enters == -1:
        width = layer.weight.shape[style.weight]
        if width % size:
            raise ConfigError(f"{request}, which does not divide the {width} features of {name}")


def _without_half_ties(model: nn.Module, styles: Mapping[str, Style]) -> dict[str, Style]:
    """Returns the styles without layers that share a parameter with a layer that has no style, or another one."""
    divided: dict[int, set[int | None]] = {}
    for name, layer in model.named_modules():
        for own, parameter in layer.named_parameters(recurse=False):
            dims = divided.setdefault(id(parameter), set())
            dims.add(_dim(styles[name], own) if name in styles else None)
    whole = {parameter for parameter, dims in divided.items() if len(dims) > 1}
    return {
        name: style
        for name, style in styles.items()
        if not any(id(parameter) in whole for parameter in model.get_submodule(name).parameters(recurse=False))
    }


def _shards(model: nn.Module, styles: Mapping[str, Style], stacks: Sequence[Stack], mesh: Any) -> FoundShards:
    forms: dict[str, DTensorForm] = {}
    dims: dict[str, int] = {}
    seen: set[int] = set()
    for name, style, own, parameter in _parameters(model, styles):
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        dim = _dim(style, own)
        forms[f"{name}.{own}"] = DTensorForm(mesh, _placements(dim), parameter.shape, parameter.stride())
        if dim is not None:
            dims[f"{name}.{own}"] = dim
    for name in (name for stack in stacks for name in stack.parameters):
        parameter = model.get_parameter(name)
        forms[name], dims[name] = DTensorForm(mesh, _placements(0), parameter.shape, parameter.stride()), 0
    layouts = {
        name: LayerLayouts(mesh, *(_placements(dim) for dim in (style.arrives, style.enters, style.leaves)))
        for name, style in styles.items()
    }
    row = tuple(mesh.mesh.flatten().tolist())
    return FoundShards(
        row=row,
        dtensors=forms,
        layouts=layouts,
        experts=frozenset(stack.module for stack in stacks),
        sharded=frozenset(dims),
        dims=dims,
    )


def _parameters(model: nn.Module, styles: Mapping[str, Style]) -> Iterator[tuple[str, Style, str, nn.Parameter]]:
    for name, style in styles.items():
        for own, parameter in model.get_submodule(name).named_parameters(recurse=False):
            yield name, style, own, parameter


def _dim(style: Style, own: str) -> int | None:
    return style.bias if own == "bias" else style.weight


def _placements(dim: int | None) -> tuple[Any, ...]:
    from torch.distributed.tensor import Replicate, Shard

    return (Replicate() if dim is None else Shard(dim),)


def _row(device_type: str, size: int) -> Any:
    """Returns the mesh of this process's row. Collective of all processes."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, (dist.get_world_size() // size, size), mesh_dim_names=("dp", "tp"))["tp"]
