"""Measurements of the compute device: matrix products, the operations between them, new memory, copies."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from offload.hardware.probe.pace import Pace, grown, in_turns
from offload.hardware.probe.rates import DTYPES
from offload.sizes import MIB
from offload.swapper.memory.device import open_device

_COPIED = (MIB, 4 * MIB, 16 * MIB, 64 * MIB)
"""Bytes of a copy, in growing sizes."""
_LAYERS = 12


class Product(NamedTuple):
    """A linear layer (width -> wide), and two numbers of tokens that pass through it."""

    width: int
    wide: int
    few: int
    many: int

    @property
    def flops(self) -> float:
        """Floating-point operations of a pass with many tokens: three products, each a multiply and an add per term."""
        return 6.0 * self.width * self.wide * self.many


_SCALES = (1, 2, 4, 6, 8, 12, 16, 24, 32)
_PRODUCTS = tuple(Product(64 * scale, 256 * scale, 4 * scale, 32 * scale) for scale in _SCALES)
_PRODUCTS_OF_GPU = tuple(Product(1024 * scale, 1024 * scale, 128 * scale, 1024 * scale) for scale in (1, 2, 4, 8))
_VALUES = ((16, 1024), (64, 1024), (256, 1024), (512, 1024))
_VALUES_OF_GPU = ((512, 2048), (2048, 4096), (8192, 8192))
"""Tokens and width of elementwise operations; `_VALUES` on a CPU."""


class Compute:
    """The compute device of a measurement."""

    def __init__(self, device: torch.device, pace: Pace) -> None:
        self._device, self._pace = device, pace
        self._sizes: dict[str, Product] = {}
        """Size by dtype name, chosen when the dtype is measured for the first time."""

    def products(self, dtype: str) -> tuple[float, float]:
        """Measures a linear layer's forward and the two products of its backward, in the dtype named `dtype`.

        Conditions are as in a model: a weight has not been used for a while, and gradients are larger than the blocks
        that malloc keeps for reuse.

        Returns:
            Floating-point operations a second, and bytes of weights a second.
        """
        device = self._device
        size = self._sizes[dtype] = self._sizes.get(dtype) or self._product(DTYPES[dtype])
        layer = _Linear(DTYPES[dtype], device, size)
        # Time is linear in tokens. Two numbers of tokens separate the cost of a token from the fixed cost of the
        # weights; the bounds keep noise from giving a rate of zero or infinity.
        small, large = in_turns([layer.passes(size.few), layer.passes(size.many)], self._pace.rate, device)
        each = max(large - small, 0.5 * large) / (
            size.many - size.few
        )  # seconds of a token; the remainder belongs to the weights
        rest = min(max(small - size.few * each, 0.01 * small), 0.5 * small)
        return 6 * size.wide * size.width / each, 3 * layer.nbytes / rest

    def _product(self, dtype: torch.dtype) -> Product:
        """Returns the size with which the dtype is measured: small for a dtype that is slow on this machine."""

        def passes(size: Product) -> Callable[[], object]:
            return _Linear(dtype, self._device, size).passes(size.many)

        sizes = _PRODUCTS if self._device.type == "cpu" else _PRODUCTS_OF_GPU
        return grown(sizes, lambda size: size.flops, passes, 3 * self._pace.call, self._device)

    def elementwise(self, dtype: str) -> float:
        """Returns the bytes a second of a transformer's operations between its products, in the dtype named `dtype`.

        The results go to new memory each time, as in a model.
        """
        device, of = self._device, DTYPES[dtype]
        sizes = _VALUES if device.type == "cpu" else _VALUES_OF_GPU
        size = grown(
            sizes, lambda size: float(size[0] * size[1]), partial(_layers, of, device), self._pace.call, device
        )
        seconds = in_turns([_layers(of, device, size)], self._pace.rate, device)[0]
        # The operations of `_layers` together read and write each value 12 times.
        return _LAYERS * 12 * size[0] * size[1] * of.itemsize / seconds

    def fresh(self) -> float:
        """Returns the bytes a second that are filled in newly allocated memory."""
        make = partial(_fill, self._device)
        size = grown(_COPIED, float, make, self._pace.call, self._device)
        return size / in_turns([make(size)], self._pace.rate, self._device)[0]

    def copies(self) -> tuple[float, float]:
        """Returns the bytes a second of copies from host memory like the engine's arena to the device, and back."""
        opened, device = open_device(self._device), self._device
        host = torch.frombuffer(opened.allocate_host(_COPIED[-1]).buffer, dtype=torch.uint8)
        there = torch.ones(_COPIED[-1], dtype=torch.uint8, device=device)
        opened.register([host])  # pins; before the first touch, as the engine does
        try:
            host.fill_(1)
            size = grown(_COPIED, float, partial(_copy, there, host), self._pace.call, device)
            up, down = in_turns([_copy(there, host, size), _copy(host, there, size)], self._pace.rate, device)
        finally:
            opened.unregister([host])
        return size / up, size / down


class _Linear:
    """Three linear layers of equal shape, used in turns, so that no weight stays in a cache."""

    def __init__(self, dtype: torch.dtype, device: torch.device, size: Product) -> None:
        self._dtype, self._device, self._width = dtype, device, size.width
        self._generator = torch.Generator(device).manual_seed(0)
        weights = [self._inputs((size.wide, size.width)) for _ in range(3)]
        self.nbytes = weights[0].nbytes
        self._taken = itertools.cycle(weights)

    def _inputs(self, shape: tuple[int, int]) -> torch.Tensor:
        # Random, as in training: products of equal numbers draw less power, so a GPU keeps a higher clock (an H200
        # made 907 TFLOP/s of them, and 680 of random ones).
        values = torch.empty(shape, dtype=self._dtype, device=self._device)
        return values.uniform_(-0.01, 0.01, generator=self._generator)

    # Nothing here is recorded by autograd: the two products of the backward are written out.
    def passes(self, tokens: int) -> Callable[[], object]:
        """Returns a function that computes the forward of `tokens` tokens and its backward."""
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
            # Bytes in units of the values: norm, activation and softmax move 2 each, product and sum 3 each.
            hidden = torch.nn.functional.layer_norm(values, size[1:], weight, weight)
            hidden = torch.nn.functional.gelu(hidden, approximate="tanh")
            hidden = torch.softmax(hidden, -1)
            torch.add(hidden * values, values)

    return layers


def _fill(device: torch.device, nbytes: int) -> Callable[[], object]:
    return lambda: torch.full((nbytes,), 0, dtype=torch.uint8, device=device)


def _copy(target: torch.Tensor, source: torch.Tensor, nbytes: int) -> Callable[[], object]:
    """Returns a function that copies the first `nbytes` bytes; on a GPU the copy is only queued."""
    return lambda: target[:nbytes].copy_(source[:nbytes], non_blocking=True)
