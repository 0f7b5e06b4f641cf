"""The device that computes the model: matrix products, what lies between them, new memory, copies."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from offload.aio import aligned_empty
from offload.hardware.probe.pace import Pace, grown, in_turns
from offload.hardware.probe.rates import DTYPES
from offload.sizes import MIB
from offload.swapper.memory.device import open_device

_COPIED = (MIB, 4 * MIB, 16 * MIB, 64 * MIB)
_LAYERS = 12


class Product(NamedTuple):
    """A linear layer, and two numbers of tokens that go through it."""

    width: int
    wide: int
    few: int
    many: int

    @property
    def flops(self) -> float:
        """Of a pass with many tokens."""
        return 6.0 * self.width * self.wide * self.many


_SCALES = (1, 2, 4, 6, 8, 12, 16, 24, 32)
_PRODUCTS = tuple(Product(64 * scale, 256 * scale, 4 * scale, 32 * scale) for scale in _SCALES)
_PRODUCTS_OF_GPU = tuple(Product(1024 * scale, 1024 * scale, 128 * scale, 1024 * scale) for scale in (1, 2, 4, 8))
_VALUES = ((16, 1024), (64, 1024), (256, 1024), (512, 1024))
_VALUES_OF_GPU = ((512, 2048), (2048, 4096), (8192, 8192))
"""Tokens, and the width of each."""


class Compute:
    """One device."""

    def __init__(self, device: torch.device, pace: Pace) -> None:
        self._device, self._pace = device, pace
        self._sizes: dict[str, Product] = {}
        """By dtype, as its first products have shown."""

    def products(self, dtype: str) -> tuple[float, float]:
        """Operations, and bytes of weights, of a linear layer's forward and the two products of its backward.

        As in a model each weight was not used for a while, and a gradient is larger than what malloc keeps for later.
        """
        device = self._device
        size = self._sizes[dtype] = self._sizes.get(dtype) or self._product(DTYPES[dtype])
        layer = _Linear(DTYPES[dtype], device, size)
        small, large = in_turns([layer.passes(size.few), layer.passes(size.many)], self._pace.rate, device)
        each = max(large - small, 0.5 * large) / (size.many - size.few)  # of a token; the rest is of the weights
        rest = min(max(small - size.few * each, 0.01 * small), 0.5 * small)
        return 6 * size.wide * size.width / each, 3 * layer.nbytes / rest

    def _product(self, dtype: torch.dtype) -> Product:
        """The size that this dtype is measured with: a dtype that is slow here has a small one."""

        def passes(size: Product) -> Callable[[], object]:
            return _Linear(dtype, self._device, size).passes(size.many)

        sizes = _PRODUCTS if self._device.type == "cpu" else _PRODUCTS_OF_GPU
        return grown(sizes, lambda size: size.flops, passes, 3 * self._pace.call, self._device)

    def elementwise(self, dtype: str) -> float:
        """Bytes of what a transformer does between its products, into new memory each time as it does."""
        device, of = self._device, DTYPES[dtype]
        sizes = _VALUES if device.type == "cpu" else _VALUES_OF_GPU
        size = grown(
            sizes, lambda size: float(size[0] * size[1]), partial(_layers, of, device), self._pace.call, device
        )
        seconds = in_turns([_layers(of, device, size)], self._pace.rate, device)[0]
        return _LAYERS * 12 * size[0] * size[1] * of.itemsize / seconds

    def fresh(self) -> float:
        """Bytes that are filled in new memory."""
        make = partial(_fill, self._device)
        size = grown(_COPIED, float, make, self._pace.call, self._device)
        return size / in_turns([make(size)], self._pace.rate, self._device)[0]

    def copies(self) -> tuple[float, float]:
        """Bytes between memory as the engine's arena is, and the device: there, and back."""
        opened, device = open_device(self._device), self._device
        host = torch.frombuffer(aligned_empty(_COPIED[-1]), dtype=torch.uint8)
        there = torch.ones(_COPIED[-1], dtype=torch.uint8, device=device)
        opened.register(host)  # before the first touch
        try:
            host.fill_(1)
            size = grown(_COPIED, float, partial(_copy, there, host), self._pace.call, device)
            up, down = in_turns([_copy(there, host, size), _copy(host, there, size)], self._pace.rate, device)
        finally:
            opened.unregister(host)
        return size / up, size / down


class _Linear:
    """Three equal layers in turns."""

    def __init__(self, dtype: torch.dtype, device: torch.device, size: Product) -> None:
        self._inputs = partial(torch.full, fill_value=0.01, dtype=dtype, device=device)
        self._width = size.width
        weights = [self._inputs((size.wide, size.width)) for _ in range(3)]
        self.nbytes = weights[0].nbytes
        self._taken = itertools.cycle(weights)

    def passes(self, tokens: int) -> Callable[[], object]:
        """A forward of so many tokens and its backward."""
        inputs = self._inputs((tokens, self._width))

        def work() -> None:
            weight = next(self._taken)
            output = torch.nn.functional.linear(inputs, weight)
            output @ weight
            output.t() @ inputs

        return work


def _layers(dtype: torch.dtype, device: torch.device, size: tuple[int, int]) -> Callable[[], object]:
    values = torch.full(size, 0.5, dtype=dtype, device=device)
    weight = torch.ones(size[1], dtype=dtype, device=device)

    def layers() -> None:
        for _ in range(_LAYERS):
            hidden = torch.nn.functional.layer_norm(values, size[1:], weight, weight)
            hidden = torch.nn.functional.gelu(hidden, approximate="tanh")
            hidden = torch.softmax(hidden, -1)
            torch.add(hidden * values, values)

    return layers


def _fill(device: torch.device, nbytes: int) -> Callable[[], object]:
    return lambda: torch.full((nbytes,), 0, dtype=torch.uint8, device=device)


def _copy(target: torch.Tensor, source: torch.Tensor, nbytes: int) -> Callable[[], object]:
    return lambda: target[:nbytes].copy_(source[:nbytes], non_blocking=True)
