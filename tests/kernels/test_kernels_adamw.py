"""Each kernel is its formula: AdamW, LAMB, sums of gradients, blocks of codes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import kernels, testing
from offload.kernels import AdamWStep, LambSegment, LambStep, Partition, _native, blocks
from offload.kernels.blocks import BLOCK_FORMATS, NF4, BlockFormat
from offload.kernels.lamb import BLOCK
from offload.layout.frozen import write_blocks
from tests.support import rounding_bounds
from tests.support.kernel_inputs import ISAS, default_settings, normal
from tests.support.sampling import examples

pytestmark = pytest.mark.numeric

ODD_SIZES = [0, 1, 17, 33, 4097, 100003]


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


def arguments(numel: int = 8) -> dict[str, torch.Tensor]:
    return {
        "weight": torch.zeros(numel, dtype=torch.bfloat16),
        "residual": torch.zeros(numel, dtype=torch.int16),
        "exp_avg": torch.zeros(numel),
        "exp_avg_sq": torch.zeros(numel),
        "grad": torch.zeros(numel),
    }


STEP = AdamWStep(1e-3, 0.9, 0.999, 1e-8, 0.0, 1)


def test_a_wrong_tensor_is_refused_by_name() -> None:
    for name in ("weight", "residual", "exp_avg", "exp_avg_sq", "grad"):
        print(name)
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


__all__ = ["default_settings"]  # fixtures

LAMB_STEP = LambStep(1e-2, 0.9, 0.99, 1e-6, 0.1, 3, 0.5)


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


@pytest.mark.sample(6)
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
    kernels.lamb(part, [LambSegment(0, numel, LAMB_STEP)])
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
    kernels.lamb(uncut, [LambSegment(0, numel, LAMB_STEP)])
    _native.configure(isa, threads)
    parts = arrays(numel, torch.bfloat16, torch.bfloat16)
    edges = [0, BLOCK, 10 * BLOCK, 24 * BLOCK, numel]
    views = [
        Partition(
            parts.weight[a:b], parts.grad[a:b], tuple(moment[a:b] for moment in parts.moments), parts.residual[a:b]
        )
        for a, b in itertools.pairwise(edges)
    ]
    segments = [[LambSegment(0, view.weight.numel(), LAMB_STEP)] for view in views]
    sums = [kernels.lamb_moments(view, each)[0] for view, each in zip(views, segments, strict=True)]
    ratio = kernels.lamb_ratio(LAMB_STEP, sums)
    for view, segment in zip(views, segments, strict=True):
        kernels.lamb_move(view, segment, [ratio])
    assert torch.equal(uncut.weight, parts.weight) and torch.equal(uncut.residual, parts.residual)
    assert all(torch.equal(one, other) for one, other in zip(uncut.moments, parts.moments, strict=True))


def test_each_parameter_has_its_ratio() -> None:
    part = arrays(20_000)
    small = part._replace(weight=part.weight.clone())
    small.weight[:8000] *= 1e-3
    before = small.weight.clone()
    kernels.lamb(small, [LambSegment(0, 8000, LAMB_STEP._replace(min_ratio=0.0)), LambSegment(9000, 20_000, LAMB_STEP)])
    moved = (small.weight - before).abs()
    assert moved[:8000].mean() < 1e-2 * moved[9000:].mean() and not moved[8000:9000].any()


def test_bad_input_is_refused() -> None:
    part = arrays(8)
    with pytest.raises(ValueError, match="within 8 elements"):
        kernels.lamb(part, [LambSegment(0, 9, LAMB_STEP)])
    for turned in (
        [LambSegment(4, 8, LAMB_STEP), LambSegment(0, 4, LAMB_STEP)],
        [LambSegment(0, 5, LAMB_STEP), LambSegment(4, 8, LAMB_STEP)],
    ):
        for call in (kernels.lamb, kernels.lamb_moments, lambda p, s: kernels.lamb_move(p, s, [1.0, 1.0])):
            with pytest.raises(ValueError, match="in order"):
                call(part, turned)
    with pytest.raises(ValueError, match="from 1"):
        kernels.lamb(part, [LambSegment(0, 8, LAMB_STEP._replace(step=0))])
    with pytest.raises(TypeError, match=r"moments\[0\]"):
        kernels.lamb(part._replace(moments=tuple(m.half() for m in part.moments)), [LambSegment(0, 8, LAMB_STEP)])


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMATS = tuple(BLOCK_FORMATS.values())
NUMEL = 150_001  # five chunks of the team, the last block of one value


def stored(form: BlockFormat, values: torch.Tensor) -> torch.Tensor:
    codes = torch.full((form.stored_nbytes(len(values)),), 0xA5, dtype=torch.uint8)
    blocks.quantize(form, values, codes)
    return codes


def values_of(form: BlockFormat, codes: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.full((numel,), float("nan"), dtype=dtype)
    blocks.dequantize(form, codes[: form.stored_nbytes(numel)], values)
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
    values = normal(NUMEL, 5) * 10.0 ** torch.randint(-4, 3, (NUMEL,), generator=generator)
    values[256:512] = 0
    values[512:768] = 1e-40
    values[1024:1280] = torch.arange(256) / 254  # ties of int8
    return values.to(dtype)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bytes_are_those_of_the_formula(dtype: torch.dtype, form: BlockFormat) -> None:
    values = numbers(dtype)
    for numel in (1, form.values - 1, form.values, NUMEL):
        assert torch.equal(stored(form, values[:numel]), by_formula(form, values[:numel]))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_products_rounded_once(dtype: torch.dtype, form: BlockFormat) -> None:
    blocks_stored = stored(form, numbers(torch.bfloat16))
    rows = blocks_stored.view(-1, form.nbytes)
    scale = rows[:, -2:].contiguous().view(torch.bfloat16).float()
    codes = rows[:, :-2]
    if form.name == "nf4":
        values = torch.tensor(NF4)[torch.stack((codes >> 4, codes & 15), 2).flatten(1).long()] * scale
    else:
        values = codes.view(torch.int8).float() * (scale * torch.tensor(1 / 127))
    for numel in (1, form.values - 1, form.values, NUMEL):
        assert torch.equal(values_of(form, blocks_stored, numel, dtype), values.flatten()[:numel].to(dtype))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set_and_number_of_threads_gives_the_same_bits(dtype: torch.dtype, form: BlockFormat) -> None:
    values = numbers(dtype)
    results = set()
    for isa in ISAS:
        for threads in (1, 3):
            _native.configure(isa, threads)
            codes = stored(form, values)
            back = values_of(form, codes, NUMEL, dtype)
            results.add((codes.numpy().tobytes(), back.view(torch.uint8).numpy().tobytes()))
    assert len(results) == 1


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_accelerator_makes_the_same_values(
    dtype: torch.dtype, form: BlockFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code is torch's operations, which a CPU runs as well."""
    testing.replace(monkeypatch, "size.device_blocks", 100)
    codes = stored(form, numbers(torch.float32))
    values = torch.full((NUMEL,), float("nan"), dtype=dtype)
    blocks._dequantize_by_torch(form, codes, values)
    assert torch.equal(values, values_of(form, codes, NUMEL, dtype))


