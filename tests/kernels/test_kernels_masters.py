"""Masters and moments of few bits: their rounding, blocks and codes."""

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
from offload.kernels.update import (
    BLOCK,
    ROOTS,
    RULES,
    AdagradStep,
    AdamWStep,
    blocks_of,
    decode_moments,
    encode_moments,
)
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
    rounded_bits = (bits + (random & np.uint32(0xFFFF))) >> np.uint32(16)
    rounded_bits = np.where(np.isnan(values), np.uint32(0x7FC0), rounded_bits)
    return torch.from_numpy(rounded_bits.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


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
        for actual, exact, half in zip(part.moments, new, (random, random >> np.uint32(16)), strict=False):
            assert torch.equal(actual.view(torch.int16), rounded(exact, half).view(torch.int16))


@pytest.mark.parametrize("isa", ISAS)
def test_special_values_stay_what_they_are(isa: str) -> None:
    """Zeros, values of bf16, infinities and NaN, for many random bits; a value beyond the largest may become inf."""
    _native.configure(isa, 1)
    kept = torch.tensor([0.0, -0.0, 1.0, -3.5, 1e-39, math.inf, -math.inf, math.nan]).bfloat16().float()
    for stream in range(64):
        values = bf16(kept, Noise(noise_stream(0, 0, stream), 0))
        assert values[-1].isnan() and torch.equal(values.view(torch.int16)[:-1], kept.bfloat16().view(torch.int16)[:-1])
    above = torch.full((1000,), torch.finfo(torch.float32).max)
    values = bf16(above, NOISE)
    assert values.isinf().any() and values.float().max() == math.inf


SPREAD = [1 + 2**-12, -1.3, 1e-39, 2.0 - 2**-23, 65280.5]


def test_the_mean_of_many_roundings_is_the_value() -> None:
    """Each of n roundings is one of two neighbours a spacing apart, so the mean's deviation is spacing / sqrt(4 n)."""
    for value in SPREAD:
        print(value)
        numel = 1 << 20
        exact = torch.tensor([value])
        values = bf16(exact.expand(numel).contiguous(), NOISE).double()
        bits = exact.view(torch.int32)
        low = (bits & ~0xFFFF).view(torch.float32).double()
        high = ((bits & ~0xFFFF) + 0x10000).view(torch.float32).double()
        assert ((values == low) | (values == high)).all(), "one of the two neighbours"
        spacing = abs(float(high - low))
        assert abs(float(values.mean() - exact.double())) <= 6 * spacing / math.sqrt(4 * numel)


def test_steps_and_elements_are_independent() -> None:
    """Bits of one element in many steps, and of both moments of a step, are as far from equal as chance has them."""
    numel, steps = 1 << 14, 16
    value = torch.full((numel,), 1 + 2**-8)  # half way between two neighbours
    ups = torch.stack([bf16(value, Noise(noise_stream(0, 0, step), 0)) > 1 for step in range(steps)])
    units = torch.stack([bf16(value, Noise(noise_stream(0, unit, 1), 0)) > 1 for unit in range(steps)])
    seeds = torch.stack([bf16(value, Noise(noise_stream(seed, 0, 1), 0)) > 1 for seed in range(steps)])
    shifted = torch.stack([bf16(value, Noise(NOISE.stream, 2**20 * step)) > 1 for step in range(steps)])
    bound = 6 / math.sqrt(4 * numel)
    for drawn in (ups, units, seeds, shifted):
        for left in range(steps):
            for right in range(left):
                assert abs((drawn[left] == drawn[right]).double().mean() - 0.5) < bound
    part = partition(numel, STEPS["adamw"], torch.float32, torch.float32, torch.bfloat16)
    both = Partition(part.weight, torch.ones(numel), (torch.zeros(numel).bfloat16(), torch.zeros(numel).bfloat16()))
    update(both, [Segment(0, numel, STEPS["adamw"]._replace(grad_scale=1.0), NOISE)])
    first, second = ((moment.float() > moment.float().mean()) for moment in both.moments)
    mean_of_both = (first & second).double().mean() - first.double().mean() * second.double().mean()
    assert abs(mean_of_both) < bound


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
    steps = [LambSegment(a, b, LAMB, noise.after(a), start.grad[a:b].clone()) for a, b in segments]
    start.grad[4096:] = math.nan  # each segment has its own
    pieces = kernels.lamb_moments(start, steps)
    assert torch.equal(torch.cat(pieces), sums)
    kernels.lamb_move(start, steps, [ratio] * 3)
    assert same(uncut, start)


def test_bf16_moments_need_a_noise() -> None:
    """Rounded to nearest they would stay where they are in most steps."""
    part = partition(8, STEPS["adamw"], torch.float32, torch.float32, torch.bfloat16)
    before = clone(part)
    for call, segment in ((update, Segment(0, 8, STEPS["adamw"])), (kernels.lamb, LambSegment(0, 8, LAMB))):
        with pytest.raises(ValueError, match="noise: expected one in each segment"):
            call(part, [segment])
    assert same(part, before)


F = np.float32
CODES_NOISE = Noise(noise_stream(7, 3, 11), 1024)
"""Sets the momentum buffer to the gradient, and leaves the weight."""
SUM = AdagradStep(0.0, 0.0, 1e-10, 0.0, 1)
"""Adds the square of the gradient to the sum, and leaves the weight."""

Array = np.ndarray[Any, Any]


def reference(values: Array, root: bool, chances: Array | int) -> tuple[Array, Array]:
    """Codes and scales in numpy, as the format page describes them; each operation is rounded once."""
    numel, top = len(values), 255 if root else 127
    padded = np.zeros(blocks_of(numel) * BLOCK, F)
    padded[:numel] = np.sqrt(values) if root else values
    blocks = padded.reshape(-1, BLOCK)
    largest = np.abs(blocks).max(1)
    finite = np.isfinite(largest)
    cut = ((largest / F(top)).view(np.uint32) & np.uint32(0xFFFFFF00)).view(F)
    scales = np.where(largest == 0, F(0), np.where(finite, np.maximum(cut, F(2**-100)), F(np.nan)))
    whole = finite & (largest > 0)
    factors = np.where(whole, F(65536) / np.where(whole, scales, F(1)), F(0)).astype(F)
    magnitudes = np.where(whole[:, None], np.abs(blocks), F(0))
    chances = np.broadcast_to(np.asarray(chances), (numel,))
    wide = np.zeros(len(padded), np.int64)
    wide[:numel] = chances
    fixed = (magnitudes * factors[:, None]).astype(F).astype(np.int64)
    codes = np.minimum((fixed + wide.reshape(-1, BLOCK)) >> 16, top)
    if root:
        codes = np.maximum(codes, magnitudes > 0)
        return codes.reshape(-1)[:numel].astype(np.uint8), scales.astype(F)
    return (codes * np.where(np.signbit(blocks), -1, 1)).reshape(-1)[:numel].astype(np.int8), scales.astype(F)


def chances_of(random: Array) -> Array:
    return np.clip(random.astype(np.int64) & 0xFFFF, 4, 65531)


def moment_values(codes: Array, scales: Array, root: bool) -> Array:
    moments = (codes.astype(F) * np.repeat(scales, BLOCK)[: len(codes)]).astype(F)
    return (moments * moments).astype(F) if root else moments


def coded(part: Partition, roots: tuple[bool, ...]) -> Partition:
    """A partition whose fp32 moments are codes, rounded to nearest."""
    numel = part.weight.numel()
    scales = torch.zeros(blocks_of(numel), len(part.moments))
    moments = []
    for number, (moment, root) in enumerate(zip(part.moments, roots, strict=True)):
        moments.append(torch.zeros(numel, dtype=torch.uint8 if root else torch.int8))
        encode_moments(moment, moments[-1], scales, number)
    return part._replace(moments=tuple(moments), scales=scales)


def decoded(part: Partition) -> list[torch.Tensor]:
    assert part.scales is not None
    moments = []
    for number, moment in enumerate(part.moments):
        moments.append(torch.empty(len(moment)))
        decode_moments(moment, part.scales, number, moments[-1])
    return moments


def stored(part: Partition) -> list[bytes]:
    tensors = [part.weight, *part.moments, part.scales, part.residual, part.master]
    return [tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors if tensor is not None]


def clone_codes(part: Partition) -> Partition:
    return Partition(
        part.weight.clone(),
        part.grad,
        tuple(each.clone() for each in part.moments),
        None if part.residual is None else part.residual.clone(),
        None if part.master is None else part.master.clone(),
        None if part.scales is None else part.scales.clone(),
    )


def steps_of(values: torch.Tensor, noise: Noise, root: bool) -> torch.Tensor:
    """The codes of `values` (their squares' roots, if `root`) as a kernel rounds them, of one block each 256."""
    part = Partition(
        torch.zeros(len(values)),
        values,
        (torch.zeros(len(values), dtype=torch.uint8 if root else torch.int8),),
        scales=torch.zeros(blocks_of(len(values)), 1),
    )
    update(part, [Segment(0, len(values), SUM if root else COPY, noise)])
    return part.moments[0]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", WITH_MOMENTS)
def test_every_rule_computes_its_formula_and_rounds_its_moments_codes(name: str, isa: str) -> None:
    """The weight moves by the moments before they are rounded; codes and scales are those of the reference."""
    _native.configure(isa, 1)
    step, numel = STEPS[name], 5 * BLOCK + 77
    roots = ROOTS[RULES[type(step)][0]]
    for weight_dtype in (torch.float32, torch.bfloat16, torch.float16):
        part = coded(partition(numel, step, weight_dtype, torch.bfloat16, torch.float32), roots)
        old = [each.numpy() for each in decoded(part)] + [np.zeros(numel, F)] * (2 - len(roots))
        p, *new = formula(step, master_of(part).numpy(), part.grad.float().numpy(), *old)
        update(part, [Segment(0, numel, step, CODES_NOISE)])
        assert master_of(part).numpy().tobytes() == p.astype(F).tobytes()
        random = random_bits(CODES_NOISE.stream, np.arange(numel) + CODES_NOISE.element)
        assert part.scales is not None
        for number, (root, half) in enumerate(zip(roots, (random, random >> np.uint32(16)), strict=False)):
            codes, scales = reference(new[number].astype(F), root, chances_of(half))
            assert part.moments[number].numpy().tobytes() == codes.tobytes()
            assert part.scales[:, number].numpy().tobytes() == scales.tobytes()
            expected = moment_values(codes, scales, root)
            assert decoded(part)[number].numpy().tobytes() == expected.tobytes()


magnitudes = st.floats(2.0**-60, 2.0**60, width=32)


@settings(deadline=None, max_examples=examples(60), derandomize=True)
@given(
    st.lists(
        st.one_of(st.just(0.0), magnitudes, magnitudes.map(lambda magnitude: -magnitude)), min_size=1, max_size=600
    ),
    st.booleans(),
    st.sampled_from(ISAS),
    st.integers(0, 2**63),
)
def test_a_value_is_at_most_a_step_of_codes_from_what_is_stored(
    values: list[float], root: bool, isa: str, stream: int
) -> None:
    """Half a step if it is rounded to nearest, but that no root is rounded to zero."""
    _native.configure(isa, 1)
    exact = torch.tensor(values)
    exact = exact.abs() if root else exact
    top = 255 if root else 127
    nearest = torch.zeros(len(exact), dtype=torch.uint8 if root else torch.int8)
    scales = torch.zeros(blocks_of(len(exact)), 1)
    encode_moments(exact.square() if root else exact, nearest, scales, 0)
    by_chance = steps_of(exact, Noise(stream, 0), root)
    for codes, bound in ((nearest, 0.5), (by_chance, 1.0)):
        step = torch.repeat_interleave(scales[:, 0].double(), BLOCK)[: len(exact)]
        error = (codes.double() * step - exact.double()).abs()
        # The scale is cut off to 16 bits, and the quotient rounded three times.
        bounds = step * (bound + top * 2.0**-15 * 1.01 + top * 2.0**-21)
        if root:
            assert ((codes > 0) == (exact > 0)).all()
            bounds = torch.where(codes == 1, step * 1.01, bounds)
        assert (error <= bounds).all()
    for block in range(blocks_of(len(exact))):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        if exact[part].any():
            assert by_chance[part].int().abs().max() == nearest[part].int().abs().max() == top, "the whole range"


@settings(deadline=None, max_examples=examples(40), derandomize=True)
@given(st.integers(0, 2**32), st.booleans(), st.sampled_from(ISAS), st.floats(-50, 30))
def test_what_is_stored_is_encoded_to_the_same_bits(seed: int, root: bool, isa: str, power: float) -> None:
    """To nearest, and by any chance: a parameter whose moments do not change keeps its bytes."""
    _native.configure(isa, 1)
    numel = 3 * BLOCK - 9
    given_values = normal(numel, seed % 1000) * 2.0**power
    codes = torch.zeros(numel, dtype=torch.uint8 if root else torch.int8)
    scales = torch.zeros(blocks_of(numel), 1)
    encode_moments(given_values.square() if root else given_values, codes, scales, 0)
    values = torch.empty(numel)
    decode_moments(codes, scales, 0, values)
    again, scales_again = torch.zeros_like(codes), torch.zeros_like(scales)
    encode_moments(values, again, scales_again, 0)
    assert torch.equal(again, codes) and torch.equal(scales_again, scales)
    # A sum to which nothing is added, and a momentum that a group leaves alone.
    part = Partition(torch.zeros(numel), torch.zeros(numel), (again,), scales=scales_again)
    still = SUM if root else SGDStep(0.0, 0.0, 0.0, 0.0, False, False)
    for number in range(20):
        update(part, [Segment(0, numel, still, Noise(noise_stream(seed, 0, number), 0))])
        assert torch.equal(again, codes) and torch.equal(scales_again, scales)


@pytest.mark.parametrize("isa", ISAS)
def test_special_values(isa: str) -> None:
    """A block with inf or NaN becomes NaN; zeros stay zeros, and other blocks what they are."""
    _native.configure(isa, 1)
    values = torch.ones(5 * BLOCK)
    values[BLOCK : 2 * BLOCK] = 0.0
    values[2 * BLOCK + 3], values[3 * BLOCK], values[4 * BLOCK : 5 * BLOCK] = math.nan, math.inf, -0.0
    for root in (False, True):
        part = Partition(
            torch.zeros(len(values)),
            values,
            (torch.zeros(len(values), dtype=torch.uint8 if root else torch.int8),),
            scales=torch.ones(5, 1),
        )
        update(part, [Segment(0, len(values), SUM if root else COPY, CODES_NOISE)])
        (moment,) = decoded(part)
        assert (moment[:BLOCK] - 1).abs().max() < 1e-4 and not moment[BLOCK : 2 * BLOCK].any()
        assert moment[2 * BLOCK : 4 * BLOCK].isnan().all() and not moment[4 * BLOCK :].any()
        assert part.scales is not None and not part.scales[1].any() and not part.scales[4].any()


@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("value", [0.3, 13.4, 126.5])
def test_the_mean_of_many_roundings_is_the_value_codes(value: float, root: bool) -> None:
    """In codes; the chance has 16 bits of which four values at each end are not used, hence up to 2^-13 more."""
    numel = 1 << 18
    values = torch.full((numel,), value)
    top = 255.0 if root else 127.0
    values[::BLOCK] = top  # so that the scale is 1
    rounded = steps_of(values, CODES_NOISE, root).double().view(-1, BLOCK)[:, 1:]
    low, high = math.floor(value), math.floor(value) + 1
    assert ((rounded == max(low, int(root))) | (rounded == high)).all(), "one of the two neighbours"
    expected = max(value, 1.0) if root else value  # no root is zero
    assert abs(float(rounded.mean()) - expected) <= 6 / math.sqrt(4 * rounded.numel()) + 2**-13
    if not root:
        assert torch.equal(steps_of(-values, CODES_NOISE, root), -steps_of(values, CODES_NOISE, root))


@pytest.mark.parametrize("element", [0, (1 << 32) - 8192])
@pytest.mark.parametrize("isa", ISAS)
def test_lamb_takes_the_norm_of_the_direction_in_which_it_moves_codes(isa: str, element: int) -> None:
    """Both of its passes see the rounded moments, and no division into segments changes a bit."""
    numel = 3 * 4096 + 100
    start = coded(partition(numel, STEPS["adamw"], torch.float32, torch.float32, torch.float32), (False, True))
    noise = Noise(CODES_NOISE.stream, element)
    g = start.grad.numpy()
    m, v = (each.numpy() for each in decoded(start))
    m, v = F(0.9) * m + F(1 - 0.9) * g, F(0.99) * v + F(1 - 0.99) * g * g
    random = random_bits(noise.stream, np.arange(numel, dtype=np.int64) + element)
    halves = (random, random >> np.uint32(16))
    expected = [reference(each, bool(root), chances_of(halves[root])) for root, each in enumerate((m, v))]
    m, v = (moment_values(codes, scales, bool(root)) for root, (codes, scales) in enumerate(expected))
    weight = start.weight.numpy().copy()
    direction = m / (np.sqrt(v) + F(1e-6)) + F(0.1) * weight
    _native.configure(isa, 1)
    whole = clone_codes(start)
    (sums,) = kernels.lamb_moments(whole, [LambSegment(0, numel, LAMB, noise)])
    for number, (codes, scales) in enumerate(expected):
        assert whole.moments[number].numpy().tobytes() == codes.tobytes()
        assert whole.scales is not None and whole.scales[:, number].numpy().tobytes() == scales.tobytes()
    assert float(sums[:, 1].sum()) == pytest.approx(float((direction.astype(np.float64) ** 2).sum()), rel=1e-6)
    after = stored(whole)[1:]
    kernels.lamb_move(whole, [LambSegment(0, numel, LAMB)], [kernels.lamb_ratio(LAMB, [sums])])
    assert stored(whole)[1:] == after, "the second pass leaves the moments"
    cut = clone_codes(start)
    pieces = [LambSegment(0, 4096, LAMB, noise), LambSegment(4096, numel, LAMB, noise.after(4096))]
    parts = kernels.lamb_moments(cut, pieces)
    kernels.lamb_move(cut, pieces, [kernels.lamb_ratio(LAMB, parts)] * 2)
    assert stored(cut) == stored(whole)


@pytest.mark.parametrize("moment", [0, 1])
def test_a_part_of_a_block_is_decoded(moment: int) -> None:
    numel = 3 * BLOCK
    part = coded(partition(numel, STEPS["adamw"], torch.float32, torch.float32, torch.float32), (False, True))
    whole = decoded(part)[moment]
    assert part.scales is not None
    for start, stop in ((0, 5), (10, 300), (255, 257), (511, 768), (300, 300)):
        scales = part.scales[start // BLOCK : blocks_of(start % BLOCK + stop - start) + start // BLOCK]
        values = torch.empty(stop - start)
        decode_moments(part.moments[moment][start:stop], scales, moment, values, start % BLOCK)
        assert torch.equal(values, whole[start:stop])


def _refused() -> dict[str, tuple[Partition, list[Segment], str]]:
    step: AdamWStep = STEPS["adamw"]  # type: ignore[assignment]
    part = coded(partition(600, step, torch.float32, torch.float32, torch.float32), (False, True))
    first, second = part.moments
    assert part.scales is not None
    segment_list = [Segment(0, 600, step, CODES_NOISE)]
    return {
        "no noise": (part, [Segment(0, 600, step)], "since the moments are in 8 bits"),
        "within a block": (part, [Segment(100, 600, step, CODES_NOISE)], "begin at a multiple of 256"),
        "noise within a block": (part, [Segment(0, 600, step, CODES_NOISE.after(1))], "begin at a multiple of 256"),
        "no scales": (part._replace(scales=None), segment_list, "expected them for moments in 8 bits"),
        "scales of fp32": (part._replace(moments=(torch.zeros(600),) * 2), segment_list, "and for no others"),
        "few scales": (part._replace(scales=part.scales[:2]), segment_list, r"expected shape \(3, 2\)"),
        "the wrong signs": (part._replace(moments=(second, first)), segment_list, "expected a tensor of torch.int8"),
    }


def test_wrong_arguments_are_refused() -> None:
    for name in _refused():
        print(name)
        part, segments, message = _refused()[name]
        before = stored(part)
        with pytest.raises((ValueError, TypeError), match=message):
            update(part, segments)
        assert stored(part) == before
