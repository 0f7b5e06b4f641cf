"""The CUDA kernel has the bits of the CPU's: compiled as C++ where there is no GPU, itself where there is one."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from offload import kernels
from offload.errors import ConfigError
from offload.kernels import AdamWStep, Partition, Segment, cuda

COMPILER = shutil.which("g++") or shutil.which("c++")
STEPS = [
    AdamWStep(1e-3, 0.9, 0.999, 1e-8, 0.1, 7, 0.37),
    AdamWStep(1e-3, 0.9, 0.999, 1e-8, 0.1, 1, 1.0, False),
    AdamWStep(1e-2, 0.3, 0.95, 1e-6, 0.0, 10**6, 0.5, False),
]
SHIM = """
#include <cmath>
#include <cstring>
#define __device__
#define __forceinline__ inline
#define __global__
struct Index { unsigned x; };
static Index blockIdx{0}, threadIdx{0}, blockDim{1}, gridDim{1};
static inline float __uint_as_float(unsigned bits) { float f; std::memcpy(&f, &bits, 4); return f; }
static inline unsigned __float_as_uint(float f) { unsigned bits; std::memcpy(&bits, &f, 4); return bits; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return std::sqrt(a); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
"""


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
    return Partition(
        move(partition.weight), move(partition.grad), moments, move(partition.residual), move(partition.master)
    )


def same(one: Partition, other: Partition) -> None:
    pairs = [(one.weight, other.weight), *zip(one.moments, other.moments, strict=True)]
    pairs += [(a, b) for a, b in ((one.residual, other.residual), (one.master, other.master)) if a is not None]
    for a, b in pairs:
        a, b = (tensor.cpu().float().numpy() for tensor in (a, b))
        np.testing.assert_array_equal(a, b)
        assert (np.signbit(a) == np.signbit(b))[~np.isnan(a)].all()


def compiled(folder: Path, name: str, weight: int, grad: int) -> ctypes.CDLL:
    """The source of a kernel as C++."""
    library = folder / f"{name}{weight}{grad}.so"
    if not library.exists():
        source = folder / f"{name}.cpp"
        source.write_text(SHIM + cuda.source(name))
        assert COMPILER is not None
        flags = ["-O2", "-ffp-contract=off", "-shared", "-fPIC", f"-DWEIGHT={weight}", f"-DGRAD={grad}"]
        subprocess.run([COMPILER, *flags, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def sums_as_cpp(folder: Path, values: torch.Tensor, chunk: int) -> torch.Tensor:
    """`cuda.sum_squares`, each kernel as one block of one thread."""
    library = compiled(folder, "block_sums", 0, cuda.GRADS[values.dtype])
    chunks, of_chunk = -(-len(values) // chunk), -(-chunk // cuda.BLOCK)
    sums, totals = torch.empty(chunks * of_chunk, dtype=torch.float64), torch.empty(chunks, dtype=torch.float64)
    many, pointer = ctypes.c_ulonglong, ctypes.c_void_p
    library.block_sums(pointer(values.data_ptr()), pointer(sums.data_ptr()), many(len(values)), many(chunk))
    library.chunk_sums(pointer(sums.data_ptr()), pointer(totals.data_ptr()), many(chunks), many(of_chunk))
    return totals


def sums_on_the_cpu(values: torch.Tensor, chunk: int) -> torch.Tensor:
    parts = (values[start : start + chunk] for start in range(0, len(values), chunk))
    return torch.tensor([kernels.sum_squares(part) for part in parts], dtype=torch.float64)


def run_as_cpp(folder: Path, partition: Partition, step: AdamWStep) -> None:
    """The kernel, as one block of one thread."""
    library = compiled(folder, "adamw", cuda.WEIGHTS[partition.weight.dtype], cuda.GRADS[partition.grad.dtype])
    beside = partition.residual if partition.residual is not None else partition.master
    tensors = (partition.weight, beside, *partition.moments, partition.grad)
    addresses = [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors]
    scalars = cuda.Scalars.of(step)
    numbers = [ctypes.c_float(value) for value in scalars.numbers] + [ctypes.c_int(value) for value in scalars.choices]
    library.adamw(*addresses, ctypes.c_ulonglong(partition.weight.numel()), *numbers)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cuda")


CASES = list(itertools.product(cuda.WEIGHTS, cuda.GRADS))


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize(("weight_dtype", "grad_dtype"), CASES)
def test_its_arithmetic_is_that_of_the_cpu(folder: Path, weight_dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    for step in STEPS:
        mine = arrays(5000, weight_dtype, grad_dtype)
        theirs = on(mine, "cpu")
        run_as_cpp(folder, mine, step)
        kernels.update(theirs, [Segment(0, 5000, step)])
        same(mine, theirs)


SIZES = [(1, 4096), (15, 4096), (4096, 4096), (4097, 4096), (100_003, 8192), (100_003, 1000), (30_000, 30_000)]


def spread(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Values whose squares do not add up to the same in another order."""
    generator = torch.Generator().manual_seed(numel)
    scale = 10.0 ** torch.randint(-3, 4, (numel,), generator=generator)
    return (torch.randn(numel, generator=generator) * scale).to(dtype)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", cuda.GRADS)
@pytest.mark.parametrize(("numel", "chunk"), SIZES)
def test_its_sums_of_squares_are_those_of_the_cpu(folder: Path, numel: int, chunk: int, dtype: torch.dtype) -> None:
    values = spread(numel, dtype)
    assert torch.equal(sums_as_cpp(folder, values, chunk), sums_on_the_cpu(values, chunk))
    for wrong in (torch.inf, torch.nan):
        values[numel // 2] = wrong
        sums, expected = sums_as_cpp(folder, values, chunk), sums_on_the_cpu(values, chunk)
        assert torch.equal(sums.isfinite(), expected.isfinite()) and not sums.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", cuda.GRADS)
def test_on_a_gpu_sums_of_squares_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    pytest.importorskip("cupy")
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
    pytest.importorskip("cupy")
    numel = 1_000_003
    for step in STEPS:
        mine = arrays(numel, weight_dtype, grad_dtype)
        theirs = on(mine, "cuda")
        segments = [Segment(0, 77, step), Segment(77, 500_000, step._replace(lr=0.5)), Segment(600_000, numel, step)]
        kernels.update(mine, segments)
        cuda.update(theirs, segments)
        same(mine, theirs)


@pytest.mark.gpu
def test_wrong_tensors_on_a_gpu() -> None:
    pytest.importorskip("cupy")
    partition = on(arrays(8, torch.float32, torch.float32), "cuda")
    with pytest.raises(ValueError, match="CUDA device"):
        cuda.update(partition._replace(grad=partition.grad.cpu()), [])


def test_without_a_gpu_the_error_names_the_need() -> None:
    with pytest.raises(ValueError, match="a CUDA device"):
        cuda.update(arrays(8, torch.float32, torch.float32), [])


def test_without_cupy_the_error_names_the_package() -> None:
    try:
        import cupy  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match="cuda12"):
            cuda._cupy()
    else:
        pytest.skip("CuPy is installed")
