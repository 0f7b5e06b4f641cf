"""The AdamW kernel is torch.optim.AdamW and Adam; a split master is an fp32 master, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from offload import kernels
from offload.kernels import AdamWStep
from tests.support import rounding_bounds
from tests.support.kernel_inputs import normal

pytestmark = pytest.mark.numeric

ODD_SIZES = [0, 1, 15, 16, 17, 31, 32, 33, 4095, 4097, 100003]


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("lr", "betas", "eps"),
    [
        (1e-3, (0.9, 0.999), 1e-8),
        (1e-2, (0.95, 0.95), 1e-6),
        (3e-4, (0.3, 0.99), 1e-3),
        (1e-3, (0.0, 0.5), 1e-8),
    ],
)
def test_twenty_steps_in_fp32_are_those_of_torch(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, decoupled: bool
) -> None:
    numel = 4097
    weight, exp_avg, exp_avg_sq = normal(numel, 0), torch.zeros(numel), torch.zeros(numel)
    param = torch.nn.Parameter(weight.clone())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([param], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, foreach=False, fused=False)
    for number in range(1, 21):
        grad = normal(numel, number)
        param.grad = grad.clone()
        optimizer.step()
        step = AdamWStep(lr, *betas, eps, weight_decay, number, 1.0, decoupled)
        kernels.adamw(weight, None, exp_avg, exp_avg_sq, grad, step)
    state = optimizer.state[param]
    # Twenty steps of at most ten roundings of numbers of about one; where they cancel, the error is that of the terms.
    error = rounding_bounds.sum_error(200)
    rounding_bounds.same_tensor(weight, param.detach(), error)
    rounding_bounds.same_tensor(exp_avg, state["exp_avg"], error)
    rounding_bounds.same_tensor(exp_avg_sq, state["exp_avg_sq"], error)


@pytest.mark.parametrize("numel", ODD_SIZES)
def test_one_step_is_the_formula_operation_by_operation(numel: int) -> None:
    weight, grad = normal(numel, 1), normal(numel, 2)
    exp_avg, exp_avg_sq = normal(numel, 3, 0.1), normal(numel, 4).square()
    lr, beta1, beta2, eps, decay, number, scale = 1e-3, 0.9, 0.999, 1e-8, 0.1, 7, 0.37

    # Every numpy operation below rounds once, as the kernel must: the bits are equal. (torch's own
    # sqrt is one ulp off in many elements of a large tensor.)
    f = np.float32
    g = grad.numpy() * f(scale)
    p = weight.numpy() * f(1 - lr * decay)
    m = exp_avg.numpy() + f(1 - beta1) * (g - exp_avg.numpy())
    v = exp_avg_sq.numpy() * f(beta2) + f(1 - beta2) * g * g
    denominator = np.sqrt(v) / f((1 - beta2**number) ** 0.5) + f(eps)
    p = p + f(-(lr / (1 - beta1**number))) * m / denominator

    kernels.adamw(weight, None, exp_avg, exp_avg_sq, grad, AdamWStep(lr, beta1, beta2, eps, decay, number, scale))
    for got, expected in ((exp_avg, m), (exp_avg_sq, v), (weight, p)):
        assert got.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("numel", ODD_SIZES)
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_a_split_master_takes_the_steps_of_an_fp32_master(numel: int, decoupled: bool, grad_dtype: torch.dtype) -> None:
    master = normal(numel, 5, 0.02)
    weight, residual = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.int16)
    kernels.split_master(master, weight, residual)
    whole_moments = torch.zeros(numel), torch.zeros(numel)
    split_moments = torch.zeros(numel), torch.zeros(numel)
    for number in range(1, 6):
        grad = normal(numel, number).to(grad_dtype)
        step = AdamWStep(1e-3, 0.9, 0.95, 1e-8, 0.1, number, 0.25, decoupled)
        kernels.adamw(master, None, *whole_moments, grad, step)
        kernels.adamw(weight, residual, *split_moments, grad, step)
    joined = torch.empty(numel)
    kernels.join_master(weight, residual, joined)
    assert torch.equal(joined.view(torch.int32), master.view(torch.int32))
    assert torch.equal(split_moments[0], whole_moments[0])
    assert torch.equal(split_moments[1], whole_moments[1])


def test_a_bf16_gradient_is_its_fp32_value() -> None:
    grad = normal(1001, 1).bfloat16()
    results = []
    for given in (grad, grad.float()):
        weight, exp_avg, exp_avg_sq = normal(1001, 2), torch.zeros(1001), torch.zeros(1001)
        kernels.adamw(weight, None, exp_avg, exp_avg_sq, given, AdamWStep(0.1, 0.9, 0.99, 1e-8, 0.0, 1))
        results.append(weight)
    assert torch.equal(*results)


def test_a_gradient_that_is_not_finite_makes_canonical_nans() -> None:
    grad = torch.tensor([float("nan"), float("inf"), 1.0, -float("inf")] * 20)
    numel = grad.numel()
    weight, residual = torch.ones(numel, dtype=torch.bfloat16), torch.ones(numel, dtype=torch.int16)
    step = AdamWStep(0.1, 0.9, 0.99, 1e-8, 0.0, 1)
    kernels.adamw(weight, residual, torch.zeros(numel), torch.zeros(numel), grad, step)
    bad = ~grad.isfinite()
    assert (weight.view(torch.int16)[bad] == 0x7FC0).all()
    assert (residual[bad] == 0).all()
    assert weight[~bad].isfinite().all()


def test_without_decay_an_infinite_weight_stays_infinite_in_adam_too() -> None:
    weight = torch.full((3,), float("inf"))
    step = AdamWStep(0.1, 0.9, 0.99, 1e-8, 0.0, 1, decoupled=False)
    kernels.adamw(weight, None, torch.zeros(3), torch.zeros(3), torch.ones(3), step)
    assert weight.isposinf().all()


def arguments(numel: int = 8) -> dict[str, torch.Tensor]:
    return {
        "weight": torch.zeros(numel, dtype=torch.bfloat16),
        "residual": torch.zeros(numel, dtype=torch.int16),
        "exp_avg": torch.zeros(numel),
        "exp_avg_sq": torch.zeros(numel),
        "grad": torch.zeros(numel),
    }


STEP = AdamWStep(1e-3, 0.9, 0.999, 1e-8, 0.0, 1)


@pytest.mark.parametrize("name", ["weight", "residual", "exp_avg", "exp_avg_sq", "grad"])
def test_a_wrong_tensor_is_refused_by_name(name: str) -> None:
    right = arguments()
    tensor = right[name]
    if name != "weight":  # its length is what the others are held against
        with pytest.raises(ValueError, match=rf"{name}: expected shape \(8,\), got \(9,\)"):
            kernels.adamw(**(right | {name: tensor.new_zeros(9)}), step=STEP)
    with pytest.raises(TypeError, match=f"{name}: expected .*a tensor of .*, got torch.float64"):
        kernels.adamw(**(right | {name: tensor.double()}), step=STEP)
    with pytest.raises(ValueError, match=rf"{name}: expected shape \(8,\), got \(2, 4\)"):
        kernels.adamw(**(right | {name: tensor.view(2, 4)}), step=STEP)
    with pytest.raises(ValueError, match=rf"{name}: expected a contiguous tensor, got stride \(2,\)"):
        kernels.adamw(**(right | {name: tensor.new_zeros(16)[::2]}), step=STEP)
    with pytest.raises(ValueError, match=f"{name}: expected a tensor on the CPU, got one on meta"):
        kernels.adamw(**(right | {name: tensor.to("meta")}), step=STEP)
    with pytest.raises(TypeError, match=f"{name}: expected a tensor, got list"):
        kernels.adamw(**(right | {name: [0.0] * 8}), step=STEP)


def test_a_bf16_weight_needs_its_residual_and_an_fp32_weight_has_none() -> None:
    with pytest.raises(TypeError, match="residual"):
        kernels.adamw(**(arguments() | {"residual": None}), step=STEP)
    with pytest.raises(TypeError, match="residual"):
        kernels.adamw(**(arguments() | {"weight": torch.zeros(8)}), step=STEP)


def test_steps_are_counted_from_one() -> None:
    with pytest.raises(ValueError, match="step: expected a number from 1, got 0"):
        kernels.adamw(**arguments(), step=STEP._replace(step=0))


def test_memory_that_does_not_hold_its_values_is_refused() -> None:
    gone = torch.ones(1000)
    gone.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="resized"):
        kernels.sum_squares(gone)
    with pytest.raises(ValueError, match="resolve_neg"):
        kernels.sum_squares(torch._neg_view(torch.ones(3)))


def test_scalars_do_not_flush_either() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        weight = torch.ones(3)
        step = AdamWStep(1.0, 0.9, 0.99, 1e-40, 0.0, 1)
        kernels.adamw(weight, None, torch.zeros(3), torch.zeros(3), torch.zeros(3), step)
    finally:
        torch.set_flush_denormal(False)
    assert (weight == 1).all()
