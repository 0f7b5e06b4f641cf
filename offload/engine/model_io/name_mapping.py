"""Mapping from tensors of a folder to a model, by name or by the renamings and conversions of `transformers`.

Models of transformers 5 have some weights in another form than the files: each expert of a Mixtral is a tensor of its
own in a file, and all experts of a layer are one parameter of three dimensions in the model. This module applies the
renamings of transformers name by name, and runs its conversions one parameter at a time. The conversions first run on
meta tensors, so that a misfit is known before anything is read.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.engine.model_io.safetensors_folder import Run, Stored
from offload.engine.params.deferred_parameter import Origin
from offload.errors import ConfigError


class Source(NamedTuple):
    """Origin, in a folder, of the values for one name of a model."""

    origin: Origin
    dtypes: tuple[torch.dtype, ...]
    """Dtypes of the tensors that are read."""


class Conversion:
    """Tensors of a folder from which an operation of transformers makes one or several parameters of a model.

    One run of the operation makes all results. Those that will be requested stay in memory until then, because
    `initialize` reads one parameter after the other.

    Args:
        model: The model.
        converter: Converter of transformers; copied before each use, because it collects tensors.
        first: The model's name for which the converter was found.
        parts: Tensors of the folder, each with the pattern that it matched.
    """

    def __init__(self, model: nn.Module, converter: Any, first: str, parts: Sequence[tuple[Stored, str]]) -> None:
        self._model, self._converter, self._first, self.parts = model, converter, first, parts
        self._made: dict[str, torch.Tensor] = {}
        self.wanted: set[str] = set()
        """Names that will be requested."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the results, by name. Raises `ConfigError` if the tensors do not fit together."""
        try:
            # On the meta device the conversion computes shapes only, without reading a byte.
            made = self._convert(lambda stored: torch.empty(stored.shape, dtype=stored.dtype, device="meta"))
        # The converters are transformers' own code and raise errors of any kind.
        except Exception as error:
            names = ", ".join(stored.name for stored, _ in self.parts[:3])
            raise ConfigError(
                f"transformers cannot make {self._first} of {names} and {max(len(self.parts) - 3, 0)} more: {error}; "
                "the folder belongs to another model or another version"
            ) from error
        return {name: tuple(value.shape) for name, value in made.items()}

    def take(self, name: str, keep: bool = False) -> torch.Tensor:
        """Returns one parameter. The first request reads the tensors and makes the parameters of later requests too.

        Args:
            name: The parameter's name.
            keep: True if the parameter will be requested again.
        """
        if name not in self._made:
            made = self._convert(Stored.whole)
            # Results that nobody will request must not stay in memory.
            self._made = {each: made[each] for each in made if each in self.wanted}
        return self._made[name] if keep else self._made.pop(name)

    @functools.cached_property
    def rows(self) -> dict[str, torch.Tensor]:
        """For each result that is made of unchanged rows of the tensors, the numbers of those rows, (rows,) int64.

        Rows are counted through all tensors. Found by a conversion of the numbers in place of the rows.
        """
        found: dict[str, torch.Tensor] = {}
        try:
            # Twice, with other numbers: arithmetic on values, unlike a choice of them, would show.
            made, again = (self._convert(self._numbered(factor)) for factor in (1, 3))
        except Exception:  # code of transformers that does not run on numbers does more than to choose rows
            return found
        for name, shape in self.shapes().items():
            once, twice = made[name], again[name]
            moved = once.dtype == torch.int64 and once.shape == (*shape[:-1], 1) and torch.equal(3 * once, twice)
            if moved and all(part.shape[-1:] == shape[-1:] for part, _ in self.parts):
                found[name] = once.reshape(-1)
        return found

    def _numbered(self, factor: int) -> Callable[[Stored], torch.Tensor]:
        """Returns a function of a tensor that returns the numbers of its rows, times `factor`, in place of each row."""
        counts = [math.prod(part.shape[:-1]) for part, _ in self.parts]
        firsts = dict(zip((part.name for part, _ in self.parts), itertools.accumulate([0, *counts]), strict=False))

        def numbers(stored: Stored) -> torch.Tensor:
            shape = (*stored.shape[:-1], 1)
            return (torch.arange(math.prod(shape), device="cpu").view(shape) + firsts[stored.name] + 1) * factor

        return numbers

    def _convert(self, read: Callable[[Stored], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Runs the conversion on the tensors that `read` returns, and returns the results by name."""
        # `add_tensor` stores its tensors in the converter, which other conversions use too; hence a copy.
        mapping: Any = copy.deepcopy(self._converter)
        for stored, pattern in self.parts:
            mapping.add_tensor(self._first, stored.name, pattern, lambda stored=stored: read(stored))
        made = mapping.convert(self._first, model=self._model, config=getattr(self._model, "config", None))
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class Converted(NamedTuple):
    """One parameter of a conversion; implements `Origin`."""

    conversion: Conversion
    name: str
    shape: tuple[int, ...]

    def pieces(self, part: range | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields all values at once, or those of `part`; parts are requested in order."""
        more = part is not None and part.stop < math.prod(self.shape)
        values = self.conversion.take(self.name, keep=more).contiguous().view(-1)
        yield 0, values if part is None else values[part.start : part.stop]

    def runs(self, part: range) -> list[Run]:
        """Returns the elements of the files that are `part` of the values, in order; none if values are changed."""
        numbers, width = self.conversion.rows.get(self.name), self.shape[-1]
        if numbers is None or not part or part.start % width or part.stop % width:
            return []
        found: list[Run] = []
        rows = numbers[part.start // width : part.stop // width]
        # A run ends where the next row is not the next one of the files, or begins another tensor.
        firsts = [0, *itertools.accumulate(math.prod(stored.shape[:-1]) for stored, _ in self.conversion.parts)]
        tensor = torch.bucketize(rows - 1, torch.tensor(firsts, device="cpu"), right=True) - 1
        breaks = ((rows.diff() != 1) | (tensor.diff() != 0)).nonzero().flatten() + 1
        for start, stop in itertools.pairwise([0, *breaks.tolist(), len(rows)]):
            which = int(tensor[start])
            first = int(rows[start]) - 1 - firsts[which]
            found.append(Run(self.conversion.parts[which][0], first * width, (stop - start) * width))
        return found


class Named(NamedTuple):
    """Match between a folder and a model."""

    sources: Mapping[str, Source]
    """Sources by the model's names."""
    unexpected: Sequence[str]
    """Names of tensors, after renaming, that the model does not contain."""


def name_tensors(model: nn.Module, expected: Mapping[str, Any], stored: Mapping[str, Stored]) -> Named:
    """Maps the tensors of a folder to the names of a model.

    Args:
        model: The model.
        expected: The model's names.
        stored: The tensors of the folder by their names there.

    Raises:
        ConfigError: If two tensors of the folder map to one name, or a conversion fails.
    """
    rules = _rules_of_transformers(model)
    if rules is None:
        return Named(
            {name: _as_it_is(stored[name]) for name in expected if name in stored},
            [name for name in stored if name not in expected],
        )
    found: dict[str, Source] = {}
    unexpected: list[str] = []
    groups: dict[str, Conversion] = {}
    # The order of transformers: experts are stacked in the order in which they are added, 2 before 10.
    for key in sorted(stored, key=rules.order):
        name, converter, pattern = rules.rename(key, expected)
        if name not in expected:
            unexpected.append(name)
        elif converter is not None:
            # All tensors that map to one name are inputs of one conversion.
            group = groups.setdefault(name, Conversion(model, converter, name, []))
            group.parts = [*group.parts, (stored[key], pattern)]
        else:
            _add(found, name, _as_it_is(stored[key]))
    for group in groups.values():
        dtypes = tuple(part.dtype for part, _ in group.parts)
        for name, shape in group.shapes().items():
            if name in expected:
                group.wanted.add(name)
                _add(found, name, Source(Converted(group, name, shape), dtypes))
            else:
                unexpected.append(name)
    return Named(found, unexpected)


def _as_it_is(stored: Stored) -> Source:
    """Returns a tensor that needs no conversion, as a source."""
    return Source(stored, (stored.dtype,))


def _add(found: dict[str, Source], name: str, source: Source) -> None:
    """Adds a source to `found`; raises `ConfigError` if the name already has one."""
    if name in found:
        raise ConfigError(
            f"the folder contains {name} twice, under two names that transformers recognizes; keep one of them"
        )
    found[name] = source


class _Rules:
    """Renamings and conversions of transformers for one model."""

    def __init__(self, model: nn.Module, transformers_loading: Any, mapping: Sequence[Any]) -> None:
        self.order: Callable[[str], Any] = transformers_loading.dot_natural_key
        self._rename = transformers_loading.rename_source_key
        self._prefix: str = getattr(model, "base_model_prefix", "")
        self._renamings = [each for each in mapping if isinstance(each, transformers_loading.WeightRenaming)]
        self._converters = [each for each in mapping if isinstance(each, transformers_loading.WeightConverter)]
        self._by_pattern = {pattern: each for each in self._converters for pattern in each.source_patterns}

    def rename(self, key: str, expected: Mapping[str, Any]) -> tuple[str, Any, str]:
        """Returns a tensor's name in the model, its converter or None, and the pattern that it matched."""
        name, pattern = self._rename(key, self._renamings, self._converters, self._prefix, expected)
        if name not in expected and key in expected:  # the tensor has the model's own name already
            name, pattern = self._rename(key, [], [], self._prefix, expected)
        return name, self._by_pattern.get(pattern), pattern or ""


def _rules_of_transformers(model: Any) -> _Rules | None:
    """Returns the rules for a model, or None for a model that is not of transformers: its names stay unchanged."""
    if not hasattr(model, "base_model_prefix") or not hasattr(model, "config"):
        return None
    try:
        # Internal modules of transformers, which may change with each version: a missing name raises the error below.
        from transformers import core_model_loading
        from transformers.conversion_mapping import get_model_conversion_mapping

        return _Rules(model, core_model_loading, get_model_conversion_mapping(model))
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            "offload.load_pretrained reads from transformers how weights are named and converted, which the installed "
            f"version does not tell ({error}); install a supported version: pip install 'transformers>=5.3,<6'"
        ) from error


def same_values(one: Origin, other: Origin) -> bool:
    """Returns True if the values of two sources of one shape are equal numbers, whatever their dtypes are."""
    # Compared chunk by chunk, to save memory. The chunks of two dtypes have different numbers of elements.
    sides = [(values for _, values in origin.pieces() if len(values)) for origin in (one, other)]
    mine, theirs = (next(side, None) for side in sides)
    while mine is not None and theirs is not None:
        numel, dtype = min(len(mine), len(theirs)), torch.promote_types(mine.dtype, theirs.dtype)
        if not torch.equal(mine[:numel].to(dtype), theirs[:numel].to(dtype)):
            return False
        mine = mine[numel:] if numel < len(mine) else next(sides[0], None)
        theirs = theirs[numel:] if numel < len(theirs) else next(sides[1], None)
    return mine is theirs
