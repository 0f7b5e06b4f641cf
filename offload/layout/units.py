"""Division of a model into units: groups of parameters that move together.

`find_units` is pure: it reads modules and parameters, and changes neither.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import nn

from offload.errors import ConfigError
from offload.provenance import is_class_of
from offload.torch_internals import is_optimized_module

_SMALLEST_SHARE = 64
"""A candidate below 1/64 of the largest joins its parent: the memory that it could free is not worth its reads."""


@dataclass(frozen=True)
class Unit:
    """Parameters that move together, by their first names in the model, in the model's order."""

    name: str
    parameters: tuple[str, ...]
    row: int | None = None
    """The expert whose rows of these parameters are the unit; None for all other units."""
    in_fp32: bool = False
    """True if the weights stay in fp32, whatever the dtype of other weights is."""
    rows: range | None = None
    """The group of experts, or the rows of the table, that are the unit; None for whole parameters and for a `row`."""
    ep_size: int = 1
    """Number of equal parts of the experts, each of which other ranks own; 1 if all ranks divide each expert."""


class Stack(NamedTuple):
    """A module whose parameters stack experts and are cut into rows, or into groups of rows."""

    module: str
    parameters: tuple[str, ...]
    rows: int
    """Number of experts, the first size of each parameter."""
    groups: int | None = None
    """Number of groups, which are units of equally many experts; None if each expert is a unit."""
    ep_size: int = 1
    """Number of groups of one unit, each of which other ranks own; 1 if groups or experts are units."""

    @property
    def parts(self) -> int:
        """Number of parts of each parameter."""
        return self.groups or self.rows


class Table(NamedTuple):
    """The weight of an embedding, of a head, or of both, which is cut into pieces of rows."""

    parameter: str
    pieces: tuple[range, ...]
    """The rows of each piece, in order."""
    tied: bool
    """True if several modules use a table that trains. The gradient of a piece is then the sum of those of each use."""


@dataclass(frozen=True)
class Units:
    """Units of a model, and the modules whose forward needs them.

    `sites` maps the name of each module that gets hooks to the indices of the units that must be on the device during
    its forward.
    """

    units: tuple[Unit, ...]
    sites: dict[str, tuple[int, ...]]
    experts: dict[str, range] = field(default_factory=dict)
    """For each module whose experts, or groups of them, are units, the range of these units in the experts' order."""
    tables: dict[str, range] = field(default_factory=dict)
    """For each table in pieces, by the parameter's name, the range of the pieces' units in the order of the rows."""

    @property
    def in_fp32(self) -> frozenset[str]:
        """Names of the parameters that stay in fp32."""
        return frozenset(name for unit in self.units if unit.in_fp32 for name in unit.parameters)


