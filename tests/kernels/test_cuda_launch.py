"""Kernels reach CUDA's driver as the driver takes them: called for real, in a libcuda and a libnvrtc of our own.

Those run the kernels as C++ and refuse what the driver refuses, so arguments, grids, contexts, errors and the cache of
compiled kernels are seen without a GPU. What they cannot show is that NVIDIA's driver does the same.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from offload import kernels
from offload.errors import ConfigError
from offload.kernels import AdamWStep, Partition, Segment, cuda
from offload.kernels.cuda import driver
from offload.kernels.cuda import driver as nvrtc
from offload.kernels.cuda import kernels as compiled
from offload.kernels.cuda import kernels as launches
from offload.kernels.cuda import kernels as operations
from offload.kernels.cuda.driver import ADDRESS, FLOAT, INT, Arguments, Signature
from tests.kernels.fake_cuda import COMPILER, FakeCuda, fake_cuda

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

STREAM = 0x7FED_CBA9_8765_4320
STEP = AdamWStep(1e-3, 0.9, 0.999, 1e-8, 0.1, 7, 0.37)
CHUNK = 8192


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    found = fake_cuda()
    found.calls()
    yield found
    found.refuse("", 0)


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


def same(one: Partition, other: Partition) -> bool:
    pairs = zip((one.weight, *one.moments), (other.weight, *other.moments), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def squares(values: torch.Tensor) -> torch.Tensor:
    """What the CPU's kernel makes of the same values."""
    return torch.tensor([kernels.sum_squares(part) for part in values.split(CHUNK)], dtype=torch.float64)


# ---------------------------------------------------------------- launches


def test_a_launch_has_a_thread_for_each_element_and_the_whole_handle_of_the_stream(fake: FakeCuda) -> None:
    segments = [Segment(0, 1, STEP), Segment(3, 259, STEP), Segment(259, 259, STEP), Segment(300, 900, STEP)]
    mine = partition(1000)
    fake.kernels().update(mine, segments, STREAM)
    assert fake.launches() == [(1, 256, STREAM), (1, 256, STREAM), (3, 256, STREAM)]
    assert same(mine, stepped(1000, segments))


def test_sums_have_16_threads_for_each_block_and_a_warp_for_each_chunk(fake: FakeCuda) -> None:
    values = torch.randn(100_000)
    assert torch.equal(fake.kernels().sum_squares(values, CHUNK, STREAM), squares(values))
    # 13 chunks of two blocks of 4096: 26 * 16 threads, then 13 * 32.
    assert fake.launches() == [(2, 256, STREAM), (2, 256, STREAM)]


def test_sums_of_one_block_need_no_second_launch(fake: FakeCuda) -> None:
    values = torch.randn(4096)
    assert torch.equal(fake.kernels().sum_squares(values, CHUNK, STREAM), squares(values))
    assert fake.launches() == [(1, 256, STREAM)]


def test_of_no_elements_nothing_is_launched(fake: FakeCuda) -> None:
    assert fake.kernels().sum_squares(torch.zeros(0), CHUNK, STREAM).shape == (0,)
    fake.kernels().update(partition(8), [Segment(4, 4, STEP)], STREAM)
    assert fake.launches() == []


def test_a_grid_with_fewer_threads_than_there_is_work_does_all_of_it(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "_MOST_BLOCKS", 2)
    mine, segments, values = partition(2000), [Segment(0, 2000, STEP)], torch.randn(300_000)
    fake.kernels().update(mine, segments, STREAM)
    assert same(mine, stepped(2000, segments))
    assert torch.equal(fake.kernels().sum_squares(values, CHUNK, STREAM), squares(values))
    assert [blocks for blocks, _, _ in fake.launches()] == [2, 2, 2]


def test_segments_with_steps_of_their_own_get_their_own_numbers(fake: FakeCuda) -> None:
    steps = [STEP, STEP._replace(lr=0.5), STEP._replace(lr=0.5), STEP._replace(beta1=0.3, step=1), STEP]
    segments = [Segment(at * 100, at * 100 + 90, step) for at, step in enumerate(steps)]
    mine = partition(500)
    fake.kernels().update(mine, segments, STREAM)
    assert same(mine, stepped(500, segments))


def test_launches_are_made_in_the_context_of_their_device_on_any_thread(fake: FakeCuda) -> None:
    """A thread that torch has started has no current context."""
    on_one = fake.kernels(device=1)
    mine, segments = partition(10), [Segment(0, 10, STEP)]
    thread = threading.Thread(target=on_one.update, args=(mine, segments, STREAM))
    thread.start()
    thread.join()
    assert same(mine, stepped(10, segments))
    calls = fake.calls()
    assert "cuDevicePrimaryCtxRetain 41" in calls
    assert calls[-3:] == ["cuCtxPushCurrent 1", f"cuLaunchKernel 1 256 {STREAM:x}", "cuCtxPopCurrent 1"]


