"""NVIDIA's own compiler takes the CUDA kernels and rounds each operation as the CPU does; this needs no GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import re
import sys
from pathlib import Path

import pytest

from offload.kernels import cuda

ARCHITECTURES = (75, 80, 90, 120)
EXPECTED = {
    "adamw": {"add.rn.f32", "sub.rn.f32", "mul.rn.f32", "div.rn.f32", "sqrt.rn.f32"},
    "block_sums": {"add.rn.f64", "mul.rn.f64"},
    "chunk_sums": {"add.rn.f64"},
}
ROUNDED = re.compile(r"(add|sub|mul|div|sqrt)\.rn\.f(32|64)")
CONTRACTED = 'extern "C" __global__ void f(float *a) { a[0] = a[0] * a[1] + a[2]; }'


def find_nvrtc() -> Path | None:
    """The library of the wheel that the tests install."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else spec.submodule_search_locations or []
    found = (file for folder in folders for file in Path(folder).glob("cuda_nvrtc/lib/libnvrtc.so.*"))
    return next((file for file in found if file.suffix[1:].isdigit()), None)


NVRTC = find_nvrtc()
pytestmark = pytest.mark.skipif(NVRTC is None and sys.platform != "linux", reason="NVRTC is there for Linux alone")


def ptx(source: str, *options: str) -> str:
    """The assembly of `source`; an assertion with the compiler's words where it takes none."""
    assert NVRTC is not None, "nvidia-cuda-nvrtc-cu12 is of the tests' packages: run make again"
    nvrtc, program, size = ctypes.CDLL(str(NVRTC)), ctypes.c_void_p(), ctypes.c_size_t()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None) == 0
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
    size_of, text_of = ("ProgramLogSize", "ProgramLog") if failed else ("PTXSize", "PTX")
    assert getattr(nvrtc, f"nvrtcGet{size_of}")(program, ctypes.byref(size)) == 0
    text = ctypes.create_string_buffer(size.value)
    assert getattr(nvrtc, f"nvrtcGet{text_of}")(program, text) == 0
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    assert not failed, text.value.decode()
    return text.value.decode()


def arithmetic(assembly: str) -> set[str]:
    """The operations on floats that may round: "fma.rn.f32"."""
    return set(re.findall(r"\b((?:fma|mad|mul|add|sub|div|sqrt|rsqrt|rcp|ex2|lg2)\.[a-z.]*f(?:16|32|64))\b", assembly))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", ["adamw", "block_sums", "chunk_sums"])
def test_it_compiles_and_rounds_each_operation_once(name: str, architecture: int) -> None:
    weights = cuda.WEIGHTS.values() if name == "adamw" else (0,)
    for weight, grad in itertools.product(weights, cuda.GRADS.values()):
        defines = f"-DWEIGHT={weight}", f"-DGRAD={grad}"
        assembly = ptx(cuda.source(name), *cuda._OPTIONS, *defines, f"--gpu-architecture=compute_{architecture}")
        assert f".entry {name}(" in assembly
        found = arithmetic(assembly)
        assert found >= EXPECTED[name] and all(ROUNDED.fullmatch(operation) for operation in found)


def test_what_it_looks_for_would_be_found() -> None:
    assert "fma.rn.f32" in arithmetic(ptx(CONTRACTED, "--gpu-architecture=compute_90"))
    assert "fma.rn.f32" not in arithmetic(ptx(CONTRACTED, *cuda._OPTIONS, "--gpu-architecture=compute_90"))