def find_units(
    model: nn.Module,
    named: Sequence[str] = (),
    stacks: Sequence[Stack] = (),
    in_fp32: Collection[str] = (),
    tables: Sequence[Table] = (),
    in_files: Collection[str] = (),
) -> Units:
    """Divides the parameters of `model` into units.

    Each child of a `ModuleList` is a candidate, or of a `Sequential` if the model has no `ModuleList`. A parameter
    belongs to the deepest candidate above it. Parameters without a candidate form one unit for each module that owns
    them. A tied parameter belongs to the first module that owns it. A unit has one dtype and one place, so its
    parameters that stay in fp32, and those that stay in files, form units of their own, which the same module needs.
    Raises `ConfigError` if a name in `named` matches no
    module and no class of a module.

    Args:
        named: names or class names of modules that are one unit each, including everything inside them.
        stacks: modules whose experts, or groups of them, are units. A stack stays whole if it is within a module of
            `named`, or if its experts or groups are too small to be units; not if ranks own its groups.
        in_fp32: names of parameters that stay in fp32; see `parameters_in_fp32`.
        tables: parameters whose pieces of rows are units. A table stays whole if a candidate contains it, or if it
            stays in fp32.
        in_files: names of frozen parameters whose bytes may stay in the model's own files.
    """
    modules = dict(model.named_modules())
    candidates = _candidates(modules, named)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    owners = {name: _owner(name, candidates) for name in sizes}
    tables = [table for table in tables if owners[table.parameter] is None and table.parameter not in in_fp32]
    stacks = _large_stacks(stacks, _named_modules(modules, named), owners, sizes)
    stack_of = {name: stack for stack in stacks for name in stack.parameters}
    in_parts = stack_of.keys() | {table.parameter for table in tables}
    owners = {name: candidate for name, candidate in owners.items() if name not in in_parts}
    owners = _join_small(owners, sizes, max((_row_numel(stack, sizes) for stack in stacks), default=0))
    groups: dict[tuple[str, bool, bool], list[str]] = {}
    for name, candidate in owners.items():
        module = _direct_owner(name, modules) if candidate is None else candidate
        groups.setdefault((module, name in in_fp32, name in in_files), []).append(name)
    # A module that is a candidate and owns parameters directly yields the same key twice, hence one group.
    units = [Unit(name, tuple(parameters), in_fp32=wide) for (name, wide, _), parameters in groups.items()]
    # Experts and pieces come last, so that all other units are numbered as if there were none.
    experts: dict[str, range] = {}
    for stack in stacks:
        experts[stack.module] = range(len(units), len(units) + stack.parts // stack.ep_size)
        if stack.ep_size > 1:
            units.append(Unit(stack.module, stack.parameters, rows=range(stack.rows), ep_size=stack.ep_size))
            continue
        if stack.groups is None:
            units += [Unit(f"{stack.module}[{row}]", stack.parameters, row) for row in range(stack.rows)]
            continue
        size = stack.rows // stack.groups
        for start in range(0, stack.rows, size):
            name = f"{stack.module}[{start}:{start + size}]"
            units.append(Unit(name, stack.parameters, rows=range(start, start + size)))
    pieces: dict[str, range] = {}
    for name, rows, _ in tables:
        pieces[name] = range(len(units), len(units) + len(rows))
        units += [Unit(f"{name}[{part.start}:{part.stop}]", (name,), rows=part) for part in rows]
    return Units(tuple(units), _sites(model, modules, units, stack_of), experts, pieces)


def _large_stacks(
    stacks: Sequence[Stack], named: Sequence[str], owners: Mapping[str, str | None], sizes: Mapping[str, int]
) -> list[Stack]:
    """Returns the stacks outside of the modules `named` whose experts are large enough, and those that ranks own."""
    inside = tuple(f"{name}." for name in named)
    outside = [stack for stack in stacks if stack.ep_size > 1 or not f"{stack.module}.".startswith(inside)]
    stacked = {name for stack in outside for name in stack.parameters}
    candidate_sizes: dict[str | None, int] = {}
    for name, candidate in owners.items():
        if candidate is not None and name not in stacked:
            candidate_sizes[candidate] = candidate_sizes.get(candidate, 0) + sizes[name]
    numel = {stack: _row_numel(stack, sizes) * stack.rows // stack.parts for stack in outside}
    least = max([*candidate_sizes.values(), *numel.values()], default=0) / _SMALLEST_SHARE
    return [stack for stack in outside if numel[stack] >= least or stack.ep_size > 1]


def _row_numel(stack: Stack, sizes: Mapping[str, int]) -> int:
    return sum(sizes[name] for name in stack.parameters) // stack.rows


def blocks_of(model: nn.Module, named: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns the names of the blocks of a model: the repeated modules, outermost first.

    They are the children of a `ModuleList` that have parameters and are not inside of another block. In a model without
    a `ModuleList` they are those of a `Sequential`. Modules that the user has named as units take the place of those
    around them.
    """
    modules = dict(model.named_modules())
    for kind in (nn.ModuleList, nn.Sequential):
        lists = [name for name, module in modules.items() if isinstance(module, kind)]
        block_lists = [
            f"{name}.{child}" if name else child
            for name in lists
            for child, module in modules[name].named_children()
            if any(True for _ in module.parameters())
        ]
        if block_lists:
            break
    chosen = {name for name, module in modules.items() if name and (name in named or type(module).__name__ in named)}
    outermost: list[str] = []
    for name in modules:  # outer modules come first
        inside = any(name.startswith(f"{outer}.") for outer in outermost)
        around = any(name_chosen.startswith(f"{name}.") for name_chosen in chosen)
        if (name in chosen or (name in block_lists and not around)) and not inside:
            outermost.append(name)
    return tuple(outermost)


def _named_modules(modules: Mapping[str, nn.Module], named: Sequence[str]) -> list[str]:
    return [n for n, m in modules.items() if n and (n in named or type(m).__name__ in named)]


def _candidates(modules: dict[str, nn.Module], named: Sequence[str]) -> list[str]:
    """Returns the names of the modules that may be a unit, outer ones first."""
    chosen = _named_modules(modules, named)
    unknown = [n for n in named if n not in modules and n not in {type(m).__name__ for m in modules.values()}]
    if unknown:
        raise ConfigError(f'"units" names {", ".join(unknown)}: the model has no module of that name or class')
    children = list(_children_of(modules, nn.ModuleList)) or list(_children_of(modules, nn.Sequential))
    # A module that the user has named is one unit, so modules inside of it are units only if they are named too.
    inside = tuple(f"{name}." for name in chosen)
    return [name for name in modules if name in chosen or (name in children and not name.startswith(inside))]


def _children_of(modules: dict[str, nn.Module], kind: type[nn.Module]) -> Iterator[str]:
    for name, module in modules.items():
        if isinstance(module, kind):
            for child, _ in module.named_children():
                yield f"{name}.{child}" if name else child


def _owner(parameter: str, candidates: Sequence[str]) -> str | None:
    holding = [name for name in candidates if parameter.startswith(f"{name}.")]
    return max(holding, key=len) if holding else None


def _join_small(owners: dict[str, str | None], numel: Mapping[str, int], expert: int) -> dict[str, str | None]:
    """Returns `owners` without small candidates: the next large one that contains them, or None, takes their place."""
    sizes: dict[str, int] = {}
    for name, candidate in owners.items():
        if candidate is not None:
            sizes[candidate] = sizes.get(candidate, 0) + numel[name]
    # The bound is relative, so that the division does not depend on the size of the model.
    least = max([*sizes.values(), expert]) / _SMALLEST_SHARE
    large = [name for name, size in sizes.items() if size >= least]
    return {
        name: candidate if candidate is None or candidate in large else _owner(f"{candidate}.", large)
        for name, candidate in owners.items()
    }


def _direct_owner(parameter: str, modules: dict[str, nn.Module]) -> str:
    """Returns the module whose forward reads `parameter`: its owner, or the module above a parameter container."""
    name = parameter.rpartition(".")[0]
    while name and isinstance(modules[name], nn.ParameterList | nn.ParameterDict):
        name = name.rpartition(".")[0]  # a parameter container has no forward of its own
    return name


def _sites(
    model: nn.Module, modules: dict[str, nn.Module], units: Sequence[Unit], stack_of: Mapping[str, Stack]
) -> dict[str, tuple[int, ...]]:
    """Returns the modules that get hooks, with the units each needs.

    These are each unit's own module and every module that owns parameters, because recomputation may call the latter
    alone. A module of stacked experts needs no expert's unit until it uses the expert, and the module of a table no
    piece until it uses the piece.
    """
    whole = [(index, unit) for index, unit in enumerate(units) if unit.row is None and unit.rows is None]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    unit_of = {id(parameters[name]): index for index, unit in whole for name in unit.parameters}
    all_modules = dict(model.named_modules(remove_duplicate=False))  # a module may be in two places
    first_name = {id(module): name for name, module in reversed(modules.items())}
    # A unit is a site under its own name too: its parameters may all belong to modules inside of it.
    needs: dict[str, set[int]] = {}
    for index, unit in whole:
        needs.setdefault(unit.name, set()).add(index)
    for name, parameter in parameters.items():
        if name in stack_of:
            needs.setdefault(stack_of[name].module, set())
            continue
        owner = first_name[id(all_modules[_direct_owner(name, all_modules)])]
        needed = needs.setdefault(owner, set())
        if id(parameter) in unit_of:  # else it is a table in pieces
            needed.add(unit_of[id(parameter)])
    sites = {name: tuple(sorted(needs[name])) for name in modules if name in needs}
    # Hooks inside of a compiled module that needs the same units would only break its graph. If a caller calls the
    # inner module alone, its parameters' placeholders fetch the units.
    return {
        name: needed
        for name, needed in sites.items()
        if not any(
            is_compiled(modules[outer]) and outer in sites and set(needed) <= set(sites[outer])
            for outer in modules_around(name)
        )
    }


def parameters_in_fp32(model: nn.Module, wanted: Literal["auto"] | Sequence[str]) -> frozenset[str]:
    """Returns the names of the parameters that stay in fp32 under bf16 and fp16.

    Raises `ConfigError` if a name matches nothing with floating-point parameters.

    Args:
        wanted: "auto" or names, as the config says. A name is the name of a module or a parameter, or consecutive parts
            of one, as in the lists of transformers' classes. An asterisk is any text within a part. A name may also be
            a class of modules.
    """
    names = {name: parameter for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    if wanted == "auto":
        # transformers loads a model in 16 bits with these weights in fp32. If all weights are fp32, nobody chose fp32
        # for some.
        if all(parameter.dtype is torch.float32 for parameter in names.values()):
            return frozenset()
        listed = listed_in_fp32(model)
        return frozenset(
            name for name, parameter in names.items() if name in listed and parameter.dtype is torch.float32
        )
    chosen: set[str] = set()
    modules = dict(model.named_modules(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in names.items()}
    # A tied parameter has several names; the unit uses the first.
    aliases = [(name, first.get(id(parameter))) for name, parameter in model.named_parameters(remove_duplicate=False)]
    unknown = []
    for entry in wanted:
        pattern = _pattern_of((entry,), any_text=True)
        of_class = tuple(f"{name}." for name, module in modules.items() if type(module).__name__ == entry)
        matched = {own for name, own in aliases if own and (pattern.search(name) or name.startswith(of_class))}
        chosen |= matched
        unknown += [] if matched else [entry]
    if unknown:
        raise ConfigError(
            f'"keep_in_fp32" names {", ".join(unknown)}: the model has no parameter and no module with parameters of '
            "that name or class"
        )
    return frozenset(chosen)


def listed_in_fp32(model: nn.Module, strict: bool = False, buffers: bool = False) -> frozenset[str]:
    """Returns the names of the parameters that the model's classes list for fp32, as transformers' classes do.

    With `strict`, only those that transformers keeps in fp32 in bf16 models as well as in fp16 models. With `buffers`,
    the names of buffers as well.
    """
    matching: set[str] = set()
    for path, module in model.named_modules():
        parts: set[str] = set()
        for attribute in ("_keep_in_fp32_modules_strict", "_keep_in_fp32_modules")[: 1 if strict else 2]:
            listed = getattr(module, attribute, None) or ()
            parts |= set(listed) if isinstance(listed, list | set | tuple) else set()
        if parts:
            pattern = _pattern_of(sorted(parts))
            named = [*module.named_parameters(), *(module.named_buffers() if buffers else ())]
            matching |= {f"{path}.{name}" if path else name for name, _ in named if pattern.search(name)}
    return frozenset(matching)


def _pattern_of(names: Sequence[str], any_text: bool = False) -> re.Pattern[str]:
    """Returns a pattern that finds one of `names` in a longer name, as whole parts; see `parameters_in_fp32`."""
    texts = [re.escape(name) for name in names]
    if any_text:
        texts = [text.replace(r"\*", r"[^.]*") for text in texts]
    return re.compile("|".join(rf"(?:^|\.){text}(?:$|\.)" for text in texts))


def layers_inside(model: nn.Module, sites: Mapping[str, tuple[int, ...]]) -> dict[str, list[str]]:
    """Returns for each site the layers of torch inside of it that need no units except the site's own.

    Once the site is called, such a layer needs no hooks, which cost several microseconds in each call. If a caller
    calls the layer alone, its parameters' placeholders fetch the units, since a layer of torch passes its parameters to
    functions of torch. Other modules may do anything with their parameters. A site that is never called, such as an
    `nn.ModuleDict`, fetches nothing for the layers inside of it.
    """
    modules = dict(model.named_modules())
    layers: dict[str, list[str]] = {}
    for name, needed in sites.items():
        if is_class_of(type(modules[name]), "torch.nn.modules") and "forward" not in vars(modules[name]):
            for outer in modules_around(name):
                if outer in sites and set(needed) <= set(sites[outer]):
                    layers.setdefault(outer, []).append(name)
    return layers


def modules_around(name: str) -> Iterator[str]:
    """Yields the names of the modules around a module, the innermost first; the model's is empty."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def is_compiled(module: nn.Module) -> bool:
    """Returns True if `torch.compile(module)` or `module.compile()` has compiled the module."""
    return is_optimized_module(module) or getattr(module, "_compiled_call_impl", None) is not None


_EXTERNAL = "_offload_external_parameters"


def external_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters of other modules that the user has registered with `module`."""
    return list(module.__dict__.get(_EXTERNAL, ()))


def set_external_parameters(module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Stores the list of other modules' parameters in `module` itself, so that a deep copy of a model has its own."""
    module.__dict__[_EXTERNAL] = list(parameters)


def tied_numel(model: nn.Module, except_for: Container[str] = ()) -> int:
    """Returns the elements of trainable parameters that several modules own, such as a head tied to its embedding.

    Parameters named in `except_for` do not count.
    """
    owners = Counter(
        parameter
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None and parameter.requires_grad
    )
    return sum(
        weight.numel() for name, weight in model.named_parameters() if owners[weight] > 1 and name not in except_for
    )
