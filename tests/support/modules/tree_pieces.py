"""Modules that random model trees are made of: leaves, groups of modules, regions of activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

OUTSIDE = True
"""Whether a module may use a parameter of one that does not run, as nn.MultiheadAttention does outside of a list."""

ONLY_EMPTY = True
"""Whether all that trains in a unit may be empty parameters."""

# -- pieces without others inside ---------------------------------------------------------------------


class Residual(nn.Module):
    """A module that adds the output of its inner module to the hidden states."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.inner(hidden))


class ManyParameters(nn.Module):
    """A module with a ParameterList and a ParameterDict."""

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
    """A module whose output is a view of its weight."""

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
        output = super().forward(hidden)
        return {"states": (output, [output.tanh(), None]), "name": "outputs", "count": 3, "weight": self.weight}


class Outputs(nn.Module):
    """A module whose layer returns nested outputs that contain other things than tensors, and the weight itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = ManyOutputs(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output = self.inner(hidden)
        first, (second, _) = output["states"]
        return hidden + (first + second) / output["count"] + output["weight"].sum() / 100


class AsksFirst(nn.Module):
    """A module that reads dtypes, devices and shapes before any module that owns the parameters runs."""

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
    """A module that computes with the weight of another module, which does not run."""

    def __init__(self, width: int, source: nn.Linear) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))
        self.borrowed = (source,)  # in a tuple: not a child

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
    """A module that calls its children in order, from a list in a list."""

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
    """The number by which a batch selects branches."""

    value = 0


class Branch(nn.Module):
    """A module that calls the children that the batch selects."""

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
    """A module that recomputes its children in backward, one by one or all in one region."""

    def __init__(self, children: list[nn.Module], reentrant: bool, alone: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(children)
        self.reentrant, self.each = reentrant, alone

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


def _checkpointed(reentrant: bool, alone: bool) -> Callable[[list[nn.Module], Signal], nn.Module]:
    return lambda children, signal: Checkpointed(children, reentrant, alone)


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
