"""A gradient passes from autograd into the engine by native code, or by Python where it must wait or be prepared."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from offload.engine._native import DirectAdd, GradientHook
from offload.kernels.sums import Sum
from offload.torch_internals import plain_tensors


class Passes:
    """Notes the beginning of a backward, and that a gradient was seen."""

    def __init__(self) -> None:
        self.in_backward = self.gradient_seen = False

    def begin_backward(self) -> None:
        self.in_backward = True


class Memory:
    """Memory of one gradient, and those gradients that took the long way."""

    def __init__(self) -> None:
        self.out, self.lock = torch.zeros(6), threading.Lock()
        self.reading: set[int] = set()
        self.squares: list[dict[tuple[int, int], float | torch.Tensor]] = [{}, {}]
        self.long: list[torch.Tensor] = []
        take = Sum(self.out).take
        self.add = DirectAdd(take, self.long.append, self.lock, self.reading, self.squares, 1, 3).add


def test_gradients_are_stored_then_added_with_their_squares() -> None:
    memory, gradient = Memory(), torch.arange(6.0).view(2, 3)
    memory.add(gradient)
    assert torch.equal(memory.out, torch.arange(6.0)) and memory.squares == [{}, {(3, 0): 55.0}]
    memory.add(gradient)
    assert torch.equal(memory.out, 2 * torch.arange(6.0)) and memory.squares == [{}, {(3, 0): 220.0}]
    assert not memory.long and not memory.lock.locked()


@pytest.mark.parametrize(
    "gradient",
    [torch.ones(2, 3).to_sparse(), torch.ones(3, 2).t(), torch.ones(7), torch.ones(6, dtype=torch.float64)],
    ids=["sparse", "transposed", "of another size", "float64"],
)
def test_one_that_must_be_prepared_takes_the_long_way(gradient: torch.Tensor) -> None:
    memory = Memory()
    memory.add(gradient)
    assert memory.long == [gradient] and memory.squares == [{}, {}] and not memory.out.any()
    assert not memory.lock.locked()


def test_one_that_must_wait_takes_the_long_way() -> None:
    memory, gradient = Memory(), torch.ones(6)
    with memory.lock:
        memory.add(gradient)
    memory.reading.add(1)
    memory.add(gradient)
    assert len(memory.long) == 2 and not memory.out.any() and not memory.lock.locked()


def test_the_hook_takes_the_gradient_away_and_begins_the_backward() -> None:
    passes, seen = Passes(), list[torch.Tensor]()
    parameter = nn.Parameter(torch.ones(3))
    parameter.register_post_accumulate_grad_hook(GradientHook(passes, plain_tensors, seen.append).take)
    (parameter * torch.arange(3.0)).sum().backward()
    assert torch.equal(seen[0], torch.arange(3.0)) and parameter.grad is None
    assert passes.in_backward and passes.gradient_seen


def test_an_error_on_the_way_reaches_the_caller_of_backward() -> None:
    def refuse(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    parameter = nn.Parameter(torch.ones(3))
    parameter.register_post_accumulate_grad_hook(GradientHook(Passes(), plain_tensors, refuse).take)
    with pytest.raises(ZeroDivisionError):
        parameter.sum().backward()
