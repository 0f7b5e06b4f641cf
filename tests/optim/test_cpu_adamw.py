"""`CPUAdamW` is torch's AdamW in any loop, with exact masters for 16-bit parameters."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from offload.errors import ConfigError
from offload.kernels import CPUAdamW, join_master
from tests.support import rounding_bounds
from tests.support.oracle import Job

pytestmark = pytest.mark.numeric


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(17, 33), nn.ReLU(), nn.LayerNorm(33), nn.Linear(33, 5)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> None:
    for number in range(start, start + steps):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(8, 17, generator=generator).to(next(model.parameters()).dtype)
        y = torch.randint(5, (8,), generator=generator)
        optimizer.zero_grad()
        functional.cross_entropy(model(x).float(), y).backward()
        optimizer.step()


JOB = Job(net, lambda *_: torch.zeros(()), steps=1, lr=1e-2)
"""What `train` does, for its bounds."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("decoupled", [True, False])
def test_a_thousand_steps_are_those_of_torch(decoupled: bool) -> None:
    """From the same state, step by step: within 6 ulp of the larger of a weight and its change."""
    generator = torch.Generator().manual_seed(0)
    mine = nn.Parameter(torch.randn(501, generator=generator))
    theirs = nn.Parameter(mine.detach().clone())
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = CPUAdamW([mine], **settings, decoupled=decoupled)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    reference = kind([theirs], **settings, foreach=False, fused=False)
    worst = 0.0
    for _ in range(1000):
        gradient = torch.randn(501, generator=generator) * 10 ** float(torch.randn((), generator=generator))
        mine.grad, theirs.grad = gradient, gradient.clone()
        before = theirs.detach().clone()
        optimizer.step()
        reference.step()
        change = (theirs.detach() - before).abs()
        unit = torch.maximum(theirs.detach().abs(), change) * 2.0**-23
        worst = max(worst, float(((mine.detach() - theirs.detach()).abs() / unit).max()))
        with torch.no_grad():  # from the same state again
            mine.copy_(theirs)
            optimizer.state[mine]["exp_avg"].copy_(reference.state[theirs]["exp_avg"])
            optimizer.state[mine]["exp_avg_sq"].copy_(reference.state[theirs]["exp_avg_sq"])
    assert worst <= 6, worst


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_parameter_follows_its_fp32_master(dtype: torch.dtype) -> None:
    """Steps far below the spacing of the 16-bit weight add up."""
    parameter = nn.Parameter(torch.ones(100, dtype=dtype))
    full = nn.Parameter(torch.ones(100))
    optimizer, reference = CPUAdamW([parameter], lr=1e-5), CPUAdamW([full], lr=1e-5)
    for _ in range(100):
        parameter.grad = torch.full((100,), 0.5, dtype=dtype)
        full.grad = parameter.grad.float()
        optimizer.step()
        reference.step()
    state = optimizer.state[parameter]
    if dtype is torch.bfloat16:
        master = torch.empty(100)
        join_master(parameter.detach(), state["residual"], master)
    else:
        master = state["master"]
    assert torch.equal(master, full.detach()) and master[0] < 1 - 9e-4
    torch.testing.assert_close(parameter.float(), full.detach(), rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_a_saved_run_goes_on_bit_for_bit(dtype: torch.dtype, moments: torch.dtype) -> None:
    model = net(dtype)
    optimizer = CPUAdamW(model.parameters(), lr=1e-2, moment_dtype=moments)
    train(model, optimizer, 5)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, 5, 5)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    loaded = net(dtype)
    loaded.load_state_dict(saved["model"])
    again = CPUAdamW(loaded.parameters(), lr=1.0)
    again.load_state_dict(saved["optimizer"])
    assert again.state[next(loaded.parameters())]["exp_avg"].dtype is moments
    train(loaded, again, 5, 5)
    for weight, loaded_weight in zip(model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(weight, loaded_weight)


def test_groups_schedules_and_scales_act() -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = CPUAdamW([{"params": [first], "lr": 0.5}, {"params": [second], "weight_decay": 0.0}], lr=0.25)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.0 if epoch else 1.0)
    optimizer.param_groups[1]["grad_scale"] = 0.0
    for parameter in (first, second):
        parameter.grad = torch.ones(3)
    optimizer.step()
    assert torch.allclose(first, torch.full((3,), 1 - 0.5 * 0.01 - 0.5)) and torch.equal(second, torch.ones(3))
    schedule.step()
    before = first.detach().clone()
    optimizer.step()
    assert torch.equal(first, before)


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = CPUAdamW([parameter])
    assert optimizer.step(lambda: 7) == 7
    assert torch.equal(parameter, torch.ones(3)) and not optimizer.state[parameter]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_in_another_layout(dtype: torch.dtype) -> None:
    """Channels last, transposed, a scalar, an empty one."""
    for make in (
        lambda: torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(7, 4).t(),
        lambda: torch.randn(()),
        lambda: torch.randn(0, 3),
    ):
        torch.manual_seed(1)
        odd = nn.Parameter(make().to(dtype))
        plain = nn.Parameter(odd.detach().clone(memory_format=torch.contiguous_format))
        optimizers = CPUAdamW([odd], lr=0.1), CPUAdamW([plain], lr=0.1)
        for number in range(3):
            gradient = torch.randn(odd.shape, generator=torch.Generator().manual_seed(number)).to(dtype)
            odd.grad, plain.grad = torch.empty_like(odd).copy_(gradient), gradient
            for optimizer in optimizers:
                optimizer.step()
        assert torch.equal(odd, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["in place", "by .data"])
