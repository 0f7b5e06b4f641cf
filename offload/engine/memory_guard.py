"""A guard against the limit of host memory, where the CPU computes: an error in place of a kill by the kernel.

A start knows neither the length of a batch nor the loss of a loop (`layout/peak_memory.py`). So the first forward of a
batch that is larger than all before it looks at the free memory:

    before the model       ─► far more is free than any activations of this batch take: nothing more to look at.
                              Else malloc keeps no large block that is freed, from now on
    before a layer         ─► free memory must hold the layer's results, and all that the backward will take
    before a chunked loss  ─► the same for the logits of one chunk, and for the head's gradient in fp32

The rest of both budgets, whose pages are not touched yet, counts as taken. A forward that raises changes nothing: its
activations are freed with the error, and a smaller batch may follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.aio import resident_bytes
from offload.aio.memory import release_heap
from offload.engine.callbacks import Extension
from offload.engine.params import handle_of
from offload.errors import BudgetError
from offload.layout.peak_memory import CHUNK_TOKENS, BesideBudgets, PeakMemory
from offload.layout.vocabulary import find_tables
from offload.sizes import format_size
from offload.swapper.memory.device_arena import DeviceArena
from offload.swapper.memory.host_arena import HostArena
from offload.swapper.memory.limits import tightest_limit
from offload.torch_internals import inside_backward, outside_of_compiled_code, tree_leaves

_FP32 = 4
_OF_LAYER = 2
"""Tensors of the size of a layer's results that exist at once: the results, and a temporary of the next operation."""
_OF_LOSS = 3
"""The same for logits in fp32: logits, their logarithms, and the gradient of these; one more for logits in 16 bits."""
_OF_BLOCK = 3
"""The same for the widest layer of a block without gradients: its results, a gate's, and a temporary."""
_OF_HIDDEN = 5
"""Tensors of hidden states beside them: the residual, its norm, the mask, and the inputs and results of blocks."""
_OF_WAITING = 2
"""The same for a micro-batch that waits between two blocks: its hidden states, and its mask and positions."""
_WIDER = 8
"""Multiple of a layer's features by which its results exceed them, if they are logits."""
_CERTAIN = 8
"""Multiple of the results of all layers that no activations exceed."""


class _Layer(NamedTuple):
    """A module with a matrix of its own."""

    features: int
    """Results of the module for one token."""
    numel: int
    """Elements of the matrix that are used at once: all, or those of the largest of its parts."""
    rows: int
    """Results of the module for one token that are made at once, by a loss in chunks."""
    logits: bool
    tied: bool
    """True if another module owns the matrix too."""


class MemoryGuard(Extension):
    """The guard of one engine. All methods are called by the thread that runs the model."""

    def __init__(self, model: nn.Module, peak: PeakMemory, host: HostArena, arena: DeviceArena, processes: int) -> None:
        """Installs a hook on the model. `peak` is the sum of the start; `processes` share the machine's memory."""
        self._model, self._peak, self._host, self._arena, self._processes = model, peak, host, arena, processes
        self._layers = _layers(model)
        self._largest = {False: 0, True: 0}
        """Most elements of a batch whose forward has ended, without gradients and with them."""
        self._numel = 0
        """Elements of the batch that is looked at."""
        self._tokens = 0
        """Tokens of the last layer of it."""
        self._second = 0
        """Bytes of the gradients of a tied matrix that torch adds up, beyond those of `peak`."""
        self._hook = outside_of_compiled_code(self._before)
        self._removers: list[Callable[[], None]] = []
        self._installed = [
            model.register_forward_pre_hook(outside_of_compiled_code(self._begin), with_kwargs=True).remove,
            model.register_forward_hook(outside_of_compiled_code(self._end), always_call=True).remove,
        ]

    def abandon(self) -> None:
        """Removes the hooks on layers that an aborted forward has left."""
        while self._removers:
            self._removers.pop()()

    def remove(self) -> None:
        self.abandon()
        while self._installed:
            self._installed.pop()()

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if self._removers or inside_backward():
            return
        numel = _numel(args, kwargs)
        gradients = torch.is_grad_enabled()
        if numel <= max(self._largest[True], self._largest[gradients]):
            return
        self._second = 0
        results = sum(layer.features for layer in self._layers.values()) * numel * _FP32
        if tightest_limit(self._processes).free > self._reserve() + _CERTAIN * results:
            self._largest[gradients] = numel
            return
        release_heap(for_good=True)  # what malloc would keep is in no sum
        self._numel = numel
        self._removers = [module.register_forward_pre_hook(self._hook).remove for module in self._layers]

    def _before(self, module: nn.Module, args: Any) -> None:
        layer = self._layers[module]
        values = next((each for each in args if isinstance(each, torch.Tensor)), None)
        if inside_backward() or values is None or not values.ndim:
            return
        is_float, summed = values.is_floating_point(), 0
        tokens = values.numel() // max(values.shape[-1], 1) if is_float else values.numel()
        in_chunks = layer.logits and not tokens
        if in_chunks:  # the head computes no token, and the loss of this library one chunk after the other
            tokens = min(self._tokens, CHUNK_TOKENS)
            if values.dtype is not torch.float32 and (self._tokens > CHUNK_TOKENS or layer.rows < layer.features):
                summed = _FP32 * layer.numel
        elif is_float:
            self._tokens = tokens
        if layer.tied and is_float and not in_chunks and torch.is_grad_enabled():
            self._second = self._peak.gradients // 2  # torch adds the two gradients into new memory
        times = _OF_LAYER
        if layer.logits:
            times = _OF_LOSS if values.dtype is torch.float32 else _OF_LOSS + 1
        results = layer.rows if in_chunks else layer.features
        self._check(tokens * results * _FP32 * times + summed)

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._removers and not inside_backward():
            self.abandon()
            if output is not None:  # None after an exception
                self._largest[torch.is_grad_enabled()] = self._numel

    def _reserve(self) -> int:
        """Returns the bytes that the process will take beside the activations of this forward."""
        blocks = [(memory.data_ptr(), memory.numel()) for _, memory in self._arena.blocks]
        spans = [(self._host.address, self._host.nbytes), *blocks]
        rest = sum(nbytes - resident_bytes(address, nbytes) for address, nbytes in spans if nbytes)
        backward = self._peak.gradients + self._peak.sums + self._second if torch.is_grad_enabled() else 0
        return rest + backward + self._peak.copy

    def _check(self, nbytes: int) -> None:
        limit, reserve = tightest_limit(self._processes), self._reserve()
        if reserve + nbytes <= limit.free:
            return
        raise BudgetError(
            f"this batch has no room: {limit} leaves {format_size(limit.free)}, its next layer takes "
            f"{format_size(nbytes)}, and {format_size(reserve)} are for the rest of both budgets and for gradients, of "
            f"which a step needs {self._peak} beside the activations; the kernel would end the process without a word. "
            "What helps: a smaller micro-batch, shorter sequences, the loss in chunks (offload.losses), "
            '"activations": "device" or "vocabulary": "pieces" in "offload", smaller budgets, or a larger limit'
        )


