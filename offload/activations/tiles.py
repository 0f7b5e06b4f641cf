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

The class of a tiled module becomes a subclass of the class before, with its name, as torch's parametrizations and
`fully_shard` do it: the module, its hooks, its children and the keys of its state dict stay as they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

from offload.engine.access import engines
from offload.engine.callbacks import Extension
from offload.engine.params import handle_of
from offload.errors import ConfigError, UsageError
from offload.notices import Remark
from offload.provenance import is_class_of, is_of, mixture_of_tokens
from offload.torch_internals import outside_of_compiled_code, tensor_hooks_of

# -- forward state -------------------------------------------------------------------------------------
#
# The state of autocast and of the random generators in a forward, for a second computation of the same numbers.


Casts = tuple[tuple[str, bool, torch.dtype], ...]
"""State of autocast: for each type of device whether it is on, and its dtype."""

Generators = tuple[torch.Tensor, list[int], list[torch.Tensor]]
"""State of the CPU's generator; devices of a tensor, by index; states of their generators."""


def casts_of(hidden: torch.Tensor) -> Casts:
    """Returns the present state of autocast, for the device of a tensor and for the CPU."""
    kinds = [kind for kind in dict.fromkeys((hidden.device.type, "cpu")) if torch.amp.is_autocast_available(kind)]
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


@contextlib.contextmanager
def autocast(casts: Casts) -> Iterator[None]:
    """Sets a state of autocast, without its cache.

    A cast that is made without a graph would stay in the cache, and a later use that needs its gradient would find it.
    """
    with contextlib.ExitStack() as stack:
        for kind, enabled, dtype in casts:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
        yield


def generators(hidden: torch.Tensor) -> Generators:
    """Returns the states of the generators that a module may draw from when it computes with a tensor."""
    devices, states = get_device_states(hidden)
    return torch.get_rng_state(), list(devices), list(states)


def equal(before: Generators, after: Generators) -> bool:
    """Returns True if no number was drawn between two states of the same generators."""
    pairs = zip((before[0], *before[2]), (after[0], *after[2]), strict=True)
    return all(torch.equal(one, later) for one, later in pairs)


@contextlib.contextmanager
def replayed(states: Generators | None, hidden: torch.Tensor) -> Iterator[None]:
    """Gives the generators `states`, and restores the present ones afterwards. Does nothing without states."""
    if states is None:
        yield
        return
    cpu, devices, device_states = states
    kind = hidden.device.type
    with torch.random.fork_rng(devices, device_type=kind if devices else "cuda"):
        torch.set_rng_state(cpu)
        if devices:
            set_device_states(devices, device_states, device_type=kind)
        yield


# -- chunked forward -----------------------------------------------------------------------------------
#
# The forward and the backward of a module over chunks of its input: a function of autograd that saves the input alone.
#
# The backward computes each chunk again, with the forward's autocast and random numbers, and adds up the gradients of
# the chunks. It refuses modules whose gradients would be wrong: [Note: refused].
#
# [Note: refused] Hooks of `register_hook` would be called for each chunk. A tensor of others that the module uses would
# receive no gradient. Weights that have changed since the forward would give the chunks of another computation; torch
# and the engine notice it for tensors that are saved, and here no weight is saved.


Chunk = tuple[int, int]
"""First position and length of a chunk."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TiledCall:
    module: nn.Module
    run: Callable[[torch.Tensor], Any]
    """The module's own forward."""
    dim: int
    chunks: list[Chunk]
    casts: Casts
    names: tuple[str, ...]
    """Names of the parameters that train, in the order of the function's arguments."""
    versions: dict[str, int]
    """For each parameter how often it had changed; see `_versions`."""
    source: Any
    """The node of `_Input` that holds the input; None if the input needs no gradient."""


