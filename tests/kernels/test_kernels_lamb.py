"""LAMB is its formula, and no bit depends on how a parameter is cut into pieces of whole blocks."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from offload import kernels
from offload.kernels import LambSegment, LambStep, Partition, _native
from offload.kernels.lamb import BLOCK
from tests.support import rounding_bounds
from tests.support.kernel_inputs import ISAS, default_settings

__all__ = ["default_settings"]  # fixtures

pytestmark = pytest.mark.numeric

STEP = LambStep(1e-2, 0.9, 0.99, 1e-6, 0.1, 3, 0.5)


def arrays(numel: int, dtype: torch.dtype = torch.float32, grad_dtype: torch.dtype = torch.float32) -> Partition:
    generator = torch.Generator().manual_seed(0)
    master, grad, m, v = (torch.randn(numel, generator=generator) for _ in range(4))
    moments = (m * 0.1, v.square())
    if dtype is torch.bfloat16:
        weight, residual = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=torch.int16)
        kernels.split_master(master, weight, residual)
        return Partition(weight, grad.to(grad_dtype), moments, residual=residual)
    if dtype is torch.float16:
        return Partition(master.half(), grad.to(grad_dtype), moments, master=master)
    return Partition(master, grad.to(grad_dtype), moments)


def master_of(part: Partition) -> torch.Tensor:
    if part.residual is None:
        return (part.weight if part.master is None else part.master).clone()
    uncut = torch.empty(part.weight.numel())
    kernels.join_master(part.weight, part.residual, uncut)
    return uncut


@pytest.mark.parametrize("numel", [1, 100, 4096, 10_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_is_the_formula(numel: int, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    part = arrays(numel, dtype, grad_dtype)
    f = np.float32
    p, g = master_of(part).numpy(), part.grad.float().numpy() * f(0.5)
    m = f(0.9) * part.moments[0].numpy() + f(1 - 0.9) * g
    v = f(0.99) * part.moments[1].numpy() + f(1 - 0.99) * g * g
    u = m / (np.sqrt(v) + f(1e-6)) + f(0.1) * p
    ratio = np.sqrt(np.square(p.astype(np.float64)).sum()) / np.sqrt(np.square(u.astype(np.float64)).sum())
    kernels.lamb(part, [LambSegment(0, numel, STEP)])
    assert part.moments[0].numpy().tobytes() == m.tobytes() and part.moments[1].numpy().tobytes() == v.tobytes()
    correction = math.sqrt(1 - 0.99**3) / (1 - 0.9**3)
    moved = f(-(1e-2 * correction * np.clip(ratio, 0.01, 10.0))) * u
    # The ratio, of sums in another order, may round to its neighbour; then the product and the sum do.
    allowed = 2 * rounding_bounds.unit() * (np.abs(p + moved) + 2 * np.abs(moved))
    assert (np.abs(master_of(part).numpy() - (p + moved)) <= allowed).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 3])
def test_cuts_into_chunks_change_no_bit(isa: str, threads: int) -> None:
    numel = 100_003
    _native.configure("scalar", 1)
    uncut = arrays(numel, torch.bfloat16, torch.bfloat16)
    kernels.lamb(uncut, [LambSegment(0, numel, STEP)])
    _native.configure(isa, threads)
    parts = arrays(numel, torch.bfloat16, torch.bfloat16)
    edges = [0, BLOCK, 10 * BLOCK, 24 * BLOCK, numel]
    views = [
        Partition(
            parts.weight[a:b],
            parts.grad[a:b],
            tuple(moment[a:b] for moment in parts.moments),
            parts.residual[a:b],
        )
        for a, b in itertools.pairwise(edges)
    ]
    segments = [[LambSegment(0, view.weight.numel(), STEP)] for view in views]
    sums = [kernels.lamb_moments(view, each)[0] for view, each in zip(views, segments, strict=True)]
    ratio = kernels.lamb_ratio(STEP, sums)
    for view, each in zip(views, segments, strict=True):
        kernels.lamb_move(view, each, [ratio])
    assert torch.equal(uncut.weight, parts.weight) and torch.equal(uncut.residual, parts.residual)
    assert all(torch.equal(one, other) for one, other in zip(uncut.moments, parts.moments, strict=True))


def test_each_parameter_has_its_ratio() -> None:
    part = arrays(20_000)
    small = part._replace(weight=part.weight.clone())
    small.weight[:8000] *= 1e-3
    before = small.weight.clone()
    kernels.lamb(small, [LambSegment(0, 8000, STEP._replace(min_ratio=0.0)), LambSegment(9000, 20_000, STEP)])
    moved = (small.weight - before).abs()
    assert moved[:8000].mean() < 1e-2 * moved[9000:].mean() and not moved[8000:9000].any()


def test_a_norm_of_zero_has_ratio_one() -> None:
    part = Partition(torch.zeros(10), torch.ones(10), (torch.zeros(10), torch.zeros(10)))
    step = LambStep(0.5, 0.9, 0.99, 0.0, 0.0, 1)
    kernels.lamb(part, [LambSegment(0, 10, step)])
    # A moment of a tenth over a root of a tenth, and the correction, a tenth over a tenth.
    torch.testing.assert_close(part.weight, torch.full((10,), -0.5))
    assert kernels.lamb_ratio(step, []) == 1.0
    wide = torch.tensor([[1e6, 1.0]], dtype=torch.float64)
    assert kernels.lamb_ratio(step, [wide]) == 10.0


def test_bad_input_is_refused() -> None:
    part = arrays(8)
    with pytest.raises(ValueError, match="within 8 elements"):
        kernels.lamb(part, [LambSegment(0, 9, STEP)])
    for turned in (
        [LambSegment(4, 8, STEP), LambSegment(0, 4, STEP)],
        [LambSegment(0, 5, STEP), LambSegment(4, 8, STEP)],
    ):
        for call in (kernels.lamb, kernels.lamb_moments, lambda p, s: kernels.lamb_move(p, s, [1.0, 1.0])):
            with pytest.raises(ValueError, match="in order"):
                call(part, turned)
    with pytest.raises(ValueError, match="from 1"):
        kernels.lamb(part, [LambSegment(0, 8, STEP._replace(step=0))])
    with pytest.raises(TypeError, match=r"moments\[0\]"):
        kernels.lamb(part._replace(moments=tuple(m.half() for m in part.moments)), [LambSegment(0, 8, STEP)])
