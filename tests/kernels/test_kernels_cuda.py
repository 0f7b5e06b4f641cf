"""The CUDA kernel has the bits of the CPU's: compiled as C++ where there is no GPU, itself where there is one."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import kernels
from offload.kernels import AdamWStep, Noise, Partition, Segment, cuda
from offload.kernels.cuda.kernels import GRADS, WEIGHTS, Kernels
from offload.kernels.update import encode_moments
from tests.kernels.fake_cuda import COMPILER, fake_cuda
from tests.support.sampling import examples

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

STEPS = [
    AdamWStep(1e-3, 0.9, 0.999, 1e-8, 0.1, 7, 0.37),
    AdamWStep(1e-3, 0.9, 0.999, 1e-8, 0.1, 1, 1.0, False),
    AdamWStep(1e-2, 0.3, 0.95, 1e-6, 0.0, 10**6, 0.5, False),
]


def arrays(numel: int, weight_dtype: torch.dtype, grad_dtype: torch.dtype) -> Partition:
    generator = torch.Generator().manual_seed(0)

    def values(scale: float) -> torch.Tensor:
        spread = 10.0 ** torch.randint(-6, 3, (numel,), generator=generator)
        return torch.randn(numel, generator=generator) * scale * spread

    master, grad = values(1.0), values(0.1).to(grad_dtype)
    grad[::97] = float("inf")
    grad[5::101] = float("nan")
    moments = values(0.01), values(0.01).square()
    if weight_dtype is torch.bfloat16:
        weight, residual = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.int16)
        kernels.split_master(master, weight, residual)
        return Partition(weight, grad, moments, residual=residual)
    if weight_dtype is torch.float16:
        return Partition(master.half(), grad, moments, master=master)
    return Partition(master, grad, moments)


def on(partition: Partition, device: str) -> Partition:
    def move(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(device, copy=True)

    moments = tuple(move(moment) for moment in partition.moments)
    return partition._replace(
        weight=move(partition.weight),
        grad=move(partition.grad),
        moments=moments,
        residual=move(partition.residual),
        master=move(partition.master),
        scales=move(partition.scales),
    )


def same(one: Partition, other: Partition) -> None:
    pairs = [(one.weight, other.weight), *zip(one.moments, other.moments, strict=True)]
    more = ("residual", "master", "scales")
    pairs += [(getattr(one, name), getattr(other, name)) for name in more if getattr(one, name) is not None]
    for a, b in pairs:
        a, b = (tensor.cpu().float().numpy() for tensor in (a, b))
        np.testing.assert_array_equal(a, b)
        assert (np.signbit(a) == np.signbit(b))[~np.isnan(a)].all()


def sums_on_the_cpu(values: torch.Tensor, chunk: int) -> torch.Tensor:
    parts = (values[start : start + chunk] for start in range(0, len(values), chunk))
    return torch.tensor([kernels.sum_squares(part) for part in parts], dtype=torch.float64)


@cache
def fake_kernels() -> Kernels:
    """The kernels as C++, launched as on a GPU."""
    return fake_cuda().kernels()


@pytest.fixture
def cpp() -> Kernels:
    return fake_kernels()


CASES = list(itertools.product(WEIGHTS, GRADS))


@pytest.mark.sample(2)
@needs_compiler
@pytest.mark.parametrize(("weight_dtype", "grad_dtype"), CASES)
def test_its_arithmetic_is_that_of_the_cpu(cpp: Kernels, weight_dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    for step in STEPS:
        mine = arrays(5000, weight_dtype, grad_dtype)
        theirs = on(mine, "cpu")
        segments = [Segment(0, 3000, step), Segment(3000, 3000, step), Segment(3001, 5000, step._replace(lr=0.5))]
        cpp.update(mine, segments, 0)
        kernels.update(theirs, segments)
        same(mine, theirs)


def in_blocks(partition: Partition) -> Partition:
    """The moments in 8 bits. Blocks of zeros, of tiny values, and with inf are among them."""
    first, second = (moment.clone() for moment in partition.moments)
    for moment in (first, second):
        moment[256:512] = 0.0
        moment[512:768] *= 1e-38
        moment[1024] = float("inf")
    codes = torch.empty(len(first), dtype=torch.int8), torch.empty(len(first), dtype=torch.uint8)
    scales = torch.empty(-(-len(first) // 256), 2)
    for number, (values, code) in enumerate(zip((first, second), codes, strict=True)):
        encode_moments(values, code, scales, number)
    return partition._replace(moments=codes, scales=scales)


def with_bf24(partition: Partition) -> Partition:
    """The master with 8 low bits."""
    assert partition.residual is not None
    return partition._replace(residual=(partition.residual >> 8).to(torch.int8))


def in_form(numel: int, weight: torch.dtype, grad: torch.dtype, master: str, moments: str) -> Partition:
    found = arrays(numel, weight, grad)
    if master == "bf24":
        found = with_bf24(found)
    if moments == "bf16":
        found = found._replace(moments=tuple(moment.bfloat16() for moment in found.moments))
    return in_blocks(found) if moments == "int8" else found


ROUNDED = [
    (weight, master, moments)
    for weight, master in [*((weight, "fp32") for weight in WEIGHTS), (torch.bfloat16, "bf24")]
    for moments in ("fp32", "bf16", "int8")
    if (master, moments) != ("fp32", "fp32")
]
NOISES = [Noise(77, 0), Noise(78, (1 << 32) - 1280)]
SEGMENTS = [(0, 2900), (3072, 3072), (3328, 5001)]


def segments_of(step: AdamWStep, noise: Noise) -> list[Segment]:
    """Of whole blocks, but for their ends. A segment is launched in two parts where an element's number is 2**32."""
    first, empty, last = SEGMENTS
    return [
        Segment(*first, step, noise),
        Segment(*empty, step, noise.after(empty[0])),
        Segment(*last, step._replace(lr=0.5), noise.after(last[0])),
    ]


