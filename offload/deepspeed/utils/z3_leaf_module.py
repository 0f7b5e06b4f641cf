"""`deepspeed.utils.z3_leaf_module`: modules whose weights are fetched together.

A marked module is a unit of the engine that `deepspeed.initialize` makes, as one that the key "leaf_module" names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

_MARK = "_z3_leaf"
"""Attribute of marked modules, under DeepSpeed's name."""


def z3_leaf_module(model: nn.Module) -> bool:
    """Returns True if a module is marked.

    Args:
        model: the module.
    """
    return bool(getattr(model, _MARK, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the marked modules of a model.

    Args:
        model: the model.
    """
    return [each for each in model.modules() if z3_leaf_module(each)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Marks a module, or removes its mark.

    Args:
        model: the module.
        flag: True to mark it.
    """
    setattr(model, _MARK, flag)


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Marks the modules of some classes, and returns them.

    Args:
        model: the model.
        leaf_module_classes: classes, or their names.
        raise_if_not_found: False to find nothing without an error.

    Raises:
        ValueError: if no module is of these classes.
    """
    return _set_by_class(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Removes the marks of the modules of some classes, and returns the modules.

    Args:
        model: the model.
        leaf_module_classes: classes, or their names.
        raise_if_not_found: False to find nothing without an error.

    Raises:
        ValueError: if no module is of these classes.
    """
    return _set_by_class(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks modules by their names in `named_modules()`; returns them, and the names that were not found.

    Args:
        model: the model.
        module_names: names of modules.
        flag: False to remove the marks.
        raise_if_not_found: False to leave out a name that is not found.

    Raises:
        ValueError: if there is no module of one of the names.
    """
    return _set_by_name(model, module_names, lambda name, asked: name == asked, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Marks modules by the ends of their names; returns them, and the ends that were not found.

    Args:
        model: the model.
        module_name_suffixes: ends of names of modules.
        flag: False to remove the marks.
        raise_if_not_found: False to leave out an end that is not found.

    Raises:
        ValueError: if no module's name ends with one of them.
    """
    return _set_by_name(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def _set_by_class(model: nn.Module, classes: Sequence[type | str], flag: bool, must_exist: bool) -> list[nn.Module]:
    # By class or by name: a script need not import a class of remote code.
    kinds = tuple(each for each in classes if isinstance(each, type))
    names = {each for each in classes if isinstance(each, str)}
    found = [
        each
        for each in model.modules()
        if isinstance(each, kinds)
        or names & {type(each).__name__, f"{type(each).__module__}.{type(each).__qualname__}"}
    ]
    if not found and must_exist:
        raise ValueError(f"no module of {type(model).__name__} is of {list(classes)}")
    # All are found before the first is marked, so that an error changes nothing.
    for each in found:
        set_z3_leaf_module(each, flag)
    return found


def _set_by_name(
    model: nn.Module, asked: Sequence[str], fits: Callable[[str, str], bool], flag: bool, must_exist: bool
) -> tuple[list[nn.Module], list[str]]:
    modules = dict(model.named_modules())
    found = {name: each for name, each in modules.items() if any(fits(name, word) for word in asked)}
    missing = [word for word in asked if not any(fits(name, word) for name in modules)]
    if missing and must_exist:
        raise ValueError(f"{type(model).__name__} has no module named {missing}")
    for each in found.values():
        set_z3_leaf_module(each, flag)
    return list(found.values()), missing