def test_threads_that_launch_at_once_do_not_mix_their_arguments(fake: FakeCuda) -> None:
    shared, segments = fake.kernels(), [Segment(at, at + 1, STEP) for at in range(50)]
    mine = [partition(50, seed) for seed in range(4)]
    threads = [threading.Thread(target=shared.update, args=(each, segments, STREAM)) for each in mine]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(each, stepped(50, segments, seed)) for seed, each in enumerate(mine))


def test_arguments_lie_in_memory_as_the_kernel_declares_them() -> None:
    arguments = Arguments(Signature(ADDRESS, FLOAT, INT))
    arguments.set(0xFEDC_BA98_7654_3210, 0.1, -3)
    at = [pointer for pointer in arguments.pointers if pointer is not None]
    assert ctypes.c_uint64.from_address(at[0]).value == 0xFEDC_BA98_7654_3210
    assert ctypes.c_float.from_address(at[1]).value == torch.tensor(0.1).item()
    assert ctypes.c_int32.from_address(at[2]).value == -3
    for wrong in ((1, 0.5, 1.5), (-1, 0.5, 1), (1, 0.5, 1 << 31), (1, 0.5)):
        with pytest.raises(struct.error):
            arguments.set(*wrong)


# ---------------------------------------------------------------- errors


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


def test_a_device_that_is_not_there_is_an_error(fake: FakeCuda) -> None:
    with pytest.raises(RuntimeError, match="cuDeviceGet: CUDA error 101"):
        fake.kernels(device=2)


def test_a_program_that_the_driver_does_not_know_is_an_error(fake: FakeCuda) -> None:
    context = driver.load(str(fake.libcuda)).primary_context(0)
    with pytest.raises(RuntimeError, match=r"cuModuleLoadData: CUDA error 200 \(CUDA_ERROR_INVALID_IMAGE\)"):
        context.load(b"no machine code")


def test_the_log_of_a_failed_compilation_is_in_the_error(fake: FakeCuda) -> None:
    with pytest.raises(ConfigError, match=r"(?s)NVRTC 99\.1 does not compile the kernel wrong .*nowhere"):
        fake.compiler().compile("wrong", "void f() { nowhere(); }", ["--gpu-architecture=sm_90"])


@pytest.mark.sample(1)
@pytest.mark.parametrize(("mask", "lane"), [("0xFFFFu", "threadIdx.x % 32"), ("0xFFFFFFFFu", "16")])
def test_a_shuffle_that_would_hang_or_read_anything_is_found(fake: FakeCuda, mask: str, lane: str) -> None:
    """So the tests of sums would see a wrong mask: threads outside of it, or of which some are gone."""
    source = f"""extern "C" __global__ void wrong(double* out) {{
        if (threadIdx.x < 24) out[0] = __shfl_sync({mask}, 1.0, {lane}, 32);
    }}"""
    image = fake.compiler().compile("wrong", source, ["--gpu-architecture=sm_90"])
    context = driver.load(str(fake.libcuda)).primary_context(0)
    function, arguments, out = (
        context.load(image).function("wrong"),
        Arguments(Signature(ADDRESS)),
        torch.zeros(1).double(),
    )
    arguments.set(out.data_ptr())
    with pytest.raises(RuntimeError, match="CUDA_ERROR_LAUNCH_FAILED"), context:
        function.launch(blocks=1, threads=32, stream=0, arguments=arguments)


# ---------------------------------------------------------------- the cache


def compile_sums(fake: FakeCuda) -> tuple[int, bool]:
    """How often a process that begins now compiles for a first sum, and whether the sum is right."""
    before, values = len(fake.compilations()), torch.randn(5000)
    right = torch.equal(fake.kernels().sum_squares(values, CHUNK, STREAM), squares(values))
    return len(fake.compilations()) - before, right


def test_a_program_is_compiled_once_and_then_taken_from_the_cache(fake: FakeCuda, empty_cache: Path) -> None:
    assert compile_sums(fake) == (1, True)
    assert [file.name[:5] for file in empty_cache.iterdir()] == ["sums-"]
    assert compile_sums(fake) == (0, True)


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