@pytest.mark.sample(4)
@needs_compiler
@pytest.mark.parametrize(("weight", "master", "moments"), ROUNDED)
def test_what_is_rounded_stochastically_has_the_bits_of_the_cpu(
    cpp: Kernels, weight: torch.dtype, master: str, moments: str
) -> None:
    for step, noise in zip(STEPS, itertools.cycle(NOISES)):
        mine = in_form(5001, weight, torch.bfloat16, master, moments)
        theirs = on(mine, "cpu")
        cpp.update(mine, segments_of(step, noise), 0)
        kernels.update(theirs, segments_of(step, noise))
        same(mine, theirs)


# The last ones have chunks of more than 32 blocks, which a warp reads at a time.
SIZES = [(1, 4096), (15, 4096), (4096, 4096), (4097, 4096), (100_003, 8192), (100_003, 1000), (30_000, 30_000)]
SIZES += [(33 * 4096, 1 << 22), (600_001, 300_000)]


def spread(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Values whose squares do not add up to the same in another order."""
    generator = torch.Generator().manual_seed(numel)
    scale = 10.0 ** torch.randint(-3, 4, (numel,), generator=generator)
    return (torch.randn(numel, generator=generator) * scale).to(dtype)


@pytest.mark.sample(5)
@needs_compiler
@pytest.mark.parametrize("dtype", GRADS)
@pytest.mark.parametrize(("numel", "chunk"), SIZES)
def test_its_sums_of_squares_are_those_of_the_cpu(cpp: Kernels, numel: int, chunk: int, dtype: torch.dtype) -> None:
    values = spread(numel, dtype)
    assert torch.equal(cpp.sum_squares(values, chunk, 0), sums_on_the_cpu(values, chunk))
    for wrong in (torch.inf, torch.nan):
        values[numel // 2] = wrong
        sums, expected = cpp.sum_squares(values, chunk, 0), sums_on_the_cpu(values, chunk)
        assert torch.equal(sums.isfinite(), expected.isfinite()) and not sums.isfinite().all()


@needs_compiler
@settings(deadline=None, max_examples=examples(150), derandomize=True)
@given(
    numel=st.one_of(st.integers(0, 300), st.integers(0, 40_000), st.integers(130_000, 400_000)),
    chunk=st.one_of(st.integers(1, 64), st.integers(65, 50_000), st.integers(130_000, 400_000)),
    dtype=st.sampled_from(list(GRADS)),
)
def test_sums_of_any_length_in_any_chunks_have_the_bits_of_the_cpu(numel: int, chunk: int, dtype: torch.dtype) -> None:
    """Half warps without a block, lanes without an element, blocks beyond the end of the last chunk."""
    chunk = max(chunk, numel // 300)  # a warp for each chunk is slow here
    values = spread(numel, dtype)
    expected = sums_on_the_cpu(values, min(chunk, max(numel, 1)))
    assert torch.equal(fake_kernels().sum_squares(values, chunk, 0), expected if numel else torch.zeros(0).double())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GRADS)
def test_on_a_gpu_sums_of_squares_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    for numel, chunk in [*SIZES, (9_000_000, 1 << 22)]:
        values = spread(numel, dtype)
        sums = cuda.sum_squares(values.cuda(), chunk)
        assert sums.is_cuda and torch.equal(sums.cpu(), sums_on_the_cpu(values, chunk))


def test_sums_want_a_tensor_on_a_gpu() -> None:
    with pytest.raises(ValueError, match="on a CUDA device"):
        cuda.sum_squares(torch.zeros(8), 4096)


@pytest.mark.gpu
@pytest.mark.parametrize(("weight_dtype", "grad_dtype"), CASES)
def test_on_a_gpu_it_has_the_bits_of_the_cpu(weight_dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    numel = 1_000_003
    for step in STEPS:
        mine = arrays(numel, weight_dtype, grad_dtype)
        theirs = on(mine, "cuda")
        segments = [Segment(0, 77, step), Segment(77, 500_000, step._replace(lr=0.5)), Segment(600_000, numel, step)]
        kernels.update(mine, segments)
        cuda.update(theirs, segments)
        same(mine, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize(("weight", "master", "moments"), ROUNDED)
def test_on_a_gpu_what_is_rounded_stochastically_has_the_bits_of_the_cpu(
    weight: torch.dtype, master: str, moments: str
) -> None:
    for step, noise in itertools.product(STEPS, NOISES):
        mine = in_form(1_000_003, weight, torch.bfloat16, master, moments)
        theirs = on(mine, "cuda")
        segments = [*segments_of(step, noise), Segment(8192, 1_000_003, step, noise.after(8192))]
        kernels.update(mine, segments)
        cuda.update(theirs, segments)
        same(mine, theirs)


@pytest.mark.gpu
def test_wrong_tensors_on_a_gpu() -> None:
    partition = on(arrays(8, torch.float32, torch.float32), "cuda")
    with pytest.raises(ValueError, match="CUDA device"):
        cuda.update(partition._replace(grad=partition.grad.cpu()), [])


def test_without_a_gpu_the_error_names_the_need() -> None:
    with pytest.raises(ValueError, match="a CUDA device"):
        cuda.update(arrays(8, torch.float32, torch.float32), [])
