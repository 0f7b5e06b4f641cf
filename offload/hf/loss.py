"""The loss of a Trainer: in chunks of tokens where nothing reads the logits of a training step."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from offload.errors import ConfigError
from offload.losses.choice import ChosenLoss, choose_loss

OFF = "chunked_loss=False"
"""The argument that turns the chunks off."""


def loss_of(trainer: Any, wanted: bool | None) -> ChosenLoss:
    """Chooses the loss of a Trainer's model, before its engine is built. Evaluation computes all logits in any case.

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
    return choose_loss(trainer.model, wanted, off=OFF, reason=reason)


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
        # The method of the object, since a script may set one.
        if getattr(getattr(trainer, name), "__func__", None) is not getattr(Trainer, name):
            return f"{type(trainer).__name__}.{name} may read the logits (chunked_loss=True if it does not)"
    return None
