"""Module trees out of pieces that users bring: what they are, how they are built, and how hypothesis draws them.

A `Tree` is data, which prints as what makes it again. `build` makes the model: an embedding, the pieces in their
order, a head. Each piece maps hidden states (batch, time, width) to the same shape, and a piece may hold others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from offload.layout.flat_layout import lay_out
from offload.layout.units import Units, find_units
from tests.support.oracle import Job

OUTSIDE = True
"""Whether a module may use a parameter of one that does not run, as nn.MultiheadAttention does outside of a list."""
ONLY_EMPTY = True
"""Whether all that trains in a unit may be empty parameters."""
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
    """A piece that holds others, and what it does with them."""

    kind: str
    children: tuple[Piece | Group, ...]


@dataclass(frozen=True)
class Tree:
    """A model, and how it is trained."""

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


# -- pieces without others inside ---------------------------------------------------------------------


class Residual(nn.Module):
    """The hidden states and what its module makes of them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.inner(hidden))


class ManyParameters(nn.Module):
    """A ParameterList and a ParameterDict."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rows = nn.ParameterList(torch.full((width,), 0.1 * i) for i in range(3))
        self.named = nn.ParameterDict({"square": torch.eye(width), "row": torch.ones(width)})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for row in self.rows:
            hidden = hidden + row
        return (hidden * self.named["row"]) @ self.named["square"]


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.scale


class OnlyEmpty(nn.Module):
    """A parameter without a single element, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.empty.sum()


class Empty(OnlyEmpty):
    """An empty parameter beside another, which trains when it does."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3, 1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) + self.shift.sum()


class Transposed(nn.Module):
    """Its output is a view of its weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)

    def forward(self) -> torch.Tensor:
        return self.weight.t()


