"""bf16 moments are rounded without a bias, by bits that depend on the element's number and the update alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import kernels
from offload.kernels import LambSegment, LambStep, Noise, Partition, Segment, SGDStep, _native, noise_stream, update
from offload.kernels.update import RULES, keyed
from tests.kernels.test_kernels_formulas import STEPS, WEIGHTS, clone, formula, master_of, partition, same
from tests.support.kernel_inputs import ISAS, default_settings, normal
from tests.support.sampling import examples

__all__ = ["default_settings"]  # fixtures

pytestmark = pytest.mark.numeric

WORD, LONG = (1 << 32) - 1, (1 << 64) - 1
NOISE = Noise(noise_stream(7, 3, 11), 12_345)
WITH_MOMENTS = [name for name, step in STEPS.items() if RULES[type(step)][1]]
COPY = SGDStep(0.0, 0.5, 0.0, 0.0, False, True)
"""Sets the momentum buffer to the gradient, and leaves the weight."""


def mixed(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & LONG
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & LONG
    return value ^ (value >> 31)


def random_bits(stream: int, elements: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The 32 bits of each element, in numpy: the generator once more, as its page describes it."""
    keys = [mixed(stream + 0x9E3779B97F4A7C15 * (int(each) >> 32) & LONG) for each in elements]
    before, between = (np.array([key >> by & WORD for key in keys], np.uint32) for by in (0, 32))
    x = (elements & WORD).astype(np.uint32) ^ before
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x21F0AAAD)
    x ^= x >> np.uint32(15)
    x += between
    x *= np.uint32(0xD35A2D97)
    return x ^ x >> np.uint32(15)


