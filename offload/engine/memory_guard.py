"""A watch over host memory: the budget gives way before the kernel kills, and a batch without room is an error.

    each call of the engine  ─► where memory is short, the host budget shrinks by clean copies of weights and states,
                                which are on the drives too. It grows again when calls have left memory free for a while
    a batch larger than all before it, where the CPU computes:
        before the model       ─► far more is free than any activations of this batch take: nothing more to look at
        before a layer         ─► free memory must hold the layer's results, and all that the backward will take. If it
                                  cannot also hold what malloc may keep, malloc keeps no large block from now on
        before a chunked loss  ─► the same for the logits of one chunk, and for the head's gradient in fp32

A start knows neither the length of a batch nor the loss of a loop (`layout/peak_memory.py`), nor what other processes
will take. `HostWatch` moves the budget, and nothing else does: for the user (`Engine.resize`), for a call that finds
memory short, and for `MemoryGuard`, whose batch has no room otherwise. A shrink evicts copies, so no bit changes.

The rest of both budgets, whose pages are not touched yet, counts as taken. A forward that raises changes nothing: its
activations are freed with the error, and a smaller batch may follow.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.aio import resident_bytes
from offload.aio.memory import release_heap
from offload.engine.callbacks import EngineCallbacks, Extension
from offload.engine.components import EngineComponents
from offload.engine.params import handle_of
from offload.errors import BudgetError
from offload.layout.peak_memory import CHUNK_TOKENS, BesideBudgets, PeakMemory
from offload.layout.vocabulary import find_tables
from offload.sizes import GIB, MIB, PAGE, format_size
from offload.swapper.memory.device_arena import DeviceArena, check_budget
from offload.swapper.memory.host_arena import HostArena
from offload.swapper.memory.limits import stalled, tightest_limit
from offload.torch_internals import inside_backward, outside_of_compiled_code, tree_leaves

logger = logging.getLogger("offload")

# -- host budget ---------------------------------------------------------------------------------------


_MARGIN, _MARGIN_SHARE = range(64 * MIB, GIB + 1), 1 / 32
"""Bytes that stay free below the tightest limit: this share of the limit, within these bounds."""
_STALLED = 0.1
"""Share of the time in waits for memory from which it is short, although a few margins are free."""
_CALM, _MOST_CALM = 8, 64
"""Readings without a shortage before the budget grows. After a shrink that follows a growth they are twice as many."""
_PACE = (0.02, 0.01)
"""Seconds between two readings at least, and the share of a processor that readings take at most.

