"""Modules of every kind that users write: calls, arguments, outputs, parameters."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 32


class Layers(nn.Module):
    """An embedding, three layers in a list, a head."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, WIDTH)
        self.layers = nn.ModuleList(self.layer(index) for index in range(count))
        self.head = nn.Linear(WIDTH, 61)

    def layer(self, index: int) -> nn.Module:
        return nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.through(self.embedding(ids), ids))

    def through(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return hidden


# -- which modules run, and how often -----------------------------------------------------------------


class Twice(Layers):
    def through(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return super().through(super().through(hidden, ids), ids)


class Branches(Layers):
    """A model with other layers in every step, so that the recorded order is always wrong."""

    def through(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if (int(ids.sum()) + index) % 2:
                hidden = hidden + torch.tanh(layer(hidden))
        return hidden


class Skipped(Layers):
    """A model in which one layer has no gradient in most steps: no decay, no step, as in torch."""

    def through(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index != 1 or int(ids.sum()) % 3 == 0:
                hidden = hidden + torch.tanh(layer(hidden))
        return hidden


class Shared(Layers):
    """One module in two places of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.layers[0], self.layers[1], self.layers[0]])


class Recursive(Layers):
    """A model whose forward calls itself."""

    depth = 0

    def through(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if self.depth < 1:
            self.depth += 1
            hidden = hidden + self(ids)[..., :WIDTH]
            self.depth -= 1
        return super().through(hidden, ids)


# -- what goes in and comes out -----------------------------------------------------------------------


class Pair(NamedTuple):
    hidden: torch.Tensor
    note: str


@dataclasses.dataclass
class Record:
    hidden: torch.Tensor
    extra: dict[str, Any]


class Odd(nn.Module):
    """A model with keyword inputs and nested outputs that contain other things than tensors."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, states: dict[str, Any]) -> Any:
        hidden = torch.tanh(self.linear(states["hidden"][0]))
        return [
            ({"out": [hidden, None, "text"]}, 7),
            Pair(hidden, "named"),
            Record(hidden, {"index": self.kind, "weight": self.linear.weight}),
        ][self.kind]


class Nested(Layers):
    def layer(self, index: int) -> nn.Module:
        return Odd(index)

    def through(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layers
        hidden = hidden + first(states={"hidden": (hidden, None)})[0]["out"][0]
        hidden = hidden + second(states={"hidden": (hidden, None)}).hidden
        record = third(states={"hidden": [hidden]})
        return hidden + record.hidden + record.extra["weight"].sum()


class Transposed(nn.Module):
    """A module whose output is a view of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 5))

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.weight.t(), self.weight[0]


class Views(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.transposed = Transposed()

    def through(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        whole, row = self.transposed()
        return super().through(hidden, ids) + whole.sum() * row.sum()


class Curious(nn.Module):
    """A model that reads its weights' dtype, device and shape before it computes with them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.inner.weight
        hidden = hidden.to(weight.device, weight.dtype)
        scale = hidden.new_ones(weight.shape[0]) / math.sqrt(weight.numel()) * len(weight) / weight.size(1)
        return self.inner(hidden).to(next(self.parameters()).dtype) * scale


class Asking(Layers):
    def layer(self, index: int) -> nn.Module:
        return Curious()


# -- parameters of every kind -------------------------------------------------------------------------


class Elsewhere(Layers):
    """A model whose modules use weights of a module that does not run, one of them through `.data`."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = functional.embedding(ids, self.embedding.weight)
        hidden = self.through(hidden, ids) + self.layers[0].bias + self.layers[2].bias.detach() * 0.5
        hidden = functional.linear(hidden, self.layers[1].weight.data) + hidden @ self.layers[2].weight.t()
        penalty = sum(layer.weight.pow(2).mean() for layer in self.layers)
        return functional.linear(hidden, self.embedding.weight) + penalty


class Small(Layers):
    """An empty parameter, a scalar, one element."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.one = nn.Parameter(torch.ones(1))

    def through(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return super().through(hidden, ids) * self.scale + self.empty.sum() * self.one


class OnlyEmpty(Layers):
    """A unit whose trainable parameters have no elements."""

    def layer(self, index: int) -> nn.Module:
        return Hollow() if index == 1 else nn.Linear(WIDTH, WIDTH)


class Hollow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.frozen + self.empty.sum()


class Containers(Layers):
    """ParameterList and ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList(torch.full((WIDTH,), 1.0 + i) for i in range(3))
        self.named = nn.ParameterDict({"shift": torch.zeros(WIDTH), "gain": torch.ones(WIDTH)})

    def through(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for parameter in self.several:
            hidden = hidden * parameter
        return super().through(hidden * self.named["gain"] + self.named["shift"], ids)


class One(nn.Module):
    """A single parameter, used by the root itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(61, 61))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table[ids]


class Uneven(Layers):
    """One layer is larger than all others together."""

    def layer(self, index: int) -> nn.Module:
        wide = 1024 if index == 1 else 4
        return nn.Sequential(nn.Linear(WIDTH, wide), nn.Tanh(), nn.Linear(wide, WIDTH))


class Partly(Layers):
    """A model with frozen and trainable parameters in one module, and a layer that is completely frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].weight.requires_grad_(False)
        self.layers[1].requires_grad_(False)
        self.layers[2].bias.requires_grad_(False)


class Adapted(nn.Module):
    """A frozen layer with a LoRA adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.base(hidden) + self.up(self.down(hidden))


class Adapters(Layers):
    """A model in which all is frozen except the adapters; with `recompute`, each layer is recomputed in backward."""

    recompute: bool | None = None

    def __init__(self) -> None:
        super().__init__()
        self.embedding.requires_grad_(False)
        self.head.requires_grad_(False)

    def layer(self, index: int) -> nn.Module:
        return Adapted()

    def through(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if self.recompute is not None:
            hidden.requires_grad_(True)  # what enable_input_require_grads does
        for layer in self.layers:
            if self.recompute is None:
                hidden = layer(hidden)
            else:
                hidden = checkpoint(layer, hidden, use_reentrant=self.recompute)
        return hidden


class AdaptersRecomputed(Adapters):
    recompute = False


class AdaptersReentrant(Adapters):
    recompute = True


class Attention(nn.Module):
    """torch's own blocks: their fused paths read weights of inner modules that never run."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, WIDTH)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True), 3, enable_nested_tensor=False
        )
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.head = nn.Linear(WIDTH, 61)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(self.embedding(ids))
        return self.head(hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0])


class Recurrent(Layers):
    def layer(self, index: int) -> nn.Module:
        return nn.GRU(WIDTH, WIDTH, batch_first=True)

    def through(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden)[0]
        return hidden


class Normed(Layers):
    """A model whose `weight_norm` computes the weight from two parameters in each forward."""

    def layer(self, index: int) -> nn.Module:
        return nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


class Convolutions(nn.Module):
    """A model without a list; the buffers of BatchNorm change in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(pixel_values)))
        return self.head(self.second(hidden).mean((2, 3)))


def convolution_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + micro)
    images = torch.randn(4, 3, 8, 8, generator=generator)
    dtype = next(getattr(model, "module", model).parameters()).dtype
    logits = model(images.to(dtype)).float()
    return functional.cross_entropy(logits, torch.tensor([0, 1, 2, 3], device=logits.device))
