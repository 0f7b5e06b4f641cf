"""Tensors over a weight's memory follow it as in PyTorch, or are refused by name before anything is touched."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.spectral_norm import spectral_norm

import offload
from offload.errors import ConfigError
from tests.support.oracle import Job, plain_loop, start, train_step

DISK = ("nvme", "nvme")


class Pair(nn.Module):
    """Two matrices of 10 by 10, whose memory `share` arranges."""

    def __init__(self, share: Callable[[Pair], None]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False)
        self.shift = nn.Parameter(torch.zeros(10))
        share(self)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(values))) + self.shift


def loss(model: nn.Module, step: int, micro: int) -> torch.Tensor:
    rows = torch.randn(3, 10, generator=torch.Generator().manual_seed(step))
    return (model(rows) - 1).square().mean()


def rows_of_one(model: Pair) -> None:
    memory = torch.randn(15, 10)
    model.first.weight, model.second.weight = nn.Parameter(memory[:10]), nn.Parameter(memory[5:])


def one_frozen(model: Pair) -> None:
    model.second.weight = nn.Parameter(model.first.weight.data[:], requires_grad=False)


def a_buffer(model: Pair) -> None:
    model.first.register_buffer("turned", model.first.weight.detach().t()[2:4], persistent=False)


def other_bytes(model: Pair) -> None:
    model.register_buffer("bits", model.second.weight.detach().view(torch.int16))


def an_attribute(model: Pair) -> None:
    model.second.lookup = {"rows": [model.second.weight.data[3]]}  # type: ignore[assignment]


def a_hidden_module(model: Pair) -> None:
    hidden = nn.Linear(10, 10)
    hidden.weight = nn.Parameter(model.first.weight.data)
    model.others = (hidden,)  # type: ignore[assignment]


class Lookup:
    """An object of a script's."""

    __slots__ = ("rows",)

    def __init__(self, rows: Any) -> None:
        self.rows = rows


def an_object(model: Pair) -> None:
    model.second.lookup = [Lookup({"third": model.second.weight.detach()[3]})]  # type: ignore[assignment]


def a_default(model: Pair) -> None:
    model.product = lambda rows, weight=model.first.weight.data: rows @ weight  # type: ignore[assignment]


def a_partial(model: Pair) -> None:
    model.product = functools.partial(torch.matmul, other=model.first.weight.data)  # type: ignore[assignment]


def a_hook(model: Pair) -> None:
    weight = model.second.weight.data
    model.first.register_forward_hook(lambda module, args, output: output + args[0] @ weight)


def an_array(model: Pair) -> None:
    model.table = {"values": model.first.weight.detach().numpy()[2:, 1]}  # type: ignore[assignment]


def the_parameter(model: Pair) -> None:
    model.register_buffer("same", model.first.weight)


def of_itself(model: Pair) -> None:
    model.first.weight = nn.Parameter(torch.randn(10, 1).expand(10, 10))


@pytest.mark.works("Modules", "tensors over a weight's memory (a buffer, another parameter, an attribute)", "refused")
@pytest.mark.parametrize(
    ("share", "message"),
    [
        (rows_of_one, r"parameters first\.weight and second\.weight share memory"),
        (one_frozen, r"parameters first\.weight and second\.weight share memory"),
        (a_buffer, r"buffer first\.turned lies in the memory of parameter first\.weight"),
        (other_bytes, r"buffer bits lies in the memory of parameter second\.weight"),
        (an_attribute, r"attribute lookup of second lies in the memory of parameter second\.weight"),
        (a_hidden_module, r"attribute others of the model lies in the memory of parameter first\.weight"),
        (an_object, r"attribute lookup of second lies in the memory of parameter second\.weight"),
        (a_default, r"attribute product of the model lies in the memory of parameter first\.weight"),
        (a_partial, r"attribute product of the model lies in the memory of parameter first\.weight"),
        (a_hook, r"attribute _forward_hooks of first lies in the memory of parameter second\.weight"),
        (an_array, r"attribute table of the model lies in the memory of parameter first\.weight"),
        (the_parameter, r"buffer same is the parameter first\.weight itself"),
        (of_itself, r"elements of parameter first\.weight share memory"),
    ],
)
def test_what_an_update_would_cut_apart_is_refused(share: Callable[[Pair], None], message: str, tmp_path: Path) -> None:
    model = Pair(share)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ConfigError, match=message):
        start(Job(lambda: model, loss), DISK, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("follows", ["parameter", "clone", "state dict", "array"])
def test_a_line_tells_of_what_a_script_has_over_weights(follows: str, tmp_path: Path) -> None:
    model = Pair(lambda _: None)
    taken = {
        "parameter": lambda: [*model.parameters()],
        "clone": lambda: model.first.weight.detach().clone(),
        "state dict": model.state_dict,
        "array": lambda: model.first.weight.detach().numpy(),
    }[follows]()
    engine = start(Job(lambda: model, loss), DISK, tmp_path)
    told = [
        notice for notice in engine.notices if "a tensor outside of the model uses the memory of parameter" in notice
    ]
    assert len(told) == (follows in ("state dict", "array")) and taken is not None
    engine.destroy(remove=True)


def columns_of_one(model: Pair) -> None:
    memory = torch.randn(10, 20)
    model.first.weight, model.second.weight = nn.Parameter(memory[:, ::2]), nn.Parameter(memory[:, 1::2])


def tied(model: Pair) -> None:
    model.second.weight = model.first.weight
    model.listed = [model.first.weight]  # type: ignore[assignment]


def frozen(model: Pair) -> None:
    model.first.weight.requires_grad_(False)
    model.second.weight = nn.Parameter(model.first.weight.data, requires_grad=False)
    model.register_buffer("turned", model.first.weight.detach().t())


def normed(model: Pair) -> None:
    spectral_norm(model.first)  # its attribute `weight` begins in the memory of `weight_orig`


class Proxy:
    """An object that cannot be asked for anything before it is connected."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("the proxy is not connected")


def of_the_script(model: Pair) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    model.held = [Proxy(), optimizer, {"again": model}, lambda: model.first.weight]  # type: ignore[assignment]
    model.copies = {name: value.clone() for name, value in model.state_dict().items()}  # type: ignore[assignment]


@pytest.mark.numeric
@pytest.mark.parametrize("share", [columns_of_one, tied, frozen, normed, of_the_script])
def test_what_shares_nothing_that_trains_apart_is_as_in_pytorch(share: Callable[[Pair], None], tmp_path: Path) -> None:
    job = Job(lambda: Pair(share), loss, steps=3, lr=1e-2)
    expected = plain_loop(job).losses
    engine = start(job, DISK, tmp_path)
    losses = [train_step(engine, job, step) for step in range(job.steps)]
    engine.destroy(remove=True)
    assert torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=1e-5)


def test_a_model_that_does_not_train_may_share_memory() -> None:
    model = Pair(rows_of_one)
    rows = torch.ones(2, 10)
    expected = model(rows)
    engine = offload.inference(model, {"offload": {"device": "cpu"}})
    assert torch.equal(engine(rows), expected)
    engine.destroy()
