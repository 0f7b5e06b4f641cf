"""The kernels of CUDA are compiled, launched and have the CPU's bits, on a stand-in for the driver."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import kernels, testing
from offload.errors import ConfigError
from offload.kernels import AdamWStep, Noise, Partition, Segment, cuda
from offload.kernels.cuda import driver
from offload.kernels.cuda import driver as nvrtc
from offload.kernels.cuda import kernels as operations
from offload.kernels.cuda.kernels import _OPTIONS, BF24, GRADS, MOMENTS, WEIGHTS, Kernels, source
from offload.kernels.update import encode_moments
from tests.support.sampling import examples

SOURCES = Path(__file__).parents[1] / "fake_cuda"
COMPILER = shutil.which("g++") or shutil.which("c++")


@dataclass(frozen=True, kw_only=True)
class FakeCuda:
    libcuda: Path
    libnvrtc: Path

    def kernels(self, *, device: int = 0, capability: tuple[int, int] = (9, 0)) -> Kernels:
        """The kernels of a device, through the real ctypes layer."""
        context = driver.load(str(self.libcuda)).primary_context(device)
        return Kernels(context=context, compiler=self.compiler(), capability=capability)

    def compiler(self) -> nvrtc.Compiler:
        return nvrtc.Compiler(ctypes.CDLL(str(self.libnvrtc)))

    def calls(self) -> list[str]:
        """The calls of the driver since the last time."""
        recorded = ctypes.CDLL(str(self.libcuda)).fake_calls
        recorded.restype = ctypes.c_char_p
        return recorded().decode().splitlines()

    def launches(self) -> list[tuple[int, int, int]]:
        """Blocks, threads and stream of each launch since the last time."""
        rows = (line.split()[1:] for line in self.calls() if line.startswith("cuLaunchKernel"))
        return [(int(blocks), int(threads), int(stream, 16)) for blocks, threads, stream in rows]

    def refuse(self, name: str, result: int) -> None:
        """Lets a function of the driver fail from now on; none, with an empty name."""
        ctypes.CDLL(str(self.libcuda)).fake_refuse(name.encode(), result)

    def compilations(self) -> list[str]:
        """The options of each compilation of this process."""
        recorded = ctypes.CDLL(str(self.libnvrtc)).fake_compilations
        recorded.restype = ctypes.c_char_p
        return recorded().decode().splitlines()


@cache
def fake_cuda() -> FakeCuda:
    """The two libraries, of a CUDA 99, so that they are never taken for real ones."""
    assert COMPILER is not None
    folder = Path(tempfile.mkdtemp(prefix="fake-cuda-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    libraries = FakeCuda(libcuda=folder / "libcuda.so.99", libnvrtc=folder / "libnvrtc.so.99")
    defines = f'-DCOMPILER="{COMPILER}"', f'-DHEADER="{SOURCES / "emulated.h"}"'
    for source_here, library in (("libcuda.cpp", libraries.libcuda), ("libnvrtc.cpp", libraries.libnvrtc)):
        flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
        subprocess.run([COMPILER, *flags, *defines, str(SOURCES / source_here), "-o", str(library), "-ldl"], check=True)
    return libraries


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


def same(left: Partition, right: Partition) -> None:
    pairs = [(left.weight, right.weight), *zip(left.moments, right.moments, strict=True)]
    more = ("residual", "master", "scales")
    pairs += [(getattr(left, name), getattr(right, name)) for name in more if getattr(left, name) is not None]
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


@pytest.mark.sample(1)
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
    content = arrays(numel, weight, grad)
    if master == "bf24":
        content = with_bf24(content)
    if moments == "bf16":
        content = content._replace(moments=tuple(moment.bfloat16() for moment in content.moments))
    return in_blocks(content) if moments == "int8" else content


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


@pytest.mark.sample(2)
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


STREAM = 0x7FED_CBA9_8765_4320
STEP = AdamWStep(1e-3, 0.9, 0.999, 1e-8, 0.1, 7, 0.37)
CHUNK = 8192


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    libraries = fake_cuda()
    libraries.calls()
    yield libraries
    libraries.refuse("", 0)


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of compiled kernels, of a user who has none yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "offload" / "kernels"


def partition(numel: int, seed: int = 0) -> Partition:
    generator = torch.Generator().manual_seed(seed)
    weight, grad, mean, square = torch.randn(4, numel, generator=generator).unbind()
    return Partition(weight.clone(), grad.clone(), (mean.clone(), square.square()))


def stepped(numel: int, segments: list[Segment], seed: int = 0) -> Partition:
    """What the CPU's kernel makes of the same partition."""
    expected = partition(numel, seed)
    kernels.update(expected, segments)
    return expected


