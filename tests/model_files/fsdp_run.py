"""Trains a small model with torch alone, under FSDP2 or plain, saves it with torch.distributed.checkpoint, and goes on.

All ranks have the same batches, so that losses and gradients do not depend on their number.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

BEFORE, AFTER = 4, 10
"""Steps before the checkpoint, and after it."""
VOCABULARY, WIDTH, SAMPLES, LENGTH = 31, 10, 2, 8
OPTIMIZER = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


class Network(nn.Module):
    """Odd sizes, a tied head, a frozen embedding, buffers of floats and of integers, and a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm, self.scale = nn.BatchNorm1d(WIDTH), nn.Parameter(torch.ones(1))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.words.weight
        self.places.weight.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            hidden = hidden + torch.relu(layer(hidden))
        logits = self.head(self.norm(hidden.flatten(0, 1)) * self.scale)
        return nn.functional.cross_entropy(logits[:-1], ids.flatten()[1:])


def batch(step: int) -> torch.Tensor:
    """Returns the tokens of a step, (samples, length): each is the one before plus three."""
    first = torch.randint(0, VOCABULARY, (SAMPLES, 1), generator=torch.Generator().manual_seed(step))
    return (first + 3 * torch.arange(LENGTH)) % VOCABULARY


def changed(model: Network) -> Network:
    """Returns the model with other values everywhere, which a load must replace."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1)
    return model


def optimizer_of(model: Network, grouped: bool) -> torch.optim.AdamW:
    """Returns the optimizer; if `grouped`, with groups of other numbers, whose order is not that of the model."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not grouped:
        return torch.optim.AdamW(trained, **OPTIMIZER)
    vectors = {"params": [each for each in trained if each.dim() < 2], "weight_decay": 0.0, "lr": 3e-2}
    return torch.optim.AdamW([vectors, {"params": [each for each in trained if each.dim() > 1]}], **OPTIMIZER)


class Training:
    """A model, its optimizer and its schedule; under FSDP2 where there are several ranks."""

    def __init__(self, model: Network, sharded: bool, cut: int = 0, grouped: bool = False) -> None:
        if sharded:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            # Rows of a tensor are shared out, or columns where there are any.
            place = (lambda tensor: torch.distributed.tensor.Shard(min(cut, tensor.dim() - 1))) if cut else None
            for layer in model.layers:
                fully_shard(layer, mesh=mesh, shard_placement_fn=place)
            fully_shard(model, mesh=mesh)
        self.model, self.optimizer = model, optimizer_of(model, grouped)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=8)

    def losses(self, steps: range) -> list[float]:
        """Trains the steps and returns their losses."""
        losses = []
        for step in steps:
            loss = self.model(batch(step))
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def state(self, flat: bool) -> dict[str, Any]:
        """Returns the state dict, with a flattened optimizer if `flat`."""
        model, optimizer = get_state_dict(
            self.model, self.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat)
        )
        return {"model": model, "optim": optimizer, "scheduler": self.schedule.state_dict(), "best": 0.25}

    def load(self, folder: Path, flat: bool) -> None:
        """Loads a checkpoint as torch's documentation does."""
        state = self.state(flat)
        with quiet():
            dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=StateDictOptions(flatten_optimizer_state_dict=flat),
        )
        self.schedule.load_state_dict(state["scheduler"])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Ignores torch's remark that there is no process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def save(folder: Path, sharded: bool, flat: bool, cut: int = 0, grouped: bool = False) -> list[float]:
    """Trains, saves into `folder`, and returns the losses of the steps after that."""
    training = Training(Network(), sharded, cut, grouped)
    training.losses(range(BEFORE))
    with quiet():
        dcp.save(training.state(flat), checkpoint_id=folder)
    return training.losses(range(BEFORE, BEFORE + AFTER))


def go_on(folder: Path, sharded: bool, flat: bool, grouped: bool = False) -> list[float]:
    """Returns the losses of torch after a checkpoint in `folder`."""
    training = Training(changed(Network()), sharded, grouped=grouped)
    training.load(folder, flat)
    return training.losses(range(BEFORE, BEFORE + AFTER))
