"""Every rule is its formula, operation by operation, in every dtype of weights and gradients."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import kernels
from offload.kernels import (
    AdagradStep,
    AdamWStep,
    LionStep,
    Partition,
    PlainSGDStep,
    Segment,
    SGDStep,
    Step,
    _native,
    update,
)
from offload.kernels.update import RULES
from tests.support import rounding_bounds
from tests.support.kernel_inputs import ISAS, default_settings, normal
from tests.support.sampling import drawn, examples

__all__ = ["default_settings"]  # fixtures

pytestmark = pytest.mark.numeric

F = np.float32
STEPS: dict[str, Step] = {
    "adamw": AdamWStep(1e-3, 0.9, 0.999, 1e-8, 0.1, 7, 0.37),
    "adam": AdamWStep(1e-3, 0.9, 0.999, 1e-8, 0.1, 7, 0.37, False),
    "adamw, beta1 below a half": AdamWStep(1e-3, 0.3, 0.95, 1e-6, 0.1, 2, 1.0),
    "adagrad": AdagradStep(1e-2, 0.1, 1e-10, 0.05, 3, 0.5),
    "adagrad without decay": AdagradStep(1e-2, 0.0, 1e-10, 0.0, 1),
    "lion": LionStep(1e-4, 0.9, 0.99, 0.1, 0.5),
    "sgd": SGDStep(1e-2, 0.9, 0.1, 0.05, False, False, 0.5),
    "sgd, first": SGDStep(1e-2, 0.9, 0.0, 0.0, False, True),
    "sgd, nesterov": SGDStep(1e-2, 0.9, 0.0, 0.05, True, False),
    "sgd, momentum 0": SGDStep(1e-2, 0.0, 0.1, 0.05, False, False, 0.5),
    "sgd, momentum 0, first": SGDStep(1e-2, 0.0, 0.1, 0.05, True, True, 0.5),
    "sgd without momentum": PlainSGDStep(1e-2, 0.05, 0.5),
    "sgd, nothing else": PlainSGDStep(1e-2, 0.0),
}
WEIGHTS = [torch.float32, torch.bfloat16, torch.float16]
GRADS = [torch.float32, torch.bfloat16, torch.float16]


def formula(step: Step, p: Any, g: Any, m: Any, v: Any) -> tuple[Any, Any, Any]:
    """The new weight and moments, in numpy, each operation rounded once to fp32."""
    g = g * F(step.grad_scale)
    if isinstance(step, AdamWStep):
        if step.decoupled:
            p = p * F(1 - step.lr * step.weight_decay)
        else:
            g = g + F(step.weight_decay) * p
        if F(1 - step.beta1) < 0.5:
            m = m + F(1 - step.beta1) * (g - m)
        else:
            m = g + -(F(1) - F(1 - step.beta1)) * (g - m)
        v = v * F(step.beta2) + F(1 - step.beta2) * g * g
        below = np.sqrt(v) / F((1 - step.beta2**step.step) ** 0.5) + F(step.eps)
        return p + F(-(step.lr / (1 - step.beta1**step.step))) * m / below, m, v
    if isinstance(step, AdagradStep):
        if step.weight_decay:
            g = g + F(step.weight_decay) * p
        m = m + g * g
        return p + F(-(step.lr / (1 + (step.step - 1) * step.lr_decay))) * g / (np.sqrt(m) + F(step.eps)), m, v
    if isinstance(step, LionStep):
        direction = F(step.beta1) * m + F(1 - step.beta1) * g
        m = F(step.beta2) * m + F(1 - step.beta2) * g
        return p * F(1 - step.lr * step.weight_decay) - F(step.lr) * np.sign(direction), m, v
    if step.weight_decay:
        g = g + F(step.weight_decay) * p
    if isinstance(step, PlainSGDStep) or not step.momentum:
        return p + F(-step.lr) * g, m, v
    m = g if step.first else F(step.momentum) * m + F(1 - step.dampening) * g
    return p + F(-step.lr) * (g + F(step.momentum) * m if step.nesterov else m), m, v


def partition(
    numel: int, step: Step, weight_dtype: torch.dtype, grad_dtype: torch.dtype, moment_dtype: torch.dtype
) -> Partition:
    master, grad = normal(numel, 1), normal(numel, 2, 0.1).to(grad_dtype)
    squares = normal(numel, 4).square().to(moment_dtype)
    if isinstance(step, AdagradStep):
        second: tuple[torch.Tensor, ...] = (squares,)
    else:
        second = (normal(numel, 3, 0.1).to(moment_dtype), squares)[: RULES[type(step)][1]]
    if weight_dtype is torch.bfloat16:
        weight, residual = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.int16)
        kernels.split_master(master, weight, residual)
        return Partition(weight, grad, second, residual=residual)
    if weight_dtype is torch.float16:
        return Partition(master.half(), grad, second, master=master)
    return Partition(master, grad, second)


def master_of(part: Partition) -> torch.Tensor:
    if part.residual is not None:
        uncut = torch.empty(part.weight.numel())
        kernels.join_master(part.weight, part.residual, uncut)
        return uncut
    return (part.weight if part.master is None else part.master).clone()


def clone(part: Partition) -> Partition:
    return Partition(
        part.weight.clone(),
        part.grad.clone(),
        tuple(moment.clone() for moment in part.moments),
        None if part.residual is None else part.residual.clone(),
        None if part.master is None else part.master.clone(),
    )


def same(left: Partition, right: Partition) -> bool:
    pairs = [(left.weight, right.weight), *zip(left.moments, right.moments, strict=True)]
    pairs += [(a, b) for a, b in ((left.residual, right.residual), (left.master, right.master)) if a is not None]
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def test_a_step_is_its_formula() -> None:
    for name in STEPS:
        print(name)
        step = STEPS[name]
        cases = list(itertools.product([1, 31, 33, 4097], WEIGHTS, GRADS))
        for numel, weight_dtype, grad_dtype in drawn(cases, 7):
            case = numel, weight_dtype, grad_dtype
            moments = RULES[type(step)][1]
            part = partition(numel, step, weight_dtype, grad_dtype, torch.float32)
            old = [moment.numpy() for moment in part.moments] + [np.zeros(numel, F)] * (2 - moments)
            p, *new = formula(step, master_of(part).numpy(), part.grad.float().numpy(), *old)
            grad = part.grad.clone()
            update(part, [Segment(0, numel, step)])
            assert master_of(part).numpy().tobytes() == p.tobytes(), case
            for actual, expected in zip(part.moments, new, strict=False):
                assert torch.equal(actual, torch.from_numpy(expected)), case
            if part.master is not None:
                assert torch.equal(part.weight, part.master.half()), case
            assert torch.equal(part.grad, grad), f"{case}: which is only read"


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_sgd_is_that_of_torch(nesterov: bool, decay: float) -> None:
    weight, buffer = normal(1001, 0), torch.zeros(1001)
    param = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9, weight_decay=decay, nesterov=nesterov, foreach=False)
    for number in range(20):
        param.grad = normal(1001, number + 1)
        optimizer.step()
        step = SGDStep(0.1, 0.9, 0.0, decay, nesterov, number == 0)
        update(Partition(weight, param.grad, (buffer,)), [Segment(0, 1001, step)])
    rounding_bounds.same_tensor(
        weight, param.detach(), rounding_bounds.sum_error(100)
    )  # twenty steps of five roundings


@pytest.mark.parametrize(("lr_decay", "decay"), [(0.0, 0.0), (0.1, 0.05)])
def test_adagrad_is_that_of_torch(lr_decay: float, decay: float) -> None:
    weight, total = normal(1001, 0), torch.zeros(1001)
    param = torch.nn.Parameter(weight.clone())
    optimizer = torch.optim.Adagrad([param], lr=0.1, lr_decay=lr_decay, weight_decay=decay, foreach=False)
    for number in range(1, 21):
        param.grad = normal(1001, number)
        optimizer.step()
        step = AdagradStep(0.1, lr_decay, 1e-10, decay, number)
        update(Partition(weight, param.grad, (total,)), [Segment(0, 1001, step)])
    rounding_bounds.same_tensor(
        weight, param.detach(), rounding_bounds.sum_error(160)
    )  # twenty steps of eight roundings


def test_lion_moves_by_the_sign_alone() -> None:
    weight, moment = torch.zeros(5), torch.tensor([1.0, -1.0, 0.0, 0.0, 2.0])
    grad = torch.tensor([1.0, -1.0, 0.0, math.nan, -1e9])
    update(Partition(weight, grad, (moment,)), [Segment(0, 5, LionStep(0.5, 0.9, 0.99, 0.0))])
    assert weight[:3].tolist() == [-0.5, 0.5, 0.0] and weight[3].isnan() and weight[4] == 0.5


segment_lists = st.lists(st.integers(0, 70_000), min_size=2, max_size=8, unique=True).map(sorted)


@settings(deadline=None, max_examples=examples(30), derandomize=True)
@given(
    segment_lists,
    st.lists(st.integers(0, 70_000), max_size=4).map(sorted),
    st.sampled_from([*STEPS]),
    st.sampled_from(WEIGHTS),
    st.sampled_from(ISAS),
    st.integers(1, 3),
)
def test_cuts_into_calls_change_no_bit(
    edges: list[int], cuts: list[int], name: str, weight_dtype: torch.dtype, isa: str, threads: int
) -> None:
    """Segments with other hyperparameters, in one call, and in calls that are cut anywhere, on any instruction set."""
    numel = 70_000
    base = STEPS[name]
    start = partition(numel, base, weight_dtype, torch.bfloat16, torch.float32)
    pairs = list(zip(edges[::2], edges[1::2], strict=False))
    segments = [Segment(a, b, base._replace(lr=base.lr * (i + 1))) for i, (a, b) in enumerate(pairs)]
    _native.configure("scalar", 1)
    uncut = clone(start)
    update(uncut, segments)
    untouched = torch.ones(numel, dtype=torch.bool)
    for a, b in pairs:
        untouched[a:b] = False
    assert torch.equal(uncut.weight[untouched], start.weight[untouched])
    _native.configure(isa, threads)
    parts = clone(start)
    for low, high in zip([0, *cuts], [*cuts, numel], strict=True):
        inside = [
            Segment(max(each.start, low) - low, min(each.stop, high) - low, each.step)
            for each in segments
            if each.start < high and each.stop > low
        ]
        view = Partition(
            parts.weight[low:high],
            parts.grad[low:high],
            tuple(moment[low:high] for moment in parts.moments),
            None if parts.residual is None else parts.residual[low:high],
            None if parts.master is None else parts.master[low:high],
        )
        update(view, inside)
    assert same(uncut, parts)
    # Each second segment with its gradient in a tensor of its own.
    own = [each._replace(grad=start.grad[each.start : each.stop].clone()) for each in segments[::2]]
    apart = clone(start)
    for segment in own:
        apart.grad[segment.start : segment.stop] = math.nan
    update(apart, sorted([*own, *segments[1::2]], key=lambda segment: segment.start))
    assert same(uncut, apart)


def test_a_gradient_of_a_segment_has_its_elements_and_the_dtype_of_the_others() -> None:
    part = partition(8, STEPS["adamw"], torch.float32, torch.float32, torch.float32)
    for grad, error in ((torch.ones(7), ValueError), (torch.ones(8, dtype=torch.bfloat16), TypeError)):
        with pytest.raises(error, match="grad: expected"):
            update(part, [Segment(0, 8, STEPS["adamw"], grad=grad)])


@settings(deadline=None, max_examples=examples(60), derandomize=True)
@given(
    st.lists(
        st.tuples(*[st.floats(width=32, allow_nan=False)] * 3, st.floats(0, width=32, allow_nan=False)),
        min_size=1,
        max_size=40,
    ),
    st.sampled_from([1, 2, 10, 10**7]),
    st.sampled_from([*STEPS]),
)
def test_extreme_values_follow_the_formula(
    values: list[tuple[float, float, float, float]], number: int, name: str
) -> None:
    """Denormals, 1e38, zero variance, infinities: what numpy gives, on every instruction set."""
    step = STEPS[name]
    if isinstance(step, AdamWStep | AdagradStep):
        step = step._replace(step=number)
    p, g, m, v = (torch.tensor(column, dtype=torch.float32) for column in zip(*values, strict=True))
    with np.errstate(all="ignore"):
        expected = formula(step, *(tensor.numpy() for tensor in (p, g, m, v)))
    moments = RULES[type(step)][1]
    for isa in ISAS:
        _native.configure(isa, 1)
        part = Partition(p.clone(), g, (m.clone(), v.clone())[:moments])
        update(part, [Segment(0, len(values), step)])
        for array, wanted in zip((part.weight, *part.moments), expected, strict=False):
            np.testing.assert_array_equal(array.numpy(), wanted)


def test_half_precision_is_that_of_torch() -> None:
    """Every fp16 pattern to fp32, and fp32 values around every step of fp16, ties among them."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    for isa in ISAS:
        _native.configure(isa, 1)
        out = torch.empty(1 << 16)
        kernels.accumulate(out, patterns, add=False)
        np.testing.assert_array_equal(out.numpy(), patterns.float().numpy())
        exact = patterns.float()
        exact = exact[exact.isfinite()]
        near = torch.tensor([-4097, -4096, -4095, -1, 0, 1, 4095, 4096, 4097], dtype=torch.int32)
        beside = (exact.view(torch.int32)[:, None] + near).view(torch.float32).flatten()
        edges = torch.tensor([65504.0, 65519.99, 65520.0, 1e38, math.inf, -math.inf, 1e-45])
        values = torch.cat([beside, edges])
        half = torch.empty(values.numel(), dtype=torch.float16)
        kernels.accumulate(half, values, add=False)
        np.testing.assert_array_equal(half.numpy(), values.half().numpy())