def with_what_is_no_number(dtype: torch.dtype) -> torch.Tensor:
    """Returns `numbers` with an inf, a NaN, and the largest finite value, which rounds up in bf16."""
    values = numbers(dtype)
    values[2000], values[3000], values[4000] = float("inf"), float("nan"), torch.finfo(dtype).max
    return values


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_accelerator_makes_the_same_codes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of int8 alone, which ranks send each other. A block that is NaN may have any codes."""
    testing.replace(monkeypatch, "size.device_blocks", 100)
    form, values = BLOCK_FORMATS["int8"], with_what_is_no_number(dtype)
    codes = torch.full((form.stored_nbytes(NUMEL),), 0xA5, dtype=torch.uint8)
    blocks._quantize_by_torch(form, values, codes)
    same_codes(codes, stored(form, values))


def same_codes(codes: torch.Tensor, expected: torch.Tensor) -> None:
    form = BLOCK_FORMATS["int8"]
    numel = len(codes) // form.nbytes * form.values
    left, right = (values_of(form, each, numel, torch.float32) for each in (codes, expected))
    assert torch.equal(left.nan_to_num(0.5), right.nan_to_num(0.5)) and 128 < int(left.isnan().sum()) <= 384
    sound = ~left.view(-1, form.values)[:, 0].isnan()
    assert torch.equal(codes.view(-1, form.nbytes)[sound], expected.view(-1, form.nbytes)[sound])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_makes_the_same_codes(dtype: torch.dtype) -> None:
    form, values = BLOCK_FORMATS["int8"], with_what_is_no_number(dtype)
    codes = torch.empty(form.stored_nbytes(NUMEL), dtype=torch.uint8, device="cuda")
    blocks.quantize(form, values.cuda(), codes)
    same_codes(codes.cpu(), stored(form, values))


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_makes_the_same_values(dtype: torch.dtype, form: BlockFormat) -> None:
    codes = stored(form, numbers(torch.float32))
    values = torch.full((NUMEL,), float("nan"), dtype=dtype, device="cuda")
    blocks.dequantize(form, codes.cuda(), values)
    assert torch.equal(values.cpu(), values_of(form, codes, NUMEL, dtype))


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


def test_wrong_tensors_are_refused() -> None:
    form = BLOCK_FORMATS["nf4"]
    with pytest.raises(ValueError, match=r"blocks: expected shape \(34,\), got \(33,\)"):
        blocks.quantize(form, torch.zeros(64), torch.zeros(33, dtype=torch.uint8))
    with pytest.raises(TypeError, match="values: expected a tensor of"):
        blocks.dequantize(form, torch.zeros(34, dtype=torch.uint8), torch.zeros(64, dtype=torch.float64))