def test_what_a_user_changes_between_steps_counts(dtype: torch.dtype, how: str) -> None:
    parameter = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = CPUAdamW([parameter], lr=1e-6, weight_decay=0.0)
    for _ in range(3):
        parameter.grad = torch.ones(4, dtype=dtype)
        optimizer.step()
    new = torch.tensor([5.0, 1.0, -3.0, 0.0], dtype=dtype)
    if how == "in place":
        with torch.no_grad():
            parameter.copy_(new)
    else:
        parameter.data = new.clone()
    parameter.grad = torch.ones(4, dtype=dtype)
    optimizer.step()
    torch.testing.assert_close(parameter.detach().float(), new.float(), rtol=0, atol=1e-5)


def test_a_deep_copy_is_independent() -> None:
    model = net()
    optimizer = CPUAdamW(model.parameters())
    train(model, optimizer, 2)
    other_model, other_optimizer = copy.deepcopy((model, optimizer))
    train(model, optimizer, 2, 2)
    train(other_model, other_optimizer, 2, 2)
    for weight, other_weight in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(weight, other_weight)


def test_bad_input_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(3))
    for settings, words in (
        ({"lr": -1.0}, "lr"),
        ({"eps": float("nan")}, "eps"),
        ({"betas": (1.0, 0.9)}, "betas"),
        ({"moment_dtype": torch.float16}, "moment_dtype"),
    ):
        with pytest.raises(ConfigError, match=words):
            CPUAdamW([parameter], **settings)
    for wrong in (torch.ones(3, dtype=torch.float64), torch.ones(3, device="meta")):
        with pytest.raises(ConfigError, match=r"fp32, bf16 or fp16"):
            CPUAdamW([nn.Parameter(wrong)])
    optimizer = CPUAdamW([parameter])
    parameter.grad = torch.ones(3).to_sparse()
    with pytest.raises(ConfigError, match="dense"):
        optimizer.step()


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_states_go_to_torch_and_back(dtype: torch.dtype, kind: type[torch.optim.Optimizer]) -> None:
    model = net(dtype)
    theirs = kind(model.parameters(), lr=1e-2)
    train(model, theirs, 3)
    net_of_torch = net(dtype)
    net_of_torch.load_state_dict(model.state_dict())
    mine = CPUAdamW(net_of_torch.parameters())
    mine.load_state_dict(theirs.state_dict())
    assert mine.param_groups[0]["decoupled"] is (kind is torch.optim.AdamW)
    train(model, theirs, 1, 3)
    train(net_of_torch, mine, 1, 3)
    job = JOB._replace(dtype="fp32" if dtype is torch.float32 else "bf16")
    rounding_bounds.same_weights(net_of_torch.state_dict(), model.state_dict(), job)
    if dtype is torch.float32:
        back = torch.optim.AdamW(net_of_torch.parameters())
        back.load_state_dict(mine.state_dict())
        train(net_of_torch, back, 1, 4)


def test_a_state_that_cannot_be_ours_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    theirs = torch.optim.AdamW([parameter], amsgrad=True)
    theirs.step()
    with pytest.raises(ConfigError, match="amsgrad"):
        (ours := CPUAdamW([parameter])).load_state_dict(theirs.state_dict())
    assert not ours.state and "amsgrad" not in ours.param_groups[0]
    other_optimizer = CPUAdamW([parameter])
    other_optimizer.step()
    with pytest.raises(ConfigError, match=r"expected shape \(5,\)"):
        CPUAdamW([nn.Parameter(torch.ones(5))]).load_state_dict(other_optimizer.state_dict())


def test_all_parameters_move_or_none() -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = CPUAdamW([first, second])
    first.grad, second.grad = torch.ones(3), torch.ones(3).to_sparse()
    for _ in range(2):
        with pytest.raises(ConfigError, match="dense"):
            optimizer.step()
    assert torch.equal(first, torch.ones(3)) and not optimizer.state[first] and not optimizer.state[second]


def test_autograd_notices_a_step() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = CPUAdamW(model.parameters())
    loss = model(torch.ones(2, 3)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_a_bf16_parameter_that_is_set_to_zero_is_zero(value: float) -> None:
    parameter = nn.Parameter(torch.full((4,), 0.3, dtype=torch.bfloat16))
    optimizer = CPUAdamW([parameter], lr=1e-4, weight_decay=0.0)
    for _ in range(3):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    with torch.no_grad():
        parameter.fill_(value)
    optimizer.param_groups[0]["lr"] = 0.0
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert (parameter == 0).all()
