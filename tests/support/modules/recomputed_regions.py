"""Regions of a model that are computed again in the backward, by either way of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.modules.module_kinds import WIDTH, Layers


class Region(Layers):
    """A model that recomputes regions of `size` layers in backward, with dropout inside."""

    size, reentrant = 1, False

    def __init__(self) -> None:
        super().__init__(4)

    def layer(self, index: int) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH))

    def through(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for first in range(0, len(self.layers), self.size):
            region = self.layers[first : first + self.size]

            def several(hidden: torch.Tensor, region: Any = region) -> torch.Tensor:
                for layer in region:
                    hidden = hidden + layer(hidden)
                return hidden

            hidden = checkpoint(several, hidden, use_reentrant=self.reentrant)
        return hidden


class RegionOfTwo(Region):
    size = 2


class RegionOfAll(Region):
    size = 4


class ReentrantRegion(Region):
    reentrant = True


class ReentrantRegionOfTwo(RegionOfTwo):
    reentrant = True


class ReentrantRegionOfAll(RegionOfAll):
    reentrant = True


class FrozenRegion(RegionOfTwo):
    """A region whose frozen norm saves its weight itself, not a view; a block uses a frozen weight of its own."""

    def layer(self, index: int) -> nn.Module:
        return Gated() if index % 2 else nn.LayerNorm(WIDTH).requires_grad_(False)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.full((WIDTH,), 0.5), requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(hidden)) * self.gate
