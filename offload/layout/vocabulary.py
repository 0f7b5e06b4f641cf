"""Finds the tables of a vocabulary: weights of embeddings and heads, whose pieces of rows may be units of their own.

An embedding reads rows, and a head multiplies by rows, so neither needs all of its table at once. The cut depends on
the size of the table alone. So the bits of a run are the same in every tier and on any number of ranks.
"""

from __future__ import annotations

import math

from torch import nn

from offload.layout.modes import MOMENT_BLOCK, RULE_LAYOUTS
from offload.layout.units import Table, Units, is_compiled, modules_around
from offload.notices import Remark
from offload.sizes import align_up, count_of
from offload.torch_internals import inner_tensors

_LARGEST_PIECE = 1 << 25
"""Elements of a piece at most, but for rounding: 64 MiB in 16 bits, which drives and products take at full speed."""
_LEAST_PIECES = 16
"""Pieces of a small table, so that it trains in a fraction of its own memory too."""
_SMALLEST_SHARE = 8
"""A table below 1/8 of the largest stays whole, such as an embedding of positions: the largest decides the memory."""


def pieces_of(words: int, features: int) -> tuple[range, ...]:
    """Returns the rows of each piece of a table; one piece if the table is too small for two.

    No block of 8-bit moments contains elements of two pieces, so a checkpoint loads whether the table is whole or not.
    """
    step = MOMENT_BLOCK // math.gcd(MOMENT_BLOCK, features)
    count = max(_LEAST_PIECES, math.ceil(words * features / _LARGEST_PIECE))
    rows = align_up(math.ceil(words / count), step)
    return tuple(range(start, min(start + rows, words)) for start in range(0, words, rows))


def find_tables(model: nn.Module) -> tuple[Table, ...]:
    """Returns the tables of `model` that can be cut, in the model's order.

    A table is the weight of an embedding, or of a linear layer with as many rows as an embedding. Each module that owns
    it must be one of these.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    embeddings = [module for module in modules.values() if isinstance(module, nn.Embedding)]
    words = {module.num_embeddings for module in embeddings}
    # By identity: a tied table has a name in each of its modules.
    owned: dict[int, list[str]] = {id(parameter): [] for parameter in model.parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owned[id(parameter)].append(name)
    candidates = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2
        and parameter.shape[0] in words
        and parameter.is_floating_point()
        and inner_tensors(parameter) is None
        and all(_reads_rows(alias, modules) for alias in owned[id(parameter)])
    ]
    largest = max((parameter.numel() for _, parameter in candidates), default=0)
    tables = (
        Table(name, pieces_of(*parameter.shape), parameter.requires_grad and len(owned[id(parameter)]) > 1)
        for name, parameter in candidates
        if parameter.numel() and parameter.numel() >= largest / _SMALLEST_SHARE
    )
    return tuple(table for table in tables if len(table.pieces) > 1)


def _reads_rows(name: str, modules: dict[str, nn.Module]) -> bool:
    """Returns True if the parameter `name` is the weight of an embedding or of a linear layer that runs uncompiled."""
    path, _, own = name.rpartition(".")
    module = modules[path]
    if own != "weight" or any(is_compiled(modules[outer]) for outer in (path, *modules_around(path))):
        return False  # compiled code cannot be told one piece after the other
    return isinstance(module, nn.Linear) or (isinstance(module, nn.Embedding) and not module.sparse)


def cut_tables(model: nn.Module, vocabulary: str, optimizer: str) -> tuple[Table, ...]:
    """Returns the tables of a model that are cut: none unless `vocabulary` is "pieces".

    An optimizer whose rule looks at whole parameters leaves tables that train whole.
    """
    tables = find_tables(model) if vocabulary == "pieces" else ()
    if RULE_LAYOUTS[optimizer].elementwise:
        return tables
    return tuple(table for table in tables if not model.get_parameter(table.parameter).requires_grad)


def described(units: Units, vocabulary: str) -> tuple[str, ...]:
    """Returns a line for the user on the tables in pieces, or that there are none although the config asks for them."""
    if vocabulary != "pieces":
        return ()
    if not units.tables:
        return (
            Remark(
                '"vocabulary": "pieces" has no effect: the model has no embedding and no head of a vocabulary, outside '
                "of its blocks, whose rows can be units of their own"
            ),
        )
    names, count = ", ".join(units.tables), sum(map(len, units.tables.values()))
    return (Remark(f"{names}: {count_of(count, 'piece of rows is a unit', 'pieces of rows are units')} of their own"),)