def test_what_does_not_fit_is_refused() -> None:
    step = STEPS["adamw"]
    part = partition(8, step, torch.bfloat16, torch.bfloat16, torch.float32)
    for segments, error, words in (
        ([Segment(0, 9, step)], ValueError, "within 8 elements"),
        ([Segment(4, 8, step), Segment(0, 4, step)], ValueError, "in order"),
        ([Segment(0, 4, step), Segment(4, 8, STEPS["lion"])], TypeError, "in all segments"),
        ([Segment(0, 8, STEPS["lion"])], ValueError, "expected 1 for lion, got 2"),
        ([Segment(0, 8, step._replace(step=0))], ValueError, "from 1"),
        ([Segment(0, 8, None)], TypeError, "AdamWStep"),
    ):
        with pytest.raises(error, match=words):
            update(part, segments)
    for wrong, words in (
        (part._replace(residual=None), "residual: expected one"),
        (part._replace(master=torch.zeros(8)), "master: expected none"),
        (part._replace(weight=torch.zeros(8, dtype=torch.float16)), "residual: expected none"),
        (part._replace(moments=(torch.zeros(8), torch.zeros(8).bfloat16())), r"moments\[1\]"),
        (part._replace(grad=torch.zeros(8, dtype=torch.float64)), "grad"),
    ):
        with pytest.raises(TypeError, match=words):
            update(wrong, [Segment(0, 8, step)])
    lion = partition(8, STEPS["lion"], torch.float32, torch.float32, torch.float16)
    with pytest.raises(TypeError, match=r"moments\[0\]"):
        update(lion, [Segment(0, 8, STEPS["lion"])])
    update(part, [])


def test_a_probe_leaves_the_values() -> None:
    part = partition(100, STEPS["adamw"], torch.bfloat16, torch.bfloat16, torch.float32)
    before = clone(part)
    kernels.probe(part)
    assert same(part, before)