class View(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.transposed = Transposed(width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(hidden @ self.transposed())


class KeywordOnly(nn.Linear):
    def forward(self, *, hidden: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:  # type: ignore[override]
        return super().forward(hidden["states"][0] if isinstance(hidden, dict) else hidden) * options["scale"]


class Keywords(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = KeywordOnly(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        options = {"scale": 0.5, "name": "keywords"}
        hidden = hidden + self.inner(hidden=hidden, options=options)
        return hidden + self.inner(options=options, hidden={"states": (hidden, None)})


class ManyOutputs(nn.Linear):
    def forward(self, hidden: torch.Tensor) -> Any:
        found = super().forward(hidden)
        return {"states": (found, [found.tanh(), None]), "name": "outputs", "count": 3, "weight": self.weight}


class Outputs(nn.Module):
    """What comes out of its layer is nested, has other things than tensors in it, and the weight itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = ManyOutputs(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found = self.inner(hidden)
        first, (second, _) = found["states"]
        return hidden + (first + second) / found["count"] + found["weight"].sum() / 100


class AsksFirst(nn.Module):
    """It asks for dtypes, devices and shapes before any module that owns the parameters runs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        first = next(self.parameters())
        moved = hidden.to(first.device).to(self.linear.weight.dtype)
        mask = torch.ones(self.linear.weight.shape[0], dtype=first.dtype, device=self.linear.bias.device)
        return hidden + self.linear(moved * mask).to(hidden.dtype)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        heads = max(heads for heads in (1, 2, 4) if width % heads == 0)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True, dropout=0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.attention(hidden, hidden, hidden)[0]


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.gru(hidden)[0]


class _Multiply(torch.autograd.Function):
    """A function of the user that saves weights."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, scale)
        return (hidden @ weight) * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, weight, scale = ctx.saved_tensors
        scaled = gradient * scale
        return (
            scaled @ weight.t(),
            hidden.flatten(0, 1).t() @ scaled.flatten(0, 1),
            (gradient * (hidden @ weight)).flatten(0, 1).sum(0),
        )


class OwnFunction(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + _Multiply.apply(hidden, self.weight, self.scale)


class Borrows(nn.Module):
    """It computes with the weight of another module, which does not run."""

    def __init__(self, width: int, other: nn.Linear) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))
        self.borrowed = (other,)  # in a tuple: not a child

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(functional.linear(hidden, self.borrowed[0].weight, self.bias))


LEAVES: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda width: Residual(nn.Linear(width, width)),
    "mlp": lambda width: Residual(nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))),
    "layernorm": nn.LayerNorm,
    "rmsnorm": nn.RMSNorm,
    "dropout": lambda width: Residual(nn.Sequential(nn.Dropout(0.2), nn.Linear(width, width, bias=False))),
    "scalar": lambda width: Scalar(),
    "empty": lambda width: Empty(),
    "parameters": ManyParameters,
    "view": View,
    "keywords": Keywords,
    "outputs": Outputs,
    "asks first": AsksFirst,
    "attention": Attention,
    "gru": Recurrent,
    "own function": OwnFunction,
    **({"only empty": lambda width: OnlyEmpty()} if ONLY_EMPTY else {}),
}
REFERRING = ("again", "tied", *(("borrows",) if OUTSIDE else ()))
"""Made of earlier ones: the same module again, a layer with a tied weight, a function of another module's weight."""


# -- pieces that hold others --------------------------------------------------------------------------


class Steps(nn.Module):
    """Its children, one after the other, from a list in a list."""

    def __init__(self, children: list[nn.Module]) -> None:
        super().__init__()
        half = (len(children) + 1) // 2
        self.lists = nn.ModuleList([nn.ModuleList(children[:half]), nn.ModuleList(children[half:])])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for part in self.lists:
            for child in part:  # type: ignore[attr-defined]
                hidden = child(hidden)
        return hidden


class Twice(nn.Module):
    def __init__(self, children: list[nn.Module]) -> None:
        super().__init__()
        self.inner = nn.Sequential(*children)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(hidden))


class Signal:
    """What the batch says to the branches."""

    value = 0


class Branch(nn.Module):
    """Runs or not, as the batch says; each child has its own say."""

    def __init__(self, children: list[nn.Module], signal: Signal) -> None:
        super().__init__()
        self.branches = nn.ModuleList(children)
        self.signal = signal

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for index, child in enumerate(self.branches):
            if (self.signal.value >> index) % 2:
                hidden = child(hidden)
        return hidden


class Checkpointed(nn.Module):
    """Recomputes its children in backward, one by one or all in one region."""

    def __init__(self, children: list[nn.Module], reentrant: bool, each: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(children)
        self.reentrant, self.each = reentrant, each

    @property
    def regions(self) -> list[list[nn.Module]]:
        return [[child] for child in self.layers] if self.each else [list(self.layers)]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for region in self.regions:

            def run(hidden: torch.Tensor, region: list[nn.Module] = region) -> torch.Tensor:
                for child in region:
                    hidden = child(hidden)
                return hidden

            hidden = checkpoint(run, hidden, use_reentrant=self.reentrant)
        return hidden


def _hooked(children: list[nn.Module]) -> nn.Module:
    """Hooks of the user: on what goes in, on what comes out, on the gradient."""
    inner = nn.Sequential(*children)
    for child in children:
        child.register_forward_hook(lambda module, args, output: output * 0.75)
        child.register_forward_pre_hook(lambda module, args: (args[0] + 0.125,))
    inner.register_full_backward_hook(lambda module, into, out: tuple(g if g is None else g * 0.5 for g in into))
    return inner


def _checkpointed(reentrant: bool, each: bool) -> Callable[[list[nn.Module], Signal], nn.Module]:
    return lambda children, signal: Checkpointed(children, reentrant, each)


GROUPS: dict[str, Callable[[list[nn.Module], Signal], nn.Module]] = {
    "steps": lambda children, signal: Steps(children),
    "twice": lambda children, signal: Twice(children),
    "branch": Branch,
    "hooked": lambda children, signal: _hooked(children),
}
REGIONS: dict[str, Callable[[list[nn.Module], Signal], nn.Module]] = {
    "region": _checkpointed(False, False),
    "each in a region": _checkpointed(False, True),
    "reentrant region": _checkpointed(True, False),
    "each in a reentrant region": _checkpointed(True, True),
}


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
    """Makes pieces in their order, and knows those that are made."""

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
            other = square[-1 - piece.of % len(square)]
            if piece.kind == "borrows":
                return Borrows(self.width, other)
            linear.weight = other.weight
        return Residual(linear)


def _has_regions(module: nn.Module) -> bool:
    return any(isinstance(inner, Checkpointed) for inner in module.modules())


def build(tree: Tree) -> nn.Module:
    """The model of `tree`, by its seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(tree.seed)
        return Model(tree)


def kinds(tree: Tree | Group) -> Iterator[str]:
    """The kinds of all pieces, outer ones first."""
    for child in tree.children:
        yield child.kind
        if isinstance(child, Group):
            yield from kinds(child)


def loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000 * step + micro)
    ids = torch.randint(VOCABULARY, (2, 6), generator=generator)
    found = model(ids)
    logits = found["logits"] if isinstance(found, dict) else found
    return functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())


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
    """The most units that one moment needs: of modules inside of each other, or a region and the unit before it."""
    needs = {id(model.get_submodule(name)): set(indices) for name, indices in units.sites.items()}
    unit_of = {
        id(model.get_parameter(name)): index for index, unit in enumerate(units.units) for name in unit.parameters
    }
    for module in model.modules():
        if isinstance(module, Borrows):
            needs[id(module)].add(unit_of[id(module.borrowed[0].weight)])

    def most(module: nn.Module, around: set[int]) -> int:
        here = around | needs.get(id(module), set())
        found = [len(here)]
        if isinstance(module, Checkpointed):
            for region in module.regions:
                inside = (needs.get(id(inner), set()) for child in region for inner in child.modules())
                found.append(len(here.union(*inside)) + 1)
        return max(found + [most(child, here) for child in module.children()])

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
    """Whether the constants above allow `tree`."""
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
    """What `torch.nn.utils.clip_grad_norm_` takes for no clip at all."""
    return clip or math.inf
