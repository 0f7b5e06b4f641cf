"""Where torch does not tell which hooks for saved tensors are active, as torch 2.6 does not, they are counted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

from offload.torch_internals import count_saved_tensor_hooks, pop_saved_tensor_hooks, push_saved_tensor_hooks

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
