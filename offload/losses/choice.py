"""The choice of a program that trains: the loss in chunks where the model allows it, else the model's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from offload.errors import UsageError
from offload.losses.causal_model import chunk_loss_of, line_on_all_logits, undo_of
from offload.losses.chunked import CHUNK_TOKENS


@dataclass(frozen=True, kw_only=True)
class ChosenLoss:
    """The loss with which a model trains."""

    chunked: bool
    line: str | None = None
    """A sentence on the choice, for the log; None if there is nothing to say."""
    undo: Callable[[], None] | None = None
    """Makes the model compute all logits again, also under an engine, between steps; None if the script has chosen."""


def choose_loss(
    model: nn.Module,
    wanted: bool | None,
    *,
    off: str,
    training: bool = True,
    evaluation: bool = False,
    reason: str | None = None,
) -> ChosenLoss:
    """Makes the model compute its loss in chunks, unless the model or its user needs its own loss.

    Args:
        model: the model, before `offload.initialize`.
        wanted: True for chunks or an error, False for all logits, None for chunks where the model allows them.
        off: what a user writes to compute all logits, for the line.
        training: False for chunks inside of `without_logits` alone.
        evaluation: True for chunks in evaluation as well.
        reason: why the program needs the model's own loss; None if only the model decides.

    Raises:
        UsageError: if `wanted` is True and the model's loss cannot be computed in chunks.
    """
    undo = undo_of(model)
    if wanted is False:
        if undo is not None:
            undo()
        return ChosenLoss(chunked=False)
    if undo is not None:  # the script has called `chunk_loss_of` itself
        return ChosenLoss(chunked=True)
    if reason is not None:
        return as_it_is(reason)
    try:
        undo = chunk_loss_of(model, training=training, evaluation=evaluation)
    except UsageError as error:
        if wanted:
            raise
        # Nobody expects a loss in chunks of a model without words, such as a classifier of images.
        return as_it_is(str(error)) if _has_words(model) else ChosenLoss(chunked=False)
    line = f"the loss is computed from the logits of {CHUNK_TOKENS} tokens at a time; {off} computes all at once"
    return ChosenLoss(chunked=True, line=line, undo=undo)


def would_be_chunked(model: nn.Module, wanted: bool | None) -> bool:
    """Returns True if `choose_loss` would compute the loss in chunks. The model stays as it is."""
    if wanted is not None or undo_of(model) is not None:
        return wanted is not False
    chosen = choose_loss(model, None, off="")
    if chosen.undo is not None:
        chosen.undo()
    return chosen.chunked


def as_it_is(reason: str) -> ChosenLoss:
    """Returns the choice to leave the model's loss as it is, with a line that gives the reason."""
    return ChosenLoss(chunked=False, line=line_on_all_logits(reason))


def as_begun(chosen: ChosenLoss, wanted: bool | None, began_chunked: bool) -> ChosenLoss:
    """Returns the loss of a run that is resumed: unless the user chooses another, that with which the run began.

    Both losses are equal but for roundings, so a run that changed from one to the other would not be the unbroken one.

    Args:
        chosen: the choice for this model, which is undone if the run began with all logits.
        wanted: the user's choice; None if the user left it open.
        began_chunked: False if the run began with all logits, or with a version that knew no other loss.
    """
    if wanted is not None or began_chunked or chosen.undo is None:
        return chosen
    chosen.undo()
    return as_it_is("the run has begun with all logits")


def _has_words(model: Any) -> bool:
    """Returns True if the model has a head over a vocabulary."""
    embeddings = getattr(model, "get_output_embeddings", None)
    return embeddings is not None and embeddings() is not None
