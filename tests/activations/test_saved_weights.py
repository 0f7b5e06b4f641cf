"""A graph holds no weights, whatever view of a parameter autograd saves; other hooks for saved tensors stay."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

import offload
from bench.measure import settings_for
from offload.torch_internals import count_saved_tensor_hooks, pop_saved_tensor_hooks, push_saved_tensor_hooks

WIDTH, UNITS = 64, 6
ROOM = 2 * (2 * WIDTH * (WIDTH + 1) + 8192)
"""Bytes of two units in bf16."""

# The native hooks know a view of weights by the address of its first element; a view of no element has none.
VIEWS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "whole": lambda x, weight: x @ weight,
    "transposed": lambda x, weight: x @ weight.t(),
    "rows from the middle": lambda x, weight: torch.cat([x[:, :40], x @ weight[:, 8:32]], 1),
    "steps of two": lambda x, weight: (x[:, ::2] @ weight[::2]) + x,
    "reversed by an index": lambda x, weight: x @ weight[torch.arange(WIDTH - 1, -1, -1)],
    "no row": lambda x, weight: x + x[:, :0] @ weight[:0],
    "one element": lambda x, weight: x * weight[3, 5],
    "a square of itself": lambda x, weight: x @ (weight * weight),
}


class Layer(nn.Module):
    def __init__(self, use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.ones(WIDTH))  # so that the weight is not first in its unit
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.use(x * self.before, self.weight))


class Stack(nn.Module):
    def __init__(self, use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(use) for _ in range(UNITS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().sum()


def _gradients(
    use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], tier: str, folder: Path, **options: int
) -> list[torch.Tensor | None]:
    """Returns the gradients of one backward with weights in `tier`."""
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    engine = offload.initialize(model=Stack(use), config=settings_for(folder, tier, tier, **options))[0]
    try:
        engine.backward(engine(x))
        return [offload.safe_get_full_grad(parameter) for parameter in engine.module.parameters()]
    finally:
        engine.destroy(remove=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize("use", VIEWS.values(), ids=VIEWS)
def test_a_saved_view_of_a_weight_pins_nothing_and_comes_back(
    use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    expected = _gradients(use, "none", tmp_path)
    gradients = _gradients(use, "nvme", tmp_path, device_memory=ROOM)
    for left, right in zip(gradients, expected, strict=True):
        assert (left is None) == (right is None)
        assert left is None or right is None or torch.equal(left, right)


def test_a_tensor_changed_after_it_was_saved_is_refused(tmp_path: Path) -> None:
    """Hooks take torch's own check away, so the hooks make it."""
    changed: list[torch.Tensor] = []

    def use(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        changed.append(torch.exp(x @ weight))
        return changed[-1]

    settings = settings_for(tmp_path, "changed", "nvme", device_memory=ROOM)
    engine = offload.initialize(model=Stack(use), config=settings)[0]
    try:
        loss = engine(torch.ones(3, WIDTH, dtype=torch.bfloat16))
        with torch.no_grad():
            changed[2].add_(1)
        with pytest.raises(RuntimeError, match=r"of shape \[3, 64\] that backward needs was changed in place"):
            engine.backward(loss)
    finally:
        engine.destroy(remove=True)


_OF_TORCH: Any = torch._C._autograd


@pytest.fixture
def top(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Returns the function that tells the counted pair; torch's own functions are back after the test."""
    for name in ("_push_saved_tensors_default_hooks", "_pop_saved_tensors_default_hooks"):
        monkeypatch.setattr(_OF_TORCH, name, getattr(_OF_TORCH, name))
    return count_saved_tensor_hooks()


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _other(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def test_the_newest_pair_of_the_thread_is_the_active_one(top: Callable[[], Any]) -> None:
    elsewhere: list[Any] = []
    assert top() is None
    with saved_tensors_hooks(_same, _other):
        push_saved_tensor_hooks(_other, _same)
        assert top() == (_other, _same)
        thread = threading.Thread(target=lambda: elsewhere.append(top()))
        thread.start()
        thread.join()
        pop_saved_tensor_hooks()
        assert top() == (_same, _other)
    assert top() is None and elsewhere == [None]


def test_a_pair_that_torch_refuses_is_not_counted(top: Callable[[], Any]) -> None:
    with disable_saved_tensors_hooks("not here"), pytest.raises(RuntimeError, match="not here"):
        push_saved_tensor_hooks(_same, _other)
    assert top() is None


@pytest.mark.skipif(not hasattr(_OF_TORCH, "_top_saved_tensors_default_hooks"), reason="torch does not tell")
def test_checkpoints_and_errors_leave_the_pair_that_torch_tells(top: Callable[[], Any]) -> None:
    seen: list[bool] = []

    def block(values: torch.Tensor) -> torch.Tensor:
        seen.append(top() == _OF_TORCH._top_saved_tensors_default_hooks(True))
        return (values * values).sin()

    values = torch.ones(3, requires_grad=True)
    with saved_tensors_hooks(_same, _other):
        torch.utils.checkpoint.checkpoint(block, values, use_reentrant=False).sum().backward()
    with pytest.raises(ZeroDivisionError), saved_tensors_hooks(_same, _other):
        block(values)
        raise ZeroDivisionError
    assert seen == [True] * 3 and top() is None and _OF_TORCH._top_saved_tensors_default_hooks(True) is None
