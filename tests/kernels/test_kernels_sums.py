"""Gradients add up as torch adds them, with the sums of squares of the stored values; masters are split exactly."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import kernels
from offload.kernels.sums import Sum
from tests.support import rounding_bounds
from tests.support.sampling import examples

pytestmark = pytest.mark.numeric

SIZES = [0, 1, 15, 16, 17, 4095, 4096, 4097, 32768, 32769, 100003]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def normal(numel: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def float64_sum(values: torch.Tensor) -> float:
    return float(np.square(values.double().numpy()).sum())


@pytest.mark.parametrize("add", [False, True])
def test_gradients_are_added_as_torch_adds_them(add: bool) -> None:
    for numel, out_dtype, grad_dtype in itertools.product(SIZES, DTYPES, DTYPES):
        case = numel, out_dtype, grad_dtype
        out, grad = normal(numel, 0, out_dtype), normal(numel, 1, grad_dtype)
        expected = (out.float() + grad.float() if add else grad).to(out_dtype)
        total = kernels.accumulate(out, grad, add=add)
        assert torch.equal(out, expected), case
        bound = rounding_bounds.sum_error(numel, "fp64")
        assert total == pytest.approx(float64_sum(expected), rel=bound, abs=0), case
        assert total == kernels.sum_squares(out), case


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_that_are_summed_in_one_call_have_the_bits_of_a_call_each(dtype: torch.dtype) -> None:
    """A chunk may be longer or shorter than a thread's share, and the last one is shorter than the others."""
    numel = 3 * 65536 + 5000
    for chunk, add in itertools.product((1024, 32768, 65536, 1 << 22), (False, True)):
        out, grad = normal(numel, 0, torch.float32), normal(numel, 1, dtype)
        expected, parts = out.clone(), [slice(start, start + chunk) for start in range(0, numel, chunk)]
        squares = [kernels.accumulate(expected[part], grad[part], add=add) for part in parts]
        assert Sum(out).accumulate(grad, add=add, chunk=chunk) == squares and torch.equal(out, expected), (chunk, add)
        assert kernels.squares_of_chunks(out, chunk) == squares
    with pytest.raises(ValueError, match="a chunk of 5000"):
        kernels.squares_of_chunks(out, 5000)


def test_a_sum_that_is_not_finite_shows() -> None:
    out = torch.zeros(5000, dtype=torch.bfloat16)
    grad = torch.zeros(5000)
    grad[4999] = float("inf")
    assert kernels.accumulate(out, grad, add=True) == math.inf
    grad[17] = float("nan")
    assert math.isnan(kernels.accumulate(out, grad, add=True))
    assert out.view(torch.int16)[17] == 0x7FC0


def test_denormals_count_whatever_the_callers_mode() -> None:
    tiny = torch.full((1000,), 1e-42)
    expected = kernels.sum_squares(tiny)
    assert expected > 0
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        assert kernels.sum_squares(tiny) == expected
        out = torch.zeros(1000)
        assert kernels.accumulate(out, tiny, add=True) == expected
    finally:
        torch.set_flush_denormal(False)


def test_wrong_tensors_are_refused() -> None:
    with pytest.raises(TypeError, match=r"x: expected a tensor of torch.bfloat16 or .*, got torch.int16"):
        kernels.sum_squares(torch.zeros(3, dtype=torch.int16))
    with pytest.raises(ValueError, match=r"grad: expected shape \(3,\), got \(4,\)"):
        kernels.accumulate(torch.zeros(3), torch.zeros(4), add=True)
    with pytest.raises(TypeError, match="master"):
        kernels.split_master(torch.zeros(3).half(), torch.zeros(3).bfloat16(), torch.zeros(3, dtype=torch.int16))
    with pytest.raises(ValueError, match=r"residual: expected shape \(3,\)"):
        kernels.join_master(torch.zeros(3).bfloat16(), torch.zeros(2, dtype=torch.int16), torch.zeros(3))


