"""Jobs whose loss is that of the rows of one rank."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import nn

import offload
from tests.support import models
from tests.support.oracle import Job, weights_of
from tests.support.param_states import MIXTURE, gpt2
from tests.support.ranks.rank_pool import rank_and_size


def my_rows(batch: torch.Tensor) -> torch.Tensor:
    rank, size = rank_and_size()
    return batch.chunk(size)[rank]


def rows_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    """Returns the loss of this rank's rows; the mean over the ranks is that of all rows."""
    ids = my_rows(models.tokens(step, micro, (4, 16), 61))
    return models.token_loss(model(ids), ids)


def language_rows_loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    ids = my_rows(models.tokens(step, micro, (4, 16)))
    return model(input_ids=ids, labels=ids).loss


def losses_and_weights(
    engine: offload.Engine, job: Job, first: int, last: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Returns the mean losses of steps [first, last) over the ranks, and the weights; the engine is destroyed."""
    assert engine.global_steps == first
    losses = []
    for step in range(first, last):
        loss = job.loss(engine, step, 0)
        engine.backward(loss)
        losses.append(engine.mean(float(loss.detach())))
        engine.step()
    weights = weights_of(engine)
    engine.destroy()
    return losses, weights


def recomputed(reentrant: bool) -> nn.Module:
    model = gpt2()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # a new name is coming; users have the old one
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model.train()


class Adapters(nn.Module):
    """Frozen layers with small trainable ones beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 64).requires_grad_(False)
        self.layers = nn.ModuleList(nn.ModuleDict({"base": nn.Linear(64, 64), "add": nn.Linear(64, 64)}) for _ in "123")
        self.head = nn.Linear(64, 61)
        for layer in self.layers:
            layer["base"].requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = torch.tanh(layer["base"](hidden) + layer["add"](hidden))
        return self.head(hidden)


JOBS = {
    "gpt2": models.GPT2._replace(model=gpt2, loss=language_rows_loss),
    "llama": Job(models.llama, language_rows_loss),
    "mixtral": Job(models.mixtral, language_rows_loss),
    "mixture": MIXTURE._replace(loss=rows_loss),
    "adapters": Job(Adapters, rows_loss),
    "recomputed": Job(functools.partial(recomputed, False), language_rows_loss, accumulation=2),
    "recomputed, reentrant": Job(functools.partial(recomputed, True), language_rows_loss, accumulation=2),
}
