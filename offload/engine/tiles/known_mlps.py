"""The MLPs of decoders of transformers, which `"tile_mlp"` in the block "offload" tiles.

An MLP is known by where it is and what it consists of, not by its family: a module named as an MLP in a layer of a
`ModuleList`, with linear layers of known names and without experts, whose forward takes the hidden states alone. A
structure does not show that each token is computed by itself, so only classes of transformers with their own forward
are known, by identity, and all inside of them must be known as well: a hook there, or a layer of the user's, may mix
tokens, and would be called for each chunk.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from offload.engine.tiles.sequence import has_own_forward, is_tiled, tiled, untiled
from offload.errors import ConfigError
from offload.notices import Remark
from offload.provenance import foreign_hooks, is_class_of, is_of

_NAMES = ("mlp", "feed_forward", "ffn")
_FORMS = (
    {"gate_proj", "up_proj", "down_proj"},
    {"gate_up_proj", "down_proj"},
    {"up_proj", "down_proj"},
    {"dense_h_to_4h", "dense_4h_to_h"},
    {"c_fc", "c_proj"},
    {"fc1", "fc2"},
    {"fc_in", "fc_out"},
    {"w1", "w2", "w3"},
)
"""Names of the linear layers of an MLP, form by form."""

_OF_TORCH = frozenset(
    (
        *(nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity),
        *(nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList),
        *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.SELU, nn.ELU, nn.Mish),
        *(nn.Sigmoid, nn.Tanh, nn.Softplus),
    )
)
"""Classes of torch that compute each token by itself."""
_LIBRARIES = ("transformers", "peft", "bitsandbytes", "torchao")
"""Packages whose layers, where an MLP has one, compute each token by itself."""

TILE_DIM = -2
"""The dimension of tokens: of (batch, sequence, features), and of packed (tokens, features)."""


def known_mlps(model: nn.Module) -> tuple[str, ...]:
    """Returns the names of the MLPs of a decoder. Those that the user has tiled are not among them."""
    return tuple(name for name, module in _candidates(model) if _is_mlp(module))


def _candidates(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the modules that are named as an MLP in a layer of a decoder."""
    modules = dict(model.named_modules())
    layers = [
        f"{name}.{child}" if name else child
        for name, module in modules.items()
        if isinstance(module, nn.ModuleList)
        for child, _ in module.named_children()
    ]
    names = [f"{layer}.{name}" for layer in layers for name in _NAMES]
    return [(name, modules[name]) for name in names if name in modules]


def _is_mlp(module: nn.Module) -> bool:
    """Returns True if a module has the form of an MLP that computes each token by itself."""
    return _has_form(module) and _change(module) is None


def _has_form(module: nn.Module) -> bool:
    """Returns True if a module is of a class of transformers that has the form of an MLP, and was not tiled."""
    if is_tiled(module) or has_own_forward(module) or not is_class_of(type(module), "transformers"):
        return False
    linears = {name for name, child in module.named_children() if _is_linear(child)}
    return linears in _FORMS and not _has_others(module, linears) and _takes_hidden_states(module)


def _change(module: nn.Module) -> str | None:
    """Returns what in an MLP may compute more than each token by itself, as a clause; None if nothing does."""
    if not is_of(type(module).forward, "transformers"):
        return f"the forward of {type(module).__name__} was replaced"
    for path, each in module.named_modules():
        if not path:
            continue
        known = type(each) in _OF_TORCH or any(is_class_of(type(each), package) for package in _LIBRARIES)
        if not known or not any(is_of(type(each).forward, package) for package in ("torch", *_LIBRARIES)):
            return f"its {path} is a {type(each).__module__}.{type(each).__qualname__}"
        if has_own_forward(each):
            return f"its {path} has a forward of its own"
        if (hook := next(foreign_hooks(each, *_LIBRARIES), None)) is not None:
            return f"its {path} has a {hook[0]}"
    return None


def _is_linear(module: nn.Module) -> bool:
    """Returns True for a module with a matrix, such as `nn.Linear`, `Conv1D` of transformers, or an adapter of peft."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.ndim == 2


def _has_others(module: nn.Module, linears: set[str]) -> bool:
    """Returns True if a module owns parameters beside those of its linear layers and of norms."""
    return any(
        True
        for name, child in module.named_children()
        if name not in linears and any(each.ndim != 1 for each in child.parameters())
    )


def _takes_hidden_states(module: nn.Module) -> bool:
    """Returns True if the forward of a module has one argument."""
    _, *arguments = inspect.signature(type(module).forward).parameters.values()
    return len(arguments) == 1 and arguments[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def choose(model: nn.Module, tile_mlp: Literal["auto"] | int) -> tuple[str, ...]:
    """Returns the names of the modules that `"tile_mlp"` asks to tile: none for `False`.

    Raises:
        ConfigError: if a number of chunks is given, and the model has no MLP that is known.
    """
    if tile_mlp is False:
        return ()
    names = known_mlps(model)
    if not names and tile_mlp != "auto":
        raise ConfigError(
            f'"tile_mlp" of the "offload" block is {tile_mlp}, and {type(model).__name__} has no MLP of a decoder of '
            f"transformers that is not tiled already{_why_whole(model)}; call offload.tiled(module) for its MLPs, or "
            'leave "tile_mlp" out'
        )
    return names


def _why_whole(model: nn.Module) -> str:
    """Returns words on the first MLP that is not tiled since something in it was changed; "" if there is none."""
    changed = ((name, _change(module)) for name, module in _candidates(model) if _has_form(module))
    return next((f" ({name} stays whole: {change})" for name, change in changed if change is not None), "")


def notices(model: nn.Module, names: Sequence[str], tile_mlp: Literal["auto"] | int) -> tuple[str, ...]:
    """Returns the line about tiled MLPs for the start of a run; none if nothing was asked for."""
    if tile_mlp is False:
        return ()
    whole = _why_whole(model)
    if not names:
        return (
            f'"tile_mlp": "auto" found no MLP of a decoder of transformers{whole}; offload.tiled(module) tiles others',
        )
    how = "as many tokens as features" if tile_mlp == "auto" else f"{tile_mlp} chunks"
    line = f"{len(names)} MLPs are computed in tiles of {how}, from {names[0]} on{whole}"
    return (line if whole else Remark(line),)


def tile(model: nn.Module, names: Sequence[str], tile_mlp: Literal["auto"] | int) -> Callable[[], None]:
    """Tiles the named modules, and returns a function that undoes it."""
    modules: list[Any] = [model.get_submodule(name) for name in names]
    for module in modules:
        tiled(module, TILE_DIM, tile_mlp)

    def undo() -> None:
        for module in modules:
            untiled(module)

    return undo