A reading takes 0.3 ms, and a millisecond more for each GiB of the budget.
"""


class HostReading(NamedTuple):
    """What the system reports about host memory at one moment."""

    name: str
    """The tightest limit, in words."""
    limit: int
    room: int
    """Bytes that this process may still allocate beside its budgets; below 0, bytes beyond the limit."""
    stalled: float = 0.0
    """Share of the last seconds in which a process of the cgroup waited for memory."""

    @property
    def margin(self) -> int:
        """Bytes that should stay free."""
        return max(_MARGIN[0], min(int(self.limit * _MARGIN_SHARE), _MARGIN[-1]))

    @property
    def short(self) -> bool:
        """True if memory is short: little is free, or not much is, and processes wait for it."""
        return self.room < self.margin or (self.stalled >= _STALLED and self.room < 4 * self.margin)


def next_host_budget(now: int, least: int, most: int, readings: Sequence[HostReading], calm: int = _CALM) -> int:
    """Returns the bytes of the host budget, between `least` and `most`, after `readings`, the newest last.

    Where memory is short, two margins are free after the shrink. The budget grows after `calm` readings of which none
    had less than three margins free, into what all of them had free beyond two. So a growth alone makes nothing short.
    """
    newest = readings[-1]
    if newest.short:
        return max(least, now - max(2 * newest.margin - newest.room, newest.margin))
    room = min(reading.room for reading in readings[-calm:])
    if len(readings) < calm or room < 3 * newest.margin:
        return now
    return min(most, now + room - 2 * newest.margin)


def read_host_memory(processes: int, untouched: int) -> HostReading:
    """Returns what the system reports now; `processes` share the memory of the machine and of cgroups evenly.

    `untouched` bytes of the budgets have not been written yet, and will be.
    """
    limit = tightest_limit(processes)
    return HostReading(str(limit), limit.nbytes, limit.room - untouched, stalled())


def untouched_bytes(host: HostArena, device: DeviceArena) -> int:
    """Returns the bytes of both budgets in host memory whose pages were not written yet."""
    blocks = [memory for _, memory in device.blocks if memory.device.type == "cpu"]
    spans = [(host.address, host.nbytes), *((memory.data_ptr(), memory.numel()) for memory in blocks)]
    return sum(nbytes - resident_bytes(address, nbytes) for address, nbytes in spans if nbytes)


class HostWatch:
    """The size of one engine's host budget. Belongs to the thread that runs the model.

    `shards`, `pager` and the update worker know how their memory is given back; this class alone decides how much.
    """

    def __init__(self, components: EngineComponents, watches: bool) -> None:
        """Begins with the budget of the start. With `watches` False only `resize` changes it."""
        self._shards, self._pager, self._updates = components.shards, components.pager, components.update_worker
        self._gradients, self._processes = components.gradients, components.world.everyone.here
        self._arena, self._watches = components.arena, watches
        self._most = self._arena.nbytes
        """Bytes to which the budget grows again: that of the start or of `resize`, less what a batch has needed."""
        self.given_back = 0
        """Bytes of the budget that memory was short of, and that have not come back."""
        self._readings: list[HostReading] = []
        self._next = 0.0
        """Time of the next reading."""
        self._calm, self._grown = _CALM, False

    def check(self, nbytes: int, configured: int | None) -> None:
        """Raises `BudgetError` if the budget cannot have `nbytes`. `configured` is "host_memory" of the config."""
        arena = self._arena
        check_budget(
            "the host budget",
            nbytes,
            arena.least,
            "it holds the states whose tier is the host, gradients, tiles, and two buffers of weights: a start with a "
            'smaller "host_memory" places states on nvme instead',
        )
        # The config may allow more than there is a use for.
        if nbytes > max(arena.most, configured or 0):
            raise BudgetError(
                f"the host budget of {format_size(nbytes)} is larger than that of the start, "
                f"{format_size(arena.most)}, and host memory is mapped at the start alone: start with a larger "
                '"host_memory", and make it smaller afterwards'
            )

    def resize(self, nbytes: int) -> None:
        """Gives the budget `nbytes` from now on, at most that of the start. No update may be under way."""
        self._most = min(nbytes, self._arena.most)
        self.given_back = 0
        self._readings.clear()
        self._move(nbytes, "as asked", wait=True)

    def relieve(self) -> None:
        """Reads the limits, and moves the budget if memory is short or has been free for a while.

        Every call of the engine begins with this. Not every call makes a reading.
        """
        arena = self._arena
        if (
            not self._watches
            or (not arena.classes.cache and arena.nbytes >= self._most)
            or time.monotonic() < self._next
        ):
            return
        began = time.thread_time()
        # A gradient in autograd's own tensor is in the usage, and its place in the budget is not touched.
        untouched = untouched_bytes(arena, self._pager.arena) - self._gradients.kept_nbytes
        reading = read_host_memory(self._processes, max(untouched, 0))
        self._next = time.monotonic() + max(_PACE[0], (time.thread_time() - began) / _PACE[1])
        self._readings = [*self._readings[1 - self._calm :], reading]
        before = arena.nbytes
        most = min(self._most, arena.most)
        nbytes = next_host_budget(before, arena.least, most, self._readings, self._calm)
        if nbytes < before:
            if self._grown:
                self._calm, self._grown = min(2 * self._calm, _MOST_CALM), False
            self._readings.clear()
            self._shrink(nbytes, f"memory is short, {reading.name} leaves {format_size(max(reading.room, 0))}")
        elif nbytes > before:
            self._readings.clear()
            if self._shards.dropped:
                self._updates.come_to_rest(commit=False)
            self._grown = True
            try:
                self._move(nbytes, f"{format_size(reading.room)} of memory are free again", wait=True)
                self.given_back = max(0, self.given_back - (arena.nbytes - before))
            except BudgetError as error:  # another engine has it, and the user can still ask for it
                self._most = before
                logger.info("host memory stays %s: %s", format_size(before), error)

    def give(self, nbytes: int) -> None:
        """Gives `nbytes` back at once, as far as the budget has them, and for good: each batch may need them."""
        arena = self._arena
        if self._watches and arena.classes.cache:
            # Not a few bytes for each layer.
            self._shrink(max(arena.nbytes - max(nbytes, _MARGIN[0]), arena.least), "a batch needs the memory")
            self._most = min(self._most, arena.nbytes)

    def _shrink(self, nbytes: int, why: str) -> None:
        """Gives back what is clean now, and then, if that is not enough, what updates hold."""
        before = self._arena.nbytes
        self._move(nbytes, why, wait=False)
        if self._arena.nbytes >= nbytes + PAGE:
            # calling thread: updates end by themselves, and the next use of their units would wait for them anyway.
            self._updates.come_to_rest(commit=False)
            self._move(nbytes, why, wait=True)
        self.given_back += before - self._arena.nbytes

    def _move(self, nbytes: int, why: str, wait: bool) -> None:
        """Moves the end of the budget; with `wait`, no update is under way, and the end gets where it should."""
        arena, before = self._arena, self._arena.nbytes
        cache = max(0, min(nbytes, arena.most) - arena.least) // PAGE * PAGE
        if cache < arena.classes.cache:
            self._pager.shrink_host(cache, self._updates.drop_spare, wait)
        elif cache > arena.classes.cache:
            self._shards.grow_host(cache)
        if arena.nbytes != before:
            verb = "shrinks" if arena.nbytes < before else "grows"
            logger.info("host memory %s from %s to %s: %s", verb, format_size(before), format_size(arena.nbytes), why)


# -- batches -------------------------------------------------------------------------------------------


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

    def __init__(
        self,
        model: nn.Module,
        peak: PeakMemory,
        host: HostArena,
        arena: DeviceArena,
        processes: int,
        callbacks: EngineCallbacks,
    ) -> None:
        """Installs a hook on the model. `peak` is the sum of the start; `processes` share the machine's memory."""
        self._model, self._peak, self._host, self._arena, self._processes = model, peak, host, arena, processes
        self._callbacks = callbacks
        self._layers = _layers(model)
        self._largest = {False: 0, True: 0}
        """Most elements of a batch whose forward has ended, without gradients and with them."""
        self._numel = 0
        """Elements of the batch that is looked at."""
        self._tokens = 0
        """Tokens of the last layer of it."""
        self._second = 0
        """Bytes of the gradients of a tied matrix that torch adds up, beyond those of `peak`."""
        self._free = self._results = 0
        """Bytes that were free before the batch that is looked at, and bytes of the results of all its layers."""
        self._keeps = True
        """True while malloc may keep large blocks that are freed."""
        self._hook = outside_of_compiled_code(self._before)
        self._removers: list[Callable[[], None]] = []
        self._installed = [
            model.register_forward_pre_hook(outside_of_compiled_code(self._begin), with_kwargs=True).remove,
            model.register_forward_hook(outside_of_compiled_code(self._end), always_call=True).remove,
        ]

    def abandon(self) -> None:
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
        self._results = sum(layer.features for layer in self._layers.values()) * numel * _FP32
        self._free = tightest_limit(self._processes).free
        if self._free > self._reserve() + _CERTAIN * self._results:
            self._largest[gradients] = numel
            return
        self._numel = numel
        self._removers = [module.register_forward_pre_hook(self._hook).remove for module in self._layers]

    def _before(self, module: nn.Module, args: Any) -> None:
        layer = self._layers[module]
        values = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
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
        rest = untouched_bytes(self._host, self._arena)
        backward = self._peak.gradients + self._peak.sums + self._second if torch.is_grad_enabled() else 0
        return rest + backward + self._peak.copy

    def _check(self, nbytes: int) -> None:
        limit, reserve = tightest_limit(self._processes), self._reserve()
        # What malloc keeps is in no sum: at most as much as the blocks in use, which are this forward's activations.
        # To keep nothing costs a third of a step, in faults of pages, so it begins only where it must.
        kept = max(self._free - limit.free, self._results)
        if self._keeps and reserve + nbytes + kept > limit.free:
            release_heap(for_good=True)
            self._keeps = False
            limit = tightest_limit(self._processes)
        if reserve + nbytes > limit.free:
            self._callbacks.give_host_memory(reserve + nbytes - limit.room)
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
    owned = [(module, weight) for module in model.modules() if (weight := module._parameters.get("weight")) is not None]
    matrices = [(module, weight) for module, weight in owned if weight.ndim == 2]
    owners = [id(weight) for _, weight in matrices]
    layers = {}
    for module, weight in matrices:
        lookup = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        # A convolution of GPT-2 has its matrix the other way round.
        features = weight.shape[1] if lookup else getattr(module, "nf", weight.shape[0])
        is_wide = not lookup and features**2 > _WIDER * weight.numel()
        parts = () if (handle := handle_of(weight)) is None else handle.parts
        part = max((math.prod(part.shape) for part in parts), default=weight.numel())
        rows = features * part // weight.numel() if is_wide else features
        layers[module] = _Layer(features, part, rows, is_wide, owners.count(id(weight)) > 1)
    return layers


def _numel(args: Any, kwargs: Any) -> int:
    return sum(leaf.numel() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
