"""An optimizer step as one call: the model receives micro-batches as in a loop, and its losses are collected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from offload.errors import UsageError


def check_batches(batches: Any) -> None:
    """Raises `UsageError` if `batches` is no iterator, and so could not continue from one step to the next."""
    if not isinstance(batches, Iterator):
        raise UsageError(
            f"train_batch expects an iterator of micro-batches, got {type(batches).__name__}: make the iterator "
            "before the loop, batches = iter(loader), so that each step continues after the last one"
        )


def run(model: Callable[..., Any], batch: Any) -> torch.Tensor:
    """Returns the model's loss of `batch`.

    The model returns the loss, or an output whose `.loss`, `["loss"]` or first item is the loss.

    Args:
        model: the model.
        batch: a mapping of keyword arguments, a tuple or list of arguments, or the only argument.

    Raises:
        UsageError: the output contains no loss of one element.
    """
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, tuple | list):
        output = model(*batch)
    else:
        output = model(batch)
    loss = _loss(output)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise UsageError(
            "a micro-batch expects a model that returns its loss, a tensor of one element, or an output with .loss; "
            f"got {type(output).__name__}. For other models call accumulate(micro_batches, loss) with a function that "
            "returns the loss, and then step()"
        )
    return loss


def _loss(output: Any) -> Any:
    """Returns the loss in a model's output, or None."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("loss")
    if hasattr(output, "loss"):
        return output.loss
    return output[0] if isinstance(output, tuple | list) and output else None