def test_a_folder_that_cannot_be_written_costs_a_compilation_only(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compile_sums(fake) == (1, True)
    assert compile_sums(fake) == (1, True)


def test_another_nvrtc_is_another_program(fake: FakeCuda, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_sums(fake)
    monkeypatch.setenv("FAKE_NVRTC_VERSION", "99.2")
    assert compile_sums(fake) == (1, True)
    assert len(list(empty_cache.iterdir())) == 2


def test_source_and_options_name_the_file() -> None:
    paths = {
        compiled.cache_path(version, "sums", source, options)
        for version in ("12.8", "12.9")
        for source in ("a", "b")
        for options in (["-DGRAD=0"], ["-DGRAD=1"], ["-DGRAD=0", "-DWEIGHT=0"])
    }
    assert len(paths) == 12


# ---------------------------------------------------------------- what is compiled for


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((9, 0), "sm_90"), ((8, 0), "sm_80"), ((8, 9), "compute_80"), ((12, 0), "compute_90"), ((7, 5), "sm_75")],
)
def test_an_unknown_architecture_gets_the_nearest_below_for_the_driver_to_translate(
    capability: tuple[int, int], expected: str
) -> None:
    assert nvrtc.target(capability, (75, 80, 90)) == expected


def test_an_architecture_older_than_all_that_nvrtc_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"compute capability 7\.0, .* 7\.5 or later"):
        nvrtc.target((7, 0), (75, 80, 90))


def test_both_kinds_of_programs_run(fake: FakeCuda, empty_cache: Path) -> None:
    values = torch.randn(5000)
    for capability, kind in (((8, 9), "PTX"), ((9, 0), "cubin")):
        used = fake.kernels(capability=capability)
        assert torch.equal(used.sum_squares(values, CHUNK, STREAM), squares(values))
        assert f"cuModuleLoadData {kind}" in fake.calls()


# ---------------------------------------------------------------- libraries


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


def test_nvrtc_that_is_loaded_already_is_found_by_its_name(fake: FakeCuda) -> None:
    fake.compiler()
    assert nvrtc.load_nvrtc("99.1").architectures == (75, 80, 90)


def test_a_missing_nvrtc_names_the_package_of_cuda_12() -> None:
    with pytest.raises(ConfigError, match=r"need libnvrtc\.so\.7, .*pip install nvidia-cuda-nvrtc-cu7"):
        nvrtc.load_nvrtc("7.5")


def test_a_library_without_a_function_of_nvrtc_is_refused(fake: FakeCuda) -> None:
    with pytest.raises(ConfigError, match="has no nvrtcVersion: kernels on the GPU need NVRTC"):
        nvrtc.Compiler(ctypes.CDLL(str(fake.libcuda)))


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
    load = driver.load
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", {1: (9, 0)}.__getitem__)
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    monkeypatch.setattr(operations.driver, "load", lambda: load(str(fake.libcuda)))
    monkeypatch.setattr(
        torch, "full", lambda shape, value, dtype, device: torch.tensor([value]).repeat(shape).as_subclass(OnCuda)
    )
    fake.compiler()
    operations._kernels.cache_clear()
    yield fake
    operations._kernels.cache_clear()


def test_an_update_of_torchs_tensors_goes_to_torchs_current_stream(second_gpu: FakeCuda) -> None:
    mine, segments = partition(1000), [Segment(0, 1000, STEP)]
    moments = tuple(moment.as_subclass(OnCuda) for moment in mine.moments)
    cuda.update(Partition(mine.weight.as_subclass(OnCuda), mine.grad.as_subclass(OnCuda), moments), segments)
    assert second_gpu.calls()[-3:] == ["cuCtxPushCurrent 1", f"cuLaunchKernel 4 256 {STREAM:x}", "cuCtxPopCurrent 1"]
    assert same(mine, stepped(1000, segments))


def test_a_trial_that_succeeds_gives_no_reason(second_gpu: FakeCuda) -> None:
    assert cuda.why_not(torch.device("cuda", 1)) is None
    assert len(second_gpu.launches()) == 2  # both kernels


def test_a_trial_that_fails_gives_its_reason(second_gpu: FakeCuda) -> None:
    second_gpu.refuse("cuLaunchKernel", 719)
    assert "CUDA_ERROR_LAUNCH_FAILED" in (cuda.why_not(torch.device("cuda", 1)) or "")


def test_a_trial_with_a_wrong_sum_gives_that_as_the_reason(
    second_gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "sum_squares", lambda values, chunk: torch.zeros(1))
    assert cuda.why_not(torch.device("cuda", 1)) == "a trial of the kernels gave 0.0 in place of 36873.0"


def test_rocm_has_no_kernels_and_says_so(second_gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "torch is built for ROCm" in (cuda.why_not(torch.device("cuda", 1)) or "")


def test_other_accelerators_have_no_kernels() -> None:
    assert cuda.why_not(torch.device("xpu", 0)) == "there are no kernels for xpu"
