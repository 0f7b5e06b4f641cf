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

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from offload.engine.tiles.chunked_forward import Chunk, in_chunks
from offload.errors import UsageError
from offload.torch_internals import outside_of_compiled_code

AUTO_TOKENS = 1024
"""Least tokens of an automatic chunk: fewer rows would leave the matrix units of a GPU idle."""

_TILING = "_offload_tiling"
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

_Module = TypeVar("_Module", bound=nn.Module)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tiling:
    """How a module is tiled."""

    dim: int
    chunks: int | Literal["auto"]
    length: int | None

    def chunks_of(self, shape: Sequence[int]) -> list[Chunk]:
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
    """The function `in_chunks`, as compiled code may call it."""

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
    again: memory for one chunk, for the time of another forward. An input of one chunk is computed whole, and once.
    At the end of a layer that is checkpointed it takes no more time: recomputation of the layer ends before the module.

    Call it before or after `offload.initialize`, or without an engine. Names, hooks and keys of the state dict stay.

    Args:
        module: the module, which is changed and returned. Called again, it is tiled by the new numbers.
        dim: the dimension along which positions are independent: 1 for (batch, sequence, features).
        chunks: number of chunks, or "auto": chunks of as many tokens as an input has features, but at least 1024.
        chunk_length: positions of a chunk, in place of a number of chunks.

    Raises:
        UsageError: if `chunks` or `chunk_length` is no positive whole number, if both are given, if the module
            normalizes over a batch, or if its forward was replaced in the object.
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
    if has_own_forward(module):
        raise UsageError(
            f"the forward of this {type(module).__name__} was replaced in the object, as torch.compile and hooks of "
            "Accelerate do it, so it cannot be tiled; tile the module before that, or its original"
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


def has_own_forward(module: nn.Module) -> bool:
    """Returns True if an attribute of the object hides the forward of its class."""
    return "forward" in module.__dict__


@functools.cache
def _tiled_class(kind: Any) -> type[Any]:
    """Returns the subclass of a module's class that runs in chunks. Has its name, by which units may be chosen."""
    attributes = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        # Made here and not at import, which would import torch's compiler.
        "_in_chunks": staticmethod(outside_of_compiled_code(in_chunks)),
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