def same_launch(left: Partition, right: Partition) -> bool:
    pairs = zip((left.weight, *left.moments), (right.weight, *right.moments), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def squares(values: torch.Tensor) -> torch.Tensor:
    """What the CPU's kernel makes of the same values."""
    return torch.tensor([kernels.sum_squares(part) for part in values.split(CHUNK)], dtype=torch.float64)


# ---------------------------------------------------------------- launches


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_a_launch_has_a_thread_for_each_element_and_the_whole_handle_of_the_stream(fake: FakeCuda) -> None:
    segments = [Segment(0, 1, STEP), Segment(3, 259, STEP), Segment(259, 259, STEP), Segment(300, 900, STEP)]
    mine = partition(1000)
    fake.kernels().update(mine, segments, STREAM)
    assert fake.launches() == [(1, 256, STREAM), (1, 256, STREAM), (3, 256, STREAM)]
    assert same_launch(mine, stepped(1000, segments))


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_sums_have_16_threads_for_each_block_and_a_warp_for_each_chunk(fake: FakeCuda) -> None:
    values = torch.randn(100_000)
    assert torch.equal(fake.kernels().sum_squares(values, CHUNK, STREAM), squares(values))
    # 13 chunks of two blocks of 4096: 26 * 16 threads, then 13 * 32.
    assert fake.launches() == [(2, 256, STREAM), (2, 256, STREAM)]


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_launches_are_made_in_the_context_of_their_device_on_any_thread(fake: FakeCuda) -> None:
    """A thread that torch has started has no current context."""
    on_one = fake.kernels(device=1)
    mine, segments = partition(10), [Segment(0, 10, STEP)]
    thread = threading.Thread(target=on_one.update, args=(mine, segments, STREAM))
    thread.start()
    thread.join()
    assert same_launch(mine, stepped(10, segments))
    calls = fake.calls()
    assert "cuDevicePrimaryCtxRetain 41" in calls
    assert calls[-3:] == ["cuCtxPushCurrent 1", f"cuLaunchKernel 1 256 {STREAM:x}", "cuCtxPopCurrent 1"]


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_threads_that_launch_at_once_do_not_mix_their_arguments(fake: FakeCuda) -> None:
    shared, segments = fake.kernels(), [Segment(at, at + 1, STEP) for at in range(50)]
    mine = [partition(50, seed) for seed in range(4)]
    threads = [threading.Thread(target=shared.update, args=(each, segments, STREAM)) for each in mine]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same_launch(each, stepped(50, segments, seed)) for seed, each in enumerate(mine))


# ---------------------------------------------------------------- errors


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_a_refused_launch_is_an_error_with_cudas_words_and_leaves_no_context(fake: FakeCuda) -> None:
    used = fake.kernels()
    fake.refuse("cuLaunchKernel", 719)
    words = r"cuLaunchKernel: CUDA error 719 \(CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure\)"
    with pytest.raises(RuntimeError, match=words):
        used.update(partition(10), [Segment(0, 10, STEP)], STREAM)
    assert fake.calls()[-1] == "cuCtxPopCurrent 0"
    fake.refuse("cuLaunchKernel", 12345)
    with pytest.raises(RuntimeError, match=r"CUDA error 12345 \(without a name\)"):
        used.sum_squares(torch.ones(8), CHUNK, STREAM)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_a_device_that_is_not_there_is_an_error(fake: FakeCuda) -> None:
    with pytest.raises(RuntimeError, match="cuDeviceGet: CUDA error 101"):
        fake.kernels(device=2)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_the_log_of_a_failed_compilation_is_in_the_error(fake: FakeCuda) -> None:
    with pytest.raises(ConfigError, match=r"(?s)NVRTC 99\.1 does not compile the kernel wrong .*nowhere"):
        fake.compiler().compile("wrong", "void f() { nowhere(); }", ["--gpu-architecture=sm_90"])


# ---------------------------------------------------------------- the cache


def compile_sums(fake: FakeCuda) -> tuple[int, bool]:
    """How often a process that begins now compiles for a first sum, and whether the sum is right."""
    before, values = len(fake.compilations()), torch.randn(5000)
    right = torch.equal(fake.kernels().sum_squares(values, CHUNK, STREAM), squares(values))
    return len(fake.compilations()) - before, right


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_a_program_is_compiled_once_and_then_taken_from_the_cache(fake: FakeCuda, empty_cache: Path) -> None:
    assert compile_sums(fake) == (1, True)
    assert [file.name[:5] for file in empty_cache.iterdir()] == ["sums-"]
    assert compile_sums(fake) == (0, True)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.sample(1)
