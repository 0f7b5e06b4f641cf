"""What cannot be computed chunk by chunk with the same result is refused, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import offload
from tests.activations.in_pieces import Gated, inputs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunks": 0}, "chunks of offload.tiled is a whole number of at least 1, not 0"),
        ({"chunks": 2.0}, "not 2.0"),
        ({"chunks": True}, "not True"),
        ({"chunk_length": -1}, "chunk_length of offload.tiled is a whole number of at least 1, not -1"),
        ({"chunks": 2, "chunk_length": 3}, "not both"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    module = Gated()
    with pytest.raises(offload.UsageError, match=message):
        offload.tiled(module, **arguments)
    assert type(module) is Gated and "_offload_tiling" not in module.__dict__


def test_a_module_that_normalizes_over_positions_is_refused() -> None:
    with pytest.raises(offload.UsageError, match="1 normalizes over all positions, so Sequential"):
        offload.tiled(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))


def test_a_module_whose_class_does_not_decide_its_forward_is_refused() -> None:
    """It would be computed whole, without a word."""
    module = Gated()
    module.forward = module.forward  # type: ignore[method-assign]
    for each in (module, torch.compile(Gated(), backend="eager")):
        with pytest.raises(
            offload.UsageError, match=f"forward of this {type(each).__name__} was replaced in the object"
        ):
            offload.tiled(each)


class Second(nn.Module):
    """A module with another signature."""

    def __init__(self, returns: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.returns = returns

    def forward(self, hidden: torch.Tensor, other: Any = None) -> Any:
        return self.returns(hidden)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda module: module(torch.zeros(2, 8, 4), torch.zeros(2, 8, 4)), "called with Tensor, Tensor"),
        (lambda module: module(torch.zeros(2, 8, 4), other=None), "called with Tensor, NoneType"),
        (lambda module: module([1, 2]), "called with list"),
        (lambda module: module(), "called with nothing"),
        (lambda module: module(torch.zeros(8)), r"tiled along dimension 1, and its input has the shape \[8\]"),
    ],
)
def test_a_call_with_other_arguments_is_refused(call: Callable[[nn.Module], Any], message: str) -> None:
    with pytest.raises(offload.UsageError, match=message):
        call(offload.tiled(Second(lambda hidden: hidden), chunks=2))


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        (lambda hidden: (hidden, hidden), "returned tuple for a chunk of 4 positions"),
        (lambda hidden: hidden.sum(1), r"returned \[2, 4\] for a chunk of 4 positions"),
        (lambda hidden: hidden[:, :3], r"returned \[2, 3, 4\]"),
        (lambda hidden: hidden.sum(), r"returned \[\]"),
    ],
)
def test_another_output_is_refused(returns: Callable[[torch.Tensor], Any], message: str) -> None:
    with pytest.raises(offload.UsageError, match=message):
        offload.tiled(Second(returns), chunks=2)(torch.zeros(2, 8, 4))


def test_a_hook_that_would_be_called_for_each_chunk_is_refused() -> None:
    module = offload.tiled(Gated(), chunks=2)
    hook = module.up.weight.register_hook(lambda slope: 2 * slope)
    with pytest.raises(offload.UsageError, match=r"parameter up\.weight of the tiled Gated has a hook"):
        module(inputs(1, 8, 16))
    with torch.no_grad():
        module(inputs(1, 8, 16))
    hook.remove()
    module(inputs(1, 8, 16)).sum().backward()


def test_a_tensor_that_would_receive_no_gradient_is_refused() -> None:
    outer = nn.Parameter(torch.ones(16))
    for hidden in (outer, outer * 2):
        module = offload.tiled(Second(lambda given, outer=hidden: given * outer), chunks=2)  # type: ignore[misc]
        output = module(inputs(1, 8, 16))
        with pytest.raises(offload.UsageError, match=r"uses a tensor of shape \[16\] that is neither its input"):
            output.sum().backward()


def test_weights_that_have_changed_since_the_forward_are_refused() -> None:
    module, hidden = offload.tiled(Gated(), chunks=2), inputs(1, 8, 16)
    output = module(hidden)
    with torch.no_grad():
        module.up.weight.mul_(2)
    with pytest.raises(offload.UsageError, match=r"the weights of up\.weight of the tiled Gated have changed since"):
        output.sum().backward()
