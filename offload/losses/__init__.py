"""Losses that need less memory than the tensors between them would take."""

from __future__ import annotations

from offload.losses.causal_model import chunk_loss_of
from offload.losses.chunked import causal_lm

__all__ = ["causal_lm", "chunk_loss_of"]
