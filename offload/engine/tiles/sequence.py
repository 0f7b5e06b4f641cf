"""A module that runs over chunks of the sequence, so that the tensors inside of it exist for one chunk at a time.

An MLP makes several tensors of (tokens, intermediate size), and autograd saves them all. A tiled module saves its input
alone. Its backward computes each chunk again and differentiates it before the next one:

    bytes = what the module saves and makes for one chunk
          + tokens * features * size             output, and in the backward the gradient of the input
          + trained elements * (size + wide)     in the backward: gradients of one chunk, and their sums

with `size` the bytes of an element, and `wide` 4 in 16 bits, else `size`: sums over chunks are those of fp32, rounded
to the dtype of the parameter once. Autograd receives one gradient for each parameter, as from the whole module.

[Note: bits] A chunk has the same sums over features as the whole, and kernels of products may order them otherwise for
another number of rows. The gradient of a weight, a sum over tokens, is one over the tokens of each chunk, rounded to
its dtype, and a sum of those in fp32 or wider, rounded once more. So with u the rounding error of the dtype, and c
chunks with sums s_1 ... s_c of absolute terms, tiling adds u (s_1 + ... + s_c) + u |gradient|, and c roundings of fp32.

The class of a tiled module is a subclass of its own class, with its name, as torch's parametrizations and
`fully_shard` do it: the module, its hooks, its children and the keys of its state dict stay as they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from offload.engine.param_access import engines
from offload.engine.params.paged_parameter import handle_of
from offload.engine.tiles.forward_state import Casts, autocast, casts_of, equal, generators, replayed
from offload.errors import UsageError
from offload.torch_internals import outside_of_compiled_code, tensor_hooks_of

AUTO_TOKENS = 1024
"""Least tokens of an automatic chunk: fewer rows would leave the matrix units of a GPU idle."""

_TILING = "_offload_tiling"
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

_Module = TypeVar("_Module", bound=nn.Module)
_Chunk = tuple[int, int]
"""First position and length of a chunk."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tiling:
    """How a module is tiled."""

    dim: int
    chunks: int | Literal["auto"]
    length: int | None

    def chunks_of(self, shape: Sequence[int]) -> list[_Chunk]:
        """Returns the chunks of an input of this shape; one for an input that is computed whole."""
        positions = shape[self.dim]
        if self.length is not None:
            length = self.length
        elif self.chunks == "auto":
            # As many tokens as there are features: the tensors of a chunk then are as large as a few weights.
            rows = functools.reduce(lambda product, size: product * size, shape[:-1], 1) // max(positions, 1)
            length = max(shape[-1], AUTO_TOKENS) // max(rows, 1)
        else:
            length = -(-positions // self.chunks)
        length = max(length, 1)
        return [(start, min(length, positions - start)) for start in range(0, positions, length)] or [(0, 0)]


class _Tiled:
    """The first base of the class of each tiled module."""

    _in_chunks: Any
    """The function `_in_chunks`, as compiled code may call it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the module's own forward returns for its whole input."""
        forward: Callable[..., Any] = super().forward  # type: ignore[misc]
        assert isinstance(self, nn.Module)
        hidden, run = _only_tensor(self, args, kwargs, forward)
        tiling: _Tiling = self.__dict__[_TILING]
        if not -hidden.ndim <= tiling.dim < hidden.ndim:
            raise UsageError(
                f"{type(self).__name__} is tiled along dimension {tiling.dim}, and its input has the shape "
                f"{list(hidden.shape)}; give offload.tiled the dimension of the sequence"
            )
        chunks = tiling.chunks_of(hidden.shape)
        if len(chunks) == 1:
            return run(hidden)
        output: torch.Tensor = self._in_chunks(self, run, hidden, tiling.dim, chunks)
        return output

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the module by its own class, since this one has no name by which it could be found."""
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, *state = reduced
        return (_made_again, (make, type(self).__mro__[2], *arguments[1:]), *state)


def tiled(
    module: _Module, dim: int = 1, chunks: int | Literal["auto"] = "auto", *, chunk_length: int | None = None
) -> _Module:
    """Makes a module compute its output chunk by chunk along a dimension of its input, and returns the module.

    The module has to take one tensor and to return one, and to compute each position along `dim` by itself, as the MLP
    of a decoder does. Parameters that are paged are brought once for all chunks. Its backward computes each chunk
    again: memory for one chunk, for the time of another forward. An input of one chunk is computed whole, without that.

    Call it before or after `offload.initialize`, or without an engine. Names, hooks and keys of the state dict stay.

    Args:
        module: the module, which is changed and returned. Called again, it is tiled by the new numbers.
        dim: the dimension along which positions are independent: 1 for (batch, sequence, features).
        chunks: number of chunks, or "auto": chunks of as many tokens as an input has features, but at least 1024.
        chunk_length: positions of a chunk, in place of a number of chunks.

    Raises:
        UsageError: if `chunks` or `chunk_length` is no positive whole number, if both are given, or if the module
            normalizes over a batch.
    """
    for name, value in (("chunks", None if chunks == "auto" else chunks), ("chunk_length", chunk_length)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UsageError(f"{name} of offload.tiled is a whole number of at least 1, not {value!r}")
    if chunks != "auto" and chunk_length is not None:
        raise UsageError("offload.tiled takes chunks or chunk_length, not both")
    mixes = [name for name, each in module.named_modules() if isinstance(each, _BATCH_NORMS)]
    if mixes:
        raise UsageError(
            f"{mixes[0] or type(module).__name__} normalizes over all positions, so {type(module).__name__} cannot be "
            "computed in chunks of them"
        )
    module.__dict__[_TILING] = _Tiling(dim=dim, chunks=chunks, length=chunk_length)
    if not is_tiled(module):
        kind: Any = type(module)
        module.__class__ = _tiled_class(kind)
    return module


def untiled(module: _Module) -> _Module:
    """Makes a module of `tiled` compute whole inputs again, and returns it.

    Args:
        module: the module; one that is not tiled is left alone.
    """
    if is_tiled(module):
        module.__class__ = type(module).__mro__[2]
        del module.__dict__[_TILING]
    return module


def is_tiled(module: nn.Module) -> bool:
    """Returns True if `tiled` has changed the module."""
    return isinstance(module, _Tiled)


@functools.cache
def _tiled_class(kind: Any) -> type[Any]:
    """Returns the subclass of a module's class that runs in chunks. Has its name, by which units may be chosen."""
    attributes = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        # Made here and not at import, which would import torch's compiler.
        "_in_chunks": staticmethod(outside_of_compiled_code(_in_chunks)),
    }
    return type(kind.__name__, (_Tiled, kind), attributes)


