"""Module trees out of pieces that users bring: what they are, how they are built, and how hypothesis draws them.

A `Tree` is data, which prints as what makes it again. `build` makes the model: an embedding, the pieces in their
order, a head. Each piece maps hidden states (batch, time, width) to the same shape, and a piece may hold others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from offload.layout.flat_layout import lay_out
from offload.layout.units import Units, find_units
from tests.support import models
from tests.support.modules.tree_pieces import (
    GROUPS,
    LEAVES,
    OUTSIDE,
    REFERRING,
    REGIONS,
    Borrows,
    Checkpointed,
    Residual,
    Signal,
)
from tests.support.oracle import Job

FROZEN_IN_REGION = True
"""Whether a region of non-reentrant checkpointing may hold frozen parameters. Its recomputation keeps such a parameter
itself where autograd saves it, not a view of it, as a layer norm does: it is a placeholder by the time it is used."""

FRAGMENTED = False
"""Whether room for the largest units is room for others: a small one that is in use may lie in the middle of it."""

NESTED = True
"""Whether a region of non-reentrant checkpointing may lie in another one."""

VOCABULARY = 31

# -- what is drawn ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A piece without others inside. `of` counts earlier ones back, where a piece refers to one."""

    kind: str
    frozen: str = ""
    """Nothing, "weights" (of two dimensions or more), "biases" (the rest) or "all"."""
    of: int = 0


@dataclass(frozen=True)
class Group:
    """A piece that contains others, and how it calls them."""

    kind: str
    children: tuple[Piece | Group, ...]


@dataclass(frozen=True)
class Tree:
    """A model, and the settings of its training."""

    children: tuple[Piece | Group, ...]
    width: int = 8
    container: str = "list"
    """How the root holds its children: a "list", or "attributes"."""
    embedding: str = ""
    """Nothing, "tied" with the head, "frozen" or "tied and frozen"."""
    wrapped: bool = False
    """Whether the model returns its logits in a dictionary with other things."""
    dtype: str = "fp32"
    accumulation: int = 1
    clip: float = 0.0
    seed: int = 0


# -- building -----------------------------------------------------------------------------------------


class Model(nn.Module):
    """An embedding, the pieces, a head."""

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        self.wrapped = tree.wrapped
        self.signal = Signal()
        self.embedding = nn.Embedding(VOCABULARY, tree.width)
        pieces = _Builder(tree.width, self.signal).make(tree.children)
        if tree.container == "list":
            self.pieces = nn.ModuleList(pieces)
            self.order: list[nn.Module] | tuple[nn.Module, ...] = ()
        else:
            for index, piece in enumerate(pieces):
                self.add_module(f"piece{index}", piece)
            self.order = tuple(pieces)
        self.head = nn.Linear(tree.width, VOCABULARY)
        if "tied" in tree.embedding:
            self.head.weight = self.embedding.weight
        if "frozen" in tree.embedding:
            self.embedding.requires_grad_(False)
            if any("reentrant" in kind for kind in kinds(tree)):
                # As transformers does: reentrant checkpointing needs an input with a gradient.
                self.embedding.register_forward_hook(lambda module, args, output: output.requires_grad_())

    def forward(self, ids: torch.Tensor) -> Any:
        self.signal.value = int(ids.sum())
        hidden = self.embedding(ids)
        for piece in self.order or self.pieces:
            hidden = piece(hidden)
        logits = self.head(hidden)
        return {"logits": logits, "facts": ("wrapped", [1, None])} if self.wrapped else logits


class _Builder:
    """A builder that makes pieces in their order and remembers those that are made."""

    def __init__(self, width: int, signal: Signal) -> None:
        self.width, self.signal = width, signal
        self.made: list[nn.Module] = []
        self.regions = 0
        """Regions of checkpointing round the piece that is being made."""

    def make(self, children: tuple[Piece | Group, ...]) -> list[nn.Module]:
        return [self._group(child) if isinstance(child, Group) else self._piece(child) for child in children]

    def _group(self, group: Group) -> nn.Module:
        self.regions += group.kind in REGIONS
        children = self.make(group.children)
        self.regions -= group.kind in REGIONS
        module = (GROUPS | REGIONS)[group.kind](children, self.signal)
        self.made.append(module)
        return module

    def _piece(self, piece: Piece) -> nn.Module:
        module = self._refer(piece) if piece.kind in REFERRING else LEAVES[piece.kind](self.width)
        if piece.kind != "again":
            for parameter in module.parameters():
                if piece.frozen == "all" or (piece.frozen and (parameter.dim() > 1) == (piece.frozen == "weights")):
                    parameter.requires_grad_(False)
            self.made.append(module)
        return module

    def _refer(self, piece: Piece) -> nn.Module:
        if piece.kind == "again":
            # A region in a region is drawn where it is meant, and not by reference.
            known = [m for m in self.made if not (self.regions and _has_regions(m))]
            return known[-1 - piece.of % len(known)] if known else nn.Identity()
        square = [x for m in self.made for x in m.modules() if type(x) is nn.Linear and x.in_features == x.out_features]
        linear = nn.Linear(self.width, self.width)
        if square:
            linear_of_another = square[-1 - piece.of % len(square)]
            if piece.kind == "borrows":
                return Borrows(self.width, linear_of_another)
            linear.weight = linear_of_another.weight
        return Residual(linear)


