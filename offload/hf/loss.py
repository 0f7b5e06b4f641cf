"""The loss of a Trainer: in chunks of tokens where nothing reads the logits of a training step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from transformers import Trainer

from offload.errors import ConfigError
from offload.hf.micro_batches import own_method
from offload.losses.causal_model import without_logits
from offload.losses.choice import ChosenLoss, as_begun, choose_loss
from offload.provenance import is_of

logger = logging.getLogger("offload")

OFF = "chunked_loss=False"
"""The argument that turns the chunks off."""
_KEY = "chunked_loss"
"""Key of the loss in the state of the engine's checkpoint."""


def loss_of(trainer: Any, wanted: bool | None) -> ChosenLoss:
    """Chooses the loss of a Trainer's model, before its engine is built, and logs a line about it.

    Args:
        trainer: a Trainer that was constructed.
        wanted: the argument `chunked_loss`.

    Raises:
        ConfigError: if `wanted` is True and an argument of the Trainer computes the loss from all logits.
        UsageError: if `wanted` is True and the model's loss cannot be computed in chunks.
    """
    reason = _reader_of_logits(trainer)
    if wanted and reason is not None:
        raise ConfigError(f"chunked_loss=True computes no logits, but {reason}; leave one of the two out")
    # Code of a subclass may read the logits. Only its author knows, who says so by the argument.
    if wanted is None and reason is None:
        reason = _own_code(trainer)
    # By default the Trainer's own steps alone: a callback that calls the model may read the logits.
    return _logged(choose_loss(trainer.model, wanted, off=OFF, training=wanted is True, reason=reason))


def state_of(loss: ChosenLoss) -> dict[str, Any]:
    """Returns what a checkpoint says of the loss."""
    return {_KEY: loss.chunked}


def resumed(loss: ChosenLoss, wanted: bool | None, state: Mapping[str, Any]) -> ChosenLoss:
    """Returns the loss of a training that resumes from a checkpoint: by default that with which it began.

    Args:
        loss: the loss that was chosen for the model.
        wanted: the argument `chunked_loss`.
        state: the state in the checkpoint; those of earlier versions say nothing of the loss.
    """
    begun = as_begun(loss, wanted, bool(state.get(_KEY)))
    return loss if begun is loss else _logged(begun)


def evaluation_of(model: nn.Module, step: Any, prediction_loss_only: bool) -> AbstractContextManager[None]:
    """Returns the context in which a Trainer's method `prediction_step` evaluates a batch.

    No logits are computed if only the loss is asked for, and the method is that of transformers: another may read them.

    Args:
        model: the model of the Trainer, whose loss may be in chunks.
        step: the method.
        prediction_loss_only: the method's argument.
    """
    plain = getattr(step, "__func__", None) is Trainer.prediction_step and is_of(step, "transformers")
    alone = prediction_loss_only and plain
    return without_logits(model) if alone else nullcontext()


def _logged(loss: ChosenLoss) -> ChosenLoss:
    """Logs the line on a choice, and returns the choice."""
    if loss.line is not None:
        logger.info(loss.line)
    return loss


def _reader_of_logits(trainer: Any) -> str | None:
    """Returns which argument of a Trainer needs all logits, or brings a loss; None if there is no such argument."""
    if trainer.compute_loss_func is not None:
        return "compute_loss_func receives all logits"
    if trainer.label_smoother is not None:
        return "label_smoothing_factor is computed from all logits"
    if trainer.args.use_liger_kernel:
        return "use_liger_kernel brings a loss of its own"
    return None


def _own_code(trainer: Any) -> str | None:
    """Returns which method of the Trainer computes the loss in a way of its own; None if none does."""
    for name in ("compute_loss", "training_step"):
        if own_method(trainer, name) is not None:
            return f"{type(trainer).__name__}.{name} may read the logits (chunked_loss=True if it does not)"
    return None
