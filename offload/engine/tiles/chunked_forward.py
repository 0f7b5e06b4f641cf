"""The forward and the backward of a module over chunks of its input: a function of autograd that saves the input alone.

The backward computes each chunk again, with the forward's autocast and random numbers, and adds up the gradients of the
chunks. What would get wrong gradients is refused: [Note: refused].

[Note: refused] Hooks of `register_hook` would be called for each chunk. A tensor of others that the module uses would
receive no gradient. Weights that have changed since the forward would give the chunks of another computation; torch and
the engine notice it for tensors that are saved, and here no weight is saved.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from offload.engine.param_access import engines
from offload.engine.params.paged_parameter import handle_of
from offload.engine.tiles.forward_state import Casts, autocast, casts_of, equal, generators, replayed
from offload.errors import UsageError
from offload.torch_internals import tensor_hooks_of

Chunk = tuple[int, int]
"""First position and length of a chunk."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Work:
    """One call of a tiled module."""

    module: nn.Module
    run: Callable[[torch.Tensor], Any]
    """The module's own forward."""
    dim: int
    chunks: list[Chunk]
    casts: Casts
    names: tuple[str, ...]
    """Names of the parameters that train, in the order in which the function receives them."""
    versions: dict[str, int]
    """For each parameter how often it had changed; see `_versions`."""
    source: Any
    """The node of `_Input` that holds the input; None if the input needs no gradient."""


def in_chunks(
    module: nn.Module, run: Callable[[torch.Tensor], Any], hidden: torch.Tensor, dim: int, chunks: list[Chunk]
) -> torch.Tensor:
    """Returns the output of a module, computed chunk by chunk.

    Args:
        module: the module; its parameters that train receive gradients.
        run: the module's own forward.
        hidden: the input.
        dim: dimension of the chunks.
        chunks: at least one; together all positions of the input along `dim`.

    Raises:
        UsageError: if a parameter has a hook that would be called too often, or if the output has another form.
    """
    saves = torch.is_grad_enabled() and hidden.requires_grad
    if saves:
        hidden = _Input.apply(hidden)  # type: ignore[no-untyped-call]
    trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
    if torch.is_grad_enabled():
        _refuse_hooks(module, trained)
    work = _Work(
        module=module,
        run=run,
        dim=dim,
        chunks=chunks,
        casts=casts_of(hidden),
        names=tuple(trained),
        versions=_versions(module) if torch.is_grad_enabled() else {},
        source=hidden.grad_fn if saves else None,
    )
    output: torch.Tensor = _Chunks.apply(work, hidden, *trained.values())  # type: ignore[no-untyped-call]
    return output


def _versions(module: nn.Module) -> dict[str, int]:
    """Returns how often each parameter has changed: by edits and updates of its engine, else as torch counts."""
    found = {}
    for name, parameter in module.named_parameters():
        handle = handle_of(parameter) or next((h for each in engines() if (h := each.handle(parameter))), None)
        found[name] = parameter._version if handle is None else handle.engine.updates(handle.unit)
    return found


def _refuse_changes(work: _Work) -> None:
    """Raises `UsageError` if weights have changed since the forward: the chunks would be computed from others."""
    for name, version in _versions(work.module).items():
        if version != work.versions[name]:
            raise UsageError(
                f"backward through a graph made before step(): the weights of {name} of the tiled "
                f"{type(work.module).__name__} have changed since"
            )


def _refuse_hooks(module: nn.Module, trained: Mapping[str, nn.Parameter]) -> None:
    """Raises `UsageError` for a parameter whose hooks would be called for each chunk, and then for the sum again."""
    for name, parameter in trained.items():
        if tensor_hooks_of(parameter):
            raise UsageError(
                f"parameter {name} of the tiled {type(module).__name__} has a hook of register_hook, which would be "
                "called for each chunk and for their sum; use register_post_accumulate_grad_hook, or do not tile "
                "this module"
            )