def in_chunks(
    module: nn.Module, run: Callable[[torch.Tensor], Any], hidden: torch.Tensor, dim: int, chunks: list[Chunk]
) -> torch.Tensor:
    """Returns the output of a module, computed chunk by chunk. Its parameters that train receive gradients.

    `run` is the forward of its class before `tiled`; `chunks` are together all positions of the input along `dim`.
    Raises `UsageError` if a parameter has a hook that would be called too often, or if the output has another form.
    """
    saves = torch.is_grad_enabled() and hidden.requires_grad
    if saves:
        hidden = _Input.apply(hidden)  # type: ignore[no-untyped-call]
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name, parameter in trained.items() if torch.is_grad_enabled() else ():
        if tensor_hooks_of(parameter):
            raise UsageError(
                f"parameter {name} of the tiled {type(module).__name__} has a hook of register_hook, which would be "
                "called for each chunk and for their sum; use register_post_accumulate_grad_hook, or do not tile "
                "this module"
            )
    work = _TiledCall(
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
    versions = {}
    for name, parameter in module.named_parameters():
        handle = handle_of(parameter) or next((h for engine in engines() if (h := engine.handle(parameter))), None)
        versions[name] = parameter._version if handle is None else handle.engine.updates(handle.unit)
    return versions


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
    def forward(ctx: Any, work: _TiledCall, hidden: torch.Tensor, *trained: torch.Tensor) -> torch.Tensor:
        before = generators(hidden)
        output: torch.Tensor | None = None
        with _with_weights(work.module), autocast(work.casts):
            for chunk in work.chunks:
                part = work.run(hidden.narrow(work.dim, *chunk).contiguous())
                _refuse_shape(work, hidden, part, chunk[1])
                if output is None:
                    shape = list(part.shape)
                    shape[work.dim] = hidden.shape[work.dim]
                    output = part.new_empty(shape)
                output.narrow(work.dim, *chunk).copy_(part)
                del part  # otherwise it would be in memory together with the next chunk
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
        work: _TiledCall = ctx.work
        (hidden,) = (work.source or ctx).saved_tensors
        for name, version in _versions(work.module).items():
            if version != work.versions[name]:  # the chunks would be computed from other weights
                raise UsageError(
                    f"backward through a graph made before step(): the weights of {name} of the tiled "
                    f"{type(work.module).__name__} have changed since"
                )
        trained = [work.module.get_parameter(name) for name in work.names]
        slope_of_input = torch.zeros_like(hidden) if ctx.needs_input_grad[1] else None
        sums: list[torch.Tensor | None] = [None] * len(trained)
        with _with_weights(work.module), replayed(ctx.generators, hidden):
            for chunk in work.chunks:
                part = hidden.narrow(work.dim, *chunk).contiguous().detach().requires_grad_(ctx.needs_input_grad[1])
                with torch.enable_grad(), autocast(work.casts):
                    output = work.run(part)
                if not output.requires_grad:
                    continue
                if chunk is work.chunks[0]:
                    _refuse_others(work, output, [part, *trained])
                wanted = [part, *trained] if slope_of_input is not None else trained
                gradients: list[torch.Tensor | None] = []
                gradients += torch.autograd.grad(output, wanted, slope.narrow(work.dim, *chunk), allow_unused=True)
                if slope_of_input is not None and (of_input := gradients.pop(0)) is not None:
                    slope_of_input.narrow(work.dim, *chunk).copy_(of_input)
                    del of_input  # as in the forward
                _add(sums, gradients)
        rounded = [None if total is None else total.to(of.dtype) for total, of in zip(sums, trained, strict=True)]
        return None, slope_of_input, *rounded


def _refuse_shape(work: _TiledCall, hidden: torch.Tensor, part: Any, positions: int) -> None:
    """Raises `UsageError` unless the module returned one tensor with as many positions as a chunk has."""
    tensor = isinstance(part, torch.Tensor)
    if not tensor or part.ndim != hidden.ndim or part.shape[work.dim] != positions:
        raise UsageError(
            f"{type(work.module).__name__} returned {list(part.shape) if tensor else type(part).__name__} for a chunk "
            f"of {positions} positions along dimension {work.dim}; a tiled module returns one tensor with as many "
            "dimensions and positions as its input"
        )


def _add(sums: list[torch.Tensor | None], gradients: list[torch.Tensor | None]) -> None:
    """Adds the gradients of a chunk, and empties `gradients`."""
    for index in reversed(range(len(gradients))):
        gradient, total = gradients.pop(), sums[index]
        if gradient is None:
            continue
        if total is None:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            # A copy also in fp32: what autograd gives may be memory of others, such as the gradient of the output.
            sums[index] = gradient.to(wide, copy=True, memory_format=torch.contiguous_format)
        else:
            total.add_(gradient)


def _refuse_others(work: _TiledCall, output: torch.Tensor, known: Sequence[torch.Tensor]) -> None:
    """Raises `UsageError` if a chunk depends on a tensor that would receive no gradient from here."""
    known_ids, seen, nodes = {id(tensor) for tensor in known}, set[Any](), [output.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known_ids:
            raise UsageError(
                f"the tiled {type(work.module).__name__} uses a tensor of shape {list(leaf.shape)} that is neither its "
                "input nor one of its parameters, and that would receive no gradient; register it as a parameter of "
                "the module, or do not tile this module"
            )
        nodes += [child for child, _ in node.next_functions]


@contextlib.contextmanager
def _with_weights(module: nn.Module) -> Iterator[None]:
    """Fetches the paged weights of a module once for the whole context, if they have room together."""
    handles = [handle for parameter in module.parameters() if (handle := handle_of(parameter)) is not None]
    if not handles:
        yield
        return
    with handles[0].engine.hold(list(dict.fromkeys(handle.unit for handle in handles))):
        yield


# -- sequence ------------------------------------------------------------------------------------------


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
        """Pickles the module by its own class, since pickle cannot find this one by name."""
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, *state = reduced
        return (_made_again, (make, type(self).__mro__[2], *arguments[1:]), *state)


def tiled(
    module: _Module, dim: int = 1, chunks: int | Literal["auto"] = "auto", *, chunk_length: int | None = None
) -> _Module:
    """Makes a module compute its output chunk by chunk along a dimension of its input, and returns the module.

    The module has to take and to return one tensor, and must compute each position along `dim` by itself, as the MLP of
    a decoder does. Paged parameters are fetched once for all chunks. The backward of the module computes each chunk
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
    mixes = [name for name, part in module.named_modules() if isinstance(part, _BATCH_NORMS)]
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
    """Returns the subclass of a module's class that runs in chunks. It keeps the name: units may be chosen by it."""
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
    arguments = (*args, *kwargs.values())
    if len(arguments) != 1 or not isinstance(arguments[0], torch.Tensor):
        kinds = ", ".join(type(argument).__name__ for argument in arguments) or "nothing"
        raise UsageError(
            f"a tiled module takes one tensor, and {type(module).__name__} was called with {kinds}; tile a module "
            "whose forward takes the hidden states alone"
        )
    name = next(iter(kwargs), None)
    return arguments[0], whole if name is None else lambda hidden: whole(**{name: hidden})


# -- known mlps ----------------------------------------------------------------------------------------
#
# The MLPs of decoders of transformers, which `"tile_mlp"` in the block "offload" tiles.
#
# An MLP is known by its place and its parts, not by its family: a module named as an MLP in a layer of a
# `ModuleList`, with linear layers of known names and without experts, whose forward takes the hidden states alone. A
# structure does not show that each token is computed by itself, so only classes of transformers with their own forward
# are known, by identity, and all inside of them must be known as well: a hook there, or a layer of the user's, may mix
# tokens, and would be called for each chunk.


_NAMES = ("mlp", "feed_forward", "ffn")
_FORMS = (
    {"gate_proj", "up_proj", "down_proj"},
    {"gate_up_proj", "down_proj"},
    {"up_proj", "down_proj"},
    {"dense_h_to_4h", "dense_4h_to_h"},
    {"c_fc", "c_proj"},
    {"fc1", "fc2"},
    {"fc_in", "fc_out"},
    {"w1", "w2", "w3"},
)
"""Names of the linear layers of an MLP, form by form."""

TILE_DIM = -2
"""The dimension of tokens: of (batch, sequence, features), and of packed (tokens, features)."""


def known_mlps(model: nn.Module) -> tuple[str, ...]:
    """Returns the names of the MLPs of a decoder, without those that the user has tiled."""
    return tuple(name for name, module in _candidates(model) if _has_form(module) and _change(module) is None)


def _candidates(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the modules that are named as an MLP in a layer of a decoder."""
    modules = dict(model.named_modules())
    layers = [
        f"{name}.{child}" if name else child
        for name, module in modules.items()
        if isinstance(module, nn.ModuleList)
        for child, _ in module.named_children()
    ]
    names = [f"{layer}.{name}" for layer in layers for name in _NAMES]
    return [(name, modules[name]) for name in names if name in modules]


def _has_form(module: nn.Module) -> bool:
    """Returns True if a module is of a class of transformers that has the form of an MLP, and was not tiled."""
    if is_tiled(module) or has_own_forward(module) or not is_class_of(type(module), "transformers"):
        return False
    # Modules with a matrix, such as `nn.Linear`, `Conv1D` of transformers, or an adapter of peft.
    weights = {name: getattr(child, "weight", None) for name, child in module.named_children()}
    linears = {name for name, weight in weights.items() if isinstance(weight, torch.Tensor) and weight.ndim == 2}
    others = (child for name, child in module.named_children() if name not in linears)
    # Other parameters may be those of norms.
    if linears not in _FORMS or any(parameter.ndim != 1 for child in others for parameter in child.parameters()):
        return False
    # Its forward takes the hidden states alone.
    _, *arguments = inspect.signature(type(module).forward).parameters.values()
    return len(arguments) == 1 and arguments[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def _change(module: nn.Module) -> str | None:
    """Returns as a clause which part of an MLP may mix tokens; None if no part does."""
    if not is_of(type(module).forward, "transformers"):
        return f"the forward of {type(module).__name__} was replaced"
    return mixture_of_tokens(module)


def choose(model: nn.Module, tile_mlp: Literal["auto"] | int) -> tuple[str, ...]:
    """Returns the names of the modules that `"tile_mlp"` asks to tile: none for `False`.

    Raises `ConfigError` if a number of chunks is given, and the model has no MLP that is known.
    """
    if tile_mlp is False:
        return ()
    names = known_mlps(model)
    if not names and tile_mlp != "auto":
        raise ConfigError(
            f'"tile_mlp" of the "offload" block is {tile_mlp}, and {type(model).__name__} has no MLP of a decoder of '
            f"transformers that is not tiled already{_why_whole(model)}; call offload.tiled(module) for its MLPs, or "
            'leave "tile_mlp" out'
        )
    return names


def _why_whole(model: nn.Module) -> str:
    """Returns words on the first MLP that is not tiled since something in it was changed; "" if there is none."""
    changed = ((name, _change(module)) for name, module in _candidates(model) if _has_form(module))
    return next((f" ({name} stays whole: {change})" for name, change in changed if change is not None), "")


def notices(model: nn.Module, names: Sequence[str], tile_mlp: Literal["auto"] | int) -> tuple[str, ...]:
    """Returns the line about tiled MLPs for the start of a run; none if nothing was asked for."""
    if tile_mlp is False:
        return ()
    whole = _why_whole(model)
    if not names:
        return (
            f'"tile_mlp": "auto" found no MLP of a decoder of transformers{whole}; offload.tiled(module) tiles others',
        )
    how = "as many tokens as features" if tile_mlp == "auto" else f"{tile_mlp} chunks"
    line = f"{len(names)} MLPs are computed in tiles of {how}, from {names[0]} on{whole}"
    return (line if whole else Remark(line),)


class TiledMlps(Extension):
    """The MLPs of a model that the config tiles."""

    def __init__(self, model: nn.Module, names: Sequence[str], tile_mlp: Literal["auto"] | int) -> None:
        """Tiles the named modules."""
        self._modules: list[Any] = [model.get_submodule(name) for name in names]
        for module in self._modules:
            tiled(module, TILE_DIM, tile_mlp)

    def remove(self) -> None:
        while self._modules:
            untiled(self._modules.pop())
