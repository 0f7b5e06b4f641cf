"""A tensor that wraps others, as those of torchao and DTensor do, is saved for the backward like any other.

Such a tensor has no storage of its own. What it wraps may be a view of weights, which no graph may hold.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import offload
from offload import testing
from tests.support.oracle import Job, assert_same, room_for, run, start, train_step


class Pair(torch.Tensor):
    """Two tensors of one shape, on both of which each operation works."""

    @staticmethod
    def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> Pair:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, first.shape, dtype=first.dtype, strides=first.stride(), requires_grad=False
        )

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        self.first, self.second = first, second

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], context: None, size: torch.Size, stride: Any) -> Pair:
        return Pair(inner["first"], inner["second"])

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def of(name: str) -> Any:
            return tree_map(lambda each: getattr(each, name) if isinstance(each, Pair) else each, (args, kwargs or {}))

        (some, named), (others, others_named) = of("first"), of("second")
        return Pair(func(*some, **named), func(*others, **others_named))


class Plain(torch.autograd.Function):
    """A linear layer."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ hidden


class Wrapped(torch.autograd.Function):
    """The same, which saves its operands wrapped, the weight within two wrappers."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        inner = Pair(weight.detach(), 2 * weight.detach())
        ctx.save_for_backward(Pair(hidden.detach(), hidden.detach()), Pair(inner, inner))
        return hidden @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        assert type(weight) is type(weight.first) is type(hidden) is Pair
        assert torch.equal(2 * weight.first.first, weight.second.second)
        return gradient @ weight.first.first, gradient.T @ hidden.second


class Linear(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.weight, self._function = nn.Parameter(torch.randn(16, 16) / 4), function

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._function.apply(hidden, self.weight)


class Net(nn.Module):
    def __init__(self, function: Any = Wrapped) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Linear(function) for _ in range(6))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return hidden


class PlainNet(Net):
    def __init__(self) -> None:
        super().__init__(Plain)


def loss(model: Any, step: int, micro: int) -> torch.Tensor:
    hidden = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
    return model(hidden).pow(2).mean()


JOB = Job(Net, loss, steps=3)


@pytest.mark.works("Graphs", "a saved tensor that wraps views of weights", "right")
@pytest.mark.parametrize("placement", [("none", "none"), ("nvme", "nvme")], ids="-".join)
def test_a_saved_wrapper_of_weights_trains_as_plain_tensors_do(placement: tuple[str, str], tmp_path: Path) -> None:
    expected = run(JOB._replace(model=PlainNet), ("none", "none"), tmp_path / "plain")
    assert_same(expected, run(JOB, placement, tmp_path / "wrapped"))


def test_its_gradients_are_those_of_torch(tmp_path: Path) -> None:
    torch.manual_seed(JOB.seed)
    plain = Net()
    loss(plain, 0, 0).backward()
    engine = start(JOB, ("nvme", "nvme"), tmp_path)
    engine.backward(loss(engine, 0, 0))
    for parameter, weight in zip(plain.parameters(), engine.module.parameters(), strict=True):
        assert torch.equal(offload.safe_get_full_grad(weight).cpu(), parameter.grad)
    engine.destroy(remove=True)


@pytest.mark.parametrize("outer", [False, True], ids=["", "save_on_cpu"])
def test_a_graph_of_wrappers_holds_no_weights(outer: bool, tmp_path: Path) -> None:
    """Six units pass through the room of two: a wrapper that kept its view would keep its unit there."""
    engine = start(JOB, ("cpu", "cpu"), tmp_path, device_memory=room_for(JOB, 2))
    for step in range(2):
        if outer:
            with torch.autograd.graph.save_on_cpu():
                value = loss(engine, step, 0)
        else:
            value = loss(engine, step, 0)
        assert not testing.inspect(engine).live_views
        engine.backward(value)
        engine.step()
    train_step(engine, JOB, 2)
    engine.destroy(remove=True)