class _Input(torch.autograd.Function):
    """The identity, which saves the input before the chunks are computed, and not after.

    Recomputation by checkpointing ends with the last tensor that is saved. If that is the input of a layer's MLP, as in
    most decoders, the MLP's forward is not computed again in vain.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> torch.Tensor:
        return slope


class _Chunks(torch.autograd.Function):
    """The output of a module, computed chunk by chunk, whose graph holds the input alone."""

    @staticmethod
    def forward(ctx: Any, work: _Work, hidden: torch.Tensor, *trained: torch.Tensor) -> torch.Tensor:
        before = generators(hidden)
        output: torch.Tensor | None = None
        with _weights_held(work.module), autocast(work.casts):
            for chunk in work.chunks:
                part = work.run(hidden.narrow(work.dim, *chunk).contiguous())
                _refuse_shape(work, hidden, part, chunk[1])
                if output is None:
                    shape = list(part.shape)
                    shape[work.dim] = hidden.shape[work.dim]
                    output = part.new_empty(shape)
                output.narrow(work.dim, *chunk).copy_(part)
                del part  # otherwise it would be in memory beside the next chunk
        assert output is not None, "there are several chunks"
        # Most MLPs draw no number: their backward then leaves the generators alone.
        ctx.generators = None if equal(before, generators(hidden)) else before
        ctx.work = work
        if work.source is None:
            ctx.save_for_backward(hidden)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        work: _Work = ctx.work
        (hidden,) = (work.source or ctx).saved_tensors
        _refuse_changes(work)
        trained = [work.module.get_parameter(name) for name in work.names]
        slope_of_input = torch.zeros_like(hidden) if ctx.needs_input_grad[1] else None
        sums: list[torch.Tensor | None] = [None] * len(trained)
        with _weights_held(work.module), replayed(ctx.generators, hidden):
            for chunk in work.chunks:
                part = hidden.narrow(work.dim, *chunk).contiguous().detach().requires_grad_(ctx.needs_input_grad[1])
                with torch.enable_grad(), autocast(work.casts):
                    output = work.run(part)
                if not output.requires_grad:
                    continue
                if chunk is work.chunks[0]:
                    _refuse_others(work, output, [part, *trained])
                wanted = [part, *trained] if slope_of_input is not None else trained
                found: list[torch.Tensor | None] = []
                found += torch.autograd.grad(output, wanted, slope.narrow(work.dim, *chunk), allow_unused=True)
                if slope_of_input is not None and (of_input := found.pop(0)) is not None:
                    slope_of_input.narrow(work.dim, *chunk).copy_(of_input)
                    del of_input  # as in the forward
                _add(sums, found)
        rounded = [None if each is None else each.to(of.dtype) for each, of in zip(sums, trained, strict=True)]
        return None, slope_of_input, *rounded


def _refuse_shape(work: _Work, hidden: torch.Tensor, part: Any, positions: int) -> None:
    """Raises `UsageError` unless the module returned one tensor with as many positions as a chunk has."""
    tensor = isinstance(part, torch.Tensor)
    if not tensor or part.ndim != hidden.ndim or part.shape[work.dim] != positions:
        raise UsageError(
            f"{type(work.module).__name__} returned {list(part.shape) if tensor else type(part).__name__} for a chunk "
            f"of {positions} positions along dimension {work.dim}; a tiled module returns one tensor with as many "
            "dimensions and positions as its input"
        )


def _add(sums: list[torch.Tensor | None], found: list[torch.Tensor | None]) -> None:
    """Adds the gradients of a chunk, and empties `found`."""
    for index in reversed(range(len(found))):
        gradient, total = found.pop(), sums[index]
        if gradient is None:
            continue
        if total is None:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            # A copy also in fp32: what autograd gives may be memory of others, such as the gradient of the output.
            sums[index] = gradient.to(wide, copy=True, memory_format=torch.contiguous_format)
        else:
            total.add_(gradient)


def _refuse_others(work: _Work, output: torch.Tensor, known: Sequence[torch.Tensor]) -> None:
    """Raises `UsageError` if a chunk depends on a tensor that would receive no gradient from here."""
    mine, seen, nodes = {id(each) for each in known}, set[Any](), [output.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in mine:
            raise UsageError(
                f"the tiled {type(work.module).__name__} uses a tensor of shape {list(leaf.shape)} that is neither its "
                "input nor one of its parameters, and that would receive no gradient; register it as a parameter of "
                "the module, or do not tile this module"
            )
        nodes += [each for each, _ in node.next_functions]


@contextlib.contextmanager
def _weights_held(module: nn.Module) -> Iterator[None]:
    """Brings the paged weights of a module once for all that runs in the context, if they have room together."""
    handles = [handle for each in module.parameters() if (handle := handle_of(each)) is not None]
    if not handles:
        yield
        return
    with handles[0].engine.hold(list(dict.fromkeys(handle.unit for handle in handles))):
        yield