@pytest.mark.parametrize("damage", ["cut", "bit", "other json", "no json", "no base64", "empty"])
def test_a_damaged_file_of_the_cache_is_compiled_again(fake: FakeCuda, empty_cache: Path, damage: str) -> None:
    compile_sums(fake)
    (file,) = empty_cache.iterdir()
    content = json.loads(file.read_text())
    image = content["image"]
    flipped = image[:400] + ("A" if image[400] != "A" else "B") + image[401:]
    texts = {
        "cut": file.read_text()[:-100],
        "bit": json.dumps(content | {"image": flipped}),
        "other json": "[]",
        "no json": "{",
        "no base64": json.dumps(content | {"image": "%"}),
        "empty": "",
    }
    file.write_text(texts[damage])
    assert compile_sums(fake) == (1, True)
    assert json.loads(file.read_text()) == content
    assert compile_sums(fake) == (0, True)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_a_folder_that_cannot_be_written_costs_a_compilation_only(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compile_sums(fake) == (1, True)
    assert compile_sums(fake) == (1, True)


# ---------------------------------------------------------------- what is compiled for


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("capability", "expected"),
    [((9, 0), "sm_90"), ((8, 0), "sm_80"), ((8, 9), "compute_80"), ((12, 0), "compute_90"), ((7, 5), "sm_75")],
)
def test_an_unknown_architecture_gets_the_nearest_below_for_the_driver_to_translate(
    capability: tuple[int, int], expected: str
) -> None:
    assert nvrtc.target(capability, (75, 80, 90)) == expected


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_both_kinds_of_programs_run(fake: FakeCuda, empty_cache: Path) -> None:
    values = torch.randn(5000)
    for capability, kind in (((8, 9), "PTX"), ((9, 0), "cubin")):
        used = fake.kernels(capability=capability)
        assert torch.equal(used.sum_squares(values, CHUNK, STREAM), squares(values))
        assert f"cuModuleLoadData {kind}" in fake.calls()


