"""A parameter is there for another module's code: announced where torch does not see the use, else by itself."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from offload import testing
from offload.errors import UsageError
from tests.support import models, rounding_bounds
from tests.support.modules.autograd_modules import Launching
from tests.support.oracle import Job, plain_loop, room_for, run, start, train_step

DISK = ("nvme", "nvme")


class Unseen(nn.Module):
    """Uses another module's weight in a function that torch does not show to placeholders, as extensions' are."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.own = nn.Linear(size, size)
        self.others: list[nn.Parameter] = []

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.own(values) @ self.others[0]


class WithUnseen(nn.Module):
    def __init__(self, register: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 32)
        self.layers = nn.ModuleList([nn.Linear(32, 32), Unseen(32), nn.Linear(32, 61)])
        self.layers[1].others.append(self.layers[0].weight)
        if register:
            offload.register_external_parameter(self.layers[1], self.layers[0].weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        values = self.embedding(ids)
        for layer in self.layers:
            values = layer(values)
        return values


@pytest.mark.works(
    "Modules", "a parameter read by code that torch does not see (a fused loss in C++), registered", "right"
)
@pytest.mark.numeric
def test_a_registered_parameter_is_there(tmp_path: Path) -> None:
    """It was registered before the engine was made, or after."""
    job = Job(partial(WithUnseen, True), models.mixture_loss, steps=2)
    expected = plain_loop(job).losses
    for late in (False, True):
        engine = start(job._replace(model=partial(WithUnseen, not late)), DISK, tmp_path / str(late))
        unseen, weight = engine.module.layers[1], engine.module.layers[0].weight
        if late:
            with pytest.raises(UsageError, match="register_external_parameter"):
                job.loss(engine, 0, 0)
            for _ in range(2):
                offload.register_external_parameter(unseen, weight)
        rounding_bounds.same_losses([train_step(engine, job, step) for step in range(2)], expected, job)
        offload.unregister_external_parameter(unseen, weight)
        with torch.no_grad():
            assert bool(job.loss(engine, 0, 0).isnan()), "else this test shows nothing"
        with pytest.raises(UsageError, match="was not registered"):
            offload.unregister_external_parameter(unseen, weight)
        engine.destroy(remove=True)


@pytest.mark.numeric
def test_a_kernel_that_reads_by_address_and_strides_needs_no_announcement(tmp_path: Path) -> None:
    """As a launcher of Triton kernels does, of a weight whose module does not run, forward and backward."""
    job = Job(Launching, models.mixture_loss, steps=2)
    engine = start(job, DISK, tmp_path, device_memory=room_for(job, 3))
    found = [train_step(engine, job, step) for step in range(2)]
    rounding_bounds.same_losses(found, plain_loop(job).losses, job)
    weight = engine.module.first.weight
    assert weight.stride() == (0, 0) and weight.data_ptr() and not weight.is_contiguous(), "outside as they were"
    assert not any(testing.inspect(engine).pins)
    engine.destroy(remove=True)


def test_only_modules_and_parameters_can_be_registered() -> None:
    linear = nn.Linear(2, 2)
    for arguments in ((linear, torch.ones(2)), (linear.weight, linear.weight)):
        with pytest.raises(UsageError, match="expects a module and a parameter"):
            offload.register_external_parameter(*arguments)


class Passing(nn.Module):
    """Passes parameters to checkpointed functions as arguments: a table of its own, and a weight of another block."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.table, self.head = nn.Parameter(torch.full((1, 1, 32), 0.1)), nn.Linear(32, 61)
        self.reentrant = reentrant

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        values = self.embedding(ids)
        for number, layer in enumerate(self.layers):
            other = self.layers[number - 1].weight
            values = checkpoint(partial(self.block, layer), values, self.table, other, use_reentrant=self.reentrant)
        return self.head(values)

    @staticmethod
    def block(layer: nn.Module, values: torch.Tensor, table: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(layer(values) + table) @ weight + values


@pytest.mark.works("Modules", "a parameter as an argument of a checkpointed function", "right")
@pytest.mark.numeric
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("placement", [DISK, ("none", "none")], ids="-".join)
def test_a_checkpointed_function_takes_parameters(reentrant: bool, placement: tuple[str, str], tmp_path: Path) -> None:
    job = Job(partial(Passing, reentrant), models.mixture_loss, steps=2)
    expected = plain_loop(job)
    found = run(job, placement, tmp_path)
    assert torch.allclose(torch.tensor(found.losses), torch.tensor(expected.losses), rtol=0, atol=1e-5)
    assert torch.allclose(torch.tensor(found.norms), torch.tensor(expected.norms), rtol=1e-4)
