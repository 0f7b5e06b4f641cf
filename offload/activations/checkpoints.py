"""Checkpointing by unit: hooks on the repeated blocks of a model, whose activations are computed again in backward.

    forward     pre-hook  ─► torch's checkpointing begins: the graph keeps the block's inputs
                post-hook ─► it ends
    backward    the first tensor of the block that autograd asks for ─► the block's module is called again

The hooks enclose those of `ModuleHooks`, so a block's weights are fetched in its recomputation as in its forward. The
model's code and names stay as they are. What is computed again, also by the user's own hooks, must be the same: torch
compares shapes. What a block does to a list or a dictionary among its arguments, it does in the forward alone.

[Note: cache] A cache of keys and values would be filled once more in a recomputation. A block that trains gets none,
as in transformers' own checkpointing. A call with a cache that is in use, or while the block evaluates, keeps its cache
and is not checkpointed.

[Note: attention] With `"keep_attention"` the graph also keeps what the kernels of attention have returned, and a
recomputation takes it from there: torch's selective checkpointing, by two modes of dispatch. What the engine copies
while a block runs is outside of all modes. Outputs stay on the device until the recomputation.

[Note: buffers] A recomputation runs a module once more, and with it changes of its buffers, such as the statistics of
a BatchNorm. The buffers have the values of the forward again afterwards. A module that also reads a buffer that it
changes would compute something else: that is an error after its first forward, except for a norm with statistics, which
reads none while it trains.

Threads. Forward hooks run on the thread that runs the model, recomputations on autograd's.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.activations.partitions import InputPartitions
from offload.config import Config
from offload.engine.callbacks import ActivationPolicy
from offload.engine.hooks import other_hooks
from offload.engine.params import handle_of
from offload.errors import ConfigError, UsageError
from offload.interrupts import uninterrupted
from offload.notices import Remark, show
from offload.sizes import count_of
from offload.swapper.memory.device import Device
from offload.torch_internals import (
    are_of_checkpoint,
    checkpointing,
    inside_backward,
    outside_of_compiled_code,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    under_transforms,
)

logger = logging.getLogger("offload")

# -- unit checkpoints ----------------------------------------------------------------------------------


class _Buffer(NamedTuple):
    """A buffer of a block as it was before the block's forward."""

    name: str
    owner: nn.Module
    tensor: torch.Tensor
    version: int

    @property
    def may_have_changed(self) -> bool:
        """True if the forward has changed the buffer in place, as far as torch knows: kernels of norms say nothing."""
        return self.tensor._version != self.version or isinstance(self.owner, nn.modules.batchnorm._NormBase)


class _Weight(NamedTuple):
    """A parameter among the arguments of a block. It stays where it is: other objects than tensors are not saved."""

    parameter: Any


class _Call:
    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.generator: Generator[None, None, None] | None = None
        """None if the call is not checkpointed."""
        self.buffers: list[_Buffer] = []
        self.began = time.perf_counter()


