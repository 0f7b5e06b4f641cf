"""Tables in pieces of rows: an embedding and a head need one piece of their weight on the device at a time.

A table is a parameter in parts (`engine/parts.py`). While a module runs, an embedding looks up the rows of its tokens,
and a linear layer multiplies by the table, piece by piece in their order. A lookup reads single rows of a piece, unless
the whole piece costs less (`row_reads` in `swapper/policy.py`). Any other use of the table gives all pieces joined. The
loss in chunks (`losses/chunked.py`) takes one piece after the other, also between steps.

    forward     rows of piece 0, or its part of the logits ─► piece 1 ─► …
    backward    the last piece ─► its gradient ─► the engine ─► the piece before ─► …

A gradient leaves as soon as it is made. So each use has a leaf of its own: with one leaf for both uses of a tied table,
autograd would keep the head's gradients on the device until those of the embedding arrive, at the end of the backward.
The engine adds the two, the head's first. A leaf has no memory, since a graph must not hold weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from offload.engine.params import ParamHandle, handle_of
from offload.engine.parts import PartsForm, composed_handle, parts_of
from offload.errors import UsageError
from offload.layout.flat_layout import UnitLayout

_T = TypeVar("_T")

# -- form ----------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """One piece of a table, in one use."""

    handle: ParamHandle
    rows: range
    """The piece's rows of the table."""
    trains: bool
    """True if a backward may follow that makes a gradient of the piece."""
    runs: bool
    """True if a module or a backward runs, which has the weights on the device; False between steps."""
    updates: int
    """Number of times that the weights have changed."""

    def leaf(self) -> torch.Tensor | None:
        """Returns a new leaf of autograd, whose gradient is the piece's; None if no gradient of the piece is made.

        The leaf's values have no meaning, and no memory.
        """
        if not self.trains:
            return None
        piece = self.handle
        leaf = torch.empty((), dtype=piece.dtype, device=piece.device).expand(piece.shape).requires_grad_()
        assert piece.take_gradient is not None, "a piece that trains has a hook"
        leaf.register_post_accumulate_grad_hook(piece.take_gradient)
        return leaf

    def on_device(self, compute: Callable[[torch.Tensor], _T]) -> _T:
        """Returns the result of `compute` for the weights, outside of autograd. They are on the device meanwhile.

        Between steps `compute` receives a copy. It must not save the copy for a backward, but call `again` there.
        """
        if not self.runs:
            return compute(self.handle.read())
        views, unit = self.handle.engine.unit_views, self.handle.unit
        views.use(unit)
        try:
            return compute(self.handle.parameter.detach())
        finally:
            views.release_unit(unit)

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row."""
        return self.handle.shape[1] * self.handle.dtype.itemsize

    def look_up(self, rows: torch.Tensor, reads: Sequence[range]) -> torch.Tensor:
        """Returns `rows` of the piece, (n,) on the host, as (n, features) on the device; see `Pager.look_up`."""
        values = self.handle.engine.pager.look_up(self.handle.unit, rows, self.row_nbytes, reads)
        return values.to(self.handle.device).view(self.handle.dtype)

    def again(self, compute: Callable[[torch.Tensor], _T]) -> _T:
        """Returns the result of `compute` for the weights of a use between steps, in its backward."""
        engine = self.handle.engine
        if engine.updates(self.handle.unit) != self.updates:
            raise UsageError(
                f"backward through a graph made before step(): the weights of {self.handle.name} have changed since"
            )
        engine.hooks.runs_now()  # the backward begins at the latest now
        return self._replace(runs=True).on_device(compute)


class TablePieces(PartsForm):
    """The form of a table: each piece of its rows is a parameter of its own, in a unit of its own."""

    parts_words, key = "pieces", "vocabulary"

    def join(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(values))

    def divide(self, values: torch.Tensor) -> Iterable[torch.Tensor]:
        sizes: Any = [part.shape[0] for part in self._parts]
        return tuple(values.split(sizes))

    def call(self, handle: ParamHandle, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns the result of a lookup or a product, made piece by piece; None for another call, or between steps."""
        make = self._embedding if func is F.embedding else self._linear
        if not args:
            return make(handle, kwargs["input"], **{name: value for name, value in kwargs.items() if name != "input"})
        return make(handle, *args, **kwargs)

    def pieces(self, handle: ParamHandle) -> tuple[Piece, ...]:
        """Returns the pieces for one use, in order."""
        engine, start, pieces = handle.engine, 0, []
        runs, trains = engine.hooks.runs_now(), self.follow(handle) and torch.is_grad_enabled()
        for part in self._parts:
            rows = range(start, start + part.shape[0])
            pieces.append(Piece(part, rows, trains, runs, engine.updates(part.unit)))
            start = rows.stop
        return tuple(pieces)

    def _embedding(
        self,
        handle: ParamHandle,
        ids: Any,
        weight: Any,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> torch.Tensor | None:
        if weight is not handle.parameter or max_norm is not None or sparse or handle_of(ids) is not None:
            return None
        if not handle.engine.hooks.runs_now():
            return None
        if padding_idx is not None and padding_idx < 0:
            padding_idx += handle.shape[0]
        return _looked_up(self.pieces(handle), ids, padding_idx, scale_grad_by_freq)

    def _linear(self, handle: ParamHandle, hidden: Any, weight: Any, bias: Any = None) -> torch.Tensor | None:
        if weight is not handle.parameter or handle_of(hidden) is not None:
            return None
        if hidden.numel() == 0:  # the head of a loss in chunks, which computes the logits of no token
            return torch.empty((*hidden.shape[:-1], handle.shape[0]), dtype=hidden.dtype, device=hidden.device)
        return _product(self.pieces(handle), hidden, bias) if handle.engine.hooks.runs_now() else None


def pieces_in(parameter: Any) -> tuple[Piece, ...]:
    """Returns the pieces of a table for one use, in order; none for another parameter."""
    handle = handle_of(parameter)
    if handle is None or parameter is not handle.parameter or not isinstance(handle.form, TablePieces):
        return ()
    return handle.form.pieces(handle)


def table_handles(
    model: nn.Module,
    layouts: Sequence[UnitLayout],
    handles: Sequence[Sequence[ParamHandle]],
    tables: Mapping[str, range],
) -> list[ParamHandle]:
    """Returns a handle for each table in pieces, and makes it a placeholder. `tables` contains the units of each."""
    pieces = {name: parts for name, parts in parts_of(layouts, handles).items() if name in tables}
    return [
        composed_handle(model, name, TablePieces(parts), (sum(part.shape[0] for part in parts), *parts[0].shape[1:]))
        for name, parts in pieces.items()
    ]


# -- lookup --------------------------------------------------------------------------------------------


class _Lookup(torch.autograd.Function):
    """Rows of one piece of shape `shape`, which have been looked up.

    `visited` are their numbers in the piece, ascending, and each row of `ids` is an index into these. The gradient is
    sparse: where the head's waits on a drive, only pages with these rows are written again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        leaf: torch.Tensor | None,
        ids: torch.Tensor,
        visited: torch.Tensor,
        padding: int,
        by_frequency: bool,
        shape: tuple[int, ...],
        rows: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(ids, visited)
        ctx.settings, ctx.shape = (len(visited), padding, by_frequency), shape
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ids, visited = ctx.saved_tensors
        if len(ids):
            # A row receives the gradients of the same tokens, in the same order, as in a whole table.
            gradient = torch.ops.aten.embedding_dense_backward(gradient, ids, *ctx.settings)
        of_piece = torch.sparse_coo_tensor(
            visited[None], gradient, ctx.shape, is_coalesced=True, check_invariants=False
        )
        return of_piece, *(None,) * 6


def _looked_up(pieces: Sequence[Piece], ids: torch.Tensor, padding_idx: int | None, by_frequency: bool) -> torch.Tensor:
    """Returns the rows of a table that `ids` name, (..., features). Bytes move only of pieces with a token.

    In torch a table has one gradient, which is zero in rows without a token: their moments fade, and their weights move
    by momentum and decay. So each piece has a part in the graph, and receives zeros if no token visits it.
    """
    # The host decides what is read, so it needs the tokens.
    flat, words, features = ids.reshape(-1).long().cpu(), pieces[-1].rows.stop, pieces[0].handle.shape[1]
    if flat.numel() and not (0 <= int(flat.min()) and int(flat.max()) < words):
        raise IndexError(f"index out of range in self: {int(flat.min())} to {int(flat.max())} of {words} rows")
    # All pieces but the last have the same number of rows. Tokens keep their order within a piece.
    piece_of = flat.div(len(pieces[0].rows), rounding_mode="floor")
    order = piece_of.argsort(stable=True)
    chosen = flat[order].split(piece_of.bincount(minlength=len(pieces)).tolist())
    rows = []
    for piece, local, reads in zip(pieces, *_lookups(pieces, chosen), strict=True):
        visited, numbers = local.unique(return_inverse=True)
        padded = [] if padding_idx is None else (visited == padding_idx - piece.rows.start).nonzero().flatten().tolist()
        if not len(local):
            values = torch.empty((0, features), dtype=piece.handle.dtype, device=ids.device)
        elif reads is None:
            values = piece.on_device(partial(F.embedding, local.to(ids.device)))
        else:
            values = piece.look_up(local, reads)
        look_up: Any = _Lookup.apply
        numbers, visited = numbers.to(ids.device), visited.to(ids.device)
        padding = padded[0] if padded else -1
        rows.append(look_up(piece.leaf(), numbers, visited, padding, by_frequency, piece.handle.shape, values))
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device="cpu")
    return torch.cat(rows).index_select(0, place.to(ids.device)).view(*ids.shape, features)


def _lookups(
    pieces: Sequence[Piece], chosen: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[tuple[range, ...] | None]]:
    """Returns the rows to look up within each piece, and the reads for them; None for a piece that is fetched.

    `chosen` are the rows of the table.
    """
    pager = pieces[0].handle.engine.pager
    rows = [of_table - piece.rows.start for piece, of_table in zip(pieces, chosen, strict=True)]
    reads = [
        pager.row_reads(piece.handle.unit, local.unique().tolist(), piece.row_nbytes) if len(local) else ()
        for piece, local in zip(pieces, rows, strict=True)
    ]
    fetched = [piece.handle.unit for piece, of_piece in zip(pieces, reads, strict=True) if of_piece is None]
    pager.expect(fetched, [piece.handle.unit for piece in pieces])
    return rows, reads


# -- product -------------------------------------------------------------------------------------------


class _Product(torch.autograd.Function):
    """Logits of the words of one piece. The gradient of the hidden states goes to `wide`, in fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        wide: torch.Tensor,
        leaf: torch.Tensor | None,
        bias: torch.Tensor | None,
        hidden: torch.Tensor,
        weight: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.linear(hidden, weight, bias)  # autocast applies here, and not in the backward

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        of_hidden = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_hidden = (gradient @ weight.to(gradient.dtype)).float()
        flat = gradient.reshape(-1, gradient.shape[-1])
        if ctx.needs_input_grad[1]:
            of_weight = (flat.t() @ hidden.reshape(-1, hidden.shape[-1]).to(flat.dtype)).to(weight.dtype)
            of_weight += 0.0  # -0 becomes 0, as where the zeros of a lookup are added to it
        if ctx.needs_input_grad[2]:
            of_bias = flat.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return of_hidden, of_weight, of_bias, None, None


def _product(pieces: Sequence[Piece], hidden: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    # Gradients of the hidden states, one from each piece, are summed in fp32 and rounded once.
    wide, values = hidden.float(), hidden.detach()
    logits = []
    for piece in pieces:
        own_bias = None if bias is None else bias[piece.rows.start : piece.rows.stop]
        logits.append(piece.on_device(partial(_Product.apply, wide, piece.leaf(), own_bias, values)))
    return torch.cat(logits, dim=-1)