def rounded(values: np.ndarray[Any, Any], random: np.ndarray[Any, Any]) -> torch.Tensor:
    """`values`, fp32, with the lower 16 bits of `random` added below the bits that bf16 keeps."""
    bits = values.view(np.uint32)
    found = (bits + (random & np.uint32(0xFFFF))) >> np.uint32(16)
    found = np.where(np.isnan(values), np.uint32(0x7FC0), found)
    return torch.from_numpy(found.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def bf16(values: torch.Tensor, noise: Noise) -> torch.Tensor:
    """`values` as the kernels round them."""
    moment = torch.zeros(len(values), dtype=torch.bfloat16)
    update(Partition(torch.zeros(len(values)), values, (moment,)), [Segment(0, len(values), COPY, noise)])
    return moment


@pytest.mark.sample(9)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", WITH_MOMENTS)
def test_every_rule_computes_its_formula_and_rounds_its_moments(name: str, isa: str) -> None:
    """The weight moves by the moments before they are rounded."""
    _native.configure(isa, 1)
    step, numel = STEPS[name], 4099
    for weight_dtype, grad_dtype in zip(WEIGHTS, (torch.float16, torch.bfloat16, torch.float32), strict=True):
        part = partition(numel, step, weight_dtype, grad_dtype, torch.bfloat16)
        count = len(part.moments)
        old = [moment.float().numpy() for moment in part.moments] + [np.zeros(numel, np.float32)] * (2 - count)
        p, *new = formula(step, master_of(part).numpy(), part.grad.float().numpy(), *old)
        update(part, [Segment(0, numel, step, NOISE)])
        assert master_of(part).numpy().tobytes() == p.tobytes()
        random = random_bits(NOISE.stream, np.arange(numel) + NOISE.element)
        for got, exact, half in zip(part.moments, new, (random, random >> np.uint32(16)), strict=False):
            assert torch.equal(got.view(torch.int16), rounded(exact, half).view(torch.int16))


@pytest.mark.parametrize("isa", ISAS)
def test_special_values_stay_what_they_are(isa: str) -> None:
    """Zeros, values of bf16, infinities and NaN, for many random bits; a value beyond the largest may become inf."""
    _native.configure(isa, 1)
    kept = torch.tensor([0.0, -0.0, 1.0, -3.5, 1e-39, math.inf, -math.inf, math.nan]).bfloat16().float()
    for stream in range(64):
        found = bf16(kept, Noise(noise_stream(0, 0, stream), 0))
        assert found[-1].isnan() and torch.equal(found.view(torch.int16)[:-1], kept.bfloat16().view(torch.int16)[:-1])
    above = torch.full((1000,), torch.finfo(torch.float32).max)
    found = bf16(above, NOISE)
    assert found.isinf().any() and found.float().max() == math.inf


SPREAD = [1.0, 1 + 2**-12, -1.3, math.pi, -7e-5, 3.1e-30, 1e-39, 2.0 - 2**-23, 65280.5]


@pytest.mark.parametrize("value", SPREAD)
def test_the_mean_of_many_roundings_is_the_value(value: float) -> None:
    """Each of n roundings is one of two neighbours a spacing apart, so the mean's deviation is spacing / sqrt(4 n)."""
    numel = 1 << 20
    exact = torch.tensor([value])
    found = bf16(exact.expand(numel).contiguous(), NOISE).double()
    bits = exact.view(torch.int32)
    low = (bits & ~0xFFFF).view(torch.float32).double()
    high = ((bits & ~0xFFFF) + 0x10000).view(torch.float32).double()
    assert ((found == low) | (found == high)).all(), "one of the two neighbours"
    spacing = abs(float(high - low))
    assert abs(float(found.mean() - exact.double())) <= 6 * spacing / math.sqrt(4 * numel)


def test_steps_and_elements_are_independent() -> None:
    """Bits of one element in many steps, and of both moments of a step, are as far from equal as chance has them."""
    numel, steps = 1 << 14, 16
    value = torch.full((numel,), 1 + 2**-8)  # half way between two neighbours
    ups = torch.stack([bf16(value, Noise(noise_stream(0, 0, step), 0)) > 1 for step in range(steps)])
    units = torch.stack([bf16(value, Noise(noise_stream(0, unit, 1), 0)) > 1 for unit in range(steps)])
    seeds = torch.stack([bf16(value, Noise(noise_stream(seed, 0, 1), 0)) > 1 for seed in range(steps)])
    shifted = torch.stack([bf16(value, Noise(NOISE.stream, 2**20 * each)) > 1 for each in range(steps)])
    bound = 6 / math.sqrt(4 * numel)
    for drawn in (ups, units, seeds, shifted):
        for one in range(steps):
            for other in range(one):
                assert abs((drawn[one] == drawn[other]).double().mean() - 0.5) < bound
    part = partition(numel, STEPS["adamw"], torch.float32, torch.float32, torch.bfloat16)
    both = Partition(part.weight, torch.ones(numel), (torch.zeros(numel).bfloat16(), torch.zeros(numel).bfloat16()))
    update(both, [Segment(0, numel, STEPS["adamw"]._replace(grad_scale=1.0), NOISE)])
    first, second = ((moment.float() > moment.float().mean()) for moment in both.moments)
    mean_of_both = (first & second).double().mean() - first.double().mean() * second.double().mean()
    assert abs(mean_of_both) < bound


@settings(deadline=None, max_examples=examples(30), derandomize=True)
@given(
    st.lists(st.integers(0, 70_000), max_size=5).map(sorted),
    st.sampled_from(WITH_MOMENTS),
    st.sampled_from(ISAS),
    st.integers(1, 3),
    st.sampled_from([0, 5, (1 << 32) - 40_001, (1 << 33) - 1, (1 << 40) - 32]),
)
def test_cuts_threads_and_instruction_sets_change_no_bit(
    cuts: list[int], name: str, isa: str, threads: int, element: int
) -> None:
    """Also where the number of an element exceeds 32 bits, between two calls or within one."""
    numel, step = 70_000, STEPS[name]
    noise = Noise(NOISE.stream, element)
    start = partition(numel, step, torch.bfloat16, torch.bfloat16, torch.bfloat16)
    _native.configure("scalar", 1)
    uncut = clone(start)
    update(uncut, [Segment(0, numel, step, noise)])
    _native.configure(isa, threads)
    for low, high in zip([0, *cuts], [*cuts, numel], strict=True):
        view = Partition(
            start.weight[low:high],
            start.grad[low:high],
            tuple(moment[low:high] for moment in start.moments),
            None if start.residual is None else start.residual[low:high],
        )
        update(view, [Segment(0, high - low, step, noise.after(low))])
    assert same(uncut, start)
    random = random_bits(noise.stream, np.arange(numel, dtype=np.int64) + element)
    exact = normal(numel, 5)
    assert torch.equal(bf16(exact, noise).view(torch.int16), rounded(exact.numpy(), random).view(torch.int16))


LAMB = LambStep(1e-2, 0.9, 0.99, 1e-6, 0.1, 3)


@pytest.mark.parametrize("element", [0, (1 << 32) - 10_000])
@pytest.mark.parametrize("isa", ISAS)
def test_lamb_takes_the_norm_of_the_direction_in_which_it_moves(isa: str, element: int) -> None:
    """Both of its passes see the rounded moments, and no division into segments changes a bit."""
    numel = 3 * 4096 + 100
    start = partition(numel, STEPS["adamw"], torch.float32, torch.float32, torch.bfloat16)
    noise = Noise(NOISE.stream, element)
    f = np.float32
    g = start.grad.numpy()
    m = f(0.9) * start.moments[0].float().numpy() + f(1 - 0.9) * g
    v = f(0.99) * start.moments[1].float().numpy() + f(1 - 0.99) * g * g
    random = random_bits(noise.stream, np.arange(numel, dtype=np.int64) + element)
    expected = rounded(m, random), rounded(v, random >> np.uint32(16))
    m, v = (each.float().numpy() for each in expected)
    weight = start.weight.numpy().copy()
    direction = m / (np.sqrt(v) + f(1e-6)) + f(0.1) * weight
    _native.configure("scalar", 1)
    uncut = clone(start)
    (sums,) = kernels.lamb_moments(uncut, [LambSegment(0, numel, LAMB, noise)])
    assert all(torch.equal(one, other) for one, other in zip(uncut.moments, expected, strict=True))
    np.testing.assert_allclose(sums[:, 1].sum(), np.square(direction.astype(np.float64)).sum(), rtol=1e-12)
    ratio = kernels.lamb_ratio(LAMB, [sums])
    kernels.lamb_move(uncut, [LambSegment(0, numel, LAMB)], [ratio])
    assert all(torch.equal(one, other) for one, other in zip(uncut.moments, expected, strict=True)), "which are kept"
    assert (
        uncut.weight.numpy().tobytes()
        == (weight + f(-(LAMB.lr * (np.sqrt(1 - 0.99**3) / (1 - 0.9**3)) * ratio)) * direction).tobytes()
    )
    _native.configure(isa, 2)
    segments = [(0, 4096), (4096, 12_288), (12_288, numel)]
    steps = [LambSegment(a, b, LAMB, noise.after(a)) for a, b in segments]
    pieces = kernels.lamb_moments(start, steps)
    assert torch.equal(torch.cat(pieces), sums)
    kernels.lamb_move(start, steps, [ratio] * 3)
    assert same(uncut, start)


def test_a_segment_is_cut_where_its_key_changes() -> None:
    """As the launches on a GPU take it."""
    parts = list(keyed(10, 110, Noise(5, (1 << 32) - 30)))
    assert [(each.start, each.stop, each.element) for each in parts] == [(10, 40, WORD - 29), (40, 110, 0)]
    assert parts[0].before != parts[1].before and parts[0].between != parts[1].between
    assert not list(keyed(10, 10, Noise(5, 0))) and len(list(keyed(0, 7, Noise(5, 1 << 40)))) == 1


def test_bf16_moments_need_a_noise() -> None:
    """Rounded to nearest they would stay where they are in most steps."""
    part = partition(8, STEPS["adamw"], torch.float32, torch.float32, torch.bfloat16)
    before = clone(part)
    for call, segment in (
        (update, Segment(0, 8, STEPS["adamw"])),
        (kernels.lamb, LambSegment(0, 8, LAMB)),
    ):
        with pytest.raises(ValueError, match="noise: expected one in each segment"):
            call(part, [segment])
    assert same(part, before)