def _made_again(make: Callable[..., Any], kind: Any, *arguments: Any) -> Any:
    """Returns a module of the tiled class, without its attributes, for `pickle` and `copy`."""
    return make(_tiled_class(kind), *arguments)


def _only_tensor(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], whole: Callable[..., Any]
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """Returns the single argument of a call, and the module's own forward as a function of that argument."""
    given = (*args, *kwargs.values())
    if len(given) != 1 or not isinstance(given[0], torch.Tensor):
        kinds = ", ".join(type(each).__name__ for each in given) or "nothing"
        raise UsageError(
            f"a tiled module takes one tensor, and {type(module).__name__} was called with {kinds}; tile a module "
            "whose forward takes the hidden states alone"
        )
    name = next(iter(kwargs), None)
    return given[0], whole if name is None else lambda hidden: whole(**{name: hidden})


# -- the computation ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Work:
    """One call of a tiled module."""

    module: nn.Module
    run: Callable[[torch.Tensor], Any]
    """The module's own forward."""
    dim: int
    chunks: list[_Chunk]
    casts: Casts
    names: tuple[str, ...]
    """Names of the parameters that train, in the order in which the function receives them."""
    versions: dict[str, int]
    """For each parameter how often it had changed; see `_versions`."""


def _in_chunks(
    module: nn.Module, run: Callable[[torch.Tensor], Any], hidden: torch.Tensor, dim: int, chunks: list[_Chunk]
) -> torch.Tensor:
    """Returns the output of a module for several chunks."""
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
        ctx.save_for_backward(hidden)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        work: _Work = ctx.work
        (hidden,) = ctx.saved_tensors
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
                del output, part
                if slope_of_input is not None and (of_input := found.pop(0)) is not None:
                    slope_of_input.narrow(work.dim, *chunk).copy_(of_input)
                    del of_input
                _add(sums, found)
        for index, parameter in enumerate(trained):
            each, sums[index] = sums[index], None  # its memory is free before the next one is rounded
            sums[index] = None if each is None else each.to(parameter.dtype)
        return None, slope_of_input, *sums


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