class _OpenCalls(threading.local):
    """State of one thread."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []


class UnitCheckpoints(ActivationPolicy):
    """The hooks of checkpointing on the blocks of one model, whose inputs stay where the forward computes them."""

    def __init__(
        self, blocks: Sequence[str], config: Config, device: Device, partitions: InputPartitions | None = None
    ) -> None:
        """Installs nothing yet. `blocks` are the names of the modules that are computed again.

        `partitions` divides their inputs among ranks that have the same; None leaves them whole.
        """
        self._partitions = partitions
        self.notices = notices(config, len(blocks), device.host_addressable)
        self._blocks, self._device = blocks, device
        self._synchronize = config.activation_checkpointing.synchronize_checkpoint_boundary
        self._profile = config.activation_checkpointing.profile
        self._keeps_attention = config.offload.keep_attention
        # calling thread and autograd thread: one at a time runs a model, so these need no lock.
        self._forward_seconds: dict[str, float] = defaultdict(float)
        self._recomputation_seconds: dict[str, float] = defaultdict(float)
        self._local = _OpenCalls()
        self._removers: list[Callable[[], None]] = []

    def install(self, modules: Mapping[str, nn.Module]) -> None:
        for name in self._blocks:
            self._hook(modules[name], name)

    def remove(self) -> None:
        while self._removers:
            self._removers.pop()()

    def end_step(self, step: int) -> None:
        """Logs the seconds of the step's blocks if the config asks for them, and begins again."""
        forward, again = self._forward_seconds, self._recomputation_seconds
        if self._profile:
            rows = ", ".join(f"{name} {forward[name]:.4f} and {again[name]:.4f}" for name in self._blocks)
            show(f"step {step}, seconds of forward and recomputation: {rows}", logger)
        forward.clear()
        again.clear()

    def _hook(self, module: nn.Module, name: str) -> None:
        def before(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self._begin(module, name, args, kwargs) if called is module else None

        def after(called: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if called is module:
                self._end(module, name)

        pre, post = outside_of_compiled_code(before), outside_of_compiled_code(after)
        self._removers.append(module.register_forward_pre_hook(pre, prepend=True, with_kwargs=True).remove)
        # Also after an exception: otherwise torch's hooks for saved tensors would stay active.
        self._removers.append(module.register_forward_hook(post, always_call=True).remove)

    # -- forward ------------------------------------------------------------------------------------

    @uninterrupted
    def _begin(self, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begins a call of a block, and returns its arguments without a cache of keys and values."""
        call = _Call(module)
        self._local.calls.append(call)  # first, since the post-hook ends a call also after an error in here
        if not self._is_checkpointed(module, args, kwargs):
            return None
        args, kwargs = without_cache(args, kwargs)
        leaves, tree = tree_flatten((args, kwargs))
        leaves = [_Weight(leaf) if handle_of(leaf) is not None else leaf for leaf in leaves]
        shapes: dict[int, torch.Size] = {}
        """Of the inputs of which this rank keeps a part, by their position."""
        partitions = self._partitions
        if partitions is not None:
            for position, leaf in enumerate(leaves):
                if (part := partitions.part_of(name, position, leaf)) is not None:
                    shapes[position], leaves[position] = leaf.shape, part

        def recompute(*inputs: Any) -> None:
            values = [value.parameter if isinstance(value, _Weight) else value for value in inputs]
            if partitions is not None:
                for position, shape in shapes.items():
                    values[position] = partitions.whole(values[position], shape)
            again, named = tree_unflatten(values, tree)
            with self._recomputation(name, call):
                module(*again, **named)

        if self._synchronize:
            self._device.synchronize()
        call.began = time.perf_counter()
        call.buffers = _buffers_of(module)
        generator = checkpointing(recompute, *leaves, keeps_attention=self._keeps_attention)
        # calling thread: may wait for I/O, and so run a handler that calls `abandon`. The call receives its generator
        # only afterwards.
        next(generator)
        call.generator = generator
        return args, kwargs

    def _is_checkpointed(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Returns True if a backward through this call could need activations, which nobody else computes again."""
        # A forward inside of a backward is a recomputation, by this object or by somebody else's checkpoint.
        if not torch.is_grad_enabled() or inside_backward() or are_of_checkpoint(other_hooks()):
            return False
        # Values of torch.func end with its transform, long before a recomputation.
        if under_transforms():
            return False
        # A layer of transformers that checkpoints itself has this attribute.
        if getattr(module, "gradient_checkpointing", False) and module.training:
            return False
        # A call computes the same without an empty cache of a module that trains, and nobody will look into that one.
        caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
        if any(not module.training or _length_of(cache, module) for cache in caches):
            return False
        # A frozen prefix needs no checkpoint: autograd saves none of its activations.
        return any(
            isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves((args, kwargs))
        ) or any(parameter.requires_grad for parameter in module.parameters())

    @uninterrupted
    def _end(self, module: nn.Module, name: str) -> None:
        calls = self._local.calls
        if not calls or calls[-1].module is not module:  # `abandon` has ended it
            return
        call = calls.pop()
        if call.generator is None:
            return
        for _ in call.generator:
            raise AssertionError("torch's checkpointing did not end with the call")
        if self._synchronize:
            self._device.synchronize()
        self._forward_seconds[name] += time.perf_counter() - call.began
        _check_buffers(name, call)

    @contextlib.contextmanager
    def _recomputation(self, name: str, call: _Call) -> Iterator[None]:
        """Adds up the seconds of a recomputation and restores the block's buffers afterwards; see [Note: buffers]."""
        changed = [
            (saved_buffer.tensor, saved_buffer.tensor.clone())
            for saved_buffer in call.buffers
            if saved_buffer.may_have_changed
        ]
        began = time.perf_counter()
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, values in changed:
                    buffer.copy_(values)
            if self._synchronize:
                self._device.synchronize()
            self._recomputation_seconds[name] += time.perf_counter() - began

    @uninterrupted
    def abandon(self) -> None:
        while self._local.calls:
            call = self._local.calls.pop()
            if call.generator is None:
                continue
            call.generator.close()  # pops its pair of saved-tensor hooks


def without_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a block's arguments without a cache of transformers; see [Note: cache]."""
    if not any(_is_cache(value) for value in (*args, *kwargs.values())):
        return args, kwargs
    args = tuple(None if _is_cache(value) else value for value in args)
    kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    return args, kwargs | ({"use_cache": False} if "use_cache" in kwargs else {})


def _length_of(cache: Any, module: nn.Module) -> int:
    """Returns the tokens of a block's layer in a cache: the layers of a frozen prefix have filled theirs."""
    layer = next((part.layer_idx for part in module.modules() if isinstance(getattr(part, "layer_idx", None), int)), 0)
    try:
        return int(cache.get_seq_length(layer))
    except ValueError:  # a layer with linear attention, which counts no tokens
        return int(cache.get_seq_length())


def _is_cache(value: Any) -> bool:
    """Returns True for transformers' cache of keys and values, without an import of transformers."""
    kind = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
    return kind is not None and isinstance(value, kind)


def _buffers_of(module: nn.Module) -> list[_Buffer]:
    return [
        _Buffer(f"{path}.{name}" if path else name, owner, buffer, buffer._version)
        for path, owner in module.named_modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]


def _check_buffers(name: str, call: _Call) -> None:
    """Raises `UsageError` if the forward has changed a buffer that it may also have read; see [Note: buffers]."""
    for buffer in call.buffers:
        if isinstance(buffer.owner, nn.modules.batchnorm._NormBase):
            continue
        now = buffer.owner._buffers.get(buffer.name.rpartition(".")[2])
        if buffer.tensor._version != buffer.version or _differs(now, buffer.tensor):
            raise UsageError(
                f"{name} changes its buffer {buffer.name} in forward, so a recomputation in backward would compute "
                'something else. Leave "activations" and "activation_checkpointing" out of the config, and checkpoint '
                "other modules by torch.utils.checkpoint, if any"
            )


def _differs(now: torch.Tensor | None, before: torch.Tensor) -> bool:
    """Returns True if a buffer was replaced by one with other values. A table that grows has another shape."""
    if now is None or now is before or now.shape != before.shape or now.dtype != before.dtype:
        return False
    return now.device != before.device or not torch.equal(now, before)


# -- policy --------------------------------------------------------------------------------------------
#
# The inputs of checkpointed units that leave the device, and those that leave host memory: pure functions of sizes.
#
# A forward makes inputs in its order, and a backward asks for the newest first. So the oldest ones leave first:
# their next use is furthest away. The newest one never leaves the device, since the backward may begin with it.


STAGED_INPUTS = 4
"""Host buffers through which inputs go to DISK: two are written or read, one is copied, one is ahead."""
_HEADROOM = 2
"""Free host buffers that writes to DISK keep ahead of the forward."""


def leaves_device(sizes: Sequence[int], limit: float) -> int:
    """Returns how many of the inputs on the device leave it, oldest first.

    `sizes` are the bytes of each input on the device, oldest first. The newest does not count and does not leave. The
    others may take `limit` bytes together.
    """
    nbytes = sum(sizes[:-1])
    count = 0
    while nbytes > limit:
        nbytes -= sizes[count]
        count += 1
    return count


def writes(unwritten: int, room: int, nbytes: int) -> bool:
    """Returns True if the oldest input in host memory is to be written to DISK now, to keep buffers free.

    `unwritten` inputs of `nbytes` are in host buffers, and their bytes are neither on DISK nor on their way there;
    `room` are the bytes of host memory for inputs.
    """
    buffers = max(room // max(nbytes, 1), STAGED_INPUTS)
    return unwritten > buffers - _HEADROOM


def check_tier(tier: str | None, drives: bool) -> None:
    """Raises `ConfigError` if inputs are to go to DISK without a drive."""
    if tier == "nvme" and not drives:
        raise ConfigError(
            '"activations": "nvme" needs a folder for files, but no "nvme_path" is given; set one in the "offload" '
            "block"
        )


def notices(config: Config, blocks: int, host_addressable: bool) -> tuple[str, ...]:
    """Returns the lines for the user on the blocks that are computed again, and on keys without an effect.

    `blocks` are computed again; with `host_addressable`, device memory is host memory.
    """
    checkpointing_config, tier = config.activation_checkpointing, config.activation_tier
    if not blocks:
        return (
            "no block is computed again in backward: the model has no ModuleList or Sequential of modules with "
            'parameters; name the modules in "units" of the "offload" block',
        )
    where = {
        "device": "on the device",
        "cpu": "in host memory, and in files where that ends" if config.drives else "in host memory",
        "nvme": "in files",
        "auto": "on the device while there is room, then in host memory and in files",
    }[tier or "device"]
    if host_addressable and tier in ("cpu", "auto"):
        where = "where they are, in host memory" + (", and in files where that ends" if config.drives else "")
    most_blocks = checkpointing_config.number_checkpoints
    lines = (
        (
            most_blocks is not None and most_blocks > blocks,
            f"number_checkpoints is {most_blocks}, and the model has {blocks} blocks, all of which are computed again",
        ),
        (
            checkpointing_config.cpu_checkpointing and tier != "cpu",
            f'cpu_checkpointing has no effect, since "activations" is "{tier}"',
        ),
        (
            checkpointing_config.contiguous_memory_optimization and tier == "device",
            "contiguous_memory_optimization has no effect, since inputs of blocks stay on the device",
        ),
    )
    remark = Remark(f"{count_of(blocks, 'block is', 'blocks are')} computed again in backward; inputs wait {where}")
    return (remark, *(line for holds, line in lines if holds))