def _resized(numel: int) -> torch.Tensor:
    gradient = torch.ones(numel)
    gradient.untyped_storage().resize_(0)
    return gradient


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("shape", [(35,), (5, 7), (1, 5, 7)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_that_is_ready_is_taken_as_it_is(shape: tuple[int, ...], dtype: torch.dtype, add: bool) -> None:
    grad = normal(35, 1, dtype).view(shape)
    out, expected = normal(35, 0, torch.float32), normal(35, 0, torch.float32)
    squares = kernels.accumulate(expected, grad.view(-1), add=add)
    assert Sum(out).take(grad, add) == squares and torch.equal(out, expected)


def test_a_gradient_that_must_be_prepared_is_not_taken() -> None:
    grad: torch.Tensor
    for grad in (
        torch.ones(36),
        torch.ones(35, dtype=torch.float64),
        torch.ones(7, 5).t(),
        torch.ones(35).to_sparse(),
        torch.ones(35, requires_grad=True),
        torch.ones(35, dtype=torch.complex64).conj().imag,
        torch.nn.Parameter(torch.ones(35), requires_grad=False),
        torch.ones(35, device="meta"),
        _resized(35),
    ):
        print(type(grad).__name__, grad.dtype, grad.shape)
        out = torch.full((35,), 3.0)
        assert Sum(out).take(grad, False) is None and torch.equal(out, torch.full((35,), 3.0))


# --------------------------------------------------------------------------------------------------
# Splitting a master weight loses nothing, and the weight is the rounded master.


# +0, smallest and largest denormal, smallest normal, 1, tie, odd tie, either side of a tie, largest
# finite, inf; each also negated. The last three are NaNs.
EDGES = [0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001]
EDGES += [0x8000, 0x7FFF, 0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x7F800000]
EDGES += [bits | 0x80000000 for bits in EDGES]
NANS = [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF]


def from_bits(bits: torch.Tensor | list[int]) -> torch.Tensor:
    bits = torch.as_tensor(bits, dtype=torch.int64)
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.empty(master.numel(), dtype=torch.bfloat16)
    residual = torch.empty(master.numel(), dtype=torch.int16)
    kernels.split_master(master, weight, residual)
    return weight, residual


def check(master: torch.Tensor) -> None:
    weight, residual = split(master)
    joined = torch.empty_like(master)
    kernels.join_master(weight, residual, joined)
    nan = master.isnan()
    assert torch.equal(joined.view(torch.int32)[~nan], master.view(torch.int32)[~nan])
    assert (weight.view(torch.int16)[nan] == 0x7FC0).all()
    assert (residual[nan] == 0).all()

    bits = master.view(torch.int32).long() & 0xFFFFFFFF
    weight_bits = weight.view(torch.int16).long() & 0xFFFF
    assert torch.equal(weight_bits[~nan], ((bits + 0x8000) >> 16)[~nan])
    assert torch.equal(residual.long()[~nan], (bits - (weight_bits << 16))[~nan])

    tie = (bits & 0xFFFF) == 0x8000
    plain = ~nan & ~tie
    assert torch.equal(weight.view(torch.int16)[plain], master.bfloat16().view(torch.int16)[plain])


def test_every_weight_with_several_low_halves() -> None:
    high = torch.arange(2**16) << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        check(from_bits(high | low))


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=70))
def test_any_pattern_is_split_exactly(bits: list[int]) -> None:
    check(from_bits(bits))


def test_a_tie_rounds_up_in_the_bit_pattern() -> None:
    weight, residual = split(from_bits([0x3F808000, 0xBF808000]))
    assert (weight.view(torch.int16) & 0x7FFF).tolist() == [0x3F81, 0x3F81]
    assert residual.tolist() == [-0x8000, -0x8000]


@pytest.mark.slow
def test_every_pattern_there_is() -> None:
    """All 2**32: joining what was split gives it back, but NaNs, which stay NaN; the weight is `.to` but at ties."""
    numel = 1 << 24
    offsets = torch.arange(numel, dtype=torch.int32)
    weight, residual = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.int16)
    joined = torch.empty(numel)
    for start in range(-(1 << 31), 1 << 31, numel):
        bits = offsets + start
        master = bits.view(torch.float32)
        kernels.split_master(master, weight, residual)
        kernels.join_master(weight, residual, joined)
        rounded = master.to(torch.bfloat16)
        ties = (bits & 0xFFFF) == 0x8000
        if (bits[-1] & 0x7F80_0000) != 0x7F80_0000:  # the largest exponent of these: none is NaN
            assert torch.equal(joined.view(torch.int32), bits)
            assert torch.equal(weight[~ties].view(torch.int16), rounded[~ties].view(torch.int16))
            continue
        nan = master.isnan()
        assert torch.equal(joined.view(torch.int32)[~nan], bits[~nan]) and joined[nan].isnan().all()
        assert (weight.view(torch.int16)[nan] == 0x7FC0).all() and (residual[nan] == 0).all()
        assert torch.equal(weight[~nan & ~ties], rounded[~nan & ~ties])
