"""`deepspeed.utils`: logging, leaf modules, values of parameters, and small tools that scripts import."""

from __future__ import annotations

import contextlib
import functools
import logging as python_logging  # `logging` is a module of DeepSpeed here
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as clip_grad_norm_

from offload.deepspeed.accelerator import get_accelerator
from offload.deepspeed.comm import get_rank
from offload.deepspeed.names import attributes_of
from offload.engine.access import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from offload.engine.data import Loader
from offload.sizes import format_size
from offload.torch_internals import tree_map

__all__ = [
    "OnDevice",
    "RepeatingLoader",
    "get_z3_leaf_modules",
    "groups",
    "log_dist",
    "log_dist_once",
    "logger",
    "logging",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_log_level_from_string",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]

__getattr__ = attributes_of("utils")


# -- logging -------------------------------------------------------------------------------------------

_LEVELS = {name: getattr(python_logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}

logger = python_logging.getLogger("DeepSpeed")
# Warnings go to stdout, as in DeepSpeed's logger. The module may be imported under two names, and a second handler
# would print each line twice.
if not logger.handlers:
    _handler = python_logging.StreamHandler(sys.stdout)
    _handler.setFormatter(python_logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
    logger.addHandler(_handler)
    logger.setLevel(python_logging.WARNING)
    logger.propagate = False


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = python_logging.INFO) -> None:
    """Logs a message on some ranks; on all for None, or -1 among them."""
    rank = get_rank()
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


@functools.cache
def _log_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = python_logging.INFO) -> None:
    """Logs a message as `log_dist` does, the first time only."""
    _log_once(message, None if ranks is None else tuple(ranks), level)


def set_log_level_from_string(log_level_str: str, custom_logger: python_logging.Logger | None = None) -> None:
    """Sets the level, such as "info", of DeepSpeed's logger or of another one."""
    if log_level_str.lower() not in _LEVELS:
        raise ValueError(f"{log_level_str} is no level of logging: expected one of {', '.join(_LEVELS)}")
    (custom_logger or logger).setLevel(_LEVELS[log_level_str.lower()])


# -- leaf modules --------------------------------------------------------------------------------------

# `deepspeed.initialize` makes a marked module one unit of the engine, as the config key "leaf_module" does.
_MARK = "_z3_leaf"
"""Attribute of marked modules, under DeepSpeed's name."""


def z3_leaf_module(model: nn.Module) -> bool:
    """Returns True if a module is marked."""
    return bool(getattr(model, _MARK, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the marked modules of a model."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Marks a module, or removes its mark."""
    setattr(model, _MARK, flag)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Marks the modules of some classes, or names of classes, and returns the modules."""
    return _set_by_class(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Removes the marks that `set_z3_leaf_modules` makes, and returns the modules."""
    return _set_by_class(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks modules by their names in `named_modules()`; returns them, and the names that the model lacks."""
    return _set_by_name(model, module_names, str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks modules by the suffixes of their names; returns the modules, and the suffixes that match no name."""
    return _set_by_name(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def _set_by_class(model: nn.Module, classes: Sequence[type | str], flag: bool, must_exist: bool) -> list[nn.Module]:
    # By class or by name: a script need not import a class of remote code.
    types = tuple(kind for kind in classes if isinstance(kind, type))
    names = {kind for kind in classes if isinstance(kind, str)}
    modules = []
    for module in model.modules():
        kind = type(module)
        if isinstance(module, types) or names & {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}:
            modules.append(module)
    if not modules and must_exist:
        raise ValueError(f"no module of {type(model).__name__} is of {list(classes)}")
    # The search ends before the first module is marked, so that an error changes nothing.
    for module in modules:
        set_z3_leaf_module(module, flag)
    return modules


def _set_by_name(
    model: nn.Module, words: Sequence[str], fits: Callable[[str, str], bool], flag: bool, must_exist: bool
) -> tuple[list[nn.Module], list[str]]:
    named = dict(model.named_modules())
    modules = [module for name, module in named.items() if any(fits(name, word) for word in words)]
    missing = [word for word in words if not any(fits(name, word) for name in named)]
    if missing and must_exist:
        raise ValueError(f"{type(model).__name__} has no module named {missing}")
    for module in modules:
        set_z3_leaf_module(module, flag)
    return modules, missing


# -- parameters and tensors ----------------------------------------------------------------------------


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replaces the gradient of each parameter by a function of it. Every rank calls it with the same parameters.

    `update_func` receives the gradient in fp32 and the parameter. Parameters without a gradient are left out.
    """
    for parameter in param_list:
        # One gradient in memory at a time: all gradients together may be larger than the RAM.
        gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            safe_set_full_grad(parameter, update_func(gradient, parameter))


class OnDevice:
    """Context in which torch creates tensors on a device and in a dtype, for example on "meta" without memory."""

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self._dtype, self._device, self._enabled = dtype, device, enabled
        self._open = contextlib.ExitStack()

    def __enter__(self) -> None:
        if self._enabled:
            # torch has no context of its own for the dtype.
            self._open.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
            self._open.enter_context(torch.device(self._device))

    def __exit__(self, *error: Any) -> bool | None:
        return self._open.__exit__(*error)


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Returns `item`, which may be nested, with its tensors on a device; with a criterion, only the matching ones."""
    moves = criterion_func or (lambda leaf: isinstance(leaf, torch.Tensor))
    return tree_map(lambda leaf: leaf.to(device) if moves(leaf) else leaf, item)


copy_to_device = move_to_device


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Returns `item`, which may be nested, with each tensor copied into memory of the tensor's own size."""
    # `copy=True`, since a view on the CPU would be pickled with the memory of the whole tensor.
    return tree_map(lambda leaf: leaf.detach().to(device, copy=True) if isinstance(leaf, torch.Tensor) else leaf, item)


# -- loaders, memory, seeds ----------------------------------------------------------------------------

DeepSpeedDataLoader = Loader


class RepeatingLoader:
    """A loader without an end: it starts again whenever the wrapped loader ends."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            # An empty loader raises here, so that there is no endless loop.
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Logs the memory in use and its peak; without `force` it does nothing, as in DeepSpeed."""
    # Logged at a level that DeepSpeed's logger shows, since the caller requested the line.
    if force:
        device = get_accelerator()
        used, most = device.memory_allocated(), device.max_memory_allocated()
        logger.warning("%s: %s %s, at most %s", message, device.device_name(), format_size(used), format_size(most))


def empty_cache() -> None:
    """Gives memory that torch has cached back to the device."""
    get_accelerator().empty_cache()


def set_random_seed(seed: int) -> None:
    """Seeds the generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def ensure_directory_exists(filename: str | os.PathLike[str]) -> None:
    Path(filename).parent.mkdir(parents=True, exist_ok=True)