# ---------------------------------------------------------------- libraries


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_nvrtc_is_found_in_the_packages_that_torch_brings(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CUDA 13 has one folder for all of its packages; up to 12 each package has its own; some wheels contain it."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert torch.__spec__ is not None
    monkeypatch.setattr(torch.__spec__, "submodule_search_locations", [str(tmp_path / "torch")])
    for major, folder in (("98", "nvidia/cuda_nvrtc/lib"), ("97", "nvidia/cu97/lib"), ("96", "torch/lib")):
        with pytest.raises(
            ConfigError, match=rf"need libnvrtc\.so\.{major}, .*pip install 'nvidia-cuda-nvrtc>={major},<"
        ):
            nvrtc.load_nvrtc(f"{major}.4")
        place = tmp_path / folder
        place.mkdir(parents=True)
        shutil.copy(fake.libnvrtc, place / f"libnvrtc.so.{major}")
        assert nvrtc.load_nvrtc(f"{major}.4").version == "99.1"


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_a_library_without_a_function_of_nvrtc_is_refused(fake: FakeCuda) -> None:
    with pytest.raises(ConfigError, match="has no nvrtcVersion: kernels on the GPU need NVRTC"):
        nvrtc.Compiler(ctypes.CDLL(str(fake.libcuda)))


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_a_missing_driver_is_an_error() -> None:
    with pytest.raises(ConfigError, match="the library of NVIDIA's driver: libcuda-that-is-not-there"):
        driver.load("libcuda-that-is-not-there.so.1")


# ---------------------------------------------------------------- tensors of torch


class OnCuda(torch.Tensor):
    """A tensor in memory of the CPU that says it is on the second GPU."""

    is_cuda = True
    device = torch.device("cuda", 1)


@pytest.fixture
def second_gpu(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """torch as it is with two GPUs, of which the second one's current stream is `STREAM`."""
    streams = {torch.device("cuda", 1): SimpleNamespace(cuda_stream=STREAM)}
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", {1: (9, 0)}.__getitem__)
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    testing.intercept(monkeypatch, "kernel.driver", lambda load: load(str(fake.libcuda)))
    monkeypatch.setattr(
        torch, "full", lambda shape, value, dtype, device: torch.tensor([value]).repeat(shape).as_subclass(OnCuda)
    )
    fake.compiler()
    operations._kernels.cache_clear()
    yield fake
    operations._kernels.cache_clear()


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_an_update_of_torchs_tensors_goes_to_torchs_current_stream(second_gpu: FakeCuda) -> None:
    mine, segments = partition(1000), [Segment(0, 1000, STEP)]
    moments = tuple(moment.as_subclass(OnCuda) for moment in mine.moments)
    cuda.update(Partition(mine.weight.as_subclass(OnCuda), mine.grad.as_subclass(OnCuda), moments), segments)
    assert second_gpu.calls()[-3:] == ["cuCtxPushCurrent 1", f"cuLaunchKernel 4 256 {STREAM:x}", "cuCtxPopCurrent 1"]
    assert same_launch(mine, stepped(1000, segments))


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_a_trial_that_fails_gives_its_reason(second_gpu: FakeCuda) -> None:
    second_gpu.refuse("cuLaunchKernel", 719)
    assert "CUDA_ERROR_LAUNCH_FAILED" in (cuda.why_not(torch.device("cuda", 1)) or "")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_a_trial_with_a_wrong_sum_gives_that_as_the_reason(
    second_gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    testing.replace(monkeypatch, "kernel.sum_squares", lambda values, chunk: torch.zeros(1))
    assert cuda.why_not(torch.device("cuda", 1)) == "a trial of the kernels gave 0.0 in place of 36873.0"


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_rocm_has_no_kernels_and_says_so(second_gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "torch is built for ROCm" in (cuda.why_not(torch.device("cuda", 1)) or "")


ARCHITECTURES = (75, 80, 90, 120)
EXPECTED = {
    "adamw": {"add.rn.f32", "sub.rn.f32", "mul.rn.f32", "div.rn.f32", "sqrt.rn.f32"},
    "sums": {"add.rn.f64", "fma.rn.f64"},
}
ENTRIES = {"adamw": {"adamw"}, "sums": {"block_sums", "chunk_sums"}}
NVRTC_ROUNDED = re.compile(r"(add|sub|mul|div|sqrt)\.rn\.f(32|64)")
# A square of a float is exact in double, so it may be fused with an addition in double, which then rounds alone.
EXACT = {"adamw": set(), "sums": {"fma.rn.f64"}}


def find_nvrtc() -> driver.Compiler | None:
    """That of the wheel that the tests install."""
    try:
        return driver.load_nvrtc("12")
    except ConfigError:
        return None


NVRTC = find_nvrtc()


def compiled_nvrtc(source: str, *options: str) -> bytes:
    """What the driver would load; a `ConfigError` with the compiler's words where it takes none."""
    assert NVRTC is not None, "nvidia-cuda-nvrtc-cu12 is of the tests' packages: run make again"
    return NVRTC.compile("kernel", source, options)


def ptx(source: str, *options: str) -> str:
    """The assembly of `source`."""
    return compiled_nvrtc(source, *options).rstrip(b"\0").decode()


def arithmetic(assembly: str) -> set[str]:
    """The operations on floats that may round: "fma.rn.f32"."""
    return set(re.findall(r"\b((?:fma|mad|mul|add|sub|div|sqrt|rsqrt|rcp|ex2|lg2)\.[a-z.]*f(?:16|32|64))\b", assembly))


def variants(program: str) -> Iterator[tuple[str, ...]]:
    """Of a step each weight with each form of the moments, and any two of a weight, a gradient and moments meet."""
    types = [(0, grad, 0) for grad in GRADS.values()]
    if program == "adamw":
        states = itertools.product((*WEIGHTS.values(), BF24), MOMENTS.values())
        types = [(weight, (weight + moment) % len(GRADS), moment) for weight, moment in states]
    for weight, grad, moment in types:
        yield (*_OPTIONS, f"-DWEIGHT={weight}", f"-DGRAD={grad}", f"-DMOMENT={moment}")


@pytest.mark.skipif(NVRTC is None and sys.platform != "linux", reason="NVRTC is there for Linux alone")
@pytest.mark.sample(1)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("program", EXPECTED)
def test_it_compiles_and_rounds_each_operation_once(program: str, architecture: int) -> None:
    for options in variants(program):
        assembly = ptx(source(program), *options, f"--gpu-architecture=compute_{architecture}")
        assert set(re.findall(r"\.entry (\w+)\(", assembly)) == ENTRIES[program]
        operations = arithmetic(assembly)
        assert operations >= EXPECTED[program]
        assert all(NVRTC_ROUNDED.fullmatch(operation) for operation in operations - EXACT[program])


@pytest.mark.skipif(NVRTC is None and sys.platform != "linux", reason="NVRTC is there for Linux alone")
@pytest.mark.parametrize("program", EXPECTED)
def test_for_an_architecture_that_it_knows_it_gives_machine_code(program: str) -> None:
    assert NVRTC is not None
    options = *next(variants(program)), f"--gpu-architecture={driver.target((9, 0), NVRTC.architectures)}"
    image = compiled_nvrtc(source(program), *options)
    assert image.startswith(b"\x7fELF")
    assert all(f".text.{entry}".encode() in image for entry in ENTRIES[program])


@pytest.mark.skipif(NVRTC is None and sys.platform != "linux", reason="NVRTC is there for Linux alone")
def test_the_words_of_the_compiler_are_in_the_error() -> None:
    with pytest.raises(ConfigError, match=r"does not compile the kernel kernel \(--fmad=false.*\n.*undefined"):
        compiled_nvrtc('extern "C" __global__ void f(float *a) { a[0] = nowhere; }', "--fmad=false")
