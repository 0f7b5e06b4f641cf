"""Blocks of codes are those of their formula, and give the same values on every processor and device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.kernels import _native, blocks
from offload.kernels.blocks import BLOCK_FORMATS, NF4, BlockFormat
from offload.layout.frozen import write_blocks
from tests.support.kernel_inputs import ISAS, default_settings, normal
from tests.support.sampling import examples

__all__ = ["default_settings"]  # fixtures

pytestmark = pytest.mark.numeric

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMATS = tuple(BLOCK_FORMATS.values())
NUMEL = 150_001  # five chunks of the team, the last block of one value


def stored(form: BlockFormat, values: torch.Tensor) -> torch.Tensor:
    found = torch.full((form.stored_nbytes(len(values)),), 0xA5, dtype=torch.uint8)
    blocks.quantize(form, values, found)
    return found


def values_of(form: BlockFormat, found: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.full((numel,), float("nan"), dtype=dtype)
    blocks.dequantize(form, found[: form.stored_nbytes(numel)], values)
    return values


def by_formula(form: BlockFormat, values: torch.Tensor) -> torch.Tensor:
    """The bytes of `values`, by torch's operations."""
    whole = torch.zeros(-(-len(values) // form.values) * form.values)
    whole[: len(values)] = values.float()
    rows = whole.view(-1, form.values)
    scale = rows.abs().amax(1, keepdim=True).bfloat16()
    share = torch.where(scale.float() > 0, rows / scale.float(), 0.0)
    if form.name == "nf4":
        book = torch.tensor(NF4)
        codes = torch.bucketize(share, (book[1:] + book[:-1]) / 2).to(torch.uint8)
        codes = codes[:, ::2] << 4 | codes[:, 1::2]
    else:
        codes = (share * 127).clamp(-127, 127).round().to(torch.int8).view(torch.uint8)
    return torch.cat((codes, scale.view(torch.uint8)), 1).flatten()


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers of many sizes, with a block of zeros, ties, and a block of denormals."""
    generator = torch.Generator().manual_seed(7)
    found = normal(NUMEL, 5) * 10.0 ** torch.randint(-4, 3, (NUMEL,), generator=generator)
    found[256:512] = 0
    found[512:768] = 1e-40
    found[1024:1280] = torch.arange(256) / 254  # ties of int8
    return found.to(dtype)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bytes_are_those_of_the_formula(dtype: torch.dtype, form: BlockFormat) -> None:
    values = numbers(dtype)
    for numel in (1, form.values - 1, form.values, NUMEL):
        assert torch.equal(stored(form, values[:numel]), by_formula(form, values[:numel]))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_products_rounded_once(dtype: torch.dtype, form: BlockFormat) -> None:
    found = stored(form, numbers(torch.bfloat16))
    rows = found.view(-1, form.nbytes)
    scale = rows[:, -2:].contiguous().view(torch.bfloat16).float()
    codes = rows[:, :-2]
    if form.name == "nf4":
        values = torch.tensor(NF4)[torch.stack((codes >> 4, codes & 15), 2).flatten(1).long()] * scale
    else:
        values = codes.view(torch.int8).float() * (scale * torch.tensor(1 / 127))
    for numel in (1, form.values - 1, form.values, NUMEL):
        assert torch.equal(values_of(form, found, numel, dtype), values.flatten()[:numel].to(dtype))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set_and_number_of_threads_gives_the_same_bits(dtype: torch.dtype, form: BlockFormat) -> None:
    values = numbers(dtype)
    results = set()
    for isa in ISAS:
        for threads in (1, 3):
            _native.configure(isa, threads)
            found = stored(form, values)
            back = values_of(form, found, NUMEL, dtype)
            results.add((found.numpy().tobytes(), back.view(torch.uint8).numpy().tobytes()))
    assert len(results) == 1


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_accelerator_makes_the_same_values(
    dtype: torch.dtype, form: BlockFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code is torch's operations, which a CPU runs as well."""
    monkeypatch.setattr(blocks, "_DEVICE_BLOCKS", 100)
    found = stored(form, numbers(torch.float32))
    values = torch.full((NUMEL,), float("nan"), dtype=dtype)
    blocks._dequantize_by_torch(form, found, values)
    assert torch.equal(values, values_of(form, found, NUMEL, dtype))


def with_what_is_no_number(dtype: torch.dtype) -> torch.Tensor:
    """Returns `numbers` with an inf, a NaN, and the largest finite value, which rounds up in bf16."""
    values = numbers(dtype)
    values[2000], values[3000], values[4000] = float("inf"), float("nan"), torch.finfo(dtype).max
    return values


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_accelerator_makes_the_same_codes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of int8 alone, which ranks send each other. A block that is NaN may have any codes."""
    monkeypatch.setattr(blocks, "_DEVICE_BLOCKS", 100)
    form, values = BLOCK_FORMATS["int8"], with_what_is_no_number(dtype)
    found = torch.full((form.stored_nbytes(NUMEL),), 0xA5, dtype=torch.uint8)
    blocks._quantize_by_torch(form, values, found)
    same_codes(found, stored(form, values))


def same_codes(found: torch.Tensor, expected: torch.Tensor) -> None:
    form = BLOCK_FORMATS["int8"]
    numel = len(found) // form.nbytes * form.values
    one, other = (values_of(form, each, numel, torch.float32) for each in (found, expected))
    assert torch.equal(one.nan_to_num(0.5), other.nan_to_num(0.5)) and 128 < int(one.isnan().sum()) <= 384
    sound = ~one.view(-1, form.values)[:, 0].isnan()
    assert torch.equal(found.view(-1, form.nbytes)[sound], expected.view(-1, form.nbytes)[sound])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_makes_the_same_codes(dtype: torch.dtype) -> None:
    form, values = BLOCK_FORMATS["int8"], with_what_is_no_number(dtype)
    found = torch.empty(form.stored_nbytes(NUMEL), dtype=torch.uint8, device="cuda")
    blocks.quantize(form, values.cuda(), found)
    same_codes(found.cpu(), stored(form, values))


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_makes_the_same_values(dtype: torch.dtype, form: BlockFormat) -> None:
    found = stored(form, numbers(torch.float32))
    values = torch.full((NUMEL,), float("nan"), dtype=dtype, device="cuda")
    blocks.dequantize(form, found.cuda(), values)
    assert torch.equal(values.cpu(), values_of(form, found, NUMEL, dtype))


@given(st.integers(1, 400), st.integers(0, 2**31), st.sampled_from(FORMATS))
@settings(max_examples=examples(60), deadline=None)
def test_the_error_of_a_value_is_at_most_half_a_gap_of_its_codes(numel: int, seed: int, form: BlockFormat) -> None:
    values = normal(numel, seed)
    back = values_of(form, stored(form, values), numel, torch.float32)
    # The widest gap, between -1 and the next code of nf4, is 0.304 of the scale. A scale is rounded to 8 bits.
    gap = (0.3038072 if form.name == "nf4" else 1 / 127) / 2 + 2**-8
    for start in range(0, numel, form.values):
        part = slice(start, start + form.values)
        assert (values[part] - back[part]).abs().max() <= gap * values[part].abs().max() * (1 + 2**-8)


def test_codes_of_codes_are_the_same_codes() -> None:
    """A model that was dequantized and is quantized again stays as it is."""
    for form in FORMATS:
        found = stored(form, numbers(torch.float32))
        values = values_of(form, found, NUMEL, torch.float32)
        assert torch.equal(values_of(form, stored(form, values), NUMEL, torch.float32), values)


@given(st.lists(st.integers(0, 300), max_size=8), st.sampled_from(FORMATS), st.sampled_from(DTYPES))
@settings(max_examples=examples(60), deadline=None)
def test_values_that_come_in_pieces_make_the_same_bytes(cuts: list[int], form: BlockFormat, dtype: torch.dtype) -> None:
    values = normal(sum(cuts), 3).to(dtype)
    whole = torch.zeros(form.stored_nbytes(len(values)), dtype=torch.uint8)
    write_blocks(form.name, values.split(cuts) if cuts else (), whole)
    assert torch.equal(whole, by_formula(form, values))


@pytest.mark.parametrize("wrong", [float("inf"), float("-inf"), float("nan")])
def test_a_block_with_a_number_that_is_not_finite_becomes_nan(wrong: float) -> None:
    for form in FORMATS:
        values = normal(3 * form.values, 1)
        values[form.values + 5] = wrong
        back = values_of(form, stored(form, values), len(values), torch.float32)
        assert back[form.values : 2 * form.values].isnan().any()
        assert back[: form.values].isfinite().all() and back[2 * form.values :].isfinite().all()


def test_the_largest_numbers_stay_finite() -> None:
    for form in FORMATS:
        values = torch.full((form.values,), torch.finfo(torch.float32).max)
        assert values_of(form, stored(form, values), len(values), torch.float32).isfinite().all()


def test_wrong_tensors_are_refused() -> None:
    form = BLOCK_FORMATS["nf4"]
    with pytest.raises(ValueError, match=r"blocks: expected shape \(34,\), got \(33,\)"):
        blocks.quantize(form, torch.zeros(64), torch.zeros(33, dtype=torch.uint8))
    with pytest.raises(TypeError, match="values: expected a tensor of"):
        blocks.dequantize(form, torch.zeros(34, dtype=torch.uint8), torch.zeros(64, dtype=torch.float64))