def _has_regions(module: nn.Module) -> bool:
    return any(isinstance(inner, Checkpointed) for inner in module.modules())


def build(tree: Tree) -> nn.Module:
    """Returns the model of `tree`, made with its seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(tree.seed)
        return Model(tree)


def kinds(tree: Tree | Group) -> Iterator[str]:
    """Yields the kinds of all pieces, outer ones first."""
    for child in tree.children:
        yield child.kind
        if isinstance(child, Group):
            yield from kinds(child)


def loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000 * step + micro)
    ids = torch.randint(VOCABULARY, (2, 6), generator=generator)
    output = model(ids)
    logits = output["logits"] if isinstance(output, dict) else output
    return models.token_loss(logits, ids)


def job_of(tree: Tree) -> Job:
    return Job(
        lambda: build(tree),
        loss,
        steps=3,
        accumulation=tree.accumulation,
        lr=1e-2 if tree.dtype == "fp32" else 1e-3,  # bf16 rounds, and some trees make much of it
        clip=tree.clip,
        dtype=tree.dtype,
        seed=tree.seed,
    )


# -- room on the device -------------------------------------------------------------------------------


def room(tree: Tree) -> int:
    """Bytes of the device budget: as many of the largest units as must be there at once, at least two."""
    model = build(tree)
    units = find_units(model)
    itemsize = {"fp32": 4, "bf16": 2}[tree.dtype]
    sizes = [
        lay_out(unit.name, [(name, model.get_parameter(name)) for name in unit.parameters], 1).numel * itemsize
        for unit in units.units
    ]
    at_once = _at_once(model, units)
    if at_once > 1 and len(set(sizes)) > 1 and not FRAGMENTED:
        return (2 * at_once - 1) * max(sizes)
    return sum(sorted(sizes)[-max(2, at_once) :])


def _at_once(model: nn.Module, units: Units) -> int:
    """Returns the most units that are needed at one moment: nested modules, or a region and the unit before it."""
    needs = {id(model.get_submodule(name)): set(indices) for name, indices in units.sites.items()}
    unit_of = {
        id(model.get_parameter(name)): index for index, unit in enumerate(units.units) for name in unit.parameters
    }
    for module in model.modules():
        if isinstance(module, Borrows):
            needs[id(module)].add(unit_of[id(module.borrowed[0].weight)])

    def most(module: nn.Module, around: set[int]) -> int:
        here = around | needs.get(id(module), set())
        sizes = [len(here)]
        if isinstance(module, Checkpointed):
            for region in module.regions:
                inside = (needs.get(id(inner), set()) for child in region for inner in child.modules())
                sizes.append(len(here.union(*inside)) + 1)
        return max(sizes + [most(child, here) for child in module.children()])

    return most(model, set())


# -- what hypothesis draws ----------------------------------------------------------------------------


_FROZEN = st.sampled_from(["", "", "", "weights", "biases", "all"])

_LEAVES = st.builds(Piece, st.sampled_from(list(LEAVES)), _FROZEN) | st.builds(
    Piece, st.sampled_from(REFERRING), of=st.integers(0, 3)
)


def _groups(kinds: list[str], inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    children = st.lists(inside, min_size=1, max_size=3).map(tuple)
    return st.builds(Group, st.sampled_from(kinds), children)


_PLAIN = st.recursive(_LEAVES, lambda inside: _groups(list(GROUPS), inside), max_leaves=4)

_NOT_REENTRANT = [kind for kind in REGIONS if "reentrant" not in kind]

_IN_A_REGION = _PLAIN | _groups(_NOT_REENTRANT, _PLAIN) if NESTED else _PLAIN

_PIECES = st.recursive(
    _PLAIN | _groups(list(REGIONS), _PLAIN) | _groups(_NOT_REENTRANT, _IN_A_REGION),
    lambda inside: _groups(list(GROUPS), inside),
    max_leaves=4,
)


def _can_work(tree: Tree) -> bool:
    """Returns whether the constants above allow `tree`."""
    if not OUTSIDE and tree.container != "list" and "attention" in kinds(tree):
        return False
    regions = [module for module in build(tree).modules() if isinstance(module, Checkpointed) and not module.reentrant]
    return FROZEN_IN_REGION or all(parameter.requires_grad for region in regions for parameter in region.parameters())


TREES: st.SearchStrategy[Tree] = st.builds(
    Tree,
    st.lists(_PIECES, min_size=1, max_size=5).map(tuple),
    width=st.sampled_from([8, 12, 33]),
    container=st.sampled_from(["list", "attributes"]),
    embedding=st.sampled_from(["", "", "tied", "frozen", "tied and frozen"]),
    wrapped=st.booleans(),
    dtype=st.sampled_from(["fp32", "bf16"]),
    accumulation=st.sampled_from([1, 2]),
    clip=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 3),
).filter(_can_work)


def unclipped(clip: float) -> float:
    """Returns the value by which `torch.nn.utils.clip_grad_norm_` does not clip."""
    return clip or math.inf
