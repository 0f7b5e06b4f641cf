"""Splitting a master weight loses nothing, and the weight is the rounded master."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import kernels
from tests.support.sampling import examples

pytestmark = pytest.mark.numeric

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


def test_edge_patterns_are_split_exactly() -> None:
    check(from_bits(EDGES + NANS))


def test_every_weight_with_several_low_halves() -> None:
    high = torch.arange(2**16) << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        check(from_bits(high | low))


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=70))
def test_any_pattern_is_split_exactly(bits: list[int]) -> None:
    check(from_bits(bits))


def test_random_patterns_across_threads() -> None:
    check(from_bits(torch.randint(0, 2**32, (100003,), generator=torch.Generator().manual_seed(0))))


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
