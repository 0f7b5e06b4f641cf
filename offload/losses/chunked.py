"""The loss of a causal language model, without its logits.

The fp32 logits of one token take 512 KiB with 128 thousand words, and cross entropy holds them two or three times. For
long sequences that is more than the rest of the model. `causal_lm` computes the logits of a chunk of tokens, then the
loss and the gradients of the chunk, and reuses the chunk's memory for the next one. The forward computes the gradients
of the hidden states and of the head and saves them for the backward, so the head's weights are fetched once.

    bytes = chunk_tokens * words * (4 + s)     one chunk: logits in fp32, and in the model's dtype
          + tokens * features * size           gradient of the hidden states
          + words * features * (4 + s)         gradient of the head, summed in fp32, and one chunk's gradient

`size` is the bytes of an element of the model's dtype; s equals `size`, but is 0 in fp32. If one chunk contains all
tokens, its gradient of the head needs no fp32 sum. A softcap takes another chunk_tokens * words * 4.
The backward scales the gradients after the chunk's memory was freed: in place, or into new memory if the model's dtype
is another one or the graph is retained.

Gradients are stored before the division by the number of tokens and before the loss scale. So fp16 gradients do not
underflow, and the backward can apply any scale.

A head whose table is in pieces (`vocabulary/pieces.py`) is on the device one piece at a time:

    forward     piece 0 ─► three numbers of each token ─► piece 1 ─► … ─► the loss of each token
    backward    the last piece: its logits again ─► its gradients ─► the piece before ─► …

`words` is then the rows of a piece. The backward computes all logits once more, since the gradient of a logit needs the
logsumexp over all pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from offload.engine.params import handle_of
from offload.errors import UsageError
from offload.torch_internals import graph_is_retained
from offload.vocabulary.pieces import Piece, pieces_in

CHUNK_TOKENS = 1024
"""Default tokens of a chunk: enough for the matrix units of a GPU, half a GiB of logits at 128 thousand words."""

_SCALED_NUMEL = 1 << 22
"""Elements of a gradient that are scaled at a time."""


class _Terms(NamedTuple):
    """The terms of the loss of one token."""

    label_smoothing: float
    z_loss: float
    softcap: float | None


class _Gradients(NamedTuple):
    """Gradients of a sum of losses; None for a gradient that is not needed."""

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None


def causal_lm(
    hidden: torch.Tensor,
    head: nn.Module | torch.Tensor,
    labels: torch.Tensor,
    *,
    shift: bool = True,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    num_items_in_batch: int | torch.Tensor | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> torch.Tensor:
    """Returns the mean loss of predicting `labels`, while holding the logits of only one chunk of tokens.

    With c = softcap * tanh(x / softcap) for the logits x of a token (c = x without a softcap), lse = logsumexp(c) and
    label y, the loss of the token is lse - (1 - label_smoothing) * c[y] - label_smoothing * mean(c) + z_loss * lse**2:
    cross entropy as in `torch.nn.functional.cross_entropy`, and PaLM's z-loss (arXiv 2204.02311, section 5).

    Args:
        hidden: (..., tokens, features) hidden states that the head would receive.
        head: the head, a linear layer, or its (words, features) weight.
        labels: (..., tokens) int64 labels, `ignore_index` for a token without one.
        shift: True if `labels` are the input, so that each token predicts the label after its own, as in transformers.
            False if each token predicts the label of its own position.
        ignore_index: the label of tokens that do not count.
        label_smoothing: weight of the mean loss over all words, 0 to 1.
        z_loss: factor of the squared logsumexp.
        softcap: limit of the logits' absolute values; None for no limit.
        num_items_in_batch: divisor of the summed loss, as transformers passes it; None for the tokens that count here.
        chunk_tokens: tokens whose logits are in memory at a time. Gradients of the head are summed chunk by chunk in
            fp32, so another number may change their last bit.

    Returns:
        The loss, a fp32 scalar. NaN if no token counts and `num_items_in_batch` is None, as in torch.

    Raises:
        UsageError: if shapes do not fit together, the labels are not int64, or a number is out of its range.
    """
    weight, bias, pieces = _weight_and_bias(head)
    _check(hidden, weight, labels, label_smoothing, softcap, chunk_tokens)
    labels = labels.to(hidden.device)
    if shift:
        labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    labels = labels.reshape(-1)
    counts = labels != ignore_index
    divisor: Any = counts.sum() if num_items_in_batch is None else num_items_in_batch
    terms = _Terms(label_smoothing, z_loss, softcap)
    flat = hidden.reshape(-1, hidden.shape[-1])
    if pieces:
        total = _loss_of_pieces(pieces, flat, bias, labels, counts, terms, chunk_tokens)
        return _mean(total, divisor)
    # torch disables gradients inside a Function's forward, so the forward needs to know the mode outside it.
    with_gradients = torch.is_grad_enabled()
    total = _Loss.apply(flat, weight, bias, labels, counts, terms, chunk_tokens, with_gradients)  # type: ignore[no-untyped-call]
    return _mean(total, divisor)


def _mean(total: torch.Tensor, divisor: Any) -> torch.Tensor:
    if isinstance(divisor, torch.Tensor):
        divisor = divisor.to(total.device, torch.float32)  # a number of fp64 would make the loss one
    result: torch.Tensor = total / divisor
    return result


class _Loss(torch.autograd.Function):
    """The sum of the losses of all tokens, computed chunk by chunk together with its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        counts: torch.Tensor,
        terms: _Terms,
        chunk_tokens: int,
        with_gradients: bool,
    ) -> torch.Tensor:
        # Views of paged weights keep the weights on the device, so that all chunks share one fetch.
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        needs = [with_gradients and needed for needed in ctx.needs_input_grad[:3]]
        # With a single chunk the product itself is the sum: in 16 bits it has the same values in half of the memory.
        alone = len(hidden) <= chunk_tokens and weight.dtype != torch.float32
        sums = _Gradients(
            torch.empty_like(hidden) if needs[0] else None,
            torch.zeros_like(weight, dtype=torch.float32) if needs[1] and not alone else None,
            torch.zeros_like(bias, dtype=torch.float32) if needs[2] and bias is not None else None,
        )
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, len(hidden), chunk_tokens):
            of = slice(start, start + chunk_tokens)
            losses, gradient = _losses(F.linear(hidden[of], weight, bias), labels[of], counts[of], terms, any(needs))
            total += losses.sum()
            if gradient is not None:
                _add(sums, gradient, hidden[of], weight, of)
                if needs[1] and alone:
                    sums = sums._replace(weight=gradient.t() @ hidden)
            del gradient  # otherwise it would be in memory beside the next chunk's logits
        ctx.save_for_backward(*sums)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # A retained graph may run backward again, and reads the sums then.
        keeps = graph_is_retained()
        scaled = [
            None if gradient is None else _scaled(gradient, scale, dtype, in_place=not keeps)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None, None, None


def _scaled(sums: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, in_place: bool) -> torch.Tensor:
    """Returns `sums * scale`, computed in fp32, in `dtype`; in new memory, unless `in_place` and `dtype` allow that."""
    result = sums if in_place and sums.dtype is dtype else torch.empty_like(sums, dtype=dtype)
    # By rows, since the products in fp32 of the head's gradient would take twice its memory.
    rows = max(_SCALED_NUMEL // max(sums[:1].numel(), 1), 1)
    for of, into in zip(sums.split(rows), result.split(rows), strict=True):
        torch.mul(of.float(), scale, out=into)
    return result


def _losses(
    logits: torch.Tensor, labels: torch.Tensor, counts: torch.Tensor, terms: _Terms, with_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the losses of a chunk's tokens, (tokens,) fp32, and the gradient of their sum by the logits.

    The gradient is (tokens, words), in the dtype of the logits; it may reuse their memory. Tokens that do not count
    have a loss and a gradient of 0.
    """
    dtype, values = logits.dtype, logits.float()
    del logits  # in 16 bits they are no longer needed; in fp32 `values` are the logits
    slope = None
    if terms.softcap is not None:
        values = values.div_(terms.softcap).tanh_()
        slope = values.square().neg_().add_(1) if with_gradient else None
        values *= terms.softcap
    words = values.shape[-1]
    chosen = torch.where(counts, labels, 0).unsqueeze(-1)
    at_label = values.gather(-1, chosen).squeeze(-1)
    average = values.mean(-1) if terms.label_smoothing else 0.0
    # From here on the logits' memory is reused, first for the probabilities, then for the gradient.
    largest = values.amax(-1, keepdim=True)
    exponentials = values.sub_(largest).exp_()
    sums = exponentials.sum(-1, keepdim=True)
    lse = (largest + sums.log()).squeeze(-1)
    losses = (
        lse - (1 - terms.label_smoothing) * at_label - terms.label_smoothing * average + terms.z_loss * lse.square()
    )
    losses = torch.where(counts, losses, 0.0)
    if not with_gradient:
        return losses, None
    share = counts.float().unsqueeze(-1)
    gradient = exponentials.mul_(share * (1 + 2 * terms.z_loss * lse.unsqueeze(-1)) / sums)
    if terms.label_smoothing:
        gradient -= share * (terms.label_smoothing / words)
    gradient.scatter_add_(-1, chosen, share * (terms.label_smoothing - 1))
    if slope is not None:
        gradient *= slope
    return losses, gradient.to(dtype)


def _add(sums: _Gradients, gradient: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, of: slice) -> None:
    """Adds the gradients of the chunk with rows `of` to the sums; `gradient` is the gradient by the chunk's logits."""
    if sums.hidden is not None:
        sums.hidden[of] = gradient @ weight
    if sums.weight is not None:
        if gradient.dtype == hidden.dtype == torch.float32 and not torch.is_autocast_enabled(hidden.device.type):
            sums.weight.addmm_(gradient.t(), hidden)
        else:
            sums.weight.add_(gradient.t() @ hidden)
    if sums.bias is not None:
        sums.bias.add_(gradient.sum(0, dtype=torch.float32))


# -- pieces of a table ---------------------------------------------------------------------------------


class _Statistics(torch.autograd.Function):
    """Three numbers of each token, (tokens,) fp32, from the logits of one piece, chunk by chunk.

    These are the logsumexp, the logit of the label, which is 0 if the label is not in the piece, and the sum. The
    gradient of the hidden states goes to `wide`, in fp32. `labels` are counted from the piece's first row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        wide: torch.Tensor,
        leaf: torch.Tensor | None,
        bias: torch.Tensor | None,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        softcap: float | None,
        chunk_tokens: int,
        piece: Piece,
        weight: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        lse, at_label, total = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        dtype = hidden.dtype
        for start in range(0, len(hidden), chunk_tokens):
            of = slice(start, start + chunk_tokens)
            logits = F.linear(hidden[of], weight, bias)
            dtype = logits.dtype  # that of autocast, which applies here, and not in the backward
            logits, _ = _capped(logits, softcap)
            inside, chosen = _inside(labels[of], len(weight))
            lse[of] = logits.logsumexp(-1)
            at_label[of] = torch.where(inside, logits.gather(-1, chosen).squeeze(-1), 0.0)
            total[of] = logits.sum(-1)
        ctx.save_for_backward(hidden, labels, weight if piece.runs else None, bias, lse)
        ctx.settings, ctx.piece = (softcap, chunk_tokens, dtype), piece
        return lse, at_label, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *by: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, labels, weight, bias, lse = ctx.saved_tensors
        make = partial(_Statistics._gradients, ctx, by, hidden, labels, bias, lse)
        sums: _Gradients = ctx.piece.again(make) if weight is None else make(weight)
        return *sums, *(None,) * 6

    @staticmethod
    def _gradients(
        ctx: Any,
        by: Sequence[torch.Tensor],
        hidden: torch.Tensor,
        labels: torch.Tensor,
        bias: torch.Tensor | None,
        lse: torch.Tensor,
        weight: torch.Tensor,
    ) -> _Gradients:
        """Returns the gradients in the dtypes that autograd expects. `by` are those of the three numbers."""
        softcap, chunk_tokens, dtype = ctx.settings
        hidden, values, own_bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        # Divided by the largest factor of a token, products in fp16 do not underflow.
        largest = torch.stack([factor.abs().amax() for factor in by]).amax()
        scale = torch.where(largest > 0, largest, 1.0) if dtype == torch.float16 else None
        factors = by if scale is None else [factor / scale for factor in by]
        sums = _Gradients(
            torch.empty_like(hidden, dtype=torch.float32) if ctx.needs_input_grad[0] else None,
            torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None,
            torch.zeros_like(bias, dtype=torch.float32) if bias is not None and ctx.needs_input_grad[2] else None,
        )
        for start in range(0, len(hidden), chunk_tokens):
            of = slice(start, start + chunk_tokens)
            logits, slope = _capped(F.linear(hidden[of], values, own_bias), softcap, with_slope=True)
            inside, chosen = _inside(labels[of], len(weight))
            of_lse, of_label, of_sum = (factor[of].unsqueeze(-1) for factor in factors)
            gradient = logits.sub_(lse[of].unsqueeze(-1)).exp_().mul_(of_lse).add_(of_sum)
            gradient.scatter_add_(-1, chosen, torch.where(inside.unsqueeze(-1), of_label, 0.0))
            if slope is not None:
                gradient *= slope
            _add(sums, gradient.to(dtype), hidden[of], values, of)
            del logits, gradient
        of_hidden, of_weight, of_bias = (
            total if total is None or scale is None else total.mul_(scale) for total in sums
        )
        return _Gradients(
            of_hidden,
            # -0 becomes 0, as where the zeros of a lookup are added to it. A sum from 0 on is -0 only if it is rounded.
            of_weight if of_weight is None or weight.dtype == torch.float32 else of_weight.to(weight.dtype).add_(0.0),
            None if of_bias is None or bias is None else of_bias.to(bias.dtype),
        )


def _capped(
    logits: torch.Tensor, softcap: float | None, with_slope: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns capped logits in fp32, perhaps in the memory of `logits`, and the slope of the cap, if there is one."""
    values = logits.float()
    del logits  # in 16 bits they are no longer needed
    if softcap is None:
        return values, None
    values = values.div_(softcap).tanh_()
    slope = values.square().neg_().add_(1) if with_slope else None
    return values.mul_(softcap), slope


def _inside(labels: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns which labels are in a piece of `rows` rows, (tokens,), and the row to read for each, (tokens, 1)."""
    inside = (labels >= 0) & (labels < rows)
    return inside, torch.where(inside, labels, 0).unsqueeze(-1)


def _loss_of_pieces(
    pieces: Sequence[Piece],
    hidden: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    counts: torch.Tensor,
    terms: _Terms,
    chunk_tokens: int,
) -> torch.Tensor:
    """Returns the sum of the losses of all tokens, with one piece of the head's table on the device at a time."""
    # Gradients of the hidden states, one from each piece, are summed in fp32 and rounded once.
    wide, values = hidden.float(), hidden.detach()
    words = pieces[-1].rows.stop
    if bool((counts & ((labels < 0) | (labels >= words))).any()):
        raise IndexError(f"a label is out of range: the head has {words} words")
    statistics = []
    for piece in pieces:
        own_bias = None if bias is None else bias[piece.rows.start : piece.rows.stop]
        local = torch.where(counts, labels - piece.rows.start, -1)
        given = (wide, piece.leaf(), own_bias, values, local, terms.softcap, chunk_tokens, piece)
        statistics.append(piece.on_device(partial(_Statistics.apply, *given)))
    of_lse, at_label, sums = (torch.stack(parts, -1) for parts in zip(*statistics, strict=True))
    lse = of_lse.logsumexp(-1)
    average = sums.sum(-1) / words if terms.label_smoothing else 0.0
    losses = (
        lse
        - (1 - terms.label_smoothing) * at_label.sum(-1)
        - terms.label_smoothing * average
        + terms.z_loss * lse.square()
    )
    return torch.where(counts, losses, 0.0).sum()


# -- arguments -----------------------------------------------------------------------------------------


def _weight_and_bias(
    head: nn.Module | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None, tuple[Piece, ...]]:
    """Returns weight and bias of a head; `head` may be just the weight. Paged weights are fetched first.

    A weight in pieces remains a placeholder; its pieces are the third result.
    """
    if isinstance(head, torch.Tensor):
        pieces = pieces_in(head)
        return head if pieces else _brought(head), None, pieces
    weight, bias = getattr(head, "weight", None), getattr(head, "bias", None)
    if not isinstance(weight, torch.Tensor):
        raise UsageError(
            f"the head is a {type(head).__name__} without a weight; pass a linear layer or its weight, and compute "
            "the loss of another head from its logits"
        )
    pieces = pieces_in(weight)
    return weight if pieces else _brought(weight), None if bias is None else _brought(bias), pieces


def _brought(parameter: torch.Tensor) -> torch.Tensor:
    """Returns the parameter, fetched if its module runs, or else a clone that passes its gradient to the parameter."""
    handle = handle_of(parameter)
    # Held only until the module ends: a head tied to the embedding may take most of the device's memory.
    if handle is None or (parameter is handle.parameter and handle.fetch(stays=True)):
        return parameter
    return parameter.clone()


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    label_smoothing: float,
    softcap: float | None,
    chunk_tokens: int,
) -> None:
    if weight.ndim != 2 or hidden.ndim < 2 or hidden.shape[-1] != weight.shape[1]:
        raise UsageError(
            f"the hidden states are {list(hidden.shape)} and the head's weight {list(weight.shape)}; expected "
            "(..., tokens, features) and (words, features)"
        )
    if labels.shape != hidden.shape[:-1] or labels.dtype != torch.int64:
        raise UsageError(
            f"the labels are {list(labels.shape)} {labels.dtype}; expected {list(hidden.shape[:-1])} torch.int64, one "
            "for each token"
        )
    if not 0 <= label_smoothing <= 1:
        raise UsageError(f"label_smoothing is a share from 0 to 1, not {label_smoothing}")
    if softcap is not None and softcap <= 0:
        raise UsageError(f"softcap is positive, or None for no limit, not {softcap}")
    if chunk_tokens < 1:
        raise UsageError(f"chunk_tokens is at least 1, not {chunk_tokens}")