def beside_forward(
    model: nn.Module, tokens: int, itemsize: int, chunked: bool, waiting: int = 0
) -> dict[str, BesideBudgets]:
    """Returns what a forward without gradients takes beside both budgets, with "whole" tables and in "pieces".

    Args:
        model: a model that is not under an engine yet.
        tokens: tokens of a micro-batch.
        itemsize: bytes of an element of weights.
        chunked: True if the loss is computed in chunks of tokens, with no more than these tokens' logits.
        waiting: tokens of other micro-batches, which pass through each block in turns with this one.
    """
    layers = _layers(model)
    pieces = {id(model.get_parameter(table.parameter)): table.pieces for table in find_tables(model)}
    hidden = max((layer.features for module, layer in layers.items() if isinstance(module, nn.Embedding)), default=0)
    beside = {}
    for vocabulary in ("whole", "pieces"):
        activations = copy = 0
        for module, layer in layers.items():
            words, parts = layer.features, pieces.get(id(module.weight)) if vocabulary == "pieces" else None
            share = 1.0 if parts is None else len(parts[0]) / parts[-1].stop
            if layer.logits and chunked:
                results = math.ceil(min(tokens, CHUNK_TOKENS) * words * share) * (_OF_LOSS + (itemsize < _FP32))
            else:
                results = tokens * words * (_OF_LOSS if layer.logits else _OF_BLOCK)
            results += hidden * (tokens * _OF_HIDDEN + waiting * _OF_WAITING)
            activations = max(activations, results * _FP32)
            copy = max(copy, math.ceil(layer.numel * share) * itemsize)
        beside[vocabulary] = BesideBudgets(copy=copy if itemsize < _FP32 else 0, activations=activations)
    return beside


def _layers(model: nn.Module) -> dict[nn.Module, _Layer]:
    """Returns the modules with a matrix of their own."""
    owned = [(module, weight) for module in model.modules() if (weight := module._parameters.get("weight")) is not None]
    matrices = [(module, weight) for module, weight in owned if weight.ndim == 2]
    owners = [id(weight) for _, weight in matrices]
    found = {}
    for module, weight in matrices:
        lookup = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        # A convolution of GPT-2 has its matrix the other way round.
        features = weight.shape[1] if lookup else getattr(module, "nf", weight.shape[0])
        is_wide = not lookup and features**2 > _WIDER * weight.numel()
        parts = () if (handle := handle_of(weight)) is None else handle.parts
        part = max((math.prod(part.shape) for part in parts), default=weight.numel())
        rows = features * part // weight.numel() if is_wide else features
        found[module] = _Layer(features, part, rows, is_wide, owners.count(id(weight)) > 1)
    return found


def _numel(args: Any, kwargs: Any) -> int:
    """Returns the elements of all tensors of a batch."""
    return sum(leaf.numel() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
